/* family_stream.c - what the tuner knows of the kernel family `stream`: knobs, rules, memory, cost.
 *
 * One persistent CTA per multiprocessor streams weights through a ring of 16 KB stages in shared memory, first its share of the up projection of all
 * active experts, then its rows of the down projection (templates/stream/kernel.cuh). Formulas here mirror templates/stream/layout.cuh; the metadata
 * symbol that each cubin exports is compared with them (stream_check_meta), and a test compiles every shape and compares.
 *
 * Here: what is served by which schedules, what it takes of the device, what it costs. family_stream_recipe.c: what becomes of a schedule. */
#include "family_stream_layout.h"

#include <string.h>

#include "spec.h"
#include "stream/params.h"

#define STAGE_BYTES 16384
#define ALL_STATIC 1000       /* more rounds than any problem has: no tickets */
#define MANY_TOKENS 5         /* from which on h in batches costs nothing with large units */
#define SOME_STATIC 8         /* rounds dealt in turn ahead of the tickets */
#define WHOLE_UNIT 8          /* features of a unit */
#define HALF_UNIT 4
#define LARGE_UNIT 65536      /* bytes of a whole unit from which on half ones are tried */
#define MAX_RING 16
#define MAX_TURNS_AHEAD 8     /* tickets under way: a register each */
#define MAX_DOWN_ROWS 64      /* rows of one CTA: one wgmma M tile */
#define MIN_COLUMNS 8         /* of the router logits: one 16-byte piece of bf16 */

static const struct knob knobs[STREAM_KNOBS] = {
    [KNOB_RING] = {"ring_stages", "ring", "16 KB weight stages in shared memory", true, true, 7, {4, 5, 6, 7, 8, 9, 10}},
    [KNOB_LOADERS] = {"h_loaders", "ld", "warps that fetch and quantise h", true, true, 2, {2, 4}},
    [KNOB_LOOKAHEAD] = {"ticket_lookahead", "la", "turns (of whole units) between drawing a ticket and its use", true, false, 2, {2, 4}},
    [KNOB_FLIGHT] = {"flight", "fl", "stages in flight per CTA", false, true, 4, {3, 4, 5, 6}},
    [KNOB_FIRST_DOWN] = {"first_down_flight", "fd", "the same for the first down stages", false, true, 4, {2, 3, 4, 6}},
    [KNOB_STATIC] = {"static_rounds", "st", "rounds of units dealt without tickets (1000: all)", false, true, 3, {0, SOME_STATIC, ALL_STATIC}},
    [KNOB_ROTATE] = {"rotate_k", "rk", "1: successive units start at successive k chunks", false, false, 2, {0, 1}},
    [KNOB_HAND_OFF] = {"hand_off", "ho", "1: with several rows of h per expert all warps load them, several at a time", true, false, 2, {0, 1}, .added = true, .together = true},
    [KNOB_PDL] = {"pdl", "pd", "1: may begin before the kernel ahead of it has ended (programmatic dependent launch)", true, false, 0, {0, 1}, .added = true, .unnamed = true},
    [KNOB_UNIT] = {"unit_features", "uf", "features of a unit of the up projection", true, true, 2, {WHOLE_UNIT, HALF_UNIT}, .added = true, .unnamed = true, .quick = true},
};

