/* test_device_client.c - the parent's side of a device: typed errors, faults that cost one candidate, timing, the GPU lock, bad frames.
 *
 * The program is its own worker (`--worker ROLE FD`), with the fake CUDA driver and the kernels of device_hook.h in the child. */
#include <check.h>
#include <math.h>

#include "device_hook.h"
#include "device_lock.h"
#include "device_wire.h"
#include "worker.h"

/* ---- clients: typed errors ---- */
static const struct {
  const char *script;
  enum mf_status status;
  const char *text;
} no_devices[] = {
    {"no_device", MF_ERR_NO_DEVICE, "NO_DEVICE"},
    {"cc=80", MF_ERR_NO_DEVICE, "compute capability 8.0; the kernels need 9.0"},
    {"oom", MF_ERR_NOMEM, "OUT_OF_MEMORY"},
    {"mem=200000000", MF_ERR_NOMEM, "GB are free"},
    {"load_fail", MF_ERR_DEVICE, "tuner's own kernels"},
};

START_TEST(client_errors_are_typed)
{
  const struct mf_problem p = hook_problem();
  struct device_client *client = NULL;
  struct error err;
  enum mf_status rc;
  fakecuda_use(no_devices[_i].script, NULL);
  rc = device_client_start(hook_program, 0, &hook_tools.tools, 1, &client, &err);
  if(rc == MF_OK)
    rc = device_client_load_problem(client, &p, 1, 1, HOOK_TOKENS, &err);
  ck_assert_int_eq(rc, no_devices[_i].status);
  ck_assert_msg(strstr(err.text, no_devices[_i].text) != NULL, "%s", err.text);
  device_client_stop(client);
}
END_TEST

