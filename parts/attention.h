// Attention on the GPU, over the paged cache. Included by kernels.h, which says how data lies.

// ---- Attention over the paged cache.

// A softmax in progress over part of the keys: out = sum exp2(s - max) v, unnormalised.
template <int N>
struct Softmax {
  float max, sum, out[N];
};

// exp2f without its care for results below 2^-126, which become 0: too small to matter here.
__device__ static inline float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// a += b, b's keys after a's. One chain of these, in key order, makes every split and every tiling
// agree to the bit.
template <int N>
__device__ static inline void merge(Softmax<N>* a, float max, float sum, const float* out,
                                    int stride) {
  if (max == -INFINITY) return;  // all of b's keys are masked
  float top = fmaxf(a->max, max), scale_a = exp2_fast(a->max - top), scale_b = exp2_fast(max - top);
  a->max = top;
  a->sum =
      fmaf(sum, scale_b, a->sum * scale_a);  // fmaf: the same rounding wherever this is inlined
  for (int i = 0; i < N; i++) a->out[i] = fmaf(out[i * stride], scale_b, a->out[i] * scale_a);
}

// Keys of a block's turn, of a warp's.
enum { SPLIT = 256, CHUNK = 64, ATTENTION_WARPS = 4, PAGES = CHUNK / KV_BLOCK };

// Eight numbers of the cache as they lie there: one lane's A operand, once widened.
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

// This lane's A operand for mma j of dimensions 32c .. 32c+31 of a page's keys: see k_index.
__device__ static inline uint4 load_key(const half* page, int c, int j) {
  return ((const uint4*)page)[(c * 2 + j) * WARP + threadIdx.x % WARP];
}
__device__ static inline uint4 load_key(const fp8* page, int c, int j) {
  uint4 both = ((const uint4*)page)[c * WARP + threadIdx.x % WARP];  // one load for both j
  return widen(j ? make_uint2(both.z, both.w) : make_uint2(both.x, both.y));
}

// Row r of 8 of a page's score tile is this key, row r + 8 the second after it. After transpose,
// lane t has the weights of keys 4t .. 4t+3, which v_index puts next to each other.
__device__ static inline int key_of_row(int r) {
  return r / 2 * 4 + r % 2;
}

// The scales of one lane's two keys in an fp8 page; fp16 has none.
__device__ static inline float2 load_scales(const half*, int) {
  return make_float2(1, 1);
}
__device__ static inline float2 load_scales(const fp8* page, int width) {
  const half* scales = (const half*)(page + KV_BLOCK * width) + key_of_row(threadIdx.x % WARP / 4);
  return make_float2(__half2float(scales[0]), __half2float(scales[2]));
}

// fp8: p times a scale of v is often below fp16's normal numbers, so numerator and denominator of
// the softmax are both taken this much larger. 256 x 65504 / 448 still is an fp16.
static const float FP8_GAIN = 256;

// Where a warp finds a chunk's keys and values of one slot and kv head: as kv_page and page_at say,
// with what does not change taken out of the loop. One load of the table for all its pages: lane i
// holds the block of page i % PAGES, and the warp passes it on, so ALL lanes must call keys and
// values.
template <int K, typename N>
struct Pages {
  enum { KEY_BYTES = page_bytes<N>(key_width(K)), VALUE_BYTES = page_bytes<N>(K) };
  const char *k, *v;  // of this layer's block 0 and this kv head
  const int* table;   // [max_blocks] of this slot
  int kv_heads, last_page, block;
  __device__ Pages(const QkvTarget* to, int slot, int g, int last_key) {
    size_t page = (size_t)to->kv.layer * to->kv.n_blocks * to->kv.kv_heads + g;
    k = (const char*)to->kv.k + page * KEY_BYTES;
    v = (const char*)to->kv.v + page * VALUE_BYTES;
    table = to->batch.table + (size_t)slot * to->kv.max_blocks;
    kv_heads = to->kv.kv_heads;
    last_page = last_key / KV_BLOCK;
  }
  __device__ void look_up(int key0) {  // a page beyond the last is the last: its keys are masked
    block = table[min(key0 / KV_BLOCK + (int)threadIdx.x % PAGES, last_page)];
  }
  __device__ const N* keys(int p) const {
    return (const N*)(k + (size_t)block_of(p) * (unsigned)(kv_heads * KEY_BYTES));
  }
  __device__ const N* values(int p) const {
    return (const N*)(v + (size_t)block_of(p) * (unsigned)(kv_heads * VALUE_BYTES));
  }
  __device__ unsigned block_of(int p) const {  // unsigned: one 32 x 32 -> 64 bit multiplication
    return __shfl_sync(~0u, block, p);
  }
};

