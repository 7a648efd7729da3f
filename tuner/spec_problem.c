/* spec_problem.c - struct mf_problem: neutral values, consistency, canonical text and key.
 *
 * One table names every field with its range; the canonical text is that table printed, so that a field cannot be forgotten in the key.
 * The rules between fields are a second table. What a kernel family can serve is none of its business: anything mathematically sound whose
 * rows are whole 16-byte pieces is legal here. */
#include "spec_internal.h"

#include "sha256.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

struct field {
  const char *name;
  size_t offset;
  double low, high;
  int step; /* 0: a float */
};

#define INT_FIELD(member, low, high, step) {#member, offsetof(struct mf_problem, member), low, high, step}
#define FLOAT_FIELD(member, high) {#member, offsetof(struct mf_problem, member), 0, high, 0}

/* In the order of the canonical text. */
static const struct field fields[] = {
    INT_FIELD(experts, 1, EXPERTS_LIMIT, 1),
    INT_FIELD(top_k, 1, TOP_K_LIMIT, 1),
    INT_FIELD(hidden, SCALE_BLOCK, HIDDEN_LIMIT, SCALE_BLOCK),
    INT_FIELD(intermediate, WEIGHT_STEP, INTERMEDIATE_LIMIT, WEIGHT_STEP),
    INT_FIELD(intermediate_offset, 0, SCALE_BLOCK - 1, 1),
    INT_FIELD(expert_begin, 0, EXPERTS_LIMIT - 1, 1),
    INT_FIELD(expert_count, 1, EXPERTS_LIMIT, 1),
    INT_FIELD(zero_experts, 0, EXPERTS_LIMIT, 1),
    INT_FIELD(score, 0, MF_SCORE_GIVEN, 1),
    INT_FIELD(select_bias, 0, 1, 1),
    INT_FIELD(groups, 1, EXPERTS_LIMIT, 1),
    INT_FIELD(groups_kept, 1, EXPERTS_LIMIT, 1),
    INT_FIELD(renormalize, 0, 1, 1),
    INT_FIELD(weight_on_input, 0, 1, 1),
    INT_FIELD(logits_dtype, 0, MF_DTYPE_F32, 1),
    INT_FIELD(act_scale, 0, MF_ACT_SCALE_UE8M0, 1),
    INT_FIELD(shared_experts, 0, SHARED_LIMIT, 1),
    FLOAT_FIELD(swiglu_limit, 1e6),
    FLOAT_FIELD(swiglu_alpha, 100),
};
#define NFIELDS (sizeof(fields) / sizeof(fields[0]))

static int32_t int_value(const struct mf_problem *problem, const struct field *f)
{
  int32_t value;
  memcpy(&value, (const char *)problem + f->offset, sizeof(value));
  return value;
}

static float float_value(const struct mf_problem *problem, const struct field *f)
{
  float value;
  memcpy(&value, (const char *)problem + f->offset, sizeof(value));
  return value;
}

void problem_init(struct mf_problem *problem)
{
  memset(problem, 0, sizeof(*problem));
  problem->struct_size = (uint32_t)sizeof(*problem);
  problem->groups = 1;
  problem->groups_kept = 1;
}

/* 0 and 1 both mean SiLU, and -0 is 0: one text for one meaning. */
static double canonical_float(const struct mf_problem *problem, const struct field *f)
{
  const double value = (double)float_value(problem, f);
  const bool is_alpha = f->offset == offsetof(struct mf_problem, swiglu_alpha);
  return is_alpha && value == 1 ? 0 : value + 0.0;
}

void problem_text(const struct mf_problem *problem, struct strbuf *out)
{
  for(size_t i = 0; i < NFIELDS; i++)
    if(fields[i].step == 0)
      strbuf_printf(out, "%s=%.9g;", fields[i].name, canonical_float(problem, &fields[i]));
    else
      strbuf_printf(out, "%s=%d;", fields[i].name, int_value(problem, &fields[i]));
}

void problem_key(const struct mf_problem *problem, char key[KEY_LEN])
{
  unsigned char digest[32];
  struct sha256 ctx;
  struct strbuf text;
  strbuf_init(&text, 4096);
  problem_text(problem, &text);
  sha256_init(&ctx);
  sha256_add(&ctx, strbuf_text(&text), text.length);
  sha256_end(&ctx, digest);
  sha256_hex(digest, key);
  strbuf_free(&text);
}

int problem_shared(const struct mf_problem *problem)
{
  return problem->shared_experts & ~MF_SHARED_GATED;
}

bool problem_shared_gated(const struct mf_problem *problem)
{
  return (problem->shared_experts & MF_SHARED_GATED) != 0;
}

int problem_ranks(const struct mf_problem *problem)
{
  return problem->top_k + problem_shared(problem);
}

int problem_stored_experts(const struct mf_problem *problem)
{
  return problem->expert_count + problem_shared(problem);
}

int problem_local_expert(const struct mf_problem *problem, int id)
{
  const int shared = id - problem->experts - problem->zero_experts;
  if(id >= problem->expert_begin && id < problem->expert_begin + problem->expert_count)
    return id - problem->expert_begin;
  return shared >= 0 && shared < problem_shared(problem) ? problem->expert_count + shared : -1;
}

double problem_expert_bytes(const struct mf_problem *problem)
{
  return 3.0 * (double)problem->intermediate * (double)problem->hidden;
}

/* ---- consistency ---- */

static bool in_range(const struct mf_problem *problem, const struct field *f, char *text, size_t space)
{
  const bool stepped = f->step > 1;
  double value, nearest;
  if(f->step == 0) {
    value = (double)float_value(problem, f);
    if(value >= f->low && value <= f->high)
      return true;
    snprintf(text, space, "expected a number from %g to %g, got %g", f->low, f->high, value);
    return false;
  }
  value = f->offset == offsetof(struct mf_problem, shared_experts) ? problem_shared(problem) : int_value(problem, f);
  nearest = fmin(fmax(round(value / f->step) * f->step, f->low), f->high);
  if(nearest == value)
    return true;
  if(stepped)
    snprintf(text, space, "expected a multiple of %d from %.0f to %.0f, got %.0f (nearest legal value %.0f)", f->step, f->low, f->high, value,
             nearest);
  else
    snprintf(text, space, "expected an integer from %.0f to %.0f, got %.0f (nearest legal value %.0f)", f->low, f->high, value, nearest);
  return false;
}

static int gcd(int a, int b)
{
  while(b != 0) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/* The divisor of 'n' nearest to 'value'. */
static int nearest_divisor(int n, int value)
{
  if(value < 1 || n < 1)
    return 1;
  if(value > n)
    return n;
  for(int away = 0; away < n; away++) {
    if(value - away >= 1 && n % (value - away) == 0)
      return value - away;
    if(value + away <= n && n % (value + away) == 0)
      return value + away;
  }
  return n;
}

static bool top_k_fits(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected at most %d, the number of experts, got %d (nearest legal value %d)", p->experts, p->top_k, p->experts);
  return p->top_k <= p->experts;
}

static bool logits_fit(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected at most %d beside %d experts (%d logits in all), got %d", EXPERTS_LIMIT - p->experts, p->experts, EXPERTS_LIMIT,
           p->zero_experts);
  return p->experts + p->zero_experts <= EXPERTS_LIMIT;
}

static bool share_is_even(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected a divisor of %d, the number of experts, got %d (nearest legal value %d)", p->experts, p->expert_count,
           nearest_divisor(p->experts, p->expert_count));
  return p->experts % p->expert_count == 0;
}

static bool share_exists(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected a multiple of expert_count = %d below %d, got %d", p->expert_count, p->experts, p->expert_begin);
  return p->expert_begin % p->expert_count == 0 && p->expert_begin < p->experts;
}

static bool groups_divide(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected a divisor of %d, the number of experts, got %d (nearest legal value %d)", p->experts, p->groups,
           nearest_divisor(p->experts, p->groups));
  return p->experts % p->groups == 0;
}

/* A group is scored by its two best experts. */
static bool groups_hold_two(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected groups of at least 2 experts, got %d groups of %d experts in all", p->groups, p->experts);
  return p->groups == 1 || p->experts / p->groups >= 2;
}

static bool groups_without_zero(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected 1 beside zero experts, which belong to no group, got %d", p->groups);
  return p->groups == 1 || p->zero_experts == 0;
}

static bool kept_exist(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected at most %d, the number of groups, got %d (nearest legal value %d)", p->groups, p->groups_kept, p->groups);
  return p->groups_kept <= p->groups;
}

static bool kept_suffice(const struct mf_problem *p, char *text, size_t space)
{
  const int group = p->experts / p->groups;
  snprintf(text, space, "expected enough groups of %d experts for top_k = %d, got %d (nearest legal value %d)", group, p->top_k, p->groups_kept,
           (p->top_k + group - 1) / group);
  return p->groups_kept * group >= p->top_k;
}

static bool gate_has_experts(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected false without shared experts, got true");
  return !problem_shared_gated(p) || problem_shared(p) > 0;
}

/* What the engine has routed is taken as it is. */
static bool given_without_bias(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected no bias beside score given (the engine has routed), got one");
  return p->score != MF_SCORE_GIVEN || p->select_bias == 0;
}

static bool given_without_groups(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected 1 beside score given (the engine has routed), got %d", p->groups);
  return p->score != MF_SCORE_GIVEN || p->groups == 1;
}

static bool given_as_it_is(const struct mf_problem *p, char *text, size_t space)
{
  snprintf(text, space, "expected false beside score given (weights are used as the engine passes them), got true");
  return p->score != MF_SCORE_GIVEN || p->renormalize == 0;
}

/* o = (rank * N) mod 128 for some rank. */
static bool offset_exists(const struct mf_problem *p, char *text, size_t space)
{
  const int step = gcd(p->intermediate, SCALE_BLOCK);
  snprintf(text, space, "expected (rank * %d) mod %d, so a multiple of %d, got %d", p->intermediate, SCALE_BLOCK, step, p->intermediate_offset);
  return p->intermediate_offset % step == 0;
}

/* Each looks at a problem whose fields are in range; later rules may rely on earlier ones of the same table. */
static const struct rule {
  const char *field;
  bool (*holds)(const struct mf_problem *p, char *text, size_t space); /* fills in 'text' in any case */
} rules[] = {
    {"top_k", top_k_fits},
    {"zero_experts", logits_fit},
    {"expert_count", share_is_even},
    {"expert_begin", share_exists},
    {"groups", groups_divide},
    {"groups", groups_hold_two},
    {"groups", groups_without_zero},
    {"groups_kept", kept_exist},
    {"groups_kept", kept_suffice},
    {"intermediate_offset", offset_exists},
    {"select_bias", given_without_bias},
    {"groups", given_without_groups},
    {"renormalize", given_as_it_is},
    {"shared_gate", gate_has_experts},
};

int problem_faults(const struct mf_problem *problem, problem_fault_fn *report, void *context)
{
  char text[256];
  int count = 0;
  for(size_t i = 0; i < NFIELDS; i++)
    if(!in_range(problem, &fields[i], text, sizeof(text))) {
      report(context, fields[i].name, text);
      count++;
    }
  for(size_t i = 0; count == 0 && i < sizeof(rules) / sizeof(rules[0]); i++)
    if(!rules[i].holds(problem, text, sizeof(text))) {
      report(context, rules[i].field, text);
      count++;
    }
  return count;
}

static void first_fault(void *context, const char *field, const char *text)
{
  struct error *err = context;
  if(err->status == MF_OK)
    error_set(err, MF_ERR_SPEC, "%s: %s", field, text);
}

enum mf_status problem_validate(const struct mf_problem *problem, struct error *err)
{
  struct error first = {.status = MF_OK};
  if(problem_faults(problem, first_fault, &first) == 0)
    return MF_OK;
  return error_set(err, MF_ERR_SPEC, "%s", first.text);
}

/* ---- the rank's cut ---- */

struct cut_check {
  problem_fault_fn *report;
  void *context;
  bool ok;
};

static void cut_fault(struct cut_check *check, const char *field, const char *text)
{
  check->report(check->context, field, text);
  check->ok = false;
}

static void check_rank(struct cut_check *check, const char *field, int rank, int ranks)
{
  char text[256];
  if(rank >= 0 && rank < ranks)
    return;
  snprintf(text, sizeof(text), "expected a rank from 0 to %d, got %d (nearest legal value %d)", ranks - 1, rank, rank < 0 ? 0 : ranks - 1);
  cut_fault(check, field, text);
}

/* Every tensor-parallel rank gets whole 16-byte pieces of the rows of w2. */
static void check_tp(struct cut_check *check, const struct rank_cut *cut)
{
  const int pieces = cut->intermediate / WEIGHT_STEP;
  char text[256];
  if(cut->tp >= 1 && cut->tp <= pieces && pieces % cut->tp == 0) {
    check_rank(check, "tp_rank", cut->tp_rank, cut->tp);
    return;
  }
  snprintf(text, sizeof(text), "expected ranks that get a multiple of %d of the %d features each, got %d ranks (nearest legal value %d)", WEIGHT_STEP,
           cut->intermediate, cut->tp, nearest_divisor(pieces, cut->tp));
  cut_fault(check, "tp", text);
}

static void check_ep(struct cut_check *check, const struct rank_cut *cut, int experts)
{
  char text[256];
  if(cut->ep >= 1 && cut->ep <= experts && experts % cut->ep == 0) {
    check_rank(check, "ep_rank", cut->ep_rank, cut->ep);
    return;
  }
  snprintf(text, sizeof(text), "expected a divisor of %d, the number of experts, got %d ranks (nearest legal value %d)", experts, cut->ep,
           nearest_divisor(experts, cut->ep));
  cut_fault(check, "ep", text);
}

bool spec_apply_cut(struct model_spec *spec, const struct rank_cut *cut, problem_fault_fn *report, void *context)
{
  struct mf_problem *p = &spec->problem;
  struct cut_check check = {.report = report, .context = context, .ok = true};
  char text[256];
  if(cut->intermediate < WEIGHT_STEP || cut->intermediate % WEIGHT_STEP != 0) {
    snprintf(text, sizeof(text), "expected a multiple of %d, got %d", WEIGHT_STEP, cut->intermediate);
    cut_fault(&check, "intermediate", text);
    return false;
  }
  check_tp(&check, cut);
  check_ep(&check, cut, p->experts);
  if(!check.ok)
    return false;
  p->intermediate = cut->intermediate / cut->tp;
  p->intermediate_offset = cut->tp_rank * p->intermediate % SCALE_BLOCK;
  p->expert_count = p->experts / cut->ep;
  p->expert_begin = cut->ep_rank * p->expert_count;
  spec->tp = cut->tp;
  spec->tp_rank = cut->tp_rank;
  return true;
}
