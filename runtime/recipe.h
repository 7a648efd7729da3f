/* recipe.h - interprets binding recipes: used by the runtime's layers and by the tuner's CUDA device, so that what is timed is what is shipped.
 *
 * recipe_validate() makes any byte string safe to interpret; the other functions take only validated recipes. */
#ifndef MOEFORGE_RUNTIME_RECIPE_H
#define MOEFORGE_RUNTIME_RECIPE_H

#include "cuda_api.h"
#include "moeforge.h"
#include "moeforge_recipe.h"

/* The kernel arguments of one bound layer; per-call fields are patched in a copy. */
struct recipe_block {
  _Alignas(64) unsigned char bytes[MF_RECIPE_MAX_BLOCK];
};

/* Magic, version, bounds of every count, offset, rank, box, enumerator; strings terminated. MF_ERR_CORRUPT or MF_ERR_NEWER_FORMAT. */
enum mf_status recipe_validate(const struct mf_recipe *recipe, size_t bytes);

/* Fills in everything that is fixed for a layer: pointers, constants, tensor maps (encoded with the driver, which needs a current context for it).
 * 'weights' strides of 0 mean dense for 'problem'. MF_MISS_LAYOUT if the driver or the recipe cannot take the strides or alignment; MF_ERR_USAGE for
 * missing pointers. */
enum mf_status recipe_bind(const struct cuda_api *api, const struct mf_recipe *recipe, const struct mf_problem *problem, const struct mf_weights *weights,
                           struct recipe_block *out);

/* Loads the kernel of a cubin in the current context and sets its shared-memory limit. The module is the caller's to unload. */
enum mf_status recipe_load(const struct cuda_api *api, const struct mf_recipe *recipe, const void *cubin, CUmodule *module, CUfunction *function);

/* The two halves of recipe_load, for several recipes of one cubin. 'shared_bytes' is the largest that any of them needs. MF_MISS_DEVICE if the module is
 * for another GPU or needs more shared memory than there is, MF_ERR_CORRUPT if it is no module, lacks the kernel or its parameters have other sizes. */
enum mf_status recipe_load_module(const struct cuda_api *api, const void *cubin, CUmodule *module);
enum mf_status recipe_get_function(const struct cuda_api *api, const struct mf_recipe *recipe, CUmodule module, uint32_t shared_bytes, CUfunction *function);

/* Launches on 'stream' with the call's pointers patched in: no allocation, no synchronisation. The driver's result goes to *cuda_result if not NULL.
 * 0 tokens launch nothing. MF_MISS_TOKENS; MF_ERR_USAGE (null, strides below the row, x and out overlap, workspace not 256-byte aligned); MF_MISS_LAYOUT
 * (x or logits rows not 16-byte aligned, ids or weights not 4-byte aligned); MF_MISS_SMS (cooperative grid does not fit); MF_ERR_DEVICE. */
enum mf_status recipe_launch(const struct cuda_api *api, const struct mf_recipe *recipe, CUfunction function, const struct recipe_block *block,
                             const struct mf_problem *problem, const struct mf_call *call, CUstream stream, CUresult *cuda_result);

/* Zeroes what mf_workspace_init must zero, in stream order. */
enum mf_status recipe_workspace_init(const struct cuda_api *api, const struct mf_recipe *recipe, void *workspace, CUstream stream);

#endif
