/* progress.c - see progress.h. */
#include "progress.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SECONDS_BETWEEN_LINES 5.0
#define SECONDS_BETWEEN_DRAWS 0.1

/* Set by the signal handler; the only state of the program outside main's, since a handler has no other way to speak. */
static volatile sig_atomic_t stop_requested, stop_second;

double progress_seconds(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void progress_init(struct progress *pr, bool quiet)
{
  memset(pr, 0, sizeof(*pr));
  pr->quiet = quiet;
  pr->terminal = isatty(STDERR_FILENO) == 1;
}

static void close_line(struct progress *pr)
{
  if(pr->line_open)
    fputs("\r\033[K", stderr);
  pr->line_open = false;
}

void progress_say(struct progress *pr, const char *fmt, ...)
{
  va_list args;
  if(pr->quiet)
    return;
  close_line(pr);
  va_start(args, fmt);
  vfprintf(stderr, fmt, args);
  va_end(args);
  fputc('\n', stderr);
}

void progress_error(struct progress *pr, const char *text)
{
  close_line(pr);
  fprintf(stderr, "moeforge: %s\n", text);
}

void progress_phase(struct progress *pr, const char *fmt, ...)
{
  va_list args;
  va_start(args, fmt);
  vsnprintf(pr->phase, sizeof(pr->phase), fmt, args);
  va_end(args);
  pr->phase_start = progress_seconds();
  pr->last_drawn = pr->terminal ? 0 : pr->phase_start;
}

void progress_step(struct progress *pr, size_t done, size_t total, const char *fmt, ...)
{
  const double now = progress_seconds();
  char remark[160];
  va_list args;
  if(pr->quiet || (done < total && now - pr->last_drawn < (pr->terminal ? SECONDS_BETWEEN_DRAWS : SECONDS_BETWEEN_LINES)))
    return;
  pr->last_drawn = now;
  va_start(args, fmt);
  vsnprintf(remark, sizeof(remark), fmt, args);
  va_end(args);
  close_line(pr);
  fprintf(stderr, "%s: %zu/%zu%s%s", pr->phase, done, total, remark[0] != '\0' ? ", " : "", remark);
  if(done == total)
    fprintf(stderr, ", %.1f s\n", now - pr->phase_start);
  else if(done > 0)
    fprintf(stderr, ", about %.0f s left", (now - pr->phase_start) * (double)(total - done) / (double)done);
  if(done < total) {
    if(pr->terminal)
      pr->line_open = true;
    else
      fputc('\n', stderr);
  }
  fflush(stderr);
}

/* A program that is stopped with its whole group (timeout(1)) gets the same signal twice at once: that is one request. */
static void on_signal(int number)
{
  struct timespec now;
  (void)number;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if(stop_requested && (sig_atomic_t)now.tv_sec - stop_second > 1)
    _exit(130);
  if(!stop_requested)
    stop_second = (sig_atomic_t)now.tv_sec;
  stop_requested = 1;
}

void interrupt_install(void)
{
  struct sigaction action, before;
  memset(&action, 0, sizeof(action));
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  if(sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler != SIG_IGN) /* nohup */
    sigaction(SIGHUP, &action, NULL);
}

bool interrupt_requested(void)
{
  return stop_requested != 0;
}
