/* test_floor.c - the floor kernels: their CTAs read every byte of the active experts once and evenly; executed on the emulated device without a finding, with
 * as many copies as the sizes say; compiled without spills; their times beside each other in `show` and `bench` on the scripted GPU. */
#include "emu_fixture.h"
#include "tool_fixture.h"

#include <jansson.h>

#include "compile.h"
#include "cuda_api.h"
#include "emu.h"
#include "recipe.h"
#include "tools/floor_core.h"

static struct error err;

/* ---- shares ---- */
static const struct {
  int hidden, intermediate, active, ctas;
} shares[] = {
    {2048, 512, 8, 132}, {7168, 256, 57, 132}, {1024, 256, 2, 18}, {1152, 80, 3, 7}, {1024, 16, 1, 132}, {1024, 16, 64, 3}, {8192, 2048, 128, 132}, {2048, 512, 0, 132},
};

START_TEST(every_byte_once)
{
  const int active = shares[_i].active, ctas = shares[_i].ctas;
  struct mf_problem p = emu_smallest_problem();
  struct mf_floor_params params;
  int32_t experts[MF_FLOOR_MAX_EXPERTS];
  p.hidden = shares[_i].hidden;
  p.intermediate = shares[_i].intermediate;
  for(int i = 0; i < active; i++)
    experts[i] = 3 * i + 1;
  ck_assert_int_eq(floor_params_make(&p, NULL, NULL, experts, active, ctas, &params, &err), MF_OK);
  for(int half = 0; half < 2; half++) {
    const struct mf_floor_section *s = half == 0 ? &params.up : &params.down;
    const uint64_t bytes = (uint64_t)p.hidden * (uint64_t)p.intermediate * (half == 0 ? 2 : 1);
    uint64_t next = 0, least = UINT64_MAX, most = 0; /* bytes so far, as one string over the slots */
    ck_assert_uint_eq(s->expert_bytes, bytes);
    for(int c = 0; c < ctas; c++) {
      struct mf_floor_walk w = mf_floor_begin(s, (uint32_t)c);
      uint64_t pieces = 0;
      for(; w.left > 0; mf_floor_advance(s, &w), pieces++) {
        const uint32_t count = mf_floor_bytes(s, &w);
        ck_assert_uint_lt(w.slot, (unsigned)active);
        ck_assert_uint_eq(mf_floor_offset(s, &w, params.experts[w.slot]), params.experts[w.slot] * bytes + next % bytes);
        ck_assert_uint_eq(w.slot, next / bytes);
        ck_assert(count > 0 && count % 16 == 0 && count <= MF_FLOOR_STAGE_BYTES);
        next += count;
      }
      least = pieces < least ? pieces : least;
      most = pieces > most ? pieces : most;
    }
    ck_assert_uint_eq(next, bytes * (uint64_t)active);
    ck_assert_uint_le(most - least, 1);
  }
}
END_TEST

START_TEST(too_many_experts)
{
  const struct mf_problem p = emu_smallest_problem();
  struct mf_floor_params params;
  static int32_t experts[MF_FLOOR_MAX_EXPERTS + 1];
  ck_assert_int_eq(floor_params_make(&p, NULL, NULL, experts, MF_FLOOR_MAX_EXPERTS, 132, &params, &err), MF_OK);
  ck_assert_int_eq(floor_params_make(&p, NULL, NULL, experts, MF_FLOOR_MAX_EXPERTS + 1, 132, &params, &err), MF_ERR_UNSUPPORTED);
}
END_TEST

/* ---- on the emulated device ---- */
/* Whole k-blocks, a last unit stage that is partly outside, k-blocks that are shared with other ranks, several stages per slot. */
static const struct {
  int hidden, intermediate, offset, active, sms;
  int pieces; /* stages of a slot's rows */
  int unit;   /* features */
} emulated[] = {
    {1024, 256, 0, 3, 18, 1, 8},
    {1152, 384, 0, 2, 18, 2, 8},
    {1024, 80, 64, 2, 18, 1, 8},
    {1024, 400, 16, 5, 16, 2, 8},
    {1152, 80, 64, 3, 18, 1, 4},
};

