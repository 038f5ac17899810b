// The GPU's half of bs: the same forward pass as forward_cpu in model.h, as CUDA kernels written by
// hand, and the Backend (bs.cu) that launches them. bs.cu includes it when nvcc compiles; nothing
// in it decides who runs or when.
//
//   fragments           how data lies so that one load per lane feeds a matrix unit
//   what the GPU holds  token list, cache, a step's state; how a kernel is launched
//   norm, RoPE          what happens between linear layers
//   logits              how the next token is chosen
//   linear layers       a ladder of five rungs: naive, gemv, reuse, skinny (1 to 8 tokens), tile
//   attention           one kernel for decode and prefill, over the paged cache
//   sampling, loading   on the device; so are random weights
//   ceilings, backend   probes; memory; one step as launches, recorded as a CUDA graph
//
// A kernel is followed by the function that launches it.
//
// Letters in shapes are model.h's.
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

// ---- Kernels. All data that a matrix unit multiplies lies in memory the way its registers want
// it, so that a load of weights is one 128-bit access per lane, 512 contiguous bytes per warp, with
// no shuffling in between:
//
//   mma m16n8k16: D[16 rows, 8 tokens] += A[16, 16] . B[16, 8]. Lane = 4 g + t (g 0..7, t 0..3)
//   holds A: rows g and g + 8; B: token g; D: rows g and g + 8 of tokens 2t and 2t + 1.
//
// A sum over k may be taken in any order as long as A and B agree on it, so lane t takes the 8
// CONSECUTIVE k's 8t .. 8t+7 of every 32: two mmas' worth. For an activation row, plain row-major
// memory then already is the fragment: 16 bytes at 8t. Weights are A, packed once at load into 16 x
// 32 tiles of 1 KB.
//
// Tokens are B's columns, and an empty column costs as much as a full one. So a step of 8 tokens
// reads and multiplies what a step of 1 does: this is why batch 8 is as cheap as batch 1.

enum { WARP = 32, TILE_ROWS = 16, TILE_K = 32, TILE_HALVES = TILE_ROWS * TILE_K, MAX_SLICES = 8 };
enum { BLOCK_TILES = 8, BLOCK_ROWS = BLOCK_TILES * TILE_ROWS };  // rows are padded to whole blocks

// Where element (row, col) of a [n, k] matrix lies after packing: [n / 128][k / 32][8 tiles], so
// that what 128 rows need of some k's is one piece. Row 9, k 13, for example: tile 0, its second
// mma, lane 5 (g 1, t 1), register a1, the upper half.
__host__ __device__ static inline size_t packed_index(int row, int col, int k) {
  size_t tile = ((size_t)(row / BLOCK_ROWS) * (k / TILE_K) + col / TILE_K) * BLOCK_TILES +
                row % BLOCK_ROWS / TILE_ROWS;
  int r = row % TILE_ROWS, c = col % TILE_K;
  int lane = (r % 8) * 4 + c / 8;
  int mma = (c % 8) / 4;                // which of the tile's two mmas
  int reg = r / 8 + 2 * ((c % 4) / 2);  // a0: row g, a1: row g + 8, a2 and a3: their next pair of k
  return tile * TILE_HALVES + mma * (TILE_HALVES / 2) + lane * 8 + reg * 2 + c % 2;
}

enum { TOKEN_GROUP = 128, SKINNY_TOKENS = 8 };  // up to 8 tokens: the columns of one mma

// Tokens are stored in groups of 128, fewer when there are fewer.
__host__ __device__ constexpr int token_group(int tokens) {
  return tokens <= 16 ? 16 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : TOKEN_GROUP;
}

// Where k of token t lies among the activations [T, n_k] that a linear layer reads. Up to 8 tokens
// (group = 0): row-major. More: [T / group][k / 8][group][8]. ldmatrix and wgmma read 8 k's of 8
// tokens at once, two k's for each of four lanes; so piece j of every 32 k's is the j'th pair of
// each lane's eight: k's 2j, 2j + 1, then 8 + 2j, 9 + 2j, then 16 + 2j, ...
__host__ __device__ static inline size_t activation_index(int t, int k, int n_k, int group) {
  if (!group) return (size_t)t * n_k + k;
  size_t piece = (size_t)(t / group) * (n_k / 8) + k / 32 * 4 + k % 8 / 2;
  return (piece * group + t % group) * 8 + k % 32 / 8 * 2 + k % 2;
}

// V of one cache block [16 tokens, K] for p . v: lane (g, t) finds tokens 4t .. 4t+3 of dims g and
// g + 8 in 16 bytes.
__host__ __device__ static inline int v_index(int token, int dim) {
  return (dim / 16) * 256 + (dim % 8) * 32 + (token / 4) * 8 + ((dim / 8) % 2) * 4 + token % 4;
}

// Streams weights past the L1 cache, which the activations need.
__device__ static inline uint4 load_weights(const uint4* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // Turing: the same product in two halves of k
__device__ static inline void mma(float d[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(b0));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.z), "r"(a.w), "r"(b1));
}
#else
__device__ static inline void mma(float d[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
__device__ static inline void copy_async(void* shared, const void* global, bool wanted) {
  if (wanted) *(uint4*)shared = *(const uint4*)global;
}
__device__ static inline void copy_commit() {
}
template <int PENDING>
__device__ static inline void copy_wait() {
}
#else
// Predicated, not branched around, so that copies are issued in between mmas.
__device__ static inline void copy_async(void* shared, const void* global, bool wanted) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(
          (uint32_t)__cvta_generic_to_shared(shared)),
      "l"(global), "r"((int)wanted)
      : "memory");
}
__device__ static inline void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ static inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif

// Programmatic dependent launch: a kernel starts while the one before it drains, and waits here
// before it touches anything that kernel wrote. What it asks for before the wait (weights) arrives
// meanwhile. Every kernel of a step waits, so a kernel's end implies the end of all before it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ static inline void wait_for_previous() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
#else
__device__ static inline void wait_for_previous() {
}
#endif

// Asks for some KB to be in the L2 cache soon.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ static inline void prefetch(const void* p, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
#else
__device__ static inline void prefetch(const void*, int) {
}
#endif

// ---- What the GPU holds: the step's token list, the cache, what becomes of q, k and v; a step's
// state. Then how a kernel is launched.

typedef struct {               // the step's token list on the device
  int *id, *pos, *slot, *row;  // as in Batch
  int4* run;   // [runs] attention: first token, number of tokens, slot, first position
  int* table;  // [slots, max_blocks]
} DeviceBatch;

// The cache is made of pages: 16 tokens' keys, or values, of one kv head. fp16: the numbers. fp8:
// the numbers in e4m3, then a scale of two bytes for each token.
typedef struct {
  void* k;  // [L, blocks, G] pages of [16, KD], fp8 in the order of fp8_key_index
            // KD = K rounded up to 32, the rest zero
  void* v;  // [L, blocks, G] pages of [16 K] in the order of v_index
  int n_blocks, max_blocks;
  int heads, kv_heads, layer;
} DeviceKV;

typedef struct {  // what becomes of qkv's results
  half* q;        // [T, H, KD]
  DeviceKV kv;
  const float2* angles;  // [positions, K/2] cosine and sine
  DeviceBatch batch;
  int head_dim;
} QkvTarget;

typedef struct {
  int token;
  float score;
} Candidate;

typedef struct {  // per slot
  int* sampled;   // last token
  uint32_t* seed;
  float* temperature;
} DeviceSampler;

typedef struct {    // where logits go
  Candidate* best;  // [R, pieces] the best token of each piece of the vocabulary
  DeviceBatch batch;
  DeviceSampler sampler;
} SampleTarget;

// BATCH_INTS: ints a token has in the lists: a run (4), id, pos, slot, row.
enum { MAX_GRAPHS = 64, BATCH_INTS = 8 };

typedef struct {
  int n_tokens, splits;
  cudaGraphExec_t exec;
} StepGraph;

typedef struct Gpu {
  cudaStream_t stream;
  const Device* device;
  Matmul matmul;
  bool fp8_kv;
  float *x, *y, *logits, *partial;  // [T, D], linear layers' results, [R, V], attention splits
  half *normed, *att, *hidden;      // [T, D], [T, H K], [T, F]
  int* arrived;                     // attention: blocks of a run that are done
  QkvTarget qkv;                    // q, the cache, the token list
  SampleTarget sample;
  int *staging,
      *sampled;         // pinned, a part per step in flight: what goes up, what comes back [slots]
  size_t staging_ints;  // one part of staging: token lists, block table, sampler
  cudaEvent_t base, end[IN_FLIGHT];
  double base_time;  // when `base` happened, on now()'s clock
  Batch last;        // the decode step before, if the device has moved its list on by itself
  StepGraph graphs[MAX_GRAPHS];
  int n_graphs;
} Gpu;

#define CUDA_CHECK(call)                                                       \
  do {                                                                         \
    cudaError_t e_ = (call);                                                   \
    if (e_ != cudaSuccess)                                                     \
      die("%s:%d: %s: %s", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
  } while (0)

// cluster: of blocks that are neighbours in y.
template <typename... P, typename... A>
static void launch_clusters(const Gpu* g, int cluster, void (*kernel)(P...), dim3 grid, int threads,
                            size_t shared, A... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = g->stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {1, (unsigned)cluster, 1};
  config.attrs = attributes;
  config.numAttrs = !g->device->dependent_launch ? 0 : cluster > 1 ? 2 : 1;  // both: 9.0 or later
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

template <typename... P, typename... A>
static void launch(const Gpu* g, void (*kernel)(P...), dim3 grid, int threads, size_t shared,
                   A... args) {
  launch_clusters(g, 1, kernel, grid, threads, shared, args...);
}

static int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

// In groups of how many tokens a step of this size stores its activations: see activation_index.
static int activation_group(const Gpu* g, int n_tokens) {
  if (g->matmul != MATMUL_MMA || n_tokens <= SKINNY_TOKENS) return 0;
  return token_group(g->device->shared_bytes < 99 * 1024 && n_tokens > 64 ? 64 : n_tokens);
}

// ---- Between linear layers: the embedding, and RMSNorm of the residual stream.

// x[T, D] = embedding of each token; an id of -1 is the token its slot sampled last.
__global__ void embed_kernel(float* x, const half* embed, DeviceBatch b, const int* sampled,
                             int dim, bool packed) {
  wait_for_previous();
  int t = blockIdx.x, id = b.id[t];
  if (id < 0) id = sampled[b.slot[t]];
  for (int i = threadIdx.x; i < dim; i += blockDim.x)
    x[(size_t)t * dim + i] =
        __half2float(embed[packed ? packed_index(id, i, dim) : (size_t)id * dim + i]);
}

__device__ static inline float add(float a, float b) {
  return a + b;
}
__device__ static inline float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

enum { NORM_THREADS = 256 };  // of every block that normalises: one summation order

// The sums of N values over a block's 256 threads, in a fixed order; every thread gets them.
template <int N>
__device__ static void block_sums(float v[N]) {
  __shared__ float partial[NORM_THREADS / WARP][N];
#pragma unroll
  for (int i = 0; i < N; i++) {
    for (int offset = 16; offset > 0; offset /= 2) v[i] += __shfl_xor_sync(~0u, v[i], offset);
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP][i] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) {
    v[i] = 0;
    for (int w = 0; w < NORM_THREADS / WARP; w++) v[i] += partial[w][i];
  }
}

__device__ static inline float square4(float4 v) {
  return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}

// Four elements of x * scale * weight, as fp16.
__device__ static inline void norm4(half2 to[2], float4 x, float scale, float4 w) {
  to[0] = __floats2half2_rn(x.x * scale * w.x, x.y * scale * w.y);
  to[1] = __floats2half2_rn(x.z * scale * w.z, x.w * scale * w.w);
}

typedef struct {  // a linear layer's result whose k slices may still be apart: [parts, T, n], see
                  // "Linear layers"
  const float* y;
  int parts;      // 0 = there is no such result
  bool pairs;     // a part is the sum of two slices
  size_t stride;  // floats from one part to the next
} Unsummed;

// Element i (of type V) of the result: the slices of each pair added, then the pairs in index
// order. All loads first.
template <typename V>
__device__ static inline V sum_slices(Unsummed u, size_t i) {
  V part[MAX_SLICES], sum = ((const V*)u.y)[i];
#pragma unroll
  for (int p = 1; p < MAX_SLICES; p++)
    if (p < u.parts) part[p] = ((const V*)(u.y + p * u.stride))[i];
  if (u.pairs) {
#pragma unroll
    for (int p = 1; p < MAX_SLICES / 2; p++)
      if (p < u.parts) sum = add(sum, part[p]);
    return sum;
  }
  if (u.parts > 1) sum = add(sum, part[1]);
#pragma unroll
  for (int s = 2; s < MAX_SLICES; s += 2)
    if (s < u.parts) sum = add(sum, add(part[s], part[s + 1]));
  return sum;
}

// x[T, D] += a linear layer's result, see sum_slices; normed[R, D] = RMSNorm(x) * weight,
// as fp16. One block per output row; row[r] names the token (NULL: all of them). Must move 4 bytes
// an element for each part and 10 for x and normed. PRECONDITION: D is a multiple of 4, at most
// MOST x 1,024. MOST = 2 needs 74 registers instead of 128, which leaves room for the next kernel
// to start. Twin: rms_norm.
template <int MOST>
__global__ void __launch_bounds__(NORM_THREADS)
    add_norm_kernel(half* normed, float* x, Unsummed y, const float* weight, const int* row,
                    int dim, float eps, int group) {
  float4 v[MOST], w[MOST];
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    int at = i * NORM_THREADS + threadIdx.x;
    if (at < dim / 4) w[i] = ((const float4*)weight)[at];
  }
  wait_for_previous();
  int t = row ? row[blockIdx.x] : blockIdx.x;
  float4* xt = (float4*)(x + (size_t)t * dim);
  float sum[1] = {0};
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    int at = i * NORM_THREADS + threadIdx.x;
    if (at >= dim / 4) break;
    v[i] = xt[at];  // stores come below: here they would hold up the next loads
    if (y.parts) v[i] = add(v[i], sum_slices<float4>(y, (size_t)t * dim / 4 + at));
    sum[0] += square4(v[i]);
  }
  block_sums<1>(sum);
  float scale = rsqrtf(sum[0] / dim + eps);
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    int at = i * NORM_THREADS + threadIdx.x;
    if (at >= dim / 4) break;
    if (y.parts) xt[at] = v[i];
    half2 h[2];
    norm4(h, v[i], scale, w[i]);
    for (int j = 0; j < 2; j++)
      *(half2*)(normed + activation_index(blockIdx.x, at * 4 + j * 2, dim, group)) = h[j];
  }
}

