/* test_recipe.c - recipes: binding (every tensor map parameter), launching (every argument byte), against the scripted driver. (Hostile bytes: test_recipe_validate.c.) */
#include "fake_libcuda.h"
#include "recipe.h"
#include "recipe_fixture.h"

#include <check.h>
#include <math.h>
#include <stddef.h>

/* ---- with the scripted driver ---- */
static struct cuda_api api;
static CUcontext context;
static unsigned char weights_memory[4][64] __attribute__((aligned(256)));

static struct mf_weights fixture_weights(void)
{
  struct mf_weights w;
  memset(&w, 0, sizeof(w));
  w.struct_size = sizeof(w);
  w.w13 = weights_memory[0];
  w.w2 = weights_memory[1];
  w.s13 = (const float *)(const void *)weights_memory[2];
  w.s2 = (const float *)(const void *)weights_memory[3];
  return w;
}

static void start(const char *script)
{
  char why[256] = "";
  fakecuda_use(script, NULL);
  ck_assert_msg(cuda_api_open(&api, why, sizeof(why)) == 0, "%s", why);
  ck_assert_int_eq(api.p_cuInit(0), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuCtxPushCurrent(context), CUDA_SUCCESS);
}

/* Whatever validation lets through must be safe to bind and launch: random bytes over a good recipe, under the sanitizers. */
START_TEST(random_recipes_are_safe)
{
  const struct mf_problem problem = fixture_problem();
  const struct mf_weights w = fixture_weights();
  uint64_t state = 88172645463325252u;
  int passed = 0;
  start("sms=200");
  for(int round = 0; round < 20000; round++) {
    struct mf_recipe r = fixture_recipe();
    struct recipe_block block;
    for(int flips = 1 + round % 3; flips > 0; flips--) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      ((unsigned char *)&r)[(state >> 20) % sizeof(r)] = (unsigned char)(state >> 8);
    }
    if(recipe_validate(&r, sizeof(r)) != MF_OK)
      continue;
    passed++;
    recipe_bind(&api, &r, &problem, &w, &block);
  }
  ck_assert_int_gt(passed, 1000); /* the interesting part is not refused as a whole */
}
END_TEST

static void expect_map(const unsigned char *bytes, const struct fakecuda_map *expected)
{
  struct fakecuda_map map;
  memcpy(&map, bytes, sizeof(map));
  ck_assert_mem_eq(&map, expected, sizeof(map));
}

START_TEST(bind_encodes_maps)
{
  const struct mf_problem problem = fixture_problem();
  const struct mf_recipe r = fixture_recipe();
  struct mf_weights w = fixture_weights();
  struct recipe_block block;
  struct fakecuda_map up = {.magic = FAKECUDA_MAP_MAGIC, .type = CU_TENSOR_MAP_DATA_TYPE_UINT8, .rank = 5, .interleave = CU_TENSOR_MAP_INTERLEAVE_NONE,
                            .swizzle = CU_TENSOR_MAP_SWIZZLE_128B, .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                            .fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE, .box = {128, 8, 2, 1, 4}, .element_stride = {1, 1, 1, 1, 1},
                            .dim = {128, 8, 2, 512, 4}, .stride = {512, 512 * 128, 8 * 512, 128}};
  struct fakecuda_map down = {.magic = FAKECUDA_MAP_MAGIC, .type = CU_TENSOR_MAP_DATA_TYPE_UINT8, .rank = 2, .swizzle = CU_TENSOR_MAP_SWIZZLE_64B,
                              .promotion = CU_TENSOR_MAP_L2_PROMOTION_NONE, .box = {64, 16}, .element_stride = {1, 1}, .dim = {128, 8192}, .stride = {128}};
  start("");
  up.address = (uintptr_t)w.w13;
  down.address = (uintptr_t)w.w2;
  ck_assert_int_eq(recipe_bind(&api, &r, &problem, &w, &block), MF_OK);
  expect_map(block.bytes + 128, &up);
  expect_map(block.bytes + 256, &down);
  w.w13_row_stride = 528; /* padded rows scale the strides that are multiples of a row, and only those */
  w.w2_row_stride = 144;
  up.stride[0] = 528;
  up.stride[1] = 528 * 128;
  up.stride[2] = 8 * 528;
  down.stride[0] = 144;
  ck_assert_int_eq(recipe_bind(&api, &r, &problem, &w, &block), MF_OK);
  expect_map(block.bytes + 128, &up);
  expect_map(block.bytes + 256, &down);
}
END_TEST

