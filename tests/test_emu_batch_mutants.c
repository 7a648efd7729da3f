/* test_emu_batch_mutants.c - does the emulated device find what may be wrong with the family `batch`? After test_emu_mutants.c: each row breaks the kernel in
 * one place, and the emulator or a gate has to find it under a few seeds. The rows are about what this family does in its own way: groups of tokens, stages
 * that belong to one warpgroup, a producer that is one lane, the scheduler's queue, h where x was, many ranks. With MOEFORGE_MUTANTS=text in the environment only rows
 * with the text in their names are run, under as many seeds as it takes, and what is found is printed: for writing rows. */
#include "emu_batch_fixture.h"

#define MAX_KINDS 4
#define GATE(gate) (EMU_FINDING_KINDS + (gate)) /* kinds of outcome: findings, then gates */
#define MOST_SEEDS 4

static const struct batch_row subject = {
    .name = "mutants", .sms = 17 /* one CTA has no rows of w2 */, .hidden = 1024, .intermediate = 128, .experts = 64, .top_k = 2, .token_groups = 2, .ring = 4, .overlay = 1,
    .cases = {{16, UNIFORM, 1}, {9, CONCENTRATED, 2}}};

static const struct mutant {
  const char *name, *file, *text, *instead;
  int kinds[MAX_KINDS]; /* what may be found; 0 ends */
  int seeds;
} mutants[] = {
    {"scale_of_another_token", "batch/handoff.cuh", "h_scale[group * L::kRanks + rank][block][row] =", "h_scale[group * L::kRanks + rank][block][row ^ 1] =",
     {GATE(GATE_Y_GIVEN_H), GATE(GATE_FINITE), EMU_RACE, EMU_UNINITIALISED}, 2},
    {"h_is_flagged_without_release", "batch/handoff.cuh", "hw::or_shared_release(&sm.cleared.h_done", "hw::or_shared(&sm.cleared.h_done",
     {EMU_RACE}, 2},
    {"h_is_flagged_before_all_lanes_have_written", "batch/handoff.cuh", "    hw::sync_warp(); // all lanes have written\n", "", {EMU_RACE}, 4},
    {"every_second_item_of_h_is_left_out", "batch/handoff.cuh", "hw::add_shared(&sm.cleared.h_taken[0], 1)", "hw::add_shared(&sm.cleared.h_taken[0], 2)", {EMU_DEADLOCK}, 1},
    {"a_finaliser_loads_before_it_has_published", "batch/kernel.cuh", "  if(helper < L::kReduceBuffers)\n    finalise_items(c, helper, launch);\n  if(c.cta < L::kDownCtas)\n    batch::load_h(c, helper >= L::kReduceBuffers, launch);\n",
     "  if(c.cta < L::kDownCtas)\n    batch::load_h(c, helper >= L::kReduceBuffers, launch);\n  if(helper < L::kReduceBuffers)\n    finalise_items(c, helper, launch);\n", {EMU_DEADLOCK}, 1},
    {"the_wrong_group_s_x", "batch/up.cuh", "group * (L::kKBlocks * 1024));", "(group ^ 1) * (L::kKBlocks * 1024));",
     {GATE(GATE_H), GATE(GATE_FINITE)}, 2},
    {"the_wrong_group_s_h", "batch/down.cuh", "L::h_set(g, rank)", "L::h_set(g ^ 1, rank)",
     {GATE(GATE_Y_GIVEN_H), GATE(GATE_FINITE), EMU_RACE}, 2},
    {"up_stage_freed_before_all_lanes_have_read", "batch/up.cuh", "    hw::sync_warp(); // all lanes have read it\n", "", {EMU_EARLY_OVERWRITE, EMU_RACE}, 4},
    {"down_stage_freed_before_all_lanes_have_read", "batch/down.cuh", "    hw::sync_warp(); // all lanes have read it\n", "", {EMU_EARLY_OVERWRITE, EMU_RACE}, 4},
    {"up_stage_freed_without_a_fence", "batch/up.cuh", "    hw::fence_async_proxy(); // (waits", "    // (waits", {EMU_NO_PROXY_FENCE}, 1},
    {"a_buffer_of_sums_is_not_waited_for", "batch/up.cuh", "bool free = is_free(c, item);", "bool free = true;", {EMU_RACE, EMU_BARRIER, EMU_DEADLOCK, GATE(GATE_H)}, 4},
    {"down_stage_freed_without_a_fence", "batch/down.cuh", "    hw::fence_async_proxy();\n    hw::sync_warp(); // all lanes", "    hw::sync_warp(); // all lanes", {EMU_NO_PROXY_FENCE}, 1},
    {"high_ranks_over_live_x", "batch/handoff.cuh", "    if(high)\n", "    if(high == 2)\n", {EMU_EARLY_OVERWRITE, EMU_RACE, GATE(GATE_H)}, 4},
    {"high_ranks_not_waited_for", "batch/down.cuh", "L::h_bit(g, L::kOverlay && rank >= L::kLowRanks)", "L::h_bit(g, 0)", {EMU_DEADLOCK, EMU_RACE, EMU_EARLY_OVERWRITE}, 2},
    {"another_group_s_h_is_waited_for", "batch/down.cuh", "L::h_bit(g, L::kOverlay", "L::h_bit(0, L::kOverlay", {EMU_DEADLOCK, EMU_RACE, GATE(GATE_Y_GIVEN_H), GATE(GATE_FINITE)}, 4},
    {"scale_rows_overwritten_too_soon", "batch/scheduler.cuh", "turn >= L::kScaleSlots && ", "turn > L::kScaleSlots && ", {EMU_RACE, EMU_BARRIER, EMU_DEADLOCK}, 4},
    {"a_turn_that_is_not_waited_for", "batch/producer.cuh", "if(!hw::mbarrier_wait(&c.sm.barrier.turn[entry], parity, c.dog, L::kWaitTicket))", "if(parity > 1)",
     {EMU_RACE, EMU_UNINITIALISED}, 2},
    {"one_end_mark_for_two_warpgroups", "batch/producer.cuh", "i < 2; ++i) {\n    ring.acquire", "i < 1; ++i) {\n    ring.acquire", {EMU_DEADLOCK}, 1},
    {"rank_of_another_token", "batch/layout.cuh", "c.sm.slot_at[token];", "c.sm.slot_at[token ^ 1];",
     {EMU_RACE, GATE(GATE_H), EMU_DEADLOCK, GATE(GATE_FINITE)}, 2},
};

