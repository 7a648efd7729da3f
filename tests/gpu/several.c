/* several.c - one process, several GPUs: what docs/integrate-c.md promises of libmoeforge there. Needs two GPUs or more of the package's kind.
 *
 *   build/tests/gpu/several PACKAGE [STEP...]      without steps all of them, in this order
 *
 *   same       every GPU alone: results equal to those of the first, to the bit
 *   calls      whatever context is current (none, any GPU's, one that the caller made), each call leaves it so, whether it succeeds or fails
 *   wrong      forward while another context than the op's is current, or none: with a stream of the op's it works, with stream 0 it is refused and nothing
 *              is written; the next call in the right one works
 *   turns      one thread, all GPUs and streams in turn
 *   threads    a thread for each GPU and stream, all at once
 *   graphs     a graph for each GPU and stream: launched in turn by one thread, and by a thread each at once
 *   release    an op is destroyed while the other GPUs work, and made again; at the end no primary context is held any more
 *   workspace  mf_workspace_init with memory of another GPU. The interface cannot promise to notice: what the driver makes of it is said, not judged
 *
 * The package is opened once; per GPU an op and a layer, per GPU and stream a workspace; two streams each. For one token, and for as many as the package serves.
 * Exit codes: 0 all holds, 1 something does not, 2 it could not be tried, 77 there are fewer than two GPUs, so that nothing was tried. */
#include "gpu_fixture.h"

#include <dlfcn.h>
#include <pthread.h>

#define MAX_CARDS 8
#define LANES 2
#define ROUNDS 32
#define GRAPH_LAUNCHES 8
#define GRAPH_TURNS 3
#define EXIT_NOT_RUN 77
#define NONE (-1) /* no context is current */
#define OWN (-2)  /* one that the caller made on the GPU in question */

/* A stream of a GPU. */
struct lane {
  CUstream stream;
  CUdeviceptr workspace, out; /* out: [ROUNDS][tokens][hidden] */
  CUgraphExec graph;
  int launches, wrong; /* since the last report */
};

struct card {
  struct verify_gpu gpu;
  struct verify_weights weights;
  struct verify_kernel kernel; /* op, layer, inputs */
  struct lane lane[LANES];
};

/* The driver's functions that libmoeforge does not use. */
struct extra {
  CUresult(CUDAAPI *create)(CUcontext *context, unsigned flags, CUdevice device);
  CUresult(CUDAAPI *destroy)(CUcontext context);
  CUresult(CUDAAPI *state)(CUdevice device, unsigned *flags, int *active);
};

static struct {
  struct cuda_api api; /* open to the end */
  struct extra extra;
  struct mf_package *package;
  struct mf_problem problem;
  int cards, devices; /* used; there are */
  struct card card[MAX_CARDS];
  size_t y_bytes;
  unsigned char *alone, *got;
} s;

static void make_current(int card)
{
  cuda(&s.api, s.api.p_cuCtxSetCurrent(s.card[card].gpu.context), "making a context current");
}

/* ---- launches ---- */
static struct mf_call call_of(int card, const struct lane *lane, int round)
{
  const struct verify_kernel *k = &s.card[card].kernel;
  struct mf_call call = {.struct_size = sizeof(call),
                         .tokens = now.tokens,
                         .x = (const void *)(uintptr_t)k->x,
                         .out = (void *)(uintptr_t)(lane->out + (size_t)round * s.y_bytes),
                         .workspace = (void *)(uintptr_t)lane->workspace};
  data_logits_call(&s.problem, k->logits, &call);
  return call;
}

static void must_launch(int card, const struct lane *lane, int round)
{
  const struct mf_call call = call_of(card, lane, round);
  const enum mf_status rc = mf_moe_forward(s.card[card].kernel.layer, &call, lane->stream);
  if(rc != MF_OK)
    say(false, mf_status_name(rc));
}

static void launch_rounds(int c, int rounds)
{
  make_current(c);
  for(int r = 0; r < rounds; r++)
    for(int l = 0; l < LANES; l++)
      must_launch(c, &s.card[c].lane[l], r);
}

/* Outputs that no kernel writes. The card's context is current. */
static void poison(const struct lane *lane)
{
  cuda(&s.api, s.api.p_cuMemsetD8Async(lane->out, 0xff, ROUNDS * s.y_bytes, lane->stream), "poisoning the output");
}

static void poison_all(void)
{
  for(int c = 0; c < s.cards; c++) {
    make_current(c);
    for(int l = 0; l < LANES; l++) {
      poison(&s.card[c].lane[l]);
      wait_for(&s.api, s.card[c].lane[l].stream);
    }
  }
}

static void fetch(const struct lane *lane, int rounds)
{
  wait_for(&s.api, lane->stream);
  cuda(&s.api, s.api.p_cuMemcpyDtoH(s.got, lane->out, (size_t)rounds * s.y_bytes), "fetching the output");
}

/* Looks at the first 'rounds' outputs of every stream. */
static void collect_all(int rounds)
{
  for(int c = 0; c < s.cards; c++) {
    make_current(c);
    for(int l = 0; l < LANES; l++) {
      struct lane *lane = &s.card[c].lane[l];
      fetch(lane, rounds);
      lane->launches += rounds;
      lane->wrong += count_wrong(s.got, s.alone, s.y_bytes, rounds);
    }
  }
}

/* One line for each GPU and stream. */
static void report_all(const char *how)
{
  char what[128];
  for(int c = 0; c < s.cards; c++)
    for(int l = 0; l < LANES; l++) {
      struct lane *lane = &s.card[c].lane[l];
      snprintf(what, sizeof(what), "%s, GPU %d, stream %d", how, c, l);
      report(what, lane->launches, lane->wrong);
      lane->launches = lane->wrong = 0;
    }
}

/* ---- threads ---- */
struct worker {
  pthread_t thread;
  int card, lane;
  int current;        /* a GPU, NONE or OWN */
  CUcontext own;      /* of OWN */
  int calls, wrong;   /* checks that held, that did not */
  enum mf_status status[2];
  void (*work)(struct worker *w);
};

static pthread_barrier_t together;

static void *run_worker(void *opaque)
{
  struct worker *w = opaque;
  if(w->current == OWN)
    cuda(&s.api, s.extra.create(&w->own, 0, s.card[w->card].gpu.device), "making a context");
  else if(w->current != NONE)
    cuda(&s.api, s.api.p_cuCtxPushCurrent(s.card[w->current].gpu.context), "making a context current");
  w->work(w);
  if(w->current == OWN)
    cuda(&s.api, s.extra.destroy(w->own), "destroying a context");
  return NULL;
}

static void start_worker(struct worker *w)
{
  if(pthread_create(&w->thread, NULL, run_worker, w) != 0)
    abort();
}

static void run_alone(struct worker *w)
{
  start_worker(w);
  pthread_join(w->thread, NULL);
}

/* A thread for each GPU and stream, in its GPU's context, that begin together. */
static void run_everywhere(void (*work)(struct worker *w))
{
  struct worker workers[MAX_CARDS * LANES];
  const int count = s.cards * LANES;
  pthread_barrier_init(&together, NULL, (unsigned)count);
  for(int i = 0; i < count; i++) {
    workers[i] = (struct worker){.card = i / LANES, .lane = i % LANES, .current = i / LANES, .work = work};
    start_worker(&workers[i]);
  }
  for(int i = 0; i < count; i++)
    pthread_join(workers[i].thread, NULL);
  pthread_barrier_destroy(&together);
}

