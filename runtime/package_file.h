/* package_file.h - an opened package file, for the rest of the runtime and for `moeforge verify`.
 *
 * package_read() is the only way from bytes to a struct mf_package: what it returns has been checked to the last byte (package_format.h), so that
 * everybody else may follow indices and offsets without looking. The object is immutable; all pointers point into one heap block. */
#ifndef MOEFORGE_RUNTIME_PACKAGE_FILE_H
#define MOEFORGE_RUNTIME_PACKAGE_FILE_H

#include "package_format.h"

#include <stddef.h>

struct mf_package {
  unsigned char *bytes; /* the whole file and a NUL behind it; owned */
  size_t size;
  const char *manifest, *validation, *provenance; /* NUL-terminated JSON */
  const char *qualification;                      /* the same; NULL if the file has none */
  const struct package_entry *entries;
  const struct mf_recipe *recipes;
  const struct package_cubin *cubins; /* offsets from the start of this array */
  uint32_t nentries, nrecipes, ncubins;
};

/* Reads and checks a file. On failure *out is NULL and 'why' (if not NULL) has one line: what was found where.
 * MF_ERR_IO, MF_ERR_NOMEM, MF_ERR_CORRUPT, MF_ERR_NEWER_FORMAT. */
enum mf_status package_read(const char *path, struct mf_package **out, char *why, size_t why_bytes);
/* The file's bytes alone (malloc), not looked at: for package_parse(). *bytes is NULL on failure. */
enum mf_status package_read_bytes(const char *path, unsigned char **bytes, size_t *size, char *why, size_t why_bytes);
/* What package_read() does, for bytes in memory, which it takes over (malloc), also on failure; the block may be moved. */
enum mf_status package_parse(unsigned char *bytes, size_t size, struct mf_package **out, char *why, size_t why_bytes);

/* Is there a NUL within 'space', and nothing but printable ASCII before it? */
int package_text_good(const char *text, size_t space);
/* May these bytes of a cubin be handed to the driver? An ELF image that ends where it says, or a text; see cubin_image.c. */
int package_cubin_good(const unsigned char *image, uint64_t size);
/* Are the parameters of the recipe's kernel, by what the cubin says of it, those that the recipe passes? For bytes that are package_cubin_good(). Also
 * nonzero where the cubin says nothing: a text, or an image that does not describe the kernel; recipe_get_function() then asks the driver. */
int package_cubin_takes(const unsigned char *image, uint64_t size, const struct mf_recipe *recipe);
const void *package_cubin(const struct mf_package *pkg, uint32_t index);
/* Copies between the file's and the API's problem. */
void package_problem_get(const struct package_problem *stored, struct mf_problem *out);
void package_problem_set(const struct mf_problem *problem, struct package_problem *out);
/* Field by field, after the documented defaults were filled in (0 groups = 1, 0 expert_count = all, alpha 0 = 1). */
int package_problem_equal(const struct package_problem *a, const struct package_problem *b);

/* Bytes of a public struct as far as 'last', the last member that its first version had: what every caller's struct holds at least. */
#define STRUCT_FIRST_SIZE(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))

/* The rule of every public struct that is handed in: copies the caller's 'given_size' bytes into 'own', which has 'own_size'. What an older caller's
 * shorter struct does not have is zero, which is each member's neutral value; what a newer caller's longer one has beyond 'own' must be zero.
 * Nonzero if it can be used: at least 'first_size' bytes and nothing set that this version does not know. */
int struct_take(void *own, size_t own_size, size_t first_size, const void *given, uint32_t given_size);

#endif
