// clang-format off
// bs: how does batch size trade memory and latency for throughput when an LLM generates text, and
// which batch size should I run?
//
//   nvcc -O3 -std=c++17 -o bs bs.cu         both devices; the Makefile has the flags that matter
//   cc -x c -std=c11 -O3 -o bs-cpu bs.cu    the CPU alone; the same file
//   ./bs                                    measures batch 1, 2, 4, ... and writes plots/
//
// The map, top to bottom, after the structs of model.h (Matrix, Weights, KVCache, Batch). What a
// first reading can skip is in parts/, included where it stands:
//    60  rows and Backend   what a run measures and decides; a device is a struct of functions
//   200  platform shim      memory by purpose
//   337  ceilings           how fast this device can read and multiply
//   416  requests           what a client wants, and where it stands
//   446  KV cache           blocks of 16 tokens and who holds them
//   517  engine             a model on a device, with steps in flight
//   651  roofline           the work of a step, counted
//   702  scheduler          static, bucketed, continuous: who runs in the next step
//  1078  engine loop        plan, submit, collect
//  1251  CPU backend        submit = forward_cpu
//  1361  parts/sim.h        a device on a virtual clock; GPUs by name
//  1364  parts/kernels.h    the forward pass on a GPU (4 files): why 8 tokens cost as much as 1
//  1369  weights            from a checkpoint to what the device wants
//  1466  metrics            percentiles
//  1500  knee               the walk that finds the working point
//  1590  parts/interop.h    other tools' measurements and traces in, their options out
//  1591  parts/report.h     sweep.csv, config.json, compare.csv, the tables
//  1593  parts/options.h    one table for parser and --help
//  1595  sweep              one row per batch size
//  1744  parts/plots.h      drawn by us, encoded by stb_image_write
//  1745  parts/tokenizer.h  text to tokens and back
//  1747  commands           a device, a model, defaults; bs sweep
//  1946  parts/plan.h       bs plan and bs knee
//  1948  streams            lengths and arrivals, drawn or from a trace
//  1980  compare            one stream of requests through every policy
//  2502  parts/generate.h   bs generate; then main
//
// Who holds what: a Session has the Device, the Model (tensors as stored) and the Weights (as the
// device wants them). An Engine runs the Weights with a KV cache (BlockTable: who holds which
// block) and up to two Steps in flight. A Scheduler moves Requests from its queue into slots and
// fills a Planned step, whose Batch the Engine takes; RunStats and its Spans keep what happened. A
// sweep makes a SweepRow of that, compare a PolicyResult.
//
// It refuses what it cannot do right: see README.md. "Article 1" is "LLM 推理批量大小怎样在显存和吞吐
// 之间取舍", "article 2" is "深入理解LLM中的Batch Size"; NOTES.md checks what they claim.
// clang-format on
#include "model.h"
#include <signal.h>
#include <strings.h>
#include <time.h>
#define STB_IMAGE_WRITE_IMPLEMENTATION
#define STBI_WRITE_NO_STDIO
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#include <stb_image_write.h>
#pragma GCC diagnostic pop

#define BS_VERSION "0.1.0"

// ---- Rows and Backend: what a run measures and decides, before how. Read SweepRow and Backend.
// Of one request: TTFT is the time to its first token, TPOT the time per further token, ITL each
// gap between two, E2E all of it. Of a step: MBU and MFU are the bytes and FLOPs it needs as a
// share of what the probed ceilings allow in its time. SLO: a latency that somebody asks for.

typedef struct {
  double p50, p95, p99;
  int n;
} Percentiles;  // n samples behind them; NaN where n is 0
typedef enum { ROW_OK, ROW_SKIPPED, ROW_OOM } RowStatus;
typedef enum { BOUND_WEIGHTS, BOUND_KV, BOUND_COMPUTE, BOUND_OVERHEAD } Bound;

typedef struct {  // one line of sweep.csv; NaN (or 0 for ints): undefined, an empty cell
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
  bool simulated;  // column source: the same in all rows
} SweepRow;

typedef enum {
  STOP_MEMORY,
  STOP_SLO,
  STOP_JUMP,
  STOP_PLATEAU,
  STOP_END,       // no larger batch was asked for
  STOP_INTERRUPT  // or measured before Ctrl-C
} StopRule;
typedef struct {
  double slo_ttft_ms, slo_tpot_ms;  // 0 = none
  int percentile;                   // 50, 95 or 99
  double min_gain_pct;              // of tokens/s per doubling of the batch; less is a plateau
  double watermark_pct;             // share of mem_limit that may be used
} KneeRules;
typedef struct {
  int working, start;  // row indices; -1 = none
  int second_opinion;  // row index of the largest batch whose tokens/s per sequence are over 20%
                       // of the first row's; -1 = none
  StopRule rule;
  char why[200];  // for a person: "batch 128 would break the TPOT SLO: P95 31 ms > 25 ms"
} Knee;

typedef struct {  // everything a plot needs
  const SweepRow* rows;
  int n_rows;
  Knee knee;
  KneeRules rules;
  const char *model, *device;  // "llama-3.2-1b", "NVIDIA H200"
  bool simulated;
  double bandwidth, rate;  // probed ceilings: bytes/s, FLOP/s; 0 = unknown
  int cards;               // that the model is spread over
  bool fp8_kv;
} SweepReport;

typedef enum { POLICY_STATIC, POLICY_BUCKETED, POLICY_CONTINUOUS, N_POLICIES } Policy;
static const char* const policy_names[] = {"static", "bucketed", "continuous"};

typedef struct {  // one stay of a request in a slot; a preempted request has several
  int slot, request;
  int batch;           // number of the static batch; -1 = continuous
  int prompt, padded;  // prompt tokens computed, without and with padding
  double start;        // seconds after the run's start: its first step began
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
  const char *model, *device, *workload, *variance;  // variance: the workload of the points
  bool simulated;
} CompareReport;

// Three of the four parts of memory; the fourth is the rest.
typedef enum { MEM_WEIGHTS, MEM_KV, MEM_WORK, N_MEM } MemTag;
typedef struct Device Device;
typedef struct Engine Engine;
typedef struct Step Step;

// What a device must offer. cpu_backend and sim_backend always exist, cuda_backend in the nvcc
// build. Defaults and messages may ask which one it is; engine and scheduler never do.
typedef struct {
  bool (*open)(Device* d, char* err);          // fills in name and total
  double (*probe_bandwidth)(const Device* d);  // bytes/s
  double (*probe_rate)(const Device* d);       // FLOP/s
  size_t (*used)(void);                        // bytes in use, as the device reports it
  void* (*alloc)(size_t bytes);                // zeroed, or NULL
  void (*free)(void* p);
  void (*upload)(void* to, const void* from, size_t bytes);
  int row_multiple;             // rows of a matrix are padded to this: kernels know no edge
  int key_multiple;             // K of a cached key, too: an mma takes 32 numbers
  int kv_size;                  // bytes of a number in the cache: CPU 4, GPU 2 (see device_kv_size)
  int (*slices)(int n, int k);  // see Matrix; NULL = never
  bool (*fill)(Matrix* m, const Tensor* from, RowMap map, bool packed);
  bool (*engine_open)(Engine* e);  // working memory; false when it does not fit
  void (*engine_close)(Engine* e);
  void (*submit)(Engine* e, const Batch* b, Step* s);
  void (*collect)(Engine* e, Step* s);
  double (*clock)(Engine* e);             // seconds; a simulated device has a clock of its own
  void (*wait)(Engine* e, double until);  // on that clock; may return early
  void (*logits)(Engine* e, int rows,
                 float* out);  // [R, V] of the last step, if it read a prompt: for tests
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
  bool fp8_kv;            // --kv fp8: numbers of the cache in e4m3
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
  fflush(stdout);  // in a log of both the error comes last
  fprintf(stderr, "bs: ");
  vfprintf(stderr, format, args);
  fprintf(stderr, "\n");
  va_end(args);
  exit(1);
}

