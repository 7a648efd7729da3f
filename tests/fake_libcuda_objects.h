/* fake_libcuda_objects.h - part of fake_libcuda.c (included there and nowhere else): modules, memory, streams, events. */
#ifndef MOEFORGE_TESTS_FAKE_LIBCUDA_OBJECTS_H
#define MOEFORGE_TESTS_FAKE_LIBCUDA_OBJECTS_H

#include <elf.h>

static uint64_t hash_bytes(uint64_t h, const void *bytes, size_t count)
{
  const unsigned char *p = bytes;
  for(size_t i = 0; i < count; i++)
    h = (h ^ p[i]) * 0x100000001b3u;
  return h;
}

/* ---- modules ---- */
/* Bytes of an ELF image: its section headers say how long it is. 0 if it is none. */
static size_t elf_bytes(const unsigned char *image)
{
  Elf64_Ehdr head;
  size_t end;
  memcpy(&head, image, sizeof(head));
  if(memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_shentsize != sizeof(Elf64_Shdr))
    return 0;
  end = head.e_shoff + (size_t)head.e_shnum * sizeof(Elf64_Shdr);
  if(head.e_phoff + (size_t)head.e_phnum * head.e_phentsize > end)
    end = head.e_phoff + (size_t)head.e_phnum * head.e_phentsize;
  return end;
}

/* Parameter sizes of 'function' from the .nv.info section of a cubin: attribute 0x17 (KPARAM_INFO) holds ordinal and size. */
static bool elf_parameters(const struct module *m, struct function *function)
{
  const Elf64_Ehdr *head = (const void *)m->image;
  const Elf64_Shdr *sections = (const void *)(m->image + head->e_shoff);
  const char *names = (const char *)m->image + sections[head->e_shstrndx].sh_offset;
  char wanted[160];
  snprintf(wanted, sizeof(wanted), ".nv.info.%s", function->name);
  for(int i = 0; i < head->e_shnum; i++) {
    const unsigned char *p = m->image + sections[i].sh_offset, *end = p + sections[i].sh_size;
    if(strcmp(names + sections[i].sh_name, wanted) != 0)
      continue;
    while(p + 4 <= end) { /* format, attribute, then u16: the value, or the number of bytes that follow (format 4) */
      uint16_t length, ordinal;
      uint32_t size;
      memcpy(&length, p + 2, 2);
      if(p[0] == 4 && p[1] == 0x17 && length >= 12 && p + 16 <= end) {
        memcpy(&ordinal, p + 8, 2);
        memcpy(&size, p + 12, 4);
        if(ordinal < FAKECUDA_MAX_PARAMS) {
          function->sizes[ordinal] = size >> 18;
          if(function->nparams <= ordinal)
            function->nparams = ordinal + 1;
        }
      }
      p += 4 + (p[0] == 4 ? length : 0);
    }
    return true;
  }
  return false;
}

static bool text_parameters(const struct module *m, struct function *function)
{
  char line[256], *rest, *word;
  snprintf(line, sizeof(line), "%.*s", (int)(m->bytes < 255 ? m->bytes : 255), (const char *)m->image);
  line[strcspn(line, "\n")] = '\0';
  rest = line;
  strsep(&rest, " ");
  word = strsep(&rest, " ");
  if(word == NULL || strcmp(word, function->name) != 0)
    return false;
  while((word = strsep(&rest, " ")) != NULL && function->nparams < FAKECUDA_MAX_PARAMS)
    function->sizes[function->nparams++] = strtoul(word, NULL, 10);
  return true;
}

