#!/usr/bin/env python3
"""Ten images read cold through the mount, in turn and at once, from an emulated SSD and HDD: apart, after `varve dedup apply`, after
its undo, with what they share placed in NVM (`varve dedup place`), and with what each has alone gathered (`varve defrag`).
  benches/alike/reading.py DIR-OF-IMAGES [MIB]        the first MIB (32) of each image, ten at most
Half of the NVM is filled while the images are written, so that they lie on the slower tier; then what is read often has room to
move up. `in turn`
reads one image after the other; `again` does it once more after ten seconds, with the kernel's pages dropped. Seconds: of the
first image, of the others on average, of all at once. `requests` and `MiB` are what the slow device read for the images after the
first, on average. `writes`: 4,000 random writes of 4 KiB to the second image, until they are digested, in seconds. VARVE names the
program; VARVE_BEFORE another one that is run by turns; WHAT the states (apart shared undone placed gathered placed+gathered), TIERS the tiers (ssd hdd), SETTINGS further lines of varve.toml."""
import glob
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
SETTINGS = os.environ.get("SETTINGS", "")


def run(*words):
    return subprocess.run(words, check=True, text=True, capture_output=True).stdout


def drop(path):
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path):
    started = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        while file.read(MIB):
            pass
    return time.monotonic() - started


def in_turn(files, after_first=lambda: None):
    first = read(files[0])
    after_first()
    others = [read(file) for file in files[1:]]
    return first, sum(others) / len(others)


def random_writes(path, mib):
    dice = random.Random(7)
    block = os.urandom(4096)
    with open(path, "r+b", buffering=0) as file:
        for _ in range(4000):
            os.pwrite(file.fileno(), block, dice.randrange(mib * 256) * 4096)
        os.fsync(file.fileno())


def at_once(files):
    started = time.monotonic()
    for reader in [subprocess.Popen(["cat", file], stdout=subprocess.DEVNULL) for file in files]:
        if reader.wait() != 0:
            raise RuntimeError("a reader has failed")
    return time.monotonic() - started


def tier_of(varve, pool, name):
    tiers = json.loads(run(varve, "status", "--json", pool))["tiers"]
    return next(tier for tier in tiers if tier["tier"] == name)


def on_nvm(varve, pool):
    """MiB in use on NVM."""
    return tier_of(varve, pool, "nvm")["used_bytes"] // MIB


def has_read(varve, pool, name):
    """Requests of a device, and bytes."""
    tier = tier_of(varve, pool, name)
    return tier["figures"]["read"]["samples"], tier["read_bytes"]


class Pool:
    def __init__(self, varve, work, tier, mib):
        self.varve, self.dir = varve, os.path.join(work, "pool")
        sizes = {"ssd": ["--ssd", f"{mib * 12 + 512}M", "--hdd", "0"], "hdd": ["--ssd", "0", "--hdd", f"{mib * 12 + 512}M"]}
        os.mkdir(self.dir)
        run(varve, "up", self.dir, "--nvm", "512M", *sizes[tier], "--detach")
        run(varve, "down", self.dir)
        # The settings of the daemon are the last table.
        with open(os.path.join(self.dir, "varve.toml"), "a") as config:
            config.write(f'\nemulate = ["{tier}"]\nplacement_high_percent = 50\nplacement_low_percent = 20\n{SETTINGS}\n')
        self.up()

    def up(self):
        run(self.varve, "up", self.dir, "--detach")

    def down(self):
        run(self.varve, "down", self.dir)

    def again(self):
        self.down()
        self.up()

    def end(self):
        subprocess.run([self.varve, "down", self.dir], check=False, capture_output=True)
        subprocess.run(["umount", "-l", self.dir + "/mnt"], check=False, capture_output=True)
        shutil.rmtree(self.dir, ignore_errors=True)


def side(name, varve, tier, what, images, mib, work):
    pool = Pool(varve, work, tier, mib)
    try:
        filler = pool.dir + "/mnt/filler"
        with open(filler, "wb") as file:
            for _ in range(256):
                file.write(os.urandom(MIB))
        files = []
        for number, image in enumerate(images):
            files.append(f"{pool.dir}/mnt/{number:02d}")
            run("dd", f"if={image}", f"of={files[-1]}", "bs=1M", f"count={mib}", "conv=fsync,sparse", "status=none")
        run(varve, "digest", pool.dir)
        os.unlink(filler)
        if what != "apart":
            run(varve, "dedup", "apply", *files)
        if what == "undone":
            run(varve, "dedup", "undo", *files)
        if what.startswith("placed"):
            run(varve, "dedup", "place", "--tier", "nvm", "--wait", *files)
        if what.endswith("gathered"):
            print(run(varve, "defrag", *files).strip(), file=sys.stderr)
        pool.again()
        before = on_nvm(varve, pool.dir)
        counts = []
        first, others = in_turn(files, lambda: counts.append(has_read(varve, pool.dir, tier)))
        counts.append(has_read(varve, pool.dir, tier))
        requests, read_bytes = [(now - then) / (len(files) - 1) for then, now in zip(*counts)]
        for file in files:
            drop(file)
        time.sleep(10)
        again = in_turn(files)
        up = on_nvm(varve, pool.dir) - before
        pool.again()
        together = at_once(files)
        started = time.monotonic()
        random_writes(files[1], mib)
        run(varve, "digest", pool.dir)
        writes = time.monotonic() - started
        times = " | ".join(f"{seconds:.2f}" for seconds in [first, others, *again, together, writes])
        print(f"| {tier} | {name} | {what} | {times} | {requests:.0f} | {read_bytes / MIB:.0f} | {up} |")
        sys.stdout.flush()
    finally:
        pool.end()


def main():
    images = sorted(glob.glob(os.path.join(sys.argv[1], "*.img")))[:10]
    mib = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    ours = os.environ.get("VARVE", os.path.join(HERE, "../../target/release/varve"))
    sides = [("now", ours)]
    if before := os.environ.get("VARVE_BEFORE"):
        sides.insert(0, ("before", before))
    print(f"{len(images)} images of {mib} MiB, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print("| tier | program | blocks | first | others | first, again | others, again | all at once | writes | requests | MiB | moved up, MiB |")
    print("| --- | --- | --- |" + " ---: |" * 9)
    for tier in os.environ.get("TIERS", "ssd hdd").split():
        states = os.environ.get("WHAT", "apart shared undone placed").split()
        for what, name, varve in [(what, name, varve) for what in states for name, varve in sides if name != "before" or what in ("apart", "shared", "undone")]:
            with tempfile.TemporaryDirectory(prefix="varve-reading.", dir=os.environ.get("TMPDIR", "/var/tmp")) as work:
                side(name, varve, tier, what, images, mib, work)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
