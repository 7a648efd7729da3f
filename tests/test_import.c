/* test_import.c - config.json to model spec: real configs, every row of the table, every refusal by its name, damaged JSON. */
#include "import.h"
#include "import_internal.h"
#include "spec_fixture.h"

#include <sys/stat.h>

static const struct import_options one_rank = {.tp = 1, .tp_rank = 0, .ep = 1, .ep_rank = 0, .name = NULL};

/* ---- real configs ---- */

static const struct real {
  const char *folder_name;
  int tp, tp_rank;
  enum mf_status status;
  const char *text; /* the expected name, or part of the refusal */
  int v[12];        /* experts, top_k, hidden, N, offset, score, bias, groups, kept, renorm, act scale, zero experts */
  double scaling;
} real[] = {
    {"deepseek-v3.1", 8, 0, MF_OK, "deepseek-v3.1-tp8", {256, 8, 7168, 256, 0, MF_SCORE_SIGMOID, 1, 8, 4, 1, MF_ACT_SCALE_UE8M0, 0}, 2.5},
    {"deepseek-v4-flash", 1, 0, MF_ERR_UNSUPPORTED, "expert_dtype \"fp4\" (MXFP4 experts): moeforge serves FP8 e4m3 with 128x128 block scales", {0},
     0},
    {"glm-4.5-air-fp8", 1, 0, MF_ERR_UNSUPPORTED, "per-channel FP8 scales (compressed-tensors): moeforge serves", {0}, 0},
    {"glm-5-fp8", 8, 7, MF_OK, "glm-5-fp8-tp8r7", {256, 8, 6144, 256, 0, MF_SCORE_SIGMOID, 1, 1, 1, 1, MF_ACT_SCALE_F32, 0}, 2.5},
    {"kimi-k2-instruct-fp8", 16, 1, MF_OK, "kimi-k2-instruct-fp8-tp16r1", {384, 8, 7168, 128, 0, MF_SCORE_SIGMOID, 1, 1, 1, 1, 0, 0}, 2.827},
    {"minimax-m2.5", 8, 3, MF_OK, "minimax-m2.5-tp8r3", {256, 8, 3072, 192, 64, MF_SCORE_SIGMOID, 1, 1, 1, 1, 0, 0}, 1},
    {"qwen3-coder-480b-a35b-fp8", 8, 1, MF_OK, "qwen3-coder-480b-a35b-fp8-tp8r1", {160, 8, 6144, 320, 64, MF_SCORE_SOFTMAX, 0, 1, 1, 1, 0, 0}, 1},
    {"qwen3.5-35b-a3b-fp8", 1, 0, MF_OK, "qwen3.5-35b-a3b-fp8", {256, 8, 2048, 512, 0, MF_SCORE_SOFTMAX, 0, 1, 1, 1, 0, 0}, 1},
};

START_TEST(imports_real_configs)
{
  const struct real *c = &real[_i];
  struct import_options options = one_rank;
  struct model_spec spec;
  struct error err = {.status = MF_OK};
  char path[200];
  snprintf(path, sizeof(path), "tests/data/hf/%s/config.json", c->folder_name);
  options.tp = c->tp;
  options.tp_rank = c->tp_rank;
  ck_assert_msg(import_hf_config(path, &options, &spec, &err) == c->status, "%s: %s", path, err.text);
  if(c->status != MF_OK) {
    ck_assert_msg(strstr(err.text, c->text) != NULL, "%s", err.text);
    ck_assert_int_eq(strncmp(err.text, path, strlen(path)), 0);
    return;
  }
  const struct mf_problem *p = &spec.problem;
  const int got[12] = {p->experts, p->top_k, p->hidden, p->intermediate, p->intermediate_offset, p->score, p->select_bias, p->groups,
                       p->groups_kept, p->renormalize, p->act_scale, p->zero_experts};
  for(int i = 0; i < 12; i++)
    ck_assert_msg(got[i] == c->v[i], "%s, value %d: expected %d, got %d", path, i, c->v[i], got[i]);
  ck_assert(spec.routed_scaling == c->scaling);
  ck_assert_str_eq(spec.name, c->text);
  ck_assert_int_eq(spec.ntokens, 8);
  ck_assert_int_eq(spec.nmix, 4);
  ck_assert_int_eq(spec.tp, c->tp);
  ck_assert_int_eq(problem_validate(p, &err), MF_OK);
}
END_TEST

/* ---- made configs ---- */

#define FP8 "\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"activation_scheme\":\"dynamic\",\"weight_block_size\":[128,128]}"

/* Sound as it stands; the cases below change keys of it. */
static const char base[] = "{\"model_type\":\"deepseek_v3\",\"hidden_act\":\"silu\",\"hidden_size\":2048,\"moe_intermediate_size\":1408,"
                           "\"n_routed_experts\":64,\"num_experts_per_tok\":6,\"num_hidden_layers\":27,\"first_k_dense_replace\":1,\"n_group\":8,"
                           "\"topk_group\":4,\"norm_topk_prob\":true,\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\","
                           "\"routed_scaling_factor\":2.5," FP8 "}";

