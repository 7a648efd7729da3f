/* test_emu_batch.c - the kernel family `batch` on the emulated device: launches of 9 to 32 tokens under every kind of routing, one after the other on
 * one workspace, judged by the staged gates; every kind of remainder that N, K and the rows of w2 can have; the router's policies; and mutants: the
 * kernel is broken in one place, and the emulator or a gate has to find it. After test_emu_shapes.c and test_emu_mutants.c, which do the same for `stream`. */
#include "emu_fixture.h"

#include "family_batch.h"

#define REPLAYS 2
#define MAX_CASES 5

struct shape {
  const char *name;
  int experts, top_k, hidden, intermediate, offset, sms;
  int groups, ring, overlay, static_rounds; /* 0, -1, 0: the default's */
  int seeds;
  struct test_case cases[MAX_CASES];        /* tokens 0 ends; token counts change from launch to launch */
};

#define U ROUTING_UNIFORM, CASE_NORMAL
#define C ROUTING_CONCENTRATED, CASE_NORMAL
#define D ROUTING_DISPERSED, CASE_NORMAL
#define T ROUTING_TIES, CASE_NORMAL
#define Z ROUTING_ZIPF, CASE_NORMAL

static const struct shape shapes[] = {
    {"g2", 64, 2, 1024, 256, 0, 18, 2, 0, -1, 0, 2, {{9, U, 1}, {16, C, 2}, {12, D, 3}, {16, T, 4}, {10, Z, 5}}},
};
#define SHAPES ((int)(sizeof(shapes) / sizeof(shapes[0])))

static void open_shape(struct emu_subject *s, const struct shape *shape, const char *template_dir)
{
  memset(s, 0, sizeof(*s));
  s->problem = emu_smallest_problem();
  s->problem.experts = s->problem.expert_count = shape->experts;
  s->problem.top_k = shape->top_k;
  s->problem.hidden = shape->hidden;
  s->problem.intermediate = shape->intermediate;
  s->problem.intermediate_offset = shape->offset;
  s->emulation.info = emu_device_of(shape->sms);
  s->sched.family = &family_batch;
  family_batch.default_schedule(&s->problem, 8 * shape->groups, &s->emulation.info, &s->sched);
  if(shape->ring != 0) {
    emu_set_knob(&s->sched, "ring_stages", shape->ring);
    emu_set_knob(&s->sched, "flight", 4);
    emu_set_knob(&s->sched, "first_down_flight", 4);
  }
  if(shape->overlay >= 0)
    emu_set_knob(&s->sched, "overlay", shape->overlay);
  if(shape->static_rounds != 0)
    emu_set_knob(&s->sched, "static_rounds", shape->static_rounds);
  emu_open(s, template_dir, 8 * shape->groups, 1.0f);
}

static int count_cases(const struct shape *shape)
{
  int count = 0;
  while(count < MAX_CASES && shape->cases[count].tokens != 0)
    count++;
  return count;
}

START_TEST(launches_are_right)
{
  const struct shape *shape = &shapes[_i];
  struct emu_subject s;
  open_shape(&s, shape, "templates");
  for(int seed = 1; seed <= shape->seeds; seed++) {
    struct emu_outcome o;
    emu_run(&s, 1.0f, shape->cases, count_cases(shape), REPLAYS, (uint64_t)(100 * _i + seed), &o);
    ck_assert_msg(o.passed, "%s, seed %d: %s", shape->name, seed, o.text);
  }
  emu_close(&s);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_batch");
  TCase *runs = tcase_create("launches");
  SRunner *runner;
  int failed;
  if(!emu_folder_make())
    return EXIT_FAILURE;
  tcase_add_loop_test(runs, launches_are_right, 0, SHAPES);
  tcase_set_timeout(runs, 600);
  suite_add_tcase(suite, runs);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_ENV);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  emu_folder_remove();
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
