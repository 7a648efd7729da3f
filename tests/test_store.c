/* test_store.c - the work store: what goes in comes out, keys are identities, calls are atomic. */
#include "store_fixture.h"

#include <math.h>

/* ---- the file ---- */
START_TEST(file_is_set_up)
{
  struct store *st = open_store();
  ck_assert_int_eq(number(st, "PRAGMA application_id"), STORE_APPLICATION_ID);
  ck_assert_int_eq(number(st, "PRAGMA user_version"), STORE_SCHEMA_VERSION);
  ck_assert_int_eq(number(st, "PRAGMA foreign_keys"), 1);
  ck_assert_int_eq(number(st, "SELECT journal_mode='wal' FROM pragma_journal_mode"), 1);
  ck_assert(exists(path, ".lock"));
  store_close(st);
  ck_assert(!exists(path, ".lock"));
  ck_assert(!exists(path, ".new"));
  ck_assert(!exists(path, "-wal"));
  st = open_store();
  store_close(st);
}
END_TEST

START_TEST(readers_write_nothing)
{
  struct store *st = open_store(), *reader;
  const struct rows rows = put_rows(st, "a", 256, 132);
  const struct model_spec spec = some_spec("b", 128);
  const struct winner win = some_winner(rows.candidate, 1, 1, 5, false);
  int64_t id;
  reader = open_reader_of(path); /* beside the writer */
  ck_assert_int_eq(number(reader, "SELECT count(*) FROM candidate"), 1);
  ck_fails(store_put_shape(reader, &spec, &id, &err), MF_ERR_STORE);
  ck_says("reading only");
  ck_fails(store_put_winners(reader, rows.run, rows.shape, rows.device, &win, 1, &err), MF_ERR_STORE);
  ck_fails(store_begin(reader, &err), MF_ERR_STORE);
  store_close(reader);
  store_close(st);
}
END_TEST

/* ---- shapes, devices, runs ---- */
START_TEST(shape_is_its_problem)
{
  struct store *st = open_store();
  struct model_spec spec = some_spec("one", 256), back;
  int64_t one, two, other;
  ck_ok(store_put_shape(st, &spec, &one, &err));
  ck_ok(store_get_shape(st, one, &back, &err));
  ck_assert_str_eq(back.name, "one");
  ck_assert_str_eq(back.source, "config.json of one");
  ck_assert_double_eq(back.routed_scaling, 2.5);
  ck_assert_mem_eq(&back.problem, &spec.problem, sizeof(spec.problem));
  spec = some_spec("two", 256);
  ck_ok(store_put_shape(st, &spec, &two, &err));
  ck_assert_int_eq(one, two);
  spec.problem.top_k = 4;
  ck_ok(store_put_shape(st, &spec, &other, &err));
  ck_assert_int_ne(one, other);
  ck_fails(store_get_shape(st, 99, &back, &err), MF_ERR_NOT_FOUND);
  run_sql(st, "UPDATE shape SET problem=zeroblob(length(problem))");
  ck_fails(store_get_shape(st, one, &back, &err), MF_ERR_STORE);
  ck_says("damaged");
  store_close(st);
}
END_TEST

START_TEST(names_are_for_display)
{
  struct store *st = open_store();
  const struct rows a = put_rows(st, "first", 256, 132);
  struct model_spec spec = some_spec("second", 256);
  struct winner_list list;
  int64_t id;
  put_winner(st, &a, 1, 8, 9, false);
  ck_ok(store_put_shape(st, &spec, &id, &err)); /* the same problem under another name */
  ck_assert_uint_eq(list_winners(st, "first").count, 1);
  ck_assert_str_eq(list_winners(st, "first").items[0].shape_name, "first");
  ck_assert_str_eq(list_winners(st, "second").items[0].shape_name, "second");
  ck_assert_uint_eq(list_winners(st, NULL).count, 1);
  ck_assert_uint_eq(list_winners(st, "third").count, 0);
  spec = some_spec("first", 64); /* the name now means another problem */
  ck_ok(store_put_shape(st, &spec, &id, &err));
  ck_assert_uint_eq(list_winners(st, "first").count, 0);
  spec = some_spec("second", 64);
  ck_ok(store_put_shape(st, &spec, &id, &err));
  list = list_winners(st, NULL); /* no name left */
  ck_assert_uint_eq(list.count, 1);
  ck_assert_ptr_nonnull(strchr(list.items[0].shape_name, '~'));
  ck_assert_uint_eq(list_winners(st, list.items[0].shape_name).count, 1);
  store_close(st);
}
END_TEST

