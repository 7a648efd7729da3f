/* test_emu_matrix.c - the kernel family over its whole range on the emulated device: every routing policy, every way in which shapes leave
 * remainders, every knob. Each *configuration* is one compiled kernel with its knobs; on it, some *cases* (token count, routing, data) run back to
 * back on one workspace, each twice, and every output is judged by the staged gates of check.c.
 *
 * The full product has billions of members. What is run covers each pair of values of those factors that have to do with one another (wanted[]), as
 * far as the family serves it and it is not too long to emulate: chosen greedily, the same every time. How many were run and covered is printed.
 * MOEFORGE_MATRIX=N in the environment runs configuration N only, and prints what it is ("all": all of them).
 *
 * Numbers of multiprocessors are made up so that CTAs own 16 to 64 rows of w2 of a small hidden size. */
#include "emu_fixture.h"

#include <time.h>

#define MOST_VALUES 12
#define MOST_CONFIGS 80
#define MOST_CASES 5       /* of one configuration; two launches each, and a workspace lives for 8 cases */
#define FEWEST_CASES 2
#define TRIES 4000         /* random configurations, to find one that is served */
#define CANDIDATES 60      /* of which the one is taken that covers most */
#define MOST_SMS 70
#define MOST_WEIGHTS 205e6 /* bytes */
#define MOST_COST 6.0      /* of a case: cost() */
#define LAUNCHES 2         /* of a case */
#define ALL_ROUNDS 1000    /* no tickets */
#define RING 99            /* of flight: as many stages as the ring has */

enum {
  ROWS, FEATURES, HIDDEN, SPARE, RING_STAGES, LOADERS, LOOKAHEAD, FLIGHT, FIRST_DOWN, STATIC, ROTATE, HAND_OFF, PDL, UNIT, POLICY, EXPERTS, TOP_K, LOGITS, ACT_SCALE, RANK,
  TOKENS, ROUTING, DATA, /* of a case */
  FACTORS
};
#define CONFIG_FACTORS TOKENS

