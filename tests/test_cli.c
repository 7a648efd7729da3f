/* test_cli.c - the tool and what it is given: whatever is wrong with a command line or a file, there is one clear line on standard error and the documented exit
 * code, and nothing that was there before is lost. What goes right is tested by test_tune.c; GPUs and processes by test_cli_gpu.c. */
#include "cli_fixture.h"

/* ---- command lines ---- */
static const struct {
  const char *words, *text;
} usage[] = {
    {"", "no command given"},
    {"frobnicate", "unknown command \"frobnicate\""},
    {"tune", "expected one or more spec files"},
    {"show a b", "at most one shape"},
    {"export tiny", "name the file with -o"},
    {"export tiny -o", "-o: expected a value"},
    {"tune x.yaml --tokens", "--tokens: expected a value"},
    {"tune x.yaml --tokns 1", "did you mean --tokens?"},
    {"tune x.yaml -xyz", "unknown option \"-x\""},
    {"show --json=1", "takes no value"},
    {"show --j", "ambiguous"},
    {"tune x.yaml --jobs 0", "--jobs: expected a whole number from 1 to 256"},
    {"tune x.yaml --jobs 99999999999999999999", "--jobs: expected a whole number"},
    {"tune x.yaml --check-jobs -1", "--check-jobs: expected"},
    {"tune x.yaml --timeout-ms=", "--timeout-ms: expected"},
    {"tune x.yaml --effort fast", "quick, default or exhaustive"},
    {"plan specs/models/tiny.yaml --tokens 0", "--tokens: expected counts from 1 to 64"},
    {"plan specs/models/tiny.yaml --tokens 1,,2", "--tokens: expected"},
    {"plan specs/models/tiny.yaml --device rtx", "--device rtx: expected auto, none, cuda"},
    {"plan specs/models/tiny.yaml --device cuda:x", "--device cuda:x: expected"},
    {"verify p.moeforge --device rtx", "verify: --device rtx: expected"},
    {"verify p.moeforge --signature x", "--signature needs the public key"},
    {"sign p.moeforge", "name the private key with --key"},
    {"sign", "sign: expected one package file"},
    {"qualify p.moeforge", "--baseline FILE"},
    {"sign p.moeforge --key k --signature s", "name the file of the signature with -o"},
    {"qualify p.moeforge q.moeforge", "qualify: expected one package file"},
    {"spec frob", "expected `moeforge spec import"},
};

START_TEST(wrong_command_lines)
{
  tool_run(&tool, "%s", usage[_i].words);
  ended(2, usage[_i].text);
}
END_TEST

START_TEST(long_command_lines)
{
  char tokens[1200] = "", operands[2000] = "";
  for(int i = 0; i < 500; i++)
    strcat(tokens, "1,");
  tool_run(&tool, "plan specs/models/tiny.yaml --json --tokens %s8", tokens);
  tool_expect(&tool, 0);
  tool_says(&tool, out, "\"tokens\": 8"); /* nothing is cut off */
  for(int i = 0; i < 300; i++)
    strcat(operands, " x");
  shell("'%s' show -- %s 2>err; test $? = 2 && grep -q 'at most 255 operands' err", tool.program, operands);
  tool_run(&tool, "tune a\nb.yaml");
  refused(5, "a b.yaml: cannot read it");
}
END_TEST

START_TEST(help_is_given_to_any_command)
{
  static const char *const words[] = {"help", "--help", "tune --help", "tune specs/models/tiny.yaml -h"};
  for(size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
    tool_run(&tool, "%s", words[i]);
    tool_expect(&tool, 0);
    tool_says(&tool, out, "usage: moeforge");
  }
}
END_TEST

