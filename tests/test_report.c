// Tests of the host-side parts: metrics, knee, sweep.csv, config.json, table, options. Every
// expected value is worked out by hand from DESIGN.md, or comes from the program named beside it.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"

static bool near(double a, double b) {
  return fabs(a - b) <= 1e-9 * (1 + fabs(b));  // false for NaN
}

static bool has(const char* text, const char* part) {
  return strstr(text, part) != NULL;
}

// ---- metrics

// Expected: numpy.percentile(values, [50, 95, 99]), numpy 2.4.6.
static void test_percentiles(void) {
  double one[] = {1};
  Percentiles p = percentiles_of(one, 1);
  CHECK(p.p50 == 1 && p.p95 == 1 && p.p99 == 1 && p.n == 1);
  double two[] = {2, 1};
  p = percentiles_of(two, 2);
  CHECK(near(p.p50, 1.5) && near(p.p95, 1.95) && near(p.p99, 1.99));
  double four[] = {40, 10, 30, 20};
  p = percentiles_of(four, 4);
  CHECK(near(p.p50, 25) && near(p.p95, 38.5) && near(p.p99, 39.7));
  CHECK(four[0] == 10 && percentile(four, 4, 0) == 10 && percentile(four, 4, 100) == 40);
  double eleven[] = {100, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1};
  p = percentiles_of(eleven, 11);
  CHECK(near(p.p50, 6) && near(p.p95, 55) && near(p.p99, 91) && p.n == 11);
  double holes[] = {NAN, 2, NAN, 1};  // undefined samples count neither in the value nor in n
  p = percentiles_of(holes, 4);
  CHECK(near(p.p50, 1.5) && p.n == 2);
  p = percentiles_of(holes, 0);
  CHECK(isnan(p.p50) && isnan(p.p99) && p.n == 0);
  double undefined[] = {NAN};
  CHECK(isnan(percentiles_of(undefined, 1).p95));
}

// ---- knee

static SweepRow row_of(int batch, double tok_s, double tpot_ms) {
  SweepRow r;
  memset(&r, 0, sizeof r);
  r.batch = batch;
  r.output_tok_s = tok_s;
  Percentiles none = {NAN, NAN, NAN, 0};
  Percentiles tpot = {tpot_ms, tpot_ms, tpot_ms, isnan(tpot_ms) ? 0 : 8};
  r.tpot = tpot;
  r.ttft = r.itl = r.e2e = none;
  r.user_tok_s = r.prefill_tok_s = r.step_us = r.roof_us = r.noreuse_us = NAN;
  r.roof_pct = r.mbu_pct = r.mfu_pct = r.step_bytes = r.step_flops = NAN;
  r.mem_weights_mib = r.mem_kv_mib = r.mem_work_mib = r.mem_other_mib = NAN;
  r.mem_used_mib = r.mem_limit_mib = NAN;
  return r;
}

static const KneeRules defaults = {0, 0, 95, 10, 90};

// Batches 1, 2, 4, ... with a constant TPOT, so that only throughput speaks.
static Knee knee_of(const double* tok_s, int n) {
  SweepRow rows[16];
  for (int i = 0; i < n; i++) rows[i] = row_of(1 << i, tok_s[i], 10);
  return knee(rows, n, defaults);
}

static bool is_knee(Knee k, int working, int start, StopRule rule) {
  bool ok = k.working == working && k.start == start && k.rule == rule;
  if (!ok) printf("  got %d, %d, %d: %s\n", k.working, k.start, k.rule, k.why);
  return ok && k.why[0] != '\0';
}

static void test_knee_throughput(void) {
  double rising[] = {100, 190, 360, 680};  // +90%, +89%, +89% a doubling: nothing stops the walk
  CHECK(is_knee(knee_of(rising, 4), 3, 2, STOP_END));
  double flat[] = {100, 101, 99, 100};  // best growth over batch 1: 1% at batch 2
  CHECK(is_knee(knee_of(flat, 4), 0, 0, STOP_PLATEAU));
  // At 4 (300): 8 gives +3.3%, 16 (302/300)^(1/2) = +0.3%: plateau at 4. At 2 (180): 4 gives +67%.
  double bends[] = {100, 180, 300, 310, 302};
  CHECK(is_knee(knee_of(bends, 5), 2, 1, STOP_PLATEAU));
  CHECK(has(knee_of(bends, 5).why,
            "no batch above 4 gains 10% per doubling over it (at best +3.3%)"));
  // A dip at 4: batch 2 (190) sees 8: (500/190)^(1/2) = +62%; 4 sees 8: +178%. Walks through it.
  double dip[] = {100, 190, 180, 500};
  CHECK(is_knee(knee_of(dip, 4), 3, 2, STOP_END));
  // Noise: 4 is 2% below 2, yet 2 (195) sees 8: (320/195)^(1/2) = +28%; 8 (320) sees 16 (+3.1%) and
  // 32: (335/320)^(1/2) = +2.3%: plateau at 8.
  double noisy[] = {100, 195, 191, 320, 330, 335};
  CHECK(is_knee(knee_of(noisy, 6), 3, 2, STOP_PLATEAU));
  double one[] = {100};
  CHECK(is_knee(knee_of(one, 1), 0, 0, STOP_END));
  CHECK(knee_of(one, 1).second_opinion == 0);
  CHECK(is_knee(knee_of(one, 0), -1, -1, STOP_END));
  SweepRow quarter[2];  // 1.25 is exact in binary, so +25% is exactly 25
  quarter[0] = row_of(1, 1000, 10);
  quarter[1] = row_of(2, 1250, 10);
  KneeRules rules = {0, 0, 95, 25, 90};
  CHECK(is_knee(knee(quarter, 2, rules), 1, 0, STOP_END));
  rules.min_gain_pct = 25.1;
  CHECK(is_knee(knee(quarter, 2, rules), 0, 0, STOP_PLATEAU));
  double falling[] = {100, 50};
  CHECK(is_knee(knee_of(falling, 2), 0, 0, STOP_PLATEAU));
  // Efficiency of 1, 2, 4, 8, 16: 1, 0.9, 0.6, 0.25, 0.2. More than 0.2 is asked: 8.
  double fading[] = {100, 180, 240, 200, 320};
  CHECK(knee_of(fading, 5).second_opinion == 3);
  double unknown[] = {100, NAN, 300};  // a row without a throughput is no evidence of a plateau
  CHECK(is_knee(knee_of(unknown, 3), 2, 1, STOP_END));
}

