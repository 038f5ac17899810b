// ---- Plots. What this section teaches: a chart needs no library. A picture is a grid of dots, 4 x
// 4 to a pixel; averaging a pixel's dots is anti-aliasing. Everything drawn is a box or a thick
// segment, letters too. A scale maps a value to a pixel, through log(value) where doublings should
// look equal. A label takes the nearest place without ink. The charts themselves are two tables.

// Okabe and Ito's colours, distinct to every common colour vision; dashes serve grey prints.
typedef enum { INK_NONE, INK_GRID, INK_DIM, INK_DARK, INK_BLUE, INK_GREEN, INK_GOLD, INK_RED } Ink;
static const int INK_RGB[] = {0xffffff, 0xe3e3e3, 0x5c5c5c, 0x222222,
                              0x0072b2, 0x009e73, 0xe69f00, 0xd55e00};
enum { DOTS = 4, MAX_W = 2400, MAX_H = 1600, LABEL_SIZE = 14, TITLE_SIZE = 23 };  // pixels
// The picture, an Ink each. Static: a long sweep must not end without memory to show its result.
static uint8_t dots[MAX_H * DOTS][MAX_W * DOTS], rgb[MAX_W * MAX_H * 3];

typedef struct {
  double x, y;
} Point;  // pixels, y down
typedef struct {
  double x0, y0, x1, y1;
} Box;
typedef struct {
  char s[480];
} Str;  // text returned by value: nothing to free

static Str format_str(const char* format, ...) {
  Str s;
  va_list args;
  va_start(args, format);
  vsnprintf(s.s, sizeof s.s, format, args);
  va_end(args);
  return s;
}

// 1234 -> 1.23k, 6e14 -> 600T; 1536 MiB -> 1.5 GiB: three digits are all that a reader can use.
static Str format_num(double v, bool mib) {
  int unit = mib ? 2 : 0;
  double step = mib ? 1024 : 1000;
  for (; fabs(v) >= 0.9995 * step && unit < 6; unit++) v /= step;
  if (isnan(v)) return format_str("n/a");
  return format_str("%.3g%s%.1s%s", v, mib ? " " : "", &"\0kMGTPE"[unit], mib ? "iB" : "");
}

// A pixel coordinate in dots, of which there are n pixels' worth; 0 for NaN.
static int to_dot(double v, int n) {
  return (int)fmin(fmax(round(v * DOTS), 0), n * DOTS);
}

static void fill_box(double x0, double y0, double x1, double y1, Ink ink) {
  int left = to_dot(x0, MAX_W), right = to_dot(x1, MAX_W), end = to_dot(y1, MAX_H);
  for (int y = to_dot(y0, MAX_H); y < end; y++)
    for (int x = left; x < right; x++) dots[y][x] = (uint8_t)ink;
}

// Every dot within r of the line from a to b, in dashes where dash > 0; none where a or b is NaN.
static void draw_segment(Point a, Point b, double r, double dash, Ink ink) {
  double ex = b.x - a.x, ey = b.y - a.y, length = sqrt(ex * ex + ey * ey);
  int left = to_dot(fmin(a.x, b.x) - r, MAX_W), right = to_dot(fmax(a.x, b.x) + r, MAX_W);
  int top = to_dot(fmin(a.y, b.y) - r, MAX_H), bottom = to_dot(fmax(a.y, b.y) + r, MAX_H);
  for (int y = top; y < bottom; y++)
    for (int x = left; x < right; x++) {
      double px = (x + 0.5) / DOTS - a.x, py = (y + 0.5) / DOTS - a.y;
      double t = fmin(fmax((px * ex + py * ey) / fmax(length * length, 1e-12), 0), 1);
      double dx = px - t * ex, dy = py - t * ey;
      bool in_dash = dash <= 0 || fmod(t * length, 2 * dash) <= dash;
      if (in_dash && dx * dx + dy * dy <= r * r) dots[y][x] = (uint8_t)ink;
    }
}

