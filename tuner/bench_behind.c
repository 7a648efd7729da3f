/* bench_behind.c - `bench --behind`: launches behind another kernel, a stand-in for a router, as a program would have them; with and without programmatic
 * dependent launch. What is timed is in device_cuda_behind.c, and why in docs/timing.md.
 *
 * Each schedule is compiled with the knob `pdl` 0 and 1. Both kernels run in one profile, the second one also with the cooperative attribute; the times are
 * medians over interleaved rounds, of router and layer together. Nothing is stored, and no winner changes.
 *
 * A row is one kind of launch. Rows are tried one by one before any is timed, those last that are cooperative and dependent. One that hangs, or else ends the
 * child, costs the child: another one starts, the others are tried again, and that row is left out, at the next token counts, too. */
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
  uint32_t flags;       /* instead of the recipe's */
} versions[] = {{0, MF_RECIPE_COOPERATIVE}, {1, MF_RECIPE_PDL}, {1, MF_RECIPE_COOPERATIVE | MF_RECIPE_PDL}};
#define VERSIONS (int)(sizeof(versions) / sizeof(versions[0]))
#define ROWS ((VERSIONS + 1) * BEHIND_KINDS) /* row: version * BEHIND_KINDS + kind; the last version is the router alone */

static const char *const kind_names[BEHIND_KINDS] = {[BEHIND_PLAIN] = "none", [BEHIND_EDGE] = "router > layer", [BEHIND_CHAIN] = "both"};

/* What became of a row. */
enum fate { FATE_TIMED, FATE_REFUSED, FATE_HANGS, FATE_FAILS, FATE_WRONG, FATE_UNTRIED };
static const char *const fate_names[] = {[FATE_TIMED] = "timed", [FATE_REFUSED] = "refused",      [FATE_HANGS] = "hangs",
                                         [FATE_FAILS] = "fails", [FATE_WRONG] = "wrong outputs", [FATE_UNTRIED] = "not tried"};

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
  struct device_client **client;
  const struct model_spec *spec;
  const struct bench_shape *shape;
  struct behind_kernel kernels[BENCH_MAX_KERNELS];
  int count;
  int winner[MAX_TOKEN_COUNTS];  /* its kernel; -1: none with the knob */
  const void *router;            /* cubin */
  size_t router_bytes;
  enum fate lost[ROWS];          /* FATE_HANGS, FATE_FAILS: not to be tried again; else FATE_TIMED */
  struct error failure;          /* the first row that fails or is wrong; MF_OK: none */
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

/* Both versions of every schedule, from the present templates: what the store has may be older. */
static enum mf_status compile_all(struct behind *b, struct error *err)
{
  const struct options *opt = b->t->opt;
  const struct device_info *dev = &b->t->target.dev;
  const struct compile_pool pool = {.program = opt->program, .jobs = opt->jobs, .arch = compile_arch(dev->cc_major, dev->cc_minor), .done = compile_pool_need_all,
                                    .keep_going = compile_pool_not_interrupted};
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
    recipe.flags = versions[v].flags;
    if(rc == MF_OK)
      rc = device_client_load_kernel(*b->client, art->cubin, art->cubin_bytes, &recipe, &k->handle[v], err);
  }
  return rc;
}

/* ---- rows ---- */
static bool is_alone(int row) { return row / BEHIND_KINDS == VERSIONS; }
static bool is_cooperative(int row) { return !is_alone(row) && (versions[row / BEHIND_KINDS].flags & MF_RECIPE_COOPERATIVE) != 0; }
static int pdl_of(int row) { return is_alone(row) ? row % BEHIND_KINDS != BEHIND_PLAIN : versions[row / BEHIND_KINDS].pdl; }

static bool exists(int row)
{
  const int kind = row % BEHIND_KINDS;
  return kind == BEHIND_PLAIN || (is_alone(row) ? kind == BEHIND_CHAIN : (versions[row / BEHIND_KINDS].flags & MF_RECIPE_PDL) != 0);
}

static void print_row(struct behind *b, int tokens, const struct behind_kernel *k, int row, enum fate fate, double *us, double router_us)
{
  const char *name = is_alone(row) ? "the router alone" : k->name, *edges = kind_names[row % BEHIND_KINDS];
  double median = NAN, low = NAN, high = NAN;
  if(fate == FATE_TIMED)
    timing_median(us, BENCH_ROUNDS, &median, &low, &high);
  if(b->rows != NULL) {
    const bool timed = fate == FATE_TIMED, less = timed && !is_alone(row) && !isnan(router_us);
    json_array_append_new(b->rows, json_pack("{s:s, s:i, s:i, s:s, s:b, s:b, s:s, s:o, s:o, s:o, s:o, s:s}", "shape", b->spec->name, "tokens", tokens, "pdl",
                                             pdl_of(row), "edges", edges, "cooperative", (int)is_cooperative(row), "router_alone", (int)is_alone(row), "fate",
                                             fate_names[fate], "us", timed ? json_real(median) : json_null(), "us_low", timed ? json_real(low) : json_null(),
                                             "us_high", timed ? json_real(high) : json_null(), "less_router_us",
                                             less ? json_real(median - router_us) : json_null(), "schedule", k->name));
    return;
  }
  printf("| %s | %d | %d | %s | %s | ", b->spec->name, tokens, pdl_of(row), edges, is_cooperative(row) ? "yes" : "no");
  if(fate != FATE_TIMED)
    printf("%s | | |", fate_names[fate]);
  else if(is_alone(row) || isnan(router_us))
    printf("%.2f | %.2f-%.2f | |", median, low, high);
  else
    printf("%.2f | %.2f-%.2f | %.2f |", median, low, high, median - router_us);
  printf(" %s |\n", name);
  fflush(stdout); /* what is known stays, whatever comes */
}

