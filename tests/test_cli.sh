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

bad 'needs a FILE' knee
bad 'percentile' knee tests/data/vllm_summary.csv --percentile 42
bad 'batches' knee tests/data/vllm_summary.csv --batches 1
bad 'runs nothing' knee tests/data/vllm_summary.csv --device cpu
bad 'with --model' knee tests/data/vllm_summary.csv --device sim:h100
bad 'unknown option' knee tests/data/vllm_summary.csv tests/data/vllm_summary.csv
bad 'device sim:h100' plan --model llama-2-7b
bad 'device sim:h100' plan --model llama-2-7b --device cpu
bad '4060-laptop' plan --device sim:h101
bad 'rate=40e12' plan --device sim:mem=8G
bad 'gpus' plan --device sim:h100 --gpus 0
bad "kv '" plan --device sim:h100 --kv int4
bad 'kv fp8 needs a GPU' $tiny --kv fp8
bad 'kv fp8 needs a GPU' compare $tiny --kv fp8
bad 'kv fp8 needs a GPU' generate $tiny --kv fp8 --prompt a
bad 'do not divide among them' plan --device sim:h100 --model llama-2-70b --gpus 7
run 1 'no number of cards' "$bs" plan --device sim:h100 --model llama-3-8b --vram 1G --out "$tmp/o"
"$bs" generate --prompt a --json --output-len 2 2>/dev/null | head -n 1 | grep -q '^{"prompt"'
ok "generate's output is texts alone" $?
run 0 '4 suffice' "$bs" plan --device sim:4060-laptop --model llama-3-8b --kv fp8 --out "$tmp/o"
bad 'divide the 32 query heads' plan --device sim:h100 --model llama-2-7b --kv-heads 1,5
bad 'context of 4096' plan --device sim:h100 --model llama-2-7b --input-len 4000 --output-len 97

