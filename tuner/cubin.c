/* cubin.c - reads what we need of a cubin. A cubin is an ELF64 file for machine 190:
 *
 *   .text.<kernel>         code                            .nv.info          attributes of all functions: registers, stack
 *   .nv.shared.<kernel>    no bytes, its size is the static shared memory + 1 KB that the system reserves
 *   .nv.constant<n>[.<k>]  constant banks                  .nv.global.init   initialised globals: the metadata symbol lies here
 *
 * An attribute record is { u8 format, u8 id, u16 value-or-length [, payload] }; formats 1-3 hold their value in the u16, format 4 has a payload
 * of that length. The three that we read have the payload { u32 symbol index, u32 value }.
 *
 * Cubins come from files and databases, so every offset is checked against the file before it is used, and headers are copied out of it (nothing in
 * it is aligned). The layout is the same in CUDA 12 (ABI 7) and 13 (ABI 8). */
#include "compile.h"
#include "sha256.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MACHINE_CUDA 190
#define MAX_SECTIONS 4096
#define SYMBOL_IS_KERNEL 0x10 /* in st_other */
#define SYSTEM_SHARED_BYTES 1024
#define ATTR_FORMAT_PAYLOAD 4
#define ATTR_FRAME_SIZE 0x11
#define ATTR_MIN_STACK_SIZE 0x12
#define ATTR_REGISTERS 0x2f

struct elf {
  const unsigned char *bytes;
  size_t size;
  Elf64_Ehdr head;
  Elf64_Shdr names; /* section header string table */
};

static enum mf_status corrupt(struct error *err, const char *what)
{
  return error_set(err, MF_ERR_CORRUPT, "the cubin is damaged or no cubin: %s", what);
}

static bool inside(const struct elf *elf, uint64_t offset, uint64_t length)
{
  return offset <= elf->size && length <= elf->size - offset;
}

/* Section header 'index', whose index must be below e_shnum. False if its bytes lie outside the file. */
static bool section_at(const struct elf *elf, unsigned index, Elf64_Shdr *out)
{
  memcpy(out, elf->bytes + elf->head.e_shoff + (uint64_t)index * sizeof(*out), sizeof(*out));
  return out->sh_type == SHT_NOBITS || out->sh_type == SHT_NULL || inside(elf, out->sh_offset, out->sh_size);
}

/* The string at 'offset' of a string table, NULL if it is not terminated inside. */
static const char *string_at(const struct elf *elf, const Elf64_Shdr *table, uint64_t offset)
{
  const unsigned char *text = elf->bytes + table->sh_offset;
  if(offset >= table->sh_size || memchr(text + offset, '\0', table->sh_size - offset) == NULL)
    return NULL;
  return (const char *)text + offset;
}

static enum mf_status elf_open(const unsigned char *bytes, size_t size, struct elf *out, struct error *err)
{
  *out = (struct elf){.bytes = bytes, .size = size};
  if(bytes == NULL || size < sizeof(out->head) || memcmp(bytes, ELFMAG, SELFMAG) != 0)
    return corrupt(err, "it does not start with an ELF header");
  memcpy(&out->head, bytes, sizeof(out->head));
  if(out->head.e_ident[EI_CLASS] != ELFCLASS64 || out->head.e_ident[EI_DATA] != ELFDATA2LSB || out->head.e_machine != MACHINE_CUDA)
    return corrupt(err, "not a 64-bit ELF file for CUDA");
  if(out->head.e_shentsize != sizeof(Elf64_Shdr) || out->head.e_shnum == 0 || out->head.e_shnum > MAX_SECTIONS ||
     !inside(out, out->head.e_shoff, (uint64_t)out->head.e_shnum * sizeof(Elf64_Shdr)))
    return corrupt(err, "its section table lies outside the file");
  if(out->head.e_shstrndx >= out->head.e_shnum || !section_at(out, out->head.e_shstrndx, &out->names) || out->names.sh_type != SHT_STRTAB)
    return corrupt(err, "it has no table of section names");
  return MF_OK;
}

/* Finds a section by name and by type (SHT_NULL: any). MF_ERR_NOT_FOUND without a message if there is none. */
static enum mf_status find_section(const struct elf *elf, const char *name, uint32_t type, Elf64_Shdr *out, struct error *err)
{
  for(unsigned i = 1; i < elf->head.e_shnum; i++) {
    const bool fits = section_at(elf, i, out);
    const char *found = string_at(elf, &elf->names, out->sh_name);
    if(found == NULL)
      return corrupt(err, "a section's name lies outside the name table");
    if(strcmp(found, name) != 0 || (type != SHT_NULL && out->sh_type != type))
      continue;
    if(!fits)
      return error_set(err, MF_ERR_CORRUPT, "the cubin is damaged: section %s lies outside the file", name);
    return MF_OK;
  }
  return MF_ERR_NOT_FOUND;
}

