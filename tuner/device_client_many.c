/* device_client_many.c - checks many candidates side by side, so that a fault costs one candidate and nothing else.
 *
 * A *lane* is one child with its device and weights. It takes one candidate after the other from the queue:
 *
 *   OFF -> OPENING -> FILLING -> IDLE -> LOADING -> CHECKING -> UNLOADING -> IDLE -> ...
 *    ^________________________________________|___________|   the child died, hangs or lost its context: the candidate gets the blame
 *
 * Each arrow but the last is one request whose reply is awaited together with all other lanes' (worker_wait_any). A candidate that failed is queued
 * again, for a child that runs nothing else: what ran before it in the same child may have been the cause. If its first run was already the first one
 * of its child, and the second passes, then it is the candidate that is not reproducible, and that is a failure.
 *
 * A child that was killed from outside says nothing about its candidate, which is run again as if nothing had been; after MOST_KILLS of them the
 * work ends. So it is with one that had too little memory, whose lane is retired.
 *
 * A lane that cannot be started is retired if others work; device memory decides how many there can be. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device_client_internal.h"
#include "device_wire.h"
#include "progress.h"

#define MAX_LANES 64
#define WAIT_SLICE_MS 200
#define LOAD_LIMIT_MS 60000
#define JIT_LIMIT_MS 900000  /* the host's compiler, on a machine that is busy with other things */
#define START_TRIES 3        /* after a fault the driver may need a moment before it gives a new context */
#define START_PAUSE_MS 1000
#define MOST_KILLS 3         /* of one candidate's children, from outside */
#define MEMORY_SHARE 0.9     /* of the device's memory that the lanes may fill */

enum lane_state { LANE_OFF, LANE_OPENING, LANE_FILLING, LANE_IDLE, LANE_LOADING, LANE_CHECKING, LANE_UNLOADING, LANE_RETIRED };

struct lane {
  struct device_client client;
  enum lane_state state;
  int64_t deadline;      /* of the reply that is awaited */
  int64_t not_before;    /* of the next start */
  int start_failures;    /* in a row */
  size_t item;           /* in progress (LOADING, CHECKING) */
  bool second;           /* its second run */
  int kernel;            /* handle */
  int judged;            /* candidates that this child has been given */
};

/* What is known of an item between its runs. */
struct history {
  struct check_verdict first;
  bool first_alone;      /* the first run was the first of its child */
  int kills;             /* children that were killed from outside while they had it */
};

struct pool {
  const struct check_pool *opt;
  const struct check_plan *plan;
  const struct check_item *items;
  size_t count, next, finished;
  struct history *history;
  size_t *again;         /* items to be judged a second time: a queue */
  size_t nagain, next_again;
  struct {
    size_t item;
    bool second;
  } redo[MAX_LANES];     /* items whose child was killed from outside: at most one a lane */
  size_t nredo;
  struct lane *lanes;
  size_t nlanes;
  int tokens_max, threads;
  bool faulted;          /* some child was lost */
  check_done_fn *done;
  void *context;
  struct error start_error; /* of the last lane that could not be started */
};

static bool item_in_progress(const struct lane *lane)
{
  return lane->state == LANE_LOADING || lane->state == LANE_CHECKING;
}

/* ---- verdicts ---- */
static void set_fault(struct check_verdict *v, enum mf_status status, const char *text)
{
  memset(v, 0, sizeof(*v));
  v->status = status;
  snprintf(v->fault, sizeof(v->fault), "%.*s", (int)sizeof(v->fault) - 1, text);
}

/* The verdict of a candidate that failed as the first of its child and then passed. */
static void not_reproducible(const struct check_verdict *first, struct check_verdict *v)
{
  const char *what = first->fault[0] != '\0' ? first->fault : first->result.detail;
  v->status = MF_ERR_CHECK;
  v->result.passed = false;
  v->result.failed_gate = first->fault[0] != '\0' ? GATE_REPLAY : first->result.failed_gate;
  snprintf(v->result.detail, sizeof(v->result.detail), "not reproducible: passed when run again; the first time %.180s", what);
}

