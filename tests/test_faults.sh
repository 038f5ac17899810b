#!/bin/sh
# Section 10 of the design, row by row: what happens when things go wrong. test_cli.sh and test_compare.sh have the rows for
# usage errors and for traces. Usage: tests/test_faults.sh PROGRAM. Ends with "N passed, N failed".
. tests/cli.sh
sanitized=$(case $bs in *-san) echo yes ;; esac)
small="sweep --device cpu --model weights/tiny --input-len 8 --output-len 4 --repeats 1"
m=$tmp/model
fresh() {
  chmod -R u+w "$m" 2>/dev/null
  rm -rf "$m"
  cp -r weights/tiny "$m"
}
patch() {  # file, offset, bytes as printf writes them
  printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}
end() {  # size of a file
  wc -c <"$1"
}
sweep_of() {  # words: what a sweep of the damaged model says
  fails "$1" sweep --device cpu --model "$m" --out "$tmp/never"
}

# Row 1: usage.
bad 'matmul' sweep --device cpu --matmul gemv
bad 'given twice' sweep --seed 1 --seed 2
bad 'not for bs generate' generate --prompt a --slo-tpot 3
bad 'input-len' sweep --input-len 4294967297
bad 'seed' sweep --seed -0
bad 'vram' sweep --vram 1e9G
bad 'write it as' sweep --quiet=yes
bad 'write it as' sweep --batches --quiet

# Row 2: too long for the model.
bad 'exceeds.*context of 1024' generate --device cpu --model weights/tiny --prompt "$(printf '%01000d' 0)" --output-len 25

# Row 3: missing, truncated, corrupt, oversized, hostile weights and config. The file, the place, the reason.
fresh
rm "$m/config.json"
sweep_of 'model/config.json: open: No such file'
mkfifo "$m/config.json"
sweep_of 'model/config.json: open: not a regular file'
rm "$m/config.json" && mkdir "$m/config.json"
sweep_of 'model/config.json: open: not a regular file'
rmdir "$m/config.json" && : >"$m/config.json"
sweep_of 'model/config.json: open: empty'
printf '{"model_type": "llama",' >"$m/config.json"
sweep_of 'model/config.json: JSON: broken'
awk 'BEGIN { for (i = 0; i < 100000; i++) printf "{\"a\":["; print "" }' >"$m/config.json"
sweep_of 'model/config.json: JSON: broken'
truncate -s 6G "$m/config.json"
sweep_of 'model/config.json: JSON: broken, or over 20000000 bytes'
while read -r key change; do
  fresh
  sed -i "$change" "$m/config.json"
  sweep_of "config.json: $key: "
