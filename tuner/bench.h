/* bench.h - what bench.c and bench_behind.c share. */
#ifndef MOEFORGE_TUNER_BENCH_H
#define MOEFORGE_TUNER_BENCH_H

#include <jansson.h>

#include "tune.h"

#define BENCH_ROUNDS 15
#define BENCH_LAUNCHES 48
#define BENCH_SEED 9000u /* tuning's seeds are small numbers: timing.h */
#define BENCH_MAX_KERNELS 32

/* One shape and its winners on the device. */
struct bench_shape {
  const char *name;
  int64_t device_id, shape_id;
  struct winner winners[MAX_TOKEN_COUNTS];
  int nwinners;
};

/* Times the winners and the schedules of --schedule behind another kernel, at the token counts t for which wanted[t] is true. Rows go to 'rows', or if that
 * is NULL to stdout as a table. A kind of launch that hangs is such a row; one that fails or has wrong outputs also is the error, at the end. *client is
 * replaced when it is lost. */
enum mf_status bench_behind(struct tuner *t, struct device_client **client, const struct model_spec *spec, const struct bench_shape *shape, const bool *wanted,
                            json_t *rows, struct error *err);

#endif
