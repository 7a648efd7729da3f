/* package_fixture.h - items for small packages, around the recipe of recipe_fixture.h. */
#ifndef MOEFORGE_TESTS_PACKAGE_FIXTURE_H
#define MOEFORGE_TESTS_PACKAGE_FIXTURE_H

#include "op.h"
#include "package_write.h"
#include "recipe_fixture.h"

#define PACKAGE_SET_MAX 8

/* Owns what its items point to. items[i] uses recipes[i] and devices[0] until a test says otherwise. */
struct package_set {
  struct mf_problem problem;
  struct device_info devices[PACKAGE_SET_MAX];
  struct mf_recipe recipes[PACKAGE_SET_MAX];
  struct check_result check;
  struct package_item items[PACKAGE_SET_MAX];
  size_t count;
};

static inline void package_set_init(struct package_set *set)
{
  memset(set, 0, sizeof(*set));
  set->problem = fixture_problem();
  set->devices[0] = (struct device_info){.name = "NVIDIA H200", .cc_major = 9, .sms = 132, .l2_bytes = 62914560};
  set->check.passed = true;
}

/* Appends a measured winner for tokens lo..hi. */
static inline struct package_item *package_set_add(struct package_set *set, int lo, int hi)
{
  struct package_item *it = &set->items[set->count];
  set->recipes[set->count] = fixture_recipe();
  *it = (struct package_item){.shape_name = "fixture",
                              .shape_source = "tests",
                              .problem = &set->problem,
                              .routed_scaling = 2.5,
                              .device = &set->devices[0],
                              .tokens_min = lo,
                              .tokens_max = hi,
                              .recipe = &set->recipes[set->count],
                              .cubin = (const unsigned char *)FIXTURE_CUBIN,
                              .cubin_bytes = strlen(FIXTURE_CUBIN),
                              .schedule = "stream/fixture",
                              .us = 9.75,
                              .floor_us = 7.25,
                              .default_us = 10.5,
                              .us_low = 9.5,
                              .us_high = 10,
                              .regret = 1.125,
                              .nvrtc_version = 13000,
                              .driver_version = 13000,
                              .compile_key = "c0ffee",
                              .selection_key = "5e1ec7",
                              .made_at = "2026-11-29T12:00:00Z",
                              .check = &set->check};
  set->count++;
  return it;
}

#endif
