#!/bin/bash
# A corpus of disk images that are alike: bootable ext4 images of two Debian releases and several sets of packages, some of them
# configured and filled with data of their own, and their lists of packages.
#   benches/alike/corpus.sh DIR [COUNT]
# COUNT (8) up to 24 images are made from packages; more, up to 99, of files that are picked at random from three of those (the
# paper's section 4.5). DIR gets `NN-RELEASE-SET.img`, `packages/NAME.txt` (name, version, architecture, bytes), `lists/RELEASE`
# (the index of the release, for manifests.py) and `cache/` (packages; not needed afterwards).
# Needs root, mmdebstrap, mke2fs (e2fsprogs) and the network or a mirror of Debian (DEBIAN_MIRROR). An image takes 300 MB to 1 GB.
# EACH='COMMAND' is run with each image of files picked at random, which is removed then, so that 99 fit a small disk: for instance
# EACH='varve dedup cluster --manifest M'. Such an image is `NN-bbt-mixed`, with the first letters of its sources' releases.
# SLIM=1 leaves out kernels, documentation and translations: such images take 100 MB and up, and do not boot.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,12s/^# \?//p' "$0" >&2; exit 2; }
for tool in mmdebstrap mke2fs python3; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: apt-get install mmdebstrap e2fsprogs python3" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "only root can make these images" >&2; exit 1; }
dir=$(mkdir -p "$1" && cd "$1" && pwd)
count=${2:-8}
mirror=${DEBIAN_MIRROR:-}
[ "$count" -le 99 ] || { echo "at most 99 images" >&2; exit 2; }
mkdir -p "$dir/cache" "$dir/packages" "$dir/lists"

# Release, set, packages, MiB of own data, configured (c) or not (-). The first are small, so that few of them fit a small disk.
recipes=(
    "bookworm base    -                                    0 -"
    "bookworm web     nginx                                4 c"
    "trixie   base    -                                    0 -"
    "bookworm python  python3,python3-requests             8 -"
    "trixie   web     nginx                                4 c"
    "bookworm mail    exim4-daemon-light,mutt              6 c"
    "trixie   python  python3,python3-requests             8 -"
    "bookworm web     nginx,nginx-extras                  12 c"
    "bookworm cache   redis-server,memcached              10 c"
    "trixie   mail    exim4-daemon-light,mutt              6 c"
    "bookworm python  python3,python3-flask,sqlite3       16 c"
    "bookworm db      mariadb-server                      24 c"
    "trixie   cache   redis-server,memcached              10 c"
    "trixie   db      mariadb-server                      24 c"
    "bookworm db      mariadb-server,postgresql           32 c"
    "bookworm java    default-jre-headless                 8 -"
    "trixie   java    default-jre-headless                 8 -"
    "bookworm java    default-jre-headless,tomcat10       16 c"
    "bookworm php     php-cli,php-sqlite3                  6 -"
    "trixie   php     php-cli,php-sqlite3                  6 c"
    "bookworm build   gcc,make                             4 -"
    "trixie   build   gcc,make                             4 -"
    "bookworm perl    libwww-perl,libdbi-perl              4 c"
    "trixie   perl    libwww-perl,libdbi-perl              4 -"
)

part=
clean() { [ -z "$part" ] || rm -rf --one-file-system "$part"; }
trap clean EXIT
# Makes an ext4 image of a directory tree, with room for a third more.
image() { # TREE IMAGE
    local kib
    kib=$(du -sk --apparent-size "$1" | cut -f1)
    rm -f "$2"
    # UUIDs and the seed of directories differ, as they do between systems that were installed one by one.
    # Blocks of 4 KiB, as installers of systems make them: for small disks mke2fs takes 1 KiB, and files that begin anywhere in
    # a block of 4 KiB share few of them.
    mke2fs -q -t ext4 -b 4096 -d "$1" "$2" $((kib * 4 / 3 + 65536))k >/dev/null
    fallocate --dig-holes "$2"
}

