// The scheduler: step traces worked by hand, 10,000 random workloads against plain invariants,
// block and memory failures, and the real model's answers when memory is tight.
//
// The device here is a fake with a clock of its own. A token's state is a hash of its id and of the
// state that the cache holds for the position before it, found through the block table; what a row
// samples is a hash of that state and of the slot's sampler. So an answer depends on the whole
// prefix and on nothing else, as a model's does: a wrong block, position, slot or seed shows in the
// tokens. The first prompt token of request i is FIRST + i, by which the fake knows whom a slot
// serves. Id 0 is padding.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "identity.h"

enum { MOST = 64, MOST_SLOTS = 64, MOST_BLOCKS = 640, MOST_STEPS = 8192, MOST_SEEN = 32768 };
enum { FIRST = 1000, END = 5, VOCAB = 16, LONGEST = 64 };

typedef struct {  // what a request is to answer, computed without any scheduler
  int n;
  bool ended;
  int tokens[LONGEST];
} Answer;

typedef struct {  // what the fake knows of a slot: the stay that began at position 0
  int request;
  int real;     // positions that hold the request's own tokens
  int top;      // the same with padding
  int sampled;  // what the next id -1 stands for; -1 = nothing yet
  int blocks;
} FakeSlot;

typedef struct {  // a token as it was submitted
  int step, request, pos;
  bool row, wasted;
} Seen;

// One run: what is asked, the fake device that answers, and what came of it.
static struct {
  Request requests[MOST];
  Workload w;
  EngineSize size;
  double step_s, token_s;  // a step takes step_s + tokens x token_s
  bool lazy;        // the clock moves when a step is collected, as a GPU's, not at submission
  long fail_after;  // of the block table
  double time_limit;
  const char* name;
  Answer answer[MOST];

  double clock, ready, start;  // ready: the last step's end
  FakeSlot slot[MOST_SLOTS];
  int calls;  // of clock and wait since the last step: many of them are a hang
  int n_steps, n_seen, faults;
  char fault[256];
  long tokens, wasted, pads, reserved;
  RunStats stats;
  bool whole;
  int blocks_lost;
  long fail_left;
} run;

static uint32_t kv[MOST_BLOCKS * KV_BLOCK];  // the state of every cached position
static double step_begin[MOST_STEPS], step_end[MOST_STEPS];
static Seen seen[MOST_SEEN];

static void fault(const char* format, ...) {  // the first one is printed
  va_list args;
  if (run.faults++) return;
  va_start(args, format);
  vsnprintf(run.fault, sizeof run.fault, format, args);
  va_end(args);
}

// ---- The fake model.

static uint32_t next_state(uint32_t before, int id) {
  return hash32(before ^ hash32((uint32_t)id + 77));
}

static int sample_state(uint32_t state, uint32_t seed, float temperature) {
  return 1 + (int)(hash32(state ^ seed ^ (uint32_t)(temperature * 1024)) % (VOCAB - 1));
}

static void compute_answer(const Request* r, bool stop_at_eos, Answer* a) {
  uint32_t state = 0;
  a->n = 0;
  a->ended = false;
  for (int i = 0; i < r->n_prompt; i++) state = next_state(state, r->tokens[i]);
  while (a->n < r->max_new && !a->ended) {
    int token = sample_state(state, r->seed, r->temperature);
    a->tokens[a->n++] = token;
    a->ended = stop_at_eos && token == END;
    state = next_state(state, token);
  }
}

// ---- The fake device.

static bool fake_engine_open(Engine* e) {
  (void)e;
  return true;
}

static void fake_engine_close(Engine* e) {
  (void)e;
}

static size_t fake_used(void) {
  return 0;
}

static void count_call(void) {
  if (++run.calls == 20000) {
    fault("hangs: 20,000 looks at the clock and no step");
    interrupted = 1;
  }
  if (run.calls == 40000) die("%s: hangs, and Ctrl-C does not help", run.name);
}

static double fake_clock(Engine* e) {
  (void)e;
  count_call();
  return run.clock;
}

// The engine may rest only when nobody could run: until somebody comes, or an incomplete batch has
// waited long enough.
static void fake_wait(Engine* e, double until) {
  (void)e;
  int waiting = 0;
  count_call();
  if (!(until < INFINITY)) {
    fault("waits for ever");
    interrupted = 1;
    return;
  }
  if (until <= run.clock) return;
  for (int i = 0; i < run.w.n; i++) {
    const Request* r = &run.requests[i];
    double arrival = run.start + r->arrival;
    bool here = arrival < run.clock - 1e-9;
    waiting += here && r->status == QUEUED;
    if (arrival > run.clock + 1e-9 && until > arrival + 1e-6)
      fault("sleeps past the arrival of %d", i);
    if (r->status == RUNNING && r->n_ordered < r->max_new) fault("waits although %d runs", i);
  }
  bool batch = run.w.policy != POLICY_CONTINUOUS;
  if (run.fail_after >= 0) waiting = 0;  // who was refused a block may wait for the next event
  if (!batch && waiting > 0) fault("waits at %g although %d wait", run.clock - run.start, waiting);
  if (run.w.policy == POLICY_STATIC && waiting >= run.w.limits.max_batch)
    fault("waits at %g with a full batch", run.clock - run.start);
  run.clock = until;
}

// Every block lies in one place, and all are there.
static void check_blocks(const BlockTable* b) {
  static bool used[MOST_BLOCKS];
  int n = b->n_free;
  memset(used, 0, sizeof used);
  for (int i = 0; i < b->n_free; i++) {
    int block = b->free_list[i];
    if (block < 0 || block >= b->n_blocks || used[block]) {
      fault("block %d is free twice", block);
      return;
    }
    used[block] = true;
  }
  for (int slot = 0; slot < b->n_slots; slot++)
    for (int i = 0; i < b->held[slot]; i++, n++) {
      int block = b->table[(size_t)slot * b->max_blocks + i];
      if (block < 0 || block >= b->n_blocks || used[block]) {
        fault("block %d of slot %d is another's too", block, slot);
        return;
      }
      used[block] = true;
    }
  if (n != b->n_blocks) fault("%d of %d blocks are lost", b->n_blocks - n, b->n_blocks);
}

// A slot's tokens stand together, and the step keeps to its budget.
static void check_shape(const Batch* b) {
  const Limits* l = &run.w.limits;
  bool met[MOST_SLOTS] = {false};
  if (b->n_tokens < 1) fault("an empty step");
  if (b->n_tokens > l->step_tokens) fault("%d tokens in a step", b->n_tokens);
  if (b->n_rows > l->max_batch) fault("%d rows in a step", b->n_rows);
  for (int t = 0; t < b->n_tokens; t++) {
    int slot = b->slot[t];
    if (slot < 0 || slot >= run.size.max_slots) fault("there is no slot %d", slot);
    if (t > 0 && slot == b->slot[t - 1]) continue;
    if (met[slot]) fault("the tokens of slot %d do not stand together", slot);
    met[slot] = true;
  }
  for (int r = 0; r < b->n_rows; r++)
    if (b->row[r] < (r ? b->row[r - 1] + 1 : 0) || b->row[r] >= b->n_tokens)
      fault("row %d is token %d", r, b->row[r]);
}

