/* test_runtime.c - the public API over the scripted driver: typed misses, dispatch, workspace parts, capture, threads, leaks.
 *
 * Packages are made in memory by package_build() from the fixture's recipe. */
#include "fake_libcuda.h"
#include "package_fixture.h"

#include <check.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static struct mf_package *open_set(struct package_set *set)
{
  struct mf_package *pkg = NULL;
  char why[200] = "";
  struct error err;
  unsigned char *bytes;
  size_t size;
  ck_assert_msg(package_build(set->items, set->count, true, &bytes, &size, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(package_parse(bytes, size, &pkg, why, sizeof(why)) == MF_OK, "%s", why);
  return pkg;
}

/* Tokens 1..2 and 3..4 with one recipe, 5..8 with another; both in one cubin. */
static struct mf_package *open_fixture(void)
{
  static struct package_set set;
  package_set_init(&set);
  package_set_add(&set, 1, 2);
  package_set_add(&set, 3, 4)->recipe = &set.recipes[0];
  package_set_add(&set, 5, 8);
  set.recipes[2].workspace_bytes = 30000;
  set.recipes[2].fields[12].value = 99;
  return open_set(&set);
}

static int alive(void)
{
  fakecuda_alive_fn *fn;
  *(void **)(void *)&fn = fakecuda_symbol("fakecuda_alive");
  return fn();
}

/* ---- typed misses ---- */
static const struct {
  const char *script;
  int max_tokens, device, other_shape;
  enum mf_status status;
} misses[] = {
    {"", 8, 0, 0, MF_OK},
    {"", 1, 0, 0, MF_OK},
    {"", 9, 0, 0, MF_MISS_TOKENS},
    {"", 100000000, 0, 0, MF_MISS_TOKENS},
    {"", 0, 0, 0, MF_ERR_USAGE},
    {"", -3, 0, 0, MF_ERR_USAGE},
    {"", 8, 0, 1, MF_MISS_SHAPE},
    {"", 8, 1, 0, MF_ERR_NO_DEVICE},
    {"", 8, -1, 0, MF_ERR_NO_DEVICE},
    {"devices=2", 8, 1, 0, MF_OK},
    {"no_device", 8, 0, 0, MF_ERR_NO_DEVICE},
    {"no_device", 8, 0, 1, MF_MISS_SHAPE}, /* needs no GPU */
    {"cc=80", 8, 0, 0, MF_MISS_DEVICE},
    {"cc=100", 8, 0, 0, MF_MISS_DEVICE},
    {"name=NVIDIA H100 PCIe", 8, 0, 0, MF_MISS_DEVICE},
    {"cc=80", 9, 0, 0, MF_MISS_DEVICE}, /* the device's answer comes before the token count's */
    {"driver=12080", 8, 0, 0, MF_MISS_DRIVER},
    {"driver=12080", 9, 0, 0, MF_MISS_TOKENS},
    {"driver=12080,sms=114", 8, 0, 0, MF_MISS_DRIVER},
    {"driver=13020", 8, 0, 0, MF_OK},
    {"sms=114", 8, 0, 0, MF_MISS_SMS},
    {"sms=140", 8, 0, 0, MF_OK},
    {"occupancy=0", 8, 0, 0, MF_MISS_SMS},
    {"load_fail", 8, 0, 0, MF_MISS_DEVICE},
};

START_TEST(typed_misses)
{
  struct mf_problem problem = fixture_problem();
  struct mf_package *pkg = open_fixture();
  struct mf_op *op = NULL;
  enum mf_status rc;
  fakecuda_use(misses[_i].script, NULL);
  if(misses[_i].other_shape)
    problem.top_k = 3;
  rc = mf_op_create(pkg, &problem, misses[_i].device, misses[_i].max_tokens, &op);
  ck_assert_msg(rc == misses[_i].status, "%s, %d tokens: %s", misses[_i].script, misses[_i].max_tokens, mf_status_name(rc));
  ck_assert_int_eq(op != NULL, rc == MF_OK);
  mf_op_destroy(op);
  ck_assert_int_eq(alive(), 0);
  mf_package_close(pkg);
}
END_TEST

/* A grid that waits for itself must find room, whichever way it is launched. */
START_TEST(residency_of_dependent_launches)
{
  static const struct {
    uint32_t flags;
    enum mf_status status;
  } cases[] = {{0, MF_OK}, {MF_RECIPE_COOPERATIVE, MF_MISS_SMS}, {MF_RECIPE_PDL, MF_MISS_SMS}};
  const struct mf_problem problem = fixture_problem();
  struct package_set set;
  struct mf_package *pkg;
  struct mf_op *op = NULL;
  package_set_init(&set);
  package_set_add(&set, 1, 8);
  set.recipes[0].flags = cases[_i].flags;
  fakecuda_use("occupancy=0", NULL);
  pkg = open_set(&set);
  ck_assert_int_eq(mf_op_create(pkg, &problem, 0, 8, &op), cases[_i].status);
  mf_op_destroy(op);
  mf_package_close(pkg);
}
END_TEST

START_TEST(no_driver_library)
{
  const struct mf_problem problem = fixture_problem();
  struct mf_package *pkg = open_fixture();
  struct mf_op *op;
  setenv("MOEFORGE_LIBCUDA", "/nonexistent/libcuda.so", 1);
  ck_assert_int_eq(mf_op_create(pkg, &problem, 0, 8, &op), MF_ERR_NO_DEVICE);
  ck_assert_ptr_null(op);
  mf_package_close(pkg);
}
END_TEST

/* Every field of the problem counts; what 0 stands for does not. */
START_TEST(problem_fields)
{
  const struct mf_problem good = fixture_problem();
  struct mf_package *pkg = open_fixture();
  struct mf_op *op;
  fakecuda_use("", NULL);
#define TRY(type, name)                                                                     \
  {                                                                                         \
    struct mf_problem p = good;                                                             \
    p.name += (type)3;                                                                      \
    ck_assert_msg(mf_op_create(pkg, &p, 0, 8, &op) == MF_MISS_SHAPE, "%s", #name);          \
  }
  PACKAGE_PROBLEM_TABLE(TRY)
#undef TRY
  {
    struct mf_problem p = good;
    p.expert_count = p.groups = p.groups_kept = 0;
    p.swiglu_alpha = 1;
    ck_assert_int_eq(mf_op_create(pkg, &p, 0, 8, &op), MF_OK);
    mf_op_destroy(op);
  }
  mf_package_close(pkg);
}
END_TEST

/* Entries for 114 and 132 SMs of one name: the device's own count, else the largest below, else the smallest above. */
START_TEST(sm_counts)
{
  static const struct {
    const char *script;
    enum mf_status status;
    int32_t constant; /* of the recipe that must be used: its SM count */
  } cases[] = {{"sms=132", MF_OK, 132}, {"sms=114", MF_OK, 114}, {"sms=120", MF_OK, 114}, {"sms=200", MF_OK, 132}, {"sms=100", MF_MISS_SMS, 0}};
  static const int sms[] = {132, 114};
  const struct mf_problem problem = fixture_problem();
  struct package_set set;
  struct mf_package *pkg;
  struct mf_op *op;
  package_set_init(&set);
  for(int i = 0; i < 2; i++) {
    struct package_item *it = package_set_add(&set, 1, 8);
    set.devices[i] = *it->device;
    set.devices[i].sms = sms[i];
    it->device = &set.devices[i];
    set.recipes[i].grid[0] = set.recipes[i].min_sms = (uint32_t)sms[i];
    set.recipes[i].fields[12].value = sms[i];
  }
  pkg = open_set(&set);
  fakecuda_use(cases[_i].script, NULL);
  ck_assert_int_eq(mf_op_create(pkg, &problem, 0, 8, &op), cases[_i].status);
  if(op != NULL)
    ck_assert_int_eq(op->kernels[op->kernel_of[1]].recipe->fields[12].value, cases[_i].constant);
  mf_op_destroy(op);
  mf_package_close(pkg);
}
END_TEST

START_TEST(gap_in_tokens)
{
  const struct mf_problem problem = fixture_problem();
  struct package_set set;
  struct mf_package *pkg;
  struct mf_op *op;
  package_set_init(&set);
  package_set_add(&set, 1, 2);
  package_set_add(&set, 4, 8);
  pkg = open_set(&set);
  fakecuda_use("", NULL);
  ck_assert_int_eq(mf_op_create(pkg, &problem, 0, 2, &op), MF_OK);
  mf_op_destroy(op);
  ck_assert_int_eq(mf_op_create(pkg, &problem, 0, 3, &op), MF_MISS_TOKENS);
  ck_assert_int_eq(mf_op_create(pkg, &problem, 0, 8, &op), MF_MISS_TOKENS);
  mf_package_close(pkg);
}
END_TEST

/* ---- calls ---- */
struct seen {
  int count;
  struct fixture_params params;
};

static void on_launch(void *opaque, const struct fakecuda_launch *launch)
{
  struct seen *seen = opaque;
  seen->count++;
  memcpy(&seen->params, launch->params[0], sizeof(seen->params));
}

struct bench {
  struct mf_package *pkg;
  struct mf_op *op;
  struct mf_layer *layer;
  struct cuda_api api;
  CUcontext context;
  CUdeviceptr workspace, weights, x, out;
  struct seen seen;
};

static void bench_start(struct bench *b, const char *script)
{
  const struct mf_problem problem = fixture_problem();
  struct mf_weights w;
  fakecuda_on_launch_fn *hook;
  char why[256];
  memset(b, 0, sizeof(*b));
  fakecuda_use(script, NULL);
  b->pkg = open_fixture();
  ck_assert_int_eq(mf_op_create(b->pkg, &problem, 0, 8, &b->op), MF_OK);
  ck_assert_int_eq(cuda_api_open(&b->api, why, sizeof(why)), 0);
  ck_assert_int_eq(b->api.p_cuDevicePrimaryCtxRetain(&b->context, 0), CUDA_SUCCESS);
  ck_assert_int_eq(b->api.p_cuCtxPopCurrent(NULL), CUDA_ERROR_INVALID_CONTEXT); /* op_create left no context behind */
  ck_assert_int_eq(b->api.p_cuCtxPushCurrent(b->context), CUDA_SUCCESS);
  ck_assert_int_eq(b->api.p_cuMemAlloc(&b->workspace, mf_op_workspace_size(b->op)), CUDA_SUCCESS);
  ck_assert_int_eq(b->api.p_cuMemAlloc(&b->weights, 4096), CUDA_SUCCESS);
  ck_assert_int_eq(b->api.p_cuMemAlloc(&b->x, 16384), CUDA_SUCCESS);
  ck_assert_int_eq(b->api.p_cuMemAlloc(&b->out, 16384), CUDA_SUCCESS);
  *(void **)(void *)&hook = fakecuda_symbol("fakecuda_on_launch");
  hook(on_launch, &b->seen);
  memset(&w, 0, sizeof(w));
  w.struct_size = sizeof(w);
  w.w13 = w.w2 = (const void *)(uintptr_t)b->weights;
  w.s13 = w.s2 = (const float *)(uintptr_t)b->weights;
  w.routed_scaling = 2.5f;
  ck_assert_int_eq(mf_layer_bind(b->op, &w, &b->layer), MF_OK);
}

static void bench_end(struct bench *b)
{
  const CUdeviceptr memory[] = {b->workspace, b->weights, b->x, b->out};
  for(size_t i = 0; i < 4; i++)
    ck_assert_int_eq(b->api.p_cuMemFree(memory[i]), CUDA_SUCCESS);
  mf_layer_destroy(b->layer);
  mf_op_destroy(b->op);
  mf_package_close(b->pkg);
  ck_assert_int_eq(b->api.p_cuCtxPopCurrent(NULL), CUDA_SUCCESS);
  ck_assert_int_eq(b->api.p_cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  ck_assert_int_eq(alive(), 0);
  cuda_api_close(&b->api);
}

static struct mf_call bench_call(const struct bench *b, int tokens)
{
  return (struct mf_call){.struct_size = sizeof(struct mf_call), .tokens = tokens, .x = (const void *)(uintptr_t)b->x,
                          .logits = (const void *)(uintptr_t)b->weights, .out = (void *)(uintptr_t)b->out, .workspace = (void *)(uintptr_t)b->workspace};
}

/* Two distinct recipes, one cubin: two kernels, one module, two parts of the workspace. */
START_TEST(kernels_and_workspace_parts)
{
  struct bench b;
  bench_start(&b, "");
  ck_assert_uint_eq(b.op->nkernels, 2);
  ck_assert_uint_eq(b.op->nmodules, 1);
  ck_assert_uint_eq(mf_op_workspace_size(b.op), 20224 + 30208); /* 20000 and 30000 rounded up to 256 */
  ck_assert_int_eq(mf_op_max_tokens(b.op), 8);
  bench_end(&b);
}
END_TEST

START_TEST(dispatch_by_tokens)
{
  struct bench b;
  bench_start(&b, "");
  for(int tokens = 1; tokens <= 8; tokens++) {
    const struct mf_call call = bench_call(&b, tokens);
    ck_assert_int_eq(mf_moe_forward(b.layer, &call, NULL), MF_OK);
    ck_assert_int_eq(b.seen.count, tokens);
    ck_assert_int_eq(b.seen.params.tokens, tokens);
    ck_assert_int_eq(b.seen.params.constant, tokens <= 4 ? -7 : 99);
    ck_assert_uint_eq(b.seen.params.workspace, b.workspace + (tokens <= 4 ? 0u : 20224u));
    ck_assert_float_eq(b.seen.params.scaling, 2.5f);
  }
  bench_end(&b);
}
END_TEST

START_TEST(workspace_init_covers_all_parts)
{
  const unsigned char *bytes;
  struct bench b;
  bench_start(&b, "");
  bytes = (const unsigned char *)(uintptr_t)b.workspace;
  ck_assert_int_eq(b.api.p_cuMemsetD8(b.workspace, 0xff, mf_op_workspace_size(b.op)), CUDA_SUCCESS);
  ck_assert_int_eq(mf_workspace_init(b.op, (void *)(uintptr_t)b.workspace, NULL), MF_OK);
  for(size_t i = 0; i < mf_op_workspace_size(b.op); i++)
    ck_assert_uint_eq(bytes[i], i < 16384 || (i >= 20224 && i < 20224 + 16384) ? 0 : 0xff);
  ck_assert_int_eq(mf_workspace_init(b.op, NULL, NULL), MF_ERR_USAGE);
  ck_assert_int_eq(mf_workspace_init(NULL, (void *)(uintptr_t)b.workspace, NULL), MF_ERR_USAGE);
  bench_end(&b);
}
END_TEST

START_TEST(forward_refuses)
{
  struct mf_call call;
  struct bench b;
  bench_start(&b, "");
  call = bench_call(&b, 9);
  ck_assert_int_eq(mf_moe_forward(b.layer, &call, NULL), MF_MISS_TOKENS);
  call = bench_call(&b, -1);
  ck_assert_int_eq(mf_moe_forward(b.layer, &call, NULL), MF_ERR_USAGE);
  call = bench_call(&b, 1);
  call.workspace = NULL;
  ck_assert_int_eq(mf_moe_forward(b.layer, &call, NULL), MF_ERR_USAGE);
  call = bench_call(&b, 0);
  call.workspace = NULL;
  ck_assert_int_eq(mf_moe_forward(b.layer, &call, NULL), MF_OK); /* no tokens: nothing is looked at */
  call = bench_call(&b, 1);
  call.struct_size = 8;
  ck_assert_int_eq(mf_moe_forward(b.layer, &call, NULL), MF_ERR_USAGE);
  ck_assert_int_eq(mf_moe_forward(b.layer, NULL, NULL), MF_ERR_USAGE);
  ck_assert_int_eq(mf_moe_forward(NULL, &call, NULL), MF_ERR_USAGE);
  ck_assert_int_eq(b.seen.count, 0);
  bench_end(&b);
}
END_TEST

/* A newer caller's longer struct is fine as long as what this version does not know is zero. */
START_TEST(longer_structs)
{
  struct {
    struct mf_call call;
    uint64_t future;
  } longer;
  struct bench b;
  bench_start(&b, "");
  memset(&longer, 0, sizeof(longer));
  longer.call = bench_call(&b, 1);
  longer.call.struct_size = sizeof(longer);
  ck_assert_int_eq(mf_moe_forward(b.layer, &longer.call, NULL), MF_OK);
  longer.future = 1;
  ck_assert_int_eq(mf_moe_forward(b.layer, &longer.call, NULL), MF_ERR_USAGE);
  bench_end(&b);
}
END_TEST

/* The struct of a caller that knows no ids yet: nothing behind it is read. */
START_TEST(shorter_structs)
{
  struct mf_call call;
  unsigned char *old;
  struct bench b;
  bench_start(&b, "");
  call = bench_call(&b, 1);
  call.struct_size = offsetof(struct mf_call, ids);
  old = malloc(call.struct_size); /* a sanitizer sees what is read behind it */
  ck_assert_ptr_nonnull(old);
  memcpy(old, &call, call.struct_size);
  ck_assert_int_eq(mf_moe_forward(b.layer, (const struct mf_call *)(const void *)old, NULL), MF_OK);
  ck_assert_int_eq(b.seen.count, 1);
  call.struct_size -= 8;
  memcpy(old, &call, call.struct_size);
  ck_assert_int_eq(mf_moe_forward(b.layer, (const struct mf_call *)(const void *)old, NULL), MF_ERR_USAGE);
  free(old);
  bench_end(&b);
}
END_TEST

/* The fake driver refuses allocation and synchronisation while a stream captures. */
START_TEST(forward_in_a_graph)
{
  CUstream stream;
  CUgraph graph;
  CUgraphExec exec;
  struct bench b;
  bench_start(&b, "");
  ck_assert_int_eq(b.api.p_cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  ck_assert_int_eq(b.api.p_cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  ck_assert_int_eq(mf_workspace_init(b.op, (void *)(uintptr_t)b.workspace, stream), MF_OK);
  for(int tokens = 1; tokens <= 8; tokens++) {
    const struct mf_call call = bench_call(&b, tokens);
    ck_assert_int_eq(mf_moe_forward(b.layer, &call, stream), MF_OK);
  }
  ck_assert_int_eq(b.api.p_cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
  ck_assert_int_eq(b.api.p_cuGraphInstantiateWithFlags(&exec, graph, 0), CUDA_SUCCESS);
  ck_assert_int_eq(b.seen.count, 0);
  ck_assert_int_eq(b.api.p_cuGraphLaunch(exec, stream), CUDA_SUCCESS);
  ck_assert_int_eq(b.seen.count, 8);
  ck_assert_int_eq(b.api.p_cuGraphExecDestroy(exec), CUDA_SUCCESS);
  ck_assert_int_eq(b.api.p_cuGraphDestroy(graph), CUDA_SUCCESS);
  ck_assert_int_eq(b.api.p_cuStreamDestroy(stream), CUDA_SUCCESS);
  bench_end(&b);
}
END_TEST

START_TEST(forward_failures)
{
  struct mf_call call;
  struct bench b;
  bench_start(&b, "launch_fail");
  call = bench_call(&b, 1);
  ck_assert_int_eq(mf_moe_forward(b.layer, &call, NULL), MF_ERR_DEVICE);
  bench_end(&b);
  bench_start(&b, "");
  ck_assert_int_eq(b.api.p_cuCtxPopCurrent(NULL), CUDA_SUCCESS); /* no current context */
  call = bench_call(&b, 1);
  ck_assert_int_eq(mf_moe_forward(b.layer, &call, NULL), MF_ERR_DEVICE);
  ck_assert_int_eq(b.api.p_cuCtxPushCurrent(b.context), CUDA_SUCCESS);
  bench_end(&b);
}
END_TEST

START_TEST(bind_refuses)
{
  struct mf_weights w;
  struct mf_layer *layer;
  struct bench b;
  bench_start(&b, "");
  memset(&w, 0, sizeof(w));
  ck_assert_int_eq(mf_layer_bind(b.op, &w, &layer), MF_ERR_USAGE); /* struct_size 0 */
  w.struct_size = sizeof(w);
  ck_assert_int_eq(mf_layer_bind(b.op, &w, &layer), MF_ERR_USAGE); /* null pointers */
  ck_assert_ptr_null(layer);
  w.w13 = w.w2 = w.s13 = w.s2 = (const void *)(uintptr_t)(b.weights + 4);
  ck_assert_int_eq(mf_layer_bind(b.op, &w, &layer), MF_MISS_LAYOUT);
  ck_assert_int_eq(mf_layer_bind(b.op, NULL, &layer), MF_ERR_USAGE);
  ck_assert_int_eq(mf_layer_bind(NULL, &w, &layer), MF_ERR_USAGE);
  ck_assert_int_eq(mf_layer_bind(b.op, &w, NULL), MF_ERR_USAGE);
  bench_end(&b);
}
END_TEST

struct thread_work {
  const struct bench *bench;
  int tokens;
  enum mf_status status;
};

static void *forward_many(void *opaque)
{
  struct thread_work *work = opaque;
  const struct mf_call call = bench_call(work->bench, work->tokens);
  work->bench->api.p_cuCtxPushCurrent(work->bench->context);
  for(int i = 0; work->status == MF_OK && i < 500; i++)
    work->status = mf_moe_forward(work->bench->layer, &call, NULL);
  work->bench->api.p_cuCtxPopCurrent(NULL);
  return NULL;
}

START_TEST(threads_share_a_layer)
{
  struct thread_work work[4];
  pthread_t threads[4];
  struct bench b;
  bench_start(&b, "");
  for(int i = 0; i < 4; i++) {
    work[i] = (struct thread_work){.bench = &b, .tokens = 2 * i + 1, .status = MF_OK};
    ck_assert_int_eq(pthread_create(&threads[i], NULL, forward_many, &work[i]), 0);
  }
  for(int i = 0; i < 4; i++) {
    pthread_join(threads[i], NULL);
    ck_assert_int_eq(work[i].status, MF_OK);
  }
  ck_assert_int_eq(b.seen.count, 2000);
  bench_end(&b);
}
END_TEST

START_TEST(destroy_takes_null)
{
  mf_layer_destroy(NULL);
  mf_op_destroy(NULL);
  mf_package_close(NULL);
  ck_assert_uint_eq(mf_op_workspace_size(NULL), 0);
  ck_assert_int_eq(mf_op_max_tokens(NULL), 0);
}
END_TEST

START_TEST(statuses_have_names)
{
  ck_assert_str_eq(mf_status_name(MF_MISS_SMS), "MF_MISS_SMS");
  ck_assert_str_eq(mf_status_string(MF_OK), "success");
  ck_assert_str_eq(mf_status_name((enum mf_status)999), "MF_UNKNOWN");
  ck_assert_ptr_nonnull(mf_status_string((enum mf_status)999));
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("runtime");
  TCase *select = tcase_create("select"), *calls = tcase_create("calls");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_loop_test(select, typed_misses, 0, (int)(sizeof(misses) / sizeof(misses[0])));
  tcase_add_loop_test(select, residency_of_dependent_launches, 0, 3);
  tcase_add_test(select, no_driver_library);
  tcase_add_test(select, problem_fields);
  tcase_add_loop_test(select, sm_counts, 0, 5);
  tcase_add_test(select, gap_in_tokens);
  tcase_add_test(calls, kernels_and_workspace_parts);
  tcase_add_test(calls, dispatch_by_tokens);
  tcase_add_test(calls, workspace_init_covers_all_parts);
  tcase_add_test(calls, forward_refuses);
  tcase_add_test(calls, longer_structs);
  tcase_add_test(calls, shorter_structs);
  tcase_add_test(calls, forward_in_a_graph);
  tcase_add_test(calls, forward_failures);
  tcase_add_test(calls, bind_refuses);
  tcase_add_test(calls, threads_share_a_layer);
  tcase_add_test(calls, destroy_takes_null);
  tcase_add_test(calls, statuses_have_names);
  suite_add_tcase(suite, select);
  suite_add_tcase(suite, calls);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