// An 8 x 8 matrix of fp16, transposed: lane (g, t) gives columns 2t and 2t+1 of row g and gets rows
// 2t and 2t+1 of column g.
__device__ static inline uint32_t transpose(half2 two) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(*(uint32_t*)&two));
  return r;
}

// Scores of keys beyond each query's position become -inf. This lane has 8 scores of each of its
// two queries of a tile, columns j of s: keys 16 n and 16 n + 2 after `first`.
template <int TILES>
__device__ static inline void mask_chunk(float s[TILES][PAGES][4], const int query_pos[TILES][2],
                                         int first) {
#pragma unroll
  for (int i = 0; i < TILES * 2; i++) {
    int last = query_pos[i / 2][i % 2] - first;  // counted from `first` too
#pragma unroll
    for (int n = 0; n < PAGES * 2; n++)
      if (n / 2 * KV_BLOCK + n % 2 * 2 > last) s[i / 2][n / 2][n % 2 * 2 + i % 2] = -INFINITY;
  }
}

// A query's 64 scores, column j of s, become weights exp2(scale (score - max)); max (scaled) and
// sum over all 64.
template <bool SCALED>
__device__ static inline void softmax_chunk(float s[PAGES][4], int j, float scale,
                                            const float2* v_scale, float* max, float* sum) {
  float most = -INFINITY, all = 0;
#pragma unroll
  for (int n = 0; n < PAGES * 2; n++)  // two keys of each page
    most = fmaxf(most, s[n / 2][n % 2 * 2 + j]);
#pragma unroll
  for (int offset = 4; offset < WARP; offset *= 2)
    most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
  float base = most == -INFINITY ? 0 : most * scale;
#pragma unroll
  for (int n = 0; n < PAGES * 2; n++) {
    float* score = &s[n / 2][n % 2 * 2 + j];
    *score = exp2_fast(fmaf(*score, scale, -base));
    all += *score;
    if (SCALED) *score *= FP8_GAIN * (n % 2 ? v_scale[n / 2].y : v_scale[n / 2].x);
  }
  if (SCALED) all *= FP8_GAIN;
#pragma unroll
  for (int offset = 4; offset < WARP; offset *= 2) all += __shfl_xor_sync(~0u, all, offset);
  *max = most * scale;
  *sum = all;
}

// Blocks of attention_kernel for which an SM has registers, at least (__launch_bounds__ sees to
// it). Turing's 64 KB of shared memory may hold fewer.
__host__ __device__ constexpr int attention_blocks(int head_dim) {
  return head_dim <= 64 ? 4 : 2;
}

template <int K, typename N>
__device__ static inline void load_values(const Pages<K, N>* pages,
                                          typename Eight<N>::type v[PAGES][K / 16],
                                          float2 v_scale[PAGES]) {
#pragma unroll
  for (int p = 0; p < PAGES; p++) {
    const N* from = pages->values(p);
    for (int c = 0; c < K / 16; c++)
      v[p][c] = ((const typename Eight<N>::type*)from)[c * WARP + threadIdx.x % WARP];
    v_scale[p] = load_scales(from, K);
  }
}

// scores^T[keys, queries] of a chunk: s = k . q^T.
template <int K, typename N, int TILES>
__device__ static inline void multiply_keys(float s[TILES][PAGES][4], const N* const page[PAGES],
                                            const float2 k_scale[PAGES],
                                            const uint4 q[TILES][key_width(K) / 32]) {
#pragma unroll
  for (int c = 0; c < key_width(K) / 16; c++)
#pragma unroll
    for (int p = 0; p < PAGES; p++) {  // innermost: an mma need not wait for the one before it
      uint4 a = load_key(page[p], c / 2, c % 2);
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        uint4 b = q[i][c / 2];
        mma(s[i][p], a, c % 2 ? b.z : b.x, c % 2 ? b.w : b.y);
      }
    }
#pragma unroll
  for (int i = 0; i < TILES * PAGES * 4 && sizeof(N) == 1; i++)
    s[i / 4 / PAGES][i / 4 % PAGES][i % 4] *=
        i % 4 / 2 ? k_scale[i / 4 % PAGES].y : k_scale[i / 4 % PAGES].x;
}

// softmax_chunk for all of a lane's queries.
template <int K, typename N, int TILES>
__device__ static inline void soften(float s[TILES][PAGES][4], const float2* v_scale,
                                     float max[TILES][2], float sum[TILES][2]) {
  const float scale = 1.44269504f * rsqrtf((float)K);  // scores in powers of two
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int j = 0; j < 2; j++)
      softmax_chunk<sizeof(N) == 1>(s[i], j, scale, v_scale, &max[i][j], &sum[i][j]);
}

// The B operand for a page's values: p^T of its rows 0 to 7 and 8 to 15.
template <int TILES>
__device__ static inline void transpose_weights(uint32_t weight[TILES][2],
                                                const float s[TILES][PAGES][4], int p) {
#pragma unroll
  for (int i = 0; i < TILES; i++)
    for (int h = 0; h < 2; h++)
      weight[i][h] = transpose(__floats2half2_rn(s[i][p][h * 2], s[i][p][h * 2 + 1]));
}

// One warp: TILES x 8 queries against 64 keys from key0. Both products are transposed:
// scores^T[keys, queries] = k . q^T and out^T[K, queries] = v^T . p^T. The cache's numbers are the
// 16 rows of an mma, loaded as they lie in the pages; queries are its 8 columns. A decode step has
// only as many queries as heads share a kv head: they would leave most of 16 rows empty. A lane has
// two queries of each tile and two keys of each page.
template <int K, typename N, int TILES>
__device__ static void attend_chunk(const Pages<K, N>* pages, int key0,
                                    const int query_pos[TILES][2],
                                    const uint4 q[TILES][key_width(K) / 32], float max[TILES][2],
                                    float sum[TILES][2], float out[TILES][K / 16][4]) {
  // Keys and values together need more registers than keys, then values; with fp8 they pay where
  // two blocks share an SM, though a third would fit otherwise (llama-3-8b, batch 64, context
  // 4,096: 9,951 -> 9,321 us).
  constexpr bool EARLY = sizeof(N) == 1 && TILES == 1 && attention_blocks(K) == 2;
  int first = key0 + key_of_row(threadIdx.x % WARP / 4);
  float s[TILES][PAGES][4] = {};
  float2 k_scale[PAGES], v_scale[PAGES];
  typename Eight<N>::type v[PAGES][K / 16];
  const N* page[PAGES];
#pragma unroll
  for (int p = 0; p < PAGES; p++) {
    page[p] = pages->keys(p);
    k_scale[p] = load_scales(page[p], key_width(K));
  }
  if constexpr (EARLY) load_values<K>(pages, v, v_scale);
  multiply_keys<K, N, TILES>(s, page, k_scale, q);
  if constexpr (!EARLY) load_values<K>(pages, v, v_scale);
  mask_chunk<TILES>(s, query_pos, first);
  soften<K, N, TILES>(s, v_scale, max, sum);
#pragma unroll
  for (int p = 0; p < PAGES; p++) {
    uint32_t weight[TILES][2];
    transpose_weights<TILES>(weight, s, p);
#pragma unroll
    for (int c = 0; c < K / 16; c++) {
      uint4 a = widen(v[p][c]);
#pragma unroll
      for (int i = 0; i < TILES; i++) mma(out[i][c], a, weight[i][0], weight[i][1]);
    }
  }
}

