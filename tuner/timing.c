/* timing.c - races candidates in interleaved rounds; see timing.h for what is compared with what.
 *
 * One token count, four routing inputs:
 *
 *   profile       uniform                     zipf                        concentrated, dispersed
 *   rounds        0..2 heat | 3..11 final     0 heat    | 3..11 final     likewise
 *   candidates    all       | finalists       survivors | finalists       survivors | finalists
 *
 * A *grid* holds one profile: for each candidate and round a sample, known or measured. Filling in a grid goes round by round; the candidates
 * that lack the round are the ones that run in it. In a fresh run that is everybody alive; after an interruption it is everybody from the first missing
 * round on; beside a new candidate the others need not run again. The device is asked to open a profile only when that set changes, since opening
 * builds a graph for each candidate. */
#include "timing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define KNOWN_PER_ROUND 8 /* samples of one round that the sink may hand over: runs with --retime repeat rounds */

void timing_policy_default(struct timing_policy *policy)
{
  policy->heat_rounds = 3;
  policy->second_heat_rounds = 1;
  policy->final_rounds = 9; /* the interval of the median is then the 2nd to the 8th value: 96 % */
  policy->launches = 24;
  policy->leave_ratio = 1.06;
  policy->max_finalists = 12;
  policy->seed = 1;
}

bool timing_takes_tokens(const struct candidate *cand, int tokens)
{
  const uint32_t most = cand->recipe.tokens_max;
  return tokens > 0 && (uint32_t)tokens >= cand->recipe.tokens_min && (most == 0 || (uint32_t)tokens <= most);
}

