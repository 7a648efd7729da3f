/* tune.h - what the steps of `moeforge tune` share. tune.c drives them, in this order, for each spec:
 *
 *   tune_build.c    space -> emit -> compile -> limits     leaves the candidates that could run, with their artifacts
 *   tune_check.c    check                                  leaves those whose numbers are right (tune_emulate.c: on the emulated device)
 *   tune_time.c     timing -> select                       makes the winners (or tune.c asks the cost model)
 *
 * The parent process holds the store and nothing else; each step stores what it learned before it goes on, and uses what is stored instead of doing it
 * again. That is why a killed run continues where it was. */
#ifndef MOEFORGE_TUNER_TUNE_H
#define MOEFORGE_TUNER_TUNE_H

#include "commands.h"
#include "device_client.h"
#include "error.h"
#include "incumbent.h"
#include "progress.h"
#include "space.h"
#include "spec.h"
#include "store.h"
#include "target.h"

/* One run of the command. */
struct tuner {
  const struct options *opt;
  struct progress progress;
  struct store *store;
  struct target target;
  struct device_tool_set tools;  /* helper kernels; empty without a GPU */
  struct device_emulation emulation; /* if target.emulated */
  int nvrtc_version;
  int64_t run_id, device_id;
  char cache_dir[1024];          /* reference cache, beside the store */
};

/* One spec's way through the pipeline. */
struct job {
  struct model_spec spec;
  int tokens[MAX_TOKEN_COUNTS];
  int ntokens;
  int64_t shape_id;
  struct incumbents incumbents;  /* of a GPU, unless schedules were named: candidates whatever the effort, which never leave the race */
  struct candidate_list list;    /* candidates still in the race */
  struct artifact *artifacts;    /* owned, by their names */
  size_t nartifacts;
  size_t *artifact_of;           /* per candidate: index into artifacts */
  size_t rejected, compiled, cached, checked, faulted; /* what the steps counted */
  size_t unexecuted;             /* candidates that were left out on the emulated device */
  size_t measured, reused;       /* samples */
};

enum mf_status tune_build(struct tuner *t, struct job *job, struct error *err);
enum mf_status tune_check(struct tuner *t, struct job *job, struct error *err);
enum mf_status tune_time(struct tuner *t, struct job *job, struct winner *winners, int *nwinners, struct error *err);
/* Fills in t->emulation and sees whether it works: MF_ERR_TOOLKIT, MF_ERR_IO. */
enum mf_status tune_emulation(struct tuner *t, struct error *err);
/* Leaves of the candidates those that are to be executed on the emulated device. */
enum mf_status tune_emulated_choice(struct tuner *t, struct job *job, struct error *err);
/* Cuts the cases for a GPU (as check_cases() orders them) down to those for the emulated device; returns their number. */
int tune_emulated_cases(struct test_case *cases, int count);
#define EMULATED_CASES 3 /* that one candidate is given of them */
/* A device child with the weights of as many layers as cold timing needs, alone on the GPU as far as moeforge goes. On failure *client may be set: stop it. */
enum mf_status tune_start_timing(struct tuner *t, const struct model_spec *spec, int tokens_min, int tokens_max, struct device_client **client,
                                 struct error *err);
/* Drops the candidates for which keep[i] is false, with artifact_of. */
void job_keep(struct job *job, const bool *keep);
void job_free(struct job *job);

#endif
