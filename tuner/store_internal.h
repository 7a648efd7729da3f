/* store_internal.h - what the parts of the store share; nobody else includes it but its tests.
 *
 *   store.c          open, close, create, migrate
 *   store_file.c     what a file is before SQLite touches it; the writer's lock; replacing a file
 *   store_db.c       statements, transactions, errors
 *   store_tune.c     shapes, devices, runs, artifacts, candidates, rejections, checks, samples
 *   store_winners.c  winners, and which of several rows serves a token count
 *   store_ship.c     the shipped file
 *
 * A handle keeps its prepared statements (store_stmt), each reset after use, so that no read transaction stays open between calls. */
#ifndef MOEFORGE_TUNER_STORE_INTERNAL_H
#define MOEFORGE_TUNER_STORE_INTERNAL_H

#include "store.h"
#include "store_sql.h"
#include <sqlite3.h>
#include <stdarg.h>

#define STORE_LOCK_WAIT_MS 1500 /* for another writer to end */
#define STORE_BUSY_WAIT_MS 5000 /* for another program's transaction (the sqlite3 shell) */
#define STORE_PATH_MAX 4096

enum store_sql {
#define STORE_SQL_ENUM(name, text) name,
  STORE_SQL_TABLE(STORE_SQL_ENUM)
#undef STORE_SQL_ENUM
  STORE_SQLS
};

struct store_lock {
  int fd;                      /* -1: not held */
  char path[STORE_PATH_MAX];   /* <file>.lock */
};

struct store {
  sqlite3 *db;
  char path[STORE_PATH_MAX];   /* as the user wrote it, for messages */
  char real[STORE_PATH_MAX];   /* without symbolic links */
  bool read_only;
  bool immutable;              /* opened as a file that nobody can change (read-only folder) */
  struct store_lock lock;
  bool batch;                  /* between store_begin and store_commit */
  bool batch_lost;             /* SQLite has undone the batch after an error (disk full) */
  int64_t run_id, device_id;   /* named last through this handle, 0: none */
  sqlite3_stmt *stmt[STORE_SQLS];
};

/* ---- store_file.c ---- */
enum store_file_kind { STORE_FILE_NONE, STORE_FILE_OURS };
/* Looks at the bytes of 'path', for messages called 'shown'. MF_OK with *kind, or MF_ERR_STORE (foreign, truncated, newer), MF_ERR_IO. Changes nothing. */
enum mf_status store_file_examine(const char *path, const char *shown, enum store_file_kind *kind, struct error *err);
/* The path without symbolic links; of a file that is not there, its folder must be. */
enum mf_status store_file_real(const char *path, char real[STORE_PATH_MAX], struct error *err);
/* Takes <real>.lock, waiting STORE_LOCK_WAIT_MS. MF_ERR_STORE names the process that holds it. */
enum mf_status store_lock_take(const char *real, const char *shown, struct store_lock *lock, struct error *err);
void store_lock_drop(struct store_lock *lock);
/* Flushes 'from', renames it to 'to', flushes the folder. On failure 'to' is as it was. */
enum mf_status store_file_replace(const char *from, const char *to, struct error *err);
/* Whether a write-ahead log with something in it lies beside the file. */
bool store_file_has_wal(const char *real);
/* 'real' as an SQLite URI with 'query' ("mode=ro"). */
enum mf_status store_file_uri(const char *real, const char *query, char *out, size_t space, struct error *err);

/* ---- store.c ---- */
struct store_migration {
  int to;          /* schema version after this step; steps are ascending without gaps */
  const char *sql;
};
/* Brings the open database from its user_version to that of the last step, each step in one transaction. Steps that are done are skipped. */
enum mf_status store_migrate(struct store *st, const struct store_migration *steps, size_t count, struct error *err);
/* The steps of this program. */
const struct store_migration *store_migrations(size_t *count);
/* Opens an SQLite connection into st->db with the store's settings. 'name' is a path or URI. */
enum mf_status store_connect(struct store *st, const char *name, int flags, struct error *err);
/* Finalises statements and closes the connection. */
void store_disconnect(struct store *st);

/* ---- store_db.c ---- */
/* Turns an SQLite result code into one line: "<path>: <doing>: <what is wrong and what to do>". */
enum mf_status store_sql_error(struct store *st, int code, const char *doing, struct error *err);
/* Runs statements that return nothing. */
enum mf_status store_exec(struct store *st, const char *sql, const char *doing, struct error *err);
/* Copies the main database of 'from' over that of st->db. */
enum mf_status store_copy(struct store *st, sqlite3 *from, const char *doing, struct error *err);
/* First column of the first row of an unprepared statement. */
enum mf_status store_int(struct store *st, const char *sql, int64_t *out, struct error *err);

/* The kept statement 'which' with its parameters bound: one letter of 'types' each:
 *   i int   l int64_t   d double (NaN: NULL)   t const char * (NULL: NULL)   b const void *, size_t */
enum mf_status store_stmt(struct store *st, enum store_sql which, sqlite3_stmt **out, struct error *err, const char *types, ...);
/* The same, run to its end. */
enum mf_status store_run(struct store *st, enum store_sql which, struct error *err, const char *types, ...);
/* The next row: MF_OK, or MF_ERR_NOT_FOUND at the end (*err untouched; the statement is reset), or an error (reset as well). */
enum mf_status store_step(struct store *st, sqlite3_stmt *stmt, struct error *err);
/* Ends the use of a statement before its last row: it holds no lock and no copy of its parameters any more. */
void store_stmt_end(sqlite3_stmt *stmt);
/* First column of the first row, as an id. MF_ERR_NOT_FOUND without *err. */
enum mf_status store_find(struct store *st, enum store_sql which, int64_t *id, struct error *err, const char *types, ...);

/* A copy of a text column, cut to fit; "" for NULL. */
void store_text(sqlite3_stmt *stmt, int column, char *out, size_t space);
/* NaN for NULL. */
double store_double(sqlite3_stmt *stmt, int column);

/* Around the statements of a writing call: a transaction of its own, or a savepoint inside a batch. store_leave() commits if rc is MF_OK, else undoes
 * what the call did, and returns rc or the commit's failure. */
enum mf_status store_enter(struct store *st, struct error *err);
enum mf_status store_leave(struct store *st, enum mf_status rc, struct error *err);

/* SHA-256 in hex. */
void store_sha256(const void *bytes, size_t count, char key[KEY_LEN]);
/* Whether the open database says of itself that it is a shipped file. False of one that has no tables yet. */
enum mf_status store_is_shipped(struct store *st, bool *shipped, struct error *err);

/* ---- store_winners.c ---- */
/* Writes to 'winner' what is left of the pool: each token count goes to the first row, in the order of SQL_POOL_EACH, that covers it. */
enum mf_status store_settle(struct store *st, struct error *err);

#endif
