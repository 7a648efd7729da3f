/* store_ship.c - makes the shipped file from the work store; see store.h.
 *
 *   shipped file, if there is one ---copied---> +--------------------+
 *                                               | database in memory | ---VACUUM INTO---> <file>.new ---renamed---> shipped file
 *   work store, attached as 'src' ---winners--> +--------------------+
 *
 * In memory because the shipped file must never be seen half merged, and because its rows may be of an older format: they are migrated there. Rows
 * of the two are matched by key, never by id (the file may come from another machine's work store). Then the winners of both compete for
 * each token count (store_winners.c), and everything that no winner needs is deleted; so neither samples nor losers ever reach the file. VACUUM INTO
 * writes a compact file without a log, which can be read from a read-only place. */
#include "store_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Copies the file that is there into the database in memory. */
static enum mf_status load_shipped(struct store *mem, struct error *err)
{
  char uri[STORE_PATH_MAX * 3 + 16];
  sqlite3 *file = NULL;
  enum mf_status rc = store_file_uri(mem->real, "mode=ro", uri, sizeof(uri), err);
  int code;
  if(rc != MF_OK)
    return rc;
  code = sqlite3_open_v2(uri, &file, SQLITE_OPEN_READONLY | SQLITE_OPEN_URI | SQLITE_OPEN_NOMUTEX, NULL);
  if(code == SQLITE_OK) {
    sqlite3_busy_timeout(file, STORE_BUSY_WAIT_MS);
    rc = store_copy(mem, file, "reading the shipped file", err);
  } else {
    rc = store_sql_error(mem, code, "reading the shipped file", err);
  }
  sqlite3_close(file);
  return rc;
}

/* A work store in that place would lose its samples. */
static enum mf_status refuse_work_store(struct store *mem, struct error *err)
{
  bool shipped = false;
  enum mf_status rc = store_is_shipped(mem, &shipped, err);
  if(rc == MF_OK && !shipped)
    return error_set(err, MF_ERR_STORE, "%s: is a work store, not a shipped file: name another file to ship to", mem->path);
  return rc;
}

/* Brings the database in memory to what is shipped now, in the current format. */
static enum mf_status load_or_create(struct store *mem, struct error *err)
{
  char id[64];
  size_t count;
  enum store_file_kind kind;
  const struct store_migration *steps = store_migrations(&count);
  enum mf_status rc = store_file_examine(mem->real, mem->path, &kind, err);
  snprintf(id, sizeof(id), "PRAGMA application_id=%d", STORE_APPLICATION_ID);
  if(rc == MF_OK && store_file_has_wal(mem->real))
    return error_set(err, MF_ERR_STORE, "%s: another program has written to it and not finished (%s-wal is there): open and close it with that, then run again",
                     mem->path, mem->path);
  if(rc == MF_OK)
    rc = store_connect(mem, ":memory:", SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, err);
  if(rc == MF_OK && kind == STORE_FILE_OURS)
    rc = load_shipped(mem, err);
  if(rc == MF_OK && kind == STORE_FILE_OURS)
    rc = refuse_work_store(mem, err);
  if(rc == MF_OK)
    rc = store_exec(mem, id, "creating", err);
  if(rc == MF_OK)
    rc = store_migrate(mem, steps, count, err);
  return rc == MF_OK ? store_exec(mem, STORE_POOL, "creating", err) : rc;
}

/* Parents before children. */
static const enum store_sql SHIP_STEPS[] = {
    SQL_SHIP_SHAPE,    SQL_SHIP_SHAPE_NAME, SQL_SHIP_DEVICE, SQL_SHIP_RUN,         SQL_SHIP_RUN_DEVICE, SQL_SHIP_ARTIFACT,
    SQL_SHIP_CANDIDATE, SQL_SHIP_CHECK,     SQL_SHIP_GATE,   SQL_SHIP_POOL,        SQL_POOL_TAKE_RIVALS, SQL_DELETE_RIVALS,
};

