// The model on the CPU against independent oracles: Hugging Face transformers' logits and greedy
// tokens for weights/tiny (tests/make_golden.py), double-precision ops, and itself in other
// company: a request's tokens must not depend on its batch.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "golden.h"

// fp16 weights, fp32 sums in another order than the reference's double.
static const double MATMUL_TOL = 1e-5, OP_TOL = 1e-6;

static float noise(uint32_t i) {
  return (float)(int32_t)(hash32(i) >> 8) / 8388608.0f - 1;
}

static void test_f16(void) {
  int wrong = 0;
  for (uint32_t h = 0; h < 65536; h++) {  // every half, against the format's definition
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) continue;
    double want = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    if (h & 0x8000) want = -want;
    wrong += f16_to_f32((f16)h) != want || f32_to_f16((float)want) != h;
  }
  CHECK(wrong == 0, "%d of 63488 halves do not survive the round trip", wrong);
  CHECK(f32_to_f16(1.0f + 1.0f / 2048) == 0x3c00, "half way rounds to even (down)");
  CHECK(f32_to_f16(1.0f + 3.0f / 2048) == 0x3c02, "half way rounds to even (up)");
  CHECK(f32_to_f16(1e6f) == 0x7bff && f32_to_f16(-1e6f) == 0xfbff, "too large saturates");
  CHECK(f32_to_f16(1e-9f) == 0 && f32_to_f16(2.98e-8f) == 0 && f32_to_f16(2.99e-8f) == 1,
        "the smallest subnormal");
}

static void test_vec_exp(void) {
  double worst = 0;
  for (float x = -80; x < 80; x += 0.0137f) {
    double want = exp((double)x), diff = fabs(vec_exp(vec_set(x))[0] - want) / want;
    if (!(diff <= worst)) worst = diff;
  }
  CHECK(worst < 3e-7, "vec_exp is off by %g", worst);
}

static void test_matmul(int n, int k, int T) {
  Matrix m = {(f16*)cpu_alloc((size_t)padded_rows(n) * k * 2), n, k, 1};
  float* x = (float*)xcalloc((size_t)T * k, 4);
  float* y = (float*)cpu_alloc((size_t)T * padded_rows(n) * 4);
  memset(y, 0xff, (size_t)T * padded_rows(n) * 4);
  for (int i = 0; i < T * k; i++) x[i] = noise(i);
  for (int i = 0; i < n * k; i++)
    m.w[panel_index(i / k, i % k, k)] = f32_to_f16(noise(i + 1234567) * 0.1f);
  matmul_cpu(y, x, &m, T);
  double worst = 0;
  for (int t = 0; t < T; t++)
    for (int i = 0; i < n; i++) {
      double want = 0;
      for (int j = 0; j < k; j++)
        want += (double)f16_to_f32(m.w[panel_index(i, j, k)]) * x[t * k + j];
      double diff = fabs(y[(size_t)t * padded_rows(n) + i] - want) / (1 + fabs(want)) / MATMUL_TOL;
      if (!(diff <= worst)) worst = diff;
    }
  CHECK(worst <= 1, "matmul_cpu n=%d k=%d T=%d: error is %.2f of the tolerance", n, k, T, worst);
  free(m.w);
  free(x);
  free(y);
}

static void test_ops(void) {
  enum { D = 50 };
  float x[D], w[D], out[D], gate_up[64], hidden[32];
  double sum = 0;
  for (int i = 0; i < D; i++) {
    x[i] = noise(i) * 3;
    w[i] = noise(i + 100);
    sum += (double)x[i] * x[i];
  }
  rms_norm(out, x, w, D, 1e-5f);
  for (int i = 0; i < D; i++) {
    double want = x[i] / sqrt(sum / D + 1e-5) * w[i];
    CHECK(fabs(out[i] - want) <= OP_TOL * (1 + fabs(want)), "rms_norm element %d: %g, not %g", i,
          out[i], want);
  }
  for (int i = 0; i < 64; i++) gate_up[i] = noise(i + 200) * 4;
  swiglu(hidden, gate_up, 32);
  for (int i = 0; i < 32; i++) {
    double gate = gate_up[i / 8 * 16 + i % 8], up = gate_up[i / 8 * 16 + 8 + i % 8],
           want = gate / (1 + exp(-gate)) * up;
    CHECK(fabs(hidden[i] - want) <= OP_TOL * (1 + fabs(want)), "swiglu element %d: %g, not %g", i,
          hidden[i], want);
  }
}

