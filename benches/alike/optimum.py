#!/usr/bin/env python3
"""What sharing could save at most: the distinct blocks of some images, counted without a bound on memory.
  benches/alike/optimum.py IMAGE...      prints a line, or JSON with --json
In blocks of 4 KiB. Blocks of zeros do not count: they are holes."""
import hashlib
import json
import os
import sys

BLOCK = 4096


def blocks(path):
    """Yields the number and the digest of each 4 KiB block that is not zero."""
    zero = bytes(BLOCK)
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        at = 0
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA) // BLOCK * BLOCK
            except OSError:
                return
            end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            while at < end:
                data = os.pread(file.fileno(), 1 << 20, at)
                for n in range(0, len(data), BLOCK):
                    block = data[n : n + BLOCK].ljust(BLOCK, b"\0")
                    if block != zero:
                        yield (at + n) // BLOCK, hashlib.blake2b(block, digest_size=16).digest()
                at += len(data)


def main():
    as_json = "--json" in sys.argv
    images = [name for name in sys.argv[1:] if not name.startswith("--")]
    seen, total = set(), 0
    for path in images:
        for _, digest in blocks(path):
            total += 1
            seen.add(digest)
    saved = total - len(seen)
    if as_json:
        print(json.dumps({"data_bytes": total * BLOCK, "saved_bytes": saved * BLOCK}))
    else:
        print(f"{total * BLOCK} bytes of data, {saved * BLOCK} of them saved at most ({100 * saved / max(total, 1):.1f} %)")


if __name__ == "__main__":
    main()
