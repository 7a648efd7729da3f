/* test_reference.c - the reference operator: the projections against a second implementation (model_kernel.h, exact accumulators), and the promises of
 * reference.h: same bits for any number of threads, errors, degenerate inputs. */
#include "reference.h"
#include "model_kernel.h"
#include "problem_fixture.h"

#include <check.h>
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- The operator against the second implementation --- */

static void compare_with_model(const char *name, const struct mf_problem *p, const struct test_case *tc, float scaling)
{
  const size_t h = (size_t)(tc->tokens * problem_ranks(p) * p->intermediate), y = (size_t)(tc->tokens * p->hidden);
  struct reference_result ref;
  struct error err = {0};
  struct model m;
  double largest = 0;
  ck_assert_msg(reference_run(p, scaling, data_layer_seed(2), tc, &ref, &err) == MF_OK, "%s: %s", name, err.text);
  model_run(&m, p, scaling, data_layer_seed(2), tc, 0, DEFECT_NONE);
  ck_assert_msg(memcmp(ref.h, m.h_bits, h * sizeof(*ref.h)) == 0, "%s: h", name);
  for(size_t i = 0; i < h; i++)
    ck_assert_msg(fabsf(ref.h_unrounded[i] - m.h_unrounded[i]) <= 1e-6f * fabsf(m.h_unrounded[i]), "%s: h %zu: %g %g", name, i,
                  (double)ref.h_unrounded[i], (double)m.h_unrounded[i]);
  for(size_t i = 0; i < y; i++)
    largest = fmax(largest, fabs(m.y[i]));
  for(size_t i = 0; i < y; i++)
    ck_assert_msg(fabs((double)ref.y[i] - m.y[i]) <= 1e-6 * largest, "%s: y %zu: %g %g", name, i, (double)ref.y[i], m.y[i]);
  model_close(&m);
  reference_free(&ref);
}

