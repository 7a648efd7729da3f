/* package.c - `moeforge export`: gathers a shape's winners from the store and hands them to package_write.c.
 *
 * A winner names a candidate, a shape and a device; all three are fetched into one struct item, which owns what package_item points to. Several winners
 * may share a candidate: it is fetched for each, since the writer stores equal bytes once. */
#include "package.h"
#include "commands.h"
#include "compile.h"
#include "package_write.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct item {
  struct winner winner;
  struct model_spec spec;
  struct device_info device;
  struct candidate candidate;
  struct artifact artifact;
  struct check_result check;
  bool checked;
};

struct gathering {
  struct item *items;
  size_t count, space;
  const char *device_name; /* NULL: all */
  bool out_of_memory;
};

static bool take_winner(void *context, const struct winner *win)
{
  struct gathering *g = context;
  if(g->device_name != NULL && strcmp(g->device_name, win->device_name) != 0)
    return true;
  if(g->count == g->space) {
    const size_t space = g->space > 0 ? 2 * g->space : 16;
    struct item *items = realloc(g->items, space * sizeof(*items));
    g->out_of_memory = items == NULL;
    if(items == NULL)
      return false;
    g->items = items;
    g->space = space;
  }
  memset(&g->items[g->count], 0, sizeof(g->items[g->count]));
  g->items[g->count++].winner = *win;
  return true;
}

static void gathering_free(struct gathering *g)
{
  for(size_t i = 0; i < g->count; i++)
    artifact_free(&g->items[i].artifact);
  free(g->items);
}

/* The latest check on record, if there is one. */
static enum mf_status fetch_check(struct store *st, struct item *it, struct error *err)
{
  char key[KEY_LEN];
  enum mf_status rc = store_latest_check(st, it->winner.candidate_id, key, err);
  if(rc == MF_ERR_NOT_FOUND)
    return MF_OK;
  if(rc == MF_OK)
    rc = store_get_check(st, it->winner.candidate_id, key, &it->check, err);
  it->checked = rc == MF_OK;
  return rc;
}

static enum mf_status fetch(struct store *st, struct item *it, struct error *err)
{
  enum mf_status rc = store_get_shape(st, it->winner.shape_id, &it->spec, err);
  if(rc == MF_OK)
    rc = store_get_device(st, it->winner.device_id, &it->device, err);
  if(rc == MF_OK)
    rc = store_get_candidate(st, it->winner.candidate_id, &it->candidate, &it->artifact, err);
  return rc == MF_OK ? fetch_check(st, it, err) : rc;
}

static struct package_item item_view(const struct item *it)
{
  const struct winner *w = &it->winner;
  return (struct package_item){
      .shape_name = w->shape_name,
      .shape_source = it->spec.source,
      .problem = &it->spec.problem,
      .routed_scaling = it->spec.routed_scaling,
      .device = &it->device,
      .tokens_min = w->tokens_min,
      .tokens_max = w->tokens_max,
      .recipe = &it->candidate.recipe,
      .cubin = it->artifact.cubin,
      .cubin_bytes = it->artifact.cubin_bytes,
      .schedule = w->schedule_name,
      .us = w->us,
      .floor_us = w->floor_us,
      .default_us = w->default_us,
      .us_low = w->us_low,
      .us_high = w->us_high,
      .regret = w->regret,
      .predicted = w->predicted,
      .nvrtc_version = w->nvrtc_version,
      .driver_version = w->driver_version,
      .compile_key = it->artifact.compile_key,
      .selection_key = w->selection_key,
      .made_at = w->made_at,
      .check = it->checked ? &it->check : NULL,
  };
}

static enum mf_status nothing_to_export(const char *shape_name, const char *device_name, struct error *err)
{
  if(device_name != NULL)
    return error_set(err, MF_ERR_NOT_FOUND, "%s: no winner for device \"%s\" is stored (see `moeforge show %s`)", shape_name, device_name, shape_name);
  return error_set(err, MF_ERR_NOT_FOUND, "%s: no winner is stored: run `moeforge tune` on its spec first (`moeforge show` lists what is stored)", shape_name);
}

