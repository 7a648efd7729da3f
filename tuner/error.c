/* error.c - see error.h. */
#include "error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void error_one_line(char *text)
{
  for(char *c = text; *c != '\0'; c++) {
    if(*c == '\n' || *c == '\r' || *c == '\t')
      *c = ' ';
    else if((unsigned char)*c < ' ' || *c == 0x7f)
      *c = '?';
  }
}

enum mf_status error_set(struct error *err, enum mf_status status, const char *fmt, ...)
{
  char text[ERROR_TEXT_MAX]; /* the old text may be among the arguments */
  va_list args;
  if(err == NULL)
    return status;
  va_start(args, fmt);
  vsnprintf(text, sizeof(text), fmt, args);
  va_end(args);
  error_one_line(text);
  memcpy(err->text, text, strlen(text) + 1);
  err->status = status;
  return status;
}

static const char *errno_hint(int errnum)
{
  switch(errnum) {
    case ENOSPC: return " (free some space and run again: nothing that was stored is lost)";
    case EROFS: return " (the file system is read-only: name another place)";
    case EPERM:
    case EACCES: return " (check the permissions of the folder)";
    default: return "";
  }
}

enum mf_status error_errno(struct error *err, enum mf_status status, int errnum, const char *fmt, ...)
{
  va_list args;
  size_t length;
  if(err == NULL)
    return status;
  err->status = status;
  va_start(args, fmt);
  vsnprintf(err->text, sizeof(err->text), fmt, args);
  va_end(args);
  error_one_line(err->text);
  length = strlen(err->text);
  snprintf(err->text + length, sizeof(err->text) - length, ": %s%s", strerror(errnum), errno_hint(errnum));
  return status;
}

enum mf_status error_prefix(struct error *err, const char *fmt, ...)
{
  char prefix[ERROR_TEXT_MAX / 2], old[ERROR_TEXT_MAX];
  va_list args;
  va_start(args, fmt);
  vsnprintf(prefix, sizeof(prefix), fmt, args);
  va_end(args);
  memcpy(old, err->text, sizeof(old));
  snprintf(err->text, sizeof(err->text), "%s: %.*s", prefix, (int)(sizeof(err->text) - strlen(prefix) - 3), old);
  return err->status;
}

enum mf_status error_append(struct error *err, const char *fmt, ...)
{
  const size_t length = strlen(err->text);
  va_list args;
  va_start(args, fmt);
  vsnprintf(err->text + length, sizeof(err->text) - length, fmt, args);
  va_end(args);
  return err->status;
}

int error_exit_code(enum mf_status status)
{
  switch(status) {
#define EXIT_CASE(name, value, exit_code, message) \
  case name: return exit_code;
    MF_STATUS_TABLE(EXIT_CASE)
#undef EXIT_CASE
  }
  return 70;
}
