/* test_spec.c - the strict spec reader: every key, every kind of mistake with its line and message, damaged files. */
#include "faults.h"
#include "schema.h"
#include "spec_fixture.h"
#include "yaml_reader.h"

#include <sys/stat.h>

/* A good spec; each line is numbered in the comments of the tests below. */
static const char good[] = "name: x\n"                  /* 1 */
                           "shape:\n"                   /* 2 */
                           "  experts: 64\n"            /* 3 */
                           "  top_k: 8\n"               /* 4 */
                           "  hidden: 2048\n"           /* 5 */
                           "  intermediate: 1408\n"     /* 6 */
                           "  tp: 8\n"                  /* 7 */
                           "  tp_rank: 3\n"             /* 8 */
                           "router:\n"                  /* 9 */
                           "  score: sigmoid\n"         /* 10 */
                           "  renormalize: true\n"      /* 11 */
                           "  groups: 8\n"              /* 12 */
                           "  groups_kept: 4\n"         /* 13 */
                           "tokens: 1-8\n";             /* 14 */

/* 'good' with its line 'number' replaced. */
static void replace_line(int number, const char *line, char *out, size_t space)
{
  const char *start = good, *end;
  for(int i = 1; i < number; i++)
    start = strchr(start, '\n') + 1;
  end = strchr(start, '\n');
  ck_assert_int_lt(snprintf(out, space, "%.*s%s%s", (int)(start - good), good, line, end), (int)space);
}

/* ---- reading ---- */

START_TEST(reads_a_good_spec)
{
  struct model_spec spec;
  struct lines lines;
  struct error err;
  ck_assert_int_eq(read_text(good, strlen(good), &spec, &lines, &err), MF_OK);
  ck_assert_int_eq(lines.count, 0);
  ck_assert_str_eq(spec.name, "x");
  ck_assert_str_eq(spec.path, file);
  ck_assert_str_eq(spec.source, "");
  ck_assert_uint_eq(spec.problem.struct_size, sizeof(struct mf_problem));
  ck_assert_int_eq(spec.problem.experts, 64);
  ck_assert_int_eq(spec.problem.top_k, 8);
  ck_assert_int_eq(spec.problem.hidden, 2048);
  ck_assert_int_eq(spec.problem.intermediate, 176);
  ck_assert_int_eq(spec.problem.intermediate_offset, 3 * 176 % 128);
  ck_assert_int_eq(spec.problem.expert_begin, 0);
  ck_assert_int_eq(spec.problem.expert_count, 64);
  ck_assert_int_eq(spec.problem.score, MF_SCORE_SIGMOID);
  ck_assert_int_eq(spec.problem.renormalize, 1);
  ck_assert_int_eq(spec.problem.groups, 8);
  ck_assert_int_eq(spec.problem.groups_kept, 4);
  ck_assert_int_eq(spec.problem.select_bias, 0);
  ck_assert_int_eq(spec.problem.logits_dtype, MF_DTYPE_BF16);
  ck_assert_int_eq(spec.problem.act_scale, MF_ACT_SCALE_F32);
  ck_assert_int_eq(spec.tp, 8);
  ck_assert_int_eq(spec.tp_rank, 3);
  ck_assert(spec.routed_scaling == 1);
  ck_assert_int_eq(spec.ntokens, 8);
  ck_assert_int_eq(spec.tokens[7], 8);
  ck_assert_int_eq(spec.nmix, 4);
  ck_assert_int_eq(spec.mix[0].kind, ROUTING_UNIFORM);
  ck_assert(spec.mix[0].weight == 0.5);
  ck_assert(spec.limits.max_memory_bytes == 0);
}
END_TEST

START_TEST(reads_every_key)
{
  static const char text[] = "name: \"all-keys_1.0\"\nsource: 'it''s a test: é'\n"
                             "shape: {experts: 512, top_k: 12, hidden: 6144, intermediate: 2048, tp: 2, tp_rank: 1, ep: 4, ep_rank: 2}\n"
                             "router: {score: softmax, renormalize: false, bias: true, scaling: 6.0, logits: f32, zero_experts: 256,"
                             " weight_on_input: true}\n"
                             "quantisation: {weights: fp8_e4m3, block: [128, 128], act_scale: ue8m0}\n"
                             "activation: {swiglu_limit: 7, swiglu_alpha: 1.702}\nshared_experts: 1\ntokens: [1, 3-5, 64]\n"
                             "routing_mix: {zipf: 0.25, uniform: 7.5e-1}\nlimits: {max_error: 0.05, min_speedup: 1.5, max_memory_gib: 80}\n";
  struct model_spec spec;
  struct lines lines;
  struct error err;
  ck_assert_int_eq(read_text(text, strlen(text), &spec, &lines, &err), MF_OK);
  ck_assert_str_eq(spec.name, "all-keys_1.0");
  ck_assert_str_eq(spec.source, "it's a test: é");
  ck_assert_int_eq(spec.problem.intermediate, 1024);
  ck_assert_int_eq(spec.problem.intermediate_offset, 0);
  ck_assert_int_eq(spec.problem.expert_begin, 256);
  ck_assert_int_eq(spec.problem.expert_count, 128);
  ck_assert_int_eq(spec.problem.score, MF_SCORE_SOFTMAX);
  ck_assert_int_eq(spec.problem.select_bias, 1);
  ck_assert_int_eq(spec.problem.renormalize, 0);
  ck_assert(spec.routed_scaling == 6);
  ck_assert_int_eq(spec.problem.logits_dtype, MF_DTYPE_F32);
  ck_assert_int_eq(spec.problem.zero_experts, 256);
  ck_assert_int_eq(spec.problem.weight_on_input, 1);
  ck_assert_int_eq(spec.problem.act_scale, MF_ACT_SCALE_UE8M0);
  ck_assert(spec.problem.swiglu_limit == 7.0f);
  ck_assert(spec.problem.swiglu_alpha == 1.702f);
  ck_assert_int_eq(spec.problem.shared_experts, 1);
  ck_assert_int_eq(spec.ntokens, 5);
  ck_assert_int_eq(spec.tokens[1], 3);
  ck_assert_int_eq(spec.tokens[4], 64);
  ck_assert_int_eq(spec.nmix, 2);
  ck_assert_int_eq(spec.mix[0].kind, ROUTING_ZIPF);
  ck_assert(spec.limits.max_error == 0.05);
  ck_assert(spec.limits.min_speedup == 1.5);
  ck_assert(spec.limits.max_memory_bytes == 80 * 1073741824.0);
}
END_TEST

