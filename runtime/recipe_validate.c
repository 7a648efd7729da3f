/* recipe_validate.c - makes any byte string safe to interpret as a recipe: every count, offset, size and enumerator within its bounds.
 *
 * After it, recipe.c reads and writes only inside the recipe and the argument block, whatever the bytes were. What it cannot judge is whether the
 * recipe belongs to its cubin: the two are one unit, kept together by the package's hashes. */
#include "recipe.h"

#include <string.h>

#define MAX_STRIDE_FACTOR 65536
#define MAX_SHARED_BYTES (1u << 20)
#define MAX_TOKENS_OF_KERNEL 65536u
#define MAX_WORKSPACE ((uint64_t)1 << 40)

/* A number that must lie in [low, high]. */
struct bound {
  uint64_t have, low, high;
};

static int within(const struct bound *bounds, size_t count)
{
  for(size_t i = 0; i < count; i++)
    if(bounds[i].have < bounds[i].low || bounds[i].have > bounds[i].high)
      return 0;
  return 1;
}

/* How each source may be stored: allowed sizes (a set of 4, 8, 128) and whether 'value' is a stride's multiplier. */
static const struct source_rule {
  uint16_t source;
  uint16_t sizes; /* sum of the allowed sizes */
  int is_stride;
} source_rules[] = {
    {MF_SRC_CONST, 4 + 8, 0},          {MF_SRC_TENSOR_MAP, 128, 0},     {MF_SRC_W13, 8, 0},        {MF_SRC_S13, 8, 0},
    {MF_SRC_W2, 8, 0},                 {MF_SRC_S2, 8, 0},               {MF_SRC_BIAS, 8, 0},       {MF_SRC_W13_ROW_STRIDE, 4 + 8, 1},
    {MF_SRC_W2_ROW_STRIDE, 4 + 8, 1},  {MF_SRC_ROUTED_SCALING, 4, 0},   {MF_SRC_X, 8, 0},          {MF_SRC_LOGITS, 8, 0},
    {MF_SRC_OUT, 8, 0},                {MF_SRC_WORKSPACE, 8, 0},        {MF_SRC_TOKENS, 4 + 8, 0}, {MF_SRC_X_STRIDE, 4 + 8, 1},
    {MF_SRC_LOGITS_STRIDE, 4 + 8, 1},  {MF_SRC_OUT_STRIDE, 4 + 8, 1},   {MF_SRC_IDS, 8, 0},        {MF_SRC_WEIGHTS, 8, 0},
    {MF_SRC_IDS_STRIDE, 4 + 8, 1},     {MF_SRC_WEIGHTS_STRIDE, 4 + 8, 1}, {MF_SRC_SHARED_GATE, 8, 0}, {MF_SRC_SHARED_GATE_STRIDE, 4 + 8, 1},
};

static int field_good(const struct mf_recipe *r, const struct mf_recipe_field *f)
{
  const struct source_rule *rule = NULL;
  const uint32_t alignment = f->size == 128 ? 64 : f->size;
  for(size_t i = 0; i < sizeof(source_rules) / sizeof(source_rules[0]); i++)
    if(source_rules[i].source == f->source)
      rule = &source_rules[i];
  if(f->source >= MF_SRC_FIRST_OF_VERSION_2 && r->version < 2)
    return 0;
  if(rule == NULL || (f->size != 4 && f->size != 8 && f->size != 128) || (rule->sizes & f->size) == 0)
    return 0;
  if(f->offset % alignment != 0 || f->offset > r->block_bytes || f->size > r->block_bytes - f->offset)
    return 0;
  if(f->source == MF_SRC_TENSOR_MAP)
    return f->value >= 0 && f->value < (int64_t)r->nmaps;
  return !rule->is_stride || (f->value >= 0 && f->value <= MAX_STRIDE_FACTOR);
}

static int one_of(uint32_t value, const uint32_t *allowed, size_t count)
{
  for(size_t i = 0; i < count; i++)
    if(allowed[i] == value)
      return 1;
  return 0;
}

