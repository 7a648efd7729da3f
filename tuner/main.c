/* main.c - the command line: parses it, fills in struct options, calls one command, turns its status into the exit code.
 *
 * Options may stand before or after the command's operands. Every default is in default_options(). Nothing here knows what a kernel is. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "faults.h"
#include "progress.h"
#include "spec.h"
#include "worker.h"

#define MOEFORGE_VERSION "0.1.0"
#define MAX_OPERANDS 256 /* with the command */

static const char usage_text[] =
    "usage: moeforge COMMAND [OPTIONS] [OPERANDS]\n"
    "\n"
    "  spec import CONFIG.json [--name NAME] [--tp N] [--ep N] -o SPEC.yaml   a Hugging Face config becomes a model spec\n"
    "  spec check SPEC.yaml...                                  reads specs and says what is wrong with them\n"
    "  plan SPEC.yaml...                                        dry run: candidates, rejections by rule, memory, time\n"
    "  tune SPEC.yaml...                                        emit, compile, filter, check, time, store\n"
    "  show [SHAPE]                                             the winners (--rejects: what was dropped, and why)\n"
    "  bench SHAPE...                                           times the winners again, on other routing seeds\n"
    "  export SHAPE -o FILE                                     one package file for the serving team\n"
    "  verify FILE                                              checks a package's numbers on this machine\n"
    "  qualify FILE --baseline JSON [--spec SPEC.yaml]          a package against measurements of what it would replace, by the spec's limits\n"
    "  sign FILE --key PRIVATE                                  a package's Ed25519 signature, FILE.sig (verify FILE --key PUBLIC checks it)\n"
    "  trace SHAPE|SPEC.yaml [-o FILE.svg]                      where the time of a launch goes, CTA by CTA\n"
    "  fuzz SPEC.yaml                                           random inputs and interleavings on the emulated device\n"
    "  doctor                                                   what this machine has and what is missing\n"
    "  version, help\n"
    "\n"
    "  -o FILE               output\n"
    "  --device NAME         auto (default), none, cuda, cuda:N, or a device spec to plan for (h100-pcie); tune: also emu, emu:SPEC,\n"
    "                        which checks the numbers on an emulated GPU (needs a C++ compiler) and predicts the times\n"
    "  --tokens LIST         token counts, e.g. 1-8 or 1,2,4: instead of the spec's; bench: instead of all that winners serve\n"
    "  --schedule LIST       tune: the only schedules to try, comma-separated; bench: those to time beside the winners; fuzz, trace: the one to run\n"
    "                        (default: the default)\n"
    "  --behind              bench: behind another kernel, with and without programmatic dependent launch\n"
    "  --routing LIST        uniform, zipf, dispersed, concentrated: bench: those to time (default: all four); trace: one (default: uniform)\n"
    "  --launches N          trace: how many launches are traced, at most 8\n"
    "  --soak N              verify: N more launches of each entry, all with the same result (a race may show once in thousands)\n"
    "  --seeds N             fuzz: how many (default 100)\n"
    "  --seed N              fuzz: the first (default 1); trace: of the inputs\n"
    "  --effort LEVEL        quick, default, exhaustive\n"
    "  --jobs N              compile workers; fuzz: workers (default: the number of cores)\n"
    "  --check-jobs N        check workers (default: a quarter of the cores, at most 4; emulated: all cores)\n"
    "  --store FILE          work store (default: " DEFAULT_STORE_PATH ")\n"
    "  --db FILE             shipped schedules (default: schedules.db)\n"
    "  --templates DIR       kernel templates (default: beside the program, or ./templates)\n"
    "  --gen DIR             where emitted kernels are written (default: gen)\n"
    "  --devices DIR         device specs (default: beside the templates, specs/devices)\n"
    "  --timeout-ms N        limit of one kernel launch in checks, and of one replay in bench --behind (default 2000; emulated: 300000)\n"
    "  --baseline FILE       qualify: the measurements (docs/qualify.md)\n"
    "  --spec FILE           qualify: the spec whose limits count (default: specs/models/SHAPE.yaml)\n"
    "  --key FILE            sign: private key; verify: public key, the signature must match (PEM)\n"
    "  --signature FILE      verify: the signature (default: the package's name with .sig)\n"
    "  --retime              measure again what earlier runs have measured\n"
    "  --allow-predicted     export: winners that were only predicted\n"
    "  --debug               tune: kernels with the watchdog, checked but not timed\n"
    "  --line-info           tune: kernels with line information, for compute-sanitizer; not for serving, and into a --store of their own\n"
    "  --synccheck           tune: the same, with barriers as compute-sanitizer's synccheck wants them\n"
    "  --json                results as JSON\n"
    "  --quiet               no progress\n"
    "\n"
    "Exit codes: 0 done, 2 wrong command line, 3 bad spec or config, 4 not supported or rejected, 5 file error, 6 database, 7 no CUDA or C++ compiler,\n"
    "8 no GPU, 9 GPU failure, 10 compile error, 11 wrong numbers (fuzz: findings), 12 timeout, 13 worker died, 14 not found,\n"
    "15 out of memory (of the GPU, too), 20-27 package errors, 70 internal error, 130 interrupted.\n";

