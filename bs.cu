// clang-format off
// bs: how does batch size trade memory and latency for throughput when an LLM generates text, and
// which batch size should I run?
//
//   nvcc -O3 -std=c++17 -o bs bs.cu         both devices; the Makefile has the flags that matter
//   cc -x c -std=c11 -O3 -o bs-cpu bs.cu    the CPU alone; the same file
//   ./bs                                    measures batch 1, 2, 4, ... and writes plots/
//
// The map, top to bottom:
//   rows, Backend       what a run measures and decides; a device is a struct of functions
//   platform, ceilings  memory by purpose; how fast this device can read and multiply
//   requests, KV cache  what a client wants; blocks of 16 tokens and who holds them
//   engine              a model on a device, with steps in flight
//   roofline            the work of a step, counted
//   scheduler, loop     who runs in the next step; plan, submit, collect
//   CPU backend         submit = forward_cpu
//   kernels             fragments, norm, RoPE, the ladder of matrix kernels, attention, sampling
//   GPU backend         one step as launches, recorded as a CUDA graph
//   weights             from a checkpoint to what the device wants
//   metrics, knee       percentiles; the walk that finds the working point
//   files, table        sweep.csv, config.json, what is printed
//   options             one table for parser and --help
//   sweep               one row per batch size
//   plots               drawn by us, encoded by stb_image_write
//   commands, main
//
// It refuses what it cannot do right: see README.md. "Article 1" and "article 2" are the two that
// NOTES.md names.
// clang-format on
#include "model.h"
#include <signal.h>
#include <time.h>
#include <ctype.h>
#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif
#define STB_IMAGE_WRITE_IMPLEMENTATION
#define STBI_WRITE_NO_STDIO
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#include <stb_image_write.h>
#pragma GCC diagnostic pop

typedef struct {
  double p50, p95, p99;
  int n;
} Percentiles;  // n samples behind them; NaN where n is 0
typedef enum { ROW_OK, ROW_SKIPPED, ROW_OOM } RowStatus;
typedef enum { BOUND_WEIGHTS, BOUND_KV, BOUND_COMPUTE, BOUND_OVERHEAD } Bound;

typedef struct {  // one line of sweep.csv; NaN (or 0 for ints) = undefined, written as an empty
                  // cell
  int batch, input_len, output_len, repeats;
  RowStatus status;
  char reason[160];  // why it was skipped, e.g. "KV needs 9.1 GiB, 6.2 GiB left"
  double output_tok_s, user_tok_s, prefill_tok_s;
  Percentiles ttft, tpot, itl, e2e;  // ms
  int n_requests;
  double step_us;     // mean decode step, measured
  double roof_us;     // the same steps at the probed roofline
  double noreuse_us;  // the roofline if every sequence re-read the weights (batching without reuse)
  double roof_pct, mbu_pct, mfu_pct;
  double step_bytes, step_flops;  // per decode step, counted
  Bound bound;
  double mem_weights_mib, mem_kv_mib, mem_work_mib, mem_other_mib, mem_used_mib, mem_limit_mib;
} SweepRow;

typedef enum { STOP_MEMORY, STOP_SLO, STOP_JUMP, STOP_PLATEAU, STOP_END } StopRule;
typedef struct {
  double slo_ttft_ms, slo_tpot_ms;  // 0 = none
  int percentile;                   // 50, 95 or 99
  double min_gain_pct;              // 10
  double watermark_pct;             // 90: share of mem_limit that may be used
} KneeRules;
typedef struct {
  int working, start;  // row indices; -1 = none
  int second_opinion;  // row index of the largest efficient batch; -1 = none
  StopRule rule;
  char why[200];  // one sentence for a person, e.g. "batch 128 would break the TPOT SLO: P95 31.0
                  // ms > 25.0 ms"
} Knee;

typedef struct {  // everything a plot needs
  const SweepRow* rows;
  int n_rows;
  Knee knee;
  KneeRules rules;
  const char *model, *device;  // "llama-3.2-1b", "NVIDIA H200"
  bool simulated;
  double bandwidth, rate;  // probed ceilings: bytes/s, FLOP/s; 0 = unknown
} SweepReport;

// Three of the four parts of memory; the fourth is the rest.
typedef enum { MEM_WEIGHTS, MEM_KV, MEM_WORK, N_MEM } MemTag;
typedef struct Device Device;
typedef struct Engine Engine;
typedef struct Step Step;

// What a device must offer. cpu_backend always exists, cuda_backend in the nvcc build; only the
// choice of defaults asks which one it is.
typedef struct {
  bool (*open)(Device* d, char* err);          // fills in name and total
  double (*probe_bandwidth)(const Device* d);  // bytes/s
  double (*probe_rate)(const Device* d);       // FLOP/s
  size_t (*used)(void);                        // bytes in use, as the device reports it
  void* (*alloc)(size_t bytes);                // zeroed, or NULL
  void (*free)(void* p);
  void (*upload)(void* to, const void* from, size_t bytes);
  int row_multiple;             // rows of a matrix are padded to this
  int key_multiple;             // K of a cached key is padded to this
  int kv_size;                  // bytes of a number in the cache
  int (*slices)(int n, int k);  // see Matrix; NULL = never
  bool (*fill)(Matrix* m, const Tensor* from, RowMap map, bool packed);
  bool (*engine_open)(Engine* e);  // working memory; false when it does not fit
  void (*engine_close)(Engine* e);
  void (*submit)(Engine* e, const Batch* b, Step* s);
  void (*collect)(Engine* e, Step* s);
  void (*logits)(Engine* e, int rows,
                 float* out);  // [R, V] of the last step: for tests and the curious
} Backend;
// ---- Platform shim: a device, its memory by purpose (article 1, section 2) and its ceilings.

typedef struct {
  void* p;
  size_t bytes;
  MemTag tag;
} Allocation;

struct Device {
  const Backend* api;
  char name[256];
  size_t total;            // bytes on the device
  size_t limit;            // bytes we may use: total, or --vram
  double bandwidth, rate;  // probed ceilings: bytes/s read, FLOP/s multiplied
  Allocation* list;        // ours, not yet freed
  int n_list, cap_list;
  size_t tagged[N_MEM];   // bytes, by tag
  bool refused;           // an allocation failed although the budget allowed it
  long fail_after;        // tests: the allocation after this many fails; -1 = none does
  int sms;                // CUDA: multiprocessors
  int shared_bytes;       // CUDA: shared memory a block may have
  bool dependent_launch;  // CUDA: compiled for and running on 9.0 or later
};

static volatile sig_atomic_t interrupted;  // by Ctrl-C: finish the step, keep what was measured

