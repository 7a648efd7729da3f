/* test_device.c - the device itself, in this process: planning arithmetic, the JSON of frames, running cases, misbehaving kernels, breakdowns.
 *
 * The fake CUDA driver runs the kernels of device_hook.h. Only the tuner's own tool kernels are really compiled, once, in a child. */
#include <check.h>
#include <math.h>

#include "device_hook.h"
#include "device_wire.h"

/* ---- arithmetic ---- */
static struct device_info h200(void)
{
  const struct device_info info = {.name = "NVIDIA H200", .cc_major = 9, .sms = 132, .l2_bytes = 62914560};
  return info;
}

START_TEST(layers_follow_l2)
{
  const struct device_info dev = h200();
  struct mf_problem p = hook_problem();
  p.experts = p.expert_count = 256;
  p.top_k = 8;
  p.hidden = 2048;
  p.intermediate = 512;
  ck_assert_int_eq(device_layers_needed(&p, &dev, 1), 9); /* 3 x 62.9 MB / (8 x 3.1 MB) = 7.5, rounded up, and the two layers in use */
  p.hidden = 7168;
  p.intermediate = 2048;
  ck_assert_int_eq(device_layers_needed(&p, &dev, 1), COLD_MIN_LAYERS);
  p.expert_count = 32; /* one expert of the eight is here */
  p.intermediate = 256;
  ck_assert_int_eq(device_layers_needed(&p, &dev, 1), 36);
  p.hidden = p.intermediate = 16;
  ck_assert_int_eq(device_layers_needed(&p, &dev, 1), COLD_MAX_LAYERS);
}
END_TEST

START_TEST(graphs_are_whole_turns)
{
  ck_assert_int_eq(device_graph_launches(24, 9), 27);
  ck_assert_int_eq(device_graph_launches(27, 9), 27);
  ck_assert_int_eq(device_graph_launches(4, 9), 9);
  ck_assert_int_eq(device_graph_launches(1, 1), 1);
}
END_TEST

START_TEST(memory_counts_everything)
{
  struct mf_problem p = hook_problem();
  const double one = device_weights_bytes(&p, 1);
  ck_assert_double_eq_tol(one, 8 * (3.0 * 256 * 128) + 8 * 3 * 2 * 4, 0.5);
  ck_assert_double_eq_tol(device_weights_bytes(&p, 3), 3 * one, 0.5);
  p.select_bias = 1;
  ck_assert_double_eq_tol(device_weights_bytes(&p, 1), one + 8 * 4, 0.5);
  p.select_bias = 0;
  p.intermediate_offset = 64; /* the rank's features straddle two scale blocks */
  ck_assert_double_eq_tol(device_weights_bytes(&p, 1), 8 * (3.0 * 256 * 128) + 8 * 3 * 4 * 4, 0.5);
  ck_assert_double_gt(device_memory_needed(&p, 3, 4, 10), device_memory_needed(&p, 3, 4, 1));
}
END_TEST

START_TEST(reuse_distance)
{
  /* two layers, four launches, one expert each: expert 0 of layer 0 comes again two launches later, with one launch in between */
  const int32_t ids[] = {0, 1, 0, 2};
  const int counts[] = {1, 1, 1, 1}, none[] = {0, 0, 0, 0};
  const int32_t different[] = {0, 1, 2, 3};
  ck_assert_int_eq(device_reuse_experts(ids, counts, 1, 4, 2, 8), 1);
  ck_assert_int_eq(device_reuse_experts(different, counts, 1, 4, 2, 8), 3); /* only when the graph is replayed */
  ck_assert_int_eq(device_reuse_experts(ids, none, 1, 4, 2, 8), INT64_MAX);
}
END_TEST

START_TEST(active_experts_of_this_rank)
{
  struct mf_problem p = hook_problem();
  struct routing_result routing = {.tokens = 3, .top_k = 2, .ids = {7, 1, 4, 7, -1, 5}};
  int32_t ids[8];
  ck_assert_int_eq(device_active_experts(&p, &routing, ids), 4);
  ck_assert(ids[0] == 1 && ids[1] == 4 && ids[2] == 5 && ids[3] == 7);
  p.expert_begin = p.expert_count = 4;
  ck_assert_int_eq(device_active_experts(&p, &routing, ids), 3);
  ck_assert(ids[0] == 0 && ids[1] == 1 && ids[2] == 3);
}
END_TEST

START_TEST(profile_cases_differ)
{
  const struct test_case a = device_profile_case(3, ROUTING_ZIPF, 5, 0), b = device_profile_case(3, ROUTING_ZIPF, 5, 1), c = device_profile_case(3, ROUTING_ZIPF, 6, 0);
  ck_assert(a.tokens == 3 && a.routing == ROUTING_ZIPF && a.data == CASE_NORMAL);
  ck_assert(a.seed != b.seed && a.seed != c.seed && b.seed != c.seed);
}
END_TEST

