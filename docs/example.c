/* example.c - one MoE layer through libmoeforge, from C, with the fallback that a serving engine needs.
 *
 *   cc -std=c11 -I include -I /usr/local/cuda/include docs/example.c -o example build/libmoeforge.a -lcuda -ldl -lpthread
 *   ./example model.moeforge
 *
 * It takes the problem from the package's first entry, fills weights and inputs with zeros, and runs every token count once, then all of them again
 * from a CUDA graph. An engine does the same with its own tensors: nothing here copies or repacks weights. */
#include <cuda.h>
#include <moeforge.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOKENS 8

/* Device memory of one layer and of one stream's calls. */
struct buffers {
  CUdeviceptr w13, s13, w2, s2, bias;       /* the checkpoint's tensors */
  CUdeviceptr x, logits, out, workspace;
};

static void cuda_must(CUresult result, const char *doing)
{
  const char *text = NULL;
  if(result == CUDA_SUCCESS)
    return;
  cuGetErrorString(result, &text);
  fprintf(stderr, "%s: %s\n", doing, text != NULL ? text : "unknown CUDA error");
  exit(1);
}

static CUdeviceptr zeroed(size_t bytes)
{
  CUdeviceptr memory;
  cuda_must(cuMemAlloc(&memory, bytes), "cuMemAlloc");
  cuda_must(cuMemsetD8(memory, 0, bytes), "cuMemsetD8");
  return memory;
}

static struct buffers make_buffers(const struct mf_problem *p, size_t workspace_bytes)
{
  const size_t matrix = (size_t)p->expert_count * (size_t)p->intermediate * (size_t)p->hidden;
  const size_t n_blocks = ((size_t)p->intermediate_offset + (size_t)p->intermediate + 127) / 128, k_blocks = ((size_t)p->hidden + 127) / 128;
  const size_t scales = (size_t)p->expert_count * n_blocks * k_blocks;
  const struct buffers b = {
      .w13 = zeroed(2 * matrix),
      .s13 = zeroed(2 * scales * sizeof(float)),
      .w2 = zeroed(matrix),
      .s2 = zeroed(scales * sizeof(float)),
      .bias = zeroed((size_t)(p->experts + p->zero_experts) * sizeof(float)),
      .x = zeroed(MAX_TOKENS * (size_t)p->hidden * 2),
      .logits = zeroed(MAX_TOKENS * (size_t)(p->experts + p->zero_experts) * sizeof(float)),
      .out = zeroed(MAX_TOKENS * (size_t)p->hidden * 2),
      .workspace = zeroed(workspace_bytes),
  };
  return b;
}

