/* worker.h - runs everything that can crash in child processes: the parent holds the database, the child holds NVRTC or a CUDA context.
 *
 * A child is this program re-executed (`moeforge --worker ROLE FD`), never a bare fork. Parent and child exchange *frames* over a socket pair:
 * a JSON header and up to two binary blobs. The child dies when the parent's end closes (it reads end of file) and by PR_SET_PDEATHSIG (which
 * follows the thread that started it). It ignores SIGINT, SIGTERM and SIGHUP, which a terminal or a service manager sends to the whole group, so that
 * the parent decides what an interrupt means; its standard input is /dev/null and its standard output is the parent's standard error.
 *
 *   frame: u32 magic, u32 head bytes, u32 blob bytes, u32 second blob bytes, head, blob, second blob */
#ifndef MOEFORGE_TUNER_WORKER_H
#define MOEFORGE_TUNER_WORKER_H

#include "error.h"
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct worker {
  pid_t pid;      /* 0: not running */
  int fd;         /* parent's end, -1 */
  char role[16];  /* "compile", "check", "time", "probe" */
  bool killed;    /* the last child was ended by a SIGKILL that is not ours: by the out-of-memory killer or a person; its work is not to blame */
};

/* Owns head and blobs; frame_free() ends it. */
struct frame {
  json_t *head;
  void *blob[2];
  size_t blob_bytes[2];
};

/* Starts a child. 'program' is the path of this executable (argv[0] resolved, /proc/self/exe). */
enum mf_status worker_start(const char *program, const char *role, struct worker *out, struct error *err);
/* Kills (SIGKILL) and reaps. Safe on a worker that is not running. */
void worker_stop(struct worker *w);
/* Sends a frame; the caller keeps its contents. MF_ERR_WORKER if the child is gone, with how it ended. */
enum mf_status worker_send(struct worker *w, const struct frame *frame, struct error *err);
/* Receives a frame. timeout_ms < 0 waits for ever. MF_ERR_TIMEOUT leaves the child running; MF_ERR_WORKER says how it ended (signal, code) and reaps it.
 * A child that sends anything but frames, or stops in the middle of one, is killed: MF_ERR_WORKER as well. */
enum mf_status worker_receive(struct worker *w, struct frame *out, int timeout_ms, struct error *err);
/* Waits until one of 'count' workers has something to read or has died; *index receives which. MF_ERR_TIMEOUT, MF_ERR_INTERRUPTED on a signal. */
enum mf_status worker_wait_any(struct worker *const *workers, size_t count, int timeout_ms, size_t *index, struct error *err);
void frame_free(struct frame *frame);

/* The child's side, on the inherited descriptor. frame_read returns MF_ERR_NOT_FOUND at end of file. */
enum mf_status frame_read(int fd, struct frame *out, struct error *err);
enum mf_status frame_write(int fd, const struct frame *frame, struct error *err);

/* Roles: each runs until end of file and returns the process exit code. */
int worker_main_compile(int fd); /* compile.c's work: compile_worker.c */
int worker_main_device(int fd);  /* checks and timing on a device: device_worker.c */

#endif
