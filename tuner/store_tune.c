/* store_tune.c - what tuning writes and asks for: shapes, devices, runs, artifacts, candidates, rejections, checks, samples; see store.h. */
#include "store_internal.h"
#include "family.h"
#include "spec.h"
#include "strbuf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A row that must be there. */
static enum mf_status missing(const struct store *st, const char *what, int64_t id, struct error *err)
{
  return error_set(err, MF_ERR_NOT_FOUND, "%s: has no %s %lld", st->path, what, (long long)id);
}

/* A stored struct or cubin that does not have the bytes that were put in. */
static enum mf_status damaged(const struct store *st, const char *what, int64_t id, struct error *err)
{
  return error_set(err, MF_ERR_STORE, "%s: %s %lld is damaged or of another version of moeforge: move the file away and tune again", st->path, what,
                   (long long)id);
}

/* ---- shapes ---- */
enum mf_status store_put_shape(struct store *st, const struct model_spec *spec, int64_t *id, struct error *err)
{
  char key[KEY_LEN];
  struct strbuf text;
  enum mf_status rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  strbuf_init(&text, 4096);
  problem_key(&spec->problem, key);
  problem_text(&spec->problem, &text);
  rc = store_run(st, SQL_PUT_SHAPE, err, "tbtt", key, (const void *)&spec->problem, sizeof(spec->problem), strbuf_text(&text), spec->name);
  strbuf_free(&text);
  if(rc == MF_OK)
    rc = store_find(st, SQL_FIND_SHAPE, id, err, "t", key);
  if(rc == MF_OK)
    rc = store_run(st, SQL_PUT_SHAPE_NAME, err, "tldt", spec->name, *id, spec->routed_scaling, spec->source);
  return store_leave(st, rc, err);
}

enum mf_status store_get_shape(struct store *st, int64_t shape_id, struct model_spec *out, struct error *err)
{
  char key[KEY_LEN], found[KEY_LEN];
  sqlite3_stmt *stmt;
  const void *blob;
  enum mf_status rc = store_stmt(st, SQL_GET_SHAPE, &stmt, err, "l", shape_id);
  memset(out, 0, sizeof(*out));
  if(rc == MF_OK)
    rc = store_step(st, stmt, err);
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? missing(st, "shape", shape_id, err) : rc;
  store_text(stmt, 0, key, sizeof(key));
  blob = sqlite3_column_blob(stmt, 1);
  if(blob != NULL && sqlite3_column_bytes(stmt, 1) == (int)sizeof(out->problem))
    memcpy(&out->problem, blob, sizeof(out->problem));
  store_text(stmt, 2, out->name, sizeof(out->name));
  out->routed_scaling = sqlite3_column_double(stmt, 3);
  store_text(stmt, 4, out->source, sizeof(out->source));
  store_stmt_end(stmt);
  problem_key(&out->problem, found);
  return strcmp(key, found) == 0 ? MF_OK : damaged(st, "shape", shape_id, err);
}

/* ---- devices ---- */
void store_device_key(const struct device_info *dev, char key[KEY_LEN])
{
  char text[512];
  const double bus_clock = (double)dev->memory_bus_bits * (double)dev->memory_clock_khz;
  /* Spec files know no bus and clock: there the bandwidth tells two SKUs apart that differ in memory alone. */
  int length = snprintf(text, sizeof(text), "cc=%d.%d;sms=%d;l2=%ld;memory=%.17g;spec_gbps=%.17g;mig=%d;emulated=%d", dev->cc_major, dev->cc_minor,
                        dev->sms, dev->l2_bytes, bus_clock, bus_clock > 0 ? 0.0 : dev->bandwidth_gbps, dev->mig, dev->emulated);
  store_sha256(text, (size_t)length, key);
}

/* Staleness asks for the latest run on a device: which run used which device is noted when both are known, in either order. */
static enum mf_status note_run_device(struct store *st, int64_t run_id, int64_t device_id, struct error *err)
{
  if(run_id == 0 || device_id == 0)
    return MF_OK;
  return store_run(st, SQL_PUT_RUN_DEVICE, err, "ll", run_id, device_id);
}