// The alphabet from ' ' to '~', one glyph per '|'. Two characters are a point: x a letter (a = 0),
// y one of 0..9 a..f = 0..15 or w..z = -4..-1; capitals are 14 high. A small letter is on the line,
// a capital pulls it (a quadratic curve, as in TrueType), and a space lifts the pen.
static const char GLYPHS[] =
    "|aea5 a0a0|aeab dedb|b0de g0ie a5k5 a9k9|ibIdAdA8J6J1A1a3 eff0|b0ke abAeFeF8A8ab g3G6L6L0G0g3"
    "|k0c9BbBeEeHeHbH9A7A0E0H0k6|aeab|dfAcA0dx|afDcD0ax|ddd7 acg8 a8gc|e2ea a6i6|b1ay|a6g6|a0a0|az"
    "ge|a5a9AeIei9i5I0A0a5|abeee0|aaAeIeI9a0i0|abAeHeH8d8 d8I8I0A0a3|g0gea4i4|heaea8B9I9I0A0a3|geA"
    "9a4A0I0I8A8a4|aeiec0|e8B8BeHeH8e8A8A0I0I8e8|c0I5iaIeAeA6I6ia|a0a0 a9a9|b0ay b9b9|iaa6i2|a8i8 "
    "a4i4|aai6a2|abAeHeH8d8d5 d0d0|j9J4M4NeHeAeA0H0l0 jaEaE4J4|a0fek0 b4j4|a0aefeJeJ7f7a7 f7K7K0f0"
    "a0|kbJeAeA0J0k3|a0aeeeKeK0e0a0|ieaea0i0 a7h7|ieaea0 a7h7|kbJeAeA0K0k6g6|a0ae k0ke a7k7|a0ae|h"
    "eh4H0A0a4|a0ae jea5 d8k0|aea0i0|a0aeg4mem0|a0aek0ke|a7AeLeL0A0a7|a0aefeJeJ6f6a6|a7AeLeL0A0a7 "
    "h4l0|a0aefeJeJ6f6a6 f6j0|ibIeAeA8J6J0A0a3|f0fe aeke|aea5A0K0k5ke|aef0ke|aed0hel0oe|a0je aej0|"
    "aef7ke f7f0|aejea0j0|cfafaxcx|aegz|afcfcxax|aadega|ayiy|aecc|a8BaHah6h0 h6d6A6A0d0G0h3|aea0 a"
    "7BaIaI0B0a3|h8GaAaA0G0h2|iei0 i7HaAaA0H0i3|a5i5IaAaA0G0h2|feCecbc0 aafa|iai0IwBway i7HaAaA0H0"
    "i3|aea0 a6BaHah6h0|aaa0 adad|dadzDwaw dddd|aea0 haa4 d6i0|aea3A0c0|aaa0 a6BaGag6g0 g6HaMam6m0"
    "|aaa0 a6BaHah6h0|a5AaIaI0A0a5|aaaw a7BaIaI0B0a3|iaiw i7HaAaA0H0i3|aaa0 a6Bafa|g8FaAaA6H4H0B0a"
    "2|cdc3C0f0 aafa|aaa4A0G0h4 hah0|aae0ia|aad0gaj0ma|a0ha aah0|aae0 iacw|aahaa0h0|efCfCca6C0Cxex"
    "|afax|afCfCce6C0Cxax|a5A8E8E4I4i7|";

// Draws a letter that starts at `at` and returns the way to the next; INK_NONE only measures.
static double draw_glyph(char letter, Point at, double size, Ink ink) {
  double unit = size / 14, r = size * (size > LABEL_SIZE ? 0.083 : 0.072), right = 0;
  const char* s = GLYPHS;
  for (int i = letter >= ' ' && letter <= '~' ? letter : '?'; i > ' '; i--) s = strchr(s, '|') + 1;
  Point lifted = {NAN, NAN}, from = lifted, pull = lifted;  // from there nothing is drawn
  for (bool pulled = false; *s != '|'; s += 2) {
    if (*s == ' ') from = pull = lifted;
    if (*s == ' ') s++;
    bool on = islower((unsigned char)s[0]) != 0;
    int gx = tolower((unsigned char)s[0]) - 'a';
    int gy = s[1] <= '9' ? s[1] - '0' : s[1] >= 'w' ? s[1] - 'z' - 1 : s[1] - 'a' + 10;
    Point p = {at.x + unit * gx, at.y - unit * gy}, last = from;
    Point end = {on ? p.x : (pull.x + p.x) / 2, on ? p.y : (pull.y + p.y) / 2};
    for (int i = 1; i <= 8 && ink != INK_NONE && (on || pulled); i++) {
      double t = i / 8.0, u = 1 - t;
      Point q = {u * u * from.x + 2 * u * t * pull.x + t * t * end.x,
                 u * u * from.y + 2 * u * t * pull.y + t * t * end.y};
      draw_segment(last, q, r, 0, ink);
      last = q;
    }
    if (on || pulled) from = end;
    pull = p;
    pulled = !on;
    right = fmax(right, gx);
  }
  return unit * (right + (letter == ' ' ? 6 : 4));
}

