/* bench.c - the command `bench`: times the winners again, on routing seeds that tuning never saw.
 *
 * For each token count and routing input the winner and the schedules that --schedule names run interleaved with the floor kernels in one profile; what is
 * printed are medians over the rounds of this one run, each input's as soon as it is done (JSON: all at the end, also of a run that was interrupted). Nothing is
 * stored. bench/performance.py makes the tables of docs/performance.md of the JSON.
 * With --behind: bench_behind.c. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "compile.h"
#include "report.h"
#include "timing.h"

struct bench_kernel {
  char schedule[NAME_MAX_LEN * 2];
  int handle;
};

static bool take_winner(void *context, const struct winner *win)
{
  struct bench_shape *shape = context;
  if(win->device_id == shape->device_id && shape->nwinners < MAX_TOKEN_COUNTS)
    shape->winners[shape->nwinners++] = *win;
  return true;
}

/* The handle of a stored candidate in the client; loads it once. */
static enum mf_status load_stored(struct tuner *t, struct device_client *client, int64_t candidate_id, struct bench_kernel *kernels, int *nkernels,
                                  int *index, struct error *err)
{
  struct candidate cand;
  struct artifact art = {0};
  enum mf_status rc = store_get_candidate(t->store, candidate_id, &cand, &art, err);
  for(int i = 0; i < *nkernels && rc == MF_OK; i++) {
    if(strcmp(kernels[i].schedule, cand.name) == 0) {
      *index = i;
      artifact_free(&art);
      return MF_OK;
    }
  }
  if(rc == MF_OK && *nkernels == BENCH_MAX_KERNELS)
    rc = error_set(err, MF_ERR_USAGE, "more than %d schedules to time", BENCH_MAX_KERNELS);
  if(rc == MF_OK)
    rc = device_client_load_kernel(client, art.cubin, art.cubin_bytes, &cand.recipe, &kernels[*nkernels].handle, err);
  if(rc == MF_OK) {
    memcpy(kernels[*nkernels].schedule, cand.name, sizeof(kernels[*nkernels].schedule));
    *index = (*nkernels)++;
  }
  artifact_free(&art);
  return rc;
}

struct bench_result {
  double us, low, high, active;
  struct floor_times floors;
};

/* What --tokens and --routing ask for, and how much of it is done. */
struct bench_plan {
  bool tokens[MAX_TOKENS + 1];
  enum routing_kind routings[ROUTING_KINDS];
  int nroutings;
  size_t done, total; /* inputs of the shape at hand */
};

static enum mf_status time_profile(struct device_client *client, const int *handles, int count, int tokens, enum routing_kind routing,
                                   struct bench_result *results, struct error *err)
{
  double us[BENCH_MAX_KERNELS][BENCH_ROUNDS], copies[BENCH_ROUNDS] = {0}, tensor[BENCH_ROUNDS] = {0}, active = 0, low, high;
  struct floor_times floors = {NAN, NAN};
  enum mf_status rc = device_client_open_profile(client, handles, count, tokens, routing, BENCH_SEED + (uint32_t)tokens, BENCH_LAUNCHES, err);
  for(int round = 0; round < BENCH_ROUNDS && rc == MF_OK; round++) {
    double one[BENCH_MAX_KERNELS] = {0};
    rc = interrupt_requested() ? error_set(err, MF_ERR_INTERRUPTED, "interrupted") : device_client_round(client, NULL, round, one, &floors, &active, err);
    for(int k = 0; k < count && rc == MF_OK; k++)
      us[k][round] = one[k];
    copies[round] = floors.copy_us;
    tensor[round] = floors.tensor_us;
  }
  if(rc != MF_OK)
    return rc;
  timing_median(copies, BENCH_ROUNDS, &floors.copy_us, &low, &high);
  if(!isnan(floors.tensor_us))
    timing_median(tensor, BENCH_ROUNDS, &floors.tensor_us, &low, &high);
  for(int k = 0; k < count; k++) {
    timing_median(us[k], BENCH_ROUNDS, &results[k].us, &results[k].low, &results[k].high);
    results[k].floors = floors;
    results[k].active = active;
  }
  return MF_OK;
}

