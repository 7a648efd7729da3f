/* test_trace.c - `moeforge trace`: traced kernels on the emulated device (every CTA's events, across CTAs too; numbers stay right; picture and JSON are
 * well-formed); traced kernels compile as others do, and untraced ones are not changed by their trace points. (Records: test_trace_read.c.) */
#include "emu_fixture.h"
#include "tool_fixture.h"

#include <math.h>

#include "compile.h"
#include "limits.h"
#include "trace.h"

#define EMULATED "--device emu --quiet"

static struct error err;

/* ---- kernels on the emulated device ---- */
static struct tool tool;

static void begin(void)
{
  tool_begin(&tool);
}

static void end(void)
{
  tool_end(&tool);
}

static double event_of(const json_t *track, const char *name)
{
  const json_t *v = json_object_get(json_object_get(track, "events"), name);
  return v != NULL ? json_number_value(v) : NAN;
}

static double value_of(const json_t *track, const char *name)
{
  const json_t *v = json_object_get(json_object_get(track, "values"), name);
  ck_assert_msg(json_is_number(v), "%s", name);
  return json_number_value(v);
}

/* Every unit is multiplied and published once, by one CTA; every CTA with rows of w2 fetches every expert's h, and not before it was published. */
static void check_launch(const json_t *launch, int down_ctas, int units, int unit_stages)
{
  const json_t *ctas = json_object_get(launch, "ctas"), *experts = json_object_get(launch, "experts");
  const int active = (int)json_integer_value(json_object_get(launch, "active"));
  double *published = calloc((size_t)(active * units), sizeof(*published)), up_stages = 0;
  size_t c, k, i;
  const json_t *cta, *track, *entry;
  ck_assert_uint_eq(json_array_size(experts), (size_t)active);
  json_array_foreach(ctas, c, cta) {
    json_array_foreach(json_object_get(cta, "tracks"), k, track) {
      const char *name = json_string_value(json_object_get(track, "name"));
      if(strcmp(name, "producer") == 0) {
        up_stages += value_of(track, "up stages");
        ck_assert_double_le(event_of(track, "begin"), event_of(track, "woken"));
        ck_assert_double_le(event_of(track, "woken"), event_of(track, "listed"));
      }
      if(strncmp(name, "finaliser", 9) != 0)
        continue;
      json_array_foreach(json_object_get(track, "list"), i, entry) {
        const int unit = (int)json_integer_value(json_array_get(entry, 1));
        ck_assert_int_lt(unit, active * units);
        ck_assert_msg(published[unit] <= 0, "unit %d is published twice", unit);
        published[unit] = json_number_value(json_array_get(entry, 0));
      }
    }
  }
  ck_assert_double_eq_tol(up_stages, active * units * unit_stages, 0.1);
  for(int u = 0; u < active * units; u++)
    ck_assert_msg(published[u] > 0, "unit %d is published by nobody", u);
  json_array_foreach(ctas, c, cta) {
    const double first_copy = event_of(json_array_get(json_object_get(cta, "tracks"), 0), "first copy");
    int fetched = 0;
    json_array_foreach(json_object_get(cta, "tracks"), k, track) {
      const char *name = json_string_value(json_object_get(track, "name"));
      if(strncmp(name, "consumers", 9) == 0) {
        ck_assert(!(event_of(track, "first stage landed") < first_copy));
        ck_assert((int)c >= down_ctas || event_of(track, "y stored") <= json_number_value(json_object_get(launch, "length")));
        ck_assert(((int)c < down_ctas) == !isnan(event_of(track, "y stored")));
      }
      if(strncmp(name, "h loader", 8) != 0)
        continue;
      for(i = 1; i < json_array_size(json_object_get(track, "list")); i += 3) { /* {progress}, {fetched}, {written} */
        const json_t *at = json_array_get(json_object_get(track, "list"), i);
        const int slot = (int)json_integer_value(json_array_get(at, 1));
        for(int u = slot * units; u < (slot + 1) * units; u++)
          ck_assert_msg(published[u] <= json_number_value(json_array_get(at, 0)), "CTA %zu has h of unit %d before it is published", c, u);
        fetched++;
      }
    }
    ck_assert_int_eq(fetched, (int)c < down_ctas ? active : 0);
  }
  free(published);
}

