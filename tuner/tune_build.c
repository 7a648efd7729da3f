/* tune_build.c - the steps `space`, `emit`, `compile`, `limits` of tune: from a problem to the candidates that a device could run.
 *
 * Candidates that differ only in recipe knobs share one artifact. An artifact whose compile key is in the store is not compiled again. A failed
 * compilation rejects the candidates that needed it and no others. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compile.h"
#include "compile_pool.h"
#include "emit.h"
#include "limits.h"
#include "tune.h"

struct build_step {
  struct tuner *t;
  struct job *job;
  const char *arch;
  struct closure *closures;     /* per artifact: the templates that it includes */
  struct verdict *failed;       /* per artifact: rule != NULL if it did not compile */
  size_t *todo;                 /* artifacts that the pool compiles */
  size_t ntodo, done;
  enum mf_status rc;            /* of the reject callback */
  enum mf_status failure;       /* of the last artifact that failed for another reason than its source: its compiler died or hung */
  struct error *err;
};

static enum mf_status put_reject(struct build_step *step, const char *schedule, const struct verdict *why, struct error *err)
{
  step->job->rejected++;
  return store_put_reject(step->t->store, step->t->run_id, step->job->shape_id, step->t->device_id, schedule, why, err);
}

static void on_space_reject(void *context, const struct schedule *sched, const struct verdict *why)
{
  struct build_step *step = context;
  char name[NAME_MAX_LEN * 2];
  schedule_name(sched, name, sizeof(name));
  if(step->rc == MF_OK)
    step->rc = put_reject(step, name, why, step->err);
}

/* Winners of earlier runs that this effort would not try. */
static enum mf_status add_incumbents(struct build_step *step, struct error *err)
{
  struct job *job = step->job;
  struct tuner *t = step->t;
  enum mf_status rc = MF_OK;
  if(!t->target.gpu)
    return MF_OK;
  rc = incumbents_load(&job->incumbents, t->store, t->opt->shipped_path, job->spec.name, &t->target.dev, err);
  for(size_t i = 0; i < job->incumbents.count && rc == MF_OK; i++)
    rc = space_add(&job->spec.problem, &t->target.dev, job->tokens, job->ntokens, &job->incumbents.items[i].schedule, &job->list, err);
  return rc;
}

/* All candidates of the job's token counts; rejections go to the store in one transaction. */
static enum mf_status enumerate(struct build_step *step, struct error *err)
{
  struct job *job = step->job;
  enum mf_status rc = store_begin(step->t->store, err);
  step->err = err;
  if(rc != MF_OK)
    return rc;
  if(step->t->opt->schedules != NULL)
    rc = space_enumerate_names(&job->spec.problem, &step->t->target.dev, job->tokens, job->ntokens, step->t->opt->schedules, &job->list, err);
  else
    rc = space_enumerate_counts(&job->spec.problem, &step->t->target.dev, job->tokens, job->ntokens, step->t->opt->effort, &job->list,
                                on_space_reject, step, err);
  if(rc == MF_OK && step->t->opt->schedules == NULL)
    rc = add_incumbents(step, err);
  if(step->rc != MF_OK)
    rc = step->rc;
  if(rc != MF_OK && rc != MF_ERR_UNSUPPORTED) {
    store_rollback(step->t->store);
    return rc;
  }
  if(rc == MF_OK)
    return store_commit(step->t->store, err);
  struct error ignored; /* the rejections are worth keeping; the error to report is the other one */
  if(store_commit(step->t->store, &ignored) != MF_OK)
    store_rollback(step->t->store);
  return rc;
}

/* The distinct artifacts of the candidates, emitted and written to gen/. */
static enum mf_status emit_all(struct build_step *step, struct error *err)
{
  struct job *job = step->job;
  job->artifacts = calloc(job->list.count, sizeof(*job->artifacts));
  job->artifact_of = calloc(job->list.count, sizeof(*job->artifact_of));
  if(job->artifacts == NULL || job->artifact_of == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; i < job->list.count; i++) {
    const struct candidate *cand = &job->list.items[i];
    size_t a = 0;
    enum mf_status rc;
    while(a < job->nartifacts && strcmp(job->artifacts[a].name, cand->artifact_name) != 0)
      a++;
    job->artifact_of[i] = a;
    if(a < job->nartifacts)
      continue;
    rc = emit_source(&job->spec.problem, job->spec.name, &cand->schedule, &step->t->target.dev, &job->artifacts[a], err);
    job->nartifacts += rc == MF_OK;
    if(rc == MF_OK)
      rc = emit_write(step->t->opt->gen_dir, job->spec.name, &job->artifacts[a], err);
    if(rc != MF_OK)
      return rc;
  }
  return MF_OK;
}

/* Takes what the store has; the rest goes to step->todo. */
static enum mf_status look_up(struct build_step *step, struct error *err)
{
  struct job *job = step->job;
  enum mf_status rc = MF_OK;
  step->failed = calloc(job->nartifacts, sizeof(*step->failed));
  step->todo = calloc(job->nartifacts, sizeof(*step->todo));
  step->closures = calloc(job->nartifacts, sizeof(*step->closures));
  if(step->failed == NULL || step->todo == NULL || step->closures == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t a = 0; a < job->nartifacts && rc == MF_OK; a++) {
    struct artifact stored;
    rc = closure_collect(step->t->opt->template_dir, job->artifacts[a].source, &step->closures[a], err);
    if(rc != MF_OK)
      break;
    compile_key(&job->artifacts[a], &step->closures[a], step->t->nvrtc_version, step->arch, step->t->opt->build);
    rc = store_get_artifact(step->t->store, job->artifacts[a].compile_key, &stored, err);
    if(rc == MF_OK) {
      stored.source = job->artifacts[a].source;
      job->artifacts[a] = stored;
      job->cached++;
    } else if(rc == MF_ERR_NOT_FOUND) {
      step->todo[step->ntodo++] = a;
      rc = MF_OK;
    }
  }
  return rc;
}

static enum mf_status on_compiled(void *context, size_t index, enum mf_status status, const struct error *why, struct error *err)
{
  struct build_step *step = context;
  const size_t a = step->todo[index];
  struct artifact *art = &step->job->artifacts[a];
  step->done++;
  progress_step(&step->t->progress, step->done, step->ntodo, "%s", "");
  if(status != MF_OK) {
    step->failure = status == MF_ERR_COMPILE ? step->failure : status;
    step->failed[a] = (struct verdict){.stage = "compile", .rule = status == MF_ERR_COMPILE ? "compiles" : mf_status_name(status), .nearest = -1};
    snprintf(step->failed[a].detail, sizeof(step->failed[a].detail), "%.250s", why->text);
    return MF_OK;
  }
  step->job->compiled++;
  return store_put_artifact(step->t->store, art, step->t->nvrtc_version, &art->id, err);
}

static enum mf_status compile_rest(struct build_step *step, struct error *err)
{
  const struct compile_pool pool = {.program = step->t->opt->program, .jobs = step->t->opt->jobs, .arch = step->arch, .build = step->t->opt->build,
                                    .context = step, .done = on_compiled, .keep_going = compile_pool_not_interrupted};
  struct compile_job *jobs = calloc(step->ntodo, sizeof(*jobs));
  enum mf_status rc;
  if(jobs == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; i < step->ntodo; i++)
    jobs[i] = (struct compile_job){&step->job->artifacts[step->todo[i]], &step->closures[step->todo[i]]};
  progress_phase(&step->t->progress, "%s: compile", step->job->spec.name);
  rc = compile_pool_run(&pool, jobs, step->ntodo, err);
  free(jobs);
  return rc;
}

/* Drops candidates whose artifact failed or is over a limit; stores the rest. */
static enum mf_status filter(struct build_step *step, struct error *err)
{
  struct job *job = step->job;
  bool *keep = calloc(job->list.count, sizeof(*keep));
  const char *reason = "";
  char why_none[300] = "";
  enum mf_status rc;
  if(keep == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  rc = store_begin(step->t->store, err);
  for(size_t i = 0; i < job->list.count && rc == MF_OK; i++) {
    struct candidate *cand = &job->list.items[i];
    const size_t a = job->artifact_of[i];
    struct verdict why = step->failed[a];
    if(why.rule == NULL && limits_after_compile(&job->spec.problem, &cand->schedule, &step->t->target.dev, &job->artifacts[a], &why) == MF_OK) {
      keep[i] = true;
      cand->artifact_id = job->artifacts[a].id;
      rc = store_put_candidate(step->t->store, job->shape_id, step->t->device_id, cand, err);
    } else {
      rc = put_reject(step, cand->name, &why, err);
      snprintf(why_none, sizeof(why_none), "%s", why.detail);
      reason = why.rule;
    }
  }
  if(rc == MF_OK)
    rc = store_commit(step->t->store, err);
  else
    store_rollback(step->t->store);
  if(rc == MF_OK)
    job_keep(job, keep);
  if(rc == MF_OK && job->list.count == 0)
    rc = error_set(err, step->failure != MF_OK ? step->failure : MF_ERR_COMPILE, "no candidate is left after compilation; the last one fell to rule %s: %s", reason, why_none);
  free(keep);
  return rc;
}

enum mf_status tune_build(struct tuner *t, struct job *job, struct error *err)
{
  struct build_step step = {.t = t, .job = job, .arch = compile_arch(t->target.dev.cc_major, t->target.dev.cc_minor)};
  enum mf_status rc = step.arch != NULL ? enumerate(&step, err)
                                        : error_set(err, MF_ERR_UNSUPPORTED, "%s: no kernels for compute capability %d.%d", t->target.dev.name,
                                                    t->target.dev.cc_major, t->target.dev.cc_minor);
  if(rc == MF_OK)
    rc = emit_all(&step, err);
  if(rc == MF_OK)
    rc = look_up(&step, err);
  if(rc == MF_OK && step.ntodo > 0)
    rc = compile_rest(&step, err);
  if(rc == MF_OK)
    rc = filter(&step, err);
  for(size_t a = 0; a < job->nartifacts && step.closures != NULL; a++)
    closure_free(&step.closures[a]);
  free(step.closures);
  free(step.failed);
  free(step.todo);
  return rc;
}