static enum mf_status import_text_of(const char *json, const struct import_options *options, struct model_spec *spec, struct error *err)
{
  memset(err, 0, sizeof(*err));
  write_file(json, strlen(json));
  return import_hf_config(file, options, spec, err);
}

/* 'base' with the keys of 'change' put in; "key": "DELETE" removes one. Owned by the caller. */
static char *changed(const char *change)
{
  json_error_t problem;
  json_t *root = json_loads(base, 0, &problem), *keys = json_loads(change, 0, &problem), *value;
  const char *key;
  char *text;
  void *next;
  ck_assert_ptr_nonnull(root);
  ck_assert_msg(keys != NULL, "%s: %s", change, problem.text);
  json_object_update_recursive(root, keys);
  json_object_foreach_safe(root, next, key, value) {
    if(json_is_string(value) && strcmp(json_string_value(value), "DELETE") == 0)
      json_object_del(root, key);
  }
  text = json_dumps(root, 0);
  json_decref(root);
  json_decref(keys);
  return text;
}

static enum mf_status import_changed(const char *change, struct model_spec *spec, struct error *err)
{
  char *text = changed(change);
  const enum mf_status rc = import_text_of(text, &one_rank, spec, err);
  free(text);
  return rc;
}

#define QUANT(text) "{\"quantization_config\":{" text "}}"
#define COMPRESSED(weights, inputs) \
  "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":" weights \
  ",\"input_activations\":" inputs "}}}}"
#define BLOCK_WEIGHTS "{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"block\",\"block_structure\":[128,128],\"dynamic\":false}"
#define GROUP_INPUTS "{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"group\",\"group_size\":128,\"dynamic\":true}"

