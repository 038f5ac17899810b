// Text <-> ids against the tokenizers library, what is refused, and damaged files.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "corpus.h"
#include "mutate.h"

static char good[8192], err[ERR_LEN];  // a small tokenizer.json that loads

// 256 bytes as GPT-2 writes them, two merges, one special token and one that is text.
static void make_good(void) {
  char vocab[6000], *to = vocab, character[5] = "";
  for (int byte = 0; byte < 256; byte++) {
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int moved = byte < 33 ? 256 + byte : byte == 173 ? 323 : 256 + byte - 94;
    *put_utf8(character, (unsigned)(printable ? byte : moved)) = '\0';
    const char* escape = byte == '"' || byte == '\\' ? "\\" : "";
    to += sprintf(to, "\"%s%s\": %d, ", escape, character, byte);
  }
  snprintf(good, sizeof good,
           "{\"added_tokens\": [{\"id\": 258, \"content\": \"<end>\", \"special\": true}, "
           "{\"id\": 259, \"content\": \"<tab>\", \"lstrip\": false}], \"normalizer\": null, "
           "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}, "
           "\"post_processor\": null, \"decoder\": {\"type\": \"ByteLevel\"}, "
           "\"model\": {\"type\": \"BPE\", \"dropout\": null, \"vocab\": {%s"
           "\"ab\": 256, \"\\u0061bc\": 257}, \"merges\": [\"a b\", [\"ab\", \"c\"]]}}",
           vocab);
}

static bool load_text(const char* text, size_t n, Tokenizer* t) {
  const char* path = scratch_file("tokenizer.json");
  FILE* f = fopen(path, "wb");
  if (f == NULL || fwrite(text, 1, n, f) != n || fclose(f) != 0) die("cannot write %s", path);
  memset(err, 0, sizeof err);
  return load_tokenizer(scratch(), 260, t, err);
}

static void test_small(void) {
  static const struct {
    const char* text;
    int n, ids[8];
  } cases[] = {
      {"abc", 1, {257}},
      {"ab abc", 3, {256, ' ', 257}},
      {"xbc", 3, {'x', 'b', 'c'}},
      {"a<end>b", 3, {'a', 258, 'b'}},
      {"<end><tab>", 2, {258, 259}},
      {"<en", 3, {'<', 'e', 'n'}},
      {"\xff\xc3", 2, {255, 0xc3}},
      {"ababc", 2, {256, 257}},
  };
  Tokenizer t;
  int ids[64];
  const bool ok = load_text(good, strlen(good), &t);
  CHECK(ok, "%s", err);
  for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]) && ok; i++) {
    const int n = encode(&t, cases[i].text, strlen(cases[i].text), ids, err);
    CHECK(n == cases[i].n && memcmp(ids, cases[i].ids, (size_t)n * sizeof(int)) == 0, "%s: %d ids",
          cases[i].text, n);
  }
  // A word of a million letters: n log n, not n squared.
  const size_t length = 1000000;
  char* word = (char*)xcalloc(length + 1, 1);
  int* many = (int*)xcalloc(length + 4, sizeof(int));
  for (size_t i = 0; i < length; i++) word[i] = "abc"[i % 3];
  const int n = encode(&t, word, length, many, err);
  CHECK(n == 333334 && many[0] == 257 && many[333333] == 'a', "%d tokens", n);
  CHECK(encode(&t, word, ((size_t)1 << 24) + 1, many, err) == -1 && strstr(err, "over 16 MiB"));
  t.bytes['b'] = -1;
  CHECK(encode(&t, "cab", 3, ids, err) == -1 && strstr(err, "byte 0x62: no token"), "%s", err);
  free(word);
  free(many);
  free_tokenizer(&t);
  // Without a file a model of 256 ids has bytes.
  CHECK(load_tokenizer("/nowhere", 256, &t, err), "%s", err);
  CHECK(encode(&t, "ab\xff ", 4, ids, err) == 4 && ids[0] == 'a' && ids[2] == 255 && ids[3] == 32);
  free_tokenizer(&t);
  CHECK(!load_tokenizer("/nowhere", 257, &t, err) && strstr(err, "tokenizer.json: open"), "%s",
        err);
}

