/* emu_core_fixture.h - tiny kernels in C on the emulated machine itself (emu/emu.h), in this process, for test_emu*.c.
 *
 * A kernel is a function of this program that calls emu_* and, before each ordinary access, the compiler's hook: that is what load() and store() are,
 * macros so that the line in a finding is the kernel's. One function serves as the good kernel and as several bad ones: params[0] is a struct variant,
 * and its 'flaw' says what is wrong this time; 0 is the good one.
 *
 * The image of a launch is what of this program cannot be written to, so constants may be read and findings have lines. Global buffers are allocated,
 * for static ones would not be told from constants. */
#ifndef MOEFORGE_TESTS_EMU_CORE_FIXTURE_H
#define MOEFORGE_TESTS_EMU_CORE_FIXTURE_H

#include <check.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emu.h"
#include "emu_hw.h"

static const char *subject = "kernel"; /* for messages */

#define SEEDS 50
#define SHARED_BYTES ((size_t)64 << 10)

/* The compiler's hooks (emu/access.c). */
void __tsan_read1(void *p);
void __tsan_read2(void *p);
void __tsan_read4(void *p);
void __tsan_read8(void *p);
void __tsan_read16(void *p);
void __tsan_write1(void *p);
void __tsan_write2(void *p);
void __tsan_write4(void *p);
void __tsan_write8(void *p);
void __tsan_write16(void *p);
void __tsan_read_range(void *p, unsigned long bytes);
void __tsan_write_range(void *p, unsigned long bytes);

#define HOOK_ADDRESS(p) ((void *)(uintptr_t)(p))
#define load(p) (__tsan_read4(HOOK_ADDRESS(p)), *(const volatile uint32_t *)(p))
#define store(p, v) (__tsan_write4(HOOK_ADDRESS(p)), (void)(*(volatile uint32_t *)(p) = (v)))
#define load_byte(p) (__tsan_read1(HOOK_ADDRESS(p)), *(const volatile uint8_t *)(p))
#define store_byte(p, v) (__tsan_write1(HOOK_ADDRESS(p)), (void)(*(volatile uint8_t *)(p) = (uint8_t)(v)))

