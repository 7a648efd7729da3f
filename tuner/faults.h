/* faults.h - collects the problems of one file, so that a reader reports all of them in one run, each as one line
 *   path:line: field: what is wrong
 * The first one goes to err->text, every one to the caller's function. A reader goes on after a fault as far as it makes sense. */
#ifndef MOEFORGE_TUNER_FAULTS_H
#define MOEFORGE_TUNER_FAULTS_H

#include "error.h"
#include "spec.h"
#include <stddef.h>

struct faults {
  const char *path;        /* as the caller spelled it */
  spec_report_fn *report;  /* may be NULL */
  void *context;
  struct error *err;       /* may be NULL */
  int count;
};

void faults_init(struct faults *faults, const char *path, spec_report_fn *report, void *context, struct error *err);
/* Adds one problem. line 0: the file as a whole; field NULL or "": no field. */
void faults_add(struct faults *faults, int line, const char *field, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* MF_OK if there were none, else MF_ERR_SPEC; without a report function the first line then says how many there are. */
enum mf_status faults_end(struct faults *faults);

/* A report function's context that lets every fault of one file be said exactly once: a single one by the error that the reader returns, several
 * line by line through 'say', and then the error only counts them. */
struct fault_lines {
  spec_report_fn *say;
  void *context;
  char first[ERROR_TEXT_MAX]; /* held back until there is a second one */
  int count;
};
void fault_lines_take(void *context, const char *line); /* a spec_report_fn; context: struct fault_lines */
/* After the reader: *err, if there were several faults, says how many. */
void fault_lines_end(const struct fault_lines *lines, const char *path, struct error *err);

/* The name nearest to 'word' by edit distance, names separated by '|'; NULL if none is near enough to be meant (a third of its letters, at
 * least 2). Writes it to 'out' and returns out. Upper and lower case count as equal. */
const char *nearest_name(const char *word, const char *names, char *out, size_t space);

#endif
