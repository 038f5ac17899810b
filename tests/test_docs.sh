#!/bin/sh
# What the documents say against what the program does, and the sources against their own map and limits.
# Usage: tests/test_docs.sh PROGRAM [ROOT]; ROOT (default: here) lets a broken copy be checked. Ends with "N passed, N failed".
if [ "$1" = --number ]; then  # a map's lines follow the sections, so they are numbered in turn
  awk 'FNR == NR { if (/^\/\/ ---- / || /^#include "parts\//) at[++n] = FNR; next }
    /^#include/ { over = 1 } /The map/ { on = 1 }
    on && !over && /^\/\/   *([0-9]+ +)?[^ ]+( [^ ]+)*   *[^ ]/ { sub(/^\/\/ *([0-9]+ +)?/, ""); $0 = sprintf("// %5d  %s", at[++i], $0) }
    { print }' bs.cu bs.cu >bs.cu.numbered && mv bs.cu.numbered bs.cu
  exit
fi
bs=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
set -- "$bs" "${2:-.}"
. tests/cli.sh
cd "$2" || exit 1
docs="README.md README.zh-CN.md LABS.md"
sources="bs.cu model.h parts/*.h"
none() {  # description; fails if there are lines on stdin, which say where. In a pipe, so it counts in a file.
  cat >"$tmp/out"
  if [ -s "$tmp/out" ]; then
    echo "FAILED: $1"
    head -n 12 "$tmp/out"
    echo failed >>"$tmp/counts"
  else
    echo passed >>"$tmp/counts"
  fi
}
"$bs" --help >"$tmp/help"

# Every ./bs line in a document parses. With --help appended nothing runs, and what must agree is not asked; so where no
# hardware is needed the line runs until it wants to write, and must have nothing else to complain of.
sed -n 's/^\.\/bs\( .*\)\{0,1\}$/\1/p' $docs | sed 's/ *#.*//' | sort -u >"$tmp/commands"
while IFS= read -r line; do  # the shell's own syntax: quotes and all
  case $line in
    *sim:* | ' knee '*) (eval "\"\$bs\" $line --out /dev/null/none") 2>&1 | tee "$tmp/out" | grep -q '^bs: .*output directory' ;;
    *) (eval "\"\$bs\" $line --help") >"$tmp/out" 2>&1 ;;
  esac
  ok "documents: ./bs$line" $?
done <"$tmp/commands"
[ "$(wc -l <"$tmp/commands")" -ge 20 ]
ok "documents: at least 20 commands were found" $?
grep -o -- '`\./bs[^`]*`' $docs NOTES.md | sed 's/^[^`]*`\.\/bs\(-cpu\)\{0,1\}//; s/`$//' | sort -u >"$tmp/inline"
while IFS= read -r line; do
  (eval "\"\$bs\" $line --help") >"$tmp/out" 2>&1
  ok "documents, in a sentence: ./bs$line" $?
done <"$tmp/inline"

# Figures of LABS.md and of NOTES.md's table of claims: a simulated GPU gives them to the digit.
h200="--device sim:h200 --model llama-3.2-1b"
h100="--device sim:h100 --model llama-3-8b"
while IFS='|' read -r words line; do
  case $bs in *-san) continue ;; esac  # slow to draw, and the same figures
  "$bs" $line --out "$tmp/figures" >"$tmp/out" 2>&1
  grep -q -e "$words" "$tmp/out"
  ok "documents, figures: '$words' in ./bs $line" $?
done <<END
 7373 .*memory (weights)|plan --model llama-3-8b --device sim:a100-80g
Stopped by memory: batch 128 did not fit: KV needs 78.25 GiB|plan --model llama-3-8b --device sim:a100-80g --input-len 4000 --output-len 1000
4096 *1.250 *11 |plan --model llama-2-70b --device sim:h100
4096 *[0-9.]* *246 |plan --model llama-2-70b --device sim:h100 --gpus 4 --kv fp8
 13 *8 *477|plan --model llama-2-70b --device sim:h100 --gpus 4 --kv-heads 1,8,64 --input-len 2048 --output-len 2048
this stream allows 4.26x|compare $h200 --requests 512 --input-len 128 --output-len exp:128@1024 --max-batch 32
continuous *256 *43695.7|compare $h200 --policy continuous --kv-tokens 8000
continuous *255 *6337.9|compare $h200 --policy continuous --kv-tokens 1000
Working point: batch 102,|sweep $h200 --slo-tpot 0.65 --batches 64,80,96,102,104,112,128
would break the TTFT SLO: P95 32.45 ms|sweep $h200 --slo-ttft 20
Working point: batch 128,|knee tests/data/sweep_vllm_h100_bg_llama-2-7b.csv --slo-tpot 50
Working point: batch 8,|knee tests/data/sweep_vllm_h100_bg_llama-2-7b.csv --slo-tpot 15
continuous *400 *602|compare $h100 --policy continuous --rate 4 --requests 400 --input-len 2000 --output-len 200 --step-tokens 32
continuous *1000 *6303|compare $h100 --policy continuous --requests 1000
continuous *1000 *6080|compare $h100 --policy continuous --requests 1000 --rate 60
continuous .* 29.7 |compare $h100 --policy continuous --max-total-tokens 4000
static .* 29.5 *76.0 |compare $h100
batch 8 .*KV needs 15.6|plan --model llama-2-7b --device sim:4090 --input-len 2000 --output-len 2000
END

# Options: what a document names exists; what exists is explained.
grep -oh -- '--[a-z][a-z-]*' $docs | sort -u | while read -r option; do
  grep -q -e "^  $option " "$tmp/help" || echo "$option is in no help"
