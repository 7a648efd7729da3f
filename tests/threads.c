/* threads.c - eight threads open, create, bind, call and destroy at once, on two devices; built with ThreadSanitizer by `make check-threads`.
 *
 *   threads PACKAGE      a package of make_package.c; the driver is the scripted one (MOEFORGE_LIBCUDA)
 *
 * One package, one op and one layer per device are shared by all threads; besides, each thread makes and ends objects of its own. Only libmoeforge is
 * built with the sanitizer: the driver's own locks are not what is looked at. */
#include "fake_libcuda.h"
#include "moeforge.h"
#include "recipe_fixture.h"

#include "cuda_api.h"

#include <pthread.h>
#include <stddef.h>

#define THREADS 8
#define ROUNDS 200
#define DEVICES 2

static struct shared {
  struct mf_package *pkg;
  struct mf_op *op[DEVICES];
  struct mf_layer *layer[DEVICES];
  struct cuda_api api;
  CUcontext context[DEVICES];
  const char *path;
} shared;

struct worker {
  pthread_t thread;
  int number;
  enum mf_status status;
  const char *step;
  _Alignas(256) unsigned char memory[3][65536]; /* x, out, workspace */
};

static _Alignas(256) unsigned char weights_memory[65536];

static enum mf_status bind(struct mf_op *op, struct mf_layer **out)
{
  struct mf_weights w;
  memset(&w, 0, sizeof(w));
  w.struct_size = sizeof(w);
  w.w13 = w.w2 = weights_memory;
  w.s13 = w.s2 = (const float *)(const void *)weights_memory;
  return mf_layer_bind(op, &w, out);
}

static enum mf_status forward(struct worker *w, const struct mf_layer *layer, int tokens)
{
  struct mf_call call;
  memset(&call, 0, sizeof(call));
  call.struct_size = sizeof(call);
  call.tokens = tokens;
  call.x = call.logits = w->memory[0];
  call.out = w->memory[1];
  call.workspace = w->memory[2];
  return mf_moe_forward(layer, &call, NULL);
}

/* One op of the thread's own, from a package that it shares or has opened itself. */
static enum mf_status own_objects(struct worker *w, int device, int round)
{
  const struct mf_problem problem = fixture_problem();
  struct mf_package *pkg = NULL;
  struct mf_op *op = NULL;
  struct mf_layer *layer = NULL;
  enum mf_status rc = MF_OK;
  if(round % 4 == 0) {
    w->step = "open";
    rc = mf_package_open(shared.path, &pkg);
  }
  if(rc == MF_OK) {
    w->step = "create";
    rc = mf_op_create(pkg != NULL ? pkg : shared.pkg, &problem, device, 1 + round % 8, &op);
  }
  if(rc == MF_OK) {
    w->step = "bind";
    rc = bind(op, &layer);
  }
  if(rc == MF_OK) {
    w->step = "forward through an own layer";
    rc = forward(w, layer, 1 + round % 8);
  }
  mf_layer_destroy(layer);
  mf_op_destroy(op);
  mf_package_close(pkg);
  return rc;
}

static void *work(void *opaque)
{
  struct worker *w = opaque;
  const int device = w->number % DEVICES;
  shared.api.p_cuCtxPushCurrent(shared.context[device]);
  for(int round = 0; w->status == MF_OK && round < ROUNDS; round++) {
    struct mf_layer *layer = NULL;
    w->step = "forward through the shared layer";
    w->status = forward(w, shared.layer[device], 1 + (round + w->number) % 8);
    if(w->status == MF_OK && round % 8 == 0)
      w->status = own_objects(w, device, round / 8);
    if(w->status == MF_OK) {
      w->step = "bind to the shared op";
      w->status = bind(shared.op[device], &layer);
    }
    mf_layer_destroy(layer);
  }
  shared.api.p_cuCtxPopCurrent(NULL);
  return NULL;
}

static enum mf_status start(const char *path)
{
  const struct mf_problem problem = fixture_problem();
  char why[256] = "";
  enum mf_status rc = mf_package_open(path, &shared.pkg);
  shared.path = path;
  if(rc == MF_OK && cuda_api_open(&shared.api, why, sizeof(why)) != 0)
    rc = MF_ERR_NO_DEVICE;
  for(int i = 0; rc == MF_OK && i < DEVICES; i++) {
    rc = mf_op_create(shared.pkg, &problem, i, 8, &shared.op[i]);
    if(rc == MF_OK)
      rc = bind(shared.op[i], &shared.layer[i]);
    if(rc == MF_OK && shared.api.p_cuDevicePrimaryCtxRetain(&shared.context[i], i) != CUDA_SUCCESS)
      rc = MF_ERR_DEVICE;
  }
  return rc;
}

static void end(void)
{
  for(int i = 0; i < DEVICES; i++) {
    mf_layer_destroy(shared.layer[i]);
    mf_op_destroy(shared.op[i]);
    shared.api.p_cuDevicePrimaryCtxRelease(i);
  }
  mf_package_close(shared.pkg);
}

int main(int argc, char **argv)
{
  static struct worker workers[THREADS];
  enum mf_status rc;
  fakecuda_alive_fn *alive;
  int failed = 0;
  fakecuda_use("devices=2", NULL);
  rc = argc == 2 ? start(argv[1]) : MF_ERR_USAGE;
  if(rc != MF_OK) {
    fprintf(stderr, "threads: cannot start: %s\n", mf_status_string(rc));
    return 1;
  }
  for(int i = 0; i < THREADS; i++) {
    workers[i].number = i;
    if(pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0)
      return 1;
  }
  for(int i = 0; i < THREADS; i++) {
    pthread_join(workers[i].thread, NULL);
    if(workers[i].status != MF_OK) {
      fprintf(stderr, "threads: thread %d: %s: %s\n", i, workers[i].step, mf_status_name(workers[i].status));
      failed = 1;
    }
  }
  end();
  *(void **)(void *)&alive = fakecuda_symbol("fakecuda_alive");
  if(alive() != 0) {
    fprintf(stderr, "threads: %d objects of the driver are left\n", alive());
    failed = 1;
  }
  if(!failed)
    printf("threads: %d threads, %d rounds each, no finding\n", THREADS, ROUNDS);
  return failed;
}
