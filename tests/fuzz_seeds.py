#!/usr/bin/env python3
"""Seeds and a dictionary for tests/fuzz.sh: fuzz_seeds.py NAME FOLDER DICTIONARY."""
import glob
import json
import os
import re
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "golden")


def read(path):
    with open(path, "rb") as f:
        return f.read()


def tiny_weights(dtype, size):
    header, at = {}, 0
    for name, shape in [("embed_tokens", [2, 32]), ("norm", [32])] + [
            ("layers.0." + n, s) for n, s in
            [("input_layernorm", [32]), ("post_attention_layernorm", [32])] +
            [(n, [32, 32]) for n in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                     "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
                                     "mlp.down_proj"]]]:
        n = size * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"model.{name}.weight"] = {"dtype": dtype, "shape": shape,
                                          "data_offsets": [at, at + n]}
        at += n
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + b"\x3c" * at, list(header)


def loader_seeds():
    for path in glob.glob(os.path.join(GOLDEN, "variants", "*", "config.json")):
        yield b"\0" + read(path)
    for dtype, size in [("F16", 2), ("BF16", 2), ("F32", 4)]:
        data, names = tiny_weights(dtype, size)
        if len(data) < 20000:
            yield b"\1" + data
        yield b"\2" + json.dumps({"metadata": {}, "weight_map": {
            n: "model.safetensors" for n in names}}).encode()


def tokenizer_seeds():
    for path in glob.glob(os.path.join(GOLDEN, "tokenizers", "*", "tokenizer.json")):
        t = json.loads(read(path))
        vocab = t["model"]["vocab"]
        keep = {k for k, v in vocab.items() if v < 300}
        t["model"]["vocab"] = {k: v for k, v in vocab.items() if k in keep}
        merges = [m.split(" ") if isinstance(m, str) else m for m in t["model"]["merges"]]
        merges = [m for m in merges if {m[0], m[1], m[0] + m[1]} <= keep]
        for form in [merges, [" ".join(m) for m in merges]]:
            t["model"]["merges"] = form
            for ascii_only in [True, False]:
                yield b"\0" + json.dumps(t, ensure_ascii=ascii_only).encode()
    texts = read(os.path.join(GOLDEN, "tokenizers", "corpus.bin")).split(b"\0")
    for i, text in enumerate(texts[:300]):
        yield bytes([2 * (i % 3) + 1]) + text


def trace_seeds():
    yield b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n" \
        b"2023-11-16 18:15:50.9951690,396,109\n"
    yield b"arrival_s,prompt_tokens,output_tokens\r\n0.5,1,2\r\n0.25,100,7\r\n\r\n1e3,5,5"
    yield b"x,output_tokens,arrival_s,prompt_tokens\n,3,1,2\n"


def knee_seeds():
    for path in glob.glob(os.path.join(HERE, "data", "*")):
        yield b"".join(read(path).splitlines(True)[:4])
    yield b"batch,output_tok_s,tpot_p95_ms,status,reason\n1,10,5,ok,\n2,19,5.1,ok,\n4,,,skipped," \
        b"\"KV needs 9, 6 left\"\n"


SEEDS = {"loader": loader_seeds, "tokenizer": tokenizer_seeds, "trace": trace_seeds,
         "knee": knee_seeds}
SOURCES = {"loader": "parts/loader.h", "tokenizer": "parts/tokenizer.h", "trace": "bs.cu",
           "knee": "parts/interop.h"}


def main():
    name, folder, dictionary = sys.argv[1:]
    for i, seed in enumerate(SEEDS[name]()):
        with open(os.path.join(folder, f"seed-{i}"), "wb") as f:
            f.write(seed)
    source = read(os.path.join(HERE, "..", SOURCES[name])).decode()
    words = set(re.findall(r'"([a-zA-Z0-9_.]{3,30})"', source)) | {"null", "true", "1e308", "NaN"}
    with open(dictionary, "w") as f:
        f.writelines(f'"\\"{w}\\""\n"{w}"\n' for w in sorted(words))


if __name__ == "__main__":
    main()
