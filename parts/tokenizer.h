// ---- Tokenizer: text <-> token ids by a directory's tokenizer.json, where that is byte-level BPE
// (GPT-2, SmolLM2, Llama 3). What would make other ids than the tokenizers library is refused by
// name.
#include <limits.h>

typedef struct {
  const char* text;  // its bytes, no NUL behind them; NULL: there is no such token
  int n, id;
  bool added;    // found in a text as it stands, before anything is split
  bool special;  // marks something and is no text
} Token;

typedef struct {
  uint64_t pair;  // left id << 32 | right id
  int rank;       // lower ones merge first
  int id;         // what the two become
} Merge;

enum { LETTERS, NUMBERS, SPACES, OTHERS, NO_CHARACTER, MAX_BOUNDS = 1600 };
typedef struct {
  int n_tokens, n_vocab, n_merges, n_added, n_bos;
  Token* tokens;              // [n_tokens] by id
  Token* vocab;               // [n_vocab] by text, without the added ones
  Merge* merges;              // [n_merges] by pair
  int* merged;                // [n_merges] id, by rank
  int* added;                 // [n_added] ids
  int bos[4];                 // ids in front of every text
  int bytes[256];             // id of the token that is this byte; -1 = none
  char* text;                 // what the tokens point into
  bool digits;                // every digit stands alone
  bool llama3;                // words are split by Llama 3's pattern, not by GPT-2's
  bool whole;                 // a word that is a token is not merged from its parts
  int bounds[2][MAX_BOUNDS];  // letters, numbers: code points where membership changes
  int n_bounds[2];
} Tokenizer;