# Configuration and data of a system that is in use.
configure() { # TREE NUMBER MIB
    local tree=$1 number=$2 mib=$3
    echo "host$number" >"$tree/etc/hostname"
    printf '127.0.0.1 localhost host%s\n192.0.2.%s host%s.example\n' "$number" "$number" "$number" >"$tree/etc/hosts"
    mkdir -p "$tree/srv/data" "$tree/var/log"
    local file
    for file in "$tree"/etc/*.conf "$tree"/etc/nginx/nginx.conf; do
        [ -f "$file" ] && echo "# host$number" >>"$file"
    done
    for n in $(seq 1 200); do echo "Jan  1 00:00:00 host$number daemon[$n]: request $((n * number)) done"; done >"$tree/var/log/syslog"
    [ "$mib" = 0 ] || head -c "${mib}M" /dev/urandom | split -b 1500000 - "$tree/srv/data/part-"
}

made=0
for recipe in "${recipes[@]}"; do
    [ "$made" -lt "$count" ] || break
    read -r release set packages mib configured <<<"$recipe"
    made=$((made + 1))
    name=$(printf '%02d-%s-%s' "$made" "$release" "$set")
    [ -s "$dir/$name.img" ] && [ -s "$dir/packages/$name.txt" ] && continue
    part=$(mktemp -d "$dir/part.XXXXXX")
    chmod 755 "$part"
    wanted=systemd-sysv
    [ -n "${SLIM:-}" ] || wanted+=,linux-image-cloud-amd64,ifupdown
    [ "$packages" = - ] || wanted+=,$packages
    options=()
    if [ -n "${SLIM:-}" ]; then
        options+=(--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*'
            --dpkgopt='path-exclude=/usr/share/locale/*')
    fi
    # shellcheck disable=SC2016 # mmdebstrap gives $1 to the hooks
    mmdebstrap --quiet --mode=root --variant=minbase --include="$wanted" "${options[@]}" --skip=download/empty,essential/unlink \
        --setup-hook='mkdir -p "$1/var/cache/apt/archives"' --setup-hook="sync-in '$dir/cache' /var/cache/apt/archives" \
        --customize-hook="sync-out /var/cache/apt/archives '$dir/cache'" \
        --customize-hook="sync-out /var/lib/apt/lists '$dir/lists'" \
        "$release" "$part/tree" $mirror 2>"$dir/$name.log" || { tail -5 "$dir/$name.log" >&2; exit 1; }
    rm -f "$dir/$name.log"
    rm -rf --one-file-system "$part"/tree/var/cache/apt/archives/*.deb "$part"/tree/var/lib/apt/lists/* "$dir"/cache/{lock,partial}
    mkdir -p "$dir/lists/$release"
    find "$dir/lists" -maxdepth 1 -type f -name '*_Packages*' -exec mv -f {} "$dir/lists/$release/" \;
    find "$dir/lists" -maxdepth 1 -mindepth 1 ! -name bookworm ! -name trixie -exec rm -rf {} +
    if [ "$configured" = c ]; then
        configure "$part/tree" "$made" "$mib"
    elif [ "$mib" != 0 ]; then
        mkdir -p "$part/tree/srv/data"
        head -c "${mib}M" /dev/urandom >"$part/tree/srv/data/whole"
    fi
    printf '/dev/vda / ext4 defaults 0 1\n' >"$part/tree/etc/fstab"
    # shellcheck disable=SC2016 # fields of dpkg-query
    dpkg-query --admindir="$part/tree/var/lib/dpkg" -W -f '${Package} ${Version} ${Architecture} ${Installed-Size}\n' |
        awk '{ print $1, $2, $3, $4 * 1024 }' >"$dir/packages/$name.txt"
    image "$part/tree" "$dir/$name.img"
    rm -rf --one-file-system "$part"
    part=
    echo "$name: $(du -m "$dir/$name.img" | cut -f1) MiB, $(wc -l <"$dir/packages/$name.txt") packages"
done

# More than there are recipes: a third of the files of three images each, as the paper made 99 of 21.
while [ "$made" -lt "$count" ]; do
    made=$((made + 1))
    # shellcheck disable=SC2016 # Python
    sources=$(python3 -c 'import random, sys; print(*random.Random(int(sys.argv[1])).sample(sorted(sys.argv[2:]), 3), sep="\n")' \
        "$made" $(find "$dir" -maxdepth 1 -name '*.img' ! -name '*-mixed.img'))
    releases=$(for source in $sources; do basename "$source" | cut -d- -f2 | cut -c1; done | sort | tr -d '\n')
    name=$(printf '%02d-%s-mixed' "$made" "$releases")
    [ -s "$dir/$name.img" ] && continue
    part=$(mktemp -d "$dir/part.XXXXXX")
    mkdir "$part/tree" "$part/mount"
    nth=0
    for source in $sources; do
        nth=$((nth + 1))
        mount -o ro,loop,noload "$source" "$part/mount"
        (cd "$part/mount" && find . -xdev -type f -print0 | sort -z |
            awk -v RS='\0' -v ORS='\0' -v seed="$((made * 3 + nth))" 'BEGIN { srand(seed) } rand() < 1 / 3' |
            tar -c --null --no-recursion -T - | tar -x -C "$part/tree") || { umount "$part/mount"; exit 1; }
        umount "$part/mount"
    done
    image "$part/tree" "$dir/$name.img"
    rm -rf --one-file-system "$part"
    part=
    echo "$name: $(du -m "$dir/$name.img" | cut -f1) MiB"
    if [ -n "${EACH:-}" ]; then
        (cd "$dir" && $EACH "$name.img" >/dev/null)
        rm -f "$dir/$name.img"
    fi
done
