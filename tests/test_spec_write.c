/* test_spec_write.c - the spec writer, problems with their rules and keys, every file in specs/, and the tables of docs/specs.md. */
#include "spec_fixture.h"
#include "spec_internal.h"

#include <dirent.h>

/* ---- writing ---- */

static void check_round_trip(const struct model_spec *spec)
{
  struct model_spec again;
  struct lines lines;
  struct error err;
  struct strbuf text, twice;
  char key[KEY_LEN], key_again[KEY_LEN];
  strbuf_init(&text, 65536);
  strbuf_init(&twice, 65536);
  spec_write(spec, &text);
  ck_assert(!strbuf_failed(&text));
  ck_assert_msg(read_text(strbuf_text(&text), text.length, &again, &lines, &err) == MF_OK, "%s\n%s", err.text, strbuf_text(&text));
  problem_key(&spec->problem, key);
  problem_key(&again.problem, key_again);
  ck_assert_str_eq(key, key_again);
  ck_assert_int_eq(memcmp(&spec->problem, &again.problem, sizeof(spec->problem)), 0);
  ck_assert_str_eq(spec->name, again.name);
  ck_assert_str_eq(spec->source, again.source);
  ck_assert(spec->routed_scaling == again.routed_scaling);
  ck_assert_int_eq(spec->ntokens, again.ntokens);
  ck_assert_int_eq(memcmp(spec->tokens, again.tokens, (size_t)spec->ntokens * sizeof(int)), 0);
  ck_assert_int_eq(spec->nmix, again.nmix);
  for(int i = 0; i < spec->nmix; i++) {
    ck_assert_int_eq(spec->mix[i].kind, again.mix[i].kind);
    ck_assert(spec->mix[i].weight == again.mix[i].weight);
  }
  ck_assert(spec->limits.max_error == again.limits.max_error);
  ck_assert(spec->limits.min_speedup == again.limits.min_speedup);
  ck_assert(spec->limits.max_memory_bytes == again.limits.max_memory_bytes);
  spec_write(&again, &twice);
  ck_assert_str_eq(strbuf_text(&text), strbuf_text(&twice));
  strbuf_free(&text);
  strbuf_free(&twice);
}

static void make_spec(struct model_spec *spec)
{
  spec_init(spec);
  strcpy(spec->name, "made");
  spec->problem.experts = 256;
  spec->problem.expert_count = 256;
  spec->problem.top_k = 8;
  spec->problem.hidden = 2048;
  spec->problem.intermediate = 192;
}

START_TEST(writes_what_it_reads)
{
  struct model_spec spec;
  make_spec(&spec);
  check_round_trip(&spec); /* ranks not known, no offset */
  spec.problem.intermediate_offset = 64;
  check_round_trip(&spec); /* ranks not known: two explain it */
  spec.tp = 8;
  spec.tp_rank = 3;
  check_round_trip(&spec);
  spec.tp_rank = 2; /* contradicts the offset: derived again */
  check_round_trip(&spec);
  spec.problem.intermediate = 16;
  spec.problem.intermediate_offset = 112;
  check_round_trip(&spec);
  spec.problem.expert_count = 32;
  spec.problem.expert_begin = 224;
  spec.problem.groups = 8;
  spec.problem.groups_kept = 4;
  spec.problem.score = MF_SCORE_SQRT_SOFTPLUS;
  spec.problem.select_bias = 1;
  spec.problem.act_scale = MF_ACT_SCALE_UE8M0;
  spec.problem.logits_dtype = MF_DTYPE_F32;
  spec.problem.swiglu_alpha = 1.702f;
  spec.problem.swiglu_limit = 0.1f;
  spec.problem.shared_experts = 2 + MF_SHARED_GATED;
  spec.problem.weight_on_input = 1;
  spec.routed_scaling = 2.827;
  strcpy(spec.source, "a \"quoted\" back\\slash, 'single': # no comment, é");
  spec.ntokens = 3;
  spec.tokens[0] = 2;
  spec.tokens[1] = 4;
  spec.tokens[2] = 64;
  spec.nmix = 2;
  spec.mix[0] = (struct routing_weight){ROUTING_ZIPF, 1.0 / 3};
  spec.mix[1] = (struct routing_weight){ROUTING_DISPERSED, 2.0 / 3};
  spec.limits = (struct spec_limits){0.05, 1.1, 3e9};
  check_round_trip(&spec);
}
END_TEST

