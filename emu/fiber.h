/* fiber.h - stackful coroutines with the cheapest switch that the ABI allows: callee-saved registers and the stack pointer.
 *
 * ucontext saves the signal mask with a system call at every switch, which is why it is not used. x86-64 and AArch64. Under ASan each switch
 * is announced, so that its stack checks stay right. */
#ifndef MOEFORGE_EMU_FIBER_H
#define MOEFORGE_EMU_FIBER_H

#include <stddef.h>

struct fiber {
  void *sp;             /* where it stopped */
  const void *stack;    /* lowest byte; NULL: the host program's own stack */
  size_t stack_bytes;
  void (*run)(void *argument);
  void *argument;
};

/* The stack is aligned to 64 bytes. Makes a fiber that calls run(argument) when it is first switched to. 'run' must not return. */
void fiber_make(struct fiber *fiber, void *stack, size_t stack_bytes, void (*run)(void *argument), void *argument);
/* Stops 'from' (the one that is running) here and goes on in 'to'. 'last': 'from' will never be gone on with. */
void fiber_switch(struct fiber *from, struct fiber *to, int last);

#endif
