/* report.c - see report.h; and the command `show`. What was predicted is never printed like what was measured: the table says it in its
 * own column, and leaves out the ratio to a floor that was not measured. */
#include "report.h"

#include <jansson.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "spec.h"

const char *report_status(const struct winner *win)
{
  return win->predicted ? "predicted" : win->stale ? "stale" : "measured";
}

/* How the numbers of a winner are known to be right. */
static const char *numbers_status(const struct winner *win)
{
  return !win->checked ? "unchecked" : win->emulated ? "emulated" : "checked";
}

struct table {
  FILE *to;
  json_t *rows;                /* JSON output, else NULL */
  char shape[NAME_MAX_LEN], device[NAME_MAX_LEN];
  int count;
  bool predicted, emulated, stale, failed; /* predicted: without a check; emulated: with one on the emulated device */
};

/* Times that may be not known. */
static json_t *known(double us)
{
  return us > 0 ? json_real(us) : json_null();
}

static bool add_json(struct table *t, const struct winner *win)
{
  json_t *row = json_pack("{s:s, s:s, s:i, s:i, s:s, s:f, s:f, s:f, s:f, s:o, s:o, s:f, s:s, s:s}", "shape", win->shape_name, "device", win->device_name, "tokens_min",
                          win->tokens_min, "tokens_max", win->tokens_max, "schedule", win->schedule_name, "us", win->us, "us_low", win->us_low, "us_high",
                          win->us_high, "floor_us", win->floor_us, "floor_copy_us", known(win->floors.copy_us), "floor_tensor_us", known(win->floors.tensor_us),
                          "default_us", win->default_us, "status", report_status(win), "made_at", win->made_at);
  if(row != NULL && win->floor_us > 0)
    json_object_set_new(row, "floor_ratio", json_real(win->us / win->floor_us));
  if(row != NULL && win->default_us > 0)
    json_object_set_new(row, "default_ratio", json_real(win->us / win->default_us));
  if(row != NULL)
    json_object_set_new(row, "numbers", json_string(numbers_status(win)));
  if(row != NULL)
    json_object_set_new(row, "regret", json_real(win->regret));
  t->failed = row == NULL || json_array_append_new(t->rows, row) != 0;
  return !t->failed;
}

static void print_header(struct table *t, const struct winner *win)
{
  if(strcmp(t->shape, win->shape_name) == 0 && strcmp(t->device, win->device_name) == 0)
    return;
  fprintf(t->to, "%s%s on %s\n", t->count > 0 ? "\n" : "", win->shape_name, win->device_name);
  fprintf(t->to, "  %-7s %9s %8s %8s %9s %7s %9s %8s  %-10s  %s\n", "tokens", "us", "copies", "tensor", "floor us", "x floor", "default", "x def.", "status",
          "schedule");
  snprintf(t->shape, sizeof(t->shape), "%s", win->shape_name);
  snprintf(t->device, sizeof(t->device), "%s", win->device_name);
}

static void known_text(double us, char out[16])
{
  snprintf(out, 16, us > 0 ? "%.2f" : "-", us);
}

static bool add_row(void *context, const struct winner *win)
{
  struct table *t = context;
  char tokens[32], copies[16], tensor[16], default_us[16], floor_ratio[16] = "-", default_ratio[16] = "-";
  if(t->rows == NULL) {
    print_header(t, win);
    if(win->tokens_min == win->tokens_max)
      snprintf(tokens, sizeof(tokens), "%d", win->tokens_min);
    else
      snprintf(tokens, sizeof(tokens), "%d-%d", win->tokens_min, win->tokens_max);
    if(win->floor_us > 0 && !win->predicted)
      snprintf(floor_ratio, sizeof(floor_ratio), "%.3f", win->us / win->floor_us);
    if(win->default_us > 0)
      snprintf(default_ratio, sizeof(default_ratio), "%.3f", win->us / win->default_us);
    known_text(win->default_us, default_us);
    known_text(win->floors.copy_us, copies);
    known_text(win->floors.tensor_us, tensor);
    fprintf(t->to, "  %-7s %9.2f %8s %8s %9.2f %7s %9s %8s  %-10s  %s\n", tokens, win->us, copies, tensor, win->floor_us, floor_ratio, default_us, default_ratio,
            win->predicted && win->checked ? "predicted*" : report_status(win), win->schedule_name);
  }
  t->count++;
  t->predicted = t->predicted || (win->predicted && !win->checked);
  t->emulated = t->emulated || (win->predicted && win->checked);
  t->stale = t->stale || (win->stale && !win->predicted);
  return t->rows == NULL || add_json(t, win);
}