/* ---- symbols ---- */
struct symbols {
  Elf64_Shdr table, names;
  uint64_t count;
};

static enum mf_status symbols_open(const struct elf *elf, struct symbols *out, struct error *err)
{
  enum mf_status rc;
  memset(out, 0, sizeof(*out));
  rc = find_section(elf, ".symtab", SHT_SYMTAB, &out->table, err);
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? corrupt(err, "it has no symbol table") : rc;
  if(out->table.sh_entsize != sizeof(Elf64_Sym) || out->table.sh_link >= elf->head.e_shnum || !section_at(elf, out->table.sh_link, &out->names) ||
     out->names.sh_type != SHT_STRTAB)
    return corrupt(err, "its symbol table is malformed");
  out->count = out->table.sh_size / sizeof(Elf64_Sym);
  return MF_OK;
}

/* Copies symbol 'index' and returns its name, NULL if that lies outside the string table. */
static const char *symbol_at(const struct elf *elf, const struct symbols *symbols, uint64_t index, Elf64_Sym *out)
{
  memcpy(out, elf->bytes + symbols->table.sh_offset + index * sizeof(*out), sizeof(*out));
  return string_at(elf, &symbols->names, out->st_name);
}

static bool is_kernel(const Elf64_Sym *symbol)
{
  return ELF64_ST_TYPE(symbol->st_info) == STT_FUNC && (symbol->st_other & SYMBOL_IS_KERNEL) != 0 && symbol->st_shndx != SHN_UNDEF;
}

static bool is_object(const Elf64_Sym *symbol)
{
  return ELF64_ST_TYPE(symbol->st_info) == STT_OBJECT && symbol->st_shndx != SHN_UNDEF;
}

/* First symbol called 'name' for which 'accept' holds; MF_ERR_NOT_FOUND without a message if there is none. */
static enum mf_status find_symbol(const struct elf *elf, const char *name, bool (*accept)(const Elf64_Sym *), Elf64_Sym *out, uint64_t *index,
                                  struct error *err)
{
  struct symbols symbols;
  enum mf_status rc = symbols_open(elf, &symbols, err);
  if(rc != MF_OK)
    return rc;
  for(*index = 0; *index < symbols.count; ++*index) {
    const char *found = symbol_at(elf, &symbols, *index, out);
    if(found == NULL)
      return corrupt(err, "a symbol's name lies outside the string table");
    if(strcmp(found, name) == 0 && accept(out))
      return MF_OK;
  }
  return MF_ERR_NOT_FOUND;
}

static enum mf_status find_kernel(const struct elf *elf, const char *kernel, uint64_t *index, struct error *err)
{
  Elf64_Sym symbol;
  const enum mf_status rc = find_symbol(elf, kernel, is_kernel, &symbol, index, err);
  return rc == MF_ERR_NOT_FOUND ? error_set(err, MF_ERR_CORRUPT, "the cubin has no kernel '%s'", kernel) : rc;
}

enum mf_status cubin_kernel_at(const unsigned char *cubin, size_t bytes, int index, char *name, size_t space, struct error *err)
{
  struct elf elf;
  struct symbols symbols;
  enum mf_status rc = elf_open(cubin, bytes, &elf, err);
  if(rc == MF_OK)
    rc = symbols_open(&elf, &symbols, err);
  if(rc != MF_OK)
    return rc;
  for(uint64_t i = 0; i < symbols.count; i++) {
    Elf64_Sym symbol;
    const char *found = symbol_at(&elf, &symbols, i, &symbol);
    if(!is_kernel(&symbol) || index-- > 0)
      continue;
    if(found == NULL || snprintf(name, space, "%s", found) >= (int)space)
      return corrupt(err, "a kernel's name is too long or lies outside the string table");
    return MF_OK;
  }
  return error_set(err, MF_ERR_NOT_FOUND, "the cubin has no kernel; expected an extern \"C\" __global__ function");
}

