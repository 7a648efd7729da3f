/* tune_check.c - the step `check` of tune: every candidate's numbers, in child processes; verdicts are stored as they come.
 *
 * A verdict is kept under (candidate, check key); the key covers the policy version and the list of cases, so that a changed check is done again. If
 * nothing but faults is on record, the machine may have been at fault (a GPU that was occupied or broken): then all are judged again.
 *
 * A candidate is checked at the token counts that it takes: those of its recipe between the smallest and the largest of the job. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sha256.h"
#include "tune.h"

#define CHECK_LAYERS 2
#define CHECK_REPLAYS 2
#define EMULATED_LAYERS 1
#define MAX_RANGES 16 /* of token counts, of all families' recipes together */
#define STORED_FAULT_BYTES 2001 /* of the text of a fault, with its NUL: the rest of a long one can be had from `moeforge fuzz` */
#define EMULATED_REPLAYS 3 /* each case begins on a fresh workspace: the third launch is the first to use what an earlier one has cleared */

/* What is run for candidates that take the token counts lo..hi. */
struct case_range {
  int lo, hi;
  struct test_case cases[2 * CHECK_MAX_CASES]; /* twice one after the other, so that any stretch of them around the end is in one piece */
  int ncases;                    /* once */
  int each;                      /* cases that one candidate is given; less than ncases: in turn, so that all cases are run on some candidate */
};

/* What is run on a device. */
struct check_policy {
  const char *device; /* "" for a GPU, else device_emu_key(): a GPU's verdict is never taken for an emulated one or the other way round */
  int layers, replays, timeout_ms;
  struct case_range *ranges; /* owned, MAX_RANGES */
  int nranges;
  struct test_case *all;     /* owned: every range's, each once */
  int nall;
};

struct check_step {
  struct tuner *t;
  struct job *job;
  struct check_policy policy;
  size_t *todo;          /* candidates still to be checked */
  size_t ntodo, done;
  bool *keep;
  enum mf_status failed; /* how the last candidate that was rejected failed */
  char last[300];        /* and why */
};

/* The token counts that a candidate takes, between the job's smallest and largest. */
static void range_of(const struct job *job, const struct candidate *cand, int *lo, int *hi)
{
  const int least = (int)cand->recipe.tokens_min, most = (int)cand->recipe.tokens_max;
  *lo = least > job->tokens[0] ? least : job->tokens[0];
  *hi = most < job->tokens[job->ntokens - 1] ? most : job->tokens[job->ntokens - 1];
}

/* The candidate's range; NULL if the policy has none yet. */
static const struct case_range *find_range(const struct check_policy *p, const struct job *job, const struct candidate *cand)
{
  int lo, hi;
  range_of(job, cand, &lo, &hi);
  for(int i = 0; i < p->nranges; i++) {
    if(p->ranges[i].lo == lo && p->ranges[i].hi == hi)
      return &p->ranges[i];
  }
  return NULL;
}

static const struct case_range *candidate_range(const struct check_step *step, size_t index)
{
  return find_range(&step->policy, step->job, &step->job->list.items[index]);
}

/* The cases of candidate 'index', as many as its range gives each. */
static const struct test_case *cases_of(const struct check_step *step, size_t index)
{
  const struct case_range *r = candidate_range(step, index);
  return &r->cases[r->each < r->ncases ? index * (size_t)r->each % (size_t)r->ncases : 0];
}

/* The check key of candidate 'index'. */
static void make_check_key(const struct check_step *step, size_t index, char key[KEY_LEN])
{
  const struct check_policy *p = &step->policy;
  const struct test_case *cases = cases_of(step, index);
  const int each = candidate_range(step, index)->each;
  unsigned char digest[32];
  char line[160];
  struct sha256 ctx;
  sha256_init(&ctx);
  sha256_add(&ctx, line, (size_t)snprintf(line, sizeof(line), "check %d layers %d replays %d\n", CHECK_POLICY_VERSION, p->layers, p->replays));
  sha256_add(&ctx, p->device, strlen(p->device));
  for(int i = 0; i < each; i++)
    sha256_add(&ctx, line, (size_t)snprintf(line, sizeof(line), "%d %s %s %u\n", cases[i].tokens, routing_name(cases[i].routing),
                                            case_data_name(cases[i].data), (unsigned)cases[i].seed));
  sha256_end(&ctx, digest);
  sha256_hex(digest, key);
}