run 1 'neither a directory nor a preset' "$bs" --device cpu --model no-such-model
run 1 'config.json' "$bs" --device cpu --model tests
run 1 'none: open: ' "$bs" generate $tiny --prompts "$tmp/none"
run 1 'does not fit' "$bs" --device cpu --model llama-2-70b --vram 1G --out "$tmp/o"
run 1 'does not fit: weights need' "$bs" --device cpu --model llama-2-70b --out "$tmp/o"
! ls "$tmp/o"/*.tmp >/dev/null 2>&1
ok "a run that never started leaves no .tmp" $?
if ! [ -e /dev/nvidia0 ]; then run 2 'matmul' "$bs" --matmul gemv; fi
run 0 'no batch above 1 gains' "$bs" sweep --device sim:h100 --model llama-3.2-1b --matmul gemv --batches 1,4,16 --out "$tmp/g"
run 0 'batch 16 is the largest' "$bs" sweep --device sim:h100 --model llama-3.2-1b --matmul mma --batches 1,4,16 --out "$tmp/g"
run 0 'no batch above 8 gains' "$bs" sweep --device sim:h100 --model llama-3.2-1b --matmul reuse --batches 1,8,64 --out "$tmp/g"
# What was simulated stays so, and has its roofline.
run 0 'Working point' "$bs" knee "$tmp/g/sweep.csv" --out "$tmp/k"
! grep -q 'Prediction' "$tmp/out" && grep -q '^Simulated' "$tmp/out" && grep -q '"source": "simulated"' "$tmp/k/config.json" && [ -s "$tmp/k/memory.png" ]
ok "bs knee of a simulated sweep says so" $?
run 2 'the file has a roofline already' "$bs" knee "$tmp/g/sweep.csv" --model llama-2-70b --device sim:h200 --out "$tmp/k"
if ! [ -e /dev/nvidia0 ]; then run 1 'no ' "$bs" --device cuda; fi

# A sweep leaves exactly its files, complete.
run 0 'Working point' "$bs" $small --batches 1,2,4 --out "$tmp/o"
for f in sweep.csv config.json throughput.png latency.png memory.png roofline.png frontier.png step.png summary.png; do
  [ -s "$tmp/o/$f" ]
  ok "$f is there" $?
done
[ "$(ls "$tmp/o" | wc -l)" -eq 9 ]
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
  timeout --foreground -s INT $wait "$bs" --device cpu --model smollm2-135m --batches 1,2,4,8,16,32,64,128 --input-len 64 --output-len 64 --out "$tmp/c" >"$tmp/out" 2>&1
  got=$?
  [ $got -eq 124 ] || [ $got -eq 130 ]
  ok "interrupted after $wait s: status $got" $?
  if [ -f "$tmp/c/sweep.csv" ]; then
    rows=$(($(wc -l <"$tmp/c/sweep.csv") - 1))
    [ $rows -eq 0 ] || { [ -s "$tmp/c/summary.png" ] && [ -s "$tmp/c/config.json" ]; }
    ok "$rows rows kept, and drawn" $?
    grep -q '"stopped_by": "\(interrupt\|jump\)"' "$tmp/c/config.json"
    ok "and said to be interrupted, unless latency jumped before" $?
  fi
done
signals="TERM HUP"
sh -c 'kill -HUP $$' 2>/dev/null && signals=TERM  # ignored here: these tests run under nohup
for signal in $signals; do
  "$bs" --device cpu --model smollm2-135m --batches 1,2,4,8,16,32,64,128 --input-len 64 --output-len 64 --out "$tmp/c" >"$tmp/out" 2>&1 &
  pid=$!
  sleep 1
  kill -$signal $pid
  wait $pid
  [ $? -eq 130 ]
  ok "SIG$signal ends like Ctrl-C" $?
done
"$bs" --device cpu --model smollm2-135m --batches 1,2,4,8,16,32,64,128 --input-len 64 --output-len 64 --out "$tmp/c" >"$tmp/out" 2>&1 &
pid=$!
sleep 1.5
run 1 'another bs writes' "$bs" $small --batches 1 --out "$tmp/c"
kill -TERM $pid
kill -HUP $pid
wait $pid
[ $? -eq 130 ]
ok "two signals of two kinds end it at once" $?
(ulimit -f 20; "$bs" --device sim:h200 --quiet --out "$tmp/grow") >/dev/null 2>"$tmp/out"
[ $? -eq 1 ] && grep -q '^bs: .*cannot write' "$tmp/out"
ok "a file that may not grow is an error like others" $?
(trap '' HUP; exec "$bs" $tiny --input-len 8 --output-len 32 --batches 1 --repeats 100 --out "$tmp/c") >"$tmp/out" 2>&1 &
pid=$!
sleep 0.3
kill -HUP $pid 2>/dev/null
wait $pid
ok "under nohup a hang-up is nothing" $?

h200="--quiet --device sim:h200 --model llama-3.2-1b --step-tokens 8"
run 2 'batches 64 needs --step-tokens' "$bs" $h200 --batches 1,64 --out "$tmp/few"
run 0 '' "$bs" $h200 --out "$tmp/few"
[ "$(wc -l <"$tmp/few/sweep.csv")" -eq 5 ]
ok "by default no batch is larger than a step" $?
run 0 '' "$bs" plan --device sim:h200 --model llama-3.2-1b --step-tokens 8 --batches 1,8 --out "$tmp/few2"
ttft() { awk -F, -v b="$2" '$1 == b { printf "%.1f", $10 }' "$1/sweep.csv"; }
[ "$(ttft "$tmp/few" 1)" = "$(ttft "$tmp/few2" 1)" ] && [ "$(ttft "$tmp/few" 8)" = 52.8 ] && [ "$(ttft "$tmp/few2" 8)" = 52.8 ]
ok "a plan reads chunked prompts as a sweep does" $?
awk -F, 'NR == 2 { exit !($36 >= $25) }' "$tmp/few/sweep.csv"
ok "without reuse no step is faster" $?
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

# knee: anyone's table to advice and the same files, without the charts that have no data; nothing old stays there.
rm -rf "$tmp/k" && mkdir "$tmp/k" && : >"$tmp/k/memory.png"
run 0 'Working point: batch 192, 3687.0 tok/s' "$bs" knee tests/data/sweep_vllm_h100_bg_llama-2-7b.csv --out "$tmp/k"
grep -q '  256 .* stop: jump' "$tmp/out"
ok "the walk names the stop" $?
[ "$(cd "$tmp/k" && echo *)" = "config.json frontier.png latency.png summary.png sweep.csv throughput.png" ]
ok "knee's files: $(cd "$tmp/k" && echo *)" $?
run 0 'Working point: batch 32,' "$bs" knee tests/data/sweep_vllm_h100_bg_llama-2-7b.csv --percentile 99 --slo-tpot 25 --out "$tmp/k"
run 0 'No working point' "$bs" knee tests/data/vllm_summary.csv --slo-tpot 5 --out "$tmp/k"
printf 'batch,batch,output_tok_s,tpot_p95_ms\n1,2,10,5\n' >"$tmp/twice.csv"
run 1 'a column twice' "$bs" knee "$tmp/twice.csv" --out "$tmp/k"
printf 'batch,output_tok_s,tpot_p95_ms\n0x1,10,5\n' >"$tmp/hex.csv"
run 1 "batch '0x1'" "$bs" knee "$tmp/hex.csv" --out "$tmp/k"
run 1 'no row has tpot_p95_ms' "$bs" knee tests/data/vllm_summary.csv --percentile 95 --out "$tmp/k"
run 1 'columns: missing batch' "$bs" knee tests/run.sh --out "$tmp/k"
run 1 'No such file' "$bs" knee "$tmp/none.csv"
run 1 'output-len choose' "$bs" knee tests/data/llama_batched_bench.jsonl --out "$tmp/k"
bad 'are for bs knee with --device sim' knee tests/data/llama_batched_bench.jsonl --gpus 4
printf 'batch,output_tok_s,tpot_p95_ms,status,reason\n1,10,5,ok,\n8,,,oom,"one\nline ""two"" \033[31mred"\n' >"$tmp/odd.csv"
run 0 "did not fit: one line 'two'  \[31mred" "$bs" knee "$tmp/odd.csv" --out "$tmp/k"
run 0 "did not fit: one line 'two'" "$bs" knee "$tmp/k/sweep.csv" --out "$tmp/k2"
run 0 '2 suffice' "$bs" plan --model llama-3-8b --device sim:mem=17G,bw=1e12,rate=1e14 --kv-heads 1,8 --out "$tmp/k2"
huge="plan --model llama-3.2-1b --device sim:mem=1000000G,bw=1e12,rate=1e14 --batches 32768"
run 0 'Working point' "$bs" $huge --input-len 131071 --output-len 1 --out "$tmp/k2"
! grep -q -e ',-' "$tmp/k2/sweep.csv"
ok "nothing overflows" $?
run 0 'Working point' "$bs" $huge --input-len 1 --output-len 131071 --out "$tmp/k2"
run 0 'Working point: batch 4,' "$bs" knee tests/data/llama_batched_bench.jsonl --input-len 128 --out "$tmp/k"
grep -q 'max-model-len 256"' "$tmp/k/config.json"
ok "lengths of the file reach the flags" $?
# With a model and a GPU, the roofline stands beside the measurements. Batch 1 of Llama-2-7B: 13.2 GB at 3.35 TB/s are 3.96 ms.
h100="--model llama-2-7b --device sim:h100"
run 0 '^    1 .* 3[67]\.[0-9]  ok' "$bs" knee tests/data/sweep_vllm_h100_bg_llama-2-7b.csv $h100 --input-len 200 --output-len 323 --out "$tmp/k"
[ -s "$tmp/k/roofline.png" ]
ok "roofline.png is drawn" $?
run 1 'output-len do' "$bs" knee tests/data/sweep_vllm_h100_bg_llama-2-7b.csv $h100 --out "$tmp/k"
rm -rf "$tmp/k"
# Our own table gives the same advice as the run that wrote it, and stays as it is.
"$bs" $small --batches 1,2,4 --out "$tmp/k" >"$tmp/sweep.out" 2>/dev/null
cp "$tmp/k/sweep.csv" "$tmp/before.csv"
run 0 "$(grep '^Working point' "$tmp/sweep.out")" "$bs" knee "$tmp/k/sweep.csv" --out "$tmp/k"
cmp -s "$tmp/k/sweep.csv" "$tmp/before.csv" && [ -s "$tmp/k/memory.png" ]
ok "knee leaves the file that it reads alone" $?

# plan: no GPU, no weights; the article's figures.
run 0 '4096 *1.250 *11 ' "$bs" plan --model llama-2-70b --device sim:h100 --out "$tmp/p"
grep -q '^2 cards, as ideal tensor parallelism' "$tmp/out" && grep -q '320.0 KiB per token' "$tmp/out"
ok "cards and KV per token" $?
[ "$(ls "$tmp/p" | wc -l)" -eq 9 ] && grep -q '"source": "simulated"' "$tmp/p/config.json"
ok "plan's files" $?
grep -q 'tensor-parallel-size 2' "$tmp/p/config.json"
ok "plan's flags know the cards" $?
run 1 'weights 128.5 GiB.*it needs --gpus 2' "$bs" plan --model llama-2-70b --device sim:h100 --gpus 1 --out "$tmp/p"
run 1 'no number of cards' "$bs" plan --model llama-2-7b --device sim:h100 --vram 100M --out "$tmp/p"
run 0 'Simulated: tiny on mem=8G' "$bs" plan --model weights/tiny --device sim:mem=8G,bw=256e9,rate=40e12 --out "$tmp/p"
run 1 'config.json' "$bs" plan --model no-such-model --device sim:h100 --out "$tmp/p"
run 0 '^       1  *16.0 ' "$bs" plan --model llama-2-7b --device sim:a100-80g --kv-heads 1,8,32 --out "$tmp/p"
od -An -tx1 -N8 "$tmp/p/kv_heads.png" | grep -q '89 50 4e 47 0d 0a 1a 0a'
ok "kv_heads.png is a PNG" $?
run 0 'fp8' "$bs" plan --device sim:4060-laptop --kv fp8 --out "$tmp/p"
run 0 'memory (KV)' "$bs" --device sim:h200 --model llama-3-8b --batches 64 --input-len 4032 --kv fp8 --out "$tmp/p8"
grep -q '"dtype": "fp16, KV cache fp8"' "$tmp/p8/config.json"
ok "config.json says fp8" $?

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
