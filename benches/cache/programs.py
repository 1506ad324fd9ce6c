"""curl, git, pip, npm, cargo, mmdebstrap and Chromium through varve-cache-proxy (reverse) from a local origin of static files: the same
bytes as without the proxy; a second run, with the programs' own caches empty again, takes no body from the origin. `programs.py [NAMES…]`.
"""

import base64
import contextlib
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile

import peers

OLD = time.time() - 100 * 86400
# Of Debian's sqlite3-doc; not its index, whose script shuffles a list.
CHROMIUM_PAGES = ["queryplanner", "fasterthanfs", "vtab", "lockingv3"]


class Origin(http.server.ThreadingHTTPServer):
    """Static files below a folder; counts requests and bytes of bodies."""

    daemon_threads = True

    def __init__(self, folder):
        self.requests = self.bodies = self.body_bytes = 0
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def send_response(self, code, message=None):
                outer.requests += 1
                super().send_response(code, message)

            def do_GET(self):
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                path = pathlib.Path(self.translate_path(self.path))
                if not asked or not path.is_file():
                    return super().do_GET()
                first, last = int(asked.group(1)), min(int(asked.group(2)), path.stat().st_size - 1)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
                self.send_header("Content-Length", str(last - first + 1))
                self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
                self.end_headers()
                self.copyfile(io.BytesIO(path.read_bytes()[first:last + 1]), self.wfile)

            def copyfile(self, source, outputfile):
                data = source.read()
                outer.bodies += 1
                outer.body_bytes += len(data)
                outputfile.write(data)

        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def take(self):
        taken = (self.requests, self.bodies, self.body_bytes)
        self.requests = self.bodies = self.body_bytes = 0
        return taken


def run(argv, cwd, env=None):
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "no_proxy": "*", **(env or {})})
    if done.returncode:
        raise RuntimeError(f"{argv}: {done.stdout[-800:]}{done.stderr[-1500:]}")
    return done.stdout


def digest(folder):
    """A hash of all files below a folder."""
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        whole.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()


def noise(length, seed):
    out, state = bytearray(), hashlib.sha256(seed.encode()).digest()
    while len(out) < length:
        state = hashlib.sha256(state).digest()
        out += state
    return bytes(out[:length])


def make_files(root):
    for n, size in enumerate([0, 1, 5000, 300_000, 5_000_000]):
        (root / "files").mkdir(exist_ok=True)
        (root / "files" / str(n)).write_bytes(noise(size, f"file {n}"))


def make_git(root):
    work = root / "work"
    work.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    run([*git, "init", "-q", "-b", "main"], work)
    for n in range(20):
        (work / f"file{n}").write_bytes(noise(3000 * n, f"git {n}"))
        run([*git, "add", "."], work)
        run([*git, "commit", "-qm", f"file {n}"], work)
    run(["git", "clone", "-q", "--bare", str(work), str(root / "repo.git")], root)
    run(["git", "update-server-info"], root / "repo.git")
    shutil.rmtree(work)


def make_pip(root):
    simple = root / "simple"
    for n in range(4):
        name = f"vcpkg{n}"
        (simple / name).mkdir(parents=True)
        wheel = simple / name / f"{name}-1.0-py3-none-any.whl"
        need = f"Requires-Dist: vcpkg{n + 1}\n" if n < 3 else ""
        with zipfile.ZipFile(wheel, "w") as out:
            out.writestr(f"{name}.py", noise(20_000, name).hex())
            info = f"{name}-1.0.dist-info"
            out.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{need}")
            out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            out.writestr(f"{info}/RECORD", "")
        (simple / name / "index.html").write_text(
            f'<!DOCTYPE html><a href="{wheel.name}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}">'
            f"{wheel.name}</a>")


def pack(path, members):
    """A tarball that is the same each time."""
    with gzip.GzipFile(path, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as out:
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            out.addfile(member, io.BytesIO(text.encode()))


def make_npm(root, at):
    for n in range(4):
        name, folder = f"vcpkg{n}", root / "npm"
        folder.mkdir(exist_ok=True)
        manifest = {"name": name, "version": "1.0.0", "dependencies": {f"vcpkg{n + 1}": "1.0.0"} if n < 3 else {}}
        tarball = folder / f"{name}.tgz"
        pack(tarball, {"package/package.json": json.dumps(manifest),
                       "package/index.js": noise(30_000, name).hex()})
        sha = base64.b64encode(hashlib.sha512(tarball.read_bytes()).digest()).decode()
        manifest["dist"] = {"tarball": f"{at}/npm/{name}.tgz", "integrity": f"sha512-{sha}"}
        (folder / name).write_text(json.dumps(
            {"name": name, "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": manifest}}))


