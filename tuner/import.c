/* import.c - see import.h: config.json to model spec.
 *
 *   file -> JSON -> the model part (text_config, if there is one) -> its row in import_table.c
 *        -> activation, quantisation header, features of the row: served, or refused by name
 *        -> sizes and routing -> the rank's cut -> the problem as a whole
 *
 * Nothing is filled in that neither the config nor the row says. *out is written only when everything is sound. */
#include "import.h"

#include "import_internal.h"
#include "read_file.h"
#include "schema.h"
#include "spec_internal.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_MAX_BYTES ((size_t)16 << 20)

struct import_state {
  json_t *root;
  struct import_object model;
  const char *model_type;
  const struct import_row *row;
  struct model_spec spec;
  struct rank_cut cut;
  long hash_layers;
};

/* ---- file ---- */

static void one_line(char *text)
{
  for(; *text != '\0'; text++)
    if((unsigned char)*text < 32 || *text == 127)
      *text = ' ';
}

static enum mf_status load_json(const char *path, json_t **root, struct error *err)
{
  enum mf_status rc;
  json_error_t problem;
  char *bytes = NULL;
  size_t count = 0;
  rc = read_file(path, CONFIG_MAX_BYTES, &bytes, &count, err);
  if(rc != MF_OK)
    goto out;
  *root = json_loadb(bytes, count, JSON_REJECT_DUPLICATES, &problem);
  if(*root == NULL) {
    one_line(problem.text);
    rc = error_set(err, MF_ERR_SPEC, "line %d: expected JSON, got: %s", problem.line, problem.text);
  } else if(!json_is_object(*root)) {
    rc = error_set(err, MF_ERR_SPEC, "expected a JSON object with the model's keys");
  }
out:
  free(bytes);
  return rc;
}

/* ---- which model ---- */

static enum mf_status refuse_type(const char *model_type, struct error *err)
{
  char known[ERROR_TEXT_MAX / 2];
  size_t used = 0;
  int count = 0;
  const struct import_row *rows = import_rows(&count);
  for(int i = 0; i < count && used < sizeof(known); i++)
    used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%s", i > 0 ? ", " : "", rows[i].model_type);
  return error_set(err, MF_ERR_UNSUPPORTED, "model_type \"%.60s\" is not known: write its spec by hand (docs/specs.md); known are %s", model_type,
                   known);
}

static enum mf_status find_model(struct import_state *im, struct error *err)
{
  const struct import_object top = {im->root, ""};
  const json_t *text_config = json_object_get(im->root, "text_config");
  const char *outer = NULL;
  bool found_outer = false, found = false;
  enum mf_status rc = import_text(&top, "model_type", &outer, &found_outer, err);
  if(rc != MF_OK)
    return rc;
  im->model = top;
  if(json_is_object(text_config))
    im->model = (struct import_object){text_config, "text_config."};
  rc = import_text(&im->model, "model_type", &im->model_type, &found, err);
  if(rc != MF_OK)
    return rc;
  if(!found && !found_outer)
    return error_set(err, MF_ERR_SPEC, "model_type: expected text such as \"qwen3_moe\", the key is missing");
  if(!found)
    im->model_type = outer;
  im->row = import_row_find(im->model_type);
  return im->row != NULL ? MF_OK : refuse_type(im->model_type, err);
}

/* ---- features ---- */

static enum mf_status check_activation(const struct import_state *im, struct error *err)
{
  const char *act = NULL;
  bool found = false;
  enum mf_status rc = import_text(&im->model, "mlp_hidden_act|hidden_act|hidden_activation", &act, &found, err);
  if(rc != MF_OK || !found || strcmp(act, "silu") == 0 || strcmp(act, "swish") == 0 || strcmp(act, "swiglu") == 0)
    return rc;
  if(strcmp(act, "relu2") == 0)
    return error_set(err, MF_ERR_UNSUPPORTED, "non-gated experts (relu2): moeforge serves gated SiLU experts (gate, up and down projection)");
  return error_set(err, MF_ERR_UNSUPPORTED, "activation \"%.40s\": moeforge serves gated SiLU experts", act);
}

