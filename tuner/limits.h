/* limits.h - drops candidates that a device cannot run, and says why.
 *
 * Two gates: limits_before_compile() works on the schedule alone, limits_after_compile() on what NVRTC made of it.
 * Neither allocates. The rule tables in limits.c and in the families are the only places where a limit is written down. */
#ifndef MOEFORGE_TUNER_LIMITS_H
#define MOEFORGE_TUNER_LIMITS_H

#include "error.h"
#include "family.h"
#include "types.h"

/* Family rules, then device rules: shared memory, threads, grid residency. MF_OK, or MF_REJECTED with *why filled in. */
enum mf_status limits_before_compile(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev, struct verdict *why);
/* Registers x threads, spills, stack, static shared memory, wgmma serialisation, metadata against the host's formulas. */
enum mf_status limits_after_compile(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev,
                                    const struct artifact *art, struct verdict *why);
/* The device rules, for plan and docs; *count receives their number. */
const struct rule *limits_rules(int *count);

#endif