/* Variants of the operator: what the engine has routed, a shared expert, a clamp, weights on the input. */
static const struct batch_row variant = {
    .name = "variants", .sms = 17, .hidden = 1024, .intermediate = 64, .experts = 16, .top_k = 2, .score = MF_SCORE_GIVEN, .groups = 1, .kept = 1, .count = 16,
    .shared = 1, .on_input = 1, .limit = 0.5f, .token_groups = 2, .cases = {{16, UNIFORM, 1}, {9, MISSING, 2}}};
static const struct mutant variant_mutants[] = {
    {"given_weights_are_forgotten", "batch/route.cuh", "weight[i] = s.weight(c);", "weight[i] = 1.0f;", {GATE(GATE_WEIGHT)}, 1},
    {"shared_experts_are_not_listed", "batch/route.cuh", "if(stream::is_shared(c) || (picked && stream::is_local<L>(e)))", "if(picked && stream::is_local<L>(e))",
     {GATE(GATE_FINITE), EMU_RACE, EMU_UNINITIALISED, EMU_DEADLOCK}, 1},
    {"the_input_s_weight_of_the_other_token", "batch/handoff.cuh", "batch::input_weight(c, slot, first + 1)", "batch::input_weight(c, slot, first)", {GATE(GATE_H)}, 1},
    {"weights_on_the_input_count_again", "batch/handoff.cuh", "L::Shape::kWeightOnInput ? 1.0f : c.sm", "c.sm", {GATE(GATE_Y_GIVEN_H)}, 1},
    {"h_rows_without_the_shared_expert_s", "batch/handoff.cuh", "(token * L::kRanks + rank_at(", "(token * L::kTopK + rank_at(", {EMU_DEADLOCK, EMU_RACE, GATE(GATE_H)}, 1},
};
/* More than eight ranks: other tables of slots and ranks, h sets over the partial sums. */
static const struct batch_row many = {
    .name = "many ranks", .sms = 17, .hidden = 1024, .intermediate = 48, .offset = 96, .experts = 16, .top_k = 9, .groups = 1, .kept = 1, .count = 16, .shared = 1,
    .token_groups = 2, .ring = 4, .overlay = 1, .cases = {{16, CONCENTRATED, 1}}};
