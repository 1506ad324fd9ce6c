#!/usr/bin/env python3
"""Writes of 128 B to 4 KiB to cold data on an emulated HDD or SSD (seed: Non-blocking writes, figures 5.5 to 5.8).
  benches/devices/cold_writes.py [SECONDS]
A pool in NVM in memory, a file of 1 GiB on the slower tier (FILE_MIB), pages dropped; then SECONDS (5) of writes under `varve run`, each by
one call: `blocking` reads the block of 4 KiB first, as a page cache does, `plain` does not. Prints writes a second, their ratio, the
seconds until all is digested, how often and how much the device was read, and, for a second program that makes a file, writes 1 KiB
and syncs it in another directory of the mount each 20 ms meanwhile and until then, median and longest in ms. VARVE names the program;
VARVE_BEFORE another one that is run by turns; TIERS (hdd ssd), SIZES (128 1024 4000), PATTERNS (sequential random mixed) choose the rows.
`covered`: reads of what was just written, and of nothing else: reads of the device for 1,000 of them."""
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
BLOCK = 4096
FILE_MIB = int(os.environ.get("FILE_MIB", "1024"))


def words(name, default):
    return os.environ.get(name, default).split()


def run(*command, **more):
    return subprocess.run(command, check=True, text=True, capture_output=True, **more).stdout


