/* types.h - the plain data that flows through the pipeline; no functions but the names of enumerators.
 *
 *   spec -> space -> emit -> compile -> limits -> check -> timing -> select -> store -> package / report
 *
 * Sizes are in elements unless the name says bytes; times are in microseconds. */
#ifndef MOEFORGE_TUNER_TYPES_H
#define MOEFORGE_TUNER_TYPES_H

#include "moeforge.h"
#include "moeforge_recipe.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NAME_MAX_LEN 80       /* names of shapes, devices, schedules, with NUL */
#define KEY_LEN 65            /* SHA-256 in hex, with NUL */
#define MAX_KNOBS 24
#define MAX_TOKEN_COUNTS 64
#define MAX_TOKENS 64         /* largest token count in a spec */
#define MAX_TOP_K 32
#define MAX_ROUTING_MIX 8

/* ---- routing inputs ---- */
#define ROUTING_TABLE(X)                                                                            \
  X(ROUTING_UNIFORM, "uniform")           /* i.i.d. normal logits */                                \
  X(ROUTING_ZIPF, "zipf")                 /* log popularity -s*log(rank) + Gumbel noise, s = 1 */   \
  X(ROUTING_CONCENTRATED, "concentrated") /* all tokens choose the same experts */                  \
  X(ROUTING_DISPERSED, "dispersed")       /* disjoint experts while tokens * top_k <= experts */    \
  X(ROUTING_TIES, "ties")                 /* few distinct logit values (check only) */
enum routing_kind {
#define ROUTING_ENUM(name, text) name,
  ROUTING_TABLE(ROUTING_ENUM)
#undef ROUTING_ENUM
  ROUTING_KINDS
};

struct routing_weight {
  enum routing_kind kind;
  double weight;               /* share in the objective; all shares sum to 1 */
};

/* ---- model spec ---- */
struct spec_limits {
  double max_error;            /* relative error end to end against the unquantised operator, 0 = default */
  double min_speedup;          /* against the baseline given to qualify, 0 = none */
  double max_memory_bytes;     /* device memory of one layer, for qualify; 0 = no limit */
};

struct model_spec {
  char name[NAME_MAX_LEN];     /* for display and file names: [a-z0-9._-]+ */
  char path[512];              /* file it was read from */
  char source[256];            /* where the numbers come from */
  struct mf_problem problem;   /* canonical content, hence the identity */
  int tp, tp_rank;             /* how the rank's features were cut, for people and spec_write(); 0: not known */
  double routed_scaling;       /* run-time factor on the routing weights */
  int tokens[MAX_TOKEN_COUNTS]; /* ascending token counts to tune for */
  int ntokens;
  struct routing_weight mix[MAX_ROUTING_MIX];
  int nmix;
  struct spec_limits limits;
};

/* ---- device ---- */
/* What planning, filtering and fingerprints need of a GPU; read from specs/devices/<name>.yaml or from the driver. */
struct device_info {
  char name[NAME_MAX_LEN];
  bool emulated;
  int cc_major, cc_minor;
  int sms;
  long shared_bytes_per_cta;   /* opt-in maximum */
  long shared_bytes_per_sm;
  int registers_per_sm;
  int max_threads_per_cta;
  long l2_bytes;
  double bandwidth_gbps;       /* achievable HBM read, 1e9 bytes/s (spec files); from bus * clock for a real device */
  double launch_us;            /* floor formula: launch_us + bytes / bandwidth */
  double memory_bytes;
  /* real devices only */
  int driver_version;          /* 13000 = 13.0 */
  int memory_bus_bits, memory_clock_khz;
  bool mig;
  char uuid[64];
};

/* ---- schedule, candidate, artifact ---- */
struct family_ops;

/* One value per knob of the family, in the order of family_ops.knobs. */
struct schedule {
  const struct family_ops *family;
  int value[MAX_KNOBS];
};

/* One thing that can be timed: (artifact, recipe). */
struct candidate {
  struct schedule schedule;
  char name[NAME_MAX_LEN * 2]; /* canonical: "stream/ring10-ld4-...", all knobs */
  char artifact_name[NAME_MAX_LEN]; /* compile-time knobs only; the stem of the file in gen/<shape>/ */
  struct mf_recipe recipe;
  int64_t id;                  /* row in the store, 0 if not stored */
  int64_t artifact_id;
  double predicted_us;         /* by the cost model at the token count last asked for */
  bool is_default;
};

/* What NVRTC made of one emitted source. Owns source, cubin and log (malloc). */
struct artifact {
  char compile_key[KEY_LEN];   /* template closure, NVRTC version, options, architecture */
  char name[NAME_MAX_LEN];
  char *source;                /* the emitted text */
  unsigned char *cubin;
  size_t cubin_bytes;
  char *log;                   /* program log with ptxas -v lines */
  int registers;               /* per thread */
  long spill_bytes;            /* local memory stores + loads of spilled registers */
  long stack_bytes;            /* local memory per thread */
  long static_shared_bytes;
  bool wgmma_serialised;       /* ptxas C7510..C7520 in the log */
  double compile_seconds;
  int64_t id;                  /* row in the store */
};

/* Why a rule rejected something. rule == NULL: nothing did. */
struct verdict {
  const char *stage;           /* "space", "limits", "compile", "check", "timing" */
  const char *rule;            /* static string */
  long have, allowed;          /* in the rule's unit */
  long nearest;                /* nearest legal value of the knob or field that the rule is about, -1 if there is none */
  char detail[256];            /* one line for people */
};

/* ---- check and timing ---- */
/* What is special about the numbers of a check case. */
#define CASE_DATA_TABLE(X)                                                             \
  X(CASE_NORMAL, "normal")                                                             \
  X(CASE_ZERO_TOKEN, "zero_token")   /* one token is all zero */                       \
  X(CASE_HUGE_SCALE, "huge_scale")   /* block scales and x large */                    \
  X(CASE_TINY_SCALE, "tiny_scale")   /* block scales and x tiny */                     \
  X(CASE_NEG_INF, "neg_inf")         /* some logits are -inf */
enum case_data {
#define CASE_ENUM(name, text) name,
  CASE_DATA_TABLE(CASE_ENUM)
#undef CASE_ENUM
  CASE_DATA_KINDS
};

struct test_case {
  int tokens;
  enum routing_kind routing;
  enum case_data data;
  uint32_t seed;               /* of the inputs; weights have the layer's seed */
};

/* The HBM floors of one round, per launch: what two kernels take that read the same bytes and compute nothing. */
struct floor_times {
  double copy_us;              /* long contiguous copies */
  double tensor_us;            /* through tensor maps, in the checkpoint's layout; NAN if no kernel of the profile has maps that the floor kernel knows */
};

struct sample {
  int64_t candidate_id;
  int tokens;
  enum routing_kind routing;
  uint32_t seed;               /* routing seed set */
  int round;
  double us;                   /* median over the layer launches of one graph replay: replay time / launches */
  struct floor_times floors;   /* same round, same bytes */
};

const char *routing_name(enum routing_kind kind);
/* ROUTING_KINDS if there is none of that name. */
enum routing_kind routing_from_name(const char *name);
const char *case_data_name(enum case_data data);

#endif