START_TEST(probe_reports)
{
  struct device_info info[DEVICES_MAX];
  struct error err;
  int count = -1;
  fakecuda_use("devices=2,name=NVIDIA H100,sms=114", NULL);
  ck_assert_msg(device_client_probe(hook_program, info, &count, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(count, 2);
  ck_assert(strcmp(info[1].name, "NVIDIA H100") == 0 && info[1].sms == 114 && info[1].cc_major == 9 && info[1].driver_version == 13000);
  ck_assert_double_eq_tol(info[0].bandwidth_gbps, 6144.0 / 8 * 3.201 * 2, 1);
  ck_assert(strncmp(info[0].uuid, "GPU-fafafafa-fafa-", 18) == 0 && strcmp(info[0].uuid, info[1].uuid) != 0);
  fakecuda_use("no_device", NULL);
  ck_assert_int_eq(device_client_probe(hook_program, info, &count, &err), MF_ERR_NO_DEVICE);
  setenv("MOEFORGE_LIBCUDA", "/nonexistent/libcuda.so", 1);
  ck_assert_int_eq(device_client_probe(hook_program, info, &count, &err), MF_ERR_NO_DEVICE);
  ck_assert_ptr_nonnull(strstr(err.text, "/nonexistent/libcuda.so"));
  ck_assert_int_eq(device_client_probe("/nonexistent/program", info, &count, &err), MF_ERR_WORKER);
}
END_TEST

static struct device_client *start(const char *script, int layers)
{
  const struct mf_problem p = hook_problem();
  struct device_client *client = NULL;
  struct error err;
  fakecuda_use(script, NULL);
  ck_assert_msg(device_client_start(hook_program, 0, &hook_tools.tools, 1, &client, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(device_client_load_problem(client, &p, 1, layers, HOOK_TOKENS, &err) == MF_OK, "%s", err.text);
  return client;
}

static int load(struct device_client *client, enum hook_mode mode)
{
  const struct mf_recipe recipe = hook_recipe(mode);
  struct error err;
  int handle = -1;
  ck_assert_msg(device_client_load_kernel(client, HOOK_CUBIN, sizeof(HOOK_CUBIN), &recipe, &handle, &err) == MF_OK, "%s", err.text);
  return handle;
}

static struct check_plan plan_of(const struct mf_problem *p, const struct test_case *cases)
{
  static char cache[600];
  const struct check_plan plan = {.problem = p, .routed_scaling = 1, .cache_dir = cache, .cases = cases, .ncases = HOOK_CASES, .layers = 2, .replays = 2, .timeout_ms = 300};
  snprintf(cache, sizeof(cache), "%s/cache/refs", hook_dir);
  return plan;
}

START_TEST(client_checks)
{
  const struct mf_problem p = hook_problem();
  struct test_case cases[HOOK_CASES];
  struct check_plan plan;
  struct check_result result;
  struct error err;
  struct device_client *client = start("", 2);
  int right, wrong;
  hook_cases(cases);
  plan = plan_of(&p, cases);
  ck_assert_msg(device_client_references(hook_program, &plan, 2, NULL, NULL, &err) == MF_OK, "%s", err.text);
  right = load(client, HOOK_RIGHT);
  wrong = load(client, HOOK_WRONG);
  ck_assert_int_ne(right, wrong);
  ck_assert_msg(device_client_check(client, right, &plan, &result, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(result.passed, "%s", result.detail);
  ck_assert_int_eq(device_client_check(client, wrong, &plan, &result, &err), MF_OK);
  ck_assert(!result.passed && (result.failed_gate == GATE_Y_GIVEN_H || result.failed_gate == GATE_END));
  ck_assert_int_eq(device_client_unload_kernel(client, wrong, &err), MF_OK);
  ck_assert_int_eq(device_client_check(client, wrong, &plan, &result, &err), MF_ERR_USAGE);
  ck_assert_int_eq(load(client, HOOK_NAN), wrong); /* the handle is free again */
  ck_assert_int_eq(device_client_check(client, wrong, &plan, &result, &err), MF_OK);
  ck_assert(!result.passed && result.failed_gate == GATE_STATUS);
  device_client_stop(client);
}
END_TEST

START_TEST(client_survives_a_crash)
{
  const struct mf_problem p = hook_problem();
  struct test_case cases[HOOK_CASES];
  struct check_plan plan;
  struct check_result result;
  struct error err;
  struct device_client *client = start("", 2);
  const int crash = load(client, HOOK_CRASH);
  hook_cases(cases);
  plan = plan_of(&p, cases);
  ck_assert(device_client_alive(client));
  ck_assert_int_eq(device_client_check(client, crash, &plan, &result, &err), MF_ERR_WORKER);
  ck_assert_msg(strstr(err.text, "signal 12") != NULL, "%s", err.text);
  ck_assert(!device_client_alive(client));
  ck_assert_int_eq(device_client_check(client, crash, &plan, &result, &err), MF_ERR_WORKER);
  device_client_stop(client);
}
END_TEST

/* ---- many ---- */
struct tally {
  struct check_verdict verdict[16];
  int calls[16], total;
  int stop_after; /* 0: never */
};

static enum mf_status count_verdict(void *context, size_t index, const struct check_verdict *verdict, struct error *err)
{
  struct tally *t = context;
  t->verdict[index] = *verdict;
  t->calls[index]++;
  t->total++;
  return t->total == t->stop_after ? error_set(err, MF_ERR_STORE, "full") : MF_OK;
}

static enum mf_status check_modes(const enum hook_mode *modes, size_t count, int jobs, struct tally *t, struct error *err)
{
  const struct mf_problem p = hook_problem();
  const struct check_pool pool = {.program = hook_program, .ordinal = 0, .tools = &hook_tools.tools, .jobs = jobs};
  struct test_case cases[HOOK_CASES];
  struct mf_recipe recipes[16];
  struct check_item items[16];
  struct check_plan plan;
  char cache[600];
  static int calls;
  hook_cases(cases);
  plan = plan_of(&p, cases);
  snprintf(cache, sizeof(cache), "%s/cache-%ld-%d", hook_dir, (long)getpid(), calls++); /* no verdicts of other tests */
  plan.cache_dir = cache;
  for(size_t i = 0; i < count; i++) {
    recipes[i] = hook_recipe(modes[i]);
    items[i] = (struct check_item){.cubin = HOOK_CUBIN, .cubin_bytes = sizeof(HOOK_CUBIN), .recipe = &recipes[i]};
  }
  return device_client_check_many(&pool, &plan, items, count, count_verdict, t, err);
}

static const int job_counts[] = {1, 3};

START_TEST(many_faults_cost_one_candidate_each)
{
  const enum hook_mode modes[] = {HOOK_RIGHT, HOOK_CRASH, HOOK_RIGHT, HOOK_WRONG, HOOK_HANG, HOOK_RIGHT, HOOK_SILENT, HOOK_RIGHT};
  const size_t count = sizeof(modes) / sizeof(modes[0]);
  struct tally t = {.total = 0};
  struct error err;
  fakecuda_use("", NULL);
  ck_assert_msg(check_modes(modes, count, job_counts[_i], &t, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(t.total, (int)count);
  for(size_t i = 0; i < count; i++) {
    const struct check_verdict *v = &t.verdict[i];
    const enum mf_status expected = modes[i] == HOOK_RIGHT   ? MF_OK
                                    : modes[i] == HOOK_CRASH ? MF_ERR_WORKER
                                    : modes[i] == HOOK_HANG  ? MF_ERR_TIMEOUT
                                                             : MF_ERR_CHECK;
    ck_assert_int_eq(t.calls[i], 1);
    ck_assert_msg(v->status == expected, "item %zu: status %d, %s %s", i, v->status, v->fault, v->result.detail);
    ck_assert_int_eq(v->fault[0] != '\0', expected == MF_ERR_WORKER || expected == MF_ERR_TIMEOUT);
    ck_assert(expected == MF_OK ? v->result.passed : v->runs == 2);
  }
  ck_assert_ptr_nonnull(strstr(t.verdict[1].fault, "signal 12"));
  ck_assert_ptr_nonnull(strstr(t.verdict[4].fault, "no progress within"));
}
END_TEST

START_TEST(many_not_reproducible)
{
  const enum hook_mode first[] = {HOOK_FLAKY}, later[] = {HOOK_RIGHT, HOOK_FLAKY};
  struct tally t = {.total = 0}, u = {.total = 0};
  struct error err;
  char marker[600];
  fakecuda_use("", NULL);
  snprintf(marker, sizeof(marker), "%s/flaky", hook_dir);
  unlink(marker);
  ck_assert_msg(check_modes(first, 1, 1, &t, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(t.verdict[0].status, MF_ERR_CHECK);
  ck_assert_msg(strstr(t.verdict[0].result.detail, "not reproducible") != NULL, "%s", t.verdict[0].result.detail);
  unlink(marker); /* behind another candidate in the same child, that one may be the cause: the second verdict stands */
  ck_assert_msg(check_modes(later, 2, 1, &u, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(u.verdict[1].status, MF_OK);
  ck_assert_int_eq(u.verdict[1].runs, 2);
}
END_TEST

/* Somebody else's SIGKILL is no verdict: the candidate is run again, as its first run. If it never ends, the work does, and what was judged stands. */
START_TEST(many_killed_from_outside)
{
  const enum hook_mode once[] = {HOOK_KILLED_ONCE, HOOK_RIGHT}, always[] = {HOOK_RIGHT, HOOK_KILLED, HOOK_RIGHT};
  struct tally t = {.total = 0}, u = {.total = 0};
  struct error err;
  char marker[600];
  fakecuda_use("", NULL);
  snprintf(marker, sizeof(marker), "%s/flaky", hook_dir);
  unlink(marker);
  ck_assert_msg(check_modes(once, 2, job_counts[_i], &t, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(access(marker, F_OK), 0);
  for(int i = 0; i < 2; i++) {
    ck_assert_msg(t.verdict[i].status == MF_OK, "%s %s", t.verdict[i].fault, t.verdict[i].result.detail);
    ck_assert_int_eq(t.verdict[i].runs, 1);
    ck_assert_int_eq(t.calls[i], 1);
  }
  ck_assert_int_eq(check_modes(always, 3, job_counts[_i], &u, &err), MF_ERR_WORKER);
  ck_assert_msg(strstr(err.text, "too little memory?") != NULL, "%s", err.text);
  ck_assert_int_eq(u.calls[1], 0);
  if(job_counts[_i] == 1) /* with more, the first may still be running beside the one that ends the work */
    ck_assert_int_eq(u.calls[0], 1);
  ck_assert_int_le(u.calls[0], 1);
}
END_TEST

START_TEST(many_stops)
{
  const enum hook_mode modes[] = {HOOK_RIGHT, HOOK_RIGHT, HOOK_RIGHT, HOOK_RIGHT};
  struct tally t = {.stop_after = 2}, none = {.total = 0};
  struct error err;
  fakecuda_use("", NULL);
  ck_assert_int_eq(check_modes(modes, 4, 1, &t, &err), MF_ERR_STORE);
  ck_assert_int_eq(t.total, 2);
  fakecuda_use("no_device", NULL);
  ck_assert_int_eq(check_modes(modes, 4, 2, &none, &err), MF_ERR_NO_DEVICE);
  fakecuda_use("mem=200000000", NULL);
  ck_assert_int_eq(check_modes(modes, 4, 3, &none, &err), MF_ERR_NOMEM);
  ck_assert_int_eq(none.total, 0);
  ck_assert_int_eq(check_modes(modes, 0, 3, &none, &err), MF_OK);
}
END_TEST

START_TEST(many_with_memory_for_one_child)
{
  const enum hook_mode modes[] = {HOOK_RIGHT, HOOK_RIGHT, HOOK_RIGHT};
  struct tally t = {.total = 0};
  struct error err;
  fakecuda_use("mem=900000000", NULL);
  ck_assert_msg(check_modes(modes, 3, 3, &t, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(t.total, 3);
}
END_TEST

static bool count_progress(void *context, int done, int total)
{
  int *last = context;
  *last = done;
  return total == HOOK_CASES;
}

static bool refuse_progress(void *context, int done, int total)
{
  (void)context;
  (void)total;
  return done == 0;
}

START_TEST(references_fill_the_cache)
{
  const struct mf_problem p = hook_problem();
  struct test_case cases[HOOK_CASES];
  struct check_plan plan;
  struct error err;
  char cache[600];
  int last = 0;
  hook_cases(cases);
  plan = plan_of(&p, cases);
  snprintf(cache, sizeof(cache), "%s/other/deep/cache", hook_dir);
  plan.cache_dir = cache;
  ck_assert_msg(device_client_references(hook_program, &plan, 3, count_progress, &last, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(last, HOOK_CASES);
  ck_assert_int_eq(device_client_references(hook_program, &plan, 1, refuse_progress, NULL, &err), MF_ERR_INTERRUPTED);
  plan.cache_dir = "/proc/no/such/place";
  ck_assert_int_eq(device_client_references(hook_program, &plan, 1, NULL, NULL, &err), MF_ERR_IO);
}
END_TEST

/* ---- timing ---- */
START_TEST(rounds)
{
  struct device_client *client;
  struct error err;
  const bool run[] = {true, false, true};
  double us[3], active;
  struct floor_times floors;
  char log[600];
  int kernels[3];
  client = start("l2=100000,time_us=12.5", 3);
  snprintf(log, sizeof(log), "%s/log", hook_dir);
  for(int i = 0; i < 3; i++)
    kernels[i] = load(client, HOOK_RIGHT);
  ck_assert_int_eq(device_client_round(client, NULL, 0, us, &floors, &active, &err), MF_ERR_USAGE); /* no profile yet */
  ck_assert_msg(device_client_open_profile(client, kernels, 3, 3, ROUTING_UNIFORM, 7, 4, &err) == MF_OK, "%s", err.text);
  for(int round = 0; round < 4; round++) {
    ck_assert_msg(device_client_round(client, NULL, round, us, &floors, &active, &err) == MF_OK, "%s", err.text);
    for(int i = 0; i < 3; i++)
      ck_assert_double_eq_tol(us[i], 12.5, 1e-3);
    ck_assert_double_eq_tol(floors.copy_us, 12.5, 1e-3);
    ck_assert(active >= 2 && active <= 6);
  }
  ck_assert_int_eq(device_client_round(client, run, 4, us, &floors, &active, &err), MF_OK);
  ck_assert(!isnan(us[0]) && isnan(us[1]) && !isnan(us[2]));
  ck_assert_int_eq(device_client_open_profile(client, kernels, 1, 1, ROUTING_CONCENTRATED, 7, 4, &err), MF_OK); /* replaces the profile */
  ck_assert_int_eq(device_client_round(client, NULL, 0, us, &floors, &active, &err), MF_OK);
  ck_assert_double_eq_tol(active, 2, 1e-9);
  device_client_stop(client);
}
END_TEST

START_TEST(profiles_are_refused)
{
  struct error err;
  struct device_client *client = start("l2=10000000", 3); /* 30 MB between two uses cannot be had from 3 layers of 8 x 98 KB */
  int kernel = load(client, HOOK_RIGHT), none = 99;
  ck_assert_int_eq(device_client_open_profile(client, &kernel, 1, 1, ROUTING_UNIFORM, 1, 6, &err), MF_REJECTED);
  ck_assert_msg(strstr(err.text, "would not be cold") != NULL && strstr(err.text, "load more layers than 3") != NULL, "%s", err.text);
  ck_assert_int_eq(device_client_open_profile(client, &none, 1, 1, ROUTING_UNIFORM, 1, 6, &err), MF_ERR_USAGE);
  device_client_stop(client);
  client = start("l2=100000", 3);
  kernel = load(client, HOOK_SILENT);
  ck_assert_int_eq(device_client_open_profile(client, &kernel, 1, 1, ROUTING_UNIFORM, 1, 6, &err), MF_ERR_CHECK);
  ck_assert_ptr_nonnull(strstr(err.text, "unwritten"));
  device_client_stop(client);
}
END_TEST

/* ---- the lock ---- */
static void *stop_later(void *client)
{
  usleep(300000);
  device_client_stop(client);
  return NULL;
}

static void remember_line(void *context, const char *line)
{
  snprintf(context, 256, "%s", line);
}

START_TEST(one_process_times)
{
  struct device_client *first = start("", 1), *second = start("", 1);
  struct error err;
  char line[256] = "", holder[64], uuid[64];
  pthread_t thread;
  int fd = -1;
  snprintf(uuid, sizeof(uuid), "%s", device_client_info(second)->uuid);
  ck_assert_msg(device_client_lock(first, remember_line, line, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(device_client_lock(first, remember_line, line, &err) == MF_OK, "%s", err.text); /* has it already */
  ck_assert_str_eq(line, "");
  ck_assert_int_eq(device_lock_try(uuid, &fd, holder, sizeof(holder), &err), MF_OK);
  ck_assert(fd == -1 && strncmp(holder, "process ", 8) == 0);
  ck_assert_int_eq(pthread_create(&thread, NULL, stop_later, first), 0);
  ck_assert_msg(device_client_lock(second, remember_line, line, &err) == MF_OK, "%s", err.text);
  ck_assert_ptr_nonnull(strstr(line, "waiting"));
  pthread_join(thread, NULL);
  device_client_stop(second);
  ck_assert_int_eq(device_lock_wait(uuid, &fd, &err), MF_OK);
  close(fd);
}
END_TEST

START_TEST(lock_needs_a_folder)
{
  struct error err;
  char holder[64];
  int fd = -1;
  setenv("MOEFORGE_LOCK_DIR", "/nonexistent", 1);
  ck_assert_int_eq(device_lock_try("GPU-1", &fd, holder, sizeof(holder), &err), MF_ERR_IO);
  ck_assert_ptr_nonnull(strstr(err.text, "/nonexistent/moeforge-gpu-GPU-1.lock"));
}
END_TEST

/* ---- frames that no client sends ---- */
START_TEST(bad_requests)
{
  static const char *const requests[] = {"{}", "{\"op\":\"dance\"}", "{\"op\":\"open\"}", "{\"op\":\"check\",\"kernel\":0}", "{\"op\":\"problem\"}",
                                         "{\"op\":\"round\",\"round\":0}", "{\"op\":\"kernel\"}", "{\"op\":\"reference\",\"cache_dir\":\"/tmp\",\"layer\":0,\"threads\":0}",
                                         "{\"op\":\"tool\",\"name\":\"floor\"}"};
  struct worker w;
  struct error err;
  fakecuda_use("", NULL);
  ck_assert_msg(worker_start(hook_program, DEVICE_ROLE, &w, &err) == MF_OK, "%s", err.text);
  for(size_t i = 0; i < sizeof(requests) / sizeof(requests[0]); i++) {
    struct frame req, reply;
    memset(&req, 0, sizeof(req));
    req.head = json_loads(requests[i], 0, NULL);
    ck_assert_int_eq(worker_send(&w, &req, &err), MF_OK);
    ck_assert_msg(worker_receive(&w, &reply, 10000, &err) == MF_OK, "%s: %s", requests[i], err.text);
    ck_assert_int_eq(wire_read_status(&reply, &err), MF_ERR_USAGE);
    ck_assert_ptr_nonnull(strstr(err.text, "device request"));
    frame_free(&req);
    frame_free(&reply);
  }
  worker_stop(&w);
}
END_TEST

static Suite *device_suite(void)
{
  Suite *suite = suite_create("device_client");
  TCase *one = tcase_create("client"), *many = tcase_create("many"), *timing = tcase_create("timing");
  tcase_add_loop_test(one, client_errors_are_typed, 0, 5);
  tcase_add_test(one, probe_reports);
  tcase_add_test(one, client_checks);
  tcase_add_test(one, client_survives_a_crash);
  tcase_add_test(one, bad_requests);
  tcase_add_loop_test(many, many_faults_cost_one_candidate_each, 0, 2);
  tcase_add_test(many, many_not_reproducible);
  tcase_add_test(many, many_stops);
  tcase_add_test(many, many_with_memory_for_one_child);
  tcase_add_loop_test(many, many_killed_from_outside, 0, 2);
  tcase_add_test(many, references_fill_the_cache);
  tcase_add_test(timing, rounds);
  tcase_add_test(timing, profiles_are_refused);
  tcase_add_test(timing, one_process_times);
  tcase_add_test(timing, lock_needs_a_folder);
  tcase_set_timeout(one, 120);
  tcase_set_timeout(many, 240);
  tcase_set_timeout(timing, 120);
  suite_add_tcase(suite, one);
  suite_add_tcase(suite, many);
  suite_add_tcase(suite, timing);
  return suite;
}

int main(int argc, char **argv)
{
  return hook_main(argc, argv, device_suite, true);
}
