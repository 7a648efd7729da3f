/* test_trace_read.c - records of traced launches: clocks that are placed on one axis, what is missing or out of order is a finding, phases and the critical path. */
#include <check.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trace.h"

static struct error err;

/* ---- records made by hand ---- */
#define CTAS 3
#define LAUNCHES 4
#define FIRST 6      /* launches 6 .. 9: the ring wraps */
#define CYCLES 1.755 /* per ns */
#define STEP 32      /* of the timer */

static struct mf_trace_cta area[MF_TRACE_LAUNCHES * CTAS];

static struct mf_trace_cta *record(int launch, int cta)
{
  return &area[(FIRST + launch) % MF_TRACE_LAUNCHES * CTAS + cta];
}

/* Clock of an SM at a true time in ns: each began at another moment, one is about to overflow its low word. */
static uint64_t clock_at(uint32_t sm, double ns)
{
  return (sm == 7 ? 0xFFFFF000ull : 1000000ull * sm) + (uint64_t)llround(ns * CYCLES);
}

static uint32_t stamp_at(uint32_t sm, double ns)
{
  return (uint32_t)clock_at(sm, ns) | 1;
}

static void pair_at(struct mf_trace_cta *r, int i, double ns)
{
  const uint64_t clock = clock_at(r->sm, ns), timer = 1700000000000000000ull + (uint64_t)(ns / STEP) * STEP;
  r->pair[i][0] = (uint32_t)clock;
  r->pair[i][1] = (uint32_t)(clock >> 32);
  r->pair[i][2] = (uint32_t)timer;
  r->pair[i][3] = (uint32_t)(timer >> 32);
}

/* A launch of CTAS CTAs that begins at 'at' ns, the CTAs 40 ns apart, events 100 ns apart; one expert of three units, one per CTA; CTA 2 has no down rows. */
static void make_launch(int launch, double at)
{
  for(int c = 0; c < CTAS; c++) {
    struct mf_trace_cta *r = record(launch, c);
    const double begin = at + 40 * c;
    const uint32_t sm = (uint32_t)((c * 3 + launch) % 3 + 5); /* launches are dealt to SMs in another way each */
    *r = (struct mf_trace_cta){.launch = (uint32_t)(FIRST + launch + 1), .sm = sm, .finalisers = 1, .loaders = 1, .down_ctas = CTAS - 1, .units = CTAS};
    pair_at(r, 0, begin + 333);
    pair_at(r, 1, begin + 2111);
    for(int track = 0; track < MF_TRACE_HELPER + 2; track++)
      for(int e = 0; trace_event_name(track, e) != NULL; e++)
        r->track[track].time[e] = stamp_at(sm, begin + 100 * e);
    r->track[MF_TRACE_PRODUCER].value[MF_PRODUCER_ACTIVE] = 1;
    r->track[MF_TRACE_PRODUCER].value[MF_PRODUCER_UP_STAGES] = 1;
    r->track[MF_TRACE_PRODUCER].value[MF_PRODUCER_DOWN_STAGES] = c < CTAS - 1;
    r->track[MF_TRACE_PRODUCER].value[MF_PRODUCER_RING_WAIT] = 1755;
    r->track[MF_TRACE_PRODUCER].list[0][1] = 42;
    for(int group = 0; group < 2; group++) {
      struct mf_trace_track *tr = &r->track[MF_TRACE_CONSUMER + group];
      tr->value[MF_CONSUMER_UNITS] = 1;
      tr->value[MF_CONSUMER_DOWN_STAGES] = c < CTAS - 1;
      tr->list[0][0] = stamp_at(sm, begin + 580);
      tr->list[0][1] = (uint32_t)c;
      for(int e = MF_CONSUMER_DOWN_FIRST; c == CTAS - 1 && e < MF_CONSUMER_EXIT; e++)
        tr->time[e] = 0;
    }
    r->track[MF_TRACE_HELPER].value[MF_HELPER_COUNT] = 1;
    r->track[MF_TRACE_HELPER].list[0][0] = stamp_at(sm, begin + 500);
    r->track[MF_TRACE_HELPER].list[0][1] = (uint32_t)c;
    r->track[MF_TRACE_HELPER + 1].value[MF_HELPER_COUNT] = c < CTAS - 1;
    for(int i = 0; i < 3; i++)
      r->track[MF_TRACE_HELPER + 1].list[i][0] = stamp_at(sm, begin + 450 + 200 * i);
  }
}

static void make_area(void)
{
  memset(area, 0, sizeof(area));
  for(int l = 0; l < LAUNCHES; l++)
    make_launch(l, 10011 + 4021.0 * l);
}

static enum mf_status read_area(struct trace *t)
{
  return trace_read(area, CTAS, FIRST, LAUNCHES, false, t, &err);
}

