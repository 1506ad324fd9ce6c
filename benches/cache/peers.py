"""Caching proxies side by side: varve-cache-proxy and Debian's Squid, nginx, Traffic Server and Varnish, each a
reverse proxy on loopback with a disk cache in a temporary folder. Used by the scripts beside it.

Debian's four come from `apt-get install squid nginx-light trafficserver varnish`; what is not installed is left
out and told. As root they change to their own users. Processes are ended by their ids.
"""

import contextlib
import os
import pathlib
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARVE = pathlib.Path(os.environ.get("VARVE_CACHE_PROXY", ROOT / "target/release/varve-cache-proxy"))
NAMES = ["varve", "squid", "nginx", "trafficserver", "varnish"]
PROGRAMS = {"varve": str(VARVE), "squid": "squid", "nginx": "nginx", "trafficserver": "traffic_server",
            "varnish": "varnishd"}
USERS = {"squid": "proxy", "nginx": "www-data", "trafficserver": "trafficserver", "varnish": "vcache"}


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def nginx(http, port):
    """An origin: nginx with this text in its `http` block, which listens on `port`; its folder goes at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in
                             ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        (folder / "conf").write_text(
            f"daemon off; pid {folder}/pid; error_log {folder}/log crit; worker_processes 1; user www-data;\n"
            f"events {{ worker_connections 4000; }}\nhttp {{ access_log off; {temporary}\n{http}\n}}\n")
        process = subprocess.Popen(["nginx", "-c", str(folder / "conf")], stderr=subprocess.DEVNULL)
        try:
            wait_for(port, process)
            yield port
        finally:
            process.terminate()
            process.wait()


def installed():
    """Names of the programs that are there."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    os.environ["PATH"] = path
    there = [name for name in NAMES if shutil.which(PROGRAMS[name])]
    for name in NAMES:
        if name not in there:
            print(f"left out: {name} ({PROGRAMS[name]} is not installed)", file=sys.stderr)
    return there


def version(name):
    """The version of a program."""
    args = {"varve": ["--version"], "squid": ["-v"], "nginx": ["-v"], "trafficserver": ["-V"], "varnish": ["-V"]}
    done = subprocess.run([PROGRAMS[name], *args[name]], capture_output=True, text=True)
    found = re.search(r"\d+\.\d+(\.\d+)?", done.stdout + done.stderr)
    return found.group(0) if found else "?"


def _varve(folder, port, origin, disk_mb, memory_mb, extra):
    (folder / "conf").write_text(
        f'[store]\ndevices = ["{extra.get("device", folder / "store")}"]\ncreate_bytes = "{disk_mb}M"\nhot_bytes = "{memory_mb}M"\n'
        f'{extra.get("store", "")}\n'
        f'[[listen]]\naddress = "127.0.0.1:{port}"\n[[site]]\nhosts = ["*"]\norigins = ["http://{origin}"]\n'
        f'[admin]\nsocket = "{folder}/admin"\n{extra.get("varve", "")}\n')
    return [str(VARVE), "serve", "--config", str(folder / "conf")], {"VARVE_LOG": "warn", **extra.get("varve_env", {})}


