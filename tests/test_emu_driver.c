/* test_emu_driver.c - the emulated device as a CUDA driver: kernels compiled when they are loaded, the table of the driver's functions. What the emulator
 * itself finds and computes is tested by test_emu*.c. */
#include "device_emu_fixture.h"

#include <errno.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_api.h"
#include "emit.h"
#include "family.h"

#define HEAD "#include \"hw/hw.cuh\"\nextern \"C\" __device__ const unsigned mf_meta[2] = {7, 9};\nextern \"C\" __global__ void "
#define ADD_ONE                                                                        \
  HEAD "mf_moe(const int *in, int *out, int count) {\n"                                \
       "  const int i = hw::cta_index() * 64 + hw::thread_index();\n"                  \
       "  if(i < count) out[i] = in[i] + 1;\n}\n"
/* Lane 0 writes what the others read without having met it. */
#define RACE                                                                           \
  HEAD "mf_moe(const int *in, int *out, int count) {\n"                                \
       "  int *s = (int *)hw::dynamic_shared();\n"                                     \
       "  if(hw::thread_index() == 0) s[0] = in[0];\n"                                 \
       "  if(hw::thread_index() == 63) out[0] = s[0] + count;\n}\n"
/* Warp 1 waits at a barrier that warp 0 never comes to. */
#define DEADLOCK                                                                       \
  HEAD "mf_moe(const int *in, int *out, int count) {\n"                                \
       "  if(hw::warp_index() == 1) hw::barrier_sync(1, 64);\n"                        \
       "  out[hw::thread_index()] = in[0] + count;\n}\n"

static struct emu_jit_config jit_of(const char *compiler)
{
  const struct emu_jit_config config = {.compiler = compiler, .template_dir = "templates", .emu_dir = "emu", .cache_dir = folder};
  return config;
}

/* ---- compiling ---- */
/* A compiler that counts how often it compiles. */
static const char *counting_compiler(void)
{
  static char path[300];
  snprintf(path, sizeof(path), "%s/cxx", folder);
  shell("printf '#!/bin/sh\\ncase \"$*\" in *\" -c \"*) echo >>%s/count;; esac\\nexec c++ \"$@\"\\n' >%s; chmod +x %s", folder, path, path);
  return path;
}

static int compilations(void)
{
  char path[300];
  struct stat info;
  snprintf(path, sizeof(path), "%s/count", folder);
  return stat(path, &info) == 0 ? (int)info.st_size : 0;
}

static enum emu_jit_status load(const struct emu_jit_config *config, const char *source, char *why)
{
  struct emu_kernel kernel;
  const enum emu_jit_status rc = emu_jit_load(config, source, "mf_moe", &kernel, why, 1024);
  ck_assert((kernel.library != NULL) == (rc == EMU_JIT_OK));
  emu_jit_unload(&kernel);
  return rc;
}

START_TEST(what_is_compiled_is_kept)
{
  const struct emu_jit_config config = jit_of(counting_compiler());
  char why[1024];
  struct emu_kernel kernel;
  ck_assert_msg(emu_jit_load(&config, ADD_ONE, "mf_moe", &kernel, why, sizeof(why)) == EMU_JIT_OK, "%s", why);
  ck_assert_uint_eq(kernel.meta_bytes, 8);
  ck_assert_uint_eq(((const unsigned *)kernel.meta)[1], 9);
  ck_assert((const char *)kernel.meta > (const char *)kernel.code && (const char *)kernel.meta < (const char *)kernel.code + kernel.code_bytes);
  emu_jit_unload(&kernel);
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_OK);
  ck_assert_int_eq(compilations(), 1);
  shell("test `ls %s | grep -c '^kernel-'` = 2", folder); /* source and object, nothing half done */
  ck_assert_int_eq(load(&config, ADD_ONE "// another text\n", why), EMU_JIT_OK);
  ck_assert_int_eq(compilations(), 2);
}
END_TEST

