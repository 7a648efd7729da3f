/* test_space.c - families.c, space.c, emit.c: names, enumeration, rejections, emitted files. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "emit.h"
#include "family_stream.h"
#include "limits.h"
#include "space.h"
#include "spec.h"

static struct device_info h200(void)
{
  struct device_info dev;
  struct error err;
  ck_assert_msg(device_spec_read("specs/devices/h200.yaml", &dev, NULL, NULL, &err) == MF_OK, "%s", err.text);
  return dev;
}

static struct model_spec model(const char *name)
{
  struct model_spec spec;
  struct error err;
  char path[256];
  snprintf(path, sizeof(path), "specs/models/%s.yaml", name);
  ck_assert_msg(spec_read(path, &spec, NULL, NULL, &err) == MF_OK, "%s", err.text);
  return spec;
}

static const char *const paper_shapes[] = {"qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "glm-5-tp8", "deepseek-v3.1-tp8"};

START_TEST(names_round_trip)
{
  const struct device_info dev = h200();
  const struct model_spec spec = model(paper_shapes[_i]);
  struct candidate_list list = {0};
  struct error err;
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, EFFORT_DEFAULT, &list, NULL, NULL, &err), MF_OK);
  for(size_t i = 0; i < list.count; i++) {
    struct schedule back;
    ck_assert_msg(schedule_parse(list.items[i].name, &back, &err) == MF_OK, "%s", err.text);
    ck_assert(schedule_equal(&back, &list.items[i].schedule));
    for(size_t j = 0; j < i; j++)
      ck_assert_str_ne(list.items[i].name, list.items[j].name);
  }
  candidate_list_free(&list);
}
END_TEST

/* As winners that were stored before there was the last knob have it. */
START_TEST(an_older_name_is_read)
{
  static const char *const last[][2] = {{"-ho0-pd1", "-ho0-pd1"}, {"-ho0-uf4", "-ho0-uf4"}, {"-ho0-uf8", "-ho0"}, {"-ho1-pd1-uf4", "-ho1-pd1-uf4"}, {"-ho1-pd0-uf4", "-ho1-uf4"}};
  struct schedule sched;
  struct error err = {MF_OK, ""};
  char name[NAME_MAX_LEN * 2];
  ck_assert_msg(schedule_parse("stream/ring4-ld2-la4-fl3-fd2-st0-rk1", &sched, &err) == MF_OK, "%s", err.text);
  schedule_name(&sched, name, sizeof(name));
  ck_assert_str_eq(name, "stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho0");
  ck_assert_msg(schedule_parse("stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho2-pd0", &sched, &err) == MF_OK, "%s", err.text);
  schedule_name(&sched, name, sizeof(name));
  ck_assert_str_eq(name, "stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho2"); /* what is usual for the last knobs is not shown */
  for(size_t i = 0; i < sizeof(last) / sizeof(last[0]); i++) {
    char wanted[NAME_MAX_LEN];
    snprintf(name, sizeof(name), "stream/ring4-ld2-la4-fl3-fd2-st0-rk1%s", last[i][0]);
    snprintf(wanted, sizeof(wanted), "stream/ring4-ld2-la4-fl3-fd2-st0-rk1%s", last[i][1]);
    ck_assert_msg(schedule_parse(name, &sched, &err) == MF_OK, "%s", err.text);
    schedule_name(&sched, name, sizeof(name));
    ck_assert_str_eq(name, wanted);
  }
}
END_TEST

START_TEST(bad_names_are_refused)
{
  static const char *const bad[] = {"", "stream", "nosuch/ring10", "stream/", "stream/ring", "stream/ring10-ld4", "stream/ring10-ld4-la2-fl4-fd2-st0-rk1-x",
                                    "stream/ld4-ring10-la2-fl4-fd2-st0-rk1", "stream/ring-4-ld4-la2-fl4-fd2-st0-rk1", "stream/ring4-ld2-la4-fl3-fd2-st0-rk1-uf4",
                                    "stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho0-uf4-pd1", "stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho0-uf", "stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho0-",
                                     "stream/ring99999999999-ld4"};
  for(size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
    struct schedule sched;
    struct error err = {MF_OK, ""};
    ck_assert_msg(schedule_parse(bad[i], &sched, &err) != MF_OK, "accepted \"%s\"", bad[i]);
    ck_assert_msg(strstr(err.text, "schedule") != NULL, "no useful text for \"%s\": %s", bad[i], err.text);
  }
}
END_TEST

