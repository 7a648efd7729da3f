/* space.c - see space.h. Enumeration is a walk over knob vectors; what may not stay is decided by limits_before_compile() alone. */
#include "space.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "limits.h"

#define SPACE_MAX_CANDIDATES 65536

struct walk {
  const struct mf_problem *problem;
  const struct device_info *dev;
  struct candidate_list *list;
  space_reject_fn *reject;
  void *context;
  struct error *err;
  size_t first;              /* list->items[first...] are of this call */
  struct schedule *rejected; /* seen and rejected, so that each is reported once */
  size_t nrejected, rejected_space;
};

static bool listed(const struct walk *w, const struct schedule *sched)
{
  for(size_t i = w->first; i < w->list->count; i++) {
    if(schedule_equal(&w->list->items[i].schedule, sched))
      return true;
  }
  for(size_t i = 0; i < w->nrejected; i++) {
    if(schedule_equal(&w->rejected[i], sched))
      return true;
  }
  return false;
}

static enum mf_status remember_reject(struct walk *w, const struct schedule *sched, const struct verdict *why)
{
  if(w->nrejected == w->rejected_space) {
    const size_t space = w->rejected_space > 0 ? 2 * w->rejected_space : 64;
    struct schedule *grown = realloc(w->rejected, space * sizeof(*grown));
    if(grown == NULL)
      return error_set(w->err, MF_ERR_NOMEM, "out of memory for %zu schedules", space);
    w->rejected = grown;
    w->rejected_space = space;
  }
  w->rejected[w->nrejected++] = *sched;
  if(w->reject != NULL)
    w->reject(w->context, sched, why);
  return MF_OK;
}

static enum mf_status append_candidate(struct walk *w, const struct schedule *sched, bool is_default)
{
  struct candidate_list *list = w->list;
  struct candidate *cand;
  enum mf_status rc;
  if(list->count == list->space) {
    const size_t space = list->space > 0 ? 2 * list->space : 64;
    struct candidate *grown = space > SPACE_MAX_CANDIDATES ? NULL : realloc(list->items, space * sizeof(*grown));
    if(grown == NULL)
      return error_set(w->err, MF_ERR_NOMEM, "out of memory for %zu candidates (at most %d)", space, SPACE_MAX_CANDIDATES);
    list->items = grown;
    list->space = space;
  }
  cand = &list->items[list->count];
  memset(cand, 0, sizeof(*cand));
  cand->schedule = *sched;
  cand->is_default = is_default;
  schedule_name(sched, cand->name, sizeof(cand->name));
  schedule_artifact_name(sched, cand->artifact_name, sizeof(cand->artifact_name));
  rc = sched->family->recipe(w->problem, sched, w->dev, &cand->recipe, w->err);
  if(rc != MF_OK)
    return rc;
  list->count++;
  return MF_OK;
}

/* Adds one schedule, unless it is known already or a rule rejects it. */
static enum mf_status consider(struct walk *w, const struct schedule *sched, bool is_default)
{
  struct verdict why;
  enum mf_status rc;
  if(listed(w, sched))
    return MF_OK;
  w->list->considered++;
  rc = limits_before_compile(w->problem, sched, w->dev, &why);
  if(rc == MF_REJECTED)
    return remember_reject(w, sched, &why);
  if(rc != MF_OK)
    return error_set(w->err, rc, "%s", why.detail);
  return append_candidate(w, sched, is_default);
}

/* The product over the knobs for which 'select' is true, the others as in 'base': what the family offers of it. */
static enum mf_status product(struct walk *w, const struct schedule *base, const bool *select)
{
  const struct family_ops *family = base->family;
  struct schedule sched = *base;
  int digit[MAX_KNOBS] = {0};
  for(;;) {
    int k;
    enum mf_status rc = MF_OK;
    for(k = 0; k < family->nknobs; k++) {
      if(select[k])
        sched.value[k] = family->knobs[k].values[digit[k]];
    }
    if(family->offers == NULL || family->offers(w->problem, &sched, w->dev))
      rc = consider(w, &sched, false);
    if(rc != MF_OK)
      return rc;
    for(k = 0; k < family->nknobs; k++) { /* the next digit vector, first knob fastest */
      if(!select[k])
        continue;
      if(++digit[k] < family->knobs[k].nvalues)
        break;
      digit[k] = 0;
    }
    if(k == family->nknobs)
      return MF_OK;
  }
}

