/* worker.c - see worker.h. Starting, ending and talking to child processes.
 *
 * The parent never blocks on a child without a limit: a frame that has begun must make progress within STALL_MS, and sending as well, else the
 * stream can't be used any more and the child is killed. Waiting for a frame to begin has the caller's limit. The child, which has nothing else to
 * do, waits for ever; it ends when the parent's end closes.
 *
 * Between fork and exec only async-signal-safe calls are made. A pipe that exec closes tells whether it succeeded, so that a wrong program path is an
 * error of worker_start() and not a child that dies mysteriously. */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FRAME_MAGIC 0x5746464du /* "MFFW" */
#define HEAD_MAX_BYTES (16u << 20)
#define BLOB_MAX_BYTES (512u << 20)
#define MAX_WORKERS 256
#define UNSENDABLE "the frame has no JSON head, or a part over its limit (head 16 MiB, blob 512 MiB)"
#define STALL_MS 30000      /* no progress inside a frame */
#define EXIT_GRACE_MS 2000  /* between the end of file and the end of the process */

static int64_t now_ms(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- bytes ---- */
enum wire { WIRE_OK, WIRE_EOF, WIRE_CUT, WIRE_STALLED, WIRE_GARBAGE, WIRE_NOMEM, WIRE_ERRNO };

/* Polls for 'events', through interruptions. limit_ms < 0: for ever. */
static enum wire wait_ready(int fd, short events, int limit_ms)
{
  const int64_t end = now_ms() + limit_ms;
  for(;;) {
    struct pollfd ready = {.fd = fd, .events = events};
    const int64_t left = limit_ms < 0 ? -1 : end - now_ms();
    const int n = poll(&ready, 1, limit_ms < 0 ? -1 : left > 0 ? (int)left : 0);
    if(n > 0)
      return WIRE_OK;
    if(n == 0)
      return WIRE_STALLED;
    if(errno != EINTR)
      return WIRE_ERRNO;
  }
}

static enum wire read_bytes(int fd, void *out, size_t count, int stall_ms)
{
  unsigned char *at = out;
  size_t got = 0;
  while(got < count) {
    const ssize_t n = recv(fd, at + got, count - got, MSG_DONTWAIT);
    if(n == 0)
      return got == 0 ? WIRE_EOF : WIRE_CUT;
    if(n > 0)
      got += (size_t)n;
    else if(errno == EAGAIN || errno == EWOULDBLOCK) {
      const enum wire ready = wait_ready(fd, POLLIN, stall_ms);
      if(ready != WIRE_OK)
        return ready;
    } else if(errno == ECONNRESET)
      return got == 0 ? WIRE_EOF : WIRE_CUT;
    else if(errno != EINTR)
      return WIRE_ERRNO;
  }
  return WIRE_OK;
}

static enum wire write_bytes(int fd, const void *bytes, size_t count, int stall_ms)
{
  const unsigned char *at = bytes;
  while(count > 0) {
    const ssize_t n = send(fd, at, count, MSG_DONTWAIT | MSG_NOSIGNAL);
    if(n >= 0) {
      at += n;
      count -= (size_t)n;
    } else if(errno == EAGAIN || errno == EWOULDBLOCK) {
      const enum wire ready = wait_ready(fd, POLLOUT, stall_ms);
      if(ready != WIRE_OK)
        return ready;
    } else if(errno == EPIPE || errno == ECONNRESET)
      return WIRE_EOF;
    else if(errno != EINTR)
      return WIRE_ERRNO;
  }
  return WIRE_OK;
}

/* ---- frames ---- */
void frame_free(struct frame *frame)
{
  json_decref(frame->head);
  free(frame->blob[0]);
  free(frame->blob[1]);
  memset(frame, 0, sizeof(*frame));
}

/* A part of a frame that has begun: the end of the file is never its regular end. One byte more is allocated and zeroed. */
static enum wire read_part(int fd, void **out, size_t count, int stall_ms)
{
  enum wire wire;
  *out = malloc(count + 1);
  if(*out == NULL)
    return WIRE_NOMEM;
  ((char *)*out)[count] = '\0';
  wire = read_bytes(fd, *out, count, stall_ms);
  return wire == WIRE_EOF ? WIRE_CUT : wire;
}

static enum wire read_frame(int fd, struct frame *out, int stall_ms)
{
  uint32_t sizes[4]; /* magic, head, blob, blob */
  void *head = NULL;
  enum wire wire;
  memset(out, 0, sizeof(*out));
  wire = read_bytes(fd, sizes, sizeof(sizes), stall_ms);
  if(wire != WIRE_OK)
    return wire;
  if(sizes[0] != FRAME_MAGIC || sizes[1] > HEAD_MAX_BYTES || sizes[2] > BLOB_MAX_BYTES || sizes[3] > BLOB_MAX_BYTES)
    return WIRE_GARBAGE;
  wire = read_part(fd, &head, sizes[1], stall_ms);
  for(int i = 0; i < 2 && wire == WIRE_OK; i++)
    if(sizes[2 + i] > 0) {
      wire = read_part(fd, &out->blob[i], sizes[2 + i], stall_ms);
      out->blob_bytes[i] = sizes[2 + i];
    }
  if(wire == WIRE_OK) {
    out->head = json_loadb(head, sizes[1], 0, NULL);
    wire = json_is_object(out->head) ? WIRE_OK : WIRE_GARBAGE;
  }
  free(head);
  if(wire != WIRE_OK)
    frame_free(out);
  return wire;
}

static enum wire write_frame(int fd, const struct frame *frame, int stall_ms)
{
  char *head = json_dumps(frame->head, JSON_COMPACT);
  const size_t head_bytes = head != NULL ? strlen(head) : 0;
  const uint32_t sizes[4] = {FRAME_MAGIC, (uint32_t)head_bytes, (uint32_t)frame->blob_bytes[0], (uint32_t)frame->blob_bytes[1]};
  enum wire wire = WIRE_OK;
  if(head == NULL || head_bytes > HEAD_MAX_BYTES || frame->blob_bytes[0] > BLOB_MAX_BYTES || frame->blob_bytes[1] > BLOB_MAX_BYTES)
    wire = WIRE_GARBAGE;
  if(wire == WIRE_OK)
    wire = write_bytes(fd, sizes, sizeof(sizes), stall_ms);
  if(wire == WIRE_OK)
    wire = write_bytes(fd, head, head_bytes, stall_ms);
  for(int i = 0; i < 2 && wire == WIRE_OK; i++)
    wire = write_bytes(fd, frame->blob[i], frame->blob_bytes[i], stall_ms);
  free(head);
  return wire;
}

/* ---- the child's side ---- */
enum mf_status frame_read(int fd, struct frame *out, struct error *err)
{
  switch(read_frame(fd, out, -1)) {
    case WIRE_OK: return MF_OK;
    case WIRE_EOF: return error_set(err, MF_ERR_NOT_FOUND, "end of the requests");
    case WIRE_NOMEM: return error_set(err, MF_ERR_NOMEM, "out of memory for a request");
    case WIRE_ERRNO: return error_errno(err, MF_ERR_WORKER, errno, "requests cannot be read");
    default: return error_set(err, MF_ERR_WORKER, "the request is no frame, or its end is missing");
  }
}

enum mf_status frame_write(int fd, const struct frame *frame, struct error *err)
{
  switch(write_frame(fd, frame, -1)) {
    case WIRE_OK: return MF_OK;
    case WIRE_EOF: return error_set(err, MF_ERR_WORKER, "the other process has ended");
    case WIRE_GARBAGE: return error_set(err, MF_ERR_INTERNAL, UNSENDABLE);
    default: return error_errno(err, MF_ERR_WORKER, errno, "the answer cannot be written");
  }
}

/* ---- starting ---- */
/* Runs in the forked child up to exec: async-signal-safe calls only. Reports errno through 'report' if it fails. */
static _Noreturn void become_worker(const char *const *argv, int fd, int report, pid_t parent)
{
  sigset_t none;
  int null, problem;
  sigemptyset(&none);
  if(prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || sigprocmask(SIG_SETMASK, &none, NULL) != 0 || signal(SIGINT, SIG_IGN) == SIG_ERR ||
     signal(SIGTERM, SIG_IGN) == SIG_ERR || signal(SIGHUP, SIG_IGN) == SIG_ERR)
    goto fail;
  if(getppid() != parent) /* it died before the prctl */
    _exit(EXIT_FAILURE);
  null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if(null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(STDERR_FILENO, STDOUT_FILENO) < 0 || fcntl(fd, F_SETFD, 0) != 0)
    goto fail;
  execv(argv[0], (char *const *)(uintptr_t)argv);
fail:
  problem = errno;
  if(write(report, &problem, sizeof(problem)) < 0)
    _exit(126);
  _exit(127);
}

/* Makes descriptor *fd at least 3, so that the child's standard streams cannot hit it. */
static bool lift(int *fd)
{
  int lifted;
  if(*fd >= 3)
    return true;
  lifted = fcntl(*fd, F_DUPFD_CLOEXEC, 3);
  close(*fd);
  *fd = lifted;
  return lifted >= 0;
}

static void close_all(int *fds, int count)
{
  for(int i = 0; i < count; i++)
    if(fds[i] >= 0)
      close(fds[i]);
}

/* Reads what become_worker() reports: 0 if exec succeeded, else its errno. */
static int exec_errno(int fd)
{
  int problem = 0;
  ssize_t n;
  do
    n = read(fd, &problem, sizeof(problem));
  while(n < 0 && errno == EINTR);
  return n == (ssize_t)sizeof(problem) ? problem : n == 0 ? 0 : EIO;
}

static void reap_blocking(pid_t pid, int *status)
{
  while(waitpid(pid, status, 0) < 0 && errno == EINTR)
    ;
}

enum mf_status worker_start(const char *program, const char *role, struct worker *out, struct error *err)
{
  int fd[4] = {-1, -1, -1, -1}; /* socket: parent, child; exec's report: parent reads, child writes */
  char number[16];
  const char *argv[] = {program, "--worker", role, number, NULL};
  const pid_t parent = getpid();
  pid_t pid;
  int problem;
  memset(out, 0, sizeof(*out));
  out->fd = -1;
  if(strlen(role) >= sizeof(out->role))
    return error_set(err, MF_ERR_INTERNAL, "worker role '%s' is too long", role);
  if(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) != 0 || pipe2(fd + 2, O_CLOEXEC) != 0 || !lift(&fd[0]) || !lift(&fd[1]) || !lift(&fd[2]) ||
     !lift(&fd[3])) {
    problem = errno;
    close_all(fd, 4);
    return error_errno(err, MF_ERR_WORKER, problem, "worker '%s': no socket pair or pipe", role);
  }
  snprintf(number, sizeof(number), "%d", fd[1]);
  pid = fork();
  if(pid == 0)
    become_worker(argv, fd[1], fd[3], parent);
  problem = errno;
  close_all(fd + 1, 1);
  close_all(fd + 3, 1);
  if(pid > 0)
    problem = exec_errno(fd[2]);
  close_all(fd + 2, 1);
  if(pid < 0 || problem != 0) {
    close_all(fd, 1);
    if(pid > 0)
      reap_blocking(pid, NULL);
    return error_errno(err, MF_ERR_WORKER, problem, "worker '%s': %s cannot be started", role, program);
  }
  out->pid = pid;
  out->fd = fd[0];
  snprintf(out->role, sizeof(out->role), "%s", role);
  return MF_OK;
}

