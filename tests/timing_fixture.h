/* timing_fixture.h - for the tests of timing.c: a device whose times are scripted, a store in memory, and races on them. */
#ifndef MOEFORGE_TESTS_TIMING_FIXTURE_H
#define MOEFORGE_TESTS_TIMING_FIXTURE_H

#include "timing.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_CANDIDATES 64
#define MAX_SAMPLES 200000

/* A device whose times are a function of candidate, profile and round. */
struct script {
  double us[MAX_CANDIDATES];       /* under uniform routing; others scale it */
  double routing_factor[MAX_CANDIDATES][ROUTING_KINDS]; /* 0: 1 */
  double lucky_us[MAX_CANDIDATES]; /* in round 1 only; 0: as always */
  double noise;                    /* relative, uniform */
  double drift;                    /* relative, per round: floor and candidates alike */
  double clock;                    /* factor of the whole run */
  int fail_at;                     /* fails at this call of round(), 0: never */
  enum mf_status failure;
  int bad_us_at;                   /* reports 0 us at this call */
  int tensor_from;                 /* the tensor floor is known from this call on; 0: never */
  /* open profile */
  size_t index[MAX_CANDIDATES], count;
  int tokens, launches;
  enum routing_kind routing;
  /* what was asked */
  int rounds_run, profiles_opened, runs[MAX_CANDIDATES];
  double spent_us;                 /* on the device: launches and graphs */
  unsigned random;
};

#define SECOND_HEATS (3 * policy.second_heat_rounds) /* under the three other routing inputs */
#define ROUNDS (policy.heat_rounds + SECOND_HEATS + 4 * policy.final_rounds) /* of a finalist */

/* A store in memory. */
struct memory {
  struct sample samples[MAX_SAMPLES];
  size_t count;
  bool forget;                     /* known() returns nothing */
  int calls, stop_after;           /* of keep_going; 0: never */
  int fail_samples_at, samples_calls;
  char what[64];
  size_t done, total;
};

static struct script dev;
static struct memory mem;
static struct candidate candidates[MAX_CANDIDATES];
static struct timing_row rows[MAX_CANDIDATES];
static struct timing_policy policy;
static struct model_spec spec;
static struct error err;

static inline double noise(void)
{
  dev.random = dev.random * 1664525u + 1013904223u;
  return dev.noise * ((double)(dev.random >> 8) / (double)(1u << 24) * 2 - 1);
}

static inline enum mf_status open_profile(void *context, const size_t *index, size_t count, int tokens, enum routing_kind routing, uint32_t seed, int launches,
                                          struct error *why)
{
  (void)context;
  (void)seed;
  (void)why;
  memcpy(dev.index, index, count * sizeof(*index));
  dev.count = count;
  dev.tokens = tokens;
  dev.routing = routing;
  dev.launches = launches;
  dev.profiles_opened++;
  dev.spent_us += 1500.0 * (double)count;
  return MF_OK;
}

static inline enum mf_status scripted_round(void *context, int round, double *us, struct floor_times *floors, double *active, struct error *why)
{
  const double machine = dev.clock * (1 + dev.drift * round);
  size_t i;
  (void)context;
  dev.rounds_run++;
  if(dev.rounds_run == dev.fail_at)
    return error_set(why, dev.failure, "scripted failure");
  for(i = 0; i < dev.count; i++) {
    const size_t c = dev.index[i];
    const double factor = dev.routing_factor[c][dev.routing] > 0 ? dev.routing_factor[c][dev.routing] : 1;
    us[i] = (round == 1 && dev.lucky_us[c] > 0 ? dev.lucky_us[c] : dev.us[c]) * factor * machine * (1 + noise());
    dev.runs[c]++;
    dev.spent_us += us[i] * dev.launches;
  }
  *floors = (struct floor_times){5 * machine, dev.tensor_from > 0 && dev.rounds_run >= dev.tensor_from ? 6 * machine : (double)NAN};
  *active = 8;
  if(dev.rounds_run == dev.bad_us_at)
    us[0] = 0;
  return MF_OK;
}

static inline enum mf_status keep_samples(void *context, const struct sample *samples, size_t count, struct error *why)
{
  (void)context;
  if(++mem.samples_calls == mem.fail_samples_at)
    return error_set(why, MF_ERR_IO, "scripted full disk");
  ck_assert_uint_le(mem.count + count, MAX_SAMPLES);
  memcpy(mem.samples + mem.count, samples, count * sizeof(*samples));
  mem.count += count;
  return MF_OK;
}

/* As the store: by round, then in the order of their making. */
static inline size_t known_samples(void *context, int64_t candidate_id, int tokens, enum routing_kind routing, uint32_t seed, struct sample *out, size_t max)
{
  size_t i, count = 0;
  int round;
  (void)context;
  for(round = 0; round < 100 && !mem.forget; round++)
    for(i = 0; i < mem.count; i++) {
      const struct sample *smp = &mem.samples[i];
      if(smp->round == round && smp->candidate_id == candidate_id && smp->tokens == tokens && smp->routing == routing && smp->seed == seed && count < max)
        out[count++] = *smp;
    }
  return count;
}

static inline bool keep_going(void *context, const char *what, size_t done, size_t total)
{
  (void)context;
  snprintf(mem.what, sizeof(mem.what), "%s", what);
  mem.done = done;
  mem.total = total;
  return ++mem.calls != mem.stop_after;
}

static inline enum mf_status race(size_t count, int tokens, const bool *pinned)
{
  const struct timing_device device = {NULL, open_profile, scripted_round};
  const struct timing_sink sink = {NULL, keep_samples, known_samples, keep_going};
  return timing_run(&policy, &spec, tokens, candidates, count, pinned, &device, &sink, rows, &err);
}

#define ck_ok(call) ck_assert_msg((call) == MF_OK, "%s: %s", #call, err.text)

/* Candidate i takes 10 + i us; four routing inputs. */
static inline void setup(void)
{
  static const struct routing_weight mix[4] = {{ROUTING_UNIFORM, 0.4}, {ROUTING_ZIPF, 0.3}, {ROUTING_CONCENTRATED, 0.1}, {ROUTING_DISPERSED, 0.2}};
  size_t i;
  memset(&dev, 0, sizeof(dev));
  memset(&mem, 0, sizeof(mem));
  memset(candidates, 0, sizeof(candidates));
  memset(&spec, 0, sizeof(spec));
  timing_policy_default(&policy);
  memcpy(spec.mix, mix, sizeof(mix));
  spec.nmix = 4;
  dev.clock = 1;
  dev.random = 1;
  dev.noise = 0.002;
  for(i = 0; i < MAX_CANDIDATES; i++) {
    candidates[i].id = (int64_t)i + 100;
    snprintf(candidates[i].name, sizeof(candidates[i].name), "candidate %zu", i);
    dev.us[i] = 10 + (double)i;
  }
}

static inline size_t best_row(size_t count)
{
  size_t i, best = count;
  for(i = 0; i < count; i++)
    if(rows[i].finalist && (best == count || rows[i].objective_us < rows[best].objective_us))
      best = i;
  return best;
}

#endif