START_TEST(named_schedules_and_no_others)
{
  static const struct {
    const char *names, *says;
    enum mf_status status;
  } bad[] = {{"", "no schedule is named", MF_ERR_USAGE},
             {",", "no schedule is named", MF_ERR_USAGE},
             {"stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho0,nosuch/x", "nosuch", MF_ERR_NOT_FOUND},
             {"stream/ring4-ld2-la4-fl6-fd2-st0-rk1-ho0", "rule flight", MF_REJECTED},
             {"batch/g2-ring8-ov0-la2-fl8-fd4-st4-rk1", "tokens", MF_ERR_UNSUPPORTED}};
  const struct device_info dev = h200();
  const struct model_spec spec = model("tiny");
  const int tokens[] = {1, 8};
  struct candidate_list list = {0};
  struct error err;
  ck_assert_int_eq(space_enumerate_names(&spec.problem, &dev, tokens, 2, "stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho1,,stream/ring10-ld4-la4-fl4-fd4-st1000-rk1-ho0,"
                                         "stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho1", &list, &err), MF_OK);
  ck_assert_uint_eq(list.count, 2);
  ck_assert_str_eq(list.items[0].name, "stream/ring4-ld2-la4-fl3-fd2-st0-rk1-ho1");
  ck_assert_str_eq(list.items[1].name, "stream/ring10-ld4-la4-fl4-fd4-st1000-rk1-ho0");
  candidate_list_free(&list);
  for(size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
    ck_assert_msg(space_enumerate_names(&spec.problem, &dev, tokens, 2, bad[i].names, &list, &err) == bad[i].status, "%s: %s", bad[i].names, err.text);
    ck_assert_msg(strncmp(err.text, "--schedule", 10) == 0 && strstr(err.text, bad[i].says) != NULL, "%s: %s", bad[i].names, err.text);
    candidate_list_free(&list);
  }
}
END_TEST

/* A family may serve a token count with some of its schedules only: those for fewer tokens are no candidates, neither named nor as winners of earlier runs. */
START_TEST(a_schedule_for_fewer_tokens_is_no_candidate)
{
  const struct device_info dev = h200();
  const struct model_spec spec = model("qwen3.5-35b-a3b");
  const int tokens[] = {24, 32};
  struct candidate_list list = {0};
  struct schedule sched;
  struct error err;
  ck_assert_int_eq(space_enumerate_names(&spec.problem, &dev, tokens, 2, "batch/g2-ring8-ov0-la2-fl8-fd4-st4-rk1", &list, &err), MF_ERR_UNSUPPORTED);
  ck_assert_ptr_nonnull(strstr(err.text, "takes 9 to 16 tokens: none of those asked for"));
  candidate_list_free(&list);
  ck_assert_int_eq(schedule_parse("batch/g2-ring8-ov0-la2-fl8-fd4-st4-rk1", &sched, &err), MF_OK);
  ck_assert_int_eq(space_add(&spec.problem, &dev, tokens, 2, &sched, &list, &err), MF_OK);
  ck_assert_uint_eq(list.count, 0);
  ck_assert_int_eq(schedule_parse("batch/g3-ring8-ov1-la2-fl8-fd4-st4-rk1", &sched, &err), MF_OK);
  ck_assert_int_eq(space_add(&spec.problem, &dev, tokens, 2, &sched, &list, &err), MF_OK);
  ck_assert_uint_eq(list.count, 1);
  candidate_list_free(&list);
}
END_TEST

START_TEST(default_effort_has_enough_candidates)
{
  const struct device_info dev = h200();
  const struct model_spec spec = model(paper_shapes[_i]);
  struct candidate_list quick = {0}, normal = {0}, whole = {0};
  struct error err;
  size_t defaults = 0;
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, EFFORT_QUICK, &quick, NULL, NULL, &err), MF_OK);
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, EFFORT_DEFAULT, &normal, NULL, NULL, &err), MF_OK);
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, EFFORT_EXHAUSTIVE, &whole, NULL, NULL, &err), MF_OK);
  ck_assert_uint_lt(quick.count, normal.count);
  ck_assert_uint_lt(normal.count, whole.count);
  ck_assert_msg(normal.count >= 48, "%zu candidates", normal.count);
  for(size_t i = 0; i < normal.count; i++) { /* a smaller effort is a subset of a larger one */
    size_t j = 0;
    while(j < whole.count && !schedule_equal(&whole.items[j].schedule, &normal.items[i].schedule))
      j++;
    ck_assert_uint_lt(j, whole.count);
    defaults += normal.items[i].is_default;
  }
  ck_assert_uint_ge(defaults, 1);
  ck_assert(normal.items[0].is_default);
  candidate_list_free(&quick);
  candidate_list_free(&normal);
  candidate_list_free(&whole);
}
END_TEST

