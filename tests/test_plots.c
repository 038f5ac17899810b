// Tests of the charts of compare: what the dots show, and that no report breaks them.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"

enum { STEP_MS = 10 };    // of the made-up device
#define PREFILL_S 0.0002  // per prompt token, alone or padded

typedef struct {
  PolicyResult result;
  Span* spans;
  double *ttft, *e2e;
} Run;

static uint32_t random_state;

static double uniform(void) {
  random_state = random_state * 1664525u + 1013904223u;
  return (random_state >> 8) / 16777216.0;
}

// n requests, all there at once, with exponential output lengths, through `slots` slots.
static Run make_run(Policy policy, int n, int slots, double spread) {
  Run run;
  memset(&run, 0, sizeof run);
  run.spans = (Span*)xcalloc((size_t)n + 1, sizeof(Span));
  run.ttft = (double*)xcalloc((size_t)n + 1, sizeof(double));
  run.e2e = (double*)xcalloc((size_t)n + 1, sizeof(double));
  double* free_at = (double*)xcalloc((size_t)slots, sizeof(double));
  double busy = 0, tokens = 0, wasted = 0, end = 0, batch_start = 0;
  random_state = 7;
  for (int i = 0; i < n; i++) {
    Span* s = &run.spans[i];
    int length = (int)(128 * (1 - spread) + 128 * spread * -log(1 - uniform())) + 1;
    s->request = i;
    s->prompt = s->padded = 64 + (int)(uniform() * 192);
    s->batch = policy == POLICY_CONTINUOUS ? -1 : i / slots;
    if (policy == POLICY_CONTINUOUS) {
      for (int k = 1; k < slots; k++) s->slot = free_at[k] < free_at[s->slot] ? k : s->slot;
      s->start = free_at[s->slot];
      s->first = s->start + STEP_MS / 1e3 + s->prompt * PREFILL_S;
    } else {
      if (i % slots == 0) batch_start = end;
      s->slot = i % slots;
      s->start = batch_start;
      s->padded = 256;
      s->first = s->start + s->padded * PREFILL_S * fmin(slots, 8);
    }
    s->finish = s->release = s->first + (length - 1) * STEP_MS / 1e3;
    free_at[s->slot] = s->finish;
    end = fmax(end, s->finish);
    busy += s->finish - s->start;
    tokens += length;
    wasted += s->padded - s->prompt;
    run.ttft[i] = s->first * 1e3;
    run.e2e[i] = s->finish * 1e3;
    for (int k = i / slots * slots; k <= i && policy != POLICY_CONTINUOUS; k++)
      run.spans[k].release = end;
  }
  PolicyResult* r = &run.result;
  for (int i = 0; i < n; i++)
    wasted += (run.spans[i].release - run.spans[i].finish) * 1e3 / STEP_MS;
  r->policy = policy;
  r->requests = r->completed = r->n_spans = n;
  r->slots = slots;
  r->duration_s = end;
  r->output_tok_s = tokens / end;
  r->request_per_s = n / end;
  r->occupancy_pct = 100 * busy / end / slots;
  r->padding_pct = 100 * wasted / (wasted + tokens + n * 160);
  r->ttft = percentiles_of(run.ttft, n);
  r->e2e = percentiles_of(run.e2e, n);
  r->spans = run.spans;
  r->ttft_ms = run.ttft;
  r->e2e_ms = run.e2e;
  free(free_at);
  return run;
}

static void free_run(Run* r) {
  free(r->spans);
  free(r->ttft);
  free(r->e2e);
}

static CompareReport make_report(PolicyResult* results, int n) {
  static const VariancePoint POINTS[] = {{"fixed 128", 0, 3010, 3050, 1},
                                         {"uniform 64-192", 0.29, 2090, 3000, 1.47},
                                         {"exp 128", 1, 1010, 2870, 3.4},
                                         {"lognormal 128, 1.5", 1.9, 560, 2510, 5.4}};
  CompareReport r = {results,
                     n,
                     POINTS,
                     4,
                     800,
                     0,
                     95,
                     "llama-3.2-1b",
                     "NVIDIA H200",
                     "256 requests, prompt 64-256, output exp 128, all at once",
                     "256 requests, prompt 128, outputs of mean 128, all at once",
                     false};
  return r;
}

