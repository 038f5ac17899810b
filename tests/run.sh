#!/bin/sh
# Runs the test programs named on the command line, plain and under sanitizers, then the command-line tests, and adds up.
# Ends with one line: N passed, N failed.
cd "$(dirname "$0")/.." || exit 1
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"  # as bs sets it for itself: spinning threads make a busy machine crawl
passed=0
failed=0
one() {  # name, command...: shows failures, counts the "N passed, N failed" line; a crash is a failure
  name=$1
  shift
  out=$("$@" 2>&1)
  status=$?
  line=$(printf '%s\n' "$out" | tail -n 1)
  p=$(printf '%s' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\1/p')
  f=$(printf '%s' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\2/p')
  if [ -z "$p" ] || { [ $status -ne 0 ] && [ "$f" = 0 ]; }; then
    printf '%s\n' "$out" | tail -n 40
    p=${p:-0}
    f=$((${f:-0} + 1))
  elif [ "$f" != 0 ]; then
    printf '%s\n' "$out" | grep -v ' passed, ' | head -n 40
  fi
  passed=$((passed + p))
  failed=$((failed + f))
  echo "$name: $p passed, $f failed"
}
for t in "$@"; do
  one "$t" "build/$t"
  one "$t (sanitized)" "build/$t-san"
done
program=$(if [ -x bs ]; then echo ./bs; else echo ./bs-cpu; fi)
for t in test_cli test_compare test_faults test_docs; do
  one "$t (sanitized)" tests/$t.sh build/bs-san
  one "$t" tests/$t.sh "$program"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
