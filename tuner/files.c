/* files.c - see files.h. */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
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
  if(stat(path, &info) == 0 && S_ISDIR(info.st_mode))
    return MF_OK;
  return error_errno(err, MF_ERR_IO, errnum, "%s: cannot create the folder", path);
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
  char temporary[4200];
  bool ok;
  int fd, errnum;
  if(snprintf(temporary, sizeof(temporary), "%s.%ld.tmp", path, (long)getpid()) >= (int)sizeof(temporary))
    return error_set(err, MF_ERR_IO, "%.200s...: the path is too long", path);
  fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if(fd < 0)
    return error_errno(err, MF_ERR_IO, errno, "%s: cannot write", path);
  ok = write_all(fd, bytes, count) && fsync(fd) == 0;
  errnum = errno;
  if(close(fd) != 0 && ok) {
    ok = false;
    errnum = errno;
  }
  if(ok && rename(temporary, path) != 0) {
    ok = false;
    errnum = errno;
  }
  if(ok)
    return MF_OK;
  unlink(temporary);
  return error_errno(err, MF_ERR_IO, errnum, "%s: cannot write", path);
}