// The picture, asked at a pixel: the ink of the dot in its middle.
static int ink_at(double x, double y) {
  return dots[(int)(y * DOTS) + DOTS / 2][(int)(x * DOTS) + DOTS / 2];
}

// How many dots of the box have this ink.
static int count(Ink ink, double x0, double y0, double x1, double y1) {
  int n = 0;
  for (int y = (int)(y0 * DOTS); y < (int)(y1 * DOTS); y++)
    for (int x = (int)(x0 * DOTS); x < (int)(x1 * DOTS); x++) n += dots[y][x] == ink;
  return n;
}

static bool is_empty(double x0, double y0, double x1, double y1) {
  static const uint8_t nothing[MAX_W * DOTS];  // INK_NONE is 0
  size_t n = (size_t)((x1 - x0) * DOTS);
  for (int y = (int)(y0 * DOTS); y < (int)(y1 * DOTS); y++)
    if (memcmp(&dots[y][(int)(x0 * DOTS)], nothing, n) != 0) return false;
  return true;
}

static bool is_hatched(double x0, double y0, double x1, double y1) {
  double n = (x1 - x0) * (y1 - y0) * DOTS * DOTS;
  int red = count(INK_RED, x0, y0, x1, y1), none = count(INK_NONE, x0, y0, x1, y1);
  return red > 0.2 * n && none > 0.4 * n && red + none == (int)n;
}

static void clear(void) {
  memset(dots, INK_NONE, sizeof dots);
}

static bool same_text(Str s, const char* text) {
  return strcmp(s.s, text) == 0;
}

// ---- one panel of the schedule: 4 slots of 30 pixels, 10 seconds of 100 pixels

static Axes panel_axes(double seconds) {
  Scale time = {SCALE_LINEAR, 0, seconds, 100, 1100};
  Axes a = {{16, 0, 1264, 0}, {100, 100, 1100, 220}, time, time};
  return a;
}

static void test_span_inks(void) {
  const Span spans[] = {
      // slot, request, batch, prompt, padded, start, first, finish, release, preempted
      {0, 0, 0, 50, 100, 0, 2, 4, 8, false},     // half of the prefill is padding; waits for slot 1
      {1, 1, 0, 100, 100, 0, 2, 8, 8, false},    // the longest of the batch
      {2, 2, -1, 100, 100, 1, 2, 5, 5, true},    // preempted
      {2, 2, -1, 100, 100, 6, NAN, 7, 7, true},  // preempted again, while it read its prompt
  };
  Axes a = panel_axes(10);
  PolicyResult p;
  memset(&p, 0, sizeof p);
  p.spans = spans;
  p.n_spans = 4;
  p.slots = 4;
  clear();
  draw_slots(&a, &p, 30, "");
  CHECK(ink_at(150, 113) == INK_GOLD && ink_at(199, 113) == INK_GOLD);  // the prompt, 0 to 1 s
  CHECK(is_hatched(202, 102, 298, 124));                                // its padding, to 2 s
  CHECK(ink_at(301, 113) == INK_BLUE && ink_at(498, 113) == INK_BLUE);  // decode, to 4 s
  CHECK(is_hatched(502, 102, 898, 124));  // finished, but computed until the batch ends
  CHECK(ink_at(250, 143) == INK_GOLD && ink_at(600, 143) == INK_BLUE &&
        ink_at(897, 143) == INK_BLUE);
  CHECK(ink_at(150, 173) == INK_GRID);  // slot 3 is idle before 1 s, then between its stays
  CHECK(ink_at(250, 173) == INK_GOLD && ink_at(400, 173) == INK_BLUE);
  CHECK(ink_at(598, 173) == INK_DARK && ink_at(594, 173) == INK_BLUE);
  CHECK(ink_at(650, 173) == INK_GRID);
  CHECK(ink_at(750, 173) == INK_GOLD && ink_at(798, 173) == INK_DARK);
  CHECK(count(INK_BLUE, 600, 160, 900, 187) == 0);
  CHECK(ink_at(500, 203) == INK_GRID && count(INK_GRID, 100, 190, 900, 217) == 800 * 27 * 16);
  for (int i = 0; i < 4; i++) CHECK(is_empty(100, 127 + 30 * i, 900, 130 + 30 * i), "gap %d", i);
  CHECK(ink_at(900, 150) == INK_DARK && ink_at(900, 200) == INK_DARK);  // everything ended here
  CHECK(is_empty(902, 100, 912, 220) && is_empty(1040, 100, 1264, 220));
  CHECK(is_empty(16, 224, 1264, 400) && is_empty(0, 0, 1264, 68));
  CHECK(count(INK_DARK, 914, 140, 1040, 190) > 300);  // "done: 8 s"
}

// A prefill of a microsecond still parts two neighbours, and a slot out of range draws nothing.
static void test_span_limits(void) {
  const Span spans[] = {
      {3, 0, -1, 9, 9, 0, 1e-6, 5, 5, false}, {3, 1, -1, 9, 9, 5, 5.000001, 8, 8, false},
      {4, 2, -1, 9, 9, 0, 1, 9, 9, false},    {-1, 3, -1, 9, 9, 0, 1, 9, 9, false},
      {2, 4, -1, 9, 9, 7, 8, 20, 20, true},   {1, 5, -1, 9, 9, 12, 13, 20, 20, true},
      {1, 6, -1, 9, 9, NAN, 1, 2, 2, false}};
  Axes a = panel_axes(10);
  PolicyResult p;
  memset(&p, 0, sizeof p);
  p.spans = spans;
  p.n_spans = 7;
  p.slots = 4;
  clear();
  draw_slots(&a, &p, 30, "");
  CHECK(ink_at(600, 203) == INK_GOLD && ink_at(598, 203) == INK_BLUE &&
        ink_at(602, 203) == INK_BLUE);
  CHECK(is_empty(0, 0, 1264, 68) && is_empty(0, 222, 1264, 400));
  // A stay that ends after the window runs to its edge, unmarked; one that starts there, or never,
  // is left out.
  CHECK(ink_at(1099, 173) == INK_BLUE && is_empty(1100, 100, 1112, 220));
  CHECK(count(INK_GRID, 100, 130, 1100, 157) == 1000 * 27 * 16);
  CHECK(count(INK_DARK, 1000, 100, 1101, 220) == 0);  // nor is there an end
}

// ---- the whole schedule

static int lowest_ink(void) {
  for (int y = MAX_H - 1; y > 0; y--)
    if (!is_empty(0, y, MAX_W, y + 1)) return y;
  return 0;
}

static double right_end(Ink ink, double y0, double y1) {
  for (int x = 1500; x > 0; x--)
    if (count(ink, x, y0, x + 1, y1) > 0) return x;
  return 0;
}

// 3 panels of 32 rows of 8 pixels, the first from 166: see draw_schedule().
static void test_schedule(void) {
  Run runs[3];
  PolicyResult results[3];
  for (int i = 0; i < 3; i++) {
    runs[i] = make_run((Policy)i, 256, 32, 1);
    results[i] = runs[i].result;
  }
  CompareReport r = make_report(results, 3);
  clear();
  int h = draw_schedule(&r);
  CHECK(h == 166 + 3 * 256 + 2 * 60 + 170 && lowest_ink() < h - 70, "%d %d", h, lowest_ink());
  CHECK(is_empty(0, 0, 1600, 88) && is_empty(0, 112, 1600, 134));  // the legend touches nothing
  CHECK(count(INK_BLUE, 0, 88, 1600, 110) == 24 * 18 * 16);
  CHECK(count(INK_GOLD, 0, 88, 1600, 110) == 24 * 18 * 16);
  CHECK(count(INK_GRID, 0, 88, 1600, 110) == 24 * 18 * 16);
  CHECK(is_empty(1566, 0, 1600, h) && is_empty(0, 0, 34, h));
  CHECK(is_empty(1240, 88, 1600, 110));  // nothing was preempted
  // The same work, so about as much blue in every panel; on one axis, continuous ends first.
  double blue[3], end[3];
  for (int i = 0; i < 3; i++) {
    blue[i] = count(INK_BLUE, 120, 166 + 316 * i, 1400, 422 + 316 * i);
    end[i] = right_end(INK_BLUE, 166 + 316 * i, 422 + 316 * i);
  }
  CHECK(fabs(blue[2] / blue[0] - 1) < 0.1, "%g %g", blue[0], blue[2]);
  double ratio = (end[0] - 120) / (end[2] - 120),
         real = results[0].duration_s / results[2].duration_s;
  CHECK(fabs(ratio / real - 1) < 0.02 && real > 2, "%g %g", ratio, real);
  CHECK(count(INK_RED, 120, 798, 1400, 1054) == 0);  // continuous pads nothing
  CHECK(count(INK_RED, 120, 166, 1400, 422) > 10000);
  double share = count(INK_GRID, 120, 798, end[2], 1054) / (end[2] - 120) / 192 / 16;
  CHECK(fabs(100 - 100 * share - results[2].occupancy_pct) < 2, "%g", share);
  results[2].preemptions = 1;
  clear();
  draw_schedule(&r);
  CHECK(count(INK_DARK, 1240, 88, 1500, 110) > 300 && is_empty(0, 112, 1600, 134));
  for (int i = 0; i < 3; i++) free_run(&runs[i]);
}

