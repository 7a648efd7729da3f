/* spec_internal.h - shared by the files that make model specs: the YAML reader, the importer, the writer. */
#ifndef MOEFORGE_TUNER_SPEC_INTERNAL_H
#define MOEFORGE_TUNER_SPEC_INTERNAL_H

#include "faults.h"
#include "spec.h"
#include "types.h"
#include "yaml_reader.h"

#define SCALE_BLOCK 128  /* rows and columns of one weight scale */
#define WEIGHT_STEP 16   /* a rank's features come in whole 16-byte pieces of a row of w2 */
#define TOP_K_LIMIT 22
#define EXPERTS_LIMIT 1024
#define HIDDEN_LIMIT 16384
#define INTERMEDIATE_LIMIT 65536 /* unsharded */
#define RANKS_LIMIT 1024
#define SHARED_LIMIT 8
#define SCORE_NAMES "softmax|sigmoid|sqrt_softplus|topk_softmax|given" /* in the order of enum mf_score */
#define DTYPE_NAMES "bf16|f32"                                   /* enum mf_dtype */
#define ACT_SCALE_NAMES "f32|ue8m0"                              /* enum mf_act_scale */

/* One broken rule of a problem: the field of struct mf_problem and "expected ..., got ...". */
typedef void problem_fault_fn(void *context, const char *field, const char *text);
/* Reports every broken rule and returns their number. Rules between fields are looked at only if each field is in its range. */
int problem_faults(const struct mf_problem *problem, problem_fault_fn *report, void *context);

/* Name, tokens 1-8, the default routing mix, scaling 1, a problem from problem_init(). */
void spec_init(struct model_spec *spec);

/* The rank's cut of a layer: sets intermediate, intermediate_offset, expert_begin and expert_count of spec->problem (experts must be set) and
 * spec->tp, tp_rank. A cut that does not come out even is reported as "tp", "tp_rank", "ep" or "ep_rank" and false is returned. */
struct rank_cut {
  int32_t intermediate; /* unsharded */
  int32_t tp, tp_rank, ep, ep_rank;
};
bool spec_apply_cut(struct model_spec *spec, const struct rank_cut *cut, problem_fault_fn *report, void *context);

/* The model part of spec_schema_markdown(). */
void spec_model_markdown(struct strbuf *out);

/* Readers of the values that have a syntax of their own; 'draft' is a struct model_spec. */
void spec_read_tokens(const struct ynode *node, const char *path, void *draft, struct faults *faults);
void spec_read_mix(const struct ynode *node, const char *path, void *draft, struct faults *faults);
void spec_read_block(const struct ynode *node, const char *path, void *draft, struct faults *faults);

#endif
