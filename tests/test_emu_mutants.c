/* test_emu_mutants.c - does the emulated device find what it is there to find? Each row of the table breaks the kernel in one place, as people do: a
 * fence forgotten, a phase miscounted, a row mixed up. The templates are copied, changed in that place, compiled and run under the seeds 1, 2, ...
 * until something is found: within the row's number of seeds, of a kind that the row expects, and reported at a place that is to do with it. And the
 * kernel as it is must pass many more seeds.
 *
 * Rows are independent processes (libcheck forks), so the runner names the row that failed. "seeds" is about three times what it took when the row
 * was written; a row that needs more says that the emulator has become blind in one eye. With MOEFORGE_MUTANTS="N text" in the environment the seeds
 * begin at N, there is no limit but 3 * MOST_SEEDS of them, what was found is printed, and only rows with the text in their names are run: for
 * writing rows. */
#include "emu_fixture.h"

#define MAX_KINDS 5
#define MAX_CASES 3
#define GATE(gate) (EMU_FINDING_KINDS + (gate)) /* kinds of outcome: findings, then gates */
#define MOST_SEEDS 6

static const struct test_case three = {3, ROUTING_UNIFORM, CASE_NORMAL, 1}, two = {2, ROUTING_UNIFORM, CASE_NORMAL, 2},
                              one = {1, ROUTING_ZIPF, CASE_NORMAL, 3},
                              eight = {8, ROUTING_UNIFORM, CASE_NORMAL, 4}, odd = {2, ROUTING_ZIPF, CASE_NORMAL, 5} /* three experts */,
                              same = {8, ROUTING_CONCENTRATED, CASE_NORMAL, 5};

/* Shapes that the rows use; all have softmax over 64 experts, two per token. */
enum shape { PLAIN, SLABS, STRADDLE, HELP, EARLY, DENSE, UNEVEN, HALVES, SHAPES };
static const struct {
  int sms, hidden, intermediate, hand_off, pdl, unit;
} shapes[SHAPES] = {
    [PLAIN] = {18, 1024, 256, 0, 0, 8},    /* 64 rows of w2 per CTA */
    [SLABS] = {64, 1024, 256, 0, 0, 8},    /* 16, two slots per stage */
    [STRADDLE] = {66, 3072, 256, 0, 0, 8}, /* 48, which straddle scale blocks */
    [HELP] = {18, 1024, 256, 1, 0, 8},     /* as the first, and consumers load h */
    [EARLY] = {18, 1024, 256, 0, 1, 8},    /* as the first, as a dependent launch */
    [DENSE] = {43, 1024, 512, 0, 0, 8},    /* 24, which straddle scale blocks: four k-blocks in two tiles */
    [UNEVEN] = {26, 1024, 608, 0, 0, 8},   /* 40 likewise: pieces of three k-blocks and two, copied one by one */
    [HALVES] = {18, 1152, 256, 0, 0, 4},   /* 64, and units of 4 features, whose second k-block exists for one half of a warp's rows at most */
};