// More slots and stays than can be told apart: the first of both.
static void test_schedule_window(void) {
  Run runs[2] = {make_run(POLICY_STATIC, 20000, 16, 1), make_run(POLICY_CONTINUOUS, 2000, 256, 1)};
  for (int i = 0; i < 2; i++) {
    CompareReport r = make_report(&runs[i].result, 1);
    clear();
    int h = draw_schedule(&r), rows = i ? 64 : 16, row = i ? 12 : 30;
    CHECK(h == 166 + rows * row + 170 && lowest_ink() < h - 70, "%d", h);
    CHECK(count(INK_DARK, 1396, 170, 1404, 160 + rows * row) == 0 || i == 1);
    CHECK(ink_at(125, 166 + rows * row - 6) != INK_NONE);    // the last row
    CHECK(count(INK_DIM, 400, h - 118, 550, h - 98) > 300);  // the axis says what is left out
    free_run(&runs[i]);
  }
}

// ---- titles

static void test_titles(void) {
  PolicyResult p[3];
  memset(p, 0, sizeof p);
  CompareReport r = make_report(p, 3);
  for (int i = 0; i < 3; i++) p[i].policy = (Policy)i;
  CHECK(same_text(compare_title(&r, false), "No request was completed"));
  CHECK(same_text(compare_title(&r, true), "No request was completed"));
  for (int i = 0; i < 3; i++) {
    p[i].completed = 256;
    p[i].duration_s = 29 - 9.5 * i;
    p[i].ttft.p95 = 1000 - 400 * i;
    p[i].ttft.p50 = 10;
  }
  CHECK(
      same_text(compare_title(&r, false),
                "Continuous batching finishes the same 256 requests 2.9 times sooner than static"));
  CHECK(same_text(compare_title(&r, true),
                  "Continuous batching gives the first token (P95) 5 times sooner than static"));
  r.percentile = 50;
  CHECK(same_text(compare_title(&r, true),
                  "Continuous batching gives the first token (P50) as soon as static"));
  p[2].completed = 200;
  CHECK(same_text(compare_title(&r, false),
                  "Continuous batching finishes 200 requests against 256 with static"));
  p[2].duration_s = NAN;
  CHECK(
      same_text(compare_title(&r, false),
                "Bucketed batching finishes the same 256 requests 1.49 times sooner than static"));
  p[0].completed = 0;
  CHECK(same_text(compare_title(&r, true),
                  "Continuous batching finishes 200 requests against 0 with static"));
  r = make_report(p + 1, 1);
  CHECK(same_text(compare_title(&r, false), "Bucketed batching finishes 256 requests in 19.5 s"));
  CHECK(same_text(variance_title(&r),
                  "Continuous batching gives 1.01 times static's tokens/s at "
                  "spread 0, 4.48 at 1.9"));
  r.n_points = 1;
  CHECK(same_text(variance_title(&r),
                  "Continuous batching gives 1.01 times static's tokens/s at "
                  "spread 0"));
  CHECK(same_text(format_ms(999), "999 ms") && same_text(format_ms(1230), "1.23 s"));
}

// ---- latencies and variance

