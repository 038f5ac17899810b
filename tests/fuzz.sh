#!/bin/sh
# Fuzzes one loader: tests/fuzz.sh loader|tokenizer|trace|knee [seconds]. Needs clang with libFuzzer and python3 (for the seeds).
# Builds build/fuzz_NAME, keeps its findings in build/fuzz/NAME; a crash leaves build/fuzz/NAME-crash-*.
cd "$(dirname "$0")/.." || exit 1
name=${1:?which?}
seconds=${2:-1800}
mkdir -p "build/fuzz/$name"
stb=$(dirname "$(ls /usr/include/stb/stb_image_write.h .carry/stb/stb_image_write.h 2>/dev/null | head -n 1)")
clang -x c -std=c11 -O1 -g -march=native -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -w -isystem "$stb" \
  -o "build/fuzz_$name" "tests/fuzz_$name.c" -lm || exit 1
python3 tests/fuzz_seeds.py "$name" "build/fuzz/$name" "build/fuzz/$name.dict" || exit 1
exec nice -n 19 "build/fuzz_$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=256 -max_len=20000 \
  -dict="build/fuzz/$name.dict" -artifact_prefix="build/fuzz/$name-" -print_final_stats=1 "build/fuzz/$name"
