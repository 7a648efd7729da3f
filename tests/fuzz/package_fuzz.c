/* package_fuzz.c - any bytes as a package file: refused, or safe to use down to the launch. An entry point of libFuzzer (`make fuzz-package`), which
 * tests/test_package_fuzz.c calls with seeds and a fixed series of mutations.
 *
 * The bytes are opened as they are, and once more with the file's size and all hashes put right, as
 * somebody does who forges a file: else nothing but the hashes would be tried. */
#include "driver_stub.h"
#include "op.h"
#include "sha256.h"

/* What became of the inputs, so that a test can tell that it reached something. */
static struct package_fuzz_counts {
  int opened, created, launched;
} package_fuzz_counts;

static void fuzz_hash(const void *bytes, size_t count, unsigned char digest[PACKAGE_HASH_BYTES])
{
  struct sha256 ctx;
  sha256_init(&ctx);
  sha256_add(&ctx, bytes, count);
  sha256_end(&ctx, digest);
}

static void reseal(unsigned char *bytes, size_t size)
{
  struct package_header head;
  struct package_section row;
  size_t sections;
  if(size < sizeof(head))
    return;
  memcpy(&head, bytes, sizeof(head));
  sections = package_sections(head.version);
  if(size < sizeof(head) + sections * sizeof(row))
    return;
  for(size_t i = 0; i < sections; i++) {
    unsigned char *at = bytes + sizeof(head) + i * sizeof(row);
    memcpy(&row, at, sizeof(row));
    if(row.offset <= size && row.bytes <= size - row.offset)
      fuzz_hash(bytes + row.offset, (size_t)row.bytes, row.hash);
    memcpy(at, &row, sizeof(row));
  }
  head.file_bytes = size;
  memset(head.hash, 0, sizeof(head.hash));
  memcpy(bytes, &head, sizeof(head));
  fuzz_hash(bytes, sizeof(head) + sections * sizeof(row), head.hash);
  memcpy(bytes, &head, sizeof(head));
}

/* Everything that an engine does with an op: must succeed or say why, and never touch what is not its own. */
static void use_op(struct mf_op *op)
{
  static _Alignas(256) unsigned char memory[3][256]; /* the driver stub follows no device pointer */
  struct mf_weights w;
  struct mf_layer *layer = NULL;
  memset(&w, 0, sizeof(w));
  w.struct_size = sizeof(w);
  w.w13 = w.w2 = memory[0];
  w.s13 = w.s2 = w.bias = (const float *)(const void *)memory[0];
  mf_workspace_init(op, memory[2], NULL);
  if(mf_layer_bind(op, &w, &layer) != MF_OK && layer != NULL)
    abort();
  for(int tokens = 1; layer != NULL && tokens <= mf_op_max_tokens(op) && tokens <= 16; tokens++) {
    struct mf_call call;
    const int before = stub_launches;
    enum mf_status rc;
    memset(&call, 0, sizeof(call));
    call.struct_size = sizeof(call);
    call.tokens = tokens;
    call.x = call.logits = memory[0];
    call.out = (void *)((uintptr_t)1 << 46); /* far from x: no overlap */
    call.workspace = memory[2];
    rc = mf_moe_forward(layer, &call, NULL);
    if((rc == MF_OK) != (stub_launches == before + 1) || rc == MF_MISS_TOKENS)
      abort();
    package_fuzz_counts.launched += rc == MF_OK;
  }
  mf_layer_destroy(layer);
}

static void use_package(struct mf_package *pkg)
{
  struct mf_package_entry entry;
  memset(&entry, 0, sizeof(entry));
  entry.struct_size = sizeof(entry);
  stub_read(mf_package_manifest(pkg), strlen(mf_package_manifest(pkg)));
  if(pkg->qualification != NULL)
    stub_read(pkg->qualification, strlen(pkg->qualification));
  for(size_t i = 0; i < 32 && mf_package_entry_at(pkg, i, &entry) == MF_OK; i++) {
    struct mf_op *op = (void *)1;
    stub_read(entry.shape_name, strlen(entry.shape_name));
    stub_read(entry.device_name, strlen(entry.device_name));
    stub_read(entry.schedule, strlen(entry.schedule));
    if(mf_op_create(pkg, &entry.problem, 0, entry.tokens_max, &op) != MF_OK) {
      if(op != NULL)
        abort();
      continue;
    }
    package_fuzz_counts.created++;
    use_op(op);
    mf_op_destroy(op);
  }
}

/* Takes over 'bytes'. */
static void open_and_use(unsigned char *bytes, size_t size)
{
  struct mf_package *pkg = NULL;
  char why[200];
  if(package_parse(bytes, size, &pkg, why, sizeof(why)) != MF_OK) {
    if(pkg != NULL || strchr(why, '\n') != NULL)
      abort();
    return;
  }
  package_fuzz_counts.opened++;
  use_package(pkg);
  mf_package_close(pkg);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  for(int forged = 0; forged < 2; forged++) {
    unsigned char *copy = malloc(size > 0 ? size : 1);
    if(copy == NULL)
      return 0;
    memcpy(copy, data, size);
    if(forged)
      reseal(copy, size);
    open_and_use(copy, size);
  }
  return 0;
}
