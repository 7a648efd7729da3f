/* device_hook.h - a candidate kernel for the fake CUDA driver: computes the operator on the CPU, in the child, or misbehaves on demand.
 *
 * The device worker of a test program installs it (hook_install) before it serves requests. Weights are made by data_weights() when datagen's kernel is
 * launched; a launch of the candidate finds its case by comparing inputs with hook_cases() and answers with the reference's own numbers. Inputs that belong
 * to no case (timing) are answered with zeros. */
#ifndef MOEFORGE_TESTS_DEVICE_HOOK_H
#define MOEFORGE_TESTS_DEVICE_HOOK_H

#include <check.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>

#include "datagen.h"
#include "device_client.h"
#include "fake_libcuda.h"
#include "recipe.h"
#include "reference.h"
#include "spec.h"
#include "worker.h"

/* Of this test program, set by hook_main(). */
static char hook_program[4096];
static char hook_dir[512];                /* this run's folder below $TMPDIR */
static struct device_tool_set hook_tools; /* empty unless asked for */

#define HOOK_TOKENS 4
#define HOOK_CASES 6
#define HOOK_LAYERS 8
#define HOOK_CUBIN "FAKECUBIN mf_moe 48\n"

/* What the candidate does; it is a constant in its argument block. */
enum hook_mode {
  HOOK_RIGHT,
  HOOK_WRONG,   /* one token's output is off */
  HOOK_CRASH,   /* kills the process */
  HOOK_HANG,    /* the device stops answering from the next launch on */
  HOOK_FLAKY,   /* wrong the first time that any process runs it, right afterwards */
  HOOK_SILENT,  /* writes no output */
  HOOK_STRAY,   /* writes behind its output */
  HOOK_NAN,     /* reports a NaN logit that is not there */
  HOOK_KILLED,  /* is killed, as the out-of-memory killer would do it */
  HOOK_KILLED_ONCE
};

struct hook_block { /* the candidate's one parameter */
  const void *x, *logits;
  void *out, *workspace;
  const void *w13;
  int32_t tokens, mode;
};

struct hook_workspace {
  uint32_t launches, status, reserved[14];
  int32_t ids[HOOK_TOKENS * 2];
  float weights[HOOK_TOKENS * 2];
  uint32_t reserved2[32];
  uint16_t h[2][HOOK_TOKENS * 2][128];
};

static inline struct mf_problem hook_problem(void)
{
  struct mf_problem p;
  problem_init(&p);
  p.experts = p.expert_count = 8;
  p.top_k = 2;
  p.hidden = 256;
  p.intermediate = 128;
  p.renormalize = 1;
  return p;
}

static inline void hook_cases(struct test_case out[HOOK_CASES])
{
  for(int i = 0; i < HOOK_CASES; i++)
    out[i] = (struct test_case){.tokens = 1 + i % HOOK_TOKENS, .routing = ROUTING_UNIFORM, .data = CASE_NORMAL, .seed = (uint32_t)i + 1};
}

static inline struct mf_recipe hook_recipe(enum hook_mode mode)
{
  const struct mf_recipe_field fields[] = {
      {MF_SRC_X, 8, 0, 0},          {MF_SRC_LOGITS, 8, 8, 0},  {MF_SRC_OUT, 8, 16, 0},      {MF_SRC_WORKSPACE, 8, 24, 0},
      {MF_SRC_W13, 8, 32, 0},       {MF_SRC_TOKENS, 4, 40, 0}, {MF_SRC_CONST, 4, 44, mode},
  };
  struct mf_recipe r;
  memset(&r, 0, sizeof(r));
  r.magic = MF_RECIPE_MAGIC;
  r.version = MF_RECIPE_VERSION;
  r.size = sizeof(r);
  snprintf(r.kernel, sizeof(r.kernel), "mf_moe");
  r.grid[0] = r.grid[1] = r.grid[2] = 1;
  r.block[0] = 32;
  r.block[1] = r.block[2] = 1;
  r.min_sms = 1;
  r.tokens_min = 1;
  r.tokens_max = HOOK_TOKENS;
  r.workspace_bytes = r.workspace_zero_bytes = sizeof(struct hook_workspace);
  r.block_bytes = sizeof(struct hook_block);
  r.nparams = 1;
  r.params[0] = (struct mf_recipe_param){0, sizeof(struct hook_block)};
  r.nfields = sizeof(fields) / sizeof(fields[0]);
  memcpy(r.fields, fields, sizeof(fields));
  r.h_offset = offsetof(struct hook_workspace, h);
  r.h_buffer_bytes = sizeof(((struct hook_workspace *)0)->h[0]);
  r.launch_count_offset = offsetof(struct hook_workspace, launches);
  r.routing_ids_offset = offsetof(struct hook_workspace, ids);
  r.routing_weights_offset = offsetof(struct hook_workspace, weights);
  r.status_offset = offsetof(struct hook_workspace, status);
  return r;
}

