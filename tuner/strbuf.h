/* strbuf.h - a growable string with a ceiling. A failed append leaves the buffer in the failed state: further appends do nothing and
 * strbuf_failed() is true, so that a writer checks once at its end. The text is always NUL-terminated and belongs to the buffer. */
#ifndef MOEFORGE_TUNER_STRBUF_H
#define MOEFORGE_TUNER_STRBUF_H

#include <stdbool.h>
#include <stddef.h>

struct strbuf {
  char *text;     /* NULL until the first append */
  size_t length;  /* bytes without the NUL */
  size_t space;   /* bytes allocated */
  size_t ceiling; /* largest length allowed */
  bool failed;    /* out of memory or over the ceiling */
};

void strbuf_init(struct strbuf *sb, size_t ceiling);
void strbuf_free(struct strbuf *sb);
void strbuf_add(struct strbuf *sb, const void *bytes, size_t count);
void strbuf_printf(struct strbuf *sb, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
bool strbuf_failed(const struct strbuf *sb);
/* The text ("" if nothing was added), valid until the next append. */
const char *strbuf_text(const struct strbuf *sb);

#endif
