/* status.c - names and messages of enum mf_status, from the one table in moeforge.h. */
#include "moeforge.h"

const char *mf_status_string(enum mf_status status)
{
  switch(status) {
#define MESSAGE_CASE(name, value, exit_code, message) \
  case name: return message;
    MF_STATUS_TABLE(MESSAGE_CASE)
#undef MESSAGE_CASE
  }
  return "unknown status";
}

const char *mf_status_name(enum mf_status status)
{
  switch(status) {
#define NAME_CASE(name, value, exit_code, message) \
  case name: return #name;
    MF_STATUS_TABLE(NAME_CASE)
#undef NAME_CASE
  }
  return "MF_UNKNOWN";
}
