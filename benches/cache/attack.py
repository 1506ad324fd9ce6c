"""Hostile clients against varve-cache-proxy and Debian's proxies.

`attack.py corpus`: requests that two programs can read in two ways, as raw bytes; how each program answers them
and what of it reaches the origin. `attack.py slow [CLIENTS]`: half-open clients that send a byte now and then,
and the times of honest clients beside them.
"""

import contextlib
import re
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time

import peers

CORPUS = [
    ("two lengths", b"POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
    ("two lengths in a list", b"POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 4\r\n\r\nabcd"),
    ("one length twice", b"POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
    ("length +3", b"POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\nabc"),
    ("length 0x3", b"POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 0x3\r\n\r\nabc"),
    ("length, then chunked", b"POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("chunked, then length", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"),
    ("chunked in HTTP/1.0", b"POST /%s HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("coding xchunked", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    ("chunked, identity", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
    ("chunked twice", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("space before the colon", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
    ("vertical tab in the coding", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
    ("chunk with LF", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n"),
    ("chunk size -1", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n0\r\n\r\n"),
    ("chunk size 0x3", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n"),
    ("chunk size of 17 digits", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000003\r\nabc\r\n0\r\n\r\n"),
    ("chunk longer than said", b"POST /%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n"),
    ("lines with LF alone", b"GET /%s HTTP/1.1\nHost: a\n\n"),
    ("one line with LF alone", b"GET /%s HTTP/1.1\r\nHost: a\nX: y\r\n\r\n"),
    ("CR within a field", b"GET /%s HTTP/1.1\r\nHost: a\r\nX: y\rz: 1\r\n\r\n"),
    ("folded line", b"GET /%s HTTP/1.1\r\nHost: a\r\nX: y\r\n folded\r\n\r\n"),
    ("space before the first field", b"GET /%s HTTP/1.1\r\n Host: a\r\n\r\n"),
    ("field without a colon", b"GET /%s HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n"),
    ("empty field name", b"GET /%s HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n"),
    ("NUL in a field", b"GET /%s HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n"),
    ("target's host is another", b"GET http://a/%s HTTP/1.1\r\nHost: b\r\n\r\n"),
    ("Host twice", b"GET /%s HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    ("Host with a list", b"GET /%s HTTP/1.1\r\nHost: a, b\r\n\r\n"),
    ("Host with a path", b"GET /%s HTTP/1.1\r\nHost: a/b\r\n\r\n"),
    ("Host with a user", b"GET /%s HTTP/1.1\r\nHost: u@a\r\n\r\n"),
    ("no Host", b"GET /%s HTTP/1.1\r\n\r\n"),
    ("version 2.0 in text", b"GET /%s HTTP/2.0\r\nHost: a\r\n\r\n"),
    ("version 1.1x", b"GET /%s HTTP/1.1x\r\nHost: a\r\n\r\n"),
    ("two spaces in the request line", b"GET  /%s HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("tab in the request line", b"GET\t/%s HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("space in the target", b"GET /%s b HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("fragment in the target", b"GET /%s#b HTTP/1.1\r\nHost: a\r\n\r\n"),
    ("GET with a body that hides a request",
     b"GET /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nContent-Length: 36\r\n\r\nGET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"),
]


def read_head(stream, data=b""):
    """Reads until the head of a request is complete; returns what was read, or nothing after the end."""
    while b"\r\n\r\n" not in data:
        piece = stream.recv(65536)
        if not piece:
            return b""
        data += piece
    return data


class Origin:
    """Counts the requests that reach it, by their paths."""

    def __init__(self):
        self.seen, self.lock = [], threading.Lock()
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            with contextlib.suppress(OSError):
                stream, _ = self.socket.accept()
                threading.Thread(target=self.answer, args=(stream,), daemon=True).start()

    def answer(self, stream):
        stream.settimeout(5)
        data = b""
        with stream, contextlib.suppress(OSError):
            while data := read_head(stream, data):
                head, data = data.split(b"\r\n\r\n", 1)
                with self.lock:
                    self.seen.append(head.split(b"\r\n", 1)[0])
                length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
                if length:
                    while len(data) < int(length.group(1)):
                        data += stream.recv(65536)
                    data = data[int(length.group(1)):]
                elif b"chunked" in head.lower():
                    while b"0\r\n\r\n" not in data:
                        data += stream.recv(65536)
                    data = data.split(b"0\r\n\r\n", 1)[1]
                stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nCache-Control: max-age=60\r\n\r\nok")

    def take(self):
        with self.lock:
            seen, self.seen = self.seen, []
        return seen


def send(port, data):
    """The statuses that come back within a second, or until the other side ends."""
    back = b""
    with socket.create_connection(("127.0.0.1", port), 5) as stream:
        stream.settimeout(1.0)
        with contextlib.suppress(OSError):
            stream.sendall(data)
            while True:
                piece = stream.recv(65536)
                if not piece:
                    break
                back += piece
    return re.findall(rb"HTTP/1\.[01] (\d{3})", back)


def corpus():
    names = peers.installed()
    origin = Origin()
    verdicts = {}
    for name in names:
        with peers.running(name, f"127.0.0.1:{origin.port}", 256, 16) as peer:
            send(peer.port, b"GET /warm HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            for n, (what, data) in enumerate(CORPUS):
                origin.take()
                statuses = send(peer.port, data.replace(b"%s", b"c%d" % n))
                time.sleep(0.02)
                reached = len(origin.take())
                said = b"+".join(statuses).decode() or "ends"
                verdicts[what, name] = said if reached == 0 else f"{said}, {reached} to origin"
    print("| case | " + " | ".join(f"{name} {peers.version(name)}" for name in names) + " |")
    print("| --- |" + " --- |" * len(names))
    for what, _ in CORPUS:
        print(f"| {what} | " + " | ".join(verdicts[what, name] for name in names) + " |")
    for name in names:
        through = sum("origin" in verdicts[what, name] for what, _ in CORPUS)
        print(f"{name}: {through} of {len(CORPUS)} reach the origin")


def honest(port, seconds, rate, out):
    """One client: requests on connections of 20 each, at a steady rate. Times in seconds."""
    request = b"GET /page HTTP/1.1\r\nHost: a\r\n\r\n"
    begin, n, stream = time.perf_counter(), 0, None
    while True:
        due = begin + n / rate
        now = time.perf_counter()
        if now >= begin + seconds:
            break
        if due > now:
            time.sleep(due - now)
        start = time.perf_counter()
        try:
            if n % 20 == 0 or stream is None:
                if stream:
                    stream.close()
                stream = socket.create_connection(("127.0.0.1", port), 5)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.sendall(request)
            back = b""
            while b"\r\n\r\nok" not in back:
                piece = stream.recv(4096)
                if not piece:
                    raise OSError("it ended")
                back += piece
            out.append(time.perf_counter() - start)
        except OSError:
            out.append(float("inf"))
            stream = None
        n += 1


def times(port, seconds):
    """The honest clients' times, sorted."""
    out = [[] for _ in range(4)]
    threads = [threading.Thread(target=honest, args=(port, seconds, 100, each)) for each in out]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(sum(out, []))


def at(sorted_times, share):
    return sorted_times[min(len(sorted_times) - 1, int(len(sorted_times) * share))] * 1000


def attackers(port, count):
    """Opens half-open clients from many loopback addresses and keeps them at it: a process of its own, which
    says when all are there, and how many the proxy has ended, at each line of its input."""
    code = f"""
import selectors, socket, sys, time, threading
sockets = []
for n in range({count}):
    s = socket.socket()
    s.bind((f'127.1.{{n // 200 // 250}}.{{n // 200 % 250 + 1}}', 0))
    try:
        s.settimeout(5); s.connect(('127.0.0.1', {port}))
        s.sendall(b'GET /page HTTP/1.1\\r\\nHost: a\\r\\nX-Slow: ')
        s.setblocking(False)
    except OSError:
        s.close()
        continue
    sockets.append(s)
print(len(sockets), flush=True)
ended = set()
def go():
    while True:
        for n, s in enumerate(sockets):
            if n % 400 == 0: time.sleep(0.1)
            if n in ended: continue
            try:
                s.send(b'x')
                try:
                    if s.recv(100) == b'': ended.add(n)
                except BlockingIOError: pass
            except OSError: ended.add(n)
threading.Thread(target=go, daemon=True).start()
for line in sys.stdin: print(len(ended), flush=True)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def slow(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    origin = Origin()
    extra = {
        "varve": f"[limits]\nconnections = {count + 1000}\n",
        "squid": "max_filedescriptors 40000\nrequest_start_timeout 15 seconds\nrequest_timeout 15 seconds",
        "nginx": "",
    }
    print(f"{count} half-open clients on 127.1.0.1 and following, a byte a client every 3 s; honest clients: 400 "
          "requests/s of a hit, a new connection every 20; ms")
    print(f"{'':<14} {'p50':>7} {'p99':>7} | {'p50':>7} {'p99':>7} {'p99 ratio':>9} {'failed':>7} {'open':>6} "
          f"{'ended':>6} {'MiB before':>10} {'with':>6}")
    for name in peers.installed():
        if name not in ("varve", "nginx", "squid"):
            continue
        with peers.running(name, f"127.0.0.1:{origin.port}", 256, 16, extra) as peer:
            times(peer.port, 2)
            calm, before = times(peer.port, 12), peer.rss()
            crowd = attackers(peer.port, count)
            try:
                opened = int(crowd.stdout.readline())
                stressed, with_them = times(peer.port, 12), peer.rss()
                crowd.stdin.write("?\n")
                crowd.stdin.flush()
                ended = int(crowd.stdout.readline())
            finally:
                crowd.kill()
                crowd.wait()
            failed = sum(t == float("inf") for t in stressed)
            print(f"{name:<14} {at(calm, .5):>7.3f} {at(calm, .99):>7.3f} | {at(stressed, .5):>7.3f} "
                  f"{at(stressed, .99):>7.3f} {at(stressed, .99) / at(calm, .99):>9.2f} {failed:>7} {opened:>6} "
                  f"{ended:>6} {before >> 20:>10} {with_them >> 20:>6}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["corpus"]:
        corpus()
    elif sys.argv[1:2] == ["slow"]:
        slow(int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
    else:
        sys.exit(__doc__)
