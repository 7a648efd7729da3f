/* op.c - mf_op: selection, loading, dispatch table.
 *
 *   problem ---- which entries are for it?            none: MF_MISS_SHAPE (needs no GPU)
 *   device  ---- compute capability and name equal?   none: MF_MISS_DEVICE
 *                of several SM counts: the device's own, else the largest below it, else the smallest above it
 *   tokens  ---- does an entry cover each of 1..max?  else MF_MISS_TOKENS
 *   driver  ---- as new as the entries need?          else MF_MISS_DRIVER
 *   SMs     ---- enough for each kernel's grid?       else MF_MISS_SMS (min_sms, then the driver's own occupancy for grids that wait for themselves)
 *
 * Nothing is loaded before all of these but the last have been answered.
 *
 * Workspace: token intervals may use different kernels whose layouts differ (launch counters, parity of buffers, values that must be zero between
 * launches). So each kernel of the op has a part of its own, 256-byte aligned, one after the other; nothing is shared, and a sequence of calls
 * with changing token counts needs no clearing. It costs the sum of the parts: a few hundred kilobytes. */
#include "op.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define WORKSPACE_ALIGNMENT 256u
#define OP_MAX_TOKENS 65536

/* What selection needs of the device. */
struct device_facts {
  char name[80];
  int cc_major, cc_minor, sms, driver;
};

