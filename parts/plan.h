// ---- The plan: the same arithmetic for a GPU that is not here and a model that was not loaded
// (article 2, section 4.4). Times are the roofline's: what no program can beat, and what a good one
// comes near to where a step is long.

typedef struct {
  Config config;
  Device device;      // name, limit and ceilings of all cards together: ideal tensor parallelism
  int cards, fewest;  // in use; that hold the model and one request
  double step;        // s beyond the roofline
  bool fp8_kv;
  int input_len, output_len, step_tokens;
  double watermark_pct;
} Plan;

static double plan_kv_bytes(const Plan* p) {
  return (double)kv_bytes_per_token(&p->config, p->fp8_kv ? 1 : 2);
}

// Counts a step: a token for each of n sequences at their mean context, or a prompt of n tokens.
static Work plan_work(const Plan* p, int n, bool decode) {
  int* pos = (int*)xcalloc(2 * (size_t)n, sizeof *pos);
  Batch b = {n, decode ? n : 1, NULL, pos, pos + n, NULL};
  for (int i = 0; i < n; i++) {
    b.pos[i] = decode ? p->input_len + (p->output_len - 2) / 2 : i;
    b.slot[i] = decode ? i : 0;
  }
  Work w = count_work(&p->config, &b, p->fp8_kv ? 1 : 2);
  free(pos);
  return w;
}

// The four parts for `batch` sequences of `length` tokens. 533 MiB is what one H200 lost beyond our
// allocations (plots/h200).
static void plan_memory(const Plan* p, int batch, int length, SweepRow* row) {
  const Config* c = &p->config;
  double blocks = blocks_for(length), tokens = (double)batch * p->input_len;
  tokens = fmin(fmax(tokens, batch), p->step_tokens);
  row->mem_weights_mib = 2.0 * parameter_count(c) / MIB;
  row->mem_kv_mib = batch * blocks * KV_BLOCK * plan_kv_bytes(p) / MIB;
  row->mem_work_mib = gpu_workspace(c, tokens, batch) / MIB;
  row->mem_other_mib = 533.0 * p->cards;
  row->mem_limit_mib = p->device.limit / MIB;
  row->mem_used_mib =
      row->mem_weights_mib + row->mem_kv_mib + row->mem_work_mib + row->mem_other_mib;
}

// The most sequences of `length` tokens that stay under the watermark; memory grows with each.
static int plan_fit(const Plan* p, int length) {
  int fit = 0;
  for (int step = 1 << 20; step > 0; step /= 2) {
    SweepRow r;
    plan_memory(p, fit + step, length, &r);
    if (100 * r.mem_used_mib <= p->watermark_pct * r.mem_limit_mib) fit += step;
  }
  return fit;
}

static void plan_row(const Plan* p, int batch, SweepRow* row) {
  const Device* d = &p->device;
  int in = p->input_len, out = p->output_len;
  memset(row, 0, sizeof *row);
  row->batch = batch;
  row->simulated = true;
  row->input_len = in;
  row->output_len = out;
  plan_memory(p, batch, in + out, row);
  if (row->mem_used_mib > row->mem_limit_mib) {
    row->status = ROW_SKIPPED;
    say(row->reason, sizeof row->reason, "KV needs %.4g GiB, %.4g GiB left", row->mem_kv_mib / 1024,
        (row->mem_limit_mib - row->mem_used_mib + row->mem_kv_mib) / 1024);
    return;
  }
  row->n_requests = batch;
  StepTotals prefill, decode;
  memset(&prefill, 0, sizeof prefill);
  memset(&decode, 0, sizeof decode);
  Work all = plan_work(p, in, false), each = plan_work(p, batch, true);
  double tokens = (double)batch * in;  // every prompt is read before anyone decodes, as in measure
  double steps = ceil(tokens / p->step_tokens);
  double head = 2.0 * p->config.vocab_size * p->config.dim;  // read where a prompt ends
  all.weight_bytes = (all.weight_bytes - head) * steps + head * fmin(steps, batch);
  all.kv_bytes *= batch;
  all.flops *= batch;
  add_step(&prefill, d, all, tokens, 0);
  add_step(&decode, d, each, batch, 0);
  prefill.seconds = prefill.roof + steps * p->step;
  decode.seconds = decode.roof + p->step;
  decode.n = out > 1;
  double first = 1e3 * prefill.seconds, step = out > 1 ? 1e3 * decode.seconds : NAN;
  double last = first + 1e3 * (out - 1) * decode.seconds;
  Percentiles ttft = {first, first, first, batch}, tpot = {step, step, step, out > 1 ? batch : 0};
  Percentiles e2e = {last, last, last, batch};
  row->ttft = ttft;
  row->tpot = row->itl = tpot;
  row->itl.n = whole_number((double)batch * (out - 1));
  row->e2e = e2e;
  row->output_tok_s = 1e3 * batch * out / last;
  row->user_tok_s = 1e3 / step;
  fill_speed(row, d, &prefill, &decode);
}

