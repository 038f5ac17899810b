// Every kind of checkpoint that bs reads against Hugging Face transformers: tests/make_variants.py
// made these and tells what each has.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "reference.h"

// fp32 sums in another order than PyTorch's; the weights are the same fp16 numbers.
static const double TOLERANCE = 1e-4;

int main(int argc, char** argv) {
  static const char* const names[] = {"k32-mqa-bf16",     "k64-mha-f32", "k80-f16",
                                      "k96-bf16-sharded", "k128-llama3", "k32-group3-old"};
  Device d;
  char err[ERR_LEN], dir[64];
  (void)argc;
  setenv("OMP_NUM_THREADS", "1", 0);  // small work: a second thread mostly waits
  limit_spinning(argv);
  if (!device_open(&d, &cpu_backend, 0, err)) die("%s", err);
  for (int i = 0; i < 6; i++) {
    snprintf(dir, sizeof dir, "tests/golden/variants/%s", names[i]);
    test_reference(&d, dir, "reference.bin", TOLERANCE);
  }
  device_close(&d);
  return check_report();
}