START_TEST(projections_agree_with_the_second_implementation)
{
  static const struct {
    const char *name;
    int hidden, n, offset, begin, count, act, on_input, shared;
    float limit, alpha;
  } shapes[] = {
    {"plain", 256, 128, 0, 0, 16, 0, 0, 0, 0, 0},          {"straddling rank", 256, 80, 80, 0, 16, 0, 0, 0, 0, 0},
    {"two blocks", 384, 192, 64, 0, 16, 0, 0, 0, 0, 0},    {"narrow", 128, 16, 0, 0, 16, 0, 0, 0, 0, 0},
    {"ue8m0", 256, 128, 0, 0, 16, 1, 0, 0, 0, 0},          {"clamped", 256, 128, 0, 0, 16, 0, 0, 0, 0.5f, 1.702f},
    {"on input", 256, 128, 0, 0, 16, 0, 1, 0, 0, 0},       {"experts 4..9", 256, 128, 0, 4, 6, 0, 0, 0, 0, 0},
    {"odd sizes", 264, 44, 100, 0, 16, 0, 0, 0, 0, 0},     {"two shared experts", 256, 48, 0, 0, 16, 0, 0, 2, 0, 0},
    {"a gated one beside experts 8..15, on input", 256, 64, 64, 8, 8, 0, 1, 1 + MF_SHARED_GATED, 0, 0},
  };
  for(size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
    for(int data = 0; data < CASE_DATA_KINDS; data++) {
      const struct test_case tc = {.tokens = 3, .routing = ROUTING_UNIFORM, .data = (enum case_data)data, .seed = (uint32_t)i};
      struct mf_problem p = small_problem();
      p.hidden = shapes[i].hidden;
      p.intermediate = shapes[i].n;
      p.intermediate_offset = shapes[i].offset;
      p.expert_begin = shapes[i].begin;
      p.expert_count = shapes[i].count;
      p.act_scale = shapes[i].act;
      p.weight_on_input = shapes[i].on_input;
      p.shared_experts = shapes[i].shared;
      p.swiglu_limit = shapes[i].limit;
      p.swiglu_alpha = shapes[i].alpha;
      compare_with_model(shapes[i].name, &p, &tc, 2.5f);
    }
}
END_TEST

/* The reference of a rank that lacks experts is the whole operator less their share. */
START_TEST(absent_experts_contribute_nothing)
{
  struct mf_problem p = small_problem();
  const struct test_case tc = {.tokens = 4, .routing = ROUTING_UNIFORM, .seed = 3};
  struct reference_result r;
  struct error err = {0};
  p.expert_count = 3;
  ck_assert_int_eq(reference_run(&p, 1, 1, &tc, &r, &err), MF_OK);
  for(int i = 0; i < 16; i++) {
    int nonzero = 0;
    for(int f = 0; f < p.intermediate; f++)
      nonzero += r.h[i * p.intermediate + f] != 0;
    ck_assert((nonzero > 0) == (r.routing.ids[i] < 3));
  }
  reference_free(&r);
}
END_TEST

START_TEST(quantisation_costs_about_four_percent)
{
  struct mf_problem p = small_problem();
  const struct test_case tc = {.tokens = 8, .routing = ROUTING_UNIFORM, .seed = 1};
  struct reference_result r;
  struct error err = {0};
  double error = 0, square = 0;
  p.hidden = 1024;
  p.intermediate = 256;
  ck_assert_int_eq(reference_run(&p, 1, 1, &tc, &r, &err), MF_OK);
  for(int i = 0; i < 8 * 1024; i++) {
    error += pow((double)r.y[i] - (double)r.y_unquantised[i], 2);
    square += pow((double)r.y_unquantised[i], 2);
  }
  ck_assert(sqrt(error / square) > 0.02 && sqrt(error / square) < 0.07);
  ck_assert_msg(sqrt(square / (8 * 1024)) > 0.1 && sqrt(square / (8 * 1024)) < 10, "y has a root mean square of %g, expected about 1",
                sqrt(square / (8 * 1024)));
  reference_free(&r);
}
END_TEST

START_TEST(down_alone_is_the_same_down)
{
  struct mf_problem p = small_problem();
  const struct test_case tc = {.tokens = 5, .routing = ROUTING_ZIPF, .seed = 1};
  struct reference_result r;
  struct error err = {0};
  float y[5 * 256];
  p.intermediate = 144;
  p.intermediate_offset = 16;
  ck_assert_int_eq(reference_run(&p, 1, 9, &tc, &r, &err), MF_OK);
  ck_assert_int_eq(reference_down(&p, 9, &r.routing, r.h, y, &err), MF_OK);
  ck_assert_mem_eq(y, r.y, sizeof(y));
  reference_free(&r);
}
END_TEST

/* --- Promises --- */

static void run_with_threads(int threads, struct reference_result *out)
{
  void (*set_threads)(int) = NULL;
  void *symbol = dlsym(RTLD_DEFAULT, "omp_set_num_threads"); /* absent in a build without OpenMP */
  struct mf_problem p = small_problem();
  const struct test_case tc = {.tokens = 6, .routing = ROUTING_UNIFORM, .seed = 4};
  struct error err = {0};
  p.hidden = 1024; /* large enough to be shared out */
  p.intermediate = 512;
  memcpy(&set_threads, &symbol, sizeof(symbol));
  if(set_threads != NULL)
    set_threads(threads);
  ck_assert_int_eq(reference_run(&p, 1, 5, &tc, out, &err), MF_OK);
}

START_TEST(threads_do_not_change_a_bit)
{
  struct reference_result one, many;
  run_with_threads(1, &one);
  run_with_threads(5, &many);
  ck_assert_mem_eq(one.h, many.h, 6 * 4 * 512 * sizeof(*one.h));
  ck_assert_mem_eq(one.y, many.y, 6 * 1024 * sizeof(*one.y));
  ck_assert_mem_eq(one.y_unquantised, many.y_unquantised, 6 * 1024 * sizeof(*one.y));
  reference_free(&one);
  reference_free(&many);
}
END_TEST

START_TEST(degenerate_data_stay_finite)
{
  struct mf_problem p = small_problem();
  for(int data = 0; data < CASE_DATA_KINDS; data++)
    for(int act = 0; act <= 1; act++) {
      const struct test_case tc = {.tokens = 4, .routing = ROUTING_UNIFORM, .data = (enum case_data)data, .seed = 1};
      struct reference_result r;
      struct error err = {0};
      p.act_scale = act;
      ck_assert_int_eq(reference_run(&p, 1, 1, &tc, &r, &err), MF_OK);
      for(int i = 0; i < 4 * 256; i++) {
        const float y = bf16_to_float(bf16_from_float(r.y[i]));
        ck_assert(isfinite(y) && isfinite(r.y_unquantised[i]));
        if(data == CASE_ZERO_TOKEN && i / 256 == 1)
          ck_assert(r.y[i] == 0 && r.y_unquantised[i] == 0);
        if(data == CASE_NEG_INF && i / 256 == 2) /* no finite logit */
          ck_assert(r.y[i] == 0);
      }
      reference_free(&r);
    }
}
END_TEST

START_TEST(errors_name_the_field)
{
  static const struct {
    int tokens, top_k, shared, offset;
    enum mf_status status;
    const char *word;
  } wrong[] = {
    {0, 4, 0, 0, MF_ERR_USAGE, "tokens"},         {MAX_TOKENS + 1, 4, 0, 0, MF_ERR_USAGE, "tokens"}, {1, 0, 0, 0, MF_ERR_USAGE, "top_k"},
    {1, MAX_TOP_K + 1, 0, 0, MF_ERR_USAGE, "top_k"}, {1, MAX_TOP_K, 1, 0, MF_ERR_USAGE, "shared experts"}, {1, 4, 0, 128, MF_ERR_USAGE, "offset"}};
  for(size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
    struct mf_problem p = small_problem();
    const struct test_case tc = {.tokens = wrong[i].tokens, .routing = ROUTING_UNIFORM, .seed = 1};
    struct reference_result r;
    struct error err = {0};
    p.top_k = wrong[i].top_k;
    p.shared_experts = wrong[i].shared;
    p.intermediate_offset = wrong[i].offset;
    ck_assert_int_eq(reference_run(&p, 1, 1, &tc, &r, &err), wrong[i].status);
    ck_assert_int_eq(err.status, wrong[i].status);
    ck_assert_msg(strstr(err.text, wrong[i].word) != NULL, "%s", err.text);
    ck_assert_ptr_null(r.h);
    reference_free(&r); /* harmless */
  }
}
END_TEST

static void add_all(TCase *tc)
{
  tcase_add_test(tc, projections_agree_with_the_second_implementation);
  tcase_add_test(tc, absent_experts_contribute_nothing);
  tcase_add_test(tc, quantisation_costs_about_four_percent);
  tcase_add_test(tc, down_alone_is_the_same_down);
  tcase_add_test(tc, threads_do_not_change_a_bit);
  tcase_add_test(tc, degenerate_data_stay_finite);
  tcase_add_test(tc, errors_name_the_field);
}

int main(void)
{
  Suite *suite = suite_create("reference");
  TCase *tc = tcase_create("operator");
  SRunner *runner;
  int failed;
  tcase_set_timeout(tc, 120);
  add_all(tc);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
