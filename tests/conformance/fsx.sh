#!/bin/bash
# fsx 0.3.2 on a mount: SEEDS seeds of OPS operations each, every kind of operation that it has. Odd seeds run in four parts with
# a remount (every second time with the daemon started anew) between them, where the file must read the same before and after.
# Even seeds run in one part, since they have copy_file_range, which fsx cannot leave out when it begins later (it does the copies
# even of the operations that it only simulates).
#
# With SERVED=1 it runs under `varve run --stats`, each seed twice: without maps, where nearly all must be served in-process, and with them. A shared
# map of a file that is open for writing gives it to the kernel, for as long as the process lives (docs/guide/run.md): there the calls of each part are
# served until its first map and the mount's from then on, so the file passes from one to the other and back. fsx needs nothing for that: it asks for
# `msync` after each mapped write, and the mount, by which the process reads then, has the same pages. Ends with 1 when nothing was served.
#
# PIN="ssd hdd": the files lie in directories that are pinned to these tiers, by turns; data must have been there at a remount.
#
#   SEEDS=8 OPS=200000 FIRST=1 VARVE=path/to/varve tests/conformance/fsx.sh
. "$(dirname "$0")/common.sh"

seeds=${SEEDS:-8}
ops=${OPS:-200000}
first=${FIRST:-1}
[ "$(id -u)" = 0 ] || die "mounts are made as root here"
find_varve
fsx=$(find_tool fsx fsx 0.3.2)

under=()
weights='
[weights]
close_open = 2
invalidate = @SOME@
mapread = @MAPS@
mapwrite = @MAPS@
read = 10
write = 10
truncate = 6
fsync = 0.5
fdatasync = 0.5
posix_fallocate = @ALLOCATE@
punch_hole = 5
sendfile = 3
posix_fadvise = 2
'
# shape NAME FLEN OPSIZES ALLOCATE: its settings, with and without maps, with and without copies.
shape() {
  local maps file
  for maps in 0 10; do
    file=$work/$1-maps$maps
    printf 'flen = %s\n[opsize]\n%b\n%s\n' "$2" "$3" "$weights" | sed "s/@MAPS@/$maps/; s/@SOME@/$((maps / 5))/; s/@ALLOCATE@/$4/" >"$file.toml"
    { cat "$file.toml"; say 'copy_file_range = 3'; } >"$work/$1-copies-maps$maps.toml"
  done
}
shape small 262144 'max = 65536' 3
shape large 4194304 'max = 262144' 3
# With aligned sizes fsx makes posix_fallocate calls of 0 bytes near the end, which any file system refuses (ext4 too).
shape aligned 262144 'min = 512\nalign = 512\nmax = 65536' 0

# SSD: the SSD tier, such as `spdk:/PATH.json`; NVM: small enough that data goes there.
make_pool --nvm "${NVM:-64M}" --ssd "${SSD:-128M}" --hdd "${HDD:-256M}"
start_daemon
start_mount
read -ra pins <<<"${PIN:-}"
for tier in "${pins[@]}"; do
  mkdir "$mnt/$tier"
  "$varve" pin --tier "$tier" "$mnt/$tier" >/dev/null
done
ways=10
if [ -n "${SERVED:-}" ]; then
  under=("$varve" run --stats --session-after 0 --mount "$mnt" --)
  ways="0 10"
fi
remounts=0
remount() {
  stop_mount
  if [ $((remounts % 2)) = 1 ]; then
    stop_daemon
    fsck_clean >/dev/null
    start_daemon
  fi
  start_mount
  remounts=$((remounts + 1))
}

# number KEY: of the counters that the last run ended with.
number() { tail -n 1 "$work/fsx.err" | sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p"; }

# play SEED SHAPE PARTS MAPS: all operations of a seed.
play() {
  local seed=$1 shape=$2 parts=$3 maps=$4 served=0 fell=0 counted= part from to before after at tier= seen=0 file=$mnt/fsx$1-maps$4
  if [ ${#pins[@]} -gt 0 ]; then
    tier=${pins[$((seed % ${#pins[@]}))]}
    file=$mnt/$tier/fsx$1-maps$4
  fi
  at=$(date +%s)
  for part in $(seq "$parts"); do
    from=$(((part - 1) * ops / parts + 1))
    to=$((part * ops / parts))
    if ! "${under[@]}" "$fsx" -q -f "$work/$shape-maps$maps.toml" -S "$seed" -b "$from" -N "$to" -P "$work" "$file" >"$work/fsx.out" 2>"$work/fsx.err"; then
      tail -n 60 "$work/fsx.out" "$work/fsx.err"
      die "seed $seed ($shape) failed between operations $from and $to"
    fi
    if [ -n "${SERVED:-}" ]; then
      [ "$(number served_total)" -gt 0 ] || die "seed $seed ($shape): nothing was served between operations $from and $to"
      served=$((served + $(number served_total)))
      fell=$((fell + $(number fell_back_total)))
      counted=", $served calls served, $fell fell back"
    fi
    before=$(sha256sum <"$file")
    remount
    after=$(sha256sum <"$file")
    [ "$before" = "$after" ] || die "seed $seed: the file is another one after the remount at operation $to"
    if [ -n "$tier" ] && "$varve" which-tier "$file" | grep -q " on $tier"; then seen=$((seen + 1)); fi
  done
  # Without maps there is hardly a call that is the kernel's.
  if [ "$maps" = 0 ] && [ "$served" -lt $((fell * 9)) ]; then die "seed $seed ($shape): of $((served + fell)) calls $fell fell back"; fi
  if [ "$maps" != 0 ]; then shape="$shape, maps"; fi
  if [ -n "$tier" ]; then
    [ "$seen" -gt 0 ] || die "seed $seed ($shape): no data was ever on $tier: $("$varve" which-tier "$file")"
    counted="$counted, on $tier at $seen of $parts remounts"
  fi
  say "seed $seed ($shape): $ops operations, $parts remounts, $(($(date +%s) - at)) s$counted"
  # Its last state stays and is compared at the end.
  sha256sum "$file" >>"$work/sums"
}

began=$(date +%s)
for seed in $(seq "$first" $((first + seeds - 1))); do
  case $((seed % 8)) in
    3 | 4) shape=large ;;
    6 | 7) shape=aligned ;;
    *) shape=small ;;
  esac
  parts=4
  if [ $((seed % 2)) = 0 ]; then
    shape=$shape-copies
    parts=1
  fi
  for maps in $ways; do play "$seed" "$shape" "$parts" "$maps"; done
done
sha256sum --quiet -c "$work/sums" || die "a finished file has changed"
stop_mount
stop_daemon
fsck_clean
say "fsx: $seeds seeds of $ops operations, $remounts remounts, $(($(date +%s) - began)) s: all passed"