static const struct mutant many_mutants[] = {
    {"ranks_of_the_second_group_where_bytes_would_have_them", "batch/layout.cuh", "(token & ~7) * (L::kPassBits / 8) + rank", "(token & ~7) + rank",
     {GATE(GATE_Y_GIVEN_H), GATE(GATE_FINITE), EMU_RACE, EMU_DEADLOCK}, 1},
    {"ranks_from_eight_on_are_not_found", "batch/layout.cuh", "first < L::kRankSlots; first += kInTwo", "first < kInTwo; first += kInTwo",
     {GATE(GATE_H), EMU_DEADLOCK, EMU_RACE, GATE(GATE_FINITE)}, 1},
    {"ranks_from_eight_on_are_not_multiplied", "batch/layout.cuh", "0xFFFFFFFFu >> (32 - L::kPassBits)", "255u", {GATE(GATE_Y_GIVEN_H)}, 1},
    {"high_ranks_over_partial_sums_in_use", "batch/up.cuh", "    batch::hand_over(c, item, false, consumer, L::kEndOfUnits, nothing);\n  if(L::kOverSums && c.lane == 0)\n    hw::mbarrier_arrive(&sm.barrier.x_free);",
     "  {\n    if(L::kOverSums && c.lane == 0 && item + L::kReduceBuffers == end)\n      hw::mbarrier_arrive(&sm.barrier.x_free);\n    batch::hand_over(c, item, false, consumer, L::kEndOfUnits, nothing);\n  }",
     {EMU_RACE, EMU_EARLY_OVERWRITE, GATE(GATE_H)}, 2},
    {"y_s_sums_over_h_in_use", "batch/down.cuh", "    hw::barrier_sync(L::kBarrierOutput, L::kConsumerThreads); // h sets lie there: all consumers are through with them\n", "    hw::sync_warp();\n",
     {EMU_RACE, EMU_EARLY_OVERWRITE, GATE(GATE_Y_GIVEN_H)}, 2},
};
/* 24 rows of w2 per CTA, fewer in the last: two warps of a warpgroup share the three k-blocks of a down stage. */
static const struct batch_row split = {
    .name = "split", .sms = 43, .hidden = 1024, .intermediate = 272, .offset = 96, .experts = 16, .top_k = 1, .token_groups = 2, .cases = {{13, ZIPF, 1}}};
static const struct mutant split_mutants[] = {
    {"sums_of_the_second_pair_are_forgotten", "batch/down.cuh", "for(int w = 0; w < 8; w += L::kRowTiles)", "for(int w = 0; w < 8; w += 4)", {GATE(GATE_Y_GIVEN_H)}, 1},
    {"both_pairs_have_the_first_k_block", "batch/down.cuh", "block0 = consumer % L::kSetWarps / L::kRowTiles;", "block0 = 0;", {GATE(GATE_Y_GIVEN_H)}, 1},
    {"both_pairs_have_a_tile_each", "batch/down.cuh", "first_row = 16 * (consumer % L::kRowTiles);\n    block0", "first_row = 16 * (consumer % L::kSetWarps / L::kRowTiles);\n    block0", {GATE(GATE_Y_GIVEN_H)}, 1},
    {"a_k_block_behind_the_last_is_multiplied", "batch/down.cuh", "block0 + L::kSharers < L::kDownKBlocks && ", "", {GATE(GATE_Y_GIVEN_H), GATE(GATE_FINITE), EMU_RACE, EMU_UNINITIALISED}, 2},
};
/* 24 rows of w2 per CTA: three k-blocks, and two stages of the ring, in a down stage, four of which there are; the fourth lies where x was, behind h of the higher rank. */
static const struct batch_row places = {
    .name = "places", .sms = 48, .hidden = 1152, .intermediate = 384, .experts = 16, .top_k = 2, .token_groups = 3, .ring = 6, .overlay = 1, .cases = {{20, UNIFORM, 1}}};
