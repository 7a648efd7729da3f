/* select.c - from timing rows to winners; see select.h for the rules.
 *
 * Two passes over a table tie[token count][candidate]: who may win at each count; who does, with the counts around it in view. Only objectives are compared, so measured and predicted rows go the same way. */
#include "select.h"
#include "datagen.h"
#include "family.h"
#include "spec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct selection {
  const struct model_spec *spec;
  const int *tokens;
  int ntokens;
  const struct candidate *candidates;
  size_t count;
  const struct timing_row *const *rows;
  bool *tie;                          /* [ntokens][count] */
  double best_us[MAX_TOKEN_COUNTS];
  size_t standard[MAX_TOKEN_COUNTS];  /* the default schedule; 'count' if it is no finalist */
  size_t chosen[MAX_TOKEN_COUNTS];
};

static bool eligible(const struct selection *sel, int t, size_t i)
{
  const struct timing_row *row = &sel->rows[t][i];
  return row->finalist && isfinite(row->objective_us) && timing_takes_tokens(&sel->candidates[i], sel->tokens[t]);
}

static bool *tie_at(const struct selection *sel, int t, size_t i)
{
  return &sel->tie[(size_t)t * sel->count + i];
}

/* Best objective and default schedule of token count t. */
static enum mf_status survey(struct selection *sel, int t, struct error *err)
{
  size_t i;
  sel->best_us[t] = (double)INFINITY;
  sel->standard[t] = sel->count;
  for(i = 0; i < sel->count; i++) {
    const double us = sel->rows[t][i].objective_us;
    if(!eligible(sel, t, i))
      continue;
    if(us < sel->best_us[t])
      sel->best_us[t] = us;
    if(sel->rows[t][i].is_default && (sel->standard[t] == sel->count || us < sel->rows[t][sel->standard[t]].objective_us))
      sel->standard[t] = i;
  }
  if(isinf(sel->best_us[t]))
    return error_set(err, MF_ERR_NOT_FOUND, "%s: no candidate was timed at %d tokens", sel->spec->name, sel->tokens[t]);
  return MF_OK;
}

static bool ties(const struct selection *sel, int t, size_t i)
{
  const struct timing_row *row = &sel->rows[t][i];
  const double best = sel->best_us[t];
  if(!eligible(sel, t, i))
    return false;
  if(sel->standard[t] < sel->count && row->objective_us > sel->rows[t][sel->standard[t]].objective_us)
    return false;
  return row->objective_us <= best * TIE_RATIO || (row->objective_low <= best && row->objective_us <= best * TIE_MAX_RATIO);
}

/* How many token counts next to t, without a gap, the candidate ties at too. */
static int neighbours(const struct selection *sel, int t, size_t i)
{
  int low = t, high = t;
  while(low > 0 && *tie_at(sel, low - 1, i))
    low--;
  while(high < sel->ntokens - 1 && *tie_at(sel, high + 1, i))
    high++;
  return high - low;
}

static int ring_stages(const struct candidate *cand)
{
  int knob = cand->schedule.family != NULL ? family_knob(cand->schedule.family, "ring_stages") : -1;
  return knob >= 0 ? cand->schedule.value[knob] : 0;
}

/* Whether tie 'a' is to be preferred to tie 'b' at token count t. */
static bool preferred(const struct selection *sel, int t, size_t a, size_t b)
{
  const struct candidate *left = &sel->candidates[a], *right = &sel->candidates[b];
  const int reach = neighbours(sel, t, a) - neighbours(sel, t, b);
  const int stages = ring_stages(left) - ring_stages(right);
  if(reach != 0)
    return reach > 0;
  if(stages != 0)
    return stages < 0;
  if(left->recipe.shared_bytes != right->recipe.shared_bytes)
    return left->recipe.shared_bytes < right->recipe.shared_bytes;
  return strcmp(left->name, right->name) < 0;
}

static size_t choose(const struct selection *sel, int t)
{
  size_t i, winner = sel->count;
  const size_t standard = sel->standard[t];
  if(standard < sel->count && sel->rows[t][standard].objective_us <= sel->best_us[t] * TIE_RATIO)
    return standard;
  for(i = 0; i < sel->count; i++)
    if(*tie_at(sel, t, i) && (winner == sel->count || preferred(sel, t, i, winner)))
      winner = i;
  return winner;
}