/* ---- ending ---- */
/* Reaps within 'grace_ms', kills after that. True if it ended by itself. */
static bool reap(struct worker *w, int grace_ms, int *status)
{
  const struct timespec pause = {.tv_nsec = 2000000};
  const int64_t end = now_ms() + grace_ms;
  pid_t pid;
  *status = 0;
  for(;;) {
    pid = waitpid(w->pid, status, WNOHANG);
    if(pid == w->pid || (pid < 0 && errno != EINTR) || now_ms() >= end)
      break;
    nanosleep(&pause, NULL);
  }
  if(pid != w->pid) {
    kill(w->pid, SIGKILL);
    reap_blocking(w->pid, status);
  }
  close(w->fd);
  w->fd = -1;
  w->pid = 0;
  return pid > 0;
}

void worker_stop(struct worker *w)
{
  int status;
  if(w->pid > 0)
    reap(w, 0, &status);
}

/* Reaps a worker whose socket has closed and says how it ended. */
static enum mf_status report_death(struct worker *w, struct error *err)
{
  const int pid = (int)w->pid;
  int status;
  if(!reap(w, EXIT_GRACE_MS, &status))
    return error_set(err, MF_ERR_WORKER, "worker '%s' (process %d) closed its socket but did not end; it was killed", w->role, pid);
  w->killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  if(!WIFSIGNALED(status))
    return error_set(err, MF_ERR_WORKER, "worker '%s' (process %d) died: exit code %d", w->role, pid, WEXITSTATUS(status));
  return error_set(err, MF_ERR_WORKER, "worker '%s' (process %d) died: killed by signal %d (%s)", w->role, pid, WTERMSIG(status),
                   strsignal(WTERMSIG(status)));
}

