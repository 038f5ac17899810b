#!/bin/sh
# The program from outside: what it prints, which files it leaves, its exit status, for good and for bad input.
# Usage: tests/test_cli.sh PROGRAM. Ends with "N passed, N failed".
. tests/cli.sh
tiny="--device cpu --model weights/tiny"
small="$tiny --input-len 8 --output-len 4 --repeats 1"

run 0 'sweep' "$bs" --help
run 0 'TPOT' "$bs" --help
run 0 '^bs [0-9]' "$bs" --version
bad 'bogus' --bogus
bad 'bogus' bogus
bad 'input-len' --input-len 0
bad 'input-len' --input-len -3
bad 'input-len' --input-len 12x
bad 'input-len' --input-len 99999999999999999999
bad 'output-len' --output-len
bad 'batches' --batches 1,2,x
bad 'batches' --batches 0
bad 'batches' --batches 4,4
bad 'percentile' --percentile 42
bad 'vram' --vram 4Q
bad 'watermark' --watermark 0
bad 'slo-tpot' --slo-tpot -1
bad 'device' --device tpu
bad 'temperature' sweep --temperature 1
bad 'prompt' generate
bad 'prompt' generate --prompt a --prompts b
bad 'batches' generate --prompt a --batches 1
bad 'context of 1024' $tiny --input-len 1000 --output-len 100
bad 'context of 1024' generate $tiny --prompt a --output-len 1024
bad 'vocabulary of 256' generate --device cpu --model cpu-90m --prompt a
bad 'empty' generate $tiny --prompt ''