enum mf_status store_put_device(struct store *st, const struct device_info *dev, int64_t *id, struct error *err)
{
  char key[KEY_LEN];
  enum mf_status rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  store_device_key(dev, key);
  rc = store_run(st, SQL_PUT_DEVICE, err, "ttiiiilliildddiiiit", key, dev->name, dev->emulated, dev->cc_major, dev->cc_minor, dev->sms,
                 (int64_t)dev->shared_bytes_per_cta, (int64_t)dev->shared_bytes_per_sm, dev->registers_per_sm, dev->max_threads_per_cta,
                 (int64_t)dev->l2_bytes, dev->bandwidth_gbps, dev->launch_us, dev->memory_bytes, dev->driver_version, dev->memory_bus_bits,
                 dev->memory_clock_khz, dev->mig, dev->uuid);
  if(rc == MF_OK)
    rc = store_find(st, SQL_FIND_DEVICE, id, err, "t", key);
  if(rc == MF_OK)
    rc = note_run_device(st, st->run_id, *id, err);
  rc = store_leave(st, rc, err);
  if(rc == MF_OK)
    st->device_id = *id;
  return rc;
}

enum mf_status store_find_device(struct store *st, const struct device_info *dev, int64_t *id, struct error *err)
{
  char key[KEY_LEN];
  enum mf_status rc;
  store_device_key(dev, key);
  rc = store_find(st, SQL_FIND_DEVICE, id, err, "t", key);
  return rc != MF_ERR_NOT_FOUND ? rc : error_set(err, rc, "%s: nothing was tuned on %s yet: `moeforge tune SPEC.yaml` does", st->path, dev->name);
}

enum mf_status store_get_device(struct store *st, int64_t device_id, struct device_info *out, struct error *err)
{
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_GET_DEVICE, &stmt, err, "l", device_id);
  int column = 0;
  memset(out, 0, sizeof(*out));
  if(rc == MF_OK)
    rc = store_step(st, stmt, err);
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? missing(st, "device", device_id, err) : rc;
  store_text(stmt, column++, out->name, sizeof(out->name));
  out->emulated = sqlite3_column_int(stmt, column++) != 0;
  out->cc_major = sqlite3_column_int(stmt, column++);
  out->cc_minor = sqlite3_column_int(stmt, column++);
  out->sms = sqlite3_column_int(stmt, column++);
  out->shared_bytes_per_cta = (long)sqlite3_column_int64(stmt, column++);
  out->shared_bytes_per_sm = (long)sqlite3_column_int64(stmt, column++);
  out->registers_per_sm = sqlite3_column_int(stmt, column++);
  out->max_threads_per_cta = sqlite3_column_int(stmt, column++);
  out->l2_bytes = (long)sqlite3_column_int64(stmt, column++);
  out->bandwidth_gbps = sqlite3_column_double(stmt, column++);
  out->launch_us = sqlite3_column_double(stmt, column++);
  out->memory_bytes = sqlite3_column_double(stmt, column++);
  out->driver_version = sqlite3_column_int(stmt, column++);
  out->memory_bus_bits = sqlite3_column_int(stmt, column++);
  out->memory_clock_khz = sqlite3_column_int(stmt, column++);
  out->mig = sqlite3_column_int(stmt, column++) != 0;
  store_text(stmt, column, out->uuid, sizeof(out->uuid));
  store_stmt_end(stmt);
  return MF_OK;
}

/* ---- runs ---- */
enum mf_status store_begin_run(struct store *st, const char *command_line, int nvrtc_version, int driver_version, int64_t *run_id, struct error *err)
{
  enum mf_status rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  /* We hold the writer's lock: whoever is still "running" is dead. */
  rc = store_run(st, SQL_MARK_KILLED, err, "");
  if(rc == MF_OK)
    rc = store_run(st, SQL_BEGIN_RUN, err, "tii", command_line, nvrtc_version, driver_version);
  if(rc == MF_OK) {
    *run_id = sqlite3_last_insert_rowid(st->db);
    rc = note_run_device(st, *run_id, st->device_id, err);
  }
  rc = store_leave(st, rc, err);
  if(rc == MF_OK)
    st->run_id = *run_id;
  return rc;
}

enum mf_status store_end_run(struct store *st, int64_t run_id, enum mf_status outcome, struct error *err)
{
  enum mf_status rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  rc = store_run(st, SQL_END_RUN, err, "lt", run_id, outcome == MF_OK ? "ok" : mf_status_name(outcome));
  if(rc == MF_OK && sqlite3_changes(st->db) == 0)
    rc = missing(st, "run", run_id, err);
  return store_leave(st, rc, err);
}

