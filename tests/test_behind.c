/* test_behind.c - launches behind another kernel: the stand-in for a router copies what it should, on the emulated device; `bench --behind` on the scripted
 * GPU launches every pair as it says, tells which kinds of launch the driver refuses, hang, crash or have other outputs, and goes on without them. */
#include "emu_fixture.h"
#include "tool_fixture.h"

#include <jansson.h>

#include "emu.h"
#include "tools/router_params.h"

/* ---- the router ---- */
#define TOKENS 3
#define HIDDEN 1032 /* threads have more and fewer pieces */
#define ROWS 41
#define WORDS (TOKENS * HIDDEN / 8 + 37)
#define CTAS 18

/* Also as a dependent launch, in which it must wait before it touches anything. */
START_TEST(router_copies)
{
  static uint32_t from[WORDS * 4], back[WORDS * 4 + 4];
  const char *source = "#include \"tools/router.cu\"\n";
  struct device_emulation e = {.seed = 3, .info = emu_device_of(CTAS)};
  struct mf_router_params params = {.tokens = TOKENS, .hidden = HIDDEN, .rows = ROWS, .words = WORDS, .ctas = CTAS};
  CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value.programmaticStreamSerializationAllowed = 1};
  CUlaunchConfig config = {.gridDimX = CTAS, .gridDimY = 1, .gridDimZ = 1, .blockDimX = MF_ROUTER_THREADS, .blockDimY = 1, .blockDimZ = 1,
                           .sharedMemBytes = MF_ROUTER_SHARED_BYTES, .attrs = &early, .numAttrs = (unsigned)_i};
  struct cuda_api api;
  CUmodule module;
  CUfunction function;
  CUdeviceptr matrix, x, to;
  void *args[] = {&params}, *image = malloc(emu_image_bytes(source, 0));
  ck_assert_ptr_nonnull(image);
  snprintf(e.template_dir, sizeof(e.template_dir), "templates");
  snprintf(e.emu_dir, sizeof(e.emu_dir), "emu");
  snprintf(e.cache_dir, sizeof(e.cache_dir), "%s", emu_folder);
  snprintf(e.compiler, sizeof(e.compiler), "%s", emu_compiler);
  device_emu_configure(&e);
  emu_driver(&api);
  emu_image_make("mf_router", source, NULL, 0, image);
  ck_assert_msg(api.p_cuModuleLoadData(&module, image) == CUDA_SUCCESS, "%s", emu_driver_text());
  ck_assert_int_eq(api.p_cuModuleGetFunction(&function, module, "mf_router"), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemAlloc(&matrix, ROWS * HIDDEN * 2), CUDA_SUCCESS); /* what is read or written beyond these is a finding */
  ck_assert_int_eq(api.p_cuMemAlloc(&x, sizeof(from)), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemAlloc(&to, sizeof(back)), CUDA_SUCCESS);
  for(size_t i = 0; i < WORDS * 4; i++)
    from[i] = 0x3F803F80u ^ (uint32_t)i; /* no infinity and no NaN */
  ck_assert_int_eq(api.p_cuMemsetD8(matrix, 0x3C, ROWS * HIDDEN * 2), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemsetD8(to, 0xFF, sizeof(back)), CUDA_SUCCESS);
  ck_assert_int_eq(api.p_cuMemcpyHtoD(x, from, sizeof(from)), CUDA_SUCCESS);
  params.matrix = (const void *)(uintptr_t)matrix;
  params.from = (const void *)(uintptr_t)x;
  params.to = (void *)(uintptr_t)to;
  ck_assert_msg(api.p_cuLaunchKernelEx(&config, function, args, NULL) == CUDA_SUCCESS, "%s", emu_driver_text());
  ck_assert_int_eq(api.p_cuMemcpyDtoH(back, to, sizeof(back)), CUDA_SUCCESS);
  ck_assert_mem_eq(back, from, sizeof(from));
  for(size_t i = WORDS * 4; i < WORDS * 4 + 4; i++)
    ck_assert_uint_eq(back[i], 0xFFFFFFFFu);
  free(image);
}
END_TEST

/* ---- bench --behind ---- */
#define GPU "sms=132,l2=1000000"
static struct tool tool;