// Attention of one token against a direct softmax in double, over a block table in scrambled order.
static void test_attend(int length) {
  enum { K = 32, G = 2, H = 6, BLOCKS = 8 };
  Config c;
  memset(&c, 0, sizeof c);
  c.n_layers = 1;
  c.n_heads = H;
  c.n_kv_heads = G;
  c.head_dim = K;
  static const int table[BLOCKS] = {5, 2, 7, 0, 3, 6, 1, 4};
  static float k[BLOCKS * G * 16 * K], v[BLOCKS * G * 16 * K];
  static float scores[3 * 128], keys[128][G][K], values[128][G][K];
  for (int i = 0; i < BLOCKS * G * 16 * K; i++)
    k[i] = v[i] = 1e30f;  // stale blocks hold huge numbers
  KVCache kv = {k, v, table, BLOCKS, BLOCKS};
  for (int p = 0; p < length; p++)
    for (int g = 0; g < G; g++)
      for (int i = 0; i < K; i++) {
        size_t block = kv_piece(&c, &kv, 0, 0, p, g);
        k[block + i * 16 + p % 16] = noise(p * 1000 + g * 100 + i);
        v[block + p % 16 * K + i] = noise(p * 1000 + g * 100 + i + 50);
        keys[p][g][i] = k[block + i * 16 + p % 16];
        values[p][g][i] = v[block + p % 16 * K + i];
      }
  Weights w;
  memset(&w, 0, sizeof w);
  w.config = c;
  int pos = length - 1, slot = 0, id = 0;
  Batch b = {1, 0, &id, &pos, &slot, NULL};
  float q[3 * K], out[3 * K];
  for (int i = 0; i < 3 * K; i++) q[i] = noise(i + 7) * 2;
  for (int g = 0; g < G; g++) {
    attend(&w, &kv, &b, 0, 0, g, q, scores, 128, out);
    double worst = 0;
    for (int h = 0; h < 3; h++)
      for (int i = 0; i < K; i++) {
        double total = 0, want = 0;
        for (int p = 0; p < length; p++) {
          double dot = 0;
          for (int j = 0; j < K; j++) dot += (double)q[h * K + j] * keys[p][g][j];
          total += exp(dot / sqrt(K));
          want += exp(dot / sqrt(K)) * values[p][g][i];
        }
        double diff = fabs(out[h * K + i] - want / total);
        if (!(diff <= worst)) worst = diff;
      }
    CHECK(worst < 1e-5, "attend over %d positions is off by %g", length, worst);
  }
}

static void test_rope(void) {
  Config c = *find_preset("llama-3.2-1b");
  float* table = (float*)xcalloc(64 * 64, 4);
  rope_table(&c, 64, table);
  // Highest frequency: 1 per position, untouched by the scaling. Lowest: 500000^(-62/64) / 32.
  CHECK(fabs(table[63 * 64] - cos(63.0)) < 1e-6, "the first pair turns one radian a position");
  CHECK(fabs(table[63 * 64 + 63] - sin(63 * pow(500000, -62.0 / 64) / 32)) < 1e-9,
        "the last pair is slowed 32-fold");
  free(table);
}

static void test_sizes(void) {
  CHECK(kv_bytes_per_token(find_preset("llama-2-70b"), 2) == 327680,
        "Llama-2-70B: 320 KiB of KV a token (article 2, 4.4)");
  CHECK(kv_bytes_per_token(find_preset("llama-2-70b"), 2) * 4096 == (size_t)5 << 28,
        "4,096 tokens: 1.25 GiB");
  // Published parameter counts, to the million.
  static const struct {
    const char* name;
    int millions;
  } known[] = {{"smollm2-135m", 135}, {"tinyllama-1.1b", 1100}, {"llama-3.2-1b", 1236},
               {"llama-2-7b", 6738},  {"llama-3-8b", 8030},     {"llama-2-70b", 68977}};
  for (int i = 0; i < 6; i++) {
    double millions = parameter_count(find_preset(known[i].name)) / 1e6;
    CHECK(fabs(millions - known[i].millions) < 1, "%s has %.1f million parameters", known[i].name,
          millions);
  }
}

