#!/bin/bash
# Where the time of rows of the bench goes: runs each with one side under perf, for all processes of the machine, and prints the busiest
# functions by process and thread, in Markdown. Needs `perf` and root; nothing else should run beside it.
#
#   benches/speed/profile.sh SIDE GROUP ROW...          # e.g. LibFS data overwrite "append 4096" "sequential write"
#   SPEED=path/to/built/bench TOP=12 SECONDS_EACH=8 AFTER=6 benches/speed/profile.sh ...
set -euo pipefail
cd "$(dirname "$0")/../.."
side=${1:?the side, such as LibFS}; group=${2:?the group, such as data}; shift 2
[ $# -gt 0 ] || set -- ""
speed=${SPEED:-$(cargo bench --bench speed --no-run 2>&1 | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')}
work=$(mktemp -d)
child=
cleanup() { if [ -n "$child" ]; then kill "$child" 2>/dev/null || true; wait "$child" 2>/dev/null || true; fi; rm -rf "$work"; }
trap cleanup EXIT
for row in "$@"; do
  rows=()
  [ -n "$row" ] && rows=(--rows "$row")
  "$speed" --only "$group" "${rows[@]}" --sides "$side" >"$work/out" 2>&1 &
  child=$!
  # The pools are made and memory is touched first.
  sleep "${AFTER:-6}"
  perf record -q -a -e cpu-clock -F 1999 -o "$work/perf" -- sleep "${SECONDS_EACH:-8}" 2>/dev/null
  kill -INT "$child" 2>/dev/null || true
  wait "$child" || true
  child=
  printf '\n### %s: %s %s\n\n| share of both processors | thread | function |\n| ---: | --- | --- |\n' "$side" "$group" "$row"
  perf report -q -i "$work/perf" --no-children --sort comm,sym -g none 2>/dev/null \
    | grep -v '^#' | sed -n 's/^ *\([0-9.]*%\) *\([^[]*[^ [ ]\) *\[\(.\)\] */\1|\2|\3|/p' \
    | grep -v '|swapper|' | head -n "${TOP:-12}" \
    | awk -F'|' '{ gsub(/[|`]/, "", $4); printf "| %s | %s | `%s`%s |\n", $1, $2, substr($4, 1, 90), $3 == "k" ? " (kernel)" : "" }'
  printf '\nIdle: %s\n' "$(perf report -q -i "$work/perf" --no-children --sort comm -g none 2>/dev/null | sed -n 's/^ *\([0-9.]*%\) *swapper.*/\1/p')"
done
