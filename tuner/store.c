/* store.c - opening, creating and migrating the store; see store.h.
 *
 * Opening for writing: take the writer's lock, look at the file's bytes (a file that is not ours is left alone before SQLite has seen it),
 * create or connect, migrate. Opening for reading takes no lock: WAL lets readers in beside the writer. A reader of an older format copies the file into memory
 * and migrates the copy.
 *
 * Creating: the schema is made in <file>.new, which is renamed when complete. So a store is either whole or absent, and never has a rollback
 * journal; a leftover <file>.new is overwritten by the next creator, who holds the lock.
 *
 * A store in a folder that cannot be written has no place for the log's index. If there is no log, it is opened as immutable, which needs none. */
#include "store_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- migrations ---- */
static const struct store_migration MIGRATIONS[] = {
    {1, STORE_SCHEMA_1},
    {2, STORE_SCHEMA_2},
    /* {3, STORE_SCHEMA_3}: add the step here and raise STORE_SCHEMA_VERSION */
};

const struct store_migration *store_migrations(size_t *count)
{
  *count = sizeof(MIGRATIONS) / sizeof(MIGRATIONS[0]);
  return MIGRATIONS;
}

static enum mf_status migrate_step(struct store *st, const struct store_migration *step, struct error *err)
{
  char version[64], doing[64];
  enum mf_status rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  snprintf(doing, sizeof(doing), "migrating to format %d", step->to);
  snprintf(version, sizeof(version), "PRAGMA user_version=%d", step->to);
  rc = store_exec(st, step->sql, doing, err);
  if(rc == MF_OK)
    rc = store_exec(st, version, doing, err);
  return store_leave(st, rc, err);
}

enum mf_status store_migrate(struct store *st, const struct store_migration *steps, size_t count, struct error *err)
{
  int64_t version = 0;
  size_t i;
  enum mf_status rc = store_int(st, "PRAGMA user_version", &version, err);
  if(rc == MF_OK && count > 0 && version > steps[count - 1].to)
    return error_set(err, MF_ERR_STORE, "%s: was made by a newer moeforge (format %lld, this one knows up to %d): use that one or name another file", st->path,
                     (long long)version, steps[count - 1].to);
  for(i = 0; rc == MF_OK && i < count; i++)
    if(steps[i].to > version)
      rc = migrate_step(st, &steps[i], err);
  return rc;
}

/* ---- connections ---- */
void store_disconnect(struct store *st)
{
  int i;
  for(i = 0; i < STORE_SQLS; i++) {
    sqlite3_finalize(st->stmt[i]);
    st->stmt[i] = NULL;
  }
  sqlite3_close(st->db);
  st->db = NULL;
}

