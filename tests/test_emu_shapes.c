/* test_emu_shapes.c - sizes that are no multiple of anything handy: kernels of the family `stream` are run on the emulated device for every kind of
 * remainder that N, K and the rows of w2 can have, and judged by the staged gates: h to the last bits against the reference, y given the kernel's own h
 * likewise. So a wrong quantisation group, scale block or k-block shows. Copies that leave a tensor, races and deadlocks are findings of the emulator.
 *
 * The emulated GPU has as many multiprocessors as make the rows of w2 per CTA what the row of the table is about. */
#include "emu_fixture.h"

#include "cuda_api.h"
#include "recipe.h"

#define EXPERTS 16
#define REPLAYS 2
#define LARGE_GRID 40 /* multiprocessors from which on fewer cases are run: the time goes with them */
#define FEW_CASES 3
#define NAN_BYTE 0x7F /* e4m3 */

/* Ten launches on one workspace, each with an interleaving of its own. */
static const struct test_case cases[] = {
    {3, ROUTING_UNIFORM, CASE_NORMAL, 1}, {1, ROUTING_UNIFORM, CASE_NORMAL, 2},    {8, ROUTING_CONCENTRATED, CASE_NORMAL, 3},
    {2, ROUTING_DISPERSED, CASE_NORMAL, 4}, {5, ROUTING_ZIPF, CASE_NORMAL, 5},
};
#define CASES ((int)(sizeof(cases) / sizeof(cases[0])))

struct shape {
  int hidden, intermediate, offset; /* K, N, o */
  int sms, top_k;
  int ring, act_scale;              /* 0: the default's */
  int down_rows, down_ctas, pieces; /* what the shape is there for; the host's formulas are checked against the kernel's in any case */
  int unit;                         /* features; 0: the default's */
};