/* ---- artifacts ---- */
static char *copy_text(sqlite3_stmt *stmt, int column)
{
  const unsigned char *text = sqlite3_column_text(stmt, column);
  return strdup(text != NULL ? (const char *)text : "");
}

/* The columns SQL_ARTIFACT_FIELDS; MF_ERR_STORE if the cubin is not what was put in. */
static enum mf_status read_artifact(const struct store *st, sqlite3_stmt *stmt, struct artifact *out, struct error *err)
{
  char want[KEY_LEN], have[KEY_LEN];
  const void *cubin = sqlite3_column_blob(stmt, 10);
  out->id = sqlite3_column_int64(stmt, 0);
  store_text(stmt, 1, out->compile_key, sizeof(out->compile_key));
  store_text(stmt, 2, out->name, sizeof(out->name));
  out->registers = sqlite3_column_int(stmt, 3);
  out->spill_bytes = (long)sqlite3_column_int64(stmt, 4);
  out->stack_bytes = (long)sqlite3_column_int64(stmt, 5);
  out->static_shared_bytes = (long)sqlite3_column_int64(stmt, 6);
  out->wgmma_serialised = sqlite3_column_int(stmt, 7) != 0;
  out->compile_seconds = sqlite3_column_double(stmt, 8);
  store_text(stmt, 9, want, sizeof(want));
  out->cubin_bytes = (size_t)sqlite3_column_bytes(stmt, 10);
  store_sha256(cubin != NULL ? cubin : "", out->cubin_bytes, have);
  if(strcmp(want, have) != 0)
    return damaged(st, "the cubin of artifact", out->id, err);
  out->cubin = malloc(out->cubin_bytes > 0 ? out->cubin_bytes : 1);
  if(out->cubin == NULL)
    return error_set(err, MF_ERR_NOMEM, "%s: out of memory for a cubin of %zu bytes", st->path, out->cubin_bytes);
  if(cubin != NULL)
    memcpy(out->cubin, cubin, out->cubin_bytes);
  return MF_OK;
}

/* Leaves nothing that the caller would have to free. */
static enum mf_status drop_artifact(struct artifact *out, enum mf_status rc)
{
  if(rc != MF_OK) {
    free(out->cubin);
    free(out->source);
    free(out->log);
    memset(out, 0, sizeof(*out));
  }
  return rc;
}

enum mf_status store_get_artifact(struct store *st, const char *compile_key, struct artifact *out, struct error *err)
{
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_GET_ARTIFACT, &stmt, err, "t", compile_key);
  memset(out, 0, sizeof(*out));
  if(rc == MF_OK)
    rc = store_step(st, stmt, err);
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? error_set(err, rc, "%s: has no artifact with compile key %s", st->path, compile_key) : rc;
  rc = read_artifact(st, stmt, out, err);
  store_stmt_end(stmt);
  return drop_artifact(out, rc);
}

static enum mf_status get_artifact_by_id(struct store *st, int64_t id, struct artifact *out, struct error *err)
{
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_GET_ARTIFACT_BY_ID, &stmt, err, "l", id);
  memset(out, 0, sizeof(*out));
  if(rc == MF_OK)
    rc = store_step(st, stmt, err);
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? missing(st, "artifact", id, err) : rc;
  rc = read_artifact(st, stmt, out, err);
  if(rc == MF_OK) {
    out->source = copy_text(stmt, 11);
    out->log = copy_text(stmt, 12);
    if(out->source == NULL || out->log == NULL)
      rc = error_set(err, MF_ERR_NOMEM, "%s: out of memory for a source", st->path);
  }
  store_stmt_end(stmt);
  return drop_artifact(out, rc);
}

