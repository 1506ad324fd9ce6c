#!/bin/bash
# Files as one range (seed: SCMFS): records of 4 KiB to 16 MiB by system calls on tmpfs, ext4 on a memory-backed loop device, the mount, and under
# `varve run`, through maps, and in a range of memory with pages of 4 KiB and 2 MiB, which no layout of a file can beat; and postmark.
#
#   VARVE=path/to/varve SECONDS_EACH=0.3 FILES=10000 TRANSACTIONS=400000 benches/maps/ranges.sh
. "$(dirname "$0")/../../tests/conformance/common.sh"

[ "$(id -u)" = 0 ] || die "mounts are made as root here"
find_varve
each=${SECONDS_EACH:-0.3}
image=/dev/shm/varve-ranges-$$.img
tmpfs=/dev/shm/varve-ranges-$$
ext4=$work/ext4
clean_up_more() {
  if is_mounted "$ext4"; then umount "$ext4"; fi
  rm -rf "$image" "$tmpfs"
}
cc -O2 -pthread -o "$work/ranges" "$root/benches/maps/ranges.c"
cc -O2 -o "$work/postmark" "$root/benches/maps/postmark.c"
make_pool --nvm "shm:4G" --ssd 0 --hdd 0
start_daemon
start_mount
mkdir "$tmpfs" "$ext4"
truncate -s 2G "$image"
mkfs.ext4 -q "$image"
mount -o loop "$image" "$ext4"
for dir in "$tmpfs" "$ext4" "$mnt"; do head -c 256M /dev/urandom >"$dir/file"; done
"$varve" digest "$pool" >/dev/null
under_run() { "$varve" run --mount "$mnt" -- "$@"; }
sides=(tmpfs ext4 mount run "tmpfs, map" "mount, map" "range, 4 KiB pages" "range, 2 MiB pages")
"$work/ranges" "$tmpfs/file" "$each" >"$work/0"
"$work/ranges" "$ext4/file" "$each" >"$work/1"
"$work/ranges" "$mnt/file" "$each" >"$work/2"
under_run "$work/ranges" "$mnt/file" "$each" >"$work/3"
"$work/ranges" "$tmpfs/file" "$each" map >"$work/4"
"$work/ranges" "$mnt/file" "$each" map >"$work/5"
"$work/ranges" - "$each" >"$work/6"
"$work/ranges" -huge "$each" >"$work/7"
say "GB/s, and for records of 4 KiB microseconds; a file of 256 MiB in memory; $(uname -r), load $(cut -d' ' -f1 /proc/loadavg)"
say ""
printf '| access | KiB | threads |'
printf ' %s |' "${sides[@]}"
printf '\n| --- | ---: | ---: |'
printf ' ---: |%.0s' "${sides[@]}"
printf '\n'
paste -d' ' "$work"/[0-7] | awk '{
  printf "| %s | %s | %s |", $1, $2, $3
  for (k = 0; k < 8; k++) if ($2 == 4) printf " %s (%s us) |", $(5 * k + 5), $(5 * k + 4); else printf " %s |", $(5 * k + 5)
  printf "\n"
}'
say ""
say "| postmark, ${FILES:-10000} files, ${TRANSACTIONS:-400000} transactions | a second | made, s | transactions, s | removed, s |"
say "| --- | ---: | ---: | ---: | ---: |"
postmark() { # NAME, DIR, and what the program runs under
  local name=$1 dir=$2
  shift 2
  "$@" "$work/postmark" "$dir/postmark" "${FILES:-10000}" "${TRANSACTIONS:-400000}" | awk -v name="$name" '{ print "| " name " | " $1 " | " $2 " | " $3 " | " $4 " |" }'
  rm -rf "$dir/postmark"
}
postmark tmpfs "$tmpfs"
postmark ext4 "$ext4"
postmark mount "$mnt"
postmark "varve run" "$mnt" "$varve" run --mount "$mnt" --
stop_mount
stop_daemon
