#!/usr/bin/env python3
"""Deduplication beside others, the same images, one run: varve dedup apply, duperemove, jdupes, rmlint, fclones (on XFS and btrfs,
loop devices of the disk that has the pool) and casync (a store of chunks).
  benches/alike/others.py DIR-OF-IMAGES [--work DIR] [--only NAME,NAME] [--timeout SECONDS]
Prints a table: bytes saved by `df` (before, after), their share of the most that can be saved (optimum.py), time, peak resident memory
of the command (+ what the memory of Varve's daemon and mount grows by), extents of all images. Every side starts with a new file system, the images
copied with holes, and a cold cache; after it all images are compared with those in DIR-OF-IMAGES.
Needs root and a release build of varve. A tool that is missing is said and left out:
  apt-get install duperemove jdupes rmlint casync xfsprogs btrfs-progs e2fsprogs; cargo install fclones"""
import argparse
import filecmp
import glob
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
VARVE = os.environ.get("VARVE", os.path.join(HERE, "../../target/release/varve"))
MIB = 1 << 20


def run(*words, **options):
    return subprocess.run(words, check=True, text=True, capture_output=True, **options).stdout


def anonymous(pid):
    """Memory of a process that is not a mapping of a file or of shared memory (as a pool's NVM is), in MiB."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) / 1024
    except (OSError, StopIteration):
        return 0


def measured(words, timeout, cwd=None, watch=None):
    """Runs a command; returns its status, seconds, peak RSS in MiB (itself and its children), and output. `watch`: anonymous memory
    of other processes by pid, which is raised to what was seen."""
    out = tempfile.TemporaryFile()
    started = time.monotonic()
    child = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True)
    status = None
    while status is None:
        for other in watch or {}:
            watch[other] = max(watch[other], anonymous(other))
        pid, raw, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(raw)
        elif time.monotonic() - started > timeout:
            os.killpg(child.pid, 9)
            _, _, usage = os.wait4(child.pid, 0)
            status = "time is up"
        else:
            time.sleep(0.02)
    child.returncode = 0
    seconds = time.monotonic() - started
    out.seek(0)
    return status, seconds, usage.ru_maxrss / 1024, out.read().decode(errors="replace")


def used(path):
    os.sync()
    stats = os.statvfs(path)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


class Loop:
    """A file system on a loop device, with the images in it."""

    def __init__(self, kind, work, images):
        self.kind, self.work, self.images = kind, work, images
        self.file, self.at = os.path.join(work, kind + ".disk"), os.path.join(work, kind)
        self.device = None

    def __enter__(self):
        try:
            return self.made()
        except BaseException:
            self.__exit__()
            raise

    def made(self):
        data = sum(os.stat(image).st_blocks * 512 for image in self.images)
        with open(self.file, "wb") as file:
            file.truncate(data * 5 // 4 + (1 << 30))
        self.device = run("losetup", "--find", "--show", "--direct-io=on", self.file).strip()
        # mkfs refuses a device on which it finds another file system.
        run("wipefs", "-aq", self.device)
        run("mkfs." + self.kind, "-q", self.device)
        os.makedirs(self.at, exist_ok=True)
        run("mount", self.device, self.at)
        os.mkdir(os.path.join(self.at, "images"))
        copy(self.images, os.path.join(self.at, "images"))
        run("umount", self.at)
        run("mount", self.device, self.at)
        return self

    def __exit__(self, *_):
        subprocess.run(["umount", self.at], check=False, capture_output=True)
        if self.device:
            subprocess.run(["losetup", "-d", self.device], check=False, capture_output=True)
        os.unlink(self.file)

    def extents(self):
        count = 0
        for line in run("filefrag", *sorted(glob.glob(self.at + "/images/*"))).splitlines():
            count += int(line.rsplit(":", 1)[1].split()[0])
        return count


def copy(images, into):
    for image in images:
        run("cp", "--sparse=always", image, into)
    os.sync()


def differing(images, folder):
    return [image for image in images if not filecmp.cmp(image, os.path.join(folder, os.path.basename(image)), shallow=False)]


class Table:
    def __init__(self, images):
        self.optimum = json.loads(run(sys.executable, os.path.join(HERE, "optimum.py"), "--json", *images))
        data, most = self.optimum["data_bytes"], self.optimum["saved_bytes"]
        print(f"{len(images)} images, {data / MIB:.0f} MiB of data, {most / MIB:.0f} MiB ({100 * most / data:.1f} %) saved at most")
        print(f"{os.cpu_count()} processors, Linux {os.uname().release}, load {os.getloadavg()[0]:.1f}")
        print("| side | saved, MiB | of the most | seconds | MiB/s | peak MiB | extents before | after | bytes |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)

    def row(self, name, saved, seconds, peak, before="", after="", right="the same"):
        share = saved / self.optimum["saved_bytes"]
        rate = self.optimum["data_bytes"] / MIB / seconds
        print(
            f"| {name} | {saved / MIB:.0f} | {share:.3f} | {seconds:.1f} | {rate:.0f} | {peak} | {before} | {after} | {right} |",
            flush=True,
        )


def on_loops(arguments, images, table):
    folder = "images"
    tools = [
        ("duperemove 4 KiB", "duperemove", ["duperemove", "-dr", "-h", "-b", "4096", "--hashfile=HASH", folder]),
        ("duperemove 4 KiB, partial, same", "duperemove",
         ["duperemove", "-dr", "-h", "-b", "4096", "--dedupe-options=partial,same", "--hashfile=HASH", folder]),
        ("duperemove default (128 KiB)", "duperemove", ["duperemove", "-dr", "-h", "--hashfile=HASH", folder]),
        ("jdupes", "jdupes", ["jdupes", "-r", "-B", folder]),
        ("rmlint", "rmlint", ["sh", "-c", f"rmlint -T df -c sh:handler=clone -o sh:HASH.sh {folder} && HASH.sh -d -q"]),
        ("fclones", "fclones", ["sh", "-c", f"fclones group {folder} | fclones dedupe"]),
    ]
    for kind in ["xfs", "btrfs"]:
        if not shutil.which("mkfs." + kind):
            print(f"left out: {kind} (mkfs.{kind} is missing)")
            continue
        for name, program, words in tools:
            name = f"{name}, {kind}"
            if arguments.only and not any(part in name for part in arguments.only.split(",")):
                continue
            if not shutil.which(program):
                print(f"left out: {name} ({program} is missing)")
                continue
            with Loop(kind, arguments.work, images) as loop:
                words = [word.replace("HASH", os.path.join(arguments.work, "hash")) for word in words]
                before, extents = used(loop.at), loop.extents()
                run("umount", loop.at)
                run("mount", loop.device, loop.at)
                status, seconds, peak, out = measured(words, arguments.timeout, cwd=loop.at)
                if kind == "btrfs":
                    run("btrfs", "filesystem", "sync", loop.at)
                    subprocess.run(["btrfs", "subvolume", "sync", loop.at], check=False, capture_output=True)
                    time.sleep(3)
                saved = before - used(loop.at)
                wrong = differing(images, loop.at + "/images")
                said = "the same" if not wrong else f"DIFFERENT: {wrong}"
                if status != 0:
                    said += f", status {status}"
                    if status != "time is up":
                        print(f"  {name}: {out.strip().splitlines()[-1:]}")
                table.row(name, saved, seconds, f"{peak:.0f}", extents, loop.extents(), said)
            for left in glob.glob(os.path.join(arguments.work, "hash*")):
                os.unlink(left)


def daemons(pool):
    """Processes of the pool, by their command lines."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "varve" in words[0] and any(word.startswith(pool) for word in words):
            found.append(int(pid))
    return found


def inodes(pool):
    return {entry.name: entry.inode() for entry in os.scandir(pool + "/mnt/images")}


def extents_of(pool, numbers):
    """Extents of all images; the pool must be stopped."""
    count = 0
    for number in numbers.values():
        tree = json.loads(run(VARVE, "debug", "tree", pool, str(number), "--json"))
        count += len(tree["extents"])
    return count


def on_varve(arguments, images, table):
    pool = os.path.join(arguments.work, "pool")
    need = sum(os.stat(image).st_blocks * 512 for image in images)
    run(VARVE, "up", pool, "--nvm", "512M", "--ssd", f"{need * 5 // 4 // MIB + 1024}M", "--hdd", "0", "--detach")
    folder = pool + "/mnt/images"
    try:
        os.mkdir(folder)
        copy(images, folder)

        def again():
            # Written data is in the tiers, the caches are cold.
            run(VARVE, "down", pool)
            numbers["extents"] = extents_of(pool, numbers["inodes"])
            run(VARVE, "up", pool, "--detach")

        numbers = {"inodes": inodes(pool)}
        again()
        for name, more in [("default: runs of 4 blocks", []), ("runs of 1 block", ["--min-run", "1"])]:
            before, extents = used(folder), numbers["extents"]
            idle = {pid: anonymous(pid) for pid in daemons(pool)}
            most = dict(idle)
            words = [VARVE, "dedup", "apply", folder, "--json", *more]
            status, seconds, peak, out = measured(words, arguments.timeout, watch=most)
            grown = sum(most.values()) - sum(idle.values())
            time.sleep(3)
            saved = before - used(folder)
            wrong = differing(images, folder)
            check(folder)
            again()
            said = "the same" if not wrong else f"DIFFERENT: {wrong}"
            if status != 0:
                said += f", status {status}"
                print(out)
            table.row(f"varve, {name}", saved, seconds, f"{peak:.0f} + {grown:.0f}", extents, numbers["extents"], said)
            started = time.monotonic()
            run(VARVE, "dedup", "undo", folder)
            seconds = time.monotonic() - started
            time.sleep(3)
            wrong = differing(images, folder)
            check(folder)
            again()
            print(
                f"  undo: {seconds:.1f} s, {(used(folder) - before) / MIB:+.1f} MiB beside before, "
                f"{numbers['extents']} extents, {'the same' if not wrong else wrong}",
                flush=True,
            )
    finally:
        subprocess.run([VARVE, "down", pool], check=False, capture_output=True)
        print("  " + subprocess.run([VARVE, "fsck", pool], text=True, capture_output=True).stdout.strip().splitlines()[-1])
        shutil.rmtree(pool, ignore_errors=True)


def check(folder):
    """The images are sound file systems, by e2fsck."""
    for image in sorted(glob.glob(folder + "/*")):
        done = subprocess.run(["e2fsck", "-fn", image], text=True, capture_output=True)
        if done.returncode != 0:
            print(f"  e2fsck {os.path.basename(image)}: {done.returncode} {done.stdout.strip().splitlines()[-1:]}")


def with_casync(arguments, images, table):
    if not shutil.which("casync"):
        print("left out: casync (casync is missing)")
        return
    for name, size in [("4 KiB on average", 4096), ("default (64 KiB)", None)]:
        store, index = os.path.join(arguments.work, "store"), os.path.join(arguments.work, "index")
        os.mkdir(index)
        more = [f"--chunk-size={size}"] if size else []
        total, peak = 0.0, 0.0
        for image in images:
            words = ["casync", "make", "--store=" + store, "--compression=zstd", *more,
                     os.path.join(index, os.path.basename(image) + ".caibx"), image]
            status, seconds, most, out = measured(words, arguments.timeout)
            if status != 0:
                print(f"  casync: {status} {out.strip().splitlines()[-1:]}")
            total, peak = total + seconds, max(peak, most)
        chunks = {}
        for file in glob.glob(index + "/*.caibx"):
            chunks.update(chunks_of(file))
        saved = table.optimum["data_bytes"] - sum(chunks.values())
        table.row(f"casync, {name}, not compressed", saved, total, f"{peak:.0f}", "", len(chunks), "a store, not the images")
        shutil.rmtree(store)
        shutil.rmtree(index)


def chunks_of(path):
    """Chunks of an index of casync: identity and length. The file is a header, then pairs of an end and an identity."""
    with open(path, "rb") as file:
        data = file.read()
    (header,) = struct.unpack_from("<Q", data)
    at, start, found = header + 16, 0, {}
    while at + 40 <= len(data):
        (end,) = struct.unpack_from("<Q", data, at)
        if end == 0:
            break
        found[data[at + 8 : at + 40]] = end - start
        start, at = end, at + 40
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images")
    parser.add_argument("--work", help="a directory for file systems and pools (a temporary one in /var/tmp)")
    parser.add_argument("--only", help="only sides whose names have one of these, by commas")
    parser.add_argument("--timeout", type=float, default=900)
    arguments = parser.parse_args()
    images = sorted(glob.glob(os.path.join(arguments.images, "*.img")))
    if not images:
        sys.exit(f"no images in {arguments.images}; benches/alike/corpus.sh makes some")
    if os.geteuid() != 0:
        sys.exit("only root can mount")
    os.environ["PATH"] += ":" + os.path.expanduser("~/.cargo/bin")
    with tempfile.TemporaryDirectory(prefix="varve-alike.", dir=arguments.work or "/var/tmp") as work:
        arguments.work = work
        table = Table(images)
        asked = lambda name: not arguments.only or any(part in name for part in arguments.only.split(","))
        if asked("varve"):
            on_varve(arguments, images, table)
        on_loops(arguments, images, table)
        if asked("casync"):
            with_casync(arguments, images, table)
        print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
