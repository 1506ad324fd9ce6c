#!/bin/bash
# Slow-down of a program that reads MIB of memory at random, with and without the manager, alternating within one run.
#   evidence/overhead.sh VM_BINARY WORKLOAD_BINARY [MIB] [ROUNDS]
# "base": base pages, the manager looks and decides but changes nothing (nothing can be gained: the worst case).
# "huge": default policy, after it made its huge pages. Cost is the manager's own report.
#
# Counted are operations in a second of the program's own processor time, so that other programs on the machine, which
# take time from it, do not count; what the manager takes is added from its report. What is left is what looking does to
# the program itself: access bits cleared and looked up again.
set -u
vm=$1 work=$2 mib=${3:-4096} rounds=${4:-8}
dir=$(mktemp -d)
trap 'kill $pid 2> /dev/null; rm -rf "$dir"' EXIT
printf 'dry_run = true\nleave = "keep"\n' > "$dir/base.toml"
printf 'leave = "keep"\n' > "$dir/huge.toml"
echo "# $(uname -r), $(nproc) processors, load $(cut -d' ' -f1-3 /proc/loadavg), $mib MiB read at random"
"$work" random "$mib" 100000 > "$dir/rate" 2> /dev/null &
pid=$!
while [ ! -s "$dir/rate" ]; do sleep 1; done
median() { sort -n | awk '{v[NR]=$1} END {print (NR%2) ? v[(NR+1)/2] : (v[NR/2]+v[NR/2+1])/2}'; }
since() { tail -n +"$1" "$dir/rate" | tail -n +2 | sed 's/.*://; s/}//' ; }
for mode in ${MODES:-base huge}; do
  [ $mode = huge ] && "$vm" attach --seconds 45 --policy "$dir/huge.toml" "$pid" 2>&1 | tail -2
  : > "$dir/on"; : > "$dir/off"; : > "$dir/ratio"
  for round in $(seq "$rounds"); do
    at=$(($(wc -l < "$dir/rate") + 1)); sleep 8; off=$(since "$at" | median); since "$at" >> "$dir/off"
    at=$(($(wc -l < "$dir/rate") + 1))
    "$vm" attach --seconds 8 --policy "$dir/$mode.toml" "$pid" 2>&1 | grep cost >> "$dir/cost.$mode"
    on=$(since "$at" | median); since "$at" >> "$dir/on"
    awk -v a="$off" -v b="$on" 'BEGIN {printf "%.2f\n", (a-b)/a*100}' >> "$dir/ratio"
  done
  echo "$mode: median operations a processor second off $(median < "$dir/off"), on $(median < "$dir/on"); slow-down by round, %: $(tr '\n' ' ' < "$dir/ratio")"
  echo "$mode: slow-down, mean of rounds $(awk '{s+=$1} END {printf "%.2f", s/NR}' "$dir/ratio") %, median $(median < "$dir/ratio") %; of the medians over all seconds $(awk -v a="$(median < "$dir/off")" -v b="$(median < "$dir/on")" 'BEGIN {printf "%.2f", (a-b)/a*100}') %"
  echo "$mode: manager's cost: $(tail -1 "$dir/cost.$mode")"
done
grep -h -E 'AnonHuge|^Rss' "/proc/$pid/smaps_rollup"