static void test_blocks(void) {
  BlockTable b;
  blocks_init(&b, 5, 4, 2);
  CHECK(blocks_grow(&b, 0, 1) && b.held[0] == 1 && b.n_free == 4, "one token takes one block");
  CHECK(blocks_grow(&b, 0, 16) && b.held[0] == 1, "sixteen tokens still fit it");
  CHECK(blocks_grow(&b, 0, 17) && b.held[0] == 2, "the seventeenth does not");
  CHECK(blocks_grow(&b, 1, 48) && b.n_free == 0, "the other slot takes the rest");
  CHECK(!blocks_grow(&b, 0, 33) && b.held[0] == 2 && b.n_free == 0,
        "no block left: refused, nothing taken");
  CHECK(!blocks_grow(&b, 0, 65), "more than a slot's table holds: refused");
  int seen = 0;
  for (int i = 0; i < 5; i++) seen |= 1 << (i < 2 ? b.table[i] : b.table[4 + i - 2]);
  CHECK(seen == 31, "every block is held exactly once");
  blocks_release(&b, 1);
  CHECK(b.n_free == 3 && blocks_grow(&b, 0, 64), "released blocks serve another slot");
  blocks_free(&b);
}

static void test_count_work(void) {
  Config c;
  memset(&c, 0, sizeof c);
  c.dim = 8;
  c.n_layers = 2;
  c.n_heads = 2;
  c.n_kv_heads = 1;
  c.head_dim = 4;
  c.hidden_dim = 16;
  c.vocab_size = 32;
  // A layer: qkv 16 x 8, o 8 x 8, gate, up and down 3 x 16 x 8 = 128 + 64 + 384 = 576 weights; the
  // head 32 x 8 = 256. A token's KV: 2 x 2 layers x 1 head x 4 x 2 bytes = 32 B. Two sequences, at
  // positions 10 and 3.
  int id[2] = {1, 2}, pos[2] = {10, 3}, slot[2] = {0, 1}, row[2] = {0, 1};
  Batch b = {2, 2, id, pos, slot, row};
  Work w = count_work(&c, &b, 2);
  CHECK(w.weight_bytes == 2 * (2 * 576 + 256) + 2 * 2 * 8,
        "weights once, and two embedding rows: %g", w.weight_bytes);
  CHECK(w.kv_bytes == 32 * (11 + 4), "KV of 10 and 3 earlier tokens read, of 2 written: %g",
        w.kv_bytes);
  CHECK(w.flops == 2 * 2 * (2 * 576 + 256) + 4 * 8 * 2 * (11 + 4), "FLOPs: %g", w.flops);
  CHECK(w.noreuse_bytes == 2 * 2 * (2 * 576 + 256) + 2 * 2 * 8 + 32 * 15, "without reuse: %g",
        w.noreuse_bytes);
  slot[1] = 0;  // one sequence's prompt chunk at positions 3 and 4: the earlier KV is read once
  pos[0] = 3;
  pos[1] = 4;
  b.n_rows = 1;
  w = count_work(&c, &b, 2);
  CHECK(w.kv_bytes == 32 * (2 + 4), "a chunk reads its sequence once: %g", w.kv_bytes);
}

