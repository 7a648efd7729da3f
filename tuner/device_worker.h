/* device_worker.h - inside the child that holds a device: device_worker.c and device_worker_tools.c. */
#ifndef MOEFORGE_TUNER_DEVICE_WORKER_H
#define MOEFORGE_TUNER_DEVICE_WORKER_H

#include "device_wire.h"

#define MAX_KERNELS 4096

struct child {
  int fd;
  const struct device_ops *ops;
  struct device *dev; /* NULL until "open" */
  struct device_info info;
  bool problem_loaded;
  struct mf_problem problem;
  double routed_scaling;
  int layers;
  struct device_kernel *kernels[MAX_KERNELS]; /* by handle; NULL: unloaded */
  int profile_kernels;                        /* of the open profile */
  int lock_fd;                                /* -1 */
};

/* Values of a request; a wrong one is MF_ERR_USAGE. */
enum mf_status request_int(const struct frame *req, const char *name, long low, long high, int *out, struct error *err);
enum mf_status request_text(const struct frame *req, const char *name, const char **out, struct error *err);
/* Blob number 'blob', which must have 'bytes'. */
enum mf_status request_struct(const struct frame *req, int blob, void *out, size_t bytes, const char *what, struct error *err);
/* Threads of the references; 0 leaves them. */
void request_threads(int threads);

/* The requests that need no open device. */
enum mf_status answer_probe(struct child *c, const struct frame *req, struct frame *reply, struct error *err);
enum mf_status answer_doctor(struct child *c, const struct frame *req, struct frame *reply, struct error *err);
/* templates/tools/<name>.cu -> cubin. */
enum mf_status answer_tool(struct child *c, const struct frame *req, struct frame *reply, struct error *err);
enum mf_status answer_reference(struct child *c, const struct frame *req, struct frame *reply, struct error *err);

#endif