/* What the parser collects beyond struct options. */
struct command_line {
  struct options opt;
  const char *operand[MAX_OPERANDS];
  int noperands;
  const char *instead;   /* "help" or "version" if an option asks for it, whatever the command; NULL */
  int tp, tp_rank, ep, ep_rank;
  const char *name;
  bool rejects;
  char template_dir[1024], device_dir[1024], emu_dir[1024], program[1024];
};

enum option_code {
  OPT_DEVICE = 256, OPT_TOKENS, OPT_EFFORT, OPT_JOBS, OPT_CHECK_JOBS, OPT_STORE, OPT_DB, OPT_TEMPLATES, OPT_GEN, OPT_DEVICES, OPT_TIMEOUT, OPT_RETIME,
  OPT_DEBUG, OPT_JSON, OPT_QUIET, OPT_TP, OPT_TP_RANK, OPT_EP, OPT_EP_RANK, OPT_NAME, OPT_REJECTS, OPT_PREDICTED, OPT_SCHEDULE, OPT_SEEDS, OPT_SEED, OPT_KEY, OPT_SIGNATURE, OPT_BASELINE, OPT_SPEC,
  OPT_ROUTING, OPT_LAUNCHES, OPT_BEHIND, OPT_LINE_INFO, OPT_SYNCCHECK, OPT_SOAK
};

static const struct option long_options[] = {
    {"output", required_argument, NULL, 'o'},           {"device", required_argument, NULL, OPT_DEVICE},
    {"tokens", required_argument, NULL, OPT_TOKENS},    {"effort", required_argument, NULL, OPT_EFFORT},
    {"jobs", required_argument, NULL, OPT_JOBS},        {"check-jobs", required_argument, NULL, OPT_CHECK_JOBS},
    {"store", required_argument, NULL, OPT_STORE},      {"db", required_argument, NULL, OPT_DB},
    {"templates", required_argument, NULL, OPT_TEMPLATES}, {"gen", required_argument, NULL, OPT_GEN},
    {"devices", required_argument, NULL, OPT_DEVICES},  {"timeout-ms", required_argument, NULL, OPT_TIMEOUT},
    {"retime", no_argument, NULL, OPT_RETIME},          {"debug", no_argument, NULL, OPT_DEBUG},
    {"json", no_argument, NULL, OPT_JSON},              {"quiet", no_argument, NULL, OPT_QUIET},
    {"tp", required_argument, NULL, OPT_TP},            {"tp-rank", required_argument, NULL, OPT_TP_RANK},
    {"ep", required_argument, NULL, OPT_EP},            {"ep-rank", required_argument, NULL, OPT_EP_RANK},
    {"name", required_argument, NULL, OPT_NAME},        {"rejects", no_argument, NULL, OPT_REJECTS},
    {"allow-predicted", no_argument, NULL, OPT_PREDICTED}, {"help", no_argument, NULL, 'h'},
    {"seeds", required_argument, NULL, OPT_SEEDS},      {"seed", required_argument, NULL, OPT_SEED},
    {"baseline", required_argument, NULL, OPT_BASELINE}, {"spec", required_argument, NULL, OPT_SPEC},
    {"key", required_argument, NULL, OPT_KEY},          {"signature", required_argument, NULL, OPT_SIGNATURE},
    {"schedule", required_argument, NULL, OPT_SCHEDULE},   {"version", no_argument, NULL, 'V'},
    {"routing", required_argument, NULL, OPT_ROUTING},  {"launches", required_argument, NULL, OPT_LAUNCHES},
    {"soak", required_argument, NULL, OPT_SOAK},        {"behind", no_argument, NULL, OPT_BEHIND},
    {"line-info", no_argument, NULL, OPT_LINE_INFO},    {"synccheck", no_argument, NULL, OPT_SYNCCHECK},
    {NULL, 0, NULL, 0},
};

