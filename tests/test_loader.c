// The loader on checkpoints written here by hand: right values in, every refusal by its words, and
// thousands of damaged files, which the sanitizers make worth while.
#define BS_NO_MAIN
#include "../bs.cu"
#include "check.h"
#include "mutate.h"
#include <sys/wait.h>

#define COUNT(array) (int)(sizeof(array) / sizeof((array)[0]))

// ---- A small checkpoint: D 32, F 96, V 11, L 2, H 2, G 1, K 32. In all texts ' stands for ".
static const char* root;
static char err[ERR_LEN];

static const char CONFIG[] =
    "{'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_act': 'silu',\n"
    "'hidden_size': 32, 'intermediate_size': 96, 'num_hidden_layers': 2, 'num_attention_heads': "
    "2,\n"
    "'num_key_value_heads': 1, 'head_dim': 32, 'vocab_size': 11, 'max_position_embeddings': 128,\n"
    "'rms_norm_eps': 1e-05, 'rope_theta': 20000.0, 'rope_scaling': null, 'attention_bias': false,\n"
    "'sliding_window': null, 'eos_token_id': 2, 'tie_word_embeddings': false,\n"
    "'note': [1, {'a': '\\u00e9 ]}\\''}]\n}\n";

// Written out, not derived from the loader's list: this is the oracle. rows 0: a vector.
typedef struct {
  const char* name;
  int rows, cols;
  size_t field;  // of Model, or of LayerTensors
} Shape;
static const Shape SHAPES[] = {
    {"model.embed_tokens.weight", 11, 32, offsetof(Model, embed)},
    {"model.norm.weight", 0, 32, offsetof(Model, final_norm)},
    {"lm_head.weight", 11, 32, offsetof(Model, head)},
    {"model.layers.%d.input_layernorm.weight", 0, 32, offsetof(LayerTensors, attn_norm)},
    {"model.layers.%d.self_attn.q_proj.weight", 64, 32, offsetof(LayerTensors, q)},
    {"model.layers.%d.self_attn.k_proj.weight", 32, 32, offsetof(LayerTensors, k)},
    {"model.layers.%d.self_attn.v_proj.weight", 32, 32, offsetof(LayerTensors, v)},
    {"model.layers.%d.self_attn.o_proj.weight", 32, 64, offsetof(LayerTensors, o)},
    {"model.layers.%d.post_attention_layernorm.weight", 0, 32, offsetof(LayerTensors, mlp_norm)},
    {"model.layers.%d.mlp.gate_proj.weight", 96, 32, offsetof(LayerTensors, gate)},
    {"model.layers.%d.mlp.up_proj.weight", 96, 32, offsetof(LayerTensors, up)},
    {"model.layers.%d.mlp.down_proj.weight", 32, 96, offsetof(LayerTensors, down)},
};
enum { N_TENSORS = 3 + 2 * 9 };

static Shape shape_of(int tensor) {
  static char name[NAME_LEN];
  Shape s = SHAPES[tensor < 12 ? tensor : tensor - 9];
  snprintf(name, sizeof(name), s.name, tensor / 12);
  s.name = name;
  return s;
}

typedef struct {
  char header[8192];
  unsigned char data[250000];
  size_t len;  // of data
} File;
static File good;       // the file that most tests start from
static size_t written;  // by the last write_bytes
static unsigned char bytes[sizeof(File)], changed[2 * sizeof(File)];

static int n_bytes(const Shape* s, DType dtype) {
  return (s->rows ? s->rows : 1) * s->cols * (dtype == DT_F32 ? 4 : 2);
}

// What tensor data consists of: the loader takes bytes as they are. Without bit 6 no element of any
// type is 2 or more.
static unsigned char byte_at(int tensor, int i) {
  return (unsigned char)(tensor * 29 + i * 7 + i / 256) & 0xbf;
}