/* ---- statistics ---- */
static int compare_doubles(const void *a, const void *b)
{
  const double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

/* The largest k, counted from 1, so that the k-th smallest and the k-th largest of 'count' values enclose the median with 95 %: the chance that fewer
 * than k of them lie below the median is at most 2.5 %, binomial with p = 1/2. 0 if not even the extremes do. */
static size_t interval_rank(size_t count)
{
  double term, below;
  size_t rank = 0;
  if(count > 1000) /* 2^-count would underflow; the normal approximation is exact enough here */
    return (size_t)(0.5 * (double)count - 0.98 * sqrt((double)count));
  term = exp2(-(double)count);
  below = term;
  while(below <= 0.025) {
    rank++;
    term = term * (double)(count - rank + 1) / (double)rank;
    below += term;
  }
  return rank;
}

void timing_median(double *values, size_t count, double *median, double *low, double *high)
{
  size_t rank;
  *median = *low = *high = (double)NAN;
  if(count == 0)
    return;
  qsort(values, count, sizeof(*values), compare_doubles);
  rank = interval_rank(count);
  if(rank == 0)
    rank = 1;
  *median = 0.5 * (values[(count - 1) / 2] + values[count / 2]);
  *low = values[rank - 1];
  *high = values[count - rank];
}

/* ---- one timing ---- */
struct cell {
  double us; /* 0: no sample */
  struct floor_times floors;
};

struct race {
  const struct timing_policy *policy;
  const struct model_spec *spec;
  int tokens;
  const struct candidate *candidates;
  size_t count;
  const struct timing_device *dev;
  const struct timing_sink *sink;
  int rounds;                /* of a grid: heat and final */
  bool *alive;               /* per candidate */
  struct cell *grid;         /* [count][rounds] of the profile at hand */
  size_t *runners, *opened;  /* candidates of the next round; of the device's open profile */
  size_t nopened;
  double *us, *scratch;      /* count; count * rounds */
  struct sample *samples;    /* count, or what the sink knows of one candidate */
  size_t done, total;        /* rounds, for keep_going */
};

static struct cell *cell_of(const struct race *race, size_t candidate, int round)
{
  return &race->grid[candidate * (size_t)race->rounds + (size_t)round];
}

static bool plausible(double us, double floor_us)
{
  return isfinite(us) && isfinite(floor_us) && us > 0 && floor_us > 0;
}

/* Starts the grid of a profile with what earlier runs have measured. */
static void load_known(struct race *race, enum routing_kind routing)
{
  const size_t max = (size_t)race->rounds * KNOWN_PER_ROUND;
  size_t i, j, known;
  memset(race->grid, 0, race->count * (size_t)race->rounds * sizeof(*race->grid));
  race->nopened = 0;
  for(i = 0; i < race->count && race->sink->known != NULL; i++) {
    if(!race->alive[i])
      continue;
    known = race->sink->known(race->sink->context, race->candidates[i].id, race->tokens, routing, race->policy->seed, race->samples, max);
    for(j = 0; j < known && j < max; j++) {
      const struct sample *smp = &race->samples[j];
      if(smp->round >= 0 && smp->round < race->rounds && plausible(smp->us, smp->floors.copy_us))
        *cell_of(race, i, smp->round) = (struct cell){smp->us, smp->floors};
    }
  }
}

/* Puts the candidates that lack 'round' into race->runners. */
static size_t choose_runners(struct race *race, int round)
{
  size_t i, count = 0;
  for(i = 0; i < race->count; i++)
    if(race->alive[i] && cell_of(race, i, round)->us <= 0)
      race->runners[count++] = i;
  return count;
}

static enum mf_status open_for(struct race *race, size_t count, enum routing_kind routing, struct error *err)
{
  enum mf_status rc;
  if(race->nopened == count && memcmp(race->opened, race->runners, count * sizeof(*race->opened)) == 0)
    return MF_OK;
  race->nopened = 0;
  rc = race->dev->open_profile(race->dev->context, race->runners, count, race->tokens, routing, race->policy->seed, race->policy->launches, err);
  if(rc == MF_OK) {
    memcpy(race->opened, race->runners, count * sizeof(*race->opened));
    race->nopened = count;
  }
  return rc;
}

/* Hands a measured round to the sink, then to the grid. */
static enum mf_status keep_round(struct race *race, int round, size_t count, enum routing_kind routing, struct floor_times floors, struct error *err)
{
  enum mf_status rc;
  size_t i;
  for(i = 0; i < count; i++) {
    if(!plausible(race->us[i], floors.copy_us))
      return error_set(err, MF_ERR_DEVICE, "the device reports %g us for %s and %g us for the floor kernel (B=%d %s round %d), expected more than 0",
                       race->us[i], race->candidates[race->runners[i]].name, floors.copy_us, race->tokens, routing_name(routing), round);
    race->samples[i] = (struct sample){.candidate_id = race->candidates[race->runners[i]].id, .tokens = race->tokens, .routing = routing,
                                       .seed = race->policy->seed, .round = round, .us = race->us[i], .floors = floors};
  }
  rc = race->sink->samples(race->sink->context, race->samples, count, err);
  for(i = 0; i < count && rc == MF_OK; i++)
    *cell_of(race, race->runners[i], round) = (struct cell){race->us[i], floors};
  return rc;
}

static enum mf_status run_round(struct race *race, int round, enum routing_kind routing, struct error *err)
{
  const size_t count = choose_runners(race, round);
  struct floor_times floors = {0, NAN};
  double active = 0;
  enum mf_status rc;
  if(count == 0)
    return MF_OK;
  rc = open_for(race, count, routing, err);
  if(rc == MF_OK)
    rc = race->dev->round(race->dev->context, round, race->us, &floors, &active, err);
  return rc == MF_OK ? keep_round(race, round, count, routing, floors, err) : rc;
}

/* Fills in rounds first..end-1 of the grid. */
static enum mf_status run_rounds(struct race *race, const char *what, int first, int end, enum routing_kind routing, struct error *err)
{
  enum mf_status rc = MF_OK;
  int round;
  for(round = first; round < end && rc == MF_OK; round++) {
    if(race->sink->keep_going != NULL && !race->sink->keep_going(race->sink->context, what, race->done, race->total))
      return error_set(err, MF_ERR_INTERRUPTED, "interrupted; what was measured is stored");
    rc = run_round(race, round, routing, err);
    race->done++;
  }
  return rc;
}

/* Median floors of the living in rounds first..end-1. Rounds from before the tensor floor was kept lack it. */
static struct floor_times median_floors(struct race *race, int first, int end)
{
  struct floor_times median;
  double low, high;
  size_t i, count = 0;
  int round;
  for(i = 0; i < race->count; i++)
    for(round = first; race->alive[i] && round < end; round++)
      race->scratch[count++] = cell_of(race, i, round)->floors.copy_us;
  timing_median(race->scratch, count, &median.copy_us, &low, &high);
  count = 0;
  for(i = 0; i < race->count; i++)
    for(round = first; race->alive[i] && round < end; round++)
      if(cell_of(race, i, round)->floors.tensor_us > 0)
        race->scratch[count++] = cell_of(race, i, round)->floors.tensor_us;
  timing_median(race->scratch, count, &median.tensor_us, &low, &high);
  return median;
}

/* Writes what rounds first..end-1 say about the living into entry 'entry' of their rows. best[i], if not NULL, receives their fastest rounds. */
static void judge(struct race *race, int first, int end, int entry, struct timing_row *rows, double *best)
{
  const struct floor_times floors = median_floors(race, first, end);
  size_t i;
  int round;
  for(i = 0; i < race->count; i++) {
    size_t count = 0;
    if(!race->alive[i])
      continue;
    for(round = first; round < end; round++)
      race->scratch[count++] = cell_of(race, i, round)->us / cell_of(race, i, round)->floors.copy_us * floors.copy_us;
    timing_median(race->scratch, count, &rows[i].median_us[entry], &rows[i].low_us[entry], &rows[i].high_us[entry]);
    rows[i].floors[entry] = floors;
    if(best != NULL)
      best[i] = race->scratch[0]; /* timing_median() has sorted them */
  }
}

/* ---- who goes on ---- */
/* The candidate's time over the routing mix, as its row has it. */
static double over_the_mix(const struct race *race, const struct timing_row *row)
{
  double us = 0;
  int r;
  for(r = 0; r < race->spec->nmix; r++)
    us += race->spec->mix[r].weight * row->median_us[r];
  return us;
}

/* The living candidate, not pinned, with the worst time over the mix; 'count' if there is none. Of equals the last. */
static size_t slowest(const struct race *race, const bool *pinned, const struct timing_row *rows)
{
  size_t i, worst = race->count;
  for(i = 0; i < race->count; i++)
    if(race->alive[i] && !pinned[i] && (worst == race->count || over_the_mix(race, &rows[i]) >= over_the_mix(race, &rows[worst])))
      worst = i;
  return worst;
}

/* After the first heat the clearly slower leave. */
static void send_home(struct race *race, const bool *pinned, const struct timing_row *rows, const double *best)
{
  double best_median = (double)INFINITY;
  size_t i;
  for(i = 0; i < race->count; i++)
    if(race->alive[i] && rows[i].median_us[0] < best_median)
      best_median = rows[i].median_us[0];
  for(i = 0; i < race->count; i++)
    if(race->alive[i] && !pinned[i] && best[i] > best_median * race->policy->leave_ratio)
      race->alive[i] = false;
}

/* After the second heat the slowest leave until max_finalists are left. */
static void thin_out(struct race *race, const bool *pinned, const struct timing_row *rows)
{
  size_t i, left = 0;
  for(i = 0; i < race->count; i++)
    left += race->alive[i];
  while(left > (size_t)race->policy->max_finalists) {
    i = slowest(race, pinned, rows);
    if(i == race->count)
      break;
    race->alive[i] = false;
    left--;
  }
}

static void weigh(const struct race *race, struct timing_row *rows)
{
  size_t i;
  int r;
  for(i = 0; i < race->count; i++) {
    struct timing_row *row = &rows[i];
    if(!race->alive[i])
      continue;
    row->finalist = true;
    row->objective_us = row->objective_low = row->objective_high = row->objective_floors.copy_us = row->objective_floors.tensor_us = 0;
    for(r = 0; r < race->spec->nmix; r++) {
      const double weight = race->spec->mix[r].weight;
      row->objective_us += weight * row->median_us[r];
      row->objective_low += weight * row->low_us[r];
      row->objective_high += weight * row->high_us[r];
      row->objective_floors.copy_us += weight * row->floors[r].copy_us;
      row->objective_floors.tensor_us += weight * row->floors[r].tensor_us;
    }
  }
}

static enum mf_status heat(struct race *race, const bool *pinned, struct timing_row *rows, double *best, struct error *err)
{
  enum mf_status rc;
  int r;
  load_known(race, race->spec->mix[0].kind);
  rc = run_rounds(race, "heat", 0, race->policy->heat_rounds, race->spec->mix[0].kind, err);
  if(rc != MF_OK)
    return rc;
  judge(race, 0, race->policy->heat_rounds, 0, rows, best);
  send_home(race, pinned, rows, best);
  for(r = 1; r < race->spec->nmix; r++) {
    load_known(race, race->spec->mix[r].kind);
    rc = run_rounds(race, "second heat", 0, race->policy->second_heat_rounds, race->spec->mix[r].kind, err);
    if(rc != MF_OK)
      return rc;
    judge(race, 0, race->policy->second_heat_rounds, r, rows, NULL);
  }
  thin_out(race, pinned, rows);
  return MF_OK;
}

static enum mf_status finals(struct race *race, struct timing_row *rows, struct error *err)
{
  enum mf_status rc = MF_OK;
  int r;
  for(r = 0; r < race->spec->nmix && rc == MF_OK; r++) {
    load_known(race, race->spec->mix[r].kind);
    rc = run_rounds(race, routing_name(race->spec->mix[r].kind), race->policy->heat_rounds, race->rounds, race->spec->mix[r].kind, err);
    if(rc == MF_OK)
      judge(race, race->policy->heat_rounds, race->rounds, r, rows, NULL);
  }
  if(rc == MF_OK)
    weigh(race, rows);
  return rc;
}

/* ---- set-up ---- */
static void clear_row(struct timing_row *row, size_t candidate, bool is_default)
{
  int r;
  memset(row, 0, sizeof(*row));
  row->candidate = candidate;
  row->is_default = is_default;
  for(r = 0; r < MAX_ROUTING_MIX; r++)
    row->median_us[r] = row->low_us[r] = row->high_us[r] = row->floors[r].copy_us = row->floors[r].tensor_us = (double)NAN;
  row->objective_us = row->objective_low = row->objective_high = row->objective_floors.copy_us = row->objective_floors.tensor_us = (double)NAN;
}

static enum mf_status check_arguments(const struct timing_policy *policy, const struct model_spec *spec, size_t count, struct error *err)
{
  if(policy->heat_rounds < 1 || policy->second_heat_rounds < 1 || policy->final_rounds < 1 || policy->launches < 1 || policy->max_finalists < 1 || !(policy->leave_ratio >= 1))
    return error_set(err, MF_ERR_INTERNAL, "timing policy: expected at least one round, launch and finalist, and a leave_ratio of at least 1");
  if(spec->nmix < 1 || spec->nmix > MAX_ROUTING_MIX || count == 0)
    return error_set(err, MF_ERR_INTERNAL, "timing of %s: expected 1 to %d routing inputs and at least one candidate, got %d and %zu", spec->name,
                     MAX_ROUTING_MIX, spec->nmix, count);
  return MF_OK;
}

static bool allocate(struct race *race)
{
  const size_t rounds = (size_t)race->rounds, known = rounds * KNOWN_PER_ROUND;
  race->alive = calloc(race->count, sizeof(*race->alive));
  race->grid = calloc(race->count * rounds, sizeof(*race->grid));
  race->runners = calloc(race->count, sizeof(*race->runners));
  race->opened = calloc(race->count, sizeof(*race->opened));
  race->us = calloc(race->count, sizeof(*race->us));
  race->scratch = calloc(race->count * rounds, sizeof(*race->scratch));
  race->samples = calloc(race->count > known ? race->count : known, sizeof(*race->samples));
  return race->alive != NULL && race->grid != NULL && race->runners != NULL && race->opened != NULL && race->us != NULL && race->scratch != NULL &&
         race->samples != NULL;
}

static void release(struct race *race)
{
  free(race->alive);
  free(race->grid);
  free(race->runners);
  free(race->opened);
  free(race->us);
  free(race->scratch);
  free(race->samples);
}

/* Rows, who takes part, who stays. False if nobody takes part. */
static bool line_up(struct race *race, const bool *pinned, bool *stays, struct timing_row *rows)
{
  bool any = false;
  size_t i;
  for(i = 0; i < race->count; i++) {
    clear_row(&rows[i], i, race->candidates[i].is_default);
    race->alive[i] = timing_takes_tokens(&race->candidates[i], race->tokens);
    stays[i] = race->candidates[i].is_default || (pinned != NULL && pinned[i]);
    any = any || race->alive[i];
  }
  return any;
}

enum mf_status timing_run(const struct timing_policy *policy, const struct model_spec *spec, int tokens, const struct candidate *candidates, size_t count,
                          const bool *pinned, const struct timing_device *dev, const struct timing_sink *sink, struct timing_row *rows, struct error *err)
{
  struct race race = {.policy = policy, .spec = spec, .tokens = tokens, .candidates = candidates, .count = count, .dev = dev, .sink = sink};
  double *best = NULL;
  bool *stays = NULL;
  enum mf_status rc = check_arguments(policy, spec, count, err);
  if(rc != MF_OK)
    return rc;
  race.rounds = policy->heat_rounds + policy->final_rounds;
  race.total = (size_t)policy->heat_rounds + (size_t)policy->second_heat_rounds * (size_t)(spec->nmix - 1) + (size_t)policy->final_rounds * (size_t)spec->nmix;
  best = calloc(count, sizeof(*best));
  stays = calloc(count, sizeof(*stays));
  if(best == NULL || stays == NULL || !allocate(&race)) {
    rc = error_set(err, MF_ERR_NOMEM, "timing of %zu candidates: out of memory", count);
    goto out;
  }
  if(!line_up(&race, pinned, stays, rows)) {
    rc = error_set(err, MF_ERR_NOT_FOUND, "timing of %s: no candidate takes %d tokens", spec->name, tokens);
    goto out;
  }
  rc = heat(&race, stays, rows, best, err);
  if(rc == MF_OK)
    rc = finals(&race, rows, err);
out:
  release(&race);
  free(best);
  free(stays);
  return rc;
}
