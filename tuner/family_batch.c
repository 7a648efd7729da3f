/* family_batch.c - what the tuner knows of the kernel family `batch`: knobs, rules, memory, source, recipe, cost.
 *
 * The family carries the structure of `stream` on to 9 .. 32 tokens (templates/batch/kernel.cuh): tokens come in groups of 8, whose number is compiled
 * in, and weights go through a ring of 8 KB stages. Formulas here mirror templates/batch/layout.cuh; the metadata symbol that each cubin exports is
 * compared with them (batch_check_meta), and a test compiles shapes and compares. Router, parameters and tensor maps are those of family_stream.c. */
#include "family_batch.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "batch/params.h"
#include "family_stream.h"
#include "spec.h"

#define STAGE_BYTES 8192
#define STAGE_KBLOCKS 4
#define REDUCE_BUFFERS 4      /* = finaliser warps */
#define ROUTERS 16
#define THREADS 640
#define FEW_RANKS 8           /* experts per token up to which tables of slots and ranks are made of bytes */
#define MAX_DOWN_BYTES 131072 /* of all down stages */
#define MAX_PROBABILITIES 512 /* a lane has 16 of them, and as many logits */
#define MAX_SCORES 896        /* where more than FEW_RANKS experts are chosen by them: with 1024 registers are spilled */
#define ALL_STATIC 1000       /* more rounds than any problem has: no tickets */
#define DEFAULT_RING 12       /* deeper ones gained nothing in the prototype */
#define SHALLOW_RING 8        /* below, h of the higher ranks rather goes where x was */

enum { KNOB_GROUPS, KNOB_RING, KNOB_OVERLAY, KNOB_LOOKAHEAD, KNOB_FLIGHT, KNOB_FIRST_DOWN, KNOB_STATIC, KNOB_ROTATE, BATCH_KNOBS };

static const struct knob knobs[BATCH_KNOBS] = {
    [KNOB_GROUPS] = {"token_groups", "g", "groups of 8 tokens: as many as the token count needs", true, false, 0, {0}},
    [KNOB_RING] = {"ring_stages", "ring", "8 KB weight stages in shared memory", true, true, 7, {4, 6, 8, 10, 12, 14, 16}},
    [KNOB_OVERLAY] = {"overlay", "ov", "1: h of the higher ranks lies where x was, and is loaded after the up projection", true, true, 2, {0, 1}},
    [KNOB_LOOKAHEAD] = {"ticket_lookahead", "la", "turns between drawing a ticket and its use", true, false, 2, {2, 4}},
    [KNOB_FLIGHT] = {"flight", "fl", "stages in flight per CTA", false, true, 4, {4, 6, 8, 12}},
    [KNOB_FIRST_DOWN] = {"first_down_flight", "fd", "the same for the first down stages", false, true, 2, {4, 8}},
    [KNOB_STATIC] = {"static_rounds", "st", "rounds of units dealt without tickets (1000: all)", false, true, 2, {4, ALL_STATIC}},
    [KNOB_ROTATE] = {"rotate_k", "rk", "1: successive units start at successive k chunks", false, false, 2, {0, 1}},
};

/* Rules about the problem itself are those of `stream`, by its names. */
#define RULES_TABLE(X)                                                                                          \
  X(RULE_TOKENS, "tokens", "9 to 32 tokens")                                                                    \
  X(RULE_TOP_K, "top_k", "at most 22 experts per token, shared ones included")                                   \
  X(RULE_EXPERTS, "experts", "at most 512 logits per token where a probability selects, 896 where scores select more than 8 experts: registers") \
  X(RULE_MEMORY, "memory", "x, h and the smallest ring fit into shared memory")                                 \
  X(RULE_OVERLAY, "overlay", "h of a rank must fit where x was, and there must be a second rank")               \
  X(RULE_FLIGHT, "flight", "no more stages in flight than the ring has")                                        \
  X(RULE_EQUIVALENT, "equivalent", "another schedule in the space does exactly the same")

enum batch_rule {
#define RULE_ENUM(id, name, help) id,
  RULES_TABLE(RULE_ENUM)
#undef RULE_ENUM
  BATCH_RULES
};
static const struct rule rules[BATCH_RULES] = {
#define RULE_ROW(id, name, help) {name, help},
    RULES_TABLE(RULE_ROW)
#undef RULE_ROW
};

