/* test_worker.c - processes and frames. This program is its own worker: `test_worker --worker ROLE FD` plays the roles below. */
#include "worker.h"

#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x5746464du

/* ---- the roles ---- */
static int play_echo(int fd)
{
  struct frame frame;
  while(frame_read(fd, &frame, NULL) == MF_OK) {
    const enum mf_status rc = frame_write(fd, &frame, NULL);
    frame_free(&frame);
    if(rc != MF_OK)
      return 3;
  }
  return 0;
}

static int play_segv(int fd)
{
  (void)fd;
  signal(SIGSEGV, SIG_DFL);
  raise(SIGSEGV);
  return 0;
}

static int play_exit70(int fd)
{
  (void)fd;
  return 70;
}

static int play_hang(int fd)
{
  (void)fd;
  while(pause() < 0)
    ;
  return 1;
}

/* Closes its end but lives on. */
static int play_linger(int fd)
{
  close(fd);
  return play_hang(fd);
}

static int play_garbage(int fd)
{
  static const char text[] = "this is what a library prints where a frame was expected\n";
  return send(fd, text, sizeof(text), MSG_NOSIGNAL) > 0 ? play_hang(fd) : 1;
}

/* A frame whose head claims more than the ceiling. */
static int play_huge(int fd)
{
  const uint32_t sizes[4] = {MAGIC, 0x7fffffff, 0, 0};
  return send(fd, sizes, sizeof(sizes), MSG_NOSIGNAL) > 0 ? play_hang(fd) : 1;
}

/* A well-formed frame whose head is no JSON object. */
static int play_badjson(int fd)
{
  const uint32_t sizes[4] = {MAGIC, 3, 0, 0};
  return send(fd, sizes, sizeof(sizes), MSG_NOSIGNAL) > 0 && send(fd, "[1]", 3, MSG_NOSIGNAL) > 0 ? play_hang(fd) : 1;
}

/* Half a frame, then the end. */
static int play_half(int fd)
{
  const uint32_t sizes[4] = {MAGIC, 100, 0, 0};
  return send(fd, sizes, sizeof(sizes), MSG_NOSIGNAL) > 0 && send(fd, "{\"a\":", 5, MSG_NOSIGNAL) > 0 ? 9 : 1;
}

/* A frame in single bytes, with pauses. */
static int play_drip(int fd)
{
  unsigned char bytes[16 + 9 + 3];
  const uint32_t sizes[4] = {MAGIC, 9, 3, 0};
  const struct timespec pause_time = {.tv_nsec = 5000000};
  static const char rest[] = {'{', '"', 'a', '"', ':', ' ', '4', '1', '}', 'x', 'y', 'z'};
  memcpy(bytes, sizes, sizeof(sizes));
  memcpy(bytes + sizeof(sizes), rest, sizeof(rest));
  for(size_t i = 0; i < sizeof(bytes); i++) {
    if(send(fd, bytes + i, 1, MSG_NOSIGNAL) != 1)
      return 1;
    nanosleep(&pause_time, NULL);
  }
  return play_hang(fd);
}

/* Writes to standard output, tells whether standard input is empty and SIGINT ignored. */
static int play_streams(int fd)
{
  struct frame frame = {0};
  char byte;
  struct sigaction action;
  enum mf_status rc;
  const int read_rc = (int)read(STDIN_FILENO, &byte, 1), sig_rc = sigaction(SIGINT, NULL, &action);
  frame.head = json_pack("{s:i, s:b}", "stdin", read_rc, "ignored", sig_rc == 0 && action.sa_handler == SIG_IGN);
  printf("this must not reach standard output\n");
  fflush(stdout);
  rc = frame_write(fd, &frame, NULL);
  frame_free(&frame);
  return rc == MF_OK ? play_hang(fd) : 1;
}

static const struct role {
  const char *name;
  int (*play)(int fd);
} roles[] = {{"echo", play_echo}, {"segv", play_segv}, {"exit70", play_exit70}, {"hang", play_hang}, {"linger", play_linger}, {"garbage", play_garbage},
             {"huge", play_huge}, {"badjson", play_badjson}, {"half", play_half}, {"drip", play_drip}, {"streams", play_streams}};

static int play(const char *name, int fd)
{
  for(size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++)
    if(strcmp(roles[i].name, name) == 0)
      return roles[i].play(fd);
  return 99;
}

/* ---- helpers ---- */
static struct error err;
static char self[4096]; /* path of this program, links resolved: under valgrind /proc/self/exe itself is another one */
static struct worker w;

