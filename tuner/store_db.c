/* store_db.c - statements, transactions and errors of the store; see store_internal.h.
 *
 * Transactions: a writing call is one BEGIN IMMEDIATE .. COMMIT, or one savepoint inside a batch. After a full disk or an I/O error SQLite may
 * have undone the whole transaction by itself. A batch is then lost, and every further call in it fails until it is ended: else the
 * calls would quietly commit one by one and store_commit() would claim a batch that is half gone. */
#include "store_internal.h"
#include "sha256.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

void store_sha256(const void *bytes, size_t count, char key[KEY_LEN])
{
  struct sha256 ctx;
  unsigned char digest[32];
  sha256_init(&ctx);
  sha256_add(&ctx, bytes, count);
  sha256_end(&ctx, digest);
  sha256_hex(digest, key);
}

/* ---- errors ---- */
struct code_meaning {
  int code; /* primary SQLite result code */
  enum mf_status status;
  const char *text;
};

static const struct code_meaning CODE_MEANINGS[] = {
    {SQLITE_FULL, MF_ERR_IO, "the disk is full: free some space and run again (nothing that was stored before is lost)"},
    {SQLITE_IOERR, MF_ERR_IO, "reading or writing failed: check the disk, the quota and the file size limit (nothing that was stored before is lost)"},
    {SQLITE_CANTOPEN, MF_ERR_IO, "the file or its folder cannot be opened: check the permissions"},
    {SQLITE_READONLY, MF_ERR_IO, "the file or its folder is read-only: check the permissions or name another file"},
    {SQLITE_PERM, MF_ERR_IO, "no permission: check the permissions or name another file"},
    {SQLITE_BUSY, MF_ERR_STORE, "another program is using it: wait for that and run again"},
    {SQLITE_LOCKED, MF_ERR_STORE, "another program is using it: wait for that and run again"},
    {SQLITE_CORRUPT, MF_ERR_STORE, "the file is damaged or truncated: restore a copy, or move it away to start anew"},
    {SQLITE_NOTADB, MF_ERR_STORE, "the file is not a schedule database: name another file"},
    {SQLITE_NOMEM, MF_ERR_NOMEM, "out of memory"},
    {SQLITE_CONSTRAINT, MF_ERR_INTERNAL, "the rows contradict each other"},
};

enum mf_status store_sql_error(struct store *st, int code, const char *doing, struct error *err)
{
  struct code_meaning meaning = {0, MF_ERR_STORE, "unexpected failure"};
  int system_errno = st->db != NULL && (code & 0xff) != SQLITE_FULL ? sqlite3_system_errno(st->db) : 0;
  const char *detail = st->db != NULL && (sqlite3_errcode(st->db) & 0xff) == (code & 0xff) ? sqlite3_errmsg(st->db) : sqlite3_errstr(code);
  size_t i;
  for(i = 0; i < sizeof(CODE_MEANINGS) / sizeof(CODE_MEANINGS[0]); i++)
    if(CODE_MEANINGS[i].code == (code & 0xff))
      meaning = CODE_MEANINGS[i];
  if(system_errno != 0 && meaning.status == MF_ERR_IO)
    return error_set(err, meaning.status, "%s: %s: %s (SQLite: %s; %s)", st->path, doing, meaning.text, detail, strerror(system_errno));
  return error_set(err, meaning.status, "%s: %s: %s (SQLite: %s)", st->path, doing, meaning.text, detail);
}

/* ---- statements ---- */
static const char *sql_text(enum store_sql which)
{
  static const char *const texts[STORE_SQLS] = {
#define STORE_SQL_TEXT(name, text) text,
      STORE_SQL_TABLE(STORE_SQL_TEXT)
#undef STORE_SQL_TEXT
  };
  return texts[which];
}

/* What a statement is called in messages: SQL_PUT_SAMPLE is "put sample". */
static enum mf_status stmt_error(struct store *st, int which, int code, struct error *err)
{
  static const char *const names[STORE_SQLS] = {
#define STORE_SQL_NAME(name, text) #name,
      STORE_SQL_TABLE(STORE_SQL_NAME)
#undef STORE_SQL_NAME
  };
  char doing[32] = "";
  size_t i;
  snprintf(doing, sizeof(doing), "%s", names[which] + strlen("SQL_"));
  for(i = 0; doing[i] != '\0'; i++)
    doing[i] = (char)(doing[i] == '_' ? ' ' : tolower((unsigned char)doing[i]));
  return store_sql_error(st, code, doing, err);
}

