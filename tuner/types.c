/* types.c - the names of the enumerators in types.h. */
#include "types.h"

#include <string.h>

const char *routing_name(enum routing_kind kind)
{
  static const char *const names[ROUTING_KINDS] = {
#define ROUTING_TEXT(name, text) text,
      ROUTING_TABLE(ROUTING_TEXT)
#undef ROUTING_TEXT
  };
  return (unsigned)kind < ROUTING_KINDS ? names[kind] : "?";
}

enum routing_kind routing_from_name(const char *name)
{
  int kind = 0;
  while(kind < ROUTING_KINDS && strcmp(name, routing_name((enum routing_kind)kind)) != 0)
    kind++;
  return (enum routing_kind)kind;
}

const char *case_data_name(enum case_data data)
{
  static const char *const names[CASE_DATA_KINDS] = {
#define CASE_TEXT(name, text) text,
      CASE_DATA_TABLE(CASE_TEXT)
#undef CASE_TEXT
  };
  return (unsigned)data < CASE_DATA_KINDS ? names[data] : "?";
}