static double text_width(const char* s, double size) {
  Point p = {0, 0};
  for (; *s; s++) p.x += draw_glyph(*s, p, size, INK_NONE);
  return p.x - 4 * size / 14;
}

// Text with baseline y; x is its start (align 0), middle (0.5) or end (1). Shrinks to fit room.
static void draw_text(double x, double y, double align, double room, double size, Ink ink,
                      const char* s) {
  size *= fmin(1, room / fmax(text_width(s, size), 1));
  Point at = {round(x - align * text_width(s, size)), round(y)};  // whole pixels: sharp stems
  for (; *s; s++) at.x += draw_glyph(*s, at, size, ink);
}

typedef enum { SCALE_LINEAR, SCALE_MIB, SCALE_LOG2, SCALE_LOG10 } ScaleKind;
typedef struct {
  ScaleKind kind;
  double lo, hi, from, to;  // values, pixels
} Scale;
typedef struct {
  Box box, in;  // the whole chart; the plotting area
  Scale x, y;
} Axes;

static Axes new_axes(Box b, double margin, ScaleKind x, ScaleKind y) {
  Box in = {b.x0 + 84, b.y0 + TITLE_SIZE + 72, b.x1 - margin, b.y1 - 62};
  Axes a = {b, in, {x, INFINITY, 0, in.x0, in.x1}, {y, INFINITY, 0, in.y1, in.y0}};
  return a;
}

// Widens the scale to show v > 0 and some room around it; a linear scale begins at zero.
static void include_value(Scale* s, double v) {
  double pad = s->kind < SCALE_LOG2 ? 1.15 : s->kind == SCALE_LOG2 ? 1.5 : 2;
  if (!(v > 0 && v < 1e30)) return;
  s->lo = s->kind < SCALE_LOG2 ? 0 : fmin(s->lo, v / pad);
  s->hi = fmax(s->hi, v * pad);
}

static double to_pixel(const Scale* s, double v) {
  double t = s->kind < SCALE_LOG2 ? v / s->hi : log(v / s->lo) / log(s->hi / s->lo);
  return s->from + t * (s->to - s->from);
}

// The next round value: in steps of a power of two, or doubled, or 1 2 5 of every decade.
static double next_tick(const Scale* s, double v) {
  if (s->kind < SCALE_LOG2) return v + pow(2, ceil(log2(s->hi / 7)));
  bool two = s->kind == SCALE_LOG10 && fabs(v / pow(10, floor(log10(v))) - 2) < 0.01;
  return two ? 2.5 * v : 2 * v;
}

static void draw_axes(const Axes* a, const char* title, const char* x_name, const char* y_name) {
  const Box *b = &a->box, *in = &a->in;
  static const double FIRST[] = {0, 0, 1, 1e-9};  // for every ScaleKind
  double room = b->x1 - b->x0;
  draw_text(b->x0, b->y0 + TITLE_SIZE, 0, room, TITLE_SIZE, INK_DARK, title);
  draw_text(b->x0, b->y0 + TITLE_SIZE + 44, 0, room, LABEL_SIZE, INK_DIM, y_name);
  draw_text((in->x0 + in->x1) / 2, in->y1 + 58, 0.5, room, LABEL_SIZE, INK_DIM, x_name);
  for (double v = FIRST[a->y.kind]; v < a->y.hi; v = next_tick(&a->y, v)) {
    if (v < a->y.lo) continue;
    double at = round(to_pixel(&a->y, v));
    Str name = format_num(v, a->y.kind == SCALE_MIB);
    fill_box(in->x0, at - 1, in->x1, at, INK_GRID);
    draw_text(in->x0 - 8, at + 7, 1, in->x0 - b->x0, LABEL_SIZE, INK_DIM, name.s);
  }
  for (double v = FIRST[a->x.kind]; v < a->x.hi; v = next_tick(&a->x, v)) {
    if (v < a->x.lo) continue;
    double at = round(to_pixel(&a->x, v));
    fill_box(at - 1, in->y1, at + 1, in->y1 + 7, INK_DARK);
    draw_text(at, in->y1 + 28, 0.5, room, LABEL_SIZE, INK_DIM, format_num(v, false).s);
  }
  fill_box(in->x0, in->y1, in->x1, in->y1 + 2, INK_DARK);
}

