/* emit.c - see emit.h. */
#include "emit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "files.h"

#define SOURCE_CEILING (1u << 20)

enum mf_status emit_source(const struct mf_problem *problem, const char *shape_name, const struct schedule *sched, const struct device_info *dev,
                           struct artifact *art, struct error *err)
{
  struct strbuf text;
  strbuf_init(&text, SOURCE_CEILING);
  schedule_artifact_name(sched, art->name, sizeof(art->name));
  sched->family->emit(problem, sched, dev, &text);
  if(strbuf_failed(&text)) {
    strbuf_free(&text);
    return error_set(err, MF_ERR_NOMEM, "emit: no memory for the source of %s for %s", art->name, shape_name);
  }
  art->source = text.text;
  return MF_OK;
}

static bool file_equals(const char *path, const char *text)
{
  const size_t length = strlen(text);
  struct stat info;
  bool equal = false;
  char *old = NULL;
  FILE *f = fopen(path, "rb");
  if(f == NULL)
    return false;
  if(fstat(fileno(f), &info) == 0 && (size_t)info.st_size == length) {
    old = malloc(length + 1);
    equal = old != NULL && fread(old, 1, length, f) == length && memcmp(old, text, length) == 0;
  }
  free(old);
  fclose(f);
  return equal;
}

enum mf_status emit_write(const char *dir, const char *shape_name, const struct artifact *art, struct error *err)
{
  char folder[512], path[768];
  enum mf_status rc;
  if(snprintf(folder, sizeof(folder), "%s/%s", dir, shape_name) >= (int)sizeof(folder))
    return error_set(err, MF_ERR_IO, "%s: the path is too long", dir);
  snprintf(path, sizeof(path), "%s/%s.cu", folder, art->name);
  if(file_equals(path, art->source))
    return MF_OK;
  rc = file_make_folder(dir, err);
  if(rc == MF_OK)
    rc = file_make_folder(folder, err);
  return rc == MF_OK ? file_write_whole(path, art->source, strlen(art->source), err) : rc;
}
