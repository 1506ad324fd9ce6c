#!/bin/bash
# Table 3.10 of the Ingens seed, scaled: Redis with KEYS objects of VALUE bytes (500,000 of 8 KB: 4 GiB), 70 % deleted at random, under no huge
# pages, huge pages always, and Varve's Ingens at 90, 70 and 50 %.
#   MODES="none always 90" evidence/redis.sh VM_BINARY [KEYS] [ROUNDS]
# VALUE is the size of an object (8000 bytes); BEFORE_ROUNDS and AFTER_ROUNDS are commands run around the rounds of GETs.
# One server of each mode is filled and emptied after the other; then all stay, and the rounds of GETs go round them, so
# that whatever changes on the machine meanwhile meets all modes alike.
# For "always" the system's setting is `always` while it fills and settles; it is put back afterwards. khugepaged is sped
# up to reach its steady state within the wait, and free memory is made whole before each server starts (caches dropped,
# memory compacted). Each server has a control group of its own: "heldMB" is what it is charged for, with the freed parts
# of broken huge pages, which no resident size shows.
set -u
vm=$1 keys=${2:-500000} rounds=${3:-40} first=${PORT:-7399} wait=${WAIT:-40} value=${VALUE:-8000}
dir=$(mktemp -d) k=/sys/kernel/mm/transparent_hugepage/khugepaged
old_sleep=$(cat $k/scan_sleep_millisecs) old_pages=$(cat $k/pages_to_scan) old_alloc=$(cat $k/alloc_sleep_millisecs)
groups=/sys/fs/cgroup/memory/varve-redis usage=memory.usage_in_bytes
[ -d /sys/fs/cgroup/memory ] || { groups=/sys/fs/cgroup/varve-redis; usage=memory.current; }
enabled=/sys/kernel/mm/transparent_hugepage/enabled
old_enabled=$(sed 's/.*\[\(.*\)\].*/\1/' $enabled)
pids=()
restore() {
  echo "$old_sleep" > $k/scan_sleep_millisecs
  echo "$old_pages" > $k/pages_to_scan
  echo "$old_alloc" > $k/alloc_sleep_millisecs
  echo "$old_enabled" > $enabled
  [ ${#pids[@]} -gt 0 ] && kill "${pids[@]}" 2> /dev/null
  wait
  rmdir $groups-* 2> /dev/null
  rm -rf "$dir"
}
trap restore EXIT
trap 'exit 1' INT TERM
for percent in 90 70 50; do
  printf 'leave = "keep"\n[ingens]\nutilisation = 0.%s\ndemote_below = 0.%s\n' "$percent" "$percent" > "$dir/$percent.toml"
done
held() { echo $(($(cat "$groups-$1/$usage") >> 20)); }
kib() { awk -v what="^$1:" '$0 ~ what {print int($2/1024)}' "/proc/$2/smaps_rollup"; }
echo "# $(uname -r), $(nproc) processors, load $(cut -d' ' -f1-3 /proc/loadavg), $keys keys of $value bytes, $(redis-server --version | cut -d' ' -f3)"
printf '%-8s %9s %8s %8s %8s\n' mode loadedMB rssMB heldMB hugeMB
declare -A redis port
next=$first
for mode in ${MODES:-none always 90 70 50}; do
  p=$next next=$((next + 1)) port[$mode]=$p
  cli() { redis-cli -p "$p" "$@"; }
  server="redis-server --port $p --bind 127.0.0.1 --save '' --appendonly no --disable-thp no --dir $dir --daemonize no"
  echo "$old_enabled" > $enabled
  echo 1000 > $k/scan_sleep_millisecs
  echo 65536 > $k/pages_to_scan
  echo 1000 > $k/alloc_sleep_millisecs
  sync
  echo 1 > /proc/sys/vm/drop_caches
  echo 1 > /proc/sys/vm/compact_memory
  case $mode in
    none) eval "exec $server" > "$dir/log.$mode" 2>&1 & ;;
    always)
      echo always > $enabled
      eval "exec $server" > "$dir/log.$mode" 2>&1 &
      ;;
    *) eval "exec $vm run --policy $dir/$mode.toml -- $server" > "$dir/log.$mode" 2>&1 & ;;
  esac
  pids+=($!)
  for _ in $(seq 100); do cli ping 2> /dev/null | grep -q PONG && break; sleep 0.2; done
  redis[$mode]=$(cli info server | tr -d '\r' | sed -n 's/^process_id://p')
  taskset -acp 0 "${redis[$mode]}" > /dev/null
  mkdir -p "$groups-$mode"
  echo "${redis[$mode]}" > "$groups-$mode/cgroup.procs"
  step=10000
  for from in $(seq 0 $step $((keys - 1))); do
    cli eval "local v=string.rep('x',ARGV[3]) for i=ARGV[1],ARGV[1]+ARGV[2]-1 do redis.call('set',string.format('key:%012d',i),v..i) end" 0 "$from" $step "$value" > /dev/null
  done
  sleep 8
  loaded=$(kib Rss "${redis[$mode]}")
  for from in $(seq 0 $step $((keys - 1))); do
    cli eval "math.randomseed(ARGV[1]+7) for i=ARGV[1],ARGV[1]+ARGV[2]-1 do if math.random()<0.7 then redis.call('del',string.format('key:%012d',i)) end end" 0 "$from" $step > /dev/null
  done
  sleep "$wait"
  printf '%-8s %9s %8s %8s %8s\n' "$mode" "$loaded" "$(kib Rss "${redis[$mode]}")" "$(held "$mode")" "$(kib AnonHugePages "${redis[$mode]}")"
