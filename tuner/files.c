/* files.c - see files.h. */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/limits.h> /* PATH_MAX; limits.h is ours */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum mf_status file_make_folder(const char *path, struct error *err)
{
  struct stat info;
  int errnum;
  if(mkdir(path, 0777) == 0)
    return MF_OK;
  errnum = errno; /* a read-only file system says so even where the folder is there */
  if(stat(path, &info) == 0)
    return S_ISDIR(info.st_mode) ? MF_OK : error_set(err, MF_ERR_IO, "%s: expected a folder, found a file: move it away or name another place", path);
  return error_errno(err, MF_ERR_IO, errnum, "%s: cannot create the folder", path);
}

static bool is_database(const char *path)
{
  static const char magic[] = "SQLite format 3";
  char start[sizeof(magic)];
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  const ssize_t n = fd >= 0 ? read(fd, start, sizeof(start)) : 0;
  if(fd >= 0)
    close(fd);
  return n == (ssize_t)sizeof(start) && memcmp(start, magic, sizeof(start)) == 0;
}

enum mf_status file_target(const char *path, char *real, size_t space, struct error *err)
{
  struct stat info;
  char *resolved = NULL;
  bool fits;
  if(path[0] == '\0')
    return error_set(err, MF_ERR_IO, "expected the name of a file to write, got an empty one");
  if(stat(path, &info) == 0) {
    if(!S_ISREG(info.st_mode))
      return error_set(err, MF_ERR_IO, "%s: expected a file to write, found %s: name another file", path, S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe");
    if(is_database(path))
      return error_set(err, MF_ERR_IO, "%s: is a database, which would be lost: name another file", path);
    resolved = realpath(path, NULL);
  }
  fits = (size_t)snprintf(real, space, "%s", resolved != NULL ? resolved : path) < space;
  free(resolved);
  return fits ? MF_OK : error_set(err, MF_ERR_IO, "%.200s...: the path is too long", path);
}

enum mf_status file_spare_input(const char *output, const char *input, struct error *err)
{
  struct stat a, b;
  if(output == NULL || input == NULL || stat(output, &a) != 0 || stat(input, &b) != 0 || a.st_dev != b.st_dev || a.st_ino != b.st_ino ||
     !S_ISREG(a.st_mode))
    return MF_OK;
  return error_set(err, MF_ERR_USAGE, "%s: would be written over %s, which is read here: name another file with -o", output, input);
}

static bool write_all(int fd, const char *bytes, size_t count)
{
  while(count > 0) {
    const ssize_t n = write(fd, bytes, count);
    if(n < 0 && errno == EINTR)
      continue;
    if(n <= 0)
      return false;
    bytes += n;
    count -= (size_t)n;
  }
  return true;
}

enum mf_status file_write_whole(const char *path, const void *bytes, size_t count, struct error *err)
{
  char real[PATH_MAX], temporary[PATH_MAX + 32];
  bool ok;
  int fd, errnum;
  const enum mf_status rc = file_target(path, real, sizeof(real), err);
  if(rc != MF_OK)
    return rc;
  snprintf(temporary, sizeof(temporary), "%s.%ld.tmp", real, (long)getpid());
  fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if(fd < 0)
    return error_errno(err, MF_ERR_IO, errno, "%s: cannot write", path);
  ok = write_all(fd, bytes, count) && fsync(fd) == 0;
  errnum = errno;
  if(close(fd) != 0 && ok) {
    ok = false;
    errnum = errno;
  }
  if(ok && rename(temporary, real) != 0) {
    ok = false;
    errnum = errno;
  }
  if(ok)
    return MF_OK;
  unlink(temporary);
  return error_errno(err, MF_ERR_IO, errnum, "%s: cannot write", path);
}
