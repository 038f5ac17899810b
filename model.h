// clang-format off
// model.h: what is computed. A Llama-style transformer: its shape, its numbers, where they come
// from, and the forward pass on the CPU, which is both the oracle for the GPU's kernels and a fast
// path of its own. How batching runs it is in bs.cu.
//
//   Config, Tensor, Model     a shape, a stored or seeded tensor, a checkpoint
//   numbers                   fp16 as 16 bits, the hash behind random weights
//   presets                   real models' shapes
//   loader                    parts/loader.h: Hugging Face directory -> Model
//   Weights, KVCache, Batch   what a device holds; the flat list of tokens that is a step's work
//   vectors, matmul_cpu       the packed outer product: weights are read once for all tokens
//   forward_cpu               RMSNorm, RoPE, grouped-query attention, SwiGLU
//
// Letters in shapes: B sequences in a batch, T tokens in a step, R rows of logits, L layers,
// D model width, H query heads, G key/value heads, K head width, F hidden width, V vocabulary.
//
// Valid C11 and CUDA C++17. Linux, little endian.
// clang-format on
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE  // madvise
#endif
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __F16C__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#define PARALLEL_FOR _Pragma("omp parallel for schedule(static)")
#else
#define PARALLEL_FOR
#define omp_get_max_threads() 1
#define omp_get_thread_num() 0
#endif
#ifdef __CUDACC__
#define BS_HD __host__ __device__
#else
#define BS_HD
#endif

typedef struct {
  char name[64];
  int dim;          // D
  int n_layers;     // L
  int n_heads;      // H
  int n_kv_heads;   // G
  int head_dim;     // K
  int hidden_dim;   // F
  int vocab_size;   // V
  int max_context;  // longest prompt + output, tokens
  bool tied;        // the output matrix is the embedding
  float norm_eps;
  float rope_theta;
  float rope_factor, rope_low, rope_high;  // llama3 scaling; factor 0 = none
  int rope_original;                       // context the frequencies were trained at
  int n_eos, eos[4];                       // token ids that end a text
} Config;

// A tensor as it is stored: bytes inside a mapped file, or (data NULL) a seed to draw it from.
typedef enum { DT_F16, DT_BF16, DT_F32 } DType;
typedef struct {
  const void* data;
  DType dtype;
  uint32_t seed;   // used when data is NULL
  float scale;     // random weights are uniform in [-scale, scale)
  int rows, cols;  // [rows, cols]; a norm vector is [1, cols]
} Tensor;

enum { MAX_SHARDS = 256 };

typedef struct {
  void* addr;
  size_t len;
} Mapping;

typedef struct {
  Tensor attn_norm, q, k, v, o, mlp_norm, gate, up, down;
} LayerTensors;
typedef struct {
  Config config;
  Tensor embed, final_norm, head;  // head is embed when tied
  LayerTensors* layers;            // [L]
  Mapping maps[MAX_SHARDS];        // the files that the Tensors point into
  int n_maps;
} Model;

// Errors: functions that read files return false and write ONE line (file, place, reason; no
// trailing newline) to err.
#define ERR_LEN 512

// ---- Numbers. Weights (and a GPU's KV cache) are IEEE half precision kept as their 16 bits, so
// that C11, g++ and nvcc agree on the type.

typedef uint16_t f16;

BS_HD static inline float f16_to_f32(f16 h) {
  // Move exponent and mantissa into place, then multiply by 2^112 to correct the exponent bias; the
  // multiplication also normalises subnormals. Infinity and NaN become large finite numbers.
  uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
  float f;
  memcpy(&f, &bits, 4);
  f *= 5192296858534827628530496329220096.0f;
  return h & 0x8000 ? -f : f;
}