CUresult fake_cuModuleLoadData(CUmodule *out, const void *image)
{
  const bool text = memcmp(image, "FAKECUBIN ", 10) == 0;
  const size_t bytes = text ? strcspn(image, "\n") + 1 : elf_bytes(image);
  struct module *m;
  CUresult rc;
  fake_enter();
  rc = usable();
  if(rc == CUDA_SUCCESS && fake.capturing > 0)
    rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if(rc == CUDA_SUCCESS && fake.script.load_fail)
    rc = CUDA_ERROR_NO_BINARY_FOR_GPU;
  if(rc == CUDA_SUCCESS && bytes == 0)
    rc = CUDA_ERROR_INVALID_IMAGE;
  if(rc != CUDA_SUCCESS)
    return fake_leave(rc);
  m = calloc(1, sizeof(*m));
  m->kind = KIND_MODULE;
  m->context = current_context();
  m->image = malloc(bytes);
  m->bytes = bytes;
  memcpy(m->image, image, bytes);
  m->hash = hash_bytes(0xcbf29ce484222325u, image, bytes);
  fake.alive++;
  log_line("module bytes=%zu\n", bytes);
  *out = (CUmodule)(void *)m;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuModuleUnload(CUmodule module)
{
  struct module *m = (void *)module;
  CUresult rc;
  fake_enter();
  rc = usable();
  if(m == NULL || m->kind != KIND_MODULE || rc == CUDA_ERROR_INVALID_CONTEXT)
    return fake_leave(CUDA_ERROR_INVALID_HANDLE);
  while(m->functions != NULL) {
    struct function *next = m->functions->next;
    free(m->functions);
    m->functions = next;
  }
  m->kind = 0;
  free(m->image);
  free(m);
  fake.alive--;
  return fake_leave(rc); /* gone also after a fault, which is still reported */
}

CUresult fake_cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
  struct module *m = (void *)module;
  struct function *f;
  CUresult rc;
  fake_enter();
  rc = m == NULL || m->kind != KIND_MODULE ? CUDA_ERROR_INVALID_HANDLE : usable();
  if(rc != CUDA_SUCCESS)
    return fake_leave(rc);
  for(f = m->functions; f != NULL && strcmp(f->name, name) != 0; f = f->next)
    ;
  if(f == NULL) {
    f = calloc(1, sizeof(*f));
    f->kind = KIND_FUNCTION;
    f->module = m;
    f->shared_limit = 49152;
    snprintf(f->name, sizeof(f->name), "%s", name);
    if(!(memcmp(m->image, "FAKE", 4) == 0 ? text_parameters(m, f) : elf_parameters(m, f))) {
      free(f);
      return fake_leave(CUDA_ERROR_NOT_FOUND);
    }
    f->next = m->functions;
    m->functions = f;
  }
  *out = (CUfunction)(void *)f;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size)
{
  const struct function *f = (const void *)function;
  if(f == NULL || f->kind != KIND_FUNCTION || index >= (size_t)f->nparams)
    return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  for(size_t i = 0; i < index; i++)
    *offset += (f->sizes[i] + 7) / 8 * 8;
  *size = f->sizes[index];
  return CUDA_SUCCESS;
}

CUresult fake_cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
  struct function *f = (void *)function;
  if(f == NULL || f->kind != KIND_FUNCTION)
    return CUDA_ERROR_INVALID_HANDLE;
  if(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if(value < 0 || value > 232448)
      return CUDA_ERROR_INVALID_VALUE;
    f->shared_limit = value;
    log_line("shared_limit kernel=%s bytes=%d\n", f->name, value);
  }
  return CUDA_SUCCESS;
}

CUresult fake_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared_bytes)
{
  const struct function *f = (const void *)function;
  if(f == NULL || f->kind != KIND_FUNCTION || threads <= 0)
    return CUDA_ERROR_INVALID_VALUE;
  *blocks = threads > 1024 || shared_bytes > (size_t)f->shared_limit ? 0 : (int)fake.script.occupancy;
  return CUDA_SUCCESS;
}

/* ---- memory ---- */
static unsigned char *allocation_of(const void *address, size_t bytes)
{
  const unsigned char *p = address;
  for(struct allocation *a = fake.allocations; a != NULL; a = a->next)
    if(p >= a->address && p < a->address + a->bytes)
      return bytes <= (size_t)(a->address + a->bytes - p) ? a->address : NULL;
  return NULL;
}

CUresult fake_cuMemAlloc(CUdeviceptr *out, size_t bytes)
{
  struct allocation *a;
  CUresult rc;
  fake_enter();
  rc = usable();
  if(rc == CUDA_SUCCESS && fake.capturing > 0)
    rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if(rc == CUDA_SUCCESS && bytes == 0)
    rc = CUDA_ERROR_INVALID_VALUE;
  if(rc == CUDA_SUCCESS && (fake.script.oom || bytes > (size_t)fake.script.mem - fake.allocated))
    rc = CUDA_ERROR_OUT_OF_MEMORY;
  if(rc != CUDA_SUCCESS)
    return fake_leave(rc);
  a = calloc(1, sizeof(*a));
  a->bytes = bytes;
  if(bytes >= MAPPED_FROM) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    a->address = p != MAP_FAILED ? p : NULL;
  } else
    a->address = aligned_alloc(512, (bytes + 511) / 512 * 512);
  if(a->address == NULL) {
    free(a);
    return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
  }
  if(bytes < MAPPED_FROM)
    memset(a->address, 0xcd, bytes);
  a->next = fake.allocations;
  fake.allocations = a;
  fake.allocated += bytes;
  fake.alive++;
  *out = (CUdeviceptr)(uintptr_t)a->address;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuMemFree(CUdeviceptr address)
{
  CUresult rc;
  fake_enter();
  rc = address == 0 ? CUDA_SUCCESS : usable();
  for(struct allocation **at = &fake.allocations; rc == CUDA_SUCCESS && address != 0; at = &(*at)->next) {
    struct allocation *a = *at;
    if(a == NULL)
      rc = CUDA_ERROR_INVALID_VALUE;
    else if((CUdeviceptr)(uintptr_t)a->address == address) {
      *at = a->next;
      if(a->bytes >= MAPPED_FROM)
        munmap(a->address, a->bytes);
      else
        free(a->address);
      fake.allocated -= a->bytes;
      fake.alive--;
      free(a);
      break;
    }
  }
  return fake_leave(rc);
}

