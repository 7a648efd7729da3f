/* ptxas_log.c - reads the compiler's log: what ptxas -v says of a kernel's resources, and the first error.
 *
 *   ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
 *   ptxas info    : Compiling entry function 'mf_moe' for 'sm_90a'
 *   ptxas info    : Function properties for mf_moe
 *   ptxas         .     520 bytes stack frame, 624 bytes spill stores, 624 bytes spill loads
 *   ptxas info    : Used 64 registers, used 1 barriers, 520 bytes cumulative stack size, 1200 bytes smem
 *   ptxas info    : Function properties for some_noinline_function
 *   ptxas         .     0 bytes stack frame, ...
 *
 * Spills are added up over all functions, because a function that the kernel calls spills for the kernel. */
#include "compile_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LINE_MAX_LEN 2048
#define WGMMA_CODE_FIRST 7510
#define WGMMA_CODE_LAST 7520

/* Copies the line at *text (without its end, cut if too long) and moves *text behind it; false at the end of the text. */
static bool next_line(const char **text, char line[LINE_MAX_LEN])
{
  const char *end = *text + strcspn(*text, "\n");
  const size_t length = (size_t)(end - *text), kept = length < LINE_MAX_LEN - 1 ? length : LINE_MAX_LEN - 1;
  if(**text == '\0')
    return false;
  memcpy(line, *text, kept);
  line[kept] = '\0';
  *text = *end == '\n' ? end + 1 : end;
  return true;
}

/* The number that stands before 'unit' in 'line', -1 if 'unit' is not there or no number precedes it. */
static long number_before(const char *line, const char *unit)
{
  const char *at = strstr(line, unit), *digit = at;
  if(at == NULL)
    return -1;
  while(digit > line && digit[-1] >= '0' && digit[-1] <= '9')
    digit--;
  return digit == at ? -1 : strtol(digit, NULL, 10);
}

/* Is 'line' one of ptxas' remarks that wgmma is serialised or waits were injected? */
static bool is_wgmma_remark(const char *line)
{
  const char *code = strstr(line, "(C");
  const long number = code != NULL ? strtol(code + 2, NULL, 10) : 0;
  return strncmp(line, "ptxas", 5) == 0 && number >= WGMMA_CODE_FIRST && number <= WGMMA_CODE_LAST;
}

/* If 'line' has 'prefix', copies what follows up to 'stop' (0: the end) to 'name'. */
static bool name_after(const char *line, const char *prefix, char stop, char *name, size_t space)
{
  const char *at = strstr(line, prefix);
  size_t length;
  if(at == NULL)
    return false;
  at += strlen(prefix);
  length = stop != '\0' && strchr(at, stop) != NULL ? (size_t)(strchr(at, stop) - at) : strlen(at);
  snprintf(name, space, "%.*s", (int)(length < space ? length : space - 1), at);
  return true;
}

void ptxas_log_read(const char *log, const char *kernel, struct ptxas_usage *out)
{
  char line[LINE_MAX_LEN], entry[256] = "", function[256] = "";
  *out = (struct ptxas_usage){-1, -1, -1, -1, false};
  while(next_line(&log, line)) {
    const long frame = number_before(line, " bytes stack frame"), registers = number_before(line, " registers");
    out->wgmma_serialised = out->wgmma_serialised || is_wgmma_remark(line);
    if(strncmp(line, "ptxas", 5) != 0 || name_after(line, "Compiling entry function '", '\'', entry, sizeof(entry)) ||
       name_after(line, "Function properties for ", '\0', function, sizeof(function)))
      continue;
    if(frame >= 0) {
      const long stores = number_before(line, " bytes spill stores"), loads = number_before(line, " bytes spill loads");
      if(strcmp(function, kernel) == 0)
        out->frame_bytes = frame;
      if(stores >= 0 && loads >= 0)
        out->spill_bytes = (out->spill_bytes > 0 ? out->spill_bytes : 0) + stores + loads;
    }
    if(registers >= 0 && strstr(line, "Used ") != NULL && strcmp(entry, kernel) == 0) {
      const long shared = number_before(line, " bytes smem");
      out->registers = registers;
      out->shared_bytes = shared >= 0 ? shared : 0;
    }
  }
}

/* "x.cu(1): error: ...", "x.cuh(2): catastrophic error: ...", "ptxas <stdin>, line 9; error   : ...", "ptxas fatal   : ...". */
static bool is_error_line(const char *line)
{
  static const char *const words[] = {"error", "fatal"};
  for(size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
    const char *at = strstr(line, words[i]);
    if(at != NULL && at[strlen(words[i]) + strspn(at + strlen(words[i]), " ")] == ':')
      return true;
  }
  return false;
}

void compiler_log_first_error(const char *log, char *out, size_t space)
{
  char line[LINE_MAX_LEN];
  out[0] = '\0';
  while(next_line(&log, line))
    if(is_error_line(line)) {
      snprintf(out, space, "%s", line);
      return;
    }
}