// Round to nearest even, as the hardware does. Magnitudes from 65,520 saturate to 65,504 so that no
// infinity is stored.
BS_HD static inline f16 f32_to_f16(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  uint32_t sign = (x >> 16) & 0x8000;
  x &= 0x7fffffff;
  if (x >= 0x477ff000) return (f16)(sign | 0x7bff);
  if (x < 0x38800000) {  // subnormal half: adding 0.5 makes the float adder do the shift and the
                         // rounding
    float tiny;
    memcpy(&tiny, &x, 4);
    tiny += 0.5f;
    memcpy(&x, &tiny, 4);
    return (f16)(sign | (x - 0x3f000000));
  }
  return (f16)(sign | ((x + 0xc8000fff + ((x >> 13) & 1)) >> 13));
}

// A 32-bit mixing function (multiply, xor-shift; constants of C. Wellons' "lowbias32" search).
BS_HD static inline uint32_t hash32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ (x >> 16);
}

// Element i of a stored or seeded tensor, as fp16. Host and device give the same bits: every step
// is an integer operation, a conversion or a single IEEE multiplication.
BS_HD static inline f16 tensor_at(const Tensor* t, size_t i) {
  if (t->data == NULL) {
    int32_t r =
        (int32_t)(hash32((uint32_t)i ^ hash32(t->seed ^ (uint32_t)(i >> 32))) >> 8) - (1 << 23);
    return f32_to_f16((float)r * (t->scale / 8388608.0f));
  }
  const char* p = (const char*)t->data;
  f16 h = t->dtype == DT_F16 ? (f16)((uint8_t)p[2 * i] | (uint8_t)p[2 * i + 1] << 8) : 0;
  if ((h & 0x7c00) == 0x7c00) return (f16)((h & 0x8000) | 0x7bff);  // infinity: the largest number
  if (t->dtype == DT_F16) return h;
  uint32_t bits = 0;  // bf16 is the upper half of a float32
  float f;
  if (t->dtype == DT_BF16) memcpy((char*)&bits + 2, p + 2 * i, 2);
  if (t->dtype == DT_F32) memcpy(&bits, p + 4 * i, 4);
  memcpy(&f, &bits, 4);
  return f32_to_f16(f);
}

// ---- Presets: the shapes of real models, with seeded random weights, so that a curve needs no
// download.

// clang-format off
static const Config presets[] = {
  // name, D, L, H, G, K, F, V, context, tied, norm_eps, theta, 4 of llama3 scaling, end tokens
  {"smollm2-135m", 576, 30, 9, 3, 64, 1536, 49152, 8192, true, 1e-5f, 1e5f, 0, 0, 0, 0, 0, {0}},
  {"tinyllama-1.1b", 2048, 22, 32, 4, 64, 5632, 32000, 2048, false, 1e-5f, 1e4f,
   0, 0, 0, 0, 0, {0}},
  {"llama-3.2-1b", 2048, 16, 32, 8, 64, 8192, 128256, 131072, true, 1e-5f, 5e5f,
   32, 1, 4, 8192, 0, {0}},
  {"llama-2-7b", 4096, 32, 32, 32, 128, 11008, 32000, 4096, false, 1e-5f, 1e4f, 0, 0, 0, 0, 0, {0}},
  {"llama-3-8b", 4096, 32, 32, 8, 128, 14336, 128256, 8192, false, 1e-5f, 5e5f, 0, 0, 0, 0, 0, {0}},
  {"llama-2-70b", 8192, 80, 64, 8, 128, 28672, 32000, 4096, false, 1e-5f, 1e4f, 0, 0, 0, 0, 0, {0}},
  {"cpu-90m", 768, 12, 12, 4, 64, 2048, 16384, 4096, true, 1e-5f, 1e4f, 0, 0, 0, 0, 0, {0}},
};
// clang-format on
enum { N_PRESETS = sizeof presets / sizeof presets[0] };

// A preset's tensors: each has a seed of its own and a scale that keeps activations near 1.
static Tensor random_tensor(uint32_t* seed, int rows, int cols) {
  Tensor t = {NULL, DT_F16, hash32(++*seed), sqrtf(3.0f / cols), rows, cols};
  return t;
}

static bool random_model(const Config* c, uint32_t seed, Model* m) {
  memset(m, 0, sizeof *m);
  m->config = *c;
  m->layers = (LayerTensors*)calloc(c->n_layers, sizeof *m->layers);
  if (!m->layers) return false;
  uint32_t next = hash32(seed);
  int q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
  m->embed = random_tensor(&next, c->vocab_size, c->dim);
  m->head = c->tied ? m->embed : random_tensor(&next, c->vocab_size, c->dim);
  for (int i = 0; i < c->n_layers; i++) {
    LayerTensors* l = &m->layers[i];
    l->q = random_tensor(&next, q, c->dim);
    l->k = random_tensor(&next, kv, c->dim);
    l->v = random_tensor(&next, kv, c->dim);
    l->o = random_tensor(&next, c->dim, q);
    l->gate = random_tensor(&next, c->hidden_dim, c->dim);
    l->up = random_tensor(&next, c->hidden_dim, c->dim);
    l->down = random_tensor(&next, c->dim, c->hidden_dim);
  }
  return true;
}

static const Config* find_preset(const char* name) {
  for (int i = 0; i < N_PRESETS; i++)
    if (strcmp(presets[i].name, name) == 0) return &presets[i];
  return NULL;
}
#include "parts/loader.h"

// ---- The model on a device. A Matrix is one linear layer, y[T, n] = x[T, k] . w[n, k]^T; how w
// lies in memory is the device's business (panel_index below, packed_index in parts/kernels.h),
// which rows it has is not: q, k and v are one matrix, gate and up are another, both with their
// rows in pairs (RowMap).

typedef struct {
  f16* w;
  int n, k;
  int slices;  // GPU: K is summed in this many pieces, added in a fixed order; depends on (n, k)
               // alone (see kernels)
} Matrix;

// Where row r of a stored tensor goes in a matrix. Rows whose results are combined in pairs, i with
// i + pair / 2 (the two halves of a rotated head; gate and up), lie 8 apart: pair 64 puts rows 0-7
// at 0, 32-39 at 8, 8-15 at 16, 40-47 at 24. A GPU thread that multiplies gets results 8 rows apart
// (the D of the mma, see parts/linear.h), so it has both of a pair and can combine them at once.
typedef struct {
  int first;  // row of the matrix where the tensor begins, before pairing
  int pair;   // rows in which pairs are formed; 0 = rows just follow each other
} RowMap;

BS_HD static inline int map_row(RowMap m, int r) {
  r += m.first;
  if (m.pair == 0) return r;
  int half_pair = m.pair / 2, i = r % m.pair;
  return r - i + i % half_pair / 8 * 16 + i / half_pair * 8 + i % 8;
}

typedef struct {
  Matrix qkv;        // [(H + 2G) K, D], paired within each head
  Matrix o;          // [D, H K]
  Matrix gate_up;    // [2F, D], gate paired with up
  Matrix down;       // [D, F]
  float* attn_norm;  // [D]
  float* mlp_norm;   // [D]
} Layer;

// Which rung of the GPU's kernels; the CPU has one.
typedef enum { MATMUL_NAIVE, MATMUL_GEMV, MATMUL_REUSE, MATMUL_MMA } Matmul;

typedef struct {
  Config config;
  Matmul matmul;
  Layer* layers;      // [L]
  Matrix embed;       // [V, D]
  Matrix head;        // [V, D], the same memory as embed when tied
  float* final_norm;  // [D]
  float* rope;        // [positions, K/2, 2] cosine and sine
} Weights;

enum { KV_BLOCK = 16, MAX_HEAD_DIM = 128 };  // tokens in a block of the paged KV cache; largest K

// The GPU keeps keys and values in fp16 or fp8, in an order of its own (parts/kernels.h). The CPU,
// the oracle, keeps them as floats.
typedef struct {
  void* k;           // CPU: [L, blocks, G, K, 16], so that 16 scores are one vector
  void* v;           // CPU: [L, blocks, G, 16, K]
  const int* table;  // [slots, max_blocks]: which block holds positions 16 i .. 16 i + 15 of a slot
  int n_blocks;
  int max_blocks;
} KVCache;

