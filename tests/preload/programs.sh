#!/bin/bash
# Programs as people run them, under `varve run` and on the plain mount of the same pool: what they print must agree, their own checkers must
# be content, and calls must have been served in-process. Prints a table in Markdown. Ends with 1 if a program does worse.
#
#   VARVE=path/to/varve OUT=directory tests/preload/programs.sh [NAME...]
#
# Counted are calls of the C library on paths and descriptors of the mount: served in the process, or left to the kernel, those on
# descriptors that were given to it before included.
#
# As root on Debian: what is missing is installed by apt-get. A program that cannot be had is a failure, as one that does worse is; nothing is left
# out. The lines before the table say what was run, where, and at which version each program is.
. "$(dirname "$0")/../conformance/common.sh"

find_varve
out=${OUT:-$work}
mkdir -p "$out"
failed=0
wanted=("$@")
used=

# The packages of Debian in which programs are, where they are called otherwise.
declare -A package=([redis-server]=redis-server [redis-cli]=redis-tools [redis-benchmark]=redis-tools [redis-check-aof]=redis-tools [db_bench]=rocksdb-tools
  [ldb]=rocksdb-tools [ab]=apache2-utils [nginx]=nginx-light [vim.tiny]=vim-tiny [initdb]=postgresql [pgbench]=postgresql [g++]=g++ [python3]=python3
  [leveldb]=libleveldb-dev [suite]=)
python=$(ls /usr/bin/python3 2>/dev/null || command -v python3 || true)
minor=$("$python" -c 'import sys; print(sys.version_info[1])' 2>/dev/null || true)
package[suite]=libpython3.$minor-testsuite

# is_there PROGRAM: not all of them are in the path, and some are no programs.
is_there() {
  case $1 in
    initdb | pgbench) ls /usr/lib/postgresql/*/bin/"$1" >/dev/null 2>&1 ;;
    leveldb) [ -e /usr/include/leveldb/db.h ] ;;
    suite) "$python" -c 'import test.test_os' >/dev/null 2>&1 ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
  esac
}

# have PROGRAM: installs it if it is missing. False, and what apt-get said on standard error, if that fails.
have() {
  local name=${package[$1]:-$1}
  if is_there "$1"; then return; fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then return 1; fi
  if [ ! -e "$work/apt.log" ] && ! apt-get update -qq >"$work/apt.log" 2>&1; then
    tail -n 5 "$work/apt.log" >&2
    say "apt-get update failed; what follows may be missing for that" >&2
  fi
  if ! DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$name" >>"$work/apt.log" 2>&1; then
    tail -n 5 "$work/apt.log" >&2
    return 1
  fi
  is_there "$1"
}

# is_wanted NAME: a row of the table.
is_wanted() { [ "${#wanted[@]}" = 0 ] || printf '%s\n' "${wanted[@]}" | grep -qx "$1"; }

# row NAME SERVED FELL SHARE VERDICT: a line of the table, which is printed at the end.
row() {
  case $5 in FAILED*) failed=1 ;; esac
  say "| $1 | $2 | $3 | $4 | $5 |" | tee -a "$work/table" >&2
}

# version PROGRAM: its own first words about it; nothing of what comes with another one.
version() {
  case $1 in
    cp | mv | rm | dd | sort | tail | uniq | wc | diff | redis-cli | redis-check-aof | ldb | rustc | pgbench | setpriv | suite | "$work"/*) ;;
    nginx) nginx -v 2>&1 ;;
    initdb) /usr/lib/postgresql/*/bin/postgres --version ;;
    db_bench) dpkg-query -W -f 'RocksDB ${Version}\n' rocksdb-tools ;;
    leveldb) dpkg-query -W -f 'LevelDB ${Version}\n' libleveldb-dev ;;
    python3) "$python" --version ;;
    sqlite3) printf 'SQLite %s\n' "$(sqlite3 --version)" ;;
    ab) ab -V ;;
    *) "$1" --version ;;
  esac 2>&1 </dev/null | sed -n '/[0-9]/{p;q}' | cut -c 1-60 || true
}

# number KEY FILE: a number of the counters at the end of a run's standard error.
number() { tail -n 1 "$2" | sed 's/.*\({"fell_back"\)/\1/' | tr ',{}' '\n\n\n' | sed -n "s/^\"$1\":\([0-9.]*\)$/\1/p"; }