/* ---- steps ---- */
static void step_same(void)
{
  unsigned char *other = need_memory(s.y_bytes);
  const struct test_case tc = fixture_case(now.tokens);
  for(int c = 1; c < s.cards; c++) {
    char what[64];
    make_current(c);
    fixture_alone(&s.card[c].gpu, &s.card[c].kernel, &tc, other);
    snprintf(what, sizeof(what), "GPU %d alone, against GPU 0 alone", c);
    report(what, 1, count_wrong(other, s.alone, s.y_bytes, 1));
  }
  free(other);
}

#include "several_contexts.h"

static void step_turns(void)
{
  poison_all();
  for(int r = 0; r < ROUNDS; r++)
    for(int c = 0; c < s.cards; c++) {
      make_current(c);
      for(int l = 0; l < LANES; l++)
        must_launch(c, &s.card[c].lane[l], r);
    }
  collect_all(ROUNDS);
  report_all("one thread");
}

static void work_launches(struct worker *w)
{
  pthread_barrier_wait(&together);
  for(int r = 0; r < ROUNDS; r++)
    must_launch(w->card, &s.card[w->card].lane[w->lane], r);
}

static void step_threads(void)
{
  poison_all();
  run_everywhere(work_launches);
  collect_all(ROUNDS);
  report_all("a thread each");
}

