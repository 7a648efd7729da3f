/* yaml_reader.c - see yaml_reader.h.
 *
 * libyaml's events are turned into nodes one by one. The nodes are one array of fixed size, so that pointers between them stay valid; each
 * scalar's text is its own allocation. The tree under construction is a stack of open mappings and sequences:
 *
 *   stack[depth]  { node, its last child, the key that waits for its value }
 *
 * Faults that do not hinder parsing (duplicate key, tag, anchor) are reported and parsing goes on, so that the user sees all of them. */
#include "yaml_reader.h"

#include "read_file.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

struct level {
  struct ynode *node;
  struct ynode *last;  /* last child */
  char *key;           /* owned; NULL: a key comes next (mappings) */
  int key_line;
};

struct builder {
  struct ydoc *doc;
  struct faults *faults;
  struct level stack[YDOC_MAX_DEPTH];
  int depth;
  int documents;
  enum mf_status status; /* other than MF_OK: stop */
};

static int event_line(const yaml_event_t *event)
{
  return (int)event->start_mark.line + 1;
}

/* Stops with a fault that makes the rest of the file meaningless. */
static void stop_at(struct builder *b, int line, const char *text)
{
  faults_add(b->faults, line, NULL, "%s", text);
  b->status = MF_ERR_SPEC;
}

static char *copy_text(const yaml_event_t *event)
{
  const size_t length = event->data.scalar.length;
  char *text = malloc(length + 1);
  if(text != NULL) {
    memcpy(text, event->data.scalar.value, length);
    text[length] = '\0';
  }
  return text;
}

/* A new node, hung below the innermost open one. NULL: b->status says why. */
static struct ynode *add_node(struct builder *b, enum ynode_kind kind, int line)
{
  struct level *top = b->depth > 0 ? &b->stack[b->depth - 1] : NULL;
  struct ynode *node;
  if(b->doc->count == YDOC_MAX_NODES) {
    stop_at(b, line, "expected at most 4096 values in a file, got more");
    return NULL;
  }
  node = &b->doc->nodes[b->doc->count++];
  node->kind = kind;
  node->line = line;
  if(top == NULL) {
    b->doc->root = node;
    return node;
  }
  node->key = top->key;
  node->key_line = top->key_line;
  top->key = NULL;
  if(top->last != NULL)
    top->last->next = node;
  else
    top->node->first = node;
  top->last = node;
  return node;
}

/* True if the next node stands where a mapping expects a key. */
static bool expects_key(const struct builder *b)
{
  const struct level *top = b->depth > 0 ? &b->stack[b->depth - 1] : NULL;
  return top != NULL && top->node->kind == YNODE_MAPPING && top->key == NULL;
}

static void open_node(struct builder *b, enum ynode_kind kind, int line)
{
  struct ynode *node;
  if(expects_key(b)) {
    stop_at(b, line, "expected a word as key, got a mapping or list");
    return;
  }
  if(b->depth == YDOC_MAX_DEPTH) {
    stop_at(b, line, "expected at most 8 levels of nesting, got more");
    return;
  }
  node = add_node(b, kind, line);
  if(node != NULL)
    b->stack[b->depth++] = (struct level){.node = node};
}

/* "shape.top_k" for the key 'key' of the innermost open mapping. */
static const char *key_path(const struct builder *b, const char *key, char *out, size_t space)
{
  size_t length = 0;
  out[0] = '\0';
  for(int i = 0; i <= b->depth; i++) {
    const char *word = i < b->depth ? b->stack[i].node->key : key;
    if(word != NULL && length < space)
      length += (size_t)snprintf(out + length, space - length, "%s%.60s", length > 0 ? "." : "", word);
  }
  return out;
}

