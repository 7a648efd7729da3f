/* test_emu_routing.c - which experts a kernel of the family `stream` takes, and with what weights, on the emulated device: bit by bit what
 * reference_route() says, for every policy, number of experts and top-k that the family serves. Logits are made to be difficult: equal scores, scores
 * that differ in the last bits, -inf, NaN, nothing that can be selected, groups of equal score. Where the engine has routed, ids are repeated, missing or
 * do not exist. Weights and x are zero: what becomes of the experts is
 * tested by test_emu_shapes.c and, for what routing does to it (many ranks, experts of other ranks, zero experts), by the cases at the end of this file.
 *
 * Compiling a kernel takes longer than running it, so a part of the shapes is left to MOEFORGE_ROUTING=all.
 * The logits end where their buffer ends, so reading past a row of the last token is a finding. */
#include "emu_fixture.h"

#include "cuda_api.h"
#include "recipe.h"
#include "stream/exact_math.h"

#include <math.h>

#define TOKENS_MAX 8

/* How logits are drawn. */
enum draw { DRAW_NORMAL, DRAW_TIES, DRAW_CLOSE, DRAW_MASKED, DRAW_NAN, DRAW_NOTHING, DRAW_EQUAL, DRAW_WIDE, DRAWS };
static const char *const draw_names[DRAWS] = {"normal", "ties", "close", "masked", "NaN", "nothing", "equal", "wide"};