static enum mf_status gather(struct store *st, const char *shape_name, struct gathering *g, struct error *err)
{
  enum mf_status rc = store_each_winner(st, shape_name, take_winner, g, err);
  if(rc == MF_OK && g->out_of_memory)
    rc = error_set(err, MF_ERR_NOMEM, "out of memory");
  if(rc == MF_OK && g->count == 0)
    rc = nothing_to_export(shape_name, g->device_name, err);
  for(size_t i = 0; rc == MF_OK && i < g->count; i++)
    rc = fetch(st, &g->items[i], err);
  return rc;
}

enum mf_status package_export(struct store *st, const char *shape_name, const char *device_name, bool allow_predicted, const char *path, struct error *err)
{
  struct gathering g = {.device_name = device_name};
  struct package_item *views = NULL;
  unsigned char *bytes = NULL;
  size_t size = 0;
  enum mf_status rc = gather(st, shape_name, &g, err);
  if(rc != MF_OK)
    goto out;
  views = calloc(g.count, sizeof(*views));
  if(views == NULL) {
    rc = error_set(err, MF_ERR_NOMEM, "out of memory");
    goto out;
  }
  for(size_t i = 0; i < g.count; i++)
    views[i] = item_view(&g.items[i]);
  rc = package_build(views, g.count, allow_predicted, &bytes, &size, err);
  if(rc == MF_OK)
    rc = package_write_file(path, bytes, size, err);
out:
  free(views);
  free(bytes);
  gathering_free(&g);
  return rc;
}

/* ---- the command ---- */
/* --device picks by name; the words that stand for devices of this machine pick all. */
static const char *device_filter(const char *device)
{
  static const char *const words[] = {"auto", "cuda", "none", "emu"};
  if(device == NULL || strncmp(device, "cuda:", 5) == 0 || strncmp(device, "emu:", 4) == 0)
    return NULL;
  for(size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
    if(strcmp(device, words[i]) == 0)
      return NULL;
  return device;
}

/* Exports from one store file. MF_ERR_NOT_FOUND if the file is not there or has no such winner. */
static enum mf_status export_from(const char *store_path, const struct options *opt, const char *shape_name, struct error *err)
{
  struct store *st = NULL;
  enum mf_status rc;
  if(access(store_path, F_OK) != 0)
    return nothing_to_export(shape_name, device_filter(opt->device), err);
  rc = store_open(store_path, true, &st, err);
  if(rc == MF_OK)
    rc = package_export(st, shape_name, device_filter(opt->device), opt->allow_predicted, opt->output, err);
  store_close(st);
  return rc;
}

static enum mf_status report_export(const struct options *opt, const char *shape_name, struct error *err)
{
  json_t *top;
  char *text;
  if(!opt->quiet)
    fprintf(stderr, "wrote %s\n", opt->output);
  if(!opt->json)
    return MF_OK;
  top = json_pack("{s:s, s:s}", "shape", shape_name, "file", opt->output);
  text = top != NULL ? json_dumps(top, 0) : NULL;
  json_decref(top);
  if(text == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  puts(text);
  free(text);
  return MF_OK;
}

/* The work store first: it is at least as new as the shipped file that is made from it. */
enum mf_status export_command(const struct options *opt, const char *shape_name, struct error *err)
{
  enum mf_status rc;
  if(opt->output == NULL)
    return error_set(err, MF_ERR_USAGE, "export: name the file with -o, e.g. `moeforge export %s -o %s.moeforge`", shape_name, shape_name);
  rc = export_from(opt->store_path, opt, shape_name, err);
  if(rc == MF_ERR_NOT_FOUND)
    rc = export_from(opt->shipped_path, opt, shape_name, err);
  return rc == MF_OK ? report_export(opt, shape_name, err) : rc;
}