START_TEST(clocks_meet_on_one_axis)
{
  struct trace t;
  make_area();
  ck_assert_msg(read_area(&t) == MF_OK, "%s", err.text);
  ck_assert_double_eq_tol(t.cycles_per_us, CYCLES * 1000, 10);
  ck_assert_double_gt(t.uncertainty, 0);
  ck_assert_double_le(t.uncertainty, STEP / 2.0 / 1000); /* narrower than a step of the timer */
  ck_assert_int_eq(t.launches, LAUNCHES);
  ck_assert_int_eq(t.launch[2].experts[0], 42);
  for(int l = 0; l < LAUNCHES; l++) {
    ck_assert_uint_eq(t.launch[l].number, (unsigned)(FIRST + l));
    for(int c = 0; c < CTAS; c++) {
      const struct trace_track *tr = &t.launch[l].ctas[c].track[MF_TRACE_PRODUCER];
      ck_assert_double_eq_tol(tr->time[MF_PRODUCER_LAST_COPY] - tr->time[MF_PRODUCER_BEGIN], 0.1 * MF_PRODUCER_LAST_COPY, 0.01); /* on an SM: exact, but for the frequency */
      ck_assert_double_eq_tol(tr->time[0], 0.04 * c, 2 * t.uncertainty + 0.005);                                                /* across SMs */
      ck_assert_double_eq_tol(tr->value[MF_PRODUCER_RING_WAIT], 1.0, 0.01);
    }
  }
  trace_free(&t);
}
END_TEST

START_TEST(phases_and_path)
{
  struct trace_phase phases[TRACE_PHASES_MAX];
  const struct trace_title title = {.shape = "a<b&c", .device = "d", .schedule = "s", .routing = "uniform", .tokens = 1, .expert_bytes = 3e6};
  struct trace_path path;
  struct trace t;
  struct strbuf text;
  int count, found = 0, cta = -1;
  make_area();
  for(int c = 0; c < CTAS; c++)
    record(1, c)->track[MF_TRACE_CONSUMER].time[MF_CONSUMER_EXIT] = stamp_at(record(1, c)->sm, 10011 + 4021 + 40 * c + 1400);
  record(1, 1)->track[MF_TRACE_CONSUMER].time[MF_CONSUMER_STORED] = stamp_at(record(1, 1)->sm, 10011 + 4021 + 40 + 1390); /* the longest launch */
  ck_assert_msg(read_area(&t) == MF_OK, "%s", err.text);
  count = trace_phases(&t, phases);
  for(int i = 0; i < count; i++) {
    if(strcmp(phases[i].name, "up done") == 0) {
      ck_assert_int_eq(phases[i].count, CTAS * LAUNCHES);
      ck_assert_double_eq_tol(phases[i].low, 0.6, 0.05);
      ck_assert_double_eq_tol(phases[i].median, 0.64, 0.05);
      ck_assert_double_eq_tol(phases[i].high, 0.68, 0.05);
      found++;
    } else if(strcmp(phases[i].name, "y stored") == 0) { /* of those that store some */
      ck_assert_int_eq(phases[i].count, (CTAS - 1) * LAUNCHES);
      ck_assert_double_eq_tol(phases[i].high, 1.43, 0.05);
      found++;
    } else if(strcmp(phases[i].name, "producer: no free stage") == 0) {
      ck_assert(phases[i].wait);
      ck_assert_double_eq_tol(phases[i].median, 1.0, 0.01);
      found++;
    }
  }
  ck_assert_int_eq(found, 3);
  path = trace_find_path(&t);
  ck_assert_int_ne(path.launch, 1);
  ck_assert_int_eq(path.h_slot, 0);
  ck_assert_int_eq(path.h_cta, CTAS - 1); /* its unit is the last one */
  ck_assert_double_eq_tol(path.h_done, 0.58, 0.05);
  ck_assert_int_eq(path.y_cta, CTAS - 2);
  ck_assert_double_eq_tol(path.y_done, 1.24, 0.05);
  ck_assert_double_eq_tol(path.y_written - path.y_fetched, 0.2, 0.01);
  ck_assert(isnan(path.h_before));
  ck_assert(isnan(trace_slot_done(&t, &t.launch[0], 1, &cta)));
  strbuf_init(&text, 1 << 20);
  trace_text(&t, &title, &text);
  ck_assert_msg(strstr(strbuf_text(&text), "last h   expert 42 (slot 0 of 1) complete at 0.5") != NULL, "%s", strbuf_text(&text));
  ck_assert_msg(strstr(strbuf_text(&text), "TB/s") != NULL, "%s", strbuf_text(&text));
  strbuf_free(&text);
  strbuf_init(&text, 1 << 20);
  trace_svg(&t, &title, &text);
  ck_assert_ptr_nonnull(strstr(strbuf_text(&text), "a&lt;b&amp;c on d"));
  strbuf_free(&text);
  trace_free(&t);
}
END_TEST

