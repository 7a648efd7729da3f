/* incumbent.h - the winners of earlier runs, which compete with whatever the effort of this one brings, so that a shorter search never loses what a longer
 * one found.
 *
 * They come from the work store and from the shipped file, as schedules: kernels are made of the templates as they are now. What has become illegal, or is of
 * another device, does not count, nor do predictions. */
#ifndef MOEFORGE_TUNER_INCUMBENT_H
#define MOEFORGE_TUNER_INCUMBENT_H

#include "error.h"
#include "family.h"
#include "store.h"

/* A schedule that won for the token counts tokens_min..tokens_max. */
struct incumbent {
  struct schedule schedule;
  int tokens_min, tokens_max;
};

struct incumbents {
  struct incumbent *items; /* owned */
  size_t count, space;
};

/* Appends those of the shape; MF_ERR_NOMEM, MF_ERR_STORE of the work store. 'shipped_path' need not exist, and a file there that cannot be read has none (store_ship() will say
 * what is wrong with it). 'dev' is the device that the run measures on. */
enum mf_status incumbents_load(struct incumbents *out, struct store *store, const char *shipped_path, const char *shape_name, const struct device_info *dev, struct error *err);
bool incumbents_have(const struct incumbents *list, const struct schedule *sched, int tokens);
void incumbents_free(struct incumbents *list);

#endif
