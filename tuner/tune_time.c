/* tune_time.c - the steps `timing` and `select` of tune: races the candidates on the device, stores each round, picks the winners.
 *
 * The device child is started only when a round has to be measured: a warm store needs none. The known-samples function hands earlier rounds of
 * the same timing key to timing.c, which measures what is missing. A child that dies is replaced and the round measured again; if MOST_DEATHS die over
 * one round, the kernels are to blame, or the machine, and the timing ends. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "select.h"
#include "sha256.h"
#include "timing.h"
#include "tools/floor_params.h"
#include "tune.h"

#define MOST_DEATHS 2

/* What the device child was asked to prepare last, for its successor. */
struct profile {
  size_t *index;  /* owned */
  size_t count;
  int tokens, launches;
  enum routing_kind routing;
  uint32_t seed;
};

struct time_step {
  struct tuner *t;
  struct job *job;
  struct device_client *client;  /* NULL until something has to be measured */
  int *kernel;                   /* per candidate: handle in the client, -1 */
  struct profile profile;
  int deaths;                    /* of children since the last round that was measured */
  char timing_key[KEY_LEN];
  int token_index;               /* which of job->tokens */
};

/* What must be equal for two samples to be comparable: device, driver, timing policy. */
static void make_timing_key(const struct tuner *t, char key[KEY_LEN])
{
  char device_key[KEY_LEN], line[256];
  unsigned char digest[32];
  struct sha256 ctx;
  store_device_key(&t->target.dev, device_key);
  sha256_init(&ctx);
  sha256_add(&ctx, line, (size_t)snprintf(line, sizeof(line), "timing %d floor %d device %s driver %d", TIMING_POLICY_VERSION, MF_FLOOR_VERSION, device_key,
                                     t->target.dev.driver_version));
  sha256_end(&ctx, digest);
  sha256_hex(digest, key);
}

static void say_line(void *context, const char *line)
{
  struct tuner *t = context;
  progress_say(&t->progress, "%s", line);
}

enum mf_status tune_start_timing(struct tuner *t, const struct model_spec *spec, int tokens_min, int tokens_max, struct device_client **client,
                                 struct error *err)
{
  const int layers = device_layers_needed(&spec->problem, &t->target.dev, tokens_min);
  enum mf_status rc = device_client_start(t->opt->program, t->target.ordinal, &t->tools.tools, 0, client, err);
  if(rc == MF_OK)
    rc = device_client_lock(*client, say_line, t, err);
  if(rc == MF_OK)
    rc = device_client_load_problem(*client, &spec->problem, spec->routed_scaling, layers, tokens_max, err);
  return rc;
}

static enum mf_status load_kernel(struct time_step *step, size_t index, struct error *err)
{
  const struct artifact *art = &step->job->artifacts[step->job->artifact_of[index]];
  if(step->kernel[index] >= 0)
    return MF_OK;
  return device_client_load_kernel(step->client, art->cubin, art->cubin_bytes, &step->job->list.items[index].recipe, &step->kernel[index], err);
}

