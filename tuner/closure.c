/* closure.c - follows #include "..." through the templates, and makes the result fit NVRTC.
 *
 * A template names its neighbours relative to its own folder ("ints.h", "../hw/hw.cuh"), as every C compiler understands; NVRTC finds
 * in-memory headers by exact name only. So the closure knows every file by its path below templates/ ("hw/ints.h"), and closure_rewrite() writes
 * that name into the include lines of the copy that NVRTC gets. A quoted name is looked for in the includer's folder, then in templates/.
 *
 * The scanner knows comments, and one macro: what is compiled only under MF_HOST_EMULATION belongs to the CPU's build of the templates. All other
 * conditions count as true on both branches, so that the closure depends on the files alone; <angle> includes are the compiler's own. */
#include "compile_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/limits.h> /* PATH_MAX; limits.h is ours */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_MAX_BYTES (4u << 20)
#define NAME_MAX_BYTES 256
#define MAX_CONDITIONS 64
#define HOST_MACRO "MF_HOST_EMULATION"

/* ---- the scanner ---- */
/* A condition's branch: does it need the host macro, exclude it, or have nothing to do with it? */
enum branch { BRANCH_ANY, BRANCH_HOST, BRANCH_NOT_HOST };

struct scan {
  const char *at;          /* rest of the text */
  bool in_comment;         /* inside a block comment */
  int depth;               /* open conditions */
  enum branch branch[MAX_CONDITIONS];
};

static bool is_live(const struct scan *scan)
{
  for(int i = 0; i < scan->depth && i < MAX_CONDITIONS; i++)
    if(scan->branch[i] == BRANCH_HOST)
      return false;
  return true;
}

/* If 'text' starts with the word 'word', what follows it and blanks, else NULL. */
static const char *after_word(const char *text, const char *word)
{
  const size_t length = strlen(word);
  if(strncmp(text, word, length) != 0 || (text[length] >= 'a' && text[length] <= 'z'))
    return NULL;
  return text + length + strspn(text + length, " \t");
}

static bool is_host_macro(const char *text)
{
  const size_t length = strlen(HOST_MACRO);
  return strncmp(text, HOST_MACRO, length) == 0 && strchr(" \t\r\n)/", text[length]) != NULL; /* the NUL counts as found */
}

static enum branch condition(const char *text)
{
  const bool negated = *text == '!';
  const char *operand = after_word(text + negated, "defined");
  if(operand == NULL || !is_host_macro(operand + (*operand == '(') + strspn(operand + (*operand == '('), " \t")))
    return BRANCH_ANY;
  return negated ? BRANCH_NOT_HOST : BRANCH_HOST;
}

/* Keeps the stack of conditions; 'line' is behind the '#'. */
static void scan_condition(struct scan *scan, const char *line)
{
  const char *rest;
  enum branch opened = BRANCH_ANY, *top = scan->depth > 0 && scan->depth <= MAX_CONDITIONS ? &scan->branch[scan->depth - 1] : NULL;
  if(after_word(line, "endif") != NULL) {
    if(scan->depth > 0)
      scan->depth--;
    return;
  }
  if(after_word(line, "else") != NULL || after_word(line, "elif") != NULL) {
    if(top != NULL)
      *top = *top == BRANCH_HOST ? BRANCH_NOT_HOST : *top == BRANCH_NOT_HOST ? BRANCH_HOST : BRANCH_ANY;
    return;
  }
  if((rest = after_word(line, "ifdef")) != NULL)
    opened = is_host_macro(rest) ? BRANCH_HOST : BRANCH_ANY;
  else if((rest = after_word(line, "ifndef")) != NULL)
    opened = is_host_macro(rest) ? BRANCH_NOT_HOST : BRANCH_ANY;
  else if((rest = after_word(line, "if")) != NULL)
    opened = condition(rest);
  else
    return;
  if(scan->depth < MAX_CONDITIONS)
    scan->branch[scan->depth] = opened;
  scan->depth++;
}

/* Moves behind the current line, past string and character literals, and keeps in_comment. */
static void skip_line(struct scan *scan)
{
  char quote = '\0';
  const char *p = scan->at;
  for(; *p != '\0' && *p != '\n'; p++) {
    if(scan->in_comment) {
      if(p[0] == '*' && p[1] == '/') {
        scan->in_comment = false;
        p++;
      }
    } else if(quote != '\0') {
      if(*p == '\\' && p[1] != '\0' && p[1] != '\n')
        p++;
      else if(*p == quote)
        quote = '\0';
    } else if(p[0] == '/' && p[1] == '/') {
      p += strcspn(p, "\n");
      break;
    } else if(p[0] == '/' && p[1] == '*') {
      scan->in_comment = true;
      p++;
    } else if(*p == '"' || *p == '\'')
      quote = *p;
  }
  scan->at = *p == '\n' ? p + 1 : p;
}

