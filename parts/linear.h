// The rungs of a linear layer on the GPU, from one thread per output to Hopper's tiles, and who
// chooses among them. Included by kernels.h, which says how data lies.

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
// (GEMV, a warp per row): loads are as wide as can be, over half of the memory roofline at batch
// 1; but every sequence reads all weights again, so batching buys nothing: the lower line of
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
// through a ring of RING tiles of 1 KB in registers, the first RING asked for before waiting for
// the previous kernel (64 to 128 KB a block; Little's law at 4.3 TB/s and 0.8 us asks for 26 KB an
// SM, the rest keeps the memory busy while the block waits and normalises). What would be a kernel
// before and after is done in place: RMSNorm of the residual stream on the way in, and RoPE, SwiGLU
// or the residual addition on the way out. Must move 2 n k bytes.
//
// One block on every SM and never two: an SM gets at most 1.5 times its share of the memory's
// bandwidth, so where blocks that start early go where there is room, two to an SM, other SMs are
// left without any and the step takes up to 30% longer (llama-2-7b at batch 1: 4,466 us instead of
// 3,429). So a block takes more than half of an SM's registers: 8 warps with a ring of 16 tiles,
// or up to 16 with a ring of 8 where that makes one turn of the SMs out of two. Only a matrix of
// many turns, such as the output matrix, has blocks of which two fit. And as many SMs as can be
// get one: llama-2-7b's qkv is 128 blocks of 6 row tiles, not 96 of 8.
enum { SKINNY_WARPS = 16, SKINNY_RING = 128 };  // at most: warps; tiles of a block
enum { SKINNY_SHARED = 9 * 1024 };              // at most: shared memory that is not asked for

typedef struct {
  const half* x;        // [T, k] activations, or NULL: normalise these:
  const float* stream;  // [tokens, k] the residual stream
  const float* weight;  // [k]
  const int* row;       // [T] which tokens; NULL = all
  float eps;
} SkinnyInput;

// RMSNorm of up to 8 tokens into shared memory, [k / 32][T][32]: rows of 32 k's, as the B fragments
// want them. 256 threads take AT_ONCE tokens at a time, so that their loads overlap; another 256,
// if there are, the next ones.
template <int AT_ONCE>
__device__ static void norm_tokens(half* normed, const float4* weight, const SkinnyInput* in, int k,
                                   int n_tokens) {
  int teams = blockDim.x / NORM_THREADS, team = threadIdx.x / NORM_THREADS;
#pragma unroll 1
  for (int done = 0; done < n_tokens; done += teams * AT_ONCE) {
    int t0 = done + team * AT_ONCE, n = team < teams && t0 < n_tokens ? k / 4 : 0;
    const float4* x[AT_ONCE];
    float sum[AT_ONCE] = {};
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
      int token = min(t0 + t, n_tokens - 1);
      x[t] = (const float4*)(in->stream + (size_t)(in->row ? in->row[token] : token) * k);
    }
#pragma unroll 2
    for (int at = threadIdx.x % NORM_THREADS; at < n; at += NORM_THREADS)
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) sum[t] += square4(x[t][at]);
    copy_wait<0>();  // the weight; block_sums' barrier shows it to all
    block_sums<AT_ONCE>(sum);
#pragma unroll 1
    for (int at = threadIdx.x % NORM_THREADS; at < n; at += NORM_THREADS) {
      float4 w = weight[at];
      half* to = normed + (at / 8 * n_tokens + t0) * TILE_K + at % 8 * 4;
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++)
        if (t0 + t < n_tokens)
          norm4((half2*)(to + t * TILE_K), x[t][at], rsqrtf(sum[t] / k + in->eps), w);
    }
    __syncthreads();
  }
}