static double now(void) {  // seconds, monotonic
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// One line and exit status 1: for what cannot be repaired and nobody asked for.
static void die(const char* format, ...) {
  va_list args;
  va_start(args, format);
  fprintf(stderr, "bs: ");
  vfprintf(stderr, format, args);
  fprintf(stderr, "\n");
  va_end(args);
  exit(1);
}

static void* xcalloc(size_t n, size_t size) {  // host memory whose size we chose; zeroed
  void* p = calloc(n ? n : 1, size);
  if (!p) die("out of host memory: %zu x %zu bytes", n, size);
  return p;
}

static size_t cpu_used(void) {  // resident bytes of this process
  FILE* f = fopen("/proc/self/statm", "r");
  size_t pages = 0;
  if (!f || fscanf(f, "%*s %zu", &pages) != 1) pages = 0;
  if (f) fclose(f);
  return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void* cpu_alloc(size_t bytes) {  // touched, so that it counts as resident from now on
  void* p = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (p) memset(p, 0, bytes);
  return p;
}

// total is what this process may come to hold: what it has, and what others leave.
static bool cpu_open(Device* d, char* err) {
  char line[256];
  size_t available = 0;
  FILE* meminfo = fopen("/proc/meminfo", "r");
  while (meminfo && fgets(line, sizeof line, meminfo))
    if (sscanf(line, "MemAvailable: %zu kB", &available) == 1) break;
  if (meminfo) fclose(meminfo);
  if (available > 0) d->total = available * 1024 + cpu_used();
  snprintf(d->name, sizeof d->name, "CPU");
  FILE* f = fopen("/proc/cpuinfo", "r");
  while (f && fgets(line, sizeof line, f)) {
    char* colon = strchr(line, ':');
    if (strncmp(line, "model name", 10) || !colon) continue;
    line[strcspn(line, "\n")] = 0;
    snprintf(d->name, sizeof d->name, "%.80s (%d threads)", colon + 2, omp_get_max_threads());
    break;
  }
  if (f) fclose(f);
  if (d->total == 0) snprintf(err, ERR_LEN, "the system does not say how much memory it has");
  return d->total > 0;
}

// Zeroed device memory, or NULL when it does not fit. A malloc that succeeds is not a fit (drivers
// spill to host memory, the CPU swaps), so the budget decides first.
static void* device_alloc(Device* d, MemTag tag, size_t bytes) {
  if (bytes > d->limit || d->api->used() > d->limit - bytes) return NULL;
  bool fails = d->fail_after >= 0 && d->fail_after-- == 0;
  void* p = fails ? NULL : d->api->alloc(bytes);
  if (!p) d->refused = true;
  if (!p) return NULL;
  if (d->n_list == d->cap_list) {
    d->cap_list = d->cap_list ? 2 * d->cap_list : 64;
    d->list = (Allocation*)realloc(d->list, d->cap_list * sizeof *d->list);
    if (!d->list) die("out of host memory");
  }
  Allocation a = {p, bytes, tag};
  d->list[d->n_list++] = a;
  d->tagged[tag] += bytes;
  return p;
}

static void device_free_all(Device* d, MemTag tag) {
  int kept = 0;
  for (int i = 0; i < d->n_list; i++) {
    if (d->list[i].tag != tag) {
      d->list[kept++] = d->list[i];
      continue;
    }
    d->api->free(d->list[i].p);
  }
  d->n_list = kept;
  d->tagged[tag] = 0;
}

// ---- Ceilings. A curve is judged against what THIS device can do, measured with our own read and
// multiply loops.

static double cpu_probe_bandwidth(const Device* d) {
  (void)d;
  size_t bytes = (size_t)512 << 20;  // many times the last-level cache
  float* p = (float*)cpu_alloc(bytes);
  if (!p) return 0;
  double best = 0;
  for (int round = 0; round < 10; round++) {
    double start = now();
    bool nonzero = false;  // never, but the compiler does not know: the loads must happen
    PARALLEL_FOR
    for (size_t chunk = 0; chunk < bytes / 8192; chunk++) {
      vec s[4] = {vec_set(0), vec_set(0), vec_set(0), vec_set(0)};
      const float* from = p + chunk * 2048;
      for (int i = 0; i < 2048; i += 4 * LANES) {
        __builtin_prefetch(from + i + 1024);
        for (int j = 0; j < 4; j++) s[j] += vec_load(from + i + j * LANES);
      }
      if (vec_sum(s[0] + s[1] + s[2] + s[3]) != 0) nonzero = true;
    }
    double rate = (double)bytes / (now() - start);
    if (!nonzero && rate > best) best = rate;
  }
  free(p);
  return best;
}

// The outer product on operands that stay in the L1 cache.
static double cpu_probe_rate(const Device* d) {
  (void)d;
  enum { ROUNDS = 60000 };  // some 15 ms
  double best = 0;
  for (int round = 0; round < 5; round++) {
    double start = now();
    int threads = omp_get_max_threads();
    PARALLEL_FOR
    for (int thread = 0; thread < threads; thread++) {
      float w[64 * PANEL] __attribute__((aligned(64))), x[TOKEN_TILE * 64], y[TOKEN_TILE * PANEL];
      for (int i = 0; i < 64 * PANEL; i++) w[i] = 0.5f;
      for (int i = 0; i < TOKEN_TILE * 64; i++) x[i] = i % 2 ? 0.25f : -0.25f;
      for (int i = 0; i < TOKEN_TILE * PANEL; i++) y[i] = 0;
      for (int i = 0; i < ROUNDS; i++) {
        outer_product(TOKEN_TILE, 64, x, 64, NULL, w, y, PANEL, false);
        __asm__ volatile("" ::"r"(w), "r"(x), "r"(y)
                         : "memory");  // as far as the compiler knows, all three changed
      }
    }
    double rate = 2.0 * TOKEN_TILE * 64 * PANEL * ROUNDS * threads / (now() - start);
    best = rate > best ? rate : best;
  }
  return best;
}

// vram: bytes we may use, 0 = all there are.
static bool device_open(Device* d, const Backend* api, size_t vram, char* err) {
  memset(d, 0, sizeof *d);
  d->api = api;
  d->fail_after = -1;
  if (!api->open(d, err)) return false;
  d->limit = vram && vram < d->total ? vram : d->total;
  d->bandwidth = api->probe_bandwidth(d);
  d->rate = api->probe_rate(d);
  return true;
}

static void device_close(Device* d) {
  for (int tag = 0; tag < N_MEM; tag++) device_free_all(d, (MemTag)tag);
  free(d->list);
  d->list = NULL;
  d->cap_list = 0;
}
// ---- Requests: what a client asks for, and where it stands.

typedef struct {
  int n_prompt, max_new;
  int n_given;   // tokens the host hands over; the rest is known on the device first
  int* tokens;   // [n_prompt + max_new] the prompt, then what was generated
  double* time;  // [max_new] when each new token was there, seconds on now()'s clock
  double arrival;
  uint32_t seed;      // of its sampling noise
  float temperature;  // 0 = greedy
  int slot;           // place in the running batch; -1 = not running
  int n_cached;       // positions whose KV is in the cache or on its way there
  int n_ordered;     // new tokens asked of the device; those not yet collected are known only there
  int n_new;         // new tokens collected
  bool done, ended;  // ended: by the model's own end token
} Request;

// ---- The KV cache in blocks of 16 tokens, a block table per slot (PagedAttention, Kwon et al.
// 2023; article 2, section 4.3). A sequence takes a block when it grows into it and returns all of
// them when it leaves: no reservation, no fragmentation.

typedef struct {
  int n_blocks, max_blocks, n_slots;  // in all; of one slot; slots
  int* free_list;                     // stack of blocks nobody holds
  int n_free;
  int* held;     // [slots] blocks of each slot
  int* table;    // [slots, max_blocks]
  bool changed;  // since the device last saw the table
} BlockTable;

static void blocks_init(BlockTable* b, int n_blocks, int max_blocks, int n_slots) {
  memset(b, 0, sizeof *b);
  b->n_blocks = b->n_free = n_blocks;
  b->max_blocks = max_blocks;
  b->n_slots = n_slots;
  b->free_list = (int*)xcalloc(n_blocks, sizeof(int));
  b->held = (int*)xcalloc(n_slots, sizeof(int));
  b->table = (int*)xcalloc((size_t)n_slots * max_blocks, sizeof(int));
  for (int i = 0; i < n_blocks; i++) b->free_list[i] = n_blocks - 1 - i;
  b->changed = true;
}

static void blocks_free(BlockTable* b) {
  free(b->free_list);
  free(b->held);
  free(b->table);
  memset(b, 0, sizeof *b);
}

// Makes room for positions 0 .. n_tokens - 1 of a slot. False (and nothing taken) when too few
// blocks are free.
static bool blocks_grow(BlockTable* b, int slot, int n_tokens) {
  int need = (n_tokens + KV_BLOCK - 1) / KV_BLOCK;
  if (need > b->max_blocks || need - b->held[slot] > b->n_free) return false;
  while (b->held[slot] < need) {
    b->table[(size_t)slot * b->max_blocks + b->held[slot]++] = b->free_list[--b->n_free];
    b->changed = true;
  }
  return true;
}

static void blocks_release(BlockTable* b, int slot) {
  while (b->held[slot] > 0)
    b->free_list[b->n_free++] = b->table[(size_t)slot * b->max_blocks + --b->held[slot]];
}

static size_t kv_bytes_per_token(const Config* c, int kv_size) {  // kv_size: bytes of one number
  return (size_t)2 * c->n_layers * c->n_kv_heads * c->head_dim * kv_size;
}

// ---- The engine: a model on a device, with a cache, and steps in flight. engine_submit queues one
// step over a flat batch and returns; engine_collect waits for the oldest step and gives its
// tokens. Only the tokens come back: the next step already finds them on the device (id -1), so the
// host can run ahead and never stands in the way.

enum { IN_FLIGHT = 4 };
static const double GIB = 1073741824.0, MIB = 1048576.0;

// Batch sizes that a recorded step exists for; a smaller batch is padded (GPU). Exact up to 8
// tokens, then coarser.
static int graph_size(int n_tokens) {
  int step = n_tokens <= 8 ? 1 : n_tokens <= 64 ? 8 : 32;
  return (n_tokens + step - 1) / step * step;
}

typedef struct {
  int max_tokens;     // in one step
  int max_slots;      // sequences at once
  int max_positions;  // of one sequence
  int n_blocks;       // KV blocks; 0 = enough for every slot at full length
} EngineSize;

struct Step {
  int n_rows;
  int* tokens;            // [R] what each row sampled
  int* slot;              // [R] for whom
  double submitted, end;  // seconds on now()'s clock
};

struct Engine {
  Device* device;
  const Weights* w;
  EngineSize size;
  BlockTable blocks;
  KVCache kv;
  uint32_t* seed;      // [slots] of the sampling noise
  float* temperature;  // [slots]
  bool sampler_changed;
  Step step[IN_FLIGHT];
  int submitted, collected;
  CpuScratch cpu;
  float* cpu_logits;  // [slots, padded V]
  int* cpu_sampled;   // [slots] the token each slot sampled last
  struct Gpu* gpu;
};

static void engine_kv_bytes(const Device* d, const Config* c, EngineSize s, size_t* k_bytes,
                            size_t* v_bytes) {
  size_t blocks = s.n_blocks ? (size_t)s.n_blocks
                             : (size_t)s.max_slots * ((s.max_positions + KV_BLOCK - 1) / KV_BLOCK);
  size_t wide =
      (c->head_dim + d->api->key_multiple - 1) / d->api->key_multiple * d->api->key_multiple;
  size_t rows = blocks * KV_BLOCK * c->n_layers * c->n_kv_heads;
  *k_bytes = rows * wide * d->api->kv_size;
  *v_bytes = rows * c->head_dim * d->api->kv_size;
}

static void engine_close(Engine* e) {
  e->device->api->engine_close(e);
  device_free_all(e->device, MEM_KV);
  device_free_all(e->device, MEM_WORK);
  blocks_free(&e->blocks);
  free(e->seed);
  free(e->temperature);
  for (int i = 0; i < IN_FLIGHT; i++) free(e->step[i].tokens);
  memset(e, 0, sizeof *e);
}

// ROW_SKIPPED when it would not fit the budget, ROW_OOM when the device refused although it should
// have fitted; err says what and by how much, and nothing stays allocated.
static RowStatus engine_open(Engine* e, Device* d, const Weights* w, EngineSize size, char* err) {
  memset(e, 0, sizeof *e);
  e->device = d;
  e->w = w;
  if (size.max_tokens < graph_size(size.max_slots)) size.max_tokens = graph_size(size.max_slots);
  e->size = size;
  d->refused = false;
  size_t k_bytes, v_bytes, used = d->api->used(), left = d->limit > used ? d->limit - used : 0;
  engine_kv_bytes(d, &w->config, size, &k_bytes, &v_bytes);
  if (k_bytes + v_bytes > left) {
    snprintf(err, ERR_LEN, "KV needs %.2f GiB, %.2f GiB left", (k_bytes + v_bytes) / GIB,
             left / GIB);
    return ROW_SKIPPED;
  }
  int max_blocks = (size.max_positions + KV_BLOCK - 1) / KV_BLOCK;
  blocks_init(&e->blocks, size.n_blocks ? size.n_blocks : size.max_slots * max_blocks, max_blocks,
              size.max_slots);
  e->seed = (uint32_t*)xcalloc(size.max_slots, sizeof *e->seed);
  e->temperature = (float*)xcalloc(size.max_slots, sizeof *e->temperature);
  for (int i = 0; i < IN_FLIGHT; i++) {
    e->step[i].tokens = (int*)xcalloc(2 * (size_t)size.max_slots, sizeof(int));
    e->step[i].slot = e->step[i].tokens + size.max_slots;
  }
  e->sampler_changed = true;
  e->kv.n_blocks = e->blocks.n_blocks;
  e->kv.max_blocks = max_blocks;
  e->kv.table = e->blocks.table;
  e->kv.k = device_alloc(d, MEM_KV, k_bytes);
  e->kv.v = device_alloc(d, MEM_KV, v_bytes);
  if (e->kv.k && e->kv.v && d->api->engine_open(e)) return ROW_OK;
  RowStatus status = d->refused ? ROW_OOM : ROW_SKIPPED;
  snprintf(err, ERR_LEN, "working memory does not fit beside %.2f GiB of KV: %.2f GiB left",
           (k_bytes + v_bytes) / GIB, left / GIB);
  if (d->refused)
    snprintf(err, ERR_LEN, "out of memory, although %.2f GiB were left for %.2f GiB of KV",
             left / GIB, (k_bytes + v_bytes) / GIB);
  engine_close(e);
  return status;
}

static void engine_set_sampler(Engine* e, int slot, uint32_t seed, float temperature) {
  e->seed[slot] = seed;
  e->temperature[slot] = temperature;
  e->sampler_changed = true;
}

static void engine_submit(Engine* e, const Batch* b) {
  Step* s = &e->step[e->submitted++ % IN_FLIGHT];
  s->n_rows = b->n_rows;
  s->submitted = now();
  for (int r = 0; r < b->n_rows; r++) s->slot[r] = b->slot[b->row[r]];
  e->device->api->submit(e, b, s);
}

// Waits for the oldest step; its tokens and times stay valid until IN_FLIGHT more are submitted.
static const Step* engine_collect(Engine* e) {
  Step* s = &e->step[e->collected++ % IN_FLIGHT];
  e->device->api->collect(e, s);
  return s;
}

// ---- Roofline: the work of a step, counted, and the time it must take on a device with these
// ceilings (Williams et al. 2009; article 2, sections 2.1 and 2.2).

typedef struct {
  double weight_bytes;  // read once however many tokens share them
  double kv_bytes;  // read for every sequence, written for every token: what batching cannot share
  double flops;
  double noreuse_bytes;  // if every token re-read the weights
} Work;

static Work count_work(const Config* c, const Batch* b, int kv_size) {
  double D = c->dim, V = c->vocab_size, att = (double)c->n_heads * c->head_dim;
  double layer = D * qkv_width(c) + att * D + 3 * D * c->hidden_dim,
         kv = (double)kv_bytes_per_token(c, kv_size);
  Work w = {0, 0, 0, 0};
  double body = 2 * c->n_layers * layer, head = b->n_rows ? 2 * V * D : 0;
  w.weight_bytes = body + head + 2.0 * b->n_tokens * D;
  w.noreuse_bytes = body * b->n_tokens + head * b->n_rows;
  w.flops =
      body * b->n_tokens + head * b->n_rows;  // 2 bytes and 2 FLOPs per weight: the same number
  for (int t = 0; t < b->n_tokens; t++) {
    bool last_of_run = t + 1 == b->n_tokens || b->slot[t + 1] != b->slot[t];
    w.kv_bytes += kv + (last_of_run ? kv * b->pos[t] : 0);
    w.flops += 4.0 * att * c->n_layers * (b->pos[t] + 1);
  }
  w.noreuse_bytes += w.kv_bytes;
  return w;
}

typedef struct {  // steps of one kind, added up
  int n, tokens;
  double seconds, roof, noreuse, weight_bytes, kv_bytes, flops;
} StepTotals;

static void add_step(StepTotals* s, const Device* d, Work w, int n_tokens, double seconds) {
  double bytes = w.weight_bytes + w.kv_bytes;
  s->n++;
  s->tokens += n_tokens;
  s->seconds += seconds;
  s->roof += fmax(bytes / d->bandwidth, w.flops / d->rate);
  s->noreuse += fmax(w.noreuse_bytes / d->bandwidth, w.flops / d->rate);
  s->weight_bytes += w.weight_bytes;
  s->kv_bytes += w.kv_bytes;
  s->flops += w.flops;
}

// ---- Scheduler: who runs in the next step. Here the fixed batch of an offline job (article 1,
// section 1): all requests start together, every prompt is read before anyone decodes, nobody
// leaves before the end.

typedef struct {
  Request* requests;
  int n;
  int step_tokens;  // most tokens in one step
  bool stop_at_eos;
} Workload;

typedef struct {
  Batch batch;
  int* owner;   // [R] which request each row belongs to
  bool decode;  // one token per sequence and no prompt
  Work work;
  double submitted;
} Planned;

static void planned_init(Planned* p, int max_tokens, int max_rows) {
  p->batch.id = (int*)xcalloc((size_t)max_tokens * 3 + max_rows, sizeof(int));
  p->batch.pos = p->batch.id + max_tokens;
  p->batch.slot = p->batch.pos + max_tokens;
  p->batch.row = p->batch.slot + max_tokens;
  p->owner = (int*)xcalloc(max_rows, sizeof(int));
}

static void planned_free(Planned* p) {
  free(p->batch.id);
  free(p->owner);
}

// The next token of request `owner`.
static void batch_add(Engine* e, Planned* p, Request* r, int owner, bool sample) {
  Batch* b = &p->batch;
  int pos = r->n_cached++;
  if (!blocks_grow(&e->blocks, r->slot, r->n_cached))
    die("the KV pool is smaller than its requests");
  b->id[b->n_tokens] = pos < r->n_given ? r->tokens[pos] : -1;
  b->pos[b->n_tokens] = pos;
  b->slot[b->n_tokens] = r->slot;
  if (sample) {
    b->row[b->n_rows] = b->n_tokens;
    p->owner[b->n_rows++] = owner;
    r->n_ordered++;
  }
  b->n_tokens++;
}

// Fills p with the next step: prompts first, in chunks; once all are read, one token of every
// sequence that still grows.
static bool plan_step(Engine* e, const Workload* w, Planned* p) {
  p->batch.n_tokens = p->batch.n_rows = 0;
  for (int i = 0; i < w->n && p->batch.n_tokens < w->step_tokens; i++) {
    Request* r = &w->requests[i];
    while (!r->done && r->n_cached < r->n_given && p->batch.n_tokens < w->step_tokens)
      batch_add(e, p, r, i, r->n_cached == r->n_given - 1);
  }
  p->decode = p->batch.n_tokens == 0;
  for (int i = 0; i < w->n && p->decode; i++) {
    Request* r = &w->requests[i];
    if (!r->done && r->n_ordered < r->max_new) batch_add(e, p, r, i, true);
  }
  return p->batch.n_tokens > 0;
}

// ---- The engine loop: plan, submit, collect. Without an end token to watch for, up to IN_FLIGHT
// steps are queued ahead.

typedef struct {
  StepTotals prefill, decode;  // of all runs since the caller zeroed them, as is busy
  double start, prefill_end, end, busy;
} RunStats;

static void collect_step(Engine* e, const Workload* w, const Planned* p, RunStats* stats,
                         double* previous_end) {
  const Config* c = &e->w->config;
  const Step* s = engine_collect(e);
  double begin = fmax(*previous_end, s->submitted);
  add_step(p->decode ? &stats->decode : &stats->prefill, e->device, p->work, p->batch.n_tokens,
           s->end - begin);
  *previous_end = stats->end = s->end;
  if (!p->decode) stats->prefill_end = s->end;
  for (int i = 0; i < s->n_rows; i++) {
    Request* r = &w->requests[p->owner[i]];
    if (r->done) continue;  // a step that was under way when the end token came
    r->time[r->n_new] = s->end;
    r->tokens[r->n_prompt + r->n_new++] = s->tokens[i];
    for (int j = 0; w->stop_at_eos && j < c->n_eos; j++) r->ended |= s->tokens[i] == c->eos[j];
    r->done = r->ended || r->n_new == r->max_new;
  }
}

// Runs all requests (at most max_slots) to their end, to the time limit (seconds, for warm-ups) or
// to Ctrl-C; false if cut short.
static bool run_requests(Engine* e, const Workload* w, double time_limit, RunStats* stats) {
  Planned planned[IN_FLIGHT];
  memset(planned, 0, sizeof planned);
  for (int i = 0; i < IN_FLIGHT; i++)
    planned_init(&planned[i], w->step_tokens > w->n ? w->step_tokens : w->n, w->n);
  stats->start = stats->end = now();
  for (int i = 0; i < w->n; i++) {
    Request* r = &w->requests[i];
    r->slot = i;
    r->arrival = stats->start;
    r->n_given = r->n_prompt;
    r->n_cached = r->n_ordered = r->n_new = 0;
    r->done = r->ended = false;
    engine_set_sampler(e, i, r->seed, r->temperature);
  }
  int submitted = 0, collected = 0, depth = w->stop_at_eos ? 1 : IN_FLIGHT;
  double previous_end = stats->start;
  bool cut = false, more = true;
  while (more || collected < submitted) {
    cut = cut || interrupted || now() - stats->start > time_limit;
    Planned* p = &planned[submitted % IN_FLIGHT];
    more = more && !cut && plan_step(e, w, p);
    if (more) {
      p->work = count_work(&e->w->config, &p->batch, e->device->api->kv_size);
      engine_submit(e, &p->batch);
      submitted++;
    }
    if (submitted - collected == depth || (!more && collected < submitted))
      collect_step(e, w, &planned[collected++ % IN_FLIGHT], stats, &previous_end);
  }
  for (int i = 0; i < w->n; i++) {
    Request* r = &w->requests[i];
    if (r->n_new > 0)
      r->time[0] =
          stats->prefill_end;  // a fixed batch answers as one, when its last prompt has been read
    blocks_release(&e->blocks, r->slot);
  }
  for (int i = 0; i < IN_FLIGHT; i++) planned_free(&planned[i]);
  stats->busy += stats->end - stats->start;
  return !cut;
}

// ---- The CPU as a device: a step is done when submit returns.

static bool cpu_fill(Matrix* m, const Tensor* from, RowMap map, bool packed) {
  (void)packed;  // there is one layout
  PARALLEL_FOR
  for (int row = 0; row < from->rows; row++)
    for (int col = 0; col < from->cols; col++)
      m->w[panel_index(map_row(map, row), col, m->k)] =
          tensor_at(from, (size_t)row * from->cols + col);
  return true;
}

static void cpu_upload(void* to, const void* from, size_t bytes) {
  memcpy(to, from, bytes);
}

static bool cpu_engine_open(Engine* e) {
  const Config* c = &e->w->config;
  size_t T = e->size.max_tokens, R = e->size.max_slots,
         wide = padded_rows(2 * c->hidden_dim > c->dim ? 2 * c->hidden_dim : c->dim);
  CpuScratch* s = &e->cpu;
  s->positions = (e->size.max_positions + KV_BLOCK - 1) / KV_BLOCK * KV_BLOCK;
  struct {
    float** p;
    size_t n;
  } parts[] = {
      {&s->x, T * c->dim},
      {&s->normed, (T > R ? T : R) * c->dim},
      {&s->qkv, T * padded_rows(qkv_width(c))},
      {&s->att, T * c->n_heads * c->head_dim},
      {&s->gate_up, T * wide},
      {&s->hidden, T * c->hidden_dim},
      {&s->scores, (size_t)omp_get_max_threads() * (c->n_heads / c->n_kv_heads) * s->positions},
      {&e->cpu_logits, R * padded_rows(c->vocab_size)},
  };
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    *parts[i].p = (float*)device_alloc(e->device, MEM_WORK, parts[i].n * sizeof(float));
    if (!*parts[i].p) return false;
  }
  e->cpu_sampled = (int*)xcalloc(R, sizeof(int));
  return true;
}

static void cpu_engine_close(Engine* e) {
  free(e->cpu_sampled);
}

static void cpu_submit(Engine* e, const Batch* b, Step* s) {
  const Config* c = &e->w->config;
  for (int t = 0; t < b->n_tokens; t++)
    if (b->id[t] < 0) b->id[t] = e->cpu_sampled[b->slot[t]];
  forward_cpu(e->w, &e->kv, b, &e->cpu, e->cpu_logits);
  PARALLEL_FOR
  for (int r = 0; r < b->n_rows; r++) {
    int slot = b->slot[b->row[r]];
    const float* logits = e->cpu_logits + (size_t)r * padded_rows(c->vocab_size);
    s->tokens[r] = sample_cpu(logits, c->vocab_size, e->temperature[slot],
                              hash32(e->seed[slot] ^ hash32(b->pos[b->row[r]])));
    e->cpu_sampled[slot] = s->tokens[r];
  }
  s->end = now();
}

static void cpu_collect(Engine* e, Step* s) {
  (void)e;
  (void)s;
}

static void cpu_copy_logits(Engine* e, int rows, float* out) {
  int vocab = e->w->config.vocab_size;
  for (int r = 0; r < rows; r++)
    memcpy(out + (size_t)r * vocab, e->cpu_logits + (size_t)r * padded_rows(vocab),
           vocab * sizeof(float));
}

// clang-format off
static const Backend cpu_backend = {
    cpu_open, cpu_probe_bandwidth, cpu_probe_rate, cpu_used, cpu_alloc, free, cpu_upload, PANEL, 1,
    sizeof(float), NULL, cpu_fill, cpu_engine_open, cpu_engine_close, cpu_submit, cpu_collect,
    cpu_copy_logits};
// clang-format on

// ---- Kernels. All data that a matrix unit multiplies lies in memory the way its registers want
// it, so that a load is one 128-bit access per lane, 512 contiguous bytes per warp, with no shared
// memory and no shuffling in between:
//
//   mma m16n8k16: D[16 rows, 8 tokens] += A[16, 16] . B[16, 8]. Lane = 4 g + t (g 0..7, t 0..3)
//   holds
// A: rows g and g + 8; B: token g; D: rows g and g + 8 of tokens 2t and 2t + 1.
//
// A sum over k may be taken in any order as long as A and B agree on it, so lane t takes the 8
// CONSECUTIVE k's 8t .. 8t+7 of every 32: two mmas' worth. For an activation row, plain row-major
// memory then already is the fragment: 16 bytes at 8t. Weights are A, packed once at load into 16 x
// 32 tiles of 1 KB; tokens are B's columns, so 1 to 8 tokens cost the same.

#ifdef __CUDACC__

enum { WARP = 32, TILE_ROWS = 16, TILE_K = 32, TILE_HALVES = TILE_ROWS * TILE_K, MAX_SLICES = 8 };

// Where element (row, col) of a [n, k] matrix lies after packing.
__host__ __device__ static inline size_t packed_index(int row, int col, int k) {
  size_t tile = (size_t)(row / TILE_ROWS) * (k / TILE_K) + col / TILE_K;
  int r = row % TILE_ROWS, c = col % TILE_K;
  int lane = (r % 8) * 4 + c / 8;
  int mma = (c % 8) / 4;                // which of the tile's two mmas
  int reg = r / 8 + 2 * ((c % 4) / 2);  // a0: row g, a1: row g + 8, a2 and a3: their next pair of k
  return tile * TILE_HALVES + mma * (TILE_HALVES / 2) + lane * 8 + reg * 2 + c % 2;
}

// V of one cache block [16 tokens, K] for p . v: lane (g, t) finds tokens 4t .. 4t+3 of dims g and
// g + 8 in 16 bytes.
__device__ static inline int v_index(int token, int dim) {
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

typedef struct {               // the step's token list on the device
  int *id, *pos, *slot, *row;  // as in Batch
  int4* run;   // [runs] attention: first token, number of tokens, slot, first position
  int* table;  // [slots, max_blocks]
} DeviceBatch;

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
__device__ static inline uint2 norm4(float4 x, float scale, float4 w) {
  half2 lo = __floats2half2_rn(x.x * scale * w.x, x.y * scale * w.y),
        hi = __floats2half2_rn(x.z * scale * w.z, x.w * scale * w.w);
  return make_uint2(*(uint32_t*)&lo, *(uint32_t*)&hi);
}

typedef struct {  // a linear layer's result whose k slices may still be apart: [slices, T, n], see
                  // "Linear layers"
  const float* y;
  int slices;     // 0 = there is no such result
  size_t stride;  // floats from one slice to the next
} Unsummed;

// Element i (of type V) of the result: the slices added in index order, all loads first.
template <typename V>
__device__ static inline V sum_slices(Unsummed u, size_t i) {
  V part[MAX_SLICES], sum = ((const V*)u.y)[i];
#pragma unroll
  for (int s = 1; s < MAX_SLICES; s++)
    if (s < u.slices) part[s] = ((const V*)(u.y + s * u.stride))[i];
#pragma unroll
  for (int s = 1; s < MAX_SLICES; s++)
    if (s < u.slices) sum = add(sum, part[s]);
  return sum;
}

// x[T, D] += the slices of a linear layer's result, in order; normed[R, D] = RMSNorm(x) * weight,
// as fp16. One block per output row; row[r] names the token (NULL: all of them). D is a multiple
// of 4. Twin: rms_norm.
__global__ void __launch_bounds__(NORM_THREADS)
    add_norm_kernel(half* normed, float* x, Unsummed y, const float* weight, const int* row,
                    int dim, float eps) {
  enum { MOST = 8 };  // D up to 8 x 4 x 256 = 8192
  wait_for_previous();
  int t = row ? row[blockIdx.x] : blockIdx.x;
  float4* xt = (float4*)(x + (size_t)t * dim);
  float4 v[MOST];
  float sum[1] = {0};
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    int at = i * NORM_THREADS + threadIdx.x;
    if (at >= dim / 4) break;
    v[i] = xt[at];  // stores come below: here they would hold up the next loads
    if (y.slices) v[i] = add(v[i], sum_slices<float4>(y, (size_t)t * dim / 4 + at));
    sum[0] += square4(v[i]);
  }
  block_sums<1>(sum);
  float scale = rsqrtf(sum[0] / dim + eps);
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    int at = i * NORM_THREADS + threadIdx.x;
    if (at >= dim / 4) break;
    if (y.slices) xt[at] = v[i];
    ((uint2*)(normed + (size_t)blockIdx.x * dim))[at] =
        norm4(v[i], scale, ((const float4*)weight)[at]);
  }
}

// ---- Where q, k and v go.

typedef struct {
  half* k;  // [L, blocks, G, 16, KD]  KD = K rounded up to 32, the rest zero
  half* v;  // [L, blocks, G, 16 K] in the order of v_index
  int n_blocks, max_blocks;
  int heads, kv_heads, layer;
} DeviceKV;

__host__ __device__ static inline int key_width(int head_dim) {
  return (head_dim + 31) / 32 * 32;
}

__device__ static inline size_t kv_block(const DeviceKV* kv, const int* table, int slot, int pos,
                                         int g) {
  int block = table[(size_t)slot * kv->max_blocks + pos / KV_BLOCK];
  return (((size_t)kv->layer * kv->n_blocks + block) * kv->kv_heads + g) * KV_BLOCK;
}

typedef struct {  // what becomes of qkv's results
  half* q;        // [T, H, KD]
  DeviceKV kv;
  const float2* angles;  // [positions, K/2] cosine and sine
  DeviceBatch batch;
  int head_dim;
} QkvTarget;

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
  if (g < kv->kv_heads) {
    float2 a = to->angles[(size_t)pos * half_dim + i];
    float rotated = first * a.x - second * a.y;
    second = second * a.x + first * a.y;
    first = rotated;
  }
  if (g >= 0 && g < kv->kv_heads)
    row = kv->k + (kv_block(kv, to->batch.table, slot, pos, g) + pos % KV_BLOCK) * width;
  if (g >= kv->kv_heads) {
    row = kv->v + kv_block(kv, to->batch.table, slot, pos, g - kv->kv_heads) * to->head_dim;
    first_at = v_index(pos % KV_BLOCK, i);
    second_at = v_index(pos % KV_BLOCK, i + half_dim);
  }
  row[first_at] = __ushort_as_half(f32_to_f16(first));
  row[second_at] = __ushort_as_half(f32_to_f16(second));
}

// Adds up the slices of qkv and stores them. A thread per pair; blockIdx.x = token.
__global__ void rope_kernel(QkvTarget to, Unsummed qkv) {
  wait_for_previous();
  int t = blockIdx.x, half_dim = to.head_dim / 2, heads = to.kv.heads + 2 * to.kv.kv_heads;
  int head = (blockIdx.y * blockDim.x + threadIdx.x) / half_dim,
      i = (blockIdx.y * blockDim.x + threadIdx.x) % half_dim;
  if (head >= heads) return;
  size_t at = ((size_t)t * heads + head) * to.head_dim + i / 8 * 16 + i % 8;
  store_qkv(&to, t, head, i, sum_slices<float>(qkv, at), sum_slices<float>(qkv, at + 8));
}

// ---- Linear layers, y[T, n] = x[T, k] . w[n, k]^T, a ladder of four rungs.
//
// Identical answers at every batch size need one summation order. For a matrix (n, k) it is: K is
// cut into `slices`, chosen from (n, k) alone; inside a slice one chain of mmas, k ascending; the
// slices are added in index order. How tokens and rows are spread over warps and blocks cannot
// change a bit. The tile kernel may leave the slices unsummed in y[slices, T, n] when that gives
// the machine enough blocks; the kernel that reads y next adds them in the same order.