START_TEST(results_that_nobody_can_read)
{
  static const char *const commands[] = {"help", "show --store=work.db", "plan '%s'/specs/models/tiny.yaml --device none --json"};
  char root[4096], command[4400];
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
  for(size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
    snprintf(command, sizeof(command), commands[i], root);
    shell("'%s' --devices '%s/specs/devices' %s >/dev/full 2>err; test $? = 5 && grep -q 'standard output: ' err", tool.program, root, command);
    shell("'%s' --devices '%s/specs/devices' %s >&- 2>err; test $? = 5 && grep -q 'standard output: ' err", tool.program, root, command);
  }
  shell("{ sleep 0.2; '%s' help; echo $? >code; } 2>err | true; test `cat code` = 5", tool.program); /* not killed by SIGPIPE */
}
END_TEST

/* ---- specs ---- */
static const struct {
  const char *edit, *text; /* of sed */
} bad_specs[] = {
    {"s/experts: 64/experts: sixty/", ":5: shape.experts: expected an integer from 1 to 1024, got sixty"},
    {"s/top_k: 2/top_k: 65/", ":6: shape.top_k: expected an integer from 1 to 22, got 65 (nearest legal value 22)"},
    {"s/softmax/softmx/", ":10: router.score: expected one of softmax"},
    {"s/^name:.*/name: ..\\/x/", ":2: name: expected a name"},
    {"/^name:/d", "name: expected a name"},
    {"s/experts/\\texperts/", ":5: expected YAML, got a syntax error"},
    {"$a extra: 1", ":13: extra: unknown key"},
    {"1,$d", "got an empty file"},
};

START_TEST(bad_yaml)
{
  char root[4096];
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
  shell("sed '%s' '%s/specs/models/tiny.yaml' > s.yaml; cp work.db before", bad_specs[_i].edit, root);
  tool_run(&tool, "tune %s/s.yaml", tool.folder);
  refused(3, bad_specs[_i].text);
  tool_run(&tool, "spec check %s/s.yaml", tool.folder);
  refused(3, bad_specs[_i].text);
  shell("cmp work.db before");
}
END_TEST

START_TEST(each_fault_is_said_once)
{
  char root[4096];
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
  shell("sed 's/experts: 64/experts: sixty/; s/top_k: 2/top_k: many/' '%s/specs/models/tiny.yaml' > two.yaml", root);
  tool_run(&tool, "tune specs/models/tiny.yaml %s/two.yaml %s/none.yaml --quiet", tool.folder, tool.folder);
  tool_expect(&tool, 3);
  tool_says(&tool, err, "got sixty");
  tool_says(&tool, err, "got many");
  tool_says(&tool, err, "two.yaml: 2 errors");
  tool_says(&tool, err, "none.yaml: cannot read it");
  ck_assert_int_eq(lines(tool.err), 4);
}
END_TEST

/* ---- databases ---- */
static const struct {
  const char *damage, *text;
} bad_stores[] = {
    {"truncate -s 0 work.db", "is empty (0 bytes)"},
    {"truncate -s 50 work.db", "is truncated"},
    {"truncate -s 70000 work.db", "is truncated"},
    {"echo hello >work.db", "not SQLite"},
    {"dd if=/dev/zero of=work.db bs=1 seek=68 count=4 conv=notrunc 2>dd", "database of another program"},
    {"printf '\\007' | dd of=work.db bs=1 seek=63 conv=notrunc 2>dd", "made by a newer moeforge (format 7"},
};

START_TEST(bad_work_store)
{
  static const char *const commands[] = {TUNE, "show", "show --rejects", "export tiny -o %s/x.moeforge"};
  shell("%s; cp work.db before", bad_stores[_i].damage);
  for(size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
    tool_run(&tool, commands[i], tool.folder);
    refused(6, bad_stores[_i].text);
  }
  shell("cmp work.db before; test ! -e x.moeforge -a ! -e work.db.lock -a ! -e work.db-wal");
}
END_TEST

static const struct {
  const char *damage, *option; /* option: format with the folder */
  int code;
  const char *text;
} bad_shipped[] = {
    {"cp work.db schedules.db", "", 6, "is a work store, not a shipped file"},
    {"echo hello >schedules.db", "", 6, "not SQLite"},
    {"truncate -s 70000 schedules.db", "", 6, "is truncated"},
    {"rm schedules.db; mkdir schedules.db", "", 5, "found a folder"},
    {"true", " --db=%s/work.db", 2, "is the work store itself"},
    {"true", " --db=%s/none/s.db", 5, "its folder cannot be opened"},
    {"cp schedules.db work.db", "", 6, "is a shipped file"},
};