/* A change of good weights, and what bind must say. */
#define BAD_WEIGHTS(X)                                                                                      \
  X(w.w13 = NULL, MF_ERR_USAGE) X(w.s13 = NULL, MF_ERR_USAGE) X(w.w2 = NULL, MF_ERR_USAGE) X(w.s2 = NULL, MF_ERR_USAGE) \
  X(w.w13 = weights_memory[0] + 8, MF_MISS_LAYOUT) X(w.w2 = weights_memory[1] + 1, MF_MISS_LAYOUT)          \
  X(w.s2 = (const float *)(const void *)(weights_memory[3] + 4), MF_OK)                                     \
  X(w.s2 = (const float *)(uintptr_t)((uintptr_t)weights_memory[3] + 2), MF_MISS_LAYOUT)                    \
  X(w.w13_row_stride = 511, MF_ERR_USAGE) X(w.w13_row_stride = -1, MF_ERR_USAGE) X(w.w13_row_stride = 513, MF_MISS_LAYOUT) \
  X(w.w2_row_stride = 127, MF_ERR_USAGE) X(w.w2_row_stride = 136, MF_MISS_LAYOUT)                           \
  X(w.w13_row_stride = INT64_MAX, MF_ERR_USAGE) X(w.w13_row_stride = (int64_t)1 << 38, MF_MISS_LAYOUT)      \
  X(w.routed_scaling = (float)INFINITY, MF_ERR_USAGE) X(problem.select_bias = 1, MF_ERR_USAGE)              \
  X(w.bias = (const float *)(const void *)(weights_memory[3] + 4), MF_MISS_LAYOUT)

