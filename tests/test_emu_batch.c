/* test_emu_batch.c - the kernel family `batch` on the emulated device: launches of 9 to 32 tokens under every kind of routing, of other token counts one
 * after the other on one workspace, judged by the staged gates (tuner/check.c): routing exactly, h to the last bits against the reference, y given the
 * kernel's own h likewise. Rows cover each number of token groups, h over x and beside it, rings that come round soon, every kind of remainder that N, K
 * and the rows of w2 can have, up to 22 experts per token, and the router's policies. Races, missing fences and deadlocks are findings of the emulator.
 * MOEFORGE_EMU_BATCH=N in the environment runs N times as many seeds, all cases of all rows, and says when a row is through. */
#include "emu_batch_fixture.h"

#define REPLAYS 2

static const struct batch_row rows[] = {
    {.name = "two groups, CTAs without rows of w2, a down stage where x was", .sms = 17, .hidden = 1024, .intermediate = 256, .experts = 64, .top_k = 2, .token_groups = 2, .ring = 6,
     .seeds = 1, .cases = {{9, UNIFORM, 1}, {16, DISPERSED, 2}, {12, CONCENTRATED, 3}, {16, TIES, 4}}},
    {.name = "four groups, h over x, all units static", .sms = 16, .hidden = 1024, .intermediate = 128, .experts = 128, .top_k = 4, .token_groups = 4,
     .ring = 6, .overlay = 1, .static_rounds = 1000, .seeds = 1, .cases = {{32, UNIFORM, 1}, {25, CONCENTRATED, 2}, {17, DISPERSED, 3}}},
    {.name = "three groups, K and N with remainders", .sms = 18, .hidden = 1152, .intermediate = 80, .offset = 80, .experts = 16, .top_k = 3, .token_groups = 3,
     .overlay = 1, .seeds = 1, .cases = {{24, UNIFORM, 1}, {17, ZIPF, 2}}},
    {.name = "16 rows, six blocks in a down stage, one of them where x was", .sms = 64, .hidden = 1024, .intermediate = 704, .offset = 64, .experts = 16, .top_k = 1, .token_groups = 2,
     .ring = 6, .seeds = 1, .cases = {{16, ZIPF, 1}}},
    {.name = "24 rows, three blocks in a down stage, fewer rows in the last CTA", .sms = 43, .hidden = 1024, .intermediate = 272, .offset = 96, .experts = 16, .top_k = 2,
     .token_groups = 2, .overlay = 1, .seeds = 1, .cases = {{13, ZIPF, 1}, {16, UNIFORM, 2}}},
    {.name = "32 rows, four blocks in a down stage, ten ranks, h over x and the partial sums", .sms = 32, .hidden = 1024, .intermediate = 400, .offset = 112, .experts = 16, .top_k = 10,
     .token_groups = 2, .ring = 4, .overlay = 1, .seeds = 1, .cases = {{9, CONCENTRATED, 1}, {16, ZIPF, 2}}},
    {.name = "16 rows, two blocks for each warp, four sets of two warps", .sms = 64, .hidden = 1024, .intermediate = 512, .experts = 16, .top_k = 1, .token_groups = 4, .ring = 8,
     .seeds = 1, .cases = {{32, UNIFORM, 1}}},
    {.name = "16 rows, eight sets of one warp", .sms = 64, .hidden = 1024, .intermediate = 224, .offset = 32, .experts = 32, .top_k = 1, .token_groups = 2, .ring = 16, .seeds = 1,
     .cases = {{16, UNIFORM, 1}}},
    {.name = "groups, bias, f32, another rank's experts", .sms = 16, .hidden = 1024, .intermediate = 64, .experts = 128, .top_k = 8,
     .score = MF_SCORE_SIGMOID, .bias = 1, .f32 = 1, .groups = 4, .kept = 2, .begin = 64, .count = 64, .token_groups = 3, .seeds = 1,
     .cases = {{24, UNIFORM, 1}, {20, TIES, 2}}},
    {.name = "probabilities, zero experts", .sms = 16, .hidden = 1024, .intermediate = 64, .experts = 64, .top_k = 5, .score = MF_SCORE_SOFTMAX, .bias = 1,
     .groups = 1, .kept = 1, .count = 64, .zero = 32, .token_groups = 2, .seeds = 1, .cases = {{16, UNIFORM, 1}, {11, TIES, 2}}},
    {.name = "every slot number, each chosen once", .sms = 16, .hidden = 1024, .intermediate = 16, .experts = 256, .top_k = 8, .token_groups = 4, .overlay = 1,
     .seeds = 1, .cases = {{32, DISPERSED, 1}, {31, DISPERSED, 2}}},
    {.name = "a rank of two experts that hardly anybody chooses", .sms = 17, .hidden = 1024, .intermediate = 64, .experts = 128, .top_k = 2, .groups = 1, .kept = 1,
     .begin = 126, .count = 2, .token_groups = 2, .seeds = 1, .cases = {{9, CONCENTRATED, 1}, {16, UNIFORM, 2}, {10, CONCENTRATED, 3}}},
    {.name = "given, two gated shared experts", .sms = 16, .hidden = 1024, .intermediate = 64, .experts = 16, .top_k = 4, .score = MF_SCORE_GIVEN, .f32 = 1,
     .groups = 1, .kept = 1, .count = 16, .shared = 2 + MF_SHARED_GATED, .token_groups = 4, .overlay = 1, .seeds = 1, .cases = {{26, MISSING, 2}, {32, UNIFORM, 1}}},
    {.name = "given, another rank's experts, zero experts", .sms = 16, .hidden = 1024, .intermediate = 48, .experts = 300, .top_k = 8,
     .score = MF_SCORE_GIVEN, .groups = 1, .kept = 1, .begin = 290, .count = 10, .zero = 20, .token_groups = 2, .seeds = 1, .cases = {{16, ZIPF, 1}, {9, MISSING, 2}, {13, TIES, 3}}},
    {.name = "weights on the input, limit, alpha, a shared expert", .sms = 17, .hidden = 1024, .intermediate = 80, .offset = 80, .experts = 16, .top_k = 3, .score = MF_SCORE_SIGMOID, .groups = 1,
     .kept = 1, .count = 16, .shared = 1, .on_input = 1, .limit = 0.5f, .alpha = 1.702f, .token_groups = 3, .overlay = 1, .seeds = 1, .cases = {{24, UNIFORM, 1}, {17, MISSING, 2}}},
    {.name = "ten ranks, h over x and the partial sums, remainders", .sms = 18, .hidden = 1152, .intermediate = 80, .offset = 80, .experts = 16, .top_k = 10,
     .token_groups = 2, .ring = 4, .overlay = 1, .seeds = 1, .cases = {{16, UNIFORM, 1}, {9, ZIPF, 2}, {13, CONCENTRATED, 3}}},
    {.name = "twenty-two ranks, slots' numbers of two bytes, another rank's experts, gated shared ones", .sms = 16, .hidden = 1024, .intermediate = 16, .offset = 112,
     .experts = 512, .top_k = 20, .score = MF_SCORE_SIGMOID, .bias = 1, .f32 = 1, .groups = 4, .kept = 3, .begin = 256, .count = 256, .shared = 2 + MF_SHARED_GATED,
     .token_groups = 2, .overlay = 1, .seeds = 1, .cases = {{9, ZIPF, 1}, {16, TIES, 2}}},
    {.name = "gated shared expert, eight ranks", .sms = 16, .hidden = 1024, .intermediate = 64, .experts = 32, .top_k = 7, .shared = 1 + MF_SHARED_GATED, .token_groups = 3,
     .overlay = 1, .seeds = 1, .cases = {{19, ZIPF, 1}}},
    {.name = "two shared experts, another rank's routed ones", .sms = 17, .hidden = 1024, .intermediate = 32, .experts = 64, .top_k = 4, .score = MF_SCORE_SIGMOID,
     .bias = 1, .groups = 1, .kept = 1, .begin = 32, .count = 32, .shared = 2, .token_groups = 2, .seeds = 1, .cases = {{10, TIES, 2}, {16, UNIFORM, 1}}},
    {.name = "limit, SiLU", .sms = 16, .hidden = 1024, .intermediate = 32, .experts = 16, .top_k = 2, .limit = 1.0f, .token_groups = 2, .seeds = 1,
     .cases = {{16, ZIPF, 1}}},
    {.name = "more than 256 slots", .sms = 16, .hidden = 1024, .intermediate = 16, .experts = 320, .top_k = 9, .token_groups = 4, .overlay = 1, .seeds = 1,
     .cases = {{29, DISPERSED, 1}, {26, UNIFORM, 2}}},
    {.name = "given, twenty-two ranks beside x, another rank's experts, zero experts", .sms = 17, .hidden = 1024, .intermediate = 16, .experts = 40, .top_k = 22,
     .score = MF_SCORE_GIVEN, .groups = 1, .kept = 1, .begin = 20, .count = 20, .zero = 8, .token_groups = 4, .overlay = -1, .seeds = 1,
     .cases = {{26, MISSING, 1}, {32, UNIFORM, 2}}},
    {.name = "32 rows, three blocks of a down stage for each warp, four sets of two warps", .sms = 32, .hidden = 1024, .intermediate = 384, .experts = 16, .top_k = 2, .token_groups = 2,
     .ring = 16, .seeds = 1, .cases = {{16, UNIFORM, 1}}},
    {.name = "24 rows, pieces of four blocks and three", .sms = 43, .hidden = 1024, .intermediate = 864, .offset = 32, .experts = 16, .top_k = 1, .token_groups = 2,
     .ring = 4, .seeds = 1, .cases = {{9, CONCENTRATED, 1}}},
    {.name = "24 rows, pieces of two blocks and one", .sms = 43, .hidden = 1024, .intermediate = 608, .offset = 32, .experts = 16, .top_k = 1, .token_groups = 2,
     .seeds = 1, .cases = {{9, CONCENTRATED, 1}}},
    {.name = "24 rows, four blocks in a down stage", .sms = 48, .hidden = 1152, .intermediate = 352, .offset = 96, .experts = 16, .top_k = 1, .token_groups = 2,
     .seeds = 1, .cases = {{13, ZIPF, 1}}},
    {.name = "32 rows, one block per stage", .sms = 32, .hidden = 1024, .intermediate = 64, .experts = 16, .top_k = 2, .token_groups = 4, .seeds = 1,
     .cases = {{30, UNIFORM, 1}}},
    {.name = "32 rows, three blocks in a down stage", .sms = 36, .hidden = 1152, .intermediate = 384, .experts = 16, .top_k = 2, .token_groups = 3, .overlay = 1, .seeds = 1,
     .cases = {{24, ZIPF, 1}}},
    {.name = "8 rows, two blocks in a down stage", .sms = 128, .hidden = 1024, .intermediate = 208, .offset = 32, .experts = 16, .top_k = 1, .token_groups = 2, .seeds = 1,
     .cases = {{11, ZIPF, 1}}},
    {.name = "nine ranks, slabs", .sms = 64, .hidden = 1024, .intermediate = 48, .offset = 96, .experts = 16, .top_k = 8, .groups = 1, .kept = 1, .count = 16, .shared = 1,
     .token_groups = 2, .ring = 4, .overlay = 1, .seeds = 1, .cases = {{9, CONCENTRATED, 1}}},
    {.name = "ten ranks, weights on the input, limit, alpha", .sms = 17, .hidden = 1024, .intermediate = 80, .offset = 80, .experts = 16, .top_k = 9,
     .score = MF_SCORE_SIGMOID, .groups = 1, .kept = 1, .count = 16, .shared = 1, .on_input = 1, .limit = 0.5f, .alpha = 1.702f, .token_groups = 3, .overlay = 1, .seeds = 1,
     .cases = {{24, UNIFORM, 1}, {17, MISSING, 2}}},
};
#define ROWS ((int)(sizeof(rows) / sizeof(rows[0])))
#define ROWS_BY_DEFAULT 17 /* the others are combinations of what these have, or also in test_emu_batch_mutants.c: only with the variable set */

START_TEST(launches_are_right)
{
  const struct batch_row *row = &rows[_i];
  const char *times = getenv("MOEFORGE_EMU_BATCH");
  const int seeds = row->seeds * (times != NULL && atoi(times) > 0 ? atoi(times) : 1);
  const int cases = times == NULL && _i > 1 ? 1 : batch_ncases(row); /* by default the later rows are there for their kernels: one case, replayed */
  struct emu_subject s;
  batch_open(&s, row, "templates");
  for(int seed = 1; seed <= seeds; seed++) {
    struct emu_outcome o;
    emu_run(&s, 1.0f, row->cases, cases, REPLAYS, (uint64_t)(100 * _i + seed), &o);
    ck_assert_msg(o.passed, "%s, seed %d: %s", row->name, seed, o.text);
  }
  emu_close(&s);
  if(times != NULL)
    fprintf(stderr, "%s: %d seeds\n", row->name, seeds);
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
  tcase_add_loop_test(runs, launches_are_right, 0, getenv("MOEFORGE_EMU_BATCH") != NULL ? ROWS : ROWS_BY_DEFAULT);
  tcase_set_timeout(runs, 600);
  suite_add_tcase(suite, runs);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_ENV);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  emu_folder_remove();
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
