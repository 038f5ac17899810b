#!/bin/sh
# bs compare from outside: streams, traces, policies, limits; what it prints, writes and refuses.
# Usage: tests/test_compare.sh PROGRAM. Ends with "N passed, N failed".
. tests/cli.sh
sim="compare --device sim:h100 --model llama-3.2-1b"
tiny="compare --device cpu --model weights/tiny"
cell() {  # policy, column of compare.csv
  awk -F, -v p="$1" -v want="$2" 'NR == 1 { for (i = 1; i <= NF; i++) c[$i] = i; next } $1 == p { print $c[want] }' \
    "$tmp/o/compare.csv"
}
holds() {  # description, arithmetic condition
  awk "BEGIN { exit !($2) }"
  ok "$1: $2" $?
}

bad 'policy' compare --policy static,static
bad 'policy' compare --policy fifo
bad 'policy' compare --policy static,
bad 'input-len' compare --input-len exp:0
bad 'input-len' compare --input-len uniform:9-3
bad 'input-len' compare --input-len lognormal:128
bad 'input-len' compare --input-len exp:128@
bad 'input-len' compare --input-len exp:nan
bad 'output-len' compare --output-len 12.5
bad 'numbers for bs sweep' sweep --input-len exp:128
bad 'requests' compare --requests 0
bad 'rate' compare --rate -1
bad 'burstiness' compare --burstiness 0
bad 'step-tokens' compare --max-batch 64 --step-tokens 32
bad 'sim:none' compare --device sim:none
bad 'needs a device that computes' generate --device sim:h100 --prompt a
bad 'context of 4096' compare --device sim:h100 --model llama-2-7b --input-len 4000 --output-len 200
bad 'is not for bs compare' compare --batches 1,2
bad 'lognormal:MEAN,SIGMA' compare --output-len lognormal:3
bad 'lengths of their own' compare --trace x --input-len 5
bad 'needs --rate' compare --burstiness 2

# Traces: both forms, any order, CRLF, extra columns; what is broken is named with its line.
printf 'TIMESTAMP,ContextTokens,GeneratedTokens\n' >"$tmp/trace"
run 1 'no request' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
printf '2023-11-16 18:15:46.5,12,3\n' >>"$tmp/trace"
run 0 'continuous *1 ' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
printf '2023-11-16 18:15:47.5,12,0\n' >>"$tmp/trace"
run 1 'trace: line 3' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
printf 'x,output_tokens,arrival_s,prompt_tokens\r\n9,4,2.5,10\r\n9,1,0.5,1\r\n9,2,0.5,20\r\n' >"$tmp/trace"
run 0 'continuous *3 ' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
grep -q '^static,0,0,1,1,' "$tmp/o/requests.csv" && grep -q '^static,1,0,20,2,' "$tmp/o/requests.csv" &&
  grep -q '^static,2,2,10,4,' "$tmp/o/requests.csv"
ok "requests by arrival, ties in the order of the file, the first at 0" $?
grep -q '^continuous,0,0,1,1,[0-9.e-]*,,[0-9.e-]*,0,finished' "$tmp/o/requests.csv"
ok "one output token has no TPOT" $?
[ "$(cell continuous n_tpot)" = 2 ] && [ "$(cell continuous n_ttft)" = 3 ]
ok "and is not among its samples" $?
printf 'arrival_s,prompt_tokens\n1,2\n' >"$tmp/trace"
run 1 'line 1: needs the columns' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
printf 'arrival_s,prompt_tokens,output_tokens\nnan,2,3\n' >"$tmp/trace"
run 1 'line 2' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
printf 'arrival_s,prompt_tokens,output_tokens\n1,2x,3\n' >"$tmp/trace"
run 1 'line 2' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
printf 'arrival_s,prompt_tokens,output_tokens\n1,2\n' >"$tmp/trace"
run 1 'line 2' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
run 1 'none: open: ' "$bs" $sim --trace "$tmp/none" --out "$tmp/o"
run 1 'not a regular file' "$bs" $sim --trace "$tmp" --out "$tmp/o"
run 1 'not a regular file' "$bs" $sim --trace /dev/zero --out "$tmp/o"
run 1 'not a text file' "$bs" $sim --trace /bin/sh --out "$tmp/o"
printf 'a\0b\n' >"$tmp/prompts"
run 1 'not a text file' "$bs" $tiny --prompts "$tmp/prompts" --out "$tmp/o"
printf 'arrival_s,prompt_tokens,output_tokens\n5,9,4\n5,9,4\n' >"$tmp/trace"
run 0 'requests of trace, all at once' "$bs" $sim --trace "$tmp/trace" --rate 20 --out "$tmp/o"
# Over the context: rejected and counted, the rest runs, nothing is cut short.
printf 'arrival_s,prompt_tokens,output_tokens\n0,4000,200\n0,10,5\n' >"$tmp/trace"
run 0 '1 rejected' "$bs" compare --device sim:h100 --model llama-2-7b --trace "$tmp/trace" --out "$tmp/o"
[ "$(cell static rejected)" = 1 ] && [ "$(cell static completed)" = 1 ]
ok "one of two rejected" $?

