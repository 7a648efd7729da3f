/* device_client_internal.h - what device_client.c and device_client_many.c share; nobody else includes it. */
#ifndef MOEFORGE_TUNER_DEVICE_CLIENT_INTERNAL_H
#define MOEFORGE_TUNER_DEVICE_CLIENT_INTERNAL_H

#include "device_client.h"
#include "worker.h"

struct device_client {
  struct worker worker; /* pid 0: dead */
  struct device_info info;
  int profile_kernels;
};

/* Requests. Their blobs are borrowed; request_end() frees the rest. */
struct frame request_new(const char *op);
void request_blob(struct frame *req, int blob, const void *bytes, size_t count);
void request_end(struct frame *req);
struct frame open_request(int ordinal, const struct device_tools *tools, int threads);
struct frame open_emulated_request(const struct device_emulation *emulation, int threads);
struct frame problem_request(const struct mf_problem *problem, double routed_scaling, int layers, int tokens_max);
struct frame kernel_request(const void *cubin, size_t bytes, const struct mf_recipe *recipe);
struct frame unload_request(int kernel);
struct frame check_request(int kernel, const struct check_plan *plan, const struct test_case *cases, int ncases);

/* A frame that is no reply but comes ahead of one (progress, waiting). */
bool is_note(const struct frame *frame);
/* Longest silence during a check, and until a child has a device with weights. */
int check_limit_ms(const struct check_plan *plan);
int start_limit_ms(void);
int64_t client_now_ms(void);
/* Makes the folder of the reference cache and what lies above it. */
enum mf_status client_cache_dir(const char *path, struct error *err);

#endif