def make_cargo(root, at):
    index = root / "index"
    index.mkdir()
    (index / "config.json").write_text(json.dumps({"dl": f"{at}/crates/{{crate}}.crate"}))
    (root / "crates").mkdir()
    for n in range(4):
        name = f"vcpkg{n}"
        need = f'[dependencies]\nvcpkg{n + 1} = "1.0.0"\n' if n < 3 else ""
        crate = root / "crates" / f"{name}.crate"
        manifest = f'[package]\nname = "{name}"\nversion = "1.0.0"\nedition = "2021"\n{need}'
        pack(crate, {f"{name}-1.0.0/Cargo.toml": manifest,
                     f"{name}-1.0.0/src/lib.rs": f"// {noise(20_000, name).hex()}\n"})
        deps = [{"name": f"vcpkg{n + 1}", "req": "^1.0.0", "features": [], "optional": False,
                 "default_features": True, "target": None, "kind": "normal"}] if n < 3 else []
        place = index / "vc" / "pk"
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(json.dumps(
            {"name": name, "vers": "1.0.0", "deps": deps, "features": {}, "yanked": False,
             "cksum": hashlib.sha256(crate.read_bytes()).hexdigest()}) + "\n")


def make_apt(root):
    """A flat repository of four packages that need each other."""
    if not shutil.which("mmdebstrap"):
        return
    (root / "apt").mkdir()
    for n in range(4):
        name = f"vcpkg{n}"
        tree = root / "apt" / name
        (tree / "DEBIAN").mkdir(parents=True)
        need = f"Depends: vcpkg{n + 1}\n" if n < 3 else ""
        (tree / "DEBIAN" / "control").write_text(
            f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@b>\n{need}Description: a package\n")
        (tree / "usr" / "share" / name).mkdir(parents=True)
        (tree / "usr" / "share" / name / "data").write_bytes(noise(200_000, name))
        run(["dpkg-deb", "--root-owner-group", "-b", name, f"{name}.deb"], root / "apt",
            {"SOURCE_DATE_EPOCH": "1"})
        shutil.rmtree(tree)
    (root / "apt" / "Packages").write_text(run(["dpkg-scanpackages", "-m", "."], root / "apt"))


def curl(at, folder):
    run(["curl", "-sSf", "--remote-name-all", f"{at}/files/[0-4]"], folder)
    run(["curl", "-sSf", "-r", "1000-4999999", "-o", "range", f"{at}/files/4"], folder)


def git(at, folder):
    run(["git", "clone", "-q", f"{at}/repo.git", "clone"], folder, {"GIT_SMART_HTTP": "0"})
    shutil.rmtree(folder / "clone" / ".git")


def pip(at, folder):
    host = at.split("/")[2].split(":")[0]
    run([sys.executable, "-m", "pip", "-q", "--no-cache-dir", "--disable-pip-version-check", "download",
         "--index-url", f"{at}/simple/", "--trusted-host", host, "vcpkg0"], folder)


def npm(at, folder):
    with tempfile.TemporaryDirectory() as cache:
        (folder / "package.json").write_text("{}")
        run(["npm", "install", "--no-audit", "--no-fund", "--no-update-notifier", "--no-package-lock",
             f"--registry={at}/npm/", f"--cache={cache}", "vcpkg0"], folder)
    for lock in folder.rglob(".package-lock.json"):
        lock.unlink()


def cargo(at, folder):
    (folder / "src").mkdir()
    (folder / "src" / "lib.rs").write_text("")
    (folder / "Cargo.toml").write_text(
        '[package]\nname = "top"\nversion = "0.1.0"\nedition = "2021"\n[dependencies]\nvcpkg0 = "1.0.0"\n[workspace]\n')
    with tempfile.TemporaryDirectory() as home:
        (pathlib.Path(home) / "config.toml").write_text(
            f'[source.crates-io]\nreplace-with = "local"\n[source.local]\nregistry = "sparse+{at}/index/"\n')
        path = subprocess.run(["rustup", "which", "cargo"], capture_output=True, text=True).stdout.strip()
        run([path or "cargo", "-q", "fetch"], folder, {"CARGO_HOME": home})
        for crate in pathlib.Path(home).glob("registry/cache/*/*.crate"):
            shutil.copy(crate, folder)
    (folder / "Cargo.lock").unlink()


def mmdebstrap(at, folder):
    run(["mmdebstrap", "-q", "--variant=extract", "--include=vcpkg0", "--skip=check/empty", "stable", "tree",
         f"deb [trusted=yes] {at}/apt/ ./"], folder, {"SOURCE_DATE_EPOCH": "1"})
    # apt's own state names the repository's address.
    for state in ("etc/apt", "var"):
        shutil.rmtree(folder / "tree" / state, ignore_errors=True)
    if len(list(folder.rglob("data"))) != 4:
        raise RuntimeError("mmdebstrap left packages out")


def make_chromium(root):
    """Real pages: those of Debian's sqlite3-doc, with their images and scripts."""
    if not shutil.which("chromium"):
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        done = subprocess.run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "sqlite3-doc"], cwd=folder,
                              capture_output=True, text=True)
        if done.returncode:
            print(f"chromium has no pages: apt-get download sqlite3-doc: {done.stderr.strip()}", file=sys.stderr)
            return
        run(["dpkg", "-x", str(next(folder.glob("*.deb"))), "tree"], folder)
        shutil.copytree(folder / "tree/usr/share/doc/sqlite3", root / "pages", symlinks=False,
                        ignore_dangling_symlinks=True)


