#!/bin/bash
# Read-only maps on the mount, plain and under `varve run`, beside tmpfs, which is what a map of the pool's own pages would be, and ext4 on a
# memory-backed loop device: docs/results/maps.md.
#
#   VARVE=path/to/varve MIB=512 ROUNDS=3 benches/maps/maps.sh
. "$(dirname "$0")/../../tests/conformance/common.sh"

[ "$(id -u)" = 0 ] || die "mounts are made as root here"
find_varve
mib=${MIB:-512}
image=/dev/shm/varve-maps-$$.img
plain=/dev/shm/varve-maps-$$.bin
ext4=$work/ext4
clean_up_more() {
  if is_mounted "$ext4"; then umount "$ext4"; fi
  rm -f "$image" "$plain"
}
cc -O2 -o "$work/maps" "$root/benches/maps/maps.c"
make_pool --nvm "shm:$((2 * mib))M" --ssd 0 --hdd 0
start_daemon
start_mount
truncate -s "$((2 * mib))M" "$image"
mkfs.ext4 -q "$image"
mkdir "$ext4"
mount -o loop "$image" "$ext4"
head -c "${mib}M" /dev/urandom >"$plain"
cp "$plain" "$mnt/file"
cp "$plain" "$ext4/file"
"$varve" digest "$pool" >/dev/null
say "microseconds, file of $mib MiB; $(uname -r), load $(cut -d' ' -f1 /proc/loadavg)"
say ""
say "| | first touch in order, a page | first touch at random | touch of what the kernel has, a page | 4 KiB of loads from touched pages | pread of 4 KiB at random |"
say "| --- | ---: | ---: | ---: | ---: | ---: |"
# The file leaves the page cache, and nothing else does.
cold() { sync "$1"; dd if="$1" iflag=nocache count=0 status=none; }
for _ in $(seq "${ROUNDS:-3}"); do
  NAME=tmpfs "$work/maps" "$plain"
  cold "$ext4/file"
  NAME=ext4 "$work/maps" "$ext4/file"
  cold "$mnt/file"
  NAME=mount "$work/maps" "$mnt/file"
  cold "$mnt/file"
  NAME="varve run" "$varve" run --mount "$mnt" -- "$work/maps" "$mnt/file"
done
stop_mount
stop_daemon