static void tuned(const char *script)
{
  tool_begin(&tool);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, "tune specs/models/tiny.yaml --tokens 2 --effort quick --quiet");
  tool_expect(&tool, 0);
  tool_gpu(&tool, "libfakegpu.so", script);
}

/* What a graph is made of: how its layers and routers are launched; -1: there are none. */
struct graph {
  int layers_early, cooperative, routers_early;
};

static bool equal(const struct graph *a, const struct graph *b)
{
  return a->layers_early == b->layers_early && a->cooperative == b->cooperative && a->routers_early == b->routers_early;
}

static int number_behind(const char *line, const char *word)
{
  const char *at = strstr(line, word);
  ck_assert_ptr_nonnull(at);
  return atoi(at + strlen(word));
}

/* Reads the launches of the graphs with routers in a log; those of one graph must all be alike, and each layer must read what the router before it has
 * written. Returns the number of different graphs. */
static int read_graphs(const char *path, struct graph *graphs, int most)
{
  static char line[16384];
  char written[17] = "";
  struct graph now = {-1, -1, -1};
  int count = 0;
  bool more = true;
  FILE *f = fopen(path, "r");
  ck_assert_ptr_nonnull(f);
  while(more) {
    const char *params;
    more = fgets(line, sizeof(line), f) != NULL;
    params = more ? strstr(line, "params=") : NULL;
    if(!more || strncmp(line, "graph_launch", 12) == 0) { /* ends the one before */
      int i = 0;
      while(i < count && !equal(&graphs[i], &now))
        i++;
      if(now.routers_early >= 0 && i == count) {
        ck_assert_int_lt(count, most);
        graphs[count++] = now;
      }
      now = (struct graph){-1, -1, -1};
      written[0] = '\0';
    } else if(params != NULL && strstr(line, "kernel=mf_router ") != NULL) {
      const int early = number_behind(line, " pdl=");
      ck_assert(now.routers_early < 0 || now.routers_early == early);
      ck_assert_int_eq(number_behind(line, " cooperative="), 0);
      now.routers_early = early;
      snprintf(written, sizeof(written), "%.16s", params + strlen("params=") + 2 * offsetof(struct mf_router_params, to));
    } else if(params != NULL && strstr(line, "kernel=mf_moe ") != NULL && now.routers_early >= 0) {
      const struct graph is = {number_behind(line, " pdl="), number_behind(line, " cooperative="), now.routers_early};
      ck_assert(now.layers_early < 0 || equal(&is, &now));
      ck_assert_msg(written[0] != '\0' && strncmp(params + strlen("params="), written, 16) == 0, "a layer's x is not what the router before it wrote: %.200s", line);
      now = is;
      written[0] = '\0';
    }
  }
  fclose(f);
  return count;
}

START_TEST(pairs_are_launched_as_said)
{
  static const struct graph wanted[] = {{0, 1, 0}, {1, 1, 0}, {1, 1, 1}, {0, 0, 0}, {1, 0, 0}, {1, 0, 1}, {-1, -1, 0}, {-1, -1, 1}};
  struct graph graphs[16];
  char log[300];
  json_t *all, *row;
  size_t i;
  int count, alone = 0, edges = 0;
  tuned(GPU);
  snprintf(log, sizeof(log), "%s/launches.log", tool.folder);
  setenv("FAKECUDA_LOG", log, 1);
  tool_run(&tool, "bench tiny --behind --tokens 2 --json --quiet");
  unsetenv("FAKECUDA_LOG");
  tool_expect(&tool, 0);
  count = read_graphs(log, graphs, 16);
  ck_assert_int_eq(count, (int)(sizeof(wanted) / sizeof(wanted[0])));
  for(i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
    int k = 0;
    while(k < count && !equal(&graphs[k], &wanted[i]))
      k++;
    ck_assert_msg(k < count, "no graph is of kind %zu", i);
  }
  all = json_loads(tool.out, 0, NULL);
  ck_assert_ptr_nonnull(all);
  ck_assert_uint_eq(json_array_size(json_object_get(all, "rows")), 9); /* plain thrice, two kinds twice, the router twice */
  json_array_foreach(json_object_get(all, "rows"), i, row) {
    ck_assert_double_gt(json_real_value(json_object_get(row, "us")), 0);
    ck_assert_int_eq(json_integer_value(json_object_get(row, "tokens")), 2);
    alone += json_is_true(json_object_get(row, "router_alone"));
    edges += strcmp(json_string_value(json_object_get(row, "edges")), "none") != 0;
    ck_assert_int_eq(json_is_null(json_object_get(row, "less_router_us")), json_is_true(json_object_get(row, "router_alone")));
    ck_assert_ptr_null(strstr(json_string_value(json_object_get(row, "schedule")), "-pd"));
  }
  ck_assert_int_eq(alone, 2);
  ck_assert_int_eq(edges, 5);
  json_decref(all);
  tool_end(&tool);
}
END_TEST

