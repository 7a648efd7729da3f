/* test_doctor.c - what doctor finds on machines that the fake CUDA driver and a fake NVML play, and which exit status it gives. */
#include <check.h>
#include <sys/stat.h>

#include "commands.h"
#include "device_hook.h"
#include "device_lock.h"
#include "device_nvml.h"

static struct options options_for(const char *device)
{
  static char store[600];
  const struct options opt = {.program = hook_program, .template_dir = "templates", .store_path = store, .device = device, .json = true};
  snprintf(store, sizeof(store), "%s/work.db", hook_dir);
  return opt;
}

/* Runs doctor with its standard output in a file. */
static enum mf_status run_doctor(const struct options *opt, json_t **report, char *text, size_t space, struct error *err)
{
  char path[600];
  const int saved = dup(STDOUT_FILENO);
  enum mf_status rc;
  size_t count;
  FILE *f;
  snprintf(path, sizeof(path), "%s/doctor.out", hook_dir);
  ck_assert_ptr_nonnull(freopen(path, "w", stdout));
  rc = doctor_command(opt, err);
  fflush(stdout);
  dup2(saved, STDOUT_FILENO);
  close(saved);
  f = fopen(path, "r");
  ck_assert_ptr_nonnull(f);
  count = fread(text, 1, space - 1, f);
  text[count] = '\0';
  fclose(f);
  *report = opt->json ? json_loads(text, 0, NULL) : NULL;
  return rc;
}

/* The finding of one check; "" if it was not made. */
static const char *outcome_of(const json_t *report, const char *check, const char **text)
{
  const json_t *findings = json_object_get(report, "findings");
  for(size_t i = 0; i < json_array_size(findings); i++) {
    const json_t *finding = json_array_get(findings, i);
    if(strcmp(json_string_value(json_object_get(finding, "check")), check) == 0) {
      *text = json_string_value(json_object_get(finding, "text"));
      return json_string_value(json_object_get(finding, "outcome"));
    }
  }
  *text = "";
  return "";
}

static const struct {
  const char *script, *device;
  enum mf_status status;
  const char *check, *outcome, *text;
} machines[] = {
    {"", "auto", MF_OK, "gpu 0", "ok", "NVIDIA H200, 132 SMs"},
    {"", "auto", MF_OK, "gpu 0 launch", "ok", "cooperative"},
    {"", "auto", MF_OK, "gpu 0 memory", "ok", "GB are free"},
    {"", "auto", MF_OK, "driver", "ok", "CUDA 13.0"},
    {"", "auto", MF_OK, "gpu 0 lock", "ok", "no other"},
    {"", "auto", MF_OK, "templates", "ok", "templates"},
    {"", "auto", MF_OK, "compiler", "ok", "NVRTC"},
    {"", "auto", MF_OK, "store", "ok", "will be made"},
    {"", "auto", MF_OK, "gpu 0 clocks", "not checked", "cannot be loaded"},
    {"", "auto", MF_OK, "gpu 0 others", "not checked", "cannot be loaded"},
    {"name=NVIDIA H200 MIG 1g.18gb", "auto", MF_OK, "gpu 0 mig", "warning", "MIG"},
    {"no_device", "auto", MF_ERR_NO_DEVICE, "gpu", "failed", "NO_DEVICE"},
    {"no_device", "none", MF_OK, "gpu", "warning", "NO_DEVICE"},
    {"no_device", "h100-pcie", MF_OK, "gpu", "warning", "NO_DEVICE"},
    {"cc=80", "auto", MF_ERR_NO_DEVICE, "gpu 0", "failed", "compute capability 8.0; the kernels need 9.0"},
    {"cc=80", "none", MF_OK, "gpu 0", "warning", "compute capability 8.0"},
    {"devices=2", "cuda:1", MF_OK, "gpu 1", "ok", "NVIDIA H200"},
    {"devices=2", "cuda:2", MF_ERR_NO_DEVICE, "gpu", "failed", "this machine has 2 GPU(s)"},
};

