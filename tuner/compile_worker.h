/* compile_worker.h - the frames between compile_pool.c (parent) and compile_worker.c (child).
 *
 *   request   {"op": "toolkit"}
 *             {"op": "compile", "name", "arch", "build"}      blob 0: source   blob 1: closure, "name\0text\0" for each file
 *   answer    {"status", "error", "nvrtc", "path"}            to "toolkit"
 *             {"status", "error", "registers", ...}           blob 0: cubin    blob 1: log */
#ifndef MOEFORGE_TUNER_COMPILE_WORKER_H
#define MOEFORGE_TUNER_COMPILE_WORKER_H

#define COMPILE_ROLE "compile"
#define COMPILE_OP_TOOLKIT "toolkit"
#define COMPILE_OP_COMPILE "compile"

/* Integers of the answer: key, type and member of struct artifact. */
#define COMPILE_RESULT_TABLE(X)              \
  X("registers", int, registers)             \
  X("spill_bytes", long, spill_bytes)        \
  X("stack_bytes", long, stack_bytes)        \
  X("static_shared_bytes", long, static_shared_bytes) \
  X("wgmma_serialised", bool, wgmma_serialised)

#endif
