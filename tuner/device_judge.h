/* device_judge.h - runs cases on a device and judges them; remembers verdicts on outputs that were judged before.
 *
 * Candidates of one shape mostly agree to the bit: their knobs change when things happen, not what is added to what. Judging an output costs a down
 * projection on the CPU (about 0.1 s), so a verdict that passed is kept in the reference cache under the hash of everything that it depends on:
 * check policy, reference version, problem, layer, case and every byte of the output. Failures are never kept. */
#ifndef MOEFORGE_TUNER_DEVICE_JUDGE_H
#define MOEFORGE_TUNER_DEVICE_JUDGE_H

#include "check.h"
#include "device.h"
#include "error.h"

struct judge_run {
  const struct device_ops *ops;
  struct device *dev;
  struct device_kernel *kernel;
  const struct mf_problem *problem;
  float routed_scaling;
  const char *cache_dir;
  int layers, replays, timeout_ms;
};

/* Case 'index' of a list, on layer index % layers. Updates *result as check_judge() does. */
enum mf_status judge_case(const struct judge_run *run, const struct test_case *tc, int index, struct check_result *result, struct error *err);

#endif
