/* test_cli_gpu.c - the tool on machines that are not as they should be: no GPU, another one, an old driver, one that is occupied or out of memory, a full disk,
 * workers that are killed, signals. One clear line, the documented exit code; what was measured is kept, and no candidate is blamed for the machine. */
#include "cli_fixture.h"

#include <dirent.h>
#include <sys/resource.h>

/* ---- GPUs ---- */
START_TEST(no_gpu)
{
  tool_run(&tool, TUNE " --device cuda");
  refused(8, "install the NVIDIA driver");
  tool_run(&tool, "bench tiny");
  refused(8, "bench needs a GPU");
  tool_run(&tool, "verify %s/p.moeforge", tool.folder);
  refused(8, "hashes and structure are sound; the numbers need a GPU");
  tool_run(&tool, "verify %s/p.moeforge --device none", tool.folder);
  refused(8, "--device none");
  tool_run(&tool, "doctor");
  refused(8, "install the NVIDIA driver");
  tool_run(&tool, "plan specs/models/tiny.yaml");
  tool_expect(&tool, 0);
}
END_TEST

/* A machine, the exit codes of tune and verify on it, and what they say. */
static const struct {
  const char *script;
  int tune;
  const char *tune_text;
  int verify;
  const char *verify_text;
} machines[] = {
    {"no_device", 0, "planning for", 8, "the numbers need a GPU"},
    {"cc=80", 8, "compute capability 8.0: the kernels need 9.0", 23, "no kernel for this GPU"},
    {"driver=11080", 25, "the driver (CUDA 11.8) is older than NVRTC", 25, "the driver is older than the kernel needs"},
    {"sms=64", 0, "64 SMs", 26, "too few multiprocessors"},
    {"name=Other", 0, "tuning on Other", 23, "nothing in it is for this GPU (Other)"},
    {"oom", 15, "end other processes on the GPU", 15, "end other programs"},
    {"load_fail", 9, "NO_BINARY_FOR_GPU", 23, "no kernel for this GPU"},
    {"launch_fail", 9, "LAUNCH_FAILED", 9, "reported a failure"},
    {"fault", 9, "ILLEGAL_ADDRESS", 9, "ILLEGAL_ADDRESS"},
};

START_TEST(machine)
{
  const bool right = machines[_i].tune == 0;
  forget_measurements();
  tool_gpu(&tool, "libfakecuda.so", machines[_i].script);
  tool_run(&tool, "verify %s/p.moeforge", tool.folder);
  refused(machines[_i].verify, machines[_i].verify_text);
  if(right) { /* only how it begins: kernels do nothing on this GPU */
    tool_run(&tool, "doctor");
    ck_assert(tool.code == (strcmp(machines[_i].script, "no_device") == 0 ? 8 : 0));
    return;
  }
  tool_run(&tool, TUNE);
  ended(machines[_i].tune, machines[_i].tune_text);
  ck_assert_int_eq(machines[_i].tune != 9 && machines[_i].tune != 15 ? 0 : (int)number("SELECT count(*) FROM check_result"), 0);
}
END_TEST

/* The GPU is occupied: every kernel fails, and that must not be held against them when it is free again. And what is kept of earlier checks counts only if it
 * is whole. */
START_TEST(what_says_nothing_is_no_verdict)
{
  forget_measurements();
  tool_gpu(&tool, "libfakegpu.so", GPU ",occupancy=0");
  tool_run(&tool, TUNE);
  ended(11, "no candidate passed the check");
  tool_says(&tool, err, "COOPERATIVE_LAUNCH_TOO_LARGE");
  shell("cp '%s'/work.db.cache/* work.db.cache; for f in work.db.cache/*; do head -c `stat -c %%s $f` /dev/urandom >$f; done", seed.folder);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, TUNE);
  tool_expect(&tool, 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result WHERE NOT passed"), 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM reject"), 0);
  ck_assert_double_lt(number("SELECT max(abs(worst)) FROM check_gate"), 1);
  ck_assert_double_gt(number("SELECT max(worst) FROM check_gate"), 0);
}
END_TEST

START_TEST(cache_that_is_no_folder)
{
  forget_measurements();
  shell("echo >work.db.cache");
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, TUNE);
  ended(5, "work.db.cache: expected a folder, found a file");
}
END_TEST

