/* family_fixture.h - for tests of kernel families: the devices and shapes of specs/ by name. */
#ifndef MOEFORGE_TESTS_FAMILY_FIXTURE_H
#define MOEFORGE_TESTS_FAMILY_FIXTURE_H

#include <check.h>
#include <stdio.h>

#include "device.h"
#include "spec.h"

static inline struct device_info device(const char *name)
{
  struct device_info dev;
  struct error err;
  char path[256];
  snprintf(path, sizeof(path), "specs/devices/%s.yaml", name);
  ck_assert_msg(device_spec_read(path, &dev, NULL, NULL, &err) == MF_OK, "%s", err.text);
  return dev;
}

static inline struct mf_problem problem(const char *name)
{
  struct model_spec spec;
  struct error err;
  char path[256];
  snprintf(path, sizeof(path), "specs/models/%s.yaml", name);
  ck_assert_msg(spec_read(path, &spec, NULL, NULL, &err) == MF_OK, "%s", err.text);
  return spec.problem;
}

#endif