done | none "documents: options exist"
sed -n 's/^  \(--[a-z-]*\)/\1 /p' "$tmp/help" | sort >"$tmp/options"
[ "$(wc -l <"$tmp/options")" -ge 30 ]
ok "--help lists its options" $?
# A name, at most one word of what it takes (capitals, alternatives, examples), then the text.
awk '{ text = NF; if ($2 ~ /^[A-Z]+$/ || $2 ~ /[|]|^[0-9]|,\.\.\./) text--; if (text < 2) print $1 " is not explained" }' \
  "$tmp/options" | none "--help explains every option"
cut -d' ' -f1 "$tmp/options" | uniq -d | none "--help: no option twice"

# Files and targets that the documents name.
for doc in $docs NOTES.md; do
  grep -o '](\([^)#]*\)' $doc | sed 's/](//' | grep -v '^http' | while read -r file; do
    [ -e "$file" ] || echo "$doc links $file"
  done
done | none "documents: links lead somewhere"
cat $docs | grep -oE '\b(weights|tests|parts|plots/h200|plots/cpu)/[A-Za-z0-9_./-]*[A-Za-z0-9_]' | sort -u | while read -r file; do
  [ -e "$file" ] || echo "$file is not there"
done | none "documents: files exist"
grep -oh '^make [a-z-]*' $docs | sort -u | cut -d' ' -f2 >"$tmp/targets"
grep -c . "$tmp/targets" | grep -qx 2
ok "READMEs: two make commands" $?
while read -r target; do
  grep -q "^$target:" Makefile
  ok "make $target is a target" $?
done <"$tmp/targets"
grep -q 'README.zh-CN.md' README.md && grep -q 'README.md' README.zh-CN.md
ok "the two READMEs link each other" $?
commands_of() { sed -n '/^```/,/^```/p' "$1" | grep -E '^(\./bs|make)' | sed 's/ *#.*//'; }
commands_of README.md >"$tmp/en"
commands_of README.zh-CN.md >"$tmp/zh"
diff "$tmp/en" "$tmp/zh" | none "the two READMEs: the same commands in the same order"
[ "$(grep -c '^## ' LABS.md)" -eq 8 ]
ok "LABS.md has eight labs" $?

# The map in bs.cu's header names each section ("// ---- Name: ...") and each part, in the order of the file, each after the
# line where it stands (checked where the map gives one; tests/test_docs.sh --number renews them).
where() {  # "line name" of every section and part
  awk '/^#include "parts\// { split($0, a, "\""); print FNR, a[2]; next }
    /^\/\/ ---- / { sub(/^\/\/ ---- /, ""); sub(/[:.,(].*/, ""); sub(/^(The|A) /, ""); print FNR, tolower($0) }' bs.cu
}
map() {  # "line name", or "- name", of every line of the map
  awk '/^#include/ { exit } /The map/ { on = 1 } !on || !/^\/\/   *[^ ]/ { next }
    { sub(/^\/\/ */, ""); n = "-" } /^[0-9]/ { n = $1; sub(/^[0-9]* */, "") }
    /^[^ ]+( [^ ]+)*   *[^ ]/ { sub(/   *.*/, ""); print n, tolower($0) }' bs.cu
}
where >"$tmp/where"
map >"$tmp/map"
[ "$(wc -l <"$tmp/map")" -ge 15 ]
ok "bs.cu: a map was found" $?
if ! grep -q '^[0-9]' "$tmp/map"; then sed -i 's/^[0-9]*/-/' "$tmp/where"; fi
diff "$tmp/map" "$tmp/where" | none "bs.cu: the map (<) and the sections (>), in order"
for part in parts/*.h; do
  [ "$(cat bs.cu model.h parts/*.h | grep -c "^#include \"\(parts/\)\?${part#parts/}\"")" -eq 1 ] || echo "$part"
done | none "each part is included exactly once"
awk '/^\/\/ ---- / { text = $0; sub(/^[^:.(]*[:.(]?/, "", text); at = FNR ": " $0; next }
  at && /^\/\/ / { text = text $0; next }
  at { if (length(text) < 20) print FILENAME ":" at; at = "" }' bs.cu model.h | none "a section opens with what it teaches"

# Limits for a reader's sake.
awk '{ gsub(/[\200-\277]/, "") } length($0) > 100 { print FILENAME ":" FNR ": " length($0) " columns" }' $sources |
  none "sources: at most 100 columns"
awk 'FNR == 1 { start = 0 } /^[A-Za-z_].*\(/ && !/;$/ { start = FNR }
  /^}$/ && start { if (FNR - start + 1 > 90) print FILENAME ":" start ": " FNR - start + 1 " lines"; start = 0 }' $sources |
  none "sources: functions of at most 90 lines"
# Results that somebody committed by accident are the usual stray.
git ls-files 2>/dev/null | cut -d/ -f1 | sort -u | grep -vxE '\.ci|\.clang-format|\.gitignore|LABS\.md|LICENSE|Makefile|NOTES\.md|README(\.zh-CN)?\.md|bs\.cu|model\.h|parts|plots|tests|weights' |
  none "nothing else is committed at the top"
for limit in bs.cu:2600 model.h:800; do
  [ "$(wc -l <"${limit%:*}")" -le "${limit#*:}" ] || echo "$limit: $(wc -l <"${limit%:*}") lines"
done | none "bs.cu and model.h keep their budgets"

passed=$((passed + $(grep -c passed "$tmp/counts")))
failed=$((failed + $(grep -c failed "$tmp/counts")))
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