static const struct mutant {
  const char *name, *file, *text, *instead;
  int count;            /* times that the text occurs, and is replaced */
  int kinds[MAX_KINDS]; /* what may be found; 0 ends */
  const char *where;    /* parts of the names of files one of which a finding names */
  const struct test_case *cases[MAX_CASES]; /* run one after the other on one workspace, each twice */
  int seeds;
  enum shape shape;
} mutants[] = {
    {"x_without_proxy_fence", "stream/quantise.cuh", "    hw::fence_async_proxy();\n", "",
     1, {EMU_NO_PROXY_FENCE}, "quantise.cuh up.cuh", {&three}, 3, PLAIN},
    {"h_without_proxy_fence", "stream/handoff.cuh", "    hw::fence_async_proxy();\n", "",
     1, {EMU_NO_PROXY_FENCE}, "handoff.cuh down.cuh", {&three}, 3, PLAIN},
    {"no_sync_before_handing_over", "stream/up.cuh",
     "  hw::sync_warp();\n"
     "  if(c.lane == 0)\n"
     "    hw::mbarrier_arrive(&sm.barrier.reduce_full[buffer]);\n",
     "  if(c.lane == 0)\n"
     "    hw::mbarrier_arrive(&sm.barrier.reduce_full[buffer]);\n",
     1, {EMU_RACE}, "up.cuh handoff.cuh", {&three}, 3, PLAIN},
    {"arrival_before_the_sync", "stream/up.cuh",
     "  hw::sync_warp();\n"
     "  if(c.lane == 0)\n"
     "    hw::mbarrier_arrive(&sm.barrier.reduce_full[buffer]);\n",
     "  if(c.lane == 0)\n"
     "    hw::mbarrier_arrive(&sm.barrier.reduce_full[buffer]);\n"
     "  hw::sync_warp();\n",
     1, {EMU_RACE}, "up.cuh handoff.cuh", {&three}, 3, PLAIN},
    {"no_sync_before_h_is_loaded", "stream/handoff.cuh", "    hw::fence_async_proxy();\n    hw::sync_warp();\n", "    hw::fence_async_proxy();\n",
     1, {EMU_RACE, EMU_NO_PROXY_FENCE}, "handoff.cuh down.cuh", {&three}, 3, PLAIN},
    {"one_warp_frees_no_stage", "stream/up.cuh",
     "      if(c.lane == 0)\n"
     "        hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);\n",
     "      if(c.lane == 0 && consumer != 7)\n"
     "        hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);\n",
     1, {EMU_DEADLOCK}, "producer.cuh", {&three}, 3, PLAIN},
    {"seven_arrivals_free_a_stage", "stream/producer.cuh", "hw::mbarrier_init(&sm.barrier.empty[i], 8);", "hw::mbarrier_init(&sm.barrier.empty[i], 7);",
     1, {EMU_EARLY_OVERWRITE, EMU_BARRIER, EMU_RACE}, "producer.cuh up.cuh", {&three}, 3, PLAIN},
    {"wrong_parity_of_free_stages", "stream/producer.cuh", "uint32_t empty_parity = 1;", "uint32_t empty_parity = 0;",
     1, {EMU_EARLY_OVERWRITE, EMU_DEADLOCK, EMU_RACE}, "producer.cuh up.cuh", {&three}, 3, PLAIN},
    {"wrong_phase_of_partial_sums", "stream/handoff.cuh",
     "hw::mbarrier_wait(&sm.barrier.reduce_full[b], n & 1,",
     "hw::mbarrier_wait(&sm.barrier.reduce_full[b], (n + 1) & 1,",
     1, {EMU_RACE, EMU_UNINITIALISED}, "handoff.cuh up.cuh", {&three}, 3, PLAIN},
    {"next_ring_slot", "stream/up.cuh",
     "hw::advance_descriptor(tile0, ring.stage * L::kStageBytes)",
     "hw::advance_descriptor(tile0, (ring.stage + 1) % L::kRingStages * L::kStageBytes)",
     1, {EMU_RACE, EMU_EARLY_OVERWRITE, GATE(GATE_FINITE), GATE(GATE_H)}, "up.cuh producer.cuh", {&three}, 3, PLAIN},
    {"stage_freed_before_the_products_end", "stream/up.cuh",
     "      hw::wgmma_wait();\n"
     "      hw::keep_accumulators(d);\n"
     "      if(c.lane == 0)\n"
     "        hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);\n",
     "      if(c.lane == 0)\n"
     "        hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);\n"
     "      hw::wgmma_wait();\n"
     "      hw::keep_accumulators(d);\n",
     1, {EMU_EARLY_OVERWRITE}, "up.cuh producer.cuh", {&three}, 3, PLAIN},
    {"up_without_wgmma_wait", "stream/up.cuh", "      hw::wgmma_wait();\n", "", 1, {EMU_WGMMA}, "up.cuh", {&three}, 3, PLAIN},
    {"down_without_wgmma_wait", "stream/down.cuh", "    hw::wgmma_wait();\n", "", 1, {EMU_WGMMA}, "down.cuh", {&three}, 3, PLAIN},
    {"down_without_wgmma_fence", "stream/down.cuh", "    hw::wgmma_fence();\n", "", 1, {EMU_WGMMA}, "down.cuh", {&three}, 3, PLAIN},
    {"ticket_counter_not_reset", "stream/handoff.cuh",
     "    if(c.cta == 0)\n"
     "      *(uint32_t *)c.workspace(MF_STREAM_WS_TICKETS + other * MF_STREAM_WS_TICKET_STRIDE) = 0;\n",
     "",
     1, {EMU_DEADLOCK}, "handoff.cuh", {&three, &two}, 3, PLAIN},
    {"h_not_cleared_for_the_next_launch", "stream/handoff.cuh", "    h[i] = hw::U32x4{0, 0, 0, 0};\n", "    (void)h;\n",
     1, {GATE(GATE_Y_GIVEN_H), GATE(GATE_REPLAY)}, "", {&three, &two}, 3, PLAIN},
    {"launches_not_counted", "stream/handoff.cuh", "[c.cta] = launch + 1;", "[c.cta] = launch;",
     1, {GATE(GATE_GUARD), EMU_DEADLOCK}, "handoff.cuh", {&three}, 3, PLAIN},
    {"wrong_swizzle", "stream/quantise.cuh", "(((piece >> 1) ^ row) << 4)", "(((piece >> 1) ^ (row >> 1)) << 4)",
     1, {GATE(GATE_H)}, "", {&three}, 3, PLAIN},
    {"gate_scale_for_up_rows", "stream/up.cuh", "w_scale[k * L::kStageKBlocks + L::kKBlocks]", "w_scale[k * L::kStageKBlocks]",
     1, {GATE(GATE_H)}, "", {&three}, 3, PLAIN},
    {"scale_of_the_other_rows", "stream/down.cuh", "high_block = smaller((first_row + 16 * w4 + 8) / 128 - first, 1);", "high_block = 0;",
     1, {GATE(GATE_Y_GIVEN_H)}, "", {&one}, 3, STRADDLE},
    {"tokens_change_places", "stream/down.cuh", "(size_t)column * c.p.out_pitch", "(size_t)(column ^ 1) * c.p.out_pitch",
     1, {GATE(GATE_Y_GIVEN_H)}, "", {&two}, 3, PLAIN},
    {"h_of_another_token", "stream/handoff.cuh", "(h + (size_t)(token * L::kRanks + sm", "(h + (size_t)((token ^ 1) * L::kRanks + sm",
     1, {GATE(GATE_H), EMU_DEADLOCK}, "handoff.cuh", {&same}, 3, PLAIN},
    {"no_wait_for_predecessors", "stream/kernel.cuh", "    hw::sync_cta();\n    hw::wait_for_predecessors();\n", "    hw::sync_cta();\n",
     1, {EMU_RACE}, "route_packed.cuh kernel.cuh quantise.cuh", {&three}, 1, EARLY},
    {"only_routers_wait_for_predecessors", "stream/kernel.cuh", "    hw::sync_cta();\n    hw::wait_for_predecessors();\n",
     "    hw::sync_cta();\n    if(c.warp >= L::kConsumerWarp)\n      hw::wait_for_predecessors();\n",
     1, {EMU_RACE}, "kernel.cuh quantise.cuh", {&three}, 1, EARLY},
    {"producer_counts_launches_early", "stream/kernel.cuh", "#ifdef MF_TRACE\n  if constexpr(L::Schedule::kPdl)\n    hw::wait_for_predecessors();\n", "#ifndef MF_TRACE\n",
     1, {EMU_RACE}, "kernel.cuh", {&three}, 1, EARLY},
    {"no_mbarrier_init_fence", "stream/producer.cuh", "    hw::mbarrier_init_fence();\n", "", 1, {EMU_BARRIER}, "producer.cuh", {&three}, 3, PLAIN},
    {"shuffle_in_a_condition", "stream/route.cuh",
     "  const float own_score = selection.score(c, token); // exchanges between lanes: all of them take part\n"
     "  const float score = c.lane < L::kTopK ? own_score : 0.0f;\n",
     "  float score = 0.0f;\n"
     "  if(c.lane < L::kTopK)\n"
     "    score = selection.score(c, token);\n",
     1, {EMU_DIVERGENCE, EMU_DEADLOCK}, "route_keys.cuh route.cuh", {&three}, 3, PLAIN},
    {"one_lane_asks_for_the_warp_s_index", "stream/route.cuh", "  if(c.lane == 0)\n    c.sm.head = expert;\n",
     "  if(c.lane == 0)\n    c.sm.head = expert + (uint32_t)(hw::warp_index() - c.warp);\n",
     1, {EMU_DIVERGENCE, EMU_DEADLOCK}, "route.cuh", {&three}, 3, PLAIN},
    {"no_wait_for_scales", "stream/up.cuh", "    hw::mbarrier_wait(&sm.barrier.scales[slot], (turn / L::kScaleSlots) & 1, c.dog, L::kWaitScales);\n", "",
     1, {EMU_RACE}, "up.cuh", {&three}, 3, PLAIN},
    {"no_barrier_behind_the_front", "stream/kernel.cuh", "hw::barrier_sync(L::kBarrierFront, L::kThreads - 32);\n", ";\n",
     4, {EMU_RACE, EMU_UNINITIALISED, EMU_NO_PROXY_FENCE}, "up.cuh handoff.cuh down.cuh", {&three}, 3, PLAIN},
    {"no_barrier_before_y", "stream/down.cuh", "  hw::barrier_sync(L::kBarrierOutput, L::kConsumerThreads);\n", "",
     1, {EMU_RACE}, "down.cuh", {&three}, 3, PLAIN},
    {"x_one_atom_too_far", "stream/up.cuh", "hw::matrix_descriptor(sm.x[group * L::kTileKBlocks])", "hw::matrix_descriptor(sm.x[group * L::kTileKBlocks + 1])",
     1, {GATE(GATE_FINITE), GATE(GATE_H), EMU_RACE, EMU_EARLY_OVERWRITE}, "up.cuh", {&three}, 3, PLAIN},
    {"ring_beyond_shared_memory", "stream/down.cuh",
     "hw::matrix_descriptor(sm.ring[0] + group * kTileStep)",
     "hw::matrix_descriptor((uint8_t *)&sm + sizeof(sm) - 1024)",
     1, {EMU_BOUNDS, EMU_RACE}, "down.cuh", {&three}, 3, PLAIN},
    {"scales_beyond_their_buffer", "stream/producer.cuh", "((size_t)expert * 2 * L::kHBlocks", "((size_t)expert * 4 * L::kHBlocks",
     1, {EMU_BOUNDS}, "producer.cuh", {&eight}, 3, PLAIN},
    {"token_masks_not_cleared", "stream/quantise.cuh", "sizeof(typename L::Cleared) / 16", "(sizeof(typename L::Cleared) - L::kExperts) / 16",
     1, {EMU_UNINITIALISED}, "route.cuh", {&three}, 3, PLAIN},
    {"x_scales_not_cleared", "stream/quantise.cuh",
     "for(int first = 0; first < kWords; first += 128)",
     "for(int first = sizeof(c.sm.cleared.x_scale) / 16; first < kWords; first += 128)",
     1, {EMU_UNINITIALISED}, "up.cuh", {&three}, 3, PLAIN},
    {"a_stage_s_phase_is_missed", "stream/down.cuh",
     "        hw::sync_warp(); // no lane may still be waiting for the phase when lane 0 lets the producer set off the next one\n",
     "",
     1, {EMU_DEADLOCK, EMU_RACE}, "down.cuh", {&eight}, MOST_SEEDS, PLAIN},
    {"the_producer_misses_a_phase", "stream/producer.cuh",
     "    hw::sync_warp(); // no lane may still be waiting for a phase when lane 0 sets off the next one\n",
     "",
     1, {EMU_DEADLOCK, EMU_RACE}, "producer.cuh", {&eight}, MOST_SEEDS, PLAIN},
    {"every_lane_draws_tickets", "stream/tickets.cuh", "    if(c.lane == 0)\n", "", 1, {EMU_DEADLOCK}, "handoff.cuh", {&three}, 3, PLAIN},
    {"the_ticket_of_a_later_turn", "stream/tickets.cuh", "drawn[(i + 1) % L::kLookahead]", "drawn[i]", 1, {EMU_DEADLOCK}, "handoff.cuh", {&three}, 3, PLAIN},
    {"the_other_launch_s_tickets", "stream/producer.cuh", "(c.sm.launch & 1)", "(~c.sm.launch & 1)", 1, {EMU_DEADLOCK, EMU_RACE}, "handoff.cuh tickets.cuh", {&three}, 3, PLAIN},
    {"h_is_flagged_without_release", "stream/handoff.cuh", "hw::store_shared_release(&sm.h_loaded[j],", "hw::store_shared_relaxed(&sm.h_loaded[j],",
     1, {EMU_RACE, EMU_NO_PROXY_FENCE}, "handoff.cuh down.cuh", {&three}, 3, PLAIN},
    {"h_is_waited_for_one_slot_short", "stream/handoff_batches.cuh", "slot / L::kHLoaders + 1, c.dog", "slot / L::kHLoaders, c.dog",
     1, {EMU_RACE, EMU_UNINITIALISED, EMU_EARLY_OVERWRITE}, "down.cuh handoff.cuh", {&three}, 3, PLAIN},
    {"wrong_number_of_bytes", "stream/producer.cuh",
     "hw::mbarrier_arrive_expect(full, L::kStageBytes);",
     "hw::mbarrier_arrive_expect(full, L::kStageBytes / 2);",
     1, {EMU_DEADLOCK, EMU_BARRIER}, "producer.cuh up.cuh", {&three}, 3, PLAIN},
    {"the_lister_waits_for_no_router", "stream/route.cuh", "    hw::barrier_sync(L::kBarrierRouted, 32 * c.p.tokens);\n", "",
     1, {EMU_RACE}, "route.cuh", {&three}, 3, PLAIN},
    {"token_0_s_experts_are_listed_twice", "stream/route.cuh", "    mask[i] = mask[i] & 1 ? 0 : mask[i];\n", "",
     1, {GATE(GATE_H), EMU_RACE, EMU_DEADLOCK, EMU_UNINITIALISED}, "route.cuh producer.cuh handoff.cuh quantise.cuh", {&three}, 3, PLAIN},
    {"every_cta_begins_with_the_first_pick", "stream/route.cuh", "!told && j == head_pick &&", "!told &&",
     1, {GATE(GATE_H)}, "", {&three}, 3, SLABS},
    {"the_head_is_read_unsynchronised", "stream/producer.cuh", "  hw::barrier_sync(L::kBarrierHead, 64);\n", "",
     1, {EMU_RACE, EMU_UNINITIALISED}, "producer.cuh route.cuh", {&three}, 3, PLAIN},
    {"no_wait_for_one_free_buffer", "stream/up.cuh", "if(turn >= L::kReduceBuffers)", "if(turn > L::kReduceBuffers)",
     1, {EMU_RACE}, "up.cuh handoff.cuh", {&three}, 3, PLAIN},
    {"arrival_ahead_of_the_copies", "stream/producer.cuh",
     "  const int slot = turn % L::kScaleSlots;\n",
     "  const int slot = turn % L::kScaleSlots;\n"
     "  hw::copy_async_arrive(&c.sm.barrier.scales[slot]);\n",
     1, {EMU_RACE, EMU_BARRIER, EMU_DEADLOCK}, "up.cuh producer.cuh", {&three}, 3, PLAIN},
    {"tickets_drawn_without_atomics", "stream/tickets.cuh", "hw::increment_global(counter)", "(*counter)++", 1, {EMU_RACE}, "tickets.cuh handoff.cuh", {&three}, 3, PLAIN},
    {"h_published_by_ordinary_stores", "stream/handoff.cuh", "hw::store_global_relaxed(dst, ~pair);", "*dst = ~pair;",
     1, {EMU_RACE}, "handoff.cuh", {&three}, 3, PLAIN},
    {"h_used_before_it_is_there", "stream/handoff.cuh", "wanted[i] = !row[i].complete();", "wanted[i] = false;",
     1, {GATE(GATE_FINITE), GATE(GATE_REPLAY), GATE(GATE_Y_GIVEN_H)}, "", {&three}, 3, PLAIN},
    {"unrouted_tokens_write_h", "stream/handoff.cuh", "    if(routed)\n", "",
     1, {GATE(GATE_H), GATE(GATE_REPLAY), GATE(GATE_FINITE), EMU_UNINITIALISED}, "handoff.cuh", {&three}, 3, PLAIN},
    {"columns_of_others_are_added", "stream/down.cuh", "          if(mine & 1) {\n", "          {\n",
     1, {EMU_RACE, EMU_EARLY_OVERWRITE, GATE(GATE_FINITE), GATE(GATE_Y_GIVEN_H)}, "down.cuh", {&three}, 3, PLAIN},
    {"bytes_of_an_absent_slot", "stream/producer.cuh", "smaller(L::kDownSlots, active - slot) * (blocks", "L::kDownSlots * (blocks",
     1, {EMU_DEADLOCK, EMU_UNFINISHED}, "down.cuh", {&odd}, 3, SLABS},
    {"rows_in_use_are_called_idle", "stream/down.cuh",
     "hw::count_rows(L::kSlab ? 64 : L::kDownRows);",
     "hw::count_rows(L::kSlab ? 64 : L::kDownRows - 8);",
     1, {EMU_UNINITIALISED}, "down.cuh", {&three}, 3, PLAIN},
    {"dense_without_wgmma_wait", "stream/down_dense.cuh", "        hw::wgmma_wait();\n", "", 1, {EMU_WGMMA}, "down_dense.cuh", {&three}, 3, DENSE},
    {"a_dense_stage_s_phase_is_missed", "stream/down_dense.cuh",
     "  hw::sync_warp(); // no lane may still be waiting for the phase when lane 0 lets the producer set off the next one\n",
     "",
     1, {EMU_DEADLOCK, EMU_RACE}, "down_dense.cuh", {&eight}, MOST_SEEDS, DENSE},
    {"dense_rows_in_use_are_called_idle", "stream/down_dense.cuh", "hw::count_rows(8 * kGroups);", "hw::count_rows(8 * kGroups - 8);",
     1, {EMU_UNINITIALISED}, "down_dense.cuh down.cuh", {&three}, 3, DENSE},
    {"columns_of_the_other_half_s_k_block", "stream/down_dense.cuh", "block[half] == kFirstBlock + b", "block[half ^ 1] == kFirstBlock + b",
     1, {GATE(GATE_Y_GIVEN_H)}, "", {&one}, 3, DENSE},
    {"scale_of_the_other_half", "stream/down_dense.cuh", "scales[w_scale[half]]", "scales[w_scale[half ^ 1]]",
     1, {GATE(GATE_Y_GIVEN_H)}, "", {&one}, 3, DENSE},
    {"scale_of_the_half_s_rows_in_the_tile", "stream/down_dense.cuh", "group % L::kDownGroups * 8;", "(2 * w4 + half) % L::kDownGroups * 8;",
     1, {GATE(GATE_Y_GIVEN_H)}, "", {&one}, 3, DENSE},
    {"h_scale_of_the_tile_s_first_k_block", "stream/down_dense.cuh", "(h_scale + block[half] * 8)", "(h_scale + kFirstBlock * 8)",
     1, {GATE(GATE_Y_GIVEN_H)}, "", {&one}, 3, DENSE},
    {"one_tile_s_sums_for_both", "stream/down.cuh", "(group >> 3) * 1024", "0 * group", 1, {GATE(GATE_Y_GIVEN_H), GATE(GATE_FINITE), EMU_UNINITIALISED}, "down.cuh", {&one}, 3, DENSE},
    {"columns_of_others_are_added_densely", "stream/down_dense.cuh", "if((mine & 1) && exists(half, blocks))", "if(exists(half, blocks))",
     1, {EMU_RACE, EMU_EARLY_OVERWRITE, EMU_UNINITIALISED, GATE(GATE_Y_GIVEN_H)}, "down.cuh down_dense.cuh", {&three}, 3, DENSE},
    {"k_blocks_that_do_not_exist_are_kept", "stream/down_dense.cuh", "return L::kEvenPieces || block[half] < blocks;", "return L::kEvenPieces || blocks != 0;",
     1, {EMU_UNINITIALISED, GATE(GATE_FINITE), GATE(GATE_Y_GIVEN_H), EMU_RACE}, "down.cuh down_dense.cuh handoff.cuh", {&three}, 3, UNEVEN},
    {"scales_of_w2_are_not_waited_for", "stream/down.cuh", "  hw::mbarrier_wait(&sm.barrier.down_scales, 0, c.dog, L::kWaitDownScales);\n", "",
     1, {EMU_RACE, EMU_UNINITIALISED}, "down.cuh", {&three}, 3, PLAIN},
    {"scales_of_w2_arrive_ahead_of_their_copies", "stream/handoff.cuh", "    hw::copy_async_arrive(&sm.barrier.down_scales);\n", "    hw::mbarrier_arrive(&sm.barrier.down_scales);\n",
     1, {EMU_RACE, EMU_UNINITIALISED}, "down.cuh handoff.cuh", {&three}, 3, PLAIN},
    {"slabs_in_the_wrong_order", "stream/up.cuh", "const float low = w4 & 1 ? d[4 + i] : d[i];", "const float low = w4 & 1 ? d[i] : d[4 + i];",
     1, {GATE(GATE_H), GATE(GATE_FINITE)}, "", {&one}, 3, SLABS},
    {"columns_of_the_warp_s_other_slab", "stream/up.cuh", "own0 = own(d, 6 * half, w4), own1 = own(d, 6 * half + 1, w4)", "own0 = own(d, 4 - 2 * half, w4), own1 = own(d, 5 - 2 * half, w4)",
     1, {GATE(GATE_H), EMU_EARLY_OVERWRITE, EMU_RACE, EMU_UNINITIALISED}, "up.cuh handoff.cuh", {&one}, 3, HALVES},
    {"halves_without_a_k_block_are_kept", "stream/up.cuh", "      if(exists[half]) {\n", "      {\n",
     1, {EMU_UNINITIALISED, EMU_RACE, EMU_EARLY_OVERWRITE, GATE(GATE_FINITE), GATE(GATE_H)}, "up.cuh handoff.cuh", {&three}, 3, HALVES},
    {"both_halves_have_the_first_one_s_k_block", "stream/up.cuh", "block + half < L::kKBlocks", "block < L::kKBlocks",
     1, {EMU_UNINITIALISED, EMU_RACE, EMU_EARLY_OVERWRITE, GATE(GATE_FINITE), GATE(GATE_H)}, "up.cuh handoff.cuh", {&three}, 3, HALVES},
    {"scale_of_the_first_half_s_k_block", "stream/up.cuh", "w_scale[k * L::kStageKBlocks + half]", "w_scale[k * L::kStageKBlocks]",
     1, {GATE(GATE_H)}, "", {&one}, 3, HALVES},
    {"up_rows_first", "stream/up.cuh", "return lane >> 4; }", "return (lane >> 4) ^ 1; }", 1, {GATE(GATE_H)}, "", {&one}, 3, HALVES},
    {"gate_and_up_change_places", "stream/handoff.cuh", "float g = up ? other : v.x, u = up ? v.y : other;", "float u = up ? other : v.x, g = up ? v.y : other;",
     1, {GATE(GATE_H)}, "", {&one}, 3, HALVES},
    {"batch_without_proxy_fence", "stream/handoff_batches.cuh", "  hw::fence_async_proxy();\n", "",
     1, {EMU_NO_PROXY_FENCE}, "handoff.cuh down.cuh", {&same}, 3, HELP},
    {"batches_are_not_waited_for", "stream/handoff_batches.cuh", "    hw::barrier_sync(L::kBarrierH, kWorkerThreads);", "    hw::barrier_arrive(L::kBarrierH, kWorkerThreads);",
     1, {EMU_RACE, EMU_UNINITIALISED, EMU_NO_PROXY_FENCE, EMU_EARLY_OVERWRITE, GATE(GATE_FINITE)}, "handoff.cuh down.cuh", {&same}, 3, HELP},
    {"one_part_is_loaded_twice", "stream/handoff_batches.cuh", "part = batch - (slot << log_parts);", "part = 0 * batch;",
     1, {EMU_RACE, EMU_UNINITIALISED, EMU_NO_PROXY_FENCE, EMU_EARLY_OVERWRITE}, "quantise.cuh down.cuh", {&same}, 3, HELP},
    {"batches_taken_without_atomics", "stream/handoff_batches.cuh", "(int)hw::add_shared(&sm.batches_taken, 1);", "(int)sm.batches_taken++;",
     1, {EMU_RACE}, "handoff_batches.cuh", {&same}, 3, HELP},
    {"finalisers_do_not_know_that_they_help", "stream/kernel.cuh", "if(batches && (is_consumer || helper < L::kHelpers))", "if(batches && (is_consumer || loader))",
     1, {EMU_DEADLOCK}, "handoff_batches.cuh", {&same}, 3, HELP},
    {"rows_are_used_before_they_are_there", "stream/handoff.cuh", "wanted[i] = !row[i].complete();", "wanted[i] = false;",
     1, {GATE(GATE_FINITE)}, "", {&same}, 3, HELP},
};
#define MUTANTS ((int)(sizeof(mutants) / sizeof(mutants[0])))

