// Attention on the GPU, over the paged cache. Included by kernels.h, which says how data lies.

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
