/* test_emu_given.c - variants of the operator on the emulated device, each against the reference, on one workspace: what the engine has routed (ids and
 * weights of the call instead of logits; ids are repeated or missing; experts of other ranks, zero experts), shared experts, with gates and without, clamps and
 * slopes of the activation, weights on the input.
 * Kernels that are wrong in one place must be found. (What the router itself makes of difficult ids is tested bit by bit in test_emu_routing.c.) */
#include "emu_fixture.h"

#define TOKENS_MAX 8
#define SCALING 1.5f

#define BASE .hidden = 1024, .groups = 1, .groups_kept = 1
#define ALL(n) .experts = n, .expert_count = n
static const struct row {
  const char *name;
  struct mf_problem problem;
} rows[] = {
    {"given 16/4", {BASE, ALL(16), .top_k = 4, .intermediate = 64, .score = MF_SCORE_GIVEN}},
    {"given 12+4/6 experts 4..7", {BASE, .experts = 12, .expert_begin = 4, .expert_count = 4, .zero_experts = 4, .top_k = 6, .intermediate = 48, .score = MF_SCORE_GIVEN}},
    {"given 6/1", {BASE, ALL(6), .top_k = 1, .intermediate = 32, .score = MF_SCORE_GIVEN}},
    {"softmax 32/4, one gated shared expert", {BASE, ALL(32), .top_k = 4, .intermediate = 128, .renormalize = 1, .shared_experts = 1 + MF_SHARED_GATED}},
    {"sigmoid 64/8, bias, experts 32..63, two shared experts",
     {BASE, .experts = 64, .expert_begin = 32, .expert_count = 32, .top_k = 8, .intermediate = 48, .intermediate_offset = 96, .score = MF_SCORE_SIGMOID, .select_bias = 1, .renormalize = 1,
      .logits_dtype = MF_DTYPE_F32, .shared_experts = 2}},
    {"given 8/2, three gated shared experts, f32", {BASE, ALL(8), .top_k = 2, .intermediate = 32, .score = MF_SCORE_GIVEN, .logits_dtype = MF_DTYPE_F32, .shared_experts = 3 + MF_SHARED_GATED}},
    {"softmax 16/2, limit 0.5, alpha 1.702", {BASE, ALL(16), .top_k = 2, .intermediate = 80, .intermediate_offset = 80, .renormalize = 1, .swiglu_limit = 0.5f, .swiglu_alpha = 1.702f}},
    {"sigmoid 16/1 on the input, one shared expert", {BASE, ALL(16), .top_k = 1, .intermediate = 64, .score = MF_SCORE_SIGMOID, .weight_on_input = 1, .shared_experts = 1}},
    {"given 12/3 on the input, experts 6..11, limit 10, ue8m0",
     {BASE, .experts = 12, .expert_begin = 6, .expert_count = 6, .top_k = 3, .intermediate = 32, .score = MF_SCORE_GIVEN, .weight_on_input = 1, .swiglu_limit = 10, .act_scale = MF_ACT_SCALE_UE8M0}},
};
#define ROWS ((int)(sizeof(rows) / sizeof(rows[0])))
enum { GIVEN = 0, GATED = 3, CLAMPED = 6, ON_INPUT = 7 };

/* Of given ids, ties names experts twice; neg_inf has tokens with fewer and one without any, and a gate that is closed. */
static const struct test_case cases[] = {
    {1, ROUTING_UNIFORM, CASE_NORMAL, 1}, {2, ROUTING_TIES, CASE_NORMAL, 2},  {3, ROUTING_UNIFORM, CASE_NEG_INF, 3}, {5, ROUTING_TIES, CASE_NEG_INF, 4},
    {8, ROUTING_ZIPF, CASE_NORMAL, 5},    {3, ROUTING_ZIPF, CASE_HUGE_SCALE, 8}, {2, ROUTING_UNIFORM, CASE_TINY_SCALE, 9},     {1, ROUTING_TIES, CASE_NEG_INF, 6}, {8, ROUTING_TIES, CASE_NORMAL, 7},
};
#define CASES ((int)(sizeof(cases) / sizeof(cases[0])))

static void open_row(struct emu_subject *s, const struct row *row, int unit_features, const char *templates)
{
  struct mf_problem *p = &s->problem;
  memset(s, 0, sizeof(*s));
  *p = row->problem;
  p->struct_size = sizeof(*p);
  s->emulation.info = emu_device_of(18);
  s->sched.family = &family_stream;
  family_stream.default_schedule(p, 3, &s->emulation.info, &s->sched);
  emu_set_knob(&s->sched, "unit_features", unit_features);
  emu_open(s, templates, TOKENS_MAX, SCALING);
}

