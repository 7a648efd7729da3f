/* agreement.c - the same candidate on a GPU and on the emulated device, stage by stage.
 *
 *   make build/tests/gpu/agreement && build/tests/gpu/agreement SPEC.yaml [TOKENS,...]
 *
 * For each token count and a few routing inputs the default schedule runs on CUDA device 0 and on the emulated device (with the GPU's own number of
 * multiprocessors), on the same generated weights. Printed per case: whether routing is the same, how many elements of h and y differ and by how much, and what
 * the check's gates say of either. Exits 1 if a routing decision or weight differs or a gate fails on either device. docs/emulator.md has the result. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "compile.h"
#include "datagen.h"
#include "device.h"
#include "device_client.h"
#include "device_emu.h"
#include "emit.h"
#include "family.h"
#include "spec.h"

#define TIMEOUT_MS 600000

struct side {
  const struct device_ops *ops;
  struct device *dev;
  struct device_kernel *kernel;
  struct device_output out;
  struct check_result result;
};

struct run {
  struct model_spec spec;
  struct device_info dev;
  struct device_tool_set tools;
  struct side gpu, emu;
  bool failed;
};

static void need(enum mf_status rc, const struct error *err)
{
  if(rc == MF_OK)
    return;
  fprintf(stderr, "agreement: %s\n", err->text);
  exit(2);
}

/* ---- set-up ---- */

static void compile(struct nvrtc *nvrtc, struct artifact *art, struct error *err)
{
  struct closure closure;
  need(closure_collect("templates", art->source, &closure, err), err);
  need(compile_artifact(nvrtc, &closure, "sm_90a", COMPILE_PLAIN, art, err), err);
  closure_free(&closure);
}

/* Candidate and weights on one device. */
static void load(struct run *run, struct side *side, const void *image, size_t bytes, const struct mf_recipe *recipe, int tokens, struct error *err)
{
  const struct device_tools *tools = &run->tools.tools;
  if(side->dev == NULL)
    need(side->ops->open(0, tools, &side->dev, err), err);
  need(side->ops->load_problem(side->dev, &run->spec.problem, run->spec.routed_scaling, 1, tokens, err), err);
  need(side->ops->load_kernel(side->dev, image, bytes, recipe, &side->kernel, err), err);
}

static void prepare(struct run *run, struct nvrtc *nvrtc, int tokens, struct error *err)
{
  const struct family_ops *family = families_all()[0];
  struct schedule sched = {.family = family};
  struct artifact art;
  struct mf_recipe recipe;
  struct verdict why;
  void *image = NULL;
  size_t bytes = 0;
  memset(&art, 0, sizeof(art));
  if(family->serves(&run->spec.problem, tokens, &run->dev, &why) != MF_OK)
    need(error_set(err, MF_ERR_UNSUPPORTED, "rule %s: %s", why.rule, why.detail), err);
  family->default_schedule(&run->spec.problem, tokens, &run->dev, &sched);
  need(emit_source(&run->spec.problem, run->spec.name, &sched, &run->dev, &art, err), err);
  need(family->recipe(&run->spec.problem, &sched, &run->dev, &recipe, err), err);
  compile(nvrtc, &art, err);
  need(device_emu_image(&art, family->kernel, false, &image, &bytes, err), err);
  load(run, &run->gpu, art.cubin, art.cubin_bytes, &recipe, tokens, err);
  load(run, &run->emu, image, bytes, &recipe, tokens, err);
  free(image);
  artifact_free(&art);
}

/* ---- comparison ---- */

static double difference(uint16_t a, uint16_t b)
{
  return fabs((double)bf16_to_float(a) - (double)bf16_to_float(b));
}

/* Elements of two bf16 arrays that differ, and the largest difference relative to the row's largest value. */
static void compare(const uint16_t *a, const uint16_t *b, size_t rows, size_t columns, double *share, double *worst)
{
  size_t different = 0;
  *worst = 0;
  for(size_t r = 0; r < rows; r++) {
    double largest = 0, most = 0;
    for(size_t i = r * columns; i < (r + 1) * columns; i++) {
      largest = fmax(largest, fabs((double)bf16_to_float(a[i])));
      most = fmax(most, difference(a[i], b[i]));
      different += a[i] != b[i];
    }
    if(largest > 0)
      *worst = fmax(*worst, most / largest);
  }
  *share = (double)different / (double)(rows * columns);
}