static const struct mutant places_mutants[] = {
    {"a_down_stage_over_live_x", "batch/producer.cuh", "} else if(number == L::kInRing) {", "} else if(number == L::kDownRing) {", {EMU_EARLY_OVERWRITE, EMU_RACE, GATE(GATE_H)}, 2},
    {"a_down_place_is_used_again_too_soon", "batch/producer.cuh", "} else if(number >= L::kDownRing) {", "} else if(number > L::kDownRing) {", {EMU_EARLY_OVERWRITE, EMU_RACE}, 2},
    {"the_down_phase_begins_at_the_ring_s_first_stage", "batch/down_ring.cuh", "begin(next_stage / L::kDownParts)", "begin(next_stage * 0)", {EMU_EARLY_OVERWRITE, EMU_RACE, GATE(GATE_H)}, 2},
    {"half_of_a_down_stage_is_not_waited_for", "batch/producer.cuh", "        ring.acquire(L::kRingStages);\n        ring.advance();", "        if(i == 0)\n          ring.acquire(L::kRingStages);\n        ring.advance();",
     {EMU_EARLY_OVERWRITE, EMU_RACE}, 4},
    {"a_down_stage_over_the_higher_ranks_h", "batch/layout.cuh", "kXPlaces = kXOffset + kHighBytes;", "kXPlaces = kXOffset;", {EMU_EARLY_OVERWRITE, EMU_RACE, GATE(GATE_Y_GIVEN_H), GATE(GATE_FINITE)}, 2},
    {"the_second_k_block_has_the_first_one_s_scale", "batch/down.cuh", "[scales.low][first + j * L::kSharers]", "[scales.low][first]", {GATE(GATE_Y_GIVEN_H)}, 1},
    {"the_second_k_block_has_the_first_one_s_h", "batch/down.cuh", "const int block = first + j * L::kSharers;", "const int block = first;", {GATE(GATE_Y_GIVEN_H)}, 1},
};
/* 32 rows of w2 per CTA in two tiles: four sets of two warps, each of which has three k-blocks of a down stage; more stages than places. */
static const struct batch_row sets = {
    .name = "sets", .sms = 32, .hidden = 1024, .intermediate = 384, .experts = 16, .top_k = 2, .token_groups = 2, .ring = 16, .cases = {{16, UNIFORM, 1}}};
static const struct mutant sets_mutants[] = {
    {"a_set_goes_on_to_another_one_s_stage", "batch/down.cuh", "ring.advance(L::kSets);", "ring.advance(2);", {GATE(GATE_Y_GIVEN_H), EMU_EARLY_OVERWRITE, EMU_DEADLOCK, EMU_RACE}, 2},
    {"a_down_stage_is_free_as_soon_as_one_warp_has_read_it", "batch/producer.cuh", "hw::mbarrier_init(&b.down_empty[i], L::kSetWarps);", "hw::mbarrier_init(&b.down_empty[i], 1);",
     {EMU_EARLY_OVERWRITE, EMU_RACE, EMU_BARRIER, EMU_NO_PROXY_FENCE}, 4},
    {"the_third_k_block_has_the_first_one_s_rows", "batch/down.cuh", "c, next.rows + 2, h_base", "c, next.rows, h_base", {GATE(GATE_Y_GIVEN_H)}, 1},
    {"the_third_k_block_has_the_second_one_s_h", "batch/down.cuh", "first + 2 * L::kSharers, scales", "first + L::kSharers, scales", {GATE(GATE_Y_GIVEN_H)}, 1},
};
#define SETS_MUTANTS ((int)(sizeof(sets_mutants) / sizeof(sets_mutants[0])))
#define PLACES_MUTANTS ((int)(sizeof(places_mutants) / sizeof(places_mutants[0])))
#define SPLIT_MUTANTS ((int)(sizeof(split_mutants) / sizeof(split_mutants[0])))
#define MANY_MUTANTS ((int)(sizeof(many_mutants) / sizeof(many_mutants[0])))
#define VARIANT_MUTANTS ((int)(sizeof(variant_mutants) / sizeof(variant_mutants[0])))
#define MUTANTS ((int)(sizeof(mutants) / sizeof(mutants[0])))

static const char *kind_name(int kind)
{
  return kind < EMU_FINDING_KINDS ? emu_finding_name((enum emu_finding_kind)kind) : gate_name((enum gate)(kind - EMU_FINDING_KINDS));
}

/* A copy of the templates in which the text, which must occur once, is replaced. */
static void mutate(const struct mutant *mutant, char *folder, size_t space)
{
  static char before[1 << 17];
  char path[400];
  const char *hit;
  size_t bytes;
  FILE *f;
  snprintf(folder, space, "%.200s/%s", emu_folder, mutant->name);
  snprintf(path, sizeof(path), "%s/%s", folder, mutant->file);
  emu_shell("cp -r templates '%s'", folder);
  f = fopen(path, "rb");
  ck_assert_msg(f != NULL, "%s", path);
  bytes = fread(before, 1, sizeof(before) - 1, f);
  ck_assert_uint_lt(bytes, sizeof(before) - 1);
  fclose(f);
  before[bytes] = '\0';
  hit = strstr(before, mutant->text);
  ck_assert_msg(hit != NULL && strstr(hit + 1, mutant->text) == NULL, "%s: the text to be changed does not occur once in %s: bring the table in step",
                mutant->name, mutant->file);
  f = fopen(path, "wb");
  ck_assert_ptr_nonnull(f);
  ck_assert_int_ge(fprintf(f, "%.*s%s%s", (int)(hit - before), before, mutant->instead, hit + strlen(mutant->text)), 0);
  ck_assert_int_eq(fclose(f), 0);
}

static bool expected(const struct mutant *mutant, int kind)
{
  for(int i = 0; i < MAX_KINDS && mutant->kinds[i] != 0; i++)
    if(mutant->kinds[i] == kind)
      return true;
  return false;
}

/* The i-th mutant of all tables; returns what it is a mutant of. */
static const struct batch_row *mutant_of(int i, const struct mutant **mutant)
{
  if(i < MUTANTS) {
    *mutant = &mutants[i];
    return &subject;
  }
  i -= MUTANTS;
  if(i < VARIANT_MUTANTS) {
    *mutant = &variant_mutants[i];
    return &variant;
  }
  i -= VARIANT_MUTANTS;
  if(i < MANY_MUTANTS) {
    *mutant = &many_mutants[i];
    return &many;
  }
  i -= MANY_MUTANTS;
  if(i < SPLIT_MUTANTS) {
    *mutant = &split_mutants[i];
    return &split;
  }
  i -= SPLIT_MUTANTS;
  *mutant = i < PLACES_MUTANTS ? &places_mutants[i] : &sets_mutants[i - PLACES_MUTANTS];
  return i < PLACES_MUTANTS ? &places : &sets;
}

START_TEST(a_mutant_is_found)
{
  const struct mutant *mutant;
  const struct batch_row *row = mutant_of(_i, &mutant);
  const char *only = getenv("MOEFORGE_MUTANTS");
  const int most = only != NULL ? 3 * MOST_SEEDS : mutant->seeds;
  struct emu_subject s;
  struct emu_outcome o = {.passed = true};
  char folder[300];
  int tried = 0, kind;
  if(only != NULL && strstr(mutant->name, only) == NULL)
    return;
  ck_assert_int_le(mutant->seeds, MOST_SEEDS);
  emu_compile_fast();
  mutate(mutant, folder, sizeof(folder));
  batch_open(&s, row, folder);
  for(; o.passed && tried < most; tried++)
    emu_run(&s, 1.0f, row->cases, batch_ncases(row), 2, (uint64_t)(1 + tried), &o);
  kind = o.finding != EMU_NONE ? (int)o.finding : GATE((int)o.gate);
  if(only != NULL)
    printf("%s: under %d seeds (of %d), %s: %.300s\n", mutant->name, tried, mutant->seeds, o.passed ? "nothing" : kind_name(kind), o.text);
  ck_assert_msg(!o.passed, "%s was not found under %d seeds", mutant->name, tried);
  ck_assert_msg(expected(mutant, kind), "%s: found as %s, which is not expected: %s", mutant->name, kind_name(kind), o.text);
  emu_close(&s);
}
END_TEST

START_TEST(the_kernel_is_clean)
{
  static const struct batch_row *const clean[] = {&subject, &variant, &many, &split, &places, &sets};
  const struct batch_row *row = clean[_i];
  struct emu_subject s;
  emu_compile_fast();
  batch_open(&s, row, "templates");
  for(int seed = 1; seed <= (row == &many || row == &split || row == &sets ? 2 : MOST_SEEDS); seed++) { /* as many as mutants are given */
    struct emu_outcome o;
    emu_run(&s, 1.0f, row->cases, batch_ncases(row), 2, (uint64_t)seed, &o);
    ck_assert_msg(o.passed, "seed %d: %s", seed, o.text);
  }
  emu_close(&s);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_batch_mutants");
  TCase *found = tcase_create("mutants"), *passes = tcase_create("kernel");
  SRunner *runner;
  int failed;
  if(!emu_folder_make())
    return EXIT_FAILURE;
  tcase_add_loop_test(found, a_mutant_is_found, 0, MUTANTS + VARIANT_MUTANTS + MANY_MUTANTS + SPLIT_MUTANTS + PLACES_MUTANTS + SETS_MUTANTS);
  tcase_add_loop_test(passes, the_kernel_is_clean, 0, 6);
  tcase_set_timeout(found, 240);
  tcase_set_timeout(passes, 240);
  suite_add_tcase(suite, found);
  suite_add_tcase(suite, passes);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_ENV);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  emu_folder_remove();
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