static void add_norm(const Gpu* g, const Config* c, int rows, Unsummed y, const float* weight,
                     const int* row) {
  auto kernel = c->dim <= 2048 ? add_norm_kernel<2> : add_norm_kernel<8>;
  launch(g, kernel, dim3(rows), NORM_THREADS, 0, g->normed, g->x, y, weight, row, c->dim,
         c->norm_eps, activation_group(g, rows));
}

// ---- Where q, k and v go.

__host__ __device__ static inline int key_width(int head_dim) {
  return (head_dim + 31) / 32 * 32;
}

__device__ static inline size_t kv_page(const DeviceKV* kv, const int* table, int slot, int pos,
                                        int g) {
  int block = table[(size_t)slot * kv->max_blocks + pos / KV_BLOCK];
  return ((size_t)kv->layer * kv->n_blocks + block) * kv->kv_heads + g;
}

typedef uint8_t fp8;

// Pages of numbers N begin on whole sectors of 32 bytes: KD is a multiple of 32, K of 16.
template <typename N>
__host__ __device__ constexpr int page_bytes(int width) {
  return KV_BLOCK * (width * (int)sizeof(N) + (sizeof(N) == 1 ? (int)sizeof(half) : 0));
}

template <typename N>
__device__ static inline N* page_at(void* pages, size_t page, int width) {
  return (N*)((char*)pages + page * page_bytes<N>(width));
}

// fp8: lane (column, t) finds what attend_chunk multiplies, numbers 8t .. 8t+7 of every 32 of its
// two keys, in 16 bytes.
__host__ __device__ static inline int fp8_key_index(int token, int dim) {
  int column = token / 4 * 2 + token % 2;
  return ((dim / 32 * 8 + column) * 4 + dim % 32 / 8) * 16 + token % 4 / 2 * 8 + dim % 8;
}

__device__ static inline void rotate(const QkvTarget* to, int pos, int i, float* first,
                                     float* second) {
  float2 a = to->angles[(size_t)pos * (to->head_dim / 2) + i];
  float rotated = *first * a.x - *second * a.y;
  *second = *second * a.x + *first * a.y;
  *first = rotated;
}

// Elements i and i + K/2 of one head of token t: rotated if q or k, then to q or, as fp16, into the
// cache. Twin: rope_and_store.
__device__ static inline void store_qkv(const QkvTarget* to, int t, int head, int i, float first,
                                        float second) {
  const DeviceKV* kv = &to->kv;
  int slot = to->batch.slot[t], pos = to->batch.pos[t], half_dim = to->head_dim / 2,
      width = key_width(to->head_dim);
  if (slot < 0) return;  // padding
  half* row = to->q + ((size_t)t * kv->heads + head) * width;
  int g = head - kv->heads, first_at = i, second_at = i + half_dim;
  if (g < kv->kv_heads) rotate(to, pos, i, &first, &second);
  if (g >= 0 && g < kv->kv_heads)
    row = page_at<half>(kv->k, kv_page(kv, to->batch.table, slot, pos, g), width) +
          pos % KV_BLOCK * width;
  if (g >= kv->kv_heads) {
    row = page_at<half>(kv->v, kv_page(kv, to->batch.table, slot, pos, g - kv->kv_heads),
                        to->head_dim);
    first_at = v_index(pos % KV_BLOCK, i);
    second_at = v_index(pos % KV_BLOCK, i + half_dim);
  }
  row[first_at] = __ushort_as_half(f32_to_f16(first));
  row[second_at] = __ushort_as_half(f32_to_f16(second));
}

// Adds up the parts of qkv and stores them: 4 bytes an element for each part, 2 for the result. A
// thread per pair; blockIdx.x = token.
__global__ void rope_kernel(QkvTarget to, Unsummed qkv) {
  wait_for_previous();
  int t = blockIdx.x, half_dim = to.head_dim / 2, heads = to.kv.heads + 2 * to.kv.kv_heads;
  int head = (blockIdx.y * blockDim.x + threadIdx.x) / half_dim,
      i = (blockIdx.y * blockDim.x + threadIdx.x) % half_dim;
  if (head >= heads) return;
  size_t at = ((size_t)t * heads + head) * to.head_dim + i / 8 * 16 + i % 8;
  store_qkv(&to, t, head, i, sum_slices<float>(qkv, at), sum_slices<float>(qkv, at + 8));
}

enum { FP8_ROPE_WARPS = 4 };

// The same for an fp8 cache. A warp per head, since k and v need the head's largest number: the
// scale takes it to e4m3's largest, 448, and is rounded up so that nothing is cut off. A scale
// depends on nothing but its own token: answers stay the same in any company.
__global__ void __launch_bounds__(FP8_ROPE_WARPS* WARP)
    rope_fp8_kernel(QkvTarget to, Unsummed qkv) {
  enum { PAIRS = MAX_HEAD_DIM / 2 / WARP };
  wait_for_previous();
  const DeviceKV* kv = &to.kv;
  int t = blockIdx.x, half_dim = to.head_dim / 2, heads = kv->heads + 2 * kv->kv_heads;
  int head = blockIdx.y * FP8_ROPE_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  int slot = to.batch.slot[t], pos = to.batch.pos[t], token = pos % KV_BLOCK;
  if (head >= heads || slot < 0) return;
  float pair[PAIRS][2] = {}, most = 0;
  bool is_key = head < kv->heads + kv->kv_heads;
  for (int j = 0; j < PAIRS; j++) {
    int i = lane + j * WARP;
    if (i >= half_dim) break;
    size_t at = ((size_t)t * heads + head) * to.head_dim + i / 8 * 16 + i % 8;
    pair[j][0] = sum_slices<float>(qkv, at);
    pair[j][1] = sum_slices<float>(qkv, at + 8);
    if (head < kv->heads) store_qkv(&to, t, head, i, pair[j][0], pair[j][1]);
    if (is_key) rotate(&to, pos, i, &pair[j][0], &pair[j][1]);
    for (int e = 0; e < 2; e++) {
      pair[j][e] = __half2float(__ushort_as_half(f32_to_f16(pair[j][e])));  // no infinity
      most = fmaxf(most, fabsf(pair[j][e]));
    }
  }
  if (head < kv->heads) return;
  for (int offset = 16; offset > 0; offset /= 2)
    most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
  half scale = __float2half_ru(most / 448);
  int g = (head - kv->heads) % kv->kv_heads, width = is_key ? key_width(to.head_dim) : to.head_dim;
  fp8* page =
      page_at<fp8>(is_key ? kv->k : kv->v, kv_page(kv, to.batch.table, slot, pos, g), width);
  if (lane == 0) ((half*)(page + KV_BLOCK * width))[token] = scale;
  for (int j = 0; j < PAIRS; j++) {
    for (int e = 0; e < 2; e++) {
      int i = lane + j * WARP, dim = i + e * half_dim;
      float x = most > 0 ? pair[j][e] / __half2float(scale) : 0;
      if (i < half_dim)
        page[is_key ? fp8_key_index(token, dim) : v_index(token, dim)] =
            __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    }
  }
}

// Where qkv's results are not stored by who computes or who reads them.
static void rope(const Gpu* g, int n_tokens, QkvTarget to, Unsummed qkv) {
  int heads = to.kv.heads + 2 * to.kv.kv_heads;
  if (g->fp8_kv) {
    launch(g, rope_fp8_kernel, dim3(n_tokens, ceil_div(heads, FP8_ROPE_WARPS)),
           FP8_ROPE_WARPS * WARP, 0, to, qkv);
  } else {
    launch(g, rope_kernel, dim3(n_tokens, ceil_div(heads * to.head_dim / 2, 128)), 128, 0, to, qkv);
  }
}

// ---- What becomes of logits: sampling on the device, so that a decode step never waits for the
// host. Greedy is the largest logit; temperature > 0 adds Gumbel noise to logit / temperature,
// whose largest element is a sample of the softmax (Gumbel-max trick). The noise is a hash of
// (request's seed, position, token), so a request draws the same text wherever and whenever it
// runs.

__device__ static inline Candidate better(Candidate a, Candidate b) {
  bool take_b = b.score > a.score || (b.score == a.score && b.token < a.token);
  return take_b ? b : a;
}

__device__ static inline Candidate warp_best(Candidate c) {
  for (int offset = 16; offset > 0; offset /= 2) {
    Candidate other = {__shfl_xor_sync(~0u, c.token, offset),
                       __shfl_xor_sync(~0u, c.score, offset)};
    c = better(c, other);
  }
  return c;
}

enum { SAMPLE_THREADS = 256 };

// The best of a block's candidates; thread 0 gets it.
__device__ static inline Candidate block_best(Candidate c) {
  __shared__ Candidate warps[SAMPLE_THREADS / WARP];
  c = warp_best(c);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = c;
  __syncthreads();
  for (int i = 0; i < SAMPLE_THREADS / WARP; i++) c = better(c, warps[i]);
  return c;
}

typedef struct {  // how a row of logits is read
  bool wanted;    // not padding
  float temperature;
  uint32_t seed;  // of this position
} Draw;

__device__ static inline Draw row_draw(const SampleTarget* to, int r) {
  int t = to->batch.row[r], slot = to->batch.slot[t];
  if (slot < 0) return {false, 0, 0};
  uint32_t seed = hash32(to->sampler.seed[slot] ^ hash32(to->batch.pos[t]));
  return {true, to->sampler.temperature[slot], seed};
}

__device__ static inline Candidate candidate(Draw d, float logit, int token) {
  return {token, d.temperature > 0 ? gumbel_score(logit, d.temperature, d.seed, token) : logit};
}

// ---- Linear layers, y[T, n] = x[T, k] . w[n, k]^T, a ladder of five rungs.
//
// Identical answers at every batch size need one summation order. For a matrix (n, k) it is: K is
// cut into `slices`, 1, 2, 4 or 8, chosen from (n, k) alone; inside a slice one chain of mmas, k
// ascending; slices are added in pairs, and the pairs in index order: ((s0 + s1) + (s2 + s3)) + ...
// How tokens and rows are spread over warps and blocks cannot change a bit. The tile kernel may
// leave slices or pairs unsummed in y[parts, T, n] when that gives the machine enough blocks; the
// kernel that reads y next adds them in the same order.

typedef enum {
  OUT_FLOAT,     // y[T, n], fp32
  OUT_SWIGLU,    // hidden[T, n/2] = silu(gate) * up, fp16
  OUT_RESIDUAL,  // x[T, n] += y, fp32 (few tokens only)
  OUT_QKV,       // see store_qkv (few tokens only)
  OUT_BEST,      // see store_best (many tokens only)
} Output;

__device__ static inline int slice_start(Matrix m, int slice) {
  return slice * (m.k / TILE_K) / m.slices;  // in tiles of 32
}

__device__ static inline float silu_mul(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Rungs 1 to 3: LANES threads for a row of row-major weights, 16 bytes a load, and TOKENS tokens.
// <1, 1> (naive): neighbouring threads read rows k apart and only the caches save it. <32, 1>
// (GEMV, a warp per row): loads are as wide as can be, near the memory roofline at batch 1; but
// every sequence reads all weights again, so batching buys nothing: the lower line of
// throughput.png. <32, 8> (reuse): what was read serves 8 tokens. That is the whole idea of
// batching, by plain arithmetic; but 8 multiplications for every weight, one by one, soon take
// longer than the reading, and that is what matrix units are for. (Tokens that are missing are
// multiplied too, as copies of the last: batch 1 costs what 8 does.) Must move 2 n k bytes for
// every TOKENS tokens. PRECONDITION: k is a multiple of 8.
template <int LANES, int TOKENS>
__global__ void matmul_rows_kernel(void* out, Output mode, const half* x, Matrix m, int n_tokens) {
  wait_for_previous();
  int k = m.k, outputs = mode == OUT_SWIGLU ? m.n / 2 : m.n, t0 = blockIdx.y * TOKENS,
      lane = threadIdx.x % LANES;
  int i = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  if (i >= outputs) return;
  float sum[2][TOKENS] = {};  // of the row; SwiGLU: of gate and, 8 rows on, up
  for (int part = 0; part <= (mode == OUT_SWIGLU); part++) {
    const half* row =
        (const half*)m.w + (size_t)(mode == OUT_SWIGLU ? i / 8 * 16 + i % 8 + 8 * part : i) * k;
    for (int j = lane * 8; j < k; j += LANES * 8) {
      uint4 wv = *(const uint4*)(row + j);
      const half* w8 = (const half*)&wv;
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        uint4 xv = *(const uint4*)(x + (size_t)min(t0 + t, n_tokens - 1) * k + j);
        const half* x8 = (const half*)&xv;
#pragma unroll
        for (int e = 0; e < 8; e++) sum[part][t] += __half2float(w8[e]) * __half2float(x8[e]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    for (int part = 0; part < 2; part++)
      for (int offset = LANES / 2; offset > 0; offset /= 2)
        sum[part][t] += __shfl_xor_sync(~0u, sum[part][t], offset);
    size_t at = (size_t)(t0 + t) * outputs + i;
    if (lane > 0 || t0 + t >= n_tokens) continue;
    if (mode == OUT_SWIGLU) ((half*)out)[at] = __float2half(silu_mul(sum[0][t], sum[1][t]));
    if (mode == OUT_FLOAT) ((float*)out)[at] = sum[0][t];
  }
}

// Writes one lane's share of a 16 x 8 result tile: d = {row g of tokens 2t, 2t+1, row g + 8 of the
// same}.
template <Output MODE>
__device__ static inline void store_tile(void* out, const float d[4], int row0, int n,
                                         int n_tokens) {
  int lane = threadIdx.x % WARP, row = row0 + lane / 4, token = lane % 4 * 2;
  if (row0 >= n) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (token + i >= n_tokens) return;
    float* y = (float*)out + (size_t)(token + i) * n + row;
    if (MODE == OUT_SWIGLU) {  // gate in row g, its up in row g + 8
      ((half*)out)[(size_t)(token + i) * (n / 2) + row0 / 2 + lane / 4] =
          __float2half(silu_mul(d[i], d[i + 2]));
    } else if (MODE == OUT_QKV) {
      const QkvTarget* to = (const QkvTarget*)out;
      store_qkv(to, token + i, row0 / to->head_dim, row0 % to->head_dim / 2 + lane / 4, d[i],
                d[i + 2]);
    } else {
      if (row < n) y[0] = MODE == OUT_RESIDUAL ? y[0] + d[i] : d[i];
      if (row + 8 < n) y[8] = MODE == OUT_RESIDUAL ? y[8] + d[i + 2] : d[i + 2];
    }
  }
}

// Rung 4: 1 to 8 tokens, the columns of one mma, where a step is bound by weights and by latency
// and each token more is nearly free. A warp owns 16 rows and one slice of k; its weights stream
// through a ring of 16 loads in flight (8 KB a warp, 64 KB a block; Little's law at 4.3 TB/s and
// 0.8 us asks for 26 KB an SM), the first 16 issued before waiting for the previous kernel. What
// would be a kernel before and after is done in place: RMSNorm of the residual stream on the way
// in, and RoPE, SwiGLU or the residual addition on the way out. Must move 2 n k bytes.
enum { SKINNY_WARPS = 8, RING = 8 };  // ring: in tiles of 1 KB

typedef struct {
  const half* x;        // [T, k] activations, or NULL: normalise these:
  const float* stream;  // [tokens, k] the residual stream
  const float* weight;  // [k]
  const int* row;       // [T] which tokens; NULL = all
  float eps;
} SkinnyInput;

// RMSNorm of up to 8 tokens into shared memory, [k / 32][T][32]: rows of 32 k's, as the B fragments
// want them.
__device__ static void norm_tokens(half* normed, const float4* weight, const SkinnyInput* in, int k,
                                   int n_tokens) {
  enum { AT_ONCE = 4 };  // loads overlap; the ring of weights leaves registers for no more
#pragma unroll 1
  for (int t0 = 0; t0 < n_tokens; t0 += AT_ONCE) {
    const float4* x[AT_ONCE];
    float sum[AT_ONCE] = {};
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
      int token = min(t0 + t, n_tokens - 1);
      x[t] = (const float4*)(in->stream + (size_t)(in->row ? in->row[token] : token) * k);
    }
#pragma unroll 2
    for (int at = threadIdx.x; at < k / 4; at += NORM_THREADS)
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) sum[t] += square4(x[t][at]);
    block_sums<AT_ONCE>(sum);
    copy_wait<0>();
#pragma unroll 1
    for (int at = threadIdx.x; at < k / 4; at += NORM_THREADS) {
      float4 w = weight[at];  // which this thread has copied
      half* to = normed + (at / 8 * n_tokens + t0) * TILE_K + at % 8 * 4;
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++)
        if (t0 + t < n_tokens)
          norm4((half2*)(to + t * TILE_K), x[t][at], rsqrtf(sum[t] / k + in->eps), w);
    }
    __syncthreads();
  }
}

