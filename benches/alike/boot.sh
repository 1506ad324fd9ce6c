#!/bin/bash
# Boots disk images in QEMU until they ask for a login, one after the other; they are not changed. corpus.sh makes such images.
#   benches/alike/boot.sh IMAGE...
# Needs qemu-system-x86_64 and debugfs (apt-get install qemu-system-x86 e2fsprogs). BOOT_SECONDS (300): the most that one may take.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,4s/^# \?//p' "$0" >&2; exit 2; }
for tool in qemu-system-x86_64 debugfs; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: apt-get install qemu-system-x86 e2fsprogs" >&2; exit 1; }
done
work=$(mktemp -d)
trap '[ ! -s "$work/pid" ] || kill -9 "$(cat "$work/pid")" 2>/dev/null; rm -rf "$work"' EXIT
failed=0
for image in "$@"; do
    rm -f "$work"/*
    for part in vmlinuz initrd.img; do
        path=$(debugfs -R 'ls -p /boot' "$image" 2>/dev/null | tr / '\n' | grep "^$part-" | sort -V | tail -1)
        [ -n "$path" ] || { echo "$image has no /boot/$part" >&2; exit 1; }
        debugfs -R "dump /boot/$path $work/$part" "$image" 2>/dev/null
    done
    SECONDS=0
    qemu-system-x86_64 -accel tcg,thread=multi -cpu max -m 1024M -nodefaults -display none -no-reboot -daemonize \
        -pidfile "$work/pid" -serial "file:$work/console" -snapshot -drive "file=$image,format=raw,if=virtio" \
        -kernel "$work/vmlinuz" -initrd "$work/initrd.img" -append 'root=/dev/vda ro console=ttyS0 panic=-1' 2>"$work/errors" ||
        { cat "$work/errors" >&2; exit 1; }
    said=no
    while kill -0 "$(cat "$work/pid")" 2>/dev/null && [ "$SECONDS" -lt "${BOOT_SECONDS:-300}" ]; do
        if grep -aq 'login:' "$work/console"; then said=yes; break; fi
        sleep 1
    done
    kill -9 "$(cat "$work/pid")" 2>/dev/null || true
    if [ "$said" = yes ]; then
        echo "$(basename "$image"): asked for a login after $SECONDS s"
    else
        echo "$(basename "$image"): did not ask for a login; the last that it said:" >&2
        tail -5 "$work/console" >&2
        failed=1
    fi
done
exit $failed
