#!/bin/bash
# Sparse deletion under a control group's limit: 1200 MiB filled, nine of ten pages given back, then as much again in
# a second program of the same group. Huge pages always fill the holes up again and the group is killed; Ingens does not.
#   evidence/sparse.sh VM_BINARY WORKLOAD_BINARY
set -u
vm=$1 work=$2 group=/sys/fs/cgroup/memory/varve-sparse k=/sys/kernel/mm/transparent_hugepage/khugepaged
[ -d /sys/fs/cgroup/memory ] || { echo "SKIPPED: needs control groups v1 with the memory controller"; exit 0; }
old_sleep=$(cat $k/scan_sleep_millisecs) old_pages=$(cat $k/pages_to_scan)
restore() {
  echo "$old_sleep" > $k/scan_sleep_millisecs
  echo "$old_pages" > $k/pages_to_scan
  rmdir $group 2> /dev/null
}
trap restore EXIT
echo 200 > $k/scan_sleep_millisecs
echo 65536 > $k/pages_to_scan
mkdir -p $group
printf '[ingens]\nutilisation = 0.9\n' > /tmp/varve-sparse.toml
one() {
  local mode=$1
  shift
  echo 1400M > $group/memory.limit_in_bytes
  sh -c "echo \$\$ > $group/cgroup.procs; exec \"\$@\"" sh "$@" > /tmp/varve-sparse.log 2>&1 &
  local first=$!
  sleep 25
  local used=$(($(cat $group/memory.usage_in_bytes) >> 20))
  sh -c "echo \$\$ > $group/cgroup.procs; exec $work sleep 900 10" > /dev/null 2>&1
  local second=$?
  kill -0 $first 2> /dev/null && echo "$mode: group holds $used MiB after the deletion; second program of 900 MiB: exit $second, first alive" ||
    echo "$mode: group holds $used MiB after the deletion; second program of 900 MiB: exit $second, first KILLED"
  kill $first 2> /dev/null
  wait $first 2> /dev/null
  grep -h oom_kill $group/memory.oom_control 2> /dev/null | tail -1
}
one always "$work" sparse-huge 1200 60
one ingens "$vm" run --policy /tmp/varve-sparse.toml -- "$work" sparse 1200 60
