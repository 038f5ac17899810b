// The rest of the GPU: choosing tokens where logits are in memory, loading weights, probing the
// ceilings, and the Backend: one step as launches, recorded as a CUDA graph. Included by kernels.h.

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
             c->dim * (T * sizeof(half) + sizeof(float)) + SKINNY_SHARED <=
                 (size_t)g->device->shared_bytes;
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
  while (i < g->n_graphs && (g->graphs[i].n_tokens != n_tokens || g->graphs[i].splits != splits ||
                             g->graphs[i].even != g->even))
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
    g->graphs[i].even = g->even;
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
  int which = (int)(s - e->step), T = b->n_tokens, last_pos = 0;
  bool decode = b->n_rows == b->n_tokens;
  long long keys = 0;
  for (int t = 0; t < T; t++) {
    keys += b->pos[t] + 1;
    decode = decode && b->id[t] < 0;
    last_pos = b->pos[t] > last_pos ? b->pos[t] : last_pos;
  }
  g->even = (last_pos + 1LL) * T <= 4 * keys;  // one warp would not be long after the others
  if (decode && graph_size(T) <= e->size.max_tokens) T = graph_size(T);
  int* staging =
      g->staging + which * g->staging_ints;  // free again: the step that used it was collected
  upload_tables(e, staging + (size_t)BATCH_INTS * e->size.max_tokens);
  int runs = T;
  if (!decode || !device_has_it(g, b)) runs = upload_batch(e, b, T, decode, staging);
  int blocks = runs * run_blocks(&g->qkv.kv);
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