START_TEST(keeps_the_ranks_it_knows)
{
  struct model_spec spec;
  struct strbuf text;
  make_spec(&spec);
  spec.tp = 8;
  strbuf_init(&text, 65536);
  spec_write(&spec, &text);
  ck_assert_ptr_nonnull(strstr(strbuf_text(&text), "intermediate: 1536    # unsharded; this rank holds 192\n  tp: 8\n"));
  strbuf_free(&text);
}
END_TEST

/* ---- problems ---- */

START_TEST(problem_key_is_the_content)
{
  static const char expected[] = "experts=256;top_k=8;hidden=2048;intermediate=192;intermediate_offset=0;expert_begin=0;expert_count=256;"
                                 "zero_experts=0;score=0;"
                                 "select_bias=0;groups=1;groups_kept=1;renormalize=0;weight_on_input=0;logits_dtype=0;act_scale=0;shared_experts=0;"
                                 "swiglu_limit=0;swiglu_alpha=0;";
  struct model_spec spec;
  struct strbuf text;
  char key[KEY_LEN], other[KEY_LEN];
  make_spec(&spec);
  strbuf_init(&text, 4096);
  problem_text(&spec.problem, &text);
  ck_assert_str_eq(strbuf_text(&text), expected);
  strbuf_free(&text);
  problem_key(&spec.problem, key);
  ck_assert_str_eq(key, "01883ebd7587b84bb972bb85b767341126c35baa303192a4649fe4cd5ff555f0");
  for(size_t offset = sizeof(uint32_t); offset < sizeof(struct mf_problem); offset += sizeof(int32_t)) {
    struct mf_problem changed = spec.problem;
    const float two = 2;
    if(offset >= offsetof(struct mf_problem, swiglu_limit))
      memcpy((char *)&changed + offset, &two, sizeof(two));
    else
      (*(int32_t *)(void *)((char *)&changed + offset))++;
    problem_key(&changed, other);
    ck_assert_msg(strcmp(key, other) != 0, "the field at %zu is not in the key", offset);
  }
  spec.problem.swiglu_alpha = 1; /* the same as 0 */
  spec.problem.swiglu_limit = -0.0f;
  spec.problem.struct_size = 0;
  problem_key(&spec.problem, other);
  ck_assert_str_eq(key, other);
}
END_TEST

START_TEST(problem_init_is_neutral)
{
  struct mf_problem p;
  memset(&p, 0x5a, sizeof(p));
  problem_init(&p);
  ck_assert_uint_eq(p.struct_size, sizeof(p));
  ck_assert_int_eq(p.groups, 1);
  ck_assert_int_eq(p.groups_kept, 1);
  ck_assert_int_eq(p.score, MF_SCORE_SOFTMAX);
  ck_assert_int_eq(p.experts, 0);
  p.intermediate = 512;
  p.hidden = 2048;
  ck_assert(problem_expert_bytes(&p) == 3.0 * 512 * 2048);
}
END_TEST

