// ---- GPUs that nobody here has to own: what `bs plan` and the sim device compute with.

typedef struct {
  const char* name;
  double mem, bandwidth, rate;  // bytes, bytes/s, FLOP/s of fp16 matrices summed in fp32, dense
  double step;                  // s that a step takes beyond its roofline: launches, the host
} SimGpu;

// From NVIDIA's data sheets and white papers. A data sheet's "with sparsity" is halved. GeForce
// cards sum in fp32 at half rate: 512 FLOP per clock and multiprocessor, here at the highest boost
// clock (Ada white paper, 4090: 128 x 512 x 2.52 GHz = 165 TFLOP/s); a laptop's power limit may
// allow less. T4 and L4 give 1/16 of their memory to error correction, as nvidia-smi shows.
// clang-format off
static const SimGpu sim_gpus[] = {
    {"3060-laptop", 6 * 0x1p30, 336e9, 26.2e12, 0},  // 30 SM, 1.703 GHz; 192 bit x 14 Gbit/s
    {"4060-laptop", 8 * 0x1p30, 256e9, 29.1e12, 0},  // 24 SM, 2.370 GHz; 128 bit x 16 Gbit/s
    {"4070-laptop", 8 * 0x1p30, 256e9, 40.1e12, 0},  // 36 SM, 2.175 GHz; 128 bit x 16 Gbit/s
    {"4090-laptop", 16 * 0x1p30, 576e9, 79.4e12, 0}, // 76 SM, 2.040 GHz; 256 bit x 18 Gbit/s
    {"4090", 24 * 0x1p30, 1008e9, 165.2e12, 0},      // Ada white paper, appendix A
    {"5090", 32 * 0x1p30, 1792e9, 209.5e12, 0},      // RTX Blackwell white paper, appendix A
    {"t4", 15 * 0x1p30, 300e9, 65e12, 0},            // T4 data sheet: 16 GB, mixed precision
    {"l4", 22.5 * 0x1p30, 300e9, 121e12, 0},         // L4 data sheet: 24 GB, 242 sparse
    {"a100-40g", 40 * 0x1p30, 1555e9, 312e12, 0},    // A100 data sheet, 40 GB
    {"a100-80g", 80 * 0x1p30, 2039e9, 312e12, 0},    // A100 data sheet, 80 GB SXM
    {"h100", 80 * 0x1p30, 3350e9, 989e12, 0},        // H100 data sheet, SXM: 1,979 sparse
    {"h200", 141 * 0x1p30, 4800e9, 989e12, 0},       // H200 data sheet, SXM: 1,979 sparse
    {"b200", 180 * 0x1p30, 8000e9, 2250e12, 0},      // DGX B200 data sheet, an eighth: 4,500 sparse
};
// clang-format on
enum { N_SIM_GPUS = sizeof sim_gpus / sizeof sim_gpus[0] };

// spec is what follows "sim:": a name of the table, or mem=8G,bw=256e9,rate=40e12 in any order,
// with step=300e-6 if it was measured. It must outlive out, whose name it becomes. False: err says
// what is allowed.
static bool find_sim_gpu(const char* spec, SimGpu* out, char* err) {
  struct {
    const char* key;
    double *field, least, most;
  } keys[] = {{"mem=", &out->mem, 1e6, 1e18},
              {"bw=", &out->bandwidth, 1e6, 1e18},
              {"rate=", &out->rate, 1e6, 1e18},
              {"step=", &out->step, 1e-9, 10}};
  for (int i = 0; i < N_SIM_GPUS; i++) {
    *out = sim_gpus[i];
    if (strcasecmp(spec, out->name) == 0) return true;
  }
  memset(out, 0, sizeof *out);
  out->name = spec;
  bool ok = true;
  for (const char* at = spec; ok && *at; at += *at == ',') {
    int k = 0;
    while (k < 4 && strncmp(at, keys[k].key, strlen(keys[k].key)) != 0) k++;
    ok = k < 4 && *keys[k].field == 0;  // known, and not given twice
    if (!ok) break;
    char* end;
    at += strlen(keys[k].key);
    double value = strtod(at, &end);
    ok = isdigit((unsigned char)*at) && strspn(at, "0123456789.e+-") >= (size_t)(end - at);
    if (k == 0 && (*end == 'M' || *end == 'G')) value *= *end++ == 'M' ? 0x1p20 : 0x1p30;
    ok = ok && value >= keys[k].least && value <= keys[k].most;
    ok = ok && (*end == '\0' || (*end == ',' && end[1] != '\0'));
    *keys[k].field = value;
    at = end;
  }
  if (ok && out->mem > 0 && out->bandwidth > 0 && out->rate > 0) return true;
  int n = snprintf(err, ERR_LEN, "--device sim:%.80s: allowed is mem=8G,bw=256e9,rate=40e12 %s",
                   spec, "(and step=300e-6) or");
  for (int i = 0; i < N_SIM_GPUS; i++)
    n += snprintf(err + n, (size_t)(ERR_LEN - n), " %s", sim_gpus[i].name);
  return false;
}