static const char *kind_name(int kind)
{
  return kind < EMU_FINDING_KINDS ? emu_finding_name((enum emu_finding_kind)kind) : gate_name((enum gate)(kind - EMU_FINDING_KINDS));
}

/* ---- changing a template ---- */
static char *read_text(const char *path)
{
  FILE *f = fopen(path, "rb");
  char *text = calloc(1, 1 << 20);
  ck_assert_msg(f != NULL && text != NULL, "%s", path);
  ck_assert_uint_lt(fread(text, 1, (1 << 20) - 1, f), (1 << 20) - 1);
  fclose(f);
  return text;
}

/* Replaces every 'text' in a file; returns how many there were. */
static int replace_in_file(const char *path, const char *text, const char *instead)
{
  char *before = read_text(path);
  FILE *f = fopen(path, "wb");
  int count = 0;
  const char *at = before;
  ck_assert_ptr_nonnull(f);
  for(const char *hit = strstr(at, text); hit != NULL; hit = strstr(at, text)) {
    ck_assert_uint_eq(fwrite(at, 1, (size_t)(hit - at), f), (size_t)(hit - at));
    ck_assert_int_ge(fputs(instead, f), 0);
    at = hit + strlen(text);
    count++;
  }
  ck_assert_int_ge(fputs(at, f), 0);
  ck_assert_int_eq(fclose(f), 0);
  free(before);
  return count;
}