# try NAME NEEDS LIMIT SCRIPT: both ways, in a fresh directory each. As the user of `as`.
as=()
try() {
  local name=$1 needs=$2 limit=$3 script=$4 program way
  is_wanted "$name" || return 0
  for program in $needs; do
    if ! have "$program"; then
      row "$name" – – – "FAILED: $program is not there, and cannot be installed"
      return
    fi
    used="$used $program"
  done
  local file=$out/$name plain=0 ours=0 verdict
  rm -rf "$mnt/plain" "$mnt/served"
  for way in plain served; do
    mkdir "$mnt/$way"
    if [ -n "${client:-}" ]; then chown "$client" "$mnt/$way"; fi
  done
  (cd "$mnt/plain" && timeout "$limit" "${as[@]}" bash -euo pipefail -c "$script") >"$file.plain.out" 2>"$file.plain.err" || plain=$?
  (cd "$mnt/served" && timeout "$limit" "${as[@]}" "$varve" run --stats --mount "$mnt" -- bash -euo pipefail -c "$script") \
    >"$file.served.out" 2>"$file.served.err" || ours=$?
  local calls share fell
  calls=$(number served_total "$file.served.err")
  fell=$(number fell_back_total "$file.served.err")
  share=$(number share "$file.served.err")
  if [ "$ours" != "$plain" ]; then
    verdict="FAILED: exit $ours, on the plain mount $plain: $(tail -n 2 "$file.served.err" | head -n 1 | tr '|\n' '  ' | cut -c 1-100 || true)"
  elif ! cmp -s "$file.plain.out" "$file.served.out"; then
    verdict="FAILED: prints something else: $(diff "$file.plain.out" "$file.served.out" | sed -n 2p | tr '|' ' ' | cut -c 1-100 || true)"
  elif [ "${calls:-0}" = 0 ]; then
    verdict="FAILED: nothing was served"
  elif [ "$ours" = 124 ]; then
    verdict="FAILED: neither ended within $limit s"
  elif [ "$ours" != 0 ]; then
    verdict="FAILED: exit $ours both ways: $(tail -n 1 "$file.plain.err" | tr '|' ' ' | cut -c 1-100 || true)"
  else
    verdict="same (exit $ours)"
  fi
  row "$name" "${calls:-?}" "${fell:-?}" "$(awk -v share="${share:-0}" 'BEGIN { printf "%.1f %%", share * 100 }')" "$verdict"
}

