/* store_file.c - store files as files: what they are before SQLite touches them, who may write them, how they are replaced.
 *
 * SQLite rolls back journals and moves logs when it opens a database, so a file that is not ours must be recognised by its bytes alone. A store
 * is created under another name and renamed, so the header of any store that exists carries our application id, even if it was killed
 * before the first checkpoint.
 *
 *   offset  0  "SQLite format 3\0"        60  user_version
 *          16  page size, 1 = 65536       68  application_id
 *          28  pages, valid if 24 == 92
 *
 * The writer's lock is an flock on <file>.lock that holds the process id. The kernel drops it when the process ends, however it ends. It is
 * removed at the end; who takes it checks that the file it locked is still the one of that name, else two could hold different inodes. */
#include "store_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HEADER_BYTES 100

static uint32_t big_endian(const unsigned char *bytes)
{
  return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

bool store_file_has_wal(const char *real)
{
  char wal[STORE_PATH_MAX + 8];
  struct stat info;
  snprintf(wal, sizeof(wal), "%s-wal", real);
  return stat(wal, &info) == 0 && info.st_size > 0;
}

/* MF_OK if the header and the size of the file agree. With a log beside it the size says nothing: a checkpoint may have been cut short. */
static enum mf_status examine_size(const char *path, const char *shown, const unsigned char *header, long long bytes, struct error *err)
{
  long long page = header[16] << 8 | header[17];
  long long pages = big_endian(header + 28);
  if(page == 1)
    page = 65536;
  if(page < 512 || store_file_has_wal(path))
    return MF_OK;
  if(bytes % page != 0 || (big_endian(header + 24) == big_endian(header + 92) && bytes < pages * page))
    return error_set(err, MF_ERR_STORE, "%s: is truncated: %lld bytes of %lld are there; restore a copy, or move it away to start anew", shown, bytes,
                     pages * page);
  return MF_OK;
}

static enum mf_status examine_header(const char *path, const char *shown, const unsigned char *header, size_t count, long long bytes, struct error *err)
{
  static const char magic[16] = "SQLite format 3";
  size_t compare = count < sizeof(magic) ? count : sizeof(magic);
  if(bytes == 0)
    return error_set(err, MF_ERR_STORE, "%s: is empty (0 bytes), not a store: remove it or name another file", shown);
  if(memcmp(header, magic, compare) != 0)
    return error_set(err, MF_ERR_STORE, "%s: is not a schedule database (not SQLite): name another file", shown);
  if(count < HEADER_BYTES)
    return error_set(err, MF_ERR_STORE, "%s: is truncated: only %lld bytes are there; restore a copy, or move it away to start anew", shown, bytes);
  if(big_endian(header + 68) != STORE_APPLICATION_ID)
    return error_set(err, MF_ERR_STORE, "%s: is a database of another program (application id 0x%08x, expected 0x%08x): name another file", shown,
                     (unsigned)big_endian(header + 68), (unsigned)STORE_APPLICATION_ID);
  if(big_endian(header + 60) > STORE_SCHEMA_VERSION)
    return error_set(err, MF_ERR_STORE, "%s: was made by a newer moeforge (format %u, this one knows up to %d): use that one or name another file",
                     shown, (unsigned)big_endian(header + 60), STORE_SCHEMA_VERSION);
  return examine_size(path, shown, header, bytes, err);
}

/* Reads as much of the first bytes as there is; -1 on failure. */
static ssize_t read_header(int fd, unsigned char *header)
{
  size_t have = 0;
  while(have < HEADER_BYTES) {
    ssize_t count = read(fd, header + have, HEADER_BYTES - have);
    if(count < 0 && errno == EINTR)
      continue;
    if(count < 0)
      return -1;
    if(count == 0)
      break;
    have += (size_t)count;
  }
  return (ssize_t)have;
}

enum mf_status store_file_examine(const char *path, const char *shown, enum store_file_kind *kind, struct error *err)
{
  unsigned char header[HEADER_BYTES] = {0};
  enum mf_status rc = MF_OK;
  struct stat info;
  ssize_t count;
  int fd;
  *kind = STORE_FILE_NONE;
  fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if(fd < 0)
    return errno == ENOENT ? MF_OK : error_errno(err, MF_ERR_IO, errno, "%s: cannot be opened", shown);
  count = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) ? read_header(fd, header) : 0;
  if(fstat(fd, &info) != 0 || count < 0)
    rc = error_errno(err, MF_ERR_IO, errno, "%s: cannot be read", shown);
  else if(!S_ISREG(info.st_mode))
    rc = error_set(err, MF_ERR_IO, "%s: expected a file, found %s", shown, S_ISDIR(info.st_mode) ? "a folder" : "something else");
  else
    rc = examine_header(path, shown, header, (size_t)count, (long long)info.st_size, err);
  close(fd);
  if(rc == MF_OK)
    *kind = STORE_FILE_OURS;
  return rc;
}

/* realpath() into a caller's buffer; false with errno set. */
static bool resolve(const char *path, char *out, size_t space)
{
  char *resolved = realpath(path, NULL);
  bool fits;
  if(resolved == NULL)
    return false;
  fits = (size_t)snprintf(out, space, "%s", resolved) < space;
  free(resolved);
  errno = ENAMETOOLONG;
  return fits;
}

