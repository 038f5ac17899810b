// Answers do not depend on company: weights/tiny under every policy, in every chunking, preempted,
// and after each allocation that can fail has failed, against every request alone. For any device.
#ifdef __SANITIZE_ADDRESS__
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

// ---- The real model, with too little memory: 64 requests for a third of the blocks that the batch
// wants.

enum { N_REAL = SANITIZED ? 16 : 64, REAL_BATCH = 12, REAL_OUT = 40 };

// Beginnings of texts that weights/tiny was trained on, some of them near their end.
static const char* const beginnings[] = {
    "Every morning Fern the stubborn ghost ",
    "Nobody knew that the careful giant at t",
    "And that was the end of Bea's ordinary ",
    "Please come to tea soon.\nYour friend,\n",
    "Once upon a time",
    "\"Is it far?\" asked Martha.",
    "M",
    "And Otto slept very well that ",
};

static void real_requests(Request* r, const Config* c, uint32_t seed) {
  for (int i = 0; i < N_REAL; i++) {
    const char* text = beginnings[(i + seed) % 8];
    uint32_t h = hash32(seed * 1000 + i);
    int n = i % 4 == 3 ? 1 + (int)(h % 40) : (int)strlen(text);
    make_request(&r[i], c, n, 1 + (int)(h / 64 % REAL_OUT), seed, i);
    for (int j = 0; j < n && i % 4 != 3; j++) r[i].tokens[j] = (unsigned char)text[j];
    r[i].temperature = h / 8192 % 2 ? 0.8f : 0;
    r[i].arrival = 0;
  }
}

static void real_run(Engine* e, Request* r, int n, Policy policy, int max_batch, int step_tokens,
                     bool eos, RunStats* stats) {
  Workload w;
  memset(&w, 0, sizeof w);
  w.requests = r;
  w.n = n;
  w.policy = policy;
  w.limits.max_batch = max_batch;
  w.limits.step_tokens = step_tokens;
  w.limits.batch_wait_s = 0.5;
  w.stop_at_eos = eos;
  memset(stats, 0, sizeof *stats);
  CHECK(run_requests(e, &w, INFINITY, stats), "cut short");
  CHECK(e->blocks.n_free == e->blocks.n_blocks, "%d of %d blocks are back", e->blocks.n_free,
        e->blocks.n_blocks);
  free(stats->spans);
  stats->spans = NULL;
}

// How many of the requests have other tokens than alone; with eos those end at the first end token.
static int differing(const Config* c, const Request* one, const Request* all, bool eos,
                     int* ended) {
  int differ = 0;
  for (int i = 0; i < N_REAL; i++) {
    int n = 0;
    bool end = false;
    const int* want = one[i].tokens + one[i].n_prompt;
    while (n < one[i].n_new && !end) {
      for (int j = 0; j < c->n_eos && eos; j++) end |= want[n] == c->eos[j];
      n++;
    }
    differ += all[i].status != FINISHED || all[i].n_new != n || all[i].ended != end ||
              memcmp(all[i].tokens, one[i].tokens, (one[i].n_prompt + n) * sizeof(int)) != 0;
    *ended += end;
  }
  return differ;
}

static int third_of_pool(const Request* r) {
  int blocks = 0, largest = 0;
  for (int i = 0; i < N_REAL; i++) {
    int own = blocks_for(r[i].n_prompt + r[i].max_new);
    blocks += own;
    largest = own > largest ? own : largest;
  }
  blocks = blocks * REAL_BATCH / N_REAL / 3;
  return blocks > largest ? blocks : largest;
}

// Chunks: the most tokens of a prompt beside a batch that decodes.
static void test_real_seed(Device* d, const Weights* w, uint32_t seed, int* ended) {
  static const int chunks[] = {1, 7, 64, 512};
  const Config* c = &w->config;
  Request *one = (Request*)xcalloc(N_REAL, sizeof(Request)),
          *all = (Request*)xcalloc(N_REAL, sizeof(Request));
  RunStats stats;
  Engine e;
  char err[ERR_LEN];
  real_requests(one, c, seed);
  real_requests(all, c, seed);
  EngineSize alone = {64, 1, 80, 0}, small = {0, REAL_BATCH, 80, third_of_pool(one)};
  if (engine_open(&e, d, w, alone, err) != ROW_OK) die("%s", err);
  for (int i = 0; i < N_REAL; i++)
    real_run(&e, &one[i], 1, POLICY_CONTINUOUS, 1, 64, false, &stats);
  if (!SANITIZED && seed == 1) {  // a step of one token: no batch at all
    real_run(&e, all, N_REAL, POLICY_CONTINUOUS, 1, 1, true, &stats);
    int differ = differing(c, one, all, true, ended);
    CHECK(differ == 0, "steps of one token: %d requests differ from alone", differ);
  }
  engine_close(&e);
  for (int i = 0; i < 4 * N_POLICIES; i++) {
    int chunk = chunks[i / N_POLICIES];
    Policy policy = (Policy)(i % N_POLICIES);
    bool eos = (i / N_POLICIES + (int)seed) % 2;
    small.max_tokens = REAL_BATCH - 1 + chunk;
    if (SANITIZED && (chunk == 1 || chunk == 512 || policy == POLICY_BUCKETED)) continue;
    if (engine_open(&e, d, w, small, err) != ROW_OK) die("%s", err);
    real_run(&e, all, N_REAL, policy, REAL_BATCH, REAL_BATCH - 1 + chunk, eos, &stats);
    engine_close(&e);
    int differ = differing(c, one, all, eos, ended);
    CHECK(differ == 0, "%s, seed %u, chunks of %d, eos %d: %d requests differ from alone",
          policy_names[policy], seed, chunk, eos, differ);
    CHECK((stats.preemptions > 0) == (policy == POLICY_CONTINUOUS),
          "%s, chunks of %d: %d preempted", policy_names[policy], chunk, stats.preemptions);
  }
  free_requests(one, N_REAL);
  free_requests(all, N_REAL);
}

// Each of the first 50 allocations of device memory fails once: the engine opens all the same, with
// a smaller batch if one of its own failed, and the answers are those of a full one.
static void test_fallback(Device* d, const Weights* w) {
  const Config* c = &w->config;
  Request *one = (Request*)xcalloc(N_REAL, sizeof(Request)),
          *all = (Request*)xcalloc(N_REAL, sizeof(Request));
  RunStats stats;
  Engine e;
  char err[ERR_LEN];
  int ended = 0, fewer = 0;
  real_requests(one, c, 9);
  real_requests(all, c, 9);
  for (int after = -1; after < (SANITIZED ? 3 : 50); after++) {  // -1: none fails
    Request* r = after < 0 ? one : all;
    EngineSize size = {64, REAL_BATCH, 80, 0};
    Limits limits;
    memset(&limits, 0, sizeof limits);
    limits.max_batch = REAL_BATCH;
    limits.step_tokens = 64;
    d->fail_after = after;
    RowStatus status = open_with_fallback(&e, d, w, &size, &limits, err);
    bool failed = after >= 0 && d->fail_after < 0;
    d->fail_after = -1;
    CHECK(status == ROW_OK, "allocation %d fails: %s", after, err);
    if (status != ROW_OK) continue;
    CHECK(failed ? limits.max_batch < REAL_BATCH && limits.max_batch > 0
                 : limits.max_batch == REAL_BATCH,
          "allocation %d fails (%d): batch %d", after, failed, limits.max_batch);
    CHECK(limits.max_batch <= e.size.max_slots && limits.step_tokens <= e.size.max_tokens &&
              limits.max_batch <= limits.step_tokens && limits.max_new == 0,
          "allocation %d fails: limits and engine agree", after);
    fewer += failed;
    if (after >= 0 && !failed && after % 10 != 9) {  // nothing new to see
      engine_close(&e);
      continue;
    }
    real_run(&e, r, N_REAL, POLICY_CONTINUOUS, limits.max_batch, limits.step_tokens, false, &stats);
    engine_close(&e);
    int differ = differing(c, one, r, false, &ended);
    CHECK(differ == 0, "allocation %d fails: %d requests differ", after, differ);
    CHECK(d->tagged[MEM_KV] == 0 && d->tagged[MEM_WORK] == 0, "all memory is returned");
  }
  CHECK(fewer >= (SANITIZED ? 3 : 5), "only %d allocations could fail", fewer);
  free_requests(one, N_REAL);
  free_requests(all, N_REAL);
}

// With too little memory and with memory that fails, on any device.
static void test_answers(Device* d) {
  Model m;
  Weights w;
  char err[ERR_LEN];
  int ended = 0;
  double start = now();
  if (!load_model("weights/tiny", &m, err)) die("%s", err);
  if (!weights_open(&w, d, &m, MATMUL_MMA, 128, err)) die("%s", err);
  for (uint32_t seed = 1; seed <= (SANITIZED ? 1 : 3); seed++) test_real_seed(d, &w, seed, &ended);
  CHECK(ended > 0, "nothing ended by the model's own end token");
  printf("the real model: %.1f s, %d answers ended by themselves\n", now() - start, ended);
  test_fallback(d, &w);
  weights_close(&w, d);
  free_model(&m);
}
