/* schema.c - see schema.h.
 *
 * For each key of the file: find its row; if there is none, say which key was probably meant; else read the value by the row's type. Afterwards
 * the required rows that nobody mentioned. A fault in one key does not keep the others from being read. */
#include "schema.h"

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_SPACE 160
#define TEXT_SPACE 320

struct reading {
  const struct schema_row *rows;
  int nrows;
  void *draft;
  int *lines;
  struct faults *faults;
};

/* ---- plain values ---- */

bool schema_parse_int(const char *text, long *value)
{
  const char *digits = text + (text[0] == '-');
  char *end = NULL;
  long parsed;
  if(digits[0] < '0' || digits[0] > '9' || (digits[0] == '0' && digits[1] != '\0'))
    return false;
  errno = 0;
  parsed = strtol(text, &end, 10);
  if(errno != 0 || *end != '\0')
    return false;
  *value = parsed;
  return true;
}

bool schema_parse_double(const char *text, double *value)
{
  const char *digits = text + (text[0] == '-');
  char *end = NULL;
  double parsed;
  if(digits[0] < '0' || digits[0] > '9' || text[strspn(text, "-+.eE0123456789")] != '\0')
    return false;
  parsed = strtod(text, &end);
  if(*end != '\0' || !isfinite(parsed))
    return false;
  *value = parsed;
  return true;
}

const char *schema_choice_name(const char *choices, int index, char *out, size_t space)
{
  const char *name = choices;
  for(; index > 0 && *name != '\0'; index--) {
    name += strcspn(name, "|");
    name += *name == '|';
  }
  if(index < 0 || *name == '\0')
    return "?";
  snprintf(out, space, "%.*s", (int)strcspn(name, "|"), name);
  return out;
}

static int choice_index(const char *choices, const char *word)
{
  char name[64];
  for(int i = 0;; i++) {
    const char *choice = schema_choice_name(choices, i, name, sizeof(name));
    if(strcmp(choice, "?") == 0)
      return -1;
    if(strcmp(choice, word) == 0)
      return i;
  }
}

/* "softmax|sigmoid" -> "softmax, sigmoid" */
static void list_choices(const char *choices, char *out, size_t space)
{
  size_t length = 0;
  for(const char *c = choices; *c != '\0' && length + 3 < space; c++) {
    if(*c == '|') {
      out[length++] = ',';
      out[length++] = ' ';
    } else {
      out[length++] = *c;
    }
  }
  out[length] = '\0';
}

/* What a row expects, as in "expected ...". */
static const char *expectation(const struct schema_row *row, char *out, size_t space)
{
  char choices[TEXT_SPACE / 2];
  switch(row->type) {
    case SCHEMA_INT:
    case SCHEMA_LONG:
      if(row->step > 1)
        snprintf(out, space, "a multiple of %.0f from %.0f to %.0f", row->step, row->low, row->high);
      else
        snprintf(out, space, "an integer from %.0f to %.0f", row->low, row->high);
      break;
    case SCHEMA_FLAG: snprintf(out, space, "true or false"); break;
    case SCHEMA_CHOICE:
      list_choices(row->choices, choices, sizeof(choices));
      snprintf(out, space, "%s%s", strchr(row->choices, '|') != NULL ? "one of " : "", choices);
      break;
    case SCHEMA_FLOAT:
    case SCHEMA_DOUBLE: snprintf(out, space, "a number from %.12g to %.12g", row->low, row->high); break;
    case SCHEMA_NAME: snprintf(out, space, "a name of at most %zu characters a-z 0-9 . _ -, first a letter or digit", row->size - 1); break;
    case SCHEMA_TEXT: snprintf(out, space, "text of 1 to %zu bytes in one line", row->size - 1); break;
    case SCHEMA_CUSTOM: snprintf(out, space, "%s", row->choices); break;
  }
  return out;
}

static void reject(const struct reading *r, const struct schema_row *row, const struct ynode *node, const char *hint)
{
  char expected[TEXT_SPACE], got[96];
  faults_add(r->faults, node->line, row->path, "expected %s, got %s%s", expectation(row, expected, sizeof(expected)),
             ynode_describe(node, got, sizeof(got)), hint);
}

static void read_integer(const struct reading *r, const struct schema_row *row, const struct ynode *node, void *home)
{
  const double step = row->step > 1 ? row->step : 1;
  char hint[64] = "";
  long value = 0;
  double nearest;
  if(node->quoted || !schema_parse_int(node->text, &value)) {
    reject(r, row, node, node->quoted ? " (remove the quotes)" : "");
    return;
  }
  nearest = fmin(fmax(round((double)value / step) * step, row->low), row->high);
  if(nearest != (double)value) {
    snprintf(hint, sizeof(hint), " (nearest legal value %.0f)", nearest);
    reject(r, row, node, hint);
  } else if(row->type == SCHEMA_INT) {
    *(int32_t *)home = (int32_t)value;
  } else {
    *(long *)home = value;
  }
}

static void read_number(const struct reading *r, const struct schema_row *row, const struct ynode *node, void *home)
{
  char hint[64] = "";
  double value = 0;
  if(node->quoted || !schema_parse_double(node->text, &value)) {
    reject(r, row, node, node->quoted ? " (remove the quotes)" : "");
  } else if(value < row->low || value > row->high) {
    snprintf(hint, sizeof(hint), " (nearest legal value %.12g)", value < row->low ? row->low : row->high);
    reject(r, row, node, hint);
  } else if(row->type == SCHEMA_FLOAT) {
    *(float *)home = (float)(value + 0.0);
  } else {
    *(double *)home = value + 0.0;
  }
}

static void read_flag(const struct reading *r, const struct schema_row *row, const struct ynode *node, void *home)
{
  static const char *const others[] = {"yes", "Yes", "YES", "on",  "On",  "ON",  "True",  "TRUE",  "1",
                                       "no",  "No",  "NO",  "off", "Off", "OFF", "False", "FALSE", "0"};
  const bool on = strcmp(node->text, "true") == 0;
  const char *hint = "";
  if(!node->quoted && (on || strcmp(node->text, "false") == 0)) {
    if(row->size == sizeof(bool))
      *(bool *)home = on;
    else
      *(int32_t *)home = on;
    return;
  }
  for(size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
    if(strcmp(node->text, others[i]) == 0)
      hint = i < 9 ? " (write true)" : " (write false)";
  reject(r, row, node, node->quoted ? " (remove the quotes)" : hint);
}

static void read_choice(const struct reading *r, const struct schema_row *row, const struct ynode *node, void *home)
{
  char name[64], hint[96] = "";
  const int index = choice_index(row->choices, node->text);
  if(index >= 0) {
    *(int32_t *)home = index;
    return;
  }
  if(nearest_name(node->text, row->choices, name, sizeof(name)) != NULL)
    snprintf(hint, sizeof(hint), " (nearest legal value %s)", name);
  reject(r, row, node, hint);
}

bool schema_is_name(const char *text)
{
  static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789._-";
  return text[0] != '\0' && text[0] != '.' && text[0] != '_' && text[0] != '-' && text[strspn(text, letters)] == '\0';
}

static bool is_printable(const char *text)
{
  for(; *text != '\0'; text++)
    if((unsigned char)*text < 32 || *text == 127)
      return false;
  return true;
}

static void read_text(const struct reading *r, const struct schema_row *row, const struct ynode *node, void *home)
{
  const bool null = !node->quoted && (strcmp(node->text, "~") == 0 || strcmp(node->text, "null") == 0);
  const size_t length = strlen(node->text);
  if(length == 0 || length >= row->size || null || !is_printable(node->text) || (row->type == SCHEMA_NAME && !schema_is_name(node->text)))
    reject(r, row, node, "");
  else
    memcpy(home, node->text, length + 1);
}

static void read_value(const struct reading *r, const struct schema_row *row, const struct ynode *node)
{
  void *home = (char *)r->draft + row->offset;
  if(row->type == SCHEMA_CUSTOM) {
    row->custom(node, row->path, r->draft, r->faults);
    return;
  }
  if(node->kind != YNODE_SCALAR) {
    reject(r, row, node, "");
    return;
  }
  switch(row->type) {
    case SCHEMA_INT:
    case SCHEMA_LONG: read_integer(r, row, node, home); break;
    case SCHEMA_FLAG: read_flag(r, row, node, home); break;
    case SCHEMA_CHOICE: read_choice(r, row, node, home); break;
    case SCHEMA_FLOAT:
    case SCHEMA_DOUBLE: read_number(r, row, node, home); break;
    case SCHEMA_NAME:
    case SCHEMA_TEXT: read_text(r, row, node, home); break;
    case SCHEMA_CUSTOM: break;
  }
}

/* ---- keys ---- */

/* The row with that path, -1 if there is none. *section: rows lie below it. */
static int find_row(const struct reading *r, const char *path, bool *section)
{
  const size_t n = strlen(path);
  *section = false;
  for(int i = 0; i < r->nrows; i++) {
    if(strcmp(r->rows[i].path, path) == 0)
      return i;
    if(strncmp(r->rows[i].path, path, n) == 0 && r->rows[i].path[n] == '.')
      *section = true;
  }
  return -1;
}

/* The section where a key of that very name lives, as a full path; NULL if nowhere. */
static const char *elsewhere(const struct reading *r, const char *key)
{
  for(int i = 0; i < r->nrows; i++) {
    const char *dot = strchr(r->rows[i].path, '.');
    if(strcmp(dot != NULL ? dot + 1 : r->rows[i].path, key) == 0)
      return r->rows[i].path;
  }
  return NULL;
}

/* The keys of the section 'prefix' ("" or "shape.") separated by '|', each once: rows of one section stand together. */
static void section_keys(const struct reading *r, const char *prefix, char *out, size_t space)
{
  const size_t skip = strlen(prefix);
  const char *last = "";
  size_t used = 0, last_length = 0;
  out[0] = '\0';
  for(int i = 0; i < r->nrows; i++) {
    const char *key = r->rows[i].path + skip;
    size_t length;
    if(strncmp(r->rows[i].path, prefix, skip) != 0)
      continue;
    length = strcspn(key, ".");
    if((length == last_length && strncmp(key, last, length) == 0) || used + length + 2 > space)
      continue;
    used += (size_t)snprintf(out + used, space - used, "%s%.*s", used > 0 ? "|" : "", (int)length, key);
    last = key;
    last_length = length;
  }
}

static void report_unknown(const struct reading *r, const struct ynode *node, const char *prefix)
{
  char path[PATH_SPACE], keys[512], listed[600], name[64];
  const char *place = elsewhere(r, node->key);
  section_keys(r, prefix, keys, sizeof(keys));
  snprintf(path, sizeof(path), "%s%.100s", prefix, node->key);
  list_choices(keys, listed, sizeof(listed));
  if(nearest_name(node->key, keys, name, sizeof(name)) != NULL)
    faults_add(r->faults, node->key_line, path, "unknown key (nearest key %s%s)", prefix, name);
  else if(place != NULL)
    faults_add(r->faults, node->key_line, path, "unknown key here (its place is %s)", place);
  else
    faults_add(r->faults, node->key_line, path, "unknown key (expected one of %s)", listed);
}

static void read_section(const struct reading *r, const struct ynode *mapping, const char *prefix)
{
  char path[PATH_SPACE], below[PATH_SPACE + 1], got[96];
  for(const struct ynode *node = mapping->first; node != NULL; node = node->next) {
    bool section = false;
    int row;
    snprintf(path, sizeof(path), "%s%.100s", prefix, node->key);
    row = find_row(r, path, &section);
    if(row >= 0 && strchr(path + strlen(prefix), '.') == NULL) {
      if(r->lines != NULL)
        r->lines[row] = node->line;
      read_value(r, &r->rows[row], node);
    } else if(section && node->kind == YNODE_MAPPING) {
      snprintf(below, sizeof(below), "%s.", path);
      read_section(r, node, below);
    } else if(section) {
      faults_add(r->faults, node->line, path, "expected a mapping of keys, got %s", ynode_describe(node, got, sizeof(got)));
    } else {
      report_unknown(r, node, prefix);
    }
  }
}

/* The node at 'path'; *line receives where it is or where it should be: its section, else the first line. */
static const struct ynode *find_node(const struct ynode *root, const char *path, int *line)
{
  const char *dot = strchr(path, '.');
  char section[64];
  const struct ynode *mapping = root;
  *line = 1;
  if(dot != NULL) {
    snprintf(section, sizeof(section), "%.*s", (int)(dot - path), path);
    mapping = ynode_child(root, section);
    if(mapping == NULL)
      return NULL;
    *line = mapping->key_line;
    if(mapping->kind != YNODE_MAPPING)
      return mapping; /* reported as such already */
  }
  return ynode_child(mapping, dot != NULL ? dot + 1 : path);
}

void schema_read(const struct schema_row *rows, int nrows, const struct ynode *root, void *draft, int *lines, struct faults *faults)
{
  const struct reading r = {.rows = rows, .nrows = nrows, .draft = draft, .lines = lines, .faults = faults};
  char expected[TEXT_SPACE];
  for(int i = 0; i < nrows; i++) {
    int line = 0;
    (void)find_node(root, rows[i].path, &line);
    if(lines != NULL)
      lines[i] = line;
  }
  read_section(&r, root, "");
  for(int i = 0; i < nrows; i++) {
    int line = 0;
    if(rows[i].initial == NULL && find_node(root, rows[i].path, &line) == NULL)
      faults_add(faults, line, rows[i].path, "expected %s, the key is missing", expectation(&rows[i], expected, sizeof(expected)));
  }
}

void schema_markdown(const struct schema_row *rows, int nrows, struct strbuf *out)
{
  char expected[TEXT_SPACE];
  strbuf_printf(out, "| key | expected | default | meaning |\n|---|---|---|---|\n");
  for(int i = 0; i < nrows; i++)
    strbuf_printf(out, "| `%s` | %s | %s | %s |\n", rows[i].path, expectation(&rows[i], expected, sizeof(expected)),
                  rows[i].initial == NULL ? "*required*" : rows[i].initial, rows[i].help);
}