template <Output MODE, bool NORM>
__global__ void __launch_bounds__(SKINNY_WARPS* WARP, 2)
    matmul_skinny_kernel(void* out, QkvTarget qkv, SkinnyInput in, Matrix m, int n_tokens) {
  constexpr int STEP = BLOCK_TILES * 64;  // 16 bytes from one k tile to the next
  extern __shared__ uint4 shared[];
  __shared__ float partial[SKINNY_WARPS][TILE_ROWS * 8];
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  int k = m.k, row_tile = blockIdx.x * (SKINNY_WARPS / m.slices) + warp / m.slices,
      slice = warp % m.slices;
  int start = slice_start(m, slice), count = slice_start(m, slice + 1) - start;
  if (row_tile * TILE_ROWS >= m.n) count = 0;
  const uint4* wp =
      (const uint4*)m.w + packed_index(row_tile * TILE_ROWS, start * TILE_K, k) / 8 + lane;
  uint4 a[RING][2], b[RING];
#pragma unroll
  for (int i = 0; i < RING; i++) {
    if (i < count) a[i][0] = load_weights(wp + i * STEP);
    if (i < count) a[i][1] = load_weights(wp + i * STEP + 32);
  }
  float4* norm_weight = (float4*)((half*)shared + (size_t)n_tokens * k);
  for (int at = threadIdx.x; NORM && at < k / 4; at += NORM_THREADS)
    copy_async(norm_weight + at, (const float4*)in.weight + at, true);
  copy_commit();
  wait_for_previous();
  if (NORM) norm_tokens((half*)shared, norm_weight, &in, k, n_tokens);
  const int step = NORM ? n_tokens * TILE_K : TILE_K;  // halves from one tile of k to the next
  const half* xp = NORM ? (const half*)shared + (start * n_tokens + g) * TILE_K + t * 8
                        : in.x + (size_t)g * k + start * TILE_K + t * 8;
#pragma unroll
  for (int i = 0; i < RING; i++) {
    b[i] = make_uint4(0, 0, 0, 0);
    if (i < count && g < n_tokens) b[i] = *(const uint4*)(xp + i * step);
  }
  float d[4] = {0, 0, 0, 0};
  for (int base = 0; base < count; base += RING) {
#pragma unroll
    for (int i = 0; i < RING; i++) {
      int next = base + i + RING;
      if (base + i < count) {
        mma(d, a[i][0], b[i].x, b[i].y);
        mma(d, a[i][1], b[i].z, b[i].w);
      }
      if (next < count) {
        a[i][0] = load_weights(wp + next * STEP);
        a[i][1] = load_weights(wp + next * STEP + 32);
        if (g < n_tokens) b[i] = *(const uint4*)(xp + next * step);
      }
    }
  }
  if (m.slices > 1) {
    for (int i = 0; i < 4; i++) partial[warp][i * WARP + lane] = d[i];
    __syncthreads();
    if (slice > 0) return;
    for (int i = 0; i < 4; i++) d[i] += partial[warp + 1][i * WARP + lane];
    for (int s = 2; s < m.slices; s += 2)
      for (int i = 0; i < 4; i++)
        d[i] += partial[warp + s][i * WARP + lane] + partial[warp + s + 1][i * WARP + lane];
  }
  store_tile<MODE>(MODE == OUT_QKV ? (void*)&qkv : out, d, row_tile * TILE_ROWS, m.n, n_tokens);
}

// Up to 8 tokens: with what comes before and after fused in.
template <Output MODE, bool NORM>
static void matmul_skinny(const Gpu* g, void* out, SkinnyInput in, const Matrix* m, int n_tokens,
                          int layer) {
  auto kernel = matmul_skinny_kernel<MODE, NORM>;
  size_t shared = NORM ? m->k * (n_tokens * sizeof(half) + sizeof(float)) : 0;
  static bool configured;
  if (!configured)
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    g->device->shared_bytes - 8192));
  configured = true;
  QkvTarget qkv = g->qkv;
  qkv.kv.layer = layer;
  int blocks = ceil_div(ceil_div(m->n, TILE_ROWS), SKINNY_WARPS / m->slices);
  launch(g, kernel, dim3(blocks), SKINNY_WARPS * WARP, shared, out, qkv, in, *m, n_tokens);
}

// Rung 5: any number of tokens. A block of 8 warps computes 128 rows x TOKENS, a warp 16 rows x
// TOKENS, so that each weight enters registers once. k runs through a ring of shared-memory stages
// of 64, the weights of the first ones asked for before waiting for the previous kernel. In a stage
// 8 tokens x 8 k's are 128 contiguous bytes (see activation_index), which both ldmatrix and wgmma
// read without bank conflicts. At 64 tokens on an H200 gate-up takes 21.8 us: 20.0 without the
// products, 15.1 without the copies (NOTES.md, section 6, has more).
//
// On Hopper one thread keeps the ring full with bulk copies, one for all weights of a stage (with 8
// copies of 2 KB instead gate-up took 33 us), and from 33 tokens on four warps multiply together
// with wgmma, which reads the activations once per 64 rows and runs at 1.5 times mma.sync's rate.
// Both instructions gave the same bits for 8 million sums of four kinds of numbers; the tests
// compare them, since up to 32 tokens it is mma.sync.
//
// Must move 2 n k bytes for every TOKENS tokens, 2 k for each token and 128 rows, 4 n a token
// (SwiGLU: n). blockIdx: x = TOKENS tokens (first, so that blocks that share weights run together),
// y = 128 rows, z = one slice (gridDim.z == slices), a pair (slices / 2) or all (1). SLICED, for
// more than one slice, keeps three sums: of the slice, of the pair and of all pairs before it.
enum {
  STAGE_TILES = 2,                                 // k tiles of a stage
  STAGE_WEIGHTS = BLOCK_TILES * STAGE_TILES * 64,  // in 16 bytes: [2 k tiles][8 row tiles][1 KB]
};

__host__ __device__ constexpr int stage_size(int tokens) {  // in 16 bytes
  return STAGE_WEIGHTS + STAGE_TILES * 4 * tokens;
}

// Walks k, in tiles of 32, over the slices that a block owns: one, or if SLICED several. A stage
// never crosses a slice's end.
typedef struct {
  int at, end;       // k tiles
  int slice, last;   // the slice they are of; the block's last one
  int slot, parity;  // of the ring: where the stage lies, how often it went round
} KWalk;

template <int STAGES, bool SLICED>
__device__ static inline void walk_next(KWalk* w, Matrix m) {
  if (++w->slot == STAGES) {
    w->slot = 0;
    w->parity ^= 1;
  }
  w->at += STAGE_TILES;
  if (!SLICED || w->at < w->end || w->slice == w->last) return;
  w->slice++;
  w->at = w->end;
  w->end = slice_start(m, w->slice + 1);
}

// k tiles of the stage at w; none after the last.
__device__ static inline int walk_tiles(const KWalk* w) {
  return min((int)STAGE_TILES, w->end - w->at);
}

__device__ static inline uint32_t shared_address(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // code for sm_90a
enum { HAVE_WGMMA = 1 };

// d[16 rows of each of 4 warps, N tokens] += a . b; b: 2 pieces of [N tokens][8 k's]. Runs on by
// itself until wgmma_wait.
#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define D32(i) D4(i), D4(i + 1), D4(i + 2), D4(i + 3), D4(i + 4), D4(i + 5), D4(i + 6), D4(i + 7)
#define R32                                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R64                                                                                     \
  R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
      "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
template <int N>
__device__ static inline void wgmma(float d[][4], uint4 a, const uint4* b) {
  // The address, the steps to the next 8 k's and to the next 8 tokens, all in 16 bytes.
  uint64_t where = (shared_address(b) & 0x3ffff) >> 4 | (uint64_t)N << 16 | (uint64_t)8 << 32;
  if constexpr (N == 64)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" R32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : D32(0)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(where));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" R64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
                 : D32(0), D32(8)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(where));
}

__device__ static inline void wgmma_start() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ static inline void wgmma_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>  // until at most this many groups are under way
__device__ static inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Makes what ordinary stores wrote to shared memory visible to wgmma; before a barrier.
__device__ static inline void wgmma_publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ static inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
}

__device__ static inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}
#else
enum { HAVE_WGMMA = 0 };
__device__ static inline void more_registers() {
}
__device__ static inline void fewer_registers() {
}
template <int N>
__device__ static inline void wgmma(float[][4], uint4, const uint4*) {
}
__device__ static inline void wgmma_start() {
}
__device__ static inline void wgmma_end() {
}
template <int PENDING>
__device__ static inline void wgmma_wait() {
}
__device__ static inline void wgmma_publish() {
}
#endif

// Warps beyond the 8 that multiply, see ring_fill. Where these need more than 168 registers a
// thread it is a whole warpgroup, because only warpgroups can give each other registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__device__ constexpr int fill_warps(int, bool) {
  return 0;
}
#else
__host__ __device__ constexpr int fill_warps(int tokens, bool sliced) {
  return tokens * (sliced ? 3 : 1) >= 256 ? 4 : 1;
}
#endif

// Blocks of 128 and 256 tokens run in clusters of two: the same tokens, neighbouring rows. Where
// the code is for sm_90a each fetches half of the activations for both, so that there is a third
// less to read from the L2 cache at 256 tokens, a quarter less at 128: its 5.8 TB/s are their
// limit. (Four would be better yet, but an H200 holds fewer than 32 clusters of four at once:
// gate-up's 128 blocks would take two turns.)
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ constexpr int cluster_size(int) {
  return 1;
}
#else
__host__ __device__ constexpr int cluster_size(int tokens) {
  return tokens >= 128 ? 2 : 1;
}
#endif

// What a block streams through shared memory: its rows' weights and its tokens' activations.
typedef struct {
  Matrix m;
  const uint4 *w, *x;  // the block's rows and tokens
  int groups, group;   // of its tokens; 16 bytes from one to the next
  KWalk load;          // the next stage to fill
  uint4* stages;
  uint64_t *full, *empty;  // [STAGES] a stage's bytes have arrived; all warps have used it, those
                           // of the cluster's other block too
} Ring;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ static inline void barrier_open(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ static inline void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ static inline void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again; }" ::
          "r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// All threads of a cluster, after barrier_open: its fence is all the ordering that is needed.
__device__ static inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait;" ::: "memory");
}

// BOTH: to the same place in both blocks of a cluster, counted by the same barrier of each.
template <bool BOTH>
__device__ static inline void copy_bulk(uint4* to, const void* from, int bytes, uint64_t* full) {
  if constexpr (BOTH)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(full)), "h"((uint16_t)3)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(full))
        : "memory");
}

template <int TOKENS>
__device__ static inline void fill_weights(const Ring* r, const KWalk* to) {
  int tiles = walk_tiles(to), bytes = tiles * BLOCK_TILES * 1024;
  if (tiles <= 0) return;
  barrier_expect(r->full + to->slot, tiles * stage_size(TOKENS) / STAGE_TILES * 16);
  copy_bulk<false>(r->stages + to->slot * stage_size(TOKENS),
                   r->w + (size_t)to->at * BLOCK_TILES * 64, bytes, r->full + to->slot);
}

