// Tests of the advice: bs knee's reading of files, bs plan's arithmetic, config.json against its
// schema. Expected values are worked out by hand beside them, or come from the place named.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "mutate.h"
#include <regex.h>

static const char* path;
static SweepRow rows[MAX_MEASURED];
static char err[ERR_LEN];
static const KneeRules usual = {0, 0, 95, 10, 90};

static bool near(double a, double b) {
  return fabs(a - b) <= 1e-9 * (1 + fabs(b));  // false for NaN
}

static bool has(const char* text, const char* part) {
  return strstr(text, part) != NULL;
}

static const char* file_of(const void* bytes, size_t n) {
  path = scratch_file("table");
  FILE* f = fopen(path, "w");
  fwrite(bytes, 1, n, f);
  fclose(f);
  return path;
}

static int read_text(const char* text) {
  return read_measurements(file_of(text, strlen(text)), 0, 0, rows, err);
}

// ---- Any CSV

#define HEAD "batch,output_tok_s,tpot_p95_ms\n"

static void test_csv_forms(void) {
  CHECK(read_text(HEAD "1,100,10\n2,190,11\n4,360,12\n") == 3);
  CHECK(rows[0].batch == 1 && rows[2].batch == 4 && rows[2].output_tok_s == 360);
  CHECK(rows[1].tpot.p95 == 11 && isnan(rows[1].tpot.p99) && isnan(rows[1].ttft.p50));
  CHECK(rows[1].status == ROW_OK && isnan(rows[1].mem_used_mib) && rows[1].n_requests == 0);
  Knee k = knee(rows, 3, usual);  // +90% and +89% a doubling: nothing stops the walk
  CHECK(k.working == 2 && k.start == 1 && k.rule == STOP_END);
  SweepRow sorted[3];
  memcpy(sorted, rows, sizeof sorted);
  CHECK(read_text(HEAD "4,360,12\n1,100,10\n2,190,11") == 3);  // any order, no last newline
  for (int i = 0; i < 3; i++)
    CHECK(rows[i].batch == sorted[i].batch && rows[i].tpot.p95 == sorted[i].tpot.p95);

  // Three times batch 2: the medians of 190, 210, 170 and of 11, 13, 12. Twice batch 4: the means.
  CHECK(read_text(HEAD "2,190,11\n4,300,20\n2,210,13\n1,100,10\n4,400,21\n2,170,12\n") == 3);
  CHECK(rows[1].batch == 2 && rows[1].output_tok_s == 190 && rows[1].tpot.p95 == 12);
  CHECK(rows[2].batch == 4 && rows[2].output_tok_s == 350 && rows[2].tpot.p95 == 20.5);

  // Byte order mark, CRLF, quotes, columns nobody knows, a comma and a line break in quotes,
  // floats.
  CHECK(read_text("\xef\xbb\xbf\"note\", \"batch\" ,output_tok_s,tpot_p95_ms,x\r\n"
                  "\"a, \"\"b\"\"\nc\",1.0,\"1e2\", 10 ,\r\n\r\n,\"2\",190,,nan\r\n") == 2);
  CHECK(rows[0].batch == 1 && rows[0].output_tok_s == 100 && rows[0].tpot.p95 == 10);
  CHECK(rows[1].batch == 2 && isnan(rows[1].tpot.p95));  // an empty cell says nothing
  CHECK(read_text(HEAD "7,100,10\n") == 1);              // one row
  k = knee(rows, 1, usual);
  CHECK(k.working == 0 && k.start == 0 && k.rule == STOP_END && k.second_opinion == 0);
  // 0 of a latency: not measured (vLLM writes TPOT 0 for outputs of one token).
  CHECK(read_text("batch,output_tok_s,itl_p99_ms,tpot_p99_ms\n1,5,3,0\n") == 1);
  CHECK(isnan(rows[0].tpot.p99) && rows[0].itl.p99 == 3);
  // A batch that once did not fit does not fit.
  CHECK(read_text("batch,status,reason,output_tok_s,tpot_p95_ms\n2,ok,,9,1\n"
                  "2,oom,\"so, so\",,\n1,ok,,5,1\n") == 2);
  CHECK(rows[1].status == ROW_OOM && strcmp(rows[1].reason, "so, so") == 0);
}

// Every row that we write is read back as it was.
static void test_own_csv(void) {
  SweepRow made[2], *r = &made[0];
  Measured filled;
  clear_row(&filled, 0);
  for (int i = 0; i < N_COLUMNS; i++) *column_of(&filled, i) = 100 + i;
  *r = filled.row;
  r->batch = 8;
  r->input_len = 128;
  r->output_len = 64;
  r->repeats = 3;
  r->n_requests = r->ttft.n = r->tpot.n = r->e2e.n = 24;
  r->itl.n = 1512;
  r->bound = BOUND_KV;
  made[1] = *r;
  made[1].batch = 16;
  made[1].status = ROW_SKIPPED;
  snprintf(made[1].reason, sizeof made[1].reason, "KV needs 9.1 GiB, 6.2 GiB left");
  ResultFile file;
  CHECK(result_open(&file, scratch(), "sweep.csv", err));
  put_sweep_row(file.f, HEADER, &no_row);
  for (int i = 0; i < 2; i++) put_sweep_row(file.f, CSV, &made[i]);
  CHECK(result_close(&file, err));
  CHECK(read_measurements(file.path, 0, 0, rows, err) == 2);
  // 5 MB in 1,000 us are 5 GB/s, 60% of what was probed; 5 GFLOP make 5 TFLOP/s, 2.5%.
  SweepRow own = rows[0];
  own.step_us = 1000;
  own.step_bytes = 5e6;
  own.mbu_pct = 60;
  own.step_flops = 5e9;
  own.mfu_pct = 2.5;
  SweepReport report = new_report(&own, 1, usual, "m", "d");
  find_ceilings(&report);
  CHECK(near(report.bandwidth, 5e9 / 0.6) && near(report.rate, 200e12));
  char a[4096], b[4096];
  for (int i = 0; i < 2; i++) {  // by what would be written of both
    FILE* f = fmemopen(a, sizeof a, "w");
    put_sweep_row(f, CSV, &made[i]);
    fclose(f);
    f = fmemopen(b, sizeof b, "w");
    put_sweep_row(f, CSV, &rows[i]);
    fclose(f);
    CHECK(strcmp(a, b) == 0, "%s and %s", a, b);
  }
}

