/* test_emu_product.c - wgmma on the emulated machine: results, and the rules about accumulators, operands and who may overwrite them when.
 *
 * A warpgroup multiplies a tile of 64 x 128 by one of n x 128, both e4m3 with 128-byte swizzle and written by ordinary stores; a fifth warp makes
 * trouble. The values are small integers, so that sums are exact in any order. */
#include <math.h>

#include "emu_core_fixture.h"

#define K 128
#define A_AT 0
#define B_AT 8192
#define MAX_N 32

/* -3 .. 3, as a function of the place. */
static int a_value(int row, int k)
{
  return (row * 5 + k * 3 + row * k / 7) % 7 - 3;
}

static int b_value(int column, int k)
{
  return (column * 11 + k + column * k / 5) % 7 - 3;
}

static uint8_t e4m3_of(int value)
{
  static const uint8_t bits[] = {0x00, 0x38, 0x40, 0x44}; /* 0 .. 3 */
  return value < 0 ? bits[-value] | 0x80 : bits[value];
}

/* Where byte k of a row lies: rows of 128 bytes, sixteens exchanged by the row's last three bits. */
static int place(int row, int k)
{
  return row * 128 + (k / 16 ^ row % 8) * 16 + k % 16;
}

static void write_row(int at, int row, int (*value)(int, int))
{
  for(int k = 0; k < K; k += 4) {
    uint32_t four = 0;
    for(int i = 0; i < 4; i++)
      four |= (uint32_t)e4m3_of(value(row, k + i)) << 8 * i;
    store((uint32_t *)(void *)byte(at + place(row, k)), four);
  }
}