static void take_key(struct builder *b, const yaml_event_t *event)
{
  struct level *top = &b->stack[b->depth - 1];
  const int line = event_line(event);
  const struct ynode *before;
  char path[160];
  char *key = copy_text(event);
  if(key == NULL) {
    b->status = error_set(b->faults->err, MF_ERR_NOMEM, "out of memory reading %s", b->faults->path);
    return;
  }
  before = ynode_child(top->node, key);
  if(before != NULL)
    faults_add(b->faults, line, key_path(b, key, path, sizeof(path)), "expected each key once, got it again (first in line %d)", before->key_line);
  else if(strcmp(key, "<<") == 0)
    faults_add(b->faults, line, key_path(b, key, path, sizeof(path)), "expected no merge keys: write the values out");
  top->key = key;
  top->key_line = line;
}

static void take_scalar(struct builder *b, const yaml_event_t *event)
{
  const int line = event_line(event);
  struct ynode *node;
  if(event->data.scalar.length > YDOC_MAX_SCALAR) {
    stop_at(b, line, "expected at most 1024 bytes in a value, got more");
    return;
  }
  if(memchr(event->data.scalar.value, '\0', event->data.scalar.length) != NULL) {
    stop_at(b, line, "expected text, got a NUL character");
    return;
  }
  if(expects_key(b)) {
    take_key(b, event);
    return;
  }
  node = add_node(b, YNODE_SCALAR, line);
  if(node == NULL)
    return;
  node->quoted = event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
  node->text = copy_text(event);
  if(node->text == NULL)
    b->status = error_set(b->faults->err, MF_ERR_NOMEM, "out of memory reading %s", b->faults->path);
}

static void check_decoration(struct builder *b, const yaml_event_t *event, const yaml_char_t *anchor, const yaml_char_t *tag)
{
  if(anchor != NULL)
    faults_add(b->faults, event_line(event), NULL, "expected no anchors, got '&%.60s': write the value out where it is needed", (const char *)anchor);
  if(tag != NULL)
    faults_add(b->faults, event_line(event), NULL, "expected no tags, got '%.60s': remove it", (const char *)tag);
}

static void take_event(struct builder *b, const yaml_event_t *event)
{
  switch(event->type) {
    case YAML_DOCUMENT_START_EVENT:
      if(b->documents++ > 0)
        stop_at(b, event_line(event), "expected one document in a file, got a second one after '---'");
      break;
    case YAML_ALIAS_EVENT: stop_at(b, event_line(event), "expected no aliases ('*name'): write the value out"); break;
    case YAML_SCALAR_EVENT:
      check_decoration(b, event, event->data.scalar.anchor, event->data.scalar.tag);
      take_scalar(b, event);
      break;
    case YAML_MAPPING_START_EVENT:
      check_decoration(b, event, event->data.mapping_start.anchor, event->data.mapping_start.tag);
      open_node(b, YNODE_MAPPING, event_line(event));
      break;
    case YAML_SEQUENCE_START_EVENT:
      check_decoration(b, event, event->data.sequence_start.anchor, event->data.sequence_start.tag);
      open_node(b, YNODE_SEQUENCE, event_line(event));
      break;
    case YAML_MAPPING_END_EVENT:
    case YAML_SEQUENCE_END_EVENT: b->depth--; break;
    default: break;
  }
}

/* The parser's own message, with the line where it noticed. */
static void report_syntax(struct builder *b, const yaml_parser_t *parser)
{
  const bool marked = parser->error != YAML_READER_ERROR;
  const char *context = parser->context != NULL ? parser->context : "";
  if(parser->error == YAML_MEMORY_ERROR) {
    b->status = error_set(b->faults->err, MF_ERR_NOMEM, "out of memory reading %s", b->faults->path);
    return;
  }
  faults_add(b->faults, marked ? (int)parser->problem_mark.line + 1 : 0, NULL, "expected YAML, got a syntax error: %s%s%s%s", context,
             context[0] != '\0' ? ", " : "", parser->problem != NULL ? parser->problem : "unknown problem",
             parser->error == YAML_SCANNER_ERROR ? " (indent with spaces, put a space after ':')" : "");
  b->status = MF_ERR_SPEC;
}

