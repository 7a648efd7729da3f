/* test_compile.c - template closures, compile keys, the compiler's log, and real compilations with NVRTC (no GPU needed).
 * `test_compile --worker hash FD` compiles a kernel and answers its code hash: two processes must agree. */
#include "compile_internal.h"
#include "worker.h"

#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* NVRTC keeps a little memory after a failed compilation; LeakSanitizer asks these functions. NOLINTBEGIN(bugprone-reserved-identifier) */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
__attribute__((visibility("default"))) const char *__lsan_default_options(void);
const char *__lsan_default_suppressions(void)
{
  return "leak:libnvrtc\n";
}
const char *__lsan_default_options(void)
{
  return "print_suppressions=0";
}
/* NOLINTEND(bugprone-reserved-identifier) */

static const char plain_kernel[] = "struct Meta { int a, b; };\n"
                                   "extern \"C\" __device__ const Meta mf_meta = {3, 4};\n"
                                   "extern \"C\" __global__ void __launch_bounds__(128) mf_moe(float *o)\n"
                                   "{\n"
                                   "  __shared__ float s[128];\n"
                                   "  s[threadIdx.x] = o[threadIdx.x];\n"
                                   "  __syncthreads();\n"
                                   "  o[threadIdx.x] = s[127 - threadIdx.x] * 2 + mf_meta.a;\n"
                                   "}\n";
static const char spilling_kernel[] = "extern \"C\" __global__ void __launch_bounds__(1024) mf_moe(float *o, const float *x)\n"
                                      "{\n"
                                      "  float a[128];\n"
                                      "#pragma unroll\n"
                                      "  for(int i = 0; i < 128; i++) a[i] = x[i * 1024 + threadIdx.x];\n"
                                      "  __syncthreads();\n"
                                      "#pragma unroll\n"
                                      "  for(int i = 0; i < 128; i++) o[i * 1024 + threadIdx.x] = a[127 - i] * a[(i * 7) & 127];\n"
                                      "}\n";
/* Reads the accumulator while the product may still run: ptxas has to serialise. */
static const char serialised_kernel[] =
    "__device__ __noinline__ float opaque(float v, int n) { for(int i = 0; i < n; i++) v = v * v + 1.f; return v; }\n"
    "extern \"C\" __global__ void __launch_bounds__(128) mf_moe(float *o, unsigned long long d, int n)\n"
    "{\n"
    "  float a = 0, b = 0, c = 0, e = 0;\n"
    "  for(int i = 0; i < n; i++) {\n"
    "    asm volatile(\"wgmma.fence.sync.aligned;\");\n"
    "    asm volatile(\"wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, 1, 1, 1;\"\n"
    "                 : \"+f\"(a), \"+f\"(b), \"+f\"(c), \"+f\"(e) : \"l\"(d), \"l\"(d));\n"
    "    asm volatile(\"wgmma.commit_group.sync.aligned;\");\n"
    "    o[i] = opaque(a, n);\n"
    "    asm volatile(\"wgmma.wait_group.sync.aligned 0;\");\n"
    "  }\n"
    "  o[threadIdx.x] = a + b + c + e;\n"
    "}\n";

static struct error err;
static char self[4096]; /* path of this program, links resolved: under valgrind /proc/self/exe itself is another one */

/* ---- template folders ---- */
static char folder[256];

static void make_folder(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof(folder), "%s/moeforge-test-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
}

static void remove_folder(void)
{
  char command[300];
  snprintf(command, sizeof(command), "rm -rf '%s'", folder);
  ck_assert_int_eq(system(command), 0);
}