enum mf_status store_put_artifact(struct store *st, const struct artifact *art, int nvrtc_version, int64_t *id, struct error *err)
{
  char cubin_key[KEY_LEN];
  enum mf_status rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  rc = store_find(st, SQL_FIND_ARTIFACT, id, err, "t", art->compile_key);
  if(rc == MF_ERR_NOT_FOUND) {
    store_sha256(art->cubin != NULL ? (const void *)art->cubin : "", art->cubin_bytes, cubin_key);
    rc = store_run(st, SQL_PUT_ARTIFACT, err, "ttiilllidtttb", art->compile_key, art->name, nvrtc_version, art->registers, (int64_t)art->spill_bytes,
                   (int64_t)art->stack_bytes, (int64_t)art->static_shared_bytes, art->wgmma_serialised, art->compile_seconds, cubin_key,
                   art->source != NULL ? art->source : "", art->log != NULL ? art->log : "", (const void *)art->cubin, art->cubin_bytes);
    *id = sqlite3_last_insert_rowid(st->db);
  }
  return store_leave(st, rc, err);
}

/* ---- candidates ---- */
enum mf_status store_put_candidate(struct store *st, int64_t shape_id, int64_t device_id, struct candidate *cand, struct error *err)
{
  char recipe_key[KEY_LEN];
  const int family_version = cand->schedule.family != NULL ? cand->schedule.family->version : 0;
  int64_t id = 0;
  enum mf_status rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  store_sha256(&cand->recipe, sizeof(cand->recipe), recipe_key);
  rc = store_run(st, SQL_PUT_CANDIDATE, err, "lltiltib", shape_id, device_id, cand->name, family_version, cand->artifact_id, recipe_key,
                 cand->is_default, (const void *)&cand->recipe, sizeof(cand->recipe));
  if(rc == MF_OK)
    rc = store_find(st, SQL_FIND_CANDIDATE, &id, err, "lltilt", shape_id, device_id, cand->name, family_version, cand->artifact_id, recipe_key);
  if(rc == MF_OK)
    rc = store_run(st, SQL_LIFT_COMPILED, err, "llt", shape_id, device_id, cand->name);
  rc = store_leave(st, rc, err);
  if(rc == MF_OK)
    cand->id = id;
  return rc;
}

/* Fills in the row's columns; the schedule stays empty if its family or its knobs are not known to this program. */
static enum mf_status read_candidate(const struct store *st, sqlite3_stmt *stmt, struct candidate *cand, struct error *err)
{
  char want[KEY_LEN], have[KEY_LEN];
  const void *recipe = sqlite3_column_blob(stmt, 6);
  cand->id = sqlite3_column_int64(stmt, 0);
  store_text(stmt, 1, cand->name, sizeof(cand->name));
  cand->artifact_id = sqlite3_column_int64(stmt, 2);
  store_text(stmt, 3, cand->artifact_name, sizeof(cand->artifact_name));
  cand->is_default = sqlite3_column_int(stmt, 4) != 0;
  store_text(stmt, 5, want, sizeof(want));
  if(recipe == NULL || sqlite3_column_bytes(stmt, 6) != (int)sizeof(cand->recipe))
    return damaged(st, "the recipe of candidate", cand->id, err);
  memcpy(&cand->recipe, recipe, sizeof(cand->recipe));
  store_sha256(&cand->recipe, sizeof(cand->recipe), have);
  return strcmp(want, have) == 0 ? MF_OK : damaged(st, "the recipe of candidate", cand->id, err);
}

enum mf_status store_get_candidate(struct store *st, int64_t candidate_id, struct candidate *cand, struct artifact *art, struct error *err)
{
  struct error ignored;
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_GET_CANDIDATE, &stmt, err, "l", candidate_id);
  memset(cand, 0, sizeof(*cand));
  memset(art, 0, sizeof(*art));
  if(rc == MF_OK)
    rc = store_step(st, stmt, err);
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? missing(st, "candidate", candidate_id, err) : rc;
  rc = read_candidate(st, stmt, cand, err);
  store_stmt_end(stmt);
  if(rc != MF_OK)
    return rc;
  if(schedule_parse(cand->name, &cand->schedule, &ignored) != MF_OK)
    memset(&cand->schedule, 0, sizeof(cand->schedule));
  return get_artifact_by_id(st, cand->artifact_id, art, err);
}

/* ---- rejections ---- */
enum mf_status store_find_candidate(struct store *st, int64_t shape_id, int64_t device_id, const char *schedule_name, int64_t *id, struct error *err)
{
  const enum mf_status rc = store_find(st, SQL_NAMED_CANDIDATE, id, err, "llt", shape_id, device_id, schedule_name);
  return rc == MF_ERR_NOT_FOUND ? error_set(err, rc, "%s: has no candidate %s for this shape and device (`moeforge tune --schedule %s` adds it to a store of its own)",
                                          st->path, schedule_name, schedule_name) : rc;
}

enum mf_status store_put_reject(struct store *st, int64_t run_id, int64_t shape_id, int64_t device_id, const char *schedule_name,
                                const struct verdict *why, struct error *err)
{
  enum mf_status rc;
  if(why->rule == NULL || why->stage == NULL)
    return error_set(err, MF_ERR_INTERNAL, "%s: rejection of %s without stage and rule", st->path, schedule_name);
  rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  rc = store_run(st, SQL_PUT_REJECT, err, "llltttlllt", run_id, shape_id, device_id, schedule_name, why->stage, why->rule, (int64_t)why->have,
                 (int64_t)why->allowed, (int64_t)why->nearest, why->detail);
  return store_leave(st, rc, err);
}

enum mf_status store_each_rejected(struct store *st, store_pair_fn *fn, void *context, struct error *err)
{
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_REJECTED_PAIRS, &stmt, err, "");
  while(rc == MF_OK) {
    rc = store_step(st, stmt, err);
    if(rc == MF_OK && !fn(context, sqlite3_column_int64(stmt, 0), sqlite3_column_int64(stmt, 1))) {
      store_stmt_end(stmt);
      return MF_OK;
    }
  }
  return rc == MF_ERR_NOT_FOUND ? MF_OK : rc;
}

enum mf_status store_each_reject(struct store *st, int64_t shape_id, int64_t device_id, store_reject_fn *fn, void *context, struct error *err)
{
  char stage[32], rule[NAME_MAX_LEN], schedule[NAME_MAX_LEN * 2], detail[256];
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_EACH_REJECT, &stmt, err, "ll", shape_id, device_id);
  while(rc == MF_OK) {
    rc = store_step(st, stmt, err);
    if(rc != MF_OK)
      break;
    store_text(stmt, 0, stage, sizeof(stage));
    store_text(stmt, 1, rule, sizeof(rule));
    store_text(stmt, 3, schedule, sizeof(schedule));
    store_text(stmt, 4, detail, sizeof(detail));
    if(!fn(context, stage, rule, (long)sqlite3_column_int64(stmt, 2), schedule, detail)) {
      store_stmt_end(stmt);
      return MF_OK;
    }
  }
  return rc == MF_ERR_NOT_FOUND ? MF_OK : rc;
}

/* ---- checks ---- */
/* Beside the gates' worst values, under a name that no gate has: struct check_result.worst_error. Results of older versions lack it. */
#define ERROR_ROW "token_error"

static enum mf_status put_gates(struct store *st, int64_t candidate_id, const char *check_key, const struct check_result *result, struct error *err)
{
  enum mf_status rc = MF_OK;
  int gate;
  for(gate = 0; gate < GATES && rc == MF_OK; gate++)
    rc = store_run(st, SQL_PUT_GATE, err, "lttd", candidate_id, check_key, gate_name((enum gate)gate), result->worst[gate]);
  if(rc == MF_OK)
    rc = store_run(st, SQL_PUT_GATE, err, "lttd", candidate_id, check_key, ERROR_ROW, result->worst_error);
  return rc;
}

enum mf_status store_put_check(struct store *st, int64_t run_id, int64_t candidate_id, const char *check_key, const struct check_result *result,
                               const char *fault, struct error *err)
{
  const bool passed = result->passed && fault == NULL;
  enum mf_status rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  rc = store_run(st, SQL_DELETE_CHECK, err, "lt", candidate_id, check_key);
  if(rc == MF_OK)
    rc = store_run(st, SQL_LIFT_CHECKED, err, "l", candidate_id);
  if(rc == MF_OK)
    rc = store_run(st, SQL_PUT_CHECK, err, "lltittt", run_id, candidate_id, check_key, (int)passed,
                   passed || fault != NULL ? NULL : gate_name(result->failed_gate), result->detail, fault);
  if(rc == MF_OK)
    rc = put_gates(st, candidate_id, check_key, result, err);
  return store_leave(st, rc, err);
}

static int gate_index(const char *name)
{
  int gate = 0;
  while(gate < GATES && strcmp(name, gate_name((enum gate)gate)) != 0)
    gate++;
  return gate;
}

