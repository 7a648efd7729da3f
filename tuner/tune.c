/* tune.c - the command `tune`: see tune.h for the steps and what is stored when. */
#include "tune.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compile.h"
#include "compile_pool.h"
#include "faults.h"
#include "package_write.h"
#include "report.h"
#include "select.h"

void job_keep(struct job *job, const bool *keep)
{
  size_t kept = 0;
  for(size_t i = 0; i < job->list.count; i++) {
    if(!keep[i])
      continue;
    job->list.items[kept] = job->list.items[i];
    if(job->artifact_of != NULL)
      job->artifact_of[kept] = job->artifact_of[i];
    kept++;
  }
  job->list.count = kept;
}

void job_free(struct job *job)
{
  for(size_t i = 0; i < job->nartifacts; i++)
    artifact_free(&job->artifacts[i]);
  free(job->artifacts);
  free(job->artifact_of);
  candidate_list_free(&job->list);
  incumbents_free(&job->incumbents);
  memset(job, 0, sizeof(*job));
}

/* Every winner's columns that do not come from timing. */
static void describe_winners(const struct tuner *t, const struct job *job, struct winner *winners, int count)
{
  for(int i = 0; i < count; i++) {
    struct winner *w = &winners[i];
    memcpy(w->shape_name, job->spec.name, sizeof(w->shape_name));
    memcpy(w->device_name, t->target.dev.name, sizeof(w->device_name));
    w->shape_id = job->shape_id;
    w->device_id = t->device_id;
    w->driver_version = t->target.dev.driver_version;
    w->nvrtc_version = t->nvrtc_version;
    w->floor_us = fmin(w->floor_us, select_floor_us(&job->spec, w->tokens_timed, &t->target.dev)); /* the strictest of measured and formula */
    w->floor_us = fmin(w->floor_us, w->floors.tensor_us); /* NAN loses */
  }
}

static enum mf_status predict(const struct tuner *t, struct job *job, struct winner *winners, int *nwinners, struct error *err)
{
  return select_predicted(&job->spec, job->tokens, job->ntokens, &t->target.dev, job->list.items, job->list.count, winners, nwinners, err);
}

/* What the run did for a spec, in one line. */
static void say_summary(struct tuner *t, const struct job *job, double seconds)
{
  if(t->target.emulated)
    progress_say(&t->progress, "%s: %zu candidates, %zu rejected, %zu kernels compiled, %zu from the store; numbers: %zu right by emulation, "
                 "%zu not executed; times: predicted, they need a GPU; %.1f s", job->spec.name, job->list.count + job->unexecuted, job->rejected, job->compiled, job->cached, job->list.count,
                 job->unexecuted, seconds);
  else
    progress_say(&t->progress, "%s: %zu candidates, %zu rejected, %zu kernels compiled, %zu from the store, %zu samples measured, %zu reused, %.1f s",
                 job->spec.name, job->list.count, job->rejected, job->compiled, job->cached, job->measured, job->reused, seconds);
}

static enum mf_status tune_job(struct tuner *t, struct job *job, struct error *err)
{
  struct winner winners[MAX_TOKEN_COUNTS];
  const double start = progress_seconds();
  int nwinners = 0;
  enum mf_status rc = store_put_shape(t->store, &job->spec, &job->shape_id, err);
  if(rc == MF_OK)
    rc = tune_build(t, job, err);
  if(rc == MF_OK && t->target.emulated)
    rc = tune_emulated_choice(t, job, err);
  if(rc == MF_OK && (t->target.gpu || t->target.emulated))
    rc = tune_check(t, job, err);
  if(rc == MF_OK && t->opt->build == COMPILE_DEBUG) { /* kernels with the watchdog are slower: never timed, never winners */
    progress_say(&t->progress, "%s: %zu debug candidates, %zu rejected, %zu faulted; not timed", job->spec.name, job->list.count, job->rejected, job->faulted);
    return MF_OK;
  }
  if(rc == MF_OK)
    rc = t->target.gpu ? tune_time(t, job, winners, &nwinners, err) : predict(t, job, winners, &nwinners, err);
  if(rc != MF_OK)
    return rc;
  describe_winners(t, job, winners, nwinners);
  rc = store_put_winners(t->store, t->run_id, job->shape_id, t->device_id, winners, (size_t)nwinners, err);
  if(rc == MF_OK)
    say_summary(t, job, progress_seconds() - start);
  return rc;
}