enum mf_status store_file_real(const char *path, char real[STORE_PATH_MAX], struct error *err)
{
  char folder[STORE_PATH_MAX], name[STORE_PATH_MAX];
  size_t used;
  if(path[0] == '\0' || strlen(path) >= STORE_PATH_MAX - 16)
    return error_set(err, MF_ERR_IO, "\"%.64s\": expected the path of a file, at most %d bytes", path, STORE_PATH_MAX - 17);
  if(resolve(path, real, STORE_PATH_MAX - 16))
    return MF_OK;
  if(errno != ENOENT)
    return error_errno(err, MF_ERR_IO, errno, "%s: cannot be opened", path);
  snprintf(folder, sizeof(folder), "%s", path);
  snprintf(name, sizeof(name), "%s", path);
  if(!resolve(dirname(folder), real, STORE_PATH_MAX - 16))
    return error_errno(err, MF_ERR_IO, errno, "%s: its folder cannot be opened", path);
  used = strlen(real);
  if((size_t)snprintf(real + used, STORE_PATH_MAX - 16 - used, "/%s", basename(name)) >= STORE_PATH_MAX - 16 - used)
    return error_errno(err, MF_ERR_IO, ENAMETOOLONG, "%s: cannot be opened", path);
  return MF_OK;
}

enum mf_status store_file_uri(const char *real, const char *query, char *out, size_t space, struct error *err)
{
  size_t used = (size_t)snprintf(out, space, "file:");
  const unsigned char *byte = (const unsigned char *)real;
  for(; *byte != '\0' && used + 4 < space; byte++)
    used += (size_t)snprintf(out + used, space - used, *byte > ' ' && *byte < 127 && strchr("?#%", *byte) == NULL ? "%c" : "%%%02x", *byte);
  if(*byte != '\0' || used + strlen(query) + 2 > space)
    return error_set(err, MF_ERR_IO, "%s: the path is too long", real);
  snprintf(out + used, space - used, "?%s", query);
  return MF_OK;
}

/* ---- the writer's lock ---- */
static enum mf_status lock_busy(int fd, const char *shown, struct error *err)
{
  char text[24] = "";
  ssize_t count = pread(fd, text, sizeof(text) - 1, 0);
  long pid = count > 0 ? strtol(text, NULL, 10) : 0;
  if(pid > 0)
    return error_set(err, MF_ERR_STORE, "%s is being written by process %ld: wait for it or use another --store", shown, pid);
  return error_set(err, MF_ERR_STORE, "%s is being written by another process: wait for it or use another --store", shown);
}

/* Whether 'fd' is still the file that 'path' names. */
static bool same_file(int fd, const char *path)
{
  struct stat held, named;
  return fstat(fd, &held) == 0 && stat(path, &named) == 0 && held.st_dev == named.st_dev && held.st_ino == named.st_ino;
}

static void write_pid(int fd)
{
  char text[24];
  int length = snprintf(text, sizeof(text), "%ld\n", (long)getpid());
  /* Only a message is the poorer if this fails. */
  if(ftruncate(fd, 0) == 0 && pwrite(fd, text, (size_t)length, 0) < 0)
    return;
}

static long long now_ms(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

enum mf_status store_lock_take(const char *real, const char *shown, struct store_lock *lock, struct error *err)
{
  const struct timespec pause = {0, 20000000L};
  const long long give_up = now_ms() + STORE_LOCK_WAIT_MS;
  enum mf_status rc;
  int fd;
  lock->fd = -1;
  snprintf(lock->path, sizeof(lock->path), "%.*s.lock", STORE_PATH_MAX - 8, real);
  for(;;) {
    fd = open(lock->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if(fd < 0)
      return error_errno(err, MF_ERR_IO, errno, "%s: cannot be written, no lock file can be made beside it", shown);
    if(flock(fd, LOCK_EX | LOCK_NB) == 0) {
      if(same_file(fd, lock->path))
        break;
    } else if(errno != EWOULDBLOCK && errno != EINTR) {
      rc = error_errno(err, MF_ERR_IO, errno, "%s: cannot be locked", lock->path);
      close(fd);
      return rc;
    } else if(now_ms() >= give_up) {
      rc = lock_busy(fd, shown, err);
      close(fd);
      return rc;
    } else {
      nanosleep(&pause, NULL);
    }
    close(fd);
  }
  write_pid(fd);
  lock->fd = fd;
  return MF_OK;
}

void store_lock_drop(struct store_lock *lock)
{
  if(lock->fd < 0)
    return;
  unlink(lock->path);
  close(lock->fd);
  lock->fd = -1;
}

/* ---- replacing ---- */
static int flush_path(const char *path, int flags)
{
  int fd = open(path, flags | O_CLOEXEC);
  int failed;
  if(fd < 0)
    return -1;
  failed = fsync(fd);
  close(fd);
  return failed;
}

enum mf_status store_file_replace(const char *from, const char *to, struct error *err)
{
  char folder[STORE_PATH_MAX];
  if(flush_path(from, O_RDWR) != 0)
    return error_errno(err, MF_ERR_IO, errno, "%s: cannot be flushed to disk", from);
  if(rename(from, to) != 0)
    return error_errno(err, MF_ERR_IO, errno, "%s: cannot be replaced by %s", to, from);
  snprintf(folder, sizeof(folder), "%s", to);
  /* The new file is in place; a folder that cannot be flushed (some network file systems) only delays that. */
  flush_path(dirname(folder), O_RDONLY | O_DIRECTORY);
  return MF_OK;
}