static enum mf_status read_layers(const struct import_state *im, struct import_layers *layers, struct error *err)
{
  bool found = false;
  enum mf_status rc;
  *layers = (struct import_layers){.count = 1024};
  rc = import_int(&im->model, "num_hidden_layers|num_layers", 1, 1024, &layers->count, &found, err);
  if(rc == MF_OK)
    rc = import_int(&im->model, "first_k_dense_replace|moe_layer_start_index", 0, 1024, &layers->first_moe, &found, err);
  layers->dense = json_object_get(im->model.json, "mlp_only_layers");
  if(rc == MF_OK && json_array_size(layers->dense) > 1024)
    rc = error_set(err, MF_ERR_SPEC, "%smlp_only_layers: expected at most 1024 layers, got %zu", im->model.prefix, json_array_size(layers->dense));
  return rc;
}

static enum mf_status check_features(struct import_state *im, struct error *err)
{
  struct import_layers layers;
  enum mf_status rc = check_activation(im, err);
  if(rc == MF_OK)
    rc = read_layers(im, &layers, err);
  if(rc == MF_OK)
    rc = import_quantisation(im->root, &im->model, &layers, &im->spec.problem.act_scale, err);
  if(rc == MF_OK && im->row->refuse != NULL)
    rc = error_set(err, MF_ERR_UNSUPPORTED, "%s: no kernel family serves them", im->row->refuse);
  return rc;
}

/* ---- sizes ---- */

static enum mf_status read_size(const struct import_state *im, const char *keys, long high, int32_t *value, struct error *err)
{
  bool found = false;
  long read = 0;
  enum mf_status rc = import_int(&im->model, keys, 1, high, &read, &found, err);
  if(rc == MF_OK && !found)
    rc = error_set(err, MF_ERR_SPEC, "%s%.*s: expected an integer from 1 to %ld, the key is missing", im->model.prefix, (int)strcspn(keys, "|"), keys,
                   high);
  if(rc == MF_OK)
    *value = (int32_t)read;
  return rc;
}

static enum mf_status read_sizes(struct import_state *im, struct error *err)
{
  struct mf_problem *p = &im->spec.problem;
  enum mf_status rc = read_size(im, im->row->experts, EXPERTS_LIMIT, &p->experts, err);
  if(rc == MF_OK)
    rc = read_size(im, im->row->top_k, TOP_K_LIMIT, &p->top_k, err);
  if(rc == MF_OK)
    rc = read_size(im, im->row->intermediate, INTERMEDIATE_LIMIT, &im->cut.intermediate, err);
  if(rc == MF_OK)
    rc = read_size(im, "hidden_size", HIDDEN_LIMIT, &p->hidden, err);
  return rc;
}

/* ---- routing ---- */

static enum mf_status read_score(struct import_state *im, struct error *err)
{
  static const struct {
    const char *word;
    enum mf_score score;
  } scores[] = {{"softmax", MF_SCORE_SOFTMAX}, {"sigmoid", MF_SCORE_SIGMOID}, {"sqrtsoftplus", MF_SCORE_SQRT_SOFTPLUS}};
  const char *word = NULL;
  bool found = false;
  enum mf_status rc = MF_OK;
  im->spec.problem.score = im->row->score;
  if(im->row->score_key != NULL)
    rc = import_text(&im->model, im->row->score_key, &word, &found, err);
  if(rc != MF_OK || !found)
    return rc;
  for(size_t i = 0; i < sizeof(scores) / sizeof(scores[0]); i++)
    if(strcmp(scores[i].word, word) == 0) {
      im->spec.problem.score = scores[i].score;
      return MF_OK;
    }
  return error_set(err, MF_ERR_UNSUPPORTED, "%s%s \"%.40s\": moeforge serves softmax, sigmoid and sqrtsoftplus", im->model.prefix, im->row->score_key,
                   word);
}

/* noaux_tc: a correction bias selects; greedy: none. Other methods score groups differently. */
static enum mf_status read_method(const struct import_state *im, bool *bias, struct error *err)
{
  const char *method = NULL;
  bool found = false;
  enum mf_status rc = import_text(&im->model, "topk_method", &method, &found, err);
  if(rc != MF_OK || !found || strcmp(method, "noaux_tc") == 0)
    return rc;
  if(strcmp(method, "greedy") != 0)
    return error_set(err, MF_ERR_UNSUPPORTED, "%stopk_method \"%.40s\": moeforge serves noaux_tc and greedy", im->model.prefix, method);
  *bias = false;
  return MF_OK;
}

