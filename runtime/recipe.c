/* recipe.c - binds and launches recipes; recipe_validate.c makes them safe to interpret.
 *
 * A field gets its value from its source:
 *
 *   bind     constants, weight pointers, strides of the weights, scaling, tensor maps  -> struct recipe_block, once per layer
 *   launch   x, logits or ids and weights, out, workspace, tokens, strides of the call -> a copy of the block on the stack, once per call
 *
 * Both go through field_value(), which fetches a 64-bit value, and field_write(), which narrows it. Nothing here allocates device memory or waits. */
#include "recipe.h"

#include <math.h>
#include <string.h>

/* What the sources of one bind or launch resolve to. */
struct values {
  const struct mf_weights *weights; /* NULL at launch */
  int64_t w13_row_stride, w2_row_stride;
  float routed_scaling;
  const struct mf_call *call; /* NULL at bind */
  int64_t x_stride, logits_stride, out_stride, ids_stride, weights_stride, shared_gate_stride;
};

static int64_t pointer_value(const void *pointer)
{
  return (int64_t)(uintptr_t)pointer;
}

static int64_t float_bits(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

/* The multiplier of a stride: 0 stands for 1. */
static int64_t scaled(int64_t stride, int64_t factor)
{
  return factor == 0 ? stride : stride * factor;
}

static int64_t field_value(const struct mf_recipe_field *field, const struct values *v)
{
  switch((enum mf_source)field->source) {
    case MF_SRC_CONST: return field->value;
    case MF_SRC_TENSOR_MAP: return 0; /* written by bind_map() */
    case MF_SRC_W13: return pointer_value(v->weights->w13);
    case MF_SRC_S13: return pointer_value(v->weights->s13);
    case MF_SRC_W2: return pointer_value(v->weights->w2);
    case MF_SRC_S2: return pointer_value(v->weights->s2);
    case MF_SRC_BIAS: return pointer_value(v->weights->bias);
    case MF_SRC_W13_ROW_STRIDE: return scaled(v->w13_row_stride, field->value);
    case MF_SRC_W2_ROW_STRIDE: return scaled(v->w2_row_stride, field->value);
    case MF_SRC_ROUTED_SCALING: return float_bits(v->routed_scaling);
    case MF_SRC_X: return pointer_value(v->call->x);
    case MF_SRC_LOGITS: return pointer_value(v->call->logits);
    case MF_SRC_OUT: return pointer_value(v->call->out);
    case MF_SRC_WORKSPACE: return pointer_value(v->call->workspace);
    case MF_SRC_TOKENS: return v->call->tokens;
    case MF_SRC_X_STRIDE: return scaled(v->x_stride, field->value);
    case MF_SRC_LOGITS_STRIDE: return scaled(v->logits_stride, field->value);
    case MF_SRC_OUT_STRIDE: return scaled(v->out_stride, field->value);
    case MF_SRC_IDS: return pointer_value(v->call->ids);
    case MF_SRC_WEIGHTS: return pointer_value(v->call->weights);
    case MF_SRC_IDS_STRIDE: return scaled(v->ids_stride, field->value);
    case MF_SRC_WEIGHTS_STRIDE: return scaled(v->weights_stride, field->value);
    case MF_SRC_SHARED_GATE: return pointer_value(v->call->shared_gate);
    case MF_SRC_SHARED_GATE_STRIDE: return scaled(v->shared_gate_stride, field->value);
  }
  return 0;
}

static int is_stride(uint32_t source)
{
  return source == MF_SRC_W13_ROW_STRIDE || source == MF_SRC_W2_ROW_STRIDE || (source >= MF_SRC_X_STRIDE && source <= MF_SRC_OUT_STRIDE) ||
         source == MF_SRC_IDS_STRIDE || source == MF_SRC_WEIGHTS_STRIDE || source == MF_SRC_SHARED_GATE_STRIDE;
}

/* Writes one field. A stride that a 4-byte field cannot hold is MF_MISS_LAYOUT. */
static enum mf_status field_write(const struct mf_recipe_field *field, const struct values *v, unsigned char *block)
{
  const int64_t value = field_value(field, v);
  const uint32_t low = (uint32_t)value;
  if(field->size == 4 && is_stride(field->source) && value > INT32_MAX)
    return MF_MISS_LAYOUT;
  memcpy(block + field->offset, field->size == 4 ? (const void *)&low : (const void *)&value, field->size);
  return MF_OK;
}

/* Writes the fields of one phase: those fixed for a layer, or those of a call. */
static enum mf_status fields_write(const struct mf_recipe *recipe, const struct values *v, unsigned char *block)
{
  for(uint32_t i = 0; i < recipe->nfields; i++) {
    const struct mf_recipe_field *field = &recipe->fields[i];
    const int per_call = field->source >= MF_SRC_FIRST_PER_CALL;
    if(field->source == MF_SRC_TENSOR_MAP || per_call != (v->call != NULL))
      continue;
    if(field_write(field, v, block) != MF_OK)
      return MF_MISS_LAYOUT;
  }
  return MF_OK;
}

/* ---- bind ---- */
static CUtensorMapSwizzle swizzle_code(uint32_t bytes)
{
  switch(bytes) {
    case 32: return CU_TENSOR_MAP_SWIZZLE_32B;
    case 64: return CU_TENSOR_MAP_SWIZZLE_64B;
    case 128: return CU_TENSOR_MAP_SWIZZLE_128B;
    default: return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

static CUtensorMapL2promotion promotion_code(uint32_t bytes)
{
  switch(bytes) {
    case 64: return CU_TENSOR_MAP_L2_PROMOTION_L2_64B;
    case 128: return CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    case 256: return CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    default: return CU_TENSOR_MAP_L2_PROMOTION_NONE;
  }
}

/* Bytes of a map's stride; 0 if it would overflow. */
static uint64_t stride_bytes(const struct mf_recipe_stride *stride, const struct values *v)
{
  const uint64_t elements = (uint64_t)(stride->source == MF_SRC_W13_ROW_STRIDE ? v->w13_row_stride : v->w2_row_stride);
  if(stride->source == MF_SRC_CONST)
    return stride->value;
  return stride->value > UINT64_MAX / elements ? 0 : elements * stride->value;
}

/* Encodes one tensor map of bytes: not interleaved, zero fill outside. */
static enum mf_status bind_map(const struct cuda_api *api, const struct mf_recipe_map *map, const struct values *v, unsigned char *out)
{
  const void *base = map->base == MF_SRC_W13 ? v->weights->w13 : v->weights->w2;
  const cuuint32_t element_stride[5] = {1, 1, 1, 1, 1};
  cuuint64_t dim[5] = {0}, stride[4] = {0};
  CUtensorMap encoded;
  CUresult cr;
  for(uint32_t i = 0; i < map->rank; i++)
    dim[i] = map->dim[i];
  for(uint32_t i = 0; i + 1 < map->rank; i++) {
    stride[i] = stride_bytes(&map->stride[i], v);
    if(stride[i] == 0 || stride[i] % 16 != 0 || stride[i] >= (uint64_t)1 << 40)
      return MF_MISS_LAYOUT;
  }
  cr = api->p_cuTensorMapEncodeTiled(&encoded, CU_TENSOR_MAP_DATA_TYPE_UINT8, map->rank, (void *)(uintptr_t)base, dim, stride, map->box, element_stride,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_code(map->swizzle), promotion_code(map->promotion),
                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if(cr != CUDA_SUCCESS)
    return cr == CUDA_ERROR_INVALID_VALUE ? MF_MISS_LAYOUT : MF_ERR_DEVICE;
  memcpy(out, &encoded, sizeof(encoded));
  return MF_OK;
}

static enum mf_status check_weights(const struct mf_problem *problem, const struct mf_weights *w)
{
  const uintptr_t aligned = (uintptr_t)w->w13 | (uintptr_t)w->w2 | (uintptr_t)w->s13 | (uintptr_t)w->bias;
  if(w->w13 == NULL || w->w2 == NULL || w->s13 == NULL || w->s2 == NULL || (problem->select_bias && w->bias == NULL))
    return MF_ERR_USAGE;
  if((w->w13_row_stride != 0 && w->w13_row_stride < problem->hidden) || (w->w2_row_stride != 0 && w->w2_row_stride < problem->intermediate))
    return MF_ERR_USAGE;
  if(w->w13_row_stride > (int64_t)1 << 40 || w->w2_row_stride > (int64_t)1 << 40 || !isfinite(w->routed_scaling))
    return MF_ERR_USAGE;
  return aligned % 16 != 0 || (uintptr_t)w->s2 % 4 != 0 ? MF_MISS_LAYOUT : MF_OK;
}

enum mf_status recipe_bind(const struct cuda_api *api, const struct mf_recipe *recipe, const struct mf_problem *problem, const struct mf_weights *weights,
                           struct recipe_block *out)
{
  const struct values v = {.weights = weights,
                           .w13_row_stride = weights->w13_row_stride != 0 ? weights->w13_row_stride : problem->hidden,
                           .w2_row_stride = weights->w2_row_stride != 0 ? weights->w2_row_stride : problem->intermediate,
                           .routed_scaling = weights->routed_scaling != 0 ? weights->routed_scaling : 1.0f};
  enum mf_status rc = check_weights(problem, weights);
  memset(out, 0, sizeof(*out));
  if(rc == MF_OK)
    rc = fields_write(recipe, &v, out->bytes);
  for(uint32_t i = 0; rc == MF_OK && i < recipe->nfields; i++)
    if(recipe->fields[i].source == MF_SRC_TENSOR_MAP)
      rc = bind_map(api, &recipe->maps[recipe->fields[i].value], &v, out->bytes + recipe->fields[i].offset);
  return rc;
}

/* ---- load ---- */
static enum mf_status load_status(CUresult cr)
{
  switch(cr) {
    case CUDA_SUCCESS: return MF_OK;
    case CUDA_ERROR_OUT_OF_MEMORY: return MF_ERR_NOMEM;
    case CUDA_ERROR_NO_BINARY_FOR_GPU: return MF_MISS_DEVICE;
    case CUDA_ERROR_NOT_FOUND:
    case CUDA_ERROR_INVALID_IMAGE: return MF_ERR_CORRUPT;
    default: return MF_ERR_DEVICE;
  }
}

enum mf_status recipe_load_module(const struct cuda_api *api, const void *cubin, CUmodule *module)
{
  return load_status(api->p_cuModuleLoadData(module, cubin));
}

/* Does the driver know the kernel's parameters by the sizes that the recipe gives them? A launch hands over nothing but addresses, so that of a larger
 * parameter the driver would read what lies behind the argument block. Drivers that cannot tell are believed (package_file.c has asked the cubin). */
static int params_agree(const struct cuda_api *api, const struct mf_recipe *recipe, CUfunction function)
{
  for(uint32_t i = 0; api->p_cuFuncGetParamInfo != NULL && i <= recipe->nparams; i++) {
    size_t offset = 0, size = 0;
    const CUresult cr = api->p_cuFuncGetParamInfo(function, i, &offset, &size);
    if(cr != CUDA_SUCCESS && cr != CUDA_ERROR_INVALID_VALUE)
      return 1;
    if((cr == CUDA_SUCCESS) != (i < recipe->nparams) || (i < recipe->nparams && size != recipe->params[i].size))
      return 0;
  }
  return 1;
}

enum mf_status recipe_get_function(const struct cuda_api *api, const struct mf_recipe *recipe, CUmodule module, uint32_t shared_bytes, CUfunction *function)
{
  const CUresult cr = api->p_cuModuleGetFunction(function, module, recipe->kernel);
  if(cr != CUDA_SUCCESS)
    return load_status(cr);
  if(!params_agree(api, recipe, *function))
    return MF_ERR_CORRUPT;
  switch(api->p_cuFuncSetAttribute(*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared_bytes)) {
    case CUDA_SUCCESS: return MF_OK;
    case CUDA_ERROR_INVALID_VALUE: return MF_MISS_DEVICE; /* this GPU has less shared memory than the kernel needs */
    default: return MF_ERR_DEVICE;
  }
}

enum mf_status recipe_load(const struct cuda_api *api, const struct mf_recipe *recipe, const void *cubin, CUmodule *module, CUfunction *function)
{
  enum mf_status rc = recipe_load_module(api, cubin, module);
  if(rc != MF_OK)
    return rc;
  rc = recipe_get_function(api, recipe, *module, recipe->shared_bytes, function);
  if(rc != MF_OK)
    api->p_cuModuleUnload(*module);
  return rc;
}

/* ---- launch ---- */
static int overlap(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes)
{
  const uintptr_t pa = (uintptr_t)a, pb = (uintptr_t)b;
  return pa < pb + (uintptr_t)b_bytes && pb < pa + (uintptr_t)a_bytes;
}

static int shared_experts(const struct mf_problem *problem)
{
  return problem->shared_experts & ~MF_SHARED_GATED;
}

/* Gates of the shared experts, if they have any. */
static enum mf_status check_gate(const struct mf_problem *problem, const struct mf_call *call, const struct values *v)
{
  const uintptr_t size = problem->logits_dtype == MF_DTYPE_F32 ? 4 : 2;
  if((problem->shared_experts & MF_SHARED_GATED) == 0)
    return MF_OK;
  if(call->shared_gate == NULL || v->shared_gate_stride < shared_experts(problem))
    return MF_ERR_USAGE;
  return (uintptr_t)call->shared_gate % size != 0 || v->shared_gate_stride > INT32_MAX ? MF_MISS_LAYOUT : MF_OK;
}

/* What selects the experts: logits, or ids and weights. */
static enum mf_status check_routing(const struct mf_problem *problem, const struct mf_call *call, const struct values *v)
{
  const int64_t logit_bytes = problem->logits_dtype == MF_DTYPE_F32 ? 4 : 2;
  if(problem->score == MF_SCORE_GIVEN) {
    if(call->ids == NULL || call->weights == NULL || v->ids_stride < problem->top_k || v->weights_stride < problem->top_k)
      return MF_ERR_USAGE;
    if(v->ids_stride > INT32_MAX || v->weights_stride > INT32_MAX)
      return MF_MISS_LAYOUT;
    return ((uintptr_t)call->ids | (uintptr_t)call->weights) % 4 != 0 ? MF_MISS_LAYOUT : MF_OK;
  }
  if(call->logits == NULL || v->logits_stride < problem->experts + problem->zero_experts)
    return MF_ERR_USAGE;
  if(v->logits_stride > INT32_MAX || (uintptr_t)call->logits % 16 != 0)
    return MF_MISS_LAYOUT;
  return call->tokens > 1 && v->logits_stride * logit_bytes % 16 != 0 ? MF_MISS_LAYOUT : MF_OK;
}

/* Row strides matter from the second row on. */
static enum mf_status check_call(const struct mf_recipe *recipe, const struct mf_problem *problem, const struct mf_call *call, const struct values *v)
{
  const int64_t rows = call->tokens - 1;
  enum mf_status rc;
  if((uint32_t)call->tokens < recipe->tokens_min || (uint32_t)call->tokens > recipe->tokens_max)
    return MF_MISS_TOKENS;
  if(call->x == NULL || call->out == NULL || call->workspace == NULL || (uintptr_t)call->workspace % 256 != 0)
    return MF_ERR_USAGE;
  if(v->x_stride < problem->hidden || v->out_stride < problem->hidden)
    return MF_ERR_USAGE;
  if(v->x_stride > INT32_MAX || v->out_stride > INT32_MAX)
    return MF_MISS_LAYOUT;
  if(rows * v->x_stride + problem->hidden > UINT32_MAX) /* kernels count elements of x in 32 bits */
    return MF_MISS_LAYOUT;
  if(overlap(call->x, 2 * (rows * v->x_stride + problem->hidden), call->out, 2 * (rows * v->out_stride + problem->hidden)))
    return MF_ERR_USAGE;
  if((uintptr_t)call->x % 16 != 0 || (uintptr_t)call->out % 2 != 0 || (rows > 0 && v->x_stride * 2 % 16 != 0))
    return MF_MISS_LAYOUT;
  rc = check_routing(problem, call, v);
  return rc == MF_OK ? check_gate(problem, call, v) : rc;
}

/* The launch attributes that the recipe's flags ask for; returns their number. */
static unsigned int launch_attributes(const struct mf_recipe *recipe, CUlaunchAttribute out[2])
{
  unsigned int count = 0;
  memset(out, 0, 2 * sizeof(out[0]));
  if(recipe->flags & MF_RECIPE_COOPERATIVE) {
    out[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    out[count++].value.cooperative = 1;
  }
  if(recipe->flags & MF_RECIPE_PDL) {
    out[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    out[count++].value.programmaticStreamSerializationAllowed = 1;
  }
  return count;
}

enum mf_status recipe_launch(const struct cuda_api *api, const struct mf_recipe *recipe, CUfunction function, const struct recipe_block *block,
                             const struct mf_problem *problem, const struct mf_call *call, CUstream stream, CUresult *cuda_result)
{
  const int64_t experts = problem->experts + problem->zero_experts;
  const struct values v = {.call = call,
                           .x_stride = call->x_stride != 0 ? call->x_stride : problem->hidden,
                           .logits_stride = call->logits_stride != 0 ? call->logits_stride : experts,
                           .out_stride = call->out_stride != 0 ? call->out_stride : problem->hidden,
                           .ids_stride = call->ids_stride != 0 ? call->ids_stride : problem->top_k,
                           .weights_stride = call->weights_stride != 0 ? call->weights_stride : problem->top_k,
                           .shared_gate_stride = call->shared_gate_stride != 0 ? call->shared_gate_stride : shared_experts(problem)};
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config = {.gridDimX = recipe->grid[0], .gridDimY = recipe->grid[1], .gridDimZ = recipe->grid[2],
                           .blockDimX = recipe->block[0], .blockDimY = recipe->block[1], .blockDimZ = recipe->block[2],
                           .sharedMemBytes = recipe->shared_bytes, .hStream = stream, .attrs = attributes};
  struct recipe_block patched;
  void *params[MF_RECIPE_MAX_PARAMS];
  enum mf_status rc;
  CUresult cr;
  if(cuda_result != NULL)
    *cuda_result = CUDA_SUCCESS;
  if(call->tokens <= 0)
    return call->tokens == 0 ? MF_OK : MF_ERR_USAGE;
  rc = check_call(recipe, problem, call, &v);
  if(rc != MF_OK)
    return rc;
  memcpy(patched.bytes, block->bytes, recipe->block_bytes);
  rc = fields_write(recipe, &v, patched.bytes);
  if(rc != MF_OK)
    return rc;
  for(uint32_t i = 0; i < MF_RECIPE_MAX_PARAMS; i++)
    params[i] = patched.bytes + (i < recipe->nparams ? recipe->params[i].offset : 0);
  config.numAttrs = launch_attributes(recipe, attributes);
  cr = api->p_cuLaunchKernelEx(&config, function, params, NULL);
  if(cuda_result != NULL)
    *cuda_result = cr;
  return cr == CUDA_SUCCESS ? MF_OK : cr == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE ? MF_MISS_SMS : MF_ERR_DEVICE;
}

enum mf_status recipe_workspace_init(const struct cuda_api *api, const struct mf_recipe *recipe, void *workspace, CUstream stream)
{
  if(workspace == NULL || (uintptr_t)workspace % 256 != 0)
    return MF_ERR_USAGE;
  if(recipe->workspace_zero_bytes == 0)
    return MF_OK;
  return api->p_cuMemsetD8Async((CUdeviceptr)(uintptr_t)workspace, 0, recipe->workspace_zero_bytes, stream) == CUDA_SUCCESS ? MF_OK : MF_ERR_DEVICE;
}
