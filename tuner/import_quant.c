/* import_quant.c - is what the quantisation header promises the FP8 that we serve, for the routed experts?
 *
 * Served: e4m3 weights with one scale per 128x128 block, activations quantised at run time per token and 128 columns. Two spellings of it are
 * in use: quant_method "fp8" with weight_block_size, and compressed-tensors with the strategies "block" and "group". A header is no proof: an
 * expert type of its own (expert_dtype) or a skip list may exempt the experts. Everything else is refused by its name. */
#include "import_internal.h"

#include <stdio.h>
#include <string.h>

#define SERVED "moeforge serves FP8 e4m3 with 128x128 block scales"

/* Formats that are known by their quant_method alone. */
static const struct refused_method {
  const char *method, *feature;
} refused_methods[] = {
    {"mxfp4", "MXFP4 experts (4-bit weights, one scale per 32)"},
    {"mxfp8", "MXFP8 experts (one scale per 32 columns)"},
    {"modelopt", "ModelOpt quantisation (per-tensor FP8 or NVFP4)"},
    {"modelopt_fp4", "NVFP4 experts"},
    {"nvfp4", "NVFP4 experts"},
    {"fbgemm_fp8", "per-channel FP8 scales (fbgemm_fp8)"},
    {"gptq", "GPTQ integer weights"},
    {"awq", "AWQ integer weights"},
    {"bitsandbytes", "bitsandbytes weights"},
    {"quark", "Quark quantisation"},
};

static enum mf_status refuse(struct error *err, const char *feature)
{
  return error_set(err, MF_ERR_UNSUPPORTED, "%s: " SERVED "; take the checkpoint's block-FP8 version or quantise its experts that way", feature);
}

/* expert_dtype says what the experts are, whatever the header says of the rest. */
static enum mf_status check_expert_dtype(const struct import_object *object, struct error *err)
{
  const char *dtype = NULL;
  char feature[128];
  bool found = false;
  enum mf_status rc = import_text(object, "expert_dtype", &dtype, &found, err);
  if(rc != MF_OK || !found || strcmp(dtype, "fp8") == 0 || strcmp(dtype, "fp8_e4m3") == 0 || strcmp(dtype, "float8_e4m3fn") == 0)
    return rc;
  snprintf(feature, sizeof(feature), "%sexpert_dtype \"%.40s\"%s", object->prefix, dtype, strcmp(dtype, "fp4") == 0 ? " (MXFP4 experts)" : "");
  return refuse(err, feature);
}

/* [128, 128], as list or as "128x128". */
static bool is_served_block(const json_t *block)
{
  if(json_is_string(block))
    return strcmp(json_string_value(block), "128x128") == 0;
  return json_is_array(block) && json_array_size(block) == 2 && json_integer_value(json_array_get(block, 0)) == 128 &&
         json_integer_value(json_array_get(block, 1)) == 128;
}

static enum mf_status check_block(const json_t *block, struct error *err)
{
  char text[64], feature[128];
  if(block == NULL || json_is_null(block))
    return refuse(err, "per-tensor FP8 scales (no weight_block_size)");
  if(is_served_block(block))
    return MF_OK;
  if(!json_is_array(block) || json_array_size(block) != 2 || !json_is_integer(json_array_get(block, 0)) || !json_is_integer(json_array_get(block, 1)))
    return error_set(err, MF_ERR_SPEC, "weight_block_size: expected two integers, got %s", import_describe(block, text, sizeof(text)));
  snprintf(feature, sizeof(feature), "FP8 scales per block of [%lld, %lld]", (long long)json_integer_value(json_array_get(block, 0)),
           (long long)json_integer_value(json_array_get(block, 1)));
  return refuse(err, feature);
}

/* A text key whose value is one of 'allowed' ("a|b"), or absent. */
static enum mf_status check_word(const struct import_object *object, const char *key, const char *allowed, const char **value, struct error *err)
{
  char feature[128];
  bool found = false;
  enum mf_status rc = import_text(object, key, value, &found, err);
  if(rc != MF_OK || !found)
    return rc;
  for(const char *word = allowed; *word != '\0';) {
    const size_t length = strcspn(word, "|");
    if(strlen(*value) == length && strncmp(*value, word, length) == 0)
      return MF_OK;
    word += length + (word[length] == '|');
  }
  snprintf(feature, sizeof(feature), "%s \"%.40s\"", key, *value);
  return refuse(err, feature);
}

/* quant_method "fp8" */
static enum mf_status check_fp8(const struct import_object *header, int32_t *act_scale, struct error *err)
{
  const char *word = NULL;
  enum mf_status rc = check_word(header, "fmt", "e4m3|float8_e4m3fn", &word, err);
  if(rc == MF_OK)
    rc = check_word(header, "activation_scheme", "dynamic", &word, err);
  if(rc == MF_OK)
    rc = check_block(json_object_get(header->json, "weight_block_size"), err);
  word = NULL;
  if(rc == MF_OK)
    rc = check_word(header, "scale_fmt", "ue8m0|float|float32|fp32", &word, err);
  if(rc == MF_OK)
    *act_scale = word != NULL && strcmp(word, "ue8m0") == 0 ? MF_ACT_SCALE_UE8M0 : MF_ACT_SCALE_F32;
  return rc;
}

/* One entry of compressed-tensors' config_groups: weights per block, activations per token and group of 128. */
static enum mf_status check_config_group(const char *name, const json_t *group, struct error *err)
{
  const struct import_object weights = {json_object_get(group, "weights"), "weights."};
  const struct import_object inputs = {json_object_get(group, "input_activations"), "input_activations."};
  const char *type = "", *strategy = "", *input_strategy = "";
  char feature[192];
  bool found = false;
  long bits = 0, group_size = 0;
  enum mf_status rc;
  if(!json_is_object(weights.json))
    return error_set(err, MF_ERR_SPEC, "config_groups.%.40s.weights: expected an object", name);
  rc = import_text(&weights, "type", &type, &found, err);
  if(rc == MF_OK)
    rc = import_int(&weights, "num_bits", 1, 64, &bits, &found, err);
  if(rc == MF_OK)
    rc = import_text(&weights, "strategy", &strategy, &found, err);
  if(rc != MF_OK)
    return rc;
  if(bits != 8 || strcmp(type, "float") != 0)
    snprintf(feature, sizeof(feature), "%ld-bit %.20s weights (compressed-tensors)", bits, type);
  else if(strcmp(strategy, "block") != 0)
    snprintf(feature, sizeof(feature), "per-%.20s FP8 scales (compressed-tensors)", strategy[0] != '\0' ? strategy : "tensor");
  else
    feature[0] = '\0';
  if(feature[0] != '\0')
    return refuse(err, feature);
  rc = check_block(json_object_get(weights.json, "block_structure"), err);
  if(rc != MF_OK)
    return rc;
  if(!json_is_object(inputs.json))
    return refuse(err, "FP8 weights with unquantised activations (compressed-tensors without input_activations)");
  rc = import_text(&inputs, "strategy", &input_strategy, &found, err);
  if(rc == MF_OK)
    rc = import_int(&inputs, "group_size", 1, 1 << 20, &group_size, &found, err);
  if(rc != MF_OK)
    return rc;
  if(strcmp(input_strategy, "group") == 0 && group_size == 128 && json_is_true(json_object_get(inputs.json, "dynamic")))
    return MF_OK;
  snprintf(feature, sizeof(feature), "activations quantised per %.20s, not per 128 columns at run time (compressed-tensors)", input_strategy);
  return refuse(err, feature);
}

/* Which group the experts belong to depends on module names and classes; so all groups must be served. */
static enum mf_status check_compressed(const struct import_object *header, struct error *err)
{
  json_t *groups = json_object_get(header->json, "config_groups"), *group;
  const char *name;
  if(!json_is_object(groups) || json_object_size(groups) == 0)
    return error_set(err, MF_ERR_SPEC, "%sconfig_groups: expected an object with at least one group", header->prefix);
  json_object_foreach(groups, name, group) {
    const enum mf_status rc = check_config_group(name, group, err);
    if(rc != MF_OK)
      return rc;
  }
  return MF_OK;
}

static enum mf_status check_header(const struct import_object *header, int32_t *act_scale, struct error *err)
{
  const char *method = NULL;
  char feature[128];
  bool found = false;
  enum mf_status rc = check_expert_dtype(header, err);
  if(rc == MF_OK)
    rc = import_text(header, "quant_method", &method, &found, err);
  if(rc != MF_OK)
    return rc;
  if(!found)
    return error_set(err, MF_ERR_SPEC, "%squant_method: expected text such as \"fp8\", the key is missing", header->prefix);
  if(strcmp(method, "fp8") == 0)
    return check_fp8(header, act_scale, err);
  if(strcmp(method, "compressed-tensors") == 0)
    return check_compressed(header, err);
  for(size_t i = 0; i < sizeof(refused_methods) / sizeof(refused_methods[0]); i++)
    if(strcmp(refused_methods[i].method, method) == 0)
      return refuse(err, refused_methods[i].feature);
  snprintf(feature, sizeof(feature), "quant_method \"%.40s\"", method);
  return refuse(err, feature);
}

/* The header may stand beside the model part or inside of it. */
static const json_t *find_header(const json_t *root, const json_t *model)
{
  static const char *const names[] = {"quantization_config", "compression_config"};
  for(size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
    const json_t *header = json_object_get(root, names[i]);
    if(header == NULL || json_is_null(header))
      header = json_object_get(model, names[i]);
    if(header != NULL && !json_is_null(header))
      return header;
  }
  return NULL;
}

enum mf_status import_quantisation(const json_t *root, const struct import_object *model, const struct import_layers *layers, int32_t *act_scale,
                                   struct error *err)
{
  const struct import_object top = {root, ""};
  struct import_object header = {find_header(root, model->json), "quantization_config."};
  char got[96];
  enum mf_status rc = check_expert_dtype(&top, err);
  if(rc == MF_OK)
    rc = check_expert_dtype(model, err);
  if(rc != MF_OK)
    return rc;
  if(header.json == NULL)
    return refuse(err, "unquantised experts (no quantization_config)");
  if(!json_is_object(header.json))
    return error_set(err, MF_ERR_SPEC, "quantization_config: expected an object, got %s", import_describe(header.json, got, sizeof(got)));
  *act_scale = MF_ACT_SCALE_F32;
  rc = check_header(&header, act_scale, err);
  return rc == MF_OK ? import_skip_lists(header.json, layers, err) : rc;
}