static void note_token(int step, int request, int pos, bool row, bool pad, bool wasted) {
  run.tokens++;
  run.wasted += wasted;
  run.pads += pad;
  if (run.n_seen == MOST_SEEN) die("%s: more tokens than expected", run.name);
  Seen s = {step, request, pos, row, wasted};
  seen[run.n_seen++] = s;
}

// Computes one token and returns what its row samples.
static int take_token(const Engine* e, const Batch* b, int t, bool row) {
  const BlockTable* table = &e->blocks;
  int slot = b->slot[t], pos = b->pos[t], id = b->id[t];
  FakeSlot* f = &run.slot[slot];
  if (pos == 0) {
    FakeSlot fresh = {id - FIRST, 0, 0, -1, 0};
    *f = fresh;
  }
  if (f->request < 0 || f->request >= run.w.n) return fault("slot %d: whose is it?", slot), 1;
  const Request* r = &run.requests[f->request];
  const Answer* a = &run.answer[f->request];
  bool pad = id == 0;
  if (pos / KV_BLOCK >= table->held[slot])
    return fault("request %d: no block for position %d", f->request, pos), 1;
  if (pad ? pos != f->top || f->real != r->n_prompt : pos != f->real)
    fault("request %d: position %d after %d", f->request, pos, pad ? f->top : f->real);
  int known = pos < r->n_prompt          ? r->tokens[pos]
              : pos - r->n_prompt < a->n ? a->tokens[pos - r->n_prompt]
                                         : -1;
  if (!pad && id >= 0 && id != known) fault("request %d: id %d at %d", f->request, id, pos);
  if (id == -1) id = f->sampled;
  if (id < 0) fault("request %d: nothing sampled before position %d", f->request, pos);
  const int* blocks = table->table + (size_t)slot * table->max_blocks;
  uint32_t before = 0;
  if (pos > 0) before = kv[blocks[(pos - 1) / KV_BLOCK] * KV_BLOCK + (pos - 1) % KV_BLOCK];
  uint32_t state = next_state(before, id);
  kv[blocks[pos / KV_BLOCK] * KV_BLOCK + pos % KV_BLOCK] = state;
  if (!pad) f->real = pos + 1;
  f->top = pos + 1 > f->top ? pos + 1 : f->top;
  if (table->held[slot] > f->blocks) {
    run.reserved += (long)(table->held[slot] - f->blocks) * KV_BLOCK;
    f->blocks = table->held[slot];
  }
  // The last token of an answer is sampled and never computed.
  bool wasted = pad || pos > r->n_prompt + a->n - 2;
  note_token(run.n_steps, f->request, pos, row, pad, wasted);
  if (row && pad) fault("request %d: samples from padding", f->request);
  int token = sample_state(state, e->seed[slot], e->temperature[slot]);
  if (row) f->sampled = token;
  return token;
}

static void fake_submit(Engine* e, const Batch* b, Step* s) {
  run.calls = 0;
  int before = run.faults, r = 0, first = run.n_seen;
  check_shape(b);
  check_blocks(&e->blocks);
  if (run.faults > before) interrupted = 1;  // the rest would only repeat it
  if (run.n_steps == MOST_STEPS) die("%s: more steps than expected", run.name);
  for (int t = 0; t < b->n_tokens && run.faults == before; t++) {
    bool row = r < b->n_rows && b->row[r] == t;
    int token = take_token(e, b, t, row);
    if (row) s->tokens[r++] = token;
  }
  bool prompt = false, decode = false;
  for (int i = first; i < run.n_seen; i++) {
    bool of_prompt = seen[i].pos < run.requests[seen[i].request].n_prompt;
    prompt |= of_prompt;
    decode |= !of_prompt && !seen[i].wasted;
  }
  if (run.w.policy != POLICY_CONTINUOUS && prompt && decode) fault("prompts amid decodes");
  double begin = fmax(run.clock, run.ready);
  run.ready = begin + run.step_s + run.token_s * b->n_tokens;
  step_begin[run.n_steps] = begin;
  step_end[run.n_steps++] = s->end = run.ready;
  if (!run.lazy) run.clock = run.ready;
}

static void fake_collect(Engine* e, Step* s) {
  (void)e;
  if (s->end > run.clock) run.clock = s->end;
}

// ---- Setting up a run.

static void scene(const char* name, Policy policy, int max_batch, int step_tokens) {
  memset(&run, 0, sizeof run);
  run.name = name;
  run.w.requests = run.requests;
  run.w.policy = policy;
  run.w.limits.max_batch = max_batch;
  run.w.limits.step_tokens = step_tokens;
  run.w.limits.batch_wait_s = 0.5;
  run.w.stop_at_eos = true;  // one step at a time, so that a trace has one right answer
  EngineSize size = {step_tokens, max_batch, 1024, 0};
  run.size = size;
  run.step_s = 1;
  run.fail_after = -1;
  run.time_limit = INFINITY;
  run.clock = 1024;  // clocks start anywhere
}

static void add(int n_prompt, int max_new, double arrival) {
  Request* r = &run.requests[run.w.n];
  r->n_prompt = n_prompt;
  r->max_new = max_new;
  r->arrival = arrival;
  r->seed = hash32((uint32_t)run.w.n + 4711);
  r->temperature = run.w.n % 2 ? 0.5f : 0;
  r->tokens = (int*)xcalloc((size_t)n_prompt + max_new, sizeof(int));
  r->time = (double*)xcalloc(max_new, sizeof(double));
  r->tokens[0] = FIRST + run.w.n++;
  for (int i = 1; i < n_prompt; i++) r->tokens[i] = 1 + (int)(hash32(r->seed + i) % (VOCAB - 1));
}

static void scene_close(void) {
  for (int i = 0; i < run.w.n; i++) {
    free(run.requests[i].tokens);
    free(run.requests[i].time);
  }
  free(run.stats.spans);
  memset(&run, 0, sizeof run);
}

static void reset_device(void) {
  free(run.stats.spans);
  memset(&run.stats, 0, sizeof run.stats);
  memset(run.slot, 0, sizeof run.slot);
  run.n_steps = run.n_seen = run.calls = 0;
  run.tokens = run.wasted = run.pads = run.reserved = 0;
  for (size_t i = 0; i < sizeof kv / sizeof kv[0]; i++) kv[i] = hash32((uint32_t)i);
  run.start = run.clock;
}