static void add_tensor(File* f, int tensor, DType dtype) {
  static const char* const NAMES[] = {"F16", "BF16", "F32"};
  const Shape s = shape_of(tensor);
  const size_t at = strlen(f->header), begin = f->len;
  for (int i = 0; i < n_bytes(&s, dtype); i++) f->data[f->len++] = byte_at(tensor, i);
  char shape[32];
  snprintf(shape, sizeof(shape), s.rows ? "%d,%d" : "%.0d%d", s.rows, s.cols);
  snprintf(f->header + at, sizeof(f->header) - at,
           "%s'%s':{'dtype':'%s','shape':[%s],'data_offsets':[%zu,%zu]}", at > 0 ? "," : "{",
           s.name, NAMES[dtype], shape, begin, f->len);
}

static void make_file(File* f, DType matrices, DType norms, bool with_head) {
  memset(f, 0, sizeof(*f));
  for (int i = 0; i < N_TENSORS; i++) {
    if (i != 2 || with_head) add_tensor(f, i, shape_of(i).rows ? matrices : norms);
  }
  strcat(f->header, "}");
}

static const char* path_of(const char* name) {
  static char path[PATH_LEN];
  snprintf(path, sizeof(path), "%s/%s", root, name);
  return path;
}

static void write_bytes(const char* name, const void* from, size_t len) {
  FILE* f = fopen(path_of(name), "wb");
  written = len;
  if (f != NULL && fwrite(from, 1, len, f) == len && fclose(f) == 0) return;
  perror(name);
  exit(1);
}

static size_t add_text(unsigned char* to, const char* text) {
  for (size_t i = 0; text[i] != '\0'; i++) to[i] = text[i] == '\'' ? '"' : (unsigned char)text[i];
  return strlen(text);
}

static void write_text(const char* name, const char* text) {
  write_bytes(name, bytes, add_text(bytes, text));
}

// As model.safetensors unless it is a part.
static void write_file(const char* header, const File* f, const char* part) {
  const size_t len = add_text(bytes + 8, header);
  memcpy(bytes, &len, 8);
  memcpy(bytes + 8 + len, f->data, f->len);
  write_bytes(part ? part : "model.safetensors", bytes, 8 + len + f->len);
}

static void write_good(void) {
  write_text("config.json", CONFIG);
  write_file(good.header, &good, NULL);
}

// text with its first `from`, which must be there, replaced by `to`.
static const char* replaced(const char* text, const char* from, const char* to) {
  static char out[sizeof(good.header)];
  const char* hit = strstr(text, from);
  snprintf(out, sizeof(out), "%.*s%s%s", (int)(hit - text), text, to, hit + strlen(from));
  return out;
}

// One line: the file or directory, a place, a reason.
static bool well_formed(void) {
  const char* place = strncmp(err, root, strlen(root)) == 0 ? strstr(err, ": ") : NULL;
  return strchr(err, '\n') == NULL && place != NULL && strstr(place + 2, ": ") != NULL;
}

static void expect_refusal(const char* want) {
  Model m;
  memset(err, 0, sizeof(err));
  const bool ok = load_model(root, &m, err);
  CHECK(!ok && well_formed() && strstr(err, want), "want %s, got %s", want, ok ? "a model" : err);
  CHECK(m.layers == NULL && m.n_maps == 0, "after %s", err);
}

static void check_values(const char* what, bool tied) {
  Model m;
  char name[NAME_LEN], dir[64];
  snprintf(dir, sizeof(dir), "%s//", root);
  const bool ok = load_model(dir, &m, err);
  CHECK(ok, "%s: %s", what, err);
  if (!ok) return;
  CHECK(model_tensor(&m, N_TENSORS, name) == NULL);
  for (int i = 0; i < N_TENSORS; i++) {
    const Shape s = shape_of(tied && i == 2 ? 0 : i);
    const char* base = i < 3 ? (char*)&m : (char*)&m.layers[i / 12];
    const Tensor* t = (const Tensor*)(base + s.field);
    const unsigned char* data = (const unsigned char*)t->data;
    bool right = t->cols == s.cols && t->rows == (s.rows ? s.rows : 1);
    for (int k = 0; right && k < n_bytes(&s, t->dtype); k++)
      right = data[k] == byte_at(tied && i == 2 ? 0 : i, k);
    CHECK(right, "%s: %s", what, s.name);
  }
  CHECK((m.head.data == m.embed.data) == tied && !strcmp(m.config.name, strrchr(root, '/') + 1));
  free_model(&m);
  CHECK(m.n_maps == 0 && m.layers == NULL);
}