static bool is_there(const char *path)
{
  return access(path, F_OK) == 0;
}

/* The first of <program's folder>/<relative>, its parent's, the working folder's that exists; else the last. */
static void find_beside(const char *program, const char *relative, char *out, size_t space)
{
  const char *slash = strrchr(program, '/');
  const int length = slash != NULL ? (int)(slash - program) : 0;
  snprintf(out, space, "%.*s/%s", length, program, relative);
  if(is_there(out))
    return;
  snprintf(out, space, "%.*s/../%s", length, program, relative);
  if(is_there(out))
    return;
  snprintf(out, space, "%.*s/../share/moeforge/%s", length, program, relative);
  if(!is_there(out))
    snprintf(out, space, "%s", relative);
}

static void default_options(struct command_line *cl)
{
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  struct options *opt = &cl->opt;
  memset(cl, 0, sizeof(*cl));
  const ssize_t n = readlink("/proc/self/exe", cl->program, sizeof(cl->program) - 1);
  cl->program[n > 0 ? n : 0] = '\0';
  find_beside(cl->program, "templates", cl->template_dir, sizeof(cl->template_dir));
  find_beside(cl->program, "specs/devices", cl->device_dir, sizeof(cl->device_dir));
  find_beside(cl->program, "emu/hw_host.h", cl->emu_dir, sizeof(cl->emu_dir)); /* the folder of objects beside the program is called emu, too */
  *strrchr(cl->emu_dir, '/') = '\0';
  opt->program = cl->program;
  opt->template_dir = cl->template_dir;
  opt->device_dir = cl->device_dir;
  opt->emu_dir = cl->emu_dir;
  opt->cxx = getenv("MOEFORGE_CXX");
  if(opt->cxx == NULL || opt->cxx[0] == '\0')
    opt->cxx = "c++";
  opt->gen_dir = "gen";
  opt->store_path = DEFAULT_STORE_PATH;
  opt->shipped_path = "schedules.db";
  opt->device = "auto";
  opt->effort = EFFORT_DEFAULT;
  opt->jobs = cores > 0 ? (int)cores : 1;
  opt->check_jobs = cores >= 16 ? 4 : cores >= 4 ? (int)cores / 4 : 1;
  opt->emulation_jobs = opt->jobs;
  opt->seeds = 100;
  opt->first_seed = 1;
  opt->timeout_ms = 2000;
  opt->emulation_timeout_ms = 300000;
  cl->tp = cl->ep = 1;
}

static enum mf_status parse_int(const char *option, const char *text, int low, int high, int *out, struct error *err)
{
  char *end;
  const long value = strtol(text, &end, 10);
  if(*text == '\0' || *end != '\0' || value < low || value > high)
    return error_set(err, MF_ERR_USAGE, "--%s: expected a whole number from %d to %d, got \"%s\"", option, low, high, text);
  *out = (int)value;
  return MF_OK;
}

/* One value for both kinds of device. */
static enum mf_status parse_both(const char *option, const char *text, int high, int *gpu, int *emulated, struct error *err)
{
  const enum mf_status rc = parse_int(option, text, 1, high, gpu, err);
  if(rc == MF_OK)
    *emulated = *gpu;
  return rc;
}

static enum mf_status parse_routings(const char *list, struct options *opt, struct error *err)
{
  char text[128], *rest = text, *name;
  snprintf(text, sizeof(text), "%s", list);
  opt->nroutings = 0;
  while((name = strsep(&rest, ",")) != NULL) {
    const enum routing_kind kind = routing_from_name(name);
    if(kind == ROUTING_KINDS || opt->nroutings == ROUTING_KINDS)
      return error_set(err, MF_ERR_USAGE, "--routing: expected uniform, zipf, dispersed or concentrated, got \"%s\"", list);
    opt->routings[opt->nroutings++] = kind;
  }
  return MF_OK;
}