static void run_side(struct run *run, struct side *side, const struct test_case *tc, const struct reference_result *ref, struct error *err)
{
  need(side->ops->run_case(side->dev, side->kernel, tc, 0, 2, TIMEOUT_MS, &side->out, err), err);
  check_begin(&side->result);
  need(check_judge(&run->spec.problem, data_layer_seed(0), tc, ref, &side->out, &side->result, err), err);
  if(!side->result.passed) {
    printf("  %s: %s\n", side->ops->name, side->result.detail);
    run->failed = true;
  }
}

static void run_case(struct run *run, const struct test_case *tc, struct error *err)
{
  const size_t rows = (size_t)tc->tokens * (size_t)run->spec.problem.top_k;
  struct reference_result ref;
  double h_share, h_worst, y_share, y_worst;
  bool same;
  need(reference_run(&run->spec.problem, (float)run->spec.routed_scaling, data_layer_seed(0), tc, &ref, err), err);
  run_side(run, &run->gpu, tc, &ref, err);
  run_side(run, &run->emu, tc, &ref, err);
  same = memcmp(run->gpu.out.ids, run->emu.out.ids, rows * sizeof(int32_t)) == 0 && memcmp(run->gpu.out.weights, run->emu.out.weights, rows * sizeof(float)) == 0;
  compare(run->gpu.out.h, run->emu.out.h, rows, (size_t)run->spec.problem.intermediate, &h_share, &h_worst);
  compare(run->gpu.out.y, run->emu.out.y, (size_t)tc->tokens, (size_t)run->spec.problem.hidden, &y_share, &y_worst);
  printf("| %s | %d | %s | %s | %.2f %% | %.1e | %.2f %% | %.1e | %.1e / %.1e | %.1e / %.1e |\n", run->spec.name, tc->tokens, routing_name(tc->routing), same ? "same bits" : "DIFFERENT",
         100 * h_share, h_worst, 100 * y_share, y_worst, run->gpu.result.worst[GATE_H], run->emu.result.worst[GATE_H], run->gpu.result.worst[GATE_Y_GIVEN_H],
         run->emu.result.worst[GATE_Y_GIVEN_H]);
  fflush(stdout);
  run->failed |= !same;
  reference_free(&ref);
  device_output_free(&run->gpu.out);
  device_output_free(&run->emu.out);
}

int main(int argc, char **argv)
{
  static const enum routing_kind kinds[] = {ROUTING_UNIFORM, ROUTING_CONCENTRATED, ROUTING_TIES};
  struct run run = {.gpu.ops = &device_cuda, .emu.ops = &device_emu};
  struct device_emulation emulation = {.template_dir = "templates", .emu_dir = "emu", .compiler = "c++", .seed = EMU_BASE_SEED};
  struct error err = {MF_OK, ""};
  struct nvrtc *nvrtc = NULL;
  const char *list = argc > 2 ? argv[2] : "1,8";
  if(argc < 2) {
    fprintf(stderr, "usage: agreement SPEC.yaml [TOKENS,...]\n");
    return 2;
  }
  snprintf(emulation.cache_dir, sizeof(emulation.cache_dir), "/tmp/moeforge-agreement-XXXXXX");
  if(mkdtemp(emulation.cache_dir) == NULL) {
    perror("agreement: temporary folder");
    return 2;
  }
  need(spec_read(argv[1], &run.spec, NULL, NULL, &err), &err);
  need(device_cuda.info(0, &run.dev, &err), &err);
  need(nvrtc_open(&nvrtc, &err), &err);
  need(device_tools_build(argc > 3 ? argv[3] : "build/moeforge", "templates", "sm_90a", &run.tools, &err), &err);
  emulation.info = run.dev;
  device_emu_configure(&emulation);
  printf("%s, emulated with %d multiprocessors; gates: GPU / emulated\n\n", run.dev.name, run.dev.sms);
  printf("| shape | tokens | routing | ids and weights | h differs | by at most | y differs | by at most | h gate | y given h |\n|---|---|---|---|---|---|---|---|---|---|\n");
  for(const char *at = list; at != NULL; at = strchr(at, ',') != NULL ? strchr(at, ',') + 1 : NULL) {
    const int tokens = atoi(at);
    prepare(&run, nvrtc, tokens, &err);
    for(size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
      run_case(&run, &(struct test_case){.tokens = tokens, .routing = kinds[i], .data = CASE_NORMAL, .seed = 11 + (uint32_t)i}, &err);
  }
  device_tool_set_free(&run.tools);
  nvrtc_close(nvrtc);
  printf("\n%s\n", run.failed ? "DIFFERENT" : "routing agrees to the bit, and both pass every gate");
  return run.failed;
}