// ---- Tests
static void test_json(void) {
  static const char* const BROKEN[] = {
      "",         " ",        "[]",       "{",         "{'a'",          "{'a':",
      "{'a':1",   "{'a':[1}", "{'a':1}}", "{'a':1} x", "{'a':1 'b':2}", "{a:1}",
      "{'a':'b}", "{'a':'\\", "{'a\\",    "{'a' 1}",   "{1:2}"};
  for (int i = 0; i < COUNT(BROKEN); i++) {
    char* copy = json_open("x", (char*)bytes, add_text(bytes, BROKEN[i]), err);
    CHECK(copy == NULL && strstr(err, "x: JSON: broken") != NULL, "%s", BROKEN[i]);
    free(copy);
  }
  const char* text =
      "{'s':'abc', 'e':'a\\n','n':null,'f':false,'t':true, 'x' : -2.5e-1 ,"
      "'inf':1e999,'o':{'twice':1,'twice':2},'bad':1.5.2}";
  char* j = json_open("x", (char*)bytes, add_text(bytes, text), err);
  char out[8];
  double x = 0;
  CHECK(json_string(json_get(j, "s"), out, 4) && strcmp(out, "abc") == 0);
  CHECK(!json_string(json_get(j, "s"), out, 3) && !json_string(json_get(j, "e"), out, 8));
  CHECK(!json_string(json_get(j, "x"), out, 8) && !json_string(NULL, out, 8) && out[0] == '\0');
  CHECK(!json_get(j, "n") && !json_get(j, "f") && json_get(j, "t") && !json_get(j, "missing"));
  CHECK(json_get(NULL, "x") == NULL && json_get(json_get(j, "x"), "x") == NULL);
  CHECK(json_number(json_get(j, "x"), &x) && x == -0.25);
  CHECK(json_number(json_get(json_get(j, "o"), "twice"), &x) && x == 2);
  CHECK(!json_number(json_get(j, "inf"), &x) && !json_number(json_get(j, "bad"), &x));
  CHECK(!json_number(json_get(j, "s"), &x) && !json_number(NULL, &x));
  free(j);
}

#define LLAMA3 "'rope_type': 'llama3', 'factor': 32, 'low_freq_factor': 1, 'high_freq_factor': 4"
#define ORIGINAL "'original_max_position_embeddings': 8192"

static Config config_with(const char* from, const char* to) {
  Config c;
  write_text("config.json", replaced(CONFIG, from, to));
  CHECK(load_config(path_of("config.json"), &c, err), "%s", err);
  return c;
}

static void test_config_values(void) {
  Config c = config_with("{", "{");
  CHECK(c.dim == 32 && c.hidden_dim == 96 && c.n_layers == 2 && c.n_heads == 2 && !c.tied);
  CHECK(c.n_kv_heads == 1 && c.head_dim == 32 && c.vocab_size == 11 && c.max_context == 128);
  CHECK(c.norm_eps == 1e-5f && c.rope_theta == 20000 && c.rope_factor == 0 && c.eos[0] == 2);
  // Defaults: as many kv heads as heads, head_dim from the width, theta 10000, untied, no eos.
  c = config_with(CONFIG,
                  "{'model_type':'llama','hidden_act':'silu','hidden_size':128,'vocab_size':256,"
                  "'intermediate_size':32,'num_hidden_layers':1,'num_attention_heads':4,"
                  "'max_position_embeddings':8,'rms_norm_eps':1e-6,'head_dim':null}");
  CHECK(c.n_kv_heads == 4 && c.head_dim == 32 && c.rope_theta == 10000 && !c.tied && c.n_eos == 0);
  c = config_with("id': 2", "id': [1 , 10,3]");
  CHECK(c.n_eos == 3 && c.eos[0] == 1 && c.eos[1] == 10 && c.eos[2] == 3);
  c = config_with("rope_scaling': null", "rope_scaling': {" LLAMA3 ", " ORIGINAL "}");
  CHECK(c.rope_factor == 32 && c.rope_low == 1 && c.rope_high == 4 && c.rope_theta == 20000);
  c = config_with("scaling': null", "parameters': {" LLAMA3 ", " ORIGINAL ", 'rope_theta': 5e5}");
  CHECK(c.rope_factor == 32 && c.rope_original == 8192 && c.rope_theta == 500000);
  c = config_with("scaling': null", "parameters': {'rope_type': 'default', 'rope_theta': 25.5}");
  CHECK(c.rope_theta == 25.5f && c.rope_factor == 0);
}

