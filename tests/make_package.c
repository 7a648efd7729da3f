/* make_package.c - writes the fixtures' packages: for programs that use the library's public API alone, and as seeds for fuzzing.
 *
 *   make_package FILE                       kernels are texts, as the scripted driver takes them
 *   make_package FILE ELF_FILE RECIPE       also a qualified one whose kernels are ELF images, and the bytes of its first recipe */
#include "fuzz/small_elf.h"
#include "package_fixture.h"
#include "package_rewrite.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static enum mf_status write_package(const struct package_set *set, const char *path, struct error *err)
{
  unsigned char *bytes = NULL;
  size_t size = 0;
  enum mf_status rc = package_build(set->items, set->count, false, &bytes, &size, err);
  if(rc == MF_OK)
    rc = package_write_file(path, bytes, size, err);
  free(bytes);
  return rc;
}

static enum mf_status write_qualified(const struct package_set *set, const char *path, struct error *err)
{
  unsigned char *bytes = NULL, *qualified = NULL;
  size_t size = 0;
  enum mf_status rc = package_build(set->items, set->count, false, &bytes, &size, err);
  if(rc == MF_OK)
    rc = package_with_qualification(bytes, "{\"qualified\": false}", &qualified, &size, err);
  if(rc == MF_OK)
    rc = package_write_file(path, qualified, size, err);
  free(bytes);
  free(qualified);
  return rc;
}

int main(int argc, char **argv)
{
  static struct package_set set;
  static unsigned char image[512];
  struct error err = {.status = MF_OK};
  enum mf_status rc;
  if(argc != 2 && argc != 4)
    return 2;
  package_set_init(&set);
  package_set_add(&set, 1, 4);
  package_set_add(&set, 5, 8);
  set.recipes[1].workspace_bytes = 30000;
  rc = write_package(&set, argv[1], &err);
  for(int i = 0; argc == 4 && i < 2; i++) {
    set.items[i].cubin_bytes = small_elf(image);
    set.items[i].cubin = image;
  }
  if(rc == MF_OK && argc == 4)
    rc = write_qualified(&set, argv[2], &err);
  if(rc == MF_OK && argc == 4)
    rc = package_write_file(argv[3], (const unsigned char *)&set.recipes[0], sizeof(set.recipes[0]), &err);
  if(rc != MF_OK)
    fprintf(stderr, "make_package: %s\n", err.text);
  return rc == MF_OK ? 0 : 1;
}