#define RULES_TABLE(X)                                                                                        \
  X(RULE_TOKENS, "tokens", "1 to 8 tokens")                                                                   \
  X(RULE_TOP_K, "top_k", "at most 22 experts per token, shared ones included: each may need an h group of its own") \
  X(RULE_EXPERTS, "experts", "8 to 1024 logits per token, zero experts included, in rows of whole 16 bytes; of given ids 1 to 1024") \
  X(RULE_HIDDEN, "hidden", "hidden size a multiple of 128, 1024 to 8192: whole scale blocks")                 \
  X(RULE_INTERMEDIATE, "intermediate", "features per rank, and the first one's place in its scale block, multiples of 16")  \
  X(RULE_MEMORY, "memory", "x, h of all ranks and the smallest ring fit into shared memory")                  \
  X(RULE_ROUTER, "router", "softmax over the chosen and given experts go without a bias and groups")           \
  X(RULE_GROUPS, "groups", "a power of two, up to 32 groups; a multiple of 64 experts: whole lanes of the router") \
  X(RULE_FEATURE, "feature", "no gated shared experts where weights multiply the input")                       \
  X(RULE_DOWN_ROWS, "down_rows", "at most 64 rows of w2 per CTA")                                             \
  X(RULE_RING, "ring", "the scale slots must outlive the ring")                                               \
  X(RULE_FLIGHT, "flight", "no more stages in flight than the ring has")                                      \
  X(RULE_PDL, "pdl", "0 or 1")                                                                                \
  X(RULE_UNIT, "unit_features", "8 or 4")                                                                     \
  X(RULE_LOOKAHEAD, "ticket_lookahead", "1 to 8 turns, two for each with half units: a register for each ticket under way") \
  X(RULE_EQUIVALENT, "equivalent", "another schedule in the space does exactly the same")

enum stream_rule {
#define RULE_ENUM(id, name, help) id,
  RULES_TABLE(RULE_ENUM)
#undef RULE_ENUM
  STREAM_RULES
};
static const struct rule rules[STREAM_RULES] = {
#define RULE_ROW(id, name, help) {name, help},
    RULES_TABLE(RULE_ROW)
#undef RULE_ROW
};

static int ceil_div(int value, int by)
{
  return (value + by - 1) / by;
}

/* Rows of w2 per CTA, in whole atoms of 8. */
static int rows_per_cta(int hidden, int sms)
{
  return 8 * ceil_div(hidden / 8, sms);
}

/* k-blocks of w2 in one down copy: all, or as many as the fewest stages that hold them need. */
static int down_kblocks(int hblocks, int down_rows)
{
  const int at_most = STAGE_BYTES / (128 * down_rows);
  return ceil_div(hblocks, ceil_div(hblocks, at_most > 0 ? at_most : 1));
}

/* The fewest scale slots whose rows outlive a ring of 'ring' stages. */
static int fewest_scale_slots(int ring, int unit_stages)
{
  int slots = 4;
  while(slots < 16 && ring > (slots - 1) * unit_stages + 1)
    slots *= 2;
  return slots;
}

/* MF_STREAM_* of the problem's policy. Top-k, then softmax over the chosen, is the softmax that is renormalised. */
int stream_scoring(const struct mf_problem *p)
{
  switch((enum mf_score)p->score) {
    case MF_SCORE_SIGMOID: return MF_STREAM_SIGMOID;
    case MF_SCORE_SQRT_SOFTPLUS: return MF_STREAM_SQRT_SOFTPLUS;
    case MF_SCORE_SOFTMAX: return p->select_bias || p->groups > 1 ? MF_STREAM_PROBABILITY : MF_STREAM_SOFTMAX;
    case MF_SCORE_GIVEN: return MF_STREAM_GIVEN;
    case MF_SCORE_TOPK_SOFTMAX: break;
  }
  return MF_STREAM_SOFTMAX;
}

/* Whether selection goes through tables in shared memory: scores and orders of every expert. */
bool stream_has_scores(const struct mf_problem *p)
{
  return p->score != MF_SCORE_GIVEN && (stream_scoring(p) != MF_STREAM_SOFTMAX || p->logits_dtype == MF_DTYPE_F32);
}

/* The layout's struct Shared, field by field. */
static long shared_size(const struct mf_problem *p, const struct stream_layout *l, int ring, int h_loaders)
{
  const int ranks = problem_ranks(p);
  const long mask_bytes = 8L * ceil_div(ranks, 8), rank_slots = ranks > 8 ? ranks : 8, local = align_up(problem_stored_experts(p), 32);
  const long columns = stream_has_scores(p) ? align_up(p->experts + p->zero_experts, 4) : 1;
  const long cleared = 32L * l->kblocks + 32L * ranks * l->hblocks + mask_bytes * l->slots + 8L * l->slots + local;
  const long h = 1024L * ranks * l->hblocks, scores = 8L * MF_STREAM_MAX_TOKENS * columns; /* share their space */
  const long behind_x = l->unit_features == HALF_UNIT ? 1024L * (l->unit_stages * l->stage_kblocks - l->kblocks) : 0; /* what products read there */
  const long room = h > scores ? h : scores;
  long at = (long)ring * STAGE_BYTES + 1024L * l->kblocks + (room > behind_x ? room : behind_x) + 8L * 32 * 16 * REDUCE_BUFFERS;
  at += align_up(cleared, 16);
  at += 8L * l->scale_slots * l->kblocks + 4L * l->slots * l->down_row_blocks * l->hblocks + 4L * rank_slots * MF_STREAM_MAX_TOKENS;
  at += 4L * l->slots + 2L * 4 + 2L * 4 * REDUCE_BUFFERS + 4L * h_loaders + 2L * 4 + 4L * ring + local;
  at = align_up(at, 8) + (2L * REDUCE_BUFFERS + l->scale_slots + 1 + 2L * ring) * 8;
  return align_up(at, 1024);
}

struct stream_layout stream_make_layout(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev)
{
  const int ring = sched->value[KNOB_RING], helpers = REDUCE_BUFFERS + sched->value[KNOB_LOADERS];
  struct stream_layout l = {0};
  l.kblocks = p->hidden / 128;
  l.hblocks = ceil_div(p->intermediate_offset + p->intermediate, 128);
  l.unit_features = sched->value[KNOB_UNIT] == HALF_UNIT ? HALF_UNIT : WHOLE_UNIT;
  l.stage_kblocks = STAGE_BYTES / (128 * 2 * l.unit_features);
  l.units = p->intermediate / l.unit_features;
  l.unit_stages = ceil_div(l.kblocks, l.stage_kblocks);
  l.grid = dev->sms;
  l.down_rows = rows_per_cta(p->hidden, dev->sms);
  l.down_ctas = ceil_div(p->hidden, l.down_rows);
  l.down_row_blocks = 128 % l.down_rows == 0 ? 1 : 2;
  l.down_kblocks = down_kblocks(l.hblocks, l.down_rows);
  l.scale_slots = fewest_scale_slots(ring, l.unit_stages);
  l.threads = 32 * (helpers <= 4 ? 13 : 9 + helpers);
  l.slots = MF_STREAM_MAX_TOKENS * p->top_k + problem_shared(p);
  l.shared_bytes = shared_size(p, &l, ring, sched->value[KNOB_LOADERS]);
  return l;
}

/* Of the smallest schedule. */
static long least_shared_bytes(const struct mf_problem *p, const struct device_info *dev)
{
  struct schedule least = {.family = &family_stream};
  least.value[KNOB_RING] = knobs[KNOB_RING].values[0];
  least.value[KNOB_LOADERS] = knobs[KNOB_LOADERS].values[0];
  return stream_make_layout(p, &least, dev).shared_bytes;
}

static enum mf_status reject(struct verdict *why, enum stream_rule rule, long have, long allowed, long nearest, const char *detail)
{
  *why = (struct verdict){.stage = "space", .rule = rules[rule].name, .have = have, .allowed = allowed, .nearest = nearest};
  strncpy(why->detail, detail != NULL ? detail : rules[rule].help, sizeof(why->detail) - 1);
  return MF_REJECTED;
}

/* ---- what the family serves ---- */