def chromium(at, folder):
    """What the browser makes of each page: its document after scripts, and its picture."""
    for page in CHROMIUM_PAGES:
        with tempfile.TemporaryDirectory() as profile:
            browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
                       "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                       f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--window-size=1000,3000"]
            url = f"{at}/pages/{page}.html"
            dom = run([*browser, "--dump-dom", url], folder)
            if "</body>" not in dom or "SQLite" not in dom:
                raise RuntimeError(f"chromium shows no page: {dom[:300]}")
            (folder / f"{page}.dom").write_text(dom)
        with tempfile.TemporaryDirectory() as profile:
            browser[-3] = f"--user-data-dir={profile}"
            run([*browser, f"--screenshot={folder / page}.png", url], folder)
            if (folder / f"{page}.png").stat().st_size < 10_000:
                raise RuntimeError("chromium's picture is empty")


def main():
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        root = pathlib.Path(name) / "origin"
        root.mkdir()
        origin = Origin(root)
        stack.callback(origin.shutdown)
        direct = f"http://localhost:{origin.server_port}"
        peer = stack.enter_context(peers.running("varve", f"127.0.0.1:{origin.server_port}", 256, 16))
        through = f"http://localhost:{peer.port}"
        make_files(root)
        make_git(root)
        make_pip(root)
        make_apt(root)
        make_chromium(root)
        print(f"{'':<10} {'bytes':<10} {'first: requests':>15} {'bodies':>7} {'bytes':>10} {'second: requests':>17} "
              f"{'bodies':>7}")
        failed = 0
        for program in (curl, git, pip, npm, cargo, mmdebstrap, chromium):
            if sys.argv[1:] and program.__name__ not in sys.argv[1:]:
                continue
            if not shutil.which(program.__name__):
                print(f"{program.__name__:<10} is not installed")
                continue
            if program is chromium and not (root / "pages").exists():
                print("chromium   has no pages to show")
                continue
            digests, counts = [], []
            for at in (direct, through, through):
                # npm and cargo are told whole URLs by their indexes.
                for part, make in (("npm", make_npm), ("index", make_cargo)):
                    if program.__name__ == {"npm": "npm", "index": "cargo"}[part] and len(digests) < 2:
                        for old in (part, *(["crates"] if part == "index" else [])):
                            shutil.rmtree(root / old, ignore_errors=True)
                        make(root, at)
                for path in root.rglob("*"):
                    os.utime(path, (OLD, OLD))
                with tempfile.TemporaryDirectory() as folder:
                    origin.take()
                    program(at, pathlib.Path(folder))
                    digests.append(digest(pathlib.Path(folder)))
                    counts.append(origin.take())
            same = len(set(digests)) == 1
            failed += not same or counts[2][1] > 0
            print(f"{program.__name__:<10} {'the same' if same else 'DIFFERENT':<10} {counts[1][0]:>15} "
                  f"{counts[1][1]:>7} {counts[1][2]:>10} {counts[2][0]:>17} {counts[2][1]:>7}", flush=True)
        return failed


if __name__ == "__main__":
    sys.exit(main())
