/* device_client_refs.c - fills the reference cache with several children, one case at a time each. References need no device; they are made in
 * children because that is where a crash or a kill costs nothing, and because children can share out the cores whatever OpenMP does. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device_client_internal.h"
#include "device_wire.h"
#include "files.h"
#include "progress.h"

#define MAX_CHILDREN 64
#define WAIT_SLICE_MS 200
#define REFERENCE_LIMIT_MS 1800000
#define NO_CASE (-1)
#define MOST_KILLS 3 /* of one child, from outside */

struct maker {
  struct worker worker;
  int index;        /* of the case in progress, NO_CASE */
  int again;        /* of the case that is left because its child was killed, NO_CASE */
  int kills;
  int64_t deadline;
};

enum mf_status client_cache_dir(const char *path, struct error *err)
{
  char part[1024];
  if(strlen(path) >= sizeof(part))
    return error_set(err, MF_ERR_IO, "reference cache: the path is too long: %.200s...", path);
  for(size_t i = 1; i <= strlen(path); i++) {
    if(path[i] != '/' && path[i] != '\0')
      continue;
    memcpy(part, path, i);
    part[i] = '\0';
    if(file_make_folder(part, err) != MF_OK)
      return error_prefix(err, "reference cache");
  }
  return MF_OK;
}

static enum mf_status send_case(struct maker *m, const struct check_plan *plan, int index, int threads, struct error *err)
{
  struct frame req = request_new("reference");
  enum mf_status rc;
  json_object_set_new(req.head, "cache_dir", json_string(plan->cache_dir));
  json_object_set_new(req.head, "scaling", wire_number(plan->routed_scaling));
  json_object_set_new(req.head, "layer", json_integer(index % plan->layers));
  json_object_set_new(req.head, "threads", json_integer(threads));
  request_blob(&req, 0, plan->problem, sizeof(*plan->problem));
  request_blob(&req, 1, &plan->cases[index], sizeof(plan->cases[index]));
  rc = worker_send(&m->worker, &req, err);
  request_end(&req);
  m->index = index;
  m->deadline = client_now_ms() + REFERENCE_LIMIT_MS;
  return rc;
}

/* A child that was killed from outside leaves its case to the next one. Any other failure ends the work. */
static enum mf_status forgive_kill(struct maker *m, enum mf_status rc, struct error *err)
{
  if(rc == MF_ERR_WORKER && m->worker.killed && (m->index == NO_CASE || m->kills++ < MOST_KILLS)) {
    m->again = m->index;
    m->index = NO_CASE;
    return MF_OK;
  }
  return rc == MF_OK ? MF_OK : error_prefix(err, "reference of case %d", m->index);
}

static enum mf_status receive_case(struct maker *m, struct error *err)
{
  struct frame reply;
  enum mf_status rc = worker_receive(&m->worker, &reply, 0, err);
  if(rc == MF_ERR_TIMEOUT)
    return MF_OK;
  if(rc == MF_OK)
    rc = wire_read_status(&reply, err);
  frame_free(&reply);
  if(rc != MF_OK)
    return forgive_kill(m, rc, err);
  m->index = NO_CASE;
  return MF_OK;
}

/* Waits for some child; *arrived counts the cases that are done. */
static enum mf_status wait_makers(struct maker *makers, size_t count, int *arrived, struct error *err)
{
  struct worker *workers[MAX_CHILDREN];
  size_t index = 0;
  enum mf_status rc;
  for(size_t i = 0; i < count; i++)
    workers[i] = &makers[i].worker;
  rc = worker_wait_any(workers, count, WAIT_SLICE_MS, &index, err);
  if(rc == MF_OK) {
    const bool busy = makers[index].index != NO_CASE;
    rc = receive_case(&makers[index], err);
    *arrived += rc == MF_OK && busy && makers[index].index == NO_CASE && makers[index].again == NO_CASE;
    return rc;
  }
  if(rc != MF_ERR_TIMEOUT && rc != MF_ERR_INTERRUPTED)
    return rc;
  for(size_t i = 0; i < count; i++)
    if(makers[i].index != NO_CASE && client_now_ms() > makers[i].deadline)
      return error_set(err, MF_ERR_TIMEOUT, "the reference of case %d took longer than %d s", makers[i].index, REFERENCE_LIMIT_MS / 1000);
  return MF_OK;
}

/* Gives a child that has nothing to do the next case, if there is one. */
static enum mf_status feed(struct maker *m, const char *program, const struct check_plan *plan, int threads, int *next, struct error *err)
{
  const int again = m->again;
  enum mf_status rc = MF_OK;
  if(m->index != NO_CASE || (again == NO_CASE && *next == plan->ncases))
    return MF_OK;
  if(m->worker.pid == 0)
    rc = worker_start(program, DEVICE_ROLE, &m->worker, err);
  if(rc != MF_OK)
    return rc;
  m->again = NO_CASE;
  rc = send_case(m, plan, again != NO_CASE ? again : (*next)++, threads, err);
  return rc == MF_OK ? MF_OK : forgive_kill(m, rc, err);
}

static enum mf_status make_all(struct maker *makers, size_t count, const char *program, const struct check_plan *plan, int threads,
                               device_progress_fn *progress, void *context, struct error *err)
{
  int next = 0, done = 0;
  enum mf_status rc = MF_OK;
  while(rc == MF_OK && done < plan->ncases) {
    for(size_t i = 0; i < count && rc == MF_OK; i++)
      rc = feed(&makers[i], program, plan, threads, &next, err);
    if(rc == MF_OK)
      rc = wait_makers(makers, count, &done, err);
    if(rc == MF_OK && (interrupt_requested() || (progress != NULL && !progress(context, done, plan->ncases))))
      rc = error_set(err, MF_ERR_INTERRUPTED, "interrupted while making references; those that are made are kept");
  }
  return rc;
}

enum mf_status device_client_references(const char *program, const struct check_plan *plan, int jobs, device_progress_fn *progress, void *context,
                                        struct error *err)
{
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  struct maker makers[MAX_CHILDREN];
  size_t count = jobs < 1 ? 1 : jobs > MAX_CHILDREN ? MAX_CHILDREN : (size_t)jobs;
  int threads;
  enum mf_status rc = client_cache_dir(plan->cache_dir, err);
  if(rc != MF_OK)
    return rc;
  count = count > (size_t)plan->ncases ? (size_t)plan->ncases : count;
  threads = count > 0 && cores > (long)count ? (int)(cores / (long)count) : 1;
  memset(makers, 0, sizeof(makers));
  for(size_t i = 0; i < count; i++)
    makers[i].index = makers[i].again = NO_CASE;
  rc = make_all(makers, count, program, plan, threads, progress, context, err);
  for(size_t i = 0; i < count; i++)
    worker_stop(&makers[i].worker);
  return rc;
}