static void test_cdf(void) {
  const double ms[] = {1, 10, 100, 1000}, hole[] = {1, NAN, 1000, 1000};
  Scale x = {SCALE_LOG10, 0.1, 10000, 100, 600}, y = {SCALE_LINEAR, 0, 100, 500, 100};
  Axes a = {{0, 0, 700, 600}, {100, 100, 600, 500}, x, y};
  clear();
  draw_cdf(&a, ms, 4, 4, POLICY_CONTINUOUS);
  CHECK(ink_at(200, 450) == INK_BLUE && ink_at(300, 350) == INK_BLUE);  // up at 1 and at 10 ms
  CHECK(ink_at(250, 400) == INK_BLUE && ink_at(350, 300) == INK_BLUE);  // along 25% and 50%
  CHECK(ink_at(500, 101) == INK_BLUE && ink_at(200, 390) == INK_NONE);
  CHECK(is_empty(204, 404, 500, 500) && is_empty(0, 100, 196, 500) && is_empty(504, 0, 700, 600));
  clear();
  draw_cdf(&a, hole, 4, 4, POLICY_STATIC);
  CHECK(ink_at(350, 400) == INK_RED);  // 25%, until the next known one
  clear();
  draw_cdf(&a, NULL, 0, 4, POLICY_STATIC);
  CHECK(is_empty(0, 0, 700, 600));
  draw_cdf(&a, ms, 4, 8, POLICY_CONTINUOUS);  // half of the requests were never served
  CHECK(ink_at(500, 301) == INK_BLUE && is_empty(0, 100, 700, 296));
}

// Equal latencies hide each other's curves: every policy has its name all the same.
static void test_latency(void) {
  static const double all_equal[] = {40, 40, 40}, spread[] = {10, 100, 1000};
  Box b = {36, 32, 1564, 600};
  for (int n = 0; n <= 3; n++) {
    PolicyResult p[3];
    memset(p, 0, sizeof p);
    for (int i = 0; i < 3; i++) {
      p[i].policy = (Policy)i;
      p[i].ttft_ms = n == 2 ? spread : all_equal;
      p[i].ttft.n = p[i].requests = n;
      p[i].ttft.p95 = n == 0 ? NAN : n == 2 ? 95.5 : 40;
    }
    CompareReport r = make_report(p, 3);
    r.slo_ttft_ms = n == 3 ? 70 : 0;
    clear();
    draw_latency(b, &r, true);
    for (int ink = INK_BLUE; ink <= INK_RED; ink++)
      CHECK(ink == INK_GOLD || count((Ink)ink, 120, 100, 1564, 538) > 1500, "%d %d", n, ink);
    CHECK((count(INK_DARK, 120, 200, 1564, 500) > 300) == (n == 3));  // the SLO
    CHECK(is_empty(1566, 0, MAX_W, 700) && is_empty(0, 0, 34, 700) && is_empty(0, 602, 1600, 700));
  }
}

// Points are where the axes say, on both lines, and the line at 1 is there.
static void test_variance(void) {
  PolicyResult none;
  memset(&none, 0, sizeof none);
  const VariancePoint points[] = {{"fixed", 0, 100, 100, 1}, {"exp", 1, 100, 200, 4}};
  CompareReport r = make_report(&none, 1);
  Box page = {36, 32, 1564, 904};
  r.points = points;
  r.n_points = 2;
  clear();
  draw_variance(page, &r);
  // x from 160 to 1354 for 0 to 1.15; y from 842 to 127 for 0 to 4.6
  double one = 842 - 715 / 4.6, two = 842 - 2 * 715 / 4.6, four = 842 - 4 * 715 / 4.6;
  double right = 160 + 1194 / 1.15;
  CHECK(ink_at(160, one) == INK_BLUE && ink_at(right, two) == INK_BLUE);
  CHECK(ink_at(right, four) == INK_DARK && ink_at((160 + right) / 2, (one + two) / 2) == INK_BLUE);
  int gaps = 0;
  for (double t = 0.05; t < 0.95; t += 0.01) {
    CHECK(ink_at(160 + t * (right - 160), one + t * (two - one)) == INK_BLUE, "%g", t);
    gaps += ink_at(160 + t * (right - 160), one + t * (four - one)) == INK_NONE;
  }
  CHECK(gaps > 20, "%d", gaps);  // the ideal is dashed: it is no measurement
  CHECK(count(INK_DARK, 800, one - 1, 1000, one + 1) > 1000);
  CHECK(is_empty(1566, 0, MAX_W, 1000) && is_empty(0, 0, 34, 1000) && is_empty(0, 908, 1600, 1000));
  for (int i = 0; i < 3; i++) {  // one point; none that was measured
    const VariancePoint odd[] = {
        {"one", 0.5, 100, 150, 2}, {"zero", 0, 0, 5, NAN}, {"?", NAN, NAN, 1, -1}};
    r.points = &odd[i];
    r.n_points = 1;
    clear();
    draw_variance(page, &r);
    CHECK((count(INK_BLUE, 120, 127, 1564, 842) > 1500) == (i == 0), "%d", i);
  }
}

