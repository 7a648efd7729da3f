/* test_device_emu.c - the emulated device as the tuner sees it: the device behind device.h, its worker. What the emulator itself finds and computes is tested
 * by test_emu*.c, its driver by test_emu_driver.c; `moeforge tune --device emu` by test_tune_emu.c. */
#include "device_emu_fixture.h"

#include <unistd.h>

#include "datagen.h"
#include "device_client.h"
#include "device_judge.h"
#include "emit.h"
#include "family.h"
#include "recipe.h"
#include "space.h"
#include "worker.h"

static char program[4096]; /* this one */

/* ---- the device: a real kernel of the family, on the smallest shape that it serves ---- */
struct subject {
  struct model_spec spec;
  struct device_info dev;
  struct candidate_list list;
  struct artifact art;
  void *image;
  size_t bytes;
};

static void subject_begin(struct subject *s)
{
  struct error err;
  memset(s, 0, sizeof(*s));
  ck_assert_int_eq(spec_read("specs/models/tiny.yaml", &s->spec, NULL, NULL, &err), MF_OK);
  ck_assert_int_eq(device_spec_read("specs/devices/emu-sm90.yaml", &s->dev, NULL, NULL, &err), MF_OK);
  ck_assert_int_eq(space_enumerate(&s->spec.problem, &s->dev, 1, 2, EFFORT_QUICK, &s->list, NULL, NULL, &err), MF_OK);
  ck_assert_int_eq(emit_source(&s->spec.problem, s->spec.name, &s->list.items[0].schedule, &s->dev, &s->art, &err), MF_OK);
  s->bytes = emu_image_bytes(s->art.source, 0);
  s->image = malloc(s->bytes);
  emu_image_make(s->list.items[0].recipe.kernel, s->art.source, NULL, 0, s->image);
}

static void subject_end(struct subject *s)
{
  free(s->image);
  free(s->art.source);
  candidate_list_free(&s->list);
}

static const struct test_case cases[] = {{.tokens = 2, .routing = ROUTING_UNIFORM, .data = CASE_NORMAL, .seed = 3},
                                         {.tokens = 1, .routing = ROUTING_ZIPF, .data = CASE_NORMAL, .seed = 4}};

