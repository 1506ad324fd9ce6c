#!/bin/bash
# Seeks of the cache's policies on a file of a pool, counted at the pool's disk: all that the pool does there counts,
# its trees included. `pool_seeks.sh [NVM] [POLICIES…]`, as root: a pool of NVM (default 96M, less than the store of
# 256 MiB, so that most of it has to be on the disk) and a disk of 2 GiB that counts (media/examples/slow_disk), and
# beside it the store on the bare disk. Needs `varve` ($VARVE, default target/release/varve) and
#     cargo build --release -p varve-media --example slow_disk; cargo build --release -p varve-cache --example seeks_on
# Ends its pool and its mount.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
varve=${VARVE:-$here/target/release/varve}
examples=$here/target/release/examples
nvm=${1:-96M}
shift || true
work=$(mktemp -d -p "${TMPDIR:-/var/tmp}")
slow= device=
cleanup() {
    "$varve" down "$work/pool" >/dev/null 2>&1 || true
    "$varve" destroy --yes "$work/pool" >/dev/null 2>&1 || true
    [ -z "$device" ] || losetup --detach "$device" 2>/dev/null || true
    for _ in $(seq 50); do umount "$work/disk" 2>/dev/null && break; sleep 0.1; done
    [ -z "$slow" ] || { kill "$slow" 2>/dev/null; wait "$slow" 2>/dev/null; } || true
    rm -rf "$work"
}
trap cleanup EXIT
mkdir "$work/disk"
"$examples/slow_disk" "$work/backing" $((2 << 30)) "$work/disk" >/dev/null &
slow=$!
for _ in $(seq 100); do [ -e "$work/disk/counts" ] && break; sleep 0.1; done
echo "== on the bare disk"
# Both by a loop device, so that what arrives at the disk is what a program would send to one.
device=$(losetup --find --show --direct-io=on --sector-size 4096 --sizelimit $((256 << 20)) "$work/disk/disk")
"$examples/seeks_on" "$device" "$work/disk/counts" "$@"
losetup --detach "$device"
dd if=/dev/zero "of=$work/disk/disk" bs=1M count=4 conv=notrunc status=none
echo "== on a pool with $nvm of NVM and that disk"
device=$(losetup --find --show --direct-io=on --sector-size 4096 "$work/disk/disk")
"$varve" up "$work/pool" --nvm "$nvm" --ssd 0 --hdd "$device" --detach >/dev/null
"$varve" run --mount "$work/pool/mnt" -- "$examples/seeks_on" "$work/pool/mnt/store" "$work/disk/counts" "$@"
"$varve" status "$work/pool" | grep -A3 '^tier'
