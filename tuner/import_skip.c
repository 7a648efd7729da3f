/* import_skip.c - do the skip lists of a quantisation header cover routed experts?
 *
 * The lists go by several names and their entries by several syntaxes: whole module names, parts of them, globs, and "re:" with a regular
 * expression that must match from the start. The modules of interest look like
 *
 *   model.layers.5.mlp.experts.7.gate_proj
 *   ROOT  LAYERS L BLOCK EXPERTS NUMBER PROJECTION
 *
 * A plain entry covers an expert if its words are a run of words of such a name; "model.layers.5.mlp" covers the experts of layer 5,
 * "model.layers.5.mlp.gate" and "shared_experts" cover none. Globs and expressions are tried on the names of every layer. Layers
 * without routed experts (dense ones, and prediction layers beyond the last) do not count. An expression that cannot be judged is refused. */
#include "import_internal.h"

#include <fnmatch.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WORDS 16
#define PATTERN_SPACE 512
#define MAX_LAYERS 256      /* these three bound the time that a hostile list can cost */
#define MAX_ENTRIES 20000
#define MAX_PATTERNS 2000

static const char *const list_names[] = {"modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules", "exclude"};

enum word_kind { WORD_ROOT, WORD_LAYERS, WORD_LAYER, WORD_BLOCK, WORD_EXPERTS, WORD_EXPERT, WORD_PROJECTION };

/* The words of an expert's name; up to three roots. */
static const enum word_kind name_form[] = {WORD_ROOT,  WORD_ROOT,    WORD_ROOT,   WORD_LAYERS,    WORD_LAYER,
                                           WORD_BLOCK, WORD_EXPERTS, WORD_EXPERT, WORD_PROJECTION};
#define FORM_WORDS (sizeof(name_form) / sizeof(name_form[0]))

static const char *const roots[] = {"model", "language_model", "text_model", "transformer", "backbone", NULL};
static const char *const layer_words[] = {"layers", NULL};
static const char *const blocks[] = {"mlp", "block_sparse_moe", "feed_forward", "moe", "mixer", "ffn", NULL};
static const char *const experts[] = {"experts", "switch_mlp", NULL};
static const char *const projections[] = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", NULL};

static bool is_one_of(const char *word, const char *const *words)
{
  for(; *words != NULL; words++)
    if(strcmp(word, *words) == 0)
      return true;
  return false;
}

static bool is_number(const char *word)
{
  return word[0] != '\0' && word[strspn(word, "0123456789")] == '\0' && strlen(word) < 9;
}

static bool word_fits(enum word_kind kind, const char *word)
{
  switch(kind) {
    case WORD_ROOT: return is_one_of(word, roots);
    case WORD_LAYERS: return is_one_of(word, layer_words);
    case WORD_LAYER:
    case WORD_EXPERT: return is_number(word);
    case WORD_BLOCK: return is_one_of(word, blocks);
    case WORD_EXPERTS: return is_one_of(word, experts);
    case WORD_PROJECTION: return is_one_of(word, projections);
  }
  return false;
}

static bool is_moe_layer(const struct import_layers *layers, long layer)
{
  if(layer < layers->first_moe || layer >= layers->count)
    return false;
  for(size_t i = 0; layers->dense != NULL && i < json_array_size(layers->dense); i++)
    if(json_integer_value(json_array_get(layers->dense, i)) == layer)
      return false;
  return true;
}

/* Do the words, from form position 'start' on, name something that contains experts? */
static bool words_fit(char *const *words, size_t count, size_t start, const struct import_layers *layers)
{
  if(start + count > FORM_WORDS || (count == 1 && is_number(words[0])))
    return false;
  for(size_t i = 0; i < count; i++) {
    if(!word_fits(name_form[start + i], words[i]))
      return false;
    if(name_form[start + i] == WORD_LAYER && !is_moe_layer(layers, strtol(words[i], NULL, 10)))
      return false;
  }
  return true;
}

static bool plain_covers(const char *entry, const struct import_layers *layers)
{
  char copy[PATTERN_SPACE], *words[MAX_WORDS], *rest = copy, *word;
  size_t count = 0;
  snprintf(copy, sizeof(copy), "%s", entry);
  while((word = strsep(&rest, ".")) != NULL) {
    if(count == MAX_WORDS)
      return false; /* longer than any expert's name */
    words[count++] = word;
  }
  if(count > 1 && (strcmp(words[count - 1], "weight") == 0 || words[count - 1][0] == '\0'))
    count--;
  for(size_t start = 0; start < FORM_WORDS; start++)
    if(words_fit(words, count, start, layers))
      return true;
  return false;
}

/* A pattern: a compiled expression, or a glob. */
struct pattern {
  bool is_regex;
  regex_t regex;
  const char *glob;
};

static bool pattern_matches(const struct pattern *pattern, const char *name)
{
  if(pattern->is_regex)
    return regexec(&pattern->regex, name, 0, NULL, 0) == 0;
  return fnmatch(pattern->glob, name, 0) == 0;
}

static bool layer_matches(const struct pattern *pattern, long layer)
{
  static const char *const starts[] = {"model.layers", "model.language_model.layers", "language_model.model.layers", NULL};
  char name[128];
  for(const char *const *start = starts; *start != NULL; start++)
    for(const char *const *block = blocks; *block != NULL; block++) {
      snprintf(name, sizeof(name), "%s.%ld.%s.experts", *start, layer, *block);
      if(pattern_matches(pattern, name))
        return true;
      for(const char *const *projection = projections; *projection != NULL; projection++) {
        snprintf(name, sizeof(name), "%s.%ld.%s.experts.0.%s", *start, layer, *block, *projection);
        if(pattern_matches(pattern, name))
          return true;
      }
    }
  return false;
}