/* ---- in the child ---- */
struct hook_state {
  const void *w13[HOOK_LAYERS]; /* as made, in the order of layers */
  int layers;
};

static inline int hook_layer(const struct hook_state *st, const void *w13)
{
  for(int i = 0; i < st->layers; i++)
    if(st->w13[i] == w13)
      return i;
  return 0;
}

static inline void hook_weights(struct hook_state *st, const struct fakecuda_launch *l)
{
  void *out = *(void *const *)l->params[0];
  const uint64_t first = *(const uint64_t *)l->params[1], count = *(const uint64_t *)l->params[2], seed = *(const uint64_t *)l->params[3];
  const enum data_stream stream = (enum data_stream) * (const uint32_t *)l->params[4];
  data_weights(seed, stream, first, (size_t)count, out);
  if(stream == DATA_W13 && seed == data_layer_seed(0))
    st->layers = 0;
  if(stream == DATA_W13 && st->layers < HOOK_LAYERS)
    st->w13[st->layers++] = out;
}

/* The case that has these inputs; false if none. */
static inline bool hook_find_case(const struct hook_block *b, struct test_case *out)
{
  const struct mf_problem p = hook_problem();
  struct test_case cases[HOOK_CASES];
  uint16_t x[HOOK_TOKENS * 256], logits[HOOK_TOKENS * 8];
  hook_cases(cases);
  for(int i = 0; i < HOOK_CASES; i++) {
    const size_t tokens = (size_t)cases[i].tokens;
    data_x(&p, &cases[i], x);
    data_logits(&p, &cases[i], logits);
    if(cases[i].tokens == b->tokens && memcmp(x, b->x, tokens * 512) == 0 && memcmp(logits, b->logits, tokens * 16) == 0) {
      *out = cases[i];
      return true;
    }
  }
  return false;
}

static inline void hook_answer(const struct hook_block *b, const struct reference_result *ref)
{
  struct hook_workspace *ws = b->workspace;
  const int rows = b->tokens * 2;
  uint16_t *y = b->out;
  for(int i = 0; i < b->tokens * 256; i++)
    y[i] = bf16_from_float(ref->y[i]);
  for(int row = 0; row < rows; row++) {
    ws->ids[row] = ref->routing.ids[row];
    ws->weights[row] = ref->routing.weights[row];
    for(int f = 0; f < 128; f++)
      ws->h[ws->launches & 1][row][f] = (uint16_t)~ref->h[row * 128 + f];
  }
}

/* The fake driver reads its script when it is initialised: from then on nothing completes. Must not run inside a launch, which holds its lock. */
static inline void *hook_hang(void *unused)
{
  CUresult (*init)(unsigned);
  void *symbol = fakecuda_symbol("cuInit");
  memcpy(&init, &symbol, sizeof(init));
  setenv("FAKECUDA", "hang", 1);
  init(0);
  return unused;
}

/* True the first time that it is called with $TMPDIR's marker absent. */
static inline bool hook_first_time(void)
{
  char path[512];
  int fd;
  snprintf(path, sizeof(path), "%s/flaky", getenv("HOOK_DIR") != NULL ? getenv("HOOK_DIR") : "/nonexistent");
  fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0600);
  if(fd >= 0)
    close(fd);
  return fd >= 0;
}

