/* package_write.c - lays out and writes package files; runtime/package_format.h has the layout.
 *
 *   items --sort--> entries, each with the index of its recipe and cubin (equal ones stored once)
 *         --lay out--> sections, their hashes, the header's hash  --> bytes
 *         --package_parse()--> what this program writes, the runtime reads: checked before it is handed out */
#include "package_write.h"
#include "files.h"
#include "package_file.h"
#include "package_json.h"
#include "recipe.h"
#include "sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What is collected before it is laid out. */
struct draft {
  const struct package_item **items; /* sorted */
  struct package_entry *entries;     /* one per item */
  const struct mf_recipe **recipes;  /* distinct */
  size_t *cubins;                    /* distinct: index of an item that has it */
  size_t count, nrecipes, ncubins;
  char *json[PACKAGE_SECTIONS];      /* by section, NULL for records */
};

int package_min_driver(int nvrtc_version)
{
  return nvrtc_version / 1000 * 1000;
}

/* ---- items to entries ---- */
static int compare_items(const void *a, const void *b)
{
  const struct package_item *x = *(const struct package_item *const *)a, *y = *(const struct package_item *const *)b;
  int order = strcmp(x->shape_name, y->shape_name);
  if(order == 0)
    order = strcmp(x->device->name, y->device->name);
  if(order == 0)
    order = (x->device->sms > y->device->sms) - (x->device->sms < y->device->sms);
  if(order == 0)
    order = (x->tokens_min > y->tokens_min) - (x->tokens_min < y->tokens_min);
  return order != 0 ? order : strcmp(x->schedule, y->schedule);
}

static enum mf_status check_item(const struct package_item *it, bool allow_predicted, struct error *err)
{
  if(it->predicted && !allow_predicted)
    return error_set(err, MF_REJECTED,
                     "%s on %s, tokens %d-%d: the winner is only predicted, not measured: tune on that GPU first, or export with --allow-predicted",
                     it->shape_name, it->device->name, it->tokens_min, it->tokens_max);
  if(it->check != NULL && !it->check->passed)
    return error_set(err, MF_REJECTED, "%s on %s, tokens %d-%d: the winner failed its check (%s): tune again", it->shape_name, it->device->name,
                     it->tokens_min, it->tokens_max, it->check->detail);
  if(recipe_validate(it->recipe, sizeof(*it->recipe)) != MF_OK || it->cubin_bytes == 0)
    return error_set(err, MF_ERR_STORE, "%s, schedule %s: the stored recipe or cubin is damaged: tune again", it->shape_name, it->schedule);
  if(!package_cubin_good(it->cubin, it->cubin_bytes) || !package_cubin_takes(it->cubin, it->cubin_bytes, it->recipe))
    return error_set(err, MF_ERR_STORE, "%s, schedule %s: the stored cubin is damaged, or is not the recipe's: tune again", it->shape_name, it->schedule);
  if(it->tokens_min < 1 || it->tokens_max < it->tokens_min || (uint32_t)it->tokens_min < it->recipe->tokens_min ||
     (uint32_t)it->tokens_max > it->recipe->tokens_max)
    return error_set(err, MF_ERR_STORE, "%s, schedule %s: tokens %d-%d, but the kernel takes %u-%u: tune again", it->shape_name, it->schedule,
                     it->tokens_min, it->tokens_max, it->recipe->tokens_min, it->recipe->tokens_max);
  return MF_OK;
}

static bool same_target(const struct package_entry *a, const struct package_entry *b)
{
  return package_problem_equal(&a->problem, &b->problem) && strcmp(a->device_name, b->device_name) == 0 && a->sms == b->sms;
}

/* Two winners for one token count would make the choice depend on the order. */
static enum mf_status check_overlap(const struct draft *d, struct error *err)
{
  for(size_t i = 0; i < d->count; i++)
    for(size_t k = 0; k < i; k++)
      if(same_target(&d->entries[i], &d->entries[k]) && d->entries[i].tokens_min <= d->entries[k].tokens_max &&
         d->entries[k].tokens_min <= d->entries[i].tokens_max)
        return error_set(err, MF_ERR_STORE, "%s and %s on %s are the same problem and both have a winner for %d tokens: export one of them",
                         d->entries[k].shape_name, d->entries[i].shape_name, d->entries[i].device_name,
                         d->entries[i].tokens_min > d->entries[k].tokens_min ? d->entries[i].tokens_min : d->entries[k].tokens_min);
  return MF_OK;
}