// A request's tokens alone, and at every batch size, in prompt chunks of two sizes, greedy and
// sampled.
static void test_identity(Device* d) {
  enum { MOST = 64, OUT = 24 };
  static const int batches[] = {1, 3, 8, 17, 64}, chunks[] = {7, 256};
  Model m;
  Weights w;
  Engine e;
  RunStats stats;
  memset(&stats, 0, sizeof stats);
  char err[ERR_LEN];
  if (!load_model("weights/tiny", &m, err)) die("%s", err);
  if (!weights_open(&w, d, &m, MATMUL_MMA, 128, err)) die("%s", err);
  Request *one = (Request*)xcalloc(MOST, sizeof(Request)),
          *all = (Request*)xcalloc(MOST, sizeof(Request));
  for (int i = 0; i < MOST; i++) {
    make_request(&one[i], &m.config, 1 + i * 37 % 90, OUT, 5, i);
    make_request(&all[i], &m.config, 1 + i * 37 % 90, OUT, 5, i);
    one[i].temperature = all[i].temperature = i % 3 == 2 ? 0.8f : 0;
    EngineSize size = {90, 1, 128, 0};
    if (engine_open(&e, d, &w, size, err) != ROW_OK) die("%s", err);
    Limits limits = {1, 90, 0, 0, 0, 0, 0, 0};
    Workload alone = {&one[i], 1, POLICY_STATIC, limits, false, NULL};
    run_requests(&e, &alone, INFINITY, &stats);
    engine_close(&e);
  }
  for (int i = 0; i < 10; i++) {
    int batch = batches[i / 2], chunk = chunks[i % 2], differ = 0;
    EngineSize size = {chunk, batch, 128, 0};
    if (engine_open(&e, d, &w, size, err) != ROW_OK) die("%s", err);
    Limits limits = {batch, chunk, 0, 0, 0, 0, 0, 0};
    Workload together = {all, batch, (Policy)(i % N_POLICIES), limits, false, NULL};
    run_requests(&e, &together, INFINITY, &stats);
    engine_close(&e);
    for (int r = 0; r < batch; r++)
      differ += memcmp(one[r].tokens, all[r].tokens, (one[r].n_prompt + OUT) * sizeof(int)) != 0;
    CHECK(differ == 0, "batch %d, chunks of %d: %d requests have other tokens than alone", batch,
          chunk, differ);
  }
  free(stats.spans);
  free_requests(one, MOST);
  free_requests(all, MOST);
  weights_close(&w, d);
  free_model(&m);
}

static void test_memory(Device* d) {
  Engine e;
  Weights w;
  Model m;
  char err[ERR_LEN];
  if (!random_model(find_preset("smollm2-135m"), 0, &m)) die("no memory");
  m.config.n_layers = 2;
  if (!weights_open(&w, d, &m, MATMUL_MMA, 64, err)) die("%s", err);
  size_t limit = d->limit;
  EngineSize size = {64, 4, 64, 0};
  d->limit = d->api->used() + 1000;
  CHECK(engine_open(&e, d, &w, size, err) == ROW_SKIPPED && strstr(err, "KV needs"),
        "a budget too small: %s", err);
  d->limit = limit;
  int fails = 0;
  for (int n = 0; n < 100;
       n++) {  // every allocation fails once; each failure must leave nothing behind
    d->fail_after = n;
    RowStatus status = engine_open(&e, d, &w, size, err);
    d->fail_after = -1;
    if (status == ROW_OK) break;
    fails++;
    CHECK(status == ROW_OOM && strstr(err, "out of memory") && d->tagged[MEM_KV] == 0 &&
              d->tagged[MEM_WORK] == 0,
          "allocation %d failed: %s", n, err);
  }
  CHECK(fails >= 5, "only %d allocations could fail", fails);
  engine_close(&e);
  weights_close(&w, d);
  free_model(&m);
  CHECK(d->tagged[MEM_WEIGHTS] == 0 && d->n_list == 0, "all memory is returned");
}

int main(void) {
  Device d;
  char err[ERR_LEN];
  if (!device_open(&d, &cpu_backend, 0, err)) die("%s", err);
  test_f16();
  test_vec_exp();
  static const int sizes[][3] = {{1, 1, 1},    {63, 31, 5},    {64, 128, 6},
                                 {65, 129, 7}, {200, 300, 13}, {130, 257, 64}};
  for (int i = 0; i < 6; i++) test_matmul(sizes[i][0], sizes[i][1], sizes[i][2]);
  test_ops();
  static const int lengths[] = {1, 15, 16, 17, 100};
  for (int i = 0; i < 5; i++) test_attend(lengths[i]);
  test_rope();
  test_sizes();
  test_blocks();
  test_count_work();
  test_memory(&d);
  test_identity(&d);
  test_golden(&d, 1e-3, false);
  device_close(&d);
  return check_report();
}