make_pool --nvm shm:512M --ssd 2G --hdd 0
start_daemon
start_mount
tree=$(ls -d /usr/share/doc/git /usr/share/doc/coreutils /usr/share/perl 2>/dev/null | head -n 1)
try "ls -lR" "ls" 60 "cp -r $tree t; ls -lR t | sed 's/  *[A-Z][a-z][a-z] .*:[0-9][0-9]//' | grep -v ^total"
try "cp -a" "cp diff" 60 "cp -a $tree a; cp -a a b; diff -r a b && echo equal"
try "mv, rm -r" "mv rm" 60 "cp -r $tree a; mv a b; find b | wc -l; rm -r b; ls"
try "dd" "dd" 60 "dd if=/dev/zero of=f bs=64k count=500 conv=fsync 2>/dev/null; dd if=f of=g bs=1M 2>/dev/null; cksum f g"
try "sort with temporary files" "sort" 60 "seq 1 100000 | shuf --random-source=/bin/bash > n; sort -n -S 1M -T . n -o o; cksum o; ls"
try "tail -f" "tail" 60 "touch f; timeout 3 tail -f -s 0.1 f > o & sleep 1; for i in 1 2 3; do echo \$i >> f; sleep 0.2; done; wait || true; cat o"
try "tar" "tar" 60 "tar cf a.tar -C / ${tree#/}; mkdir x; tar xf a.tar -C x; diff -r $tree x$tree && echo equal"
try "rsync" "rsync" 60 "rsync -a $tree/ a/; rsync -a --delete a/ b/; diff -r a b && echo equal"
try "find" "find" 60 "cp -r $tree t; find t -type f -size +1k | sort | cksum"
try "grep -r" "grep" 60 "cp -r $tree t; grep -rc e t | sort | cksum"
try "sed -i" "sed" 60 "seq 1000 > f; sed -i s/1/x/ f; cksum f"
try "vim" "vim.tiny" 60 "seq 100 > f; vim.tiny -n -es -u NONE -c '%s/1/x/' -c wq f </dev/null; cksum f"
try "shell pipelines" "bash sort uniq wc" 60 'for i in $(seq 300); do echo "line $((i % 7)) $i"; done > in; while read -r a b c; do echo "$c $b"; done < in | sort -n | tee mid | cut -d" " -f2 | uniq -c | wc -l > out; { echo head; cat mid | head -n 3; (echo sub; echo shell) ; } >> out; exec 3>> out; for i in 1 2 3; do echo "$i" >&3; (echo "sub $i" >&3); done; exec 3>&-; cat out; cksum mid'
try "make, gcc" "make gcc" 120 'for i in 1 2 3 4 5 6; do echo "int f$i(void){return $i;}" > f$i.c; done; echo "int f1(void);int main(void){return f1()-1;}" > main.c; printf "%s\n" "p: main.o f1.o f2.o f3.o f4.o f5.o f6.o" "	gcc -o p \$^" > Makefile; make -j2 >/dev/null; ./p; echo built'
try "cargo build" "cargo rustc" 300 'unset CARGO_TARGET_DIR; cargo new -q --vcs none p; cd p; mkdir src/bin; for i in 1 2 3; do echo "pub fn f() -> u32 { $i }" > src/m$i.rs; done; printf "mod m1;\nmod m2;\nmod m3;\nfn main() { println!(\"{}\", m1::f() + m2::f() + m3::f()); }\n" > src/main.rs; rmdir src/bin; cargo build -q --offline; ./target/debug/p; touch src/m2.rs; cargo build -q --offline --release; ./target/release/p'
try "git" "git" 120 "export HOME=\$PWD GIT_CONFIG_NOSYSTEM=1; git init -q r; cp -r $tree r/a; cd r; git add .; git -c user.name=n -c user.email=e commit -qm one; git gc -q; git fsck --strict; cd ..; git clone -q r s; diff -r r/a s/a; git -C s log --format=%s"
for mode in delete wal; do
  try "sqlite3, $mode" "sqlite3" 120 "sqlite3 d 'pragma journal_mode=$mode; create table t(a integer primary key, b)' ; for p in 1 2 3; do (for i in \$(seq 40); do sqlite3 -cmd '.timeout 60000' d \"insert into t(b) values(\$p)\"; done) & done; wait; sqlite3 d 'select count(*), sum(b) from t; pragma integrity_check'"
done
cat >"$work/redis.py" <<'PY'
import os, random, socket, subprocess, sys, time
rounds, random_ = 3, random.Random(7)
def start():
    server = subprocess.Popen(["redis-server", "--port", "0", "--unixsocket", "s", "--appendonly", "yes", "--appendfsync", "always", "--save", "",
        "--auto-aof-rewrite-percentage", "0"], stdout=open("log", "a"))
    for _ in range(600):
        try:
            to = socket.socket(socket.AF_UNIX); to.connect("s")
            redis = to, to.makefile("rb")
            while ask(redis, [["PING"]]) != [b"PONG"]: time.sleep(0.05)
            return server, redis
        except OSError: time.sleep(0.05)
    sys.exit("redis did not come up")
def answer(f):
    line = f.readline()
    kind, text = line[:1], line[1:-2]
    if kind == b"$": return None if text == b"-1" else f.read(int(text) + 2)[:-2]
    if kind == b"*": return [answer(f) for _ in range(int(text))]
    return text
def ask(redis, calls):
    """The answers of calls that are sent together."""
    to, f = redis
    words = lambda call: [w if isinstance(w, bytes) else str(w).encode() for w in call]
    to.sendall(b"".join(b"*%d\r\n" % len(call) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words(call)) for call in calls))
    return [answer(f) for _ in calls]
keys, entries, hits, during = {}, [], 0, 0
def change():
    """One change of each kind, in the model too; as calls."""
    global hits
    key, value = "k%d" % random_.randrange(60000), b"%d-" % random_.randrange(1 << 30) * random_.randrange(1, 30)
    gone, entry = "k%d" % random_.randrange(60000), b"e%d" % len(entries)
    keys[key] = value
    keys.pop(gone, None)
    entries.append(entry)
    hits += 1
    return [["SET", key, value], ["DEL", gone], ["RPUSH", "list", entry], ["INCR", "hits"]]
