/* python_packages.c - packages for the tests of the Python binding: python_packages FOLDER
 *
 *   fixture.moeforge   tokens 1..2 and 3..8 of the fixture's problem, on an H200; shape "fixture"
 *   gap.moeforge       tokens 1..2 and 4..8
 *   given.moeforge     the fixture's problem with routing done by the engine (score 4), 1..8
 *   shared.moeforge    the fixture's problem with one gated shared expert, 1..8
 *   two.moeforge       two shapes, "fixture" (1..8) and "other" (top_k 3, 1..4)
 *   tiny.moeforge      specs/models/tiny.yaml with the default schedules and a cubin that only the scripted GPU (libfakegpu.so) loads: it computes */
#include "family.h"
#include "package_fixture.h"
#include "stream/params.h"

#include <stdlib.h>

static int write_set(const struct package_set *set, const char *folder, const char *name)
{
  struct error err = {.text = ""};
  char path[1024];
  unsigned char *bytes = NULL;
  size_t size = 0;
  enum mf_status rc = package_build(set->items, set->count, true, &bytes, &size, &err);
  snprintf(path, sizeof(path), "%s/%s", folder, name);
  if(rc == MF_OK)
    rc = package_write_file(path, bytes, size, &err);
  free(bytes);
  if(rc != MF_OK)
    fprintf(stderr, "python_packages: %s: %s\n", name, err.text);
  return rc != MF_OK;
}

static int write_fixtures(const char *folder)
{
  static struct package_set fixture, gap, given, shared, two;
  static struct mf_problem other;
  package_set_init(&fixture);
  package_set_add(&fixture, 1, 2);
  package_set_add(&fixture, 3, 8);
  package_set_init(&gap);
  package_set_add(&gap, 1, 2);
  package_set_add(&gap, 4, 8);
  package_set_init(&given);
  package_set_add(&given, 1, 8);
  given.problem.score = 4;
  given.problem.renormalize = 0; /* as specs want it: weights are used as they come */
  package_set_init(&shared);
  package_set_add(&shared, 1, 8);
  shared.problem.shared_experts = 256 + 1;
  package_set_init(&two);
  package_set_add(&two, 1, 8);
  other = fixture_problem();
  other.top_k = 3;
  *package_set_add(&two, 1, 4) = two.items[0];
  two.items[1].problem = &other;
  two.items[1].shape_name = "other";
  two.items[1].tokens_max = 4;
  return write_set(&fixture, folder, "fixture.moeforge") || write_set(&gap, folder, "gap.moeforge") || write_set(&given, folder, "given.moeforge") ||
         write_set(&shared, folder, "shared.moeforge") || write_set(&two, folder, "two.moeforge");
}

static int write_tiny(const char *folder)
{
  static struct package_set set;
  const struct family_ops *family = family_find("stream");
  struct device_info dev;
  struct schedule schedule;
  struct package_item *item;
  struct error err = {.text = ""};
  char cubin[128];
  package_set_init(&set);
  set.problem.experts = set.problem.expert_count = 64;
  set.problem.hidden = 1024;
  set.problem.intermediate = 256;
  set.devices[0].shared_bytes_per_cta = 232448;
  dev = set.devices[0];
  item = package_set_add(&set, 1, 8);
  family->default_schedule(&set.problem, 1, &dev, &schedule);
  if(family->recipe(&set.problem, &schedule, &dev, &set.recipes[0], &err) != MF_OK) {
    fprintf(stderr, "python_packages: %s\n", err.text);
    return 1;
  }
  snprintf(cubin, sizeof(cubin), "FAKECUBIN %s %zu 128 128\n", family->kernel, sizeof(struct mf_stream_params));
  item->cubin = (const unsigned char *)cubin;
  item->cubin_bytes = strlen(cubin);
  item->shape_name = "tiny";
  item->routed_scaling = 1;
  return write_set(&set, folder, "tiny.moeforge");
}

int main(int argc, char **argv)
{
  if(argc != 2) {
    fprintf(stderr, "usage: python_packages FOLDER\n");
    return 2;
  }
  return write_fixtures(argv[1]) || write_tiny(argv[1]);
}
