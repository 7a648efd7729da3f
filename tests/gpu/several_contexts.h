/* several_contexts.h - part of several.c (included there and nowhere else): the steps `calls` and `wrong`, each in threads whose context stack holds one context
 * or none, so that what a call leaves there is seen. */
#ifndef MOEFORGE_TESTS_GPU_SEVERAL_CONTEXTS_H
#define MOEFORGE_TESTS_GPU_SEVERAL_CONTEXTS_H

static const char *name_current(const struct worker *w, char *out, size_t space)
{
  if(w->current >= 0)
    snprintf(out, space, "the context of GPU %d", w->current);
  else
    snprintf(out, space, "%s", w->current == OWN ? "the caller's own context" : "no context");
  return out;
}

/* Is what was current still current, and nothing else on the thread's stack? */
static bool is_left(const struct worker *w)
{
  const CUcontext wanted = w->current == OWN ? w->own : w->current == NONE ? NULL : s.card[w->current].gpu.context;
  CUcontext top = NULL, below = NULL;
  const bool some = s.api.p_cuCtxPopCurrent(&top) == CUDA_SUCCESS && top != NULL;
  const bool more = some && s.api.p_cuCtxPopCurrent(&below) == CUDA_SUCCESS && below != NULL;
  if(some)
    cuda(&s.api, s.api.p_cuCtxPushCurrent(top), "making a context current again");
  return !more && (some ? top : NULL) == wanted;
}

static void expect(struct worker *w, const char *call, enum mf_status have, enum mf_status wanted)
{
  char what[256], name[64];
  const bool left = is_left(w);
  if(have == wanted && left) {
    w->calls++;
    return;
  }
  w->wrong++;
  snprintf(what, sizeof(what), "%s for GPU %d in %s: %s instead of %s, and the context was %s", call, w->card, name_current(w, name, sizeof(name)),
           mf_status_name(have), mf_status_name(wanted), left ? "left" : "CHANGED");
  say(false, what);
}

static struct mf_weights weights_of(const struct card *card)
{
  const struct verify_weights *v = &card->weights;
  const struct mf_weights w = {.struct_size = sizeof(w),
                               .w13 = (const void *)(uintptr_t)v->w13,
                               .w2 = (const void *)(uintptr_t)v->w2,
                               .s13 = (const float *)(uintptr_t)v->s13,
                               .s2 = (const float *)(uintptr_t)v->s2,
                               .bias = (const float *)(uintptr_t)v->bias,
                               .routed_scaling = v->routed_scaling};
  return w;
}

static void calls_of_ops(struct worker *w)
{
  const int ordinal = s.card[w->card].gpu.ordinal;
  struct mf_problem other = s.problem;
  struct mf_op *op = NULL;
  other.hidden += 128;
  expect(w, "mf_op_create of another shape", mf_op_create(s.package, &other, ordinal, 1, &op), MF_MISS_SHAPE);
  expect(w, "mf_op_create for too many tokens", mf_op_create(s.package, &s.problem, ordinal, 60000, &op), MF_MISS_TOKENS);
  expect(w, "mf_op_create on a GPU that is not there", mf_op_create(s.package, &s.problem, s.devices, 1, &op), MF_ERR_NO_DEVICE);
  expect(w, "mf_op_create", mf_op_create(s.package, &s.problem, ordinal, now.tokens, &op), MF_OK);
  mf_op_destroy(op);
  expect(w, "mf_op_destroy", MF_OK, MF_OK);
}

static void calls_of_layers(struct worker *w)
{
  const struct card *card = &s.card[w->card];
  struct mf_weights weights = weights_of(card);
  struct mf_call call = call_of(w->card, &card->lane[0], 0);
  struct mf_layer *layer = NULL;
  expect(w, "mf_layer_bind", mf_layer_bind(card->kernel.op, &weights, &layer), MF_OK);
  call.tokens++;
  expect(w, "mf_moe_forward of too many tokens", mf_moe_forward(layer, &call, card->lane[0].stream), MF_MISS_TOKENS);
  call.tokens--;
  call.workspace = NULL;
  expect(w, "mf_moe_forward without a workspace", mf_moe_forward(layer, &call, card->lane[0].stream), MF_ERR_USAGE);
  mf_layer_destroy(layer);
  expect(w, "mf_layer_destroy", MF_OK, MF_OK);
  weights.w13 = NULL;
  expect(w, "mf_layer_bind without weights", mf_layer_bind(card->kernel.op, &weights, &layer), MF_ERR_USAGE);
  expect(w, "mf_workspace_init of nothing", mf_workspace_init(card->kernel.op, NULL, card->lane[0].stream), MF_ERR_USAGE);
}

