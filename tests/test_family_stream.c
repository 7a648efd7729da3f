/* test_family_stream.c - the kernel family on the host's side against the kernel itself: compiles every served shape with NVRTC (no GPU needed) and
 * compares the exported metadata with the host's formulas; the recipe is checked field by field. Needs NVRTC: without it the test fails. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compile.h"
#include "emit.h"
#include "family_fixture.h"
#include "family_stream.h"
#include "limits.h"
#include "recipe.h"
#include "space.h"
#include "spec.h"
#include "stream/params.h"

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
  ck_assert_msg(compile_artifact(nvrtc, &closure, "sm_90a", COMPILE_PLAIN, art, &err) == MF_OK, "%s\n%s", err.text, art->log != NULL ? art->log : "");
  closure_free(&closure);
  nvrtc_close(nvrtc);
}

static const struct {
  const char *shape, *device;
  int ring, loaders;  /* 0: the default's */
  int pdl, unit;
} compiled[] = {
    {"qwen3.5-35b-a3b", "h200", 0, 0, 0, 8},   {"qwen3.5-122b-a10b", "h200", 0, 0, 0, 8}, {"glm-5-tp8", "h200", 0, 0, 0, 8}, {"deepseek-v3.1-tp8", "h200", 0, 0, 0, 8},
    {"qwen3.5-35b-a3b", "h200", 6, 2, 0, 8},   {"deepseek-v3.1-tp8", "h200", 4, 2, 0, 8}, {"tiny", "h200", 0, 0, 0, 8},      {"qwen3.5-35b-a3b", "h100-pcie", 0, 0, 0, 8},
    {"qwen3-30b-a3b", "h200", 0, 0, 0, 8},     {"qwen3-235b-a22b-tp4", "h200", 0, 0, 0, 8}, {"minimax-m2-tp2", "h200", 0, 0, 0, 8}, {"glm-5-tp8", "h100-pcie", 0, 0, 0, 8},
    {"qwen3.5-122b-a10b", "h100-pcie", 0, 0, 0, 8}, {"deepseek-v3.1-tp8", "h100-pcie", 0, 0, 0, 8}, {"qwen3.5-35b-a3b", "h20", 0, 0, 0, 8}, {"qwen3-235b-a22b-tp4", "h20", 0, 0, 0, 8},
    {"qwen3.5-35b-a3b", "h200", 0, 0, 1, 8},   {"qwen3.5-122b-a10b", "h200", 0, 0, 1, 8}, {"glm-5-tp8", "h200", 0, 0, 1, 8}, {"deepseek-v3.1-tp8", "h200", 0, 0, 1, 8},
    {"glm-5-tp8", "h200", 0, 0, 0, 4},         {"deepseek-v3.1-tp8", "h200", 4, 2, 0, 4}, {"kimi-k2-tp8", "h200", 0, 0, 0, 4},    {"minimax-m2-tp2", "h200", 6, 2, 0, 4},
    {"qwen3-235b-a22b-tp4", "h200", 0, 0, 0, 4}, {"qwen3.5-35b-a3b", "h200", 0, 0, 1, 4}, {"tiny", "h200", 0, 0, 0, 4},
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
  set(&sched, "pdl", compiled[_i].pdl);
  set(&sched, "unit_features", compiled[_i].unit);
  compile(&p, &sched, &dev, &art);
  ck_assert_msg(cubin_read_symbol(art.cubin, art.cubin_bytes, "mf_meta", &meta, sizeof(meta), &err) == MF_OK, "%s", err.text);
  ck_assert_msg(family_stream.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why) == MF_OK, "%s", why.detail);
  ck_assert_uint_eq(meta.pdl, (unsigned)compiled[_i].pdl);
  ck_assert_uint_eq(meta.unit_features, (unsigned)compiled[_i].unit);
  ck_assert_msg(limits_after_compile(&p, &sched, &dev, &art, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  meta.shared_bytes += 1024; /* the comparison can fail */
  ck_assert_int_eq(family_stream.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why), MF_REJECTED);
  ck_assert_str_eq(why.rule, "metadata");
  ck_assert_ptr_nonnull(strstr(why.detail, "shared_bytes"));
  artifact_free(&art);
}
END_TEST