static void say(struct behind *b, int tokens, int row, enum fate fate, const struct error *why)
{
  progress_say(&b->t->progress, "%s: %s, pdl %d, edges %s, cooperative %s, %d token%s: %s", fate_names[fate], is_alone(row) ? "the router alone" : "the layer",
               pdl_of(row), kind_names[row % BEHIND_KINDS], is_cooperative(row) ? "yes" : "no", tokens, tokens == 1 ? "" : "s", why->text);
  if((fate == FATE_FAILS || fate == FATE_WRONG) && b->failure.status == MF_OK)
    b->failure = *why;
}

/* ---- times ---- */
static enum mf_status try_row(struct behind *b, int tokens, int row, enum fate fate[ROWS], struct error *err)
{
  struct error refused = {MF_OK, ""};
  enum mf_status rc;
  if(fate[row] == FATE_TIMED)
    fate[row] = b->lost[row];
  if(fate[row] != FATE_TIMED) /* known, of an earlier child */
    return MF_OK;
  if(!is_alone(row) && row % BEHIND_KINDS != BEHIND_PLAIN && fate[row - row % BEHIND_KINDS] != FATE_TIMED) { /* there are no outputs to compare with */
    fate[row] = FATE_UNTRIED;
    return MF_OK;
  }
  rc = device_client_try_behind(*b->client, row / BEHIND_KINDS, (enum behind_kind)(row % BEHIND_KINDS), b->t->opt->timeout_ms, &refused, err);
  if(rc == MF_ERR_CHECK || refused.status != MF_OK) {
    fate[row] = rc == MF_OK ? FATE_REFUSED : FATE_WRONG;
    say(b, tokens, row, fate[row], rc == MF_OK ? &refused : err);
    return MF_OK;
  }
  return rc;
}

/* Tries and times the rows that are not lost. *at: the row at work when the child was lost; -1: none was. */
static enum mf_status time_rows(struct behind *b, const struct behind_kernel *k, int tokens, enum fate fate[ROWS], double us[ROWS][BENCH_ROUNDS], int *at,
                                struct error *err)
{
  enum mf_status rc = device_client_open_profile(*b->client, k->handle, VERSIONS, tokens, ROUTING_UNIFORM, BENCH_SEED + (uint32_t)tokens, BENCH_LAUNCHES, err);
  *at = -1;
  if(rc == MF_OK)
    rc = device_client_open_behind(*b->client, b->router, b->router_bytes, err);
  for(int late = 0; late < 2; late++)
    for(int row = 0; row < ROWS && rc == MF_OK; row++)
      if(exists(row) && (row % BEHIND_KINDS != BEHIND_PLAIN && is_cooperative(row)) == (late == 1)) {
        *at = row;
        rc = try_row(b, tokens, row, fate, err);
      }
  for(int i = 0; i < BENCH_ROUNDS * ROWS && rc == MF_OK; i++) {
    const int round = i / ROWS, row = (round + i) % ROWS;
    if(!exists(row) || fate[row] != FATE_TIMED)
      continue;
    *at = row;
    if(interrupt_requested())
      return error_set(err, MF_ERR_INTERRUPTED, "interrupted");
    rc = device_client_time_behind(*b->client, row / BEHIND_KINDS, (enum behind_kind)(row % BEHIND_KINDS), b->t->opt->timeout_ms, &us[row][round], err);
  }
  return rc;
}

static enum mf_status replace_child(struct behind *b, struct error *err)
{
  const struct bench_shape *shape = b->shape;
  enum mf_status rc;
  device_client_stop(*b->client);
  *b->client = NULL;
  rc = tune_start_timing(b->t, b->spec, shape->winners[0].tokens_min, shape->winners[shape->nwinners - 1].tokens_max, b->client, err);
  return rc == MF_OK ? load_all(b, err) : rc;
}

static enum mf_status time_schedule(struct behind *b, const struct behind_kernel *k, int tokens, struct error *err)
{
  double us[ROWS][BENCH_ROUNDS] = {{0}}, values[BENCH_ROUNDS], router_us = NAN, low, high;
  enum fate fate[ROWS] = {FATE_TIMED};
  const int router = VERSIONS * BEHIND_KINDS + BEHIND_PLAIN;
  enum mf_status rc;
  int at;
  for(;;) {
    rc = time_rows(b, k, tokens, fate, us, &at, err);
    if(at < 0 || (rc != MF_ERR_TIMEOUT && rc != MF_ERR_DEVICE && rc != MF_ERR_WORKER))
      break;
    b->lost[at] = rc == MF_ERR_TIMEOUT ? FATE_HANGS : FATE_FAILS;
    say(b, tokens, at, b->lost[at], err);
    rc = replace_child(b, err);
    if(rc != MF_OK)
      return error_prefix(err, "starting again behind a row that was lost");
  }
  if(rc != MF_OK)
    return rc;
  memcpy(values, us[router], sizeof(values));
  if(fate[router] == FATE_TIMED)
    timing_median(values, BENCH_ROUNDS, &router_us, &low, &high);
  for(int row = 0; row < ROWS; row++)
    if(exists(row))
      print_row(b, tokens, k, row, fate[row], us[row], router_us);
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

enum mf_status bench_behind(struct tuner *t, struct device_client **client, const struct model_spec *spec, const struct bench_shape *shape, const bool *wanted,
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
  if(rc == MF_OK && b->failure.status != MF_OK) {
    *err = b->failure;
    rc = err->status;
  }
  for(int i = 0; i < 2 * b->count; i++) {
    artifact_free(&b->kernels[i / 2].art[i % 2]);
    closure_free(&b->kernels[i / 2].closure[i % 2]);
  }
  free((void *)(uintptr_t)b->router);
  free(b);
  return rc;
}
