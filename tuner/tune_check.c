/* tune_check.c - the step `check` of tune: every candidate's numbers, in child processes; verdicts are stored as they come.
 *
 * A verdict is kept under (candidate, check key); the key covers the policy version and the list of cases, so that a changed check is done again. If
 * nothing but faults is on record, the machine may have been at fault (a GPU that was occupied or broken): then all are judged again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sha256.h"
#include "tune.h"

#define CHECK_LAYERS 2
#define CHECK_REPLAYS 2

struct check_step {
  struct tuner *t;
  struct job *job;
  const char *key;
  size_t *todo;       /* candidates still to be checked */
  size_t ntodo, done;
  bool *keep;
  char last[300];     /* why the last candidate was rejected */
};

static void make_check_key(const struct test_case *cases, int count, char key[KEY_LEN])
{
  unsigned char digest[32];
  char line[160];
  struct sha256 ctx;
  sha256_init(&ctx);
  sha256_add(&ctx, line, (size_t)snprintf(line, sizeof(line), "check %d layers %d replays %d\n", CHECK_POLICY_VERSION, CHECK_LAYERS, CHECK_REPLAYS));
  for(int i = 0; i < count; i++)
    sha256_add(&ctx, line, (size_t)snprintf(line, sizeof(line), "%d %s %s %u\n", cases[i].tokens, routing_name(cases[i].routing),
                                            case_data_name(cases[i].data), (unsigned)cases[i].seed));
  sha256_end(&ctx, digest);
  sha256_hex(digest, key);
}

/* Notes a candidate that is out, with the gate or the fault as the rule. */
static enum mf_status reject_candidate(struct check_step *step, size_t index, const struct check_result *result, const char *fault, struct error *err)
{
  struct verdict why = {.stage = "check", .nearest = -1};
  why.rule = fault != NULL && fault[0] != '\0' ? "fault" : gate_name(result->failed_gate);
  snprintf(why.detail, sizeof(why.detail), "%s", fault != NULL && fault[0] != '\0' ? fault : result->detail);
  snprintf(step->last, sizeof(step->last), "%s: %.250s", why.rule, why.detail);
  step->keep[index] = false;
  step->job->rejected++;
  return store_put_reject(step->t->store, step->t->run_id, step->job->shape_id, step->t->device_id, step->job->list.items[index].name, &why, err);
}

static enum mf_status on_verdict(void *context, size_t item, const struct check_verdict *verdict, struct error *err)
{
  struct check_step *step = context;
  const size_t index = step->todo[item];
  enum mf_status rc = store_put_check(step->t->store, step->t->run_id, step->job->list.items[index].id, step->key, &verdict->result,
                                      verdict->fault[0] != '\0' ? verdict->fault : NULL, err);
  if(rc == MF_OK && verdict->status != MF_OK)
    rc = reject_candidate(step, index, &verdict->result, verdict->fault, err);
  if(rc == MF_OK && verdict->fault[0] != '\0')
    step->job->faulted++;
  step->done++;
  step->job->checked++;
  progress_step(&step->t->progress, step->done, step->ntodo, "%zu rejected, %zu faulted", step->job->rejected, step->job->faulted);
  return rc;
}

static bool references_progress(void *context, int done, int total)
{
  struct tuner *t = context;
  progress_step(&t->progress, (size_t)done, (size_t)total, "%s", "");
  return !interrupt_requested();
}

static const char *fault_of(const struct check_result *known)
{
  return strncmp(known->detail, "fault: ", 7) == 0 ? known->detail + 7 : NULL;
}

/* Whether every candidate has a verdict and all of them are faults. */
static enum mf_status only_faults(struct check_step *step, bool *only, struct error *err)
{
  enum mf_status rc = MF_OK;
  *only = true;
  for(size_t i = 0; i < step->job->list.count && rc == MF_OK && *only; i++) {
    struct check_result known = {0};
    rc = store_get_check(step->t->store, step->job->list.items[i].id, step->key, &known, err);
    *only = rc == MF_OK && !known.passed && fault_of(&known) != NULL;
  }
  return rc == MF_ERR_NOT_FOUND ? MF_OK : rc;
}