# All files, whole; and the phenomenon: equal lengths gain nothing, exponential ones much.
rm -rf "$tmp/o"
run 0 'exp' "$bs" $sim --requests 256 --max-batch 32 --input-len 128 --output-len exp:128@1024 --out "$tmp/o"
for f in compare.csv requests.csv compare.json schedule.png policies.png variance.png; do
  [ -s "$tmp/o/$f" ]
  ok "$f is there" $?
done
[ "$(ls "$tmp/o" | wc -l)" -eq 6 ]
ok "and nothing else" $?
head -n 1 "$tmp/o/compare.csv" | grep -q '^policy,requests,completed,rejected,output_tok_s,request_per_s,goodput_req_s,ttft_p50_ms,'
ok "compare.csv's first columns" $?
head -n 1 "$tmp/o/requests.csv" | grep -q '^policy,id,arrival_s,prompt_tokens,output_tokens,ttft_ms,tpot_ms,e2e_ms,preemptions'
ok "requests.csv's columns" $?
[ "$(wc -l <"$tmp/o/requests.csv")" -eq 769 ]
ok "a line per policy and request" $?
holds "continuous gains from spread" "$(cell continuous output_tok_s) >= 2.5 * $(cell static output_tok_s)"
holds "paged KV wastes little" "$(cell continuous kv_unused_pct) < 4"
holds "reserved KV wastes much" "$(cell static kv_unused_pct) > 50"
holds "continuous computes no padding" "$(cell continuous padding_pct) == 0"
"$bs" $sim --requests 96 --max-batch 32 --input-len 128 --output-len 128 --out "$tmp/o" >"$tmp/out"
holds "equal lengths: as good" "$(cell continuous output_tok_s) / $(cell static output_tok_s) > 0.95 && \
  $(cell continuous output_tok_s) / $(cell static output_tok_s) < 1.10"
holds "and no padding either" "$(cell static padding_pct) == 0"

# A device that can carry the rate, and one that cannot: the queue shows in TTFT.
"$bs" $sim --rate 20 --requests 200 --out "$tmp/o" >"$tmp/out"
slow=$(cell continuous ttft_p95_ms)
"$bs" $sim --rate 20000 --requests 2000 --out "$tmp/o" >"$tmp/out"
holds "overload waits" "$(cell continuous ttft_p95_ms) > 10 * $slow"
[ "$(cell continuous completed)" = 2000 ]
ok "and answers everyone" $?
"$bs" $sim --rate 20000 --requests 2000 --timeout 0.5 --out "$tmp/o" >"$tmp/out"
holds "time-outs are counted" "$(cell continuous timed_out) > 0 && $(cell continuous completed) + $(cell continuous timed_out) == 2000"

# What a tester once broke. Slots are never used more than fully, whatever the lengths; nothing prints as nan; a rate
# of one in 1,000 s ends; charts that a run does not make do not stay; who timed out is not among the finished.
for a in "--input-len 1 --output-len 1" "--output-len 1" "--max-batch 1 --requests 20" "--timeout 0.5" "--requests 40 --rate 0.001"; do
  timeout 60 "$bs" $sim $a --out "$tmp/o" >"$tmp/out"
  holds "slots with $a" "$(cell continuous occupancy_pct) <= 100.01 && $(cell static occupancy_pct) <= 100.01"
