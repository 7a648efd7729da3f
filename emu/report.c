/* report.c - findings as text.
 *
 * Code addresses stand in a text as "<+0x1234>", relative to the kernel's image; emu_finding_locate() asks addr2line for all of them at once and puts
 * "stream/up.cuh:92" in their place: the innermost line that is not one of the machine layer's own (hw_host.h). A return address lies behind its call, so one byte is
 * taken off. */
#include "internal.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_PLACES 64 /* code addresses in one text */
#define MAX_GROUPS 14 /* of waiters in a deadlock */

const char *emu_finding_name(enum emu_finding_kind kind)
{
  static const char *const names[EMU_FINDING_KINDS] = {
#define EMU_FINDING_NAME(name, text) [name] = text,
      EMU_FINDING_TABLE(EMU_FINDING_NAME)
#undef EMU_FINDING_NAME
  };
  return (unsigned)kind < EMU_FINDING_KINDS ? names[kind] : "unknown";
}

uint32_t emu_pc(const void *pc)
{
  const struct emu_launch *launch = emu_machine.launch;
  const uintptr_t offset = (uintptr_t)pc - (uintptr_t)launch->code;
  return offset < launch->code_bytes ? (uint32_t)offset : 0;
}

struct pc_text emu_pc_text(uint32_t pc)
{
  struct pc_text text;
  if(pc != 0)
    snprintf(text.s, sizeof(text.s), "<+0x%x>", (unsigned)pc);
  else
    snprintf(text.s, sizeof(text.s), "(start)");
  return text;
}

struct agent_text emu_agent_text(const struct cta *cta, uint32_t agent)
{
  struct agent_text text;
  const uint32_t threads = (uint32_t)cta->nthreads;
  if(agent >= cta->reads && agent < cta->reads + threads)
    agent -= cta->reads;
  if(agent < threads) {
    snprintf(text.s, sizeof(text.s), "warp %u lane %u", (unsigned)agent / LANES, (unsigned)agent % LANES);
  } else if(agent < cta->bulk) {
    snprintf(text.s, sizeof(text.s), "the products of warp %u", (unsigned)(agent - cta->products));
  } else if(agent < cta->reads) {
    snprintf(text.s, sizeof(text.s), "an asynchronous copy");
  } else {
    uint32_t owner = 0;
    while(owner < threads && cta->threads[owner].async_agent != agent)
      owner++;
    snprintf(text.s, sizeof(text.s), "cp.async of warp %u lane %u", (unsigned)owner / LANES, (unsigned)owner % LANES);
  }
  return text;
}

_Noreturn static void give_up(void)
{
  struct machine *m = &emu_machine;
  struct thread *t = m->running;
  m->failed = true;
  if(t != NULL)
    fiber_switch(&t->fiber, &m->host, 1); /* run_lane() sees 'failed' and comes back here from the host's side */
  longjmp(m->give_up, 1);
}

static void identify(struct emu_finding *f, enum emu_finding_kind kind, const struct thread *t, const void *pc)
{
  f->kind = kind;
  f->pc = pc;
  if(t == NULL)
    return;
  f->cta = t->self.cta;
  f->warp = t->self.warp;
  f->lane = t->self.lane;
}

_Noreturn void emu_fail(enum emu_finding_kind kind, const struct thread *t, const void *pc, const char *format, ...)
{
  struct emu_finding *f = emu_machine.finding;
  size_t length;
  va_list args;
  identify(f, kind, t, pc);
  if(t != NULL)
    snprintf(f->text, sizeof(f->text), "%s: cta %d warp %d lane %d: ", emu_finding_name(kind), f->cta, f->warp, f->lane);
  else
    snprintf(f->text, sizeof(f->text), "%s: ", emu_finding_name(kind));
  length = strlen(f->text);
  va_start(args, format);
  vsnprintf(f->text + length, sizeof(f->text) - length, format, args);
  va_end(args);
  give_up();
}

/* ---- taints ---- */

uint32_t emu_taint_number(const struct taint *taint)
{
  struct machine *m = &emu_machine;
  for(uint32_t i = 1; i < m->ntaints; i++) {
    const struct taint *known = &m->taints[i];
    if(known->kind == taint->kind && known->pc == taint->pc && known->other_pc == taint->other_pc && known->why == taint->why)
      return i;
  }
  if(m->ntaints == MAX_TAINTS)
    return MAX_TAINTS - 1; /* the last one speaks for the rest */
  m->taints[m->ntaints] = *taint;
  return m->ntaints++;
}

