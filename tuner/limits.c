/* limits.c - see limits.h. The device rules.
 *
 * A rule is a name, one line of help, and a function that compares what the candidate has with what the device allows. It returns true if the rule
 * holds; else it has filled in have, allowed, nearest and, where the numbers need words, detail. The first rule that fails rejects.
 *
 * Before compilation the rules look at the recipe, which says what will be launched; after it, at the artifact as well. Spilled registers
 * and local memory are not allowed at all: they would add memory traffic that is not in the cost model, in kernels that live on bandwidth. */
#include "limits.h"
#include "compile.h"

#include <stdio.h>
#include <string.h>

#define WARP_THREADS 32
#define WARPS_PER_ALLOCATION 4      /* warps are given registers four at a time, */
#define REGISTERS_PER_ALLOCATION 8  /* and each thread in steps of eight */
#define META_SYMBOL "mf_meta"
#define META_MAX_BYTES 1024

/* What the rules look at. */
struct subject {
  const struct mf_problem *problem;
  const struct schedule *sched;
  const struct device_info *dev;
  const struct mf_recipe *recipe;
  const struct artifact *art; /* NULL before compilation */
};

typedef bool rule_fn(const struct subject *s, struct verdict *why);

/* Product of the three dimensions, saturated. */
static long volume(const uint32_t dim[3])
{
  const long ceiling = 1L << 40;
  long product = 1;
  for(int i = 0; i < 3; i++)
    product = dim[i] != 0 && product > ceiling / (long)dim[i] ? ceiling : product * (long)dim[i];
  return product;
}

/* have <= allowed? Notes the three numbers for the case that not. */
static bool within(struct verdict *why, long have, long allowed, long nearest)
{
  why->have = have;
  why->allowed = allowed;
  why->nearest = nearest;
  return have <= allowed;
}

static long round_up(long value, long step)
{
  return (value + step - 1) / step * step;
}

/* ---- before compilation ---- */
static bool rule_arch(const struct subject *s, struct verdict *why)
{
  within(why, s->dev->cc_major * 10L + s->dev->cc_minor, 90, 90);
  snprintf(why->detail, sizeof(why->detail), "compute capability %d.%d, the kernels need 9.0 (wgmma and tensor copies of sm_90a)", s->dev->cc_major,
           s->dev->cc_minor);
  return compile_arch(s->dev->cc_major, s->dev->cc_minor) != NULL;
}

static bool rule_shared_memory(const struct subject *s, struct verdict *why)
{
  return within(why, (long)s->recipe->shared_bytes, s->dev->shared_bytes_per_cta, s->dev->shared_bytes_per_cta);
}

static bool rule_threads(const struct subject *s, struct verdict *why)
{
  const long threads = volume(s->recipe->block);
  if(threads > 0)
    return within(why, threads, s->dev->max_threads_per_cta, s->dev->max_threads_per_cta);
  within(why, threads, s->dev->max_threads_per_cta, 1);
  snprintf(why->detail, sizeof(why->detail), "the recipe has an empty block");
  return false;
}

/* A grid whose CTAs wait for each other must be resident as a whole; with the shared memory that these kernels use, one CTA fits a multiprocessor. */
static bool rule_resident(const struct subject *s, struct verdict *why)
{
  const bool waits = (s->recipe->flags & MF_RECIPE_COOPERATIVE) != 0;
  const long grid = volume(s->recipe->grid), min_sms = (long)s->recipe->min_sms;
  return within(why, waits && grid > min_sms ? grid : min_sms, s->dev->sms, s->dev->sms);
}

/* ---- after compilation ---- */
/* Registers that a CTA takes if each thread has 'per_thread'. */
static long cta_registers(long per_thread, long threads)
{
  const long warps = round_up((threads + WARP_THREADS - 1) / WARP_THREADS, WARPS_PER_ALLOCATION);
  return round_up(per_thread, REGISTERS_PER_ALLOCATION) * WARP_THREADS * warps;
}

static bool rule_registers(const struct subject *s, struct verdict *why)
{
  const long threads = volume(s->recipe->block), one_step = cta_registers(REGISTERS_PER_ALLOCATION, threads);
  const long most = one_step > 0 ? s->dev->registers_per_sm / one_step * REGISTERS_PER_ALLOCATION : 0;
  const bool fits = within(why, cta_registers(s->art->registers, threads), s->dev->registers_per_sm, most > 0 ? most : -1);
  if(!fits)
    snprintf(why->detail, sizeof(why->detail), "%d registers x %ld threads take %ld, a multiprocessor has %ld: at most %ld per thread", s->art->registers,
             threads, why->have, why->allowed, most);
  return fits;
}

static bool rule_spills(const struct subject *s, struct verdict *why)
{
  return within(why, s->art->spill_bytes, 0, 0);
}

static bool rule_stack(const struct subject *s, struct verdict *why)
{
  return within(why, s->art->stack_bytes, 0, 0);
}

static bool rule_static_shared(const struct subject *s, struct verdict *why)
{
  const long dynamic = (long)s->recipe->shared_bytes, left = s->dev->shared_bytes_per_cta - dynamic;
  return within(why, dynamic + s->art->static_shared_bytes, s->dev->shared_bytes_per_cta, left > 0 ? left : 0);
}

static bool rule_wgmma(const struct subject *s, struct verdict *why)
{
  return within(why, s->art->wgmma_serialised, 0, 0);
}

