/* import_internal.h - the parts of the importer: the table of model types, the quantisation header, the skip lists, typed access to JSON.
 *
 *   import.c         file -> JSON -> model part and its row -> problem
 *   import_table.c   what each model type calls things and how its code routes
 *   import_quant.c   is what the header promises the FP8 that we serve, for the experts?
 *   import_skip.c    do the header's skip lists cover the experts?
 *   import_json.c    values with type and range, or an error that names the key */
#ifndef MOEFORGE_TUNER_IMPORT_INTERNAL_H
#define MOEFORGE_TUNER_IMPORT_INTERNAL_H

#include "error.h"
#include "strbuf.h"
#include "types.h"
#include <jansson.h>
#include <stdbool.h>

/* Keys may be alternatives separated by '|': the first that is present counts. NULL: the model type has no such key. */
struct import_row {
  const char *model_type;
  const char *models;        /* which checkpoints, for the documentation */
  const char *experts, *top_k, *intermediate;
  const char *score_key;     /* text; absent: 'score' */
  enum mf_score score;
  const char *bias_key;      /* true or false; absent: 'bias' */
  bool bias;                 /* there is a correction bias (it is a tensor: configs rarely say so) */
  const char *renorm_key;    /* true or false; absent: 'renorm' */
  bool renorm;
  const char *scaling_key;   /* number; absent or null: 1 */
  bool grouped;              /* n_group, topk_group */
  bool weight_on_input;
  const char *zero_key;      /* experts that do nothing */
  const char *refuse;        /* a feature of the experts that no spec expresses; NULL */
};

const struct import_row *import_rows(int *count);
/* NULL if the model type is not known. */
const struct import_row *import_row_find(const char *model_type);
/* The table as Markdown, for docs/specs.md. */
void import_markdown(struct strbuf *out);

/* A JSON object and how to call it in messages: "config.json: text_config.". */
struct import_object {
  const json_t *json;
  const char *prefix;        /* "" or "text_config." */
};

/* Each looks for the first of 'keys'; *found says whether there was one (null counts as absent). Lists are taken if all their items are equal.
 * MF_ERR_SPEC: wrong type or out of range; MF_ERR_UNSUPPORTED: a list with different values per layer. */
enum mf_status import_int(const struct import_object *object, const char *keys, long low, long high, long *value, bool *found, struct error *err);
enum mf_status import_double(const struct import_object *object, const char *keys, double low, double high, double *value, bool *found,
                              struct error *err);
enum mf_status import_bool(const struct import_object *object, const char *keys, bool *value, bool *found, struct error *err);
/* The text belongs to the JSON. */
enum mf_status import_text(const struct import_object *object, const char *keys, const char **value, bool *found, struct error *err);
/* "an object", "8.5", "\"8\"", ... for "got ..." */
const char *import_describe(const json_t *json, char *out, size_t space);

/* Which layers have routed experts, as far as the config says: for skip lists. */
struct import_layers {
  long count;                /* hidden layers; those beyond (multi-token prediction) do not count */
  long first_moe;
  const json_t *dense;       /* list of further dense layers, or NULL */
};

/* MF_OK and *act_scale if the routed experts are FP8 e4m3 with 128x128 block scales; else MF_ERR_UNSUPPORTED naming what they are. */
enum mf_status import_quantisation(const json_t *root, const struct import_object *model, const struct import_layers *layers, int32_t *act_scale,
                                   struct error *err);
/* MF_ERR_UNSUPPORTED if one of the header's skip lists covers routed experts. */
enum mf_status import_skip_lists(const json_t *header, const struct import_layers *layers, struct error *err);

#endif
