/* spec_fixture.h - for tests that read files: a folder of their own, and what a reader reported. */
#ifndef MOEFORGE_TESTS_SPEC_FIXTURE_H
#define MOEFORGE_TESTS_SPEC_FIXTURE_H

#include "spec.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[256];
static char file[300]; /* x.yaml in it */

static inline void make_folder(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof(folder), "%s/moeforge-spec-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
  snprintf(file, sizeof(file), "%s/x.yaml", folder);
}

static inline void remove_folder(void)
{
  unlink(file);
  rmdir(folder);
}

static inline void write_file(const char *text, size_t length)
{
  FILE *f = fopen(file, "w");
  ck_assert_ptr_nonnull(f);
  ck_assert_uint_eq(fwrite(text, 1, length, f), length);
  ck_assert_int_eq(fclose(f), 0);
}

struct lines {
  char text[32][ERROR_TEXT_MAX];
  int count;
};

static inline void keep_line(void *context, const char *line)
{
  struct lines *lines = context;
  ck_assert_ptr_null(strchr(line, '\n'));
  if(lines->count < 32)
    snprintf(lines->text[lines->count], ERROR_TEXT_MAX, "%s", line);
  lines->count++;
}

static inline enum mf_status read_text(const char *text, size_t length, struct model_spec *spec, struct lines *lines, struct error *err)
{
  memset(lines, 0, sizeof(*lines));
  memset(err, 0, sizeof(*err));
  write_file(text, length);
  return spec_read(file, spec, keep_line, lines, err);
}

#endif
