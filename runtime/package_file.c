/* package_file.c - opens package files; see package_file.h and package_format.h.
 *
 * The file is read into memory instead of being mapped: a mapped file that somebody truncates kills the process, and a package is a few megabytes.
 * Checks go from the outside in: magic, version, size, header hash; then each section's place, gap, hash; then records; then what records point to. */
#include "package_file.h"
#include "recipe.h"
#include "sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What the parsing functions share. */
struct reader {
  unsigned char *bytes;
  size_t size;
  char *why;
  size_t why_bytes;
};

static enum mf_status refuse(const struct reader *rd, enum mf_status status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static enum mf_status refuse(const struct reader *rd, enum mf_status status, const char *fmt, ...)
{
  va_list args;
  if(rd->why == NULL)
    return status;
  va_start(args, fmt);
  vsnprintf(rd->why, rd->why_bytes, fmt, args);
  va_end(args);
  return status;
}

static const struct section_rule {
  uint32_t kind, record_bytes;
  const char *name;
} section_rules[PACKAGE_MAX_SECTIONS] = {
#define SECTION_RULE(name, number, text, record) {number, record, text},
    PACKAGE_SECTION_TABLE(SECTION_RULE)
#undef SECTION_RULE
};

static int all_zero(const unsigned char *bytes, size_t count)
{
  for(size_t i = 0; i < count; i++)
    if(bytes[i] != 0)
      return 0;
  return 1;
}

int package_text_good(const char *text, size_t space)
{
  for(size_t i = 0; i < space; i++) {
    if(text[i] == '\0')
      return 1;
    if(text[i] < ' ' || text[i] > '~')
      return 0;
  }
  return 0;
}

/* ---- header and sections ---- */
static enum mf_status check_header(const struct reader *rd, uint32_t *nsections)
{
  struct package_header head;
  size_t covered;
  struct sha256 ctx;
  unsigned char expected[PACKAGE_HASH_BYTES], digest[PACKAGE_HASH_BYTES];
  if(rd->size < sizeof(head) || memcmp(rd->bytes, PACKAGE_MAGIC, 8) != 0)
    return refuse(rd, MF_ERR_CORRUPT, "not a moeforge package (no magic \"%s\" at its start)", PACKAGE_MAGIC);
  memcpy(&head, rd->bytes, sizeof(head));
  if(head.version > PACKAGE_VERSION_QUALIFIED)
    return refuse(rd, MF_ERR_NEWER_FORMAT, "format version %u, this library reads up to %u: update it, or export again with the older tool", head.version,
                  PACKAGE_VERSION_QUALIFIED);
  *nsections = package_sections(head.version);
  covered = sizeof(struct package_header) + *nsections * sizeof(struct package_section);
  if(head.version == 0 || head.sections != *nsections || rd->size < covered)
    return refuse(rd, MF_ERR_CORRUPT, "damaged header");
  if(head.file_bytes != rd->size)
    return refuse(rd, MF_ERR_CORRUPT, "the file has %zu bytes, its header says %llu: truncated or appended to", rd->size,
                  (unsigned long long)head.file_bytes);
  memcpy(expected, head.hash, sizeof(expected));
  memset(head.hash, 0, sizeof(head.hash));
  sha256_init(&ctx);
  sha256_add(&ctx, &head, sizeof(head));
  sha256_add(&ctx, rd->bytes + sizeof(head), covered - sizeof(head));
  sha256_end(&ctx, digest);
  if(memcmp(digest, expected, sizeof(digest)) != 0)
    return refuse(rd, MF_ERR_CORRUPT, "header: SHA-256 differs");
  return MF_OK;
}

/* One section: where it must lie, how large it may be, its hash. *end is the end of what comes before it, and then its own. */
static enum mf_status check_section(const struct reader *rd, const struct section_rule *rule, const struct package_section *s, uint64_t *end)
{
  unsigned char digest[PACKAGE_HASH_BYTES];
  struct sha256 ctx;
  if(s->kind != rule->kind || s->record_bytes != rule->record_bytes || s->reserved != 0 || s->count > PACKAGE_MAX_RECORDS)
    return refuse(rd, MF_ERR_CORRUPT, "section %s: damaged table row", rule->name);
  if(s->offset != package_align(*end) || s->offset > rd->size || s->bytes > rd->size - s->offset || s->bytes < (uint64_t)s->count * s->record_bytes)
    return refuse(rd, MF_ERR_CORRUPT, "section %s: does not fit into the file", rule->name);
  if(!all_zero(rd->bytes + *end, (size_t)(s->offset - *end)))
    return refuse(rd, MF_ERR_CORRUPT, "section %s: bytes in the gap before it", rule->name);
  sha256_init(&ctx);
  sha256_add(&ctx, rd->bytes + s->offset, (size_t)s->bytes);
  sha256_end(&ctx, digest);
  if(memcmp(digest, s->hash, sizeof(digest)) != 0)
    return refuse(rd, MF_ERR_CORRUPT, "section %s: SHA-256 differs", rule->name);
  *end = s->offset + s->bytes;
  return MF_OK;
}

static enum mf_status check_sections(const struct reader *rd, struct package_section *table, uint32_t nsections)
{
  uint64_t end = sizeof(struct package_header) + nsections * sizeof(struct package_section);
  enum mf_status rc = MF_OK;
  memcpy(table, rd->bytes + sizeof(struct package_header), nsections * sizeof(*table));
  for(uint32_t i = 0; rc == MF_OK && i < nsections; i++)
    rc = check_section(rd, &section_rules[i], &table[i], &end);
  if(rc == MF_OK && end != rd->size)
    rc = refuse(rd, MF_ERR_CORRUPT, "%llu bytes after the last section", (unsigned long long)(rd->size - end));
  return rc;
}

/* ---- records ---- */
static int problem_good(const struct package_problem *p)
{
  const struct {
    int32_t have, low, high;
  } bounds[] = {
      {p->experts, 1, 65536},   {p->top_k, 1, 1024},         {p->hidden, 1, 1 << 20},    {p->intermediate, 1, 1 << 20},
      {p->intermediate_offset, 0, 127}, {p->expert_begin, 0, p->experts}, {p->expert_count, 0, p->experts}, {p->zero_experts, 0, 65536},
      {p->shared_experts, 0, 1024}, {p->groups, 0, p->experts}, {p->groups_kept, 0, p->experts},
  };
  for(size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++)
    if(bounds[i].have < bounds[i].low || bounds[i].have > bounds[i].high)
      return 0;
  return isfinite(p->swiglu_limit) && isfinite(p->swiglu_alpha);
}

static int entry_good(const struct mf_package *pkg, const struct package_entry *e)
{
  const uint32_t known_flags = PACKAGE_PREDICTED | PACKAGE_EMULATED;
  if(!problem_good(&e->problem) || !isfinite(e->routed_scaling) || e->sms < 1 || e->reserved != 0 || (e->flags & ~known_flags) != 0)
    return 0;
  if(e->recipe >= pkg->nrecipes || e->cubin >= pkg->ncubins || e->tokens_min < 1 || e->tokens_max < e->tokens_min)
    return 0;
  if((uint32_t)e->tokens_min < pkg->recipes[e->recipe].tokens_min || (uint32_t)e->tokens_max > pkg->recipes[e->recipe].tokens_max)
    return 0;
  return package_text_good(e->device_name, sizeof(e->device_name)) && package_text_good(e->shape_name, sizeof(e->shape_name)) &&
         package_text_good(e->schedule, sizeof(e->schedule)) && isfinite(e->us) && isfinite(e->floor_us);
}

static enum mf_status check_cubins(const struct reader *rd, const struct mf_package *pkg, const struct package_section *s)
{
  uint64_t end = (uint64_t)s->count * sizeof(struct package_cubin);
  for(uint32_t i = 0; i < pkg->ncubins; i++) {
    const struct package_cubin *c = &pkg->cubins[i];
    if(c->offset != package_align(end) || c->offset > s->bytes || c->bytes < 1 || c->bytes > s->bytes - c->offset)
      return refuse(rd, MF_ERR_CORRUPT, "cubin %u: does not fit into its section", i);
    if(!all_zero(rd->bytes + s->offset + end, (size_t)(c->offset - end)))
      return refuse(rd, MF_ERR_CORRUPT, "cubin %u: bytes in the gap before it", i);
    if(!package_cubin_good(rd->bytes + s->offset + c->offset, c->bytes))
      return refuse(rd, MF_ERR_CORRUPT, "cubin %u: no whole ELF image", i);
    end = c->offset + c->bytes;
  }
  return end == s->bytes ? MF_OK : refuse(rd, MF_ERR_CORRUPT, "section cubins: bytes after the last one");
}

static enum mf_status check_json(const struct reader *rd, const struct section_rule *rule, const struct package_section *s, const char **out)
{
  const char *text = (const char *)rd->bytes + s->offset;
  if(s->count != 0 || s->bytes < 3 || strnlen(text, (size_t)s->bytes) != s->bytes - 1)
    return refuse(rd, MF_ERR_CORRUPT, "section %s: not a NUL-terminated text", rule->name);
  *out = text;
  return MF_OK;
}

/* Do the entry's recipe and cubin fit each other? Each may be good on its own. Both were checked. */
static int kernel_takes(const struct mf_package *pkg, const struct package_entry *e)
{
  return package_cubin_takes(package_cubin(pkg, e->cubin), pkg->cubins[e->cubin].bytes, &pkg->recipes[e->recipe]);
}

static enum mf_status check_records(const struct reader *rd, const struct mf_package *pkg, const struct package_section *table)
{
  const struct package_section *entries = &table[PACKAGE_ENTRIES - 1], *recipes = &table[PACKAGE_RECIPES - 1];
  enum mf_status rc = MF_OK;
  if(entries->bytes != (uint64_t)entries->count * entries->record_bytes || recipes->bytes != (uint64_t)recipes->count * recipes->record_bytes)
    return refuse(rd, MF_ERR_CORRUPT, "sections entries, recipes: not a whole number of records");
  for(uint32_t i = 0; rc == MF_OK && i < pkg->nrecipes; i++) {
    rc = recipe_validate(&pkg->recipes[i], sizeof(pkg->recipes[i]));
    if(rc != MF_OK)
      refuse(rd, rc, "recipe %u: %s", i, rc == MF_ERR_NEWER_FORMAT ? "newer version" : "a value out of its bounds");
  }
  for(uint32_t i = 0; rc == MF_OK && i < pkg->nentries; i++)
    if(!entry_good(pkg, &pkg->entries[i]))
      rc = refuse(rd, MF_ERR_CORRUPT, "entry %u: a value out of its bounds", i);
    else if(!kernel_takes(pkg, &pkg->entries[i]))
      rc = refuse(rd, MF_ERR_CORRUPT, "entry %u: the kernel in cubin %u takes other parameters than recipe %u passes", i, pkg->entries[i].cubin,
                  pkg->entries[i].recipe);
  return rc;
}

/* ---- the whole ---- */
static enum mf_status parse(const struct reader *rd, struct mf_package *pkg)
{
  const char **const json[PACKAGE_MAX_SECTIONS] = {[PACKAGE_MANIFEST - 1] = &pkg->manifest, [PACKAGE_VALIDATION - 1] = &pkg->validation,
                                                   [PACKAGE_PROVENANCE - 1] = &pkg->provenance, [PACKAGE_QUALIFICATION - 1] = &pkg->qualification};
  struct package_section table[PACKAGE_MAX_SECTIONS] = {{.kind = 0}};
  uint32_t nsections = 0;
  enum mf_status rc = check_header(rd, &nsections);
  if(rc == MF_OK)
    rc = check_sections(rd, table, nsections);
  for(uint32_t i = 0; rc == MF_OK && i < nsections; i++)
    if(json[i] != NULL)
      rc = check_json(rd, &section_rules[i], &table[i], json[i]);
  if(rc != MF_OK)
    return rc;
  pkg->entries = (const void *)(rd->bytes + table[PACKAGE_ENTRIES - 1].offset);
  pkg->recipes = (const void *)(rd->bytes + table[PACKAGE_RECIPES - 1].offset);
  pkg->cubins = (const void *)(rd->bytes + table[PACKAGE_CUBINS - 1].offset);
  pkg->nentries = table[PACKAGE_ENTRIES - 1].count;
  pkg->nrecipes = table[PACKAGE_RECIPES - 1].count;
  pkg->ncubins = table[PACKAGE_CUBINS - 1].count;
  rc = check_cubins(rd, pkg, &table[PACKAGE_CUBINS - 1]);
  return rc == MF_OK ? check_records(rd, pkg, table) : rc;
}

enum mf_status package_parse(unsigned char *bytes, size_t size, struct mf_package **out, char *why, size_t why_bytes)
{
  struct reader rd = {.size = size, .why = why, .why_bytes = why_bytes};
  struct mf_package *pkg = calloc(1, sizeof(*pkg));
  enum mf_status rc;
  *out = NULL;
  rd.bytes = size < SIZE_MAX ? realloc(bytes, size + 1) : NULL;
  if(rd.bytes != NULL)
    bytes = rd.bytes;
  if(pkg == NULL || rd.bytes == NULL) {
    free(pkg);
    free(bytes);
    return refuse(&rd, MF_ERR_NOMEM, "out of memory");
  }
  bytes[size] = '\0';
  rc = parse(&rd, pkg);
  if(rc != MF_OK) {
    free(pkg);
    free(bytes);
    return rc;
  }
  pkg->bytes = bytes;
  pkg->size = size;
  *out = pkg;
  return MF_OK;
}

/* Reads until 'size' bytes or the end of the file; returns how many. */
static size_t read_fully(int fd, unsigned char *bytes, size_t size)
{
  size_t have = 0;
  while(have < size) {
    const ssize_t n = read(fd, bytes + have, size - have);
    if(n == 0 || (n < 0 && errno != EINTR))
      break;
    have += n > 0 ? (size_t)n : 0;
  }
  return have;
}

/* The bytes of an open file, in *bytes (malloc) if all is well. */
static enum mf_status read_open_file(const struct reader *rd, int fd, unsigned char **bytes, size_t *size)
{
  struct stat st;
  if(fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
    return refuse(rd, MF_ERR_IO, "not a regular file");
  if((uint64_t)st.st_size > PACKAGE_MAX_BYTES)
    return refuse(rd, MF_ERR_CORRUPT, "larger than any package (%llu bytes)", (unsigned long long)PACKAGE_MAX_BYTES);
  *size = (size_t)st.st_size;
  *bytes = malloc(*size + 1);
  if(*bytes == NULL)
    return refuse(rd, MF_ERR_NOMEM, "out of memory");
  if(read_fully(fd, *bytes, *size) == *size)
    return MF_OK;
  free(*bytes);
  *bytes = NULL;
  return refuse(rd, MF_ERR_IO, "cannot read it to its end");
}

enum mf_status package_read_bytes(const char *path, unsigned char **bytes, size_t *size, char *why, size_t why_bytes)
{
  const struct reader rd = {.why = why, .why_bytes = why_bytes};
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe is refused, not waited for */
  enum mf_status rc;
  *bytes = NULL;
  *size = 0;
  if(fd < 0)
    return refuse(&rd, MF_ERR_IO, "cannot open it: %s", strerror(errno));
  rc = read_open_file(&rd, fd, bytes, size);
  close(fd);
  return rc;
}

enum mf_status package_read(const char *path, struct mf_package **out, char *why, size_t why_bytes)
{
  unsigned char *bytes;
  size_t size;
  const enum mf_status rc = package_read_bytes(path, &bytes, &size, why, why_bytes);
  *out = NULL;
  return rc == MF_OK ? package_parse(bytes, size, out, why, why_bytes) : rc;
}

const void *package_cubin(const struct mf_package *pkg, uint32_t index)
{
  return (const unsigned char *)pkg->cubins + pkg->cubins[index].offset;
}
