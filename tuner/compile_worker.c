/* compile_worker.c - the child of compile_pool.c: answers compile requests until the parent closes its end.
 *
 * NVRTC is opened at the first request and stays. If it cannot be opened, every request is answered with that reason. */
#include "compile_worker.h"
#include "compile.h"
#include "worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Points 'out' into the packed files of a request; nothing is copied. False if they are malformed. */
static bool unpack_closure(char *packed, size_t bytes, struct closure *out)
{
  size_t at = 0;
  memset(out, 0, sizeof(*out));
  if(bytes > 0 && packed[bytes - 1] != '\0')
    return false;
  while(at < bytes) {
    if(out->count == CLOSURE_MAX_FILES)
      return false;
    out->name[out->count] = packed + at;
    at += strlen(packed + at) + 1;
    if(at >= bytes)
      return false;
    out->text[out->count++] = packed + at;
    at += strlen(packed + at) + 1;
  }
  return true;
}

/* A JSON string of any text: what is not ASCII, as a compiler may quote it, turns into '?'. */
static json_t *ascii(const char *text)
{
  char clean[ERROR_TEXT_MAX];
  snprintf(clean, sizeof(clean), "%s", text);
  for(char *p = clean; *p != '\0'; p++) {
    if((unsigned char)*p >= 0x80)
      *p = '?';
  }
  return json_string(clean);
}

static void set_error(struct frame *answer, enum mf_status status, const struct error *err)
{
  json_object_set_new(answer->head, "status", json_integer(status));
  json_object_set_new(answer->head, "error", ascii(status != MF_OK ? err->text : ""));
}

static void answer_toolkit(const struct nvrtc *nvrtc, struct frame *answer)
{
  json_object_set_new(answer->head, "nvrtc", json_integer(nvrtc_version(nvrtc)));
  json_object_set_new(answer->head, "path", ascii(nvrtc_path(nvrtc)));
}

/* Moves the result into the answer. */
static void answer_artifact(struct artifact *art, struct frame *answer)
{
#define RESULT_TO_JSON(key, type, member) json_object_set_new(answer->head, key, json_integer(art->member));
  COMPILE_RESULT_TABLE(RESULT_TO_JSON)
#undef RESULT_TO_JSON
  json_object_set_new(answer->head, "seconds", json_real(art->compile_seconds));
  answer->blob[0] = art->cubin;
  answer->blob_bytes[0] = art->cubin_bytes;
  answer->blob[1] = art->log;
  answer->blob_bytes[1] = art->log != NULL ? strlen(art->log) : 0;
  art->cubin = NULL;
  art->log = NULL;
}

static enum mf_status compile_request(struct nvrtc *nvrtc, const struct frame *request, struct frame *answer, struct error *err)
{
  struct artifact art = {0};
  struct closure closure;
  const char *name = NULL, *arch = NULL;
  int build = COMPILE_PLAIN;
  enum mf_status rc;
  if(json_unpack(request->head, "{s:s, s:s, s:i}", "name", &name, "arch", &arch, "build", &build) != 0 || build < COMPILE_PLAIN || build > COMPILE_SYNCCHECK || request->blob[0] == NULL ||
     !unpack_closure(request->blob[1], request->blob_bytes[1], &closure))
    return error_set(err, MF_ERR_INTERNAL, "malformed compile request");
  snprintf(art.name, sizeof(art.name), "%s", name);
  art.source = request->blob[0]; /* frames end in a NUL beyond their size */
  rc = compile_artifact(nvrtc, &closure, arch, (enum compile_build)build, &art, err);
  answer_artifact(&art, answer);
  return rc;
}

/* Opens NVRTC if it is not open yet, and does what 'request' says. */
static enum mf_status serve(struct nvrtc **nvrtc, const struct frame *request, struct frame *answer, struct error *err)
{
  const char *op = json_string_value(json_object_get(request->head, "op"));
  enum mf_status rc = *nvrtc != NULL ? MF_OK : nvrtc_open(nvrtc, err);
  if(rc != MF_OK)
    return rc;
  if(op != NULL && strcmp(op, COMPILE_OP_TOOLKIT) == 0) {
    answer_toolkit(*nvrtc, answer);
    return MF_OK;
  }
  if(op != NULL && strcmp(op, COMPILE_OP_COMPILE) == 0)
    return compile_request(*nvrtc, request, answer, err);
  return error_set(err, MF_ERR_INTERNAL, "unknown request '%s'", op != NULL ? op : "");
}

int worker_main_compile(int fd)
{
  struct nvrtc *nvrtc = NULL;
  struct error err = {0};
  enum mf_status rc;
  for(;;) {
    struct frame request, answer = {0};
    struct error why = {0};
    rc = frame_read(fd, &request, &err);
    if(rc != MF_OK)
      break;
    answer.head = json_object();
    set_error(&answer, serve(&nvrtc, &request, &answer, &why), &why);
    rc = frame_write(fd, &answer, &err);
    frame_free(&request);
    frame_free(&answer);
    if(rc != MF_OK)
      break;
  }
  nvrtc_close(nvrtc);
  if(rc == MF_ERR_NOT_FOUND)
    return 0;
  fprintf(stderr, "moeforge: compile worker: %s\n", err.text);
  return error_exit_code(rc);
}