CUresult fake_cuMemGetInfo(size_t *available, size_t *total)
{
  CUresult rc;
  fake_enter();
  rc = usable();
  *total = (size_t)fake.script.mem;
  *available = *total - fake.allocated;
  return fake_leave(rc);
}

static CUresult copy(void *to, const void *from, size_t bytes, bool check_to, bool check_from)
{
  CUresult rc;
  fake_enter();
  rc = synchronise();
  if(rc == CUDA_SUCCESS && bytes > 0 && ((check_to && allocation_of(to, bytes) == NULL) || (check_from && allocation_of(from, bytes) == NULL)))
    rc = CUDA_ERROR_INVALID_VALUE;
  if(rc == CUDA_SUCCESS)
    memmove(to, from, bytes);
  return fake_leave(rc);
}

CUresult fake_cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) { return copy((void *)(uintptr_t)to, from, bytes, true, false); }
CUresult fake_cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) { return copy(to, (const void *)(uintptr_t)from, bytes, false, true); }
CUresult fake_cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
  return copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes, true, true);
}

/* ---- streams, events ---- */
static struct stream *stream_of(CUstream handle)
{
  struct stream *s = (void *)handle;
  if((uintptr_t)handle <= 2) /* the default streams: 0, legacy, per thread */
    return &fake.default_stream;
  return s->kind == KIND_STREAM ? s : NULL;
}

CUresult fake_cuStreamCreate(CUstream *out, unsigned int flags)
{
  struct stream *s;
  CUresult rc;
  (void)flags;
  fake_enter();
  rc = usable();
  if(rc == CUDA_SUCCESS) {
    s = calloc(1, sizeof(*s));
    s->kind = KIND_STREAM;
    s->context = current_context();
    fake.alive++;
    *out = (CUstream)(void *)s;
  }
  return fake_leave(rc);
}

CUresult fake_cuStreamDestroy(CUstream handle)
{
  struct stream *s = stream_of(handle);
  if(s == NULL || s == &fake.default_stream)
    return CUDA_ERROR_INVALID_HANDLE;
  fake_enter();
  s->kind = 0;
  free(s);
  fake.alive--;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuStreamSynchronize(CUstream handle)
{
  CUresult rc;
  fake_enter();
  rc = stream_of(handle) == NULL ? CUDA_ERROR_INVALID_HANDLE : synchronise();
  return fake_leave(rc);
}

CUresult fake_cuStreamQuery(CUstream handle)
{
  CUresult rc;
  fake_enter();
  rc = stream_of(handle) == NULL ? CUDA_ERROR_INVALID_HANDLE : usable();
  if(rc == CUDA_SUCCESS && fake.hung)
    rc = CUDA_ERROR_NOT_READY;
  return fake_leave(rc);
}

CUresult fake_cuEventCreate(CUevent *out, unsigned int flags)
{
  struct event *e = calloc(1, sizeof(*e));
  (void)flags;
  fake_enter();
  e->kind = KIND_EVENT;
  fake.alive++;
  *out = (CUevent)(void *)e;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuEventDestroy(CUevent handle)
{
  struct event *e = (void *)handle;
  if(e == NULL || e->kind != KIND_EVENT)
    return CUDA_ERROR_INVALID_HANDLE;
  fake_enter();
  e->kind = 0;
  free(e);
  fake.alive--;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuEventRecord(CUevent handle, CUstream stream)
{
  struct event *e = (void *)handle;
  const struct stream *s = stream_of(stream);
  if(e == NULL || e->kind != KIND_EVENT || s == NULL)
    return CUDA_ERROR_INVALID_HANDLE;
  fake_enter();
  e->at_us = s->now_us;
  return fake_leave(usable());
}

CUresult fake_cuEventSynchronize(CUevent handle)
{
  const struct event *e = (const void *)handle;
  CUresult rc;
  fake_enter();
  rc = e == NULL || e->kind != KIND_EVENT ? CUDA_ERROR_INVALID_HANDLE : synchronise();
  return fake_leave(rc);
}

CUresult fake_cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
  const struct event *a = (const void *)from, *b = (const void *)to;
  if(a == NULL || b == NULL || a->kind != KIND_EVENT || b->kind != KIND_EVENT)
    return CUDA_ERROR_INVALID_HANDLE;
  if(fake.hung)
    return CUDA_ERROR_NOT_READY;
  *ms = (float)((b->at_us - a->at_us) / 1000);
  return CUDA_SUCCESS;
}

#endif