// What is in the cache already can come to L2 while the kernels before still run.
template <int K, typename N>
__device__ static inline void prefetch_chunk(const Pages<K, N>* pages, int key0) {
  int lane = threadIdx.x % WARP, p = lane / 2 % PAGES;
  const N *k = pages->keys(p), *v = pages->values(p);
  bool value = lane % 2;
  if (lane < 2 * PAGES && key0 / KV_BLOCK + p <= pages->last_page)
    prefetch(value ? v : k, value ? Pages<K, N>::VALUE_BYTES : Pages<K, N>::KEY_BYTES);
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

// One lane's B operands, of query lane / 4 of each tile, and the positions of its two columns (-1:
// no such query). Query i is head i % heads of token i / heads; q: the first one's.
template <int K, int TILES>
__device__ static inline void load_queries(uint4 fragment[TILES][key_width(K) / 32],
                                           int query_pos[TILES][2], const half* q, int all_heads,
                                           int heads, int queries, int pos0) {
  int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    int mine = lane / 4 + i * 8, token = mine < queries ? mine / heads : 0;
    const half* from = q + ((size_t)token * all_heads + mine % heads) * key_width(K) + lane % 4 * 8;
    for (int c = 0; c < key_width(K) / 32; c++) fragment[i][c] = *(const uint4*)(from + c * 32);
    for (int j = 0; j < 2; j++) {
      int column = i * 8 + lane % 4 * 2 + j;
      query_pos[i][j] = column < queries ? pos0 + column / heads : -1;
    }
  }
}

// What a block (or warp) of attention has to do: some of the heads of a run that share a kv head.
typedef struct {
  int first, length, slot, pos0;  // the run: first token, tokens, slot, first position
  int g, head0, heads, rows;      // kv head; first head, heads; queries
  int last_key;
} RunPart;

// y: which kv head, and which of its heads if they are more than ROWS.
template <int ROWS>
__device__ static inline RunPart find_part(const DeviceKV* kv, int4 r, int y) {
  int group = kv->heads / kv->kv_heads, parts = (group + ROWS - 1) / ROWS;
  int g = y / parts, head0 = g * group + y % parts * ROWS;
  int heads = min(ROWS, (g + 1) * group - head0);
  return {r.x, r.y, r.z, r.w, g, head0, heads, heads * r.y, r.w + r.y - 1};
}

// The partial result of one split of one row: SHARE threads hold N outputs each.
template <int N, int SHARE>
__device__ static inline void store_partial(float* to, const Softmax<N>* s, int lane0) {
  if (lane0 == 0) {
    to[0] = s->max;
    to[1] = s->sum;
  }
  for (int i = 0; i < N; i++) to[2 + lane0 + i * SHARE] = s->out[i];
}

// Whether this block is the last of the `of` that share a run's splits. All store their results
// before they call this; the last may read them, and leaves the counter at 0 for the next layer.
__device__ static inline bool last_to_arrive(int* arrived, int of) {
  __shared__ bool last;
  __threadfence();  // what this thread stored, before the count
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == of - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  if (threadIdx.x == 0) *arrived = 0;
  return true;
}