/* Finds the next live quoted include; *name points into the text. False at its end. */
static bool scan_include(struct scan *scan, const char **name, size_t *length)
{
  while(*scan->at != '\0') {
    const char *line = scan->at + strspn(scan->at, " \t");
    const bool directive = !scan->in_comment && *line == '#';
    const char *quoted = NULL;
    if(directive) {
      line += 1 + strspn(line + 1, " \t");
      scan_condition(scan, line);
      quoted = after_word(line, "include");
    }
    skip_line(scan);
    if(quoted != NULL && *quoted == '"' && is_live(scan)) {
      *name = quoted + 1;
      *length = strcspn(quoted + 1, "\"\n");
      if(quoted[1 + *length] == '"')
        return true;
    }
  }
  return false;
}

/* ---- names ---- */
/* Joins the folder of 'includer' and 'name', and removes "." and "..". False if that leaves the root or is too long. */
static bool join_name(const char *includer, const char *name, size_t length, char out[NAME_MAX_BYTES])
{
  const char *slash = strrchr(includer, '/');
  char path[2 * NAME_MAX_BYTES];
  size_t used = 0;
  int printed = snprintf(path, sizeof(path), "%.*s%.*s", slash != NULL ? (int)(slash - includer + 1) : 0, includer, (int)length, name);
  if(printed <= 0 || (size_t)printed >= NAME_MAX_BYTES || path[0] == '/')
    return false;
  for(const char *part = path; *part != '\0';) {
    const size_t n = strcspn(part, "/");
    if(n == 2 && part[0] == '.' && part[1] == '.') {
      if(used == 0)
        return false;
      used--;
      while(used > 0 && out[used - 1] != '/')
        used--;
    } else if(n > 0 && !(n == 1 && part[0] == '.')) {
      memcpy(out + used, part, n);
      used += n;
      if(part[n] == '/')
        out[used++] = '/';
    }
    part += n + (part[n] == '/');
  }
  out[used] = '\0';
  return used > 0 && out[used - 1] != '/';
}

static int find_name(const struct closure *closure, const char *name)
{
  for(int i = 0; i < closure->count; i++)
    if(strcmp(closure->name[i], name) == 0)
      return i;
  return -1;
}

/* ---- collecting ---- */
/* Reads template_dir/name. *text stays NULL if there is no such file. */
static enum mf_status read_template(const char *template_dir, const char *name, char **text, struct error *err)
{
  char path[PATH_MAX];
  enum mf_status rc = MF_OK;
  size_t length;
  struct stat info;
  FILE *file;
  int fd;
  *text = NULL;
  if(snprintf(path, sizeof(path), "%s/%s", template_dir, name) >= (int)sizeof(path))
    return error_set(err, MF_ERR_IO, "%s/%s: path too long", template_dir, name);
  fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if(fd < 0)
    return errno == ENOENT || errno == ENOTDIR ? MF_OK : error_errno(err, MF_ERR_IO, errno, "%s: cannot be opened", path);
  if(fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return error_set(err, MF_ERR_IO, "%s: cannot be read: expected a regular file", path);
  }
  file = fdopen(fd, "rb");
  *text = file != NULL ? malloc(FILE_MAX_BYTES) : NULL;
  if(*text == NULL) {
    rc = error_set(err, MF_ERR_NOMEM, "%s: out of memory", path);
    goto out;
  }
  length = fread(*text, 1, FILE_MAX_BYTES, file);
  if(ferror(file))
    rc = error_errno(err, MF_ERR_IO, errno, "%s: cannot be read", path);
  else if(length == FILE_MAX_BYTES)
    rc = error_set(err, MF_ERR_IO, "%s: larger than %u bytes, which no template is", path, FILE_MAX_BYTES - 1);
  else if(memchr(*text, '\0', length) != NULL)
    rc = error_set(err, MF_ERR_IO, "%s: holds a NUL byte: it is not a text file", path);
  else {
    char *fitted;
    (*text)[length] = '\0';
    fitted = realloc(*text, length + 1);
    *text = fitted != NULL ? fitted : *text;
  }
out:
  if(file != NULL)
    fclose(file);
  else
    close(fd);
  if(rc != MF_OK) {
    free(*text);
    *text = NULL;
  }
  return rc;
}