static uint32_t recipe_index(struct draft *d, const struct mf_recipe *recipe)
{
  size_t i = 0;
  while(i < d->nrecipes && memcmp(d->recipes[i], recipe, sizeof(*recipe)) != 0)
    i++;
  if(i == d->nrecipes)
    d->recipes[d->nrecipes++] = recipe;
  return (uint32_t)i;
}

static uint32_t cubin_index(struct draft *d, size_t item)
{
  const struct package_item *it = d->items[item];
  size_t i = 0;
  while(i < d->ncubins &&
        (d->items[d->cubins[i]]->cubin_bytes != it->cubin_bytes || memcmp(d->items[d->cubins[i]]->cubin, it->cubin, it->cubin_bytes) != 0))
    i++;
  if(i == d->ncubins)
    d->cubins[d->ncubins++] = item;
  return (uint32_t)i;
}

static enum mf_status set_name(char *out, size_t space, const char *text, struct error *err)
{
  if(strlen(text) >= space)
    return error_set(err, MF_ERR_STORE, "name \"%s\": longer than the %zu characters that a package holds", text, space - 1);
  memcpy(out, text, strlen(text) + 1);
  if(!package_text_good(out, space))
    return error_set(err, MF_ERR_STORE, "name \"%s\": expected printable ASCII", text);
  return MF_OK;
}

static enum mf_status make_entry(struct draft *d, size_t index, struct error *err)
{
  const struct package_item *it = d->items[index];
  struct package_entry *e = &d->entries[index];
  enum mf_status rc;
  package_problem_set(it->problem, &e->problem);
  e->routed_scaling = (float)it->routed_scaling;
  e->cc_major = it->device->cc_major;
  e->cc_minor = it->device->cc_minor;
  e->sms = it->device->sms;
  e->l2_bytes = it->device->l2_bytes;
  e->min_driver = package_min_driver(it->nvrtc_version);
  e->tokens_min = it->tokens_min;
  e->tokens_max = it->tokens_max;
  e->recipe = recipe_index(d, it->recipe);
  e->cubin = cubin_index(d, index);
  e->flags = (it->predicted ? PACKAGE_PREDICTED : 0) | (it->device->emulated ? PACKAGE_EMULATED : 0);
  e->us = it->predicted ? 0 : it->us;
  e->floor_us = it->predicted ? 0 : it->floor_us;
  rc = set_name(e->device_name, sizeof(e->device_name), it->device->name, err);
  if(rc == MF_OK)
    rc = set_name(e->shape_name, sizeof(e->shape_name), it->shape_name, err);
  return rc == MF_OK ? set_name(e->schedule, sizeof(e->schedule), it->schedule, err) : rc;
}

static enum mf_status draft_fill(struct draft *d, bool allow_predicted, struct error *err)
{
  enum mf_status rc = MF_OK;
  qsort(d->items, d->count, sizeof(const struct package_item *), compare_items);
  for(size_t i = 0; rc == MF_OK && i < d->count; i++) {
    rc = check_item(d->items[i], allow_predicted, err);
    if(rc == MF_OK)
      rc = make_entry(d, i, err);
  }
  if(rc == MF_OK)
    rc = check_overlap(d, err);
  if(rc != MF_OK)
    return rc;
  d->json[PACKAGE_MANIFEST - 1] = package_manifest_text(d->items, d->count);
  d->json[PACKAGE_VALIDATION - 1] = package_validation_text(d->items, d->count);
  d->json[PACKAGE_PROVENANCE - 1] = package_provenance_text(d->items, d->count);
  return d->json[PACKAGE_MANIFEST - 1] == NULL || d->json[PACKAGE_VALIDATION - 1] == NULL || d->json[PACKAGE_PROVENANCE - 1] == NULL
             ? error_set(err, MF_ERR_NOMEM, "out of memory while writing the manifest")
             : MF_OK;
}

