/* options.h - what the command line decided, for the commands. Filled in by main.c; read-only afterwards. */
#ifndef MOEFORGE_TUNER_OPTIONS_H
#define MOEFORGE_TUNER_OPTIONS_H

#include "compile.h"
#include "space.h"
#include "types.h"

#define DEFAULT_STORE_PATH "moeforge-work.db"

struct options {
  const char *program;       /* path of this executable */
  const char *template_dir;
  const char *templates_given; /* --templates, NULL */
  const char *gen_dir;
  const char *device_dir;    /* specs/devices */
  const char *store_path;    /* work store */
  const char *shipped_path;  /* schedules.db */
  const char *device;        /* "auto", "cuda", "cuda:N", "none", "emu", "emu:SPEC", or the name of a device spec (planned only) */
  const char *emu_dir;       /* headers of the emulated device */
  const char *cxx;           /* C++ compiler for it */
  const char *tokens;        /* "1-8" or "1,2,4": overrides the spec; NULL */
  const char *output;        /* -o */
  const char *key;           /* sign: private key file; verify: public key file; NULL */
  const char *signature;     /* verify: signature file; NULL: the package's name with .sig */
  const char *baseline;      /* qualify: measurements to compare with; NULL */
  const char *spec;          /* qualify: the spec whose limits count; NULL: specs/models/<shape>.yaml */
  const char *schedules;     /* --schedule: names, comma-separated: bench times them beside the winners, tune tries no others; NULL */
  bool behind;               /* bench: behind another kernel, with and without programmatic dependent launch */
  enum effort effort;
  int jobs;                  /* compile workers */
  int check_jobs;            /* concurrent check workers */
  int emulation_jobs;        /* the same on the emulated device */
  int seeds, first_seed;     /* fuzz; trace: the seed of the inputs */
  enum routing_kind routings[ROUTING_KINDS]; /* --routing: bench: those to time; trace: the first */
  int nroutings;             /* 0: not given */
  int launches;              /* trace: how many, 0: as many as is usual on the device */
  bool json;
  bool quiet;                /* no progress */
  bool retime;               /* ignore samples of earlier runs */
  bool allow_predicted;      /* export what was only predicted */
  enum compile_build build;  /* other kernels than those that serve */
  int soak;                  /* verify: launches of each entry beyond its cases; 0: none */
  int timeout_ms;            /* of one kernel launch in checks */
  int emulation_timeout_ms;  /* the same on the emulated device */
};

#endif
