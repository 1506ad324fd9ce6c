#!/bin/bash
# Slow-down of a program that reads MIB of memory at random, by paired windows (examples/vm_paired.rs).
#   PHASES="..." evidence/overhead.sh EXAMPLES_DIRECTORY [MIB]
# control  nothing is switched: what the instrument reports of nothing
# base     base pages, at rest; the manager looks and decides but changes nothing, so that nothing can be gained
# onecore  the same, with program and manager on one processor
# damon    as base, with the kernel's DAMON thread switched on and off along
# start    base pages, the first second of a manager
# making   base pages become huge ones: the first four seconds of the default policy (leaving splits them again)
# huge     default policy, at rest, after it made its huge pages
# clock    MULTI-CLOCK under pressure without end: its fast tier is given half of the memory, and nothing moves
# The program is on processor 0; the manager on 1, but for `onecore`.
set -u
dir=$1 mib=${2:-4096} tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
printf 'dry_run = true\nleave = "keep"\n' > "$tmp/look.toml"
printf 'leave = "keep"\n' > "$tmp/keep.toml"
printf 'dry_run = true\nhuge_pages = false\n[[tier]]\nnodes = [0]\nlimit_mib = %d\n[[tier]]\nnodes = [63]\n' $((mib / 2)) > "$tmp/clock.toml"
: > "$tmp/default.toml"
echo "# $(uname -r), $(nproc) processors, load $(cut -d' ' -f1-3 /proc/loadavg), $mib MiB read at random"
#   paired RUN_IN PAIRS WINDOW_MS SETTLE_MS HOW PROCESSOR POLICY
paired() {
  RUN_IN=$1 taskset -c 0 "$dir/vm_paired" "$mib" "$2" "$3" "$4" "$5" \
    taskset -c "$6" "$dir/vm" attach --policy "$tmp/$7.toml" '{}' 2> "$tmp/said" || { echo "  FAILED:"; tail -3 "$tmp/said"; }
  grep -h '  cost:' "$tmp/said" | tail -1
}
for phase in ${PHASES:-control base onecore start making huge clock}; do
  echo "$phase:"
  case $phase in
    control) paired 0 "${PAIRS:-100}" 250 20 none 1 look ;;
    base) paired 15 "${PAIRS:-240}" 250 20 stop 1 look ;;
    onecore) paired 15 "${PAIRS:-100}" 250 20 stop 0 look ;;
    damon) paired 15 "${PAIRS:-60}" 1000 200 damon 1 look ;;
    start) paired 0 "${PAIRS:-20}" 1000 0 attach 1 look ;;
    making) paired 0 "${PAIRS:-8}" 4000 0 attach 1 default ;;
    huge) paired 40 "${PAIRS:-60}" 250 20 stop 1 keep ;;
    clock) paired 12 "${PAIRS:-60}" 250 20 stop 1 clock ;;
    *) echo "no such phase" ;;
  esac
done