struct floors {
  struct cuda_api api;
  CUmodule module;
  CUdeviceptr w13, w2, scales;
  struct recipe_block block;
};

static CUfunction load_floor(struct floors *f, const char *name)
{
  const char *source = "#include \"tools/floor.cu\"\n";
  const size_t count = emu_image_bytes(source, 0);
  void *image = malloc(count);
  CUfunction function = NULL;
  ck_assert_ptr_nonnull(image);
  emu_image_make(name, source, NULL, 0, image);
  ck_assert_msg(f->api.p_cuModuleLoadData(&f->module, image) == CUDA_SUCCESS, "%s", emu_driver_text());
  ck_assert_msg(f->api.p_cuModuleGetFunction(&function, f->module, name) == CUDA_SUCCESS, "%s", emu_driver_text());
  free(image);
  return function;
}

static uint64_t run_floor(struct floors *f, CUfunction function, int ctas, void **args)
{
  const uint64_t before = emu_counters().copies;
  CUlaunchConfig config = {.gridDimX = (unsigned)ctas, .gridDimY = 1, .gridDimZ = 1, .blockDimX = MF_FLOOR_THREADS, .blockDimY = 1, .blockDimZ = 1,
                           .sharedMemBytes = MF_FLOOR_SHARED_BYTES};
  ck_assert_msg(f->api.p_cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, MF_FLOOR_SHARED_BYTES) == CUDA_SUCCESS, "%s", emu_driver_text());
  ck_assert_msg(f->api.p_cuLaunchKernelEx(&config, function, args, NULL) == CUDA_SUCCESS, "%s", emu_driver_text());
  ck_assert_int_eq(emu_driver_finding(), EMU_NONE);
  ck_assert_int_eq(f->api.p_cuModuleUnload(f->module), CUDA_SUCCESS);
  return emu_counters().copies - before;
}

START_TEST(executed)
{
  const int32_t experts[] = {1, 4, 5, 6, 7};
  const int active = emulated[_i].active;
  struct device_emulation e = {.seed = 5};
  struct schedule sched = {.family = &family_stream};
  struct mf_problem p = emu_smallest_problem();
  struct mf_weights weights = {.struct_size = sizeof(weights)};
  struct mf_floor_tensor_params tensor;
  struct mf_floor_params params;
  struct mf_recipe recipe;
  struct floors f = {0};
  CUtensorMap maps[2];
  uint64_t want = 0;
  void *args[] = {&params}, *tensor_args[] = {&tensor, &maps[0], &maps[1]};
  p.experts = p.expert_count = 8; /* little memory: what is read beyond it is a finding */
  p.hidden = emulated[_i].hidden;
  p.intermediate = emulated[_i].intermediate;
  p.intermediate_offset = emulated[_i].offset;
  e.info = emu_device_of(emulated[_i].sms);
  snprintf(e.template_dir, sizeof(e.template_dir), "templates");
  snprintf(e.emu_dir, sizeof(e.emu_dir), "emu");
  snprintf(e.cache_dir, sizeof(e.cache_dir), "%s", emu_folder);
  snprintf(e.compiler, sizeof(e.compiler), "%s", emu_compiler);
  device_emu_configure(&e);
  emu_driver(&f.api);
  const size_t matrix = 8 * (size_t)p.hidden * (size_t)p.intermediate;
  ck_assert_int_eq(f.api.p_cuMemAlloc(&f.w13, 2 * matrix), CUDA_SUCCESS);
  ck_assert_int_eq(f.api.p_cuMemAlloc(&f.w2, matrix), CUDA_SUCCESS);
  ck_assert_int_eq(f.api.p_cuMemAlloc(&f.scales, 1 << 20), CUDA_SUCCESS);

  /* Long copies. */
  ck_assert_int_eq(floor_params_make(&p, (const void *)(uintptr_t)f.w13, (const void *)(uintptr_t)f.w2, experts, active, e.info.sms, &params, &err), MF_OK);
  ck_assert_uint_eq(run_floor(&f, load_floor(&f, "mf_floor"), e.info.sms, args), (params.up.pieces + params.down.pieces) * (unsigned)active);

  /* As the kernel reads. */
  family_stream.default_schedule(&p, 8, &e.info, &sched);
  emu_set_knob(&sched, "unit_features", emulated[_i].unit);
  ck_assert_int_eq(family_stream.recipe(&p, &sched, &e.info, &recipe, &err), MF_OK);
  weights.w13 = (const void *)(uintptr_t)f.w13;
  weights.w2 = (const void *)(uintptr_t)f.w2;
  weights.s13 = weights.s2 = (const float *)(uintptr_t)f.scales;
  weights.routed_scaling = 1;
  ck_assert_int_eq(recipe_bind(&f.api, &recipe, &p, &weights, &f.block), MF_OK);
  for(uint32_t i = 0; i < recipe.nfields; i++)
    if(recipe.fields[i].source == MF_SRC_TENSOR_MAP)
      memcpy(&maps[recipe.fields[i].value], f.block.bytes + recipe.fields[i].offset, sizeof(maps[0]));
  ck_assert(floor_tensor_params_make(&p, &recipe, experts, active, &tensor));
  ck_assert_int_eq(tensor.units, p.intermediate / emulated[_i].unit);
  want = (uint64_t)(active * tensor.units * tensor.unit_stages);
  ck_assert_int_eq((tensor.down_blocks + tensor.piece_blocks - 1) / tensor.piece_blocks, emulated[_i].pieces);
  want += (uint64_t)(active * tensor.down_ctas) * (unsigned)(tensor.offset < 0 ? emulated[_i].pieces : tensor.down_blocks);
  ck_assert_uint_eq(run_floor(&f, load_floor(&f, "mf_floor_tensor"), tensor.ctas, tensor_args), want);

  ck_assert(f.api.p_cuMemFree(f.w13) == CUDA_SUCCESS && f.api.p_cuMemFree(f.w2) == CUDA_SUCCESS && f.api.p_cuMemFree(f.scales) == CUDA_SUCCESS);

  /* Boxes of another form have no such floor. */
  recipe.maps[0].box[3] = 2;
  ck_assert(!floor_tensor_params_make(&p, &recipe, experts, active, &tensor));
}
END_TEST