static const struct shape shapes[] = {
    /* K: 9 and 13 k-blocks (scale rows aligned to single floats, half a step of x), 10, 20 */
    {1152, 256, 0, 18, 2, 0, 0, 64, 18, 1, 0},
    {1664, 128, 0, 40, 2, 0, 0, 48, 35, 1, 0},
    {1280, 128, 0, 24, 3, 4, 0, 56, 23, 1, 0},
    {2560, 128, 0, 40, 2, 0, 0, 64, 40, 1, 0},
    /* N: less than a block, at either end of it and across its edge; one, two and three blocks of which some are partly other ranks' */
    {1152, 16, 0, 18, 1, 0, 0, 64, 18, 1, 0}, /* h is smaller than what a last up stage reads past x */
    {1024, 64, 0, 18, 2, 0, 0, 64, 16, 1, 0},
    {1024, 64, 64, 18, 2, 0, MF_ACT_SCALE_UE8M0, 64, 16, 1, 0},
    {1024, 16, 112, 18, 2, 0, 0, 64, 16, 1, 0},
    {1024, 96, 96, 18, 4, 0, 0, 64, 16, 1, 0},
    {1152, 80, 80, 18, 2, 0, 0, 64, 18, 1, 0},
    {1024, 176, 48, 18, 2, 0, 0, 64, 16, 1, 0},
    {1024, 192, 64, 18, 2, 0, 0, 64, 16, 1, 0},
    {1024, 160, 32, 18, 2, 0, 0, 64, 16, 1, 0},
    /* pieces of a down tile: uneven (3, 6 and 11 blocks), whole and partial blocks */
    {1024, 384, 0, 18, 2, 0, 0, 64, 16, 2, 0},
    {1024, 352, 96, 18, 2, 0, 0, 64, 16, 2, 0},
    {1280, 640, 0, 32, 2, 0, 0, 40, 32, 2, 0},
    {1024, 704, 64, 18, 2, 0, 0, 64, 16, 3, 0},
    {1024, 1408, 0, 18, 2, 0, 0, 64, 16, 6, 0},
    /* dense tiles. 24 rows: two to five blocks, whole and partial, a last CTA with 16 rows; pieces of four and three */
    {1024, 256, 0, 43, 2, 0, 0, 24, 43, 1, 0},
    {1024, 384, 0, 43, 2, 0, 0, 24, 43, 1, 0},
    {1152, 512, 0, 48, 2, 0, 0, 24, 48, 1, 0},
    {1152, 640, 0, 48, 2, 0, 0, 24, 48, 1, 0},
    {1024, 544, 64, 43, 2, 0, 0, 24, 43, 1, 0},
    {1152, 896, 0, 48, 2, 0, 0, 24, 48, 2, 0},
    {1024, 800, 96, 43, 2, 4, 0, 24, 43, 2, 0},
    /* 32 rows: two to four blocks, a CTA without rows, more than eight ranks, pieces of three and two */
    {1152, 256, 0, 37, 2, 0, 0, 32, 36, 1, 0},
    {1024, 384, 0, 32, 10, 0, 0, 32, 32, 1, 0},
    {1024, 512, 0, 32, 2, 0, 0, 32, 32, 1, 0},
    {1024, 640, 0, 32, 2, 0, 0, 32, 32, 2, 0},
    {1024, 576, 64, 32, 2, 4, 0, 32, 32, 2, 0},
    /* 40 rows: three blocks, a last CTA with 24 rows, pieces of three, three and two (and of three and two, above) */
    {1024, 384, 0, 26, 2, 0, 0, 40, 26, 1, 0},
    {1024, 1024, 0, 26, 2, 0, 0, 40, 26, 3, 0},
    {1280, 576, 64, 32, 2, 4, 0, 40, 32, 2, 0},
    /* slabs: rows of 16, two experts per stage (one and three blocks), one (five), pieces (nine), a last CTA with fewer rows is impossible there */
    {1024, 96, 32, 64, 2, 0, 0, 16, 64, 1, 0},
    {1024, 320, 64, 64, 2, 0, 0, 16, 64, 1, 0},
    {1024, 640, 0, 64, 2, 0, 0, 16, 64, 1, 0},
    {1024, 1152, 0, 64, 2, 4, 0, 16, 64, 2, 0},
    /* rows of 8; of ten blocks the last tiles of 64 rows reach into the next stage */
    {1024, 128, 0, 130, 2, 0, 0, 8, 128, 1, 0},
    {1024, 1280, 0, 130, 1, 0, 0, 8, 128, 1, 0},
    /* units of 4 features. K: 8 k-blocks (half of a stage), 9, 10, 13 (halves of warps), 17 (the last stage reads far past x, beyond all else), 20 */
    {1024, 64, 0, 18, 2, 0, 0, 64, 16, 1, 4},
    {1152, 256, 0, 18, 2, 0, 0, 64, 18, 1, 4},
    {1280, 128, 0, 24, 3, 4, 0, 56, 23, 1, 4},
    {1664, 128, 0, 28, 2, 0, 0, 64, 26, 1, 4},
    {2176, 16, 0, 34, 1, 0, 0, 64, 34, 1, 4},
    {2560, 128, 0, 40, 2, 0, 0, 64, 40, 1, 4},
    /* N: less than a block, at its end, across its edge */
    {1152, 16, 112, 18, 2, 0, 0, 64, 18, 1, 4},
    {1024, 64, 64, 18, 2, 0, MF_ACT_SCALE_UE8M0, 64, 16, 1, 4},
    {1024, 96, 96, 18, 4, 0, 0, 64, 16, 1, 4},
    {1152, 192, 64, 18, 2, 0, 0, 64, 18, 1, 4},
    /* w2 as slabs and as dense tiles */
    {1024, 96, 32, 64, 2, 0, 0, 16, 64, 1, 4},
    {1152, 512, 0, 48, 2, 0, 0, 24, 48, 1, 4},
};
#define SHAPES ((int)(sizeof(shapes) / sizeof(shapes[0])))

static void open_shape(struct emu_subject *s, const struct shape *shape)
{
  emu_compile_fast();
  memset(s, 0, sizeof(*s));
  s->problem = emu_smallest_problem();
  s->problem.experts = s->problem.expert_count = EXPERTS;
  s->problem.top_k = shape->top_k;
  s->problem.hidden = shape->hidden;
  s->problem.intermediate = shape->intermediate;
  s->problem.intermediate_offset = shape->offset;
  s->problem.act_scale = shape->act_scale;
  s->emulation.info = emu_device_of(shape->sms);
  family_stream.default_schedule(&s->problem, 8, &s->emulation.info, &s->sched);
  if(shape->ring != 0)
    emu_set_knob(&s->sched, "ring_stages", shape->ring);
  if(shape->unit != 0)
    emu_set_knob(&s->sched, "unit_features", shape->unit);
  emu_open(s, "templates", 8, 1.0f);
}

/* The down map's box and the grid tell what the host made of the rows of w2. */
static void check_rows(const struct emu_subject *s, const struct shape *shape)
{
  const struct mf_recipe_map *down = &s->recipe.maps[1];
  ck_assert_int_eq((int)down->box[1], shape->down_rows);
  ck_assert_int_eq((shape->hidden + shape->down_rows - 1) / shape->down_rows, shape->down_ctas);
  if(shape->offset == 0 && shape->intermediate % 128 == 0) { /* a box per piece */
    const int blocks = shape->intermediate / 128;
    ck_assert_int_eq((blocks + (int)down->box[2] - 1) / (int)down->box[2], shape->pieces);
  } else { /* one per k-block, cut off at the row's ends */
    ck_assert_int_eq((int)down->box[2], 1);
    ck_assert_int_eq((int)down->dim[0], shape->intermediate);
  }
}