enum mf_status store_connect(struct store *st, const char *name, int flags, struct error *err)
{
  enum mf_status rc;
  int code = sqlite3_open_v2(name, &st->db, flags | SQLITE_OPEN_URI | SQLITE_OPEN_NOMUTEX, NULL);
  if(code != SQLITE_OK) {
    rc = store_sql_error(st, code, "opening", err);
    store_disconnect(st);
    return rc;
  }
  sqlite3_extended_result_codes(st->db, 1);
  sqlite3_busy_timeout(st->db, STORE_BUSY_WAIT_MS);
  /* Until the version is known to be ours, closing must not move the log into the file. */
  sqlite3_db_config(st->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
  rc = store_exec(st, STORE_SETTINGS, "opening", err);
  if(rc != MF_OK)
    store_disconnect(st);
  return rc;
}

static void remove_with_suffix(const char *path, const char *suffix)
{
  char name[STORE_PATH_MAX + 16];
  snprintf(name, sizeof(name), "%s%s", path, suffix);
  unlink(name);
}

static void remove_unfinished(const char *path)
{
  static const char *const suffixes[] = {"", "-journal", "-wal", "-shm"};
  size_t i;
  for(i = 0; i < sizeof(suffixes) / sizeof(suffixes[0]); i++)
    remove_with_suffix(path, suffixes[i]);
}

/* Makes the empty store beside its place and renames it. */
static enum mf_status create_file(struct store *st, struct error *err)
{
  char name[STORE_PATH_MAX + 8], id[64], uri[STORE_PATH_MAX * 3 + 16];
  size_t count;
  const struct store_migration *steps = store_migrations(&count);
  enum mf_status rc;
  snprintf(name, sizeof(name), "%s.new", st->real);
  snprintf(id, sizeof(id), "PRAGMA application_id=%d", STORE_APPLICATION_ID);
  remove_unfinished(name);
  rc = store_file_uri(name, "mode=rwc", uri, sizeof(uri), err);
  if(rc == MF_OK)
    rc = store_connect(st, uri, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, err);
  if(rc == MF_OK)
    rc = store_exec(st, id, "creating", err);
  if(rc == MF_OK)
    rc = store_migrate(st, steps, count, err);
  if(rc == MF_OK) {
    sqlite3_db_config(st->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0, NULL);
    rc = store_exec(st, "PRAGMA journal_mode=WAL", "creating", err);
  }
  store_disconnect(st);
  if(rc == MF_OK)
    rc = store_file_replace(name, st->real, err);
  if(rc != MF_OK)
    remove_unfinished(name);
  return rc;
}

/* One attempt, as far as reading the list of tables. */
static enum mf_status try_connect(struct store *st, struct error *err)
{
  char uri[STORE_PATH_MAX * 3 + 16];
  int64_t tables = 0;
  enum mf_status rc = store_file_uri(st->real, st->immutable ? "immutable=1" : st->read_only ? "mode=ro" : "mode=rw", uri, sizeof(uri), err);
  if(rc == MF_OK)
    rc = store_connect(st, uri, st->read_only ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE, err);
  if(rc == MF_OK)
    rc = store_int(st, "SELECT count(*) FROM sqlite_master", &tables, err);
  /* SQLite is content with a file that it can only read. */
  if(rc == MF_OK && !st->read_only && sqlite3_db_readonly(st->db, "main") != 0)
    rc = error_set(err, MF_ERR_IO, "%s: the file is read-only: check its permissions or use another --store", st->path);
  if(rc != MF_OK)
    store_disconnect(st);
  return rc;
}

/* Connects to a file that is ours. In a read-only folder the second attempt reads the file alone. */
static enum mf_status connect_file(struct store *st, struct error *err)
{
  enum mf_status rc = try_connect(st, err);
  if(rc != MF_ERR_IO || !st->read_only || store_file_has_wal(st->real))
    return rc;
  st->immutable = true;
  return try_connect(st, err);
}

/* Replaces the connection by one to a copy in memory, in the current format. */
static enum mf_status read_migrated_copy(struct store *st, struct error *err)
{
  sqlite3 *file = st->db;
  size_t count;
  const struct store_migration *steps = store_migrations(&count);
  enum mf_status rc;
  st->db = NULL;
  rc = store_connect(st, ":memory:", SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, err);
  if(rc == MF_OK)
    rc = store_copy(st, file, "reading", err);
  sqlite3_close(file);
  st->read_only = false; /* the copy may be written */
  if(rc == MF_OK)
    rc = store_migrate(st, steps, count, err);
  st->read_only = true;
  return rc;
}

/* Readers do not migrate the file; a newer one is refused. */
static enum mf_status read_any_version(struct store *st, struct error *err)
{
  int64_t version = 0;
  enum mf_status rc = store_int(st, "PRAGMA user_version", &version, err);
  if(rc == MF_OK && version > STORE_SCHEMA_VERSION)
    return error_set(err, MF_ERR_STORE, "%s: was made by a newer moeforge (format %lld, this one knows up to %d): use that one or name another file", st->path,
                     (long long)version, STORE_SCHEMA_VERSION);
  return rc == MF_OK && version < STORE_SCHEMA_VERSION ? read_migrated_copy(st, err) : rc;
}

/* The shipped file is replaced as a whole by store_ship(); as a work store it would grow samples and a log. */
static enum mf_status refuse_shipped(struct store *st, struct error *err)
{
  bool shipped = false;
  enum mf_status rc = store_is_shipped(st, &shipped, err);
  if(rc == MF_OK && shipped)
    return error_set(err, MF_ERR_STORE, "%s: is a shipped file, which holds winners only: name another --store (it is updated from that)", st->path);
  return rc;
}

static enum mf_status open_writer(struct store *st, struct error *err)
{
  enum store_file_kind kind;
  size_t count;
  const struct store_migration *steps = store_migrations(&count);
  enum mf_status rc = store_lock_take(st->real, st->path, &st->lock, err);
  if(rc == MF_OK)
    rc = store_file_examine(st->real, st->path, &kind, err);
  if(rc == MF_OK && kind == STORE_FILE_NONE)
    rc = create_file(st, err);
  if(rc == MF_OK)
    rc = connect_file(st, err);
  if(rc == MF_OK)
    rc = refuse_shipped(st, err);
  if(rc == MF_OK)
    rc = store_migrate(st, steps, count, err);
  if(rc == MF_OK)
    rc = store_exec(st, "PRAGMA journal_mode=WAL;" STORE_POOL, "opening", err);
  if(rc == MF_OK)
    sqlite3_db_config(st->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0, NULL);
  return rc;
}

static enum mf_status open_reader(struct store *st, struct error *err)
{
  enum store_file_kind kind;
  enum mf_status rc = store_file_examine(st->real, st->path, &kind, err);
  if(rc == MF_OK && kind == STORE_FILE_NONE)
    return error_errno(err, MF_ERR_IO, ENOENT, "%s: cannot be opened (`moeforge tune` makes it)", st->path);
  if(rc == MF_OK)
    rc = connect_file(st, err);
  return rc == MF_OK ? read_any_version(st, err) : rc;
}

enum mf_status store_open(const char *path, bool read_only, struct store **out, struct error *err)
{
  struct store *st = calloc(1, sizeof(*st));
  enum mf_status rc;
  *out = NULL;
  if(st == NULL)
    return error_set(err, MF_ERR_NOMEM, "%s: out of memory", path);
  st->lock.fd = -1;
  st->read_only = read_only;
  snprintf(st->path, sizeof(st->path), "%s", path);
  rc = store_file_real(path, st->real, err);
  if(rc == MF_OK)
    rc = read_only ? open_reader(st, err) : open_writer(st, err);
  if(rc != MF_OK) {
    store_close(st);
    return rc;
  }
  *out = st;
  return MF_OK;
}

void store_close(struct store *st)
{
  if(st == NULL)
    return;
  if(st->batch)
    store_rollback(st);
  store_disconnect(st);
  store_lock_drop(&st->lock);
  free(st);
}