START_TEST(device_round_trip)
{
  struct store *st = open_store();
  struct device_info dev = some_device(132), back;
  int64_t id, again;
  dev.mig = true;
  ck_ok(store_put_device(st, &dev, &id, &err));
  ck_ok(store_get_device(st, id, &back, &err));
  ck_assert_str_eq(back.name, dev.name);
  ck_assert_str_eq(back.uuid, dev.uuid);
  ck_assert(back.mig && !back.emulated);
  ck_assert_int_eq(back.cc_major * 10 + back.cc_minor, 90);
  ck_assert_int_eq(back.sms, 132);
  ck_assert_int_eq(back.shared_bytes_per_cta, dev.shared_bytes_per_cta);
  ck_assert_int_eq(back.shared_bytes_per_sm, dev.shared_bytes_per_sm);
  ck_assert_int_eq(back.registers_per_sm, dev.registers_per_sm);
  ck_assert_int_eq(back.max_threads_per_cta, dev.max_threads_per_cta);
  ck_assert_int_eq(back.l2_bytes, dev.l2_bytes);
  ck_assert_double_eq(back.bandwidth_gbps, dev.bandwidth_gbps);
  ck_assert_double_eq(back.launch_us, dev.launch_us);
  ck_assert_double_eq(back.memory_bytes, dev.memory_bytes);
  ck_assert_int_eq(back.driver_version, DRIVER);
  ck_assert_int_eq(back.memory_bus_bits, 6144);
  ck_assert_int_eq(back.memory_clock_khz, 3201000);
  dev.driver_version = 13010;
  ck_ok(store_put_device(st, &dev, &again, &err));
  ck_assert_int_eq(id, again);
  ck_ok(store_get_device(st, id, &back, &err));
  ck_assert_int_eq(back.driver_version, 13010);
  ck_fails(store_get_device(st, 99, &back, &err), MF_ERR_NOT_FOUND);
  store_close(st);
}
END_TEST

START_TEST(device_key_is_what_timing_depends_on)
{
  const struct device_info base = some_device(132);
  struct device_info dev[10];
  char key[KEY_LEN], other[KEY_LEN];
  size_t i;
  store_device_key(&base, key);
  for(i = 0; i < 10; i++)
    dev[i] = base;
  snprintf(dev[0].name, sizeof(dev[0].name), "H200 NVL");
  dev[1].driver_version = 12080;
  snprintf(dev[2].uuid, sizeof(dev[2].uuid), "GPU-2");
  for(i = 0; i < 3; i++) {
    store_device_key(&dev[i], other);
    ck_assert_str_eq(key, other);
  }
  dev[3].sms = 114;
  dev[4].cc_minor = 1;
  dev[5].l2_bytes = 50L << 20;
  dev[6].memory_bus_bits = 5120;
  dev[7].memory_clock_khz = 2619000;
  dev[8].mig = true;
  dev[9].emulated = true;
  for(i = 3; i < 10; i++) {
    store_device_key(&dev[i], other);
    ck_assert_str_ne(key, other);
  }
  dev[0].memory_bus_bits = dev[1].memory_bus_bits = 0; /* of spec files */
  dev[1].bandwidth_gbps = 3000;
  store_device_key(&dev[0], key);
  store_device_key(&dev[1], other);
  ck_assert_str_ne(key, other);
}
END_TEST

START_TEST(killed_runs_are_marked)
{
  struct store *st = open_store();
  int64_t first, second;
  ck_ok(store_begin_run(st, "tune a", NVRTC, DRIVER, &first, &err));
  store_close(st);
  st = open_store();
  ck_assert_int_eq(number(st, "SELECT count(*) FROM run WHERE outcome='running'"), 1);
  ck_ok(store_begin_run(st, "tune b", NVRTC, DRIVER, &second, &err));
  ck_assert_int_ne(first, second);
  ck_assert_int_eq(number(st, "SELECT outcome='killed' FROM run WHERE command_line='tune a'"), 1);
  ck_ok(store_end_run(st, second, MF_ERR_CHECK, &err));
  ck_assert_int_eq(number(st, "SELECT outcome='MF_ERR_CHECK' AND ended_at>=started_at FROM run WHERE command_line='tune b'"), 1);
  ck_fails(store_end_run(st, 99, MF_OK, &err), MF_ERR_NOT_FOUND);
  store_close(st);
}
END_TEST

/* ---- artifacts, candidates ---- */
START_TEST(artifact_round_trip)
{
  struct store *st = open_store();
  const struct artifact one = some_artifact(1);
  struct artifact back;
  int64_t id, again;
  ck_fails(store_get_artifact(st, one.compile_key, &back, &err), MF_ERR_NOT_FOUND);
  ck_ok(store_put_artifact(st, &one, NVRTC, &id, &err));
  ck_ok(store_put_artifact(st, &one, NVRTC, &again, &err));
  ck_assert_int_eq(id, again);
  ck_ok(store_get_artifact(st, one.compile_key, &back, &err));
  ck_assert_int_eq(back.id, id);
  ck_assert_ptr_null(back.source);
  ck_assert_str_eq(back.name, "artifact1");
  ck_assert_str_eq(back.compile_key, one.compile_key);
  ck_assert_uint_eq(back.cubin_bytes, one.cubin_bytes);
  ck_assert_mem_eq(back.cubin, one.cubin, one.cubin_bytes);
  ck_assert_int_eq(back.registers, 73);
  ck_assert_int_eq(back.spill_bytes, 1);
  ck_assert_int_eq(back.stack_bytes, 16);
  ck_assert_int_eq(back.static_shared_bytes, 48);
  ck_assert(back.wgmma_serialised);
  ck_assert_double_eq(back.compile_seconds, 0.75);
  artifact_free(&back);
  run_sql(st, "UPDATE artifact SET cubin=zeroblob(length(cubin))");
  ck_fails(store_get_artifact(st, one.compile_key, &back, &err), MF_ERR_STORE);
  ck_says("damaged");
  ck_assert_ptr_null(back.cubin);
  store_close(st);
}
END_TEST

START_TEST(candidate_is_schedule_artifact_recipe)
{
  struct store *st = open_store();
  struct rows rows = put_rows(st, "a", 256, 132);
  const struct artifact other = some_artifact(2);
  int64_t changed;
  ck_assert_int_eq(put_candidate(st, &rows, "none/a1", 1000), rows.candidate);
  changed = put_candidate(st, &rows, "none/a1", 1001);
  ck_assert_int_ne(changed, rows.candidate);
  ck_assert_int_ne(put_candidate(st, &rows, "none/a2", 1000), rows.candidate);
  ck_ok(store_put_artifact(st, &other, NVRTC, &rows.artifact, &err));
  ck_assert_int_ne(put_candidate(st, &rows, "none/a1", 1000), rows.candidate);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM candidate"), 4);
  store_close(st);
}
END_TEST