// Puts a label beside p, in the nearest of 64 places that has no ink; false where none is free.
static bool place_label(const Axes* a, Point p, Ink ink, const char* s) {
  static const Point WAY[] = {{1, 0}, {1, -1}, {1, 1}, {0, -1}, {-1, -1}, {-1, 0}, {0, 1}, {-1, 1}};
  double w = text_width(s, LABEL_SIZE) / 2 + 4, h = LABEL_SIZE / 2 + 5;
  bool is_free = false;
  for (int i = 0; i < 64 && !is_free; i++) {
    double gap = 8 * (i / 8 + 1), x = p.x + WAY[i % 8].x * (w + gap);
    double y = p.y + WAY[i % 8].y * (h + gap);
    is_free = x - w > a->in.x0 && x + w < a->box.x1 && y - h > a->in.y0 - 16 && y + h < a->in.y1;
    for (int d = to_dot(y - h, MAX_H); d < to_dot(y + h, MAX_H) && is_free; d++)
      for (int e = to_dot(x - w, MAX_W); e < to_dot(x + w, MAX_W) && is_free; e++)
        is_free = dots[d][e] <= INK_GRID;
    if (is_free) draw_text(x, y + LABEL_SIZE / 2, 0.5, 2 * w, LABEL_SIZE, ink, s);
  }
  return is_free;
}

// What the charts read: from a row, then from the rules and the probe. Memory adds up part by part.
enum { V_BATCH, V_TOK, V_ROOF, V_NOREUSE, V_WORK, V_FLOPS, V_WEIGHTS, V_KV, V_ACT, V_USED };
enum { V_TPOT50 = 10, V_TPOT95, V_TPOT99, V_TPOT, V_TTFT50, V_TTFT95, V_TTFT99, V_SLO_TPOT };
enum { V_SLO_TTFT = 18, V_MARK, V_LIMIT, V_BEND, V_PEAK };

static double row_value(const SweepReport* r, int i, int v) {
  const SweepRow* w = &r->rows[i];
  Percentiles p = w->tpot, f = w->ttft;
  double n = w->batch, tok = w->output_tok_s, roof = n / w->roof_us * 1e6;
  double noreuse = n / w->noreuse_us * 1e6, chosen = at_percentile(p, r->rules.percentile);
  double work = w->step_flops / w->step_bytes, flops = w->step_flops / w->step_us * 1e6;
  double weights = w->mem_weights_mib, kv = weights + w->mem_kv_mib, act = kv + w->mem_work_mib;
  double used = act + w->mem_other_mib, limit = w->mem_limit_mib;
  double mark = limit * r->rules.watermark_pct / 100;
  double slo1 = r->rules.slo_tpot_ms, slo2 = r->rules.slo_ttft_ms;
  double ridge = r->rate / r->bandwidth;  // the roof: from the first row to the ridge and past it
  double bend = i == 0 ? work : i == 1 ? ridge : fmax(2 * ridge, work);
  double peak = fmin(bend * r->bandwidth, r->rate);
  const double values[] = {n,     tok,  roof,  noreuse, work,  flops,  weights, kv,
                           act,   used, p.p50, p.p95,   p.p99, chosen, f.p50,   f.p95,
                           f.p99, slo1, slo2,  mark,    limit, bend,   peak};
  bool ran = w->status == ROW_OK || v == V_BATCH || v >= V_SLO_TPOT;
  return ran && isfinite(values[v]) && values[v] > 0 ? values[v] : NAN;
}