static void mutate(const struct mutant *mutant, char *folder, size_t space)
{
  char path[400];
  int count;
  snprintf(folder, space, "%.200s/%s", emu_folder, mutant->name);
  snprintf(path, sizeof(path), "%s/%s", folder, mutant->file);
  emu_shell("cp -r templates '%s'", folder);
  count = replace_in_file(path, mutant->text, mutant->instead);
  ck_assert_msg(count == mutant->count, "%s: the text to be changed occurs %d times in %s, not %d times: bring the table in step", mutant->name, count,
                mutant->file, mutant->count);
}

/* ---- running ---- */
static void open_shape(struct emu_subject *s, enum shape shape, const char *template_dir)
{
  memset(s, 0, sizeof(*s));
  s->problem = emu_smallest_problem();
  s->problem.hidden = shapes[shape].hidden;
  s->problem.intermediate = shapes[shape].intermediate;
  s->emulation.info = emu_device_of(shapes[shape].sms);
  s->sched.family = &family_stream;
  family_stream.default_schedule(&s->problem, 8, &s->emulation.info, &s->sched);
  emu_set_knob(&s->sched, "ring_stages", 4); /* comes round soon */
  emu_set_knob(&s->sched, "flight", 4); /* all of it */
  emu_set_knob(&s->sched, "first_down_flight", 4);
  emu_set_knob(&s->sched, "static_rounds", 0);
  emu_set_knob(&s->sched, "hand_off", shapes[shape].hand_off);
  emu_set_knob(&s->sched, "pdl", shapes[shape].pdl);
  emu_set_knob(&s->sched, "unit_features", shapes[shape].unit);
  if(shapes[shape].hand_off == 1)
    emu_set_knob(&s->sched, "h_loaders", 2); /* there are four batches */
  emu_open(s, template_dir, 8, 1.0f);
}