// A block's share of a stage's activations: of 8 pieces (of 8 k's) of each group of tokens. A last
// stage has fewer pieces.
template <int TOKENS>
__device__ static inline void fill_tokens(const Ring* r, const KWalk* to) {
  constexpr int GROUP = token_group(TOKENS), CLUSTER = cluster_size(TOKENS), ALL = STAGE_TILES * 4,
                SHARE = TOKENS / GROUP * ALL / CLUSTER, AT_ONCE = SHARE < ALL ? SHARE : ALL;
  int pieces = walk_tiles(to) * 4;
#pragma unroll
  for (int i = 0; i < SHARE; i += AT_ONCE) {
    int at = (int)(blockIdx.y % CLUSTER) * SHARE + i, group = at / ALL, piece = at % ALL;
    if (piece < pieces)
      copy_bulk<(CLUSTER > 1)>(
          r->stages + to->slot * stage_size(TOKENS) + STAGE_WEIGHTS + at * GROUP,
          r->x + min(group, r->groups - 1) * r->group + (to->at * 4 + piece) * GROUP,
          min(AT_ONCE, pieces - piece) * GROUP * 16, r->full + to->slot);
  }
}

// One thread beyond the warps that multiply does nothing but this (as a task of a multiplying warp:
// 1,350 us a step at 64 tokens instead of 1,314). Returns whether the caller is of a warp beyond.
template <int TOKENS, int STAGES, bool SLICED>
__device__ static bool ring_fill(Ring* r) {
  if (threadIdx.x < STAGES) {
    barrier_open(r->full + threadIdx.x, 1);
    barrier_open(r->empty + threadIdx.x, BLOCK_TILES * cluster_size(TOKENS));
  }
  if (cluster_size(TOKENS) > 1) {
    cluster_sync();  // the other block's barriers are open, too
  } else {
    __syncthreads();
  }
  if (threadIdx.x < BLOCK_TILES * WARP) {
    if (fill_warps(TOKENS, SLICED) == 4) more_registers();
    return false;
  }
  if (fill_warps(TOKENS, SLICED) == 4) fewer_registers();
  if (threadIdx.x > BLOCK_TILES * WARP) return true;
  KWalk early = r->load;
  for (int i = 0; i < STAGES; i++) {
    fill_weights<TOKENS>(r, &early);
    walk_next<STAGES, SLICED>(&early, r->m);
  }
  wait_for_previous();
  int i = 0;
  for (; walk_tiles(&r->load) > 0; i++) {
    if (i >= STAGES) {
      barrier_wait(r->empty + r->load.slot, r->load.parity ^ 1);
      fill_weights<TOKENS>(r, &r->load);
    }
    fill_tokens<TOKENS>(r, &r->load);
    walk_next<STAGES, SLICED>(&r->load, r->m);
  }
  // A block of a cluster stays until the other one has signalled its last use of every slot. Turn i
  // waits for the use of turn i - STAGES; before the first STAGES there was none.
  for (int last = i + STAGES; cluster_size(TOKENS) > 1 && i < last; i++) {
    if (i >= STAGES) barrier_wait(r->empty + r->load.slot, r->load.parity ^ 1);
    walk_next<STAGES, SLICED>(&r->load, r->m);
  }
  return true;
}

template <int STAGES>
__device__ static inline void ring_wait(const Ring* r, const KWalk* use) {
  barrier_wait(r->full + use->slot, use->parity);
}

// In a cluster lanes 0 and 1 tell a block each, since both write to the slot. What this orders are
// reads that are complete (products waited for, weights in registers), so it does without
// .release.cluster, which takes far too long (2,938 us a step at 256 tokens instead of 2,509).
template <int TOKENS, int STAGES, bool SLICED>
__device__ static inline void ring_release(Ring* r, int slot) {
  __syncwarp();
  int lane = threadIdx.x % WARP;
  if (cluster_size(TOKENS) == 1 && lane == 0)
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(r->empty + slot))
                 : "memory");
  if (cluster_size(TOKENS) == 2 && lane < 2)
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [a]; }" ::"r"(shared_address(r->empty + slot)),
        "r"(lane)
        : "memory");
}
#else  // all threads copy, 16 bytes each
template <int TOKENS, int STAGES, bool SLICED>
__device__ static inline void fill_stage(Ring* r) {
  constexpr int GROUP = token_group(TOKENS), PART = GROUP * 4 * STAGE_TILES;
  int tiles = walk_tiles(&r->load), at = r->load.at;
  uint4* stage = r->stages + r->load.slot * stage_size(TOKENS);
  const uint4* w = r->w + (size_t)at * BLOCK_TILES * 64 + threadIdx.x;
#pragma unroll
  for (int i = 0; i < STAGE_WEIGHTS; i += BLOCK_TILES * WARP)
    copy_async(stage + i + threadIdx.x, w + i, i / (STAGE_WEIGHTS / STAGE_TILES) < tiles);
#pragma unroll
  for (int i = threadIdx.x; i < STAGE_TILES * 4 * TOKENS; i += BLOCK_TILES * WARP)
    copy_async(stage + STAGE_WEIGHTS + i,
               r->x + min(i / PART, r->groups - 1) * r->group + at * GROUP * 4 + i % PART,
               i % PART / (GROUP * 4) < tiles);
  copy_commit();
  walk_next<STAGES, SLICED>(&r->load, r->m);
}

template <int TOKENS, int STAGES, bool SLICED>
__device__ static inline bool ring_fill(Ring* r) {
  for (int i = 0; i < STAGES; i++) fill_stage<TOKENS, STAGES, SLICED>(r);
  return false;
}

template <int STAGES>
__device__ static inline void ring_wait(const Ring*, const KWalk*) {
  copy_wait<STAGES - 2>();
  __syncthreads();  // so the stage before this one has been used by all
}

template <int TOKENS, int STAGES, bool SLICED>
__device__ static inline void ring_release(Ring* r, int) {
  fill_stage<TOKENS, STAGES, SLICED>(r);
}
#endif

// Four 8 x 8 pieces of activations, each lane naming a row of one: the B operands of two mmas.
__device__ static inline uint4 load_matrices(const uint4* row) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"((uint32_t)__cvta_generic_to_shared(row)));
  return r;
}

// d += one k tile of a warp's 16 rows . all tokens; with wgmma under way until wgmma_wait.
template <int TOKENS>
__device__ static inline void multiply_tile(float d[][4], const uint4 a[2], const uint4* tokens) {
  constexpr int GROUP = token_group(TOKENS), STEP = STAGE_TILES * 4 * GROUP;
  if constexpr (HAVE_WGMMA && GROUP >= 64) {
    wgmma_start();
#pragma unroll
    for (int i = 0; i < TOKENS / GROUP; i++)
      wgmma<GROUP>(d + i * GROUP / 8, a[0], tokens + i * STEP);
#pragma unroll
    for (int i = 0; i < TOKENS / GROUP; i++)
      wgmma<GROUP>(d + i * GROUP / 8, a[1], tokens + i * STEP + 2 * GROUP);
    wgmma_end();
  } else {
    tokens += threadIdx.x % WARP / 8 * GROUP + threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i += 2) {  // two at a time: an accumulator's next mma can wait
      const uint4* from = tokens + i * 8 / GROUP * STEP + i * 8 % GROUP;
      uint4 b0 = load_matrices(from), b1 = load_matrices(from + 8);
      mma(d[i], a[0], b0.x, b0.y);
      mma(d[i + 1], a[0], b1.x, b1.y);
      mma(d[i], a[1], b0.z, b0.w);
      mma(d[i + 1], a[1], b1.z, b1.w);
    }
  }
}

__device__ static inline void sync_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(BLOCK_TILES * WARP) : "memory");
}

// A block's 128 rows x TOKENS of gate and up become 64 k's of the next tile kernel's activations,
// put together in shared memory: from registers they would be written 4 bytes in each 32-byte
// sector. out: of the first token; n_tokens: how many of TOKENS exist.
template <int TOKENS>
__device__ static inline void store_swiglu(half* out, uint4* shared, const float d[][4], int row0,
                                           int n, int n_tokens) {
  constexpr int GROUP = token_group(TOKENS), PIECES = BLOCK_ROWS / 2 / 8;
  int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  half* to = (half*)shared + activation_index(t * 2, warp * 8 + g, BLOCK_ROWS / 2, TOKENS);
  sync_multipliers();  // all have used the last stages
#pragma unroll
  for (int i = 0; i < TOKENS / 8; i++) {
    to[i * 64] = __float2half(silu_mul(d[i][0], d[i][2]));
    to[i * 64 + 8] = __float2half(silu_mul(d[i][1], d[i][3]));
  }
  sync_multipliers();
  int first = row0 / 16, pieces = min((int)PIECES, n / 16 - first);
  for (int i = threadIdx.x; i < pieces * TOKENS; i += BLOCK_TILES * WARP) {
    int piece = i / TOKENS, token = i % TOKENS;
    size_t at = (size_t)(token / GROUP) * (n / 16) + first + piece;
    if (token < n_tokens) ((uint4*)out)[at * GROUP + token % GROUP] = shared[i];
  }
}

// Writes one lane's share of a warp's 16 rows x TOKENS, see store_tile.
template <int TOKENS>
__device__ static inline void store_floats(float* out, const float d[][4], int row0, int n,
                                           int n_tokens) {
  int row = row0 + threadIdx.x % WARP / 4, token = threadIdx.x % 4 * 2;
  float* y = out + (size_t)token * n + row;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; i++, y += (size_t)8 * n)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (token + i * 8 + j % 2 < n_tokens && row + j / 2 * 8 < n)
        y[(size_t)(j % 2) * n + j / 2 * 8] = d[i][j];
}

// A block's 128 rows x TOKENS of logits become the best of them for each token, in one of the
// vocabulary's pieces of 128. Through shared memory, [128][WIDTH] so that neither a warp's stores
// nor its loads meet in a bank (but two loads at 16 tokens); SHARES threads a token.
template <int TOKENS>
__device__ static inline void store_best(const SampleTarget* to, float* shared, const float d[][4],
                                         int row0, int n, int token0, int n_tokens) {
  constexpr int WIDTH = TOKENS + 8, AT_ONCE = 8, SHARES = BLOCK_TILES * WARP / TOKENS;
  int lane = threadIdx.x % WARP, token = threadIdx.x % TOKENS, r = token0 + token;
  float* mine = shared + (threadIdx.x / WARP * TILE_ROWS + lane / 4) * WIDTH + lane % 4 * 2;
  Candidate c = {0, -INFINITY}, *found = (Candidate*)(shared + BLOCK_ROWS * WIDTH);
  Draw draw = {false, 0, 0};
  if (r < n_tokens) draw = row_draw(to, r);
  sync_multipliers();  // all have used the last stages
#pragma unroll
  for (int i = 0; i < TOKENS / 8; i++)
    for (int j = 0; j < 2; j++)
      *(float2*)(mine + j * 8 * WIDTH + i * 8) = make_float2(d[i][j * 2], d[i][j * 2 + 1]);
  sync_multipliers();
  for (int i = threadIdx.x / TOKENS; i < BLOCK_ROWS && draw.wanted; i += AT_ONCE * SHARES) {
    float logit[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) logit[j] = shared[(i + j * SHARES) * WIDTH + token];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      int v = row0 + i + j * SHARES;
      if (v < n) c = better(c, candidate(draw, logit[j], v));
    }
  }
  found[threadIdx.x] = c;
  sync_multipliers();
  if (threadIdx.x >= TOKENS || !draw.wanted || row0 >= n) return;
  for (int i = 1; i < SHARES; i++) c = better(c, found[token + i * TOKENS]);
  to->best[(size_t)r * ((n + BLOCK_ROWS - 1) / BLOCK_ROWS) + blockIdx.y] = c;
}

// A slice's sums d are complete. second: of its pair.
template <int N>
__device__ static inline void end_slice(float d[N][4], float pair[N][4], float total[N][4],
                                        bool second) {
#pragma unroll
  for (int i = 0; i < N * 4; i++) {
    float *sum = &d[i / 4][i % 4], *first = &pair[i / 4][i % 4];
    if (second) total[i / 4][i % 4] += *first + *sum;
    if (!second) *first = *sum;
    *sum = 0;
  }
}

template <Output MODE, bool SLICED, int TOKENS, int STAGES>
__global__ void __launch_bounds__((BLOCK_TILES + fill_warps(TOKENS, SLICED)) * WARP,
                                  TOKENS*(SLICED ? 2 : 1) > 64 ? 1 : 2)
    matmul_tile_kernel(void* out, SampleTarget sample, const half* x, Matrix m, int n_tokens) {
  constexpr int NT = TOKENS / 8, GROUP = token_group(TOKENS);
  extern __shared__ uint4 shared[];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  int token0 = blockIdx.x * TOKENS, row_tile0 = blockIdx.y * BLOCK_TILES, group = m.k / 8 * GROUP;
  int slices = m.slices / gridDim.z, slice = blockIdx.z * slices, warp = threadIdx.x / WARP;
  KWalk use = {slice_start(m, slice), slice_start(m, slice + 1), slice, slice + slices - 1, 0, 0};
  int last = (m.n - 1) / BLOCK_ROWS;  // a cluster's second block may have no rows
  Ring ring = {
      m,
      (const uint4*)m.w + (size_t)min((int)blockIdx.y, last) * (m.k / TILE_K) * BLOCK_TILES * 64,
      (const uint4*)x + (size_t)(token0 / GROUP) * group,
      (n_tokens - token0 + GROUP - 1) / GROUP,
      group,
      use,
      shared,
      full,
      empty};
  if (ring_fill<TOKENS, STAGES, SLICED>(&ring)) return;
  wait_for_previous();
  float d[NT][4] = {}, pair[SLICED ? NT : 1][4] = {}, total[SLICED ? NT : 1][4] = {};
  const int lane_at = warp * 64 + threadIdx.x % WARP, SECOND = BLOCK_TILES * 64;
  int used = -1;  // the slot whose products may be the last under way
  ring_wait<STAGES>(&ring, &use);
  const uint4* stage = shared + use.slot * stage_size(TOKENS);
  uint4 a[2] = {stage[lane_at], stage[lane_at + WARP]}, b[2];
#pragma unroll 1
  while (true) {  // one k tile is multiplied while the next one's weights come to registers
    bool both = walk_tiles(&use) == STAGE_TILES, complete = use.at + STAGE_TILES >= use.end;
    bool second = use.slice % 2;
    multiply_tile<TOKENS>(d, a, stage + STAGE_WEIGHTS);
    wgmma_wait<1>();
    if (used >= 0) ring_release<TOKENS, STAGES, SLICED>(&ring, used);
    for (int i = 0; i < 2; i++)
      b[i] = both ? stage[lane_at + SECOND + i * WARP] : make_uint4(0, 0, 0, 0);
    multiply_tile<TOKENS>(d, b, stage + STAGE_WEIGHTS + (both ? 4 * GROUP : 0));
    wgmma_wait<1>();
    used = use.slot;
    walk_next<STAGES, SLICED>(&use, m);
    if (SLICED && complete) {
      wgmma_wait<0>();
      end_slice<SLICED ? NT : 1>(d, pair, total, second);
    }
    if (walk_tiles(&use) <= 0) break;
    ring_wait<STAGES>(&ring, &use);
    stage = shared + use.slot * stage_size(TOKENS);
    for (int i = 0; i < 2; i++) a[i] = stage[lane_at + i * WARP];
  }
  wgmma_wait<0>();
  if (cluster_size(TOKENS) > 1) ring_release<TOKENS, STAGES, SLICED>(&ring, used);
  if constexpr (MODE == OUT_SWIGLU) {
    store_swiglu<TOKENS>((half*)out + (size_t)token0 * (m.n / 2), shared, d, row_tile0 * TILE_ROWS,
                         m.n, n_tokens - token0);
  } else if constexpr (MODE == OUT_BEST) {
    static_assert(BLOCK_ROWS * (TOKENS + 8) * 4 + BLOCK_TILES * WARP * sizeof(Candidate) <=
                  STAGES * stage_size(TOKENS) * 16);
    store_best<TOKENS>(&sample, (float*)shared, d, row_tile0 * TILE_ROWS, m.n, token0, n_tokens);
  } else {
    size_t first = ((size_t)blockIdx.z * n_tokens + token0) * m.n;
    store_floats<TOKENS>((float*)out + first, SLICED ? total : d, (row_tile0 + warp) * TILE_ROWS,
                         m.n, n_tokens - token0);
  }
}