static enum mf_status add_file(struct closure *closure, const char *name, char *text, struct error *err)
{
  char *copy = strdup(name);
  if(closure->count == CLOSURE_MAX_FILES || copy == NULL) {
    free(copy);
    free(text);
    return copy == NULL ? error_set(err, MF_ERR_NOMEM, "%s: out of memory", name)
                        : error_set(err, MF_ERR_IO, "%s: more than %d templates are included", name, CLOSURE_MAX_FILES);
  }
  closure->name[closure->count] = copy;
  closure->text[closure->count++] = text;
  return MF_OK;
}

/* Adds the file that 'includer' calls 'written'. *index receives its place, -1 if it was there already. */
static enum mf_status add_include(const char *template_dir, const char *includer, const char *written, size_t length, struct closure *closure,
                                  int *index, struct error *err)
{
  const char *const who = includer[0] != '\0' ? includer : "the emitted source";
  char name[NAME_MAX_BYTES];
  char *text = NULL;
  bool looked = false;
  *index = -1;
  for(int pass = 0; pass < 2; pass++) { /* the includer's folder, then the root */
    enum mf_status rc;
    if(!join_name(pass == 0 ? includer : "", written, length, name)) {
      if(pass == 1 && !looked)
        return error_set(err, MF_ERR_IO, "%s includes \"%.*s\", which is not below %s", who, (int)length, written, template_dir);
      continue;
    }
    looked = true;
    if(find_name(closure, name) >= 0)
      return MF_OK;
    rc = read_template(template_dir, name, &text, err);
    if(rc != MF_OK)
      return error_prefix(err, "included from %s", who);
    if(text != NULL) {
      *index = closure->count;
      return add_file(closure, name, text, err);
    }
  }
  return error_set(err, MF_ERR_IO, "%s/%.*s: no such file, included from %s; is the template folder complete?", template_dir, (int)length, written, who);
}

static enum mf_status collect(const char *template_dir, const char *includer, const char *text, struct closure *closure, struct error *err)
{
  struct scan scan = {.at = text};
  const char *written;
  size_t length;
  while(scan_include(&scan, &written, &length)) {
    int added;
    enum mf_status rc = add_include(template_dir, includer, written, length, closure, &added, err);
    if(rc == MF_OK && added >= 0) /* depth <= CLOSURE_MAX_FILES: each level has added a file */
      rc = collect(template_dir, closure->name[added], closure->text[added], closure, err);
    if(rc != MF_OK)
      return rc;
  }
  return MF_OK;
}

enum mf_status closure_collect(const char *template_dir, const char *source, struct closure *out, struct error *err)
{
  enum mf_status rc;
  memset(out, 0, sizeof(*out));
  rc = collect(template_dir, "", source, out, err);
  if(rc != MF_OK)
    closure_free(out);
  return rc;
}

void closure_free(struct closure *closure)
{
  for(int i = 0; i < closure->count; i++) {
    free(closure->name[i]);
    free(closure->text[i]);
  }
  memset(closure, 0, sizeof(*closure));
}

/* ---- rewriting ---- */
/* The closure's name of what 'includer' calls 'written', NULL if the closure does not have it. */
static const char *resolve_name(const struct closure *closure, const char *includer, const char *written, size_t length)
{
  char name[NAME_MAX_BYTES];
  for(int pass = 0; pass < 2; pass++) {
    const int index = join_name(pass == 0 ? includer : "", written, length, name) ? find_name(closure, name) : -1;
    if(index >= 0)
      return closure->name[index];
  }
  return NULL;
}

char *closure_rewrite(const struct closure *closure, const char *name, const char *text)
{
  struct scan scan = {.at = text};
  const char *written, *copied = text;
  size_t length, space = 1, used = 0;
  char *out;
  while(scan_include(&scan, &written, &length))
    space += NAME_MAX_BYTES;
  space += strlen(text);
  out = malloc(space);
  if(out == NULL)
    return NULL;
  scan = (struct scan){.at = text};
  while(scan_include(&scan, &written, &length)) {
    const char *full = resolve_name(closure, name, written, length);
    if(full == NULL)
      continue;
    memcpy(out + used, copied, (size_t)(written - copied));
    used += (size_t)(written - copied);
    for(const char *c = full; *c != '\0'; c++)
      out[used++] = *c;
    copied = written + length;
  }
  memcpy(out + used, copied, strlen(copied) + 1);
  return out;
}