/* ---- attributes ---- */
/* Largest value of attribute 'id' of symbol 'index' in .nv.info, -1 if there is none. */
static enum mf_status read_attribute(const struct elf *elf, unsigned id, uint64_t index, long *out, struct error *err)
{
  Elf64_Shdr info;
  const enum mf_status rc = find_section(elf, ".nv.info", SHT_NULL, &info, err);
  const unsigned char *at;
  uint64_t left;
  *out = -1;
  if(rc != MF_OK)
    return rc == MF_ERR_NOT_FOUND ? corrupt(err, "it has no .nv.info section") : rc;
  if(info.sh_type == SHT_NOBITS || info.sh_type == SHT_NULL)
    return corrupt(err, ".nv.info has no bytes");
  at = elf->bytes + info.sh_offset;
  for(left = info.sh_size; left >= 4;) {
    const unsigned length = at[0] == ATTR_FORMAT_PAYLOAD ? (unsigned)at[2] | (unsigned)at[3] << 8 : 0;
    uint32_t pair[2];
    if(at[0] == 0 || at[0] > ATTR_FORMAT_PAYLOAD || length > left - 4)
      return corrupt(err, "an attribute in .nv.info is malformed");
    if(at[0] == ATTR_FORMAT_PAYLOAD && at[1] == id && length == sizeof(pair)) {
      memcpy(pair, at + 4, sizeof(pair));
      if(pair[0] == index && (long)pair[1] > *out)
        *out = (long)pair[1];
    }
    at += 4 + length;
    left -= 4 + length;
  }
  return left == 0 ? MF_OK : corrupt(err, ".nv.info ends inside an attribute");
}

static enum mf_status read_static_shared(const struct elf *elf, const char *kernel, long *out, struct error *err)
{
  Elf64_Shdr section;
  char name[512];
  enum mf_status rc;
  *out = 0;
  if(snprintf(name, sizeof(name), ".nv.shared.%s", kernel) >= (int)sizeof(name))
    return error_set(err, MF_ERR_CORRUPT, "kernel name '%.64s...' is too long", kernel);
  rc = find_section(elf, name, SHT_NULL, &section, err);
  if(rc == MF_ERR_NOT_FOUND)
    return MF_OK;
  if(rc != MF_OK)
    return rc;
  if(section.sh_size < SYSTEM_SHARED_BYTES || section.sh_size > (1u << 30))
    return error_set(err, MF_ERR_CORRUPT, "%s has %llu bytes, expected at least the %d that the system reserves", name,
                     (unsigned long long)section.sh_size, SYSTEM_SHARED_BYTES);
  *out = (long)section.sh_size - SYSTEM_SHARED_BYTES;
  return MF_OK;
}

enum mf_status cubin_read_resources(const unsigned char *cubin, size_t bytes, const char *kernel, struct artifact *out, struct error *err)
{
  struct elf elf;
  uint64_t index = 0;
  long registers = -1, frame = -1, stack = -1, shared = 0;
  enum mf_status rc = elf_open(cubin, bytes, &elf, err);
  if(rc == MF_OK)
    rc = find_kernel(&elf, kernel, &index, err);
  if(rc == MF_OK)
    rc = read_attribute(&elf, ATTR_REGISTERS, index, &registers, err);
  if(rc == MF_OK)
    rc = read_attribute(&elf, ATTR_FRAME_SIZE, index, &frame, err);
  if(rc == MF_OK)
    rc = read_attribute(&elf, ATTR_MIN_STACK_SIZE, index, &stack, err);
  if(rc == MF_OK)
    rc = read_static_shared(&elf, kernel, &shared, err);
  if(rc != MF_OK)
    return rc;
  if(registers < 1 || registers > 255 || (frame < 0 && stack < 0))
    return error_set(err, MF_ERR_CORRUPT, "the cubin's attributes of kernel '%s' lack its registers (1 to 255) or its stack", kernel);
  out->registers = (int)registers;
  out->stack_bytes = frame > stack ? frame : stack;
  out->static_shared_bytes = shared;
  return MF_OK;
}

enum mf_status cubin_frame_bytes(const unsigned char *cubin, size_t bytes, const char *kernel, long *frame_bytes, struct error *err)
{
  struct elf elf;
  uint64_t index = 0;
  enum mf_status rc = elf_open(cubin, bytes, &elf, err);
  if(rc == MF_OK)
    rc = find_kernel(&elf, kernel, &index, err);
  if(rc == MF_OK)
    rc = read_attribute(&elf, ATTR_FRAME_SIZE, index, frame_bytes, err);
  if(rc == MF_OK && *frame_bytes < 0)
    rc = error_set(err, MF_ERR_CORRUPT, "the cubin's attributes of kernel '%s' lack its stack frame", kernel);
  return rc;
}

/* ---- a symbol's initial value ---- */
static enum mf_status find_object(const unsigned char *cubin, size_t bytes, const char *name, struct elf *elf, Elf64_Sym *symbol, struct error *err)
{
  uint64_t index;
  enum mf_status rc = elf_open(cubin, bytes, elf, err);
  if(rc == MF_OK)
    rc = find_symbol(elf, name, is_object, symbol, &index, err);
  return rc == MF_ERR_NOT_FOUND ? error_set(err, rc, "the cubin has no symbol '%s'; expected extern \"C\" __device__ const", name) : rc;
}

