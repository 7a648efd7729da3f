/* recipe_fuzz.c - any bytes as a binding recipe, bound and launched with any weights and calls: refused, or never outside the recipe and its argument
 * block. An entry point of libFuzzer (`make fuzz-package`), which tests/test_package_fuzz.c calls with seeds and a fixed series of mutations.
 *
 * Input: the recipe's bytes, then those of struct call_bytes (what is missing is 0). */
#include "driver_stub.h"
#include "recipe.h"

static struct recipe_fuzz_counts {
  int valid, bound, launched;
} recipe_fuzz_counts;

/* What the caller may choose: sizes, strides, pointers. */
struct call_bytes {
  int32_t hidden, intermediate, experts, zero_experts, logits_dtype, tokens;
  int64_t w13_row_stride, w2_row_stride, x_stride, logits_stride, out_stride;
  uint64_t w13, w2, s13, s2, bias, x, logits, out, workspace;
  float scaling;
};

/* Sizes in the bounds of a package's entry (package_file.c), from any number. */
static int32_t at_least_one(int32_t value, int32_t high)
{
  const int32_t v = value % high;
  return 1 + (v < 0 ? -v : v) % high;
}

static struct mf_problem problem_of(const struct call_bytes *c)
{
  struct mf_problem p;
  memset(&p, 0, sizeof(p));
  p.struct_size = sizeof(p);
  p.hidden = at_least_one(c->hidden, 1 << 20);
  p.intermediate = at_least_one(c->intermediate, 1 << 20);
  p.experts = p.expert_count = at_least_one(c->experts, 65536);
  p.zero_experts = at_least_one(c->zero_experts, 65536);
  p.logits_dtype = c->logits_dtype;
  return p;
}

static void bind_and_launch(const struct cuda_api *api, const struct mf_recipe *recipe, const struct call_bytes *c)
{
  const struct mf_problem problem = problem_of(c);
  struct recipe_block block;
  struct mf_weights w;
  struct mf_call call;
  const int before = stub_launches;
  enum mf_status rc;
  memset(&w, 0, sizeof(w));
  w.struct_size = sizeof(w);
  w.w13 = (const void *)(uintptr_t)c->w13;
  w.w2 = (const void *)(uintptr_t)c->w2;
  w.s13 = (const float *)(uintptr_t)c->s13;
  w.s2 = (const float *)(uintptr_t)c->s2;
  w.bias = (const float *)(uintptr_t)c->bias;
  w.w13_row_stride = c->w13_row_stride;
  w.w2_row_stride = c->w2_row_stride;
  w.routed_scaling = c->scaling;
  if(recipe_bind(api, recipe, &problem, &w, &block) != MF_OK)
    return;
  recipe_fuzz_counts.bound++;
  memset(&call, 0, sizeof(call));
  call.struct_size = sizeof(call);
  call.tokens = c->tokens;
  call.x = (const void *)(uintptr_t)c->x;
  call.logits = (const void *)(uintptr_t)c->logits;
  call.out = (void *)(uintptr_t)c->out;
  call.workspace = (void *)(uintptr_t)c->workspace;
  call.x_stride = c->x_stride;
  call.logits_stride = c->logits_stride;
  call.out_stride = c->out_stride;
  rc = recipe_launch(api, recipe, (CUfunction)(uintptr_t)128, &block, &problem, &call, NULL, NULL);
  if((rc == MF_OK && c->tokens != 0) != (stub_launches == before + 1))
    abort();
  recipe_fuzz_counts.launched += stub_launches > before;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  const size_t recipe_bytes = size < sizeof(struct mf_recipe) ? size : sizeof(struct mf_recipe), rest = size - recipe_bytes;
  struct mf_recipe *recipe = malloc(recipe_bytes > 0 ? recipe_bytes : 1); /* exactly as long, so that reads behind it are noticed */
  struct call_bytes c;
  struct cuda_api api;
  if(recipe == NULL)
    return 0;
  memcpy(recipe, data, recipe_bytes);
  memset(&c, 0, sizeof(c));
  memcpy(&c, data + recipe_bytes, rest < sizeof(c) ? rest : sizeof(c));
  if(recipe_validate(recipe, recipe_bytes) == MF_OK) {
    recipe_fuzz_counts.valid++;
    cuda_api_open(&api, NULL, 0);
    stub_recipe = recipe;
    bind_and_launch(&api, recipe, &c);
    stub_recipe = NULL;
  }
  free(recipe);
  return 0;
}
