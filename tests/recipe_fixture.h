/* recipe_fixture.h - a small problem and a recipe that uses every source, for the tests of the runtime. */
#ifndef MOEFORGE_TESTS_RECIPE_FIXTURE_H
#define MOEFORGE_TESTS_RECIPE_FIXTURE_H

#include "moeforge.h"
#include "moeforge_recipe.h"

#include <stdio.h>
#include <string.h>

#define FIXTURE_CUBIN "FAKECUBIN mf_moe 96 128 128\n"

/* What the fixture's kernel gets as its first parameter. */
struct fixture_params {
  uint64_t x, logits, bias, s13, s2, out, workspace;
  int32_t tokens, x_stride, logits_stride, out_stride;
  float scaling;
  int32_t constant;
  int64_t w13_stride_twice, w2_stride;
};

static inline struct mf_problem fixture_problem(void)
{
  struct mf_problem p;
  memset(&p, 0, sizeof(p));
  p.struct_size = sizeof(p);
  p.experts = p.expert_count = 16;
  p.top_k = 2;
  p.hidden = 512;
  p.intermediate = 128;
  p.groups = p.groups_kept = 1;
  p.renormalize = 1;
  return p;
}

static inline void fixture_field(struct mf_recipe *r, enum mf_source source, size_t size, size_t offset, int64_t value)
{
  r->fields[r->nfields++] = (struct mf_recipe_field){.source = (uint16_t)source, .size = (uint16_t)size, .offset = (uint32_t)offset, .value = value};
}

#define FIXTURE_FIELD(r, source, member, value) \
  fixture_field((r), (source), sizeof(((struct fixture_params *)0)->member), offsetof(struct fixture_params, member), (value))

static inline void fixture_maps(struct mf_recipe *r)
{
  struct mf_recipe_map *up = &r->maps[0], *down = &r->maps[1];
  *up = (struct mf_recipe_map){.base = MF_SRC_W13, .rank = 5, .swizzle = 128, .promotion = 128, .dim = {128, 8, 2, 512, 4}, .box = {128, 8, 2, 1, 4}};
  up->stride[0] = (struct mf_recipe_stride){MF_SRC_W13_ROW_STRIDE, 0, 1};
  up->stride[1] = (struct mf_recipe_stride){MF_SRC_W13_ROW_STRIDE, 0, 128};
  up->stride[2] = (struct mf_recipe_stride){MF_SRC_W13_ROW_STRIDE, 0, 8};
  up->stride[3] = (struct mf_recipe_stride){MF_SRC_CONST, 0, 128};
  *down = (struct mf_recipe_map){.base = MF_SRC_W2, .rank = 2, .swizzle = 64, .promotion = 0, .dim = {128, 8192}, .box = {64, 16}};
  down->stride[0] = (struct mf_recipe_stride){MF_SRC_W2_ROW_STRIDE, 0, 1};
  r->nmaps = 2;
}

static inline struct mf_recipe fixture_recipe(void)
{
  struct mf_recipe r;
  memset(&r, 0, sizeof(r));
  r.magic = MF_RECIPE_MAGIC;
  r.version = MF_RECIPE_VERSION;
  r.size = sizeof(r);
  r.flags = MF_RECIPE_COOPERATIVE;
  snprintf(r.kernel, sizeof(r.kernel), "mf_moe");
  r.grid[0] = 132;
  r.grid[1] = r.grid[2] = 1;
  r.block[0] = 384;
  r.block[1] = r.block[2] = 1;
  r.shared_bytes = 200000;
  r.min_sms = 132;
  r.tokens_min = 1;
  r.tokens_max = 8;
  r.workspace_bytes = 20000;
  r.workspace_zero_bytes = 16384;
  r.block_bytes = 384;
  r.h_offset = 4096;
  r.h_buffer_bytes = 4096;
  r.routing_ids_offset = 3072;
  r.routing_weights_offset = 3584;
  r.status_offset = 2304;
  r.nparams = 3;
  r.params[0] = (struct mf_recipe_param){0, sizeof(struct fixture_params)};
  r.params[1] = (struct mf_recipe_param){128, 128};
  r.params[2] = (struct mf_recipe_param){256, 128};
  FIXTURE_FIELD(&r, MF_SRC_X, x, 0);
  FIXTURE_FIELD(&r, MF_SRC_LOGITS, logits, 0);
  FIXTURE_FIELD(&r, MF_SRC_BIAS, bias, 0);
  FIXTURE_FIELD(&r, MF_SRC_S13, s13, 0);
  FIXTURE_FIELD(&r, MF_SRC_S2, s2, 0);
  FIXTURE_FIELD(&r, MF_SRC_OUT, out, 0);
  FIXTURE_FIELD(&r, MF_SRC_WORKSPACE, workspace, 0);
  FIXTURE_FIELD(&r, MF_SRC_TOKENS, tokens, 0);
  FIXTURE_FIELD(&r, MF_SRC_X_STRIDE, x_stride, 0);
  FIXTURE_FIELD(&r, MF_SRC_LOGITS_STRIDE, logits_stride, 1);
  FIXTURE_FIELD(&r, MF_SRC_OUT_STRIDE, out_stride, 2); /* bytes */
  FIXTURE_FIELD(&r, MF_SRC_ROUTED_SCALING, scaling, 0);
  FIXTURE_FIELD(&r, MF_SRC_CONST, constant, -7);
  FIXTURE_FIELD(&r, MF_SRC_W13_ROW_STRIDE, w13_stride_twice, 2);
  FIXTURE_FIELD(&r, MF_SRC_W2_ROW_STRIDE, w2_stride, 1);
  fixture_field(&r, MF_SRC_TENSOR_MAP, 128, 128, 0);
  fixture_field(&r, MF_SRC_TENSOR_MAP, 128, 256, 1);
  fixture_maps(&r);
  return r;
}

#endif
