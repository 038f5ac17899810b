// ---- Files: sweep.csv with every row, config.json with the choice (article 1, section 6). Scripts
// rely on the names in them: add, never rename.

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
// their values as a CSV row, or all as JSON. A number that is NaN is undefined and left out, and so
// is a 0 of %d or %g; %i and %f write it.
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
      bool whole = kind == 'd' || kind == 'i', zero = kind == 'i' || kind == 'f';
      double value = whole ? va_arg(args, int) : va_arg(args, double);
      bool defined = isfinite(value) && (value != 0 || zero);
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
      "'step_flops': %g, 'source': %s",
      r->batch, r->input_len, r->output_len, r->repeats, status_names[r->status], r->reason,
      r->output_tok_s, r->user_tok_s, r->prefill_tok_s, r->ttft.p50, r->ttft.p95, r->ttft.p99,
      r->tpot.p50, r->tpot.p95, r->tpot.p99, r->itl.p50, r->itl.p95, r->itl.p99, r->e2e.p50,
      r->e2e.p95, r->e2e.p99, r->itl.n, r->n_requests, r->step_us, r->roof_us, r->roof_pct,
      r->mbu_pct, r->mfu_pct, r->roof_us > 0 ? bound_names[r->bound] : "", r->mem_weights_mib,
      r->mem_kv_mib, r->mem_work_mib, r->mem_other_mib, r->mem_used_mib, r->mem_limit_mib,
      r->noreuse_us, r->step_bytes, r->step_flops, r->simulated ? "simulated" : "measured");
  fputc('\n', f);
  fflush(f);  // after a crash, the rows so far are in the file
}

static SweepRow no_row;  // all of it undefined

// The directory and those above it. Until this run ends no other one may write there.
static bool prepare_out(const char* dir, char* err) {
  char path[PATH_LEN];
  snprintf(path, sizeof path, "%s", dir);
  for (char* at = path + 1; *at; at++) {
    if (*at != '/') continue;
    *at = '\0';
    mkdir(path, 0777);  // what matters is whether the last one can be made
    *at = '/';
  }
  if (mkdir(dir, 0777) != 0 && errno != EEXIST)
    return say(err, ERR_LEN, "%.300s: cannot make the output directory: %s", dir, strerror(errno));
  static int lock = -1;  // what cannot be locked, on some file systems, is not
  if (lock < 0 && (lock = open(dir, O_RDONLY)) >= 0)
    if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      return say(err, ERR_LEN, "%.300s: another bs writes to this output directory", dir);
  return true;
}

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

static void result_drop(ResultFile* r) {
  fclose(r->f);
  remove(r->tmp);
}

static bool result_close(ResultFile* r, char* err) {
  bool written = !ferror(r->f);  // no earlier row failed
  errno = written ? 0 : ENOSPC;  // why it did is long forgotten; this is the usual reason
  if (fclose(r->f) == 0 && written && rename(r->tmp, r->path) == 0) return true;
  say(err, ERR_LEN, "%.300s: cannot write: %s", r->path, strerror(errno));
  remove(r->tmp);
  return false;
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
  int step = step_tokens > 0 && step_tokens < b ? b : step_tokens;  // a token for each sequence
  double budget = input > 0 && output > 0 ? (double)b * context : NAN;
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
      "'output_len': %d,\n'date': %s,\n'source': %s\n},\n'measured': {\n",
      b, start->batch, stop_names[k->rule], k->why, second->batch, input, output, b, budget,
      timeout, rules->watermark_pct, rules->percentile, rules->slo_ttft_ms, rules->slo_tpot_ms,
      s->model, dtype, s->device, input, output, date, s->simulated ? "simulated" : "measured");
  if (b > 0) put_sweep_row(file.f, JSON, r);
  put(file.f, JSON, "},\n'engine_flags': {\n");
  for (int i = 0; i < N_SERVERS && b > 0; i++) put_server_flags(file.f, &servers[i], s, step);
  put(file.f, JSON, "}\n}\n");
  return result_close(&file, err);
}

