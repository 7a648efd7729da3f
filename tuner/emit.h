/* emit.h - writes candidate specialisations as readable files, gen/<shape>/<artifact>.cu. The compiler gets the same bytes. */
#ifndef MOEFORGE_TUNER_EMIT_H
#define MOEFORGE_TUNER_EMIT_H

#include "error.h"
#include "family.h"
#include "types.h"

/* Fills in art->name and art->source (malloc). */
enum mf_status emit_source(const struct mf_problem *problem, const char *shape_name, const struct schedule *sched, const struct device_info *dev,
                           struct artifact *art, struct error *err);
/* Writes art->source to dir/<shape>/<artifact>.cu, by temporary name and rename; leaves an identical file alone. */
enum mf_status emit_write(const char *dir, const char *shape_name, const struct artifact *art, struct error *err);

#endif
