#!/bin/bash
# Clones beside XFS and btrfs: one file is cloned and both are written, on loop devices and a pool on the same disk, in one run.
#   benches/clones/clones.sh [MIB] [WRITES]
# Needs root, mkfs.xfs and mkfs.btrfs (a side that is missing is said and left out), a release build of varve. Leaves nothing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
varve=${VARVE:-$here/../../target/release/varve}
mib=${1:-512} writes=${2:-2000}
work=$(mktemp -d "${TMPDIR:-/var/tmp}/varve-clones.XXXXXX")
mounted=() loops=()
finish() {
    "$varve" down "$work/pool" >/dev/null 2>&1 || true
    for at in "${mounted[@]}"; do umount "$at" 2>/dev/null || true; done
    for device in "${loops[@]}"; do losetup -d "$device" 2>/dev/null || true; done
    rm -rf "$work"
}
trap finish EXIT
cc -O2 -o "$work/clones" "$here/clones.c"
declare -A figure
keep() { while read -r name value; do figure[$1.$name]=$value; done <"$work/out"; }
sides=(varve)
image() { # KIND MKFS...
    local kind=$1
    shift
    command -v "$1" >/dev/null || { echo "left out: $kind ($1 is not there)"; return 0; }
    truncate -s $((mib * 6 + 2048))M "$work/$kind.img"
    local device
    device=$(losetup --find --show --direct-io=on "$work/$kind.img")
    loops+=("$device")
    "$@" "$device" >/dev/null 2>&1
    mkdir "$work/$kind"
    mount "$device" "$work/$kind"
    mounted+=("$work/$kind")
    sides+=("$kind")
}
image xfs mkfs.xfs -q
image btrfs mkfs.btrfs -q
"$varve" up "$work/pool" --nvm $((mib * 4 + 512))M --ssd $((mib * 4 + 512))M --hdd 0 --detach >/dev/null
for side in "${sides[@]}"; do
    sync
    case $side in
    varve) (cd "$work/pool/mnt" && "$varve" run --mount "$work/pool/mnt" -- "$work/clones" "$mib" "$writes") >"$work/out" ;;
    *) (cd "$work/$side" && "$work/clones" "$mib" "$writes") >"$work/out" ;;
    esac
    keep "$side"
done
echo "$(nproc) processors, Linux $(uname -r), $(git -C "$here" describe --always --dirty), $mib MiB, $writes synced writes of 4 KiB"
row() { # NAME TEXT
    printf '| %s |' "$2"
    for side in "${sides[@]}"; do printf ' %s |' "${figure[$side.$1]}"; done
    for side in "${sides[@]:1}"; do
        printf ' %s |' "$(awk -v a="${figure[varve.$1]}" -v b="${figure[$side.$1]}" 'BEGIN { printf "%.2f", a / b }')"
    done
    echo
}
printf '| what |'
for side in "${sides[@]}"; do printf ' %s |' "$side"; done
for side in "${sides[@]:1}"; do printf ' varve / %s |' "$side"; done
echo
printf '| --- |'
for _ in "${sides[@]}" "${sides[@]:1}"; do printf ' --- |'; done
echo
row clone_ms "clone of the file, ms (median of 5)"
row plain_us "write of 4 KiB and fdatasync, a file that shares nothing, µs"
row first_us "the same in a clone, for the first time, µs"
row again_us "the same once more at the same places, µs"
row source_us "the same in the source, µs"
row cloneagain_ms "clone of the written clone over another one, ms"
row remove_ms "remove a clone, ms"
"$varve" down "$work/pool" >/dev/null
"$varve" fsck "$work/pool"