static inline void hook_misbehave(const struct hook_block *b)
{
  struct hook_workspace *ws = b->workspace;
  uint16_t *y = b->out;
  uint32_t bits;
  pthread_t thread;
  static bool hanging;
  switch((enum hook_mode)b->mode) {
    case HOOK_RIGHT: break;
    case HOOK_WRONG: y[3] = bf16_from_float(bf16_to_float(y[3]) + 1000.0f); break;
    case HOOK_CRASH: raise(SIGUSR2); break; /* no core file, and no business of a sanitiser; SIGKILL would count as sent from outside */
    case HOOK_HANG: /* weights with bits of its own, so that it is really judged: time enough for the thread to get the driver's lock */
      memcpy(&bits, ws->weights, sizeof(bits));
      bits ^= 1 + ((uint32_t)getpid() & 3);
      memcpy(ws->weights, &bits, sizeof(bits));
      if(!hanging && pthread_create(&thread, NULL, hook_hang, NULL) == 0)
        pthread_detach(thread);
      hanging = true; /* once: the driver's start ends an earlier hang */
      usleep(20000);
      break;
    case HOOK_FLAKY:
      if(hook_first_time())
        y[3] = bf16_from_float(1000.0f);
      break;
    case HOOK_SILENT: memset(y, 0xFF, (size_t)b->tokens * 512); break;
    case HOOK_STRAY: y[b->tokens * 256] = 0; break;
    case HOOK_NAN: ws->status |= MF_WS_NAN_LOGIT; break;
    case HOOK_KILLED: raise(SIGKILL); break;
    case HOOK_KILLED_ONCE:
      if(hook_first_time())
        raise(SIGKILL);
      break;
  }
}

static inline void hook_candidate(struct hook_state *st, const struct fakecuda_launch *l)
{
  const struct hook_block *b = l->params[0];
  const struct mf_problem p = hook_problem();
  struct hook_workspace *ws = b->workspace;
  struct reference_result ref;
  struct test_case tc;
  struct error err;
  if(hook_find_case(b, &tc) && reference_run(&p, 1.0f, data_layer_seed((uint32_t)hook_layer(st, b->w13)), &tc, &ref, &err) == MF_OK) {
    hook_answer(b, &ref);
    reference_free(&ref);
  } else {
    memset(b->out, 0, (size_t)b->tokens * 512);
  }
  hook_misbehave(b);
  ws->launches++;
}

static inline void hook_on_launch(void *context, const struct fakecuda_launch *l)
{
  if(strcmp(l->kernel, "mf_gen_weights") == 0)
    hook_weights(context, l);
  else if(strcmp(l->kernel, "mf_moe") == 0)
    hook_candidate(context, l);
}

static inline void hook_install(void)
{
  static struct hook_state state; /* of this process, which runs one device */
  fakecuda_on_launch_fn *install;
  void *symbol = fakecuda_symbol("fakecuda_on_launch");
  memcpy(&install, &symbol, sizeof(install));
  if(install != NULL)
    install(hook_on_launch, &state);
}

/* ---- the test program ---- */
/* Serves as a worker if called as one; else makes a folder for cache, locks and logs, compiles the tools if asked for, and runs the suite. */
static inline int hook_main(int argc, char **argv, Suite *(*suite)(void), bool compile_tools)
{
  const char *tmp = getenv("TMPDIR");
  const ssize_t n = readlink("/proc/self/exe", hook_program, sizeof(hook_program) - 1);
  struct error err = {MF_OK, ""};
  char remove_folder[600];
  SRunner *runner;
  int failed;
  if(argc == 4 && strcmp(argv[1], "--worker") == 0 && strcmp(argv[2], "compile") == 0)
    return worker_main_compile(atoi(argv[3]));
  if(argc == 4 && strcmp(argv[1], "--worker") == 0) {
    if(getenv("MOEFORGE_LIBCUDA") != NULL)
      hook_install();
    return worker_main_device(atoi(argv[3]));
  }
  hook_program[n > 0 ? n : 0] = '\0';
  snprintf(hook_dir, sizeof(hook_dir), "%s/moeforge-device-XXXXXX", tmp != NULL ? tmp : "/tmp");
  if(mkdtemp(hook_dir) == NULL)
    return EXIT_FAILURE;
  setenv("HOOK_DIR", hook_dir, 1);
  setenv("MOEFORGE_LOCK_DIR", hook_dir, 1);
  if(compile_tools && device_tools_build(hook_program, "templates", "sm_90a", &hook_tools, &err) != MF_OK) {
    fprintf(stderr, "cannot start: %s\n", err.text);
    return EXIT_FAILURE;
  }
  runner = srunner_create(suite());
  srunner_run_all(runner, CK_ENV);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  device_tool_set_free(&hook_tools);
  snprintf(remove_folder, sizeof(remove_folder), "rm -rf '%s'", hook_dir);
  if(system(remove_folder) != 0)
    fprintf(stderr, "%s could not be removed\n", hook_dir);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif
