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
//   GPU backend         kernels.h: the same forward pass as CUDA kernels
//   weights             from a checkpoint to what the device wants
//   metrics, knee       percentiles; the walk that finds the working point
//   files, table        sweep.csv, config.json, what is printed
//   options             one table for parser and --help
//   sweep               one row per batch size
//   plots               plots/plots.h: drawn by us, encoded by stb_image_write
//   commands, main
//
// It refuses what it cannot do right: see README.md. "Article 1" and "article 2" are the two that
// NOTES.md names.
// clang-format on
#include "model.h"
#include <signal.h>
#include <time.h>
#include <ctype.h>
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

typedef enum { POLICY_STATIC, POLICY_BUCKETED, POLICY_CONTINUOUS, N_POLICIES } Policy;

typedef struct {  // one stay of a request in a slot; a preempted request has several
  int slot, request;
  int batch;           // number of the static batch; -1 = continuous
  int prompt, padded;  // prompt tokens computed, without and with padding
  double start;        // seconds after the run's start: got its slot
  double first;        // first token of this stay; NaN = none
  double finish;       // its last own token, or the preemption
  double release;      // the slot was free again: static: end of the batch; else = finish
  bool preempted;
} Span;

typedef struct {  // a line of compare.csv
  Policy policy;
  int requests, completed, rejected, timed_out, preemptions, slots;
  double duration_s;  // first arrival to last finish
  double output_tok_s, request_per_s;
  double goodput_req_s;  // NaN without an SLO
  Percentiles ttft, tpot, itl, e2e;
  double occupancy_pct;  // share of slots x duration that work for an unfinished request
  double padding_pct;    // share of computed tokens that nobody wanted
  double kv_unused_pct;  // share of reserved KV positions that never held a request's token
  const Span* spans;     // by start
  int n_spans;
  const double *ttft_ms, *e2e_ms;  // ascending, ttft.n and e2e.n of them
} PolicyResult;

typedef struct {  // one spread of output lengths
  char name[48];
  double cv;  // standard deviation / mean
  double static_tok_s, continuous_tok_s;
  double ideal;  // longest of a batch / mean, from the lengths alone: what static batching wastes
} VariancePoint;

typedef struct {
  const PolicyResult* results;
  int n_results;
  const VariancePoint* points;
  int n_points;
  double slo_ttft_ms, slo_tpot_ms;  // 0 = none
  int percentile;
  const char *model, *device, *workload;
  bool simulated;
} CompareReport;

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

