/* op.h - an op: the kernels that serve one problem on one device for 1..max_tokens, loaded; and how the layers use it. */
#ifndef MOEFORGE_RUNTIME_OP_H
#define MOEFORGE_RUNTIME_OP_H

#include "package_file.h"
#include "recipe.h"

/* One kernel: a distinct (recipe, cubin) of the package. */
struct op_kernel {
  uint32_t recipe_index, cubin_index;
  const struct mf_recipe *recipe; /* in the package */
  CUfunction function;
  size_t workspace_offset; /* its part of the workspace; see op.c */
};

struct op_module {
  uint32_t cubin_index;
  CUmodule module;
};

struct mf_op {
  const struct mf_package *package; /* the caller's */
  struct mf_problem problem;
  struct cuda_api api;
  CUdevice device;
  CUcontext context; /* primary, retained; NULL until then */
  int max_tokens;
  uint16_t *kernel_of; /* [max_tokens + 1]: index into kernels by token count */
  struct op_kernel *kernels;
  struct op_module *modules; /* one per distinct cubin */
  uint32_t nkernels, nmodules;
  size_t workspace_bytes;
};

#endif
