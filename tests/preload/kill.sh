#!/bin/bash
# Kill rounds with programs as the writers, under `varve run`: SQLite (both journal modes, by turns) and Redis (append-only file, fsync always).
# Each acknowledged record is noted in a ledger outside of the pool; then the program is killed with SIGKILL, in every second round the daemon
# before it, in every fourth the mount too. No noted record may be missing, nothing may be there that was not written, and the program's own
# checker must be content: SQLite's on the plain mount, `redis-check-aof` before Redis starts again.
#
# The newest 80,000 records are kept: of SQLite's some 60 MB, about what the NVM holds, so that some lie on the next tier and the pool is never
# full. A writer that ends by itself, and one that does not come up, are reported with all that is known then.
#
#   VARVE=path/to/varve ROUNDS=50 SEED=1 tests/preload/kill.sh [sqlite] [redis]
. "$(dirname "$0")/../conformance/common.sh"

rounds=${ROUNDS:-50}
kept=80000
RANDOM=${SEED:-1}
wanted=${*:-sqlite redis}
find_varve
writer=
clean_up_more() { if [ -n "$writer" ]; then kill -KILL "$writer" 2>/dev/null; wait "$writer" 2>/dev/null; fi; }

cat >"$work/sqlite.py" <<'PY'
import os, sqlite3, sys
what, mode, path, ledger, kept = sys.argv[1:]
kept = int(kept)
noted = [int(line) for line in open(ledger)] if os.path.exists(ledger) else []
body = lambda n: ("%d-" % n) * (1 + n % 200)
db = sqlite3.connect(path, timeout=60)
if what == "write":
    db.execute("pragma journal_mode=" + mode)
    db.execute("pragma synchronous=full")
    db.execute("create table if not exists t(n integer primary key, body text)")
    db.commit()
    out = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    n = db.execute("select coalesce(max(n), 0) from t").fetchone()[0]
    while True:
        n += 1
        db.execute("insert into t values(?, ?)", (n, body(n)))
        db.execute("delete from t where n <= ?", (n - kept,))
        db.commit()
        os.write(out, b"%d\n" % n)
else:
    assert db.execute("pragma integrity_check").fetchall() == [("ok",)], "integrity"
    rows = db.execute("select n, body from t order by n").fetchall()
    assert all(text == body(n) for n, text in rows), "a row is not what was written"
    there = rows[-1][0] if rows else 0
    assert [n for n, _ in rows] == list(range(max(there - kept, 0) + 1, there + 1)), "a row is missing"
    last = noted[-1] if noted else 0
    assert last <= there <= last + 1 or not noted, "noted %d, there %d" % (last, there)
    print(len(noted))
PY
cat >"$work/redis.py" <<'PY'
import os, socket, sys, time
what, path, ledger, kept = sys.argv[1:]
kept = int(kept)
def connect():
    for _ in range(600):
        try:
            s = socket.socket(socket.AF_UNIX); s.connect(path); return s, s.makefile("rb")
        except OSError:
            time.sleep(0.05)
    sys.exit("redis did not come up")
def ask(f, *words):
    s, f = f
    s.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
    line = f.readline()
    if line[:1] == b"*":
        return [f.read(int(f.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
    return line
def newest(entries):
    return int(entries[-1].rstrip(b"x")) if entries else 0
f = connect()
while ask(f, b"PING") != b"+PONG\r\n":
    time.sleep(0.05)
if what == "write":
    n = newest(ask(f, b"LRANGE", b"log", b"-1", b"-1"))
    out = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    print("ready", flush=True)
    while True:
        n += 1
        if not ask(f, b"RPUSH", b"log", b"%d" % n + b"x" * (n % 300)).startswith(b":"):
            sys.exit(0)
        os.write(out, b"%d\n" % n)
        if n % 500 == 0:
            ask(f, b"LTRIM", b"log", b"%d" % -kept, b"-1")
            ask(f, b"BGREWRITEAOF")
else:
    noted = [int(line) for line in open(ledger)] if os.path.exists(ledger) else []
    entries = ask(f, b"LRANGE", b"log", b"0", b"-1")
    there = newest(entries)
    first = there - len(entries) + 1
    assert entries == [b"%d" % n + b"x" * (n % 300) for n in range(first, there + 1)], "an entry is not what was written"
    assert first == 1 or len(entries) >= kept, "of %d only the newest %d" % (there, len(entries))
    last = noted[-1] if noted else 0
    assert last <= there <= last + 1 or not noted, "noted %d, there %d" % (last, there)
    ask(f, b"SHUTDOWN", b"NOSAVE")
    print(len(noted))
PY

# What every thread of a process is doing.
threads() {
  local task
  if [ -z "$2" ] || [ ! -e "/proc/$2" ]; then
    say "--- $1: ended"
    return
  fi
  say "--- $1: $(tr '\0' ' ' <"/proc/$2/cmdline")"
  for task in "/proc/$2/task"/[0-9]*; do
    say "$(cat "$task/comm") $(sed -n 's/^State:\t//p' "$task/status") in $(cat "$task/wchan"), call $(cat "$task/syscall")"
    sed 's/^/    /' "$task/stack"
  done
  if command -v gdb >/dev/null; then timeout 60 gdb -p "$2" -batch -ex 'thread apply all backtrace 30' </dev/null | grep -v '^\[New LWP'; fi
}

# What is known when something did not happen in time.
explain() {
  say "--- $(date +%T), load $(cat /proc/loadavg); what the writer said"
  cat "$work/writer.err" "$work/redis.log" "$work/ready" 2>/dev/null | tail -n 40
  say "--- the daemon's state"
  timeout 20 "$varve" status --json "$pool"
  say "--- files and locks"
  ls -li "$mnt" | head -n 30
  df "$mnt"
  lslocks --output-all --notruncate
  threads "the writer" "$writer"
  threads "the daemon" "$daemon_pid"
  threads "the mount" "$mount_pid"
  ps -eo pid,ppid,stat,ni,time,wchan:20,args --forest
} 2>&1

# Kills what this round kills.
strike() {
  local round=$1
  if [ $((round % 2)) = 1 ]; then kill -KILL "$daemon_pid"; wait "$daemon_pid" 2>/dev/null || true; fi
  if [ $((round % 4)) = 3 ]; then
    kill -KILL "$mount_pid"
    # It cannot end while the kernel waits for it to write a map back: the requests that nobody answers are given up first.
    umount -f "$mnt" 2>/dev/null || true
    wait "$mount_pid" 2>/dev/null || true
  fi
  kill -KILL "$writer" 2>/dev/null || true
  wait "$writer" 2>/dev/null || true
  writer=
  if [ $((round % 2)) = 1 ]; then start_daemon; fi
  if [ $((round % 4)) = 3 ]; then
    if is_mounted "$mnt"; then umount -l "$mnt"; fi
    start_mount
  fi
}

milliseconds() { say $((${EPOCHREALTIME/[.,]/} / 1000)); }
# started: the writer has, in this many milliseconds after `since`.
started() {
  local took=$(($(milliseconds) - since))
  if [ "$took" -gt "$slowest" ]; then slowest=$took slowest_round=$round; fi
}

# The program writes on, until it is struck.
must_run() {
  kill -0 "$writer" 2>/dev/null || { explain || true; die "the writer of round $round ended by itself"; }
}

# grown FILE LINES: whether it has more lines than that.
grown() {
  must_run
  [ "$(wc -l 2>/dev/null <"$1" || echo 0)" -gt "$2" ]
}

is_ready() {
  must_run
  grep -q ready "$work/ready"
}

make_pool --nvm shm:64M --ssd 256M --hdd 0
start_daemon
start_mount
for program in $wanted; do
  total=0 slowest=0 slowest_round=0
  for round in $(seq "$rounds"); do
    case $program in
      sqlite)
        mode=$([ $((round / 2 % 2)) = 0 ] && echo delete || echo wal)
        "$varve" run --mount "$mnt" -- python3 "$work/sqlite.py" write "$mode" "$mnt/db" "$work/sqlite.ledger" "$kept" 2>"$work/writer.err" &
        writer=$!
        since=$(milliseconds)
        within 300 "the first commit of round $round" grown "$work/sqlite.ledger" "$total"
        started
        sleep "0.$((RANDOM % 8 + 1))$((RANDOM % 10))"
        must_run
        strike "$round"
        total=$(python3 "$work/sqlite.py" check "$mode" "$mnt/db" "$work/sqlite.ledger" "$kept") || { explain || true; die "SQLite, round $round ($mode)"; }
        ;;
      redis)
        mkdir -p "$mnt/redis"
        start_redis() {
          "$varve" run --mount "$mnt" -- redis-server --port 0 --unixsocket "$work/redis.sock" --appendonly yes --appendfsync always --save "" \
            --dir "$mnt/redis" --daemonize no >>"$work/redis.log" 2>&1 &
          writer=$!
        }
        start_redis
        python3 "$work/redis.py" write "$work/redis.sock" "$work/redis.ledger" "$kept" >"$work/ready" 2>"$work/writer.err" &
        client=$!
        since=$(milliseconds)
        within 300 "the start of Redis in round $round" is_ready
        started
        sleep "0.$((RANDOM % 8 + 1))$((RANDOM % 10))"
        must_run
        strike "$round"
        wait "$client" 2>/dev/null || true
        redis-check-aof "$mnt/redis/appendonlydir/appendonly.aof.manifest" >"$work/check" 2>&1 || { cat "$work/check"; die "redis-check-aof, round $round"; }
        rm -f "$work/redis.sock"
        start_redis
        total=$(python3 "$work/redis.py" check "$work/redis.sock" "$work/redis.ledger" "$kept") || { explain || true; die "Redis, round $round"; }
        wait "$writer" 2>/dev/null || true
        writer=
        rm -f "$work/redis.sock"
        ;;
    esac
  done
  [ "$total" -gt 0 ] || die "$program acknowledged nothing"
  say "$program: $rounds rounds, $total acknowledged records, none lost; the slowest start took $slowest ms (round $slowest_round)"
done
stop_mount
fsck_clean
stop_daemon
