/* error.h - how a stage of the tuner reports what went wrong: a status for the program, one line for the user.
 *
 * A function that can fail takes a 'struct error *err' last and returns its status. On failure it has filled in *err with one line
 * that says what was expected and what to do next; on success *err is untouched. Callers pass errors up unchanged or add context in
 * front with error_prefix(). */
#ifndef MOEFORGE_TUNER_ERROR_H
#define MOEFORGE_TUNER_ERROR_H

#include "moeforge.h"

#define ERROR_TEXT_MAX 6400 /* room for all that the emulator says of a deadlock, behind what was being done */

struct error {
  enum mf_status status;
  char text[ERROR_TEXT_MAX]; /* one line, no trailing newline */
};

/* Fills in *err (if not NULL) and returns 'status', so that a failing path is one statement. */
enum mf_status error_set(struct error *err, enum mf_status status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* As error_set, with ": <strerror(errnum)>" appended. ENOSPC, EROFS, EACCES, EPERM get a hint what to do. */
enum mf_status error_errno(struct error *err, enum mf_status status, int errnum, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* Puts "prefix: " in front of the text that is there. Returns err->status. */
enum mf_status error_prefix(struct error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Puts text behind the text that is there. Returns err->status. */
enum mf_status error_append(struct error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Turns line breaks into blanks and other control characters into '?': names of files may hold any. The functions above do it themselves. */
void error_one_line(char *text);
/* The documented exit code of the command line tool for 'status'. */
int error_exit_code(enum mf_status status);

#endif