START_TEST(candidate_round_trip)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  const struct family_ops *family = families_all()[0];
  const struct device_info dev = some_device(132);
  const struct model_spec spec = some_spec("a", 256);
  struct candidate cand, back;
  struct artifact art;
  memset(&cand, 0, sizeof(cand));
  cand.schedule.family = family;
  family->default_schedule(&spec.problem, 1, &dev, &cand.schedule);
  schedule_name(&cand.schedule, cand.name, sizeof(cand.name));
  cand.artifact_id = rows.artifact;
  cand.recipe.magic = MF_RECIPE_MAGIC;
  cand.recipe.maps[3].box[4] = 77;
  cand.is_default = true;
  ck_ok(store_put_candidate(st, rows.shape, rows.device, &cand, &err));
  ck_ok(store_get_candidate(st, cand.id, &back, &art, &err));
  ck_assert_str_eq(back.name, cand.name);
  ck_assert(schedule_equal(&back.schedule, &cand.schedule));
  ck_assert_mem_eq(&back.recipe, &cand.recipe, sizeof(cand.recipe));
  ck_assert_int_eq(back.id, cand.id);
  ck_assert_int_eq(back.artifact_id, rows.artifact);
  ck_assert_str_eq(back.artifact_name, "artifact1");
  ck_assert(back.is_default);
  ck_assert_str_eq(art.source, "// source 1");
  ck_assert_str_eq(art.log, "log 1");
  ck_assert_uint_eq(art.cubin_bytes, 5000);
  artifact_free(&art);
  ck_ok(store_get_candidate(st, rows.candidate, &back, &art, &err)); /* a family that this program does not know */
  ck_assert_ptr_null(back.schedule.family);
  artifact_free(&art);
  ck_fails(store_get_candidate(st, 99, &back, &art, &err), MF_ERR_NOT_FOUND);
  run_sql(st, "UPDATE candidate SET recipe=zeroblob(10)");
  ck_fails(store_get_candidate(st, cand.id, &back, &art, &err), MF_ERR_STORE);
  ck_assert_ptr_null(art.cubin);
  store_close(st);
}
END_TEST

/* ---- rejections ---- */
static bool take_reject(void *context, const char *stage, const char *rule, long count, const char *example_schedule, const char *example_detail)
{
  char *text = context;
  snprintf(text + strlen(text), 512 - strlen(text), "%s/%s %ld %s (%s); ", stage, rule, count, example_schedule, example_detail);
  return true;
}

START_TEST(rejects_are_counted)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  struct verdict why = {.stage = "limits", .rule = "registers", .have = 300, .allowed = 255, .nearest = -1, .detail = "300 registers"};
  char text[512] = "";
  int64_t run;
  ck_ok(store_put_reject(st, rows.run, rows.shape, rows.device, "s/2", &why, &err));
  ck_ok(store_put_reject(st, rows.run, rows.shape, rows.device, "s/1", &why, &err));
  why.rule = "shared_bytes";
  why.stage = "space";
  snprintf(why.detail, sizeof(why.detail), "first");
  ck_ok(store_put_reject(st, rows.run, rows.shape, rows.device, "s/1", &why, &err));
  ck_ok(store_begin_run(st, "again", NVRTC, DRIVER, &run, &err));
  snprintf(why.detail, sizeof(why.detail), "second");
  ck_ok(store_put_reject(st, run, rows.shape, rows.device, "s/1", &why, &err));
  ck_ok(store_each_reject(st, rows.shape, rows.device, take_reject, text, &err));
  ck_assert_str_eq(text, "limits/registers 2 s/1 (300 registers); space/shared_bytes 1 s/1 (second); ");
  text[0] = '\0';
  ck_ok(store_each_reject(st, rows.shape, 99, take_reject, text, &err));
  ck_assert_str_eq(text, "");
  why.rule = NULL;
  ck_fails(store_put_reject(st, run, rows.shape, rows.device, "s/1", &why, &err), MF_ERR_INTERNAL);
  store_close(st);
}
END_TEST