static void test_knee_rules(void) {
  SweepRow rows[4];
  for (int i = 0; i < 4; i++) rows[i] = row_of(1 << i, 100 << i, 10 + i);  // TPOT 10, 11, 12, 13
  KneeRules rules = defaults;
  CHECK(is_knee(knee(rows, 4, rules), 3, 2, STOP_END));

  rules.slo_tpot_ms = 11.5;
  Knee k = knee(rows, 4, rules);
  CHECK(is_knee(k, 1, 0, STOP_SLO));
  CHECK(has(k.why, "batch 4 would break the TPOT SLO: P95 12 ms > 11.5 ms"));
  rules.slo_tpot_ms = 12;  // reaching the target is not breaking it
  CHECK(is_knee(knee(rows, 4, rules), 2, 1, STOP_SLO));
  rules.slo_tpot_ms = 9;  // the first batch breaks it: no working point
  CHECK(is_knee(knee(rows, 4, rules), -1, -1, STOP_SLO));
  CHECK(knee(rows, 4, rules).second_opinion == 3);
  rules.slo_tpot_ms = 0;
  rules.slo_ttft_ms = 50;  // TTFT was not measured: the rule cannot apply
  CHECK(is_knee(knee(rows, 4, rules), 3, 2, STOP_END));
  rows[1].ttft.p95 = 60;
  CHECK(is_knee(knee(rows, 4, rules), 0, 0, STOP_SLO));
  rules.percentile = 50;  // only P95 was that slow
  CHECK(is_knee(knee(rows, 4, rules), 3, 2, STOP_END));
  rules = defaults;

  for (int i = 0; i < 4; i++) {  // 50, 70, 90, 110% of the limit; 90 does not exceed 90
    rows[i].mem_used_mib = 500 + 200 * i;
    rows[i].mem_limit_mib = 1000;
  }
  k = knee(rows, 4, rules);
  CHECK(is_knee(k, 2, 1, STOP_MEMORY));
  CHECK(has(k.why, "batch 8 would use 1.074 of 0.9766 GiB, over the 90% watermark"));
  rules.watermark_pct = 40;
  CHECK(is_knee(knee(rows, 4, rules), -1, -1, STOP_MEMORY));
  rules = defaults;
  rows[1].status = ROW_SKIPPED;
  snprintf(rows[1].reason, sizeof rows[1].reason, "KV needs 9.1 GiB, 6.2 GiB left");
  k = knee(rows, 4, rules);
  CHECK(is_knee(k, 0, 0, STOP_MEMORY));
  CHECK(strcmp(k.why, "batch 2 did not fit: KV needs 9.1 GiB, 6.2 GiB left") == 0);
  // Rows 4 and 8 did not run either, so nothing later says that batch 1 is on a plateau.
  rows[2].status = rows[3].status = ROW_OOM;
  rows[1].output_tok_s = rows[2].output_tok_s = rows[3].output_tok_s = 100;
  CHECK(is_knee(knee(rows, 4, rules), 0, 0, STOP_MEMORY));
  rows[0].status = ROW_SKIPPED;
  CHECK(is_knee(knee(rows, 4, rules), -1, -1, STOP_MEMORY));
  CHECK(knee(rows, 4, rules).second_opinion == -1);
}

static void test_knee_jump_and_order(void) {
  SweepRow rows[3];
  KneeRules rules = defaults;
  rows[0] = row_of(1, 100, 10);
  rows[1] = row_of(2, 180, 22);  // exactly 2.2x: still a doubling plus noise
  rows[2] = row_of(4, 300, 49);  // 49 / 22 = 2.23x
  Knee k = knee(rows, 3, rules);
  CHECK(is_knee(k, 1, 0, STOP_JUMP));
  CHECK(has(k.why, "from batch 2 to 4 TPOT P95 jumps to 49.00 ms, 2.23x per doubling"));
  rows[2].batch = 8;  // two doublings: sqrt(2.23) = 1.49x each
  CHECK(is_knee(knee(rows, 3, rules), 2, 1, STOP_END));
  rows[2].batch = 3;  // log2(1.5) = 0.585 doublings: 1.6x is 1.6^1.71 = 2.23x a doubling
  rows[2].tpot.p95 = 22 * 1.6;
  CHECK(is_knee(knee(rows, 3, rules), 1, 0, STOP_JUMP));
  rows[1].tpot.p95 = NAN;  // not measured: no jump can be seen into it or out of it
  CHECK(is_knee(knee(rows, 3, rules), 2, 1, STOP_END));

  // Order d, a, b, c. Batch 1 is on a plateau and batch 2 breaks the rest: plateau is named.
  rules.slo_tpot_ms = 30;
  rows[0] = row_of(1, 100, 10);
  rows[1] = row_of(2, 105, 40);
  rows[1].mem_used_mib = 95;
  rows[1].mem_limit_mib = 100;
  CHECK(is_knee(knee(rows, 2, rules), 0, 0, STOP_PLATEAU));
  rows[1].output_tok_s = 190;  // no plateau now: memory goes before the SLO
  CHECK(is_knee(knee(rows, 2, rules), 0, 0, STOP_MEMORY));
  rows[1].mem_used_mib = 50;  // and the SLO before the jump
  CHECK(is_knee(knee(rows, 2, rules), 0, 0, STOP_SLO));
  rules.slo_tpot_ms = 0;
  CHECK(is_knee(knee(rows, 2, rules), 0, 0, STOP_JUMP));
  // A batch that breaks a rule is never recommended, plateau or not.
  rows[1] = row_of(2, 190, 12);
  rows[2] = row_of(4, 191, 12);
  rows[1].mem_used_mib = 95;
  rows[1].mem_limit_mib = 100;
  CHECK(is_knee(knee(rows, 3, rules), 0, 0, STOP_MEMORY));
}

// shared/data/sweep_vllm_h100_*.csv: batch, output_tok_s, tpot_p50_ms, tpot_p99_ms.
static const double llama_7b[][4] = {
    {1, 91.928, 10.7777, 11.1454},    {2, 179.262, 11.0459, 11.4926},
    {4, 342.199, 11.5604, 12.2826},   {8, 637.317, 12.3928, 13.4515},
    {16, 1103.72, 14.2356, 15.4428},  {32, 1781.71, 17.4525, 19.1921},
    {64, 2623.25, 23.257, 26.1945},   {96, 2928.6, 31.3802, 35.9348},
    {128, 3270.91, 37.1374, 42.8013}, {192, 3686.98, 49.3315, 55.0256},
    {256, 3895.66, 58.1526, 78.7089}, {512, 3985.02, 58.2115, 191.995}};
static const double opt_bg[][4] = {
    {1, 161.728, 6.03627, 6.77974},   {2, 315.374, 6.29386, 7.40484},
    {4, 556.759, 7.11668, 8.64992},   {8, 1064.46, 7.39876, 9.09109},
    {16, 1854.5, 8.422, 10.363},      {32, 2829.56, 10.9777, 13.7713},
    {64, 3892.87, 15.6918, 20.4322},  {96, 4439.08, 20.4496, 28.0169},
    {128, 4727.29, 25.641, 35.6841},  {192, 5050.27, 36.1342, 50.9446},
    {256, 5360.17, 45.0676, 62.4593}, {384, 5559.81, 63.1292, 85.3079},
    {512, 5873.47, 66.3116, 102.8}};
static const double opt_260[][4] = {
    {1, 164.833, 6.02427, 6.19785},   {2, 318.319, 6.22289, 6.39483},
    {4, 614.453, 6.42141, 6.70228},   {16, 1946.87, 8.06964, 8.73466},
    {32, 3206.83, 9.74014, 10.3958},  {64, 4471.75, 13.7738, 14.5445},
    {128, 5403.02, 23.1104, 23.9668}, {256, 6075.27, 40.5591, 41.6058},
    {512, 6054.19, 42.9086, 45.0463}};

static bool measured(const double (*data)[4], int n, int percentile, double slo_tpot_ms,
                     int working, int start, StopRule rule, int second_opinion) {
  SweepRow rows[16];
  for (int i = 0; i < n; i++) {
    rows[i] = row_of((int)data[i][0], data[i][1], NAN);
    rows[i].tpot.p50 = data[i][2];
    rows[i].tpot.p99 = data[i][3];
  }
  KneeRules rules = {0, slo_tpot_ms, percentile, 10, 90};
  Knee k = knee(rows, n, rules);
  bool ok = k.working >= 0 && rows[k.working].batch == working && rows[k.start].batch == start &&
            k.rule == rule && rows[k.second_opinion].batch == second_opinion;
  if (!ok) printf("  got index %d by %s: %s\n", k.working, stop_names[k.rule], k.why);
  return ok;
}

