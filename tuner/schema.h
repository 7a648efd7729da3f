/* schema.h - table-driven reading of a YAML tree into a struct: one row per key says its path, type, range, default and meaning.
 *
 * The same tables print themselves as the reference tables of docs/specs.md, so that reader and documentation cannot differ.
 * A value's home is 'offset' in the struct that the caller passes ("draft"); rows of other types than the plain ones bring a function. */
#ifndef MOEFORGE_TUNER_SCHEMA_H
#define MOEFORGE_TUNER_SCHEMA_H

#include "faults.h"
#include "strbuf.h"
#include "yaml_reader.h"
#include <stdbool.h>
#include <stddef.h>

enum schema_type {
  SCHEMA_INT,     /* int32_t; low..high, multiple of 'step' */
  SCHEMA_LONG,    /* long; likewise */
  SCHEMA_FLAG,    /* int32_t 0 or 1, or bool with size 1; written true or false */
  SCHEMA_CHOICE,  /* int32_t: index into 'choices' */
  SCHEMA_FLOAT,   /* float; low..high */
  SCHEMA_DOUBLE,  /* double; low..high */
  SCHEMA_NAME,    /* char[]: [a-z0-9] then [a-z0-9._-]* */
  SCHEMA_TEXT,    /* char[]: printable, not empty */
  SCHEMA_CUSTOM   /* 'custom' reads it; 'choices' says what is expected */
};

/* Reads a value or calls faults_add; 'path' is the row's. */
typedef void schema_custom_fn(const struct ynode *node, const char *path, void *draft, struct faults *faults);

struct schema_row {
  const char *path;      /* "shape.top_k"; at most two levels */
  enum schema_type type;
  double low, high, step;
  const char *choices;   /* "softmax|sigmoid"; of a custom row: what is expected */
  const char *initial;   /* the default as one would write it, NULL: the key is required; the draft holds the default itself */
  const char *help;      /* one line */
  size_t offset, size;   /* of the home in the draft */
  schema_custom_fn *custom;
};

/* The offset and size columns of a row. */
#define SCHEMA_HOME(type, member) offsetof(type, member), sizeof(((type *)0)->member)
/* Rows by type. A file with a table defines HOME(member) as SCHEMA_HOME(its draft, member). */
#define SCHEMA_INT_ROW(path, low, high, step, initial, member, help) {path, SCHEMA_INT, low, high, step, NULL, initial, help, HOME(member), NULL}
#define SCHEMA_LONG_ROW(path, low, high, initial, member, help) {path, SCHEMA_LONG, low, high, 1, NULL, initial, help, HOME(member), NULL}
#define SCHEMA_FLAG_ROW(path, initial, member, help) {path, SCHEMA_FLAG, 0, 0, 0, NULL, initial, help, HOME(member), NULL}
#define SCHEMA_CHOICE_ROW(path, choices, initial, member, help) {path, SCHEMA_CHOICE, 0, 0, 0, choices, initial, help, HOME(member), NULL}
#define SCHEMA_FLOAT_ROW(path, low, high, initial, member, help) {path, SCHEMA_FLOAT, low, high, 0, NULL, initial, help, HOME(member), NULL}
#define SCHEMA_DOUBLE_ROW(path, low, high, initial, member, help) {path, SCHEMA_DOUBLE, low, high, 0, NULL, initial, help, HOME(member), NULL}
#define SCHEMA_NAME_ROW(path, initial, member, help) {path, SCHEMA_NAME, 0, 0, 0, NULL, initial, help, HOME(member), NULL}
#define SCHEMA_TEXT_ROW(path, initial, member, help) {path, SCHEMA_TEXT, 0, 0, 0, NULL, initial, help, HOME(member), NULL}
#define SCHEMA_CUSTOM_ROW(path, expected, initial, custom, help) {path, SCHEMA_CUSTOM, 0, 0, 0, expected, initial, help, 0, 0, custom}

/* Reads every key of 'root'. lines[row] (may be NULL) receives the line of each key that is present, else of its section. */
void schema_read(const struct schema_row *rows, int nrows, const struct ynode *root, void *draft, int *lines, struct faults *faults);
/* One plain decimal integer; false if 'text' is none (then *value is unchanged). */
bool schema_parse_int(const char *text, long *value);
/* One finite plain decimal number. */
bool schema_parse_double(const char *text, double *value);
/* Is it a name that a spec may have? The length is the caller's. */
bool schema_is_name(const char *text);
/* The table as Markdown. */
void schema_markdown(const struct schema_row *rows, int nrows, struct strbuf *out);
/* The name at 'index' of "a|b|c", "?" if there is none. */
const char *schema_choice_name(const char *choices, int index, char *out, size_t space);

#endif
