/* bench_behind.c - `bench --behind`: launches behind another kernel, a stand-in for a router, as a program would have them; with and without programmatic
 * dependent launch. What is timed is in device_cuda_behind.c, and why in docs/timing.md.
 *
 * Each schedule is compiled with the knob `pdl` 0 and 1. Both kernels run in one profile, the second one also without its cooperative attribute; the times are
 * medians over interleaved rounds, of router and layer together. Nothing is stored, and no winner changes. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compile.h"
#include "compile_pool.h"
#include "emit.h"
#include "limits.h"
#include "timing.h"

/* The launches of a schedule that are timed. */
static const struct {
  int pdl;              /* value of the knob */
  uint32_t flags;       /* of the recipe, of which some are taken away */
} versions[] = {{0, MF_RECIPE_COOPERATIVE}, {1, MF_RECIPE_COOPERATIVE | MF_RECIPE_PDL}, {1, MF_RECIPE_PDL}};
#define VERSIONS (int)(sizeof(versions) / sizeof(versions[0]))
#define TIMES ((VERSIONS + 1) * BEHIND_KINDS)

static const char *const kind_names[BEHIND_KINDS] = {[BEHIND_PLAIN] = "none", [BEHIND_EDGE] = "router > layer", [BEHIND_CHAIN] = "both"};

struct behind_kernel {
  struct schedule schedule;      /* with the knob 0 */
  char name[NAME_MAX_LEN * 2];
  struct artifact art[2];        /* by the knob */
  struct closure closure[2];
  int handle[VERSIONS];
  bool named;                    /* by --schedule: timed at every token count */
};

struct behind {
  struct tuner *t;
  struct device_client *client;
  const struct model_spec *spec;
  const struct bench_shape *shape;
  struct behind_kernel kernels[BENCH_MAX_KERNELS];
  int count;
  int winner[MAX_TOKEN_COUNTS];  /* its kernel; -1: none with the knob */
  const void *router;            /* cubin */
  size_t router_bytes;
  json_t *rows;
};

/* ---- kernels ---- */
/* The schedule of this name is b->kernels[*index]; -1 if its family has no such knob. */
static enum mf_status add_schedule(struct behind *b, const char *name, int *index, struct error *err)
{
  struct behind_kernel *k = &b->kernels[b->count];
  struct schedule sched = {0};
  enum mf_status rc = schedule_parse(name, &sched, err);
  const int knob = rc == MF_OK ? family_knob(sched.family, "pdl") : -1;
  *index = -1;
  if(rc != MF_OK || knob < 0)
    return rc;
  sched.value[knob] = 0;
  for(int i = 0; i < b->count && *index < 0; i++)
    if(schedule_equal(&b->kernels[i].schedule, &sched))
      *index = i;
  if(*index >= 0)
    return MF_OK;
  if(b->count == BENCH_MAX_KERNELS)
    return error_set(err, MF_ERR_USAGE, "more than %d schedules to time", BENCH_MAX_KERNELS);
  k->schedule = sched;
  schedule_name(&sched, k->name, sizeof(k->name));
  *index = b->count++;
  return MF_OK;
}

static bool is_wanted(const struct winner *win, const bool *wanted)
{
  bool any = false;
  for(int tokens = win->tokens_min; tokens <= win->tokens_max && tokens <= MAX_TOKENS; tokens++)
    any = any || wanted[tokens];
  return any;
}

static enum mf_status choose(struct behind *b, const bool *wanted, struct error *err)
{
  char text[2048], *rest = text, *name;
  enum mf_status rc = MF_OK;
  for(int w = 0; w < b->shape->nwinners && rc == MF_OK; w++) {
    b->winner[w] = -1;
    if(is_wanted(&b->shape->winners[w], wanted))
      rc = add_schedule(b, b->shape->winners[w].schedule_name, &b->winner[w], err);
  }
  snprintf(text, sizeof(text), "%s", b->t->opt->schedules != NULL ? b->t->opt->schedules : "");
  while(rc == MF_OK && (name = strsep(&rest, ",")) != NULL) {
    int index = -1;
    if(name[0] != '\0')
      rc = add_schedule(b, name, &index, err);
    if(index >= 0)
      b->kernels[index].named = true;
  }
  if(rc == MF_OK && b->count == 0)
    rc = error_set(err, MF_ERR_NOT_FOUND, "%s: no winner with the knob pdl at these token counts (see `moeforge show %s`)", b->shape->name, b->shape->name);
  return rc;
}