/* What is wrong with a record, and what is said. */
static void lose_event(void) { record(1, 2)->track[MF_TRACE_CONSUMER + 1].time[MF_CONSUMER_UP_DONE] = 0; }
static void lose_down(void) { record(3, 0)->track[MF_TRACE_CONSUMER].time[MF_CONSUMER_H_FIRST] = 0; }
static void lose_logits(void) { record(0, 0)->track[MF_TRACE_CONSUMER].time[MF_CONSUMER_LOGITS] = 0; }
static void lose_entry(void) { record(0, 0)->track[MF_TRACE_HELPER].list[0][0] = 0; }
static void lose_helper(void) { record(2, 1)->track[MF_TRACE_HELPER + 1].time[MF_HELPER_LAST] = 0; }
static void lose_record(void) { memset(record(2, 1), 0, sizeof(*area)); }
static void another_launch(void) { record(2, 1)->launch -= MF_TRACE_LAUNCHES; }
static void turn_round(void) { record(0, 1)->track[MF_TRACE_PRODUCER].time[MF_PRODUCER_LAST_COPY] = record(0, 1)->track[MF_TRACE_PRODUCER].time[MF_PRODUCER_FIRST_COPY]; }
static void y_before_products(void) { record(0, 1)->track[MF_TRACE_CONSUMER].time[MF_CONSUMER_STORED] = stamp_at(record(0, 1)->sm, 10011 + 40 + 1050); }
static void too_many_tracks(void) { record(1, 1)->loaders = MF_TRACE_TRACKS; }
static void timer_stands(void)
{
  for(int l = 0; l < LAUNCHES; l++)
    for(int c = 0; c < CTAS; c++)
      for(int i = 0; i < 2; i++)
        record(l, c)->pair[i][2] = record(l, c)->pair[i][3] = 5;
}

static const struct {
  void (*spoil)(void);
  const char *text;
} spoilt[] = {
    {lose_event, "launch 7, CTA 2, consumers 1: no \"up done\""},
    {lose_down, "launch 9, CTA 0, consumers 0: no \"first h there\""},
    {lose_logits, "launch 6, CTA 0, consumers 0: no \"logits loaded\""},
    {lose_entry, "launch 6, CTA 0, finaliser 0: an entry of its list was not written"},
    {lose_helper, "launch 8, CTA 1, h loader 0: no \"last done\""},
    {lose_record, "CTA 1 left no record of launch 8"},
    {another_launch, "CTA 1 left no record of launch 8"},
    {turn_round, "launch 6, CTA 1, producer: \"last copy\" comes before \"first down copy\""},
    {y_before_products, "launch 6, CTA 1, consumers 0: \"y stored\" comes before"},
    {too_many_tracks, "CTA 1 left a record of launch 7 that makes no sense"},
    {timer_stands, "timer did not advance"},
};

START_TEST(what_is_missing_is_a_finding)
{
  struct trace t;
  make_area();
  ck_assert_msg(read_area(&t) == MF_OK, "%s", err.text);
  trace_free(&t);
  spoilt[_i].spoil();
  ck_assert_int_eq(read_area(&t), MF_ERR_CHECK);
  ck_assert_msg(strstr(err.text, spoilt[_i].text) != NULL, "\"%s\" is not in: %s", spoilt[_i].text, err.text);
}
END_TEST

/* Lists have an end; what there was no room for is counted. */
START_TEST(full_lists)
{
  struct trace t;
  make_area();
  record(0, 0)->track[MF_TRACE_HELPER].value[MF_HELPER_COUNT] = MF_TRACE_LIST + 9;
  for(int i = 0; i < MF_TRACE_LIST; i++)
    record(0, 0)->track[MF_TRACE_HELPER].list[i][0] = stamp_at(record(0, 0)->sm, 11000);
  record(0, 0)->track[MF_TRACE_HELPER + 1].value[MF_HELPER_COUNT] = MF_TRACE_LIST / 3 + 1;
  for(int i = 0; i < MF_TRACE_LIST; i++)
    record(0, 0)->track[MF_TRACE_HELPER + 1].list[i][0] = stamp_at(record(0, 0)->sm, 11000);
  ck_assert_msg(read_area(&t) == MF_OK, "%s", err.text);
  ck_assert_int_eq(t.dropped, 9 + 3 - MF_TRACE_LIST % 3);
  ck_assert_int_eq(t.launch[0].ctas[0].track[MF_TRACE_HELPER].entries, MF_TRACE_LIST);
  trace_free(&t);
}
END_TEST

static Suite *suite(void)
{
  Suite *s = suite_create("trace_read");
  TCase *reading = tcase_create("reading");
  tcase_add_test(reading, clocks_meet_on_one_axis);
  tcase_add_test(reading, phases_and_path);
  tcase_add_loop_test(reading, what_is_missing_is_a_finding, 0, (int)(sizeof(spoilt) / sizeof(spoilt[0])));
  tcase_add_test(reading, full_lists);
  suite_add_tcase(s, reading);
  return s;
}

int main(void)
{
  SRunner *runner = srunner_create(suite());
  int failed;
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? 0 : 1;
}
