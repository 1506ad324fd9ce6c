#!/bin/bash
# A directory of a million files on a mount, in a pool with 1 GiB of NVM: made, listed, statted, read again after a new start of daemon and
# mount, and removed, each timed; the same on ext4 on a memory-backed loop device beside it.
#
#   FILES=1000000 VARVE=path/to/varve tests/conformance/million.sh
. "$(dirname "$0")/common.sh"

files=${FILES:-1000000}
[ "$(id -u)" = 0 ] || die "mounts are made as root here"
find_varve
ext4=$work/ext4
image=/dev/shm/varve-million-$$.img
clean_up_more() {
  is_mounted "$ext4" && umount "$ext4"
  rm -f "$image"
}

# timed NAME COMMAND...: runs it and says how long it took.
timed() {
  local name=$1 from to
  shift
  from=$(date +%s%N)
  "$@" || die "$name failed"
  to=$(date +%s%N)
  say "$(awk -v n="$name" -v ns=$((to - from)) -v f="$files" \
    'BEGIN { printf "  %-34s %7.1f s %9.0f files/s", n, ns / 1e9, f / (ns / 1e9) }')"
}
make_all() { seq -f "$1/name-%08g" "$files" | xargs -n 2000 touch; }
list_all() { ls -f "$1" | grep -c '^name-' >"$work/count"; }
stat_all() { find "$1" -type f -printf '%f %s %m\n' | sort | sha256sum >"$work/sum"; }
remove_all() { find "$1" -type f -delete; }
counted() { [ "$(cat "$work/count")" = "$files" ] || die "$(cat "$work/count") of $files names were listed"; }

run() {
  timed "create ($1)" make_all "$2"
  timed "list" list_all "$2"
  counted
  timed "stat" stat_all "$2"
}

make_pool --nvm 1G --ssd 1G --hdd 4G
start_daemon
start_mount
dir=$mnt/many
mkdir "$dir"
say "$files files in one directory, one after another:"
run "varve, through the mount" "$dir"
before=$(cat "$work/sum")
"$varve" digest "$pool" >/dev/null
say "$("$varve" status "$pool" | grep -E '^nvm')"
stop_mount
stop_daemon
fsck_clean
start_daemon
start_mount
timed "list, after a new start" list_all "$dir"
counted
timed "stat, after that" stat_all "$dir"
[ "$before" = "$(cat "$work/sum")" ] || die "the files are others after the new start"
timed "remove" remove_all "$dir"
rmdir "$dir"
"$varve" digest "$pool" >/dev/null
say "$("$varve" status "$pool" | grep -E '^nvm')"
fsck_clean
stop_mount
stop_daemon

truncate -s 4G "$image"
mkfs.ext4 -q -N $((files + files / 10 + 1000)) "$image"
mkdir "$ext4"
mount -o loop "$image" "$ext4"
mkdir "$ext4/many"
run "ext4" "$ext4/many"
timed "remove" remove_all "$ext4/many"
say "million: all right"