static enum mf_status read_facts(const struct cuda_api *api, CUdevice device, struct device_facts *out)
{
  memset(out, 0, sizeof(*out));
  if(api->p_cuDeviceGetName(out->name, (int)sizeof(out->name) - 1, device) != CUDA_SUCCESS ||
     api->p_cuDeviceGetAttribute(&out->cc_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) != CUDA_SUCCESS ||
     api->p_cuDeviceGetAttribute(&out->cc_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device) != CUDA_SUCCESS ||
     api->p_cuDeviceGetAttribute(&out->sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
     api->p_cuDriverGetVersion(&out->driver) != CUDA_SUCCESS)
    return MF_ERR_DEVICE;
  return MF_OK;
}

/* ---- selection ---- */
static int has_shape(const struct mf_package *pkg, const struct package_problem *problem)
{
  for(uint32_t i = 0; i < pkg->nentries; i++)
    if(package_problem_equal(&pkg->entries[i].problem, problem))
      return 1;
  return 0;
}

static int fits_device(const struct package_entry *e, const struct package_problem *problem, const struct device_facts *dev)
{
  return e->cc_major == dev->cc_major && e->cc_minor == dev->cc_minor && strcmp(e->device_name, dev->name) == 0 &&
         package_problem_equal(&e->problem, problem);
}

/* Is an entry tuned for 'sms' multiprocessors a better match for a device of 'have' than one for 'best'? */
static int better_sms(int sms, int best, int have)
{
  if(best == 0 || sms == have)
    return best != have;
  if(best == have)
    return 0;
  if((sms < have) != (best < have))
    return sms < have;
  return sms < have ? sms > best : sms < best;
}

/* The SM count of the entries to use; 0 if none fits the device. */
static int choose_sms(const struct mf_package *pkg, const struct package_problem *problem, const struct device_facts *dev)
{
  int best = 0;
  for(uint32_t i = 0; i < pkg->nentries; i++)
    if(fits_device(&pkg->entries[i], problem, dev) && better_sms(pkg->entries[i].sms, best, dev->sms))
      best = pkg->entries[i].sms;
  return best;
}

/* The entry for one token count: a measured one before a predicted one, else the first. NULL if there is none. */
static const struct package_entry *find_entry(const struct mf_package *pkg, const struct package_problem *problem, const struct device_facts *dev, int sms,
                                              int tokens)
{
  const struct package_entry *found = NULL;
  for(uint32_t i = 0; i < pkg->nentries; i++) {
    const struct package_entry *e = &pkg->entries[i];
    if(e->sms != sms || tokens < e->tokens_min || tokens > e->tokens_max || !fits_device(e, problem, dev))
      continue;
    if(found == NULL || ((found->flags & PACKAGE_PREDICTED) && !(e->flags & PACKAGE_PREDICTED)))
      found = e;
  }
  return found;
}

/* Index of the entry's kernel in the op, added if it is new. */
static uint16_t kernel_index(struct mf_op *op, const struct package_entry *e)
{
  const struct mf_recipe *recipe = &op->package->recipes[e->recipe];
  uint32_t i = 0;
  while(i < op->nkernels && (op->kernels[i].recipe_index != e->recipe || op->kernels[i].cubin_index != e->cubin))
    i++;
  if(i == op->nkernels) {
    op->kernels[op->nkernels++] = (struct op_kernel){.recipe_index = e->recipe, .cubin_index = e->cubin, .recipe = recipe,
                                                     .workspace_offset = op->workspace_bytes};
    op->workspace_bytes += (recipe->workspace_bytes + WORKSPACE_ALIGNMENT - 1) / WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT;
  }
  return (uint16_t)i;
}

/* Fills in the dispatch table; at most one kernel per entry, hence per token count. */
static enum mf_status select_kernels(struct mf_op *op, const struct package_problem *problem, const struct device_facts *dev)
{
  const int sms = choose_sms(op->package, problem, dev);
  enum mf_status driver = MF_OK, residency = MF_OK;
  if(sms == 0)
    return MF_MISS_DEVICE;
  for(int tokens = 1; tokens <= op->max_tokens; tokens++) {
    const struct package_entry *e = find_entry(op->package, problem, dev, sms, tokens);
    if(e == NULL)
      return MF_MISS_TOKENS;
    op->kernel_of[tokens] = kernel_index(op, e);
    if(dev->driver < e->min_driver)
      driver = MF_MISS_DRIVER;
    if((uint32_t)dev->sms < op->package->recipes[e->recipe].min_sms)
      residency = MF_MISS_SMS;
  }
  return driver != MF_OK ? driver : residency;
}

/* ---- loading; the op's context is current ---- */
/* The module of a cubin, loaded if it is new. */
static enum mf_status find_module(struct mf_op *op, uint32_t cubin_index, CUmodule *out)
{
  enum mf_status rc = MF_OK;
  uint32_t i = 0;
  while(i < op->nmodules && op->modules[i].cubin_index != cubin_index)
    i++;
  if(i == op->nmodules) {
    op->modules[i].cubin_index = cubin_index;
    rc = recipe_load_module(&op->api, package_cubin(op->package, cubin_index), &op->modules[i].module);
    op->nmodules += rc == MF_OK;
  }
  *out = op->modules[i].module;
  return rc;
}

/* Largest dynamic shared memory of the kernels that share this one's function: the limit belongs to the function. */
static uint32_t shared_limit(const struct mf_op *op, const struct op_kernel *kernel)
{
  uint32_t most = 0;
  for(uint32_t i = 0; i < op->nkernels; i++)
    if(op->kernels[i].cubin_index == kernel->cubin_index && strcmp(op->kernels[i].recipe->kernel, kernel->recipe->kernel) == 0 &&
       op->kernels[i].recipe->shared_bytes > most)
      most = op->kernels[i].recipe->shared_bytes;
  return most;
}

/* A grid whose CTAs wait for each other must be resident as a whole. */
static enum mf_status check_residency(const struct mf_op *op, const struct op_kernel *kernel, int sms)
{
  const struct mf_recipe *r = kernel->recipe;
  const uint64_t ctas = (uint64_t)r->grid[0] * r->grid[1] * r->grid[2];
  int per_sm = 0;
  if((r->flags & (MF_RECIPE_COOPERATIVE | MF_RECIPE_PDL)) == 0)
    return MF_OK;
  if(op->api.p_cuOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel->function, (int)(r->block[0] * r->block[1] * r->block[2]), r->shared_bytes) !=
     CUDA_SUCCESS)
    return MF_ERR_DEVICE;
  return per_sm < 1 || (uint64_t)per_sm * (uint64_t)sms < ctas ? MF_MISS_SMS : MF_OK;
}

static enum mf_status load_kernels(struct mf_op *op, int sms)
{
  enum mf_status rc = MF_OK;
  for(uint32_t i = 0; rc == MF_OK && i < op->nkernels; i++) {
    struct op_kernel *k = &op->kernels[i];
    CUmodule module = NULL;
    rc = find_module(op, k->cubin_index, &module);
    if(rc == MF_OK)
      rc = recipe_get_function(&op->api, k->recipe, module, shared_limit(op, k), &k->function);
    if(rc == MF_OK)
      rc = check_residency(op, k, sms);
  }
  return rc;
}