/* 1: with UBSan in the kernel, which this program must have. */
START_TEST(a_kernel_is_judged)
{
  struct subject s;
  struct device_emulation e = emulation_of("c++");
  struct device_kernel *kernel = NULL;
  struct device *dev = NULL;
  struct check_result result, kept;
  struct error err = {MF_OK, ""};
  int count = 0;
  subject_begin(&s);
  e.sanitize = _i == 1;
  device_emu_configure(&e);
  ck_assert(device_emu.count(&count, &err) == MF_OK && count == 1);
  ck_assert_msg(device_emu.open(0, NULL, &dev, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(device_emu.load_problem(dev, &s.spec.problem, 1, 1, 2, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(device_emu.load_kernel(dev, s.image, s.bytes, &s.list.items[0].recipe, &kernel, &err) == MF_OK, "%s", err.text);
  struct judge_run run = {.ops = &device_emu, .dev = dev, .kernel = kernel, .problem = &s.spec.problem, .routed_scaling = 1, .cache_dir = folder, .layers = 1,
                          .replays = 3, .timeout_ms = 1000};
  check_begin(&result);
  for(int i = 0; i < 2; i++) {
    ck_assert_msg(judge_case(&run, &cases[i], i, &result, &err) == MF_OK, "%s", err.text);
    ck_assert_msg(result.passed, "%s", result.detail);
  }
  ck_assert(result.worst_error > 0 && result.worst_error < 0.2);
  check_begin(&kept);
  for(int i = 0; i < 2; i++) /* verdicts of equal outputs are kept: with all their values */
    ck_assert_msg(judge_case(&run, &cases[i], i, &kept, &err) == MF_OK, "%s", err.text);
  ck_assert_mem_eq(kept.worst, result.worst, sizeof(kept.worst));
  ck_assert_double_eq(kept.worst_error, result.worst_error);
  ck_assert_int_eq(device_emu.open_profile(dev, &kernel, 1, 1, ROUTING_UNIFORM, 1, 2, &err), MF_ERR_UNSUPPORTED);
  ck_assert_int_eq(device_emu.load_kernel(dev, s.image, s.bytes - 1, &s.list.items[0].recipe, &kernel, &err), MF_ERR_CORRUPT);
  device_emu.close(dev);
  subject_end(&s);
}
END_TEST

START_TEST(weights_are_the_reference_s)
{
  const struct device_emulation e = emulation_of("c++");
  const struct layer_part {
    enum data_stream stream;
    size_t count;
  } parts[] = {{DATA_W13, 1003}, {DATA_W2, 64}};
  struct cuda_api api;
  CUmodule module = NULL;
  CUfunction function = NULL;
  char image[512];
  uint8_t have[1024], want[1024];
  device_emu_configure(&e);
  emu_driver(&api);
  ck_assert_uint_le(emu_image_builtin_bytes(), sizeof(image));
  emu_image_make_builtin(image);
  ck_assert_int_eq(api.p_cuModuleLoadData(&module, image), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuModuleGetFunction(&function, module, "mf_floor"), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuModuleGetFunction(&function, module, "mf_nothing"), CUDA_ERROR_NOT_FOUND);
  ck_assert_int_eq(api.p_cuModuleGetFunction(&function, module, "mf_gen_weights"), CUDA_SUCCESS);
  for(int i = 0; i < 2; i++) {
    CUlaunchConfig config = {.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 256, .blockDimY = 1, .blockDimZ = 1};
    CUdeviceptr to = 0;
    uint64_t first = 16, bytes = parts[i].count, seed = data_layer_seed(3);
    uint32_t stream = parts[i].stream;
    void *params[] = {&to, &first, &bytes, &seed, &stream};
    ck_assert_int_eq(api.p_cuMemAlloc(&to, bytes), CUDA_SUCCESS);
    ck_assert_int_eq(api.p_cuLaunchKernelEx(&config, function, params, NULL), CUDA_SUCCESS);
    ck_assert_int_eq(api.p_cuMemcpyDtoH(have, to, bytes), CUDA_SUCCESS);
    data_weights(seed, parts[i].stream, first, bytes, want);
    ck_assert_mem_eq(have, want, bytes);
    ck_assert_int_eq(api.p_cuMemFree(to), CUDA_SUCCESS);
  }
  ck_assert_int_eq(api.p_cuModuleUnload(module), CUDA_SUCCESS);
}
END_TEST

/* ---- through a worker ---- */
START_TEST(a_worker_judges)
{
  struct subject s;
  const struct device_emulation e = emulation_of("c++");
  const uint64_t seed = 12345;
  const struct mf_problem *problem;
  struct device_client *client = NULL;
  struct check_result result;
  struct error err = {MF_OK, ""};
  int kernel = 0;
  subject_begin(&s);
  problem = &s.spec.problem;
  const struct check_plan plan = {.problem = problem, .routed_scaling = 1, .cache_dir = folder, .cases = cases, .ncases = 1, .layers = 1, .replays = 2,
                                  .timeout_ms = 60000, .seed = &seed};
  ck_assert_msg(device_client_start_emulated(program, &e, 1, &client, &err) == MF_OK, "%s", err.text);
  ck_assert(device_client_info(client)->emulated);
  ck_assert_str_eq(device_client_info(client)->name, "emu-sm90");
  ck_assert_msg(device_client_load_problem(client, problem, 1, 1, 2, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(device_client_load_kernel(client, s.image, s.bytes, &s.list.items[0].recipe, &kernel, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(device_client_check(client, kernel, &plan, &result, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(result.passed, "%s", result.detail);
  ck_assert_int_eq(device_client_open_profile(client, &kernel, 1, 1, ROUTING_UNIFORM, 1, 2, &err), MF_ERR_UNSUPPORTED);
  ck_assert(device_client_alive(client));
  device_client_stop(client);
  subject_end(&s);
}
END_TEST

START_TEST(a_worker_without_a_compiler)
{
  const struct device_emulation e = emulation_of("no-such-compiler");
  struct device_client *client = NULL;
  struct error err = {MF_OK, ""};
  ck_assert_int_eq(device_client_start_emulated(program, &e, 1, &client, &err), MF_ERR_TOOLKIT);
  ck_assert_ptr_nonnull(strstr(err.text, "MOEFORGE_CXX"));
  ck_assert_ptr_null(client);
}
END_TEST

static Suite *emu_suite(void)
{
  Suite *suite = suite_create("device_emu");
  TCase *tc = tcase_create("device");
  tcase_add_loop_test(tc, a_kernel_is_judged, 0, SANITIZED ? 2 : 1);
  tcase_add_test(tc, weights_are_the_reference_s);
  tcase_add_test(tc, a_worker_judges);
  tcase_add_test(tc, a_worker_without_a_compiler);
  tcase_add_checked_fixture(tc, begin, end);
  tcase_set_timeout(tc, 240);
  suite_add_tcase(suite, tc);
  return suite;
}

int main(int argc, char **argv)
{
  const ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - 1);
  SRunner *runner;
  int failed;
  if(argc == 4 && strcmp(argv[1], "--worker") == 0)
    return strcmp(argv[2], "device") == 0 ? worker_main_device(atoi(argv[3])) : EXIT_FAILURE;
  program[n > 0 ? n : 0] = '\0';
  runner = srunner_create(emu_suite());
  srunner_run_all(runner, CK_ENV);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