/* A knob that is not primary but needs a kernel of its own is tried with every ring and number of loaders: with the default ones alone it might lose to these. */
START_TEST(kernels_are_varied_together)
{
  static const int rings[] = {4, 6, 8, 10};
  const struct device_info dev = h200();
  const struct model_spec spec = model("qwen3.5-35b-a3b");
  struct candidate_list list = {0};
  struct error err;
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, EFFORT_DEFAULT, &list, NULL, NULL, &err), MF_OK);
  for(int i = 0; i < 8; i++) {
    struct schedule wanted;
    char name[64];
    size_t j = 0;
    snprintf(name, sizeof(name), "stream/ring%d-ld%d-la4-fl4-fd4-st0-rk1-ho1", rings[i / 2], i % 2 ? 4 : 2);
    ck_assert_int_eq(schedule_parse(name, &wanted, &err), MF_OK);
    while(j < list.count && !schedule_equal(&list.items[j].schedule, &wanted))
      j++;
    ck_assert_msg(j < list.count, "%s is no candidate", name);
  }
  candidate_list_free(&list);
}
END_TEST

/* Half units are tried where a whole one is large, and are the default there. */
START_TEST(half_units_are_tried_where_units_are_large)
{
  static const struct {
    const char *shape;
    bool large;
  } rows[] = {{"glm-5-tp8", true}, {"deepseek-v3.1-tp8", true}, {"qwen3-235b-a22b-tp4", true}, {"qwen3.5-35b-a3b", false}, {"minimax-m2-tp2", false}};
  const struct device_info dev = h200();
  for(size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    const struct model_spec spec = model(rows[i].shape);
    const int knob = family_knob(&family_stream, "unit_features");
    for(enum effort effort = EFFORT_QUICK; effort <= EFFORT_DEFAULT; effort++) {
      struct candidate_list list = {0};
      struct error err;
      size_t half = 0, whole = 0;
      ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, effort, &list, NULL, NULL, &err), MF_OK);
      for(size_t c = 0; c < list.count; c++) {
        const struct schedule *sched = &list.items[c].schedule;
        if(sched->family != &family_stream)
          continue;
        half += sched->value[knob] == 4;
        whole += sched->value[knob] == 8;
        ck_assert(!list.items[c].is_default || sched->value[knob] == (rows[i].large ? 4 : 8));
      }
      ck_assert_int_eq(half > 0, rows[i].large);
      ck_assert_uint_gt(whole, 0);
      candidate_list_free(&list);
    }
  }
}
END_TEST

struct rejects {
  size_t count, shared_memory;
};

static void note_reject(void *context, const struct schedule *sched, const struct verdict *why)
{
  struct rejects *r = context;
  ck_assert_ptr_nonnull(sched->family);
  ck_assert_ptr_nonnull(why->rule);
  ck_assert_ptr_nonnull(why->stage);
  ck_assert_int_gt((int)strlen(why->detail), 0);
  r->count++;
  r->shared_memory += strcmp(why->rule, "shared_memory") == 0;
}

START_TEST(rejections_have_a_rule)
{
  const struct device_info dev = h200();
  const struct model_spec spec = model("deepseek-v3.1-tp8");
  struct candidate_list list = {0};
  struct rejects r = {0, 0};
  struct error err;
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, EFFORT_EXHAUSTIVE, &list, note_reject, &r, &err), MF_OK);
  ck_assert_uint_gt(r.shared_memory, 0); /* 12 stages do not fit beside 56 KB of x */
  ck_assert_uint_eq(list.considered, list.count + r.count);
  candidate_list_free(&list);
}
END_TEST

START_TEST(same_call_same_list)
{
  const struct device_info dev = h200();
  const struct model_spec spec = model("qwen3.5-35b-a3b");
  struct candidate_list a = {0}, b = {0};
  struct error err;
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, EFFORT_DEFAULT, &a, NULL, NULL, &err), MF_OK);
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, EFFORT_DEFAULT, &b, NULL, NULL, &err), MF_OK);
  ck_assert_uint_eq(a.count, b.count);
  for(size_t i = 0; i < a.count; i++) {
    ck_assert_str_eq(a.items[i].name, b.items[i].name);
    ck_assert_mem_eq(&a.items[i].recipe, &b.items[i].recipe, sizeof(a.items[i].recipe));
  }
  candidate_list_free(&a);
  candidate_list_free(&b);
}
END_TEST

/* Each changes one field to something that the family does not serve; the rule must say which. */
static const struct {
  const char *rule;
  size_t offset;
  int value;
} unserved[] = {
    {"top_k", offsetof(struct mf_problem, top_k), 23},
    {"experts", offsetof(struct mf_problem, experts), 260},
    {"hidden", offsetof(struct mf_problem, hidden), 2880},
    {"intermediate", offsetof(struct mf_problem, intermediate), 24},
    {"groups", offsetof(struct mf_problem, groups), 3},
    {"experts", offsetof(struct mf_problem, zero_experts), 4},
    {"top_k", offsetof(struct mf_problem, shared_experts), 15},
};