START_TEST(machine)
{
  const struct options opt = options_for(machines[_i].device);
  struct error err;
  char text[16384];
  const char *found;
  json_t *report = NULL;
  fakecuda_use(machines[_i].script, NULL);
  setenv("MOEFORGE_NVML", "/nonexistent/libnvidia-ml.so", 1);
  ck_assert_int_eq(run_doctor(&opt, &report, text, sizeof(text), &err), machines[_i].status);
  ck_assert_msg(report != NULL, "%s", text);
  ck_assert_str_eq(outcome_of(report, machines[_i].check, &found), machines[_i].outcome);
  ck_assert_msg(strstr(found, machines[_i].text) != NULL, "%s", found);
  ck_assert_int_eq(json_is_true(json_object_get(report, "can_tune")), machines[_i].status == MF_OK);
  ck_assert_str_eq(json_string_value(json_object_get(report, "status")), mf_status_name(machines[_i].status));
  json_decref(report);
}
END_TEST

START_TEST(text_report)
{
  struct options opt = options_for("auto");
  struct error err;
  char text[16384];
  json_t *report = NULL;
  opt.json = false;
  fakecuda_use("", NULL);
  ck_assert_msg(run_doctor(&opt, &report, text, sizeof(text), &err) == MF_OK, "%s", err.text);
  ck_assert_ptr_nonnull(strstr(text, "ok           gpu 0          NVIDIA H200"));
  ck_assert_ptr_nonnull(strstr(text, "\ntuning can run\n"));
  fakecuda_use("no_device", NULL);
  ck_assert_int_eq(run_doctor(&opt, &report, text, sizeof(text), &err), MF_ERR_NO_DEVICE);
  ck_assert_ptr_nonnull(strstr(text, "\ntuning cannot run here\n"));
}
END_TEST

START_TEST(files_that_are_missing_or_foreign)
{
  struct options opt = options_for("auto");
  struct error err;
  char text[16384], foreign[600];
  const char *found;
  json_t *report = NULL;
  FILE *f;
  fakecuda_use("", NULL);
  opt.template_dir = "/nonexistent";
  ck_assert_int_eq(run_doctor(&opt, &report, text, sizeof(text), &err), MF_ERR_IO);
  ck_assert_str_eq(outcome_of(report, "templates", &found), "failed");
  json_decref(report);
  opt = options_for("auto");
  snprintf(foreign, sizeof(foreign), "%s/foreign.db", hook_dir);
  f = fopen(foreign, "w");
  ck_assert_ptr_nonnull(f);
  for(int i = 0; i < 1000; i++)
    fputs("no database ", f);
  fclose(f);
  opt.store_path = foreign;
  ck_assert_int_eq(run_doctor(&opt, &report, text, sizeof(text), &err), MF_ERR_STORE);
  ck_assert_str_eq(outcome_of(report, "store", &found), "failed");
  json_decref(report);
  opt.store_path = "/nonexistent/folder/work.db";
  ck_assert_int_eq(run_doctor(&opt, &report, text, sizeof(text), &err), MF_ERR_IO);
  json_decref(report);
}
END_TEST

START_TEST(another_tune_is_timing)
{
  const struct options opt = options_for("auto");
  struct device_info info[DEVICES_MAX];
  struct error err;
  char text[16384], holder[64];
  const char *found;
  json_t *report = NULL;
  int count = 0, fd = -1;
  fakecuda_use("", NULL);
  ck_assert_int_eq(device_client_probe(hook_program, info, &count, &err), MF_OK);
  ck_assert_int_eq(device_lock_try(info[0].uuid, &fd, holder, sizeof(holder), &err), MF_OK);
  ck_assert_int_eq(run_doctor(&opt, &report, text, sizeof(text), &err), MF_OK);
  ck_assert_str_eq(outcome_of(report, "gpu 0 lock", &found), "warning");
  ck_assert_ptr_nonnull(strstr(found, "process "));
  json_decref(report);
  close(fd);
}
END_TEST

/* ---- a fake NVML ---- */
struct fake_process { /* as nvmlProcessInfo_t */
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};