static const struct shape {
  const char *name;
  int experts, top_k, score, bias, renormalize, f32, groups, kept, begin, count, zero;
} shapes[] = {
    {"softmax 8/2", 8, 2, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 0, 0, 0},
    {"softmax 16/1", 16, 1, MF_SCORE_SOFTMAX, 0, 0, 0, 1, 1, 0, 0, 0},
    {"softmax 64/4 not renormalised", 64, 4, MF_SCORE_SOFTMAX, 0, 0, 0, 1, 1, 0, 0, 0},
    {"softmax 96/6", 96, 6, MF_SCORE_SOFTMAX, 0, 0, 0, 1, 1, 0, 0, 0},
    {"softmax 512/10", 512, 10, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 0, 0, 0},
    {"softmax 896/16 not renormalised", 896, 16, MF_SCORE_SOFTMAX, 0, 0, 0, 1, 1, 0, 0, 0},
    {"softmax 1024/22", 1024, 22, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 0, 0, 0},
    {"softmax 512/22 f32", 512, 22, MF_SCORE_SOFTMAX, 0, 1, 1, 1, 1, 0, 0, 0},
    {"softmax 288/8 f32 not renormalised", 288, 8, MF_SCORE_SOFTMAX, 0, 0, 1, 1, 1, 0, 0, 0},
    {"softmax 100/12 f32", 100, 12, MF_SCORE_SOFTMAX, 0, 1, 1, 1, 1, 0, 0, 0},
    {"top-k softmax 128/4", 128, 4, MF_SCORE_TOPK_SOFTMAX, 0, 0, 0, 1, 1, 0, 0, 0},
    {"sigmoid 128/1", 128, 1, MF_SCORE_SIGMOID, 0, 0, 0, 1, 1, 0, 0, 0},
    {"sigmoid 256/8 groups, bias", 256, 8, MF_SCORE_SIGMOID, 1, 1, 0, 8, 4, 0, 0, 0},
    {"sigmoid 192/8 groups", 192, 8, MF_SCORE_SIGMOID, 0, 1, 0, 4, 2, 0, 0, 0},
    {"sigmoid 288/8 bias", 288, 8, MF_SCORE_SIGMOID, 1, 1, 1, 1, 1, 0, 0, 0},
    {"sigmoid 896/16 bias not renormalised", 896, 16, MF_SCORE_SIGMOID, 1, 0, 0, 1, 1, 0, 0, 0},
    {"sigmoid 1024/8 groups, bias", 1024, 8, MF_SCORE_SIGMOID, 1, 1, 1, 32, 9, 0, 0, 0},
    {"sqrt-softplus 384/6 bias", 384, 6, MF_SCORE_SQRT_SOFTPLUS, 1, 1, 1, 1, 1, 0, 0, 0},
    {"sqrt-softplus 64/3 not renormalised", 64, 3, MF_SCORE_SQRT_SOFTPLUS, 0, 0, 0, 1, 1, 0, 0, 0},
    {"softmax 64/8 bias", 64, 8, MF_SCORE_SOFTMAX, 1, 1, 0, 1, 1, 0, 0, 0},
    {"softmax 96/6 bias f32 not renormalised", 96, 6, MF_SCORE_SOFTMAX, 1, 0, 1, 1, 1, 0, 0, 0},
    {"softmax 128/6 groups", 128, 6, MF_SCORE_SOFTMAX, 0, 1, 0, 8, 3, 0, 0, 0},
    {"softmax 48+16/8 no bias", 48, 8, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 0, 0, 16},
    {"softmax 128/8 experts 32..63", 128, 8, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 32, 32, 0},
    {"sigmoid 384/8 bias experts 336..383", 384, 8, MF_SCORE_SIGMOID, 1, 1, 0, 1, 1, 336, 48, 0},
    {"softmax 512+256/12 bias experts 128..255", 512, 12, MF_SCORE_SOFTMAX, 1, 0, 0, 1, 1, 128, 128, 256},
    {"given 256/8", 256, 8, MF_SCORE_GIVEN, 0, 0, 0, 1, 1, 0, 0, 0},
    {"given 44+16/22 experts 22..43", 44, 22, MF_SCORE_GIVEN, 0, 0, 0, 1, 1, 22, 22, 16},
    /* with MOEFORGE_ROUTING=all */
    {"softmax 160/8", 160, 8, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 0, 0, 0},
    {"top-k softmax 32/4 f32", 32, 4, MF_SCORE_TOPK_SOFTMAX, 0, 0, 1, 1, 1, 0, 0, 0},
    {"sigmoid 16/2 renormalised", 16, 2, MF_SCORE_SIGMOID, 0, 1, 1, 1, 1, 0, 0, 0},
    {"sigmoid 64/6 groups, bias", 64, 6, MF_SCORE_SIGMOID, 1, 1, 1, 16, 5, 0, 0, 0},
    {"sigmoid 384/8 bias", 384, 8, MF_SCORE_SIGMOID, 1, 1, 0, 1, 1, 0, 0, 0},
    {"sigmoid 512/22 bias", 512, 22, MF_SCORE_SIGMOID, 1, 1, 1, 1, 1, 0, 0, 0},
    {"sqrt-softplus 256/6 bias", 256, 6, MF_SCORE_SQRT_SOFTPLUS, 1, 1, 0, 1, 1, 0, 0, 0},
    {"softmax 512+256/12 bias", 512, 12, MF_SCORE_SOFTMAX, 1, 0, 1, 1, 1, 0, 0, 256},
    {"softmax 512/10 experts 0..63", 512, 10, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 0, 64, 0},
    {"given 5/1", 5, 1, MF_SCORE_GIVEN, 0, 0, 0, 1, 1, 0, 0, 0},
};
#define SHAPES ((int)(sizeof(shapes) / sizeof(shapes[0])))
#define MORE_SHAPES 10

static struct mf_problem problem_of(const struct shape *s)
{
  struct mf_problem p;
  problem_init(&p);
  p.experts = s->experts;
  p.top_k = s->top_k;
  p.hidden = 1024;
  p.intermediate = 32;
  p.expert_begin = s->begin;
  p.expert_count = s->count > 0 ? s->count : s->experts;
  p.zero_experts = s->zero;
  p.score = s->score;
  p.select_bias = s->bias;
  p.renormalize = s->renormalize;
  p.logits_dtype = s->f32 ? MF_DTYPE_F32 : MF_DTYPE_BF16;
  p.groups = s->groups;
  p.groups_kept = s->kept;
  return p;
}