// Runs the scene `times` times on one engine: what an earlier run leaves must not matter. eos: the
// fake model's end token counts.
static void play(int times, bool eos) {
  Backend fake = cpu_backend;
  fake.used = fake_used;
  fake.engine_open = fake_engine_open;
  fake.engine_close = fake_engine_close;
  fake.submit = fake_submit;
  fake.collect = fake_collect;
  fake.clock = fake_clock;
  fake.wait = fake_wait;
  Device d;
  memset(&d, 0, sizeof d);
  d.api = &fake;
  d.total = d.limit = (size_t)1 << 30;
  d.bandwidth = d.rate = 1e9;
  d.fail_after = -1;
  Weights w;
  memset(&w, 0, sizeof w);
  Config c = {"fake", 4, 1, 1, 1, 4, 4, VOCAB, 4096, true, 1e-5f, 1e4f, 0, 0, 0, 0, eos, {END}};
  w.config = c;
  Engine e;
  char err[ERR_LEN];
  if (engine_open(&e, &d, &w, run.size, err) != ROW_OK) die("%s: %s", run.name, err);
  if (e.blocks.n_blocks > MOST_BLOCKS) die("%s: a pool of %d", run.name, e.blocks.n_blocks);
  for (int i = 0; i < run.w.n; i++)
    compute_answer(&run.requests[i], eos && run.w.stop_at_eos, &run.answer[i]);
  for (int i = 0; i < times && run.faults == 0; i++) {
    reset_device();
    e.blocks.fail_after = run.fail_after;
    run.whole = run_requests(&e, &run.w, run.time_limit, &run.stats);
    run.fail_left = e.blocks.fail_after;
    check_blocks(&e.blocks);
    run.blocks_lost = e.blocks.n_blocks - e.blocks.n_free;
  }
  interrupted = 0;
  engine_close(&e);
  device_close(&d);
}

// ---- What must hold after any run.

static bool must_reject(const Request* r) {
  const Limits* l = &run.w.limits;
  int all = r->n_prompt + r->max_new,
      n_blocks = run.size.n_blocks ? run.size.n_blocks
                                   : run.size.max_slots * blocks_for(run.size.max_positions);
  if (l->max_input && r->n_prompt > l->max_input) return true;
  if (l->max_new && r->max_new > l->max_new) return true;
  if (l->total_tokens && all > l->total_tokens) return true;
  return all > run.size.max_positions || blocks_for(all) > n_blocks;
}

// Static policies reserve more than a request needs; where that alone is more than there is, the
// contract leaves open whether the request runs. What is rejected counts for nothing.
static bool may_reject(const Request* r) {
  int reserve = run.w.limits.max_new, pool = run.size.n_blocks * KV_BLOCK;
  for (int i = 0; i < run.w.n && !run.w.limits.max_new; i++) {
    const Request* other = &run.requests[i];
    if (other->max_new > reserve && !must_reject(other)) reserve = other->max_new;
  }
  if (run.w.policy == POLICY_CONTINUOUS) return false;
  reserve += r->n_prompt;
  return reserve > run.size.max_positions || (pool && blocks_for(reserve) * KV_BLOCK > pool);
}

static int spans_of(int request, const Span** last) {
  int n = 0;
  for (int i = 0; i < run.stats.n_spans; i++) {
    const Span* s = &run.stats.spans[i];
    if (s->request != request) continue;
    if (n++ == 0 || s->start >= (*last)->start) *last = s;
  }
  return n;
}

static int step_at(double end) {  // the step that ended then; -1 = none
  int low = 0, high = run.n_steps - 1;
  while (low < high) {
    int middle = (low + high) / 2;
    if (step_end[middle] < end) low = middle + 1;
    if (step_end[middle] >= end) high = middle;
  }
  return run.n_steps > 0 && step_end[low] == end ? low : -1;
}

static void audit_times(int i) {
  const Request* r = &run.requests[i];
  int before = -1;
  for (int j = 0; j < r->n_new; j++) {
    int step = step_at(r->time[j]);
    if (step < 0) fault("request %d: token %d came at %g, when no step ended", i, j, r->time[j]);
    if (step <= before) fault("request %d: token %d came before the last one", i, j);
    // Who decodes is in every step until it is done or preempted.
    if (j > 0 && r->preemptions == 0 && step != before + 1)
      fault("request %d: no token between steps %d and %d", i, before, step);
    before = step;
  }
  if (r->n_new > 0 && r->time[0] <= run.start + r->arrival)
    fault("request %d: answered before it came", i);
}

// Everyone is finished, rejected or timed out, once, with the tokens of its answer.
static void audit_request(int i) {
  const Request* r = &run.requests[i];
  const Answer* a = &run.answer[i];
  const Span* last = NULL;
  int n = spans_of(i, &last);
  double timeout = run.w.limits.timeout_s;
  bool match =
      r->n_new <= a->n && memcmp(r->tokens + r->n_prompt, a->tokens, r->n_new * sizeof(int)) == 0;
  if (!match) fault("request %d: not its answer", i);
  if (r->status == REJECTED ? !must_reject(r) && !may_reject(r) : must_reject(r))
    fault("request %d: rejected is %d", i, r->status == REJECTED);
  if (r->status == REJECTED && (r->n_new > 0 || n > 0)) fault("request %d: rejected, but ran", i);
  if (r->status == FINISHED && (r->n_new != a->n || r->ended != a->ended))
    fault("request %d: %d tokens, not %d", i, r->n_new, a->n);
  if (r->status == FINISHED && (n != r->preemptions + 1 || last->preempted))
    fault("request %d: %d stays, %d preemptions", i, n, r->preemptions);
  if (r->status == TIMED_OUT &&
      (timeout == 0 || run.clock - run.start - r->arrival < timeout - 1e-9))
    fault("request %d: timed out too early", i);
  if (r->status == TIMED_OUT && n - r->preemptions != (n > 0 && !last->preempted))
    fault("request %d: timed out after %d stays, %d preemptions", i, n, r->preemptions);
  if (r->status == QUEUED || r->status == RUNNING) fault("request %d: left with %d", i, r->status);
  if (r->status == FINISHED && n > 0) {
    double end = r->time[r->n_new - 1] - run.start;
    if (!(fabs(last->finish - end) < 1e-6))
      fault("request %d: span ends at %g, not %g", i, last->finish, end);
  }
  audit_times(i);
}

static void audit_span(const Span* s) {
  bool continuous = run.w.policy == POLICY_CONTINUOUS;
  if (s->request < 0 || s->request >= run.w.n || s->slot < 0 || s->slot >= run.size.max_slots) {
    fault("a span of request %d in slot %d", s->request, s->slot);
    return;
  }
  const Request* r = &run.requests[s->request];
  if (s->start < r->arrival - 1e-9) fault("request %d: a slot before it came", s->request);
  if (!(s->start <= s->finish && s->finish <= s->release))
    fault("request %d: span %g, %g, %g", s->request, s->start, s->finish, s->release);
  if (!isnan(s->first) && !(s->start < s->first && s->first <= s->finish + 1e-9))
    fault("request %d: first token at %g of %g..%g", s->request, s->first, s->start, s->finish);
  if (s->padded < s->prompt) fault("request %d: %d of %d", s->request, s->prompt, s->padded);
  if (continuous && (s->batch != -1 || s->release != s->finish || s->padded != s->prompt))
    fault("request %d: batch %d, padded %d", s->request, s->batch, s->padded);
  if (!continuous && (s->batch < 0 || s->preempted || s->prompt != r->n_prompt))
    fault("request %d: batch %d, prompt %d", s->request, s->batch, s->prompt);
}