run 1 'neither a directory nor a preset' "$bs" --device cpu --model no-such-model
run 1 'config.json' "$bs" --device cpu --model tests
run 1 'cannot read' "$bs" generate $tiny --prompts "$tmp/none"
run 1 'does not fit' "$bs" --device cpu --model llama-2-70b --vram 1G --out "$tmp/o"
run 1 'does not fit: weights need' "$bs" --device cpu --model llama-2-70b --out "$tmp/o"
! ls "$tmp/o"/*.tmp >/dev/null 2>&1
ok "a run that never started leaves no .tmp" $?
if ! [ -e /dev/nvidia0 ]; then run 2 'matmul' "$bs" --matmul gemv; fi
if ! [ -e /dev/nvidia0 ]; then run 1 'no ' "$bs" --device cuda; fi

# A sweep leaves exactly its files, complete.
run 0 'Working point' "$bs" $small --batches 1,2,4 --out "$tmp/o"
for f in sweep.csv config.json throughput.png latency.png memory.png roofline.png frontier.png summary.png; do
  [ -s "$tmp/o/$f" ]
  ok "$f is there" $?
done
[ "$(ls "$tmp/o" | wc -l)" -eq 8 ]
ok "and nothing else" $?
[ "$(wc -l <"$tmp/o/sweep.csv")" -eq 4 ]
ok "sweep.csv: a header and three rows" $?
head -n 1 "$tmp/o/sweep.csv" | grep -q '^batch,input_len,output_len,repeats,status,reason,output_tok_s,user_tok_s,prefill_tok_s,ttft_p50_ms,'
ok "sweep.csv's first columns" $?
# The four memory parts add up to what is used, within 1%, in every row.
awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) c[$i] = i; next }
  { s = $c["mem_weights_mib"] + $c["mem_kv_mib"] + $c["mem_work_mib"] + $c["mem_other_mib"]; u = $c["mem_used_mib"]
    if (u <= 0 || s < 0.99 * u || s > 1.01 * u || $c["mem_other_mib"] < 0) bad = 1 }
  END { exit bad || NR < 2 }' "$tmp/o/sweep.csv"
ok "memory parts add up" $?
grep -q '"working_batch": [0-9]' "$tmp/o/config.json"
ok "config.json names a working batch" $?
od -An -tx1 -N8 "$tmp/o/summary.png" | grep -q '89 50 4e 47 0d 0a 1a 0a'
ok "summary.png is a PNG" $?

# Batches that do not fit get a row with the reason, the rest runs, and the files of the run before are replaced whole.
run 0 'skipped: KV needs' "$bs" --device cpu --model smollm2-135m --vram 800M --batches 1,4096 --input-len 8 --output-len 4 --repeats 1 --out "$tmp/o"
grep -q '^4096,.*skipped' "$tmp/o/sweep.csv"
ok "the skipped row is in the CSV" $?

# Places that cannot be written: an error before any work, and what was there survives.
cp "$tmp/o/sweep.csv" "$tmp/before.csv"
if [ "$(id -u)" -ne 0 ]; then
  chmod a-w "$tmp/o"
  run 1 'cannot write' "$bs" $small --batches 1 --out "$tmp/o"
  chmod u+w "$tmp/o"
fi
run 1 'cannot' "$bs" $small --batches 1 --out /proc/none
: >"$tmp/file"
run 1 'cannot' "$bs" $small --batches 1 --out "$tmp/file"
mkdir "$tmp/full" && ln -s /dev/full "$tmp/full/sweep.csv.tmp"
run 1 'cannot write' "$bs" $small --batches 1 --out "$tmp/full"
cmp -s "$tmp/o/sweep.csv" "$tmp/before.csv"
ok "earlier results survive" $?

# Ctrl-C: exit 130, finished rows kept and drawn, at several moments. A subshell, since sh ignores SIGINT for '&' jobs.
for wait in 0.4 1.5 3; do
  rm -rf "$tmp/c"
  timeout -s INT $wait "$bs" --device cpu --model smollm2-135m --batches 1,2,4,8,16,32,64,128 --input-len 64 --output-len 64 --out "$tmp/c" >"$tmp/out" 2>&1
  got=$?
  [ $got -eq 124 ] || [ $got -eq 130 ]
  ok "interrupted after $wait s: status $got" $?
  if [ -f "$tmp/c/sweep.csv" ]; then
    rows=$(($(wc -l <"$tmp/c/sweep.csv") - 1))
    [ $rows -eq 0 ] || { [ -s "$tmp/c/summary.png" ] && [ -s "$tmp/c/config.json" ]; }
    ok "$rows rows kept, and drawn" $?
  fi
done
"$bs" --device cpu --model smollm2-135m --batches 1,2,4,8,16,32,64,128 --input-len 64 --output-len 64 --out "$tmp/c" >"$tmp/out" 2>&1 &
pid=$!
sleep 1
kill -TERM $pid
wait $pid
[ $? -eq 130 ]
ok "SIGTERM ends like Ctrl-C" $?

grep -q 'interrupted' "$tmp/c/config.json" || ! [ -f "$tmp/c/config.json" ]
ok "an interrupted sweep says so" $?
"$bs" generate $tiny --prompt a --output-len 2 >/dev/full 2>"$tmp/out"
[ $? -eq 1 ]
ok "lost output is a failure" $?

# generate: text ends by itself, JSON is one object per line, the same request gives the same text in any company.
run 0 'Once upon a time' "$bs" generate $tiny --prompt 'Once upon a time'
"$bs" generate $tiny --json --temperature 0.7 --prompt 'The dragon' >"$tmp/alone"
"$bs" generate $tiny --json --temperature 0.7 --prompt 'The dragon' --prompt 'M' --prompt 'Long ago' >"$tmp/three"
[ "$(head -n 1 "$tmp/three")" = "$(cat "$tmp/alone")" ]
ok "a sampled text does not depend on its batch" $?
[ "$(grep -c '^{"prompt": ".*", "text": ".*", "ids": \[.*\], "finish": "eos"}$' "$tmp/three")" -eq 3 ]
ok "three JSON lines that end by themselves" $?
"$bs" generate $tiny --json --output-len 3 --prompt 'Once' | grep -q '"finish": "length"'
ok "cut at --output-len" $?
printf 'Dear \n\nLong ago\n' >"$tmp/prompts"
[ "$("$bs" generate $tiny --json --prompts "$tmp/prompts" | wc -l)" -eq 2 ]
ok "prompts from a file, empty lines skipped" $?
[ "$("$bs" generate $tiny --seed 1 --temperature 1 --json --prompt M)" != "$("$bs" generate $tiny --seed 2 --temperature 1 --json --prompt M)" ]
ok "the seed matters" $?

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