done
echo "$old_enabled" > $enabled
echo "$old_sleep" > $k/scan_sleep_millisecs
echo "$old_pages" > $k/pages_to_scan
echo "$old_alloc" > $k/alloc_sleep_millisecs
eval "${BEFORE_ROUNDS:-:}"
for round in $(seq "$rounds"); do
  for mode in ${MODES:-none always 90 70 50}; do
    taskset -c 1 redis-benchmark -p "${port[$mode]}" -n 60000 -c 16 -r "$keys" --precision 3 GET key:__rand_int__ 2> /dev/null | tr '\r' '\n' > "$dir/bench"
    rate=$(sed -n 's/.*throughput summary: \([0-9.]*\).*/\1/p' "$dir/bench")
    at() { awk -v want="$1" '/% <=/ {gsub("%","",$1); if ($1+0>=want) {print $3; exit}}' "$dir/bench"; }
    echo "$rate $(at 50) $(at 90) $(at 99) $(at 99.9)" >> "$dir/rounds.$mode"
  done
done
eval "${AFTER_ROUNDS:-:}"
median() { sort -n | awk '{v[NR]=$1} END {print (NR%2) ? v[(NR+1)/2] : (v[NR/2]+v[NR/2+1])/2}'; }
column() { cut -d' ' -f"$2" "$dir/rounds.$1" | median; }
echo "medians of $rounds rounds of 60000 GETs by 16 clients (servers on processor 0, clients on 1); load $(cut -d' ' -f1-3 /proc/loadavg)"
printf '%-8s %9s %8s %8s %8s %8s %8s %8s %8s\n' mode GET/s p50ms p90ms p99ms p99.9ms rssMB heldMB hugeMB
for mode in ${MODES:-none always 90 70 50}; do
  printf '%-8s %9s %8s %8s %8s %8s %8s %8s %8s\n' "$mode" "$(column "$mode" 1)" "$(column "$mode" 2)" "$(column "$mode" 3)" \
    "$(column "$mode" 4)" "$(column "$mode" 5)" "$(kib Rss "${redis[$mode]}")" "$(held "$mode")" "$(kib AnonHugePages "${redis[$mode]}")"
done
for mode in ${MODES:-none always 90 70 50}; do
  [ "$mode" = always ] || [ ! -f "$dir/rounds.always" ] ||
    echo "$mode GET/s in % of always, round by round: $(paste -d' ' "$dir/rounds.$mode" "$dir/rounds.always" |
      awk '{printf "%.2f\n", $1/$6*100}' | sort -n | awk '{v[NR]=$1} END {print "median " v[int((NR+1)/2)] ", quartiles " v[int((NR+3)/4)] " and " v[int((3*NR+1)/4)]}')"
done
for mode in ${MODES:-none always 90 70 50}; do echo "$mode GET/s by round: $(cut -d' ' -f1 "$dir/rounds.$mode" | tr '\n' ' ')"; done
for mode in ${MODES:-none always 90 70 50}; do redis-cli -p "${port[$mode]}" shutdown nosave > /dev/null 2>&1; done
wait
grep -h -e 'varve vm:.*made' -e cost "$dir"/log.* || true
pids=()
