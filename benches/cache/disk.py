"""Caching proxies on one slow disk: the model of a disk of 7,200 revolutions a minute (`media::emulated`), served by
FUSE under a loop device, so that all meet the same seeks, counted in one place. The load is after Polymix-4
(examples/polymix). `disk.py [--seconds N] [--warm-s N] [--robots N] [--pages N] [--disk-mb N] [--fill-per-s N]
[NAMES…]`; names are `varve:POLICY` and those of peers.py. For ours a second line has the store's own counts by cause.

The cache is filled while the disk takes no time, then the model is put in force. Each program is alone, with a fresh
disk, in a control group of 256 MiB (version 1), page cache included: varve and Traffic Server on the device itself,
Squid (rock), nginx and Varnish on ext4 over it. Needs root, FUSE, loop devices; makes stores with the `varve` of
$VARVE (default target/release/varve). Build first:

    cargo build --release --bin varve -p varve -p varve-cache-proxy
    cargo build --release -p varve-media --example slow_disk
    cargo build --release -p varve-cache-proxy --example polymix
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import peers
from hits import processor_seconds

MIB = 1 << 20
MEMORY_MB = 256
OURS = ["basic", "set", "set-mem", "log", "log-lru", "log-lru-prefetch", "log-prefetch"]
RELEASE = peers.ROOT / "target/release"
VARVE = pathlib.Path(os.environ.get("VARVE", RELEASE / "varve"))
# Of the 256 MiB: what each is told to keep objects in. The rest is for everything else, the page cache included.
HOT_MB = {"varve": 128, "squid": 96, "nginx": 0, "trafficserver": 96, "varnish": 0}
# As the unit in crates/cache-proxy/dist sets it.
MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072",
          "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


class Disk:
    """The slow disk: `device` is a loop device over it."""

    def __init__(self, mount, device):
        self.mount, self.device = mount, device

    def model(self, name):
        (self.mount / "model").write_text(name)

    def counts(self):
        lines = (self.mount / "counts").read_text().splitlines()
        return {name: int(value) for name, value in (line.split() for line in lines)}


@contextlib.contextmanager
def disk(megabytes, work):
    """A disk; unmounted, detached and removed afterwards."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slow-disk-", dir=work))
    (folder / "mnt").mkdir()
    process = subprocess.Popen([str(RELEASE / "examples/slow_disk"), str(folder / "backing"), str(megabytes * MIB),
                                str(folder / "mnt")], stdout=subprocess.DEVNULL)
    device = None
    try:
        end = time.time() + 10
        while not (folder / "mnt/disk").exists():
            if process.poll() is not None or time.time() > end:
                raise RuntimeError("slow_disk does not serve its mount")
            time.sleep(0.05)
        done = subprocess.run(["losetup", "--find", "--show", "--direct-io=on", "--sector-size", "4096",
                               str(folder / "mnt/disk")], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        device = done.stdout.strip()
        yield Disk(folder / "mnt", device)
    finally:
        if device:
            subprocess.run(["losetup", "--detach", device])
        for _ in range(50):
            if subprocess.run(["umount", str(folder / "mnt")], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def group(name):
    """A control group with the memory of this bench."""
    folder = pathlib.Path(f"/sys/fs/cgroup/memory/{name}-{os.getpid()}")
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(MEMORY_MB * MIB))
        yield folder
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


@contextlib.contextmanager
def file_system(device, work):
    """ext4 on a device, mounted."""
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", device], check=True)
    mount = pathlib.Path(tempfile.mkdtemp(prefix="slow-ext4-", dir=work))
    subprocess.run(["mount", "-o", "noatime", device, str(mount)], check=True)
    mount.chmod(0o755)
    try:
        yield mount
    finally:
        for _ in range(300):
            if subprocess.run(["umount", str(mount)], capture_output=True).returncode == 0:
                break
            time.sleep(0.2)
        mount.rmdir()


@contextlib.contextmanager
def proxy(title, origin, slow, work, megabytes, cgroup):
    """A proxy on the disk."""
    name, _, policy = title.partition(":")
    room = megabytes * 17 // 20
    if name == "varve":
        done = subprocess.run([str(VARVE), "cache", "mkstore", slow.device, "--policy", policy, "--object", "8K"],
                              capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        limits = 'connections_per_address = 2000\nin_flight_bytes = "32M"'
        extra = {"device": slow.device, "varve": f"[limits]\n{limits}\n", "varve_env": MALLOC}
        with peers.running(name, origin, megabytes, HOT_MB[name], extra, work, cgroup) as peer:
            yield peer
        return
    if name == "trafficserver":
        shutil.chown(slow.device, "trafficserver")
        try:
            with peers.running(name, origin, megabytes, HOT_MB[name], {"trafficserver_storage": slow.device}, work,
                               cgroup) as peer:
                yield peer
        finally:
            shutil.chown(slow.device, "root")
        return
    with file_system(slow.device, work) as mount:
        with peers.running(name, origin, room, HOT_MB[name], {"nginx_zone_mb": 32}, mount, cgroup) as peer:
            yield peer


CAUSES = {"lookup_reads": "lookups", "tail_reads": "tails", "set_reads": "sets for puts", "position_reads": "positions",
          "segment_reads": "segments", "bin_writes": "bins", "log_writes": "log", "journal_writes": "journal",
          "flushes": "flushes"}


def store_counts(peer):
    """Counters of our store; none of another program's."""
    if peer.name != "varve":
        return {}
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(peer.folder / "admin"))
        s.sendall(b"GET /status HTTP/1.1\r\nHost: admin\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := s.recv(1 << 16):
            answer += piece
    return json.loads(answer[answer.index(b"\r\n\r\n"):])["store"]


def measure(title, args, work):
    """One program: a row of figures."""
    load = [str(RELEASE / "examples/polymix"), "--robots", str(args.robots), "--fill-pages", str(args.pages),
            "--warm-s", str(args.warm_s), "--seconds", str(args.seconds), "--fill-per-s", str(args.fill_per_s)]
    with contextlib.ExitStack() as stack:
        driver = subprocess.Popen(load, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(driver.wait)
        stack.callback(driver.kill)

        def line(word):
            said = driver.stdout.readline().split()
            if said[:1] != [word]:
                raise RuntimeError(f"polymix said {said}")
            return said[1:]

        origin = line("origin")[0]
        slow = stack.enter_context(disk(args.disk_mb, work))
        cgroup = stack.enter_context(group("cache-disk"))
        peer = stack.enter_context(proxy(title, origin, slow, work, args.disk_mb, cgroup))
        stack.callback(lambda: peer.process.poll() and print(f"{title} ended with {peer.process.returncode}"))
        began = time.time()
        print(f"127.0.0.1:{peer.port}", file=driver.stdin, flush=True)
        line("filled")
        filled = time.time() - began
        subprocess.run(["sync", "-f", str(peer.folder)])
        time.sleep(4)
        slow.model("hdd")
        # What is left to do afterwards, the end of the program included, need not take the disk's time.
        stack.callback(slow.model, "none")
        print(file=driver.stdin, flush=True)
        line("begin")
        counts, used, store = slow.counts(), processor_seconds(peer.process.pid), store_counts(peer)
        line("end")
        counts = {name: value - counts[name] for name, value in slow.counts().items()}
        used = processor_seconds(peer.process.pid) - used
        store = {name: value - store[name] for name, value in store_counts(peer).items()}
        rss = peer.rss()
        row = json.loads(driver.stdout.readline())
    seeks = counts["read_seeks"] + counts["write_seeks"]
    row.update(title=title, fill_s=filled, rss_mb=rss / MIB, cpu=used / args.seconds,
               cpu_ms=used / max(1, row["requests"]) * 1e3, seeks=seeks / args.seconds,
               seeks_request=seeks / max(1, row["requests"]), read_seeks=counts["read_seeks"] / max(1, row["requests"]),
               write_seeks=counts["write_seeks"] / max(1, row["requests"]), flushes=counts["flushes"],
               busy=counts["busy_ns"] / 1e9 / args.seconds, counts=counts, store=store)
    return row


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("seconds", 60), ("warm-s", 15), ("robots", 32), ("pages", 10000), ("disk-mb", 3072),
                          ("fill-per-s", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="a file for all figures")
    parser.add_argument("--work", default="/var/tmp")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    there = peers.installed()
    names = args.names or [f"varve:{policy}" for policy in OURS] + [name for name in there if name != "varve"]
    print(f"{args.disk_mb} MiB of disk, {MEMORY_MB} MiB of memory, {args.pages} pages before, {args.robots} robots, "
          f"{args.seconds} s; load average {os.getloadavg()[0]:.1f}")
    print(f"{'':<22} {'req/s':>6} {'of squid':>8} {'hits':>6} {'of off.':>7} {'bytes':>6} {'of off.':>7} {'hit ms':>7} {'p99':>6} "
          f"{'miss ms':>7} {'CPU':>5} {'ms/req':>6} {'RSS':>5} {'seeks/s':>7} {'/req':>5} {'read':>5} {'write':>5} {'flushes':>7} {'busy':>5}")
    rows = []
    # Squid first: the others' rates are told as parts of its.
    for title in sorted(names, key=lambda name: name != "squid"):
        try:
            row = measure(title, args, args.work)
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"{title}: {error}", flush=True)
            continue
        rows.append(row)
        squid = next((one["rate"] for one in rows if one["title"] == "squid"), float("nan"))
        print(f"{title:<22} {row['rate']:>6.0f} {row['rate'] / squid:>8.2f} {row['hit_ratio']:>6.3f} {row['offered']:>7.3f} "
              f"{row['byte_hit_ratio']:>6.3f} {row['offered_bytes']:>7.3f} {row['hits']['mean_ms']:>7.0f} "
              f"{row['hits']['p99_ms']:>6.0f} {row['misses']['mean_ms']:>7.0f} {row['cpu']:>5.2f} {row['cpu_ms']:>6.2f} "
              f"{row['rss_mb']:>5.0f} {row['seeks']:>7.1f} {row['seeks_request']:>5.2f} {row['read_seeks']:>5.2f} "
              f"{row['write_seeks']:>5.2f} {row['flushes']:>7} {row['busy']:>5.2f}", flush=True)
        if row["store"]:
            shares = {what: row["store"][name] / max(1, row["requests"]) for name, what in CAUSES.items()}
            print(f"{'':<22} the store's transfers a request: " +
                  ", ".join(f"{what} {share:.3f}" for what, share in shares.items() if share >= 0.0005) +
                  f"; fill {row['fill_s']:.0f} s", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