/* ---- entries to bytes ---- */
static uint64_t cubins_bytes(const struct draft *d)
{
  uint64_t end = d->ncubins * sizeof(struct package_cubin);
  for(size_t i = 0; i < d->ncubins; i++)
    end = package_align(end) + d->items[d->cubins[i]]->cubin_bytes;
  return end;
}

static void put_cubins(const struct draft *d, unsigned char *section)
{
  uint64_t end = d->ncubins * sizeof(struct package_cubin);
  for(size_t i = 0; i < d->ncubins; i++) {
    const struct package_item *it = d->items[d->cubins[i]];
    const struct package_cubin record = {.offset = package_align(end), .bytes = it->cubin_bytes};
    memcpy(section + i * sizeof(record), &record, sizeof(record));
    memcpy(section + record.offset, it->cubin, it->cubin_bytes);
    end = record.offset + record.bytes;
  }
}

static void place_sections(const struct draft *d, struct package_section table[PACKAGE_SECTIONS], uint64_t *size)
{
  const uint64_t bytes[PACKAGE_SECTIONS] = {[PACKAGE_ENTRIES - 1] = d->count * sizeof(struct package_entry),
                                            [PACKAGE_RECIPES - 1] = d->nrecipes * sizeof(struct mf_recipe),
                                            [PACKAGE_CUBINS - 1] = cubins_bytes(d)};
  const uint32_t counts[PACKAGE_SECTIONS] = {
      [PACKAGE_ENTRIES - 1] = (uint32_t)d->count, [PACKAGE_RECIPES - 1] = (uint32_t)d->nrecipes, [PACKAGE_CUBINS - 1] = (uint32_t)d->ncubins};
  static const uint32_t record_bytes[PACKAGE_MAX_SECTIONS] = {
#define RECORD_BYTES(name, number, text, record) record,
      PACKAGE_SECTION_TABLE(RECORD_BYTES)
#undef RECORD_BYTES
  };
  uint64_t end = sizeof(struct package_header) + PACKAGE_SECTIONS * sizeof(struct package_section);
  for(uint32_t i = 0; i < PACKAGE_SECTIONS; i++) {
    table[i] = (struct package_section){.kind = i + 1, .count = counts[i], .record_bytes = record_bytes[i], .offset = package_align(end)};
    table[i].bytes = d->json[i] != NULL ? strlen(d->json[i]) + 1 : bytes[i];
    end = table[i].offset + table[i].bytes;
  }
  *size = end;
}

static void put_sections(const struct draft *d, struct package_section table[PACKAGE_SECTIONS], unsigned char *out)
{
  memcpy(out + table[PACKAGE_ENTRIES - 1].offset, d->entries, d->count * sizeof(*d->entries));
  for(size_t i = 0; i < d->nrecipes; i++)
    memcpy(out + table[PACKAGE_RECIPES - 1].offset + i * sizeof(struct mf_recipe), d->recipes[i], sizeof(struct mf_recipe));
  put_cubins(d, out + table[PACKAGE_CUBINS - 1].offset);
  for(uint32_t i = 0; i < PACKAGE_SECTIONS; i++) {
    struct sha256 ctx;
    if(d->json[i] != NULL)
      memcpy(out + table[i].offset, d->json[i], (size_t)table[i].bytes);
    sha256_init(&ctx);
    sha256_add(&ctx, out + table[i].offset, (size_t)table[i].bytes);
    sha256_end(&ctx, table[i].hash);
  }
}

static void put_header(const struct package_section table[PACKAGE_SECTIONS], uint64_t size, unsigned char *out)
{
  struct package_header head = {.version = PACKAGE_VERSION, .sections = PACKAGE_SECTIONS, .file_bytes = size};
  struct sha256 ctx;
  memcpy(head.magic, PACKAGE_MAGIC, sizeof(head.magic));
  sha256_init(&ctx);
  sha256_add(&ctx, &head, sizeof(head));
  sha256_add(&ctx, table, PACKAGE_SECTIONS * sizeof(*table));
  sha256_end(&ctx, head.hash);
  memcpy(out, &head, sizeof(head));
  memcpy(out + sizeof(head), table, PACKAGE_SECTIONS * sizeof(*table));
}

