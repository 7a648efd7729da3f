/* device_spec.c - device specs (specs/devices/<name>.yaml): the schema, and reading them into struct device_info.
 *
 * They describe a GPU model for planning without one, and the emulated device. What only a real device has (UUID, driver, bus) stays zero. */
#include "schema.h"
#include "spec_internal.h"

#include <string.h>

struct device_draft {
  struct device_info info;
  char source[256];
  int32_t cc_major, cc_minor, sms, registers_per_sm, max_threads_per_cta;
};

#define HOME(member) SCHEMA_HOME(struct device_draft, member)

static const struct schema_row device_rows[] = {
    SCHEMA_TEXT_ROW("name", NULL, info.name, "as the driver names the device"),
    SCHEMA_TEXT_ROW("source", "none", source, "where the numbers come from, and which of them are measured"),
    SCHEMA_FLAG_ROW("emulated", "false", info.emulated, "kernels run on the CPU"),
    SCHEMA_INT_ROW("cc_major", 7, 99, 1, NULL, cc_major, "compute capability"),
    SCHEMA_INT_ROW("cc_minor", 0, 9, 1, NULL, cc_minor, "compute capability"),
    SCHEMA_INT_ROW("sms", 1, 1024, 1, NULL, sms, "streaming multiprocessors"),
    SCHEMA_LONG_ROW("shared_bytes_per_cta", 49152, 1048576, NULL, info.shared_bytes_per_cta, "shared memory that one CTA may opt in to"),
    SCHEMA_LONG_ROW("shared_bytes_per_sm", 49152, 1048576, NULL, info.shared_bytes_per_sm, "shared memory of one SM; at least that of a CTA"),
    SCHEMA_INT_ROW("registers_per_sm", 16384, 1048576, 1, NULL, registers_per_sm, "32-bit registers"),
    SCHEMA_INT_ROW("max_threads_per_cta", 32, 4096, 1, NULL, max_threads_per_cta, "threads of one CTA"),
    SCHEMA_LONG_ROW("l2_bytes", 1048576, 1099511627776, NULL, info.l2_bytes, "L2 cache"),
    SCHEMA_DOUBLE_ROW("bandwidth_gbps", 1, 1e6, NULL, info.bandwidth_gbps, "device memory read rate that is reached, 1e9 bytes/s"),
    SCHEMA_DOUBLE_ROW("launch_us", 0, 1000, NULL, info.launch_us, "constant of the floor formula: launch_us + bytes / bandwidth"),
    SCHEMA_DOUBLE_ROW("memory_bytes", 1e6, 1e15, NULL, info.memory_bytes, "device memory"),
};
#define NROWS ((int)(sizeof(device_rows) / sizeof(device_rows[0])))

static void finish(struct device_draft *draft, const int *lines, struct faults *faults)
{
  struct device_info *info = &draft->info;
  info->cc_major = draft->cc_major;
  info->cc_minor = draft->cc_minor;
  info->sms = draft->sms;
  info->registers_per_sm = draft->registers_per_sm;
  info->max_threads_per_cta = draft->max_threads_per_cta;
  for(int i = 0; i < NROWS; i++)
    if(strcmp(device_rows[i].path, "shared_bytes_per_sm") == 0 && info->shared_bytes_per_sm < info->shared_bytes_per_cta)
      faults_add(faults, lines[i], device_rows[i].path, "expected at least shared_bytes_per_cta, got %ld (nearest legal value %ld)",
                 info->shared_bytes_per_sm, info->shared_bytes_per_cta);
}

enum mf_status device_spec_read(const char *path, struct device_info *out, spec_report_fn *report, void *context, struct error *err)
{
  struct device_draft draft;
  struct faults faults;
  struct ydoc doc;
  int lines[NROWS];
  enum mf_status rc;
  faults_init(&faults, path, report, context, err);
  rc = ydoc_read(&doc, &faults);
  if(rc != MF_OK)
    goto out;
  memset(&draft, 0, sizeof(draft));
  schema_read(device_rows, NROWS, doc.root, &draft, lines, &faults);
  if(faults.count == 0)
    finish(&draft, lines, &faults);
  if(faults.count == 0)
    *out = draft.info;
out:
  ydoc_free(&doc);
  return rc == MF_ERR_IO || rc == MF_ERR_NOMEM ? rc : faults_end(&faults);
}

void spec_schema_markdown(bool device, struct strbuf *out)
{
  if(device)
    schema_markdown(device_rows, NROWS, out);
  else
    spec_model_markdown(out);
}