enum { AS_BAR = -1, AS_SOLID, AS_DOTS = 4, AS_LIMIT = 9, AS_DASHES };  // length of a dash, pixels
static const struct Chart {
  const char *file, *x_name, *y_name, *finding;
  int of, x, y;  // V_... of the finding's ratio; of the points that are marked
} CHARTS[] = {
    {"throughput.png", "batch size", "output tokens/s",
     "Batch %d gives %s times the tokens/s of batch %d", V_TOK, V_BATCH, V_TOK},
    {"latency.png", "batch size", "ms to the first token (TTFT), ms per further token (TPOT)",
     "Batch %d takes %s times the time per token of batch %d", V_TPOT, V_BATCH, V_TPOT},
    {"memory.png", "batch size", "device memory", "Batch %d uses %s times the memory of batch %d",
     V_USED, V_BATCH, V_USED},
    {"roofline.png", "FLOP per byte moved", "FLOP/s",
     "Batch %d does %s times the work per byte of batch %d", V_WORK, V_WORK, V_FLOPS},
    {"frontier.png", "time per output token, ms: left and up is better", "output tokens/s",
     "Batch %d trades %s times the time per token of batch %d for throughput", V_TPOT, V_TPOT,
     V_TOK},
};
static const struct Series {
  int chart, x, y, shape, ink;  // CHARTS[chart], V_..., AS_..., INK_...
  const char* name;
} SERIES[] = {
    {0, V_BATCH, V_TOK, AS_SOLID, INK_BLUE, "achieved"},
    {0, V_BATCH, V_ROOF, AS_DASHES, INK_DARK, "roofline"},
    {0, V_BATCH, V_NOREUSE, AS_DOTS, INK_RED, "no weight reuse"},
    {1, V_BATCH, V_TPOT50, AS_SOLID, INK_BLUE, "TPOT P50"},
    {1, V_BATCH, V_TPOT95, AS_DASHES, INK_BLUE, "TPOT P95"},
    {1, V_BATCH, V_TPOT99, AS_DOTS, INK_BLUE, "TPOT P99"},
    {1, V_BATCH, V_TTFT50, AS_SOLID, INK_GREEN, "TTFT P50"},
    {1, V_BATCH, V_TTFT95, AS_DASHES, INK_GREEN, "TTFT P95"},
    {1, V_BATCH, V_TTFT99, AS_DOTS, INK_GREEN, "TTFT P99"},
    {1, V_BATCH, V_SLO_TPOT, AS_LIMIT, INK_DARK, "SLO for TPOT:"},
    {1, V_BATCH, V_SLO_TTFT, AS_LIMIT, INK_DARK, "SLO for TTFT:"},
    {2, V_BATCH, V_WEIGHTS, AS_BAR, INK_BLUE, "weights"},
    {2, V_BATCH, V_KV, AS_BAR, INK_RED, "KV cache"},
    {2, V_BATCH, V_ACT, AS_BAR, INK_GREEN, "activations, workspace"},
    {2, V_BATCH, V_USED, AS_BAR, INK_DIM, "framework, lost"},
    {2, V_BATCH, V_LIMIT, AS_LIMIT, INK_DARK, "limit"},
    {2, V_BATCH, V_MARK, AS_LIMIT, INK_DARK, "watermark"},
    {3, V_WORK, V_FLOPS, AS_SOLID, INK_BLUE, "achieved"},
    {3, V_BEND, V_PEAK, AS_SOLID, INK_DARK, "roofline"},
    {4, V_TPOT, V_TOK, AS_SOLID, INK_BLUE, "achieved"},
    {4, V_SLO_TPOT, V_TOK, AS_LIMIT, INK_DARK, "SLO"},
};
enum { N_CHARTS = sizeof CHARTS / sizeof CHARTS[0], N_SERIES = sizeof SERIES / sizeof SERIES[0] };

static Point row_point(const Axes* a, const SweepReport* r, int i, int x, int y) {
  Point p = {to_pixel(&a->x, row_value(r, i, x)), to_pixel(&a->y, row_value(r, i, y))};
  return p;
}