enum mf_status cubin_symbol_bytes(const unsigned char *cubin, size_t bytes, const char *symbol, size_t *out, struct error *err)
{
  struct elf elf;
  Elf64_Sym found = {0};
  const enum mf_status rc = find_object(cubin, bytes, symbol, &elf, &found, err);
  if(rc == MF_OK)
    *out = (size_t)found.st_size;
  return rc;
}

enum mf_status cubin_read_symbol(const unsigned char *cubin, size_t bytes, const char *symbol, void *out, size_t out_bytes, struct error *err)
{
  struct elf elf;
  Elf64_Sym found = {0};
  Elf64_Shdr section;
  const enum mf_status rc = find_object(cubin, bytes, symbol, &elf, &found, err);
  uint64_t offset;
  if(rc != MF_OK)
    return rc;
  if(found.st_shndx >= elf.head.e_shnum || !section_at(&elf, found.st_shndx, &section))
    return error_set(err, MF_ERR_CORRUPT, "the cubin is damaged: the section of symbol '%s' lies outside the file", symbol);
  if(section.sh_type != SHT_PROGBITS)
    return error_set(err, MF_ERR_CORRUPT, "symbol '%s' has no initial value in the cubin", symbol);
  offset = found.st_value - section.sh_addr;
  if(found.st_value < section.sh_addr || offset > section.sh_size || found.st_size > section.sh_size - offset)
    return error_set(err, MF_ERR_CORRUPT, "the cubin is damaged: symbol '%s' lies outside its section", symbol);
  if(found.st_size != out_bytes)
    return error_set(err, MF_ERR_CORRUPT, "symbol '%s' has %llu bytes, expected %zu", symbol, (unsigned long long)found.st_size, out_bytes);
  memcpy(out, elf.bytes + section.sh_offset + offset, out_bytes);
  return MF_OK;
}

/* ---- code hash ---- */
struct named_section {
  const char *name;
  Elf64_Shdr head;
};

static int by_name(const void *a, const void *b)
{
  const struct named_section *left = a, *right = b;
  const int order = strcmp(left->name, right->name);
  return order != 0 ? order : (left->head.sh_offset > right->head.sh_offset) - (left->head.sh_offset < right->head.sh_offset);
}

static bool is_hashed(const char *name)
{
  static const char *const prefixes[] = {".text.", ".nv.constant", ".nv.global.init"};
  for(size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++)
    if(strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
      return true;
  return false;
}

static void hash_sections(const struct elf *elf, const struct named_section *sections, unsigned count, char key[KEY_LEN])
{
  struct sha256 ctx;
  unsigned char digest[32];
  char line[64];
  sha256_init(&ctx);
  for(unsigned i = 0; i < count; i++) {
    sha256_add(&ctx, sections[i].name, strlen(sections[i].name) + 1);
    snprintf(line, sizeof(line), "%llu", (unsigned long long)sections[i].head.sh_size);
    sha256_add(&ctx, line, strlen(line) + 1);
    if(sections[i].head.sh_type != SHT_NOBITS && sections[i].head.sh_type != SHT_NULL)
      sha256_add(&ctx, elf->bytes + sections[i].head.sh_offset, (size_t)sections[i].head.sh_size);
  }
  sha256_end(&ctx, digest);
  sha256_hex(digest, key);
}

enum mf_status cubin_code_hash(const unsigned char *cubin, size_t bytes, char key[KEY_LEN], struct error *err)
{
  struct elf elf;
  struct named_section *sections = NULL;
  unsigned count = 0;
  enum mf_status rc = elf_open(cubin, bytes, &elf, err);
  if(rc != MF_OK)
    return rc;
  sections = calloc(elf.head.e_shnum + 1u, sizeof(*sections));
  if(sections == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory for %u sections", elf.head.e_shnum);
  for(unsigned i = 1; i < elf.head.e_shnum; i++) {
    const bool fits = section_at(&elf, i, &sections[count].head);
    sections[count].name = string_at(&elf, &elf.names, sections[count].head.sh_name);
    if(sections[count].name == NULL || (!fits && is_hashed(sections[count].name))) {
      rc = corrupt(err, "a section or its name lies outside the file");
      goto out;
    }
    if(is_hashed(sections[count].name))
      count++;
  }
  if(count == 0) {
    rc = corrupt(err, "it has no code");
    goto out;
  }
  qsort(sections, count, sizeof(*sections), by_name);
  hash_sections(&elf, sections, count, key);
out:
  free(sections);
  return rc;
}
