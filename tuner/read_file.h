/* read_file.h - a regular file as bytes, with a limit. */
#ifndef MOEFORGE_TUNER_READ_FILE_H
#define MOEFORGE_TUNER_READ_FILE_H

#include "error.h"
#include <stddef.h>

/* Reads the whole file into new memory (free() it; NULL on failure), with a NUL behind the last byte. MF_ERR_IO: not there, not readable, no
 * regular file; MF_ERR_SPEC: more than 'limit' bytes; MF_ERR_NOMEM. The error says what is wrong without the path. */
enum mf_status read_file(const char *path, size_t limit, char **bytes, size_t *count, struct error *err);

#endif