static const struct refusal {
  const char *change;
  enum mf_status status;
  const char *message;
} refusals[] = {
    /* model types */
    {"{\"model_type\":\"nosuch_moe\"}", MF_ERR_UNSUPPORTED,
     "model_type \"nosuch_moe\" is not known: write its spec by hand (docs/specs.md); known are qwen2_moe, "},
    {"{\"model_type\":\"nosuch_moe\"}", MF_ERR_UNSUPPORTED, "gpt_oss, nemotron_h"},
    {"{\"model_type\":\"DELETE\"}", MF_ERR_SPEC, "model_type: expected text such as \"qwen3_moe\", the key is missing"},
    {"{\"model_type\":3}", MF_ERR_SPEC, "model_type: expected text, got 3"},
    {"{\"model_type\":\"gpt_oss\"}", MF_ERR_UNSUPPORTED, "experts with biases and a shifted up projection (gpt-oss SwiGLU)"},
    {"{\"model_type\":\"gpt_oss\",\"quantization_config\":{\"quant_method\":\"mxfp4\"}}", MF_ERR_UNSUPPORTED, "MXFP4 experts"},
    {"{\"model_type\":\"nemotron_h\",\"mlp_hidden_act\":\"relu2\"}", MF_ERR_UNSUPPORTED, "non-gated experts (relu2)"},
    {"{\"model_type\":\"nemotron_h\"}", MF_ERR_UNSUPPORTED, "non-gated experts (relu2)"},
    {"{\"hidden_act\":\"relu2\"}", MF_ERR_UNSUPPORTED, "non-gated experts (relu2): moeforge serves gated SiLU experts"},
    {"{\"hidden_act\":\"swigluoai\"}", MF_ERR_UNSUPPORTED, "activation \"swigluoai\""},
    /* quantisation */
    {"{\"quantization_config\":\"DELETE\"}", MF_ERR_UNSUPPORTED, "unquantised experts (no quantization_config): moeforge serves FP8 e4m3"},
    {"{\"quantization_config\":[]}", MF_ERR_SPEC, "quantization_config: expected an object, got a list"},
    {QUANT("\"quant_method\":null"), MF_ERR_SPEC, "quantization_config.quant_method: expected text such as \"fp8\", the key is missing"},
    {QUANT("\"quant_method\":\"awq\""), MF_ERR_UNSUPPORTED, "AWQ integer weights"},
    {QUANT("\"quant_method\":\"modelopt\""), MF_ERR_UNSUPPORTED, "ModelOpt quantisation"},
    {QUANT("\"quant_method\":\"fbgemm_fp8\""), MF_ERR_UNSUPPORTED, "per-channel FP8 scales (fbgemm_fp8)"},
    {QUANT("\"quant_method\":\"newest\""), MF_ERR_UNSUPPORTED, "quant_method \"newest\""},
    {QUANT("\"weight_block_size\":null"), MF_ERR_UNSUPPORTED, "per-tensor FP8 scales (no weight_block_size)"},
    {QUANT("\"weight_block_size\":[32,32]"), MF_ERR_UNSUPPORTED, "FP8 scales per block of [32, 32]"},
    {QUANT("\"weight_block_size\":[1,128]"), MF_ERR_UNSUPPORTED, "FP8 scales per block of [1, 128]"},
    {QUANT("\"weight_block_size\":[128]"), MF_ERR_SPEC, "weight_block_size: expected two integers, got a list"},
    {QUANT("\"weight_block_size\":128"), MF_ERR_SPEC, "weight_block_size: expected two integers, got 128"},
    {QUANT("\"fmt\":\"e5m2\""), MF_ERR_UNSUPPORTED, "fmt \"e5m2\""},
    {QUANT("\"activation_scheme\":\"static\""), MF_ERR_UNSUPPORTED, "activation_scheme \"static\""},
    {QUANT("\"scale_fmt\":\"e8m7\""), MF_ERR_UNSUPPORTED, "scale_fmt \"e8m7\""},
    {QUANT("\"expert_dtype\":\"fp4\""), MF_ERR_UNSUPPORTED, "expert_dtype \"fp4\" (MXFP4 experts)"},
    {"{\"expert_dtype\":\"int4\"}", MF_ERR_UNSUPPORTED, "expert_dtype \"int4\""},
    {COMPRESSED("{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"channel\"}", GROUP_INPUTS), MF_ERR_UNSUPPORTED,
     "per-channel FP8 scales (compressed-tensors)"},
    {COMPRESSED("{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"tensor\"}", GROUP_INPUTS), MF_ERR_UNSUPPORTED,
     "per-tensor FP8 scales (compressed-tensors)"},
    {COMPRESSED("{\"num_bits\":4,\"type\":\"int\",\"strategy\":\"group\"}", "null"), MF_ERR_UNSUPPORTED, "4-bit int weights (compressed-tensors)"},
    {COMPRESSED("{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"block\",\"block_structure\":[64,64]}", GROUP_INPUTS), MF_ERR_UNSUPPORTED,
     "per block of [64, 64]"},
    {COMPRESSED(BLOCK_WEIGHTS, "null"), MF_ERR_UNSUPPORTED, "FP8 weights with unquantised activations"},
    {COMPRESSED(BLOCK_WEIGHTS, "{\"strategy\":\"token\",\"dynamic\":true}"), MF_ERR_UNSUPPORTED, "activations quantised per token"},
    {COMPRESSED("3", GROUP_INPUTS), MF_ERR_SPEC, "config_groups.group_0.weights: expected an object"},
    {QUANT("\"quant_method\":\"compressed-tensors\""), MF_ERR_SPEC, "quantization_config.config_groups: expected an object"},
    /* skip lists */
    {QUANT("\"modules_to_not_convert\":[\"lm_head\",\"model.layers.5.mlp.experts\"]"), MF_ERR_UNSUPPORTED,
     "unquantised experts: quantization_config.modules_to_not_convert exempts them by \"model.layers.5.mlp.experts\""},
    {QUANT("\"ignored_layers\":[\"model.layers.5.mlp.experts.7.down_proj\"]"), MF_ERR_UNSUPPORTED, "quantization_config.ignored_layers exempts them"},
    {QUANT("\"ignore\":[\"re:.*mlp\\\\.experts\\\\.\\\\d+\\\\.(gate|up)_proj$\"]"), MF_ERR_UNSUPPORTED, "quantization_config.ignore exempts them"},
    {QUANT("\"exclude_modules\":[\"*.experts.*\"]"), MF_ERR_UNSUPPORTED, "quantization_config.exclude_modules exempts them by \"*.experts.*\""},
    {QUANT("\"llm_int8_skip_modules\":[\"experts\"]"), MF_ERR_UNSUPPORTED, "llm_int8_skip_modules exempts them"},
    {QUANT("\"ignore\":[\"mlp\"]"), MF_ERR_UNSUPPORTED, "exempts them by \"mlp\""},
    {QUANT("\"ignore\":[\"model.layers.26\"]"), MF_ERR_UNSUPPORTED, "exempts them by \"model.layers.26\""},
    {QUANT("\"ignore\":[\"model.language_model.layers.26.mlp.experts.weight\"]"), MF_ERR_UNSUPPORTED, "exempts them"},
    {QUANT("\"ignore\":[\"down_proj\"]"), MF_ERR_UNSUPPORTED, "exempts them by \"down_proj\""},
    {QUANT("\"ignore\":[\"re:(?!x).*\"]"), MF_ERR_UNSUPPORTED, "cannot tell whether \"re:(?!x).*\" exempts experts"},
    {QUANT("\"ignore\":[\"re:a{1,30000}{1,30000}\"]"), MF_ERR_UNSUPPORTED, "cannot tell whether"},
    {QUANT("\"ignore\":[\"re:(\"]"), MF_ERR_UNSUPPORTED, "cannot tell whether"},
    {QUANT("\"ignore\":[\"re:a\\\\\"]"), MF_ERR_UNSUPPORTED, "cannot tell whether"},
    {QUANT("\"ignore\":\"lm_head\""), MF_ERR_SPEC, "quantization_config.ignore: expected a list"},
    {QUANT("\"ignore\":[3]"), MF_ERR_SPEC, "quantization_config.ignore: expected module names"},
    /* values */
    {"{\"n_routed_experts\":\"DELETE\"}", MF_ERR_SPEC, "n_routed_experts: expected an integer from 1 to 1024, the key is missing"},
    {"{\"n_routed_experts\":null}", MF_ERR_SPEC, "n_routed_experts: expected an integer from 1 to 1024, the key is missing"},
    {"{\"n_routed_experts\":0}", MF_ERR_SPEC, "n_routed_experts: expected an integer from 1 to 1024, got 0 (nearest legal value 1)"},
    {"{\"n_routed_experts\":-64}", MF_ERR_SPEC, "got -64 (nearest legal value 1)"},
    {"{\"n_routed_experts\":9223372036854775807}", MF_ERR_SPEC, "got 9223372036854775807 (nearest legal value 1024)"},
    {"{\"n_routed_experts\":64.0}", MF_ERR_SPEC, "n_routed_experts: expected an integer from 1 to 1024, got 64 (a decimal fraction)"},
    {"{\"n_routed_experts\":\"64\"}", MF_ERR_SPEC, "n_routed_experts: expected an integer from 1 to 1024, got \"64\""},
    {"{\"n_routed_experts\":true}", MF_ERR_SPEC, "got true"},
    {"{\"n_routed_experts\":{}}", MF_ERR_SPEC, "got an object"},
    {"{\"n_routed_experts\":[]}", MF_ERR_SPEC, "got a list"},
    {"{\"n_routed_experts\":[64,32]}", MF_ERR_UNSUPPORTED,
     "n_routed_experts differs between layers (64 and 32): write one spec for each kind of layer by hand"},
    {"{\"num_experts_per_tok\":23}", MF_ERR_SPEC, "num_experts_per_tok: expected an integer from 1 to 22, got 23 (nearest legal value 22)"},
    {"{\"n_routed_experts\":4,\"n_group\":1}", MF_ERR_SPEC, "top_k: expected at most 4, the number of experts, got 6"},
    {"{\"hidden_size\":2000}", MF_ERR_SPEC, "hidden_size: expected a multiple of 128 from 128 to 16384, got 2000 (nearest legal value 2048)"},
    {"{\"moe_intermediate_size\":1400}", MF_ERR_SPEC, "moe_intermediate_size: expected a multiple of 16, got 1400"},
    {"{\"scoring_func\":\"relu\"}", MF_ERR_UNSUPPORTED, "scoring_func \"relu\": moeforge serves softmax, sigmoid and sqrtsoftplus"},
    {"{\"scoring_func\":1}", MF_ERR_SPEC, "scoring_func: expected text, got 1"},
    {"{\"topk_method\":\"group_limited_greedy\"}", MF_ERR_UNSUPPORTED, "topk_method \"group_limited_greedy\": moeforge serves noaux_tc and greedy"},
    {"{\"norm_topk_prob\":1}", MF_ERR_SPEC, "norm_topk_prob: expected true or false, got 1"},
    {"{\"n_group\":7}", MF_ERR_SPEC, "groups: expected a divisor of 64"},
    {"{\"topk_group\":9}", MF_ERR_SPEC, "groups_kept: expected at most 8"},
    {"{\"topk_group\":null}", MF_ERR_SPEC, "topk_group: expected an integer from 1 to 8 beside n_group, the key is missing"},
    {"{\"routed_scaling_factor\":-1}", MF_ERR_SPEC, "routed_scaling_factor: expected a number from 0.001 to 1000, got -1"},
    {"{\"routed_scaling_factor\":\"2.5\"}", MF_ERR_SPEC, "routed_scaling_factor: expected a number from 0.001 to 1000, got \"2.5\""},
    {"{\"swiglu_limit\":-7}", MF_ERR_SPEC, "swiglu_limit: expected a number from 0 to 1e+06, got -7"},
    {"{\"swiglu_limits\":[null,7.0]}", MF_ERR_UNSUPPORTED, "swiglu_limits differs between layers (null and 7"},
    {"{\"num_hidden_layers\":0}", MF_ERR_SPEC, "num_hidden_layers: expected an integer from 1 to 1024"},
    {"{\"text_config\":{\"model_type\":\"qwen3_5_moe_text\",\"num_experts\":0}}", MF_ERR_SPEC, "text_config.num_experts: expected an integer"},
};

