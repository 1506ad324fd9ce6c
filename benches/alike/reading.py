#!/usr/bin/env python3
"""Ten images read cold through the mount, in turn and at once, from an emulated SSD and HDD: apart, after `varve dedup apply`, and after
its undo.
  benches/alike/reading.py DIR-OF-IMAGES [MIB]        the first MIB (32) of each image, ten at most
Half of the NVM is filled while the images are written, so that they lie on the slower tier; then what is read often has room to
move up. `in turn`
reads one image after the other; `again` does it once more after ten seconds, with the kernel's pages dropped. Seconds: of the
first image, of the others on average, of all at once. VARVE names the program; VARVE_BEFORE another one that is run by turns."""
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20


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


def in_turn(files):
    times = [read(file) for file in files]
    return times[0], sum(times[1:]) / (len(times) - 1)


def at_once(files):
    started = time.monotonic()
    for reader in [subprocess.Popen(["cat", file], stdout=subprocess.DEVNULL) for file in files]:
        if reader.wait() != 0:
            raise RuntimeError("a reader has failed")
    return time.monotonic() - started


def on_nvm(varve, pool):
    """MiB in use on NVM."""
    tiers = json.loads(run(varve, "status", "--json", pool))["tiers"]
    return tiers[0]["used_bytes"] // MIB


class Pool:
    def __init__(self, varve, work, tier, mib):
        self.varve, self.dir = varve, os.path.join(work, "pool")
        sizes = {"ssd": ["--ssd", f"{mib * 12 + 512}M", "--hdd", "0"], "hdd": ["--ssd", "0", "--hdd", f"{mib * 12 + 512}M"]}
        os.mkdir(self.dir)
        run(varve, "up", self.dir, "--nvm", "512M", *sizes[tier], "--detach")
        run(varve, "down", self.dir)
        # The settings of the daemon are the last table.
        with open(os.path.join(self.dir, "varve.toml"), "a") as config:
            config.write(f'\nemulate = ["{tier}"]\nplacement_high_percent = 50\nplacement_low_percent = 20\n')
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
        pool.again()
        before = on_nvm(varve, pool.dir)
        first, others = in_turn(files)
        for file in files:
            drop(file)
        time.sleep(10)
        again = in_turn(files)
        up = on_nvm(varve, pool.dir) - before
        pool.again()
        together = at_once(files)
        print(f"| {tier} | {name} | {what} | {first:.2f} | {others:.2f} | {again[0]:.2f} | {again[1]:.2f} | {together:.2f} | {up} |")
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
    print("| tier | program | blocks | first | others | first, again | others, again | all at once | moved up, MiB |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for tier in os.environ.get("TIERS", "ssd hdd").split():
        for what, name, varve in [(what, name, varve) for what in ["apart", "shared", "undone"] for name, varve in sides]:
            with tempfile.TemporaryDirectory(prefix="varve-reading.", dir=os.environ.get("TMPDIR", "/var/tmp")) as work:
                side(name, varve, tier, what, images, mib, work)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