static enum mf_status take_option(struct command_line *cl, int code, const char *value, struct error *err)
{
  struct options *opt = &cl->opt;
  switch(code) {
    case 'o': opt->output = value; return MF_OK;
    case OPT_DEVICE: opt->device = value; return MF_OK;
    case OPT_BASELINE: opt->baseline = value; return MF_OK;
    case OPT_SPEC: opt->spec = value; return MF_OK;
    case OPT_KEY: opt->key = value; return MF_OK;
    case OPT_SIGNATURE: opt->signature = value; return MF_OK;
    case OPT_SCHEDULE: opt->schedules = value; return MF_OK;
    case OPT_TOKENS: opt->tokens = value; return MF_OK;
    case OPT_EFFORT: return effort_from_name(value, &opt->effort, err);
    case OPT_JOBS: return parse_int("jobs", value, 1, 256, &opt->jobs, err);
    case OPT_CHECK_JOBS: return parse_both("check-jobs", value, 32, &opt->check_jobs, &opt->emulation_jobs, err);
    case OPT_STORE: opt->store_path = value; return MF_OK;
    case OPT_DB: opt->shipped_path = value; return MF_OK;
    case OPT_TEMPLATES: opt->template_dir = opt->templates_given = value; return MF_OK;
    case OPT_GEN: opt->gen_dir = value; return MF_OK;
    case OPT_DEVICES: opt->device_dir = value; return MF_OK;
    case OPT_TIMEOUT: return parse_both("timeout-ms", value, 600000, &opt->timeout_ms, &opt->emulation_timeout_ms, err);
    case OPT_SEEDS: return parse_int("seeds", value, 1, 1000000, &opt->seeds, err);
    case OPT_SEED: return parse_int("seed", value, 0, INT_MAX - 1000000, &opt->first_seed, err);
    case OPT_ROUTING: return parse_routings(value, opt, err);
    case OPT_LAUNCHES: return parse_int("launches", value, 1, 8, &opt->launches, err);
    case OPT_SOAK: return parse_int("soak", value, 1, 100000000, &opt->soak, err);
    case OPT_BEHIND: opt->behind = true; return MF_OK;
    case OPT_RETIME: opt->retime = true; return MF_OK;
    case OPT_DEBUG: opt->build = COMPILE_DEBUG; return MF_OK;
    case OPT_LINE_INFO: opt->build = COMPILE_LINE_INFO; return MF_OK;
    case OPT_SYNCCHECK: opt->build = COMPILE_SYNCCHECK; return MF_OK;
    case OPT_JSON: opt->json = true; return MF_OK;
    case OPT_QUIET: opt->quiet = true; return MF_OK;
    case OPT_TP: return parse_int("tp", value, 1, 64, &cl->tp, err);
    case OPT_TP_RANK: return parse_int("tp-rank", value, 0, 63, &cl->tp_rank, err);
    case OPT_EP: return parse_int("ep", value, 1, 1024, &cl->ep, err);
    case OPT_EP_RANK: return parse_int("ep-rank", value, 0, 1023, &cl->ep_rank, err);
    case OPT_NAME: cl->name = value; return MF_OK;
    case OPT_REJECTS: cl->rejects = true; return MF_OK;
    case OPT_PREDICTED: opt->allow_predicted = true; return MF_OK;
    default: return error_set(err, MF_ERR_USAGE, "unknown or incomplete option (see `moeforge help`)");
  }
}

static enum mf_status take_operand(struct command_line *cl, const char *text, struct error *err)
{
  if(cl->noperands == MAX_OPERANDS)
    return error_set(err, MF_ERR_USAGE, "expected at most %d operands behind the command, got more", MAX_OPERANDS - 1);
  cl->operand[cl->noperands++] = text;
  return MF_OK;
}

/* What getopt_long() objects to: the word as it was typed, and what was probably meant. */
static enum mf_status bad_option(int code, const char *word, struct error *err)
{
  const char letter[] = {'-', (char)optopt, '\0'};
  char names[512] = "", near[32];
  size_t length = 0;
  if(code == ':')
    return error_set(err, MF_ERR_USAGE, "%s: expected a value behind it (see `moeforge help`)", word);
  if(optopt > ' ' && optopt < 0x7f && strchr("ohV", optopt) == NULL)
    return error_set(err, MF_ERR_USAGE, "unknown option \"%s\" (see `moeforge help`)", letter);
  for(const struct option *o = long_options; o->name != NULL && length < sizeof(names); o++)
    length += (size_t)snprintf(names + length, sizeof(names) - length, "%s%s", length > 0 ? "|" : "", o->name);
  if(optopt != 0)
    return error_set(err, MF_ERR_USAGE, "%s: this option takes no value (see `moeforge help`)", word);
  if(strncmp(word, "--", 2) == 0 && nearest_name(word + 2, names, near, sizeof(near)) != NULL)
    return error_set(err, MF_ERR_USAGE, "unknown option \"%s\", did you mean --%s? (see `moeforge help`)", word, near);
  return error_set(err, MF_ERR_USAGE, "unknown or ambiguous option \"%s\" (see `moeforge help`)", word);
}

