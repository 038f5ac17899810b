// Fuzzes tokenizer.json (first byte even), and texts through a good one (odd; build/fuzz runs from
// the repository's root). Tokens of a text, put together, must be the text.
#include "fuzz.h"

static void round_trip(const Tokenizer* t, const char* text, size_t n) {
  char err[ERR_LEN] = "";
  int* ids = (int*)xcalloc(n + 4, sizeof(int));
  const int count = encode(t, text, n, ids, err);
  if (count < 0) fuzz_check_error(err);
  size_t at = 0;
  for (int i = count < 0 ? count : t->n_bos; i < count && count >= 0; i++) {
    if (ids[i] < 0 || ids[i] >= t->n_tokens) abort();
    const Token* token = &t->tokens[ids[i]];
    if (at + (size_t)token->n > n || memcmp(text + at, token->text, (size_t)token->n) != 0) abort();
    at += (size_t)token->n;
  }
  if (count >= 0 && at != n) abort();
  free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Tokenizer good[3];
  static const char* const names[] = {"gpt2", "smollm2", "llama3"};
  static const char text[] = "Hello, it's 2026!  \n\xc3\xa9t\xc3\xa9 <|im_end|>\xff\xe4\xb8\xad";
  char err[ERR_LEN] = "", dir[64];
  for (int i = 0; i < 3 && good[i].tokens == NULL; i++) {
    snprintf(dir, sizeof dir, "tests/golden/tokenizers/%s", names[i]);
    if (!load_tokenizer(dir, 640 + 8, &good[i], err)) die("%s", err);
  }
  if (size == 0) return 0;
  if (data[0] % 2 == 1) {
    round_trip(&good[data[0] / 2 % 3], (const char*)data + 1, size - 1);
    return 0;
  }
  Tokenizer t;
  fuzz_write("tokenizer.json", data + 1, size - 1);
  if (!load_tokenizer(fuzz_dir, 300, &t, err)) {
    fuzz_check_error(err);
    if (t.tokens != NULL) abort();
    return 0;
  }
  round_trip(&t, text, sizeof text - 1);
  round_trip(&t, (const char*)data, size);
  free_tokenizer(&t);
  return 0;
}