// out[T, H, K] = softmax(q . k / sqrt(K)) . v over each token's own positions. A block takes one
// run of tokens of a slot, the heads that share a kv head (at most TILES x 8 queries: heads x
// tokens), and every split of 256 keys in turn, or its share of them (gridDim.z > 1: the last block
// to finish merges all splits in order). Must read the cache of a slot once per run of its tokens.
// N: the cache's numbers. Twin: attend.
template <int K, typename N, int TILES>
__global__ void __launch_bounds__(ATTENTION_WARPS* WARP, attention_blocks(K))
    attention_kernel(half* out, QkvTarget to, Unsummed qkv, float* partial, int* arrived,
                     int most_splits, int out_group) {
  // After the products each thread owns OWN outputs of one query (row), SHARE apart.
  constexpr int KD = key_width(K), ROWS = TILES * 8, SHARE = ATTENTION_WARPS * WARP / ROWS,
                OWN = K / SHARE, MINE = TILE_ROWS * (K + 2);
  __shared__ float chunk_out[ATTENTION_WARPS][ROWS][K + 4];  // + 4: written without bank conflicts
  __shared__ float chunk_max[ATTENTION_WARPS][ROWS], chunk_sum[ATTENTION_WARPS][ROWS];
  __shared__ half q_shared[sizeof(N) == 1 ? 1 : ROWS * KD];
  const bool shared = gridDim.z > 1;
  const DeviceKV kv = to.kv;
  const RunPart w = find_part<ROWS>(&kv, to.batch.run[blockIdx.x], blockIdx.y);
  const int slot = w.slot, rows = w.rows, last_key = w.last_key, n_splits = last_key / SPLIT + 1;
  int split = n_splits * blockIdx.z / gridDim.z, end = n_splits * (blockIdx.z + 1) / gridDim.z;
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, query_pos[TILES][2];
  int key0 = split * SPLIT + warp * CHUNK;
  Pages<K, N> pages(&to, max(slot, 0), w.g, max(last_key, 0));
  pages.look_up(key0);
  if (slot >= 0 && split < end) prefetch_chunk(&pages, key0);
  wait_for_previous();
  if (slot < 0 || split >= end) return;
  const half* q = to.q + ((size_t)w.first * kv.heads + w.head0) * KD;
  if (sizeof(N) > 1 && qkv.parts > 0) {  // fp8: rope_fp8_kernel has done it
    q = q_shared;  // which store_qkv will meet where it looks for this token and head:
    to.q = q_shared - ((size_t)w.first * kv.heads + w.head0) * KD;
    rotate_and_store<K>(&to, qkv, w.first, w.head0, w.heads, w.g, end == n_splits);
  }
  uint4 fragment[TILES][KD / 32];
  int row = threadIdx.x / SHARE, lane0 = threadIdx.x % SHARE;
  int pair = blockIdx.x * gridDim.y + blockIdx.y;
  partial += (size_t)pair * most_splits * MINE + row * (K + 2);
  Softmax<OWN> total = {-INFINITY, 0, {}};
  for (; split < end; split++) {
    float max[TILES][2], sum[TILES][2], o[TILES][K / 16][4] = {};
    for (int i = 0; i < TILES * 2; i++) {
      max[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0;
    }
    load_queries<K, TILES>(fragment, query_pos, q, kv.heads, w.heads, rows, w.pos0);
    if (key0 <= last_key) attend_chunk<K, N, TILES>(&pages, key0, query_pos, fragment, max, sum, o);
    key0 += SPLIT;
    pages.look_up(key0);
    __syncthreads();  // the previous split's results have been read
#pragma unroll
    for (int i = 0; i < TILES * 2; i++) {
      int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
      chunk_max[warp][column] = max[i / 2][i % 2];
      chunk_sum[warp][column] = sum[i / 2][i % 2];
      for (int e = 0; e < K / 8; e++)
        chunk_out[warp][column][e * 8 + lane / 4] = o[i / 2][e / 2][e % 2 * 2 + i % 2];
    }
    __syncthreads();
    if (row >= rows) continue;
    Softmax<OWN> s = {-INFINITY, 0, {}};
    for (int c = 0; c < ATTENTION_WARPS; c++)
      merge(&s, chunk_max[c][row], chunk_sum[c][row], &chunk_out[c][row][lane0], SHARE);
    if (shared) {
      store_partial<OWN, SHARE>(partial + split * MINE, &s, lane0);
    } else {
      merge(&total, s.max, s.sum, s.out, 1);
    }
  }
  if (shared) {
    int shares = min(n_splits, (int)gridDim.z);  // blocks that have a split
    if (!last_to_arrive(&arrived[pair], shares)) return;
    for (int s = 0; s < n_splits && row < rows; s++) {
      const float* from = partial + s * MINE;
      float o[OWN];
      for (int i = 0; i < OWN; i++) o[i] = __ldcg(from + 2 + lane0 + i * SHARE);
      merge(&total, __ldcg(from), __ldcg(from + 1), o, 1);
    }
  }
  if (row >= rows) return;
  int token = w.first + row / w.heads, head = w.head0 + row % w.heads;
  float scale = 1 / total.sum;
  for (int i = 0; i < OWN; i++)
    out[activation_index(token, head * K + lane0 + i * SHARE, kv.heads * K, out_group)] =
        __float2half(total.out[i] * scale);
}

// ---- The same where there are many runs, as in a prompt: a warp takes a run by itself. Runs of
// one prompt read the same keys from 0 on, so a block's warps share them in the L1 cache, which a
// block per run would read once more from L2 for each run.

enum { RUN_WARPS = 4 };  // of a block, each with a run of its own

// Warps for which an SM has registers. Turing's 64 KB of shared memory may hold fewer.
__host__ __device__ constexpr int warps_at_once(int head_dim) {
  return head_dim <= 64 ? 12 : 8;
}

// A softmax as attend_chunk leaves it: a lane has two columns of each tile, and of each the
// dimensions c * 16 + lane / 4 (out[.][c][0 and 1]) and 8 more than that (2 and 3).
template <int K, int TILES>
struct LaneSoftmax {
  float max[TILES][2], sum[TILES][2], out[TILES][K / 16][4];
};

// What merge scales a and b with, without its branch: 1 and -0 leave a as it is, to the sign of a
// zero, since all of a masked b is +0 (values are finite).
struct Scales {
  float a[2], b[2];  // of a lane's two columns
};
__device__ static inline Scales merge_scales(float max[2], float sum[2], const float b_max[2],
                                             const float b_sum[2]) {
  Scales s;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float top = fmaxf(max[j], b_max[j]);
    bool none = b_max[j] == -INFINITY;
    s.a[j] = none ? 1 : exp2_fast(max[j] - top);
    s.b[j] = none ? -0.0f : exp2_fast(b_max[j] - top);
    max[j] = top;
    sum[j] = fmaf(b_sum[j], s.b[j], sum[j] * s.a[j]);
  }
  return s;
}

