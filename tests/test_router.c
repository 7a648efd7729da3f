/* test_router.c - the stand-in for a router, executed on the emulated device: it writes what it was given, every word of it, and without a finding. */
#include "emu_fixture.h"

#include "cuda_api.h"
#include "emu.h"
#include "tools/router_params.h"

/* More rows than CTAs, fewer; a row that is no multiple of the threads' reach; words that not all threads have. */
static const struct {
  int sms, tokens, hidden, rows, words;
} cases[] = {{3, 1, 2048, 8, 300}, {4, 8, 1024, 2, 1100}, {2, 3, 3072, 5, 1153}};

static CUfunction load_router(struct cuda_api *api, CUmodule *module)
{
  const char *source = "#include \"tools/router.cu\"\n";
  void *image = malloc(emu_image_bytes(source, 0));
  CUfunction function = NULL;
  ck_assert_ptr_nonnull(image);
  emu_image_make("mf_router", source, NULL, 0, image);
  ck_assert_msg(api->p_cuModuleLoadData(module, image) == CUDA_SUCCESS, "%s", emu_driver_text());
  ck_assert_msg(api->p_cuModuleGetFunction(&function, *module, "mf_router") == CUDA_SUCCESS, "%s", emu_driver_text());
  free(image);
  return function;
}

START_TEST(executed)
{
  struct device_emulation e = {.seed = 3};
  struct mf_router_params params = {.tokens = cases[_i].tokens, .hidden = cases[_i].hidden, .rows = cases[_i].rows, .words = cases[_i].words, .ctas = cases[_i].sms};
  const size_t bytes = 16 * (size_t)cases[_i].words, matrix_bytes = 2 * (size_t)cases[_i].hidden * (size_t)cases[_i].rows;
  unsigned char *from = malloc(bytes), *to = malloc(bytes);
  CUdeviceptr matrix, source, target;
  struct cuda_api api;
  CUmodule module = NULL;
  void *args[] = {&params};
  CUlaunchConfig config = {.gridDimX = (unsigned)cases[_i].sms, .gridDimY = 1, .gridDimZ = 1, .blockDimX = MF_ROUTER_THREADS, .blockDimY = 1, .blockDimZ = 1,
                           .sharedMemBytes = MF_ROUTER_SHARED_BYTES};
  CUfunction function;
  ck_assert(from != NULL && to != NULL);
  for(size_t i = 0; i < bytes; i++)
    from[i] = (unsigned char)(i * 7 % 61); /* finite numbers, whatever is read as such */
  e.info = emu_device_of(cases[_i].sms);
  snprintf(e.template_dir, sizeof(e.template_dir), "templates");
  snprintf(e.emu_dir, sizeof(e.emu_dir), "emu");
  snprintf(e.cache_dir, sizeof(e.cache_dir), "%s", emu_folder);
  snprintf(e.compiler, sizeof(e.compiler), "%s", emu_compiler);
  device_emu_configure(&e);
  emu_driver(&api);
  function = load_router(&api, &module);
  ck_assert(api.p_cuMemAlloc(&matrix, matrix_bytes) == CUDA_SUCCESS && api.p_cuMemAlloc(&source, bytes) == CUDA_SUCCESS && api.p_cuMemAlloc(&target, bytes) == CUDA_SUCCESS);
  ck_assert(api.p_cuMemsetD8(matrix, 0x11, matrix_bytes) == CUDA_SUCCESS && api.p_cuMemsetD8(target, 0xFF, bytes) == CUDA_SUCCESS);
  ck_assert(api.p_cuMemcpyHtoD(source, from, bytes) == CUDA_SUCCESS);
  params.matrix = (const void *)(uintptr_t)matrix;
  params.from = (const void *)(uintptr_t)source;
  params.to = (void *)(uintptr_t)target;
  ck_assert_msg(api.p_cuLaunchKernelEx(&config, function, args, NULL) == CUDA_SUCCESS, "%s", emu_driver_text());
  ck_assert_msg(emu_driver_finding() == EMU_NONE, "%s", emu_driver_text());
  ck_assert(api.p_cuMemcpyDtoH(to, target, bytes) == CUDA_SUCCESS);
  ck_assert_mem_eq(to, from, bytes);
  ck_assert(api.p_cuMemFree(matrix) == CUDA_SUCCESS && api.p_cuMemFree(source) == CUDA_SUCCESS && api.p_cuMemFree(target) == CUDA_SUCCESS);
  ck_assert(api.p_cuModuleUnload(module) == CUDA_SUCCESS);
  free(from);
  free(to);
}
END_TEST

static Suite *suite(void)
{
  Suite *s = suite_create("router");
  TCase *tc = tcase_create("kernel");
  tcase_set_timeout(tc, 120);
  tcase_add_loop_test(tc, executed, 0, (int)(sizeof(cases) / sizeof(cases[0])));
  suite_add_tcase(s, tc);
  return s;
}

int main(void)
{
  SRunner *runner;
  int failed;
  if(!emu_folder_make())
    return 1;
  runner = srunner_create(suite());
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  emu_folder_remove();
  return failed == 0 ? 0 : 1;
}
