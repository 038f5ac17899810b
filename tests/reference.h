// A checkpoint against what Hugging Face transformers computed with it (layout and maker:
// reference.py): logits at every position, then greedy tokens.
#include "logits.h"

typedef struct {
  int n;                // prompt tokens
  const int* ids;       // [n]
  const float* logits;  // [n, V]
  const int* greedy;    // [n_greedy]
  const float* margin;  // [n_greedy] best minus second best logit there
} ReferenceCase;

// Largest |difference| of a logit over the standard deviation of its position's logits.
static double worst_logit(const float* got, const float* want, int rows, int vocab) {
  double worst = 0;
  for (int r = 0; r < rows; r++) {
    double sum = 0, squares = 0, diff = 0;
    for (int v = 0; v < vocab; v++) {
      const double w = want[(size_t)r * vocab + v], d = fabs(got[(size_t)r * vocab + v] - w);
      sum += w;
      squares += w * w;
      if (!(d <= diff)) diff = d;
    }
    diff /= sqrt(squares / vocab - sum / vocab * sum / vocab);
    if (!(diff <= worst)) worst = diff;
  }
  return worst;
}

// All n tokens in one step, each with its row of logits: n slots, since a row needs one.
static double compare_logits(Device* d, const Weights* w, const ReferenceCase* c) {
  const int n = c->n, vocab = w->config.vocab_size;
  float* got = (float*)xcalloc((size_t)n * vocab, sizeof(float));
  char err[ERR_LEN];
  Engine e;
  EngineSize size = {n, n, n, (n + 15) / 16};
  if (engine_open(&e, d, w, size, err) != ROW_OK) die("%s", err);
  all_logits(&e, c->ids, n, got);
  const double worst = worst_logit(got, c->logits, n, vocab);
  engine_close(&e);
  free(got);
  return worst;
}

// Greedy tokens of all cases in one batch. Where the margin is within the tolerance another program
// may as well choose the second token, and from there on its text is another: returns how many
// cases went that way.
static int compare_greedy(Device* d, const Weights* w, const char* name, const ReferenceCase* cases,
                          int n_cases, int n_greedy, double tolerance) {
  char err[ERR_LEN];
  int longest = 0, ties = 0;
  Engine e;
  RunStats stats;
  memset(&stats, 0, sizeof stats);
  Request* r = (Request*)xcalloc((size_t)n_cases, sizeof *r);
  for (int i = 0; i < n_cases; i++) {
    make_request(&r[i], &w->config, cases[i].n, n_greedy, 0, i);
    memcpy(r[i].tokens, cases[i].ids, (size_t)cases[i].n * sizeof(int));
    longest = cases[i].n > longest ? cases[i].n : longest;
  }
  EngineSize size = {256, n_cases, longest + n_greedy, 0};
  if (engine_open(&e, d, w, size, err) != ROW_OK) die("%s", err);
  Limits limits = {n_cases, 256, 0, 0, 0, 0, 0, 0};
  Workload load = {r, n_cases, POLICY_CONTINUOUS, limits, false, NULL};
  run_requests(&e, &load, INFINITY, &stats);
  free(stats.spans);
  for (int i = 0; i < n_cases; i++) {
    const int* got = r[i].tokens + cases[i].n;
    int agreed = 0;
    while (agreed < n_greedy && got[agreed] == cases[i].greedy[agreed]) agreed++;
    const bool tie = agreed < n_greedy && cases[i].margin[agreed] <= tolerance;
    ties += tie;
    CHECK(agreed == n_greedy || tie, "%s case %d: token %d is %d, not %d, margin %g", name, i,
          agreed, got[agreed], cases[i].greedy[agreed], cases[i].margin[agreed]);
  }
  engine_close(&e);
  free_requests(r, n_cases);
  return ties;
}

// tolerance: of a logit, in standard deviations of its position's logits.
static void test_reference(Device* d, const char* dir, const char* file, double tolerance) {
  enum { MOST = 16 };
  char path[PATH_LEN], err[ERR_LEN];
  ReferenceCase cases[MOST];
  Model m;
  Weights w;
  Mapping map;
  uint32_t head[6];  // magic, n_cases, vocab, n_greedy, 0
  snprintf(path, sizeof path, "%s/%s", dir, file);
  if (!map_file(path, &map, err) || !load_model(dir, &m, err)) die("%s", err);
  if (!weights_open(&w, d, &m, MATMUL_MMA, m.config.max_context, err)) die("%s", err);
  memcpy(head, map.addr, sizeof head);
  const int n_cases = (int)head[2], vocab = (int)head[3], n_greedy = (int)head[4];
  const char* p = (const char*)map.addr + sizeof head;
  double worst = 0, largest = 0;  // difference, logit
  bool fits = memcmp(head, "BSREF001", 8) == 0 && n_cases > 0 && n_cases <= MOST;
  CHECK(fits && vocab == m.config.vocab_size, "%s: %d cases", path, n_cases);
  for (int i = 0; i < n_cases && fits; i++) {
    ReferenceCase* c = &cases[i];
    c->n = *(const int*)p;
    c->ids = (const int*)(p + 4);
    c->logits = (const float*)(c->ids + c->n);
    c->greedy = (const int*)(c->logits + (size_t)c->n * vocab);
    c->margin = (const float*)(c->greedy + n_greedy);
    p = (const char*)(c->margin + n_greedy);
    const double diff = compare_logits(d, &w, c);
    CHECK(diff <= tolerance, "%s case %d, %d tokens: logits differ by %g deviations", dir, i, c->n,
          diff);
    if (!(diff <= worst)) worst = diff;
    for (int v = 0; v < vocab; v++)
      largest = fmax(largest, fabs(c->logits[(size_t)(c->n - 1) * vocab + v]));
  }
  CHECK(p == (const char*)map.addr + map.len, "%s ends where its last case ends", path);
  const int ties =
      fits ? compare_greedy(d, &w, dir, cases, n_cases, n_greedy, 2 * tolerance * largest) : 0;
  printf("%s: logits within %.2g of a standard deviation, %d of %d greedy texts end in a tie\n",
         dir, worst, ties, n_cases);
  munmap(map.addr, map.len);
  weights_close(&w, d);
  free_model(&m);
}
