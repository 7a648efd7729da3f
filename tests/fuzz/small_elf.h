/* small_elf.h - the smallest whole ELF image with every table: section names and one segment. */
#ifndef MOEFORGE_TESTS_SMALL_ELF_H
#define MOEFORGE_TESTS_SMALL_ELF_H

#include <elf.h>
#include <stddef.h>
#include <string.h>

/* Returns its length. */
static inline size_t small_elf(unsigned char out[512])
{
  static const char names[] = "\0.shstrtab";
  const Elf64_Shdr sections[2] = {{.sh_type = SHT_NULL}, {.sh_name = 1, .sh_type = SHT_STRTAB, .sh_offset = 64, .sh_size = sizeof(names)}};
  const Elf64_Phdr segment = {.p_offset = 64, .p_filesz = 8};
  Elf64_Ehdr head = {.e_shoff = 128, .e_shentsize = sizeof(Elf64_Shdr), .e_shnum = 2, .e_shstrndx = 1, .e_phoff = 256, .e_phentsize = sizeof(Elf64_Phdr),
                     .e_phnum = 1};
  memcpy(head.e_ident, ELFMAG, SELFMAG);
  head.e_ident[EI_CLASS] = ELFCLASS64;
  head.e_ident[EI_DATA] = ELFDATA2LSB;
  memset(out, 0, 512);
  memcpy(out, &head, sizeof(head));
  memcpy(out + 64, names, sizeof(names));
  memcpy(out + 128, sections, sizeof(sections));
  memcpy(out + 256, &segment, sizeof(segment));
  return 312;
}

#endif