done <<'END'
model_type s/"llama"/"qwen2"/
hidden_act s/"silu"/"gelu"/
attention_bias s/"attention_bias": *false/"attention_bias":true/
sliding_window s/{/{"sliding_window":4096,/
num_local_experts s/{/{"num_local_experts":8,/
quantization_config s/{/{"quantization_config":[],/
hidden_size s/"hidden_size": *[0-9]*/"hidden_size":1e99/
rope_type s/"rope_scaling": *null/"rope_scaling":{"rope_type":"yarn","factor":4}/
END
fresh
rm "$m/model.safetensors"
sweep_of 'model.safetensors: open: No such file'
fresh
truncate -s 1000000 "$m/model.safetensors"
sweep_of 'model.safetensors: .*: must be .* in the file'
truncate -s 100 "$m/model.safetensors"
sweep_of 'model.safetensors: header: is cut off'
fresh
patch "$m/model.safetensors" 0 '\377\377\377\377\377\377\377\177'
sweep_of 'model.safetensors: header: is cut off'
fresh
patch "$m/model.safetensors" 8 '['
sweep_of 'model.safetensors: JSON: broken'
fresh
patch "$m/model.safetensors" $(($(end "$m/model.safetensors") - 2)) '\377\177'
sweep_of 'model.safetensors: .*: \[[0-9]*, [0-9]*\] is .*nan: fp16 holds'
patch "$m/model.safetensors" $(($(end "$m/model.safetensors") - 2)) '\000\374'
sweep_of 'model.safetensors: .*: \[[0-9]*, [0-9]*\] is -inf: fp16 holds'
fresh
printf '{"weight_map": {"model.embed_tokens.weight": "../../etc/passwd"}}' >"$m/model.safetensors.index.json"
sweep_of 'weight_map: model.embed_tokens.weight: must be in one of'
fresh
printf '{"model": {"type": "Unigram"}}' >"$m/tokenizer.json"
fails 'tokenizer.json: model: type: must be "BPE", not "Unigram"' generate --device cpu --model "$m" --prompt a
printf '{"model": {' >"$m/tokenizer.json"
fails 'tokenizer.json: JSON: broken' generate --device cpu --model "$m" --prompt a
! [ -e "$tmp/never" ]
ok "a model that does not load leaves no output directory" $?

# Row 4: no GPU.
if ! [ -e /dev/nvidia0 ]; then
  fails 'no ' sweep --device cuda --model weights/tiny
  run 0 'device: the CPU, because there is no' "$bs" ${small#sweep --device cpu} --batches 1 --out "$tmp/o"
fi

# Row 5: memory. An address-space limit makes allocations fail although the budget allows them: a row says so, or one line.
kb=$(sed -n 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo)
if [ -n "$sanitized" ] || [ "$kb" -lt 6000000 ]; then
  echo "skipped: failing allocations (a sanitizer's address space, or too small a machine)"
else
  (ulimit -v 2000000 && "$bs" sweep --device cpu --model cpu-90m --batches 1,2048 --input-len 32 --output-len 32 --step-tokens 2048 \
    --out "$tmp/oom") >"$tmp/out" 2>&1
  [ $? -eq 0 ] && grep -q 'B=2048 oom: out of memory, although' "$tmp/out" && grep -q '^1,.*,ok,' "$tmp/oom/sweep.csv" &&
    grep -q '^2048,.*,oom,' "$tmp/oom/sweep.csv" && [ -s "$tmp/oom/summary.png" ]
  ok "an allocation that fails is a row, and the sweep goes on" $?
  for limit in 110 130 160 200 250 300 400; do
    (ulimit -v ${limit}000 && "$bs" sweep --device cpu --model cpu-90m --batches 1,64 --input-len 8 --output-len 4 \
      --out "$tmp/oom") >"$tmp/stdout" 2>"$tmp/out"
    got=$?
    [ $got -eq 0 ] || { [ $got -eq 1 ] && grep -q '^bs: ' "$tmp/out"; } || grep -q 'libgomp' "$tmp/out"
    ok "$limit MB of address space: status $got" $?
  done
  (ulimit -v 2000000 && "$bs" generate --device cpu --model weights/tiny --prompt a --output-len 8) >"$tmp/out" 2>&1
  ok "and 2 GB are plenty for a text" $?
fi

# Row 6: places that cannot be written, disks that fill up. What an earlier run left survives, and nothing half done stays.
run 0 'Working point' "$bs" $small --batches 1 --out "$tmp/o"
cp -r "$tmp/o" "$tmp/before"
for f in config.json throughput.png summary.png; do
  ln -sf /dev/full "$tmp/o/$f.tmp"
  run 1 "o/$f: cannot write: No space left on device" "$bs" $small --batches 1 --out "$tmp/o"
  cmp -s "$tmp/o/$f" "$tmp/before/$f" && ! ls "$tmp/o" | grep -q tmp
  ok "the old $f survives, and no .tmp stays" $?
done
"$bs" $small --batches 1 --out "$tmp/o" >/dev/full 2>"$tmp/out"
[ $? -eq 1 ] && grep -q 'standard output: cannot write' "$tmp/out"
ok "a table that nobody got is a failure" $?
mkdir "$tmp/disk"
if mount -t tmpfs -o size=256k none "$tmp/disk" 2>/dev/null; then
  cp "$tmp/before/sweep.csv" "$tmp/disk/"
  run 1 'cannot write: No space left on device' "$bs" $small --batches 1 --out "$tmp/disk"
  ls "$tmp/disk" | grep -q tmp
  [ $? -ne 0 ] && [ -s "$tmp/disk/sweep.csv" ]
  ok "a disk that fills up while charts are drawn keeps the table" $?
  dd if=/dev/zero of="$tmp/disk/rest" bs=1k 2>/dev/null
  cp "$tmp/disk/sweep.csv" "$tmp/kept.csv"
  run 1 'cannot write: No space left on device' "$bs" $small --batches 1 --out "$tmp/disk"
  cmp -s "$tmp/disk/sweep.csv" "$tmp/kept.csv"
  ok "a full disk: the old table survives" $?
  rm "$tmp/disk/rest" && mount -o remount,ro "$tmp/disk"
  run 1 'sweep.csv.tmp: cannot write: Read-only file system' "$bs" $small --batches 1 --out "$tmp/disk"
  run 1 'cannot make the output directory: Read-only' "$bs" $small --batches 1 --out "$tmp/disk/new"
  umount "$tmp/disk"
else
  echo "skipped: mounting a small disk needs root"
fi

# Row 7: Ctrl-C while texts are written, at several moments (test_cli.sh has it for a sweep).
for wait in 0.05 0.3 1; do
  timeout --foreground --preserve-status -s INT $wait "$bs" generate --device cpu --model weights/tiny --json --temperature 2 --output-len 1000 \
    $(for i in 1 2 3 4 5 6 7 8; do echo "--prompt $i"; done) >"$tmp/out" 2>&1
  got=$?
  [ $got -eq 0 ] || [ $got -eq 130 ]
  ok "generate, interrupted after $wait s: status $got" $?
  [ $got -ne 130 ] || ! [ -s "$tmp/out" ] || ! grep -v '^bs: tiny: interrupted while\|"finish": "\(eos\|interrupted\)"}$' "$tmp/out" >/dev/null
  ok "texts that were cut say so" $?
done

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
