#!/bin/bash
# stress-ng's file-system class on a mount: every stressor with WORKERS workers for SECONDS_EACH seconds, one after another, then fsck and
# scrub. Ends with 1 if the pool is damaged, an operation was refused by the digest, the daemon or the mount died, or a stressor fails
# here that does not fail on the file system of the machine's temporary directory.
#
#   WORKERS=2 SECONDS_EACH=3 VARVE=path/to/varve tests/conformance/stress.sh [STRESSOR...]
#   TOGETHER=60 VARVE=path/to/varve tests/conformance/stress.sh      # all of them at the same time, for 60 s
. "$(dirname "$0")/common.sh"

workers=${WORKERS:-2}
each=${SECONDS_EACH:-3}
[ "$(id -u)" = 0 ] || die "mounts are made as root here"
find_varve
if ! command -v stress-ng >/dev/null 2>&1; then
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq stress-ng >/dev/null || die "stress-ng is not there (apt-get install stress-ng)"
fi
stressors=$*
if [ -z "$stressors" ]; then
  stressors=$(stress-ng --class 'filesystem?' | sed 's/^.*: //')
fi

make_pool --nvm 256M --ssd 1G --hdd 2G
start_daemon
start_mount
failed=0
host=$work/host
mkdir "$host"
# one STRESSOR DIRECTORY: its exit code.
one() {
  (cd "$2" && stress-ng --"$1" "$workers" --timeout "$each" --temp-path "$2" --verify --quiet) >"$work/stress.out" 2>&1
}
# together DIRECTORY: all stressors at once; the names of those that fail, in $work/failing.
together() {
  (cd "$1" && stress-ng --class filesystem --all "$workers" --timeout "$TOGETHER" --temp-path "$1" --verify --metrics-brief) \
    >"$work/stress.out" 2>&1 || true
  grep -q 'run completed' "$work/stress.out" || die "stress-ng did not come to its end: $(tail -n 3 "$work/stress.out")"
  sed -n 's/.*fail: *\[[0-9]*\] *\([a-z-]*\):.*/\1/p' "$work/stress.out" | sort -u >"$work/failing"
}
if [ -n "${TOGETHER:-}" ]; then
  together "$mnt"
  grep -E 'completed|passed|skipped' "$work/stress.out" | sed 's/^stress-ng: //' || true
  kill -0 "$daemon_pid" || die "the daemon died"
  kill -0 "$mount_pid" || die "the mount died"
  say "fail on the mount: $(tr '\n' ' ' <"$work/failing")"
  if [ -s "$work/failing" ]; then
    cp "$work/failing" "$work/failing.varve"
    together "$host"
    say "fail on the host's file system: $(tr '\n' ' ' <"$work/failing")"
    failed=$(comm -23 "$work/failing.varve" "$work/failing" | wc -l)
  fi
  stressors=
fi
for stressor in $stressors; do
  if one "$stressor" "$mnt"; then
    say "ok       $stressor"
  else
    code=$?
    cp "$work/stress.out" "$work/stress.varve"
    if one "$stressor" "$host"; then
      failed=$((failed + 1))
      say "FAILED   $stressor ($code): $(grep -m 3 -i fail "$work/stress.varve" | tr '\n' ' ')"
    else
      say "as host  $stressor ($code, also on the host's file system)"
    fi
  fi
  kill -0 "$daemon_pid" || die "the daemon died in $stressor"
  kill -0 "$mount_pid" || die "the mount died in $stressor"
done
"$varve" digest "$pool" >/dev/null
refused=$("$varve" status --json "$pool" | grep -o '"refused": *[0-9]*' | head -n 1 | grep -o '[0-9]*$')
say "refused by the digest: $refused"
stop_mount
fsck_clean
"$varve" scrub "$pool"
stop_daemon
fsck_clean
[ "$refused" = 0 ] || die "$refused operations were refused"
[ "$failed" = 0 ] || die "$failed stressors fail here and not on the host's file system"
say "stress-ng: all stressors of the class, $workers workers, $([ -n "${TOGETHER:-}" ] && echo "together for $TOGETHER s" || echo "$each s each"): clean"
