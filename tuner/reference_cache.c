/* reference_cache.c - reference results in files; see reference_cached() in check.h.
 *
 *   <dir>/<16 digits of the problem key>-v1-s3f800000-l0-t8-uniform-normal-1.ref
 *
 *   +---------------------+-----------------+-------------------------------------------------------------+
 *   | struct cache_header | SHA-256 of both | active | ids | weights | h | h_unrounded | y | y_unquantised |
 *   +---------------------+-----------------+-------------------------------------------------------------+
 * in the machine's own byte order: a cache belongs to one machine, and a file from elsewhere fails the comparison of the header. The header names
 * everything that the result depends on, so a file that was renamed, or one of another version, is as good as none. Anything that cannot be read
 * back exactly is computed again and replaced. Writers write a temporary file and rename it: readers see the old file or the new one, and of two
 * processes that make the same result at once the later one replaces equal bytes. */
#include "check.h"
#include "datagen.h"
#include "sha256.h"
#include "spec.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CACHE_MAGIC "MFREF\r\n\x1a" /* 8 characters: a transfer as text damages it */
#define DIGEST_BYTES 32

/* Compared as bytes: cleared before it is filled. */
struct cache_header {
  char magic[8];
  uint32_t byte_order;       /* 1 */
  int32_t version;           /* REFERENCE_VERSION */
  char problem[KEY_LEN + 3]; /* problem key */
  uint32_t scaling_bits, layer;
  int32_t tokens, top_k, routing, data;
  uint32_t seed;
  uint64_t payload_bytes;
};

/* One array of a result. */
struct part {
  void *bytes;
  size_t count;
};
#define PARTS 7

static void fill_header(const struct mf_problem *problem, float routed_scaling, uint32_t layer, const struct test_case *tc, struct cache_header *out)
{
  const size_t pairs = (size_t)tc->tokens * (size_t)problem_ranks(problem), n = (size_t)problem->intermediate;
  const size_t y = (size_t)tc->tokens * (size_t)problem->hidden;
  memset(out, 0, sizeof(*out));
  memcpy(out->magic, CACHE_MAGIC, sizeof(out->magic));
  out->byte_order = 1;
  out->version = REFERENCE_VERSION;
  problem_key(problem, out->problem);
  memcpy(&out->scaling_bits, &routed_scaling, sizeof(out->scaling_bits));
  out->layer = layer;
  out->tokens = tc->tokens;
  out->top_k = problem_ranks(problem);
  out->routing = (int32_t)tc->routing;
  out->data = (int32_t)tc->data;
  out->seed = tc->seed;
  out->payload_bytes = sizeof(int) + pairs * (sizeof(int32_t) + sizeof(float)) + pairs * n * (sizeof(uint16_t) + sizeof(float)) +
                       y * 2 * sizeof(float);
}

static void list_parts(const struct cache_header *header, const struct mf_problem *problem, struct reference_result *result, struct part out[PARTS])
{
  const size_t pairs = (size_t)header->tokens * (size_t)header->top_k, n = (size_t)problem->intermediate;
  const size_t y = (size_t)header->tokens * (size_t)problem->hidden;
  out[0] = (struct part){&result->routing.active, sizeof(result->routing.active)};
  out[1] = (struct part){result->routing.ids, pairs * sizeof(result->routing.ids[0])};
  out[2] = (struct part){result->routing.weights, pairs * sizeof(result->routing.weights[0])};
  out[3] = (struct part){result->h, pairs * n * sizeof(result->h[0])};
  out[4] = (struct part){result->h_unrounded, pairs * n * sizeof(result->h_unrounded[0])};
  out[5] = (struct part){result->y, y * sizeof(result->y[0])};
  out[6] = (struct part){result->y_unquantised, y * sizeof(result->y_unquantised[0])};
}

static void digest_of(const struct cache_header *header, const struct part parts[PARTS], unsigned char digest[DIGEST_BYTES])
{
  struct sha256 ctx;
  sha256_init(&ctx);
  sha256_add(&ctx, header, sizeof(*header));
  for(int i = 0; i < PARTS; i++)
    sha256_add(&ctx, parts[i].bytes, parts[i].count);
  sha256_end(&ctx, digest);
}

/* --- Reading --- */

/* Room for a result of the header's size. */
static bool allocate(const struct cache_header *header, const struct mf_problem *problem, struct reference_result *out)
{
  const size_t values = (size_t)header->tokens * (size_t)header->top_k * (size_t)problem->intermediate;
  const size_t y = (size_t)header->tokens * (size_t)problem->hidden;
  memset(out, 0, sizeof(*out));
  out->routing.tokens = header->tokens;
  out->routing.top_k = header->top_k;
  out->h = malloc(values * sizeof(*out->h));
  out->h_unrounded = malloc(values * sizeof(*out->h_unrounded));
  out->y = malloc(y * sizeof(*out->y));
  out->y_unquantised = malloc(y * sizeof(*out->y_unquantised));
  return out->h != NULL && out->h_unrounded != NULL && out->y != NULL && out->y_unquantised != NULL;
}

