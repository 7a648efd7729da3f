/* package_write.h - package files from plain structs: package.c fills them in from the store, tests from nothing.
 *
 * Same items, same bytes: items are sorted, equal recipes and cubins are stored once, JSON keys are sorted, and nothing of the moment or of this
 * machine goes in. */
#ifndef MOEFORGE_TUNER_PACKAGE_WRITE_H
#define MOEFORGE_TUNER_PACKAGE_WRITE_H

#include "check.h"
#include "error.h"
#include "types.h"

/* One winner with everything that a package needs of it. Owns nothing. */
struct package_item {
  const char *shape_name, *shape_source;
  const struct mf_problem *problem;
  double routed_scaling;
  const struct device_info *device;
  int tokens_min, tokens_max;
  const struct mf_recipe *recipe;
  const unsigned char *cubin;
  size_t cubin_bytes;
  const char *schedule;
  double us, floor_us, default_us, us_low, us_high, regret;
  bool predicted;
  int nvrtc_version, driver_version;
  const char *compile_key, *selection_key, *made_at;
  const struct check_result *check; /* NULL: no check is on record */
};

/* The oldest driver that runs a cubin of this NVRTC: the same major version. */
int package_min_driver(int nvrtc_version);
/* The file's bytes (malloc). MF_REJECTED: a predicted winner without allow_predicted, or one that failed its check. MF_ERR_STORE: two winners for one
 * token count, or a value that the format cannot hold. */
enum mf_status package_build(const struct package_item *items, size_t count, bool allow_predicted, unsigned char **bytes, size_t *size, struct error *err);
/* Writes bytes to a temporary name in the same folder, fsync, rename. On failure the old file is untouched and no temporary is left. */
enum mf_status package_write_file(const char *path, const unsigned char *bytes, size_t size, struct error *err);

#endif
