/* package_rewrite.h - a package file with another qualification; everything else in it stays as it is, to the byte. */
#ifndef MOEFORGE_TUNER_PACKAGE_REWRITE_H
#define MOEFORGE_TUNER_PACKAGE_REWRITE_H

#include "error.h"
#include <stddef.h>

/* 'bytes' is a package that opens. Puts 'json' (ASCII) behind its sections, in the place of an older qualification if there is one; the new file is in *out
 * (malloc). MF_ERR_NOMEM; MF_ERR_INTERNAL if what was made does not open. */
enum mf_status package_with_qualification(const unsigned char *bytes, const char *json, unsigned char **out, size_t *out_size,
                                          struct error *err);

#endif