/* The worst, over the routing inputs, of the candidate's time against the fastest finalist's. */
static double worst_regret(const struct selection *sel, int t, size_t chosen)
{
  double worst = 1;
  size_t i;
  int r;
  for(r = 0; r < sel->spec->nmix; r++) {
    double best = (double)INFINITY;
    for(i = 0; i < sel->count; i++)
      if(eligible(sel, t, i) && sel->rows[t][i].median_us[r] < best)
        best = sel->rows[t][i].median_us[r];
    if(sel->rows[t][chosen].median_us[r] / best > worst)
      worst = sel->rows[t][chosen].median_us[r] / best;
  }
  return worst;
}

/* First token count of the interval that ends at tokens[t]: after the next smaller count of the spec or of this call, as far as the kernel goes. */
static int interval_start(const struct selection *sel, int t)
{
  const uint32_t least = sel->candidates[sel->chosen[t]].recipe.tokens_min;
  int i, below = t > 0 ? sel->tokens[t - 1] : 0, start;
  for(i = 0; i < sel->spec->ntokens; i++)
    if(sel->spec->tokens[i] < sel->tokens[t] && sel->spec->tokens[i] > below)
      below = sel->spec->tokens[i];
  start = below > 0 ? below + 1 : sel->tokens[t];
  return start < (int)least ? (int)least : start;
}

static void fill_times(const struct selection *sel, int t, struct winner *win)
{
  const struct timing_row *row = &sel->rows[t][sel->chosen[t]];
  win->tokens_max = win->tokens_timed = sel->tokens[t];
  win->us = row->objective_us;
  win->us_low = row->objective_low;
  win->us_high = row->objective_high;
  win->floor_us = row->objective_floors.copy_us;
  win->floors = row->objective_floors;
  win->default_us = sel->standard[t] < sel->count ? sel->rows[t][sel->standard[t]].objective_us : 0;
  win->regret = worst_regret(sel, t, sel->chosen[t]);
}

static void fill_winner(const struct selection *sel, int t, struct winner *win)
{
  const struct candidate *cand = &sel->candidates[sel->chosen[t]];
  memset(win, 0, sizeof(*win));
  win->candidate_id = cand->id;
  snprintf(win->schedule_name, sizeof(win->schedule_name), "%s", cand->name);
  win->tokens_min = interval_start(sel, t);
  fill_times(sel, t, win);
}

static enum mf_status check_tokens(const struct model_spec *spec, const int *tokens, int ntokens, size_t count, struct error *err)
{
  int t;
  if(ntokens < 1 || ntokens > MAX_TOKEN_COUNTS || count == 0)
    return error_set(err, MF_ERR_INTERNAL, "%s: selecting among %zu candidates at %d token counts", spec->name, count, ntokens);
  for(t = 0; t < ntokens; t++)
    if(tokens[t] < 1 || (t > 0 && tokens[t] <= tokens[t - 1]))
      return error_set(err, MF_ERR_INTERNAL, "%s: expected ascending token counts, got %d after %d", spec->name, tokens[t], t > 0 ? tokens[t - 1] : 0);
  return MF_OK;
}

enum mf_status select_winners(const struct model_spec *spec, const int *tokens, int ntokens, const struct candidate *candidates, size_t count,
                              const struct timing_row *const *rows, struct winner *winners, int *nwinners, struct error *err)
{
  struct selection sel = {.spec = spec, .tokens = tokens, .ntokens = ntokens, .candidates = candidates, .count = count, .rows = rows};
  enum mf_status rc = check_tokens(spec, tokens, ntokens, count, err);
  size_t i;
  int t;
  *nwinners = 0;
  if(rc != MF_OK)
    return rc;
  sel.tie = calloc((size_t)ntokens * count, sizeof(*sel.tie));
  if(sel.tie == NULL)
    return error_set(err, MF_ERR_NOMEM, "%s: out of memory", spec->name);
  for(t = 0; t < ntokens && rc == MF_OK; t++) {
    rc = survey(&sel, t, err);
    for(i = 0; i < count && rc == MF_OK; i++)
      *tie_at(&sel, t, i) = ties(&sel, t, i);
  }
  for(t = 0; t < ntokens && rc == MF_OK; t++) {
    sel.chosen[t] = choose(&sel, t);
    fill_winner(&sel, t, &winners[(*nwinners)++]);
  }
  free(sel.tie);
  return rc;
}

