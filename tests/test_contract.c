/* test_contract.c - what libmoeforge promises an engine: a forward call is one launch and nothing else, layers may share a workspace, streams and GPUs do
 * not meet, misses come at create and bind, structs of older and newer callers work.
 *
 * The op's driver table is replaced by traps for the time of a forward call: whatever but cuLaunchKernelEx is called counts, and so does every call to the
 * heap (heap_watch.h). */
#include "fake_libcuda.h"
#include "heap_watch.h"
#include "package_fixture.h"

#include <check.h>
#include <stddef.h>

/* ---- the driver ---- */
static int trapped, launches;
static struct cuda_api real;

#define TRAP(name, symbol, parameters)     \
  static CUresult CUDAAPI trap_##name parameters \
  {                                        \
    trapped++;                             \
    return CUDA_ERROR_UNKNOWN;             \
  }
CUDA_API_TABLE(TRAP)
CUDA_API_OPTIONAL_TABLE(TRAP)
#undef TRAP

/* The driver may use the heap: it is not watched. */
static CUresult CUDAAPI counting_launch(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
  const int watched = watching;
  CUresult cr;
  watching = 0;
  launches++;
  cr = real.p_cuLaunchKernelEx(config, function, params, extra);
  watching = watched;
  return cr;
}

static void set_traps(struct mf_op *op)
{
  real = op->api;
#define SET(name, symbol, parameters) op->api.p_##name = trap_##name;
  CUDA_API_TABLE(SET)
  CUDA_API_OPTIONAL_TABLE(SET)
#undef SET
  op->api.p_cuLaunchKernelEx = counting_launch;
}

/* ---- a package, devices, memory ---- */
#define MAX_SEEN 64

struct seen {
  int count;
  struct fixture_params params[MAX_SEEN];
  void *stream[MAX_SEEN];
  unsigned long long map_address[MAX_SEEN];
};

static void on_launch(void *opaque, const struct fakecuda_launch *launch)
{
  struct seen *seen = opaque;
  const int i = seen->count++ % MAX_SEEN;
  memcpy(&seen->params[i], launch->params[0], sizeof(seen->params[i]));
  seen->map_address[i] = ((const struct fakecuda_map *)launch->params[1])->address;
  seen->stream[i] = launch->stream;
}

/* One device: its context, memory on it, an op. */
struct gpu {
  CUcontext context;
  CUdeviceptr memory;
  struct mf_op *op;
};

struct rig {
  struct mf_package *pkg;
  struct cuda_api api;
  struct gpu gpu[2];
  int gpus;
  struct seen seen;
};

static int alive(void)
{
  fakecuda_alive_fn *fn;
  *(void **)(void *)&fn = fakecuda_symbol("fakecuda_alive");
  return fn();
}