/* The floor by formula and those measured in this run: the smallest is the floor. */
static double floor_of(const struct device_info *dev, const struct mf_problem *problem, const struct bench_result *r)
{
  const double formula = dev->launch_us + r->active * problem_expert_bytes(problem) / (dev->bandwidth_gbps * 1e3);
  return fmin(fmin(r->floors.copy_us, r->floors.tensor_us), formula); /* NAN loses */
}

static void print_row(const struct tuner *t, const struct model_spec *spec, const char *schedule, bool winner, int tokens, enum routing_kind routing,
                      const struct bench_result *r, json_t *rows)
{
  const double floor_us = floor_of(&t->target.dev, &spec->problem, r);
  char tensor[32] = "";
  if(!isnan(r->floors.tensor_us))
    snprintf(tensor, sizeof(tensor), "%.2f", r->floors.tensor_us);
  if(rows == NULL)
    printf("| %s | %s | %d | %.1f | %.2f | %.2f-%.2f | %.2f | %s | %.2f | %.3f | %s |\n", spec->name, routing_name(routing), tokens, r->active, r->us, r->low, r->high,
           r->floors.copy_us, tensor, floor_us, r->us / floor_us, schedule);
  else
    json_array_append_new(rows, json_pack("{s:s, s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:o, s:f, s:f, s:s, s:b}", "shape", spec->name, "routing", routing_name(routing),
                                          "tokens", tokens, "active", r->active, "us", r->us, "us_low", r->low, "us_high", r->high, "floor_copy_us",
                                          r->floors.copy_us, "floor_tensor_us", isnan(r->floors.tensor_us) ? json_null() : json_real(r->floors.tensor_us),
                                          "floor_us", floor_us, "floor_ratio", r->us / floor_us, "schedule", schedule, "winner", winner));
  fflush(stdout);
}

/* The routing inputs of the plan at one token count, for 'count' of the loaded kernels; the winner is the first. */
static enum mf_status bench_tokens(struct tuner *t, struct device_client *client, const struct model_spec *spec, int tokens, const struct bench_kernel *kernels,
                                   const int *index, int count, struct bench_plan *plan, json_t *rows, struct error *err)
{
  enum mf_status rc = MF_OK;
  int handles[BENCH_MAX_KERNELS];
  for(int k = 0; k < count; k++)
    handles[k] = kernels[index[k]].handle;
  for(int i = 0; i < plan->nroutings && rc == MF_OK; i++) {
    struct bench_result results[BENCH_MAX_KERNELS];
    progress_step(&t->progress, plan->done++, plan->total, "%d tokens, %s", tokens, routing_name(plan->routings[i]));
    rc = time_profile(client, handles, count, tokens, plan->routings[i], results, err);
    for(int k = 0; k < count && rc == MF_OK; k++)
      print_row(t, spec, kernels[index[k]].schedule, k == 0, tokens, plan->routings[i], &results[k], rows);
  }
  return rc;
}

/* Loads the schedules of --schedule; index[0] is left for the winner. *count receives 1 + their number. */
static enum mf_status load_named(struct tuner *t, struct device_client *client, int64_t shape_id, struct bench_kernel *kernels, int *nkernels, int *index,
                                 int *count, struct error *err)
{
  char text[2048], *rest = text, *name;
  enum mf_status rc = MF_OK;
  *count = 1;
  snprintf(text, sizeof(text), "%s", t->opt->schedules != NULL ? t->opt->schedules : "");
  while(rc == MF_OK && (name = strsep(&rest, ",")) != NULL) {
    int64_t id;
    if(name[0] == '\0')
      continue;
    rc = *count < BENCH_MAX_KERNELS ? store_find_candidate(t->store, shape_id, t->device_id, name, &id, err)
                                    : error_set(err, MF_ERR_USAGE, "--schedule: at most %d", BENCH_MAX_KERNELS - 1);
    if(rc == MF_OK)
      rc = load_stored(t, client, id, kernels, nkernels, &index[(*count)++], err);
  }
  return rc;
}

