# What the conformance scripts share: a pool that is served and mounted for one run, and gone afterwards whatever happens.
# To be sourced. Sets `work` (a directory of its own), `varve` (the program), and the functions below.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/varve-conformance.XXXXXX")
pool=$work/pool
mnt=$work/mnt
daemon_pid=
mount_pid=

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# The program under test: $VARVE, or a release build of this tree.
find_varve() {
  varve=${VARVE:-}
  if [ -z "$varve" ]; then
    (cd "$root" && cargo build --release --quiet --bin varve)
    varve=${CARGO_TARGET_DIR:-$root/target}/release/varve
  fi
  [ -x "$varve" ] || die "$varve is not there"
}

# find_tool NAME CRATE VERSION: a program of crates.io, from the path or installed below the target folder.
find_tool() {
  local name=$1 crate=$2 version=$3 into
  if command -v "$name" >/dev/null 2>&1; then
    command -v "$name"
    return
  fi
  into=${CARGO_TARGET_DIR:-$root/target}/conformance/$crate-$version
  if [ ! -x "$into/bin/$name" ]; then
    cargo install --quiet --locked --root "$into" --target-dir "$into/build" --version "$version" "$crate" >&2
    rm -rf "$into/build"
  fi
  printf '%s\n' "$into/bin/$name"
}

# within SECONDS WHAT COMMAND...: waits until the command succeeds. When it does not, a script that has a function `explain` tells more.
within() {
  local tries=$(( $1 * 20 )) what=$2
  shift 2
  until "$@"; do
    tries=$((tries - 1))
    if [ "$tries" -le 0 ]; then
      if declare -F explain >/dev/null; then explain || true; fi
      die "$what did not happen"
    fi
    sleep 0.05
  done
}

is_mounted() { grep -q " $1 " /proc/self/mountinfo; }
not_mounted() { ! is_mounted "$1"; }
served() { "$varve" status "$pool" >/dev/null 2>&1; }

# make_pool SIZES...: a new pool.
make_pool() {
  "$varve" mkfs "$pool" "$@" >/dev/null
  mkdir -p "$mnt"
}

start_daemon() {
  "$varve" serve "$pool" >>"$work/daemon.log" 2>&1 &
  daemon_pid=$!
  within 90 "the daemon's start" served
}

stop_daemon() {
  kill -TERM "$daemon_pid"
  wait "$daemon_pid" || die "the daemon ended with $?: $(tail -n 5 "$work/daemon.log")"
  daemon_pid=
}

start_mount() {
  "$varve" mount "$@" "$pool" "$mnt" >>"$work/mount.log" 2>&1 &
  mount_pid=$!
  within 90 "the mount" is_mounted "$mnt"
}

stop_mount() {
  "$varve" umount "$mnt"
  wait "$mount_pid" || die "the mount ended with $?: $(tail -n 5 "$work/mount.log")"
  mount_pid=
}

# fsck must find nothing, in the pool as it is served or lies there.
fsck_clean() { "$varve" fsck "$pool" || die "fsck found damage"; }

clean_up() {
  local code=$?
  set +e
  trap - EXIT INT TERM HUP
  if declare -F clean_up_more >/dev/null; then clean_up_more; fi
  if [ -n "$mount_pid" ]; then
    "$varve" umount --force "$mnt" >/dev/null 2>&1
    kill -KILL "$mount_pid" 2>/dev/null
    wait "$mount_pid" 2>/dev/null
  fi
  is_mounted "$mnt" && umount -l "$mnt"
  if [ -n "$daemon_pid" ]; then
    kill -KILL "$daemon_pid" 2>/dev/null
    wait "$daemon_pid" 2>/dev/null
  fi
  if [ "$code" -ne 0 ]; then
    say "--- last words of the daemon and the mount"
    tail -n 20 "$work/daemon.log" "$work/mount.log" 2>/dev/null
  fi
  local uuid
  uuid=$(sed -n 's/^uuid *= *"\(.*\)"/\1/p' "$pool/varve.toml" 2>/dev/null)
  if [ -n "$uuid" ]; then rm -rf "/dev/shm/varve-$uuid-"*; fi
  if [ -n "${KEEP:-}" ] && [ "$code" -ne 0 ]; then
    say "kept: $work"
  else
    # Wipes a device of persistent memory; other devices keep their first bytes.
    if [ -f "$pool/varve.toml" ]; then "$varve" destroy --yes "$pool" >/dev/null 2>&1; fi
    rm -rf "$work"
  fi
  exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP
