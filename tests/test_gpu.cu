// The GPU against the CPU: every kernel path on odd sizes, outputs poisoned first, NaN fails. Needs
// a CUDA device; says "skipped" without one. Built and run by `make gpu-test`.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "identity.h"
#ifndef NO_GOLDEN
#include "golden.h"
#include "variants.h"
#endif

static Device gpu, cpu;

// Tolerances: fp16 operands and fp32 sums against double on the same fp16 operands; logits after
// whole random models, whose activations are rounded to fp16 between layers on the GPU and stay
// fp32 on the CPU.
static const double MATMUL_TOL = 2e-5, LOGITS_TOL = 3e-2;
// weights/tiny, fp8 cache against fp16, in parts of the logits' root mean square: each key and
// value is off by up to a 16th, in either direction, so attention averages most of it away.
// Measured: 0.0056, and 0.074 for the worst of 74,240 logits.
static const double FP8_RMS_TOL = 0.01, FP8_WORST_TOL = 0.1;

static float noise(uint32_t i) {
  return (float)(int32_t)(hash32(i) >> 8) / 8388608.0f - 1;
}

// ---- linear layers: each rung, against double; and the same bits whatever the number of tokens
// -----------------------

typedef struct {
  int n, k;
  half *x, *w_rows, *w_packed;
  float* host_w;  // [n, k] as rounded
  float* host_x;  // [T, k]
} Case;

static Case make_case(int n, int k, int T) {
  Case c = {
      n, k, NULL, NULL, NULL, (float*)xcalloc((size_t)n * k, 4), (float*)xcalloc((size_t)T * k, 4)};
  int rows = (n + 255) / 256 * 256;
  half* x = (half*)xcalloc((size_t)T * k, 2);
  half* w = (half*)xcalloc((size_t)rows * k, 2);
  half* packed = (half*)xcalloc((size_t)rows * k, 2);
  for (int i = 0; i < T * k; i++) {
    x[i] = __float2half(noise(i));
    c.host_x[i] = __half2float(x[i]);
  }
  for (int i = 0; i < n * k; i++) {
    w[i] = __float2half(noise(i + 77777777) * 0.1f);
    c.host_w[i] = __half2float(w[i]);
    packed[packed_index(i / k, i % k, k)] = w[i];
  }
  CUDA_CHECK(cudaMalloc(&c.x, (size_t)T * k * 2));
  CUDA_CHECK(cudaMalloc(&c.w_rows, (size_t)rows * k * 2));
  CUDA_CHECK(cudaMalloc(&c.w_packed, (size_t)rows * k * 2));
  CUDA_CHECK(cudaMemcpy(c.x, x, (size_t)T * k * 2, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(c.w_rows, w, (size_t)rows * k * 2, cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(c.w_packed, packed, (size_t)rows * k * 2, cudaMemcpyHostToDevice));
  free(x);
  free(w);
  free(packed);
  return c;
}

static void free_case(Case* c) {
  cudaFree(c->x);
  cudaFree(c->w_rows);
  cudaFree(c->w_packed);
  free(c->host_w);
  free(c->host_x);
}

// Tokens x0 .. x0 + T as the kernels for more than 8 want them, NaN where there are none; on the
// device.
static half* pack_tokens(const Case* c, const Gpu* g, int x0, int T) {
  size_t n = (size_t)(T + TOKEN_GROUP - 1) / TOKEN_GROUP * TOKEN_GROUP * c->k;
  half *tiles, *host = (half*)xcalloc(n, sizeof(half));
  memset((void*)host, 0xff, n * sizeof(half));
  for (int i = 0; i < T * c->k; i++)
    host[activation_index(i / c->k, i % c->k, c->k, activation_group(g, T))] =
        __float2half(c->host_x[(size_t)x0 * c->k + i]);
  CUDA_CHECK(cudaMalloc(&tiles, n * sizeof(half)));
  CUDA_CHECK(cudaMemcpy(tiles, host, n * sizeof(half), cudaMemcpyHostToDevice));
  free(host);
  return tiles;
}

__global__ void sum_kernel(float* sums, Unsummed y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) sums[i] = sum_slices<float>(y, i);
}

// Runs one rung on tokens from x0 on; result [T, outputs] as floats, its parts summed.
static void run_matmul(const Case* c, Matmul rung, Output mode, int x0, int T, float* result) {
  Gpu g;
  memset(&g, 0, sizeof g);
  g.device = &gpu;
  g.matmul = rung;
  Matrix m = {(f16*)(rung == MATMUL_MMA ? c->w_packed : c->w_rows), c->n, c->k, 1};
  if (rung == MATMUL_MMA && mode == OUT_FLOAT) m.slices = matrix_slices(c->n, c->k);
  int outputs = mode == OUT_SWIGLU ? c->n / 2 : c->n;
  size_t size = (size_t)(T + TOKEN_GROUP) * outputs * (mode == OUT_SWIGLU ? 2 : 4 * m.slices);
  char* out;
  CUDA_CHECK(cudaMalloc(&out, size));
  CUDA_CHECK(cudaMemset(out, 0xff, size));  // NaN everywhere
  half* tiles = activation_group(&g, T) ? pack_tokens(c, &g, x0, T) : NULL;
  const half* x = tiles ? tiles : c->x + (size_t)x0 * c->k;
  Unsummed y = mode == OUT_SWIGLU ? matmul<OUT_SWIGLU>(&g, out, x, &m, T)
                                  : matmul<OUT_FLOAT>(&g, out, x, &m, T);
  float* sums;
  CUDA_CHECK(cudaMalloc(&sums, (size_t)T * outputs * sizeof(float)));
  if (mode == OUT_FLOAT) sum_kernel<<<ceil_div(T * outputs, 256), 256>>>(sums, y, T * outputs);
  char* host = (char*)xcalloc(size, 1);
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMemcpy(host, out, size, cudaMemcpyDeviceToHost));
  if (mode == OUT_FLOAT)
    CUDA_CHECK(cudaMemcpy(result, sums, (size_t)T * outputs * 4, cudaMemcpyDeviceToHost));
  for (int i = 0; i < T * outputs && mode == OUT_SWIGLU; i++) {
    int group = activation_group(&g, T);
    size_t at = group ? activation_index(i / outputs, i % outputs, outputs, group) : i;
    result[i] = __half2float(((half*)host)[at]);
  }
  cudaFree(out);
  cudaFree(sums);
  cudaFree(tiles);
  free(host);
}