typedef enum {
  OUT_FLOAT,     // y[T, n], fp32
  OUT_SWIGLU,    // hidden[T, n/2] = silu(gate) * up, fp16
  OUT_RESIDUAL,  // x[T, n] += y, fp32 (few tokens only)
  OUT_QKV,       // see store_qkv (few tokens only)
} Output;

__device__ static inline int slice_start(Matrix m, int slice) {
  return slice * (m.k / TILE_K) / m.slices;  // in tiles of 32
}

__device__ static inline float silu_mul(float gate, float up) {
  return gate / (1.0f + __expf(-gate)) * up;
}

// Rungs 1 and 2: LANES threads per output and token, row-major weights, 16 bytes a load. With 1
// (naive) neighbouring threads read rows k apart and only the caches save it. With 32 (GEMV, a warp
// per row) loads are as wide as can be, near the memory roofline at batch 1; but every sequence
// reads all weights again, so batching buys nothing: the lower line of throughput.png, and the
// reason for everything below.
template <int LANES>
__global__ void matmul_rows_kernel(void* out, Output mode, const half* x, Matrix m) {
  wait_for_previous();
  int k = m.k, outputs = mode == OUT_SWIGLU ? m.n / 2 : m.n, t = blockIdx.y,
      lane = threadIdx.x % LANES;
  int i = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  if (i >= outputs) return;
  float sum[2] = {0, 0};  // the row; SwiGLU: gate and, 8 rows on, up
  for (int part = 0; part <= (mode == OUT_SWIGLU); part++) {
    const half* row =
        (const half*)m.w + (size_t)(mode == OUT_SWIGLU ? i / 8 * 16 + i % 8 + 8 * part : i) * k;
    for (int j = lane * 8; j < k; j += LANES * 8) {
      uint4 wv = *(const uint4*)(row + j), xv = *(const uint4*)(x + (size_t)t * k + j);
      const half *w8 = (const half*)&wv, *x8 = (const half*)&xv;
#pragma unroll
      for (int e = 0; e < 8; e++) sum[part] += __half2float(w8[e]) * __half2float(x8[e]);
    }
    for (int offset = LANES / 2; offset > 0; offset /= 2)
      sum[part] += __shfl_xor_sync(~0u, sum[part], offset);
  }
  if (lane > 0) return;
  if (mode == OUT_SWIGLU)
    ((half*)out)[(size_t)t * outputs + i] = __float2half(silu_mul(sum[0], sum[1]));
  if (mode == OUT_FLOAT) ((float*)out)[(size_t)t * outputs + i] = sum[0];
}

// Writes one lane's share of a 16 x 8 result tile: d = {row g of tokens 2t, 2t+1, row g + 8 of the
// same}.
template <Output MODE>
__device__ static inline void store_tile(void* out, const float d[4], int row0, int token0, int n,
                                         int n_tokens) {
  int lane = threadIdx.x % WARP, row = row0 + lane / 4, token = token0 + lane % 4 * 2;
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

// Rung 3: 1 to 8 tokens, where a step is bound by weights and by latency. A warp owns 16 rows and
// one slice of k; its weights stream through a ring of 16 loads in flight (8 KB a warp, 64 KB a
// block; Little's law at 4.3 TB/s and 0.8 us asks for 26 KB an SM), the first 16 issued before
// waiting for the previous kernel. What would be a kernel before and after is done in place:
// RMSNorm of the residual stream on the way in, and RoPE, SwiGLU or the residual addition on the
// way out. Must move 2 n k bytes.
enum { SKINNY_WARPS = 8, SKINNY_TOKENS = 8, RING = 8 };  // ring: in tiles of 1 KB

typedef struct {
  const half* x;        // [T, k] activations, or NULL: normalise these:
  const float* stream;  // [tokens, k] the residual stream
  const float* weight;  // [k]
  const int* row;       // [T] which tokens; NULL = all
  float eps;
} SkinnyInput;

// RMSNorm of up to 8 tokens into shared memory, [k / 32][T][32]: rows of 32 k's, as the B fragments
// want them.
__device__ static void norm_tokens(half* normed, const SkinnyInput* in, int k, int n_tokens) {
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
#pragma unroll 1
    for (int at = threadIdx.x; at < k / 4; at += NORM_THREADS) {
      float4 w = ((const float4*)in->weight)[at];
      uint2* to = (uint2*)(normed + (at / 8 * n_tokens + t0) * TILE_K + at % 8 * 4);
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++)
        if (t0 + t < n_tokens)
          to[t * (TILE_K / 4)] = norm4(x[t][at], rsqrtf(sum[t] / k + in->eps), w);
    }
    __syncthreads();
  }
}

template <Output MODE, bool NORM>
__global__ void __launch_bounds__(SKINNY_WARPS* WARP, 2)
    matmul_skinny_kernel(void* out, QkvTarget qkv, SkinnyInput in, Matrix m, int n_tokens) {
  extern __shared__ uint4 shared[];
  __shared__ float partial[SKINNY_WARPS][TILE_ROWS * 8];
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  int k = m.k, row_tile = blockIdx.x * (SKINNY_WARPS / m.slices) + warp / m.slices,
      slice = warp % m.slices;
  int start = slice_start(m, slice), count = slice_start(m, slice + 1) - start;
  if (row_tile * TILE_ROWS >= m.n) count = 0;
  const uint4* wp = (const uint4*)m.w + ((size_t)row_tile * (k / TILE_K) + start) * 64 + lane;
  uint4 a[RING][2], b[RING];
#pragma unroll
  for (int i = 0; i < RING; i++) {
    if (i < count) a[i][0] = load_weights(wp + i * 64);
    if (i < count) a[i][1] = load_weights(wp + i * 64 + 32);
  }
  wait_for_previous();
  if (NORM) norm_tokens((half*)shared, &in, k, n_tokens);
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
        a[i][0] = load_weights(wp + next * 64);
        a[i][1] = load_weights(wp + next * 64 + 32);
        if (g < n_tokens) b[i] = *(const uint4*)(xp + next * step);
      }
    }
  }
  if (m.slices > 1) {
    for (int i = 0; i < 4; i++) partial[warp][i * WARP + lane] = d[i];
    __syncthreads();
    if (slice > 0) return;
    for (int s = 1; s < m.slices; s++)
      for (int i = 0; i < 4; i++) d[i] += partial[warp + s][i * WARP + lane];
  }
  store_tile<MODE>(MODE == OUT_QKV ? (void*)&qkv : out, d, row_tile * TILE_ROWS, 0, m.n, n_tokens);
}

// Rung 4: any number of tokens. A block computes ROWS x TOKENS, each warp WARP_ROWS x WARP_TOKENS
// of it; k runs through a ring of STAGES shared-memory stages of 64, filled by asynchronous copies,
// the weights of the first stages before waiting for the previous kernel. Weights arrive packed and
// activations as rows of 32 k's (64 bytes), so fragments leave shared memory as conflict-free
// 128-bit loads, the weights' a tile ahead of the mmas that use them. Tiles must be large: 64 x 64
// a warp reads 128 bytes of shared memory per mma, which arrive in about that mma's time.
// SLICED keeps two sums, of the slice and of all before it, at half the tile.
// blockIdx: x = TOKENS tokens (first, so that blocks that share weights run together), y = ROWS
// rows, z = one slice (gridDim.z == slices) or all of them in order (gridDim.z == 1).
enum { STAGE_TILES = 2, MAX_BLOCK_ROWS = 128 };  // k tiles of a stage; rows are padded to this

// Walks k, in tiles of 32, over the slices that a block owns. A stage never crosses a slice's end.
typedef struct {
  int slice, last_slice, at, end;
} KWalk;

__device__ static inline void walk_next(KWalk* w, Matrix m) {
  w->at += STAGE_TILES;
  if (w->at < w->end) return;
  w->slice++;
  w->at = w->end;
  w->end = slice_start(m, w->slice + 1);
}

// Copies one stage's weights, [ROWS / 16][2 k tiles][1 KB]: 128 threads a row tile. w: this
// thread's place in the block's first one. Matrices are padded to whole blocks, so nothing needs to
// be asked per row.
template <int ROWS, int THREADS>
__device__ static inline void stage_weights(uint4* stage, const KWalk* walk, const uint4* w,
                                            int k) {
  bool wanted = walk->slice <= walk->last_slice && walk->at + (int)threadIdx.x / 64 % 2 < walk->end;
  w += (size_t)walk->at * 64;
#pragma unroll
  for (int i = 0; i < ROWS / TILE_ROWS; i += THREADS / 128) {
    copy_async(stage + i * 128 + threadIdx.x, w, wanted);
    w += (size_t)k * (2 * THREADS / 128);  // row tiles lie k / 32 x 64 x 16 bytes apart
  }
}

// Copies one stage's activations, [2 k tiles][TOKENS][32]. x: this thread's 8 k's in its tokens'
// rows.
template <int TOKENS, int THREADS>
__device__ static inline void stage_tokens(uint4* stage, const KWalk* walk, const half* const x[]) {
  bool wanted = walk->slice <= walk->last_slice && threadIdx.x < TOKENS * 4;
#pragma unroll
  for (int i = 0; i * THREADS < TOKENS * 4; i++) {
    const half* from = x[i] + walk->at * TILE_K;
#pragma unroll
    for (int kt = 0; kt < STAGE_TILES; kt++)
      copy_async(stage + kt * TOKENS * 4 + i * THREADS + threadIdx.x, from + kt * TILE_K,
                 wanted && walk->at + kt < walk->end);
  }
}

// One k tile of a warp: d += a . b. Two token tiles at a time, so that an accumulator's next mma
// comes 2 MT mmas later.
template <int MT, int NT>
__device__ static inline void multiply_tile(float d[][NT][4], const uint4 a[][2],
                                            const uint4* tokens) {
#pragma unroll
  for (int i = 0; i < NT; i += 2) {
    uint4 b[2] = {tokens[i * 32], tokens[i * 32 + 32]};
#pragma unroll
    for (int j = 0; j < 2 * MT; j++) mma(d[j / 2][i + j % 2], a[j / 2][0], b[j % 2].x, b[j % 2].y);
#pragma unroll
    for (int j = 0; j < 2 * MT; j++) mma(d[j / 2][i + j % 2], a[j / 2][1], b[j % 2].z, b[j % 2].w);
  }
}

template <Output MODE, bool SLICED, int ROWS, int TOKENS, int WARP_ROWS, int WARP_TOKENS,
          int STAGES>
__global__ void __launch_bounds__(ROWS / WARP_ROWS * (TOKENS / WARP_TOKENS) * WARP,
                                  SLICED&& TOKENS > 64 ? 1 : 2)
    matmul_tile_kernel(void* out, const half* x, Matrix m, int n_tokens) {
  constexpr int THREADS = ROWS / WARP_ROWS * (TOKENS / WARP_TOKENS) * WARP,
                MT = WARP_ROWS / TILE_ROWS, NT = WARP_TOKENS / 8,
                X_ROWS = (TOKENS * 4 + THREADS - 1) / THREADS,
                WEIGHTS = ROWS / TILE_ROWS * STAGE_TILES * 64,
                STAGE = WEIGHTS + STAGE_TILES * TOKENS * 4;  // in 16 bytes
  extern __shared__ uint4 shared[];
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  int warp_row = warp % (ROWS / WARP_ROWS) * MT,
      warp_token = warp / (ROWS / WARP_ROWS) * WARP_TOKENS;
  int token0 = blockIdx.x * TOKENS, row_tile0 = blockIdx.y * (ROWS / TILE_ROWS);
  const uint4* my_w = (const uint4*)m.w +
                      (size_t)(row_tile0 + threadIdx.x / 128) * (m.k / TILE_K) * 64 +
                      threadIdx.x % 128;
  const half* my_x[X_ROWS];
#pragma unroll
  for (int i = 0; i < X_ROWS; i++) {  // beyond T: the last token once more, never stored
    int token = min(token0 + (i * THREADS + (int)threadIdx.x) / 4, n_tokens - 1);
    my_x[i] = x + (size_t)token * m.k + threadIdx.x % 4 * 8;
  }
  int slice0 = gridDim.z > 1 ? blockIdx.z : 0,
      last_slice = gridDim.z > 1 ? blockIdx.z : m.slices - 1;
  KWalk use = {slice0, last_slice, slice_start(m, slice0), slice_start(m, slice0 + 1)}, load = use,
        early = use;
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; s++) {
    stage_weights<ROWS, THREADS>(shared + s * STAGE, &early, my_w, m.k);
    walk_next(&early, m);
  }
  wait_for_previous();
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; s++) {
    stage_tokens<TOKENS, THREADS>(shared + s * STAGE + WEIGHTS, &load, my_x);
    copy_commit();
    walk_next(&load, m);
  }
  float d[MT][NT][4] = {}, total[SLICED ? MT : 1][NT][4] = {};
  uint4 a[2][MT][2];  // this tile's weights and the next one's
  const uint4 *sa = shared + warp_row * STAGE_TILES * 64 + lane,
              *sb = shared + WEIGHTS + warp_token * 4 + lane;
  copy_wait<STAGES - 2>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MT * 2; i++) a[0][i / 2][i % 2] = sa[i / 2 * STAGE_TILES * 64 + i % 2 * 32];
#pragma unroll 1
  for (int stage = 0, fill = STAGES - 1; use.slice <= use.last_slice;) {
    int next = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
    for (int kt = 0; kt < STAGE_TILES; kt++) {
      const uint4* from = sa + stage * STAGE + (kt + 1) * 64;
      if (kt + 1 == STAGE_TILES) {
        // The next stage must have arrived, and all warps have left the one that is filled now.
        copy_wait<STAGES - 3>();
        __syncthreads();
        stage_weights<ROWS, THREADS>(shared + fill * STAGE, &load, my_w, m.k);
        stage_tokens<TOKENS, THREADS>(shared + fill * STAGE + WEIGHTS, &load, my_x);
        copy_commit();
        walk_next(&load, m);
        from = sa + next * STAGE;
      }
#pragma unroll
      for (int i = 0; i < MT * 2; i++)
        a[(kt + 1) % 2][i / 2][i % 2] = from[i / 2 * STAGE_TILES * 64 + i % 2 * 32];
      if (use.at + kt >= use.end) break;
      multiply_tile<MT, NT>(d, a[kt % 2], sb + stage * STAGE + kt * TOKENS * 4);
    }
    fill = stage;
    stage = next;
    int slice = use.slice;
    walk_next(&use, m);
    if (use.slice == slice) continue;
#pragma unroll
    for (int i = 0; i < (SLICED ? MT * NT * 4 : 0); i++) {  // a slice is complete
      float* slice_sum = &d[i / (NT * 4)][i / 4 % NT][i % 4];
      total[SLICED ? i / (NT * 4) : 0][i / 4 % NT][i % 4] += *slice_sum;
      *slice_sum = 0;
    }
  }
  float* y = (float*)out + (gridDim.z > 1 ? (size_t)blockIdx.z * n_tokens * m.n : 0);
#pragma unroll
  for (int i = 0; i < MT * NT; i++)
    store_tile<MODE>(y, SLICED ? total[SLICED ? i / NT : 0][i % NT] : d[i / NT][i % NT],
                     (row_tile0 + warp_row + i / NT) * TILE_ROWS, token0 + warp_token + i % NT * 8,
                     m.n, n_tokens);
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

// One warp: 16 query rows against 64 keys from key0, two matrix products on fragments loaded
// straight from the cache. Column c of the score tile is key 4 (c / 2) + c % 2 (+ 2 in the second
// tile), so that lane t ends up with keys 4t .. 4t+3, which is what it needs as the A operand of p
// . v.
template <int K>
__device__ static void attend_chunk(const DeviceKV* kv, const int* table, int slot, int g, int key0,
                                    int last_key, const int row_pos[2], const uint4 q[][2],
                                    float max[2], float sum[2], float out[][4]) {
  constexpr int KD = (K + 31) / 32 * 32;
  int lane = threadIdx.x % WARP, column = lane / 4, t = lane % 4;
  float s[PAGES][2][4] = {};
  uint4 v[PAGES][K / 16];
#pragma unroll
  for (int p = 0; p < PAGES; p++) {
    int page = key0 + p * KV_BLOCK <= last_key ? key0 + p * KV_BLOCK
                                               : key0;  // beyond the end: any page, masked below
    size_t block = kv_block(kv, table, slot, page, g);
    for (int i = 0; i < 2; i++) {
      const half* k = kv->k + (block + column / 2 * 4 + column % 2 + i * 2) * KD + t * 8;
      for (int c = 0; c < KD / 32; c++) {
        uint4 b = *(const uint4*)(k + c * 32);
        mma(s[p][i], q[c][0], b.x, b.y);
        mma(s[p][i], q[c][1], b.z, b.w);
      }
    }
    for (int c = 0; c < K / 16; c++) v[p][c] = ((const uint4*)(kv->v + block * K))[c * WARP + lane];
  }
  const float scale = 1.44269504f * rsqrtf((float)K);  // scores in powers of two
  for (int r = 0; r < 2; r++) {
    max[r] = -INFINITY;
    sum[r] = 0;
    for (int i = 0; i < PAGES * 4; i++) {
      float* score = &s[i / 4][i / 2 % 2][r * 2 + i % 2];
      int key = key0 + i / 4 * KV_BLOCK + t * 4 + i % 4;
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
    }
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
  }
#pragma unroll
  for (int p = 0; p < PAGES; p++) {
    half2 a[4];  // rows g and g + 8 of keys 4t, 4t+1, then of 4t+2, 4t+3
    for (int i = 0; i < 4; i++)
      a[i] = __floats2half2_rn(s[p][i / 2][i % 2 * 2], s[p][i / 2][i % 2 * 2 + 1]);
    for (int c = 0; c < K / 16; c++) {
      mma(out[2 * c], *(uint4*)a, v[p][c].x, v[p][c].y);
      mma(out[2 * c + 1], *(uint4*)a, v[p][c].z, v[p][c].w);
    }
  }
}

// out[T, H, K] = softmax(q . k / sqrt(K)) . v over each token's own positions. A block takes one
// run of tokens of a slot, the heads that share a kv head (16 rows: heads x tokens), and either one
// split of 256 keys (gridDim.z > 1: the last block to finish merges all splits in order) or every
// split in turn. Must read the cache of a slot once per run of its tokens. Twin: attend.
template <int K>
__global__ void __launch_bounds__(ATTENTION_WARPS* WARP, K <= 64 ? 4 : 2)
    attention_kernel(half* out, const half* q, DeviceKV kv, DeviceBatch b, float* partial,
                     int* arrived) {
  constexpr int KD = (K + 31) / 32 * 32, OWN = K / 8;
  __shared__ float chunk_out[ATTENTION_WARPS][TILE_ROWS][K], chunk_max[ATTENTION_WARPS][TILE_ROWS],
      chunk_sum[ATTENTION_WARPS][TILE_ROWS];
  __shared__ bool last;
  wait_for_previous();
  int4 run = b.run[blockIdx.x];
  int first = run.x, length = run.y, slot = run.z, pos0 = run.w;
  if (slot < 0) return;
  int group = kv.heads / kv.kv_heads, parts = (group + TILE_ROWS - 1) / TILE_ROWS;
  int g = blockIdx.y / parts, head0 = g * group + blockIdx.y % parts * TILE_ROWS;
  int heads = min(TILE_ROWS, (g + 1) * group - head0), rows = heads * length;
  int last_key = pos0 + length - 1, n_splits = last_key / SPLIT + 1;
  int split = gridDim.z > 1 ? blockIdx.z : 0, end = gridDim.z > 1 ? split + 1 : n_splits;
  if (split >= n_splits) return;

  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row_pos[2];
  uint4 fragment[KD / 32][2];
  for (int r = 0; r < 2; r++) {
    int row = lane / 4 + r * 8;
    row_pos[r] = row < rows ? pos0 + row / heads : -1;
    const half* from =
        q +
        ((size_t)(first + (row < rows ? row / heads : 0)) * kv.heads + head0 + row % heads) * KD +
        lane % 4 * 8;
    for (int c = 0; c < KD / 32; c++) {
      uint4 v = *(const uint4*)(from + c * 32);
      for (int j = 0; j < 2;
           j++) {  // k's 8t .. 8t+3 go to the first mma, 8t+4 .. 8t+7 to the second
        (&fragment[c][j].x)[r] = j ? v.z : v.x;
        (&fragment[c][j].x)[r + 2] = j ? v.w : v.y;
      }
    }
  }
  int row = threadIdx.x / 8,
      lane0 = threadIdx.x % 8;  // after the products each thread owns K / 8 outputs of one row
  Softmax<OWN> total = {-INFINITY, 0, {}};
  for (; split < end; split++) {
    int key0 = split * SPLIT + warp * CHUNK;
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, o[K / 8][4] = {};
    if (key0 <= last_key)
      attend_chunk<K>(&kv, b.table, slot, g, key0, last_key, row_pos, fragment, max, sum, o);
    __syncthreads();  // the previous split's results have been read
    for (int r = 0; r < 2; r++) {
      chunk_max[warp][lane / 4 + r * 8] = max[r];
      chunk_sum[warp][lane / 4 + r * 8] = sum[r];
      for (int i = 0; i < K / 8; i++)
        for (int e = 0; e < 2; e++)
          chunk_out[warp][lane / 4 + r * 8][i * 8 + lane % 4 * 2 + e] = o[i][r * 2 + e];
    }
    __syncthreads();
    Softmax<OWN> s = {-INFINITY, 0, {}};
    for (int c = 0; c < ATTENTION_WARPS; c++)
      merge(&s, chunk_max[c][row], chunk_sum[c][row], &chunk_out[c][row][lane0], 8);
    merge(&total, s.max, s.sum, s.out, 1);
  }
  int token = first + row / heads, head = head0 + row % heads;
  if (gridDim.z > 1 && n_splits > 1) {
    float* mine = partial + ((size_t)token * kv.heads + head) * gridDim.z * (K + 2);
    if (row < rows) {
      float* to = mine + blockIdx.z * (K + 2);
      if (lane0 == 0) to[0] = total.max;
      if (lane0 == 0) to[1] = total.sum;
      for (int i = 0; i < OWN; i++) to[2 + lane0 + i * 8] = total.out[i];
    }
    __threadfence();
    __syncthreads();
    int* count = &arrived[blockIdx.x * gridDim.y + blockIdx.y];
    if (threadIdx.x == 0) last = atomicAdd(count, 1) == n_splits - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) *count = 0;
    total = {-INFINITY, 0, {}};
    for (int s = 0; s < n_splits && row < rows; s++) {
      const float* from = mine + s * (K + 2);
      float o[OWN];
      for (int i = 0; i < OWN; i++) o[i] = __ldcg(from + 2 + lane0 + i * 8);
      merge(&total, __ldcg(from), __ldcg(from + 1), o, 1);
    }
  }
  if (row >= rows) return;
  for (int i = 0; i < OWN; i++)
    out[((size_t)token * kv.heads + head) * K + lane0 + i * 8] =
        __float2half(total.out[i] / total.sum);
}