// No slot serves two at once; who runs at a time keeps to the limits; batches follow one another.
static void audit_overlap(const Span* s) {
  int together = 0, total = 0;
  for (int i = 0; i < run.stats.n_spans; i++) {
    const Span* t = &run.stats.spans[i];
    const Request* r = &run.requests[t->request];
    if (t->start <= s->start && s->start < t->release) {
      together++;
      total += r->n_prompt + r->max_new;
    }
    if (t == s) continue;
    if (t->slot == s->slot && fmax(t->start, s->start) < fmin(t->release, s->release) - 1e-9)
      fault("slot %d serves requests %d and %d", s->slot, s->request, t->request);
    if (run.w.policy == POLICY_CONTINUOUS) continue;
    if (t->batch > s->batch && t->start < s->release)
      fault("batch %d begins amid batch %d", t->batch, s->batch);
    if (t->batch != s->batch) continue;
    int bucket = (r->n_prompt - 1) / 128, own = (run.requests[s->request].n_prompt - 1) / 128;
    if (t->start != s->start || t->release != s->release || t->padded != s->padded)
      fault("batch %d does not run as one", s->batch);
    if (run.w.policy == POLICY_BUCKETED && bucket != own) fault("two buckets in %d", s->batch);
  }
  if (together > run.w.limits.max_batch) fault("%d run at %g", together, s->start);
  if (run.w.limits.total_tokens && total > run.w.limits.total_tokens)
    fault("%d tokens in all at %g", total, s->start);
}

// Nobody gets a slot while one who came earlier waits and is served later.
static void audit_order(const Span* s) {
  if (s->start == s->release) return;  // preempted before it did anything
  for (int i = 0; i < s->request; i++) {
    const Request* r = &run.requests[i];
    bool runs = false, later = false;
    int own = (run.requests[s->request].n_prompt - 1) / 128;
    if (run.w.policy == POLICY_BUCKETED && (r->n_prompt - 1) / 128 != own) continue;
    for (int j = 0; j < run.stats.n_spans; j++) {
      const Span* t = &run.stats.spans[j];
      if (t->request != i) continue;
      runs |= t->start <= s->start && s->start < t->release;
      later |= t->start > s->start;
    }
    if (r->arrival < s->start - 1e-9 && !runs && later)
      fault("request %d is served at %g before %d", s->request, s->start, i);
  }
}

static void audit_stats(void) {
  const RunStats* s = &run.stats;
  int count[5] = {0}, preemptions = 0, spans = 0;
  double seconds = s->prefill.seconds + s->decode.seconds, want = 0;
  for (int i = 0; i < run.w.n; i++) count[run.requests[i].status]++;
  for (int i = 0; i < run.w.n; i++) preemptions += run.requests[i].preemptions;
  for (int i = 0; i < s->n_spans; i++) spans += s->spans[i].preempted;
  for (int i = 0; i < run.n_steps; i++) want += step_end[i] - step_begin[i];
  if (s->rejected != count[REJECTED]) fault("%d rejected", s->rejected);
  if (s->timed_out != count[TIMED_OUT]) fault("%d timed out", s->timed_out);
  if (s->preemptions != preemptions || preemptions != spans)
    fault("%d preemptions, %d of requests, %d of spans", s->preemptions, preemptions, spans);
  if (s->computed != run.tokens) fault("%g computed, not %ld", s->computed, run.tokens);
  if (s->prefill.tokens + s->decode.tokens != run.tokens) fault("prefill + decode tokens");
  if (s->prefill.n + s->decode.n != run.n_steps) fault("prefill + decode steps");
  if (!(fabs(seconds - want) < 1e-6 * (1 + want))) fault("steps took %g s, not %g", seconds, want);
  if (s->start != run.start) fault("start %g, not %g", s->start, run.start);
  if (run.n_steps > 0 && s->end < step_end[run.n_steps - 1]) fault("end %g", s->end);
  if (run.w.policy == POLICY_CONTINUOUS && run.wasted > 0) fault("%ld wasted", run.wasted);
  // What becomes of a time-out in a batch that goes on, the contract leaves open.
  if (run.w.policy != POLICY_CONTINUOUS && count[TIMED_OUT] > 0) return;
  if (s->wasted != run.wasted) fault("%g wasted, not %ld", s->wasted, run.wasted);
  if (s->kv_held != run.tokens - run.wasted)
    fault("KV held %g tokens, not %ld", s->kv_held, run.tokens - run.wasted);
  if (s->kv_reserved < run.reserved ||
      (s->kv_reserved != run.reserved && preemptions == 0 && count[TIMED_OUT] == 0))
    fault("KV reserved for %g tokens, not %ld", s->kv_reserved, run.reserved);
}

// One check: whatever is wrong first is what it says.
static void audit(void) {
  if (!run.whole) fault("cut short");
  if (run.blocks_lost) fault("%d blocks are not returned", run.blocks_lost);
  for (int i = 0; i < run.stats.n_spans && run.faults == 0; i++) audit_span(&run.stats.spans[i]);
  for (int i = 0; i < run.w.n && run.faults == 0; i++) audit_request(i);
  for (int i = 0; i < run.stats.n_spans && run.faults == 0; i++) {
    if (!run.lazy) audit_overlap(&run.stats.spans[i]);
    audit_order(&run.stats.spans[i]);
  }
  if (run.faults == 0) audit_stats();
  CHECK(run.faults == 0, "%s: %s", run.name, run.fault);
}

// ---- Traces worked by hand. A step reads "2: a6* b0-1": begun 2 s after the start, one token of
// request a at position 6, which samples (*), and two of b's prompt. ~ marks what nobody wants:
// padding, finished rows. Requests are listed in order, whatever their order in the batch.

static int append(char* text, int n, int size, const char* format, ...) {
  va_list args;
  va_start(args, format);
  int more = vsnprintf(text + n, size - n, format, args);
  va_end(args);
  return n + more < size ? n + more : size - 1;
}

static void step_text(int step, char* text, int size) {
  int n = append(text, 0, size, "%g:", step_begin[step] - run.start);
  for (int request = 0; request < run.w.n; request++)
    for (int i = 0, from = -1; i < run.n_seen; i++) {
      const Seen *s = &seen[i], *next = s + 1;
      if (s->step != step || s->request != request) continue;
      if (from < 0) from = s->pos;
      bool more = i + 1 < run.n_seen && next->step == step && next->request == request &&
                  next->wasted == s->wasted && (!s->row || s->wasted);
      if (more) continue;
      n = append(text, n, size, " %c%d", 'a' + request, from);
      if (from < s->pos) n = append(text, n, size, "-%d", s->pos);
      n = append(text, n, size, "%s", s->wasted ? "~" : s->row ? "*" : "");
      from = -1;
    }
}

// Plays the scene twice on one engine, and once more with steps in flight, where only answers and
// invariants are compared. want: one line per step, up to NULL.
static void expect(const char* const* want) {
  char text[512];
  int n = 0;
  run.w.stop_at_eos = false;
  play(1, false);
  audit();
  run.w.stop_at_eos = true;
  play(2, false);
  audit();
  while (want[n]) n++;
  CHECK(run.n_steps == n, "%s: %d steps, not %d", run.name, run.n_steps, n);
  for (int i = 0; i < run.n_steps && i < n; i++) {
    step_text(i, text, sizeof text);
    CHECK(strcmp(text, want[i]) == 0, "%s: \"%s\", not \"%s\"", run.name, text, want[i]);
  }
}

static void expect_status(const char* want) {  // a letter per request: F, R, T
  for (int i = 0; i < run.w.n; i++)
    CHECK("QXFRT"[run.requests[i].status] == want[i], "%s: request %c is %c, not %c", run.name,
          'a' + i, "QXFRT"[run.requests[i].status], want[i]);
}

static bool same(double a, double b) {
  return isnan(b) ? isnan(a) : fabs(a - b) < 1e-9;
}

// The spans of one request, in order: start, first, finish, release.
static void expect_span(int request, int stay, double start, double first, double finish,
                        double release) {
  int n = 0;
  for (int i = 0; i < run.stats.n_spans; i++) {
    const Span* s = &run.stats.spans[i];
    if (s->request != request || n++ != stay) continue;
    CHECK(same(s->start, start) && same(s->first, first) && same(s->finish, finish) &&
              same(s->release, release),
          "%s: stay %d of %c: %g %g %g %g, not %g %g %g %g", run.name, stay, 'a' + request,
          s->start, s->first, s->finish, s->release, start, first, finish, release);
    return;
  }
  CHECK(false, "%s: %c has no stay %d", run.name, 'a' + request, stay);
}

// Seconds after the start, one token after the other.
static void expect_times(int request, const double* want, int n) {
  const Request* r = &run.requests[request];
  CHECK(r->n_new == n, "%s: %c has %d tokens, not %d", run.name, 'a' + request, r->n_new, n);
  for (int i = 0; i < n && i < r->n_new; i++)
    CHECK(same(r->time[i] - run.start, want[i]), "%s: token %d of %c at %g, not %g", run.name, i,
          'a' + request, r->time[i] - run.start, want[i]);
}

static void expect_work(double computed, double wasted, double reserved, double held) {
  const RunStats* s = &run.stats;
  CHECK(s->computed == computed && s->wasted == wasted, "%s: computed %g, wasted %g, not %g, %g",
        run.name, s->computed, s->wasted, computed, wasted);
  CHECK(s->kv_reserved == reserved && s->kv_held == held, "%s: KV reserved %g, held %g, not %g, %g",
        run.name, s->kv_reserved, s->kv_held, reserved, held);
}

static void trace_static(void) {
  // Prompts of 3, 1, 2 are padded to 3. b wants 4 tokens, so that the batch decodes three times;
  // a's second and last token comes from the first of these, c's only one from its prompt.
  static const char* const steps[] = {"0: a0-2* b0* b1-2~ c0-1* c2~", "1: a3* b1* c2~",
                                      "2: a4~ b2* c3~", "3: a5~ b3* c4~", NULL};
  static const double times_a[] = {1, 2}, times_b[] = {1, 2, 3, 4}, times_c[] = {1};
  scene("static", POLICY_STATIC, 3, 16);
  run.w.limits.max_new = 4;
  add(3, 2, 0);
  add(1, 4, 0);
  add(2, 1, 0);
  expect(steps);
  expect_status("FFF");
  expect_times(0, times_a, 2);
  expect_times(1, times_b, 4);
  expect_times(2, times_c, 1);
  expect_span(0, 0, 0, 1, 2, 4);
  expect_span(1, 0, 0, 1, 4, 4);
  expect_span(2, 0, 0, 1, 1, 4);
  // 9 + 3 x 3 tokens; padding 2 + 1, finished rows 2 of a and 3 of c. Each reserves 3 + 4
  // positions, a block; a held 3 + 1, b 1 + 3, c 2.
  expect_work(18, 8, 48, 10);
  scene_close();
}

static void trace_static_chunks(void) {
  // 15 tokens of padded prompts in steps of 6; first tokens count from the end of the last of them.
  static const char* const steps[] = {"0: a0-2* a3-4~ b0", "1: b1-4* c0-1*", "2: c2-4~",
                                      "3: a3* b5* c2*",    "4: a4* b6~ c3~", NULL};
  static const double times_a[] = {3, 4, 5}, times_b[] = {3, 4};
  scene("static in chunks", POLICY_STATIC, 3, 6);
  run.w.limits.max_new = 3;
  add(3, 3, 0);
  add(5, 2, 0);
  add(2, 2, 0);
  expect(steps);
  expect_times(0, times_a, 3);
  expect_times(1, times_b, 2);
  expect_times(2, times_b, 2);
  expect_span(1, 0, 0, 3, 4, 5);
  expect_work(21, 2 + 3 + 2, 48, 5 + 6 + 3);
  scene_close();
}

static void trace_static_batches(void) {
  // Two batches of two, the second one of 20 + 20 positions a request: 3 blocks each. Four blocks
  // are there, so that c and d go one by one.
  static const char* const steps[] = {"0: a0* b0*", "1: c0-19*", "2: c20*", "3: d0*", NULL};
  scene("static, a pool too small", POLICY_STATIC, 2, 32);
  run.size.n_blocks = 4;
  run.w.limits.max_new = 20;
  add(1, 1, 0);
  add(1, 1, 0);
  add(20, 2, 0);
  add(1, 1, 0);
  expect(steps);
  expect_span(2, 0, 1, 2, 3, 3);
  CHECK(run.stats.spans[3].batch == 2, "three batches: the last is %d", run.stats.spans[3].batch);
  expect_work(1 + 1 + 21 + 1, 0, 2 * 32 + 48 + 32, 24);
  scene_close();
}

static void trace_static_reserves(void) {
  // What is reserved is the longest output that is allowed: 7 + 9 positions are one block, 7 + 10
  // are two, although one of them is never touched.
  static const char* const steps[] = {"0: a0-6*", NULL};
  for (int more = 0; more < 2; more++) {
    scene("static reserves the worst case", POLICY_STATIC, 1, 8);
    run.w.limits.max_new = 9 + more;
    add(7, 1, 0);
    expect(steps);
    expect_work(7, 0, more ? 32 : 16, 7);
    scene_close();
  }
}