static void print_line(void *context, const char *line)
{
  progress_error(context, line);
}

/* Reads all specs before anything is done, so that a typing error in the last one costs nothing. */
static enum mf_status read_jobs(struct tuner *t, const char *const *paths, int count, struct job *jobs, struct error *err)
{
  enum mf_status worst = MF_OK;
  for(int i = 0; i < count; i++) {
    struct fault_lines lines = {.say = print_line, .context = &t->progress};
    struct error one = {MF_OK, ""};
    enum mf_status rc = spec_read(paths[i], &jobs[i].spec, fault_lines_take, &lines, &one);
    fault_lines_end(&lines, paths[i], &one);
    if(rc == MF_OK)
      rc = target_tokens(t->opt, &jobs[i].spec, jobs[i].tokens, &jobs[i].ntokens, &one);
    for(int j = 0; j < i && rc == MF_OK && worst == MF_OK; j++) {
      if(strcmp(jobs[i].spec.name, jobs[j].spec.name) == 0)
        rc = error_set(&one, MF_ERR_SPEC, "%s: has the name \"%s\" of %s; names must differ", paths[i], jobs[i].spec.name, paths[j]);
    }
    if(rc != MF_OK && worst == MF_OK)
      worst = error_set(err, rc, "%s", one.text);
    else if(rc != MF_OK)
      progress_error(&t->progress, one.text);
  }
  return worst;
}

static void join_command_line(char *out, size_t space, const struct options *opt, const char *const *specs, int nspecs)
{
  int n = snprintf(out, space, "tune --device %s --effort %s%s%s%s%s", opt->device, effort_name(opt->effort), opt->tokens != NULL ? " --tokens " : "",
                   opt->tokens != NULL ? opt->tokens : "", opt->schedules != NULL ? " --schedule " : "", opt->schedules != NULL ? opt->schedules : "");
  for(int i = 0; i < nspecs && n >= 0 && (size_t)n < space; i++)
    n += snprintf(out + n, space - (size_t)n, " %s", specs[i]);
}

/* Kernels of a newer NVRTC than the driver knows do not load, and no package of them could be used here. */
static enum mf_status check_driver(const struct tuner *t, struct error *err)
{
  const int have = t->target.dev.driver_version, needed = package_min_driver(t->nvrtc_version);
  if(!t->target.gpu || have >= needed)
    return MF_OK;
  return error_set(err, MF_MISS_DRIVER, "the driver (CUDA %d.%d) is older than NVRTC %d.%d, whose kernels need a driver for CUDA %d.%d: update the driver, or name "
                   "an older libnvrtc.so in MOEFORGE_NVRTC", have / 1000, have % 1000 / 10, t->nvrtc_version / 1000, t->nvrtc_version % 1000 / 10, needed / 1000,
                   needed % 1000 / 10);
}

/* Opens everything that a run needs and begins it in the store. */
static enum mf_status begin(struct tuner *t, const char *const *specs, int nspecs, struct error *err)
{
  char command[1024];
  enum mf_status rc = store_open(t->opt->store_path, false, &t->store, err);
  snprintf(t->cache_dir, sizeof(t->cache_dir), "%s.cache", t->opt->store_path);
  if(rc == MF_OK)
    rc = store_ship_check(t->store, t->opt->shipped_path, err);
  if(rc == MF_OK)
    rc = compile_pool_toolkit(t->opt->program, &t->nvrtc_version, NULL, 0, err);
  if(rc == MF_OK)
    rc = target_resolve(t->opt, &t->target, err);
  if(rc == MF_OK && t->target.emulated)
    rc = tune_emulation(t, err);
  if(rc == MF_OK)
    rc = check_driver(t, err);
  if(rc == MF_OK && t->target.gpu)
    rc = device_tools_build(t->opt->program, t->opt->template_dir, compile_arch(t->target.dev.cc_major, t->target.dev.cc_minor), &t->tools, err);
  if(rc == MF_OK)
    rc = store_put_device(t->store, &t->target.dev, &t->device_id, err);
  if(rc != MF_OK)
    return rc;
  join_command_line(command, sizeof(command), t->opt, specs, nspecs);
  if(t->target.gpu)
    progress_say(&t->progress, "tuning on %s (%d SMs, driver %d.%d)", t->target.dev.name, t->target.dev.sms, t->target.dev.driver_version / 1000,
                 t->target.dev.driver_version % 1000 / 10);
  else if(t->target.emulated)
    progress_say(&t->progress, "no GPU is used: kernels are executed on the emulated device %s (%d SMs), their times are predicted", t->target.dev.name,
                 t->target.dev.sms);
  else
    progress_say(&t->progress, "planning for %s, not measuring: %s", t->target.dev.name, t->target.note);
  return store_begin_run(t->store, command, t->nvrtc_version, t->target.dev.driver_version, &t->run_id, err);
}

/* Whether a failure is the spec's own, so that the others may fare better: no family serves it, its kernels fail, it does not fit into the memory. */
static bool is_local(enum mf_status rc)
{
  return rc == MF_ERR_UNSUPPORTED || rc == MF_ERR_COMPILE || rc == MF_ERR_CHECK || rc == MF_ERR_NOMEM;
}

/* Specs are independent: one that cannot be tuned does not keep the others from it. */
static enum mf_status run_jobs(struct tuner *t, struct job *jobs, int count, struct error *err)
{
  enum mf_status worst = MF_OK;
  for(int i = 0; i < count; i++) {
    struct error one = {MF_OK, ""};
    const enum mf_status rc = tune_job(t, &jobs[i], &one);
    if(rc == MF_OK)
      continue;
    error_prefix(&one, "%s", jobs[i].spec.name);
    if(worst == MF_OK)
      worst = error_set(err, rc, "%s", one.text);
    else
      progress_error(&t->progress, one.text);
    if(!is_local(rc))
      break;
  }
  return worst;
}

static enum mf_status show_results(struct tuner *t, const struct job *jobs, int count, struct error *err)
{
  enum mf_status rc = MF_OK;
  if(t->opt->json)
    return report_winners(stdout, t->store, count == 1 ? jobs[0].spec.name : NULL, true, err);
  for(int i = 0; i < count && rc == MF_OK; i++)
    rc = report_winners(stdout, t->store, jobs[i].spec.name, false, err);
  return rc;
}

/* Whether the winners are those of the whole space, in kernels that serve: only they are shipped. */
static bool is_ordinary(const struct options *opt)
{
  return opt->build == COMPILE_PLAIN && opt->schedules == NULL;
}

enum mf_status tune_command(const struct options *opt, const char *const *specs, int nspecs, struct error *err)
{
  struct tuner t = {.opt = opt};
  struct job *jobs = calloc((size_t)nspecs, sizeof(*jobs));
  enum mf_status rc;
  if(jobs == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  if((opt->build >= COMPILE_LINE_INFO || opt->schedules != NULL) && strcmp(opt->store_path, DEFAULT_STORE_PATH) == 0) {
    free(jobs);
    return error_set(err, MF_ERR_USAGE, "tune with --schedule, --line-info or --synccheck: needs a --store of its own: its winners would replace those that serve");
  }
  progress_init(&t.progress, opt->quiet);
  rc = read_jobs(&t, specs, nspecs, jobs, err);
  if(rc == MF_OK)
    rc = begin(&t, specs, nspecs, err);
  if(rc == MF_OK) {
    struct error end = {MF_OK, ""};
    enum mf_status ended;
    rc = run_jobs(&t, jobs, nspecs, err);
    ended = store_end_run(t.store, t.run_id, rc, &end);
    if(ended == MF_OK && rc != MF_ERR_STORE && rc != MF_ERR_IO)
      ended = !is_ordinary(opt) || !t.target.gpu ? MF_OK : store_ship(t.store, opt->shipped_path, &end); /* what we ship was measured */
    if(rc == MF_OK && ended != MF_OK)
      rc = error_set(err, ended, "%s", end.text);
    if(rc == MF_OK && t.target.gpu && !is_ordinary(opt))
      progress_say(&t.progress, "not written to %s: %s; the winners are in %s only", opt->shipped_path,
                   opt->schedules != NULL ? "schedules were named, the space was not searched" : "these kernels are not for serving", opt->store_path);
    if(rc == MF_OK && opt->build != COMPILE_DEBUG)
      rc = show_results(&t, jobs, nspecs, err);
  }
  for(int i = 0; i < nspecs; i++)
    job_free(&jobs[i]);
  free(jobs);
  device_tool_set_free(&t.tools);
  if(t.store != NULL)
    store_close(t.store);
  return rc;
}