template <Output MODE, bool NORM, int RING>
__global__ void __launch_bounds__(SKINNY_RING / RING * WARP, 1)
    matmul_skinny_kernel(void* out, QkvTarget qkv, SkinnyInput in, Matrix m, int n_tokens,
                         int row_tiles) {
  constexpr int STEP = BLOCK_TILES * 64;  // 16 bytes from one k tile to the next
  extern __shared__ uint4 shared[];
  __shared__ float partial[SKINNY_RING / RING][TILE_ROWS * 8];
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  int k = m.k, slice = warp % m.slices, row_tile = blockIdx.x * row_tiles + warp / m.slices;
  if (warp / m.slices >= row_tiles) row_tile = m.n;  // beyond: this warp only normalises
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
  for (int at = threadIdx.x; NORM && at < k / 4; at += blockDim.x)
    copy_async(norm_weight + at, (const float4*)in.weight + at, true);
  copy_commit();
  wait_for_previous();
  // One token: no copies of it (764 -> 758 us at batch 1).
  if (NORM && n_tokens == 1) norm_tokens<1>((half*)shared, norm_weight, &in, k, n_tokens);
  if (NORM && n_tokens > 1) norm_tokens<4>((half*)shared, norm_weight, &in, k, n_tokens);
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

template <Output MODE, bool NORM, int RING>
static void launch_skinny(const Gpu* g, void* out, SkinnyInput in, const Matrix* m, int n_tokens,
                          int layer, int row_tiles) {
  auto kernel = matmul_skinny_kernel<MODE, NORM, RING>;
  size_t shared = NORM ? m->k * (n_tokens * sizeof(half) + sizeof(float)) : 0;
  static bool configured;
  if (!configured)
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    g->device->shared_bytes - SKINNY_SHARED));
  configured = true;
  QkvTarget qkv = g->qkv;
  qkv.kv.layer = layer;
  int threads = row_tiles * m->slices * WARP;
  if (NORM && threads < NORM_THREADS) threads = NORM_THREADS;
  launch(g, kernel, dim3(ceil_div(ceil_div(m->n, TILE_ROWS), row_tiles)), threads, shared, out, qkv,
         in, *m, n_tokens, row_tiles);
}

// Up to 8 tokens: with what comes before and after fused in.
template <Output MODE, bool NORM>
static void matmul_skinny(const Gpu* g, void* out, SkinnyInput in, const Matrix* m, int n_tokens,
                          int layer) {
  int one_turn = ceil_div(ceil_div(m->n, TILE_ROWS), g->device->sms);  // row tiles of a block
  int narrow = SKINNY_WARPS / 2 / m->slices, wide = SKINNY_WARPS / m->slices;
  if (one_turn <= narrow)
    launch_skinny<MODE, NORM, 16>(g, out, in, m, n_tokens, layer, one_turn);
  else  // in several turns small blocks, of which two fit
    launch_skinny<MODE, NORM, 8>(g, out, in, m, n_tokens, layer,
                                 one_turn <= wide ? one_turn : narrow);
}

// Rung 5: any number of tokens. A block of 8 warps computes 128 rows x TOKENS (of 12 warps: 192), a
// warp 16 rows x TOKENS, so that each weight enters registers once. k runs through a ring of
// shared-memory stages of 64, the weights of the first ones asked for before waiting for the
// previous kernel. In a stage 8 tokens x 8 k's are 128 contiguous bytes (see activation_index),
// which both ldmatrix and wgmma read without bank conflicts. At 64 tokens on an H200 gate-up
// takes 21.8 us: 20.0 without the products, 15.1 without the copies (NOTES.md, section 6, has
// more).
//
// On Hopper one thread keeps the ring full with bulk copies, one for all weights of a stage (with 8
// copies of 2 KB instead gate-up took 33 us), and from 33 tokens on four warps multiply together
// with wgmma, which reads the activations once per 64 rows and runs at 1.5 times mma.sync's rate.
// Both instructions gave the same bits for 8 million sums of four kinds of numbers; the tests
// compare them, since up to 32 tokens it is mma.sync.
//
// Must move 2 n k bytes for every TOKENS tokens, 2 k for each token and block of rows, 4 n a token
// (SwiGLU: n). blockIdx: x = TOKENS tokens (first, so that blocks that share weights run together),
// y = 128 or 192 rows, z = one slice (gridDim.z == slices), a pair (slices / 2) or all (1). SLICED,
// for more than one slice, keeps three sums: of the slice, of the pair and of all pairs before it.
enum { STAGE_TILES = 2, WIDE_TILES = 12 };  // k tiles of a stage; row tiles of a wide block

