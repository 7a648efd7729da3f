/* store.h - the work store: everything that was ever tried, in SQLite.
 *
 * One writer process at a time (others get MF_ERR_STORE "busy" after store_open's wait); WAL; each call below that writes is one short
 * IMMEDIATE transaction, so that a kill loses at most the call in flight. Migrations by user_version; a newer or foreign file is refused and
 * left untouched. All SQL is in store_sql.h. docs/database.md describes the tables.
 *
 * Keys: shape = problem_key(); artifact = compile_key; check = (artifact, recipe, check policy, reference version);
 * timing = (candidate, device fingerprint, driver, timing policy, profile); selection = objective version. */
#ifndef MOEFORGE_TUNER_STORE_H
#define MOEFORGE_TUNER_STORE_H

#include "check.h"
#include "error.h"
#include "types.h"

struct store;

#define STORE_SCHEMA_VERSION 2
#define STORE_APPLICATION_ID 0x4d464f45 /* "MFOE" */

/* Opens or creates. read_only: never writes; of an older format it reads a copy in memory that is migrated there. MF_ERR_IO (read-only directory, full disk), MF_ERR_STORE (foreign, truncated,
 * newer, busy). A file that is refused is left as it is. One handle is for one thread. */
enum mf_status store_open(const char *path, bool read_only, struct store **out, struct error *err);
void store_close(struct store *st);

/* Rows that name things; each returns the existing row's id if there is one. */
enum mf_status store_put_shape(struct store *st, const struct model_spec *spec, int64_t *id, struct error *err);
enum mf_status store_put_device(struct store *st, const struct device_info *dev, int64_t *id, struct error *err);
/* The row of that kind of device. MF_ERR_NOT_FOUND. */
enum mf_status store_find_device(struct store *st, const struct device_info *dev, int64_t *id, struct error *err);
/* SHA-256 of what identifies a device for timing: cc, SMs, L2, bus x clock, MIG, emulated; not driver, not UUID. */
void store_device_key(const struct device_info *dev, char key[KEY_LEN]);

/* A run of `moeforge tune`: arguments, versions, start; ended with its outcome. Runs that were killed stay "running" and are marked by the next. */
enum mf_status store_begin_run(struct store *st, const char *command_line, int nvrtc_version, int driver_version, int64_t *run_id, struct error *err);
enum mf_status store_end_run(struct store *st, int64_t run_id, enum mf_status outcome, struct error *err);

/* Artifacts: looked up by compile_key (fills in everything but 'source' and 'log'; MF_ERR_NOT_FOUND). */
enum mf_status store_get_artifact(struct store *st, const char *compile_key, struct artifact *out, struct error *err);
enum mf_status store_put_artifact(struct store *st, const struct artifact *art, int nvrtc_version, int64_t *id, struct error *err);

/* A candidate is (shape, device, schedule name, artifact, recipe bytes); fills in cand->id. A changed recipe or artifact makes a new row. */
enum mf_status store_put_candidate(struct store *st, int64_t shape_id, int64_t device_id, struct candidate *cand, struct error *err);
/* The newest candidate of that schedule name. MF_ERR_NOT_FOUND. */
enum mf_status store_find_candidate(struct store *st, int64_t shape_id, int64_t device_id, const char *schedule_name, int64_t *id, struct error *err);
/* One rejection; the same (shape, device, schedule, stage, rule) is kept once, with the latest run. store_put_candidate() lifts what earlier runs held against
 * the schedule before it was compiled, store_put_check() what they held against it in checks. */
enum mf_status store_put_reject(struct store *st, int64_t run_id, int64_t shape_id, int64_t device_id, const char *schedule_name,
                                const struct verdict *why, struct error *err);
/* Batches many writes of the kind above into one transaction. */
enum mf_status store_begin(struct store *st, struct error *err);
enum mf_status store_commit(struct store *st, struct error *err);
void store_rollback(struct store *st);

/* Check results. 'check_key' = check policy + reference version + case list hash, made by check.c's caller. */
enum mf_status store_get_check(struct store *st, int64_t candidate_id, const char *check_key, struct check_result *out, struct error *err);
/* fault: NULL, or "timeout", "signal 11", ...; it makes the result a failed one, and store_get_check() gives it back in front of 'detail': "fault: timeout". */
enum mf_status store_put_check(struct store *st, int64_t run_id, int64_t candidate_id, const char *check_key, const struct check_result *result,
                               const char *fault, struct error *err);