typedef struct {
  const char *from, *to, *want;
} Case;

// One replacement in config.json or, where `from` is not in it, in the header.
static void test_refusals(void) {
  static const Case CASES[] = {
      {"'llama'", "'mistral'", "model_type: must be \"llama\""},
      {"'silu'", "'gelu'", "hidden_act: must be \"silu\""},
      {"attention_bias': false", "attention_bias': true", "attention_bias: is not supported"},
      {"'note'", "'num_local_experts': 8, 'note'", "num_local_experts: is not supported"},
      {"'note'", "'quantization': {'bits': 4}, 'note'", "quantization: is not supported"},
      {"'note'", "'partial_rotary_factor': 0.5, 'note'", "partial_rotary_factor: is not supported"},
      {"mlp.up_proj.weight", "mlp.up_proj.qweight", "up_proj.qweight: unknown"},
      {"'note'", "'quantization_config': {}, 'note'", "quantization_config: is not supported"},
      {"'hidden_size'", "'x'", "hidden_size: must be a multiple of 32 over 0, up to 8192"},
      {"hidden_size': 32", "hidden_size': 48", "hidden_size: must be a multiple of 32"},
      {"hidden_size': 32", "hidden_size': 4294967328", "hidden_size: must be"},
      {"hidden_size': 32", "hidden_size': NaN", "hidden_size: must be"},
      {"layers': 2", "layers': 1.5", "num_hidden_layers: must be a whole number over 0, up to 256"},
      {"value_heads': 1", "value_heads': 3", "num_key_value_heads: must divide"},
      {"head_dim': 32", "head_dim': 48", "head_dim: must be 32, 64, 80, 96 or 128"},
      {"2,\n'num_key_value_heads': 1, 'head_dim': 32", "3, 'head_dim': 80", "heads: must be even"},
      {"vocab_size': 11", "vocab_size': 1", "vocab_size: must be 2 or more"},
      {"scaling': null", "scaling': {'type': 'linear', 'factor': 2}", "rope_type: must be"},
      {"scaling': null", "scaling': {" LLAMA3 "}", "original_max_position_embeddings: must be"},
      {"scaling': null", "scaling': {" LLAMA3 ", 'low_freq_factor': 4, " ORIGINAL "}", "larger"},
      {"id': 2", "id': '</s>'", "eos_token_id: must be null, an id or up to four ids"},
      {"id': 2", "id': [2, 3, 4, 5, 6]", "eos_token_id: must be null, an id or up to four"},
      {"'note': [1", "'note' [1", "JSON: broken"},
      {"}]\n}", "}]\n", "JSON: broken"},
      {"model.norm.weight", "model.norm.bias", "model.norm.bias: unknown, or a bias"},
      {"layers.1.mlp.up", "layers.0.mlp.up", "layers.0.mlp.up_proj.weight: is there twice"},
      {"model.norm.weight", "evil\x1b[2J\nname", "evil [2J name: unknown"},
      {"'BF16','shape':[32]", "'F8_E4M3','shape':[32]", "must be 1 x 32 of F16, BF16 or F32"},
      {"[96,32]", "[32,96]", "gate_proj.weight: must be 96 x 32"},
      {"[96,32]", "[4294967392,32]", "gate_proj.weight: must be"},
      {"[0,704]", "[99999296,100000000]", "embed_tokens.weight: must be"},
      {"[0,704]", "[9223372036854775104,9223372036854775808]", "embed_tokens.weight: must be"},
      {"[0,704]", "[nan,nan]", "embed_tokens.weight: must be"},
      {"{'dtype':'F16','shape':[11,32],'data_offsets':[0,704]}", "7", "or F32 in the file: 7"},
      {"{'model", "['model", "JSON: broken"},
  };
  for (int i = 0; i < COUNT(CASES); i++) {
    const Case* c = &CASES[i];
    const bool config = strstr(CONFIG, c->from) != NULL;
    write_good();
    if (config) write_text("config.json", replaced(CONFIG, c->from, c->to));
    if (!config) write_file(replaced(good.header, c->from, c->to), &good, NULL);
    expect_refusal(c->want);
  }
}

