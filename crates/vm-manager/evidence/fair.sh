#!/bin/bash
# Three identical programs under a budget of huge pages for a quarter of their memory: who holds how many, over time
# (seed: Fig. 3.5). Looking gets 5 % of a core instead of 0.5 %, so that the budget is used up within the time.
#   evidence/fair.sh VM_BINARY WORKLOAD_BINARY
set -u
vm=$1 work=$2 mib=400 pids=()
trap 'kill ${pids[@]} 2> /dev/null; rm -f /tmp/varve-fair.toml' EXIT
printf 'leave = "keep"\nscan_cpu_share = 0.05\nfollow_children = false\n[ingens]\nhuge_budget = 150\npromote_batch = 8\n' > /tmp/varve-fair.toml
for n in 1 2 3; do
  "$work" random $mib 200 > "/tmp/varve-fair.$n" 2> /dev/null &
  pids+=($!)
done
sleep 6
"$vm" attach --quiet --seconds 40 --policy /tmp/varve-fair.toml "${pids[@]}" &
manager=$!
echo "seconds  huge MiB of 1, 2, 3 (budget 300 MiB, demand 3 x $mib MiB)"
for t in 3 6 9 12 15 20 25 30 35; do
  sleep 3
  echo "$t $(for p in "${pids[@]}"; do awk '/^AnonHuge/ {printf "%d ", $2/1024}' "/proc/$p/smaps_rollup"; done)"
done
wait $manager
for n in 1 2 3; do echo "program $n: median of the last seconds $(tail -8 "/tmp/varve-fair.$n" | sed 's/.*operations_per_s"://; s/,.*//' | sort -n | sed -n 4p) operations/s"; done
