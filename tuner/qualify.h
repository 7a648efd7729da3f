/* qualify.h - is a package worth its place in an engine? Its records against paired or separate measurements of what the engine runs now (the baseline),
 * by limits that the spec fixed before anything was measured. docs/qualify.md has the file's format and the rules.
 *
 *   baseline_read()    qualify_baseline.c   the baseline file, strictly
 *   qualify_judge()    qualify_judge.c      one (shape, tokens): keep, reject, or not compared, and why
 *   qualify_text()     qualify_record.c     the record that goes into the package, JSON
 *   qualify_command()  qualify.c            `moeforge qualify` */
#ifndef MOEFORGE_TUNER_QUALIFY_H
#define MOEFORGE_TUNER_QUALIFY_H

#include "error.h"
#include "types.h"

#define QUALIFY_POLICY_VERSION 1
#define QUALIFY_LEAST_SAMPLES 6 /* fewer have no 95 % interval of their median */
#define QUALIFY_HASH_LEN 65     /* SHA-256 in hex and NUL */

/* What the baseline file says of one token count. us and package_us are owned by struct baseline. */
struct baseline_point {
  char shape[80];
  int tokens;
  char routing[32];    /* what the samples are over: "mix" is the spec's */
  double *us;          /* [count] samples, microseconds per operator */
  double *package_us;  /* [count] of the package, each measured in the same round as its neighbour; NULL: not paired */
  size_t count;
  double error;        /* relative error against the unquantised operator; NAN: not given */
  double memory_gib;   /* NAN: not given */
};

struct baseline {
  char name[128], device[80];
  char sha256[QUALIFY_HASH_LEN]; /* of the file */
  struct baseline_point *points;
  size_t count;
};

/* MF_ERR_IO; MF_ERR_SPEC: one line that says where the file is not as it should be; MF_ERR_NOMEM. On failure *out is empty. */
enum mf_status baseline_read(const char *path, struct baseline *out, struct error *err);
void baseline_free(struct baseline *base);
/* NULL if the file has no such point. */
const struct baseline_point *baseline_find(const struct baseline *base, const char *shape, int tokens);

/* What the package has on record of one token count. */
struct qualify_record {
  const char *shape, *device;
  int tokens;
  double us, us_low, us_high; /* objective of the winner and its interval; NAN: not on record */
  double error;               /* as struct check_result.worst_error; NAN: not on record */
  double memory_gib;          /* weights, scales and workspace of one layer */
  bool predicted, checked;    /* never measured; its numbers passed the check */
};

enum qualify_verdict { VERDICT_NOT_COMPARED, VERDICT_KEEP, VERDICT_REJECT };
const char *verdict_name(enum qualify_verdict verdict);

struct qualify_point {
  struct qualify_record own;
  enum qualify_verdict verdict;
  char why[512];              /* each reason; empty if kept */
  bool paired;
  size_t samples;
  double baseline_us;         /* median; NAN if there is none, as are the others */
  double package_us;          /* median of the same rounds, or what is on record */
  double speedup, speedup_low, speedup_high; /* 95 % interval of the ratio's median; not paired: of both medians, which is wider */
  double baseline_error, baseline_memory_gib;
};

/* 'base' is NULL without a baseline for this point. MF_OK whatever the verdict; MF_ERR_NOMEM. */
enum mf_status qualify_judge(const struct spec_limits *limits, const struct qualify_record *own, const char *baseline_device,
                             const struct baseline_point *base, struct qualify_point *out, struct error *err);

/* Limits of one shape, and the file that they are from. */
struct qualify_spec {
  char shape[80];
  struct spec_limits limits;
  char sha256[QUALIFY_HASH_LEN];
};

struct qualify_result {
  struct qualify_point *points;
  size_t count;
  size_t kept, rejected, not_compared;
  struct qualify_spec *specs;
  size_t nspecs;
};

/* Every point kept, and at least one. */
bool qualify_is_qualified(const struct qualify_result *result);
/* JSON with sorted keys (malloc), NULL if memory is short. */
char *qualify_text(const struct qualify_result *result, const struct baseline *base);
/* SHA-256 in hex. */
void qualify_hash(const void *bytes, size_t count, char out[QUALIFY_HASH_LEN]);

#endif
