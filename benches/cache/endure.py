"""varve-cache-proxy under load for long.

`endure.py kill [ROUNDS] [POLICY]`: kill -9 at random moments; what is served afterwards must be bytes of that URL,
of a version that the origin gave, and no version that was invalidated 5 s or more before the kill; objects of 5 s
before it must be hits. `endure.py soak [LAPS] [POLICY]`: mixed load until the log has come round so many times;
memory after each lap, each fifth lap what of it the program itself holds (glibc's `malloc_info`, called by gdb,
where gdb is there), and a few times the sizes of its tables.
"""

import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time

import peers

MIB = 1 << 20


def size_of(path):
    """Bytes of a URL's body: most small, some large, a few of megabytes."""
    number = int(hashlib.sha256(path.encode()).hexdigest()[:8], 16)
    return (200 + number % 9000, 20_000 + number % 100_000, 300_000 + number % 2_000_000)[
        0 if number % 100 < 90 else 1 if number % 100 < 99 else 2]


def body_of(path, version):
    """The body says whose it is: every byte follows from path and version."""
    unit = hashlib.sha256(f"{path} {version}".encode()).hexdigest().encode()
    head = f"{path} {version}\n".encode()
    return (head + unit * (size_of(path) // 64 + 1))[: max(size_of(path), len(head))]


class Origin(socketserver.ThreadingTCPServer):
    """Answers GET with the present version of a path; POST makes a new one."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 256

    def __init__(self):
        self.versions, self.lock, self.gets = {}, threading.Lock(), 0
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def version(self, path):
        return self.versions.get(path, 0)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    line = self.rfile.readline().split()
                    if len(line) < 2:
                        return
                    fields = {}
                    while (field := self.rfile.readline().strip()):
                        name, _, value = field.partition(b":")
                        fields[name.lower()] = value.strip()
                    path = line[1].decode()
                    if line[0] == b"POST":
                        with self.server.lock:
                            self.server.versions[path] = self.server.version(path) + 1
                        self.wfile.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                        continue
                    with self.server.lock:
                        self.server.gets += 1
                        version = self.server.version(path)
                    data = body_of(path, version)
                    self.wfile.write(
                        f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\nCache-Control: max-age=100000\r\n"
                        f'ETag: "{version}"\r\nCache-Tag: t{len(path) % 5}\r\n\r\n'.encode() + data)


class Client:
    """One connection; asks, and says whether the answer is right."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def ask(self, method, path, fields=None):
        self.connection.request(method, path, headers={"Host": "site.test", **(fields or {})})
        answer = self.connection.getresponse()
        return answer.status, answer.read(), answer.headers


def start(folder, port, origin, disk, policy):
    (folder / "conf").write_text(
        f'[store]\ndevices = ["{folder}/store"]\ncreate_bytes = "{disk // MIB}M"\nhot_bytes = "4M"\n'
        f'policy = "{policy}"\n[[listen]]\naddress = "127.0.0.1:{port}"\n[[site]]\nhosts = ["*"]\n'
        f'origins = ["http://127.0.0.1:{origin}"]\n[admin]\nsocket = "{folder}/admin"\n')
    began = time.time()
    process = subprocess.Popen([str(peers.VARVE), "serve", "--config", str(folder / "conf")],
                               stderr=open(folder / "log", "a"),
                               env={"VARVE_LOG": "warn", **{k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "GLIBC_"))}})
    peers.wait_for(port, process)
    return process, time.time() - began


def check(path, data, versions):
    """The version of a body; fails if the body is not of this path, whole, and of one of `versions`."""
    found = re.match(rb"(\S+) (\d+)\n", data)
    if not found or found.group(1).decode() != path or data != body_of(path, int(found.group(2))):
        raise AssertionError(f"wrong bytes for {path}: {data[:60]}")
    if int(found.group(2)) not in versions:
        raise AssertionError(f"version {found.group(2)} of {path}, not {versions}")
    return int(found.group(2))


def kill(rounds, policy):
    rng = random.Random(1)
    sums = dict(requests=0, found=0, expected=0, checked=0, slowest=0.0)
    with tempfile.TemporaryDirectory() as name:
        folder, origin, port = pathlib.Path(name), Origin(), peers.free_port()
        # When each path was last stored for certain, and invalidated: (time, version).
        stored, invalidated = {}, {}
        for n in range(rounds):
            process, seconds = start(folder, port, origin.port, 512 * MIB, policy)
            sums["slowest"] = max(sums["slowest"], seconds)
            try:
                # What the kill before left.
                client = Client(port)
                sample = rng.sample(sorted(stored), min(len(stored), 40))
                for path in sample:
                    when, version, killed = stored[path]
                    status, data, headers = client.ask("GET", path, {"Cache-Control": "only-if-cached"})
                    old = killed - when >= 5
                    sums["expected"] += old
                    if status == 200:
                        least = 0
                        if path in invalidated and killed - invalidated[path][0] >= 5:
                            least = invalidated[path][1]
                        check(path, data, range(least, origin.version(path) + 1))
                        sums["checked"] += 1
                        sums["found"] += old
                stop, wrong = threading.Event(), []

                def load(seed):
                    mine, rng = Client(port), random.Random(seed)
                    try:
                        while not stop.is_set():
                            path = f"/{n % 10}/{rng.randrange(300)}"
                            if rng.random() < 0.02:
                                if mine.ask("POST", path)[0] == 204:
                                    with origin.lock:
                                        invalidated[path] = (time.time(), origin.version(path))
                                        stored.pop(path, None)
                                continue
                            before = origin.version(path)
                            _, data, headers = mine.ask("GET", path)
                            version = check(path, data, range(0, origin.version(path) + 1))
                            sums["requests"] += 1
                            # A hit: it is stored. A POST of another client may have come in between.
                            if "age" in headers and version == before == origin.version(path):
                                with origin.lock:
                                    stored.setdefault(path, (time.time(), version, 0))
                    except (OSError, http.client.HTTPException):
                        pass
                    except AssertionError as error:
                        wrong.append(str(error))

                threads = [threading.Thread(target=load, args=(n * 10 + t,)) for t in range(3)]
                for thread in threads:
                    thread.start()
                # Most lives are short; each fifth has something of 5 s before its end.
                time.sleep(rng.uniform(0.3, 1.2) if n % 5 else rng.uniform(6.5, 7.5))
                process.send_signal(signal.SIGKILL)
                now = time.time()
                process.wait()
                stop.set()
                for thread in threads:
                    thread.join()
                if wrong:
                    raise AssertionError(wrong)
                stored = {path: (when, version, killed or now) for path, (when, version, killed) in stored.items()}
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        origin.shutdown()
    share = sums["found"] / max(1, sums["expected"])
    print(f"{policy}: {rounds} kills, {sums['requests']} requests under load, {sums['checked']} objects looked at "
          f"afterwards: no wrong bytes, no invalidated version; of 5 s before: {sums['found']} of {sums['expected']} "
          f"({share:.1%}); slowest start {sums['slowest']:.2f} s")


def heap(pid, log):
    """MiB that the program has allocated, and that the allocator keeps free, by glibc's own account."""
    if not shutil.which("gdb"):
        return None
    before = log.stat().st_size
    subprocess.run(["gdb", "-nx", "-batch", "-p", str(pid), "-ex", "call (int)malloc_info(0, *(void**)&stderr)"],
                   capture_output=True, timeout=60)
    text = log.read_bytes()[before:].decode(errors="replace")
    # Its last totals are those of all arenas.
    last = lambda kind: int((re.findall(kind, text) or ["0"])[-1])
    free = last(r'<total type="fast" count="\d+" size="(\d+)"') + last(r'<total type="rest" count="\d+" size="(\d+)"')
    arenas = last(r'<system type="current" size="(\d+)"')
    mapped = last(r'<total type="mmap" count="\d+" size="(\d+)"')
    return ((arenas - free + mapped) / MIB, free / MIB) if arenas else None


def soak(laps, policy):
    disk = 64 * MIB
    with tempfile.TemporaryDirectory() as name:
        folder, origin, port = pathlib.Path(name), Origin(), peers.free_port()
        process, _ = start(folder, port, origin.port, disk, policy)
        try:
            stop, wrong, done = threading.Event(), [], [0] * 4

            def load(seed):
                mine, rng = Client(port), random.Random(seed)
                try:
                    while not stop.is_set():
                        path = f"/{rng.randrange(100) if rng.random() < 0.5 else rng.randrange(40_000)}"
                        kind = rng.random()
                        if kind < 0.01:
                            mine.ask("POST", path)
                        elif kind < 0.05:
                            mine.ask("GET", path, {"Range": "bytes=0-99"})
                        else:
                            _, data, _ = mine.ask("GET", path)
                            check(path, data, range(0, origin.version(path) + 1))
                        done[seed] += 1
                except AssertionError as error:
                    wrong.append(str(error))

            threads = [threading.Thread(target=load, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            least, rows, ratios, heaps, sizes, before = None, [], [], {}, {}, (0, 0)
            status = [str(peers.VARVE), "status", "--json", "--socket", str(folder / "admin")]
            while len(rows) < laps and not wrong:
                time.sleep(0.2)
                now = json.loads(subprocess.run(status, capture_output=True).stdout)
                written = now["store"]["written_bytes"]
                rss = peers.rss_bytes(process.pid)
                least = rss if least is None else min(least, rss)
                if written // disk > len(rows):
                    rows.append(least)
                    least = None
                    if len(rows) % 5 == 0 and (held := heap(process.pid, folder / "log")):
                        heaps[len(rows)] = held
                    if len(rows) in (laps // 4, laps // 2, laps):
                        threads_now = len(os.listdir(f"/proc/{process.pid}/task"))
                        sizes[len(rows)] = {"threads": threads_now, **now.get("memory", {})}
                    counts = now["requests"]
                    hits, all_ = counts["hit"], counts["hit"] + counts["miss"]
                    ratios.append((hits - before[0], all_ - before[1]))
                    before = (hits, all_)
            stop.set()
            for thread in threads:
                thread.join()
            if wrong:
                raise AssertionError(wrong)
            mean = lambda values: sum(values) / len(values)
            print(f"{policy}: {sum(done)} requests, {origin.gets} to the origin, {written // MIB} MiB written to a store "
                  f"of {disk // MIB} MiB ({written / disk:.1f} laps)")
            at, middle = laps // 2, laps // 2 + (laps - laps // 2) // 2
            print("  MiB in laps " + ", ".join(
                f"{n + 1}: {rows[n] / MIB:.2f}" for n in sorted({0, *range(4, laps, 5), laps - 1})))
            if heaps:
                print("  MiB allocated + kept free, after laps " + ", ".join(
                    f"{n}: {used:.2f} + {free:.2f}" for n, (used, free) in heaps.items()))
            for lap, now in sizes.items():
                print(f"  sizes after lap {lap}: " + ", ".join(f"{name} {value}" for name, value in now.items()))
            print(f"  laps {at + 1} to {middle} against {middle + 1} to {laps}: "
                  f"{(mean(rows[middle:]) / mean(rows[at:middle]) - 1):+.2%}; between the laps of the last half: "
                  f"{min(rows[at:]) / mean(rows[at:]) - 1:+.2%} to {max(rows[at:]) / mean(rows[at:]) - 1:+.2%}")
            # Whether a request hits is a draw of its own nearly: the share in a lap of n wanders by sqrt(p(1-p)/n).
            half = ratios[at:]
            share = sum(hits for hits, _ in half) / sum(count for _, count in half)
            lap = mean([count for _, count in half])
            drawn = (share * (1 - share) / lap) ** 0.5
            seen = mean([(hits / count - share) ** 2 for hits, count in half]) ** 0.5
            worst = max(abs(hits / count - share) for hits, count in half)
            print(f"  hits in the last half: {share:.2%} of {lap:.0f} requests a lap; laps differ by {seen:.2%} of the "
                  f"requests (standard deviation), at most {worst:.2%}; drawing alone gives {drawn:.2%}")
        finally:
            process.terminate()
            process.wait()
            origin.shutdown()


if __name__ == "__main__":
    command, count = sys.argv[1:2], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    policy = sys.argv[3] if len(sys.argv) > 3 else "log-lru"
    if command == ["kill"]:
        kill(count or 100, policy)
    elif command == ["soak"]:
        soak(count or 20, policy)
    else:
        sys.exit(__doc__)