static int occurrences(const char *text, const char *word)
{
  int count = 0;
  for(const char *at = strstr(text, word); at != NULL; at = strstr(at + 1, word))
    count++;
  return count;
}

START_TEST(refusals_are_told)
{
  tuned(GPU ",early_fail");
  tool_run(&tool, "bench tiny --behind --tokens 2");
  tool_expect(&tool, 0);
  ck_assert_int_eq(occurrences(tool.out, "| refused |"), 2); /* both kinds of cooperative launch */
  ck_assert_int_eq(occurrences(tool.out, "| tiny | 2 |"), 9);
  tool_says(&tool, err, "refused: ");
  tool_end(&tool);
}
END_TEST

/* The rows in question get no times, all others do; the command fails at its end. */
START_TEST(outputs_that_differ_are_told)
{
  tuned(GPU);
  setenv("FAKEGPU_EARLY", "1", 1);
  tool_run(&tool, "bench tiny --behind --tokens 2");
  unsetenv("FAKEGPU_EARLY");
  tool_expect(&tool, 11);
  tool_says(&tool, err, "has other outputs than behind a plain edge");
  ck_assert_int_eq(occurrences(tool.err, "wrong outputs: the layer, pdl 1, edges "), 4);
  ck_assert_int_eq(occurrences(tool.out, "| wrong outputs |"), 4);
  ck_assert_int_eq(occurrences(tool.out, "| tiny | 2 |"), 9);
  tool_end(&tool);
}
END_TEST

/* ---- rows that end the child ---- */
static const char *text_of(const json_t *row, const char *key)
{
  return json_string_value(json_object_get(row, key));
}

/* How many of the rows have that fate; each of them must be of the layer, with these edges and cooperative or not, and have no time. */
static int rows_lost(const json_t *rows, const char *fate, const char *edges, int cooperative)
{
  const json_t *row;
  size_t i;
  int count = 0;
  json_array_foreach(rows, i, row) {
    const bool lost = strcmp(text_of(row, "fate"), fate) == 0;
    ck_assert_int_eq(json_is_null(json_object_get(row, "us")), lost);
    if(lost) {
      ck_assert_str_eq(text_of(row, "edges"), edges);
      ck_assert_int_eq(json_is_true(json_object_get(row, "cooperative")), cooperative);
      ck_assert(!json_is_true(json_object_get(row, "router_alone")));
      count++;
    }
  }
  return count;
}

/* Two kinds hang from the first replay on. Each costs one child, at the first token count only. */
START_TEST(kinds_that_hang_are_left_out)
{
  tool_begin(&tool);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, "tune specs/models/tiny.yaml --tokens 1,2 --effort quick --quiet");
  tool_expect(&tool, 0);
  setenv("FAKEGPU_HANG_BEHIND", "110,111", 1);
  tool_run(&tool, "bench tiny --behind --tokens 1,2 --timeout-ms 300");
  unsetenv("FAKEGPU_HANG_BEHIND");
  tool_expect(&tool, 0);
  ck_assert_int_eq(occurrences(tool.out, "| tiny |"), 18);
  ck_assert_int_eq(occurrences(tool.out, "| 1 | router > layer | yes | hangs |"), 2);
  ck_assert_int_eq(occurrences(tool.out, "| 1 | both | yes | hangs |"), 2);
  ck_assert_int_eq(occurrences(tool.out, "hangs"), 4);
  ck_assert_int_eq(occurrences(tool.err, "hangs: "), 2);
  tool_says(&tool, err, "hangs: the layer, pdl 1, edges router > layer, cooperative yes, 1 token: a first replay behind a router: no progress within 300 ms");
  tool_says(&tool, err, "hangs: the layer, pdl 1, edges both, cooperative yes, 1 token: ");
  tool_end(&tool);
}
END_TEST

