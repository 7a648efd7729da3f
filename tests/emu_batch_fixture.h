/* emu_batch_fixture.h - kernels of the family `batch` on the emulated device: a row of sizes, router and schedule becomes a subject of emu_fixture.h. */
#ifndef MOEFORGE_TESTS_EMU_BATCH_FIXTURE_H
#define MOEFORGE_TESTS_EMU_BATCH_FIXTURE_H

#include "emu_fixture.h"

#include "family_batch.h"

#define BATCH_CASES 5
#define UNIFORM ROUTING_UNIFORM, CASE_NORMAL
#define CONCENTRATED ROUTING_CONCENTRATED, CASE_NORMAL
#define DISPERSED ROUTING_DISPERSED, CASE_NORMAL
#define TIES ROUTING_TIES, CASE_NORMAL
#define ZIPF ROUTING_ZIPF, CASE_NORMAL
#define MISSING ROUTING_TIES, CASE_NEG_INF /* tokens with fewer experts; given ids: repeated as well */

struct batch_row {
  const char *name;
  int sms, hidden, intermediate, offset, experts, top_k;
  int score, bias, f32, groups, kept, begin, count, zero; /* the router, where it is not plain softmax (groups 0) */
  int shared, on_input;                                   /* the operator's variants; limit and alpha 0: none, SiLU */
  float limit, alpha;
  int token_groups;
  int ring, overlay, static_rounds;                       /* 0: the default's; overlay -1: off, 1: on */
  int seeds;
  struct test_case cases[BATCH_CASES];                    /* tokens 0 ends; run one after the other on one workspace */
};

static inline struct mf_problem batch_problem(const struct batch_row *row)
{
  struct mf_problem p = emu_smallest_problem();
  p.hidden = row->hidden;
  p.intermediate = row->intermediate;
  p.intermediate_offset = row->offset;
  p.experts = p.expert_count = row->experts;
  p.top_k = row->top_k;
  p.shared_experts = row->shared;
  p.weight_on_input = row->on_input;
  p.swiglu_limit = row->limit;
  p.swiglu_alpha = row->alpha;
  if(row->groups == 0)
    return p;
  p.score = row->score;
  p.renormalize = row->score != MF_SCORE_GIVEN;
  p.select_bias = row->bias;
  p.logits_dtype = row->f32 ? MF_DTYPE_F32 : MF_DTYPE_BF16;
  p.groups = row->groups;
  p.groups_kept = row->kept;
  p.expert_begin = row->begin;
  p.expert_count = row->count;
  p.zero_experts = row->zero;
  return p;
}

static inline void batch_open(struct emu_subject *s, const struct batch_row *row, const char *template_dir)
{
  memset(s, 0, sizeof(*s));
  s->problem = batch_problem(row);
  s->emulation.info = emu_device_of(row->sms);
  s->sched.family = &family_batch;
  family_batch.default_schedule(&s->problem, 8 * row->token_groups, &s->emulation.info, &s->sched);
  if(row->ring != 0) {
    emu_set_knob(&s->sched, "ring_stages", row->ring);
    emu_set_knob(&s->sched, "flight", 4);
    emu_set_knob(&s->sched, "first_down_flight", 4);
  }
  if(row->overlay != 0)
    emu_set_knob(&s->sched, "overlay", row->overlay > 0);
  if(row->static_rounds != 0)
    emu_set_knob(&s->sched, "static_rounds", row->static_rounds);
  emu_open(s, template_dir, 8 * row->token_groups, 1.0f);
}

static inline int batch_ncases(const struct batch_row *row)
{
  int count = 0;
  while(count < BATCH_CASES && row->cases[count].tokens != 0)
    count++;
  return count;
}

#endif
