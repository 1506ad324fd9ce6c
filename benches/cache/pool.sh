#!/bin/bash
# The cache store on a file of a pool: by the mount, in the process through LibFS (`varve run`), and on a plain file
# beside it. `pool.sh [OBJECTS]`, as root or a user who may mount. Needs `cargo build` (varve) and
# `cargo build --release -p varve-cache --examples`. Ends its pool.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
varve=${VARVE:-$here/target/debug/varve}
restart=$here/target/release/examples/restart
objects=${1:-200000}
work=$(mktemp -d)
trap '"$varve" down "$work/pool" >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
"$varve" up "$work/pool" --nvm 256M --ssd 1G --hdd 2G --detach >/dev/null
mount=$work/pool/mnt
echo "== varve cache, store on the mount, then through varve run"
"$varve" cache mkstore "$mount/store" --disk 256M --policy log-lru --no-measure | head -1
head -c 5000000 /dev/urandom > "$work/object"
"$varve" cache put "$mount/store" --key a --file "$work/object"
"$varve" run --mount "$mount" --stats -- "$varve" cache put "$mount/store" --key b --file "$work/object"
for key in a b; do
    "$varve" cache get "$mount/store" --key $key | cmp - "$work/object" && echo "$key by the mount: the same bytes"
    "$varve" run --mount "$mount" -- "$varve" cache get "$mount/store" --key $key | cmp - "$work/object" &&
        echo "$key through varve run: the same bytes"
done
"$varve" cache check "$mount/store"
"$varve" down "$work/pool" >/dev/null
"$varve" up "$work/pool" --detach >/dev/null
"$varve" cache get "$mount/store" --key b | cmp - "$work/object" && echo "b after a stop of the pool: the same bytes"
echo "== puts, stop, kill -9, start: by the mount; through varve run; a plain file"
"$restart" "$mount/many" "$objects"
"$varve" run --mount "$mount" -- "$restart" "$mount/many2" "$objects"
"$restart" "$work/many" "$objects"