static void trace_batch_wait(void) {
  static const char* const alone[] = {"0.5: a0*", "3: b0*", NULL};
  static const char* const full[] = {"0.25: a0* b0*", "10: c0*", NULL};
  static const char* const behind[] = {"0.5: a0*", "1.5: a1*", "2.5: a2*",
                                       "3.5: b0*", "10: c0*",  NULL};
  scene("an incomplete batch waits 0.5 s, the last one not", POLICY_STATIC, 2, 8);
  add(1, 1, 0);
  add(1, 1, 3);
  expect(alone);
  expect_span(0, 0, 0.5, 1.5, 1.5, 1.5);
  scene_close();
  scene("a full batch goes at once", POLICY_STATIC, 2, 8);
  add(1, 1, 0);
  add(1, 1, 0.25);
  add(1, 1, 10);
  expect(full);
  scene_close();
  scene("who has waited while others ran waits no longer", POLICY_STATIC, 2, 8);
  run.w.limits.max_new = 3;
  add(1, 3, 0);
  add(1, 1, 1);
  add(1, 1, 10);
  expect(behind);
  scene_close();
}

static void trace_bucketed(void) {
  // Prompts of 1 to 128 are one bucket, 129 to 256 the next: {a, c}, then {b, d}, then e alone.
  static const char* const steps[] = {"0: a0-127* c0* c1-127~", "1: b0-128* b129-199~ d0-199*",
                                      "2: e0-9*", NULL};
  // {b, c} is full and goes first, though a is older; a waits 50 s for another of its kind, d is
  // the last.
  static const char* const older[] = {"0: b0* b1~ c0-1*", "50: a0-128*", "100: d0-2*", NULL};
  // Both are full: a's comes first. Then b and d.
  static const char* const both[] = {"0: a0* c0*", "1: b0-128* d0-128*", NULL};
  scene("bucketed", POLICY_BUCKETED, 2, 512);
  add(128, 1, 0);
  add(129, 1, 0);
  add(1, 1, 0);
  add(200, 1, 0);
  add(10, 1, 0);
  expect(steps);
  expect_span(3, 0, 1, 2, 2, 2);
  CHECK(run.stats.wasted == 127 + 71, "padding of c and b, not %g", run.stats.wasted);
  scene_close();
  scene("a full bucket first", POLICY_BUCKETED, 2, 512);
  run.w.limits.batch_wait_s = 50;
  add(129, 1, 0);
  add(1, 1, 0);
  add(2, 1, 0);
  add(3, 1, 100);
  expect(older);
  scene_close();
  scene("two full buckets", POLICY_BUCKETED, 2, 512);
  add(1, 1, 0);
  add(129, 1, 0);
  add(1, 1, 0);
  add(129, 1, 0);
  expect(both);
  scene_close();
}

static void trace_continuous(void) {
  // Four tokens a step: a's prompt of 6 is read in 4 + 2, b's first token of the prompt beside its
  // end. b leaves after its only token, and c, who came at 2.5, takes its slot in the next step.
  static const char* const steps[] = {"0: a0-3",      "1: a4-5* b0-1", "2: a6* b2*",
                                      "3: a7* c0-1*", "4: a8*",        NULL};
  static const double times_a[] = {2, 3, 4, 5};
  scene("continuous", POLICY_CONTINUOUS, 2, 4);
  add(6, 4, 0);
  add(3, 1, 0);
  add(2, 1, 2.5);
  expect(steps);
  expect_times(0, times_a, 4);
  expect_span(0, 0, 0, 2, 5, 5);
  expect_span(1, 0, 0, 3, 3, 3);
  expect_span(2, 0, 3, 4, 4, 4);
  expect_work(9 + 3 + 2, 0, 48, 14);
  CHECK(run.stats.spans[0].slot != run.stats.spans[1].slot &&
            run.stats.spans[2].slot == run.stats.spans[1].slot,
        "c takes b's slot");
  scene_close();
}

static void trace_decodes_first(void) {
  // Two decodes leave two tokens of the four to c's prompt of 5: chunks of 2, 2, 1.
  static const char* const steps[] = {"0: a0* b0*",
                                      "1: a1* b1* c0-1",
                                      "2: a2* b2* c2-3",
                                      "3: a3* b3* c4*",
                                      "4: a4* b4* c5*",
                                      "5: a5* b5*",
                                      NULL};
  // Two chunks in one step, in order of admission: b's begins where a's ends.
  static const char* const both[] = {"0: a0-4", "1: a5-6* b0-2", "2: a7* b3-6", "3: b7*", NULL};
  scene("decodes first", POLICY_CONTINUOUS, 3, 4);
  add(1, 6, 0);
  add(1, 6, 0);
  add(5, 2, 0.5);
  expect(steps);
  scene_close();
  scene("prompts in order", POLICY_CONTINUOUS, 2, 5);
  add(7, 2, 0);
  add(8, 1, 0);
  expect(both);
  scene_close();
}

static void trace_preemption(void) {
  // Three blocks. a's prompt of 15 and b's of 16 take one each, b's 17th position the last. When a
  // needs its second, b, the younger, goes: it has two tokens. It comes back when a has finished,
  // reads prompt and tokens again (18), and c, behind it in the queue all the time, with it.
  static const char* const steps[] = {"0: a0-14* b0-15*", "1: a15* b16*",  "2: a16*", "3: a17*",
                                      "4: a18*",          "5: b0-17* c0*", "6: b18*", NULL};
  static const double times_b[] = {1, 2, 6, 7};
  scene("preemption", POLICY_CONTINUOUS, 2, 64);
  run.size.n_blocks = 3;
  add(15, 5, 0);
  add(16, 4, 0);
  add(1, 1, 2.5);
  expect(steps);
  expect_times(1, times_b, 4);
  expect_span(0, 0, 0, 1, 5, 5);
  expect_span(1, 0, 0, 1, 2, 2);
  expect_span(1, 1, 5, 6, 7, 7);
  expect_span(2, 0, 5, 6, 6, 6);
  CHECK(run.requests[1].preemptions == 1 && run.stats.preemptions == 1, "b goes once");
  // a 19 tokens, b 17 and 19, c 1; a 2 blocks, b 2 and 2, c 1.
  expect_work(19 + 17 + 19 + 1, 0, 7 * 16, 56);
  scene_close();
}

