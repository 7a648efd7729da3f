/* device_lock.c - see device_lock.h.
 *
 * The file stays when the lock is released: removing it would let two processes hold locks on two files of the same name. It is opened without
 * O_CREAT first, because the kernel may refuse O_CREAT on another user's file in a sticky folder. */
#include "device_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static void lock_path(const char *uuid, char *out, size_t space)
{
  const char *dir = getenv("MOEFORGE_LOCK_DIR");
  snprintf(out, space, "%s/moeforge-gpu-%s.lock", dir != NULL && dir[0] != '\0' ? dir : "/tmp", uuid);
  for(char *p = strrchr(out, '/') + 1; *p != '\0'; p++)
    if(strchr("/ \\", *p) != NULL)
      *p = '_';
}

static enum mf_status open_lock_file(const char *uuid, int *fd, char *path, size_t space, struct error *err)
{
  lock_path(uuid, path, space);
  *fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if(*fd < 0 && errno == EACCES) /* another user's, made before its mode was set: a lock needs no right to write */
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if(*fd < 0 && errno == ENOENT) {
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if(*fd >= 0 && fchmod(*fd, 0666) != 0 && errno != EPERM) {
      close(*fd);
      *fd = -1;
    }
  }
  return *fd >= 0 ? MF_OK : error_errno(err, MF_ERR_IO, errno, "%s: the GPU cannot be locked for timing", path);
}

/* For people: who holds it. Not being able to write it is no failure. */
static void write_holder(int fd)
{
  char line[32];
  const int length = snprintf(line, sizeof(line), "process %ld\n", (long)getpid());
  if(ftruncate(fd, 0) == 0 && pwrite(fd, line, (size_t)length, 0) != length)
    (void)ftruncate(fd, 0);
}

static void read_holder(int fd, char *out, size_t space)
{
  char line[32];
  const ssize_t count = pread(fd, line, sizeof(line) - 1, 0);
  line[count > 0 ? count : 0] = '\0';
  line[strcspn(line, "\n")] = '\0';
  snprintf(out, space, "%s", line[0] != '\0' ? line : "another process");
}

enum mf_status device_lock_try(const char *uuid, int *fd, char *holder, size_t holder_space, struct error *err)
{
  char path[512];
  enum mf_status rc = open_lock_file(uuid, fd, path, sizeof(path), err);
  holder[0] = '\0';
  if(rc != MF_OK)
    return rc;
  if(flock(*fd, LOCK_EX | LOCK_NB) == 0) {
    write_holder(*fd);
    return MF_OK;
  }
  if(errno == EWOULDBLOCK)
    read_holder(*fd, holder, holder_space);
  else
    rc = error_errno(err, MF_ERR_IO, errno, "%s: the GPU cannot be locked for timing", path);
  close(*fd);
  *fd = -1;
  return rc;
}

enum mf_status device_lock_wait(const char *uuid, int *fd, struct error *err)
{
  char path[512];
  enum mf_status rc = open_lock_file(uuid, fd, path, sizeof(path), err);
  if(rc != MF_OK)
    return rc;
  while(flock(*fd, LOCK_EX) != 0) {
    if(errno == EINTR)
      continue;
    rc = error_errno(err, MF_ERR_IO, errno, "%s: the GPU cannot be locked for timing", path);
    close(*fd);
    *fd = -1;
    return rc;
  }
  write_holder(*fd);
  return MF_OK;
}
