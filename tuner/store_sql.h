/* store_sql.h - all SQL of the work store and of the shipped file. docs/database.md describes the tables.
 *
 * Two kinds: the schema steps, run once by store_migrate(); and the statements of STORE_SQL_TABLE, prepared when first used and kept by the
 * handle. Times are UTC text with milliseconds, so that text order is time order. Keys are SHA-256 in hex. Nothing here needs an SQLite
 * newer than 3.27 (VACUUM INTO). */
#ifndef MOEFORGE_TUNER_STORE_SQL_H
#define MOEFORGE_TUNER_STORE_SQL_H

#define SQL_NOW "strftime('%Y-%m-%dT%H:%M:%fZ','now')"

/* ---- schema ---- */
/* Version 1. A later version is another step that alters this one; never edit a step that was released. */
#define STORE_SCHEMA_1                                                                                            \
  "CREATE TABLE about(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;"                                 \
  "INSERT INTO about VALUES('kind','work');"                                                                      \
                                                                                                                  \
  "CREATE TABLE shape(id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, problem BLOB NOT NULL,"                   \
  " text TEXT NOT NULL, last_name TEXT NOT NULL, made_at TEXT NOT NULL);"                                         \
  "CREATE TABLE shape_name(name TEXT PRIMARY KEY, shape_id INTEGER NOT NULL REFERENCES shape(id),"                \
  " routed_scaling REAL, source TEXT NOT NULL, used_at TEXT NOT NULL) WITHOUT ROWID;"                             \
  "CREATE INDEX shape_name_shape ON shape_name(shape_id);"                                                        \
                                                                                                                  \
  "CREATE TABLE device(id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, name TEXT NOT NULL,"                     \
  " emulated INTEGER NOT NULL, cc_major INTEGER NOT NULL, cc_minor INTEGER NOT NULL, sms INTEGER NOT NULL,"       \
  " shared_bytes_per_cta INTEGER NOT NULL, shared_bytes_per_sm INTEGER NOT NULL, registers_per_sm INTEGER NOT NULL," \
  " max_threads_per_cta INTEGER NOT NULL, l2_bytes INTEGER NOT NULL, bandwidth_gbps REAL, launch_us REAL,"        \
  " memory_bytes REAL, driver_version INTEGER NOT NULL, memory_bus_bits INTEGER NOT NULL,"                        \
  " memory_clock_khz INTEGER NOT NULL, mig INTEGER NOT NULL, uuid TEXT NOT NULL, made_at TEXT NOT NULL);"         \
                                                                                                                  \
  "CREATE TABLE run(id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, command_line TEXT NOT NULL,"                \
  " nvrtc_version INTEGER NOT NULL, driver_version INTEGER NOT NULL, started_at TEXT NOT NULL, ended_at TEXT,"    \
  " outcome TEXT NOT NULL);"                                                                                      \
  "CREATE TABLE run_device(device_id INTEGER NOT NULL REFERENCES device(id),"                                     \
  " run_id INTEGER NOT NULL REFERENCES run(id), PRIMARY KEY(device_id, run_id)) WITHOUT ROWID;"                   \
  "CREATE INDEX run_device_run ON run_device(run_id);"                                                            \
                                                                                                                  \
  "CREATE TABLE artifact(id INTEGER PRIMARY KEY, compile_key TEXT NOT NULL UNIQUE, name TEXT NOT NULL,"           \
  " nvrtc_version INTEGER NOT NULL, registers INTEGER NOT NULL, spill_bytes INTEGER NOT NULL,"                    \
  " stack_bytes INTEGER NOT NULL, static_shared_bytes INTEGER NOT NULL, wgmma_serialised INTEGER NOT NULL,"       \
  " compile_seconds REAL, made_at TEXT NOT NULL, cubin_sha256 TEXT NOT NULL, source TEXT NOT NULL,"               \
  " log TEXT NOT NULL, cubin BLOB NOT NULL);"                                                                     \
                                                                                                                  \
  "CREATE TABLE candidate(id INTEGER PRIMARY KEY, shape_id INTEGER NOT NULL REFERENCES shape(id),"                \
  " device_id INTEGER NOT NULL REFERENCES device(id), schedule TEXT NOT NULL, family_version INTEGER NOT NULL,"   \
  " artifact_id INTEGER NOT NULL REFERENCES artifact(id), recipe_sha256 TEXT NOT NULL,"                           \
  " is_default INTEGER NOT NULL, made_at TEXT NOT NULL, recipe BLOB NOT NULL,"                                    \
  " UNIQUE(shape_id, device_id, schedule, family_version, artifact_id, recipe_sha256));"                          \
  "CREATE INDEX candidate_artifact ON candidate(artifact_id);"                                                    \
                                                                                                                  \
  "CREATE TABLE reject(shape_id INTEGER NOT NULL REFERENCES shape(id), device_id INTEGER NOT NULL REFERENCES device(id)," \
  " stage TEXT NOT NULL, rule TEXT NOT NULL, schedule TEXT NOT NULL, run_id INTEGER NOT NULL REFERENCES run(id)," \
  " have INTEGER NOT NULL, allowed INTEGER NOT NULL, nearest INTEGER NOT NULL, detail TEXT NOT NULL,"             \
  " PRIMARY KEY(shape_id, device_id, stage, rule, schedule)) WITHOUT ROWID;"                                      \
                                                                                                                  \
  "CREATE TABLE check_result(candidate_id INTEGER NOT NULL REFERENCES candidate(id), check_key TEXT NOT NULL,"    \
  " run_id INTEGER NOT NULL REFERENCES run(id), passed INTEGER NOT NULL, failed_gate TEXT, detail TEXT NOT NULL," \
  " fault TEXT, made_at TEXT NOT NULL, PRIMARY KEY(candidate_id, check_key)) WITHOUT ROWID;"                      \
  "CREATE TABLE check_gate(candidate_id INTEGER NOT NULL, check_key TEXT NOT NULL, gate TEXT NOT NULL, worst REAL," \
  " PRIMARY KEY(candidate_id, check_key, gate),"                                                                  \
  " FOREIGN KEY(candidate_id, check_key) REFERENCES check_result(candidate_id, check_key) ON DELETE CASCADE) WITHOUT ROWID;" \
                                                                                                                  \
  "CREATE TABLE timing(id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE);"                                        \
  "CREATE TABLE sample(candidate_id INTEGER NOT NULL REFERENCES candidate(id), timing_id INTEGER NOT NULL REFERENCES timing(id)," \
  " tokens INTEGER NOT NULL, routing TEXT NOT NULL, seed INTEGER NOT NULL, round INTEGER NOT NULL,"               \
  " run_id INTEGER NOT NULL REFERENCES run(id), us REAL NOT NULL, floor_us REAL NOT NULL, made_at TEXT NOT NULL," \
  " PRIMARY KEY(candidate_id, timing_id, tokens, routing, seed, round, run_id)) WITHOUT ROWID;"                   \
                                                                                                                  \
  "CREATE TABLE winner(shape_id INTEGER NOT NULL REFERENCES shape(id), device_id INTEGER NOT NULL REFERENCES device(id)," \
  " tokens_min INTEGER NOT NULL, tokens_max INTEGER NOT NULL, tokens_timed INTEGER NOT NULL,"                     \
  " candidate_id INTEGER NOT NULL REFERENCES candidate(id), run_id INTEGER NOT NULL REFERENCES run(id),"          \
  " us REAL, floor_us REAL, default_us REAL, us_low REAL, us_high REAL, regret REAL, predicted INTEGER NOT NULL," \
  " selection_key TEXT NOT NULL, timing_policy INTEGER NOT NULL, objective INTEGER NOT NULL, made_at TEXT NOT NULL," \
  " PRIMARY KEY(shape_id, device_id, tokens_min), CHECK(tokens_min BETWEEN 1 AND tokens_max)) WITHOUT ROWID;"     \
  "CREATE INDEX winner_candidate ON winner(candidate_id);"

