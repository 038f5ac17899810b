#!/bin/sh
# Runs the test programs named on the command line, plain and under sanitizers, then the command-line tests, and adds up.
# Ends with one line: N passed, N failed.
cd "$(dirname "$0")/.." || exit 1
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"  # as bs sets it for itself: spinning threads make a busy machine crawl
passed=0
failed=0
out=$(mktemp -d) || exit 1
trap 'rm -rf "$out"' EXIT
report() {  # name, file, status: shows failures, counts the "N passed, N failed" line; a crash is a failure
  line=$(tail -n 1 "$2")
  p=$(printf '%s' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\1/p')
  f=$(printf '%s' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\2/p')
  if [ -z "$p" ] || { [ "$3" -ne 0 ] && [ "$f" = 0 ]; }; then
    tail -n 40 "$2"
    p=${p:-0}
    f=$((${f:-0} + 1))
  elif [ "$f" != 0 ]; then
    grep -v ' passed, ' "$2" | head -n 40
  fi
  passed=$((passed + p))
  failed=$((failed + f))
  echo "$1: $p passed, $f failed"
}
both() {  # name, plain command, sanitized command: side by side, since each mostly uses one core
  $3 >"$out/san" 2>&1 &
  job=$!
  $2 >"$out/plain" 2>&1
  report "$1" "$out/plain" $?
  wait $job
  report "$1 (sanitized)" "$out/san" $?
}
for t in "$@"; do
  both "$t" "build/$t" "build/$t-san"
done
program=$(if [ -x bs ]; then echo ./bs; else echo ./bs-cpu; fi)
for t in test_cli test_compare test_faults test_docs; do
  both "$t" "tests/$t.sh $program" "tests/$t.sh build/bs-san"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