static void test_bad_files(void) {
  static const struct {
    const char *text, *place, *reason;
  } bad[] = {
      {"", "open", "empty"},
      {HEAD, "rows", "none"},
      {"\n\n\n", "rows", "none"},
      {"batch,output_tok_s\n1,2\n", "columns",
       "missing tpot_p95_ms (or another TPOT or ITL; t_tg and tg); found: batch output_tok_s"},
      {"output_tok_s,tpot_p99_ms\n1,2\n", "columns",
       "missing batch (or max_concurrency, max_num_seqs, pl); found"},
      {"batch,tpot_p50_ms,toks\n1,2,3\n", "columns",
       "missing output_tok_s (or output_throughput, speed_tg); found: batch tpot_p50_ms toks"},
      {"x,y\n1,2\n", "columns", "missing batch (or"},
      {"garbage\n", "columns", "found: garbage"},
      {"\x01\x02\xff\xfe", "columns", "missing"},
      {"\"batch,output_tok_s\n1,2", "line 1", "not the header of a table"},
      {HEAD "1,100,10\n2,190\n", "line 3", "2 cells, but the header has 3"},
      {HEAD "1,100,10,5\n", "line 2", "4 cells, but the header has 3"},
      {HEAD "1,100,\"10\n", "line 2", "a quote is not closed"},
      {HEAD "1,nan,10\n", "line 2",
       "output_tok_s 'nan': must be 0 or a number from 1e-12 to 1e+18"},
      {HEAD "1,5,1e-300\n", "line 2", "tpot_p95_ms '1e-300'"},
      {"batch,output_tok_s,tpot_p95_ms,mbu_pct\n1,2,3,1e7\n", "line 2", "mbu_pct '1e7': must"},
      {"batch,output_tok_s,tpot_p95_ms,source\n1,2,3,measured\n2,4,3,simulated\n", "line 3",
       "simulated and measured rows are no curve"},
      {HEAD "1,inf,10\n", "line 2", "output_tok_s 'inf'"},
      {HEAD "1,1e999,10\n", "line 2", "output_tok_s '1e999'"},
      {HEAD "1,-5,10\n", "line 2", "output_tok_s '-5'"},
      {HEAD "1,5,-10\n", "line 2", "tpot_p95_ms '-10'"},
      {HEAD "1,5ms,10\n", "line 2", "output_tok_s '5ms'"},
      {HEAD "1,5,10\n,6,10\n", "line 3", "the batch is not a whole number, 1 or more"},
      {HEAD "0,5,10\n", "line 2", "the batch is not"},
      {HEAD "-1,5,10\n", "line 2", "batch '-1'"},
      {HEAD "1.5,5,10\n", "line 2", "the batch is not"},
      {HEAD "1e30,5,10\n", "line 2", "batch '1e30': must"},
      {HEAD "1e17,5,10\n", "line 2", "the batch is not"},
      {HEAD "1,,10\n", "line 2", "no throughput, although it ran"},
      {HEAD "1,0,10\n", "line 2", "no throughput"},
      {"batch,status,output_tok_s,tpot_p95_ms\n1,fine,2,3\n", "line 2", "status 'fine'"},
      {"{\"pl\": 1, \"tg\": 8, \"t_tg\": 1}", "columns", "missing output_tok_s"},
      {"{\"pl\": 1, \"tg\": 8, \"t_tg\": 1, \"speed_tg\": \"a\"}", "line 1", "speed_tg 'a'"},
      {"{\"pl\": 1, \"tg\": 8, \"t_tg\": 1, \"speed_tg\": 8", "line 1", "must be one JSON object"},
      {"{\"pl\": 1, \"tg\": 8, \"t_tg\": 1, \"speed_tg\": 8} x", "line 1", "must be one JSON"},
      {"{\"pl\": 1, \"tg\": 8, \"t_tg\": 1, \"speed_tg\": 8}\n\nx", "line 3", "must be one JSON"},
      {"{\"pl\": 1, \"tg\": 8, \"t_tg\": 1, \"speed_tg\": 8}\n{\"pl\": 2}", "line 2", "no through"},
      {"batch,input_len,output_tok_s,itl_p50_ms\n1,8,1,1\n2,9,1,1\n", "line 3",
       "9 + 0 tokens, after 8 + 0 in line 2"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    CHECK(read_text(bad[i].text) == -1);
    const char* at = strstr(err, "/table: ");
    bool ok = at && strncmp(at + 8, bad[i].place, strlen(bad[i].place)) == 0;
    CHECK(ok && has(err, bad[i].reason) && !strchr(err, '\n'), "'%s': %s", bad[i].text, err);
  }
  CHECK(read_measurements("/no/such/file", 0, 0, rows, err) == -1 && has(err, "No such file"));
  CHECK(read_measurements("/tmp", 0, 0, rows, err) == -1 && has(err, "not a regular file"));
  CHECK(read_measurements(file_of("batch\0", 6), 0, 0, rows, err) == -1 && has(err, "not a text"));
  CHECK(truncate(path, MAX_JSON + 1) == 0);
  CHECK(read_measurements(path, 0, 0, rows, err) == -1 && has(err, "size: over 20000000 bytes"));
  static char many[16 * (MAX_MEASURED + 2)];
  char* at = many + sprintf(many, HEAD);
  for (int i = 0; i < MAX_MEASURED; i++) at += sprintf(at, "%d,5,1\n", i + 1);
  CHECK(read_text(many) == MAX_MEASURED);
  sprintf(at, "7,5,1\n");
  CHECK(read_text(many) == -1 && has(err, "line 1002: more than 1000 rows"));
  static char wide[4 * MAX_COLUMNS];
  memset(wide, ',', sizeof wide - 1);
  CHECK(read_text(wide) == -1 && has(err, "line 1: not the header"));
  // Cut anywhere, a file is read or refused, never more than that.
  char text[] = HEAD "1,\"100\",10\r\n2,190,11\n", json[] = "{\"pl\": 1, \"a\": [{\"b\": \"}\"}]}";
  for (size_t n = 0; n < sizeof text; n++)
    if (read_measurements(file_of(text, n), 0, 0, rows, err) == 0) CHECK(false);
  for (size_t n = 0; n < sizeof json; n++)
    CHECK(read_measurements(file_of(json, n), 0, 0, rows, err) == -1);
}

// ---- Which latency judges

static bool chooses(const char* text, int percentile, bool asked, int wanted, const char* words) {
  KneeRules rules = usual;
  char note[WHY_LEN] = "";
  rules.percentile = percentile;
  int n = read_text(text);
  bool ok = choose_latency("f", rows, n, &rules, asked, note, err);
  if (wanted == 0) return n > 0 && !ok && has(err, words);
  return n > 0 && ok && rules.percentile == wanted && has(note, words);
}

static void test_choose_latency(void) {
  const char* all = "batch,output_tok_s,tpot_p50_ms,tpot_p95_ms,tpot_p99_ms\n1,5,1,2,3\n";
  const char* ends = "batch,output_tok_s,tpot_p50_ms,tpot_p99_ms\n1,5,1,3\n";
  const char* median = "batch,output_tok_s,tpot_p50_ms\n1,5,1\n";
  const char* itl = "batch,output_tok_s,itl_p95_ms,tpot_p50_ms\n1,5,4,1\n2,9,6,1\n";
  CHECK(chooses(all, 95, false, 95, "Judged by TPOT P95."));
  CHECK(chooses(all, 99, true, 99, "TPOT P99."));
  CHECK(chooses(ends, 95, false, 99, "TPOT P99, as there is no P95"));  // stricter: safe
  CHECK(chooses(ends, 95, true, 0, "no row has tpot_p95_ms or itl_p95_ms"));
  CHECK(chooses(median, 95, false, 50, "P50, as there is no P95"));
  CHECK(chooses(median, 99, true, 0, "no row has tpot_p99_ms or itl_p99_ms"));
  CHECK(chooses(itl, 95, true, 95, "ITL, in place of TPOT, at P95"));
  CHECK(rows[0].tpot.p95 == 4 && rows[1].tpot.p95 == 6 && rows[1].tpot.p50 == 1);
  KneeRules rules = usual;
  char note[WHY_LEN];
  rules.slo_ttft_ms = 5;
  int n = read_text(all);
  CHECK(!choose_latency("f", rows, n, &rules, true, note, err) && has(err, "needs ttft_p95_ms"));
}

// ---- The sweeps that others measured. Per doubling: g = (T2/T1)^(1/log2(B2/B1)).

static bool advises(const char* file, int percentile, double slo_tpot, int working, int start,
                    StopRule rule, int second) {
  char from[300], note[WHY_LEN];
  KneeRules rules = {0, slo_tpot, percentile ? percentile : 95, 10, 90};
  snprintf(from, sizeof from, "tests/data/%s", file);
  int n = read_measurements(from, 0, 0, rows, err);
  bool ok = n > 0 && choose_latency(from, rows, n, &rules, percentile > 0, note, err);
  if (!ok) printf("  %s\n", err);
  if (!ok) return false;
  Knee k = knee(rows, n, rules);
  ok = k.working >= 0 && rows[k.working].batch == working && rows[k.start].batch == start &&
       k.rule == rule && rows[k.second_opinion].batch == second;
  if (!ok) printf("  index %d by %s: %s\n", k.working, stop_names[k.rule], k.why);
  return ok;
}

static void test_others_sweeps(void) {
  const char *llama = "sweep_vllm_h100_bg_llama-2-7b.csv", *opt = "sweep_vllm_h100_bg_opt-2.7b.csv";
  const char* fixed = "sweep_vllm_h100_out260_opt-2.7b.csv";
  const char* vllm = "vllm_summary.csv";
  // Llama-2-7B, P99 (which judges when nobody asks, since P95 is not there). 192 is no plateau: 256
  // gives (3895.66/3686.98)^(1/0.415) = +14.2%. Latency 192 -> 256: (78.71/55.03)^(1/0.415) = 2.37x
  // a doubling, over 2.2x. Efficiency 3686.98/192/91.928 = 0.209 at 192, 0.166 at 256.
  CHECK(advises(llama, 0, 0, 192, 128, STOP_JUMP, 192));
  CHECK(advises(llama, 99, 0, 192, 128, STOP_JUMP, 192));
  CHECK(advises(llama, 99, 25, 32, 16, STOP_SLO, 192));       // 32: 19.19 ms, 64: 26.19 ms
  CHECK(advises(llama, 0, 50, 128, 96, STOP_SLO, 192));       // 128: 42.80 ms, 192: 55.03 ms
  CHECK(advises(llama, 50, 0, 256, 192, STOP_PLATEAU, 192));  // no jump at P50; 512 gives +2.3%
  CHECK(advises(llama, 50, 25, 64, 32, STOP_SLO, 192));       // 64: 23.26 ms, 96: 31.38 ms
  CHECK(advises(llama, 50, 50, 192, 128, STOP_SLO, 192));     // 192: 49.33 ms, 256: 58.15 ms
  CHECK(!advises(llama, 95, 0, 0, 0, STOP_END, 0) && has(err, "no row has tpot_p95_ms"));
  // OPT-2.7B, mixed lengths. From 192, 256 gives +15.4%; from 256, 384 gives +6.5% and 512 +9.6%.
  // Steepest latency: 128 -> 192, 1.84x. Efficiency 0.228 at 128, 0.163 at 192.
  CHECK(advises(opt, 0, 0, 256, 192, STOP_PLATEAU, 128));
  CHECK(advises(opt, 99, 25, 64, 32, STOP_SLO, 128));        // 64: 20.43 ms, 96: 28.02 ms
  CHECK(advises(opt, 99, 50, 128, 96, STOP_SLO, 128));       // 128: 35.68 ms, 192: 50.94 ms
  CHECK(advises(opt, 50, 25, 96, 64, STOP_SLO, 128));        // 96: 20.45 ms, 128: 25.64 ms
  CHECK(advises(opt, 50, 50, 256, 192, STOP_PLATEAU, 128));  // 256: 45.07 ms, and the plateau
  CHECK(!advises(opt, 95, 25, 0, 0, STOP_END, 0) && has(err, "no row has tpot_p95_ms"));
  // OPT-2.7B, 260 new tokens. From 128, 256 gives +12.4%; from 256, 512 gives -0.3%. Efficiency
  // 0.256 at 128, 0.144 at 256.
  CHECK(advises(fixed, 0, 0, 256, 128, STOP_PLATEAU, 128));
  CHECK(advises(fixed, 99, 25, 128, 64, STOP_SLO, 128));       // 128: 23.97 ms, 256: 41.61 ms
  CHECK(advises(fixed, 99, 50, 256, 128, STOP_PLATEAU, 128));  // 41.61 ms is not over 50
  CHECK(advises(fixed, 50, 25, 128, 64, STOP_SLO, 128));       // 128: 23.11 ms, 256: 40.56 ms
  CHECK(!advises(fixed, 95, 50, 0, 0, STOP_END, 0) && has(err, "no row has tpot_p95_ms"));

  // vLLM's summary: three runs each of 8, 32, 128, 256; medians 400, 1200, 2400, 2500 tok/s and P99
  // 20, 25, 40, 60 ms. Two doublings: 3^(1/2) = +73%, 2^(1/2) = +41%; then +4.2%. Per sequence 50,
  // 37.5, 18.8, 9.8 tok/s; a fifth of the first is 10.
  CHECK(advises(vllm, 0, 0, 128, 32, STOP_PLATEAU, 128));
  CHECK(rows[2].output_tok_s == 2400 && rows[2].tpot.p99 == 40 && rows[2].ttft.p99 == 1510);
  CHECK(rows[2].tpot.p50 == 38 && rows[2].itl.p50 == 37.5 && rows[2].e2e.p99 == 6000);
  CHECK(rows[2].n_requests == 500 && rows[2].tpot.n == 500 && rows[2].input_len == 0);
  CHECK(advises(vllm, 99, 30, 32, 8, STOP_SLO, 128));
  CHECK(advises(vllm, 50, 50, 128, 32, STOP_PLATEAU, 128));
  // The smaller of the two limits caps the batch: 64 twice, median 1010.
  CHECK(read_text("max_concurrency,max_num_seqs,output_throughput,median_tpot_ms\n"
                  "64,8,300,20\n64.0,64,1000,40\n64,128,1020,40\n,32,700,30\n") == 3);
  CHECK(rows[2].batch == 64 && rows[2].output_tok_s == 1010 && rows[1].batch == 32);
}

static void test_llama_cpp(void) {
  const char* file = "tests/data/llama_batched_bench.jsonl";
  CHECK(read_measurements(file, 0, 0, rows, err) == -1);
  CHECK(has(err, "line 6: 512 + 128 tokens, after 128 + 128 in line 1"));
  CHECK(read_measurements(file, 64, 0, rows, err) == -1 && has(err, "none has --input-len"));
  CHECK(read_measurements(file, 512, 128, rows, err) == 2 && rows[1].input_len == 512);
  // 128 tokens in 3.2, 3.328, 3.584, 7.168, 14.336 s: 25, 26, 28, 56, 112 ms each. Batches 1 to 4:
  // +92%, +86%; then 142.857 tok/s for ever. 142.857/16/40 = 0.22 > 0.2. Latency doubles: no jump.
  CHECK(read_measurements(file, 128, 0, rows, err) == 5);
  static const double tpot[] = {25, 26, 28, 56, 112};
  for (int i = 0; i < 5; i++) {
    CHECK(rows[i].batch == 1 << i && near(rows[i].tpot.p50, tpot[i]));
    CHECK(rows[i].tpot.p95 == rows[i].tpot.p50 && rows[i].tpot.n == rows[i].batch);
    CHECK(near(rows[i].ttft.p99, 100.0 * rows[i].batch));  // 1,280 prompt tokens a second
  }
  CHECK(near(rows[2].output_tok_s, 142.857143) && near(rows[2].prefill_tok_s, 1280));
  Knee k = knee(rows, 5, usual);
  CHECK(k.working == 2 && k.start == 1 && k.rule == STOP_PLATEAU && k.second_opinion == 4);
  KneeRules rules = usual;
  rules.slo_tpot_ms = 26;
  k = knee(rows, 5, rules);
  CHECK(k.working == 1 && k.rule == STOP_SLO);
}

static void test_walk(void) {
  char text[4096];
  SweepReport s;
  memset(&s, 0, sizeof s);
  s.rows = rows;
  s.n_rows = read_text(
      "batch,status,reason,output_tok_s,tpot_p95_ms\n1,ok,,100,10\n4,ok,,360,\n"
      "8,skipped,KV needs more,,\n16,ok,,500,80\n");
  s.rules = usual;
  s.knee = knee(rows, s.n_rows, usual);
  FILE* f = fmemopen(text, sizeof text, "w");
  print_walk(f, &s);
  fclose(f);
  CHECK(has(text, "    1     100.0       -       10.00       -      -      -  ok\n"));
  // Two doublings: 3.6^(1/2) = 1.897. From 4 to 16: (500/360)^(1/2) = 1.179.
  CHECK(
      has(text, "    4     360.0  +89.7%           -       -      -      -  ok: working point\n"));
  CHECK(has(text, "    8         -       -           -       -      -      -  stop: memory\n"));
  CHECK(has(text, "   16     500.0  +17.9%       80.00       -      -      -  beyond\n") &&
        !has(text, "nan"));
}

static Plan plan_of(const char* model, const char* gpu, int cards, int in, int out) {
  Plan p;
  SimGpu g;
  memset(&p, 0, sizeof p);
  p.config = *find_preset(model);
  p.input_len = in;
  p.output_len = out;
  p.step_tokens = 4096;
  p.watermark_pct = 90;
  *err = '\0';
  CHECK(find_sim_gpu(gpu, &g, err));
  plan_open(&p, &g, cards, 0, err);
  return p;
}

// Beside vLLM's Llama-2-7B stands the roofline of an H100: batch 1 reads (6.738e9 - 0.131e9) * 2 B
// of weights and 512 KiB * 361 of KV at 3.35 TB/s: 4.00 ms of 10.78.
static void test_roofline_of_others(void) {
  int n = read_measurements("tests/data/sweep_vllm_h100_bg_llama-2-7b.csv", 200, 323, rows, err);
  Plan p = plan_of("llama-2-7b", "h100", 0, 200, 323);
  add_roofline(&p, rows, n);
  CHECK(fabs(rows[0].roof_us - 4001) < 2 && near(rows[0].step_us, 10777.7), "%g", rows[0].roof_us);
  CHECK(fabs(rows[0].roof_pct - 37.1) < 0.1 && rows[0].bound == BOUND_OVERHEAD);
  CHECK(rows[11].batch == 512 && isnan(rows[11].roof_us));  // 128 GiB of KV: it did not run at once
  for (int i = 0; i < n; i++) CHECK(!(rows[i].roof_pct > 100));
}

// ---- GPUs and the plan

static void test_sim_gpu(void) {
  static const char* const good[] = {"mem=8G,bw=256e9,rate=40e12", "rate=40e12,mem=8192M,bw=256e9"};
  static const char* const bad[] = {"",
                                    "h300",
                                    "mem",
                                    "rate=",
                                    "mem=8G,bw=256e9",
                                    "mem=8G,mem=8G,bw=1e9,rate=1e9",
                                    "mem=0x8,bw=1e9,rate=1e9",
                                    "mem=8G,bw=1e9,rate=1e9,",
                                    "mem=-8G,bw=1e9,rate=1e9",
                                    "mem=nan,bw=1e9,rate=1e12",
                                    "mem=8G,bw=256e9,rate=40e12x",
                                    "mem=8T,bw=256e9,rate=40e12",
                                    "mem=8G,bw=0,rate=40e12",
                                    "mem=8G,bw=256e9,rate=40e12,step=-1",
                                    "step=1e-6",
                                    "mem=8G,bw=256e9,rate=40e12,step=11",
                                    "mem=8G,bw=256e9,rate=40e12,steps=1",
                                    ",",
                                    "mem=8G,,bw=256e9,rate=40e12",
                                    "mem=8G;bw=256e9;rate=40e12",
                                    "mem=8G,bw=1e99,rate=40e12"};
  SimGpu g;
  CHECK(find_sim_gpu("h100", &g, err) && g.mem == 80 * GIB && g.bandwidth == 3.35e12);
  CHECK(g.rate == 989e12 && find_sim_gpu("H200", &g, err) && g.mem == 141 * GIB);
  for (int i = 0; i < 2; i++)
    CHECK(find_sim_gpu(good[i], &g, err) && g.mem == 8 * GIB && g.bandwidth == 256e9 &&
          g.rate == 40e12 && g.name == good[i]);
  CHECK(find_sim_gpu("step=308e-6,mem=8G,bw=256e9,rate=40e12", &g, err) && g.step == 308e-6);
  CHECK(find_sim_gpu("t4", &g, err) && g.step == 0 && g.mem == 15 * GIB && g.rate == 65e12);
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    CHECK(!find_sim_gpu(bad[i], &g, err) && has(err, "4060-laptop") && has(err, "rate=40e12"));
  for (int i = 0; i < N_SIM_GPUS; i++)  // FLOP per byte: 78 (3060) to 403 (L4); a slip shows here
    CHECK(sim_gpus[i].rate / sim_gpus[i].bandwidth > 70 &&
              sim_gpus[i].rate / sim_gpus[i].bandwidth < 410,
          "%s", sim_gpus[i].name);
}

// What article 2, section 4.4 says of Llama-2-70B.
static void test_plan_memory(void) {
  Plan p = plan_of("llama-2-70b", "h100", 1, 128, 128);
  CHECK(has(err, "weights 128.5 GiB") && has(err, "90% of 80.0 GiB") && has(err, "--gpus 2"));
  p = plan_of("llama-2-70b", "h100", 0, 128, 128);
  CHECK(*err == '\0' && p.cards == 2 && p.fewest == 2 && strcmp(p.device.name, "2 x h100") == 0);
  CHECK(parameter_count(&p.config) == 68976648192u);  // as published
  CHECK(plan_kv_bytes(&p) == 327680);                 // 320 KiB: 2 * 80 * 8 * 128 * 2
  CHECK(4096 * plan_kv_bytes(&p) == 1.25 * GIB);
  // 90% of 160 GiB is 147,456 MiB. Weights 131,562.5; framework 2 * 533. Eleven requests of 128
  // prompt tokens read 1,408 at once, 180,224 B each (6 * 8192 + 4 * 10240 + 4 * 8192 + 2 * 28672):
  // 242 MiB, and 1.3 of logits. That leaves 14,584 MiB: 11.4 times 1,280.
  CHECK(plan_fit(&p, 4096) == 11);
  // Four cards: 294,912 - 131,562.5 - 4 * 533 - 704 (4,096 tokens at once) = 160,513.5 MiB, each
  // 1,280 and 0.122 of logits: 125.4. A few dozen per card.
  p = plan_of("llama-2-70b", "a100-80g", 4, 128, 128);
  CHECK(p.cards == 4 && p.fewest == 2 && plan_fit(&p, 4096) == 125 && 125 / 4 == 31);
  SweepRow r;
  plan_memory(&p, 125, 4096, &r);
  CHECK(r.mem_kv_mib == 160000 && near(r.mem_weights_mib, 2 * 68976648192.0 / MIB));
  CHECK(r.mem_work_mib > 719 && r.mem_work_mib < 720 && r.mem_other_mib == 2132);
  CHECK(near(r.mem_used_mib, r.mem_weights_mib + 160000 + r.mem_work_mib + 2132));
  // A length of 17 takes two blocks of 16.
  plan_memory(&p, 1, 17, &r);
  CHECK(r.mem_kv_mib == 32 * 320.0 / 1024);

  // fp8: 130 B instead of 256 per head and token at head width 128; 66 instead of 128 at 64.
  p.fp8_kv = true;
  CHECK(plan_kv_bytes(&p) == 2 * 80 * 8 * 130 && 327680 / plan_kv_bytes(&p) > 1.9);
  CHECK(plan_fit(&p, 4096) == 246);  // 160,513.5 / (650 + 0.122)
  p = plan_of("llama-3.2-1b", "h200", 0, 128, 128);
  double fp16 = plan_kv_bytes(&p);
  p.fp8_kv = true;
  CHECK(fp16 == 32768 && plan_kv_bytes(&p) == 2 * 16 * 8 * 66 && fp16 / plan_kv_bytes(&p) > 1.9);
}

static void test_plan_curve(void) {
  SweepRow one, many;
  // A step of Llama-2-70B reads (68.977e9 - 0.262e9 of the embedding) * 2 B: 137.43 GB at
  // 13.4 TB/s = 10.26 ms, whether for one sequence or, with 2.0 GB of their KV, for 32 (10.41 ms).
  // With the prompts, 0.142 s for 32: 32 * 128 / (0.142 + 127 * 0.01041) = 2,799 tok/s against
  // 128 / (128 * 0.01026) = 97.5: 28.7x. Article 2, section 4.2: "20 to 30 times".
  Plan p = plan_of("llama-2-70b", "h100", 4, 128, 128);
  plan_row(&p, 1, &one);
  plan_row(&p, 32, &many);
  double gain = many.output_tok_s / one.output_tok_s;
  CHECK(fabs(one.tpot.p95 - 10.26) < 0.01 && fabs(many.tpot.p95 - 10.41) < 0.01);
  CHECK(fabs(one.output_tok_s - 97.5) < 0.1 && fabs(many.output_tok_s - 2799) < 5);
  CHECK(gain > 20 && gain < 30, "%.1f", gain);
  CHECK(one.bound == BOUND_WEIGHTS && near(one.roof_pct, 100) && near(one.mbu_pct, 100));
  CHECK(near(many.noreuse_us / one.noreuse_us, 32) && many.n_requests == 32);
  p = plan_of("llama-2-7b", "a100-80g", 0, 128, 128);
  plan_row(&p, 1, &one);
  plan_row(&p, 32, &many);
  gain = many.output_tok_s / one.output_tok_s;
  CHECK(p.cards == 1 && gain > 20 && gain < 30, "%.1f", gain);

  // plots/h200/llama-3.2-1b/sweep.csv, where every step was counted as it ran: batch 1 and 256.
  p = plan_of("llama-3.2-1b", "mem=139.8G,bw=4653e9,rate=630e12", 0, 128, 128);
  plan_row(&p, 1, &one);
  plan_row(&p, 256, &many);
  CHECK(fabs(one.step_bytes / 2.47778918e9 - 1) < 1e-3, "%g", one.step_bytes);
  CHECK(fabs(many.step_bytes / 4.08315494e9 - 1) < 2e-3, "%g", many.step_bytes);
  CHECK(fabs(many.step_flops / 6.39144821e11 - 1) < 2e-3, "%g", many.step_flops);
  CHECK(fabs(one.roof_us / 532.506607 - 1) < 2e-3 && fabs(many.roof_us / 1014.65215 - 1) < 3e-3);
  CHECK(many.bound == BOUND_COMPUTE && near(many.mfu_pct, 100));
  CHECK(many.mem_kv_mib == 2048 && fabs(many.mem_weights_mib - 2357.3) < 1);
  CHECK(fabs(many.mem_used_mib / 5278.8125 - 1) < 0.05, "%g", many.mem_used_mib);
  // The overhead of one step, measured at batch 1: 840.79 - 532.51 us. Batch 8 took 971 us.
  p.step = 308.3e-6;
  plan_row(&p, 1, &many);
  CHECK(fabs(many.step_us - one.step_us - 308.3) < 1e-6 && near(many.roof_us, one.roof_us));
  CHECK(near(many.roof_pct, 100 * one.roof_us / many.step_us) &&
        many.ttft.p95 > one.ttft.p95 + 0.3);
  plan_row(&p, 8, &many);
  CHECK(fabs(many.step_us / 971.26 - 1) < 0.2, "%g", many.step_us);
  p.output_len = 1;  // only the prompts: no TPOT
  plan_row(&p, 4, &one);
  CHECK(isnan(one.tpot.p95) && one.tpot.n == 0 && isnan(one.step_us) && one.output_tok_s > 0);

  // MHA, GQA, MQA of one shape: 512, 128, 16 KiB per token, and what fits grows with it.
  static const int heads[] = {32, 8, 1};
  int fit = 0;
  for (int i = 0; i < 3; i++) {
    p = plan_of("llama-2-7b", "a100-80g", 0, 1000, 1000);
    p.config.n_kv_heads = heads[i];
    CHECK(plan_kv_bytes(&p) == 16384.0 * heads[i] && plan_fit(&p, 2000) > 3 * fit);
    fit = plan_fit(&p, 2000);
  }
  plan_row(&p, 4096, &many);  // 4,096 sequences of 2,000 tokens, 16 KiB each: 125 GiB
  CHECK(many.status == ROW_SKIPPED && has(many.reason, "KV needs 125 GiB, "));
}

// ---- config.json

// The value of a key, even if it is null or false; NULL: not there.
static const char* value_of(const char* object, const char* key) {
  char name[NAME_LEN];
  const char* value;
  while ((value = json_next(&object, name)) != NULL)
    if (strcmp(name, key) == 0) return value;
  return NULL;
}

// The next value of an array, or NULL at its end.
static const char* array_next(const char** at) {
  *at += 1 + strspn(*at + 1, JSON_SPACE);
  const char* value = *at;
  *at = json_skip(value);
  return *at > value ? value : NULL;
}

static bool same_json(const char* a, const char* b) {
  size_t n = (size_t)(json_skip(a) - a), m = (size_t)(json_skip(b) - b);
  while (n > 0 && isspace((unsigned char)a[n - 1])) n--;
  while (m > 0 && isspace((unsigned char)b[m - 1])) m--;
  return n == m && memcmp(a, b, n) == 0;
}

static bool is_type(const char* value, const char* type) {
  double number;
  bool is_number = json_number(value, &number);
  if (strncmp(type, "\"integer\"", 9) == 0) return is_number && number == floor(number);
  if (strncmp(type, "\"number\"", 8) == 0) return is_number;
  const char* first = strncmp(type, "\"object\"", 8) == 0  ? "{"
                      : strncmp(type, "\"array\"", 7) == 0 ? "["
                      : strncmp(type, "\"null\"", 6) == 0  ? "n"
                                                           : "\"";
  return *value == *first;
}

static bool matches(const char* value, const char* pattern) {
  char text[1024], expression[1024];
  regex_t r;
  bool ok = json_string(value, text, sizeof text) &&
            json_string(pattern, expression, sizeof expression) &&
            regcomp(&r, expression, REG_EXTENDED | REG_NOSUB) == 0;
  if (!ok) return false;
  ok = regexec(&r, text, 0, NULL, 0) == 0;
  regfree(&r);
  return ok;
}

// The keywords that our schema uses: type, enum, minimum, pattern, required, properties,
// additionalProperties, items. False, and prints the place, where the value breaks one.
static bool valid(const char* schema, const char* value, const char* place) {
  const char *types = value_of(schema, "type"), *list = value_of(schema, "enum"), *at, *item;
  const char *least = value_of(schema, "minimum"), *pattern = value_of(schema, "pattern");
  const char *properties = value_of(schema, "properties"), *closed, *items;
  double number, bound;
  char key[NAME_LEN];
  bool ok = types == NULL || (*types == '"' && is_type(value, types));
  for (at = types; !ok && types && *types == '[' && (item = array_next(&at)) != NULL;)
    ok = is_type(value, item);
  bool listed = list == NULL;
  for (at = list; !listed && (item = array_next(&at)) != NULL;) listed = same_json(item, value);
  ok = ok && listed;
  if (least && json_number(least, &bound) && json_number(value, &number)) ok &= number >= bound;
  if (pattern) ok = ok && matches(value, pattern);
  for (at = value_of(schema, "required"); ok && at && (item = array_next(&at)) != NULL;)
    ok = json_string(item, key, sizeof key) && value_of(value, key) != NULL;
  if (!ok) printf("  %s: %.*s\n", place, (int)fmin(200, json_skip(value) - value), value);
  closed = value_of(schema, "additionalProperties");
  for (at = value; ok && properties && (item = json_next(&at, key)) != NULL;) {
    const char* rule = value_of(properties, key);
    if (rule) ok = valid(rule, item, key);
    if (!rule && closed && *closed == 'f') ok = printf("  %s: not allowed\n", key) < 0;
  }
  items = value_of(schema, "items");
  for (at = value; ok && items && (item = array_next(&at)) != NULL;) ok = valid(items, item, place);
  return ok;
}

static SweepReport report_of(int n, KneeRules rules) {
  SweepReport s = new_report(rows, n, rules, "a \\ \"model\"", "a device");
  return s;
}

// The written config.json, checked against the schema; to be freed.
static char* config_of(const SweepReport* s, int step_tokens) {
  char* schema = json_file("tests/config.schema.json", err);
  CHECK(schema != NULL, "%s", err);
  CHECK(write_config_json(scratch(), s, "fp16", step_tokens, err));
  char* text = json_file(scratch_file("config.json"), err);
  CHECK(text && schema && valid(schema, text, "config.json"));
  free(schema);
  return text;
}

static void test_config(void) {
  SweepReport s;
  char* text;
  for (int fp8 = 0; fp8 < 2; fp8++) {  // a plan, with everything known
    Plan p = plan_of("llama-2-70b", "h100", 4, 2000, 1000);
    p.fp8_kv = fp8;
    for (int i = 0; i < 6; i++) plan_row(&p, 1 << i, &rows[i]);
    s = report_of(6, usual);
    s.cards = 4;
    s.fp8_kv = fp8;
    s.simulated = true;
    text = config_of(&s, 1024);
    CHECK(has(text, "\"source\": \"simulated\"") && has(text, "\"total_token_budget\": 96000,"));
    CHECK(has(text,
              "--max-num-seqs 32 --max-num-batched-tokens 1024 --max-model-len 3000"
              " --gpu-memory-utilization 0.9 --tensor-parallel-size 4"));
    CHECK(has(text,
              "--max-running-requests 32 --chunked-prefill-size 1024 --context-length 3000"
              " --tp-size 4"));
    CHECK(has(text,
              "--max_batch_size 32 --max_num_tokens 1024 --max_seq_len 3000 --tp_size 4"
              " --enable_chunked_prefill"));
    CHECK(has(text, "--parallel 32 --batch-size 1024 --ctx-size 96000"));
    CHECK(has(text, "--kv-cache-dtype fp8\"") == fp8 && has(text, "fp8_e4m3\"") == fp8);
    CHECK(has(text, "--kv_cache_dtype fp8\"") == fp8 && has(text, "--cache-type-v q8_0\"") == fp8);
    free(text);
  }
  // A foreign table: what it does not say is null, and sets no flag.
  s = report_of(read_text(HEAD "1,100,10\n2,190,11\n"), usual);
  text = config_of(&s, 0);
  CHECK(has(text, "\"working_batch\": 2,") && has(text, "\"source\": \"measured\""));
  CHECK(has(text, "\"max_input_tokens\": null") && has(text, "\"total_token_budget\": null"));
  CHECK(has(text, "\"vllm\": \"--max-num-seqs 2\","));
  CHECK(has(text, "\"llama_cpp\": \"--parallel 2\"\n"));
  free(text);
  KneeRules rules = usual;
  rules.slo_tpot_ms = 1;  // no working point
  s = report_of(2, rules);
  text = config_of(&s, 0);
  CHECK(has(text, "\"working_batch\": null,") && has(text, "\"stopped_by\": \"slo\""));
  free(text);

  // The checker itself: it must see what is wrong.
  static const char* const wrong[][2] = {
      {"{\"type\": \"integer\"}", "1.5"},
      {"{\"type\": [\"integer\", \"null\"]}", "\"1\""},
      {"{\"enum\": [1, 2]}", "3"},
      {"{\"minimum\": 1}", "0"},
      {"{\"pattern\": \"^a+$\"}", "\"aab\""},
      {"{\"required\": [\"a\"]}", "{\"b\": 1}"},
      {"{\"properties\": {\"a\": {\"type\": \"string\"}}}", "{\"a\": null}"},
      {"{\"additionalProperties\": false, \"properties\": {}}", "{\"a\": 1}"},
      {"{\"items\": {\"type\": \"string\"}}", "[\"a\", 1]"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    printf("expected: ");
    CHECK(!valid(wrong[i][0], wrong[i][1], "wrong"), "%s", wrong[i][0]);
  }
  CHECK(valid("{\"type\": [\"null\", \"integer\"], \"minimum\": 1}", "null", "null"));
}

// Damaged tables and traces: each is read or refused on one line, and what is read holds together.
static void test_mutations(void) {
  static const char* const files[] = {"tests/data/llama_batched_bench.jsonl",
                                      "tests/data/sweep_vllm_h100_bg_llama-2-7b.csv",
                                      "tests/data/vllm_summary.csv", NULL};
  static const char trace[] =
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
      "2023-11-16 18:15:50.99,396,109\r\n\"2023-11-16 18:15:51\",879,55\n";
  static SweepRow rows[MAX_MEASURED];
  static unsigned char good[20000], bad[20200];
  const char* path = scratch_file("damaged");
  char err[ERR_LEN];
  int loaded = 0, refused = 0, wrong = 0;
  for (int i = 0; i < 4 * 2000; i++) {
    const char* from = files[i / 2000];
    size_t len = sizeof trace - 1;
    if (from) {
      FILE* f = fopen(from, "rb");
      len = f ? fread(good, 1, sizeof good, f) : 0;
      if (f) fclose(f);
    } else {
      memcpy(good, trace, len);
    }
    len = mutate(bad, good, len, 400);
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(bad, 1, len, f) != len || fclose(f) != 0) die("%s: cannot write", path);
    int n = 0;
    *err = '\0';
    TraceRow* t = from ? NULL : read_trace(path, 0, &n, err);
    if (from) n = read_measurements(path, 0, 0, rows, err);
    bool ok = from ? n > 0 : t != NULL;
    for (int k = 0; k < n && ok && from; k++) wrong += rows[k].batch < 1;
    for (int k = 0; k < n && ok && t; k++) wrong += !(t[k].arrival >= 0) || t[k].prompt < 1;
    wrong += !ok && (*err == '\0' || strchr(err, '\n') != NULL);
    loaded += ok;
    refused += !ok;
    free(t);
  }
  CHECK(wrong == 0, "%d of 8,000 damaged files gave rows or messages that cannot be", wrong);
  CHECK(loaded > 400 && refused > 400, "%d loaded, %d refused", loaded, refused);
}

int main(void) {
  test_csv_forms();
  test_own_csv();
  test_bad_files();
  test_choose_latency();
  test_others_sweeps();
  test_llama_cpp();
  test_walk();
  test_roofline_of_others();
  test_sim_gpu();
  test_plan_memory();
  test_plan_curve();
  test_config();
  test_mutations();
  return check_report();
}