/* Each knob for which 'select' is true alone, the others as in 'base'; where the knob says so with all values of 'kernels'. */
static enum mf_status one_at_a_time(struct walk *w, const struct schedule *base, const bool *select, const bool *kernels)
{
  for(int k = 0; k < base->family->nknobs; k++) {
    bool only[MAX_KNOBS] = {false};
    enum mf_status rc;
    if(!select[k])
      continue;
    if(base->family->knobs[k].together && !w->dev->emulated) /* what wins together is a matter of time, which an emulated device has not */
      memcpy(only, kernels, sizeof(only));
    only[k] = true;
    rc = product(w, base, only);
    if(rc != MF_OK)
      return rc;
  }
  return MF_OK;
}

static enum mf_status walk_from_default(struct walk *w, const struct schedule *base, enum effort effort)
{
  const struct family_ops *family = base->family;
  bool primary[MAX_KNOBS] = {false}, arguments[MAX_KNOBS] = {false}, kernels[MAX_KNOBS] = {false}, secondary[MAX_KNOBS] = {false}, all[MAX_KNOBS] = {false};
  enum mf_status rc;
  for(int k = 0; k < family->nknobs; k++) {
    if(family->knobs[k].nvalues == 0)
      continue;
    primary[k] = family->knobs[k].primary;
    arguments[k] = family->knobs[k].primary && (!family->knobs[k].compile_time || family->knobs[k].quick);
    kernels[k] = family->knobs[k].primary && family->knobs[k].compile_time;
    secondary[k] = !family->knobs[k].primary;
    all[k] = true;
  }
  switch(effort) {
    case EFFORT_QUICK: return one_at_a_time(w, base, arguments, kernels);
    case EFFORT_DEFAULT:
      rc = product(w, base, primary);
      return rc != MF_OK ? rc : one_at_a_time(w, base, secondary, kernels);
    case EFFORT_EXHAUSTIVE: return product(w, base, all);
  }
  return MF_ERR_INTERNAL;
}

/* The default of each family that serves this token count, or the walk around it. */
static enum mf_status walk_count(struct walk *w, int tokens, enum effort effort, bool defaults)
{
  for(const struct family_ops *const *f = families_all(); *f != NULL; f++) {
    struct schedule base = {.family = *f};
    struct verdict why;
    enum mf_status rc;
    if((*f)->serves(w->problem, tokens, w->dev, &why) != MF_OK)
      continue;
    (*f)->default_schedule(w->problem, tokens, w->dev, &base);
    rc = defaults ? consider(w, &base, true) : walk_from_default(w, &base, effort);
    if(rc != MF_OK)
      return rc;
  }
  return MF_OK;
}

/* Whether some family serves this token count. If not, *why is the reason of one that is there for such counts, if there is one. */
static bool is_served(const struct mf_problem *problem, int tokens, const struct device_info *dev, struct verdict *why)
{
  memset(why, 0, sizeof(*why));
  for(const struct family_ops *const *f = families_all(); *f != NULL; f++) {
    struct verdict one = {0};
    if((*f)->serves(problem, tokens, dev, &one) == MF_OK)
      return true;
    if(why->rule == NULL || strcmp(why->rule, "tokens") == 0)
      *why = one;
  }
  return false;
}

enum mf_status space_enumerate(const struct mf_problem *problem, const struct device_info *dev, int tokens_lo, int tokens_hi, enum effort effort,
                               struct candidate_list *list, space_reject_fn *reject, void *context, struct error *err)
{
  int tokens[MAX_TOKENS], ntokens = 0;
  for(int t = tokens_lo; t <= tokens_hi && ntokens < MAX_TOKENS; t++)
    tokens[ntokens++] = t;
  return space_enumerate_counts(problem, dev, tokens, ntokens, effort, list, reject, context, err);
}

/* Defaults of all token counts first (so that they lead the list), then the walk around each. */
enum mf_status space_enumerate_counts(const struct mf_problem *problem, const struct device_info *dev, const int *tokens, int ntokens, enum effort effort,
                                      struct candidate_list *list, space_reject_fn *reject, void *context, struct error *err)
{
  struct walk w = {.problem = problem, .dev = dev, .list = list, .reject = reject, .context = context, .err = err, .first = list->count};
  struct verdict why = {0};
  enum mf_status rc = MF_OK;
  for(int i = 0; i < ntokens; i++) {
    char nearest[48] = "";
    if(is_served(problem, tokens[i], dev, &why))
      continue;
    if(why.rule != NULL && why.nearest >= 0)
      snprintf(nearest, sizeof(nearest), " (nearest legal value %ld)", why.nearest);
    return error_set(err, MF_ERR_UNSUPPORTED, "no kernel family serves this shape for %d tokens: rule %s: %s%s", tokens[i], why.rule != NULL ? why.rule : "none",
                     why.detail, nearest);
  }
  for(int i = 0; i < 2 * ntokens && rc == MF_OK; i++)
    rc = walk_count(&w, tokens[i % ntokens], effort, i < ntokens);
  if(rc == MF_OK && list->count == w.first)
    rc = error_set(err, MF_ERR_UNSUPPORTED, "every schedule is over a limit of %s (see `moeforge plan`)", dev->name);
  free(w.rejected);
  return rc;
}

