/* trace.c - the command `trace`: runs one schedule's kernel, built with trace points, on a GPU or on the emulated device, and shows where the time of its
 * launches goes. The stages are in trace.h.
 *
 * The traced kernel is another artifact than the one that is served: its source begins with a #define, so that it has a key of its own. It is neither
 * looked up nor stored. Launches are as in timing: cold weights (as many layers as that takes), other inputs for each, none waits for the host. */
#include "trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "compile.h"
#include "compile_pool.h"
#include "driver.h"
#include "emit.h"
#include "family_stream.h"
#include "faults.h"
#include "files.h"
#include "limits.h"
#include "report.h"
#include "tune.h"

#define TRACE_LINE "#define MF_TRACE 1\n"
#define EMULATED_LAUNCHES 2
#define LEAST_WARM 24           /* launches before those that are traced: the clocks of an idle GPU need some time to rise */
#define SVG_CEILING (256u << 20)

struct tracing {
  struct tuner t;
  const char *what;              /* as it was named: a spec's file or a shape */
  struct model_spec spec;
  struct schedule schedule;
  char name[2 * NAME_MAX_LEN];   /* of the schedule */
  int tokens;
  struct mf_recipe recipe;
  struct artifact art;
  void *image;                   /* for the emulated device */
  size_t image_bytes;
  struct device_trace run;
  struct trace trace;
};

/* ---- what is traced ---- */
static void print_line(void *context, const char *line)
{
  progress_error(context, line);
}

struct winner_search {
  int64_t device_id;
  int tokens;
  bool shape_there, found;
  int64_t shape_id;
  char schedule[2 * NAME_MAX_LEN];
};

static bool take_winner(void *context, const struct winner *win)
{
  struct winner_search *search = context;
  search->shape_there = true;
  search->shape_id = win->shape_id;
  if(win->device_id != search->device_id || search->tokens < win->tokens_min || search->tokens > win->tokens_max)
    return true;
  memcpy(search->schedule, win->schedule_name, sizeof(search->schedule));
  search->found = true;
  return false;
}

/* Looks into one store; it stays open only if it has what is traced. */
static enum mf_status search_store(struct tracing *tr, const char *path, struct winner_search *search, struct error *err)
{
  enum mf_status rc = store_open(path, true, &tr->t.store, err);
  if(rc != MF_OK)
    return rc;
  search->device_id = -1;
  if(store_find_device(tr->t.store, &tr->t.target.dev, &search->device_id, err) != MF_OK)
    search->device_id = -1;
  search->shape_id = -1;
  rc = store_each_winner(tr->t.store, tr->what, take_winner, search, err);
  if(rc == MF_OK && (search->found || (tr->t.opt->schedules != NULL && search->shape_id >= 0)))
    return MF_OK;
  store_close(tr->t.store);
  tr->t.store = NULL;
  return rc;
}

/* A tuned shape: its problem, and its winner on this device unless --schedule names another schedule. From the work store, else the shipped one. */
static enum mf_status from_store(struct tracing *tr, struct error *err)
{
  const struct options *opt = tr->t.opt;
  const char *const paths[] = {opt->store_path, opt->shipped_path};
  struct winner_search search = {.tokens = tr->tokens};
  enum mf_status rc = MF_OK;
  for(int i = 0; i < 2 && rc == MF_OK && tr->t.store == NULL; i++)
    if(access(paths[i], F_OK) == 0)
      rc = search_store(tr, paths[i], &search, err);
  if(rc != MF_OK)
    return rc;
  if(!search.shape_there)
    return error_set(err, MF_ERR_NOT_FOUND, "%s: no such file, and no shape of that name was tuned (see `moeforge show`)", tr->what);
  if(tr->t.store == NULL)
    return error_set(err, MF_ERR_NOT_FOUND, "%s: no winner for %d tokens on %s: name one with --schedule, or give the spec's file for the default schedule",
                     tr->what, tr->tokens, tr->t.target.dev.name);
  rc = store_get_shape(tr->t.store, search.shape_id, &tr->spec, err);
  return rc == MF_OK && opt->schedules == NULL ? schedule_parse(search.schedule, &tr->schedule, err) : rc;
}