#define FIELD(member) offsetof(struct mf_problem, member)
static const struct bad_problem {
  size_t offset;
  int32_t value;
  const char *message;
} bad_problems[] = {
    {FIELD(experts), 0, "experts: expected an integer from 1 to 1024, got 0 (nearest legal value 1)"},
    {FIELD(experts), 1025, "experts: "},
    {FIELD(experts), 4, "top_k: expected at most 4, the number of experts, got 8 (nearest legal value 4)"},
    {FIELD(top_k), 23, "top_k: expected an integer from 1 to 22, got 23 (nearest legal value 22)"},
    {FIELD(top_k), INT32_MIN, "top_k: "},
    {FIELD(hidden), 2049, "hidden: expected a multiple of 128 from 128 to 16384, got 2049 (nearest legal value 2048)"},
    {FIELD(hidden), INT32_MAX, "hidden: "},
    {FIELD(intermediate), 8, "intermediate: expected a multiple of 16"},
    {FIELD(intermediate_offset), 128, "intermediate_offset: expected an integer from 0 to 127"},
    {FIELD(intermediate_offset), 32, "intermediate_offset: expected (rank * 192) mod 128, so a multiple of 64, got 32"},
    {FIELD(expert_begin), 1, "expert_begin: expected a multiple of expert_count = 256 below 256, got 1"},
    {FIELD(expert_count), 0, "expert_count: "},
    {FIELD(expert_count), 100, "expert_count: expected a divisor of 256, the number of experts, got 100 (nearest legal value 128)"},
    {FIELD(zero_experts), 800, "zero_experts: "},
    {FIELD(score), 5, "score: "},
    {FIELD(select_bias), 2, "select_bias: "},
    {FIELD(groups), 0, "groups: "},
    {FIELD(groups), 3, "groups: expected a divisor of 256"},
    {FIELD(groups), 64, "groups_kept: expected enough groups of 4 experts for top_k = 8, got 1 (nearest legal value 2)"},
    {FIELD(groups_kept), 2, "groups_kept: expected at most 1, the number of groups, got 2 (nearest legal value 1)"},
    {FIELD(renormalize), -1, "renormalize: "},
    {FIELD(weight_on_input), 2, "weight_on_input: "},
    {FIELD(logits_dtype), 2, "logits_dtype: "},
    {FIELD(act_scale), 2, "act_scale: "},
    {FIELD(shared_experts), 9, "shared_experts: "},
    {FIELD(shared_experts), -1, "shared_experts: "},
    {FIELD(shared_experts), 9 + MF_SHARED_GATED, "shared_experts: expected an integer from 0 to 8, got 9 (nearest legal value 8)"},
    {FIELD(shared_experts), MF_SHARED_GATED, "shared_gate: expected false without shared experts, got true"},
    {FIELD(swiglu_limit), 0x7fc00000, "swiglu_limit: expected a number from 0 to 1e+06, got nan"},
    {FIELD(swiglu_limit), (int32_t)0xbf800000u, "swiglu_limit: "},
    {FIELD(swiglu_alpha), 0x7f800000, "swiglu_alpha: expected a number from 0 to 100, got inf"},
};

START_TEST(validates_problems)
{
  const struct bad_problem *c = &bad_problems[_i];
  struct model_spec spec;
  struct error err = {.status = MF_OK};
  make_spec(&spec);
  ck_assert_int_eq(problem_validate(&spec.problem, &err), MF_OK);
  ck_assert_int_eq(err.status, MF_OK);
  memcpy((char *)&spec.problem + c->offset, &c->value, sizeof(c->value));
  ck_assert_int_eq(problem_validate(&spec.problem, &err), MF_ERR_SPEC);
  ck_assert_msg(strncmp(err.text, c->message, strlen(c->message)) == 0, "%s", err.text);
  ck_assert_int_eq(problem_validate(&spec.problem, NULL), MF_ERR_SPEC);
}
END_TEST

/* Routing by the engine leaves nothing to a policy. */
START_TEST(given_experts_have_no_policy)
{
  struct error err = {.status = MF_OK};
  struct model_spec spec;
  struct mf_problem p;
  make_spec(&spec);
  spec.problem.score = MF_SCORE_GIVEN;
  ck_assert_int_eq(problem_validate(&spec.problem, &err), MF_OK);
  p = spec.problem;
  p.renormalize = 1;
  ck_assert_int_eq(problem_validate(&p, &err), MF_ERR_SPEC);
  ck_assert_str_eq(err.text, "renormalize: expected false beside score given (weights are used as the engine passes them), got true");
  p = spec.problem;
  p.select_bias = 1;
  ck_assert_int_eq(problem_validate(&p, &err), MF_ERR_SPEC);
  ck_assert_str_eq(err.text, "select_bias: expected no bias beside score given (the engine has routed), got one");
  p = spec.problem;
  p.groups = p.groups_kept = 8;
  ck_assert_int_eq(problem_validate(&p, &err), MF_ERR_SPEC);
  ck_assert_str_eq(err.text, "groups: expected 1 beside score given (the engine has routed), got 8");
}
END_TEST

/* ---- the files of the project ---- */

typedef void file_fn(const char *path, const char *stem);

static int each_spec(const char *dir, file_fn *fn)
{
  DIR *d = opendir(dir);
  int count = 0;
  ck_assert_ptr_nonnull(d);
  for(const struct dirent *entry = readdir(d); entry != NULL; entry = readdir(d)) {
    char path[600], stem[256];
    const char *dot = strstr(entry->d_name, ".yaml");
    if(dot == NULL)
      continue;
    snprintf(path, sizeof(path), "%s/%.255s", dir, entry->d_name);
    snprintf(stem, sizeof(stem), "%.*s", (int)(dot - entry->d_name), entry->d_name);
    fn(path, stem);
    count++;
  }
  closedir(d);
  return count;
}

/* `qualify` has something to judge by: the error of the quantisation fits, one copy of the weights fits, two do not. */
static void check_limits(const struct model_spec *spec)
{
  const double weights = spec->problem.experts * problem_expert_bytes(&spec->problem);
  ck_assert(spec->limits.max_error >= 0.06 && spec->limits.max_error <= 0.1);
  ck_assert(spec->limits.min_speedup > 1);
  ck_assert(spec->limits.max_memory_bytes > 1.01 * weights && spec->limits.max_memory_bytes < 1.1 * weights);
}

static void check_model_file(const char *path, const char *stem)
{
  struct model_spec spec;
  struct error err = {.status = MF_OK};
  ck_assert_msg(spec_read(path, &spec, NULL, NULL, &err) == MF_OK, "%s", err.text);
  ck_assert_str_eq(spec.name, stem);
  ck_assert_msg(spec.source[0] != '\0', "%s has no source", path);
  ck_assert_int_eq(problem_validate(&spec.problem, &err), MF_OK);
  check_round_trip(&spec);
  if(strcmp(stem, "tiny") != 0) /* no model */
    check_limits(&spec);
}

