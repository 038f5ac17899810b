#include "reference.h"

// Every kind of checkpoint that bs reads: tests/make_variants.py made these and tells what each
// has.
static void test_variants(Device* d, double tolerance) {
  static const char* const names[] = {"k32-mqa-bf16",     "k64-mha-f32", "k80-f16",
                                      "k96-bf16-sharded", "k128-llama3", "k32-group3-old"};
  char dir[64];
  for (int i = 0; i < 6; i++) {
    snprintf(dir, sizeof dir, "tests/golden/variants/%s", names[i]);
    test_reference(d, dir, "reference.bin", tolerance);
  }
}
