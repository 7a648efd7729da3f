/* trace_svg.c - the picture of one launch, that of median length: a row per CTA with a lane per role, time to the right; medians over the CTAs as marks
 * above; the critical path in words below. See trace.h.
 *
 *   title, legend | labels of the marks | axis | rows | axis | words */
#include "trace.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define WIDTH 1360
#define LEFT 78
#define PLOT (WIDTH - LEFT - 30)
#define LEGEND_TOP 62
#define MARKS_TOP 112
#define MARK_ROWS 5
#define MARK_ROW 14
#define ROWS_TOP (MARKS_TOP + MARK_ROWS * MARK_ROW + 26)
#define LANES 5
#define LETTER 6.4 /* width of a letter of a label */
#define WORDS_LINE 17

enum lane { LANE_PRODUCER, LANE_CONSUMERS, LANE_FINALISERS = LANE_CONSUMERS + 2, LANE_LOADERS };

/* Classes of rectangles, in the legend's order. */
#define KINDS(X)                                            \
  X(FRONT, "front", "#c4ccd6", "front")                     \
  X(ROUTE, "route", "#6b7a8f", "logits to picks")           \
  X(UPCOPY, "upcopy", "#1f6fb5", "up copies issued")        \
  X(DOWNCOPY, "downcopy", "#7fc0ee", "down copies issued")  \
  X(UP, "up", "#ef8a2d", "up products")                     \
  X(WAITH, "waith", "#f6dd8f", "down stage landed, waits for h") \
  X(DOWN, "down", "#3c9d5c", "down products")               \
  X(STORE, "store", "#14532d", "y summed and stored")       \
  X(PUBLISH, "publish", "#7b3fb3", "h published")           \
  X(FETCH, "fetch", "#f3b6cf", "h fetched")                 \
  X(WRITE, "write", "#c2185b", "h quantised and written")
enum kind {
#define KIND_ENUM(id, class, colour, text) KIND_##id,
  KINDS(KIND_ENUM)
#undef KIND_ENUM
};
static const struct {
  const char *class, *colour, *text;
} kinds[] = {
#define KIND_ROW(id, class, colour, text) {class, colour, text},
    KINDS(KIND_ROW)
#undef KIND_ROW
};

struct picture {
  const struct trace *t;
  const struct trace_launch *launch;
  double scale;     /* pixels per unit of time */
  double lane, row; /* heights */
  struct strbuf *out;
};

static double x_of(const struct picture *p, double time)
{
  return LEFT + time * p->scale;
}

/* What SVG does not take as it is. */
static void add_text(struct strbuf *out, const char *text)
{
  for(; *text != '\0'; text++) {
    if(*text == '<' || *text == '&' || *text == '>')
      strbuf_printf(out, "%s", *text == '<' ? "&lt;" : *text == '&' ? "&amp;" : "&gt;");
    else
      strbuf_add(out, text, 1);
  }
}

static void add_label(struct strbuf *out, double x, double y, const char *class, const char *text)
{
  strbuf_printf(out, "<text class=\"%s\" x=\"%.1f\" y=\"%.1f\" xml:space=\"preserve\">", class, x, y);
  add_text(out, text);
  strbuf_printf(out, "</text>\n");
}

/* A span of a lane; nothing if it did not happen. */
static void add_span(const struct picture *p, double top, double from, double to, enum kind kind)
{
  if(isnan(from) || isnan(to) || to < from)
    return;
  strbuf_printf(p->out, "<rect class=\"%s\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\"/>\n", kinds[kind].class, x_of(p, from), top,
                fmax((to - from) * p->scale, 0.7), p->lane - 0.4);
}

/* ---- rows ---- */
static void add_producer(const struct picture *p, const struct trace_track *tr, double top)
{
  const double *time = tr->time;
  add_span(p, top, time[MF_PRODUCER_BEGIN], time[MF_PRODUCER_ROUTED], KIND_FRONT);
  add_span(p, top, time[MF_PRODUCER_FIRST_COPY], time[MF_PRODUCER_LAST_UP], KIND_UPCOPY);
  add_span(p, top, time[MF_PRODUCER_FIRST_DOWN], time[MF_PRODUCER_LAST_COPY], KIND_DOWNCOPY);
}

static void add_consumers(const struct picture *p, const struct trace_track *tr, double top)
{
  const double *time = tr->time;
  add_span(p, top, time[MF_CONSUMER_BEGIN], time[MF_CONSUMER_FRONT], KIND_FRONT);
  add_span(p, top, time[MF_CONSUMER_LOGITS], time[MF_CONSUMER_ROUTED], KIND_ROUTE);
  add_span(p, top, time[MF_CONSUMER_UP_FIRST], tr->entries > 0 ? tr->list[tr->entries - 1].time : time[MF_CONSUMER_UP_DONE], KIND_UP);
  add_span(p, top, time[MF_CONSUMER_DOWN_FIRST], time[MF_CONSUMER_H_FIRST], KIND_WAITH);
  add_span(p, top, time[MF_CONSUMER_H_FIRST], time[MF_CONSUMER_DOWN_DONE], KIND_DOWN);
  add_span(p, top, time[MF_CONSUMER_DOWN_DONE], time[MF_CONSUMER_STORED], KIND_STORE);
  for(int i = 0; i < tr->entries; i++)
    strbuf_printf(p->out, "<line class=\"unit\" x1=\"%.2f\" x2=\"%.2f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", x_of(p, tr->list[i].time), x_of(p, tr->list[i].time), top,
                  top + p->lane - 0.4);
}

