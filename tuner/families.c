/* families.c - the list of kernel families, and what is the same for all: names of schedules.
 *
 * A schedule name is "<family>/<tag><value>-<tag><value>..." over all knobs in their order (but for struct knob's `unnamed`), so that it can be read back
 * and two equal schedules have equal names. An artifact name has the compile-time knobs only and no '/', so that it can be a file name. */
#include "family.h"

#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "family_batch.h"
#include "family_stream.h"

const struct family_ops *const *families_all(void)
{
  static const struct family_ops *const families[] = {&family_stream, &family_batch, NULL};
  return families;
}

const struct family_ops *family_find(const char *name)
{
  for(const struct family_ops *const *f = families_all(); *f != NULL; f++) {
    if(strcmp((*f)->name, name) == 0)
      return *f;
  }
  return NULL;
}

int family_knob(const struct family_ops *family, const char *name)
{
  for(int i = 0; i < family->nknobs; i++) {
    if(strcmp(family->knobs[i].name, name) == 0)
      return i;
  }
  return -1;
}

/* Appends to a text of 'space' bytes that holds *length; cuts off at the end. */
static void append(char *out, size_t space, size_t *length, const char *text)
{
  const int n = snprintf(out + *length, space - *length, "%s", text);
  if(n > 0)
    *length = *length + (size_t)n < space ? *length + (size_t)n : space - 1;
}

static void format_name(const struct schedule *sched, bool artifact, char *out, size_t space)
{
  const struct family_ops *family = sched->family;
  size_t length = 0;
  bool first = true;
  out[0] = '\0';
  append(out, space, &length, family->name);
  for(int i = 0; i < family->nknobs; i++) {
    const struct knob *k = &family->knobs[i];
    char part[48];
    if((artifact && !k->compile_time) || (k->unnamed && sched->value[i] == k->values[0]))
      continue;
    snprintf(part, sizeof(part), "%s%s%d", first && !artifact ? "/" : "-", k->tag, sched->value[i]);
    append(out, space, &length, part);
    first = false;
  }
}

void schedule_name(const struct schedule *sched, char *out, size_t space)
{
  format_name(sched, false, out, space);
}

void schedule_artifact_name(const struct schedule *sched, char *out, size_t space)
{
  format_name(sched, true, out, space);
}

/* Reads "<tag><integer>" at *text for knob 'k' and moves *text behind it. */
static bool parse_part(const char **text, const struct knob *k, int *value)
{
  const size_t tag_length = strlen(k->tag);
  char *end;
  long number;
  if(strncmp(*text, k->tag, tag_length) != 0 || !isdigit((unsigned char)(*text)[tag_length]))
    return false;
  number = strtol(*text + tag_length, &end, 10);
  if(number > 1000000)
    return false;
  *value = (int)number;
  *text = end;
  return true;
}

/* Whether the text, a name from behind a knob on, goes on with knob 'k'. */
static bool names_knob(const char *text, const struct knob *k)
{
  const size_t length = strlen(k->tag);
  return text[0] == '-' && strncmp(text + 1, k->tag, length) == 0 && isdigit((unsigned char)text[1 + length]);
}

enum mf_status schedule_parse(const char *name, struct schedule *out, struct error *err)
{
  struct schedule sched = {0};
  char family_name[32];
  const char *slash = strchr(name, '/');
  const char *text;
  if(slash == NULL || (size_t)(slash - name) >= sizeof(family_name))
    return error_set(err, MF_ERR_USAGE, "schedule \"%s\": expected <family>/<knobs>", name);
  memcpy(family_name, name, (size_t)(slash - name));
  family_name[slash - name] = '\0';
  sched.family = family_find(family_name);
  if(sched.family == NULL)
    return error_set(err, MF_ERR_NOT_FOUND, "schedule \"%s\": this version has no kernel family \"%s\"", name, family_name);
  text = slash + 1;
  for(int i = 0; i < sched.family->nknobs; i++) {
    const struct knob *k = &sched.family->knobs[i];
    if((k->added && *text == '\0') || (k->unnamed && !names_knob(text, k))) {
      sched.value[i] = k->values[0];
      continue;
    }
    if((i > 0 && *text++ != '-') || !parse_part(&text, k, &sched.value[i]))
      return error_set(err, MF_ERR_USAGE, "schedule \"%s\": expected \"%s<number>\" (%s) as knob %d", name, k->tag, k->name, i + 1);
  }
  if(*text != '\0')
    return error_set(err, MF_ERR_USAGE, "schedule \"%s\": \"%s\" is left over after the last knob", name, text);
  *out = sched;
  return MF_OK;
}

bool schedule_equal(const struct schedule *a, const struct schedule *b)
{
  return a->family == b->family && memcmp(a->value, b->value, (size_t)a->family->nknobs * sizeof(a->value[0])) == 0;
}

long family_meta_float(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (long)bits;
}

enum mf_status family_meta_differs(struct verdict *why, const char *what, long kernel, long host)
{
  *why = (struct verdict){.stage = "compile", .rule = "metadata", .have = kernel, .allowed = host, .nearest = -1};
  snprintf(why->detail, sizeof(why->detail), "%s: the kernel says %ld, the host's formula %ld", what, kernel, host);
  return MF_REJECTED;
}

enum mf_status family_meta_compare(const struct meta_row *rows, size_t count, struct verdict *why)
{
  for(size_t i = 0; i < count; i++) {
    if(rows[i].kernel != rows[i].host)
      return family_meta_differs(why, rows[i].name, rows[i].kernel, rows[i].host);
  }
  return MF_OK;
}