static enum mf_status from_file(struct tracing *tr, struct error *err)
{
  struct fault_lines lines = {.say = print_line, .context = &tr->t.progress};
  const enum mf_status rc = spec_read(tr->what, &tr->spec, fault_lines_take, &lines, err);
  fault_lines_end(&lines, tr->what, err);
  if(rc == MF_OK && tr->t.opt->schedules == NULL)
    family_stream.default_schedule(&tr->spec.problem, tr->tokens, &tr->t.target.dev, &tr->schedule);
  return rc;
}

static enum mf_status rejected(const struct verdict *why, const char *what, struct error *err)
{
  return error_set(err, MF_ERR_UNSUPPORTED, "%s: rule %s: %s", what, why->rule, why->detail);
}

static enum mf_status choose(struct tracing *tr, struct error *err)
{
  const struct options *opt = tr->t.opt;
  const char *suffix = strrchr(tr->what, '.');
  const bool is_file = access(tr->what, F_OK) == 0 || (suffix != NULL && strcmp(suffix, ".yaml") == 0);
  struct model_spec none = {.ntokens = 0};
  int tokens[MAX_TOKEN_COUNTS] = {1}, count = 1;
  struct verdict why = {0};
  enum mf_status rc = opt->tokens == NULL ? MF_OK : target_tokens(opt, &none, tokens, &count, err);
  if(rc == MF_OK && count != 1)
    return error_set(err, MF_ERR_USAGE, "--tokens %s: trace takes one token count", opt->tokens);
  tr->tokens = tokens[0];
  if(rc == MF_OK)
    rc = is_file ? from_file(tr, err) : from_store(tr, err);
  if(rc == MF_OK && opt->schedules != NULL && schedule_parse(opt->schedules, &tr->schedule, err) != MF_OK) {
    error_prefix(err, "--schedule");
    return err->status = MF_ERR_USAGE;
  }
  if(rc == MF_OK && tr->schedule.family != &family_stream)
    return error_set(err, MF_ERR_UNSUPPORTED, "family %s has no trace points", tr->schedule.family->name);
  if(rc == MF_OK && (family_stream.serves(&tr->spec.problem, tr->tokens, &tr->t.target.dev, &why) != MF_OK ||
                     limits_before_compile(&tr->spec.problem, &tr->schedule, &tr->t.target.dev, &why) != MF_OK))
    return rejected(&why, tr->spec.name, err);
  if(rc == MF_OK)
    schedule_name(&tr->schedule, tr->name, sizeof(tr->name));
  return rc;
}