/* Uses the verdicts that are stored; collects the rest in step->todo. */
static enum mf_status sort_out_known(struct check_step *step, struct error *err)
{
  bool again = false;
  enum mf_status found = only_faults(step, &again, err);
  if(found != MF_OK)
    return found;
  for(size_t i = 0; i < step->job->list.count; i++) {
    struct check_result known = {0};
    enum mf_status rc = again ? MF_ERR_NOT_FOUND : store_get_check(step->t->store, step->job->list.items[i].id, step->key, &known, err);
    step->keep[i] = true;
    if(rc == MF_ERR_NOT_FOUND)
      step->todo[step->ntodo++] = i;
    else if(rc == MF_OK && !known.passed)
      rc = reject_candidate(step, i, &known, fault_of(&known), err);
    if(rc != MF_OK && rc != MF_ERR_NOT_FOUND)
      return rc;
  }
  return MF_OK;
}

static enum mf_status check_rest(struct check_step *step, const struct test_case *cases, int ncases, struct error *err)
{
  struct tuner *t = step->t;
  struct job *job = step->job;
  const struct check_plan plan = {.problem = &job->spec.problem, .routed_scaling = job->spec.routed_scaling, .cache_dir = t->cache_dir, .cases = cases,
                                  .ncases = ncases, .layers = CHECK_LAYERS, .replays = CHECK_REPLAYS, .timeout_ms = t->opt->timeout_ms};
  const struct check_pool pool = {.program = t->opt->program, .ordinal = t->target.ordinal, .tools = &t->tools.tools, .jobs = t->opt->check_jobs};
  struct check_item *items = calloc(step->ntodo, sizeof(*items));
  enum mf_status rc;
  if(items == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; i < step->ntodo; i++) {
    const struct artifact *art = &job->artifacts[job->artifact_of[step->todo[i]]];
    items[i] = (struct check_item){art->cubin, art->cubin_bytes, &job->list.items[step->todo[i]].recipe};
  }
  progress_phase(&t->progress, "%s: references", job->spec.name);
  rc = device_client_references(t->opt->program, &plan, t->opt->jobs, references_progress, t, err);
  progress_phase(&t->progress, "%s: check", job->spec.name);
  if(rc == MF_OK)
    rc = device_client_check_many(&pool, &plan, items, step->ntodo, on_verdict, step, err);
  free(items);
  return rc;
}

enum mf_status tune_check(struct tuner *t, struct job *job, struct error *err)
{
  struct test_case cases[CHECK_MAX_CASES];
  const int ncases = check_cases(&job->spec.problem, job->tokens[0], job->tokens[job->ntokens - 1], cases, CHECK_MAX_CASES);
  const size_t count = job->list.count;
  struct check_step step = {.t = t, .job = job};
  char key[KEY_LEN];
  enum mf_status rc = MF_OK;
  make_check_key(cases, ncases, key);
  step.key = key;
  step.todo = calloc(count, sizeof(*step.todo));
  step.keep = calloc(count, sizeof(*step.keep));
  rc = step.todo != NULL && step.keep != NULL ? sort_out_known(&step, err) : error_set(err, MF_ERR_NOMEM, "out of memory");
  if(rc == MF_OK && step.ntodo > 0)
    rc = check_rest(&step, cases, ncases, err);
  if(rc == MF_OK) {
    job_keep(job, step.keep);
    if(job->list.count == 0)
      rc = error_set(err, MF_ERR_CHECK, "no candidate passed the check (see `moeforge show --rejects`); the last one fell to %s", step.last);
  }
  free(step.todo);
  free(step.keep);
  return rc;
}
