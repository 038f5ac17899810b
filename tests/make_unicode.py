#!/usr/bin/env python3
"""Prints the tables of letters and numbers in parts/tokenizer.h, asked character by character of
the regular expressions that the tokenizers library splits with (0.23.3: Unicode 16).

  python3 tests/make_unicode.py        needs tokenizers, half a minute

A table is the list of code points where membership changes, each as its distance from the last in
base 26, most significant digit first: small letters have more digits after them, capitals end."""
import textwrap

from tokenizers import Regex, pre_tokenizers


def base26(n):
    digits = chr(ord("A") + n % 26)
    while n >= 26:
        n //= 26
        digits = chr(ord("a") + n % 26) + digits
    return digits


def main():
    for name in "LN":
        split = pre_tokenizers.Split(Regex(rf"\p{{{name}}}"), "isolated")
        inside, last, out = False, 0, ""
        for c in range(0x110000):
            member = not 0xd800 <= c < 0xe000 and \
                len(split.pre_tokenize_str(f"\x01{chr(c)}\x01")) == 3
            if member != inside:
                out += base26(c - last)
                inside, last = member, c
        print(name)
        for line in textwrap.wrap(out, 94):
            print(f'    "{line}"')


if __name__ == "__main__":
    main()