/* ---- a kernel behind the emulated driver, with zeros for weights and x ---- */
struct router {
  struct mf_problem problem;
  struct mf_recipe recipe;
  struct emu_driver_config config;
  struct cuda_api api;
  CUstream stream;
  CUmodule module;
  CUfunction function;
  struct recipe_block block;
  CUdeviceptr w13, w2, s13, s2, bias, x, out, workspace;
  int columns;
  float host_bias[1024];
};

static CUdeviceptr zeros(struct router *r, size_t bytes)
{
  CUdeviceptr p = 0;
  ck_assert_int_eq(r->api.p_cuMemAlloc(&p, bytes), CUDA_SUCCESS);
  memset((void *)(uintptr_t)p, 0, bytes); /* device memory is host memory here */
  return p;
}

static void open_driver(struct router *r, const struct device_info *dev)
{
  CUdevice device;
  CUcontext context;
  r->config = (struct emu_driver_config){.name = dev->name, .cc_major = 9, .sms = dev->sms, .registers_per_sm = 65536, .max_threads_per_cta = 1024,
                                         .shared_bytes_per_cta = dev->shared_bytes_per_cta, .shared_bytes_per_sm = dev->shared_bytes_per_sm,
                                         .l2_bytes = 1 << 25, .memory_bytes = (size_t)4e9,
                                         .jit = {.compiler = emu_compiler, .template_dir = "templates", .emu_dir = "emu", .cache_dir = emu_folder}};
  emu_driver_setup(&r->config);
  emu_driver(&r->api);
  ck_assert_int_eq(r->api.p_cuInit(0), CUDA_SUCCESS);
  ck_assert_int_eq(r->api.p_cuDeviceGet(&device, 0), CUDA_SUCCESS);
  ck_assert_int_eq(r->api.p_cuDevicePrimaryCtxRetain(&context, device), CUDA_SUCCESS);
  ck_assert_int_eq(r->api.p_cuCtxSetCurrent(context), CUDA_SUCCESS);
  ck_assert_int_eq(r->api.p_cuStreamCreate(&r->stream, 0), CUDA_SUCCESS);
}

static void open_kernel(struct router *r, const struct device_info *dev, const char *name)
{
  struct schedule sched = {.family = &family_stream};
  struct artifact art = {0};
  struct verdict why = {0};
  struct error err = {MF_OK, ""};
  size_t bytes;
  void *image;
  ck_assert_msg(problem_validate(&r->problem, &err) == MF_OK, "%s: %s", name, err.text);
  ck_assert_msg(family_stream.serves(&r->problem, 1, dev, &why) == MF_OK, "%s: rule %s: %s", name, why.rule, why.detail);
  family_stream.default_schedule(&r->problem, 3, dev, &sched);
  emu_set_knob(&sched, "h_loaders", 2); /* fewer threads */
  ck_assert_msg(family_stream.constrain(&r->problem, &sched, dev, &why) == MF_OK, "%s: rule %s: %s", name, why.rule, why.detail);
  ck_assert_int_eq(family_stream.recipe(&r->problem, &sched, dev, &r->recipe, &err), MF_OK);
  ck_assert_int_eq(emit_source(&r->problem, "test", &sched, dev, &art, &err), MF_OK);
  bytes = emu_image_bytes(art.source, 0);
  image = malloc(bytes);
  ck_assert_ptr_nonnull(image);
  emu_image_make(r->recipe.kernel, art.source, NULL, 0, image);
  ck_assert_msg(recipe_load(&r->api, &r->recipe, image, &r->module, &r->function) == MF_OK, "%s: %s", name, emu_driver_text());
  free(image);
  free(art.source);
}

static void open_router(struct router *r, const struct shape *shape, int shared, int sms)
{
  const struct device_info dev = emu_device_of(sms);
  size_t local, weights, scales;
  struct mf_weights w;
  memset(r, 0, sizeof(*r));
  r->problem = problem_of(shape);
  r->problem.shared_experts = shared;
  r->columns = r->problem.experts + r->problem.zero_experts;
  local = (size_t)problem_stored_experts(&r->problem);
  weights = (size_t)r->problem.intermediate * (size_t)r->problem.hidden;
  scales = (size_t)((r->problem.intermediate + 127) / 128) * (size_t)(r->problem.hidden / 128);
  emu_compile_fast();
  open_driver(r, &dev);
  open_kernel(r, &dev, shape->name);
  r->w13 = zeros(r, local * 2 * weights);
  r->w2 = zeros(r, local * weights);
  r->s13 = zeros(r, local * 2 * scales * sizeof(float));
  r->s2 = zeros(r, local * scales * sizeof(float));
  r->bias = zeros(r, (size_t)r->columns * sizeof(float));
  r->x = zeros(r, (size_t)TOKENS_MAX * (size_t)r->problem.hidden * 2);
  r->out = zeros(r, (size_t)TOKENS_MAX * (size_t)r->problem.hidden * 2);
  r->workspace = zeros(r, r->recipe.workspace_bytes);
  w = (struct mf_weights){.struct_size = sizeof(w), .w13 = (void *)(uintptr_t)r->w13, .w2 = (void *)(uintptr_t)r->w2, .s13 = (void *)(uintptr_t)r->s13,
                          .s2 = (void *)(uintptr_t)r->s2, .bias = shape->bias ? (void *)(uintptr_t)r->bias : NULL, .routed_scaling = 2.5f};
  ck_assert_int_eq(recipe_bind(&r->api, &r->recipe, &r->problem, &w, &r->block), MF_OK);
  ck_assert_int_eq(recipe_workspace_init(&r->api, &r->recipe, (void *)(uintptr_t)r->workspace, r->stream), MF_OK);
}

/* ---- logits ---- */
static double uniform(uint64_t *state)
{
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (double)(*state >> 11) * 0x1p-53;
}

static double normal(uint64_t *state)
{
  double sum = -6;
  for(int i = 0; i < 12; i++)
    sum += uniform(state);
  return sum;
}

static float draw_one(enum draw draw, uint64_t *state)
{
  static const float few[] = {0.5f, 0.0f, -0.0f, -1.0f, 1.0f};
  union mf_exact_word close;
  const double u = uniform(state);
  switch(draw) {
    case DRAW_TIES: return few[(int)(u * 4.05)];
    case DRAW_CLOSE: /* some of the last bits of a float */
      close.f = u < 0.05 ? 1.0f : 0.25f;
      close.u += (uint32_t)(uniform(state) * 300);
      return close.f;
    case DRAW_MASKED: return u < 0.6 ? -INFINITY : (float)normal(state);
    case DRAW_NAN: return u < 0.1 ? NAN : u < 0.2 ? -NAN : (float)normal(state);
    case DRAW_NOTHING: return u < 0.5 ? NAN : -INFINITY;
    case DRAW_EQUAL: return -0.75f;
    case DRAW_WIDE: return (float)(60 * normal(state));
    default: return (float)(1.5 * normal(state));
  }
}

/* Fills a row. In every third one, only few experts can be selected. */
static void draw_row(enum draw draw, uint64_t *state, float *row, int columns)
{
  const bool sparse = (draw == DRAW_NAN || draw == DRAW_MASKED) && uniform(state) < 0.33;
  for(int c = 0; c < columns; c++) {
    row[c] = draw_one(draw, state);
    if(sparse && c % 7 != 3)
      row[c] = draw == DRAW_NAN ? NAN : -INFINITY;
    if(draw == DRAW_NOTHING && columns > 20 && c == columns - 3)
      row[c] = 1.0f; /* but for one */
  }
}

static void draw_bias(struct router *r, enum draw draw, uint64_t *state)
{
  for(int c = 0; c < r->columns; c++)
    r->host_bias[c] = draw == DRAW_TIES || draw == DRAW_EQUAL ? (float)((int)(uniform(state) * 3) - 1) * 0.125f
                      : draw == DRAW_CLOSE                    ? 0.0f
                      : r->problem.score == MF_SCORE_SOFTMAX  ? (float)(0.01 * normal(state))
                                                              : (float)(0.3 * normal(state));
  if(draw == DRAW_NAN)
    r->host_bias[r->columns / 2] = NAN;
  memcpy((void *)(uintptr_t)r->bias, r->host_bias, (size_t)r->columns * sizeof(float));
}

/* ---- ids and weights of an engine, by the same kinds ---- */
static int32_t draw_id(enum draw draw, uint64_t *state, int columns, int place)
{
  static const int32_t wrong[] = {-2, INT32_MIN, INT32_MAX, -100};
  const double u = uniform(state);
  const int32_t any = (int32_t)(uniform(state) * columns);
  switch(draw) {
    case DRAW_TIES: return (int32_t)(u * 4);                             /* few experts, named again and again */
    case DRAW_CLOSE: return columns - 1 - place;                         /* the last ones */
    case DRAW_MASKED: return u < 0.6 ? -1 : any;
    case DRAW_NAN: return u < 0.2 ? columns : u < 0.4 ? wrong[place % 4] : any; /* of no expert */
    case DRAW_NOTHING: return place == 1 && u < 0.3 ? any : -1;
    case DRAW_EQUAL: return columns / 2;
    default: return any;
  }
}

static float draw_weight(enum draw draw, uint64_t *state)
{
  const double v = normal(state);
  return draw == DRAW_WIDE ? (float)ldexp(v, (int)(uniform(state) * 120) - 60) : (float)v;
}

/* Rows of the call are further apart than they are long, and end where their memory ends; 'block' has them as reference_route() takes them. */
static bool draw_given(struct router *r, enum draw draw, uint64_t *state, struct mf_call *call, uint32_t *block)
{
  const size_t k = (size_t)r->problem.top_k, tokens = (size_t)call->tokens, ids_stride = k + 3, weights_stride = k + 1;
  int32_t *ids = (int32_t *)(uintptr_t)zeros(r, ((tokens - 1) * ids_stride + k) * 4);
  float *weights = (float *)(uintptr_t)zeros(r, ((tokens - 1) * weights_stride + k) * 4);
  bool bad = false;
  for(size_t t = 0; t < tokens; t++)
    for(size_t j = 0; j < k; j++) {
      const int32_t id = ids[t * ids_stride + j] = draw_id(draw, state, r->columns, (int)j);
      weights[t * weights_stride + j] = draw_weight(draw, state);
      memcpy(&block[t * k + j], &id, 4);
      memcpy(&block[(tokens + t) * k + j], &weights[t * weights_stride + j], 4);
      bad = bad || id < -1 || id >= r->columns;
    }
  call->ids = ids;
  call->weights = weights;
  call->ids_stride = (int64_t)ids_stride;
  call->weights_stride = (int64_t)weights_stride;
  return bad;
}

/* ---- comparison ---- */
static bool same_bits(float a, float b)
{
  return memcmp(&a, &b, sizeof(a)) == 0;
}

static bool is_local(const struct mf_problem *p, int id)
{
  return id >= p->expert_begin && id < p->expert_begin + p->expert_count;
}

static int place_in(const int32_t *ids, int count, int id)
{
  int at = 0;
  while(at < count && ids[at] != id)
    at++;
  return at;
}

/* The order of ranks that params.h promises: this rank's experts first, of these the ones that token 0 has as it has them by falling score ('head'), then
 * the others by rising index; none last. */
static void check_order(const struct mf_problem *p, const int32_t *ids, const int32_t *head, const char *where)
{
  int last = -1, rank = 0;
  for(; rank < p->top_k && is_local(p, ids[rank]); rank++) {
    const int at = place_in(head, p->top_k, ids[rank]), place = at < p->top_k ? at : p->top_k + ids[rank];
    ck_assert_msg(place > last, "%s: rank %d has expert %d, too late", where, rank, ids[rank]);
    last = place;
  }
  for(; rank < p->top_k; rank++)
    ck_assert_msg(!is_local(p, ids[rank]), "%s: rank %d has expert %d, behind another rank's", where, rank, ids[rank]);
}