template <Output MODE, bool SLICED, int TOKENS, int STAGES>
static void launch_tile(const Gpu* g, void* out, const half* x, const Matrix* m, int n_tokens,
                        int z) {
  auto kernel = matmul_tile_kernel<MODE, SLICED, TOKENS, STAGES>;
  size_t stage_bytes = stage_size(TOKENS) * 16;
  static bool configured;  // more than 48 KB of shared memory must be asked for, once
  if (!configured)
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)(STAGES * stage_bytes)));
  configured = true;
  // A block's slices may be shorter than the ring; the rest is left to the kernels before and
  // after.
  int stages = m->slices / z * ceil_div(ceil_div(m->k / TILE_K, m->slices), STAGE_TILES);
  size_t shared = (z > 1 && stages < STAGES ? stages : STAGES) * stage_bytes;
  const int cluster = cluster_size(TOKENS);
  dim3 grid(ceil_div(n_tokens, TOKENS), ceil_div(m->n, BLOCK_ROWS * cluster) * cluster, z);
  int warps = BLOCK_TILES +
              (g->device->dependent_launch ? fill_warps(TOKENS, SLICED) : 0);  // see ring_fill
  launch_clusters(g, cluster, kernel, grid, warps * WARP, shared, out, g->sample, x, *m, n_tokens);
}

// Pipeline depth by the shared memory a block may have: 227 KB on Hopper, 163 on A100, 99 on other
// Ampere and Ada cards, 64 on Turing.
template <Output MODE, bool SLICED, int TOKENS, int HOPPER, int AMPERE, int TURING>
static void launch_depth(const Gpu* g, void* out, const half* x, const Matrix* m, int n_tokens,
                         int z) {
  int kb = g->device->shared_bytes / 1024;
  (kb >= 200  ? launch_tile<MODE, SLICED, TOKENS, HOPPER>
   : kb >= 99 ? launch_tile<MODE, SLICED, TOKENS, AMPERE>
              : launch_tile<MODE, SLICED, TOKENS, TURING>)(g, out, x, m, n_tokens, z);
}

// Tile shapes by number of tokens. On Hopper one block of a long matrix fills an SM; depths that
// leave less than 35 KB of shared memory keep the next kernels from starting early (64 tokens:
// 1,194 us a step with 8 stages, 1,364 with 9).
template <Output MODE>
static void launch_tiles(const Gpu* g, void* out, const half* x, const Matrix* m, int n_tokens,
                         int z) {
  constexpr bool SLICED = MODE == OUT_FLOAT;  // gate-up and the output matrix have one slice
  if (!SLICED && m->slices > z) die("%d slices where one is expected", m->slices);
  int kb = g->device->shared_bytes / 1024;
  auto run = launch_depth<MODE, false, 256, 4, 4, 4>;
  if (n_tokens <= 128 || kb < 200) run = launch_depth<MODE, false, 128, 6, 3, 3>;
  if (n_tokens <= 64 || kb < 99) run = launch_depth<MODE, false, 64, 8, 4, 2>;
  if (n_tokens <= 32) run = launch_depth<MODE, false, 32, 8, 4, 3>;
  if (n_tokens <= 16) run = launch_depth<MODE, false, 16, 8, 4, 3>;
  if (m->slices > z) {
    run = launch_depth<MODE, SLICED, 128, 6, 3, 3>;
    if (n_tokens <= 64 || kb < 99) run = launch_depth<MODE, SLICED, 64, 4, 4, 2>;
    if (n_tokens <= 32) run = launch_depth<MODE, SLICED, 32, 4, 4, 3>;
    if (n_tokens <= 16) run = launch_depth<MODE, SLICED, 16, 4, 4, 3>;
  }
  run(g, out, x, m, n_tokens, z);
}

// In how many parts the tile kernel leaves a result, and so how many blocks share k: one when a
// block per 128 rows and 128 tokens leaves no multiprocessor idle, else a slice each or a pair.
// Pairs halve what is written here and read by the next kernel, so beyond 64 tokens they are taken
// where their products take no longer. In turns of the machine x slices x tiles of 128 tokens, for
// llama-3.2-1b on 132 multiprocessors: 128 tokens, qkv: 192 slices 2 x 1, 96 pairs 1 x 2: pairs; o
// and down: 128 slices 1 x 1, 64 pairs 1 x 2: slices. 256 tokens, qkv: 192 slices 2 x 2, 192 pairs
// 2 x 2; o and down: 128 slices 1 x 2, 128 pairs 1 x 2: pairs. 2,048 tokens: all of k.
static int tile_parts(const Device* d, const Matrix* m, int n_tokens) {
  int rows = ceil_div(m->n, BLOCK_ROWS), blocks = rows * ceil_div(n_tokens, 128);
  if (m->slices == 1 || blocks >= d->sms) return 1;
  bool wide = n_tokens > 128 && d->shared_bytes >= 200 * 1024;  // slices take 256 tokens a block
  int tile = wide ? 256 : 128, alone = rows * ceil_div(n_tokens, tile) * m->slices,
      pairs = blocks * m->slices / 2;
  bool as_fast = ceil_div(pairs, d->sms) * 2 <= ceil_div(alone, d->sms) * (tile / 128);
  // A tile of 128 tokens reads a third more per product than one of 256: beyond about 1,024 k's a
  // slice that takes longer than the sum that need not be written and read.
  if (wide && m->k / m->slices > 1024) as_fast = false;
  return n_tokens > 64 && as_fast ? m->slices / 2 : m->slices;
}

// In how many pieces k is summed: enough warps for a large GPU when one warp takes 16 rows, at
// least 128 k's each. From the matrix alone, never from the device or the batch: it decides the
// bits of the result.
static int matrix_slices(int n, int k) {
  int slices = 1;
  while (slices < MAX_SLICES && ceil_div(n, TILE_ROWS) * slices < 1024 && k / TILE_K >= 8 * slices)
    slices *= 2;
  return slices;
}

// out = x . w^T, perhaps in unsummed parts.
template <Output MODE>
static Unsummed matmul(const Gpu* g, void* out, const half* x, const Matrix* m, int n_tokens) {
  int outputs = MODE == OUT_SWIGLU ? m->n / 2 : m->n, z = 1;
  SkinnyInput in = {x, NULL, NULL, NULL, 0};
  if (g->matmul == MATMUL_NAIVE) {
    launch(g, matmul_rows_kernel<1, 1>, dim3(ceil_div(outputs, 256), n_tokens), 256, 0, out, MODE,
           x, *m, n_tokens);
  } else if (g->matmul == MATMUL_GEMV) {
    launch(g, matmul_rows_kernel<WARP, 1>, dim3(ceil_div(outputs, 8), n_tokens), 8 * WARP, 0, out,
           MODE, x, *m, n_tokens);
  } else if (g->matmul == MATMUL_REUSE) {
    launch(g, matmul_rows_kernel<WARP, 8>, dim3(ceil_div(outputs, 8), ceil_div(n_tokens, 8)),
           8 * WARP, 0, out, MODE, x, *m, n_tokens);
  } else if (n_tokens <= SKINNY_TOKENS) {
    matmul_skinny<MODE, false>(g, out, in, m, n_tokens, 0);
  } else {
    z = tile_parts(g->device, m, n_tokens);
    launch_tiles<MODE>(g, out, x, m, n_tokens, z);
  }
  Unsummed u = {(const float*)out, z, z < m->slices, (size_t)n_tokens * m->n};
  return u;
}

// ---- Attention over the paged cache.

// A softmax in progress over part of the keys: out = sum exp2(s - max) v, unnormalised.
template <int N>
struct Softmax {
  float max, sum, out[N];
};

// a += b, b's keys after a's. One chain of these, in key order, makes every split and every tiling
// agree to the bit.
template <int N>
__device__ static inline void merge(Softmax<N>* a, float max, float sum, const float* out,
                                    int stride) {
  if (max == -INFINITY) return;  // all of b's keys are masked
  float top = fmaxf(a->max, max), scale_a = exp2f(a->max - top), scale_b = exp2f(max - top);
  a->max = top;
  a->sum =
      fmaf(sum, scale_b, a->sum * scale_a);  // fmaf: the same rounding wherever this is inlined
  for (int i = 0; i < N; i++) a->out[i] = fmaf(out[i * stride], scale_b, a->out[i] * scale_a);
}

// Keys of a block's turn, of a warp's.
enum { SPLIT = 256, CHUNK = 64, ATTENTION_WARPS = 4, PAGES = CHUNK / KV_BLOCK };

// Eight numbers of the cache, as they lie there and, widened, as the B operands of two mmas.
template <typename N>
struct Eight {
  typedef uint4 type;
};
template <>
struct Eight<fp8> {
  typedef uint2 type;
};

// Two e4m3 become two fp16, exactly.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ static inline uint32_t widen2(uint32_t two) {
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((uint16_t)two));
  return r;
}
#else  // exponent and mantissa into place: 2^8 too little, since fp16's bias is 15, not 7
__device__ static inline uint32_t widen2(uint32_t two) {
  two = (two & 0xff) << 8 | (two & 0xff00) << 16;  // a byte at the top of each half
  two = (two & 0x80008000) | (two & 0x7f007f00) >> 1;
  half2 h = __hmul2(*(half2*)&two, __floats2half2_rn(256, 256));
  return *(uint32_t*)&h;
}
#endif

__device__ static inline uint4 widen(uint4 v) {
  return v;
}
__device__ static inline uint4 widen(uint2 v) {
  return make_uint4(widen2(v.x & 0xffff), widen2(v.x >> 16), widen2(v.y & 0xffff),
                    widen2(v.y >> 16));
}

// One lane's 8 of numbers 32c .. 32c+31 of the first or second of its two keys of a page.
template <int KD>
__device__ static inline uint4 load_key(const half* page, int i, int c) {
  int column = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  return *(const uint4*)(page + (column / 2 * 4 + column % 2 + i * 2) * KD + t * 8 + c * 32);
}
template <int KD>
__device__ static inline uint4 load_key(const fp8* page, int i, int c) {
  uint4 both = ((const uint4*)page)[c * WARP + threadIdx.x % WARP];  // one load for both i
  return widen(i ? make_uint2(both.z, both.w) : make_uint2(both.x, both.y));
}

// The scales of four tokens, from `first` on, of an fp8 page; nothing else has any.
__device__ static inline uint2 load_scales(const half*, int, int) {
  return make_uint2(0, 0);
}
__device__ static inline uint2 load_scales(const fp8* page, int width, int first) {
  return *(const uint2*)(page + KV_BLOCK * width + first * sizeof(half));
}
__device__ static inline float scale_at(uint2 scales, int i) {
  half2 h = *(half2*)(i < 2 ? &scales.x : &scales.y);
  return i % 2 ? __high2float(h) : __low2float(h);
}

// fp8: p times a scale of v is often below fp16's normal numbers, so numerator and denominator of
// the softmax are both taken this much larger. 256 x 65504 / 448 still is an fp16.
static const float FP8_GAIN = 256;

