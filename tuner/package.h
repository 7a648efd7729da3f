/* package.h - writes package files (format: runtime/package_format.h, docs/package.md) from the store's winners. */
#ifndef MOEFORGE_TUNER_PACKAGE_H
#define MOEFORGE_TUNER_PACKAGE_H

#include "error.h"
#include "store.h"

/* Exports the winners of one shape (all devices, or one by name). Predicted winners are refused unless allow_predicted: then the manifest and every
 * entry say so. Written to a temporary name, fsync, rename. */
enum mf_status package_export(struct store *st, const char *shape_name, const char *device_name, bool allow_predicted, const char *path, struct error *err);

#endif
