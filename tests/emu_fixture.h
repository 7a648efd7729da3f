/* emu_fixture.h - kernels of the family `stream` on the emulated device, in this process: a problem and a device made in code, a schedule, cases that
 * are run on one workspace under the interleavings of a seed, and what came of it. For test_emu_mutants.c and test_emu_matrix.c.
 *
 * One subject per process, and none behind a finding: a finding costs the device, as a fault does a GPU's context. */
#ifndef MOEFORGE_TESTS_EMU_FIXTURE_H
#define MOEFORGE_TESTS_EMU_FIXTURE_H

#include <check.h> /* libcheck's; the tuner's is in quotes */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "datagen.h"
#include "device_cuda.h"
#include "device_emu.h"
#include "driver.h"
#include "emit.h"
#include "family.h"
#include "family_stream.h"
#include "jit.h"
#include "spec.h"

static char emu_folder[256]; /* of this test program: compiled kernels, references, changed templates */
static const char *emu_compiler = "c++";

struct emu_subject {
  struct mf_problem problem;
  struct device_emulation emulation;
  struct schedule sched;
  struct mf_recipe recipe;
  struct device *dev;
  struct device_kernel *kernel;
};

/* How running some cases ended. */
struct emu_outcome {
  bool passed;
  enum emu_finding_kind finding; /* EMU_NONE: every launch ended well */
  enum gate gate;                /* not passed and no finding: the gate that failed */
  double worst[GATES];
  char text[1800];               /* the finding's, or the gate's detail */
};

__attribute__((format(printf, 1, 2))) static inline void emu_shell(const char *format, ...)
{
  char command[4096];
  va_list args;
  va_start(args, format);
  vsnprintf(command, sizeof(command), format, args);
  va_end(args);
  ck_assert_msg(system(command) == 0, "%s", command);
}

/* For main(), before any test is forked: all of them share the folder. */
static inline bool emu_folder_make(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(emu_folder, sizeof(emu_folder), "%.200s/moeforge-emu-XXXXXX", tmp != NULL ? tmp : "/tmp");
  return mkdtemp(emu_folder) != NULL;
}

/* A compiler that does not optimise: for kernels that are run so seldom that compiling them takes the most time. */
static inline void emu_compile_fast(void)
{
  static char path[300];
  snprintf(path, sizeof(path), "%s/cxx", emu_folder);
  if(access(path, X_OK) != 0)
    emu_shell("cd '%s' && printf '#!/bin/sh\\nexec c++ \"$@\" -O0\\n' >new && chmod +x new && mv new cxx", emu_folder);
  emu_compiler = path;
}

static inline void emu_folder_remove(void)
{
  char command[300];
  snprintf(command, sizeof(command), "rm -rf '%s'", emu_folder);
  if(system(command) != 0)
    fprintf(stderr, "%s is left behind\n", emu_folder);
}

/* Softmax over 64 experts, two per token, one unit stage: the smallest that the family serves. */
static inline struct mf_problem emu_smallest_problem(void)
{
  struct mf_problem p;
  problem_init(&p);
  p.experts = p.expert_count = 64;
  p.top_k = 2;
  p.hidden = 1024;
  p.intermediate = 256;
  p.score = MF_SCORE_SOFTMAX;
  p.renormalize = 1;
  return p;
}

/* The emulated SKU with another number of multiprocessors. */
static inline struct device_info emu_device_of(int sms)
{
  struct device_info info;
  struct error err = {MF_OK, ""};
  ck_assert_msg(device_spec_read("specs/devices/emu-sm90.yaml", &info, NULL, NULL, &err) == MF_OK, "%s", err.text);
  info.sms = sms;
  return info;
}

static inline void emu_set_knob(struct schedule *sched, const char *name, int value)
{
  const int k = family_knob(sched->family, name);
  ck_assert_int_ge(k, 0);
  sched->value[k] = value;
}

/* The symbol mf_meta of the kernel as it is compiled for this machine against the host's formulas. */
static inline void emu_check_meta(const struct emu_subject *s, const struct artifact *art)
{
  const struct device_emulation *e = &s->emulation;
  const struct emu_jit_config config = {.compiler = e->compiler, .template_dir = e->template_dir, .emu_dir = e->emu_dir, .cache_dir = e->cache_dir};
  struct emu_kernel kernel;
  struct verdict why;
  char text[1024];
  ck_assert_msg(emu_jit_load(&config, art->source, s->recipe.kernel, &kernel, text, sizeof(text)) == EMU_JIT_OK, "%s", text);
  ck_assert_msg(s->sched.family->check_meta(kernel.meta, kernel.meta_bytes, &s->problem, &s->sched, &e->info, &why) == MF_OK, "%s", why.detail);
  emu_jit_unload(&kernel);
}