static void check_token(const struct mf_problem *p, const int32_t *ids, const float *weights, const int32_t *want, const float *want_weights,
                        const int32_t *head, const char *where)
{
  bool used[MAX_TOP_K] = {false};
  for(int k = 0; k < p->top_k; k++) {
    int at = 0;
    while(at < p->top_k && (used[at] || ids[at] != want[k]))
      at++;
    ck_assert_msg(at < p->top_k, "%s: expert %d is missing", where, want[k]);
    ck_assert_msg(same_bits(weights[at], want_weights[k]), "%s: expert %d weighs %a, expected %a", where, want[k], (double)weights[at],
                  (double)want_weights[k]);
    used[at] = true;
  }
  check_order(p, ids, head, where);
}

/* Logits of the call, in device memory; tells whether one of them is NaN. */
static bool draw_logits(struct router *r, enum draw draw, uint64_t *state, struct mf_call *call)
{
  static float row[1024];
  const size_t bytes = r->problem.logits_dtype == MF_DTYPE_F32 ? 4 : 2, columns = (size_t)r->columns;
  const CUdeviceptr logits = zeros(r, (size_t)call->tokens * columns * bytes);
  bool nan = false;
  draw_bias(r, draw, state);
  for(int t = 0; t < call->tokens; t++) {
    draw_row(draw, state, row, r->columns);
    for(size_t c = 0; c < columns; c++) {
      const size_t i = (size_t)t * columns + c;
      if(bytes == 4)
        ((float *)(uintptr_t)logits)[i] = row[c];
      else
        ((uint16_t *)(uintptr_t)logits)[i] = isnan(row[c]) ? (c & 1 ? 0xFFC1 : 0x7F81) : bf16_from_float(row[c]);
      nan = nan || isnan(row[c]) || (r->problem.select_bias && isnan(r->host_bias[c]));
    }
  }
  call->logits = (void *)(uintptr_t)logits;
  return nan;
}

/* One launch; its routing, and y, which is zero. */
static void run_one(struct router *r, const char *name, int tokens, enum draw draw, uint64_t seed)
{
  static struct routing_result want;
  static uint32_t block[2 * TOKENS_MAX * MAX_TOP_K];
  const int k = r->problem.top_k;
  const bool given = r->problem.score == MF_SCORE_GIVEN;
  const uint32_t bit = given ? MF_WS_BAD_ID : MF_WS_NAN_LOGIT;
  const int32_t *ids = (const int32_t *)(uintptr_t)(r->workspace + r->recipe.routing_ids_offset);
  const float *weights = (const float *)(uintptr_t)(r->workspace + r->recipe.routing_weights_offset);
  uint32_t *status = (uint32_t *)(uintptr_t)(r->workspace + r->recipe.status_offset);
  uint64_t state = seed * 977 + (uint64_t)draw * 31 + (uint64_t)tokens;
  struct mf_call call = {.struct_size = sizeof(call), .tokens = tokens, .x = (void *)(uintptr_t)r->x, .out = (void *)(uintptr_t)r->out,
                         .workspace = (void *)(uintptr_t)r->workspace};
  const bool reported = given ? draw_given(r, draw, &state, &call, block) : draw_logits(r, draw, &state, &call);
  char where[200];
  reference_route(&r->problem, tokens, given ? block : call.logits, r->problem.select_bias ? r->host_bias : NULL, 2.5f, &want);
  *status = 0;
  memset((void *)(uintptr_t)r->out, 0xFF, (size_t)tokens * (size_t)r->problem.hidden * 2);
  emu_driver_seed(seed, 0);
  snprintf(where, sizeof(where), "%s, B = %d, %s, seed %d", name, tokens, draw_names[draw], (int)seed);
  ck_assert_msg(recipe_launch(&r->api, &r->recipe, r->function, &r->block, &r->problem, &call, r->stream, NULL) == MF_OK &&
                    r->api.p_cuStreamQuery(r->stream) == CUDA_SUCCESS,
                "%s: %s", where, emu_driver_text());
  for(int t = 0; t < tokens; t++) {
    snprintf(where, sizeof(where), "%s, B = %d, %s, seed %d, token %d", name, tokens, draw_names[draw], (int)seed, t);
    check_token(&r->problem, ids + t * k, weights + t * k, want.ids + t * k, want.weights + t * k, want.ids, where);
  }
  ck_assert_msg(*status == (reported ? bit : 0), "%s: status %x", where, (unsigned)*status);
  for(int i = 0; i < tokens * r->problem.hidden; i++)
    if((((const uint16_t *)(uintptr_t)r->out)[i] & 0x7FFF) != 0)
      ck_abort_msg("%s: y is not zero at %d", where, i);
  if(given) {
    r->api.p_cuMemFree((CUdeviceptr)(uintptr_t)call.ids);
    r->api.p_cuMemFree((CUdeviceptr)(uintptr_t)call.weights);
  } else {
    r->api.p_cuMemFree((CUdeviceptr)(uintptr_t)call.logits);
  }
}

/* Whether all shapes and seeds are wanted. */
static bool everything(void)
{
  const char *all = getenv("MOEFORGE_ROUTING");
  return all != NULL && strcmp(all, "all") == 0;
}

/* Token counts 1, 2, 3, 5, 8: every grouping of ranks and number of scoring warps. All of them with plain logits, one with each difficult kind. */
START_TEST(routing_is_the_reference_s)
{
  static const int counts[] = {1, 2, 3, 5, 8};
  static struct router r;
  open_router(&r, &shapes[_i], 0, 16);
  for(int draw = 0; draw < DRAWS; draw++)
    for(int b = 0; b < 5; b++)
      if(draw == DRAW_NORMAL || (b + draw + _i) % 5 == 0)
        run_one(&r, shapes[_i].name, counts[b], (enum draw)draw, (uint64_t)(_i + 100 * draw + b));
}
END_TEST

/* Gates of three tokens in rows that are further apart than they are long; one is NaN. It closes the gate, and is reported. */
START_TEST(a_gate_of_nan_is_reported)
{
  static const uint16_t nan_gates[7] = {0x3F00, 0, 0, 0x7FC0, 0, 0, 0xC000}, good_gates[7] = {0x3F00, 0, 0, 0x3F80, 0, 0, 0xC000};
  static struct router r;
  const uint32_t *status;
  CUdeviceptr gates;
  struct mf_call call;
  open_router(&r, &shapes[0], 1 + MF_SHARED_GATED, 16);
  status = (const uint32_t *)(uintptr_t)(r.workspace + r.recipe.status_offset);
  gates = zeros(&r, sizeof(nan_gates));
  call = (struct mf_call){.struct_size = sizeof(call), .tokens = 3, .x = (void *)(uintptr_t)r.x, .out = (void *)(uintptr_t)r.out, .workspace = (void *)(uintptr_t)r.workspace,
                          .logits = (void *)(uintptr_t)zeros(&r, 3 * 8 * 2), .shared_gate = (void *)(uintptr_t)gates, .shared_gate_stride = 3};
  for(int i = 0; i < 2; i++) {
    const float *weights = (const float *)(uintptr_t)(r.workspace + r.recipe.routing_weights_offset);
    const int32_t *ids = (const int32_t *)(uintptr_t)(r.workspace + r.recipe.routing_ids_offset);
    memcpy((void *)(uintptr_t)gates, i == 0 ? good_gates : nan_gates, sizeof(nan_gates));
    emu_driver_seed(1, 0);
    ck_assert_msg(recipe_launch(&r.api, &r.recipe, r.function, &r.block, &r.problem, &call, r.stream, NULL) == MF_OK &&
                      r.api.p_cuStreamQuery(r.stream) == CUDA_SUCCESS, "%s", emu_driver_text());
    ck_assert_uint_eq(*status, i == 0 ? 0 : MF_WS_NAN_LOGIT);
    for(int t = 0; t < 3; t++)
      ck_assert_int_eq(ids[t * 3], 8);
    ck_assert(same_bits(weights[0], mf_exact_sigmoid(0.5f)));
    ck_assert(same_bits(weights[3], i == 0 ? mf_exact_sigmoid(1.0f) : 0.0f));
    ck_assert(same_bits(weights[6], mf_exact_sigmoid(-2.0f)));
  }
}
END_TEST