// ---- files

static uint32_t big_endian(const uint8_t* p) {
  return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

// Walks the chunks of a PNG file, each with its checksum. Returns whether it is w x h and whole.
static bool is_png(const char* path, uint32_t w, uint32_t h) {
  static uint8_t png[8 << 20];
  FILE* f = fopen(path, "rb");
  size_t n = f ? fread(png, 1, sizeof png, f) : 0, at = 8;
  if (f) fclose(f);
  if (n < 45 || memcmp(png, "\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 16) != 0) return false;
  if (big_endian(png + 16) != w || big_endian(png + 20) != h) return false;
  while (at + 12 <= n && at + 12 + big_endian(png + at) <= n) {
    size_t length = big_endian(png + at);
    uint32_t crc = 0xffffffffu;
    for (size_t i = at + 4; i < at + 8 + length; i++) {
      crc ^= png[i];
      for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    if (~crc != big_endian(png + at + 8 + length)) return false;
    if (memcmp(png + at + 4, "IEND", 4) == 0) return at + 12 == n;
    at += 12 + length;
  }
  return false;
}

static void test_files(void) {
  const char* dir = scratch_file("plots");
  char path[64], err[ERR_LEN] = "";
  Run runs[2] = {make_run(POLICY_STATIC, 40, 8, 1), make_run(POLICY_CONTINUOUS, 40, 8, 1)};
  PolicyResult results[2] = {runs[0].result, runs[1].result};
  CompareReport r = make_report(results, 2);
  static const char* const NAMES[] = {"schedule.png", "policies.png", "variance.png"};
  CHECK(mkdir(dir, 0777) == 0);
  r.simulated = true;
  r.n_points = 0;
  CHECK(plot_compare(&r, dir, err), "%s", err);
  snprintf(path, sizeof path, "%s/variance.png", dir);
  CHECK(access(path, F_OK) != 0);  // no points, no picture
  r.n_points = 4;
  CHECK(plot_compare(&r, dir, err), "%s", err);
  for (int i = 0; i < 3; i++) {
    snprintf(path, sizeof path, "%s/%s", dir, NAMES[i]);
    CHECK(is_png(path, 1600,
                 i == 0   ? 166 + 60 + 2 * 8 * 30 + 170
                 : i == 1 ? 1260
                          : 1000),
          "%s", path);
    remove(path);
  }
  CHECK(rmdir(dir) == 0);  // no .tmp is left
  CHECK(!plot_compare(&r, dir, err) && strstr(err, "schedule.png") != NULL, "%s", err);
  r.n_results = 0;
  CHECK(plot_compare(&r, dir, err));  // nothing to draw
  free_run(&runs[0]);
  free_run(&runs[1]);
}

// Percentiles that nobody could tell apart share a line's name; what was not measured equals
// nothing.
static void test_series_names(void) {
  SweepRow rows[2];
  SweepReport r;
  memset(rows, 0, sizeof rows);
  memset(&r, 0, sizeof r);
  r.rows = rows;
  r.n_rows = 2;
  const struct Series* tpot = SERIES;
  while (tpot->y != V_TPOT50) tpot++;
  static const struct {
    double p95, p99;
    const char* names[3];
  } cases[] = {{1.0, 1.02, {"TPOT P50 to P99", "", ""}},
               {1.0, 1.2, {"TPOT P50 to P95", "", "TPOT P99"}},
               {1.2, 1.2, {"TPOT P50", "TPOT P95 to P99", ""}},
               {NAN, 1.0, {"TPOT P50", "TPOT P95", "TPOT P99"}}};
  for (int i = 0; i < 4; i++) {
    for (int k = 0; k < 2; k++) {
      Percentiles p = {10, 10 * cases[i].p95, 10 * cases[i].p99, 1};
      rows[k].tpot = rows[k].ttft = p;
      rows[k].batch = k + 1;
    }
    for (int k = 0; k < 3; k++)
      CHECK(strcmp(series_name(&r, tpot + k).s, cases[i].names[k]) == 0, "case %d, %d: %s", i, k,
            series_name(&r, tpot + k).s);
  }
}

// ---- reports that no run should give

static double odd_number(void) {
  static const double ODD[] = {NAN, INFINITY, -INFINITY, 0,   -1,   1e-310, 1e-12,
                               1,   3,        50,        1e9, 1e29, 1e300};
  return ODD[(int)(uniform() * 13)];
}

static void odd_result(PolicyResult* p, Span* spans, double* ms, int n, int i) {
  p->policy = (Policy)i;
  p->completed = (int)(uniform() * 3) * 100;
  p->slots = (int)(uniform() * 300);
  p->preemptions = p->rejected = p->timed_out = 1 << 28;
  p->duration_s = odd_number();
  p->output_tok_s = p->occupancy_pct = p->padding_pct = odd_number();
  p->spans = spans;
  p->n_spans = (int)(uniform() * n);
  p->ttft_ms = p->e2e_ms = ms;
  p->ttft.n = p->e2e.n = (int)(uniform() * n);
  p->ttft.p95 = p->e2e.p95 = odd_number();
  for (int k = 0; k < n; k++) {
    Span s = {(int)(uniform() * 400) - 50,
              k,
              0,
              (int)(odd_number() > 2 ? 1 << 30 : -1),
              100,
              odd_number(),
              odd_number(),
              odd_number(),
              odd_number(),
              uniform() < 0.5};
    spans[k] = s;
    ms[k] = odd_number();
  }
}

static void test_odd_reports(void) {
  enum { N = 20 };
  char text[700];
  memset(text, 'W', sizeof text);
  text[sizeof text - 1] = '\0';
  random_state = 1;
  for (int round = 0; round < 24; round++) {
    Span spans[3][N];
    double ms[3][N];
    PolicyResult p[3];
    VariancePoint points[4];
    memset(p, 0, sizeof p);
    for (int i = 0; i < 3; i++) odd_result(&p[i], spans[i], ms[i], N, i);
    for (int i = 0; i < 4; i++) {
      VariancePoint v = {"", odd_number(), odd_number(), odd_number(), odd_number()};
      memcpy(v.name, text, sizeof v.name - 1);
      points[i] = v;
    }
    CompareReport r = make_report(p, 1 + round % 3);
    Box page = {36, 32, 1564, 904}, bottom = {36, 584, 1564, 1160};
    r.points = points;
    r.slo_ttft_ms = odd_number();
    r.model = r.device = r.workload = text;
    clear();
    int h = draw_schedule(&r);
    draw_foot(1600, h, text, text);
    CHECK(h > 0 && h <= MAX_H && is_empty(1566, 0, MAX_W, MAX_H) && is_empty(0, h, 1600, MAX_H),
          "schedule, round %d", round);
    clear();
    draw_latency(bottom, &r, round % 2);
    CHECK(is_empty(1566, 0, MAX_W, MAX_H) && is_empty(0, 1164, 1600, MAX_H) &&
              is_empty(0, 0, 1600, 584),
          "latency, round %d", round);
    clear();
    draw_variance(page, &r);
    CHECK(is_empty(1566, 0, MAX_W, MAX_H) && is_empty(0, 908, 1600, MAX_H) &&
              is_empty(0, 0, 1600, 32),
          "variance, round %d", round);
    CHECK(compare_title(&r, false).s[0] && compare_title(&r, true).s[0] && variance_title(&r).s[0]);
  }
}

int main(void) {
  test_span_inks();
  test_span_limits();
  test_schedule();
  test_schedule_window();
  test_titles();
  test_cdf();
  test_latency();
  test_series_names();
  test_variance();
  test_files();
  test_odd_reports();
  return check_report();
}