static const struct {
  const char *name;
  int count, value[MOST_VALUES];
} factors[FACTORS] = {
    [ROWS] = {"rows", 7, {64, 56, 48, 40, 32, 24, 16}},   /* of w2 per CTA: 16 are slabs, 24 to 40 mostly dense tiles; 24, 40, 48, 56 straddle scale blocks */
    [FEATURES] = {"features", 7, {256, 512, 768, 1024, 192, 320 | 64 << 16, 832 | 64 << 16}}, /* of one expert | its offset in the first scale block */
    [HIDDEN] = {"hidden", 4, {1024, 1152, 2048, 3072}},   /* one, two (the second of one k-block), two, three stages per unit; of half units half of one, one, one, two */
    [SPARE] = {"spare", 2, {0, 2}},                       /* CTAs without rows */
    [RING_STAGES] = {"ring_stages", 4, {4, 6, 8, 10}},
    [LOADERS] = {"h_loaders", 2, {2, 4}},
    [LOOKAHEAD] = {"ticket_lookahead", 2, {2, 4}},
    [FLIGHT] = {"flight", 4, {3, 4, 6, RING}},
    [FIRST_DOWN] = {"first_down_flight", 3, {2, 3, 6}},
    [STATIC] = {"static_rounds", 3, {0, 8, ALL_ROUNDS}},
    [ROTATE] = {"rotate_k", 2, {0, 1}},
    [HAND_OFF] = {"hand_off", 2, {0, 1}},
    [PDL] = {"pdl", 2, {0, 1}},
    [UNIT] = {"unit_features", 2, {8, 4}},
    [POLICY] = {"policy", 11, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
    [EXPERTS] = {"experts", 4, {64, 96, 128, 256}},
    [TOP_K] = {"top_k", 5, {1, 2, 3, 8, 10}},
    [LOGITS] = {"logits", 2, {MF_DTYPE_BF16, MF_DTYPE_F32}},
    [ACT_SCALE] = {"act_scale", 2, {MF_ACT_SCALE_F32, MF_ACT_SCALE_UE8M0}},
    [RANK] = {"rank", 2, {0, 1}},                         /* 1: of expert parallelism, with half of the experts */
    [TOKENS] = {"tokens", 5, {1, 2, 3, 5, 8}},
    [ROUTING] = {"routing", 5, {ROUTING_UNIFORM, ROUTING_ZIPF, ROUTING_CONCENTRATED, ROUTING_DISPERSED, ROUTING_TIES}},
    [DATA] = {"data", 5, {CASE_NORMAL, CASE_ZERO_TOKEN, CASE_HUGE_SCALE, CASE_TINY_SCALE, CASE_NEG_INF}},
};

static const struct policy {
  const char *name;
  enum mf_score score;
  int renormalise, bias, groups, kept, zero_experts;
  float scaling;
} policies[] = {
    {"softmax, renormalised", MF_SCORE_SOFTMAX, 1, 0, 1, 1, 0, 1.0f},
    {"softmax", MF_SCORE_SOFTMAX, 0, 0, 1, 1, 0, 1.0f},
    {"sigmoid, renormalised", MF_SCORE_SIGMOID, 1, 0, 1, 1, 0, 1.0f},
    {"sigmoid", MF_SCORE_SIGMOID, 0, 0, 1, 1, 0, 1.0f},
    {"sigmoid + bias", MF_SCORE_SIGMOID, 1, 1, 1, 1, 0, 2.5f},
    {"sigmoid + bias, 4 of 8 groups", MF_SCORE_SIGMOID, 1, 1, 8, 4, 0, 2.5f},
    {"sigmoid + bias, 1 of 4 groups", MF_SCORE_SIGMOID, 1, 1, 4, 1, 0, 1.0f},
    {"softmax of the chosen", MF_SCORE_TOPK_SOFTMAX, 0, 0, 1, 1, 0, 1.0f},
    {"sqrt softplus + bias", MF_SCORE_SQRT_SOFTPLUS, 1, 1, 1, 1, 0, 1.5f},
    {"softmax + bias", MF_SCORE_SOFTMAX, 1, 1, 1, 1, 0, 1.0f},
    {"softmax with zero experts", MF_SCORE_SOFTMAX, 0, 1, 1, 1, 32, 6.0f},
};

/* Factors that have to do with one another. */
static const unsigned char wanted[][2] = {
    {ROWS, FEATURES}, {ROWS, HIDDEN}, {ROWS, SPARE}, {ROWS, RING_STAGES}, {FEATURES, HIDDEN}, {FEATURES, RING_STAGES}, {FEATURES, LOADERS},
    {FEATURES, TOP_K}, {FEATURES, ACT_SCALE}, {HIDDEN, RING_STAGES}, {HIDDEN, ROTATE}, {HIDDEN, FLIGHT}, {RING_STAGES, LOADERS},
    {RING_STAGES, LOOKAHEAD}, {RING_STAGES, FLIGHT}, {RING_STAGES, FIRST_DOWN}, {RING_STAGES, STATIC}, {LOOKAHEAD, STATIC}, {LOADERS, TOP_K},
    {FLIGHT, FIRST_DOWN}, {STATIC, ROTATE}, {STATIC, SPARE}, {HAND_OFF, ROWS}, {HAND_OFF, FEATURES}, {HAND_OFF, LOADERS}, {HAND_OFF, TOP_K}, {UNIT, ROWS}, {UNIT, FEATURES}, {UNIT, HIDDEN}, {UNIT, RING_STAGES}, {UNIT, STATIC}, {UNIT, LOOKAHEAD},
    {UNIT, HAND_OFF}, {POLICY, EXPERTS}, {POLICY, LOGITS}, {EXPERTS, LOGITS}, {EXPERTS, TOP_K},
    {LOGITS, TOP_K}, {RANK, EXPERTS}, {RANK, TOP_K},
    {TOKENS, ROWS}, {TOKENS, FEATURES}, {TOKENS, HIDDEN}, {TOKENS, RING_STAGES}, {TOKENS, LOADERS}, {TOKENS, STATIC}, {TOKENS, POLICY},
    {TOKENS, TOP_K}, {TOKENS, LOGITS}, {TOKENS, RANK}, {TOKENS, HAND_OFF}, {TOKENS, PDL}, {TOKENS, UNIT}, {ROUTING, HAND_OFF}, {ROUTING, POLICY}, {ROUTING, TOP_K}, {ROUTING, ROWS}, {ROUTING, STATIC}, {ROUTING, RANK},
    {DATA, POLICY}, {DATA, ACT_SCALE}, {DATA, LOGITS}, {TOKENS, ROUTING}, {TOKENS, DATA}, {ROUTING, DATA},
};
#define WANTED ((int)(sizeof(wanted) / sizeof(wanted[0])))

/* Indices of values. */
struct choice {
  unsigned char at[FACTORS];
};

struct config {
  struct choice choice; /* those of a case: unused */
  struct choice cases[MOST_CASES];
  int ncases;
};

static struct config configs[MOST_CONFIGS];
static int nconfigs, impossible; /* pairs that no configuration has: they are not served, or too large */
static bool covered[WANTED][MOST_VALUES][MOST_VALUES];
static struct device_info base_device; /* the emulated SKU */
static uint64_t random_state = 1;

/* Choosing happens outside the tests, where libcheck's assertions cannot be used. */
static void need(bool condition, const char *what)
{
  if(condition)
    return;
  fprintf(stderr, "test_emu_matrix: %s\n", what);
  exit(EXIT_FAILURE);
}

/* ---- what a choice means ---- */
static int value_of(const struct choice *c, int factor)
{
  return factors[factor].value[c->at[factor]];
}

static void set_policy(struct mf_problem *p, const struct policy *policy)
{
  p->score = (int32_t)policy->score;
  p->renormalize = policy->renormalise;
  p->select_bias = policy->bias;
  p->groups = policy->groups;
  p->groups_kept = policy->kept;
  p->zero_experts = policy->zero_experts;
}

static struct mf_problem problem_of(const struct choice *c)
{
  struct mf_problem p;
  problem_init(&p);
  set_policy(&p, &policies[value_of(c, POLICY)]);
  p.experts = p.expert_count = value_of(c, EXPERTS);
  if(value_of(c, RANK) == 1) {
    p.expert_begin = p.experts / 2;
    p.expert_count = p.experts / 2;
  }
  p.top_k = value_of(c, TOP_K);
  p.hidden = value_of(c, HIDDEN);
  p.intermediate = value_of(c, FEATURES) & 0xFFFF;
  p.intermediate_offset = value_of(c, FEATURES) >> 16;
  p.logits_dtype = value_of(c, LOGITS);
  p.act_scale = value_of(c, ACT_SCALE);
  return p;
}

/* The fewest multiprocessors with at most so many rows of w2 each, and the spare ones. */
static int sms_of(const struct choice *c)
{
  return (value_of(c, HIDDEN) + value_of(c, ROWS) - 1) / value_of(c, ROWS) + value_of(c, SPARE);
}

static void set_knob(struct schedule *sched, int factor, int value)
{
  const int k = family_knob(sched->family, factors[factor].name);
  need(k >= 0, factors[factor].name);
  sched->value[k] = value;
}

static void set_knobs(const struct choice *c, struct schedule *sched)
{
  const int ring = value_of(c, RING_STAGES), flight = value_of(c, FLIGHT);
  const int knobs[] = {RING_STAGES, LOADERS, LOOKAHEAD, FIRST_DOWN, STATIC, ROTATE, HAND_OFF, PDL, UNIT};
  sched->family = &family_stream;
  for(size_t i = 0; i < sizeof(knobs) / sizeof(knobs[0]); i++)
    set_knob(sched, knobs[i], value_of(c, knobs[i]));
  set_knob(sched, FLIGHT, flight == RING ? ring : flight);
}

static void subject_of(const struct choice *c, struct emu_subject *s)
{
  memset(s, 0, sizeof(*s));
  s->problem = problem_of(c);
  s->emulation.info = base_device;
  s->emulation.info.sms = sms_of(c);
  set_knobs(c, &s->sched);
}

static double weight_bytes(const struct mf_problem *p)
{
  return 3.0 * p->expert_count * p->intermediate * p->hidden;
}

/* In proportion to the time, roughly: it goes with the number of products. */
static double cost(const struct choice *c)
{
  const struct mf_problem p = problem_of(c);
  const bool same = value_of(c, ROUTING) == ROUTING_CONCENTRATED && value_of(c, DATA) != CASE_NEG_INF; /* all tokens choose the same experts */
  const int slots = (same ? 1 : value_of(c, TOKENS)) * p.top_k, active = slots < p.expert_count ? slots : p.expert_count;
  const int unit = value_of(c, UNIT), unit_stages = (p.hidden + 8192 / unit - 1) / (8192 / unit), blocks = (p.intermediate_offset + p.intermediate + 127) / 128;
  return LAUNCHES * (active * (p.intermediate / unit * unit_stages * 32.0 + sms_of(c) * blocks * 16.0) / 18e3 + sms_of(c) / 100.0);
}

/* Does the family serve it, and is it small enough, at least with one token (index 0)? */
static bool legal(const struct choice *c)
{
  struct emu_subject s;
  struct verdict why;
  struct error err;
  const int rows = value_of(c, ROWS), hidden = value_of(c, HIDDEN), sms = sms_of(c);
  subject_of(c, &s);
  return sms <= MOST_SMS && 8 * ((hidden / 8 + sms - 1) / sms) == rows && weight_bytes(&s.problem) <= MOST_WEIGHTS &&
         problem_validate(&s.problem, &err) == MF_OK && family_stream.constrain(&s.problem, &s.sched, &s.emulation.info, &why) == MF_OK &&
         family_stream.shared_bytes(&s.problem, &s.sched, &s.emulation.info) <= s.emulation.info.shared_bytes_per_cta && cost(c) <= MOST_COST;
}

static struct test_case case_of(const struct choice *c, uint32_t seed)
{
  const struct test_case tc = {value_of(c, TOKENS), (enum routing_kind)value_of(c, ROUTING), (enum case_data)value_of(c, DATA), seed};
  return tc;
}

/* ---- covering ---- */
static uint32_t next_random(uint32_t below)
{
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(((random_state >> 33) * below) >> 31);
}

/* Pairs that the choice would cover newly; of cases (and configurations) if 'cases', else of configurations alone. 'take': it does. */
static int gain(const struct choice *c, bool cases, bool take)
{
  int count = 0;
  for(int w = 0; w < WANTED; w++) {
    const int a = wanted[w][0], b = wanted[w][1];
    bool *pair = &covered[w][c->at[a]][c->at[b]];
    if((a >= CONFIG_FACTORS) != cases)
      continue;
    count += !*pair;
    *pair = *pair || take;
  }
  return count;
}

/* A legal configuration with two values given. */
static bool draw(int a, int at_a, int b, int at_b, struct choice *out)
{
  for(int try = 0; try < TRIES; try++) {
    for(int f = 0; f < CONFIG_FACTORS; f++)
      out->at[f] = (unsigned char)next_random((uint32_t)factors[f].count);
    out->at[a] = (unsigned char)at_a;
    out->at[b] = (unsigned char)at_b;
    if(legal(out))
      return true;
  }
  return false;
}

/* Adds the configuration that covers the given pair and the most others; false if nothing legal does. */
static bool cover_pair(int w, int at_a, int at_b)
{
  struct choice best = {{0}}, c = {{0}};
  int most = 0;
  for(int i = 0; i < CANDIDATES && draw(wanted[w][0], at_a, wanted[w][1], at_b, &c); i++) {
    const int n = gain(&c, false, false);
    if(n > most) {
      most = n;
      best = c;
    }
  }
  if(most == 0)
    return false;
  need(nconfigs < MOST_CONFIGS, "more configurations than there is room for");
  configs[nconfigs++].choice = best;
  gain(&best, false, true);
  return true;
}

static void choose_configs(void)
{
  for(int w = 0; w < WANTED && wanted[w][0] < CONFIG_FACTORS; w++)
    for(int a = 0; a < factors[wanted[w][0]].count; a++)
      for(int b = 0; b < factors[wanted[w][1]].count; b++)
        if(!covered[w][a][b] && !cover_pair(w, a, b))
          impossible++;
}

/* The case of a configuration that covers most for what it costs; its gain. */
static int best_case(const struct config *config, struct choice *best, double *worth)
{
  int most = 0;
  *worth = -1;
  for(int t = 0; t < factors[TOKENS].count; t++) {
    for(int r = 0; r < factors[ROUTING].count; r++) {
      for(int d = 0; d < factors[DATA].count; d++) {
        struct choice c = config->choice;
        c.at[TOKENS] = (unsigned char)t;
        c.at[ROUTING] = (unsigned char)r;
        c.at[DATA] = (unsigned char)d;
        const int n = gain(&c, true, false);
        const double price = cost(&c);
        if(price > MOST_COST || n / price <= *worth)
          continue;
        *worth = n / price;
        *best = c;
        most = n;
      }
    }
  }
  return most;
}

static void add_case(struct config *config, const struct choice *c)
{
  config->cases[config->ncases++] = *c;
  gain(c, true, true);
}

/* First each configuration gets its cases, then whichever has the best one gets one more, until there is nothing to gain. */
static void choose_cases(void)
{
  struct choice c, best;
  double worth;
  for(int turn = 0; turn < FEWEST_CASES; turn++) {
    for(int i = 0; i < nconfigs; i++) {
      best_case(&configs[i], &c, &worth);
      need(worth >= 0, "a configuration has no case that is short enough");
      add_case(&configs[i], &c);
    }
  }
  for(;;) {
    struct config *most = NULL;
    double most_worth = 0;
    for(int i = 0; i < nconfigs; i++) {
      if(configs[i].ncases < MOST_CASES && best_case(&configs[i], &c, &worth) > 0 && worth > most_worth) {
        most = &configs[i];
        most_worth = worth;
        best = c;
      }
    }
    if(most == NULL)
      return;
    add_case(most, &best);
  }
}

static void count_pairs(int *have, int *all)
{
  *have = *all = 0;
  for(int w = 0; w < WANTED; w++)
    for(int a = 0; a < factors[wanted[w][0]].count; a++)
      for(int b = 0; b < factors[wanted[w][1]].count; b++) {
        *have += covered[w][a][b];
        ++*all;
      }
}

/* ---- running ---- */
static void describe(const struct choice *c, char *out, size_t space)
{
  size_t used = 0;
  for(int f = 0; f < CONFIG_FACTORS && used < space; f++) {
    if(f == POLICY)
      used += (size_t)snprintf(out + used, space - used, "%s; ", policies[value_of(c, f)].name);
    else if(f == FEATURES)
      used += (size_t)snprintf(out + used, space - used, "features %d from %d, ", value_of(c, f) & 0xFFFF, value_of(c, f) >> 16);
    else
      used += (size_t)snprintf(out + used, space - used, "%s %d, ", factors[f].name, value_of(c, f));
  }
}

static double seconds(void)
{
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

START_TEST(a_configuration_is_right)
{
  const struct config *config = &configs[_i];
  const struct policy *policy = &policies[value_of(&config->choice, POLICY)];
  const char *only = getenv("MOEFORGE_MATRIX");
  const bool verbose = only != NULL;
  struct test_case cases[MOST_CASES];
  struct emu_subject s;
  struct emu_outcome o;
  char text[600];
  if(verbose && strcmp(only, "all") != 0 && atoi(only) != _i)
    return;
  describe(&config->choice, text, sizeof(text));
  for(int i = 0; i < config->ncases; i++)
    cases[i] = case_of(&config->cases[i], (uint32_t)(_i + 1));
  emu_compile_fast();
  subject_of(&config->choice, &s);
  emu_open(&s, "templates", factors[TOKENS].value[factors[TOKENS].count - 1], policy->scaling);
  if(verbose)
    printf("%d: %s%.1f s to open\n", _i, text, seconds());
  for(int i = 0; i < config->ncases && verbose; i++)
    printf("%d: %d tokens, %s, %s\n", _i, cases[i].tokens, routing_name(cases[i].routing), case_data_name(cases[i].data));
  emu_run(&s, policy->scaling, cases, config->ncases, LAUNCHES, (uint64_t)_i + 1, &o);
  if(verbose) {
    double price = 0;
    for(int i = 0; i < config->ncases; i++)
      price += cost(&config->cases[i]);
    const struct emu_counters n = emu_counters();
    printf("%d: %d cases, cost %.1f, %.1f s, %.1f M switches, %.1f M accesses, %.1f k copies, %.1f k products%s\n", _i, config->ncases, price,
           seconds(), (double)n.switches / 1e6, (double)n.accesses / 1e6, (double)n.copies / 1e3, (double)n.products / 1e3, o.passed ? "" : ", FAILED");
  }
  ck_assert_msg(o.passed, "%s%s", text, o.text);
  emu_close(&s);
}
END_TEST

/* Whatever can be covered by configurations is, and nearly everything by cases (some of which would take too long). */
START_TEST(the_choice_covers)
{
  int have, all, ncases = 0;
  count_pairs(&have, &all);
  for(int i = 0; i < nconfigs; i++)
    ncases += configs[i].ncases;
  ck_assert_int_ge(nconfigs, 30);
  ck_assert_int_ge(ncases, 100);
  ck_assert_int_le(impossible * 100, all * 7);
  ck_assert_int_ge((have + impossible) * 100, all * 98);
}
END_TEST

int main(void)
{
#ifdef __SANITIZE_ADDRESS__
  const int step = 8; /* kernels run several times as long */
#else
  const int step = 1;
#endif
  Suite *suite = suite_create("emu_matrix");
  TCase *choice = tcase_create("choice"), *matrix = tcase_create("matrix");
  int have, all, ncases = 0, run = 0;
  double price = 0;
  struct error err;
  if(device_spec_read("specs/devices/emu-sm90.yaml", &base_device, NULL, NULL, &err) != MF_OK)
    return EXIT_FAILURE;
  choose_configs();
  choose_cases();
  count_pairs(&have, &all);
  for(int i = 0; i < nconfigs; i += step, run++) {
    tcase_add_loop_test(matrix, a_configuration_is_right, i, i + 1);
    ncases += configs[i].ncases;
    for(int k = 0; k < configs[i].ncases; k++)
      price += cost(&configs[i].cases[k]);
  }
  printf("%d of %d configurations, %d cases, %d launches, of cost %.0f; all cover %d of %d pairs, of the rest %d are not served or too large\n", run,
         nconfigs, ncases, LAUNCHES * ncases, price + 1.0 * run, have, all, impossible);
  tcase_add_test(choice, the_choice_covers);
  tcase_set_timeout(matrix, 240);
  suite_add_tcase(suite, choice);
  suite_add_tcase(suite, matrix);
  return emu_suite_run(suite);
}
