/* package_api.c - the public calls on packages, and the conversions between the file's records and the API's structs. */
#include "package_file.h"

#include <stdlib.h>
#include <string.h>

int struct_is_usable(const void *object, uint32_t struct_size, size_t first_size, size_t known_size)
{
  const unsigned char *bytes = object;
  if(struct_size < first_size)
    return 0;
  for(size_t i = known_size; i < struct_size; i++)
    if(bytes[i] != 0)
      return 0;
  return 1;
}

void package_problem_get(const struct package_problem *stored, struct mf_problem *out)
{
  memset(out, 0, sizeof(*out));
  out->struct_size = sizeof(*out);
#define FIELD_GET(type, name) out->name = stored->name;
  PACKAGE_PROBLEM_TABLE(FIELD_GET)
#undef FIELD_GET
}

void package_problem_set(const struct mf_problem *problem, struct package_problem *out)
{
#define FIELD_SET(type, name) out->name = problem->name;
  PACKAGE_PROBLEM_TABLE(FIELD_SET)
#undef FIELD_SET
}

/* Fills in what 0 stands for. */
static struct package_problem with_defaults(const struct package_problem *problem)
{
  struct package_problem p = *problem;
  if(p.expert_count == 0)
    p.expert_count = p.experts;
  if(p.groups == 0)
    p.groups = 1;
  if(p.groups_kept == 0)
    p.groups_kept = 1;
  if(p.swiglu_alpha == 0)
    p.swiglu_alpha = 1;
  return p;
}

int package_problem_equal(const struct package_problem *a, const struct package_problem *b)
{
  const struct package_problem p = with_defaults(a), q = with_defaults(b);
  int equal = 1;
#define FIELD_EQUAL(type, name) equal &= p.name == q.name;
  PACKAGE_PROBLEM_TABLE(FIELD_EQUAL)
#undef FIELD_EQUAL
  return equal;
}

enum mf_status mf_package_open(const char *path, struct mf_package **out)
{
  if(out == NULL)
    return MF_ERR_USAGE;
  *out = NULL;
  return path == NULL ? MF_ERR_USAGE : package_read(path, out, NULL, 0);
}

enum mf_status mf_package_entry_at(const struct mf_package *pkg, size_t index, struct mf_package_entry *out)
{
  const struct package_entry *e;
  uint32_t struct_size;
  if(pkg == NULL || out == NULL || out->struct_size < sizeof(*out))
    return MF_ERR_USAGE;
  if(index >= pkg->nentries)
    return MF_ERR_NOT_FOUND;
  e = &pkg->entries[index];
  struct_size = out->struct_size;
  memset(out, 0, struct_size);
  out->struct_size = struct_size;
  out->tokens_min = e->tokens_min;
  out->tokens_max = e->tokens_max;
  out->min_driver = e->min_driver;
  out->shape_name = e->shape_name;
  out->device_name = e->device_name;
  out->schedule = e->schedule;
  package_problem_get(&e->problem, &out->problem);
  out->routed_scaling = e->routed_scaling;
  out->us = e->us;
  out->floor_us = e->floor_us;
  return MF_OK;
}

const char *mf_package_manifest(const struct mf_package *pkg)
{
  return pkg != NULL ? pkg->manifest : "{}";
}

void mf_package_close(struct mf_package *pkg)
{
  if(pkg == NULL)
    return;
  free(pkg->bytes);
  free(pkg);
}
