#!/usr/bin/env python3
"""Writes tests/golden/tokenizers/: 2,000 texts in many scripts (corpus.bin, a NUL after each) and
three small byte-level BPE tokenizers trained on them by the tokenizers library, each with what the
library makes of every text.

  python3 tests/make_tokenizers.py         needs tokenizers, no network, a few seconds

NAME/ids.bin, little endian: for each text uint32 FNV-1a of its ids as 4 bytes each, and uint32 FNV-1a
of the bytes that they decode to, special tokens left out."""
import json
import os
import random
import struct

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, \
    trainers

HERE = os.path.dirname(os.path.abspath(__file__))
OUTPUT = os.path.join(HERE, "golden", "tokenizers")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
WORDS = """the of and to in that it's we'll they'd don't I'm you've she's WE'RE HE'S n't 'tis o'clock
batch size throughput latency memory tokens per second GPU KV-cache fp16 2026 3.14159 1,024 0x7f 1st
Größe Straße über naïve façade garçon coûte déjà Ångström señor ¿Qué? año Łódź český příliš žluťoučký
привет мир скорость памяти Ελληνικά γλώσσα מילה שלום عربي كلمة السرعة हिन्दी भाषा नमस्ते ไทย ภาษา 한국어
배치 크기 日本語 バッチ サイズ 批量大小 显存 吞吐量 延迟 的 了 。 ， ！ ኢትዮጵያ მსოფლიო Հայերեն ગુજરાતી
தமிழ் বাংলা ລາວ ភាសា ተስፋ ٣٤٥ १२३ ௧௨௩ Ⅷ ½ ² ㊿ 𝟘𝟙 😀 👩‍👩‍👧 🇩🇪 ❤️ … – — « » “quoted” ‘single’ €100 £5
int main(void) { return a[i]++; } // /* */ #include <stdio.h> == != <= >= && || -> => ::std:: x_y_z
<|endoftext|> <|im_start|> <|im_end|> <|im_start <tag> &amp; \\n \\u0041 @user #tag $HOME %d ^_^ ~ ` |
""".split()
GAPS = [" "] * 30 + ["  ", "   ", "\t", "\n", "\n\n", " \n", "\n ", "\r\n", "\r", "\u00a0", "\u3000",
                     "\u2003 ", "\x85", "\v", "\f", "", "", "-", ".", ", ", "\u200b", "\ufeff"]
SCRIPTS = [(0x20, 0x7f), (0xa0, 0x250), (0x370, 0x590), (0x590, 0x780), (0x900, 0xe00),
           (0xe00, 0x1200), (0x1200, 0x1800), (0x1d00, 0x2400), (0x2400, 0x2c00), (0x3000, 0x3200),
           (0x4e00, 0x9fff), (0xa000, 0xd7a4), (0xf900, 0xffff), (0x10000, 0x10600),
           (0x1d400, 0x1d800), (0x1f300, 0x1fa00), (0x1, 0x20)]


def make_corpus(n=2000):
    rng = random.Random(5)
    texts = []
    for i in range(n):
        text = ""
        for _ in range(rng.randint(1, 7)):
            kind = rng.random()
            if kind < 0.85:
                text += rng.choice(WORDS)
            elif kind < 0.92:
                text += str(rng.randrange(10 ** rng.randint(1, 9)))
            else:
                low, high = rng.choice(SCRIPTS)
                text += "".join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 4)))
            text += rng.choice(GAPS)
        texts.append(text if i % 3 else text.strip() or "x")
    return texts


def fnv1a(data):
    h = 0x811C9DC5
    for byte in data:
        h = (h ^ byte) * 0x01000193 & 0xFFFFFFFF
    return h


def write_ids(tokenizer, texts, path):
    # The library puts U+FFFD where tokens cut a character; bytes are what we compare. A text's own
    # tokens cut nothing, so the two are the same.
    with open(path, "wb") as f:
        for text in texts:
            ids = tokenizer.encode(text).ids
            said = tokenizer.decode(ids, skip_special_tokens=True).encode()
            f.write(struct.pack("<2I", fnv1a(struct.pack(f"<{len(ids)}I", *ids)), fnv1a(said)))


def build(name):
    t = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name != "llama3")
    first = {"gpt2": [], "smollm2": [pre_tokenizers.Digits(individual_digits=True)],
             "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")]}[name]
    t.pre_tokenizer = pre_tokenizers.Sequence(first + [byte_level]) if first else byte_level
    t.decoder = decoders.ByteLevel()
    return t


def main():
    os.makedirs(OUTPUT, exist_ok=True)
    texts = make_corpus()
    with open(os.path.join(OUTPUT, "corpus.bin"), "wb") as f:
        f.write(b"".join(t.encode() + b"\0" for t in texts))
    for name in ["gpt2", "smollm2", "llama3"]:
        t = build(name)
        t.train_from_iterator(texts, trainers.BpeTrainer(
            vocab_size=640, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if name != "gpt2" else []))
        if name == "gpt2":  # one that is text, and one that a longer one begins with
            t.add_tokens([AddedToken("<tag>", normalized=False), AddedToken("<ta", normalized=False)])
        if name == "llama3":
            t.post_processor = processors.Sequence([
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<|endoftext|> $A", pair="<|endoftext|> $A $B",
                                              special_tokens=[("<|endoftext|>", 0)])])
        directory = os.path.join(OUTPUT, name)
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, "tokenizer.json")
        t.save(path, pretty=False)
        if name == "smollm2":  # as older versions write them
            with open(path) as f:
                data = json.load(f)
            data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
            with open(path, "w") as f:
                json.dump(data, f)  # with \\u escapes
        write_ids(t, texts, os.path.join(directory, "ids.bin"))


if __name__ == "__main__":
    main()