enum mf_status report_winners(FILE *to, struct store *st, const char *shape_name, bool json, struct error *err)
{
  struct table t = {.to = to};
  json_t *root = NULL;
  enum mf_status rc;
  if(json) {
    t.rows = json_array();
    root = json_pack("{s:o}", "winners", t.rows);
    if(root == NULL)
      return error_set(err, MF_ERR_NOMEM, "out of memory");
  }
  rc = store_each_winner(st, shape_name, add_row, &t, err);
  if(rc == MF_OK && t.failed)
    rc = error_set(err, MF_ERR_NOMEM, "out of memory");
  if(rc == MF_OK && t.count == 0)
    rc = shape_name != NULL ? error_set(err, MF_ERR_NOT_FOUND, "no winners for \"%s\": tune its spec first, or see `moeforge show` for what there is", shape_name)
                            : error_set(err, MF_ERR_NOT_FOUND, "no winners yet: `moeforge tune SPEC.yaml` makes some");
  if(rc == MF_OK && json) {
    json_dumpf(root, to, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    fputc('\n', to);
  } else if(rc == MF_OK) {
    if(t.emulated)
      fprintf(to, "\npredicted*: numbers checked on the emulated device, times predicted: ranked by the cost model for a floor by formula. Times need a GPU.\n");
    if(t.predicted)
      fprintf(to, "\npredicted: ranked by the cost model for a floor by formula; nothing was run. Numbers and times need a GPU.\n");
    if(t.stale)
      fprintf(to, "\nstale: driver, toolkit or policy changed since it was measured; usable, and `moeforge tune` measures it again first.\n");
  }
  json_decref(root);
  return rc;
}

struct reject_table {
  json_t *rows;
  FILE *to;
};

static bool add_reject(void *context, const char *stage, const char *rule, long count, const char *schedule, const char *detail)
{
  struct reject_table *t = context;
  if(t->rows == NULL)
    fprintf(t->to, "  %-8s %-18s %6ld  %s (%s)\n", stage, rule, count, detail, schedule);
  else
    json_array_append_new(t->rows, json_pack("{s:s, s:s, s:I, s:s, s:s}", "stage", stage, "rule", rule, "count", (json_int_t)count, "example", schedule,
                                             "detail", detail));
  return true;
}

#define MAX_PAIRS 256
struct pairs {
  int64_t shape[MAX_PAIRS], device[MAX_PAIRS];
  int count;
};

static bool remember_pair(void *context, int64_t shape_id, int64_t device_id)
{
  struct pairs *p = context;
  p->shape[p->count] = shape_id;
  p->device[p->count++] = device_id;
  return p->count < MAX_PAIRS;
}

static enum mf_status show_rejects_of(struct store *st, const struct pairs *pairs, const char *shape_name, struct reject_table *t, int *shown,
                                      struct error *err)
{
  enum mf_status rc = MF_OK;
  for(int i = 0; i < pairs->count && rc == MF_OK; i++) {
    struct model_spec spec;
    struct device_info dev;
    rc = store_get_shape(st, pairs->shape[i], &spec, err);
    if(rc == MF_OK)
      rc = store_get_device(st, pairs->device[i], &dev, err);
    if(rc != MF_OK || (shape_name != NULL && strcmp(shape_name, spec.name) != 0))
      continue;
    (*shown)++;
    if(t->rows == NULL)
      printf("%s on %s\n  %-8s %-18s %6s  %s\n", spec.name, dev.name, "stage", "rule", "count", "example");
    rc = store_each_reject(st, pairs->shape[i], pairs->device[i], add_reject, t, err);
  }
  return rc;
}

static enum mf_status show_rejects(struct store *st, const char *shape_name, bool json, struct error *err)
{
  struct pairs pairs = {.count = 0};
  struct reject_table t = {json ? json_array() : NULL, stdout};
  int shown = 0;
  enum mf_status rc = store_each_rejected(st, remember_pair, &pairs, err);
  if(rc == MF_OK)
    rc = show_rejects_of(st, &pairs, shape_name, &t, &shown, err);
  if(rc == MF_OK && shown == 0 && !json)
    printf("no rejections on record%s%s\n", shape_name != NULL ? " for " : "", shape_name != NULL ? shape_name : "");
  if(json) {
    json_t *root = json_pack("{s:o}", "rejects", t.rows);
    if(rc == MF_OK) {
      json_dumpf(root, stdout, JSON_INDENT(2));
      putchar('\n');
    }
    json_decref(root);
  }
  return rc;
}

enum mf_status report_open_store(const struct options *opt, struct store **st, struct error *err)
{
  const char *path = access(opt->store_path, R_OK) == 0 ? opt->store_path : opt->shipped_path;
  *st = NULL;
  if(access(path, F_OK) != 0)
    return error_set(err, MF_ERR_NOT_FOUND, "neither %s nor %s is there: `moeforge tune SPEC.yaml` makes them", opt->store_path, opt->shipped_path);
  return store_open(path, true, st, err);
}

enum mf_status show_command(const struct options *opt, const char *shape_name, bool rejects, struct error *err)
{
  struct store *st;
  enum mf_status rc = report_open_store(opt, &st, err);
  if(rc != MF_OK)
    return rc;
  rc = rejects ? show_rejects(st, shape_name, opt->json, err) : report_winners(stdout, st, shape_name, opt->json, err);
  store_close(st);
  return rc;
}