/* A shipped shape is found whether there is no work store or one that knows nothing of it. (Few layers: another L2, so that its winner is not this GPU's.) */
START_TEST(trace_takes_what_is_shipped)
{
  if(_i == 0)
    shell("rm work.db*");
  else
    forget_measurements(); /* winners, too */
  tool_gpu(&tool, "libfakegpu.so", GPU ",l2=1000000");
  tool_run(&tool, "trace tiny");
  refused(14, "no winner for 1 tokens on NVIDIA H200");
  setenv("FAKEGPU_TRACE", "1", 1);
  tool_run(&tool, "trace tiny --launches 1 --quiet --schedule stream/ring4-ld2-la2-fl3-fd2-st0-rk0");
  unsetenv("FAKEGPU_TRACE");
  tool_expect(&tool, 0);
  tool_says(&tool, out, "tiny on NVIDIA H200: 1 token, uniform, stream/ring4-ld2-la2-fl3-fd2-st0-rk0-ho0");
}
END_TEST

START_TEST(bench_writes_nothing)
{
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, "bench tiny --tokens 2");
  tool_expect(&tool, 14);
  tool_says(&tool, err, "no winner serves --tokens 2");
  tool_run(&tool, "bench nope --json");
  refused(14, "no measured winners");
  ck_assert_str_eq(tool.out, "");
  tool_run(&tool, "bench nope tiny --tokens 1"); /* what can be timed is timed */
  tool_expect(&tool, 14);
  tool_says(&tool, err, "nope: no measured winners");
  tool_says(&tool, out, "| tiny | uniform | 1 |");
  shell("rm *.db");
  tool_run(&tool, "bench tiny");
  refused(14, "neither");
  shell("test ! -e work.db");
}
END_TEST

/* ---- disks ---- */
/* The size of the disk that is full: what is there already, and some more. */
static void limit_disk(bool mounted, const char *place, int kilobytes)
{
  char options[32];
  struct rlimit limit;
  snprintf(options, sizeof(options), "size=%dk", kilobytes);
  if(mounted)
    ck_assert_int_eq(mount("tmpfs", place, NULL, MS_REMOUNT, options), 0);
  ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
  limit.rlim_cur = mounted ? limit.rlim_max : (rlim_t)kilobytes * 1024;
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

/* Full when the store is made and at ever later steps. What was stored until then is there, and when there is room the rest is done. Where nothing can be
 * mounted, a limit of the file size stands in, which the later steps do not meet. */
START_TEST(full_disk)
{
  static const int more[] = {8, 100, 200, 320};
  char place[300], store[320];
  struct stat info;
  const bool mounted = mount_small("size=4m");
  forget_measurements();
  snprintf(place, sizeof(place), "%s/small", tool.folder);
  snprintf(store, sizeof(store), "%s/w.db", place);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  limit_disk(mounted, place, 16);
  tool_run(&tool, TUNE " --store=%s/w.db --db=%s/s.db --gen=%s/gen", place, place, place);
  refused(5, "/w.db: ");
  limit_disk(mounted, place, 4096);
  shell("test -z \"`ls small`\"; cp work.db small/w.db");
  ck_assert_int_eq(stat(store, &info), 0);
  for(size_t i = 0; i < sizeof(more) / sizeof(more[0]); i++) {
    limit_disk(mounted, place, (int)(info.st_size / 1024) + more[i]);
    tool_run(&tool, TUNE " --store=%s/w.db --db=%s/s.db --gen=%s/gen", place, place, place);
    if(mounted)
      ended(5, "space");
    shell("test -z \"`find small -name '*.tmp' -o -name '*.ref.*' -o -name '*.new' -o -name '*.lock'`\"");
  }
  limit_disk(mounted, place, 8192);
  tool_run(&tool, TUNE " --store=%s/w.db --db=%s/s.db --gen=%s/gen", place, place, place);
  tool_expect(&tool, 0);
  tool_says(&tool, err, " 0 kernels compiled");
  umount2(place, MNT_DETACH);
}
END_TEST

/* ---- processes ---- */
/* A child of 'parent', 0 if there is none. */
static pid_t child_of(pid_t parent)
{
  DIR *proc = opendir("/proc");
  struct dirent *entry;
  pid_t found = 0;
  ck_assert_ptr_nonnull(proc);
  while((entry = readdir(proc)) != NULL && found == 0) {
    char path[300], stat_line[512], *rest;
    snprintf(path, sizeof(path), "/proc/%.20s", entry->d_name);
    tool_slurp(path, "stat", stat_line, sizeof(stat_line));
    rest = strrchr(stat_line, ')');
    if(atoi(entry->d_name) > 0 && rest != NULL && atoi(rest + 3) == parent)
      found = atoi(entry->d_name);
  }
  closedir(proc);
  return found;
}

/* Waits until standard error says 'text' and the tool has a child; returns that. */
static pid_t wait_for(pid_t pid, const char *text)
{
  for(int i = 0; i < 6000; i++) {
    const pid_t child = child_of(pid);
    tool_slurp(tool.folder, "stderr", tool.err, sizeof(tool.err));
    if(strstr(tool.err, text) != NULL && child != 0)
      return child;
    usleep(10000);
  }
  kill(pid, SIGKILL);
  ck_abort_msg("never came to \"%s\": %s", text, tool.err);
}

/* Killed from outside, by the out-of-memory killer for example: the work is done again, and no candidate is blamed. */
START_TEST(killed_workers_cost_nothing)
{
  const int candidates = (int)number("SELECT count(*) FROM candidate");
  char done[64];
  pid_t pid, child;
  forget_measurements();
  tool_gpu(&tool, "libfakegpu.so", GPU);
  setenv("FAKEGPU_SLEEP_US", "50", 1);
  pid = tool_start(&tool, TUNE);
  wait_for(pid, "tiny: references:"); /* the first candidate of the first child is being checked */
  usleep(300000);
  child = child_of(pid);
  ck_assert(child != 0 && kill(child, SIGKILL) == 0);
  snprintf(done, sizeof(done), "tiny: check: %d/%d,", candidates, candidates);
  wait_for(pid, done);
  usleep(400000);
  child = child_of(pid);
  ck_assert(child != 0 && kill(child, SIGKILL) == 0);
  tool_wait(&tool, pid);
  unsetenv("FAKEGPU_SLEEP_US");
  tool_expect(&tool, 0);
  tool_says(&tool, err, "killed by signal 9");
  tool_says(&tool, err, "another one goes on");
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result WHERE passed"), candidates);
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result WHERE NOT passed"), 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM run WHERE outcome='ok'"), 1);
  ck_assert_int_eq(child_of(getpid()), 0);
}
END_TEST

