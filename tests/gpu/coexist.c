/* coexist.c - a package's first layer beside other work on one GPU: results must be those of a launch alone, to the bit, and nothing may hang.
 *
 *   build/tests/gpu/coexist PACKAGE [STEP...]      without steps all of them, in this order
 *
 *   poison    workspaces that hold NaN or random bits where mf_workspace_init() writes nothing
 *   pair      two instances at once, on two streams with a workspace each: both want all multiprocessors, so they must take turns
 *   foreign   beside a kernel that holds one, a quarter, all of the multiprocessors for 50 ms: the launch waits, or fails with a typed error
 *   graph     back-to-back launches in one graph, and two such graphs at once
 *   soak      SOAK_ROUNDS times ROUNDS launches back to back: what goes wrong once in thousands of launches
 *
 * Each for one token and for as many as the package serves. A wait that takes more than 10 s is a failure, and ends the program; so does the alarm after 300 s. */
#include "compile.h"
#include "gpu_fixture.h"

#include <math.h>

#define ROUNDS 100
#define SOAK_ROUNDS 150
#define GRAPH_LAUNCHES 8
#define GRAPH_TURNS 3
#define FOREIGN_MS 50
#define FOREIGN_SHARED_BYTES (200 << 10) /* with this much no other CTA of ours fits beside it */

/* One stream's instance of the layer. */
struct instance {
  CUstream stream;
  CUdeviceptr workspace, out; /* out: [ROUNDS][tokens][hidden] */
};

struct bench {
  struct verify_gpu gpu;
  struct mf_package *package;
  struct mf_problem problem;
  struct verify_weights weights;
  struct verify_kernel kernel; /* layer and inputs, shared by both instances */
  struct instance side[2];
  size_t y_bytes;
  unsigned char *alone, *got; /* y of the launch alone; of all rounds */
};

static enum mf_status launch(const struct bench *b, const struct instance *side, int round)
{
  struct mf_call call = {.struct_size = sizeof(call),
                         .tokens = now.tokens,
                         .x = (const void *)(uintptr_t)b->kernel.x,
                         .out = (void *)(uintptr_t)(side->out + (size_t)round * b->y_bytes),
                         .workspace = (void *)(uintptr_t)side->workspace};
  data_logits_call(&b->problem, b->kernel.logits, &call);
  return mf_moe_forward(b->kernel.layer, &call, side->stream);
}

static void must_launch(const struct bench *b, const struct instance *side, int round)
{
  const enum mf_status rc = launch(b, side, round);
  if(rc != MF_OK)
    say(false, mf_status_name(rc));
}

/* Outputs that no kernel writes, so that a launch that did nothing is found. */
static void poison_outputs(const struct bench *b, const struct instance *side)
{
  cuda(&b->gpu.api, b->gpu.api.p_cuMemsetD8Async(side->out, 0xff, ROUNDS * b->y_bytes, side->stream), "poisoning the output");
}

static void init_workspace(const struct bench *b, const struct instance *side)
{
  need_status(mf_workspace_init(b->kernel.op, (void *)(uintptr_t)side->workspace, side->stream), "mf_workspace_init");
}

/* Rounds whose y differs from that of the launch alone. */
static int wrong_rounds(const struct bench *b, const struct instance *side, int rounds)
{
  wait_for(&b->gpu.api, side->stream);
  cuda(&b->gpu.api, b->gpu.api.p_cuMemcpyDtoH(b->got, side->out, (size_t)rounds * b->y_bytes), "fetching the output");
  return count_wrong(b->got, b->alone, b->y_bytes, rounds);
}

/* ---- steps ---- */
static void step_poison(struct bench *b)
{
  const struct instance *side = &b->side[0];
  const size_t words = (b->kernel.workspace_bytes + 7) / 8;
  uint64_t *bits = need_memory(words * 8);
  for(uint64_t seed = 0; seed < 4; seed++) {
    for(size_t i = 0; i < words; i++)
      bits[i] = seed == 0 ? UINT64_MAX : data_hash(seed, DATA_PICK, i);
    cuda(&b->gpu.api, b->gpu.api.p_cuMemcpyHtoD(side->workspace, bits, b->kernel.workspace_bytes), "poisoning the workspace");
    init_workspace(b, side);
    poison_outputs(b, side);
    for(int r = 0; r < 4; r++) /* launches use two halves of the workspace in turn */
      must_launch(b, side, r);
    report(seed == 0 ? "workspace of NaN" : "workspace of random bits", 4, wrong_rounds(b, side, 4));
  }
  free(bits);
}