/* ---- wire ---- */
START_TEST(info_round_trip)
{
  struct device_info a = h200(), b;
  struct error err;
  json_t *json;
  a.bandwidth_gbps = 4670.5;
  a.mig = true;
  snprintf(a.uuid, sizeof(a.uuid), "GPU-1");
  json = wire_info(&a);
  ck_assert_int_eq(wire_read_info(json, &b, &err), MF_OK);
  ck_assert(strcmp(a.name, b.name) == 0 && strcmp(a.uuid, b.uuid) == 0 && b.mig && a.l2_bytes == b.l2_bytes && a.bandwidth_gbps == b.bandwidth_gbps);
  json_object_del(json, "sms");
  ck_assert_int_eq(wire_read_info(json, &b, &err), MF_ERR_INTERNAL);
  ck_assert_ptr_nonnull(strstr(err.text, "sms"));
  json_decref(json);
}
END_TEST

START_TEST(result_round_trip)
{
  struct check_result a = {.passed = false, .failed_gate = GATE_END, .detail = "h: too far"}, b;
  struct error err;
  json_t *json;
  a.worst[GATE_H] = 0.25;
  a.worst_error = 0.0375;
  a.worst[GATE_END] = INFINITY;
  json = wire_check_result(&a);
  ck_assert_int_eq(wire_read_check_result(json, &b, &err), MF_OK);
  ck_assert(!b.passed && b.failed_gate == GATE_END && strcmp(b.detail, a.detail) == 0 && b.worst[GATE_H] == 0.25 && b.worst_error == 0.0375 && isnan(b.worst[GATE_END]));
  json_decref(json);
  ck_assert_int_eq(wire_read_check_result(NULL, &b, &err), MF_ERR_INTERNAL);
}
END_TEST

/* ---- the device itself, in this process ---- */
static struct device *open_here(const char *script, struct error *err)
{
  struct device *dev = NULL;
  fakecuda_use(script, NULL);
  hook_install();
  if(device_cuda.open(0, &hook_tools.tools, &dev, err) != MF_OK)
    return NULL;
  return dev;
}

START_TEST(run_case_reads_everything)
{
  const struct mf_problem p = hook_problem();
  const struct mf_recipe recipe = hook_recipe(HOOK_RIGHT);
  struct test_case cases[HOOK_CASES];
  struct reference_result ref;
  struct device_output out;
  struct device_kernel *kernel = NULL;
  struct error err;
  struct device *dev = open_here("", &err);
  hook_cases(cases);
  ck_assert_msg(dev != NULL, "%s", err.text);
  ck_assert_msg(device_cuda.load_problem(dev, &p, 1, 2, HOOK_TOKENS, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel, &err) == MF_OK, "%s", err.text);
  for(int i = 0; i < 20; i++) { /* over several fresh workspaces and both buffers of h */
    const struct test_case *tc = &cases[i % HOOK_CASES];
    const size_t rows = (size_t)tc->tokens * 2;
    ck_assert_msg(device_cuda.run_case(dev, kernel, tc, i % 2, 2 + i % 2, 1000, &out, &err) == MF_OK, "%s", err.text);
    ck_assert_int_eq(reference_run(&p, 1, data_layer_seed((uint32_t)i % 2), tc, &ref, &err), MF_OK);
    ck_assert(out.replays_equal && !out.poison_left && !out.guard_damaged && out.status == 0);
    ck_assert_int_eq(out.y[0], bf16_from_float(ref.y[0]));
    ck_assert(memcmp(out.h, ref.h, rows * 256) == 0 && memcmp(out.ids, ref.routing.ids, rows * 4) == 0);
    ck_assert(memcmp(out.weights, ref.routing.weights, rows * 4) == 0);
    reference_free(&ref);
    device_output_free(&out);
  }
  ck_assert_int_eq(device_cuda.run_case(dev, kernel, cases, 2, 2, 1000, &out, &err), MF_ERR_USAGE);
  device_cuda.close(dev);
}
END_TEST

/* What each way of misbehaving shows, and what it does not. */
static const struct {
  enum hook_mode mode;
  bool poison, guard;
  uint32_t status;
} misdeeds[] = {{HOOK_SILENT, true, false, 0}, {HOOK_STRAY, false, true, 0}, {HOOK_NAN, false, false, MF_WS_NAN_LOGIT}};