START_TEST(refuses_by_name)
{
  const struct refusal *c = &refusals[_i];
  struct model_spec spec, before;
  struct error err;
  memset(&before, 0x5a, sizeof(before));
  memcpy(&spec, &before, sizeof(spec));
  ck_assert_msg(import_changed(c->change, &spec, &err) == c->status, "%s: %s", c->change, err.text);
  ck_assert_int_eq(err.status, c->status);
  ck_assert_msg(strstr(err.text, c->message) != NULL, "%s: expected '%s', got '%s'", c->change, c->message, err.text);
  ck_assert_int_eq(strncmp(err.text, file, strlen(file)), 0);
  ck_assert_ptr_null(strchr(err.text, '\n'));
  ck_assert_int_eq(memcmp(&spec, &before, sizeof(spec)), 0);
}
END_TEST

#define NESTED(type) \
  "{\"text_config\":{\"model_type\":\"" type "\",\"num_experts\":32,\"num_experts_per_tok\":4,\"moe_intermediate_size\":64,\"hidden_size\":256}}"

/* Changes that stay legal, and a field of the problem that shows them. */
static const struct legal {
  const char *change;
  size_t offset;
  int32_t value;
} legal[] = {
#define FIELD(member) offsetof(struct mf_problem, member)
    {"{}", FIELD(select_bias), 1},
    {"{\"topk_method\":\"greedy\",\"n_group\":1}", FIELD(select_bias), 0},
    {"{\"scoring_func\":null}", FIELD(score), MF_SCORE_SIGMOID},
    {"{\"scoring_func\":\"softmax\"}", FIELD(score), MF_SCORE_SOFTMAX},
    {"{\"n_group\":null,\"topk_group\":null}", FIELD(groups), 1},
    {"{\"n_group\":0}", FIELD(groups_kept), 1},
    {"{\"norm_topk_prob\":false}", FIELD(renormalize), 0},
    {"{\"norm_topk_prob\":\"DELETE\"}", FIELD(renormalize), 1},
    {"{\"moe_intermediate_size\":[1408,1408,1408]}", FIELD(intermediate), 1408},
    {"{\"swiglu_limits\":[null,null]}", FIELD(swiglu_limit), 0},
    {"{\"swiglu_limit\":2.0}", FIELD(swiglu_limit), 0x40000000},
    {"{\"expert_dtype\":\"fp8\"}", FIELD(act_scale), MF_ACT_SCALE_F32},
    {QUANT("\"scale_fmt\":\"ue8m0\""), FIELD(act_scale), MF_ACT_SCALE_UE8M0},
    {QUANT("\"scale_fmt\":\"float\""), FIELD(act_scale), MF_ACT_SCALE_F32},
    {QUANT("\"fmt\":\"float8_e4m3fn\""), FIELD(act_scale), MF_ACT_SCALE_F32},
    {COMPRESSED(BLOCK_WEIGHTS, GROUP_INPUTS), FIELD(experts), 64},
    {QUANT("\"ignore\":[\"lm_head\",\"gate\",\"e_score_correction_bias\",\"re:.*mlp.gate$\",\"re:.*self_attn.*\",\"*.gate\",\"re:visual.*\"]"),
     FIELD(experts), 64},
    {QUANT("\"ignore\":[\"model.layers.0\",\"model.layers.0.mlp\",\"model.layers.27\",\"model.layers.27.mlp.experts\"]"), FIELD(experts), 64},
     /* dense; prediction */
    {QUANT("\"ignore\":[\"re:model.layers.27.*\",\"model.layers.5.mlp.shared_experts\",\"shared_experts\",\"mlp.gate\",\"5\",\"\"]"), FIELD(experts),
     64},
    {"{\"mlp_only_layers\":[5],\"quantization_config\":{\"ignore\":[\"model.layers.5.mlp\"]}}", FIELD(experts), 64},
    {NESTED("qwen3_moe"), FIELD(experts), 32},
    {NESTED("qwen3_moe"), FIELD(renormalize), 0},
    {NESTED("qwen3_5_moe_text"), FIELD(renormalize), 1},
    {"{\"model_type\":\"qwen3_next\",\"num_experts\":512,\"num_experts_per_tok\":10,\"norm_topk_prob\":null}", FIELD(renormalize), 1},
    {"{\"model_type\":\"qwen3_moe\",\"num_experts\":128,\"norm_topk_prob\":null}", FIELD(renormalize), 0},
    {"{\"model_type\":\"qwen3_moe\",\"num_experts\":128}", FIELD(groups), 1}, /* n_group means nothing to it */
    {"{\"model_type\":\"minimax_m2\",\"num_local_experts\":256,\"intermediate_size\":1536,\"norm_topk_prob\":null}", FIELD(renormalize), 1},
    {"{\"model_type\":\"minimax_m2\",\"num_local_experts\":256,\"intermediate_size\":1536,\"use_routing_bias\":false}", FIELD(select_bias), 0},
    {"{\"model_type\":\"ernie4_5_moe\",\"moe_num_experts\":64,\"moe_k\":6}", FIELD(select_bias), 1},
    {"{\"model_type\":\"longcat_flash\",\"n_routed_experts\":512,\"moe_topk\":12,\"expert_ffn_hidden_size\":2048,\"zero_expert_num\":256,"
     "\"norm_topk_prob\":null}", FIELD(zero_experts), 256},
    {"{\"model_type\":\"llama4_text\",\"num_local_experts\":16,\"num_experts_per_tok\":1,\"intermediate_size\":8192,\"hidden_size\":5120}",
     FIELD(weight_on_input), 1},
    {"{\"model_type\":\"mixtral\",\"num_local_experts\":8,\"num_experts_per_tok\":2,\"intermediate_size\":14336,\"hidden_size\":4096}",
     FIELD(renormalize), 1},
    {"{\"model_type\":\"bailing_moe\",\"num_experts\":256,\"score_function\":\"sigmoid\",\"moe_router_enable_expert_bias\":true}",
     FIELD(groups_kept), 4},
    {"{\"model_type\":\"step3p5\",\"moe_num_experts\":288,\"moe_top_k\":8,\"moe_router_activation\":\"sigmoid\"}", FIELD(score), MF_SCORE_SIGMOID},
    {"{\"model_type\":\"hunyuan_v1_moe\",\"num_experts\":64,\"moe_topk\":[8,8],\"moe_intermediate_size\":[3072,3072]}", FIELD(top_k), 8},
    {"{\"model_type\":\"deepseek_v4\",\"scoring_func\":\"sqrtsoftplus\",\"n_group\":null,\"swiglu_limit\":10.0,\"num_hash_layers\":3}", FIELD(score),
     MF_SCORE_SQRT_SOFTPLUS},
};

START_TEST(takes_what_is_legal)
{
  const struct legal *c = &legal[_i];
  struct model_spec spec;
  struct error err;
  int32_t value;
  ck_assert_msg(import_changed(c->change, &spec, &err) == MF_OK, "%s: %s", c->change, err.text);
  memcpy(&value, (const char *)&spec.problem + c->offset, sizeof(value));
  ck_assert_msg(value == c->value, "%s: expected %d, got %d", c->change, c->value, value);
  ck_assert_int_eq(problem_validate(&spec.problem, &err), MF_OK);
}
END_TEST

START_TEST(reads_scaling)
{
  struct model_spec spec;
  struct error err;
  ck_assert_int_eq(import_changed("{}", &spec, &err), MF_OK);
  ck_assert(spec.routed_scaling == 2.5);
  ck_assert_int_eq(import_changed("{\"routed_scaling_factor\":null}", &spec, &err), MF_OK);
  ck_assert(spec.routed_scaling == 1);
  ck_assert_int_eq(import_changed("{\"routed_scaling_factor\":3}", &spec, &err), MF_OK);
  ck_assert(spec.routed_scaling == 3);
  ck_assert_int_eq(import_changed("{\"model_type\":\"step3p5\",\"moe_num_experts\":288,\"moe_top_k\":8,\"moe_router_scaling_factor\":3.0}", &spec,
   &err), MF_OK);
  ck_assert(spec.routed_scaling == 3);
  ck_assert_int_eq(import_changed("{\"model_type\":\"deepseek_v4\",\"num_hash_layers\":3}", &spec, &err), MF_OK);
  ck_assert_ptr_nonnull(strstr(spec.source, "its first 3 layers route by hash"));
}
END_TEST