/* GRAPH_LAUNCHES launches of the layer, one behind the other. */
static CUgraphExec capture(int card, const struct lane *lane)
{
  CUgraph graph = NULL;
  CUgraphExec exec = NULL;
  make_current(card);
  cuda(&s.api, s.api.p_cuStreamBeginCapture(lane->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "beginning a capture");
  for(int r = 0; r < GRAPH_LAUNCHES; r++)
    must_launch(card, lane, r);
  cuda(&s.api, s.api.p_cuStreamEndCapture(lane->stream, &graph), "ending a capture");
  cuda(&s.api, s.api.p_cuGraphInstantiateWithFlags(&exec, graph, 0), "making a graph");
  cuda(&s.api, s.api.p_cuGraphDestroy(graph), "freeing a graph");
  return exec;
}

static void work_graph(struct worker *w)
{
  const struct lane *lane = &s.card[w->card].lane[w->lane];
  pthread_barrier_wait(&together);
  cuda(&s.api, s.api.p_cuGraphLaunch(lane->graph, lane->stream), "launching a graph");
}

static void graphs_in_turn(void)
{
  for(int c = 0; c < s.cards; c++) {
    make_current(c);
    for(int l = 0; l < LANES; l++)
      cuda(&s.api, s.api.p_cuGraphLaunch(s.card[c].lane[l].graph, s.card[c].lane[l].stream), "launching a graph");
  }
}

static void step_graphs(void)
{
  for(int c = 0; c < s.cards; c++)
    for(int l = 0; l < LANES; l++)
      s.card[c].lane[l].graph = capture(c, &s.card[c].lane[l]);
  for(int threads = 0; threads < 2; threads++) {
    for(int turn = 0; turn < GRAPH_TURNS; turn++) {
      poison_all();
      if(threads)
        run_everywhere(work_graph);
      else
        graphs_in_turn();
      collect_all(GRAPH_LAUNCHES);
    }
    report_all(threads ? "graphs, a thread each" : "graphs, one thread");
  }
  for(int c = 0; c < s.cards; c++) {
    make_current(c);
    for(int l = 0; l < LANES; l++)
      cuda(&s.api, s.api.p_cuGraphExecDestroy(s.card[c].lane[l].graph), "freeing a graph");
  }
}

/* ---- op and layer of a GPU ---- */
static void make_kernel(int c)
{
  struct card *card = &s.card[c];
  const struct test_case tc = fixture_case(now.tokens);
  struct error err = {MF_OK, ""};
  make_current(c);
  need(verify_kernel_make(&card->gpu, s.package, &card->weights, now.tokens, &card->kernel, &err), &err);
  fixture_alone(&card->gpu, &card->kernel, &tc, s.got);
}

static void init_workspace(int c, const struct lane *lane)
{
  make_current(c);
  need_status(mf_workspace_init(s.card[c].kernel.op, (void *)(uintptr_t)lane->workspace, lane->stream), "mf_workspace_init");
}

static void step_release(void)
{
  for(int gone = 0; gone < s.cards; gone++) {
    char what[64];
    poison_all();
    launch_rounds(gone, ROUNDS);
    for(int l = 0; l < LANES; l++) /* an op must outlive its launches */
      wait_for(&s.api, s.card[gone].lane[l].stream);
    for(int c = 0; c < s.cards; c++)
      if(c != gone)
        launch_rounds(c, ROUNDS);
    make_current(gone);
    verify_kernel_free(&s.card[gone].gpu, &s.card[gone].kernel);
    make_kernel(gone);
    collect_all(ROUNDS);
    for(int l = 0; l < LANES; l++)
      init_workspace(gone, &s.card[gone].lane[l]);
    launch_rounds(gone, 1);
    collect_all(1);
    snprintf(what, sizeof(what), "op of GPU %d made again", gone);
    report_all(what);
  }
}

/* The last step: a driver that does not refuse may fault, and then the context is lost. */
static void step_workspace(void)
{
  const struct lane *own = &s.card[0].lane[0];
  const double start = seconds_now();
  const char *name = NULL;
  enum mf_status rc;
  CUresult result;
  char what[160];
  make_current(0);
  rc = mf_workspace_init(s.card[0].kernel.op, (void *)(uintptr_t)s.card[1].lane[0].workspace, own->stream);
  while((result = s.api.p_cuStreamQuery(own->stream)) == CUDA_ERROR_NOT_READY && seconds_now() - start < WAIT_SECONDS)
    usleep(100);
  s.api.p_cuGetErrorName(result, &name);
  snprintf(what, sizeof(what), "mf_workspace_init on GPU 0 with memory of GPU 1: %s, and its stream then says %s", mf_status_name(rc), name != NULL ? name : "?");
  say(rc == MF_OK || rc == MF_ERR_DEVICE, what);
  if(result != CUDA_SUCCESS)
    say_and_end("the context of GPU 0 is lost: nothing more can be tried");
  init_workspace(0, own);
  init_workspace(1, &s.card[1].lane[0]);
  poison_all();
  for(int c = 0; c < s.cards; c++)
    launch_rounds(c, 1);
  collect_all(1);
  report_all("then with their own workspaces");
}

static const struct {
  const char *name;
  void (*run)(void);
} steps[] = {{"same", step_same},       {"calls", step_calls},   {"wrong", step_wrong},     {"turns", step_turns},
             {"threads", step_threads}, {"graphs", step_graphs}, {"release", step_release}, {"workspace", step_workspace}};
#define STEPS (sizeof(steps) / sizeof(steps[0]))

/* ---- set-up ---- */
/* The GPUs that there are; with fewer than two the program ends here. */
static int count_cards(void)
{
  char why[256];
  int count = 0;
  if(cuda_api_open(&s.api, why, sizeof(why)) != 0 || s.api.p_cuInit(0) != CUDA_SUCCESS || s.api.p_cuDeviceGetCount(&count) != CUDA_SUCCESS)
    count = 0;
  if(count < 2) {
    printf("not run: GPUs: %d, at least 2 are needed\n", count);
    exit(EXIT_NOT_RUN);
  }
  *(void **)(void *)&s.extra.create = dlsym(s.api.library, "cuCtxCreate_v2");
  *(void **)(void *)&s.extra.destroy = dlsym(s.api.library, "cuCtxDestroy_v2");
  *(void **)(void *)&s.extra.state = dlsym(s.api.library, "cuDevicePrimaryCtxGetState");
  if(s.extra.create == NULL || s.extra.destroy == NULL || s.extra.state == NULL)
    need_status(MF_ERR_NO_DEVICE, "the driver lacks functions that this program calls");
  return count;
}

static void open_cards(float routed_scaling)
{
  struct error err = {MF_OK, ""};
  for(int c = 0; c < s.cards; c++) {
    struct card *card = &s.card[c];
    need(verify_gpu_open(c, (int)(WAIT_SECONDS * 1e3), &card->gpu, &err), &err);
    need(verify_weights_make(&card->gpu, &s.problem, routed_scaling, &card->weights, &err), &err);
  }
}

static void begin(int tokens)
{
  now.step = "start";
  now.tokens = tokens;
  s.y_bytes = (size_t)tokens * (size_t)s.problem.hidden * 2;
  s.alone = need_memory(s.y_bytes);
  s.got = need_memory(ROUNDS * s.y_bytes);
  for(int c = s.cards - 1; c >= 0; c--) {
    make_kernel(c);
    for(int l = 0; l < LANES; l++) {
      struct lane *lane = &s.card[c].lane[l];
      cuda(&s.api, s.api.p_cuStreamCreate(&lane->stream, CU_STREAM_NON_BLOCKING), "making a stream");
      cuda(&s.api, s.api.p_cuMemAlloc(&lane->workspace, s.card[c].kernel.workspace_bytes), "allocating a workspace");
      cuda(&s.api, s.api.p_cuMemAlloc(&lane->out, ROUNDS * s.y_bytes), "allocating outputs");
      init_workspace(c, lane);
    }
  }
  memcpy(s.alone, s.got, s.y_bytes); /* of GPU 0, which came last */
}

static void end(void)
{
  for(int c = 0; c < s.cards; c++) {
    make_current(c);
    for(int l = 0; l < LANES; l++) {
      s.api.p_cuStreamDestroy(s.card[c].lane[l].stream);
      s.api.p_cuMemFree(s.card[c].lane[l].workspace);
      s.api.p_cuMemFree(s.card[c].lane[l].out);
    }
    verify_kernel_free(&s.card[c].gpu, &s.card[c].kernel);
  }
  free(s.alone);
  free(s.got);
}

/* Each GPU's primary context must have been given back by everyone. */
static void close_cards(bool judge)
{
  for(int c = s.cards - 1; c >= 0; c--) {
    make_current(c);
    verify_weights_free(&s.card[c].gpu, &s.card[c].weights);
    verify_gpu_close(&s.card[c].gpu);
  }
  now.step = "release";
  for(int c = 0; judge && c < s.cards; c++) {
    char what[96];
    unsigned flags = 0;
    int active = 1;
    const bool asked = s.extra.state(c, &flags, &active) == CUDA_SUCCESS;
    snprintf(what, sizeof(what), "primary context of GPU %d at the end: %s", c, !asked ? "the driver does not say" : active ? "HELD" : "given back");
    say(asked && !active, what);
  }
}

int main(int argc, char **argv)
{
  const char *names[STEPS];
  float routed_scaling = 1;
  int counts[2] = {1, 0};
  for(size_t i = 0; i < STEPS; i++)
    names[i] = steps[i].name;
  fixture_begin("several", argc, argv, names, STEPS);
  s.devices = count_cards();
  s.cards = s.devices < MAX_CARDS ? s.devices : MAX_CARDS;
  counts[1] = fixture_package(argv[1], &s.package, &s.problem, &routed_scaling);
  open_cards(routed_scaling);
  for(int i = 0; i < (counts[1] > 1 ? 2 : 1); i++) {
    begin(counts[i]);
    for(size_t k = 0; k < STEPS; k++) {
      now.step = steps[k].name;
      if(fixture_wants(argc, argv, now.step))
        steps[k].run();
    }
    end();
  }
  close_cards(fixture_wants(argc, argv, "release"));
  mf_package_close(s.package);
  cuda_api_close(&s.api);
  if(now.failed)
    printf("FAILED\n");
  else
    printf("all as alone, on %d GPUs\n", s.cards);
  return now.failed;
}