def _squid(folder, port, origin, disk_mb, memory_mb, extra):
    host, origin_port = origin.split(":")
    kind = extra.get("squid_dir", f"rock {{folder}}/cache {disk_mb}").format(folder=folder)
    (folder / "conf").write_text(
        f"http_port 127.0.0.1:{port} accel defaultsite=localhost vhost\n"
        f"cache_peer {host} parent {origin_port} 0 no-query no-digest originserver name=o\n"
        f"cache_peer_access o allow all\nhttp_access allow all\ncache_dir {kind}\n"
        f"cache_mem {memory_mb} MB\nmaximum_object_size 1 GB\nshutdown_lifetime 1 second\n"
        f"pid_filename {folder}/pid\ncoredump_dir {folder}\ncache_log {folder}/log\naccess_log none\n"
        f"cache_store_log none\nlogfile_rotate 0\nvisible_hostname localhost\n{extra.get('squid', '')}\n")
    done = subprocess.run(["squid", "-N", "-z", "-f", str(folder / "conf")], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return ["squid", "-N", "-f", str(folder / "conf")], {}


def _nginx(folder, port, origin, disk_mb, memory_mb, extra):
    (folder / "conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/log; worker_processes {extra.get('workers', 2)};\n"
        f"user www-data; worker_rlimit_nofile 65536; events {{ worker_connections 20000; }}\n"
        f"http {{ access_log off; client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2;\n"
        f"fastcgi_temp_path {folder}/t3; uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;\n"
        f"proxy_cache_path {folder}/cache levels=1:2 keys_zone=c:{extra.get('nginx_zone_mb', 64)}m "
        f"max_size={disk_mb}m inactive=600m use_temp_path=off;\n"
        f"upstream o {{ server {origin}; keepalive 64; }}\n"
        f"server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://o; proxy_cache c;\n"
        f"proxy_http_version 1.1; proxy_set_header Connection ''; proxy_set_header Host $http_host;\n"
        f"proxy_cache_revalidate on; {extra.get('nginx', '')} }} }} }}\n")
    return ["nginx", "-c", str(folder / "conf")], {}


def _trafficserver(folder, port, origin, disk_mb, memory_mb, extra):
    done = subprocess.run(["traffic_layout", "init", "--path", str(folder / "root"), "--copy-style=full", "--force"],
                          capture_output=True, text=True)
    root = folder / "root"
    layout = (root / "runroot.yaml").read_text() if (root / "runroot.yaml").exists() else ""
    conf = re.search(r"^sysconfdir: (.*)$", layout, re.M)
    if not conf:
        raise RuntimeError(f"traffic_layout: {done.stdout}{done.stderr}")
    conf = pathlib.Path(conf.group(1))
    (conf / "remap.config").write_text(f"map / http://{origin}/\n")
    (conf / "storage.config").write_text(extra.get("trafficserver_storage", f"{folder}/cache {disk_mb}M") + "\n")
    (folder / "cache").mkdir()
    more = {
        "http.server_ports": ("STRING", f"{port}:ip-in=127.0.0.1"),
        "cache.ram_cache.size": ("INT", memory_mb << 20),
        "log.logging_enabled": ("INT", 0),
        "url_remap.pristine_host_hdr": ("INT", 1),
        "admin.user_id": ("STRING", "trafficserver"),
        "exec_thread.autoconfig": ("INT", 0),
        "exec_thread.limit": ("INT", 2),
        "diags.logfile.filename": ("STRING", "diags.log"),
    }
    more.update(extra.get("trafficserver", {}))
    records = (conf / "records.config").read_text().splitlines()
    records = [line for line in records if not any(f" proxy.config.{key} " in line for key in more)]
    records += [f"CONFIG proxy.config.{key} {kind} {value}" for key, (kind, value) in more.items()]
    (conf / "records.config").write_text("\n".join(records) + "\n")
    return ["traffic_server", f"--run-root={root / 'runroot.yaml'}"], {}


def _varnish(folder, port, origin, disk_mb, memory_mb, extra):
    host, origin_port = origin.split(":")
    (folder / "vcl").write_text(
        f'vcl 4.1;\nbackend default {{ .host = "{host}"; .port = "{origin_port}"; }}\n{extra.get("vcl", "")}\n')
    storage = extra.get("varnish_storage", f"file,{folder}/cache,{disk_mb}M")
    return ["varnishd", "-F", "-n", str(folder / "work"), "-a", f"127.0.0.1:{port}", "-f", str(folder / "vcl"),
            "-s", storage, "-T", "none", "-p", "default_grace=0", "-p", "default_keep=3600",
            *extra.get("varnish", ["-p", "default_ttl=0"])], {}


MAKE = {"varve": _varve, "squid": _squid, "nginx": _nginx, "trafficserver": _trafficserver, "varnish": _varnish}


def give(folder, name):
    """Makes the program's user the owner of its folder, if this is root."""
    user = USERS.get(name)
    if user and os.geteuid() == 0:
        ids = pwd.getpwnam(user)
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, ids.pw_uid, ids.pw_gid)


def wait_for(port, process, seconds=40):
    """Waits until something accepts on a port."""
    end = time.time() + seconds
    while time.time() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}")
        time.sleep(0.05)
    raise RuntimeError("it does not listen")


def tree(pid):
    """A process and its descendants."""
    found = [pid]
    for child in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split():
        found += tree(int(child))
    return found


def rss_bytes(pid, but=None):
    """Resident bytes of a process and its descendants: of pages that several share, each has its part (Pss).
    Without the mappings of the file `but`, whose pages are a disk cache that is mapped."""
    total = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            text = pathlib.Path(f"/proc/{one}/smaps").read_text()
            counts = True
            for line in text.splitlines():
                if re.match(r"[0-9a-f]+-", line):
                    counts = but is None or not line.endswith(str(but))
                elif counts and line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


class Peer:
    """A proxy that runs."""

    def __init__(self, name, port, process, folder):
        self.name, self.port, self.process, self.folder = name, port, process, folder

    def rss(self):
        """Resident bytes, without a mapped disk cache."""
        return rss_bytes(self.process.pid, self.folder / "cache")


@contextlib.contextmanager
def running(name, origin, disk_mb=1024, memory_mb=64, extra=None, base=None, group=None):
    """Runs a proxy before `origin` (host:port), in the control group whose folder is `group`; ends it and removes its
    folder afterwards."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"peer-{name}-", dir=base))
    folder.chmod(0o755)
    port = free_port()
    process = None
    try:
        give(folder, name)
        argv, env = MAKE[name](folder, port, origin, disk_mb, memory_mb, extra or {})
        give(folder, name)
        with open(folder / "out", "w") as out:
            enter = (lambda: (group / "cgroup.procs").write_text(str(os.getpid()))) if group else None
            process = subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, **env},
                                       start_new_session=True, preexec_fn=enter)
        try:
            wait_for(port, process)
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}\n{(folder / 'out').read_text()[-2000:]}") from None
        yield Peer(name, port, process, folder)
    finally:
        if process:
            children = tree(process.pid)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                for pid in children:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
        # Hundreds of thousands of files: much faster than shutil.rmtree.
        subprocess.run(["rm", "-rf", str(folder)])