server, redis = start()
for first in range(0, 50000, 1000):
    some = {"k%d" % n: b"%d-" % n * 40 for n in range(first, first + 1000)}
    keys.update(some)
    ask(redis, [["SET", *pair] for pair in some.items()])
for _ in range(rounds):
    ask(redis, [["BGREWRITEAOF"]])
    writes = 0
    while True:
        ask(redis, change())
        if b"aof_rewrite_in_progress:1" not in ask(redis, [["INFO", "persistence"]])[0]: break
        writes += 1
    during += writes > 0
    for _ in range(200): ask(redis, change())
assert b"aof_last_bgrewrite_status:ok" in ask(redis, [["INFO", "persistence"]])[0]
print("written during", during, "of", rounds, "rewrites")
ask(redis, [["BGSAVE"]])
while b"rdb_bgsave_in_progress:1" in ask(redis, [["INFO", "persistence"]])[0]: time.sleep(0.05)
assert b"rdb_last_bgsave_status:ok" in ask(redis, [["INFO", "persistence"]])[0]
os.kill(server.pid, 9)
server.wait()
subprocess.run("redis-check-aof appendonlydir/*.manifest | tail -n 1", shell=True, check=True)
subprocess.run("redis-check-rdb dump.rdb | tail -n 1 | cut -d' ' -f 2-", shell=True, check=True)
server, redis = start()
names = list(keys)
for first in range(0, len(names), 1000):
    some = names[first:first + 1000]
    assert ask(redis, [["GET", key] for key in some]) == [keys[key] for key in some], "a key is not what was written"
assert ask(redis, [["LRANGE", "list", 0, -1], ["GET", "hits"], ["DBSIZE"]]) == [entries, b"%d" % hits, b"%d" % (len(keys) + 2)]
print("every key is what was written last")
redis[0].sendall(b"*2\r\n$8\r\nSHUTDOWN\r\n$6\r\nNOSAVE\r\n")
server.wait()
PY
try "redis, AOF always" "redis-server redis-check-aof python3" 180 "$python $work/redis.py"
for suite in test_os test_shutil test_subprocess test_posix test_tarfile test_mailbox test_tempfile test_mmap test_fcntl test_fileio test_io test_glob test_pathlib test_largefile test_fork1 test_wait4; do
  try "python $suite" "python3 suite" 400 "export TMPDIR=\$PWD; $python -m test -q $suite 2>/dev/null | grep -o 'Tests result: [A-Z]*' | tail -n 1"
done
try "fio, psync and mmap" "fio" 120 'for e in psync mmap; do fio --name=j --ioengine=$e --rw=randwrite --bs=4k --size=8M --verify=crc32c --do_verify=1 --directory=$PWD --output=/dev/null && echo good; done'
try "fio, libaio and io_uring" "fio" 120 'for e in libaio io_uring; do fio --name=j --ioengine=$e --rw=randwrite --bs=4k --size=8M --verify=crc32c --do_verify=1 --directory=$PWD --output=/dev/null && echo good; done'
if is_wanted leveldb && have g++ && have leveldb; then
  g++ -O1 -o "$work/leveldb" "$root/tests/preload/leveldb.cc" -lleveldb 2>"$work/leveldb.err" || cat "$work/leveldb.err" >&2
fi
try "leveldb" "g++ leveldb $work/leveldb" 300 "$work/leveldb 20000"
try "rocksdb db_bench" "db_bench ldb" 120 'db_bench --db=$PWD/db --num=20000 --sync=1 --compression_type=none --benchmarks=fillseq,overwrite,deleterandom,compact >/dev/null 2>&1; ldb --db=$PWD/db checkconsistency'
cat >"$work/nginx.sh" <<'NGINX'
mkdir www logs tmp; cp -r /usr/share/doc/bash www/d; head -c 3000000 /bin/bash > www/big; echo hi > www/index.html
cat >nginx.conf <<CONF
user root; daemon off; worker_processes 2; pid $PWD/logs/pid; error_log $PWD/logs/err;
events { worker_connections 100; }
http { access_log $PWD/logs/access; client_body_temp_path $PWD/tmp/a; proxy_temp_path $PWD/tmp/b; fastcgi_temp_path $PWD/tmp/c;
uwsgi_temp_path $PWD/tmp/d; scgi_temp_path $PWD/tmp/e; sendfile on; server { listen 127.0.0.1:8199; root $PWD/www; } }
CONF
nginx -c "$PWD/nginx.conf" 2>/dev/null & p=$!
for i in $(seq 100); do curl -s http://127.0.0.1:8199/ >/dev/null && break; sleep 0.1; done
for i in 1 2 3 4 5 6; do curl -s http://127.0.0.1:8199/big | cmp - www/big & q="${q:-} $!"; done
wait $q
ab -q -n 500 -c 8 http://127.0.0.1:8199/big | grep -E 'Failed|Complete'
kill -QUIT $p; wait $p; [ "$(wc -l <logs/access)" -ge 506 ] && echo logged
NGINX
try "nginx" "nginx curl ab" 120 "bash $work/nginx.sh"
rm -rf "$mnt/plain" "$mnt/served"
stop_mount
fsck_clean >/dev/null
stop_daemon

# PostgreSQL refuses root. Its user is an ordinary one whom root's pool admits: sessions with segments of their own (docs/adr/0009-*). All of the run is
# counted together: initdb, both starts, the clients, the checks.
cat >"$work/postgres.sh" <<'PG'
bin=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1); db=$PWD/db; export PGHOST=$PWD PGPORT=5999 LC_ALL=C
pid=
# Nothing of it stays behind, whatever fails.
trap 'if [ -n "$pid" ]; then kill -QUIT $pid 2>/dev/null; wait $pid || true; fi' EXIT
"$bin/initdb" -D "$db" -A trust -k >&2
start() {
  "$bin/postgres" -D "$db" -k "$PGHOST" -h '' >&2 & pid=$!
  for i in $(seq 300); do if "$bin/pg_isready" >/dev/null; then return; fi; sleep 0.1; done
  echo "PostgreSQL did not come up"; exit 1
}
start
"$bin/createdb" b; "$bin/pgbench" -i -q -s 2 b >&2
said=$("$bin/pgbench" -c 4 -T 8 b)
echo "$said" >&2
grep 'failed transactions: 0 ' <<<"$said"
# Its process dies in the middle of a load, and recovers from its write-ahead log.
"$bin/pgbench" -n -c 4 -T 30 b >&2 & load=$!
sleep 2; kill -KILL "$(head -n 1 "$db/postmaster.pid")"
wait $load || true; wait $pid || true; sleep 1
start
"$bin/psql" -qAt b -c 'select sum(abalance) = (select sum(bbalance) from pgbench_branches) and sum(abalance) = (select sum(delta) from pgbench_history),
  (select count(*) > 0 from pgbench_history) from pgbench_accounts' | grep -x 't|t'
"$bin/pg_amcheck" --install-missing -d b >&2
echo "amcheck clean"
"$bin/pg_ctl" -D "$db" stop -m fast -w >&2
wait $pid
pid=
"$bin/pg_checksums" --check -D "$db" | grep 'Bad checksums: *0$'
whoami
PG
if is_wanted PostgreSQL && have initdb; then
  client=$(id -u postgres)
  as=(setpriv --reuid postgres --regid postgres --init-groups env HOME=/tmp)
  printf 'users = [%s]\n' "$client" >>"$pool/varve.toml"
  chmod 755 "$work"
  cp "$varve" "$work/varve"
  varve=$work/varve
  start_daemon
  start_mount --allow-other
  # The library is in the pool's directory when root has run something.
  "$varve" run --mount "$mnt" -- true
fi
try "PostgreSQL" "initdb pgbench setpriv" 180 "bash -euo pipefail $work/postgres.sh"
if [ -n "$mount_pid" ]; then
  stop_mount
  fsck_clean >/dev/null
  stop_daemon
fi

say "commit $(git -C "$root" describe --always --dirty --abbrev=7), $(uname -sr), $(nproc) processors ($(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)), $(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release), $(ldd --version | sed -n '1s/.* /glibc /p'), $(date +%F)"
say
for program in $(printf '%s\n' $used | sort -u); do version "$program"; done | sort -u | sed 's/^/- /'
say
say "| program | served | fell back | share | result |"
say "| --- | ---: | ---: | ---: | --- |"
cat "$work/table" || die "no program is called ${wanted[*]}"
exit "$failed"
