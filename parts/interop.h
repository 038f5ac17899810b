// ---- Other tools: their measurements in, their options out. What others call a thing is known
// here and nowhere else. Measurements are CSV or JSON lines, ours or another tool's; a problem with
// them is one line, "path: place: reason".

enum { MAX_MEASURED = 1000, MAX_COLUMNS = 512, WHY_LEN = 200 };

typedef struct {  // a row as the file has it; NaN = not given
  SweepRow row;
  double batch, cap, seqs, input_len, output_len, repeats, n, n_itl, prefill_s, decode_s;
  int line;
} Measured;

// vLLM's names: the keys of a result in vllm/benchmarks/serve.py and the swept parameters, all of
// which are columns of the summary.csv that `vllm bench sweep serve` writes. llama.cpp's: the
// objects of llama-batched-bench --output-format jsonl (tools/batched-bench/batched-bench.cpp).
#define COLUMN(name, field) \
  { name, offsetof(Measured, field) }
// clang-format off
static const struct {
  const char* name;
  size_t offset;
} columns[] = {
    COLUMN("batch", batch), COLUMN("pl", batch),
    COLUMN("max_concurrency", cap), COLUMN("max_num_seqs", seqs),
    COLUMN("input_len", input_len), COLUMN("pp", input_len),
    COLUMN("output_len", output_len), COLUMN("tg", output_len),
    COLUMN("repeats", repeats), COLUMN("n_itl", n_itl),
    COLUMN("n_requests", n), COLUMN("completed", n),
    COLUMN("output_tok_s", row.output_tok_s), COLUMN("output_throughput", row.output_tok_s),
    COLUMN("speed_tg", row.output_tok_s), COLUMN("user_tok_s", row.user_tok_s),
    COLUMN("prefill_tok_s", row.prefill_tok_s), COLUMN("speed_pp", row.prefill_tok_s),
    COLUMN("t_pp", prefill_s), COLUMN("t_tg", decode_s),
    COLUMN("ttft_p50_ms", row.ttft.p50), COLUMN("median_ttft_ms", row.ttft.p50),
    COLUMN("ttft_p95_ms", row.ttft.p95), COLUMN("p95_ttft_ms", row.ttft.p95),
    COLUMN("ttft_p99_ms", row.ttft.p99), COLUMN("p99_ttft_ms", row.ttft.p99),
    COLUMN("tpot_p50_ms", row.tpot.p50), COLUMN("median_tpot_ms", row.tpot.p50),
    COLUMN("tpot_p95_ms", row.tpot.p95), COLUMN("p95_tpot_ms", row.tpot.p95),
    COLUMN("tpot_p99_ms", row.tpot.p99), COLUMN("p99_tpot_ms", row.tpot.p99),
    COLUMN("itl_p50_ms", row.itl.p50), COLUMN("median_itl_ms", row.itl.p50),
    COLUMN("itl_p95_ms", row.itl.p95), COLUMN("p95_itl_ms", row.itl.p95),
    COLUMN("itl_p99_ms", row.itl.p99), COLUMN("p99_itl_ms", row.itl.p99),
    COLUMN("e2e_p50_ms", row.e2e.p50), COLUMN("median_e2el_ms", row.e2e.p50),
    COLUMN("e2e_p95_ms", row.e2e.p95), COLUMN("p95_e2el_ms", row.e2e.p95),
    COLUMN("e2e_p99_ms", row.e2e.p99), COLUMN("p99_e2el_ms", row.e2e.p99),
    COLUMN("step_us", row.step_us), COLUMN("roof_us", row.roof_us),
    COLUMN("roof_pct", row.roof_pct), COLUMN("noreuse_us", row.noreuse_us),
    COLUMN("mbu_pct", row.mbu_pct), COLUMN("mfu_pct", row.mfu_pct),
    COLUMN("step_bytes", row.step_bytes), COLUMN("step_flops", row.step_flops),
    COLUMN("mem_weights_mib", row.mem_weights_mib), COLUMN("mem_kv_mib", row.mem_kv_mib),
    COLUMN("mem_work_mib", row.mem_work_mib), COLUMN("mem_other_mib", row.mem_other_mib),
    COLUMN("mem_used_mib", row.mem_used_mib), COLUMN("mem_limit_mib", row.mem_limit_mib),
};
// clang-format on
#undef COLUMN
enum { N_COLUMNS = sizeof columns / sizeof columns[0] };

static double* column_of(Measured* m, int i) {
  return (double*)((char*)m + columns[i].offset);
}

static double* latency_at(Percentiles* p, int percentile) {
  return percentile == 50 ? &p->p50 : percentile == 95 ? &p->p95 : &p->p99;
}

static void clear_row(Measured* m, int line) {
  memset(m, 0, sizeof *m);
  m->line = line;
  for (int i = 0; i < N_COLUMNS; i++) *column_of(m, i) = NAN;
}

// Takes what the column of this name says. An empty cell says nothing, and neither does a column
// that nobody here knows.
static bool set_cell(Measured* m, const char* name, const char* text, char* why) {
  SweepRow* r = &m->row;
  if (*text == '\0') return true;
  if (strcmp(name, "reason") == 0) {  // will be printed, and written as one cell again
    snprintf(r->reason, sizeof r->reason, "%s", text);
    for (char* c = r->reason; *c; c++)
      if (iscntrl((unsigned char)*c) || *c == '"') *c = *c == '"' ? '\'' : ' ';
  }
  if (strcmp(name, "source") == 0) r->simulated = strcmp(text, "simulated") == 0;
  for (int i = 0; i < 4; i++)
    if (strcmp(name, "bound") == 0 && strcmp(text, bound_names[i]) == 0) r->bound = (Bound)i;
  if (strcmp(name, "status") == 0) {
    int status = 0;
    while (status < 3 && strcmp(text, status_names[status]) != 0) status++;
    if (status == 3) return say(why, WHY_LEN, "status '%.40s': must be ok, skipped or oom", text);
    r->status = (RowStatus)status;
  }
  for (int i = 0; i < N_COLUMNS; i++) {
    if (strcmp(name, columns[i].name) != 0) continue;
    char* end;
    double value = strtod(text, &end);
    size_t length = strlen(name);
    double most = length > 4 && strcmp(name + length - 4, "_pct") == 0 ? 1e6 : 1e18;
    bool plain = text[strspn(text, "0123456789.eE+-")] == '\0';  // no hexadecimal
    if (*end != '\0' || !plain ||
        !(value == 0 || (value >= 1e-12 && value <= most)))  // what can be printed
      return say(why, WHY_LEN, "%s '%.40s': must be 0 or a number from 1e-12 to %g", name, text,
                 most);
    *column_of(m, i) = value;
  }
  return true;
}

// The next cell of a CSV text (RFC 4180), unquoted where it lies; *end is what ended it. NULL: a
// quote is not closed.
static char* next_cell(char** at, char* end) {
  char* cell = *at + strspn(*at, " \t");
  char *from = cell, *to = cell;
  bool quoted = *from == '"';
  from += quoted;
  for (; *from && (quoted || (*from != ',' && *from != '\n')); from++) {
    bool quote = quoted && *from == '"';
    if (quote) from++;  // "" is a quote, " alone the end of the quoted part
    if (quote && *from != '"') {
      quoted = false;
      from--;
    } else {
      *to++ = *from;
    }
  }
  *end = *from;
  *at = from + (*from != '\0');
  while (to > cell && isspace((unsigned char)to[-1])) to--;  // a carriage return, too
  *to = '\0';
  return quoted ? NULL : cell;
}

static bool csv_row(Measured* m, char** at, char** names, int n_names, char* why) {
  int n = 0;
  for (char end = ','; end == ','; n++) {
    const char* cell = next_cell(at, &end);
    if (!cell) return say(why, WHY_LEN, "a quote is not closed");
    if (n < n_names && !set_cell(m, names[n], cell, why)) return false;
  }
  return n == n_names || say(why, WHY_LEN, "%d cells, but the header has %d", n, n_names);
}

static void list_name(char found[WHY_LEN], const char* name) {
  size_t used = strlen(found);
  if (used < WHY_LEN - 40) snprintf(found + used, WHY_LEN - used, "%.32s ", name);
}