static enum mf_status conclude(struct pool *p, size_t item, const struct check_verdict *verdict, struct error *err)
{
  p->finished++;
  return p->done != NULL ? p->done(p->context, item, verdict, err) : MF_OK;
}

/* One run of an item has ended with *v. */
static enum mf_status take_verdict(struct pool *p, struct lane *lane, struct check_verdict *v, struct error *err)
{
  struct history *past = &p->history[lane->item];
  v->runs = lane->second ? 2 : 1;
  if(!lane->second && v->status != MF_OK) {
    past->first = *v;
    past->first_alone = lane->judged == 1;
    p->again[p->nagain++] = lane->item;
    return MF_OK;
  }
  if(lane->second && v->status == MF_OK && past->first_alone)
    not_reproducible(&past->first, v);
  return conclude(p, lane->item, v, err);
}

/* Failures that say nothing about the candidate: they end the whole run. */
static bool is_outside(enum mf_status status)
{
  return status == MF_ERR_IO || status == MF_ERR_USAGE || status == MF_ERR_UNSUPPORTED || status == MF_ERR_TOOLKIT || status == MF_ERR_INTERRUPTED;
}

/* ---- lanes ---- */
static enum mf_status lane_send(struct lane *lane, struct frame *req, enum lane_state next, int limit_ms, struct error *err)
{
  const enum mf_status rc = worker_send(&lane->client.worker, req, err);
  request_end(req);
  lane->state = next;
  lane->deadline = client_now_ms() + limit_ms;
  return rc;
}

static void lane_stop(struct lane *lane)
{
  worker_stop(&lane->client.worker);
  lane->state = LANE_OFF;
  lane->judged = 0;
}

/* The lane's item is to be run again: its child was killed from outside, or had too little memory. */
static enum mf_status put_back(struct pool *p, struct lane *lane, const struct error *why, struct error *err)
{
  if(++p->history[lane->item].kills > MOST_KILLS)
    return error_set(err, MF_ERR_WORKER, "%.700s; so did %d before it: too little memory? What was checked is stored: run again", why->text, MOST_KILLS);
  p->redo[p->nredo].item = lane->item;
  p->redo[p->nredo++].second = lane->second;
  return MF_OK;
}

/* The child is lost, or must not be used any more: its candidate gets 'why'. Retires the lane if it could not even be started. */
static enum mf_status lane_lost(struct pool *p, struct lane *lane, enum mf_status status, const struct error *why, struct error *err)
{
  const bool starting = lane->state == LANE_OPENING || lane->state == LANE_FILLING;
  struct check_verdict v;
  enum mf_status rc = MF_OK;
  if(item_in_progress(lane) && status == MF_ERR_WORKER && lane->client.worker.killed) {
    rc = put_back(p, lane, why, err);
  } else if(item_in_progress(lane)) {
    set_fault(&v, status, why->text);
    rc = take_verdict(p, lane, &v, err);
  }
  p->faulted = p->faulted || lane->client.worker.killed;
  lane_stop(lane);
  if(starting) {
    p->start_error = *why;
    lane->start_failures++;
    lane->not_before = client_now_ms() + START_PAUSE_MS;
    if(status == MF_ERR_NOMEM || !p->faulted || lane->start_failures >= START_TRIES)
      lane->state = LANE_RETIRED;
  } else {
    p->faulted = true;
  }
  return rc;
}

static enum mf_status lane_start(struct pool *p, struct lane *lane, struct error *err)
{
  struct error why;
  struct frame req;
  enum mf_status rc;
  lane->state = LANE_OPENING;
  rc = worker_start(p->opt->program, DEVICE_ROLE, &lane->client.worker, &why);
  if(rc == MF_OK) {
    req = p->opt->emulation != NULL ? open_emulated_request(p->opt->emulation, p->threads) : open_request(p->opt->ordinal, p->opt->tools, p->threads);
    rc = lane_send(lane, &req, LANE_OPENING, start_limit_ms(), &why);
  }
  return rc == MF_OK ? MF_OK : lane_lost(p, lane, rc, &why, err);
}

/* Takes the next item for the lane; false if there is none. */
static bool take_item(struct pool *p, struct lane *lane)
{
  if(p->nredo > 0 && (lane->judged == 0 || !p->redo[p->nredo - 1].second)) {
    lane->item = p->redo[--p->nredo].item;
    lane->second = p->redo[p->nredo].second;
    return true;
  }
  if(p->next < p->count) {
    lane->item = p->next++;
    lane->second = false;
    return true;
  }
  if(p->next_again < p->nagain && lane->judged == 0) {
    lane->item = p->again[p->next_again++];
    lane->second = true;
    return true;
  }
  return false;
}

static bool work_left(const struct pool *p)
{
  return p->next < p->count || p->next_again < p->nagain || p->nredo > 0;
}

/* Gives a lane that waits for nothing something to do. */
static enum mf_status lane_feed(struct pool *p, struct lane *lane, struct error *err)
{
  const struct check_item *item;
  struct error why;
  struct frame req;
  enum mf_status rc;
  if(lane->state == LANE_OFF)
    return work_left(p) && client_now_ms() >= lane->not_before ? lane_start(p, lane, err) : MF_OK;
  if(lane->state != LANE_IDLE)
    return MF_OK;
  if(!take_item(p, lane)) {
    if(lane->judged > 0 && work_left(p)) /* second runs need a fresh child */
      lane_stop(lane);
    return MF_OK;
  }
  item = &p->items[lane->item];
  lane->judged++;
  req = kernel_request(item->cubin, item->cubin_bytes, item->recipe);
  rc = lane_send(lane, &req, LANE_LOADING, p->opt->emulation != NULL ? JIT_LIMIT_MS : LOAD_LIMIT_MS, &why);
  return rc == MF_OK ? MF_OK : lane_lost(p, lane, rc, &why, err);
}

/* ---- replies ---- */
/* The first child that is open tells how much memory there is (an emulated device's is this machine's): lanes beyond what fits are retired. */
static void limit_lanes(struct pool *p, const struct device_info *info)
{
  const double each = device_memory_needed(p->plan->problem, p->plan->layers, p->tokens_max, 1);
  double fit = (p->opt->emulation != NULL ? device_emu_free_memory() : info->memory_bytes) * MEMORY_SHARE / each;
  for(size_t i = 0; i < p->nlanes; i++) {
    struct lane *lane = &p->lanes[i];
    if(fit >= 1 || lane->state > LANE_FILLING || i == 0) {
      fit -= lane->state != LANE_RETIRED;
      continue;
    }
    lane_stop(lane);
    lane->state = LANE_RETIRED;
  }
}

static enum mf_status on_open(struct pool *p, struct lane *lane, const struct frame *reply, struct error *why)
{
  struct frame req;
  enum mf_status rc = wire_read_info(json_object_get(reply->head, "info"), &lane->client.info, why);
  if(rc != MF_OK)
    return rc;
  req = problem_request(p->plan->problem, p->plan->routed_scaling, p->plan->layers, p->tokens_max);
  rc = lane_send(lane, &req, LANE_FILLING, start_limit_ms(), why);
  if(rc == MF_OK)
    limit_lanes(p, &lane->client.info);
  return rc;
}

static enum mf_status on_loaded(struct pool *p, struct lane *lane, const struct frame *reply, struct error *why)
{
  const struct check_item *item = &p->items[lane->item];
  struct check_plan plan = *p->plan;
  struct frame req;
  if(plan.item_seeds != NULL)
    plan.seed = &plan.item_seeds[lane->item];
  lane->kernel = (int)json_integer_value(json_object_get(reply->head, "kernel"));
  req = item->cases != NULL ? check_request(lane->kernel, &plan, item->cases, item->ncases) : check_request(lane->kernel, &plan, plan.cases, plan.ncases);
  return lane_send(lane, &req, LANE_CHECKING, check_limit_ms(p->plan), why);
}

