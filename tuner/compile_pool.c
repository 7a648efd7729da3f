/* compile_pool.c - see compile_pool.h.
 *
 * One slot per child. A slot is idle (job NO_JOB) or waits for the answer to its job until its deadline. The loop: give every idle slot a job,
 * wait for the first answer, at most POLL_MS so that keep_going() is asked, and end what is overdue. A child that died is started again by the
 * next job that the slot gets. */
#include "compile_pool.h"
#include "compile_worker.h"
#include "progress.h"
#include "strbuf.h"
#include "worker.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define POLL_MS 200
#define MAX_SLOTS 256
#define NO_JOB SIZE_MAX
#define MOST_DEATHS 1 /* that a job may cost before it is given up */
#define MOST_KILLS 3  /* the same if the children were killed from outside: too little memory for so many, perhaps */
#define TOOLKIT_TIMEOUT_MS 60000
#define CLOSURE_MAX_BYTES (256u << 20)

struct slot {
  struct worker worker;
  size_t job;
  int deaths;       /* of children over the job */
  int64_t deadline; /* of the job */
};

struct pool {
  const struct compile_pool *opt;
  const struct compile_job *jobs;
  size_t count, next, reported;
  struct slot *slots;
  size_t nslots;
};

static int64_t now_ms(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int limit_ms(const struct pool *p)
{
  return p->opt->timeout_ms > 0 ? p->opt->timeout_ms : COMPILE_TIMEOUT_MS;
}

/* ---- frames ---- */
static enum mf_status send_job(struct slot *slot, const struct pool *p, struct error *err)
{
  const struct compile_job *job = &p->jobs[slot->job];
  struct frame request = {0};
  struct strbuf packed;
  enum mf_status rc;
  strbuf_init(&packed, CLOSURE_MAX_BYTES);
  for(int i = 0; i < job->closure->count; i++) {
    strbuf_add(&packed, job->closure->name[i], strlen(job->closure->name[i]) + 1);
    strbuf_add(&packed, job->closure->text[i], strlen(job->closure->text[i]) + 1);
  }
  request.head = json_pack("{s:s, s:s, s:s, s:i}", "op", COMPILE_OP_COMPILE, "name", job->art->name, "arch", p->opt->arch, "build", (int)p->opt->build);
  request.blob[0] = job->art->source;
  request.blob_bytes[0] = strlen(job->art->source);
  request.blob[1] = packed.text;
  request.blob_bytes[1] = packed.length;
  if(request.head == NULL || strbuf_failed(&packed))
    rc = error_set(err, MF_ERR_NOMEM, "%s: out of memory for its compile request", job->art->name);
  else
    rc = worker_send(&slot->worker, &request, err);
  json_decref(request.head);
  strbuf_free(&packed);
  return rc;
}

/* Reads "status" and "error" of an answer. */
static enum mf_status answer_status(const struct frame *answer, struct error *err)
{
  const json_int_t status = json_integer_value(json_object_get(answer->head, "status"));
  const char *text = json_string_value(json_object_get(answer->head, "error"));
  if(!json_is_integer(json_object_get(answer->head, "status")))
    return error_set(err, MF_ERR_WORKER, "the compile worker's answer has no status");
  return status == MF_OK ? MF_OK : error_set(err, (enum mf_status)status, "%s", text != NULL ? text : "no reason given");
}

/* Moves an answer's cubin, log and numbers into the artifact. */
static enum mf_status take_result(struct artifact *art, struct frame *answer, enum mf_status status, struct error *err)
{
  free(art->cubin);
  free(art->log);
  art->cubin = answer->blob[0];
  art->cubin_bytes = answer->blob_bytes[0];
  art->log = answer->blob[1]; /* frames end in a NUL beyond their size */
  answer->blob[0] = answer->blob[1] = NULL;
#define RESULT_FROM_JSON(key, type, member) art->member = (type)json_integer_value(json_object_get(answer->head, key));
  COMPILE_RESULT_TABLE(RESULT_FROM_JSON)
#undef RESULT_FROM_JSON
  art->compile_seconds = json_real_value(json_object_get(answer->head, "seconds"));
  if(status == MF_OK && art->cubin == NULL)
    return error_set(err, MF_ERR_WORKER, "%s: the compile worker's answer has no cubin", art->name);
  return status;
}

/* ---- slots ---- */
/* Reports the slot's job and frees the slot for the next one. */
static enum mf_status report(struct pool *p, struct slot *slot, enum mf_status status, const struct error *why, struct error *err)
{
  const size_t job = slot->job;
  slot->job = NO_JOB;
  p->reported++;
  return p->opt->done(p->opt->context, job, status, why, err);
}

/* Whether the job whose child has died is to be tried again. */
static bool try_again(struct slot *slot)
{
  return slot->deaths++ < (slot->worker.killed ? MOST_KILLS : MOST_DEATHS);
}

/* Sends the slot's job to its child, which is started if need be. A child that dies over it is started again; what is left then is reported. */
static enum mf_status submit(struct pool *p, struct slot *slot, struct error *err)
{
  struct error why = {0};
  enum mf_status rc;
  do {
    if(slot->worker.pid == 0) {
      rc = worker_start(p->opt->program, COMPILE_ROLE, &slot->worker, err);
      if(rc != MF_OK)
        return rc;
    }
    slot->deadline = now_ms() + limit_ms(p);
    rc = send_job(slot, p, &why);
  } while(rc == MF_ERR_WORKER && try_again(slot));
  return rc == MF_OK ? MF_OK : report(p, slot, rc, &why, err);
}

static enum mf_status fill_slots(struct pool *p, struct error *err)
{
  enum mf_status rc = MF_OK;
  for(size_t i = 0; i < p->nslots && rc == MF_OK; i++)
    while(p->slots[i].job == NO_JOB && p->next < p->count && rc == MF_OK) {
      p->slots[i].job = p->next++;
      p->slots[i].deaths = 0;
      rc = submit(p, &p->slots[i], err);
    }
  return rc;
}

/* The slot's child has something to say, or has died. */
static enum mf_status collect(struct pool *p, struct slot *slot, struct error *err)
{
  struct error why = {0};
  struct frame answer;
  enum mf_status rc = worker_receive(&slot->worker, &answer, POLL_MS, &why);
  if(rc == MF_ERR_TIMEOUT)
    return MF_OK; /* a spurious wake-up: the deadline decides */
  if(slot->job == NO_JOB) {
    frame_free(&answer); /* an idle child died; the next job starts another */
    worker_stop(&slot->worker);
    return MF_OK;
  }
  if(rc == MF_ERR_WORKER && try_again(slot))
    return submit(p, slot, err);
  if(rc == MF_OK) {
    rc = answer_status(&answer, &why);
    rc = take_result(p->jobs[slot->job].art, &answer, rc, &why);
    frame_free(&answer);
  } else if(rc == MF_ERR_WORKER)
    error_prefix(&why, "%s: %d times", p->jobs[slot->job].art->name, slot->deaths);
  if(rc == MF_ERR_TOOLKIT)
    return error_set(err, rc, "%s", why.text); /* no other artifact would fare better */
  return report(p, slot, rc, &why, err);
}

static enum mf_status end_overdue(struct pool *p, struct error *err)
{
  const int64_t now = now_ms();
  enum mf_status rc = MF_OK;
  for(size_t i = 0; i < p->nslots && rc == MF_OK; i++) {
    struct slot *slot = &p->slots[i];
    struct error why = {0};
    if(slot->job == NO_JOB || now < slot->deadline)
      continue;
    worker_stop(&slot->worker);
    error_set(&why, MF_ERR_TIMEOUT, "%s: not compiled after %d ms; its compiler was killed", p->jobs[slot->job].art->name, limit_ms(p));
    rc = report(p, slot, MF_ERR_TIMEOUT, &why, err);
  }
  return rc;
}

/* Time until keep_going() is due or the first deadline, whichever is sooner. */
static int wait_limit(const struct pool *p)
{
  const int64_t now = now_ms();
  int64_t limit = POLL_MS;
  for(size_t i = 0; i < p->nslots; i++)
    if(p->slots[i].job != NO_JOB && p->slots[i].deadline - now < limit)
      limit = p->slots[i].deadline - now;
  return limit > 0 ? (int)limit : 0;
}

static enum mf_status run(struct pool *p, struct error *err)
{
  struct worker *workers[MAX_SLOTS];
  for(size_t i = 0; i < p->nslots; i++)
    workers[i] = &p->slots[i].worker;
  while(p->reported < p->count) {
    size_t ready = 0;
    enum mf_status rc;
    if(p->opt->keep_going != NULL && !p->opt->keep_going(p->opt->context))
      return error_set(err, MF_ERR_INTERRUPTED, "interrupted after %zu of %zu artifacts", p->reported, p->count);
    rc = fill_slots(p, err);
    if(rc != MF_OK || p->reported == p->count)
      return rc;
    rc = worker_wait_any(workers, p->nslots, wait_limit(p), &ready, err);
    if(rc == MF_OK)
      rc = collect(p, &p->slots[ready], err);
    else if(rc == MF_ERR_TIMEOUT || rc == MF_ERR_INTERRUPTED) /* a signal: keep_going() knows what it means */
      rc = MF_OK;
    if(rc == MF_OK)
      rc = end_overdue(p, err);
    if(rc != MF_OK)
      return rc;
  }
  return MF_OK;
}

enum mf_status compile_pool_run(const struct compile_pool *opt, const struct compile_job *jobs, size_t count, struct error *err)
{
  struct pool p = {.opt = opt, .jobs = jobs, .count = count};
  const size_t most = opt->jobs < 1 ? 1 : opt->jobs > MAX_SLOTS ? MAX_SLOTS : (size_t)opt->jobs;
  enum mf_status rc;
  p.nslots = count < most ? count : most;
  if(count == 0)
    return MF_OK;
  p.slots = calloc(p.nslots, sizeof(*p.slots));
  if(p.slots == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory for %zu compile workers", p.nslots);
  for(size_t i = 0; i < p.nslots; i++) {
    p.slots[i].job = NO_JOB;
    p.slots[i].worker.fd = -1;
  }
  rc = run(&p, err);
  for(size_t i = 0; i < p.nslots; i++)
    worker_stop(&p.slots[i].worker);
  free(p.slots);
  return rc;
}

enum mf_status compile_pool_need_all(void *context, size_t index, enum mf_status status, const struct error *why, struct error *err)
{
  (void)context;
  (void)index;
  return status == MF_OK ? MF_OK : error_set(err, status, "%s", why->text);
}

bool compile_pool_not_interrupted(void *context)
{
  (void)context;
  return !interrupt_requested();
}

/* The answer to the one request that is on its way; an interrupt ends the wait. */
static enum mf_status wait_answer(struct worker *worker, struct frame *answer, struct error *err)
{
  const int64_t end = now_ms() + TOOLKIT_TIMEOUT_MS;
  for(;;) {
    const enum mf_status rc = worker_receive(worker, answer, POLL_MS, err);
    if(rc != MF_ERR_TIMEOUT)
      return rc;
    if(interrupt_requested())
      return error_set(err, MF_ERR_INTERRUPTED, "interrupted while waiting for NVRTC");
    if(now_ms() > end)
      return error_set(err, MF_ERR_TIMEOUT, "no answer within %d ms; its process was killed", TOOLKIT_TIMEOUT_MS);
  }
}

enum mf_status compile_pool_toolkit(const char *program, int *version, char *path, size_t space, struct error *err)
{
  struct worker worker;
  struct frame request = {0}, answer = {0};
  enum mf_status rc = worker_start(program, COMPILE_ROLE, &worker, err);
  if(rc != MF_OK)
    return rc;
  request.head = json_pack("{s:s}", "op", COMPILE_OP_TOOLKIT);
  rc = worker_send(&worker, &request, err);
  if(rc == MF_OK)
    rc = wait_answer(&worker, &answer, err);
  if(rc == MF_OK)
    rc = answer_status(&answer, err);
  if(rc == MF_OK) {
    const char *where = json_string_value(json_object_get(answer.head, "path"));
    *version = (int)json_integer_value(json_object_get(answer.head, "nvrtc"));
    if(path != NULL)
      snprintf(path, space, "%s", where != NULL ? where : "");
  }
  frame_free(&request);
  frame_free(&answer);
  worker_stop(&worker);
  return rc == MF_ERR_WORKER || rc == MF_ERR_TIMEOUT ? error_prefix(err, "asking NVRTC for its version (MOEFORGE_NVRTC names another library)") : rc;
}