done
run 1 'no request was answered' "$bs" $sim --kv-tokens 16 --out "$tmp/o"
! grep -q 'nan' "$tmp/out" && ! [ -e "$tmp/o/variance.png" ]
ok "nobody served: no nan, no variance.png" $?
[ "$(cell static rejected)" = 256 ] && [ -z "$(cell static output_tok_s)" ]
ok "and all rejected" $?
printf '\357\273\277"arrival_s","prompt_tokens","output_tokens"\r\n"0","4","2"\r\n' >"$tmp/trace"
run 0 'continuous *1 ' "$bs" $sim --trace "$tmp/trace" --out "$tmp/a/b/o"
printf 'arrival_s,prompt_tokens,output_tokens\n0,4,2\n3e10,4,2\n' >"$tmp/trace"
run 1 '1e9 is the most' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
run 1 'none: open: ' "$bs" $tiny --prompts "$tmp/none" --out "$tmp/o"
"$bs" compare --help >/dev/full 2>"$tmp/out"
[ $? -eq 1 ]
ok "a help that cannot be written" $?
# What a reader of the code found. Prompts of a skewed distribution whose mean is over the longest that was drawn; a cap on
# outputs far above what anybody asks for, in little memory; more slots than the default's step has tokens; times of another zone.
run 0 'outputs lognormal' "$bs" compare --device cpu --model tests/golden/variants/k80-f16 --requests 8 --max-batch 8 \
  --input-len lognormal:100,5@110 --output-len 2 --seed 1 --out "$tmp/o"
run 0 'outputs lognormal' timeout 60 "$bs" compare --device sim:h100 --model llama-3-8b --requests 32 --input-len lognormal:1000,5@8000 \
  --output-len 20 --seed 1 --out "$tmp/o"
little="compare --device sim:mem=2.38G,bw=1e12,rate=1e14 --model llama-3.2-1b --max-batch 2 --requests 4 --input-len 100"
run 0 'continuous *4 ' "$bs" $little --output-len 3000 --step-tokens 64 --policy continuous --max-new-tokens 100000 --out "$tmp/o"
run 0 'up to 8000 at once, 8000 tokens a step' "$bs" $sim --requests 100 --max-batch 8000 --out "$tmp/o"
"$bs" compare --device sim:h100 --model weights/tiny --requests 8 --out "$tmp/o" >"$tmp/out"
[ "$(cell continuous n_tpot)" = 8 ]
ok "a simulated device knows no text: lengths are given" $?
bad 'needs a device that computes' compare --device sim:h100 --model weights/tiny --prompts "$tmp/prompts"
run 0 'No variance.png: limits decide' "$bs" $sim --requests 40 --max-total-tokens 3000 --out "$tmp/o"
bad 'prompts of its own' compare --trace "$tmp/trace" --prompts "$tmp/prompts"
for zone in Z +00:00; do
  printf 'TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5%s,12,3\n' $zone >"$tmp/trace"
  run 0 'continuous *1 ' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"
done
printf 'TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5+09:00,12,3\n' >"$tmp/trace"
run 1 'line 2' "$bs" $sim --trace "$tmp/trace" --out "$tmp/o"

# Ctrl-C: what was there stays until a policy is complete; what is half done is nowhere.
"$bs" $sim --requests 64 --out "$tmp/c" >/dev/null
cp "$tmp/c/compare.csv" "$tmp/before"
timeout --foreground -s INT 0.3 "$bs" $tiny --requests 400 --out "$tmp/c" >"$tmp/out" 2>&1
got=$?
[ $got -eq 124 ] && cmp -s "$tmp/c/compare.csv" "$tmp/before" && ! ls "$tmp/c"/*.tmp >/dev/null 2>&1
ok "interrupted before anything was finished: status $got, old results stay" $?

# On real weights: tight KV preempts, and nobody's answer changes.
run 0 'same tokens under each policy' "$bs" $tiny --requests 12 --max-batch 6 --output-len 40 --kv-tokens 144 --out "$tmp/o"
holds "preempted" "$(cell continuous preemptions) > 0"
[ "$(cell continuous completed)" = 12 ]
ok "all answered" $?
printf 'The fox\nLong ago\n' >"$tmp/prompts"
run 0 'same tokens' "$bs" $tiny --requests 6 --max-batch 3 --output-len 30 --prompts "$tmp/prompts" --temperature 0 --policy continuous,static --out "$tmp/o"
run 0 'out of memory: the batch is' "$bs" compare --device sim:mem=2.6G,bw=1e12,rate=1e14 --model llama-3.2-1b --max-batch 512 --step-tokens 2048 --requests 64 --output-len 64 --out "$tmp/o"
[ "$(cell continuous completed)" = 64 ]
ok "a smaller batch answers everyone" $?

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