enum mf_status stream_serves_problem(const struct mf_problem *p, const struct device_info *dev, struct verdict *why)
{
  const int lanes_per_group = p->groups > 0 ? 32 / p->groups : 0, columns = p->experts + p->zero_experts;
  const bool given = p->score == MF_SCORE_GIVEN;
  const int row_step = given ? 1 : p->logits_dtype == MF_DTYPE_F32 ? 4 : 8;
  int down_rows;
  if(problem_ranks(p) > MF_STREAM_MAX_TOPK)
    return reject(why, RULE_TOP_K, problem_ranks(p), MF_STREAM_MAX_TOPK, MF_STREAM_MAX_TOPK - problem_shared(p), NULL);
  if(columns < (given ? 1 : MIN_COLUMNS) || columns > MF_STREAM_MAX_COLUMNS || columns % row_step != 0)
    return reject(why, RULE_EXPERTS, columns, MF_STREAM_MAX_COLUMNS,
                  columns > MF_STREAM_MAX_COLUMNS ? MF_STREAM_MAX_COLUMNS : align_up(columns, row_step), NULL);
  if(p->hidden % 128 != 0 || p->hidden < 1024 || p->hidden > 8192)
    return reject(why, RULE_HIDDEN, p->hidden, 8192, p->hidden > 8192 ? 8192 : p->hidden < 1024 ? 1024 : align_up(p->hidden, 128), NULL);
  if(p->intermediate % 16 != 0 || p->intermediate < 16)
    return reject(why, RULE_INTERMEDIATE, p->intermediate, 16, p->intermediate < 16 ? 16 : align_up(p->intermediate, 16), NULL);
  if(p->intermediate_offset % 16 != 0)
    return reject(why, RULE_INTERMEDIATE, p->intermediate_offset, 16, align_up(p->intermediate_offset, 16), NULL);
  if((given || p->score == MF_SCORE_TOPK_SOFTMAX) && (p->select_bias != 0 || p->groups != 1))
    return reject(why, RULE_ROUTER, p->score, MF_SCORE_SOFTMAX, MF_SCORE_SOFTMAX, NULL);
  if(p->groups != 1 && (p->experts % 64 != 0 || lanes_per_group * p->groups != 32))
    return reject(why, RULE_GROUPS, p->groups, 32, 1, NULL);
  if(p->weight_on_input != 0 && problem_shared_gated(p))
    return reject(why, RULE_FEATURE, 1, 0, 0, NULL);
  down_rows = rows_per_cta(p->hidden, dev->sms);
  if(down_rows > MAX_DOWN_ROWS)
    return reject(why, RULE_DOWN_ROWS, down_rows, MAX_DOWN_ROWS, -1, "more than 64 rows of w2 per CTA: the device has too few multiprocessors for this hidden size");
  return MF_OK;
}

static enum mf_status stream_serves(const struct mf_problem *p, int tokens, const struct device_info *dev, struct verdict *why)
{
  long least_bytes;
  enum mf_status rc;
  if(tokens < 1 || tokens > MF_STREAM_MAX_TOKENS)
    return reject(why, RULE_TOKENS, tokens, MF_STREAM_MAX_TOKENS, MF_STREAM_MAX_TOKENS, NULL);
  rc = stream_serves_problem(p, dev, why);
  if(rc != MF_OK)
    return rc;
  least_bytes = least_shared_bytes(p, dev);
  if(least_bytes > dev->shared_bytes_per_cta)
    return reject(why, RULE_MEMORY, least_bytes, dev->shared_bytes_per_cta, -1, NULL);
  return MF_OK;
}

static void stream_token_bucket(const struct mf_problem *p, int tokens, int *lo, int *hi)
{
  (void)p;
  (void)tokens;
  *lo = 1;
  *hi = MF_STREAM_MAX_TOKENS;
}

static long stream_shared_bytes(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev)
{
  return stream_make_layout(p, sched, dev).shared_bytes;
}

static int default_lookahead(const struct mf_problem *p)
{
  return ceil_div(p->hidden, 1024) >= 4 ? 2 : 4;
}

static bool units_are_large(const struct mf_problem *p)
{
  return 2L * WHOLE_UNIT * p->hidden >= LARGE_UNIT;
}

/* The deepest ring of 'fewest' to 'most' stages that fits. */
static bool choose_ring(const struct mf_problem *p, const struct device_info *dev, struct schedule *sched, int fewest, int most)
{
  const struct knob *ring = &knobs[KNOB_RING];
  for(int i = ring->nvalues - 1; i >= 0; i--) {
    sched->value[KNOB_RING] = ring->values[i];
    if(ring->values[i] >= fewest && ring->values[i] <= most && stream_shared_bytes(p, sched, dev) <= dev->shared_bytes_per_cta)
      return true;
  }
  return false;
}

/* Few bytes in flight; tickets pay from three tokens on. With large units half ones, whose first rounds are dealt in turn (of DeepSeek, GLM-5 and Kimi-K2 on eight GPUs all that
 * one or two tokens have); else, or if there is no room for a ring of six stages, the deepest ring. */
static void stream_default_schedule(const struct mf_problem *p, int tokens, const struct device_info *dev, struct schedule *out)
{
  out->family = &family_stream;
  out->value[KNOB_LOOKAHEAD] = default_lookahead(p);
  out->value[KNOB_FLIGHT] = 4;
  out->value[KNOB_ROTATE] = 1;
  out->value[KNOB_HAND_OFF] = 0;
  out->value[KNOB_PDL] = 0;
  out->value[KNOB_UNIT] = HALF_UNIT;
  out->value[KNOB_LOADERS] = 2;
  out->value[KNOB_FIRST_DOWN] = 3;
  out->value[KNOB_STATIC] = SOME_STATIC;
  if(units_are_large(p) && choose_ring(p, dev, out, 6, 8)) {
    out->value[KNOB_HAND_OFF] = tokens >= MANY_TOKENS;
    return;
  }
  out->value[KNOB_UNIT] = WHOLE_UNIT;
  out->value[KNOB_LOADERS] = 4;
  out->value[KNOB_FIRST_DOWN] = tokens <= 2 ? 2 : 4;
  out->value[KNOB_STATIC] = tokens <= 2 ? ALL_STATIC : 0;
  choose_ring(p, dev, out, 0, MAX_RING);
}

/* Half units spread more evenly, for twice as many hand-overs: where a whole one is large. With rings of 4 or 5 stages, or four loaders, they never won. */
static bool offers_half_units(const struct mf_problem *p, const struct schedule *sched)
{
  return units_are_large(p) && sched->value[KNOB_RING] >= 6 && sched->value[KNOB_RING] % 2 == 0 && sched->value[KNOB_LOADERS] == 2;
}

/* Of odd rings only the deepest that fits is worth a kernel of its own. */
static bool stream_offers(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev)
{
  struct schedule deeper = *sched;
  deeper.value[KNOB_RING]++;
  if(sched->value[KNOB_UNIT] == HALF_UNIT && !offers_half_units(p, sched))
    return false;
  return sched->value[KNOB_RING] % 2 == 0 || stream_shared_bytes(p, &deeper, dev) > dev->shared_bytes_per_cta;
}

static enum mf_status stream_constrain(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct verdict *why)
{
  const struct stream_layout l = stream_make_layout(p, sched, dev);
  const int ring = sched->value[KNOB_RING], flight = sched->value[KNOB_FLIGHT], first_down = sched->value[KNOB_FIRST_DOWN];
  const int most_ahead = MAX_TURNS_AHEAD * l.unit_features / WHOLE_UNIT;
  const enum mf_status rc = stream_serves(p, 1, dev, why);
  if(rc != MF_OK)
    return rc;
  if(sched->value[KNOB_UNIT] != WHOLE_UNIT && sched->value[KNOB_UNIT] != HALF_UNIT)
    return reject(why, RULE_UNIT, sched->value[KNOB_UNIT], WHOLE_UNIT, WHOLE_UNIT, NULL);
  if(sched->value[KNOB_LOOKAHEAD] < 1 || sched->value[KNOB_LOOKAHEAD] > most_ahead)
    return reject(why, RULE_LOOKAHEAD, sched->value[KNOB_LOOKAHEAD], most_ahead, sched->value[KNOB_LOOKAHEAD] < 1 ? 1 : most_ahead, NULL);
  if(ring > (l.scale_slots - 1) * l.unit_stages + 1)
    return reject(why, RULE_RING, ring, (l.scale_slots - 1) * l.unit_stages + 1, (l.scale_slots - 1) * l.unit_stages + 1, NULL);
  if(flight > ring || first_down > ring)
    return reject(why, RULE_FLIGHT, flight > ring ? flight : first_down, ring, ring, NULL);
  if(sched->value[KNOB_PDL] > 1)
    return reject(why, RULE_PDL, sched->value[KNOB_PDL], 1, 1, NULL);
  if(sched->value[KNOB_STATIC] == ALL_STATIC && sched->value[KNOB_LOOKAHEAD] != default_lookahead(p))
    return reject(why, RULE_EQUIVALENT, sched->value[KNOB_LOOKAHEAD], default_lookahead(p), default_lookahead(p), "no tickets: the look-ahead means nothing");
  memset(why, 0, sizeof(*why));
  return MF_OK;
}