/* Has the child, which is started if need be, prepare step->profile. */
static enum mf_status prepare(struct time_step *step, struct error *err)
{
  const struct profile *pf = &step->profile;
  int *handles = calloc(pf->count, sizeof(*handles));
  enum mf_status rc = MF_OK;
  if(handles == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  if(step->client == NULL)
    rc = tune_start_timing(step->t, &step->job->spec, step->job->tokens[0], step->job->tokens[step->job->ntokens - 1], &step->client, err);
  for(size_t i = 0; i < pf->count && rc == MF_OK; i++) {
    rc = load_kernel(step, pf->index[i], err);
    handles[i] = step->kernel[pf->index[i]];
  }
  if(rc == MF_OK)
    rc = device_client_open_profile(step->client, handles, (int)pf->count, pf->tokens, pf->routing, pf->seed, pf->launches, err);
  free(handles);
  return rc;
}

/* Ends what is left of a child that died; false if too many did. Its successor knows no kernels. */
static bool bury(struct time_step *step, enum mf_status rc, const struct error *err)
{
  if(rc != MF_ERR_WORKER || step->deaths++ == MOST_DEATHS)
    return false;
  progress_say(&step->t->progress, "%s; another one goes on", err->text);
  device_client_stop(step->client);
  step->client = NULL;
  for(size_t i = 0; i < step->job->list.count; i++)
    step->kernel[i] = -1;
  return true;
}

static enum mf_status open_profile(void *context, const size_t *index, size_t count, int tokens, enum routing_kind routing, uint32_t seed, int launches,
                                   struct error *err)
{
  struct time_step *step = context;
  size_t *copy = malloc(count * sizeof(*copy));
  enum mf_status rc;
  if(copy == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  memcpy(copy, index, count * sizeof(*copy));
  free(step->profile.index);
  step->profile = (struct profile){copy, count, tokens, launches, routing, seed};
  do
    rc = prepare(step, err);
  while(bury(step, rc, err));
  return rc;
}

static enum mf_status measure_round(void *context, int round, double *us, struct floor_times *floors, double *active, struct error *err)
{
  struct time_step *step = context;
  enum mf_status rc = device_client_round(step->client, NULL, round, us, floors, active, err);
  while(bury(step, rc, err)) {
    rc = prepare(step, err);
    if(rc == MF_OK)
      rc = device_client_round(step->client, NULL, round, us, floors, active, err);
  }
  if(rc == MF_OK)
    step->deaths = 0;
  return rc;
}

static enum mf_status keep_samples(void *context, const struct sample *samples, size_t count, struct error *err)
{
  struct time_step *step = context;
  step->job->measured += count;
  return store_put_samples(step->t->store, step->t->run_id, step->timing_key, samples, count, err);
}

struct sample_list {
  struct sample *out;
  size_t count, max;
};

static bool take_sample(void *context, const struct sample *smp)
{
  struct sample_list *list = context;
  if(list->count < list->max)
    list->out[list->count++] = *smp;
  return list->count < list->max;
}

static size_t known_samples(void *context, int64_t candidate_id, int tokens, enum routing_kind routing, uint32_t seed, struct sample *out, size_t max)
{
  struct time_step *step = context;
  struct sample_list list = {out, 0, max};
  struct error ignored;
  if(step->t->opt->retime)
    return 0;
  if(store_each_sample(step->t->store, candidate_id, step->timing_key, tokens, routing, seed, take_sample, &list, &ignored) != MF_OK)
    return 0;
  step->job->reused += list.count;
  return list.count;
}

static bool keep_going(void *context, const char *what, size_t done, size_t total)
{
  struct time_step *step = context;
  const size_t counts = (size_t)step->job->ntokens;
  (void)total;
  progress_step(&step->t->progress, (size_t)step->token_index, counts, "%d tokens, %s %zu", step->job->tokens[step->token_index], what, done);
  return !interrupt_requested();
}

/* The default schedule of this token count and the winners of earlier runs never leave the race. */
static void pin(const struct job *job, const struct device_info *dev, int tokens, bool *pinned)
{
  for(size_t i = 0; i < job->list.count; i++) {
    const struct candidate *cand = &job->list.items[i];
    struct schedule base = {.family = cand->schedule.family};
    base.family->default_schedule(&job->spec.problem, tokens, dev, &base);
    pinned[i] = schedule_equal(&base, &cand->schedule) || incumbents_have(&job->incumbents, &cand->schedule, tokens);
  }
}

/* is_default of the candidates, for one token count: the schedule that winners are compared with. */
static void mark_default(struct job *job, const struct device_info *dev, int tokens)
{
  for(size_t i = 0; i < job->list.count; i++) {
    struct candidate *cand = &job->list.items[i];
    struct schedule base = {.family = cand->schedule.family};
    base.family->default_schedule(&job->spec.problem, tokens, dev, &base);
    cand->is_default = schedule_equal(&base, &cand->schedule);
  }
}

static enum mf_status time_all(struct time_step *step, struct timing_row **rows, struct error *err)
{
  struct job *job = step->job;
  struct tuner *t = step->t;
  const struct timing_device device = {step, open_profile, measure_round};
  const struct timing_sink sink = {step, keep_samples, known_samples, keep_going};
  struct timing_policy policy;
  bool *pinned = calloc(job->list.count, sizeof(*pinned));
  enum mf_status rc = MF_OK;
  if(pinned == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  timing_policy_default(&policy);
  progress_phase(&t->progress, "%s: timing", job->spec.name);
  for(int i = 0; i < job->ntokens && rc == MF_OK; i++) {
    step->token_index = i;
    rows[i] = calloc(job->list.count, sizeof(*rows[i]));
    if(rows[i] == NULL)
      rc = error_set(err, MF_ERR_NOMEM, "out of memory");
    pin(job, &t->target.dev, job->tokens[i], pinned);
    mark_default(job, &t->target.dev, job->tokens[i]);
    if(rc == MF_OK)
      rc = timing_run(&policy, &job->spec, job->tokens[i], job->list.items, job->list.count, pinned, &device, &sink, rows[i], err);
  }
  if(rc == MF_OK)
    progress_step(&t->progress, (size_t)job->ntokens, (size_t)job->ntokens, "%zu samples", job->measured);
  free(pinned);
  return rc;
}

enum mf_status tune_time(struct tuner *t, struct job *job, struct winner *winners, int *nwinners, struct error *err)
{
  struct time_step step = {.t = t, .job = job};
  struct timing_row *rows[MAX_TOKEN_COUNTS] = {NULL};
  enum mf_status rc = MF_OK;
  make_timing_key(t, step.timing_key);
  step.kernel = malloc(job->list.count * sizeof(*step.kernel));
  if(step.kernel == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; i < job->list.count; i++)
    step.kernel[i] = -1;
  rc = time_all(&step, rows, err);
  device_client_stop(step.client);
  if(rc == MF_OK)
    rc = select_winners(&job->spec, job->tokens, job->ntokens, job->list.items, job->list.count, (const struct timing_row *const *)rows, winners, nwinners, err);
  for(int i = 0; i < *nwinners && rc == MF_OK; i++)
    memcpy(winners[i].selection_key, step.timing_key, sizeof(winners[i].selection_key));
  for(int i = 0; i < job->ntokens; i++)
    free(rows[i]);
  free(step.profile.index);
  free(step.kernel);
  return rc;
}
