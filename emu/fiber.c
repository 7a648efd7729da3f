/* fiber.c - see fiber.h. The switch is two dozen instructions: push what the callee must keep, exchange stack pointers, pop, return.
 *
 *   x86-64    saved, from low to high: r15, r14, r13, r12, rbx, rbp, return address (no control words: kernels do not change them)
 *   AArch64   saved: d8..d15, x19..x30
 *
 * A new fiber's stack is laid out as if it had been switched away from at the top of fiber_start. */
#include "fiber.h"

#include <stdint.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

void fiber_swap(void **from, void *to);
void fiber_start(void);

#if defined(__SANITIZE_ADDRESS__)
static struct fiber *left; /* the fiber that the switch in progress comes from */

static void arrive(void *fake)
{
  const void *stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(fake, &stack, &bytes);
  left->stack = stack; /* for the host program's own stack this is how its bounds become known */
  left->stack_bytes = bytes;
}
#endif

/* The first function on a fiber's stack. */
static void fiber_main(void *argument)
{
  struct fiber *fiber = argument;
#if defined(__SANITIZE_ADDRESS__)
  arrive(NULL);
#endif
  fiber->run(fiber->argument);
}

#if defined(__x86_64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden fiber_swap\n"
        ".globl fiber_swap\n"
        ".type fiber_swap, @function\n"
        "fiber_swap:\n"
        "  pushq %rbp\n"
        "  pushq %rbx\n"
        "  pushq %r12\n"
        "  pushq %r13\n"
        "  pushq %r14\n"
        "  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n"
        "  popq %r14\n"
        "  popq %r13\n"
        "  popq %r12\n"
        "  popq %rbx\n"
        "  popq %rbp\n"
        "  ret\n"
        ".size fiber_swap, .-fiber_swap\n"
        ".hidden fiber_start\n"
        ".globl fiber_start\n"
        ".type fiber_start, @function\n"
        "fiber_start:\n"
        "  movq %r12, %rdi\n" /* argument; r13: function */
        "  xorl %ebp, %ebp\n"
        "  callq *%r13\n"
        "  ud2\n"
        ".size fiber_start, .-fiber_start\n");

static void *first_frame(unsigned char *top, void (*run)(void *), void *argument)
{
  uint64_t *frame = (uint64_t *)(void *)(top - 9 * sizeof(uint64_t)); /* so that the stack is 16-byte aligned at the call */
  memset(frame, 0, 9 * sizeof(uint64_t));
  frame[2] = (uint64_t)(uintptr_t)run;         /* r13 */
  frame[3] = (uint64_t)(uintptr_t)argument;    /* r12 */
  frame[6] = (uint64_t)(uintptr_t)fiber_start; /* return address */
  return frame;
}
#elif defined(__aarch64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden fiber_swap\n"
        ".globl fiber_swap\n"
        ".type fiber_swap, %function\n"
        "fiber_swap:\n"
        "  sub sp, sp, #160\n"
        "  stp x19, x20, [sp, #0]\n"
        "  stp x21, x22, [sp, #16]\n"
        "  stp x23, x24, [sp, #32]\n"
        "  stp x25, x26, [sp, #48]\n"
        "  stp x27, x28, [sp, #64]\n"
        "  stp x29, x30, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n"
        "  stp d10, d11, [sp, #112]\n"
        "  stp d12, d13, [sp, #128]\n"
        "  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n"
        "  str x9, [x0]\n"
        "  mov sp, x1\n"
        "  ldp x19, x20, [sp, #0]\n"
        "  ldp x21, x22, [sp, #16]\n"
        "  ldp x23, x24, [sp, #32]\n"
        "  ldp x25, x26, [sp, #48]\n"
        "  ldp x27, x28, [sp, #64]\n"
        "  ldp x29, x30, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n"
        "  ldp d10, d11, [sp, #112]\n"
        "  ldp d12, d13, [sp, #128]\n"
        "  ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n"
        "  ret\n"
        ".size fiber_swap, .-fiber_swap\n"
        ".hidden fiber_start\n"
        ".globl fiber_start\n"
        ".type fiber_start, %function\n"
        "fiber_start:\n"
        "  mov x0, x19\n"
        "  mov x29, xzr\n"
        "  blr x20\n"
        "  brk #1\n"
        ".size fiber_start, .-fiber_start\n");

static void *first_frame(unsigned char *top, void (*run)(void *), void *argument)
{
  uint64_t *frame = (uint64_t *)(void *)(top - 160);
  memset(frame, 0, 160);
  frame[0] = (uint64_t)(uintptr_t)argument;     /* x19 */
  frame[1] = (uint64_t)(uintptr_t)run;          /* x20 */
  frame[11] = (uint64_t)(uintptr_t)fiber_start; /* x30 */
  return frame;
}
#else
#error "the emulated device needs x86-64 or AArch64"
#endif

void fiber_make(struct fiber *fiber, void *stack, size_t stack_bytes, void (*run)(void *argument), void *argument)
{
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, stack_bytes); /* of a fiber that was abandoned here */
#endif
  fiber->stack = stack;
  fiber->stack_bytes = stack_bytes;
  fiber->run = run;
  fiber->argument = argument;
  fiber->sp = first_frame((unsigned char *)stack + stack_bytes / 64 * 64, fiber_main, fiber);
}

void fiber_switch(struct fiber *from, struct fiber *to, int last)
{
#if defined(__SANITIZE_ADDRESS__)
  void *fake = NULL;
  left = from;
  __sanitizer_start_switch_fiber(last ? NULL : &fake, to->stack, to->stack_bytes);
  fiber_swap(&from->sp, to->sp);
  arrive(fake);
#else
  (void)last;
  fiber_swap(&from->sp, to->sp);
#endif
}