/* Found before anything is compiled or measured, not when all is done. */
START_TEST(bad_shipped_file)
{
  char option[300];
  snprintf(option, sizeof(option), bad_shipped[_i].option, tool.folder);
  shell("%s; cp work.db before", bad_shipped[_i].damage);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, TUNE " --device cuda%s", option);
  refused(bad_shipped[_i].code, bad_shipped[_i].text);
  shell("cmp work.db before");
}
END_TEST

/* ---- places that cannot be written ---- */
START_TEST(read_only_folder)
{
  char place[300];
  snprintf(place, sizeof(place), "%s/small", tool.folder);
  if(mount_small("size=4m")) {
    shell("cp work.db schedules.db p.moeforge small");
    ck_assert_int_eq(mount("tmpfs", place, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
    tool_run(&tool, "show --store=%s/work.db", place);
    tool_expect(&tool, 0);
    tool_run(&tool, "export tiny -o %s/x.moeforge --store=%s/work.db", tool.folder, place);
    tool_expect(&tool, 0);
  } else {
    snprintf(place, sizeof(place), "/sys"); /* a folder in which nobody can make files */
  }
  tool_run(&tool, TUNE " --store=%s/work.db", place);
  refused(5, "/work.db: cannot be written");
  tool_run(&tool, TUNE " --db=%s/new.db", place);
  refused(5, "/new.db: cannot be written");
  tool_run(&tool, TUNE " --gen=%s/gen", place);
  ended(5, "/gen: cannot create the folder");
  tool_run(&tool, "export tiny -o %s/x.moeforge", place);
  refused(5, "/x.moeforge: cannot create a file");
  tool_run(&tool, "spec import tests/data/hf/deepseek-v3.1/config.json --tp 8 -o %s/x.yaml", place);
  refused(5, "/x.yaml: cannot write");
  umount2(place, MNT_DETACH);
}
END_TEST

/* A file that is to be written replaces nothing but a file, and no database. */
START_TEST(outputs_that_would_destroy)
{
  const struct {
    const char *name, *text;
  } targets[] = {{"work.db", "is a database, which would be lost"}, {"schedules.db", "is a database"}, {"pipe", "found a device or pipe"},
                 {"folder", "found a folder"}, {"none/x", "cannot"}};
  shell("mkfifo pipe; mkdir folder; cp work.db before; cp schedules.db before2");
  for(size_t i = 0; i < sizeof(targets) / sizeof(targets[0]); i++) {
    tool_run(&tool, "export tiny -o %s/%s", tool.folder, targets[i].name);
    refused(5, targets[i].text);
    tool_run(&tool, "spec import tests/data/hf/deepseek-v3.1/config.json --tp 8 -o %s/%s", tool.folder, targets[i].name);
    refused(5, targets[i].text);
  }
  tool_run(&tool, "export tiny -o ");
  refused(5, "expected the name of a file");
  shell("cmp work.db before; cmp schedules.db before2; test -p pipe -a -d folder; ln -s p.moeforge link; cp p.moeforge same");
  tool_run(&tool, "export tiny -o %s/link", tool.folder);
  tool_expect(&tool, 0);
  shell("test -L link && cmp p.moeforge same; test -z \"`ls | grep moeforge.`\"");
}
END_TEST

START_TEST(export_of_what_is_not_there)
{
  tool_run(&tool, "export nope -o %s/x", tool.folder);
  refused(14, "no winner is stored");
  tool_run(&tool, "export tiny -o %s/x --device Other", tool.folder);
  refused(14, "no winner for device \"Other\"");
  shell("rm schedules.db");
  forget_measurements();
  tool_run(&tool, TUNE " --device none");
  tool_expect(&tool, 0);
  tool_run(&tool, "export tiny -o %s/x", tool.folder);
  refused(4, "only predicted, not measured");
  shell("test ! -e x");
  tool_run(&tool, "export tiny -o %s/x --allow-predicted", tool.folder);
  tool_expect(&tool, 0);
}
END_TEST

/* ---- packages ---- */
static const struct {
  const char *damage;
  int code;
  const char *text;
} bad_packages[] = {
    {"rm p.moeforge", 5, "cannot open it"},
    {"rm p.moeforge; mkdir p.moeforge", 5, "not a regular file"},
    {"rm p.moeforge; mkfifo p.moeforge", 5, "not a regular file"},
    {": >p.moeforge", 20, "not a moeforge package"},
    {"cp work.db p.moeforge", 20, "not a moeforge package"},
    {"truncate -s 50 p.moeforge", 20, "is damaged"},
    {"truncate -s 30000 p.moeforge", 20, "truncated or appended to"},
    {"echo >>p.moeforge", 20, "truncated or appended to"},
    {"printf X | dd of=p.moeforge bs=1 seek=90 conv=notrunc 2>dd", 20, "SHA-256 differs"},
    {"printf X | dd of=p.moeforge bs=1 seek=600 conv=notrunc 2>dd", 20, "section manifest: SHA-256 differs"},
    {"printf X | dd of=p.moeforge bs=1 seek=30000 conv=notrunc 2>dd", 20, "section cubins: SHA-256 differs"},
    {"printf '\\003' | dd of=p.moeforge bs=1 seek=8 conv=notrunc 2>dd", 21, "format version 3"},
};

START_TEST(bad_package)
{
  shell("%s", bad_packages[_i].damage);
  tool_run(&tool, "verify %s/p.moeforge", tool.folder);
  refused(bad_packages[_i].code, bad_packages[_i].text);
  tool_gpu(&tool, "libfakegpu.so", GPU);
  tool_run(&tool, "verify %s/p.moeforge --json", tool.folder);
  refused(bad_packages[_i].code, bad_packages[_i].text);
}
END_TEST

/* From a tuned package to a release: qualified, signed, checked by whoever gets it. */
START_TEST(released_package)
{
  char here[4096];
  ck_assert_ptr_nonnull(getcwd(here, sizeof(here)));
  shell("(cat '%.1000s/specs/models/tiny.yaml'; printf '\\nlimits:\\n  min_speedup: 1.5\\n  max_error: 0.2\\n') >s.yaml", here);
  shell("printf '{\"format\": \"moeforge baseline\", \"version\": 1, \"name\": \"old\", \"device\": \"NVIDIA H200\", \"points\": [{\"shape\": \"tiny\", "
        "\"tokens\": 1, \"us\": [901, 900, 902, 903, 900, 901]}]}' >b.json");
  tool_run(&tool, "qualify %s/p.moeforge --baseline %s/b.json --spec %s/s.yaml", tool.folder, tool.folder, tool.folder);
  tool_expect(&tool, 0);
  tool_says(&tool, out, "qualified: 1 kept, 0 rejected, 0 not compared");
  tool_run(&tool, "verify %s/p.moeforge --device none", tool.folder);
  tool_expect(&tool, 8);
  tool_says(&tool, out, "hashes and structure sound, qualified");
  if(system("command -v openssl >/dev/null 2>&1") != 0)
    return; /* which makes the keys */
  shell("openssl genpkey -algorithm ed25519 -out a.key 2>log && openssl pkey -in a.key -pubout -out a.pub 2>log");
  tool_run(&tool, "sign %s/p.moeforge --key %s/a.key", tool.folder, tool.folder);
  tool_expect(&tool, 0);
  tool_run(&tool, "verify %s/p.moeforge --device none --key %s/a.pub", tool.folder, tool.folder);
  tool_expect(&tool, 8);
  tool_says(&tool, out, "signature good, qualified");
  tool_run(&tool, "qualify %s/p.moeforge --baseline %s/b.json --spec %s/s.yaml --json", tool.folder, tool.folder, tool.folder); /* equal record, equal bytes */
  tool_expect(&tool, 0);
  tool_run(&tool, "verify %s/p.moeforge --device none --key %s/a.pub", tool.folder, tool.folder);
  tool_expect(&tool, 8);
  shell("sed -i s/old/new/ b.json");
  tool_run(&tool, "qualify %s/p.moeforge --baseline %s/b.json --spec %s/s.yaml", tool.folder, tool.folder, tool.folder);
  tool_expect(&tool, 0);
  tool_run(&tool, "verify %s/p.moeforge --device none --key %s/a.pub", tool.folder, tool.folder);
  refused(20, "does not match");
}
END_TEST

/* ---- compiler and templates ---- */
START_TEST(compiler_that_is_missing_or_no_compiler)
{
  const char *const libraries[] = {"/nonexistent/libnvrtc.so", tool.program, "garbage.so"};
  shell("rm work.db; echo garbage >garbage.so");
  for(size_t i = 0; i < sizeof(libraries) / sizeof(libraries[0]); i++) {
    setenv("MOEFORGE_NVRTC", libraries[i], 1);
    tool_run(&tool, TUNE);
    refused(7, "name a libnvrtc.so of CUDA 12.3 or newer");
  }
  unsetenv("MOEFORGE_NVRTC");
}
END_TEST

static const struct {
  const char *damage;
  int code;
  const char *text;
} bad_templates[] = {
    {"rm t/hw/hw.cuh", 5, "hw/hw.cuh: no such file"},
    {"rm t/stream/up.cuh", 5, "stream/up.cuh: no such file"},
    {"rm t/stream/up.cuh; mkfifo t/stream/up.cuh", 5, "expected a regular file"},
    {"echo 'int x = ;' >>t/stream/up.cuh", 10, "stream/up.cuh("},
};

START_TEST(bad_template)
{
  char root[4096];
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
  forget_measurements();
  shell("cp -r '%s/templates' t; %s", root, bad_templates[_i].damage);
  tool_run(&tool, TUNE " --device none --templates %s/t", tool.folder);
  ended(bad_templates[_i].code, bad_templates[_i].text);
  if(bad_templates[_i].code != 10)
    return;
  ck_assert_int_gt((int)number("SELECT count(*) FROM reject WHERE stage='compile'"), 0);
  shell("sed 's/^name:.*/name: other/' '%s/specs/models/tiny.yaml' > other.yaml", root);
  tool_run(&tool, TUNE " %s/other.yaml --quiet --device none --templates %s/t", tool.folder, tool.folder);
  tool_expect(&tool, 10);
  tool_says(&tool, err, "moeforge: tiny: no candidate is left");
  tool_says(&tool, err, "moeforge: other: no candidate is left"); /* one spec's failure does not keep the others from being tuned */
  tool_run(&tool, TUNE " --device none"); /* repaired: nothing is held against the schedules any more */
  tool_expect(&tool, 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM reject WHERE stage='compile'"), 0);
}
END_TEST

int main(void)
{
  TCase *tc = tcase_create("files");
  tcase_add_loop_test(tc, wrong_command_lines, 0, ROWS(usage));
  tcase_add_test(tc, long_command_lines);
  tcase_add_test(tc, help_is_given_to_any_command);
  tcase_add_test(tc, results_that_nobody_can_read);
  tcase_add_loop_test(tc, bad_yaml, 0, ROWS(bad_specs));
  tcase_add_test(tc, each_fault_is_said_once);
  tcase_add_loop_test(tc, bad_work_store, 0, ROWS(bad_stores));
  tcase_add_loop_test(tc, bad_shipped_file, 0, ROWS(bad_shipped));
  tcase_add_test(tc, read_only_folder);
  tcase_add_test(tc, outputs_that_would_destroy);
  tcase_add_test(tc, export_of_what_is_not_there);
  tcase_add_loop_test(tc, bad_package, 0, ROWS(bad_packages));
  tcase_add_test(tc, released_package);
  tcase_add_test(tc, compiler_that_is_missing_or_no_compiler);
  tcase_add_loop_test(tc, bad_template, 0, ROWS(bad_templates));
  return run_suite(suite_create("cli"), tc);
}
