/* package_json.h - the JSON sections of a package: manifest, validation, provenance. Items come sorted, as they are in the file. */
#ifndef MOEFORGE_TUNER_PACKAGE_JSON_H
#define MOEFORGE_TUNER_PACKAGE_JSON_H

#include "package_write.h"

/* Each returns text (malloc, NUL-terminated), NULL if memory is short. */
char *package_manifest_text(const struct package_item *const *items, size_t count);
char *package_validation_text(const struct package_item *const *items, size_t count);
char *package_provenance_text(const struct package_item *const *items, size_t count);

#endif