/* Emits and compiles the kernel with the templates in 'template_dir', makes the weights. s->problem, s->emulation.info and s->sched are filled in. */
static inline void emu_open(struct emu_subject *s, const char *template_dir, int tokens_max, float routed_scaling)
{
  struct device_emulation *e = &s->emulation;
  struct artifact art = {0};
  struct verdict why = {0};
  struct error err = {MF_OK, ""};
  void *image;
  size_t bytes;
  ck_assert_msg(problem_validate(&s->problem, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(s->sched.family->constrain(&s->problem, &s->sched, &e->info, &why) == MF_OK, "rule %s: %s", why.rule, why.detail);
  ck_assert_int_le(s->sched.family->shared_bytes(&s->problem, &s->sched, &e->info), e->info.shared_bytes_per_cta);
  ck_assert_int_eq(s->sched.family->recipe(&s->problem, &s->sched, &e->info, &s->recipe, &err), MF_OK);
  ck_assert_int_eq(emit_source(&s->problem, "test", &s->sched, &e->info, &art, &err), MF_OK);
  snprintf(e->template_dir, sizeof(e->template_dir), "%s", template_dir);
  snprintf(e->emu_dir, sizeof(e->emu_dir), "emu");
  snprintf(e->cache_dir, sizeof(e->cache_dir), "%s", emu_folder);
  snprintf(e->compiler, sizeof(e->compiler), "%s", emu_compiler);
  reference_set_threads(1);
  device_emu_configure(e);
  emu_check_meta(s, &art);
  bytes = emu_image_bytes(art.source, 0);
  image = malloc(bytes);
  ck_assert_ptr_nonnull(image);
  emu_image_make(s->recipe.kernel, art.source, NULL, 0, image);
  ck_assert_msg(device_emu.open(0, NULL, &s->dev, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(device_emu.load_problem(s->dev, &s->problem, (double)routed_scaling, 1, tokens_max, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(device_emu.load_kernel(s->dev, image, bytes, &s->recipe, &s->kernel, &err) == MF_OK, "%s", err.text);
  free(image);
  free(art.source);
}

static inline void emu_judge(const struct emu_subject *s, float routed_scaling, const struct test_case *tc, const struct device_output *out,
                             struct emu_outcome *outcome)
{
  struct reference_result ref;
  struct check_result result;
  struct error err = {MF_OK, ""};
  ck_assert_msg(reference_cached(emu_folder, &s->problem, routed_scaling, 0, tc, &ref, &err) == MF_OK, "%s", err.text);
  check_begin(&result);
  ck_assert_msg(check_judge(&s->problem, data_layer_seed(0), tc, &ref, out, &result, &err) == MF_OK, "%s", err.text);
  reference_free(&ref);
  memcpy(outcome->worst, result.worst, sizeof(outcome->worst));
  outcome->passed = result.passed;
  outcome->gate = result.failed_gate;
  snprintf(outcome->text, sizeof(outcome->text), "%s", result.detail);
}

/* Runs the cases one after the other, each 'replays' times, on one workspace that is fresh for the first of them, until one does not pass. Unlike the
 * device of the tuner, which begins every case with a fresh workspace: what a launch leaves behind for the next one shows only if that one has
 * something else to do. */
static inline void emu_run(const struct emu_subject *s, float routed_scaling, const struct test_case *cases, int ncases, int replays, uint64_t seed,
                           struct emu_outcome *outcome)
{
  memset(outcome, 0, sizeof(*outcome));
  outcome->passed = true;
  s->kernel->cases = 0;
  emu_driver_seed(seed, 0);
  for(int i = 0; i < ncases && outcome->passed; i++) {
    struct device_output out;
    struct error err = {MF_OK, ""};
    const enum mf_status rc = device_cuda.run_case(s->dev, s->kernel, &cases[i], 0, replays, 600000, &out, &err);
    if(rc == MF_OK) {
      emu_judge(s, routed_scaling, &cases[i], &out, outcome);
      device_output_free(&out);
      continue;
    }
    ck_assert_msg(emu_driver_finding() != EMU_NONE, "%s", err.text);
    outcome->passed = false;
    outcome->finding = emu_driver_finding();
    snprintf(outcome->text, sizeof(outcome->text), "%s", emu_driver_text());
  }
}

static inline void emu_close(struct emu_subject *s)
{
  device_emu.close(s->dev);
  s->dev = NULL;
}

/* main() of a suite that compiles kernels: 'suite' over a folder for them. Returns the exit code. */
static inline int emu_suite_run(Suite *suite)
{
  SRunner *runner = srunner_create(suite);
  int failed = 1;
  if(emu_folder_make()) {
    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    emu_folder_remove();
  }
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif
