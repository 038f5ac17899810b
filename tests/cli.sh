# What the command-line tests share: . tests/cli.sh PROGRAM sets bs and tmp; ok, run and bad count in passed and failed.
bs=$1
tmp=$(mktemp -d) || exit 1
trap 'chmod -R u+w "$tmp"; rm -rf "$tmp"' EXIT
passed=0
failed=0
ok() {  # description, condition's exit status
  if [ "$2" -eq 0 ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAILED: $1"
    [ -f "$tmp/out" ] && head -n 12 "$tmp/out"
  fi
}
run() {  # wanted status, words that must appear in one line of output, command...
  want=$1
  words=$2
  shift 2
  "$@" >"$tmp/out" 2>&1
  got=$?
  [ $got -eq "$want" ] && grep -q -e "$words" "$tmp/out"
  ok "status $got, not $want, or no '$words': $*" $?
}
refused() {  # status, words, arguments...: one line on stderr that has the words, nothing on stdout
  want=$1
  words=$2
  shift 2
  "$bs" "$@" >"$tmp/stdout" 2>"$tmp/out"
  got=$?
  [ $got -eq "$want" ] && [ "$(wc -l <"$tmp/out")" -eq 1 ] && ! [ -s "$tmp/stdout" ] && grep -q -e "$words" "$tmp/out"
  ok "status $got, wanted $want and one line with '$words': $*" $?
}
bad() {  # words, arguments...: bad usage
  refused 2 "$@"
}
fails() {  # words, arguments...: fails while running
  refused 1 "$@"
}
