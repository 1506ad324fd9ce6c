#!/bin/bash
# Real work on a pool of 256 MiB NVM, 1 GiB SSD and 16 GiB HDD: a copy of at least 30,000 files and 3 GiB of this machine's /usr, which spills
# to every tier, compared with the original file by file, also after a new start of daemon and mount; a git repository, cloned and checked; a crate
# of crates.io, built on the mount and run from it; a check of all structures and of all data at the end.
#
#   SOURCE=/usr CRATE=hexyl-0.16.0 VARVE=path/to/varve tests/conformance/realwork.sh
. "$(dirname "$0")/common.sh"

source=${SOURCE:-/usr}
crate=${CRATE:-hexyl-0.16.0}
files_least=30000
bytes_least=$((3 << 30))
[ "$(id -u)" = 0 ] || die "mounts are made as root here"
for tool in git cargo curl sha256sum; do
  command -v "$tool" >/dev/null || die "$tool is not installed"
done
find_varve

# timed NAME COMMAND...: runs it and says how long it took.
timed() {
  local name=$1 from to
  shift
  from=$(date +%s%N)
  "$@" || die "$name failed"
  to=$(date +%s%N)
  say "$(awk -v n="$name" -v ns=$((to - from)) 'BEGIN { printf "  %-46s %7.1f s", n, ns / 1e9 }')"
}
copy() { cp -a --one-file-system "$source" "$mnt/copy"; }
# Content, and all that `cp -a` keeps: kind, mode, owner, length, time of change, target. Directories have no length of their own here.
describe() {
  (cd "$1" && find . -xdev -type f -print0 | sort -z | xargs -0 sha256sum) >"$work/$2.sums"
  (cd "$1" && find . -xdev \( -type d -printf '%P %y %m %U:%G %T@\n' -o -printf '%P %y %m %U:%G %s %T@ %l\n' \) | sort) >"$work/$2.attrs"
}
compare() {
  describe "$mnt/copy" copied
  cmp "$work/original.sums" "$work/copied.sums" && cmp "$work/original.attrs" "$work/copied.attrs"
}
clone() {
  git clone --quiet --no-local "$root" "$mnt/clone" && git -C "$mnt/clone" fsck --full --strict --no-progress &&
    [ -z "$(git -C "$mnt/clone" status --porcelain)" ]
}
# Sources, objects and the program: all on the mount.
build() {
  CARGO_HOME="$mnt/cargo" cargo install --quiet --locked --root "$mnt/root" --target-dir "$mnt/target" \
    --version "${crate##*-}" "${crate%-*}"
}
runs() { "$mnt/root/bin/${crate%-*}" --version; }

say "the original:"
timed "read all of $source" describe "$source" original
files=$(wc -l <"$work/original.sums")
bytes=$(du -s --apparent-size --block-size=1 --one-file-system "$source" | cut -f1)
say "  $files files, $(wc -l <"$work/original.attrs") names, $bytes bytes"
[ "$files" -ge "$files_least" ] && [ "$bytes" -ge "$bytes_least" ] ||
  die "$source has less than $files_least files or $bytes_least bytes: name another folder (SOURCE=...)"

make_pool --nvm 256M --ssd 1G --hdd 16G
start_daemon
start_mount
say "on the mount:"
timed "cp -a" copy
timed "compare content and attributes" compare
say "$("$varve" status "$pool" | grep -E '^(tier|nvm|ssd|hdd|digest)')"
stop_mount
stop_daemon
fsck_clean
start_daemon
start_mount
timed "compare after a new start" compare
timed "git clone, git fsck" clone
timed "build $crate" build
timed "run it" runs
timed "remove the copy" rm -rf "$mnt/copy"
timed "git fsck again" git -C "$mnt/clone" fsck --full --strict --no-progress
stop_mount
timed "digest" "$varve" digest "$pool"
stop_daemon
fsck_clean
timed "scrub" "$varve" scrub "$pool"
say "real work: passed"