/* ---- the arithmetic ---- */
static void check_root(float f)
{
  if(!same_bits(mf_exact_sqrt(f), sqrtf(f))) /* an assertion that holds costs a write to a file */
    ck_abort_msg("%a", (double)f);
}

/* Every mantissa in both octaves that differ, and the ends of the range. */
START_TEST(the_root_is_rounded_right)
{
  union mf_exact_word w;
  for(w.u = 0x3F800000u; w.u < 0x40800000u; w.u++)
    check_root(w.f);
  for(w.u = 0x00800000u; w.u < 0x7F800000u; w.u += 4093)
    check_root(w.f);
  ck_assert(same_bits(mf_exact_sqrt(0.0f), 0.0f));
}
END_TEST

/* ---- what routing does to the rest ---- */
static const struct shape whole[] = {
    {"softmax 32/12", 32, 12, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 0, 0, 0},
    {"sigmoid 40/22 bias", 40, 22, MF_SCORE_SIGMOID, 1, 1, 0, 1, 1, 0, 0, 0},
    {"softmax 16/1", 16, 1, MF_SCORE_SOFTMAX, 0, 0, 0, 1, 1, 0, 0, 0},
    {"softmax 32/4 experts 8..15", 32, 4, MF_SCORE_SOFTMAX, 0, 1, 0, 1, 1, 8, 8, 0},
    {"sigmoid 64/10 bias experts 48..63", 64, 10, MF_SCORE_SIGMOID, 1, 1, 1, 1, 1, 48, 16, 0},
    {"softmax 24+16/12 bias", 24, 12, MF_SCORE_SOFTMAX, 1, 0, 0, 1, 1, 0, 0, 16},
};
#define WHOLES ((int)(sizeof(whole) / sizeof(whole[0])))

START_TEST(the_whole_operator)
{
  static const struct test_case cases[] = {
    {1, ROUTING_UNIFORM, CASE_NORMAL, 1},      {2, ROUTING_ZIPF, CASE_NORMAL, 2},      {3, ROUTING_UNIFORM, CASE_NEG_INF, 3},
    {5, ROUTING_TIES, CASE_NORMAL, 4},         {8, ROUTING_CONCENTRATED, CASE_NORMAL, 5}, {8, ROUTING_DISPERSED, CASE_NORMAL, 6},
    {8, ROUTING_UNIFORM, CASE_NORMAL, 7},      {4, ROUTING_ZIPF, CASE_NORMAL, 8},
  };
  struct emu_subject s;
  struct emu_outcome outcome;
  memset(&s, 0, sizeof(s));
  s.problem = problem_of(&whole[_i]);
  s.emulation.info = emu_device_of(18);
  s.sched.family = &family_stream;
  emu_compile_fast();
  family_stream.default_schedule(&s.problem, 3, &s.emulation.info, &s.sched);
  emu_open(&s, "templates", TOKENS_MAX, 1.5f);
  for(uint64_t seed = 1; seed <= (everything() ? 2u : 1u); seed++) {
    emu_run(&s, 1.5f, cases, (int)(sizeof(cases) / sizeof(cases[0])), 2, seed, &outcome);
    ck_assert_msg(outcome.passed, "%s: %s", whole[_i].name, outcome.text);
  }
  emu_close(&s);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_routing");
  TCase *tc = tcase_create("routing"), *rest = tcase_create("rest");
  tcase_add_loop_test(tc, routing_is_the_reference_s, 0, SHAPES - (everything() ? 0 : MORE_SHAPES));
  tcase_add_test(tc, a_gate_of_nan_is_reported);
  tcase_set_timeout(tc, 600);
  tcase_add_test(rest, the_root_is_rounded_right);
  tcase_add_loop_test(rest, the_whole_operator, 0, WHOLES);
  tcase_set_timeout(rest, 600);
  suite_add_tcase(suite, tc);
  suite_add_tcase(suite, rest);
  return emu_suite_run(suite);
}