static int fake_init(void) { return 0; }
static int fake_fail(void) { return 999; }
static int fake_by_uuid(const char *uuid, void **device)
{
  *device = NULL;
  return strcmp(uuid, "GPU-1") == 0 ? 0 : 6;
}
static int fake_processes(void *device, unsigned *count, struct fake_process *out)
{
  (void)device;
  if(*count < 2)
    return 7;
  *count = 2;
  out[0] = (struct fake_process){(unsigned)getpid(), 1, 0, 0}; /* our own does not count */
  out[1] = (struct fake_process){4711, 2000000000, 0, 0};
  return 0;
}
static int fake_clock(void *device, int type, unsigned *mhz)
{
  (void)device;
  *mhz = type == 1 ? 1200 : 2600;
  return 0;
}
static int fake_throttle(void *device, unsigned long long *bits)
{
  (void)device;
  *bits = 0x1 | 0x4 | 0x40; /* idle, power cap, hardware thermal slowdown */
  return 0;
}

static const struct fake_function {
  const char *symbol;
  void (*function)(void);
} fake_nvml[] = {
    {"nvmlInit_v2", (void (*)(void))fake_init},
    {"nvmlShutdown", (void (*)(void))fake_init},
    {"nvmlDeviceGetHandleByUUID", (void (*)(void))fake_by_uuid},
    {"nvmlDeviceGetComputeRunningProcesses_v3", (void (*)(void))fake_processes},
    {"nvmlDeviceGetClockInfo", (void (*)(void))fake_clock},
    {"nvmlDeviceGetCurrentClocksThrottleReasons", (void (*)(void))fake_throttle},
    {"nvmlDeviceGetUtilizationRates", (void (*)(void))fake_fail},
};

/* context: number of functions that the library has. */
static void *find_fake(void *context, const char *symbol)
{
  void *address = NULL;
  for(size_t i = 0; i < *(const size_t *)context; i++)
    if(strcmp(fake_nvml[i].symbol, symbol) == 0)
      memcpy(&address, &fake_nvml[i].function, sizeof(address));
  return address;
}

START_TEST(nvml_answers)
{
  size_t all = sizeof(fake_nvml) / sizeof(fake_nvml[0]), few = 2;
  json_t *answer = nvml_ask(find_fake, &all, "fake", "GPU-1");
  const json_t *processes = json_object_get(answer, "processes"), *throttle = json_object_get(answer, "throttle");
  ck_assert_int_eq((int)json_array_size(processes), 1);
  ck_assert_int_eq(json_integer_value(json_object_get(json_array_get(processes, 0), "pid")), 4711);
  ck_assert_int_eq((int)json_array_size(throttle), 2);
  ck_assert_str_eq(json_string_value(json_array_get(throttle, 0)), "power cap");
  ck_assert_int_eq(json_integer_value(json_object_get(answer, "sm_mhz")), 1200);
  ck_assert_int_eq(json_integer_value(json_object_get(answer, "memory_mhz")), 2600);
  ck_assert_ptr_null(json_object_get(answer, "sm_max_mhz"));          /* not in the library */
  ck_assert_ptr_null(json_object_get(answer, "utilization_percent")); /* there, but it fails */
  json_decref(answer);
  answer = nvml_ask(find_fake, &all, "fake", "GPU-2");
  ck_assert_ptr_nonnull(strstr(json_string_value(json_object_get(answer, "missing")), "GPU-2"));
  json_decref(answer);
  answer = nvml_ask(find_fake, &few, "fake", "GPU-1");
  ck_assert_str_eq(json_string_value(json_object_get(answer, "missing")), "fake does not start");
  json_decref(answer);
  setenv("MOEFORGE_NVML", fakecuda_path(), 1); /* a library that is no NVML */
  answer = nvml_probe("GPU-1");
  ck_assert_ptr_nonnull(strstr(json_string_value(json_object_get(answer, "missing")), "does not start"));
  json_decref(answer);
}
END_TEST

static Suite *doctor_suite(void)
{
  Suite *suite = suite_create("doctor");
  TCase *tcase = tcase_create("doctor");
  tcase_add_loop_test(tcase, machine, 0, (int)(sizeof(machines) / sizeof(machines[0])));
  tcase_add_test(tcase, text_report);
  tcase_add_test(tcase, files_that_are_missing_or_foreign);
  tcase_add_test(tcase, another_tune_is_timing);
  tcase_add_test(tcase, nvml_answers);
  tcase_set_timeout(tcase, 120);
  suite_add_tcase(suite, tcase);
  return suite;
}

int main(int argc, char **argv)
{
  return hook_main(argc, argv, doctor_suite, false);
}
