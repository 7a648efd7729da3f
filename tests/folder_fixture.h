/* folder_fixture.h - a temporary folder for each test. */
#ifndef MOEFORGE_TESTS_FOLDER_FIXTURE_H
#define MOEFORGE_TESTS_FOLDER_FIXTURE_H

#include <check.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char folder[128];

static inline void make_folder(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof(folder), "%s/mf-package-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
}

static inline void remove_folder(void)
{
  DIR *dir = opendir(folder);
  struct dirent *entry;
  char path[512];
  while((entry = readdir(dir)) != NULL) {
    snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
    if(unlink(path) != 0 && entry->d_name[0] != '.')
      rmdir(path);
  }
  closedir(dir);
  rmdir(folder);
}

#endif
