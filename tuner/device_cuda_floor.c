/* device_cuda_floor.c - the launches of the floor kernels (templates/tools/floor.cu): what the host works out ahead for them.
 *
 * mf_floor copies bytes and needs sizes only. mf_floor_tensor reads the weights as a timed kernel does, so it borrows that kernel's tensor maps, out of the
 * argument block of the layer: its boxes must be those of the family `stream`, else there is no such floor. */
#include "device_cuda.h"

#include <string.h>

#include "tools/floor_params.h"

static struct mf_floor_section section_of(const void *base, uint64_t expert_bytes, int active, int ctas)
{
  struct mf_floor_section s = {.base = base, .expert_bytes = expert_bytes};
  uint64_t all;
  s.pieces = (uint32_t)((expert_bytes + MF_FLOOR_STAGE_BYTES - 1) / MF_FLOOR_STAGE_BYTES);
  s.pieces = s.pieces > 0 ? s.pieces : 1;
  s.tail = (uint32_t)(expert_bytes - (uint64_t)(s.pieces - 1) * MF_FLOOR_STAGE_BYTES);
  s.inverse = s.pieces > 1 ? (uint32_t)((UINT64_C(1) << 32) / s.pieces) : UINT32_MAX;
  all = (uint64_t)s.pieces * (uint64_t)active;
  s.share = (uint32_t)(all / (uint64_t)ctas);
  s.rest = (uint32_t)(all % (uint64_t)ctas);
  return s;
}

enum mf_status floor_params_make(const struct mf_problem *p, const void *w13, const void *w2, const int32_t *experts, int active, int ctas,
                                 struct mf_floor_params *out, struct error *err)
{
  const uint64_t matrix = (uint64_t)p->intermediate * (uint64_t)p->hidden;
  memset(out, 0, sizeof(*out));
  if(active > MF_FLOOR_MAX_EXPERTS)
    return error_set(err, MF_ERR_UNSUPPORTED, "the floor kernel takes at most %d experts of a launch, not %d", MF_FLOOR_MAX_EXPERTS, active);
  out->up = section_of(w13, 2 * matrix, active, ctas);
  out->down = section_of(w2, matrix, active, ctas);
  for(int i = 0; i < active; i++)
    out->experts[i] = (uint16_t)experts[i];
  return MF_OK;
}

/* Whether these are boxes that mf_floor_tensor knows how to walk over: units of 16 rows or of 8, and rows of w2. */
static bool known_boxes(const struct mf_recipe *r)
{
  const uint32_t features = r->maps[0].box[1] == 4 ? 4 : 8, unit_box[4] = {128, features, 2, 1};
  return r->nmaps == 2 && r->maps[0].rank == 5 && r->maps[0].base == MF_SRC_W13 && memcmp(r->maps[0].box, unit_box, sizeof(unit_box)) == 0 &&
         r->maps[0].box[4] * 2 * features * 128 == MF_FLOOR_STAGE_BYTES && r->maps[1].rank == 3 && r->maps[1].base == MF_SRC_W2 && r->maps[1].box[0] == 128 &&
         r->maps[1].box[1] * 128 * r->maps[1].box[2] <= MF_FLOOR_STAGE_BYTES && r->maps[1].box[1] * 128 <= MF_FLOOR_STAGE_BYTES;
}

bool floor_tensor_params_make(const struct mf_problem *p, const struct mf_recipe *r, const int32_t *experts, int active, struct mf_floor_tensor_params *out)
{
  const bool whole = p->intermediate_offset == 0 && p->intermediate % 128 == 0;
  memset(out, 0, sizeof(*out));
  if(!known_boxes(r) || active > MF_FLOOR_MAX_EXPERTS || p->intermediate % 8 != 0)
    return false;
  out->active = active;
  out->ctas = (int32_t)r->grid[0];
  out->units = p->intermediate / (int32_t)r->maps[0].box[1];
  out->box_blocks = (int32_t)r->maps[0].box[4];
  out->unit_stages = ((p->hidden + 127) / 128 + out->box_blocks - 1) / out->box_blocks;
  out->hidden = p->hidden;
  out->down_rows = (int32_t)r->maps[1].box[1];
  out->down_ctas = (p->hidden + out->down_rows - 1) / out->down_rows;
  out->down_blocks = (p->intermediate_offset + p->intermediate + 127) / 128;
  out->piece_blocks = whole ? (int32_t)r->maps[1].box[2] : MF_FLOOR_STAGE_BYTES / (128 * out->down_rows);
  out->offset = whole ? -1 : p->intermediate_offset;
  for(int i = 0; i < active; i++)
    out->experts[i] = (uint16_t)experts[i];
  return out->down_ctas <= out->ctas;
}

static enum mf_status launch(struct device *dev, CUfunction function, int ctas, void **args, struct error *err)
{
  CUlaunchConfig config;
  CUresult result;
  memset(&config, 0, sizeof(config));
  config.gridDimX = (unsigned)ctas;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = MF_FLOOR_THREADS;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = MF_FLOOR_SHARED_BYTES;
  config.hStream = dev->stream;
  result = dev->api.p_cuLaunchKernelEx(&config, function, args, NULL);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "launching a floor kernel in a graph");
}

enum mf_status cuda_enqueue_floor(struct device *dev, int layer, const int32_t *experts, int active, struct error *err)
{
  const struct mf_weights *w = &dev->layers[layer].weights;
  struct mf_floor_params params;
  void *args[] = {&params};
  const enum mf_status rc = floor_params_make(&dev->problem, w->w13, w->w2, experts, active, dev->info.sms, &params, err);
  return rc == MF_OK ? launch(dev, dev->floor, dev->info.sms, args, err) : rc;
}

/* Where the argument block has the recipe's tensor map 'index'; NULL if nowhere. */
static const void *map_in_block(const struct mf_recipe *r, const struct recipe_block *block, int index)
{
  for(uint32_t i = 0; i < r->nfields; i++)
    if(r->fields[i].source == MF_SRC_TENSOR_MAP && r->fields[i].value == index)
      return block->bytes + r->fields[i].offset;
  return NULL;
}

bool cuda_has_tensor_floor(const struct device *dev, const struct device_kernel *kernel)
{
  struct mf_floor_tensor_params params;
  return dev->floor_tensor != NULL && floor_tensor_params_make(&dev->problem, &kernel->recipe, NULL, 0, &params) &&
         map_in_block(&kernel->recipe, &kernel->blocks[0], 0) != NULL && map_in_block(&kernel->recipe, &kernel->blocks[0], 1) != NULL;
}

enum mf_status cuda_enqueue_tensor_floor(struct device *dev, const struct device_kernel *kernel, int layer, const int32_t *experts, int active,
                                         struct error *err)
{
  const struct mf_recipe *r = &kernel->recipe;
  struct mf_floor_tensor_params params;
  CUtensorMap up, down;
  void *args[] = {&params, &up, &down};
  if(!floor_tensor_params_make(&dev->problem, r, experts, active, &params))
    return error_set(err, MF_ERR_INTERNAL, "%s: its tensor maps have no floor", r->kernel);
  memcpy(&up, map_in_block(r, &kernel->blocks[layer], 0), sizeof(up));
  memcpy(&down, map_in_block(r, &kernel->blocks[layer], 1), sizeof(down));
  return launch(dev, dev->floor_tensor, params.ctas, args, err);
}