static enum mf_status read_flags(struct import_state *im, struct error *err)
{
  bool bias = im->row->bias, renorm = im->row->renorm, found = false;
  enum mf_status rc = MF_OK;
  if(im->row->grouped)
    rc = read_method(im, &bias, err);
  if(rc == MF_OK && im->row->bias_key != NULL)
    rc = import_bool(&im->model, im->row->bias_key, &bias, &found, err);
  if(rc == MF_OK && im->row->renorm_key != NULL)
    rc = import_bool(&im->model, im->row->renorm_key, &renorm, &found, err);
  im->spec.problem.select_bias = bias;
  im->spec.problem.renormalize = renorm;
  im->spec.problem.weight_on_input = im->row->weight_on_input;
  return rc;
}

/* n_group and topk_group: 0, null or absent mean no groups. */
static enum mf_status read_groups(struct import_state *im, struct error *err)
{
  long groups = 0, kept = 0;
  bool found = false;
  enum mf_status rc;
  if(!im->row->grouped)
    return MF_OK;
  rc = import_int(&im->model, "n_group", 0, EXPERTS_LIMIT, &groups, &found, err);
  if(rc == MF_OK)
    rc = import_int(&im->model, "topk_group", 0, EXPERTS_LIMIT, &kept, &found, err);
  if(rc != MF_OK || groups <= 1)
    return rc;
  if(kept == 0)
    return error_set(err, MF_ERR_SPEC, "%stopk_group: expected an integer from 1 to %ld beside n_group, the key is missing", im->model.prefix,
                     groups);
  im->spec.problem.groups = (int32_t)groups;
  im->spec.problem.groups_kept = (int32_t)kept;
  return MF_OK;
}

static enum mf_status read_numbers(struct import_state *im, struct error *err)
{
  double limit = 0;
  long zero = 0;
  bool found = false;
  enum mf_status rc = MF_OK;
  if(im->row->scaling_key != NULL)
    rc = import_double(&im->model, im->row->scaling_key, 0.001, 1000, &im->spec.routed_scaling, &found, err);
  if(rc == MF_OK)
    rc = import_double(&im->model, "swiglu_limit|swiglu_limits", 0, 1e6, &limit, &found, err);
  if(rc == MF_OK && im->row->zero_key != NULL)
    rc = import_int(&im->model, im->row->zero_key, 0, EXPERTS_LIMIT, &zero, &found, err);
  if(rc == MF_OK)
    rc = import_int(&im->model, "num_hash_layers", 0, 1024, &im->hash_layers, &found, err);
  im->spec.problem.swiglu_limit = (float)limit;
  im->spec.problem.zero_experts = (int32_t)zero;
  return rc;
}

static enum mf_status read_routing(struct import_state *im, struct error *err)
{
  enum mf_status rc = read_score(im, err);
  if(rc == MF_OK)
    rc = read_flags(im, err);
  if(rc == MF_OK)
    rc = read_groups(im, err);
  if(rc == MF_OK)
    rc = read_numbers(im, err);
  return rc;
}

/* ---- the spec as a whole ---- */

struct first_fault {
  const struct import_row *row;
  struct error *err;
  bool set;
};

/* Fields by the names that the user knows: options, or keys of the config. */
static void take_fault(void *context, const char *field, const char *text)
{
  static const char *const options[][2] = {{"tp", "--tp"}, {"tp_rank", "--tp-rank"}, {"ep", "--ep"}, {"ep_rank", "--ep-rank"}};
  struct first_fault *first = context;
  const char *name = field;
  if(first->set)
    return;
  first->set = true;
  for(size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++)
    if(strcmp(options[i][0], field) == 0)
      name = options[i][1];
  if(strcmp(field, "intermediate") == 0)
    name = first->row->intermediate;
  else if(strcmp(field, "hidden") == 0)
    name = "hidden_size";
  error_set(first->err, MF_ERR_SPEC, "%s: %s", name, text);
}