static bool json_row(Measured* m, char** at, char found[WHY_LEN], char* why) {
  char key[NAME_LEN], text[64];
  const char *object = *at, *value;
  *at += strcspn(*at, "\n");
  if (**at) *(*at)++ = '\0';
  object += strspn(object, JSON_SPACE);
  while ((value = json_next(&object, key)) != NULL) {
    int length = (int)(json_skip(value) - value);
    while (length > 0 && isspace((unsigned char)value[length - 1])) length--;
    if (!json_string(value, text, sizeof text)) snprintf(text, sizeof text, "%.*s", length, value);
    list_name(found, key);
    if (!set_cell(m, key, strcmp(text, "null") ? text : "", why)) return false;
  }
  bool whole = *object == '}' && object[1 + strspn(object + 1, JSON_SPACE)] == '\0';
  return whole || say(why, WHY_LEN, "must be one JSON object");
}

static int whole_number(double value) {  // 0 for NaN
  return (int)fmin(fmax(value, 0), 1e9);
}

// False, and why: a row that says nothing about a batch size.
static bool finish_row(Measured* m, char* why) {
  SweepRow* r = &m->row;
  if (isnan(m->batch)) m->batch = fmin(m->cap, m->seqs);  // the smaller of the two caps it
  for (int i = 0; i < N_COLUMNS; i++)
    if (*column_of(m, i) == 0) *column_of(m, i) = NAN;  // a latency of 0 was not measured
  double tpot = 1e3 * m->decode_s / m->output_len;      // a step gives a token to each sequence
  if (!isnan(tpot)) r->tpot.p50 = r->tpot.p95 = r->tpot.p99 = tpot;
  if (!isnan(m->prefill_s)) r->ttft.p50 = r->ttft.p95 = r->ttft.p99 = 1e3 * m->prefill_s;
  if (!(m->batch <= 1e9 && m->batch == floor(m->batch)))
    return say(why, WHY_LEN, "the batch is not a whole number, 1 or more");
  if (r->status == ROW_OK && isnan(r->output_tok_s))
    return say(why, WHY_LEN, "no throughput, although it ran");
  r->batch = (int)m->batch;
  r->input_len = whole_number(m->input_len);
  r->output_len = whole_number(m->output_len);
  r->repeats = whole_number(m->repeats);
  r->itl.n = whole_number(m->n_itl);
  r->n_requests = whole_number(isnan(tpot) ? m->n : m->batch);
  r->ttft.n = r->tpot.n = r->e2e.n = r->n_requests;
  return true;
}

static bool has_columns(const char* path, const Measured* m, const char* found, char* err) {
  const Percentiles *t = &m->row.tpot, *i = &m->row.itl;
  double latency = fmin(fmin(fmin(t->p50, t->p95), fmin(t->p99, i->p50)), fmin(i->p95, i->p99));
  bool timed = !isnan(latency) || !isnan(m->decode_s + m->output_len);
  bool batch = !isnan(fmin(m->batch, fmin(m->cap, m->seqs))), tok = !isnan(m->row.output_tok_s);
  if (batch && tok && timed) return true;
  return file_error(err, path, "columns: missing%s%s%s; found: %s",
                    batch ? "" : " batch (or max_concurrency, max_num_seqs, pl)",
                    tok ? "" : " output_tok_s (or output_throughput, speed_tg)",
                    timed ? "" : " tpot_p95_ms (or another TPOT or ITL; t_tg and tg)", found);
}

// The header of a CSV text: its names, and, as if in a row of ones, which columns there are.
static int read_header(char** at, char** names, Measured* ones, char found[WHY_LEN]) {
  char unused[WHY_LEN], end = ',';
  int n = 0;
  for (; end == ','; n++) {
    if (n == MAX_COLUMNS || !(names[n] = next_cell(at, &end))) return 0;
    for (int i = 0; i < n; i++)
      if (*names[n] && strcmp(names[i], names[n]) == 0) return 0;
    set_cell(ones, names[n], "1", unused);
    list_name(found, names[n]);
  }
  return n;
}