START_TEST(a_changed_header_is_another_kernel)
{
  struct emu_jit_config config = jit_of(counting_compiler());
  char templates[300], emu[300], why[1024];
  snprintf(templates, sizeof(templates), "%s/t", folder);
  snprintf(emu, sizeof(emu), "%s/e", folder);
  shell("cp -r templates %s; mkdir %s; cp emu/hw_host.h emu/emu_hw.h %s", templates, emu, emu);
  config.template_dir = templates;
  config.emu_dir = emu;
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_OK);
  shell("echo '// changed' >>%s/stream/up.cuh", templates);
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_OK);
  ck_assert_int_eq(compilations(), 2);
  shell("echo '// changed' >>%s/hw_host.h", emu);
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_OK);
  ck_assert_int_eq(compilations(), 3);
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_OK);
  ck_assert_int_eq(compilations(), 3);
}
END_TEST

START_TEST(a_damaged_object_is_made_anew)
{
  const struct emu_jit_config config = jit_of(counting_compiler());
  char why[1024];
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_OK);
  shell("for f in %s/kernel-*.so; do echo garbage >$f; done", folder);
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_UNUSABLE);
  ck_assert_ptr_nonnull(strstr(why, "cannot be loaded"));
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_OK);
  ck_assert_int_eq(compilations(), 2);
}
END_TEST

START_TEST(two_processes_compile_the_same)
{
  const struct emu_jit_config config = jit_of("c++");
  pid_t pid[3];
  char why[1024];
  for(int i = 0; i < 3; i++) {
    pid[i] = fork();
    if(pid[i] == 0)
      _exit(load(&config, ADD_ONE, why) == EMU_JIT_OK ? 0 : 1);
  }
  for(int i = 0; i < 3; i++) {
    int status = 0;
    ck_assert_int_eq(waitpid(pid[i], &status, 0), pid[i]);
    ck_assert_int_eq(status, 0);
  }
  shell("test `ls %s | wc -l` = 2", folder);
}
END_TEST

/* Compilers and folders that do not work, and what is said. %s in 'compiler' is the test's folder. */
static const struct {
  const char *prepare, *compiler;
  enum emu_jit_status status;
  const char *text;
} broken[] = {
    {"true", "no-such-compiler", EMU_JIT_NO_COMPILER, "install one (apt-get install g++), or name it in MOEFORGE_CXX"},
    {"true", "/", EMU_JIT_NO_COMPILER, "Permission denied"},
    {"true", "false", EMU_JIT_NO_COMPILER, "it fails to tell its version"},
    {"printf '#!/bin/sh\\ntest $1 = --version && echo 1.0' >cxx", "%s/cxx", EMU_JIT_FAILED, "it said nothing"},
    {"printf '#!/bin/sh\\necho 1.0\\ntest $1 = --version && exit\\necho note: x\\necho a.cc:1: error: y\\nexit 1' >cxx", "%s/cxx", EMU_JIT_FAILED, "a.cc:1: error: y"},
    {"printf '#!/bin/sh\\necho 1.0\\ntest $1 = --version && exit\\nkill -9 $$' >cxx", "%s/cxx", EMU_JIT_NO_MEMORY, "was killed"},
    {"printf '#!/bin/sh\\necho 1.0\\ntest $1 = --version && exit\\necho a.cc:1: fatal error: No space left on device\\nexit 1' >cxx", "%s/cxx", EMU_JIT_IO,
     "No space left"},
};

START_TEST(compilers_that_do_not_work)
{
  char compiler[512], why[1024] = "";
  struct emu_jit_config config;
  snprintf(compiler, sizeof(compiler), broken[_i].compiler, folder); // NOLINT
  shell("cd %s && { %s; } && { test ! -e cxx || chmod +x cxx; }", folder, broken[_i].prepare);
  config = jit_of(compiler);
  ck_assert_int_eq(load(&config, ADD_ONE, why), broken[_i].status);
  ck_assert_msg(strstr(why, broken[_i].text) != NULL && strchr(why, '\n') == NULL, "%s", why);
  shell("test -z \"`ls %s | grep '[.]o$\\|[.]log$\\|[.]so$'`\"", folder); /* nothing is left */
}
END_TEST