// One step's work: a FLAT list of tokens, decode tokens and prompt chunks alike; there is no [B, T]
// tensor. A static batch's padding is tokens like any other, since it is computed like any other.
// A slot's tokens stand together, positions ascending.
typedef struct {
  int n_tokens;  // T
  int n_rows;    // R: tokens whose logits are wanted: the last of each sequence that will grow
  int* id;       // [T] token id; -1: whatever this slot sampled last
  int* pos;      // [T] position in its sequence
  int* slot;     // [T] which sequence: row of the block table and of the sampler state
  int* row;      // [R] index into the T tokens
} Batch;

static inline int blocks_for(int n_tokens) {
  return (n_tokens + KV_BLOCK - 1) / KV_BLOCK;
}

// CPU: where the piece of kv head g begins that holds position pos, [K, 16] keys or [16, K] values.
static inline size_t kv_piece(const Config* c, const KVCache* kv, int layer, int slot, int pos,
                              int g) {
  int block = kv->table[(size_t)slot * kv->max_blocks + pos / KV_BLOCK];
  return (((size_t)layer * kv->n_blocks + block) * c->n_kv_heads + g) * KV_BLOCK * c->head_dim;
}

static inline int qkv_width(const Config* c) {
  return (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
}

// RoPE angles: theta^(-2i/K), and for Llama 3.1 and later the low frequencies divided by `factor`
// with a smooth ramp between (Hugging Face "llama3" scaling). table: [positions, K/2, 2].
static void rope_table(const Config* c, int positions, float* table) {
  int half_dim = c->head_dim / 2;
  for (int i = 0; i < half_dim; i++) {
    double freq = pow(c->rope_theta, -2.0 * i / c->head_dim);
    if (c->rope_factor > 0) {
      double turns = c->rope_original * freq /
                     (2 * 3.14159265358979323846);  // rotations in the training context
      double ramp = (turns - c->rope_low) / (c->rope_high - c->rope_low);
      ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
      freq *= ramp + (1 - ramp) / c->rope_factor;
    }
    for (int pos = 0; pos < positions; pos++) {
      table[((size_t)pos * half_dim + i) * 2] = (float)cos(pos * freq);
      table[((size_t)pos * half_dim + i) * 2 + 1] = (float)sin(pos * freq);
    }
  }
}

// ---- The CPU's vectors. GCC vector extensions: the compiler maps them to what the machine has
// (AVX-512, AVX2, SSE, NEON).

#if defined(__AVX512F__)
enum { LANES = 16, PANEL = 64 };  // PANEL x 6 tokens of accumulators fill 24 of 32 registers
#elif defined(__AVX__)
enum { LANES = 8, PANEL = 16 };  // 12 of 16
#else
enum { LANES = 4, PANEL = 8 };
#endif
// K_CHUNK: a panel of so many k's, widened to float, fits in the L1 cache.
enum { TOKEN_TILE = 6, K_CHUNK = 128, PANEL_VECS = PANEL / LANES };
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t veci __attribute__((vector_size(LANES * 4)));

static inline vec vec_load(const float* p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline void vec_store(float* p, vec v) {
  memcpy(p, &v, sizeof v);
}

static inline vec vec_set(float f) {  // a scalar with a vector: the compiler repeats the scalar
  return f - (vec){0};
}

#if defined(__AVX512F__)
static inline vec vec_load_f16(const f16* p) {
  return (vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
}
#elif defined(__F16C__)
static inline vec vec_load_f16(const f16* p) {
  return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
#else
static inline vec vec_load_f16(const f16* p) {
  float f[LANES];
  for (int i = 0; i < LANES; i++) f[i] = f16_to_f32(p[i]);
  return vec_load(f);
}
#endif

static inline float vec_sum(vec v) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}

// e^x to 2 units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, then n
// added to the exponent.
static inline vec vec_exp(vec x) {
  vec low = vec_set(-87.0f),
      high = vec_set(88.0f);  // beyond these the exponent would leave its field
  x = (vec)(((veci)x & ~(x < low)) | ((veci)low & (x < low)));
  x = (vec)(((veci)x & ~(x > high)) | ((veci)high & (x > high)));
  vec shifted =
      x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are round(x / ln 2)
  vec n = shifted - 12582912.0f;
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (vec)((veci)p + ((veci)shifted << 23));
}

// ---- Linear layers on the CPU: a packed outer product. Weights lie in panels of PANEL rows, k
// outermost, so one step of k is PANEL consecutive weights times one broadcast x per token: no
// horizontal sums. A panel's weights are read from memory once whatever the number of tokens, which
// is all that batching is about (article 2, section 4.2).

static inline size_t panel_index(int row, int col, int k) {
  return ((size_t)(row / PANEL) * k + col) * PANEL + row % PANEL;
}

static inline int padded_rows(int n) {
  return (n + PANEL - 1) / PANEL * PANEL;
}

// y[n_tokens][PANEL] (+)= x[n_tokens][n_k] . w[n_k][PANEL]. n_tokens is a constant at every call
// site, so the loops unroll and the accumulators stay in registers. Sums run over k in order: a
// token's result does not depend on its neighbours. More than one tile of tokens: the first reads
// the weights (w) and leaves them widened to float (in wide, which the L1 cache holds), the others
// take them from there (w is NULL). One tile: wide is NULL.
static inline __attribute__((always_inline)) void outer_product(
    int n_tokens, int n_k,
    const float* x,  // [n_tokens, k of the matrix]
    size_t x_stride,
    const f16* w,  // [n_k, PANEL]
    float* wide,   // [n_k, PANEL]
    float* y,      // [n_tokens, padded n of the matrix]
    size_t y_stride,
    bool first  // this is the first piece of k: y holds nothing yet
) {
  vec acc[TOKEN_TILE][PANEL_VECS];
  for (int t = 0; t < n_tokens; t++)
    for (int r = 0; r < PANEL_VECS; r++)
      acc[t][r] = first ? vec_set(0) : vec_load(y + t * y_stride + r * LANES);
  for (int k = 0; k < n_k; k++) {
    vec weight[PANEL_VECS];
    for (int r = 0; r < PANEL_VECS; r++) {
      float* wk = wide ? wide + k * PANEL + r * LANES : NULL;
      const f16* wf = w ? w + k * PANEL + r * LANES : NULL;
      if (w && r * LANES % 32 == 0)
        __builtin_prefetch(wf + 1024);  // a line, 2 KB ahead: best of 0.5 to 8 KB
      weight[r] = w ? vec_load_f16(wf) : vec_load(wk);
      if (w && wide) vec_store(wk, weight[r]);
    }
    for (int t = 0; t < n_tokens; t++)
      for (int r = 0; r < PANEL_VECS; r++) acc[t][r] += weight[r] * x[t * x_stride + k];
  }
  for (int t = 0; t < n_tokens; t++)
    for (int r = 0; r < PANEL_VECS; r++) vec_store(y + t * y_stride + r * LANES, acc[t][r]);
}

static inline void outer_tile(int n_tokens, int n_k, const float* x, size_t x_stride, const f16* w,
                              float* wide, float* y, size_t y_stride, bool first) {
  switch (n_tokens) {
    case 1: outer_product(1, n_k, x, x_stride, w, wide, y, y_stride, first); break;
    case 2: outer_product(2, n_k, x, x_stride, w, wide, y, y_stride, first); break;
    case 3: outer_product(3, n_k, x, x_stride, w, wide, y, y_stride, first); break;
    case 4: outer_product(4, n_k, x, x_stride, w, wide, y, y_stride, first); break;
    case 5: outer_product(5, n_k, x, x_stride, w, wide, y, y_stride, first); break;
    default: outer_product(TOKEN_TILE, n_k, x, x_stride, w, wide, y, y_stride, first); break;
  }
}

// y[T, n padded to PANEL] = x[T, k] . w^T
static void matmul_cpu(float* y, const float* x, const Matrix* m, int n_tokens) {
  int n_padded = padded_rows(m->n);
  PARALLEL_FOR
  for (int panel = 0; panel < n_padded / PANEL; panel++) {
    float wide[K_CHUNK * PANEL] __attribute__((aligned(64)));
    for (int k0 = 0; k0 < m->k; k0 += K_CHUNK) {
      int n_k = m->k - k0 < K_CHUNK ? m->k - k0 : K_CHUNK;
      const f16* w = m->w + panel_index(panel * PANEL, k0, m->k);
      for (int t = 0; t < n_tokens; t += TOKEN_TILE) {
        const float* xt = x + (size_t)t * m->k + k0;
        float* yt = y + (size_t)t * n_padded + panel * PANEL;
        outer_tile(n_tokens - t, n_k, xt, m->k, t ? NULL : w, n_tokens > TOKEN_TILE ? wide : NULL,
                   yt, n_padded, k0 == 0);
      }
    }
  }
}

// ---- forward on the CPU: the oracle for every kernel, and the device where there is no GPU.

typedef struct {   // working memory for at most T tokens, R rows
  float* x;        // [T, D] the residual stream
  float* normed;   // [T, D]
  float* qkv;      // [T, padded (H + 2G) K]
  float* att;      // [T, H K]
  float* gate_up;  // [T, padded 2F]; o's and down's [T, padded D] results go here too
  float* hidden;   // [T, F]
  float* scores;   // [threads, H / G, positions]
  int positions;   // longest sequence
} CpuScratch;

// out[D] = x / sqrt(mean(x^2) + eps) * weight. RMSNorm, Zhang & Sennrich 2019.
static void rms_norm(float* out, const float* x, const float* weight, int dim, float eps) {
  double sum = 0;
  for (int i = 0; i < dim; i++) sum += (double)x[i] * x[i];
  float scale = 1.0f / sqrtf((float)(sum / dim) + eps);
  for (int i = 0; i < dim; i++) out[i] = x[i] * scale * weight[i];
}

// out[n, D]: rows row[0..n) of x[T, D] (NULL: the first n), normalised.
static void norm_rows(float* out, const float* x, const float* weight, const int* row, int n,
                      const Config* c) {
  size_t D = c->dim;
  PARALLEL_FOR
  for (int r = 0; r < n; r++)
    rms_norm(out + r * D, x + (row ? row[r] : r) * D, weight, c->dim, c->norm_eps);
}

// One head from paired rows to its natural order, rotated on the way if angles [K/2, 2] are given
// (RoPE; Hugging Face rotates element i with i + K/2).
static void unpair_head(float* out, const float* paired, const float* angles, int head_dim) {
  int half_dim = head_dim / 2;
  for (int i = 0; i < half_dim; i++) {
    float a = paired[i / 8 * 16 + i % 8], b = paired[i / 8 * 16 + i % 8 + 8];
    float c = angles ? angles[2 * i] : 1, s = angles ? angles[2 * i + 1] : 0;
    out[i] = a * c - b * s;
    out[i + half_dim] = b * c + a * s;
  }
}

// Rotates q and k of token t; q goes back in natural order, k and v into the cache.
static void rope_and_store(const Weights* w, const KVCache* kv, const Batch* b, int layer, int t,
                           float* qkv) {
  const Config* c = &w->config;
  int head_dim = c->head_dim, offset = b->pos[t] % KV_BLOCK;
  const float* angles = w->rope + (size_t)b->pos[t] * head_dim;
  float head[MAX_HEAD_DIM];
  for (int h = 0; h < c->n_heads + 2 * c->n_kv_heads; h++) {
    bool is_q = h < c->n_heads, is_v = h >= c->n_heads + c->n_kv_heads;
    unpair_head(head, qkv + h * head_dim, is_v ? NULL : angles, head_dim);
    if (is_q) memcpy(qkv + h * head_dim, head, head_dim * sizeof(float));
    if (is_q) continue;
    int g = (h - c->n_heads) % c->n_kv_heads;
    size_t block = kv_piece(c, kv, layer, b->slot[t], b->pos[t], g);
    for (int i = 0; i < head_dim; i++) {
      if (is_v) ((float*)kv->v)[block + offset * head_dim + i] = head[i];
      if (!is_v) ((float*)kv->k)[block + i * KV_BLOCK + offset] = head[i];
    }
  }
}

// Attention of token t for the query heads that share kv head g: softmax(q . k / sqrt(K)) . v over
// positions 0 .. pos. scores: [heads, positions]. Sums run in an order that depends on the position
// alone.
static void attend(const Weights* w, const KVCache* kv, const Batch* b, int layer, int t, int g,
                   const float* q, float* scores, int positions, float* out) {
  const Config* c = &w->config;
  int head_dim = c->head_dim, heads = c->n_heads / c->n_kv_heads, length = b->pos[t] + 1;
  float scale = 1.0f / sqrtf((float)head_dim);
  // Scores: a block's 16 keys at once, each key read once for all query heads that share it.
  for (int p = 0; p < length; p += KV_BLOCK) {
    const float* k = (const float*)kv->k + kv_piece(c, kv, layer, b->slot[t], p, g);
    for (int h = 0; h < heads; h++) {
      for (int lane = 0; lane < KV_BLOCK; lane += LANES) {
        vec dot = vec_set(0);
        for (int i = 0; i < head_dim; i++)
          dot += vec_load(k + i * KV_BLOCK + lane) * q[h * head_dim + i];
        vec_store(scores + (size_t)h * positions + p + lane, dot * scale);
      }
    }
  }
  // Softmax over the positions.
  for (int h = 0; h < heads; h++) {
    float* s = scores + (size_t)h * positions;
    float max = s[0];
    for (int p = 1; p < length; p++) max = s[p] > max ? s[p] : max;
    for (int p = length; p % KV_BLOCK; p++) s[p] = -INFINITY;  // the rest of the last block
    vec total = vec_set(0);
    for (int p = 0; p < blocks_for(length) * KV_BLOCK; p += LANES) {
      vec e = vec_exp(vec_load(s + p) - max);
      vec_store(s + p, e);
      total += e;
    }
    for (int p = length; p % KV_BLOCK; p++) s[p] = 0;
    for (int i = 0; i < head_dim; i++) out[h * head_dim + i] = 0;
    float inverse = 1.0f / vec_sum(total);
    for (int p = 0; p < length; p++) s[p] *= inverse;
  }
  // The values, weighted.
  for (int p = 0; p < length; p++) {
    const float* v = (const float*)kv->v + kv_piece(c, kv, layer, b->slot[t], p, g) +
                     (size_t)(p % KV_BLOCK) * head_dim;
    for (int i = 0; i < head_dim; i += LANES) {
      vec value = vec_load(v + i);
      for (int h = 0; h < heads; h++) {
        float* o = out + h * head_dim + i;
        vec_store(o, vec_load(o) + value * scores[(size_t)h * positions + p]);
      }
    }
  }
}

// hidden[F] = silu(gate) * up, from paired rows. SwiGLU, Shazeer 2020.
static void swiglu(float* hidden, const float* gate_up, int hidden_dim) {
  for (int i = 0; i < hidden_dim; i += 8) {
    float silu[16] = {0};  // 8 are used; with AVX-512 a vector is 16
    memcpy(silu, gate_up + 2 * i, 8 * sizeof(float));
    for (int j = 0; j < 8; j += LANES) {
      vec gate = vec_load(silu + j);
      vec_store(silu + j, gate / (vec_exp(-gate) + 1.0f));
    }
    for (int j = 0; j < 8; j++) hidden[i + j] = silu[j] * gate_up[2 * i + 8 + j];
  }
}

// Adds a linear layer's result y[T, padded D] to the residual stream.
static void add_residual(float* x, const float* y, int n_tokens, int dim) {
  int padded = padded_rows(dim);
  PARALLEL_FOR
  for (int t = 0; t < n_tokens; t++)
    for (int i = 0; i < dim; i++) x[(size_t)t * dim + i] += y[(size_t)t * padded + i];
}

static void attention_layer(const Weights* w, const KVCache* kv, const Batch* b, int layer,
                            CpuScratch* s) {
  const Config* c = &w->config;
  const Layer* l = &w->layers[layer];
  int T = b->n_tokens, group = c->n_heads / c->n_kv_heads, head_dim = c->head_dim;
  size_t qkv_stride = padded_rows(qkv_width(c)), att_stride = (size_t)c->n_heads * head_dim;
  norm_rows(s->normed, s->x, l->attn_norm, NULL, T, c);
  matmul_cpu(s->qkv, s->normed, &l->qkv, T);  // [T, D] -> [T, (H + 2G) K]
  PARALLEL_FOR
  for (int t = 0; t < T; t++) rope_and_store(w, kv, b, layer, t, s->qkv + t * qkv_stride);
  PARALLEL_FOR
  for (int job = 0; job < T * c->n_kv_heads; job++) {
    int t = job / c->n_kv_heads, g = job % c->n_kv_heads;
    float* scores = s->scores + (size_t)omp_get_thread_num() * group * s->positions;
    attend(w, kv, b, layer, t, g, s->qkv + t * qkv_stride + g * group * head_dim, scores,
           s->positions, s->att + t * att_stride + g * group * head_dim);
  }
  float* delta = s->gate_up;            // which is free here
  matmul_cpu(delta, s->att, &l->o, T);  // [T, H K] -> [T, D]
  add_residual(s->x, delta, T, c->dim);
}

static void mlp_layer(const Weights* w, int n_tokens, int layer, CpuScratch* s) {
  const Config* c = &w->config;
  const Layer* l = &w->layers[layer];
  norm_rows(s->normed, s->x, l->mlp_norm, NULL, n_tokens, c);
  matmul_cpu(s->gate_up, s->normed, &l->gate_up, n_tokens);  // [T, D] -> [T, 2F]
  PARALLEL_FOR
  for (int t = 0; t < n_tokens; t++)
    swiglu(s->hidden + (size_t)t * c->hidden_dim,
           s->gate_up + (size_t)t * padded_rows(2 * c->hidden_dim), c->hidden_dim);
  float* delta = s->gate_up;                         // has been used
  matmul_cpu(delta, s->hidden, &l->down, n_tokens);  // [T, F] -> [T, D]
  add_residual(s->x, delta, n_tokens, c->dim);
}

// logits[R, V padded] of the batch's rows. Token ids must be known (no -1).
static void forward_cpu(const Weights* w, const KVCache* kv, const Batch* b, CpuScratch* s,
                        float* logits) {
  const Config* c = &w->config;
  for (int t = 0; t < b->n_tokens; t++)
    for (int i = 0; i < c->dim; i++)
      s->x[(size_t)t * c->dim + i] = f16_to_f32(w->embed.w[panel_index(b->id[t], i, c->dim)]);
  for (int layer = 0; layer < c->n_layers; layer++) {
    attention_layer(w, kv, b, layer, s);
    mlp_layer(w, b->n_tokens, layer, s);
  }
  norm_rows(s->normed, s->x, w->final_norm, b->row, b->n_rows, c);
  matmul_cpu(logits, s->normed, &w->head, b->n_rows);
}

// Score of token v when sampling: logit / temperature plus Gumbel noise from a hash. Shared by both
// devices.
BS_HD static inline float gumbel_score(float logit, float temperature, uint32_t seed, int v) {
  float u = ((float)(hash32(seed ^ hash32((uint32_t)v)) >> 8) + 0.5f) / 16777216.0f;
  return logit / temperature - logf(-logf(u));
}

// The token that a row of logits gives: the largest score, the lowest id among equals. Twin:
// sample_kernel.
static int sample_cpu(const float* logits, int vocab, float temperature, uint32_t seed) {
  int best = 0;
  float best_score = -INFINITY;
  for (int v = 0; v < vocab; v++) {
    float score = temperature > 0 ? gumbel_score(logits[v], temperature, seed, v) : logits[v];
    if (score > best_score) {
      best = v;
      best_score = score;
    }
  }
  return best;
}
