// Text <-> ids against the tokenizers library, what is refused, and damaged files.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "corpus.h"

int main(void) {
  static const char* const names[] = {"gpt2", "smollm2", "llama3"};
  char dir[64];
  for (int i = 0; i < 3; i++) {
    snprintf(dir, sizeof dir, "tests/golden/tokenizers/%s", names[i]);
    printf("%s: %d tokens\n", dir, test_corpus(dir, 700, 0));
  }
  return check_report();
}
