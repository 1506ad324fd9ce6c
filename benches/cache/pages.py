"""Caching proxies on one slow disk (disk.py) under the pages of Debian's -doc packages: users walk sqlite3-doc,
python3-doc and postgresql-doc, which a local nginx serves.

`pages.py [--seconds N] [--warm-s N] [--robots N] [--copies N] [NAMES…]`: the pages are there under many prefixes (copies), so
that they are several times the memory. The first copies are asked for once while the disk takes no time; then the
model is put in force and robots walk without pauses: ten pages, each by a link of the one before, each with what it
embeds, once a walk. A quarter of the walks is in a copy that nobody asked for before, a new one every 40 of them. Every
body is compared with its file. A hit is an answer that bears the number of an earlier one of the origin.

    apt-get install nginx-light sqlite3-doc python3-doc postgresql-doc; the rest as for disk.py.
"""

import argparse
import contextlib
import http.client
import itertools
import os
import pathlib
import posixpath
import random
import re
import subprocess
import threading
import time
import zlib

import disk
import peers
from hits import processor_seconds

ROOTS = {"sqlite": ["/usr/share/doc/sqlite3"], "python": ["/usr/share/doc/python3.11/html"],
         "postgresql": ["/usr/share/doc/postgresql-doc-15/html"]}
EMBEDDED = re.compile(r"<(?:link|script|img)\b[^>]*?\b(?:href|src)=[\"']([^\"'#?]+)")
LINK = re.compile(r"<a\b[^>]*?\bhref=[\"']([^\"'#?:]+\.html)")


class Pages:
    """What there is: pages with what they embed and link to, and the sums of all files."""

    def __init__(self):
        self.pages, self.sums, self.roots = {}, {}, {}
        for name, roots in ROOTS.items():
            root = next((pathlib.Path(root) for root in roots if pathlib.Path(root).is_dir()), None)
            if root is None:
                raise SystemExit(f"no pages of {name}: {roots}")
            self.roots[name] = root
            for path in sorted(root.rglob("*.html")):
                at = f"{name}/{path.relative_to(root)}"
                text = path.read_text(errors="replace")
                near = lambda found: [posixpath.normpath(posixpath.join(posixpath.dirname(at), one)) for one in found]
                embedded = dict.fromkeys(one for one in near(EMBEDDED.findall(text)) if self.is_file(one))
                self.pages[at] = (list(embedded), near(LINK.findall(text)))
        for embedded, links in self.pages.values():
            links[:] = [link for link in links if link in self.pages]

    def file(self, at):
        name, _, rest = at.partition("/")
        return self.roots[name] / rest if name in self.roots else None

    def is_file(self, at):
        path = self.file(at)
        return path is not None and path.suffix != ".html" and path.is_file()

    def sum(self, at):
        if at not in self.sums:
            data = self.file(at).read_bytes()
            self.sums[at] = (len(data), zlib.crc32(data))
        return self.sums[at]

    def bytes(self):
        files = set(self.pages).union(*(embedded for embedded, _ in self.pages.values()))
        return len(files), sum(self.sum(at)[0] for at in files)


def origin(pages):
    """nginx with the pages under every number; its port."""
    port = peers.free_port()
    places = "".join(f"location ~ ^/\\d+/{name}/(.*)$ {{ alias {root}/$1; }}\n" for name, root in pages.roots.items())
    return peers.nginx(
        f"include /etc/nginx/mime.types; server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000; etag on;\n"
        f"add_header Cache-Control max-age=86400; add_header X-Serial $request_id;\n{places}}}", port)


class Robot:
    """A user: one connection."""

    def __init__(self, port, pages, seen):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.pages, self.seen, self.rows = pages, seen, []

    def ask(self, copy, at, referer=None):
        fields = {"Host": "docs.test"}
        if referer:
            fields["Referer"] = f"http://docs.test/{copy}/{referer}"
        began = time.time()
        self.connection.request("GET", f"/{copy}/{at}", headers=fields)
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status != 200 or (len(data), zlib.crc32(data)) != self.pages.sum(at):
            raise AssertionError(f"wrong answer for {at}: {answer.status}, {len(data)} bytes")
        serial = answer.headers["X-Serial"]
        is_hit = serial in self.seen
        self.seen.add(serial)
        self.rows.append((began, time.time() - began, len(data), is_hit))

    def page(self, copy, at, had):
        self.ask(copy, at)
        for one in self.pages.pages[at][0]:
            if one not in had:
                had.add(one)
                self.ask(copy, one, at)


def threads(count, work):
    """Runs `work(number)` on threads; raises what one of them raised."""
    wrong = []

    def guarded(number):
        try:
            work(number)
        except Exception as error:  # noqa: BLE001, told below
            wrong.append(error)

    started = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    return started, wrong


def walk(robot, rng, pages, names, copies, fresh, stop):
    while not stop.is_set():
        copy = next(fresh) // 40 + copies + 1 if rng.random() < 0.25 else rng.randrange(1, copies + 1)
        at, had = rng.choice(names), set()
        for _ in range(10):
            if stop.is_set():
                return
            robot.page(copy, at, had)
            at = rng.choice(pages.pages[at][1] or names)


def measure(title, args, pages, port, work):
    """One program: a row of figures."""
    names, seen = list(pages.pages), set()
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(disk.disk(args.disk_mb, work))
        cgroup = stack.enter_context(disk.group("cache-pages"))
        peer = stack.enter_context(disk.proxy(title, f"127.0.0.1:{port}", slow, work, args.disk_mb, cgroup))
        todo = iter([(copy, at) for copy in range(1, args.copies + 1) for at in names])
        lock, had = threading.Lock(), [set() for _ in range(args.copies + 1)]

        def fill(_number):
            robot = Robot(peer.port, pages, seen)
            while True:
                with lock:
                    copy, at = next(todo, (0, None))
                if not at:
                    return
                robot.page(copy, at, had[copy])

        started, wrong = threads(8, fill)
        [thread.start() for thread in started], [thread.join() for thread in started]
        if wrong:
            raise RuntimeError(str(wrong[0]))
        subprocess.run(["sync", "-f", str(peer.folder)])
        time.sleep(4)
        slow.model("hdd")
        stack.callback(slow.model, "none")
        robots, stop, fresh = [], threading.Event(), itertools.count()

        def act(number):
            robot = Robot(peer.port, pages, seen)
            robots.append(robot)
            walk(robot, random.Random(number), pages, names, args.copies, fresh, stop)

        started, wrong = threads(args.robots, act)
        [thread.start() for thread in started]
        time.sleep(args.warm_s)
        counts, used, begin = slow.counts(), processor_seconds(peer.process.pid), time.time()
        time.sleep(args.seconds)
        end, used = time.time(), processor_seconds(peer.process.pid) - used
        counts = {name: value - counts[name] for name, value in slow.counts().items()}
        stop.set()
        [thread.join() for thread in started]
        if wrong:
            raise RuntimeError(str(wrong[0]))
        rss = peer.rss()
    rows = [row for robot in robots for row in robot.rows if begin <= row[0] and row[0] + row[1] <= end]
    times = sorted(row[1] for row in rows if row[3])
    hits = len(times)
    return {"rate": len(rows) / (end - begin), "hits": hits / len(rows), "bytes": sum(row[2] for row in rows if row[3])
            / sum(row[2] for row in rows), "mean": sum(times) / max(1, hits) * 1e3,
            "p99": times[int(hits * 0.99)] * 1e3 if times else 0, "cpu": used / len(rows) * 1e3, "rss": rss / disk.MIB,
            "read": counts["read_seeks"] / len(rows), "write": counts["write_seeks"] / len(rows),
            "busy": counts["busy_ns"] / 1e9 / (end - begin)}


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("seconds", 40), ("warm-s", 10), ("robots", 32), ("copies", 8), ("disk-mb", 3072)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("names", nargs="*", default=["squid", "varve:log-prefetch", "varve:set-mem", "trafficserver"])
    args = parser.parse_args()
    peers.installed()
    pages = Pages()
    files, total = pages.bytes()
    print(f"{len(pages.pages)} pages, {files} files, {total / disk.MIB:.0f} MiB, {args.copies} times; {args.disk_mb} MiB of disk, "
          f"{disk.MEMORY_MB} MiB of memory, {args.robots} robots, {args.seconds} s; load average {os.getloadavg()[0]:.1f}")
    print(f"{'':<22} {'req/s':>6} {'of squid':>8} {'hits':>6} {'bytes':>6} {'hit ms':>7} {'p99':>6} {'CPU ms':>6} {'RSS':>5} {'read':>6} "
          f"{'write':>6} {'busy':>5}")
    squid = float("nan")
    with origin(pages) as port:
        for title in args.names:
            try:
                row = measure(title, args, pages, port, "/var/tmp")
            except (RuntimeError, subprocess.SubprocessError) as error:
                print(f"{title}: {error}", flush=True)
                continue
            squid = row["rate"] if title == "squid" else squid
            print(f"{title:<22} {row['rate']:>6.0f} {row['rate'] / squid:>8.2f} {row['hits']:>6.3f} {row['bytes']:>6.3f} "
                  f"{row['mean']:>7.0f} {row['p99']:>6.0f} {row['cpu']:>6.2f} {row['rss']:>5.0f} {row['read']:>6.3f} "
                  f"{row['write']:>6.3f} {row['busy']:>5.2f}", flush=True)


if __name__ == "__main__":
    main()