static enum mf_status merge(struct store *mem, struct error *err)
{
  size_t i;
  enum mf_status rc = store_run(mem, SQL_SET_SHIPPED, err, "");
  for(i = 0; i < sizeof(SHIP_STEPS) / sizeof(SHIP_STEPS[0]) && rc == MF_OK; i++)
    rc = store_run(mem, SHIP_STEPS[i], err, "");
  if(rc == MF_OK)
    rc = store_settle(mem, err);
  return rc == MF_OK ? store_exec(mem, STORE_PRUNE, "removing what no winner needs", err) : rc;
}

/* Takes the winners of 'st' into 'mem'; *found says whether there are any. */
static enum mf_status merge_from(struct store *mem, const struct store *st, bool *found, struct error *err)
{
  char uri[STORE_PATH_MAX * 3 + 16];
  int64_t winners = 0;
  enum mf_status rc = store_file_uri(st->real, st->immutable ? "immutable=1" : "mode=ro", uri, sizeof(uri), err);
  if(rc == MF_OK)
    rc = store_run(mem, SQL_ATTACH_SRC, err, "t", uri);
  if(rc == MF_OK)
    rc = store_enter(mem, err);
  if(rc != MF_OK)
    return rc;
  rc = store_find(mem, SQL_COUNT_SRC_WINNERS, &winners, err, "");
  *found = winners > 0;
  if(rc == MF_OK && *found)
    rc = merge(mem, err);
  return store_leave(mem, rc, err);
}

static enum mf_status write_file(struct store *mem, struct error *err)
{
  char name[STORE_PATH_MAX + 8], journal[STORE_PATH_MAX + 24];
  enum mf_status rc;
  snprintf(name, sizeof(name), "%s.new", mem->real);
  snprintf(journal, sizeof(journal), "%s-journal", name);
  unlink(name);
  rc = store_run(mem, SQL_WRITE_FILE, err, "t", name);
  if(rc == MF_OK)
    rc = store_file_replace(name, mem->real, err);
  if(rc != MF_OK)
    unlink(name);
  unlink(journal);
  return rc;
}

/* Where 'mem' is to be written, under the lock of that place. */
static enum mf_status take_place(struct store *mem, const struct store *st, struct error *err)
{
  enum mf_status rc = store_file_real(mem->path, mem->real, err);
  if(rc == MF_OK && strcmp(mem->real, st->real) == 0)
    return error_set(err, MF_ERR_USAGE, "%s: is the work store itself: name another file to ship to", mem->path);
  return rc == MF_OK ? store_lock_take(mem->real, mem->path, &mem->lock, err) : rc;
}

static enum mf_status ship(struct store *mem, const struct store *st, struct error *err)
{
  bool found = false;
  enum mf_status rc = take_place(mem, st, err);
  if(rc == MF_OK)
    rc = load_or_create(mem, err);
  if(rc == MF_OK)
    rc = merge_from(mem, st, &found, err);
  return rc == MF_OK && found ? write_file(mem, err) : rc;
}

/* NULL: *err says that there is no memory. */
static struct store *new_mem(const char *path, struct error *err)
{
  struct store *mem = calloc(1, sizeof(*mem));
  if(mem == NULL) {
    error_set(err, MF_ERR_NOMEM, "%s: out of memory", path);
    return NULL;
  }
  mem->lock.fd = -1;
  snprintf(mem->path, sizeof(mem->path), "%s", path);
  return mem;
}

enum mf_status store_ship(struct store *st, const char *path, struct error *err)
{
  struct store *mem;
  enum mf_status rc;
  if(st->batch)
    return error_set(err, MF_ERR_INTERNAL, "%s: shipping inside a batch", st->path);
  mem = new_mem(path, err);
  if(mem == NULL)
    return MF_ERR_NOMEM;
  rc = ship(mem, st, err);
  store_close(mem);
  return rc;
}

enum mf_status store_ship_check(const struct store *st, const char *path, struct error *err)
{
  struct store *mem = new_mem(path, err);
  enum mf_status rc;
  if(mem == NULL)
    return MF_ERR_NOMEM;
  rc = take_place(mem, st, err);
  if(rc == MF_OK)
    rc = load_or_create(mem, err);
  store_close(mem);
  return rc;
}
