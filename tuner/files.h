/* files.h - files that are there whole or not at all. */
#ifndef MOEFORGE_TUNER_FILES_H
#define MOEFORGE_TUNER_FILES_H

#include "error.h"
#include <stddef.h>

/* Where a file called 'path' is to be written, with symbolic links resolved. Renaming a new file over a device, a pipe or a database would destroy it, so
 * they are refused: MF_ERR_IO. A file that is not there is fine. */
enum mf_status file_target(const char *path, char *real, size_t space, struct error *err);
/* Refuses to write over what the same command reads: MF_ERR_USAGE if 'output' and 'input' are one file, however they are called. Either may be NULL or missing. */
enum mf_status file_spare_input(const char *output, const char *input, struct error *err);
/* Writes 'count' bytes to 'path' by way of a temporary file beside it: fsync, rename. On failure an older file stays as it was. MF_ERR_IO. */
enum mf_status file_write_whole(const char *path, const void *bytes, size_t count, struct error *err);
/* Creates one folder if it is not there. MF_ERR_IO. */
enum mf_status file_make_folder(const char *path, struct error *err);

#endif
