// Fuzzes a model directory. The first byte chooses the file that the rest becomes; the other files
// are good: config.json, model.safetensors, model.safetensors.index.json with its part.
#include "fuzz.h"

static const char CONFIG[] =
    "{\"model_type\":\"llama\",\"hidden_act\":\"silu\",\"hidden_size\":32,\"intermediate_size\":32,"
    "\"num_hidden_layers\":1,\"num_attention_heads\":1,\"num_key_value_heads\":1,\"head_dim\":32,"
    "\"vocab_size\":2,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,"
    "\"tie_word_embeddings\":true}";

// The tensors of CONFIG in fp16, all one value: 16 KB.
static size_t good_weights(char* to) {
  static const struct {
    const char* name;
    int rows, cols;
  } list[] = {{"model.embed_tokens", 2, 32},
              {"model.norm", 0, 32},
              {"model.layers.0.input_layernorm", 0, 32},
              {"model.layers.0.self_attn.q_proj", 32, 32},
              {"model.layers.0.self_attn.k_proj", 32, 32},
              {"model.layers.0.self_attn.v_proj", 32, 32},
              {"model.layers.0.self_attn.o_proj", 32, 32},
              {"model.layers.0.post_attention_layernorm", 0, 32},
              {"model.layers.0.mlp.gate_proj", 32, 32},
              {"model.layers.0.mlp.up_proj", 32, 32},
              {"model.layers.0.mlp.down_proj", 32, 32}};
  int at = 0;
  char* p = to + 8;
  for (int i = 0; i < 11; i++) {
    const int size = 2 * (list[i].rows ? list[i].rows : 1) * list[i].cols;
    char rows[16] = "";
    if (list[i].rows) snprintf(rows, sizeof rows, "%d,", list[i].rows);
    p += sprintf(p, "%c\"%s.weight\":{\"dtype\":\"F16\",\"shape\":[%s%d],\"data_offsets\":[%d,%d]}",
                 i ? ',' : '{', list[i].name, rows, list[i].cols, at, at + size);
    at += size;
  }
  *p++ = '}';
  const uint64_t header = (uint64_t)(p - to - 8);
  memcpy(to, &header, 8);
  memset(p, 0x2c, (size_t)at);
  return (size_t)(p - to) + (size_t)at;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static char weights[32768];
  static size_t n_weights;
  char err[ERR_LEN] = "", name[NAME_LEN];
  Model m;
  if (size == 0) return 0;
  if (n_weights == 0) n_weights = good_weights(weights);
  const int kind = data[0] % 3;
  const char* const names[] = {"config.json", "model.safetensors", "model.safetensors.index.json"};
  fuzz_write("config.json", CONFIG, sizeof CONFIG - 1);
  fuzz_write("model.safetensors", weights, n_weights);
  unlink(fuzz_path(names[2]));
  fuzz_write(names[kind], data + 1, size - 1);
  if (!load_model(fuzz_dir, &m, err)) {
    fuzz_check_error(err);
    if (m.layers != NULL || m.n_maps != 0) abort();
    return 0;
  }
  // What loads can be read to its end, and holds no number that is none.
  const Tensor* t;
  for (int i = 0; (t = model_tensor(&m, i, name)) != NULL; i++) {
    const size_t n = (size_t)t->rows * (size_t)t->cols;
    if (t->data == NULL || too_large(t, 0, n)) abort();
  }
  free_model(&m);
  return 0;
}