void emu_tainted(uint32_t bits)
{
  const struct machine *m = &emu_machine;
  const void *pc = __builtin_return_address(0);
  const uint32_t number = bits & ~(EMU_TAINT_MASK | 0x80000000u);
  const struct taint *taint;
  if(number == 0 || number >= m->ntaints)
    return; /* some other NaN */
  taint = &m->taints[number];
  emu_machine.finding->other_pc = taint->pc;
  emu_fail(taint->kind, running(), pc, "a result used at %s depends on an operand in doubt: in cta %d, %s of shared+0x%x at %s (warp %d), and %s by %s at %s: %s", emu_pc_text(emu_pc(pc)).s,
           taint->cta, taint->what, (unsigned)taint->offset, emu_pc_text(emu_pc(taint->pc)).s, taint->warp, taint->earlier,
           emu_agent_text(&m->ctas[taint->cta], taint->agent).s, emu_pc_text(taint->other_pc).s, taint->why);
}

/* ---- deadlocks ---- */

/* Lanes that wait for the same thing at the same place. */
struct waiters {
  enum wait_kind wait;
  const void *pc;
  int id;
  uint32_t offset, parity;
  const struct thread *first;
  int lanes, ctas, last_cta;
};

static bool same(const struct waiters *g, const struct thread *t)
{
  const uint32_t offset = t->barrier != NULL ? t->barrier->offset : 0;
  return g->wait == t->wait && g->pc == t->pc && g->id == t->wait_id && g->offset == offset && (t->wait != WAIT_MBARRIER || g->parity == t->parity);
}

static int group_waiters(struct waiters *groups, int max, int *left_out)
{
  const struct machine *m = &emu_machine;
  int count = 0;
  for(int c = 0; c < m->nctas; c++) {
    for(int i = 0; i < m->ctas[c].nthreads; i++) {
      const struct thread *t = &m->ctas[c].threads[i];
      int g = 0;
      if(t->wait == WAIT_ENDED)
        continue;
      while(g < count && !same(&groups[g], t))
        g++;
      if(g == max) {
        ++*left_out;
        continue;
      }
      if(g == count)
        groups[count++] = (struct waiters){t->wait, t->pc, t->wait_id, t->barrier != NULL ? t->barrier->offset : 0, t->parity, t, 0, 0, -1};
      groups[g].lanes++;
      groups[g].ctas += groups[g].last_cta != c;
      groups[g].last_cta = c;
    }
  }
  return count;
}

/* What a group waits for. */
static void describe(const struct waiters *g, char *out, size_t space)
{
  const struct cta *cta = g->first->cta;
  const struct warp *w = g->first->warp;
  switch(g->wait) {
    case WAIT_LANES:
      snprintf(out, space, "the other lanes of their warp (in warp %d of cta %d, lanes %08x have come, %08x have ended)", w->index, cta->index, (unsigned)w->arrived, (unsigned)w->ended);
      break;
    case WAIT_BARRIER:
      snprintf(out, space, "barrier %d (%d of %d threads have arrived)", g->id, cta->named[g->id].arrived, cta->named[g->id].expected);
      break;
    case WAIT_MBARRIER: {
      const struct mbarrier *b = g->first->barrier;
      snprintf(out, space, "parity %u of the mbarrier at shared+0x%x, wait %d (phase %llu: %u of %u arrivals and %lld bytes missing)", (unsigned)g->parity, (unsigned)b->offset, g->id,
               (unsigned long long)b->phase, (unsigned)b->pending, (unsigned)b->count, (long long)b->bytes);
      break;
    }
    case WAIT_PRODUCTS: snprintf(out, space, "the other warps of the warpgroup to issue their products"); break;
    case WAIT_SPIN: snprintf(out, space, "a word to change, wait %d", g->id); break;
    case WAIT_NOT:
    case WAIT_ENDED: snprintf(out, space, "nothing"); break;
  }
}

_Noreturn void emu_report_deadlock(void)
{
  struct emu_finding *f = emu_machine.finding;
  struct waiters groups[MAX_GROUPS];
  int left_out = 0;
  const int count = group_waiters(groups, MAX_GROUPS, &left_out);
  size_t length;
  identify(f, EMU_DEADLOCK, count > 0 ? groups[0].first : NULL, count > 0 ? groups[0].pc : NULL);
  snprintf(f->text, sizeof(f->text), "%s: nobody can go on", emu_finding_name(EMU_DEADLOCK));
  for(int i = 0; i < count; i++) {
    char what[240];
    length = strlen(f->text);
    describe(&groups[i], what, sizeof(what));
    snprintf(f->text + length, sizeof(f->text) - length, "\n  %d lane%s in %d cta%s (first: cta %d warp %d lane %d) at %s wait for %s", groups[i].lanes, groups[i].lanes == 1 ? "" : "s",
             groups[i].ctas, groups[i].ctas == 1 ? "" : "s", groups[i].first->self.cta, groups[i].first->self.warp, groups[i].first->self.lane, emu_pc_text(emu_pc(groups[i].pc)).s, what);
  }
  length = strlen(f->text);
  if(left_out > 0)
    snprintf(f->text + length, sizeof(f->text) - length, "\n  and %d lanes elsewhere", left_out);
  give_up();
}

