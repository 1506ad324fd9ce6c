#!/bin/bash
# What calls that do not concern the mount cost under `varve run` and without it, by turns: docs/adr/0006.
#
#   VARVE=path/to/varve ROUNDS=3 benches/calls/calls.sh
. "$(dirname "$0")/../../tests/conformance/common.sh"

find_varve
cc -O2 -o "$work/calls" "$root/benches/calls/calls.c"
make_pool --nvm shm:64M --ssd 0 --hdd 0
start_daemon
start_mount
for _ in $(seq "${ROUNDS:-3}"); do
  "$work/calls" >>"$work/plain"
  "$varve" run --mount "$mnt" -- "$work/calls" >>"$work/run"
done
stop_mount
stop_daemon
say "nanoseconds a call, the best of ${ROUNDS:-3} rounds; $(uname -r), load $(cut -d' ' -f1 /proc/loadavg)"
say ""
say "| call | without | under varve run |"
say "| --- | ---: | ---: |"
awk -F'\t' '{ side = FILENAME ~ /run$/; if (!(($1, side) in best) || $2 < best[$1, side]) best[$1, side] = $2; if (!side && !seen[$1]++) names[++n] = $1 }
  END { for (i = 1; i <= n; i++) printf "| %s | %.1f | %.1f |\n", names[i], best[names[i], 0], best[names[i], 1] }' "$work/plain" "$work/run"