/* A config made from each row's own keys is taken, or refused for the row's reason. */
START_TEST(every_row_imports)
{
  int count = 0;
  const struct import_row *row = &import_rows(&count)[_i];
  struct model_spec spec;
  struct error err;
  char json[1024], experts[64], top_k[64], intermediate[64];
  ck_assert_int_lt(_i, count);
  snprintf(experts, sizeof(experts), "%.*s", (int)strcspn(row->experts, "|"), row->experts);
  snprintf(top_k, sizeof(top_k), "%.*s", (int)strcspn(row->top_k, "|"), row->top_k);
  snprintf(intermediate, sizeof(intermediate), "%.*s", (int)strcspn(row->intermediate, "|"), row->intermediate);
  snprintf(json, sizeof(json), "{\"model_type\":\"%s\",\"%s\":64,\"%s\":2,\"%s\":256,\"hidden_size\":1024," FP8 "}", row->model_type, experts, top_k,
           intermediate);
  ck_assert_ptr_eq(import_row_find(row->model_type), row);
  if(row->refuse != NULL) {
    ck_assert_int_eq(import_text_of(json, &one_rank, &spec, &err), MF_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.text, row->refuse));
    return;
  }
  ck_assert_msg(import_text_of(json, &one_rank, &spec, &err) == MF_OK, "%s: %s", json, err.text);
  ck_assert_int_eq(spec.problem.score, (int)row->score);
  ck_assert_int_eq(spec.problem.select_bias, row->bias);
  ck_assert_int_eq(spec.problem.renormalize, row->renorm);
  ck_assert_int_eq(spec.problem.weight_on_input, row->weight_on_input);
  ck_assert_int_eq(spec.problem.experts, 64);
}
END_TEST

/* ---- ranks and names ---- */