/* The JSON of a run, which is larger than what the fixture keeps. */
static json_t *read_json(void)
{
  char path[512];
  json_t *all;
  json_error_t why;
  snprintf(path, sizeof(path), "%s/stdout", tool.folder);
  all = json_load_file(path, 0, &why);
  ck_assert_msg(all != NULL, "line %d: %s", why.line, why.text);
  return all;
}

static void check_json(int units, int unit_stages, int launches)
{
  json_t *all = read_json();
  const json_t *launch;
  size_t l;
  ck_assert_str_eq(json_string_value(json_object_get(all, "unit")), "steps");
  ck_assert_int_eq(json_integer_value(json_object_get(all, "dropped")), 0);
  ck_assert_uint_eq(json_array_size(json_object_get(all, "launches")), (size_t)launches);
  ck_assert_uint_gt(json_array_size(json_object_get(all, "moments")), 15);
  json_array_foreach(json_object_get(all, "launches"), l, launch) {
    ck_assert_uint_eq(json_array_size(json_object_get(launch, "ctas")), 18);
    check_launch(launch, (int)json_integer_value(json_object_get(all, "down_ctas")), units, unit_stages);
  }
  json_decref(all);
}

/* Token counts and schedules: with and without tickets, deep and shallow rings, two and four loaders. */
static const char *const runs[] = {
    "--tokens 1",
    "--tokens 4 --schedule stream/ring4-ld2-la2-fl3-fd2-st0-rk0 --routing dispersed --seed 5",
    "--tokens 8 --schedule stream/ring10-ld4-la4-fl4-fd2-st1000-rk1 --routing concentrated --launches 3",
};

START_TEST(every_cta_has_its_events)
{
  tool_run(&tool, "trace specs/models/tiny.yaml " EMULATED " --json %s", runs[_i]);
  tool_expect(&tool, 0);
  check_json(256 / 8, 1, strstr(runs[_i], "--launches 3") != NULL ? 3 : 2);
}
END_TEST

/* Scores are computed; features do not fill their blocks; a second chunk of k with one block; tiles of 64 rows. */
START_TEST(another_policy)
{
  char path[300];
  FILE *f;
  snprintf(path, sizeof(path), "%s/other.yaml", tool.folder);
  f = fopen(path, "w");
  ck_assert_ptr_nonnull(f);
  fputs("name: other\nsource: made up\nshape:\n  experts: 64\n  top_k: 3\n  hidden: 1152\n  intermediate: 80\nrouter:\n  score: sigmoid\n  bias: true\n"
        "  renormalize: true\ntokens: 1-8\n", f);
  fclose(f);
  tool_run(&tool, "trace %s " EMULATED " --json --tokens 2", path);
  tool_expect(&tool, 0);
  check_json(80 / 8, 2, 2);
}
END_TEST

/* Shared experts have the numbers behind those of all ranks' routed ones, as in the workspace. */
START_TEST(shared_experts_are_numbered_apart)
{
  char path[300];
  const json_t *launch;
  json_t *all;
  size_t l;
  FILE *f;
  snprintf(path, sizeof(path), "%s/shared.yaml", tool.folder);
  f = fopen(path, "w");
  ck_assert_ptr_nonnull(f);
  fputs("name: shared\nsource: made up\nshape:\n  experts: 32\n  top_k: 2\n  hidden: 1024\n  intermediate: 64\n  ep: 2\nrouter:\n  score: softmax\n  renormalize: true\n"
        "shared_experts: 2\ntokens: 1-8\n", f);
  fclose(f);
  tool_run(&tool, "trace %s " EMULATED " --json --tokens 2", path);
  tool_expect(&tool, 0);
  all = read_json();
  ck_assert_uint_eq(json_array_size(json_object_get(all, "launches")), 2);
  json_array_foreach(json_object_get(all, "launches"), l, launch) {
    const json_t *experts = json_object_get(launch, "experts");
    const size_t count = json_array_size(experts);
    ck_assert_uint_ge(count, 2);
    for(size_t i = 0; i < count; i++) {
      const int expert = (int)json_integer_value(json_array_get(experts, i));
      if(i < 2) /* the head of the list */
        ck_assert_int_eq(expert, 32 + (int)i);
      else
        ck_assert_int_lt(expert, 16);
    }
  }
  json_decref(all);
}
END_TEST