static void add_helpers(const struct picture *p, const struct trace_cta *cta, double top)
{
  for(int track = MF_TRACE_HELPER; track < trace_tracks(p->t); track++) {
    const struct trace_track *tr = &cta->track[track];
    if(track < MF_TRACE_HELPER + p->t->finalisers) {
      for(int i = 0; i < tr->entries; i++)
        add_span(p, top + LANE_FINALISERS * p->lane, tr->list[i].time, tr->list[i].time, KIND_PUBLISH);
      continue;
    }
    for(int i = 0; i + 2 < tr->entries; i += 3) {
      add_span(p, top + LANE_LOADERS * p->lane, tr->list[i].time, tr->list[i + 1].time, KIND_FETCH);
      add_span(p, top + LANE_LOADERS * p->lane, tr->list[i + 1].time, tr->list[i + 2].time, KIND_WRITE);
    }
  }
}

static void add_rows(const struct picture *p)
{
  for(int c = 0; c < p->t->ctas; c++) {
    const struct trace_cta *cta = &p->launch->ctas[c];
    const double top = ROWS_TOP + c * p->row;
    char name[32];
    snprintf(name, sizeof(name), "CTA %d", c);
    strbuf_printf(p->out, "<g><title>CTA %d on SM %d</title>\n", c, cta->sm);
    strbuf_printf(p->out, "<rect class=\"%s\" x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%.1f\"/>\n", c % 2 ? "odd" : "even", LEFT, top - 1, PLOT, p->row);
    if(p->t->ctas <= 40 || c % 4 == 0)
      add_label(p->out, LEFT - 8, top + p->row / 2 + 3, "name", name);
    add_producer(p, &cta->track[MF_TRACE_PRODUCER], top + LANE_PRODUCER * p->lane);
    for(int group = 0; group < 2; group++)
      add_consumers(p, &cta->track[MF_TRACE_CONSUMER + group], top + (LANE_CONSUMERS + group) * p->lane);
    add_helpers(p, cta, top);
    strbuf_printf(p->out, "</g>\n");
  }
}

/* ---- axis and marks ---- */
/* A round step with at most 'most' of them in 'length'. */
static double round_step(double length, int most)
{
  double step = pow(10, floor(log10(length / most)));
  const double factors[] = {1, 2, 5, 10};
  for(size_t i = 0; i < sizeof(factors) / sizeof(factors[0]); i++)
    if(length / (step * factors[i]) <= most)
      return step * factors[i];
  return step * 10;
}

static void add_axis(const struct picture *p, double bottom)
{
  const double step = round_step(p->launch->length, 16);
  const char *unit = p->t->steps ? "steps" : "us";
  for(int i = 0; i * step <= p->launch->length * 1.0001; i++) {
    const double x = x_of(p, i * step);
    char text[32];
    snprintf(text, sizeof(text), p->t->steps ? "%.0f" : "%.6g", i * step);
    strbuf_printf(p->out, "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%.1f\"/>\n", x, x, ROWS_TOP - 5, bottom);
    add_label(p->out, x, ROWS_TOP - 9, "tick", text);
    add_label(p->out, x, bottom + 13, "tick", text);
  }
  add_label(p->out, LEFT - 8, ROWS_TOP - 9, "name", unit);
  add_label(p->out, LEFT - 8, bottom + 13, "name", unit);
}

/* Medians of the launch's phases. Labels move to a row where they have room. */
static void add_marks(const struct picture *p, int launch, double bottom)
{
  static const char *const marked[] = {"routed", "first copy issued", "first stage landed", "last up copy issued", "up done", "first down stage landed",
                                       "down begins", "last stage landed", "last h there", "y stored"};
  struct trace_phase phases[TRACE_PHASES_MAX];
  const int count = trace_launch_phases(p->t, launch, phases);
  double taken[MARK_ROWS] = {0};
  for(size_t m = 0; m < sizeof(marked) / sizeof(marked[0]); m++) {
    for(int i = 0; i < count; i++) {
      char number[32], text[96];
      double x, width, from;
      int row = 0;
      if(strcmp(phases[i].name, marked[m]) != 0 || isnan(phases[i].median))
        continue;
      trace_number(p->t, phases[i].median, number);
      snprintf(text, sizeof(text), "%s %s", marked[m], number);
      x = x_of(p, phases[i].median);
      width = LETTER * (double)strlen(text);
      from = fmin(x + 3, WIDTH - 6 - width);
      while(row < MARK_ROWS - 1 && taken[row] > from)
        row++;
      taken[row] = from + width + 8;
      strbuf_printf(p->out, "<line class=\"mark\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%.1f\"/>\n", x, x, MARKS_TOP + row * MARK_ROW - 10, bottom);
      add_label(p->out, from, MARKS_TOP + row * MARK_ROW, "note", text);
    }
  }
}