/* What a failed transfer means for the worker: always its end. */
static enum mf_status report_wire(struct worker *w, enum wire wire, const char *doing, struct error *err)
{
  const int pid = (int)w->pid, problem = errno;
  if(wire == WIRE_EOF || wire == WIRE_CUT)
    return report_death(w, err);
  worker_stop(w);
  if(wire == WIRE_NOMEM)
    return error_set(err, MF_ERR_NOMEM, "out of memory for a frame of worker '%s'", w->role);
  if(wire == WIRE_ERRNO)
    return error_errno(err, MF_ERR_WORKER, problem, "worker '%s' (process %d): %s failed; it was killed", w->role, pid, doing);
  return error_set(err, MF_ERR_WORKER, "worker '%s' (process %d): %s while %s; it was killed", w->role, pid,
                   wire == WIRE_STALLED ? "no progress inside a frame" : "garbage instead of a frame", doing);
}

static enum mf_status expect_running(const struct worker *w, struct error *err)
{
  return w->pid > 0 ? MF_OK : error_set(err, MF_ERR_WORKER, "worker '%s' is not running", w->role);
}

/* ---- the parent's side ---- */
enum mf_status worker_send(struct worker *w, const struct frame *frame, struct error *err)
{
  enum mf_status rc = expect_running(w, err);
  enum wire wire;
  if(rc != MF_OK)
    return rc;
  wire = write_frame(w->fd, frame, STALL_MS);
  if(wire == WIRE_GARBAGE) /* found before anything was sent */
    return error_set(err, MF_ERR_INTERNAL, UNSENDABLE);
  return wire == WIRE_OK ? MF_OK : report_wire(w, wire, "sending", err);
}