/* Inputs of the plan that a winner serves. */
static size_t count_inputs(const struct bench_shape *shape, const struct bench_plan *plan)
{
  size_t total = 0;
  for(int w = 0; w < shape->nwinners; w++)
    for(int tokens = shape->winners[w].tokens_min; tokens <= shape->winners[w].tokens_max && tokens <= MAX_TOKENS; tokens++)
      total += plan->tokens[tokens] ? (size_t)plan->nroutings : 0;
  return total;
}

static enum mf_status bench_winners(struct tuner *t, struct device_client *client, const struct model_spec *spec, const struct bench_shape *shape,
                                    struct bench_plan *plan, json_t *rows, struct error *err)
{
  struct bench_kernel kernels[BENCH_MAX_KERNELS];
  int nkernels = 0, index[BENCH_MAX_KERNELS] = {0}, count = 1;
  enum mf_status rc = load_named(t, client, shape->shape_id, kernels, &nkernels, index, &count, err);
  for(int w = 0; w < shape->nwinners && rc == MF_OK; w++) {
    const struct winner *win = &shape->winners[w];
    rc = load_stored(t, client, win->candidate_id, kernels, &nkernels, &index[0], err);
    for(int tokens = win->tokens_min; tokens <= win->tokens_max && tokens <= MAX_TOKENS && rc == MF_OK; tokens++) {
      if(plan->tokens[tokens])
        rc = bench_tokens(t, client, spec, tokens, kernels, index, count, plan, rows, err);
    }
  }
  if(rc == MF_OK)
    progress_step(&t->progress, plan->done, plan->total, "%d schedule%s", nkernels, nkernels == 1 ? "" : "s");
  return rc;
}

/* Without --tokens all that winners serve; without --routing the four that docs/performance.md shows. */
static enum mf_status make_plan(const struct options *opt, struct bench_plan *plan, struct error *err)
{
  static const enum routing_kind usual[] = {ROUTING_UNIFORM, ROUTING_ZIPF, ROUTING_CONCENTRATED, ROUTING_DISPERSED};
  const bool given = opt->nroutings > 0;
  struct model_spec none = {.ntokens = 0};
  int tokens[MAX_TOKEN_COUNTS], count = 0;
  enum mf_status rc = opt->tokens == NULL ? MF_OK : target_tokens(opt, &none, tokens, &count, err);
  memset(plan, 0, sizeof(*plan));
  for(int i = 0; i <= MAX_TOKENS; i++)
    plan->tokens[i] = opt->tokens == NULL;
  for(int i = 0; i < count; i++)
    plan->tokens[tokens[i]] = true;
  plan->nroutings = given ? opt->nroutings : (int)(sizeof(usual) / sizeof(usual[0]));
  memcpy(plan->routings, given ? opt->routings : usual, (size_t)plan->nroutings * sizeof(usual[0]));
  return rc;
}