static void add_line(const struct picture *p, double time, double bottom, const char *class)
{
  if(!isnan(time))
    strbuf_printf(p->out, "<line class=\"%s\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%.1f\"/>\n", class, x_of(p, time), x_of(p, time), ROWS_TOP - 5, bottom);
}

/* ---- head and words ---- */
static void add_style(struct strbuf *out)
{
  strbuf_printf(out, "<style>\ntext{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#222}\n.title{font-size:17px;font-weight:bold}\n"
                     ".name{text-anchor:end;font-size:10px}\n.tick{text-anchor:middle;font-size:10px;fill:#555}\n.note{fill:#333}\n"
                     ".words{font-family:monospace;font-size:12px;white-space:pre}\n.even{fill:#fff}\n.odd{fill:#f4f6f8}\n.grid{stroke:#dde2e8;stroke-width:1}\n"
                     ".mark{stroke:#444;stroke-width:.8;stroke-dasharray:3 3}\n.unit{stroke:#8a4300;stroke-width:.5}\n.lasth{stroke:#7b3fb3;stroke-width:1.4}\n"
                     ".lasty{stroke:#c00;stroke-width:1.4}\n");
  for(size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
    strbuf_printf(out, ".%s{fill:%s}\n", kinds[i].class, kinds[i].colour);
  strbuf_printf(out, "</style>\n");
}

static void add_legend(struct strbuf *out)
{
  double x = LEFT, y = LEGEND_TOP;
  for(size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
    const double width = 20 + LETTER * (double)strlen(kinds[i].text) + 12;
    if(x + width > WIDTH - 20) {
      x = LEFT;
      y += 17;
    }
    strbuf_printf(out, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"14\" height=\"10\"/>\n", kinds[i].class, x, y - 9);
    add_label(out, x + 19, y, "note", kinds[i].text);
    x += width;
  }
}

static void add_head(const struct picture *p, const struct trace_title *title, double height)
{
  char text[512];
  strbuf_printf(p->out, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%.0f\" viewBox=\"0 0 %d %.0f\">\n", WIDTH, height, WIDTH, height);
  add_style(p->out);
  strbuf_printf(p->out, "<rect x=\"0\" y=\"0\" width=\"%d\" height=\"%.0f\" fill=\"#fff\"/>\n", WIDTH, height);
  snprintf(text, sizeof(text), "%s on %s, %d token%s, %s routing: launch %u, %d experts", title->shape, title->device, title->tokens,
           title->tokens == 1 ? "" : "s", title->routing, (unsigned)p->launch->number, p->launch->active);
  add_label(p->out, LEFT, 22, "title", text);
  snprintf(text, sizeof(text), "%s. A row is a CTA; its lanes from above: producer, consumer warpgroups 0 and 1, finalisers, h loaders. Dashed: medians over the CTAs%s",
           title->schedule, p->t->steps ? ". Steps of the emulated device are no times" : "");
  add_label(p->out, LEFT, 40, "note", text);
  add_legend(p->out);
}

static void add_words(const struct picture *p, const char *words, double top)
{
  while(*words != '\0') {
    const size_t length = strcspn(words, "\n");
    char line[512];
    snprintf(line, sizeof(line), "%.*s", (int)(length < sizeof(line) ? length : sizeof(line) - 1), words);
    add_label(p->out, LEFT, top, "words", line);
    top += WORDS_LINE;
    words += length + (words[length] == '\n');
  }
}

void trace_svg(const struct trace *t, const struct trace_title *title, struct strbuf *out)
{
  const struct trace_path path = trace_find_path(t);
  struct picture p = {.t = t, .launch = &t->launch[path.launch], .lane = t->ctas <= 40 ? 6 : 3.4, .out = out};
  struct strbuf words;
  double bottom, height;
  p.row = LANES * p.lane + (t->ctas <= 40 ? 5 : 3);
  p.scale = PLOT / (p.launch->length > 0 ? p.launch->length : 1);
  bottom = ROWS_TOP + t->ctas * p.row;
  height = bottom + 34 + 7 * WORDS_LINE;
  strbuf_init(&words, 1u << 16);
  trace_path_text(t, &path, title, &words);
  add_head(&p, title, height);
  add_rows(&p);
  add_axis(&p, bottom);
  add_marks(&p, path.launch, bottom);
  add_line(&p, path.h_done, bottom, "lasth");
  add_line(&p, path.y_done, bottom, "lasty");
  add_words(&p, strbuf_text(&words), bottom + 36);
  strbuf_printf(out, "</svg>\n");
  out->failed |= words.failed;
  strbuf_free(&words);
}