/* ---- compiled ---- */
START_TEST(compiles_well)
{
  struct artifact art = {.name = "floor"};
  struct closure closure;
  struct nvrtc *nvrtc = NULL;
  char name[NAME_MAX_LEN];
  art.source = strdup("#include \"tools/floor.cu\"\n");
  ck_assert_msg(closure_collect("templates", art.source, &closure, &err) == MF_OK, "%s", err.text);
  ck_assert_msg(nvrtc_open(&nvrtc, &err) == MF_OK, "%s", err.text);
  enum mf_status rc = compile_artifact(nvrtc, &closure, "sm_90a", COMPILE_PLAIN, &art, &err);
  ck_assert_msg(rc == MF_OK || (rc == MF_ERR_CORRUPT && art.cubin != NULL), "%s", err.text); /* (a log of several kernels may lack lines) */
  for(int i = 0; i < 2; i++) {
    struct artifact used = {0};
    long frame = -1;
    ck_assert_int_eq(cubin_kernel_at(art.cubin, art.cubin_bytes, i, name, sizeof(name), &err), MF_OK);
    ck_assert(strcmp(name, "mf_floor") == 0 || strcmp(name, "mf_floor_tensor") == 0);
    ck_assert_int_eq(cubin_read_resources(art.cubin, art.cubin_bytes, name, &used, &err), MF_OK);
    ck_assert_int_eq(cubin_frame_bytes(art.cubin, art.cubin_bytes, name, &frame, &err), MF_OK);
    ck_assert_int_eq(frame, 0); /* parameters stay where they are: no copy on the stack */
  }
  closure_free(&closure);
  artifact_free(&art);
  nvrtc_close(nvrtc);
}
END_TEST

/* ---- times beside each other ---- */
static struct tool tool;