enum mf_status worker_receive(struct worker *w, struct frame *out, int timeout_ms, struct error *err)
{
  enum mf_status rc = expect_running(w, err);
  enum wire wire;
  memset(out, 0, sizeof(*out));
  if(rc != MF_OK)
    return rc;
  wire = wait_ready(w->fd, POLLIN, timeout_ms);
  if(wire == WIRE_STALLED)
    return error_set(err, MF_ERR_TIMEOUT, "worker '%s' (process %d) sent nothing for %d ms", w->role, (int)w->pid, timeout_ms);
  if(wire == WIRE_OK)
    wire = read_frame(w->fd, out, STALL_MS);
  return wire == WIRE_OK ? MF_OK : report_wire(w, wire, "receiving", err);
}

enum mf_status worker_wait_any(struct worker *const *workers, size_t count, int timeout_ms, size_t *index, struct error *err)
{
  struct pollfd ready[MAX_WORKERS];
  size_t running = 0;
  int n;
  if(count > MAX_WORKERS)
    return error_set(err, MF_ERR_INTERNAL, "%zu workers are more than %d", count, MAX_WORKERS);
  for(size_t i = 0; i < count; i++) {
    ready[i] = (struct pollfd){.fd = workers[i]->pid > 0 ? workers[i]->fd : -1, .events = POLLIN};
    running += workers[i]->pid > 0;
  }
  if(running == 0)
    return error_set(err, MF_ERR_WORKER, "none of the workers waited for is running");
  n = poll(ready, count, timeout_ms < 0 ? -1 : timeout_ms);
  if(n < 0)
    return errno == EINTR ? error_set(err, MF_ERR_INTERRUPTED, "interrupted while waiting for workers")
                          : error_errno(err, MF_ERR_WORKER, errno, "waiting for workers failed");
  for(size_t i = 0; i < count && n > 0; i++)
    if(ready[i].fd >= 0 && ready[i].revents != 0) {
      *index = i;
      return MF_OK;
    }
  return error_set(err, MF_ERR_TIMEOUT, "no worker had anything to say for %d ms", timeout_ms);
}
