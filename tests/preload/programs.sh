#!/bin/bash
# Programs as people run them, under `varve run` and on the plain mount of the same pool: what they print must agree, their own checkers must
# be content, and calls must have been served in-process. Prints a table in Markdown. Ends with 1 if a program does worse.
#
#   VARVE=path/to/varve OUT=directory tests/preload/programs.sh [NAME...]
#
# Counted are calls of the C library on paths and descriptors of the mount: served in the process, or left to the kernel, those on
# descriptors that were given to it before included.
#
# As root on Debian: what is missing is installed by apt-get; a program that cannot be had is named and left out.
. "$(dirname "$0")/../conformance/common.sh"

find_varve
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  for package in redis-server redis-tools sqlite3 fio rocksdb-tools postgresql postgresql-contrib nginx-light vim-tiny rsync git gcc make \
    curl apache2-utils inotify-tools fuse3 g++ libleveldb-dev strace "libpython3.$(/usr/bin/python3 -c 'import sys; print(sys.version_info[1])' 2>/dev/null)-testsuite"; do
    dpkg -s "$package" >/dev/null 2>&1 \
      || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 || true
  done
fi
out=${OUT:-$work}
mkdir -p "$out"
failed=0
wanted=("$@")

# What the pool of PostgreSQL's user has in memory.
clean_up_more() {
  local uuid
  uuid=$(sed -n 's/^uuid *= *"\(.*\)"/\1/p' "$work/postgres/pool/varve.toml" 2>/dev/null)
  if [ -n "$uuid" ]; then rm -rf "/dev/shm/varve-$uuid-"*; fi
}

# number KEY FILE: a number of the counters at the end of a run's standard error.
number() { tail -n 1 "$2" | sed 's/.*\({"fell_back"\)/\1/' | tr ',{}' '\n\n\n' | sed -n "s/^\"$1\":\([0-9.]*\)$/\1/p"; }

# try NAME NEEDS LIMIT SCRIPT: both ways, in a fresh directory each.
try() {
  local name=$1 needs=$2 limit=$3 script=$4 program
  if [ "${#wanted[@]}" -gt 0 ] && ! printf '%s\n' "${wanted[@]}" | grep -qx "$name"; then return; fi
  for program in $needs; do
    if ! command -v "$program" >/dev/null 2>&1; then
      say "| $name | – | – | – | SKIPPED: $program is not installed |"
      return
    fi
  done
  local file=$out/$name plain=0 ours=0 verdict
  rm -rf "$mnt/plain" "$mnt/served"
  mkdir "$mnt/plain" "$mnt/served"
  (cd "$mnt/plain" && timeout "$limit" bash -euo pipefail -c "$script") >"$file.plain.out" 2>"$file.plain.err" || plain=$?
  (cd "$mnt/served" && timeout "$limit" "$varve" run --stats --mount "$mnt" -- bash -euo pipefail -c "$script") \
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
  case $verdict in FAILED*) failed=1 ;; esac
  say "| $name | ${calls:-?} | ${fell:-?} | $(awk -v share="${share:-0}" 'BEGIN { printf "%.1f %%", share * 100 }') | $verdict |"
}

make_pool --nvm shm:512M --ssd 2G --hdd 0
start_daemon
start_mount
python=$(ls /usr/bin/python3 2>/dev/null || command -v python3 || true)
say "| program | served | fell back | share | result |"
say "| --- | ---: | ---: | ---: | --- |"
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
try "redis, AOF always" "redis-server redis-cli redis-benchmark" 120 'redis-server --port 0 --unixsocket $PWD/s --appendonly yes --appendfsync always --save "" --dir $PWD --daemonize no >log & p=$!; for i in $(seq 100); do redis-cli -s $PWD/s ping >/dev/null 2>&1 && break; sleep 0.1; done; redis-benchmark -s $PWD/s -q -n 3000 -c 8 -t set,lpush -d 100 -r 1000 >/dev/null; redis-cli -s $PWD/s bgrewriteaof >/dev/null; redis-benchmark -s $PWD/s -q -n 1000 -c 8 -t sadd >/dev/null; redis-cli -s $PWD/s bgsave >/dev/null; sleep 1; redis-cli -s $PWD/s set last 1; redis-cli -s $PWD/s shutdown nosave || true; wait $p || true; redis-check-aof appendonlydir/*.manifest | tail -n 1'
for suite in test_os test_shutil test_subprocess test_posix test_tarfile test_mailbox test_tempfile test_mmap test_fcntl test_fileio test_io test_glob test_pathlib test_largefile test_fork1 test_wait4; do
  if [ -n "$python" ] && "$python" -c "import test.$suite" >/dev/null 2>&1; then
    try "python $suite" "python3" 400 "export TMPDIR=\$PWD; $python -m test -q $suite 2>/dev/null | grep -o 'Tests result: [A-Z]*' | tail -n 1"
  else
    say "| python $suite | – | – | – | SKIPPED: python3 or its test suite is not installed |"
  fi
