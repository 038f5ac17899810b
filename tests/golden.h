// weights/tiny against what Hugging Face transformers computed with it (tests/golden/tiny.bin;
// layout in make_golden.py). tolerance: largest allowed |difference| of any logit; greedy tokens
// must agree wherever the top-2 margin exceeds 10x that. half_floats: the device rounds activations
// to fp16. Each case stores what that alone does to a logit; for the one prompt (of 13) where it
// does more than the tolerance, a text far from anything the model knows, twice that is allowed.
#include "logits.h"

static void run_golden_case(Device* d, const Weights* w, int index, const unsigned char* prompt,
                            int n, const float* want, const uint32_t* greedy, const float* margin,
                            double tolerance) {
  enum { OUT = 64 };
  int vocab = w->config.vocab_size;
  float* got = (float*)xcalloc((size_t)n * vocab, sizeof(float));
  char err[ERR_LEN];
  Engine e;
  EngineSize size = {
      n, n, n + OUT,
      (n + OUT + 15) / 16};  // n slots, so that every position may have a row of logits
  if (engine_open(&e, d, w, size, err) != ROW_OK) die("%s", err);
  Request r;
  RunStats stats;
  memset(&stats, 0, sizeof stats);
  make_request(&r, &w->config, n, OUT, 0, 0);
  for (int i = 0; i < n; i++) r.tokens[i] = prompt[i];
  all_logits(&e, r.tokens, n, got);
  double worst = 0;
  for (size_t i = 0; i < (size_t)n * vocab; i++) {
    double diff = fabs((double)got[i] - want[i]);
    if (!(diff <= worst)) worst = diff;
  }
  CHECK(worst <= tolerance,
        "case %d (%d tokens): a logit differs by %g from transformers' (allowed: %g)", index, n,
        worst, tolerance);

  Limits limits = {1, n, 0, 0, 0, 0, 0, 0};
  Workload load = {&r, 1, POLICY_CONTINUOUS, limits, false, NULL};
  run_requests(&e, &load, INFINITY, &stats);
  free(stats.spans);
  int agreed = 0;
  while (agreed < OUT && r.tokens[n + agreed] == (int)greedy[agreed]) agreed++;
  bool close_call =
      agreed < OUT && margin[agreed] <= 10 * tolerance;  // from here on another text is as right
  CHECK(agreed == OUT || close_call,
        "case %d: token %d is %d, transformers' is %u with a margin of %g", index, agreed,
        r.tokens[n + agreed], greedy[agreed], margin[agreed]);
  printf("case %d: %d tokens, logits within %.2g, %d of %d greedy tokens equal%s\n", index, n,
         worst, agreed, OUT, close_call ? ", then a near tie" : "");
  engine_close(&e);
  free(got);
  free(r.tokens);
  free(r.time);
}

static void test_golden(Device* d, double tolerance, bool half_floats) {
  Model m;
  Weights w;
  Mapping map;
  char err[ERR_LEN];
  if (!map_file("tests/golden/tiny.bin", &map, err) || !load_model("weights/tiny", &m, err))
    die("%s", err);
  if (!weights_open(&w, d, &m, MATMUL_MMA, 1024, err)) die("%s", err);
  const unsigned char* p = (const unsigned char*)map.addr;
  uint64_t stored, hash = 0xcbf29ce484222325u;
  memcpy(&stored, p + 8, 8);
  for (size_t i = 0; i < m.maps[0].len; i++)
    hash = (hash ^ ((const unsigned char*)m.maps[0].addr)[i]) * 0x100000001b3u;
  CHECK(memcmp(p, "BSGOLD01", 8) == 0 && hash == stored,
        "golden data and weights/tiny belong together");
  uint32_t header[4];
  int n_strict = 0;
  memcpy(header, p + 16, sizeof header);
  CHECK(header[0] >= 8 && header[1] == (uint32_t)m.config.vocab_size && header[2] == 64,
        "golden data: %u cases", header[0]);
  p += 32;
  for (uint32_t i = 0; i < header[0]; i++) {
    uint32_t n;
    memcpy(&n, p, 4);
    float floor;
    memcpy(&floor, p + 4, 4);
    const unsigned char* prompt = p + 8;
    const float* logits = (const float*)(prompt + (n + 3) / 4 * 4);
    const uint32_t* greedy = (const uint32_t*)(logits + (size_t)n * header[1]);
    const float* margin = (const float*)(greedy + 64);
    bool strict = !half_floats || floor < tolerance;
    n_strict += strict;
    run_golden_case(d, &w, (int)i, prompt, (int)n, logits, greedy, margin,
                    strict ? tolerance : 2 * floor);
    p = (const unsigned char*)(margin + 64);
  }
  CHECK(n_strict >= 12, "only %d cases were held to %g", n_strict, tolerance);
  CHECK(p == (const unsigned char*)map.addr + map.len, "golden data ends where its last case ends");
  munmap(map.addr, map.len);
  weights_close(&w, d);
  free_model(&m);
}
