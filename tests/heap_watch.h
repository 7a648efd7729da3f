/* heap_watch.h - counts this thread's calls to the heap while 'watching': by standing in for malloc, with AddressSanitizer by its hooks. For one file of a
 * program. */
#ifndef MOEFORGE_TESTS_HEAP_WATCH_H
#define MOEFORGE_TESTS_HEAP_WATCH_H

#include <check.h>
#include <stddef.h>

static _Thread_local volatile int watching, heap_calls; /* volatile: compilers know that malloc() does not touch them */

static void heap_call(void)
{
  heap_calls = heap_calls + watching;
}

#ifdef __SANITIZE_ADDRESS__
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t), void (*on_free)(const volatile void *));

static void on_malloc(const volatile void *p, size_t bytes)
{
  (void)p, (void)bytes;
  heap_call();
}

static void on_free(const volatile void *p)
{
  (void)p;
  heap_call();
}

static void watch_heap(void)
{
  ck_assert_int_ne(__sanitizer_install_malloc_and_free_hooks(on_malloc, on_free), 0);
}
#else
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *p);

/* libc's own calls come here, too. */
#pragma GCC visibility push(default)
void *malloc(size_t bytes) { heap_call(); return __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) { heap_call(); return __libc_calloc(count, bytes); }
void *realloc(void *p, size_t bytes) { heap_call(); return __libc_realloc(p, bytes); }
void *aligned_alloc(size_t alignment, size_t bytes) { heap_call(); return __libc_memalign(alignment, bytes); }
void free(void *p) { heap_call(); __libc_free(p); }
#pragma GCC visibility pop

static void watch_heap(void)
{
}
#endif

#endif