static int copy_cases(const struct test_case *const from[MAX_CASES], struct test_case to[MAX_CASES])
{
  int count = 0;
  while(count < MAX_CASES && from[count] != NULL) {
    to[count] = *from[count];
    count++;
  }
  return count;
}

/* What was found, as the rows number kinds. */
static int kind_of(const struct emu_outcome *o)
{
  return o->finding != EMU_NONE ? (int)o->finding : GATE((int)o->gate);
}

static bool expected(const struct mutant *mutant, const struct emu_outcome *o)
{
  const int kind = kind_of(o);
  for(int i = 0; i < MAX_KINDS && mutant->kinds[i] != 0; i++)
    if(mutant->kinds[i] == kind)
      return true;
  return false;
}

/* Whether the text names one of the row's files with a line. */
static bool located(const struct mutant *mutant, const char *text)
{
  char names[200];
  char *rest = names;
  snprintf(names, sizeof(names), "%s", mutant->where);
  for(const char *name = strsep(&rest, " "); name != NULL; name = strsep(&rest, " ")) {
    char place[64];
    snprintf(place, sizeof(place), "stream/%s:", name);
    if(strstr(text, place) != NULL)
      return true;
  }
  return false;
}

START_TEST(a_mutant_is_found)
{
  const struct mutant *mutant = &mutants[_i];
  const char *from = getenv("MOEFORGE_MUTANTS");
  const int first = from != NULL ? atoi(from) : 1;
  const char *only = from != NULL ? strchr(from, ' ') : NULL;
  struct emu_subject s;
  struct emu_outcome o = {.passed = true};
  struct test_case cases[MAX_CASES];
  const int ncases = copy_cases(mutant->cases, cases), most = from != NULL ? 3 * MOST_SEEDS : mutant->seeds;
  char folder[300];
  int tried = 0;
  if(only != NULL && strstr(mutant->name, only + 1) == NULL)
    return;
  ck_assert(mutant->seeds >= 1 && mutant->seeds <= MOST_SEEDS);
  emu_compile_fast();
  mutate(mutant, folder, sizeof(folder));
  open_shape(&s, mutant->shape, folder);
  for(; o.passed && tried < most; tried++)
    emu_run(&s, 1.0f, cases, ncases, 2, (uint64_t)(first + tried), &o);
  if(from != NULL)
    printf("%s: under %d seeds (of %d), %s: %s\n", mutant->name, tried, mutant->seeds, o.passed ? "nothing" : kind_name(kind_of(&o)), o.text);
  ck_assert_msg(!o.passed, "%s was not found under %d seeds", mutant->name, tried);
  ck_assert_msg(expected(mutant, &o), "%s: found as %s, which is not expected: %s", mutant->name, kind_name(kind_of(&o)), o.text);
  ck_assert_msg(o.finding == EMU_NONE || located(mutant, o.text), "%s: the finding names no line of %s: %s", mutant->name, mutant->where, o.text);
  emu_close(&s);
}
END_TEST

