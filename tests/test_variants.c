// Every kind of checkpoint that bs reads against Hugging Face transformers, on the CPU.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "variants.h"

// fp32 sums in another order than PyTorch's; the weights are the same fp16 numbers.
static const double TOLERANCE = 1e-4;

int main(void) {
  Device d;
  char err[ERR_LEN];
  if (!device_open(&d, &cpu_backend, 0, err)) die("%s", err);
  test_variants(&d, TOLERANCE);
  device_close(&d);
  return check_report();
}