/* ---- from the cost model ---- */
static double floor_us(const struct mf_problem *problem, const struct device_info *dev, double active)
{
  const double bytes = active * problem_expert_bytes(problem);
  return dev->launch_us + (dev->bandwidth_gbps > 0 ? bytes / (dev->bandwidth_gbps * 1e3) : 0);
}

double select_floor_us(const struct model_spec *spec, int tokens, const struct device_info *dev)
{
  double sum = 0;
  int r;
  for(r = 0; r < spec->nmix; r++)
    sum += spec->mix[r].weight * floor_us(&spec->problem, dev, data_expected_active(&spec->problem, tokens, spec->mix[r].kind));
  return sum;
}

static enum mf_status predict_row(const struct model_spec *spec, int tokens, const struct device_info *dev, const struct candidate *cand, const double *active,
                                  struct timing_row *row, struct error *err)
{
  const struct family_ops *family = cand->schedule.family;
  struct schedule standard = {.family = family};
  int r;
  if(family == NULL || family->predict_us == NULL)
    return error_set(err, MF_ERR_INTERNAL, "%s: %s has no cost model", spec->name, cand->name);
  memset(row, 0, sizeof(*row));
  row->finalist = timing_takes_tokens(cand, tokens);
  if(!row->finalist)
    return MF_OK;
  family->default_schedule(&spec->problem, tokens, dev, &standard);
  row->is_default = schedule_equal(&standard, &cand->schedule);
  for(r = 0; r < spec->nmix; r++) {
    const double us = family->predict_us(&spec->problem, &cand->schedule, dev, tokens, active[r]);
    row->median_us[r] = row->low_us[r] = row->high_us[r] = us;
    row->floors[r] = (struct floor_times){floor_us(&spec->problem, dev, active[r]), NAN};
    row->objective_us += spec->mix[r].weight * us;
    row->objective_floors.copy_us += spec->mix[r].weight * row->floors[r].copy_us;
  }
  row->objective_low = row->objective_high = row->objective_us;
  return MF_OK;
}

static enum mf_status predict_rows(const struct model_spec *spec, int tokens, const struct device_info *dev, const struct candidate *candidates, size_t count,
                                   struct timing_row *rows, struct error *err)
{
  double active[MAX_ROUTING_MIX] = {0};
  enum mf_status rc = MF_OK;
  size_t i;
  int r;
  for(r = 0; r < spec->nmix; r++)
    active[r] = data_expected_active(&spec->problem, tokens, spec->mix[r].kind);
  for(i = 0; i < count && rc == MF_OK; i++) {
    rc = predict_row(spec, tokens, dev, &candidates[i], active, &rows[i], err);
    rows[i].candidate = i;
  }
  return rc;
}

enum mf_status select_predicted(const struct model_spec *spec, const int *tokens, int ntokens, const struct device_info *dev,
                                const struct candidate *candidates, size_t count, struct winner *winners, int *nwinners, struct error *err)
{
  struct timing_row *rows[MAX_TOKEN_COUNTS] = {NULL};
  enum mf_status rc = check_tokens(spec, tokens, ntokens, count, err);
  int t, i;
  *nwinners = 0;
  for(t = 0; rc == MF_OK && t < ntokens; t++) {
    rows[t] = calloc(count, sizeof(*rows[t]));
    if(rows[t] == NULL) {
      rc = error_set(err, MF_ERR_NOMEM, "%s: out of memory", spec->name);
      goto out;
    }
    rc = predict_rows(spec, tokens[t], dev, candidates, count, rows[t], err);
  }
  if(rc == MF_OK)
    rc = select_winners(spec, tokens, ntokens, candidates, count, (const struct timing_row *const *)rows, winners, nwinners, err);
  for(i = 0; i < *nwinners; i++) {
    winners[i].predicted = true;
    winners[i].floors = (struct floor_times){NAN, NAN}; /* by formula only */
  }
out:
  for(t = 0; t < MAX_TOKEN_COUNTS; t++)
    free(rows[t]);
  return rc;
}