static void test_knee_measured(void) {
  // Llama-2-7B, P99. From 192 the best later growth is 256's: log2(256/192) = 0.415 doublings,
  // (3895.66/3686.98)^(1/0.415) = +14.2%, so 192 is no plateau; earlier rows see more. Latency
  // 192 -> 256: (78.7089/55.0256)^(1/0.415) = 2.37x > 2.2x: stop before 256. (The steepest before:
  // 64 -> 96, 1.72x.) Efficiency 3686.98/192/91.928 = 0.209 at 192, 0.166 at 256.
  CHECK(measured(llama_7b, 12, 99, 0, 192, 128, STOP_JUMP, 192));
  CHECK(measured(llama_7b, 12, 99, 25, 32, 16, STOP_SLO, 192));   // 64: 26.19 ms
  CHECK(measured(llama_7b, 12, 99, 50, 128, 96, STOP_SLO, 192));  // 192: 55.03 ms
  // P50 does not jump, (58.1526/49.3315)^2.41 = 1.49x; at 256 only 512 is left, +2.3%: plateau.
  CHECK(measured(llama_7b, 12, 50, 0, 256, 192, STOP_PLATEAU, 192));
  CHECK(measured(llama_7b, 12, 50, 25, 64, 32, STOP_SLO, 192));  // 96: 31.38 ms
  // The file has no P95: no latency rule can apply, and the plateau decides.
  CHECK(measured(llama_7b, 12, 95, 25, 256, 192, STOP_PLATEAU, 192));

  // OPT-2.7B, mixed lengths, P99. From 192: 256 +15.4%. From 256: 384 (5559.81/5360.17)^(1/0.585) =
  // +6.5%, 512 +9.6%: plateau. Steepest latency: 128 -> 192, 1.84x. Efficiency 0.228 at 128,
  // 0.163 at 192.
  CHECK(measured(opt_bg, 13, 99, 0, 256, 192, STOP_PLATEAU, 128));
  CHECK(measured(opt_bg, 13, 99, 25, 64, 32, STOP_SLO, 128));   // 96: 28.02 ms
  CHECK(measured(opt_bg, 13, 99, 50, 128, 96, STOP_SLO, 128));  // 192: 50.94 ms

  // OPT-2.7B, 260 output tokens, P99. From 128: 256 +12.4%. From 256: 512 -0.3%: plateau, reached
  // under --slo-tpot 50 too (41.61 ms). Efficiency 0.256 at 128, 0.144 at 256.
  CHECK(measured(opt_260, 9, 99, 0, 256, 128, STOP_PLATEAU, 128));
  CHECK(measured(opt_260, 9, 99, 25, 128, 64, STOP_SLO, 128));  // 256: 41.61 ms
  CHECK(measured(opt_260, 9, 99, 50, 256, 128, STOP_PLATEAU, 128));
}

// ---- files

static char* read_file(const char* path) {
  static char text[1 << 16];
  FILE* f = fopen(path, "r");
  size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
  if (f) fclose(f);
  text[n] = '\0';
  return text;
}

// Cell i of the line that *text points at, without its quotes; "?" when there is none.
static const char* csv_cell(const char* line, int i) {
  static char cell[256];
  for (int c = 0; c <= i; c++) {
    size_t n = 0;
    bool quoted = *line == '"';
    if (quoted) line++;
    while (*line && *line != '\n' && (quoted || *line != ',')) {
      if (quoted && *line == '"' && *++line != '"') break;
      cell[n++] = *line++;
    }
    cell[n] = '\0';
    if (c < i && *line++ != ',') return "?";
  }
  return cell;
}

static SweepRow full_row(void) {
  SweepRow r = row_of(64, 12345.678, 5.25);
  r.input_len = 128;
  r.output_len = 64;
  r.repeats = 3;
  r.n_requests = 192;
  r.itl.n = 12096;
  r.ttft.p50 = 11;
  r.ttft.p95 = 12;
  r.ttft.p99 = 13;
  r.ttft.n = 192;
  r.tpot.n = 192;
  r.e2e.p99 = 1400;
  r.step_us = 5000;
  r.roof_us = 4000;
  r.roof_pct = 80;
  r.bound = BOUND_KV;
  r.mem_weights_mib = 400;
  r.mem_kv_mib = 200;
  r.mem_work_mib = 60;
  r.mem_other_mib = 40;
  r.mem_used_mib = 700;
  r.mem_limit_mib = 1000;
  return r;
}