static bool pattern_covers(const struct pattern *pattern, const struct import_layers *layers)
{
  for(long layer = 0; layer < layers->count; layer++)
    if(is_moe_layer(layers, layer) && layer_matches(pattern, layer))
      return true;
  return false;
}

/* What a Python escape is in a POSIX expression; NULL if there is none. */
static const char *translate_escape(char escaped, char literal[3])
{
  if(escaped == 'd')
    return "[0-9]";
  if(escaped == 'w')
    return "[A-Za-z0-9_]";
  if(escaped == '\0' || strchr(".*+?()[]|^$-_/\\", escaped) == NULL)
    return NULL;
  literal[0] = '\\';
  literal[1] = escaped;
  literal[2] = '\0';
  return strchr("-_/", escaped) != NULL ? literal + 1 : literal;
}

/* Turns a Python expression into a POSIX one that must match from the start; false if it uses what POSIX lacks, or counted repeats, which
 * can cost unbounded memory. */
static bool translate(const char *python, char *out, size_t space)
{
  size_t length = (size_t)snprintf(out, space, "^(");
  if(strchr(python, '{') != NULL || strstr(python, "(?") != NULL || strstr(python, "*?") != NULL || strstr(python, "+?") != NULL)
    return false;
  for(const char *c = python; *c != '\0'; c++) {
    char literal[3] = {*c, '\0', '\0'};
    const char *piece = *c == '\\' ? translate_escape(*++c, literal) : literal;
    if(piece == NULL || length + 16 > space)
      return false;
    length += (size_t)snprintf(out + length, space - length, "%s", piece);
  }
  snprintf(out + length, space - length, ")");
  return true;
}

static bool is_regex(const char *entry)
{
  return strncmp(entry, "re:", 3) == 0;
}

static bool is_pattern(const char *entry)
{
  return is_regex(entry) || strpbrk(entry, "*?[") != NULL;
}

enum verdict_of_entry { ENTRY_HARMLESS, ENTRY_COVERS, ENTRY_UNCLEAR };

static enum verdict_of_entry judge(const char *entry, const struct import_layers *layers)
{
  struct pattern pattern = {.is_regex = is_regex(entry), .glob = entry};
  char expression[PATTERN_SPACE];
  bool covers;
  if(strlen(entry) >= PATTERN_SPACE - 64)
    return ENTRY_UNCLEAR;
  if(!is_pattern(entry))
    return plain_covers(entry, layers) ? ENTRY_COVERS : ENTRY_HARMLESS;
  if(pattern.is_regex && !translate(entry + 3, expression, sizeof(expression)))
    return ENTRY_UNCLEAR;
  if(pattern.is_regex && regcomp(&pattern.regex, expression, REG_EXTENDED | REG_NOSUB) != 0)
    return ENTRY_UNCLEAR;
  covers = pattern_covers(&pattern, layers);
  if(pattern.is_regex)
    regfree(&pattern.regex);
  return covers ? ENTRY_COVERS : ENTRY_HARMLESS;
}

static enum mf_status check_list(const char *name, const json_t *list, const struct import_layers *layers, struct error *err)
{
  size_t patterns = 0;
  if(!json_is_array(list) || json_array_size(list) > MAX_ENTRIES)
    return error_set(err, MF_ERR_SPEC, "quantization_config.%s: expected a list of at most %d module names", name, MAX_ENTRIES);
  for(size_t i = 0; i < json_array_size(list); i++) {
    const char *entry = json_string_value(json_array_get(list, i));
    if(entry == NULL)
      return error_set(err, MF_ERR_SPEC, "quantization_config.%s: expected module names, got another type at place %zu", name, i);
    if(is_pattern(entry) && ++patterns > MAX_PATTERNS)
      return error_set(err, MF_ERR_SPEC, "quantization_config.%s: expected at most %d patterns, got more", name, MAX_PATTERNS);
    switch(judge(entry, layers)) {
      case ENTRY_HARMLESS: break;
      case ENTRY_COVERS:
        return error_set(err, MF_ERR_UNSUPPORTED,
                         "unquantised experts: quantization_config.%s exempts them by \"%.80s\"; take a checkpoint whose experts are block FP8", name,
                         entry);
      case ENTRY_UNCLEAR:
        return error_set(err, MF_ERR_UNSUPPORTED,
                         "quantization_config.%s: cannot tell whether \"%.80s\" exempts experts; replace it by plain names or '.*' patterns", name,
                         entry);
    }
  }
  return MF_OK;
}

enum mf_status import_skip_lists(const json_t *header, const struct import_layers *layers, struct error *err)
{
  struct import_layers bounded = *layers;
  if(bounded.count > MAX_LAYERS)
    bounded.count = MAX_LAYERS;
  for(size_t i = 0; i < sizeof(list_names) / sizeof(list_names[0]); i++) {
    const json_t *list = json_object_get(header, list_names[i]);
    const enum mf_status rc = list == NULL || json_is_null(list) ? MF_OK : check_list(list_names[i], list, &bounded, err);
    if(rc != MF_OK)
      return rc;
  }
  return MF_OK;
}