static struct schedule with_knob(const struct behind_kernel *k, int pdl)
{
  struct schedule sched = k->schedule;
  sched.value[family_knob(sched.family, "pdl")] = pdl;
  return sched;
}

static enum mf_status on_compiled(void *context, size_t index, enum mf_status status, const struct error *why, struct error *err)
{
  (void)context;
  (void)index;
  return status == MF_OK ? MF_OK : error_set(err, status, "%s", why->text);
}

static bool not_interrupted(void *context)
{
  (void)context;
  return !interrupt_requested();
}

/* Both versions of every schedule, from the present templates: what the store has may be older. */
static enum mf_status compile_all(struct behind *b, struct error *err)
{
  const struct options *opt = b->t->opt;
  const struct device_info *dev = &b->t->target.dev;
  const struct compile_pool pool = {.program = opt->program, .jobs = opt->jobs, .arch = compile_arch(dev->cc_major, dev->cc_minor), .done = on_compiled,
                                    .keep_going = not_interrupted};
  struct compile_job jobs[2 * BENCH_MAX_KERNELS];
  size_t count = 0;
  enum mf_status rc = MF_OK;
  for(int i = 0; i < 2 * b->count && rc == MF_OK; i++) {
    struct behind_kernel *k = &b->kernels[i / 2];
    const struct schedule sched = with_knob(k, i % 2);
    rc = emit_source(&b->spec->problem, b->spec->name, &sched, dev, &k->art[i % 2], err);
    if(rc == MF_OK)
      rc = closure_collect(opt->template_dir, k->art[i % 2].source, &k->closure[i % 2], err);
    jobs[count++] = (struct compile_job){&k->art[i % 2], &k->closure[i % 2]};
  }
  progress_phase(&b->t->progress, "%s: compile", b->spec->name);
  if(rc == MF_OK)
    rc = compile_pool_run(&pool, jobs, count, err);
  if(rc == MF_OK)
    rc = device_tool_build(opt->program, opt->template_dir, pool.arch, "router", &b->router, &b->router_bytes, err);
  return rc;
}

static enum mf_status load_all(struct behind *b, struct error *err)
{
  enum mf_status rc = MF_OK;
  for(int i = 0; i < b->count * VERSIONS && rc == MF_OK; i++) {
    struct behind_kernel *k = &b->kernels[i / VERSIONS];
    const int v = i % VERSIONS;
    const struct schedule sched = with_knob(k, versions[v].pdl);
    const struct artifact *art = &k->art[versions[v].pdl];
    struct verdict why = {0};
    struct mf_recipe recipe = {0};
    if(limits_after_compile(&b->spec->problem, &sched, &b->t->target.dev, art, &why) != MF_OK)
      return error_set(err, MF_ERR_UNSUPPORTED, "%s with pdl %d: rule %s: %s", k->name, versions[v].pdl, why.rule, why.detail);
    rc = sched.family->recipe(&b->spec->problem, &sched, &b->t->target.dev, &recipe, err);
    recipe.flags &= versions[v].flags;
    if(rc == MF_OK)
      rc = device_client_load_kernel(b->client, art->cubin, art->cubin_bytes, &recipe, &k->handle[v], err);
  }
  return rc;
}

/* ---- times ---- */
static void print_row(struct behind *b, int tokens, const struct behind_kernel *k, int version, int kind, double median, double low, double high, double router_us)
{
  const bool alone = version == VERSIONS;
  const char *name = alone ? "the router alone" : k->name, *edge = kind_names[kind];
  const int pdl = alone ? kind != BEHIND_PLAIN : versions[version].pdl;
  const bool cooperative = !alone && (versions[version].flags & MF_RECIPE_COOPERATIVE) != 0;
  if(b->rows != NULL) {
    json_array_append_new(b->rows, json_pack("{s:s, s:i, s:i, s:s, s:b, s:b, s:o, s:o, s:o, s:o, s:s}", "shape", b->spec->name, "tokens", tokens, "pdl", pdl, "edges",
                                             edge, "cooperative", (int)cooperative, "router_alone", (int)alone, "us", isnan(median) ? json_null() : json_real(median),
                                             "us_low", isnan(median) ? json_null() : json_real(low), "us_high", isnan(median) ? json_null() : json_real(high),
                                             "less_router_us", alone || isnan(median) ? json_null() : json_real(median - router_us), "schedule", k->name));
    return;
  }
  printf("| %s | %d | %d | %s | %s | ", b->spec->name, tokens, pdl, edge, cooperative ? "yes" : "no");
  if(isnan(median))
    printf("refused | | |");
  else if(alone)
    printf("%.2f | %.2f-%.2f | |", median, low, high);
  else
    printf("%.2f | %.2f-%.2f | %.2f |", median, low, high, median - router_us);
  printf(" %s |\n", name);
}

