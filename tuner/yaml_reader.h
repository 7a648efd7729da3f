/* yaml_reader.h - a small, strict subset of YAML as a tree that knows its lines.
 *
 * One document of mappings, sequences and scalars. Refused, each with its line: duplicate keys, anchors, aliases, tags, merge keys, keys that
 * are not plain words, several documents, NUL bytes, and files beyond the limits below (so that a hostile file costs bounded time and memory).
 * Typing is by the reader of a value: scalar text is kept as written, with its quoting, so that "8" is text and 8 is a number. */
#ifndef MOEFORGE_TUNER_YAML_READER_H
#define MOEFORGE_TUNER_YAML_READER_H

#include "error.h"
#include "faults.h"
#include <stdbool.h>
#include <stddef.h>

#define YDOC_MAX_BYTES 65536
#define YDOC_MAX_NODES 4096
#define YDOC_MAX_DEPTH 8
#define YDOC_MAX_SCALAR 1024

enum ynode_kind { YNODE_SCALAR, YNODE_MAPPING, YNODE_SEQUENCE };

struct ynode {
  enum ynode_kind kind;
  int line;                   /* from 1; of the value */
  char *key;                  /* name in the parent mapping, else NULL */
  int key_line;
  char *text;                 /* scalars */
  bool quoted;                /* scalars: "..." or '...' or a block; plain words are not */
  struct ynode *first, *next; /* children in file order */
};

/* Owns every node and text. */
struct ydoc {
  struct ynode *nodes;
  size_t count;
  struct ynode *root;         /* a mapping */
};

/* Reads the file faults->path. Problems of its form go to 'faults' and leave MF_ERR_SPEC; a file that cannot be read is MF_ERR_IO (faults->err),
 * memory MF_ERR_NOMEM. *doc is to be freed in every case. */
enum mf_status ydoc_read(struct ydoc *doc, struct faults *faults);
void ydoc_free(struct ydoc *doc);
/* The child of that name, NULL if there is none. */
const struct ynode *ynode_child(const struct ynode *mapping, const char *key);
/* "a mapping", "a list", "nothing" or the scalar itself in quotes where it was quoted, shortened: for "got ..." in messages. */
const char *ynode_describe(const struct ynode *node, char *out, size_t space);

#endif
