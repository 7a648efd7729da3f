/* spec.c - see spec.h: the schema of model specs, and reading them.
 *
 * The table below is the schema. Values are read into a draft: a model_spec, and beside it what a problem does not hold (the unsharded size and
 * the rank's cut). Only when every key is sound by itself is the cut applied and the problem judged as a whole; the fields of the problem
 * that such a rule names are mapped back to the keys, so that these errors have their line too. */
#include "spec.h"

#include "schema.h"
#include "spec_internal.h"
#include <stdio.h>
#include <string.h>

#define GIB 1073741824.0

struct model_draft {
  struct model_spec spec; /* first: the custom readers get a pointer to it */
  struct rank_cut cut;
  double max_memory_gib;
  int32_t weights;        /* index into its choices: there is one */
  int32_t shared_gate;
};

#define HOME(member) SCHEMA_HOME(struct model_draft, member)

static const struct schema_row model_rows[] = {
    SCHEMA_NAME_ROW("name", NULL, spec.name, "names the shape in lists and files; the file is called `<name>.yaml`"),
    SCHEMA_TEXT_ROW("source", "none", spec.source, "where the numbers come from"),

    SCHEMA_INT_ROW("shape.experts", 1, EXPERTS_LIMIT, 1, NULL, spec.problem.experts, "routed experts E of the whole model"),
    SCHEMA_INT_ROW("shape.top_k", 1, TOP_K_LIMIT, 1, NULL, spec.problem.top_k, "experts chosen per token"),
    SCHEMA_INT_ROW("shape.hidden", SCALE_BLOCK, HIDDEN_LIMIT, SCALE_BLOCK, NULL, spec.problem.hidden, "columns of the layer's input and output, K"),
    SCHEMA_INT_ROW("shape.intermediate", WEIGHT_STEP, INTERMEDIATE_LIMIT, WEIGHT_STEP, NULL, cut.intermediate,
        "features of one expert before any sharding; a rank holds N = intermediate / tp"),
    SCHEMA_INT_ROW("shape.tp", 1, RANKS_LIMIT, 1, "1", cut.tp, "tensor-parallel ranks; each gets a multiple of 16 features"),
    SCHEMA_INT_ROW("shape.tp_rank", 0, RANKS_LIMIT - 1, 1, "0", cut.tp_rank,
        "which rank: decides where its first feature lies in a 128-block, (tp_rank * N) mod 128; matters only if N is no multiple of 128"),
    SCHEMA_INT_ROW("shape.ep", 1, RANKS_LIMIT, 1, "1", cut.ep, "expert-parallel ranks; divides experts"),
    SCHEMA_INT_ROW("shape.ep_rank", 0, RANKS_LIMIT - 1, 1, "0", cut.ep_rank, "which rank: it holds experts ep_rank * experts / ep and on"),

    SCHEMA_CHOICE_ROW("router.score", SCORE_NAMES, NULL, spec.problem.score,
        "from logit to weight; topk_softmax selects first and takes the softmax over the chosen; given: the engine has routed, a call passes ids and weights"),
    SCHEMA_FLAG_ROW("router.renormalize", NULL, spec.problem.renormalize,
        "the chosen weights are divided by their sum; models differ, so there is no default"),
    SCHEMA_FLAG_ROW("router.bias", "false", spec.problem.select_bias, "a correction bias takes part in selecting, not in weighing"),
    SCHEMA_INT_ROW("router.groups", 1, EXPERTS_LIMIT, 1, "1", spec.problem.groups,
        "groups of experts; divides experts; a group's score is the sum of its two best"),
    SCHEMA_INT_ROW("router.groups_kept", 1, EXPERTS_LIMIT, 1, "1", spec.problem.groups_kept, "groups that may be chosen from"),
    SCHEMA_DOUBLE_ROW("router.scaling", 0.001, 1000, "1", spec.routed_scaling, "factor on the routing weights, after renormalising"),
    SCHEMA_CHOICE_ROW("router.logits", DTYPE_NAMES, "bf16", spec.problem.logits_dtype, "type of the router logits that the engine passes"),
    SCHEMA_INT_ROW("router.zero_experts", 0, EXPERTS_LIMIT, 1, "0", spec.problem.zero_experts,
        "further logits whose experts do nothing here (LongCat)"),
    SCHEMA_FLAG_ROW("router.weight_on_input", "false", spec.problem.weight_on_input,
        "the weight multiplies the expert's input, not its output (Llama-4)"),

    SCHEMA_CHOICE_ROW("quantisation.weights", "fp8_e4m3", "fp8_e4m3", weights, "type of the expert weights"),
    SCHEMA_CUSTOM_ROW("quantisation.block", "[128, 128]", "[128, 128]", spec_read_block, "rows and columns that share one f32 weight scale"),
    SCHEMA_CHOICE_ROW("quantisation.act_scale", ACT_SCALE_NAMES, "f32", spec.problem.act_scale,
        "scales of the activations: as they are, or rounded up to a power of two (checkpoints with `scale_fmt: ue8m0`)"),

    SCHEMA_FLOAT_ROW("activation.swiglu_limit", 0, 1e6, "0", spec.problem.swiglu_limit, "clamp of gate and up; 0 = none"),
    SCHEMA_FLOAT_ROW("activation.swiglu_alpha", 0, 100, "0", spec.problem.swiglu_alpha, "gate * sigmoid(alpha * gate); 0 or 1 = SiLU"),

    SCHEMA_INT_ROW("shared_experts", 0, SHARED_LIMIT, 1, "0", spec.problem.shared_experts,
        "always-active experts of the same size fused into the call; 0: the engine runs them itself"),
    SCHEMA_FLAG_ROW("shared_gate", "false", shared_gate,
        "a shared expert weighs the sigmoid of a gate that the engine passes for each token; else 1"),
    SCHEMA_CUSTOM_ROW("tokens", "ascending token counts from 1 to 64 such as 1-8 or [1, 2, 4, 8]", "1-8", spec_read_tokens,
        "token counts to tune for"),
    SCHEMA_CUSTOM_ROW("routing_mix", "shares of uniform, zipf, concentrated, dispersed that sum to 1",
        "{uniform: 0.5, zipf: 0.2, dispersed: 0.15, concentrated: 0.15}", spec_read_mix,
        "how much each kind of routing counts when schedules are compared"),

    SCHEMA_DOUBLE_ROW("limits.max_error", 0, 1, "0", spec.limits.max_error,
        "relative error end to end that is still accepted, for qualify; 0 = the built-in gates alone"),
    SCHEMA_DOUBLE_ROW("limits.min_speedup", 0, 1000, "0", spec.limits.min_speedup, "least ratio to the baseline, for qualify; 0 = none"),
    SCHEMA_DOUBLE_ROW("limits.max_memory_gib", 0, 100000, "0", max_memory_gib, "GiB of device memory that one layer may take, for qualify; 0 = no limit"),
};
#define NROWS ((int)(sizeof(model_rows) / sizeof(model_rows[0])))