/* Tags are closed in turn, attributes quoted, nothing but the five entities. */
static void check_xml(const char *text)
{
  const char *open[64];
  size_t length[64];
  int depth = 0, elements = 0;
  for(const char *at = strchr(text, '<'); at != NULL; at = strchr(at + 1, '<')) {
    const char *close = strchr(at, '>'), *next = strchr(at + 1, '<');
    const size_t name = strcspn(at + 1 + (at[1] == '/'), " />\n");
    int quotes = 0;
    ck_assert_ptr_nonnull(close);
    ck_assert(next == NULL || next > close);
    for(const char *s = at; s < close; s++)
      quotes += *s == '"';
    ck_assert_int_eq(quotes % 2, 0);
    if(at[1] == '/') {
      ck_assert_int_gt(depth, 0);
      depth--;
      ck_assert(length[depth] == name && strncmp(open[depth], at + 2, name) == 0);
      continue;
    }
    elements++;
    if(close[-1] == '/')
      continue;
    ck_assert_int_lt(depth, 64);
    open[depth] = at + 1;
    length[depth++] = name;
  }
  ck_assert_int_eq(depth, 0);
  ck_assert_int_gt(elements, 300);
  for(const char *at = strchr(text, '&'); at != NULL; at = strchr(at + 1, '&'))
    ck_assert(strncmp(at, "&lt;", 4) == 0 || strncmp(at, "&gt;", 4) == 0 || strncmp(at, "&amp;", 5) == 0);
  ck_assert_ptr_null(strstr(text, "nan"));
  ck_assert_ptr_null(strstr(text, "inf\""));
}

START_TEST(text_and_picture)
{
  static char svg[1 << 20];
  tool_run(&tool, "trace specs/models/tiny.yaml " EMULATED " --tokens 2 --launches 1 -o %s/t.svg", tool.folder);
  tool_expect(&tool, 0);
  ck_assert_str_eq(tool.err, "");
  tool_says(&tool, out, "tiny on emu-sm90: 2 tokens, uniform, stream/ring10-ld4-la4-fl4-fd2-st1000-rk1-ho0, 1 launch\n");
  tool_says(&tool, out, "no prediction of a GPU's");
  tool_says(&tool, out, "  y stored  ");
  tool_says(&tool, out, "  producer: flight cap  ");
  tool_says(&tool, out, "launch 1, of median length:");
  tool_says(&tool, out, "  last y   CTA ");
  tool_slurp(tool.folder, "t.svg", svg, sizeof(svg));
  ck_assert(strncmp(svg, "<svg xmlns=", 11) == 0);
  ck_assert_ptr_nonnull(strstr(svg, "<title>CTA 17 on SM 17</title>"));
  ck_assert_ptr_nonnull(strstr(svg, ">y stored "));
  check_xml(svg);
}
END_TEST

/* Kernels that are not as they should be: what they lack is told, not drawn. */
static const struct {
  const char *file, *expression;
  int code;
  const char *text;
} broken[] = {
    {"stream/up.cuh", "s/^ *trace_event(c, MF_CONSUMER_UP_DONE);$//", 11, "CTA 0, consumers 0: no \"up done\""},
    {"stream/trace.cuh", "s/^ *record->launch = launch + 1;$//", 11, "CTA 0 left no record of launch 1"},
    {"stream/quantise.cuh", "/^ *hw::fence_async_proxy();$/d", 9, "missing proxy fence"},
    {"stream/down.cuh", "s/^ *((uint16_t \\*)c.p.out)/        if(row != 3) ((uint16_t *)c.p.out)/", 11, "left output element 3 unwritten"},
};

