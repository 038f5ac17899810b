// The GPU's half of bs: the same forward pass as forward_cpu in model.h, as CUDA kernels written by
// hand, and the Backend (bs.cu) that launches them. bs.cu includes it when nvcc compiles; nothing
// in it decides who runs or when.
//
//   fragments           how data lies so that one load per lane feeds a matrix unit
//   what the GPU holds  token list, cache, a step's state; how a kernel is launched
//   norm, RoPE, logits  what happens between linear layers and after them
//   linear.h            linear layers, a ladder of five rungs: naive, gemv, reuse, skinny (1 to 8
//                       tokens), tile
//   attention.h         over the paged cache: a block per run of tokens; a warp, if there are many
//   gpu.h               sampling, loading, ceilings; one step as launches, recorded as a graph
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

// Keys of one page [16 tokens, KD] as the A operand of k . q^T. Lane (g, t) has dimensions 8t ..
// 8t+7 of every 32 of two tokens, a = g / 2 * 4 + g % 2 and a + 2 (rows g and g + 8), 8 numbers for
// each of two mmas: dimensions 8t and 8t+1 of a, of a + 2, then 8t+2 and 8t+3 of a, of a + 2; the
// second mma has 8t+4 .. 8t+7. fp16: an mma's numbers of all lanes are 512 bytes in a row; fp8: a
// lane's 16 numbers are neighbours.
__host__ __device__ static inline int k_index(int token, int dim, bool fp8) {
  int lane = (token / 4 * 2 + token % 2) * 4 + dim % 32 / 8;
  int eight = fp8 ? lane * 2 + dim % 8 / 4 : dim % 8 / 4 * WARP + lane;
  return dim / 32 * 512 + eight * 8 + dim % 4 / 2 * 4 + token % 4 / 2 * 2 + dim % 2;
}

// Values of one page [16 tokens, K] as the A operand of v^T . p^T: lane (g, t) finds dimensions g
// and g + 8 of every 16 for tokens 4t .. 4t+3 in 8 numbers.
__host__ __device__ static inline int v_index(int token, int dim) {
  return dim / 16 * 256 + (dim % 8 * 4 + token / 4) * 8 + token % 4 / 2 * 4 + dim / 8 % 2 * 2 +
         token % 2;
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

__device__ static inline uint32_t shared_address(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

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
          shared_address(shared)),
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
  void* k;  // [L, blocks, G] pages of [16 KD] in the order of k_index
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
  bool even;
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
  bool even;                        // no token of the step sees far more keys than the others
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

enum { NORM_THREADS = 256, NORM_TEAMS = 2 };  // of all that normalise: one summation order

// The sums of N values over each 256 threads of a block, in a fixed order; every thread gets its
// team's.
template <int N>
__device__ static void block_sums(float v[N]) {
  __shared__ float partial[NORM_TEAMS][NORM_THREADS / WARP][N];
  int team = threadIdx.x / NORM_THREADS, warp = threadIdx.x % NORM_THREADS / WARP;
#pragma unroll
  for (int i = 0; i < N; i++) {
    for (int offset = 16; offset > 0; offset /= 2) v[i] += __shfl_xor_sync(~0u, v[i], offset);
    if (threadIdx.x % WARP == 0) partial[team][warp][i] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) {
    v[i] = 0;
    for (int w = 0; w < NORM_THREADS / WARP; w++) v[i] += partial[team][w][i];
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

__host__ __device__ constexpr int key_width(int head_dim) {
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
  if (g >= 0 && g < kv->kv_heads) {
    row = page_at<half>(kv->k, kv_page(kv, to->batch.table, slot, pos, g), width);
    first_at = k_index(pos % KV_BLOCK, i, false);
    second_at = k_index(pos % KV_BLOCK, i + half_dim, false);
  }
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
        page[is_key ? k_index(token, dim, true) : v_index(token, dim)] =
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

#include "linear.h"

#include "attention.h"

#include "gpu.h"