// One warp: 16 query rows against 64 keys from key0, two matrix products on fragments loaded
// straight from the cache. Column c of the score tile is key 4 (c / 2) + c % 2 (+ 2 in the second
// tile), so that lane t ends up with keys 4t .. 4t+3, which is what it needs as the A operand of p
// . v. upper: rows 8 and up matter; a decode step has fewer for most models.
template <int K, typename N>
__device__ static void attend_chunk(const DeviceKV* kv, const int* table, int slot, int g, int key0,
                                    int last_key, bool upper, const int row_pos[2],
                                    const uint4 q[][2], float max[2], float sum[2],
                                    float out[][4]) {
  constexpr int KD = (K + 31) / 32 * 32;
  constexpr bool SCALED = sizeof(N) == 1;
  int lane = threadIdx.x % WARP, t = lane % 4;
  float s[PAGES][2][4] = {};
  typename Eight<N>::type v[PAGES][K / 16];
  uint2 k_scale[PAGES], v_scale[PAGES];
#pragma unroll
  for (int p = 0; p < PAGES; p++) {
    int page = key0 + p * KV_BLOCK <= last_key ? key0 + p * KV_BLOCK
                                               : key0;  // beyond the end: any page, masked below
    const N* from = page_at<N>(kv->k, kv_page(kv, table, slot, page, g), KD);
    k_scale[p] = load_scales(from, KD, t * 4);
    for (int i = 0; i < 2; i++) {
      for (int c = 0; c < KD / 32; c++) {
        uint4 b = load_key<KD>(from, i, c);
        mma(s[p][i], q[c][0], b.x, b.y);
        mma(s[p][i], q[c][1], b.z, b.w);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < PAGES; p++) {  // apart from the keys: together they need more registers
    int page = key0 + p * KV_BLOCK <= last_key ? key0 + p * KV_BLOCK : key0;
    const N* from = page_at<N>(kv->v, kv_page(kv, table, slot, page, g), K);
    for (int c = 0; c < K / 16; c++)
      v[p][c] = ((const typename Eight<N>::type*)from)[c * WARP + lane];
    v_scale[p] = load_scales(from, K, t * 4);
  }
  const float scale = 1.44269504f * rsqrtf((float)K);  // scores in powers of two
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (SCALED && r == 1 && !upper) break;
    max[r] = -INFINITY;
    sum[r] = 0;
    for (int i = 0; i < PAGES * 4; i++) {
      float* score = &s[i / 4][i / 2 % 2][r * 2 + i % 2];
      int key = key0 + i / 4 * KV_BLOCK + t * 4 + i % 4;
      if (SCALED) *score *= scale_at(k_scale[i / 4], i % 4);
      *score = key <= row_pos[r] ? *score * scale : -INFINITY;
      max[r] = fmaxf(max[r], *score);
    }
    max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 1));
    max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], 2));
    float base = max[r] == -INFINITY ? 0 : max[r];
    for (int i = 0; i < PAGES * 4; i++) {
      float* score = &s[i / 4][i / 2 % 2][r * 2 + i % 2];
      *score = exp2f(*score - base);
      sum[r] += *score;
      if (SCALED) *score *= FP8_GAIN * scale_at(v_scale[i / 4], i % 4);
    }
    if (SCALED) sum[r] *= FP8_GAIN;
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
  }
#pragma unroll
  for (int p = 0; p < PAGES; p++) {
    half2 a[4];  // rows g and g + 8 of keys 4t, 4t+1, then of 4t+2, 4t+3
    for (int i = 0; i < 4; i++)
      a[i] = __floats2half2_rn(s[p][i / 2][i % 2 * 2], s[p][i / 2][i % 2 * 2 + 1]);
    for (int c = 0; c < K / 16; c++) {
      uint4 b = widen(v[p][c]);
      mma(out[2 * c], *(uint4*)a, b.x, b.y);
      mma(out[2 * c + 1], *(uint4*)a, b.z, b.w);
    }
  }
}

// What is in the cache already can come to L2 while the kernels before still run.
template <int K, typename N>
__device__ static inline void prefetch_pages(const DeviceKV* kv, const int* table, int slot, int g,
                                             int key0, int last_key) {
  int lane = threadIdx.x % WARP, key = key0 + lane / 2 * KV_BLOCK;
  if (lane >= 2 * PAGES || key > last_key) return;
  int width = lane % 2 ? K : key_width(K);
  prefetch(page_at<N>(lane % 2 ? kv->v : kv->k, kv_page(kv, table, slot, key, g), width),
           page_bytes<N>(width));
}

// A decode step's only token of a slot: its q for this block's heads, to shared memory (where to->q
// points), and if this block reads them, its k and v.
template <int K>
__device__ static inline void rotate_and_store(const QkvTarget* to, Unsummed qkv, int token,
                                               int head0, int heads, int g, bool newest) {
  int all_heads = to->kv.heads + 2 * to->kv.kv_heads;
  if (K % 32)  // the padding
    for (int i = threadIdx.x; i < heads * key_width(K); i += ATTENTION_WARPS * WARP)
      to->q[((size_t)token * to->kv.heads + head0) * key_width(K) + i] = __float2half(0);
  if (K % 32) __syncthreads();
  for (int i = threadIdx.x; i < (heads + (newest ? 2 : 0)) * (K / 2); i += ATTENTION_WARPS * WARP) {
    int h = i / (K / 2), pair = i % (K / 2);
    int head = h < heads ? head0 + h : to->kv.heads + g + (h - heads) * to->kv.kv_heads;
    size_t at = ((size_t)token * all_heads + head) * K + pair / 8 * 16 + pair % 8;
    store_qkv(to, token, head, pair, sum_slices<float>(qkv, at), sum_slices<float>(qkv, at + 8));
  }
  __syncthreads();
}

// The A operands of one lane, and the positions of its two rows (-1: no such row). Row r is head
// r % heads of token r / heads; q: the first one's.
template <int K>
__device__ static inline void load_queries(uint4 fragment[][2], int row_pos[2], const half* q,
                                           int all_heads, int heads, int rows, int pos0) {
  constexpr int KD = (K + 31) / 32 * 32;
  int lane = threadIdx.x % WARP;
  for (int r = 0; r < 2; r++) {
    int row = lane / 4 + r * 8, token = row < rows ? row / heads : 0;
    row_pos[r] = row < rows ? pos0 + token : -1;
    const half* from = q + ((size_t)token * all_heads + row % heads) * KD + lane % 4 * 8;
    for (int c = 0; c < KD / 32; c++) {
      uint4 v = *(const uint4*)(from + c * 32);
      // k's 8t .. 8t+3 go to the first mma, 8t+4 .. 8t+7 to the second
      for (int j = 0; j < 2; j++) {
        (&fragment[c][j].x)[r] = j ? v.z : v.x;
        (&fragment[c][j].x)[r + 2] = j ? v.w : v.y;
      }
    }
  }
}

// The partial result of one split of one row: 8 threads hold K / 8 outputs each.
template <int N>
__device__ static inline void store_partial(float* to, const Softmax<N>* s, int lane0) {
  if (lane0 == 0) to[0] = s->max;
  if (lane0 == 0) to[1] = s->sum;
  for (int i = 0; i < N; i++) to[2 + lane0 + i * 8] = s->out[i];
}

// out[T, H, K] = softmax(q . k / sqrt(K)) . v over each token's own positions. A block takes one
// run of tokens of a slot, the heads that share a kv head (16 rows: heads x tokens), and every
// split of 256 keys in turn, or its share of them (gridDim.z > 1: the last block to finish merges
// all splits in order). Must read the cache of a slot once per run of its tokens. N: the cache's
// numbers. Twin: attend.
template <int K, typename N, bool SHARED>
__global__ void __launch_bounds__(ATTENTION_WARPS* WARP, K <= 64 ? 4 : 2)
    attention_kernel(half* out, QkvTarget to, Unsummed qkv, float* partial, int* arrived,
                     int most_splits, int out_group) {
  constexpr int KD = (K + 31) / 32 * 32, OWN = K / 8;
  __shared__ float chunk_out[ATTENTION_WARPS][TILE_ROWS][K], chunk_max[ATTENTION_WARPS][TILE_ROWS],
      chunk_sum[ATTENTION_WARPS][TILE_ROWS];
  __shared__ half q_shared[sizeof(N) == 1 ? 1 : TILE_ROWS * KD];
  __shared__ bool last;
  const DeviceKV kv = to.kv;
  int4 run = to.batch.run[blockIdx.x];
  int first = run.x, length = run.y, slot = run.z, pos0 = run.w;
  int group = kv.heads / kv.kv_heads, parts = (group + TILE_ROWS - 1) / TILE_ROWS;
  int g = blockIdx.y / parts, head0 = g * group + blockIdx.y % parts * TILE_ROWS;
  int heads = min(TILE_ROWS, (g + 1) * group - head0), rows = heads * length;
  int last_key = pos0 + length - 1, n_splits = last_key / SPLIT + 1;
  int split = SHARED ? n_splits * blockIdx.z / gridDim.z : 0,
      end = SHARED ? n_splits * (blockIdx.z + 1) / gridDim.z : n_splits;
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row_pos[2];
  if (slot >= 0 && split < end)
    prefetch_pages<K, N>(&kv, to.batch.table, slot, g, split * SPLIT + warp * CHUNK, last_key);
  wait_for_previous();
  if (slot < 0 || split >= end) return;
  const half* q = to.q + ((size_t)first * kv.heads + head0) * KD;
  if (sizeof(N) > 1 && qkv.parts > 0) {  // fp8: rope_fp8_kernel has done it
    q = q_shared;  // which store_qkv will meet where it looks for this token and head:
    to.q = q_shared - ((size_t)first * kv.heads + head0) * KD;
    rotate_and_store<K>(&to, qkv, first, head0, heads, g, end == n_splits);
  }
  uint4 fragment[KD / 32][2];
  // After the products each thread owns K / 8 outputs of one row.
  int row = threadIdx.x / 8, lane0 = threadIdx.x % 8;
  int pair = blockIdx.x * gridDim.y + blockIdx.y;
  partial += ((size_t)pair * most_splits * TILE_ROWS + row) * (K + 2);
  Softmax<OWN> total = {-INFINITY, 0, {}};
  for (; split < end; split++) {
    int key0 = split * SPLIT + warp * CHUNK;
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, o[K / 8][4] = {};
    load_queries<K>(fragment, row_pos, q, kv.heads, heads, rows, pos0);
    if (key0 <= last_key)
      attend_chunk<K, N>(&kv, to.batch.table, slot, g, key0, last_key, rows > 8, row_pos, fragment,
                         max, sum, o);
    __syncthreads();  // the previous split's results have been read
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (r == 1 && rows <= 8) break;
      chunk_max[warp][lane / 4 + r * 8] = max[r];
      chunk_sum[warp][lane / 4 + r * 8] = sum[r];
      for (int i = 0; i < K / 8; i++)
        for (int e = 0; e < 2; e++)
          chunk_out[warp][lane / 4 + r * 8][i * 8 + lane % 4 * 2 + e] = o[i][r * 2 + e];
    }
    __syncthreads();
    if (row >= rows) continue;
    Softmax<OWN> s = {-INFINITY, 0, {}};
    for (int c = 0; c < ATTENTION_WARPS; c++)
      merge(&s, chunk_max[c][row], chunk_sum[c][row], &chunk_out[c][row][lane0], 8);
    if (SHARED) {
      store_partial(partial + split * (TILE_ROWS * (K + 2)), &s, lane0);
    } else {
      merge(&total, s.max, s.sum, s.out, 1);
    }
  }
  int token = first + row / heads, head = head0 + row % heads;
  if (SHARED) {
    __threadfence();
    __syncthreads();
    int* count = &arrived[pair];
    int shares = min(n_splits, (int)gridDim.z);  // blocks that have a split
    if (threadIdx.x == 0) last = atomicAdd(count, 1) == shares - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) *count = 0;
    for (int s = 0; s < n_splits && row < rows; s++) {
      const float* from = partial + s * (TILE_ROWS * (K + 2));
      float o[OWN];
      for (int i = 0; i < OWN; i++) o[i] = __ldcg(from + 2 + lane0 + i * 8);
      merge(&total, __ldcg(from), __ldcg(from + 1), o, 1);
    }
  }
  if (row >= rows) return;
  for (int i = 0; i < OWN; i++)
    out[activation_index(token, head * K + lane0 + i * 8, kv.heads * K, out_group)] =
        __float2half(total.out[i] / total.sum);
}

// Blocks among which attention shares the splits of a run. The fewest that let the GPU be done in
// the fewest turns: blocks that stay can ask for their next keys early.
static int attention_shares(const Device* d, const QkvTarget* to, int runs, int splits) {
  int blocks = runs * to->kv.kv_heads * ceil_div(to->kv.heads / to->kv.kv_heads, TILE_ROWS);
  int at_once = d->sms * (to->head_dim <= 64 ? 4 : 2), best = 1, best_turns = INT_MAX;
  for (int z = 1; z <= splits; z++) {
    int turns = ceil_div(blocks * z, at_once) * ceil_div(splits, z);
    if (turns >= best_turns) continue;
    best = z;
    best_turns = turns;
  }
  return best;
}

template <int K>
static void launch_attention(const Gpu* g, int n_tokens, int runs, int splits, QkvTarget to,
                             Unsummed qkv) {
  int parts = ceil_div(to.kv.heads / to.kv.kv_heads, TILE_ROWS);
  int shares = attention_shares(g->device, &to, runs, splits);
  auto kernel = g->fp8_kv
                    ? shares > 1 ? attention_kernel<K, fp8, true> : attention_kernel<K, fp8, false>
                : shares > 1 ? attention_kernel<K, half, true>
                             : attention_kernel<K, half, false>;
  launch(g, kernel, dim3(runs, to.kv.kv_heads * parts, shares), ATTENTION_WARPS * WARP, 0, g->att,
         to, qkv, g->partial, g->arrived, splits, activation_group(g, n_tokens));
}

// qkv: slices of a decode step that are still to be rotated and stored, or none.
static void attention(const Gpu* g, int n_tokens, int runs, int splits, QkvTarget to,
                      Unsummed qkv) {
  auto run = to.head_dim == 32    ? launch_attention<32>
             : to.head_dim == 64  ? launch_attention<64>
             : to.head_dim == 80  ? launch_attention<80>
             : to.head_dim == 96  ? launch_attention<96>
             : to.head_dim == 128 ? launch_attention<128>
                                  : NULL;
  if (!run) die("no attention kernel for head width %d: 32, 64, 80, 96 and 128 exist", to.head_dim);
  run(g, n_tokens, runs, splits, to, qkv);
}

// ---- Sampling, where logits are in memory. See SampleTarget.

// The best token of each of 32 pieces of the vocabulary. blockIdx = (piece, row). Twin: store_best.
__global__ void sample_kernel(SampleTarget to, const float* logits, int vocab) {
  wait_for_previous();
  int r = blockIdx.y;
  Draw draw = row_draw(&to, r);
  if (!draw.wanted) return;
  int start = (int)((long long)vocab * blockIdx.x / WARP),
      end = (int)((long long)vocab * (blockIdx.x + 1) / WARP);
  Candidate c = {0, -INFINITY};
  for (int v0 = start + threadIdx.x; v0 < end; v0 += 4 * SAMPLE_THREADS) {
    float logit[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {  // four loads in flight
      int v = v0 + i * SAMPLE_THREADS;
      if (v < end) logit[i] = logits[(size_t)r * vocab + v];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int v = v0 + i * SAMPLE_THREADS;
      if (v < end) c = better(c, candidate(draw, logit[i], v));
    }
  }
  c = block_best(c);
  if (threadIdx.x == 0) to.best[r * WARP + blockIdx.x] = c;
}

// The winner of each row becomes its slot's last token. advance: the same rows decode again in
// the next step, so move every token one position on; nothing needs to come from the host then.
__global__ void sample_finish_kernel(SampleTarget to, int pieces, bool advance) {
  wait_for_previous();
  int r = blockIdx.x, t = to.batch.row[r], slot = to.batch.slot[t];
  if (slot < 0) return;
  Candidate c = {0, -INFINITY};
  for (int i = threadIdx.x; i < pieces; i += SAMPLE_THREADS)
    c = better(c, to.best[(size_t)r * pieces + i]);
  c = block_best(c);
  if (threadIdx.x) return;
  to.sampler.sampled[slot] = c.token;
  if (!advance) return;
  to.batch.pos[t]++;
  to.batch.run[t].w++;
}

// ---- The GPU's side of the platform shim.

static size_t gpu_used(void) {
  size_t free_bytes, total;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
  return total - free_bytes;
}

static void* gpu_alloc(size_t bytes) {
  void* p = NULL;
  if (cudaMalloc(&p, bytes) != cudaSuccess) {
    cudaGetLastError();  // an allocation that failed leaves the context usable
    return NULL;
  }
  CUDA_CHECK(cudaMemset(p, 0, bytes));
  return p;
}

static void gpu_free(void* p) {
  CUDA_CHECK(cudaFree(p));
}

// ---- Loading: rows of a stored or seeded tensor go to their place in a matrix. See map_row.

__global__ void pack_kernel(half* out, Tensor from, RowMap map, size_t row0, int rows, int k,
                            bool packed) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * k) return;
  int row = (int)(row0 + i / k), col = (int)(i % k), to = map_row(map, row);
  // A file's chunk starts at row0; a seeded tensor is addressed as a whole.
  f16 value = tensor_at(&from, from.data ? i : (size_t)row * k + col);
  out[packed ? packed_index(to, col, k) : (size_t)to * k + col] = __ushort_as_half(value);
}

// Fills rows of a matrix on the device: a seeded tensor is drawn there, a stored one goes up in
// chunks and is packed there.
static bool gpu_fill(Matrix* m, const Tensor* from, RowMap map, bool packed) {
  const size_t chunk_bytes = (size_t)64 << 20;
  size_t row_bytes = (size_t)from->cols * (from->dtype == DT_F32 ? 4 : 2);
  int most = from->data ? (int)(chunk_bytes / row_bytes) : from->rows;
  if (most < 1) most = 1;
  void* staging = from->data ? gpu_alloc(most * row_bytes) : NULL;
  if (from->data && !staging) return false;
  for (int row = 0; row < from->rows; row += most) {
    int rows = from->rows - row < most ? from->rows - row : most;
    Tensor part = *from;
    if (from->data) {
      CUDA_CHECK(cudaMemcpy(staging, (const char*)from->data + row * row_bytes, rows * row_bytes,
                            cudaMemcpyHostToDevice));
      part.data = staging;
    }
    size_t n = (size_t)rows * from->cols;
    pack_kernel<<<(unsigned)((n + 255) / 256), 256>>>((half*)m->w, part, map, row, rows, m->k,
                                                      packed);
    CUDA_CHECK(cudaGetLastError());
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  if (staging) gpu_free(staging);
  return true;
}

static void gpu_upload(void* to, const void* from, size_t bytes) {
  CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}

// ---- Ceilings of this device: how fast can anything read, how fast can anything multiply?

__global__ void probe_read_kernel(const uint4* p, size_t n, uint32_t* out) {
  uint32_t x = 0;
  size_t step = (size_t)gridDim.x * blockDim.x;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = load_weights(p + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; j++) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (x == 1) *out = x;  // never true in practice; keeps the loads
}

// Eight independent accumulators a warp, 16 warps an SM, operands in registers: nothing but the
// matrix units can limit it.
__global__ void probe_mma_kernel(float* out, int rounds) {
  float d[8][4] = {};
  uint32_t one = 0x3c003c00u ^ (threadIdx.x * 0x00110013u & 0x03ff03ff);  // numbers between 1 and 2
  uint4 a = make_uint4(one, one ^ 0x8000, one ^ 0x80000000u, one);  // mixed signs: sums stay small
  for (int i = 0; i < rounds; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) mma(d[j], a, one ^ 0x8000, one);
  float sum = 0;
  for (int j = 0; j < 8; j++) sum += d[j][0] + d[j][1] + d[j][2] + d[j][3];
  if (sum == 12345.0f) *out = sum;
}

// The same with wgmma, whose 128 B columns come from shared memory. Two warpgroups an SM and two
// accumulators each, with a group of products always under way: the matrix units never wait. The
// numbers differ from product to product, as a model's do: at full rate a GPU's clock depends on
// how many bits change (an H200 makes 967 TFLOP/s of ever the same operands).
enum { WGMMAS = 8, WGMMA_TOKENS = 128, WARPGROUP = 4 * WARP, PROBE_TILES = 4 };

// Eight fp16 numbers of magnitude 1 to 2, any sign and mantissa.
__device__ static inline uint4 probe_numbers(uint32_t seed) {
  const uint32_t any = 0x83ff83ffu, one = 0x3c003c00u;
  return make_uint4((hash32(seed) & any) | one, (hash32(seed + 1) & any) | one,
                    (hash32(seed + 2) & any) | one, (hash32(seed + 3) & any) | one);
}

__global__ void __launch_bounds__(2 * WARPGROUP) probe_wgmma_kernel(float* out, int rounds) {
  __shared__ uint4 b[PROBE_TILES][2 * WGMMA_TOKENS];  // k's 0 to 7, then 8 to 15
  float d[2][WGMMA_TOKENS / 8][4] = {};
  uint4 a[PROBE_TILES];
#pragma unroll
  for (int i = 0; i < PROBE_TILES; i++) {
    a[i] = probe_numbers((i * 2 * WARPGROUP + threadIdx.x) * 8);
    b[i][threadIdx.x] = probe_numbers((i * 2 * WARPGROUP + threadIdx.x) * 8 + 4);
  }
  wgmma_publish();
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < rounds; i++) {
    wgmma_start();
#pragma unroll
    for (int j = 0; j < WGMMAS; j++)
      wgmma<WGMMA_TOKENS>(d[j % 2], a[j % PROBE_TILES], b[j % PROBE_TILES]);
    wgmma_end();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  float sum = 0;
  for (int j = 0; j < WGMMA_TOKENS / 8; j++)
    for (int e = 0; e < 4; e++) sum += d[0][j][e] + d[1][j][e];
  if (sum == 12345.0f) out[1] = sum;
  if (threadIdx.x == 0) out[0] = HAVE_WGMMA;  // which the host cannot know
}

// Best of a few runs of a probe, in seconds.
template <typename F>
static double best_time(F run) {
  cudaEvent_t a, b;
  CUDA_CHECK(cudaEventCreate(&a));
  CUDA_CHECK(cudaEventCreate(&b));
  float best = INFINITY;
  for (int i = 0; i < 8; i++) {
    float ms;
    CUDA_CHECK(cudaEventRecord(a));
    run();
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaEventRecord(b));
    CUDA_CHECK(cudaEventSynchronize(b));
    CUDA_CHECK(cudaEventElapsedTime(&ms, a, b));
    if (i > 0 && ms < best) best = ms;
  }
  CUDA_CHECK(cudaEventDestroy(a));
  CUDA_CHECK(cudaEventDestroy(b));
  return best * 1e-3;
}

static double gpu_probe_bandwidth(const Device* d) {
  size_t free_bytes, total, bytes = (size_t)4 << 30;  // far beyond any L2 cache
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
  while (bytes > free_bytes / 2) bytes /= 2;
  uint4* p = (uint4*)gpu_alloc(bytes);
  if (!p) die("no memory to probe %s with", d->name);
  size_t turn = (size_t)d->sms * 8 * 512 * 8 * 16;  // what all threads read in one turn of the loop
  bytes -= bytes % turn;
  double seconds =
      best_time([&] { probe_read_kernel<<<d->sms * 8, 512>>>(p, bytes / 16, (uint32_t*)p); });
  gpu_free(p);
  return (double)bytes / seconds;
}

static double probe_mma_rate(const Device* d, float* p) {
  const int rounds = 20000, blocks = d->sms * 2, warps = 8;
  double seconds = best_time([&] { probe_mma_kernel<<<blocks, warps * WARP>>>(p, rounds); });
  return 2.0 * 16 * 8 * 16 * 8 * rounds * blocks * warps / seconds;
}

// 0 where the device, or the code built for it, has no wgmma.
static double probe_wgmma_rate(const Device* d, float* p) {
  const int rounds = 5000;
  float have_wgmma;
  double seconds = best_time([&] { probe_wgmma_kernel<<<d->sms, 2 * WARPGROUP>>>(p, rounds); });
  CUDA_CHECK(cudaMemcpy(&have_wgmma, p, sizeof have_wgmma, cudaMemcpyDeviceToHost));
  return have_wgmma * 2.0 * 64 * WGMMA_TOKENS * 16 * WGMMAS * rounds * d->sms * 2 / seconds;
}

// What the tile kernel multiplies with, see multiply_tile: the faster of the two.
static double gpu_probe_rate(const Device* d) {
  float* p = (float*)gpu_alloc(256);
  if (!p) die("no memory to probe %s with", d->name);
  double rate = fmax(probe_mma_rate(d, p), probe_wgmma_rate(d, p));
  gpu_free(p);
  return rate;
}

static bool gpu_open(Device* d, char* err) {
  cudaDeviceProp prop;
  int n = 0;
  cudaError_t e = cudaGetDeviceCount(&n);
  if (e != cudaSuccess || n == 0) {
    snprintf(err, ERR_LEN, "no usable GPU: %s",
             e == cudaSuccess ? "none found" : cudaGetErrorString(e));
    return false;
  }
  CUDA_CHECK(cudaGetDeviceProperties(&prop, 0));
  cudaFuncAttributes f;
  e = cudaFuncGetAttributes(&f, probe_mma_kernel);
  if (e != cudaSuccess) {
    snprintf(err, ERR_LEN, "this build has no code for %s (compute %d.%d): %s", prop.name,
             prop.major, prop.minor, cudaGetErrorString(e));
    return false;
  }
  snprintf(d->name, sizeof d->name, "%s", prop.name);
  d->total = prop.totalGlobalMem;
  d->sms = prop.multiProcessorCount;
  d->shared_bytes = (int)prop.sharedMemPerBlockOptin;
  d->dependent_launch =
      f.ptxVersion >= 90;  // code built for less has no wait in it, whatever card runs it
  return true;
}

// ---- A step on the GPU: five launches a layer up to 8 tokens (fp8 cache: six), seven or eight
// beyond. Decode steps are recorded once per size as a CUDA graph and replayed, since launching 130
// kernels one by one takes the host longer than a small model takes the GPU.

// Queues one forward pass and the sampling of R rows for the token list on the device. Twin:
// forward_cpu.
static void gpu_forward(const Engine* e, int T, int R, int runs, int splits, bool advance) {
  const Config* c = &e->w->config;
  const Gpu* g = e->gpu;
  QkvTarget qkv = g->qkv;
  int shares = attention_shares(g->device, &qkv, runs, splits);
  Unsummed none = {NULL, 0, false, 0}, whole = {g->y, 1, false, 0}, y = none;
  bool few = g->matmul == MATMUL_MMA && T <= SKINNY_TOKENS &&
             c->dim * (T * sizeof(half) + sizeof(float)) + 8192 <= (size_t)g->device->shared_bytes;
  SkinnyInput att = {g->att, NULL, NULL, NULL, 0}, hidden = {g->hidden, NULL, NULL, NULL, 0},
              norm = {NULL, g->x, NULL, NULL, c->norm_eps};
  // Attention can rotate and store by itself if tokens do not need each other; worth it while all
  // its blocks run at once (H200, 64 tokens: -30 us a step; 256 tokens: +156).
  bool fuse = advance && !g->fp8_kv && T * c->n_kv_heads * shares <= 4 * g->device->sms;
  launch(g, embed_kernel, dim3(T), 256, 0, g->x, (const half*)e->w->embed.w, qkv.batch,
         (const int*)g->sample.sampler.sampled, c->dim, g->matmul == MATMUL_MMA);
  for (int layer = 0; layer < c->n_layers; layer++) {
    const Layer* l = &e->w->layers[layer];
    qkv.kv.layer = layer;
    if (few) {
      norm.weight = l->attn_norm;
      if (g->fp8_kv) matmul_skinny<OUT_FLOAT, true>(g, g->y, norm, &l->qkv, T, layer);
      if (g->fp8_kv) rope(g, T, qkv, whole);
      if (!g->fp8_kv) matmul_skinny<OUT_QKV, true>(g, NULL, norm, &l->qkv, T, layer);
      attention(g, T, runs, splits, qkv, none);
      matmul_skinny<OUT_RESIDUAL, false>(g, g->x, att, &l->o, T, layer);
      norm.weight = l->mlp_norm;
      matmul_skinny<OUT_SWIGLU, true>(g, g->hidden, norm, &l->gate_up, T, layer);
      matmul_skinny<OUT_RESIDUAL, false>(g, g->x, hidden, &l->down, T, layer);
      continue;
    }
    add_norm(g, c, T, y, l->attn_norm, NULL);
    y = matmul<OUT_FLOAT>(g, g->y, g->normed, &l->qkv, T);
    if (!fuse) rope(g, T, qkv, y);
    attention(g, T, runs, splits, qkv, fuse ? y : none);
    y = matmul<OUT_FLOAT>(g, g->y, g->att, &l->o, T);
    add_norm(g, c, T, y, l->mlp_norm, NULL);
    matmul<OUT_SWIGLU>(g, g->hidden, g->normed, &l->gate_up, T);
    y = matmul<OUT_FLOAT>(g, g->y, g->hidden, &l->down, T);
  }
  if (R == 0) return;
  const Matrix* head = &e->w->head;
  // In a decode step nobody asks for logits: at 256 tokens 131 MB less to write and to read.
  bool only_best = advance && g->matmul == MATMUL_MMA && R > SKINNY_TOKENS;
  norm.weight = e->w->final_norm;
  norm.row = qkv.batch.row;
  if (few) matmul_skinny<OUT_FLOAT, true>(g, g->logits, norm, head, R, 0);
  if (!few) add_norm(g, c, R, y, e->w->final_norm, qkv.batch.row);
  if (only_best) launch_tiles<OUT_BEST>(g, NULL, g->normed, head, R, 1);
  if (!few && !only_best) matmul<OUT_FLOAT>(g, g->logits, g->normed, head, R);
  if (!only_best)
    launch(g, sample_kernel, dim3(WARP, R), SAMPLE_THREADS, 0, g->sample, (const float*)g->logits,
           c->vocab_size);
  launch(g, sample_finish_kernel, dim3(R), SAMPLE_THREADS, 0, g->sample,
         only_best ? ceil_div(c->vocab_size, BLOCK_ROWS) : (int)WARP, advance);
}

static void replay_decode(Engine* e, int n_tokens, int splits) {
  Gpu* g = e->gpu;
  int i = 0;
  while (i < g->n_graphs && (g->graphs[i].n_tokens != n_tokens || g->graphs[i].splits != splits))
    i++;
  if (i == MAX_GRAPHS) {
    CUDA_CHECK(cudaStreamSynchronize(g->stream));
    for (i = 0; i < MAX_GRAPHS; i++) CUDA_CHECK(cudaGraphExecDestroy(g->graphs[i].exec));
    g->n_graphs = i = 0;
  }
  if (i == g->n_graphs) {
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal));
    gpu_forward(e, n_tokens, n_tokens, n_tokens, splits, true);
    CUDA_CHECK(cudaStreamEndCapture(g->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&g->graphs[i].exec, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    g->graphs[i].n_tokens = n_tokens;
    g->graphs[i].splits = splits;
    g->n_graphs++;
  }
  CUDA_CHECK(cudaGraphLaunch(g->graphs[i].exec, g->stream));
}

// Attention runs: neighbouring tokens of a slot, as many as fit 16 query rows with their heads.
// Returns how many.
static int find_runs(const Config* c, const Batch* b, int4* run) {
  int most = TILE_ROWS / (c->n_heads / c->n_kv_heads), n = 0;
  for (int t = 0; t < b->n_tokens; t++) {
    if (n > 0 && b->slot[t] == run[n - 1].z && run[n - 1].y < most) {
      run[n - 1].y++;
    } else {
      run[n++] = make_int4(t, 1, b->slot[t], b->pos[t]);
    }
  }
  return n;
}

// The same sequences one position on: the device has moved its list on by itself
// (sample_finish_kernel).
static bool device_has_it(const Gpu* g, const Batch* b) {
  if (g->last.n_tokens != b->n_tokens || b->n_rows != b->n_tokens) return false;
  for (int t = 0; t < b->n_tokens; t++) {
    bool same = b->id[t] < 0 && b->slot[t] == g->last.slot[t] && b->pos[t] == g->last.pos[t] + 1 &&
                b->row[t] == t;
    if (!same) return false;
  }
  return true;
}

// Copies a token list, padded to T tokens, to the device. Returns the number of attention runs.
static int upload_batch(Engine* e, const Batch* b, int T, bool decode, int* staging) {
  Gpu* g = e->gpu;
  int max = e->size.max_tokens, n = b->n_tokens, R = b->n_rows;
  int4* run = (int4*)staging;
  int *id = staging + 4 * max, *pos = id + max, *slot = pos + max, *row = slot + max;
  for (int t = 0; t < T; t++) {
    id[t] = t < n ? b->id[t] : 0;
    pos[t] = t < n ? b->pos[t] : 0;
    slot[t] = t < n ? b->slot[t] : -1;
  }
  for (int r = 0; r < (decode ? T : R); r++)
    row[r] = r < R ? b->row[r] : r;  // padding: its own token, slot -1
  int runs = find_runs(&e->w->config, b, run);
  for (; runs < T && decode; runs++) run[runs] = make_int4(runs, 0, -1, 0);
  size_t pitch = max * sizeof(int);  // the first T of each list
  CUDA_CHECK(cudaMemcpyAsync(g->qkv.batch.run, run, runs * sizeof(int4), cudaMemcpyHostToDevice,
                             g->stream));
  CUDA_CHECK(cudaMemcpy2DAsync(g->qkv.batch.id, pitch, id, pitch, T * sizeof(int), 4,
                               cudaMemcpyHostToDevice, g->stream));
  return runs;
}

static void upload_tables(Engine* e, int* staging) {
  Gpu* g = e->gpu;
  size_t ints = (size_t)e->size.max_slots * e->blocks.max_blocks, slots = e->size.max_slots;
  if (e->blocks.changed) {
    memcpy(staging, e->blocks.table, ints * sizeof(int));
    CUDA_CHECK(cudaMemcpyAsync(g->qkv.batch.table, staging, ints * sizeof(int),
                               cudaMemcpyHostToDevice, g->stream));
  }
  if (e->sampler_changed) {
    memcpy(staging + ints, e->seed, slots * sizeof(int));
    memcpy(staging + ints + slots, e->temperature, slots * sizeof(float));
    CUDA_CHECK(cudaMemcpyAsync(g->sample.sampler.seed, staging + ints, slots * sizeof(int),
                               cudaMemcpyHostToDevice, g->stream));
    CUDA_CHECK(cudaMemcpyAsync(g->sample.sampler.temperature, staging + ints + slots,
                               slots * sizeof(float), cudaMemcpyHostToDevice, g->stream));
  }
  e->blocks.changed = e->sampler_changed = false;
}

static void gpu_submit(Engine* e, const Batch* b, Step* s) {
  Gpu* g = e->gpu;
  const Config* c = &e->w->config;
  int which = (int)(s - e->step), T = b->n_tokens, last_pos = 0;
  bool decode = b->n_rows == b->n_tokens;
  for (int t = 0; t < T; t++) {
    decode = decode && b->id[t] < 0;
    last_pos = b->pos[t] > last_pos ? b->pos[t] : last_pos;
  }
  if (decode && graph_size(T) <= e->size.max_tokens) T = graph_size(T);
  int* staging =
      g->staging + which * g->staging_ints;  // free again: the step that used it was collected
  upload_tables(e, staging + (size_t)BATCH_INTS * e->size.max_tokens);
  int runs = T;
  if (!decode || !device_has_it(g, b)) runs = upload_batch(e, b, T, decode, staging);
  int parts = ceil_div(c->n_heads / c->n_kv_heads, TILE_ROWS),
      blocks = runs * c->n_kv_heads * parts;
  int splits = blocks < 2 * g->device->sms ? last_pos / SPLIT + 1 : 1;
  if (decode) replay_decode(e, T, splits);
  if (!decode) gpu_forward(e, T, b->n_rows, runs, splits, false);
  g->last.n_tokens = decode ? b->n_tokens : 0;
  for (int t = 0; t < g->last.n_tokens; t++) {
    g->last.slot[t] = b->slot[t];
    g->last.pos[t] = b->pos[t];
  }
  CUDA_CHECK(cudaMemcpyAsync(g->sampled + (size_t)which * e->size.max_slots,
                             g->sample.sampler.sampled, e->size.max_slots * sizeof(int),
                             cudaMemcpyDeviceToHost, g->stream));
  CUDA_CHECK(cudaEventRecord(g->end[which], g->stream));
}

static void gpu_collect(Engine* e, Step* s) {
  Gpu* g = e->gpu;
  int which = (int)(s - e->step);
  float ms;
  CUDA_CHECK(cudaEventSynchronize(g->end[which]));
  CUDA_CHECK(cudaEventElapsedTime(&ms, g->base, g->end[which]));
  s->end = g->base_time + 1e-3 * ms;
  for (int r = 0; r < s->n_rows; r++)
    s->tokens[r] = g->sampled[(size_t)which * e->size.max_slots + s->slot[r]];
}

// Working memory for steps of at most max_tokens tokens and max_slots rows.
static bool gpu_work_alloc(Engine* e) {
  Gpu* g = e->gpu;
  const Config* c = &e->w->config;
  const Layer* l = &e->w->layers[0];
  size_t T = e->size.max_tokens, R = graph_size(e->size.max_slots), y = 0, split_rows;
  size_t padded = ((T > R ? T : R) + TOKEN_GROUP - 1) / TOKEN_GROUP * TOKEN_GROUP;
  const Matrix* unsummed[] = {&l->qkv, &l->o, &l->down};
  for (size_t i = 0; i < 3 * T; i++) {  // most floats in y, over every number of tokens
    const Matrix* m = unsummed[i % 3];
    int t = (int)(i / 3) + 1, parts = t > SKINNY_TOKENS ? tile_parts(g->device, m, t) : 1;
    size_t floats = (size_t)t * m->n * parts;
    y = floats > y ? floats : y;
  }
  split_rows =
      2 * g->device->sms / c->n_kv_heads + 1;  // runs that attention splits: see gpu_submit
  split_rows *= TILE_ROWS * c->n_kv_heads;
  size_t splits = e->size.max_positions / SPLIT + 1, lists = BATCH_INTS * T;
  size_t table = (size_t)e->size.max_slots * e->blocks.max_blocks,
         pieces = ceil_div(c->vocab_size, BLOCK_ROWS);
  if (splits == 1) split_rows = 1;
  if (pieces < WARP) pieces = WARP;  // see sample_kernel
  struct {
    void** p;
    size_t bytes;
  } parts[] = {
      {(void**)&g->x, T * c->dim * sizeof(float)},
      {(void**)&g->y, y * sizeof(float)},
      {(void**)&g->logits, R * c->vocab_size * sizeof(float)},
      {(void**)&g->partial, split_rows * splits * (c->head_dim + 2) * sizeof(float)},
      {(void**)&g->normed, padded * c->dim * sizeof(half)},
      {(void**)&g->qkv.q, T * c->n_heads * key_width(c->head_dim) * sizeof(half)},
      {(void**)&g->att, padded * c->n_heads * c->head_dim * sizeof(half)},
      {(void**)&g->hidden, padded * c->hidden_dim * sizeof(half)},
      {(void**)&g->arrived, T * c->n_heads * sizeof(int)},
      {(void**)&g->sample.best, R * pieces * sizeof(Candidate)},
      {(void**)&g->qkv.batch.run, lists * sizeof(int)},
      {(void**)&g->qkv.batch.table, table * sizeof(int)},
      {(void**)&g->sample.sampler.sampled, e->size.max_slots * sizeof(int)},
      {(void**)&g->sample.sampler.seed, e->size.max_slots * sizeof(int)},
      {(void**)&g->sample.sampler.temperature, e->size.max_slots * sizeof(float)},
  };
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    *parts[i].p = device_alloc(e->device, MEM_WORK, parts[i].bytes);
    if (!*parts[i].p) return false;
  }
  g->qkv.batch.id = (int*)(g->qkv.batch.run + T);
  g->qkv.batch.pos = g->qkv.batch.id + T;
  g->qkv.batch.slot = g->qkv.batch.pos + T;
  g->qkv.batch.row = g->qkv.batch.slot + T;
  g->sample.batch = g->qkv.batch;
  g->staging_ints = (lists + table + 2 * e->size.max_slots + 3) / 4 * 4;  // runs are 16 bytes
  return true;
}

static bool gpu_engine_open(Engine* e) {
  const Config* c = &e->w->config;
  Gpu* g = e->gpu = (Gpu*)xcalloc(1, sizeof *g);
  g->device = e->device;
  g->matmul = e->w->matmul;
  g->fp8_kv = e->device->fp8_kv;
  CUDA_CHECK(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
  CUDA_CHECK(cudaEventCreate(&g->base));
  for (int i = 0; i < IN_FLIGHT; i++) CUDA_CHECK(cudaEventCreate(&g->end[i]));
  if (!gpu_work_alloc(e)) return false;
  g->last.slot = (int*)xcalloc(e->size.max_slots, sizeof(int));
  g->last.pos = (int*)xcalloc(e->size.max_slots, sizeof(int));
  CUDA_CHECK(cudaMallocHost((void**)&g->staging, IN_FLIGHT * g->staging_ints * sizeof(int)));
  CUDA_CHECK(cudaMallocHost((void**)&g->sampled, IN_FLIGHT * e->size.max_slots * sizeof(int)));
  const KVCache* kv = &e->kv;
  g->qkv.kv = {kv->k, kv->v, kv->n_blocks, kv->max_blocks, c->n_heads, c->n_kv_heads, 0};
  g->qkv.angles = (const float2*)e->w->rope;
  g->qkv.head_dim = c->head_dim;
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaEventRecord(g->base, g->stream));
  CUDA_CHECK(cudaEventSynchronize(g->base));
  g->base_time = now();
  return true;
}

static void gpu_engine_close(Engine* e) {
  Gpu* g = e->gpu;
  if (!g) return;
  CUDA_CHECK(cudaStreamSynchronize(g->stream));
  for (int i = 0; i < g->n_graphs; i++) CUDA_CHECK(cudaGraphExecDestroy(g->graphs[i].exec));
  for (int i = 0; i < IN_FLIGHT; i++) CUDA_CHECK(cudaEventDestroy(g->end[i]));
  CUDA_CHECK(cudaEventDestroy(g->base));
  CUDA_CHECK(cudaFreeHost(g->staging));
  CUDA_CHECK(cudaFreeHost(g->sampled));
  CUDA_CHECK(cudaStreamDestroy(g->stream));
  free(g->last.slot);
  free(g->last.pos);
  free(g);
}

// The last step's logits, [R, V]: for tests and for whoever wants to look. A decode step of more
// than 8 tokens leaves none, see gpu_forward.
static void gpu_copy_logits(Engine* e, int rows, float* out) {
  CUDA_CHECK(cudaStreamSynchronize(e->gpu->stream));
  CUDA_CHECK(cudaMemcpy(out, e->gpu->logits, (size_t)rows * e->w->config.vocab_size * sizeof(float),
                        cudaMemcpyDeviceToHost));
}

static const Backend gpu_backend = {
    gpu_open,        gpu_probe_bandwidth, gpu_probe_rate, gpu_used,     gpu_alloc,     gpu_free,
    gpu_upload,      BLOCK_ROWS,          TILE_K,         sizeof(half), matrix_slices, gpu_fill,
    gpu_engine_open, gpu_engine_close,    gpu_submit,     gpu_collect,  real_clock,    real_wait,
    gpu_copy_logits,
};

static const Backend* cuda_backend = &gpu_backend;
