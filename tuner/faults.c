/* faults.c - see faults.h. */
#include "faults.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NAME_SPACE 64 /* longer words are not compared */

void faults_init(struct faults *faults, const char *path, spec_report_fn *report, void *context, struct error *err)
{
  faults->path = path;
  faults->report = report;
  faults->context = context;
  faults->err = err;
  faults->count = 0;
}

void faults_add(struct faults *faults, int line, const char *field, const char *fmt, ...)
{
  char text[ERROR_TEXT_MAX / 2], whole[ERROR_TEXT_MAX], where[16] = "";
  const char *separator = field != NULL && field[0] != '\0' ? ": " : "";
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof(text), fmt, args);
  va_end(args);
  if(line > 0)
    snprintf(where, sizeof(where), ":%d", line);
  snprintf(whole, sizeof(whole), "%.300s%s: %.160s%s%s", faults->path, where, separator[0] != '\0' ? field : "", separator, text);
  error_one_line(whole);
  if(faults->count++ == 0)
    error_set(faults->err, MF_ERR_SPEC, "%s", whole);
  if(faults->report != NULL)
    faults->report(faults->context, whole);
}

enum mf_status faults_end(struct faults *faults)
{
  if(faults->count == 0)
    return MF_OK;
  if(faults->count > 1 && faults->report == NULL && faults->err != NULL) {
    const size_t length = strlen(faults->err->text);
    snprintf(faults->err->text + length, sizeof(faults->err->text) - length, " (the first of %d errors)", faults->count);
  }
  return MF_ERR_SPEC;
}

void fault_lines_take(void *context, const char *line)
{
  struct fault_lines *lines = context;
  if(lines->count == 0)
    snprintf(lines->first, sizeof(lines->first), "%s", line);
  if(lines->count == 1)
    lines->say(lines->context, lines->first);
  if(lines->count++ > 0)
    lines->say(lines->context, line);
}

void fault_lines_end(const struct fault_lines *lines, const char *path, struct error *err)
{
  if(lines->count > 1)
    error_set(err, MF_ERR_SPEC, "%.300s: %d errors, listed above", path, lines->count);
}

static size_t smaller(size_t a, size_t b)
{
  return a < b ? a : b;
}

/* Levenshtein distance of two words shorter than NAME_SPACE. */
static size_t edit_distance(const char *a, size_t na, const char *b, size_t nb)
{
  size_t row[NAME_SPACE + 1];
  for(size_t j = 0; j <= nb; j++)
    row[j] = j;
  for(size_t i = 1; i <= na; i++) {
    size_t diagonal = row[0];
    row[0] = i;
    for(size_t j = 1; j <= nb; j++) {
      const bool same = tolower((unsigned char)a[i - 1]) == tolower((unsigned char)b[j - 1]);
      const size_t change = diagonal + (same ? 0 : 1);
      diagonal = row[j];
      row[j] = smaller(change, smaller(row[j], row[j - 1]) + 1);
    }
  }
  return row[nb];
}

const char *nearest_name(const char *word, const char *names, char *out, size_t space)
{
  const size_t length = strlen(word);
  size_t best = NAME_SPACE, limit = length / 3 > 2 ? length / 3 : 2;
  bool found = false;
  if(length == 0 || length >= NAME_SPACE)
    return NULL;
  if(limit >= length)
    limit = length - 1;
  for(const char *name = names; *name != '\0';) {
    const size_t n = strcspn(name, "|");
    const size_t distance = n < NAME_SPACE ? edit_distance(word, length, name, n) : NAME_SPACE;
    if(distance <= limit && distance < best && n < space) {
      best = distance;
      memcpy(out, name, n);
      out[n] = '\0';
      found = true;
    }
    name += n + (name[n] == '|');
  }
  return found ? out : NULL;
}