/* Where a field of the problem is written in a spec. */
static const struct place {
  const char *field, *path;
} places[] = {
    {"experts", "shape.experts"},
    {"top_k", "shape.top_k"},
    {"hidden", "shape.hidden"},
    {"intermediate", "shape.intermediate"},
    {"intermediate_offset", "shape.tp_rank"},
    {"tp", "shape.tp"},
    {"tp_rank", "shape.tp_rank"},
    {"expert_begin", "shape.ep_rank"},
    {"expert_count", "shape.ep"},
    {"ep", "shape.ep"},
    {"ep_rank", "shape.ep_rank"},
    {"zero_experts", "router.zero_experts"},
    {"select_bias", "router.bias"},
    {"renormalize", "router.renormalize"},
    {"groups", "router.groups"},
    {"groups_kept", "router.groups_kept"},
};

struct judging {
  struct faults *faults;
  const int *lines; /* of the rows */
};

static int row_index(const char *path)
{
  for(int i = 0; i < NROWS; i++)
    if(strcmp(model_rows[i].path, path) == 0)
      return i;
  return -1;
}

static void report_field(void *context, const char *field, const char *text)
{
  const struct judging *judging = context;
  const char *path = field;
  int row;
  for(size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++)
    if(strcmp(places[i].field, field) == 0)
      path = places[i].path;
  row = row_index(path);
  faults_add(judging->faults, row >= 0 ? judging->lines[row] : 0, path, "%s", text);
}

void spec_init(struct model_spec *spec)
{
  static const struct routing_weight mix[] = {
      {ROUTING_UNIFORM, 0.5}, {ROUTING_ZIPF, 0.2}, {ROUTING_DISPERSED, 0.15}, {ROUTING_CONCENTRATED, 0.15}};
  memset(spec, 0, sizeof(*spec));
  problem_init(&spec->problem);
  spec->routed_scaling = 1;
  for(spec->ntokens = 0; spec->ntokens < 8; spec->ntokens++)
    spec->tokens[spec->ntokens] = spec->ntokens + 1;
  memcpy(spec->mix, mix, sizeof(mix));
  spec->nmix = (int)(sizeof(mix) / sizeof(mix[0]));
}

/* What lies between the keys: the cut, then the problem as a whole. */
static void finish(struct model_draft *draft, const int *lines, struct faults *faults)
{
  struct judging judging = {.faults = faults, .lines = lines};
  struct mf_problem *p = &draft->spec.problem;
  if(p->swiglu_alpha == 1)
    p->swiglu_alpha = 0;
  if(draft->shared_gate != 0)
    p->shared_experts |= MF_SHARED_GATED;
  draft->spec.limits.max_memory_bytes = draft->max_memory_gib * GIB;
  if(spec_apply_cut(&draft->spec, &draft->cut, report_field, &judging))
    problem_faults(p, report_field, &judging);
}

enum mf_status spec_read(const char *path, struct model_spec *out, spec_report_fn *report, void *context, struct error *err)
{
  struct model_draft draft = {.cut = {.tp = 1, .ep = 1}};
  struct faults faults;
  struct ydoc doc;
  int lines[NROWS];
  enum mf_status rc;
  if(strlen(path) >= sizeof(draft.spec.path))
    return error_set(err, MF_ERR_IO, "expected a path of at most %zu bytes, got %.60s...", sizeof(draft.spec.path) - 1, path);
  faults_init(&faults, path, report, context, err);
  rc = ydoc_read(&doc, &faults);
  if(rc != MF_OK)
    goto out;
  spec_init(&draft.spec);
  memcpy(draft.spec.path, path, strlen(path) + 1);
  schema_read(model_rows, NROWS, doc.root, &draft, lines, &faults);
  if(faults.count == 0)
    finish(&draft, lines, &faults);
  if(faults.count == 0)
    *out = draft.spec;
out:
  ydoc_free(&doc);
  return rc == MF_ERR_IO || rc == MF_ERR_NOMEM ? rc : faults_end(&faults);
}

void spec_model_markdown(struct strbuf *out)
{
  schema_markdown(model_rows, NROWS, out);
}