// ---- Table: one line per batch size with throughput, latency, memory and the bound side by side,
// since no single one of them decides (article 1, section 5; article 2, section 4.4).

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
           "%5d %9.1f %10.1f %8.2f %8.2f %8.2f %8.2f %5d %7.0f %7.0f %5.1f %5.1f %5.1f %7.2f",
           r->batch, r->output_tok_s, r->user_tok_s, r->ttft.p50, at_percentile(r->ttft, q),
           r->tpot.p50, at_percentile(r->tpot, q), r->n_requests, r->step_us, r->roof_us,
           r->roof_pct, r->mbu_pct, r->mfu_pct, r->mem_used_mib / 1024);
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
  fprintf(f, " that keeps over 20%% of the first batch's tokens/s per sequence;");
  fprintf(f, " it knows no targets and no memory.\n");
}

// ---- Prediction: what a step should take, from what was measured beside it.

// A step's time if reading and multiplying took turns. Reading: its bytes at the ceiling (MBU is
// that share of the step). Multiplying, by_prompts: what as many tokens of the row's prompts took,
// the same products but for the output matrix, which only a prompt's last token meets; else its
// FLOPs at the ceiling (MFU). The roofline, where the two overlap perfectly, is the larger one; our
// kernels are nearer to this sum. NaN: something was not measured.
static double in_turn_us(const SweepRow* r, bool by_prompts) {
  double multiplying =
      by_prompts ? 1e6 * r->batch / r->prefill_tok_s : r->step_us * r->mfu_pct / 100;
  return r->step_us * r->mbu_pct / 100 + multiplying;
}

typedef struct {
  const SweepRow* first;  // the overhead is this row's
  double overhead;        // us: launches, waits, host; below 0 its reading and multiplying overlap
  double worst;           // the largest error of the other rows, in %
  int others, checked;    // rows beside the first; those that it was made for, 0: none is made
  bool by_prompts;
} Prediction;

// In turn, + what the first row takes beyond that: the prediction for all others. Of a simulated
// table none is made.
static Prediction predict(const SweepRow* rows, int n) {
  enum { LEAST_PROMPT = 16 };  // a prompt of one token is a decode step, and would prove itself
  Prediction p = {NULL, NAN, 0, -1, 0, true};
  if (n > 0 && rows->simulated) return p;
  for (int i = 0; i < n; i++)
    if (rows[i].status == ROW_OK && rows[i].step_us > 0)
      p.by_prompts &= rows[i].prefill_tok_s > 0 && rows[i].input_len >= LEAST_PROMPT;
  for (int i = 0; i < n; i++) {
    double sum = in_turn_us(&rows[i], p.by_prompts);
    if (rows[i].status != ROW_OK) continue;
    p.others++;
    if (!isfinite(sum)) continue;
    if (!p.first) {
      p.first = &rows[i];
      p.overhead = rows[i].step_us - sum;
    } else {
      p.checked++;
      p.worst = fmax(p.worst, fabs(100 * ((sum + p.overhead) / rows[i].step_us - 1)));
    }
  }
  return p;
}

static double predicted_us(const Prediction* p, const SweepRow* r) {
  return p->checked > 0 ? in_turn_us(r, p->by_prompts) + p->overhead : NAN;
}

// What a reader should know before believing the rest: steps faster than the roofline allows, or
// much faster than at a smaller batch. given: whose roofline it is if it was not probed. Returns
// whether that is the wrong one.
static bool print_doubts(FILE* f, const SweepReport* s, const char* given) {
  const SweepRow* before = NULL;
  for (int i = 0; i < s->n_rows; i++) {
    const SweepRow* r = &s->rows[i];
    if (s->simulated || r->status != ROW_OK || !(r->step_us > 0)) continue;
    bool above = r->roof_pct > 105, faster = before && r->step_us < 0.9 * before->step_us;
    if (above && given)
      fprintf(f, "Batch %d ran faster than %s allows: is it the right --device, --model, length?\n",
              r->batch, given);
    else if (above)
      fprintf(f,
              "Batch %d ran faster than the probed ceilings: its weights fit in a cache, or other "
              "work disturbed the probe.\n",
              r->batch);
    else if (faster)
      fprintf(f,
              "Batch %d ran much faster than batch %d, which other work must have disturbed: "
              "measure again.\n",
              r->batch, before->batch);
    if (above || faster) return above && given;
    before = r;
  }
  return false;
}

// How far three numbers carry: bandwidth, the rate that prompts reach (the ceiling where that is
// unknown), and the first batch's overhead.
static void print_prediction(FILE* f, const SweepReport* s) {
  Prediction p = predict(s->rows, s->n_rows);
  if (p.checked == 0) return;
  fprintf(f, "Prediction: reading, multiplying %s, %+.0f us (batch %d's %s): ",
          p.by_prompts ? "as fast as for prompts" : "at the ceiling", p.overhead, p.first->batch,
          p.overhead < 0 ? "overlap" : "overhead");
  fprintf(f, "within %.0f%% at %d of %d other batches.\n", ceil(p.worst), p.checked, p.others);
}

static PolicyResult no_result;  // all of it undefined
static Request no_request;

static void put_policy_row(FILE* f, Form form, const PolicyResult* p) {
  put(f, form,
      "'policy': %s, 'requests': %i, 'completed': %i, 'rejected': %i, 'output_tok_s': %g,\n"
      "'request_per_s': %g, 'goodput_req_s': %f, 'ttft_p50_ms': %g, 'ttft_p95_ms': %g,\n"
      "'ttft_p99_ms': %g, 'tpot_p50_ms': %g, 'tpot_p95_ms': %g, 'tpot_p99_ms': %g,\n"
      "'itl_p50_ms': %g, 'itl_p95_ms': %g, 'itl_p99_ms': %g, 'e2e_p50_ms': %g, 'e2e_p95_ms': %g,\n"
      "'e2e_p99_ms': %g, 'n_ttft': %i, 'n_tpot': %i, 'n_itl': %i, 'n_e2e': %i,\n"
      "'occupancy_pct': %f, 'padding_pct': %f, 'kv_unused_pct': %f, 'preemptions': %i,\n"
      "'timed_out': %i, 'duration_s': %g",
      policy_names[p->policy], p->requests, p->completed, p->rejected, p->output_tok_s,
      p->request_per_s, p->goodput_req_s, p->ttft.p50, p->ttft.p95, p->ttft.p99, p->tpot.p50,
      p->tpot.p95, p->tpot.p99, p->itl.p50, p->itl.p95, p->itl.p99, p->e2e.p50, p->e2e.p95,
      p->e2e.p99, p->ttft.n, p->tpot.n, p->itl.n, p->e2e.n, p->occupancy_pct, p->padding_pct,
      p->kv_unused_pct, p->preemptions, p->timed_out, p->duration_s);
}

static void put_request_row(FILE* f, Form form, Policy policy, int i, const Request* r,
                            double start) {
  static const char* const names[] = {"cut short", "cut short", "finished", "rejected",
                                      "timed out"};
  double first = r->n_new > 0 ? r->time[0] - start - r->arrival : NAN;
  double last = r->n_new > 0 ? r->time[r->n_new - 1] - start - r->arrival : NAN;
  put(f, form,
      "'policy': %s, 'id': %i, 'arrival_s': %f, 'prompt_tokens': %i, 'output_tokens': %i, "
      "'ttft_ms': %g, 'tpot_ms': %g, 'e2e_ms': %g, 'preemptions': %i, 'status': %s",
      policy_names[policy], i, r->arrival, r->n_prompt, r->n_new, 1e3 * first,
      r->n_new > 1 ? 1e3 * (last - first) / (r->n_new - 1) : NAN,
      r->status == FINISHED ? 1e3 * last : NAN, r->preemptions, names[r->status]);
  fputc('\n', f);
}

static void print_policy_header(FILE* f, int q) {
  fprintf(f, "                                          TTFT ms            TPOT ms      E2E ms\n");
  fprintf(f, "policy       done     tok/s goodput      p50      p%d     p50     p%d       p50", q,
          q);
  fprintf(f, " slots%%  pad%% KV idle%% preempted  seconds\n");
}

static void print_policy(FILE* f, const PolicyResult* p, int q) {
  char line[256];
  snprintf(line, sizeof line,
           "%-10s %6d %9.1f %7.2f %8.1f %8.1f %7.2f %7.2f %9.1f %6.1f %5.1f %8.1f %9d %8.2f",
           policy_names[p->policy], p->completed, p->output_tok_s, p->goodput_req_s, p->ttft.p50,
           at_percentile(p->ttft, q), p->tpot.p50, at_percentile(p->tpot, q), p->e2e.p50,
           p->occupancy_pct, p->padding_pct, p->kv_unused_pct, p->preemptions, p->duration_s);
  for (char* nan = line; (nan = strstr(nan, "nan")) != NULL;) memcpy(nan, "  -", 3);
  fprintf(f, "%s\n", line);
  if (p->rejected + p->timed_out > 0)
    fprintf(f, "%-11s%d rejected, %d timed out, of %d\n", "", p->rejected, p->timed_out,
            p->requests);
}