static void test_weights(void) {
  static File f;
  write_text("config.json", CONFIG);
  for (int i = 0; i < 9; i++) {
    make_file(&f, (DType)(i / 3), (DType)(i % 3), true);
    write_file(f.header, &f, NULL);
    check_values("dtypes", false);
  }
  make_file(&f, DT_F16, DT_F16, false);
  write_file(f.header, &f, NULL);
  expect_refusal("model.safetensors: lm_head.weight: missing");
  write_text("config.json", replaced(CONFIG, "embeddings': false", "embeddings': true"));
  check_values("tied", true);
  write_file(good.header, &good, NULL);
  check_values("tied, and a head that is stored is ignored", true);
  // Metadata, what old files add, spaces, and an odd offset: elements are read by memcpy.
  const char* extra = "{ '__metadata__' : {'format':'pt'}, 'model.inv_freq':{} , 'model";
  write_good();
  write_file(replaced(good.header, "{'model", extra), &good, NULL);
  check_values("metadata", false);
}

// NaN, infinities and numbers beyond fp16 in any block of a large tensor; the largest that fit
// pass.
static void test_broken_weights(void) {
  enum { COLS = 1000, N = 200 * COLS };
  static const struct {
    DType dtype;
    uint32_t bits;
    const char* want;  // "": not broken
  } values[] = {
      {DT_F16, 0x7c00, "is inf:"},
      {DT_F16, 0xfc00, "is -inf:"},
      {DT_F16, 0x7e01, "nan:"},
      {DT_F16, 0xfc01, "nan:"},
      {DT_F16, 0x7bff, ""},
      {DT_F16, 0xfbff, ""},
      {DT_BF16, 0x7f80, "is inf:"},
      {DT_BF16, 0xff80, "is -inf:"},
      {DT_BF16, 0xffc0, "nan:"},
      {DT_BF16, 0x4780, "is 65536: fp16 holds"},
      {DT_BF16, 0x477f, ""},
      {DT_F32, 0x7f800000, "is inf:"},
      {DT_F32, 0xff800000, "is -inf:"},
      {DT_F32, 0x7f800001, "nan:"},
      {DT_F32, 0xc77ff000, "is -65520: "},
      {DT_F32, 0xc77fefff, ""},
      {DT_F32, 0x7f7fffff, "is 3.40282e+38"},
  };
  static const int places[] = {0, 65535, 65536, 123456, N - 1};
  static unsigned char data[4 * N + 1];
  for (int i = 0; i < COUNT(values) * COUNT(places); i++) {
    const int v = i / COUNT(places), at = places[i % COUNT(places)];
    const int size = values[v].dtype == DT_F32 ? 4 : 2;
    Tensor t = {data + 1, values[v].dtype, 0, 0, 200, COLS};  // at an odd address
    char want[64];
    memset(data, 0x3b, sizeof(data));
    memcpy(data + 1 + (size_t)size * at, &values[v].bits, (size_t)size);
    memset(err, 0, sizeof(err));
    const bool ok = check_weights("x", "w", &t, err), fits = values[v].want[0] == '\0';
    snprintf(want, sizeof(want), "x: w: [%d, %d] is ", at / COLS, at % COLS);
    CHECK(ok == fits && (fits || (strstr(err, want) == err && strstr(err, values[v].want))),
          "%x at %d: %s", values[v].bits, at, err);
  }
  // Through a file: the line names it and the tensor. A head that a tied model ignores may be bad.
  static File f;
  for (int dtype = 0; dtype < 3; dtype++) {
    make_file(&f, (DType)dtype, DT_F16, true);
    const int size = dtype == DT_F32 ? 4 : 2;
    const size_t head = (size_t)size * 11 * 32 + 64;
    memset(f.data + head + (size_t)size * (3 * 32 + 7), 0xff, (size_t)size);
    write_text("config.json", CONFIG);
    write_file(f.header, &f, NULL);
    expect_refusal("model.safetensors: lm_head.weight: [3, 7] is ");
    write_text("config.json", replaced(CONFIG, "embeddings': false", "embeddings': true"));
    check_values("tied, and a broken head is ignored", true);
  }
}

