/* package_file.h - an opened package file, for the rest of the runtime and for `moeforge verify`.
 *
 * package_read() is the only way from bytes to a struct mf_package: what it returns has been checked to the last byte (package_format.h), so that
 * everybody else may follow indices and offsets without looking. The object is immutable; all pointers point into one heap block. */
#ifndef MOEFORGE_RUNTIME_PACKAGE_FILE_H
#define MOEFORGE_RUNTIME_PACKAGE_FILE_H

#include "package_format.h"

#include <stddef.h>

struct mf_package {
  unsigned char *bytes; /* the whole file; owned */
  size_t size;
  const char *manifest, *validation, *provenance; /* NUL-terminated JSON */
  const struct package_entry *entries;
  const struct mf_recipe *recipes;
  const struct package_cubin *cubins; /* offsets from the start of this array */
  uint32_t nentries, nrecipes, ncubins;
};

/* Reads and checks a file. On failure *out is NULL and 'why' (if not NULL) has one line: what was found where.
 * MF_ERR_IO, MF_ERR_NOMEM, MF_ERR_CORRUPT, MF_ERR_NEWER_FORMAT. */
enum mf_status package_read(const char *path, struct mf_package **out, char *why, size_t why_bytes);
/* The same for bytes in memory, which it takes over (malloc), also on failure. */
enum mf_status package_parse(unsigned char *bytes, size_t size, struct mf_package **out, char *why, size_t why_bytes);

/* Is there a NUL within 'space', and nothing but printable ASCII before it? */
int package_text_good(const char *text, size_t space);
const void *package_cubin(const struct mf_package *pkg, uint32_t index);
/* Copies between the file's and the API's problem. */
void package_problem_get(const struct package_problem *stored, struct mf_problem *out);
void package_problem_set(const struct mf_problem *problem, struct package_problem *out);
/* Field by field, after the documented defaults were filled in (0 groups = 1, 0 expert_count = all, alpha 0 = 1). */
int package_problem_equal(const struct package_problem *a, const struct package_problem *b);

/* The rule of every public struct: at least the size that the first version had, and nothing but zeros behind what this version knows. */
int struct_is_usable(const void *object, uint32_t struct_size, size_t first_size, size_t known_size);
/* Sizes of the structs that have grown since. */
#define CALL_FIRST_SIZE offsetof(struct mf_call, ids)

#endif