static uint64_t descriptor(int at, int step)
{
  return (uint64_t)(at + 32 * step) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/* What hw_host.h does where a result becomes narrower. */
static float use(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if((bits & EMU_TAINT_MASK) == EMU_TAINT)
    emu_tainted(bits);
  return value;
}

static void issue(float *d, int n, int accumulate)
{
  emu_wgmma_fence();
  for(int step = 0; step < K / 32; step++)
    emu_wgmma(d, n, descriptor(A_AT, step), descriptor(B_AT, step), accumulate || step > 0);
}

/* Row and column of accumulator i of this lane. */
static int row_of(int i)
{
  return 16 * (warp() & 3) + lane() / 4 + 8 * (i / 2 % 2);
}

static int column_of(int i)
{
  return i / 4 * 8 + lane() % 4 * 2 + i % 2;
}

static double expected(int row, int column)
{
  double sum = 0;
  for(int k = 0; k < K; k++)
    sum += (double)a_value(row, k) * b_value(column, k);
  return sum;
}

static void check(const float *d, int n, double times, int skip_column)
{
  for(int i = 0; i < n / 2; i++)
    if(column_of(i) != skip_column)
      must(use(d[i]) == times * expected(row_of(i), column_of(i)));
}

/* Threads 0 .. 63 write a, the next n write b. Flaws: 1: nobody fences; 2: thread 5 does not; 3: that of column 6 does not; 4: that of row 50 does not. */
static void write_tiles(int flaw, int n)
{
  if(thread() < 64)
    write_row(A_AT, thread(), a_value);
  else if(thread() < 64 + n)
    write_row(B_AT, thread() - 64, b_value);
  if(flaw != 1 && !(flaw == 2 && thread() == 5) && !(flaw == 3 && thread() == 70) && !(flaw == 4 && thread() == 50))
    emu_fence_async_proxy();
  sync_cta();
}

/* ---- results ---- */

static void multiply(void **params)
{
  static const int sizes[] = {32, 8, 16, 24};
  const int n = sizes[variant_of(params)->flaw];
  float d[MAX_N / 2], e[MAX_N / 2];
  for(int i = 0; i < n / 2; i++)
    d[i] = e[i] = 1000;
  write_tiles(0, n);
  if(warp() == 4)
    return;
  issue(d, n, 0);
  emu_wgmma_commit();
  emu_wgmma_wait();
  check(d, n, 1, -1);
  issue(d, n, 1); /* once more on top of it, and beside it another */
  issue(e, n, 0);
  emu_wgmma_commit();
  issue(d, n, 1);
  emu_wgmma_commit();
  emu_wgmma_wait();
  emu_keep_accumulators(d, n / 2);
  check(d, n, 3, -1);
  check(e, n, 1, -1);
}

START_TEST(results)
{
  static const char *const names[] = {"n 32", "n 8", "n 16", "n 24"};
  subject = names[_i];
  const uint64_t before = emu_counters().products;
  expect((struct grid){multiply, 2, 5}, _i, EMU_NONE);
  ck_assert_uint_eq(emu_counters().products - before, (uint64_t)SEEDS * 2 * 4 * 16);
}
END_TEST

/* Rows of the second operand that nobody wrote give NaN in their columns, and nothing is found. */
static void unwritten_columns(void **params)
{
  float d[16];
  (void)params;
  write_tiles(0, 8);
  if(warp() == 4)
    return;
  issue(d, 32, 0);
  emu_wgmma_commit();
  emu_wgmma_wait();
  for(int i = 0; i < 16; i++)
    must(column_of(i) < 8 ? use(d[i]) == expected(row_of(i), column_of(i)) : isnan(use(d[i])));
}

/* ---- operands in doubt ---- */

static void fences(void **params)
{
  const int flaw = variant_of(params)->flaw % 10;
  const bool unused = variant_of(params)->flaw >= 10;
  float d[MAX_N / 2];
  write_tiles(flaw, 32);
  if(warp() == 4)
    return;
  issue(d, 32, 0);
  emu_wgmma_commit();
  emu_wgmma_wait();
  for(int i = 0; i < 16; i++) {
    const bool doubtful = flaw == 1 || (flaw == 2 && row_of(i) == 5) || (flaw == 3 && column_of(i) == 6);
    must(!doubtful || isnan(d[i]));
    if(!(unused && doubtful))
      must(use(d[i]) == expected(row_of(i), column_of(i)));
  }
}

/* Only 48 rows count, so row 50 needs no fence, and may be written meanwhile. Flaws: 1: it is used; 2: 51 rows count; 3: row 47 is written meanwhile. */
static void idle_rows(void **params)
{
  const int flaw = variant_of(params)->flaw;
  float d[16];
  emu_count_rows(flaw == 2 ? 51 : 48);
  write_tiles(4, 32);
  if(warp() == 4)
    return;
  issue(d, 32, 0);
  emu_wgmma_commit();
  if(thread() == 96 && flaw != 2)
    store_byte(byte(A_AT + place(50, 3)), 0);
  if(thread() == 64 && flaw == 3)
    store_byte(byte(A_AT + place(47, 3)), 0);
  emu_wgmma_wait();
  if(warp() == 3 && flaw == 0)
    must(isnan(d[0]));
  if(warp() < 3 || flaw == 1 || flaw == 2)
    check(d, 32, 1, -1);
}

/* Two products of the same operands, of which one is used. */
static void fences_again(void **params)
{
  float d[16], e[16];
  write_tiles(variant_of(params)->flaw, 32);
  if(warp() == 4)
    return;
  issue(d, 32, 0);
  issue(e, 32, 0);
  emu_wgmma_commit();
  emu_wgmma_wait();
  check(e, 32, 1, -1);
}

/* Lane 0 of warp 0 writes to column 9 between commit and wait. Flaw 1: the column is used; 2: written ahead of the commit; 3: behind the wait, when the
 * other warps may still be reading; 4: the same to warp 0's own row 3. */
static void written_meanwhile(void **params)
{
  const int flaw = variant_of(params)->flaw;
  float d[16];
  write_tiles(0, 32);
  if(warp() == 4)
    return;
  issue(d, 32, 0);
  if(thread() == 0 && flaw == 2)
    write_row(B_AT, 9, b_value);
  emu_wgmma_commit();
  if(thread() == 0 && flaw < 2)
    write_row(B_AT, 9, b_value);
  if(thread() == 0 && flaw == 4)
    store_byte(byte(A_AT + place(3, 77)), 0);
  emu_wgmma_wait();
  if(thread() == 0 && flaw == 3)
    write_row(B_AT, 9, b_value);
  check(d, 32, 1, flaw == 0 ? 9 : -1);
}

/* Warp 4 writes a column of the operand, with nothing to order it. Under some seeds it is too late to be noticed. */
static void written_by_another(void **params)
{
  const int flaw = variant_of(params)->flaw;
  float d[16];
  write_tiles(0, 32);
  if(warp() == 4) {
    if(lane() == 0)
      write_row(B_AT, 9, b_value);
    return;
  }
  issue(d, 32, 0);
  emu_wgmma_commit();
  emu_wgmma_wait();
  check(d, 32, 1, flaw == 0 ? 9 : -1);
}

/* Warp 4 writes an operand again and again, in turns with those who multiply. Flaw 1: it does not wait for them; 2: no fence in round 3. */
static void written_in_turns(void **params)
{
  const int flaw = variant_of(params)->flaw;
  float d[4];
  write_tiles(0, 0);
  for(int round = 0; round < 5; round++) {
    if(warp() == 4) {
      if(round > 0 && (flaw != 1 || round != 3))
        emu_barrier_sync(2, 160);
      if(lane() < 8)
        write_row(B_AT, lane(), b_value);
      if(flaw == 1 && round == 3)
        return;
      if(flaw != 2 || round != 3)
        emu_fence_async_proxy();
      emu_barrier_arrive(1, 160);
    } else {
      emu_barrier_sync(1, 160);
      issue(d, 8, 0);
      emu_wgmma_commit();
      emu_wgmma_wait();
      check(d, 8, 1, -1);
      if(round < 4 && (flaw != 1 || round != 2))
        emu_barrier_arrive(2, 160);
      if(flaw == 1 && round == 2)
        return;
    }
  }
}

/* An operand that a copy brings. Flaw 1: it is not waited for; 2: only lane 0 waits, without sync_warp. */
static void copied_operand(void **params)
{
  const int flaw = variant_of(params)->flaw;
  float d[4];
  make_mbarriers(1, 1);
  if(thread() == 0) {
    emu_mbarrier_arrive_expect(mbarrier(0), 1024);
    emu_copy_bulk(byte(B_AT), variant_of(params)->global, 1024, mbarrier(0));
  }
  write_tiles(0, 0);
  if(flaw == 0 || (flaw == 2 && lane() == 0))
    emu_mbarrier_wait(mbarrier(0), 0, 1);
  if(warp() == 4)
    return;
  issue(d, 8, 0);
  emu_wgmma_commit();
  emu_wgmma_wait();
  for(int i = 0; i < 4; i++)
    must(use(d[i]) == 0);
}

/* A stage is used by the warpgroup and refilled by warp 4. Flaw 1: given back ahead of the wait; 2: by one warp only; 3: by lanes that nothing orders
 * behind their warp's last read (there is none: a product is the whole warp's). */
static void refilled(void **params)
{
  const int flaw = variant_of(params)->flaw;
  const uint32_t *g = variant_of(params)->global;
  float d[4];
  if(thread() == 0) {
    emu_mbarrier_init(mbarrier(0), 1);
    emu_mbarrier_init(mbarrier(1), flaw == 2 ? 1 : 4);
    emu_mbarrier_init_fence();
  }
  write_tiles(0, 0);
  if(thread() == 128) {
    for(uint32_t round = 0; round < 4; round++) {
      if(round > 0)
        emu_mbarrier_wait(mbarrier(1), (round - 1) & 1, 1);
      emu_mbarrier_arrive_expect(mbarrier(0), 1024);
      emu_copy_bulk(byte(B_AT), &g[256 * round], 1024, mbarrier(0));
    }
  }
  for(uint32_t round = 0; warp() < 4 && round < 4; round++) {
    emu_mbarrier_wait(mbarrier(0), round & 1, 2);
    issue(d, 8, 0);
    emu_wgmma_commit();
    if(lane() == 0 && flaw == 1)
      emu_mbarrier_arrive(mbarrier(1));
    emu_wgmma_wait();
    if(lane() == 0 && flaw != 1 && (flaw != 2 || warp() == 2))
      emu_mbarrier_arrive(mbarrier(1));
    if(flaw == 2 && round == 0 && warp() != 2)
      return; /* their part is not needed for the finding */
  }
}

/* ---- the rules ---- */

static void misused(void **params)
{
  const int flaw = variant_of(params)->flaw;
  float d[MAX_N / 2] = {0}, e[MAX_N / 2];
  write_tiles(0, 32);
  if(warp() == 4)
    return;
  if(flaw == 1) {
    issue(d, 32, 0);
    __tsan_read4(&d[15]);
  } else if(flaw == 2) {
    issue(d, 32, 0);
    emu_wgmma_commit();
    __tsan_write16(&d[4]);
  } else if(flaw == 3) {
    issue(d, 32, 0);
    emu_wgmma_commit();
    emu_keep_accumulators(d, 16);
  } else if(flaw == 4) {
    emu_wgmma(d, 32, descriptor(A_AT, 0), descriptor(B_AT, 0), 0);
  } else if(flaw == 5) { /* the fence is used up by the wait */
    issue(d, 32, 0);
    emu_wgmma_commit();
    emu_wgmma_wait();
    emu_wgmma(d, 32, descriptor(A_AT, 0), descriptor(B_AT, 0), 1);
  } else if(flaw == 6) {
    issue(d, 32, 0);
    emu_wgmma_wait();
  } else if(flaw == 7) {
    issue(d, 32, 0);
    emu_wgmma_commit();
  } else if(flaw == 8) {
    issue(d, 32, 0);
  } else if(flaw == 9) {
    emu_wgmma_fence();
    emu_wgmma(d, 32, descriptor(A_AT, warp() == 2), descriptor(B_AT, 0), 0);
  } else if(flaw == 10) {
    emu_wgmma_fence();
    emu_wgmma(d, 32, descriptor(A_AT, 0), descriptor(B_AT, lane() == 9), 0);
  } else if(flaw == 11) {
    emu_wgmma_fence();
    emu_wgmma(d, 32, descriptor(A_AT, 0), descriptor(B_AT, 0), warp() == 3);
  } else if(flaw == 12) { /* three warps */
    if(warp() == 1)
      return;
    issue(d, 32, 0);
    emu_wgmma_commit();
    emu_wgmma_wait();
  } else if(flaw == 13) {
    emu_wgmma_fence();
    emu_wgmma(d, 32, descriptor(A_AT, 0), descriptor((int)SHARED_BYTES - 1024, 0), 0);
  } else if(flaw == 14) {
    emu_wgmma_fence();
    emu_wgmma(d, 32, descriptor(A_AT, 0), descriptor(B_AT, 0) & ~(3ull << 62), 0);
  } else if(flaw == 15) {
    emu_wgmma_fence();
    emu_wgmma(d, 12, descriptor(A_AT, 0), descriptor(B_AT, 0), 0);
  } else if(flaw == 16) {
    emu_wgmma_fence();
    emu_wgmma(d, 264, descriptor(A_AT, 0), descriptor(B_AT, 0), 0);
  } else if(flaw == 17) { /* other accumulators that begin at the same place */
    emu_wgmma_fence();
    emu_wgmma(d, 8, descriptor(A_AT, 0), descriptor(B_AT, 0), 0);
    emu_wgmma(d, 32, descriptor(A_AT, 0), descriptor(B_AT, 0), 0);
  } else if(flaw == 18) { /* and that overlap */
    emu_wgmma_fence();
    emu_wgmma(d, 16, descriptor(A_AT, 0), descriptor(B_AT, 0), 0);
    emu_wgmma(d + 4, 16, descriptor(A_AT, 0), descriptor(B_AT, 0), 0);
  } else if(flaw == 19) {
    issue(d, 32, 0);
    emu_wgmma_commit();
    __tsan_read4(&e[0]); /* beside them */
    issue(e, 32, 0);
    emu_wgmma_commit();
    emu_wgmma_wait();
    __tsan_read_range(d, sizeof(d));
  }
}

static void odd_warp(void **params)
{
  float d[4];
  (void)params;
  write_tiles(0, 0);
  if(warp() != 4)
    return;
  issue(d, 8, 0);
}

static void over_mbarrier(void **params)
{
  float d[4];
  (void)params;
  if(thread() == 0)
    emu_mbarrier_init((uint64_t *)(void *)byte(B_AT + 128), 1);
  write_tiles(0, 0);
  if(warp() != 4)
    issue(d, 8, 0);
}

static const struct flawed cases[] = {
    GOOD("columns that nobody wrote", unwritten_columns, 1, 5, 0),
    BAD("no proxy fence", fences, 1, 5, 1, EMU_NO_PROXY_FENCE, "no fence_async_proxy of the storing thread"),
    BAD("a row without a proxy fence", fences, 1, 5, 2, EMU_NO_PROXY_FENCE, "the store by warp 0 lane 5"),
    BAD("a column without a proxy fence", fences, 1, 5, 3, EMU_NO_PROXY_FENCE, "the store by warp 2 lane 6"),
    BAD("a column without a proxy fence, in a second product", fences_again, 1, 5, 3, EMU_NO_PROXY_FENCE, "the store by warp 2 lane 6"),
    GOOD("rows that do not count", idle_rows, 1, 5, 0),
    BAD("rows that do not count, used", idle_rows, 1, 5, 1, EMU_UNINITIALISED, "count_rows() says"),
    SOMETIMES("a row that counts, without a proxy fence", idle_rows, 1, 5, 2, EMU_NO_PROXY_FENCE, EMU_UNINITIALISED),
    BAD("the last row that counts, written meanwhile", idle_rows, 1, 5, 3, EMU_EARLY_OVERWRITE, "the products may still be reading it"),
    GOOD("nothing used without a proxy fence", fences, 1, 5, 11),
    GOOD("a row without a proxy fence, not used", fences, 1, 5, 12),
    GOOD("a column without a proxy fence, not used", fences, 1, 5, 13),
    GOOD("a column written meanwhile, not used", written_meanwhile, 1, 5, 0),
    SOMETIMES("a column written meanwhile", written_meanwhile, 1, 5, 1, EMU_EARLY_OVERWRITE, EMU_RACE),
    SOMETIMES("a column written ahead of the commit", written_meanwhile, 1, 5, 2, EMU_EARLY_OVERWRITE, EMU_RACE),
    SOMETIMES("a column that other warps read", written_meanwhile, 1, 5, 3, EMU_EARLY_OVERWRITE, EMU_NONE),
    BAD("a row written meanwhile", written_meanwhile, 1, 5, 4, EMU_EARLY_OVERWRITE, "the products may still be reading it"),
    GOOD("a column written by another warp, not used", written_by_another, 1, 5, 0),
    SOMETIMES("a column written by another warp", written_by_another, 1, 5, 1, EMU_EARLY_OVERWRITE, EMU_RACE),
    SOMETIMES("a column written by another warp", written_by_another, 1, 5, 1, EMU_RACE, EMU_EARLY_OVERWRITE),
    GOOD("an operand written in turns", written_in_turns, 1, 5, 0),
    SOMETIMES("an operand written too early", written_in_turns, 1, 5, 1, EMU_EARLY_OVERWRITE, EMU_RACE),
    BAD("an operand written in turns, one fence missing", written_in_turns, 1, 5, 2, EMU_NO_PROXY_FENCE, "no fence_async_proxy of the storing thread"),
    GOOD("a copied operand", copied_operand, 1, 5, 0),
    BAD("a copied operand, not waited for", copied_operand, 1, 5, 1, EMU_RACE, "completion was not waited for"),
    SOMETIMES("a copied operand, one lane waits", copied_operand, 1, 5, 2, EMU_RACE, EMU_NONE),
    GOOD("a stage refilled", refilled, 1, 5, 0),
    BAD("a stage given back ahead of the wait", refilled, 1, 5, 1, EMU_EARLY_OVERWRITE, "the products may still be reading it"),
    SOMETIMES("a stage given back by one warp", refilled, 1, 5, 2, EMU_EARLY_OVERWRITE, EMU_RACE),
    BAD("accumulators read", misused, 1, 5, 1, EMU_WGMMA, "accumulators are touched"),
    BAD("accumulators written", misused, 1, 5, 2, EMU_WGMMA, "accumulators are touched"),
    BAD("accumulators kept", misused, 1, 5, 3, EMU_WGMMA, "accumulators are touched"),
    BAD("no wgmma_fence", misused, 1, 5, 4, EMU_WGMMA, "without a wgmma_fence"),
    BAD("no wgmma_fence behind a wait", misused, 1, 5, 5, EMU_WGMMA, "without a wgmma_fence"),
    BAD("no commit", misused, 1, 5, 6, EMU_WGMMA, "4 products are not committed"),
    BAD("no wait", misused, 1, 5, 7, EMU_UNFINISHED, "4 products that nobody waited for"),
    BAD("no commit, no wait", misused, 1, 5, 8, EMU_UNFINISHED, "4 products that nobody waited for"),
    BAD("warps with different operands", misused, 1, 5, 9, EMU_DIVERGENCE, "other operands than the warps of its group"),
    BAD("lanes with different operands", misused, 1, 5, 10, EMU_DIVERGENCE, "lanes 0 and 9"),
    BAD("warps that differ in accumulation", misused, 1, 5, 11, EMU_DIVERGENCE, "other operands than the warps of its group"),
    BAD("three warps", misused, 1, 5, 12, EMU_DEADLOCK, "the other warps of the warpgroup"),
    BAD("an operand behind shared memory", misused, 1, 5, 13, EMU_BOUNDS, "operand of a product"),
    BAD("another swizzle", misused, 1, 5, 14, EMU_UNSUPPORTED, "128-byte swizzle"),
    BAD("12 columns", misused, 1, 5, 15, EMU_UNSUPPORTED, "12 columns"),
    BAD("264 columns", misused, 1, 5, 16, EMU_UNSUPPORTED, "264 columns"),
    BAD("accumulators of two sizes", misused, 1, 5, 17, EMU_WGMMA, "overlap"),
    BAD("accumulators that overlap", misused, 1, 5, 18, EMU_WGMMA, "overlap"),
    GOOD("two sets of accumulators", misused, 1, 5, 19),
    BAD("a warp of no group", odd_warp, 1, 5, 0, EMU_WGMMA, "no whole warpgroup"),
    BAD("an operand with an mbarrier in it", over_mbarrier, 1, 5, 0, EMU_BARRIER, "product's read the mbarrier"),
};

START_TEST(products)
{
  expect_flawed(&cases[_i]);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_product");
  TCase *table = tcase_create("products");
  tcase_add_loop_test(table, results, 0, 4);
  tcase_add_loop_test(table, products, 0, NUMBER(cases));
  suite_add_tcase(suite, table);
  return run_suite(suite);
}