/* Version 2: the floors that were measured. NULL in older rows: not known. */
#define STORE_SCHEMA_2                                                                                            \
  "ALTER TABLE sample ADD COLUMN floor_tensor_us REAL;"                                                           \
  "ALTER TABLE winner ADD COLUMN floor_copy_us REAL;"                                                             \
  "ALTER TABLE winner ADD COLUMN floor_tensor_us REAL;"

/* Private to a connection, in memory: rows that compete for token counts until store_settle() writes what is left of them. 'newer' breaks ties. */
#define STORE_POOL                                                                                                \
  "CREATE TEMP TABLE IF NOT EXISTS pool(pool_id INTEGER PRIMARY KEY, newer INTEGER, shape_id INTEGER, device_id INTEGER," \
  " tokens_min INTEGER, tokens_max INTEGER, tokens_timed INTEGER, candidate_id INTEGER, run_id INTEGER, us REAL,"  \
  " floor_us REAL, default_us REAL, us_low REAL, us_high REAL, regret REAL, predicted INTEGER, selection_key TEXT," \
  " timing_policy INTEGER, objective INTEGER, made_at TEXT, floor_copy_us REAL, floor_tensor_us REAL)"

/* Connection settings; they change nothing in the file. */
#define STORE_SETTINGS                                                                                            \
  "PRAGMA foreign_keys=ON; PRAGMA temp_store=MEMORY; PRAGMA trusted_schema=OFF; PRAGMA synchronous=NORMAL;"

/* ---- parts of statements ---- */
/* How a shape is called: its name used last; "name~key" once that name means another problem. 's' is the shape's row. */
#define SQL_SHAPE_DISPLAY                                                                                         \
  "coalesce((SELECT n.name FROM main.shape_name n WHERE n.shape_id=s.id ORDER BY n.used_at DESC, n.name LIMIT 1),"  \
  " substr(s.last_name,1,70)||'~'||substr(s.key,1,8))"

#define SQL_ARTIFACT_FIELDS                                                                                       \
  "id, compile_key, name, registers, spill_bytes, stack_bytes, static_shared_bytes, wgmma_serialised,"            \
  " compile_seconds, cubin_sha256, cubin"

/* The fields of a winner that do not depend on ids. */
#define SQL_WINNER_FIGURES                                                                                        \
  "us, floor_us, default_us, us_low, us_high, regret, predicted, selection_key, timing_policy, objective, made_at,"           \
  " floor_copy_us, floor_tensor_us"

#define SQL_DEVICE_FIELDS                                                                                         \
  "name, emulated, cc_major, cc_minor, sms, shared_bytes_per_cta, shared_bytes_per_sm, registers_per_sm,"         \
  " max_threads_per_cta, l2_bytes, bandwidth_gbps, launch_us, memory_bytes, driver_version, memory_bus_bits,"     \
  " memory_clock_khz, mig, uuid"

/* The run that was begun last on device 'id' of database 'db'. */
#define SQL_LATEST_RUN(db, id)                                                                                    \
  "(SELECT x.id FROM " db ".run_device y JOIN " db ".run x ON x.id=y.run_id WHERE y.device_id=" id                \
  " ORDER BY x.started_at DESC, x.id DESC LIMIT 1)"

/* ---- statements ---- */
#define STORE_SQL_TABLE(X)                                                                                        \
  X(SQL_BEGIN, "BEGIN IMMEDIATE")                                                                                 \
  X(SQL_COMMIT, "COMMIT")                                                                                         \
  X(SQL_ROLLBACK, "ROLLBACK")                                                                                     \
  X(SQL_SAVE, "SAVEPOINT step")                                                                                   \
  X(SQL_SAVE_RELEASE, "RELEASE step")                                                                             \
  X(SQL_SAVE_ROLLBACK, "ROLLBACK TO step")                                                                        \
  X(SQL_GET_KIND, "SELECT value FROM main.about WHERE name='kind'")                                               \
  X(SQL_SET_SHIPPED, "INSERT OR REPLACE INTO main.about VALUES('kind','shipped')")                                \
                                                                                                                  \
  X(SQL_PUT_SHAPE, "INSERT INTO shape(key, problem, text, last_name, made_at) VALUES(?1,?2,?3,?4," SQL_NOW ")"    \
    " ON CONFLICT(key) DO UPDATE SET last_name=excluded.last_name")                                               \
  X(SQL_FIND_SHAPE, "SELECT id FROM shape WHERE key=?1")                                                          \
  X(SQL_PUT_SHAPE_NAME, "INSERT OR REPLACE INTO shape_name(name, shape_id, routed_scaling, source, used_at)"      \
    " VALUES(?1,?2,?3,?4," SQL_NOW ")")                                                                           \
  X(SQL_GET_SHAPE, "SELECT s.key, s.problem, " SQL_SHAPE_DISPLAY ", n.routed_scaling, n.source FROM shape s"      \
    " LEFT JOIN shape_name n ON n.shape_id=s.id WHERE s.id=?1 ORDER BY n.used_at DESC, n.name LIMIT 1")           \
                                                                                                                  \
  X(SQL_PUT_DEVICE, "INSERT INTO device(key, " SQL_DEVICE_FIELDS ", made_at)"                                     \
    " VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14,?15,?16,?17,?18,?19," SQL_NOW ")"                     \
    " ON CONFLICT(key) DO UPDATE SET name=excluded.name, shared_bytes_per_cta=excluded.shared_bytes_per_cta,"     \
    " shared_bytes_per_sm=excluded.shared_bytes_per_sm, registers_per_sm=excluded.registers_per_sm,"              \
    " max_threads_per_cta=excluded.max_threads_per_cta, bandwidth_gbps=excluded.bandwidth_gbps,"                  \
    " launch_us=excluded.launch_us, memory_bytes=excluded.memory_bytes, driver_version=excluded.driver_version,"  \
    " memory_bus_bits=excluded.memory_bus_bits, memory_clock_khz=excluded.memory_clock_khz, uuid=excluded.uuid")  \
  X(SQL_FIND_DEVICE, "SELECT id FROM device WHERE key=?1")                                                        \
  X(SQL_GET_DEVICE, "SELECT " SQL_DEVICE_FIELDS " FROM device WHERE id=?1")                                       \
                                                                                                                  \
  X(SQL_MARK_KILLED, "UPDATE run SET outcome='killed' WHERE outcome='running'")                                   \
  X(SQL_BEGIN_RUN, "INSERT INTO run(uid, command_line, nvrtc_version, driver_version, started_at, outcome)"       \
    " VALUES(lower(hex(randomblob(16))),?1,?2,?3," SQL_NOW ",'running')")                                         \
  X(SQL_END_RUN, "UPDATE run SET outcome=?2, ended_at=" SQL_NOW " WHERE id=?1")                                   \
  X(SQL_PUT_RUN_DEVICE, "INSERT OR IGNORE INTO run_device(run_id, device_id) VALUES(?1,?2)")                      \
                                                                                                                  \
  X(SQL_GET_ARTIFACT, "SELECT " SQL_ARTIFACT_FIELDS " FROM artifact WHERE compile_key=?1")                        \
  X(SQL_GET_ARTIFACT_BY_ID, "SELECT " SQL_ARTIFACT_FIELDS ", source, log FROM artifact WHERE id=?1")              \
  X(SQL_FIND_ARTIFACT, "SELECT id FROM artifact WHERE compile_key=?1")                                            \
  X(SQL_PUT_ARTIFACT, "INSERT INTO artifact(compile_key, name, nvrtc_version, registers, spill_bytes, stack_bytes," \
    " static_shared_bytes, wgmma_serialised, compile_seconds, cubin_sha256, source, log, cubin, made_at)"         \
    " VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13," SQL_NOW ")")                                            \
                                                                                                                  \
  X(SQL_PUT_CANDIDATE, "INSERT INTO candidate(shape_id, device_id, schedule, family_version, artifact_id, recipe_sha256," \
    " is_default, recipe, made_at) VALUES(?1,?2,?3,?4,?5,?6,?7,?8," SQL_NOW ")"                                   \
    " ON CONFLICT(shape_id, device_id, schedule, family_version, artifact_id, recipe_sha256)"                     \
    " DO UPDATE SET is_default=excluded.is_default")                                                              \
  X(SQL_FIND_CANDIDATE, "SELECT id FROM candidate WHERE shape_id=?1 AND device_id=?2 AND schedule=?3"             \
    " AND family_version=?4 AND artifact_id=?5 AND recipe_sha256=?6")                                             \
  X(SQL_NAMED_CANDIDATE, "SELECT id FROM candidate WHERE shape_id=?1 AND device_id=?2 AND schedule=?3 ORDER BY id DESC LIMIT 1") \
  X(SQL_GET_CANDIDATE, "SELECT c.id, c.schedule, c.artifact_id, a.name, c.is_default, c.recipe_sha256, c.recipe"  \
    " FROM candidate c JOIN artifact a ON a.id=c.artifact_id WHERE c.id=?1")                                      \
                                                                                                                  \
  X(SQL_PUT_REJECT, "INSERT OR REPLACE INTO reject(run_id, shape_id, device_id, schedule, stage, rule, have, allowed," \
    " nearest, detail) VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10)")                                                   \
  X(SQL_LIFT_COMPILED, "DELETE FROM reject WHERE shape_id=?1 AND device_id=?2 AND schedule=?3 AND stage<>'check'") \
  X(SQL_LIFT_CHECKED, "DELETE FROM reject WHERE stage='check' AND (shape_id, device_id, schedule)="               \
    "(SELECT shape_id, device_id, schedule FROM candidate WHERE id=?1)")                                          \
  X(SQL_REJECTED_PAIRS, "SELECT DISTINCT shape_id, device_id FROM reject ORDER BY 1, 2")                          \
  X(SQL_EACH_REJECT, "SELECT stage, rule, count(*), min(schedule), detail FROM reject"                            \
    " WHERE shape_id=?1 AND device_id=?2 GROUP BY stage, rule ORDER BY count(*) DESC, stage, rule")               \
                                                                                                                  \
  X(SQL_DELETE_CHECK, "DELETE FROM check_result WHERE candidate_id=?1 AND check_key=?2")                          \
  X(SQL_PUT_CHECK, "INSERT INTO check_result(run_id, candidate_id, check_key, passed, failed_gate, detail, fault, made_at)" \
    " VALUES(?1,?2,?3,?4,?5,?6,?7," SQL_NOW ")")                                                                  \
  X(SQL_PUT_GATE, "INSERT INTO check_gate(candidate_id, check_key, gate, worst) VALUES(?1,?2,?3,?4)")             \
  X(SQL_GET_CHECK, "SELECT passed, failed_gate, detail, fault FROM check_result WHERE candidate_id=?1 AND check_key=?2") \
  X(SQL_EACH_GATE, "SELECT gate, worst FROM check_gate WHERE candidate_id=?1 AND check_key=?2")                   \
  X(SQL_LATEST_CHECK, "SELECT check_key FROM check_result WHERE candidate_id=?1 ORDER BY made_at DESC, check_key LIMIT 1") \
                                                                                                                  \
  X(SQL_PUT_TIMING, "INSERT OR IGNORE INTO timing(key) VALUES(?1)")                                               \
  X(SQL_PUT_SAMPLE, "INSERT OR REPLACE INTO sample(candidate_id, timing_id, tokens, routing, seed, round, run_id, us, floor_us," \
    " floor_tensor_us, made_at) VALUES(?1,(SELECT id FROM timing WHERE key=?2),?3,?4,?5,?6,?7,?8,?9,?10," SQL_NOW ")")          \
  X(SQL_EACH_SAMPLE, "SELECT round, us, floor_us, floor_tensor_us FROM sample WHERE candidate_id=?1"              \
    " AND timing_id=(SELECT id FROM timing WHERE key=?2) AND tokens=?3 AND routing=?4 AND seed=?5 ORDER BY round, run_id") \
                                                                                                                  \
  X(SQL_EACH_WINNER, "SELECT w.shape_id, w.device_id, w.candidate_id,"                                            \
    " CASE WHEN EXISTS(SELECT 1 FROM shape_name n WHERE n.name=?1 AND n.shape_id=s.id) THEN ?1 ELSE " SQL_SHAPE_DISPLAY " END AS shown," \
    " d.name, c.schedule, w.tokens_min, w.tokens_max, w.tokens_timed, w.us, w.floor_us, w.default_us, w.us_low, w.us_high," \
    " w.regret, w.predicted, w.selection_key, r.driver_version, r.nvrtc_version, w.made_at,"                      \
    " coalesce(l.driver_version<>0 AND l.driver_version<>r.driver_version,0)"                                     \
    " OR coalesce(l.nvrtc_version<>0 AND l.nvrtc_version<>r.nvrtc_version,0) OR w.timing_policy<?2 OR w.objective<?3," \
    " coalesce((SELECT k.passed FROM check_result k WHERE k.candidate_id=w.candidate_id ORDER BY k.made_at DESC, k.check_key LIMIT 1),0), d.emulated," \
    " w.floor_copy_us, w.floor_tensor_us"                                                                        \
    " FROM winner w JOIN shape s ON s.id=w.shape_id JOIN device d ON d.id=w.device_id JOIN candidate c ON c.id=w.candidate_id" \
    " JOIN run r ON r.id=w.run_id LEFT JOIN run l ON l.id=" SQL_LATEST_RUN("main", "w.device_id")                 \
    " WHERE ?1 IS NULL OR shown=?1 ORDER BY shown, d.name, w.device_id, w.tokens_min")                            \
                                                                                                                  \
  X(SQL_POOL_CLEAR, "DELETE FROM temp.pool")                                                                      \
  X(SQL_POOL_PUT, "INSERT INTO temp.pool(newer, shape_id, device_id, tokens_min, tokens_max, tokens_timed, candidate_id, run_id," \
    " us, floor_us, default_us, us_low, us_high, regret, predicted, selection_key, timing_policy, objective, made_at," \
    " floor_copy_us, floor_tensor_us)"                                                                            \
    " VALUES(1,?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14,?15,?16,?17," SQL_NOW ",?18,?19)")                  \
  X(SQL_POOL_TAKE_MEASURED, "INSERT INTO temp.pool(newer, shape_id, device_id, tokens_min, tokens_max, tokens_timed," \
    " candidate_id, run_id, " SQL_WINNER_FIGURES ") SELECT 0, shape_id, device_id, tokens_min, tokens_max, tokens_timed," \
    " candidate_id, run_id, " SQL_WINNER_FIGURES " FROM main.winner WHERE shape_id=?1 AND device_id=?2 AND predicted=0") \
  X(SQL_POOL_TAKE_RIVALS, "INSERT INTO temp.pool(newer, shape_id, device_id, tokens_min, tokens_max, tokens_timed," \
    " candidate_id, run_id, " SQL_WINNER_FIGURES ") SELECT 0, shape_id, device_id, tokens_min, tokens_max, tokens_timed," \
    " candidate_id, run_id, " SQL_WINNER_FIGURES " FROM main.winner"                                              \
    " WHERE (shape_id, device_id) IN (SELECT shape_id, device_id FROM temp.pool)")                                \
  X(SQL_POOL_EACH, "SELECT pool_id, shape_id, device_id, tokens_min, tokens_max FROM temp.pool"                   \
    " ORDER BY shape_id, device_id, predicted, made_at DESC, newer DESC, pool_id")                                \
  X(SQL_WINNER_FROM_POOL, "INSERT INTO main.winner(shape_id, device_id, tokens_min, tokens_max, tokens_timed, candidate_id, run_id, " \
    SQL_WINNER_FIGURES ") SELECT shape_id, device_id, ?2, ?3, tokens_timed, candidate_id, run_id, " SQL_WINNER_FIGURES \
    " FROM temp.pool WHERE pool_id=?1")                                                                           \
  X(SQL_DELETE_WINNERS, "DELETE FROM main.winner WHERE shape_id=?1 AND device_id=?2")                             \
  X(SQL_DELETE_RIVALS, "DELETE FROM main.winner WHERE (shape_id, device_id) IN (SELECT shape_id, device_id FROM temp.pool)") \
                                                                                                                  \
  /* Shipping: 'main' is the file to be, 'src' the work store. Rows are matched by key, since ids differ. */      \
  X(SQL_SHIP_SHAPE, "INSERT INTO main.shape(key, problem, text, last_name, made_at) SELECT key, problem, text, last_name, made_at" \
    " FROM src.shape WHERE id IN (SELECT shape_id FROM src.winner) ON CONFLICT(key) DO NOTHING")                  \
  X(SQL_SHIP_SHAPE_NAME, "INSERT INTO main.shape_name(name, shape_id, routed_scaling, source, used_at)"           \
    " SELECT n.name, m.id, n.routed_scaling, n.source, n.used_at FROM src.shape_name n JOIN src.shape s ON s.id=n.shape_id" \
    " JOIN main.shape m ON m.key=s.key WHERE s.id IN (SELECT shape_id FROM src.winner) ON CONFLICT(name) DO UPDATE" \
    " SET shape_id=excluded.shape_id, routed_scaling=excluded.routed_scaling, source=excluded.source, used_at=excluded.used_at" \
    " WHERE excluded.used_at>=shape_name.used_at")                                                                \
  X(SQL_SHIP_DEVICE, "INSERT INTO main.device(key, made_at, " SQL_DEVICE_FIELDS ") SELECT key, made_at, " SQL_DEVICE_FIELDS \
    " FROM src.device WHERE id IN (SELECT device_id FROM src.winner) ON CONFLICT(key) DO UPDATE SET name=excluded.name," \
    " driver_version=excluded.driver_version")                                                                    \
  X(SQL_SHIP_RUN, "INSERT INTO main.run(uid, command_line, nvrtc_version, driver_version, started_at, ended_at, outcome)" \
    " SELECT uid, command_line, nvrtc_version, driver_version, started_at, ended_at, outcome FROM src.run"        \
    " WHERE id IN (SELECT run_id FROM src.winner)"                                                                \
    " OR id IN (SELECT k.run_id FROM src.check_result k JOIN src.winner w ON w.candidate_id=k.candidate_id)"      \
    " OR id IN (SELECT " SQL_LATEST_RUN("src", "w.device_id") " FROM src.winner w)"                               \
    " ON CONFLICT(uid) DO UPDATE SET ended_at=excluded.ended_at, outcome=excluded.outcome")                       \
  X(SQL_SHIP_RUN_DEVICE, "INSERT OR IGNORE INTO main.run_device(run_id, device_id) SELECT mr.id, md.id FROM src.run_device y" \
    " JOIN src.run r ON r.id=y.run_id JOIN main.run mr ON mr.uid=r.uid JOIN src.device d ON d.id=y.device_id"     \
    " JOIN main.device md ON md.key=d.key")                                                                       \
  X(SQL_SHIP_ARTIFACT, "INSERT INTO main.artifact(compile_key, nvrtc_version, made_at, name, registers, spill_bytes, stack_bytes," \
    " static_shared_bytes, wgmma_serialised, compile_seconds, cubin_sha256, source, log, cubin)"                  \
    " SELECT compile_key, nvrtc_version, made_at, name, registers, spill_bytes, stack_bytes, static_shared_bytes," \
    " wgmma_serialised, compile_seconds, cubin_sha256, source, log, cubin FROM src.artifact WHERE id IN"          \
    " (SELECT c.artifact_id FROM src.winner w JOIN src.candidate c ON c.id=w.candidate_id) ON CONFLICT(compile_key) DO NOTHING") \
  X(SQL_SHIP_CANDIDATE, "INSERT INTO main.candidate(shape_id, device_id, schedule, family_version, artifact_id, recipe_sha256," \
    " is_default, made_at, recipe) SELECT ms.id, md.id, c.schedule, c.family_version, ma.id, c.recipe_sha256, c.is_default," \
    " c.made_at, c.recipe FROM src.candidate c" SQL_SHIP_CANDIDATE_KEYS                                           \
    " WHERE c.id IN (SELECT candidate_id FROM src.winner) ON CONFLICT DO NOTHING")                                \
  X(SQL_SHIP_CHECK, "INSERT OR IGNORE INTO main.check_result(candidate_id, check_key, run_id, passed, failed_gate, detail, fault, made_at)" \
    " SELECT mc.id, k.check_key, mr.id, k.passed, k.failed_gate, k.detail, k.fault, k.made_at FROM src.check_result k" \
    " JOIN src.candidate c ON c.id=k.candidate_id" SQL_SHIP_CANDIDATE_KEYS SQL_SHIP_CANDIDATE_ROW                 \
    " JOIN src.run r ON r.id=k.run_id JOIN main.run mr ON mr.uid=r.uid WHERE c.id IN (SELECT candidate_id FROM src.winner)") \
  X(SQL_SHIP_GATE, "INSERT OR IGNORE INTO main.check_gate(candidate_id, check_key, gate, worst)"                  \
    " SELECT mc.id, g.check_key, g.gate, g.worst FROM src.check_gate g JOIN src.candidate c ON c.id=g.candidate_id" \
    SQL_SHIP_CANDIDATE_KEYS SQL_SHIP_CANDIDATE_ROW " WHERE c.id IN (SELECT candidate_id FROM src.winner)")        \
  X(SQL_SHIP_POOL, "INSERT INTO temp.pool(newer, shape_id, device_id, tokens_min, tokens_max, tokens_timed, candidate_id, run_id, " \
    SQL_WINNER_FIGURES ") SELECT 1, ms.id, md.id, w.tokens_min, w.tokens_max, w.tokens_timed, mc.id, mr.id, w.us, w.floor_us," \
    " w.default_us, w.us_low, w.us_high, w.regret, w.predicted, w.selection_key, w.timing_policy, w.objective, w.made_at, w.floor_copy_us, w.floor_tensor_us" \
    " FROM src.winner w JOIN src.candidate c ON c.id=w.candidate_id" SQL_SHIP_CANDIDATE_KEYS SQL_SHIP_CANDIDATE_ROW \
    " JOIN src.run r ON r.id=w.run_id JOIN main.run mr ON mr.uid=r.uid")                                          \
  X(SQL_COUNT_SRC_WINNERS, "SELECT count(*) FROM src.winner")                                                     \
  X(SQL_WRITE_FILE, "VACUUM main INTO ?1")                                                                              \
  X(SQL_ATTACH_SRC, "ATTACH ?1 AS src")