static enum mf_status get_gates(struct store *st, int64_t candidate_id, const char *check_key, struct check_result *out, struct error *err)
{
  char name[NAME_MAX_LEN];
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_EACH_GATE, &stmt, err, "lt", candidate_id, check_key);
  while(rc == MF_OK) {
    rc = store_step(st, stmt, err);
    if(rc != MF_OK)
      break;
    store_text(stmt, 0, name, sizeof(name));
    if(gate_index(name) < GATES)
      out->worst[gate_index(name)] = store_double(stmt, 1);
    else if(strcmp(name, ERROR_ROW) == 0)
      out->worst_error = store_double(stmt, 1);
  }
  return rc == MF_ERR_NOT_FOUND ? MF_OK : rc;
}

enum mf_status store_get_check(struct store *st, int64_t candidate_id, const char *check_key, struct check_result *out, struct error *err)
{
  char name[NAME_MAX_LEN], detail[256], fault[128];
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_GET_CHECK, &stmt, err, "lt", candidate_id, check_key);
  memset(out, 0, sizeof(*out));
  if(rc == MF_OK)
    rc = store_step(st, stmt, err);
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? error_set(err, rc, "%s: candidate %lld was not checked under this policy", st->path, (long long)candidate_id) : rc;
  out->passed = sqlite3_column_int(stmt, 0) != 0;
  store_text(stmt, 1, name, sizeof(name));
  store_text(stmt, 2, detail, sizeof(detail));
  store_text(stmt, 3, fault, sizeof(fault));
  store_stmt_end(stmt);
  if(gate_index(name) < GATES)
    out->failed_gate = (enum gate)gate_index(name);
  if(fault[0] != '\0')
    snprintf(out->detail, sizeof(out->detail), "fault: %s%s%.100s", fault, detail[0] != '\0' ? ": " : "", detail);
  else
    snprintf(out->detail, sizeof(out->detail), "%s", detail);
  return get_gates(st, candidate_id, check_key, out, err);
}

enum mf_status store_latest_check(struct store *st, int64_t candidate_id, char check_key[KEY_LEN], struct error *err)
{
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_LATEST_CHECK, &stmt, err, "l", candidate_id);
  if(rc == MF_OK)
    rc = store_step(st, stmt, err);
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? error_set(err, rc, "%s: candidate %lld was never checked", st->path, (long long)candidate_id) : rc;
  store_text(stmt, 0, check_key, KEY_LEN);
  store_stmt_end(stmt);
  return MF_OK;
}

/* ---- samples ---- */
enum mf_status store_put_samples(struct store *st, int64_t run_id, const char *timing_key, const struct sample *samples, size_t count, struct error *err)
{
  size_t i;
  enum mf_status rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  rc = store_run(st, SQL_PUT_TIMING, err, "t", timing_key);
  for(i = 0; i < count && rc == MF_OK; i++)
    rc = store_run(st, SQL_PUT_SAMPLE, err, "ltitlilddd", samples[i].candidate_id, timing_key, samples[i].tokens, routing_name(samples[i].routing),
                   (int64_t)samples[i].seed, samples[i].round, run_id, samples[i].us, samples[i].floors.copy_us,
                   samples[i].floors.tensor_us);
  return store_leave(st, rc, err);
}

enum mf_status store_each_sample(struct store *st, int64_t candidate_id, const char *timing_key, int tokens, enum routing_kind routing, uint32_t seed,
                                 store_sample_fn *fn, void *context, struct error *err)
{
  struct sample smp = {.candidate_id = candidate_id, .tokens = tokens, .routing = routing, .seed = seed};
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_EACH_SAMPLE, &stmt, err, "ltitl", candidate_id, timing_key, tokens, routing_name(routing), (int64_t)seed);
  while(rc == MF_OK) {
    rc = store_step(st, stmt, err);
    if(rc != MF_OK)
      break;
    smp.round = sqlite3_column_int(stmt, 0);
    smp.us = sqlite3_column_double(stmt, 1);
    smp.floors.copy_us = sqlite3_column_double(stmt, 2);
    smp.floors.tensor_us = store_double(stmt, 3);
    if(!fn(context, &smp)) {
      store_stmt_end(stmt);
      return MF_OK;
    }
  }
  return rc == MF_ERR_NOT_FOUND ? MF_OK : rc;
}
