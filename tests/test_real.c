// A real model, SmolLM2-135M-Instruct, against Hugging Face transformers on the same weights: run
// by `make real-test` only, after tests/smollm2.py has put it into build/smollm2.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "corpus.h"
#include "reference.h"

// fp32 sums in another order than PyTorch's, over 30 layers; the weights are the same fp16 numbers.
static const double TOLERANCE = 1e-3;

int main(int argc, char** argv) {
  const char* dir = argc > 1 ? argv[1] : "build/smollm2";
  char err[ERR_LEN];
  Device d;
  if (access(dir, F_OK) != 0) {
    printf("skipped: no %s (python3 tests/smollm2.py makes it)\n", dir);
    return check_report();
  }
  printf("%s: %d tokens in 2,000 texts\n", dir, test_corpus(dir, 49152, 16));
  if (!device_open(&d, &cpu_backend, 0, err)) die("%s", err);
  test_reference(&d, dir, "reference.bin", TOLERANCE);
  device_close(&d);
  return check_report();
}
