/* plan.c - the command `plan`: what `tune` would do, without compiling or running anything. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "datagen.h"
#include "device_client.h"
#include "limits.h"
#include "space.h"
#include "spec.h"
#include "target.h"

#define MAX_RULES 64
/* Costs that the guess is made of, seconds: one kernel, one candidate in one check worker (from the runs in docs/performance.md); preparing a graph. */
#define COMPILE_SECONDS 1.4
#define CHECK_SECONDS 0.15
#define PREPARE_SECONDS 0.002

struct rule_count {
  char rule[48];
  long count, nearest;
  char detail[256];
};

struct plan {
  struct rule_count rules[MAX_RULES];
  int nrules;
  long rejected;
  size_t candidates, artifacts;
  double active[MAX_TOKEN_COUNTS][ROUTING_KINDS], floor_us[MAX_TOKEN_COUNTS][ROUTING_KINDS];
  double memory_bytes, compile_seconds, check_seconds, time_seconds;
  int layers;
};

static void count_reject(void *context, const struct schedule *sched, const struct verdict *why)
{
  struct plan *plan = context;
  int i = 0;
  (void)sched;
  plan->rejected++;
  while(i < plan->nrules && strcmp(plan->rules[i].rule, why->rule) != 0)
    i++;
  if(i == MAX_RULES)
    return;
  if(i == plan->nrules) {
    struct rule_count *r = &plan->rules[plan->nrules++];
    snprintf(r->rule, sizeof(r->rule), "%s", why->rule);
    snprintf(r->detail, sizeof(r->detail), "%s", why->detail);
    r->nearest = why->nearest;
  }
  plan->rules[i].count++;
}

static size_t count_artifacts(const struct candidate_list *list)
{
  size_t distinct = 0;
  for(size_t i = 0; i < list->count; i++) {
    size_t j = 0;
    while(j < i && strcmp(list->items[j].artifact_name, list->items[i].artifact_name) != 0)
      j++;
    distinct += j == i;
  }
  return distinct;
}

static void estimate(struct plan *plan, const struct options *opt, const struct model_spec *spec, const int *tokens, int ntokens, const struct device_info *dev)
{
  const double expert_bytes = problem_expert_bytes(&spec->problem);
  const size_t turns = (plan->artifacts + (size_t)opt->jobs - 1) / (size_t)opt->jobs; /* of all compile workers */
  double launch_seconds = 0;
  for(int i = 0; i < ntokens; i++) {
    for(int m = 0; m < spec->nmix; m++) {
      const enum routing_kind kind = spec->mix[m].kind;
      plan->active[i][kind] = data_expected_active(&spec->problem, tokens[i], kind);
      plan->floor_us[i][kind] = dev->launch_us + plan->active[i][kind] * expert_bytes / (dev->bandwidth_gbps * 1e3);
      launch_seconds += 1.3e-6 * plan->floor_us[i][kind];
    }
  }
  plan->layers = device_layers_needed(&spec->problem, dev, tokens[0]);
  plan->memory_bytes = device_memory_needed(&spec->problem, plan->layers, tokens[ntokens - 1], (int)plan->candidates);
  plan->compile_seconds = COMPILE_SECONDS * (double)turns;
  plan->check_seconds = CHECK_SECONDS * (double)plan->candidates / opt->check_jobs;
  plan->time_seconds = (double)plan->candidates * (PREPARE_SECONDS * ntokens + 2 * 3 * 24 * launch_seconds / spec->nmix) + 12 * 2 * 9 * 24 * launch_seconds;
}

static void print_plan(const struct plan *plan, const struct model_spec *spec, const int *tokens, int ntokens, const struct target *target)
{
  const struct mf_problem *p = &spec->problem;
  char shared[32] = "";
  if(problem_shared(p) > 0)
    snprintf(shared, sizeof(shared), " +%d shared", problem_shared(p));
  printf("%s: E=%d top-%d%s N=%d K=%d on %s, tokens %d..%d\n", spec->name, p->experts, p->top_k, shared, p->intermediate, p->hidden, target->dev.name, tokens[0],
         tokens[ntokens - 1]);
  printf("  candidates     %zu of %ld schedules, from %zu kernels\n", plan->candidates, (long)plan->candidates + plan->rejected, plan->artifacts);
  for(int i = 0; i < plan->nrules; i++) {
    printf("  rejected       %ld by rule %s: %s", plan->rules[i].count, plan->rules[i].rule, plan->rules[i].detail);
    if(plan->rules[i].nearest >= 0)
      printf(" (nearest legal value %ld)", plan->rules[i].nearest);
    putchar('\n');
  }
  printf("  GPU memory     %.1f GiB (%d layers, so that weights are cold)\n", plan->memory_bytes / (1 << 30), plan->layers);
  printf("  time, guessed  compile %.0f s, check %.0f s, timing %.0f s%s\n", plan->compile_seconds, plan->check_seconds, plan->time_seconds,
         target->gpu ? "" : target->emulated ? " (for a GPU; the emulated device checks fewer, each for seconds, and times none)" : " (no GPU here: only compilation would run)");
  printf("  %-8s", "tokens");
  for(int m = 0; m < spec->nmix; m++)
    printf("  %22s", routing_name(spec->mix[m].kind));
  printf("   (active experts, floor us by formula)\n");
  for(int i = 0; i < ntokens; i++) {
    printf("  %-8d", tokens[i]);
    for(int m = 0; m < spec->nmix; m++)
      printf("  %10.1f %11.2f", plan->active[i][spec->mix[m].kind], plan->floor_us[i][spec->mix[m].kind]);
    putchar('\n');
  }
}

static json_t *plan_json(const struct plan *plan, const struct model_spec *spec, const int *tokens, int ntokens, const struct target *target)
{
  json_t *rules = json_array(), *counts = json_array();
  for(int i = 0; i < plan->nrules; i++)
    json_array_append_new(rules, json_pack("{s:s, s:I, s:s, s:I}", "rule", plan->rules[i].rule, "count", (json_int_t)plan->rules[i].count, "detail",
                                           plan->rules[i].detail, "nearest", (json_int_t)plan->rules[i].nearest));
  for(int i = 0; i < ntokens; i++) {
    json_t *row = json_pack("{s:i}", "tokens", tokens[i]);
    for(int m = 0; m < spec->nmix; m++) {
      const enum routing_kind kind = spec->mix[m].kind;
      json_object_set_new(row, routing_name(kind), json_pack("{s:f, s:f}", "active", plan->active[i][kind], "floor_us", plan->floor_us[i][kind]));
    }
    json_array_append_new(counts, row);
  }
  return json_pack("{s:s, s:s, s:b, s:I, s:I, s:I, s:o, s:f, s:i, s:f, s:f, s:f, s:o}", "shape", spec->name, "device", target->dev.name, "gpu", target->gpu,
                   "candidates", (json_int_t)plan->candidates, "artifacts", (json_int_t)plan->artifacts, "rejected", (json_int_t)plan->rejected, "rules", rules,
                   "memory_bytes", plan->memory_bytes, "layers", plan->layers, "compile_seconds", plan->compile_seconds, "check_seconds", plan->check_seconds,
                   "time_seconds", plan->time_seconds, "tokens", counts);
}

/* One spec; *json receives its object if opt->json. */
static enum mf_status plan_spec(const struct options *opt, const struct target *target, const char *path, json_t **json, struct error *err)
{
  struct model_spec spec;
  struct candidate_list list = {0};
  struct plan plan = {.nrules = 0};
  int tokens[MAX_TOKEN_COUNTS], ntokens = 0;
  enum mf_status rc = spec_read(path, &spec, NULL, NULL, err);
  if(rc == MF_OK)
    rc = target_tokens(opt, &spec, tokens, &ntokens, err);
  if(rc == MF_OK) {
    rc = space_enumerate_counts(&spec.problem, &target->dev, tokens, ntokens, opt->effort, &list, count_reject, &plan, err);
    if(rc != MF_OK)
      error_prefix(err, "%s", spec.name);
  }
  if(rc == MF_OK) {
    plan.candidates = list.count;
    plan.artifacts = count_artifacts(&list);
    estimate(&plan, opt, &spec, tokens, ntokens, &target->dev);
    if(opt->json)
      *json = plan_json(&plan, &spec, tokens, ntokens, target);
    else
      print_plan(&plan, &spec, tokens, ntokens, target);
  }
  candidate_list_free(&list);
  return rc;
}

enum mf_status plan_command(const struct options *opt, const char *const *specs, int nspecs, struct error *err)
{
  struct target target;
  json_t *all = json_array();
  enum mf_status worst = target_resolve(opt, &target, err);
  if(worst != MF_OK) {
    json_decref(all);
    return worst;
  }
  if(!target.gpu && !opt->quiet)
    fprintf(stderr, "planning for %s; no GPU is used: %s\n", target.dev.name, target.note);
  for(int i = 0; i < nspecs; i++) {
    struct error one = {MF_OK, ""};
    json_t *json = NULL;
    const enum mf_status rc = plan_spec(opt, &target, specs[i], &json, &one);
    if(json != NULL)
      json_array_append_new(all, json);
    if(rc != MF_OK && worst == MF_OK)
      worst = error_set(err, rc, "%s", one.text);
    else if(rc != MF_OK)
      fprintf(stderr, "moeforge: %s\n", one.text);
  }
  if(opt->json) {
    json_t *root = json_pack("{s:O}", "plans", all);
    json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    putchar('\n');
    json_decref(root);
  }
  json_decref(all);
  return worst;
}
