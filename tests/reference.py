"""What Hugging Face transformers computes with a checkpoint, for tests/reference.h to compare with.

write_reference(directory, prompts, n_greedy, path) loads the directory in float32 on the CPU, its
weights rounded to fp16 first, because that is what bs keeps, and writes, little endian, all fields 4
bytes:

  char   magic[8]              "BSREF001"
  uint32 n_cases, vocab, n_greedy, 0
  then n_cases times:
    uint32 n                   prompt tokens
    uint32 ids[n]
    float  logits[n][vocab]    after each prompt position
    uint32 greedy[n_greedy]    argmax continuation; it does not stop at an end token
    float  margin[n_greedy]    largest minus second largest logit where greedy[i] was chosen
"""
import os
import struct

import numpy as np
import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def write_reference(directory, prompts, n_greedy, path):
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True).eval()
    for p in model.parameters():
        p.copy_(p.half().float())
    out = [b"BSREF001", struct.pack("<4I", len(prompts), model.config.vocab_size, n_greedy, 0)]
    for prompt in prompts:
        ids = torch.tensor([prompt])
        logits = model(ids, use_cache=False).logits[0]
        assert torch.isfinite(logits).all()
        greedy, margins, last = [], [], logits[-1]
        for _ in range(n_greedy):  # no KV cache: every step is the plain model on all of the text
            first, second = torch.topk(last, 2).values.tolist()
            greedy.append(int(last.argmax()))
            margins.append(first - second)
            if len(greedy) < n_greedy:
                ids = torch.cat([ids, torch.tensor([[greedy[-1]]])], 1)
                last = model(ids, use_cache=False).logits[0, -1]
        out += [struct.pack("<I", len(prompt)), np.array(prompt, "<u4").tobytes(),
                logits.numpy().astype("<f4").tobytes(), np.array(greedy, "<u4").tobytes(),
                np.array(margins, "<f4").tobytes()]
        print(f"{os.path.basename(directory)}: {len(prompt)} tokens, logits' standard deviation "
              f"{logits.std(1).min():.2f} to {logits.std(1).max():.2f}, margins from "
              f"{min(margins):.4f}")
    with open(path, "wb") as f:
        f.write(b"".join(out))