static enum mf_status parse_command_line(struct command_line *cl, int argc, char **argv, struct error *err)
{
  enum mf_status rc = MF_OK;
  int code;
  opterr = 0;
  while(rc == MF_OK && (code = getopt_long(argc, argv, "-:o:hV", long_options, NULL)) != -1) {
    if(code == 'h' || code == 'V')
      cl->instead = code == 'h' ? "help" : "version";
    else if(code == '?' || code == ':')
      rc = bad_option(code, argv[optind - 1], err);
    else
      rc = code == 1 ? take_operand(cl, optarg, err) : take_option(cl, code, optarg, err);
  }
  for(; rc == MF_OK && optind < argc; optind++)
    rc = take_operand(cl, argv[optind], err);
  return rc;
}

static void print_line(void *context, const char *line)
{
  (void)context;
  fprintf(stderr, "moeforge: %s\n", line);
}

static enum mf_status spec_check_command(const char *const *paths, int count, struct error *err)
{
  enum mf_status worst = MF_OK;
  for(int i = 0; i < count; i++) {
    struct fault_lines lines = {.say = print_line};
    struct model_spec spec;
    struct error one;
    enum mf_status rc = spec_read(paths[i], &spec, fault_lines_take, &lines, &one);
    fault_lines_end(&lines, paths[i], &one);
    if(rc == MF_OK)
      printf("%s: %s, E=%d top-%d N=%d K=%d, ok\n", paths[i], spec.name, spec.problem.experts, spec.problem.top_k, spec.problem.intermediate,
             spec.problem.hidden);
    else if(worst == MF_OK)
      worst = error_set(err, rc, "%s", one.text);
    else
      print_line(NULL, one.text);
  }
  return worst;
}

static enum mf_status spec_command(const struct command_line *cl, struct error *err)
{
  const char *what = cl->noperands > 1 ? cl->operand[1] : "";
  if(strcmp(what, "check") == 0 && cl->noperands > 2)
    return spec_check_command(cl->operand + 2, cl->noperands - 2, err);
  if(strcmp(what, "import") == 0 && cl->noperands == 3)
    return import_command(&cl->opt, cl->operand[2], cl->tp, cl->tp_rank, cl->ep, cl->ep_rank, cl->name, err);
  return error_set(err, MF_ERR_USAGE, "expected `moeforge spec import CONFIG.json [--tp N] [-o FILE]` or `moeforge spec check SPEC.yaml...`");
}

/* A command that takes 'least' to 'most' operands behind its name. */
static enum mf_status expect_operands(const struct command_line *cl, int least, int most, const char *what, struct error *err)
{
  const int n = cl->noperands - 1;
  if(n >= least && n <= most)
    return MF_OK;
  return error_set(err, MF_ERR_USAGE, "%s: expected %s (see `moeforge help`)", cl->operand[0], what);
}