/* The check_key of a candidate's latest check; MF_ERR_NOT_FOUND if it was never checked. */
enum mf_status store_latest_check(struct store *st, int64_t candidate_id, char check_key[KEY_LEN], struct error *err);

/* Samples. 'timing_key' = device key, driver, timing policy version. */
enum mf_status store_put_samples(struct store *st, int64_t run_id, const char *timing_key, const struct sample *samples, size_t count, struct error *err);
/* All runs' samples are kept. Calls 'fn' for each sample of (candidate, timing_key, tokens, routing, seed) in round order, of one round in
 * run order (--retime measures a round again); stops if it returns false. 'fn' may call the store, but not this function again; so with all store_each_... */
typedef bool store_sample_fn(void *context, const struct sample *smp);
enum mf_status store_each_sample(struct store *st, int64_t candidate_id, const char *timing_key, int tokens, enum routing_kind routing, uint32_t seed,
                                 store_sample_fn *fn, void *context, struct error *err);

/* Winners: one row per (shape, device, token interval), replaced as a whole per (shape, device) in one transaction, except that predictions leave measured
 * rows where they are and take the token counts in between. Intervals must not overlap. Names, versions and made_at of the argument are not looked at:
 * they come from the rows that the ids name, and from the run. */
struct winner {
  char shape_name[NAME_MAX_LEN], device_name[NAME_MAX_LEN], schedule_name[NAME_MAX_LEN * 2];
  int64_t shape_id, device_id, candidate_id;
  int tokens_min, tokens_max;
  int tokens_timed;                /* token count that the times are of: the largest tuned one of the interval */
  double us, floor_us, default_us; /* objective-weighted; default_us 0 if unknown; floor_us: the smallest of floor kernels and formula */
  struct floor_times floors;       /* what the floor kernels measured; NAN: not known */
  double us_low, us_high;          /* confidence interval of us */
  double regret;                   /* worst ratio to the best candidate over the routing inputs */
  bool predicted;                  /* from the cost model: nothing was measured */
  bool checked;                    /* filled in by store_each_winner: the numbers passed their last check */
  bool emulated;                   /* likewise: the device is emulated, and so was the check */
  bool stale;                      /* filled in by store_each_winner: driver, toolkit or policy changed since */
  char selection_key[KEY_LEN];     /* objective version, mix, timing key */
  int driver_version, nvrtc_version;
  char made_at[32];                /* UTC, ISO 8601 */
};
enum mf_status store_put_winners(struct store *st, int64_t run_id, int64_t shape_id, int64_t device_id, const struct winner *winners, size_t count,
                                 struct error *err);
/* name filter may be NULL. Ordered by shape, device, tokens. */
typedef bool store_winner_fn(void *context, const struct winner *win);
enum mf_status store_each_winner(struct store *st, const char *shape_name, store_winner_fn *fn, void *context, struct error *err);
/* Everything that a package or a verifier needs of a winner's candidate. The artifact is owned by the caller (artifact_free). */
enum mf_status store_get_candidate(struct store *st, int64_t candidate_id, struct candidate *cand, struct artifact *art, struct error *err);
enum mf_status store_get_shape(struct store *st, int64_t shape_id, struct model_spec *out, struct error *err); /* name, problem, routed_scaling, source */
enum mf_status store_get_device(struct store *st, int64_t device_id, struct device_info *out, struct error *err);

/* Rejections counted by stage and rule, for show --rejects and plan. */
typedef bool store_reject_fn(void *context, const char *stage, const char *rule, long count, const char *example_schedule, const char *example_detail);
typedef bool store_pair_fn(void *context, int64_t shape_id, int64_t device_id);
/* Every (shape, device) that has rejections, whether or not it has winners. */
enum mf_status store_each_rejected(struct store *st, store_pair_fn *fn, void *context, struct error *err);
enum mf_status store_each_reject(struct store *st, int64_t shape_id, int64_t device_id, store_reject_fn *fn, void *context, struct error *err);

/* The shipped file: winners, their candidates, artifacts, recipes, shapes, devices, runs; no samples, no losers. VACUUM INTO a temporary name,
 * rename; no WAL. Winners of other shapes or devices already in 'path' are kept; predictions never replace measurements. */
enum mf_status store_ship(struct store *st, const char *path, struct error *err);
/* Refuses at once a path that store_ship() would refuse when all is measured: no folder, no permission, a work store, a foreign or damaged file. Changes nothing. */
enum mf_status store_ship_check(const struct store *st, const char *path, struct error *err);

#endif