static double reference(const Case* c, Output mode, int t, int i) {
  double sum = 0, up = 0;
  int row = mode == OUT_SWIGLU ? i / 8 * 16 + i % 8 : i;
  for (int j = 0; j < c->k; j++) {
    sum += (double)c->host_w[(size_t)row * c->k + j] * c->host_x[(size_t)t * c->k + j];
    if (mode == OUT_SWIGLU)
      up += (double)c->host_w[(size_t)(row + 8) * c->k + j] * c->host_x[(size_t)t * c->k + j];
  }
  return mode == OUT_SWIGLU ? sum / (1 + exp(-sum)) * up : sum;
}

static void test_matmul_case(int n, int k, Output mode) {
  enum { MOST = 300 };
  static const int tokens[] = {1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 129, 300};
  Case c = make_case(n, k, MOST);
  int outputs = mode == OUT_SWIGLU ? n / 2 : n;
  float* all = (float*)xcalloc((size_t)MOST * outputs, 4);
  float* some = (float*)xcalloc((size_t)MOST * outputs, 4);
  for (int rung = MATMUL_NAIVE; rung <= MATMUL_MMA; rung++) {
    run_matmul(&c, (Matmul)rung, mode, 0, MOST, all);
    double worst = 0;
    for (int i = 0; i < 4000; i++) {
      int at = (int)(hash32(i) % (uint32_t)(MOST * outputs));
      if (i < 400)
        at = i % 2 ? (MOST - 1) * outputs + outputs - 1 - i / 2 % outputs
                   : i / 2 % outputs;  // both corners
      double ref = reference(&c, mode, at / outputs, at % outputs),
             tol = mode == OUT_SWIGLU ? 1e-3 : MATMUL_TOL;
      double diff = fabs(all[at] - ref) / (1 + fabs(ref)) / tol;
      if (!(diff <= worst)) worst = diff;
    }
    CHECK(worst <= 1, "matmul %d mode %d n=%d k=%d: error is %.2f of the tolerance", rung, mode, n,
          k, worst);
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
      int T = tokens[i], x0 = (MOST - T) / 2;
      run_matmul(&c, (Matmul)rung, mode, x0, T, some);
      bool same = memcmp(some, all + (size_t)x0 * outputs, (size_t)T * outputs * 4) == 0;
      CHECK(same, "matmul %d mode %d n=%d k=%d: %d tokens give other bits than among %d", rung,
            mode, n, k, T, MOST);
    }
  }
  free(all);
  free(some);
  free_case(&c);
}

static void test_matmul(void) {
  test_matmul_case(16, 32, OUT_FLOAT);
  test_matmul_case(1000, 96, OUT_FLOAT);    // rows not a multiple of 16
  test_matmul_case(960, 576, OUT_FLOAT);    // smollm2's qkv: 18 k tiles in 4 uneven slices
  test_matmul_case(2048, 2048, OUT_FLOAT);  // 8 slices
  test_matmul_case(8192, 512, OUT_FLOAT);   // 2 slices, at 300 tokens both in one block
  test_matmul_case(576, 1536, OUT_FLOAT);
  test_matmul_case(272, 1056, OUT_FLOAT);  // 33 k tiles
  test_matmul_case(64, 64, OUT_SWIGLU);
  test_matmul_case(3072, 576, OUT_SWIGLU);
  test_matmul_case(2112, 2048, OUT_SWIGLU);  // a part-filled last block
}

// Every way in which blocks can share a matrix's slices (one each, a pair each, all in one), at
// every tile shape, gives the bits that the skinny kernel gives for 8 tokens at a time.
static void test_slices(int n, int k) {
  enum { MOST = 2048, WAYS = 4 };
  static const int tokens[] = {9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 300, MOST};
  Case c = make_case(n, k, MOST);
  Gpu g;
  memset((void*)&g, 0, sizeof g);
  g.device = &gpu;
  g.matmul = MATMUL_MMA;
  size_t most = (size_t)MOST * n;
  float *y, *sums, *got = (float*)xcalloc(most, sizeof(float)), *want[WAYS];
  CUDA_CHECK(cudaMalloc(&y, most * MAX_SLICES * sizeof(float)));
  CUDA_CHECK(cudaMalloc(&sums, most * sizeof(float)));
  Matrix m = {(f16*)c.w_packed, n, k, 1};
  for (int i = 0; i < WAYS; i++) {
    m.slices = 1 << i;
    want[i] = (float*)xcalloc(most, sizeof(float));
    for (int t = 0; t < MOST; t += SKINNY_TOKENS)
      matmul<OUT_FLOAT>(&g, y + (size_t)t * n, c.x + (size_t)t * k, &m, SKINNY_TOKENS);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(want[i], y, most * sizeof(float), cudaMemcpyDeviceToHost));
  }
  for (size_t i = 0; i < sizeof tokens / sizeof tokens[0] * WAYS * 3; i++) {
    int T = tokens[i / (WAYS * 3)], way = i / 3 % WAYS, slices = 1 << way, z = slices;
    if (i % 3 == 1) z = slices / 2;
    if (i % 3 == 2) z = 1;
    if (z == 0) continue;
    m.slices = slices;
    half* x = pack_tokens(&c, &g, 0, T);
    CUDA_CHECK(cudaMemset(y, 0xff, most * MAX_SLICES * sizeof(float)));
    launch_tiles<OUT_FLOAT>(&g, y, x, &m, T, z);
    Unsummed u = {y, z, z < slices, (size_t)T * n};
    sum_kernel<<<ceil_div(T * n, 256), 256>>>(sums, u, T * n);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(got, sums, (size_t)T * n * sizeof(float), cudaMemcpyDeviceToHost));
    CHECK(memcmp(got, want[way], (size_t)T * n * sizeof(float)) == 0,
          "n=%d k=%d, %d KB: %d tokens, %d slices in %d parts give other bits than 8 tokens", n, k,
          gpu.shared_bytes / 1024, T, slices, z);
    cudaFree(x);
  }
  for (int i = 0; i < WAYS; i++) free(want[i]);
  free(got);
  cudaFree(y);
  cudaFree(sums);
  free_case(&c);
}

