// 2,000 texts in many scripts through a tokenizer.json: the ids, and what they decode to, against
// what the tokenizers library makes of them (make_tokenizers.py).

static uint32_t fnv1a(const void* data, size_t n) {
  uint32_t h = 0x811C9DC5;
  for (size_t i = 0; i < n; i++) h = (h ^ ((const unsigned char*)data)[i]) * 0x01000193;
  return h;
}

// refused: how many texts have a byte that the tokenizer has no token for. The library leaves such
// bytes out; we refuse the text. Returns how many tokens the texts have in all.
static int test_corpus(const char* dir, int vocab_size, int refused) {
  static int ids[4096];
  char path[PATH_LEN], err[ERR_LEN];
  Mapping corpus, hashes;
  Tokenizer t;
  snprintf(path, sizeof path, "%s/ids.bin", dir);
  const char* texts = "tests/golden/tokenizers/corpus.bin";
  if (!map_file(texts, &corpus, err) || !map_file(path, &hashes, err)) die("%s", err);
  if (!load_tokenizer(dir, vocab_size, &t, err)) die("%s", err);
  const char *p = (const char*)corpus.addr, *end = p + corpus.len;
  const uint32_t* want = (const uint32_t*)hashes.addr;
  int n_texts = 0, wrong_ids = 0, wrong_text = 0, tokens = 0;
  for (; p < end; p += strlen(p) + 1, n_texts++, want += 2) {
    const int n = encode(&t, p, strlen(p), ids, err);
    refused -= n < 0;
    if (n < 0) continue;
    Request r;
    memset(&r, 0, sizeof r);
    r.tokens = ids;
    r.n_new = n;
    size_t length;
    char* text = decode(&t, &r, &length);
    const bool same = fnv1a(ids, (size_t)n * sizeof(int)) == want[0];
    wrong_ids += !same;
    wrong_text += fnv1a(text, length) != want[1];
    if (!same && wrong_ids <= 5) printf("%s: other ids for \"%s\"\n", dir, p);
    tokens += r.n_new;
    free(text);
  }
  CHECK(n_texts == 2000 && hashes.len == 2000 * 8, "%d texts", n_texts);
  CHECK(refused == 0, "%s: %d more should be refused: %s", dir, refused, err);
  CHECK(wrong_ids == 0, "%s: %d of %d texts have other ids", dir, wrong_ids, n_texts);
  CHECK(wrong_text == 0, "%s: %d of %d texts come back otherwise", dir, wrong_text, n_texts);
  munmap(corpus.addr, corpus.len);
  munmap(hashes.addr, hashes.len);
  free_tokenizer(&t);
  return tokens;
}