static void test_files(void) {
  CHECK(truncate(path_of("config.json"), 0) == 0);
  expect_refusal("config.json: open: empty");
  CHECK(unlink(path_of("config.json")) == 0);
  expect_refusal("config.json: open: No such file or directory");
  CHECK(mkfifo(path_of("config.json"), 0600) == 0);
  expect_refusal("config.json: open: not a regular file");
  CHECK(unlink(path_of("config.json")) == 0);
  write_good();
  const size_t len = written, gap = (size_t)5 << 30;
  static const size_t CUTS[] = {1, 7, 8, 9, 100, 1800};
  for (int i = 0; i < COUNT(CUTS); i++) {
    write_bytes("model.safetensors", bytes, CUTS[i]);
    expect_refusal("model.safetensors: header: is cut off");
  }
  write_bytes("model.safetensors", bytes, len - 1);
  expect_refusal("model.layers.1.mlp.down_proj.weight: must be 32 x 96");
  static const uint64_t LENGTHS[] = {0, 1, UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63, 1 << 30};
  for (int i = 0; i < COUNT(LENGTHS); i++) {
    memcpy(bytes, &LENGTHS[i], 8);
    write_bytes("model.safetensors", bytes, len);
    expect_refusal(LENGTHS[i] > 1 ? "header: is cut off" : "JSON: broken");
  }
  CHECK(truncate(path_of("model.safetensors"), (off_t)gap) == 0);  // 1 GiB is inside: not read
  expect_refusal("JSON: broken, or over 20000000 bytes");
  CHECK(unlink(path_of("model.safetensors")) == 0);
  expect_refusal("model.safetensors: open: No such file or directory");
  // Offsets beyond 4 GiB: the embedding behind a hole.
  char place[64];
  snprintf(place, sizeof(place), "[%zu,%zu]", good.len + gap, good.len + gap + 704);
  write_file(replaced(good.header, "[0,704]", place), &good, NULL);
  FILE* file = fopen(path_of("model.safetensors"), "r+b");
  CHECK(file != NULL && fseeko(file, (off_t)(written + gap), SEEK_SET) == 0);
  CHECK(fwrite(good.data, 1, 704, file) == 704 && fclose(file) == 0);
  check_values("5 GiB", false);
}

// A file that shrinks after it was checked: one line and exit status 1 instead of a crash.
static void test_shrinking_file(void) {
  Model m;
  int status = 0, ends[2];
  char line[200] = "";
  write_good();
  CHECK(load_model(root, &m, err) && pipe(ends) == 0, "%s", err);
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGBUS, on_bus_error);
    dup2(ends[1], 2);
    if (truncate(path_of("model.safetensors"), 0) != 0) _exit(9);
    _exit(too_large(&m.embed, 0, 11 * 32));
  }
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1);
  CHECK(read(ends[0], line, sizeof(line) - 1) > 0 && strstr(line, "cannot be read to its end"));
  free_model(&m);
}