/* ---- source lines ---- */

/* The addresses in a text, as arguments for addr2line. */
static int collect(const char *text, char places[MAX_PLACES][16])
{
  int count = 0;
  for(const char *at = strstr(text, "<+0x"); at != NULL && count < MAX_PLACES; at = strstr(at + 1, "<+0x")) {
    const unsigned long pc = strtoul(at + 4, NULL, 16);
    snprintf(places[count++], sizeof(places[0]), "0x%lx", pc - 1);
  }
  return count;
}

/* Starts addr2line; its output comes from the returned stream, NULL if it could not be started. */
static FILE *ask(const char *object, char places[MAX_PLACES][16], int count, pid_t *child)
{
  char *arguments[MAX_PLACES + 6];
  int ends[2], n = 0;
  if(pipe(ends) != 0)
    return NULL;
  arguments[n++] = "addr2line";
  arguments[n++] = "-a";
  arguments[n++] = "-i";
  arguments[n++] = "-e";
  arguments[n++] = (char *)(uintptr_t)object;
  for(int i = 0; i < count; i++)
    arguments[n++] = places[i];
  arguments[n] = NULL;
  *child = fork();
  if(*child == 0) {
    const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(ends[1], STDOUT_FILENO);
    if(nowhere >= 0)
      dup2(nowhere, STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    execvp(arguments[0], arguments);
    _exit(127);
  }
  close(ends[1]);
  if(*child > 0)
    return fdopen(ends[0], "r");
  close(ends[0]);
  return NULL;
}

/* The last two parts of a path, without what addr2line adds behind the line number. */
static void shorten(char *line)
{
  char *slash = strrchr(line, '/'), *end = strchr(line, ' ');
  line[strcspn(line, "\n")] = '\0';
  if(end != NULL)
    *end = '\0';
  while(slash != NULL && slash > line && slash[-1] != '/')
    slash--;
  if(slash != NULL && slash > line)
    memmove(line, slash, strlen(slash) + 1);
}

/* Reads the answer: for each place its address, then its line and those of the callers it is inlined into. */
static int read_lines(FILE *in, char lines[MAX_PLACES][80])
{
  char line[1024];
  int place = -1;
  bool found = false;
  while(fgets(line, sizeof(line), in) != NULL) {
    if(strncmp(line, "0x", 2) == 0) {
      if(++place == MAX_PLACES)
        break;
      lines[place][0] = '\0';
      found = false;
    } else if(place >= 0 && !found && line[0] != '?') {
      found = strstr(line, "hw_host.h") == NULL;
      shorten(line);
      snprintf(lines[place], sizeof(lines[0]), "%.79s", line);
    }
  }
  return place + 1;
}

static void replace(char *text, size_t space, char lines[MAX_PLACES][80], int count)
{
  char out[sizeof(((struct emu_finding *)0)->text)];
  size_t length = 0;
  int place = 0;
  for(const char *at = text; *at != '\0' && length + 1 < sizeof(out);) {
    if(strncmp(at, "<+0x", 4) == 0 && place < count && strchr(at, '>') != NULL) {
      const char *line = lines[place++];
      const char *end = strchr(at, '>') + 1;
      length += (size_t)snprintf(out + length, sizeof(out) - length, "%s", line[0] != '\0' ? line : "(no line)");
      length = length < sizeof(out) ? length : sizeof(out) - 1;
      at = end;
    } else {
      out[length++] = *at++;
    }
  }
  out[length] = '\0';
  snprintf(text, space, "%s", out);
}

void emu_finding_locate(struct emu_finding *finding, const struct emu_launch *launch, const char *object)
{
  char places[MAX_PLACES][16], lines[MAX_PLACES][80];
  const int count = collect(finding->text, places);
  pid_t child = -1;
  FILE *in;
  int answered;
  (void)launch;
  if(count == 0)
    return;
  in = ask(object, places, count, &child);
  if(in == NULL)
    return;
  answered = read_lines(in, lines);
  fclose(in);
  waitpid(child, NULL, 0);
  if(answered == count)
    replace(finding->text, sizeof(finding->text), lines, count);
}
