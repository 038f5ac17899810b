// Fuzzes a request trace (bs compare --trace): what loads is sorted, starts at 0 and stays in
// range.
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  char err[ERR_LEN] = "";
  int n;
  fuzz_write("trace.csv", data, size);
  TraceRow* rows = read_trace(fuzz_path("trace.csv"), size % 3 == 0 ? 5 : 0, &n, err);
  if (rows == NULL) fuzz_check_error(err);
  for (int i = 0; i < n && rows != NULL; i++) {
    const TraceRow* r = &rows[i];
    if (!(r->arrival >= 0) || !isfinite(r->arrival) || (i == 0 && r->arrival != 0)) abort();
    if (i > 0 && r->arrival < r[-1].arrival) abort();
    if (r->prompt < 1 || r->output < 1 || r->prompt > MOST_TOKENS || r->output > MOST_TOKENS)
      abort();
  }
  free(rows);
  return 0;
}
