/* cubin_image.c - are the bytes of a cubin safe to hand to the driver, which is told where they begin but not where they end?
 *
 * An ELF image says itself how far it reaches: its header, the two tables that the header names, what the tables' rows name, and the names of sections must
 * all lie inside. Anything else the driver takes for a text, which it reads up to a NUL: only printable bytes are let through, and package_file.c keeps a
 * NUL behind the file. What the kernel in it does is not judged. */
#include "package_file.h"

#include <elf.h>
#include <string.h>

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