static void trace_dynamic_limit(void) {
  // Seven blocks; prompts take 3 + 1 + 1 + 1. In step 1 all four decode into a new block: a takes
  // the last, b takes d's, c has nobody younger and goes itself. The limit is now 2. a finishes:
  // limit 3, so that c and d return, but e must wait, although a slot and a block are free; until b
  // finishes.
  static const char* const steps[] = {"0: a0-47* b0-15* c0-15* d0-15*", "1: a48* b16*",
                                      "2: b17* c0-16* d0-16*", "3: c17* d17* e0*", NULL};
  scene("dynamic batch limit", POLICY_CONTINUOUS, 4, 128);
  run.size.n_blocks = 7;
  add(48, 2, 0);
  add(16, 3, 0);
  add(16, 3, 0);
  add(16, 3, 0);
  add(1, 1, 0.5);
  expect(steps);
  CHECK(run.stats.preemptions == 2, "two, not %d", run.stats.preemptions);
  expect_span(2, 0, 0, 1, 1, 1);
  expect_span(3, 1, 2, 3, 4, 4);
  expect_span(4, 0, 3, 4, 4, 4);
  scene_close();
}

static void trace_total_tokens(void) {
  // a may come to 4 tokens, b to 5, c to 2; 7 are allowed. c would fit beside a, but b is first.
  static const char* const steps[] = {"0: a0-1*", "1: a2*", "2: b0-1* c0*",
                                      "3: b2*",   "4: b3*", NULL};
  static const char* const batches[] = {"0: a0-1*",   "1: a2*",     "2: b0-1* c0* c1~",
                                        "3: b2* c1~", "4: b3* c2~", NULL};
  for (int policy = 0; policy < N_POLICIES; policy++) {
    scene(policy_names[policy], (Policy)policy, 3, 16);
    run.w.limits.total_tokens = 7;
    add(2, 2, 0);
    add(2, 3, 0);
    add(1, 1, 0);
    expect(policy == POLICY_CONTINUOUS ? steps : batches);
    scene_close();
  }
}

static void trace_watermark(void) {
  // Ten blocks, of which 20%, 2, must stay free at an admission. a takes 7, b 1: just allowed. In
  // step 1 three are free and c needs 2: it waits, until a has left. d needs all ten: it runs, but
  // alone.
  static const char* const steps[] = {"0: a0-111* b0-15*", "1: a112*", "2: c0-16*", "3: d0-149*",
                                      NULL};
  scene("watermark", POLICY_CONTINUOUS, 4, 256);
  run.size.n_blocks = 10;
  run.w.limits.kv_watermark_pct = 20;
  add(112, 2, 0);
  add(16, 1, 0);
  add(17, 1, 0);
  add(150, 1, 0);
  expect(steps);
  scene_close();
}

static void trace_timeout(void) {
  // One slot; 2.5 s are allowed. At 3 both a, amid its output, and b, still waiting, are too old.
  static const char* const steps[] = {"0: a0*", "1: a1*", "2: a2*", "3: c0*", NULL};
  scene("time-out", POLICY_CONTINUOUS, 1, 8);
  run.w.limits.timeout_s = 2.5;
  add(1, 5, 0);
  add(1, 1, 0);
  add(1, 1, 2);
  expect(steps);
  expect_status("TTF");
  expect_span(0, 0, 0, 1, 3, 3);
  CHECK(run.stats.timed_out == 2, "two, not %d", run.stats.timed_out);
  scene_close();
  // a waits for company for 5 s at most, but may not be older than 2.
  static const char* const late[] = {"10: b0*", NULL};
  scene("time-out of an incomplete batch", POLICY_STATIC, 2, 8);
  run.w.limits.timeout_s = 2;
  run.w.limits.batch_wait_s = 5;
  add(1, 1, 0);
  add(1, 1, 10);
  expect(late);
  expect_status("TF");
  scene_close();
}

static void trace_rejection(void) {
  // Each limit on its own: what just fits runs, one token more is refused, and nobody else suffers.
  static const struct {
    const char* what;
    int fits[2], exceeds[2];  // prompt, output
  } cases[] = {{"max_input", {20, 1}, {21, 1}},
               {"max_new", {1, 10}, {1, 11}},
               {"total_tokens", {25, 5}, {25, 6}},
               {"max_positions", {60, 4}, {60, 5}},
               {"pool", {40, 8}, {40, 9}}};
  for (int i = 0; i < 5; i++)
    for (int policy = 0; policy < N_POLICIES; policy++) {
      scene(cases[i].what, (Policy)policy, 2, 64);
      Limits* l = &run.w.limits;
      l->max_input = i == 0 ? 20 : 0;
      l->max_new = i == 1 ? 10 : 0;
      l->total_tokens = i == 2 ? 30 : 0;
      run.size.max_positions = i == 3 ? 64 : 128;
      run.size.n_blocks = i == 4 ? 3 : 0;
      add(cases[i].exceeds[0], cases[i].exceeds[1], 0);
      add(cases[i].fits[0], cases[i].fits[1], 0);
      add(cases[i].exceeds[0], cases[i].exceeds[1], 1000);
      play(1, false);
      audit();
      expect_status("RFR");
      scene_close();
    }
}

static void trace_arrivals(void) {
  // Ties are served as they stand in the array; between requests the engine waits.
  static const char* const ties[] = {"0: a0*", "1: b0*", "2: c0*", NULL};
  static const char* const rare[] = {"5: a0*", "100: b0*", "101: b1*", "1000: c0-1*", NULL};
  static const double times_b[] = {101, 102};
  for (int policy = 0; policy < N_POLICIES; policy++) {
    scene("arrival ties", (Policy)policy, 1, 8);
    for (int i = 0; i < 3; i++) add(1, 1, 0);
    expect(ties);
    scene_close();
    scene("rare arrivals", (Policy)policy, 1, 8);
    add(1, 1, 5);
    add(1, 2, 100);
    add(2, 1, 1000);
    expect(rare);
    expect_times(1, times_b, 2);
    scene_close();
  }
}

static void trace_small(void) {
  static const char* const none[] = {NULL};
  static const char* const one[] = {"0: a0*", NULL};
  static const char* const longer[] = {"0: a0-2", "1: a3-5", "2: a6*", "3: a7*", NULL};
  static const double times[] = {1}, later[] = {3, 4};
  for (int policy = 0; policy < N_POLICIES; policy++) {
    scene("no requests", (Policy)policy, 2, 8);
    expect(none);
    CHECK(run.stats.n_spans == 0 && run.stats.computed == 0, "nothing to do");
    scene_close();
    scene("one token in, one out", (Policy)policy, 2, 8);
    add(1, 1, 0);
    expect(one);
    expect_times(0, times, 1);
    expect_work(1, 0, 16, 1);
    scene_close();
    scene("a prompt longer than a step", (Policy)policy, 1, 3);
    add(7, 2, 0);
    expect(longer);
    expect_times(0, later, 2);
    scene_close();
  }
}

static void test_cut(void) {
  // A time limit ends the run between two steps, and every block is back.
  for (int policy = 0; policy < N_POLICIES; policy++)
    for (int eos = 0; eos < 2; eos++) {
      scene("cut short", (Policy)policy, 2, 8);
      run.w.stop_at_eos = eos;
      run.time_limit = 2.5;
      for (int i = 0; i < 4; i++) add(1, 50, 0);
      play(1, false);
      CHECK(run.faults == 0 && !run.whole && run.blocks_lost == 0, "%s: %s", run.name, run.fault);
      CHECK(run.n_steps >= 3 && run.n_steps <= 5, "%d steps in 2.5 s", run.n_steps);
      scene_close();
    }
}