START_TEST(unserved_shapes_name_the_rule)
{
  const struct device_info dev = h200();
  struct model_spec spec = model("qwen3.5-35b-a3b");
  struct candidate_list list = {0};
  struct error err = {MF_OK, ""};
  char expected[64];
  memcpy((char *)&spec.problem + unserved[_i].offset, &unserved[_i].value, sizeof(int));
  snprintf(expected, sizeof(expected), "rule %s:", unserved[_i].rule);
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 8, EFFORT_DEFAULT, &list, NULL, NULL, &err), MF_ERR_UNSUPPORTED);
  ck_assert_msg(strstr(err.text, expected) != NULL, "%s", err.text);
  ck_assert_uint_eq(list.count, 0);
  candidate_list_free(&list);
}
END_TEST

START_TEST(too_many_tokens_are_not_served)
{
  const struct device_info dev = h200();
  const struct model_spec spec = model("qwen3.5-35b-a3b");
  struct candidate_list list = {0};
  struct error err = {MF_OK, ""};
  ck_assert_int_eq(space_enumerate(&spec.problem, &dev, 1, 33, EFFORT_DEFAULT, &list, NULL, NULL, &err), MF_ERR_UNSUPPORTED);
  ck_assert_msg(strstr(err.text, "rule tokens") != NULL, "%s", err.text);
}
END_TEST

START_TEST(emitted_files_are_written_once)
{
  const struct device_info dev = h200();
  const struct model_spec spec = model("qwen3.5-35b-a3b");
  char dir[] = "/tmp/moeforge-test-XXXXXX", path[512];
  struct schedule sched = {0};
  struct artifact art = {0};
  struct stat before, after;
  struct error err;
  sched.family = &family_stream;
  family_stream.default_schedule(&spec.problem, 1, &dev, &sched);
  ck_assert_ptr_nonnull(mkdtemp(dir));
  ck_assert_int_eq(emit_source(&spec.problem, spec.name, &sched, &dev, &art, &err), MF_OK);
  ck_assert_msg(emit_write(dir, spec.name, &art, &err) == MF_OK, "%s", err.text);
  snprintf(path, sizeof(path), "%s/%s/%s.cu", dir, spec.name, art.name);
  ck_assert_int_eq(stat(path, &before), 0);
  ck_assert_int_eq(before.st_size, (long)strlen(art.source));
  ck_assert_int_eq(emit_write(dir, spec.name, &art, &err), MF_OK);
  ck_assert_int_eq(stat(path, &after), 0);
  ck_assert_uint_eq(before.st_ino, after.st_ino); /* an identical file is left alone */
  art.source[0] = ' ';
  ck_assert_int_eq(emit_write(dir, spec.name, &art, &err), MF_OK);
  ck_assert_int_eq(stat(path, &after), 0);
  ck_assert_uint_ne(before.st_ino, after.st_ino);
  unlink(path);
  snprintf(path, sizeof(path), "%s/%s", dir, spec.name);
  rmdir(path);
  rmdir(dir);
  free(art.source);
}
END_TEST

START_TEST(emission_into_a_bad_place_fails_with_its_name)
{
  struct artifact art = {.name = "x", .source = (char *)(uintptr_t) "text"};
  struct error err = {MF_OK, ""};
  ck_assert_int_eq(emit_write("/proc/nosuch/gen", "shape", &art, &err), MF_ERR_IO);
  ck_assert_msg(strstr(err.text, "/proc/nosuch/gen") != NULL, "%s", err.text);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("space");
  TCase *tc = tcase_create("all");
  SRunner *runner;
  int failed;
  tcase_add_loop_test(tc, names_round_trip, 0, 4);
  tcase_add_test(tc, an_older_name_is_read);
  tcase_add_test(tc, bad_names_are_refused);
  tcase_add_test(tc, named_schedules_and_no_others);
  tcase_add_test(tc, a_schedule_for_fewer_tokens_is_no_candidate);
  tcase_add_loop_test(tc, default_effort_has_enough_candidates, 0, 4);
  tcase_add_test(tc, kernels_are_varied_together);
  tcase_add_test(tc, half_units_are_tried_where_units_are_large);
  tcase_add_test(tc, rejections_have_a_rule);
  tcase_add_test(tc, same_call_same_list);
  tcase_add_loop_test(tc, unserved_shapes_name_the_rule, 0, (int)(sizeof(unserved) / sizeof(unserved[0])));
  tcase_add_test(tc, too_many_tokens_are_not_served);
  tcase_add_test(tc, emitted_files_are_written_once);
  tcase_add_test(tc, emission_into_a_bad_place_fails_with_its_name);
  tcase_set_timeout(tc, 60);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? 0 : 1;
}
