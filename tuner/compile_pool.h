/* compile_pool.h - compiles many artifacts in a pool of worker processes, from the parent.
 *
 * Each child opens NVRTC once and compiles one artifact after the other. A child that dies costs its artifact one more try in a fresh child;
 * one that takes longer than the limit is killed and costs its artifact. Whatever happens, compile_pool_run() returns with no child left. */
#ifndef MOEFORGE_TUNER_COMPILE_POOL_H
#define MOEFORGE_TUNER_COMPILE_POOL_H

#include "compile.h"

#define COMPILE_TIMEOUT_MS 120000

/* One artifact to compile: name and source are set; cubin, log and the resource fields are filled in. */
struct compile_job {
  struct artifact *art;
  const struct closure *closure; /* of art->source; may be shared */
};

struct compile_pool {
  const char *program;  /* path of this executable */
  int jobs;             /* most children at a time, at least 1 */
  int timeout_ms;       /* per artifact; 0: COMPILE_TIMEOUT_MS */
  const char *arch;     /* compile_arch() */
  enum compile_build build;
  void *context;        /* for the two functions */
  /* Job 'index' is finished, in no particular order: MF_OK with the artifact filled in; MF_ERR_COMPILE, MF_ERR_CORRUPT (with the log, if there is
   * one), MF_ERR_WORKER, MF_ERR_TIMEOUT, MF_ERR_NOMEM with the reason. Anything but MF_OK ends the run with that status; err may be filled in. */
  enum mf_status (*done)(void *context, size_t index, enum mf_status status, const struct error *why, struct error *err);
  /* Asked between events, at least five times a second; false ends the run. May be NULL. */
  bool (*keep_going)(void *context);
};

/* MF_OK: every job was reported, failed ones included. MF_ERR_INTERRUPTED: keep_going() said no. MF_ERR_TOOLKIT, MF_ERR_WORKER (no child can be
 * started), MF_ERR_NOMEM or what done() returned: jobs that were not reported are not done. */
enum mf_status compile_pool_run(const struct compile_pool *pool, const struct compile_job *jobs, size_t count, struct error *err);

/* A done() whose caller needs every job: the first that failed ends the run with its error. 'context' is not used. */
enum mf_status compile_pool_need_all(void *context, size_t index, enum mf_status status, const struct error *why, struct error *err);
/* A keep_going() that ends the run when the user interrupts. 'context' is not used. */
bool compile_pool_not_interrupted(void *context);

/* NVRTC's version and path (may be NULL) as the children see them. MF_ERR_TOOLKIT says what to install. */
enum mf_status compile_pool_toolkit(const char *program, int *version, char *path, size_t space, struct error *err);

#endif
