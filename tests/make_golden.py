#!/usr/bin/env python3
"""Writes tests/golden/tiny.bin: what Hugging Face transformers computes with weights/tiny.

  python3 tests/make_golden.py             (after every change of weights/tiny/model.safetensors)

Needs PyTorch and transformers, no network, about a minute on a CPU. The model is LlamaForCausalLM
in float32 on the CPU, with the fp16 weights of weights/tiny widened to float32. It shares no code
with bs, nor with weights/tiny/make.py: it is the independent oracle for both devices.

Layout, little endian; every field but the prompt is a multiple of 4 bytes, so all stay aligned:

  char   magic[8]              "BSGOLD01"
  uint64 weights_fnv1a         64-bit FNV-1a of every byte of model.safetensors; if the weights in
                               use hash to something else, this file is stale: make it again
  uint32 n_cases
  uint32 vocab                 256
  uint32 n_greedy              64
  uint32 reserved              0
  then n_cases times:
    uint32 n                   prompt tokens, 1 .. 960
    float  fp16_floor          largest |logit difference| that fp16 activations alone make (below)
    uint8  prompt[n]           the token ids (a token is a byte), then zeros up to a multiple of 4
    float  logits[n][vocab]    after each prompt position 0 .. n-1
    uint32 greedy[n_greedy]    argmax continuation; it does NOT stop at byte 0, it goes on past it
    float  margin[n_greedy]    largest minus second largest logit where greedy[i] was chosen

greedy[i] is chosen from the logits at position n - 1 + i: greedy[0] is the argmax of logits[n-1].
Where a margin is tiny, another correct program may choose otherwise and differ from there on.
fp16_floor compares logits with a second float32 run in which every linear layer's input, and its
output where that is Q, K or V, is rounded to fp16. A correct fp16 program lands near it; a
tolerance below it cannot be met. It is far larger for text that the model never saw.
The last case ends at position 1023, the end of the context.
"""
import os
import struct

import numpy as np
import torch
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
WEIGHTS = os.path.join(HERE, "..", "weights", "tiny")
OUTPUT = os.path.join(HERE, "golden", "tiny.bin")
N_GREEDY = 64

# Lengths on both sides of 16 (a KV block), 64, 128 and 256 (an attention split); openings, middles,
# letters and text that the model never saw.
OPEN = "Once upon a time, there lived a shy fox named Mina by the sea."
LOST = (
    "Tom was a clever otter who lived in a den beside the river. He had a brass lantern and took "
    "it everywhere.\nOne winter morning the lantern was gone. Tom looked under the bed, on the "
    "roof and even inside the piano, but found only a spider.\n")
PROMPTS = [
    "M",
    "Why",
    "The small dragon",
    "Every night Nora",
    "Once upon a time,",
    "\"Is it far?\" asked Luna. \"Not",
    "Dear Otto,\nThank you for the blue kite. It came on Monday",
    OPEN + " S",
    OPEN + " She had a wooden flute and took it everywhere.\nOne spring morn",
    "int main(void) { return 0; } // \xe9\xff\x01 not a story at all",
    LOST[:150],
    LOST + "\"Where were you happiest yesterday?\" asked Wren the baker. Tom thought h",
]


def long_prompt():
    """960 tokens: several texts joined by byte 0, so that 64 more fill the context of 1024."""
    letter = "Dear Ada,\nIt has snowed here since Friday. I miss you.\nYours, Sam the mole\0"
    moon = "Edgar asked the moon for a tin bell, and the moon only yawned.\0"
    text = (letter + moon) * 5 + OPEN + " She wrote everything down.\0" + LOST
    return text.encode("latin-1")[-960:]


def fnv1a(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def to_fp16(x):
    return x.half().float()


@torch.no_grad()
def fp16_floor(model, prompt, logits):
    """The largest change of a logit when activations are stored as fp16 and summed in float32."""
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(lambda _, args: (to_fp16(args[0]),)))
            if name.endswith(("q_proj", "k_proj", "v_proj")):
                hooks.append(module.register_forward_hook(lambda _, args, out: to_fp16(out)))
    rounded = model(torch.tensor([list(prompt)]), use_cache=False).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return float(np.abs(rounded - logits).max())


@torch.no_grad()
def run_case(model, prompt):
    """prompt (bytes) -> logits [n, vocab], greedy ids, margins."""
    ids = torch.tensor([list(prompt)])
    logits = model(ids, use_cache=False).logits[0]
    greedy, margins = [], []
    last = logits[-1]
    for _ in range(N_GREEDY):  # no KV cache: every step is the plain model on the whole sequence
        first, second = torch.topk(last, 2).values.tolist()
        greedy.append(int(last.argmax()))
        margins.append(first - second)
        if len(greedy) < N_GREEDY:
            ids = torch.cat([ids, torch.tensor([[greedy[-1]]])], 1)
            last = model(ids, use_cache=False).logits[0, -1]
    return logits.numpy(), greedy, margins


def main():
    model = AutoModelForCausalLM.from_pretrained(
        WEIGHTS, dtype=torch.float32, attn_implementation="eager", local_files_only=True).eval()
    vocab = model.config.vocab_size
    with open(os.path.join(WEIGHTS, "model.safetensors"), "rb") as f:
        digest = fnv1a(f.read())
    prompts = [p.encode("latin-1") for p in PROMPTS] + [long_prompt()]
    out = [b"BSGOLD01", struct.pack("<QIIII", digest, len(prompts), vocab, N_GREEDY, 0)]
    for prompt in prompts:
        logits, greedy, margins = run_case(model, prompt)
        assert np.isfinite(logits).all() and greedy[0] == int(logits[-1].argmax())
        floor = fp16_floor(model, prompt, logits)
        out.append(struct.pack("<If", len(prompt), floor))
        out.append(prompt + b"\0" * (-len(prompt) % 4))
        out.append(logits.astype("<f4").tobytes())
        out.append(np.array(greedy, "<u4").tobytes() + np.array(margins, "<f4").tobytes())
        print(f"{len(prompt):4d} tokens, |logit| up to {np.abs(logits).max():4.1f}, "
              f"fp16 floor {floor:.4f}, smallest margin {min(margins):.4f}: "
              f"{prompt[-24:]!r} -> {bytes(greedy)!r}")
    os.makedirs(os.path.dirname(OUTPUT), exist_ok=True)
    with open(OUTPUT + ".part", "wb") as f:
        f.write(b"".join(out))
    os.replace(OUTPUT + ".part", OUTPUT)
    print(f"{OUTPUT}: {os.path.getsize(OUTPUT):,} bytes, weights {digest:016x}")


if __name__ == "__main__":
    main()
