"""Hits a second of varve-cache-proxy beside Debian's proxies, by ApacheBench (`apt-get install apache2-utils`):
one object of 8 KB that is stored, 1, 64 and 1,000 connections kept open. Load and proxy share the processors.
"""

import re
import subprocess
import threading
import time

import peers
from attack import Origin, read_head

BODY = b"x" * 8000


class Pages(Origin):
    """Every path is a page of 8 KB, fresh for long."""

    def answer(self, stream):
        with stream:
            while read_head(stream):
                stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 8000\r\nCache-Control: max-age=600\r\n\r\n" + BODY)


def bench(port, connections, requests):
    done = subprocess.run(["ab", "-q", "-k", "-l", "-s", "20", "-c", str(connections), "-n", str(requests),
                           f"http://127.0.0.1:{port}/page"], capture_output=True, text=True)
    rate = re.search(r"Requests per second: +([\d.]+)", done.stdout)
    failed = re.search(r"Non-2xx responses: +(\d+)", done.stdout)
    tail = re.search(r"99% +(\d+)", done.stdout)
    if not rate or failed:
        return float("nan"), "?"
    return float(rate.group(1)), tail.group(1)


def main():
    origin = Pages()
    there = peers.installed()
    rows, extra = {}, {"varve": "[limits]\nconnections_per_address = 2000\n"}
    for name in there:
        with peers.running(name, f"127.0.0.1:{origin.port}", 256, 64, extra) as peer:
            for _ in range(3):
                bench(peer.port, 1, 100)
            time.sleep(1)
            rows[name] = [max(bench(peer.port, c, n) for _ in range(3)) for c, n in ((1, 10000), (64, 60000), (1000, 60000))]
    print(f"{'':<14} {'version':<8}" + "".join(f" {c:>5} conn.: hits/s  p99 ms  of nginx" for c in (1, 64, 1000)))
    for name, row in rows.items():
        print(f"{name:<14} {peers.version(name):<8}" + "".join(
            f" {rate:>19.0f} {tail:>7} {rate / rows['nginx'][n][0] if 'nginx' in rows else float('nan'):>9.2f}"
            for n, (rate, tail) in enumerate(row)))


if __name__ == "__main__":
    main()