/* Sizes that follow from problem, schedule and device: the host's twin of struct Layout in layout.cuh. */
struct layout {
  int groups, tokens;     /* of 8 tokens; tokens at most */
  int kblocks, hblocks;   /* of w13 and of w2 */
  int units, unit_stages; /* up units per expert, stages per unit */
  int grid, down_ctas, down_rows;
  int down_row_blocks;    /* scale blocks that a CTA's rows touch */
  int down_kblocks;       /* k-blocks per down copy */
  int down_parts;         /* stages of the ring in a down stage */
  int down_ring;          /* down stages, in the ring and where x was */
  int turn_slots;         /* turns that the scheduler may be ahead */
  int low_ranks;          /* ranks whose h does not lie where x (and with many ranks the partial sums) was */
  int slots;              /* active experts at most */
  int rank_slots, pass_words, slot_bytes; /* tables of slots and ranks: entries per token, words per slot, bytes of a slot's number */
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

static int groups_for(int tokens)
{
  const int groups = ceil_div(tokens, 8);
  return groups < MF_BATCH_MIN_GROUPS ? MF_BATCH_MIN_GROUPS : groups > MF_BATCH_MAX_GROUPS ? MF_BATCH_MAX_GROUPS : groups;
}

/* Of four warps, those that a tile of 16 rows of w2 may have. */
static int tile_warps_of(int down_rows)
{
  return down_rows <= 16 ? 4 : down_rows <= 32 ? 2 : 1;
}

/* Whether consumers have more registers than others, which can do with fewer. */
static bool many_registers(const struct layout *l)
{
  const int row_chunks = l->hblocks % 4 == 0 || l->hblocks == 3 ? 2 * ceil_div(l->hblocks, 4) : ceil_div(l->hblocks, 2);
  return l->groups == 2 && row_chunks <= 4;
}

/* Whether a consumer warp has registers for two k-blocks at a time. */
static bool two_kblocks(const struct layout *l)
{
  return many_registers(l) || (l->groups < 4 && tile_warps_of(l->down_rows) > 1);
}

/* k-blocks of w2 that a down stage of 'parts' stages of the ring may have: what fits, and one or two for each warp that shares a tile of 16 rows. */
static int most_down_kblocks(const struct layout *l, int parts)
{
  const int most = tile_warps_of(l->down_rows) * (two_kblocks(l) ? 2 : 1), fit = parts * STAGE_BYTES / (128 * l->down_rows);
  return fit < most ? fit : most;
}

/* Sets of consumer warps that have the down stages in turn: of as few warps as two (or three) k-blocks each allow, or of four where there are too few places or registers. */
static int down_sets(const struct layout *l, int places)
{
  const bool even = l->hblocks % l->down_kblocks == 0, registers = two_kblocks(l) || even;
  const int each = many_registers(l) && even && l->down_kblocks % 3 == 0 ? 3 : 2;
  const int most = tile_warps_of(l->down_rows), share = ceil_div(l->down_kblocks, each), few = share < most ? share : most, tiles = 4 / most;
  return few <= 2 && registers && places >= 16 / (tiles * few) ? 8 / (tiles * few) : 2;
}

/* The down stages: parts of each, k-blocks, how many there are, in the ring and where x was. */
static void size_down_stages(struct layout *l, int ring, int high_ranks)
{
  const int tile_warps = tile_warps_of(l->down_rows);
  const int one = ceil_div(l->hblocks, most_down_kblocks(l, 1)), two = ceil_div(l->hblocks, most_down_kblocks(l, 2));
  const int rounds_one = one * ceil_div(ceil_div(l->hblocks, one), tile_warps), rounds_two = two * ceil_div(ceil_div(l->hblocks, two), tile_warps);
  const int parts = two < one && rounds_two <= rounds_one ? 2 : 1, bytes = parts * STAGE_BYTES;
  const int in_x = (l->kblocks - high_ranks * l->hblocks) * l->groups * 1024 / bytes;
  const int all = ring / parts + (in_x > 0 ? in_x : 0), at_most = MAX_DOWN_BYTES / bytes, places = all < at_most ? all : at_most;
  l->down_parts = parts;
  l->down_kblocks = ceil_div(l->hblocks, parts == 2 ? two : one);
  l->down_ring = places / down_sets(l, places) * down_sets(l, places);
}

/* The layout's struct Shared, field by field. */
static long shared_size(const struct mf_problem *p, const struct layout *l, int ring)
{
  const int ranks = problem_ranks(p);
  const long local = align_up(problem_stored_experts(p), 32);
  const long columns = stream_has_scores(p) ? align_up(p->experts + p->zero_experts, 4) : 1;
  const long stages = (long)ring * STAGE_BYTES, scores = 8L * ROUTERS * columns; /* share their space */
  long at = align_up(stages > scores ? stages : scores, 1024) + 1024L * l->groups * (l->kblocks + l->low_ranks * l->hblocks);
  at += 8L * 32 * 16 * REDUCE_BUFFERS;
  at += align_up(4L * l->kblocks * l->tokens + 4L * local + 4L * align_up((long)l->slots * l->pass_words, 4) + align_up(l->slots, 16) + 16, 16); /* cleared */
  at += 8L * l->turn_slots * l->kblocks;
  at = align_up(at, 16) + 16L * l->turn_slots;
  at += 32L * l->groups * ranks * l->hblocks + 4L * l->slots * l->down_row_blocks * l->hblocks + 4L * l->tokens * ranks;
  at += 2L * 4 * l->slots;
  at = align_up(at, 8) + (long)(l->rank_slots + ranks) * l->tokens * l->slot_bytes;
  at += 4L + 2L * 4 * REDUCE_BUFFERS + 4L * ring + local * l->slot_bytes;
  at = align_up(at, 8) + 8L * (2 * REDUCE_BUFFERS + 3 * l->turn_slots + 2 + 2 * ring + 2 * l->down_ring);
  return align_up(at, 1024);
}

/* Ranks whose h has room where x was, with many ranks also where the partial sums were: half of them at most. */
static int most_high_ranks(const struct mf_problem *p, int groups)
{
  const int atoms = groups * (p->hidden / 128) + (problem_ranks(p) > FEW_RANKS ? 4 * REDUCE_BUFFERS : 0);
  const int fit = atoms / (groups * ceil_div(p->intermediate_offset + p->intermediate, 128));
  return fit < problem_ranks(p) / 2 ? fit : problem_ranks(p) / 2;
}

static void size_rank_tables(const struct mf_problem *p, struct layout *l)
{
  const int ranks = problem_ranks(p);
  const bool many = ranks > FEW_RANKS;
  l->rank_slots = (int)align_up(ranks, 8);
  l->pass_words = ceil_div(l->groups * (!many ? 8 : ranks <= 16 ? 16 : 32), 32);
  l->slot_bytes = l->slots > 256 || (l->slots == 256 && many) ? 2 : 1;
}

static struct layout make_layout(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev)
{
  const int ring = sched->value[KNOB_RING];
  struct layout l = {0};
  l.groups = sched->value[KNOB_GROUPS];
  l.tokens = 8 * l.groups;
  l.kblocks = p->hidden / 128;
  l.hblocks = ceil_div(p->intermediate_offset + p->intermediate, 128);
  l.units = p->intermediate / 8;
  l.unit_stages = 2 * ceil_div(l.kblocks, 2 * STAGE_KBLOCKS);
  l.grid = dev->sms;
  l.down_rows = 8 * ceil_div(p->hidden / 8, dev->sms);
  l.down_ctas = ceil_div(p->hidden, l.down_rows);
  l.down_row_blocks = 128 % l.down_rows == 0 ? 1 : 2;
  l.turn_slots = ring / l.unit_stages + 2;
  l.low_ranks = problem_ranks(p) - (sched->value[KNOB_OVERLAY] ? most_high_ranks(p, l.groups) : 0);
  size_down_stages(&l, ring, problem_ranks(p) - l.low_ranks);
  l.slots = (l.tokens * p->top_k < p->expert_count ? l.tokens * p->top_k : p->expert_count) + problem_shared(p);
  size_rank_tables(p, &l);
  l.shared_bytes = shared_size(p, &l, ring);
  return l;
}

/* Of the smallest schedule for so many groups. */
static long least_shared_bytes(const struct mf_problem *p, int groups, const struct device_info *dev)
{
  struct schedule least = {.family = &family_batch};
  least.value[KNOB_GROUPS] = groups;
  least.value[KNOB_RING] = knobs[KNOB_RING].values[0];
  least.value[KNOB_OVERLAY] = most_high_ranks(p, groups) > 0;
  return make_layout(p, &least, dev).shared_bytes;
}

/* The most tokens, in whole groups, whose x and h fit with the smallest ring; -1: not even those of the fewest groups do. */
static int most_tokens(const struct mf_problem *p, const struct device_info *dev)
{
  int groups = MF_BATCH_MAX_GROUPS;
  while(groups >= MF_BATCH_MIN_GROUPS && least_shared_bytes(p, groups, dev) > dev->shared_bytes_per_cta)
    groups--;
  return groups >= MF_BATCH_MIN_GROUPS ? 8 * groups : -1;
}

static enum mf_status reject(struct verdict *why, enum batch_rule rule, long have, long allowed, long nearest, const char *detail)
{
  *why = (struct verdict){.stage = "space", .rule = rules[rule].name, .have = have, .allowed = allowed, .nearest = nearest};
  strncpy(why->detail, detail != NULL ? detail : rules[rule].help, sizeof(why->detail) - 1);
  return MF_REJECTED;
}

/* ---- what the family serves ---- */

/* Logits of a token that its router has registers for. */
static int most_columns(const struct mf_problem *p)
{
  const int scoring = stream_scoring(p);
  if(scoring == MF_STREAM_PROBABILITY)
    return MAX_PROBABILITIES;
  if(scoring == MF_STREAM_GIVEN || problem_ranks(p) <= FEW_RANKS || (scoring == MF_STREAM_SOFTMAX && p->logits_dtype == MF_DTYPE_BF16))
    return MF_STREAM_MAX_COLUMNS;
  return MAX_SCORES;
}

static enum mf_status batch_serves(const struct mf_problem *p, int tokens, const struct device_info *dev, struct verdict *why)
{
  enum mf_status rc;
  long least_bytes;
  if(tokens < MF_BATCH_MIN_TOKENS || tokens > MF_BATCH_MAX_TOKENS)
    return reject(why, RULE_TOKENS, tokens, MF_BATCH_MAX_TOKENS, tokens < MF_BATCH_MIN_TOKENS ? MF_BATCH_MIN_TOKENS : MF_BATCH_MAX_TOKENS, NULL);
  if(problem_ranks(p) > MF_BATCH_MAX_TOPK)
    return reject(why, RULE_TOP_K, problem_ranks(p), MF_BATCH_MAX_TOPK, MF_BATCH_MAX_TOPK - problem_shared(p), NULL);
  rc = stream_serves_problem(p, dev, why);
  if(rc != MF_OK)
    return rc;
  if(p->experts + p->zero_experts > most_columns(p))
    return reject(why, RULE_EXPERTS, p->experts + p->zero_experts, most_columns(p), most_columns(p), NULL);
  least_bytes = least_shared_bytes(p, groups_for(tokens), dev);
  if(least_bytes > dev->shared_bytes_per_cta)
    return reject(why, RULE_MEMORY, least_bytes, dev->shared_bytes_per_cta, most_tokens(p, dev),
                  "x and h of so many tokens and the smallest ring do not fit into shared memory");
  return MF_OK;
}

static void batch_token_bucket(const struct mf_problem *p, int tokens, int *lo, int *hi)
{
  const int groups = groups_for(tokens);
  (void)p;
  *hi = 8 * groups;
  *lo = groups == MF_BATCH_MIN_GROUPS ? MF_BATCH_MIN_TOKENS : *hi - 7;
}

static long batch_shared_bytes(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev)
{
  return make_layout(p, sched, dev).shared_bytes;
}

/* The deepest ring up to 'most' that fits; 0 if none does. */
static int deepest_ring(const struct mf_problem *p, struct schedule *sched, const struct device_info *dev, int most)
{
  const struct knob *ring = &knobs[KNOB_RING];
  for(int i = ring->nvalues - 1; i >= 0; i--) {
    sched->value[KNOB_RING] = ring->values[i];
    if(ring->values[i] <= most && batch_shared_bytes(p, sched, dev) <= dev->shared_bytes_per_cta)
      return ring->values[i];
  }
  return 0;
}

/* As the prototype was measured to be best: 64 KB in flight, a ring of 12 stages, h over x where the ring is shallow otherwise. */
static void batch_default_schedule(const struct mf_problem *p, int tokens, const struct device_info *dev, struct schedule *out)
{
  int ring;
  out->family = &family_batch;
  out->value[KNOB_GROUPS] = groups_for(tokens);
  out->value[KNOB_OVERLAY] = 0;
  ring = deepest_ring(p, out, dev, DEFAULT_RING);
  if(ring < SHALLOW_RING && most_high_ranks(p, out->value[KNOB_GROUPS]) > 0) {
    out->value[KNOB_OVERLAY] = 1;
    ring = deepest_ring(p, out, dev, DEFAULT_RING);
  }
  out->value[KNOB_RING] = ring > 0 ? ring : knobs[KNOB_RING].values[0];
  out->value[KNOB_LOOKAHEAD] = 2;
  out->value[KNOB_FLIGHT] = out->value[KNOB_RING] < 8 ? out->value[KNOB_RING] : 8;
  out->value[KNOB_FIRST_DOWN] = out->value[KNOB_FLIGHT] < 8 ? 4 : 8;
  out->value[KNOB_STATIC] = 4;
  out->value[KNOB_ROTATE] = 1;
}

static enum mf_status batch_constrain(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct verdict *why)
{
  const struct layout l = make_layout(p, sched, dev);
  const int ring = sched->value[KNOB_RING], flight = sched->value[KNOB_FLIGHT], first_down = sched->value[KNOB_FIRST_DOWN];
  const enum mf_status rc = batch_serves(p, l.tokens, dev, why);
  if(rc != MF_OK)
    return rc;
  if(sched->value[KNOB_OVERLAY] && l.low_ranks == problem_ranks(p))
    return reject(why, RULE_OVERLAY, 1, 0, 0, NULL);
  if(flight > ring || first_down > ring)
    return reject(why, RULE_FLIGHT, flight > ring ? flight : first_down, ring, ring, NULL);
  if(flight < ring && flight / l.down_parts < l.down_ring && first_down / l.down_parts >= l.down_ring)
    return reject(why, RULE_FLIGHT, first_down, l.down_ring * l.down_parts - 1, l.down_ring * l.down_parts - 1,
                  "a cap on the down phase that begins later: the first down stages may not fill the down ring");
  if(sched->value[KNOB_STATIC] == ALL_STATIC && sched->value[KNOB_LOOKAHEAD] != 2)
    return reject(why, RULE_EQUIVALENT, sched->value[KNOB_LOOKAHEAD], 2, 2, "no tickets: the look-ahead means nothing");
  memset(why, 0, sizeof(*why));
  return MF_OK;
}

/* ---- source ---- */

static void batch_emit(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct strbuf *out)
{
  const struct layout l = make_layout(p, sched, dev);
  char name[NAME_MAX_LEN];
  schedule_artifact_name(sched, name, sizeof(name));
  strbuf_printf(out, "// %s: one fused MoE decode operator, %d experts top-%d, N = %d, K = %d, %d to %d tokens, %d CTAs.\n", name, p->experts, p->top_k,
                p->intermediate, p->hidden, MF_BATCH_MIN_TOKENS, l.tokens, l.grid);
  strbuf_printf(out, "// Emitted by moeforge (family batch, version %d); change the templates, not this file.\n", family_batch.version);
  strbuf_printf(out, "#include \"%s\"\n\n", family_batch.entry_include);
  stream_emit_shape(p, out);
  strbuf_printf(out, "struct Schedule {\n");
  strbuf_printf(out, "  static constexpr int kGridCtas = %d; // one per multiprocessor\n", l.grid);
  strbuf_printf(out, "  static constexpr int kDownCtas = %d; // own %d rows of w2 each\n", l.down_ctas, l.down_rows);
  strbuf_printf(out, "  static constexpr int kTokenGroups = %d; // of 8 tokens\n", l.groups);
  strbuf_printf(out, "  static constexpr int kRingStages = %d;\n", sched->value[KNOB_RING]);
  strbuf_printf(out, "  static constexpr int kOverlay = %d; // 1: h of the ranks from %d on lies where x was\n", sched->value[KNOB_OVERLAY], l.low_ranks);
  strbuf_printf(out, "  static constexpr int kTicketLookahead = %d;\n};\n\n", sched->value[KNOB_LOOKAHEAD]);
  strbuf_printf(out, "using Layout = batch::Layout<Shape, Schedule>;\n\n");
  strbuf_printf(out, "extern \"C\" __device__ const mf_batch_meta mf_meta = batch::make_meta<Layout>();\n\n");
  strbuf_printf(out, "extern \"C\" __global__ void __launch_bounds__(Layout::kThreads, 1)\n");
  strbuf_printf(out, "mf_moe(const __grid_constant__ mf_stream_params params, const __grid_constant__ hw::TensorMap up_map,\n");
  strbuf_printf(out, "       const __grid_constant__ hw::TensorMap down_map)\n{\n");
  strbuf_printf(out, "  batch::run<Layout>(params, up_map, down_map);\n}\n");
}

/* ---- recipe ---- */

static enum mf_status batch_recipe(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct mf_recipe *out,
                                   struct error *err)
{
  const struct layout l = make_layout(p, sched, dev);
  const struct stream_knobs runtime_knobs = {sched->value[KNOB_FLIGHT], sched->value[KNOB_FIRST_DOWN], sched->value[KNOB_STATIC], sched->value[KNOB_ROTATE]};
  (void)err;
  memset(out, 0, sizeof(*out));
  out->magic = MF_RECIPE_MAGIC;
  out->version = 1; /* stream_add_params raises it where it must */
  out->size = sizeof(*out);
  out->flags = MF_RECIPE_COOPERATIVE;
  strncpy(out->kernel, family_batch.kernel, sizeof(out->kernel) - 1);
  out->grid[0] = (uint32_t)l.grid;
  out->block[0] = THREADS;
  out->grid[1] = out->grid[2] = out->block[1] = out->block[2] = 1;
  out->shared_bytes = (uint32_t)l.shared_bytes;
  out->min_sms = (uint32_t)l.grid;
  out->tokens_min = MF_BATCH_MIN_TOKENS; /* fewer than the last group needs: a token count between two tuned ones is served by the larger one's kernel */
  out->tokens_max = (uint32_t)l.tokens;
  out->workspace_bytes = (uint64_t)MF_BATCH_WS_BYTES(l.groups, problem_ranks(p), p->intermediate);
  out->workspace_zero_bytes = out->workspace_bytes;
  out->h_offset = MF_BATCH_WS_H;
  out->h_buffer_bytes = (uint64_t)MF_BATCH_WS_H_BYTES(l.groups, problem_ranks(p), p->intermediate);
  out->launch_count_offset = MF_STREAM_WS_LAUNCHES;
  out->routing_ids_offset = (uint64_t)MF_BATCH_WS_IDS(l.groups, problem_ranks(p), p->intermediate);
  out->routing_weights_offset = (uint64_t)MF_BATCH_WS_WEIGHTS(l.groups, problem_ranks(p), p->intermediate);
  out->status_offset = MF_STREAM_WS_STATUS;
  stream_add_params(out, p, &runtime_knobs);
  stream_add_up_map(out, p, 8, STAGE_KBLOCKS);
  stream_add_down_map(out, p, l.down_rows, l.down_kblocks);
  stream_add_arguments(out);
  return MF_OK;
}

/* ---- metadata ---- */

static enum mf_status batch_check_meta(const void *meta, size_t bytes, const struct mf_problem *p, const struct schedule *sched,
                                       const struct device_info *dev, struct verdict *why)
{
  const struct layout l = make_layout(p, sched, dev);
  const struct mf_batch_meta *m = meta;
  if(bytes != sizeof(*m))
    return family_meta_differs(why, "bytes of the metadata", (long)bytes, (long)sizeof(*m));
  const struct meta_row rows[] = {
      {"magic", (long)m->magic, (long)MF_BATCH_MAGIC},
      {"version", (long)m->version, (long)MF_BATCH_VERSION},
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
      {"token_groups", (long)m->token_groups, l.groups},
      {"overlay", (long)m->overlay, sched->value[KNOB_OVERLAY]},
      {"low_ranks", (long)m->low_ranks, l.low_ranks},
      {"grid_ctas", (long)m->grid_ctas, l.grid},
      {"threads", (long)m->threads, THREADS},
      {"shared_bytes", (long)m->shared_bytes, l.shared_bytes},
      {"down_ctas", (long)m->down_ctas, l.down_ctas},
      {"down_rows", (long)m->down_rows, l.down_rows},
      {"down_kblocks", (long)m->down_kblocks, l.down_kblocks},
      {"ring_stages", (long)m->ring_stages, sched->value[KNOB_RING]},
      {"stage_bytes", (long)m->stage_bytes, STAGE_BYTES},
      {"turn_slots", (long)m->turn_slots, l.turn_slots},
      {"workspace_bytes", (long)m->workspace_bytes, MF_BATCH_WS_BYTES(l.groups, problem_ranks(p), p->intermediate)},
      {"h_offset", (long)m->h_offset, MF_BATCH_WS_H},
      {"ids_offset", (long)m->ids_offset, MF_BATCH_WS_IDS(l.groups, problem_ranks(p), p->intermediate)},
      {"weights_offset", (long)m->weights_offset, MF_BATCH_WS_WEIGHTS(l.groups, problem_ranks(p), p->intermediate)},
      {"status_offset", (long)m->status_offset, MF_STREAM_WS_STATUS},
      {"launches_offset", (long)m->launches_offset, MF_STREAM_WS_LAUNCHES},
  };
  return family_meta_compare(rows, sizeof(rows) / sizeof(rows[0]), why);
}

/* ---- cost model ---- */

/* Passes per stage: the groups that an expert's tokens are in, if they are spread at random. */
static double passes_per_expert(int groups, double tokens_per_expert)
{
  return groups * (1 - pow(1 - 1.0 / groups, tokens_per_expert));
}

/* For ranking candidates that cannot be timed. The constants are chosen by hand, near what the prototype of this kernel took at 9 to 32 tokens. */
static double batch_predict_us(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, int tokens, double active)
{
  const struct layout l = make_layout(p, sched, dev);
  const double up_bytes = 2.0 * p->intermediate * p->hidden, down_bytes = 1.0 * p->intermediate * p->hidden;
  const double peak = dev->bandwidth_gbps * 1e3, latency_us = 1.3;
  const double in_flight = dev->sms * (double)sched->value[KNOB_FLIGHT] * STAGE_BYTES;
  const double rate = peak < in_flight / latency_us ? peak : in_flight / latency_us;
  const double share = active * l.units / dev->sms;       /* units per CTA */
  const double waves = (double)(long)(share + 0.999999);  /* of the busiest CTA, dealt statically */
  const bool tickets = sched->value[KNOB_STATIC] != ALL_STATIC;
  const double imbalance = tickets ? 1 + 0.3 / share : 1 + 0.5 * (waves / share - 1);
  const double passes = passes_per_expert(groups_for(tokens), tokens * (double)problem_ranks(p) / (active > 1 ? active : 1));
  const double slow = 1.04 + 0.25 * (passes - 1);         /* several passes per stage hold the ring up */
  const double front = 0.8 + 1.0e-4 * tokens * p->hidden + (tickets ? 0.1 : 0) + 0.3 * (l.groups - groups_for(tokens));
  const double hand_off = 1.0 + 0.2 * tokens * problem_ranks(p) / (active > 1 ? active : 1) + (sched->value[KNOB_OVERLAY] ? 0.5 : 0) +
                          0.05 * (16 - sched->value[KNOB_RING]);
  const double down_imbalance = 1.0 * dev->sms * l.down_rows / p->hidden;
  return dev->launch_us + front + hand_off + slow * active * (up_bytes * imbalance + down_bytes * down_imbalance) / rate;
}

const struct family_ops family_batch = {
    .name = "batch",
    .version = 1,
    .kernel = "mf_moe",
    .entry_include = "batch/kernel.cuh",
    .knobs = knobs,
    .nknobs = BATCH_KNOBS,
    .rules = rules,
    .nrules = BATCH_RULES,
    .serves = batch_serves,
    .token_bucket = batch_token_bucket,
    .default_schedule = batch_default_schedule,
    .constrain = batch_constrain,
    .shared_bytes = batch_shared_bytes,
    .emit = batch_emit,
    .recipe = batch_recipe,
    .check_meta = batch_check_meta,
    .predict_us = batch_predict_us,
};