static void step_pair(struct bench *b)
{
  for(int s = 0; s < 2; s++)
    poison_outputs(b, &b->side[s]);
  for(int r = 0; r < ROUNDS; r++)
    for(int s = 0; s < 2; s++)
      must_launch(b, &b->side[s], r);
  for(int s = 0; s < 2; s++)
    report(s == 0 ? "first stream" : "second stream", ROUNDS, wrong_rounds(b, &b->side[s], ROUNDS));
}

static const char spin_source[] = "extern \"C\" __global__ void mf_spin(long long cycles)\n"
                                  "{\n"
                                  "  const long long start = clock64();\n"
                                  "  while(clock64() - start < cycles) {}\n"
                                  "}\n";

static CUfunction load_spin(const struct bench *b, CUmodule *module)
{
  struct closure none = {0};
  struct artifact art = {.name = "spin", .source = strdup(spin_source)};
  struct nvrtc *nvrtc = NULL;
  struct error err;
  CUfunction function = NULL;
  need(nvrtc_open(&nvrtc, &err), &err);
  need(compile_artifact(nvrtc, &none, "sm_90a", COMPILE_PLAIN, &art, &err), &err);
  cuda(&b->gpu.api, b->gpu.api.p_cuModuleLoadData(module, art.cubin), "loading the foreign kernel");
  cuda(&b->gpu.api, b->gpu.api.p_cuModuleGetFunction(&function, *module, "mf_spin"), "finding the foreign kernel");
  cuda(&b->gpu.api, b->gpu.api.p_cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, FOREIGN_SHARED_BYTES), "shared memory of the foreign kernel");
  artifact_free(&art);
  nvrtc_close(nvrtc);
  return function;
}

/* The layer beside a kernel that holds 'ctas' multiprocessors. */
static void beside_foreign(struct bench *b, CUfunction spin, int ctas, int khz)
{
  const struct instance *side = &b->side[0];
  long long cycles = (long long)khz * FOREIGN_MS;
  void *parameters[] = {&cycles};
  const CUlaunchConfig config = {.gridDimX = (unsigned)ctas, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32, .blockDimY = 1, .blockDimZ = 1,
                                 .sharedMemBytes = FOREIGN_SHARED_BYTES, .hStream = b->side[1].stream};
  char what[160];
  double start, ms;
  bool before, after;
  enum mf_status rc;
  poison_outputs(b, side);
  wait_for(&b->gpu.api, side->stream);
  cuda(&b->gpu.api, b->gpu.api.p_cuLaunchKernelEx(&config, spin, parameters, NULL), "launching the foreign kernel");
  usleep(5000); /* it has begun by then */
  before = b->gpu.api.p_cuStreamQuery(b->side[1].stream) == CUDA_ERROR_NOT_READY;
  start = seconds_now();
  rc = launch(b, side, 0);
  if(rc == MF_OK)
    wait_for(&b->gpu.api, side->stream);
  ms = (seconds_now() - start) * 1e3;
  after = b->gpu.api.p_cuStreamQuery(b->side[1].stream) == CUDA_ERROR_NOT_READY;
  wait_for(&b->gpu.api, b->side[1].stream);
  if(rc != MF_OK) /* typed: and the next one works */
    must_launch(b, side, 0);
  must_launch(b, side, 1);
  snprintf(what, sizeof(what), "beside %d CTAs that %s when it was launched: %s after %.2f ms, they %s", ctas, before ? "ran" : "HAD ENDED",
           rc == MF_OK ? "done" : mf_status_name(rc), ms, after ? "still ran" : "had ended");
  report(what, 2, wrong_rounds(b, side, 2));
  if(!before)
    say(false, "nothing was shown");
}

static void step_foreign(struct bench *b)
{
  CUmodule module = NULL;
  CUfunction spin = load_spin(b, &module);
  int sms = 0, khz = 0;
  cuda(&b->gpu.api, b->gpu.api.p_cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, b->gpu.device), "asking for the multiprocessors");
  cuda(&b->gpu.api, b->gpu.api.p_cuDeviceGetAttribute(&khz, CU_DEVICE_ATTRIBUTE_CLOCK_RATE, b->gpu.device), "asking for the clock");
  khz = khz > 0 ? khz : 1900000;
  beside_foreign(b, spin, 1, khz);
  beside_foreign(b, spin, (sms + 3) / 4, khz);
  beside_foreign(b, spin, sms, khz);
  cuda(&b->gpu.api, b->gpu.api.p_cuModuleUnload(module), "unloading the foreign kernel");
}

/* GRAPH_LAUNCHES launches of the layer, one behind the other. */
static CUgraphExec capture(struct bench *b, const struct instance *side)
{
  CUgraph graph = NULL;
  CUgraphExec exec = NULL;
  cuda(&b->gpu.api, b->gpu.api.p_cuStreamBeginCapture(side->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "beginning a capture");
  for(int r = 0; r < GRAPH_LAUNCHES; r++)
    must_launch(b, side, r);
  cuda(&b->gpu.api, b->gpu.api.p_cuStreamEndCapture(side->stream, &graph), "ending a capture");
  cuda(&b->gpu.api, b->gpu.api.p_cuGraphInstantiateWithFlags(&exec, graph, 0), "making a graph");
  cuda(&b->gpu.api, b->gpu.api.p_cuGraphDestroy(graph), "freeing a graph");
  return exec;
}

static void step_graph(struct bench *b)
{
  CUgraphExec exec[2];
  for(int s = 0; s < 2; s++)
    exec[s] = capture(b, &b->side[s]);
  for(int sides = 1; sides <= 2; sides++) {
    for(int turn = 0; turn < GRAPH_TURNS; turn++) {
      for(int s = 0; s < sides; s++) {
        poison_outputs(b, &b->side[s]);
        cuda(&b->gpu.api, b->gpu.api.p_cuGraphLaunch(exec[s], b->side[s].stream), "launching a graph");
      }
      for(int s = 0; s < sides; s++)
        report(sides == 1 ? "one graph" : "two graphs at once", GRAPH_LAUNCHES, wrong_rounds(b, &b->side[s], GRAPH_LAUNCHES));
    }
  }
  for(int s = 0; s < 2; s++)
    cuda(&b->gpu.api, b->gpu.api.p_cuGraphExecDestroy(exec[s]), "freeing a graph");
}

/* Where y of a launch differs from that of the launch alone. */
static void describe_wrong(const struct bench *b, const unsigned char *y, int round)
{
  const uint16_t *got = (const uint16_t *)(const void *)y, *alone = (const uint16_t *)(const void *)b->alone;
  const int hidden = b->problem.hidden;
  int count = 0, first_row = hidden, last_row = 0;
  unsigned tokens = 0;
  double most = 0.0, largest = 0.0;
  char text[256];
  for(int i = 0; i < now.tokens * hidden; i++) {
    const double a = bf16_to_float(alone[i]), difference = fabs(bf16_to_float(got[i]) - a);
    largest = fmax(largest, fabs(a));
    if(got[i] == alone[i])
      continue;
    count++;
    tokens |= 1u << (i / hidden);
    first_row = i % hidden < first_row ? i % hidden : first_row;
    last_row = i % hidden > last_row ? i % hidden : last_row;
    most = fmax(most, difference);
  }
  snprintf(text, sizeof(text), "launch %d: %d values differ, rows %d to %d, tokens %#x, by %.3g at most, of %.3g", round, count, first_row, last_row, tokens, most, largest);
  say(false, text);
}

static void step_soak(struct bench *b)
{
  const struct instance *side = &b->side[0];
  int wrong = 0, described = 0;
  for(int turn = 0; turn < SOAK_ROUNDS; turn++) {
    poison_outputs(b, side);
    for(int r = 0; r < ROUNDS; r++)
      must_launch(b, side, r);
    wrong += wrong_rounds(b, side, ROUNDS);
    for(int r = 0; r < ROUNDS && wrong > 0 && described < 8; r++)
      if(memcmp(b->got + (size_t)r * b->y_bytes, b->alone, b->y_bytes) != 0) {
        describe_wrong(b, b->got + (size_t)r * b->y_bytes, turn * ROUNDS + r);
        described++;
      }
  }
  report("back to back", SOAK_ROUNDS * ROUNDS, wrong);
}

static const struct {
  const char *name;
  void (*run)(struct bench *b);
} steps[] = {{"poison", step_poison}, {"pair", step_pair}, {"foreign", step_foreign}, {"graph", step_graph}, {"soak", step_soak}};
#define STEPS (sizeof(steps) / sizeof(steps[0]))

/* ---- set-up ---- */
static void allocate(const struct bench *b, size_t bytes, CUdeviceptr *out)
{
  cuda(&b->gpu.api, b->gpu.api.p_cuMemAlloc(out, bytes), "allocating memory");
}

/* Layer and inputs, the result of a launch alone, two instances. */
static void begin(struct bench *b, int tokens)
{
  const struct test_case tc = fixture_case(tokens);
  struct error err = {MF_OK, ""};
  now.step = "alone";
  now.tokens = tokens;
  b->y_bytes = (size_t)tokens * (size_t)b->problem.hidden * 2;
  b->alone = need_memory(b->y_bytes);
  b->got = need_memory(ROUNDS * b->y_bytes);
  need(verify_kernel_make(&b->gpu, b->package, &b->weights, tokens, &b->kernel, &err), &err);
  fixture_alone(&b->gpu, &b->kernel, &tc, b->alone);
  for(int s = 0; s < 2; s++) {
    struct instance *side = &b->side[s];
    cuda(&b->gpu.api, b->gpu.api.p_cuStreamCreate(&side->stream, CU_STREAM_NON_BLOCKING), "making a stream");
    allocate(b, b->kernel.workspace_bytes, &side->workspace);
    allocate(b, ROUNDS * b->y_bytes, &side->out);
    init_workspace(b, side);
    wait_for(&b->gpu.api, side->stream);
  }
}

static void end(struct bench *b)
{
  for(int s = 0; s < 2; s++) {
    b->gpu.api.p_cuStreamDestroy(b->side[s].stream);
    b->gpu.api.p_cuMemFree(b->side[s].workspace);
    b->gpu.api.p_cuMemFree(b->side[s].out);
  }
  verify_kernel_free(&b->gpu, &b->kernel);
  free(b->alone);
  free(b->got);
}

int main(int argc, char **argv)
{
  static struct bench b;
  struct error err = {MF_OK, ""};
  int counts[2] = {1, 0};
  const char *names[STEPS];
  for(size_t i = 0; i < STEPS; i++)
    names[i] = steps[i].name;
  fixture_begin("coexist", argc, argv, names, STEPS);
  counts[1] = fixture_package(argv[1], &b.package, &b.problem, &b.weights.routed_scaling);
  need(verify_gpu_open(0, (int)(WAIT_SECONDS * 1e3), &b.gpu, &err), &err);
  need(verify_weights_make(&b.gpu, &b.problem, b.weights.routed_scaling, &b.weights, &err), &err);
  for(int i = 0; i < (counts[1] > 1 ? 2 : 1); i++) {
    begin(&b, counts[i]);
    for(size_t s = 0; s < STEPS; s++) {
      now.step = steps[s].name;
      if(fixture_wants(argc, argv, now.step))
        steps[s].run(&b);
    }
    end(&b);
  }
  verify_weights_free(&b.gpu, &b.weights);
  verify_gpu_close(&b.gpu);
  mf_package_close(b.package);
  printf("%s\n", now.failed ? "FAILED" : "all as alone");
  return now.failed;
}
