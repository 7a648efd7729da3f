/* test_datagen.c - the generator of test data: same bits from any part, on the CPU and in the CUDA kernels; and data that are what their names say.
 *
 * The kernels of datagen.cu are included here as C and run thread by thread, so that "the GPU makes the same bits" is tested without a GPU: both
 * sides only use operations whose result is exact. That the file is CUDA as well is tested by compiling it with NVRTC. */
#include "compile.h"
#include "datagen.h"
#include "problem_fixture.h"
#include "reference.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- The kernels as C --- */

struct dim {
  unsigned x;
};
static struct dim threadIdx, blockIdx, blockDim, gridDim;
#define MF_DATA_KERNEL static void
#include "tools/datagen.cu"

#define FOR_EACH_THREAD(blocks, threads)                                            \
  for(gridDim.x = (blocks), blockDim.x = (threads), blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) \
    for(threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)

/* NVRTC keeps a little memory; LeakSanitizer asks this function. NOLINTBEGIN(bugprone-reserved-identifier) */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
  return "leak:libnvrtc\n";
}
/* NOLINTEND(bugprone-reserved-identifier) */

/* --- Bits --- */

/* What the generator makes must not change unnoticed: stored references and timings mean these numbers. If it has to, raise REFERENCE_VERSION. */
START_TEST(known_answers)
{
  static const uint8_t want[8] = {0x65, 0x62, 0x6C, 0xF1, 0x6C, 0x01, 0x73, 0x5D};
  struct mf_problem p = plain_problem();
  uint8_t weights[8];
  float scale, bias;
  data_weights(data_layer_seed(0), DATA_W13, 0, sizeof(weights), weights);
  data_scales(data_layer_seed(0), DATA_S13, &p, 0, 1, &scale);
  data_bias(data_layer_seed(0), 1, &bias);
  ck_assert_uint_eq(data_hash(1, DATA_W2, 3), 0x260902AC9BECD1ECul);
  ck_assert_mem_eq(weights, want, sizeof(want));
  ck_assert(scale == 0x1.1773p-13f);
  ck_assert(bias == -0x1.b27p-10f);
}
END_TEST

START_TEST(any_part_is_the_same)
{
  enum { COUNT = 4096 };
  static uint8_t whole[COUNT], part[COUNT];
  static float scales[COUNT], some[COUNT];
  struct mf_problem p = plain_problem();
  data_weights(77, DATA_W2, 0, COUNT, whole);
  data_scales(77, DATA_S2, &p, 0, COUNT, scales);
  for(size_t first = 0; first < COUNT; first += 248) {
    const size_t count = (first * 7 + 13) % (COUNT - first) + 1;
    data_weights(77, DATA_W2, first, count, part);
    data_scales(77, DATA_S2, &p, first, count, some);
    ck_assert_mem_eq(part, whole + first, count);
    ck_assert_mem_eq(some, scales + first, count * sizeof(float));
  }
}
END_TEST

START_TEST(kernels_make_the_same_weights)
{
  static const struct {
    unsigned blocks, threads;
    uint64_t first;
    size_t count;
  } cases[] = {{1, 1, 0, 64}, {3, 32, 0, 1000}, {7, 128, 800, 4099}, {2, 64, 1ul << 40, 1024}, {5, 96, 8, 7}, {1, 32, 16, 1}};
  for(size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    const size_t count = cases[i].count;
    uint8_t *want = malloc(count), *have = aligned_alloc(8, (count + 16 + 7) / 8 * 8);
    memset(have, 0xA5, count + 16);
    data_weights(123 + i, DATA_W13, cases[i].first, count, want);
    FOR_EACH_THREAD(cases[i].blocks, cases[i].threads)
      mf_gen_weights(have, cases[i].first, count, 123 + i, DATA_W13);
    ck_assert_mem_eq(have, want, count);
    for(size_t j = count; j < count + 16; j++)
      ck_assert_uint_eq(have[j], 0xA5); /* nothing behind the end */
    free(want);
    free(have);
  }
}
END_TEST