// What a block keeps in shared memory because it is seldom needed and would cost registers. A
// thread's 4 numbers lie next to those of the next thread: no bank conflicts.
template <int K, int TILES>
struct Kept {
  float4 total[TILES][K / 16][RUN_WARPS * WARP];  // of a LaneSoftmax: out,
  float4 state[TILES][RUN_WARPS * WARP];          // max of both columns, sum of both
  int query_pos[TILES][2][RUN_WARPS * WARP];
  RunPart part[RUN_WARPS];
};

// attend_chunk, its result merged into `split` as it comes: 16 dimensions at a time, whose values
// and outputs are all that need registers at once. Looks up the pages of the next chunk.
template <int K, typename N, int TILES>
__device__ static inline void attend_and_merge(LaneSoftmax<K, TILES>* split, Pages<K, N>* pages,
                                               const Kept<K, TILES>* kept, int key0,
                                               const int* tables, int max_blocks,
                                               const uint4 q[TILES][key_width(K) / 32]) {
  typedef typename Eight<N>::type Values;
  int first = key0 + key_of_row(threadIdx.x % WARP / 4);
  float s[TILES][PAGES][4] = {}, max[TILES][2], sum[TILES][2];
  float2 k_scale[PAGES], v_scale[PAGES];
  const N* page[PAGES];
#pragma unroll
  for (int p = 0; p < PAGES; p++) {
    page[p] = pages->keys(p);
    k_scale[p] = load_scales(page[p], key_width(K));
  }
  multiply_keys<K, N, TILES>(s, page, k_scale, q);
#pragma unroll
  for (int p = 0; p < PAGES; p++) v_scale[p] = load_scales(pages->values(p), K);
  const volatile RunPart* part = &kept->part[threadIdx.x / WARP];  // registers are for other things
  if (key0 + CHUNK > part->pos0 + 1) {                             // not all queries see all keys
    int query_pos[TILES][2];
    for (int i = 0; i < TILES * 2; i++)
      query_pos[i / 2][i % 2] = kept->query_pos[i / 2][i % 2][threadIdx.x];
    mask_chunk<TILES>(s, query_pos, first);
  }
  soften<K, N, TILES>(s, v_scale, max, sum);
#pragma unroll
  for (int p = 0; p < PAGES; p++) page[p] = pages->values(p);
  pages->table = tables + part->slot * max_blocks;
  pages->last_page = part->last_key / KV_BLOCK;
  pages->look_up(key0 + CHUNK);
  uint32_t weight[PAGES][TILES][2];
  Scales scales[TILES];
#pragma unroll
  for (int p = 0; p < PAGES; p++) transpose_weights<TILES>(weight[p], s, p);
#pragma unroll
  for (int i = 0; i < TILES; i++)
    scales[i] = merge_scales(split->max[i], split->sum[i], max[i], sum[i]);
#pragma unroll
  for (int i = 0; i < TILES; i++)
    for (int e = 0; e < K / 4; e++) split->out[i][e / 4][e % 4] *= scales[i].a[e % 2];
#pragma unroll
  for (int c = 0; c < K / 16; c++) {
    float o[TILES][4] = {};
#pragma unroll
    for (int p = 0; p < PAGES; p++) {
      uint4 a = widen(((const Values*)page[p])[c * WARP + threadIdx.x % WARP]);
#pragma unroll
      for (int i = 0; i < TILES; i++) mma(o[i], a, weight[p][i][0], weight[p][i][1]);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++)
      for (int e = 0; e < 4; e++)
        split->out[i][c][e] = fmaf(o[i][e], scales[i].b[e % 2], split->out[i][c][e]);
  }
}