static enum mf_status bench_shape(struct tuner *t, const char *name, struct bench_plan *plan, json_t *rows, struct error *err)
{
  struct bench_shape shape = {.name = name, .device_id = t->device_id};
  struct device_client *client = NULL;
  struct model_spec spec;
  enum mf_status rc = store_each_winner(t->store, name, take_winner, &shape, err);
  if(rc == MF_OK && (shape.nwinners == 0 || shape.winners[0].predicted))
    rc = error_set(err, MF_ERR_NOT_FOUND, "%s: no measured winners on %s: tune it first", name, t->target.dev.name);
  plan->done = 0;
  plan->total = count_inputs(&shape, plan);
  if(rc == MF_OK && plan->total == 0)
    rc = error_set(err, MF_ERR_NOT_FOUND, "%s: no winner serves --tokens %s (see `moeforge show %s`)", name, t->opt->tokens, name);
  if(rc == MF_OK)
    rc = store_get_shape(t->store, shape.winners[0].shape_id, &spec, err);
  if(rc == MF_OK)
    rc = tune_start_timing(t, &spec, shape.winners[0].tokens_min, shape.winners[shape.nwinners - 1].tokens_max, &client, err);
  shape.shape_id = shape.winners[0].shape_id;
  progress_phase(&t->progress, "%s: bench", name);
  if(rc == MF_OK)
    rc = t->opt->behind ? bench_behind(t, &client, &spec, &shape, plan->tokens, rows, err) : bench_winners(t, client, &spec, &shape, plan, rows, err);
  device_client_stop(client);
  return rc;
}

/* complete: false if an interruption or a failure ended the run; what was timed before is there. */
static void print_json(const struct tuner *t, json_t *rows, bool complete)
{
  const time_t now = time(NULL);
  struct tm utc;
  char date[16];
  json_t *root;
  strftime(date, sizeof(date), "%Y-%m-%d", gmtime_r(&now, &utc));
  root = json_pack("{s:s, s:i, s:s, s:b, s:O}", "device", t->target.dev.name, "driver", t->target.dev.driver_version, "date", date, "complete", complete, "rows", rows);
  json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
  putchar('\n');
  json_decref(root);
}

/* A shape that has nothing to time does not keep the others from it: the error comes at the end. */
static enum mf_status bench_shapes(struct tuner *t, const char *const *names, int count, struct bench_plan *plan, json_t *rows, struct error *err)
{
  enum mf_status missing = MF_OK;
  for(int i = 0; i < count; i++) {
    struct error one;
    const enum mf_status rc = bench_shape(t, names[i], plan, rows, &one);
    if(rc != MF_OK && missing != MF_OK)
      fprintf(stderr, "moeforge: %s\n", err->text);
    if(rc != MF_OK)
      *err = one;
    if(rc != MF_OK && rc != MF_ERR_NOT_FOUND)
      return rc;
    missing = rc != MF_OK ? rc : missing;
  }
  return missing;
}

enum mf_status bench_command(const struct options *opt, const char *const *shape_names, int count, struct error *err)
{
  struct tuner t = {.opt = opt};
  json_t *rows = opt->json ? json_array() : NULL;
  struct bench_plan plan;
  enum mf_status rc;
  progress_init(&t.progress, opt->quiet || (!opt->json && !opt->behind && isatty(STDOUT_FILENO) != 0)); /* on a terminal the rows are progress enough */
  rc = make_plan(opt, &plan, err);
  if(rc == MF_OK)
    rc = target_resolve(opt, &t.target, err);
  if(rc == MF_OK && !t.target.gpu)
    rc = error_set(err, MF_ERR_NO_DEVICE, "bench needs a GPU: %s", t.target.note);
  if(rc == MF_OK)
    rc = report_open_store(opt, &t.store, err);
  if(rc == MF_OK)
    rc = store_find_device(t.store, &t.target.dev, &t.device_id, err);
  if(rc == MF_OK)
    rc = device_tools_build(opt->program, opt->template_dir, compile_arch(t.target.dev.cc_major, t.target.dev.cc_minor), &t.tools, err);
  if(rc == MF_OK && rows == NULL && !opt->behind)
    printf("| shape | routing | tokens | experts | us | 95 %% of median | floor kernel | tensor floor | floor | x floor | schedule |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
  if(rc == MF_OK)
    rc = bench_shapes(&t, shape_names, count, &plan, rows, err);
  if(json_array_size(rows) > 0)
    print_json(&t, rows, rc == MF_OK);
  json_decref(rows);
  device_tool_set_free(&t.tools);
  if(t.store != NULL)
    store_close(t.store);
  return rc;
}