/* ---- nothing is found where there is nothing ---- */
static const struct clean {
  enum shape shape;
  const struct test_case *cases[MAX_CASES];
  int from, seeds; /* with two launches per case, each with an interleaving of its own */
} clean[] = {
    {PLAIN, {&three, &two}, 1, 6}, {PLAIN, {&eight}, 101, 5}, {PLAIN, {&one, &same}, 201, 4}, {SLABS, {&odd, &same}, 301, 2}, {STRADDLE, {&one}, 401, 2}, {HELP, {&same, &two, &eight}, 501, 3},
    {EARLY, {&one, &three}, 601, 2}, {DENSE, {&three, &same}, 701, 2}, {UNEVEN, {&three, &one}, 801, 2}, {HALVES, {&three, &same}, 901, 2},
};
#define CLEAN ((int)(sizeof(clean) / sizeof(clean[0])))

START_TEST(the_kernel_is_clean)
{
  const struct clean *row = &clean[_i];
  struct emu_subject s;
  struct test_case cases[MAX_CASES];
  const int ncases = copy_cases(row->cases, cases);
  open_shape(&s, row->shape, "templates");
  for(int i = 0; i < row->seeds; i++) {
    struct emu_outcome o;
    emu_run(&s, 1.0f, cases, ncases, 2, (uint64_t)(row->from + i), &o);
    ck_assert_msg(o.passed, "seed %d: %s", row->from + i, o.text);
  }
  emu_close(&s);
}
END_TEST