// ---- Sampling on the device, so that a decode step never waits for the host. Greedy is the
// largest logit; temperature > 0 adds Gumbel noise to logit / temperature, whose largest element is
// a sample of the softmax (Gumbel-max trick). The noise is a hash of (request's seed, position,
// token), so a request draws the same text wherever and whenever it runs.

typedef struct {
  int token;
  float score;
} Candidate;

typedef struct {  // per slot
  int* sampled;   // last token
  uint32_t* seed;
  float* temperature;
} DeviceSampler;

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

// best[R, WARP]: the best token of each of 32 pieces of the vocabulary. blockIdx = (piece, row).
__global__ void sample_kernel(Candidate* best, const float* logits, DeviceBatch b, DeviceSampler s,
                              int vocab) {
  __shared__ Candidate warps[8];
  wait_for_previous();
  int r = blockIdx.y, t = b.row[r], slot = b.slot[t];
  if (slot < 0) return;
  float temperature = s.temperature[slot];
  uint32_t seed = hash32(s.seed[slot] ^ hash32(b.pos[t]));
  int start = (int)((long long)vocab * blockIdx.x / WARP),
      end = (int)((long long)vocab * (blockIdx.x + 1) / WARP);
  Candidate c = {0, -INFINITY};
  for (int v0 = start + threadIdx.x; v0 < end; v0 += 4 * blockDim.x) {
    float score[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {  // four loads in flight
      int v = v0 + i * blockDim.x;
      score[i] = v < end ? logits[(size_t)r * vocab + v] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int v = v0 + i * blockDim.x;
      if (temperature > 0) score[i] = gumbel_score(score[i], temperature, seed, v);
      Candidate mine = {v, score[i]};
      if (v < end) c = better(c, mine);
    }
  }
  c = warp_best(c);
  if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = c;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < 8; i++) c = better(c, warps[i]);
  best[r * WARP + blockIdx.x] = c;
}

