/* spec.h - model specs: strict YAML to struct model_spec, and back.
 *
 * The schema is one table in spec.c (docs/specs.md is written from it): each key with type, range, default, help. Unknown keys, missing
 * keys, wrong types, values out of range are errors of the form
 *   specs/models/x.yaml:12: shape.top_k: expected an integer from 1 to 22, got 40 (nearest legal value 22)
 * and all of a file's errors are reported at once, one line each, the first in err->text, every one through 'report'. */
#ifndef MOEFORGE_TUNER_SPEC_H
#define MOEFORGE_TUNER_SPEC_H

#include "error.h"
#include "strbuf.h"
#include "types.h"

/* Receives each problem of a file, one line without newline. May be NULL. */
typedef void spec_report_fn(void *context, const char *line);

/* Reads a model spec. On failure *out is not changed. MF_ERR_SPEC, MF_ERR_IO, MF_ERR_NOMEM. */
enum mf_status spec_read(const char *path, struct model_spec *out, spec_report_fn *report, void *context, struct error *err);
/* Reads a device spec (specs/devices/<name>.yaml). */
enum mf_status device_spec_read(const char *path, struct device_info *out, spec_report_fn *report, void *context, struct error *err);
/* Writes 'spec' as YAML that spec_read() reads back to the same problem, with comments that name the source. */
void spec_write(const struct model_spec *spec, struct strbuf *out);
/* The identity of a problem: SHA-256 over its canonical text "experts=256;top_k=8;...". Names, tokens and mix do not count. */
void problem_key(const struct mf_problem *problem, char key[KEY_LEN]);
/* The canonical text itself. */
void problem_text(const struct mf_problem *problem, struct strbuf *out);
/* Shared experts: how many, and whether they are gated; experts of a token with them; experts in the rank's tensors with them. */
int problem_shared(const struct mf_problem *problem);
bool problem_shared_gated(const struct mf_problem *problem);
int problem_ranks(const struct mf_problem *problem);
int problem_stored_experts(const struct mf_problem *problem);
/* Where expert 'id' lies in the rank's tensors, -1 if it does not. Shared experts have the ids from experts + zero_experts on. */
int problem_local_expert(const struct mf_problem *problem, int id);
/* Clears the problem and fills in the neutral values (softmax, no groups, f32 scales, ...) and struct_size. The sizes are left 0: set experts,
 * expert_count (= experts without expert parallelism), top_k, hidden, intermediate. */
void problem_init(struct mf_problem *problem);
/* Mathematical consistency of a problem, whoever made it (groups divide experts, top_k <= experts, ...). */
enum mf_status problem_validate(const struct mf_problem *problem, struct error *err);
/* The reference tables of docs/specs.md, made from the schema: model specs, or device specs. */
void spec_schema_markdown(bool device, struct strbuf *out);
/* Weight bytes of one expert on this rank: 3 * N * K. */
double problem_expert_bytes(const struct mf_problem *problem);

#endif