/* At least ten times as many interleavings of the kernel as it is as the largest number of seeds that a mutant may take. */
START_TEST(clean_runs_outnumber_the_seeds)
{
  int launches = 0;
  for(int i = 0; i < CLEAN; i++) {
    struct test_case cases[MAX_CASES];
    launches += 2 * copy_cases(clean[i].cases, cases) * clean[i].seeds;
  }
  ck_assert_int_ge(launches, 10 * MOST_SEEDS);
}
END_TEST

int main(void)
{
#ifdef __SANITIZE_ADDRESS__
  const int step = 8; /* the emulator runs several times as long; that it finds things is shown by the other build */
#else
  const int step = 1;
#endif
  Suite *suite = suite_create("emu_mutants");
  TCase *found = tcase_create("mutants"), *passes = tcase_create("kernel");
  for(int i = 0; i < MUTANTS; i += step)
    tcase_add_loop_test(found, a_mutant_is_found, i, i + 1);
  tcase_add_loop_test(passes, the_kernel_is_clean, 0, step == 1 ? CLEAN : 1);
  tcase_add_test(passes, clean_runs_outnumber_the_seeds);
  tcase_set_timeout(found, 240);
  tcase_set_timeout(passes, 240);
  suite_add_tcase(suite, found);
  suite_add_tcase(suite, passes);
  return emu_suite_run(suite);
}
