/* test_cli.c - the tool under adverse conditions: whatever is wrong, there is one clear line on standard error and the documented exit code, nothing that was
 * there before is lost, and no process or half a file is left. What goes right is tested by test_tune.c.
 *
 * One tuning on the scripted GPU is made for all tests (seed); each test works on copies of its files. */
#include "tool_fixture.h"

#include <dirent.h>
#include <sched.h>
#include <sqlite3.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define TUNE "tune specs/models/tiny.yaml --tokens 1 --effort quick --jobs 2"
#define GPU "sms=132"

static struct tool seed, tool;

/* ---- helpers ---- */
/* Runs a shell command in the test's folder; it must succeed. */
static void shell(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void shell(const char *fmt, ...)
{
  char command[2048], whole[2400];
  va_list args;
  va_start(args, fmt);
  vsnprintf(command, sizeof(command), fmt, args);
  va_end(args);
  snprintf(whole, sizeof(whole), "cd '%s' && { %s\n}", tool.folder, command);
  ck_assert_msg(system(whole) == 0, "%s", whole);
}

static void make_seed(void)
{
  tool_begin(&seed);
  setenv("MOEFORGE_LOCK_DIR", seed.folder, 1);
  tool_gpu(&seed, "libfakegpu.so", GPU);
  tool_run(&seed, TUNE);
  tool_expect(&seed, 0);
  tool_run(&seed, "export tiny -o %s/p.moeforge", seed.folder);
  tool_expect(&seed, 0);
}

static void remove_seed(void)
{
  tool_end(&seed);
}

static void begin(void)
{
  tool_begin(&tool);
  setenv("MOEFORGE_LOCK_DIR", tool.folder, 1); /* other suites tune on the same GPU */
  shell("cp '%s'/*.db '%s'/p.moeforge .", seed.folder, seed.folder);
}

static void end(void)
{
  tool_end(&tool);
}

static int lines(const char *text)
{
  int count = 0;
  for(; *text != '\0'; text++)
    count += *text == '\n';
  return count;
}

/* The last run ended with 'code' and one line that says 'text'. */
static void refused(int code, const char *text)
{
  tool_expect(&tool, code);
  tool_says(&tool, err, text);
  ck_assert_msg(lines(tool.err) == 1 && strncmp(tool.err, "moeforge: ", 10) == 0, "expected one line: %s", tool.err);
}

/* The same, behind lines of progress. */
static void ended(int code, const char *text)
{
  tool_expect(&tool, code);
  tool_says(&tool, err, text);
  ck_assert_msg(strstr(tool.err, "moeforge: ") != NULL && lines(strstr(tool.err, "moeforge: ")) == 1, "expected one line of error: %s", tool.err);
}

static double number(const char *sql)
{
  char path[512];
  sqlite3 *db;
  sqlite3_stmt *stmt;
  double value;
  snprintf(path, sizeof(path), "%s/work.db", tool.folder);
  ck_assert_int_eq(sqlite3_open_v2(path, &db, SQLITE_OPEN_READONLY, NULL), SQLITE_OK);
  ck_assert_msg(sqlite3_prepare_v2(db, sql, -1, &stmt, NULL) == SQLITE_OK, "%s: %s", sql, sqlite3_errmsg(db));
  ck_assert_int_eq(sqlite3_step(stmt), SQLITE_ROW);
  value = sqlite3_column_double(stmt, 0);
  sqlite3_finalize(stmt);
  sqlite3_close(db);
  return value;
}

/* ---- command lines ---- */
static const struct {
  const char *words, *text;
} usage[] = {
    {"", "unknown command \"\""},
    {"frobnicate", "unknown command \"frobnicate\""},
    {"tune", "expected one or more spec files"},
    {"show a b", "at most one shape"},
    {"export tiny", "name the file with -o"},
    {"export tiny -o", "-o: expected a value"},
    {"tune x.yaml --tokens", "--tokens: expected a value"},
    {"tune x.yaml --tokns 1", "did you mean --tokens?"},
    {"tune x.yaml -xyz", "unknown option \"-x\""},
    {"show --json=1", "takes no value"},
    {"show --j", "ambiguous"},
    {"tune x.yaml --jobs 0", "--jobs: expected a whole number from 1 to 256"},
    {"tune x.yaml --jobs 99999999999999999999", "--jobs: expected a whole number"},
    {"tune x.yaml --check-jobs -1", "--check-jobs: expected"},
    {"tune x.yaml --timeout-ms=", "--timeout-ms: expected"},
    {"tune x.yaml --effort fast", "quick, default or exhaustive"},
    {"plan specs/models/tiny.yaml --tokens 0", "--tokens: expected counts from 1 to 64"},
    {"plan specs/models/tiny.yaml --tokens 1,,2", "--tokens: expected"},
    {"plan specs/models/tiny.yaml --device rtx", "--device rtx: expected auto, none, cuda"},
    {"plan specs/models/tiny.yaml --device cuda:x", "--device cuda:x: expected"},
    {"verify p.moeforge --device rtx", "verify: --device rtx: expected"},
    {"spec frob", "expected `moeforge spec import"},
};

START_TEST(wrong_command_lines)
{
  tool_run(&tool, "%s", usage[_i].words);
  refused(2, usage[_i].text);
}
END_TEST

START_TEST(long_command_lines)
{
  char tokens[1200] = "", operands[2000] = "";
  for(int i = 0; i < 500; i++)
    strcat(tokens, "1,");
  tool_run(&tool, "plan specs/models/tiny.yaml --json --tokens %s8", tokens);
  tool_expect(&tool, 0);
  tool_says(&tool, out, "\"tokens\": 8"); /* nothing is cut off */
  for(int i = 0; i < 300; i++)
    strcat(operands, " x");
  shell("'%s' show -- %s 2>err; test $? = 2 && grep -q 'at most 255 operands' err", tool.program, operands);
  tool_run(&tool, "tune a\nb.yaml");
  refused(5, "a b.yaml: cannot read it");
}
END_TEST

START_TEST(help_is_given_to_any_command)
{
  static const char *const words[] = {"help", "--help", "tune --help", "tune specs/models/tiny.yaml -h"};
  for(size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
    tool_run(&tool, "%s", words[i]);
    tool_expect(&tool, 0);
    tool_says(&tool, out, "usage: moeforge");
  }
}
END_TEST

START_TEST(results_that_nobody_can_read)
{
  static const char *const commands[] = {"help", "show --store=work.db", "plan '%s'/specs/models/tiny.yaml --device none --json"};
  char root[4096], command[4400];
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
  for(size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
    snprintf(command, sizeof(command), commands[i], root);
    shell("'%s' --devices '%s/specs/devices' %s >/dev/full 2>err; test $? = 5 && grep -q 'standard output: ' err", tool.program, root, command);
    shell("'%s' --devices '%s/specs/devices' %s >&- 2>err; test $? = 5 && grep -q 'standard output: ' err", tool.program, root, command);
  }
  shell("{ sleep 0.2; '%s' help; echo $? >code; } 2>err | true; test `cat code` = 5", tool.program); /* not killed by SIGPIPE */
}
END_TEST

/* ---- specs ---- */
static const struct {
  const char *edit, *text; /* of sed */
} bad_specs[] = {
    {"s/experts: 64/experts: sixty/", ":5: shape.experts: expected an integer from 1 to 1024, got sixty"},
    {"s/top_k: 4/top_k: 65/", ":6: shape.top_k: expected an integer from 1 to 22, got 65 (nearest legal value 22)"},
    {"s/softmax/softmx/", ":10: router.score: expected one of softmax"},
    {"s/^name:.*/name: ..\\/x/", ":2: name: expected a name"},
    {"/^name:/d", "name: expected a name"},
    {"s/experts/\\texperts/", ":5: expected YAML, got a syntax error"},
    {"$a extra: 1", ":13: extra: unknown key"},
    {"1,$d", "got an empty file"},
};

START_TEST(bad_yaml)
{
  char root[4096];
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
  shell("sed '%s' '%s/specs/models/tiny.yaml' > s.yaml; cp work.db before", bad_specs[_i].edit, root);
  tool_run(&tool, "tune %s/s.yaml", tool.folder);
  refused(3, bad_specs[_i].text);
  tool_run(&tool, "spec check %s/s.yaml", tool.folder);
  refused(3, bad_specs[_i].text);
  shell("cmp work.db before");
}
END_TEST

START_TEST(each_fault_is_said_once)
{
  char root[4096];
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
  shell("sed 's/experts: 64/experts: sixty/; s/top_k: 4/top_k: many/' '%s/specs/models/tiny.yaml' > two.yaml", root);
  tool_run(&tool, "tune specs/models/tiny.yaml %s/two.yaml %s/none.yaml --quiet", tool.folder, tool.folder);
  tool_expect(&tool, 3);
  tool_says(&tool, err, "got sixty");
  tool_says(&tool, err, "got many");
  tool_says(&tool, err, "two.yaml: 2 errors");
  tool_says(&tool, err, "none.yaml: cannot read it");
  ck_assert_int_eq(lines(tool.err), 4);
}
END_TEST

/* ---- databases ---- */
static const struct {
  const char *damage, *text;
} bad_stores[] = {
    {"truncate -s 0 work.db", "is empty (0 bytes)"},
    {"truncate -s 50 work.db", "is truncated"},
    {"truncate -s 70000 work.db", "is truncated"},
    {"echo hello >work.db", "not SQLite"},
    {"dd if=/dev/zero of=work.db bs=1 seek=68 count=4 conv=notrunc 2>dd", "database of another program"},
    {"printf '\\007' | dd of=work.db bs=1 seek=63 conv=notrunc 2>dd", "made by a newer moeforge (format 7"},
};

START_TEST(bad_work_store)
{
  static const char *const commands[] = {TUNE, "show", "show --rejects", "export tiny -o %s/x.moeforge"};
  shell("%s; cp work.db before", bad_stores[_i].damage);
  for(size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
    tool_run(&tool, commands[i], tool.folder);
    refused(6, bad_stores[_i].text);
  }
  shell("cmp work.db before; test ! -e x.moeforge -a ! -e work.db.lock -a ! -e work.db-wal");
}
END_TEST

static const struct {
  const char *damage, *option; /* option: format with the folder */
  int code;
  const char *text;
} bad_shipped[] = {
    {"cp work.db schedules.db", "", 6, "is a work store, not a shipped file"},
    {"echo hello >schedules.db", "", 6, "not SQLite"},
    {"truncate -s 70000 schedules.db", "", 6, "is truncated"},
    {"rm schedules.db; mkdir schedules.db", "", 5, "found a folder"},
    {"true", " --db=%s/work.db", 2, "is the work store itself"},
    {"true", " --db=%s/none/s.db", 5, "its folder cannot be opened"},
    {"cp schedules.db work.db", "", 6, "is a shipped file"},
};

/* Found before anything is compiled or measured, not when all is done. */
START_TEST(bad_shipped_file)
{
  char option[300];
  snprintf(option, sizeof(option), bad_shipped[_i].option, tool.folder);
  shell("%s; cp work.db before", bad_shipped[_i].damage);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, TUNE " --device cuda%s", option);
  refused(bad_shipped[_i].code, bad_shipped[_i].text);
  shell("cmp work.db before");
}
END_TEST

/* ---- places that cannot be written ---- */
static bool put(const char *path, const char *text)
{
  FILE *f = fopen(path, "w");
  const bool good = f != NULL && fputs(text, f) >= 0;
  return f != NULL && fclose(f) == 0 && good;
}

/* A file system of the test's own, until it ends, on the folder "small" of its folder. False where this user may not mount. */
static bool mount_small(const char *options)
{
  const bool root = geteuid() == 0;
  char path[300], map[64];
  snprintf(map, sizeof(map), "0 %ld 1", (long)geteuid());
  snprintf(path, sizeof(path), "%s/small", tool.folder);
  if(mkdir(path, 0777) != 0 || unshare(CLONE_NEWNS | (root ? 0 : CLONE_NEWUSER)) != 0)
    return false;
  if(!root && (!put("/proc/self/setgroups", "deny") || !put("/proc/self/uid_map", map)))
    return false;
  return mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 && mount("tmpfs", path, "tmpfs", 0, options) == 0;
}

START_TEST(read_only_folder)
{
  char place[300];
  snprintf(place, sizeof(place), "%s/small", tool.folder);
  if(mount_small("size=4m")) {
    shell("cp work.db schedules.db p.moeforge small");
    ck_assert_int_eq(mount("tmpfs", place, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
    tool_run(&tool, "show --store=%s/work.db", place);
    tool_expect(&tool, 0);
    tool_run(&tool, "export tiny -o %s/x.moeforge --store=%s/work.db", tool.folder, place);
    tool_expect(&tool, 0);
  } else {
    snprintf(place, sizeof(place), "/sys"); /* a folder in which nobody can make files */
  }
  tool_run(&tool, TUNE " --store=%s/work.db", place);
  refused(5, "/work.db: cannot be written");
  tool_run(&tool, TUNE " --db=%s/new.db", place);
  refused(5, "/new.db: cannot be written");
  tool_run(&tool, TUNE " --gen=%s/gen", place);
  ended(5, "/gen: cannot create the folder");
  tool_run(&tool, "export tiny -o %s/x.moeforge", place);
  refused(5, "/x.moeforge: cannot create a file");
  tool_run(&tool, "spec import tests/data/hf/deepseek-v3.1/config.json --tp 8 -o %s/x.yaml", place);
  refused(5, "/x.yaml: cannot write");
}
END_TEST

/* Full at ever later steps. What was stored until then is there, and when there is room the rest is done. */
START_TEST(full_disk)
{
  static const int kilobytes[] = {16, 150, 400, 600, 700};
  char options[32], place[300];
  struct rlimit limit;
  const bool mounted = mount_small("size=16k");
  snprintf(place, sizeof(place), "%s/small", tool.folder);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  for(size_t i = 0; i < sizeof(kilobytes) / sizeof(kilobytes[0]); i++) {
    snprintf(options, sizeof(options), "size=%dk", kilobytes[i]);
    if(mounted)
      ck_assert_int_eq(mount("tmpfs", place, NULL, MS_REMOUNT, options), 0);
    ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = mounted ? RLIM_INFINITY : (rlim_t)kilobytes[i] * 256;
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    tool_run(&tool, TUNE " --store=%s/w.db --db=%s/s.db --gen=%s/gen", place, place, place);
    if(mounted || tool.code != 0) /* a limit of the file size is not met by every step */
      ended(5, tool.code == 0 ? "" : mounted ? "space" : "s");
    shell("test -z \"`find small -name '*.tmp' -o -name '*.ref.*' -o -name '*.new' -o -name '*.lock'`\"");
  }
  limit.rlim_cur = limit.rlim_max;
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
  if(mounted)
    ck_assert_int_eq(mount("tmpfs", place, NULL, MS_REMOUNT, "size=8m"), 0);
  tool_run(&tool, TUNE " --store=%s/w.db --db=%s/s.db --gen=%s/gen", place, place, place);
  tool_expect(&tool, 0);
  tool_says(&tool, err, " 0 kernels compiled, 1 from the store");
}
END_TEST

/* A file that is to be written replaces nothing but a file, and no database. */
START_TEST(outputs_that_would_destroy)
{
  const struct {
    const char *name, *text;
  } targets[] = {{"work.db", "is a database, which would be lost"}, {"schedules.db", "is a database"}, {"pipe", "found a device or pipe"},
                 {"folder", "found a folder"}, {"none/x", "cannot"}};
  shell("mkfifo pipe; mkdir folder; cp work.db before; cp schedules.db before2");
  for(size_t i = 0; i < sizeof(targets) / sizeof(targets[0]); i++) {
    tool_run(&tool, "export tiny -o %s/%s", tool.folder, targets[i].name);
    refused(5, targets[i].text);
    tool_run(&tool, "spec import tests/data/hf/deepseek-v3.1/config.json --tp 8 -o %s/%s", tool.folder, targets[i].name);
    refused(5, targets[i].text);
  }
  tool_run(&tool, "export tiny -o ");
  refused(5, "expected the name of a file");
  shell("cmp work.db before; cmp schedules.db before2; test -p pipe -a -d folder; ln -s p.moeforge link; cp p.moeforge same");
  tool_run(&tool, "export tiny -o %s/link", tool.folder);
  tool_expect(&tool, 0);
  shell("test -L link && cmp p.moeforge same; test -z \"`ls | grep moeforge.`\"");
}
END_TEST

START_TEST(export_of_what_is_not_there)
{
  tool_run(&tool, "export nope -o %s/x", tool.folder);
  refused(14, "no winner is stored");
  tool_run(&tool, "export tiny -o %s/x --device Other", tool.folder);
  refused(14, "no winner for device \"Other\"");
  shell("rm work.db schedules.db");
  tool_run(&tool, TUNE " --device none");
  tool_expect(&tool, 0);
  tool_run(&tool, "export tiny -o %s/x", tool.folder);
  refused(4, "only predicted, not measured");
  shell("test ! -e x");
  tool_run(&tool, "export tiny -o %s/x --allow-predicted", tool.folder);
  tool_expect(&tool, 0);
}
END_TEST

/* ---- compiler and templates ---- */
START_TEST(compiler_that_is_missing_or_no_compiler)
{
  const char *const libraries[] = {"/nonexistent/libnvrtc.so", tool.program, "garbage.so"};
  shell("rm work.db; echo garbage >garbage.so");
  for(size_t i = 0; i < sizeof(libraries) / sizeof(libraries[0]); i++) {
    setenv("MOEFORGE_NVRTC", libraries[i], 1);
    tool_run(&tool, TUNE);
    refused(7, "name a libnvrtc.so of CUDA 12.3 or newer");
  }
  unsetenv("MOEFORGE_NVRTC");
}
END_TEST

static const struct {
  const char *damage;
  int code;
  const char *text;
} bad_templates[] = {
    {"rm t/hw/hw.cuh", 5, "hw/hw.cuh: no such file"},
    {"rm t/stream/up.cuh", 5, "stream/up.cuh: no such file"},
    {"rm t/stream/up.cuh; mkfifo t/stream/up.cuh", 5, "expected a regular file"},
    {"echo 'int x = ;' >>t/stream/up.cuh", 10, "stream/up.cuh("},
};

START_TEST(bad_template)
{
  char root[4096];
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
  shell("rm work.db; cp -r '%s/templates' t; %s", root, bad_templates[_i].damage);
  tool_run(&tool, TUNE " --device none --templates %s/t", tool.folder);
  ended(bad_templates[_i].code, bad_templates[_i].text);
  if(bad_templates[_i].code != 10)
    return;
  ck_assert_int_gt((int)number("SELECT count(*) FROM reject WHERE stage='compile'"), 0);
  tool_run(&tool, TUNE " --device none"); /* repaired: nothing is held against the schedules any more */
  tool_expect(&tool, 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM reject WHERE stage='compile'"), 0);
}
END_TEST

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
  shell("rm *.db");
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

/* The GPU is occupied: every kernel fails, and that must not be held against them when it is free again. */
START_TEST(an_occupied_gpu_is_no_verdict)
{
  shell("rm *.db");
  tool_gpu(&tool, "libfakegpu.so", GPU ",occupancy=0");
  tool_run(&tool, TUNE);
  ended(11, "no candidate passed the check");
  tool_says(&tool, err, "COOPERATIVE_LAUNCH_TOO_LARGE");
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, TUNE);
  tool_expect(&tool, 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result WHERE NOT passed"), 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM reject"), 0);
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
  shell("rm *.db");
  tool_run(&tool, "bench tiny");
  refused(14, "neither");
  shell("test ! -e work.db");
}
END_TEST

/* ---- packages ---- */
static const struct {
  const char *damage;
  int code;
  const char *text;
} bad_packages[] = {
    {"rm p.moeforge", 5, "cannot open it"},
    {"rm p.moeforge; mkdir p.moeforge", 5, "not a regular file"},
    {"rm p.moeforge; mkfifo p.moeforge", 5, "not a regular file"},
    {": >p.moeforge", 20, "not a moeforge package"},
    {"cp work.db p.moeforge", 20, "not a moeforge package"},
    {"truncate -s 50 p.moeforge", 20, "is damaged"},
    {"truncate -s 30000 p.moeforge", 20, "truncated or appended to"},
    {"echo >>p.moeforge", 20, "truncated or appended to"},
    {"printf X | dd of=p.moeforge bs=1 seek=90 conv=notrunc 2>dd", 20, "SHA-256 differs"},
    {"printf X | dd of=p.moeforge bs=1 seek=600 conv=notrunc 2>dd", 20, "section manifest: SHA-256 differs"},
    {"printf X | dd of=p.moeforge bs=1 seek=30000 conv=notrunc 2>dd", 20, "section cubins: SHA-256 differs"},
    {"printf '\\002' | dd of=p.moeforge bs=1 seek=8 conv=notrunc 2>dd", 21, "format version 2"},
};

START_TEST(bad_package)
{
  shell("%s", bad_packages[_i].damage);
  tool_run(&tool, "verify %s/p.moeforge", tool.folder);
  refused(bad_packages[_i].code, bad_packages[_i].text);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, "verify %s/p.moeforge --json", tool.folder);
  refused(bad_packages[_i].code, bad_packages[_i].text);
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
  pid_t pid, child;
  shell("rm *.db");
  tool_gpu(&tool, "libfakegpu.so", GPU);
  setenv("FAKEGPU_SLEEP_US", "100", 1);
  pid = tool_start(&tool, TUNE);
  wait_for(pid, "tiny: references:"); /* the first candidate of the first child is being checked */
  usleep(300000);
  child = child_of(pid);
  ck_assert(child != 0 && kill(child, SIGKILL) == 0);
  wait_for(pid, "tiny: check:");
  usleep(400000);
  child = child_of(pid);
  ck_assert(child != 0 && kill(child, SIGKILL) == 0);
  tool_wait(&tool, pid);
  unsetenv("FAKEGPU_SLEEP_US");
  tool_expect(&tool, 0);
  tool_says(&tool, err, "killed by signal 9");
  tool_says(&tool, err, "another one goes on");
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result WHERE passed"), 9);
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

/* ---- the reference cache ---- */
START_TEST(garbage_in_the_cache_is_no_verdict)
{
  shell("cp -r '%s/work.db.cache' .; for f in work.db.cache/*; do head -c `stat -c %%s $f` /dev/urandom >$f; done; rm *.db", seed.folder);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, TUNE);
  tool_expect(&tool, 0);
  ck_assert_double_lt(number("SELECT max(abs(worst)) FROM check_gate"), 1);
  ck_assert_double_gt(number("SELECT max(worst) FROM check_gate"), 0);
  shell("rm -r work.db work.db.cache; echo >work.db.cache");
  tool_run(&tool, TUNE);
  ended(5, "work.db.cache: expected a folder, found a file");
}
END_TEST