/* Line 'line' of the good spec is replaced; the fault must name line, field and text. */
static const struct bad_line {
  int line;
  const char *text;
  int at; /* line named in the message */
  const char *message;
} bad_lines[] = {
    {1, "name: Qwen", 1, "name: expected a name of at most 79 characters a-z 0-9 . _ -, first a letter or digit, got Qwen"},
    {1, "name: .x", 1, "name: expected a name"},
    {1, "name:", 1, "name: expected a name of at most 79 characters a-z 0-9 . _ -, first a letter or digit, got nothing"},
    {1, "name: [x]", 1, "got a list"},
    {1, "# no name", 1, "name: expected a name of at most 79 characters a-z 0-9 . _ -, first a letter or digit, the key is missing"},
    {1, "name: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 1, "name: expected a name"},
    {3, "  experts: -1", 3, "shape.experts: expected an integer from 1 to 1024, got -1 (nearest legal value 1)"},
    {3, "  experts: 99999999999999999999999", 3, "shape.experts: expected an integer from 1 to 1024, got 99999999999999999999999"},
    {3, "  experts: 0x40", 3, "shape.experts: expected an integer from 1 to 1024, got 0x40"},
    {3, "  experts: 064", 3, "shape.experts: expected an integer from 1 to 1024, got 064"},
    {3, "  experts: 6_4", 3, "got 6_4"},
    {3, "  experts: 64.0", 3, "got 64.0"},
    {3, "  experts: ~", 3, "got ~"},
    {3, "  expert: 64", 3, "shape.expert: unknown key (nearest key shape.experts)"},
    {3, "  experts: 60", 12, "router.groups: expected a divisor of 60, the number of experts, got 8 (nearest legal value 6)"},
    {4, "  top_k: 40", 4, "shape.top_k: expected an integer from 1 to 22, got 40 (nearest legal value 22)"},
    {4, "  top_k: \"8\"", 4, "shape.top_k: expected an integer from 1 to 22, got \"8\" (remove the quotes)"},
    {4, "  top_k: {a: 1}", 4, "shape.top_k: expected an integer from 1 to 22, got a mapping"},
    {4, "  topk: 8", 4, "shape.topk: unknown key (nearest key shape.top_k)"},
    {4, "  top_k: 8\n  top_k: 8", 5, "shape.top_k: expected each key once, got it again (first in line 4)"},
    {4, "  renormalize: true", 4, "shape.renormalize: unknown key here (its place is router.renormalize)"},
    {5, "  hidden: 2000", 5, "shape.hidden: expected a multiple of 128 from 128 to 16384, got 2000 (nearest legal value 2048)"},
    {5, "  hidden: 0", 5, "(nearest legal value 128)"},
    {6, "  intermediate: 1409", 6, "shape.intermediate: expected a multiple of 16 from 16 to 65536, got 1409 (nearest legal value 1408)"},
    {7, "  tp: 3", 7, "shape.tp: expected ranks that get a multiple of 16 of the 1408 features each, got 3 ranks (nearest legal value 2)"},
    {7, "  tp: 0", 7, "shape.tp: expected an integer from 1 to 1024, got 0 (nearest legal value 1)"},
    {8, "  tp_rank: 8", 8, "shape.tp_rank: expected a rank from 0 to 7, got 8 (nearest legal value 7)"},
    {8, "  ep: 3", 8, "shape.ep: expected a divisor of 64, the number of experts, got 3 ranks (nearest legal value 2)"},
    {8, "  ep: 2\n  ep_rank: 2", 9, "shape.ep_rank: expected a rank from 0 to 1, got 2 (nearest legal value 1)"},
    {9, "routers:", 9, "routers: unknown key (nearest key router)"},
    {10, "  score: sigmod", 10,
     "router.score: expected one of softmax, sigmoid, sqrt_softplus, topk_softmax, given, got sigmod (nearest legal value sigmoid)"},
    {10, "  score: sqrtsoftplus", 10, "(nearest legal value sqrt_softplus)"},
    {10, "  score: argmax!", 10, "got argmax!"},
    {10, "  # no score", 9, "router.score: expected one of softmax, sigmoid, sqrt_softplus, topk_softmax, given, the key is missing"},
    {11, "  renormalize: yes", 11, "router.renormalize: expected true or false, got yes (write true)"},
    {11, "  renormalize: 0", 11, "router.renormalize: expected true or false, got 0 (write false)"},
    {11, "  renormalize: \"true\"", 11, "(remove the quotes)"},
    {12, "  groups: 64", 12, "router.groups: expected groups of at least 2 experts, got 64 groups of 64 experts in all"},
    {12, "  groups: 8\n  zero_experts: 8", 12, "router.groups: expected 1 beside zero experts, which belong to no group, got 8"},
    {13, "  groups_kept: 9", 13, "router.groups_kept: expected at most 8, the number of groups, got 9 (nearest legal value 8)"},
    {13, "  groups_kept: 1\n  scaling: nan", 14, "router.scaling: expected a number from 0.001 to 1000, got nan"},
    {13, "  scaling: 0", 13, "router.scaling: expected a number from 0.001 to 1000, got 0 (nearest legal value 0.001)"},
    {13, "  scaling: 1e999", 13, "router.scaling: expected a number from 0.001 to 1000, got 1e999"},
    {13, "  zero_experts: 1000", 13, "router.zero_experts: expected at most 960 beside 64 experts (1024 logits in all), got 1000"},
    {14, "tokens: 0-8", 14, "tokens: expected ascending token counts from 1 to 64 such as 1-8 or [1, 2, 4, 8], got 0-8 (nearest legal value 1)"},
    {14, "tokens: 1-65", 14, "(nearest legal value 64)"},
    {14, "tokens: 8-1", 14, "(the first is larger than the last)"},
    {14, "tokens: [1, 4, 4]", 14, "got 4 after 4"},
    {14, "tokens: []", 14, "got an empty list"},
    {14, "tokens: [a]", 14, "got a"},
    {14, "tokens: [~]", 14, "got ~"},
    {14, "tokens:\n- 1\n-", 16, "got nothing"},
    {14, "tokens: {a: 1}", 14, "got a mapping"},
    {14, "routing_mix: {uniform: 0.5, zipf: 0.4}", 14, "routing_mix: expected shares that sum to 1, got a sum of 0.9"},
    {14, "routing_mix: {uniforn: 1}", 14, "routing_mix.uniforn: unknown routing input (nearest key routing_mix.uniform)"},
    {14, "routing_mix: {ties: 1}", 14, "routing_mix.ties: expected one of uniform, zipf, concentrated, dispersed"},
    {14, "routing_mix: {uniform: -1, zipf: 2}", 14, "routing_mix.uniform: expected a share above 0 and up to 1, got -1"},
    {14, "routing_mix: {}", 14, "got an empty mapping"},
    {14, "quantisation: {block: [32, 32]}", 14, "quantisation.block: expected [128, 128], got another list: other scale blocks are not served"},
    {14, "quantisation: {weights: mxfp4}", 14, "quantisation.weights: expected fp8_e4m3, got mxfp4"},
    {14, "quantization: {weights: fp8_e4m3}", 14, "quantization: unknown key (nearest key quantisation)"},
    {14, "shape: {}", 14, "shape: expected each key once, got it again (first in line 2)"},
    {14, "limits: 3", 14, "limits: expected a mapping of keys, got 3"},
    {14, "limits: {max_memory_gib: -1}", 14, "limits.max_memory_gib: expected a number from 0 to 100000, got -1 (nearest legal value 0)"},
    {14, "source: \"a\\nb\"", 14, "source: expected text of 1 to 255 bytes in one line, got \"a b\""},
    {14, "qwertyuiop: 1", 14,
     "qwertyuiop: unknown key (expected one of name, source, shape, router, quantisation, activation, shared_experts, shared_gate, tokens, routing_mix, limits)"},
    {14, "shape.top_k: 8", 14, "shape.top_k: unknown key"},
    {14, "tokens: &a 1-8", 14, "expected no anchors, got '&a': write the value out where it is needed"},
    {14, "tokens: !!str 1-8", 14, "expected no tags, got 'tag:yaml.org,2002:str': remove it"},
    {14, "tokens: *a", 14, "expected no aliases ('*name'): write the value out"},
    {14, "<<: {tokens: 1-8}", 14, "<<: expected no merge keys: write the values out"},
    {14, "tokens: 1-8\n---\nname: y", 15, "expected one document in a file, got a second one after '---'"},
    {14, "\ttokens: 1-8", 14, "expected YAML, got a syntax error"},
    {14, "tokens 1-8", 0, "expected YAML, got a syntax error"},
    {14, "tokens: [1, 2", 0, "expected YAML, got a syntax error"},
    {14, "tokens: \"1-8", 0, "expected YAML, got a syntax error"},
    {14, "? [a, b]\n: 1", 14, "expected a word as key, got a mapping or list"},
    {14, "limits: {a: {b: {c: {d: {e: {f: {g: {h: 1}}}}}}}}", 14, "expected at most 8 levels of nesting, got more"},
    {14, "source: \"a\\0b\"", 14, "expected text, got a NUL character"},
};

START_TEST(reports_bad_lines)
{
  const struct bad_line *c = &bad_lines[_i];
  struct model_spec spec, before;
  struct lines lines;
  struct error err;
  char text[2048], where[400];
  bool found = false;
  replace_line(c->line, c->text, text, sizeof(text));
  memset(&before, 0x5a, sizeof(before));
  memcpy(&spec, &before, sizeof(spec));
  ck_assert_int_eq(read_text(text, strlen(text), &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_msg(memcmp(&spec, &before, sizeof(spec)) == 0, "output changed on failure: %s", c->text);
  ck_assert_int_gt(lines.count, 0);
  ck_assert_str_eq(err.text, lines.text[0]);
  ck_assert_int_eq(err.status, MF_ERR_SPEC);
  snprintf(where, sizeof(where), c->at > 0 ? "%s:%d: " : "%s:", file, c->at);
  for(int i = 0; i < lines.count; i++)
    found |= strncmp(lines.text[i], where, strlen(where)) == 0 && strstr(lines.text[i], c->message) != NULL;
  ck_assert_msg(found, "case '%s': expected '%s%s', got '%s'", c->text, where, c->message, lines.text[0]);
}
END_TEST

START_TEST(reads_legal_edges)
{
  static const struct {
    int line;
    const char *text;
  } legal[] = {{14, "tokens: 64"},         {14, "tokens: [1-4, 8]"},        {14, "tokens: \"1-8\""}, {12, "  groups: 32"},
               {5, "  hidden: 16384"},     {6, "  intermediate: 128"},    {4, "  top_k: 22"},      {13, "  scaling: 1000"},
               {13, "  groups_kept: 1"},   {14, "source: \"128x128\""},     {14, "shared_experts: 8"},
               {14, "activation: {swiglu_alpha: 1}"}};
  for(size_t i = 0; i < sizeof(legal) / sizeof(legal[0]); i++) {
    struct model_spec spec;
    struct lines lines;
    struct error err;
    char text[2048];
    replace_line(legal[i].line, legal[i].text, text, sizeof(text));
    ck_assert_msg(read_text(text, strlen(text), &spec, &lines, &err) == MF_OK, "%s: %s", legal[i].text, err.text);
    ck_assert(spec.problem.swiglu_alpha == 0.0f);
  }
}
END_TEST

START_TEST(reports_all_errors_of_a_file)
{
  static const char text[] = "name: X\nshape: {experts: 0, top_k: 8, hiden: 2048, intermediate: 512}\n"
                             "router: {score: none, renormalise: true}\ntokens: 9-1\n";
  static const char *const expected[] = {":1: name: ",  ":2: shape.experts: ",      ":2: shape.hiden: ",  ":3: router.score: ",
                                         ":3: router.renormalise: unknown key (nearest key router.renormalize)", ":4: tokens: ",
                                          ":2: shape.hidden: expected a multiple of 128 from 128 to 16384, the key is missing",
                                         ":3: router.renormalize: expected true or false, the key is missing"};
  struct model_spec spec;
  struct lines lines;
  struct error err;
  ck_assert_int_eq(read_text(text, strlen(text), &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_int_eq(lines.count, 8);
  for(int i = 0; i < 8; i++)
    ck_assert_msg(strstr(lines.text[i], expected[i]) != NULL, "%d: %s", i, lines.text[i]);
  ck_assert_int_eq(spec_read(file, &spec, NULL, NULL, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, "(the first of 8 errors)"));
  ck_assert_int_eq(spec_read(file, &spec, NULL, NULL, NULL), MF_ERR_SPEC);
}
END_TEST

START_TEST(refuses_what_is_no_spec)
{
  struct model_spec spec;
  struct lines lines;
  struct error err;
  char *big = malloc(YDOC_MAX_BYTES + 2);
  ck_assert_ptr_nonnull(big);
  ck_assert_int_eq(read_text("", 0, &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, "got an empty file"));
  ck_assert_int_eq(read_text("# comment\n", 10, &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_int_eq(read_text("[1, 2]\n", 7, &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, ":1: expected a mapping of keys"));
  ck_assert_int_eq(read_text("hello\n", 6, &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_int_eq(read_text("name: \xff\xfe\n", 9, &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, "syntax error"));
  ck_assert_int_eq(read_text("name: a\0b\n", 10, &spec, &lines, &err), MF_ERR_SPEC);
  memset(big, '#', YDOC_MAX_BYTES + 1);
  ck_assert_int_eq(read_text(big, YDOC_MAX_BYTES + 1, &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, "expected at most 65536 bytes"));
  memcpy(big, "a: [", 4);
  for(int i = 0; i < 30000; i++)
    memcpy(big + 4 + 2 * i, "1,", 2);
  memcpy(big + 4 + 60000, "]\n", 2);
  ck_assert_int_eq(read_text(big, 60006, &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, "expected at most 4096 values in a file"));
  memset(big, 'a', 3000);
  memcpy(big, "name: ", 6);
  ck_assert_int_eq(read_text(big, 3000, &spec, &lines, &err), MF_ERR_SPEC);
  ck_assert_ptr_nonnull(strstr(err.text, "expected at most 1024 bytes in a value"));
  memset(big, '[', 40000);
  ck_assert_int_eq(read_text(big, 40000, &spec, &lines, &err), MF_ERR_SPEC);
  free(big);
}
END_TEST

START_TEST(says_why_a_file_cannot_be_read)
{
  struct model_spec spec;
  struct device_info dev;
  struct error err = {.status = MF_OK};
  char path[800];
  snprintf(path, sizeof(path), "%s/none.yaml", folder);
  ck_assert_int_eq(spec_read(path, &spec, NULL, NULL, &err), MF_ERR_IO);
  ck_assert_ptr_nonnull(strstr(err.text, "none.yaml: cannot read it: No such file"));
  ck_assert_int_eq(device_spec_read(path, &dev, NULL, NULL, &err), MF_ERR_IO);
  ck_assert_int_eq(spec_read(folder, &spec, NULL, NULL, &err), MF_ERR_IO);
  ck_assert_ptr_nonnull(strstr(err.text, "this is a folder"));
  ck_assert_int_eq(mkfifo(file, 0600), 0);
  ck_assert_int_eq(spec_read(file, &spec, NULL, NULL, &err), MF_ERR_IO); /* and does not wait for a writer */
  memset(path, 'a', 600);
  path[600] = '\0';
  ck_assert_int_eq(spec_read(path, &spec, NULL, NULL, &err), MF_ERR_IO);
  ck_assert_ptr_nonnull(strstr(err.text, "expected a path of at most 511 bytes"));
}
END_TEST

/* Damaged files: any status but a crash, and never success without a sound problem. */
START_TEST(survives_damage)
{
  static const char letters[] = "\n\t :-[]{}#&*!|>'\"%@`,0129azAZ.~?\\\x80\xc3";
  uint32_t random = 12345;
  for(int round = 0; round < 3000; round++) {
    char text[sizeof(good)];
    struct model_spec spec;
    struct lines lines;
    struct error err;
    enum mf_status rc;
    memcpy(text, good, sizeof(good));
    for(int change = 0; change <= round % 4; change++) {
      random = random * 1664525u + 1013904223u;
      text[(random >> 8) % (sizeof(good) - 1)] = letters[(random >> 20) % (sizeof(letters) - 1)];
    }
    rc = read_text(text, sizeof(good) - 1, &spec, &lines, &err);
    ck_assert(rc == MF_OK || rc == MF_ERR_SPEC);
    ck_assert(rc == MF_OK ? problem_validate(&spec.problem, &err) == MF_OK : err.text[0] != '\0');
  }
}
END_TEST

/* ---- devices ---- */

static const char good_device[] = "name: NVIDIA H200\ncc_major: 9\ncc_minor: 0\nsms: 132\nshared_bytes_per_cta: 232448\nshared_bytes_per_sm: 233472\n"
                                  "registers_per_sm: 65536\nmax_threads_per_cta: 1024\nl2_bytes: 62914560\nbandwidth_gbps: 4670\nlaunch_us: 1.8\n"
                                  "memory_bytes: 141e9\n";

START_TEST(reads_devices)
{
  struct device_info dev;
  struct error err = {.status = MF_OK};
  memset(&dev, 0x5a, sizeof(dev));
  write_file(good_device, strlen(good_device));
  ck_assert_msg(device_spec_read(file, &dev, NULL, NULL, &err) == MF_OK, "%s", err.text);
  ck_assert_str_eq(dev.name, "NVIDIA H200");
  ck_assert(!dev.emulated);
  ck_assert_int_eq(dev.cc_major, 9);
  ck_assert_int_eq(dev.sms, 132);
  ck_assert_int_eq(dev.shared_bytes_per_cta, 232448);
  ck_assert_int_eq(dev.shared_bytes_per_sm, 233472);
  ck_assert_int_eq(dev.registers_per_sm, 65536);
  ck_assert_int_eq(dev.max_threads_per_cta, 1024);
  ck_assert_int_eq(dev.l2_bytes, 62914560);
  ck_assert(dev.bandwidth_gbps == 4670);
  ck_assert(dev.launch_us == 1.8);
  ck_assert(dev.memory_bytes == 141e9);
  ck_assert_int_eq(dev.driver_version, 0);
  ck_assert_str_eq(dev.uuid, "");
}
END_TEST

START_TEST(reports_bad_devices)
{
  static const struct {
    const char *old, *new, *message;
  } cases[] = {
      {"sms: 132", "sms: 0", ":4: sms: expected an integer from 1 to 1024, got 0 (nearest legal value 1)"},
      {"sms: 132", "sm: 132", ":4: sm: unknown key (nearest key sms)"},
      {"sms: 132", "emulated: maybe", ":4: emulated: expected true or false, got maybe"},
      {"l2_bytes: 62914560", "l2_bytes: 60MB", ":9: l2_bytes: expected an integer"},
      {"launch_us: 1.8", "launch_us: -1", ":11: launch_us: expected a number from 0 to 1000, got -1 (nearest legal value 0)"},
      {"shared_bytes_per_sm: 233472", "shared_bytes_per_sm: 65536",
       ":6: shared_bytes_per_sm: expected at least shared_bytes_per_cta, got 65536 (nearest legal value 232448)"},
      {"memory_bytes: 141e9\n", "", "memory_bytes: expected a number from 1000000 to 1e+15, the key is missing"},
  };
  for(size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    struct device_info dev, before;
    struct error err = {.status = MF_OK};
    char text[2048];
    const char *at = strstr(good_device, cases[i].old);
    ck_assert_ptr_nonnull(at);
    snprintf(text, sizeof(text), "%.*s%s%s", (int)(at - good_device), good_device, cases[i].new, at + strlen(cases[i].old));
    write_file(text, strlen(text));
    memset(&before, 0x5a, sizeof(before));
    memcpy(&dev, &before, sizeof(dev));
    ck_assert_int_eq(device_spec_read(file, &dev, NULL, NULL, &err), MF_ERR_SPEC);
    ck_assert_msg(strstr(err.text, cases[i].message) != NULL, "expected '%s', got '%s'", cases[i].message, err.text);
    ck_assert_int_eq(memcmp(&dev, &before, sizeof(dev)), 0);
  }
}
END_TEST

/* ---- small parts ---- */

START_TEST(finds_the_nearest_name)
{
  static const char names[] = "top_k|tp|tp_rank|experts|hidden";
  char out[32];
  ck_assert_str_eq(nearest_name("topk", names, out, sizeof(out)), "top_k");
  ck_assert_str_eq(nearest_name("EXPERT", names, out, sizeof(out)), "experts");
  ck_assert_str_eq(nearest_name("tprank", names, out, sizeof(out)), "tp_rank");
  ck_assert_ptr_null(nearest_name("zzzzzz", names, out, sizeof(out)));
  ck_assert_ptr_null(nearest_name("", names, out, sizeof(out)));
  ck_assert_ptr_null(nearest_name("x", names, out, sizeof(out)));
  ck_assert_ptr_null(nearest_name("a-word-that-is-much-longer-than-any-name-of-any-key-in-the-schema", names, out, sizeof(out)));
}
END_TEST

START_TEST(parses_numbers_strictly)
{
  static const char *const not_ints[] = {"", "-", "+1", " 1", "1 ", "01", "1.0", "1e3", "0x1", "1_0", "99999999999999999999", "-00", "1-8"};
  static const char *const not_doubles[] = {"", ".5", "nan", "inf", "1e999", "0x1p3", "1.0.0", "1e", "--1", "1,5"};
  double number = 0;
  long value = 0;
  for(size_t i = 0; i < sizeof(not_ints) / sizeof(not_ints[0]); i++)
    ck_assert_msg(!schema_parse_int(not_ints[i], &value), "%s", not_ints[i]);
  for(size_t i = 0; i < sizeof(not_doubles) / sizeof(not_doubles[0]); i++)
    ck_assert_msg(!schema_parse_double(not_doubles[i], &number), "%s", not_doubles[i]);
  ck_assert(schema_parse_int("-12", &value) && value == -12);
  ck_assert(schema_parse_int("0", &value) && value == 0);
  ck_assert(schema_parse_double("2.5e-1", &number) && number == 0.25);
}
END_TEST

static Suite *spec_suite(void)
{
  Suite *suite = suite_create("spec");
  TCase *tc = tcase_create("spec");
  tcase_add_checked_fixture(tc, make_folder, remove_folder);
  tcase_set_timeout(tc, 60);
  tcase_add_test(tc, reads_a_good_spec);
  tcase_add_test(tc, reads_every_key);
  tcase_add_loop_test(tc, reports_bad_lines, 0, (int)(sizeof(bad_lines) / sizeof(bad_lines[0])));
  tcase_add_test(tc, reads_legal_edges);
  tcase_add_test(tc, reports_all_errors_of_a_file);
  tcase_add_test(tc, refuses_what_is_no_spec);
  tcase_add_test(tc, says_why_a_file_cannot_be_read);
  tcase_add_test(tc, survives_damage);
  tcase_add_test(tc, reads_devices);
  tcase_add_test(tc, reports_bad_devices);
  tcase_add_test(tc, finds_the_nearest_name);
  tcase_add_test(tc, parses_numbers_strictly);
  suite_add_tcase(suite, tc);
  return suite;
}

int main(void)
{
  SRunner *runner = srunner_create(spec_suite());
  int failed;
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
