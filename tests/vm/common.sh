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
    timeout 60 apt-get "${vm_patience[@]}" update >> "$cache/apt.log" 2>&1
    vm_fetch "${missing[@]}" >> "$cache/apt.log" 2>&1
  } || vm_skip "cannot fetch ${missing[*]} (see $cache/apt.log)"
  apt-get "${vm_patience[@]}" install -y --no-install-recommends "${missing[@]}" >> "$cache/apt.log" 2>&1 ||
    vm_skip "cannot install ${missing[*]} (see $cache/apt.log)"
}

vm_patience=(-o Acquire::Retries=1 -o Acquire::http::Timeout=15 -o DPkg::Lock::Timeout=30)

vm_fetch() {
  timeout 120 apt-get "${vm_patience[@]}" install -y --no-install-recommends --download-only "$@"
}

# apt with lists of our own, so that backports can be read without changing the system's sources.
vm_apt() {
  local tool=$1
  shift
  mkdir -p "$cache/apt/lists/partial" "$cache/apt/archives/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm-backports main" \
    > "$cache/apt/sources.list"
  "$tool" -o Dir::Etc::sourcelist="$cache/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State::lists="$cache/apt/lists" -o Dir::Cache="$cache/apt" -o APT::Sandbox::User=root \
    -o Acquire::Retries=1 -o Acquire::http::Timeout=15 -t bookworm-backports "$@"
}

# Downloads a package of Debian's backports into the cache, once; prints the file.
vm_download() {
  local file
  file=$(ls "$cache/$1"_*.deb 2> /dev/null | head -1)
  if [ -z "$file" ]; then
    [ -n "$(ls "$cache/apt/lists" 2> /dev/null | grep -v -e partial -e lock)" ] || vm_apt apt-get update > "$cache/apt.log" 2>&1 || return 1
    (cd "$cache" && vm_apt apt-get download "$1" >> "$cache/apt.log" 2>&1) || return 1
    file=$(ls "$cache/$1"_*.deb | head -1)
    # Half a download must not be taken for a package next time.
    dpkg-deb --info "$file" > /dev/null 2>&1 || { rm -f "$file"; return 1; }
  fi
  echo "$file"
}

# Debian's kernel out of its package: $cache/debian/{vmlinux,release,modules}.
vm_debian_kernel() {
  [ -f "$cache/debian/vmlinux" ] && return
  command -v apt-get > /dev/null || return 1
  local name package image offset
  [ -n "$(ls "$cache/apt/lists" 2> /dev/null | grep -v -e partial -e lock)" ] || vm_apt apt-get update > "$cache/apt.log" 2>&1
  name=$(vm_apt apt-cache depends linux-image-amd64 2> /dev/null | grep -o 'linux-image-[0-9][^ ]*' | head -1)
  [ -n "$name" ] || return 1
  package=$(vm_download "$name") || return 1
  rm -rf "$cache/unpack"
  mkdir -p "$cache/unpack" "$cache/debian"
  dpkg-deb -x "$package" "$cache/unpack" || return 1
  image=$(ls "$cache"/unpack/boot/vmlinuz-* | head -1)
  # The compressed kernel starts at its magic number inside of the boot image; booting it whole (PVH) is faster.
  offset=$(LC_ALL=C grep -aobP '\xfd7zXZ\x00' "$image" | head -1 | cut -d: -f1)
  if [ -n "$offset" ]; then
    tail -c +$((offset + 1)) "$image" | xz -dc --single-stream > "$cache/debian/vmlinux.new" 2> /dev/null || true
  fi
  # Whatever cannot be unpacked is booted as it is.
  head -c 4 "$cache/debian/vmlinux.new" 2> /dev/null | grep -q ELF || cp "$image" "$cache/debian/vmlinux.new"
  basename "$image" | sed 's/^vmlinuz-//' > "$cache/debian/release"
  rm -rf "$cache/debian/lib"
  mkdir -p "$cache/debian/lib"
  mv "$(ls -d "$cache"/unpack/lib/modules "$cache"/unpack/usr/lib/modules 2> /dev/null | head -1)" "$cache/debian/lib/modules"
  depmod -b "$cache/debian" "$(cat "$cache/debian/release")" || return 1
  mv "$cache/debian/vmlinux.new" "$cache/debian/vmlinux"
  rm -rf "$cache/unpack"
}
