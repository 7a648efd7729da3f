/* small_elf.h - the smallest whole ELF image with every table: section names, the parameters of a kernel (those of recipe_fixture.h) and one segment. */
#ifndef MOEFORGE_TESTS_SMALL_ELF_H
#define MOEFORGE_TESTS_SMALL_ELF_H

#include <elf.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SMALL_ELF_NAMES 64
#define SMALL_ELF_INFO 96  /* three records of a parameter, 16 bytes each, then the bytes of all */
#define SMALL_ELF_INFO_BYTES 52
#define SMALL_ELF_SECTIONS 152
#define SMALL_ELF_SEGMENT 344
#define SMALL_ELF_BYTES 400

/* Returns its length. */
static inline size_t small_elf(unsigned char out[512])
{
  static const char names[] = "\0.shstrtab\0.nv.info.mf_moe";
  static const unsigned params[3][2] = {{0, 96}, {112, 128}, {240, 128}}; /* offset, bytes */
  static const unsigned char all[4] = {3, 0x19, 368 % 256, 368 / 256};
  const Elf64_Shdr sections[3] = {{.sh_type = SHT_NULL},
                                  {.sh_name = 1, .sh_type = SHT_STRTAB, .sh_offset = SMALL_ELF_NAMES, .sh_size = sizeof(names)},
                                  {.sh_name = 11, .sh_type = SHT_LOPROC, .sh_offset = SMALL_ELF_INFO, .sh_size = SMALL_ELF_INFO_BYTES}};
  const Elf64_Phdr segment = {.p_offset = 64, .p_filesz = 8};
  Elf64_Ehdr head = {.e_shoff = SMALL_ELF_SECTIONS, .e_shentsize = sizeof(Elf64_Shdr), .e_shnum = 3, .e_shstrndx = 1, .e_phoff = SMALL_ELF_SEGMENT,
                     .e_phentsize = sizeof(Elf64_Phdr), .e_phnum = 1};
  memcpy(head.e_ident, ELFMAG, SELFMAG);
  head.e_ident[EI_CLASS] = ELFCLASS64;
  head.e_ident[EI_DATA] = ELFDATA2LSB;
  memset(out, 0, 512);
  memcpy(out, &head, sizeof(head));
  memcpy(out + SMALL_ELF_NAMES, names, sizeof(names));
  for(unsigned i = 0; i < 3; i++) {
    const unsigned char start[4] = {4, 0x17, 12, 0};
    const uint16_t place[2] = {(uint16_t)i, (uint16_t)params[i][0]};
    const uint32_t size = params[i][1] << 18 | 0x1f000;
    memcpy(out + SMALL_ELF_INFO + 16 * i, start, sizeof(start));
    memcpy(out + SMALL_ELF_INFO + 16 * i + 8, place, sizeof(place));
    memcpy(out + SMALL_ELF_INFO + 16 * i + 12, &size, sizeof(size));
  }
  memcpy(out + SMALL_ELF_INFO + 48, all, sizeof(all));
  memcpy(out + SMALL_ELF_SECTIONS, sections, sizeof(sections));
  memcpy(out + SMALL_ELF_SEGMENT, &segment, sizeof(segment));
  return SMALL_ELF_BYTES;
}

#endif