static struct mf_package *open_fixture(void)
{
  static struct package_set set;
  struct mf_package *pkg = NULL;
  struct error err;
  unsigned char *bytes;
  size_t size;
  package_set_init(&set);
  package_set_add(&set, 1, 4);
  package_set_add(&set, 5, 8);
  set.recipes[1].workspace_bytes = 30000;
  ck_assert_msg(package_build(set.items, set.count, true, &bytes, &size, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(package_parse(bytes, size, &pkg, NULL, 0), MF_OK);
  return pkg;
}

#define PART 65536u /* bytes; parts of a GPU's memory: weights of layers 0 and 1, x, out, workspaces from 4 on */

static void *part(const struct rig *r, int gpu, unsigned index)
{
  return (unsigned char *)(uintptr_t)r->gpu[gpu].memory + index * PART;
}

static void rig_start(struct rig *r, int gpus, const char *script)
{
  const struct mf_problem problem = fixture_problem();
  fakecuda_on_launch_fn *hook;
  char why[256];
  memset(r, 0, sizeof(*r));
  fakecuda_use(script, NULL);
  r->pkg = open_fixture();
  r->gpus = gpus;
  for(int i = 0; i < gpus; i++)
    ck_assert_int_eq(mf_op_create(r->pkg, &problem, i, 8, &r->gpu[i].op), MF_OK);
  ck_assert_int_eq(cuda_api_open(&r->api, why, sizeof(why)), 0);
  for(int i = 0; i < gpus; i++) {
    ck_assert_int_eq(r->api.p_cuDevicePrimaryCtxRetain(&r->gpu[i].context, i), CUDA_SUCCESS);
    ck_assert_int_eq(r->api.p_cuCtxSetCurrent(r->gpu[i].context), CUDA_SUCCESS);
    ck_assert_int_eq(r->api.p_cuMemAlloc(&r->gpu[i].memory, 8 * PART), CUDA_SUCCESS);
    ck_assert_uint_le(mf_op_workspace_size(r->gpu[i].op), PART);
  }
  ck_assert_int_eq(r->api.p_cuCtxSetCurrent(r->gpu[0].context), CUDA_SUCCESS);
  *(void **)(void *)&hook = fakecuda_symbol("fakecuda_on_launch");
  hook(on_launch, &r->seen);
}

static void rig_end(struct rig *r)
{
  for(int i = 0; i < r->gpus; i++) {
    mf_op_destroy(r->gpu[i].op);
    ck_assert_int_eq(r->api.p_cuCtxSetCurrent(r->gpu[i].context), CUDA_SUCCESS);
    ck_assert_int_eq(r->api.p_cuMemFree(r->gpu[i].memory), CUDA_SUCCESS);
    ck_assert_int_eq(r->api.p_cuDevicePrimaryCtxRelease(i), CUDA_SUCCESS);
  }
  mf_package_close(r->pkg);
  ck_assert_int_eq(alive(), 0);
  cuda_api_close(&r->api);
}

static struct mf_weights weights_of(const struct rig *r, int gpu, unsigned layer)
{
  struct mf_weights w;
  memset(&w, 0, sizeof(w));
  w.struct_size = sizeof(w);
  w.w13 = w.w2 = w.s13 = w.s2 = part(r, gpu, layer);
  return w;
}

static struct mf_layer *bind(const struct rig *r, int gpu, unsigned layer)
{
  const struct mf_weights w = weights_of(r, gpu, layer);
  struct mf_layer *out;
  ck_assert_int_eq(mf_layer_bind(r->gpu[gpu].op, &w, &out), MF_OK);
  return out;
}

static struct mf_call call_of(const struct rig *r, int gpu, int tokens, unsigned workspace)
{
  struct mf_call call;
  memset(&call, 0, sizeof(call));
  call.struct_size = sizeof(call);
  call.tokens = tokens;
  call.x = call.logits = part(r, gpu, 2);
  call.out = part(r, gpu, 3);
  call.workspace = part(r, gpu, 4 + workspace);
  return call;
}

/* ---- a forward call is one launch ---- */
START_TEST(forward_is_one_launch)
{
  struct rig r;
  struct mf_layer *layer;
  void *volatile piece;
  watch_heap();
  rig_start(&r, 1, "");
  layer = bind(&r, 0, 0);
  set_traps(r.gpu[0].op);
  watching = 1;
  piece = malloc(1);
  free(piece); /* the watch works */
  watching = 0;
  ck_assert_int_eq(heap_calls, 2);
  heap_calls = 0;
  for(int tokens = 0; tokens <= 9; tokens++) {
    const struct mf_call call = call_of(&r, 0, tokens, 0);
    enum mf_status rc;
    launches = 0;
    watching = 1;
    rc = mf_moe_forward(layer, &call, NULL);
    watching = 0;
    ck_assert_int_eq(rc, tokens <= 8 ? MF_OK : MF_MISS_TOKENS);
    ck_assert_int_eq(launches, tokens >= 1 && tokens <= 8);
    ck_assert_int_eq(trapped, 0);
    ck_assert_int_eq(heap_calls, 0);
  }
  r.gpu[0].op->api.p_cuCtxSynchronize(); /* the traps work */
  ck_assert_int_eq(trapped, 1);
  r.gpu[0].op->api = real;
  mf_layer_destroy(layer);
  rig_end(&r);
}
END_TEST

/* ---- layers, streams ---- */
START_TEST(layers_share_a_workspace)
{
  struct rig r;
  struct mf_layer *layer[2];
  rig_start(&r, 1, "");
  for(unsigned i = 0; i < 2; i++)
    layer[i] = bind(&r, 0, i);
  for(int i = 0; i < 6; i++) {
    const struct mf_call call = call_of(&r, 0, 4, 0);
    ck_assert_int_eq(mf_moe_forward(layer[i % 2], &call, NULL), MF_OK);
  }
  ck_assert_int_eq(r.seen.count, 6);
  for(unsigned i = 0; i < 6; i++) {
    ck_assert_uint_eq(r.seen.params[i].workspace, (uintptr_t)part(&r, 0, 4));
    ck_assert_uint_eq(r.seen.params[i].s13, (uintptr_t)part(&r, 0, i % 2));
    ck_assert_uint_eq(r.seen.map_address[i], (uintptr_t)part(&r, 0, i % 2));
  }
  for(int i = 0; i < 2; i++)
    mf_layer_destroy(layer[i]);
  rig_end(&r);
}
END_TEST

START_TEST(streams_have_their_own_workspaces)
{
  struct rig r;
  struct mf_layer *layer;
  CUstream stream[2];
  rig_start(&r, 1, "");
  layer = bind(&r, 0, 0);
  for(int i = 0; i < 2; i++)
    ck_assert_int_eq(r.api.p_cuStreamCreate(&stream[i], 0), CUDA_SUCCESS);
  for(int i = 0; i < 2; i++)
    ck_assert_int_eq(mf_workspace_init(r.gpu[0].op, part(&r, 0, 4 + (unsigned)i), stream[i]), MF_OK);
  for(int i = 0; i < 8; i++) {
    const struct mf_call call = call_of(&r, 0, 4, (unsigned)i % 2);
    ck_assert_int_eq(mf_moe_forward(layer, &call, stream[i % 2]), MF_OK);
  }
  for(unsigned i = 0; i < 8; i++) {
    ck_assert_uint_eq(r.seen.params[i].workspace, (uintptr_t)part(&r, 0, 4 + i % 2));
    ck_assert_ptr_eq(r.seen.stream[i], (void *)stream[i % 2]);
  }
  for(int i = 0; i < 2; i++)
    ck_assert_int_eq(r.api.p_cuStreamDestroy(stream[i]), CUDA_SUCCESS);
  mf_layer_destroy(layer);
  rig_end(&r);
}
END_TEST

/* ---- several GPUs ---- */
static void make_current(const struct rig *r, int gpu)
{
  ck_assert_int_eq(r->api.p_cuCtxSetCurrent(gpu < 0 ? NULL : r->gpu[gpu].context), CUDA_SUCCESS);
}

/* Is the context of 'gpu' (-1: none) current, and nothing else on the stack? */
static void expect_current(const struct rig *r, int gpu)
{
  CUcontext top;
  if(gpu >= 0) {
    ck_assert_int_eq(r->api.p_cuCtxPopCurrent(&top), CUDA_SUCCESS);
    ck_assert_ptr_eq(top, r->gpu[gpu].context);
  }
  ck_assert_int_eq(r->api.p_cuCtxPopCurrent(&top), CUDA_ERROR_INVALID_CONTEXT);
  make_current(r, gpu);
}

/* Whatever is current (-1: nothing), every call leaves it current. Forward follows its stream: stream 0 is the current context's. */
START_TEST(two_gpus_in_one_process)
{
  const struct mf_problem problem = fixture_problem();
  struct rig r;
  struct mf_layer *layer[2];
  CUstream stream[2];
  rig_start(&r, 2, "devices=2");
  for(int gpu = 0; gpu < 2; gpu++) {
    make_current(&r, gpu);
    ck_assert_int_eq(r.api.p_cuStreamCreate(&stream[gpu], 0), CUDA_SUCCESS);
  }
  for(int current = -1; current < 2; current++) {
    struct mf_op *op;
    make_current(&r, current);
    for(int gpu = 0; gpu < 2; gpu++) {
      layer[gpu] = bind(&r, gpu, 0);
      expect_current(&r, current);
      ck_assert_int_eq(mf_op_create(r.pkg, &problem, gpu, 8, &op), MF_OK);
      expect_current(&r, current);
      mf_op_destroy(op);
      expect_current(&r, current);
    }
    for(int gpu = 0; gpu < 2; gpu++) {
      const struct mf_call call = call_of(&r, gpu, 3, 0);
      r.seen.count = 0;
      ck_assert_int_eq(mf_moe_forward(layer[gpu], &call, NULL), gpu == current ? MF_OK : MF_ERR_DEVICE);
      ck_assert_int_eq(r.seen.count, gpu == current);
      ck_assert_int_eq(mf_moe_forward(layer[gpu], &call, stream[gpu]), MF_OK);
      ck_assert_int_eq(mf_moe_forward(layer[gpu], &call, stream[1 - gpu]), MF_ERR_DEVICE);
      ck_assert_int_eq(r.seen.count, 1 + (gpu == current));
      expect_current(&r, current);
      mf_layer_destroy(layer[gpu]);
    }
  }
  for(int gpu = 0; gpu < 2; gpu++)
    ck_assert_int_eq(r.api.p_cuStreamDestroy(stream[gpu]), CUDA_SUCCESS);
  rig_end(&r);
}
END_TEST

/* Neither does a bind that fails change what is current: the driver refuses the maps, pointers are missing, the context cannot be had. */
START_TEST(failed_binds_leave_the_context)
{
  for(int current = -1; current < 1; current++) {
    struct rig r;
    struct mf_weights w;
    struct mf_layer *layer;
    rig_start(&r, 1, "map_fail");
    make_current(&r, current);
    w = weights_of(&r, 0, 0);
    ck_assert_int_eq(mf_layer_bind(r.gpu[0].op, &w, &layer), MF_MISS_LAYOUT);
    expect_current(&r, current);
    w.w13 = NULL;
    ck_assert_int_eq(mf_layer_bind(r.gpu[0].op, &w, &layer), MF_ERR_USAGE);
    expect_current(&r, current);
    w = weights_of(&r, 0, 0);
    trapped = 0;
    set_traps(r.gpu[0].op);
    ck_assert_int_eq(mf_layer_bind(r.gpu[0].op, &w, &layer), MF_ERR_DEVICE);
    ck_assert_int_eq(trapped, 1); /* the push: nothing is taken back that was not made current */
    r.gpu[0].op->api = real;
    expect_current(&r, current);
    rig_end(&r);
  }
}
END_TEST

/* A failed create gives back the primary context and the modules that it had, at whatever step it failed. */
START_TEST(failed_creates_leave_nothing)
{
  static const char *const scripts[] = {"load_fail", "occupancy=0", "sms=100", "driver=12080", "cc=80", "no_device", "name=other"};
  const struct mf_problem problem = fixture_problem();
  struct mf_package *pkg = open_fixture();
  for(size_t i = 0; i < sizeof(scripts) / sizeof(scripts[0]); i++) {
    struct mf_op *op = (void *)1;
    fakecuda_use(scripts[i], NULL);
    ck_assert_int_ne(mf_op_create(pkg, &problem, 0, 8, &op), MF_OK);
    ck_assert_ptr_null(op);
    ck_assert_int_eq(alive(), 0);
  }
  mf_package_close(pkg);
}
END_TEST

/* Ops of one device share its primary context: it is released once for each. */
START_TEST(contexts_are_released_in_balance)
{
  const struct mf_problem problem = fixture_problem();
  struct mf_package *pkg = open_fixture();
  struct mf_op *op[4];
  fakecuda_use("devices=2", NULL);
  for(int i = 0; i < 4; i++)
    ck_assert_int_eq(mf_op_create(pkg, &problem, i % 2, 8, &op[i]), MF_OK);
  ck_assert_int_eq(alive(), 8); /* a use of a context and a module each */
  for(int i = 0; i < 4; i++) {
    mf_op_destroy(op[i]);
    ck_assert_int_eq(alive(), 8 - 2 * (i + 1));
  }
  mf_package_close(pkg);
}
END_TEST

/* ---- misses come early ---- */
/* Whatever the device is like: once create and bind succeeded, every token count of the op is launched. */
START_TEST(no_miss_at_the_first_token)
{
  static const char *const scripts[] = {"",        "sms=131",      "sms=132",   "sms=200",        "occupancy=0",  "occupancy=2", "occupancy=2,sms=66",
                                        "cc=80",   "driver=12080", "load_fail", "map_fail",       "driver=13020", "mem=1000000", "name=NVIDIA H20",
                                        "devices=8"};
  const struct mf_problem problem = fixture_problem();
  int served = 0;
  for(size_t i = 0; i < sizeof(scripts) / sizeof(scripts[0]); i++) {
    struct rig r = {.gpus = 0};
    struct mf_op *op = NULL;
    struct mf_layer *layer = NULL;
    static _Alignas(256) unsigned char memory[3][PART];
    struct mf_weights w = {.struct_size = sizeof(w), .w13 = memory[0], .w2 = memory[0], .s13 = (const void *)memory[0], .s2 = (const void *)memory[0]};
    char why[256];
    fakecuda_use(scripts[i], NULL);
    r.pkg = open_fixture();
    ck_assert_int_eq(cuda_api_open(&r.api, why, sizeof(why)), 0);
    if(mf_op_create(r.pkg, &problem, 0, 8, &op) == MF_OK && mf_layer_bind(op, &w, &layer) == MF_OK) {
      ck_assert_int_eq(r.api.p_cuCtxPushCurrent(op->context), CUDA_SUCCESS);
      for(int tokens = 1; tokens <= 8; tokens++) {
        const struct mf_call call = {.struct_size = sizeof(call), .tokens = tokens, .x = memory[0], .logits = memory[0], .out = memory[1],
                                     .workspace = memory[2]};
        ck_assert_msg(mf_moe_forward(layer, &call, NULL) == MF_OK, "%s: %d tokens", scripts[i], tokens);
      }
      ck_assert_int_eq(r.api.p_cuCtxPopCurrent(NULL), CUDA_SUCCESS);
      served++;
    }
    mf_layer_destroy(layer);
    mf_op_destroy(op);
    mf_package_close(r.pkg);
  }
  ck_assert_int_eq(served, 7);
}
END_TEST

/* ---- structs of other versions ---- */
/* The rule itself, between versions of 8, 16 and 24 bytes. */
START_TEST(structs_of_any_version)
{
  const unsigned char given[32] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const unsigned char zero[32] = {0};
  unsigned char own[16];
  ck_assert_int_eq(struct_take(own, 16, 8, given, 7), 0); /* older than the first version */
  memset(own, 0xee, sizeof(own));
  ck_assert_int_ne(struct_take(own, 16, 8, given, 8), 0); /* an older caller's: the rest is neutral */
  ck_assert_mem_eq(own, given, 8);
  ck_assert_mem_eq(own + 8, zero, 8);
  ck_assert_int_ne(struct_take(own, 16, 8, given, 16), 0);
  ck_assert_mem_eq(own, given, 16);
  ck_assert_int_ne(struct_take(own, 16, 8, given, 24), 0); /* a newer caller's, without anything new in it */
  ck_assert_mem_eq(own, given, 16);
  ck_assert_int_eq(struct_take(own, 8, 8, given, 16), 0); /* and with */
}
END_TEST

/* Every public struct, as the first version had it, as it is, and longer. */
START_TEST(first_versions_are_served)
{
  struct {
    struct mf_problem now;
    uint64_t later;
  } problem = {.now = fixture_problem()};
  struct {
    struct mf_weights now;
    uint64_t later;
  } weights;
  struct {
    struct mf_call now;
    uint64_t later;
  } call;
  struct {
    struct mf_package_entry now;
    uint64_t later;
  } entry;
  const size_t sizes[][3] = {{80, 72, 64}, {sizeof(problem.now), sizeof(weights.now), sizeof(call.now)}, {sizeof(problem), sizeof(weights), sizeof(call)}};
  struct rig r;
  rig_start(&r, 1, "");
  memset(&weights, 0, sizeof(weights));
  memset(&call, 0, sizeof(call));
  for(int i = 0; i < 3; i++) {
    struct mf_op *op;
    struct mf_layer *layer;
    problem.now.struct_size = (uint32_t)sizes[i][0];
    ck_assert_int_eq(mf_op_create(r.pkg, &problem.now, 0, 8, &op), MF_OK);
    weights.now = weights_of(&r, 0, 0);
    weights.now.struct_size = (uint32_t)sizes[i][1];
    ck_assert_int_eq(mf_layer_bind(op, &weights.now, &layer), MF_OK);
    call.now = call_of(&r, 0, 2, 0);
    call.now.struct_size = (uint32_t)sizes[i][2];
    ck_assert_int_eq(mf_moe_forward(layer, &call.now, NULL), MF_OK);
    mf_layer_destroy(layer);
    mf_op_destroy(op);
  }
  problem.later = weights.later = call.later = 1;
  {
    struct mf_op *op;
    struct mf_layer *layer = bind(&r, 0, 0), *other;
    ck_assert_int_eq(mf_op_create(r.pkg, &problem.now, 0, 8, &op), MF_ERR_USAGE);
    ck_assert_int_eq(mf_layer_bind(r.gpu[0].op, &weights.now, &other), MF_ERR_USAGE);
    ck_assert_int_eq(mf_moe_forward(layer, &call.now, NULL), MF_ERR_USAGE);
    call.now.struct_size = 60;
    ck_assert_int_eq(mf_moe_forward(layer, &call.now, NULL), MF_ERR_USAGE);
    mf_layer_destroy(layer);
  }
  memset(&entry, 0xee, sizeof(entry));
  entry.now.struct_size = 144;
  ck_assert_int_eq(mf_package_entry_at(r.pkg, 0, &entry.now), MF_OK);
  ck_assert_uint_eq(((unsigned char *)&entry)[144], 0xee); /* an older caller's struct ends there */
  entry.now.struct_size = sizeof(entry);
  ck_assert_int_eq(mf_package_entry_at(r.pkg, 0, &entry.now), MF_OK);
  ck_assert_uint_eq(entry.later, 0);
  entry.now.struct_size = 143;
  ck_assert_int_eq(mf_package_entry_at(r.pkg, 0, &entry.now), MF_ERR_USAGE);
  rig_end(&r);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("contract");
  TCase *tc = tcase_create("contract");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_test(tc, forward_is_one_launch);
  tcase_add_test(tc, layers_share_a_workspace);
  tcase_add_test(tc, streams_have_their_own_workspaces);
  tcase_add_test(tc, two_gpus_in_one_process);
  tcase_add_test(tc, failed_binds_leave_the_context);
  tcase_add_test(tc, failed_creates_leave_nothing);
  tcase_add_test(tc, contexts_are_released_in_balance);
  tcase_add_test(tc, no_miss_at_the_first_token);
  tcase_add_test(tc, structs_of_any_version);
  tcase_add_test(tc, first_versions_are_served);
  suite_add_tcase(suite, tc);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
