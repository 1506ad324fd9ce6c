#!/bin/bash
# Clones beside XFS and btrfs: one file is cloned and both are written, on loop devices and a pool on the same disk, in one run.
#   benches/clones/clones.sh [MIB] [WRITES]
# Needs root, mkfs.xfs and mkfs.btrfs (a side that is missing is said and left out), a release build of varve. Leaves nothing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
varve=${VARVE:-$here/../../target/release/varve}
mib=${1:-512} writes=${2:-2000}
work=$(mktemp -d "${TMPDIR:-/var/tmp}/varve-clones.XXXXXX")
at='' loop=''
leave() { # what the side at hand has set up
    "$varve" down "$work/pool" >/dev/null 2>&1 || true
    if [ -n "$at" ]; then umount "$at" || true; fi
    if [ -n "$loop" ]; then losetup -d "$loop" || true; fi
    at='' loop=''
}
finish() {
    leave
    rm -rf "$work"
}
trap finish EXIT
cc -O2 -o "$work/clones" "$here/clones.c"
declare -A figure
sides=()
keep() { # SIDE
    sides+=("$1")
    while read -r name value; do figure[$1.$name]=$value; done <"$work/out"
}
# A side at a time, so that the disk holds the files of one only.
"$varve" up "$work/pool" --nvm 2G --ssd $((mib * 2 + 2048))M --hdd 0 --detach >/dev/null
(cd "$work/pool/mnt" && "$varve" run --mount "$work/pool/mnt" -- "$work/clones" "$mib" "$writes") >"$work/out"
keep varve
"$varve" down "$work/pool" >/dev/null
"$varve" fsck "$work/pool"
rm -rf "$work/pool"
image() { # KIND MKFS...
    local kind=$1
    shift
    command -v "$1" >/dev/null || { echo "left out: $kind ($1 is not there)"; return 0; }
    # With its space allocated, as that of a pool is.
    fallocate -l $((mib * 2 + 4096))M "$work/$kind.img"
    loop=$(losetup --find --show --direct-io=on "$work/$kind.img")
    "$@" "$loop" >/dev/null 2>&1
    mkdir "$work/$kind"
    mount "$loop" "$work/$kind"
    at=$work/$kind
    sync
    (cd "$at" && "$work/clones" "$mib" "$writes") >"$work/out"
    keep "$kind"
    leave
    rm "$work/$kind.img"
}
image xfs mkfs.xfs -q
image btrfs mkfs.btrfs -q
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
row clone_ms "clone of the file, ms (median of 5; Varve's is durable)"
row durable_ms "clone and fsync, ms (median of 5)"
row plain_us "write of 4 KiB and fdatasync, a file that shares nothing, µs"
row first_us "the same in a clone, for the first time, µs"
row again_us "the same once more at the same places, µs"
row source_us "the same in the source, µs"
row cloneagain_ms "clone of the written clone over another one, ms"
row remove_ms "remove a clone, ms"