/* ---- cost model ---- */

/* For ranking candidates that cannot be timed. The constants are chosen by hand and were not fitted: shallow rings and few loaders, which won on the H200, are
 * not what it prefers. */
static double stream_predict_us(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, int tokens, double active)
{
  const struct stream_layout l = stream_make_layout(p, sched, dev);
  const double up_bytes = 2.0 * p->intermediate * p->hidden, down_bytes = 1.0 * p->intermediate * p->hidden;
  const double peak = dev->bandwidth_gbps * 1e3;               /* bytes per us */
  const double latency_us = 1.3;                               /* of a copy under load */
  const double unit_bytes = 2.0 * l.unit_features * p->hidden;
  const double in_flight = dev->sms * (double)sched->value[KNOB_FLIGHT] * unit_bytes / l.unit_stages;
  const double rate = peak < in_flight / latency_us ? peak : in_flight / latency_us;
  const double share = active * l.units / dev->sms;            /* units per CTA */
  const double waves = (double)(long)(share + 0.999999);       /* of the busiest CTA, dealt statically */
  const bool tickets = sched->value[KNOB_STATIC] != ALL_STATIC;
  const double imbalance = tickets ? 1 + 0.3 / share : 1 + 0.5 * (waves / share - 1);
  const double queueing = 0.06 * (sched->value[KNOB_FLIGHT] + sched->value[KNOB_FIRST_DOWN] - 6) * (sched->value[KNOB_FLIGHT] + sched->value[KNOB_FIRST_DOWN] - 6);
  const double front = 0.9 + 0.1 * tokens + (tickets ? 0.15 : 0) + (stream_scoring(p) != MF_STREAM_SOFTMAX ? 0.2 : 0);
  const double hand_off = 0.9 + 0.15 * tokens * problem_ranks(p) / (active > 0 ? active : 1) + 0.02 * (12 - sched->value[KNOB_RING]) +
                          (sched->value[KNOB_LOADERS] < 4 ? 0.1 * tokens : 0);
  const double hand_overs = l.unit_features == HALF_UNIT ? 0.02 * share : 0; /* of the units' sums */
  const double down_imbalance = 1.0 * dev->sms * l.down_rows / p->hidden;
  return dev->launch_us + front + hand_off + hand_overs + queueing * 0.1 + active * (up_bytes * imbalance + down_bytes * down_imbalance) / rate;
}

const struct family_ops family_stream = {
    .name = "stream",
    .version = 1,
    .kernel = "mf_moe",
    .entry_include = "stream/kernel.cuh",
    .knobs = knobs,
    .nknobs = STREAM_KNOBS,
    .rules = rules,
    .nrules = STREAM_RULES,
    .serves = stream_serves,
    .token_bucket = stream_token_bucket,
    .default_schedule = stream_default_schedule,
    .offers = stream_offers,
    .constrain = stream_constrain,
    .shared_bytes = stream_shared_bytes,
    .emit = stream_emit,
    .recipe = stream_recipe,
    .check_meta = stream_check_meta,
    .predict_us = stream_predict_us,
};
