/* spec_values.c - the values of a model spec that have a syntax of their own: token counts, the routing mix, the scale block. */
#include "schema.h"
#include "spec_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MIX_TOLERANCE 1e-6 /* of the sum of shares */

/* ---- tokens ---- */

struct token_list {
  int tokens[MAX_TOKEN_COUNTS];
  int count;
  const char *path;
  struct faults *faults;
  bool ok;
};

static void token_fault(struct token_list *list, int line, const char *got, const char *hint)
{
  list->ok = false;
  faults_add(list->faults, line, list->path, "expected ascending token counts from 1 to %d such as 1-8 or [1, 2, 4, 8], got %s%s", MAX_TOKENS,
             got, hint);
}

/* "5" or "1-8". */
static bool parse_range(const char *text, long *low, long *high)
{
  const char *dash = strchr(text, '-');
  char first[16];
  if(dash == NULL || dash == text) {
    if(!schema_parse_int(text, low))
      return false;
    *high = *low;
    return true;
  }
  if((size_t)(dash - text) >= sizeof(first))
    return false;
  memcpy(first, text, (size_t)(dash - text));
  first[dash - text] = '\0';
  return schema_parse_int(first, low) && schema_parse_int(dash + 1, high);
}

static void add_tokens(struct token_list *list, const struct ynode *node)
{
  char got[96], hint[64] = "";
  long low = 0, high = 0;
  const char *what = ynode_describe(node, got, sizeof(got));
  const int last = list->count > 0 ? list->tokens[list->count - 1] : 0;
  if(node->kind != YNODE_SCALAR || !parse_range(node->text, &low, &high)) {
    token_fault(list, node->line, what, "");
  } else if(low < 1 || high > MAX_TOKENS) {
    snprintf(hint, sizeof(hint), " (nearest legal value %d)", low < 1 ? 1 : MAX_TOKENS);
    token_fault(list, node->line, what, hint);
  } else if(low > high) {
    token_fault(list, node->line, what, " (the first is larger than the last)");
  } else if(low <= last) {
    snprintf(hint, sizeof(hint), " after %d", last);
    token_fault(list, node->line, what, hint);
  } else {
    for(long t = low; t <= high; t++) /* fits: ascending and at most MAX_TOKENS = MAX_TOKEN_COUNTS */
      list->tokens[list->count++] = (int)t;
  }
}

void spec_read_tokens(const struct ynode *node, const char *path, void *draft, struct faults *faults)
{
  struct model_spec *spec = draft;
  struct token_list list = {.count = 0, .path = path, .faults = faults, .ok = true};
  _Static_assert(MAX_TOKENS <= MAX_TOKEN_COUNTS, "a list of all token counts fits");
  if(node->kind == YNODE_SEQUENCE)
    for(const struct ynode *item = node->first; item != NULL; item = item->next)
      add_tokens(&list, item);
  else
    add_tokens(&list, node);
  if(list.ok && list.count == 0)
    token_fault(&list, node->line, "an empty list", "");
  if(!list.ok)
    return;
  memcpy(spec->tokens, list.tokens, sizeof(spec->tokens));
  spec->ntokens = list.count;
}

/* ---- routing mix ---- */

/* Names that may stand in a mix; ROUTING_TIES is for checks only. */
static const char mix_names[] = "uniform|zipf|concentrated|dispersed";

static bool read_share(const struct ynode *node, const char *path, struct routing_weight *out, struct faults *faults)
{
  char key[160], got[96], name[64];
  double share = 0;
  const enum routing_kind kind = routing_from_name(node->key);
  snprintf(key, sizeof(key), "%s.%.60s", path, node->key);
  if(kind == ROUTING_KINDS || kind == ROUTING_TIES) {
    if(nearest_name(node->key, mix_names, name, sizeof(name)) != NULL)
      faults_add(faults, node->key_line, key, "unknown routing input (nearest key %s.%s)", path, name);
    else
      faults_add(faults, node->key_line, key, "expected one of uniform, zipf, concentrated, dispersed");
    return false;
  }
  if(node->kind != YNODE_SCALAR || node->quoted || !schema_parse_double(node->text, &share) || share <= 0 || share > 1) {
    faults_add(faults, node->line, key, "expected a share above 0 and up to 1, got %s", ynode_describe(node, got, sizeof(got)));
    return false;
  }
  out->kind = kind;
  out->weight = share;
  return true;
}

void spec_read_mix(const struct ynode *node, const char *path, void *draft, struct faults *faults)
{
  struct model_spec *spec = draft;
  struct routing_weight mix[MAX_ROUTING_MIX];
  char got[96];
  double sum = 0;
  int count = 0;
  bool ok = true;
  if(node->kind != YNODE_MAPPING || node->first == NULL) {
    faults_add(faults, node->line, path, "expected shares such as {uniform: 0.7, zipf: 0.3}, got %s",
               node->kind == YNODE_MAPPING ? "an empty mapping" : ynode_describe(node, got, sizeof(got)));
    return;
  }
  for(const struct ynode *item = node->first; item != NULL; item = item->next) {
    if(count == MAX_ROUTING_MIX || !read_share(item, path, &mix[count], faults))
      ok = false;
    else
      sum += mix[count++].weight;
  }
  if(!ok)
    return;
  if(fabs(sum - 1) > MIX_TOLERANCE) {
    faults_add(faults, node->line, path, "expected shares that sum to 1, got a sum of %.9g", sum);
    return;
  }
  memcpy(spec->mix, mix, (size_t)count * sizeof(mix[0]));
  spec->nmix = count;
}

/* ---- scale block ---- */

void spec_read_block(const struct ynode *node, const char *path, void *draft, struct faults *faults)
{
  char got[96];
  int count = 0;
  bool ok = node->kind == YNODE_SEQUENCE;
  (void)draft;
  for(const struct ynode *item = ok ? node->first : NULL; item != NULL; item = item->next, count++)
    ok = ok && item->kind == YNODE_SCALAR && !item->quoted && strcmp(item->text, "128") == 0;
  if(ok && count == 2)
    return;
  faults_add(faults, node->line, path, "expected [128, 128], got %s: other scale blocks are not served",
             node->kind == YNODE_SEQUENCE ? "another list" : ynode_describe(node, got, sizeof(got)));
}
