#!/usr/bin/env python3
"""Writes tests/golden/variants/: small random checkpoints of every kind that bs reads, made by
Hugging Face transformers, each with what transformers computes with it (tests/reference.py).

  python3 tests/make_variants.py        needs PyTorch and transformers, no network, a few seconds

Together they have each head width, stored type, file layout and RoPE flavour; heads that share a
key/value head by 1, 2, 3 and 4; H K unlike D; odd vocabularies."""
import json
import os
import shutil

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reference import write_reference

HERE = os.path.dirname(os.path.abspath(__file__))
OUTPUT = os.path.join(HERE, "golden", "variants")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 5e5}

# name: D, F, L, H, G, K, V, type, tied, KB in a shard, rope, prompt lengths
VARIANTS = {
    "k32-mqa-bf16": (32, 64, 2, 4, 1, 32, 515, "bfloat16", True, None, None, [1, 9]),
    "k64-mha-f32": (32, 32, 1, 2, 2, 64, 67, "float32", False, None, None, [17, 33]),
    "k80-f16": (32, 64, 2, 2, 1, 80, 131, "float16", True, None, None, [40]),
    "k96-bf16-sharded": (32, 64, 2, 2, 1, 96, 67, "bfloat16", False, 30, None, [1, 50]),
    "k128-llama3": (32, 64, 2, 2, 1, 128, 67, "float16", False, None, LLAMA3, [130]),
    "k32-group3-old": (96, 32, 1, 6, 2, 32, 67, "float16", True, 40, dict(LLAMA3, factor=4.0), [70]),
}


def old_config(path):
    """As transformers 4 wrote it: rope_theta beside rope_scaling, torch_dtype, several end ids."""
    with open(path) as f:
        config = json.load(f)
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    config["eos_token_id"] = [2, 5, 7]
    with open(path, "w") as f:
        json.dump(config, f, indent=1)


def main():
    shutil.rmtree(OUTPUT, ignore_errors=True)
    for seed, (name, v) in enumerate(VARIANTS.items()):
        D, F, L, H, G, K, V, dtype, tied, shard, rope, lengths = v
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=D, intermediate_size=F, num_hidden_layers=L, num_attention_heads=H,
            num_key_value_heads=G, head_dim=K, vocab_size=V, max_position_embeddings=512,
            tie_word_embeddings=tied, rms_norm_eps=1e-5,
            rope_parameters=rope or {"rope_type": "default", "rope_theta": 1e4})
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for key, p in model.named_parameters():  # large enough for every part to matter
                p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in key else
                        torch.randn_like(p) * (2 / p.shape[1]) ** 0.5)
        directory = os.path.join(OUTPUT, name)
        model.to(getattr(torch, dtype)).save_pretrained(
            directory, max_shard_size=f"{shard}KB" if shard else "1GB")
        os.remove(os.path.join(directory, "generation_config.json"))
        if name.endswith("old"):
            old_config(os.path.join(directory, "config.json"))
        prompts = [torch.randint(V, (n,)).tolist() for n in lengths]
        write_reference(directory, prompts, 24, os.path.join(directory, "reference.bin"))


if __name__ == "__main__":
    main()