static enum mf_status run_command(const struct command_line *cl, struct error *err)
{
  const char *name = cl->instead != NULL ? cl->instead : cl->noperands > 0 ? cl->operand[0] : "";
  const char *const *rest = cl->operand + 1;
  const int nrest = cl->noperands - 1;
  enum mf_status rc;
  if(strcmp(name, "help") == 0) {
    fputs(usage_text, stdout); /* whether it was written is seen at the end, in flush_results() */
    return MF_OK;
  }
  if(strcmp(name, "version") == 0)
    return puts("moeforge " MOEFORGE_VERSION) >= 0 ? MF_OK : MF_ERR_IO;
  if(strcmp(name, "spec") == 0)
    return spec_command(cl, err);
  if(strcmp(name, "doctor") == 0) {
    rc = expect_operands(cl, 0, 0, "no operands", err);
    return rc != MF_OK ? rc : doctor_command(&cl->opt, err);
  }
  if(strcmp(name, "show") == 0) {
    rc = expect_operands(cl, 0, 1, "at most one shape", err);
    return rc != MF_OK ? rc : show_command(&cl->opt, nrest > 0 ? rest[0] : NULL, cl->rejects, err);
  }
  if(strcmp(name, "plan") == 0 || strcmp(name, "tune") == 0) {
    rc = expect_operands(cl, 1, 255, "one or more spec files", err);
    return rc != MF_OK ? rc : name[0] == 'p' ? plan_command(&cl->opt, rest, nrest, err) : tune_command(&cl->opt, rest, nrest, err);
  }
  if(strcmp(name, "bench") == 0) {
    rc = expect_operands(cl, 1, 255, "one or more shapes", err);
    return rc != MF_OK ? rc : bench_command(&cl->opt, rest, nrest, err);
  }
  if(strcmp(name, "trace") == 0) {
    rc = expect_operands(cl, 1, 1, "one shape or spec file", err);
    return rc != MF_OK ? rc : trace_command(&cl->opt, rest[0], err);
  }
  if(strcmp(name, "fuzz") == 0) {
    rc = expect_operands(cl, 1, 1, "one spec file", err);
    return rc != MF_OK ? rc : fuzz_command(&cl->opt, rest[0], err);
  }
  if(strcmp(name, "sign") == 0 || strcmp(name, "qualify") == 0) {
    rc = expect_operands(cl, 1, 1, "one package file", err);
    return rc != MF_OK ? rc : name[0] == 's' ? sign_command(&cl->opt, rest[0], err) : qualify_command(&cl->opt, rest[0], err);
  }
  if(strcmp(name, "export") == 0 || strcmp(name, "verify") == 0) {
    rc = expect_operands(cl, 1, 1, name[0] == 'e' ? "one shape" : "one package file", err);
    return rc != MF_OK ? rc : name[0] == 'e' ? export_command(&cl->opt, rest[0], err) : verify_command(&cl->opt, rest[0], err);
  }
  return error_set(err, MF_ERR_USAGE, "%s%s%s (see `moeforge help`)", name[0] != '\0' ? "unknown command \"" : "no command given", name,
                   name[0] != '\0' ? "\"" : "");
}

/* `moeforge --worker ROLE FD`: this process is a child of worker_start(). */
static int run_worker(const char *role, int fd)
{
  if(strcmp(role, "compile") == 0)
    return worker_main_compile(fd);
  if(strcmp(role, "device") == 0)
    return worker_main_device(fd);
  fprintf(stderr, "moeforge: unknown worker role \"%s\"\n", role);
  return error_exit_code(MF_ERR_USAGE);
}

/* A standard stream that is closed would be the number of the next file that is opened, and messages would end up in that. */
static void keep_standard_streams(void)
{
  int fd;
  do
    fd = open("/dev/null", O_RDONLY);
  while(fd >= 0 && fd <= STDERR_FILENO);
  if(fd >= 0)
    close(fd);
}

/* Results that did not reach their reader are an error like any other file's. */
static enum mf_status flush_results(struct error *err)
{
  const bool lost = ferror(stdout) != 0;
  if(fflush(stdout) != 0)
    return error_errno(err, MF_ERR_IO, errno, "standard output: cannot be written");
  return lost ? error_set(err, MF_ERR_IO, "standard output: some of the results could not be written") : MF_OK;
}

int main(int argc, char **argv)
{
  struct command_line cl;
  struct error err = {MF_OK, ""}, unwritten;
  enum mf_status rc;
  if(argc == 4 && strcmp(argv[1], "--worker") == 0)
    return run_worker(argv[2], atoi(argv[3]));
  keep_standard_streams();
  default_options(&cl);
  rc = parse_command_line(&cl, argc, argv, &err);
  if(rc == MF_OK) {
    interrupt_install();
    signal(SIGXFSZ, SIG_IGN); /* a file size limit shall be an error message, not a death */
    signal(SIGPIPE, SIG_IGN); /* a reader that has gone as well: `moeforge tune ... | head` must not end a tuning */
    rc = run_command(&cl, &err);
  }
  if(flush_results(&unwritten) != MF_OK && rc == MF_OK)
    rc = error_set(&err, unwritten.status, "%s", unwritten.text);
  if(rc != MF_OK)
    fprintf(stderr, "moeforge: %s\n", err.text[0] != '\0' ? err.text : mf_status_string(rc));
  return error_exit_code(rc);
}
