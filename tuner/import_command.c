/* import_command.c - the command `spec import`: a Hugging Face config in, a spec file (or standard output) out. */
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "files.h"
#include "import.h"
#include "spec.h"

#define SPEC_CEILING (1u << 16)

enum mf_status import_command(const struct options *opt, const char *config, int tp, int tp_rank, int ep, int ep_rank, const char *name, struct error *err)
{
  const struct import_options how = {.tp = tp, .tp_rank = tp_rank, .ep = ep, .ep_rank = ep_rank, .name = name};
  struct model_spec spec;
  struct strbuf text;
  enum mf_status rc = file_spare_input(opt->output, config, err);
  if(rc == MF_OK)
    rc = import_hf_config(config, &how, &spec, err);
  if(rc != MF_OK)
    return rc;
  strbuf_init(&text, SPEC_CEILING);
  spec_write(&spec, &text);
  if(strbuf_failed(&text))
    rc = error_set(err, MF_ERR_NOMEM, "out of memory");
  else if(opt->output == NULL)
    fputs(strbuf_text(&text), stdout);
  else
    rc = file_write_whole(opt->output, strbuf_text(&text), text.length, err);
  if(rc == MF_OK && opt->output != NULL && !opt->quiet)
    fprintf(stderr, "%s: %s, E=%d top-%d N=%d K=%d. Next: moeforge plan %s\n", opt->output, spec.name, spec.problem.experts, spec.problem.top_k,
            spec.problem.intermediate, spec.problem.hidden, opt->output);
  strbuf_free(&text);
  return rc;
}