static void test_csv(void) {
  ResultFile file;
  char err[ERR_LEN] = "";
  CHECK(result_open(&file, scratch(), "sweep.csv", err));
  put_sweep_row(file.f, HEADER, &no_row);
  SweepRow r = full_row();
  put_sweep_row(file.f, CSV, &r);
  r = row_of(512, NAN, NAN);
  r.status = ROW_SKIPPED;
  snprintf(r.reason, sizeof r.reason, "KV needs 9.1 GiB, 6.2 GiB left");
  put_sweep_row(file.f, CSV, &r);
  // Before close: the rows are on disk under the temporary name, the final name does not exist yet.
  CHECK(has(read_file(scratch_file("sweep.csv.tmp")), "512,,,,skipped,"));
  CHECK(read_file(scratch_file("sweep.csv"))[0] == '\0');
  CHECK(result_close(&file, err));
  CHECK(read_file(scratch_file("sweep.csv.tmp"))[0] == '\0');

  const char* text = read_file(scratch_file("sweep.csv"));
  // DESIGN.md section 9, then the extra columns.
  CHECK(strncmp(text,
                "batch,input_len,output_len,repeats,status,reason,output_tok_s,user_tok_s,"
                "prefill_tok_s,ttft_p50_ms,ttft_p95_ms,ttft_p99_ms,tpot_p50_ms,tpot_p95_ms,"
                "tpot_p99_ms,itl_p50_ms,itl_p95_ms,itl_p99_ms,e2e_p50_ms,e2e_p95_ms,e2e_p99_ms,"
                "n_itl,n_requests,step_us,roof_us,roof_pct,mbu_pct,mfu_pct,bound,mem_weights_mib,"
                "mem_kv_mib,mem_work_mib,mem_other_mib,mem_used_mib,mem_limit_mib,"
                "noreuse_us,step_bytes,step_flops,source\n",
                strcspn(text, "\n") + 1) == 0);
  const char* line = strchr(text, '\n') + 1;
  CHECK(strcmp(csv_cell(line, 0), "64") == 0);
  CHECK(strcmp(csv_cell(line, 4), "ok") == 0);
  CHECK(strcmp(csv_cell(line, 5), "") == 0);
  CHECK(near(atof(csv_cell(line, 6)), 12345.678));
  CHECK(strcmp(csv_cell(line, 7), "") == 0);  // NaN
  CHECK(strcmp(csv_cell(line, 10), "12") == 0);
  CHECK(strcmp(csv_cell(line, 13), "5.25") == 0);
  CHECK(strcmp(csv_cell(line, 21), "12096") == 0);
  CHECK(strcmp(csv_cell(line, 28), "memory (KV)") == 0);
  CHECK(strcmp(csv_cell(line, 33), "700") == 0);
  CHECK(strcmp(csv_cell(line, 37), "") == 0 && strcmp(csv_cell(line, 38), "measured") == 0);
  line = strchr(line, '\n') + 1;
  CHECK(strcmp(csv_cell(line, 4), "skipped") == 0);
  CHECK(strcmp(csv_cell(line, 5), "KV needs 9.1 GiB, 6.2 GiB left") == 0);
  CHECK(strcmp(csv_cell(line, 6), "") == 0 && strcmp(csv_cell(line, 28), "") == 0);
  CHECK(strcmp(csv_cell(line, 37), "") == 0 && strcmp(csv_cell(line, 38), "measured") == 0);
  CHECK(!has(text, "nan"));

  CHECK(!result_open(&file, scratch_file("no/such/dir"), "sweep.csv", err));
  CHECK(has(err, "/no/such/dir/sweep.csv.tmp: cannot write: No such file"));
  static char deep[6000];  // longer than the buffers: an error, not a file of another name
  memset(deep, 'x', sizeof deep - 1);
  CHECK(!result_open(&file, deep, "sweep.csv", err));
  FILE* full = fopen("/dev/full", "w");  // every write to it fails: the disk is full
  if (full) {
    file.f = full;
    snprintf(file.path, sizeof file.path, "%s", scratch_file("sweep.csv"));
    snprintf(file.tmp, sizeof file.tmp, "%s", scratch_file("sweep.csv.tmp"));
    put_sweep_row(full, CSV, &r);
    CHECK(!result_close(&file, err));
    CHECK(has(err, "/sweep.csv: cannot write: "));
  } else {
    printf("disk full: skipped, no /dev/full\n");
  }
}

// Moves *s past one JSON value; false when it is not JSON.
static bool json_value(const char** s);

static void json_space(const char** s) {
  *s += strspn(*s, " \n");
}

static bool json_literal(const char** s, const char* word) {
  bool ok = strncmp(*s, word, strlen(word)) == 0;
  if (ok) *s += strlen(word);
  return ok;
}

static bool json_quoted(const char** s) {
  if (*(*s)++ != '"') return false;
  while (**s != '"') {
    if ((unsigned char)**s < 0x20) return false;
    if (**s == '\\' && !strchr("\"\\u", *++*s)) return false;
    ++*s;
  }
  ++*s;
  return true;
}

static bool json_list(const char** s, bool keys, char close) {
  do {
    ++*s;
    json_space(s);
    if (**s == close) break;  // an empty one
    if (keys && !json_quoted(s)) return false;
    if (keys && !json_literal(s, ": ")) return false;
    if (!json_value(s)) return false;
    json_space(s);
  } while (**s == ',');
  return *(*s)++ == close;
}

static bool json_value(const char** s) {
  if (**s == '{') return json_list(s, true, '}');
  if (**s == '[') return json_list(s, false, ']');
  if (**s == '"') return json_quoted(s);
  if (json_literal(s, "null") || json_literal(s, "true") || json_literal(s, "false")) return true;
  size_t n = strspn(*s, "+-.0123456789e");
  *s += n;
  return n > 0;
}

static const char* config_text(const SweepReport* report) {
  char err[ERR_LEN] = "";
  bool written = write_config_json(scratch(), report, "fp16", 2048, err);
  CHECK(written);
  const char* text = read_file(scratch_file("config.json"));
  const char* end = text;
  CHECK(json_value(&end) && strcmp(end, "\n") == 0);
  return text;
}

