// ---- Loader: a Hugging Face directory -> Model. Weights are mapped, never copied. What a file
// says is checked before use; what we cannot compute is refused on one line: "path: place: reason".
enum { NAME_LEN = 128, PATH_LEN = 4096, MAX_JSON = 20000000 };

// Control characters become spaces: what a file contains must not add lines or drive the terminal.
__attribute__((format(printf, 3, 4))) static bool file_error(char* err, const char* path,
                                                             const char* format, ...) {
  va_list args;
  va_start(args, format);
  const int n = snprintf(err, ERR_LEN, "%.300s: ", path);
  vsnprintf(err + n, (size_t)(ERR_LEN - n), format, args);
  va_end(args);
  for (; *err != '\0'; err++) *err = iscntrl((unsigned char)*err) ? ' ' : *err;
  return false;
}

static bool map_file(const char* path, Mapping* map, char* err) {
  struct stat st;
  const int fd = open(path, O_RDONLY | O_NONBLOCK);  // a FIFO must not make us wait
  if (fd < 0) return file_error(err, path, "open: %s", strerror(errno));
  bool regular = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
  map->len = regular ? (size_t)st.st_size : 0;
  map->addr = mmap(NULL, map->len, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (map->addr != MAP_FAILED) return true;
  return file_error(err, path, "open: %s",
                    map->len  ? "no room"
                    : regular ? "empty"
                              : "not a regular file");
}

// What has been read of a file need not stay in memory: of a checkpoint larger than the machine,
// only the tensor that is being looked at does.
static void forget_pages(const Mapping* map) {
  madvise(map->addr, map->len, MADV_DONTNEED);
}

// ---- JSON: a value is a pointer to its first character in a text that a NUL ends. No validator:
// of what nobody asks for, only quotes and brackets must be in order.
#define JSON_SPACE " \t\r\n"

// A value goes up to the first of , : ] } that is not in its own quotes or brackets.
static const char* json_skip(const char* p) {
  bool quoted = false;
  for (int depth = 0; *p != '\0'; p++) {
    if (*p == '"') quoted = !quoted;
    if (quoted && *p == '\\' && p[1] != '\0') p++;
    if (quoted) continue;
    if (depth == 0 && strchr(",:]}", *p) != NULL) break;
    depth += (*p == '[' || *p == '{') - (*p == ']' || *p == '}');
  }
  return p;
}

// False when it is no string, has an escape (nothing that we look for has) or is too long for out.
static bool json_string(const char* value, char* out, size_t cap) {
  const size_t n = value != NULL && *value == '"' ? strcspn(value + 1, "\"\\") : cap;
  snprintf(out, cap, "%.*s", n < cap ? (int)n : 0, n < cap ? value + 1 : "");
  return n < cap && value[n + 1] == '"';
}

static bool json_number(const char* value, double* out) {
  char* end = NULL;
  if (value != NULL) *out = strtod(value, &end);
  return end != value && isfinite(*out) && strchr(JSON_SPACE ",]}", *end) != NULL;
}

// Steps *at through an object: the next value, its key still quoted, or NULL at its closing bracket
// or at a fault.
static const char* json_member(const char** at, const char** key) {
  *at += strspn(*at, JSON_SPACE);
  if (**at != '{' && **at != ',') return NULL;
  *at += 1 + strspn(*at + 1, JSON_SPACE);
  *key = *at;
  const char* value = json_skip(*at);
  if (**at != '"' || *value != ':') return NULL;
  value += 1 + strspn(value + 1, JSON_SPACE);
  *at = json_skip(value);
  return value;
}

// The same with the key read.
static const char* json_next(const char** at, char key[NAME_LEN]) {
  const char *quoted, *value = json_member(at, &quoted);
  if (value == NULL || json_string(quoted, key, NAME_LEN)) return value;
  *at = quoted;
  return NULL;
}

// The value of a key; NULL when it is missing, null or false. The last one counts, as in Python.
static const char* json_get(const char* object, const char* key) {
  const char *value, *found = NULL;
  char name[NAME_LEN];
  while (object != NULL && (value = json_next(&object, name)) != NULL) {
    if (strcmp(name, key) == 0) found = *value == 'n' || *value == 'f' ? NULL : value;
  }
  return found;
}

static bool json_is(const char* object, const char* key, const char* text) {
  const char* value = json_get(object, key);
  return value != NULL && strncmp(value, text, strlen(text)) == 0;
}

// A copy of a text that is one object, to be freed; NULL on an error.
static char* json_open(const char* path, const char* from, size_t len, char* err) {
  char key[NAME_LEN], *text = len > MAX_JSON ? NULL : strndup(from, len);
  const char* at = text == NULL ? "" : text;
  while (json_next(&at, key) != NULL) continue;
  if (*at == '}' && at[1 + strspn(at + 1, JSON_SPACE)] == '\0') return text;
  file_error(err, path, "JSON: broken, or over %d bytes: \"%.20s\"", MAX_JSON, at);
  free(text);
  return NULL;
}

static char* json_file(const char* path, char* err) {
  Mapping map = {NULL, 0};
  if (!map_file(path, &map, err)) return NULL;
  char* text = json_open(path, (const char*)map.addr, map.len, err);
  munmap(map.addr, map.len);
  return text;
}

// ---- config.json: the first problem stays in why, so that the reader may go on.
static void config_check(char why[120], bool ok, const char* key, const char* rule) {
  if (!ok && *why == '\0') snprintf(why, 120, "%s: %s", key, rule);
}

// A multiple of unit (where not 0) up to most; a default of 0 says that there is none.
static double config_number(char why[120], const char* object, const char* key, int unit,
                            double most, double number) {
  const char* value = json_get(object, key);
  const bool known = value == NULL || json_number(value, &number);
  const bool whole = unit == 0 || fmod(number, unit) == 0;
  if (known && whole && number > 0 && number <= most) return number;
  const char* kind = unit > 1 ? "multiple of 32" : unit == 1 ? "whole number" : "number";
  if (*why == '\0') snprintf(why, 120, "%s: must be a %s over 0, up to %.8g", key, kind, most);
  return 1;
}

static bool load_config(const char* path, Config* c, char* err) {
  const char* const refused[] = {"attention_bias", "mlp_bias",           "sliding_window",
                                 "num_experts",    "num_local_experts",  "partial_rotary_factor",
                                 "quantization",   "quantization_config"};
  char why[120] = "", own[PATH_LEN], *text = json_file(path, err);
  memset(c, 0, sizeof(*c));
  if (text == NULL) return false;
  snprintf(own, sizeof own, "%s", path);
  snprintf(c->name, sizeof c->name, "%s", basename(dirname(own)));
  config_check(why, json_is(text, "model_type", "\"llama\""), "model_type", "must be \"llama\"");
  config_check(why, json_is(text, "hidden_act", "\"silu\""), "hidden_act", "must be \"silu\"");
  for (int i = 0; i < 8; i++)
    config_check(why, json_get(text, refused[i]) == NULL, refused[i], "is not supported");
  c->dim = config_number(why, text, "hidden_size", 32, 8192, 0);
  c->hidden_dim = config_number(why, text, "intermediate_size", 32, 262144, 0);
  c->n_layers = config_number(why, text, "num_hidden_layers", 1, 256, 0);
  c->n_heads = config_number(why, text, "num_attention_heads", 1, 1024, 0);
  c->n_kv_heads = config_number(why, text, "num_key_value_heads", 1, 1024, c->n_heads);
  c->head_dim = config_number(why, text, "head_dim", 1, 65536, c->dim / c->n_heads);
  c->vocab_size = config_number(why, text, "vocab_size", 1, 1 << 20, 0);
  c->max_context = config_number(why, text, "max_position_embeddings", 1, 1 << 24, 0);
  c->norm_eps = config_number(why, text, "rms_norm_eps", 0, 1, 0);
  c->tied = json_get(text, "tie_word_embeddings") != NULL;
  const int K = c->head_dim, group = c->n_heads % c->n_kv_heads;
  const bool width = K == 32 || K == 64 || K == 80 || K == 96 || K == 128;
  config_check(why, c->vocab_size > 1, "vocab_size", "must be 2 or more");
  config_check(why, width, "head_dim", "must be 32, 64, 80, 96 or 128");
  config_check(why, c->n_heads * K % 32 == 0, "num_attention_heads", "must be even at head_dim 80");
  config_check(why, group == 0, "num_key_value_heads", "must divide num_attention_heads");
  // transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters with both.
  const char *rope = json_get(text, "rope_scaling"), *eos = json_get(text, "eos_token_id");
  if (rope == NULL) rope = json_get(text, "rope_parameters");
  const char* theta = json_get(rope, "rope_theta") != NULL ? rope : text;
  c->rope_theta = config_number(why, theta, "rope_theta", 0, 1e12, 10000);
  if (rope != NULL && !json_is(rope, "rope_type", "\"default\"")) {
    const bool llama3 = json_is(rope, "rope_type", "\"llama3\"");
    config_check(why, llama3, "rope_type", "must be \"default\" or \"llama3\"");
    c->rope_factor = config_number(why, rope, "factor", 0, 1024, 0);
    c->rope_low = config_number(why, rope, "low_freq_factor", 0, 1024, 0);
    c->rope_high = config_number(why, rope, "high_freq_factor", 0, 1024, 0);
    c->rope_original = config_number(why, rope, "original_max_position_embeddings", 1, 1 << 24, 0);
    config_check(why, c->rope_low < c->rope_high, "high_freq_factor", "must be the larger one");
  }
  int* e = c->eos;
  int fifth;
  if (eos != NULL)
    c->n_eos = sscanf(eos + (*eos == '['), "%d ,%d ,%d ,%d ,%d", e, e + 1, e + 2, e + 3, &fifth);
  config_check(why, eos == NULL || (c->n_eos > 0 && c->n_eos < 5), "eos_token_id",
               "must be null, an id or up to four ids");
  free(text);
  return *why == '\0' || file_error(err, path, "%s", why);
}

// ---- Weights. Tensor i with its name and, in rows and cols, its shape; NULL past the last.
static Tensor* model_tensor(Model* m, int i, char name[NAME_LEN]) {
  const Config* c = &m->config;
  const int D = c->dim, F = c->hidden_dim, V = c->vocab_size;
  const int q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
  const struct {  // in the order of the fields of Model and of LayerTensors
    const char* name;
    int rows, cols;
  } list[] = {
      {"model.embed_tokens", V, D}, {"model.norm", 1, D},       {"lm_head", V, D},
      {"input_layernorm", 1, D},    {"self_attn.q_proj", q, D}, {"self_attn.k_proj", kv, D},
      {"self_attn.v_proj", kv, D},  {"self_attn.o_proj", D, q}, {"post_attention_layernorm", 1, D},
      {"mlp.gate_proj", F, D},      {"mlp.up_proj", F, D},      {"mlp.down_proj", D, F},
  };
  const int layer = i < 3 ? 0 : (i - 3) / 9, entry = i < 3 ? i : 3 + (i - 3) % 9;
  if (layer >= c->n_layers) return NULL;
  Tensor* t = i < 3 ? &m->embed + i : &m->layers[layer].attn_norm + (i - 3) % 9;
  const int n = i < 3 ? 0 : snprintf(name, NAME_LEN, "model.layers.%d.", layer);
  snprintf(name + n, (size_t)(NAME_LEN - n), "%s.weight", list[entry].name);
  t->rows = list[entry].rows;
  t->cols = list[entry].cols;
  return t;
}

// Is one of elements [from, to) NaN, infinite, or of a magnitude that would round to infinity as
// fp16? One comparison tells, since all of these have larger bits than any number that fits.
static bool too_large(const Tensor* t, size_t from, size_t to) {
  const char* p = (const char*)t->data;
  const int limit = t->dtype == DT_BF16 ? 0x4780 : 0x7c00;  // 65,536; infinity
  int bad = 0;
  for (size_t i = from; t->dtype == DT_F32 && i < to; i++) {
    uint32_t bits;
    memcpy(&bits, p + 4 * i, 4);
    bad |= (bits & 0x7fffffff) >= 0x477ff000;  // 65,520
  }
  for (size_t i = from; t->dtype != DT_F32 && i < to; i++) {
    uint16_t bits;
    memcpy(&bits, p + 2 * i, 2);
    bad |= (bits & 0x7fff) >= limit;
  }
  return bad != 0;
}

// A broken weight would spread to every answer and cause no error message: look at all of them.
static bool check_weights(const char* path, const char* name, const Tensor* t, char* err) {
  enum { BLOCK = 65536 };
  const size_t n = (size_t)t->rows * t->cols;
  bool broken = n <= BLOCK && too_large(t, 0, n);  // not worth waking threads for
  if (n > BLOCK) {
    PARALLEL_FOR
    for (size_t from = 0; from < n; from += BLOCK)
      if (too_large(t, from, from + BLOCK < n ? from + BLOCK : n)) broken = true;
  }
  if (!broken) return true;
  size_t bad = 0;
  while (!too_large(t, bad, bad + 1)) bad++;
  uint32_t bits = 0;
  float value;
  if (t->dtype == DT_F32) memcpy(&bits, (const char*)t->data + 4 * bad, 4);
  if (t->dtype != DT_F32) memcpy((char*)&bits + 2, (const char*)t->data + 2 * bad, 2);
  if (t->dtype == DT_F16)  // infinity or NaN: the same sign and mantissa with the longer exponent
    bits = (bits & 0x80000000) | 0x7f800000 | (bits >> 16 & 0x3ff);
  memcpy(&value, &bits, 4);
  return file_error(err, path, "%s: [%zu, %zu] is %g: fp16 holds finite numbers up to 65504", name,
                    bad / (size_t)t->cols, bad % (size_t)t->cols, value);
}

// safetensors: 8 bytes of header length, a header {name: {dtype, shape, data_offsets}}, the data.
static bool load_file(const char* path, Model* m, char* err) {
  Mapping* map = &m->maps[m->n_maps++];
  uint64_t header = 0;
  if (!map_file(path, map, err)) return false;
  memcpy(&header, map->addr, map->len < 8 ? 0 : 8);  // little endian, as we are
  if (map->len < 8 || header > map->len - 8) return file_error(err, path, "header: is cut off");
  const char *data = (const char*)map->addr + 8 + header, *info;
  char name[NAME_LEN], known[NAME_LEN], *text = json_open(path, data - header, header, err);
  bool ok = text != NULL;
  for (const char* at = text; ok && (info = json_next(&at, name)) != NULL;) {
    const char *shape = json_get(info, "shape"), *range = json_get(info, "data_offsets");
    const bool f32 = json_is(info, "dtype", "\"F32\""), bf16 = json_is(info, "dtype", "\"BF16\"");
    double dims[2] = {0, 0}, span[2] = {-1, 0};
    if (strcmp(name, "__metadata__") == 0 || strstr(name, ".inv_freq") != NULL) continue;
    Tensor* t = model_tensor(m, 0, known);
    for (int i = 1; t && strcmp(name, known) != 0; i++) t = model_tensor(m, i, known);
    ok = t != NULL && t->data == NULL;
    if (!ok) file_error(err, path, "%s: %s", name, t ? "is there twice" : "unknown, or a bias");
    if (!ok) break;
    const int n = shape == NULL ? 0 : sscanf(shape, "[%lf ,%lf", &dims[0], &dims[1]);
    if (range != NULL) sscanf(range, "[%lf ,%lf", &span[0], &span[1]);
    const double size = (double)t->rows * t->cols * (f32 ? 4 : 2);
    ok = (f32 || bf16 || json_is(info, "dtype", "\"F16\"")) && n > 0 && dims[n - 1] == t->cols &&
         (n == 2 ? dims[0] : 1) == t->rows && span[0] >= 0 && span[1] - span[0] == size &&
         span[1] <= map->len - 8 - header;
    if (!ok)
      file_error(err, path, "%s: must be %d x %d of F16, BF16 or F32 in the file: %.*s", name,
                 t->rows, t->cols, (int)(json_skip(info) - info), info);
    t->dtype = f32 ? DT_F32 : bf16 ? DT_BF16 : DT_F16;
    t->data = ok ? data + (size_t)span[0] : NULL;
    if (ok && !(t == &m->head && m->config.tied)) ok = check_weights(path, name, t, err);
    forget_pages(map);
  }
  free(text);
  return ok;
}

static void free_model(Model* m) {
  for (int i = 0; i < m->n_maps; i++) munmap(m->maps[i].addr, m->maps[i].len);
  free(m->layers);
  memset(m, 0, sizeof(*m));
}

static bool load_model(const char* dir, Model* m, char* err) {
  char path[PATH_LEN], name[NAME_LEN], file[NAME_LEN] = "model.safetensors", *index = NULL;
  Tensor* t;
  memset(m, 0, sizeof(*m));
  snprintf(path, PATH_LEN, "%s/config.json", dir);
  if (!load_config(path, &m->config, err)) return false;
  m->layers = (LayerTensors*)calloc((size_t)m->config.n_layers, sizeof(LayerTensors));
  bool ok = m->layers != NULL || file_error(err, dir, "memory: none for the layers");
  snprintf(path, PATH_LEN, "%s/model.safetensors.index.json", dir);
  if (ok && access(path, F_OK) == 0) ok = (index = json_file(path, err)) != NULL;
  // An index says which file a tensor is in: one that is not loaded yet brings its file in.
  for (int i = 0; ok && (t = model_tensor(m, i, name)) != NULL; i++) {
    if (t->data != NULL || (t == &m->head && m->config.tied)) continue;
    if (index != NULL) json_string(json_get(json_get(index, "weight_map"), name), file, NAME_LEN);
    if (*file == '\0' || strchr(file, '/') != NULL || m->n_maps == MAX_SHARDS)
      ok = file_error(err, dir, "weight_map: %s: must be in one of %d files", name, MAX_SHARDS);
    snprintf(path, PATH_LEN, "%s/%s", dir, file);
    if (ok && (index != NULL || m->n_maps == 0)) ok = load_file(path, m, err);
    if (ok && t->data == NULL) ok = file_error(err, path, "%s: missing", name);
  }
  free(index);
  if (m->config.tied) m->head = m->embed;
  if (!ok) free_model(m);
  return ok;
}
