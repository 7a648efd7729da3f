/* strbuf.c - see strbuf.h. */
#include "strbuf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void strbuf_init(struct strbuf *sb, size_t ceiling)
{
  memset(sb, 0, sizeof(*sb));
  sb->ceiling = ceiling;
}

void strbuf_free(struct strbuf *sb)
{
  free(sb->text);
  strbuf_init(sb, sb->ceiling);
}

/* Makes room for 'more' bytes and a NUL; false if that fails. */
static bool reserve(struct strbuf *sb, size_t more)
{
  size_t space = sb->space > 0 ? sb->space : 256;
  char *grown;
  if(sb->failed || more > sb->ceiling - sb->length) {
    sb->failed = true;
    return false;
  }
  if(sb->text != NULL && sb->length + more < sb->space)
    return true;
  while(space <= sb->length + more)
    space *= 2;
  grown = realloc(sb->text, space);
  if(grown == NULL) {
    sb->failed = true;
    return false;
  }
  sb->text = grown;
  sb->space = space;
  return true;
}

void strbuf_add(struct strbuf *sb, const void *bytes, size_t count)
{
  if(!reserve(sb, count))
    return;
  if(count > 0)
    memcpy(sb->text + sb->length, bytes, count);
  sb->length += count;
  sb->text[sb->length] = '\0';
}

void strbuf_printf(struct strbuf *sb, const char *fmt, ...)
{
  va_list args;
  int count;
  va_start(args, fmt);
  count = vsnprintf(NULL, 0, fmt, args);
  va_end(args);
  if(count < 0 || !reserve(sb, (size_t)count)) {
    sb->failed = true;
    return;
  }
  va_start(args, fmt);
  vsnprintf(sb->text + sb->length, (size_t)count + 1, fmt, args);
  va_end(args);
  sb->length += (size_t)count;
}

bool strbuf_failed(const struct strbuf *sb)
{
  return sb->failed;
}

const char *strbuf_text(const struct strbuf *sb)
{
  return sb->text != NULL ? sb->text : "";
}
