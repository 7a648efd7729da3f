/* import.h - a Hugging Face config.json becomes a model spec; what cannot be served is refused by name, never guessed.
 *
 * Per model type one row of a table in import.c says which keys hold the sizes, which routing policy the model's code uses and which
 * defaults apply when a key is absent (they differ by model type). docs/specs.md lists them. */
#ifndef MOEFORGE_TUNER_IMPORT_H
#define MOEFORGE_TUNER_IMPORT_H

#include "error.h"
#include "types.h"

struct import_options {
  int tp;             /* tensor-parallel ranks, 1 = none */
  int tp_rank;        /* 0..tp-1: which rank's offsets */
  int ep;             /* expert-parallel ranks, 1 = none */
  int ep_rank;
  const char *name;   /* spec name; NULL: from the file's folder and tp/ep */
};

/* MF_ERR_SPEC: malformed JSON or values; MF_ERR_UNSUPPORTED: named feature (MXFP4 experts, per-channel FP8, ...). */
enum mf_status import_hf_config(const char *path, const struct import_options *options, struct model_spec *out, struct error *err);

#endif