static void test_shards(void) {
  static const char NAME[] = "model.safetensors.index.json", NORM[] = "norm.weight':'part-1";
  static const Case CASES[] = {
      {NORM, "norm.weight':'../part-1",
       "weight_map: model.norm.weight: must be in one of 256 files"},
      {NORM, "norm.weight':'..','x':'", "/..: open: not a regular file"},
      {NORM, "norm.weight':'absent", "absent: open: No such file"},
      {NORM, "norm.weight':'part-0", "part-0: model.embed_tokens.weight: is there twice"},
      {NORM, "norm.weight':'part-3", "part-3: model.norm.weight: missing"},
      {"weight_map", "x", "weight_map: model.embed_tokens.weight: must be in"},
      {"'part-0'", "3", "weight_map: model.embed_tokens.weight: must be in"},
      {"'}}", "'}", "index.json: JSON: broken"},
  };
  static File parts[4];
  static char index[8192] = "{'metadata':{'total_size':1},'weight_map':{";
  for (int i = 0; i < N_TENSORS; i++) {
    const size_t at = strlen(index);
    add_tensor(&parts[i % 3], i, (DType)(i % 3));
    snprintf(index + at, sizeof(index) - at, "%s'%s':'part-%d'%s", i ? "," : "", shape_of(i).name,
             i % 3, i == N_TENSORS - 1 ? "}}" : "");
  }
  strcpy(parts[3].header, "{'x.inv_freq':1");
  for (int i = 0; i < 4; i++) {
    char name[] = "part-0";
    name[5] = (char)('0' + i);
    write_file(strcat(parts[i].header, "}"), &parts[i], name);
  }
  CHECK(unlink(path_of("model.safetensors")) == 0);
  for (int i = 0; i < COUNT(CASES); i++) {
    write_text(NAME, replaced(index, CASES[i].from, CASES[i].to));
    expect_refusal(CASES[i].want);
  }
  write_text(NAME, index);
  check_values("shards", false);
}

// ---- Damage
// A damaged directory loads, or is refused in one good line. What loads can be read to its end.
static bool survives(void) {
  Model m;
  char name[NAME_LEN];
  memset(err, 0, sizeof(err));
  if (!load_model(root, &m, err)) return well_formed() && m.layers == NULL && m.n_maps == 0;
  unsigned sum = 0;
  for (int i = 0; i < N_TENSORS; i++) {
    const Tensor* t = model_tensor(&m, i, name);
    const unsigned char* data = (const unsigned char*)t->data;
    for (int k = 0; k < t->rows * t->cols * (t->dtype == DT_F32 ? 4 : 2); k++) sum += data[k];
  }
  free_model(&m);
  return sum > 0;
}

static void mutate_file(const char* file, const void* good_bytes, size_t len, size_t focus) {
  static unsigned char original[sizeof(File)];
  int loaded = 0, bad = 0;
  memcpy(original, good_bytes, len);
  for (int i = 0; i < 2000; i++) {
    write_bytes(file, changed, mutate(changed, original, len, i % 4 ? focus : 16));
    bad += !survives();
    loaded += err[0] == '\0';
  }
  CHECK(bad == 0 && loaded > 20 && loaded < 1900, "%s: %d bad, %d loaded", file, bad, loaded);
  write_bytes(file, original, len);
}

int main(int argc, char** argv) {
  (void)argc;
  setenv("OMP_NUM_THREADS", "1", 0);  // small work: a second thread mostly waits
  limit_spinning(argv);
  root = scratch();
  make_file(&good, DT_F16, DT_BF16, true);
  test_json();
  test_config_values();
  test_refusals();
  test_weights();
  test_broken_weights();
  test_files();
  test_shrinking_file();
  write_good();
  mutate_file("model.safetensors", bytes, written, strlen(good.header));
  write_text("config.json", CONFIG);
  mutate_file("config.json", bytes, written, written);
  test_shards();
  mutate_file("model.safetensors.index.json", bytes, written, written);
  return check_report();
}