// Takes the text apart; returns how many rows it had, or -1.
static int read_rows(const char* path, char* text, Measured* m, char* err) {
  char *names[MAX_COLUMNS], found[WHY_LEN] = "", why[WHY_LEN] = "";
  bool json = text[strspn(text, JSON_SPACE)] == '{', ok = true;
  int n_names = 0, n = 0;
  for (int line = 1; *text && ok; line++) {
    size_t blank = strspn(text, " \t\r");
    if (text[blank] == '\n' || text[blank] == '\0') {
      text += blank + (text[blank] == '\n');
      continue;
    }
    Measured row;
    clear_row(&row, line);
    if (!json && n_names == 0) {
      n_names = read_header(&text, names, &row, found);
      ok = n_names > 0 || say(why, WHY_LEN, "not the header of a table, or a column twice");
      if (ok && !has_columns(path, &row, found, err)) return -1;
    } else {
      ok = json ? json_row(&row, &text, found, why) : csv_row(&row, &text, names, n_names, why);
      if (ok && json && n == 0 && !has_columns(path, &row, found, err)) return -1;
      ok = ok && finish_row(&row, why);
      if (ok && n == MAX_MEASURED) ok = say(why, WHY_LEN, "more than %d rows", MAX_MEASURED);
      if (ok) m[n++] = row;
    }
    if (!ok) file_error(err, path, "line %d: %s", line, why);
  }
  if (ok && n == 0) file_error(err, path, "rows: there are none");
  return ok && n > 0 ? n : -1;
}

static int compare_measured(const void* a, const void* b) {
  return ((const Measured*)a)->row.batch - ((const Measured*)b)->row.batch;
}

// Sorts by batch. One that was measured several times counts by its medians; one that once did not
// fit does not fit.
static int merge_rows(Measured* m, int n, SweepRow* rows) {
  qsort(m, (size_t)n, sizeof *m, compare_measured);
  double* values = (double*)xcalloc((size_t)n, sizeof *values);
  int merged = 0;
  for (int i = 0, same; i < n; i += same) {
    Measured out = m[i];
    for (same = 1; i + same < n && m[i + same].row.batch == out.row.batch; same++)
      if (out.row.status == ROW_OK) out = m[i + same];
    for (int c = 0; c < N_COLUMNS && out.row.status == ROW_OK; c++) {
      for (int j = 0; j < same; j++) values[j] = *column_of(&m[i + j], c);
      *column_of(&out, c) = percentiles_of(values, same).p50;
    }
    rows[merged++] = out.row;
  }
  free(values);
  return merged;
}

// Only rows of one workload make a curve. Lengths that are not 0 choose the rows that have them,
// and are given to rows that do not say theirs. Returns how many are left, or -1.
static int choose_rows(const char* path, Measured* m, int n, int input_len, int output_len,
                       char* err) {
  int kept = 0;
  for (int i = 0; i < n; i++) {
    SweepRow* r = &m[i].row;
    if (input_len && r->input_len && r->input_len != input_len) continue;
    if (output_len && r->output_len && r->output_len != output_len) continue;
    if (r->input_len == 0) r->input_len = input_len;
    if (r->output_len == 0) r->output_len = output_len;
    m[kept++] = m[i];
  }
  if (kept == 0) file_error(err, path, "rows: none has --input-len and --output-len");
  for (int i = 0; i < kept; i++) {
    const SweepRow *a = &m->row, *b = &m[i].row;
    if (a->simulated != b->simulated) {
      file_error(err, path, "line %d: simulated and measured rows are no curve", m[i].line);
      return -1;
    }
    if (a->input_len == b->input_len && a->output_len == b->output_len) continue;
    file_error(err, path, "line %d: %d + %d tokens, after %d + %d in line %d: %s", m[i].line,
               b->input_len, b->output_len, a->input_len, a->output_len, m->line,
               "--input-len and --output-len choose");
    return -1;
  }
  return kept > 0 ? kept : -1;
}

