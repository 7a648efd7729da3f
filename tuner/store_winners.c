/* store_winners.c - who serves which token count; see store.h.
 *
 * Winners are intervals of token counts. When rows of different origin meet (predictions beside measurements; a work store's winners beside
 * those already shipped), all of them go into a pool in memory. Each token count then goes to the first row that covers it, in the order
 *
 *   measured before predicted, newer before older, the incoming one before the one that is there
 *
 * and the runs of token counts with the same owner become the new rows. So nothing that was covered is lost, and no prediction replaces a
 * measurement. A row that is cut keeps its times; tokens_timed says which token count they are of.
 *
 * A winner is stale (usable, to be validated or tuned again) if the latest run on its device had another driver or another toolkit than the winner's
 * own run, or if timing policy or objective of this program are newer than the winner's. A run that knows no driver (planned only) tells
 * nothing about drivers. */
#include "store_internal.h"
#include "select.h"
#include "timing.h"

#include <stdio.h>
#include <string.h>

struct owners {
  int64_t shape_id, device_id;
  int64_t pool_id[MAX_TOKENS + 2]; /* by token count; 0: nobody. The last entry ends the last interval */
};

/* Writes one row for each run of token counts with the same owner. */
static enum mf_status write_owners(struct store *st, struct owners *own, struct error *err)
{
  enum mf_status rc = MF_OK;
  int first = 1, tokens;
  own->pool_id[MAX_TOKENS + 1] = 0;
  for(tokens = 2; tokens <= MAX_TOKENS + 1 && rc == MF_OK; tokens++) {
    if(tokens <= MAX_TOKENS && own->pool_id[tokens] == own->pool_id[first])
      continue;
    if(own->pool_id[first] != 0)
      rc = store_run(st, SQL_WINNER_FROM_POOL, err, "lii", own->pool_id[first], first, tokens - 1);
    first = tokens;
  }
  memset(own, 0, sizeof(*own));
  return rc;
}

/* The current row of SQL_POOL_EACH takes what is still free. */
static enum mf_status claim(struct store *st, sqlite3_stmt *row, struct owners *own, struct error *err)
{
  const int tokens_min = sqlite3_column_int(row, 3), tokens_max = sqlite3_column_int(row, 4);
  enum mf_status rc = MF_OK;
  int tokens;
  if(sqlite3_column_int64(row, 1) != own->shape_id || sqlite3_column_int64(row, 2) != own->device_id)
    rc = write_owners(st, own, err);
  if(rc != MF_OK)
    return rc;
  if(tokens_min < 1 || tokens_max > MAX_TOKENS || tokens_min > tokens_max)
    return error_set(err, MF_ERR_STORE, "%s: a winner serves %d to %d tokens, expected an interval within 1 to %d", st->path, tokens_min, tokens_max,
                     MAX_TOKENS);
  own->shape_id = sqlite3_column_int64(row, 1);
  own->device_id = sqlite3_column_int64(row, 2);
  for(tokens = tokens_min; tokens <= tokens_max; tokens++)
    if(own->pool_id[tokens] == 0)
      own->pool_id[tokens] = sqlite3_column_int64(row, 0);
  return MF_OK;
}

enum mf_status store_settle(struct store *st, struct error *err)
{
  struct owners own = {0};
  sqlite3_stmt *row;
  enum mf_status rc = store_stmt(st, SQL_POOL_EACH, &row, err, "");
  while(rc == MF_OK) {
    rc = store_step(st, row, err);
    if(rc != MF_OK)
      break;
    rc = claim(st, row, &own, err);
    if(rc != MF_OK)
      store_stmt_end(row);
  }
  return rc == MF_ERR_NOT_FOUND ? write_owners(st, &own, err) : rc;
}

static enum mf_status check_intervals(const struct store *st, const struct winner *winners, size_t count, struct error *err)
{
  size_t i, j;
  for(i = 0; i < count; i++) {
    if(winners[i].tokens_min < 1 || winners[i].tokens_max > MAX_TOKENS || winners[i].tokens_min > winners[i].tokens_max)
      return error_set(err, MF_ERR_INTERNAL, "%s: winner %zu serves %d to %d tokens, expected an interval within 1 to %d", st->path, i, winners[i].tokens_min,
                       winners[i].tokens_max, MAX_TOKENS);
    for(j = 0; j < i; j++)
      if(winners[i].tokens_min <= winners[j].tokens_max && winners[j].tokens_min <= winners[i].tokens_max)
        return error_set(err, MF_ERR_INTERNAL, "%s: winners %zu and %zu both serve %d tokens", st->path, j, i,
                         winners[i].tokens_min > winners[j].tokens_min ? winners[i].tokens_min : winners[j].tokens_min);
  }
  return MF_OK;
}

