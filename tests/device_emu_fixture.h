/* device_emu_fixture.h - a folder for each test and the emulated device as it is configured there: test_device_emu.c, test_emu_driver.c. */
#ifndef MOEFORGE_TESTS_DEVICE_EMU_FIXTURE_H
#define MOEFORGE_TESTS_DEVICE_EMU_FIXTURE_H

#include <check.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_emu.h"
#include "driver.h"
#include "spec.h"

static char folder[256]; /* of the test */

#ifdef __SANITIZE_ADDRESS__
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static inline void shell(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static inline void shell(const char *fmt, ...)
{
  char command[4096];
  va_list args;
  va_start(args, fmt);
  vsnprintf(command, sizeof(command), fmt, args);
  va_end(args);
  ck_assert_msg(system(command) == 0, "%s", command);
}

static inline struct device_emulation emulation_of(const char *compiler)
{
  struct device_emulation e;
  struct error err;
  memset(&e, 0, sizeof(e));
  ck_assert_int_eq(device_spec_read("specs/devices/emu-sm90.yaml", &e.info, NULL, NULL, &err), MF_OK);
  snprintf(e.template_dir, sizeof(e.template_dir), "templates");
  snprintf(e.emu_dir, sizeof(e.emu_dir), "emu");
  snprintf(e.cache_dir, sizeof(e.cache_dir), "%s", folder);
  snprintf(e.compiler, sizeof(e.compiler), "%s", compiler);
  e.seed = EMU_BASE_SEED;
  return e;
}

static inline void begin(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof(folder), "%.200s/moeforge-emu-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
}

static inline void end(void)
{
  shell("rm -rf '%s'", folder);
}

#endif
