/* gpu_fixture.h - what the programs of tests/gpu share: one line per check, waits that end, the package and the routing of a case.
 *
 * A line says what was checked ("step, n tokens: what") and whether it holds. A check that fails is remembered and the program goes on; a driver error or a hang
 * leaves contexts of no use, so these end the program at once with exit code 1. Threads may report. */
#ifndef MOEFORGE_TESTS_GPU_FIXTURE_H
#define MOEFORGE_TESTS_GPU_FIXTURE_H

#include "datagen.h"
#include "reference.h"
#include "verify_gpu.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ALARM_SECONDS 300
#define WAIT_SECONDS 10.0

/* What is being done; set by the main thread alone. */
static struct {
  const char *program, *step;
  int tokens;
  atomic_bool failed;
} now = {.step = "start"};

static void on_alarm(int number)
{
  static const char text[] = "FAILED   hangs: the time is over\n";
  (void)number;
  if(write(STDOUT_FILENO, text, sizeof(text) - 1) < 0)
    _exit(2);
  _exit(1);
}

static inline bool is_among(const char *name, const char *const *list, size_t count)
{
  size_t i = 0;
  while(i < count && strcmp(list[i], name) != 0)
    i++;
  return i < count;
}

/* PROGRAM PACKAGE [STEP...]: checks the command line and sets the alarm. */
static inline void fixture_begin(const char *program, int argc, char **argv, const char *const *steps, size_t count)
{
  now.program = program;
  if(argc < 2) {
    fprintf(stderr, "usage: %s PACKAGE [STEP...]\n", program);
    exit(2);
  }
  for(int i = 2; i < argc; i++)
    if(!is_among(argv[i], steps, count)) {
      fprintf(stderr, "%s: there is no step \"%s\"\n", program, argv[i]);
      exit(2);
    }
  signal(SIGALRM, on_alarm);
  alarm(ALARM_SECONDS);
}

/* Without steps on the command line all are wanted. */
static inline bool fixture_wants(int argc, char **argv, const char *step)
{
  return argc == 2 || is_among(step, (const char *const *)argv + 2, (size_t)argc - 2);
}

/* Ends the program on an error that is not a finding. */
static inline void need(enum mf_status rc, const struct error *err)
{
  if(rc == MF_OK)
    return;
  fprintf(stderr, "%s: %s\n", now.program, err->text);
  exit(2);
}

static inline void need_status(enum mf_status rc, const char *doing)
{
  struct error err;
  if(rc != MF_OK)
    need(error_set(&err, rc, "%s: %s (%s)", doing, mf_status_string(rc), mf_status_name(rc)), &err);
}

static inline void *need_memory(size_t bytes)
{
  void *memory = calloc(1, bytes);
  if(memory == NULL)
    abort();
  return memory;
}

static inline void say(bool good, const char *what)
{
  printf("%s%s, %d tokens: %s\n", good ? "ok       " : "FAILED   ", now.step, now.tokens, what);
  fflush(stdout);
  if(!good)
    atomic_store(&now.failed, true);
}

static inline void say_and_end(const char *what)
{
  say(false, what);
  _exit(1);
}

static inline void cuda(const struct cuda_api *api, CUresult result, const char *doing)
{
  const char *name = NULL;
  char text[256];
  if(result == CUDA_SUCCESS)
    return;
  api->p_cuGetErrorName(result, &name);
  snprintf(text, sizeof(text), "%s: %s", doing, name != NULL ? name : "unknown error");
  say_and_end(text);
}

static inline double seconds_now(void)
{
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* Waits for a stream; one that does not end is a finding. */
static inline void wait_for(const struct cuda_api *api, CUstream stream)
{
  const double start = seconds_now();
  CUresult result;
  while((result = api->p_cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY) {
    if(seconds_now() - start > WAIT_SECONDS)
      say_and_end("a stream did not end in time");
    usleep(100);
  }
  cuda(api, result, "running the kernels");
}

/* "what: n launches as alone", or how many are not. */
static inline void report(const char *what, int launches, int wrong)
{
  char text[256];
  if(wrong != 0)
    snprintf(text, sizeof(text), "%s: %d of %d launches are not as alone", what, wrong, launches);
  else
    snprintf(text, sizeof(text), "%s: %d launches as alone", what, launches);
  say(wrong == 0, text);
}

/* Results of 'count' launches, one behind the other, that are not 'alone' to the bit. */
static inline int count_wrong(const unsigned char *got, const unsigned char *alone, size_t bytes, int count)
{
  int wrong = 0;
  for(int i = 0; i < count; i++)
    wrong += memcmp(got + (size_t)i * bytes, alone, bytes) != 0;
  return wrong;
}

/* Opens the package. Its first problem and that one's scaling; returns the most tokens that it serves. */
static inline int fixture_package(const char *path, struct mf_package **pkg, struct mf_problem *problem, float *routed_scaling)
{
  struct mf_package_entry entry = {.struct_size = sizeof(entry)};
  int most = 0;
  need_status(mf_package_open(path, pkg), path);
  need_status(mf_package_entry_at(*pkg, 0, &entry), path);
  *problem = entry.problem;
  *routed_scaling = entry.routed_scaling;
  for(size_t i = 0; mf_package_entry_at(*pkg, i, &entry) == MF_OK; i++)
    if(memcmp(&entry.problem, problem, sizeof(*problem)) == 0 && entry.tokens_max > most)
      most = entry.tokens_max;
  return most;
}

static inline struct test_case fixture_case(int tokens)
{
  const struct test_case tc = {.tokens = tokens, .routing = ROUTING_UNIFORM, .data = CASE_NORMAL, .seed = 11};
  return tc;
}

/* The case alone on its GPU: y, and which experts it needs are uploaded. */
static inline void fixture_alone(struct verify_gpu *gpu, struct verify_kernel *kernel, const struct test_case *tc, unsigned char *y)
{
  const struct verify_weights *w = kernel->weights;
  const struct mf_problem *p = w->problem;
  float *bias = need_memory(DATA_MAX_LOGITS * sizeof(*bias));
  void *logits = need_memory(data_logits_bytes(p, tc->tokens));
  struct routing_result *routing = need_memory(sizeof(*routing));
  struct error err = {MF_OK, ""};
  bool intact = true;
  data_logits(p, tc, logits);
  data_bias(w->layer_seed, p->experts + p->zero_experts, bias);
  reference_route(p, tc->tokens, logits, p->select_bias ? bias : NULL, w->routed_scaling, routing);
  need(verify_run(gpu, kernel, tc, routing, (uint16_t *)(void *)y, &intact, &err), &err);
  if(!intact)
    need(error_set(&err, MF_ERR_CHECK, "a launch alone writes where it must not"), &err);
  free(routing);
  free(logits);
  free(bias);
}

#endif