done
try "fio, psync and mmap" "fio" 120 'for e in psync mmap; do fio --name=j --ioengine=$e --rw=randwrite --bs=4k --size=8M --verify=crc32c --do_verify=1 --directory=$PWD --output=/dev/null && echo good; done'
try "fio, libaio and io_uring" "fio" 120 'for e in libaio io_uring; do fio --name=j --ioengine=$e --rw=randwrite --bs=4k --size=8M --verify=crc32c --do_verify=1 --directory=$PWD --output=/dev/null && echo good; done'
if g++ -O1 -o "$work/leveldb" "$root/tests/preload/leveldb.cc" -lleveldb 2>/dev/null; then
  try "leveldb" "$work/leveldb" 300 "$work/leveldb 20000"
else
  say "| leveldb | – | – | – | SKIPPED: g++ or libleveldb-dev is not installed |"
fi
try "rocksdb db_bench" "db_bench" 120 'db_bench --db=$PWD/db --num=20000 --sync=1 --compression_type=none --benchmarks=fillseq,overwrite,deleterandom,compact >/dev/null 2>&1; ldb --db=$PWD/db checkconsistency'
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

# PostgreSQL refuses root, and only the pool's own user and root may open sessions: a pool of the user postgres.
bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | tail -n 1)
if { [ "${#wanted[@]}" -gt 0 ] && ! printf '%s\n' "${wanted[@]}" | grep -qx PostgreSQL; }; then
  :
elif [ -z "$bin" ] || ! id postgres >/dev/null 2>&1 || ! su postgres -s /bin/sh -c 'test -w /dev/fuse'; then
  say "| PostgreSQL | – | – | – | SKIPPED: PostgreSQL is not installed, or /dev/fuse is for root only |"
else
  home=$work/postgres
  mkdir "$home"
  chown postgres "$home"
  chmod 755 "$work"
  cp "$varve" "$home/varve"
  cat >"$home/run.sh" <<'PG'
cd "$1"; bin=$2; v=$1/varve; m=$1/pool/mnt; export PGHOST=$1 PGPORT=5999
"$v" up pool --nvm shm:1G --ssd 4G --hdd 0 --detach >/dev/null || exit 1
trap '"$v" down pool >/dev/null; "$v" fsck pool >/dev/null || echo "fsck found damage"' EXIT
# Served, or on the plain mount.
run=()
if [ "$3" = served ]; then run=("$v" run --stats --mount "$m" --); fi
rm -rf "$m/db"
"${run[@]}" "$bin/initdb" -D "$m/db" -A trust -k >initdb.out 2>initdb.err || exit 1
start() {
  "${run[@]}" "$bin/postgres" -D "$m/db" -k "$PGHOST" -h '' >log 2>&1 & pid=$!
  for i in $(seq 200); do "$bin/pg_isready" >/dev/null && break; sleep 0.1; done
}
start
"$bin/createdb" b && "$bin/pgbench" -i -q -s 2 b 2>/dev/null || exit 1
"$bin/pgbench" -c 4 -T 8 b 2>/dev/null | grep -E 'tps|failed' >bench
# Its process dies in the middle of a load, and recovers from its write-ahead log.
"$bin/pgbench" -c 4 -T 30 b >/dev/null 2>&1 & load=$!
sleep 2; for p in $(head -n 1 "$m/db/postmaster.pid"); do kill -KILL "$p"; done
wait $load; wait $pid; sleep 1
start
"$bin/psql" -qAt b -c 'select sum(abalance) = (select sum(bbalance) from pgbench_branches) from pgbench_accounts' >sums
"$bin/pg_amcheck" --install-missing -d b >/dev/null 2>&1 && echo "amcheck clean"
"$bin/pg_ctl" -D "$m/db" stop -m fast -w >/dev/null; wait $pid
tail -n 1 log >&2
"$bin/pg_checksums" --check -D "$m/db" | grep 'Bad checksums'
echo "sums agree: $(cat sums)"; cat bench
PG
  verdict=
  for way in plain served; do
    pg=0
    file=$out/PostgreSQL.$way
    su postgres -s /bin/bash -c "bash $home/run.sh $home $bin $way" >"$file.out" 2>"$file.err" || pg=$?
    said=$(tr '\n' ';' <"$file.out")
    if [ "$pg" != 0 ] || ! grep -q 'sums agree: t' "$file.out" || ! grep -q 'amcheck clean' "$file.out" \
      || ! grep -q 'Bad checksums: *0' "$file.out" || grep -q damage "$file.out"; then
      said="FAILED ($pg): $said $(tail -n 2 "$file.err" | tr '|\n' '  ' | cut -c 1-200)"
      failed=1
    fi
    verdict="$verdict$way: $said "
  done
  share=$(number share "$out/PostgreSQL.served.err")
  if ! [ "$(number served_total "$out/PostgreSQL.served.err")" -gt 0 ]; then
    verdict="FAILED: nothing was served; $verdict"
    failed=1
  fi
  say "| PostgreSQL | $(number served_total "$out/PostgreSQL.served.err") | $(number fell_back_total "$out/PostgreSQL.served.err") | $(awk -v share="${share:-0}" 'BEGIN { printf "%.1f %%", share * 100 }') | $verdict |"
fi
exit "$failed"
