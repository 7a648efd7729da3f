/* fuzz.c - `moeforge fuzz`: many random interleavings of one schedule on the emulated device, on random inputs, in search of races, deadlocks and
 * wrong numbers.
 *
 * Everything follows from the *seed*: the case (token count, routing, data, seed of the inputs: case_of) and who runs when in its launches
 * (device_emu.h). So a failure is told with the seed and the command line that shows it again. Seeds are independent; the workers of
 * device_client_check_many() share them out, and a seed that failed is run again in a fresh process before it counts.
 *
 * Few seeds of inputs on purpose: references are made by the CPU and kept in the cache folder, and what is searched for lies in the interleaving. */
#include "fuzz.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "datagen.h"
#include "driver.h"
#include "emit.h"
#include "faults.h"
#include "tune.h"

#define REPLAYS 3        /* launches of a case on one workspace */
#define INPUT_SEEDS 4    /* of each kind of case */
#define CASE_STREAM 0x66757a7au

/* The schedule at one token count: its recipe and what the device loads. */
struct loaded {
  struct schedule schedule;
  char name[2 * NAME_MAX_LEN];
  struct mf_recipe recipe;
  void *image;
  size_t bytes;
};

struct fuzz {
  struct tuner t;
  const char *path;              /* of the spec */
  struct model_spec spec;
  int tokens[MAX_TOKEN_COUNTS];  /* that the family serves */
  int ntokens;
  struct loaded at[MAX_TOKENS + 1]; /* by token count */
  uint64_t *seeds;
  struct test_case *cases;
  struct check_item *items;
  size_t count, run, findings;
  json_t *found;                 /* of --json */
};

struct test_case fuzz_case(uint64_t seed, const int *tokens, int ntokens)
{
  uint64_t draw[4];
  struct test_case tc;
  for(uint64_t i = 0; i < 4; i++)
    draw[i] = data_hash(seed, CASE_STREAM, i);
  tc.tokens = tokens[draw[0] % (uint64_t)ntokens];
  tc.routing = (enum routing_kind)(draw[1] % ROUTING_KINDS);
  tc.data = draw[2] % 2 == 0 ? CASE_NORMAL : (enum case_data)((draw[2] >> 1) % CASE_DATA_KINDS);
  tc.seed = (uint32_t)(1 + draw[3] % INPUT_SEEDS);
  return tc;
}

/* ---- what is run ---- */
static void print_line(void *context, const char *line)
{
  progress_error(context, line);
}

static enum mf_status read_spec(struct fuzz *f, struct error *err)
{
  struct fault_lines lines = {.say = print_line, .context = &f->t.progress};
  enum mf_status rc = spec_read(f->path, &f->spec, fault_lines_take, &lines, err);
  fault_lines_end(&lines, f->path, err);
  if(rc == MF_OK)
    rc = target_tokens(f->t.opt, &f->spec, f->tokens, &f->ntokens, err);
  return rc;
}

/* Fuzzing needs no GPU and uses none: "auto" is the emulated device. */
static enum mf_status open_target(struct fuzz *f, struct options *opt, struct error *err)
{
  struct tuner *t = &f->t;
  enum mf_status rc;
  if(strcmp(opt->device, "auto") == 0)
    opt->device = "emu";
  rc = target_resolve(opt, &t->target, err);
  if(rc != MF_OK)
    return rc;
  if(!t->target.emulated)
    return error_set(err, MF_ERR_USAGE, "--device %s: fuzz runs on the emulated device: emu, or emu: and a device spec", opt->device);
  snprintf(t->cache_dir, sizeof(t->cache_dir), "%s.cache", opt->store_path);
  return tune_emulation(t, err);
}

static enum mf_status rejected(const struct verdict *why, const char *what, struct error *err)
{
  return error_set(err, MF_ERR_UNSUPPORTED, "%s: rule %s: %s", what, why->rule, why->detail);
}

/* The family that serves this token count; NULL if none does, and *why is the last one's reason. */
static const struct family_ops *family_for(const struct fuzz *f, int tokens, struct verdict *why)
{
  for(const struct family_ops *const *family = families_all(); *family != NULL; family++)
    if((*family)->serves(&f->spec.problem, tokens, &f->t.target.dev, why) == MF_OK)
      return *family;
  return NULL;
}

/* The named schedule, or the family's default. */
static enum mf_status choose_schedule(const struct fuzz *f, int tokens, struct schedule *out, struct error *err)
{
  const struct options *opt = f->t.opt;
  const struct mf_problem *p = &f->spec.problem;
  const struct device_info *dev = &f->t.target.dev;
  const char *name = opt->schedules != NULL ? opt->schedules : f->spec.name;
  struct verdict why = {0};
  enum mf_status rc = MF_OK;
  long bytes;
  if(opt->schedules != NULL)
    rc = schedule_parse(opt->schedules, out, err);
  else
    family_for(f, tokens, &why)->default_schedule(p, tokens, dev, out);
  if(rc != MF_OK) {
    error_prefix(err, "--schedule");
    return err->status = MF_ERR_USAGE;
  }
  if(out->family->serves(p, tokens, dev, &why) != MF_OK || out->family->constrain(p, out, dev, &why) != MF_OK)
    return rejected(&why, name, err);
  bytes = out->family->shared_bytes(p, out, dev);
  if(bytes > dev->shared_bytes_per_cta)
    return error_set(err, MF_ERR_UNSUPPORTED, "%s needs %ld bytes of shared memory, the device has %ld", name, bytes, dev->shared_bytes_per_cta);
  return MF_OK;
}