START_TEST(run_case_sees_misdeeds)
{
  const struct mf_problem p = hook_problem();
  const struct mf_recipe recipe = hook_recipe(misdeeds[_i].mode);
  struct test_case cases[HOOK_CASES];
  struct device_output out;
  struct device_kernel *kernel = NULL;
  struct error err;
  struct device *dev = open_here("", &err);
  hook_cases(cases);
  ck_assert_int_eq(device_cuda.load_problem(dev, &p, 1, 1, HOOK_TOKENS, &err), MF_OK);
  ck_assert_int_eq(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel, &err), MF_OK);
  ck_assert_int_eq(device_cuda.run_case(dev, kernel, cases, 0, 2, 1000, &out, &err), MF_OK);
  ck_assert_int_eq(out.poison_left, misdeeds[_i].poison);
  ck_assert_int_eq(out.guard_damaged, misdeeds[_i].guard);
  ck_assert_int_eq(out.status, misdeeds[_i].status);
  device_output_free(&out);
  device_cuda.close(dev);
}
END_TEST

/* Errors of a device that is well until the script changes; counting devices makes the fake driver read it again. */
static const struct {
  const char *script;
  enum mf_status status;
  const char *text;
} breakdowns[] = {{"hang", MF_ERR_TIMEOUT, "no progress within"}, {"fault", MF_ERR_DEVICE, "ILLEGAL_ADDRESS"}, {"launch_fail", MF_ERR_DEVICE, "LAUNCH_FAILED"}};

START_TEST(run_case_breaks)
{
  static struct device *dev; /* beyond closing at the end, as in a worker: the test's process ends with it */
  const struct mf_problem p = hook_problem();
  const struct mf_recipe recipe = hook_recipe(HOOK_RIGHT);
  struct test_case cases[HOOK_CASES];
  struct device_output out;
  struct device_kernel *kernel = NULL;
  struct error err;
  int count = 0;
  dev = open_here("", &err);
  hook_cases(cases);
  ck_assert_int_eq(device_cuda.load_problem(dev, &p, 1, 1, HOOK_TOKENS, &err), MF_OK);
  ck_assert_int_eq(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel, &err), MF_OK);
  fakecuda_use(breakdowns[_i].script, NULL);
  ck_assert_int_eq(device_cuda.count(&count, &err), MF_OK);
  ck_assert_int_eq(device_cuda.run_case(dev, kernel, cases, 0, 2, 50, &out, &err), breakdowns[_i].status);
  ck_assert_msg(strstr(err.text, breakdowns[_i].text) != NULL, "%s", err.text);
}
END_TEST

START_TEST(load_kernel_refuses)
{
  const struct mf_problem p = hook_problem();
  struct mf_recipe recipe = hook_recipe(HOOK_RIGHT);
  struct device_kernel *kernel = NULL;
  struct error err;
  struct device *dev = open_here("sms=78", &err);
  ck_assert_int_eq(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel, &err), MF_ERR_INTERNAL);
  ck_assert_int_eq(device_cuda.load_problem(dev, &p, 1, 1, HOOK_TOKENS, &err), MF_OK);
  recipe.min_sms = 79;
  ck_assert_int_eq(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel, &err), MF_MISS_SMS);
  recipe = hook_recipe(HOOK_RIGHT);
  recipe.h_buffer_bytes -= 4;
  ck_assert_int_eq(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel, &err), MF_ERR_CORRUPT);
  ck_assert_ptr_nonnull(strstr(err.text, "h_buffer_bytes"));
  recipe = hook_recipe(HOOK_RIGHT);
  recipe.routing_ids_offset = recipe.workspace_bytes - 4;
  ck_assert_int_eq(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel, &err), MF_ERR_CORRUPT);
  recipe = hook_recipe(HOOK_RIGHT);
  recipe.magic = 0;
  ck_assert_int_eq(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel, &err), MF_ERR_CORRUPT);
  ck_assert_int_eq(device_cuda.load_kernel(dev, "garbage-garbage-garbage-garbage-garbage-garbage-garbage-garbage-garbage", 70, &recipe, &kernel, &err), MF_ERR_CORRUPT);
  ck_assert_ptr_null(kernel);
  device_cuda.close(dev);
}
END_TEST

/* Their weights lie behind the others', and they are always active. */
START_TEST(shared_experts_have_weights)
{
  const struct mf_problem p = hook_problem();
  struct routing_result routing = {.tokens = 1, .top_k = 2, .ids = {0, 0}};
  struct mf_problem q = p;
  struct error err;
  struct device *dev = open_here("", &err);
  int32_t ids[64];
  q.shared_experts = 1 + MF_SHARED_GATED;
  ck_assert_int_eq(device_cuda.load_problem(dev, &q, 1, 1, HOOK_TOKENS, &err), MF_OK);
  ck_assert(device_weights_bytes(&q, 1) > device_weights_bytes(&p, 1) * (p.expert_count + 0.9) / p.expert_count);
  routing.ids[1] = q.experts + q.zero_experts;
  ck_assert_int_eq(device_active_experts(&q, &routing, ids), 2);
  ck_assert_int_eq(ids[1], q.expert_count);
  device_cuda.close(dev);
}
END_TEST