static enum mf_status pool_winner(struct store *st, int64_t run_id, int64_t shape_id, int64_t device_id, const struct winner *win, struct error *err)
{
  return store_run(st, SQL_POOL_PUT, err, "lliiilldddddditiidd", shape_id, device_id, win->tokens_min, win->tokens_max,
                   win->tokens_timed > 0 ? win->tokens_timed : win->tokens_max, win->candidate_id, run_id, win->us, win->floor_us, win->default_us,
                   win->us_low, win->us_high, win->regret, win->predicted, win->selection_key, TIMING_POLICY_VERSION, OBJECTIVE_VERSION,
                   win->floors.copy_us, win->floors.tensor_us);
}

static enum mf_status replace_winners(struct store *st, int64_t run_id, int64_t shape_id, int64_t device_id, const struct winner *winners, size_t count,
                                      struct error *err)
{
  bool predicted = false;
  size_t i;
  enum mf_status rc = store_run(st, SQL_POOL_CLEAR, err, "");
  for(i = 0; i < count && rc == MF_OK; i++) {
    predicted = predicted || winners[i].predicted;
    rc = pool_winner(st, run_id, shape_id, device_id, &winners[i], err);
  }
  if(rc == MF_OK && predicted)
    rc = store_run(st, SQL_POOL_TAKE_MEASURED, err, "ll", shape_id, device_id);
  if(rc == MF_OK)
    rc = store_run(st, SQL_DELETE_WINNERS, err, "ll", shape_id, device_id);
  if(rc == MF_OK)
    rc = store_settle(st, err);
  return rc == MF_OK ? store_run(st, SQL_PUT_RUN_DEVICE, err, "ll", run_id, device_id) : rc;
}

enum mf_status store_put_winners(struct store *st, int64_t run_id, int64_t shape_id, int64_t device_id, const struct winner *winners, size_t count,
                                 struct error *err)
{
  enum mf_status rc = check_intervals(st, winners, count, err);
  if(rc == MF_OK)
    rc = store_enter(st, err);
  if(rc != MF_OK)
    return rc;
  return store_leave(st, replace_winners(st, run_id, shape_id, device_id, winners, count, err), err);
}

static void read_winner(sqlite3_stmt *stmt, struct winner *win)
{
  int column = 0;
  memset(win, 0, sizeof(*win));
  win->shape_id = sqlite3_column_int64(stmt, column++);
  win->device_id = sqlite3_column_int64(stmt, column++);
  win->candidate_id = sqlite3_column_int64(stmt, column++);
  store_text(stmt, column++, win->shape_name, sizeof(win->shape_name));
  store_text(stmt, column++, win->device_name, sizeof(win->device_name));
  store_text(stmt, column++, win->schedule_name, sizeof(win->schedule_name));
  win->tokens_min = sqlite3_column_int(stmt, column++);
  win->tokens_max = sqlite3_column_int(stmt, column++);
  win->tokens_timed = sqlite3_column_int(stmt, column++);
  win->us = store_double(stmt, column++);
  win->floor_us = store_double(stmt, column++);
  win->default_us = store_double(stmt, column++);
  win->us_low = store_double(stmt, column++);
  win->us_high = store_double(stmt, column++);
  win->regret = store_double(stmt, column++);
  win->predicted = sqlite3_column_int(stmt, column++) != 0;
  store_text(stmt, column++, win->selection_key, sizeof(win->selection_key));
  win->driver_version = sqlite3_column_int(stmt, column++);
  win->nvrtc_version = sqlite3_column_int(stmt, column++);
  store_text(stmt, column++, win->made_at, sizeof(win->made_at));
  win->stale = sqlite3_column_int(stmt, column++) != 0;
  win->checked = sqlite3_column_int(stmt, column++) != 0;
  win->emulated = sqlite3_column_int(stmt, column++) != 0;
  win->floors.copy_us = store_double(stmt, column++);
  win->floors.tensor_us = store_double(stmt, column);
}

enum mf_status store_each_winner(struct store *st, const char *shape_name, store_winner_fn *fn, void *context, struct error *err)
{
  struct winner win;
  sqlite3_stmt *stmt;
  enum mf_status rc = store_stmt(st, SQL_EACH_WINNER, &stmt, err, "tii", shape_name, TIMING_POLICY_VERSION, OBJECTIVE_VERSION);
  while(rc == MF_OK) {
    rc = store_step(st, stmt, err);
    if(rc != MF_OK)
      break;
    read_winner(stmt, &win);
    if(!fn(context, &win)) {
      store_stmt_end(stmt);
      return MF_OK;
    }
  }
  return rc == MF_ERR_NOT_FOUND ? MF_OK : rc;
}
