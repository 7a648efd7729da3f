/* spec_write.c - writes a model spec as YAML that spec_read() reads back to the same problem.
 *
 * Every key is written, in the order of the schema, with a comment where the value does not speak for itself, so that the file serves as a
 * form to edit. A spec that does not know its ranks (tp = 0, or a tp that contradicts the problem) gets the fewest ranks that explain its offset. */
#include "schema.h"
#include "spec_internal.h"

#include <stdio.h>
#include <stdlib.h>

#define GIB 1073741824.0

/* The shortest decimal that reads back as 'value'; single: as a float. */
static const char *number(double value, bool single, char *out, size_t space)
{
  for(int digits = 1; digits <= 17; digits++) {
    snprintf(out, space, "%.*g", digits, value);
    if(single ? (float)strtod(out, NULL) == (float)value : strtod(out, NULL) == value)
      break;
  }
  return out;
}

static void write_quoted(struct strbuf *out, const char *text)
{
  strbuf_printf(out, "\"");
  for(; *text != '\0'; text++) {
    if(*text == '"' || *text == '\\')
      strbuf_printf(out, "\\%c", *text);
    else
      strbuf_add(out, text, 1);
  }
  strbuf_printf(out, "\"");
}

static void choose_ranks(const struct model_spec *spec, int *tp, int *tp_rank)
{
  const struct mf_problem *p = &spec->problem;
  *tp = spec->tp;
  *tp_rank = spec->tp_rank;
  if(spec->tp >= 1 && spec->tp_rank >= 0 && spec->tp_rank < spec->tp && spec->tp_rank * p->intermediate % SCALE_BLOCK == p->intermediate_offset)
    return;
  for(*tp_rank = 0; *tp_rank < SCALE_BLOCK - 1; (*tp_rank)++)
    if(*tp_rank * p->intermediate % SCALE_BLOCK == p->intermediate_offset)
      break;
  *tp = *tp_rank + 1;
}

static void write_shape(const struct model_spec *spec, struct strbuf *out)
{
  const struct mf_problem *p = &spec->problem;
  int tp = 1, tp_rank = 0;
  choose_ranks(spec, &tp, &tp_rank);
  strbuf_printf(out, "\nshape:\n");
  strbuf_printf(out, "  experts: %d\n", p->experts);
  strbuf_printf(out, "  top_k: %d\n", p->top_k);
  strbuf_printf(out, "  hidden: %d\n", p->hidden);
  strbuf_printf(out, "  intermediate: %d    # unsharded; this rank holds %d\n", p->intermediate * tp, p->intermediate);
  strbuf_printf(out, "  tp: %d\n  tp_rank: %d\n", tp, tp_rank);
  strbuf_printf(out, "  ep: %d\n  ep_rank: %d\n", p->experts / p->expert_count, p->expert_begin / p->expert_count);
}

static const char *flag(int value)
{
  return value != 0 ? "true" : "false";
}

static void write_router(const struct model_spec *spec, struct strbuf *out)
{
  const struct mf_problem *p = &spec->problem;
  char text[32];
  strbuf_printf(out, "\nrouter:\n");
  strbuf_printf(out, "  score: %s\n", schema_choice_name(SCORE_NAMES, p->score, text, sizeof(text)));
  strbuf_printf(out, "  renormalize: %s\n", flag(p->renormalize));
  strbuf_printf(out, "  bias: %s\n", flag(p->select_bias));
  strbuf_printf(out, "  groups: %d\n  groups_kept: %d\n", p->groups, p->groups_kept);
  strbuf_printf(out, "  scaling: %s\n", number(spec->routed_scaling > 0 ? spec->routed_scaling : 1, false, text, sizeof(text)));
  strbuf_printf(out, "  logits: %s\n", schema_choice_name(DTYPE_NAMES, p->logits_dtype, text, sizeof(text)));
  strbuf_printf(out, "  zero_experts: %d\n", p->zero_experts);
  strbuf_printf(out, "  weight_on_input: %s\n", flag(p->weight_on_input));
}

static void write_numbers(const struct model_spec *spec, struct strbuf *out)
{
  const struct mf_problem *p = &spec->problem;
  char text[32];
  strbuf_printf(out, "\nquantisation:\n  weights: fp8_e4m3\n  block: [128, 128]\n");
  strbuf_printf(out, "  act_scale: %s\n", schema_choice_name(ACT_SCALE_NAMES, p->act_scale, text, sizeof(text)));
  strbuf_printf(out, "\nactivation:\n  swiglu_limit: %s\n", number((double)p->swiglu_limit, true, text, sizeof(text)));
  strbuf_printf(out, "  swiglu_alpha: %s\n", number((double)p->swiglu_alpha, true, text, sizeof(text)));
  strbuf_printf(out, "\nshared_experts: %d    # 0: the engine runs the model's shared expert itself\n", problem_shared(p));
  strbuf_printf(out, "shared_gate: %s\n", flag(problem_shared_gated(p)));
}

static void write_tokens(const struct model_spec *spec, struct strbuf *out)
{
  const int first = spec->tokens[0], last = spec->tokens[spec->ntokens - 1];
  if(last - first + 1 == spec->ntokens && spec->ntokens > 1) {
    strbuf_printf(out, "\ntokens: %d-%d\n", first, last);
    return;
  }
  strbuf_printf(out, "\ntokens: [");
  for(int i = 0; i < spec->ntokens; i++)
    strbuf_printf(out, "%s%d", i > 0 ? ", " : "", spec->tokens[i]);
  strbuf_printf(out, "]\n");
}

static void write_mix(const struct model_spec *spec, struct strbuf *out)
{
  char text[32];
  strbuf_printf(out, "\nrouting_mix:\n");
  for(int i = 0; i < spec->nmix; i++)
    strbuf_printf(out, "  %s: %s\n", routing_name(spec->mix[i].kind), number(spec->mix[i].weight, false, text, sizeof(text)));
}

static void write_limits(const struct model_spec *spec, struct strbuf *out)
{
  char text[32];
  strbuf_printf(out, "\nlimits:    # 0 = none\n  max_error: %s\n", number(spec->limits.max_error, false, text, sizeof(text)));
  strbuf_printf(out, "  min_speedup: %s\n", number(spec->limits.min_speedup, false, text, sizeof(text)));
  strbuf_printf(out, "  max_memory_gib: %s\n", number(spec->limits.max_memory_bytes / GIB, false, text, sizeof(text)));
}

void spec_write(const struct model_spec *spec, struct strbuf *out)
{
  strbuf_printf(out, "# Model shape for moeforge. docs/specs.md explains every key.\nname: %s\n", spec->name);
  if(spec->source[0] != '\0') {
    strbuf_printf(out, "source: ");
    write_quoted(out, spec->source);
    strbuf_printf(out, "\n");
  }
  write_shape(spec, out);
  write_router(spec, out);
  write_numbers(spec, out);
  if(spec->ntokens > 0)
    write_tokens(spec, out);
  if(spec->nmix > 0)
    write_mix(spec, out);
  write_limits(spec, out);
}