START_TEST(close_gives_everything_back)
{
  const struct mf_problem p = hook_problem();
  const struct mf_recipe recipe = hook_recipe(HOOK_RIGHT);
  struct device_kernel *kernel[2] = {NULL, NULL};
  struct error err;
  void *symbol;
  fakecuda_alive_fn *alive;
  struct device *dev = open_here("l2=100000", &err);
  symbol = fakecuda_symbol("fakecuda_alive");
  memcpy(&alive, &symbol, sizeof(alive));
  ck_assert_int_eq(device_cuda.load_problem(dev, &p, 1, 3, HOOK_TOKENS, &err), MF_OK);
  for(int i = 0; i < 2; i++)
    ck_assert_int_eq(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel[i], &err), MF_OK);
  ck_assert_msg(device_cuda.open_profile(dev, kernel, 2, 2, ROUTING_UNIFORM, 1, 6, &err) == MF_OK, "%s", err.text);
  device_cuda.unload_kernel(dev, kernel[0]);
  ck_assert_int_eq(device_cuda.load_problem(dev, &p, 1, 2, HOOK_TOKENS, &err), MF_OK);
  ck_assert_int_gt(alive(), 0);
  device_cuda.close(dev);
  ck_assert_int_eq(alive(), 0);
}
END_TEST

START_TEST(timing_launches_without_pdl)
{
  const struct mf_problem p = hook_problem();
  struct mf_recipe recipe = hook_recipe(HOOK_RIGHT);
  struct device_kernel *kernel = NULL;
  struct error err;
  double us, active;
  struct floor_times times;
  char log[600], line[4096];
  int launches = 0, floors = 0;
  FILE *f;
  struct device *dev = open_here("l2=100000", &err);
  snprintf(log, sizeof(log), "%s/pdl.log", hook_dir);
  recipe.flags = MF_RECIPE_PDL;
  ck_assert_int_eq(device_cuda.load_problem(dev, &p, 1, 3, HOOK_TOKENS, &err), MF_OK);
  ck_assert_int_eq(device_cuda.load_kernel(dev, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &kernel, &err), MF_OK);
  ck_assert_int_eq(device_cuda.open_profile(dev, &kernel, 1, 2, ROUTING_UNIFORM, 3, 6, &err), MF_OK);
  setenv("FAKECUDA_LOG", log, 1);
  ck_assert_int_eq(device_cuda.time_round(dev, NULL, 0, &us, &times, &active, &err), MF_OK);
  unsetenv("FAKECUDA_LOG");
  device_cuda.close(dev);
  f = fopen(log, "r");
  ck_assert_ptr_nonnull(f);
  while(fgets(line, sizeof(line), f) != NULL) {
    ck_assert_ptr_null(strstr(line, "pdl=1"));
    launches += strstr(line, "kernel=mf_moe") != NULL;
    floors += strstr(line, "kernel=mf_floor grid=132,1,1") != NULL;
  }
  fclose(f);
  ck_assert_int_gt(launches, 0);
  ck_assert_int_eq(launches % 18, 0); /* an untimed and two timed replays of six launches, maybe measured again */
  ck_assert_int_eq(floors, 2 * launches);
}
END_TEST

static Suite *device_suite(void)
{
  Suite *suite = suite_create("device");
  TCase *plan = tcase_create("plan"), *device = tcase_create("device");
  tcase_add_test(plan, layers_follow_l2);
  tcase_add_test(plan, graphs_are_whole_turns);
  tcase_add_test(plan, memory_counts_everything);
  tcase_add_test(plan, reuse_distance);
  tcase_add_test(plan, active_experts_of_this_rank);
  tcase_add_test(plan, profile_cases_differ);
  tcase_add_test(plan, info_round_trip);
  tcase_add_test(plan, result_round_trip);
  tcase_add_test(device, run_case_reads_everything);
  tcase_add_loop_test(device, run_case_sees_misdeeds, 0, 3);
  tcase_add_loop_test(device, run_case_breaks, 0, 3);
  tcase_add_test(device, load_kernel_refuses);
  tcase_add_test(device, shared_experts_have_weights);
  tcase_add_test(device, close_gives_everything_back);
  tcase_add_test(device, timing_launches_without_pdl);
  tcase_set_timeout(device, 120);
  suite_add_tcase(suite, plan);
  suite_add_tcase(suite, device);
  return suite;
}

int main(int argc, char **argv)
{
  return hook_main(argc, argv, device_suite, true);
}