static bool read_parts(FILE *file, const struct cache_header *want, const struct part parts[PARTS])
{
  struct cache_header have;
  unsigned char stored[DIGEST_BYTES], digest[DIGEST_BYTES];
  if(fread(&have, sizeof(have), 1, file) != 1 || memcmp(&have, want, sizeof(have)) != 0 || fread(stored, sizeof(stored), 1, file) != 1)
    return false;
  for(int i = 0; i < PARTS; i++)
    if(fread(parts[i].bytes, 1, parts[i].count, file) != parts[i].count)
      return false;
  digest_of(&have, parts, digest);
  return memcmp(digest, stored, sizeof(digest)) == 0 && fgetc(file) == EOF;
}

/* False if there is no such file or it is not exactly what was asked for; *out is then empty. */
static bool read_result(const char *path, const struct cache_header *want, const struct mf_problem *problem, struct reference_result *out)
{
  struct part parts[PARTS];
  bool good = false;
  FILE *file = fopen(path, "rbe");
  if(file == NULL)
    return false;
  if(allocate(want, problem, out)) {
    list_parts(want, problem, out, parts);
    good = read_parts(file, want, parts);
  }
  fclose(file);
  if(!good)
    reference_free(out);
  return good;
}

/* --- Writing --- */

static bool write_parts(FILE *file, const struct cache_header *header, const struct part parts[PARTS])
{
  unsigned char digest[DIGEST_BYTES];
  digest_of(header, parts, digest);
  if(fwrite(header, sizeof(*header), 1, file) != 1 || fwrite(digest, sizeof(digest), 1, file) != 1)
    return false;
  for(int i = 0; i < PARTS; i++)
    if(fwrite(parts[i].bytes, 1, parts[i].count, file) != parts[i].count)
      return false;
  return fflush(file) == 0;
}

static enum mf_status write_result(const char *path, const struct cache_header *header, const struct mf_problem *problem,
                                   struct reference_result *result, struct error *err)
{
  struct part parts[PARTS];
  char temporary[1100];
  FILE *file;
  int fd, problem_errno = 0;
  if(snprintf(temporary, sizeof(temporary), "%s.XXXXXX", path) >= (int)sizeof(temporary))
    return error_set(err, MF_ERR_IO, "the path of the reference cache is too long (%.60s...); name a shorter folder", path);
  fd = mkstemp(temporary);
  if(fd < 0)
    return error_errno(err, MF_ERR_IO, errno, "%s: cannot keep a reference result here", path);
  list_parts(header, problem, result, parts);
  file = fdopen(fd, "wb");
  if(file == NULL || !write_parts(file, header, parts))
    problem_errno = errno != 0 ? errno : EIO;
  if(file == NULL)
    close(fd);
  else if(fclose(file) != 0 && problem_errno == 0)
    problem_errno = errno;
  if(problem_errno == 0 && rename(temporary, path) != 0)
    problem_errno = errno;
  if(problem_errno == 0)
    return MF_OK;
  unlink(temporary);
  return error_errno(err, MF_ERR_IO, problem_errno, "%s: cannot keep a reference result here", path);
}

static enum mf_status cache_path(const char *dir, const struct cache_header *header, const struct test_case *tc, char *path, size_t space,
                                 struct error *err)
{
  const int length = snprintf(path, space, "%s/%.16s-v%d-s%08x-l%u-t%d-%s-%s-%u.ref", dir, header->problem, (int)header->version,
                              (unsigned)header->scaling_bits, (unsigned)header->layer, tc->tokens, routing_name(tc->routing),
                              case_data_name(tc->data), (unsigned)tc->seed);
  if(length < 0 || (size_t)length >= space)
    return error_set(err, MF_ERR_IO, "the path of the reference cache is too long (%.60s...); name a shorter folder", dir);
  if(mkdir(dir, 0777) != 0 && errno != EEXIST)
    return error_errno(err, MF_ERR_IO, errno, "%s: cannot make the folder of the reference cache", dir);
  return MF_OK;
}

enum mf_status reference_cached(const char *dir, const struct mf_problem *problem, float routed_scaling, uint32_t layer, const struct test_case *tc,
                                struct reference_result *out, struct error *err)
{
  struct cache_header header;
  char path[1024];
  enum mf_status rc;
  memset(out, 0, sizeof(*out));
  if(dir != NULL && tc->tokens >= 1 && tc->tokens <= MAX_TOKENS && problem->top_k >= 1 && problem_ranks(problem) <= MAX_TOP_K) {
    fill_header(problem, routed_scaling, layer, tc, &header);
    rc = cache_path(dir, &header, tc, path, sizeof(path), err);
    if(rc != MF_OK || read_result(path, &header, problem, out))
      return rc;
  } else {
    dir = NULL; /* reference_run() says what is wrong with the sizes */
  }
  rc = reference_run(problem, routed_scaling, data_layer_seed(layer), tc, out, err);
  if(rc == MF_OK && dir != NULL)
    rc = write_result(path, &header, problem, out, err);
  if(rc != MF_OK)
    reference_free(out);
  return rc;
}
