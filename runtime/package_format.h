/* package_format.h - the package file, byte by byte. docs/package.md says the same in prose.
 *
 *   offset 0    struct package_header     96 bytes
 *   96          struct package_section    one per section, in the order of enum package_section_kind
 *   aligned 64  the sections' bytes, each section at a multiple of 64, gaps filled with zeros; the file ends with the last section
 *
 * All numbers are little-endian, floats IEEE 754. Strings in records are printable ASCII, NUL-terminated. The JSON sections are ASCII text with
 * one NUL at the end. Every byte is covered: the header's hash covers the header (with the hash field zero) and the section table, each section's
 * hash its bytes, and gaps must be zero. A package has no time stamps of its own: the same winners make the same bytes.
 *
 * The version rises when an old reader would misread the file; readers refuse newer versions and read all older ones. Version 1 has the sections up to
 * provenance; version 2 has a qualification behind them (docs/qualify.md) and is written only where there is one. */
#ifndef MOEFORGE_RUNTIME_PACKAGE_FORMAT_H
#define MOEFORGE_RUNTIME_PACKAGE_FORMAT_H

#include "moeforge.h"
#include "moeforge_recipe.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "package files are read and written in place: this needs a little-endian machine"
#endif

#define PACKAGE_MAGIC "MOEFORGE" /* 8 bytes, no NUL */
#define PACKAGE_VERSION 1u           /* without a qualification */
#define PACKAGE_VERSION_QUALIFIED 2u /* with one; the newest */
#define PACKAGE_ALIGNMENT 64u
#define PACKAGE_HASH_BYTES 32
#define PACKAGE_MAX_BYTES ((uint64_t)1 << 32)
#define PACKAGE_MAX_RECORDS 65536u

/* kind, number in the file, name, bytes of one record (0: JSON text) */
#define PACKAGE_SECTION_TABLE(X)                                                                       \
  X(PACKAGE_MANIFEST, 1, "manifest", 0)                        /* JSON: what is inside, for people */   \
  X(PACKAGE_ENTRIES, 2, "entries", sizeof(struct package_entry))                                       \
  X(PACKAGE_RECIPES, 3, "recipes", sizeof(struct mf_recipe))                                           \
  X(PACKAGE_CUBINS, 4, "cubins", sizeof(struct package_cubin)) /* records, then the cubins themselves */ \
  X(PACKAGE_VALIDATION, 5, "validation", 0)                    /* JSON: what was checked, worst errors */ \
  X(PACKAGE_PROVENANCE, 6, "provenance", 0)                    /* JSON: versions, keys, dates */          \
  X(PACKAGE_QUALIFICATION, 7, "qualification", 0)              /* JSON: verdicts against a baseline; version 2 */

enum package_section_kind {
#define PACKAGE_SECTION_ENUM(name, number, text, record) name = number,
  PACKAGE_SECTION_TABLE(PACKAGE_SECTION_ENUM)
#undef PACKAGE_SECTION_ENUM
};
#define PACKAGE_SECTIONS 6u     /* of version 1 */
#define PACKAGE_MAX_SECTIONS 7u /* of version 2 */

struct package_header {
  char magic[8];
  uint32_t version;
  uint32_t sections;    /* package_sections(version) */
  uint64_t file_bytes;
  uint64_t reserved[5]; /* 0 */
  unsigned char hash[PACKAGE_HASH_BYTES];
};

struct package_section {
  uint32_t kind;         /* enum package_section_kind */
  uint32_t count;        /* records; 0 for JSON */
  uint32_t record_bytes; /* 0 for JSON */
  uint32_t reserved;     /* 0 */
  uint64_t offset, bytes;
  unsigned char hash[PACKAGE_HASH_BYTES];
};

/* Fields of struct mf_problem that identify a problem, in file order: type, name. All are 4 bytes. */
#define PACKAGE_PROBLEM_TABLE(X)                                                                                                              \
  X(int32_t, experts) X(int32_t, top_k) X(int32_t, hidden) X(int32_t, intermediate) X(int32_t, intermediate_offset) X(int32_t, expert_begin)  \
  X(int32_t, expert_count) X(int32_t, zero_experts) X(int32_t, score) X(int32_t, select_bias) X(int32_t, groups) X(int32_t, groups_kept)      \
  X(int32_t, renormalize) X(int32_t, weight_on_input) X(int32_t, logits_dtype) X(int32_t, act_scale) X(int32_t, shared_experts)               \
  X(float, swiglu_limit) X(float, swiglu_alpha)

struct package_problem {
#define PACKAGE_PROBLEM_MEMBER(type, name) type name;
  PACKAGE_PROBLEM_TABLE(PACKAGE_PROBLEM_MEMBER)
#undef PACKAGE_PROBLEM_MEMBER
};

#define PACKAGE_PREDICTED 1u /* chosen by the cost model, never measured: us and floor_us are 0 */
#define PACKAGE_EMULATED 2u  /* tuned for an emulated device */

/* One tuned interval of token counts. Sorted by shape name, device name, SMs, tokens_min. */
struct package_entry {
  struct package_problem problem;
  float routed_scaling;    /* of the model it was tuned for; a run-time value */
  int32_t cc_major, cc_minor, sms;
  int32_t min_driver;      /* CUDA version, 13000 = 13.0 */
  int64_t l2_bytes;
  int32_t tokens_min, tokens_max;
  uint32_t recipe, cubin;  /* indices */
  uint32_t flags;          /* PACKAGE_PREDICTED, PACKAGE_EMULATED */
  uint32_t reserved;       /* 0 */
  double us, floor_us;     /* objective of the winner and HBM floor, microseconds */
  char device_name[80];
  char shape_name[80];
  char schedule[160];
};

/* Where a cubin lies, from the section's start; a multiple of 64. The cubins follow each other in order, gaps zero. */
struct package_cubin {
  uint64_t offset, bytes;
};

_Static_assert(sizeof(struct package_header) == 96, "the header's layout is part of the format");
_Static_assert(sizeof(struct package_section) == 64, "the section table's layout is part of the format");
_Static_assert(sizeof(struct package_problem) == 76, "the problem's layout is part of the format");
_Static_assert(sizeof(struct package_entry) == 464, "the entry's layout is part of the format");
_Static_assert(sizeof(struct mf_recipe) == 1608, "the recipe's layout is part of the format");

/* Sections of a file of a version that is known. */
static inline uint32_t package_sections(uint32_t version)
{
  return version == PACKAGE_VERSION ? PACKAGE_SECTIONS : PACKAGE_MAX_SECTIONS;
}

static inline uint64_t package_align(uint64_t offset)
{
  return (offset + PACKAGE_ALIGNMENT - 1) / PACKAGE_ALIGNMENT * PACKAGE_ALIGNMENT;
}

#endif
