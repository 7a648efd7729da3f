/* tool_fixture.h - runs the built tool as a user would, for test_tune.c and test_cli.c. The tool is build/moeforge of the tree that the test was
 * built in; each test has a folder of its own, in which stores, gen/ and packages are written. */
#ifndef MOEFORGE_TESTS_TOOL_FIXTURE_H
#define MOEFORGE_TESTS_TOOL_FIXTURE_H

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct tool {
  char folder[256];    /* scratch, removed by tool_end */
  char program[4200];  /* build/moeforge */
  char libraries[4200]; /* build/tests: libfakecuda.so, libfakegpu.so */
  char out[1 << 16], err[1 << 16]; /* of the last run */
  int code;            /* exit code, or 1000 + signal */
};

static inline void tool_begin(struct tool *t)
{
  const char *base = getenv("TMPDIR");
  ssize_t n;
  char *slash;
  memset(t, 0, sizeof(*t));
  n = readlink("/proc/self/exe", t->libraries, sizeof(t->libraries) - 1);
  ck_assert_int_gt(n, 0);
  slash = strrchr(t->libraries, '/');
  *slash = '\0';
  snprintf(t->program, sizeof(t->program), "%.4000s/../moeforge", t->libraries);
  snprintf(t->folder, sizeof(t->folder), "%.200s/moeforge-tool-XXXXXX", base != NULL ? base : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(t->folder));
  setenv("MOEFORGE_LIBCUDA", "/nonexistent/libcuda.so", 1); /* no GPU, whatever this machine has, until tool_gpu */
  unsetenv("FAKECUDA");
}

static inline void tool_end(struct tool *t)
{
  char command[512];
  snprintf(command, sizeof(command), "rm -rf '%s'", t->folder);
  ck_assert_int_eq(system(command), 0);
}

/* The next runs see the fake GPU ("libfakegpu.so") or the scripted driver ("libfakecuda.so"). */
static inline void tool_gpu(const struct tool *t, const char *library, const char *script)
{
  char path[4300];
  snprintf(path, sizeof(path), "%.4100s/%s", t->libraries, library);
  setenv("MOEFORGE_LIBCUDA", path, 1);
  setenv("FAKECUDA", script, 1);
}

static inline void tool_slurp(const char *folder, const char *name, char *out, size_t space)
{
  char path[512];
  size_t n = 0;
  FILE *f;
  snprintf(path, sizeof(path), "%s/%s", folder, name);
  f = fopen(path, "rb");
  if(f != NULL) {
    n = fread(out, 1, space - 1, f);
    fclose(f);
  }
  out[n] = '\0';
}

/* Starts `moeforge <words>` with store, shipped file and gen/ in the test's folder; returns its pid. Words are split at spaces; %s in 'fmt' as usual. */
static inline pid_t tool_start(struct tool *t, const char *fmt, ...)
{
  char words[2048], *rest = words, *argv[64];
  char store[300], db[300], gen[300], out[300], err[300];
  int argc = 0;
  va_list args;
  pid_t pid;
  va_start(args, fmt);
  vsnprintf(words, sizeof(words), fmt, args);
  va_end(args);
  snprintf(store, sizeof(store), "--store=%s/work.db", t->folder);
  snprintf(db, sizeof(db), "--db=%s/schedules.db", t->folder);
  snprintf(gen, sizeof(gen), "--gen=%s/gen", t->folder);
  snprintf(out, sizeof(out), "%s/stdout", t->folder);
  snprintf(err, sizeof(err), "%s/stderr", t->folder);
  argv[argc++] = t->program;
  argv[argc++] = store;
  argv[argc++] = db;
  argv[argc++] = gen;
  while((argv[argc] = strsep(&rest, " ")) != NULL && argc < 62)
    argc++;
  argv[argc] = NULL;
  fflush(NULL);
  pid = fork();
  ck_assert_int_ge(pid, 0);
  if(pid == 0) {
    signal(SIGINT, SIG_DFL); /* whoever runs the tests in the background or under nohup has these ignored */
    signal(SIGHUP, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    signal(SIGPIPE, SIG_DFL);
    dup2(open(out, O_WRONLY | O_CREAT | O_TRUNC, 0666), STDOUT_FILENO);
    dup2(open(err, O_WRONLY | O_CREAT | O_TRUNC, 0666), STDERR_FILENO);
    execv(t->program, argv);
    _exit(126);
  }
  return pid;
}

/* Waits for it and reads what it wrote. */
static inline void tool_wait(struct tool *t, pid_t pid)
{
  int status = 0;
  while(waitpid(pid, &status, 0) < 0)
    ck_assert_int_eq(errno, EINTR);
  t->code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  tool_slurp(t->folder, "stdout", t->out, sizeof(t->out));
  tool_slurp(t->folder, "stderr", t->err, sizeof(t->err));
}

#define tool_run(t, ...) tool_wait((t), tool_start((t), __VA_ARGS__))

#define tool_expect(t, expected) \
  ck_assert_msg((t)->code == (expected), "exit code %d, expected %d\nstdout: %s\nstderr: %s", (t)->code, (expected), (t)->out, (t)->err)

/* 'text' must be in what the last run wrote to 'where' (out or err). */
#define tool_says(t, where, text) ck_assert_msg(strstr((t)->where, (text)) != NULL, "\"%s\" is not in: %s", (text), (t)->where)

#endif