START_TEST(sources_and_folders_that_do_not_work)
{
  struct emu_jit_config config = jit_of("c++");
  struct emu_kernel kernel;
  char why[1024];
  ck_assert_int_eq(load(&config, HEAD "mf_moe() { int x = ; }\n", why), EMU_JIT_FAILED);
  ck_assert_ptr_nonnull(strstr(why, ".cc:4:"));
  ck_assert_ptr_nonnull(strstr(why, "error:"));
  ck_assert_int_eq(emu_jit_load(&config, ADD_ONE, "mf_other", &kernel, why, sizeof(why)), EMU_JIT_FAILED);
  config.cache_dir = "/nonexistent";
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_IO);
  config = jit_of("c++");
  config.template_dir = "/nonexistent";
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_IO);
  config = jit_of("c++");
  config.emu_dir = "specs";
  ck_assert_int_eq(load(&config, ADD_ONE, why), EMU_JIT_IO);
  ck_assert_ptr_nonnull(strstr(why, "specs/hw_host.h"));
}
END_TEST

/* ---- the driver ---- */
/* That of this process, as it was configured. */
static struct cuda_api get_driver(void)
{
  struct cuda_api api;
  CUcontext context;
  emu_driver(&api);
  for(size_t i = 0; i < offsetof(struct cuda_api, p_cuFuncGetParamInfo) / sizeof(void *); i++) /* every function of the table but the optional ones */
    ck_assert(i == 0 || ((void *const *)(const void *)&api)[i] != NULL);
  ck_assert_int_eq(api.p_cuInit(0), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
  return api;
}

static struct cuda_api open_driver(void)
{
  const struct device_emulation e = emulation_of("c++");
  device_emu_configure(&e);
  return get_driver();
}

static CUresult load_image(const struct cuda_api *api, const char *source, const void *meta, size_t meta_bytes, CUmodule *module)
{
  const size_t bytes = emu_image_bytes(source, meta_bytes);
  char *image = malloc(bytes);
  CUresult result;
  emu_image_make("mf_moe", source, meta, meta_bytes, image);
  ck_assert(emu_image_valid(image, bytes) && !emu_image_valid(image, bytes - 1) && !emu_image_valid(image, 10));
  result = api->p_cuModuleLoadData(module, image);
  free(image);
  return result;
}

static const char *text_of(const struct cuda_api *api, CUresult result)
{
  const char *text = NULL;
  ck_assert_int_eq(api->p_cuGetErrorString(result, &text), CUDA_SUCCESS);
  return text;
}

/* One launch of one of the kernels above over new memory. */
struct try {
  struct cuda_api api;
  CUmodule module;
  CUfunction function;
  CUdeviceptr in, out;
  int count;
};

static void try_load(struct try *t, const char *source)
{
  int numbers[128];
  t->api = get_driver();
  t->count = 100;
  for(int i = 0; i < 128; i++)
    numbers[i] = 10 * i;
  ck_assert_msg(load_image(&t->api, source, NULL, 0, &t->module) == CUDA_SUCCESS, "%s", emu_driver_text());
  ck_assert_int_eq(t->api.p_cuModuleGetFunction(&t->function, t->module, "mf_moe"), CUDA_SUCCESS);
  ck_assert_int_eq(t->api.p_cuMemAlloc(&t->in, sizeof(numbers)), CUDA_SUCCESS);
  ck_assert_int_eq(t->api.p_cuMemAlloc(&t->out, sizeof(numbers)), CUDA_SUCCESS);
  ck_assert_int_eq(t->api.p_cuMemcpyHtoD(t->in, numbers, sizeof(numbers)), CUDA_SUCCESS);
  ck_assert_int_eq(t->api.p_cuMemsetD8(t->out, 0, sizeof(numbers)), CUDA_SUCCESS);
}

static void try_begin(struct try *t, const char *source)
{
  open_driver();
  try_load(t, source);
}

static void try_end(struct try *t)
{
  ck_assert_int_eq(t->api.p_cuMemFree(t->in), CUDA_SUCCESS);
  ck_assert_int_eq(t->api.p_cuMemFree(t->out), CUDA_SUCCESS);
  ck_assert_int_eq(t->api.p_cuModuleUnload(t->module), CUDA_SUCCESS);
}

static CUresult try_launch(struct try *t, unsigned ctas, unsigned threads, unsigned shared_bytes, bool cooperative)
{
  CUlaunchAttribute attribute = {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value = {.cooperative = 1}};
  CUlaunchConfig config = {.gridDimX = ctas, .gridDimY = 1, .gridDimZ = 1, .blockDimX = threads, .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = shared_bytes,
                           .attrs = &attribute, .numAttrs = cooperative};
  void *params[] = {&t->in, &t->out, &t->count};
  return t->api.p_cuLaunchKernelEx(&config, t->function, params, NULL);
}

START_TEST(memory_is_watched)
{
  struct cuda_api api = open_driver();
  CUdeviceptr a = 0, b = 0, huge = 0;
  size_t before = 0, after = 0, total = 0;
  char bytes[1000] = {1};
  ck_assert_int_eq(api.p_cuMemGetInfo(&before, &total), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemAlloc(&a, 1000), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemAlloc(&b, 1), CUDA_SUCCESS);
  ck_assert(a % 256 == 0 && b % 256 == 0);
  ck_assert_int_eq(api.p_cuMemGetInfo(&after, &total), CUDA_SUCCESS);
  ck_assert_uint_eq(before - after, 1001);
  ck_assert_int_eq(api.p_cuMemcpyHtoD(a, bytes, 1000), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemcpyHtoD(a + 1, bytes, 1000), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(api.p_cuMemcpyDtoH(bytes, a + 900, 101), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(api.p_cuMemcpyDtoD(b, a, 2), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(api.p_cuMemsetD8(b, 5, 2), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(api.p_cuMemsetD8Async(b, 5, 1, NULL), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemcpyDtoD(a + 999, b, 1), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemcpyDtoH(bytes, a, 1000), CUDA_SUCCESS);
  ck_assert(bytes[0] == 1 && bytes[999] == 5);
  ck_assert_int_eq(api.p_cuMemAlloc(&huge, total), CUDA_ERROR_OUT_OF_MEMORY);
  ck_assert_int_eq(api.p_cuMemAlloc(&huge, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
  ck_assert_int_eq(api.p_cuMemFree(a + 1), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(api.p_cuMemFree(a), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemFree(a), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(api.p_cuMemFree(b), CUDA_SUCCESS);
}
END_TEST

START_TEST(a_launch_computes)
{
  struct try t;
  int out[128];
  try_begin(&t, ADD_ONE);
  ck_assert_msg(try_launch(&t, 2, 64, 0, true) == CUDA_SUCCESS, "%s", emu_driver_text());
  ck_assert_int_eq(t.api.p_cuStreamQuery(NULL), CUDA_SUCCESS);
  ck_assert_int_eq(t.api.p_cuMemcpyDtoH(out, t.out, sizeof(out)), CUDA_SUCCESS);
  for(int i = 0; i < 128; i++)
    ck_assert_int_eq(out[i], i < 100 ? 10 * i + 1 : 0);
  try_end(&t);
}
END_TEST

START_TEST(launches_that_a_driver_refuses)
{
  struct try t;
  int ctas = 0;
  try_begin(&t, ADD_ONE);
  ck_assert_int_eq(try_launch(&t, 1, 2048, 0, false), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(try_launch(&t, 0, 64, 0, false), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(try_launch(&t, 1, 64, 50000, false), CUDA_ERROR_INVALID_VALUE); /* without asking first */
  ck_assert_int_eq(t.api.p_cuFuncSetAttribute(t.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 232449), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(t.api.p_cuFuncSetAttribute(t.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 232448), CUDA_SUCCESS);
  ck_assert_int_eq(try_launch(&t, 19, 64, 200000, true), CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE); /* 18 SMs, one CTA each */
  ck_assert_int_eq(try_launch(&t, 18, 64, 200000, true), CUDA_SUCCESS);
  ck_assert_int_eq(try_launch(&t, 1, 33, 0, false), CUDA_ERROR_NOT_SUPPORTED);
  ck_assert_int_eq(t.api.p_cuOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, t.function, 64, 100000), CUDA_SUCCESS);
  ck_assert_int_eq(ctas, 2);
  ck_assert_int_eq(try_launch(&t, 2, 64, 0, false), CUDA_SUCCESS); /* none of these is lasting */
  try_end(&t);
}
END_TEST

/* Kernels that go wrong. */
static const struct {
  const char *source;
  enum emu_finding_kind kind;
  const char *text;
} findings[] = {{RACE, EMU_RACE, "race"}, {DEADLOCK, EMU_DEADLOCK, "deadlock"}};

START_TEST(a_finding_is_told_and_lasts)
{
  char first[2048];
  struct try t;
  int out[1];
  for(int again = 0; again < 2; again++) {
    try_begin(&t, findings[_i].source);
    emu_driver_seed(77, 5);
    ck_assert_int_eq(try_launch(&t, 1, 64, 1024, false), CUDA_ERROR_LAUNCH_FAILED);
    ck_assert_int_eq(emu_driver_finding(), findings[_i].kind);
    ck_assert_ptr_eq(strstr(text_of(&t.api, CUDA_ERROR_LAUNCH_FAILED), "seed 77, launch 0: "), text_of(&t.api, CUDA_ERROR_LAUNCH_FAILED));
    ck_assert_msg(strstr(emu_driver_text(), findings[_i].text) != NULL, "%s", emu_driver_text());
    ck_assert_msg(strstr(emu_driver_text(), ".cc:") != NULL, "%s", emu_driver_text()); /* where */
    if(again > 0)
      ck_assert_str_eq(emu_driver_text(), first);
    snprintf(first, sizeof(first), "%s", emu_driver_text());
    ck_assert_int_eq(t.api.p_cuStreamQuery(NULL), CUDA_ERROR_LAUNCH_FAILED);
    ck_assert_int_eq(t.api.p_cuMemcpyDtoH(out, t.out, sizeof(out)), CUDA_ERROR_LAUNCH_FAILED);
    ck_assert_int_eq(try_launch(&t, 1, 64, 1024, false), CUDA_ERROR_LAUNCH_FAILED);
    try_end(&t);
  }
}
END_TEST

START_TEST(modules_that_do_not_load)
{
  const unsigned right[2] = {7, 9}, wrong[2] = {7, 10};
  struct cuda_api api = open_driver();
  CUmodule module = NULL;
  CUfunction function = NULL;
  char garbage[256] = "\177ELF";
  ck_assert_int_eq(load_image(&api, ADD_ONE, right, sizeof(right), &module), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuModuleGetFunction(&function, module, "mf_other"), CUDA_ERROR_NOT_FOUND);
  ck_assert_int_eq(api.p_cuModuleUnload(module), CUDA_SUCCESS);
  ck_assert_int_eq(load_image(&api, ADD_ONE, wrong, sizeof(wrong), &module), CUDA_ERROR_INVALID_IMAGE);
  ck_assert_ptr_nonnull(strstr(text_of(&api, CUDA_ERROR_INVALID_IMAGE), "differs from the cubin's in byte 4 (9, 10)"));
  ck_assert_int_eq(load_image(&api, ADD_ONE, right, 4, &module), CUDA_ERROR_INVALID_IMAGE);
  ck_assert_int_eq(load_image(&api, "int x = ;\n", NULL, 0, &module), CUDA_ERROR_INVALID_PTX);
  ck_assert_int_eq(api.p_cuModuleLoadData(&module, garbage), CUDA_ERROR_INVALID_IMAGE);
  ck_assert(!emu_image_valid(garbage, sizeof(garbage)));
}
END_TEST

START_TEST(what_needs_a_gpu_is_refused)
{
  struct cuda_api api = open_driver();
  CUgraph graph;
  CUgraphExec exec;
  CUevent event;
  float ms;
  ck_assert_int_eq(api.p_cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_NOT_SUPPORTED);
  ck_assert_int_eq(api.p_cuStreamEndCapture(NULL, &graph), CUDA_ERROR_NOT_SUPPORTED);
  ck_assert_int_eq(api.p_cuGraphInstantiateWithFlags(&exec, NULL, 0), CUDA_ERROR_NOT_SUPPORTED);
  ck_assert_int_eq(api.p_cuGraphLaunch(NULL, NULL), CUDA_ERROR_NOT_SUPPORTED);
  ck_assert_int_eq(api.p_cuEventCreate(&event, 0), CUDA_ERROR_NOT_SUPPORTED);
  ck_assert_int_eq(api.p_cuEventElapsedTime(&ms, NULL, NULL), CUDA_ERROR_NOT_SUPPORTED);
}
END_TEST

START_TEST(tensor_maps_are_checked)
{
  static unsigned char memory[4096] __attribute__((aligned(128)));
  const cuuint64_t dim[2] = {128, 16}, stride[1] = {128}, odd[1] = {120};
  const cuuint32_t box[2] = {128, 8}, wide[2] = {256, 8}, ones[2] = {1, 1}, twos[2] = {1, 2};
  struct cuda_api api = open_driver();
  CUtensorMap map;
#define ENCODE(base, strides, boxes, steps, type)                                                                                                             \
  api.p_cuTensorMapEncodeTiled(&map, type, 2, base, dim, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,                    \
                               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
  ck_assert_int_eq(ENCODE(memory, stride, box, ones, CU_TENSOR_MAP_DATA_TYPE_UINT8), CUDA_SUCCESS);
  ck_assert_int_eq(ENCODE(memory + 8, stride, box, ones, CU_TENSOR_MAP_DATA_TYPE_UINT8), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(ENCODE(memory, odd, box, ones, CU_TENSOR_MAP_DATA_TYPE_UINT8), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(ENCODE(memory, stride, wide, ones, CU_TENSOR_MAP_DATA_TYPE_UINT8), CUDA_ERROR_INVALID_VALUE);
  ck_assert_int_eq(ENCODE(memory, stride, box, twos, CU_TENSOR_MAP_DATA_TYPE_UINT8), CUDA_ERROR_NOT_SUPPORTED);
  ck_assert_int_eq(ENCODE(memory, stride, box, ones, CU_TENSOR_MAP_DATA_TYPE_FLOAT32), CUDA_ERROR_NOT_SUPPORTED);
#undef ENCODE
}
END_TEST

START_TEST(launch_seeds_differ)
{
  ck_assert_uint_ne(emu_driver_launch_seed(1, 2, 0), emu_driver_launch_seed(1, 2, 1));
  ck_assert_uint_ne(emu_driver_launch_seed(1, 2, 0), emu_driver_launch_seed(1, 3, 0));
  ck_assert_uint_ne(emu_driver_launch_seed(1, 2, 0), emu_driver_launch_seed(2, 2, 0));
  ck_assert_uint_eq(emu_driver_launch_seed(1, 2, 3), emu_driver_launch_seed(1, 2, 3));
}
END_TEST

START_TEST(ubsan_stops_a_kernel)
{
  struct device_emulation e = emulation_of("c++");
  int status = 0;
  char errors[300];
  pid_t pid;
  struct try t;
  snprintf(errors, sizeof(errors), "%s/errors", folder);
  pid = fork();
  if(pid == 0) {
    e.sanitize = true;
    device_emu_configure(&e);
    ck_assert_ptr_nonnull(freopen(errors, "w", stderr));
    try_load(&t, HEAD "mf_moe(const int *in, int *out, int count) { out[hw::thread_index()] = in[0] + count + 0x7fffffff; }\n");
    try_launch(&t, 1, 64, 0, false);
    _exit(0);
  }
  ck_assert_int_eq(waitpid(pid, &status, 0), pid);
  ck_assert_int_ne(status, 0);
  shell("grep -q 'signed integer overflow' %s", errors);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_driver");
  TCase *jit = tcase_create("jit"), *driver = tcase_create("driver");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_test(jit, what_is_compiled_is_kept);
  tcase_add_test(jit, a_changed_header_is_another_kernel);
  tcase_add_test(jit, a_damaged_object_is_made_anew);
  tcase_add_test(jit, two_processes_compile_the_same);
  tcase_add_loop_test(jit, compilers_that_do_not_work, 0, (int)(sizeof(broken) / sizeof(broken[0])));
  tcase_add_test(jit, sources_and_folders_that_do_not_work);
  tcase_add_test(driver, memory_is_watched);
  tcase_add_test(driver, a_launch_computes);
  tcase_add_test(driver, launches_that_a_driver_refuses);
  tcase_add_loop_test(driver, a_finding_is_told_and_lasts, 0, 2);
  tcase_add_test(driver, modules_that_do_not_load);
  tcase_add_test(driver, what_needs_a_gpu_is_refused);
  tcase_add_test(driver, tensor_maps_are_checked);
  tcase_add_test(driver, launch_seeds_differ);
  if(SANITIZED)
    tcase_add_test(driver, ubsan_stops_a_kernel);
  for(int i = 0; i < 2; i++) {
    TCase *tc = i == 0 ? jit : driver;
    tcase_add_checked_fixture(tc, begin, end);
    tcase_set_timeout(tc, 240);
    suite_add_tcase(suite, tc);
  }
  srunner_run_all(runner, CK_ENV);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
