/* tune_emulate.c - what `tune` does on the emulated device that it does not do on a GPU: which cases are run, and on which candidates.
 *
 * Executing a launch takes a GPU microseconds and a CPU the better part of a second. So there are fewer cases: each kind of routing and data once, and each
 * token count once; and each candidate is given EMULATED_CASES of them, in turn, so that every case is run on some. And there are fewer candidates:
 *
 *   quick       those that would win, and the default schedules
 *   default     and as many more as it takes that every kernel is executed and every value of every knob occurs
 *   exhaustive  all, with all cases
 *
 * The others are not called checked and cannot win: they are stored as rejected by the rule "not_executed". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "select.h"
#include "tune.h"

#define NOT_EXECUTED "not_executed"
#define MAX_FAMILIES 8

/* ---- how the device is emulated ---- */
static enum mf_status absolute(const char *path, char *out, size_t space, struct error *err)
{
  char *real = realpath(path, NULL);
  enum mf_status rc = MF_OK;
  if(real == NULL || strlen(real) >= space)
    rc = error_set(err, MF_ERR_IO, "%s: cannot be used by the emulated device: it is not there, or its path is too long", path);
  else
    snprintf(out, space, "%s", real);
  free(real);
  return rc;
}

enum mf_status tune_emulation(struct tuner *t, struct error *err)
{
  struct device_emulation *e = &t->emulation;
  enum mf_status rc = file_make_folder(t->cache_dir, err);
  memset(e, 0, sizeof(*e));
  e->info = t->target.dev;
  e->seed = EMU_BASE_SEED;
  if(rc == MF_OK && strlen(t->opt->cxx) >= sizeof(e->compiler))
    rc = error_set(err, MF_ERR_TOOLKIT, "MOEFORGE_CXX: the path is too long");
  if(rc == MF_OK)
    rc = absolute(t->opt->template_dir, e->template_dir, sizeof(e->template_dir), err);
  if(rc == MF_OK)
    rc = absolute(t->opt->emu_dir, e->emu_dir, sizeof(e->emu_dir), err);
  if(rc == MF_OK)
    rc = absolute(t->cache_dir, e->cache_dir, sizeof(e->cache_dir), err);
  if(rc != MF_OK)
    return rc;
  snprintf(e->compiler, sizeof(e->compiler), "%s", t->opt->cxx);
  return device_emu_check(e, err);
}

/* ---- cases ---- */
static bool same_kind(const struct test_case *a, const struct test_case *b)
{
  return a->routing == b->routing && a->data == b->data;
}

/* Index of the first kind in 'kinds' that 'tc' is of; 'count' if it is new. */
static int kind_of(const struct test_case *kinds, int count, const struct test_case *tc)
{
  int i = 0;
  while(i < count && !same_kind(&kinds[i], tc))
    i++;
  return i;
}

static bool listed(const struct test_case *cases, int count, const struct test_case *tc)
{
  for(int i = 0; i < count; i++)
    if(memcmp(&cases[i], tc, sizeof(*tc)) == 0)
      return true;
  return false;
}

/* The case of this kind at a token count as near behind counts[from] as there is one (around the end). */
static const struct test_case *case_at(const struct test_case *all, int nall, const struct test_case *kind, const int *counts, int ncounts, int from)
{
  for(int step = 0; step < ncounts; step++)
    for(int i = 0; i < nall; i++)
      if(all[i].tokens == counts[(from + step) % ncounts] && same_kind(&all[i], kind))
        return &all[i];
  return NULL;
}

int tune_emulated_cases(struct test_case *cases, int count)
{
  struct test_case kinds[CHECK_MAX_CASES], chosen[CHECK_MAX_CASES] = {{0}};
  int counts[MAX_TOKENS], ncounts = 0, nkinds = 0, nchosen = 0, turns;
  for(int i = 0; i < count; i++) {
    if(ncounts == 0 || counts[ncounts - 1] != cases[i].tokens)
      counts[ncounts++] = cases[i].tokens;
    if(kind_of(kinds, nkinds, &cases[i]) == nkinds)
      kinds[nkinds++] = cases[i];
  }
  turns = ncounts > nkinds ? ncounts : nkinds;
  for(int turn = 0; turn < turns; turn++) {
    const struct test_case *tc = case_at(cases, count, &kinds[turn % nkinds], counts, ncounts, turn % ncounts);
    if(tc != NULL && !listed(chosen, nchosen, tc))
      chosen[nchosen++] = *tc;
  }
  memcpy(cases, chosen, (size_t)nchosen * sizeof(*cases));
  return nchosen;
}

