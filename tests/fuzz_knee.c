// Fuzzes a table of measurements (bs knee FILE): CSV or JSON lines, ours or another tool's. What
// loads ascends by batch, and the whole way to the files can be walked with it.
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static SweepRow rows[MAX_MEASURED];
  static FILE* sink;
  char err[ERR_LEN] = "", note[WHY_LEN];
  const KneeRules given = {0, 0, 95, 10, 90};
  KneeRules rules = given;
  if (sink == NULL) sink = fopen("/dev/null", "w");
  fuzz_write("table.csv", data, size);
  const char* path = fuzz_path("table.csv");
  int n = read_measurements(path, 0, 0, rows, err);
  if (n == 0 || n > MAX_MEASURED) abort();
  if (n < 0 || !choose_latency(path, rows, n, &rules, false, note, err)) {
    fuzz_check_error(err);
    return 0;
  }
  for (int i = 0; i < n; i++) {
    if (rows[i].batch < 1 || (i > 0 && rows[i].batch <= rows[i - 1].batch)) abort();
    if (rows[i].status == ROW_OK && !(rows[i].output_tok_s > 0)) abort();
    put_sweep_row(sink, CSV, &rows[i]);
    print_row(sink, &rows[i], rules);
  }
  const Knee k = knee(rows, n, rules);
  if (k.working >= n || k.start > k.working || k.second_opinion >= n) abort();
  return 0;
}