START_TEST(cuts_for_ranks)
{
  static const struct {
    struct import_options options;
    enum mf_status status;
    const char *text;
  } cases[] = {
      {{3, 0, 1, 0, NULL}, MF_ERR_SPEC,
       "--tp: expected ranks that get a multiple of 16 of the 1408 features each, got 3 ranks (nearest legal value 2)"},
      {{0, 0, 1, 0, NULL}, MF_ERR_SPEC, "--tp: expected ranks"},
      {{-5, 0, 1, 0, NULL}, MF_ERR_SPEC, "(nearest legal value 1)"},
      {{2147483647, 0, 1, 0, NULL}, MF_ERR_SPEC, "(nearest legal value 88)"},
      {{8, 8, 1, 0, NULL}, MF_ERR_SPEC, "--tp-rank: expected a rank from 0 to 7, got 8 (nearest legal value 7)"},
      {{1, 0, 3, 0, NULL}, MF_ERR_SPEC, "--ep: expected a divisor of 64, the number of experts, got 3 ranks (nearest legal value 2)"},
      {{1, 0, 4, -1, NULL}, MF_ERR_SPEC, "--ep-rank: expected a rank from 0 to 3, got -1 (nearest legal value 0)"},
      {{1, 0, 1, 0, "Bad Name"}, MF_ERR_SPEC, "--name: expected at most 79 characters a-z 0-9 . _ -, first a letter or digit, got \"Bad Name\""},
      {{1, 0, 1, 0, ""}, MF_ERR_SPEC, "--name: expected"},
      {{1, 0, 1, 0, "my-name"}, MF_OK, "my-name"},
  };
  struct import_options options = {.tp = 8, .tp_rank = 5, .ep = 4, .ep_rank = 3};
  struct model_spec spec;
  struct error err;
  for(size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    ck_assert_msg(import_text_of(base, &cases[i].options, &spec, &err) == cases[i].status, "%s", err.text);
    ck_assert_msg(strstr(cases[i].status == MF_OK ? spec.name : err.text, cases[i].text) != NULL, "%s", err.text);
  }
  ck_assert_int_eq(import_text_of(base, &options, &spec, &err), MF_OK);
  ck_assert_int_eq(spec.problem.intermediate, 176);
  ck_assert_int_eq(spec.problem.intermediate_offset, 5 * 176 % 128);
  ck_assert_int_eq(spec.problem.expert_count, 16);
  ck_assert_int_eq(spec.problem.expert_begin, 48);
  ck_assert_ptr_nonnull(strstr(spec.name, "-tp8r5-ep4r3"));
}
END_TEST

