"""Hits from memory: varve-cache-proxy beside Debian's nginx, by turns in one run, with wrk (`apt-get install wrk`).

`hits.py [ROUNDS] [SECONDS] [CONNECTIONS…]`: objects of 1 KiB, 16 KiB and 1 MiB that are stored, at 1, 64 and 256
connections kept open, or at those that are given. Load and proxies share the processors; all proxies run throughout,
and each round measures each of them once, in an order that rotates. Prints medians and spread of the rounds, the
ratio to nginx as the median of the rounds' own ratios, and the processor time of the proxy for a hit
(/proc/PID/stat), which another job on the machine disturbs less than the rate. nginx runs as peers.py sets it up,
and with sendfile, as Debian's own configuration has it. `VARVE_BEFORE` may name another build of varve-cache-proxy to
measure beside them.
"""

import contextlib
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading

import peers
from attack import Origin, read_head

SIZES = [("1 KiB", 1 << 10), ("16 KiB", 16 << 10), ("1 MiB", 1 << 20)]
CONNECTIONS = (1, 64, 256)
LIMITS = "[limits]\nconnections_per_address = 2000\n"
LONG = "keepalive_requests 100000000; keepalive_timeout 600;"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Pages(Origin):
    """`/N` is a body of N bytes, fresh for long."""

    def answer(self, stream):
        with stream, contextlib.suppress(OSError):
            while data := read_head(stream):
                size = int(re.match(rb"GET /(\d+)", data).group(1))
                stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nETag: \"1\"\r\n"
                               b"Cache-Control: max-age=6000\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)


def processor_seconds(pid):
    """Processor time of a process and its descendants, seconds."""
    ticks = 0
    for one in peers.tree(pid):
        with contextlib.suppress(OSError):
            fields = pathlib.Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK_S


def load(port, size, connections, seconds):
    """Hits a second, and their number; fails if an answer is no hit."""
    done = subprocess.run(["wrk", "-t", str(min(connections, 2)), "-c", str(connections), "-d", f"{seconds}s", "--timeout", "60s",
                           f"http://127.0.0.1:{port}/{size}"], capture_output=True, text=True)
    rate = re.search(r"Requests/sec: +([\d.]+)", done.stdout)
    count = re.search(r"(\d+) requests in", done.stdout)
    wrong = re.search(r"Non-2xx or 3xx responses: (\d+)|Socket errors: (.*)", done.stdout)
    if not rate or wrong:
        raise RuntimeError(done.stdout + done.stderr)
    return float(rate.group(1)), int(count.group(1))


def warm(port, size):
    """Requests an object until it is stored and in memory."""
    for _ in range(8):
        done = subprocess.run(["curl", "-sS", "-o", "/dev/null", "-w", "%{size_download}",
                               f"http://127.0.0.1:{port}/{size}"], capture_output=True, text=True)
        if done.stdout != str(size):
            raise RuntimeError(f"{done.stdout} bytes of {size}: {done.stderr}")


def median_spread(values):
    """Median, and half of the interquartile range."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return statistics.median(values), (quartiles[2] - quartiles[0]) / 2


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    counts = [int(count) for count in sys.argv[3:]] or CONNECTIONS
    origin = Pages()
    programs = [("varve", "varve", {"varve": LIMITS}),
                ("nginx", "nginx", {"nginx": LONG}),
                ("nginx, sendfile", "nginx", {"nginx": LONG + " sendfile on; tcp_nopush on;"})]
    before = os.environ.get("VARVE_BEFORE")
    if before:
        programs.append(("varve, before", "before", {"varve": LIMITS}))
        peers.MAKE["before"] = lambda *given: ([before, *peers.MAKE["varve"](*given)[0][1:]], {"VARVE_LOG": "warn"})
    with contextlib.ExitStack() as stack:
        proxies = {}
        for title, name, extra in programs:
            peer = stack.enter_context(peers.running(name, f"127.0.0.1:{origin.port}", 256, 64, extra))
            proxies[title] = peer
            for _, size in SIZES:
                warm(peer.port, size)
        threading.Event().wait(2.5)
        print(f"{rounds} rounds of {seconds} s; nginx {peers.version('nginx')}; median ± half the quarters' range")
        print(f"{'':<7} {'conn.':>5}  {'':<16} {'hits/s':>15} {'of nginx':>9} {'of the better':>14} {'CPU µs a hit':>16}")
        for label, size in SIZES:
            for connections in counts:
                rates, costs = {title: [] for title in proxies}, {title: [] for title in proxies}
                titles = list(proxies)
                for turn in range(rounds):
                    for title in titles[turn % len(titles):] + titles[:turn % len(titles)]:
                        peer = proxies[title]
                        used = processor_seconds(peer.process.pid)
                        rate, count = load(peer.port, size, connections, seconds)
                        rates[title].append(rate)
                        costs[title].append((processor_seconds(peer.process.pid) - used) / count * 1e6)
                plain, sent = rates["nginx"], rates["nginx, sendfile"]
                for title in titles:
                    rate, spread = median_spread(rates[title])
                    cost, cost_spread = median_spread(costs[title])
                    one = statistics.median(a / b for a, b in zip(rates[title], plain))
                    best = statistics.median(a / max(b, c) for a, b, c in zip(rates[title], plain, sent))
                    print(f"{label:<7} {connections:>5}  {title:<16} {rate:>8.0f} ±{spread:>5.0f} {one:>9.2f} "
                          f"{best:>14.2f} {cost:>9.1f} ±{cost_spread:>5.1f}", flush=True)


if __name__ == "__main__":
    main()
