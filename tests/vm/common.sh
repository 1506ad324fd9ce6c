# Shared by the scripts here; sourced, not run.
cache=${VARVE_VM_CACHE:-/var/tmp/varve-vm}

vm_skip() {
  echo "SKIPPED: test machine: $*" >&2
  exit 0
}

mkdir -p "$cache" 2> /dev/null || vm_skip "cannot write $cache (set VARVE_VM_CACHE)"

# Installs what is missing; skips loudly where that is not possible.
vm_packages() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  command -v apt-get > /dev/null || vm_skip "needs Debian packages ${missing[*]}, and there is no apt-get"
  [ "$(id -u)" = 0 ] || vm_skip "needs Debian packages ${missing[*]}; run as root, or install them"
  export DEBIAN_FRONTEND=noninteractive
  # Fetching is bounded; installing is not, as half an installation helps nobody.
  vm_fetch "${missing[@]}" > "$cache/apt.log" 2>&1 || {
    timeout 30 apt-get "${vm_patience[@]}" update >> "$cache/apt.log" 2>&1
    vm_fetch "${missing[@]}" >> "$cache/apt.log" 2>&1
  } || vm_skip "cannot fetch ${missing[*]} (see $cache/apt.log)"
  apt-get "${vm_patience[@]}" install -y --no-install-recommends "${missing[@]}" >> "$cache/apt.log" 2>&1 ||
    vm_skip "cannot install ${missing[*]} (see $cache/apt.log)"
}

vm_patience=(-o Acquire::Retries=1 -o Acquire::http::Timeout=15 -o DPkg::Lock::Timeout=30)

vm_fetch() {
  timeout 75 apt-get "${vm_patience[@]}" install -y --no-install-recommends --download-only "$@"
}

# What booting the machine needs.
vm_machine() {
  vm_packages qemu-system-x86 busybox-static cpio kmod xz-utils ndctl
}

# apt with lists of our own, so that other suites can be read without changing the system's sources.
#   vm_apt SUITE TOOL ARGUMENTS...
vm_apt() {
  local suite=$1 tool=$2 own=$cache/apt-$1 from=http://deb.debian.org/debian
  local trust=signed-by=/usr/share/keyrings/debian-archive-keyring.gpg
  shift 2
  # Debian 12 has no keys of Ubuntu: what comes from there is checked against sums that are written down here.
  [ "$suite" = noble ] && trust=trusted=yes from=http://archive.ubuntu.com/ubuntu
  mkdir -p "$own/lists/partial" "$own/archives/partial"
  echo "deb [$trust] $from $suite main" > "$own/sources.list"
  "$tool" -o Dir::Etc::sourcelist="$own/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State::lists="$own/lists" -o Dir::Cache="$own" -o APT::Sandbox::User=root \
    -o Acquire::Retries=1 -o Acquire::http::Timeout=15 -t "$suite" "$@"
}

# Reads a suite's lists, once.
vm_lists() {
  [ -n "$(ls "$cache/apt-$1/lists" 2> /dev/null | grep -v -e partial -e lock)" ] ||
    vm_apt "$1" apt-get update > "$cache/apt.log" 2>&1
}

# Downloads a package of a suite into the cache, once; prints the file.
vm_download() {
  local file
  file=$(ls "$cache/$2"_*.deb 2> /dev/null | head -1)
  if [ -z "$file" ]; then
    vm_lists "$1" || return 1
    (cd "$cache" && vm_apt "$1" apt-get download "$2" >> "$cache/apt.log" 2>&1) || return 1
    file=$(ls "$cache/$2"_*.deb | head -1)
    # Half a download must not be taken for a package next time.
    dpkg-deb --info "$file" > /dev/null 2>&1 || { rm -f "$file"; return 1; }
  fi
  echo "$file"
}

# Unpacks a kernel from its packages: $cache/NAME/{vmlinux,release,lib/modules}.
#   vm_unpack NAME PACKAGE...
vm_unpack() {
  local name=$1 unpack=$cache/unpack-$1 package image offset
  shift
  rm -rf "$unpack" "${cache:?}/$name"
  mkdir -p "$unpack" "$cache/$name/lib"
  for package in "$@"; do dpkg-deb -x "$package" "$unpack" || return 1; done
  image=$(ls "$unpack"/boot/vmlinuz-* | head -1)
  # The compressed kernel starts at its magic number inside of the boot image; booting it whole (PVH) is faster.
  offset=$(LC_ALL=C grep -aobP '\xfd7zXZ\x00' "$image" | head -1 | cut -d: -f1)
  if [ -n "$offset" ]; then
    tail -c +$((offset + 1)) "$image" | xz -dc --single-stream > "$cache/$name/vmlinux.new" 2> /dev/null || true
  fi
  # Whatever cannot be unpacked is booted as it is.
  head -c 4 "$cache/$name/vmlinux.new" 2> /dev/null | grep -q ELF || cp "$image" "$cache/$name/vmlinux.new"
  basename "$image" | sed 's/^vmlinuz-//' > "$cache/$name/release"
  mv "$(ls -d "$unpack"/lib/modules "$unpack"/usr/lib/modules 2> /dev/null | head -1)" "$cache/$name/lib/modules"
  depmod -b "$cache/$name" "$(cat "$cache/$name/release")" || return 1
  mv "$cache/$name/vmlinux.new" "$cache/$name/vmlinux"
  rm -rf "$unpack"
}

# Debian's kernel, the newest of its backports.
vm_debian_kernel() {
  [ -f "$cache/debian/vmlinux" ] && return
  command -v apt-get > /dev/null || return 1
  local suite=bookworm-backports name package
  vm_lists $suite
  name=$(vm_apt $suite apt-cache depends linux-image-amd64 2> /dev/null | grep -o 'linux-image-[0-9][^ ]*' | head -1)
  [ -n "$name" ] || return 1
  package=$(vm_download $suite "$name") || return 1
  vm_unpack debian "$package"
}

# Ubuntu's kernel, which has idle page tracking.
vm_idle_kernel() {
  [ -f "$cache/idle/vmlinux" ] && return
  vm_packages xz-utils zstd kmod
  local image modules
  image=$(vm_download noble linux-image-6.8.0-31-generic) || return 1
  modules=$(vm_download noble linux-modules-6.8.0-31-generic) || return 1
  sha256sum --check --quiet - << SUMS || { rm -f "$image" "$modules"; return 1; }
fd2ed023c84163e62c73d3b7b613a9b004bd31e335641c23d42bd249e489fbe6  $image
3f17f2c279257eb50e40da44390bdf8272c440ca078831c348773d1314b5c2fe  $modules
SUMS
  vm_unpack idle "$image" "$modules"
}