static enum mf_status retain_and_load(struct mf_op *op, int sms)
{
  enum mf_status rc;
  if(op->api.p_cuDevicePrimaryCtxRetain(&op->context, op->device) != CUDA_SUCCESS) {
    op->context = NULL;
    return MF_ERR_DEVICE;
  }
  if(op->api.p_cuCtxPushCurrent(op->context) != CUDA_SUCCESS)
    return MF_ERR_DEVICE;
  rc = load_kernels(op, sms);
  op->api.p_cuCtxPopCurrent(NULL);
  return rc;
}

/* ---- the public calls ---- */
static enum mf_status open_device(struct mf_op *op, int device)
{
  char why[256];
  if(cuda_api_open(&op->api, why, sizeof(why)) != 0 || op->api.p_cuInit(0) != CUDA_SUCCESS || op->api.p_cuDeviceGet(&op->device, device) != CUDA_SUCCESS)
    return MF_ERR_NO_DEVICE;
  return MF_OK;
}

static enum mf_status op_build(struct mf_op *op, const struct package_problem *problem, int device)
{
  struct device_facts dev = {0};
  enum mf_status rc = open_device(op, device);
  if(rc == MF_OK)
    rc = read_facts(&op->api, op->device, &dev);
  if(rc == MF_OK)
    rc = select_kernels(op, problem, &dev);
  return rc == MF_OK ? retain_and_load(op, dev.sms) : rc;
}

enum mf_status mf_op_create(struct mf_package *pkg, const struct mf_problem *problem, int device, int max_tokens, struct mf_op **out)
{
  struct package_problem wanted;
  struct mf_problem own;
  struct mf_op *op;
  enum mf_status rc;
  size_t slots;
  if(out == NULL)
    return MF_ERR_USAGE;
  *out = NULL;
  if(pkg == NULL || problem == NULL || max_tokens < 1 ||
     !struct_take(&own, sizeof(own), STRUCT_FIRST_SIZE(struct mf_problem, swiglu_alpha), problem, problem->struct_size))
    return MF_ERR_USAGE;
  package_problem_set(&own, &wanted);
  if(!has_shape(pkg, &wanted))
    return MF_MISS_SHAPE;
  slots = max_tokens < OP_MAX_TOKENS ? (size_t)max_tokens : OP_MAX_TOKENS;
  op = calloc(1, sizeof(*op));
  if(op == NULL)
    return MF_ERR_NOMEM;
  op->package = pkg;
  op->max_tokens = max_tokens <= OP_MAX_TOKENS ? max_tokens : OP_MAX_TOKENS;
  package_problem_get(&wanted, &op->problem);
  op->kernel_of = calloc(slots + 1, sizeof(*op->kernel_of));
  op->kernels = calloc(slots < pkg->nentries ? slots : pkg->nentries, sizeof(*op->kernels));
  op->modules = calloc(pkg->ncubins, sizeof(*op->modules));
  rc = op->kernel_of == NULL || op->kernels == NULL || op->modules == NULL ? MF_ERR_NOMEM : op_build(op, &wanted, device);
  if(rc == MF_OK && max_tokens > OP_MAX_TOKENS)
    rc = MF_MISS_TOKENS;
  if(rc == MF_OK)
    *out = op;
  else
    mf_op_destroy(op);
  return rc;
}

size_t mf_op_workspace_size(const struct mf_op *op)
{
  return op != NULL ? op->workspace_bytes : 0;
}

int mf_op_max_tokens(const struct mf_op *op)
{
  return op != NULL ? op->max_tokens : 0;
}

enum mf_status mf_workspace_init(const struct mf_op *op, void *workspace, mf_stream stream)
{
  enum mf_status rc = MF_OK;
  if(op == NULL || workspace == NULL)
    return MF_ERR_USAGE;
  for(uint32_t i = 0; rc == MF_OK && i < op->nkernels; i++)
    rc = recipe_workspace_init(&op->api, op->kernels[i].recipe, (unsigned char *)workspace + op->kernels[i].workspace_offset, stream);
  return rc;
}

void mf_op_destroy(struct mf_op *op)
{
  if(op == NULL)
    return;
  if(op->context != NULL) {
    if(op->api.p_cuCtxPushCurrent(op->context) == CUDA_SUCCESS) {
      for(uint32_t i = 0; op->modules != NULL && i < op->nmodules; i++)
        op->api.p_cuModuleUnload(op->modules[i].module);
      op->api.p_cuCtxPopCurrent(NULL);
    }
    op->api.p_cuDevicePrimaryCtxRelease(op->device);
  }
  cuda_api_close(&op->api);
  free(op->kernel_of);
  free(op->kernels);
  free(op->modules);
  free(op);
}
