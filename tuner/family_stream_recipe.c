/* family_stream_recipe.c - what becomes of a schedule of the family `stream`: the source that is compiled, the recipe that launches it, and whether the
 * metadata of the compiled kernel say the same. family_stream.c has the rest. */
#include "family_stream_layout.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "spec.h"
#include "stream/params.h"

#define TENSOR_MAP_BYTES 128

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

void stream_emit(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct strbuf *out)
{
  const struct stream_layout l = stream_make_layout(p, sched, dev);
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
  strbuf_printf(out, "  static constexpr int kUnitFeatures = %d;\n", l.unit_features);
  strbuf_printf(out, "  static constexpr int kTicketLookahead = %d;\n", sched->value[KNOB_LOOKAHEAD]);
  strbuf_printf(out, "  static constexpr int kScaleSlots = %d;\n", l.scale_slots);
  strbuf_printf(out, "  static constexpr int kPdl = %d; // 1: programmatic dependent launch\n};\n\n", sched->value[KNOB_PDL]);
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

/* w13 as [k-block][expert and group of rows][gate, up][row][column]: one box is a unit's gate and up rows x 'kblocks'. The strides do not grow with the
 * dimension, which the driver accepts though its documentation does not promise it. */
void stream_add_up_map(struct mf_recipe *r, const struct mf_problem *p, int features, int kblocks)
{
  struct mf_recipe_map *m = &r->maps[r->nmaps++];
  const uint64_t f = (uint64_t)features;
  const uint64_t dim[5] = {128, f, 2, (uint64_t)problem_stored_experts(p) * 2 * (uint64_t)p->intermediate / f, (uint64_t)p->hidden / 128};
  const uint32_t box[5] = {128, (uint32_t)features, 2, 1, (uint32_t)kblocks};
  m->base = MF_SRC_W13;
  m->rank = 5;
  m->swizzle = 128;
  m->promotion = 128;
  memcpy(m->dim, dim, sizeof(dim));
  memcpy(m->box, box, sizeof(box));
  add_stride(&m->stride[0], MF_SRC_W13_ROW_STRIDE, 1);
  add_stride(&m->stride[1], MF_SRC_W13_ROW_STRIDE, (uint64_t)p->intermediate);
  add_stride(&m->stride[2], MF_SRC_W13_ROW_STRIDE, f);
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

enum mf_status stream_recipe(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct mf_recipe *out,
                             struct error *err)
{
  const struct stream_layout l = stream_make_layout(p, sched, dev);
  const struct stream_knobs runtime_knobs = {sched->value[KNOB_FLIGHT], sched->value[KNOB_FIRST_DOWN], sched->value[KNOB_STATIC], sched->value[KNOB_ROTATE]};
  (void)err;
  memset(out, 0, sizeof(*out));
  out->magic = MF_RECIPE_MAGIC;
  out->version = 1;
  out->size = sizeof(*out);
  out->flags = sched->value[KNOB_PDL] != 0 ? MF_RECIPE_PDL : MF_RECIPE_COOPERATIVE; /* never both: docs/kernel.md */
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
  stream_add_up_map(out, p, l.unit_features, l.stage_kblocks);
  stream_add_down_map(out, p, l.down_rows, l.down_kblocks);
  stream_add_arguments(out);
  return MF_OK;
}

/* ---- metadata ---- */

enum mf_status stream_check_meta(const void *meta, size_t bytes, const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev,
                                 struct verdict *why)
{
  const struct stream_layout l = stream_make_layout(p, sched, dev);
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
      {"unit_features", (long)m->unit_features, l.unit_features},
      {"pdl", (long)m->pdl, sched->value[KNOB_PDL]},
      {"workspace_bytes", (long)m->workspace_bytes, MF_STREAM_WS_BYTES(problem_ranks(p), p->intermediate)},
      {"h_offset", (long)m->h_offset, MF_STREAM_WS_H},
      {"ids_offset", (long)m->ids_offset, MF_STREAM_WS_IDS(problem_ranks(p))},
      {"weights_offset", (long)m->weights_offset, MF_STREAM_WS_WEIGHTS(problem_ranks(p))},
      {"status_offset", (long)m->status_offset, MF_STREAM_WS_STATUS},
      {"launches_offset", (long)m->launches_offset, MF_STREAM_WS_LAUNCHES},
  };
  return family_meta_compare(rows, sizeof(rows) / sizeof(rows[0]), why);
}
