/* cubin_image.c - are the bytes of a cubin safe to hand to the driver, which is told where they begin but not where they end?
 *
 * An ELF image says itself how far it reaches: its header, the two tables that the header names, what the tables' rows name, and the names of sections must
 * all lie inside. Anything else the driver takes for a text, which it reads up to a NUL: only printable bytes are let through, and package_file.c keeps a
 * NUL behind the file. What the kernel in it does is not judged.
 *
 * package_cubin_takes() also compares the kernel's parameters with the recipe's: a launch hands the driver addresses alone, and it copies as many bytes
 * from each as the cubin says. They are in the section .nv.info.<kernel>, a list of records { u8 format, u8 id, u16 value or length [, payload] }, of
 * which format 4 has a payload of that length. Of interest are
 *
 *   0x17 KPARAM_INFO        payload { u32 0, u16 ordinal, u16 offset, u32 size in the upper 14 bits, flags below }: one for each parameter
 *   0x19 CBANK_PARAM_SIZE   value: bytes of all parameters, which the offsets count in */
#include "package_file.h"

#include <elf.h>
#include <string.h>

#define INFO_SECTION ".nv.info."
#define INFO_FORMAT_PAYLOAD 4
#define INFO_KPARAM 0x17
#define INFO_KPARAM_BYTES 12
#define INFO_CBANK_PARAM_SIZE 0x19

static int inside(uint64_t offset, uint64_t bytes, uint64_t size)
{
  return offset <= size && bytes <= size - offset;
}

static Elf64_Shdr section_at(const unsigned char *image, const Elf64_Ehdr *head, uint32_t index)
{
  Elf64_Shdr s;
  memcpy(&s, image + head->e_shoff + index * sizeof(s), sizeof(s));
  return s;
}

/* Sections lie inside; each has a name that ends inside the table of names. */
static int sections_good(const unsigned char *image, uint64_t size, const Elf64_Ehdr *head)
{
  Elf64_Shdr names;
  if(head->e_shnum == 0)
    return head->e_shoff == 0; /* 0 with a table: more than fit into 16 bits, which no cubin has */
  if(head->e_shentsize != sizeof(Elf64_Shdr) || head->e_shstrndx >= head->e_shnum || !inside(head->e_shoff, head->e_shnum * sizeof(Elf64_Shdr), size))
    return 0;
  names = section_at(image, head, head->e_shstrndx);
  if(names.sh_type == SHT_NOBITS || !inside(names.sh_offset, names.sh_size, size) || names.sh_size == 0 ||
     image[names.sh_offset + names.sh_size - 1] != '\0')
    return 0;
  for(uint32_t i = 0; i < head->e_shnum; i++) {
    const Elf64_Shdr s = section_at(image, head, i);
    if(s.sh_name >= names.sh_size || (s.sh_type != SHT_NOBITS && s.sh_type != SHT_NULL && !inside(s.sh_offset, s.sh_size, size)))
      return 0;
  }
  return 1;
}

static int segments_good(const unsigned char *image, uint64_t size, const Elf64_Ehdr *head)
{
  if(head->e_phnum == 0)
    return 1;
  if(head->e_phentsize != sizeof(Elf64_Phdr) || !inside(head->e_phoff, head->e_phnum * sizeof(Elf64_Phdr), size))
    return 0;
  for(uint32_t i = 0; i < head->e_phnum; i++) {
    Elf64_Phdr p;
    memcpy(&p, image + head->e_phoff + i * sizeof(p), sizeof(p));
    if(!inside(p.p_offset, p.p_filesz, size))
      return 0;
  }
  return 1;
}

static int elf_good(const unsigned char *image, uint64_t size)
{
  Elf64_Ehdr head;
  if(size < sizeof(head))
    return 0;
  memcpy(&head, image, sizeof(head));
  return head.e_ident[EI_CLASS] == ELFCLASS64 && head.e_ident[EI_DATA] == ELFDATA2LSB && sections_good(image, size, &head) &&
         segments_good(image, size, &head);
}

int package_cubin_good(const unsigned char *image, uint64_t size)
{
  if(size >= SELFMAG && memcmp(image, ELFMAG, SELFMAG) == 0)
    return elf_good(image, size);
  for(uint64_t i = 0; i < size; i++)
    if((image[i] < ' ' && image[i] != '\n' && image[i] != '\t' && image[i] != '\r') || image[i] > '~')
      return 0;
  return 1;
}

/* ---- parameters ---- */
/* What the records of a kernel say. */
struct parameters {
  uint32_t seen;  /* bit i: there is a record of parameter i */
  uint64_t end;   /* of the one that lies last */
  uint64_t space; /* for all of them; UINT64_MAX: not said */
};

/* One parameter: known to the recipe, and of its size. */
static int take_parameter(const unsigned char *payload, const struct mf_recipe *recipe, struct parameters *p)
{
  uint16_t ordinal, offset;
  uint32_t word;
  memcpy(&ordinal, payload + 4, sizeof(ordinal));
  memcpy(&offset, payload + 6, sizeof(offset));
  memcpy(&word, payload + 8, sizeof(word));
  if(ordinal >= recipe->nparams || word >> 18 != recipe->params[ordinal].size)
    return 0;
  p->seen |= 1u << ordinal;
  if(p->end < offset + (uint64_t)(word >> 18))
    p->end = offset + (uint64_t)(word >> 18);
  return 1;
}

/* All records of a section; 0 also if one does not end inside. */
static int info_agrees(const unsigned char *at, uint64_t left, const struct mf_recipe *recipe)
{
  struct parameters p = {.space = UINT64_MAX};
  while(left >= 4) {
    const uint32_t value = at[2] | (uint32_t)at[3] << 8, length = at[0] == INFO_FORMAT_PAYLOAD ? value : 0;
    if(at[0] == 0 || at[0] > INFO_FORMAT_PAYLOAD || length > left - 4)
      return 0;
    if(at[1] == INFO_KPARAM && (length < INFO_KPARAM_BYTES || !take_parameter(at + 4, recipe, &p)))
      return 0;
    if(at[1] == INFO_CBANK_PARAM_SIZE && at[0] != INFO_FORMAT_PAYLOAD)
      p.space = value;
    at += 4 + length;
    left -= 4 + length;
  }
  if(left != 0 || p.end > p.space)
    return 0;
  return p.seen == 0 || p.seen == (1u << recipe->nparams) - 1;
}

int package_cubin_takes(const unsigned char *image, uint64_t size, const struct mf_recipe *recipe)
{
  Elf64_Ehdr head;
  Elf64_Shdr names;
  if(size < sizeof(head) || memcmp(image, ELFMAG, SELFMAG) != 0)
    return 1;
  memcpy(&head, image, sizeof(head));
  if(head.e_shnum == 0)
    return 1;
  names = section_at(image, &head, head.e_shstrndx);
  for(uint32_t i = 0; i < head.e_shnum; i++) { /* all of that name: who knows which one a driver takes */
    const Elf64_Shdr s = section_at(image, &head, i);
    const char *name = (const char *)image + names.sh_offset + s.sh_name;
    if(strncmp(name, INFO_SECTION, strlen(INFO_SECTION)) != 0 || strcmp(name + strlen(INFO_SECTION), recipe->kernel) != 0)
      continue;
    if(s.sh_type == SHT_NOBITS || s.sh_type == SHT_NULL || !info_agrees(image + s.sh_offset, s.sh_size, recipe))
      return 0;
  }
  return 1;
}