static enum mf_status unload(struct lane *lane, struct error *why)
{
  struct frame req = unload_request(lane->kernel);
  return lane_send(lane, &req, LANE_UNLOADING, LOAD_LIMIT_MS, why);
}

static enum mf_status on_checked(struct pool *p, struct lane *lane, const struct frame *reply, struct error *why, struct error *err)
{
  struct check_verdict v;
  enum mf_status rc;
  memset(&v, 0, sizeof(v));
  rc = wire_read_check_result(json_object_get(reply->head, "result"), &v.result, why);
  if(rc != MF_OK)
    return lane_lost(p, lane, rc, why, err);
  v.status = v.result.passed ? MF_OK : MF_ERR_CHECK;
  rc = take_verdict(p, lane, &v, err);
  if(rc != MF_OK)
    return rc;
  rc = unload(lane, why);
  return rc == MF_OK ? MF_OK : lane_lost(p, lane, rc, why, err);
}

/* The child refused the request with 'status' but is well. */
static enum mf_status on_refused(struct pool *p, struct lane *lane, enum mf_status status, struct error *why, struct error *err)
{
  const bool loaded = lane->state == LANE_CHECKING;
  struct check_verdict v;
  enum mf_status rc;
  if(is_outside(status))
    return error_set(err, status, "%s", why->text);
  if(status == MF_ERR_NOMEM && item_in_progress(lane)) { /* too many lanes, or others on the GPU */
    rc = put_back(p, lane, why, err);
    lane_stop(lane);
    lane->state = LANE_RETIRED;
    p->start_error = *why;
    return rc;
  }
  if(!item_in_progress(lane))
    return lane_lost(p, lane, status, why, err);
  set_fault(&v, status, why->text);
  rc = take_verdict(p, lane, &v, err);
  lane->state = LANE_IDLE;
  if(rc != MF_OK || !loaded)
    return rc;
  rc = unload(lane, why);
  return rc == MF_OK ? MF_OK : lane_lost(p, lane, rc, why, err);
}

static enum mf_status on_reply(struct pool *p, struct lane *lane, const struct frame *reply, struct error *err)
{
  struct error why = {MF_OK, ""};
  enum mf_status rc = wire_read_status(reply, &why);
  if(rc != MF_OK)
    return wire_is_fatal(rc) ? lane_lost(p, lane, rc, &why, err) : on_refused(p, lane, rc, &why, err);
  switch(lane->state) {
    case LANE_OPENING: rc = on_open(p, lane, reply, &why); break;
    case LANE_FILLING:
      lane->state = LANE_IDLE;
      lane->start_failures = 0;
      break;
    case LANE_LOADING: rc = on_loaded(p, lane, reply, &why); break;
    case LANE_CHECKING: return on_checked(p, lane, reply, &why, err);
    case LANE_UNLOADING: lane->state = LANE_IDLE; break;
    case LANE_OFF:
    case LANE_IDLE:
    case LANE_RETIRED: rc = error_set(&why, MF_ERR_INTERNAL, "device worker: an answer that nobody asked for"); break;
  }
  return rc == MF_OK ? MF_OK : lane_lost(p, lane, rc, &why, err);
}

static enum mf_status lane_receive(struct pool *p, struct lane *lane, struct error *err)
{
  struct error why = {MF_OK, ""};
  struct frame frame;
  enum mf_status rc = worker_receive(&lane->client.worker, &frame, 0, &why);
  if(rc == MF_ERR_TIMEOUT)
    return MF_OK;
  if(rc != MF_OK)
    return lane_lost(p, lane, rc, &why, err);
  if(is_note(&frame))
    lane->deadline = client_now_ms() + check_limit_ms(p->plan);
  else
    rc = on_reply(p, lane, &frame, err);
  frame_free(&frame);
  return rc;
}