/* Reads back what was made. */
static enum mf_status check_readable(const unsigned char *bytes, size_t size, struct error *err)
{
  unsigned char *copy = malloc(size);
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

static enum mf_status draft_lay_out(const struct draft *d, unsigned char **bytes, size_t *size, struct error *err)
{
  struct package_section table[PACKAGE_SECTIONS];
  uint64_t total;
  unsigned char *out;
  enum mf_status rc;
  place_sections(d, table, &total);
  if(total > PACKAGE_MAX_BYTES || d->count > PACKAGE_MAX_RECORDS)
    return error_set(err, MF_ERR_STORE, "the package would have %llu bytes and %zu entries, %llu and %u are allowed: export fewer shapes at once",
                     (unsigned long long)total, d->count, (unsigned long long)PACKAGE_MAX_BYTES, PACKAGE_MAX_RECORDS);
  out = calloc(1, (size_t)total);
  if(out == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  put_sections(d, table, out);
  put_header(table, total, out);
  rc = check_readable(out, (size_t)total, err);
  if(rc != MF_OK) {
    free(out);
    return rc;
  }
  *bytes = out;
  *size = (size_t)total;
  return MF_OK;
}

enum mf_status package_build(const struct package_item *items, size_t count, bool allow_predicted, unsigned char **bytes, size_t *size, struct error *err)
{
  struct draft d = {.count = count};
  enum mf_status rc;
  d.items = calloc(count + 1, sizeof(const struct package_item *));
  d.entries = calloc(count + 1, sizeof(*d.entries));
  d.recipes = calloc(count + 1, sizeof(const struct mf_recipe *));
  d.cubins = calloc(count + 1, sizeof(*d.cubins));
  *bytes = NULL;
  *size = 0;
  if(d.items == NULL || d.entries == NULL || d.recipes == NULL || d.cubins == NULL) {
    rc = error_set(err, MF_ERR_NOMEM, "out of memory");
    goto out;
  }
  for(size_t i = 0; i < count; i++)
    d.items[i] = &items[i];
  rc = draft_fill(&d, allow_predicted, err);
  if(rc == MF_OK)
    rc = draft_lay_out(&d, bytes, size, err);
out:
  for(uint32_t i = 0; i < PACKAGE_SECTIONS; i++)
    free(d.json[i]);
  free(d.items);
  free(d.entries);
  free(d.recipes);
  free(d.cubins);
  return rc;
}

/* ---- the file ---- */
static bool write_fully(int fd, const unsigned char *bytes, size_t size)
{
  while(size > 0) {
    const ssize_t n = write(fd, bytes, size);
    if(n < 0 && errno != EINTR)
      return false;
    bytes += n > 0 ? n : 0;
    size -= n > 0 ? (size_t)n : 0;
  }
  return true;
}

/* Makes the rename durable; a file system that cannot do it is not an error. */
static void sync_folder(const char *path)
{
  char folder[PATH_MAX];
  const char *slash = strrchr(path, '/');
  int fd;
  snprintf(folder, sizeof(folder), "%.*s", slash != NULL ? (int)(slash - path) + 1 : 1, slash != NULL ? path : ".");
  fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if(fd >= 0) {
    fsync(fd);
    close(fd);
  }
}

enum mf_status package_write_file(const char *path, const unsigned char *bytes, size_t size, struct error *err)
{
  char real[PATH_MAX], temporary[PATH_MAX + 8];
  const mode_t mask = umask(0);
  int fd, problem = 0;
  const enum mf_status rc = file_target(path, real, sizeof(real), err);
  umask(mask);
  if(rc != MF_OK)
    return rc;
  snprintf(temporary, sizeof(temporary), "%s.XXXXXX", real);
  fd = mkstemp(temporary);
  if(fd < 0)
    return error_errno(err, MF_ERR_IO, errno, "%s: cannot create a file beside it", path);
  if(!write_fully(fd, bytes, size) || fchmod(fd, 0666 & ~mask) != 0 || fsync(fd) != 0)
    problem = errno;
  if(close(fd) != 0 && problem == 0)
    problem = errno;
  if(problem == 0 && rename(temporary, real) != 0)
    problem = errno;
  if(problem != 0) {
    unlink(temporary);
    return error_errno(err, MF_ERR_IO, problem, "%s: cannot write it", path);
  }
  sync_folder(real);
  return MF_OK;
}