static void free_buffers(const struct buffers *b)
{
  const CUdeviceptr all[] = {b->w13, b->s13, b->w2, b->s2, b->bias, b->x, b->logits, b->out, b->workspace};
  for(size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
    cuMemFree(all[i]);
}

static enum mf_status bind_layer(struct mf_op *op, const struct mf_problem *p, const struct buffers *b, float routed_scaling, struct mf_layer **out)
{
  struct mf_weights w;
  memset(&w, 0, sizeof(w)); /* what is not set means its default */
  w.struct_size = sizeof(w);
  w.w13 = (const void *)b->w13;
  w.s13 = (const float *)b->s13;
  w.w2 = (const void *)b->w2;
  w.s2 = (const float *)b->s2;
  w.bias = p->select_bias ? (const float *)b->bias : NULL;
  w.routed_scaling = routed_scaling;
  return mf_layer_bind(op, &w, out);
}

/* The call that an engine makes per layer and step. A status other than MF_OK: nothing was launched, use the other kernel. */
static enum mf_status forward(const struct mf_layer *layer, const struct buffers *b, int tokens, CUstream stream)
{
  struct mf_call call;
  memset(&call, 0, sizeof(call));
  call.struct_size = sizeof(call);
  call.tokens = tokens;
  call.x = (const void *)b->x;
  call.logits = (const void *)b->logits;
  call.out = (void *)b->out;
  call.workspace = (void *)b->workspace;
  return mf_moe_forward(layer, &call, stream);
}

/* Every token count at once, then all of them again from a graph: forward neither allocates nor waits. */
static enum mf_status run(const struct mf_op *op, const struct mf_layer *layer, const struct buffers *b, CUstream stream)
{
  enum mf_status rc = mf_workspace_init(op, (void *)b->workspace, stream);
  CUgraph graph;
  CUgraphExec exec;
  for(int tokens = 1; rc == MF_OK && tokens <= mf_op_max_tokens(op); tokens++)
    rc = forward(layer, b, tokens, stream);
  if(rc != MF_OK)
    return rc;
  cuda_must(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  for(int tokens = 1; rc == MF_OK && tokens <= mf_op_max_tokens(op); tokens++)
    rc = forward(layer, b, tokens, stream);
  cuda_must(cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
  cuda_must(cuGraphInstantiateWithFlags(&exec, graph, 0), "cuGraphInstantiateWithFlags");
  cuda_must(cuGraphLaunch(exec, stream), "cuGraphLaunch");
  cuda_must(cuStreamSynchronize(stream), "cuStreamSynchronize");
  cuGraphExecDestroy(exec);
  cuGraphDestroy(graph);
  return rc;
}

/* What to do about a status, in one place. */
static int fall_back(const char *call, enum mf_status status)
{
  printf("%s: %s (%s)\n", call, mf_status_string(status), mf_status_name(status));
  switch(status) {
    case MF_MISS_SHAPE:
    case MF_MISS_DEVICE:
    case MF_MISS_TOKENS:
    case MF_MISS_DRIVER:
    case MF_MISS_SMS:
    case MF_MISS_LAYOUT: printf("using the old kernel instead\n"); return 0; /* expected: the package does not serve this */
    default: return 1;                                                       /* a fault: a damaged file, no memory, no GPU, wrong arguments */
  }
}

static int serve(struct mf_package *pkg, const struct mf_package_entry *entry)
{
  struct mf_op *op = NULL;
  struct mf_layer *layer = NULL;
  struct buffers b;
  CUstream stream;
  int failed = 0;
  enum mf_status rc = mf_op_create(pkg, &entry->problem, 0, MAX_TOKENS, &op);
  if(rc != MF_OK)
    return fall_back("mf_op_create", rc);
  b = make_buffers(&entry->problem, mf_op_workspace_size(op));
  cuda_must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  rc = bind_layer(op, &entry->problem, &b, entry->routed_scaling, &layer);
  if(rc != MF_OK)
    failed = fall_back("mf_layer_bind", rc);
  else if((rc = run(op, layer, &b, stream)) != MF_OK)
    failed = fall_back("mf_moe_forward", rc);
  else
    printf("ran %s for 1 to %d tokens, %zu bytes of workspace\n", entry->shape_name, mf_op_max_tokens(op), mf_op_workspace_size(op));
  cuStreamDestroy(stream);
  free_buffers(&b);
  mf_layer_destroy(layer); /* in reverse order of creation */
  mf_op_destroy(op);
  return failed;
}

int main(int argc, char **argv)
{
  struct mf_package_entry entry = {.struct_size = sizeof(entry)};
  struct mf_package *pkg = NULL;
  CUdevice device;
  CUcontext context;
  enum mf_status rc = argc == 2 ? mf_package_open(argv[1], &pkg) : MF_ERR_USAGE;
  int failed;
  if(rc != MF_OK) {
    fprintf(stderr, "%s: %s\n", argc == 2 ? argv[1] : "usage: example PACKAGE", mf_status_string(rc));
    return 1;
  }
  for(size_t i = 0; mf_package_entry_at(pkg, i, &entry) == MF_OK; i++)
    printf("%s on %s, %d to %d tokens: %.2f us (floor %.2f)\n", entry.shape_name, entry.device_name, (int)entry.tokens_min, (int)entry.tokens_max, entry.us,
           entry.floor_us);
  rc = mf_package_entry_at(pkg, 0, &entry);
  if(rc != MF_OK) {
    mf_package_close(pkg);
    return fall_back("mf_package_entry_at", rc);
  }
  cuda_must(cuInit(0), "cuInit");
  cuda_must(cuDeviceGet(&device, 0), "cuDeviceGet");
  cuda_must(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain"); /* the context that the CUDA runtime uses, too */
  cuda_must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  failed = serve(pkg, &entry);
  cuCtxSetCurrent(NULL);
  cuDevicePrimaryCtxRelease(device);
  mf_package_close(pkg);
  return failed;
}