START_TEST(bind_refuses)
{
  const struct mf_recipe r = fixture_recipe();
  struct recipe_block block;
  start("");
#define TRY(change, status)                                                                     \
  {                                                                                             \
    struct mf_problem problem = fixture_problem();                                              \
    struct mf_weights w = fixture_weights();                                                    \
    change;                                                                                     \
    ck_assert_msg(recipe_bind(&api, &r, &problem, &w, &block) == status, "%s", #change);        \
  }
  BAD_WEIGHTS(TRY)
#undef TRY
}
END_TEST

START_TEST(bind_reports_driver_refusal)
{
  const struct mf_problem problem = fixture_problem();
  const struct mf_recipe r = fixture_recipe();
  const struct mf_weights w = fixture_weights();
  struct recipe_block block;
  start("map_fail");
  ck_assert_int_eq(recipe_bind(&api, &r, &problem, &w, &block), MF_MISS_LAYOUT);
}
END_TEST

/* ---- launch ---- */
struct seen {
  int count;
  struct fakecuda_launch launch;
  struct fixture_params params;
  struct fakecuda_map maps[2];
};

static void on_launch(void *opaque, const struct fakecuda_launch *launch)
{
  struct seen *seen = opaque;
  seen->count++;
  seen->launch = *launch;
  ck_assert_int_eq(launch->nparams, 3);
  ck_assert_uint_eq(launch->sizes[0], sizeof(seen->params));
  memcpy(&seen->params, launch->params[0], sizeof(seen->params));
  memcpy(&seen->maps[0], launch->params[1], sizeof(seen->maps[0]));
  memcpy(&seen->maps[1], launch->params[2], sizeof(seen->maps[1]));
}

struct bench {
  struct mf_problem problem;
  struct mf_recipe recipe;
  struct mf_weights weights;
  struct mf_call call;
  struct recipe_block block;
  CUmodule module;
  CUfunction function;
  CUstream stream;
  struct seen seen;
};

static unsigned char call_memory[4][16384] __attribute__((aligned(256)));

static void bench_start(struct bench *b, const char *script)
{
  fakecuda_on_launch_fn *hook;
  memset(b, 0, sizeof(*b));
  start(script);
  *(void **)(void *)&hook = fakecuda_symbol("fakecuda_on_launch");
  hook(on_launch, &b->seen);
  b->problem = fixture_problem();
  b->recipe = fixture_recipe();
  b->weights = fixture_weights();
  b->call = (struct mf_call){.struct_size = sizeof(b->call), .tokens = 3, .x = call_memory[0], .logits = weights_memory, .out = call_memory[1],
                             .workspace = call_memory[2]};
  ck_assert_int_eq(recipe_bind(&api, &b->recipe, &b->problem, &b->weights, &b->block), MF_OK);
  ck_assert_int_eq(recipe_load(&api, &b->recipe, FIXTURE_CUBIN, &b->module, &b->function), MF_OK);
  ck_assert_int_eq(api.p_cuStreamCreate(&b->stream, 0), CUDA_SUCCESS);
}

static void bench_end(struct bench *b)
{
  ck_assert_int_eq(api.p_cuModuleUnload(b->module), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuStreamDestroy(b->stream), CUDA_SUCCESS);
}

static enum mf_status bench_launch(struct bench *b, CUresult *cr)
{
  return recipe_launch(&api, &b->recipe, b->function, &b->block, &b->problem, &b->call, b->stream, cr);
}

START_TEST(launch_passes_every_argument)
{
  struct fixture_params expected;
  struct bench b;
  bench_start(&b, "");
  ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
  ck_assert_int_eq(b.seen.count, 1);
  memset(&expected, 0, sizeof(expected));
  expected = (struct fixture_params){.x = (uintptr_t)b.call.x, .logits = (uintptr_t)b.call.logits, .s13 = (uintptr_t)b.weights.s13,
                                     .s2 = (uintptr_t)b.weights.s2, .out = (uintptr_t)b.call.out, .workspace = (uintptr_t)b.call.workspace, .tokens = 3,
                                     .x_stride = 512, .logits_stride = 16, .out_stride = 1024, .scaling = 1.0f, .constant = -7,
                                     .w13_stride_twice = 1024, .w2_stride = 128};
  ck_assert_mem_eq(&b.seen.params, &expected, sizeof(expected));
  ck_assert_mem_eq(&b.seen.maps[0], b.block.bytes + 128, sizeof(b.seen.maps[0]));
  ck_assert_mem_eq(&b.seen.maps[1], b.block.bytes + 256, sizeof(b.seen.maps[1]));
  ck_assert_uint_eq(b.seen.launch.grid[0], 132);
  ck_assert_uint_eq(b.seen.launch.block[0], 384);
  ck_assert_uint_eq(b.seen.launch.shared_bytes, 200000);
  ck_assert_int_eq(b.seen.launch.cooperative, 1);
  ck_assert_int_eq(b.seen.launch.pdl, 0);
  ck_assert_ptr_eq(b.seen.launch.stream, (void *)b.stream);
  bench_end(&b);
}
END_TEST

START_TEST(launch_patches_a_copy)
{
  struct recipe_block before;
  struct bench b;
  bench_start(&b, "");
  before = b.block;
  b.call.tokens = 2;
  b.call.x_stride = 520;
  b.call.out_stride = 513;
  b.call.logits_stride = 24;
  ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
  ck_assert_mem_eq(&before, &b.block, sizeof(before));
  ck_assert_int_eq(b.seen.params.tokens, 2);
  ck_assert_int_eq(b.seen.params.x_stride, 520);
  ck_assert_int_eq(b.seen.params.out_stride, 1026);
  ck_assert_int_eq(b.seen.params.logits_stride, 24);
  bench_end(&b);
}
END_TEST

START_TEST(launch_attributes_follow_flags)
{
  struct bench b;
  bench_start(&b, "");
  for(uint32_t flags = 0; flags < 4; flags++) {
    b.recipe.flags = flags;
    ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
    ck_assert_int_eq(b.seen.launch.cooperative, (flags & MF_RECIPE_COOPERATIVE) != 0);
    ck_assert_int_eq(b.seen.launch.pdl, (flags & MF_RECIPE_PDL) != 0);
  }
  bench_end(&b);
}
END_TEST

#define BAD_CALLS(X)                                                                                                        \
  X(c->tokens = 9, MF_MISS_TOKENS) X(c->tokens = -1, MF_ERR_USAGE) X(c->x = NULL, MF_ERR_USAGE) X(c->logits = NULL, MF_ERR_USAGE) \
  X(c->out = NULL, MF_ERR_USAGE) X(c->workspace = NULL, MF_ERR_USAGE) X(c->workspace = call_memory[2] + 128, MF_ERR_USAGE)   \
  X(c->x_stride = 511, MF_ERR_USAGE) X(c->x_stride = -512, MF_ERR_USAGE) X(c->x_stride = 516, MF_MISS_LAYOUT)               \
  X(c->out_stride = 511, MF_ERR_USAGE) X(c->logits_stride = 15, MF_ERR_USAGE) X(c->logits_stride = 17, MF_MISS_LAYOUT)      \
  X(c->x_stride = (int64_t)1 << 33, MF_MISS_LAYOUT) X(c->x = call_memory[0] + 2, MF_MISS_LAYOUT)                            \
  X((c->tokens = 8, c->x = call_memory[1], c->out = call_memory[0], c->x_stride = (int64_t)1 << 30), MF_MISS_LAYOUT)         \
  X(c->out_stride = (int64_t)1 << 30, MF_MISS_LAYOUT) X(c->out = call_memory[0] + 2048, MF_ERR_USAGE) X(c->tokens = INT32_MAX, MF_MISS_TOKENS)

START_TEST(launch_refuses)
{
  struct bench b;
  bench_start(&b, "");
#define TRY(change, status)                                             \
  {                                                                     \
    const struct mf_call good = b.call;                                 \
    struct mf_call *c = &b.call;                                        \
    change;                                                             \
    ck_assert_msg(bench_launch(&b, NULL) == status, "%s", #change);     \
    b.call = good;                                                      \
  }
  BAD_CALLS(TRY)
  ck_assert_int_eq(b.seen.count, 0);
  bench_end(&b);
}
END_TEST

/* ---- experts that the engine has chosen ---- */
/* The fixture's kernel with ids for logits and weights for the bias. */
static void bench_given(struct bench *b)
{
  bench_start(b, "");
  b->problem.score = MF_SCORE_GIVEN;
  b->problem.top_k = 4;
  b->recipe.fields[1].source = MF_SRC_IDS;
  b->recipe.fields[2].source = MF_SRC_WEIGHTS;
  b->recipe.fields[9].source = MF_SRC_IDS_STRIDE;
  b->recipe.fields[10].source = MF_SRC_WEIGHTS_STRIDE;
  ck_assert_int_eq(recipe_validate(&b->recipe, sizeof(b->recipe)), MF_OK);
  ck_assert_int_eq(recipe_bind(&api, &b->recipe, &b->problem, &b->weights, &b->block), MF_OK);
  b->call.logits = NULL;
  b->call.ids = (const int32_t *)(const void *)(call_memory[3] + 4);
  b->call.weights = (const float *)(const void *)(call_memory[3] + 1024);
}

START_TEST(given_experts_are_passed)
{
  struct bench b;
  bench_given(&b);
  ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
  ck_assert_uint_eq(b.seen.params.logits, (uintptr_t)b.call.ids);
  ck_assert_uint_eq(b.seen.params.bias, (uintptr_t)b.call.weights);
  ck_assert_int_eq(b.seen.params.logits_stride, 4);
  ck_assert_int_eq(b.seen.params.out_stride, 8); /* twice, as the field says */
  b.call.ids_stride = 7;
  b.call.weights_stride = 5;
  ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
  ck_assert_int_eq(b.seen.params.logits_stride, 7);
  ck_assert_int_eq(b.seen.params.out_stride, 10);
  bench_end(&b);
}
END_TEST

#define BAD_GIVEN(X)                                                                                                        \
  X(c->ids = NULL, MF_ERR_USAGE) X(c->weights = NULL, MF_ERR_USAGE) X(c->ids_stride = 3, MF_ERR_USAGE)                        \
  X(c->weights_stride = -4, MF_ERR_USAGE) X(c->ids_stride = (int64_t)1 << 31, MF_MISS_LAYOUT)                                 \
  X(c->weights_stride = (int64_t)1 << 31, MF_MISS_LAYOUT)                                                                    \
  X(c->ids = (const int32_t *)((uintptr_t)c->ids + 2), MF_MISS_LAYOUT)                                                       \
  X(c->weights = (const float *)((uintptr_t)c->weights + 1), MF_MISS_LAYOUT)

START_TEST(gates_of_shared_experts)
{
  struct bench b;
  bench_start(&b, "");
  b.problem.shared_experts = 2 + MF_SHARED_GATED;
  b.recipe.fields[2].source = MF_SRC_SHARED_GATE;
  b.recipe.fields[10].source = MF_SRC_SHARED_GATE_STRIDE;
  ck_assert_int_eq(recipe_validate(&b.recipe, sizeof(b.recipe)), MF_OK);
  ck_assert_int_eq(recipe_bind(&api, &b.recipe, &b.problem, &b.weights, &b.block), MF_OK);
  ck_assert_int_eq(bench_launch(&b, NULL), MF_ERR_USAGE); /* no gates */
  b.call.shared_gate = call_memory[3] + 2;
  b.call.shared_gate_stride = 1;
  ck_assert_int_eq(bench_launch(&b, NULL), MF_ERR_USAGE);
  b.call.shared_gate_stride = 0;
  b.call.shared_gate = call_memory[3] + 1;
  ck_assert_int_eq(bench_launch(&b, NULL), MF_MISS_LAYOUT);
  b.call.shared_gate = call_memory[3] + 2;
  b.problem.logits_dtype = MF_DTYPE_F32;
  ck_assert_int_eq(bench_launch(&b, NULL), MF_MISS_LAYOUT);
  b.problem.logits_dtype = MF_DTYPE_BF16;
  ck_assert_int_eq(b.seen.count, 0);
  ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
  ck_assert_uint_eq(b.seen.params.bias, (uintptr_t)b.call.shared_gate);
  ck_assert_int_eq(b.seen.params.out_stride, 4); /* twice, as the field says */
  bench_end(&b);
}
END_TEST

START_TEST(launch_refuses_given_experts)
{
  struct bench b;
  bench_given(&b);
  BAD_GIVEN(TRY)
  ck_assert_int_eq(b.seen.count, 0);
  bench_end(&b);
}
END_TEST
#undef TRY

START_TEST(one_row_needs_no_stride)
{
  struct bench b;
  bench_start(&b, "");
  b.call.tokens = 1;
  b.call.x_stride = 513;
  b.call.logits_stride = 17;
  ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
  bench_end(&b);
}
END_TEST

START_TEST(no_tokens_launch_nothing)
{
  struct bench b;
  bench_start(&b, "");
  b.call = (struct mf_call){.struct_size = sizeof(b.call)};
  ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
  ck_assert_int_eq(b.seen.count, 0);
  bench_end(&b);
}
END_TEST

START_TEST(launch_failures)
{
  CUresult cr;
  struct bench b;
  bench_start(&b, "launch_fail");
  ck_assert_int_eq(bench_launch(&b, &cr), MF_ERR_DEVICE);
  ck_assert_int_eq(cr, CUDA_ERROR_LAUNCH_FAILED);
  bench_end(&b);
  bench_start(&b, "sms=131");
  ck_assert_int_eq(bench_launch(&b, &cr), MF_MISS_SMS);
  ck_assert_int_eq(cr, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  bench_end(&b);
}
END_TEST

/* In a capture the fake driver refuses allocation and synchronisation; the recorded launch keeps its arguments. */
START_TEST(launch_is_capturable)
{
  CUgraph graph;
  CUgraphExec exec;
  struct bench b;
  bench_start(&b, "");
  ck_assert_int_eq(api.p_cuStreamBeginCapture(b.stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
  b.call.tokens = 1;
  ck_assert_int_eq(bench_launch(&b, NULL), MF_OK);
  ck_assert_int_eq(api.p_cuStreamEndCapture(b.stream, &graph), CUDA_SUCCESS);
  ck_assert_int_eq(b.seen.count, 0);
  ck_assert_int_eq(api.p_cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuGraphDestroy(graph), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuGraphLaunch(exec, b.stream), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuGraphLaunch(exec, b.stream), CUDA_SUCCESS);
  ck_assert_int_eq(b.seen.count, 4);
  ck_assert_int_eq(b.seen.params.tokens, 1);
  ck_assert_int_eq(api.p_cuGraphExecDestroy(exec), CUDA_SUCCESS);
  bench_end(&b);
}
END_TEST

START_TEST(load_failures)
{
  struct mf_recipe r = fixture_recipe();
  CUmodule module;
  CUfunction function;
  start("");
  ck_assert_int_eq(recipe_load(&api, &r, "FAKECUBIN other 8\n", &module, &function), MF_ERR_CORRUPT);
  ck_assert_int_eq(recipe_load(&api, &r, "this is no cubin at all, but long enough to look like the head of an ELF file", &module, &function), MF_ERR_CORRUPT);
  r.shared_bytes = 300000;
  ck_assert_int_eq(recipe_load(&api, &r, FIXTURE_CUBIN, &module, &function), MF_MISS_DEVICE);
  start("load_fail");
  ck_assert_int_eq(recipe_load(&api, &r, FIXTURE_CUBIN, &module, &function), MF_MISS_DEVICE);
}
END_TEST

static CUresult CUDAAPI no_answer(CUfunction function, size_t index, size_t *offset, size_t *size)
{
  (void)function, (void)index, (void)offset, (void)size;
  return CUDA_ERROR_NOT_SUPPORTED;
}

/* A kernel whose parameters are others than those that the recipe passes is not taken, and its module is gone again; where the driver cannot tell, it is. */
START_TEST(parameters_must_agree)
{
  static const struct {
    const char *cubin;
    enum mf_status status;
  } cubins[] = {
      {FIXTURE_CUBIN, MF_OK},
      {"FAKECUBIN mf_moe 96 128 136\n", MF_ERR_CORRUPT},
      {"FAKECUBIN mf_moe 88 128 128\n", MF_ERR_CORRUPT},
      {"FAKECUBIN mf_moe 96 128\n", MF_ERR_CORRUPT},
      {"FAKECUBIN mf_moe 96 128 128 4\n", MF_ERR_CORRUPT},
  };
  const struct mf_recipe r = fixture_recipe();
  CUmodule module;
  CUfunction function;
  fakecuda_alive_fn *alive;
  start("");
  *(void **)(void *)&alive = fakecuda_symbol("fakecuda_alive");
  for(size_t i = 0; i < sizeof(cubins) / sizeof(cubins[0]); i++) {
    const int before = alive();
    ck_assert_ptr_nonnull(api.p_cuFuncGetParamInfo);
    ck_assert_msg(recipe_load(&api, &r, cubins[i].cubin, &module, &function) == cubins[i].status, "%s", cubins[i].cubin);
    if(cubins[i].status == MF_OK)
      ck_assert_int_eq(api.p_cuModuleUnload(module), CUDA_SUCCESS);
    ck_assert_int_eq(alive(), before);
  }
  api.p_cuFuncGetParamInfo = no_answer;
  ck_assert_int_eq(recipe_load(&api, &r, cubins[1].cubin, &module, &function), MF_OK);
  ck_assert_int_eq(api.p_cuModuleUnload(module), CUDA_SUCCESS);
  api.p_cuFuncGetParamInfo = NULL; /* a driver before CUDA 12.4 */
  ck_assert_int_eq(recipe_load(&api, &r, cubins[1].cubin, &module, &function), MF_OK);
  ck_assert_int_eq(api.p_cuModuleUnload(module), CUDA_SUCCESS);
}
END_TEST

START_TEST(workspace_init_zeroes_what_it_must)
{
  const struct mf_recipe r = fixture_recipe();
  CUdeviceptr ws;
  unsigned char *bytes;
  start("");
  ck_assert_int_eq(api.p_cuMemAlloc(&ws, r.workspace_bytes), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemsetD8(ws, 0xff, r.workspace_bytes), CUDA_SUCCESS);
  bytes = (unsigned char *)(uintptr_t)ws;
  ck_assert_int_eq(recipe_workspace_init(&api, &r, bytes, NULL), MF_OK);
  for(size_t i = 0; i < r.workspace_bytes; i++)
    ck_assert_uint_eq(bytes[i], i < r.workspace_zero_bytes ? 0 : 0xff);
  ck_assert_int_eq(recipe_workspace_init(&api, &r, NULL, NULL), MF_ERR_USAGE);
  ck_assert_int_eq(recipe_workspace_init(&api, &r, bytes + 16, NULL), MF_ERR_USAGE);
  ck_assert_int_eq(api.p_cuMemFree(ws), CUDA_SUCCESS);
}
END_TEST

START_TEST(driver_library_reasons)
{
  char why[256];
  setenv("MOEFORGE_LIBCUDA", "/nonexistent/libcuda.so", 1);
  ck_assert_int_eq(cuda_api_open(&api, why, sizeof(why)), -1);
  ck_assert_ptr_nonnull(strstr(why, "/nonexistent/libcuda.so"));
  ck_assert_ptr_nonnull(strstr(why, "install the NVIDIA driver"));
  setenv("MOEFORGE_LIBCUDA", "libm.so.6", 1); /* a library without the driver's functions */
  ck_assert_int_eq(cuda_api_open(&api, why, sizeof(why)), -1);
  ck_assert_ptr_nonnull(strstr(why, "lacks cuInit"));
  ck_assert_ptr_null(strchr(why, '\n'));
  ck_assert_ptr_null(api.library);
}
END_TEST

START_TEST(unknown_script_items_are_refused)
{
  char why[256];
  fakecuda_use("smms=3", NULL);
  ck_assert_int_eq(cuda_api_open(&api, why, sizeof(why)), 0);
  ck_assert_int_eq(api.p_cuInit(0), CUDA_ERROR_INVALID_VALUE);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("recipe");
  TCase *driver = tcase_create("driver");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_test(driver, random_recipes_are_safe);
  tcase_add_test(driver, bind_encodes_maps);
  tcase_add_test(driver, bind_refuses);
  tcase_add_test(driver, bind_reports_driver_refusal);
  tcase_add_test(driver, launch_passes_every_argument);
  tcase_add_test(driver, launch_patches_a_copy);
  tcase_add_test(driver, launch_attributes_follow_flags);
  tcase_add_test(driver, launch_refuses);
  tcase_add_test(driver, given_experts_are_passed);
  tcase_add_test(driver, gates_of_shared_experts);
  tcase_add_test(driver, launch_refuses_given_experts);
  tcase_add_test(driver, one_row_needs_no_stride);
  tcase_add_test(driver, no_tokens_launch_nothing);
  tcase_add_test(driver, launch_failures);
  tcase_add_test(driver, launch_is_capturable);
  tcase_add_test(driver, load_failures);
  tcase_add_test(driver, parameters_must_agree);
  tcase_add_test(driver, workspace_init_zeroes_what_it_must);
  tcase_add_test(driver, driver_library_reasons);
  tcase_add_test(driver, unknown_script_items_are_refused);
  tcase_set_timeout(driver, 60);
  suite_add_tcase(suite, driver);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