START_TEST(kernels_make_the_same_scales_and_bias)
{
  enum { COUNT = 1500 };
  static float want[COUNT], have[COUNT];
  struct mf_problem p = plain_problem();
  for(int stream = DATA_S13; stream <= DATA_S2; stream++) {
    data_scales(9, (enum data_stream)stream, &p, 333, COUNT, want);
    FOR_EACH_THREAD(3, 64)
      mf_gen_scales(have, 333, COUNT, 9, (unsigned)stream, data_scale_base(&p, (enum data_stream)stream));
    ck_assert_mem_eq(have, want, sizeof(want));
  }
  data_bias(9, COUNT, want);
  FOR_EACH_THREAD(2, 32)
    mf_gen_bias(have, 0, COUNT, 9, DATA_BIAS);
  ck_assert_mem_eq(have, want, sizeof(want));
}
END_TEST

static char *read_text(const char *path)
{
  FILE *file = fopen(path, "rb");
  char *text = calloc(1, 65536);
  ck_assert_msg(file != NULL, "%s: run the tests from the root of the repository", path);
  ck_assert(fread(text, 1, 65535, file) > 0);
  fclose(file);
  return text;
}

START_TEST(datagen_cu_compiles_as_cuda)
{
  static const char *const kernels[] = {"mf_gen_weights", "mf_gen_scales", "mf_gen_bias"};
  struct artifact art = {.name = "datagen", .source = read_text("templates/tools/datagen.cu")};
  struct error err = {0};
  struct nvrtc *nvrtc = NULL;
  struct closure closure;
  ck_assert_msg(nvrtc_open(&nvrtc, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(closure_collect("templates", art.source, &closure, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(closure.count, 1); /* datagen_core.h and nothing else */
  ck_assert_msg(compile_artifact(nvrtc, &closure, "sm_90a", COMPILE_PLAIN, &art, &err) == MF_OK, "%s\n%s", err.text, art.log != NULL ? art.log : "");
  ck_assert_int_eq(art.spill_bytes, 0);
  for(size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
    struct artifact used = {0};
    ck_assert_msg(cubin_read_resources(art.cubin, art.cubin_bytes, kernels[i], &used, &err) == MF_OK, "%s", err.text);
  }
  closure_free(&closure);
  artifact_free(&art);
  nvrtc_close(nvrtc);
}
END_TEST

/* --- Distributions --- */

START_TEST(weights_have_all_codes_and_both_signs_but_no_nan)
{
  enum { COUNT = 1 << 18 };
  static uint8_t weights[COUNT];
  long seen[256] = {0}, negative = 0;
  double sum = 0, square = 0;
  data_weights(data_layer_seed(3), DATA_W13, 0, COUNT, weights);
  for(int i = 0; i < COUNT; i++) {
    const double value = (double)e4m3_to_float(weights[i]);
    seen[weights[i]]++;
    negative += weights[i] >> 7;
    sum += value;
    square += value * value;
  }
  ck_assert_int_eq(seen[0x7F] + seen[0xFF], 0);
  ck_assert_int_gt(seen[0x00], 0);
  ck_assert_int_gt(seen[0x80], 0);
  ck_assert_int_gt(seen[0x01], 0);
  ck_assert_int_gt(seen[0x7E], 0);
  ck_assert_int_gt(seen[0xFE], 0);
  ck_assert(labs(negative - COUNT / 2) < 5 * 256);                        /* 5 standard deviations */
  ck_assert(fabs(sum / COUNT) < 5 * MF_DATA_WEIGHT_RMS / 512.0);          /* likewise */
  ck_assert(fabs(sqrt(square / COUNT) / MF_DATA_WEIGHT_RMS - 1) < 0.01);
}
END_TEST

/* Random bytes behind the table: flat, and unrelated between neighbours, streams, layers. Chi-square of 255 degrees: 6 deviations = 390. */
static double chi_square(const uint64_t *hash, int count)
{
  long seen[256] = {0};
  double sum = 0, expected = count * 8 / 256.0;
  for(int i = 0; i < count; i++)
    for(int b = 0; b < 8; b++)
      seen[hash[i] >> 8 * b & 255]++;
  for(int i = 0; i < 256; i++)
    sum += ((double)seen[i] - expected) * ((double)seen[i] - expected) / expected;
  return sum;
}

START_TEST(hash_is_flat_and_unrelated)
{
  enum { COUNT = 1 << 15 };
  static uint64_t direct[COUNT], next[COUNT], stream[COUNT], layer[COUNT];
  for(int i = 0; i < COUNT; i++) {
    direct[i] = data_hash(data_layer_seed(0), DATA_W13, (uint64_t)i);
    next[i] = direct[i] ^ data_hash(data_layer_seed(0), DATA_W13, (uint64_t)i + 1);
    stream[i] = direct[i] ^ data_hash(data_layer_seed(0), DATA_W2, (uint64_t)i);
    layer[i] = direct[i] ^ data_hash(data_layer_seed(1), DATA_W13, (uint64_t)i);
  }
  ck_assert(chi_square(direct, COUNT) < 390);
  ck_assert(chi_square(next, COUNT) < 390);
  ck_assert(chi_square(stream, COUNT) < 390);
  ck_assert(chi_square(layer, COUNT) < 390);
}
END_TEST

START_TEST(one_bit_of_seed_or_index_changes_half_of_the_hash)
{
  for(int bit = 0; bit < 64; bit++) {
    long by_index = 0, by_seed = 0;
    for(uint64_t i = 0; i < 400; i++) {
      by_index += __builtin_popcountl(data_hash(5, 1, i) ^ data_hash(5, 1, i ^ 1ul << bit));
      by_seed += __builtin_popcountl(data_hash(i, 1, 5) ^ data_hash(i ^ 1ul << bit, 1, 5));
    }
    ck_assert(labs(by_index - 400 * 32) < 600); /* 7.5 standard deviations */
    ck_assert(labs(by_seed - 400 * 32) < 600);
  }
}
END_TEST

START_TEST(scales_lie_around_a_power_of_two)
{
  static float scales[10000];
  struct mf_problem p = plain_problem();
  const float base = data_scale_base(&p, DATA_S13);
  double sum = 0;
  int exponent;
  ck_assert(frexpf(base, &exponent) == 0.5f);
  data_scales(1, DATA_S13, &p, 0, 10000, scales);
  for(int i = 0; i < 10000; i++) {
    ck_assert(scales[i] >= 0.5f * base && scales[i] < 1.5f * base);
    sum += (double)scales[i];
  }
  ck_assert(fabs(sum / 10000 / (double)base - 1) < 0.02);
  /* The root mean square of a sum over the columns is within a factor of two of 1. */
  ck_assert(MF_DATA_WEIGHT_RMS * sqrt(2048) * (double)base > 0.5 && MF_DATA_WEIGHT_RMS * sqrt(2048) * (double)base < 2);
  p.hidden = 7168;
  ck_assert(data_scale_base(&p, DATA_S13) < base);
  p.intermediate = 8; /* even the smallest shapes get a sane base */
  ck_assert(data_scale_base(&p, DATA_S2) <= 1.0f && data_scale_base(&p, DATA_S2) > 0.0f);
}
END_TEST

START_TEST(bias_is_small_and_of_either_sign)
{
  static float bias[1024];
  double sum = 0, square = 0;
  data_bias(data_layer_seed(0), 1024, bias);
  for(int i = 0; i < 1024; i++) {
    ck_assert(fabsf(bias[i]) <= 0x1p-6f);
    sum += (double)bias[i];
    square += (double)bias[i] * (double)bias[i];
  }
  ck_assert(fabs(sum / 1024) < 0.0008);
  ck_assert(fabs(sqrt(square / 1024) - 0.0045) < 0.0005);
}
END_TEST

/* --- x --- */

static uint16_t *make_x(const struct mf_problem *p, const struct test_case *tc)
{
  uint16_t *x = malloc((size_t)tc->tokens * (size_t)p->hidden * sizeof(*x));
  data_x(p, tc, x);
  return x;
}

static double token_rms(const struct mf_problem *p, const uint16_t *x, int token)
{
  double square = 0;
  for(int k = 0; k < p->hidden; k++)
    square += pow((double)bf16_to_float(x[token * p->hidden + k]), 2);
  return sqrt(square / p->hidden);
}

START_TEST(x_is_normal_with_outliers)
{
  struct mf_problem p = plain_problem();
  struct test_case tc = {.tokens = 8, .routing = ROUTING_UNIFORM, .seed = 5}, other = tc;
  uint16_t *x = make_x(&p, &tc), *y;
  int outliers = 0;
  for(int t = 0; t < 8; t++) {
    const double rms = token_rms(&p, x, t);
    double sum = 0;
    int central = 0;
    ck_assert(rms > 0.15 && rms < 2);
    for(int k = 0; k < p.hidden; k++) {
      const double value = (double)bf16_to_float(x[t * p.hidden + k]);
      ck_assert(isfinite(value));
      sum += value;
      central += fabs(value) < rms;
      outliers += fabs(value) > 4.9 * rms;
    }
    ck_assert(fabs(sum / p.hidden) < 0.15 * rms);
    ck_assert(central > p.hidden * 0.62 && central < p.hidden * 0.80);
  }
  ck_assert_int_gt(outliers, 0);
  ck_assert_int_lt(outliers, 8 * p.hidden / 256);
  other.seed = 6;
  y = make_x(&p, &other);
  ck_assert(memcmp(x, y, 8 * 2048 * sizeof(*x)) != 0);
  free(x);
  free(y);
}
END_TEST

START_TEST(data_kinds_of_x)
{
  struct mf_problem p = plain_problem();
  struct test_case tc = {.tokens = 3, .routing = ROUTING_UNIFORM, .data = CASE_ZERO_TOKEN, .seed = 4};
  uint16_t *x = make_x(&p, &tc);
  for(int t = 0; t < 3; t++)
    ck_assert((token_rms(&p, x, t) == 0) == (t == 4 % 3));
  for(int k = 0; k < p.hidden; k++)
    ck_assert_uint_eq(x[p.hidden + k], 0); /* +0 */
  free(x);
  tc.data = CASE_HUGE_SCALE;
  x = make_x(&p, &tc);
  for(int t = 0; t < 3; t++)
    ck_assert(token_rms(&p, x, t) > 0x1p37 && token_rms(&p, x, t) < 0x1p43);
  free(x);
  tc.data = CASE_TINY_SCALE;
  x = make_x(&p, &tc);
  ck_assert(token_rms(&p, x, 0) > 0x1p-27 && token_rms(&p, x, 0) < 0x1p-21);
  ck_assert(token_rms(&p, x, 1) > 0x1p-43 && token_rms(&p, x, 1) < 0x1p-37);
  free(x);
}
END_TEST

static void add_all(TCase *tc)
{
  tcase_add_test(tc, known_answers);
  tcase_add_test(tc, any_part_is_the_same);
  tcase_add_test(tc, kernels_make_the_same_weights);
  tcase_add_test(tc, kernels_make_the_same_scales_and_bias);
  tcase_add_test(tc, datagen_cu_compiles_as_cuda);
  tcase_add_test(tc, weights_have_all_codes_and_both_signs_but_no_nan);
  tcase_add_test(tc, hash_is_flat_and_unrelated);
  tcase_add_test(tc, one_bit_of_seed_or_index_changes_half_of_the_hash);
  tcase_add_test(tc, scales_lie_around_a_power_of_two);
  tcase_add_test(tc, bias_is_small_and_of_either_sign);
  tcase_add_test(tc, x_is_normal_with_outliers);
  tcase_add_test(tc, data_kinds_of_x);
}

int main(void)
{
  Suite *suite = suite_create("datagen");
  TCase *tc = tcase_create("data");
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
