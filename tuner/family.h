/* family.h - what a kernel family tells the tuner: its knobs, its rules, its memory, its source, its recipe.
 *
 * A family is one kernel structure made of the stages in templates/. It is described by one struct family_ops in family_<name>.c and
 * by nothing else in the tuner: a new family adds one such file and its line in families.c. All functions are pure. */
#ifndef MOEFORGE_TUNER_FAMILY_H
#define MOEFORGE_TUNER_FAMILY_H

#include "error.h"
#include "strbuf.h"
#include "types.h"

#define KNOB_MAX_VALUES 16

struct knob {
  const char *name;          /* as in schedule names and --set: "ring_stages" */
  const char *tag;           /* short form in file names: "ring" */
  const char *help;          /* one line, with the unit */
  bool compile_time;         /* in the cubin; else in the recipe only */
  bool primary;              /* default effort takes the product over these; the others: see space.h */
  int nvalues;               /* 0: it follows from the token count (default_schedule), or timing cannot judge it: it is not varied */
  int values[KNOB_MAX_VALUES]; /* ascending, but for the first of an added knob */
  bool added;                /* schedules that were stored before there was the knob have values[0]; only the last knobs can be such */
  bool together;             /* not primary, but default effort varies it with each kernel that the primary knobs make */
  bool unnamed;              /* of an added knob: names do not show values[0], so those of older schedules stay as they are */
  bool quick;                /* quick effort varies it as well, alone */
};

/* A rule's name and meaning, for plan, docs and the store. */
struct rule {
  const char *name;
  const char *help;
};

struct family_ops {
  const char *name;
  int version;               /* part of every key: raise it when recipe or emission change meaning */
  const char *kernel;        /* symbol */
  const char *entry_include; /* template that the emitted file includes, relative to templates/ */
  const struct knob *knobs;
  int nknobs;
  const struct rule *rules;
  int nrules;

  /* Can the family serve this problem at this token count on such a device at all? MF_OK, or MF_REJECTED with *why. */
  enum mf_status (*serves)(const struct mf_problem *problem, int tokens, const struct device_info *dev, struct verdict *why);
  /* Token counts lo..hi that share candidates (a bucket) around 'tokens', e.g. 1..8. */
  void (*token_bucket)(const struct mf_problem *problem, int tokens, int *lo, int *hi);
  /* The schedule to beat: sensible for every shape without tuning. May depend on the token count. */
  void (*default_schedule)(const struct mf_problem *problem, int tokens, const struct device_info *dev, struct schedule *out);
  /* Whether the search should try a schedule; may be NULL: all. What is not offered is legal all the same. */
  bool (*offers)(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev);
  /* Rules that need no compilation, first failing one. MF_OK or MF_REJECTED with *why. */
  enum mf_status (*constrain)(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev, struct verdict *why);
  /* Dynamic shared memory per CTA, by the same formula as the kernel's layout. */
  long (*shared_bytes)(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev);
  /* The emitted source of the artifact: shape and compile-time knobs as constants. Same artifact -> same bytes. */
  void (*emit)(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev, struct strbuf *out);
  /* The binding recipe. */
  enum mf_status (*recipe)(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev,
                           struct mf_recipe *out, struct error *err);
  /* Compares the kernel's exported metadata symbol with the host's formulas. MF_OK or MF_REJECTED with *why. */
  enum mf_status (*check_meta)(const void *meta, size_t meta_bytes, const struct mf_problem *problem, const struct schedule *sched,
                               const struct device_info *dev, struct verdict *why);
  /* Cost model: predicted microseconds for 'active' distinct experts at 'tokens'. For ranking only. */
  double (*predict_us)(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev, int tokens, double active);
};

/* All families, NULL-terminated. */
const struct family_ops *const *families_all(void);
/* NULL if there is none of that name. */
const struct family_ops *family_find(const char *name);
/* Index of a knob by name, -1 if there is none. */
int family_knob(const struct family_ops *family, const char *name);
/* "stream/ring10-..." over all knobs; 'artifact': compile-time knobs only, without '/'. */
void schedule_name(const struct schedule *sched, char *out, size_t space);
void schedule_artifact_name(const struct schedule *sched, char *out, size_t space);
/* Reads a canonical name back. */
enum mf_status schedule_parse(const char *name, struct schedule *out, struct error *err);
bool schedule_equal(const struct schedule *a, const struct schedule *b);

/* For check_meta: one number of the metadata symbol beside the host's. */
struct meta_row {
  const char *name;
  long kernel, host;
};
/* A float as such a number: its bits. */
long family_meta_float(float value);
/* MF_OK, or MF_REJECTED with the first row that differs in *why. */
enum mf_status family_meta_compare(const struct meta_row *rows, size_t count, struct verdict *why);
enum mf_status family_meta_differs(struct verdict *why, const char *what, long kernel, long host);

#endif