static bool exists(int version, int kind)
{
  return kind == BEHIND_PLAIN || (version == VERSIONS ? kind == BEHIND_CHAIN : (versions[version].flags & MF_RECIPE_PDL) != 0);
}

static enum mf_status time_schedule(struct behind *b, const struct behind_kernel *k, int tokens, struct error *err)
{
  double us[TIMES][BENCH_ROUNDS] = {{0}}, median[TIMES], low[TIMES], high[TIMES];
  struct error refused = {MF_OK, ""};
  enum mf_status rc = device_client_open_profile(b->client, k->handle, VERSIONS, tokens, ROUTING_UNIFORM, BENCH_SEED + (uint32_t)tokens, BENCH_LAUNCHES, err);
  if(rc == MF_OK)
    rc = device_client_open_behind(b->client, b->router, b->router_bytes, &refused, err);
  for(int round = 0; round < BENCH_ROUNDS && rc == MF_OK; round++) {
    double one[TIMES] = {0};
    rc = interrupt_requested() ? error_set(err, MF_ERR_INTERRUPTED, "interrupted") : device_client_behind(b->client, round, one, err);
    for(int i = 0; i < TIMES && rc == MF_OK; i++)
      us[i][round] = one[i];
  }
  if(rc != MF_OK)
    return rc;
  for(int i = 0; i < TIMES; i++) {
    median[i] = low[i] = high[i] = NAN;
    if(!isnan(us[i][0]))
      timing_median(us[i], BENCH_ROUNDS, &median[i], &low[i], &high[i]);
  }
  for(int i = 0; i < TIMES; i++)
    if(exists(i / BEHIND_KINDS, i % BEHIND_KINDS))
      print_row(b, tokens, k, i / BEHIND_KINDS, i % BEHIND_KINDS, median[i], low[i], high[i], median[VERSIONS * BEHIND_KINDS + BEHIND_PLAIN]);
  if(refused.status != MF_OK)
    progress_say(&b->t->progress, "refused: %s", refused.text);
  return MF_OK;
}

static enum mf_status time_all(struct behind *b, const bool *wanted, struct error *err)
{
  enum mf_status rc = MF_OK;
  for(int w = 0; w < b->shape->nwinners; w++) {
    const struct winner *win = &b->shape->winners[w];
    for(int tokens = win->tokens_min; tokens <= win->tokens_max && tokens <= MAX_TOKENS; tokens++)
      for(int i = 0; i < b->count && wanted[tokens] && rc == MF_OK; i++)
        if(i == b->winner[w] || b->kernels[i].named)
          rc = time_schedule(b, &b->kernels[i], tokens, err);
  }
  return rc;
}

enum mf_status bench_behind(struct tuner *t, struct device_client *client, const struct model_spec *spec, const struct bench_shape *shape, const bool *wanted,
                            json_t *rows, struct error *err)
{
  struct behind *b = calloc(1, sizeof(*b));
  enum mf_status rc;
  if(b == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  *b = (struct behind){.t = t, .client = client, .spec = spec, .shape = shape, .rows = rows};
  rc = choose(b, wanted, err);
  if(rc == MF_OK)
    rc = compile_all(b, err);
  if(rc == MF_OK)
    rc = load_all(b, err);
  if(rc == MF_OK && rows == NULL)
    printf("| shape | tokens | pdl | edges | cooperative | us with router | 95 %% of median | less router | schedule |\n|---|---|---|---|---|---|---|---|---|\n");
  if(rc == MF_OK)
    rc = time_all(b, wanted, err);
  for(int i = 0; i < 2 * b->count; i++) {
    artifact_free(&b->kernels[i / 2].art[i % 2]);
    closure_free(&b->kernels[i / 2].closure[i % 2]);
  }
  free((void *)(uintptr_t)b->router);
  free(b);
  return rc;
}
