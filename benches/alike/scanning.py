#!/usr/bin/env python3
"""The search for equal blocks of a pool on an emulated SSD or HDD: by the checksums that the pool keeps, by reading all bytes, and
`cat` of the same files beside it.
  benches/alike/scanning.py DIR-OF-IMAGES [ROUNDS]
The images are pinned to the tier, and the caches are cold before each run (the pool is stopped and started). Prints seconds, MiB/s, and
the rate of the model of the device; rounds by turns. VARVE names the program, TIERS the tiers (hdd ssd)."""
import glob
import json
import os
import sys
import tempfile
import time

from reading import HERE, MIB, Pool, run

# `DiskModel` in crates/media/src/emulated.rs, MB/s.
DEVICE = {"hdd": 200, "ssd": 2400}


def timed(*words):
    started = time.monotonic()
    out = run(*words)
    return time.monotonic() - started, out


def side(varve, tier, images, rounds, work):
    data = sum(os.stat(image).st_blocks * 512 for image in images)
    pool = Pool(varve, work, tier, data // MIB // 12 + 64)
    try:
        folder = pool.dir + "/mnt/images"
        os.mkdir(folder)
        run(varve, "pin", folder, "--tier", tier)
        for image in images:
            run("cp", "--sparse=always", image, folder)
        run("sync")
        run(varve, "digest", pool.dir)
        files = sorted(glob.glob(folder + "/*"))
        ways = {
            "checksums": lambda state: timed(varve, "dedup", "scan", folder, "--json", "--state", state),
            "--full": lambda state: timed(varve, "dedup", "scan", folder, "--json", "--state", state, "--full"),
            "cat": lambda state: timed("sh", "-c", 'cat "$@" > /dev/null', "sh", *files),
        }
        found = {}
        for turn in range(rounds):
            for name, way in ways.items():
                pool.again()
                seconds, out = way(os.path.join(work, f"state {name} {turn}"))
                if out:
                    told = json.loads(out)
                    found[name] = (told["duplicate_runs"], told["duplicate_bytes"])
                rate = data / 1e6 / seconds
                print(f"| {tier} | {name} | {seconds:.2f} | {rate:.0f} | {rate / DEVICE[tier]:.2f} |", flush=True)
        if found["checksums"] != found["--full"]:
            print(f"  DIFFERENT: {found}")
    finally:
        pool.end()


def main():
    images = sorted(glob.glob(os.path.join(sys.argv[1], "*.img")))
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    varve = os.environ.get("VARVE", os.path.join(HERE, "../../target/release/varve"))
    data = sum(os.stat(image).st_blocks * 512 for image in images)
    print(f"{len(images)} images, {data / MIB:.0f} MiB, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print("| tier | way | s | MB/s | of the device |")
    print("| --- | --- | ---: | ---: | ---: |")
    for tier in os.environ.get("TIERS", "hdd ssd").split():
        with tempfile.TemporaryDirectory(prefix="varve-scanning.", dir=os.environ.get("TMPDIR", "/var/tmp")) as work:
            side(varve, tier, images, rounds, work)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