// Where letters (\p{L}) and numbers (\p{N}) begin and end, as distances in base 26: small letters
// have more digits after them. Made by tests/make_unicode.py.
// clang-format off
static const char* const unicode_bounds[2] = {
    "cNbAGbAbVBKBEBFXBbFBrQEMOFHBBBeZFBCCEBBGBBDBBBUBdFBfJIgKBbMCBGbPcTbBEEbTbRbJCBdVBBPCHCKDCBQBBb"
    "EbDdLLBYbHJCEBFWEBJBDBXZHLFYBGRbQcGcCDBSBHKPQEICCCWBHBBDEDBQBNCBDOCKBIGECCWBHBCBCBCbFEBBTDQJBD"
    "BWBHBCBFDBSBPCXBLICCCWBHBCBFDBbECBDPBRBBGDDBEDCBBBCDCDDDMWBcAIBDBXBQDBbADCBCCbEBEIBDBXBKBFDBbF"
    "CBCPCRJBDBbPCBQBFDIDYGFSDYBJBBCHcGbWBCMHcGCBBBFBYBBBKBCJBCFBBVEbGBcLIBbKbBFeLbRUBQGEEDBDCHDENM"
    "BRbMBBFBCbRBmVBECHBBBECbPBECbHBECHBBBECPBcFBECcPbLQQdICGDxWCRBbAFcXGIHSNTOSONBDPcAbJBEBcPdLHFC"
    "bIBBFcSKbFbXbECFLbSEbAcCXJcBdEBdPbVRIcCbENCKbSbAbKbPDKbKCLFbRCDbPEBGBCDBFhKcMkSCGCbMCGCIBBBBBB"
    "BbFCcBBHBBDDBHDECGENFDBHeMBNBQNdXBEBCKBBDFGBBBBBBEBLCEFFEBcACdzFiVGEDCMbMBBFBCcEHBQXJHBHBHBHBH"
    "BHBHBHdCBsBCbQFFCEdIGDBdMBEFbRBdQRbGbWQtSjtOcMbguFcPbUCkJDQKCUbVQbFCcSbXJCdZCcPCCBBBIVQBDBEBXb"
    "DcAObYcKGDBBCLbCKXZbDHbVbCBQFBKKFBbPXDBIUXDBDbYBBDCCFCBBBYDCLHDMGCGCGJHBHBbRBOGeLbDqnSMXEbXmnC"
    "oCCeCbMHMFFBBKBNBFBBBCBCBeEbHnZScMCcCbOMeMFBfFbKbAGbALdLDGCGCGCDbJMBbABTBCBPCObIeToZbDDbXbVbGN"
    "UBIGbMKbECbKEIbWgCSbKEbKEbOIcAMLBPBHBCBLBPBHBCDcAMlZJWKIYGBbQBJcRGCBBbSBCDBCXKXJbFcNTBCKWKbAcS"
    "cEGCcMBPEBDBbDbQbDDbDbJIBbCbBcCKWKTNSeGcVcDbZNbZNbKbMbCJXjQbQGCQDcHbDKBIWbQSbUVbBXMcBcFCCBNbTb"
    "GZbAbKbDBCBIbJDBMbWOEVBBBbJSBZTCcLHBBBEBPBKHbVbMICCCWBHBCBFDBSBMFbEKBBCBBbMBBZBBBbScBSEUDbEbWU"
    "CBBhCbVbPEbKbWUBcHbRNBcTbBbLHhDbSeMcMbFICBCIBCBYPBBBdQICbNQBBBbCBKbOHBVBLbUTBScVhRbHbFJBbLRBbX"
    "bEeIHBCBbMVBZGBCBbGOBmPTPBBNBbIeUBdBbjMiWhOdxKdTPbpGRGZfxRFwLkdDbEcpUvXHbFRdBRbESbWQEbFVFTqQbT"
    "iDcMeYcXFBcONcMCBBbCjcAIbvQbPKnfREBHBCBlFPBbDDCBOEIpGdkUeDFNDJHKiwKdHBcTBCCBCCCEBMBBBHBcNBECIB"
    "HBbCBEBFBBDHBnCCZBZBbFBZBbFBZBbFBZBbFBZBIcsYbFGGkBcKfQbTKHQBmJbESbSsQbCiUbECBtBHBEBCBPBhPcHcQH"
    "BbuIEBbBBCBBCBBKBEBBBBGBEBBBBBBDBCBBCBBBBBBBBBBCBBCEBHBEBEBBBKBRFDBFBRgoAclfCbGgdUGiOCinQOlbLP"
    "xYdqWuWcfYhhZFgfG",
    "bWKeQCFBCDcdLKfEKhQKpWKeOKEGeEKeOKeOKCGeGNeLKIHdZKeAHHTeFKdSKeOKcSUkIKcSKbbRUbhXDjFKGKWKlOKeYL"
    "gJKGKhAKdIKfEKGKboGBDGGKhQbZCFbbYcIdAWyGbEcbHBbdXBZJODnFEfIKbEIBPbGKbNPbrsAKhGKmIGfYKbMKhQKWKd"
    "IKpQKbfmCKsZbTMcFRCnDbBbKEbDBIBfEFhUKbkGIZHbNJcXFWGgECCQCbUcMJcACbEDcXFeAIYIbPHmSGbWKGKkSbFgCK"
    "bQEeIHfEbEeYKcIKfOKHUjRKnEKeOKoKKdYKGUcYMqETdPKzMKdIbDiTKcSKqGKdYVbpBeHxaFKdmCKdIKfEKBHuGKkCXb"
    "jsZKceWUMUeEZbqRbYdnCKqGKtIKjNKbbOJeYKbeLcHBDBEcYbTBPblANedFK"};
// clang-format on