static void plan_cards(Plan* p, const SimGpu* gpu, int cards, double vram) {
  double mem = vram > 0 && vram < gpu->mem ? vram : gpu->mem;
  p->cards = cards;
  p->device.limit = (size_t)(mem * cards);
  p->device.bandwidth = gpu->bandwidth * cards;
  p->device.rate = gpu->rate * cards;
  p->step = gpu->step;
  snprintf(p->device.name, sizeof p->device.name, "%.200s", gpu->name);
  if (cards > 1) snprintf(p->device.name, sizeof p->device.name, "%d x %.200s", cards, gpu->name);
}

// Spreads the model over `cards`, or, if that is 0, over the fewest that hold it and get the same
// number of query heads each, as tensor parallelism needs. False: it cannot be done.
static bool plan_open(Plan* p, const SimGpu* gpu, int cards, double vram, char* err) {
  int length = p->input_len + p->output_len;
  SweepRow one;
  int heads = p->config.n_heads;
  for (p->fewest = 1; p->fewest <= heads; p->fewest++) {
    plan_cards(p, gpu, p->fewest, vram);
    if (heads % p->fewest == 0 && plan_fit(p, length) > 0) break;
  }
  bool enough = p->fewest <= heads;
  plan_cards(p, gpu, cards > 0 ? cards : enough ? p->fewest : heads, vram);
  if (plan_fit(p, length) > 0) return true;
  plan_memory(p, 1, length, &one);
  char needs[80] = "no number of cards that its heads divide among is enough";
  if (enough) snprintf(needs, sizeof needs, "it needs --gpus %d", p->fewest);
  return say(err, ERR_LEN,
             "%s does not fit %s: weights %.1f GiB, with one request and the framework %.1f GiB, "
             "and %g%% of %.1f GiB may be used; %s",
             p->config.name, p->device.name, one.mem_weights_mib / 1024, one.mem_used_mib / 1024,
             p->watermark_pct, one.mem_limit_mib / 1024, needs);
}

static void print_plan(FILE* f, const Plan* p) {
  const Config* c = &p->config;
  double kv = plan_kv_bytes(p);
  int length = p->input_len + p->output_len, most = plan_fit(p, length);
  SweepRow r;
  plan_memory(p, most, length, &r);
  fprintf(f, "Simulated: %s on %s, %.0f GB/s, %.1f TFLOP/s; %d prompt + %d new tokens\n", c->name,
          p->device.name, p->device.bandwidth / 1e9, p->device.rate / 1e12, p->input_len,
          p->output_len);
  if (p->cards > 1)
    fprintf(
        f,
        "%d cards, as ideal tensor parallelism: all adds up and messages cost nothing (real ones "
        "do); %d suffice for the weights\n",
        p->cards, p->fewest);
  fprintf(f, "Memory: %d requests fit into %g%% of %.1f GiB: weights %.2f + KV cache %.2f", most,
          p->watermark_pct, r.mem_limit_mib / 1024, r.mem_weights_mib / 1024, r.mem_kv_mib / 1024);
  fprintf(f, " + workspace %.2f + framework %.2f GiB\n", r.mem_work_mib / 1024,
          r.mem_other_mib / 1024);
  fprintf(f, "KV cache: %.1f KiB per token (%d of %d heads, %s)\n", kv / 1024, c->n_kv_heads,
          c->n_heads, p->fp8_kv ? "fp8" : "fp16");
  fprintf(f, "  tokens  GiB each  sequences that fit  on each card\n");
  for (length = 512; length <= c->max_context; length *= 2) {
    int fit = plan_fit(p, length);
    fprintf(f, "%8d%10.3f%20d%14.1f\n", length, length * kv / GIB, fit, (double)fit / p->cards);
  }
  fprintf(f, "\n");
}

static int plan_curve(const Plan* p, const Options* o, SweepRow* rows) {
  static const int defaults[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};
  int n = o->n_batches ? o->n_batches : 11;
  for (int i = 0; i < n; i++) plan_row(p, o->n_batches ? o->batches[i] : defaults[i], &rows[i]);
  return n;
}

// What the options say of the plan; an exit status, and err where it is not 0.
static int plan_init(Plan* p, Session* s, const Options* o, char* err) {
  char path[PATH_LEN];
  memset(p, 0, sizeof *p);
  s->device.limit = (size_t)(o->vram ? fmin((double)o->vram, sim_gpu.mem) : sim_gpu.mem);
  const char* name = choose_model(s, o);
  const Config* preset = find_preset(name);
  snprintf(path, sizeof path, "%s/config.json", name);
  if (preset) p->config = *preset;
  if (!preset && !load_config(path, &p->config, err)) return 1;
  p->fp8_kv = strcmp(o->kv, "fp8") == 0;
  p->input_len = o->input_len;
  p->output_len = o->output_len;
  p->step_tokens = o->step_tokens;
  p->watermark_pct = o->rules.watermark_pct;
  if (!lengths_fit(o, &p->config, err)) return 2;
  if (o->cards > 0 && p->config.n_heads % o->cards != 0)
    return say(err, ERR_LEN, "--gpus %d: %s's %d query heads do not divide among them", o->cards,
               p->config.name, p->config.n_heads),
           2;
  return 0;
}

// Beside measurements of a known model on a known GPU stands what a step could take at best.
static void add_roofline(const Plan* p, SweepRow* rows, int n) {
  for (int i = 0; i < n; i++) {
    SweepRow best, *r = &rows[i];
    plan_row(p, r->batch, &best);
    if (r->status != ROW_OK || best.status != ROW_OK) continue;
    r->step_us = 1e3 * (isnan(r->tpot.p50) ? at_percentile(r->tpot, 99) : r->tpot.p50);
    r->roof_us = best.roof_us;
    r->noreuse_us = best.noreuse_us;
    r->step_bytes = best.step_bytes;
    r->step_flops = best.step_flops;
    r->roof_pct = 100 * r->roof_us / r->step_us;
    r->mbu_pct = best.mbu_pct * r->roof_pct / 100;
    r->mfu_pct = best.mfu_pct * r->roof_pct / 100;
    r->bound = r->roof_pct < 50 ? BOUND_OVERHEAD : best.bound;
  }
}

// A table of our own holds the ceilings that were probed: what it counted, over its share of them.
static void find_ceilings(SweepReport* s) {
  for (int i = 0; i < s->n_rows && s->bandwidth == 0; i++) {
    const SweepRow* r = &s->rows[i];
    if (!(r->step_us > 0 && r->step_bytes > 0 && r->mbu_pct > 0 && r->mfu_pct > 0)) continue;
    s->bandwidth = 1e8 * r->step_bytes / (r->step_us * r->mbu_pct);
    s->rate = 1e8 * r->step_flops / (r->step_us * r->mfu_pct);
  }
}

// bs knee FILE: the walk over measurements that are there already.
static int cmd_knee(Session* s, const Options* o) {
  static SweepRow rows[MAX_MEASURED];
  char err[ERR_LEN], note[WHY_LEN];
  KneeRules rules = o->rules;
  Plan p;
  int n = read_measurements(o->file, o->input_len, o->output_len, rows, err), status = 0;
  if (n < 0 || !choose_latency(o->file, rows, n, &rules, o->percentile_given, note, err))
    return give_up(1, err);
  SweepReport report = new_report(rows, n, rules, *o->model ? o->model : "unknown model", o->file);
  bool given = strncmp(o->device, "sim:", 4) == 0;  // a device whose roofline stands beside them
  if (given) {
    for (int i = 0; i < n; i++)
      if (rows[i].roof_us > 0)
        return give_up(2, "--device: the file has a roofline already; leave --device out");
    Options all = *o;
    all.input_len = rows->input_len;
    all.output_len = rows->output_len;
    if (!all.input_len || !all.output_len)
      return give_up(1, "the file does not say its lengths: --input-len and --output-len do");
    fill_defaults(&all, &s->model.config, true);
    status = plan_init(&p, s, &all, err);
    if (status == 0 && !plan_open(&p, &sim_gpu, o->cards, (double)o->vram, err)) status = 1;
    if (status != 0) return give_up(status, err);
    add_roofline(&p, rows, n);
    report.bandwidth = p.device.bandwidth;
    report.rate = p.device.rate;
    report.cards = p.cards;
    report.device = p.device.name;
  }
  find_ceilings(&report);
  if (report.simulated) printf("Simulated, not measured.\n");
  print_walk(stdout, &report);
  if (!print_doubts(stdout, &report, given ? report.device : NULL))
    print_prediction(stdout, &report);
  printf("\n%s\n", note);
  return save_report(&report, o, "unknown", o->file);
}

// The same plan with other numbers of KV heads: side by side, and in one picture.
static bool compare_heads(const Plan* plan, const SweepReport* reports, const int* heads, int n,
                          const char* dir, char* err) {
  Str names[MAX_BATCHES];
  printf("KV heads  KiB/token  sequences that fit  working point     tok/s\n");
  for (int i = 0; i < n; i++) {
    Plan p = *plan;
    p.config.n_kv_heads = heads[i];
    int at = reports[i].knee.working;
    const SweepRow* r = at < 0 ? &no_row : &reports[i].rows[at];
    double kib = plan_kv_bytes(&p) / 1024;
    const char* kind = heads[i] == 1 ? "MQA" : heads[i] == p.config.n_heads ? "MHA" : "GQA";
    const char* plural = heads[i] == 1 ? "" : "s";
    names[i] = format_str("%s (%d KV head%s): %.3g KiB/token", kind, heads[i], plural, kib);
    printf("%8d%11.1f%20d%15d%10.0f\n", heads[i], kib, plan_fit(&p, p.input_len + p.output_len),
           r->batch, r->output_tok_s);
  }
  printf("%s/: kv_heads.png\n\n", dir);
  return prepare_out(dir, err) && plot_what_if(reports, names, n, dir, err);
}

// bs plan: budget, predicted curve and its knee.
static int cmd_plan(Session* s, const Options* o) {
  static SweepRow rows[MAX_BATCHES][MAX_BATCHES];
  static SweepReport reports[MAX_BATCHES];
  char err[ERR_LEN];
  Plan p;
  int status = plan_init(&p, s, o, err);
  if (status != 0) return give_up(status, err);
  int own = p.config.n_kv_heads, n = o->n_kv_heads ? o->n_kv_heads : 1, cards = o->cards, shown = 0;
  const int* heads = o->n_kv_heads ? o->kv_heads : &own;
  for (int i = n - 1; i >= 0; i--) {  // the most heads first: they need the most cards
    p.config.n_kv_heads = heads[i];
    if (p.config.n_heads % heads[i] != 0) {
      snprintf(err, sizeof err, "--kv-heads %d: must divide the %d query heads of %s", heads[i],
               p.config.n_heads, p.config.name);
      return give_up(2, err);
    }
    if (!plan_open(&p, &sim_gpu, cards, (double)o->vram, err)) return give_up(1, err);
    cards = p.cards;
    if (heads[i] == own) shown = i;
    SweepReport r =
        new_report(rows[i], plan_curve(&p, o, rows[i]), o->rules, p.config.name, p.device.name);
    r.bandwidth = p.device.bandwidth;
    r.rate = p.device.rate;
    r.cards = cards;
    r.fp8_kv = p.fp8_kv;
    reports[i] = r;
  }
  p.config.n_kv_heads = heads[shown];
  if (!plan_open(&p, &sim_gpu, cards, (double)o->vram, err)) return give_up(1, err);  // its fewest
  print_plan(stdout, &p);
  print_table_header(stdout, o->rules);
  for (int i = 0; i < reports[shown].n_rows; i++) print_row(stdout, &rows[shown][i], o->rules);
  printf("\n");
  if (n > 1 && !compare_heads(&p, reports, heads, n, o->out, err)) return give_up(1, err);
  return save_report(&reports[shown], o, dtype_name(p.fp8_kv), NULL);
}
