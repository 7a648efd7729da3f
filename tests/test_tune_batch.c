/* test_tune_batch.c - plan and tune for token counts that several kernel families share: each count is won by a family that serves it, and its candidates are
 * checked, on the emulated device, at the counts that they take. */
#include "cli_fixture.h"

#define SPEC "tests/data/specs/batch.yaml"

static char root[4096];

static void begin_empty(void)
{
  tool_begin(&tool);
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
}

START_TEST(plan_counts_both_families)
{
  tool_run(&tool, "plan " SPEC " --device h200");
  tool_expect(&tool, 0);
  tool_says(&tool, out, "tokens 1..32");
  tool_run(&tool, "plan " SPEC " --device h200 --tokens 1-8,33 --quiet");
  refused(4, "for 33 tokens: rule tokens: 9 to 32 tokens");
  tool_run(&tool, "plan specs/models/deepseek-v3.1-tp8.yaml --device h200 --tokens 8,16,24 --quiet");
  refused(4, "for 24 tokens: rule memory: x and h of so many tokens and the smallest ring do not fit into shared memory (nearest legal value 16)");
}
END_TEST

/* Without running anything: winners of the cost model. */
START_TEST(each_count_has_a_family)
{
  tool_run(&tool, "tune " SPEC " --device h200 --effort quick");
  tool_expect(&tool, 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner w JOIN candidate c ON c.id=w.candidate_id WHERE w.tokens_max<=8 AND c.schedule LIKE 'stream/%'"), 8);
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner w JOIN candidate c ON c.id=w.candidate_id WHERE w.tokens_min=9 AND w.tokens_max=16 AND "
                               "c.schedule LIKE 'batch/g2-%'"), 1);
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner w JOIN candidate c ON c.id=w.candidate_id WHERE w.tokens_min=17 AND w.tokens_max=32 AND "
                               "c.schedule LIKE 'batch/g4-%'"), 1);
  ck_assert_int_eq((int)number("SELECT count(*) FROM candidate WHERE schedule LIKE 'batch/g3-%'"), 0); /* no count of the spec needs three groups */
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner w JOIN candidate c ON c.id=w.candidate_id WHERE w.default_us<=0"), 0);
}
END_TEST

START_TEST(candidates_are_checked_at_their_counts)
{
  tool_run(&tool, "tune " SPEC " --device emu --effort quick --tokens 8,9");
  tool_expect(&tool, 0);
  tool_says(&tool, out, "predicted*");
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner w JOIN candidate c ON c.id=w.candidate_id WHERE w.tokens_max=8 AND c.schedule LIKE 'stream/%'"), 1);
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner w JOIN candidate c ON c.id=w.candidate_id WHERE w.tokens_max=9 AND c.schedule LIKE 'batch/%'"), 1);
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner w WHERE NOT EXISTS(SELECT 1 FROM check_result k WHERE k.candidate_id=w.candidate_id AND k.passed)"), 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result WHERE NOT passed"), 0); /* none was given a count that it does not take */
}
END_TEST

/* The same on a GPU as far as the tuner can tell (tests/fake_gpu.c), and on to a package of both families' kernels. */
START_TEST(a_package_holds_both)
{
  setenv("MOEFORGE_LOCK_DIR", tool.folder, 1);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  shell("sed 's/^tokens:.*/tokens: [1, 8, 9]/' '%s/specs/models/tiny.yaml' >tiny.yaml && grep -q 1,.8,.9 tiny.yaml", root); /* a package serves all from 1 on */
  tool_run(&tool, "tune %s/tiny.yaml --effort quick", tool.folder);
  tool_expect(&tool, 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner WHERE NOT predicted"), 3);
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result WHERE NOT passed"), 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM sample s JOIN candidate c ON c.id=s.candidate_id WHERE (s.tokens<=8)<>(c.schedule LIKE 'stream/%')"), 0);
  ck_assert_int_gt((int)number("SELECT count(*) FROM sample s JOIN candidate c ON c.id=s.candidate_id WHERE s.tokens=9 AND c.schedule LIKE 'batch/g2-%'"), 0);
  tool_run(&tool, "export tiny -o %s/p.moeforge", tool.folder);
  tool_expect(&tool, 0);
  tool_run(&tool, "verify %s/p.moeforge", tool.folder);
  tool_expect(&tool, 0);
  ck_assert_ptr_null(strstr(tool.out, "FAILED"));
  tool_run(&tool, "show tiny");
  tool_says(&tool, out, "stream/");
  tool_says(&tool, out, "batch/g2-");
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("tune_batch");
  TCase *tc = tcase_create("all");
  SRunner *runner;
  int failed;
  tcase_add_checked_fixture(tc, begin_empty, end);
  tcase_add_test(tc, plan_counts_both_families);
  tcase_add_test(tc, each_count_has_a_family);
  tcase_add_test(tc, candidates_are_checked_at_their_counts);
  tcase_add_test(tc, a_package_holds_both);
  tcase_set_timeout(tc, 600);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? 0 : 1;
}