/* With whole units, then with half ones. */
START_TEST(the_whole_operator)
{
  const struct row *row = &rows[_i % ROWS];
  const int unit_features = _i < ROWS ? 8 : 4;
  struct emu_subject s;
  struct emu_outcome outcome;
  open_row(&s, row, unit_features, "templates");
  emu_run(&s, SCALING, cases, CASES, 2, (uint64_t)_i + 1, &outcome);
  ck_assert_msg(outcome.passed, "%s, units of %d: %s", row->name, unit_features, outcome.text);
  emu_close(&s);
}
END_TEST

/* ---- kernels that are wrong in one place ---- */
static const struct mutant {
  const char *name, *file, *text, *instead;
  int row;
  enum gate gate; /* that refuses it */
} mutants[] = {
    {"weights_of_a_repeated_expert_are_not_added", "stream/route_given.cuh", "mf_exact_add(sum, weight)", "weight", GIVEN, GATE_WEIGHT},
    {"a_repeated_expert_stays", "stream/route_given.cuh", "id = again ? -1 : id;", "", GIVEN, GATE_ROUTING},
    {"rows_of_weights_are_those_of_ids", "stream/route_given.cuh", "token * c.p.weights_pitch", "0 * c.p.weights_pitch", GIVEN, GATE_WEIGHT},
    {"the_gate_is_the_first_token_s", "stream/route.cuh", "(size_t)token * c.p.gate_pitch", "(size_t)0 * c.p.gate_pitch", GATED, GATE_WEIGHT},
    {"a_shared_expert_is_the_first_routed_one", "stream/route.cuh", "(uint32_t)(L::kLocalExperts + c.lane - L::kTopK) : local_index", "(uint32_t)(c.lane - L::kTopK) : local_index", GATED, GATE_H},
    {"up_is_not_clamped_from_below", "stream/handoff.cuh", "up < -kLimit ? -kLimit : up", "up", CLAMPED, GATE_H},
    {"alpha_is_forgotten", "stream/handoff.cuh", "hw::fast_exp(-Shape::kSwigluAlpha * gate)", "hw::fast_exp(-gate)", CLAMPED, GATE_H},
    {"weights_on_the_input_count_again", "stream/handoff.cuh", "L::Shape::kWeightOnInput ? 1.0f : c.sm", "c.sm", ON_INPUT, GATE_Y_GIVEN_H},
    {"every_cta_begins_with_the_first_shared_expert", "stream/route.cuh", "local && slot == c.cta / L::kUnits", "local && slot == 0", GATED, GATE_H},
};
#define MUTANTS ((int)(sizeof(mutants) / sizeof(mutants[0])))

/* Copies the templates to 'folder' and changes one of them. */
static void make_mutant(const struct mutant *m, const char *folder)
{
  char path[600], text[65536], *found;
  size_t length;
  FILE *f;
  emu_shell("cp -r templates '%s'", folder);
  snprintf(path, sizeof(path), "%s/%s", folder, m->file);
  f = fopen(path, "r");
  ck_assert_ptr_nonnull(f);
  length = fread(text, 1, sizeof(text) - 1, f);
  fclose(f);
  text[length] = '\0';
  found = strstr(text, m->text);
  ck_assert_msg(found != NULL && strstr(found + 1, m->text) == NULL, "%s: the text must occur once", m->name);
  f = fopen(path, "w");
  ck_assert_ptr_nonnull(f);
  fprintf(f, "%.*s%s%s", (int)(found - text), text, m->instead, found + strlen(m->text));
  ck_assert_int_eq(fclose(f), 0);
}

START_TEST(mutants_are_found)
{
  const struct mutant *m = &mutants[_i];
  struct emu_subject s;
  struct emu_outcome outcome;
  char folder[512];
  snprintf(folder, sizeof(folder), "%s/mutant-%d", emu_folder, _i);
  emu_compile_fast();
  make_mutant(m, folder);
  open_row(&s, &rows[m->row], 8, folder);
  emu_run(&s, SCALING, cases, CASES, 2, 1, &outcome);
  ck_assert_msg(!outcome.passed && (outcome.finding != EMU_NONE || outcome.gate == m->gate), "%s: expected gate %s, got %s", m->name, gate_name(m->gate),
                outcome.passed ? "no finding" : outcome.text);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_given");
  TCase *tc = tcase_create("operator"), *wrong = tcase_create("mutants");
  tcase_add_loop_test(tc, the_whole_operator, 0, 2 * ROWS);
  tcase_set_timeout(tc, 600);
  tcase_add_loop_test(wrong, mutants_are_found, 0, MUTANTS);
  tcase_set_timeout(wrong, 600);
  suite_add_tcase(suite, tc);
  suite_add_tcase(suite, wrong);
  return emu_suite_run(suite);
}
