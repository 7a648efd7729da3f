/* package_rewrite.c - see package_rewrite.h. The old sections are copied as they are; only their places, and with them the table and the header, are new. */
#include "package_rewrite.h"
#include "package_file.h"
#include "sha256.h"

#include <stdlib.h>
#include <string.h>

static void hash(const void *bytes, size_t count, unsigned char digest[PACKAGE_HASH_BYTES])
{
  struct sha256 ctx;
  sha256_init(&ctx);
  sha256_add(&ctx, bytes, count);
  sha256_end(&ctx, digest);
}

/* Places the old sections and the text; returns the size of the new file. */
static uint64_t place(const unsigned char *bytes, size_t text_bytes, struct package_section table[PACKAGE_MAX_SECTIONS])
{
  uint64_t end = sizeof(struct package_header) + PACKAGE_MAX_SECTIONS * sizeof(*table);
  memcpy(table, bytes + sizeof(struct package_header), PACKAGE_SECTIONS * sizeof(*table));
  table[PACKAGE_QUALIFICATION - 1] = (struct package_section){.kind = PACKAGE_QUALIFICATION, .bytes = text_bytes};
  for(uint32_t i = 0; i < PACKAGE_MAX_SECTIONS; i++) {
    table[i].offset = package_align(end);
    end = table[i].offset + table[i].bytes;
  }
  return end;
}

static void put_header(const struct package_section table[PACKAGE_MAX_SECTIONS], uint64_t size, unsigned char *out)
{
  struct package_header head = {.version = PACKAGE_VERSION_QUALIFIED, .sections = PACKAGE_MAX_SECTIONS, .file_bytes = size};
  memcpy(head.magic, PACKAGE_MAGIC, sizeof(head.magic));
  memcpy(out, &head, sizeof(head));
  memcpy(out + sizeof(head), table, PACKAGE_MAX_SECTIONS * sizeof(*table));
  hash(out, sizeof(head) + PACKAGE_MAX_SECTIONS * sizeof(*table), head.hash);
  memcpy(out, &head, sizeof(head));
}

static enum mf_status check_readable(const unsigned char *bytes, size_t size, struct error *err)
{
  unsigned char *copy = malloc(size + 1);
  struct mf_package *pkg = NULL;
  char why[200];
  if(copy == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  memcpy(copy, bytes, size);
  if(package_parse(copy, size, &pkg, why, sizeof(why)) != MF_OK)
    return error_set(err, MF_ERR_INTERNAL, "the package that was made cannot be read back (%s): please report this", why);
  mf_package_close(pkg);
  return MF_OK;
}

enum mf_status package_with_qualification(const unsigned char *bytes, const char *json, unsigned char **out, size_t *out_size,
                                          struct error *err)
{
  struct package_section table[PACKAGE_MAX_SECTIONS], old[PACKAGE_SECTIONS];
  const size_t text_bytes = strlen(json) + 1;
  const uint64_t total = place(bytes, text_bytes, table);
  unsigned char *made = calloc(1, (size_t)total);
  enum mf_status rc;
  *out = NULL;
  *out_size = 0;
  if(made == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  memcpy(old, bytes + sizeof(struct package_header), sizeof(old));
  for(uint32_t i = 0; i < PACKAGE_SECTIONS; i++)
    memcpy(made + table[i].offset, bytes + old[i].offset, (size_t)old[i].bytes);
  memcpy(made + table[PACKAGE_QUALIFICATION - 1].offset, json, text_bytes);
  hash(json, text_bytes, table[PACKAGE_QUALIFICATION - 1].hash);
  put_header(table, total, made);
  rc = check_readable(made, (size_t)total, err);
  if(rc != MF_OK) {
    free(made);
    return rc;
  }
  *out = made;
  *out_size = (size_t)total;
  return MF_OK;
}