static void test_refusals(void) {
  static const struct {
    const char *from, *to, *want;
  } cases[] = {
      {"\"BPE\"", "\"Unigram\"", "model: type: must be \"BPE\", not \"Unigram\""},
      {"\"BPE\"", "\"WordPiece\"", "not \"WordPiece\""},
      {"\"model\"", "\"x\"", "model: type: must be \"BPE\""},
      {"\"dropout\": null", "\"dropout\": 0.1", "model: dropout: is not supported"},
      {"\"dropout\": null", "\"byte_fallback\": true", "model: byte_fallback: is not supported"},
      {"\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}",
       "normalizer: {\"type\": \"NFC"},
      {"\"type\": \"ByteLevel\", \"add", "\"type\": \"Metaspace\", \"add", "pre_tokenizer: type: "},
      {"add_prefix_space\": false", "add_prefix_space\": true", "pre_tokenizer: add_prefix_space"},
      {"add_prefix_space\": false", "use_regex\": false", "pre_tokenizer: use_regex: "},
      {"{\"type\": \"ByteLevel\", \"add", "{\"type\": \"Split\", \"add", "pre_tokenizer: pattern"},
      {"{\"type\": \"ByteLevel\"}", "{\"type\": \"Metaspace\"}", "decoder: type: must be"},
      {"post_processor\": null", "post_processor\": {\"type\": \"BertProcessing\"}",
       "post_processor: "},
      {"lstrip\": false", "lstrip\": true", "added_tokens: lstrip: is not supported"},
      {"\"<tab>\"", "\"\"", "added_tokens: "},
      {"\"id\": 259", "\"id\": 97", "added_tokens: 97: is another token already"},
      {"\"id\": 259", "\"id\": 258", "added_tokens: 258: is another token already"},
      {"\"ab\": 256", "\"ab\": 260", "vocab: \"ab\": 260"},
      {"\"ab\": 256", "\"ab\": -1", "must be an id below the model's vocab_size 260"},
      {"\"ab\": 256", "\"ab\": 7", "vocab: 7: is there twice"},
      {"\"ab\": 256", "\"a\\ud8\": 256", "vocab: "},
      {"\"a b\"", "\"a z\"", "merges: \"a z\": must be two tokens that make a third"},
      {"\"a b\"", "\"ab\"", "merges: \"ab\": must be"},
      {"\"a b\"", "7", "merges: 7: must be"},
      {"[\"ab\", \"c\"]", "[\"ab\"]", "merges: "},
      {"]}}", "]}", "JSON: broken"},
  };
  Tokenizer t;
  char text[9000];
  for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++) {
    const char* hit = strstr(good, cases[i].from);
    snprintf(text, sizeof text, "%.*s%s%s", (int)(hit - good), good, cases[i].to,
             hit + strlen(cases[i].from));
    const bool ok = load_text(text, strlen(text), &t);
    CHECK(!ok && strstr(err, cases[i].want) && strstr(err, "tokenizer.json: ") && t.tokens == NULL,
          "want %s, got %s", cases[i].want, ok ? "a tokenizer" : err);
  }
}

// Damaged files load or are refused in one line; what loads encodes any text into ids of the model
// whose bytes are the text.
static void test_mutations(void) {
  static unsigned char changed[9000];
  static const char text[] = "It's <end> 2026:\xff \xe4\xb8\xad abc  abababc";
  const size_t n_text = sizeof text - 1, n_good = strlen(good), focus = 700;
  int loaded = 0, bad = 0, ids[64];
  for (int i = 0; i < 2000; i++) {
    Tokenizer t;
    // The tail, where merges are, is short: damage it as often as the head.
    const size_t keep = i % 2 ? 0 : n_good - 300;
    memcpy(changed, good, keep);
    const size_t n =
        keep + mutate(changed + keep, (unsigned char*)good + keep, n_good - keep, focus);
    if (!load_text((char*)changed, n, &t)) {
      bad += strchr(err, '\n') != NULL || strstr(err, "tokenizer.json: ") == NULL;
      continue;
    }
    loaded++;
    size_t at = 0;
    const int count = encode(&t, text, n_text, ids, err);
    for (int k = t.n_bos; k < count; k++) {
      const Token* token = ids[k] >= 0 && ids[k] < 260 ? &t.tokens[ids[k]] : NULL;
      const bool right = token && !memcmp(text + at, token->text, (size_t)token->n);
      bad += !right;
      at += right ? (size_t)token->n : 0;
    }
    bad += count >= 0 && at != n_text;
    free_tokenizer(&t);
  }
  CHECK(bad == 0 && loaded > 100 && loaded < 1900, "%d bad, %d loaded", bad, loaded);
}

int main(void) {
  static const char* const names[] = {"gpt2", "smollm2", "llama3"};
  char dir[64];
  for (int i = 0; i < 3; i++) {
    snprintf(dir, sizeof dir, "tests/golden/tokenizers/%s", names[i]);
    printf("%s: %d tokens\n", dir, test_corpus(dir, 700, 0));
  }
  make_good();
  test_small();
  test_refusals();
  test_mutations();
  return check_report();
}
