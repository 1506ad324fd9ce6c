"""Hits that a device must answer: varve-cache-proxy beside Debian's nginx on the machine's own disk, by turns in one
run, with wrk (`apt-get install wrk`).

`disk_hits.py [ROUNDS] [SECONDS] [CONNECTIONS…]`: 512 MiB of objects of 16 KiB are stored and asked for at random, over
connections that stay open. Each proxy runs in a control group (version 1) of 128 MiB, page cache
included, and keeps 16 MiB of objects at most, so that most hits are read from the device; how many is counted
(`reads a hit`: our store's counters; bytes that nginx caused to be read, /proc/PID/io, by the size). nginx as peers.py
sets it up, and with `aio threads`. Both have their files on the same file system ($TMPDIR or /var/tmp). Needs root.
Every answer is checked to be no miss: the origin counts.
"""

import contextlib
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import disk
import peers
from attack import Origin, read_head
from hits import LIMITS, LONG, median_spread, processor_seconds

MIB = 1 << 20
MEMORY_MB, HOT_MB, STORE_MB, OBJECTS_MB = 128, 16, 1024, 512
SIZES = [("16 KiB", 16 << 10)]
CONNECTIONS = (1, 64, 1000)
SCRIPT = """
local threads = 0
function setup(thread) threads = threads + 1; thread:set("number", threads) end
function init(args) state = (number * 104729 + os.time()) %% 2147483646 + 1 end
-- Park and Miller's generator.
function request()
  state = state * 16807 %% 2147483647
  return wrk.format("GET", "/%d?n=" .. state %% %d)
end
"""


class Pages(Origin):
    """`/N?…` is a body of N bytes, fresh for long."""

    count = 0

    def answer(self, stream):
        with stream, contextlib.suppress(OSError):
            while data := read_head(stream):
                size = int(re.match(rb"GET /(\d+)", data).group(1))
                with self.lock:
                    self.count += 1
                stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nETag: \"1\"\r\n"
                               b"Cache-Control: max-age=60000\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)


def fill(port, size, origin):
    """Asks for one object after the other, again and again, until all were asked for and no more are missed."""
    count, start = OBJECTS_MB * MIB // size, 0
    for _ in range(60):
        before = origin.count
        with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
            file.write(f"local at = {start}\nfunction request() at = at + 1; "
                       f'return wrk.format("GET", "/{size}?n=" .. (at - 1) % {count}) end\n')
            file.flush()
            done = subprocess.run(["wrk", "-t", "1", "-c", "4", "-d", "4s", "-s", file.name, f"http://127.0.0.1:{port}"],
                                  capture_output=True, text=True)
        asked = int(re.search(r"(\d+) requests in", done.stdout).group(1))
        start += asked
        if start > 2 * count and origin.count - before < asked / 200:
            return
    raise RuntimeError(f"{origin.count - before} of {asked} objects are not stored")


def device_reads(peer, size):
    """Reads of the device so far: of our store, or of nginx by its bytes."""
    if peer.name == "varve":
        store = disk.store_counts(peer)
        return store["lookup_reads"] + store["tail_reads"] + store["position_reads"]
    total = 0
    for one in peers.tree(peer.process.pid):
        with contextlib.suppress(OSError):
            total += int(re.search(r"read_bytes: (\d+)", pathlib.Path(f"/proc/{one}/io").read_text()).group(1))
    return total / size


def load(port, size, connections, seconds, script):
    """Hits a second and their number, and the 99th percentile of their time."""
    done = subprocess.run(["wrk", "-t", str(min(connections, 2)), "-c", str(connections), "-d", f"{seconds}s", "--latency",
                           "--timeout", "60s", "-s", script, f"http://127.0.0.1:{port}"], capture_output=True, text=True)
    rate = re.search(r"Requests/sec: +([\d.]+)", done.stdout)
    count = re.search(r"(\d+) requests in", done.stdout)
    p99 = re.search(r"99% +([\d.]+)(us|ms|s)", done.stdout)
    wrong = re.search(r"Non-2xx or 3xx responses: (\d+)|Socket errors: (.*)", done.stdout)
    if not rate or not p99 or wrong:
        raise RuntimeError(done.stdout + done.stderr)
    return float(rate.group(1)), int(count.group(1)), float(p99.group(1)) * {"us": 1e-3, "ms": 1, "s": 1e3}[p99.group(2)]


def measure(label, size, counts, rounds, seconds, work):
    """Rows of one size."""
    programs = [("varve", "varve", {"varve": LIMITS, "varve_env": disk.MALLOC}),
                ("nginx", "nginx", {"nginx": LONG, "nginx_zone_mb": 32}),
                ("nginx, aio threads", "nginx", {"nginx": LONG + " aio threads;", "nginx_zone_mb": 32})]
    titles = [title for title, _, _ in programs]
    with contextlib.ExitStack() as stack:
        origins, proxies = {}, {}
        for number, (title, name, extra) in enumerate(programs):
            origins[title] = Pages()
            group = stack.enter_context(disk.group(f"cache-hits-{number}"))
            (group / "memory.limit_in_bytes").write_text(str(MEMORY_MB * MIB))
            proxies[title] = stack.enter_context(peers.running(
                name, f"127.0.0.1:{origins[title].port}", STORE_MB, HOT_MB, extra, work, group))
            fill(proxies[title].port, size, origins[title])
        script = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".lua"))
        script.write(SCRIPT % (size, OBJECTS_MB * MIB // size))
        script.flush()
        time.sleep(3)
        for connections in counts:
            rows = {title: [] for title in titles}
            for turn in range(rounds):
                for title in titles[turn % len(titles):] + titles[:turn % len(titles)]:
                    peer, missed = proxies[title], origins[title].count
                    used, reads = processor_seconds(peer.process.pid), device_reads(peer, size)
                    rate, count, p99 = load(peer.port, size, connections, seconds, script.name)
                    rows[title].append((rate, p99, (processor_seconds(peer.process.pid) - used) / count * 1e6,
                                        (device_reads(peer, size) - reads) / count,
                                        (origins[title].count - missed) / count))
            better = [max(a[0], b[0]) for a, b in zip(rows["nginx"], rows["nginx, aio threads"])]
            for title in titles:
                rate, spread = median_spread([row[0] for row in rows[title]])
                one = statistics.median(a[0] / b[0] for a, b in zip(rows[title], rows["nginx"]))
                best = statistics.median(a[0] / b for a, b in zip(rows[title], better))
                p99, cost, reads, missed = (statistics.median(row[n] for row in rows[title]) for n in range(1, 5))
                print(f"{label:<7} {connections:>5}  {title:<18} {rate:>7.0f} ±{spread:>5.0f} {one:>8.2f} {best:>13.2f} "
                      f"{p99:>7.1f} {cost:>12.1f} {reads:>11.2f} {missed:>7.4f}", flush=True)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    counts = [int(count) for count in sys.argv[3:]] or CONNECTIONS
    work = os.environ.get("TMPDIR", "/var/tmp")
    print(f"{rounds} rounds of {seconds} s; {OBJECTS_MB} MiB of objects, {MEMORY_MB} MiB of memory; nginx "
          f"{peers.version('nginx')}; load average {os.getloadavg()[0]:.1f}; median ± half the quarters' range")
    print(f"{'':<7} {'conn.':>5}  {'':<18} {'hits/s':>14} {'of nginx':>8} {'of the better':>13} {'p99 ms':>7} "
          f"{'CPU µs a hit':>12} {'reads a hit':>11} {'misses':>7}")
    for label, size in SIZES:
        measure(label, size, counts, rounds, seconds, work)


if __name__ == "__main__":
    main()