/* There is no cubin to compare metadata with: what is emulated is the source. */
static enum mf_status load(struct fuzz *f, int tokens, struct error *err)
{
  struct loaded *l = &f->at[tokens];
  struct artifact art = {0};
  enum mf_status rc = choose_schedule(f, tokens, &l->schedule, err);
  if(rc != MF_OK)
    return rc;
  schedule_name(&l->schedule, l->name, sizeof(l->name));
  rc = l->schedule.family->recipe(&f->spec.problem, &l->schedule, &f->t.target.dev, &l->recipe, err);
  if(rc == MF_OK)
    rc = emit_source(&f->spec.problem, f->spec.name, &l->schedule, &f->t.target.dev, &art, err);
  if(rc != MF_OK)
    return rc;
  l->bytes = emu_image_bytes(art.source, 0);
  l->image = malloc(l->bytes);
  if(l->image != NULL)
    emu_image_make(l->recipe.kernel, art.source, NULL, 0, l->image);
  free(art.source);
  return l->image != NULL ? MF_OK : error_set(err, MF_ERR_NOMEM, "out of memory");
}

/* Leaves the token counts that are served, and loads for each. */
static enum mf_status load_all(struct fuzz *f, struct error *err)
{
  struct verdict why = {0};
  enum mf_status rc = MF_OK;
  int count = 0;
  for(int i = 0; i < f->ntokens && rc == MF_OK; i++) {
    if(family_for(f, f->tokens[i], &why) == NULL)
      continue;
    f->tokens[count++] = f->tokens[i];
    rc = load(f, f->tokens[i], err);
  }
  f->ntokens = count;
  return rc == MF_OK && count == 0 ? rejected(&why, f->spec.name, err) : rc;
}

static enum mf_status make_items(struct fuzz *f, struct error *err)
{
  f->count = (size_t)f->t.opt->seeds;
  f->seeds = calloc(f->count, sizeof(*f->seeds));
  f->cases = calloc(f->count, sizeof(*f->cases));
  f->items = calloc(f->count, sizeof(*f->items));
  if(f->seeds == NULL || f->cases == NULL || f->items == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory for %zu seeds", f->count);
  for(size_t i = 0; i < f->count; i++) {
    struct check_item *item = &f->items[i];
    const struct loaded *l;
    f->seeds[i] = (uint64_t)f->t.opt->first_seed + i;
    f->cases[i] = fuzz_case(f->seeds[i], f->tokens, f->ntokens);
    l = &f->at[f->cases[i].tokens];
    item->cubin = l->image;
    item->cubin_bytes = l->bytes;
    item->recipe = &l->recipe;
    item->cases = &f->cases[i];
    item->ncases = 1;
  }
  return MF_OK;
}

/* ---- findings ---- */
/* The command line that shows a seed's failure again. */
static void command_line(const struct fuzz *f, uint64_t seed, char *out, size_t space)
{
  const struct options *opt = f->t.opt;
  const struct {
    const char *option, *value;
  } given[] = {{"--device", opt->device}, {"--schedule", opt->schedules}, {"--tokens", opt->tokens}, {"--templates", opt->templates_given}};
  int n = snprintf(out, space, "moeforge fuzz %s", f->path);
  for(size_t i = 0; i < sizeof(given) / sizeof(given[0]) && n >= 0 && (size_t)n < space; i++)
    if(given[i].value != NULL)
      n += snprintf(out + n, space - (size_t)n, " %s %s", given[i].option, given[i].value);
  if(n >= 0 && (size_t)n < space)
    snprintf(out + n, space - (size_t)n, " --seed %llu --seeds 1", (unsigned long long)seed);
}

/* A deadlock's groups of waiters, one a line. */
static void print_text(const char *text)
{
  for(const char *bar = strstr(text, " | "); bar != NULL; bar = strstr(text, " | ")) {
    printf("  %.*s\n", (int)(bar - text), text);
    text = bar + 3;
  }
  printf("  %s\n", text);
}

static void tell(struct fuzz *f, size_t index, const struct check_verdict *v)
{
  const struct test_case *tc = &f->cases[index];
  const char *what = v->fault[0] != '\0' ? v->fault : v->result.detail;
  char command[2048];
  command_line(f, f->seeds[index], command, sizeof(command));
  if(f->found != NULL) {
    json_array_append_new(f->found, json_pack("{s:I, s:i, s:s, s:s, s:I, s:s, s:s, s:s}", "seed", (json_int_t)f->seeds[index], "tokens", tc->tokens,
                                              "routing", routing_name(tc->routing), "data", case_data_name(tc->data), "input_seed", (json_int_t)tc->seed,
                                              "schedule", f->at[tc->tokens].name, "what", what, "command", command));
    return;
  }
  printf("seed %llu: %d tokens, %s, %s, inputs %u: %s\n", (unsigned long long)f->seeds[index], tc->tokens, routing_name(tc->routing),
         case_data_name(tc->data), (unsigned)tc->seed, f->at[tc->tokens].name);
  print_text(what);
  printf("  again: %s\n", command);
  fflush(stdout);
}

static enum mf_status on_verdict(void *context, size_t index, const struct check_verdict *v, struct error *err)
{
  struct fuzz *f = context;
  (void)err;
  f->run++;
  if(v->status != MF_OK) {
    f->findings++;
    tell(f, index, v);
  }
  progress_step(&f->t.progress, f->run, f->count, "%zu found", f->findings);
  return MF_OK;
}

/* ---- the command ---- */
static enum mf_status run_seeds(struct fuzz *f, struct error *err)
{
  const struct options *opt = f->t.opt;
  const struct test_case largest = {f->tokens[f->ntokens - 1], ROUTING_UNIFORM, CASE_NORMAL, 1}; /* tells how many tokens there must be room for */
  const struct check_plan plan = {.problem = &f->spec.problem, .routed_scaling = f->spec.routed_scaling, .cache_dir = f->t.cache_dir, .cases = &largest,
                                  .ncases = 1, .layers = 1, .replays = REPLAYS, .timeout_ms = opt->emulation_timeout_ms, .item_seeds = f->seeds};
  const struct check_pool pool = {.program = opt->program, .jobs = opt->jobs, .emulation = &f->t.emulation};
  progress_phase(&f->t.progress, "%s: fuzz", f->spec.name);
  return device_client_check_many(&pool, &plan, f->items, f->count, on_verdict, f, err);
}

static enum mf_status summary(const struct fuzz *f, double seconds, struct error *err)
{
  const struct options *opt = f->t.opt;
  const size_t launches = f->run * REPLAYS;
  if(f->found == NULL) {
    printf("%s on %s: %zu of %zu seeds from %d, %zu launches, %zu found, %.1f s\n", f->spec.name, f->t.target.dev.name, f->run, f->count, opt->first_seed,
           launches, f->findings, seconds);
    return MF_OK;
  }
  json_t *all = json_pack("{s:s, s:s, s:i, s:I, s:I, s:I, s:f, s:O}", "shape", f->spec.name, "device", f->t.target.dev.name, "first_seed", opt->first_seed,
                          "seeds", (json_int_t)f->count, "seeds_run", (json_int_t)f->run, "launches", (json_int_t)launches, "seconds", seconds, "findings",
                          f->found);
  const bool good = all != NULL && json_dumpf(all, stdout, JSON_INDENT(2)) == 0 && putchar('\n') != EOF;
  json_decref(all);
  return good ? MF_OK : error_set(err, MF_ERR_IO, "standard output: cannot be written");
}

static void fuzz_free(struct fuzz *f)
{
  for(int i = 0; i <= MAX_TOKENS; i++)
    free(f->at[i].image);
  free(f->seeds);
  free(f->cases);
  free(f->items);
  json_decref(f->found);
  free(f);
}

enum mf_status fuzz_command(const struct options *given, const char *path, struct error *err)
{
  struct options opt = *given;
  struct fuzz *f = calloc(1, sizeof(*f));
  struct error unwritten = {MF_OK, ""};
  double start;
  enum mf_status rc;
  if(f == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  f->t.opt = &opt;
  f->path = path;
  f->found = opt.json ? json_array() : NULL;
  progress_init(&f->t.progress, opt.quiet);
  rc = read_spec(f, err);
  if(rc == MF_OK)
    rc = open_target(f, &opt, err);
  if(rc == MF_OK)
    rc = load_all(f, err);
  if(rc == MF_OK)
    rc = make_items(f, err);
  if(rc != MF_OK) {
    fuzz_free(f);
    return rc;
  }
  start = progress_seconds();
  rc = run_seeds(f, err);
  if(rc == MF_ERR_INTERRUPTED)
    error_set(err, rc, "interrupted after %zu of %zu seeds", f->run, f->count);
  if(summary(f, progress_seconds() - start, &unwritten) != MF_OK && rc == MF_OK)
    rc = error_set(err, unwritten.status, "%s", unwritten.text);
  if(rc == MF_OK && f->findings > 0)
    rc = error_set(err, MF_ERR_CHECK, "%zu of %zu seeds failed", f->findings, f->count);
  fuzz_free(f);
  return rc;
}
