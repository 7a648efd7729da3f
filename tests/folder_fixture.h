/* folder_fixture.h - a folder of its own for each test: start() and end() as checked fixture. */
#ifndef MOEFORGE_TESTS_FOLDER_FIXTURE_H
#define MOEFORGE_TESTS_FOLDER_FIXTURE_H

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char folder[128];

static inline void start(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof(folder), "%s/moeforge-test-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
}

static inline void end(void)
{
  char command[256];
  snprintf(command, sizeof(command), "rm -r '%s'", folder);
  ck_assert_int_eq(system(command), 0);
}

/* The path of a file in it; eight may be in use at a time. */
static inline const char *in_folder(const char *name)
{
  static char path[8][256];
  static int turn;
  turn = (turn + 1) % 8;
  snprintf(path[turn], sizeof(path[turn]), "%s/%s", folder, name);
  return path[turn];
}

#endif
