#!/usr/bin/env python3
"""Writes a random checkpoint of a chosen size, to measure how fast bs loads one.

  python3 tests/make_big.py DIR [F16|BF16|F32] [layers] [shards]    16 layers in F16: 2.08 GB

The shape is that of llama-3.2-1b with a vocabulary of 32,000, tied. Needs numpy, no network."""
import json
import os
import struct
import sys

import numpy as np

D, F, H, G, K, V = 2048, 8192, 32, 8, 64, 32000


def tensors(layers):
    yield "model.embed_tokens", [V, D]
    for i in range(layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm", [D]
        yield layer + "self_attn.q_proj", [H * K, D]
        yield layer + "self_attn.k_proj", [G * K, D]
        yield layer + "self_attn.v_proj", [G * K, D]
        yield layer + "self_attn.o_proj", [D, H * K]
        yield layer + "post_attention_layernorm", [D]
        yield layer + "mlp.gate_proj", [F, D]
        yield layer + "mlp.up_proj", [F, D]
        yield layer + "mlp.down_proj", [D, F]
    yield "model.norm", [D]


def main():
    out, dtype, layers, shards = (sys.argv[1:] + ["F16", "16", "1"][len(sys.argv) - 2:])[:4]
    layers, shards = int(layers), int(shards)
    size = 4 if dtype == "F32" else 2
    os.makedirs(out, exist_ok=True)
    rng = np.random.default_rng(0)
    names = list(tensors(layers))
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else \
            "model.safetensors"
        header, at = {}, 0
        part = names[shard * len(names) // shards:(shard + 1) * len(names) // shards]
        for name, shape in part:
            n = int(np.prod(shape)) * size
            header[name + ".weight"] = {"dtype": dtype, "shape": shape,
                                        "data_offsets": [at, at + n]}
            weight_map[name + ".weight"] = file
            at += n
        text = json.dumps(header).encode()
        with open(os.path.join(out, file), "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for _, shape in part:
                values = rng.random(int(np.prod(shape)), dtype=np.float32) * 0.1 - 0.05
                if dtype == "BF16":
                    (values.view(np.uint32) >> 16).astype(np.uint16).tofile(f)
                else:
                    values.astype(np.float16 if dtype == "F16" else np.float32).tofile(f)
    index = os.path.join(out, "model.safetensors.index.json")
    if shards > 1:
        with open(index, "w") as f:
            json.dump({"metadata": {}, "weight_map": weight_map}, f)
    with open(os.path.join(out, "config.json"), "w") as f:
        json.dump({"model_type": "llama", "hidden_act": "silu", "hidden_size": D,
                   "intermediate_size": F, "num_hidden_layers": layers, "num_attention_heads": H,
                   "num_key_value_heads": G, "head_dim": K, "vocab_size": V,
                   "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                   "tie_word_embeddings": True, "eos_token_id": None}, f)


if __name__ == "__main__":
    main()
