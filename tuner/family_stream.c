/* family_stream.c - what the tuner knows of the kernel family `stream`: knobs, rules, memory, source, recipe, cost.
 *
 * One persistent CTA per multiprocessor streams weights through a ring of 16 KB stages in shared memory, first its share of the up projection of all
 * active experts, then its rows of the down projection (templates/stream/kernel.cuh). Formulas here mirror templates/stream/layout.cuh; the metadata
 * symbol that each cubin exports is compared with them (stream_check_meta), and a test compiles every shape and compares. */
#include "family_stream.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "spec.h"
#include "stream/params.h"

#define STAGE_BYTES 16384
#define STAGE_KBLOCKS 8       /* k-blocks of 128 columns of 16 rows */
#define REDUCE_BUFFERS 2      /* = finaliser warps */
#define ALL_STATIC 1000       /* more rounds than any problem has: no tickets */
#define MAX_DOWN_ROWS 64      /* rows of one CTA: one wgmma M tile */
#define MIN_COLUMNS 8         /* of the router logits: one 16-byte piece of bf16 */
#define TENSOR_MAP_BYTES 128

enum { KNOB_RING, KNOB_LOADERS, KNOB_LOOKAHEAD, KNOB_FLIGHT, KNOB_FIRST_DOWN, KNOB_STATIC, KNOB_ROTATE, KNOB_HAND_OFF, STREAM_KNOBS };