static enum mf_status known_check(const struct check_step *step, size_t index, struct check_result *out, struct error *err)
{
  char key[KEY_LEN];
  make_check_key(step, index, key);
  return store_get_check(step->t->store, step->job->list.items[index].id, key, out, err);
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
  struct check_result result = verdict->result;
  char key[KEY_LEN], fault[STORED_FAULT_BYTES];
  enum mf_status rc;
  make_check_key(step, index, key);
  snprintf(fault, sizeof(fault), "%.*s", (int)sizeof(fault) - 1, verdict->fault);
  if(step->t->target.emulated && verdict->status == MF_OK)
    snprintf(result.detail, sizeof(result.detail), "%s: %d of %d cases, %d launches each", step->policy.device, candidate_range(step, index)->each,
             candidate_range(step, index)->ncases, step->policy.replays);
  rc = store_put_check(step->t->store, step->t->run_id, step->job->list.items[index].id, key, &result,
                       fault[0] != '\0' ? fault : NULL, err);
  if(verdict->status != MF_OK)
    step->failed = verdict->status;
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
    rc = known_check(step, i, &known, err);
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
    enum mf_status rc = again ? MF_ERR_NOT_FOUND : known_check(step, i, &known, err);
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

/* What the device loads for each artifact: its cubin, or an image of its source for the emulated device. */
struct loadable {
  void *bytes; /* owned if it is an image */
  size_t count;
};

static enum mf_status make_images(const struct tuner *t, const struct job *job, struct loadable *of, struct error *err)
{
  enum mf_status rc = MF_OK;
  for(size_t i = 0; i < job->list.count && rc == MF_OK; i++) {
    const size_t a = job->artifact_of[i];
    if(of[a].bytes == NULL)
      rc = device_emu_image(&job->artifacts[a], job->list.items[i].recipe.kernel, t->opt->build == COMPILE_DEBUG, &of[a].bytes, &of[a].count, err);
  }
  return rc;
}

/* The items in an order in which neighbours have different kernels, so that workers side by side do not compile the same one at the same time. */
static void interleave(struct check_step *step)
{
  const struct job *job = step->job;
  size_t sorted = 0;
  for(size_t turn = 0; sorted < step->ntodo; turn++) {
    for(size_t a = 0; a < job->nartifacts; a++) {
      size_t seen = 0;
      for(size_t i = sorted; i < step->ntodo; i++) {
        const size_t index = step->todo[i];
        if(job->artifact_of[index] != a || seen++ > 0)
          continue;
        memmove(&step->todo[sorted + 1], &step->todo[sorted], (i - sorted) * sizeof(*step->todo));
        step->todo[sorted++] = index;
      }
    }
  }
}

static enum mf_status check_items(struct check_step *step, const struct loadable *of, struct error *err)
{
  struct tuner *t = step->t;
  struct job *job = step->job;
  const struct check_policy *policy = &step->policy;
  const bool emulated = t->target.emulated;
  const struct check_plan plan = {.problem = &job->spec.problem, .routed_scaling = job->spec.routed_scaling, .cache_dir = t->cache_dir,
                                  .cases = policy->all, .ncases = policy->nall, .layers = policy->layers, .replays = policy->replays, .timeout_ms = policy->timeout_ms};
  const struct check_pool pool = {.program = t->opt->program, .ordinal = t->target.ordinal, .tools = &t->tools.tools,
                                  .jobs = emulated ? t->opt->emulation_jobs : t->opt->check_jobs, .emulation = emulated ? &t->emulation : NULL};
  struct check_item *items = calloc(step->ntodo, sizeof(*items));
  enum mf_status rc;
  if(items == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; i < step->ntodo; i++) {
    const size_t index = step->todo[i];
    const struct loadable *what = &of[job->artifact_of[index]];
    items[i] = (struct check_item){what->bytes, what->count, &job->list.items[index].recipe, cases_of(step, index), candidate_range(step, index)->each};
  }
  progress_phase(&t->progress, "%s: references", job->spec.name);
  rc = device_client_references(t->opt->program, &plan, t->opt->jobs, references_progress, t, err);
  progress_phase(&t->progress, "%s: %s", job->spec.name, emulated ? "emulated check" : "check");
  if(rc == MF_OK)
    rc = device_client_check_many(&pool, &plan, items, step->ntodo, on_verdict, step, err);
  free(items);
  return rc;
}

static enum mf_status check_rest(struct check_step *step, struct error *err)
{
  const struct job *job = step->job;
  const bool emulated = step->t->target.emulated;
  struct loadable *of = calloc(job->nartifacts, sizeof(*of));
  enum mf_status rc = MF_OK;
  if(of == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t a = 0; a < job->nartifacts && !emulated; a++)
    of[a] = (struct loadable){job->artifacts[a].cubin, job->artifacts[a].cubin_bytes};
  if(emulated) {
    interleave(step);
    rc = make_images(step->t, job, of, err);
  }
  if(rc == MF_OK)
    rc = check_items(step, of, err);
  for(size_t a = 0; a < job->nartifacts && emulated; a++)
    free(of[a].bytes);
  free(of);
  return rc;
}

/* What is run for the token counts lo..hi on the target. */
static void fill_range(const struct tuner *t, const struct job *job, int lo, int hi, struct case_range *r)
{
  r->lo = lo;
  r->hi = hi;
  r->ncases = r->each = check_cases(&job->spec.problem, lo, hi, r->cases, CHECK_MAX_CASES);
  if(t->target.emulated) {
    r->ncases = tune_emulated_cases(r->cases, r->ncases);
    r->each = t->opt->effort == EFFORT_EXHAUSTIVE || r->ncases < EMULATED_CASES ? r->ncases : EMULATED_CASES;
  }
  memcpy(&r->cases[r->ncases], r->cases, (size_t)r->ncases * sizeof(*r->cases));
}

/* Adds the range's cases to those of all, which begin with the same order that one range alone has. */
static void collect_cases(struct check_policy *p, const struct case_range *r)
{
  for(int i = 0; i < r->ncases; i++) {
    int seen = 0;
    while(seen < p->nall && memcmp(&p->all[seen], &r->cases[i], sizeof(*p->all)) != 0)
      seen++;
    if(seen == p->nall)
      p->all[p->nall++] = r->cases[i];
  }
}

/* The policy for the target. */
static enum mf_status make_policy(const struct tuner *t, const struct job *job, char *device, size_t space, struct check_policy *p, struct error *err)
{
  const struct options *opt = t->opt;
  *p = (struct check_policy){.device = device, .layers = CHECK_LAYERS, .replays = CHECK_REPLAYS, .timeout_ms = opt->timeout_ms};
  p->ranges = calloc(MAX_RANGES, sizeof(*p->ranges));
  p->all = calloc((size_t)MAX_RANGES * CHECK_MAX_CASES, sizeof(*p->all));
  if(p->ranges == NULL || p->all == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  device[0] = '\0';
  if(t->target.emulated) {
    p->layers = EMULATED_LAYERS;
    p->replays = EMULATED_REPLAYS;
    p->timeout_ms = opt->emulation_timeout_ms;
    device_emu_key(&t->emulation, device, space);
  }
  for(size_t i = 0; i < job->list.count; i++) {
    int lo, hi;
    if(find_range(p, job, &job->list.items[i]) != NULL)
      continue;
    if(p->nranges == MAX_RANGES)
      return error_set(err, MF_ERR_INTERNAL, "%s: candidates take more than %d ranges of token counts", job->spec.name, MAX_RANGES);
    range_of(job, &job->list.items[i], &lo, &hi);
    fill_range(t, job, lo, hi, &p->ranges[p->nranges]);
    collect_cases(p, &p->ranges[p->nranges++]);
  }
  return MF_OK;
}

enum mf_status tune_check(struct tuner *t, struct job *job, struct error *err)
{
  const size_t count = job->list.count;
  struct check_step step = {.t = t, .job = job, .failed = MF_ERR_CHECK};
  char device[64];
  enum mf_status rc = make_policy(t, job, device, sizeof(device), &step.policy, err);
  step.todo = calloc(count, sizeof(*step.todo));
  step.keep = calloc(count, sizeof(*step.keep));
  if(rc == MF_OK)
    rc = step.todo != NULL && step.keep != NULL ? sort_out_known(&step, err) : error_set(err, MF_ERR_NOMEM, "out of memory");
  if(rc == MF_OK && step.ntodo > 0)
    rc = check_rest(&step, err);
  if(rc == MF_OK) {
    job_keep(job, step.keep);
    if(job->list.count == 0)
      rc = error_set(err, step.failed == MF_ERR_COMPILE ? MF_ERR_COMPILE : MF_ERR_CHECK,
                     "no candidate passed the check (see `moeforge show --rejects`); the last one fell to %s", step.last);
  }
  free(step.policy.ranges);
  free(step.policy.all);
  free(step.todo);
  free(step.keep);
  return rc;
}