static void test_config(void) {
  SweepRow rows[2];
  rows[0] = full_row();
  rows[0].batch = 32;
  rows[0].output_tok_s = 8000;
  rows[1] = full_row();
  SweepReport s;
  memset(&s, 0, sizeof s);
  s.rows = rows;
  s.n_rows = 2;
  s.rules = defaults;
  s.rules.slo_tpot_ms = 25;
  s.knee = knee(rows, 2, s.rules);
  s.model =
      "a \"quoted\\path\"\n\xff\xc3\xa9";  // the byte 0xff is no UTF-8; the last two are e acute
  s.device = "NVIDIA H200";
  const char* text = config_text(&s);
  CHECK(has(text, "\"working_batch\": 64,") && has(text, "\"start_batch\": 32,"));
  CHECK(has(text, "\"stopped_by\": \"end\",") && has(text, "\"second_opinion_batch\": 64,"));
  CHECK(has(text, "\"max_input_tokens\": 128,") && has(text, "\"max_new_tokens\": 64,"));
  CHECK(has(text, "\"concurrency_cap\": 64,") && has(text, "\"total_token_budget\": 12288,"));
  CHECK(has(text, "\"request_timeout_s\": 5,"));  // 3 * 1.4 s, rounded up
  CHECK(has(text, "\"memory_watermark_pct\": 90\n"));
  CHECK(has(text, "\"ttft_ms\": null,") && has(text, "\"tpot_ms\": 25"));
  CHECK(has(text, "\"model\": \"a \\\"quoted\\\\path\\\"\\u000a\\u00ff\xc3\xa9\","));
  CHECK(has(text, "\"output_tok_s\": 12345.678,") && has(text, "\"user_tok_s\": null,"));
  CHECK(has(text, "\"bound\": \"memory (KV)\",") && has(text, "\"reason\": \"\","));
  CHECK(has(text,
            "\"--max-num-seqs 64 --max-num-batched-tokens 2048 --max-model-len 192"
            " --gpu-memory-utilization 0.9\""));
  CHECK(
      has(text, "\"--max-running-requests 64 --chunked-prefill-size 2048 --context-length 192\""));
  CHECK(has(text, "\"--max_batch_size 64 --max_num_tokens 2048 --max_seq_len 192\""));
  CHECK(has(text, "\"--parallel 64 --batch-size 2048 --ctx-size 12288\""));

  s.rules.slo_tpot_ms = 1;  // no working point
  s.knee = knee(rows, 2, s.rules);
  text = config_text(&s);
  CHECK(has(text, "\"working_batch\": null,") && has(text, "\"start_batch\": null,"));
  CHECK(has(text, "\"stopped_by\": \"slo\",") && has(text, "batch 32 would break the TPOT SLO"));
  CHECK(has(text, "\"measured\": {\n},") && has(text, "\"engine_flags\": {\n}"));
  CHECK(has(text, "\"concurrency_cap\": null,"));

  rows[0] = row_of(7, 100, NAN);  // a foreign table: no lengths, no memory, no latency
  s.n_rows = 1;
  s.rules = defaults;
  s.knee = knee(rows, 1, s.rules);
  text = config_text(&s);
  CHECK(has(text, "\"total_token_budget\": null,") && has(text, "\"request_timeout_s\": null,"));
  CHECK(has(text, "\"--parallel 7 --batch-size 2048\"") && !has(text, "nan"));
  s.n_rows = 0;
  s.knee = knee(rows, 0, s.rules);
  CHECK(has(config_text(&s), "no batch size was measured"));
}

// Batch 1: 60% + 10% of 1,000 us are 700, so 300 are overhead. Batch 2: 70% + 20% of 1,100 are 990,
// with the overhead 1,290, 17.27% above what was measured. Where prompts were read, at 10,000 and
// 8,000 tokens/s, multiplying takes 100 and 250 us: 1,320 after the overhead of 300, 20% above.
static void test_prediction(void) {
  SweepRow rows[3] = {row_of(1, 1000, 1), row_of(2, 1800, 1.1), row_of(4, NAN, NAN)};
  CHECK(!predict(rows, 3).first);  // a table without steps
  rows[2].status = ROW_SKIPPED;
  rows[0].step_us = 1000;
  rows[0].mbu_pct = 60;
  rows[0].mfu_pct = 10;
  CHECK(near(predict(rows, 3).overhead, 300) && predict(rows, 1).checked == 0);
  rows[1].step_us = 1100;
  rows[1].mbu_pct = 70;
  rows[1].mfu_pct = 20;
  Prediction p = predict(rows, 3);
  CHECK(near(in_turn_us(&rows[1], false), 990) && near(p.worst, 100 * 190.0 / 1100));
  CHECK(!p.by_prompts && p.first == rows && p.checked == 1 && p.others == 1);
  rows[0].prefill_tok_s = 10000;
  rows[0].input_len = rows[1].input_len = 16;
  CHECK(!predict(rows, 3).by_prompts);  // one way for all rows
  rows[1].prefill_tok_s = 8000;
  p = predict(rows, 3);
  CHECK(near(in_turn_us(&rows[1], true), 1020) && near(p.worst, 20) && p.by_prompts);
  rows[1].input_len = 15;  // too short a prompt is a decode step itself
  CHECK(!predict(rows, 3).by_prompts);
  rows[2] = rows[1];
  rows[2].mbu_pct = NAN;
  p = predict(rows, 3);
  CHECK(p.checked == 1 && p.others == 2);
  rows[0].simulated = true;
  p = predict(rows, 3);
  CHECK(p.checked == 0 && isnan(predicted_us(&p, &rows[1])));
}

static const char* json_of(const char* text) {
  FILE* f = fopen(scratch_file("json"), "w");
  put_json_string(f, text);
  fclose(f);
  return read_file(scratch_file("json"));
}

static void test_json_string(void) {
  // UTF-8 stays as it is: 1 to 4 bytes, the last code before the surrogates, the last of all.
  const char* good =
      "a\xc3\xa9\xe4\xb8\xad\xed\x9f\xbf\xee\x80\x80\xf0\x9f\x98\x80\xf4\x8f\xbf\xbf";
  CHECK(strncmp(json_of(good) + 1, good, strlen(good)) == 0);
  CHECK(strlen(json_of(good)) == strlen(good) + 2);
  // A lone continuation, overlong '/', a cut character, a surrogate, beyond U+10FFFF, no lead byte,
  // overlong in three and in four bytes, a lead byte before ASCII: byte by byte, nothing raw is
  // left.
  const char* bad[] = {"\x80",         "\xc0\xaf",         "\xe4\xb8",
                       "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf8",
                       "\xe0\x80\xaf", "\xf0\x80\x80\xaf", "\xc3z"};
  for (int i = 0; i < 9; i++) {
    const char* json = json_of(bad[i]);
    CHECK(has(json, "\\u00"));
    for (; *json; json++) {
      if ((unsigned char)*json >= 0x80) break;
    }
    CHECK(*json == '\0');
  }
  CHECK(strcmp(json_of("\"\\\n\x01\x7f"), "\"\\\"\\\\\\u000a\\u0001\x7f\"") == 0);
}