START_TEST(every_remainder_is_computed)
{
  const struct shape *shape = &shapes[_i];
  struct emu_subject s;
  struct emu_outcome o;
  open_shape(&s, shape);
  check_rows(&s, shape);
  emu_run(&s, 1.0f, cases, shape->sms < LARGE_GRID ? CASES : FEW_CASES, REPLAYS, (uint64_t)_i + 1, &o);
  ck_assert_msg(o.passed, "K %d N %d o %d, %d multiprocessors, units of %d: %s", shape->hidden, shape->intermediate, shape->offset, shape->sms,
                shape->unit != 0 ? shape->unit : 8, o.text);
  emu_close(&s);
}
END_TEST

/* ---- rows that are further apart than they are long ---- */

/* A copy of a matrix with 'stride' bytes from row to row, NaN between the rows and nothing behind the last one. */
static CUdeviceptr padded(const struct emu_subject *s, CUdeviceptr dense, size_t rows, size_t columns, size_t stride)
{
  const size_t bytes = (rows - 1) * stride + columns;
  CUdeviceptr copy;
  ck_assert_int_eq(s->dev->api.p_cuMemAlloc(&copy, bytes), CUDA_SUCCESS);
  memset((void *)(uintptr_t)copy, NAN_BYTE, bytes);
  for(size_t r = 0; r < rows; r++)
    memcpy((char *)(uintptr_t)copy + r * stride, (const char *)(uintptr_t)dense + r * columns, columns);
  return copy;
}

static const struct stride_row {
  struct shape shape;
  int w13_pad, w2_pad; /* bytes */
} strides[] = {
    {{1152, 256, 0, 18, 2, 0, 0, 64, 18, 1, 0}, 16, 16},
    {{1024, 192, 64, 18, 2, 0, 0, 64, 16, 1, 0}, 128, 48},
    {{1024, 64, 0, 18, 2, 0, 0, 64, 16, 1, 0}, 0, 64},
    {{1152, 192, 64, 18, 2, 0, 0, 64, 18, 1, 4}, 48, 16},
};
#define STRIDES ((int)(sizeof(strides) / sizeof(strides[0])))

START_TEST(padded_rows_are_read_alike)
{
  const struct stride_row *row = &strides[_i];
  const size_t n = (size_t)row->shape.intermediate, k = (size_t)row->shape.hidden;
  struct emu_subject s;
  struct emu_outcome o;
  struct mf_weights w;
  CUdeviceptr w13, w2;
  open_shape(&s, &row->shape);
  w = s.dev->layers[0].weights;
  w.w13_row_stride = (int64_t)k + row->w13_pad;
  w.w2_row_stride = (int64_t)n + row->w2_pad;
  w13 = padded(&s, s.dev->layers[0].w13, 2 * n * EXPERTS, k, k + (size_t)row->w13_pad);
  w2 = padded(&s, s.dev->layers[0].w2, k * EXPERTS, n, n + (size_t)row->w2_pad);
  w.w13 = (const void *)(uintptr_t)w13;
  w.w2 = (const void *)(uintptr_t)w2;
  ck_assert_int_eq(recipe_bind(&s.dev->api, &s.recipe, &s.problem, &w, &s.kernel->blocks[0]), MF_OK);
  emu_run(&s, 1.0f, cases, CASES, REPLAYS, (uint64_t)_i + 101, &o);
  ck_assert_msg(o.passed, "K %zu + %d, N %zu + %d: %s", k, row->w13_pad, n, row->w2_pad, o.text);
  w.w2_row_stride += 8; /* rows that a tensor map cannot step over */
  ck_assert_int_eq(recipe_bind(&s.dev->api, &s.recipe, &s.problem, &w, &s.kernel->blocks[0]), MF_MISS_LAYOUT);
  ck_assert_int_eq(s.dev->api.p_cuMemFree(w13), CUDA_SUCCESS);
  ck_assert_int_eq(s.dev->api.p_cuMemFree(w2), CUDA_SUCCESS);
  emu_close(&s);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_shapes");
  TCase *sizes = tcase_create("sizes"), *rows = tcase_create("strides");
  tcase_add_loop_test(sizes, every_remainder_is_computed, 0, SHAPES);
  tcase_add_loop_test(rows, padded_rows_are_read_alike, 0, STRIDES);
  tcase_set_timeout(sizes, 600);
  tcase_set_timeout(rows, 600);
  suite_add_tcase(suite, sizes);
  suite_add_tcase(suite, rows);
  return emu_suite_run(suite);
}
