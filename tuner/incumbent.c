/* incumbent.c - see incumbent.h. */
#include "incumbent.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct load {
  struct incumbents *out;
  struct store *store;
  const struct device_info *dev;
  enum mf_status rc;
};

static bool append(struct incumbents *list, const struct incumbent *one)
{
  if(list->count == list->space) {
    const size_t space = list->space > 0 ? 2 * list->space : 16;
    struct incumbent *items = realloc(list->items, space * sizeof(*items));
    if(items == NULL)
      return false;
    list->items = items;
    list->space = space;
  }
  list->items[list->count++] = *one;
  return true;
}

/* Same model and size: winners of one H200 are incumbents on another. */
static bool is_device(struct load *load, const struct winner *win)
{
  struct device_info dev;
  struct error ignored;
  return store_get_device(load->store, win->device_id, &dev, &ignored) == MF_OK && dev.emulated == load->dev->emulated && dev.sms == load->dev->sms &&
         strcmp(dev.name, load->dev->name) == 0;
}

static bool take(void *context, const struct winner *win)
{
  struct load *load = context;
  struct incumbent one = {.tokens_min = win->tokens_min, .tokens_max = win->tokens_max};
  struct error ignored;
  if(win->predicted || !is_device(load, win) || schedule_parse(win->schedule_name, &one.schedule, &ignored) != MF_OK)
    return true;
  if(!append(load->out, &one))
    load->rc = MF_ERR_NOMEM;
  return load->rc == MF_OK;
}

static enum mf_status load_from(struct incumbents *out, struct store *store, const char *shape_name, const struct device_info *dev, struct error *err)
{
  struct load load = {.out = out, .store = store, .dev = dev, .rc = MF_OK};
  const enum mf_status rc = store_each_winner(store, shape_name, take, &load, err);
  return load.rc != MF_OK ? error_set(err, load.rc, "out of memory") : rc;
}

enum mf_status incumbents_load(struct incumbents *out, struct store *store, const char *shipped_path, const char *shape_name, const struct device_info *dev, struct error *err)
{
  struct store *shipped;
  struct error ignored;
  enum mf_status rc = load_from(out, store, shape_name, dev, err);
  if(rc == MF_ERR_NOT_FOUND)
    rc = MF_OK;
  if(rc != MF_OK || access(shipped_path, R_OK) != 0 || store_open(shipped_path, true, &shipped, &ignored) != MF_OK)
    return rc;
  rc = load_from(out, shipped, shape_name, dev, err);
  store_close(shipped);
  return rc == MF_ERR_NOMEM ? rc : MF_OK;
}

bool incumbents_have(const struct incumbents *list, const struct schedule *sched, int tokens)
{
  for(size_t i = 0; i < list->count; i++) {
    const struct incumbent *one = &list->items[i];
    if(tokens >= one->tokens_min && tokens <= one->tokens_max && schedule_equal(&one->schedule, sched))
      return true;
  }
  return false;
}

void incumbents_free(struct incumbents *list)
{
  free(list->items);
  memset(list, 0, sizeof(*list));
}