/* ---- checks ---- */
START_TEST(check_round_trip)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  struct check_result result = {.passed = true}, back;
  ck_fails(store_get_check(st, rows.candidate, "key", &back, &err), MF_ERR_NOT_FOUND);
  result.worst[GATE_H] = 8e-3;
  result.worst_error = 0.042;
  result.worst[GATE_END] = (double)NAN;
  result.worst[GATE_Y_GIVEN_H] = (double)INFINITY;
  ck_ok(store_put_check(st, rows.run, rows.candidate, "key", &result, NULL, &err));
  ck_ok(store_get_check(st, rows.candidate, "key", &back, &err));
  ck_assert(back.passed);
  ck_assert_double_eq(back.worst[GATE_H], 8e-3);
  ck_assert_double_eq(back.worst_error, 0.042);
  ck_assert(isnan(back.worst[GATE_END]) && isinf(back.worst[GATE_Y_GIVEN_H]));
  ck_assert_str_eq(back.detail, "");
  result.passed = false;
  result.failed_gate = GATE_GUARD;
  snprintf(result.detail, sizeof(result.detail), "guard: B=5");
  ck_ok(store_put_check(st, rows.run, rows.candidate, "key", &result, NULL, &err)); /* replaces */
  ck_ok(store_get_check(st, rows.candidate, "key", &back, &err));
  ck_assert(!back.passed);
  ck_assert_int_eq(back.failed_gate, GATE_GUARD);
  ck_assert_str_eq(back.detail, "guard: B=5");
  ck_fails(store_get_check(st, rows.candidate, "other policy", &back, &err), MF_ERR_NOT_FOUND);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM check_gate"), GATES + 1); /* and the error */
  store_close(st);
}
END_TEST

START_TEST(faults_are_failed_checks)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  const struct check_result result = {.passed = true};
  struct check_result back;
  ck_ok(store_put_check(st, rows.run, rows.candidate, "key", &result, "signal 11", &err));
  ck_ok(store_get_check(st, rows.candidate, "key", &back, &err));
  ck_assert(!back.passed);
  ck_assert_str_eq(back.detail, "fault: signal 11");
  ck_fails(store_put_check(st, rows.run, 99, "key", &result, NULL, &err), MF_ERR_INTERNAL);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM check_result"), 1);
  store_close(st);
}
END_TEST

/* ---- samples ---- */
struct sample_text {
  char text[256];
  int stop_after;
};

static bool take_sample(void *context, const struct sample *smp)
{
  struct sample_text *out = context;
  snprintf(out->text + strlen(out->text), sizeof(out->text) - strlen(out->text), "%d:%g/%g%s ", smp->round, smp->us, smp->floors.copy_us, smp->floors.tensor_us == 3 ? "+" : isnan(smp->floors.tensor_us) ? "" : "?");
  return --out->stop_after != 0;
}

static const char *samples_text(struct store *st, int64_t candidate, const char *key, int tokens, enum routing_kind routing, uint32_t seed, int stop_after)
{
  static struct sample_text out;
  out = (struct sample_text){.stop_after = stop_after};
  ck_ok(store_each_sample(st, candidate, key, tokens, routing, seed, take_sample, &out, &err));
  return out.text;
}

static struct sample some_sample(int64_t candidate, int round, double us)
{
  return (struct sample){.candidate_id = candidate, .tokens = 4, .routing = ROUTING_ZIPF, .seed = 4000000000u, .round = round, .us = us, .floors = {2, NAN}};
}