enum mf_status store_exec(struct store *st, const char *sql, const char *doing, struct error *err)
{
  int code = sqlite3_exec(st->db, sql, NULL, NULL, NULL);
  return code == SQLITE_OK ? MF_OK : store_sql_error(st, code, doing, err);
}

enum mf_status store_copy(struct store *st, sqlite3 *from, const char *doing, struct error *err)
{
  sqlite3_backup *copy = sqlite3_backup_init(st->db, "main", from, "main");
  const int code = copy != NULL ? sqlite3_backup_step(copy, -1) : sqlite3_errcode(st->db);
  sqlite3_backup_finish(copy);
  return code == SQLITE_DONE ? MF_OK : store_sql_error(st, code, doing, err);
}

enum mf_status store_int(struct store *st, const char *sql, int64_t *out, struct error *err)
{
  sqlite3_stmt *stmt = NULL;
  int code = sqlite3_prepare_v2(st->db, sql, -1, &stmt, NULL);
  if(code == SQLITE_OK)
    code = sqlite3_step(stmt);
  if(code == SQLITE_ROW)
    *out = sqlite3_column_int64(stmt, 0);
  sqlite3_finalize(stmt);
  return code == SQLITE_ROW ? MF_OK : store_sql_error(st, code == SQLITE_DONE ? SQLITE_CORRUPT : code, "reading", err);
}

static int bind_one(sqlite3_stmt *stmt, int at, char type, va_list *args)
{
  const void *bytes;
  switch(type) {
    case 'i': return sqlite3_bind_int(stmt, at, va_arg(*args, int));
    case 'l': return sqlite3_bind_int64(stmt, at, va_arg(*args, int64_t));
    case 'd': return sqlite3_bind_double(stmt, at, va_arg(*args, double)); /* SQLite stores NaN as NULL */
    case 't':
      bytes = va_arg(*args, const char *);
      return bytes == NULL ? sqlite3_bind_null(stmt, at) : sqlite3_bind_text(stmt, at, bytes, -1, SQLITE_TRANSIENT);
    case 'b':
      bytes = va_arg(*args, const void *);
      return sqlite3_bind_blob64(stmt, at, bytes == NULL ? "" : bytes, va_arg(*args, size_t), SQLITE_TRANSIENT);
    default: return SQLITE_MISUSE;
  }
}

static enum mf_status stmt_bound(struct store *st, enum store_sql which, sqlite3_stmt **out, struct error *err, const char *types, va_list *args)
{
  int code = SQLITE_OK, at;
  *out = NULL;
  if(st->batch_lost && which != SQL_ROLLBACK)
    return error_set(err, MF_ERR_STORE, "%s: this batch was undone after an error; end it first", st->path);
  if(st->stmt[which] == NULL)
    code = sqlite3_prepare_v3(st->db, sql_text(which), -1, SQLITE_PREPARE_PERSISTENT, &st->stmt[which], NULL);
  for(at = 0; code == SQLITE_OK && types[at] != '\0'; at++)
    code = bind_one(st->stmt[which], at + 1, types[at], args);
  if(code != SQLITE_OK)
    return stmt_error(st, (int)which, code, err);
  *out = st->stmt[which];
  return MF_OK;
}

void store_stmt_end(sqlite3_stmt *stmt)
{
  sqlite3_reset(stmt);
  sqlite3_clear_bindings(stmt);
}

enum mf_status store_stmt(struct store *st, enum store_sql which, sqlite3_stmt **out, struct error *err, const char *types, ...)
{
  enum mf_status rc;
  va_list args;
  va_start(args, types);
  rc = stmt_bound(st, which, out, err, types, &args);
  va_end(args);
  return rc;
}

enum mf_status store_step(struct store *st, sqlite3_stmt *stmt, struct error *err)
{
  int code = sqlite3_step(stmt);
  int which = 0;
  enum mf_status rc = MF_ERR_NOT_FOUND;
  if(code == SQLITE_ROW)
    return MF_OK;
  while(which < STORE_SQLS - 1 && st->stmt[which] != stmt)
    which++;
  if(code != SQLITE_DONE)
    rc = stmt_error(st, which, code, err);
  store_stmt_end(stmt);
  if(st->batch && sqlite3_get_autocommit(st->db) != 0)
    st->batch_lost = true;
  return rc;
}