// What a block may use of shared memory chooses tile shapes and depths: those of smaller cards.
static void test_little_shared_memory(void) {
  static const int kb[] = {64, 99};
  int real = gpu.shared_bytes;
  for (int i = 0; i < 2; i++) {
    gpu.shared_bytes = kb[i] * 1024;
    test_matmul_case(272, 1056, OUT_FLOAT);
    test_matmul_case(8192, 512, OUT_FLOAT);
    test_matmul_case(2112, 256, OUT_SWIGLU);
    test_slices(136, 1056);
  }
  gpu.shared_bytes = real;
}

// Blocks of 12 row tiles, where they are done in fewer turns: a last block with both of its pieces,
// with only the whole one, with only the half; 33 k tiles.
static void test_wide_blocks(void) {
  static const int rows[] = {448, 512, 576, 640}, sms[] = {3, 3, 3, 4};
  int real = gpu.sms;
  for (int i = 0; i < 4; i++) {
    gpu.sms = sms[i];
    Matrix m = {NULL, rows[i], 64, 1};
    CHECK(gpu.shared_bytes < 200 * 1024 || wide_pays(&gpu, &m, 9), "n=%d is not wide", rows[i]);
    test_matmul_case(rows[i], 64, OUT_SWIGLU);
    test_matmul_case(rows[i], 1056, OUT_SWIGLU);
  }
  gpu.sms = real;
}

// ---- sampling: the tile kernel's own choice against sample_kernel's on the same logits

template <typename T>
static T* to_device(const T* host, size_t n) {
  T* p;
  CUDA_CHECK(cudaMalloc(&p, n * sizeof(T)));
  CUDA_CHECK(cudaMemcpy(p, host, n * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

enum { BEST_ROWS = 1000, BEST_K = 96, MOST_BEST = 300 };

// Rows 16 to 31, 384 to 511 and 896 to 999 repeat earlier ones: equal logits, near and far.
static void repeat_rows(half* w) {
  const size_t tile = TILE_HALVES * sizeof(half), block = BEST_K / TILE_K * BLOCK_TILES * tile;
  char* p = (char*)w;
  for (int i = 0; i < BEST_K / TILE_K; i++)
    CUDA_CHECK(cudaMemcpy(p + (i * BLOCK_TILES + 1) * tile, p + i * BLOCK_TILES * tile, tile,
                          cudaMemcpyDeviceToDevice));
  CUDA_CHECK(cudaMemcpy(p + 3 * block, p, block, cudaMemcpyDeviceToDevice));
  CUDA_CHECK(cudaMemcpy(p + 7 * block, p, block, cudaMemcpyDeviceToDevice));
}

// Every third slot draws, every tenth token is padding. Returns how many ties there were.
static int test_best_rows(const Case* c, int R) {
  int row[MOST_BEST], slot[MOST_BEST], pos[MOST_BEST], got[2][MOST_BEST];
  uint32_t seed[MOST_BEST];
  float temperature[MOST_BEST], *logits = (float*)xcalloc((size_t)R * BEST_ROWS, sizeof(float));
  for (int i = 0; i < R; i++) {
    row[i] = R - 1 - i;
    slot[i] = i % 10 == 9 ? -1 : i;
    pos[i] = (int)(hash32(i) % 100);
    seed[i] = hash32(i + 1000);
    temperature[i] = i % 3 == 2 ? 0.8f : 0;
  }
  Gpu g;
  memset((void*)&g, 0, sizeof g);
  g.device = &gpu;
  g.matmul = MATMUL_MMA;
  int pieces[] = {WARP, (BEST_ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS};
  g.logits = to_device(logits, (size_t)R * BEST_ROWS);
  g.sample.best = (Candidate*)to_device(logits, (size_t)R * WARP * 2);
  g.sample.batch.row = to_device(row, R);
  g.sample.batch.slot = to_device(slot, R);
  g.sample.batch.pos = to_device(pos, R);
  g.sample.sampler = {to_device(slot, R), to_device(seed, R), to_device(temperature, R)};
  Matrix m = {(f16*)c->w_packed, BEST_ROWS, BEST_K, 1};
  half* x = pack_tokens(c, &g, 0, R);
  for (int i = 0; i < 2; i++) {
    CUDA_CHECK(cudaMemset(g.sample.best, 0xff, (size_t)R * WARP * sizeof(Candidate)));
    CUDA_CHECK(cudaMemset(g.sample.sampler.sampled, 0xff, R * sizeof(int)));
    if (i == 0) matmul<OUT_FLOAT>(&g, g.logits, x, &m, R);
    if (i == 0)
      launch(&g, sample_kernel, dim3(WARP, R), SAMPLE_THREADS, 0, g.sample, (const float*)g.logits,
             m.n);
    if (i == 1) launch_tiles<OUT_BEST>(&g, NULL, x, &m, R, 1);
    launch(&g, sample_finish_kernel, dim3(R), SAMPLE_THREADS, 0, g.sample, pieces[i], false);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(
        cudaMemcpy(got[i], g.sample.sampler.sampled, R * sizeof(int), cudaMemcpyDeviceToHost));
  }
  CUDA_CHECK(cudaMemcpy(logits, g.logits, (size_t)R * BEST_ROWS * 4, cudaMemcpyDeviceToHost));
  int wrong = 0, ties = 0, other = 0;
  for (int r = 0; r < R; r++) {
    int t = row[r], want = -1;
    const float* row_logits = logits + (size_t)r * BEST_ROWS;
    bool greedy = slot[t] >= 0 && temperature[t] == 0;
    if (greedy) want = sample_cpu(row_logits, BEST_ROWS, 0, 0);
    for (int v = want + 1; v < BEST_ROWS && greedy; v++) ties += row_logits[v] == row_logits[want];
    wrong += (greedy || slot[t] < 0) && got[0][t] != want;
    other += got[0][t] != got[1][t];
  }
  CHECK(wrong == 0, "%d rows: sample_kernel chose %d wrong tokens", R, wrong);
  CHECK(other == 0, "%d rows: store_best chose %d other tokens", R, other);
  cudaFree(x);
  cudaFree(g.logits);
  cudaFree(g.sample.best);
  cudaFree(g.sample.batch.row);
  cudaFree(g.sample.batch.slot);
  cudaFree(g.sample.batch.pos);
  cudaFree(g.sample.sampler.sampled);
  cudaFree(g.sample.sampler.seed);
  cudaFree(g.sample.sampler.temperature);
  free(logits);
  return ties;
}

static void test_best(void) {
  static const int rows[] = {9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 300};
  Case c = make_case(BEST_ROWS, BEST_K, MOST_BEST);
  repeat_rows(c.w_packed);
  int ties = 0;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) ties += test_best_rows(&c, rows[i]);
  CHECK(ties > 0, "no two best logits are equal");
  free_case(&c);
}

// ---- whole models: prompts of several lengths, chunked and whole, against the CPU
// -------------------------------------

typedef struct {
  Weights w;
  Engine e;
} Runner;

static void open_runner(Runner* r, Device* d, const Model* m, Matmul matmul, int max_tokens,
                        int slots, int positions) {
  char err[ERR_LEN];
  EngineSize size = {max_tokens, slots, positions, 0};
  if (!weights_open(&r->w, d, m, matmul, positions, err)) die("%s", err);
  if (engine_open(&r->e, d, &r->w, size, err) != ROW_OK) die("%s", err);
}

static void close_runner(Runner* r, Device* d) {
  engine_close(&r->e);
  weights_close(&r->w, d);
}

// Logits of every position of `n` tokens fed in chunks to one slot.
static void run_prompt(Runner* r, int slot, const int* ids, int n, int chunk, float* logits) {
  int id[512], pos[512], slots[512], row[512], vocab = r->w.config.vocab_size;
  for (int at = 0; at < n; at += chunk) {
    int T = n - at < chunk ? n - at : chunk;
    for (int t = 0; t < T; t++) {
      id[t] = ids[at + t];
      pos[t] = at + t;
      slots[t] = slot;
      row[t] = t;
    }
    Batch b = {T, T, id, pos, slots, row};
    blocks_grow(&r->e.blocks, slot, at + T);
    engine_submit(&r->e, &b);
    engine_collect(&r->e);
    r->e.device->api->logits(&r->e, T, logits + (size_t)at * vocab);
  }
  blocks_release(&r->e.blocks, slot);
}

// attention_runs_kernel gives the bits of attention_kernel, over either cache. The former takes
// what fills the GPU, here one that claims to have a single multiprocessor; the latter chunks of 7.
static void test_warp_per_run(const Model* m, const int* ids, int n) {
  static const int chunks[] = {290, 200, 64};
  int sms = gpu.sms, vocab = m->config.vocab_size;
  float* want = (float*)xcalloc((size_t)n * vocab, 4);
  float* got = (float*)xcalloc((size_t)n * vocab, 4);
  for (int fp8_kv = 0; fp8_kv < 2; fp8_kv++) {
    Runner r;
    gpu.fp8_kv = fp8_kv;
    open_runner(&r, &gpu, m, MATMUL_MMA, n, 300, 320);
    run_prompt(&r, 5, ids, n, 7, want);
    close_runner(&r, &gpu);
    gpu.sms = 1;
    open_runner(&r, &gpu, m, MATMUL_MMA, n, 300, 320);
    for (int i = 0; i < 3; i++) {
      int T = chunks[i] < n ? chunks[i] : n, heads = m->config.n_heads / m->config.n_kv_heads;
      int runs = ceil_div(T, heads < TILE_ROWS ? TILE_ROWS / heads : 1);
      bool reached = run_per_warp(&gpu, &r.e.gpu->qkv, T, runs);
      CHECK(reached, "%s: chunks of %d are too few runs to test", m->config.name, T);
      run_prompt(&r, i, ids, n, T, got);
      CHECK(r.e.gpu->even, "%s: a prompt's tokens see too different numbers of keys",
            m->config.name);
      CHECK(memcmp(got, want, (size_t)n * vocab * 4) == 0,
            "%s, %s cache: a warp per run gives other bits, chunks of %d", m->config.name,
            fp8_kv ? "fp8" : "fp16", T);
    }
    close_runner(&r, &gpu);
    gpu.sms = sms;
  }
  gpu.fp8_kv = false;
  free(want);
  free(got);
}

static void test_model(const char* name, int dim, int heads, int kv_heads, int head_dim, int hidden,
                       int vocab, bool tied) {
  Config c;
  memset(&c, 0, sizeof c);
  snprintf(c.name, sizeof c.name, "%s", name);
  c.dim = dim;
  c.n_layers = 2;
  c.n_heads = heads;
  c.n_kv_heads = kv_heads;
  c.head_dim = head_dim;
  c.hidden_dim = hidden;
  c.vocab_size = vocab;
  c.max_context = 1024;
  c.tied = tied;
  c.norm_eps = 1e-5f;
  c.rope_theta = 10000;
  Model m;
  Runner on_cpu, on_gpu, naive;
  enum { N = 290 };
  int ids[N];
  for (int i = 0; i < N; i++) ids[i] = (int)(hash32(i) % (uint32_t)vocab);
  if (!random_model(&c, 3, &m)) die("no memory");
  open_runner(&on_cpu, &cpu, &m, MATMUL_MMA, N, 300, 320);
  open_runner(&on_gpu, &gpu, &m, MATMUL_MMA, N, 300, 320);
  float* want = (float*)xcalloc((size_t)N * vocab, 4);
  float* got = (float*)xcalloc((size_t)N * vocab, 4);
  float* other = (float*)xcalloc((size_t)N * vocab, 4);
  run_prompt(&on_cpu, 1, ids, N, N, want);
  run_prompt(&on_gpu, 2, ids, N, N, got);
  double worst = 0;
  for (size_t i = 0; i < (size_t)N * vocab; i++) {
    double diff = fabs(got[i] - want[i]) / LOGITS_TOL;
    if (!(diff <= worst)) worst = diff;
  }
  CHECK(worst <= 1, "%s: logits differ by %.2f of the tolerance from the CPU's", name, worst);
  static const int chunks[] = {1, 7, 64, 200};
  for (int i = 0; i < 4; i++) {
    run_prompt(&on_gpu, i, ids, N, chunks[i], other);
    CHECK(memcmp(got, other, (size_t)N * vocab * 4) == 0,
          "%s: chunks of %d give other bits than one chunk", name, chunks[i]);
    run_prompt(&on_cpu, i, ids, N, chunks[i], other);
    CHECK(memcmp(want, other, (size_t)N * vocab * 4) == 0,
          "%s on the CPU: chunks of %d give other bits than one chunk", name, chunks[i]);
  }
  close_runner(&on_gpu, &gpu);
  test_warp_per_run(&m, ids, N);
  for (int rung = MATMUL_NAIVE; rung < MATMUL_MMA; rung++) {
    open_runner(&naive, &gpu, &m, (Matmul)rung, N, 300, 320);
    run_prompt(&naive, 0, ids, N, N, other);
    worst = 0;
    for (size_t i = 0; i < (size_t)N * vocab; i++) {
      double diff = fabs(other[i] - want[i]) / LOGITS_TOL;
      if (!(diff <= worst)) worst = diff;
    }
    CHECK(worst <= 1, "%s, rung %d: logits differ by %.2f of the tolerance from the CPU's", name,
          rung, worst);
    close_runner(&naive, &gpu);
  }
  close_runner(&on_cpu, &cpu);
  free_model(&m);
  free(want);
  free(got);
  free(other);
}

// ---- fp8 cache

enum { FP8_TOKENS = 290 };  // more than a split of 256, not a whole number of pages

typedef struct {  // what a model of one layer left in the device's memory after one step
  half *q, *att;  // [T, H, KD], [T, H K]
  uint8_t *k, *v;
  size_t k_bytes, v_bytes;
} OneLayer;

static OneLayer run_one_layer(Runner* r, const Model* m, bool fp8_kv) {
  const Config* c = &m->config;
  size_t T = FP8_TOKENS, padded = (T + TOKEN_GROUP - 1) / TOKEN_GROUP * TOKEN_GROUP;
  size_t q_bytes = T * c->n_heads * key_width(c->head_dim) * 2,
         att_bytes = padded * c->n_heads * c->head_dim * 2;
  int ids[FP8_TOKENS];
  float* logits = (float*)xcalloc(T * c->vocab_size, 4);
  for (int i = 0; i < FP8_TOKENS; i++) ids[i] = (int)(hash32(i) % (uint32_t)c->vocab_size);
  gpu.fp8_kv = fp8_kv;
  open_runner(r, &gpu, m, MATMUL_MMA, FP8_TOKENS, 300, 320);
  run_prompt(r, 2, ids, FP8_TOKENS, FP8_TOKENS, logits);
  OneLayer l;
  engine_kv_bytes(&gpu, c, r->e.size, &l.k_bytes, &l.v_bytes);
  l.q = (half*)xcalloc(q_bytes, 1);
  l.att = (half*)xcalloc(att_bytes, 1);
  l.k = (uint8_t*)xcalloc(l.k_bytes, 1);
  l.v = (uint8_t*)xcalloc(l.v_bytes, 1);
  CUDA_CHECK(cudaMemcpy(l.q, r->e.gpu->qkv.q, q_bytes, cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(l.att, r->e.gpu->att, att_bytes, cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(l.k, r->e.kv.k, l.k_bytes, cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(l.v, r->e.kv.v, l.v_bytes, cudaMemcpyDeviceToHost));
  gpu.fp8_kv = false;
  free(logits);
  return l;
}

static void free_one_layer(OneLayer* l) {
  free(l->q);
  free(l->att);
  free(l->k);
  free(l->v);
}

// Key (or value) of a position as it is in either cache. step: the scale. By the same k_index and
// v_index that stored it: that they suit the products, attention must show.
static double cached(const Runner* r, const OneLayer* l, bool fp8_kv, bool key, int pos, int g,
                     int dim, double* step) {
  const Config* c = &r->w.config;
  int K = c->head_dim, width = key ? key_width(K) : K, token = pos % KV_BLOCK;
  int block = r->e.blocks.table[(size_t)2 * r->e.blocks.max_blocks + pos / KV_BLOCK];
  size_t page = (size_t)block * c->n_kv_heads + g;
  const uint8_t* pages = key ? l->k : l->v;
  if (!fp8_kv) {
    const half* from = (const half*)(pages + page * page_bytes<half>(width));
    return __half2float(from[key ? k_index(token, dim, false) : v_index(token, dim)]);
  }
  const uint8_t* from = pages + page * page_bytes<fp8>(width);
  *step = __half2float(((const half*)(from + KV_BLOCK * width))[token]);
  uint8_t x = from[key ? k_index(token, dim, true) : v_index(token, dim)];
  double size = x & 0x78 ? ldexp(8 + x % 8, x / 8 % 16 - 10) : ldexp(x % 8, -9);
  return (x & 0x80 ? -size : size) * *step;
}

// Each number of the cache is the one of the fp16 cache rounded to e4m3: by at most half of its
// last place, a 16th, or half of the smallest step. Attention over it is that of the numbers
// stored, to fp16's precision.
static void test_fp8_cache(int heads, int kv_heads, int K) {
  Config c = {"one layer", 128,   1,     heads, kv_heads, K, 160, 300, 1024,
              true,        1e-5f, 10000, 0,     0,        0, 0,   0,   {0}};
  Model m;
  Runner half_runner, r;
  if (!random_model(&c, 3, &m)) die("no memory");
  OneLayer want = run_one_layer(&half_runner, &m, false), got = run_one_layer(&r, &m, true);
  double worst = 0, none, *p = (double*)xcalloc(FP8_TOKENS, sizeof *p);
  for (int i = 0; i < 2 * FP8_TOKENS * kv_heads * K; i++) {
    int dim = i % K, g = i / K % kv_heads, pos = i / K / kv_heads % FP8_TOKENS;
    bool key = i / K / kv_heads / FP8_TOKENS;
    double step, x = cached(&half_runner, &want, false, key, pos, g, dim, &none);
    double diff = fabs(cached(&r, &got, true, key, pos, g, dim, &step) - x);
    diff /= fmax(fabs(x) / 16, step / 1024) * 1.001;
    if (!(diff <= worst)) worst = diff;
  }
  CHECK(worst <= 1 && worst > 0.5, "K %d: rounding is %.3f of what e4m3 allows", K, worst);
  worst = 0;
  for (int i = 0; i < 600; i++) {
    int t = i < 50 ? FP8_TOKENS - 1 - i : (int)(hash32(i) % FP8_TOKENS), h = i % heads;
    int g = h / (heads / kv_heads), dim = (int)(hash32(i + 5000) % (uint32_t)K);
    double sum = 0, out = 0, size = 0, step;
    for (int key = 0; key <= t; key++) {
      double score = 0;
      for (int d = 0; d < K; d++)
        score += __half2float(got.q[((size_t)t * heads + h) * key_width(K) + d]) *
                 cached(&r, &got, true, true, key, g, d, &step);
      p[key] = exp(score / sqrt(K));
      sum += p[key];
    }
    for (int key = 0; key <= t; key++) {
      double v = cached(&r, &got, true, false, key, g, dim, &step);
      out += p[key] / sum * v;
      size += p[key] / sum * fabs(v);
    }
    int at = activation_index(t, h * K + dim, heads * K, activation_group(r.e.gpu, FP8_TOKENS));
    double diff = fabs(__half2float(got.att[at]) - out) / (1e-3 * size + 1e-5);
    if (!(diff <= worst)) worst = diff;
  }
  CHECK(worst <= 1, "K %d: attention over an fp8 cache is off by %.2f of the tolerance", K, worst);
  close_runner(&half_runner, &gpu);
  close_runner(&r, &gpu);
  free_one_layer(&want);
  free_one_layer(&got);
  free_model(&m);
  free(p);
}

// 1.9 times the tokens in the same memory, at the head widths of models that are served.
static void test_fp8_pool(void) {
  static const char* const names[] = {"llama-3.2-1b", "llama-3-8b"};  // K = 64 and 128
  for (int i = 0; i < 2; i++) {
    EngineSize size = {64, 64, 4096, 0};
    size_t k, v, k8, v8;
    engine_kv_bytes(&gpu, find_preset(names[i]), size, &k, &v);
    gpu.fp8_kv = true;
    engine_kv_bytes(&gpu, find_preset(names[i]), size, &k8, &v8);
    gpu.fp8_kv = false;
    double more = (double)(k + v) / (k8 + v8);
    CHECK(more >= 1.9, "%s: an fp8 pool holds %.3f times the tokens", names[i], more);
  }
}

// weights/tiny on text: how far the cache's rounding moves a logit, and the same bits in chunks.
static void test_fp8_logits(void) {
  Model m;
  Runner on_half, on_fp8;
  char err[ERR_LEN], text[FP8_TOKENS + 1] = "";
  int ids[FP8_TOKENS];
  if (!load_model("weights/tiny", &m, err)) die("%s", err);
  for (int i = 0; strlen(text) + 1 < sizeof text; i++)
    strncat(text, beginnings[i % 8], sizeof text - 1 - strlen(text));
  for (int i = 0; i < FP8_TOKENS; i++) ids[i] = (unsigned char)text[i];
  size_t n = (size_t)FP8_TOKENS * m.config.vocab_size;
  float *want = (float*)xcalloc(n, 4), *got = (float*)xcalloc(n, 4), *other = (float*)xcalloc(n, 4);
  open_runner(&on_half, &gpu, &m, MATMUL_MMA, FP8_TOKENS, 300, 320);
  gpu.fp8_kv = true;
  open_runner(&on_fp8, &gpu, &m, MATMUL_MMA, FP8_TOKENS, 300, 320);
  gpu.fp8_kv = false;
  run_prompt(&on_half, 2, ids, FP8_TOKENS, FP8_TOKENS, want);
  run_prompt(&on_fp8, 2, ids, FP8_TOKENS, FP8_TOKENS, got);
  double worst = 0, squares = 0, spread = 0;
  for (size_t i = 0; i < n; i++) {
    double diff = fabs(got[i] - want[i]);
    if (!(diff <= worst)) worst = diff;
    squares += diff * diff / n;
    spread += want[i] * want[i] / n;
  }
  printf("fp8 cache, weights/tiny: logits of size %.3g differ by %.3g, at most %.3g\n",
         sqrt(spread), sqrt(squares), worst);
  double size = sqrt(spread);
  CHECK(worst <= FP8_WORST_TOL * size && worst > 0, "fp8 cache: a logit differs by %g", worst);
  CHECK(sqrt(squares) <= FP8_RMS_TOL * size, "fp8 cache: logits differ by %g", sqrt(squares));
  static const int chunks[] = {1, 7, 64, 200};
  for (int i = 0; i < 4; i++) {
    run_prompt(&on_fp8, i, ids, FP8_TOKENS, chunks[i], other);
    CHECK(memcmp(got, other, n * 4) == 0, "fp8 cache: chunks of %d give other bits", chunks[i]);
  }
  close_runner(&on_half, &gpu);
  close_runner(&on_fp8, &gpu);
  free_model(&m);
  free(want);
  free(got);
  free(other);
}

// ---- tokens of the engine loop: the same alone and in any company, on each device
// -------------------------------------

// 12 heads share a kv head, and keys are padded to 96: a decode step's attention takes two tiles.
static const Config many_queries = {"gqa 12:1, 80", 160,   2,    12, 1, 80, 224, 300, 1024,
                                    true,           1e-5f, 1e4f, 0,  0, 0,  0,   0,   {0}};

static void test_identity(const char* model, Device* d, const int* batches, int n_batches,
                          int out) {
  Model m;
  Weights w;
  Engine e;
  char err[ERR_LEN];
  enum { MOST = 256 };
  const Config* preset = strcmp(model, many_queries.name) ? find_preset(model) : &many_queries;
  bool loaded = preset ? random_model(preset, 0, &m) : load_model(model, &m, err);
  if (!loaded) die("%s", err);
  int most = batches[n_batches - 1];
  Request *one = (Request*)xcalloc(most, sizeof(Request)),
          *all = (Request*)xcalloc(most, sizeof(Request));
  for (int i = 0; i < most; i++) {
    make_request(&one[i], &m.config, 1 + (i * 37) % 150, out, 5, i);
    make_request(&all[i], &m.config, 1 + (i * 37) % 150, out, 5, i);
    one[i].temperature = all[i].temperature = i % 3 == 2 ? 0.8f : 0;  // sampled requests too
  }
  if (!weights_open(&w, d, &m, MATMUL_MMA, 150 + out, err)) die("%s", err);
  RunStats stats;
  memset(&stats, 0, sizeof stats);
  for (int i = 0; i < most; i++) {
    EngineSize size = {150, 1, 150 + out, 0};
    if (engine_open(&e, d, &w, size, err) != ROW_OK) die("%s", err);
    Limits limits = {1, 150, 0, 0, 0, 0, 0, 0};
    Workload alone = {&one[i], 1, POLICY_STATIC, limits, false, NULL};
    run_requests(&e, &alone, INFINITY, &stats);
    engine_close(&e);
  }
  for (int b = 0; b < n_batches; b++) {
    int steps[] = {batches[b] > 64 ? batches[b] : 64, 1000, 1000, 300};
    Policy policies[] = {POLICY_STATIC, POLICY_STATIC, POLICY_CONTINUOUS, POLICY_CONTINUOUS};
    for (int s = 0; s < 4; s++) {
      EngineSize size = {steps[s], batches[b], 150 + out, 0};
      if (engine_open(&e, d, &w, size, err) != ROW_OK) die("%s", err);
      Limits limits = {batches[b], steps[s], 0, 0, 0, 0, 0, 0};
      Workload batch = {all, batches[b], policies[s], limits, false, NULL};
      run_requests(&e, &batch, INFINITY, &stats);
      engine_close(&e);
      int differ = 0;
      for (int i = 0; i < batches[b]; i++)
        differ += memcmp(one[i].tokens, all[i].tokens, (one[i].n_prompt + out) * sizeof(int)) != 0;
      CHECK(differ == 0, "%s on %s: %d of %d requests have other tokens than alone (steps of %d)",
            model, d->name, differ, batches[b], steps[s]);
    }
  }
  free(stats.spans);
  weights_close(&w, d);
  free_model(&m);
}

// ---- the device: its ceilings, and memory that it refuses. Other processes on the card change
// both.

static void test_probes(void) {
  float* p = (float*)gpu_alloc(256);
  double mma = probe_mma_rate(&gpu, p), wgmma = probe_wgmma_rate(&gpu, p);
  printf("probed with mma.sync: %.0f TFLOP/s, with wgmma: %.0f\n", mma / 1e12, wgmma / 1e12);
  CHECK(wgmma == 0 || wgmma > mma, "wgmma multiplies at %g, mma.sync at %g", wgmma, mma);
  CHECK(gpu.rate > 0.9 * fmax(mma, wgmma), "the ceiling is %g (is the card in use?)", gpu.rate);
  gpu_free(p);
}

// Each allocation for the weights fails once: one line says so and nothing stays allocated.
static void test_refused_weights(void) {
  Model m;
  Weights w;
  char err[ERR_LEN];
  if (!load_model("weights/tiny", &m, err)) die("%s", err);
  if (!weights_open(&w, &gpu, &m, MATMUL_MMA, 64, err)) die("%s", err);
  weights_close(&w, &gpu);
  size_t used = gpu.api->used();
  int refused = 0;
  bool opened = false;
  for (int n = 0; n < 1000 && !opened; n++) {
    gpu.fail_after = n;
    opened = weights_open(&w, &gpu, &m, MATMUL_MMA, 64, err);
    gpu.fail_after = -1;
    if (opened) break;
    refused++;
    CHECK(strstr(err, "refused memory") && gpu.n_list == 0 && gpu.tagged[MEM_WEIGHTS] == 0,
          "allocation %d failed: %d stay. %s", n, gpu.n_list, err);
    CHECK(gpu.api->used() < used + MIB, "allocation %d failed: %.1f MiB stay (is the card in use?)",
          n, (gpu.api->used() - used) / MIB);
  }
  CHECK(opened && refused >= 10, "only %d allocations could fail", refused);
  if (opened) weights_close(&w, &gpu);
  CHECK(gpu.n_list == 0 && gpu.api->used() < used + MIB,
        "all memory is returned (is the card in use?)");
  free_model(&m);
}

int main(int argc, char** argv) {
  char err[ERR_LEN];
  (void)argc;
  limit_spinning(argv);
  setvbuf(stdout, NULL, _IOLBF, 0);  // a run that is stopped has said how far it came
  if (!device_open(&gpu, cuda_backend, 0, err)) {
    printf("skipped: %s\n0 passed, 0 failed, 1 skipped\n", err);
    return 0;
  }
  if (!device_open(&cpu, &cpu_backend, 0, err)) die("%s", err);
  printf("%s: dependent launch %s, probed %.0f GB/s and %.0f TFLOP/s\n", gpu.name,
         gpu.dependent_launch ? "on" : "off", gpu.bandwidth / 1e9, gpu.rate / 1e12);
  test_probes();
  test_matmul();
  test_slices(272, 1056);  // 3 blocks of rows; 33 k tiles: slices of 4 and 5
  test_slices(520, 256);   // 5 blocks of rows; slices of a single k tile
  test_little_shared_memory();
  test_wide_blocks();
  test_best();
  test_model("gqa 4:2, 64", 128, 4, 2, 64, 256, 512, true);
  test_model("mha, 32", 96, 3, 3, 32, 160, 300, false);
  test_model("mqa 20:1, 128", 256, 20, 1, 128, 320, 257, true);
  test_model("gqa 8:2, 80", 160, 8, 2, 80, 224, 1000, true);
  test_model("gqa 6:3, 96", 192, 6, 3, 96, 512, 333, false);
  test_model("gqa 12:1, 64", 192, 12, 1, 64, 256, 300, true);   // a token a run, yet two tiles
  test_model("gqa 10:2, 80", 160, 10, 2, 80, 224, 300, false);  // 3 tokens a run: 15 of 16 queries
  test_fp8_cache(4, 2, 64);
  test_fp8_cache(20, 1, 128);
  test_fp8_cache(3, 3, 32);
  test_fp8_cache(8, 2, 80);
  test_fp8_cache(6, 3, 96);
  test_fp8_cache(12, 1, 64);
  test_fp8_cache(5, 1, 96);
  test_fp8_pool();
  bool tiny = access("weights/tiny/model.safetensors", R_OK) == 0 && !getenv("NO_TINY");
  if (tiny) test_refused_weights();
  if (tiny) test_fp8_logits();
  static const int batches[] = {1, 3, 8, 17, 64, 136};
  for (int fp8_kv = 0; fp8_kv < 2; fp8_kv++) {
    gpu.fp8_kv = fp8_kv;
    test_identity("smollm2-135m", &gpu, batches, 6, 24);
    test_identity(many_queries.name, &gpu, batches, 6, 24);
    if (tiny) test_identity("weights/tiny", &gpu, batches, 6, 64);
    if (tiny) test_answers(&gpu);
    int sms = gpu.sms;
    gpu.sms = 1;  // a warp per run in prompts and decode steps, whose blocks meet several slots
    test_identity("smollm2-135m", &gpu, batches + 3, 3, 24);
    test_identity(many_queries.name, &gpu, batches + 3, 3, 24);
    gpu.sms = sms;
  }
  gpu.fp8_kv = false;
#ifndef NO_GOLDEN
  if (!getenv("NO_TINY")) test_golden(&gpu, 2e-2, true);
  test_variants(&gpu, 2e-2);  // of a standard deviation: activations are fp16 here
#endif
  device_close(&gpu);
  device_close(&cpu);
  return check_report();
}