/* ---- candidates ---- */
struct cover {
  const struct job *job;
  bool *artifact;                          /* executed */
  bool value[MAX_FAMILIES][MAX_KNOBS][KNOB_MAX_VALUES]; /* of the recipe's knobs */
};

static int value_index(const struct knob *knob, int value)
{
  int i = 0;
  while(i < knob->nvalues - 1 && knob->values[i] != value)
    i++;
  return i;
}

/* The family's place among all. */
static int family_index(const struct family_ops *family)
{
  const struct family_ops *const *all = families_all();
  int i = 0;
  while(i < MAX_FAMILIES - 1 && all[i] != NULL && all[i] != family)
    i++;
  return i;
}

/* How much candidate i would add to what is covered; 'take': it does. */
static int cover_gain(struct cover *c, size_t i, bool take)
{
  const struct schedule *sched = &c->job->list.items[i].schedule;
  bool *artifact = &c->artifact[c->job->artifact_of[i]];
  int gain = *artifact ? 0 : 1;
  *artifact = *artifact || take;
  for(int k = 0; k < sched->family->nknobs; k++) {
    const struct knob *knob = &sched->family->knobs[k];
    bool *covered = &c->value[family_index(sched->family)][k][value_index(knob, sched->value[k])];
    gain += !knob->compile_time && !*covered;
    *covered = *covered || take;
  }
  return gain;
}

static void execute_one(struct cover *c, bool *execute, size_t i)
{
  execute[i] = true;
  cover_gain(c, i, true);
}

/* Adds, one after the other, the candidate that covers the most that is not covered yet. */
static void cover_rest(struct cover *c, bool *execute)
{
  for(;;) {
    size_t best = 0;
    int most = 0;
    for(size_t i = 0; i < c->job->list.count; i++) {
      const int gain = execute[i] ? 0 : cover_gain(c, i, false);
      if(gain > most) {
        most = gain;
        best = i;
      }
    }
    if(most == 0)
      return;
    execute_one(c, execute, best);
  }
}

/* The default schedules, and who wins by the cost model. */
static enum mf_status execute_winners(const struct tuner *t, const struct job *job, struct cover *c, bool *execute, struct error *err)
{
  struct winner winners[MAX_TOKEN_COUNTS];
  int count = 0;
  const enum mf_status rc = select_predicted(&job->spec, job->tokens, job->ntokens, &t->target.dev, job->list.items, job->list.count, winners, &count, err);
  if(rc != MF_OK)
    return rc;
  for(size_t i = 0; i < job->list.count; i++) {
    bool wanted = job->list.items[i].is_default;
    for(int w = 0; w < count && !wanted; w++)
      wanted = strcmp(winners[w].schedule_name, job->list.items[i].name) == 0;
    if(wanted)
      execute_one(c, execute, i);
  }
  return MF_OK;
}

static enum mf_status note_unexecuted(const struct tuner *t, struct job *job, const bool *execute, struct error *err)
{
  const struct verdict why = {.stage = "check", .rule = NOT_EXECUTED, .nearest = -1,
                              .detail = "not run on the emulated device, so that it cannot win (--effort exhaustive runs all)"};
  enum mf_status rc = store_begin(t->store, err);
  for(size_t i = 0; i < job->list.count && rc == MF_OK; i++) {
    if(execute[i])
      continue;
    job->unexecuted++;
    rc = store_put_reject(t->store, t->run_id, job->shape_id, t->device_id, job->list.items[i].name, &why, err);
  }
  if(rc == MF_OK)
    return store_commit(t->store, err);
  store_rollback(t->store);
  return rc;
}

static enum mf_status choose(struct tuner *t, struct job *job, struct cover *c, bool *execute, struct error *err)
{
  enum mf_status rc = execute_winners(t, job, c, execute, err);
  if(rc == MF_OK && t->opt->effort != EFFORT_QUICK)
    cover_rest(c, execute);
  if(rc == MF_OK)
    rc = note_unexecuted(t, job, execute, err);
  if(rc == MF_OK)
    job_keep(job, execute);
  return rc;
}

enum mf_status tune_emulated_choice(struct tuner *t, struct job *job, struct error *err)
{
  struct cover c = {.job = job};
  bool *execute;
  enum mf_status rc = MF_ERR_NOMEM;
  if(t->opt->effort == EFFORT_EXHAUSTIVE)
    return MF_OK;
  execute = calloc(job->list.count, sizeof(*execute));
  c.artifact = calloc(job->nartifacts, sizeof(*c.artifact));
  if(execute == NULL || c.artifact == NULL)
    error_set(err, rc, "out of memory");
  else
    rc = choose(t, job, &c, execute, err);
  free(c.artifact);
  free(execute);
  return rc;
}