START_TEST(broken_kernels)
{
  emu_shell("cp -r templates '%s/t' && sed -i '%s' '%s/t/%s' && ! cmp -s 'templates/%s' '%s/t/%s'", tool.folder, broken[_i].expression, tool.folder,
            broken[_i].file, broken[_i].file, tool.folder, broken[_i].file);
  tool_run(&tool, "trace specs/models/tiny.yaml " EMULATED " --templates %s/t", tool.folder);
  tool_expect(&tool, broken[_i].code);
  tool_says(&tool, err, broken[_i].text);
}
END_TEST

/* The same kernel as without trace points, but slower: its numbers stay right, launch after launch. */
START_TEST(numbers_stay_right)
{
  const struct test_case cases[] = {{3, ROUTING_UNIFORM, CASE_NORMAL, 1}, {1, ROUTING_ZIPF, CASE_NORMAL, 2}};
  struct emu_subject s = {.problem = emu_smallest_problem(), .sched = {.family = &family_stream}};
  struct emu_outcome outcome;
  const size_t line = strlen("#define MF_TRACE 1\n");
  struct artifact art = {0};
  size_t bytes;
  char *source;
  void *image;
  s.emulation.info = emu_device_of(18);
  s.emulation.seed = 3;
  family_stream.default_schedule(&s.problem, 8, &s.emulation.info, &s.sched);
  emu_open(&s, "templates", 8, 1.0f);
  ck_assert_int_eq(emit_source(&s.problem, "test", &s.sched, &s.emulation.info, &art, &err), MF_OK);
  source = malloc(strlen(art.source) + line + 1);
  ck_assert_ptr_nonnull(source);
  sprintf(source, "#define MF_TRACE 1\n%s", art.source);
  bytes = emu_image_bytes(source, 0);
  image = malloc(bytes);
  ck_assert_ptr_nonnull(image);
  emu_image_make(s.recipe.kernel, source, NULL, 0, image);
  s.recipe.workspace_bytes = (uint64_t)MF_TRACE_OFFSET(s.problem.top_k, s.problem.intermediate) + MF_TRACE_BYTES(18);
  device_emu.unload_kernel(s.dev, s.kernel);
  ck_assert_msg(device_emu.load_kernel(s.dev, image, bytes, &s.recipe, &s.kernel, &err) == MF_OK, "%s", err.text);
  emu_run(&s, 1.0f, cases, 2, 2, 11, &outcome);
  ck_assert_msg(outcome.passed && outcome.finding == EMU_NONE, "%s", outcome.text);
  emu_close(&s);
  free(image);
  free(source);
  free(art.source);
}
END_TEST

/* ---- compiling ---- */
static const struct {
  const char *spec, *schedule;
} compiled[] = {
    {"specs/models/qwen3.5-35b-a3b.yaml", "stream/ring4-ld2-la4-fl3-fd2-st0-rk1"},
    {"specs/models/qwen3.5-35b-a3b.yaml", "stream/ring10-ld4-la4-fl4-fd4-st0-rk1-ho1"},
    {"specs/models/qwen3.5-35b-a3b.yaml", "stream/ring10-ld4-la4-fl4-fd4-st0-rk1-ho0-pd1"},
    {"specs/models/qwen3.5-122b-a10b.yaml", "stream/ring6-ld4-la4-fl4-fd4-st0-rk1"},
    {"specs/models/glm-5-tp8.yaml", "stream/ring8-ld4-la2-fl4-fd4-st0-rk1"},
    {"specs/models/deepseek-v3.1-tp8.yaml", "stream/ring8-ld4-la2-fl4-fd4-st0-rk1"},
};