/* ---- the kernel ---- */
/* The emitted source with the trace points switched on, and a workspace with room for what they leave. */
static enum mf_status emit_traced(struct tracing *tr, struct error *err)
{
  const struct mf_problem *p = &tr->spec.problem;
  enum mf_status rc = emit_source(p, tr->spec.name, &tr->schedule, &tr->t.target.dev, &tr->art, err);
  char *source;
  size_t space;
  if(rc == MF_OK)
    rc = family_stream.recipe(p, &tr->schedule, &tr->t.target.dev, &tr->recipe, err);
  if(rc != MF_OK)
    return rc;
  space = strlen(tr->art.source) + sizeof(TRACE_LINE);
  source = malloc(space);
  if(source == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  snprintf(source, space, "%s%s", TRACE_LINE, tr->art.source);
  free(tr->art.source);
  tr->art.source = source;
  tr->run.offset = (uint64_t)MF_TRACE_OFFSET(problem_ranks(p), p->intermediate);
  tr->run.bytes = (size_t)MF_TRACE_BYTES(tr->recipe.grid[0]);
  tr->recipe.workspace_bytes = tr->run.offset + tr->run.bytes;
  return MF_OK;
}

static enum mf_status compile_traced(struct tracing *tr, struct error *err)
{
  const struct options *opt = tr->t.opt;
  const struct device_info *dev = &tr->t.target.dev;
  const struct compile_pool pool = {.program = opt->program, .jobs = 1, .arch = compile_arch(dev->cc_major, dev->cc_minor), .done = compile_pool_need_all,
                                    .keep_going = compile_pool_not_interrupted};
  struct closure closure;
  struct verdict why = {0};
  enum mf_status rc = closure_collect(opt->template_dir, tr->art.source, &closure, err);
  if(rc != MF_OK)
    return rc;
  const struct compile_job job = {&tr->art, &closure};
  rc = compile_pool_run(&pool, &job, 1, err);
  closure_free(&closure);
  if(rc == MF_OK && limits_after_compile(&tr->spec.problem, &tr->schedule, dev, &tr->art, &why) != MF_OK)
    return rejected(&why, "the traced kernel", err);
  return rc;
}

/* ---- the device ---- */
static void say_line(void *context, const char *line)
{
  progress_say(context, "%s", line);
}

static enum mf_status start_gpu(struct tracing *tr, struct device_client **client, struct error *err)
{
  struct tuner *t = &tr->t;
  enum mf_status rc = compile_traced(tr, err);
  if(rc == MF_OK)
    rc = device_tools_build(t->opt->program, t->opt->template_dir, compile_arch(t->target.dev.cc_major, t->target.dev.cc_minor), &t->tools, err);
  if(rc == MF_OK)
    rc = device_client_start(t->opt->program, t->target.ordinal, &t->tools.tools, 0, client, err);
  return rc == MF_OK ? device_client_lock(*client, say_line, &t->progress, err) : rc;
}

/* There is no cubin to compare metadata with: what is emulated is the source. */
static enum mf_status start_emulated(struct tracing *tr, struct device_client **client, struct error *err)
{
  struct tuner *t = &tr->t;
  enum mf_status rc;
  snprintf(t->cache_dir, sizeof(t->cache_dir), "%s.cache", t->opt->store_path);
  rc = tune_emulation(t, err);
  if(rc != MF_OK)
    return rc;
  tr->image_bytes = emu_image_bytes(tr->art.source, 0);
  tr->image = malloc(tr->image_bytes);
  if(tr->image == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  emu_image_make(tr->recipe.kernel, tr->art.source, NULL, 0, tr->image);
  return device_client_start_emulated(t->opt->program, &t->emulation, 0, client, err);
}

static enum mf_status run(struct tracing *tr, void **area, struct error *err)
{
  const struct options *opt = tr->t.opt;
  const bool emulated = tr->t.target.emulated;
  const struct mf_problem *p = &tr->spec.problem;
  const int layers = emulated ? 1 : device_layers_needed(p, &tr->t.target.dev, tr->tokens);
  struct device_client *client = NULL;
  int kernel = 0;
  enum mf_status rc = emulated ? start_emulated(tr, &client, err) : start_gpu(tr, &client, err);
  tr->run.tokens = tr->tokens;
  tr->run.routing = opt->routings[0]; /* uniform if not given */
  tr->run.seed = (uint32_t)opt->first_seed;
  tr->run.launches = opt->launches > 0 ? opt->launches : emulated ? EMULATED_LAUNCHES : MF_TRACE_LAUNCHES;
  tr->run.warm = emulated ? 1 : layers > LEAST_WARM ? layers : LEAST_WARM;
  tr->run.timeout_ms = emulated ? opt->emulation_timeout_ms : opt->timeout_ms;
  if(rc == MF_OK)
    rc = device_client_load_problem(client, p, tr->spec.routed_scaling, layers, tr->tokens, err);
  if(rc == MF_OK)
    rc = device_client_load_kernel(client, emulated ? tr->image : (const void *)tr->art.cubin, emulated ? tr->image_bytes : tr->art.cubin_bytes, &tr->recipe,
                                   &kernel, err);
  if(rc == MF_OK)
    rc = device_client_trace(client, kernel, &tr->run, area, err);
  device_client_stop(client);
  return rc;
}

/* ---- results ---- */
static enum mf_status write_picture(const struct tracing *tr, const struct trace_title *title, struct error *err)
{
  struct strbuf svg;
  enum mf_status rc;
  strbuf_init(&svg, SVG_CEILING);
  trace_svg(&tr->trace, title, &svg);
  rc = strbuf_failed(&svg) ? error_set(err, MF_ERR_NOMEM, "no memory for the picture")
                           : file_write_whole(tr->t.opt->output, strbuf_text(&svg), svg.length, err);
  strbuf_free(&svg);
  return rc;
}

static enum mf_status print_trace(const struct tracing *tr, const struct trace_title *title, struct error *err)
{
  struct strbuf text;
  json_t *all;
  bool good;
  if(tr->t.opt->json) {
    all = trace_json(&tr->trace, title);
    good = all != NULL && json_dumpf(all, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) == 0 && putchar('\n') != EOF;
    json_decref(all);
    return good ? MF_OK : error_set(err, MF_ERR_IO, "standard output: cannot be written");
  }
  strbuf_init(&text, 1u << 20);
  trace_text(&tr->trace, title, &text);
  good = !strbuf_failed(&text) && fputs(strbuf_text(&text), stdout) >= 0;
  strbuf_free(&text);
  return good ? MF_OK : error_set(err, MF_ERR_IO, "standard output: cannot be written");
}

static enum mf_status show(struct tracing *tr, const void *area, struct error *err)
{
  const struct options *opt = tr->t.opt;
  const struct trace_title title = {.shape = tr->spec.name, .device = tr->t.target.dev.name, .schedule = tr->name, .routing = routing_name(opt->routings[0]),
                                    .tokens = tr->tokens, .seed = tr->run.seed, .expert_bytes = problem_expert_bytes(&tr->spec.problem)};
  enum mf_status rc = trace_read(area, (int)tr->recipe.grid[0], (uint32_t)tr->run.warm, tr->run.launches, tr->t.target.emulated, &tr->trace, err);
  if(rc != MF_OK)
    return rc;
  rc = print_trace(tr, &title, err);
  if(rc == MF_OK && opt->output != NULL)
    rc = write_picture(tr, &title, err);
  trace_free(&tr->trace);
  return rc;
}

enum mf_status trace_command(const struct options *opt, const char *what, struct error *err)
{
  struct tracing *tr = calloc(1, sizeof(*tr));
  void *area = NULL;
  enum mf_status rc;
  if(tr == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  tr->t.opt = opt;
  tr->what = what;
  progress_init(&tr->t.progress, opt->quiet);
  rc = opt->nroutings > 1 ? error_set(err, MF_ERR_USAGE, "trace: expected one routing, got %d", opt->nroutings) : file_spare_input(opt->output, what, err);
  if(rc == MF_OK)
    rc = target_resolve(opt, &tr->t.target, err);
  if(rc == MF_OK && !tr->t.target.gpu && !tr->t.target.emulated)
    rc = error_set(err, MF_ERR_NO_DEVICE, "trace needs a GPU, or --device emu for an order of events without times: %s", tr->t.target.note);
  if(rc == MF_OK)
    rc = choose(tr, err);
  if(rc == MF_OK)
    rc = emit_traced(tr, err);
  if(rc == MF_OK)
    rc = run(tr, &area, err);
  if(rc == MF_OK)
    rc = show(tr, area, err);
  free(area);
  free(tr->image);
  artifact_free(&tr->art);
  device_tool_set_free(&tr->t.tools);
  if(tr->t.store != NULL)
    store_close(tr->t.store);
  free(tr);
  return rc;
}