// Touched, so that it counts as resident from now on. Huge pages, where the system has them, make
// that twice as fast.
static void* cpu_alloc(size_t bytes) {
  const size_t huge = (size_t)2 << 20, unit = bytes < 4 * huge ? 64 : huge;
  char* p = (char*)aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
  if (p && unit == huge) madvise(p, bytes, MADV_HUGEPAGE);
  if (!p) return NULL;
  PARALLEL_FOR
  for (size_t at = 0; at < bytes; at += huge)
    memset(p + at, 0, bytes - at < huge ? bytes - at : huge);
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

// A tile of 8 rows, which every RowMap keeps together, is turned in the L1 cache: rows are read and
// columns are written in runs.
static void fill_tile(Matrix* m, const Tensor* from, RowMap map, int row, int col) {
  enum { ROWS = 8, COLS = 256 };
  f16 tile[ROWS][COLS];
  const int n_rows = from->rows - row < ROWS ? from->rows - row : ROWS;
  const int n_cols = from->cols - col < COLS ? from->cols - col : COLS;
  for (int r = 0; r < n_rows; r++)
    for (int c = 0; c < n_cols; c++)
      tile[r][c] = tensor_at(from, (size_t)(row + r) * from->cols + col + c);
  f16* to = m->w + panel_index(map_row(map, row), col, m->k);
  for (int c = 0; c < n_cols; c++)
    for (int r = 0; r < n_rows; r++) to[c * PANEL + r] = tile[r][c];
}

static bool cpu_fill(Matrix* m, const Tensor* from, RowMap map, bool packed) {
  (void)packed;  // there is one layout
  PARALLEL_FOR
  for (int first = 0; first < from->rows; first += PANEL)
    for (int col = 0; col < from->cols; col += 256)
      for (int row = first; row < from->rows && row < first + PANEL; row += 8)
        fill_tile(m, from, map, row, col);
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

#ifdef __CUDACC__
#include "kernels.h"
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
  for (int i = 0; i < c->n_layers && ok; i++) {
    ok = layer_open(w, d, &w->layers[i], &m->layers[i]);
    for (int j = 0; j < m->n_maps; j++) forget_pages(&m->maps[j]);
  }
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

static void put_json_bytes(FILE* f, const char* text, size_t length) {
  const char* end = text + length;
  fputc('"', f);
  while (text < end) {
    const unsigned char* s = (const unsigned char*)text;
    int n = utf8_length(s);
    if (n == 0) fprintf(f, "\\u%04x", *s);
    if (*s == '"' || *s == '\\') fputc('\\', f);
    fwrite(s, 1, (size_t)n, f);
    text += n > 0 ? n : 1;
  }
  fputc('"', f);
}

static void put_json_string(FILE* f, const char* text) {
  put_json_bytes(f, text, strlen(text));
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
  double load_start;  // seconds on now()'s clock
} Session;

static void on_interrupt(int signal_number) {
  interrupted = signal_number;
}

// A mapped file that shrinks, or a disk that fails, shows as this signal and not as an error code.
static void on_bus_error(int signal_number) {
  static const char why[] = "bs: a weight file cannot be read to its end: cut short meanwhile?\n";
  _exit(signal_number && write(2, why, sizeof why - 1) >= 0);
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
#include "plots/plots.h"
#include "weights/tokenizer.h"

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
  s->load_start = now();
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
  if (!weights_open(&s->weights, &s->device, &s->model, matmul_of(o->matmul),
                    o->input_len + o->output_len, err)) {
    fclose(csv.f);
    remove(csv.tmp);
    return give_up(1, err);
  }
  printf("%s on %s: %.0f M parameters, loaded in %.1f s; %d prompt + %d new tokens\n", c->name,
         s->device.name, parameter_count(c) / 1e6, now() - s->load_start, o->input_len,
         o->output_len);
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

// What the new tokens say, up to the one that ended them; special tokens are no text. To be freed.
static char* decode(const Tokenizer* t, const Request* r, size_t* length) {
  const int *ids = r->tokens + r->n_prompt, n = r->n_new - r->ended;
  *length = 0;
  for (int i = 0; i < n; i++) *length += (size_t)t->tokens[ids[i]].n;
  char *text = (char*)xcalloc(*length + 1, 1), *to = text;
  for (int i = 0; i < n; i++) {
    const Token* token = &t->tokens[ids[i]];
    if (token->special || token->n == 0) continue;
    memcpy(to, token->text, (size_t)token->n);
    to += token->n;
  }
  *length = (size_t)(to - text);
  return text;
}

static void print_continuation(const Tokenizer* t, const Request* r, const char* prompt,
                               bool json) {
  size_t length;
  char* text = decode(t, r, &length);
  if (!json) {
    fputs(prompt, stdout);
    fwrite(text, 1, length, stdout);
    fputs("\n\n", stdout);
  } else {
    put(stdout, JSON, "{'prompt': %s, 'text': ", prompt);
    put_json_bytes(stdout, text, length);
    printf(", \"ids\": [");
    for (int i = 0; i < r->n_new; i++) printf("%s%d", i ? ", " : "", r->tokens[r->n_prompt + i]);
    printf("], \"finish\": \"%s\"}\n", r->ended ? "eos" : "length");
  }
  free(text);
}

// Prompt i as a request. False: err says why it can never run.
static bool prompt_request(Request* r, const Tokenizer* t, const Config* c, const Options* o,
                           const char* prompt, int i, char* err) {
  const size_t bytes = strlen(prompt);
  int* ids = (int*)xcalloc(bytes + 4, sizeof(int));
  const int n = encode(t, prompt, bytes, ids, err), out = o->output_len;
  const bool fits = n >= 0 && (long)n + out <= c->max_context;
  if (n >= 0 && !fits)
    say(err, ERR_LEN, "prompt %d has %d tokens; with %d new ones it exceeds %s's context of %d",
        i + 1, n, out, c->name, c->max_context);
  if (fits) {
    make_request(r, c, n, out, (uint32_t)o->seed, i);
    r->temperature = (float)o->temperature;
    memcpy(r->tokens, ids, (size_t)n * sizeof(int));
  }
  free(ids);
  return fits;
}

static int generate_texts(Session* s, const Options* o, const Tokenizer* t, const char** prompts,
                          int n) {
  char err[ERR_LEN];
  int longest = 0, out = o->output_len;
  Workload w = {(Request*)xcalloc(n, sizeof(Request)), n, o->step_tokens, true};
  for (int i = 0; i < n; i++) {
    if (!prompt_request(&w.requests[i], t, &s->model.config, o, prompts[i], i, err))
      return give_up(2, err);
    longest = w.requests[i].n_prompt > longest ? w.requests[i].n_prompt : longest;
  }
  Engine e;
  RunStats stats;
  memset(&stats, 0, sizeof stats);
  EngineSize size = {o->step_tokens, n, longest + out, 0};
  if (!weights_open(&s->weights, &s->device, &s->model, matmul_of(o->matmul), longest + out, err))
    return give_up(1, err);
  if (engine_open(&e, &s->device, &s->weights, size, err) != ROW_OK) return give_up(1, err);
  run_requests(&e, &w, INFINITY, &stats);
  for (int i = 0; i < n; i++) print_continuation(t, &w.requests[i], prompts[i], o->json);
  engine_close(&e);
  free_requests(w.requests, n);
  weights_close(&s->weights, &s->device);
  return interrupted ? 130 : 0;
}

static int cmd_generate(Session* s, const Options* o) {
  char err[ERR_LEN], path[PATH_LEN];
  const Config* c = &s->model.config;
  const char *prompts[MAX_PROMPTS], *dir = choose_model(s, o);
  Tokenizer t;
  int n = o->n_prompts;
  for (int i = 0; i < n; i++) prompts[i] = o->prompts[i];
  if (o->prompts_file && (n = read_prompts(o->prompts_file, prompts, err)) < 0)
    return give_up(1, err);
  snprintf(path, sizeof path, "%s/tokenizer.json", dir);
  if (c->vocab_size != 256 && access(path, F_OK) != 0) {
    say(err, sizeof err,
        "generate needs a tokenizer.json beside the model, or a vocabulary of 256, which are "
        "bytes; "
        "%s has %d",
        c->name, c->vocab_size);
    return give_up(2, err);
  }
  if (!load_tokenizer(dir, c->vocab_size, &t, err)) return give_up(1, err);
  const int status = generate_texts(s, o, &t, prompts, n);
  for (int i = 0; i < n && o->prompts_file; i++) free((void*)prompts[i]);
  free_tokenizer(&t);
  return status;
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
  action.sa_handler = on_bus_error;
  sigaction(SIGBUS, &action, NULL);
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