static void start(const char *role)
{
  ck_assert_msg(worker_start(self, role, &w, &err) == MF_OK, "%s", err.text);
  ck_assert_int_gt(w.pid, 0);
  ck_assert_str_eq(w.role, role);
}

static int open_files(void)
{
  DIR *dir = opendir("/proc/self/fd");
  int count = 0;
  ck_assert_ptr_nonnull(dir);
  while(readdir(dir) != NULL)
    count++;
  closedir(dir);
  return count;
}

/* Neither running nor a zombie of ours. */
static void expect_no_child(void)
{
  ck_assert_int_eq(waitpid(-1, NULL, WNOHANG), -1);
  ck_assert_int_eq(errno, ECHILD);
}

/* The worker must be found dead, with 'text' as the reason. */
static void expect_death(const char *text)
{
  struct frame frame;
  ck_assert_int_eq(worker_receive(&w, &frame, 20000, &err), MF_ERR_WORKER);
  ck_assert_msg(strstr(err.text, text) != NULL, "\"%s\" lacks \"%s\"", err.text, text);
  ck_assert_ptr_null(frame.head);
  ck_assert_int_eq(w.pid, 0);
  ck_assert_int_eq(w.fd, -1);
  expect_no_child();
}

/* ---- tests ---- */
START_TEST(echoes_frames)
{
  const size_t big = 3u << 20; /* far more than a socket buffer */
  const int files = open_files();
  struct frame sent = {0}, got;
  start("echo");
  sent.head = json_pack("{s:s, s:i}", "op", "test \xc3\xa4", "n", 7);
  sent.blob[0] = malloc(big);
  ck_assert_ptr_nonnull(sent.blob[0]);
  for(size_t i = 0; i < big; i++)
    ((unsigned char *)sent.blob[0])[i] = (unsigned char)(i * 7 + i / 251);
  sent.blob_bytes[0] = big;
  sent.blob[1] = strdup("second");
  sent.blob_bytes[1] = 6;
  for(int turn = 0; turn < 3; turn++) {
    ck_assert_msg(worker_send(&w, &sent, &err) == MF_OK, "%s", err.text);
    ck_assert_msg(worker_receive(&w, &got, 20000, &err) == MF_OK, "%s", err.text);
    ck_assert(json_equal(sent.head, got.head));
    ck_assert_uint_eq(got.blob_bytes[0], big);
    ck_assert(memcmp(sent.blob[0], got.blob[0], big) == 0);
    ck_assert_uint_eq(got.blob_bytes[1], 6);
    ck_assert_str_eq(got.blob[1], "second"); /* a NUL follows */
    frame_free(&got);
  }
  frame_free(&sent);
  sent.head = json_object(); /* no blobs at all */
  ck_assert_int_eq(worker_send(&w, &sent, &err), MF_OK);
  ck_assert_int_eq(worker_receive(&w, &got, 20000, &err), MF_OK);
  ck_assert(got.blob[0] == NULL && got.blob[1] == NULL && got.blob_bytes[0] == 0);
  frame_free(&got);
  frame_free(&sent);
  worker_stop(&w);
  worker_stop(&w); /* harmless */
  expect_no_child();
  ck_assert_int_eq(open_files(), files);
}
END_TEST

START_TEST(says_how_it_died)
{
  static const struct {
    const char *role, *text;
  } cases[] = {{"segv", "killed by signal 11 (Segmentation fault)"}, {"exit70", "exit code 70"}, {"half", "exit code 9"},
               {"linger", "closed its socket but did not end"}, {"garbage", "garbage instead of a frame"}, {"huge", "garbage instead of a frame"},
               {"badjson", "garbage instead of a frame"}, {"nosuchrole", "exit code 99"}};
  const int files = open_files();
  start(cases[_i].role);
  expect_death(cases[_i].text);
  ck_assert_int_eq(open_files(), files);
}
END_TEST

START_TEST(sending_to_a_dead_worker)
{
  struct frame frame = {.head = json_object()};
  const struct timespec pause_time = {.tv_nsec = 1000000};
  enum mf_status rc = MF_OK;
  start("exit70");
  for(int i = 0; i < 5000 && rc == MF_OK; i++) { /* until it has ended */
    rc = worker_send(&w, &frame, &err);
    nanosleep(&pause_time, NULL);
  }
  ck_assert_int_eq(rc, MF_ERR_WORKER);
  ck_assert_ptr_nonnull(strstr(err.text, "exit code 70"));
  ck_assert_int_eq(worker_send(&w, &frame, &err), MF_ERR_WORKER);
  ck_assert_ptr_nonnull(strstr(err.text, "not running"));
  frame_free(&frame);
  expect_no_child();
}
END_TEST

START_TEST(timeout_leaves_it_running)
{
  struct frame frame = {.head = json_object()}, got;
  pid_t pid;
  start("echo");
  pid = w.pid;
  ck_assert_int_eq(worker_receive(&w, &got, 30, &err), MF_ERR_TIMEOUT);
  ck_assert_ptr_null(got.head);
  ck_assert_int_eq(w.pid, pid);
  ck_assert_int_eq(worker_receive(&w, &got, 0, &err), MF_ERR_TIMEOUT);
  ck_assert_int_eq(worker_send(&w, &frame, &err), MF_OK);
  ck_assert_int_eq(worker_receive(&w, &got, 20000, &err), MF_OK);
  frame_free(&got);
  frame_free(&frame);
  worker_stop(&w);
}
END_TEST

static void on_alarm(int signal_number)
{
  (void)signal_number;
}

/* Signals arrive all the time while single bytes do. */
START_TEST(partial_reads_and_interruptions)
{
  const struct sigaction action = {.sa_handler = on_alarm}; /* no SA_RESTART */
  timer_t timer;
  struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
  const struct itimerspec often = {{0, 1000000}, {0, 1000000}};
  struct frame got;
  ck_assert_int_eq(sigaction(SIGUSR1, &action, NULL), 0);
  ck_assert_int_eq(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
  ck_assert_int_eq(timer_settime(timer, 0, &often, NULL), 0);
  start("drip");
  ck_assert_msg(worker_receive(&w, &got, 20000, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(json_integer_value(json_object_get(got.head, "a")), 41);
  ck_assert_uint_eq(got.blob_bytes[0], 3);
  ck_assert_str_eq(got.blob[0], "xyz");
  frame_free(&got);
  worker_stop(&w);
  timer_delete(timer);
}
END_TEST

START_TEST(waits_for_any)
{
  struct worker a, b, none = {.fd = -1};
  struct worker *const all[] = {&a, &none, &b};
  struct worker *const nobody[] = {&none};
  struct frame frame = {.head = json_object()}, got;
  size_t index = 99;
  ck_assert_int_eq(worker_start(self, "echo", &a, &err), MF_OK);
  ck_assert_int_eq(worker_start(self, "echo", &b, &err), MF_OK);
  ck_assert_int_eq(worker_wait_any(all, 3, 20, &index, &err), MF_ERR_TIMEOUT);
  ck_assert_int_eq(worker_send(&b, &frame, &err), MF_OK);
  ck_assert_int_eq(worker_wait_any(all, 3, 20000, &index, &err), MF_OK);
  ck_assert_uint_eq(index, 2);
  ck_assert_int_eq(worker_receive(&b, &got, 20000, &err), MF_OK);
  frame_free(&got);
  ck_assert_int_eq(kill(a.pid, SIGKILL), 0);
  ck_assert_int_eq(worker_wait_any(all, 3, 20000, &index, &err), MF_OK); /* its death counts as news */
  ck_assert_uint_eq(index, 0);
  ck_assert_int_eq(worker_receive(&a, &got, 20000, &err), MF_ERR_WORKER);
  ck_assert_ptr_nonnull(strstr(err.text, "killed by signal 9"));
  ck_assert_int_eq(worker_wait_any(nobody, 1, -1, &index, &err), MF_ERR_WORKER);
  worker_stop(&b);
  frame_free(&frame);
}
END_TEST

START_TEST(a_signal_interrupts_the_wait)
{
  const struct sigaction action = {.sa_handler = on_alarm};
  const struct itimerspec once = {{0, 0}, {0, 50000000}};
  struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
  struct worker *const one[] = {&w};
  timer_t timer;
  size_t index;
  start("hang");
  ck_assert_int_eq(sigaction(SIGUSR1, &action, NULL), 0);
  ck_assert_int_eq(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
  ck_assert_int_eq(timer_settime(timer, 0, &once, NULL), 0);
  ck_assert_int_eq(worker_wait_any(one, 1, 20000, &index, &err), MF_ERR_INTERRUPTED);
  timer_delete(timer);
  worker_stop(&w);
  expect_no_child();
}
END_TEST

START_TEST(standard_streams)
{
  int pipe_fd[2], saved;
  struct frame got;
  char byte;
  ck_assert_int_eq(pipe(pipe_fd), 0);
  fflush(stdout);
  saved = dup(STDOUT_FILENO);
  ck_assert_int_ge(dup2(pipe_fd[1], STDOUT_FILENO), 0);
  close(pipe_fd[1]);
  start("streams");
  ck_assert_int_ge(dup2(saved, STDOUT_FILENO), 0);
  close(saved);
  ck_assert_msg(worker_receive(&w, &got, 20000, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(json_integer_value(json_object_get(got.head, "stdin")), 0); /* end of file */
  ck_assert(json_is_true(json_object_get(got.head, "ignored")));
  frame_free(&got);
  worker_stop(&w);
  ck_assert_int_eq(read(pipe_fd[0], &byte, 1), 0); /* nothing arrived on standard output */
  close(pipe_fd[0]);
}
END_TEST

START_TEST(wrong_program)
{
  const int files = open_files();
  ck_assert_int_eq(worker_start("/no/such/program", "echo", &w, &err), MF_ERR_WORKER);
  ck_assert_ptr_nonnull(strstr(err.text, "/no/such/program"));
  ck_assert_ptr_nonnull(strstr(err.text, "No such file"));
  ck_assert_int_eq(w.pid, 0);
  ck_assert_int_eq(worker_start("/dev/null", "echo", &w, &err), MF_ERR_WORKER);
  ck_assert_int_eq(worker_start(self, "a_role_with_far_too_long_a_name", &w, &err), MF_ERR_INTERNAL);
  expect_no_child();
  ck_assert_int_eq(open_files(), files);
}
END_TEST

/* 'R', 'S', 'Z' as in /proc, 0 if the process does not exist. */
static char process_state(int pid)
{
  char path[64], state = '\0';
  FILE *file;
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  file = fopen(path, "re");
  if(file == NULL)
    return '\0';
  if(fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
    state = '\0';
  fclose(file);
  return state;
}

START_TEST(dies_with_its_parent)
{
  const struct timespec pause_time = {.tv_nsec = 10000000};
  int pipe_fd[2], pid = 0, turns = 0;
  pid_t middle;
  ck_assert_int_eq(pipe(pipe_fd), 0);
  middle = fork();
  if(middle == 0) {
    if(worker_start(self, "hang", &w, &err) != MF_OK || write(pipe_fd[1], &w.pid, sizeof(w.pid)) < 0)
      _exit(1);
    _exit(0); /* without ending the worker */
  }
  close(pipe_fd[1]);
  ck_assert_int_eq(read(pipe_fd[0], &pid, sizeof(pid)), sizeof(pid));
  close(pipe_fd[0]);
  ck_assert_int_eq(waitpid(middle, NULL, 0), middle);
  while(process_state(pid) != '\0' && process_state(pid) != 'Z' && turns++ < 500)
    nanosleep(&pause_time, NULL);
  ck_assert_int_lt(turns, 500);
}
END_TEST

START_TEST(frames_that_cannot_be_sent)
{
  struct frame frame = {0};
  start("echo");
  ck_assert_int_eq(worker_send(&w, &frame, &err), MF_ERR_INTERNAL); /* no head: the worker never sees it */
  ck_assert_int_gt(w.pid, 0);
  ck_assert_int_eq(frame_write(STDERR_FILENO, &frame, &err), MF_ERR_INTERNAL);
  worker_stop(&w);
  expect_no_child();
}
END_TEST

static int run_suite(void)
{
  Suite *suite = suite_create("worker");
  TCase *tc = tcase_create("worker");
  SRunner *runner;
  int failed;
  if(readlink("/proc/self/exe", self, sizeof(self) - 1) < 0)
    return EXIT_FAILURE;
  tcase_set_timeout(tc, 120);
  tcase_add_test(tc, echoes_frames);
  tcase_add_loop_test(tc, says_how_it_died, 0, 8);
  tcase_add_test(tc, sending_to_a_dead_worker);
  tcase_add_test(tc, timeout_leaves_it_running);
  tcase_add_test(tc, partial_reads_and_interruptions);
  tcase_add_test(tc, waits_for_any);
  tcase_add_test(tc, a_signal_interrupts_the_wait);
  tcase_add_test(tc, standard_streams);
  tcase_add_test(tc, wrong_program);
  tcase_add_test(tc, dies_with_its_parent);
  tcase_add_test(tc, frames_that_cannot_be_sent);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
  return argc == 4 && strcmp(argv[1], "--worker") == 0 ? play(argv[2], atoi(argv[3])) : run_suite();
}
