#!/bin/bash
# pjdfstest 0.2.2 as root on a mount and on ext4 (a loop device on the same machine), compared case by case: what passes on ext4
# must pass on the mount. Cases that are skipped on either are listed with the tool's reason. Ends with 1 if a case is worse.
#
#   VARVE=path/to/varve OUT=directory NVM=tier SSD=tier HDD=tier tests/conformance/pjdfstest.sh [PATTERN...]
#
# With OUT the full lists stay there (`varve.txt`, `ext4.txt`); with BASELINE=ext4.txt, such a list of the same cases, ext4 is not run. With SERVED=1 the cases on the mount run under `varve run`, and calls must have been
# served. What may be skipped is named below with the reason: any other case that is skipped on the mount and passes on ext4 is a failure.
. "$(dirname "$0")/common.sh"

[ "$(id -u)" = 0 ] || die "the cases need root"
find_varve
pjdfstest=$(find_tool pjdfstest pjdfstest 0.2.2)
out=${OUT:-$work}
mkdir -p "$out"

ext4=$work/ext4
other=$work/other
clean_up_more() {
  local at
  for at in "$ext4" "$other"; do
    if is_mounted "$at"; then umount -l "$at"; fi
  done
}

# Cases that may be skipped. The C library knows no LINK_MAX for FUSE, so the tool skips the first; the script makes the same by hand.
allowed='link::link_count_max'
if [ -n "${SERVED:-}" ]; then
  # These remount the file system read-only and back, of which only the kernel is told: LibFS would go on to write. They run on the mount.
  allowed="$allowed
chmod::erofs_named
chown::erofs_named
chown::lchown::erofs_named
link::erofs_named
mkdir::erofs_new_file
mkfifo::erofs_new_file
open::erofs_named
open::erofs_new_file
rename::erofs_named
rmdir::erofs_named
symlink::erofs_new_file
truncate::erofs_named
unlink::erofs_named"
fi

cat >"$work/pjdfstest.toml" <<'TOML'
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
stat_st_birthtime = {}

[settings]
naptime = 0.02
allow_remount = true

[dummy_auth]
entries = [["nobody", "nogroup"], ["games", "games"], ["man", "man"]]
TOML

# The tool remounts with mount(8), which would look for a helper of FUSE file systems; the system call needs none.
mkdir "$work/bin"
printf '#!/bin/sh\nexec %s -i "$@"\n' "$(command -v mount)" >"$work/bin/mount"
chmod +x "$work/bin/mount"

under=()
# run NAME DIRECTORY: all cases in a directory; into out/NAME.txt.
run() {
  mkdir -p "$2/pjd"
  chmod 755 "$2" "$2/pjd"
  chmod 755 "$work"
  PATH="$work/bin:$PATH" "${under[@]}" "$pjdfstest" -c "$work/pjdfstest.toml" -s "$other" -p "$2/pjd" "${@:3}" >"$out/$1.txt" 2>"$work/$1.err" || true
  grep '^Summary' "$out/$1.txt" || die "pjdfstest did not end on $1: $(tail -n 5 "$work/$1.err")"
}

# outcomes FILE: lines "case outcome", sorted.
outcomes() { awk '/^[a-z0-9_:]+ +(ok|skipped|FAILED|failed)$/ { print $1, tolower($2) }' "$1" | sort; }

# A file system beside the tested one, for the cases across devices.
mkdir "$other" "$ext4"
mount -t tmpfs -o size=16m tmpfs "$other"
chmod 755 "$other"
baseline=${BASELINE:-}
if [ -z "$baseline" ]; then
  baseline=$out/ext4.txt
  truncate -s 512M "$work/ext4.img"
  mkfs.ext4 -q "$work/ext4.img"
  mount -o loop "$work/ext4.img" "$ext4"
  say "on ext4:"
  run ext4 "$ext4" "$@"
fi

make_pool --nvm "${NVM:-128M}" --ssd "${SSD:-256M}" --hdd "${HDD:-512M}"
start_daemon
start_mount --allow-other
if [ -n "${SERVED:-}" ]; then
  under=("$varve" run --stats --session-after 0 --mount "$mnt" --)
  sed -i 's/^allow_remount = true/allow_remount = false/' "$work/pjdfstest.toml"
fi
say "on varve:"
run varve "$mnt" "$@"
if [ -n "${SERVED:-}" ]; then
  tail -n 1 "$work/varve.err"
  [ "$(tail -n 1 "$work/varve.err" | sed -n 's/.*"served_total":\([0-9]*\).*/\1/p')" -gt 0 ] || die "nothing was served"
fi
# The C library knows no LINK_MAX for FUSE, so the tool skips link::link_count_max; the same by hand, in a run of all cases.
if [ $# = 0 ]; then
  mkdir "$mnt/links"
  perl -e 'use Errno; chdir shift or die; open(F, ">", "f") or die; my $n = 1;
    while (link("f", "l$n")) { $n++ }
    die "stopped at $n links: $!\n" unless $!{EMLINK} && (stat "f")[3] == $n && $n >= 32767;
    print "link: EMLINK at $n links\n"; unlink(map { "l$_" } 1 .. $n - 1) == $n - 1 or die; (stat "f")[3] == 1 or die' "$mnt/links" \
    || die "the limit of links"
fi
stop_mount
stop_daemon
fsck_clean

outcomes "$baseline" >"$work/ext4.cases"
outcomes "$out/varve.txt" >"$work/varve.cases"
[ -s "$work/varve.cases" ] || die "no case was read from the output"
join -a 1 -a 2 -e missing -o 0,1.2,2.2 "$work/ext4.cases" "$work/varve.cases" >"$work/both"
say "cases: $(wc -l <"$work/both"), by (ext4, varve): $(awk '{ n[$2 ", " $3]++ } END { for (k in n) printf "(%s) %d  ", k, n[k] }' "$work/both")"
awk '$2 != $3' "$work/both" | while read -r case a b; do say "differs: $case: ext4 $a, varve $b"; done
# The tool prints the reason on the line after a skipped case.
awk '/ skipped$/ { case_ = $1; getline; sub(/^[ \t]+/, ""); print "skipped: " case_ ": " $0 }' "$out/varve.txt" | sort
new=$(awk '$3 == "skipped" { print $1 }' "$work/both" | grep -vxF "$allowed" || true)
[ -z "$new" ] || die "skipped, and not named in this script: $new"
worse=$(awk '$2 == "ok" && $3 != "ok" && $3 != "skipped"' "$work/both" | wc -l)
[ "$worse" = 0 ] || die "$worse cases pass on ext4 and not on varve"
say "pjdfstest: every case that passes on ext4 passes on varve"
