/* family_stream.h - the kernel family `stream`: weight streaming, up to 8 tokens (templates/stream/, docs/kernel.md). */
#ifndef MOEFORGE_TUNER_FAMILY_STREAM_H
#define MOEFORGE_TUNER_FAMILY_STREAM_H

#include "family.h"

extern const struct family_ops family_stream;

#endif
