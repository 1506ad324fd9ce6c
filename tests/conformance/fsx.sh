#!/bin/bash
# fsx 0.3.2 on a mount: SEEDS seeds of OPS operations each, every kind of operation that it has. Odd seeds run in four parts with
# a remount (every second time with the daemon started anew) between them, where the file must read the same before and after.
# Even seeds run in one part, since they have copy_file_range, which fsx cannot leave out when it begins later (it does the copies
# even of the operations that it only simulates).
#
# With SERVED=1 it runs under `varve run`, without maps (which give the file to the kernel).
#
#   SEEDS=8 OPS=200000 FIRST=1 VARVE=path/to/varve tests/conformance/fsx.sh
. "$(dirname "$0")/common.sh"

seeds=${SEEDS:-8}
ops=${OPS:-200000}
first=${FIRST:-1}
[ "$(id -u)" = 0 ] || die "mounts are made as root here"
find_varve
fsx=$(find_tool fsx fsx 0.3.2)

maps=10
under=()
if [ -n "${SERVED:-}" ]; then maps=0; fi
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
posix_fallocate = 3
punch_hole = 5
sendfile = 3
posix_fadvise = 2
'
weights=${weights//@MAPS@/$maps}
weights=${weights//@SOME@/$((maps / 5))}
# shape NAME FLEN OPSIZES: its settings, without and with copies.
shape() {
  printf 'flen = %s\n[opsize]\n%b\n%s\n' "$2" "$3" "$weights" >"$work/$1.toml"
  { cat "$work/$1.toml"; say 'copy_file_range = 3'; } >"$work/$1-copies.toml"
}
shape small 262144 'max = 65536'
shape large 4194304 'max = 262144'
# With aligned sizes fsx makes posix_fallocate calls of 0 bytes near the end, which any file system refuses (ext4 too).
weights=${weights/posix_fallocate = 3/posix_fallocate = 0}
shape aligned 262144 'min = 512\nalign = 512\nmax = 65536'

make_pool --nvm 64M --ssd 128M --hdd 256M
start_daemon
start_mount
if [ -n "${SERVED:-}" ]; then under=("$varve" run --mount "$mnt" --); fi
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
  at=$(date +%s)
  for part in $(seq "$parts"); do
    from=$(((part - 1) * ops / parts + 1))
    to=$((part * ops / parts))
    if ! "${under[@]}" "$fsx" -q -f "$work/$shape.toml" -S "$seed" -b "$from" -N "$to" -P "$work" "$mnt/fsx$seed" >"$work/fsx.out" 2>&1; then
      tail -n 60 "$work/fsx.out"
      die "seed $seed ($shape) failed between operations $from and $to"
    fi
    before=$(sha256sum <"$mnt/fsx$seed")
    remount
    after=$(sha256sum <"$mnt/fsx$seed")
    [ "$before" = "$after" ] || die "seed $seed: the file is another one after the remount at operation $to"
  done
  say "seed $seed ($shape): $ops operations, $parts remounts, $(($(date +%s) - at)) s"
  # Its last state stays and is compared at the end.
  sha256sum "$mnt/fsx$seed" >>"$work/sums"
done
sha256sum --quiet -c "$work/sums" || die "a finished file has changed"
stop_mount
stop_daemon
fsck_clean
say "fsx: $seeds seeds of $ops operations, $remounts remounts, $(($(date +%s) - began)) s: all passed"
