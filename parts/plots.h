// ---- Plots. What this section teaches: a chart needs no library. A picture is a grid of dots, 4 x
// 4 to a pixel; averaging a pixel's dots is anti-aliasing. Everything drawn is a box or a thick
// segment, letters too. A scale maps a value to a pixel, through log(value) where doublings should
// look equal. A label takes the nearest place without ink. The sweep's charts are two tables.

// Okabe and Ito's colours, distinct to every common colour vision; dashes serve grey prints.
typedef enum { INK_NONE, INK_GRID, INK_DIM, INK_DARK, INK_BLUE, INK_GREEN, INK_GOLD, INK_RED } Ink;
enum { INK_HATCH = 8 };  // of a box only: stripes of red and nothing
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
  if (isnan(v) || v == 0) return format_str(v == 0 ? "0" : "n/a");
  return format_str("%.3g%s%.1s%s", v, mib ? " " : "", &"\0kMGTPE"[unit], mib ? "iB" : "");
}

// A pixel coordinate in dots, of which there are n pixels' worth; 0 for NaN.
static int to_dot(double v, int n) {
  return (int)fmin(fmax(round(v * DOTS), 0), n * DOTS);
}

static void fill_box(double x0, double y0, double x1, double y1, int ink) {
  int left = to_dot(x0, MAX_W), right = to_dot(x1, MAX_W), end = to_dot(y1, MAX_H);
  for (int y = to_dot(y0, MAX_H); y < end; y++)
    for (int x = left; x < right; x++) {
      int stripe = (x + y) % 28 < 9 ? INK_RED : INK_NONE;
      dots[y][x] = (uint8_t)(ink == INK_HATCH ? stripe : ink);
    }
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

// The largest of 1, 2, 5, 10, 20, 50, ... that is not above v > 0.
static double round_down(double v) {
  double unit = pow(10, floor(log10(v)));
  return unit * (v < 2 * unit ? 1 : v < 5 * unit ? 2 : 5);
}

// The next round value: evenly spaced, or doubled, or 1 2 5 of every decade, or 1 of every few.
static double next_tick(const Scale* s, double v) {
  if (s->kind == SCALE_LINEAR) return v + round_down(s->hi / 5);
  if (s->kind == SCALE_MIB) return v + pow(2, ceil(log2(s->hi / 7)));
  if (s->kind == SCALE_LOG10 && s->hi / s->lo > 1e4) return v * (s->hi / s->lo > 1e12 ? 1e6 : 10);
  bool two = s->kind == SCALE_LOG10 && fabs(v / pow(10, floor(log10(v))) - 2) < 0.01;
  return two ? 2.5 * v : 2 * v;
}

static const double FIRST_TICK[] = {0, 0, 1, 1e-9};  // for every ScaleKind

static void draw_x_axis(const Axes* a, const char* name) {
  const Box* in = &a->in;
  double room = a->box.x1 - a->box.x0;
  draw_text((in->x0 + in->x1) / 2, in->y1 + 58, 0.5, room, LABEL_SIZE, INK_DIM, name);
  for (double v = FIRST_TICK[a->x.kind]; v < a->x.hi; v = next_tick(&a->x, v)) {
    if (v < a->x.lo) continue;
    double at = round(to_pixel(&a->x, v));
    fill_box(at - 1, in->y1, at + 1, in->y1 + 7, INK_DARK);
    Str tick = a->x.kind == SCALE_LOG2 ? format_str("%.0f", v) : format_num(v, false);
    draw_text(at, in->y1 + 28, 0.5, room, LABEL_SIZE, INK_DIM, tick.s);  // 1024, not 1.02k
  }
  fill_box(in->x0, in->y1, in->x1, in->y1 + 2, INK_DARK);
}

static void draw_axes(const Axes* a, const char* title, const char* x_name, const char* y_name) {
  const Box *b = &a->box, *in = &a->in;
  double room = b->x1 - b->x0;
  draw_text(b->x0, b->y0 + TITLE_SIZE, 0, room, TITLE_SIZE, INK_DARK, title);
  draw_text(b->x0, b->y0 + TITLE_SIZE + 44, 0, room, LABEL_SIZE, INK_DIM, y_name);
  for (double v = FIRST_TICK[a->y.kind]; v < a->y.hi; v = next_tick(&a->y, v)) {
    if (v < a->y.lo) continue;
    double at = round(to_pixel(&a->y, v));
    Str name = format_num(v, a->y.kind == SCALE_MIB);
    fill_box(in->x0, at - 1, in->x1, at, INK_GRID);
    draw_text(in->x0 - 8, at + 7, 1, in->x0 - b->x0, LABEL_SIZE, INK_DIM, name.s);
  }
  draw_x_axis(a, x_name);
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

// The lowest two lines of a page of w x h pixels.
static void draw_foot(int w, int h, const char* first, const char* second) {
  draw_text(36, h - 54, 0, w - 72, LABEL_SIZE, INK_DIM, first);
  draw_text(36, h - 28, 0, w - 72, LABEL_SIZE, INK_DIM, second);
}

// Turns the dots into a picture and puts it into dir, whole or not at all.
static bool write_png(int w, int h, const char* dir, const char* name, char* err) {
  ResultFile file;
  int size = 0;
  if (!result_open(&file, dir, name, err)) return false;
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
  return result_close(&file, err);
}

// What the charts read: from a row, then from the rules and the probe. Memory adds up part by part.
// clang-format off
enum { V_BATCH, V_TOK, V_ROOF, V_NOREUSE, V_WORK, V_FLOPS, V_WEIGHTS, V_KV, V_ACT, V_USED,
       V_TPOT50, V_TPOT95, V_TPOT99, V_TPOT, V_TTFT50, V_TTFT95, V_TTFT99, V_SLO_TPOT,
       V_SLO_TTFT, V_MARK, V_LIMIT, V_BEND, V_PEAK, V_STEP, V_ROOF_US, V_PREDICTED };
// clang-format on

// A row's tokens/s if each decode step took so long and its prompts as long as they did; without
// the prompts where their time is not known.
static double tokens_per_s(const SweepRow* w, double step_us) {
  double tokens = (double)w->batch * w->output_len;
  double prompts = (double)w->batch * w->input_len / w->prefill_tok_s;
  double known = tokens / (prompts + (w->output_len - 1) * step_us * 1e-6);
  return prompts > 0 && w->output_len > 1 ? known : w->batch / step_us * 1e6;
}

static double row_value(const SweepReport* r, int i, int v) {
  const SweepRow* w = &r->rows[i];
  Percentiles p = w->tpot, f = w->ttft;
  double n = w->batch, tok = w->output_tok_s, roof = tokens_per_s(w, w->roof_us);
  double noreuse = tokens_per_s(w, w->noreuse_us), chosen = at_percentile(p, r->rules.percentile);
  double work = w->step_flops / w->step_bytes, flops = w->step_flops / w->step_us * 1e6;
  double weights = w->mem_weights_mib, kv = weights + w->mem_kv_mib, act = kv + w->mem_work_mib;
  double used = act + (isnan(w->mem_other_mib) ? 0 : w->mem_other_mib), limit = w->mem_limit_mib;
  double mark = limit * r->rules.watermark_pct / 100;
  double slo1 = r->rules.slo_tpot_ms, slo2 = r->rules.slo_ttft_ms;
  double ridge = r->rate / r->bandwidth;  // the roof: from the first row to the ridge and past it
  double bend = i == 0 ? work : i == 1 ? ridge : fmax(2 * ridge, work);
  double peak = fmin(bend * r->bandwidth, r->rate);
  double step = w->step_us, roof_us = w->roof_us;
  Prediction guess = predict(r->rows, r->n_rows);
  double predicted = predicted_us(&guess, w);
  const double values[] = {n,    tok,   roof,  noreuse, work,   flops, weights, kv,       act,
                           used, p.p50, p.p95, p.p99,   chosen, f.p50, f.p95,   f.p99,    slo1,
                           slo2, mark,  limit, bend,    peak,   step,  roof_us, predicted};
  bool ran = w->status == ROW_OK || v == V_BATCH || (v >= V_SLO_TPOT && v <= V_PEAK);
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
    {"step.png", "batch size", "time of a decode step, us; in %: predicted / measured - 1",
     "Batch %d takes %s times the step of batch %d", V_STEP, V_BATCH, V_STEP},
};
static const struct Series {
  int chart, x, y, shape, ink;  // CHARTS[chart], V_..., AS_..., INK_...
  const char* name;
} SERIES[] = {
    {0, V_BATCH, V_TOK, AS_SOLID, INK_BLUE, "achieved"},
    {0, V_BATCH, V_ROOF, AS_DASHES, INK_DARK, "roofline"},
    {0, V_BATCH, V_NOREUSE, AS_DOTS, INK_RED, "roofline, no weight reuse"},
    {1, V_BATCH, V_TPOT50, AS_SOLID, INK_BLUE, "TPOT P50"},
    {1, V_BATCH, V_TPOT95, AS_DASHES, INK_BLUE, "TPOT P95"},
    {1, V_BATCH, V_TPOT99, AS_DOTS, INK_BLUE, "TPOT P99"},
    {1, V_BATCH, V_TTFT50, AS_SOLID, INK_GREEN, "TTFT P50"},
    {1, V_BATCH, V_TTFT95, AS_DASHES, INK_GREEN, "TTFT P95"},
    {1, V_BATCH, V_TTFT99, AS_DOTS, INK_GREEN, "TTFT P99"},
    {1, V_BATCH, V_SLO_TPOT, AS_LIMIT, INK_DARK, "SLO for TPOT:"},
    {1, V_BATCH, V_SLO_TTFT, AS_LIMIT, INK_DARK, "SLO for TTFT:"},
    {2, V_BATCH, V_LIMIT, AS_LIMIT, INK_DARK, "limit"},  // named first, at their lines
    {2, V_BATCH, V_MARK, AS_LIMIT, INK_DARK, "watermark"},
    {2, V_BATCH, V_WEIGHTS, AS_BAR, INK_BLUE, "weights"},
    {2, V_BATCH, V_KV, AS_BAR, INK_RED, "KV cache"},
    {2, V_BATCH, V_ACT, AS_BAR, INK_GREEN, "activations, workspace"},
    {2, V_BATCH, V_USED, AS_BAR, INK_DIM, "framework, lost"},
    {3, V_WORK, V_FLOPS, AS_SOLID, INK_BLUE, "achieved"},
    {3, V_BEND, V_PEAK, AS_SOLID, INK_DARK, "roofline"},
    {4, V_TPOT, V_TOK, AS_SOLID, INK_BLUE, "achieved"},
    {4, V_SLO_TPOT, V_TOK, AS_LIMIT, INK_DARK, "SLO"},
    {5, V_BATCH, V_STEP, AS_SOLID, INK_BLUE, "measured"},
    {5, V_BATCH, V_ROOF_US, AS_DASHES, INK_DARK, "roofline"},
    {5, V_BATCH, V_PREDICTED, AS_DOTS, INK_RED, "read, multiply, overhead"},
};
enum { N_CHARTS = sizeof CHARTS / sizeof CHARTS[0], N_SERIES = sizeof SERIES / sizeof SERIES[0] };

static Point row_point(const Axes* a, const SweepReport* r, int i, int x, int y) {
  Point p = {to_pixel(&a->x, row_value(r, i, x)), to_pixel(&a->y, row_value(r, i, y))};
  return p;
}

// Lines that nobody could tell apart: percentiles of the same latency, within 3% in every row.
static bool coincide(const SweepReport* r, const struct Series* a, const struct Series* b) {
  bool same = a->chart == b->chart && a->ink == b->ink && a->y >= V_TPOT50 && b->y <= V_TTFT99;
  for (int i = 0; i < r->n_rows && same; i++) {
    double ratio = row_value(r, i, a->y) / row_value(r, i, b->y);
    same = r->rows[i].status != ROW_OK || fabs(ratio - 1) < 0.03;  // NaN: not measured, not equal
  }
  return same;
}

// "TPOT P50" or, for lines that coincide, "TPOT P50 to P99"; none for those that the name includes.
static Str series_name(const SweepReport* r, const struct Series* s) {
  const struct Series* last = s;
  Str none = {""};
  if (s > SERIES && coincide(r, s - 1, s)) return none;
  while (last + 1 < SERIES + N_SERIES && coincide(r, last, last + 1)) last++;
  bool measured = strcmp(s->name, "achieved") == 0 || s->y == V_STEP;
  if (r->simulated && measured) return format_str("predicted");
  return last == s ? format_str("%s", s->name) : format_str("%s to %s", s->name, last->name + 5);
}

// Draws a line through the rows, or bars from zero; then, in a second call, names it at its last
// point, or an earlier one. A limit gets its value; far above the chart it is only a name.
static void draw_series(const Axes* a, const SweepReport* r, const struct Series* s, bool name) {
  double half = 0.2 * (to_pixel(&a->x, 2) - to_pixel(&a->x, 1));  // 0.4 doublings wide
  Point last = {NAN, NAN};
  Str text = series_name(r, s);
  for (int i = r->n_rows - 1; i >= 0 && (!name || text.s[0]); i--) {
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
      Str label =
          limit ? format_str("%s %s%s", text.s, value.s, p.y < a->in.y0 ? ", off the chart" : "")
                : text;
      Point at = {p.x, fmax(p.y, a->in.y0)};
      if (bar) {  // beside the middle of its part
        double foot = s->y == V_WEIGHTS ? a->in.y1 : row_point(a, r, i, s->x, s[-1].y).y;
        at.x += half;
        at.y = (p.y + foot) / 2;
      }
      if (place_label(a, at, (Ink)s->ink, label.s)) return;
    }
    if (s->shape != AS_LIMIT || isnan(last.x + last.y)) last = p;  // one line of regular dashes
  }
}

// Names the working point, what does not fit and, where x is not the batch, the other points.
static void name_points(const Axes* a, const SweepReport* r, const struct Chart* chart) {
  for (int i = r->n_rows - 1; i >= 0; i--) {
    bool working = i == r->knee.working;
    Point p = row_point(a, r, i, chart->x, chart->y), foot = {p.x, a->in.y1 - 20};
    double miss = round(100 * (row_value(r, i, V_PREDICTED) / row_value(r, i, V_STEP) - 1));
    if (chart->y == V_STEP && !isnan(miss) && &r->rows[i] != predict(r->rows, r->n_rows).first)
      place_label(a, p, INK_RED, format_str("%+.0f%%", miss + 0).s);  // -0 + 0 = 0
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
  const char* cut = r->knee.rule == STOP_INTERRUPT ? "Interrupted. " : "";
  return format_str("%s%s%s", r->simulated ? "Simulated. " : "", cut, t.s);
}

static void draw_chart(Box b, const SweepReport* r, int w, int chart) {
  const struct Chart* c = &CHARTS[chart];
  Axes a = new_axes(b, 210, c->x == V_BATCH ? SCALE_LOG2 : SCALE_LOG10,
                    c->y == V_USED ? SCALE_MIB : SCALE_LOG10);
  for (int k = N_SERIES - 1; k >= 0; k--)  // bars before limits, which may be far above them
    for (int i = 0; i < r->n_rows && SERIES[k].chart == chart; i++) {
      double y = row_value(r, i, SERIES[k].y), far = c->y == V_USED ? 4 * a.y.hi : INFINITY;
      include_value(&a.x, row_value(r, i, SERIES[k].x));
      if (SERIES[k].shape != AS_LIMIT || far <= 0 || y < far) include_value(&a.y, y);
    }
  Str ratio = format_num(row_value(r, w, c->of) / row_value(r, 0, c->of), false);
  Str title = format_str(c->finding, r->rows[w].batch, ratio.s, r->rows[0].batch);
  Prediction guess = predict(r->rows, r->n_rows);
  if (c->y == V_STEP && guess.checked > 0)
    title = format_str("Reading, then multiplying, %s %.0f us of %s: %s %.0f%%",
                       guess.overhead < 0 ? "less" : "plus", fabs(guess.overhead),
                       guess.overhead < 0 ? "overlap" : "overhead",
                       guess.worst > 20               ? "misses steps by up to"
                       : guess.checked < guess.others ? "some steps within"
                                                      : "every step within",
                       ceil(guess.worst));
  else if (w == 0)
    title = format_str("Batch %d is the working point", r->rows[w].batch);
  if (w > 0 && strcmp(ratio.s, "n/a") == 0) title = format_str("Not measured: %s", c->y_name);
  const char* y_name =
      c->y == V_STEP && guess.checked == 0 ? "time of a decode step, us" : c->y_name;
  draw_axes(&a, sweep_title(r, title).s, c->x_name, y_name);
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
  Str tip = format_str("Expect %s tokens/s", tok.s);
  if (!isnan(row_value(r, w, V_TPOT)))
    tip = format_str("%s, P%d %s ms/token", tip.s, r->rules.percentile, ms.s);
  draw_text(b.x0, b.y0 + 36, 0, room, 36, INK_DARK, sweep_title(r, head).s);
  if (r->knee.working >= 0) draw_text(b.x0, b.y0 + 86, 0, room, 21, INK_DARK, tip.s);
  for (int k = 0, at = 0; k < N_CHARTS && at < 4; k++) {
    double x = b.x0 + at % 2 * (width + 60), y = b.y0 + 140 + at / 2 * (height + 48);
    Box panel = {x, y, x + width, y + height};
    if (has_chart(r, k)) draw_chart(panel, r, w, k);
    at += has_chart(r, k);
  }
}

// Draws the charts and then the summary, each into a file of dir.
static bool plot_sweep(const SweepReport* r, const char* dir, char* err) {
  int working = r->knee.working < 0 ? 0 : r->knee.working;
  for (int k = 0; k <= N_CHARTS && r->n_rows > 0; k++) {
    int w = k < N_CHARTS ? 1600 : MAX_W, h = k < N_CHARTS ? 1000 : MAX_H;
    const SweepRow* row = &r->rows[working];
    Box page = {36, 32, w - 36.0, h - 96.0};
    const char* name = k < N_CHARTS ? CHARTS[k].file : "summary.png";
    if (k < N_CHARTS && !has_chart(r, k)) {  // nor may one of another run stay there
      char old[4200];
      snprintf(old, sizeof old, "%s/%s", dir, name);
      remove(old);
      continue;
    }
    memset(dots, INK_NONE, sizeof dots);
    if (k < N_CHARTS) draw_chart(page, r, working, k);
    if (k == N_CHARTS) draw_summary(page, r, working);
    Str foot = format_str("%s on %s: %d tokens in, %d out; %d request%s at batch %d", r->model,
                          r->device, row->input_len, row->output_len, row->n_requests,
                          row->n_requests == 1 ? "" : "s", row->batch);
    if (row->input_len == 0 || row->output_len == 0 || row->n_requests == 0)
      foot = format_str("%s on %s", r->model, r->device);  // that is all a foreign table says
    draw_foot(w, h, foot.s, format_str("Why it stops: %s", r->knee.why).s);
    if (!write_png(w, h, dir, name, err)) return false;
  }
  return true;
}

static Str knee_batch(const SweepReport* r) {
  return r->knee.working < 0 ? format_str("no batch")
                             : format_str("batch %d", r->rows[r->knee.working].batch);
}

// Memory against batch, a curve for each report, with its working point: what if the model had
// other key/value heads? names[i] is what report i is called, up to a colon, and what else it is.
static bool plot_what_if(const SweepReport* reports, const Str* names, int n, const char* dir,
                         char* err) {
  static const Ink INKS[] = {INK_BLUE, INK_RED, INK_GREEN, INK_DIM, INK_GOLD};
  const SweepReport *first = &reports[0], *last = &reports[n - 1];
  double limit = row_value(first, 0, V_LIMIT), mark = row_value(first, 0, V_MARK);
  Box page = {36, 32, 1564, 904};
  Axes a = new_axes(page, 210, SCALE_LOG2, SCALE_MIB);
  for (int i = 0; i < first->n_rows; i++) include_value(&a.x, row_value(first, i, V_BATCH));
  include_value(&a.y, limit);
  memset(dots, INK_NONE, sizeof dots);
  Str title = format_str("Simulated. %.*s runs %s, %.*s %s", (int)strcspn(names[0].s, ":"),
                         names[0].s, knee_batch(first).s, (int)strcspn(names[n - 1].s, ":"),
                         names[n - 1].s, knee_batch(last).s);
  draw_axes(&a, title.s, "batch size", "device memory");
  double y = to_pixel(&a.y, limit), watermark = to_pixel(&a.y, mark);
  Point from = {a.in.x0, y}, to = {a.in.x1, y}, low = {a.in.x0, watermark},
        end = {a.in.x1, watermark};
  draw_segment(from, to, 1, AS_LIMIT, INK_DARK);
  draw_segment(low, end, 1, AS_LIMIT, INK_DARK);
  place_label(&a, to, INK_DARK, format_str("limit %s", format_num(limit, true).s).s);
  place_label(&a, end, INK_DARK, format_str("watermark %s", format_num(mark, true).s).s);
  for (int pass = 0; pass < 2; pass++)  // labels come last, where the curves leave room
    for (int k = 0; k < n; k++) {
      const SweepReport* r = &reports[k];
      Point at = {NAN, NAN}, knee_at = at;
      for (int i = 0; i < r->n_rows && !(at.y <= a.in.y0); i++) {
        Point p = {to_pixel(&a.x, r->rows[i].batch), to_pixel(&a.y, r->rows[i].mem_used_mib)};
        double up = (at.y - a.in.y0) / (at.y - p.y);  // cut off at the top of the chart
        if (p.y < a.in.y0) p.x = at.x + up * (p.x - at.x);
        if (p.y < a.in.y0) p.y = a.in.y0;
        if (pass == 0) draw_segment(at, p, 1.8, 6 * k, INKS[k % 5]);
        if (pass == 0) draw_segment(p, p, p.y > a.in.y0 ? 5 : 0, 0, INKS[k % 5]);
        at = p;
        if (i == r->knee.working) knee_at = p;
      }
      if (pass == 0) draw_segment(knee_at, knee_at, 11, 0, INK_DARK);
      if (pass == 0) draw_segment(knee_at, knee_at, 8, 0, INK_GOLD);
      if (pass == 0) continue;
      place_label(&a, at, INKS[k % 5], names[k].s);
      if (r->knee.working < 0) continue;
      const SweepRow* w = &r->rows[r->knee.working];
      Str tok = format_num(w->output_tok_s, false);
      place_label(&a, knee_at, INK_DARK, format_str("batch %d, %s tok/s", w->batch, tok.s).s);
    }
  Str foot =
      format_str("%s on %s: %d tokens in, %d out; what if it had other key/value heads",
                 first->model, first->device, first->rows->input_len, first->rows->output_len);
  draw_foot(1600, 1000, foot.s,
            "The dots are the working points: the last batch that breaks no rule");
  return write_png(1600, 1000, dir, "kv_heads.png", err);
}

// ---- The charts of compare: who held which slot when, how long the requests waited, and that the
// spread of output lengths is what makes the policies differ.
// PRECONDITION of all: at most one result per policy; the points of variance.png by rising cv.

static const Ink POLICY_INK[] = {INK_RED, INK_GREEN, INK_BLUE};
static const double POLICY_WIDTH[] = {1.2, 1.8, 2.8};  // tells them apart in grey

// A time, a latency or a ratio that can be drawn; NaN for what was never measured.
static double usable(double v) {
  return v > 1e-30 && v < 1e30 ? v : NAN;
}

static Str format_ms(double ms) {
  Str s = format_num(ms < 1000 ? ms : ms / 1000, false);
  return isnan(ms) ? s : format_str("%s %s", s.s, ms < 1000 ? "ms" : "s");
}

static double policy_ms(const CompareReport* r, const PolicyResult* p, bool latency) {
  double ms = latency ? at_percentile(p->ttft, r->percentile) : p->duration_s * 1000;
  return p->completed > 0 ? usable(ms) : NAN;
}

// The fastest other policy against the first: to finish, or to a first token.
static Str compare_title(const CompareReport* r, bool latency) {
  const PolicyResult *first = r->results, *best = first;
  for (int i = 1; i < r->n_results; i++) {
    double ms = policy_ms(r, &first[i], latency);
    if (ms > 0 && (best == first || ms < policy_ms(r, best, latency))) best = &first[i];
  }
  for (int i = 1; i < r->n_results; i++)  // the subject, if it is as good as any
    if (first[i].policy == POLICY_CONTINUOUS &&
        policy_ms(r, &first[i], latency) <= 1.05 * policy_ms(r, best, latency))
      best = &first[i];
  double own = policy_ms(r, best, latency), ratio = policy_ms(r, first, latency) / own;
  const char* than = policy_names[first->policy];
  bool same = best != first && best->completed == first->completed;
  Str does = format_str("finishes %s%d requests", same ? "the same " : "", best->completed);
  Str gain = format_str("%s times sooner than %s", format_num(ratio, false).s, than);
  if (isnan(own)) return format_str("No request was completed");
  if (latency && (same || best == first))
    does = format_str("gives the first token (P%d)", r->percentile);
  if (ratio < 1.05) gain = format_str("as soon as %s", than);  // 5% are chance
  if (ratio < 0.95) gain = format_str("%.0f%% later than %s", 100 / ratio - 100, than);
  if (best == first || isnan(ratio)) gain = format_str("in %s", format_ms(own).s);
  if (best != first && !same) gain = format_str("against %d with %s", first->completed, than);
  gain = format_str("%s batching %s %s", policy_names[best->policy], does.s, gain.s);
  gain.s[0] = (char)toupper((unsigned char)gain.s[0]);
  return gain;
}

static double last_release(const PolicyResult* p) {
  double last = 0;
  for (int i = 0; i < p->n_spans; i++) last = fmax(last, usable(p->spans[i].release));
  return last;
}

// Seconds to pixels; what lies outside the chart is moved to its edge, NaN to its start.
static double time_pixel(const Axes* a, double s) {
  return fmin(fmax(to_pixel(&a->x, s), a->in.x0), a->in.x1);
}

// The prompt's padding takes its share of the prefill. A prefill too short to see still gets a
// pixel, which parts neighbours.
static void draw_span(const Axes* a, const Span* s, double y0, double y1) {
  double start = time_pixel(a, s->start), finish = time_pixel(a, s->finish);
  double first = isnan(s->first) ? finish : time_pixel(a, s->first);
  double real = s->padded > s->prompt ? (double)s->prompt / s->padded : 1;
  double read = start + (first - start) * real;
  fill_box(first, y0, finish, y1, INK_BLUE);
  fill_box(finish, y0, time_pixel(a, s->release), y1, INK_HATCH);
  fill_box(read, y0, first, y1, INK_HATCH);
  fill_box(start, y0, fmin(fmax(read, start + 1), finish), y1, INK_GOLD);
  if (s->preempted && s->finish <= a->x.hi) fill_box(finish - 3, y0, finish, y1, INK_DARK);
}

// The numbers of one policy over its slots: a row each, with a gap to the next.
static void draw_slots(const Axes* a, const PolicyResult* p, double row, const char* sooner) {
  const Box* in = &a->in;
  int rows = (int)round((in->y1 - in->y0) / row);
  double end = last_release(p), right = time_pixel(a, end), middle = (in->y0 + in->y1) / 2;
  double gap = fmin(row / 4, 3), room = a->box.x1 - right - 14;
  Str tok = format_str("%s tokens/s", format_num(p->output_tok_s, false).s);
  Str work = format_str("slots %s%% occupied", format_num(p->occupancy_pct, false).s);
  Str padding = format_num(p->padding_pct, false);
  padding = format_str("%s%% of computed tokens are padding", padding.s);
  if (p->n_spans == 0) tok.s[0] = work.s[0] = padding.s[0] = '\0';  // nobody was served
  Str lost = format_str("%d preempted, %d rejected, %d timed out", p->preemptions, p->rejected,
                        p->timed_out);
  draw_text(in->x0, in->y0 - 12, 0, 140, 19, INK_DARK, policy_names[p->policy]);
  draw_text(in->x0 + 170, in->y0 - 12, 0, 140, LABEL_SIZE, INK_DARK, tok.s);
  draw_text(in->x0 + 330, in->y0 - 12, 0, 200, LABEL_SIZE, INK_DARK, work.s);
  draw_text(in->x0 + 550, in->y0 - 12, 0, 390, LABEL_SIZE, INK_DARK, padding.s);
  if (p->preemptions + p->rejected + p->timed_out > 0)
    draw_text(in->x0 + 965, in->y0 - 12, 0, 475, LABEL_SIZE, INK_DARK, lost.s);
  for (int i = 0; i < rows; i++)
    fill_box(in->x0, in->y0 + i * row, right, in->y0 + (i + 1) * row - gap, INK_GRID);
  for (int i = 0; i < p->n_spans; i++) {
    const Span* s = &p->spans[i];
    double y = in->y0 + s->slot * row;
    if (s->slot >= 0 && s->slot < rows && s->start < a->x.hi) draw_span(a, s, y, y + row - gap);
  }
  draw_text(in->x0 - 10, in->y0 + 14, 1, 80, LABEL_SIZE, INK_DIM, "slot 1");
  draw_text(in->x0 - 10, in->y1 - gap, 1, 80, LABEL_SIZE, INK_DIM, format_str("slot %d", rows).s);
  if (end <= a->x.hi) fill_box(right, in->y0 - 4, right + 2, in->y1 + 4 - gap, INK_DARK);
  Str done = format_str("%s %s", end > a->x.hi ? "until" : "done:", format_ms(end * 1000).s);
  draw_text(right + 14, middle + 4, 0, room, 19, INK_DARK, end > 0 ? done.s : "empty");
  draw_text(right + 14, middle + 28, 0, room, LABEL_SIZE, INK_DIM, sooner);
}

static void draw_keys(double x, double y, bool preempted) {
  static const struct {
    int ink, width;
    const char* name;
  } KEYS[] = {{INK_GOLD, 24, "prefill: reads the prompt"},
              {INK_BLUE, 24, "decode: writes the answer"},
              {INK_HATCH, 24, "padding: computed for nobody"},
              {INK_GRID, 24, "idle slot"},
              {INK_DARK, 3, "preempted"}};
  for (int i = 0; i < (preempted ? 5 : 4); i++) {
    fill_box(x, y - 16, x + KEYS[i].width, y + 2, KEYS[i].ink);
    draw_text(x + KEYS[i].width + 8, y, 0, 400, LABEL_SIZE, INK_DARK, KEYS[i].name);
    x += KEYS[i].width + text_width(KEYS[i].name, LABEL_SIZE) + 48;
  }
}

// A panel per policy over a common time axis. Returns the height of the page, in pixels.
static int draw_schedule(const CompareReport* r) {
  enum { MAX_ROWS = 64, MAX_STAYS = 100 };  // of a slot: more could not be told apart
  int slots = 1, preemptions = 0;
  double end = 0, stays = 0, y = 106;
  for (int i = 0; i < r->n_results; i++) {
    const PolicyResult* p = &r->results[i];
    slots = p->slots > slots ? p->slots : slots;
    end = fmax(end, last_release(p));
    preemptions += p->preemptions;
    stays = fmax(stays, (double)p->n_spans / (p->slots > 0 ? p->slots : 1));
  }
  int shown = slots < MAX_ROWS ? slots : MAX_ROWS;
  double window = stays > MAX_STAYS ? round_down(end * MAX_STAYS / 2 / stays) : end;
  double row = fmin(fmax(floor(800.0 / (r->n_results * shown)), 4), 30);
  Scale time = {SCALE_LINEAR, 0, window, 120, 1400};
  Axes a = {{36, 32, 1564, 0}, {time.from, 0, time.to, 0}, time, time};
  draw_keys(a.in.x0, y, preemptions > 0);
  for (int i = 0; i < r->n_results; i++) {
    const PolicyResult* p = &r->results[i];
    double ratio = policy_ms(r, r->results, false) / policy_ms(r, p, false);
    bool same = p->completed == r->results->completed;
    Str sooner = format_str("%s times sooner", format_num(ratio, false).s);
    a.in.y0 = y + 60;
    a.in.y1 = y = a.in.y0 + row * (p->slots < shown ? p->slots : shown);
    draw_slots(&a, p, row, same && ratio >= 1.05 ? sooner.s : "");
  }
  a.in.y1 = y + 8;
  Str name = format_str("seconds since the first request's arrival");
  Str first = format_num(window, false), all = format_num(end, false);
  if (window < end) name = format_str("%s; shown: the first %s of %s", name.s, first.s, all.s);
  if (shown < slots) name = format_str("%s; shown: slots 1 to %d of %d", name.s, shown, slots);
  draw_x_axis(&a, name.s);
  return (int)fmin(y + 170, MAX_H);
}

// The share of `all` requests that were served by then, as a staircase over n ascending latencies.
static void draw_cdf(const Axes* a, const double* ms, int n, int all, Policy policy) {
  Point last = {NAN, a->in.y1};
  for (int k = 1; k <= 500 && n > 0; k++) {
    int rank = (int)ceil(k / 500.0 * n);
    Point p = {to_pixel(&a->x, usable(ms[rank - 1])), to_pixel(&a->y, 100.0 * rank / all)};
    Point corner = {p.x, last.y};
    draw_segment(last, corner, POLICY_WIDTH[policy], 0, POLICY_INK[policy]);
    draw_segment(corner, p, POLICY_WIDTH[policy], 0, POLICY_INK[policy]);
    if (!isnan(p.x)) last = p;
  }
}

static void draw_latency(Box b, const CompareReport* r, bool first) {
  const double* ms[N_POLICIES];
  Percentiles all[N_POLICIES];
  Axes a = new_axes(b, 210, SCALE_LOG10, SCALE_LINEAR);
  include_value(&a.x, r->slo_ttft_ms);
  include_value(&a.y, 100);
  for (int i = 0; i < r->n_results; i++) {
    const PolicyResult* p = &r->results[i];
    ms[i] = first ? p->ttft_ms : p->e2e_ms;
    all[i] = first ? p->ttft : p->e2e;
    for (int k = 0; k < p->ttft.n; k++) include_value(&a.x, p->ttft_ms[k]);
    for (int k = 0; k < p->e2e.n; k++) include_value(&a.x, p->e2e_ms[k]);
  }
  draw_axes(&a, "", "ms since the request's arrival",
            first ? "% of requests that have their first token (TTFT)"
                  : "% of requests that have their last token (E2E)");
  Point foot = {to_pixel(&a.x, first ? usable(r->slo_ttft_ms) : NAN), a.in.y1};
  Point top = {foot.x, a.in.y0};
  draw_segment(foot, top, 1, AS_LIMIT, INK_DARK);
  for (int i = 0; i < r->n_results; i++)
    draw_cdf(&a, ms[i], all[i].n, r->results[i].requests, r->results[i].policy);
  place_label(&a, foot, INK_DARK, format_str("SLO %s", format_ms(r->slo_ttft_ms).s).s);
  for (int i = 0; i < r->n_results; i++) {
    Policy policy = r->results[i].policy;
    double value = usable(at_percentile(all[i], r->percentile));
    double share = (double)all[i].n / (r->results[i].requests > 0 ? r->results[i].requests : 1);
    Point p = {to_pixel(&a.x, value), to_pixel(&a.y, r->percentile * share)};
    Str s = format_str("%s: P%d %s (%d)", policy_names[policy], r->percentile, format_ms(value).s,
                       all[i].n);
    draw_segment(p, p, 6, 0, POLICY_INK[policy]);
    if (isnan(p.x)) p.x = (a.in.x0 + a.in.x1) / 2;  // no sample: says so
    place_label(&a, p, POLICY_INK[policy], s.s);
  }
}

// What continuous batching gains over static: as the lengths alone would have it, or measured.
static double gain_of(const VariancePoint* p, bool measured) {
  double gain = measured ? p->continuous_tok_s / p->static_tok_s : p->ideal;
  return p->cv >= 0 && p->cv < 1e30 ? usable(gain) : NAN;
}

static Str variance_title(const CompareReport* r) {
  const VariancePoint *low = r->points, *high = low + r->n_points - 1;
  Str more = format_str(", %.2f at %.3g", gain_of(high, true), high->cv);
  return format_str("Continuous batching gives %.2f times static's tokens/s at spread %.3g%s",
                    gain_of(low, true), low->cv, low == high ? "" : more.s);
}

static void draw_variance(Box b, const CompareReport* r) {
  static const Ink INKS[] = {INK_DARK, INK_BLUE};
  Axes a = new_axes(b, 210, SCALE_LINEAR, SCALE_LINEAR);
  Point last[] = {{NAN, NAN}, {NAN, NAN}};  // ideal, measured
  include_value(&a.x, 1);
  include_value(&a.y, 1);
  for (int i = 0; i < 2 * r->n_points; i++) {
    include_value(&a.x, r->points[i / 2].cv);
    include_value(&a.y, gain_of(&r->points[i / 2], i % 2));
  }
  a.x.from += 40;  // a spread of zero is a point like others
  draw_axes(&a, "", "spread of the output lengths: standard deviation / mean",
            "output tokens/s: continuous / static");
  Point one = {a.in.x0, to_pixel(&a.y, 1)}, right = {a.in.x1, one.y};
  draw_segment(one, right, 1, AS_LIMIT, INK_DARK);
  for (int i = 0; i < 2 * r->n_points; i++) {
    double gain = gain_of(&r->points[i / 2], i % 2);
    Point p = {to_pixel(&a.x, r->points[i / 2].cv), to_pixel(&a.y, gain)};
    draw_segment(last[i % 2], p, 1.8, i % 2 ? AS_SOLID : AS_DASHES, INKS[i % 2]);
    draw_segment(p, p, i % 2 ? 6 : 4, 0, INKS[i % 2]);
    if (!isnan(gain)) last[i % 2] = p;
  }
  place_label(&a, right, INK_DARK, "1: as good as static");
  place_label(&a, last[0], INK_DARK, "ideal, from the lengths alone");
  place_label(&a, last[1], INK_BLUE, r->simulated ? "simulated" : "measured");
  for (const VariancePoint* v = r->points; v < r->points + r->n_points; v++) {
    Point p = {to_pixel(&a.x, v->cv), to_pixel(&a.y, gain_of(v, true))};
    place_label(&a, p, INK_BLUE, format_str("%s: %.2f", v->name, gain_of(v, true)).s);
  }
}

// Draws who held which slot, how long requests waited and, where it was measured, what the spread
// of output lengths does, each into a file of dir.
static bool plot_compare(const CompareReport* r, const char* dir, char* err) {
  static const char* const FILES[] = {"schedule.png", "policies.png", "variance.png"};
  static const char* const NOTES[] = {
      "A slot is a row of the batch. Static batching frees all when the longest answer of a batch "
      "ends; continuous batching frees each at once.",
      "TTFT: time to the first token, with queueing. E2E: to the last. In brackets: requests.",
      "Ideal: longest output of a static batch / mean output: static computes every row that "
      "long."};
  for (int k = 0; k < (r->n_points > 0 ? 3 : 2) && r->n_results > 0; k++) {
    int h = k == 1 ? 1260 : 1000;
    Box page = {36, 32, 1564, 904}, top = {36, 32, 1564, 600}, bottom = {36, 584, 1564, 1160};
    memset(dots, INK_NONE, sizeof dots);
    if (k == 0) h = draw_schedule(r);
    if (k == 1) draw_latency(top, r, true);
    if (k == 1) draw_latency(bottom, r, false);
    if (k == 2) draw_variance(page, r);
    Str title = k == 2 ? variance_title(r) : compare_title(r, k == 1);
    title = format_str("%s%s", r->simulated ? "Simulated. " : "", title.s);
    draw_text(36, 32 + TITLE_SIZE, 0, 1528, TITLE_SIZE, INK_DARK, title.s);
    Str foot = format_str("%s on %s: %s", r->model, r->device,
                          k == 2 && r->variance ? r->variance : r->workload);
    draw_foot(1600, h, foot.s, NOTES[k]);
    if (!write_png(1600, h, dir, FILES[k], err)) return false;
  }
  return true;
}