/* Whether the candidate takes one of these token counts: its family may serve them with other schedules only. */
static bool takes_any(const struct candidate *cand, const int *tokens, int ntokens)
{
  for(int i = 0; i < ntokens; i++)
    if((uint32_t)tokens[i] >= cand->recipe.tokens_min && (uint32_t)tokens[i] <= cand->recipe.tokens_max)
      return true;
  return false;
}

static enum mf_status consider_named(struct walk *w, const char *name, const int *tokens, int ntokens)
{
  struct schedule sched;
  struct verdict why = {.detail = "no token count is asked for"};
  const size_t before = w->list->count;
  bool wanted = false;
  enum mf_status rc = schedule_parse(name, &sched, w->err);
  if(rc != MF_OK)
    return rc;
  for(int i = 0; i < ntokens && !wanted; i++)
    wanted = sched.family->serves(w->problem, tokens[i], w->dev, &why) == MF_OK;
  if(!wanted)
    return error_set(w->err, MF_ERR_UNSUPPORTED, "schedule %s: %s", name, why.detail);
  rc = limits_before_compile(w->problem, &sched, w->dev, &why);
  if(rc != MF_OK)
    return error_set(w->err, rc, "schedule %s: rule %s: %s", name, why.rule != NULL ? why.rule : "none", why.detail);
  rc = consider(w, &sched, false);
  if(rc == MF_OK && w->list->count > before && !takes_any(&w->list->items[before], tokens, ntokens)) {
    const struct candidate *cand = &w->list->items[--w->list->count];
    rc = error_set(w->err, MF_ERR_UNSUPPORTED, "schedule %s takes %u to %u tokens: none of those asked for", cand->name, (unsigned)cand->recipe.tokens_min, (unsigned)cand->recipe.tokens_max);
  }
  return rc;
}

enum mf_status space_enumerate_names(const struct mf_problem *problem, const struct device_info *dev, const int *tokens, int ntokens, const char *names,
                                     struct candidate_list *list, struct error *err)
{
  struct walk w = {.problem = problem, .dev = dev, .list = list, .err = err, .first = list->count};
  char *text = strdup(names), *rest = text, *name;
  enum mf_status rc = text != NULL ? MF_OK : error_set(err, MF_ERR_NOMEM, "out of memory");
  while(rc == MF_OK && (name = strsep(&rest, ",")) != NULL)
    rc = name[0] != '\0' ? consider_named(&w, name, tokens, ntokens) : MF_OK;
  if(rc == MF_OK && list->count == w.first)
    rc = error_set(err, MF_ERR_USAGE, "no schedule is named");
  free(text);
  free(w.rejected);
  return rc == MF_OK ? MF_OK : error_prefix(err, "--schedule");
}

enum mf_status space_add(const struct mf_problem *problem, const struct device_info *dev, const int *tokens, int ntokens, const struct schedule *sched,
                         struct candidate_list *list, struct error *err)
{
  struct walk w = {.problem = problem, .dev = dev, .list = list, .err = err};
  struct verdict why;
  bool wanted = false;
  enum mf_status rc;
  for(int i = 0; i < ntokens && !wanted; i++)
    wanted = sched->family->serves(problem, tokens[i], dev, &why) == MF_OK;
  if(!wanted || limits_before_compile(problem, sched, dev, &why) != MF_OK || listed(&w, sched))
    return MF_OK;
  rc = append_candidate(&w, sched, false);
  if(rc == MF_OK && !takes_any(&list->items[list->count - 1], tokens, ntokens))
    list->count--;
  else if(rc == MF_OK)
    list->considered++;
  return rc;
}

void candidate_list_free(struct candidate_list *list)
{
  free(list->items);
  memset(list, 0, sizeof(*list));
}

static const char *const effort_names[] = {"quick", "default", "exhaustive"};

enum mf_status effort_from_name(const char *name, enum effort *out, struct error *err)
{
  for(int i = 0; i < 3; i++) {
    if(strcmp(name, effort_names[i]) == 0) {
      *out = (enum effort)i;
      return MF_OK;
    }
  }
  return error_set(err, MF_ERR_USAGE, "--effort: expected quick, default or exhaustive, got \"%s\"", name);
}

const char *effort_name(enum effort effort)
{
  return (unsigned)effort < 3 ? effort_names[effort] : "?";
}