/* An assertion in a kernel: libcheck's own write to a pipe each time. */
#define must(condition)                                    \
  do {                                                     \
    if(!(condition))                                       \
      ck_abort_msg("%s: not so: %s", subject, #condition); \
  } while(0)

struct variant {
  int flaw;         /* 0: the good kernel */
  uint32_t *global; /* GLOBAL_WORDS of them */
  const void *map;
  uint32_t seen[64]; /* what a kernel has to tell */
};
#define GLOBAL_WORDS 4096

static struct variant variant; /* of the launch under way */

static inline const struct variant *variant_of(void **params)
{
  return params[0];
}

/* A kernel's note to its test, seen by no check. */
static inline void tell(int index, uint32_t value)
{
  variant.seen[index] = value;
}

static inline int thread(void)
{
  return emu_self->thread;
}

static inline int warp(void)
{
  return emu_self->warp;
}

static inline int lane(void)
{
  return emu_self->lane;
}

/* Words of shared memory, and mbarriers, which lie in its last kilobyte. */
static inline uint32_t *word(int index)
{
  return (uint32_t *)(void *)emu_self->shared + index;
}

static inline uint8_t *byte(int index)
{
  return emu_self->shared + index;
}

static inline uint64_t *mbarrier(int index)
{
  return (uint64_t *)(void *)(emu_self->shared + SHARED_BYTES - 1024) + index;
}

static inline void sync_cta(void)
{
  emu_barrier_sync(0, -1);
}

/* Initialises mbarriers 0 .. count - 1, visible to all. */
static inline void make_mbarriers(int count, uint32_t arrivals)
{
  if(thread() == 0) {
    for(int i = 0; i < count; i++)
      emu_mbarrier_init(mbarrier(i), arrivals);
    emu_mbarrier_init_fence();
  }
  sync_cta();
}

/* ---- launches ---- */

typedef void kernel_function(void **params);

struct grid {
  kernel_function *kernel;
  int ctas, warps;
};

static inline int find_image(struct dl_phdr_info *info, size_t size, void *out)
{
  struct emu_launch *launch = out;
  (void)size;
  launch->code = (const void *)info->dlpi_addr; // NOLINT(performance-no-int-to-ptr)
  for(int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *h = &info->dlpi_phdr[i];
    if(h->p_type == PT_LOAD && !(h->p_flags & PF_W) && h->p_vaddr + h->p_memsz > launch->code_bytes)
      launch->code_bytes = h->p_vaddr + h->p_memsz;
  }
  return 1; /* the program itself comes first */
}

static inline struct emu_launch launch_of(struct grid grid, uint64_t seed)
{
  static void *params[1];
  struct emu_launch launch = {.entry = grid.kernel, .params = params, .ctas = grid.ctas, .threads = grid.warps * 32, .seed = seed};
  launch.shared_bytes = SHARED_BYTES;
  params[0] = &variant;
  dl_iterate_phdr(find_image, &launch);
  return launch;
}

/* Global memory for the launches to come, zero. */
static inline uint32_t *make_global(void)
{
  const size_t bytes = GLOBAL_WORDS * sizeof(uint32_t);
  if(variant.global == NULL) {
    variant.global = aligned_alloc(1024, bytes);
    ck_assert_ptr_nonnull(variant.global);
    ck_assert(emu_memory_add(variant.global, bytes));
  }
  memset(variant.global, 0, bytes);
  return variant.global;
}

static inline void free_global(void)
{
  if(variant.global != NULL)
    emu_memory_remove(variant.global);
  free(variant.global);
  variant.global = NULL;
}

static inline struct emu_finding run(struct grid grid, int flaw, uint64_t seed)
{
  struct emu_finding found;
  const struct emu_launch launch = launch_of(grid, seed);
  variant.flaw = flaw;
  const bool good = emu_launch(&launch, &found);
  ck_assert_msg(good == (found.kind == EMU_NONE), "seed %d: %s", (int)seed, found.text);
  return found;
}

/* The same kind under every seed. The last finding. */
static inline struct emu_finding expect(struct grid grid, int flaw, enum emu_finding_kind kind)
{
  struct emu_finding found = {.kind = EMU_NONE};
  for(uint64_t seed = 1; seed <= SEEDS; seed++) {
    found = run(grid, flaw, seed);
    if(found.kind != kind)
      ck_abort_msg("%s, flaw %d, seed %d: %s expected, but: %s", subject, flaw, (int)seed, emu_finding_name(kind),
                   found.kind == EMU_NONE ? "no finding" : found.text);
  }
  return found;
}

static inline void expect_text(struct emu_finding found, const char *text)
{
  ck_assert_msg(strstr(found.text, text) != NULL, "%s: '%s' is not in '%s'", subject, text, found.text);
}

/* Under some seeds, and none or the other kind under the others. Number of seeds that found it. */
static inline int expect_sometimes(struct grid grid, int flaw, enum emu_finding_kind kind, enum emu_finding_kind other)
{
  int times = 0;
  for(uint64_t seed = 1; seed <= SEEDS; seed++) {
    const struct emu_finding found = run(grid, flaw, seed);
    times += found.kind == kind;
    if(found.kind != kind && found.kind != EMU_NONE && found.kind != other)
      ck_abort_msg("%s, flaw %d, seed %d: %s expected, but: %s", subject, flaw, (int)seed, emu_finding_name(kind), found.text);
  }
  ck_assert_msg(times > 0, "%s, flaw %d: no seed shows %s", subject, flaw, emu_finding_name(kind));
  return times;
}

/* ---- tables of kernels ---- */

/* A kernel, what is wrong with it, and what must be found; 'text' must be in the finding. */
struct flawed {
  const char *name;
  kernel_function *kernel;
  int ctas, warps, flaw;
  enum emu_finding_kind kind;
  const char *text;
  bool sometimes;                /* depends on the interleaving */
  enum emu_finding_kind instead; /* sometimes: what else may be found */
};

#define GOOD(name, kernel, ctas, warps, flaw) {name, kernel, ctas, warps, flaw, EMU_NONE, NULL, false, EMU_NONE}
#define BAD(name, kernel, ctas, warps, flaw, kind, text) {name, kernel, ctas, warps, flaw, kind, text, false, EMU_NONE}
#define SOMETIMES(name, kernel, ctas, warps, flaw, kind, instead) {name, kernel, ctas, warps, flaw, kind, NULL, true, instead}
#define NUMBER(a) ((int)(sizeof(a) / sizeof(*(a))))

static inline void expect_flawed(const struct flawed *f)
{
  const struct grid grid = {f->kernel, f->ctas, f->warps};
  subject = f->name;
  make_global();
  if(f->sometimes) {
    expect_sometimes(grid, f->flaw, f->kind, f->instead);
  } else {
    const struct emu_finding found = expect(grid, f->flaw, f->kind);
    if(f->text != NULL)
      expect_text(found, f->text);
  }
  free_global();
}

/* main() of a suite that is one table and some tests of their own. */
static inline int run_suite(Suite *suite)
{
  SRunner *runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  const int failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif
