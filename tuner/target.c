/* target.c - see target.h. */
#include "target.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compile.h"
#include "device_client.h"
#include "spec.h"

#define PLANNED_DEVICE "h200"
#define EMULATED_DEVICE "emu-sm90"

static enum mf_status planned(const struct options *opt, const char *name, struct target *out, struct error *err)
{
  const size_t length = strlen(name);
  const char *suffix = length > 5 && strcmp(&name[length - 5], ".yaml") == 0 ? "" : ".yaml";
  char path[1200];
  enum mf_status rc;
  if(strchr(name, '/') != NULL)
    snprintf(path, sizeof(path), "%s%s", name, suffix);
  else
    snprintf(path, sizeof(path), "%s/%s%s", opt->device_dir, name, suffix);
  out->gpu = false;
  rc = device_spec_read(path, &out->dev, NULL, NULL, err);
  return rc == MF_ERR_IO ? error_append(err, " (--devices names the folder of device specs)") : rc;
}

/* "emu" or "emu:SPEC"; false if it is neither. */
static bool emulated_spec(const char *text, const char **spec)
{
  *spec = strcmp(text, "emu") == 0 ? EMULATED_DEVICE : text + 4;
  return strcmp(text, "emu") == 0 || (strncmp(text, "emu:", 4) == 0 && text[4] != '\0');
}

static enum mf_status emulate(const struct options *opt, const char *spec, struct target *out, struct error *err)
{
  const enum mf_status rc = planned(opt, spec, out, err);
  if(rc == MF_ERR_IO)
    return error_set(err, MF_ERR_USAGE, "--device %s: expected emu, or emu: and the name of a file in %s", opt->device, opt->device_dir);
  if(rc != MF_OK)
    return rc;
  if(!out->dev.emulated) { /* a real GPU's numbers: another device than that GPU */
    char name[NAME_MAX_LEN];
    snprintf(name, sizeof(name), "%.60s (emulated)", out->dev.name);
    memcpy(out->dev.name, name, sizeof(name));
    out->dev.emulated = true;
  }
  out->emulated = true;
  snprintf(out->note, sizeof(out->note), "--device %s has no times", opt->device);
  return MF_OK;
}

/* What a driver does not know: the bandwidth that this GPU's memory really reaches, and the time of a launch, from the device spec of that name. */
static void take_measured_figures(const struct options *opt, struct device_info *dev)
{
  glob_t found;
  char pattern[1200];
  snprintf(pattern, sizeof(pattern), "%s/*.yaml", opt->device_dir);
  if(glob(pattern, 0, NULL, &found) != 0)
    return;
  for(size_t i = 0; i < found.gl_pathc; i++) {
    struct device_info spec;
    struct error ignored;
    if(device_spec_read(found.gl_pathv[i], &spec, NULL, NULL, &ignored) == MF_OK && strcmp(spec.name, dev->name) == 0) {
      dev->bandwidth_gbps = spec.bandwidth_gbps;
      dev->launch_us = spec.launch_us;
    }
  }
  globfree(&found);
}

static enum mf_status real(const struct options *opt, int ordinal, const struct device_info *devices, int count, struct target *out, struct error *err)
{
  if(ordinal >= count)
    return error_set(err, MF_ERR_NO_DEVICE, "--device cuda:%d: this machine has %d CUDA device(s), numbered from 0", ordinal, count);
  out->dev = devices[ordinal];
  out->gpu = true;
  out->ordinal = ordinal;
  out->note[0] = '\0';
  take_measured_figures(opt, &out->dev);
  if(compile_arch(out->dev.cc_major, out->dev.cc_minor) == NULL)
    return error_set(err, MF_ERR_NO_DEVICE,
                     "%s has compute capability %d.%d: the kernels need 9.0 (Hopper). Use --device none to plan for another GPU without this one", out->dev.name,
                     out->dev.cc_major, out->dev.cc_minor);
  return MF_OK;
}

bool target_cuda_ordinal(const char *text, int *ordinal)
{
  char *end;
  long number;
  *ordinal = 0;
  if(strcmp(text, "cuda") == 0)
    return true;
  if(strncmp(text, "cuda:", 5) != 0 || text[5] == '\0')
    return false;
  number = strtol(text + 5, &end, 10);
  *ordinal = (int)number;
  return *end == '\0' && number >= 0 && number < 1000;
}

enum mf_status target_resolve(const struct options *opt, struct target *out, struct error *err)
{
  struct device_info devices[DEVICES_MAX];
  int count = 0, ordinal = 0;
  enum mf_status rc;
  const bool automatic = strcmp(opt->device, "auto") == 0;
  const char *spec;
  memset(out, 0, sizeof(*out));
  if(strcmp(opt->device, "none") == 0) {
    snprintf(out->note, sizeof(out->note), "--device none");
    return planned(opt, PLANNED_DEVICE, out, err);
  }
  if(emulated_spec(opt->device, &spec))
    return emulate(opt, spec, out, err);
  if(!automatic && !target_cuda_ordinal(opt->device, &ordinal)) {
    snprintf(out->note, sizeof(out->note), "a device spec has no GPU to measure on");
    rc = planned(opt, opt->device, out, err);
    return rc == MF_ERR_IO ? error_set(err, MF_ERR_USAGE, "--device %s: expected auto, none, cuda, cuda:N, emu or the name of a file in %s", opt->device, opt->device_dir)
                           : rc;
  }
  rc = device_client_probe(opt->program, devices, &count, err);
  if(rc == MF_OK && count > 0)
    return real(opt, ordinal, devices, count, out, err);
  if(rc != MF_OK && (rc != MF_ERR_NO_DEVICE || !automatic))
    return rc;
  if(!automatic)
    return error_set(err, MF_ERR_NO_DEVICE, "--device %s: this machine has no CUDA device", opt->device);
  snprintf(out->note, sizeof(out->note), "%.1000s", rc != MF_OK ? err->text : "this machine has no CUDA device");
  return planned(opt, PLANNED_DEVICE, out, err);
}

/* Reads one "N" or "LOW-HIGH", up to a comma or the end, and marks the counts. */
static bool mark_range(const char *part, bool *wanted)
{
  char *end;
  long low = strtol(part, &end, 10), high = low;
  if(end == part)
    return false;
  if(*end == '-') {
    const char *second = end + 1;
    high = strtol(second, &end, 10);
    if(end == second)
      return false;
  }
  if((*end != '\0' && *end != ',') || low < 1 || high < low || high > MAX_TOKENS)
    return false;
  for(long t = low; t <= high; t++)
    wanted[t] = true;
  return true;
}

enum mf_status target_tokens(const struct options *opt, const struct model_spec *spec, int tokens[MAX_TOKEN_COUNTS], int *count, struct error *err)
{
  bool wanted[MAX_TOKENS + 1] = {false};
  *count = 0;
  if(opt->tokens == NULL) {
    memcpy(tokens, spec->tokens, (size_t)spec->ntokens * sizeof(tokens[0]));
    *count = spec->ntokens;
    return MF_OK;
  }
  for(const char *part = opt->tokens; part != NULL; part = strchr(part, ',') != NULL ? strchr(part, ',') + 1 : NULL) {
    if(!mark_range(part, wanted))
      return error_set(err, MF_ERR_USAGE, "--tokens: expected counts from 1 to %d such as 1-8 or 1,2,4, got \"%s\"", MAX_TOKENS, opt->tokens);
  }
  for(int t = 1; t <= MAX_TOKENS; t++) {
    if(wanted[t])
      tokens[(*count)++] = t;
  }
  return MF_OK;
}