// ---- A device on a virtual clock: no weights, no tokens worth reading, and a step takes as long
// as the roofline says. Scheduler, sweep, memory and plots are the same, for a GPU and a model that
// nobody here owns.

static SimGpu sim_gpu;  // which one; chosen before the device is opened
static size_t sim_bytes;

static bool sim_open(Device* d, char* err) {
  (void)err;
  snprintf(d->name, sizeof d->name, "sim:%.200s", sim_gpu.name);
  d->total = (size_t)sim_gpu.mem;
  sim_bytes = 0;
  return true;
}

static double sim_bandwidth(const Device* d) {
  (void)d;
  return sim_gpu.bandwidth;
}

static double sim_rate(const Device* d) {
  (void)d;
  return sim_gpu.rate;
}

static size_t sim_used(void) {
  return sim_bytes;
}

static void* sim_alloc(size_t bytes) {  // only the size is real
  size_t* p = (size_t*)malloc(sizeof *p);
  if (!p) return NULL;
  *p = bytes;
  sim_bytes += bytes;
  return p;
}

static void sim_free(void* p) {
  sim_bytes -= *(size_t*)p;
  free(p);
}

static void sim_upload(void* to, const void* from, size_t bytes) {
  (void)to, (void)from, (void)bytes;
}

static bool sim_fill(Matrix* m, const Tensor* from, RowMap map, bool packed) {
  (void)m, (void)from, (void)map, (void)packed;
  return true;
}

// Bytes that a step needs on a GPU, without gpu_work_alloc's smaller parts: x, normed and the
// results of linear layers, q and attention, hidden; logits.
static double gpu_workspace(const Config* c, double tokens, double rows) {
  double qkv = qkv_width(c), q = (double)c->n_heads * c->head_dim;
  double per_token = 6.0 * c->dim + 4 * fmax(qkv, c->dim) + 4 * q + 2.0 * c->hidden_dim;
  return tokens * per_token + 4.0 * rows * c->vocab_size;
}

static bool sim_engine_open(Engine* e) {
  double bytes = gpu_workspace(&e->w->config, e->size.max_tokens, e->size.max_slots);
  return device_alloc(e->device, MEM_WORK, (size_t)bytes) != NULL;
}

static void sim_engine_close(Engine* e) {
  (void)e;
}

static double sim_clock(Engine* e) {
  return e->sim_now;
}

static void sim_wait(Engine* e, double until) {
  e->sim_now = fmax(e->sim_now, until);
}

static void sim_submit(Engine* e, const Batch* b, Step* s) {
  const Device* d = e->device;
  Work w = count_work(&e->w->config, b, device_kv_size(d));
  double bytes = w.weight_bytes + w.kv_bytes;
  if (e->w->matmul == MATMUL_REUSE) bytes = w.reuse8_bytes;
  if (e->w->matmul < MATMUL_REUSE) bytes = w.noreuse_bytes;  // naive, gemv
  double roof = fmax(bytes / d->bandwidth, w.flops / d->rate);
  e->sim_end = fmax(e->sim_end, e->sim_now) + roof + sim_gpu.step;
  s->end = e->sim_end;
  for (int r = 0; r < b->n_rows; r++) s->tokens[r] = 0;
}

static void sim_collect(Engine* e, Step* s) {
  sim_wait(e, s->end);
}

// clang-format off
static const Backend sim_backend = {
    sim_open, sim_bandwidth, sim_rate,
    sim_used, sim_alloc, sim_free, sim_upload,
    1, 1, sizeof(f16), NULL,  // row_multiple, key_multiple, kv_size, slices
    sim_fill, sim_engine_open, sim_engine_close, sim_submit, sim_collect,
    sim_clock, sim_wait, NULL};  // there are no logits
// clang-format on
