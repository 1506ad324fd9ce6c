#!/usr/bin/env python3
"""Manifests of packages of made-up machines, from the indexes of Debian's releases: what `apt-get install` of a role's packages would
bring, by their dependencies, and some more packages of each machine's own.
  benches/alike/manifests.py LISTS-OF-A-RELEASE... DIR COUNT
LISTS: directories of `Packages` files (corpus.sh keeps them in lists/). Writes COUNT files `NNNNN-RELEASE-ROLE.txt`: name, version,
architecture, bytes. The choice is the same in every run."""
import glob
import os
import random
import re
import sys

BASE = "base-files apt bash coreutils systemd-sysv libc6 openssh-server cron rsyslog linux-image-amd64 python3-minimal curl".split()
ROLES = {
    "web": "nginx php-fpm certbot", "db": "mariadb-server", "pg": "postgresql", "mail": "postfix dovecot-imapd spamassassin",
    "java": "default-jre-headless tomcat10", "python": "python3-flask python3-requests python3-numpy", "build": "build-essential git cmake",
    "cache": "redis-server memcached varnish", "desktop": "xfce4 firefox-esr", "perl": "libwww-perl libdbi-perl", "ruby": "ruby-full",
    "node": "nodejs", "dns": "bind9", "files": "samba nfs-kernel-server", "watch": "prometheus prometheus-node-exporter",
    "proxy": "haproxy squid", "queue": "rabbitmq-server", "science": "r-base octave", "virt": "qemu-system-x86 libvirt-daemon-system",
    "print": "cups",
}


def packages(folder):
    """Name → (version, architecture, bytes, names of dependencies)."""
    found = {}
    for path in sorted(glob.glob(folder + "/*_Packages")):
        with open(path, encoding="utf-8") as file:
            for paragraph in file.read().split("\n\n"):
                fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.M))
                if "Package" not in fields:
                    continue
                wanted = ", ".join(fields.get(name, "") for name in ("Pre-Depends", "Depends"))
                names = [re.split(r"[ :(|]", part.strip())[0] for part in wanted.split(",") if part.strip()]
                size = int(fields.get("Installed-Size", 0)) * 1024
                found[fields["Package"]] = (fields["Version"], fields["Architecture"], size, names)
    return found


def closure(known, names, cache):
    """The packages with all that they need."""
    chosen = set()
    for name in names:
        if name not in cache:
            seen, left = set(), [name]
            while left:
                at = left.pop()
                if at in known and at not in seen:
                    seen.add(at)
                    left.extend(known[at][3])
            cache[name] = frozenset(seen)
        chosen |= cache[name]
    return chosen


def main():
    *lists, into, count = sys.argv[1:]
    os.makedirs(into, exist_ok=True)
    releases = []
    for folder in lists:
        known = packages(folder)
        releases.append((os.path.basename(folder.rstrip("/")), known, sorted(known), {}))
    choice = random.Random(1)
    for number in range(int(count)):
        release, known, names, cache = releases[choice.randrange(len(releases))]
        role = choice.choice(sorted(ROLES))
        own = choice.sample(names, choice.randrange(1, 8))
        chosen = closure(known, BASE + ROLES[role].split() + own, cache)
        with open(os.path.join(into, f"{number:05}-{release}-{role}.txt"), "w", encoding="utf-8") as file:
            for name in sorted(chosen):
                version, architecture, size, _ = known[name]
                file.write(f"{name} {version} {architecture} {size}\n")


if __name__ == "__main__":
    main()
