/* test_family_batch.c - the kernel family `batch` on the host's side against the kernel itself: compiles served shapes with NVRTC (no GPU needed) and
 * compares the exported metadata with the host's formulas; rules, recipes, token counts. Needs NVRTC: without it the test fails. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "batch/params.h"
#include "compile.h"
#include "emit.h"
#include "family_batch.h"
#include "family_fixture.h"
#include "family_stream.h"
#include "limits.h"
#include "recipe.h"
#include "space.h"
#include "spec.h"

#define ROWS(table) ((int)(sizeof(table) / sizeof((table)[0])))

static int knob(const char *name)
{
  const int k = family_knob(&family_batch, name);
  ck_assert_int_ge(k, 0);
  return k;
}

/* Emits and compiles; fills in the artifact. */
static void compile(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, enum compile_build build, struct artifact *art)
{
  struct error err = {MF_OK, ""};
  struct closure closure;
  struct nvrtc *nvrtc;
  ck_assert_msg(nvrtc_open(&nvrtc, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(emit_source(p, "test", sched, dev, art, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(closure_collect("templates", art->source, &closure, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(compile_artifact(nvrtc, &closure, "sm_90a", build, art, &err) == MF_OK, "%s\n%s", err.text, art->log != NULL ? art->log : "");
  closure_free(&closure);
  nvrtc_close(nvrtc);
}

/* Compiles the schedule: host and kernel agree on every number, nothing is spilled, no product is serialised. */
static void agree(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct mf_batch_meta *meta)
{
  struct artifact art = {0};
  struct verdict why = {0};
  struct error err = {MF_OK, ""};
  ck_assert_msg(problem_validate(p, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(family_batch.constrain(p, sched, dev, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  ck_assert_int_le(family_batch.shared_bytes(p, sched, dev), dev->shared_bytes_per_cta);
  compile(p, sched, dev, COMPILE_PLAIN, &art);
  ck_assert_msg(cubin_read_symbol(art.cubin, art.cubin_bytes, "mf_meta", meta, sizeof(*meta), &err) == MF_OK, "%s", err.text);
  ck_assert_msg(family_batch.check_meta(meta, sizeof(*meta), p, sched, dev, &why) == MF_OK, "%s", why.detail);
  ck_assert_msg(limits_after_compile(p, sched, dev, &art, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  ck_assert_msg(art.spill_bytes == 0 && art.stack_bytes == 0, "%ld bytes of spills, %ld of stack", art.spill_bytes, art.stack_bytes);
  ck_assert(!art.wgmma_serialised);
  ck_assert_int_eq(art.registers, 96); /* 640 threads: what the consumers take later is reckoned from it */
  artifact_free(&art);
}

/* What the default schedule of real shapes is, and that it compiles. */
static const struct {
  const char *shape, *device;
  int tokens;
  int ring, overlay, low_ranks, down_rows, down_kblocks;
  int shared; /* experts fused into the routed ones: a rank more each */
} compiled[] = {
    {"qwen3.5-35b-a3b", "h200", 16, 12, 0, 8, 16, 4, 0},     {"qwen3.5-35b-a3b", "h200", 24, 12, 1, 4, 16, 4, 0},
    {"qwen3.5-35b-a3b", "h200", 32, 8, 1, 4, 16, 4, 0},      {"deepseek-v3.1-tp8", "h200", 16, 8, 1, 4, 56, 2, 0},
    {"glm-5-tp8", "h200", 16, 8, 0, 8, 48, 2, 0},           {"qwen3.5-122b-a10b", "h200", 9, 8, 1, 5, 24, 4, 0},
    {"qwen3-30b-a3b", "h200", 24, 4, 1, 6, 16, 6, 0},        {"minimax-m2-tp2", "h200", 24, 4, 1, 4, 24, 2, 0},
    {"qwen3-235b-a22b-tp4", "h100-pcie", 16, 10, 0, 8, 40, 1, 0}, {"kimi-k2-tp8", "h200", 16, 8, 1, 4, 56, 2, 0},
    {"tiny", "h200", 32, 12, 0, 2, 8, 2, 0},                 {"qwen3-next-80b-a3b", "h200", 16, 10, 0, 10, 16, 4, 0},
    {"qwen3-next-80b-a3b", "h200", 24, 10, 1, 5, 16, 4, 0},   {"qwen3-next-80b-a3b", "h200", 32, 4, 1, 5, 16, 4, 0},
    {"deepseek-v3.1-tp8", "h200", 16, 8, 1, 5, 56, 2, 1},    {"kimi-k2-tp8", "h200", 16, 8, 1, 5, 56, 2, 1},
    {"glm-5-tp8", "h200", 16, 8, 0, 9, 48, 2, 1},            {"qwen3-235b-a22b-tp4", "h200", 16, 10, 0, 8, 32, 3, 0},
};

START_TEST(host_and_kernel_agree)
{
  const struct device_info dev = device(compiled[_i].device);
  struct mf_problem p = problem(compiled[_i].shape);
  struct schedule sched = {.family = &family_batch};
  struct verdict why = {0};
  struct mf_batch_meta meta;
  p.shared_experts = compiled[_i].shared;
  family_batch.default_schedule(&p, compiled[_i].tokens, &dev, &sched);
  agree(&p, &sched, &dev, &meta);
  ck_assert_int_eq((int)meta.token_groups, (compiled[_i].tokens + 7) / 8);
  ck_assert_int_eq((int)meta.ring_stages, compiled[_i].ring);
  ck_assert_int_eq((int)meta.overlay, compiled[_i].overlay);
  ck_assert_int_eq((int)meta.low_ranks, compiled[_i].low_ranks);
  ck_assert_int_eq((int)meta.down_rows, compiled[_i].down_rows);
  ck_assert_int_eq((int)meta.down_kblocks, compiled[_i].down_kblocks);
  meta.shared_bytes += 1024; /* the comparison can fail */
  ck_assert_int_eq(family_batch.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why), MF_REJECTED);
  ck_assert_str_eq(why.rule, "metadata");
  ck_assert_ptr_nonnull(strstr(why.detail, "shared_bytes"));
}
END_TEST

/* Sizes with a remainder, and routers. K, N, offset, experts, top-k, score, bias, f32, groups, kept, begin, count, zero. */
static const struct {
  int hidden, intermediate, offset, experts, top_k, score, bias, f32, groups, kept, begin, count, zero, tokens;
} odd[] = {
    {1152, 80, 80, 64, 2, MF_SCORE_SOFTMAX, 0, 0, 1, 1, 0, 64, 0, 32},        {2560, 160, 32, 128, 4, MF_SCORE_TOPK_SOFTMAX, 0, 1, 1, 1, 0, 128, 0, 24},
    {4224, 384, 0, 64, 1, MF_SCORE_SIGMOID, 0, 0, 1, 1, 0, 64, 0, 16},        {1024, 1408, 0, 160, 3, MF_SCORE_SOFTMAX, 0, 0, 1, 1, 0, 160, 0, 32},
    {2048, 256, 0, 1024, 8, MF_SCORE_SIGMOID, 1, 1, 32, 9, 0, 1024, 0, 16},   {2048, 128, 0, 384, 6, MF_SCORE_SQRT_SOFTPLUS, 1, 0, 1, 1, 0, 384, 0, 32},
    {2048, 256, 0, 256, 8, MF_SCORE_SOFTMAX, 1, 1, 1, 1, 128, 128, 256, 32},  {1664, 352, 96, 8, 2, MF_SCORE_SOFTMAX, 0, 0, 1, 1, 0, 8, 0, 17},
    {2048, 512, 0, 256, 8, MF_SCORE_GIVEN, 0, 0, 1, 1, 0, 256, 0, 32},        {2560, 160, 32, 1000, 6, MF_SCORE_GIVEN, 0, 0, 1, 1, 500, 250, 20, 24},
    {2048, 128, 0, 896, 22, MF_SCORE_SIGMOID, 1, 1, 2, 1, 448, 448, 0, 16}, {1152, 80, 80, 64, 12, MF_SCORE_SOFTMAX, 1, 0, 1, 1, 32, 32, 64, 24},
};

START_TEST(odd_shapes_agree)
{
  const struct device_info dev = device("h200");
  struct schedule sched = {.family = &family_batch};
  struct mf_batch_meta meta;
  struct mf_problem p;
  problem_init(&p);
  p.hidden = odd[_i].hidden;
  p.intermediate = odd[_i].intermediate;
  p.intermediate_offset = odd[_i].offset;
  p.experts = odd[_i].experts;
  p.top_k = odd[_i].top_k;
  p.score = odd[_i].score;
  p.renormalize = p.score != MF_SCORE_GIVEN;
  p.select_bias = odd[_i].bias;
  p.logits_dtype = odd[_i].f32 ? MF_DTYPE_F32 : MF_DTYPE_BF16;
  p.groups = odd[_i].groups;
  p.groups_kept = odd[_i].kept;
  p.expert_begin = odd[_i].begin;
  p.expert_count = odd[_i].count;
  p.zero_experts = odd[_i].zero;
  family_batch.default_schedule(&p, odd[_i].tokens, &dev, &sched);
  agree(&p, &sched, &dev, &meta);
}
END_TEST

/* Variants of the operator. */
#define PLAIN .hidden = 2048, .groups = 1, .groups_kept = 1, .renormalize = 1
#define ALL(n) .experts = n, .expert_count = n
static const struct {
  int tokens;
  struct mf_problem problem;
} variants[] = {
    {32, {PLAIN, ALL(256), .top_k = 8, .intermediate = 512, .score = MF_SCORE_SIGMOID, .select_bias = 1, .weight_on_input = 1, .swiglu_limit = 7, .swiglu_alpha = 1.702f}},
    {16, {PLAIN, ALL(32), .top_k = 4, .intermediate = 368, .intermediate_offset = 96, .swiglu_limit = 10}},
    {32, {PLAIN, ALL(128), .top_k = 7, .intermediate = 384, .score = MF_SCORE_SIGMOID, .logits_dtype = MF_DTYPE_F32, .shared_experts = 1 + MF_SHARED_GATED}},
    {24, {PLAIN, .experts = 256, .expert_begin = 64, .expert_count = 64, .top_k = 6, .intermediate = 256, .shared_experts = 2}},
    {32, {.hidden = 2048, .groups = 1, .groups_kept = 1, ALL(512), .top_k = 7, .intermediate = 128, .score = MF_SCORE_GIVEN, .shared_experts = 1, .weight_on_input = 1}},
    {32, {.hidden = 2048, .groups = 1, .groups_kept = 1, ALL(512), .top_k = 20, .intermediate = 128, .score = MF_SCORE_GIVEN, .shared_experts = 2 + MF_SHARED_GATED}},
};

START_TEST(variants_agree)
{
  const struct device_info dev = device("h200");
  struct schedule sched = {.family = &family_batch};
  struct mf_batch_meta meta;
  struct verdict why = {0};
  struct mf_problem p = variants[_i].problem;
  p.struct_size = sizeof(p);
  family_batch.default_schedule(&p, variants[_i].tokens, &dev, &sched);
  agree(&p, &sched, &dev, &meta);
  meta.swiglu_limit += 1; /* the comparison can fail */
  ck_assert_int_eq(family_batch.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why), MF_REJECTED);
  ck_assert_ptr_nonnull(strstr(why.detail, "swiglu_limit"));
}
END_TEST

START_TEST(what_is_refused)
{
  static const struct {
    const char *shape;
    int tokens, intermediate, top_k, experts, shared; /* 0: as it is; experts: softmax with a bias */
    const char *rule;
    long nearest;
  } rows[] = {
      {"qwen3.5-35b-a3b", 8, 0, 0, 0, 0, "tokens", 9},        {"qwen3.5-35b-a3b", 33, 0, 0, 0, 0, "tokens", 32},
      {"qwen3.5-35b-a3b", 16, 0, 23, 0, 0, "top_k", 22},      {"qwen3.5-35b-a3b", 16, 24, 0, 0, 0, "intermediate", 32},
      {"qwen3.5-35b-a3b", 16, 0, 22, 0, 1, "top_k", 21},      {"qwen3.5-35b-a3b", 32, 0, 11, 0, 0, "memory", 24},
      {"deepseek-v3.1-tp8", 17, 0, 0, 0, 0, "memory", 16},    {"glm-5-tp8", 24, 0, 0, 0, 0, "memory", 16},
      {"qwen3.5-35b-a3b", 16, 0, 0, 520, 0, "experts", 512},  {"kimi-k2-tp8", 16, 0, 9, 1024, 0, "experts", 896},
      {"qwen3.5-122b-a10b", 24, 0, 0, 0, 0, "memory", 16},    {"qwen3.5-35b-a3b", 16, 4096, 0, 0, 0, "memory", -1},
  };
  const struct device_info dev = device("h200");
  for(int i = 0; i < ROWS(rows); i++) {
    struct mf_problem p = problem(rows[i].shape);
    struct verdict why = {0};
    p.intermediate = rows[i].intermediate != 0 ? rows[i].intermediate : p.intermediate;
    p.top_k = rows[i].top_k != 0 ? rows[i].top_k : p.top_k;
    p.shared_experts = rows[i].shared;
    if(rows[i].experts != 0) {
      p.experts = p.expert_count = rows[i].experts;
      p.select_bias = 1;
    }
    ck_assert_msg(family_batch.serves(&p, rows[i].tokens, &dev, &why) == MF_REJECTED, "row %d is served", i);
    ck_assert_str_eq(why.rule, rows[i].rule);
    ck_assert_int_eq(why.nearest, rows[i].nearest);
  }
}
END_TEST

START_TEST(schedules_that_are_refused)
{
  static const struct {
    const char *knob;
    int value, top_k;
    const char *rule;
  } rows[] = {{"flight", 16, 8, "flight"}, {"first_down_flight", 16, 8, "flight"}, {"overlay", 1, 1, "overlay"}};
  const struct device_info dev = device("h200");
  for(int i = 0; i < ROWS(rows); i++) {
    struct mf_problem p = problem("qwen3.5-35b-a3b");
    struct schedule sched = {.family = &family_batch};
    struct verdict why = {0};
    p.top_k = rows[i].top_k;
    family_batch.default_schedule(&p, 16, &dev, &sched);
    ck_assert_int_eq(family_batch.constrain(&p, &sched, &dev, &why), MF_OK);
    sched.value[knob(rows[i].knob)] = rows[i].value;
    ck_assert_int_eq(family_batch.constrain(&p, &sched, &dev, &why), MF_REJECTED);
    ck_assert_str_eq(why.rule, rows[i].rule);
  }
}
END_TEST

/* Where registers are tight: a consumer warp with a tile of its own and two k-blocks, loaders with much of h in 64 registers, a watchdog in addition. */
START_TEST(registers_suffice)
{
  static const struct {
    int hidden, intermediate, offset, experts, top_k, tokens, overlay /* -1: the default */;
    enum compile_build build;
  } rows[] = {{5120, 192, 0, 160, 8, 24, -1, COMPILE_PLAIN}, {5120, 1024, 0, 16, 1, 24, -1, COMPILE_PLAIN}, {4096, 1792, 0, 16, 2, 16, -1, COMPILE_PLAIN},
              {4096, 384, 0, 64, 8, 16, 1, COMPILE_PLAIN},   {6144, 384, 0, 64, 8, 16, 1, COMPILE_PLAIN},   {1408, 400, 32, 32, 3, 16, 0, COMPILE_PLAIN},
              {2304, 512, 0, 256, 8, 16, 1, COMPILE_PLAIN},  {4096, 384, 0, 128, 8, 16, -1, COMPILE_DEBUG}, {2048, 352, 96, 64, 12, 16, 1, COMPILE_PLAIN}};
  const struct device_info dev = device("h200");
  struct mf_problem p;
  struct schedule sched = {.family = &family_batch};
  struct artifact art = {0};
  struct verdict why = {0};
  problem_init(&p);
  p.hidden = rows[_i].hidden;
  p.intermediate = rows[_i].intermediate;
  p.intermediate_offset = rows[_i].offset;
  p.experts = p.expert_count = rows[_i].experts;
  p.top_k = rows[_i].top_k;
  p.score = MF_SCORE_SOFTMAX;
  p.renormalize = 1;
  p.groups = p.groups_kept = 1;
  family_batch.default_schedule(&p, rows[_i].tokens, &dev, &sched);
  if(rows[_i].overlay >= 0)
    sched.value[knob("overlay")] = rows[_i].overlay;
  ck_assert_int_eq(family_batch.constrain(&p, &sched, &dev, &why), MF_OK);
  compile(&p, &sched, &dev, rows[_i].build, &art);
  ck_assert_msg(art.spill_bytes == 0 && art.stack_bytes == 0, "%ld bytes of spills, %ld of stack", art.spill_bytes, art.stack_bytes);
  artifact_free(&art);
}
END_TEST

/* A cap that the down phase begins without is refused where its first stages may fill the down ring. */
START_TEST(the_down_phase_is_capped_from_its_beginning_or_not_at_all)
{
  static const struct {
    int flight, first_down;
    enum mf_status rc;
  } rows[] = {{4, 6, MF_REJECTED}, {4, 5, MF_OK}, {6, 6, MF_OK}, {6, 2, MF_OK}};
  const struct device_info dev = device("h200");
  struct mf_problem p = problem("tiny");
  struct schedule sched = {.family = &family_batch};
  struct verdict why = {0};
  p.intermediate = 512; /* h of half of four ranks takes all of x: the six stages of the ring are the down ring */
  p.experts = p.expert_count = 16;
  p.top_k = 4;
  family_batch.default_schedule(&p, 32, &dev, &sched);
  sched.value[knob("ring_stages")] = 6;
  sched.value[knob("overlay")] = 1;
  for(int i = 0; i < ROWS(rows); i++) {
    sched.value[knob("flight")] = rows[i].flight;
    sched.value[knob("first_down_flight")] = rows[i].first_down;
    ck_assert_msg(family_batch.constrain(&p, &sched, &dev, &why) == rows[i].rc, "row %d", i);
    if(rows[i].rc != MF_OK)
      ck_assert_str_eq(why.rule, "flight");
  }
}
END_TEST

START_TEST(buckets_are_groups)
{
  static const int rows[][3] = {{9, 9, 16}, {16, 9, 16}, {17, 17, 24}, {24, 17, 24}, {25, 25, 32}, {32, 25, 32}};
  const struct mf_problem p = problem("qwen3.5-35b-a3b");
  for(int i = 0; i < ROWS(rows); i++) {
    int lo = 0, hi = 0;
    family_batch.token_bucket(&p, rows[i][0], &lo, &hi);
    ck_assert_int_eq(lo, rows[i][1]);
    ck_assert_int_eq(hi, rows[i][2]);
  }
}
END_TEST

START_TEST(recipes_are_valid)
{
  static const int counts[] = {4, 9, 16, 32};
  const struct device_info dev = device("h200");
  const struct mf_problem p = problem("qwen3.5-35b-a3b");
  struct candidate_list list = {0};
  struct error err = {MF_OK, ""};
  size_t of[3] = {0}; /* stream, two groups, four groups */
  ck_assert_msg(space_enumerate_counts(&p, &dev, counts, ROWS(counts), EFFORT_DEFAULT, &list, NULL, NULL, &err) == MF_OK, "%s", err.text);
  for(size_t i = 0; i < list.count; i++) {
    const struct mf_recipe *r = &list.items[i].recipe;
    const bool batch = list.items[i].schedule.family == &family_batch;
    const int groups = batch ? list.items[i].schedule.value[knob("token_groups")] : 1;
    ck_assert_int_eq(recipe_validate(r, sizeof(*r)), MF_OK);
    ck_assert_uint_eq(r->version, 1); /* nothing in it that an older runtime cannot read */
    ck_assert_int_eq((int)r->tokens_min, batch ? 9 : 1);
    ck_assert_int_eq((int)r->tokens_max, 8 * groups);
    ck_assert(groups != 3); /* no count needs it */
    of[groups / 2]++;
    for(uint32_t m = 0; m < r->nmaps; m++) { /* a box is one copy: its bytes fit a stage */
      uint64_t bytes = 1;
      for(uint32_t d = 0; d < r->maps[m].rank; d++)
        bytes *= r->maps[m].box[d];
      ck_assert_uint_le(bytes, batch ? 8192 : 16384);
    }
  }
  ck_assert(of[0] > 0 && of[1] > 0 && of[2] > 0);
  candidate_list_free(&list);
}
END_TEST

/* Every field of the parameter struct is written by exactly one recipe field, the knobs by constants. */
START_TEST(parameters_are_complete)
{
  const struct device_info dev = device("h200");
  const struct mf_problem p = problem("qwen3.5-35b-a3b");
  struct schedule sched = {.family = &family_batch};
  unsigned char written[sizeof(struct mf_stream_params)] = {0};
  struct mf_recipe r;
  struct error err = {MF_OK, ""};
  int flights = 0;
  family_batch.default_schedule(&p, 16, &dev, &sched);
  sched.value[knob("flight")] = 77;
  ck_assert_int_eq(family_batch.recipe(&p, &sched, &dev, &r, &err), MF_OK);
  for(uint32_t f = 0; f < r.nfields; f++) {
    flights += r.fields[f].source == MF_SRC_CONST && r.fields[f].offset == offsetof(struct mf_stream_params, flight) && r.fields[f].value == 77;
    for(uint32_t b = 0; b < r.fields[f].size && r.fields[f].offset + b < sizeof(written); b++)
      written[r.fields[f].offset + b]++;
  }
  ck_assert_int_eq(flights, 1);
  for(size_t b = 0; b < offsetof(struct mf_stream_params, evict_first) + sizeof(int32_t); b++)
    ck_assert_msg(written[b] == 1, "byte %zu of the parameters is written %d times", b, written[b]);
}
END_TEST

/* What an engine passes for routing is in the recipe, which then is one of version 2. */
START_TEST(given_routing_has_fields_of_its_own)
{
  const struct device_info dev = device("h200");
  struct mf_problem p = problem("qwen3.5-35b-a3b");
  struct schedule sched = {.family = &family_batch};
  for(int given = 0; given < 2; given++) {
    struct mf_recipe r;
    struct error err = {MF_OK, ""};
    int ids = 0, weights = 0;
    if(given) {
      p.score = MF_SCORE_GIVEN;
      p.renormalize = 0;
    }
    family_batch.default_schedule(&p, 16, &dev, &sched);
    ck_assert_int_eq(family_batch.recipe(&p, &sched, &dev, &r, &err), MF_OK);
    ck_assert_int_eq(recipe_validate(&r, sizeof(r)), MF_OK);
    ck_assert_uint_eq(r.version, given ? 2u : 1u);
    for(uint32_t f = 0; f < r.nfields; f++) {
      ids += r.fields[f].source == MF_SRC_IDS && r.fields[f].offset == offsetof(struct mf_stream_params, logits);
      weights += r.fields[f].source == MF_SRC_WEIGHTS && r.fields[f].offset == offsetof(struct mf_stream_params, bias);
    }
    ck_assert_int_eq(ids, given);
    ck_assert_int_eq(weights, given);
  }
}
END_TEST

START_TEST(the_cost_model_orders_what_is_known)
{
  const struct device_info dev = device("h200");
  const struct mf_problem p = problem("qwen3.5-35b-a3b");
  struct schedule two = {.family = &family_batch}, four = {.family = &family_batch};
  double sixteen, more;
  family_batch.default_schedule(&p, 16, &dev, &two);
  family_batch.default_schedule(&p, 32, &dev, &four);
  sixteen = family_batch.predict_us(&p, &two, &dev, 16, 102);
  more = family_batch.predict_us(&p, &four, &dev, 32, 163);
  ck_assert(sixteen > 70 && sixteen < 100);  /* the prototype: 80 */
  ck_assert(more > 120 && more < 170);       /* 147 */
  ck_assert(family_batch.predict_us(&p, &four, &dev, 16, 102) > sixteen); /* groups that there are no tokens for cost something */
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("family_batch");
  TCase *tc = tcase_create("all");
  SRunner *runner;
  int failed;
  tcase_add_loop_test(tc, host_and_kernel_agree, 0, ROWS(compiled));
  tcase_add_loop_test(tc, odd_shapes_agree, 0, ROWS(odd));
  tcase_add_loop_test(tc, variants_agree, 0, ROWS(variants));
  tcase_add_test(tc, what_is_refused);
  tcase_add_test(tc, schedules_that_are_refused);
  tcase_add_loop_test(tc, registers_suffice, 0, 9);
  tcase_add_test(tc, the_down_phase_is_capped_from_its_beginning_or_not_at_all);
  tcase_add_test(tc, buckets_are_groups);
  tcase_add_test(tc, recipes_are_valid);
  tcase_add_test(tc, parameters_are_complete);
  tcase_add_test(tc, given_routing_has_fields_of_its_own);
  tcase_add_test(tc, the_cost_model_orders_what_is_known);
  tcase_set_timeout(tc, 120);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? 0 : 1;
}