#define ROWS(table) ((int)(sizeof(table) / sizeof((table)[0])))

int main(void)
{
  Suite *suite = suite_create("cli");
  TCase *tc = tcase_create("adverse");
  SRunner *runner;
  int failed;
  tcase_add_unchecked_fixture(tc, make_seed, remove_seed);
  tcase_add_checked_fixture(tc, begin, end);
  tcase_add_loop_test(tc, wrong_command_lines, 0, ROWS(usage));
  tcase_add_test(tc, long_command_lines);
  tcase_add_test(tc, help_is_given_to_any_command);
  tcase_add_test(tc, results_that_nobody_can_read);
  tcase_add_loop_test(tc, bad_yaml, 0, ROWS(bad_specs));
  tcase_add_test(tc, each_fault_is_said_once);
  tcase_add_loop_test(tc, bad_work_store, 0, ROWS(bad_stores));
  tcase_add_loop_test(tc, bad_shipped_file, 0, ROWS(bad_shipped));
  tcase_add_test(tc, read_only_folder);
  tcase_add_test(tc, full_disk);
  tcase_add_test(tc, outputs_that_would_destroy);
  tcase_add_test(tc, export_of_what_is_not_there);
  tcase_add_test(tc, compiler_that_is_missing_or_no_compiler);
  tcase_add_loop_test(tc, bad_template, 0, ROWS(bad_templates));
  tcase_add_test(tc, no_gpu);
  tcase_add_loop_test(tc, machine, 0, ROWS(machines));
  tcase_add_test(tc, an_occupied_gpu_is_no_verdict);
  tcase_add_test(tc, bench_writes_nothing);
  tcase_add_loop_test(tc, bad_package, 0, ROWS(bad_packages));
  tcase_add_test(tc, killed_workers_cost_nothing);
  tcase_add_test(tc, a_signal_to_the_whole_group_is_an_interrupt);
  tcase_add_test(tc, garbage_in_the_cache_is_no_verdict);
  tcase_set_timeout(tc, 120);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? 0 : 1;
}