/* The folder's name as a spec name: lower case, anything else a dash. */
static void folder_name(const char *path, const char *model_type, char *out, size_t space)
{
  const char *end = strrchr(path, '/'), *start = end;
  size_t length = 0;
  while(start != NULL && start > path && start[-1] != '/')
    start--;
  if(start == NULL || start == end || strncmp(start, "./", 2) == 0 || strncmp(start, "../", 3) == 0) {
    start = model_type;
    end = model_type + strlen(model_type);
  }
  for(; start < end && length + 1 < space; start++) {
    const char c = (char)tolower((unsigned char)*start);
    const bool letter = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    if(letter || (length > 0 && (c == '.' || c == '_')))
      out[length++] = c;
    else if(length > 0)
      out[length++] = '-';
  }
  out[length] = '\0';
  if(length == 0)
    snprintf(out, space, "%s", model_type);
}

/* As error_prefix() with the path, but keeps more of the text: the list of known model types is long. */
static void add_path(struct error *err, const char *path)
{
  char old[ERROR_TEXT_MAX];
  memcpy(old, err->text, sizeof(old));
  snprintf(err->text, sizeof(err->text), "%.300s: %.*s", path, ERROR_TEXT_MAX - 303, old);
}

static enum mf_status make_name(struct import_state *im, const char *path, const struct import_options *options, struct error *err)
{
  char *name = im->spec.name;
  char stem[NAME_MAX_LEN - 32], tp[16] = "", ep[16] = "";
  if(options->name != NULL) {
    if(!schema_is_name(options->name) || strlen(options->name) >= NAME_MAX_LEN)
      return error_set(err, MF_ERR_SPEC, "--name: expected at most %d characters a-z 0-9 . _ -, first a letter or digit, got \"%.40s\"",
                       NAME_MAX_LEN - 1, options->name);
    memcpy(name, options->name, strlen(options->name) + 1);
    return MF_OK;
  }
  folder_name(path, im->model_type, stem, sizeof(stem));
  if(options->tp > 1)
    snprintf(tp, sizeof(tp), options->tp_rank > 0 ? "-tp%dr%d" : "-tp%d", options->tp, options->tp_rank);
  if(options->ep > 1)
    snprintf(ep, sizeof(ep), options->ep_rank > 0 ? "-ep%dr%d" : "-ep%d", options->ep, options->ep_rank);
  snprintf(name, NAME_MAX_LEN, "%s%s%s", stem, tp, ep);
  return MF_OK;
}

static enum mf_status complete(struct import_state *im, const char *path, const struct import_options *options, struct error *err)
{
  struct first_fault first = {.row = im->row, .err = err};
  char stem[NAME_MAX_LEN], hash[80] = "";
  enum mf_status rc = make_name(im, path, options, err);
  if(rc != MF_OK)
    return rc;
  im->cut.tp = options->tp;
  im->cut.tp_rank = options->tp_rank;
  im->cut.ep = options->ep;
  im->cut.ep_rank = options->ep_rank;
  if(!spec_apply_cut(&im->spec, &im->cut, take_fault, &first) || problem_faults(&im->spec.problem, take_fault, &first) > 0)
    return MF_ERR_SPEC;
  folder_name(path, im->model_type, stem, sizeof(stem));
  if(im->hash_layers > 0)
    snprintf(hash, sizeof(hash), "; its first %ld layers route by hash and are not meant", im->hash_layers);
  snprintf(im->spec.source, sizeof(im->spec.source), "config.json of %s, model_type %.60s%s", stem, im->model_type, hash);
  return MF_OK;
}

enum mf_status import_hf_config(const char *path, const struct import_options *options, struct model_spec *out, struct error *err)
{
  struct import_state im;
  enum mf_status rc;
  memset(&im, 0, sizeof(im));
  spec_init(&im.spec);
  rc = load_json(path, &im.root, err);
  if(rc == MF_OK)
    rc = find_model(&im, err);
  if(rc == MF_OK)
    rc = check_features(&im, err);
  if(rc == MF_OK)
    rc = read_sizes(&im, err);
  if(rc == MF_OK)
    rc = read_routing(&im, err);
  if(rc == MF_OK)
    rc = complete(&im, path, options, err);
  if(rc == MF_OK)
    *out = im.spec;
  else if(err != NULL)
    add_path(err, path);
  json_decref(im.root);
  return rc;
}
