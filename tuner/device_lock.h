/* device_lock.h - one process at a time times on a GPU. The lock is an flock on a file named by the GPU's UUID in MOEFORGE_LOCK_DIR or /tmp (not in a
 * per-user or per-session folder: the other run may be a colleague's, or a nightly one). The kernel drops it when its holder dies, however that happens. */
#ifndef MOEFORGE_TUNER_DEVICE_LOCK_H
#define MOEFORGE_TUNER_DEVICE_LOCK_H

#include "error.h"
#include <stdbool.h>

/* Takes the lock of 'uuid' if it is free: *fd >= 0, to be closed to release it. If another process holds it: MF_OK, *fd = -1, and 'holder' says who
 * ("process 1234", or "another process"). */
enum mf_status device_lock_try(const char *uuid, int *fd, char *holder, size_t holder_space, struct error *err);
/* Waits for it. */
enum mf_status device_lock_wait(const char *uuid, int *fd, struct error *err);

#endif