static void write_bytes(const char *name, const char *text, size_t count)
{
  char path[512];
  FILE *file;
  for(const char *slash = strchr(name, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
    snprintf(path, sizeof(path), "%s/%.*s", folder, (int)(slash - name), name);
    ck_assert(mkdir(path, 0755) == 0 || errno == EEXIST);
  }
  snprintf(path, sizeof(path), "%s/%s", folder, name);
  file = fopen(path, "wb");
  ck_assert_ptr_nonnull(file);
  ck_assert_uint_eq(fwrite(text, 1, count, file), count);
  fclose(file);
}

static void write_file(const char *name, const char *text)
{
  write_bytes(name, text, strlen(text));
}

/* The names of a closure, joined by blanks. */
static const char *names(const struct closure *closure)
{
  static char text[1024];
  text[0] = '\0';
  for(int i = 0; i < closure->count; i++)
    snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%s", i > 0 ? " " : "", closure->name[i]);
  return text;
}

static void expect_closure(const char *source, const char *expected)
{
  struct closure closure;
  ck_assert_msg(closure_collect(folder, source, &closure, &err) == MF_OK, "%s", err.text);
  ck_assert_str_eq(names(&closure), expected);
  closure_free(&closure);
  ck_assert_int_eq(closure.count, 0);
}

START_TEST(closure_in_order_of_first_use)
{
  write_file("hw/hw.cuh", "#pragma once\n#include \"ints.h\"\n  #  include \"copy.cuh\" // trailing\n");
  write_file("hw/ints.h", "typedef int i32;\n#include <stdint.h>\n");
  write_file("hw/copy.cuh", "#include \"./ints.h\"\n#include \"hw/hw.cuh\"\n"); /* a cycle, and a name relative to the root */
  write_file("stream/kernel.cuh", "#include \"../hw/hw.cuh\"\n#include \"params.h\"\n");
  write_file("stream/params.h", "#include \"../stream/../hw/ints.h\"\n");
  expect_closure("#include \"stream/kernel.cuh\"\n", "stream/kernel.cuh hw/hw.cuh hw/ints.h hw/copy.cuh stream/params.h");
  expect_closure("#include \"hw/ints.h\"\n#include \"hw/ints.h\"", "hw/ints.h");
  expect_closure("int x;\n", "");
}
END_TEST

START_TEST(closure_skips_comments_strings_and_host_code)
{
  write_file("a.h", "");
  write_file("b.h", "");
  expect_closure("// #include \"no1.h\"\n/* text\n#include \"no2.h\"\n*/ int x; /* a */ /* b\n */\n#include \"a.h\"\n", "a.h");
  expect_closure("const char *s = \"/*\";\n#include \"a.h\"\nconst char *t = \"*/\"; char c = '\"';\n#include \"b.h\"\n", "a.h b.h");
  expect_closure("#ifdef MF_HOST_EMULATION\n#include \"no.h\"\n#else\n#include \"a.h\"\n#endif\n#include \"b.h\"\n", "a.h b.h");
  expect_closure("#ifndef MF_HOST_EMULATION\n#include \"a.h\"\n#else\n#include \"no.h\"\n#endif\n", "a.h");
  expect_closure("#if defined(MF_HOST_EMULATION)\n#if 1\n#include \"no.h\"\n#endif\n#endif\n"
                 "#if !defined MF_HOST_EMULATION\n#include \"a.h\"\n#endif\n", "a.h");
  expect_closure("#ifdef MF_HOST_EMULATION_OTHER\n#include \"a.h\"\n#else\n#include \"b.h\"\n#endif\n", "a.h b.h");
  expect_closure("#endif\n#include \"a.h\"\n#include \"b.h\n#include b.h\n#included \"b.h\"\n", "a.h");
}
END_TEST

static void expect_closure_error(const char *source, const char *text)
{
  struct closure closure;
  ck_assert_int_eq(closure_collect(folder, source, &closure, &err), MF_ERR_IO);
  ck_assert_msg(strstr(err.text, text) != NULL, "\"%s\" lacks \"%s\"", err.text, text);
  ck_assert_int_eq(closure.count, 0);
}

START_TEST(closure_errors)
{
  char many[CLOSURE_MAX_FILES * 32 + 64] = "";
  write_file("a.h", "\n#include \"sub/missing.h\"\n");
  write_file("sub/up.h", "#include \"../../outside.h\"\n");
  write_bytes("nul.h", "int\0x;", 6);
  expect_closure_error("#include \"a.h\"\n", "sub/missing.h: no such file, included from a.h");
  expect_closure_error("#include \"gone.h\"\n", "included from the emitted source");
  expect_closure_error("#include \"sub/up.h\"\n", "not below");
  expect_closure_error("#include \"/etc/passwd\"\n", "not below");
  expect_closure_error("#include \"nul.h\"\n", "NUL byte");
  expect_closure_error("#include \"sub\"\n", "cannot be read"); /* a folder */
  for(int i = 0; i <= CLOSURE_MAX_FILES; i++) {
    char name[32];
    snprintf(name, sizeof(name), "n%d.h", i);
    write_file(name, "");
    snprintf(many + strlen(many), sizeof(many) - strlen(many), "#include \"%s\"\n", name);
  }
  expect_closure_error(many, "more than 64 templates");
}
END_TEST

START_TEST(rewrites_includes_to_closure_names)
{
  struct closure closure;
  char *text;
  write_file("hw/hw.cuh", "// \"ints.h\"\n#include \"ints.h\" // \"ints.h\"\n#include <math.h>\nint x;\n");
  write_file("hw/ints.h", "");
  ck_assert_int_eq(closure_collect(folder, "#include \"hw/hw.cuh\"\n", &closure, &err), MF_OK);
  text = closure_rewrite(&closure, "hw/hw.cuh", closure.text[0]);
  ck_assert_str_eq(text, "// \"ints.h\"\n#include \"hw/ints.h\" // \"ints.h\"\n#include <math.h>\nint x;\n");
  free(text);
  text = closure_rewrite(&closure, "other/x.h", "#include \"unknown.h\"\n#include \"../hw/ints.h\"");
  ck_assert_str_eq(text, "#include \"unknown.h\"\n#include \"hw/ints.h\"");
  free(text);
  closure_free(&closure);
}
END_TEST

/* ---- keys ---- */
static const char *key_of(const char *source, const struct closure *closure, int version, const char *arch, enum compile_build build)
{
  static char keys[16][KEY_LEN];
  static int next;
  struct artifact art = {.source = (char *)(uintptr_t)source};
  compile_key(&art, closure, version, arch, build);
  next = (next + 1) % 16;
  memcpy(keys[next], art.compile_key, KEY_LEN);
  return keys[next];
}

START_TEST(key_depends_on_everything)
{
  char a[] = "a.h", b[] = "b.h", text[] = "x", other[] = "xy";
  const struct closure one = {1, {a}, {text}}, renamed = {1, {b}, {text}}, changed = {1, {a}, {other}}, two = {2, {a, b}, {text, text}};
  const char *base = key_of("src", &one, 13000, "sm_90a", COMPILE_PLAIN);
  ck_assert_uint_eq(strlen(base), KEY_LEN - 1);
  ck_assert_str_eq(base, key_of("src", &one, 13000, "sm_90a", COMPILE_PLAIN));
  ck_assert_str_ne(base, key_of("srd", &one, 13000, "sm_90a", COMPILE_PLAIN));
  ck_assert_str_ne(base, key_of("src", &renamed, 13000, "sm_90a", COMPILE_PLAIN));
  ck_assert_str_ne(base, key_of("src", &changed, 13000, "sm_90a", COMPILE_PLAIN));
  ck_assert_str_ne(base, key_of("src", &two, 13000, "sm_90a", COMPILE_PLAIN));
  ck_assert_str_ne(base, key_of("src", &one, 12080, "sm_90a", COMPILE_PLAIN));
  ck_assert_str_ne(base, key_of("src", &one, 13000, "sm_100a", COMPILE_PLAIN));
  ck_assert_str_ne(base, key_of("src", &one, 13000, "sm_90a", COMPILE_DEBUG));
  ck_assert_str_ne(base, key_of("src", &one, 13000, "sm_90a", COMPILE_LINE_INFO));
  ck_assert_str_ne(base, key_of("src", &one, 13000, "sm_90a", COMPILE_SYNCCHECK));
  ck_assert_str_ne(key_of("src", &one, 13000, "sm_90a", COMPILE_LINE_INFO), key_of("src", &one, 13000, "sm_90a", COMPILE_SYNCCHECK));
}
END_TEST

START_TEST(architectures)
{
  ck_assert_str_eq(compile_arch(9, 0), "sm_90a");
  ck_assert_ptr_null(compile_arch(8, 9));
  ck_assert_ptr_null(compile_arch(10, 0));
}
END_TEST

/* ---- the log ---- */
START_TEST(reads_the_ptxas_log)
{
  static const char log[] = "x.cu(3): warning #1: 5 registers\n"
                            "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
                            "ptxas info    : Function properties for other\n"
                            "ptxas         .     8 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads\n"
                            "ptxas info    : Used 40 registers, used 1 barriers, 77 bytes smem\n"
                            "ptxas info    : Compiling entry function 'mf_moe' for 'sm_90a'\n"
                            "ptxas info    : Function properties for mf_moe\n"
                            "ptxas         .     520 bytes stack frame, 624 bytes spill stores, 632 bytes spill loads\n"
                            "ptxas info    : Used 64 registers, used 1 barriers, 520 bytes cumulative stack size, 1200 bytes smem\n"
                            "ptxas info    : Function properties for helper\n"
                            "ptxas         .     16 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads";
  struct ptxas_usage usage;
  ptxas_log_read(log, "mf_moe", &usage);
  ck_assert_int_eq(usage.registers, 64);
  ck_assert_int_eq(usage.frame_bytes, 520);
  ck_assert_int_eq(usage.shared_bytes, 1200);
  ck_assert_int_eq(usage.spill_bytes, 624 + 632 + 4 + 3);
  ck_assert(!usage.wgmma_serialised);
  ptxas_log_read(log, "absent", &usage);
  ck_assert(usage.registers == -1 && usage.frame_bytes == -1 && usage.shared_bytes == -1);
  ptxas_log_read("", "mf_moe", &usage);
  ck_assert_int_eq(usage.spill_bytes, -1);
  ptxas_log_read("ptxas info    : (C7519) something about wgmma", "mf_moe", &usage);
  ck_assert(usage.wgmma_serialised);
  ptxas_log_read("ptxas info    : (C7509) below\nptxas info    : (C7521) above\nx.cu: (C7515) not ptxas\n", "mf_moe", &usage);
  ck_assert(!usage.wgmma_serialised);
}
END_TEST

START_TEST(finds_the_first_error)
{
  static const char *const cases[][2] = {
      {"x.cu(1): warning: errors ahead\nx.cu(2): error: first\nx.cu(3): error: second\n", "x.cu(2): error: first"},
      {"a.h(2): catastrophic error: cannot open", "a.h(2): catastrophic error: cannot open"},
      {"ptxas <stdin>, line 9; error   : Unknown modifier", "ptxas <stdin>, line 9; error   : Unknown modifier"},
      {"ptxas fatal   : Ptx assembly aborted", "ptxas fatal   : Ptx assembly aborted"},
      {"nothing\nwrong", ""}};
  char line[256];
  compiler_log_first_error(cases[_i][0], line, sizeof(line));
  ck_assert_str_eq(line, cases[_i][1]);
}
END_TEST

/* ---- real compilations ---- */
static struct nvrtc *nvrtc;
static const struct closure no_templates;

static void open_nvrtc(void)
{
  ck_assert_msg(nvrtc_open(&nvrtc, &err) == MF_OK, "this test needs NVRTC: %s", err.text);
}

static void close_nvrtc(void)
{
  nvrtc_close(nvrtc);
}

static struct artifact artifact_of(const char *source)
{
  struct artifact art = {.name = "test"};
  art.source = strdup(source);
  ck_assert_ptr_nonnull(art.source);
  return art;
}

static enum mf_status compile(struct artifact *art)
{
  return compile_artifact(nvrtc, &no_templates, "sm_90a", COMPILE_PLAIN, art, &err);
}

START_TEST(opens_nvrtc)
{
  ck_assert_int_ge(nvrtc_version(nvrtc), 12030);
  ck_assert_ptr_nonnull(strstr(nvrtc_path(nvrtc), "libnvrtc"));
  ck_assert_int_eq(nvrtc_path(nvrtc)[0], '/');
}
END_TEST

START_TEST(compiles_and_measures)
{
  struct artifact art = artifact_of(plain_kernel);
  int meta[2];
  for(int turn = 0; turn < 2; turn++) { /* again into the same artifact: the first result must be dropped */
    ck_assert_msg(compile(&art) == MF_OK, "%s", err.text);
    ck_assert_int_gt(art.registers, 0);
    ck_assert_int_lt(art.registers, 64);
    ck_assert_int_eq(art.static_shared_bytes, 512);
    ck_assert(art.spill_bytes == 0 && art.stack_bytes == 0 && !art.wgmma_serialised);
    ck_assert_ptr_nonnull(strstr(art.log, "mf_moe"));
    ck_assert(art.compile_seconds > 0 && art.compile_seconds < 60);
  }
  ck_assert_int_eq(cubin_read_symbol(art.cubin, art.cubin_bytes, "mf_meta", meta, sizeof(meta), &err), MF_OK);
  ck_assert(meta[0] == 3 && meta[1] == 4);
  artifact_free(&art);
  ck_assert_ptr_null(art.cubin);
}
END_TEST

/* What a sanitizer sees is the code that serves. */
START_TEST(line_information_changes_no_code)
{
  struct artifact art = artifact_of(plain_kernel);
  char plain[KEY_LEN], lined[KEY_LEN];
  size_t bytes;
  ck_assert_msg(compile(&art) == MF_OK, "%s", err.text);
  ck_assert_int_eq(cubin_code_hash(art.cubin, art.cubin_bytes, plain, &err), MF_OK);
  bytes = art.cubin_bytes;
  ck_assert_msg(compile_artifact(nvrtc, &no_templates, "sm_90a", COMPILE_LINE_INFO, &art, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(cubin_code_hash(art.cubin, art.cubin_bytes, lined, &err), MF_OK);
  ck_assert_str_eq(plain, lined);
  ck_assert_uint_gt(art.cubin_bytes, bytes);
  ck_assert_ptr_nonnull(memmem(art.cubin, art.cubin_bytes, "test.cu", 7));
  artifact_free(&art);
}
END_TEST

START_TEST(sees_spills)
{
  struct artifact art = artifact_of(spilling_kernel);
  ck_assert_msg(compile(&art) == MF_OK, "%s", err.text);
  ck_assert_int_eq(art.registers, 64);
  ck_assert_int_gt(art.spill_bytes, 500);
  ck_assert_int_gt(art.stack_bytes, 250);
  artifact_free(&art);
}
END_TEST

START_TEST(sees_serialised_wgmma)
{
  struct artifact art = artifact_of(serialised_kernel);
  ck_assert_msg(compile(&art) == MF_OK, "%s", err.text);
  ck_assert(art.wgmma_serialised);
  artifact_free(&art);
}
END_TEST

START_TEST(largest_of_several_kernels)
{
  struct artifact art = artifact_of("extern \"C\" __global__ void a(float *o) { o[0] = 1; }\n"
                                    "extern \"C\" __global__ void b(float *o)\n"
                                    "{ __shared__ float s[64]; s[threadIdx.x] = o[1]; __syncthreads(); o[0] = s[3]; }\n");
  ck_assert_msg(compile(&art) == MF_OK, "%s", err.text);
  ck_assert_int_eq(art.static_shared_bytes, 256);
  artifact_free(&art);
}
END_TEST

START_TEST(reports_compile_errors)
{
  static const struct {
    const char *source, *text;
    enum mf_status status;
  } cases[] = {{"\n\nextern \"C\" __global__ void k(int *o) { o[0] = undefined_thing; }\n", "test.cu(3): error: identifier \"undefined_thing\" is undefined",
                MF_ERR_COMPILE},
               {"#include \"nowhere.h\"\n", "cannot open source file \"nowhere.h\"", MF_ERR_COMPILE},
               {"extern \"C\" __global__ void k() { asm volatile(\"nonsense.instruction;\"); }\n", "error", MF_ERR_COMPILE},
               {"__device__ int f() { return 1; }\n", "no kernel", MF_ERR_COMPILE}};
  struct artifact art = artifact_of(cases[_i].source);
  ck_assert_int_eq(compile(&art), cases[_i].status);
  ck_assert_msg(strstr(err.text, cases[_i].text) != NULL, "\"%s\" lacks \"%s\"", err.text, cases[_i].text);
  ck_assert_ptr_null(strchr(err.text, '\n'));
  ck_assert_ptr_nonnull(art.log);
  artifact_free(&art);
}
END_TEST

START_TEST(compiles_with_nested_relative_includes)
{
  struct closure closure;
  struct artifact art = artifact_of("#include \"stream/kernel.cuh\"\n");
  write_file("hw/hw.cuh", "#pragma once\n#include \"ints.h\"\n#ifdef MF_HOST_EMULATION\n#include \"absent.h\"\n#endif\n");
  write_file("hw/ints.h", "#pragma once\ntypedef int i32;\n");
  write_file("stream/kernel.cuh", "#include \"../hw/hw.cuh\"\n#include \"params.h\"\n"
                                  "extern \"C\" __global__ void mf_moe(i32 *o) { o[0] = kValue; }\n");
  write_file("stream/params.h", "#include \"../hw/ints.h\"\n"
                                "#ifdef MF_WATCHDOG\nconstexpr i32 kValue = 1;\n#else\nconstexpr i32 kValue = 2;\n#endif\n");
  ck_assert_msg(closure_collect(folder, art.source, &closure, &err) == MF_OK, "%s", err.text);
  {
    char release[KEY_LEN], debug[KEY_LEN];
    ck_assert_msg(compile_artifact(nvrtc, &closure, "sm_90a", COMPILE_PLAIN, &art, &err) == MF_OK, "%s", err.text);
    ck_assert_int_eq(cubin_code_hash(art.cubin, art.cubin_bytes, release, &err), MF_OK);
    ck_assert_msg(compile_artifact(nvrtc, &closure, "sm_90a", COMPILE_DEBUG, &art, &err) == MF_OK, "%s", err.text);
    ck_assert_int_eq(cubin_code_hash(art.cubin, art.cubin_bytes, debug, &err), MF_OK);
    ck_assert_str_ne(release, debug); /* MF_WATCHDOG is set in debug builds */
  }
  closure_free(&closure);
  artifact_free(&art);
}
END_TEST

/* ---- NVRTC's own cache ----
 * It needs a driver, so it is played here, as NVRTC 12.9 and later do it: what was compiled before comes without a log, unless the option forbids it. */
static int (*real_compile)(void *, int, const char *const *);
static int (*real_log)(void *, char *);
static int compilations;
static bool no_cache, from_cache;

static int cached_compile(void *program, int count, const char *const *options)
{
  no_cache = false;
  for(int i = 0; i < count; i++)
    no_cache = no_cache || strcmp(options[i], "--no-cache") == 0;
  from_cache = compilations++ > 0 && !no_cache;
  return real_compile(program, count, options);
}

static int cached_log(void *program, char *log)
{
  log[0] = '\0';
  return from_cache ? 0 : real_log(program, log);
}

START_TEST(usage_is_known_however_often_it_was_compiled)
{
  struct artifact art = artifact_of(spilling_kernel);
  real_compile = nvrtc->compile;
  real_log = nvrtc->log;
  nvrtc->compile = cached_compile;
  for(int turn = 0; turn < 2 && nvrtc->number >= 12090; turn++) {
    nvrtc->log = cached_log;
    ck_assert_msg(compile(&art) == MF_OK, "%s", err.text);
    ck_assert_int_gt(art.spill_bytes, 500);
  }
  nvrtc->log = real_log;
  nvrtc->number = 12080; /* has no cache, refuses the option */
  ck_assert_msg(compile(&art) == MF_OK, "%s", err.text);
  ck_assert(!no_cache);
  artifact_free(&art);
}
END_TEST

/* ---- the same code from two processes ---- */
static int play_hash(int fd)
{
  struct frame answer = {0};
  struct artifact art = {.name = "other name"};
  struct nvrtc *mine = NULL;
  char hash[KEY_LEN] = "";
  enum mf_status rc = nvrtc_open(&mine, &err);
  art.source = strdup(plain_kernel);
  if(rc == MF_OK)
    rc = compile_artifact(mine, &no_templates, "sm_90a", COMPILE_PLAIN, &art, &err);
  if(rc == MF_OK)
    rc = cubin_code_hash(art.cubin, art.cubin_bytes, hash, &err);
  answer.head = json_pack("{s:s, s:s}", "hash", hash, "error", rc == MF_OK ? "" : err.text);
  rc = frame_write(fd, &answer, &err);
  frame_free(&answer);
  artifact_free(&art);
  nvrtc_close(mine);
  return rc == MF_OK ? 0 : 1;
}

START_TEST(two_processes_make_equal_code)
{
  char hash[2][KEY_LEN];
  for(int i = 0; i < 2; i++) {
    struct worker w;
    struct frame answer;
    ck_assert_msg(worker_start(self, "hash", &w, &err) == MF_OK, "%s", err.text);
    ck_assert_msg(worker_receive(&w, &answer, 60000, &err) == MF_OK, "%s", err.text);
    ck_assert_str_eq(json_string_value(json_object_get(answer.head, "error")), "");
    snprintf(hash[i], KEY_LEN, "%s", json_string_value(json_object_get(answer.head, "hash")));
    frame_free(&answer);
    worker_stop(&w);
  }
  ck_assert_uint_eq(strlen(hash[0]), KEY_LEN - 1);
  ck_assert_str_eq(hash[0], hash[1]);
}
END_TEST

static Suite *compile_suite(void)
{
  Suite *suite = suite_create("compile");
  TCase *files = tcase_create("closure"), *texts = tcase_create("text"), *real = tcase_create("nvrtc");
  tcase_add_checked_fixture(files, make_folder, remove_folder);
  tcase_add_test(files, closure_in_order_of_first_use);
  tcase_add_test(files, closure_skips_comments_strings_and_host_code);
  tcase_add_test(files, closure_errors);
  tcase_add_test(files, rewrites_includes_to_closure_names);
  tcase_add_test(texts, key_depends_on_everything);
  tcase_add_test(texts, architectures);
  tcase_add_test(texts, reads_the_ptxas_log);
  tcase_add_loop_test(texts, finds_the_first_error, 0, 5);
  tcase_set_timeout(real, 120);
  tcase_add_checked_fixture(real, make_folder, remove_folder);
  tcase_add_checked_fixture(real, open_nvrtc, close_nvrtc);
  tcase_add_test(real, opens_nvrtc);
  tcase_add_test(real, compiles_and_measures);
  tcase_add_test(real, line_information_changes_no_code);
  tcase_add_test(real, sees_spills);
  tcase_add_test(real, sees_serialised_wgmma);
  tcase_add_test(real, largest_of_several_kernels);
  tcase_add_loop_test(real, reports_compile_errors, 0, 4);
  tcase_add_test(real, compiles_with_nested_relative_includes);
  tcase_add_test(real, usage_is_known_however_often_it_was_compiled);
  tcase_add_test(real, two_processes_make_equal_code);
  suite_add_tcase(suite, files);
  suite_add_tcase(suite, texts);
  suite_add_tcase(suite, real);
  return suite;
}

int main(int argc, char **argv)
{
  SRunner *runner;
  int failed;
  if(argc == 4 && strcmp(argv[1], "--worker") == 0)
    return play_hash(atoi(argv[3]));
  if(readlink("/proc/self/exe", self, sizeof(self) - 1) < 0)
    return EXIT_FAILURE;
  runner = srunner_create(compile_suite());
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