/* What timeout(1), a terminal or a service manager does: all processes get the signal, twice. */
START_TEST(a_signal_to_the_whole_group_is_an_interrupt)
{
  static const int signals[] = {SIGTERM, SIGINT, SIGHUP};
  pid_t pid;
  shell("rm *.db");
  setpgid(0, 0);
  for(size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
    tool_gpu(&tool, "libfakegpu.so", GPU);
    pid = tool_start(&tool, TUNE);
    wait_for(pid, "tuning on");
    usleep(100000);
    signal(signals[i], SIG_IGN);
    kill(0, signals[i]);
    kill(0, signals[i]);
    tool_wait(&tool, pid);
    signal(signals[i], SIG_DFL);
    ended(130, "interrupted");
    ck_assert_int_eq((int)number("SELECT count(*) FROM run WHERE outcome='MF_ERR_INTERRUPTED'"), (int)i + 1);
  }
}
END_TEST

/* A GPU that hangs does not hold up who wants to stop. */
START_TEST(verify_can_be_interrupted)
{
  struct timespec start, now;
  pid_t pid;
  tool_gpu(&tool, "libfakecuda.so", "hang");
  setenv("ASAN_OPTIONS", "detect_leaks=0", 1); /* what a hanging GPU still uses is left alone, on purpose */
  pid = tool_start(&tool, "verify %s/p.moeforge --timeout-ms 60000", tool.folder);
  usleep(2500000); /* with sanitizers on a busy machine it takes a while to reach the GPU */
  clock_gettime(CLOCK_MONOTONIC, &start);
  kill(pid, SIGINT);
  tool_wait(&tool, pid);
  clock_gettime(CLOCK_MONOTONIC, &now);
  refused(130, "interrupted");
  ck_assert_int_lt((int)(now.tv_sec - start.tv_sec), 10);
}
END_TEST

int main(void)
{
  TCase *tc = tcase_create("machines");
  tcase_add_test(tc, no_gpu);
  tcase_add_loop_test(tc, machine, 0, ROWS(machines));
  tcase_add_test(tc, what_says_nothing_is_no_verdict);
  tcase_add_loop_test(tc, trace_takes_what_is_shipped, 0, 2);
  tcase_add_test(tc, bench_writes_nothing);
  tcase_add_test(tc, full_disk);
  tcase_add_test(tc, killed_workers_cost_nothing);
  tcase_add_test(tc, a_signal_to_the_whole_group_is_an_interrupt);
  tcase_add_test(tc, cache_that_is_no_folder);
  tcase_add_test(tc, verify_can_be_interrupted);
  return run_suite(suite_create("cli_gpu"), tc);
}