// total += split, whose keys come after it.
template <int K, int TILES>
__device__ static inline void merge_split(Kept<K, TILES>* kept,
                                          const LaneSoftmax<K, TILES>* split) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    float4* state = &kept->state[i][threadIdx.x];
    float max[2] = {state->x, state->y}, sum[2] = {state->z, state->w};
    Scales scales = merge_scales(max, sum, split->max[i], split->sum[i]);
    *state = make_float4(max[0], max[1], sum[0], sum[1]);
#pragma unroll
    for (int c = 0; c < K / 16; c++) {
      float4* total = &kept->total[i][c][threadIdx.x];
      const float* out = split->out[i][c];
      *total = make_float4(fmaf(out[0], scales.b[0], total->x * scales.a[0]),
                           fmaf(out[1], scales.b[1], total->y * scales.a[1]),
                           fmaf(out[2], scales.b[0], total->z * scales.a[0]),
                           fmaf(out[3], scales.b[1], total->w * scales.a[1]));
    }
  }
}

// Writes a warp's results. Lanes g and g ^ 1 (lane = 4 g + t) have neighbouring dimensions: each
// gives the other one of its two of every 16, so that both write pairs.
template <int K, int TILES>
__device__ static inline void store_results(half* out, const Kept<K, TILES>* kept, int all_heads,
                                            int group) {
  int lane = threadIdx.x % WARP, upper = lane / 4 % 2,
      step = activation_index(0, 32, all_heads * K, group),
      half_step = activation_index(0, 16, all_heads * K, group);  // from a dimension to a later one
  const RunPart r = kept->part[threadIdx.x / WARP];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    float4 state = kept->state[i][threadIdx.x];
    for (int j = 0; j < 2; j++) {
      int row = i * 8 + lane % 4 * 2 + j;
      int token = r.first + row / r.heads, head = r.head0 + row % r.heads;
      half* to = out + activation_index(token, upper * 8 + lane / 8 * 2, all_heads * K, group);
      float scale = 1 / (j ? state.w : state.z);
#pragma unroll
      for (int c = 0; c < K / 16; c++) {
        float4 o = kept->total[i][c][threadIdx.x];
        half2 two = __floats2half2_rn((j ? o.y : o.x) * scale, (j ? o.w : o.z) * scale);
        half2 other = __shfl_xor_sync(~0u, two, 4);
        two = upper ? __highs2half2(other, two) : __lows2half2(two, other);
        unsigned sixteen = head * (K / 16) + c;
        if (row < r.rows) *(half2*)(to + (sixteen / 2 * step + sixteen % 2 * half_step)) = two;
      }
    }
  }
}

// Nothing merged yet.
template <int K, int TILES>
__device__ static inline void clear(LaneSoftmax<K, TILES>* s) {
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    for (int j = 0; j < 2; j++) {
      s->max[i][j] = -INFINITY;
      s->sum[i][j] = 0;
    }
    for (int e = 0; e < K / 4; e++) s->out[i][e / 4][e % 4] = 0;
  }
}

