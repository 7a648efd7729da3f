/* import_table.c - what each model type calls things in its config.json, and how its code routes.
 *
 * Defaults for absent keys are those of the model's own configuration class; they differ: norm_topk_prob is false for Qwen3-MoE and true for
 * Qwen3.5, and a correction bias is a tensor that most configs never mention. A model type that is not here is refused, not guessed. */
#include "import_internal.h"

#include <string.h>

#define SIZES(e, k, n) .experts = e, .top_k = k, .intermediate = n
#define SIZES_QWEN SIZES("num_experts|num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
#define SIZES_DEEPSEEK SIZES("n_routed_experts|num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
#define SIZES_LOCAL SIZES("num_local_experts", "num_experts_per_tok|experts_per_token", "intermediate_size")
#define NORM "norm_topk_prob"
#define SCALE "routed_scaling_factor"

/* A row for models that follow DeepSeek-V3: scores from 'scoring_func', bias for selecting, groups, scaling. */
#define DEEPSEEK_LIKE(type, names, default_score)                                                                                         \
  {.model_type = type, .models = names, SIZES_DEEPSEEK, .score_key = "scoring_func", .score = default_score, .bias = true, .renorm_key = NORM, \
   .renorm = true, .scaling_key = SCALE, .grouped = true}
/* A row for models that follow Qwen: softmax, no bias, no groups. */
#define QWEN_LIKE(type, names, default_renorm) \
  {.model_type = type, .models = names, SIZES_QWEN, .score = MF_SCORE_SOFTMAX, .renorm_key = NORM, .renorm = default_renorm}

static const struct import_row rows[] = {
    QWEN_LIKE("qwen2_moe", "Qwen2-57B-A14B", false),
    QWEN_LIKE("qwen3_moe", "Qwen3-30B, 235B, Coder-480B", false),
    QWEN_LIKE("qwen3_vl_moe", "Qwen3-VL-30B, 235B", true),
    QWEN_LIKE("qwen3_vl_moe_text", "its text part", true),
    QWEN_LIKE("qwen3_next", "Qwen3-Next-80B", true),
    QWEN_LIKE("qwen3_5_moe", "Qwen3.5-35B, 122B, 397B", true),
    QWEN_LIKE("qwen3_5_moe_text", "its text part", true),
    DEEPSEEK_LIKE("deepseek_v3", "DeepSeek-V3, R1, V3.1", MF_SCORE_SIGMOID),
    DEEPSEEK_LIKE("deepseek_v32", "DeepSeek-V3.2", MF_SCORE_SIGMOID),
    DEEPSEEK_LIKE("deepseek_v4", "DeepSeek-V4", MF_SCORE_SQRT_SOFTPLUS),
    DEEPSEEK_LIKE("deepseek_v41", "DeepSeek-V4.1", MF_SCORE_SQRT_SOFTPLUS),
    DEEPSEEK_LIKE("deepseek_v41_text", "its text part", MF_SCORE_SQRT_SOFTPLUS),
    DEEPSEEK_LIKE("kimi_k2", "Kimi-K2", MF_SCORE_SIGMOID),
    DEEPSEEK_LIKE("glm4_moe", "GLM-4.5, 4.6, 4.7", MF_SCORE_SIGMOID),
    DEEPSEEK_LIKE("glm4_moe_lite", "GLM-4.7-Flash", MF_SCORE_SIGMOID),
    DEEPSEEK_LIKE("glm4v_moe_text", "GLM-4.5V", MF_SCORE_SIGMOID),
    DEEPSEEK_LIKE("glm_moe_dsa", "GLM-5", MF_SCORE_SIGMOID),
    DEEPSEEK_LIKE("dots1", "dots.llm1", MF_SCORE_SIGMOID),
    DEEPSEEK_LIKE("mimo_v2_flash", "MiMo-V2-Flash", MF_SCORE_SIGMOID),
    {.model_type = "minimax_m2", .models = "MiniMax-M2, M2.5, M2.7", SIZES_LOCAL, .score_key = "scoring_func", .score = MF_SCORE_SIGMOID,
     .bias_key = "use_routing_bias", .bias = true, .renorm_key = NORM, .renorm = true, .scaling_key = SCALE},
    {.model_type = "bailing_moe", .models = "Ling, Ring", SIZES_QWEN, .score_key = "score_function", .score = MF_SCORE_SOFTMAX,
     .bias_key = "moe_router_enable_expert_bias", .renorm_key = NORM, .renorm = true, .scaling_key = SCALE, .grouped = true},
    {.model_type = "bailing_moe_v2", .models = "Ling-2.0", SIZES_QWEN, .score_key = "score_function", .score = MF_SCORE_SIGMOID,
     .bias_key = "moe_router_enable_expert_bias", .bias = true, .renorm_key = NORM, .renorm = true, .scaling_key = SCALE, .grouped = true},
    {.model_type = "ernie4_5_moe", .models = "ERNIE-4.5-21B, 300B", .experts = "moe_num_experts", .top_k = "moe_k",
     .intermediate = "moe_intermediate_size", .score = MF_SCORE_SOFTMAX, .bias_key = "moe_use_aux_free", .bias = true, .renorm = true},
    {.model_type = "step3p5", .models = "Step-3.5-Flash", .experts = "moe_num_experts|num_experts", .top_k = "moe_top_k|num_experts_per_tok",
     .intermediate = "moe_intermediate_size", .score_key = "moe_router_activation", .score = MF_SCORE_SOFTMAX, .bias_key = "use_moe_router_bias",
     .bias = true, .renorm_key = "norm_expert_weight", .renorm = true, .scaling_key = "moe_router_scaling_factor"},
    {.model_type = "hunyuan_v1_moe", .models = "Hunyuan-A13B", .experts = "num_experts", .top_k = "moe_topk",
     .intermediate = "moe_intermediate_size", .score = MF_SCORE_SOFTMAX, .renorm = true},
    {.model_type = "longcat_flash", .models = "LongCat-Flash", .experts = "n_routed_experts", .top_k = "moe_topk",
     .intermediate = "expert_ffn_hidden_size", .score = MF_SCORE_SOFTMAX, .bias = true, .renorm_key = NORM, .scaling_key = SCALE,
     .zero_key = "zero_expert_num"},
    {.model_type = "llama4", .models = "Llama-4", SIZES_LOCAL, .score = MF_SCORE_SIGMOID, .weight_on_input = true},
    {.model_type = "llama4_text", .models = "its text part", SIZES_LOCAL, .score = MF_SCORE_SIGMOID, .weight_on_input = true},
    {.model_type = "mixtral", .models = "Mixtral-8x7B, 8x22B", SIZES_LOCAL, .score = MF_SCORE_SOFTMAX, .renorm = true},
    {.model_type = "olmoe", .models = "OLMoE-1B-7B", .experts = "num_experts", .top_k = "num_experts_per_tok", .intermediate = "intermediate_size",
     .score = MF_SCORE_SOFTMAX, .renorm_key = NORM},
    {.model_type = "gpt_oss", .models = "gpt-oss-20b, 120b", SIZES_LOCAL, .score = MF_SCORE_TOPK_SOFTMAX,
     .refuse = "experts with biases and a shifted up projection (gpt-oss SwiGLU)"},
    {.model_type = "nemotron_h", .models = "Nemotron-3", SIZES_DEEPSEEK, .score = MF_SCORE_SIGMOID, .bias = true, .renorm_key = NORM, .renorm = true,
     .scaling_key = SCALE, .refuse = "non-gated experts (relu2): there is no gate projection"},
};

const struct import_row *import_rows(int *count)
{
  *count = (int)(sizeof(rows) / sizeof(rows[0]));
  return rows;
}

const struct import_row *import_row_find(const char *model_type)
{
  for(size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
    if(strcmp(rows[i].model_type, model_type) == 0)
      return &rows[i];
  return NULL;
}

/* "`a` or `b`" */
static void print_keys(const char *keys, struct strbuf *out)
{
  for(const char *key = keys; *key != '\0';) {
    const int length = (int)strcspn(key, "|");
    strbuf_printf(out, "%s`%.*s`", key > keys ? " or " : "", length, key);
    key += length + (key[length] == '|');
  }
}

static void print_flag(const char *key, bool value, struct strbuf *out)
{
  if(key == NULL)
    strbuf_printf(out, "%s", value ? "yes" : "no");
  else
    strbuf_printf(out, "`%s`, else %s", key, value ? "yes" : "no");
}

void import_markdown(struct strbuf *out)
{
  static const char *const scores[] = {"softmax", "sigmoid", "sqrt_softplus", "topk_softmax"};
  strbuf_printf(out, "| model_type | models | experts | top_k | intermediate | score | bias | renormalize | scaling | groups | remarks |\n");
  strbuf_printf(out, "|---|---|---|---|---|---|---|---|---|---|---|\n");
  for(size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    const struct import_row *row = &rows[i];
    strbuf_printf(out, "| `%s` | %s | ", row->model_type, row->models);
    print_keys(row->experts, out);
    strbuf_printf(out, " | ");
    print_keys(row->top_k, out);
    strbuf_printf(out, " | ");
    print_keys(row->intermediate, out);
    if(row->score_key != NULL)
      strbuf_printf(out, " | `%s`, else %s | ", row->score_key, scores[row->score]);
    else
      strbuf_printf(out, " | %s | ", scores[row->score]);
    print_flag(row->bias_key, row->bias, out);
    strbuf_printf(out, " | ");
    print_flag(row->renorm_key, row->renorm, out);
    strbuf_printf(out, " | %s%s%s | %s | ", row->scaling_key != NULL ? "`" : "1", row->scaling_key != NULL ? row->scaling_key : "",
                  row->scaling_key != NULL ? "`" : "", row->grouped ? "`n_group`, `topk_group`" : "none");
    if(row->refuse != NULL)
      strbuf_printf(out, "refused: %s", row->refuse);
    else if(row->zero_key != NULL)
      strbuf_printf(out, "zero experts: `%s`", row->zero_key);
    else if(row->weight_on_input)
      strbuf_printf(out, "weight on the input");
    strbuf_printf(out, " |\n");
  }
}
