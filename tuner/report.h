/* report.h - how winners look: a table for people, the JSON of `show --json` for programs. */
#ifndef MOEFORGE_TUNER_REPORT_H
#define MOEFORGE_TUNER_REPORT_H

#include "error.h"
#include "options.h"
#include "store.h"
#include <stdio.h>

/* Opens the work store, or the shipped file if there is no work store, for reading. MF_ERR_NOT_FOUND if neither is there. */
enum mf_status report_open_store(const struct options *opt, struct store **st, struct error *err);
/* Prints the winners of one shape (NULL: of all). MF_ERR_NOT_FOUND if there are none. Times are microseconds per operator. */
enum mf_status report_winners(FILE *to, struct store *st, const char *shape_name, bool json, struct error *err);
/* "measured", "predicted" or "stale". */
const char *report_status(const struct winner *win);

#endif