// out[T, H, K] as attention_kernel computes it, to the bit: the same chunks are merged in the same
// order. A warp takes one run, the heads that share a kv head (at most TILES x 8 queries), and
// every key of theirs; a block's warps take neighbours in the list. Must read the cache of a slot
// once per RUN_WARPS runs of its tokens. The last runs of a prompt have most keys, so they go
// first: short ones fill the SMs at the end. (Decode steps beside a prompt come last.) Twin:
// attend.
template <int K, typename N, int TILES>
__global__ void __launch_bounds__(RUN_WARPS* WARP, warps_at_once(K) / RUN_WARPS)
    attention_runs_kernel(half* out, QkvTarget to, int runs, int out_group) {
  __shared__ Kept<K, TILES> memory;
  Kept<K, TILES>* kept = &memory;
  int mine = (gridDim.x - 1 - blockIdx.x) * RUN_WARPS + threadIdx.x / WARP;
  RunPart r = find_part<TILES * 8>(&to.kv, to.batch.run[min(mine, runs - 1)], blockIdx.y);
  if (mine >= runs || r.slot < 0) {  // nothing to do
    r.last_key = -1;
    r.rows = 0;
  }
  Pages<K, N> pages(&to, max(r.slot, 0), r.g, max(r.last_key, 0));
  pages.look_up(0);
  if (r.rows > 0) prefetch_chunk(&pages, 0);
  kept->part[threadIdx.x / WARP] = r;
  wait_for_previous();
  r = kept->part[threadIdx.x / WARP];
  int query_pos[TILES][2];
  uint4 q[TILES][key_width(K) / 32];
  LaneSoftmax<K, TILES> split;
  load_queries<K, TILES>(q, query_pos,
                         to.q + ((size_t)r.first * to.kv.heads + r.head0) * key_width(K),
                         to.kv.heads, r.heads, r.rows, r.pos0);
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    for (int j = 0; j < 2; j++) kept->query_pos[i][j][threadIdx.x] = query_pos[i][j];
    for (int c = 0; c < K / 16; c++) kept->total[i][c][threadIdx.x] = make_float4(0, 0, 0, 0);
    kept->state[i][threadIdx.x] = make_float4(-INFINITY, -INFINITY, 0, 0);
  }
  for (int key0 = 0; key0 <= r.last_key;) {
    clear(&split);
    do {
      attend_and_merge<K, N, TILES>(&split, &pages, kept, key0, to.batch.table, to.kv.max_blocks,
                                    q);
      key0 += CHUNK;
    } while (key0 % SPLIT != 0 && key0 <= r.last_key);
    merge_split(kept, &split);
  }
  __syncwarp();
  store_results(out, kept, to.kv.heads, out_group);
}

// Blocks that a run needs: each takes one kv head, and at most 16 of the heads that share it.
static int run_blocks(const DeviceKV* kv) {
  return kv->kv_heads * ceil_div(kv->heads / kv->kv_heads, TILE_ROWS);
}

// Blocks among which attention shares the splits of a run. The fewest that let the GPU be done in
// the fewest turns: what they leave is written, and read by the last of them.
static int attention_shares(const Device* d, const QkvTarget* to, int runs, int splits) {
  int blocks = runs * run_blocks(&to->kv);
  int at_once = d->sms * attention_blocks(to->head_dim), best = 1, best_turns = INT_MAX;
  for (int z = 1; z <= splits; z++) {
    int turns = ceil_div(blocks * z, at_once) * ceil_div(splits, z);
    if (turns >= best_turns) continue;
    best = z;
    best_turns = turns;
  }
  return best;
}

// Whether a warp per run and kv head fills the GPU's registers, so that none needs help. Runs of
// one token are a decode step's, which have no keys in common (or a prompt's with over 8 heads a kv
// head): only if they fill them twice.
static bool run_per_warp(const Device* d, const QkvTarget* to, int n_tokens, int runs) {
  int at_once = d->sms * warps_at_once(to->head_dim);
  return runs * run_blocks(&to->kv) >= (runs < n_tokens ? at_once : 2 * at_once);
}

template <int K>
static void launch_attention(const Gpu* g, int n_tokens, int runs, int splits, QkvTarget to,
                             Unsummed qkv) {
  bool small = runs == n_tokens && to.kv.heads <= 8 * to.kv.kv_heads;  // at most 8 queries a run
  if (g->even && qkv.parts == 0 && run_per_warp(g->device, &to, n_tokens, runs)) {
    auto kernel = g->fp8_kv
                      ? small ? attention_runs_kernel<K, fp8, 1> : attention_runs_kernel<K, fp8, 2>
                  : small ? attention_runs_kernel<K, half, 1>
                          : attention_runs_kernel<K, half, 2>;
    launch(g, kernel, dim3(ceil_div(runs, RUN_WARPS), run_blocks(&to.kv)), RUN_WARPS * WARP, 0,
           g->att, to, runs, activation_group(g, n_tokens));
    return;
  }
  int shares = attention_shares(g->device, &to, runs, splits);
  auto kernel = g->fp8_kv ? small ? attention_kernel<K, fp8, 1> : attention_kernel<K, fp8, 2>
                : small ? attention_kernel<K, half, 1>
                          : attention_kernel<K, half, 2>;
  launch(g, kernel, dim3(runs, run_blocks(&to.kv), shares), ATTENTION_WARPS * WARP, 0, g->att, to,
         qkv, g->partial, g->arrived, splits, activation_group(g, n_tokens));
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
