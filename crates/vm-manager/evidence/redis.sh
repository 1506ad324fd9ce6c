#!/bin/bash
# Table 3.10 of the Ingens seed, scaled: Redis with KEYS objects of 8 KB (4 GiB), 70 % deleted at random, under no huge
# pages, huge pages always, and Varve's Ingens at 90, 70 and 50 %.
#   evidence/redis.sh VM_BINARY [KEYS]
# For "always" the system's setting is `always` while it runs; it is put back afterwards. khugepaged is sped up to reach
# its steady state within the wait.
set -u
vm=$1 keys=${2:-500000} port=${PORT:-7399} wait=${WAIT:-40}
dir=$(mktemp -d) k=/sys/kernel/mm/transparent_hugepage/khugepaged
old_sleep=$(cat $k/scan_sleep_millisecs) old_pages=$(cat $k/pages_to_scan)
enabled=/sys/kernel/mm/transparent_hugepage/enabled
old_enabled=$(sed 's/.*\[\(.*\)\].*/\1/' $enabled)
pid=
restore() {
  echo "$old_sleep" > $k/scan_sleep_millisecs
  echo "$old_pages" > $k/pages_to_scan
  echo "$old_enabled" > $enabled
  [ -n "$pid" ] && kill "$pid" 2> /dev/null
  rm -rf "$dir"
}
trap restore EXIT
echo 1000 > $k/scan_sleep_millisecs
echo 65536 > $k/pages_to_scan
for percent in 90 70 50; do
  printf '[ingens]\nutilisation = 0.%s\ndemote_below = 0.%s\n' "$percent" "$percent" > "$dir/$percent.toml"
done
cli() { redis-cli -p "$port" "$@"; }
server="redis-server --port $port --bind 127.0.0.1 --save '' --appendonly no --disable-thp no --dir $dir --daemonize no"
echo "# $(uname -r), $(nproc) processors, load $(cut -d' ' -f1-3 /proc/loadavg), $keys keys of 8 KB, $(redis-server --version | cut -d' ' -f3)"
printf '%-10s %9s %9s %9s %9s %8s %8s %8s %8s\n' mode loadedMB rssMB hugeMB GET/s p50ms p90ms p99ms p99.9ms
for mode in ${MODES:-none always 90 70 50}; do
  case $mode in
    none) eval "exec -a redis $server" > "$dir/log" 2>&1 & ;;
    always)
      echo always > $enabled
      eval "exec -a redis $server" > "$dir/log" 2>&1 &
      ;;
    *) eval "$vm run --quiet --policy $dir/$mode.toml -- $server" > "$dir/log" 2>&1 & ;;
  esac
  pid=$!
  for _ in $(seq 100); do cli ping 2> /dev/null | grep -q PONG && break; sleep 0.2; done
  redis=$(cli info server | tr -d '\r' | sed -n 's/^process_id://p')
  step=10000
  for from in $(seq 0 $step $((keys - 1))); do
    cli eval "local v=string.rep('x',8000) for i=ARGV[1],ARGV[1]+ARGV[2]-1 do redis.call('set',string.format('key:%012d',i),v..i) end" 0 "$from" $step > /dev/null
  done
  sleep 8
  loaded=$(awk '/^Rss/ {print int($2/1024)}' "/proc/$redis/smaps_rollup")
  for from in $(seq 0 $step $((keys - 1))); do
    cli eval "math.randomseed(ARGV[1]+7) for i=ARGV[1],ARGV[1]+ARGV[2]-1 do if math.random()<0.7 then redis.call('del',string.format('key:%012d',i)) end end" 0 "$from" $step > /dev/null
  done
  sleep "$wait"
  rss=$(awk '/^Rss/ {print int($2/1024)}' "/proc/$redis/smaps_rollup")
  huge=$(awk '/^AnonHuge/ {print int($2/1024)}' "/proc/$redis/smaps_rollup")
  for round in 1 2 3; do
    redis-benchmark -p "$port" -n 150000 -c 16 -r "$keys" --precision 3 GET key:__rand_int__ 2> /dev/null | tr '\r' '\n' > "$dir/bench"
    rate=$(sed -n 's/.*throughput summary: \([0-9.]*\).*/\1/p' "$dir/bench")
    p() { awk -v want="$1" '/percentile/ {f=1} /% <=/ {gsub("%","",$1); if ($1+0>=want && !d[want]++) {print $3; exit}}' "$dir/bench"; }
    printf '%-10s %9s %9s %9s %9s %8s %8s %8s %8s\n' "$mode" "$loaded" "$rss" "$huge" "$rate" "$(p 50)" "$(p 90)" "$(p 99)" "$(p 99.9)"
  done
  cli shutdown nosave > /dev/null 2>&1
  wait "$pid"
  pid=
  echo "$old_enabled" > $enabled
done