/* From candidate c of src to the matching shape, device, artifact of main; and to the candidate itself. */
#define SQL_SHIP_CANDIDATE_KEYS                                                                                   \
  " JOIN src.shape s ON s.id=c.shape_id JOIN main.shape ms ON ms.key=s.key"                                       \
  " JOIN src.device d ON d.id=c.device_id JOIN main.device md ON md.key=d.key"                                    \
  " JOIN src.artifact a ON a.id=c.artifact_id JOIN main.artifact ma ON ma.compile_key=a.compile_key"
#define SQL_SHIP_CANDIDATE_ROW                                                                                    \
  " JOIN main.candidate mc ON mc.shape_id=ms.id AND mc.device_id=md.id AND mc.schedule=c.schedule"                \
  " AND mc.family_version=c.family_version AND mc.artifact_id=ma.id AND mc.recipe_sha256=c.recipe_sha256"

/* What no winner needs, children first. */
#define STORE_PRUNE                                                                                               \
  "DELETE FROM main.sample; DELETE FROM main.timing; DELETE FROM main.reject;"                                    \
  "DELETE FROM main.check_result WHERE candidate_id NOT IN (SELECT candidate_id FROM main.winner);"               \
  "DELETE FROM main.candidate WHERE id NOT IN (SELECT candidate_id FROM main.winner);"                            \
  "DELETE FROM main.artifact WHERE id NOT IN (SELECT artifact_id FROM main.candidate);"                           \
  "DELETE FROM main.run_device WHERE device_id NOT IN (SELECT device_id FROM main.winner)"                        \
  " OR (run_id NOT IN (SELECT run_id FROM main.winner) AND run_id NOT IN (SELECT run_id FROM main.check_result)"  \
  " AND run_id IS NOT " SQL_LATEST_RUN("main", "run_device.device_id") ");"                                       \
  "DELETE FROM main.run WHERE id NOT IN (SELECT run_id FROM main.winner)"                                         \
  " AND id NOT IN (SELECT run_id FROM main.check_result) AND id NOT IN (SELECT run_id FROM main.run_device);"     \
  "DELETE FROM main.shape_name WHERE shape_id NOT IN (SELECT shape_id FROM main.winner);"                         \
  "DELETE FROM main.shape WHERE id NOT IN (SELECT shape_id FROM main.winner);"                                    \
  "DELETE FROM main.device WHERE id NOT IN (SELECT device_id FROM main.winner);"

#endif
