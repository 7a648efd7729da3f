/* test_family_stream.c - the kernel family on the host's side against the kernel itself: compiles every served shape with NVRTC (no GPU needed) and
 * compares the exported metadata with the host's formulas; the recipe is checked field by field. Needs NVRTC: without it the test fails. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compile.h"
#include "emit.h"
#include "family_stream.h"
#include "limits.h"
#include "recipe.h"
#include "space.h"
#include "spec.h"
#include "stream/params.h"

static struct device_info device(const char *name)
{
  struct device_info dev;
  struct error err;
  char path[256];
  snprintf(path, sizeof(path), "specs/devices/%s.yaml", name);
  ck_assert_msg(device_spec_read(path, &dev, NULL, NULL, &err) == MF_OK, "%s", err.text);
  return dev;
}

static struct mf_problem problem(const char *name)
{
  struct model_spec spec;
  struct error err;
  char path[256];
  snprintf(path, sizeof(path), "specs/models/%s.yaml", name);
  ck_assert_msg(spec_read(path, &spec, NULL, NULL, &err) == MF_OK, "%s", err.text);
  return spec.problem;
}

static int set(struct schedule *sched, const char *knob, int value)
{
  const int k = family_knob(&family_stream, knob);
  ck_assert_int_ge(k, 0);
  sched->value[k] = value;
  return k;
}

/* Emits and compiles; fills in the artifact. */
static void compile(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct artifact *art)
{
  struct error err = {MF_OK, ""};
  struct closure closure;
  struct nvrtc *nvrtc;
  ck_assert_msg(nvrtc_open(&nvrtc, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(emit_source(p, "test", sched, dev, art, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(closure_collect("templates", art->source, &closure, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(compile_artifact(nvrtc, &closure, "sm_90a", false, art, &err) == MF_OK, "%s\n%s", err.text, art->log != NULL ? art->log : "");
  closure_free(&closure);
  nvrtc_close(nvrtc);
}

static const struct {
  const char *shape, *device;
  int ring, loaders;  /* 0: the default's */
} compiled[] = {
    {"qwen3.5-35b-a3b", "h200", 0, 0},   {"qwen3.5-122b-a10b", "h200", 0, 0}, {"glm-5-tp8", "h200", 0, 0}, {"deepseek-v3.1-tp8", "h200", 0, 0},
    {"qwen3.5-35b-a3b", "h200", 6, 2},   {"deepseek-v3.1-tp8", "h200", 4, 2}, {"tiny", "h200", 0, 0},      {"qwen3.5-35b-a3b", "h100-pcie", 0, 0},
    {"qwen3-30b-a3b", "h200", 0, 0},
};

START_TEST(host_and_kernel_agree)
{
  const struct device_info dev = device(compiled[_i].device);
  const struct mf_problem p = problem(compiled[_i].shape);
  struct schedule sched = {.family = &family_stream};
  struct artifact art = {0};
  struct verdict why = {0};
  struct error err = {MF_OK, ""};
  struct mf_stream_meta meta;
  family_stream.default_schedule(&p, 1, &dev, &sched);
  if(compiled[_i].ring > 0) {
    set(&sched, "ring_stages", compiled[_i].ring);
    set(&sched, "h_loaders", compiled[_i].loaders);
  }
  compile(&p, &sched, &dev, &art);
  ck_assert_msg(cubin_read_symbol(art.cubin, art.cubin_bytes, "mf_meta", &meta, sizeof(meta), &err) == MF_OK, "%s", err.text);
  ck_assert_msg(family_stream.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why) == MF_OK, "%s", why.detail);
  ck_assert_msg(limits_after_compile(&p, &sched, &dev, &art, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  meta.shared_bytes += 1024; /* the comparison can fail */
  ck_assert_int_eq(family_stream.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why), MF_REJECTED);
  ck_assert_str_eq(why.rule, "metadata");
  ck_assert_ptr_nonnull(strstr(why.detail, "shared_bytes"));
  artifact_free(&art);
}
END_TEST

START_TEST(recipes_are_valid)
{
  static const char *const shapes[] = {"qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "glm-5-tp8", "deepseek-v3.1-tp8", "tiny"};
  const struct device_info dev = device("h200");
  const struct mf_problem p = problem(shapes[_i]);
  struct candidate_list list = {0};
  struct error err = {MF_OK, ""};
  ck_assert_msg(space_enumerate(&p, &dev, 1, 8, EFFORT_DEFAULT, &list, NULL, NULL, &err) == MF_OK, "%s", err.text);
  for(size_t i = 0; i < list.count; i++) {
    const struct mf_recipe *r = &list.items[i].recipe;
    ck_assert_int_eq(recipe_validate(r, sizeof(*r)), MF_OK);
    ck_assert_uint_eq(r->grid[0], (unsigned)dev.sms);
    ck_assert_uint_le(r->shared_bytes, (unsigned)dev.shared_bytes_per_cta);
    ck_assert(r->flags & MF_RECIPE_COOPERATIVE);
    ck_assert_uint_eq(r->nparams, 3);
    ck_assert_uint_eq(r->params[0].size, sizeof(struct mf_stream_params));
    for(uint32_t m = 0; m < r->nmaps; m++) { /* a box is one copy: its bytes fit a stage */
      uint64_t bytes = 1;
      for(uint32_t d = 0; d < r->maps[m].rank; d++)
        bytes *= r->maps[m].box[d];
      ck_assert_uint_le(bytes, 16384);
    }
  }
  candidate_list_free(&list);
}
END_TEST

START_TEST(knobs_reach_the_parameters)
{
  const struct device_info dev = device("h200");
  const struct mf_problem p = problem("qwen3.5-35b-a3b");
  struct schedule sched = {.family = &family_stream};
  struct mf_recipe r;
  struct error err = {MF_OK, ""};
  static const struct {
    const char *knob;
    size_t offset;
  } rows[] = {{"flight", offsetof(struct mf_stream_params, flight)},
              {"first_down_flight", offsetof(struct mf_stream_params, first_down_flight)},
              {"static_rounds", offsetof(struct mf_stream_params, static_rounds)},
              {"rotate_k", offsetof(struct mf_stream_params, rotate_k)}};
  family_stream.default_schedule(&p, 1, &dev, &sched);
  for(size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    bool found = false;
    set(&sched, rows[i].knob, 77 + (int)i);
    ck_assert_int_eq(family_stream.recipe(&p, &sched, &dev, &r, &err), MF_OK);
    for(uint32_t f = 0; f < r.nfields; f++)
      found = found || (r.fields[f].source == MF_SRC_CONST && r.fields[f].offset == rows[i].offset && r.fields[f].value == 77 + (int)i);
    ck_assert_msg(found, "%s does not reach the kernel", rows[i].knob);
  }
}
END_TEST

/* Every field of the parameter struct is written by exactly one recipe field. */
START_TEST(parameters_are_complete)
{
  const struct device_info dev = device("h200");
  const struct mf_problem p = problem("qwen3.5-35b-a3b");
  struct schedule sched = {.family = &family_stream};
  unsigned char written[sizeof(struct mf_stream_params)] = {0};
  struct mf_recipe r;
  struct error err = {MF_OK, ""};
  family_stream.default_schedule(&p, 1, &dev, &sched);
  ck_assert_int_eq(family_stream.recipe(&p, &sched, &dev, &r, &err), MF_OK);
  for(uint32_t f = 0; f < r.nfields; f++) {
    for(uint32_t b = 0; b < r.fields[f].size && r.fields[f].offset + b < sizeof(written); b++)
      written[r.fields[f].offset + b]++;
  }
  for(size_t b = 0; b < offsetof(struct mf_stream_params, evict_first) + sizeof(int32_t); b++)
    ck_assert_msg(written[b] == 1, "byte %zu of the parameters is written %d times", b, written[b]);
}
END_TEST

START_TEST(the_cost_model_orders_what_is_known)
{
  const struct device_info dev = device("h200");
  const struct mf_problem p = problem("qwen3.5-35b-a3b");
  struct schedule sched = {.family = &family_stream};
  double one, eight, shallow;
  family_stream.default_schedule(&p, 1, &dev, &sched);
  one = family_stream.predict_us(&p, &sched, &dev, 1, 8);
  eight = family_stream.predict_us(&p, &sched, &dev, 8, 58);
  ck_assert_double_gt(one, 5);
  ck_assert_double_lt(one, 20);
  ck_assert_double_gt(eight, 3 * one);
  set(&sched, "flight", 2);
  shallow = family_stream.predict_us(&p, &sched, &dev, 8, 58);
  ck_assert_double_gt(shallow, eight);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("family_stream");
  TCase *tc = tcase_create("all");
  SRunner *runner;
  int failed;
  tcase_add_loop_test(tc, host_and_kernel_agree, 0, (int)(sizeof(compiled) / sizeof(compiled[0])));
  tcase_add_loop_test(tc, recipes_are_valid, 0, 5);
  tcase_add_test(tc, knobs_reach_the_parameters);
  tcase_add_test(tc, parameters_are_complete);
  tcase_add_test(tc, the_cost_model_orders_what_is_known);
  tcase_set_timeout(tc, 120);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? 0 : 1;
}