/* The caller's own context still serves the caller. */
static void use_own(struct worker *w)
{
  unsigned char bytes[256] = {0};
  CUdeviceptr memory = 0;
  bool good = true;
  cuda(&s.api, s.api.p_cuMemAlloc(&memory, sizeof(bytes)), "allocating in the caller's own context");
  cuda(&s.api, s.api.p_cuMemsetD8(memory, 0x5a, sizeof(bytes)), "writing in the caller's own context");
  cuda(&s.api, s.api.p_cuMemcpyDtoH(bytes, memory, sizeof(bytes)), "reading in the caller's own context");
  cuda(&s.api, s.api.p_cuMemFree(memory), "freeing in the caller's own context");
  for(size_t i = 0; i < sizeof(bytes); i++)
    good = good && bytes[i] == 0x5a;
  if(!good)
    say(false, "the caller's own context reads other bytes than it wrote");
  w->calls += good;
  w->wrong += !good;
}

static void work_calls(struct worker *w)
{
  calls_of_ops(w);
  calls_of_layers(w);
  if(w->current == OWN)
    use_own(w);
}

static void step_calls(void)
{
  for(int c = 0; c < s.cards; c++)
    for(int current = OWN; current < s.cards; current++) {
      struct worker w = {.card = c, .current = current, .work = work_calls};
      char what[160], name[64];
      run_alone(&w);
      snprintf(what, sizeof(what), "for GPU %d in %s: %d calls answered as they should and left it current, %d did not", c, name_current(&w, name, sizeof(name)),
               w.calls, w.wrong);
      say(w.wrong == 0, what);
    }
}

/* With a stream of the op's context, and with stream 0. */
static void work_wrong(struct worker *w)
{
  const struct card *card = &s.card[w->card];
  for(int i = 0; i < 2; i++) {
    const struct mf_call call = call_of(w->card, &card->lane[i], 0);
    w->status[i] = mf_moe_forward(card->kernel.layer, &call, i == 0 ? card->lane[i].stream : NULL);
    w->wrong += !is_left(w);
  }
}

static bool is_poison(const unsigned char *bytes, size_t count)
{
  while(count > 0 && bytes[count - 1] == 0xff)
    count--;
  return count == 0;
}

/* The two calls of a wrong context; the line says all that became of them. */
static void report_wrong(const struct worker *w)
{
  const struct card *card = &s.card[w->card];
  char what[256], name[64];
  bool good = w->wrong == 0;
  int at;
  make_current(w->card);
  cuda(&s.api, s.api.p_cuCtxSynchronize(), "waiting for the GPU");
  at = snprintf(what, sizeof(what), "forward of GPU %d in %s%s", w->card, name_current(w, name, sizeof(name)), w->wrong == 0 ? "" : ", which it CHANGED");
  for(int i = 0; i < 2; i++) {
    bool untouched, as_alone;
    fetch(&card->lane[i], 1);
    untouched = is_poison(s.got, s.y_bytes);
    as_alone = memcmp(s.got, s.alone, s.y_bytes) == 0;
    good = good && (i == 0 ? w->status[i] == MF_OK && as_alone : w->status[i] == MF_ERR_DEVICE && untouched);
    at += snprintf(what + at, sizeof(what) - (size_t)at, "; %s: %s, %s", i == 0 ? "op's stream" : "stream 0", mf_status_name(w->status[i]),
                   untouched ? "nothing written" : as_alone ? "written as alone" : "WRITTEN, otherwise");
  }
  say(good, what);
}

static void step_wrong(void)
{
  for(int c = 0; c < s.cards; c++)
    for(int current = OWN; current < s.cards; current++) {
      struct worker w = {.card = c, .current = current, .work = work_wrong};
      if(current == c)
        continue;
      poison_all();
      run_alone(&w);
      report_wrong(&w);
    }
  poison_all();
  for(int c = 0; c < s.cards; c++)
    launch_rounds(c, 1);
  collect_all(1);
  report_all("then in the right context");
}

#endif