/* Sizes of ranks: N, where the first feature lies in its 128-block, K. What each is there for shows in the last columns. */
static const struct {
  const char *device;
  int hidden, intermediate, offset;
  int down_rows, down_ctas, down_kblocks; /* of the metadata */
} sizes[] = {
    {"h200", 2048, 96, 96, 16, 128, 2},   {"h200", 2048, 192, 64, 16, 128, 2},  {"h200", 4096, 192, 0, 32, 128, 2},  {"h200", 6144, 320, 64, 48, 128, 2},
    {"h200", 2048, 64, 64, 16, 128, 1},   {"h200", 2560, 160, 32, 24, 107, 2},  {"h200", 2560, 640, 0, 24, 107, 5},  {"h200", 4096, 1408, 0, 32, 128, 4},
    {"h200", 4096, 704, 64, 32, 128, 3},  {"h200", 4096, 352, 96, 32, 128, 4},  {"h200", 4096, 176, 48, 32, 128, 2}, {"h200", 5120, 1536, 0, 40, 128, 3},
    {"h200", 3072, 1536, 0, 24, 128, 4},  {"h200", 5120, 576, 64, 40, 128, 3},  {"h200", 2688, 928, 0, 24, 112, 4}, {"h200", 4224, 128, 0, 32, 132, 1},
    {"h200", 3584, 256, 0, 32, 112, 2},   {"h200", 7168, 80, 112, 56, 128, 2},  {"h200", 8192, 16, 0, 64, 128, 1},   {"h200", 1024, 384, 0, 8, 128, 3},
    {"h200", 2048, 1536, 0, 16, 128, 6},  {"h20", 4096, 384, 0, 56, 74, 2},     {"h100-pcie", 6144, 256, 0, 56, 110, 2},
};
#define SIZES ((int)(sizeof(sizes) / sizeof(sizes[0])))

static struct mf_problem problem_of_size(int hidden, int intermediate, int offset)
{
  struct mf_problem p = problem("qwen3.5-35b-a3b");
  p.hidden = hidden;
  p.intermediate = intermediate;
  p.intermediate_offset = offset;
  return p;
}

