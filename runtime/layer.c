/* layer.c - mf_layer: one argument block per kernel of the op, made once; and the forward call, which patches a copy of one and launches.
 *
 * A forward call touches nothing but its stack and the immutable layer, so that any number of threads may call it at once. */
#include "op.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

struct mf_layer {
  const struct mf_op *op; /* the caller's */
  struct recipe_block *blocks; /* [op->nkernels] */
};

/* Fills in the argument blocks of all kernels. The driver encodes tensor maps only while a context is current. */
static enum mf_status bind_blocks(const struct mf_op *op, const struct mf_weights *weights, struct recipe_block *blocks)
{
  enum mf_status rc = MF_OK;
  if(op->api.p_cuCtxPushCurrent(op->context) != CUDA_SUCCESS)
    return MF_ERR_DEVICE;
  for(uint32_t i = 0; rc == MF_OK && i < op->nkernels; i++)
    rc = recipe_bind(&op->api, op->kernels[i].recipe, &op->problem, weights, &blocks[i]);
  op->api.p_cuCtxPopCurrent(NULL);
  return rc;
}

enum mf_status mf_layer_bind(struct mf_op *op, const struct mf_weights *weights, struct mf_layer **out)
{
  struct mf_layer *layer;
  struct mf_weights own;
  enum mf_status rc;
  if(out == NULL)
    return MF_ERR_USAGE;
  *out = NULL;
  if(op == NULL || weights == NULL || !struct_take(&own, sizeof(own), STRUCT_FIRST_SIZE(struct mf_weights, reserved_f), weights, weights->struct_size))
    return MF_ERR_USAGE;
  layer = calloc(1, sizeof(*layer));
  if(layer == NULL)
    return MF_ERR_NOMEM;
  layer->op = op;
  layer->blocks = aligned_alloc(_Alignof(struct recipe_block), op->nkernels * sizeof(*layer->blocks));
  rc = layer->blocks == NULL ? MF_ERR_NOMEM : bind_blocks(op, &own, layer->blocks);
  if(rc == MF_OK)
    *out = layer;
  else
    mf_layer_destroy(layer);
  return rc;
}

enum mf_status mf_moe_forward(const struct mf_layer *layer, const struct mf_call *call, mf_stream stream)
{
  const struct op_kernel *kernel;
  struct mf_call own;
  uint16_t index;
  if(layer == NULL || call == NULL || !struct_take(&own, sizeof(own), STRUCT_FIRST_SIZE(struct mf_call, out_stride), call, call->struct_size) || own.tokens < 0)
    return MF_ERR_USAGE;
  if(own.tokens == 0)
    return MF_OK;
  if(own.tokens > layer->op->max_tokens)
    return MF_MISS_TOKENS;
  if(own.workspace == NULL)
    return MF_ERR_USAGE;
  index = layer->op->kernel_of[own.tokens];
  kernel = &layer->op->kernels[index];
  own.workspace = (unsigned char *)own.workspace + kernel->workspace_offset;
  return recipe_launch(&layer->op->api, kernel->recipe, kernel->function, &layer->blocks[index], &layer->op->problem, &own, stream, NULL);
}

void mf_layer_destroy(struct mf_layer *layer)
{
  if(layer == NULL)
    return;
  free(layer->blocks);
  free(layer);
}
