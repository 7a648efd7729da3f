/* family_batch.h - the kernel family `batch`: weight streaming, 9 to 32 tokens in groups of 8 (templates/batch/, docs/kernel.md). */
#ifndef MOEFORGE_TUNER_FAMILY_BATCH_H
#define MOEFORGE_TUNER_FAMILY_BATCH_H

#include "family.h"

extern const struct family_ops family_batch;

#endif