// A block's shape. WIDE: 12 warps, 192 rows: two neighbours share three packed pieces of 128, one
// each and the halves of the second.
template <int TOKENS_, int STAGES_, bool SLICED_, bool WIDE_ = false>
struct Tile {
  static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, GROUP = token_group(TOKENS_);
  static constexpr bool SLICED = SLICED_, WIDE = WIDE_;
  static constexpr int ROW_TILES = WIDE ? (int)WIDE_TILES : (int)BLOCK_TILES;
  static constexpr int THREADS = ROW_TILES * WARP;              // that multiply
  static constexpr int WEIGHTS = STAGE_TILES * ROW_TILES * 64;  // of a stage, in 16 bytes
  static constexpr int STAGE = WEIGHTS + STAGE_TILES * 4 * TOKENS;
  static constexpr int BLOCKS =  // for which an SM has registers
      WIDE || TOKENS * (SLICED ? 2 : 1) > 64 ? 1 : 2;
  // Blocks of 128 and 256 tokens run in clusters of two: the same tokens, neighbouring rows. Where
  // the code is for sm_90a each fetches half of the activations for both, so that there is a third
  // less to read from the L2 cache at 256 tokens, a quarter less at 128: its 5.8 TB/s are their
  // limit. (Four would be better yet, but an H200 holds fewer than 32 clusters of four at once:
  // gate-up's 128 blocks would take two turns.)
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr int CLUSTER = 1;
#else
  static constexpr int CLUSTER = TOKENS >= 128 ? 2 : 1;
#endif
  // Warps beyond those that multiply, see ring_fill. Where these need more than 168 registers a
  // thread it is a whole warpgroup, because only warpgroups can give each other registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int FILL_WARPS = 0;
#else
  static constexpr int FILL_WARPS = TOKENS * (SLICED ? 3 : 1) >= 256 ? 4 : 1;
#endif
  // The pieces of 128 rows that a block computes, `half` only if WIDE.
  __device__ static inline int piece() {
    return WIDE ? blockIdx.y / 2 * 3 + blockIdx.y % 2 * 2 : blockIdx.y;
  }
  __device__ static inline int half_piece() {
    return blockIdx.y / 2 * 3 + 1;
  }
  __device__ static inline int row_tile(int i) {  // the i'th of its row tiles
    return i < BLOCK_TILES
               ? piece() * BLOCK_TILES + i
               : half_piece() * BLOCK_TILES + blockIdx.y % 2 * (BLOCK_TILES / 2) + i - BLOCK_TILES;
  }
};

// Walks k, in tiles of 32, over the slices that a block owns: one, or if SLICED several. A stage
// never crosses a slice's end.
typedef struct {
  int at, end;       // k tiles
  int slice, last;   // the slice they are of; the block's last one
  int slot, parity;  // of the ring: where the stage lies, how often it went round
} KWalk;

template <typename S>
__device__ static inline void walk_next(KWalk* w, Matrix m) {
  if (++w->slot == S::STAGES) {
    w->slot = 0;
    w->parity ^= 1;
  }
  w->at += STAGE_TILES;
  if (!S::SLICED || w->at < w->end || w->slice == w->last) return;
  w->slice++;
  w->at = w->end;
  w->end = slice_start(m, w->slice + 1);
}

