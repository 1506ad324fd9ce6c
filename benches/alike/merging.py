#!/usr/bin/env python3
"""Same-page merging under a plan: what the kernel (KSM) saves when images that `varve dedup plan` puts together run on one host.

  benches/alike/merging.py DIR HOSTS MEMORY [RANDOM]

DIR: images (corpus.sh makes some), at most 10. HOSTS with MEMORY each (1500M). The pages of a host's images that are not zero become mergeable
memory of a process, one host at a time; `/sys/kernel/mm/ksm/pages_sharing` is read when a whole scan merges no more. That is done for the plan, for
images given out in turn, and for RANDOM (2) random assignments; for all others what would be merged is counted: pages but the distinct ones of a
host. VARVE names the binary. Root only; settings of KSM are put back."""
import hashlib
import itertools
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time

PAGE = 4096
KSM = "/sys/kernel/mm/ksm/"
ZERO = bytes(PAGE)
SETTINGS = {"pages_to_scan": "20000", "sleep_millisecs": "1", "smart_scan": "0", "advisor_mode": "none"}


def pages(path):
    """The pages of an image that are not zero."""
    with open(path, "rb") as file:
        while page := file.read(PAGE):
            page = page.ljust(PAGE, b"\0")
            if page != ZERO:
                yield page


class Images:
    """The distinct pages of images, by who has them."""

    def __init__(self, paths):
        self.paths, owners, self.total = paths, {}, []
        for number, path in enumerate(paths):
            count = 0
            for page in pages(path):
                count += 1
                key = hashlib.blake2b(page, digest_size=16).digest()
                owners[key] = owners.get(key, 0) | 1 << number
            self.total.append(count)
        masks = {}
        for mask in owners.values():
            masks[mask] = masks.get(mask, 0) + 1
        self.distinct = [sum(count for mask, count in masks.items() if mask & some) for some in range(1 << len(paths))]

    def alone(self, number):
        """Distinct pages of one image."""
        return self.distinct[1 << number]

    def saved(self, hosts):
        """Pages that are merged on hosts, each a list of numbers of images."""
        of = lambda host: sum(self.total[n] for n in host) - self.distinct[sum(1 << n for n in host)]
        return sum(of(host) for host in hosts if host)


def setting(name, value=None):
    """Reads a setting of KSM, or writes it."""
    path = KSM + name
    if not os.path.exists(path):
        return ""
    if value is not None:
        with open(path, "w", encoding="ascii") as file:
            file.write(value)
    with open(path, encoding="ascii") as file:
        text = file.read().strip()
    # "[none] scan-time": the chosen one is in brackets.
    return text.split("[")[1].split("]")[0] if "[" in text else text


def hold(paths, ready):
    """A host: has the pages of images as mergeable memory until it is killed."""
    held = []
    for path in paths:
        some = list(pages(path))
        area = mmap.mmap(-1, len(some) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_MERGEABLE)
        for at, page in enumerate(some):
            area[at * PAGE:(at + 1) * PAGE] = page
        held.append(area)
    os.write(ready, b"r")
    while True:
        time.sleep(60)


def merged(paths):
    """Pages that the kernel merges on one host."""
    setting("run", "2")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hold(paths, writer)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        if os.read(reader, 1) != b"r":
            raise OSError("a host has ended")
        setting("run", "1")
        seen, scans = -1, int(setting("full_scans"))
        while True:
            ends = time.monotonic() + 300
            while int(setting("full_scans")) < scans + 2:
                if time.monotonic() > ends:
                    raise OSError("the kernel has not scanned the memory in 300 s")
                time.sleep(0.2)
            scans, before, seen = int(setting("full_scans")), seen, int(setting("pages_sharing"))
            if seen == before:
                return seen
    finally:
        os.close(reader)
        os.kill(child, 9)
        os.waitpid(child, 0)
        setting("run", "2")


def plan_of(varve, paths, hosts, memory):
    """Varve's plan: hosts as lists of numbers of images, and the bytes that it says are saved."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = folder + "/manifest"
        subprocess.run([varve, "dedup", "cluster", "--manifest", manifest, *paths], check=True, stdout=subprocess.DEVNULL)
        said = subprocess.run([varve, "dedup", "plan", "--manifest", manifest, "--hosts", str(hosts), "--memory", memory, "--json"],
                              check=True, stdout=subprocess.PIPE).stdout
    said = json.loads(said)
    names = {os.path.basename(path): number for number, path in enumerate(paths)}
    saved = sum(group["held"]["apart"] - group["held"]["together"] for group in said["groups"])
    return [[names[os.path.basename(image)] for image in group["images"]] for group in said["groups"]], saved


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    folder, count, memory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    tries = int(sys.argv[4]) if len(sys.argv) > 4 else 2
    paths = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".img"))[:10]
    images = Images(paths)
    plan, forecast = plan_of(os.environ.get("VARVE", "target/release/varve"), paths, count, memory)
    limit = int(memory[:-1]) * {"M": 1 << 20, "G": 1 << 30}[memory[-1]] // PAGE
    fits = lambda hosts: all(sum(images.alone(n) for n in host) <= limit for host in hosts)
    split = lambda places: [[n for n, at in enumerate(places) if at == host] for host in range(count)]
    everything = [hosts for hosts in map(split, itertools.product(range(count), repeat=len(paths))) if fits(hosts)]
    every = sorted(images.saved(hosts) for hosts in everything)
    dice = random.Random(7)
    sides = [("plan", plan), ("in turn", split([n % count for n in range(len(paths))]))]
    sides += [(f"random {n + 1}", dice.choice(everything)) for n in range(tries)]
    mib = lambda amount: f"{amount * PAGE / (1 << 20):.0f}"
    print(f"{len(paths)} images, {mib(sum(images.total))} MiB without zeros; {count} hosts of {memory}; load average {os.getloadavg()[0]:.1f}")
    print(f"{len(every)} assignments fit: mean {mib(sum(every) / len(every))} MiB merged, least {mib(every[0])}, most {mib(every[-1])}")
    before = {name: setting(name) for name in [*SETTINGS, "run"]}
    try:
        for name, value in SETTINGS.items():
            setting(name, value)
        print("| assignment | counted, MiB | merged by the kernel, MiB | of the most | of the mean |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name, hosts in sides:
            got = sum(merged([paths[n] for n in host]) for host in hosts if host)
            print(f"| {name} | {mib(images.saved(hosts))} | {mib(got)} | {got / every[-1]:.3f} | {got / (sum(every) / len(every)):.2f} |", flush=True)
            if name == "plan":
                print(f"The plan's own forecast: {forecast / (1 << 20):.0f} MiB, {forecast / (got * PAGE):.3f} of what was merged", file=sys.stderr)
    finally:
        for name, value in before.items():
            if value:
                setting(name, value)


if __name__ == "__main__":
    main()