static void compile_one(const char *template_dir, int which, bool traced, char key[KEY_LEN])
{
  struct device_info dev;
  struct model_spec spec;
  struct schedule sched;
  struct artifact art = {0};
  struct closure closure;
  struct verdict why = {0};
  struct nvrtc *nvrtc = NULL;
  ck_assert_msg(device_spec_read("specs/devices/h200.yaml", &dev, NULL, NULL, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(spec_read(compiled[which].spec, &spec, NULL, NULL, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(schedule_parse(compiled[which].schedule, &sched, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(emit_source(&spec.problem, spec.name, &sched, &dev, &art, &err), MF_OK);
  if(traced) {
    char *source = malloc(strlen(art.source) + 32);
    ck_assert_ptr_nonnull(source);
    sprintf(source, "#define MF_TRACE 1\n%s", art.source);
    free(art.source);
    art.source = source;
  }
  ck_assert_msg(closure_collect(template_dir, art.source, &closure, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(nvrtc_open(&nvrtc, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(compile_artifact(nvrtc, &closure, "sm_90a", COMPILE_PLAIN, &art, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(art.spill_bytes, 0);
  ck_assert_int_eq(art.stack_bytes, 0);
  ck_assert(!art.wgmma_serialised);
  ck_assert_msg(limits_after_compile(&spec.problem, &sched, &dev, &art, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  ck_assert_msg(cubin_code_hash(art.cubin, art.cubin_bytes, key, &err) == MF_OK, "%s", err.text);
  closure_free(&closure);
  artifact_free(&art);
  nvrtc_close(nvrtc);
}

/* With every trace point taken out of the templates, the code of an untraced build is the same to the bit; a traced build's is not, and is within the limits. */
START_TEST(untraced_code_has_no_trace)
{
  char with[KEY_LEN], without[KEY_LEN], traced[KEY_LEN], bare[300];
  emu_shell("rm -rf '%s/bare%d' && cp -r templates '%s/bare%d'", emu_folder, _i, emu_folder, _i);
  emu_shell("cd '%s/bare%d/stream' && for f in kernel producer route up down down_dense handoff handoff_batches; do cp $f.cuh $f.old && "
            "sed -E -i 's/^( *)(trace_(event|value|first|entry|clocks|stream)|start_trace|hw::stamp_arrival)\\(.*\\);/\\1;/; "
            "s/^( *)(flight_wait|free_wait|ticket_wait|stage_wait|reduce_wait|wait|h_wait)\\.(start|stop)\\(\\);/\\1;/; "
            "s/^( *)(done|stages|up_stages|traced)\\.add\\(\\);/\\1;/' $f.cuh && ! cmp -s $f.cuh $f.old || exit 1; done; ! grep -q 'trace_event(c' *.cuh || "
            "test \"`grep -l 'trace_event(c' *.cuh`\" = trace.cuh",
            emu_folder, _i);
  compile_one("templates", _i, false, with);
  snprintf(bare, sizeof(bare), "%s/bare%d", emu_folder, _i);
  compile_one(bare, _i, false, without);
  compile_one("templates", _i, true, traced);
  ck_assert_str_eq(with, without);
  ck_assert_str_ne(with, traced);
}
END_TEST

/* ---- the command ---- */
static const struct {
  const char *words;
  int code;
  const char *text;
} refused[] = {
    {"trace specs/models/tiny.yaml", 8, "trace needs a GPU, or --device emu"},
    {"trace specs/models/tiny.yaml --device h200", 8, "trace needs a GPU"},
    {"trace", 2, "expected one shape or spec file"},
    {"trace specs/models/tiny.yaml --device emu --tokens 1,2", 2, "one token count"},
    {"trace specs/models/tiny.yaml --device emu --routing sideways", 2, "expected uniform, zipf"},
    {"trace specs/models/tiny.yaml --device emu --routing uniform,zipf", 2, "expected one routing, got 2"},
    {"trace specs/models/tiny.yaml --device emu --launches 9", 2, "from 1 to 8"},
    {"trace specs/models/tiny.yaml --device emu --schedule stream/nonsense", 2, "moeforge: --schedule: schedule \"stream/nonsense\": expected \"ring<number>\""},
    {"trace specs/models/tiny.yaml --device emu --schedule stream/ring4-ld4-la4-fl6-fd2-st0-rk1", 4, "rule flight"},
    {"trace nowhere.yaml --device emu", 5, "nowhere.yaml"},
    {"trace nowhere --device emu", 14, ""},
    {"trace specs/models/tiny.yaml --device emu -o specs/../specs/models/tiny.yaml", 2, "which is read here"},
    {"trace specs/models/tiny.yaml --device emu --quiet --launches 1 -o /nonexistent/t.svg", 5, "/nonexistent/t.svg"},
};

START_TEST(refusals)
{
  tool_run(&tool, "%s", refused[_i].words);
  tool_expect(&tool, refused[_i].code);
  tool_says(&tool, err, refused[_i].text);
}
END_TEST

/* On a GPU whose kernels do nothing: compiled, loaded, launched, and the output is still what it was. */
START_TEST(a_gpu_that_does_nothing)
{
  tool_gpu(&tool, "libfakecuda.so", "");
  tool_run(&tool, "trace specs/models/tiny.yaml --quiet");
  tool_expect(&tool, 11);
  tool_says(&tool, err, "trace: launch 0 left output element 0 unwritten");
}
END_TEST

/* On a GPU whose kernels do what they should, clocks and all: compiled, loaded, launched behind warm launches, read back. */
START_TEST(a_gpu_that_works)
{
  static char svg[1 << 20];
  tool_gpu(&tool, "libfakegpu.so", "sms=132,l2=1000000");
  setenv("FAKEGPU_TRACE", "1", 1);
  tool_run(&tool, "trace specs/models/tiny.yaml --quiet --launches 3 -o %s/t.svg", tool.folder);
  unsetenv("FAKEGPU_TRACE");
  tool_expect(&tool, 0);
  ck_assert_str_eq(tool.err, "");
  tool_says(&tool, out, "tiny on NVIDIA H200: 1 token, uniform, stream/ring10-ld4-la4-fl4-fd2-st1000-rk1-ho0, 3 launches\n");
  tool_says(&tool, out, "SM clock 2000 MHz");
  tool_says(&tool, out, "  y stored                       6.00      6.00      6.00\n");
  tool_says(&tool, out, "  producer: tickets              1.00      1.00      1.00\n");
  tool_says(&tool, out, ", of median length: 2 experts, 1.57 MB in 6.00 us, 0.26 TB/s\n"); /* 2 x 3 x 256 x 1024 bytes */
  tool_slurp(tool.folder, "t.svg", svg, sizeof(svg));
  ck_assert_ptr_nonnull(strstr(svg, "<title>CTA 131 on SM 131</title>"));
  check_xml(svg);
  tool_run(&tool, "trace specs/models/tiny.yaml --quiet"); /* the same, but kernels leave nothing */
  tool_expect(&tool, 11);
  tool_says(&tool, err, "CTA 0 left no record of launch ");
}
END_TEST

static Suite *suite(void)
{
  Suite *s = suite_create("trace");
  TCase *kernels = tcase_create("kernels"), *numbers = tcase_create("numbers"), *code = tcase_create("code"), *command = tcase_create("command");
  tcase_add_checked_fixture(kernels, begin, end);
  tcase_set_timeout(kernels, 300);
  tcase_add_loop_test(kernels, every_cta_has_its_events, 0, (int)(sizeof(runs) / sizeof(runs[0])));
  tcase_add_test(kernels, another_policy);
  tcase_add_test(kernels, shared_experts_are_numbered_apart);
  tcase_add_test(kernels, text_and_picture);
  tcase_add_loop_test(kernels, broken_kernels, 0, (int)(sizeof(broken) / sizeof(broken[0])));
  suite_add_tcase(s, kernels);
  tcase_set_timeout(numbers, 300);
  tcase_add_test(numbers, numbers_stay_right);
  suite_add_tcase(s, numbers);
  tcase_set_timeout(code, 300);
#ifdef __SANITIZE_ADDRESS__
  tcase_add_loop_test(code, untraced_code_has_no_trace, 0, 1); /* it is NVRTC that takes the time; all rows are in the other build */
#else
  tcase_add_loop_test(code, untraced_code_has_no_trace, 0, (int)(sizeof(compiled) / sizeof(compiled[0])));
#endif
  suite_add_tcase(s, code);
  tcase_add_checked_fixture(command, begin, end);
  tcase_set_timeout(command, 300);
  tcase_add_loop_test(command, refusals, 0, (int)(sizeof(refused) / sizeof(refused[0])));
  tcase_add_test(command, a_gpu_that_does_nothing);
  tcase_add_test(command, a_gpu_that_works);
  suite_add_tcase(s, command);
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