// ---- table

static void test_table(void) {
  FILE* f = fopen(scratch_file("table"), "w");
  SweepRow rows[3];
  rows[0] = full_row();
  rows[1] = row_of(65536, 9999999.9, NAN);
  rows[2] = row_of(512, NAN, NAN);
  rows[2].status = ROW_SKIPPED;
  snprintf(rows[2].reason, sizeof rows[2].reason, "KV needs 9.1 GiB, 6.2 GiB left");
  print_table_header(f, defaults);
  for (int i = 0; i < 3; i++) print_row(f, &rows[i], defaults);
  SweepReport s;
  memset(&s, 0, sizeof s);
  s.rows = rows;
  s.n_rows = 1;
  s.rules = defaults;
  s.knee = knee(rows, 1, defaults);
  print_knee(f, &s);
  s.rules.slo_tpot_ms = 1;
  s.knee = knee(rows, 1, s.rules);
  print_knee(f, &s);
  fclose(f);
  char* text = read_file(scratch_file("table"));
  CHECK(has(text, "\nB=512 skipped: KV needs 9.1 GiB, 6.2 GiB left\n"));
  CHECK(has(text, "Working point: batch 64, 12345.7 tok/s, TPOT P95 5.25 ms (n = 192)"));
  CHECK(has(text, "No working point") &&
        has(text, "Stopped by slo: batch 64 would break the TPOT"));
  CHECK(!has(text, "nan"));
  long at = strstr(text, "  bound\n") - text;  // the last column is aligned, and fits 130 columns
  CHECK(at + 2 + (long)strlen(bound_names[BOUND_WEIGHTS]) <= 130);
  CHECK(strncmp(strchr(text, '\n') + 1 + at, "  memory (KV)\n", 14) == 0);
  CHECK(strncmp(strstr(text, "\n65536 ") + 1 + at, "  -\n", 4) == 0);
}

// ---- options

static Options o;
static char err[ERR_LEN];

// Splits a command line at its spaces and parses it.
static bool parse(const char* line) {
  static char words[512];
  char* argv[64];
  int argc = 0;
  snprintf(words, sizeof words, "bs %s", line);
  for (char* w = strtok(words, " "); w; w = strtok(NULL, " ")) argv[argc++] = w;
  err[0] = '\0';
  return parse_options(argc, argv, &o, err);
}

// The line is refused, in one line that contains both texts.
static bool refused(const char* line, const char* name, const char* allowed) {
  bool ok = !parse(line) && has(err, name) && has(err, allowed) && !strchr(err, '\n');
  if (!ok) printf("  '%s' gives '%s'\n", line, err);
  return ok;
}

static void test_options_accepted(void) {
  CHECK(parse("") && o.command == CMD_SWEEP && strcmp(o.command_name, "sweep") == 0);
  CHECK(strcmp(o.device, "auto") == 0 && strcmp(o.model, "") == 0 && o.n_batches == 0);
  CHECK(o.rules.percentile == 95 && o.rules.min_gain_pct == 10 && o.rules.watermark_pct == 90);
  CHECK(o.input_len == 0 && o.output_len == 0 && o.step_tokens == 0 && o.repeats == 0);
  CHECK(o.rules.slo_ttft_ms == 0 && o.rules.slo_tpot_ms == 0 && o.vram == 0 && !o.quiet);
  CHECK(parse("sweep --device=cpu --model weights/tiny --batches 1,4,8 --input-len 16 --seed=7"));
  CHECK(strcmp(o.device, "cpu") == 0 && strcmp(o.model, "weights/tiny") == 0 && o.seed == 7);
  CHECK(o.n_batches == 3 && o.batches[0] == 1 && o.batches[1] == 4 && o.batches[2] == 8);
  CHECK(
      parse("--slo-ttft 200 --slo-tpot=12.5 --percentile 99 --min-gain 5 --watermark 80 --quiet"));
  CHECK(o.rules.slo_ttft_ms == 200 && o.rules.slo_tpot_ms == 12.5 && o.rules.percentile == 99);
  CHECK(o.rules.min_gain_pct == 5 && o.rules.watermark_pct == 80 && o.quiet);
  CHECK(parse("--vram 4G") && o.vram == 4294967296u);
  CHECK(parse("--vram 512M") && o.vram == 536870912u);
  CHECK(parse("--vram=6.5G") && o.vram == 6979321856u);
  CHECK(parse("generate --prompt one --prompt=--two --temperature 0.8 --json --output-len 9"));
  CHECK(o.command == CMD_GENERATE && o.n_prompts == 2 && strcmp(o.prompts[1], "--two") == 0);
  CHECK(o.temperature == 0.8 && o.json && o.output_len == 9);
  CHECK(parse("generate --prompts p.txt") && strcmp(o.prompts_file, "p.txt") == 0);
  CHECK(
      parse("--batches 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,"
            "29,30,31,32768"));
  CHECK(o.n_batches == 32 && o.batches[31] == 32768);
  CHECK(parse("--help") && o.help && o.command == 0);
  CHECK(parse("generate --help") && o.help && o.command == CMD_GENERATE);
  CHECK(parse("--version") && o.version);
}