/* With whole units, then some with half ones. */
START_TEST(sizes_without_a_common_divisor)
{
  const int at = _i < SIZES ? _i : 3 * (_i - SIZES), unit = _i < SIZES ? 8 : 4;
  const struct device_info dev = device(sizes[at].device);
  const struct mf_problem p = problem_of_size(sizes[at].hidden, sizes[at].intermediate, sizes[at].offset);
  struct schedule sched = {.family = &family_stream};
  struct artifact art = {0};
  struct verdict why = {0};
  struct error err = {MF_OK, ""};
  struct mf_stream_meta meta;
  ck_assert_msg(family_stream.serves(&p, 8, &dev, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  family_stream.default_schedule(&p, 1, &dev, &sched);
  set(&sched, "unit_features", unit);
  compile(&p, &sched, &dev, &art);
  ck_assert_msg(cubin_read_symbol(art.cubin, art.cubin_bytes, "mf_meta", &meta, sizeof(meta), &err) == MF_OK, "%s", err.text);
  ck_assert_msg(family_stream.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why) == MF_OK, "%s", why.detail);
  ck_assert_msg(limits_after_compile(&p, &sched, &dev, &art, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  ck_assert_int_eq((int)meta.down_rows, sizes[at].down_rows);
  ck_assert_int_eq((int)meta.down_ctas, sizes[at].down_ctas);
  ck_assert_int_eq((int)meta.down_kblocks, sizes[at].down_kblocks);
  artifact_free(&art);
}
END_TEST

START_TEST(sizes_that_are_refused)
{
  static const struct {
    const char *device;
    int hidden, intermediate, offset;
    const char *rule;
    long nearest;
  } rows[] = {
      {"h200", 2880, 256, 0, "hidden", 2944},       {"h200", 896, 256, 0, "hidden", 1024},     {"h200", 9216, 256, 0, "hidden", 8192},
      {"h200", 2048, 24, 0, "intermediate", 32},    {"h200", 2048, 8, 0, "intermediate", 16},  {"h200", 2048, 64, 8, "intermediate", 16},
      {"h20", 7168, 256, 0, "down_rows", -1},       {"h20", 5120, 256, 0, "down_rows", -1},    {"h100-pcie", 8192, 256, 0, "down_rows", -1},
      {"h200", 5120, 2304, 0, "memory", -1},
  };
  for(size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    const struct device_info dev = device(rows[i].device);
    const struct mf_problem p = problem_of_size(rows[i].hidden, rows[i].intermediate, rows[i].offset);
    struct verdict why = {0};
    ck_assert_int_eq(family_stream.serves(&p, 1, &dev, &why), MF_REJECTED);
    ck_assert_str_eq(why.rule, rows[i].rule);
    ck_assert_int_eq(why.nearest, rows[i].nearest);
  }
}
END_TEST

/* Routers: columns per lane of 1 to 32, keys of either kind, policies, other ranks' experts. K = 2048, N = 256. */
static const struct {
  int experts, top_k, score, bias, renormalize, f32, groups, kept, begin, count, zero, shared;
} routers[] = {
    {8, 2, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 0, 8, 0, 0},
    {160, 8, MF_SCORE_SOFTMAX, 0, 0, 0, 1, 1, 0, 160, 0, 0},
    {512, 10, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 64, 64, 0, 0},
    {1024, 22, MF_SCORE_SOFTMAX, 0, 0, 0, 1, 1, 0, 1024, 0, 0},
    {128, 4, MF_SCORE_TOPK_SOFTMAX, 0, 0, 1, 1, 1, 0, 128, 0, 0},
    {16, 1, MF_SCORE_SIGMOID, 0, 0, 0, 1, 1, 0, 16, 0, 0},
    {384, 8, MF_SCORE_SIGMOID, 1, 1, 0, 1, 1, 0, 384, 0, 0},
    {896, 16, MF_SCORE_SIGMOID, 1, 1, 0, 1, 1, 0, 896, 0, 0},
    {1024, 22, MF_SCORE_SIGMOID, 1, 1, 1, 1, 1, 0, 1024, 0, 0},
    {1024, 8, MF_SCORE_SIGMOID, 1, 1, 1, 32, 9, 0, 1024, 0, 0},
    {384, 6, MF_SCORE_SQRT_SOFTPLUS, 1, 1, 0, 1, 1, 0, 384, 0, 0},
    {64, 8, MF_SCORE_SOFTMAX, 1, 1, 0, 1, 1, 0, 64, 0, 0},
    {512, 12, MF_SCORE_SOFTMAX, 1, 0, 1, 1, 1, 128, 128, 256, 0},
    {256, 8, MF_SCORE_GIVEN, 0, 0, 0, 1, 1, 0, 256, 0, 0},
    {1000, 22, MF_SCORE_GIVEN, 0, 0, 0, 1, 1, 500, 250, 24, 0},
    {256, 8, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 0, 256, 0, 1 + MF_SHARED_GATED},
    {256, 8, MF_SCORE_SIGMOID, 1, 1, 1, 8, 4, 64, 64, 0, 2 + MF_SHARED_GATED},
    {512, 20, MF_SCORE_GIVEN, 0, 0, 0, 1, 1, 0, 512, 0, 2},
};
#define ROUTERS ((int)(sizeof(routers) / sizeof(routers[0])))

static struct mf_problem problem_of_router(int experts, int top_k, int score)
{
  struct mf_problem p;
  problem_init(&p);
  p.experts = p.expert_count = experts;
  p.top_k = top_k;
  p.hidden = 2048;
  p.intermediate = 256;
  p.score = score;
  p.renormalize = 1;
  return p;
}

START_TEST(routers_of_every_kind)
{
  const struct device_info dev = device("h200");
  struct mf_problem p = problem_of_router(routers[_i].experts, routers[_i].top_k, routers[_i].score);
  struct schedule sched = {.family = &family_stream};
  struct artifact art = {0};
  struct verdict why = {0};
  struct error err = {MF_OK, ""};
  struct mf_stream_meta meta;
  p.select_bias = routers[_i].bias;
  p.renormalize = routers[_i].renormalize;
  p.logits_dtype = routers[_i].f32 ? MF_DTYPE_F32 : MF_DTYPE_BF16;
  p.groups = routers[_i].groups;
  p.groups_kept = routers[_i].kept;
  p.expert_begin = routers[_i].begin;
  p.expert_count = routers[_i].count;
  p.zero_experts = routers[_i].zero;
  p.shared_experts = routers[_i].shared;
  ck_assert_msg(problem_validate(&p, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(family_stream.serves(&p, 8, &dev, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  family_stream.default_schedule(&p, 1, &dev, &sched);
  compile(&p, &sched, &dev, &art);
  ck_assert_msg(cubin_read_symbol(art.cubin, art.cubin_bytes, "mf_meta", &meta, sizeof(meta), &err) == MF_OK, "%s", err.text);
  ck_assert_msg(family_stream.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why) == MF_OK, "%s", why.detail);
  ck_assert_msg(limits_after_compile(&p, &sched, &dev, &art, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  meta.expert_begin += 1;
  ck_assert_int_eq(family_stream.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why), MF_REJECTED);
  ck_assert_ptr_nonnull(strstr(why.detail, "expert_begin"));
  artifact_free(&art);
}
END_TEST

/* What the finalisers do between the projections. */
static const struct {
  float limit, alpha;
  int on_input, shared;
} activations[] = {{7, 1.702f, 0, 0}, {10, 0, 0, 1 + MF_SHARED_GATED}, {0, 0, 1, 1}, {0.1f, 0.3f, 1, 0}};
#define ACTIVATIONS ((int)(sizeof(activations) / sizeof(activations[0])))

/* With whole units, then with half ones. */
START_TEST(activations_of_every_kind)
{
  const int at = _i % ACTIVATIONS;
  const struct device_info dev = device("h200");
  struct mf_problem p = problem_of_router(128, 4, MF_SCORE_SIGMOID);
  struct schedule sched = {.family = &family_stream};
  struct artifact art = {0};
  struct verdict why = {0};
  struct error err = {MF_OK, ""};
  struct mf_stream_meta meta;
  p.swiglu_limit = activations[at].limit;
  p.swiglu_alpha = activations[at].alpha;
  p.weight_on_input = activations[at].on_input;
  p.shared_experts = activations[at].shared;
  ck_assert_msg(family_stream.serves(&p, 8, &dev, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  family_stream.default_schedule(&p, 1, &dev, &sched);
  set(&sched, "unit_features", _i < ACTIVATIONS ? 8 : 4);
  compile(&p, &sched, &dev, &art);
  ck_assert_msg(cubin_read_symbol(art.cubin, art.cubin_bytes, "mf_meta", &meta, sizeof(meta), &err) == MF_OK, "%s", err.text);
  ck_assert_msg(family_stream.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why) == MF_OK, "%s", why.detail);
  ck_assert_msg(limits_after_compile(&p, &sched, &dev, &art, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  meta.swiglu_limit += 1;
  ck_assert_int_eq(family_stream.check_meta(&meta, sizeof(meta), &p, &sched, &dev, &why), MF_REJECTED);
  ck_assert_ptr_nonnull(strstr(why.detail, "swiglu_limit"));
  artifact_free(&art);
}
END_TEST

START_TEST(routers_that_are_refused)
{
  static const struct {
    int experts, top_k, score, bias, f32, groups, zero, shared, on_input;
    const char *rule;
    long nearest;
  } rows[] = {
      {60, 4, MF_SCORE_SOFTMAX, 0, 0, 1, 0, 0, 0, "experts", 64},       {62, 4, MF_SCORE_SOFTMAX, 0, 1, 1, 0, 0, 0, "experts", 64},
      {4, 2, MF_SCORE_SOFTMAX, 0, 0, 1, 0, 0, 0, "experts", 8},         {1024, 2, MF_SCORE_SOFTMAX, 0, 0, 1, 8, 0, 0, "experts", 1024},
      {64, 23, MF_SCORE_SOFTMAX, 0, 0, 1, 0, 0, 0, "top_k", 22},        {64, 4, MF_SCORE_TOPK_SOFTMAX, 1, 0, 1, 0, 0, 0, "router", MF_SCORE_SOFTMAX},
      {160, 4, MF_SCORE_SIGMOID, 0, 0, 8, 0, 0, 0, "groups", 1},        {192, 4, MF_SCORE_SIGMOID, 0, 0, 3, 0, 0, 0, "groups", 1},
      {64, 20, MF_SCORE_SOFTMAX, 0, 0, 1, 0, 3, 0, "top_k", 19},        {64, 1, MF_SCORE_SIGMOID, 0, 0, 1, 0, 1 + MF_SHARED_GATED, 1, "feature", 0},
      {64, 4, MF_SCORE_GIVEN, 1, 0, 1, 0, 0, 0, "router", MF_SCORE_SOFTMAX},
  };
  const struct device_info dev = device("h200");
  for(size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    struct mf_problem p = problem_of_router(rows[i].experts, rows[i].top_k, rows[i].score);
    struct verdict why = {0};
    p.select_bias = rows[i].bias;
    p.logits_dtype = rows[i].f32 ? MF_DTYPE_F32 : MF_DTYPE_BF16;
    p.groups = rows[i].groups;
    p.groups_kept = rows[i].groups > 1 ? 2 : 1;
    p.zero_experts = rows[i].zero;
    p.shared_experts = rows[i].shared;
    p.weight_on_input = rows[i].on_input;
    ck_assert_msg(family_stream.serves(&p, 8, &dev, &why) == MF_REJECTED, "row %zu is served", i);
    ck_assert_str_eq(why.rule, rows[i].rule);
    ck_assert_int_eq(why.nearest, rows[i].nearest);
  }
}
END_TEST

/* One source for one meaning: softmax over the chosen is the softmax that is renormalised. */
START_TEST(softmax_over_the_chosen_is_renormalised_softmax)
{
  const struct device_info dev = device("h200");
  const struct mf_problem p = problem_of_router(128, 4, MF_SCORE_SOFTMAX);
  struct mf_problem q = problem_of_router(128, 4, MF_SCORE_TOPK_SOFTMAX);
  struct schedule sched = {.family = &family_stream};
  struct artifact a = {0}, b = {0};
  struct error err = {MF_OK, ""};
  q.renormalize = 0;
  family_stream.default_schedule(&p, 1, &dev, &sched);
  ck_assert_int_eq(emit_source(&p, "test", &sched, &dev, &a, &err), MF_OK);
  ck_assert_int_eq(emit_source(&q, "test", &sched, &dev, &b, &err), MF_OK);
  ck_assert_str_eq(a.source, b.source);
  artifact_free(&a);
  artifact_free(&b);
}
END_TEST

/* Only what an older runtime cannot read says that it cannot. */
START_TEST(recipes_of_given_experts_are_of_version_2)
{
  const struct device_info dev = device("h200");
  struct mf_problem p = problem_of_router(128, 4, MF_SCORE_SOFTMAX);
  struct schedule sched = {.family = &family_stream};
  struct mf_recipe logits, given;
  struct error err = {MF_OK, ""};
  family_stream.default_schedule(&p, 1, &dev, &sched);
  ck_assert_int_eq(family_stream.recipe(&p, &sched, &dev, &logits, &err), MF_OK);
  p.score = MF_SCORE_GIVEN;
  ck_assert_int_eq(family_stream.recipe(&p, &sched, &dev, &given, &err), MF_OK);
  ck_assert_uint_eq(logits.version, 1);
  ck_assert_uint_eq(given.version, 2);
  ck_assert_int_eq(recipe_validate(&given, sizeof(given)), MF_OK);
  given.version = 1;
  ck_assert_int_eq(recipe_validate(&given, sizeof(given)), MF_ERR_CORRUPT);
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
    ck_assert_uint_eq(r->flags, MF_RECIPE_COOPERATIVE); /* and no candidate is a dependent launch */
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

/* Dependent launch is in the source, in the recipe's flags and in the names; its absence is in no name. */
START_TEST(dependent_launch)
{
  const struct device_info dev = device("h200");
  const struct mf_problem p = problem("qwen3.5-35b-a3b");
  struct schedule sched = {.family = &family_stream}, back;
  struct verdict why = {0};
  struct error err = {MF_OK, ""};
  for(int pdl = 0; pdl < 2; pdl++) {
    struct artifact art = {0};
    struct mf_recipe r;
    char name[NAME_MAX_LEN * 2], line[64];
    family_stream.default_schedule(&p, 1, &dev, &sched);
    set(&sched, "pdl", pdl);
    ck_assert_int_eq(family_stream.constrain(&p, &sched, &dev, &why), MF_OK);
    ck_assert_int_eq(family_stream.recipe(&p, &sched, &dev, &r, &err), MF_OK);
    ck_assert_uint_eq(r.flags, pdl ? MF_RECIPE_PDL : MF_RECIPE_COOPERATIVE);
    ck_assert_uint_eq(r.min_sms, (unsigned)dev.sms);
    ck_assert_int_eq(recipe_validate(&r, sizeof(r)), MF_OK);
    ck_assert_int_eq(emit_source(&p, "test", &sched, &dev, &art, &err), MF_OK);
    snprintf(line, sizeof(line), "static constexpr int kPdl = %d;", pdl);
    ck_assert_ptr_nonnull(strstr(art.source, line));
    ck_assert_int_eq(strstr(art.name, "-pd") != NULL, pdl);
    schedule_name(&sched, name, sizeof(name));
    ck_assert_int_eq(strstr(name, "-pd") != NULL, pdl);
    ck_assert_int_eq(schedule_parse(name, &back, &err), MF_OK);
    ck_assert(schedule_equal(&sched, &back));
    artifact_free(&art);
  }
  set(&sched, "pdl", 2);
  ck_assert_int_eq(family_stream.constrain(&p, &sched, &dev, &why), MF_REJECTED);
  ck_assert_str_eq(why.rule, "pdl");
}
END_TEST

/* Half units are in the source, in the boxes of w13 and in the names; whole ones are in no name. */
START_TEST(half_units)
{
  static const struct {
    const char *shape;
    int unit;
    unsigned kblocks; /* of a box of w13 */
  } rows[] = {{"glm-5-tp8", 8, 8}, {"glm-5-tp8", 4, 16}, {"tiny", 8, 8}, {"tiny", 4, 16}};
  const struct device_info dev = device("h200");
  struct schedule sched = {.family = &family_stream}, back;
  struct verdict why = {0};
  struct error err = {MF_OK, ""};
  for(size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    const struct mf_problem p = problem(rows[i].shape);
    struct artifact art = {0};
    struct mf_recipe r;
    char name[NAME_MAX_LEN * 2], line[64];
    family_stream.default_schedule(&p, 1, &dev, &sched);
    set(&sched, "unit_features", rows[i].unit);
    ck_assert_int_eq(family_stream.constrain(&p, &sched, &dev, &why), MF_OK);
    ck_assert_int_eq(family_stream.recipe(&p, &sched, &dev, &r, &err), MF_OK);
    ck_assert_int_eq(recipe_validate(&r, sizeof(r)), MF_OK);
    ck_assert_uint_eq(r.maps[0].box[1], (unsigned)rows[i].unit);
    ck_assert_uint_eq(r.maps[0].box[4], rows[i].kblocks);
    ck_assert_uint_eq(r.maps[0].dim[3], (uint64_t)problem_stored_experts(&p) * 2 * (uint64_t)(p.intermediate / rows[i].unit));
    ck_assert_uint_eq(r.maps[0].stride[2].value, (unsigned)rows[i].unit);
    ck_assert_int_eq(emit_source(&p, "test", &sched, &dev, &art, &err), MF_OK);
    snprintf(line, sizeof(line), "static constexpr int kUnitFeatures = %d;", rows[i].unit);
    ck_assert_ptr_nonnull(strstr(art.source, line));
    ck_assert_int_eq(strstr(art.name, "-uf") != NULL, rows[i].unit == 4);
    schedule_name(&sched, name, sizeof(name));
    ck_assert_int_eq(strstr(name, "-uf4") != NULL, rows[i].unit == 4);
    ck_assert_int_eq(schedule_parse(name, &back, &err), MF_OK);
    ck_assert(schedule_equal(&sched, &back));
    ck_assert_int_eq(family_stream.offers(&p, &sched, &dev), rows[i].unit == 8 || p.hidden >= 4096); /* where a unit is small, half of one is not tried */
    set(&sched, "unit_features", 2);
    ck_assert_int_eq(family_stream.constrain(&p, &sched, &dev, &why), MF_REJECTED);
    ck_assert_str_eq(why.rule, "unit_features");
    set(&sched, "unit_features", rows[i].unit);
    set(&sched, "static_rounds", 0);
    set(&sched, "ticket_lookahead", rows[i].unit); /* eight turns */
    ck_assert_int_eq(family_stream.constrain(&p, &sched, &dev, &why), MF_OK);
    set(&sched, "ticket_lookahead", rows[i].unit + 1);
    ck_assert_int_eq(family_stream.constrain(&p, &sched, &dev, &why), MF_REJECTED);
    ck_assert_str_eq(why.rule, "ticket_lookahead");
    ck_assert_int_eq((int)why.nearest, rows[i].unit);
    artifact_free(&art);
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
  tcase_add_loop_test(tc, sizes_without_a_common_divisor, 0, SIZES + (SIZES + 2) / 3);
  tcase_add_test(tc, sizes_that_are_refused);
  tcase_add_loop_test(tc, routers_of_every_kind, 0, ROUTERS);
  tcase_add_loop_test(tc, activations_of_every_kind, 0, 2 * ACTIVATIONS);
  tcase_add_test(tc, routers_that_are_refused);
  tcase_add_test(tc, softmax_over_the_chosen_is_renormalised_softmax);
  tcase_add_test(tc, recipes_of_given_experts_are_of_version_2);
  tcase_add_loop_test(tc, recipes_are_valid, 0, 5);
  tcase_add_test(tc, knobs_reach_the_parameters);
  tcase_add_test(tc, dependent_launch);
  tcase_add_test(tc, half_units);
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