static void test_traces(void) {
  trace_static();
  trace_static_chunks();
  trace_static_batches();
  trace_static_reserves();
  trace_batch_wait();
  trace_bucketed();
  trace_continuous();
  trace_decodes_first();
  trace_preemption();
  trace_dynamic_limit();
  trace_total_tokens();
  trace_watermark();
  trace_timeout();
  trace_rejection();
  trace_arrivals();
  trace_small();
  test_cut();
}

// ---- Random workloads.

static uint32_t dice;

static int roll(int from, int to) {  // uniform in from .. to
  dice = hash32(dice + 0x9e3779b9u);
  return from + (int)(dice % (uint32_t)(to - from + 1));
}

static bool chance(int percent) {
  return roll(1, 100) <= percent;
}

static void random_requests(void) {
  int n = roll(0, 12), long_prompts = chance(10) ? 300 : 40, outputs = chance(50) ? 40 : 10;
  int gaps = roll(0, 3);  // all at once, bunches, a stream, rare
  double arrival = 0;
  for (int i = 0; i < n; i++) {
    int most = chance(20) ? long_prompts : 20;
    add(roll(1, most), roll(1, outputs), arrival);
    if (gaps == 1 && chance(50)) arrival += roll(1, 30) / 7.0;
    if (gaps == 2) arrival += roll(0, 100) / 30.0;
    if (gaps == 3) arrival += roll(0, 1000) / 9.0;
  }
}

static void random_limits(void) {
  Limits* l = &run.w.limits;
  int prompt = 1, output = 1, all = 2;
  for (int i = 0; i < run.w.n; i++) {
    const Request* r = &run.requests[i];
    prompt = r->n_prompt > prompt ? r->n_prompt : prompt;
    output = r->max_new > output ? r->max_new : output;
    all = r->n_prompt + r->max_new > all ? r->n_prompt + r->max_new : all;
  }
  l->step_tokens = l->max_batch + (chance(50) ? roll(0, 8) : roll(0, 60));
  l->max_input = chance(10) ? roll(1, prompt) : 0;
  l->max_new = chance(30) ? roll(1, output + 5) : 0;
  l->total_tokens = chance(15) ? roll(all / 2, all * 3) : 0;
  l->timeout_s = chance(15) ? roll(1, 400) / 11.0 : 0;
  l->batch_wait_s = chance(10) ? 0 : roll(1, 100) / 13.0;
  l->kv_watermark_pct = chance(30) ? roll(1, 60) : 0;
  run.size.max_tokens = l->step_tokens;
  run.size.max_slots = l->max_batch + (chance(10) ? roll(1, 3) : 0);
  run.size.max_positions = prompt + (l->max_new > output ? l->max_new : output);
  if (chance(15)) run.size.max_positions = roll(all / 2 + 1, run.size.max_positions);
  int enough = blocks_for(run.size.max_positions);
  if (chance(80)) run.size.n_blocks = enough + roll(0, chance(50) ? 2 : 2 * l->max_batch);
  if (chance(10)) run.size.n_blocks = roll(1, enough);
}

static void test_random(int n) {
  char name[96];
  int failed = checks_failed, preemptions = 0, finished = 0, rejected = 0, timed_out = 0, ended = 0;
  clock_t start = clock();
  double wasted = 0;
  for (int i = 0; i < n && checks_failed < failed + 10; i++) {
    dice = (uint32_t)i * 0x85ebca6bu;
    Policy policy = (Policy)roll(0, N_POLICIES - 1);
    snprintf(name, sizeof name, "random workload %d, %s", i, policy_names[policy]);
    scene(name, policy, roll(1, 6), 1);
    random_requests();
    random_limits();
    run.lazy = chance(30);
    run.w.stop_at_eos = chance(50);
    run.step_s = roll(1, 20) / 10.0;
    run.token_s = chance(50) ? roll(1, 10) / 90.0 : 0;
    run.clock = chance(50) ? roll(0, 1 << 20) / 3.0 : 0;
    play(1, true);
    audit();
    preemptions += run.stats.preemptions;
    wasted += run.stats.wasted;
    for (int j = 0; j < run.w.n; j++) {
      finished += run.requests[j].status == FINISHED;
      rejected += run.requests[j].status == REJECTED;
      timed_out += run.requests[j].status == TIMED_OUT;
      ended += run.requests[j].ended;
    }
    scene_close();
  }
  CHECK(preemptions > n / 20 && finished > n && rejected > n / 20 && timed_out > n / 20 &&
            ended > n / 4 && wasted > n,
        "too tame: %d preemptions, %d finished, %d rejected, %d timed out, %d ended, %g wasted",
        preemptions, finished, rejected, timed_out, ended, wasted);
  double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
  printf("%d random workloads: %.1f s\n", n, seconds);
  CHECK(SANITIZED || seconds < 5, "%d random workloads took %.1f s of CPU time", n, seconds);
}

// ---- A block refused once, at each of the first 50 times that one is asked for: nothing is lost,
// no answer changes.

static void test_block_failures(void) {
  char name[96];
  for (int policy = 0; policy < N_POLICIES; policy++)
    for (int after = 0; after < 50; after++)
      for (int alone = 0; alone < 2; alone++) {
        snprintf(name, sizeof name, "%s, block request %d fails, batch %d", policy_names[policy],
                 after, alone ? 1 : 8);
        scene(name, (Policy)policy, alone ? 1 : 8, 32);
        run.w.stop_at_eos = after % 2;
        for (int i = 0; i < 60; i++) add(1 + i * 7 % 30, 1 + i * 5 % 23, i / 8 * 0.75);
        run.size.max_positions = 64;
        run.fail_after = after;
        play(1, true);
        int unfinished = 0;
        for (int i = 0; i < 60; i++) unfinished += run.requests[i].status != FINISHED;
        audit();
        CHECK(unfinished == 0, "%s: %d requests are not finished", name, unfinished);
        CHECK(run.fail_left == -1, "%s: never", name);
        scene_close();
      }
}

static void test_real(void) {
  Device d;
  char err[ERR_LEN];
  memset(&d, 0, sizeof d);  // no probes: nothing here asks how fast the CPU is
  d.api = &cpu_backend;
  d.bandwidth = d.rate = 1e9;
  d.fail_after = -1;
  if (!cpu_backend.open(&d, err)) die("%s", err);
  d.limit = d.total;
  test_answers(&d);
  device_close(&d);
}

int main(int argc, char** argv) {
  (void)argc;
  setenv("OMP_NUM_THREADS", "1", 0);  // small steps: a second thread mostly waits for the first
  limit_spinning(argv);               // starts over with these settings
  test_traces();
  test_random(10000);
  test_block_failures();
  test_real();
  return check_report();
}
