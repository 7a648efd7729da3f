/* commands.h - the commands of the tool; main.c parses the command line and calls one of these. Results go to stdout, progress and errors to
 * stderr. Each returns the status that decides the exit code, with *err filled in on failure. */
#ifndef MOEFORGE_TUNER_COMMANDS_H
#define MOEFORGE_TUNER_COMMANDS_H

#include "error.h"
#include "options.h"

enum mf_status tune_command(const struct options *opt, const char *const *specs, int nspecs, struct error *err);     /* tune.c */
enum mf_status plan_command(const struct options *opt, const char *const *specs, int nspecs, struct error *err);     /* plan.c */
enum mf_status show_command(const struct options *opt, const char *shape_name, bool rejects, struct error *err);     /* report.c */
enum mf_status export_command(const struct options *opt, const char *shape_name, struct error *err);                 /* package.c */
enum mf_status verify_command(const struct options *opt, const char *package_path, struct error *err);               /* verify.c */
enum mf_status sign_command(const struct options *opt, const char *package_path, struct error *err);                 /* sign.c */
enum mf_status qualify_command(const struct options *opt, const char *package_path, struct error *err);              /* qualify.c */
enum mf_status bench_command(const struct options *opt, const char *const *shape_names, int count, struct error *err); /* bench.c: winners against the floor */
enum mf_status doctor_command(const struct options *opt, struct error *err);                                         /* doctor.c */
enum mf_status fuzz_command(const struct options *given, const char *spec, struct error *err);                        /* fuzz.c */
enum mf_status trace_command(const struct options *opt, const char *what, struct error *err);                         /* trace.c */
enum mf_status import_command(const struct options *opt, const char *config, int tp, int tp_rank, int ep, int ep_rank, const char *name, struct error *err);

#endif
