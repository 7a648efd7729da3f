/* make_package.c - writes the fixtures' package to a file: for programs that use the library's public API alone, and as the first seed for fuzzing.
 *
 *   make_package FILE [RECIPE]     RECIPE: also the bytes of its first recipe */
#include "package_fixture.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
  static struct package_set set;
  struct error err = {.status = MF_OK};
  unsigned char *bytes = NULL;
  size_t size = 0;
  enum mf_status rc;
  if(argc < 2)
    return 2;
  package_set_init(&set);
  package_set_add(&set, 1, 4);
  package_set_add(&set, 5, 8);
  set.recipes[1].workspace_bytes = 30000;
  rc = package_build(set.items, set.count, false, &bytes, &size, &err);
  if(rc == MF_OK)
    rc = package_write_file(argv[1], bytes, size, &err);
  if(rc == MF_OK && argc > 2)
    rc = package_write_file(argv[2], (const unsigned char *)&set.recipes[0], sizeof(set.recipes[0]), &err);
  free(bytes);
  if(rc != MF_OK)
    fprintf(stderr, "make_package: %s\n", err.text);
  return rc == MF_OK ? 0 : 1;
}