def offsets(pattern, size):
    """Places of writes: one after the other, at random, or by turns."""
    dice, at, blocks, random_turn = random.Random(7), 0, FILE_MIB * MIB // BLOCK, pattern == "random"
    while True:
        if random_turn:
            yield dice.randrange(blocks) * BLOCK + dice.randrange((BLOCK - size) // 32 + 1) * 32
        else:
            yield at
            at = (at + size) % (FILE_MIB * MIB - BLOCK)
        if pattern == "mixed":
            random_turn = not random_turn


def writer(path, way, pattern, size, seconds):
    """Runs under `varve run`: prints writes and the seconds they took."""
    file, body, done = os.open(path, os.O_RDWR), os.urandom(size), 0
    started = time.monotonic()
    for at in offsets(pattern, size):
        if way == "blocking":
            os.pread(file, BLOCK, at // BLOCK * BLOCK)
        os.pwrite(file, body, at)
        done += 1
        if done % 16 == 0 or way == "blocking":
            if time.monotonic() - started >= seconds:
                break
    took = time.monotonic() - started
    print(json.dumps([done, took]))


def covered(path):
    file, body, dice = os.open(path, os.O_RDWR), os.urandom(256), random.Random(9)
    for _ in range(1000):
        at = dice.randrange(FILE_MIB * MIB // BLOCK) * BLOCK + 512
        os.pwrite(file, body, at)
        assert os.pread(file, 256, at) == body
        assert os.pread(file, 100, at + 50) == body[50:150]


class Pool:
    def __init__(self, varve, tier):
        self.varve, self.tier, self.dir = varve, tier, tempfile.mkdtemp(prefix="varve-cold-")
        size = f"{FILE_MIB * 2 + 512}M"
        sizes = {"ssd": ["--ssd", size, "--hdd", "0"], "hdd": ["--ssd", "0", "--hdd", size]}
        run(varve, "up", self.dir, "--nvm", f"shm:{FILE_MIB + 512}M", *sizes[tier], "--detach")
        run(varve, "down", self.dir)
        with open(self.dir + "/varve.toml", "a") as config:
            config.write(f'\nemulate = ["{tier}"]\n')
        run(varve, "up", self.dir, "--detach")
        self.file = self.dir + "/mnt/cold"
        os.mkdir(self.dir + "/mnt/other")

    def fill(self):
        """Lays the file out anew on the slower tier."""
        with open(self.file, "wb") as file:
            for _ in range(FILE_MIB):
                file.write(os.urandom(MIB))
        run(self.varve, "digest", self.dir)
        run(self.varve, "pin", self.file, "--tier", self.tier)
        deadline = time.monotonic() + 300
        while True:
            found = json.loads(run(self.varve, "which-tier", "--json", self.file))
            if not any(part.get("tier") == "nvm" for part in parts(found)):
                break
            if time.monotonic() > deadline:
                raise RuntimeError("the file is still on NVM")
            time.sleep(0.5)
        run(self.varve, "unpin", self.file)
        # A daemon that has read nothing of it.
        run(self.varve, "down", self.dir)
        run(self.varve, "up", self.dir, "--detach")

    def reads(self):
        tiers = json.loads(run(self.varve, "status", "--json", self.dir))["tiers"]
        tier = next(tier for tier in tiers if tier["tier"] == self.tier)
        return tier["figures"]["read"]["samples"], tier["read_bytes"]

    def end(self):
        subprocess.run([self.varve, "down", self.dir], check=False, capture_output=True)
        subprocess.run([self.varve, "destroy", "--yes", self.dir], check=False, capture_output=True)
        shutil.rmtree(self.dir, ignore_errors=True)


def parts(found):
    """The extents in an answer of `which-tier --json`, however deep."""
    if isinstance(found, dict):
        if "tier" in found:
            yield found
        found = list(found.values())
    if isinstance(found, list):
        for one in found:
            yield from parts(one)


class Neighbour(threading.Thread):
    """Makes, writes and syncs files in another directory."""

    def __init__(self, dir):
        super().__init__()
        self.dir, self.over, self.took = dir, threading.Event(), []

    def run(self):
        number = 0
        while not self.over.wait(0.02):
            started = time.monotonic()
            with open(f"{self.dir}/{number % 100}", "wb", buffering=0) as file:
                file.write(bytes(1024))
                os.fsync(file.fileno())
            self.took.append(time.monotonic() - started)
            number += 1


def row(pool, way, pattern, size, seconds):
    pool.fill()
    reads, read_bytes = pool.reads()
    neighbour = Neighbour(pool.dir + "/mnt/other")
    neighbour.start()
    try:
        me = [pool.varve, "run", "--mount", pool.dir + "/mnt", "--", sys.executable, os.path.abspath(__file__)]
        done, took = json.loads(run(*me, "--writer", pool.file, way, pattern, str(size), str(seconds)))
        started = time.monotonic()
        run(pool.varve, "digest", pool.dir)
        digested = time.monotonic() - started
    finally:
        neighbour.over.set()
        neighbour.join()
    now, now_bytes = pool.reads()
    waits = sorted(neighbour.took)
    return {
        "rate": done / took,
        "digested": digested,
        "reads": now - reads,
        "mib": (now_bytes - read_bytes) / MIB,
        "median": waits[len(waits) // 2] * 1000,
        "longest": waits[-1] * 1000,
    }


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5
    sides = [("now", os.environ["VARVE"])]
    if "VARVE_BEFORE" in os.environ:
        sides.insert(0, ("before", os.environ["VARVE_BEFORE"]))
    print("| tier | pattern | bytes | program | blocking, 1/s | plain, 1/s | ratio | digested, s | reads | MiB | another's sync: median, ms | longest |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for tier in words("TIERS", "hdd ssd"):
        pools = [(name, Pool(varve, tier)) for name, varve in sides]
        try:
            for pattern in words("PATTERNS", "sequential random mixed"):
                for size in map(int, words("SIZES", "128 1024 4000")):
                    for name, pool in pools:
                        blocking = row(pool, "blocking", pattern, size, seconds)
                        plain = row(pool, "plain", pattern, size, seconds)
                        print(
                            f"| {tier} | {pattern} | {size} | {name} | {blocking['rate']:.0f} | {plain['rate']:.0f} | {plain['rate'] / blocking['rate']:.1f} | "
                            f"{plain['digested']:.1f} | {plain['reads']} | {plain['mib']:.0f} | {plain['median']:.1f} | {plain['longest']:.0f} |",
                            flush=True,
                        )
            for name, pool in pools:
                pool.fill()
                before = pool.reads()[0]
                run(pool.varve, "run", "--mount", pool.dir + "/mnt", "--", sys.executable, os.path.abspath(__file__), "--covered", pool.file)
                print(f"{tier}, {name}: 1,000 writes of 256 bytes, 2,000 covered reads: {pool.reads()[0] - before} reads of the device", flush=True)
        finally:
            for _, pool in pools:
                pool.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--writer"]:
        writer(*sys.argv[2:5], int(sys.argv[5]), float(sys.argv[6]))
    elif sys.argv[1:2] == ["--covered"]:
        covered(sys.argv[2])
    else:
        main()