START_TEST(names_come_from_the_folder)
{
  struct import_options options = one_rank;
  struct model_spec spec;
  struct error err;
  char path[600], dir[400];
  char *here = getcwd(NULL, 0);
  options.ep = 2;
  ck_assert_ptr_nonnull(here);
  snprintf(dir, sizeof(dir), "%s/Some Model_V1.5 (FP8)", folder);
  snprintf(path, sizeof(path), "%s//config.json", dir);
  ck_assert_int_eq(mkdir(dir, 0700), 0);
  write_file(base, strlen(base));
  ck_assert_int_eq(rename(file, path), 0);
  ck_assert_msg(import_hf_config(path, &options, &spec, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(strcmp(spec.name, "deepseek_v3-ep2") == 0, "%s", spec.name); /* an empty folder name */
  snprintf(path, sizeof(path), "%s/config.json", dir);
  ck_assert_int_eq(import_hf_config(path, &options, &spec, &err), MF_OK);
  ck_assert_msg(strcmp(spec.name, "some-model_v1.5--fp8--ep2") == 0, "%s", spec.name);
  ck_assert_int_eq(chdir(dir), 0);
  ck_assert_int_eq(import_hf_config("config.json", &options, &spec, &err), MF_OK);
  ck_assert_str_eq(spec.name, "deepseek_v3-ep2");
  ck_assert_int_eq(chdir(here), 0);
  free(here);
  unlink(path);
  rmdir(dir);
}
END_TEST

/* What was imported can be written, read and is the same problem. */
START_TEST(imported_specs_round_trip)
{
  for(size_t i = 0; i < sizeof(real) / sizeof(real[0]); i++) {
    struct import_options options = one_rank;
    struct model_spec spec, again;
    struct lines lines;
    struct error err;
    struct strbuf text;
    char path[200];
    options.tp = real[i].tp;
    options.tp_rank = real[i].tp_rank;
    snprintf(path, sizeof(path), "tests/data/hf/%s/config.json", real[i].folder_name);
    if(import_hf_config(path, &options, &spec, &err) != MF_OK)
      continue;
    strbuf_init(&text, 65536);
    spec_write(&spec, &text);
    ck_assert_msg(read_text(strbuf_text(&text), text.length, &again, &lines, &err) == MF_OK, "%s", err.text);
    ck_assert_int_eq(memcmp(&spec.problem, &again.problem, sizeof(spec.problem)), 0);
    ck_assert_str_eq(spec.name, again.name);
    ck_assert_str_eq(spec.source, again.source);
    strbuf_free(&text);
  }
}
END_TEST

/* ---- damaged files ---- */

START_TEST(refuses_damaged_json)
{
  static const char *const broken[] = {"", "{", "[]", "3", "{\"a\":1,\"a\":2}", "{\"a\":1}}", "{'a':1}", "{\"a\":NaN}",
   "{\"a\":99999999999999999999}", "\xff\xfe", "{\"a\":\"\\ud800\"}"};
  struct model_spec spec;
  struct error err;
  char text[sizeof(base)];
  for(size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++)
    ck_assert_msg(import_text_of(broken[i], &one_rank, &spec, &err) == MF_ERR_SPEC, "%s", broken[i]);
  for(size_t length = 0; length < sizeof(base) - 1; length += 7) {
    memcpy(text, base, length);
    text[length] = '\0';
    ck_assert_int_eq(import_text_of(text, &one_rank, &spec, &err), MF_ERR_SPEC);
    ck_assert_msg(strstr(err.text, "x.yaml: line 1: expected JSON, got: ") != NULL, "%s", err.text);
    ck_assert_ptr_null(strchr(err.text, '\n'));
  }
}
END_TEST

START_TEST(says_why_a_file_cannot_be_read)
{
  struct model_spec spec;
  struct error err;
  ck_assert_int_eq(import_hf_config("/nonexistent/config.json", &one_rank, &spec, &err), MF_ERR_IO);
  ck_assert_ptr_nonnull(strstr(err.text, "/nonexistent/config.json: cannot read it: No such file"));
  ck_assert_int_eq(import_hf_config(folder, &one_rank, &spec, &err), MF_ERR_IO);
  ck_assert_ptr_nonnull(strstr(err.text, "this is a folder"));
  ck_assert_int_eq(import_hf_config(folder, &one_rank, &spec, NULL), MF_ERR_IO);
  write_file("", 0);
  ck_assert_int_eq(truncate(file, (17 << 20)), 0);
  ck_assert_int_eq(import_hf_config(file, &one_rank, &spec, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, "expected at most 16777216 bytes"));
}
END_TEST

/* Lists so long that looking through them would take minutes. */
START_TEST(refuses_endless_lists)
{
  static char text[40000];
  struct model_spec spec;
  struct error err;
  size_t length = (size_t)snprintf(text, sizeof(text), "{\"quantization_config\":{\"ignore\":[\"re:x\"");
  for(int i = 0; i < 2000; i++)
    length += (size_t)snprintf(text + length, sizeof(text) - length, ",\"re:x\"");
  snprintf(text + length, sizeof(text) - length, "]}}");
  ck_assert_int_eq(import_changed(text, &spec, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, "quantization_config.ignore: expected at most 2000 patterns"));
  length = (size_t)snprintf(text, sizeof(text), "{\"mlp_only_layers\":[0");
  for(int i = 0; i < 1024; i++)
    length += (size_t)snprintf(text + length, sizeof(text) - length, ",0");
  snprintf(text + length, sizeof(text) - length, "]}");
  ck_assert_int_eq(import_changed(text, &spec, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, "mlp_only_layers: expected at most 1024 layers, got 1025"));
}
END_TEST

START_TEST(survives_damage)
{
  static const char letters[] = "{}[]\",:0129eE.-+ntfu\\ \x80";
  uint32_t random = 777;
  for(int round = 0; round < 3000; round++) {
    char text[sizeof(base)];
    struct model_spec spec;
    struct error err;
    enum mf_status rc;
    memcpy(text, base, sizeof(base));
    for(int change = 0; change <= round % 3; change++) {
      random = random * 1664525u + 1013904223u;
      text[(random >> 8) % (sizeof(base) - 1)] = letters[(random >> 20) % (sizeof(letters) - 1)];
    }
    rc = import_text_of(text, &one_rank, &spec, &err);
    ck_assert(rc == MF_OK || rc == MF_ERR_SPEC || rc == MF_ERR_UNSUPPORTED);
    ck_assert(rc == MF_OK ? problem_validate(&spec.problem, &err) == MF_OK : err.text[0] != '\0');
  }
}
END_TEST

START_TEST(documentation_has_the_table)
{
  static char doc[65536];
  struct strbuf table;
  FILE *f = fopen("docs/specs.md", "r");
  ck_assert_ptr_nonnull(f);
  doc[fread(doc, 1, sizeof(doc) - 1, f)] = '\0';
  fclose(f);
  strbuf_init(&table, 65536);
  import_markdown(&table);
  ck_assert_msg(strstr(doc, strbuf_text(&table)) != NULL, "docs/specs.md does not hold the table:\n%s", strbuf_text(&table));
  strbuf_free(&table);
}
END_TEST

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static Suite *import_suite(void)
{
  Suite *suite = suite_create("import");
  TCase *tc = tcase_create("import");
  int rows = 0;
  (void)import_rows(&rows);
  tcase_add_checked_fixture(tc, make_folder, remove_folder);
  tcase_set_timeout(tc, 60);
  tcase_add_loop_test(tc, imports_real_configs, 0, COUNT(real));
  tcase_add_loop_test(tc, refuses_by_name, 0, COUNT(refusals));
  tcase_add_loop_test(tc, takes_what_is_legal, 0, COUNT(legal));
  tcase_add_test(tc, reads_scaling);
  tcase_add_loop_test(tc, every_row_imports, 0, rows);
  tcase_add_test(tc, cuts_for_ranks);
  tcase_add_test(tc, names_come_from_the_folder);
  tcase_add_test(tc, imported_specs_round_trip);
  tcase_add_test(tc, refuses_damaged_json);
  tcase_add_test(tc, says_why_a_file_cannot_be_read);
  tcase_add_test(tc, refuses_endless_lists);
  tcase_add_test(tc, survives_damage);
  tcase_add_test(tc, documentation_has_the_table);
  suite_add_tcase(suite, tc);
  return suite;
}

int main(void)
{
  SRunner *runner = srunner_create(import_suite());
  int failed;
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