// A text file as a string, to be freed. NULL: err says why.
static char* text_file(const char* path, size_t most_bytes, char* err) {
  Mapping map = {NULL, 0};
  if (!map_file(path, &map, err)) return NULL;
  const char* from = (const char*)map.addr;
  size_t mark = map.len >= 3 && memcmp(from, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;  // Excel's, of UTF-8
  bool small = map.len <= most_bytes, is_text = small && !memchr(from, '\0', map.len);
  char* text = is_text ? strndup(from + mark, map.len - mark) : NULL;
  munmap(map.addr, map.len);
  if (!small) file_error(err, path, "size: over %zu bytes", most_bytes);
  if (small && !text) file_error(err, path, "bytes: not a text file");
  return text;
}

// The next line of a text, cut out where it lies; NULL after the last.
static char* next_line(char** at) {
  char* line = *at;
  if (*line == '\0') return NULL;
  size_t length = strcspn(line, "\n");
  *at += length + (line[length] == '\n');
  while (length > 0 && line[length - 1] == '\r') length--;
  line[length] = '\0';
  return line;
}

// Ascending by batch, room for MAX_MEASURED of them. Returns how many rows, or -1.
static int read_measurements(const char* path, int input_len, int output_len, SweepRow* rows,
                             char* err) {
  char* text = text_file(path, MAX_JSON, err);
  if (!text) return -1;
  Measured* m = (Measured*)xcalloc(MAX_MEASURED, sizeof *m);
  int n = read_rows(path, text, m, err);
  if (n > 0) n = choose_rows(path, m, n, input_len, output_len, err);
  if (n > 0) n = merge_rows(m, n, rows);
  free(m);
  free(text);
  return n;
}

// Which latency judges: TPOT, or ITL where there is no TPOT, at the percentile asked for; if nobody
// asked, at the next stricter one, or at last at the median. note says what stands in for what.
static bool choose_latency(const char* path, SweepRow* rows, int n, KneeRules* rules, bool asked,
                           char note[WHY_LEN], char* err) {
  const int order[] = {rules->percentile, 99, 50};
  for (int k = 0; k < (asked ? 1 : 3); k++) {
    int q = order[k], tpot = 0, itl = 0, ttft = 0;
    for (int i = 0; i < n; i++) {
      tpot += !isnan(*latency_at(&rows[i].tpot, q));
      itl += !isnan(*latency_at(&rows[i].itl, q));
      ttft += !isnan(*latency_at(&rows[i].ttft, q));
    }
    if (tpot + itl == 0) continue;
    if (rules->slo_ttft_ms > 0 && ttft == 0)
      return file_error(err, path, "columns: --slo-ttft needs ttft_p%d_ms", q);
    rules->percentile = q;
    for (int i = 0; i < n && tpot == 0; i++)
      *latency_at(&rows[i].tpot, q) = *latency_at(&rows[i].itl, q);
    say(note, WHY_LEN, "Judged by %s P%d%s.", tpot ? "TPOT" : "ITL, in place of TPOT, at", q,
        k > 0 ? ", as there is no P95" : "");
    return true;
  }
  return file_error(err, path,
                    "columns: no row has tpot_p%d_ms or itl_p%d_ms above 0; try --percentile",
                    order[0], order[0]);
}

// ---- What bs knee prints, and the options that config.json gives.

// A cell of a table for people; "-" where there is no number.
static void print_cell(FILE* f, int width, const char* format, double value) {
  char text[32];
  snprintf(text, sizeof text, format, value);
  fprintf(f, "%*s", width, isfinite(value) ? text : "-");
}

// The walk of knee(), row by row; growth is per doubling of the batch, over the row before.
static void print_walk(FILE* f, const SweepReport* s) {
  int q = s->rules.percentile;
  const SweepRow* last = NULL;
  fprintf(f, "batch     tok/s  growth TPOT P%d ms  growth      n  roof%%  verdict\n", q);
  for (int i = 0; i < s->n_rows; i++) {
    const SweepRow* r = &s->rows[i];
    bool ran = r->status == ROW_OK, both = ran && last;
    double tok = ran ? r->output_tok_s : NAN, tpot = ran ? at_percentile(r->tpot, q) : NAN;
    double more = both ? per_doubling(last->output_tok_s, tok, last, r) : NAN;
    double slower = both ? per_doubling(at_percentile(last->tpot, q), tpot, last, r) : NAN;
    fprintf(f, "%5d", r->batch);
    print_cell(f, 10, "%.1f", tok);
    print_cell(f, 8, "%+.1f%%", 100 * (more - 1));
    print_cell(f, 12, "%.2f", tpot);
    print_cell(f, 8, "%.2fx", slower);
    print_cell(f, 7, "%.0f", r->n_requests > 0 ? r->n_requests : NAN);
    print_cell(f, 7, "%.1f", ran && r->roof_pct > 0 ? r->roof_pct : NAN);
    int at = s->knee.working;
    bool stop = i == at + 1 && s->knee.rule < STOP_PLATEAU;
    fprintf(f, "  %s%s\n",
            i < at    ? "ok"
            : i == at ? "ok: working point"
            : stop    ? "stop: "
                      : "beyond",
            stop ? stop_names[s->knee.rule] : "");
    if (ran) last = r;
  }
  fprintf(f, "(growth: per doubling of the batch)\n");
}

// The same as options of the servers that readers will use, so that the result outlives bs. As
// documented in November 2026: `vllm serve`, `sglang.launch_server`, `trtllm-serve`,
// `llama-server`. Only vLLM's memory fraction is a share of the whole card: SGLang's leaves
// activations out, and TensorRT-LLM's is of what the weights leave. llama-server divides its
// context among the slots.
static const struct Server {
  const char *name, *batch, *step, *context, *memory, *cards, *long_prompt, *fp8_kv;
} servers[] = {
    {"vllm", "--max-num-seqs", "--max-num-batched-tokens", "--max-model-len",
     "--gpu-memory-utilization", "--tensor-parallel-size", "", "--kv-cache-dtype fp8"},
    {"sglang", "--max-running-requests", "--chunked-prefill-size", "--context-length", NULL,
     "--tp-size", "", "--kv-cache-dtype fp8_e4m3"},
    {"tensorrt_llm", "--max_batch_size", "--max_num_tokens", "--max_seq_len", NULL, "--tp_size",
     " --enable_chunked_prefill", "--kv_cache_dtype fp8"},
    {"llama_cpp", "--parallel", "--batch-size", "--ctx-size", NULL, NULL, "",
     "--cache-type-k q8_0 --cache-type-v q8_0"},
};
enum { N_SERVERS = sizeof servers / sizeof servers[0] };

// PRECONDITION: there is a working point. A length that the measurements do not say sets no flag.
static void put_server_flags(FILE* f, const struct Server* e, const SweepReport* s, int step) {
  const SweepRow* r = &s->rows[s->knee.working];
  double context = (double)r->input_len + r->output_len,
         slots = e->memory || e->cards ? 1 : r->batch;
  bool lengths = r->input_len > 0 && r->output_len > 0;
  fprintf(f, "\"%s\": \"%s %d", e->name, e->batch, r->batch);
  if (step > 0) fprintf(f, " %s %d", e->step, step);
  if (lengths) fprintf(f, " %s %.0f", e->context, slots * context);
  if (e->memory && r->mem_limit_mib > 0)
    fprintf(f, " %s %g", e->memory, s->rules.watermark_pct / 100);
  if (e->cards && s->cards > 1) fprintf(f, " %s %d", e->cards, s->cards);
  if (step > 0 && r->input_len > step) fputs(e->long_prompt, f);
  if (s->fp8_kv) fprintf(f, " %s", e->fp8_kv);
  fprintf(f, "\"%s\n", e + 1 < servers + N_SERVERS ? "," : "");
}

// ---- Traces: who came when, with how long a prompt, and how long an answer they got.

typedef struct {
  double arrival;
  int prompt, output, line;
} TraceRow;

static int compare_trace_rows(const void* a, const void* b) {
  const TraceRow *x = (const TraceRow*)a, *y = (const TraceRow*)b;
  return x->arrival != y->arrival ? (x->arrival > y->arrival) - (x->arrival < y->arrival)
                                  : x->line - y->line;
}

// Seconds of "2023-11-16 18:15:46.68" or of a plain number; NaN = neither.
static double parse_time(const char* text) {
  int year, month, day, hour, minute, used = 0;
  double second;
  if (sscanf(text, "%4d-%2d-%2d%*[ T]%2d:%2d:%lf%n", &year, &month, &day, &hour, &minute, &second,
             &used) == 6) {
    int y = month > 2 ? year : year - 1, m = month > 2 ? month - 3 : month + 9;  // from March on
    double days = 365.0 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day;
    bool fine = month >= 1 && month <= 12 && day >= 1 && day <= 31 && second >= 0 && second < 61;
    const char* zone = text + used;  // of one zone they all are, if any
    fine = fine && (*zone == '\0' || strcmp(zone, "Z") == 0 || strcmp(zone, "+00:00") == 0);
    return fine ? ((days * 24 + hour) * 60 + minute) * 60 + second : NAN;
  }
  char* end;
  second = strtod(text, &end);
  return end > text && end[strspn(end, " ")] == '\0' && isfinite(second) ? second : NAN;
}

// The columns of a trace; which = their places in the header, -1 = not there.
static bool trace_columns(char* header, int which[3]) {
  static const char* const names[2][3] = {{"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
                                          {"arrival_s", "prompt_tokens", "output_tokens"}};
  char end = ',', *at = header;
  for (int column = 0; end == ','; column++) {
    const char* name = next_cell(&at, &end);
    if (name == NULL) return false;
    for (int k = 0; k < 6; k++)
      if (strcmp(name, names[k / 3][k % 3]) == 0) which[k % 3] = column;
  }
  return which[0] >= 0 && which[1] >= 0 && which[2] >= 0;
}

// One line of a trace: the time, then whole numbers of tokens. False: not that.
static bool trace_line(char* line, const int which[3], TraceRow* row) {
  double value[3] = {NAN, NAN, NAN};
  char end = ',', *at = line;
  for (int column = 0; end == ','; column++) {
    const char* cell = next_cell(&at, &end);
    if (cell == NULL) return false;
    for (int k = 0; k < 3; k++)
      if (which[k] == column) value[k] = parse_time(cell);  // counts are plain numbers
  }
  bool fine = fabs(value[0]) < 1e12;  // s: 30,000 years, and a clock still tells microseconds
  for (int k = 1; k < 3; k++)
    fine = fine && value[k] >= 1 && value[k] <= MOST_TOKENS && value[k] == floor(value[k]);
  row->arrival = value[0];
  row->prompt = fine ? (int)value[1] : 0;
  row->output = fine ? (int)value[2] : 0;
  return fine;
}

// The first `most` rows of a file (0 = all), sorted by arrival, the first one at 0. NULL: err says
// why.
static TraceRow* read_trace(const char* path, int most, int* n, char* err) {
  enum { MOST_ROWS = 10000000 };
  char *text = text_file(path, (size_t)1 << 30, err), *at = text, *line;
  size_t cap_rows = 0;
  TraceRow* rows = NULL;
  int which[3] = {-1, -1, -1}, number = 0;
  bool ok = text != NULL;
  *n = 0;
  while (ok && (most == 0 || *n < most) && (line = next_line(&at)) != NULL) {
    number++;
    if (number == 1 && !trace_columns(line, which))
      ok = file_error(err, path,
                      "line 1: needs the columns TIMESTAMP,ContextTokens,GeneratedTokens or "
                      "arrival_s,prompt_tokens,output_tokens");
    if (number == 1 || *line == '\0' || !ok) continue;
    if ((size_t)*n == cap_rows) {
      cap_rows = cap_rows ? 2 * cap_rows : 1024;
      rows = (TraceRow*)realloc(rows, cap_rows * sizeof *rows);
      if (!rows) die("out of host memory");
    }
    TraceRow* row = &rows[*n];
    row->line = number;
    ok = trace_line(line, which, row) && *n < MOST_ROWS;
    if (!ok)
      file_error(err, path, "line %d: needs a time and two token counts from 1 to %d", number,
                 MOST_TOKENS);
    ++*n;
  }
  if (ok && *n == 0) ok = file_error(err, path, "no request in it");
  free(text);
  if (ok) qsort(rows, (size_t)*n, sizeof *rows, compare_trace_rows);
  for (int i = *n - 1; i >= 0 && ok; i--) rows[i].arrival -= rows[0].arrival;
  if (ok && rows[*n - 1].arrival > 1e9)
    ok = file_error(err, path, "its arrivals are %.3g s apart: 1e9 is the most",
                    rows[*n - 1].arrival);
  if (ok) return rows;
  free(rows);
  return NULL;
}