static bool rule_metadata(const struct subject *s, struct verdict *why)
{
  const struct family_ops *family = s->sched->family;
  _Alignas(16) unsigned char meta[META_MAX_BYTES];
  size_t bytes = 0;
  struct error err = {0};
  enum mf_status rc;
  if(family->check_meta == NULL)
    return true;
  rc = cubin_symbol_bytes(s->art->cubin, s->art->cubin_bytes, META_SYMBOL, &bytes, &err);
  if(rc == MF_OK && bytes > sizeof(meta)) {
    within(why, (long)bytes, (long)sizeof(meta), -1);
    rc = error_set(&err, MF_ERR_CORRUPT, "the metadata has %zu bytes, expected at most %zu", bytes, sizeof(meta));
  }
  if(rc == MF_OK)
    rc = cubin_read_symbol(s->art->cubin, s->art->cubin_bytes, META_SYMBOL, meta, bytes, &err);
  if(rc == MF_OK)
    return family->check_meta(meta, bytes, s->problem, s->sched, s->dev, why) == MF_OK;
  why->nearest = -1;
  snprintf(why->detail, sizeof(why->detail), "%.250s", err.text);
  return false;
}

/* ---- the tables ---- */
/* Name, help with the unit, function. Order is the order of judgement. */
#define BEFORE_TABLE(X)                                                                                                 \
  X("arch", "compute capability 9.0 (times ten)", rule_arch)                                                            \
  X("shared_memory", "dynamic shared memory per CTA, bytes, within the device's opt-in maximum", rule_shared_memory)    \
  X("threads", "threads per CTA within the device's maximum", rule_threads)                                             \
  X("resident", "CTAs that wait for each other, at most one per multiprocessor", rule_resident)
#define AFTER_TABLE(X)                                                                                                  \
  X("registers", "registers of a CTA, in the hardware's steps, within a multiprocessor's", rule_registers)              \
  X("spills", "bytes of spilled registers stored and loaded: none allowed", rule_spills)                                \
  X("stack", "bytes of local memory per thread: none allowed", rule_stack)                                              \
  X("static_shared", "static and dynamic shared memory together, bytes, within the device's maximum", rule_static_shared) \
  X("wgmma_serialised", "ptxas serialised wgmma or injected waits (C7510 to C7520): not allowed", rule_wgmma)           \
  X("metadata", "the kernel's own constants equal the host's formulas", rule_metadata)

static const struct rule rules[] = {
#define RULE_ENTRY(name, help, function) {name, help},
    BEFORE_TABLE(RULE_ENTRY) AFTER_TABLE(RULE_ENTRY)
#undef RULE_ENTRY
};
#define RULE_FUNCTION(name, help, function) function,
static rule_fn *const before_rules[] = {BEFORE_TABLE(RULE_FUNCTION)};
static rule_fn *const after_rules[] = {AFTER_TABLE(RULE_FUNCTION)};
#undef RULE_FUNCTION
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

const struct rule *limits_rules(int *count)
{
  *count = COUNT(rules);
  return rules;
}

/* Judges 's' by 'count' rules whose names start at rules[first]. */
static enum mf_status judge(const struct subject *s, const char *stage, rule_fn *const *functions, int first, int count, struct verdict *why)
{
  for(int i = 0; i < count; i++) {
    const struct rule *rule = &rules[first + i];
    memset(why, 0, sizeof(*why));
    if(functions[i](s, why))
      continue;
    if(why->stage == NULL)
      why->stage = stage;
    if(why->rule == NULL)
      why->rule = rule->name;
    if(why->detail[0] == '\0')
      snprintf(why->detail, sizeof(why->detail), "%ld, allowed %ld: %s", why->have, why->allowed, rule->help);
    return MF_REJECTED;
  }
  memset(why, 0, sizeof(*why));
  return MF_OK;
}

/* The recipe that the rules look at. A family that cannot make one has a rule of its own that should have said so: rule "recipe". */
static enum mf_status make_recipe(const struct subject *s, const char *stage, struct mf_recipe *recipe, struct verdict *why)
{
  struct error err = {0};
  memset(recipe, 0, sizeof(*recipe));
  if(s->sched->family->recipe(s->problem, s->sched, s->dev, recipe, &err) == MF_OK)
    return MF_OK;
  *why = (struct verdict){.stage = stage, .rule = "recipe", .nearest = -1};
  snprintf(why->detail, sizeof(why->detail), "%.250s", err.text);
  return MF_REJECTED;
}

enum mf_status limits_before_compile(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev, struct verdict *why)
{
  struct mf_recipe recipe;
  const struct subject s = {problem, sched, dev, &recipe, NULL};
  enum mf_status rc;
  memset(why, 0, sizeof(*why));
  rc = sched->family->constrain(problem, sched, dev, why);
  if(rc == MF_REJECTED && why->stage == NULL)
    why->stage = "space";
  if(rc == MF_OK)
    rc = make_recipe(&s, "limits", &recipe, why);
  return rc != MF_OK ? rc : judge(&s, "limits", before_rules, 0, COUNT(before_rules), why);
}

enum mf_status limits_after_compile(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev,
                                    const struct artifact *art, struct verdict *why)
{
  struct mf_recipe recipe;
  const struct subject s = {problem, sched, dev, &recipe, art};
  const enum mf_status rc = make_recipe(&s, "compile", &recipe, why);
  return rc != MF_OK ? rc : judge(&s, "compile", after_rules, COUNT(before_rules), COUNT(after_rules), why);
}
