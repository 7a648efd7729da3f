/* device_judge.c - see device_judge.h. A kept verdict is one file, verdict-<sha256>, with the worst values; it is written under a temporary
 * name and renamed, so that workers side by side can share the folder; behind the values lies the SHA-256 of the name and the values, without which it
 * does not count. One that cannot be read or written costs time, nothing else. */
#include "device_judge.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "datagen.h"
#include "sha256.h"
#include "spec.h"

static void hash_problem(struct sha256 *ctx, const struct judge_run *run, const struct test_case *tc, int layer)
{
  const int32_t fixed[] = {CHECK_POLICY_VERSION, REFERENCE_VERSION, layer, tc->tokens, (int32_t)tc->routing, (int32_t)tc->data, (int32_t)tc->seed};
  sha256_add(ctx, fixed, sizeof(fixed));
  sha256_add(ctx, run->problem, sizeof(*run->problem)); /* all fields are 4 bytes: no padding */
  sha256_add(ctx, &run->routed_scaling, sizeof(run->routed_scaling));
}

static void verdict_path(const struct judge_run *run, const struct test_case *tc, int layer, const struct device_output *out, char *path, size_t space)
{
  const size_t tokens = (size_t)tc->tokens, rows = tokens * (size_t)problem_ranks(run->problem);
  const unsigned char flags[] = {out->replays_equal, out->poison_left, out->guard_damaged};
  unsigned char digest[32];
  char hex[65];
  struct sha256 ctx;
  sha256_init(&ctx);
  hash_problem(&ctx, run, tc, layer);
  sha256_add(&ctx, out->y, tokens * (size_t)run->problem->hidden * sizeof(*out->y));
  sha256_add(&ctx, out->h, rows * (size_t)run->problem->intermediate * sizeof(*out->h));
  sha256_add(&ctx, out->ids, rows * sizeof(*out->ids));
  sha256_add(&ctx, out->weights, rows * sizeof(*out->weights));
  sha256_add(&ctx, &out->status, sizeof(out->status));
  sha256_add(&ctx, flags, sizeof(flags));
  sha256_end(&ctx, digest);
  sha256_hex(digest, hex);
  snprintf(path, space, "%s/verdict-%s", run->cache_dir, hex);
}

/* The gates' worst values, and behind them the largest error of a token. */
#define KEPT_VALUES (GATES + 1)

struct kept_verdict {
  double values[KEPT_VALUES];
  unsigned char digest[32];
};

static void verdict_digest(const char *path, const double values[KEPT_VALUES], unsigned char digest[32])
{
  const char *name = strrchr(path, '/') + 1;
  struct sha256 ctx;
  sha256_init(&ctx);
  sha256_add(&ctx, name, strlen(name));
  sha256_add(&ctx, values, KEPT_VALUES * sizeof(values[0]));
  sha256_end(&ctx, digest);
}

static bool read_verdict(const char *path, struct check_result *own)
{
  struct kept_verdict kept;
  unsigned char digest[32];
  FILE *f = fopen(path, "rb");
  bool good;
  if(f == NULL)
    return false;
  good = fread(&kept, sizeof(kept), 1, f) == 1 && fgetc(f) == EOF;
  fclose(f);
  if(!good)
    return false;
  verdict_digest(path, kept.values, digest);
  if(memcmp(digest, kept.digest, sizeof(digest)) != 0)
    return false;
  memcpy(own->worst, kept.values, sizeof(own->worst));
  own->worst_error = kept.values[GATES];
  return true;
}

static void write_verdict(const char *path, const struct check_result *own)
{
  char temporary[1200];
  struct kept_verdict kept;
  FILE *f;
  bool good;
  memcpy(kept.values, own->worst, sizeof(own->worst));
  kept.values[GATES] = own->worst_error;
  verdict_digest(path, kept.values, kept.digest);
  snprintf(temporary, sizeof(temporary), "%s.%ld", path, (long)getpid());
  f = fopen(temporary, "wb");
  if(f == NULL)
    return;
  good = fwrite(&kept, sizeof(kept), 1, f) == 1;
  good = fclose(f) == 0 && good;
  if(!good || rename(temporary, path) != 0)
    remove(temporary);
}

/* Judges one output on its own and keeps the verdict if it passed. */
static enum mf_status judge_new(const struct judge_run *run, const struct test_case *tc, int layer, const struct device_output *out, const char *path,
                                struct check_result *own, struct error *err)
{
  struct reference_result ref;
  enum mf_status rc = reference_cached(run->cache_dir, run->problem, run->routed_scaling, (uint32_t)layer, tc, &ref, err);
  if(rc != MF_OK)
    return rc;
  rc = check_judge(run->problem, data_layer_seed((uint32_t)layer), tc, &ref, out, own, err);
  reference_free(&ref);
  if(rc == MF_OK && own->passed)
    write_verdict(path, own);
  return rc;
}

static void merge(struct check_result *into, const struct check_result *own)
{
  for(int gate = 0; gate < GATES; gate++)
    into->worst[gate] = fmax(into->worst[gate], own->worst[gate]);
  into->worst_error = fmax(into->worst_error, own->worst_error);
  if(own->passed || !into->passed)
    return;
  into->passed = false;
  into->failed_gate = own->failed_gate;
  memcpy(into->detail, own->detail, sizeof(into->detail));
}

enum mf_status judge_case(const struct judge_run *run, const struct test_case *tc, int index, struct check_result *result, struct error *err)
{
  const int layer = index % run->layers;
  struct check_result own = {.passed = true};
  struct device_output out;
  char path[1100];
  enum mf_status rc = run->ops->run_case(run->dev, run->kernel, tc, layer, run->replays, run->timeout_ms, &out, err);
  if(rc != MF_OK)
    return error_prefix(err, "%d tokens, %s, %s, seed %u", tc->tokens, routing_name(tc->routing), case_data_name(tc->data), (unsigned)tc->seed);
  verdict_path(run, tc, layer, &out, path, sizeof(path));
  if(!read_verdict(path, &own))
    rc = judge_new(run, tc, layer, &out, path, &own, err);
  if(rc == MF_OK)
    merge(result, &own);
  device_output_free(&out);
  return rc;
}
