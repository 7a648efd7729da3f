/* progress.h - what a long command says while it works, on stderr: one line that is redrawn on a terminal, plain lines elsewhere (at most one every
 * few seconds and one at the end of each phase). Also the one place that knows whether the user wants to stop. */
#ifndef MOEFORGE_TUNER_PROGRESS_H
#define MOEFORGE_TUNER_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>

struct progress {
  bool quiet;        /* says nothing */
  bool terminal;     /* stderr is a terminal */
  bool line_open;    /* a redrawn line is on the screen */
  double phase_start, last_drawn; /* seconds, monotonic */
  char phase[64];
};

void progress_init(struct progress *pr, bool quiet);
/* Starts a phase: "qwen3.5-35b-a3b: compile". */
void progress_phase(struct progress *pr, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* done of total, with a remark (may be ""); the rest of the phase's time is estimated from these. */
void progress_step(struct progress *pr, size_t done, size_t total, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* A line that stays. */
void progress_say(struct progress *pr, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The same for what went wrong: also with quiet. */
void progress_error(struct progress *pr, const char *text);
double progress_seconds(void);

/* SIGINT, SIGTERM and SIGHUP (unless it is ignored: nohup) ask for an orderly stop: what is measured is stored, workers are ended. Another one two
 * seconds later ends the program at once. */
void interrupt_install(void);
bool interrupt_requested(void);

#endif