// k tiles of the stage at w; none after the last.
__device__ static inline int walk_tiles(const KWalk* w) {
  return min((int)STAGE_TILES, w->end - w->at);
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

// What a block streams through shared memory: its rows' weights and its tokens' activations.
typedef struct {
  Matrix m;
  const uint4 *w, *x;  // the block's rows (a piece of 128) and tokens
  const uint4* half;   // WIDE: its half of another piece
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

template <typename S>
__device__ static inline void fill_weights(const Ring* r, const KWalk* to) {
  int tiles = walk_tiles(to);
  uint64_t* full = r->full + to->slot;
  uint4* stage = r->stages + to->slot * S::STAGE;
  if (tiles <= 0) return;
  barrier_expect(full, tiles * S::STAGE / STAGE_TILES * 16);
  copy_bulk<false>(stage, r->w + (size_t)to->at * BLOCK_TILES * 64, tiles * BLOCK_TILES * 1024,
                   full);
  for (int i = 0; S::WIDE && i < tiles; i++)
    copy_bulk<false>(stage + (STAGE_TILES * BLOCK_TILES + i * BLOCK_TILES / 2) * 64,
                     r->half + (size_t)(to->at + i) * BLOCK_TILES * 64, BLOCK_TILES / 2 * 1024,
                     full);
}

// A block's share of a stage's activations: of 8 pieces (of 8 k's) of each group of tokens. A last
// stage has fewer pieces.
template <typename S>
__device__ static inline void fill_tokens(const Ring* r, const KWalk* to) {
  constexpr int ALL = STAGE_TILES * 4, SHARE = S::TOKENS / S::GROUP * ALL / S::CLUSTER,
                AT_ONCE = SHARE < ALL ? SHARE : ALL;
  int pieces = walk_tiles(to) * 4;
#pragma unroll
  for (int i = 0; i < SHARE; i += AT_ONCE) {
    int at = (int)(blockIdx.y % S::CLUSTER) * SHARE + i, group = at / ALL, piece = at % ALL;
    if (piece < pieces)
      copy_bulk<(S::CLUSTER > 1)>(
          r->stages + to->slot * S::STAGE + S::WEIGHTS + at * S::GROUP,
          r->x + min(group, r->groups - 1) * r->group + (to->at * 4 + piece) * S::GROUP,
          min(AT_ONCE, pieces - piece) * S::GROUP * 16, r->full + to->slot);
  }
}

// One thread beyond the warps that multiply does nothing but this (as a task of a multiplying warp:
// 1,350 us a step at 64 tokens instead of 1,314). Returns whether the caller is of a warp beyond.
template <typename S>
__device__ static bool ring_fill(Ring* r) {
  if (threadIdx.x < S::STAGES) {
    barrier_open(r->full + threadIdx.x, 1);
    barrier_open(r->empty + threadIdx.x, S::ROW_TILES * S::CLUSTER);
  }
  if (S::CLUSTER > 1) {
    cluster_sync();  // the other block's barriers are open, too
  } else {
    __syncthreads();
  }
  if (threadIdx.x < S::THREADS) {
    if (S::FILL_WARPS == 4) more_registers();
    return false;
  }
  if (S::FILL_WARPS == 4) fewer_registers();
  if (threadIdx.x > S::THREADS) return true;
  // Activations arrive after all weights asked for before them. From 64 tokens on, where a stage
  // has many, half of the weights wait (128 tokens: 1,500 -> 1,470 us a step).
  constexpr int EARLY = S::TOKENS < 64 ? S::STAGES : S::STAGES / 2;
  KWalk early = r->load;
  for (int i = 0; i < EARLY; i++) {
    fill_weights<S>(r, &early);
    walk_next<S>(&early, r->m);
  }
  wait_for_previous();
  int i = 0;
  for (; walk_tiles(&r->load) > 0; i++) {
    if (i >= S::STAGES) barrier_wait(r->empty + r->load.slot, r->load.parity ^ 1);
    if (i >= EARLY) fill_weights<S>(r, &r->load);
    fill_tokens<S>(r, &r->load);
    walk_next<S>(&r->load, r->m);
  }
  // A block of a cluster stays until the other one has signalled its last use of every slot. Turn i
  // waits for the use of turn i - STAGES; before the first STAGES there was none.
  for (int last = i + S::STAGES; S::CLUSTER > 1 && i < last; i++) {
    if (i >= S::STAGES) barrier_wait(r->empty + r->load.slot, r->load.parity ^ 1);
    walk_next<S>(&r->load, r->m);
  }
  return true;
}

template <typename S>
__device__ static inline void ring_wait(const Ring* r, const KWalk* use) {
  barrier_wait(r->full + use->slot, use->parity);
}

// In a cluster lanes 0 and 1 tell a block each, since both write to the slot. What this orders are
// reads that are complete (products waited for, weights in registers), so it does without
// .release.cluster, which takes far too long (2,938 us a step at 256 tokens instead of 2,509).
template <typename S>
__device__ static inline void ring_release(Ring* r, int slot) {
  __syncwarp();
  int lane = threadIdx.x % WARP;
  if (S::CLUSTER == 1 && lane == 0)
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(r->empty + slot))
                 : "memory");
  if (S::CLUSTER == 2 && lane < 2)
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [a]; }" ::"r"(shared_address(r->empty + slot)),
        "r"(lane)
        : "memory");
}
#else  // all threads copy, 16 bytes each
template <typename S>
__device__ static inline void fill_stage(Ring* r) {
  constexpr int PART = S::GROUP * 4 * STAGE_TILES, WHOLE = BLOCK_TILES * 64;  // WHOLE: of a k tile
  int tiles = walk_tiles(&r->load), at = r->load.at;
  uint4* stage = r->stages + r->load.slot * S::STAGE;
#pragma unroll
  for (int i = threadIdx.x; i < STAGE_TILES * WHOLE; i += S::THREADS)
    copy_async(stage + i, r->w + (size_t)at * WHOLE + i, i / WHOLE < tiles);
#pragma unroll
  for (int i = threadIdx.x; S::WIDE && i < STAGE_TILES * WHOLE / 2; i += S::THREADS)
    copy_async(stage + STAGE_TILES * WHOLE + i,
               r->half + (size_t)(at + i / (WHOLE / 2)) * WHOLE + i % (WHOLE / 2),
               i / (WHOLE / 2) < tiles);
#pragma unroll
  for (int i = threadIdx.x; i < STAGE_TILES * 4 * S::TOKENS; i += S::THREADS)
    copy_async(stage + S::WEIGHTS + i,
               r->x + min(i / PART, r->groups - 1) * r->group + at * S::GROUP * 4 + i % PART,
               i % PART / (S::GROUP * 4) < tiles);
  copy_commit();
  walk_next<S>(&r->load, r->m);
}

template <typename S>
__device__ static inline bool ring_fill(Ring* r) {
  for (int i = 0; i < S::STAGES; i++) fill_stage<S>(r);
  return false;
}

template <typename S>
__device__ static inline void ring_wait(const Ring*, const KWalk*) {
  copy_wait<S::STAGES - 2>();
  __syncthreads();  // so the stage before this one has been used by all
}

template <typename S>
__device__ static inline void ring_release(Ring* r, int) {
  fill_stage<S>(r);
}
#endif

// Four 8 x 8 pieces of activations, each lane naming a row of one: the B operands of two mmas.
__device__ static inline uint4 load_matrices(const uint4* row) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(shared_address(row)));
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

template <typename S>
__device__ static inline void sync_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(S::THREADS) : "memory");
}

// A block's rows x TOKENS of gate and up become k's of the next tile kernel's activations, 8 for
// each row tile, put together in shared memory: from registers they would be written 4 bytes in
// each 32-byte sector. out: of the first token; n_tokens: how many of TOKENS exist.
template <typename S>
__device__ static inline void store_swiglu(half* out, uint4* shared, const float d[][4], int n,
                                           int n_tokens) {
  int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  half* to = (half*)shared + activation_index(t * 2, warp * 8 + g, S::ROW_TILES * 8, S::TOKENS);
  sync_multipliers<S>();  // all have used the last stages
#pragma unroll
  for (int i = 0; i < S::TOKENS / 8; i++) {
    to[i * 64] = __float2half(silu_mul(d[i][0], d[i][2]));
    to[i * 64 + 8] = __float2half(silu_mul(d[i][1], d[i][3]));
  }
  sync_multipliers<S>();
  for (int i = threadIdx.x; i < S::ROW_TILES * S::TOKENS; i += S::THREADS) {
    int piece = S::row_tile(i / S::TOKENS), token = i % S::TOKENS;
    size_t at = (size_t)(token / S::GROUP) * (n / 16) + piece;
    if (token < n_tokens && piece < n / 16)
      ((uint4*)out)[at * S::GROUP + token % S::GROUP] = shared[i];
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

// Logits of tokens that are not decoded greedily become their scores, 32 tokens at a time through
// 2.5 KB of a warp's own shared memory: a loop over it is 40 instructions long, the same for 128
// numbers in registers (of 256 tokens) is 5,000, which takes longer to fetch than to skip.
template <int TOKENS>
__device__ static inline void draw_scores(float* scratch, const Draw* draw, float d[][4],
                                          int row0) {
  constexpr int AT_ONCE = TOKENS < 32 ? TOKENS : 32, WIDTH = AT_ONCE + 8;  // no bank conflicts
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  float* mine = scratch + warp * TILE_ROWS * WIDTH + lane / 4 * WIDTH + lane % 4 * 2;
#pragma unroll
  for (int t0 = 0; t0 < TOKENS; t0 += AT_ONCE) {
#pragma unroll
    for (int i = 0; i < AT_ONCE / 2; i++)
      mine[i % 4 / 2 * 8 * WIDTH + i / 4 * 8 + i % 2] = d[t0 / 8 + i / 4][i % 4];
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < TILE_ROWS * AT_ONCE; i += WARP) {
      float* logit = scratch + (warp * TILE_ROWS + i / AT_ONCE) * WIDTH + i % AT_ONCE;
      *logit = candidate(draw[t0 + i % AT_ONCE], *logit, row0 + i / AT_ONCE).score;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < AT_ONCE / 2; i++)
      d[t0 / 8 + i / 4][i % 4] = mine[i % 4 / 2 * 8 * WIDTH + i / 4 * 8 + i % 2];
    __syncwarp();
  }
}

// Of 2 SHARE candidates this lane and the one `offset` away keep SHARE each, the better of theirs;
// where there is only one to share, both keep it.
template <int SHARE>
__device__ static inline void halve(Candidate* c, int offset, int* first) {
  bool upper = SHARE && threadIdx.x & offset;
  if (upper) *first += SHARE;
#pragma unroll
  for (int i = 0; i < (SHARE ? SHARE : 1); i++) {
    Candidate low = c[i], high = c[i + SHARE], keep, give;
    keep.token = upper ? high.token : low.token;
    keep.score = upper ? high.score : low.score;
    give.token = __shfl_xor_sync(~0u, upper ? low.token : high.token, offset);
    give.score = __shfl_xor_sync(~0u, upper ? low.score : high.score, offset);
    c[i] = better(keep, give);
  }
}

// A block's 128 rows x TOKENS of logits become the best of them for each token, in one of the
// vocabulary's pieces of 128. A lane has 2 rows of TOKENS / 4 tokens; the 8 lanes that have the
// same tokens halve them among themselves, each time with the lane `offset` away, until each has
// the best of the warp's 16 rows for a share of them. Then the warps meet in shared memory.
template <typename S>
__device__ static inline void store_best(const SampleTarget* to, uint4* shared, const Draw* draw,
                                         float d[][4], int n, int token0, int n_tokens) {
  static_assert(!S::WIDE &&
                BLOCK_ROWS * 40 * sizeof(float) <= S::STAGES * S::STAGE * 16);  // scores
  static_assert(BLOCK_TILES * S::TOKENS * sizeof(Candidate) <= S::STAGES * S::STAGE * 16);
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row0 = blockIdx.y * BLOCK_ROWS;
  int row = row0 + warp * TILE_ROWS + lane / 4;
  int first = 0;       // of the lane's share
  bool drawn = false;  // any token
  Candidate c[S::TOKENS / 4], *found = (Candidate*)shared;
  sync_multipliers<S>();  // all have used the last stages, and stored their draws
  for (int i = lane; i < S::TOKENS; i += WARP) drawn |= draw[i].temperature > 0;
  if (__any_sync(~0u, drawn))
    draw_scores<S::TOKENS>((float*)shared, draw, d, row0 + warp * TILE_ROWS);
#pragma unroll
  for (int i = 0; i < S::TOKENS / 4; i++) {
    float high = d[i / 2][i % 2], low = d[i / 2][i % 2 + 2];
    bool second = row + 8 < n && low > high;
    c[i] = {second ? row + 8 : row, row < n ? (second ? low : high) : -INFINITY};
  }
  halve<S::TOKENS / 8>(c, 16, &first);
  halve<S::TOKENS / 16>(c, 8, &first);
  halve<S::TOKENS / 32>(c, 4, &first);
  sync_multipliers<S>();  // draw_scores is done with shared memory
#pragma unroll
  for (int i = 0; i < (S::TOKENS + 31) / 32; i++) {
    int at = first + i;
    if (S::TOKENS >= 32 || !(lane & 4))  // of 16 tokens two lanes have the same one
      found[warp * S::TOKENS + at / 2 * 8 + lane % 4 * 2 + at % 2] = c[i];
  }
  sync_multipliers<S>();
  int token = threadIdx.x, r = token0 + token;
  if (token >= S::TOKENS || r >= n_tokens || !draw[token].wanted || row0 >= n) return;
  Candidate best = found[token];
  for (int w = 1; w < BLOCK_TILES; w++) best = better(best, found[w * S::TOKENS + token]);
  to->best[(size_t)r * ((n + BLOCK_ROWS - 1) / BLOCK_ROWS) + blockIdx.y] = best;
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

template <Output MODE, typename S>
__global__ void __launch_bounds__((S::ROW_TILES + S::FILL_WARPS) * WARP, S::BLOCKS)
    matmul_tile_kernel(void* out, SampleTarget sample, const half* x, Matrix m, int n_tokens) {
  constexpr int TOKENS = S::TOKENS, NT = TOKENS / 8, KEPT = S::SLICED ? NT : 1;
  extern __shared__ uint4 shared[];
  __shared__ uint64_t full[S::STAGES], empty[S::STAGES];
  __shared__ Draw draw[MODE == OUT_BEST ? TOKENS : 1];
  int token0 = blockIdx.x * TOKENS, warp = threadIdx.x / WARP, row_tile = S::row_tile(warp);
  int slices = m.slices / gridDim.z, slice = blockIdx.z * slices;
  KWalk use = {slice_start(m, slice), slice_start(m, slice + 1), slice, slice + slices - 1, 0, 0};
  // A cluster's second block, or a wide block's half, may have no rows: it reads others'.
  int last = (m.n - 1) / BLOCK_ROWS, group = m.k / 8 * S::GROUP;
  size_t piece_size = (size_t)m.k / TILE_K * BLOCK_TILES * 64;
  const uint4* w = (const uint4*)m.w;
  Ring ring = {
      m,
      w + min(S::piece(), last) * piece_size,
      (const uint4*)x + (size_t)(token0 / S::GROUP) * group,
      w + min(S::half_piece(), last) * piece_size + blockIdx.y % 2 * (BLOCK_TILES / 2) * 64,
      (n_tokens - token0 + S::GROUP - 1) / S::GROUP,
      group,
      use,
      shared,
      full,
      empty};
  if (ring_fill<S>(&ring)) return;
  wait_for_previous();
  if (MODE == OUT_BEST && threadIdx.x < TOKENS) {
    int r = token0 + threadIdx.x;
    draw[threadIdx.x] = r < n_tokens ? row_draw(&sample, r) : Draw{false, 0, 0};
  }
  float d[NT][4] = {}, pair[KEPT][4] = {}, total[KEPT][4] = {};
  // 16 bytes from a stage's start to this lane's weights, and on to those of the next k tile.
  const bool of_half = S::WIDE && warp >= BLOCK_TILES;
  const int lane_at = of_half ? (STAGE_TILES * BLOCK_TILES + warp - BLOCK_TILES) * 64 : warp * 64;
  const int next_tile = of_half ? BLOCK_TILES / 2 * 64 : BLOCK_TILES * 64,
            lane = threadIdx.x % WARP;
  int used = -1;  // the slot whose products may be the last under way
  ring_wait<S>(&ring, &use);
  const uint4* stage = shared + use.slot * S::STAGE;
  uint4 a[2] = {stage[lane_at + lane], stage[lane_at + lane + WARP]}, b[2];
#pragma unroll 1
  while (true) {  // one k tile is multiplied while the next one's weights come to registers
    bool both = walk_tiles(&use) == STAGE_TILES, complete = use.at + STAGE_TILES >= use.end;
    bool second = use.slice % 2;
    multiply_tile<TOKENS>(d, a, stage + S::WEIGHTS);
    wgmma_wait<1>();
    if (used >= 0) ring_release<S>(&ring, used);
    for (int i = 0; i < 2; i++)
      b[i] = both ? stage[lane_at + lane + next_tile + i * WARP] : make_uint4(0, 0, 0, 0);
    multiply_tile<TOKENS>(d, b, stage + S::WEIGHTS + (both ? 4 * S::GROUP : 0));
    wgmma_wait<1>();
    used = use.slot;
    walk_next<S>(&use, m);
    if (S::SLICED && complete) {
      wgmma_wait<0>();
      end_slice<KEPT>(d, pair, total, second);
    }
    if (walk_tiles(&use) <= 0) break;
    ring_wait<S>(&ring, &use);
    stage = shared + use.slot * S::STAGE;
    for (int i = 0; i < 2; i++) a[i] = stage[lane_at + lane + i * WARP];
  }
  wgmma_wait<0>();
  if (S::CLUSTER > 1) ring_release<S>(&ring, used);
  if constexpr (MODE == OUT_SWIGLU) {
    store_swiglu<S>((half*)out + (size_t)token0 * (m.n / 2), shared, d, m.n, n_tokens - token0);
  } else if constexpr (MODE == OUT_BEST) {
    store_best<S>(&sample, shared, draw, d, m.n, token0, n_tokens);
  } else {
    size_t first = ((size_t)blockIdx.z * n_tokens + token0) * m.n;
    store_floats<TOKENS>((float*)out + first, S::SLICED ? total : d, row_tile * TILE_ROWS, m.n,
                         n_tokens - token0);
  }
}

template <Output MODE, typename S>
static void launch_tile(const Gpu* g, void* out, const half* x, const Matrix* m, int n_tokens,
                        int z) {
  auto kernel = matmul_tile_kernel<MODE, S>;
  size_t stage_bytes = S::STAGE * 16;
  static bool configured;  // more than 48 KB of shared memory must be asked for, once
  if (!configured)
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)(S::STAGES * stage_bytes)));
  configured = true;
  // A block's slices may be shorter than the ring; the rest is left to the kernels before and
  // after.
  int stages = m->slices / z * ceil_div(ceil_div(m->k / TILE_K, m->slices), STAGE_TILES);
  size_t shared = (z > 1 && stages < S::STAGES ? stages : S::STAGES) * stage_bytes;
  int y_blocks = ceil_div(ceil_div(m->n, S::ROW_TILES * TILE_ROWS), S::CLUSTER) * S::CLUSTER;
  dim3 grid(ceil_div(n_tokens, S::TOKENS), y_blocks, z);
  int warps = S::ROW_TILES + (g->device->dependent_launch ? S::FILL_WARPS : 0);  // see ring_fill
  launch_clusters(g, S::CLUSTER, kernel, grid, warps * WARP, shared, out, g->sample, x, *m,
                  n_tokens);
}

// Pipeline depth by the shared memory a block may have: 227 KB on Hopper, 163 on A100, 99 on other
// Ampere and Ada cards, 64 on Turing.
template <Output MODE, bool SLICED, int TOKENS, int HOPPER, int AMPERE, int TURING>
static void launch_depth(const Gpu* g, void* out, const half* x, const Matrix* m, int n_tokens,
                         int z) {
  int kb = g->device->shared_bytes / 1024;
  (kb >= 200  ? launch_tile<MODE, Tile<TOKENS, HOPPER, SLICED>>
   : kb >= 99 ? launch_tile<MODE, Tile<TOKENS, AMPERE, SLICED>>
              : launch_tile<MODE, Tile<TOKENS, TURING, SLICED>>)(g, out, x, m, n_tokens, z);
}

// Whether wide blocks are done sooner: a turn of them takes half as long again. llama-2-7b's
// gate-up has 172 blocks of 128 rows for 132 multiprocessors, but 115 of 192.
static bool wide_pays(const Device* d, const Matrix* m, int n_tokens) {
  int tiles = ceil_div(m->n, TILE_ROWS);
  int turns = ceil_div(ceil_div(tiles, BLOCK_TILES), d->sms),
      wide_turns = ceil_div(ceil_div(tiles, WIDE_TILES), d->sms);
  return n_tokens <= 128 && d->shared_bytes >= 200 * 1024 &&
         wide_turns * WIDE_TILES < turns * BLOCK_TILES;
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
  if constexpr (MODE == OUT_SWIGLU) {
    if (wide_pays(g->device, m, n_tokens)) {
      run = launch_tile<MODE, Tile<128, 4, false, true>>;
      if (n_tokens <= 64) run = launch_tile<MODE, Tile<64, 6, false, true>>;
      if (n_tokens <= 32) run = launch_tile<MODE, Tile<32, 6, false, true>>;
      if (n_tokens <= 16) run = launch_tile<MODE, Tile<16, 7, false, true>>;
    }
  }
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
// llama-3.2-1b on 132 multiprocessors: 128 tokens, qkv: 96 slices 1 x 1, 48 pairs 1 x 2; o and
// down: 128 slices 1 x 1, 64 pairs 1 x 2: slices. 256 tokens, qkv: 96 slices 1 x 2, 96 pairs 1 x 2;
// o and down: 128 slices 1 x 2, 128 pairs 1 x 2: pairs. 2,048 tokens: all of k.
static int tile_parts(const Device* d, const Matrix* m, int n_tokens) {
  int rows = ceil_div(m->n, BLOCK_ROWS), blocks = rows * ceil_div(n_tokens, 128);
  if (m->slices == 1 || blocks >= d->sms) return 1;
  bool of_256 = n_tokens > 128 && d->shared_bytes >= 200 * 1024;  // tokens a block of one slice
  int tile = of_256 ? 256 : 128, alone = rows * ceil_div(n_tokens, tile) * m->slices,
      pairs = blocks * m->slices / 2;
  bool as_fast = ceil_div(pairs, d->sms) * 2 <= ceil_div(alone, d->sms) * (tile / 128);
  // A tile of 128 tokens reads a third more per product than one of 256: beyond about 1,024 k's a
  // slice that takes longer than the sum that need not be written and read.
  if (of_256 && m->k / m->slices > 1024) as_fast = false;
  return n_tokens > 64 && as_fast ? m->slices / 2 : m->slices;
}

// In how many pieces k is summed: where n and k allow, for 724 to 1,446 warps of 16 rows, a factor
// of sqrt(2) about 1,024, enough for a large GPU; at least 128 k's each. From the matrix alone,
// never from the device or the batch: it decides the bits of the result.
static int matrix_slices(int n, int k) {
  enum { FEWEST = 724 };
  int slices = 1;
  while (slices < MAX_SLICES && ceil_div(n, TILE_ROWS) * slices < FEWEST &&
         k / TILE_K >= 8 * slices)
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