// Writes one line for a person. Always false, for `return say(...)` where something is refused.
__attribute__((format(printf, 3, 4))) static bool say(char* to, size_t n, const char* text, ...) {
  va_list args;
  va_start(args, text);
  vsnprintf(to, n, text, args);
  va_end(args);
  for (char* end; (end = strchr(to, '\n')) != NULL;) *end = ' ';
  return false;
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
  if (!p) return NULL;
  if (unit == huge) madvise(p, bytes, MADV_HUGEPAGE);
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

static const double PROBE_SECONDS = 0.5;  // a slow build or machine takes fewer rounds

static double cpu_probe_bandwidth(const Device* d) {
  (void)d;
  size_t bytes = (size_t)512 << 20;  // many times the last-level cache
  float* p;
  while (!(p = (float*)cpu_alloc(bytes)) && bytes > (size_t)32 << 20) bytes /= 2;
  if (!p) return 0;
  double best = 0, until = now() + PROBE_SECONDS;
  for (int round = 0; round < 2 || (round < 10 && now() < until); round++) {
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
  enum { ROUNDS = 20000 };  // some 5 ms
  double best = 0, until = now() + PROBE_SECONDS;
  for (int round = 0; round < 2 || (round < 15 && now() < until); round++) {
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
  if (d->bandwidth > 0 && d->rate > 0) return true;
  snprintf(err, ERR_LEN, "%s: too little memory is left to probe its speed", d->name);
  return false;
}

static void device_close(Device* d) {
  for (int tag = 0; tag < N_MEM; tag++) device_free_all(d, (MemTag)tag);
  free(d->list);
  d->list = NULL;
  d->cap_list = 0;
}

// ---- Requests: what a client asks for, and where it stands.

enum { MOST_TOKENS = 1000000 };  // of one prompt or output

typedef enum { QUEUED, RUNNING, FINISHED, REJECTED, TIMED_OUT } Status;

typedef struct {
  int n_prompt, max_new;
  int* tokens;        // [n_prompt + max_new] the prompt, then what was generated
  double* time;       // [max_new] when each new token was there, seconds on the device's clock
  double arrival;     // seconds after the run's start
  uint32_t seed;      // of its sampling noise
  float temperature;  // 0 = greedy
  Status status;      // QUEUED: waits, has not arrived yet, or was preempted
  int slot;           // place in the running batch; -1 = none
  // Where it stands, in tokens. A prompt of 5, for example:      n_given  n_read  n_cached
  //   is read, padded to the batch's longest, which is 8               5       8    0 to 8
  //   answers: new tokens overwrite the padding                        5       8    5, 6, 7, ...
  //   was preempted with 3 new tokens and is read again                8       8    0 to 8
  int n_given;    // tokens that the host hands over: the prompt and, after a preemption, the rest
  int n_read;     // n_given, or with padding the longest prompt of its static batch
  bool reading;   // in prefill: not all of n_read is computed yet
  int n_cached;   // positions whose KV is in the cache or on its way there
  int n_ordered;  // new tokens asked of the device; those not yet collected are known only there
  int n_new;      // new tokens collected
  bool ended;     // by the model's own end token
  int preemptions;
  int span;  // its latest stay in a slot
} Request;

// ---- The KV cache: blocks of 16 tokens, a block table per slot (PagedAttention, Kwon et al. 2023;
// article 2, section 4.3). engine_open allocates the pool. A sequence takes blocks for its prompt
// when it starts (start_request), another whenever it grows into it (make_room), and returns all
// when it leaves (leave): no fragmentation, nothing reserved for an answer that may be short. Only
// a static batch, as servers without paging do, takes blocks for the worst case at once.

typedef struct {
  int n_blocks, max_blocks, n_slots;  // in all; of one slot; slots
  int* free_list;                     // stack of blocks nobody holds
  int n_free;
  int* held;        // [slots] blocks of each slot
  int* table;       // [slots, max_blocks]
  bool changed;     // since the device last saw the table
  long fail_after;  // tests: the growth after this many is refused; -1 = none is
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
  b->fail_after = -1;
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
  int need = blocks_for(n_tokens);
  if (need > b->max_blocks || need - b->held[slot] > b->n_free) return false;
  if (need > b->held[slot] && b->fail_after >= 0 && b->fail_after-- == 0) return false;
  while (b->held[slot] < need) {
    b->table[(size_t)slot * b->max_blocks + b->held[slot]++] = b->free_list[--b->n_free];
    b->changed = true;
  }
  return true;
}

// The table keeps its old entries: nobody reads them before blocks_grow writes them again.
static void blocks_release(BlockTable* b, int slot) {
  while (b->held[slot] > 0)
    b->free_list[b->n_free++] = b->table[(size_t)slot * b->max_blocks + --b->held[slot]];
}

// kv_size: bytes of one number. 1 is fp8 (--kv fp8, GPU): numbers in e4m3 with a scale of two bytes
// for each token and head's K and V. Here it halves what is counted and allocated; parts/kernels.h
// has a kernel that quantises (rope_fp8_kernel) and widens what attention reads (widen).
static int kv_scale_size(int kv_size) {
  return kv_size == 1 ? 2 : 0;
}

static size_t kv_bytes_per_token(const Config* c, int kv_size) {
  int head = c->head_dim * kv_size + kv_scale_size(kv_size);
  return (size_t)2 * c->n_layers * c->n_kv_heads * head;
}

static int device_kv_size(const Device* d) {
  return d->fp8_kv ? 1 : d->api->kv_size;
}

// ---- The engine: a model on a device, with a cache, and steps in flight. engine_submit queues one
// step over a flat batch and returns; engine_collect waits for the oldest step and gives its
// tokens. Only the tokens come back: the next step already finds them on the device (id -1), so the
// host can run ahead and never stands in the way.

enum { IN_FLIGHT = 2 };
static const double GIB = 1073741824.0, MIB = 1048576.0;

// On a GPU a decode step is a recorded CUDA graph, one launch for all kernels. Recordings exist for
// these batch sizes, exact up to 8 and then coarser; a batch between two is padded to the larger.
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
  double submitted, end;  // seconds on the device's clock
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
  int submitted, collected;  // steps
  CpuScratch cpu;
  float* cpu_logits;  // [slots, padded V]
  int* cpu_sampled;   // [slots] the token each slot sampled last
  struct Gpu* gpu;
  double sim_now, sim_end;  // sim: the clock; when the last step submitted will be done
};

static void engine_kv_bytes(const Device* d, const Config* c, EngineSize s, size_t* k_bytes,
                            size_t* v_bytes) {
  size_t blocks =
      s.n_blocks ? (size_t)s.n_blocks : (size_t)s.max_slots * blocks_for(s.max_positions);
  size_t wide =  // numbers of a key as it is stored
      (c->head_dim + d->api->key_multiple - 1) / d->api->key_multiple * d->api->key_multiple;
  size_t rows = blocks * KV_BLOCK * c->n_layers * c->n_kv_heads;
  int size = device_kv_size(d), scale = kv_scale_size(size);
  *k_bytes = rows * (wide * size + scale);
  *v_bytes = rows * ((size_t)c->head_dim * size + scale);
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
  // A decode step may be padded to a recorded size.
  if (size.max_tokens < graph_size(size.max_slots)) size.max_tokens = graph_size(size.max_slots);
  e->size = size;
  d->refused = false;
  size_t k_bytes, v_bytes, used = d->api->used(), left = d->limit > used ? d->limit - used : 0;
  engine_kv_bytes(d, &w->config, size, &k_bytes, &v_bytes);
  if (k_bytes + v_bytes > left) {
    snprintf(err, ERR_LEN, "KV needs %.4g GiB, %.4g GiB left", (k_bytes + v_bytes) / GIB,
             left / GIB);
    return ROW_SKIPPED;
  }
  int max_blocks = blocks_for(size.max_positions);
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
  snprintf(err, ERR_LEN, "working memory does not fit beside %.4g GiB of KV: %.4g GiB left",
           (k_bytes + v_bytes) / GIB, left / GIB);
  if (d->refused)
    snprintf(err, ERR_LEN, "out of memory, although %.4g GiB were left for %.4g GiB of KV",
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
  s->submitted = e->device->api->clock(e);
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
  double reuse8_bytes;   // if weights that were read served 8 tokens: --matmul reuse
} Work;

static Work count_work(const Config* c, const Batch* b, int kv_size) {
  double D = c->dim, V = c->vocab_size, att = (double)c->n_heads * c->head_dim;
  double layer = D * qkv_width(c) + att * D + 3 * D * c->hidden_dim,
         kv = (double)kv_bytes_per_token(c, kv_size);
  Work w = {0, 0, 0, 0, 0};
  // A weight is 2 bytes, read once a step, and 2 FLOPs, done once a token: one number for both.
  double layers = 2 * c->n_layers * layer, head = b->n_rows ? 2 * V * D : 0;
  w.weight_bytes = layers + head + 2.0 * b->n_tokens * D;  // D: a row of the embedding table
  w.flops = layers * b->n_tokens + head * b->n_rows;
  w.noreuse_bytes = w.flops + 2.0 * b->n_tokens * D;
  w.reuse8_bytes =
      2.0 * b->n_tokens * D + layers * ((b->n_tokens + 7) / 8) + head * ((b->n_rows + 7) / 8);
  for (int t = 0; t < b->n_tokens; t++) {
    // Its own K and V are written; all earlier ones are read once for a slot's tokens of a step.
    bool last_of_slot = t + 1 == b->n_tokens || b->slot[t + 1] != b->slot[t];
    w.kv_bytes += kv + (last_of_slot ? kv * b->pos[t] : 0);
    w.flops += 4.0 * att * c->n_layers * (b->pos[t] + 1);  // q . k and p . v, 2 FLOPs each
  }
  w.noreuse_bytes += w.kv_bytes;
  w.reuse8_bytes += w.kv_bytes;
  return w;
}

typedef struct {  // steps of one kind, added up
  int n;
  double tokens, seconds, roof, noreuse, weight_bytes, kv_bytes, flops;
} StepTotals;

static void add_step(StepTotals* s, const Device* d, Work w, double n_tokens, double seconds) {
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

// ---- Scheduler: who runs in the next step. Three policies, one mechanism. They differ in admit(),
// who may start, and in what `together` means: all of a batch start, are read and leave at once.
//
//   static      a fixed batch (article 1, section 1): waits until it is full, pads all prompts to
//               the longest, computes every row until the longest output ends, reserves KV for
//               the worst case
//   bucketed    the same among requests of similar prompt length (article 1, section 4)
//   continuous  every step admits into free slots; who is done leaves at once (Orca, Yu et al.
//               2022; article 2, section 4.3)
//
// Padding and finished rows are really computed: they are the phenomenon.

typedef struct {            // what a server limits; 0 = no limit, except where said
  int max_batch;            // sequences at once (1 or more)
  int step_tokens;          // tokens in one step: prompts get what the decodes leave
  int max_input;            // a longer prompt is rejected
  int max_new;              // a longer output is rejected; static policies reserve this much
  int total_tokens;         // of prompt + max_new over the requests that run
  double timeout_s;         // a request that is not done this long after its arrival is dropped
  double batch_wait_s;      // static, bucketed: longest that an incomplete batch waits for more
  double kv_watermark_pct;  // continuous: share of the blocks kept free when one is admitted
} Limits;

static Limits batch_limits(int max_batch, int step_tokens) {
  Limits l = {max_batch, step_tokens, 0, 0, 0, 0, 0, 0};
  return l;
}

typedef struct {
  Request* requests;
  int n;  // ascending by arrival
  Policy policy;
  Limits limits;
  bool stop_at_eos;
  const char* progress;  // shown on a terminal while it runs; NULL = nothing
} Workload;

typedef struct {               // of all runs since the caller zeroed it
  StepTotals prefill, decode;  // steps with a part of a prompt, and without
  double start, end, seconds;  // of the last run, on the device's clock; of all runs
  int finished, preemptions, rejected, timed_out;
  Span* spans;  // for the caller to free
  int n_spans, cap_spans;
  double computed, wasted;      // tokens; padding and finished rows among them
  double kv_reserved, kv_held;  // positions, over all stays in a slot: reserved; with a token in
} RunStats;

typedef struct {  // a step between its plan and its results
  Batch batch;
  int* owner;   // [R] which request each row belongs to
  int group;    // the static batch it belongs to; -1 = continuous
  int n_spans;  // stays (see Span) that have begun by then
  bool decode;  // no part of a prompt in it
  Work work;
} Planned;

typedef struct {
  Engine* e;
  const Workload* w;
  RunStats* stats;
  int* queue;  // requests that wait, in order of arrival
  int n_queue;
  int* running;  // requests in slots, in order of admission
  int n_running;
  int* free_slots;  // stack
  int n_free;
  int* bucket_size;   // requests in the queue, by bucket
  int n_arrived;      // requests[0 .. n_arrived) have
  int dynamic_batch;  // how many may run: an out-of-memory lowers it, each one who leaves raises
                      // it by one until it is max_batch again
  int total;          // prompt + max_new of those that run
  int longest_new;    // longest output that any request may ask for
  int n_groups;       // static batches so far
  int first_span;     // of this run
  int n_begun;        // spans whose first step has been collected
  bool together;      // static or bucketed: requests start together and leave together
} Scheduler;

enum { BUCKET_WIDTH = 128 };      // prompt tokens, as in article 1, section 4
static const double TICK = 1e-6;  // s: a wait until t may end, by rounding, a little before t

static int bucket_of(const Scheduler* s, const Request* r) {
  return s->w->policy == POLICY_BUCKETED ? (r->n_prompt - 1) / BUCKET_WIDTH : 0;
}

// Positions that a request may come to hold. A static batch cannot know an output's length.
static int worst_case(const Scheduler* s, const Request* r, int n_prompt) {
  int positions = n_prompt + (s->together ? s->longest_new : r->max_new);
  return positions < s->e->size.max_positions ? positions : s->e->size.max_positions;
}

// By itself, on an empty device.
static bool can_ever_run(const Scheduler* s, const Request* r) {
  const Limits* l = &s->w->limits;
  int total = r->n_prompt + r->max_new;
  return (l->max_input == 0 || r->n_prompt <= l->max_input) &&
         (l->max_new == 0 || r->max_new <= l->max_new) &&
         (l->total_tokens == 0 || total <= l->total_tokens) && total <= s->e->size.max_positions &&
         blocks_for(total) <= s->e->blocks.n_blocks &&
         blocks_for(worst_case(s, r, r->n_prompt)) <= s->e->blocks.n_blocks;
}

// In order of arrival: a preempted request gets its place back.
static void enqueue(Scheduler* s, int i) {
  int at = s->n_queue++;
  for (; at > 0 && s->queue[at - 1] > i; at--) s->queue[at] = s->queue[at - 1];
  s->queue[at] = i;
  s->bucket_size[bucket_of(s, &s->w->requests[i])]++;
}

static Request* dequeue(Scheduler* s, int at) {
  Request* r = &s->w->requests[s->queue[at]];
  s->bucket_size[bucket_of(s, r)]--;
  s->n_queue--;
  memmove(s->queue + at, s->queue + at + 1, (size_t)(s->n_queue - at) * sizeof(int));
  return r;
}

// t: seconds since the run's start, here and below.
static void arrive(Scheduler* s, double t) {
  for (; s->n_arrived < s->w->n && s->w->requests[s->n_arrived].arrival <= t + TICK;
       s->n_arrived++) {
    Request* r = &s->w->requests[s->n_arrived];
    if (can_ever_run(s, r)) {
      enqueue(s, s->n_arrived);
    } else {
      r->status = REJECTED;
      s->stats->rejected++;
    }
  }
}

static Span* span_of(Scheduler* s, const Request* r) {
  return &s->stats->spans[r->span];
}

static void drop_late(Scheduler* s, double t) {
  double timeout = s->w->limits.timeout_s;
  if (timeout <= 0) return;
  while (s->n_queue > 0 && s->w->requests[s->queue[0]].arrival + timeout + TICK < t) {
    dequeue(s, 0)->status = TIMED_OUT;
    s->stats->timed_out++;
  }
  for (int i = 0; i < s->n_running; i++) {
    Request* r = &s->w->requests[s->running[i]];
    if (r->status != RUNNING || r->arrival + timeout + TICK >= t) continue;
    r->status = TIMED_OUT;  // retire() frees its slot
    span_of(s, r)->finish = t;
    s->stats->timed_out++;
  }
}

// Moves a request from the queue to a slot with KV blocks for so many positions. False: the blocks
// were refused, although they should have been there; then the dynamic batch shrinks to what runs.
static bool start_request(Scheduler* s, int at, int n_read, int positions, double t) {
  int i = s->queue[at], slot = s->free_slots[s->n_free - 1];
  if (!blocks_grow(&s->e->blocks, slot, positions)) {
    s->dynamic_batch = s->n_running > 0 ? s->n_running : 1;
    return false;
  }
  Request* r = dequeue(s, at);
  s->n_free--;
  s->running[s->n_running++] = i;
  s->total += r->n_prompt + r->max_new;
  r->slot = slot;
  r->status = RUNNING;
  r->reading = true;
  r->n_read = n_read;
  r->n_given = r->n_prompt + r->n_new;
  r->n_cached = 0;
  r->n_ordered = r->n_new;
  engine_set_sampler(s->e, slot, r->seed, r->temperature);
  RunStats* stats = s->stats;
  if (stats->n_spans == stats->cap_spans) {
    stats->cap_spans = stats->cap_spans ? 2 * stats->cap_spans : 256;
    stats->spans = (Span*)realloc(stats->spans, stats->cap_spans * sizeof(Span));
    if (!stats->spans) die("out of host memory");
  }
  r->span = stats->n_spans++;
  Span span = {slot, i,    s->together ? s->n_groups : -1, r->n_given, n_read, t, NAN, NAN,
               NAN,  false};
  *span_of(s, r) = span;
  return true;
}

// Static and bucketed: which bucket may start now: a full one; or, when no more will come or its
// oldest request has waited long enough, the oldest request's. -1 = none yet.
static int ready_bucket(const Scheduler* s, double t) {
  const Request* all = s->w->requests;
  for (int i = 0; i < s->n_queue; i++) {
    int bucket = bucket_of(s, &all[s->queue[i]]);
    if (s->bucket_size[bucket] >= s->dynamic_batch) return bucket;
  }
  if (s->n_queue == 0) return -1;
  const Request* oldest = &all[s->queue[0]];
  bool due = s->n_arrived == s->w->n || t + TICK >= oldest->arrival + s->w->limits.batch_wait_s;
  return due ? bucket_of(s, oldest) : -1;
}

// How many of a bucket, in order of arrival, fit when each reserves the longest prompt and the
// longest output: `longest` tokens of prompt, `reserve` positions.
static int count_fitting(const Scheduler* s, int bucket, int* longest, int* reserve) {
  int n = 0, total = 0, most = s->w->limits.total_tokens;
  for (int i = 0; i < s->n_queue && n < s->dynamic_batch; i++) {
    const Request* r = &s->w->requests[s->queue[i]];
    if (bucket_of(s, r) != bucket) continue;
    int prompt = r->n_prompt > *longest ? r->n_prompt : *longest;
    int positions = worst_case(s, r, prompt);
    total += r->n_prompt + r->max_new;
    if ((n + 1) * blocks_for(positions) > s->e->blocks.n_free) break;
    if (most > 0 && total > most) break;
    *longest = prompt;
    *reserve = positions;
    n++;
  }
  return n;
}

static void admit_batch(Scheduler* s, double t) {
  if (s->n_running > 0) return;
  int bucket = ready_bucket(s, t), longest = 0, reserve = 0;
  if (bucket < 0) return;
  int n = count_fitting(s, bucket, &longest, &reserve);
  for (int i = 0; n > 0;) {
    if (bucket_of(s, &s->w->requests[s->queue[i]]) != bucket) {
      i++;
      continue;
    }
    if (!start_request(s, i, longest, reserve, t)) break;
    n--;  // and entry i of the queue is another one now
  }
  if (s->n_running > 0) s->n_groups++;
}

// What makes a policy: who may start in this step.
static void admit(Scheduler* s, double t) {
  const Limits* l = &s->w->limits;
  if (s->together) {
    admit_batch(s, t);
    return;
  }
  while (s->n_queue > 0 && s->n_running < s->dynamic_batch && s->n_free > 0) {
    const Request* r = &s->w->requests[s->queue[0]];
    // Some blocks stay free for those who run, if any, to grow before somebody is preempted. Who
    // does not fit holds up those behind: nobody overtakes, so nobody starves (LABS.md, lab 7).
    int n_read = r->n_prompt + r->n_new, left = s->e->blocks.n_free - blocks_for(n_read);
    double kept = s->n_running > 0 ? s->e->blocks.n_blocks * l->kv_watermark_pct / 100 : 0;
    if (left < kept) return;
    if (l->total_tokens > 0 && s->total + r->n_prompt + r->max_new > l->total_tokens) return;
    if (!start_request(s, 0, n_read, n_read, t)) return;
  }
}

// The slot and its blocks are free again. Results of steps still in flight find their request by
// number, and steps run in order, so nobody needs to wait for them.
static void leave(Scheduler* s, int at) {
  Request* r = &s->w->requests[s->running[at]];
  s->stats->kv_reserved += s->e->blocks.held[r->slot] * KV_BLOCK;
  blocks_release(&s->e->blocks, r->slot);
  s->free_slots[s->n_free++] = r->slot;
  s->total -= r->n_prompt + r->max_new;
  s->n_running--;
  memmove(s->running + at, s->running + at + 1, (size_t)(s->n_running - at) * sizeof(int));
  r->slot = -1;
}

static bool wants_more(const Request* r) {
  return r->status == RUNNING && (r->reading || r->n_ordered < r->max_new);
}

// Who has all it asked for leaves; of a static batch, nobody before everybody has.
static void retire(Scheduler* s) {
  bool unfinished = false;
  for (int i = 0; i < s->n_running; i++) unfinished |= wants_more(&s->w->requests[s->running[i]]);
  for (int i = s->n_running - 1; i >= 0; i--) {
    if (s->together ? unfinished : wants_more(&s->w->requests[s->running[i]])) continue;
    leave(s, i);
    if (s->dynamic_batch < s->w->limits.max_batch) s->dynamic_batch++;
  }
}

// The youngest gives up its blocks and will be recomputed, with what it generated as part of its
// prompt (Kwon et al. 2023, section 4.5). Nothing is retried as it was: the batch is smaller now.
// PRECONDITION: no steps in flight, so all its tokens are known here.
static void preempt_youngest(Scheduler* s, double t) {
  int i = s->running[s->n_running - 1];
  Request* r = &s->w->requests[i];
  span_of(s, r)->finish = t;
  span_of(s, r)->preempted = true;
  leave(s, s->n_running - 1);
  r->status = QUEUED;
  r->preemptions++;
  s->stats->preemptions++;
  s->dynamic_batch = s->n_running > 0 ? s->n_running : 1;
  enqueue(s, i);
}

// A place in the cache for the next token of everyone who decodes. Where there is none, the
// youngest are preempted until there is, or until it is this one's turn to go. False: the steps in
// flight must be collected first.
static bool make_room(Scheduler* s, double t, bool in_flight) {
  for (int i = 0; i < s->n_running;) {
    Request* r = &s->w->requests[s->running[i]];
    bool fine = r->reading || !wants_more(r);
    if (fine || blocks_grow(&s->e->blocks, r->slot, r->n_cached + 1)) {
      i++;
    } else if (in_flight) {
      return false;
    } else {
      preempt_youngest(s, t);
    }
  }
  return true;
}

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

// The next token of request i: of its prompt, of the padding behind it (any token will do: its
// place in the cache is overwritten before it is read), or the one that it sampled last (-1: the
// device knows it).
static void batch_add(Scheduler* s, Planned* p, int i) {
  Request* r = &s->w->requests[i];
  Batch* b = &p->batch;
  int pos = r->n_cached++;
  bool prompt = pos < r->n_given, padding = r->reading && !prompt;
  bool sample = prompt ? pos == r->n_given - 1 : !padding;
  bool wasted = padding || (!prompt && !wants_more(r));
  b->id[b->n_tokens] = prompt ? r->tokens[pos] : padding ? 0 : -1;
  b->pos[b->n_tokens] = pos;
  b->slot[b->n_tokens] = r->slot;
  if (sample) {
    b->row[b->n_rows] = b->n_tokens;
    p->owner[b->n_rows++] = i;
    r->n_ordered++;
  }
  b->n_tokens++;
  s->stats->computed++;
  s->stats->wasted += wasted;
  s->stats->kv_held += !wasted;
  if (!r->reading || r->n_cached < r->n_read) return;
  r->reading = false;
  r->n_cached = r->n_given;  // the padding will be overwritten
}

// Fills p with the next step: a token of everyone who decodes, then prompts, in chunks. A static
// batch reads all its prompts first, and decodes finished rows too.
static void plan_step(Scheduler* s, Planned* p) {
  Batch* b = &p->batch;
  bool reading = false;
  b->n_tokens = b->n_rows = 0;
  for (int i = 0; i < s->n_running; i++) reading |= s->w->requests[s->running[i]].reading;
  for (int i = 0; i < s->n_running && !(s->together && reading); i++) {
    const Request* r = &s->w->requests[s->running[i]];
    bool room = r->n_cached < s->e->blocks.held[r->slot] * KV_BLOCK;
    if (!r->reading && room) batch_add(s, p, s->running[i]);
  }
  p->decode = !reading;
  p->n_spans = s->stats->n_spans;
  p->group = s->together ? s->n_groups - 1 : -1;
  for (int i = 0; i < s->n_running && reading; i++) {
    const Request* r = &s->w->requests[s->running[i]];
    while (r->reading && b->n_tokens < s->w->limits.step_tokens) batch_add(s, p, s->running[i]);
  }
}

// ---- The engine loop: plan, submit, collect. Steps are queued ahead, since the next one does not
// depend on which tokens the last one sampled - unless one of them may be an end token.

// A line on a terminal, rewritten: what is done, and how long the rest will take. what NULL: quiet.
static void progress(const char* what, int done, int of, double start) {
  static double shown;
  double t = now();
  bool over = done >= of;
  if (what == NULL || !isatty(2) || (t - shown < 0.1 && !over)) return;
  shown = t;
  double left = (t - start) * (of - done) / done;
  if (!over) fprintf(stderr, "\r%s: %d of %d", what, done, of);
  if (!over && done > 0) fprintf(stderr, ", about %.0f s left", left);
  fprintf(stderr, over ? "\r\033[K" : "\033[K");
}

static void collect_step(Scheduler* s, const Planned* p) {
  RunStats* stats = s->stats;
  const Config* c = &s->e->w->config;
  const Step* step = engine_collect(s->e);
  // THE measurement: a step that queued behind another one began when that ended, else when it was
  // submitted. So a device that waits for the host counts; a step that waits for the last does not.
  double begin = fmax(stats->end, step->submitted);
  add_step(p->decode ? &stats->decode : &stats->prefill, s->e->device, p->work, p->batch.n_tokens,
           step->end - begin);
  for (; s->n_begun < p->n_spans; s->n_begun++)
    stats->spans[s->n_begun].start = begin - stats->start;
  stats->end = step->end;
  double t = step->end - stats->start;
  for (int i = 0; i < step->n_rows; i++) {
    Request* r = &s->w->requests[p->owner[i]];
    if (r->status != RUNNING) continue;  // a finished row; a step in flight when the end came
    r->time[r->n_new] = step->end;
    r->tokens[r->n_prompt + r->n_new++] = step->tokens[i];
    for (int j = 0; s->w->stop_at_eos && j < c->n_eos; j++)
      r->ended |= step->tokens[i] == c->eos[j];
    if (isnan(span_of(s, r)->first)) span_of(s, r)->first = t;
    if (!r->ended && r->n_new < r->max_new) continue;
    r->status = FINISHED;
    stats->finished++;
    span_of(s, r)->finish = t;
  }
  // A static batch answers as one: first tokens are out when its last prompt has been read.
  for (int i = stats->n_spans - 1; i >= s->first_span && !p->decode && s->together; i--) {
    Span* span = &stats->spans[i];
    if (span->batch < p->group) break;
    if (span->batch > p->group || isnan(span->first)) continue;
    Request* r = &s->w->requests[span->request];
    if (r->status == TIMED_OUT) continue;
    span->first = t;
    r->time[0] = step->end;
    if (r->status == FINISHED) span->finish = t;
  }
}

// When something will happen by itself: an arrival, an incomplete batch's time, a time-out.
static double next_event(const Scheduler* s) {
  const Limits* l = &s->w->limits;
  double t = s->n_arrived < s->w->n ? s->w->requests[s->n_arrived].arrival : INFINITY;
  if (s->n_queue == 0) return t;
  const Request* oldest = &s->w->requests[s->queue[0]];
  t = s->together ? fmin(t, oldest->arrival + l->batch_wait_s) : 0;  // continuous: at once
  if (l->timeout_s > 0) t = fmin(t, oldest->arrival + l->timeout_s + 2 * TICK);
  return t;
}

static void scheduler_open(Scheduler* s, Engine* e, const Workload* w, RunStats* stats) {
  memset(s, 0, sizeof *s);
  s->e = e;
  s->w = w;
  s->stats = stats;
  s->together = w->policy != POLICY_CONTINUOUS;
  s->dynamic_batch = w->limits.max_batch;
  s->n_free = s->dynamic_batch;
  s->queue = (int*)xcalloc((size_t)w->n + 2 * (size_t)s->dynamic_batch, sizeof(int));
  s->running = s->queue + w->n;
  s->free_slots = s->running + s->dynamic_batch;
  for (int i = 0; i < s->dynamic_batch; i++) s->free_slots[i] = s->dynamic_batch - 1 - i;
  int longest = 0;
  for (int i = 0; i < w->n; i++) {
    Request* r = &w->requests[i];
    r->slot = -1;
    r->status = QUEUED;
    r->n_new = r->preemptions = 0;
    r->ended = false;
    if (r->n_prompt > longest) longest = r->n_prompt;
  }
  int longest_new = w->limits.max_new;
  for (int i = 0; i < w->n && w->limits.max_new == 0; i++) {
    const Request* r = &w->requests[i];
    if (r->max_new > longest_new && can_ever_run(s, r)) longest_new = r->max_new;
  }
  s->longest_new = longest_new;
  s->bucket_size = (int*)xcalloc(longest / BUCKET_WIDTH + 1, sizeof(int));
  s->first_span = s->n_begun = stats->n_spans;
  stats->start = stats->end = e->device->api->clock(e);
}

// The slots of a static batch are free again when its last output ends; who never finished ends
// now. Backwards, the latest finish of a batch gathers in its first span; forwards, all get it.
static void close_spans(const Scheduler* s) {
  RunStats* stats = s->stats;
  int first_span = s->first_span;
  double end = stats->end - stats->start, release = NAN;
  for (int i = stats->n_spans - 1; i >= first_span; i--) {
    Span* span = &stats->spans[i];
    if (isnan(span->finish)) span->finish = end;
    span->start = fmin(span->start, span->finish);  // dropped before its first step
    bool same = i + 1 < stats->n_spans && span->batch >= 0 && span[1].batch == span->batch;
    release = same ? fmax(release, span->finish) : span->finish;
    span->release = release;
  }
  for (int i = first_span + 1; i < stats->n_spans; i++) {
    Span* span = &stats->spans[i];
    bool same = span->batch >= 0 && span->batch == span[-1].batch;
    if (same) span->release = span[-1].release;
  }
}

// Starts who may start, plans a step and queues it. False: there is nothing to do in one.
static bool submit_step(Scheduler* s, Planned* p, double t) {
  admit(s, t);
  plan_step(s, p);
  if (p->batch.n_tokens == 0) return false;
  p->work = count_work(&s->e->w->config, &p->batch, device_kv_size(s->e->device));
  engine_submit(s->e, &p->batch);
  return true;
}

// Runs all requests to their end, to the time limit (seconds, for warm-ups) or to Ctrl-C; false if
// cut short.
static bool run_requests(Engine* e, const Workload* w, double time_limit, RunStats* stats) {
  const Backend* api = e->device->api;
  Scheduler s;
  Planned planned[IN_FLIGHT];
  int depth = w->stop_at_eos ? 1 : IN_FLIGHT;
  memset(planned, 0, sizeof planned);
  scheduler_open(&s, e, w, stats);
  for (int i = 0; i < depth; i++)
    planned_init(&planned[i], w->limits.step_tokens + w->limits.max_batch, w->limits.max_batch);
  double began = now();
  bool cut = false;
  // One turn: who has arrived, gave up, is done; room for those who run; who starts; plan and
  // submit a step. Then collect the oldest, when `depth` steps are in flight or none could be
  // submitted. Idle: wait.
  for (;;) {
    double t = api->clock(e) - stats->start;
    bool in_flight = e->submitted > e->collected, more = false;
    cut = cut || interrupted || t > time_limit;
    arrive(&s, t);
    drop_late(&s, t);
    retire(&s);
    if (!cut && make_room(&s, t, in_flight))
      more = submit_step(&s, &planned[e->submitted % depth], t);
    if (e->submitted - e->collected == depth || (in_flight && !more)) {
      collect_step(&s, &planned[e->collected % depth]);
      progress(w->progress, stats->finished, w->n - stats->rejected - stats->timed_out, began);
    } else if (!more && (cut || (s.n_arrived == w->n && s.n_queue + s.n_running == 0))) {
      break;
    } else if (!more && s.n_running == 0) {
      double until = next_event(&s);
      if (until < INFINITY) api->wait(e, stats->start + until);
    }
  }
  while (s.n_running > 0) leave(&s, s.n_running - 1);
  close_spans(&s);
  stats->seconds += stats->end - stats->start;
  for (int i = 0; i < depth; i++) planned_free(&planned[i]);
  free(s.queue);
  free(s.bucket_size);
  return !cut;
}

// ---- CPU backend: a device whose step is done when submit returns. Its twin: parts/gpu.h.

// A tile of 8 rows, which every RowMap keeps together, is transposed in the L1 cache: rows are read
// and columns are written in runs.
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
  s->positions = blocks_for(e->size.max_positions) * KV_BLOCK;
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

static double real_clock(Engine* e) {
  (void)e;
  return now();
}

static void real_wait(Engine* e, double until) {
  double left = fmin(until - real_clock(e), 0.05);  // now and then, look for Ctrl-C
  struct timespec t = {0, (long)(fmax(left, 0) * 1e9)};
  nanosleep(&t, NULL);
}

static void cpu_copy_logits(Engine* e, int rows, float* out) {
  int vocab = e->w->config.vocab_size;
  for (int r = 0; r < rows; r++)
    memcpy(out + (size_t)r * vocab, e->cpu_logits + (size_t)r * padded_rows(vocab),
           vocab * sizeof(float));
}

// clang-format off
static const Backend cpu_backend = {
    cpu_open, cpu_probe_bandwidth, cpu_probe_rate,
    cpu_used, cpu_alloc, free, cpu_upload,
    PANEL, 1, sizeof(float), NULL,  // row_multiple, key_multiple, kv_size, slices
    cpu_fill, cpu_engine_open, cpu_engine_close, cpu_submit, cpu_collect,
    real_clock, real_wait, cpu_copy_logits};
// clang-format on

#include "parts/sim.h"

#ifdef __CUDACC__
#include "parts/kernels.h"
#else
static const Backend* cuda_backend = NULL;  // built without nvcc
#endif

// ---- Weights: from a Model (where the numbers are) to where and how the device wants them.

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
  for (int i = 0; i < c->n_layers && ok && !interrupted; i++) {
    ok = layer_open(w, d, &w->layers[i], &m->layers[i]);
    for (int j = 0; j < m->n_maps; j++) forget_pages(&m->maps[j]);
  }
  float* angles = (float*)xcalloc((size_t)positions * c->head_dim, sizeof(float));
  rope_table(c, positions, angles);
  ok = ok && !interrupted;
  w->final_norm = ok ? floats_open(d, &m->final_norm, NULL, c->dim) : NULL;
  w->rope = ok ? floats_open(d, NULL, angles, (size_t)positions * c->head_dim) : NULL;
  free(angles);
  if (w->final_norm && w->rope) return true;
  file_error(err, c->name,
             interrupted ? "interrupted while its weights were loaded"
                         : "does not fit: the device refused memory for its weights");
  weights_close(w, d);
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

// ---- Knee: which batch size to run. Not the largest that fits: the last one before memory, the
// latency target or the tail gives way, or the one where throughput stops paying (article 1,
// section 5). What stops the walk from a row to the next:
//   memory   the next one does not fit, or uses more than the watermark (90%) allows
//   slo      its TTFT or TPOT, at the percentile, breaks the target, if there is one
//   jump     its TPOT grows by more than 2.2x per doubling of the batch
//   plateau  no later row gives 10% more tokens/s per doubling

static const char* const stop_names[] = {"memory", "slo", "jump", "plateau", "end", "interrupt"};
static const char* const status_names[] = {"ok", "skipped", "oom"};
static const char* const bound_names[] = {"memory (weights)", "memory (KV)", "compute", "overhead"};

// How a quantity that went from x to y changed per doubling of the batch: 2 = it doubled too.
static double per_doubling(double x, double y, const SweepRow* from, const SweepRow* to) {
  return pow(y / x, 1 / log2((double)to->batch / from->batch));
}

// Memory, SLO and jump, in this order: may the walk step on row i? An unmeasured latency is NaN,
// which compares false and breaks nothing.
static bool may_step_on(const SweepRow* rows, int i, KneeRules rules, Knee* k) {
  const SweepRow* r = &rows[i];
  const char* slo_text = "batch %d would break the %s SLO: P%d %.4g ms > %g ms";
  size_t size = sizeof k->why;
  int q = rules.percentile;
  double ttft = at_percentile(r->ttft, q);
  double tpot = at_percentile(r->tpot, q);
  k->rule = STOP_MEMORY;
  if (r->status != ROW_OK) {
    return say(k->why, size, "batch %d did not fit: %s", r->batch,
               *r->reason ? r->reason : status_names[r->status]);
  }
  if (100 * r->mem_used_mib > rules.watermark_pct * r->mem_limit_mib) {
    return say(k->why, size, "batch %d would use %.4g of %.4g GiB, over the %g%% watermark",
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

// No plateau: does a later row that ran grow by min_gain_pct per doubling over row i? Every one is
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
  return say(k->why, sizeof k->why,
             "no batch above %d gains %g%% per doubling over it (at best %+.1f%%)", rows[i].batch,
             rules.min_gain_pct, gain);
}

// PRECONDITION: rows ascend strictly by batch. The walk stands on a row that breaks no rule; there
// it asks first whether this is the plateau (stay here?), then the next row's memory, SLO and jump
// (may I step up?).
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

#include "parts/interop.h"
#include "parts/report.h"

#include "parts/options.h"

// ---- The sweep: one row per batch size, everything else held fixed (article 1, sections 3 and 5).

typedef struct {
  Device device;
  Model model;
  Weights weights;
  double load_start;  // seconds on now()'s clock
} Session;

static void on_interrupt(int signal_number) {
  if (interrupted) _exit(130);  // the second, whichever it is, ends the run at once
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

// In ms, room for n requests and all their output tokens: the gaps, the long list, come last.
static Samples samples_in(double* ms, size_t n) {
  Samples s = {ms, ms + n, ms + 3 * n, ms + 2 * n, 0, 0, 0};
  return s;
}

// start: of the run.
static void add_samples(Samples* s, const Request* r, double start) {
  double first = r->time[0], last = r->time[r->n_new - 1], arrival = start + r->arrival;
  s->ttft[s->n] = 1e3 * (first - arrival);
  s->e2e[s->n++] = 1e3 * (last - arrival);
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
  row->mem_other_mib = fmax(used - tagged, 0) / MIB;  // resident pages may be swapped out
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
  Limits limits = batch_limits(batch, size.max_tokens);
  Workload w = {
      (Request*)xcalloc(batch, sizeof(Request)), batch, POLICY_STATIC, limits, false, NULL};
  for (int i = 0; i < batch; i++) make_request(&w.requests[i], c, in, out, (uint32_t)o->seed, i);
  size_t n = (size_t)batch * repeats;
  double* ms = (double*)xcalloc(n * (out + 3), sizeof *ms);
  Samples all = samples_in(ms, n);
  char label[64];
  snprintf(label, sizeof label, "batch %d: runs", batch);
  double start = now();
  RunStats stats;
  memset(&stats, 0, sizeof stats);
  run_requests(&e, &w, 0.5, &stats);  // warm-up, never counted
  free(stats.spans);
  memset(&stats, 0, sizeof stats);
  bool whole = !interrupted;
  for (int run = 0; run < repeats && whole; run++) {
    progress(o->quiet ? NULL : label, run, repeats, start);
    whole = run_requests(&e, &w, INFINITY, &stats);
    for (int i = 0; i < batch && whole; i++) add_samples(&all, &w.requests[i], stats.start);
  }
  free(stats.spans);
  progress(o->quiet ? NULL : label, repeats, repeats, start);
  row->output_tok_s = (double)n * out / stats.seconds;
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

#include "parts/plots.h"
#include "parts/tokenizer.h"

// ---- Commands: what they share (a device, a model, defaults, files), then bs sweep.

// One line and an exit status: 1 failed, 2 refused before any work, since it can never run.
static int give_up(int status, const char* why) {
  fflush(stdout);  // in a log of both the error comes last
  fprintf(stderr, "bs: %s\n", why);
  return status;
}

static Matmul matmul_of(const char* name) {
  int i = choice_index("naive|gemv|reuse|mma", name);
  return i < 0 ? MATMUL_MMA : (Matmul)i;
}

static bool open_device(Session* s, const Options* o, char* err) {
  bool cpu = strcmp(o->device, "cpu") == 0, cuda = strcmp(o->device, "cuda") == 0;
  if (strncmp(o->device, "sim:", 4) == 0)
    return device_open(&s->device, &sim_backend, o->vram, err);
  snprintf(err, ERR_LEN, "no CUDA in this build: it was made without nvcc");
  if (!cpu && cuda_backend && device_open(&s->device, cuda_backend, o->vram, err)) return true;
  if (cuda) return false;
  FILE* to = o->command == CMD_GENERATE ? stderr : stdout;  // which is for texts alone
  if (!cpu) fprintf(to, "device: the CPU, because there is %s\n", err);
  return device_open(&s->device, &cpu_backend, o->vram, err);
}

// Without --model: one of two presets by the GPU's memory, so that batches have room; a small one
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

// Reads and writes text byte by byte, and ends by itself, like weights/tiny.
static bool byte_level(const Config* c) {
  return c->vocab_size == 256 && c->n_eos > 0;
}

// What the command line left open, by device: a sweep should take a minute at most.
static void fill_defaults(Options* o, const Config* c, bool gpu) {  // a real or a simulated one
  const char* input = gpu ? "lognormal:128,0.8@1024" : "lognormal:32,0.8@256";
  const char* output = byte_level(c) ? "512" : gpu ? "exp:128@1024" : "exp:32@256";
  if (!o->input_text) parse_dist(o->input_text = input, &o->input);
  if (!o->output_text) parse_dist(o->output_text = output, &o->output);
  if (!o->max_batch) o->max_batch = gpu ? 32 : 8;
  if (!o->n_requests && !o->trace) o->n_requests = gpu ? 256 : 64;
  if (isnan(o->temperature)) o->temperature = o->command == CMD_COMPARE;
  if (!o->input_len) o->input_len = gpu ? 128 : 32;
  if (!o->output_len) o->output_len = o->command == CMD_GENERATE ? 512 : gpu ? 128 : 32;
  if (!o->step_tokens) {
    o->step_tokens = gpu ? 4096 : 256;  // and everyone decodes in a step
    if (o->step_tokens < o->max_batch) o->step_tokens = o->max_batch;
    for (int i = 0; i < o->n_batches; i++)
      if (o->step_tokens < o->batches[i]) o->step_tokens = o->batches[i];
  }
  if (!o->repeats) o->repeats = gpu ? 3 : 1;
}

static bool lengths_fit(const Options* o, const Config* c, char* err) {
  return (long)o->input_len + o->output_len <= c->max_context ||
         say(err, ERR_LEN, "--input-len %d + --output-len %d exceeds %s's context of %d tokens",
             o->input_len, o->output_len, c->name, c->max_context);
}

static int sweep_rows(Session* s, const Options* o, SweepRow* rows, ResultFile* csv) {
  static const int defaults[] = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  int n = o->n_batches ? o->n_batches : s->device.api != &cpu_backend ? 9 : 7, done = 0;
  while (!o->n_batches && n > 1 && defaults[n - 1] > o->step_tokens) n--;
  print_table_header(stdout, o->rules);
  for (int i = 0; i < n && !interrupted; i++) {
    SweepRow* row = &rows[done];
    memset(row, 0, sizeof *row);
    row->batch = o->n_batches ? o->batches[i] : defaults[i];
    row->simulated = s->device.api == &sim_backend;
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

static const char* dtype_name(bool fp8_kv) {
  return fp8_kv ? "fp16, KV cache fp8" : "fp16";
}

static SweepReport new_report(const SweepRow* rows, int n, KneeRules rules, const char* model,
                              const char* device) {
  bool simulated = n > 0 && rows->simulated;
  SweepReport r = {rows, n, knee(rows, n, rules), rules, model, device, simulated, 0, 0, 0, false};
  return r;
}

// What every curve ends with: the knee in words, config.json and charts; the exit status.
static int finish_report(const SweepReport* s, const Options* o, const char* dtype) {
  char err[ERR_LEN], names[256] = "";
  print_knee(stdout, s);
  if (!write_config_json(o->out, s, dtype, o->step_tokens, err) || !plot_sweep(s, o->out, err))
    return give_up(1, err);
  for (int k = 0; k < N_CHARTS; k++)
    if (has_chart(s, k)) strcat(strcat(names, " "), CHARTS[k].file);
  printf("\n%s/: sweep.csv config.json%s summary.png\n", o->out, names);
  return 0;
}

// A curve that was not measured here: sweep.csv first. source: a file that must not be overwritten.
static int save_report(const SweepReport* s, const Options* o, const char* dtype,
                       const char* source) {
  char err[ERR_LEN];
  struct stat from, to;
  ResultFile csv;
  if (!prepare_out(o->out, err) || !result_open(&csv, o->out, "sweep.csv", err))
    return give_up(1, err);
  put_sweep_row(csv.f, HEADER, &no_row);
  for (int i = 0; i < s->n_rows; i++) put_sweep_row(csv.f, CSV, &s->rows[i]);
  bool same = source && stat(source, &from) == 0 && stat(csv.path, &to) == 0 &&
              from.st_dev == to.st_dev && from.st_ino == to.st_ino;
  if (same) {
    result_drop(&csv);
  } else if (!result_close(&csv, err)) {
    return give_up(1, err);
  }
  return finish_report(s, o, dtype);
}

static int cmd_sweep(Session* s, const Options* o) {
  char err[ERR_LEN];
  bool simulated = s->device.api == &sim_backend;
  const Config* c = &s->model.config;
  if (!lengths_fit(o, c, err)) return give_up(2, err);
  ResultFile csv;
  if (!prepare_out(o->out, err) || !result_open(&csv, o->out, "sweep.csv", err))
    return give_up(1, err);
  if (!weights_open(&s->weights, &s->device, &s->model, matmul_of(o->matmul),
                    o->input_len + o->output_len, err)) {
    result_drop(&csv);
    return give_up(1, err);
  }
  printf("%s on %s: %.0f M parameters, loaded in %.1f s; %d prompt + %d new tokens\n", c->name,
         s->device.name, parameter_count(c) / 1e6, now() - s->load_start, o->input_len,
         o->output_len);
  printf("%s ceilings: read %.1f GB/s, multiply %.2f TFLOP/s; memory %.4g GiB, limit %.4g GiB\n\n",
         simulated ? "given" : "probed", s->device.bandwidth / 1e9, s->device.rate / 1e12,
         s->device.total / GIB, s->device.limit / GIB);
  put_sweep_row(csv.f, HEADER, &no_row);
  SweepRow rows[MAX_BATCHES];
  int n = sweep_rows(s, o, rows, &csv), status = 0;
  if (n == 0) {
    printf("Interrupted before a batch was measured: earlier results stay.\n");
    result_drop(&csv);
  } else if (!result_close(&csv, err)) {
    return give_up(1, err);
  }
  if (n > 0) {
    SweepReport report = new_report(rows, n, o->rules, c->name, s->device.name);
    report.bandwidth = s->device.bandwidth;
    report.rate = s->device.rate;
    report.cards = 1;
    report.fp8_kv = s->device.fp8_kv;
    Knee* k = &report.knee;
    if (interrupted && (k->rule == STOP_END || k->rule == STOP_PLATEAU)) {
      say(k->why, sizeof k->why, "%swhat is above batch %d is unknown",
          k->rule == STOP_PLATEAU ? "it was a plateau so far, but " : "", rows[n - 1].batch);
      k->rule = STOP_INTERRUPT;
    }
    printf("\n");
    print_doubts(stdout, &report, NULL);
    print_prediction(stdout, &report);
    status = finish_report(&report, o, dtype_name(s->device.fp8_kv));
  }
  return status;
}

#include "parts/plan.h"

// ---- Streams: requests with lengths and arrivals, drawn or from a trace (article 1, section 4).

// Uniform in (0, 1); a sequence per seed.
static double next_uniform(uint32_t* state) {
  return ((hash32((*state)++) >> 8) + 0.5) / 16777216.0;
}

static double next_normal(uint32_t* state) {  // Box and Muller
  double u = next_uniform(state);
  return sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * next_uniform(state));
}

// Gamma of this shape and mean 1 (Marsaglia and Tsang 2000). Shape 1 is exponential: Poisson
// arrivals.
static double next_gamma(uint32_t* state, double shape) {
  double boost = shape < 1 ? pow(next_uniform(state), 1 / shape) : 1;
  double d = (shape < 1 ? shape + 1 : shape) - 1.0 / 3, c = 1 / sqrt(9 * d), x, v;
  do {
    x = next_normal(state);
    v = (1 + c * x) * (1 + c * x) * (1 + c * x);
  } while (v <= 0 || log(next_uniform(state)) >= 0.5 * x * x + d - d * v + d * log(v));
  return d * v * boost / shape;
}

static int draw_length(const Dist* d, uint32_t* state) {
  double x = d->a;
  if (d->kind == DIST_UNIFORM) x = d->a + floor((d->b - d->a + 1) * next_uniform(state));
  if (d->kind == DIST_EXP) x = -d->a * log(next_uniform(state));
  if (d->kind == DIST_LOGNORMAL) x = d->a * exp(d->b * next_normal(state) - d->b * d->b / 2);
  return (int)fmin(fmax(round(x), 1), d->cap > 0 ? d->cap : 1.0 * MOST_TOKENS);
}

// ---- Compare: one stream of requests through every policy, on the same engine.

// Opens the engine for max_batch sequences, with as many KV blocks as they may want or memory has.
// Out of memory, real or injected (article 1, section 6): fewer blocks, as many as memory has; then
// half the batch, again and again; then half the longest output. Whoever no longer fits waits in
// the queue.
static RowStatus open_with_fallback(Engine* e, Device* d, const Weights* w, EngineSize* size,
                                    Limits* l, char* err) {
  int wanted = size->n_blocks;
  for (;;) {
    size->max_slots = l->max_batch;
    int most = l->max_batch * blocks_for(size->max_positions);  // for all, and the watermark
    most += (int)ceil(most * l->kv_watermark_pct / 100);
    size->n_blocks = wanted > 0 && wanted < most ? wanted : most;
    RowStatus status = engine_open(e, d, w, *size, err);
    if (status == ROW_OK) return ROW_OK;
    // A pool for the longest request alone tells how many such pools memory has room for.
    EngineSize smallest = *size;
    smallest.n_blocks = blocks_for(size->max_positions);
    if (status == ROW_SKIPPED && engine_open(e, d, w, smallest, err) == ROW_OK) {
      size_t k, v, used = d->api->used(), left = d->limit > used ? d->limit - used : 0;
      engine_kv_bytes(d, &w->config, smallest, &k, &v);
      double pools = 1 + 0.98 * left / (k + v);  // 2% for the allocator
      double blocks = smallest.n_blocks * pools;
      engine_close(e);
      if (blocks < size->n_blocks) size->n_blocks = (int)blocks;
      status = engine_open(e, d, w, *size, err);
      if (status == ROW_OK) return ROW_OK;
    }
    int shorter = l->max_new / 2;
    if (l->max_batch > 1) {
      l->max_batch /= 2;
    } else if (shorter > 0) {
      size->max_positions -= l->max_new - shorter;
      l->max_new = shorter;
    } else {
      return status;
    }
  }
}

typedef struct {
  Request* requests;
  int n, longest_prompt, longest_new;
  bool text;  // prompts are text and outputs end by the model's own end token
  char name[160];
} Stream;

// Text for a byte-level model: a request's prompt is line i of the prompts.
static void give_text(Stream* s, const char** prompts, int n_prompts, float temperature) {
  for (int i = 0; i < s->n; i++) {
    const char* text = prompts[i % n_prompts];
    Request* r = &s->requests[i];
    r->n_prompt = (int)strlen(text);
    r->temperature = temperature;
    free(r->tokens);
    r->tokens = (int*)xcalloc((size_t)r->n_prompt + r->max_new, sizeof(int));
    for (int j = 0; j < r->n_prompt; j++) r->tokens[j] = (unsigned char)text[j];
  }
  s->text = true;
}

static void drawn_stream(Stream* s, const Config* c, const Options* o, Dist output) {
  uint32_t lengths = hash32((uint32_t)o->seed ^ 0x5eed1),
           gaps = hash32((uint32_t)o->seed ^ 0x5eed2);
  double t = 0;
  s->n = o->n_requests;
  s->requests = (Request*)xcalloc(s->n, sizeof(Request));
  for (int i = 0; i < s->n; i++) {
    int prompt = draw_length(&o->input, &lengths);
    make_request(&s->requests[i], c, prompt, draw_length(&output, &lengths), (uint32_t)o->seed, i);
    s->requests[i].arrival = t;
    if (o->rate > 0) t += next_gamma(&gaps, o->burstiness) / o->rate;
  }
}

static bool traced_stream(Stream* s, const Config* c, const Options* o, char* err) {
  int n;
  TraceRow* rows = read_trace(o->trace, o->n_requests, &n, err);
  if (!rows) return false;
  s->n = n;
  double recorded =
      s->n > 1 && rows[s->n - 1].arrival > 0 ? (s->n - 1) / rows[s->n - 1].arrival : 0;
  double scale = o->rate > 0 && recorded > 0 ? recorded / o->rate : 1;
  s->requests = (Request*)xcalloc(s->n, sizeof(Request));
  for (int i = 0; i < s->n; i++) {
    make_request(&s->requests[i], c, rows[i].prompt, rows[i].output, (uint32_t)o->seed, i);
    s->requests[i].arrival = rows[i].arrival * scale;
  }
  free(rows);
  return true;
}

static void measure_stream(Stream* s) {
  s->longest_prompt = s->longest_new = 0;
  for (int i = 0; i < s->n; i++) {
    const Request* r = &s->requests[i];
    if (r->n_prompt > s->longest_prompt) s->longest_prompt = r->n_prompt;
    if (r->max_new > s->longest_new) s->longest_new = r->max_new;
  }
}

// What a run of a policy says. ms: room for 3 n + all output tokens; ttft and e2e stay sorted in
// it.
static PolicyResult policy_result(const Workload* w, const RunStats* stats, const KneeRules* slo,
                                  double* ms) {
  int n = w->n, good = 0;
  double tokens = 0, working = 0, last = 0;
  Samples all = samples_in(ms, (size_t)n);
  for (int i = 0; i < n; i++) {
    const Request* r = &w->requests[i];
    if (r->status != FINISHED) continue;
    bool in_time =
        slo->slo_ttft_ms == 0 || 1e3 * (r->time[0] - stats->start - r->arrival) <= slo->slo_ttft_ms;
    int tpots = all.n_tpot;
    add_samples(&all, r, stats->start);
    if (slo->slo_tpot_ms > 0 && all.n_tpot > tpots)
      in_time = in_time && all.tpot[tpots] <= slo->slo_tpot_ms;
    good += in_time;
    tokens += r->n_new;
    last = fmax(last, r->time[r->n_new - 1]);
  }
  for (int i = 0; i < stats->n_spans; i++)
    working += stats->spans[i].finish - stats->spans[i].start;
  double first = n > 0 ? w->requests[0].arrival : 0, all_s = stats->end - stats->start - first;
  double seconds = last > 0 ? last - stats->start - first : NAN;
  PolicyResult p;
  memset(&p, 0, sizeof p);
  p.policy = w->policy;
  p.requests = n;
  p.completed = all.n;
  p.rejected = stats->rejected;
  p.timed_out = stats->timed_out;
  p.preemptions = stats->preemptions;
  p.slots = w->limits.max_batch;
  p.duration_s = seconds;
  p.output_tok_s = tokens / seconds;
  p.request_per_s = all.n / seconds;
  p.goodput_req_s = slo->slo_ttft_ms > 0 || slo->slo_tpot_ms > 0 ? good / seconds : NAN;
  p.ttft = percentiles_of(all.ttft, all.n);
  p.tpot = percentiles_of(all.tpot, all.n_tpot);
  p.itl = percentiles_of(all.itl, all.n_itl);
  p.e2e = percentiles_of(all.e2e, all.n);
  bool ran = stats->computed > 0;
  p.occupancy_pct = ran ? 100 * working / (p.slots * all_s) : NAN;
  p.padding_pct = ran ? 100 * stats->wasted / stats->computed : NAN;
  p.kv_unused_pct = ran ? 100 * (1 - stats->kv_held / stats->kv_reserved) : NAN;
  p.spans = stats->spans;
  p.n_spans = stats->n_spans;
  p.ttft_ms = all.ttft;
  p.e2e_ms = all.e2e;
  return p;
}

// A request's new tokens in one number, so that two runs can be compared.
static uint32_t answers_of(const Request* r) {
  uint32_t h = hash32((uint32_t)r->n_new);
  for (int i = 0; i < r->n_new; i++) h = hash32(h ^ (uint32_t)r->tokens[r->n_prompt + i]);
  return h;
}

typedef struct {
  Session* session;
  const Options* o;
  Engine engine;
  EngineSize size;
  Limits limits;
  Stream stream;
  PolicyResult results[N_POLICIES];
  int n_results;
  double* ms[N_POLICIES];  // the latencies that the results point into
  uint32_t* answers;       // [n] of the first policy
  int differs;             // requests that got other tokens under another one
  VariancePoint points[5];
  int n_points;
  ResultFile csv, requests;
  char variance_name[160];
} Comparison;

// Shortens outputs to `most`, but for those over `rejected`, which will be refused as they are.
static void cap_outputs(Request* r, int n, int rejected, int most) {
  for (int i = 0; i < n; i++)
    if (r[i].max_new > most && r[i].max_new <= rejected) r[i].max_new = most;
}

// Runs the stream under one policy. False: interrupted.
static bool run_policy(Comparison* c, Policy policy) {
  Workload w = {c->stream.requests, c->stream.n,    policy,
                c->limits,          c->stream.text, c->o->quiet ? NULL : policy_names[policy]};
  RunStats stats;
  size_t tokens = 0;
  memset(&stats, 0, sizeof stats);
  for (int i = 0; i < w.n; i++) tokens += w.requests[i].max_new;
  double* ms = c->ms[c->n_results] = (double*)xcalloc(3 * (size_t)w.n + tokens, sizeof *ms);
  if (!run_requests(&c->engine, &w, INFINITY, &stats)) {  // half a run says nothing about a policy
    free(stats.spans);
    free(ms);
    return false;
  }
  PolicyResult* p = &c->results[c->n_results];
  *p = policy_result(&w, &stats, &c->o->rules, ms);
  bool first = c->n_results++ == 0;
  for (int i = 0; i < w.n; i++) {
    if (first) c->answers[i] = w.requests[i].status == FINISHED ? answers_of(&w.requests[i]) : 0;
    if (first || c->answers[i] == 0 || w.requests[i].status != FINISHED) continue;
    c->differs += c->answers[i] != answers_of(&w.requests[i]);
  }
  print_policy(stdout, p, c->o->rules.percentile);
  fflush(stdout);
  put_policy_row(c->csv.f, CSV, p);
  fputc('\n', c->csv.f);
  fflush(c->csv.f);
  for (int i = 0; i < w.n; i++)
    put_request_row(c->requests.f, CSV, policy, i, &w.requests[i], stats.start);
  fflush(c->requests.f);
  return true;
}

// Output tokens/s of a stream under a policy; 0 = interrupted.
static double tokens_per_second(Comparison* c, Stream* s, Policy policy) {
  Workload w = {s->requests, s->n, policy, c->limits, false, c->o->quiet ? NULL : "variance"};
  RunStats stats;
  double tokens = 0;
  w.limits.max_new = w.limits.max_input = w.limits.total_tokens = 0;
  w.limits.timeout_s = 0;
  memset(&stats, 0, sizeof stats);
  bool whole = run_requests(&c->engine, &w, INFINITY, &stats);
  for (int i = 0; i < s->n; i++) tokens += s->requests[i].n_new;
  free(stats.spans);
  return whole && tokens > 0 ? tokens / (stats.end - stats.start) : 0;
}

enum { WIDEST = 8 };  // longest output of variance.png's workloads, in means

static double mean_length(const Dist* d) {
  return d->kind == DIST_UNIFORM ? (d->a + d->b) / 2 : d->a;
}

// From a stream's output lengths alone: their spread (standard deviation / mean), and how much
// longer than the mean the longest of each static batch is, for which all its rows are computed.
static void length_spread(const Stream* s, int batch, double* cv, double* ideal) {
  double sum = 0, squares = 0, longest = 0, computed = 0;
  for (int i = 0; i < s->n; i++) {
    double x = s->requests[i].max_new;
    int members = i % batch + 1;
    sum += x;
    squares += x * x;
    longest = members == 1 ? x : fmax(longest, x);
    if (members == batch || i == s->n - 1) computed += longest * members;
  }
  *cv = sqrt(fmax(squares / s->n - sum / s->n * sum / s->n, 0)) / (sum / s->n);
  *ideal = computed / sum;
}

// The same mean output, spread more and more: where the gain of continuous batching comes from.
// Prompts are equal and all there at once, so that nothing else differs.
static void measure_variance(Comparison* c) {
  Options o = *c->o;
  double mean = mean_length(&o.output);
  const Dist spreads[] = {{DIST_FIXED, round(mean), 0, 0},
                          {DIST_UNIFORM, ceil(mean / 2), floor(1.5 * mean), 0},
                          {DIST_UNIFORM, 1, floor(2 * mean), 0},
                          {DIST_EXP, mean, 0, WIDEST * mean},
                          {DIST_LOGNORMAL, mean, 1.3, WIDEST * mean}};
  static const char* const names[] = {"all %g", "uniform %g-%g", "uniform %g-%g", "exp %g",
                                      "lognormal %g, %g"};
  o.rate = 0;
  // Whole batches only, and where they take real time not more than enough. The engine was opened
  // for the stream's longest prompt, which the mean of a skewed distribution may exceed.
  int batch = c->limits.max_batch, most = batch < 8 ? 24 : 3 * batch;
  bool simulated = c->session->device.api == &sim_backend;
  if (!simulated && o.n_requests > most) o.n_requests = most;
  o.n_requests -= o.n_requests % batch;
  o.input.a = fmin(round(mean_length(&o.input)), c->stream.longest_prompt);
  o.input.kind = DIST_FIXED;
  snprintf(c->variance_name, sizeof c->variance_name,
           "%d requests, prompt %.0f, outputs of mean %.0f, all at once", o.n_requests, o.input.a,
           mean);
  double cv, ideal;
  length_spread(&c->stream, batch, &cv, &ideal);
  printf(
      "\nBy its output lengths alone (cv %.2f) this stream allows %.2fx. The same with other "
      "spreads: %s.\n",
      cv, ideal, c->variance_name);
  for (int k = 0; k < 5 && !interrupted; k++) {
    Stream s;
    VariancePoint* p = &c->points[c->n_points];
    memset(&s, 0, sizeof s);
    drawn_stream(&s, &c->session->weights.config, &o, spreads[k]);
    measure_stream(&s);
    cap_outputs(s.requests, s.n, MOST_TOKENS, c->size.max_positions - s.longest_prompt);
    length_spread(&s, batch, &p->cv, &p->ideal);
    snprintf(p->name, sizeof p->name, names[k], spreads[k].a, spreads[k].b);
    p->static_tok_s = tokens_per_second(c, &s, POLICY_STATIC);
    p->continuous_tok_s = interrupted ? 0 : tokens_per_second(c, &s, POLICY_CONTINUOUS);
    free_requests(s.requests, s.n);
    if (p->static_tok_s <= 0 || p->continuous_tok_s <= 0) return;
    c->n_points++;
    printf(
        "outputs %-20s cv %4.2f: static %8.1f tok/s, continuous %8.1f: %.2fx (lengths alone: "
        "%.2fx)\n",
        p->name, p->cv, p->static_tok_s, p->continuous_tok_s, p->continuous_tok_s / p->static_tok_s,
        p->ideal);
    fflush(stdout);
  }
}

// An exit status: not 0, and err says why.
static int make_stream(Stream* s, const Config* c, const Options* o, char* err) {
  const char* prompts[MAX_PROMPTS] = {"Once upon a time"};
  int n_prompts = 1;
  if (o->trace && !traced_stream(s, c, o, err)) return 1;
  if (!o->trace) drawn_stream(s, c, o, o->output);
  bool sim = strncmp(o->device, "sim:", 4) == 0;  // which knows no text, and so not where it ends
  if (o->prompts_file && sim)
    return say(err, ERR_LEN, "--prompts needs a device that computes: %s does not", o->device), 2;
  if (o->prompts_file && !byte_level(c))
    return say(err, ERR_LEN, "--prompts: %s does not read and write bytes", c->name), 2;
  if (o->prompts_file && (n_prompts = read_prompts(o->prompts_file, prompts, err)) < 0) return 1;
  if (byte_level(c) && !o->trace && !sim) give_text(s, prompts, n_prompts, (float)o->temperature);
  for (int i = 0; i < n_prompts && o->prompts_file; i++) free((void*)prompts[i]);
  measure_stream(s);
  int longest = s->longest_prompt + s->longest_new;
  if (!o->trace && longest > c->max_context)
    return say(err, ERR_LEN,
               "a prompt of %d and an output of %d exceed %s's context of %d tokens; @LONGEST caps "
               "both",
               s->longest_prompt, s->longest_new, c->name, c->max_context),
           2;
  char arrivals[64] = "all at once";
  if (o->rate > 0) snprintf(arrivals, sizeof arrivals, "%.3g requests/s", o->rate);
  if (o->trace && o->rate == 0) snprintf(arrivals, sizeof arrivals, "as recorded");
  if (s->requests[s->n - 1].arrival == 0) snprintf(arrivals, sizeof arrivals, "all at once");
  if (o->trace)
    snprintf(s->name, sizeof s->name, "%d requests of %.60s, %s", s->n,
             strrchr(o->trace, '/') ? strrchr(o->trace, '/') + 1 : o->trace, arrivals);
  else
    snprintf(s->name, sizeof s->name, "%d requests, prompt %.30s, output %.30s%s, %s", s->n,
             s->text ? "text" : o->input_text, s->text ? "its own end, at most " : "",
             o->output_text, arrivals);
  return 0;
}

static bool write_compare(Comparison* c, const char* dir, char* err) {
  const Options* o = c->o;
  const Device* d = &c->session->device;
  CompareReport r = {c->results,
                     c->n_results,
                     c->points,
                     c->n_points,
                     o->rules.slo_ttft_ms,
                     o->rules.slo_tpot_ms,
                     o->rules.percentile,
                     c->session->weights.config.name,
                     d->name,
                     c->stream.name,
                     c->variance_name,
                     d->api == &sim_backend};
  ResultFile file;
  if (!result_open(&file, dir, "compare.json", err)) return false;
  put(file.f, JSON,
      "{\n'model': %s, 'device': %s, 'workload': %s, 'max_batch': %i, 'step_tokens': %i,\n"
      "'kv_blocks': %i, 'slo_ttft_ms': %g, 'slo_tpot_ms': %g, 'interrupted': %i,\n'policies': [",
      r.model, r.device, r.workload, c->limits.max_batch, c->limits.step_tokens, c->size.n_blocks,
      r.slo_ttft_ms, r.slo_tpot_ms, interrupted != 0);
  for (int i = 0; i < r.n_results; i++) {
    fputs(i ? ",\n{" : "\n{", file.f);
    put_policy_row(file.f, JSON, &r.results[i]);
    fputs("}", file.f);
  }
  fputs("\n],\n\"variance\": [", file.f);
  for (int i = 0; i < r.n_points; i++) {
    const VariancePoint* p = &r.points[i];
    fputs(i ? ",\n{" : "\n{", file.f);
    put(file.f, JSON,
        "'outputs': %s, 'cv': %f, 'static_tok_s': %g, 'continuous_tok_s': %g, "
        "'ideal': %g}",
        p->name, p->cv, p->static_tok_s, p->continuous_tok_s, p->ideal);
  }
  fputs("\n]\n}\n", file.f);
  if (!result_close(&file, err)) return false;
  char stale[PATH_LEN];  // another run's chart would not go with these
  snprintf(stale, sizeof stale, "%s/variance.png", dir);
  if (r.n_points == 0) remove(stale);
  return plot_compare(&r, dir, err);
}

// False: interrupted; what was measured until then is kept.
static bool run_policies(Comparison* c) {
  const Options* o = c->o;
  bool whole = true;
  Workload warm = {c->stream.requests, c->stream.n,    POLICY_CONTINUOUS,
                   c->limits,          c->stream.text, NULL};
  RunStats stats;
  memset(&stats, 0, sizeof stats);
  if (c->session->device.api != &sim_backend) run_requests(&c->engine, &warm, 0.5, &stats);
  free(stats.spans);
  put_policy_row(c->csv.f, HEADER, &no_result);
  fputc('\n', c->csv.f);
  put_request_row(c->requests.f, HEADER, POLICY_STATIC, 0, &no_request, 0);
  print_policy_header(stdout, o->rules.percentile);
  for (int policy = 0; policy < N_POLICIES && whole && !interrupted; policy++)
    if (o->policies & 1 << policy) whole = run_policy(c, (Policy)policy);
  return whole && !interrupted;
}

// Weights, engine and limits for the stream. wide: the longest output of variance.png's workloads.
static bool open_comparison(Comparison* c, int wide, char* err) {
  Session* s = c->session;
  const Options* o = c->o;
  const Config* config = &s->model.config;
  Limits limits = {o->max_batch,        o->step_tokens, o->max_input_len, o->max_new_tokens,
                   o->max_total_tokens, o->timeout_s,   o->batch_wait_s,  o->kv_watermark_pct};
  int longest_new = c->stream.longest_new > wide ? c->stream.longest_new : wide;
  long positions = (long)c->stream.longest_prompt + longest_new;
  if (positions > config->max_context) positions = config->max_context;
  c->limits = limits;
  bool capped = o->max_new_tokens > 0 && o->max_new_tokens < longest_new;  // by the user
  if (!capped) c->limits.max_new = longest_new;
  EngineSize size = {o->step_tokens, o->max_batch, (int)positions, blocks_for(o->kv_tokens)};
  c->size = size;
  if (!weights_open(&s->weights, &s->device, &s->model, matmul_of(o->matmul), (int)positions, err))
    return false;
  if (open_with_fallback(&c->engine, &s->device, &s->weights, &c->size, &c->limits, err) != ROW_OK)
    return false;
  if (c->limits.max_batch < o->max_batch)
    printf("out of memory: the batch is %d instead of %d, the rest waits\n", c->limits.max_batch,
           o->max_batch);
  int most = capped ? o->max_new_tokens : longest_new;
  if (c->limits.max_new < most) {
    printf("out of memory: outputs end after %d tokens\n", c->limits.max_new);
    cap_outputs(c->stream.requests, c->stream.n, most, c->limits.max_new);
  }
  if (!capped && c->limits.max_new > c->stream.longest_new)
    c->limits.max_new = c->stream.longest_new;  // what static batches reserve
  return true;
}

static void close_comparison(Comparison* c) {
  if (c->engine.device) engine_close(&c->engine);
  free_requests(c->stream.requests, c->stream.n);
  free(c->answers);
  for (int i = 0; i < c->n_results; i++) {
    free((void*)c->results[i].spans);
    free(c->ms[i]);
  }
}

// Why there is no variance.png; NULL: there will be one.
static const char* no_variance(const Comparison* c) {
  const Options* o = c->o;
  bool both = o->policies & 1 << POLICY_STATIC && o->policies & 1 << POLICY_CONTINUOUS;
  if (!both) return "it compares static with continuous";
  if (o->trace) return "a trace has one spread of lengths";
  if (c->stream.text) return "text ends where it ends";
  if (o->kv_tokens > 0) return "the KV pool is limited";
  bool limited = o->max_input_len || o->max_new_tokens || o->max_total_tokens || o->timeout_s > 0;
  if (limited) return "limits decide who runs";
  return o->n_requests < o->max_batch ? "there are fewer requests than slots" : NULL;
}

static int run_comparison(Comparison* c) {
  Session* s = c->session;
  const Options* o = c->o;
  char err[ERR_LEN];
  const char* why = no_variance(c);
  if (!open_comparison(c, why ? 0 : (int)ceil(WIDEST * mean_length(&o->output)), err)) {
    result_drop(&c->csv);
    result_drop(&c->requests);
    return give_up(1, err);
  }
  printf("%s on %s, %s; up to %d at once, %d tokens a step, %d KV blocks of %d tokens\n\n",
         s->weights.config.name, s->device.name, c->stream.name, c->limits.max_batch,
         c->limits.step_tokens, c->size.n_blocks, KV_BLOCK);
  bool whole = run_policies(c);
  if (!whole)
    printf("\nInterrupted: what was not finished is left out%s.\n",
           c->n_results == 0 ? ", earlier results stay" : "; no variance.png");
  if (c->n_results == 0) {  // earlier results stay as they are
    result_drop(&c->csv);
    result_drop(&c->requests);
    return 130;
  }
  if (c->differs > 0)
    printf("\nFAULT: %d requests got other tokens than under the first policy\n", c->differs);
  else if (c->n_results > 1 && s->device.api != &sim_backend)
    printf("\nEvery finished request got the same tokens under each policy.\n");
  if (whole && !why) measure_variance(c);
  if (whole && interrupted) printf("\nInterrupted: variance.png lacks spreads, or is left out.\n");
  if (whole && why) printf("\nNo variance.png: %s.\n", why);
  int answered = 0;
  for (int i = 0; i < c->n_results; i++) answered += c->results[i].completed;
  bool written = result_close(&c->csv, err) && result_close(&c->requests, err);
  if (!written || !write_compare(c, o->out, err)) return give_up(1, err);
  printf("\n%s/: compare.csv requests.csv compare.json schedule.png policies.png%s\n", o->out,
         c->n_points > 0 ? " variance.png" : "");
  if (interrupted || answered > 0) return c->differs > 0;
  return give_up(1, "no request was answered: all were rejected or timed out");
}

static int cmd_compare(Session* s, const Options* o) {
  char err[ERR_LEN];
  Comparison c;
  memset(&c, 0, sizeof c);
  c.session = s;
  c.o = o;
  int status = make_stream(&c.stream, &s->model.config, o, err);
  if (status != 0) {
    give_up(status, err);
  } else if (!prepare_out(o->out, err) || !result_open(&c.csv, o->out, "compare.csv", err)) {
    status = give_up(1, err);
  } else if (!result_open(&c.requests, o->out, "requests.csv", err)) {
    result_drop(&c.csv);
    status = give_up(1, err);
  } else {
    c.answers = (uint32_t*)xcalloc(c.stream.n, sizeof *c.answers);
    status = run_comparison(&c);
  }
  close_comparison(&c);
  return status;
}

#include "parts/generate.h"

static int run_on_device(Session* s, Options* o) {
  char err[ERR_LEN];
  if (!open_device(s, o, err)) return give_up(1, err);
  if (s->device.api == &cpu_backend && !cpu_can(o, err)) return give_up(2, err);
  s->device.fp8_kv = strcmp(o->kv, "fp8") == 0;
  if (interrupted) return 130;
  if (!open_model(s, o, err)) return give_up(1, err);
  fill_defaults(o, &s->model.config, s->device.api != &cpu_backend);
  int status = o->command == CMD_GENERATE  ? cmd_generate(s, o)
               : o->command == CMD_COMPARE ? cmd_compare(s, o)
                                           : cmd_sweep(s, o);
  weights_close(&s->weights, &s->device);
  free_model(&s->model);
  device_close(&s->device);
  return interrupted ? 130 : status;
}

// OpenMP threads that spin at a barrier waste whole scheduler slices as soon as anything else runs:
// 586 ms a step instead of 9 with one busy process beside us (NOTES.md). The library reads its
// setting before main, so make it and start over, unless the user has chosen.
static void limit_spinning(char** argv) {
  if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
  if (setenv("GOMP_SPINCOUNT", "1000", 1) == 0) execv("/proc/self/exe", argv);
}

// The first Ctrl-C, TERM or hang-up ends the run in good order. A file that may not grow is an
// error code, like a full disk.
static void set_signals(void) {
  struct sigaction action, was;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_interrupt;
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  if (sigaction(SIGHUP, NULL, &was) == 0 && was.sa_handler != SIG_IGN)  // nohup stays in force
    sigaction(SIGHUP, &action, NULL);
  action.sa_handler = on_bus_error;
  sigaction(SIGBUS, &action, NULL);
  signal(SIGXFSZ, SIG_IGN);
}

static int run_command(Options* o) {
  Session s;
  memset(&s, 0, sizeof s);
  if (o->help) return print_help(stdout, o->command), 0;
  if (o->version) return printf("bs %s\n", BS_VERSION), 0;
  set_signals();
  if (o->command == CMD_KNEE) return cmd_knee(&s, o);
  if (o->command != CMD_PLAN) return run_on_device(&s, o);
  fill_defaults(o, &s.model.config, true);
  return cmd_plan(&s, o);
}

#ifdef BS_NO_MAIN
#define main bs_main  // tests include this file
#endif
int main(int argc, char** argv) {
  Options o;
  char err[ERR_LEN];
  limit_spinning(argv);
  if (!parse_options(argc, argv, &o, err)) return give_up(2, err);
  int status = run_command(&o);
  if (fflush(stdout) != 0 || ferror(stdout)) return give_up(1, "standard output: cannot write");
  return status;
}
#ifdef BS_NO_MAIN
#undef main
#endif
