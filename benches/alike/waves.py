#!/usr/bin/env python3
"""Bytes that each wave of a migration sends: under `varve dedup plan --waves K`, in turn, and at random.

  benches/alike/waves.py DIR K [RANDOM]

DIR: images (corpus.sh makes some). A wave sends each 4 KiB block of its images that is not zero once: the distinct ones are counted, by the whole
content and not by sketches. RANDOM (1000) assignments of the same sizes. Beside it what a plan forecasts, from sketches. VARVE names the program."""
import glob
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile

PAGE = 4096
ZERO = bytes(PAGE)
MIB = 1 << 20


class Images:
    """The distinct blocks of images, by who has them."""

    def __init__(self, paths):
        owners, self.apart = {}, [0] * len(paths)
        for number, path in enumerate(paths):
            with open(path, "rb") as file:
                while piece := file.read(MIB):
                    for at in range(0, len(piece), PAGE):
                        page = piece[at:at + PAGE]
                        if page != ZERO[:len(page)]:
                            self.apart[number] += 1
                            key = hashlib.blake2b(page, digest_size=12).digest()
                            owners[key] = owners.get(key, 0) | 1 << number
        self.masks = {}
        for mask in owners.values():
            self.masks[mask] = self.masks.get(mask, 0) + 1

    def sent(self, wave):
        """MiB that a wave sends."""
        some = sum(1 << number for number in wave)
        return sum(count for mask, count in self.masks.items() if mask & some) * PAGE / MIB


def planned(varve, manifest, waves, names):
    """The waves of a plan, as numbers of images, and the MiB that it expects each to send."""
    told = json.loads(subprocess.run([varve, "dedup", "plan", "--manifest", manifest, "--waves", str(waves), "--weigh", "blocks", "--json"],
                                     check=True, capture_output=True, text=True).stdout)
    groups = told["groups"]
    return [[names[os.path.basename(image)] for image in group["images"]] for group in groups], [group["held"]["together"] / MIB for group in groups]


def dealt(order, waves):
    """The images of an order, in waves whose sizes differ by one at most."""
    return [order[at::waves] for at in range(waves)]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    paths = sorted(glob.glob(os.path.join(sys.argv[1], "*.img")))
    waves, chances = int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1000
    varve = os.environ.get("VARVE", os.path.join(os.path.dirname(__file__), "../../target/release/varve"))
    images = Images(paths)
    with tempfile.TemporaryDirectory() as work:
        manifest = os.path.join(work, "clusters")
        subprocess.run([varve, "dedup", "cluster", "--manifest", manifest, *paths], check=True, capture_output=True)
        names = {os.path.basename(path): number for number, path in enumerate(paths)}
        plan, expected = planned(varve, manifest, waves, names)
    dice = random.Random(7)
    everyone = list(range(len(paths)))
    at_random = [dealt(dice.sample(everyone, len(everyone)), waves) for _ in range(chances)]
    all_apart = sum(images.apart) * PAGE / MIB
    print(f"{len(paths)} images, {all_apart:.0f} MiB without zeros, {images.sent(everyone):.0f} MiB distinct; {waves} waves, load {os.getloadavg()[0]:.1f}")
    print("| assignment | images of each wave | MiB of each wave | sent, MiB | of the mean at random |")
    print("| --- | --- | --- | ---: | ---: |")
    totals = sorted(sum(images.sent(wave) for wave in some) for some in at_random)
    mean = sum(totals) / len(totals)

    def row(name, some):
        each = [images.sent(wave) for wave in some]
        print(f"| {name} | {', '.join(str(len(wave)) for wave in some)} | {', '.join(f'{mib:.0f}' for mib in each)} | {sum(each):.0f} | {sum(each) / mean:.2f} |")

    row("plan", plan)
    row("in turn", dealt(everyone, waves))
    print(f"| random, {chances} times | | | {mean:.0f} ({totals[0]:.0f} to {totals[-1]:.0f}) | 1.00 |")
    print(f"forecast of the plan, by sketches: {', '.join(f'{mib:.0f}' for mib in expected)} MiB, {sum(expected):.0f} together")


if __name__ == "__main__":
    main()