enum mf_status store_run(struct store *st, enum store_sql which, struct error *err, const char *types, ...)
{
  sqlite3_stmt *stmt;
  enum mf_status rc;
  va_list args;
  va_start(args, types);
  rc = stmt_bound(st, which, &stmt, err, types, &args);
  va_end(args);
  while(rc == MF_OK)
    rc = store_step(st, stmt, err);
  return rc == MF_ERR_NOT_FOUND ? MF_OK : rc;
}

enum mf_status store_find(struct store *st, enum store_sql which, int64_t *id, struct error *err, const char *types, ...)
{
  sqlite3_stmt *stmt;
  enum mf_status rc;
  va_list args;
  va_start(args, types);
  rc = stmt_bound(st, which, &stmt, err, types, &args);
  va_end(args);
  if(rc == MF_OK)
    rc = store_step(st, stmt, err);
  if(rc != MF_OK)
    return rc;
  *id = sqlite3_column_int64(stmt, 0);
  store_stmt_end(stmt);
  return MF_OK;
}

void store_text(sqlite3_stmt *stmt, int column, char *out, size_t space)
{
  const unsigned char *text = sqlite3_column_text(stmt, column);
  snprintf(out, space, "%s", text != NULL ? (const char *)text : "");
}

double store_double(sqlite3_stmt *stmt, int column)
{
  return sqlite3_column_type(stmt, column) == SQLITE_NULL ? (double)NAN : sqlite3_column_double(stmt, column);
}

enum mf_status store_is_shipped(struct store *st, bool *shipped, struct error *err)
{
  char kind[16] = "";
  int64_t tables = 0;
  sqlite3_stmt *stmt;
  enum mf_status rc = store_int(st, "SELECT count(*) FROM sqlite_master WHERE name='about'", &tables, err);
  *shipped = false;
  if(rc != MF_OK || tables == 0)
    return rc;
  rc = store_stmt(st, SQL_GET_KIND, &stmt, err, "");
  if(rc == MF_OK)
    rc = store_step(st, stmt, err);
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? MF_OK : rc;
  store_text(stmt, 0, kind, sizeof(kind));
  store_stmt_end(stmt);
  *shipped = strcmp(kind, "shipped") == 0;
  return MF_OK;
}

/* ---- transactions ---- */
/* Undoes the transaction if SQLite has not already. */
static void undo(struct store *st)
{
  if(sqlite3_get_autocommit(st->db) == 0)
    store_run(st, SQL_ROLLBACK, NULL, "");
}

enum mf_status store_enter(struct store *st, struct error *err)
{
  if(st->read_only)
    return error_set(err, MF_ERR_STORE, "%s: is open for reading only", st->path);
  return store_run(st, st->batch ? SQL_SAVE : SQL_BEGIN, err, "");
}

enum mf_status store_leave(struct store *st, enum mf_status rc, struct error *err)
{
  if(st->batch) {
    if(rc != MF_OK && !st->batch_lost) {
      store_run(st, SQL_SAVE_ROLLBACK, NULL, "");
      store_run(st, SQL_SAVE_RELEASE, NULL, "");
    }
    return rc == MF_OK ? store_run(st, SQL_SAVE_RELEASE, err, "") : rc;
  }
  if(rc == MF_OK)
    rc = store_run(st, SQL_COMMIT, err, "");
  if(rc != MF_OK)
    undo(st);
  return rc;
}

enum mf_status store_begin(struct store *st, struct error *err)
{
  enum mf_status rc;
  if(st->batch)
    return error_set(err, MF_ERR_INTERNAL, "%s: a batch is already open", st->path);
  rc = store_enter(st, err);
  st->batch = rc == MF_OK;
  return rc;
}

enum mf_status store_commit(struct store *st, struct error *err)
{
  enum mf_status rc;
  if(!st->batch)
    return error_set(err, MF_ERR_INTERNAL, "%s: no batch is open", st->path);
  rc = store_run(st, SQL_COMMIT, err, "");
  store_rollback(st);
  return rc;
}

void store_rollback(struct store *st)
{
  st->batch = false;
  st->batch_lost = false;
  undo(st);
}
