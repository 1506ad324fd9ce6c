#!/bin/sh
# Builds, runs, changes and commits a container image whose storage (overlay) lies on a mount of Varve: as root, then rootless as the user $RUNNER.
# Needs root, podman, buildah, runc, uidmap, busybox-static, a user with lines in /etc/subuid and /etc/subgid; no network.
# Prints what the containers print; the same with STORE=DIR, a directory elsewhere, is what it must be compared with.
set -eu
: "${VARVE:=target/release/varve}" "${RUNNER:=runner}"
work=$(mktemp -d)
chmod 755 "$work"
store=${STORE:-}
finish() {
    status=$?
    if [ -z "$store" ]; then
        "$VARVE" down --force "$work/pool" >/dev/null 2>&1 || true
        uuid=$(sed -n 's/^uuid = "\(.*\)"$/\1/p' "$work/pool/varve.toml" 2>/dev/null)
        if [ -n "$uuid" ]; then rm -rf "/dev/shm/varve-$uuid-"*; fi
    fi
    if [ -n "$store" ]; then chmod -R u+rwX "$store/root" "$store/user" 2>/dev/null || true; rm -rf "$store/root" "$store/user"; fi
    rm -rf "$work"
    exit $status
}
trap finish EXIT INT TERM
if [ -z "$store" ]; then
    "$VARVE" up "$work/pool" --nvm shm:256M --ssd 512M --hdd 0 --allow-other >"$work/up.log" 2>&1 &
    while ! grep -q Ctrl-C "$work/up.log"; do
        kill -0 $! || { cat "$work/up.log"; exit 1; }
        sleep 0.2
    done
    at=$work/pool/mnt
else
    at=$store
fi

mkdir "$work/context"
cp /bin/busybox "$work/context/busybox"
cat >"$work/context/Containerfile" <<'END'
FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
RUN echo one > /a && echo two > /b && mkdir /d && echo in > /d/in
RUN rm /a && mv /b /c && mv /d /e && rm -r /e && mkdir /e && echo new > /e/new
CMD ["/bin/sh", "-c", "ls / /e; cat /c /e/new"]
END
# A machine that may not raise limits refuses podman's own.
printf '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]\n' >"$work/containers.conf"

cat >"$work/session.sh" <<'END'
set -eu
export CONTAINERS_CONF=$WORK/containers.conf XDG_RUNTIME_DIR=$MINE/runtime
mkdir -p "$XDG_RUNTIME_DIR"
cd "$MINE"
where="--root $GRAPH --runroot $MINE/runroot --storage-driver overlay"
build() { buildah $where "$@"; }
run() { podman $where --runtime runc --cgroup-manager cgroupfs run --network none --rm "$@"; }
build bud --isolation chroot -q -t first "$WORK/context" >/dev/null
run first
container=$(build from first)
build run --isolation chroot "$container" /bin/sh -c '
    id -u; rm /c; mv /e /f; echo more >> /f/new; ln /f/new /hard && mv /bin/ed /bin/edit
    touch /owned; chown 7:8 /owned; chmod 4755 /owned'
build commit -q "$container" second >/dev/null
run second /bin/sh -c 'ls -ln / /f | awk "{print \$1, \$3, \$4, \$9}"; cat /f/new /hard'
build rm -a >/dev/null
build rmi -a -f >/dev/null
# The process that keeps a rootless user's namespaces, and in them a copy of the mount.
pause=$XDG_RUNTIME_DIR/libpod/tmp/pause.pid
if [ -f "$pause" ]; then kill "$(cat "$pause")"; fi
END

# As whom, with which command before it.
session() {
    mkdir -p "$work/$1" "$at/$1"
    chown "$2" "$work/$1" "$at/$1"
    who=$1
    shift 2
    echo "== $who"
    env WORK="$work" MINE="$work/$who" GRAPH="$at/$who/graph" "$@" sh "$work/session.sh"
}
session root root
home=$(getent passwd "$RUNNER" | cut -d: -f6)
session user "$RUNNER" HOME="$home" setpriv --reuid="$RUNNER" --regid="$RUNNER" --init-groups