static void parse(struct builder *b, const char *bytes, size_t count)
{
  yaml_parser_t parser;
  bool done = false;
  if(!yaml_parser_initialize(&parser)) {
    b->status = error_set(b->faults->err, MF_ERR_NOMEM, "out of memory reading %s", b->faults->path);
    return;
  }
  yaml_parser_set_input_string(&parser, (const unsigned char *)bytes, count);
  while(!done && b->status == MF_OK) {
    yaml_event_t event;
    if(!yaml_parser_parse(&parser, &event)) {
      report_syntax(b, &parser);
      break;
    }
    done = event.type == YAML_STREAM_END_EVENT;
    take_event(b, &event);
    yaml_event_delete(&event);
  }
  yaml_parser_delete(&parser);
}

static enum mf_status load(struct faults *faults, char **bytes, size_t *count)
{
  struct error problem = {.status = MF_OK};
  const enum mf_status rc = read_file(faults->path, YDOC_MAX_BYTES, bytes, count, &problem);
  if(rc == MF_ERR_SPEC)
    faults_add(faults, 0, NULL, "%s: this is no spec", problem.text);
  else if(rc != MF_OK)
    error_set(faults->err, rc, "%.300s: %s", faults->path, problem.text);
  return rc;
}

enum mf_status ydoc_read(struct ydoc *doc, struct faults *faults)
{
  struct builder b = {.doc = doc, .faults = faults, .status = MF_OK};
  char *bytes = NULL;
  size_t count = 0;
  memset(doc, 0, sizeof(*doc));
  b.status = load(faults, &bytes, &count);
  if(b.status != MF_OK)
    goto out;
  doc->nodes = calloc(YDOC_MAX_NODES, sizeof(*doc->nodes));
  if(doc->nodes == NULL) {
    b.status = error_set(faults->err, MF_ERR_NOMEM, "out of memory reading %.300s", faults->path);
    goto out;
  }
  parse(&b, bytes, count);
  if(b.status == MF_OK && doc->root == NULL)
    stop_at(&b, 0, "expected a mapping of keys, got an empty file");
  else if(b.status == MF_OK && doc->root->kind != YNODE_MAPPING)
    stop_at(&b, doc->root->line, "expected a mapping of keys ('name: ...')");
out:
  for(int i = 0; i < YDOC_MAX_DEPTH; i++)
    free(b.stack[i].key);
  free(bytes);
  return b.status;
}

void ydoc_free(struct ydoc *doc)
{
  for(size_t i = 0; i < doc->count; i++) {
    free(doc->nodes[i].key);
    free(doc->nodes[i].text);
  }
  free(doc->nodes);
  memset(doc, 0, sizeof(*doc));
}

const struct ynode *ynode_child(const struct ynode *mapping, const char *key)
{
  const struct ynode *child = mapping->first;
  while(child != NULL && (child->key == NULL || strcmp(child->key, key) != 0))
    child = child->next;
  return child;
}

/* The longest start of 'text' of at most 'limit' bytes that does not cut a UTF-8 character. */
static int utf8_start(const char *text, int limit)
{
  const int length = (int)strnlen(text, (size_t)limit + 1);
  int cut = limit;
  if(length <= limit)
    return length;
  while(cut > 0 && ((unsigned char)text[cut] & 0xc0) == 0x80)
    cut--;
  return cut;
}

const char *ynode_describe(const struct ynode *node, char *out, size_t space)
{
  const char *quote = node->quoted ? "\"" : "";
  if(node->kind == YNODE_MAPPING)
    return "a mapping";
  if(node->kind == YNODE_SEQUENCE)
    return "a list";
  if(node->text[0] == '\0' && !node->quoted)
    return "nothing";
  snprintf(out, space, "%s%.*s%s%s", quote, utf8_start(node->text, 40), node->text, strlen(node->text) > 40 ? "..." : "", quote);
  for(char *c = out; *c != '\0'; c++)
    if((unsigned char)*c < 32 || *c == 127)
      *c = ' ';
  return out;
}