static void test_options_refused(void) {
  CHECK(refused("--bacthes 1", "unknown option '--bacthes'", "--help"));
  CHECK(refused("-q", "unknown option '-q'", "--help"));
  CHECK(refused("--", "unknown option '--'", "--help"));
  CHECK(refused("swep", "swep", "sweep|compare|generate|plan|knee"));
  CHECK(refused("sweep generate", "unknown option 'generate'", ""));
  CHECK(refused("--input-len", "write it as --input-len N", ""));
  CHECK(refused("--input-len=", "--input-len ''", "allowed is N, uniform:LOW-HIGH"));
  CHECK(refused("--model --quiet", "write it as --model", "DIR|PRESET"));
  CHECK(refused("--quiet=1", "write it as --quiet", ""));
  CHECK(refused("--seed 1 --seed 2", "--seed is given twice", ""));
  const char* numbers[] = {"0", "-1", "1.5", "1e3", "0x10", "12a", "abc", "99999999999999999999",
                           "+1"};
  for (int i = 0; i < 9; i++) {
    char line[64];
    snprintf(line, sizeof line, "--output-len %s", numbers[i]);
    CHECK(refused(line, numbers[i], "1 to 1000000 tokens"));
  }
  const char* reals[] = {"0", "-5", "nan", "inf", "1e999", "5ms", "1,5", "0x1p3", "."};
  for (int i = 0; i < 9; i++) {
    char line[64];
    snprintf(line, sizeof line, "--slo-tpot %s", reals[i]);
    CHECK(refused(line, reals[i], "allowed is MS from 0.001 to 1000000000"));
  }
  const char* sizes[] = {"4",    "G",         "0G",   "-4G",  "4K",  "4GB",
                         "1e3G", "99999999T", "4.G.", "0x4G", "infG"};
  for (int i = 0; i < 11; i++) {
    char line[64];
    snprintf(line, sizeof line, "--vram %s", sizes[i]);
    CHECK(refused(line, sizes[i], "allowed is 512M|6.5G|... from 1000000 to 1e+18"));
  }
  const char* lists[] = {"0",
                         "1,2,2",
                         "1,,2",
                         ",1",
                         "1,",
                         "1;2",
                         "65537",
                         "-1",
                         "4,1,4",
                         ("1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,"
                          "28,29,30,31,32,33")};
  for (int i = 0; i < 10; i++) {
    char line[160];
    snprintf(line, sizeof line, "--batches %s", lists[i]);
    CHECK(refused(line, "--batches", "ascending, at most 32"));
  }
  CHECK(refused("--percentile 90", "--percentile '90'", "50|95|99"));
  CHECK(refused("--device gpu", "--device 'gpu'", "auto|cuda|cpu"));
  CHECK(refused("--device cpus", "--device 'cpus'", "auto|cuda|cpu"));
  CHECK(refused("--device aut", "--device 'aut'", "auto|cuda|cpu"));
  CHECK(refused("--watermark 101", "--watermark '101'", "allowed is PCT from 1 to 100"));
  CHECK(refused("--json", "--json is not for bs sweep", ""));
  CHECK(refused("generate --prompt a --batches 1", "--batches is not for bs generate", ""));
  CHECK(refused("generate", "--prompt TEXT", "--prompts FILE"));
  CHECK(refused("generate --prompt a --prompts f", "either --prompt TEXT or --prompts FILE", ""));
  CHECK(refused("--device cpu --matmul mma", "--matmul mma", "allows auto"));
  char newline[] = "--a\nb";
  char program[] = "bs";
  char* argv[] = {program, newline};
  CHECK(!parse_options(2, argv, &o, err) && !strchr(err, '\n'));
  static char* many[2 * 300 + 2];
  char generate[] = "generate";
  char prompt[] = "--prompt";
  many[0] = program;
  many[1] = generate;
  for (int i = 2; i < 602; i++) many[i] = i % 2 ? generate : prompt;
  CHECK(!parse_options(2 + 2 * 256 + 2, many, &o, err) && has(err, "at most 256"));
  CHECK(parse_options(2 + 2 * 256, many, &o, err) && o.n_prompts == 256);
}

static void test_help(void) {
  FILE* f = fopen(scratch_file("help"), "w");
  print_help(f, CMD_ALL);
  fclose(f);
  const char* text = read_file(scratch_file("help"));
  for (int i = 0; i < N_OPTIONS; i++) CHECK(has(text, option_table[i].name));
  CHECK(has(text, "(default 95)") && has(text, "TPOT = (E2E - TTFT)"));
  f = fopen(scratch_file("help"), "w");
  print_help(f, CMD_GENERATE);
  fclose(f);
  text = read_file(scratch_file("help"));
  CHECK(has(text, "--prompts") && !has(text, "--batches") && has(text, "Exit status"));
}

int main(void) {
  test_percentiles();
  test_knee_throughput();
  test_knee_rules();
  test_knee_jump_and_order();
  test_knee_measured();
  test_csv();
  test_config();
  test_prediction();
  test_json_string();
  test_table();
  test_options_accepted();
  test_options_refused();
  test_help();
  return check_report();
}
