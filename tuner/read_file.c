/* read_file.c - see read_file.h. */
#include "read_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* Up to 'space' bytes of 'fd', less at its end. */
static enum mf_status read_bytes(int fd, char *bytes, size_t space, size_t *count, struct error *err)
{
  *count = 0;
  while(*count < space) {
    const ssize_t more = read(fd, bytes + *count, space - *count);
    if(more < 0 && errno == EINTR)
      continue;
    if(more < 0)
      return error_errno(err, MF_ERR_IO, errno, "cannot read it");
    if(more == 0)
      break;
    *count += (size_t)more;
  }
  return MF_OK;
}

enum mf_status read_file(const char *path, size_t limit, char **bytes, size_t *count, struct error *err)
{
  enum mf_status rc = MF_OK;
  struct stat st;
  char *text = NULL;
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  *bytes = NULL;
  *count = 0;
  if(fd < 0)
    return error_errno(err, MF_ERR_IO, errno, "cannot read it");
  if(fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    rc = error_set(err, MF_ERR_IO, "cannot read it: expected a regular file%s", S_ISDIR(st.st_mode) ? ", this is a folder" : "");
    goto out;
  }
  if((unsigned long long)st.st_size > limit) {
    rc = error_set(err, MF_ERR_SPEC, "expected at most %zu bytes, got %lld", limit, (long long)st.st_size);
    goto out;
  }
  text = malloc((size_t)st.st_size + 1);
  if(text == NULL) {
    rc = error_set(err, MF_ERR_NOMEM, "out of memory");
    goto out;
  }
  rc = read_bytes(fd, text, (size_t)st.st_size, count, err);
  if(rc != MF_OK)
    goto out;
  text[*count] = '\0';
  *bytes = text;
  text = NULL;
out:
  free(text);
  close(fd);
  return rc;
}