static const struct knob knobs[STREAM_KNOBS] = {
    [KNOB_RING] = {"ring_stages", "ring", "16 KB weight stages in shared memory", true, true, 4, {4, 6, 8, 10}},
    [KNOB_LOADERS] = {"h_loaders", "ld", "warps that fetch and quantise h", true, true, 2, {2, 4}},
    [KNOB_LOOKAHEAD] = {"ticket_lookahead", "la", "turns between drawing a ticket and its use", true, false, 2, {2, 4}},
    [KNOB_FLIGHT] = {"flight", "fl", "stages in flight per CTA", false, true, 4, {3, 4, 5, 6}},
    [KNOB_FIRST_DOWN] = {"first_down_flight", "fd", "the same for the first down stages", false, true, 4, {2, 3, 4, 6}},
    [KNOB_STATIC] = {"static_rounds", "st", "rounds of units dealt without tickets (1000: all)", false, true, 3, {0, 8, ALL_STATIC}},
    [KNOB_ROTATE] = {"rotate_k", "rk", "1: successive units start at successive k chunks", false, false, 2, {0, 1}},
    [KNOB_HAND_OFF] = {"hand_off", "ho", "rows of h that a warp takes together: 0 two, 1 four, 2 four and consumers help once w2 is in the ring", true, false, 3, {0, 1, 2}, true},
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

/* Sizes that follow from problem, schedule and device: the host's twin of struct Layout in layout.cuh. */
struct layout {
  int kblocks, hblocks;   /* of w13 and of w2; the latter are those of the unsharded matrix, the first and last may be partly other ranks' */
  int units, unit_stages; /* up units per expert, stages per unit */
  int grid, down_ctas, down_rows;
  int down_row_blocks;    /* scale blocks that a CTA's rows touch */
  int down_kblocks;       /* k-blocks per down copy */
  int scale_slots;
  int threads;
  int slots;              /* active experts at most */
  long shared_bytes;
};

static long align_up(long value, long alignment)
{
  return (value + alignment - 1) / alignment * alignment;
}

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
static long shared_size(const struct mf_problem *p, const struct layout *l, int ring, int h_workers)
{
  const int ranks = problem_ranks(p);
  const long mask_bytes = 8L * ceil_div(ranks, 8), rank_slots = ranks > 8 ? ranks : 8, local = align_up(problem_stored_experts(p), 32);
  const long columns = stream_has_scores(p) ? align_up(p->experts + p->zero_experts, 4) : 1;
  const long cleared = 32L * l->kblocks + 32L * ranks * l->hblocks + mask_bytes * l->slots + 8L * l->slots + local;
  const long h = 1024L * ranks * l->hblocks, scores = 8L * MF_STREAM_MAX_TOKENS * columns; /* share their space */
  long at = (long)ring * STAGE_BYTES + 1024L * l->kblocks + (h > scores ? h : scores) + 8L * 32 * 16 * REDUCE_BUFFERS;
  at += align_up(cleared, 16);
  at += 8L * l->scale_slots * l->kblocks + 4L * l->slots * l->down_row_blocks * l->hblocks + 4L * rank_slots * MF_STREAM_MAX_TOKENS;
  at += 4L * l->slots + 2L * 4 + 2L * 4 * REDUCE_BUFFERS + 4L * h_workers + 8L * 4 + 4L * ring + local;
  at = align_up(at, 8) + (2L * REDUCE_BUFFERS + l->scale_slots + 2L * ring) * 8;
  return align_up(at, 1024);
}

static struct layout make_layout(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev)
{
  const int ring = sched->value[KNOB_RING], helpers = REDUCE_BUFFERS + sched->value[KNOB_LOADERS];
  struct layout l = {0};
  l.kblocks = p->hidden / 128;
  l.hblocks = ceil_div(p->intermediate_offset + p->intermediate, 128);
  l.units = p->intermediate / 8;
  l.unit_stages = ceil_div(l.kblocks, STAGE_KBLOCKS);
  l.grid = dev->sms;
  l.down_rows = rows_per_cta(p->hidden, dev->sms);
  l.down_ctas = ceil_div(p->hidden, l.down_rows);
  l.down_row_blocks = 128 % l.down_rows == 0 ? 1 : 2;
  l.down_kblocks = down_kblocks(l.hblocks, l.down_rows);
  l.scale_slots = fewest_scale_slots(ring, l.unit_stages);
  l.threads = 32 * (helpers <= 4 ? 13 : 9 + helpers);
  l.slots = MF_STREAM_MAX_TOKENS * p->top_k + problem_shared(p);
  l.shared_bytes = shared_size(p, &l, ring, sched->value[KNOB_LOADERS] + (sched->value[KNOB_HAND_OFF] == 2 ? 8 : 0));
  return l;
}

/* Of the smallest schedule. */
static long least_shared_bytes(const struct mf_problem *p, const struct device_info *dev)
{
  struct schedule least = {.family = &family_stream};
  least.value[KNOB_RING] = knobs[KNOB_RING].values[0];
  least.value[KNOB_LOADERS] = knobs[KNOB_LOADERS].values[0];
  return make_layout(p, &least, dev).shared_bytes;
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
  return make_layout(p, sched, dev).shared_bytes;
}

static int default_lookahead(const struct mf_problem *p)
{
  return ceil_div(p->hidden / 128, STAGE_KBLOCKS) >= 4 ? 2 : 4;
}

/* The deepest ring that fits, few bytes in flight; tickets pay from three tokens on. */
static void stream_default_schedule(const struct mf_problem *p, int tokens, const struct device_info *dev, struct schedule *out)
{
  const struct knob *ring = &knobs[KNOB_RING];
  out->family = &family_stream;
  out->value[KNOB_LOADERS] = 4;
  out->value[KNOB_LOOKAHEAD] = default_lookahead(p);
  out->value[KNOB_FLIGHT] = 4;
  out->value[KNOB_FIRST_DOWN] = tokens <= 2 ? 2 : 4;
  out->value[KNOB_STATIC] = tokens <= 2 ? ALL_STATIC : 0;
  out->value[KNOB_ROTATE] = 1;
  out->value[KNOB_HAND_OFF] = 0;
  for(int i = ring->nvalues - 1; i >= 0; i--) {
    out->value[KNOB_RING] = ring->values[i];
    if(stream_shared_bytes(p, out, dev) <= dev->shared_bytes_per_cta)
      return;
  }
}

static enum mf_status stream_constrain(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct verdict *why)
{
  const struct layout l = make_layout(p, sched, dev);
  const int ring = sched->value[KNOB_RING], flight = sched->value[KNOB_FLIGHT], first_down = sched->value[KNOB_FIRST_DOWN];
  const enum mf_status rc = stream_serves(p, 1, dev, why);
  if(rc != MF_OK)
    return rc;
  if(ring > (l.scale_slots - 1) * l.unit_stages + 1)
    return reject(why, RULE_RING, ring, (l.scale_slots - 1) * l.unit_stages + 1, (l.scale_slots - 1) * l.unit_stages + 1, NULL);
  if(flight > ring || first_down > ring)
    return reject(why, RULE_FLIGHT, flight > ring ? flight : first_down, ring, ring, NULL);
  if(sched->value[KNOB_STATIC] == ALL_STATIC && sched->value[KNOB_LOOKAHEAD] != default_lookahead(p))
    return reject(why, RULE_EQUIVALENT, sched->value[KNOB_LOOKAHEAD], default_lookahead(p), default_lookahead(p), "no tickets: the look-ahead means nothing");
  memset(why, 0, sizeof(*why));
  return MF_OK;
}

/* ---- source ---- */

static const char *const scorings[] = {[MF_STREAM_SOFTMAX] = "MF_STREAM_SOFTMAX", [MF_STREAM_SIGMOID] = "MF_STREAM_SIGMOID",
                                       [MF_STREAM_SQRT_SOFTPLUS] = "MF_STREAM_SQRT_SOFTPLUS", [MF_STREAM_PROBABILITY] = "MF_STREAM_PROBABILITY",
                                       [MF_STREAM_GIVEN] = "MF_STREAM_GIVEN"};

float stream_swiglu_alpha(const struct mf_problem *p)
{
  return p->swiglu_alpha > 0 ? p->swiglu_alpha : 1.0f;
}

void stream_emit_shape(const struct mf_problem *p, struct strbuf *out)
{
  strbuf_printf(out, "struct Shape {\n");
  strbuf_printf(out, "  static constexpr int kExperts = %d;\n", p->experts);
  strbuf_printf(out, "  static constexpr int kTopK = %d;\n", p->top_k);
  strbuf_printf(out, "  static constexpr int kIntermediate = %d; // features of one expert\n", p->intermediate);
  strbuf_printf(out, "  static constexpr int kIntermediateOffset = %d; // of the first one in its 128-block of the unsharded matrix\n",
                p->intermediate_offset);
  strbuf_printf(out, "  static constexpr int kHidden = %d;\n", p->hidden);
  strbuf_printf(out, "  static constexpr int kZeroExperts = %d; // further columns of the logits, whose experts do nothing here\n", p->zero_experts);
  strbuf_printf(out, "  static constexpr int kExpertBegin = %d; // this rank holds kExpertCount experts from here on\n", p->expert_begin);
  strbuf_printf(out, "  static constexpr int kExpertCount = %d;\n", p->expert_count);
  strbuf_printf(out, "  static constexpr int kSharedExperts = %d; // active for every token, stored behind those\n", problem_shared(p));
  strbuf_printf(out, "  static constexpr int kSharedGate = %d; // 1: the sigmoid of a gate is their weight\n", problem_shared_gated(p));
  strbuf_printf(out, "  static constexpr int kScoring = %s;\n", scorings[stream_scoring(p)]);
  strbuf_printf(out, "  static constexpr int kBias = %d; // 1: a bias takes part in the selection, not in the weights\n", p->select_bias != 0);
  strbuf_printf(out, "  static constexpr int kGroups = %d;\n", p->groups);
  strbuf_printf(out, "  static constexpr int kTopGroups = %d;\n", p->groups_kept);
  strbuf_printf(out, "  static constexpr int kRenormalise = %d;\n", p->renormalize != 0 || p->score == MF_SCORE_TOPK_SOFTMAX);
  strbuf_printf(out, "  static constexpr int kLogitsF32 = %d;\n", p->logits_dtype == MF_DTYPE_F32);
  strbuf_printf(out, "  static constexpr int kActScaleUe8m0 = %d; // 1: activation scales are powers of two\n", p->act_scale == MF_ACT_SCALE_UE8M0);
  strbuf_printf(out, "  static constexpr int kWeightOnInput = %d; // 1: routing weights multiply x instead of y\n", p->weight_on_input != 0);
  strbuf_printf(out, "  static constexpr float kSwigluLimit = %af; // of gate and up; 0: none\n", (double)p->swiglu_limit);
  strbuf_printf(out, "  static constexpr float kSwigluAlpha = %af; // gate * sigmoid(alpha * gate)\n", (double)stream_swiglu_alpha(p));
  strbuf_printf(out, "};\n\n");
}

static void stream_emit(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct strbuf *out)
{
  const struct layout l = make_layout(p, sched, dev);
  char name[NAME_MAX_LEN];
  schedule_artifact_name(sched, name, sizeof(name));
  strbuf_printf(out, "// %s: one fused MoE decode operator, %d experts top-%d, N = %d, K = %d, 1 to %d tokens, %d CTAs.\n", name, p->experts, p->top_k,
                p->intermediate, p->hidden, MF_STREAM_MAX_TOKENS, l.grid);
  strbuf_printf(out, "// Emitted by moeforge (family stream, version %d); change the templates, not this file.\n", family_stream.version);
  strbuf_printf(out, "#include \"%s\"\n\n", family_stream.entry_include);
  stream_emit_shape(p, out);
  strbuf_printf(out, "struct Schedule {\n");
  strbuf_printf(out, "  static constexpr int kGridCtas = %d; // one per multiprocessor\n", l.grid);
  strbuf_printf(out, "  static constexpr int kDownCtas = %d; // own %d rows of w2 each\n", l.down_ctas, l.down_rows);
  strbuf_printf(out, "  static constexpr int kRingStages = %d;\n", sched->value[KNOB_RING]);
  strbuf_printf(out, "  static constexpr int kReduceBuffers = %d;\n", REDUCE_BUFFERS);
  strbuf_printf(out, "  static constexpr int kHLoaders = %d;\n", sched->value[KNOB_LOADERS]);
  strbuf_printf(out, "  static constexpr int kHandOff = %d;\n", sched->value[KNOB_HAND_OFF]);
  strbuf_printf(out, "  static constexpr int kTicketLookahead = %d;\n", sched->value[KNOB_LOOKAHEAD]);
  strbuf_printf(out, "  static constexpr int kScaleSlots = %d;\n", l.scale_slots);
  strbuf_printf(out, "  static constexpr int kPdl = 0;\n};\n\n");
  strbuf_printf(out, "using Layout = stream::Layout<Shape, Schedule>;\n\n");
  strbuf_printf(out, "extern \"C\" __device__ const mf_stream_meta mf_meta = stream::make_meta<Layout>();\n\n");
  strbuf_printf(out, "extern \"C\" __global__ void __launch_bounds__(Layout::kThreads, 1)\n");
  strbuf_printf(out, "mf_moe(const __grid_constant__ mf_stream_params params, const __grid_constant__ hw::TensorMap up_map,\n");
  strbuf_printf(out, "       const __grid_constant__ hw::TensorMap down_map)\n{\n");
  strbuf_printf(out, "  stream::run<Layout>(params, up_map, down_map);\n}\n");
}

/* ---- recipe ---- */

static void add_field(struct mf_recipe *r, enum mf_source source, size_t size, size_t offset, int64_t value)
{
  struct mf_recipe_field *f = &r->fields[r->nfields++];
  f->source = (uint16_t)source;
  f->size = (uint16_t)size;
  f->offset = (uint32_t)offset;
  f->value = value;
}

static void add_stride(struct mf_recipe_stride *stride, enum mf_source source, uint64_t value)
{
  stride->source = source;
  stride->value = value;
}

#define FIELD(r, source, member, value) \
  add_field(r, source, sizeof(((struct mf_stream_params *)0)->member), offsetof(struct mf_stream_params, member), value)

/* What not every kernel has. A recipe that needs it is one of version 2. */
static void add_more_params(struct mf_recipe *r, const struct mf_problem *p)
{
  if(p->score == MF_SCORE_GIVEN) {
    r->version = 2;
    FIELD(r, MF_SRC_WEIGHTS_STRIDE, weights_pitch, 0);
  }
  if(problem_shared_gated(p)) {
    r->version = 2;
    FIELD(r, MF_SRC_SHARED_GATE, gate, 0);
    FIELD(r, MF_SRC_SHARED_GATE_STRIDE, gate_pitch, 0);
  }
}

void stream_add_params(struct mf_recipe *r, const struct mf_problem *p, const struct stream_knobs *k)
{
  const bool given = p->score == MF_SCORE_GIVEN;
  FIELD(r, MF_SRC_X, x, 0);
  FIELD(r, given ? MF_SRC_IDS : MF_SRC_LOGITS, logits, 0);
  FIELD(r, given ? MF_SRC_WEIGHTS : MF_SRC_BIAS, bias, 0);
  FIELD(r, MF_SRC_S13, s13, 0);
  FIELD(r, MF_SRC_S2, s2, 0);
  FIELD(r, MF_SRC_OUT, out, 0);
  FIELD(r, MF_SRC_WORKSPACE, workspace, 0);
  FIELD(r, MF_SRC_TOKENS, tokens, 0);
  FIELD(r, MF_SRC_X_STRIDE, x_pitch, 0);
  FIELD(r, given ? MF_SRC_IDS_STRIDE : MF_SRC_LOGITS_STRIDE, logits_pitch, 0);
  FIELD(r, MF_SRC_OUT_STRIDE, out_pitch, 0);
  FIELD(r, MF_SRC_ROUTED_SCALING, scaling, 0);
  FIELD(r, MF_SRC_CONST, flight, k->flight);
  FIELD(r, MF_SRC_CONST, first_down_flight, k->first_down_flight);
  FIELD(r, MF_SRC_CONST, static_rounds, k->static_rounds);
  FIELD(r, MF_SRC_CONST, rotate_k, k->rotate_k);
  FIELD(r, MF_SRC_CONST, evict_first, 1);
  add_more_params(r, p);
}

/* w13 as [k-block][expert and group of 8 rows][gate, up][row][column]: one box is a unit's 16 rows x 'kblocks'. The strides do not grow with the
 * dimension, which the driver accepts though its documentation does not promise it. */
void stream_add_up_map(struct mf_recipe *r, const struct mf_problem *p, int kblocks)
{
  struct mf_recipe_map *m = &r->maps[r->nmaps++];
  const uint64_t dim[5] = {128, 8, 2, (uint64_t)problem_stored_experts(p) * 2 * (uint64_t)p->intermediate / 8, (uint64_t)p->hidden / 128};
  const uint32_t box[5] = {128, 8, 2, 1, (uint32_t)kblocks};
  m->base = MF_SRC_W13;
  m->rank = 5;
  m->swizzle = 128;
  m->promotion = 128;
  memcpy(m->dim, dim, sizeof(dim));
  memcpy(m->box, box, sizeof(box));
  add_stride(&m->stride[0], MF_SRC_W13_ROW_STRIDE, 1);
  add_stride(&m->stride[1], MF_SRC_W13_ROW_STRIDE, (uint64_t)p->intermediate);
  add_stride(&m->stride[2], MF_SRC_W13_ROW_STRIDE, 8);
  add_stride(&m->stride[3], MF_SRC_CONST, 128);
}

/* w2 as [k-block][expert and row][column]: one box is a CTA's rows of one expert, all or some k-blocks. If k-blocks are shared with other ranks there is
 * but one "block", the row, and a box is a part of it that may begin before it or end behind it. */
void stream_add_down_map(struct mf_recipe *r, const struct mf_problem *p, int rows, int kblocks)
{
  struct mf_recipe_map *m = &r->maps[r->nmaps++];
  const bool whole = p->intermediate_offset == 0 && p->intermediate % 128 == 0;
  const uint64_t dim[5] = {whole ? 128 : (uint64_t)p->intermediate, (uint64_t)problem_stored_experts(p) * (uint64_t)p->hidden, whole ? (uint64_t)p->intermediate / 128 : 1};
  const uint32_t box[5] = {128, (uint32_t)rows, whole ? (uint32_t)kblocks : 1};
  m->base = MF_SRC_W2;
  m->rank = 3;
  m->swizzle = 128;
  m->promotion = 128;
  memcpy(m->dim, dim, sizeof(dim));
  memcpy(m->box, box, sizeof(box));
  add_stride(&m->stride[0], MF_SRC_W2_ROW_STRIDE, 1);
  add_stride(&m->stride[1], MF_SRC_CONST, 128);
}

/* Each tensor map becomes a kernel parameter behind the params struct. */
void stream_add_arguments(struct mf_recipe *r)
{
  size_t at = (size_t)align_up((long)sizeof(struct mf_stream_params), 64);
  r->params[r->nparams++] = (struct mf_recipe_param){0, (uint32_t)sizeof(struct mf_stream_params)};
  for(uint32_t i = 0; i < r->nmaps; i++, at += TENSOR_MAP_BYTES) {
    r->params[r->nparams++] = (struct mf_recipe_param){(uint32_t)at, TENSOR_MAP_BYTES};
    add_field(r, MF_SRC_TENSOR_MAP, TENSOR_MAP_BYTES, at, (int64_t)i);
  }
  r->block_bytes = (uint32_t)at;
}

static enum mf_status stream_recipe(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct mf_recipe *out,
                                    struct error *err)
{
  const struct layout l = make_layout(p, sched, dev);
  const struct stream_knobs runtime_knobs = {sched->value[KNOB_FLIGHT], sched->value[KNOB_FIRST_DOWN], sched->value[KNOB_STATIC], sched->value[KNOB_ROTATE]};
  (void)err;
  memset(out, 0, sizeof(*out));
  out->magic = MF_RECIPE_MAGIC;
  out->version = 1;
  out->size = sizeof(*out);
  out->flags = MF_RECIPE_COOPERATIVE;
  strncpy(out->kernel, family_stream.kernel, sizeof(out->kernel) - 1);
  out->grid[0] = (uint32_t)l.grid;
  out->block[0] = (uint32_t)l.threads;
  out->grid[1] = out->grid[2] = out->block[1] = out->block[2] = 1;
  out->shared_bytes = (uint32_t)l.shared_bytes;
  out->min_sms = (uint32_t)l.grid;
  out->tokens_min = 1;
  out->tokens_max = MF_STREAM_MAX_TOKENS;
  out->workspace_bytes = (uint64_t)MF_STREAM_WS_BYTES(problem_ranks(p), p->intermediate);
  out->workspace_zero_bytes = out->workspace_bytes;
  out->h_offset = MF_STREAM_WS_H;
  out->h_buffer_bytes = (uint64_t)MF_STREAM_WS_H_BYTES(problem_ranks(p), p->intermediate);
  out->launch_count_offset = MF_STREAM_WS_LAUNCHES;
  out->routing_ids_offset = (uint64_t)MF_STREAM_WS_IDS(problem_ranks(p));
  out->routing_weights_offset = (uint64_t)MF_STREAM_WS_WEIGHTS(problem_ranks(p));
  out->status_offset = MF_STREAM_WS_STATUS;
  stream_add_params(out, p, &runtime_knobs);
  stream_add_up_map(out, p, STAGE_KBLOCKS);
  stream_add_down_map(out, p, l.down_rows, l.down_kblocks);
  stream_add_arguments(out);
  return MF_OK;
}

/* ---- metadata ---- */

static enum mf_status stream_check_meta(const void *meta, size_t bytes, const struct mf_problem *p, const struct schedule *sched,
                                        const struct device_info *dev, struct verdict *why)
{
  const struct layout l = make_layout(p, sched, dev);
  const struct mf_stream_meta *m = meta;
  if(bytes != sizeof(*m))
    return family_meta_differs(why, "bytes of the metadata", (long)bytes, (long)sizeof(*m));
  const struct meta_row rows[] = {
      {"magic", (long)m->magic, (long)MF_STREAM_MAGIC},
      {"version", (long)m->version, (long)MF_STREAM_VERSION},
      {"params_bytes", (long)m->params_bytes, (long)sizeof(struct mf_stream_params)},
      {"experts", (long)m->experts, p->experts},
      {"topk", (long)m->topk, p->top_k},
      {"zero_experts", (long)m->zero_experts, p->zero_experts},
      {"expert_begin", (long)m->expert_begin, p->expert_begin},
      {"expert_count", (long)m->expert_count, p->expert_count},
      {"shared_experts", (long)m->shared_experts, problem_shared(p)},
      {"shared_gate", (long)m->shared_gate, problem_shared_gated(p)},
      {"weight_on_input", (long)m->weight_on_input, p->weight_on_input},
      {"swiglu_limit, as bits", family_meta_float(m->swiglu_limit), family_meta_float(p->swiglu_limit)},
      {"swiglu_alpha, as bits", family_meta_float(m->swiglu_alpha), family_meta_float(stream_swiglu_alpha(p))},
      {"scoring", (long)m->scoring, stream_scoring(p)},
      {"bias", (long)m->bias, p->select_bias},
      {"groups", (long)m->groups, p->groups},
      {"top_groups", (long)m->top_groups, p->groups_kept},
      {"intermediate", (long)m->intermediate, p->intermediate},
      {"intermediate_offset", (long)m->intermediate_offset, p->intermediate_offset},
      {"hidden", (long)m->hidden, p->hidden},
      {"grid_ctas", (long)m->grid_ctas, l.grid},
      {"threads", (long)m->threads, l.threads},
      {"shared_bytes", (long)m->shared_bytes, l.shared_bytes},
      {"down_ctas", (long)m->down_ctas, l.down_ctas},
      {"down_rows", (long)m->down_rows, l.down_rows},
      {"down_kblocks", (long)m->down_kblocks, l.down_kblocks},
      {"ring_stages", (long)m->ring_stages, sched->value[KNOB_RING]},
      {"scale_slots", (long)m->scale_slots, l.scale_slots},
      {"hand_off", (long)m->hand_off, sched->value[KNOB_HAND_OFF]},
      {"workspace_bytes", (long)m->workspace_bytes, MF_STREAM_WS_BYTES(problem_ranks(p), p->intermediate)},
      {"h_offset", (long)m->h_offset, MF_STREAM_WS_H},
      {"ids_offset", (long)m->ids_offset, MF_STREAM_WS_IDS(problem_ranks(p))},
      {"weights_offset", (long)m->weights_offset, MF_STREAM_WS_WEIGHTS(problem_ranks(p))},
      {"status_offset", (long)m->status_offset, MF_STREAM_WS_STATUS},
      {"launches_offset", (long)m->launches_offset, MF_STREAM_WS_LAUNCHES},
  };
  return family_meta_compare(rows, sizeof(rows) / sizeof(rows[0]), why);
}

/* ---- cost model ---- */

/* For ranking candidates that cannot be timed. The constants are chosen by hand and were not fitted: shallow rings and few loaders, which won on the H200, are
 * not what it prefers. */
static double stream_predict_us(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, int tokens, double active)
{
  const struct layout l = make_layout(p, sched, dev);
  const double up_bytes = 2.0 * p->intermediate * p->hidden, down_bytes = 1.0 * p->intermediate * p->hidden;
  const double peak = dev->bandwidth_gbps * 1e3;               /* bytes per us */
  const double latency_us = 1.3;                               /* of a copy under load */
  const double unit_bytes = 16.0 * p->hidden;
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
  const double down_imbalance = 1.0 * dev->sms * l.down_rows / p->hidden;
  return dev->launch_us + front + hand_off + queueing * 0.1 + active * (up_bytes * imbalance + down_bytes * down_imbalance) / rate;
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
    .constrain = stream_constrain,
    .shared_bytes = stream_shared_bytes,
    .emit = stream_emit,
    .recipe = stream_recipe,
    .check_meta = stream_check_meta,
    .predict_us = stream_predict_us,
};