// Draws a line through the rows, or bars from zero; then, in a second call, names it at its last
// point, or an earlier one. A limit gets its value; far above the chart it is only a name.
static void draw_series(const Axes* a, const SweepReport* r, const struct Series* s, bool name) {
  double half = 0.2 * (to_pixel(&a->x, 2) - to_pixel(&a->x, 1));  // 0.4 doublings wide
  Point last = {NAN, NAN};
  for (int i = r->n_rows - 1; i >= 0; i--) {
    Point p = row_point(a, r, i, s->x, s->y);
    bool limit = s->shape == AS_LIMIT, bar = s->shape == AS_BAR, drawn = !name && p.y >= a->in.y0;
    if (drawn && bar) {
      fill_box(p.x - half, p.y - 2, p.x + half, p.y, INK_NONE);  // parts them in grey, too
      fill_box(p.x - half, p.y, p.x + half, a->in.y1, (Ink)s->ink);
    } else if (drawn) {
      draw_segment(last, p, limit ? 1 : 1.8, s->shape, (Ink)s->ink);
      if (!limit && s->x != V_BEND) draw_segment(p, p, 5, 0, (Ink)s->ink);
    } else if (name && !isnan(p.y)) {
      double v = row_value(r, i, s->x == V_SLO_TPOT ? s->x : s->y);
      Str value = format_num(v, a->y.kind == SCALE_MIB);
      const char* format = !limit ? "%s" : p.y < a->in.y0 ? "%s %s, off the chart" : "%s %s";
      Point at = {bar ? p.x + half : p.x, fmax(p.y, a->in.y0)};
      if (place_label(a, at, (Ink)s->ink, format_str(format, s->name, value.s).s)) return;
    }
    if (s->shape != AS_LIMIT || isnan(last.x + last.y)) last = p;  // one line of regular dashes
  }
}

// Names the working point, what does not fit and, where x is not the batch, the other points.
static void name_points(const Axes* a, const SweepReport* r, const struct Chart* chart) {
  for (int i = r->n_rows - 1; i >= 0; i--) {
    bool working = i == r->knee.working;
    Point p = row_point(a, r, i, chart->x, chart->y), foot = {p.x, a->in.y1 - 20};
    if (working || chart->x != V_BATCH) {
      Str batch = format_str(working ? "working point: batch %d" : "%d", r->rows[i].batch);
      place_label(a, p, working ? INK_DARK : INK_DIM, batch.s);
    } else if (r->rows[i].status != ROW_OK) {
      draw_text(p.x, a->in.y1 - 6, 0.5, 99, TITLE_SIZE, INK_RED, "x");
      bool first = i == 0 || r->rows[i - 1].status == ROW_OK;
      if (first) place_label(a, foot, INK_RED, "does not fit");
    }
  }
}

// False where nothing was measured that the chart could show: a table from elsewhere.
static bool has_chart(const SweepReport* r, int chart) {
  const struct Chart* c = &CHARTS[chart];
  for (int i = 0; i < r->n_rows; i++)
    if (!isnan(row_value(r, i, c->x)) && !isnan(row_value(r, i, c->y))) return true;
  return false;
}

static Str sweep_title(const SweepReport* r, Str t) {
  if (r->knee.working < 0) t = format_str("No working point: %s", r->knee.why);
  return format_str("%s%s", r->simulated ? "Simulated. " : "", t.s);
}

static void draw_chart(Box b, const SweepReport* r, int w, int chart) {
  const struct Chart* c = &CHARTS[chart];
  Axes a = new_axes(b, 210, c->x == V_BATCH ? SCALE_LOG2 : SCALE_LOG10,
                    c->y == V_USED ? SCALE_MIB : SCALE_LOG10);
  for (int k = 0; k < N_SERIES; k++)
    for (int i = 0; i < r->n_rows && SERIES[k].chart == chart; i++) {
      double y = row_value(r, i, SERIES[k].y), far = c->y == V_USED ? 4 * a.y.hi : INFINITY;
      include_value(&a.x, row_value(r, i, SERIES[k].x));
      if (SERIES[k].shape != AS_LIMIT || far <= 0 || y < far) include_value(&a.y, y);
    }
  Str ratio = format_num(row_value(r, w, c->of) / row_value(r, 0, c->of), false);
  Str title = format_str(c->finding, r->rows[w].batch, ratio.s, r->rows[0].batch);
  if (w == 0) title = format_str("Batch %d is the working point", r->rows[w].batch);
  if (w > 0 && strcmp(ratio.s, "n/a") == 0) title = format_str("Not measured: %s", c->y_name);
  draw_axes(&a, sweep_title(r, title).s, c->x_name, c->y_name);
  for (int k = N_SERIES - 1; k >= 0; k--)
    if (SERIES[k].chart == chart) draw_series(&a, r, &SERIES[k], false);
  Point p = row_point(&a, r, w, c->x, c->y);
  if (r->knee.working >= 0) draw_segment(p, p, 11, 0, INK_DARK);
  if (r->knee.working >= 0) draw_segment(p, p, 8, 0, INK_GOLD);
  for (int k = 0; k < N_SERIES; k++)
    if (SERIES[k].chart == chart) draw_series(&a, r, &SERIES[k], true);
  name_points(&a, r, c);
}

static void draw_summary(Box b, const SweepReport* r, int w) {
  double room = b.x1 - b.x0, width = (room - 60) / 2, height = (b.y1 - b.y0 - 188) / 2;
  Str head = format_str("%s on %s: run batch %d", r->model, r->device, r->rows[w].batch);
  Str tok = format_num(row_value(r, w, V_TOK), false);
  Str ms = format_num(row_value(r, w, V_TPOT), false);
  Str tip = format_str("Expect %s tokens/s, P%d %s ms/token.", tok.s, r->rules.percentile, ms.s);
  draw_text(b.x0, b.y0 + 36, 0, room, 36, INK_DARK, sweep_title(r, head).s);
  if (r->knee.working >= 0) draw_text(b.x0, b.y0 + 86, 0, room, 21, INK_DARK, tip.s);
  for (int k = 0, at = 0; k < N_CHARTS && at < 4; k++) {
    double x = b.x0 + at % 2 * (width + 60), y = b.y0 + 140 + at / 2 * (height + 48);
    Box panel = {x, y, x + width, y + height};
    if (has_chart(r, k)) draw_chart(panel, r, w, k);
    at += has_chart(r, k);
  }
}

// Draws the charts and then the summary, and puts each into dir, whole or not at all.
static bool plot_sweep(const SweepReport* r, const char* dir, char* err) {
  int working = r->knee.working < 0 ? 0 : r->knee.working, size = 0;
  for (int k = 0; k <= N_CHARTS && r->n_rows > 0; k++) {
    int w = k < N_CHARTS ? 1600 : MAX_W, h = k < N_CHARTS ? 1000 : MAX_H;
    const SweepRow* row = &r->rows[working];
    Box page = {36, 32, w - 36.0, h - 96.0};
    ResultFile file;
    if (!result_open(&file, dir, k < N_CHARTS ? CHARTS[k].file : "summary.png", err)) return false;
    if (k < N_CHARTS && !has_chart(r, k)) {  // nor may one of another run stay there
      fclose(file.f);
      remove(file.tmp);
      remove(file.path);
      continue;
    }
    memset(dots, INK_NONE, sizeof dots);
    if (k < N_CHARTS) draw_chart(page, r, working, k);
    if (k == N_CHARTS) draw_summary(page, r, working);
    Str foot = format_str("%s on %s: %d tokens in, %d out; %d requests at batch %d", r->model,
                          r->device, row->input_len, row->output_len, row->n_requests, row->batch);
    if (row->input_len == 0 || row->output_len == 0 || row->n_requests == 0)
      foot = format_str("%s on %s", r->model, r->device);  // that is all a foreign table says
    draw_text(36, h - 54, 0, w - 72, LABEL_SIZE, INK_DIM, foot.s);
    foot = format_str("Why it stops: %s", r->knee.why);
    draw_text(36, h - 28, 0, w - 72, LABEL_SIZE, INK_DIM, foot.s);
    for (int i = 0; i < w * h * 3; i++) {
      int x = i / 3 % w * DOTS, y = i / 3 / w * DOTS, shift = 16 - i % 3 * 8, sum = 0;
      for (int d = 0; d < DOTS * DOTS; d++)
        sum += INK_RGB[dots[y + d / DOTS][x + d % DOTS]] >> shift & 255;
      rgb[i] = (uint8_t)(sum / (DOTS * DOTS));
    }
    uint8_t* png = stbi_write_png_to_mem(rgb, 3 * w, w, h, 3, &size);
    if (!png) die("no memory to write %s", file.path);
    fwrite(png, 1, (size_t)size, file.f);  // result_close() sees an error
    free(png);
    if (!result_close(&file, err)) return false;
  }
  return true;
}