static int map_good(const struct mf_recipe_map *m)
{
  static const uint32_t swizzles[] = {0, 32, 64, 128}, promotions[] = {0, 64, 128, 256};
  static const uint32_t stride_sources[] = {MF_SRC_CONST, MF_SRC_W13_ROW_STRIDE, MF_SRC_W2_ROW_STRIDE};
  uint64_t box_bytes = 1;
  if((m->base != MF_SRC_W13 && m->base != MF_SRC_W2) || m->rank < 1 || m->rank > 5 || !one_of(m->swizzle, swizzles, 4) ||
     !one_of(m->promotion, promotions, 4))
    return 0;
  for(uint32_t i = 0; i < m->rank; i++) {
    if(m->dim[i] < 1 || m->dim[i] > (uint64_t)1 << 32 || m->box[i] < 1 || m->box[i] > 256)
      return 0;
    box_bytes *= m->box[i];
  }
  for(uint32_t i = 0; i + 1 < m->rank; i++)
    if(!one_of(m->stride[i].source, stride_sources, 3) || m->stride[i].value < 1 || m->stride[i].value >= (uint64_t)1 << 40)
      return 0;
  return m->box[0] % 16 == 0 && (m->swizzle == 0 || m->box[0] <= m->swizzle) && box_bytes <= MAX_SHARED_BYTES;
}

/* A C identifier, NUL-terminated within its array. */
static int kernel_name_good(const char *name, size_t space)
{
  const size_t length = strnlen(name, space);
  return length > 0 && length < space && strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_$") == length;
}

/* An intermediate value at 'offset' of the workspace that needs 'bytes'. */
static int in_workspace(const struct mf_recipe *r, uint64_t offset, uint64_t bytes)
{
  return offset % 4 == 0 && offset <= r->workspace_bytes && bytes <= r->workspace_bytes - offset;
}

static int numbers_good(const struct mf_recipe *r)
{
  const struct bound bounds[] = {
      {r->flags, 0, MF_RECIPE_COOPERATIVE | MF_RECIPE_PDL},
      {r->grid[0], 1, INT32_MAX},
      {r->grid[1], 1, 65535},
      {r->grid[2], 1, 65535},
      {r->block[0], 1, 1024},
      {r->block[1], 1, 1024},
      {r->block[2], 1, 64},
      {(uint64_t)r->block[0] * r->block[1] * r->block[2], 1, 1024},
      {r->shared_bytes, 0, MAX_SHARED_BYTES},
      {r->min_sms, 0, 65536},
      {r->tokens_min, 1, MAX_TOKENS_OF_KERNEL},
      {r->tokens_max, r->tokens_min, MAX_TOKENS_OF_KERNEL},
      {r->workspace_bytes, 0, MAX_WORKSPACE},
      {r->workspace_zero_bytes, 0, r->workspace_bytes},
      {r->block_bytes, 1, MF_RECIPE_MAX_BLOCK},
      {r->nparams, 1, MF_RECIPE_MAX_PARAMS},
      {r->nfields, 0, MF_RECIPE_MAX_FIELDS},
      {r->nmaps, 0, MF_RECIPE_MAX_MAPS},
      {r->h_buffer_bytes, 0, r->workspace_bytes / 2},
  };
  return within(bounds, sizeof(bounds) / sizeof(bounds[0])) && in_workspace(r, r->h_offset, 2 * r->h_buffer_bytes) &&
         in_workspace(r, r->launch_count_offset, 4) && in_workspace(r, r->routing_ids_offset, 4) && in_workspace(r, r->routing_weights_offset, 4) &&
         in_workspace(r, r->status_offset, 4);
}

enum mf_status recipe_validate(const struct mf_recipe *recipe, size_t bytes)
{
  if(bytes < 12 || recipe->magic != MF_RECIPE_MAGIC || recipe->version == 0)
    return MF_ERR_CORRUPT;
  if(recipe->version > MF_RECIPE_VERSION)
    return MF_ERR_NEWER_FORMAT;
  if(bytes != sizeof(*recipe) || recipe->size != sizeof(*recipe) || !kernel_name_good(recipe->kernel, sizeof(recipe->kernel)) || !numbers_good(recipe))
    return MF_ERR_CORRUPT;
  for(uint32_t i = 0; i < recipe->nparams; i++)
    if(recipe->params[i].size == 0 || recipe->params[i].offset > recipe->block_bytes ||
       recipe->params[i].size > recipe->block_bytes - recipe->params[i].offset)
      return MF_ERR_CORRUPT;
  for(uint32_t i = 0; i < recipe->nmaps; i++)
    if(!map_good(&recipe->maps[i]))
      return MF_ERR_CORRUPT;
  for(uint32_t i = 0; i < recipe->nfields; i++)
    if(!field_good(recipe, &recipe->fields[i]))
      return MF_ERR_CORRUPT;
  return MF_OK;
}