static void check_device_file(const char *path, const char *stem)
{
  struct device_info dev;
  struct error err = {.status = MF_OK};
  ck_assert_msg(device_spec_read(path, &dev, NULL, NULL, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(dev.emulated, strncmp(stem, "emu", 3) == 0);
}

/* experts, top_k, hidden, N, score, bias, groups, kept, renorm, act scale, scaling */
static const struct shipped {
  const char *name;
  int v[10];
  double scaling;
} shipped[] = {
    {"qwen3.5-35b-a3b", {256, 8, 2048, 512, MF_SCORE_SOFTMAX, 0, 1, 1, 1, 0}, 1},
    {"qwen3.5-122b-a10b", {256, 8, 3072, 1024, MF_SCORE_SOFTMAX, 0, 1, 1, 1, 0}, 1},
    {"qwen3-30b-a3b", {128, 8, 2048, 768, MF_SCORE_SOFTMAX, 0, 1, 1, 1, 0}, 1},
    {"qwen3-235b-a22b-tp4", {128, 8, 4096, 384, MF_SCORE_SOFTMAX, 0, 1, 1, 1, 0}, 1},
    {"qwen3-next-80b-a3b", {512, 10, 2048, 512, MF_SCORE_SOFTMAX, 0, 1, 1, 1, 0}, 1},
    {"deepseek-v3.1-tp8", {256, 8, 7168, 256, MF_SCORE_SIGMOID, 1, 8, 4, 1, 1}, 2.5},
    {"glm-5-tp8", {256, 8, 6144, 256, MF_SCORE_SIGMOID, 1, 1, 1, 1, 0}, 2.5},
    {"kimi-k2-tp8", {384, 8, 7168, 256, MF_SCORE_SIGMOID, 1, 1, 1, 1, 0}, 2.827},
    {"minimax-m2-tp2", {256, 8, 3072, 768, MF_SCORE_SIGMOID, 1, 1, 1, 1, 0}, 1},
};

START_TEST(shipped_shapes_are_right)
{
  const struct shipped *c = &shipped[_i];
  struct model_spec spec;
  struct error err;
  char path[128];
  snprintf(path, sizeof(path), "specs/models/%s.yaml", c->name);
  ck_assert_int_eq(spec_read(path, &spec, NULL, NULL, &err), MF_OK);
  const struct mf_problem *p = &spec.problem;
  const int got[10] = {p->experts, p->top_k, p->hidden, p->intermediate, p->score, p->select_bias, p->groups, p->groups_kept, p->renormalize,
   p->act_scale};
  for(int i = 0; i < 10; i++)
    ck_assert_msg(got[i] == c->v[i], "%s, value %d: expected %d, got %d", c->name, i, c->v[i], got[i]);
  ck_assert(spec.routed_scaling == c->scaling);
  ck_assert_int_eq(p->intermediate_offset, 0);
  ck_assert_int_eq(p->expert_count, p->experts);
  ck_assert_int_eq(p->logits_dtype, MF_DTYPE_BF16);
}
END_TEST

START_TEST(every_file_in_specs_is_sound)
{
  ck_assert_int_ge(each_spec("specs/models", check_model_file), 9);
  ck_assert_int_ge(each_spec("specs/devices", check_device_file), 5);
}
END_TEST

static const char *read_document(void)
{
  static char doc[65536];
  FILE *f = fopen("docs/specs.md", "r");
  ck_assert_ptr_nonnull(f);
  doc[fread(doc, 1, sizeof(doc) - 1, f)] = '\0';
  fclose(f);
  return doc;
}

static void check_documented(const char *doc, bool device)
{
  struct strbuf table;
  strbuf_init(&table, 65536);
  spec_schema_markdown(device, &table);
  ck_assert_msg(strstr(doc, strbuf_text(&table)) != NULL, "docs/specs.md does not hold the table:\n%s", strbuf_text(&table));
  strbuf_free(&table);
}

START_TEST(documentation_has_the_schema)
{
  const char *doc = read_document();
  check_documented(doc, false);
  check_documented(doc, true);
}
END_TEST

/* The error examples of the documentation are what the reader says of files in tests/data/specs. */
START_TEST(documentation_shows_real_errors)
{
  static const char *const names[] = {"many_errors", "no_cut", "no_groups"};
  const char *doc = read_document();
  for(size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
    struct model_spec spec;
    struct lines lines = {.count = 0};
    char path[128];
    snprintf(path, sizeof(path), "tests/data/specs/%s.yaml", names[i]);
    ck_assert_int_eq(spec_read(path, &spec, keep_line, &lines, NULL), MF_ERR_SPEC);
    ck_assert_int_gt(lines.count, 0);
    for(int line = 0; line < lines.count; line++)
      ck_assert_msg(strstr(doc, lines.text[line]) != NULL, "docs/specs.md does not show: %s", lines.text[line]);
  }
}
END_TEST

static Suite *spec_write_suite(void)
{
  Suite *suite = suite_create("spec_write");
  TCase *tc = tcase_create("spec_write");
  tcase_add_checked_fixture(tc, make_folder, remove_folder);
  tcase_set_timeout(tc, 60);
  tcase_add_test(tc, writes_what_it_reads);
  tcase_add_test(tc, keeps_the_ranks_it_knows);
  tcase_add_test(tc, problem_key_is_the_content);
  tcase_add_test(tc, problem_init_is_neutral);
  tcase_add_loop_test(tc, validates_problems, 0, (int)(sizeof(bad_problems) / sizeof(bad_problems[0])));
  tcase_add_test(tc, given_experts_have_no_policy);
  tcase_add_loop_test(tc, shipped_shapes_are_right, 0, (int)(sizeof(shipped) / sizeof(shipped[0])));
  tcase_add_test(tc, every_file_in_specs_is_sound);
  tcase_add_test(tc, documentation_has_the_schema);
  tcase_add_test(tc, documentation_shows_real_errors);
  suite_add_tcase(suite, tc);
  return suite;
}

int main(void)
{
  SRunner *runner = srunner_create(spec_write_suite());
  int failed;
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