static const char LLAMA3_PATTERN[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

// ---- Characters
static void unpack_bounds(Tokenizer* t) {
  for (int kind = LETTERS; kind <= NUMBERS; kind++) {
    int digits = 0, bound = 0;
    for (const char* p = unicode_bounds[kind]; *p != '\0'; p++) {
      digits = digits * 26 + *p - (*p >= 'a' ? 'a' : 'A');
      if (*p >= 'a') continue;
      t->bounds[kind][t->n_bounds[kind]++] = bound += digits;
      digits = 0;
    }
  }
}

// The UTF-8 character at *p, which moves past it; -1 and one byte further where there is none.
static int next_char(const char** p, const char* end) {
  const unsigned char* s = (const unsigned char*)*p;
  const int n = *s < 0x80 ? 1 : *s < 0xc2 ? 0 : *s < 0xe0 ? 2 : *s < 0xf0 ? 3 : *s < 0xf5 ? 4 : 0;
  bool ok = n > 0 && end - *p >= n;
  int code = n == 1 ? *s : *s & (0x7f >> n);
  for (int i = 1; ok && i < n; i++) {
    ok = (s[i] & 0xc0) == 0x80;
    code = code << 6 | (s[i] & 0x3f);
  }
  *p += ok ? n : 1;
  return ok ? code : -1;
}

static char* put_utf8(char* to, unsigned code) {
  const int n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  for (int i = n - 1; i > 0; i--, code >>= 6) to[i] = (char)(0x80 | (code & 0x3f));
  to[0] = (char)(n == 1 ? code : (0xf00u >> n & 0xff) | code);
  return to + n;
}

static int class_of(const Tokenizer* t, int code) {
  static const int spaces[] = {0x20, 0x85, 0xa0, 0x1680, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000};
  bool space = (code >= 9 && code <= 13) || (code >= 0x2000 && code <= 0x200a);
  for (int i = 0; i < 9; i++) space |= code == spaces[i];
  if (space) return SPACES;
  for (int kind = LETTERS; kind <= NUMBERS; kind++) {
    int low = 0, high = t->n_bounds[kind];  // how many bounds are at code or before?
    while (low < high) {
      const int middle = (low + high) / 2;
      if (t->bounds[kind][middle] <= code) low = middle + 1;
      if (t->bounds[kind][middle] > code) high = middle;
    }
    if (low % 2 == 1) return kind;
  }
  return OTHERS;
}

// The class of the character at p, and where the next one begins.
static int class_at(const Tokenizer* t, const char* p, const char* end, const char** after) {
  *after = p;
  return p == end ? NO_CHARACTER : class_of(t, next_char(after, end));
}

static const char* skip_class(const Tokenizer* t, int kind, const char* p, const char* end) {
  for (const char* after; class_at(t, p, end, &after) == kind;) p = after;
  return p;
}

// ---- Words. The end of the first one: GPT-2's pattern
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// or LLAMA3_PATTERN, their alternatives in order.
static const char* word_end(const Tokenizer* t, const char* p, const char* end) {
  static const char* const tails[] = {"s", "t", "re", "ve", "m", "ll", "d"};
  for (int i = 0; i < 7 && *p == '\''; i++) {
    const int n = (int)strlen(tails[i]);
    if (end - p <= n) continue;
    if (strncmp(p + 1, tails[i], (size_t)n) == 0) return p + 1 + n;
    if (t->llama3 && strncasecmp(p + 1, tails[i], (size_t)n) == 0) return p + 1 + n;
  }
  const char *after, *ignored, *body = p + (*p == ' ');
  const int first = class_at(t, p, end, &after), kind = class_at(t, body, end, &ignored);
  if (!t->llama3 && kind <= NUMBERS) return skip_class(t, kind, body, end);
  const char* letters = first >= SPACES && *p != '\r' && *p != '\n' ? after : p;
  if (t->llama3 && class_at(t, letters, end, &ignored) == LETTERS)
    return skip_class(t, LETTERS, letters, end);
  if (first == NUMBERS) {
    for (int i = 0; i < 3 && class_at(t, p, end, &after) == NUMBERS; i++) p = after;
    return p;
  }
  if (kind == OTHERS) {
    p = skip_class(t, OTHERS, body, end);
    while (t->llama3 && p < end && (*p == '\r' || *p == '\n')) p++;
    return p;
  }
  const char* q = skip_class(t, SPACES, p, end);
  for (const char* line = q; t->llama3 && line > p; line--)
    if (line[-1] == '\r' || line[-1] == '\n') return line;
  const char* last = q - 1;  // white space leaves its last character to the word that follows
  while (last > p && (*last & 0xc0) == 0x80) last--;
  return q == end || last == p ? q : last;
}

// ---- Byte pair encoding: of all neighbours that merge, the pair of the lowest rank, the leftmost
// of equals, becomes one token; and again. A tree of minima finds it, so that a word of a million
// letters takes a second and not an hour.
typedef struct {
  int *id, *next, *previous;  // [n] a list of what is left of the word
  int* least;  // [2 size] the root is 1; leaf i, at size + i, is the rank of (i, next)
  int size;    // n rounded up to a power of two
} Word;

static int compare_pairs(const void* a, const void* b) {
  const uint64_t x = ((const Merge*)a)->pair, y = ((const Merge*)b)->pair;
  return (x > y) - (x < y);
}

static const Merge* find_merge(const Tokenizer* t, int left, int right) {
  const Merge key = {(uint64_t)left << 32 | (uint32_t)right, 0, 0};
  if (t->n_merges == 0) return NULL;  // bytes have none, and bsearch wants a table
  return (const Merge*)bsearch(&key, t->merges, (size_t)t->n_merges, sizeof(key), compare_pairs);
}

static void rank_pair(const Tokenizer* t, Word* w, int i, int n) {
  const int next = i < n ? w->next[i] : n;
  const Merge* m = next < n ? find_merge(t, w->id[i], w->id[next]) : NULL;
  int* least = w->least;
  int at = w->size + i;
  least[at] = m != NULL ? m->rank : INT_MAX;
  for (at /= 2; at > 0; at /= 2)
    least[at] = least[2 * at] < least[2 * at + 1] ? least[2 * at] : least[2 * at + 1];
}

// The word's tokens to out; returns how many.
static int merge_word(const Tokenizer* t, const char* text, int n, Word* w, int* out) {
  for (w->size = 1; w->size < n;) w->size *= 2;
  for (int i = 0; i < 2 * w->size; i++) w->least[i] = INT_MAX;
  for (int i = 0; i < n; i++) {
    w->id[i] = t->bytes[(unsigned char)text[i]];
    w->next[i] = i + 1;
    w->previous[i] = i - 1;
  }
  for (int i = 0; i < n; i++) rank_pair(t, w, i, n);
  while (w->least[1] != INT_MAX) {
    int at = 1;
    while (at < w->size) at = w->least[2 * at] == w->least[1] ? 2 * at : 2 * at + 1;
    const int i = at - w->size, gone = w->next[i];
    w->id[i] = t->merged[w->least[1]];
    w->next[i] = w->next[gone];
    if (w->next[i] < n) w->previous[w->next[i]] = i;
    w->next[gone] = n;
    rank_pair(t, w, gone, n);
    rank_pair(t, w, i, n);
    if (w->previous[i] >= 0) rank_pair(t, w, w->previous[i], n);
  }
  int count = 0;
  for (int i = 0; i < n; i = w->next[i]) out[count++] = w->id[i];
  return count;
}

static int compare_tokens(const void* a, const void* b) {
  const Token *x = (const Token*)a, *y = (const Token*)b;
  const int order = memcmp(x->text, y->text, (size_t)(x->n < y->n ? x->n : y->n));
  return order != 0 ? order : x->n - y->n;
}

static int find_token(const Tokenizer* t, const char* text, int n) {  // -1: no such token
  const Token key = {text, n, 0, false, false};
  const Token* found =
      (const Token*)bsearch(&key, t->vocab, (size_t)t->n_vocab, sizeof(key), compare_tokens);
  return found != NULL ? found->id : -1;
}

// The end of what is split into words on its own: everything, or where digits stand alone, one
// digit or what is before the next.
static const char* split_digits(const Tokenizer* t, const char* p, const char* end) {
  const char* after;
  if (!t->digits) return end;
  if (class_at(t, p, end, &after) == NUMBERS) return after;
  while (p < end && class_at(t, p, end, &after) != NUMBERS) p = after;
  return p;
}

// Text without added tokens: digits apart if asked for, then words, then merges.
static int encode_plain(const Tokenizer* t, const char* p, const char* end, Word* w, int* out) {
  int n = 0;
  while (p < end) {
    const char* stop = split_digits(t, p, end);
    while (p < stop) {
      const int length = (int)(word_end(t, p, stop) - p);
      const int whole = t->whole ? find_token(t, p, length) : -1;
      if (whole >= 0) out[n++] = whole;
      if (whole < 0) n += merge_word(t, p, length, w, out + n);
      p += length;
    }
  }
  return n;
}

static const Token* added_at(const Tokenizer* t, const char* p, const char* end) {
  const Token* best = NULL;
  for (int i = 0; i < t->n_added; i++) {
    const Token* a = &t->tokens[t->added[i]];
    if (*p != *a->text || end - p < a->n || memcmp(p, a->text, (size_t)a->n) != 0) continue;
    if (best == NULL || a->n > best->n) best = a;
  }
  return best;
}

// out: room for length + 4 ids. Returns how many, or -1 with the reason.
static int encode(const Tokenizer* t, const char* text, size_t length, int* out, char* err) {
  if (length > 1 << 24) return file_error(err, "prompt", "length: over 16 MiB"), -1;
  for (size_t i = 0; i < length; i++) {
    const unsigned byte = (unsigned char)text[i];
    if (t->bytes[byte] < 0) return file_error(err, "prompt", "byte 0x%02x: no token", byte), -1;
  }
  Word w;
  w.id = (int*)malloc((length + 1) * 7 * sizeof(int));  // a tree takes less than 4 per byte
  if (w.id == NULL) return file_error(err, "prompt", "memory: none to encode it"), -1;
  w.next = w.id + length;
  w.previous = w.next + length;
  w.least = w.previous + length;
  int n = t->n_bos;
  memcpy(out, t->bos, sizeof(t->bos));
  const char *end = text + length, *from = text;
  for (const char* p = text; p < end;) {
    const Token* added = added_at(t, p, end);
    p += added == NULL;
    if (added == NULL && p < end) continue;
    n += encode_plain(t, from, p, &w, out + n);
    if (added != NULL) out[n++] = added->id;
    if (added != NULL) p += added->n;
    from = p;
  }
  free(w.id);
  return n;
}

// ---- tokenizer.json
// A string's bytes to out, which has room for it as it is written; -1 where it is none.
static int json_text(const char* value, char* out) {
  static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  static const char hex[] = "0123456789abcdefABCDEF";
  char* to = out;
  if (*value != '"') return -1;
  for (const char* p = value + 1; *p != '"'; p++) {
    if (*p == '\0') return -1;
    if (*p != '\\') *to++ = *p;
    if (*p != '\\') continue;
    const char* letter = p[1] != '\0' ? strchr(letters, *++p) : NULL;
    if (letter != NULL) *to++ = meanings[letter - letters];
    if (letter != NULL) continue;
    unsigned code = 0, low = 0;
    if (*p != 'u' || strspn(p + 1, hex) < 4 || sscanf(p + 1, "%4x", &code) != 1) return -1;
    p += 4;
    if (code >> 10 == 0x36 && p[1] == '\\' && p[2] == 'u' && strspn(p + 3, hex) >= 4 &&
        sscanf(p + 3, "%4x", &low) == 1 && low >> 10 == 0x37) {
      code = 0x10000 + ((code & 0x3ff) << 10) + (low & 0x3ff);
      p += 6;
    }
    to = put_utf8(to, code);
  }
  return (int)(to - out);
}

static const char* json_item(const char** at) {  // steps *at through an array
  *at += strspn(*at, JSON_SPACE);
  if (**at != '[' && **at != ',') return NULL;
  const char* value = *at + 1 + strspn(*at + 1, JSON_SPACE);
  *at = json_skip(value);
  return *value == ']' ? NULL : value;
}

// GPT-2's alphabet: every byte has a printable character. Those that are none are moved, in order,
// to 256 and up. In place; a text with other characters stays as it is.
static int unmap_bytes(char* text, int n) {
  const char *p = text, *end = text + n;
  for (int round = 0; round < 2; round++) {
    char* to = text;
    for (p = text; p < end;) {
      const int code = next_char(&p, end), moved = code - 256;
      bool known = (code > 32 && code < 127) || (code > 160 && code < 256 && code != 173);
      known = known || (moved >= 0 && moved < 68);
      if (!known) return n;
      const int byte = moved < 0 ? code : moved < 33 ? moved : moved < 67 ? moved + 94 : 173;
      if (round == 1) *to++ = (char)byte;
    }
    if (round == 1) n = (int)(to - text);
  }
  return n;
}

// An id from a JSON number; -1 when it is none of the model's.
static int token_id(const Tokenizer* t, const char* value) {
  double id;
  return json_number(value, &id) && id >= 0 && id < t->n_tokens && id == floor(id) ? (int)id : -1;
}

static bool load_vocab(Tokenizer* t, const char* vocab, char** text, const char* path, char* err) {
  const char *key, *value;
  for (const char* at = vocab; at != NULL && (value = json_member(&at, &key)) != NULL;) {
    const int id = token_id(t, value), n = json_text(key, *text);
    if (id < 0 || n < 0)
      return file_error(err, path, "vocab: %.60s: must be an id below the model's vocab_size %d",
                        key, t->n_tokens);
    const Token token = {*text, unmap_bytes(*text, n), id, false, false};
    if (t->tokens[id].text != NULL) return file_error(err, path, "vocab: %d: is there twice", id);
    t->tokens[id] = t->vocab[t->n_vocab++] = token;
    *text += n;
  }
  qsort(t->vocab, (size_t)t->n_vocab, sizeof(Token), compare_tokens);
  for (int i = 0; i < 256; i++) {
    const char byte = (char)i;
    t->bytes[i] = find_token(t, &byte, 1);
  }
  return t->n_vocab > 0 || file_error(err, path, "vocab: must be an object of ids");
}

// "left right" or ["left", "right"].
static bool load_merges(Tokenizer* t, const char* list, char* text, const char* path, char* err) {
  const char* value;
  int most = 0;
  for (const char* at = list; at != NULL && json_item(&at) != NULL;) most++;
  t->merges = (Merge*)calloc((size_t)most + 1, sizeof(Merge));
  t->merged = (int*)calloc((size_t)most + 1, sizeof(int));
  if (t->merges == NULL || t->merged == NULL) return file_error(err, path, "merges: no memory");
  for (const char* at = list; most > 0 && (value = json_item(&at)) != NULL;) {
    const char *pair = value, *first = *value == '[' ? json_item(&pair) : NULL;
    const char* second = first != NULL ? json_item(&pair) : NULL;
    int n = json_text(first != NULL ? first : value, text);
    char* gap = n > 0 && first == NULL ? (char*)memchr(text, ' ', (size_t)n) : NULL;
    char* right = gap != NULL ? gap + 1 : text + (n > 0 ? n : 0);
    int n_right = second != NULL ? json_text(second, right) : gap ? n - (int)(right - text) : -1;
    const int n_left = gap != NULL ? (int)(gap - text) : n;
    int ids[3] = {-1, -1, -1};
    if (n_left > 0 && n_right > 0) {
      const int left_bytes = unmap_bytes(text, n_left);
      n_right = unmap_bytes(right, n_right);
      ids[0] = find_token(t, text, left_bytes);
      ids[1] = find_token(t, right, n_right);
      memmove(text + left_bytes, right, (size_t)n_right);
      ids[2] = find_token(t, text, left_bytes + n_right);
    }
    if (ids[0] < 0 || ids[1] < 0 || ids[2] < 0)
      return file_error(err, path, "merges: %.*s: must be two tokens that make a third",
                        (int)(at - value < 60 ? at - value : 60), value);
    const Merge m = {(uint64_t)ids[0] << 32 | (uint32_t)ids[1], t->n_merges, ids[2]};
    t->merged[t->n_merges] = ids[2];
    t->merges[t->n_merges++] = m;
  }
  qsort(t->merges, (size_t)t->n_merges, sizeof(Merge), compare_pairs);
  return true;
}

// Tokens beside the vocabulary. Those beyond the model's vocabulary cannot be fed to it: they stay
// text.
static bool load_added(Tokenizer* t, const char* list, char** text, const char* path, char* err) {
  const char* value;
  for (const char* at = list; at != NULL && (value = json_item(&at)) != NULL;) {
    static const char* const refused[] = {"lstrip", "rstrip", "single_word"};
    const char* content = json_get(value, "content");
    const int n = content != NULL ? json_text(content, *text) : -1;
    const int id = token_id(t, json_get(value, "id"));
    if (n <= 0) return file_error(err, path, "added_tokens: %.60s: has no content", value);
    for (int i = 0; i < 3; i++)
      if (json_get(value, refused[i]) != NULL)
        return file_error(err, path, "added_tokens: %s: is not supported", refused[i]);
    if (id < 0) continue;
    const Token token = {*text, n, id, true, json_get(value, "special") != NULL};
    *text += n;
    // The vocabulary may have it too, but an id must not mean two things.
    const Token* old = &t->tokens[id];
    memcpy(*text, token.text, (size_t)n);
    const int n_old = unmap_bytes(*text, n);
    if (old->text != NULL &&
        (old->added || old->n != n_old || memcmp(old->text, *text, n_old) != 0))
      return file_error(err, path, "added_tokens: %d: is another token already", id);
    t->added[t->n_added++] = id;
    t->tokens[id] = token;
  }
  return true;
}

static bool json_equals(const char* value, const char* text) {
  char* copy = value != NULL ? (char*)malloc((size_t)(json_skip(value) - value) + 1) : NULL;
  const int n = copy != NULL ? json_text(value, copy) : -1;
  const bool equal = n == (int)strlen(text) && memcmp(copy, text, (size_t)n) == 0;
  free(copy);
  return equal;
}

// The first thing that would split a text otherwise than we do, or NULL.
static const char* check_splitting(Tokenizer* t, const char* pre) {
  const char* at = json_is(pre, "type", "\"Sequence\"") ? json_get(pre, "pretokenizers") : NULL;
  const char* value = at != NULL ? json_item(&at) : pre;
  if (value != NULL && json_is(value, "type", "\"Digits\"")) {
    if (json_get(value, "individual_digits") == NULL) return "individual_digits";
    t->digits = true;
    value = at != NULL ? json_item(&at) : NULL;
  }
  if (value != NULL && json_is(value, "type", "\"Split\"")) {
    const char* pattern = json_get(json_get(value, "pattern"), "Regex");
    if (!json_equals(pattern, LLAMA3_PATTERN)) return "pattern";
    if (!json_is(value, "behavior", "\"Isolated\"") || json_get(value, "invert")) return "behavior";
    t->llama3 = true;
    value = at != NULL ? json_item(&at) : NULL;
  }
  if (value == NULL || !json_is(value, "type", "\"ByteLevel\"")) return "type";
  if (json_get(value, "add_prefix_space") != NULL) return "add_prefix_space";
  char key[NAME_LEN];
  bool regex = true;  // unless it says false
  for (const char* in = value, *v; (v = json_next(&in, key)) != NULL;)
    if (strcmp(key, "use_regex") == 0) regex = *v == 't';
  if (regex == t->llama3) return "use_regex";
  return at != NULL && json_item(&at) != NULL ? "pretokenizers" : NULL;
}

// What a template puts in front of a text; false where it does anything else.
static bool load_template(Tokenizer* t, const char* post) {
  if (post == NULL || json_is(post, "type", "\"ByteLevel\"")) return true;
  if (json_is(post, "type", "\"Sequence\"")) {
    const char *at = json_get(post, "processors"), *value;
    bool ok = at != NULL;
    while (ok && (value = json_item(&at)) != NULL) ok = load_template(t, value);
    return ok;
  }
  const char *at = json_get(post, "single"), *value;
  bool seen = false, ok = json_is(post, "type", "\"TemplateProcessing\"") && at != NULL;
  while (ok && (value = json_item(&at)) != NULL) {
    const char* special = json_get(json_get(value, "SpecialToken"), "id");
    int id = -1;
    for (int i = 0; special != NULL && i < t->n_added && id < 0; i++) {
      char name[NAME_LEN];
      const Token* a = &t->tokens[t->added[i]];
      snprintf(name, sizeof(name), "%.*s", a->n, a->text);
      if (json_equals(special, name)) id = t->added[i];
    }
    ok = special == NULL ? !seen : !seen && id >= 0 && t->n_bos < 4;
    if (special == NULL) seen = true;
    if (special != NULL && ok) t->bos[t->n_bos++] = id;
  }
  return ok;
}

static bool load_parts(Tokenizer* t, const char* json, char* text, const char* path, char* err) {
  static const char* const refused[] = {"dropout", "continuing_subword_prefix",
                                        "end_of_word_suffix", "byte_fallback"};
  const char *model = json_get(json, "model"), *normalizer = json_get(json, "normalizer");
  const char* type = json_get(model, "type");
  const int shown = type != NULL ? (int)(json_skip(type) - type) : 0;
  if (!json_is(model, "type", "\"BPE\""))
    return file_error(err, path, "model: type: must be \"BPE\", not %.*s", shown < 40 ? shown : 40,
                      type != NULL ? type : "");
  for (int i = 0; i < 4; i++)
    if (json_get(model, refused[i]) != NULL && json_get(model, refused[i])[1] != '"')
      return file_error(err, path, "model: %s: is not supported", refused[i]);
  if (normalizer != NULL)
    return file_error(err, path, "normalizer: %.60s: is not supported", normalizer);
  const char* pre = json_get(json, "pre_tokenizer");
  const char* fault = check_splitting(t, pre);
  if (fault != NULL)
    return file_error(err, path,
                      "pre_tokenizer: %s: is not byte-level BPE as GPT-2, SmolLM2 or "
                      "Llama 3 have it",
                      fault);
  if (!json_is(json_get(json, "decoder"), "type", "\"ByteLevel\""))
    return file_error(err, path, "decoder: type: must be \"ByteLevel\"");
  t->whole = json_get(model, "ignore_merges") != NULL;
  if (!load_vocab(t, json_get(model, "vocab"), &text, path, err)) return false;
  if (!load_added(t, json_get(json, "added_tokens"), &text, path, err)) return false;
  if (!load_merges(t, json_get(model, "merges"), text, path, err)) return false;
  return load_template(t, json_get(json, "post_processor")) ||
         file_error(err, path, "post_processor: type: must put known tokens in front, or nothing");
}

static void free_tokenizer(Tokenizer* t) {
  free(t->tokens);
  free(t->vocab);
  free(t->merges);
  free(t->merged);
  free(t->added);
  free(t->text);
  memset(t, 0, sizeof(*t));
}

// Every id is a byte, as weights/tiny has it: no file needed.
static void byte_tokenizer(Tokenizer* t) {
  for (int i = 0; i < 256; i++) {
    const Token token = {&t->text[i], 1, i, false, false};
    t->text[i] = (char)i;
    t->tokens[i] = token;
    t->bytes[i] = i;
  }
}

// vocab_size is the model's: no other id may reach it. Without the file a model of 256 ids has
// bytes.
static bool load_tokenizer(const char* dir, int vocab_size, Tokenizer* t, char* err) {
  char path[PATH_LEN];
  memset(t, 0, sizeof(*t));
  snprintf(path, PATH_LEN, "%s/tokenizer.json", dir);
  const bool bytes = vocab_size == 256 && access(path, F_OK) != 0;
  char* json = bytes ? strdup("") : json_file(path, err);
  if (json == NULL) return false;
  const size_t V = (size_t)vocab_size;
  t->n_tokens = vocab_size;
  t->tokens = (Token*)calloc(V, sizeof(Token));
  t->vocab = (Token*)calloc(V, sizeof(Token));
  t->added = (int*)calloc(V, sizeof(int));
  t->text = (char*)malloc(2 * strlen(json) + 256);
  bool ok = t->tokens && t->vocab && t->added && t->text;
  if (!ok) file_error(err, path, "memory: not enough");
  if (ok) unpack_bounds(t);
  if (ok && bytes) byte_tokenizer(t);
  if (ok && !bytes) ok = load_parts(t, json, t->text, path, err);
  free(json);
  if (!ok) free_tokenizer(t);
  return ok;
}

// Lines of a file as prompts, each to be freed; returns how many, or -1.
static int read_prompts(const char* path, const char** prompts, char* err) {
  char *text = text_file(path, (size_t)64 << 20, err), *at = text, *line;
  int n = 0;
  if (!text) return -1;
  while ((line = next_line(&at)) != NULL && n <= MAX_PROMPTS) {
    if (*line == '\0') continue;
    if (n < MAX_PROMPTS) prompts[n] = strdup(line);
    n++;
  }
  if (n > MAX_PROMPTS) {
    file_error(err, path, "more than %d prompts", MAX_PROMPTS);
    for (int i = 0; i < MAX_PROMPTS; i++) free((void*)prompts[i]);
  }
  if (n == 0) file_error(err, path, "no prompt in it");
  free(text);
  return n > 0 && n <= MAX_PROMPTS ? n : -1;
}