/* ---- the loop ---- */
static enum mf_status end_overdue(struct pool *p, struct error *err)
{
  const int64_t now = client_now_ms();
  enum mf_status rc = MF_OK;
  for(size_t i = 0; i < p->nlanes && rc == MF_OK; i++) {
    struct lane *lane = &p->lanes[i];
    struct error why;
    if(lane->client.worker.pid == 0 || lane->state == LANE_IDLE || now <= lane->deadline)
      continue;
    error_set(&why, MF_ERR_TIMEOUT, "the device worker gave no answer in time; it was killed");
    rc = lane_lost(p, lane, MF_ERR_TIMEOUT, &why, err);
  }
  return rc;
}

/* Waits until some lane has something to say, at most a slice. */
static enum mf_status wait_lanes(struct pool *p, struct error *err)
{
  struct worker *workers[MAX_LANES];
  struct error why;
  size_t running = 0, index = 0;
  enum mf_status rc;
  for(size_t i = 0; i < p->nlanes; i++) {
    workers[i] = &p->lanes[i].client.worker;
    running += workers[i]->pid != 0;
  }
  if(running == 0) {
    usleep(WAIT_SLICE_MS * 1000);
    return MF_OK;
  }
  rc = worker_wait_any(workers, p->nlanes, WAIT_SLICE_MS, &index, &why);
  if(rc == MF_OK)
    return lane_receive(p, &p->lanes[index], err);
  if(rc == MF_ERR_TIMEOUT || rc == MF_ERR_INTERRUPTED)
    return MF_OK;
  return error_set(err, rc, "%s", why.text);
}

static bool any_lane_left(const struct pool *p)
{
  for(size_t i = 0; i < p->nlanes; i++)
    if(p->lanes[i].state != LANE_RETIRED)
      return true;
  return false;
}

static enum mf_status run_pool(struct pool *p, struct error *err)
{
  enum mf_status rc = MF_OK;
  while(rc == MF_OK && p->finished < p->count) {
    for(size_t i = 0; i < p->nlanes && rc == MF_OK; i++)
      rc = lane_feed(p, &p->lanes[i], err);
    if(rc == MF_OK && !any_lane_left(p))
      return error_set(err, p->start_error.status, "no device worker can work: %.900s", p->start_error.text);
    if(rc == MF_OK && interrupt_requested())
      return error_set(err, MF_ERR_INTERRUPTED, "interrupted; verdicts until now are stored");
    if(rc == MF_OK)
      rc = wait_lanes(p, err);
    if(rc == MF_OK)
      rc = end_overdue(p, err);
  }
  return rc;
}

static int threads_per_child(size_t children)
{
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  return cores > (long)children ? (int)(cores / (long)children) : 1;
}

enum mf_status device_client_check_many(const struct check_pool *pool, const struct check_plan *plan, const struct check_item *items, size_t count,
                                        check_done_fn *done, void *context, struct error *err)
{
  const size_t jobs = pool->jobs < 1 ? 1 : pool->jobs > MAX_LANES ? MAX_LANES : (size_t)pool->jobs;
  struct pool p = {.opt = pool, .plan = plan, .items = items, .count = count, .nlanes = jobs < count ? jobs : count, .done = done, .context = context,
                   .start_error = {MF_ERR_WORKER, "no reason given"}};
  enum mf_status rc = client_cache_dir(plan->cache_dir, err);
  if(rc != MF_OK || count == 0)
    return rc;
  p.threads = threads_per_child(p.nlanes);
  for(int i = 0; i < plan->ncases; i++)
    p.tokens_max = plan->cases[i].tokens > p.tokens_max ? plan->cases[i].tokens : p.tokens_max;
  p.history = calloc(count, sizeof(*p.history));
  p.again = calloc(count, sizeof(*p.again));
  p.lanes = calloc(p.nlanes, sizeof(*p.lanes));
  rc = p.history != NULL && p.again != NULL && p.lanes != NULL ? run_pool(&p, err) : error_set(err, MF_ERR_NOMEM, "out of memory for %zu candidates", count);
  for(size_t i = 0; p.lanes != NULL && i < p.nlanes; i++)
    worker_stop(&p.lanes[i].client.worker);
  free(p.history);
  free(p.again);
  free(p.lanes);
  return rc;
}