START_TEST(samples_by_key)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  struct sample smp[3] = {some_sample(rows.candidate, 2, 12), some_sample(rows.candidate, 0, 10), some_sample(rows.candidate, 1, 11)};
  int64_t run;
  ck_ok(store_put_samples(st, rows.run, "k1", smp, 3, &err));
  ck_ok(store_put_samples(st, rows.run, "k2", smp, 1, &err));
  ck_assert_str_eq(samples_text(st, rows.candidate, "k1", 4, ROUTING_ZIPF, 4000000000u, -1), "0:10/2 1:11/2 2:12/2 ");
  ck_assert_str_eq(samples_text(st, rows.candidate, "k2", 4, ROUTING_ZIPF, 4000000000u, -1), "2:12/2 ");
  ck_assert_str_eq(samples_text(st, rows.candidate, "k3", 4, ROUTING_ZIPF, 4000000000u, -1), "");
  ck_assert_str_eq(samples_text(st, rows.candidate, "k1", 5, ROUTING_ZIPF, 4000000000u, -1), "");
  ck_assert_str_eq(samples_text(st, rows.candidate, "k1", 4, ROUTING_UNIFORM, 4000000000u, -1), "");
  ck_assert_str_eq(samples_text(st, rows.candidate, "k1", 4, ROUTING_ZIPF, 1, -1), "");
  ck_assert_str_eq(samples_text(st, rows.candidate + 1, "k1", 4, ROUTING_ZIPF, 4000000000u, -1), "");
  ck_assert_str_eq(samples_text(st, rows.candidate, "k1", 4, ROUTING_ZIPF, 4000000000u, 2), "0:10/2 1:11/2 ");
  ck_ok(store_begin_run(st, "tune --retime", NVRTC, DRIVER, &run, &err)); /* another run's sample of the same round is kept beside it */
  smp[1].us = 20;
  smp[1].floors.tensor_us = 3;
  ck_ok(store_put_samples(st, run, "k1", &smp[1], 1, &err));
  ck_assert_str_eq(samples_text(st, rows.candidate, "k1", 4, ROUTING_ZIPF, 4000000000u, -1), "0:10/2 0:20/2+ 1:11/2 2:12/2 ");
  ck_assert_int_eq(number(st, "SELECT count(*) FROM sample WHERE made_at IS NOT NULL"), 5);
  store_close(st);
}
END_TEST

/* ---- transactions ---- */
START_TEST(calls_are_atomic)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  const struct sample smp[3] = {some_sample(rows.candidate, 0, 1), some_sample(99, 1, 1), some_sample(rows.candidate, 2, 1)};
  ck_fails(store_put_samples(st, rows.run, "k1", smp, 3, &err), MF_ERR_INTERNAL); /* candidate 99 is not there */
  ck_assert_int_eq(number(st, "SELECT count(*) FROM sample"), 0);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM timing"), 0);
  ck_ok(store_put_samples(st, rows.run, "k1", smp, 1, &err));
  store_close(st);
}
END_TEST

START_TEST(batches)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  const struct sample good = some_sample(rows.candidate, 0, 1), bad[2] = {some_sample(rows.candidate, 1, 1), some_sample(99, 1, 1)};
  ck_fails(store_commit(st, &err), MF_ERR_INTERNAL);
  ck_ok(store_begin(st, &err));
  ck_fails(store_begin(st, &err), MF_ERR_INTERNAL);
  ck_ok(store_put_samples(st, rows.run, "k1", &good, 1, &err));
  ck_fails(store_put_samples(st, rows.run, "k2", bad, 2, &err), MF_ERR_INTERNAL); /* undone alone */
  put_candidate(st, &rows, "none/b", 1);
  ck_ok(store_commit(st, &err));
  ck_assert_int_eq(number(st, "SELECT count(*) FROM sample"), 1);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM timing"), 1);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM candidate"), 2);
  ck_ok(store_begin(st, &err));
  put_candidate(st, &rows, "none/c", 1);
  store_rollback(st);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM candidate"), 2);
  ck_ok(store_begin(st, &err));
  put_candidate(st, &rows, "none/c", 1);
  store_close(st); /* an open batch is undone */
  st = open_store();
  ck_assert_int_eq(number(st, "SELECT count(*) FROM candidate"), 2);
  store_close(st);
}
END_TEST

int main(void)
{
  const struct test_group groups[] = {
      {"file", {file_is_set_up, readers_write_nothing}},
      {"names", {shape_is_its_problem, names_are_for_display, device_round_trip, device_key_is_what_timing_depends_on, killed_runs_are_marked}},
      {"candidates", {artifact_round_trip, candidate_is_schedule_artifact_recipe, candidate_round_trip, rejects_are_counted}},
      {"results", {check_round_trip, faults_are_failed_checks, samples_by_key}},
      {"transactions", {calls_are_atomic, batches}},
  };
  return run_groups("store", groups, sizeof(groups) / sizeof(groups[0]));
}