/* The two floors of row 'at' of "winners" or "rows": measured, and none is below the floor that ratios are to; or not known. */
static void look_at_floors(const char *list, size_t at, bool measured)
{
  json_t *all = json_loads(tool.out, 0, NULL);
  const json_t *row = json_array_get(json_object_get(all, list), at);
  const double least = json_real_value(json_object_get(row, "floor_us"));
  ck_assert_double_gt(least, 0);
  if(measured) {
    ck_assert_double_ge(json_real_value(json_object_get(row, "floor_copy_us")), least);
    ck_assert_double_ge(json_real_value(json_object_get(row, "floor_tensor_us")), least);
  } else {
    ck_assert(json_is_null(json_object_get(row, "floor_copy_us")) && json_is_null(json_object_get(row, "floor_tensor_us")));
  }
  json_decref(all);
}

/* What `bench --json` has: so many rows, the first under that routing. */
static void look_at_rows(size_t count, const char *first, bool complete)
{
  json_t *all = json_loads(tool.out, 0, NULL);
  const json_t *rows = json_object_get(all, "rows"), *row = json_array_get(rows, 0);
  ck_assert_uint_eq(json_array_size(rows), count);
  ck_assert_str_eq(json_string_value(json_object_get(row, "routing")), first);
  ck_assert(json_is_true(json_object_get(row, "winner")));
  ck_assert_int_eq(json_is_true(json_object_get(all, "complete")), complete);
  ck_assert_uint_eq(strlen(json_string_value(json_object_get(all, "date"))), strlen("2026-11-30"));
  json_decref(all);
}

START_TEST(both_are_shown)
{
  tool_begin(&tool);
  setenv("MOEFORGE_LOCK_DIR", tool.folder, 1);
  tool_run(&tool, "tune specs/models/tiny.yaml --tokens 2 --effort quick --quiet --device none");
  tool_expect(&tool, 0);
  tool_run(&tool, "show tiny --json"); /* predicted: nothing was measured */
  look_at_floors("winners", 0, false);
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  tool_run(&tool, "tune specs/models/tiny.yaml --tokens 2 --effort quick --quiet");
  tool_expect(&tool, 0);
  tool_says(&tool, out, "us   copies   tensor  floor us x floor");
  tool_run(&tool, "show tiny --json");
  look_at_floors("winners", 1, true); /* the first is the one that was planned for */
  tool_run(&tool, "bench tiny --json --routing zipf,uniform --tokens 1-2"); /* nothing serves one token */
  tool_expect(&tool, 0);
  look_at_rows(2, "zipf", true);
  look_at_floors("rows", 0, true);
  look_at_floors("rows", 1, true);
  tool_says(&tool, err, "tiny: bench: 2/2, 1 schedule,");
  tool_run(&tool, "bench tiny nope --json --quiet --routing uniform"); /* what was timed before the failure is there */
  tool_expect(&tool, 14);
  look_at_rows(1, "uniform", false);
  tool_run(&tool, "bench tiny --quiet --routing concentrated");
  tool_expect(&tool, 0);
  tool_says(&tool, out, "| floor kernel | tensor floor | floor |");
  tool_says(&tool, out, "| tiny | concentrated | 2 |");
  tool_run(&tool, "bench tiny --routing uniform,sideways");
  tool_expect(&tool, 2);
  tool_says(&tool, err, "--routing: expected uniform");
  tool_end(&tool);
}
END_TEST

static Suite *suite(void)
{
  Suite *s = suite_create("floor");
  TCase *plain = tcase_create("plain"), *kernels = tcase_create("kernels"), *times = tcase_create("times");
  tcase_add_loop_test(plain, every_byte_once, 0, (int)(sizeof(shares) / sizeof(shares[0])));
  tcase_add_test(plain, too_many_experts);
  tcase_add_test(plain, compiles_well);
  suite_add_tcase(s, plain);
  tcase_set_timeout(kernels, 120);
  tcase_add_loop_test(kernels, executed, 0, (int)(sizeof(emulated) / sizeof(emulated[0])));
  suite_add_tcase(s, kernels);
  tcase_set_timeout(times, 120);
  tcase_add_test(times, both_are_shown);
  suite_add_tcase(s, times);
  return s;
}

int main(void)
{
  SRunner *runner;
  int failed;
  if(!emu_folder_make())
    return 1;
  runner = srunner_create(suite());
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  emu_folder_remove();
  return failed == 0 ? 0 : 1;
}