// The winner of each row becomes its slot's last token. advance: the same rows decode again in
// the next step, so move every token one position on; nothing needs to come from the host then.
__global__ void sample_finish_kernel(const Candidate* best, DeviceBatch b, DeviceSampler s,
                                     bool advance) {
  wait_for_previous();
  int r = blockIdx.x, t = b.row[r], slot = b.slot[t];
  if (slot < 0) return;
  Candidate c = warp_best(best[r * WARP + threadIdx.x]);
  if (threadIdx.x) return;
  s.sampled[slot] = c.token;
  if (!advance) return;
  b.pos[t]++;
  b.run[t].w++;
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

// ---- The GPU's side of the platform shim.

#define CUDA_CHECK(call)                                                       \
  do {                                                                         \
    cudaError_t e_ = (call);                                                   \
    if (e_ != cudaSuccess)                                                     \
      die("%s:%d: %s: %s", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
  } while (0)

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

static double gpu_probe_rate(const Device* d) {
  float* p = (float*)gpu_alloc(256);
  if (!p) die("no memory to probe %s with", d->name);
  const int rounds = 20000, blocks = d->sms * 2, warps = 8;
  double seconds = best_time([&] { probe_mma_kernel<<<blocks, warps * WARP>>>(p, rounds); });
  gpu_free(p);
  return 2.0 * 16 * 8 * 16 * 8 * rounds * blocks * warps / seconds;
}

// ---- A step on the GPU: five launches a layer up to 8 tokens, eight beyond. Decode steps are
// recorded once per size as a CUDA graph and replayed, since launching 130 kernels one by one takes
// the host longer than a small model takes the GPU.

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
  float *x, *y, *logits, *partial;  // [T, D], linear layers' results, [R, V], attention splits
  half *normed, *att, *hidden;      // [T, D], [T, H K], [T, F]
  int* arrived;                     // attention: blocks of a run that are done
  Candidate* best;                  // [R, 32]
  QkvTarget qkv;                    // q, the cache, the token list
  DeviceSampler sampler;
  int *staging,
      *sampled;         // pinned, a part per step in flight: what goes up, what comes back [slots]
  size_t staging_ints;  // one part of staging: token lists, block table, sampler
  cudaEvent_t base, end[IN_FLIGHT];
  double base_time;  // when `base` happened, on now()'s clock
  Batch last;        // the decode step before, if the device has moved its list on by itself
  StepGraph graphs[MAX_GRAPHS];
  int n_graphs;
} Gpu;

template <typename... P, typename... A>
static void launch(const Gpu* g, void (*kernel)(P...), dim3 grid, int threads, size_t shared,
                   A... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = g->stream;
  cudaLaunchAttribute dependent;
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &dependent;
  config.numAttrs = g->device->dependent_launch ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

static int ceil_div(int a, int b) {
  return (a + b - 1) / b;
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

template <Output MODE, bool SLICED, int ROWS, int TOKENS, int WARP_ROWS, int WARP_TOKENS,
          int STAGES>
static void launch_tile(const Gpu* g, void* out, const half* x, const Matrix* m, int n_tokens,
                        int z) {
  auto kernel = matmul_tile_kernel<MODE, SLICED, ROWS, TOKENS, WARP_ROWS, WARP_TOKENS, STAGES>;
  size_t shared = STAGES * STAGE_TILES * (ROWS + TOKENS) * TILE_K * sizeof(half);
  static bool configured;  // more than 48 KB of shared memory must be asked for, once
  if (!configured)
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
  configured = true;
  dim3 grid(ceil_div(n_tokens, TOKENS), ceil_div(m->n, ROWS), z);
  launch(g, kernel, grid, ROWS / WARP_ROWS * (TOKENS / WARP_TOKENS) * WARP, shared, out, x, *m,
         n_tokens);
}

// Tile shapes by number of tokens, pipeline depth by the shared memory a block may have: 227 KB on
// Hopper, 163 on A100, 99 on other Ampere and Ada cards, 64 on Turing, where one shape must do for
// all. Depth is what small batches live on: at 64 tokens on an H200 a step takes 1,755 us with 3
// stages, 1,475 with 4, 1,430 with 6.
template <Output MODE>
static void launch_tiles(const Gpu* g, void* out, const half* x, const Matrix* m, int n_tokens,
                         int z) {
  constexpr bool SLICED = MODE == OUT_FLOAT;
  int kb = g->device->shared_bytes / 1024;
  if (kb < 99) return launch_tile<MODE, SLICED, 128, 32, 32, 32, 3>(g, out, x, m, n_tokens, z);
  if (n_tokens <= 16 && kb >= 150)
    return launch_tile<MODE, SLICED, 128, 16, 32, 16, 8>(g, out, x, m, n_tokens, z);
  if (n_tokens <= 32)
    return launch_tile<MODE, SLICED, 128, 32, 32, 32, 4>(g, out, x, m, n_tokens, z);
  if (n_tokens <= 64 && kb >= 150)
    return launch_tile<MODE, SLICED, 128, 64, 32, 64, 6>(g, out, x, m, n_tokens, z);
  if (n_tokens <= 64)
    return launch_tile<MODE, SLICED, 128, 64, 32, 64, 4>(g, out, x, m, n_tokens, z);
  if (m->slices > 1) return launch_tile<MODE, true, 128, 128, 32, 64, 3>(g, out, x, m, n_tokens, z);
  return launch_tile<MODE, false, 128, 128, 64, 64, 3>(g, out, x, m, n_tokens, z);
}

// Blocks of the third grid dimension: one per slice when a block per 128 rows and 128 tokens would
// leave multiprocessors idle.
static int tile_slices(const Device* d, const Matrix* m, int n_tokens) {
  return ceil_div(m->n, 128) * ceil_div(n_tokens, 128) < d->sms ? m->slices : 1;
}

// Up to 8 tokens: with what comes before and after fused in.
template <Output MODE, bool NORM>
static void matmul_skinny(const Gpu* g, void* out, SkinnyInput in, const Matrix* m, int n_tokens,
                          int layer) {
  auto kernel = matmul_skinny_kernel<MODE, NORM>;
  size_t shared = NORM ? (size_t)n_tokens * m->k * sizeof(half) : 0;
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

// out = x . w^T, perhaps in unsummed slices.
template <Output MODE>
static Unsummed matmul(const Gpu* g, void* out, const half* x, const Matrix* m, int n_tokens) {
  int outputs = MODE == OUT_SWIGLU ? m->n / 2 : m->n, z = 1;
  SkinnyInput in = {x, NULL, NULL, NULL, 0};
  if (g->matmul == MATMUL_NAIVE) {
    launch(g, matmul_rows_kernel<1>, dim3(ceil_div(outputs, 256), n_tokens), 256, 0, out, MODE, x,
           *m);
  } else if (g->matmul == MATMUL_GEMV) {
    launch(g, matmul_rows_kernel<WARP>, dim3(ceil_div(outputs, 8), n_tokens), 8 * WARP, 0, out,
           MODE, x, *m);
  } else if (n_tokens <= SKINNY_TOKENS) {
    matmul_skinny<MODE, false>(g, out, in, m, n_tokens, 0);
  } else {
    z = tile_slices(g->device, m, n_tokens);
    launch_tiles<MODE>(g, out, x, m, n_tokens, z);
  }
  Unsummed u = {(const float*)out, z, (size_t)n_tokens * m->n};
  return u;
}

template <int K>
static void launch_attention(const Gpu* g, int runs, int splits, DeviceKV kv) {
  int parts = ceil_div(kv.heads / kv.kv_heads, TILE_ROWS);
  launch(g, attention_kernel<K>, dim3(runs, kv.kv_heads * parts, splits), ATTENTION_WARPS * WARP, 0,
         g->att, (const half*)g->qkv.q, kv, g->qkv.batch, g->partial, g->arrived);
}

static void attention(const Gpu* g, int head_dim, int runs, int splits, DeviceKV kv) {
  if (head_dim == 32) return launch_attention<32>(g, runs, splits, kv);
  if (head_dim == 64) return launch_attention<64>(g, runs, splits, kv);
  if (head_dim == 80) return launch_attention<80>(g, runs, splits, kv);
  if (head_dim == 96) return launch_attention<96>(g, runs, splits, kv);
  if (head_dim == 128) return launch_attention<128>(g, runs, splits, kv);
  die("no attention kernel for head width %d: 32, 64, 80, 96 and 128 exist", head_dim);
}

static void add_norm(const Gpu* g, const Config* c, int rows, Unsummed y, const float* weight,
                     const int* row) {
  launch(g, add_norm_kernel, dim3(rows), NORM_THREADS, 0, g->normed, g->x, y, weight, row, c->dim,
         c->norm_eps);
}

// Queues one forward pass and the sampling of R rows for the token list on the device. Twin:
// forward_cpu.
static void gpu_forward(const Engine* e, int T, int R, int runs, int splits, bool advance) {
  const Config* c = &e->w->config;
  const Gpu* g = e->gpu;
  QkvTarget qkv = g->qkv;
  int pairs = (c->n_heads + 2 * c->n_kv_heads) * c->head_dim / 2;
  Unsummed y = {NULL, 0, 0};
  bool few = g->matmul == MATMUL_MMA && T <= SKINNY_TOKENS &&
             (size_t)T * c->dim * sizeof(half) + 8192 <= (size_t)g->device->shared_bytes;
  SkinnyInput att = {g->att, NULL, NULL, NULL, 0}, hidden = {g->hidden, NULL, NULL, NULL, 0},
              norm = {NULL, g->x, NULL, NULL, c->norm_eps};
  launch(g, embed_kernel, dim3(T), 256, 0, g->x, (const half*)e->w->embed.w, qkv.batch,
         (const int*)g->sampler.sampled, c->dim, g->matmul == MATMUL_MMA);
  for (int layer = 0; layer < c->n_layers; layer++) {
    const Layer* l = &e->w->layers[layer];
    qkv.kv.layer = layer;
    if (few) {
      norm.weight = l->attn_norm;
      matmul_skinny<OUT_QKV, true>(g, NULL, norm, &l->qkv, T, layer);
      attention(g, c->head_dim, runs, splits, qkv.kv);
      matmul_skinny<OUT_RESIDUAL, false>(g, g->x, att, &l->o, T, layer);
      norm.weight = l->mlp_norm;
      matmul_skinny<OUT_SWIGLU, true>(g, g->hidden, norm, &l->gate_up, T, layer);
      matmul_skinny<OUT_RESIDUAL, false>(g, g->x, hidden, &l->down, T, layer);
      continue;
    }
    add_norm(g, c, T, y, l->attn_norm, NULL);
    y = matmul<OUT_FLOAT>(g, g->y, g->normed, &l->qkv, T);
    launch(g, rope_kernel, dim3(T, ceil_div(pairs, 128)), 128, 0, qkv, y);
    attention(g, c->head_dim, runs, splits, qkv.kv);
    y = matmul<OUT_FLOAT>(g, g->y, g->att, &l->o, T);
    add_norm(g, c, T, y, l->mlp_norm, NULL);
    matmul<OUT_SWIGLU>(g, g->hidden, g->normed, &l->gate_up, T);
    y = matmul<OUT_FLOAT>(g, g->y, g->hidden, &l->down, T);
  }
  if (R == 0) return;
  norm.weight = e->w->final_norm;
  norm.row = qkv.batch.row;
  if (few) {
    matmul_skinny<OUT_FLOAT, true>(g, g->logits, norm, &e->w->head, R, 0);
  } else {
    add_norm(g, c, R, y, e->w->final_norm, qkv.batch.row);
    matmul<OUT_FLOAT>(g, g->logits, g->normed, &e->w->head, R);
  }
  launch(g, sample_kernel, dim3(WARP, R), 256, 0, g->best, (const float*)g->logits, qkv.batch,
         g->sampler, c->vocab_size);
  launch(g, sample_finish_kernel, dim3(R), WARP, 0, (const Candidate*)g->best, qkv.batch,
         g->sampler, advance);
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
    CUDA_CHECK(cudaMemcpyAsync(g->sampler.seed, staging + ints, slots * sizeof(int),
                               cudaMemcpyHostToDevice, g->stream));
    CUDA_CHECK(cudaMemcpyAsync(g->sampler.temperature, staging + ints + slots,
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
  CUDA_CHECK(cudaMemcpyAsync(g->sampled + (size_t)which * e->size.max_slots, g->sampler.sampled,
                             e->size.max_slots * sizeof(int), cudaMemcpyDeviceToHost, g->stream));
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
  const Matrix* unsummed[] = {&l->qkv, &l->o, &l->down};
  for (int i = 0; i < 3;
       i++) {  // most floats in y: all tokens summed, or as many as tile_slices leaves in slices
    const Matrix* m = unsummed[i];
    size_t sliced = (size_t)g->device->sms * 128 * 128 * m->slices;
    if (sliced > T * m->n * m->slices) sliced = T * m->n * m->slices;
    y = sliced > y ? sliced : y;
    y = T * m->n > y ? T * m->n : y;
  }
  split_rows =
      2 * g->device->sms / c->n_kv_heads + 1;  // runs that attention splits: see gpu_submit
  split_rows *= TILE_ROWS * c->n_kv_heads;
  size_t splits = e->size.max_positions / SPLIT + 1, lists = BATCH_INTS * T;
  size_t table = (size_t)e->size.max_slots * e->blocks.max_blocks;
  if (splits == 1) split_rows = 1;
  struct {
    void** p;
    size_t bytes;
  } parts[] = {
      {(void**)&g->x, T * c->dim * sizeof(float)},
      {(void**)&g->y, y * sizeof(float)},
      {(void**)&g->logits, R * c->vocab_size * sizeof(float)},
      {(void**)&g->partial, split_rows * splits * (c->head_dim + 2) * sizeof(float)},
      {(void**)&g->normed, (T > R ? T : R) * c->dim * sizeof(half)},
      {(void**)&g->qkv.q, T * c->n_heads * key_width(c->head_dim) * sizeof(half)},
      {(void**)&g->att, T * c->n_heads * c->head_dim * sizeof(half)},
      {(void**)&g->hidden, T * c->hidden_dim * sizeof(half)},
      {(void**)&g->arrived, T * c->n_heads * sizeof(int)},
      {(void**)&g->best, R * WARP * sizeof(Candidate)},
      {(void**)&g->qkv.batch.run, lists * sizeof(int)},
      {(void**)&g->qkv.batch.table, table * sizeof(int)},
      {(void**)&g->sampler.sampled, e->size.max_slots * sizeof(int)},
      {(void**)&g->sampler.seed, e->size.max_slots * sizeof(int)},
      {(void**)&g->sampler.temperature, e->size.max_slots * sizeof(float)},
  };
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    *parts[i].p = device_alloc(e->device, MEM_WORK, parts[i].bytes);
    if (!*parts[i].p) return false;
  }
  g->qkv.batch.id = (int*)(g->qkv.batch.run + T);
  g->qkv.batch.pos = g->qkv.batch.id + T;
  g->qkv.batch.slot = g->qkv.batch.pos + T;
  g->qkv.batch.row = g->qkv.batch.slot + T;
  g->staging_ints = (lists + table + 2 * e->size.max_slots + 3) / 4 * 4;  // runs are 16 bytes
  return true;
}

static bool gpu_engine_open(Engine* e) {
  const Config* c = &e->w->config;
  Gpu* g = e->gpu = (Gpu*)xcalloc(1, sizeof *g);
  g->device = e->device;
  g->matmul = e->w->matmul;
  CUDA_CHECK(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
  CUDA_CHECK(cudaEventCreate(&g->base));
  for (int i = 0; i < IN_FLIGHT; i++) CUDA_CHECK(cudaEventCreate(&g->end[i]));
  if (!gpu_work_alloc(e)) return false;
  g->last.slot = (int*)xcalloc(e->size.max_slots, sizeof(int));
  g->last.pos = (int*)xcalloc(e->size.max_slots, sizeof(int));
  CUDA_CHECK(cudaMallocHost((void**)&g->staging, IN_FLIGHT * g->staging_ints * sizeof(int)));
  CUDA_CHECK(cudaMallocHost((void**)&g->sampled, IN_FLIGHT * e->size.max_slots * sizeof(int)));
  const KVCache* kv = &e->kv;
  g->qkv.kv = {
      (half*)kv->k, (half*)kv->v, kv->n_blocks, kv->max_blocks, c->n_heads, c->n_kv_heads, 0};
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

// The last step's logits, [R, V]: for tests and for whoever wants to look.
static void gpu_copy_logits(Engine* e, int rows, float* out) {
  CUDA_CHECK(cudaStreamSynchronize(e->gpu->stream));
  CUDA_CHECK(cudaMemcpy(out, e->gpu->logits, (size_t)rows * e->w->config.vocab_size * sizeof(float),
                        cudaMemcpyDeviceToHost));
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

static const Backend gpu_backend = {
    gpu_open,        gpu_probe_bandwidth, gpu_probe_rate, gpu_used,     gpu_alloc,       gpu_free,
    gpu_upload,      MAX_BLOCK_ROWS,      TILE_K,         sizeof(half), matrix_slices,   gpu_fill,
    gpu_engine_open, gpu_engine_close,    gpu_submit,     gpu_collect,  gpu_copy_logits,
};

static const Backend* cuda_backend = &gpu_backend;
#else
static const Backend* cuda_backend = NULL;  // built without nvcc
#endif

// ---- From a Model (where the numbers are) to Weights (where the device wants them).

// Allocates an [n, k] matrix, rows padded to what the kernels read; false when it does not fit.
static bool matrix_open(Weights* w, Device* d, Matrix* m, int n, int k, bool sliced) {
  int rows = (n + d->api->row_multiple - 1) / d->api->row_multiple * d->api->row_multiple;
  m->n = n;
  m->k = k;
  m->slices = sliced && d->api->slices && w->matmul == MATMUL_MMA ? d->api->slices(n, k) : 1;
  m->w = (f16*)device_alloc(d, MEM_WEIGHTS, (size_t)rows * k * sizeof(f16));
  return m->w != NULL;
}

static bool fill_matrix(const Weights* w, const Device* d, Matrix* m, const Tensor* from, int first,
                        int pair) {
  RowMap map = {first, pair};
  // The teaching rungs read plain rows; only the matrix units want fragments.
  return d->api->fill(m, from, map, w->matmul == MATMUL_MMA);
}

// Floats that every device reads as they are: norms (ones in a random model) and RoPE angles. from
// may be NULL.
static float* floats_open(Device* d, const Tensor* from, const float* values, size_t n) {
  float* host = (float*)xcalloc(n, sizeof(float));
  for (size_t i = 0; i < n; i++)
    host[i] = values ? values[i] : from->data ? f16_to_f32(tensor_at(from, i)) : 1.0f;
  float* p = (float*)device_alloc(d, MEM_WEIGHTS, n * sizeof(float));
  if (p) d->api->upload(p, host, n * sizeof(float));
  free(host);
  return p;
}

static bool layer_open(Weights* w, Device* d, Layer* l, const LayerTensors* t) {
  const Config* c = &w->config;
  int q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
  bool ok = matrix_open(w, d, &l->qkv, qkv_width(c), c->dim, true) &&
            matrix_open(w, d, &l->o, c->dim, q, true) &&
            matrix_open(w, d, &l->gate_up, 2 * c->hidden_dim, c->dim, false) &&
            matrix_open(w, d, &l->down, c->dim, c->hidden_dim, true);
  int K = c->head_dim, F = c->hidden_dim;
  ok = ok && fill_matrix(w, d, &l->qkv, &t->q, 0, K) && fill_matrix(w, d, &l->qkv, &t->k, q, K) &&
       fill_matrix(w, d, &l->qkv, &t->v, q + kv, K);
  ok = ok && fill_matrix(w, d, &l->o, &t->o, 0, 0) && fill_matrix(w, d, &l->down, &t->down, 0, 0);
  ok = ok && fill_matrix(w, d, &l->gate_up, &t->gate, 0, 2 * F) &&
       fill_matrix(w, d, &l->gate_up, &t->up, F, 2 * F);
  l->attn_norm = ok ? floats_open(d, &t->attn_norm, NULL, c->dim) : NULL;
  l->mlp_norm = ok ? floats_open(d, &t->mlp_norm, NULL, c->dim) : NULL;
  return ok && l->attn_norm && l->mlp_norm;
}

static size_t parameter_count(const Config* c) {
  size_t att = (size_t)c->n_heads * c->head_dim, D = c->dim;
  size_t layer = D * qkv_width(c) + att * D + 3 * D * c->hidden_dim + 2 * D;
  return c->n_layers * layer + D + (c->tied ? 1 : 2) * (size_t)c->vocab_size * D;
}

static void weights_close(Weights* w, Device* d) {
  device_free_all(d, MEM_WEIGHTS);
  free(w->layers);
  memset(w, 0, sizeof *w);
}

// positions: the longest sequence that will run. False: err says that the weights do not fit.
static bool weights_open(Weights* w, Device* d, const Model* m, Matmul matmul, int positions,
                         char* err) {
  const Config* c = &m->config;
  double need = 2.0 * parameter_count(c), used = d->api->used();
  if (used + need > d->limit)
    return file_error(err, c->name, "does not fit: weights need %.0f MiB, %.0f MiB are left",
                      need / MIB, fmax(d->limit - used, 0) / MIB);
  memset(w, 0, sizeof *w);
  w->config = *c;
  w->matmul = matmul;
  w->layers = (Layer*)xcalloc(c->n_layers, sizeof(Layer));
  bool ok = matrix_open(w, d, &w->embed, c->vocab_size, c->dim, false) &&
            fill_matrix(w, d, &w->embed, &m->embed, 0, 0);
  w->head = w->embed;
  if (!c->tied)
    ok = ok && matrix_open(w, d, &w->head, c->vocab_size, c->dim, false) &&
         fill_matrix(w, d, &w->head, &m->head, 0, 0);
  for (int i = 0; i < c->n_layers && ok; i++) ok = layer_open(w, d, &w->layers[i], &m->layers[i]);
  float* angles = (float*)xcalloc((size_t)positions * c->head_dim, sizeof(float));
  rope_table(c, positions, angles);
  w->final_norm = ok ? floats_open(d, &m->final_norm, NULL, c->dim) : NULL;
  w->rope = ok ? floats_open(d, NULL, angles, (size_t)positions * c->head_dim) : NULL;
  free(angles);
  if (w->final_norm && w->rope) return true;
  file_error(err, c->name, "does not fit: the device refused memory for its weights");
  weights_close(w, d);
  return false;
}

#define BS_VERSION "0.1.0"

// Writes one line for a person. Always false, for `return say(...)` where something is refused.
__attribute__((format(printf, 3, 4))) static bool say(char* to, size_t n, const char* text, ...) {
  va_list args;
  va_start(args, text);
  vsnprintf(to, n, text, args);
  va_end(args);
  for (char* end; (end = strchr(to, '\n')) != NULL;) *end = ' ';
  return false;
}

// ---- Metrics: a mean hides the requests that waited, and large batches hurt the tail first, so
// latency is reported as percentiles (article 1, section 3: "P95 or P99, not only the average").

// Percentile p (0..100) of n ascending values by linear interpolation, numpy's default.
static double percentile(const double* sorted, int n, double p) {
  if (n == 0) return NAN;
  double at = (n - 1) * p / 100;
  int below = (int)at;
  int above = below + 1 < n ? below + 1 : below;
  return sorted[below] + (sorted[above] - sorted[below]) * (at - below);
}

static int compare_doubles(const void* a, const void* b) {
  double x = *(const double*)a;
  double y = *(const double*)b;
  return (x > y) - (x < y);
}

// Sorts `values`. NaN is an undefined sample (TPOT of a one-token output) and does not count.
static Percentiles percentiles_of(double* values, int n) {
  int kept = 0;
  for (int i = 0; i < n; i++) {
    if (!isnan(values[i])) values[kept++] = values[i];
  }
  qsort(values, (size_t)kept, sizeof *values, compare_doubles);
  Percentiles p = {percentile(values, kept, 50), percentile(values, kept, 95),
                   percentile(values, kept, 99), kept};
  return p;
}

static double at_percentile(Percentiles p, int percentile) {
  return percentile == 50 ? p.p50 : percentile == 95 ? p.p95 : p.p99;
}

// Knee: which batch size to run. Not the largest that fits: the last one before memory, the latency
// target or the tail gives way, or the one where throughput stops paying (article 1, section 5).

static const char* const stop_names[] = {"memory", "slo", "jump", "plateau", "end"};  // StopRule

// How a quantity that went from x to y changed per doubling of the batch: 2 = it doubled too.
static double per_doubling(double x, double y, const SweepRow* from, const SweepRow* to) {
  return pow(y / x, 1 / log2((double)to->batch / from->batch));
}

// Rules a, b and c, in this order: may the walk step on row i? An unmeasured latency is NaN, which
// compares false and breaks nothing.
static bool may_step_on(const SweepRow* rows, int i, KneeRules rules, Knee* k) {
  const SweepRow* r = &rows[i];
  const char* slo_text = "batch %d would break the %s SLO: P%d %.2f ms > %g ms";
  size_t size = sizeof k->why;
  int q = rules.percentile;
  double ttft = at_percentile(r->ttft, q);
  double tpot = at_percentile(r->tpot, q);
  k->rule = STOP_MEMORY;
  if (r->status != ROW_OK) {
    return say(k->why, size, "batch %d did not fit: %s", r->batch, r->reason);
  }
  if (100 * r->mem_used_mib > rules.watermark_pct * r->mem_limit_mib) {
    return say(k->why, size, "batch %d would use %.2f of %.2f GiB, over the %g%% watermark",
               r->batch, r->mem_used_mib / 1024, r->mem_limit_mib / 1024, rules.watermark_pct);
  }
  k->rule = STOP_SLO;
  if (rules.slo_ttft_ms > 0 && ttft > rules.slo_ttft_ms) {
    return say(k->why, size, slo_text, r->batch, "TTFT", q, ttft, rules.slo_ttft_ms);
  }
  if (rules.slo_tpot_ms > 0 && tpot > rules.slo_tpot_ms) {
    return say(k->why, size, slo_text, r->batch, "TPOT", q, tpot, rules.slo_tpot_ms);
  }
  if (i == 0) return true;
  // A doubling of the batch at most doubles a step's work; 10% is noise, the rest is queueing.
  double jump = per_doubling(at_percentile(r[-1].tpot, q), tpot, r - 1, r);
  k->rule = STOP_JUMP;
  if (!(jump > 2.2)) return true;
  return say(k->why, size, "from batch %d to %d TPOT P%d jumps to %.2f ms, %.2fx per doubling",
             r[-1].batch, r->batch, q, tpot, jump);
}

// Rule d: does a later row that ran grow by min_gain_pct per doubling over row i? Every one is
// asked, since throughput dips where kernels switch, and a dip is not a plateau.
static bool grows_after(const SweepRow* rows, int n, int i, KneeRules rules, Knee* k) {
  double best = -INFINITY;
  for (int j = i + 1; j < n; j++) {
    double ratio = per_doubling(rows[i].output_tok_s, rows[j].output_tok_s, &rows[i], &rows[j]);
    if (rows[j].status == ROW_OK && ratio > best) best = ratio;
  }
  double gain = 100 * (best - 1);
  k->rule = STOP_PLATEAU;
  if (isinf(best) || gain >= rules.min_gain_pct) return true;
  return say(k->why, sizeof k->why, "no batch above %d gains %g%% per doubling (at best %+.1f%%)",
             rows[i].batch, rules.min_gain_pct, gain);
}

// PRECONDITION: rows ascend strictly by batch. The walk stands on a row that breaks no rule; there
// it asks d first (stay here?), then a, b and c of the next row (may I step up?).
static Knee knee(const SweepRow* rows, int n, KneeRules rules) {
  Knee k = {-1, -1, -1, STOP_END, "no batch size was measured"};
  for (int i = 0; i < n && may_step_on(rows, i, rules, &k); i++) {
    k.working = i;
    if (!grows_after(rows, n, i, rules, &k)) break;
    k.rule = STOP_END;
    say(k.why, sizeof k.why, "batch %d is the largest measured and breaks no rule", rows[i].batch);
  }
  k.start = k.working > 0 ? k.working - 1 : k.working;

  double first = 0;  // tokens/s per sequence of the first row that ran
  for (int i = 0; i < n; i++) {
    if (rows[i].status != ROW_OK) continue;
    double each = rows[i].output_tok_s / rows[i].batch;
    if (first == 0) first = each;
    if (each / first > 0.2) k.second_opinion = i;
  }
  return k;
}

// Files: sweep.csv with every row, config.json with the choice (article 1, section 6). Scripts rely
// on the names in them: add, never rename.

static const char* const status_names[] = {"ok", "skipped", "oom"};  // RowStatus
static const char* const bound_names[] = {"memory (weights)", "memory (KV)", "compute", "overhead"};

// Bytes of the UTF-8 character at s; 0 if a control or not UTF-8 (a byte-level model writes both).
static int utf8_length(const unsigned char* s) {
  if (s[0] < 0xc2 || s[0] > 0xf4) return s[0] >= 0x20 && s[0] < 0x80;
  int n = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
  int two = s[0] << 8 | s[1];  // overlong forms, surrogates and codes over 0x10ffff show in them
  bool overlong = (two >= 0xe000 && two < 0xe0a0) || (two >= 0xf000 && two < 0xf090);
  if (overlong || (two >= 0xeda0 && two < 0xee00) || two >= 0xf490) return 0;
  for (int i = 1; i < n; i++) {
    if ((s[i] & 0xc0) != 0x80) return 0;
  }
  return n;
}

static void put_json_string(FILE* f, const char* text) {
  fputc('"', f);
  for (const unsigned char* s = (const unsigned char*)text; *s;) {
    int n = utf8_length(s);
    if (n == 0) fprintf(f, "\\u%04x", *s);
    if (*s == '"' || *s == '\\') fputc('\\', f);
    fwrite(s, 1, (size_t)n, f);
    s += n > 0 ? n : 1;
  }
  fputc('"', f);
}

// Writes fields such as "'batch': %d, 'user_tok_s': %g, 'bound': %s": their names as a CSV header,
// their values as a CSV row, or all as JSON. A number that is NaN or 0 is undefined and left out.
typedef enum { HEADER, CSV, JSON } Form;
__attribute__((format(printf, 3, 4))) static void put(FILE* f, Form form, const char* fields, ...) {
  va_list args;
  va_start(args, fields);
  for (bool in_name = false; *fields; fields++) {
    char kind = *fields == '%' ? *++fields : '\0';
    if (*fields == '\'') in_name = !in_name;
    if (kind == 's') {
      const char* text = va_arg(args, const char*);
      if (form == CSV) fprintf(f, strchr(text, ',') ? "\"%s\"" : "%s", text);
      if (form == JSON) put_json_string(f, text);
    } else if (kind != '\0') {
      double value = kind == 'd' ? va_arg(args, int) : va_arg(args, double);
      bool defined = isfinite(value) && value != 0;
      if (form != HEADER && defined) fprintf(f, "%.9g", value);
      if (form == JSON && !defined) fputs("null", f);
    } else if (form == JSON || *fields == ',' || (form == HEADER && in_name && *fields != '\'')) {
      fputc(form == JSON && *fields == '\'' ? '"' : *fields, f);
    }
  }
  va_end(args);
}

// What is known of one batch size: a line of sweep.csv, and `measured` in config.json.
static void put_sweep_row(FILE* f, Form form, const SweepRow* r) {
  put(f, form,
      "'batch': %d, 'input_len': %d, 'output_len': %d, 'repeats': %d, 'status': %s, 'reason': %s,\n"
      "'output_tok_s': %g, 'user_tok_s': %g, 'prefill_tok_s': %g, 'ttft_p50_ms': %g,\n"
      "'ttft_p95_ms': %g, 'ttft_p99_ms': %g, 'tpot_p50_ms': %g, 'tpot_p95_ms': %g,\n"
      "'tpot_p99_ms': %g, 'itl_p50_ms': %g, 'itl_p95_ms': %g, 'itl_p99_ms': %g, 'e2e_p50_ms': %g,\n"
      "'e2e_p95_ms': %g, 'e2e_p99_ms': %g, 'n_itl': %d, 'n_requests': %d, 'step_us': %g,\n"
      "'roof_us': %g, 'roof_pct': %g, 'mbu_pct': %g, 'mfu_pct': %g, 'bound': %s,\n"
      "'mem_weights_mib': %g, 'mem_kv_mib': %g, 'mem_work_mib': %g, 'mem_other_mib': %g,\n"
      "'mem_used_mib': %g, 'mem_limit_mib': %g, 'noreuse_us': %g, 'step_bytes': %g,\n"
      "'step_flops': %g",
      r->batch, r->input_len, r->output_len, r->repeats, status_names[r->status], r->reason,
      r->output_tok_s, r->user_tok_s, r->prefill_tok_s, r->ttft.p50, r->ttft.p95, r->ttft.p99,
      r->tpot.p50, r->tpot.p95, r->tpot.p99, r->itl.p50, r->itl.p95, r->itl.p99, r->e2e.p50,
      r->e2e.p95, r->e2e.p99, r->itl.n, r->n_requests, r->step_us, r->roof_us, r->roof_pct,
      r->mbu_pct, r->mfu_pct, r->roof_us > 0 ? bound_names[r->bound] : "", r->mem_weights_mib,
      r->mem_kv_mib, r->mem_work_mib, r->mem_other_mib, r->mem_used_mib, r->mem_limit_mib,
      r->noreuse_us, r->step_bytes, r->step_flops);
  fputc('\n', f);
  fflush(f);  // after a crash, the rows so far are in the file
}

static SweepRow no_row;  // all of it undefined

// Written as NAME.tmp and renamed on close, so that NAME is always a complete file.
typedef struct {
  FILE* f;
  char path[4200], tmp[4200];  // beyond PATH_MAX: a truncated path cannot be opened by accident
} ResultFile;

static bool result_open(ResultFile* r, const char* dir, const char* name, char* err) {
  snprintf(r->path, sizeof r->path, "%s/%s", dir, name);
  snprintf(r->tmp, sizeof r->tmp, "%s/%s.tmp", dir, name);
  r->f = fopen(r->tmp, "w");
  return r->f || say(err, ERR_LEN, "%.300s: cannot write: %s", r->tmp, strerror(errno));
}

static bool result_close(ResultFile* r, char* err) {
  bool written = !ferror(r->f);  // no earlier row failed
  if (fclose(r->f) == 0 && written && rename(r->tmp, r->path) == 0) return true;
  return say(err, ERR_LEN, "%.300s: cannot write: %s", r->path, strerror(errno));
}

// PRECONDITION: at least one row. Whatever would follow from a working point is null without one.
static bool write_config_json(const char* dir, const SweepReport* s, const char* dtype,
                              int step_tokens, char* err) {
  ResultFile file;
  if (!result_open(&file, dir, "config.json", err)) return false;
  const Knee* k = &s->knee;
  const KneeRules* rules = &s->rules;
  const SweepRow* r = k->working < 0 ? &no_row : &s->rows[k->working];
  const SweepRow* start = k->start < 0 ? &no_row : &s->rows[k->start];
  const SweepRow* second = k->second_opinion < 0 ? &no_row : &s->rows[k->second_opinion];
  int b = r->batch;
  int input = s->rows->input_len;  // the same in every row
  int output = s->rows->output_len;
  int context = input + output;
  int step = step_tokens > b ? step_tokens : b;  // each running sequence needs a token in a step
  double budget = (double)b * context;
  double timeout = ceil(3 * r->e2e.p99 / 1000);  // s; what takes longer is stuck
  char date[32];
  time_t now = time(NULL);
  strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
  put(file.f, JSON,
      "{\n'working_batch': %d,\n'start_batch': %d,\n'stopped_by': %s,\n'why': %s,\n"
      "'second_opinion_batch': %d,\n"
      "'limits': {\n'max_input_tokens': %d,\n'max_new_tokens': %d,\n'concurrency_cap': %d,\n"
      "'total_token_budget': %g,\n'request_timeout_s': %g,\n'memory_watermark_pct': %g\n},\n"
      "'slos': {\n'percentile': %d,\n'ttft_ms': %g,\n'tpot_ms': %g\n},\n"
      "'oom_policy': ['lower the dynamic batch', 'shorten the output', 'queue',"
      " 'never retry as is'],\n"
      "'fingerprint': {\n'model': %s,\n'dtype': %s,\n'device': %s,\n'input_len': %d,\n"
      "'output_len': %d,\n'date': %s\n},\n'measured': {\n",
      b, start->batch, stop_names[k->rule], k->why, second->batch, input, output, b, budget,
      timeout, rules->watermark_pct, rules->percentile, rules->slo_ttft_ms, rules->slo_tpot_ms,
      s->model, dtype, s->device, input, output, date);
  if (b > 0) put_sweep_row(file.f, JSON, r);
  put(file.f, JSON, "},\n'engine_flags': {\n");
  // The same as options of the servers that readers will use, so that the result outlives bs.
  const char* flags =
      "'vllm': '--max-num-seqs %d --max-num-batched-tokens %d --max-model-len %d"
      " --gpu-memory-utilization %g',\n"
      "'sglang': '--max-running-requests %d --chunked-prefill-size %d --context-length %d',\n"
      "'tensorrt_llm': '--max_batch_size %d --max_num_tokens %d --max_seq_len %d',\n"
      "'llama_cpp': '--parallel %d --batch-size %d --ctx-size %g'\n";
  if (b > 0) {
    put(file.f, JSON, flags, b, step, context, rules->watermark_pct / 100, b, step, context, b,
        step, context, b, step, budget);
  }
  put(file.f, JSON, "}\n}\n");
  return result_close(&file, err);
}

// Table: one line per batch size with throughput, latency, memory and the bound side by side, since
// no single one of them decides (article 1, section 5; article 2, section 4.4).

// Beside P50 stands the percentile that the rules judge by.
static void print_table_header(FILE* f, KneeRules rules) {
  int q = rules.percentile;
  fprintf(f, "batch     tok/s tok/s/user TTFT p50   p%d ms TPOT p50   p%d ms     n", q, q);
  fprintf(f, " step us roof us roof%%  MBU%%  MFU%% mem GiB  bound\n");
}

static void print_row(FILE* f, const SweepRow* r, KneeRules rules) {
  char line[256];
  int q = rules.percentile;
  if (r->status != ROW_OK) {
    fprintf(f, "B=%d %s: %s\n", r->batch, status_names[r->status], r->reason);
    return;
  }
  snprintf(line, sizeof line,
           "%5d%10.1f%11.1f%9.2f%9.2f%9.2f%9.2f%6d%8.0f%8.0f%6.1f%6.1f%6.1f%8.2f", r->batch,
           r->output_tok_s, r->user_tok_s, r->ttft.p50, at_percentile(r->ttft, q), r->tpot.p50,
           at_percentile(r->tpot, q), r->n_requests, r->step_us, r->roof_us, r->roof_pct,
           r->mbu_pct, r->mfu_pct, r->mem_used_mib / 1024);
  for (char* nan = line; (nan = strstr(nan, "nan")) != NULL;) memcpy(nan, "  -", 3);
  fprintf(f, "%s  %s\n", line, r->roof_us > 0 ? bound_names[r->bound] : "-");
}

static void print_knee(FILE* f, const SweepReport* s) {
  const Knee* k = &s->knee;
  int q = s->rules.percentile;
  if (k->working < 0) {
    fprintf(f, "No working point: even the smallest batch breaks a rule.\n");
  } else {
    const SweepRow* r = &s->rows[k->working];
    fprintf(f, "Working point: batch %d, %.1f tok/s", r->batch, r->output_tok_s);
    double tpot = at_percentile(r->tpot, q);
    if (r->tpot.n > 0) fprintf(f, ", TPOT P%d %.2f ms (n = %d)", q, tpot, r->tpot.n);
    fprintf(f, ". Start point: batch %d.\n", s->rows[k->start].batch);
  }
  fprintf(f, "Stopped by %s: %s.\n", stop_names[k->rule], k->why);
  if (k->second_opinion < 0) return;
  fprintf(f, "Second opinion: batch %d, the largest", s->rows[k->second_opinion].batch);
  fprintf(f, " that keeps over 20%% of the first batch's tokens/s per sequence.\n");
}

// Options: one table gives the parser, the defaults and --help, so that they cannot disagree. What
// may vary between runs, and what is held fixed, is article 1, section 3.

// A command is bit i of an option's `commands`, i its place in this list.
static const char command_names[] = "sweep|generate";
enum { CMD_SWEEP = 1, CMD_GENERATE = 2, CMD_ALL = 3, MAX_BATCHES = 32, MAX_PROMPTS = 256 };

typedef struct {
  int command;
  const char *command_name, *device, *model, *matmul, *percentile, *prompts_file, *out;
  const char* prompts[MAX_PROMPTS];
  int n_prompts, n_batches, batches[MAX_BATCHES];   // batches ascend
  int input_len, output_len, repeats, step_tokens;  // 0, as model "": chosen for the device
  int seed;
  uint64_t vram;  // bytes; 0: all there is
  double temperature;
  KneeRules rules;
  bool json, quiet, help, version;
} Options;

typedef enum { INT, REAL, SIZE, LIST, PROMPT, TEXT, CHOICE, FLAG, HEADING } OptionType;
typedef struct {
  const char *name, *arg, *def;  // def is parsed like a given value; "": the field stays zero
  OptionType type;
  size_t offset;
  double lo, hi;
  int commands;
  const char* help;
} Option;

#define AT(field) offsetof(Options, field)
static const Option option_table[] = {
    {"\nMachine", "", "", HEADING, 0, 0, 0, CMD_ALL, ""},
    {"--device", "auto|cuda|cpu", "auto", CHOICE, AT(device), 0, 0, CMD_ALL, "auto: a GPU if any"},
    {"--model", "DIR|PRESET", "", TEXT, AT(model), 0, 0, CMD_ALL, "(default: fits the device)"},
    {"--matmul", "auto|naive|gemv|mma", "auto", CHOICE, AT(matmul), 0, 0, CMD_ALL, "GPU kernel"},
    {"--vram", "512M|6.5G|...", "", SIZE, AT(vram), 1e6, 1e18, CMD_ALL,
     "pretend memory is smaller"},
    {"\nWorkload", "", "", HEADING, 0, 0, 0, CMD_ALL, ""},
    {"--batches", "1,2,4,...", "", LIST, 0, 1, 32768, CMD_SWEEP, "batch sizes to measure"},
    {"--input-len", "N", "", INT, AT(input_len), 1, 1e6, CMD_SWEEP,
     "prompt tokens of a request (CPU 32, GPU 128)"},
    {"--output-len", "N", "", INT, AT(output_len), 1, 1e6, CMD_ALL,
     "new tokens (CPU 32, GPU 128; generate 512)"},
    {"--repeats", "N", "", INT, AT(repeats), 1, 1000, CMD_SWEEP, "runs per batch (CPU 1, GPU 3)"},
    {"--step-tokens", "N", "", INT, AT(step_tokens), 1, 32768, CMD_ALL,
     "most prompt tokens in a step (CPU 256, GPU 4096)"},
    {"--seed", "N", "0", INT, AT(seed), 0, 2e9, CMD_ALL, "of random weights, prompts, sampling"},
    {"\nRecommendation", "", "", HEADING, 0, 0, 0, CMD_SWEEP, ""},
    {"--slo-ttft", "MS", "", REAL, AT(rules.slo_ttft_ms), 0.001, 1e9, CMD_SWEEP, "longest TTFT"},
    {"--slo-tpot", "MS", "", REAL, AT(rules.slo_tpot_ms), 0.001, 1e9, CMD_SWEEP, "longest TPOT"},
    {"--percentile", "50|95|99", "95", CHOICE, AT(percentile), 0, 0, CMD_SWEEP, "judges latency"},
    {"--min-gain", "PCT", "10", REAL, AT(rules.min_gain_pct), 0.1, 100, CMD_SWEEP,
     "less throughput gained per doubling of the batch is a plateau"},
    {"--watermark", "PCT", "90", REAL, AT(rules.watermark_pct), 1, 100, CMD_SWEEP,
     "share of the memory that may be used"},
    {"\nText", "", "", HEADING, 0, 0, 0, CMD_GENERATE, ""},
    {"--prompt", "TEXT", "", PROMPT, 0, 1, MAX_PROMPTS, CMD_GENERATE,
     "text to continue; repeatable"},
    {"--prompts", "FILE", "", TEXT, AT(prompts_file), 0, 0, CMD_GENERATE, "prompts, one a line"},
    {"--temperature", "X", "0", REAL, AT(temperature), 0, 10, CMD_GENERATE, "0: likeliest token"},
    {"--json", "", "", FLAG, AT(json), 0, 0, CMD_GENERATE, "an object per prompt"},
    {"\nOutput", "", "", HEADING, 0, 0, 0, CMD_ALL, ""},
    {"--out", "DIR", "plots", TEXT, AT(out), 0, 0, CMD_SWEEP, "for CSV, JSON, PNG"},
    {"--quiet", "", "", FLAG, AT(quiet), 0, 0, CMD_ALL, "no progress line"},
    {"--help", "", "", FLAG, AT(help), 0, 0, CMD_ALL, "this text"},
    {"--version", "", "", FLAG, AT(version), 0, 0, CMD_ALL, "the version"},
};
#undef AT
enum { N_OPTIONS = sizeof option_table / sizeof option_table[0] };

static void print_help(FILE* f, int commands) {
  fputs(
      "bs measures how batch size trades memory and latency for throughput in LLM inference.\n\n"
      "bs [sweep]   measure batch 1,2,4,...: the curve, its knee, a config\n"
      "bs generate  continue prompts, all of them in one batch\n"
      "bs COMMAND --help lists only what it uses; --option=VALUE works too.\n",
      f);
  for (const Option* opt = option_table; opt < option_table + N_OPTIONS; opt++) {
    const char* format = *opt->def ? "  %-13s %-19s %s (default %s)\n" : "  %-13s %-19s %s\n";
    if (commands != 0 && !(opt->commands & commands)) continue;
    fprintf(f, opt->type == HEADING ? "%s\n" : format, opt->name, opt->arg, opt->help, opt->def);
  }
  fputs(
      "\nTTFT = first token - arrival, queueing included. E2E = last token - arrival.\n"
      "ITL = each gap between consecutive tokens, pooled over the requests.\n"
      "TPOT = (E2E - TTFT) / (output tokens - 1), of requests with two output tokens or more.\n"
      "tok/s = output tokens / (last finish - first arrival); per user: 1 / TPOT.\n"
      "Percentiles are interpolated linearly on the sorted values.\n"
      "Exit status: 0 done, 1 failed while running, 2 bad usage, 130 interrupted.\n",
      f);
}

// The place of text in "a|b|c"; -1 = not in it.
static int choice_index(const char* choices, const char* text) {
  for (int i = 0;; i++) {
    size_t n = strcspn(choices, "|");
    if (n == strlen(text) && strncmp(choices, text, n) == 0) return i;
    if (choices[n] == '\0') return -1;
    choices += n + 1;
  }
}

// The numbers in "1,2,4", which must ascend; 0 = bad. Only a LIST has more than one. Stricter than
// strtod: no space, sign, hex, exponent, inf or nan.
static int parse_numbers(const char* text, const Option* opt, double* values) {
  const char* digits = opt->type == REAL || opt->type == SIZE ? "0123456789." : "0123456789";
  for (int n = 0; n < (opt->type == LIST ? MAX_BATCHES : 1); text++) {
    char* end;
    double value = strtod(text, &end);
    size_t length = strspn(text, digits);
    if (length == 0 || end != text + length) return 0;
    if (opt->type == SIZE) value *= *end == 'M' ? 0x1p20 : *end == 'G' ? 0x1p30 : 0;
    end += opt->type == SIZE;  // past the unit; without one the value is 0 and refused
    if (!(value >= opt->lo && value <= opt->hi) || (n > 0 && value <= values[n - 1])) return 0;
    values[n++] = value;
    text = end;
    if (*text != ',') return *text == '\0' ? n : 0;
  }
  return 0;
}

static bool set_option(Options* o, const Option* opt, const char* text, char* err) {
  void* field = (char*)o + opt->offset;
  double values[MAX_BATCHES];
  int n = opt->type <= LIST ? parse_numbers(text, opt, values) : 0;
  bool ok = opt->type > LIST || n > 0;
  if (opt->type == CHOICE) ok = choice_index(opt->arg, text) >= 0;
  if (opt->type == TEXT) ok = *text != '\0';
  if (opt->type == PROMPT) ok = *text != '\0' && o->n_prompts < MAX_PROMPTS;
  if (!ok && (opt->type == TEXT || opt->type == PROMPT)) {
    return say(err, ERR_LEN, "%s: %s", opt->name,
               *text ? "at most 256 of them" : "the text is empty");
  }
  if (!ok) {
    char range[80] = "";
    const char* order = opt->type == LIST ? ", ascending, at most 32 of them," : "";
    if (opt->hi > 0) snprintf(range, sizeof range, "%s from %.9g to %.9g", order, opt->lo, opt->hi);
    return say(err, ERR_LEN, "%s '%.80s': allowed is %s%s", opt->name, text, opt->arg, range);
  }
  if (opt->type == INT) *(int*)field = (int)values[0];
  if (opt->type == REAL) *(double*)field = values[0];
  if (opt->type == SIZE) *(uint64_t*)field = (uint64_t)values[0];
  if (opt->type == LIST) o->n_batches = n;
  for (int i = 0; i < n && opt->type == LIST; i++) o->batches[i] = (int)values[i];
  if (opt->type == FLAG) *(bool*)field = true;
  if (opt->type == TEXT || opt->type == CHOICE) *(const char**)field = text;
  if (opt->type == PROMPT) o->prompts[o->n_prompts++] = text;
  return true;
}

// False: err names the argument and what is allowed. With --help alone `command` is 0.
static bool parse_options(int argc, char** argv, Options* o, char* err) {
  bool seen[N_OPTIONS] = {false};
  bool named = argc > 1 && argv[1][0] != '-';
  memset(o, 0, sizeof *o);
  o->model = "";
  o->command_name = named ? argv[1] : "sweep";
  int command = choice_index(command_names, o->command_name);
  if (command < 0) return say(err, ERR_LEN, "bs %.80s: allowed is %s", argv[1], command_names);
  for (int i = 0; i < N_OPTIONS; i++) {
    const Option* opt = &option_table[i];
    if (*opt->def && !set_option(o, opt, opt->def, err)) return false;
  }
  for (int i = named ? 2 : 1; i < argc; i++) {
    char* name = argv[i];
    char* value = strchr(name, '=');
    if (value) *value++ = '\0';
    int at = 0;
    while (at < N_OPTIONS && strcmp(name, option_table[at].name) != 0) at++;
    if (at == N_OPTIONS) return say(err, ERR_LEN, "unknown option '%.80s': see bs --help", name);
    const Option* opt = &option_table[at];
    bool flag = opt->type == FLAG;
    if (!flag && !value && i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0) value = argv[++i];
    if (flag == (value != NULL)) return say(err, ERR_LEN, "write it as %s %s", name, opt->arg);
    if (seen[at] && opt->type != PROMPT) return say(err, ERR_LEN, "%s is given twice", name);
    seen[at] = true;
    if (!set_option(o, opt, value, err)) return false;
    bool applies = opt->commands & 1 << command;
    if (!applies) return say(err, ERR_LEN, "%s is not for bs %s", name, o->command_name);
  }
  o->rules.percentile = atoi(o->percentile);
  o->command = named || !o->help ? 1 << command : 0;
  if (o->help || o->version) return true;
  if (strcmp(o->device, "cpu") == 0 && strcmp(o->matmul, "auto") != 0) {
    return say(err, ERR_LEN, "--matmul %s needs a GPU: --device cpu allows auto", o->matmul);
  }
  if (o->command == CMD_GENERATE && (o->n_prompts > 0) == (o->prompts_file != NULL)) {
    return say(err, ERR_LEN, "bs generate needs either --prompt TEXT or --prompts FILE");
  }
  return true;
}
// ---- The sweep: one row per batch size, everything else held fixed (article 1, sections 3 and 5).

typedef struct {
  Device device;
  Model model;
  Weights weights;
} Session;

static void on_interrupt(int signal_number) {
  interrupted = signal_number;
}

// A stand-in text: ids drawn from a hash of (seed, request, position).
static void make_request(Request* r, const Config* c, int n_prompt, int max_new, uint32_t seed,
                         int index) {
  memset(r, 0, sizeof *r);
  r->n_prompt = n_prompt;
  r->max_new = max_new;
  r->seed = hash32(seed ^ hash32((uint32_t)index));
  r->tokens = (int*)xcalloc((size_t)n_prompt + max_new, sizeof(int));
  r->time = (double*)xcalloc(max_new, sizeof(double));
  for (int i = 0; i < n_prompt; i++)
    r->tokens[i] = (int)(hash32(r->seed + (uint32_t)i) % (uint32_t)c->vocab_size);
}

static void free_requests(Request* r, int n) {
  for (int i = 0; i < n; i++) {
    free(r[i].tokens);
    free(r[i].time);
  }
  free(r);
}

typedef struct {  // latencies of all requests of a row, in ms
  double *ttft, *tpot, *itl, *e2e;
  int n, n_tpot, n_itl;
} Samples;

static void add_samples(Samples* s, const Request* r) {
  double first = r->time[0], last = r->time[r->n_new - 1];
  s->ttft[s->n] = 1e3 * (first - r->arrival);
  s->e2e[s->n++] = 1e3 * (last - r->arrival);
  if (r->n_new > 1) s->tpot[s->n_tpot++] = 1e3 * (last - first) / (r->n_new - 1);
  for (int i = 1; i < r->n_new; i++) s->itl[s->n_itl++] = 1e3 * (r->time[i] - r->time[i - 1]);
}

// What limits the decode step, from the numbers: the larger roof, unless most of the time is
// explained by neither.
static Bound find_bound(const Device* d, const StepTotals* s) {
  if (s->roof < 0.5 * s->seconds) return BOUND_OVERHEAD;
  if (s->flops / d->rate > (s->weight_bytes + s->kv_bytes) / d->bandwidth) return BOUND_COMPUTE;
  return s->kv_bytes > s->weight_bytes ? BOUND_KV : BOUND_WEIGHTS;
}

static void fill_memory(SweepRow* row, const Device* d) {
  double used = (double)d->api->used(), tagged = 0;
  for (int i = 0; i < N_MEM; i++) tagged += (double)d->tagged[i];
  row->mem_weights_mib = d->tagged[MEM_WEIGHTS] / MIB;
  row->mem_kv_mib = d->tagged[MEM_KV] / MIB;
  row->mem_work_mib = d->tagged[MEM_WORK] / MIB;
  row->mem_other_mib = (used - tagged) / MIB;
  row->mem_used_mib = used / MIB;
  row->mem_limit_mib = d->limit / MIB;
}

static void fill_speed(SweepRow* row, const Device* d, const StepTotals* prefill,
                       const StepTotals* decode) {
  row->prefill_tok_s = prefill->tokens / prefill->seconds;
  row->step_us = row->roof_us = row->noreuse_us = row->step_bytes = row->step_flops = NAN;
  row->roof_pct = row->mbu_pct = row->mfu_pct = NAN;
  if (decode->n == 0) return;  // one-token outputs: prompts only
  double bytes = decode->weight_bytes + decode->kv_bytes;
  row->step_us = 1e6 * decode->seconds / decode->n;
  row->roof_us = 1e6 * decode->roof / decode->n;
  row->noreuse_us = 1e6 * decode->noreuse / decode->n;
  row->step_bytes = bytes / decode->n;
  row->step_flops = decode->flops / decode->n;
  row->roof_pct = 100 * decode->roof / decode->seconds;
  row->mbu_pct = 100 * bytes / decode->seconds / d->bandwidth;
  row->mfu_pct = 100 * decode->flops / decode->seconds / d->rate;
  row->bound = find_bound(d, decode);
}

static void progress(const Options* o, int batch, int done, int of, double start) {
  if (o->quiet || !isatty(2)) return;
  double left = done ? (now() - start) * (of - done) / done : 0;
  fprintf(stderr, "\rB=%-5d run %d of %d, about %.0f s left for this batch \033[K", batch, done, of,
          left);
  if (done == of) fprintf(stderr, "\r\033[K");
}

// Measures one batch size. False: interrupted before the row was complete.
static bool measure(Session* s, const Options* o, int batch, SweepRow* row) {
  const Config* c = &s->weights.config;
  int in = o->input_len, out = o->output_len, repeats = o->repeats;
  long tokens = (long)batch * in;
  EngineSize size = {tokens < o->step_tokens ? (int)tokens : o->step_tokens, batch, in + out, 0};
  Engine e;
  char err[ERR_LEN];
  row->status = engine_open(&e, &s->device, &s->weights, size, err);
  if (row->status != ROW_OK) {
    snprintf(row->reason, sizeof row->reason, "%.159s", err);
    return true;
  }
  Workload w = {(Request*)xcalloc(batch, sizeof(Request)), batch, size.max_tokens, false};
  for (int i = 0; i < batch; i++) make_request(&w.requests[i], c, in, out, (uint32_t)o->seed, i);
  size_t n = (size_t)batch * repeats;
  double* ms = (double*)xcalloc(n * (out + 3), sizeof *ms);
  Samples all = {ms, ms + n, ms + 3 * n, ms + 2 * n, 0, 0, 0};
  double start = now();
  RunStats stats = {{0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0}, 0, 0, 0, 0};
  run_requests(&e, &w, 0.5, &stats);  // warm-up, never counted
  memset(&stats, 0, sizeof stats);
  bool whole = !interrupted;
  for (int run = 0; run < repeats && whole; run++) {
    progress(o, batch, run, repeats, start);
    whole = run_requests(&e, &w, INFINITY, &stats);
    for (int i = 0; i < batch && whole; i++) add_samples(&all, &w.requests[i]);
  }
  progress(o, batch, repeats, repeats, start);
  row->output_tok_s = (double)n * out / stats.busy;
  row->ttft = percentiles_of(all.ttft, all.n);
  row->tpot = percentiles_of(all.tpot, all.n_tpot);
  row->itl = percentiles_of(all.itl, all.n_itl);
  row->e2e = percentiles_of(all.e2e, all.n);
  row->user_tok_s = 1e3 / row->tpot.p50;
  row->n_requests = all.n;
  fill_speed(row, &s->device, &stats.prefill, &stats.decode);
  fill_memory(row, &s->device);
  free(ms);
  free_requests(w.requests, batch);
  engine_close(&e);
  return whole;
}
// ---- Plots. What this section teaches: a chart needs no library. A picture is a grid of dots, 4 x
// 4 to a pixel; averaging a pixel's dots is anti-aliasing. Everything drawn is a box or a thick
// segment, letters too. A scale maps a value to a pixel, through log(value) where doublings should
// look equal. A label takes the nearest place without ink. The charts themselves are two tables.

// Okabe and Ito's colours, distinct to every common colour vision; dashes serve grey prints.
typedef enum { INK_NONE, INK_GRID, INK_DIM, INK_DARK, INK_BLUE, INK_GREEN, INK_GOLD, INK_RED } Ink;
static const int INK_RGB[] = {0xffffff, 0xe3e3e3, 0x5c5c5c, 0x222222,
                              0x0072b2, 0x009e73, 0xe69f00, 0xd55e00};
enum { DOTS = 4, MAX_W = 2400, MAX_H = 1600, LABEL_SIZE = 14, TITLE_SIZE = 23 };  // pixels
// The picture, an Ink each. Static: a long sweep must not end without memory to show its result.
static uint8_t dots[MAX_H * DOTS][MAX_W * DOTS], rgb[MAX_W * MAX_H * 3];

typedef struct {
  double x, y;
} Point;  // pixels, y down
typedef struct {
  double x0, y0, x1, y1;
} Box;
typedef struct {
  char s[480];
} Str;  // text returned by value: nothing to free

static Str format_str(const char* format, ...) {
  Str s;
  va_list args;
  va_start(args, format);
  vsnprintf(s.s, sizeof s.s, format, args);
  va_end(args);
  return s;
}

// 1234 -> 1.23k, 6e14 -> 600T; 1536 MiB -> 1.5 GiB: three digits are all that a reader can use.
static Str format_num(double v, bool mib) {
  int unit = mib ? 2 : 0;
  double step = mib ? 1024 : 1000;
  for (; fabs(v) >= 0.9995 * step && unit < 6; unit++) v /= step;
  if (isnan(v)) return format_str("n/a");
  return format_str("%.3g%s%.1s%s", v, mib ? " " : "", &"\0kMGTPE"[unit], mib ? "iB" : "");
}

// A pixel coordinate in dots, of which there are n pixels' worth; 0 for NaN.
static int to_dot(double v, int n) {
  return (int)fmin(fmax(round(v * DOTS), 0), n * DOTS);
}

static void fill_box(double x0, double y0, double x1, double y1, Ink ink) {
  int left = to_dot(x0, MAX_W), right = to_dot(x1, MAX_W), end = to_dot(y1, MAX_H);
  for (int y = to_dot(y0, MAX_H); y < end; y++)
    for (int x = left; x < right; x++) dots[y][x] = (uint8_t)ink;
}

// Every dot within r of the line from a to b, in dashes where dash > 0; none where a or b is NaN.
static void draw_segment(Point a, Point b, double r, double dash, Ink ink) {
  double ex = b.x - a.x, ey = b.y - a.y, length = sqrt(ex * ex + ey * ey);
  int left = to_dot(fmin(a.x, b.x) - r, MAX_W), right = to_dot(fmax(a.x, b.x) + r, MAX_W);
  int top = to_dot(fmin(a.y, b.y) - r, MAX_H), bottom = to_dot(fmax(a.y, b.y) + r, MAX_H);
  for (int y = top; y < bottom; y++)
    for (int x = left; x < right; x++) {
      double px = (x + 0.5) / DOTS - a.x, py = (y + 0.5) / DOTS - a.y;
      double t = fmin(fmax((px * ex + py * ey) / fmax(length * length, 1e-12), 0), 1);
      double dx = px - t * ex, dy = py - t * ey;
      bool in_dash = dash <= 0 || fmod(t * length, 2 * dash) <= dash;
      if (in_dash && dx * dx + dy * dy <= r * r) dots[y][x] = (uint8_t)ink;
    }
}

// The alphabet from ' ' to '~', one glyph per '|'. Two characters are a point: x a letter (a = 0),
// y one of 0..9 a..f = 0..15 or w..z = -4..-1; capitals are 14 high. A small letter is on the line,
// a capital pulls it (a quadratic curve, as in TrueType), and a space lifts the pen.
static const char GLYPHS[] =
    "|aea5 a0a0|aeab dedb|b0de g0ie a5k5 a9k9|ibIdAdA8J6J1A1a3 eff0|b0ke abAeFeF8A8ab g3G6L6L0G0g3"
    "|k0c9BbBeEeHeHbH9A7A0E0H0k6|aeab|dfAcA0dx|afDcD0ax|ddd7 acg8 a8gc|e2ea a6i6|b1ay|a6g6|a0a0|az"
    "ge|a5a9AeIei9i5I0A0a5|abeee0|aaAeIeI9a0i0|abAeHeH8d8 d8I8I0A0a3|g0gea4i4|heaea8B9I9I0A0a3|geA"
    "9a4A0I0I8A8a4|aeiec0|e8B8BeHeH8e8A8A0I0I8e8|c0I5iaIeAeA6I6ia|a0a0 a9a9|b0ay b9b9|iaa6i2|a8i8 "
    "a4i4|aai6a2|abAeHeH8d8d5 d0d0|j9J4M4NeHeAeA0H0l0 jaEaE4J4|a0fek0 b4j4|a0aefeJeJ7f7a7 f7K7K0f0"
    "a0|kbJeAeA0J0k3|a0aeeeKeK0e0a0|ieaea0i0 a7h7|ieaea0 a7h7|kbJeAeA0K0k6g6|a0ae k0ke a7k7|a0ae|h"
    "eh4H0A0a4|a0ae jea5 d8k0|aea0i0|a0aeg4mem0|a0aek0ke|a7AeLeL0A0a7|a0aefeJeJ6f6a6|a7AeLeL0A0a7 "
    "h4l0|a0aefeJeJ6f6a6 f6j0|ibIeAeA8J6J0A0a3|f0fe aeke|aea5A0K0k5ke|aef0ke|aed0hel0oe|a0je aej0|"
    "aef7ke f7f0|aejea0j0|cfafaxcx|aegz|afcfcxax|aadega|ayiy|aecc|a8BaHah6h0 h6d6A6A0d0G0h3|aea0 a"
    "7BaIaI0B0a3|h8GaAaA0G0h2|iei0 i7HaAaA0H0i3|a5i5IaAaA0G0h2|feCecbc0 aafa|iai0IwBway i7HaAaA0H0"
    "i3|aea0 a6BaHah6h0|aaa0 adad|dadzDwaw dddd|aea0 haa4 d6i0|aea3A0c0|aaa0 a6BaGag6g0 g6HaMam6m0"
    "|aaa0 a6BaHah6h0|a5AaIaI0A0a5|aaaw a7BaIaI0B0a3|iaiw i7HaAaA0H0i3|aaa0 a6Bafa|g8FaAaA6H4H0B0a"
    "2|cdc3C0f0 aafa|aaa4A0G0h4 hah0|aae0ia|aad0gaj0ma|a0ha aah0|aae0 iacw|aahaa0h0|efCfCca6C0Cxex"
    "|afax|afCfCce6C0Cxax|a5A8E8E4I4i7|";

// Draws a letter that starts at `at` and returns the way to the next; INK_NONE only measures.
static double draw_glyph(char letter, Point at, double size, Ink ink) {
  double unit = size / 14, r = size * (size > LABEL_SIZE ? 0.083 : 0.072), right = 0;
  const char* s = GLYPHS;
  for (int i = letter >= ' ' && letter <= '~' ? letter : '?'; i > ' '; i--) s = strchr(s, '|') + 1;
  Point lifted = {NAN, NAN}, from = lifted, pull = lifted;  // from there nothing is drawn
  for (bool pulled = false; *s != '|'; s += 2) {
    if (*s == ' ') from = pull = lifted;
    if (*s == ' ') s++;
    bool on = islower((unsigned char)s[0]) != 0;
    int gx = tolower((unsigned char)s[0]) - 'a';
    int gy = s[1] <= '9' ? s[1] - '0' : s[1] >= 'w' ? s[1] - 'z' - 1 : s[1] - 'a' + 10;
    Point p = {at.x + unit * gx, at.y - unit * gy}, last = from;
    Point end = {on ? p.x : (pull.x + p.x) / 2, on ? p.y : (pull.y + p.y) / 2};
    for (int i = 1; i <= 8 && ink != INK_NONE && (on || pulled); i++) {
      double t = i / 8.0, u = 1 - t;
      Point q = {u * u * from.x + 2 * u * t * pull.x + t * t * end.x,
                 u * u * from.y + 2 * u * t * pull.y + t * t * end.y};
      draw_segment(last, q, r, 0, ink);
      last = q;
    }
    if (on || pulled) from = end;
    pull = p;
    pulled = !on;
    right = fmax(right, gx);
  }
  return unit * (right + (letter == ' ' ? 6 : 4));
}

static double text_width(const char* s, double size) {
  Point p = {0, 0};
  for (; *s; s++) p.x += draw_glyph(*s, p, size, INK_NONE);
  return p.x - 4 * size / 14;
}

// Text with baseline y; x is its start (align 0), middle (0.5) or end (1). Shrinks to fit room.
static void draw_text(double x, double y, double align, double room, double size, Ink ink,
                      const char* s) {
  size *= fmin(1, room / fmax(text_width(s, size), 1));
  Point at = {round(x - align * text_width(s, size)), round(y)};  // whole pixels: sharp stems
  for (; *s; s++) at.x += draw_glyph(*s, at, size, ink);
}

typedef enum { SCALE_LINEAR, SCALE_MIB, SCALE_LOG2, SCALE_LOG10 } ScaleKind;
typedef struct {
  ScaleKind kind;
  double lo, hi, from, to;  // values, pixels
} Scale;
typedef struct {
  Box box, in;  // the whole chart; the plotting area
  Scale x, y;
} Axes;

static Axes new_axes(Box b, double margin, ScaleKind x, ScaleKind y) {
  Box in = {b.x0 + 84, b.y0 + TITLE_SIZE + 72, b.x1 - margin, b.y1 - 62};
  Axes a = {b, in, {x, INFINITY, 0, in.x0, in.x1}, {y, INFINITY, 0, in.y1, in.y0}};
  return a;
}

// Widens the scale to show v > 0 and some room around it; a linear scale begins at zero.
static void include_value(Scale* s, double v) {
  double pad = s->kind < SCALE_LOG2 ? 1.15 : s->kind == SCALE_LOG2 ? 1.5 : 2;
  if (!(v > 0 && v < 1e30)) return;
  s->lo = s->kind < SCALE_LOG2 ? 0 : fmin(s->lo, v / pad);
  s->hi = fmax(s->hi, v * pad);
}

static double to_pixel(const Scale* s, double v) {
  double t = s->kind < SCALE_LOG2 ? v / s->hi : log(v / s->lo) / log(s->hi / s->lo);
  return s->from + t * (s->to - s->from);
}

// The next round value: in steps of a power of two, or doubled, or 1 2 5 of every decade.
static double next_tick(const Scale* s, double v) {
  if (s->kind < SCALE_LOG2) return v + pow(2, ceil(log2(s->hi / 7)));
  bool two = s->kind == SCALE_LOG10 && fabs(v / pow(10, floor(log10(v))) - 2) < 0.01;
  return two ? 2.5 * v : 2 * v;
}

static void draw_axes(const Axes* a, const char* title, const char* x_name, const char* y_name) {
  const Box *b = &a->box, *in = &a->in;
  static const double FIRST[] = {0, 0, 1, 1e-9};  // for every ScaleKind
  double room = b->x1 - b->x0;
  draw_text(b->x0, b->y0 + TITLE_SIZE, 0, room, TITLE_SIZE, INK_DARK, title);
  draw_text(b->x0, b->y0 + TITLE_SIZE + 44, 0, room, LABEL_SIZE, INK_DIM, y_name);
  draw_text((in->x0 + in->x1) / 2, in->y1 + 58, 0.5, room, LABEL_SIZE, INK_DIM, x_name);
  for (double v = FIRST[a->y.kind]; v < a->y.hi; v = next_tick(&a->y, v)) {
    if (v < a->y.lo) continue;
    double at = round(to_pixel(&a->y, v));
    Str name = format_num(v, a->y.kind == SCALE_MIB);
    fill_box(in->x0, at - 1, in->x1, at, INK_GRID);
    draw_text(in->x0 - 8, at + 7, 1, in->x0 - b->x0, LABEL_SIZE, INK_DIM, name.s);
  }
  for (double v = FIRST[a->x.kind]; v < a->x.hi; v = next_tick(&a->x, v)) {
    if (v < a->x.lo) continue;
    double at = round(to_pixel(&a->x, v));
    fill_box(at - 1, in->y1, at + 1, in->y1 + 7, INK_DARK);
    draw_text(at, in->y1 + 28, 0.5, room, LABEL_SIZE, INK_DIM, format_num(v, false).s);
  }
  fill_box(in->x0, in->y1, in->x1, in->y1 + 2, INK_DARK);
}

// Puts a label beside p, in the nearest of 64 places that has no ink; false where none is free.
static bool place_label(const Axes* a, Point p, Ink ink, const char* s) {
  static const Point WAY[] = {{1, 0}, {1, -1}, {1, 1}, {0, -1}, {-1, -1}, {-1, 0}, {0, 1}, {-1, 1}};
  double w = text_width(s, LABEL_SIZE) / 2 + 4, h = LABEL_SIZE / 2 + 5;
  bool is_free = false;
  for (int i = 0; i < 64 && !is_free; i++) {
    double gap = 8 * (i / 8 + 1), x = p.x + WAY[i % 8].x * (w + gap);
    double y = p.y + WAY[i % 8].y * (h + gap);
    is_free = x - w > a->in.x0 && x + w < a->box.x1 && y - h > a->in.y0 - 16 && y + h < a->in.y1;
    for (int d = to_dot(y - h, MAX_H); d < to_dot(y + h, MAX_H) && is_free; d++)
      for (int e = to_dot(x - w, MAX_W); e < to_dot(x + w, MAX_W) && is_free; e++)
        is_free = dots[d][e] <= INK_GRID;
    if (is_free) draw_text(x, y + LABEL_SIZE / 2, 0.5, 2 * w, LABEL_SIZE, ink, s);
  }
  return is_free;
}

// What the charts read: from a row, then from the rules and the probe. Memory adds up part by part.
enum { V_BATCH, V_TOK, V_ROOF, V_NOREUSE, V_WORK, V_FLOPS, V_WEIGHTS, V_KV, V_ACT, V_USED };
enum { V_TPOT50 = 10, V_TPOT95, V_TPOT99, V_TPOT, V_TTFT50, V_TTFT95, V_TTFT99, V_SLO_TPOT };
enum { V_SLO_TTFT = 18, V_MARK, V_LIMIT, V_BEND, V_PEAK };

static double row_value(const SweepReport* r, int i, int v) {
  const SweepRow* w = &r->rows[i];
  Percentiles p = w->tpot, f = w->ttft;
  double n = w->batch, tok = w->output_tok_s, roof = n / w->roof_us * 1e6;
  double noreuse = n / w->noreuse_us * 1e6, chosen = at_percentile(p, r->rules.percentile);
  double work = w->step_flops / w->step_bytes, flops = w->step_flops / w->step_us * 1e6;
  double weights = w->mem_weights_mib, kv = weights + w->mem_kv_mib, act = kv + w->mem_work_mib;
  double used = act + w->mem_other_mib, limit = w->mem_limit_mib;
  double mark = limit * r->rules.watermark_pct / 100;
  double slo1 = r->rules.slo_tpot_ms, slo2 = r->rules.slo_ttft_ms;
  double ridge = r->rate / r->bandwidth;  // the roof: from the first row to the ridge and past it
  double bend = i == 0 ? work : i == 1 ? ridge : fmax(2 * ridge, work);
  double peak = fmin(bend * r->bandwidth, r->rate);
  const double values[] = {n,     tok,  roof,  noreuse, work,  flops,  weights, kv,
                           act,   used, p.p50, p.p95,   p.p99, chosen, f.p50,   f.p95,
                           f.p99, slo1, slo2,  mark,    limit, bend,   peak};
  bool ran = w->status == ROW_OK || v == V_BATCH || v >= V_SLO_TPOT;
  return ran && isfinite(values[v]) && values[v] > 0 ? values[v] : NAN;
}

enum { AS_BAR = -1, AS_SOLID, AS_DOTS = 4, AS_LIMIT = 9, AS_DASHES };  // length of a dash, pixels
static const struct Chart {
  const char *file, *x_name, *y_name, *finding;
  int of, x, y;  // V_... of the finding's ratio; of the points that are marked
} CHARTS[] = {
    {"throughput.png", "batch size", "output tokens/s",
     "Batch %d gives %s times the tokens/s of batch %d", V_TOK, V_BATCH, V_TOK},
    {"latency.png", "batch size", "ms to the first token (TTFT), ms per further token (TPOT)",
     "Batch %d takes %s times the time per token of batch %d", V_TPOT, V_BATCH, V_TPOT},
    {"memory.png", "batch size", "device memory", "Batch %d uses %s times the memory of batch %d",
     V_USED, V_BATCH, V_USED},
    {"roofline.png", "FLOP per byte moved", "FLOP/s",
     "Batch %d does %s times the work per byte of batch %d", V_WORK, V_WORK, V_FLOPS},
    {"frontier.png", "time per output token, ms: left and up is better", "output tokens/s",
     "Batch %d trades %s times the time per token of batch %d for throughput", V_TPOT, V_TPOT,
     V_TOK},
};
static const struct Series {
  int chart, x, y, shape, ink;  // CHARTS[chart], V_..., AS_..., INK_...
  const char* name;
} SERIES[] = {
    {0, V_BATCH, V_TOK, AS_SOLID, INK_BLUE, "achieved"},
    {0, V_BATCH, V_ROOF, AS_DASHES, INK_DARK, "roofline"},
    {0, V_BATCH, V_NOREUSE, AS_DOTS, INK_RED, "no weight reuse"},
    {1, V_BATCH, V_TPOT50, AS_SOLID, INK_BLUE, "TPOT P50"},
    {1, V_BATCH, V_TPOT95, AS_DASHES, INK_BLUE, "TPOT P95"},
    {1, V_BATCH, V_TPOT99, AS_DOTS, INK_BLUE, "TPOT P99"},
    {1, V_BATCH, V_TTFT50, AS_SOLID, INK_GREEN, "TTFT P50"},
    {1, V_BATCH, V_TTFT95, AS_DASHES, INK_GREEN, "TTFT P95"},
    {1, V_BATCH, V_TTFT99, AS_DOTS, INK_GREEN, "TTFT P99"},
    {1, V_BATCH, V_SLO_TPOT, AS_LIMIT, INK_DARK, "SLO for TPOT:"},
    {1, V_BATCH, V_SLO_TTFT, AS_LIMIT, INK_DARK, "SLO for TTFT:"},
    {2, V_BATCH, V_WEIGHTS, AS_BAR, INK_BLUE, "weights"},
    {2, V_BATCH, V_KV, AS_BAR, INK_RED, "KV cache"},
    {2, V_BATCH, V_ACT, AS_BAR, INK_GREEN, "activations, workspace"},
    {2, V_BATCH, V_USED, AS_BAR, INK_DIM, "framework, lost"},
    {2, V_BATCH, V_LIMIT, AS_LIMIT, INK_DARK, "limit"},
    {2, V_BATCH, V_MARK, AS_LIMIT, INK_DARK, "watermark"},
    {3, V_WORK, V_FLOPS, AS_SOLID, INK_BLUE, "achieved"},
    {3, V_BEND, V_PEAK, AS_SOLID, INK_DARK, "roofline"},
    {4, V_TPOT, V_TOK, AS_SOLID, INK_BLUE, "achieved"},
    {4, V_SLO_TPOT, V_TOK, AS_LIMIT, INK_DARK, "SLO"},
};
enum { N_CHARTS = sizeof CHARTS / sizeof CHARTS[0], N_SERIES = sizeof SERIES / sizeof SERIES[0] };

static Point row_point(const Axes* a, const SweepReport* r, int i, int x, int y) {
  Point p = {to_pixel(&a->x, row_value(r, i, x)), to_pixel(&a->y, row_value(r, i, y))};
  return p;
}

// Draws a line through the rows, or bars from zero; then, in a second call, names it at its last
// point, or an earlier one. A limit gets its value; far above the chart it is only a name.
static void draw_series(const Axes* a, const SweepReport* r, const struct Series* s, bool name) {
  double half = 0.2 * (to_pixel(&a->x, 2) - to_pixel(&a->x, 1));  // 0.4 doublings wide
  Point last = {NAN, NAN};
  for (int i = r->n_rows - 1; i >= 0; i--) {
    Point p = row_point(a, r, i, s->x, s->y);
    bool limit = s->shape == AS_LIMIT, bar = s->shape == AS_BAR, drawn = !name && p.y >= a->in.y0;
    if (drawn && bar) {
      fill_box(p.x - half, p.y - 2, p.x + half, p.y, INK_NONE);  // parts them in grey, too
      fill_box(p.x - half, p.y, p.x + half, a->in.y1, (Ink)s->ink);
    } else if (drawn) {
      draw_segment(last, p, limit ? 1 : 1.8, s->shape, (Ink)s->ink);
      if (!limit && s->x != V_BEND) draw_segment(p, p, 5, 0, (Ink)s->ink);
    } else if (name && !isnan(p.y)) {
      double v = row_value(r, i, s->x == V_SLO_TPOT ? s->x : s->y);
      Str value = format_num(v, a->y.kind == SCALE_MIB);
      const char* format = !limit ? "%s" : p.y < a->in.y0 ? "%s %s, off the chart" : "%s %s";
      Point at = {bar ? p.x + half : p.x, fmax(p.y, a->in.y0)};
      if (place_label(a, at, (Ink)s->ink, format_str(format, s->name, value.s).s)) return;
    }
    if (s->shape != AS_LIMIT || isnan(last.x + last.y)) last = p;  // one line of regular dashes
  }
}

// Names the working point, what does not fit and, where x is not the batch, the other points.
static void name_points(const Axes* a, const SweepReport* r, const struct Chart* chart) {
  for (int i = r->n_rows - 1; i >= 0; i--) {
    bool working = i == r->knee.working;
    Point p = row_point(a, r, i, chart->x, chart->y), foot = {p.x, a->in.y1 - 20};
    if (working || chart->x != V_BATCH) {
      Str batch = format_str(working ? "working point: batch %d" : "%d", r->rows[i].batch);
      place_label(a, p, working ? INK_DARK : INK_DIM, batch.s);
    } else if (r->rows[i].status != ROW_OK) {
      draw_text(p.x, a->in.y1 - 6, 0.5, 99, TITLE_SIZE, INK_RED, "x");
      bool first = i == 0 || r->rows[i - 1].status == ROW_OK;
      if (first) place_label(a, foot, INK_RED, "does not fit");
    }
  }
}

static Str sweep_title(const SweepReport* r, Str t) {
  if (r->knee.working < 0) t = format_str("No working point: %s", r->knee.why);
  return format_str("%s%s", r->simulated ? "Simulated. " : "", t.s);
}

static void draw_chart(Box b, const SweepReport* r, int w, int chart) {
  const struct Chart* c = &CHARTS[chart];
  Axes a = new_axes(b, 210, c->x == V_BATCH ? SCALE_LOG2 : SCALE_LOG10,
                    c->y == V_USED ? SCALE_MIB : SCALE_LOG10);
  for (int k = 0; k < N_SERIES; k++)
    for (int i = 0; i < r->n_rows && SERIES[k].chart == chart; i++) {
      double y = row_value(r, i, SERIES[k].y), far = c->y == V_USED ? 4 * a.y.hi : INFINITY;
      include_value(&a.x, row_value(r, i, SERIES[k].x));
      if (SERIES[k].shape != AS_LIMIT || far <= 0 || y < far) include_value(&a.y, y);
    }
  Str ratio = format_num(row_value(r, w, c->of) / row_value(r, 0, c->of), false);
  Str title = format_str(c->finding, r->rows[w].batch, ratio.s, r->rows[0].batch);
  if (w == 0) title = format_str("Batch %d is the working point", r->rows[w].batch);
  if (w > 0 && strcmp(ratio.s, "n/a") == 0) title = format_str("Not measured: %s", c->y_name);
  draw_axes(&a, sweep_title(r, title).s, c->x_name, c->y_name);
  for (int k = N_SERIES - 1; k >= 0; k--)
    if (SERIES[k].chart == chart) draw_series(&a, r, &SERIES[k], false);
  Point p = row_point(&a, r, w, c->x, c->y);
  if (r->knee.working >= 0) draw_segment(p, p, 11, 0, INK_DARK);
  if (r->knee.working >= 0) draw_segment(p, p, 8, 0, INK_GOLD);
  for (int k = 0; k < N_SERIES; k++)
    if (SERIES[k].chart == chart) draw_series(&a, r, &SERIES[k], true);
  name_points(&a, r, c);
}

static void draw_summary(Box b, const SweepReport* r, int w) {
  double room = b.x1 - b.x0, width = (room - 60) / 2, height = (b.y1 - b.y0 - 188) / 2;
  Str head = format_str("%s on %s: run batch %d", r->model, r->device, r->rows[w].batch);
  Str tok = format_num(row_value(r, w, V_TOK), false);
  Str ms = format_num(row_value(r, w, V_TPOT), false);
  Str tip = format_str("Expect %s tokens/s, P%d %s ms/token.", tok.s, r->rules.percentile, ms.s);
  draw_text(b.x0, b.y0 + 36, 0, room, 36, INK_DARK, sweep_title(r, head).s);
  if (r->knee.working >= 0) draw_text(b.x0, b.y0 + 86, 0, room, 21, INK_DARK, tip.s);
  for (int k = 0; k < 4; k++) {
    double x = b.x0 + k % 2 * (width + 60), y = b.y0 + 140 + k / 2 * (height + 48);
    Box panel = {x, y, x + width, y + height};
    draw_chart(panel, r, w, k);
  }
}

// Draws the charts and then the summary, and puts each into dir, whole or not at all.
static bool plot_sweep(const SweepReport* r, const char* dir, char* err) {
  int working = r->knee.working < 0 ? 0 : r->knee.working, size = 0;
  for (int k = 0; k <= N_CHARTS && r->n_rows > 0; k++) {
    int w = k < N_CHARTS ? 1600 : MAX_W, h = k < N_CHARTS ? 1000 : MAX_H;
    const SweepRow* row = &r->rows[working];
    Box page = {36, 32, w - 36.0, h - 96.0};
    ResultFile file;
    if (!result_open(&file, dir, k < N_CHARTS ? CHARTS[k].file : "summary.png", err)) return false;
    memset(dots, INK_NONE, sizeof dots);
    if (k < N_CHARTS) draw_chart(page, r, working, k);
    if (k == N_CHARTS) draw_summary(page, r, working);
    Str foot = format_str("%s on %s: %d tokens in, %d out; %d requests at batch %d", r->model,
                          r->device, row->input_len, row->output_len, row->n_requests, row->batch);
    draw_text(36, h - 54, 0, w - 72, LABEL_SIZE, INK_DIM, foot.s);
    foot = format_str("Why it stops: %s", r->knee.why);
    draw_text(36, h - 28, 0, w - 72, LABEL_SIZE, INK_DIM, foot.s);
    for (int i = 0; i < w * h * 3; i++) {
      int x = i / 3 % w * DOTS, y = i / 3 / w * DOTS, shift = 16 - i % 3 * 8, sum = 0;
      for (int d = 0; d < DOTS * DOTS; d++)
        sum += INK_RGB[dots[y + d / DOTS][x + d % DOTS]] >> shift & 255;
      rgb[i] = (uint8_t)(sum / (DOTS * DOTS));
    }
    uint8_t* png = stbi_write_png_to_mem(rgb, 3 * w, w, h, 3, &size);
    if (!png) die("no memory to write %s", file.path);
    fwrite(png, 1, (size_t)size, file.f);  // result_close() sees an error
    free(png);
    if (!result_close(&file, err)) return false;
  }
  return true;
}
// ---- Commands.

// One line and an exit status: 1 failed, 2 refused before any work, since it can never run.
static int give_up(int status, const char* why) {
  fprintf(stderr, "bs: %s\n", why);
  return status;
}

static Matmul matmul_of(const char* name) {
  int i = choice_index("naive|gemv|mma", name);
  return i < 0 ? MATMUL_MMA : (Matmul)i;
}

static bool open_device(Session* s, const Options* o, char* err) {
  bool cpu = strcmp(o->device, "cpu") == 0, cuda = strcmp(o->device, "cuda") == 0;
  snprintf(err, ERR_LEN, "no CUDA in this build: it was made without nvcc");
  if (!cpu && cuda_backend && device_open(&s->device, cuda_backend, o->vram, err)) return true;
  if (cuda) return false;
  if (!cpu) printf("device: the CPU, because there is %s\n", err);
  return device_open(&s->device, &cpu_backend, o->vram, err);
}

// Without --model: the largest preset that leaves room for its batches, small enough for a CPU
// where there is no GPU.
static const char* choose_model(const Session* s, const Options* o) {
  if (*o->model) return o->model;
  if (o->command == CMD_GENERATE) return "weights/tiny";
  if (s->device.api == &cpu_backend) {
    printf(
        "model: cpu-90m, whose 176 MB of weights exceed a CPU's caches, so that batch 1 is "
        "memory-bound (--model chooses)\n");
    return "cpu-90m";
  }
  bool large = s->device.limit >= (size_t)5 << 30;
  printf("model: %s, because its weights take less than half of %.1f GiB (--model chooses)\n",
         large ? "llama-3.2-1b" : "smollm2-135m", s->device.limit / GIB);
  return large ? "llama-3.2-1b" : "smollm2-135m";
}

static bool open_model(Session* s, const Options* o, char* err) {
  const char* name = choose_model(s, o);
  const Config* preset = find_preset(name);
  if (preset && random_model(preset, (uint32_t)o->seed, &s->model)) return true;
  struct stat st;
  if (stat(name, &st) == 0) return load_model(name, &s->model, err);
  int n = snprintf(err, ERR_LEN, "%.200s is neither a directory nor a preset; presets:", name);
  for (int i = 0; i < N_PRESETS; i++) n += snprintf(err + n, ERR_LEN - n, " %s", presets[i].name);
  return false;
}

// What the command line left open, by device: a sweep should take a minute or so.
static void fill_defaults(Options* o, bool cuda) {
  if (!o->input_len) o->input_len = cuda ? 128 : 32;
  if (!o->output_len) o->output_len = o->command == CMD_GENERATE ? 512 : cuda ? 128 : 32;
  if (!o->step_tokens) o->step_tokens = cuda ? 4096 : 256;
  if (!o->repeats) o->repeats = cuda ? 3 : 1;
}

static bool prepare_out(const char* dir, char* err) {
  if (mkdir(dir, 0777) == 0 || errno == EEXIST) return true;
  snprintf(err, ERR_LEN, "%.300s: cannot make the output directory: %s", dir, strerror(errno));
  return false;
}

static int sweep_rows(Session* s, const Options* o, SweepRow* rows, ResultFile* csv) {
  static const int defaults[] = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  int n = o->n_batches ? o->n_batches : s->device.api != &cpu_backend ? 9 : 7, done = 0;
  print_table_header(stdout, o->rules);
  for (int i = 0; i < n && !interrupted; i++) {
    SweepRow* row = &rows[done];
    memset(row, 0, sizeof *row);
    row->batch = o->n_batches ? o->batches[i] : defaults[i];
    row->input_len = o->input_len;
    row->output_len = o->output_len;
    row->repeats = o->repeats;
    if (!measure(s, o, row->batch, row)) break;
    put_sweep_row(csv->f, CSV, row);
    print_row(stdout, row, o->rules);
    fflush(stdout);
    done++;
  }
  return done;
}

static int cmd_sweep(Session* s, const Options* o) {
  char err[ERR_LEN];
  const Config* c = &s->model.config;
  if ((long)o->input_len + o->output_len > c->max_context) {
    snprintf(err, sizeof err, "--input-len %d + --output-len %d exceeds %s's context of %d tokens",
             o->input_len, o->output_len, c->name, c->max_context);
    return give_up(2, err);
  }
  ResultFile csv;
  if (!prepare_out(o->out, err) || !result_open(&csv, o->out, "sweep.csv", err))
    return give_up(1, err);
  double start = now();
  if (!weights_open(&s->weights, &s->device, &s->model, matmul_of(o->matmul),
                    o->input_len + o->output_len, err)) {
    fclose(csv.f);
    remove(csv.tmp);
    return give_up(1, err);
  }
  printf("%s on %s: %.0f M parameters, loaded in %.1f s; %d prompt + %d new tokens\n", c->name,
         s->device.name, parameter_count(c) / 1e6, now() - start, o->input_len, o->output_len);
  printf(
      "probed ceilings: read %.1f GB/s, multiply %.2f TFLOP/s; memory %.1f GiB, limit %.1f GiB\n\n",
      s->device.bandwidth / 1e9, s->device.rate / 1e12, s->device.total / GIB,
      s->device.limit / GIB);
  put_sweep_row(csv.f, HEADER, &no_row);
  SweepRow rows[MAX_BATCHES];
  SweepReport report = {rows,           0,     {0, 0, 0, STOP_END, {0}}, o->rules,      c->name,
                        s->device.name, false, s->device.bandwidth,      s->device.rate};
  report.n_rows = sweep_rows(s, o, rows, &csv);
  if (report.n_rows == 0) {  // earlier results stay as they are
    fclose(csv.f);
    remove(csv.tmp);
  } else if (!result_close(&csv, err)) {
    return give_up(1, err);
  }
  if (report.n_rows > 0) {
    report.knee = knee(rows, report.n_rows, o->rules);
    if (interrupted)
      say(report.knee.why, sizeof report.knee.why,
          "interrupted after batch %d: larger ones are unknown", rows[report.n_rows - 1].batch);
    printf("\n");
    print_knee(stdout, &report);
    if (!write_config_json(o->out, &report, "fp16", o->step_tokens, err) ||
        !plot_sweep(&report, o->out, err))
      return give_up(1, err);
    printf(
        "\n%s/: sweep.csv config.json throughput.png latency.png memory.png roofline.png "
        "frontier.png summary.png\n",
        o->out);
  }
  weights_close(&s->weights, &s->device);
  return interrupted ? 130 : 0;
}

// Lines of a file as prompts; returns how many, or -1.
static int read_prompts(const char* path, const char** prompts, char* err) {
  FILE* f = fopen(path, "r");
  char* line = NULL;
  size_t cap = 0;
  int n = 0;
  ssize_t length;
  if (!f) {
    snprintf(err, ERR_LEN, "%.300s: cannot read: %s", path, strerror(errno));
    return -1;
  }
  while ((length = getline(&line, &cap, f)) >= 0) {
    while (length > 0 && strchr("\r\n", line[length - 1])) line[--length] = 0;
    if (length == 0) continue;
    if (n == MAX_PROMPTS) {
      snprintf(err, ERR_LEN, "%.300s: more than %d prompts", path, MAX_PROMPTS);
      n = -1;
      break;
    }
    prompts[n++] = strdup(line);
  }
  if (n == 0) snprintf(err, ERR_LEN, "%.300s: no prompt in it", path);
  free(line);
  fclose(f);
  return n > 0 ? n : -1;
}

static void print_continuation(const Request* r, bool json) {
  char *prompt = (char*)xcalloc((size_t)r->n_prompt + r->n_new + 2, 1),
       *text = prompt + r->n_prompt + 1;
  const int* new_tokens = r->tokens + r->n_prompt;
  for (int i = 0; i < r->n_prompt; i++) prompt[i] = (char)r->tokens[i];
  for (int i = 0; i < r->n_new - r->ended; i++) text[i] = (char)new_tokens[i];
  if (!json) printf("%s%s\n\n", prompt, text);
  if (json) put(stdout, JSON, "{'prompt': %s, 'text': %s, 'ids': [", prompt, text);
  for (int i = 0; i < r->n_new && json; i++) printf("%s%d", i ? ", " : "", new_tokens[i]);
  if (json) printf("], \"finish\": \"%s\"}\n", r->ended ? "eos" : "length");
  free(prompt);
}

static int cmd_generate(Session* s, const Options* o) {
  char err[ERR_LEN];
  const Config* c = &s->model.config;
  const char* prompts[MAX_PROMPTS];
  int n = o->n_prompts, longest = 0, out = o->output_len;
  for (int i = 0; i < n; i++) prompts[i] = o->prompts[i];
  if (o->prompts_file && (n = read_prompts(o->prompts_file, prompts, err)) < 0)
    return give_up(1, err);
  if (c->vocab_size != 256) {
    snprintf(
        err, sizeof err,
        "generate reads and writes bytes, so it needs a model with a vocabulary of 256; %s has %d",
        c->name, c->vocab_size);
    return give_up(2, err);
  }
  Workload w = {(Request*)xcalloc(n, sizeof(Request)), n, o->step_tokens, true};
  for (int i = 0; i < n; i++) {
    size_t bytes = strlen(prompts[i]);
    if (bytes + out > (size_t)c->max_context) {
      snprintf(err, sizeof err,
               "prompt %d has %zu bytes; with %d new ones it exceeds %s's context of %d", i + 1,
               bytes, out, c->name, c->max_context);
      return give_up(2, err);
    }
    int length = (int)bytes;
    longest = length > longest ? length : longest;
    make_request(&w.requests[i], c, length, out, (uint32_t)o->seed, i);
    w.requests[i].temperature = (float)o->temperature;
    for (int j = 0; j < length; j++) w.requests[i].tokens[j] = (unsigned char)prompts[i][j];
    if (o->prompts_file) free((void*)prompts[i]);
  }
  Engine e;
  RunStats stats;
  memset(&stats, 0, sizeof stats);
  EngineSize size = {o->step_tokens, n, longest + out, 0};
  if (!weights_open(&s->weights, &s->device, &s->model, matmul_of(o->matmul), longest + out, err))
    return give_up(1, err);
  if (engine_open(&e, &s->device, &s->weights, size, err) != ROW_OK) return give_up(1, err);
  run_requests(&e, &w, INFINITY, &stats);
  for (int i = 0; i < n; i++) print_continuation(&w.requests[i], o->json);
  engine_close(&e);
  free_requests(w.requests, n);
  weights_close(&s->weights, &s->device);
  return interrupted ? 130 : 0;
}

// OpenMP threads that spin at a barrier waste whole scheduler slices as soon as anything else runs:
// 586 ms a step instead of 9 with one busy process beside us (NOTES.md). The library reads its
// setting before main, so make it and start over, unless the user has chosen.
static void limit_spinning(char** argv) {
  if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
  if (setenv("GOMP_SPINCOUNT", "1000", 1) == 0) execv("/proc/self/exe", argv);
}

#ifdef BS_NO_MAIN
#define main bs_main  // tests include this file
#endif
int main(int argc, char** argv) {
  Options o;
  Session s;
  char err[ERR_LEN];
  limit_spinning(argv);
  memset(&s, 0, sizeof s);
  if (!parse_options(argc, argv, &o, err)) return give_up(2, err);
  if (o.help) return print_help(stdout, o.command), 0;
  if (o.version) return printf("bs %s\n", BS_VERSION), 0;
  struct sigaction action;  // the first Ctrl-C ends the run in good order, the second at once
  memset(&action, 0, sizeof action);
  action.sa_handler = on_interrupt;
  action.sa_flags = (int)SA_RESETHAND;
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  if (!open_device(&s, &o, err)) return give_up(1, err);
  if (s.device.api == &cpu_backend && strcmp(o.matmul, "auto") != 0)
    return give_up(2, "--matmul chooses a GPU kernel: the CPU has one of its own");
  if (!open_model(&s, &o, err)) return give_up(1, err);
  fill_defaults(&o, s.device.api != &cpu_backend);
  int status = o.command == CMD_GENERATE ? cmd_generate(&s, &o) : cmd_sweep(&s, &o);
  free_model(&s.model);
  device_close(&s.device);
  if (fflush(stdout) != 0 || ferror(stdout)) return give_up(1, "standard output: cannot write");
  return status;
}
#ifdef BS_NO_MAIN
#undef main
#endif
