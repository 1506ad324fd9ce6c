#!/bin/bash
# Runs the hardened unit of varve-cache-proxy under a systemd of its own: process 1 of new namespaces over an
# overlay of this system, so that nothing here changes. As root. Says what was tried, and ends all of it.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
program=${VARVE_CACHE_PROXY:-$here/target/release/varve-cache-proxy}
unit=$here/crates/cache-proxy/dist/varve-cache-proxy.service
work=$(mktemp -d)
trap 'umount -R "$work" 2>/dev/null || true; rm -rf "$work"' EXIT
mount -t tmpfs tmpfs "$work"
mkdir "$work"/{upper,work,root,shared}

cat > "$work/shared/inside" <<'INSIDE'
#!/bin/bash
# Within the namespaces, as a unit of that systemd: what a person would do.
exec > /shared/said 2>&1
cd /srv
python3 -m http.server -b 127.0.0.1 8000 >/dev/null 2>&1 &
server=$!
try() { echo "\$ $*"; "$@" 2>&1 | grep -v -e '^server:' -e '^date:' -e '^via:' || true; }
try systemctl start varve-cache-proxy
try systemctl is-active varve-cache-proxy
sleep 0.5
try curl -sS -o /dev/null -D - http://localhost:8080/file
try curl -sS -o /dev/null -D - http://localhost:8080/file
pid=$(systemctl show -P MainPID varve-cache-proxy)
try grep -E '^(Uid|Cap(Prm|Eff|Bnd)|NoNewPrivs|Seccomp):' "/proc/$pid/status"
try ls -ld /var/cache/private/varve-cache-proxy /run/varve-cache-proxy/admin.sock
try /usr/bin/varve-cache-proxy status --socket /run/varve-cache-proxy/admin.sock
try systemctl reload varve-cache-proxy
try systemctl is-active varve-cache-proxy
echo "after 3 s, kill -9:"
sleep 3
kill -9 "$pid"
sleep 4
try systemctl is-active varve-cache-proxy
echo "process changed: $([ "$(systemctl show -P MainPID varve-cache-proxy)" != "$pid" ] && echo yes || echo no)"
try curl -sS -o /dev/null -D - http://localhost:8080/file
try systemctl stop varve-cache-proxy
try systemctl show -p Result,ExecMainStatus varve-cache-proxy
journalctl -q -b --no-pager -u varve-cache-proxy -o cat 2>/dev/null | tail -n 12 || true
kill $server
touch /shared/done
INSIDE
cat > "$work/shared/conf" <<'CONF'
[store]
devices = ["/var/cache/varve-cache-proxy/http.store"]
create_bytes = "64M"
[[listen]]
address = "127.0.0.1:8080"
[[site]]
hosts = ["*"]
origins = ["http://127.0.0.1:8000"]
[admin]
socket = "/run/varve-cache-proxy/admin.sock"
[log]
access = "/var/log/varve-cache-proxy/access.log"
CONF
cat > "$work/shared/start" <<START
set -e
ip link set lo up 2>/dev/null || true
mount -t overlay overlay -o lowerdir=/,upperdir=$work/upper,workdir=$work/work $work/root
cd $work/root
mkdir -p shared srv old
mount --bind $work/shared shared
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount --rbind /dev dev
mount -t tmpfs tmpfs sys/fs/cgroup
if mount -t cgroup2 cgroup2 /mnt 2>/dev/null && [ -n "\$(cat /mnt/cgroup.controllers 2>/dev/null)" ]; then
    umount /mnt; umount sys/fs/cgroup; mount -t cgroup2 cgroup2 sys/fs/cgroup
else
    umount /mnt 2>/dev/null || true
    mkdir sys/fs/cgroup/systemd sys/fs/cgroup/memory sys/fs/cgroup/pids
    mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
    mount -t cgroup -o memory cgroup sys/fs/cgroup/memory
    mount -t cgroup -o pids cgroup sys/fs/cgroup/pids
fi
install -m 755 $program usr/bin/varve-cache-proxy
install -m 644 $unit etc/systemd/system/varve-cache-proxy.service
install -D -m 644 shared/conf etc/varve/cache-proxy.toml
chmod 755 shared/inside
echo "a file for the cache" > srv/file; touch -d '100 days ago' srv/file
printf '[Unit]\nDefaultDependencies=no\nAfter=basic.target\n[Service]\nType=oneshot\nExecStart=/shared/inside\nExecStopPost=/bin/systemctl --no-block poweroff -f -f\n' > etc/systemd/system/try.service
# There is no network to wait for.
ln -sf /dev/null etc/systemd/system/systemd-networkd-wait-online.service
printf '[Unit]\nRequires=basic.target systemd-journald.service try.service\nAllowIsolate=yes\n' > etc/systemd/system/try.target
pivot_root . old
umount -l old || true
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=try.target --log-target=null --show-status=no
START
for kind in systemd memory pids; do mkdir -p "/sys/fs/cgroup/$kind/varve-unit-$$" 2>/dev/null || true; done
(
    for kind in systemd memory pids; do echo "$BASHPID" > "/sys/fs/cgroup/$kind/varve-unit-$$/cgroup.procs" 2>/dev/null || true; done
    exec timeout -k 5 90 unshare --mount --pid --net --uts --ipc --cgroup --fork --kill-child bash "$work/shared/start"
) > "$work/shared/console" 2>&1 &
runner=$!
for _ in $(seq 80); do [ -e "$work/shared/done" ] && break; kill -0 $runner 2>/dev/null || break; sleep 1; done
sleep 1
if [ -e "$work/shared/said" ]; then cat "$work/shared/said"; else echo "no systemd could be started here:"; tail -n 20 "$work/shared/console"; fi
kill $runner 2>/dev/null || true
wait $runner 2>/dev/null || true
for kind in systemd memory pids; do rmdir "/sys/fs/cgroup/$kind/varve-unit-$$" 2>/dev/null || true; done
[ -e "$work/shared/done" ]
