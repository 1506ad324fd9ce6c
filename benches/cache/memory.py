"""Memory an object of caching proxies: each stores OBJECTS objects (default 2,000,000) of some 150 bytes with a small
memory cache, and its resident bytes are compared with those of an empty one. `memory.py [OBJECTS [NAMES...]]`.

The origin is Debian's nginx with answers of its own. Requests are pipelined, several hundred at once on a few
connections, since the load must not be what takes the time.
"""

import multiprocessing
import re
import socket
import sys
import time

import peers

AHEAD = 64


def origin():
    """An nginx that answers each URL with its own path; its port."""
    port = peers.free_port()
    return peers.nginx(
        f"keepalive_requests 1000000000; default_type text/plain;\nserver {{ listen 127.0.0.1:{port};\n"
        f"location / {{ add_header Cache-Control max-age=1000000;\n"
        f'return 200 "object $request_uri {"x" * 120}"; }} }}', port)


def answers(stream, left, buffer):
    """Takes `left` answers with lengths or chunks off a stream; how many were 200."""
    right = 0
    while left:
        head_end = buffer.find(b"\r\n\r\n")
        if head_end >= 0:
            head = bytes(buffer[:head_end]).lower()
            length = re.search(rb"\r\ncontent-length: *(\d+)", head)
            if length:
                end = head_end + 4 + int(length.group(1))
            else:
                last = buffer.find(b"0\r\n\r\n", head_end + 4)
                end = last + 5 if last >= 0 else len(buffer) + 1
            if len(buffer) >= end:
                right += head.startswith(b"http/1.1 200")
                del buffer[:end]
                left -= 1
                continue
        piece = stream.recv(1 << 16)
        if not piece:
            raise OSError(f"the proxy ended: {bytes(buffer[:200])}")
        buffer += piece
    return right


def load(port, numbers, out):
    """Asks for objects, some at once; says how many came."""
    try:
        out.put(ask_for(port, numbers))
    except OSError as error:
        print(f"the load ended: {error}", file=sys.stderr)
        out.put(0)


def ask_for(port, numbers):
    right, at = 0, list(numbers)
    stream, buffer, since = None, bytearray(), 0
    for first in range(0, len(at), AHEAD):
        # Some end a connection after 1,000 requests.
        if stream is None or since >= 900:
            stream = socket.create_connection(("127.0.0.1", port), 30)
            since, buffer = 0, bytearray()
        some = at[first:first + AHEAD]
        stream.sendall(b"".join(b"GET /objects/%d HTTP/1.1\r\nHost: site.test\r\n\r\n" % n for n in some))
        right += answers(stream, len(some), buffer)
        since += len(some)
        if stream and since >= 900:
            stream.close()
    return right


def fill(port, objects):
    """Stores objects; how many came, and the seconds."""
    out, began = multiprocessing.Queue(), time.time()
    jobs = [multiprocessing.Process(target=load, args=(port, range(n, objects, 4), out)) for n in range(4)]
    for job in jobs:
        job.start()
    right = sum(out.get(timeout=3000) for _ in jobs)
    for job in jobs:
        job.join()
    return right, time.time() - began


def hits(peer, objects):
    """Share of 2,000 objects, evenly spread, that come from the cache: their answers have an Age of a second or
    more, or (nginx) say so."""
    time.sleep(2.2)
    found, stream = 0, None
    numbers = range(0, objects, max(1, objects // 2000))
    for count, n in enumerate(numbers):
        if count % 500 == 0:
            stream = socket.create_connection(("127.0.0.1", peer.port), 30)
        stream.sendall(b"GET /objects/%d HTTP/1.1\r\nHost: site.test\r\n\r\n" % n)
        answer = b""
        while b"\r\n\r\n" not in answer or b"x" * 120 not in answer:
            piece = stream.recv(1 << 16)
            if not piece:
                raise OSError("the proxy ended")
            answer += piece
        # What is left of a chunked body comes with the next answer.
        answer = answer.lower()
        age = re.search(rb"\r\nage: *(\d+)", answer)
        found += bool(age and int(age.group(1)) > 0) or b"x-cache-status: hit" in answer
    return found / len(numbers)


def settings(objects):
    """What each needs to hold so many small objects on disk."""
    disk_mb = max(1024, objects // 500)
    # Varnish takes some 8 KiB a small object; it gets 8 GiB at 2 million, since the others need no more.
    return {
        "varve": (disk_mb, 0, {"store": 'object_bytes = "1K"\npolicy = "log-lru"'}),
        "squid": (0, 0, {"squid_dir": f"rock {{folder}}/cache {disk_mb} slot-size=1024 max-size=1000",
                         "squid": "memory_cache_mode disk"}),
        "nginx": (disk_mb * 10, 0, {"nginx_zone_mb": max(16, objects // 7000),
                                    "nginx": "add_header X-Cache-Status $upstream_cache_status;"}),
        "trafficserver": (disk_mb * 4, 1, {"trafficserver": {"cache.min_average_object_size": ("INT", 2000)}}),
        "varnish": (disk_mb * 2, 0, {"varnish": ["-p", "default_ttl=120", "-p", "nuke_limit=100"]}),
    }


def main():
    objects = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    wanted = sys.argv[2:] or peers.NAMES
    print(f"{objects} objects; resident bytes by shares of pages (Pss) of all processes, without Varnish's mapped file")
    print(f"{'':<14} {'version':<8} {'s':>5} {'stored':>9} {'hits':>6} {'MiB empty':>9} {'MiB full':>9} {'bytes an object':>15}  of those held")
    with origin() as port:
        for name in peers.installed():
            if name not in wanted:
                continue
            disk_mb, memory_mb, extra = settings(objects)[name]
            with peers.running(name, f"127.0.0.1:{port}", disk_mb, memory_mb, extra) as peer:
                fill(peer.port, 2000)
                time.sleep(1)
                empty = peer.rss()
                right, seconds = fill(peer.port, objects)
                time.sleep(3)
                full = peer.rss()
                share = hits(peer, objects)
                print(f"{name:<14} {peers.version(name):<8} {seconds:>5.0f} {right:>9} {share:>6.3f} "
                      f"{empty / (1 << 20):>9.1f} {full / (1 << 20):>9.1f} {(full - empty) / objects:>15.1f} {(full - empty) / objects / share:>14.1f}", flush=True)


if __name__ == "__main__":
    main()