/* One that hangs only when it is timed: what was measured before is measured again without it. */
START_TEST(hang_in_a_round)
{
  json_t *all;
  tuned(GPU);
  setenv("FAKEGPU_HANG_BEHIND", "101", 1);
  setenv("FAKEGPU_HANG_SPARES", "1000", 1); /* four first replays of 48 launches or some more, three in each of 15 rounds */
  tool_run(&tool, "bench tiny --behind --tokens 2 --timeout-ms 300 --json");
  unsetenv("FAKEGPU_HANG_BEHIND");
  unsetenv("FAKEGPU_HANG_SPARES");
  tool_expect(&tool, 0);
  tool_says(&tool, err, "hangs: the layer, pdl 1, edges both, cooperative no, 2 tokens: timing a graph: no progress within 300 ms");
  all = json_loads(tool.out, 0, NULL);
  ck_assert_ptr_nonnull(all);
  ck_assert_uint_eq(json_array_size(json_object_get(all, "rows")), 9);
  ck_assert_int_eq(rows_lost(json_object_get(all, "rows"), "hangs", "both", 0), 1);
  json_decref(all);
  tool_end(&tool);
}
END_TEST

/* A kernel without outputs behind plain edges has nothing that its other kinds could be compared with. A crash fails the command, at its end. */
START_TEST(crash_behind_plain_edges)
{
  tuned(GPU);
  setenv("FAKEGPU_CRASH_BEHIND", "000", 1);
  tool_run(&tool, "bench tiny --behind --tokens 2");
  unsetenv("FAKEGPU_CRASH_BEHIND");
  ck_assert_int_ne(tool.code, 0);
  tool_says(&tool, err, "fails: the layer, pdl 1, edges none, cooperative no, 2 tokens: ");
  ck_assert_int_eq(occurrences(tool.out, "| 1 | none | no | fails |"), 1);
  ck_assert_int_eq(occurrences(tool.out, "| not tried |"), 2);
  ck_assert_int_eq(occurrences(tool.out, "| tiny | 2 |"), 9);
  tool_end(&tool);
}
END_TEST

/* Times with and without the knob are told apart: a schedule that has it set is timed as its twin is. */
START_TEST(schedules_can_be_named)
{
  tuned(GPU);
  tool_run(&tool, "bench tiny --behind --tokens 2 --schedule stream/ring4-ld2-la2-fl3-fd2-st0-rk0-ho0-pd1 --quiet");
  tool_expect(&tool, 0);
  ck_assert_int_eq(occurrences(tool.out, "| tiny | 2 |"), 18);
  ck_assert_int_eq(occurrences(tool.out, "stream/ring4-ld2-la2-fl3-fd2-st0-rk0-ho0 |"), 7);
  tool_run(&tool, "bench tiny --behind --schedule nonsense");
  tool_expect(&tool, 2);
  tool_end(&tool);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("behind");
  TCase *router = tcase_create("router"), *bench = tcase_create("bench");
  tcase_add_loop_test(router, router_copies, 0, 2);
  tcase_add_test(bench, pairs_are_launched_as_said);
  tcase_add_test(bench, refusals_are_told);
  tcase_add_test(bench, outputs_that_differ_are_told);
  tcase_add_test(bench, kinds_that_hang_are_left_out);
  tcase_add_test(bench, hang_in_a_round);
  tcase_add_test(bench, crash_behind_plain_edges);
  tcase_add_test(bench, schedules_can_be_named);
  tcase_set_timeout(router, 120);
  tcase_set_timeout(bench, 240);
  suite_add_tcase(suite, router);
  suite_add_tcase(suite, bench);
  return emu_suite_run(suite);
}
