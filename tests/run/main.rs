//! `varve run`: real programs, served in their process, give what they give on the plain mount.

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod image;
mod of_c;
mod pools;
mod requests;
mod watches;

use common::{LIMIT, Pool, alive, cannot_mount, kill, plant, run_ok, same_tree, text_of, varve, wait_until};
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Whether this cannot be tried here; says why.
fn cannot_run() -> bool {
    if !cfg!(all(
        target_arch = "x86_64",
        target_os = "linux",
        target_env = "gnu"
    )) {
        eprintln!("SKIPPED: calls are served in-process on x86-64 with glibc only");
        return true;
    }
    cannot_mount()
}

/// Numbers of calls that processes leave to the mount before they open a session, with which programs must do
/// the same as with 0: the session comes in the middle of their work.
const SESSIONS_AFTER: [u32; 4] = [1, 4, 16, 60];

/// `varve run --stats` of a shell command in the mount; every call is served.
fn served(pool: &Pool, script: &str) -> Command {
    served_after(pool, 0, script)
}

/// As [`served`], of a shell that leaves so many calls to the mount.
fn served_after(pool: &Pool, calls: u32, script: &str) -> Command {
    let mut command = varve();
    command
        .args(["run", "--stats", "--session-after", &calls.to_string(), "--mount"])
        .arg(pool.mnt())
        .args(["--", "sh", "-euc", script]);
    command.current_dir(pool.mnt());
    command
}

/// A served shell that takes each line it is told, as `$line`, does something with it and says so.
struct Talking {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Talking {
    fn start(pool: &Pool, action: &str) -> Self {
        Self::with(&mut served(
            pool,
            &format!("while read line; do {action}; echo done; done"),
        ))
    }

    /// Any other program that answers lines.
    fn with(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        Self {
            input: child.stdin.take().expect("piped"),
            lines: BufReader::new(child.stdout.take().expect("piped")).lines(),
            child,
        }
    }

    fn say(&mut self, line: &str) {
        assert_eq!(self.ask(line), "done", "{line}");
    }

    fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer()
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("it reads");
    }

    fn answer(&mut self) -> String {
        self.lines.next().expect("an answer").expect("text")
    }

    fn end(self) -> Output {
        drop(self.input);
        self.child.wait_with_output().expect("it ends")
    }
}

/// The counters at the end of what a run said. Each call that fell back has a reason there.
fn counters(output: &Output) -> serde_json::Value {
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().last().unwrap_or_default();
    let counts: serde_json::Value =
        serde_json::from_str(line).unwrap_or_else(|error| panic!("no counters ({error}): {said}"));
    let why = counts["why"].as_object().expect("reasons");
    let reasons: u64 = why.values().filter_map(serde_json::Value::as_u64).sum();
    let fell_back = counts["fell_back_total"].as_u64().expect("a number");
    // A process may be killed after it has counted a call, and before it counts the reason.
    assert!(fell_back - reasons <= 1, "{counts}");
    counts
}

/// Runs it served and on the plain mount, each in a fresh directory with the same files; outputs and trees
/// must agree, and calls must have been served. Answers how many.
fn alike(pool: &Pool, script: &str) -> u64 {
    let make = |name: &str| {
        let dir = pool.mnt().join(name);
        std::fs::create_dir(&dir).expect("a directory");
        plant(&dir);
        dir
    };
    let (ours, plain) = (make("ours"), make("plain"));
    let output = run_ok(served(pool, script).current_dir(&ours));
    let expected = run_ok(Command::new("sh").args(["-euc", script]).current_dir(&plain));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&expected.stdout),
        "{script}"
    );
    same_tree(&ours, &plain);
    std::fs::remove_dir_all(&ours).expect("removed");
    for calls in SESSIONS_AFTER {
        let ours = make("ours");
        let output = run_ok(served_after(pool, calls, script).current_dir(&ours));
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            said,
            String::from_utf8_lossy(&expected.stdout),
            "after {calls}: {script}"
        );
        same_tree(&ours, &plain);
        std::fs::remove_dir_all(&ours).expect("removed");
    }
    std::fs::remove_dir_all(&plain).expect("removed");
    let served = counters(&output)["served_total"].as_u64().expect("a number");
    assert!(served > 0, "nothing was served: {script}");
    served
}

/// The counters of a program, by default.
fn by_default(pool: &Pool, script: &str) -> serde_json::Value {
    counters(&run_ok(&mut served_after(pool, 16, script)))
}

/// Sessions that a program and its children opened, by default.
fn sessions_of(pool: &Pool, script: &str) -> u64 {
    by_default(pool, script)["sessions"]["opened"]
        .as_u64()
        .expect("a number")
}

#[test]
fn program_of_a_few_calls_opens_no_session_and_one_that_does_more_does() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "64M", "--ssd", "0", "--hdd", "0"]);
    std::fs::create_dir(pool.mnt().join("d")).expect("a file");
    std::fs::write(pool.mnt().join("small"), "a small file\n").expect("a file");
    std::fs::write(pool.mnt().join("large"), vec![b'x'; 1 << 20]).expect("a file");
    std::os::unix::fs::symlink("small", pool.mnt().join("link")).expect("a file");
    for (script, expected) in [
        (
            "for i in 1 2 3 4 5; do test \"$(cat small)\" = 'a small file'; done",
            0,
        ),
        (
            "cat $PWD/link; test -e small; test ! -e none; ! cat none 2>&1; ! cat small/x 2>&1",
            0,
        ),
        ("cat large | cmp - large; cat small", 2),
        ("cat small; exec ls d", 1),
        ("cat small; echo more >> small", 0),
        (
            "mkdir e; mv small e/x; ln e/x e/y; mv e/y small; rm e/x; rmdir e",
            0,
        ),
        // Opened by the mount, and served from the 17th call by path on; four by descriptor count as one.
        (
            "for i in $(seq 40); do echo $i; done > many; test $(wc -l < many) = 40",
            0,
        ),
        (
            "for i in $(seq 80); do echo $i; done > many; test $(wc -l < many) = 80",
            1,
        ),
        (
            "exec 3<> many; read a <&3; echo new >&3; exec 3>&-; test $(sed -n 2p many) = new",
            0,
        ),
        // What a shell opens for its commands stays the mount's, however many there are.
        (
            "for i in $(seq 40); do /bin/echo $i >> all; done; test \"$(cat all)\" = \"$(seq 40)\"",
            0,
        ),
        // The working directory is where it was moved to, for the mount and for the session.
        (
            "mkdir up up/here; cd up/here; mv ../../up ../../to; for i in $(seq 40); do echo $i >> f; done",
            1,
        ),
        ("for i in $(seq 40); do test -e small; done", 1),
        // It looks whether the target is a directory.
        ("cp small copied && cp small copied && rm copied", 0),
        ("mkdir to/there && cp small to/there", 1),
        // A relative path that leads into the mount from outside.
        (
            "cd ..; for i in 1 2 3; do cat mnt/small > /dev/null; done; cp mnt/small mnt/other; rm mnt/other",
            0,
        ),
    ] {
        assert_eq!(sessions_of(&pool, script), expected, "{script}");
    }
    assert_eq!(
        std::fs::read(pool.mnt().join("small")).expect("a file"),
        b"a small file\nmore\n"
    );
    let lines: String = (1..=40).map(|i| format!("{i}\n")).collect();
    let moved = std::fs::read_to_string(pool.mnt().join("to/here/f"));
    assert_eq!(moved.expect("a file"), lines);
}

#[test]
fn stats_say_why_calls_were_left_to_the_mount() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "64M", "--ssd", "0", "--hdd", "0"]);
    std::fs::create_dir(pool.mnt().join("d")).expect("a directory");
    std::fs::write(pool.mnt().join("small"), "a small file\n").expect("a file");
    std::os::unix::fs::symlink("/dev/null", pool.mnt().join("out")).expect("a link");
    let first = "first calls of a process";
    for (calls, script, expected) in [
        (16, "cat small; mkdir e; rmdir e", &[first][..]),
        (0, "test -e small; echo more > new; rm new", &[]),
        (0, "cat < small", &["descriptor from outside"]),
        (0, "cat out", &["path outside"]),
        (
            0,
            "mkfifo f; echo x > f & cat f; wait",
            &["fifo, socket or device"],
        ),
        (
            16,
            "cp -a small d/copy; tar cf t.tar d; tar tf t.tar; sort small",
            &[first],
        ),
    ] {
        let output = run_ok(&mut served_after(&pool, calls, script));
        let said = String::from_utf8_lossy(&output.stderr);
        let counts = counters(&output);
        let why = counts["why"].as_object().expect("reasons");
        for reason in expected {
            assert!(why.contains_key(*reason), "{script}: {counts}");
            let line = format!("{} calls by the mount: {reason}", why[*reason]);
            assert!(said.contains(&line), "{line}: {said}");
        }
        let sum: u64 = why.values().filter_map(serde_json::Value::as_u64).sum();
        assert_eq!(
            counts["fell_back_total"].as_u64(),
            Some(sum),
            "{script}: {counts}"
        );
        if expected.is_empty() {
            assert!(why.is_empty(), "{script}: {counts}");
        }
    }
}

/// The session takes over files that the mount has made a moment before, which the daemon does not know yet.
#[test]
fn file_that_the_mount_has_made_is_served_once_there_is_a_session() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "0", "--hdd", "0"]);
    let counts = by_default(&pool, "exec dd if=/dev/zero of=new bs=4k count=200");
    let of = |side: &str| counts[side]["write"].as_u64().unwrap_or(0);
    assert!(of("fell_back") <= 64 && of("served") >= 130, "{counts}");
    let made = std::fs::metadata(pool.mnt().join("new")).expect("a file");
    assert_eq!(made.len(), 200 * 4096);
    // Each file in turn is the one after which tar has its session, with times and modes still to be set.
    for files in 1..20 {
        let script = format!(
            "rm -rf src x; mkdir src x; for i in $(seq {files}); do echo $i > src/$i; done; chmod 600 src/*; \
             tar cf s.tar src; tar xpf s.tar -C x; diff -r src x/src; stat -c '%n %a %Y' src/* > a; \
             cd x; stat -c '%n %a %Y' src/* | cmp ../a -"
        );
        by_default(&pool, &script);
    }
    pool.fsck_clean();
}

#[test]
fn core_utilities_do_the_same_as_on_the_plain_mount() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    for script in [
        "ls -AR a; ls -l a/b/link | wc -l",
        "cp -a a copy; diff -r --no-dereference a copy; rm -r copy",
        "mv a b; mv b/file3 b/b/moved; test ! -e a; find b | sort",
        "dd if=a/b/big of=out bs=64k 2>/dev/null; cmp a/b/big out; cksum out",
        "for i in 3 1 2; do echo $i; done > n; sort n > m; cat m n; sort -o n n; cmp m n",
        "tar cf t.tar a; mkdir x; tar xf t.tar -C x; diff -r --no-dereference a x/a; rm -rf x t.tar",
        "find a -type f -size +1k | sort | xargs cksum; grep -rl Q a | sort | head -n 3 || true",
        "cd a/b; echo text > c/t; cat ../b/c/t; pwd | sed 's/.*mnt.[a-z]*//'; ln -s t c/l; readlink c/l; ln \
        c/t c/h; stat -c '%h %s %F' c/t",
        "touch -d '2001-02-03 04:05:06.7' a/file1; stat -c '%y' a/file1 | cut -c1-21; chmod 640 a/file1; \
        stat -c '%a' a/file1",
        "echo one > f; echo two >> f; sed -i s/one/three/ f; cat f; truncate -s 3 f; cat f; wc -c < f; tail \
        -c 2 f",
        "exec 3> d; echo x >&3; (echo y >&3); echo z >&3; exec 3>&-; cat d; mkdir -p p/q/r; rmdir p/q/r; ls \
        p",
    ] {
        alike(&pool, script);
    }
    pool.fsck_clean();
}

#[test]
fn relative_paths_lead_into_the_mount_from_outside() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    plant(&pool.mnt());
    let mnt = pool.mnt();
    let above = mnt.parent().expect("it has one").to_owned();
    let name = mnt
        .file_name()
        .expect("it has one")
        .to_string_lossy()
        .into_owned();
    std::os::unix::fs::symlink(&mnt, pool.outside().join("link")).expect("a link");
    std::fs::create_dir(pool.outside().join(&name)).expect("a directory");
    std::fs::write(pool.outside().join(&name).join("other"), "elsewhere\n").expect("written");
    let outside = pool.outside().display().to_string();
    // What is done, and whether it must be served: where a symbolic link leads in, the kernel may do it.
    let scripts = [
        (format!("cat {name}/a/file1"), true),
        (
            format!("cat ./{name}//a/../a/file1; cat {name}/../{name}/a/file1"),
            true,
        ),
        (
            format!(
                "echo new > {name}/new; mv {name}/new {name}/a/moved; cat {name}/a/moved; rm {name}/a/moved"
            ),
            true,
        ),
        (
            format!("ls -R {name}/a | sort; find {name} -type f | sort | xargs cksum"),
            true,
        ),
        (
            format!(
                "mkdir -p {name}/x/y; cd {name}/x; cat ../a/file1; cat ../../{name}/a/file1; rmdir y; cd \
                ..; rmdir x"
            ),
            true,
        ),
        (
            format!("cd {outside}; cat link/a/file1; cd link/a; cat file1; cd ..; cat a/file1"),
            true,
        ),
        // A directory elsewhere that has the mount's name is not the mount.
        (
            format!("cd {outside}; cat {name}/other; cd {name}; cat other; cat ../{name}/other"),
            false,
        ),
    ];
    for (script, must) in scripts {
        let output = run_ok(served(&pool, &script).current_dir(&above));
        let expected = run_ok(Command::new("sh").args(["-euc", &script]).current_dir(&above));
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&expected.stdout),
            "{script}"
        );
        let counts = counters(&output);
        assert_eq!(
            counts["served_total"].as_u64().expect("a number") > 0,
            must,
            "{script}: {counts}"
        );
    }
}

#[test]
fn children_and_parents_write_on_behind_each_other() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let script = "{ echo 1; sh -c 'echo 2'; echo 3; (echo 4; sh -c 'echo 5'); echo 6; } > f; cat f; \
                  for i in 1 2 3 4; do (for j in 1 2 3 4 5 6 7 8; do echo $i$j; done >> g) & done; wait; \
                  sort g > h; rm g; wc -l < h";
    assert!(alike(&pool, script) > 0);
}

#[test]
fn what_a_served_program_wrote_is_seen_through_the_mount_at_once() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let mut program = Talking::start(&pool, "echo $line >> log");
    let mut expected = String::new();
    for i in 0..20 {
        program.say(&format!("line{i}"));
        expected.push_str(&format!("line{i}\n"));
        assert_eq!(
            std::fs::read_to_string(pool.mnt().join("log")).expect("readable"),
            expected
        );
    }
    let output = program.end();
    assert!(output.status.success());
    assert!(counters(&output)["served"]["write"].as_u64().expect("a number") >= 20);
}

#[test]
fn what_the_daemon_wrote_for_the_mount_does_not_stay_in_its_cache() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let path = pool.mnt().join("data");
    std::fs::write(&path, "begin..\n").expect("written");
    let mut program = Talking::start(&pool, "echo $line 1<>data");
    // By turns, so often that the daemon makes the writes itself.
    for i in 0..200 {
        // First the length, which gives the lease back, then a page, which the kernel keeps without one.
        let line = format!("m{i:06}\n");
        std::fs::write(&path, format!("{line:.<4096}")).expect("written");
        program.say(&format!("s{i:06}"));
        // What the kernel keeps of the mount's write goes when that has been answered, on a thread of its
        // own.
        let expected = format!("s{i:06}\n");
        wait_until("the mount shows what the program wrote", || {
            std::fs::read(&path)
                .expect("readable")
                .starts_with(expected.as_bytes())
        });
    }
    assert!(program.end().status.success());
}

#[test]
fn a_program_goes_on_when_the_daemon_is_killed_meanwhile() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let mut child = served(
        &pool,
        "i=0; while [ $i -lt 400 ]; do echo $i >> log; echo $i > last; mv last done; echo $i; i=$((i + 1)); \
        done",
    )
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    for i in 0..400 {
        if i == 100 || i == 250 {
            wait_until("the daemon", || pool.child_pid("serve").is_some());
            kill(pool.child_pid("serve").expect("it was just there"));
        }
        let line = lines.next().expect("an answer").expect("text");
        assert_eq!(line, i.to_string());
    }
    let output = child.wait_with_output().expect("it ends");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let expected: String = (0..400).map(|i| format!("{i}\n")).collect();
    assert_eq!(
        std::fs::read_to_string(pool.mnt().join("log")).expect("readable"),
        expected
    );
    assert_eq!(
        std::fs::read_to_string(pool.mnt().join("done")).expect("readable"),
        "399\n"
    );
    assert!(counters(&output)["served"]["write"].as_u64() > Some(700));
}

#[test]
fn calls_wait_for_a_daemon_that_is_away_then_fail_and_are_served_again_when_it_is_back() {
    const WAIT: Duration = Duration::from_millis(1_500);
    if cannot_run() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    pool.down();
    let settings = pool.dir().join("varve.toml");
    let mut text = std::fs::read_to_string(&settings).expect("settings");
    text.push_str(&format!("lease_ms = 500\nwait_ms = {}\n", WAIT.as_millis()));
    std::fs::write(&settings, text).expect("written");
    pool.start();
    for name in ["first", "away", "back"] {
        std::fs::create_dir(pool.mnt().join(name)).expect("a directory");
        std::fs::write(pool.mnt().join(name).join("file"), "x\n").expect("written");
    }
    let (said, errors) = (pool.outside().join("said"), pool.outside().join("errors"));
    // The shell itself opens and writes: the session is its own.
    let action = format!(
        "if read -r x < $line/file && echo $line >> log; then echo $line; else echo failed; fi >> {} 2>> {}",
        said.display(),
        errors.display()
    );
    let mut program = Talking::start(&pool, &action);
    let last = || {
        let text = std::fs::read_to_string(&said).expect("readable");
        text.lines().last().unwrap_or_default().to_owned()
    };
    program.say("first");
    assert_eq!(last(), "first");
    // Nobody starts another one.
    let daemon = pool.child_pid("serve").expect("a daemon");
    kill(pool.up_pid());
    kill(daemon);
    wait_until("the end of the daemon", || !alive(daemon));
    let began = Instant::now();
    program.say("away");
    let took = began.elapsed();
    assert_eq!(last(), "failed");
    // Not for another pause between two tries if that would be too long.
    assert!(took >= WAIT / 2, "it waited for {took:?}");
    let errors = std::fs::read_to_string(&errors).expect("readable");
    assert!(
        errors.contains("Input/output error") || errors.contains("I/O error"),
        "{errors}"
    );
    pool.wait_unlocked();
    let mut daemon = varve()
        .arg("serve")
        .arg(pool.dir())
        .stdout(Stdio::null())
        .spawn()
        .expect("a daemon");
    wait_until("the program goes on", || {
        program.say("back");
        last() == "back"
    });
    let output = program.end();
    let log = std::fs::read_to_string(pool.mnt().join("log")).expect("readable");
    let _ = daemon.kill();
    let _ = daemon.wait();
    assert!(output.status.success());
    assert_eq!(
        log, "first\nback\n",
        "what failed is not there, what did not is there once"
    );
    assert!(counters(&output)["served"]["write"].as_u64() >= Some(2));
}

#[test]
fn the_exit_code_is_the_programs() {
    if cannot_run() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    for (script, code) in [("exit 7", 7), ("kill -9 $$", 137), (":", 0)] {
        let status = served(&pool, script)
            .stderr(Stdio::null())
            .status()
            .expect("it runs");
        assert_eq!(status.code(), Some(code), "{script}");
    }
    let missing = varve()
        .args(["run", "--session-after", "0", "--mount"])
        .arg(pool.mnt())
        .args(["--", "no-such-program"])
        .output()
        .expect("it runs");
    assert_eq!(missing.status.code(), Some(1));
    let nowhere = varve()
        .args(["run", "--session-after", "0", "--mount"])
        .arg(pool.outside())
        .args(["--", "true"])
        .output()
        .expect("it runs");
    assert_eq!(nowhere.status.code(), Some(1));
}

/// Whether `program` is installed; says so if not.
fn has(program: &str) -> bool {
    let there = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !there {
        eprintln!("SKIPPED: {program} is not installed");
    }
    there
}

#[test]
fn redirections_of_a_shell_are_served_in_the_program_that_it_starts() {
    if cannot_run() || !has("bash") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let script = "seq 1 100000 > n; sort -rn < n > o; cksum < o; { echo a; head -n 3 o; (echo b); } > p \
        2>&1; cat p; \
                  exec 3<> p; read -r line <&3; head -n 1 <&3 > /dev/null; echo end >> p; cat < p; \
                  (exec bash -c 'exec bash -c \"cat; echo $1\"' x y < p > q); cat q; env | grep -c \
                  VARVE_PRELOAD_ALONE=[0-9] || true";
    let run = |command: &mut Command| {
        let output = run_ok(command.args(["-euc", script]).current_dir(pool.mnt()));
        std::fs::remove_file(pool.mnt().join("n")).expect("it was made");
        output
    };
    let mut command = varve();
    command
        .args(["run", "--stats", "--session-after", "0", "--mount"])
        .arg(pool.mnt())
        .args(["--", "bash"]);
    let output = run(&mut command);
    let expected = run(&mut Command::new("bash"));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&expected.stdout)
    );
    // Both of the large files were written by programs that inherited them; their first few calls are the
    // kernel's.
    let counts = counters(&output);
    assert!(counts["served"]["write"].as_u64() > Some(150), "{counts}");
    assert!(counts["fell_back"]["write"].as_u64() < Some(100), "{counts}");
}

#[test]
fn sqlite_keeps_its_database_whole_in_both_journal_modes() {
    if cannot_run() || !has("sqlite3") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    for mode in ["delete", "wal"] {
        let sql = format!(
            "pragma journal_mode={mode}; create table t(a integer primary key, b text); \
             with recursive n(i) as (select 1 union all select i + 1 from n where i < 500) insert into t \
             select i, hex(randomblob(50)) from n; \
             update t set b = 'x' where a % 7 = 0; delete from t where a % 5 = 0; vacuum; pragma \
             integrity_check; select count(*) from t;"
        );
        let output = run_ok(&mut served(&pool, &format!("sqlite3 {mode}.db \"{sql}\"")));
        assert_eq!(
            String::from_utf8_lossy(&output.stdout)
                .lines()
                .skip(1)
                .collect::<Vec<_>>(),
            ["ok", "400"],
            "{mode}"
        );
        assert!(counters(&output)["served_total"].as_u64() > Some(0));
        let outside = text_of(
            Command::new("sqlite3")
                .arg(pool.mnt().join(format!("{mode}.db")))
                .arg("pragma integrity_check; select count(*) from t;"),
        );
        assert_eq!(outside, "ok\n400\n", "{mode}");
    }
}

#[test]
fn git_makes_a_repository_that_its_checker_accepts() {
    if cannot_run() || !has("git") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    plant(&pool.mnt());
    let script = "export HOME=$PWD GIT_CONFIG_NOSYSTEM=1; git init -q r; cp -a a r/; cd r; git add .; \
                  git -c user.name=n -c user.email=e commit -qm one; git gc -q; git fsck --strict; cd ..; \
                  git clone -q r s; \
                  diff -r --no-dereference r/a s/a; git -C s log --format=%s";
    let output = run_ok(&mut served(&pool, script));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "one\n");
    assert!(counters(&output)["served_total"].as_u64() > Some(0));
    run_ok(
        Command::new("git")
            .args(["fsck", "--strict"])
            .current_dir(pool.mnt().join("r")),
    );
}

#[test]
fn python_reads_and_writes_in_all_ways() {
    if cannot_run() || !has("python3") {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"]);
    let script = pool.outside().join("try.py");
    std::fs::write(&script, PYTHON).expect("written");
    let started = Instant::now();
    let output = run_ok(&mut served(&pool, &format!("python3 {}", script.display())));
    assert!(started.elapsed() < LIMIT);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "good\n");
    assert!(counters(&output)["served_total"].as_u64() > Some(100));
    assert!(Path::new(&pool.mnt()).join("m").exists());
}

const PYTHON: &str = r#"
import fcntl, mmap, os, signal, socket, subprocess, tempfile, threading

# Offsets are shared by dup and by fork, also when both go on writing.
fd = os.open("f", os.O_RDWR | os.O_CREAT)
os.write(fd, b"abc")
two = os.dup(fd)
os.write(two, b"def")
assert os.lseek(fd, 0, os.SEEK_CUR) == 6
pid = os.fork()
if pid == 0:
    os.write(fd, b"ghi")
    os._exit(0)
os.waitpid(pid, 0)
os.write(fd, b"jkl")
assert os.pread(two, 100, 0) == b"abcdefghijkl"
os.close(fd); os.close(two)

# The lowest free number.
os.close(0)
fd = os.open("f", os.O_RDONLY)
assert fd == 0, fd
fds = [os.open("f", os.O_RDONLY) for _ in range(500)]
assert sorted(fds) == fds
for n in fds: os.close(n)

# Maps: private, shared, and what is written through them.
with open("m", "wb") as f: f.write(b"x" * 8192)
with open("m", "r+b") as f:
    m = mmap.mmap(f.fileno(), 0)
    m[0:5] = b"hello"
    m.flush()
    assert open("m", "rb").read(5) == b"hello"
    m.close()
with open("m", "rb") as f:
    m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    assert m[:5] == b"hello"

# Descriptors over a socket, and to a program.
a, b = socket.socketpair(socket.AF_UNIX)
with open("s", "w+") as f:
    f.write("sent"); f.flush()
    socket.send_fds(a, [b"x"], [f.fileno()])
    _, got, _, _ = socket.recv_fds(b, 1, 1)
    assert os.pread(got[0], 10, 0) == b"sent"
    os.close(got[0])
with open("o", "w") as f:
    subprocess.run(["sh", "-c", "echo child"], stdout=f, check=True)
    f.write("parent\n")
assert open("o").read() == "child\nparent\n"

# Locks are seen by others.
with open("l", "w") as f:
    fcntl.flock(f, fcntl.LOCK_EX)
    r = subprocess.run(["flock", "-n", "l", "true"])
    assert r.returncode == 1
    fcntl.flock(f, fcntl.LOCK_UN)
    fcntl.lockf(f, fcntl.LOCK_EX)
    pid = os.fork()
    if pid == 0:
        try:
            fcntl.lockf(open("l", "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os._exit(1)
        except OSError:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

# A file without a name, in parent and child.
with tempfile.TemporaryFile(dir=".") as t:
    t.write(b"nameless"); t.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if os.pread(t.fileno(), 8, 0) == b"nameless" else 1)
    assert os.waitpid(pid, 0)[1] == 0

# Handlers that write while the program writes.
log = os.open("sig", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
hits = 0
def handler(*_):
    global hits
    hits += 1
    os.write(log, b"!")
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while hits < 50: os.write(log, b".")
signal.setitimer(signal.ITIMER_REAL, 0)
assert os.pread(os.open("sig", os.O_RDONLY), 1 << 24, 0).count(b"!") == hits

# Threads on one file.
app = os.open("t", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def work(n):
    for _ in range(200): os.write(app, b"%d\n" % n)
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for t in threads: t.start()
for t in threads: t.join()
assert sorted(open("t").read().split()) == sorted(["%d" % n for n in range(4)] * 200)

# Directories: descriptors, names, the working directory.
os.makedirs("d/e")
d = os.open("d", os.O_RDONLY)
os.mkdir("x", dir_fd=d)
assert sorted(os.listdir(d)) == ["e", "x"]
assert sorted(e.name for e in os.scandir("d")) == ["e", "x"]
os.fchdir(d)
assert os.getcwd().endswith("/mnt/d")
open("y", "w").close()
os.chdir("..")
assert sorted(os.listdir("d")) == ["e", "x", "y"]
os.rename("d", "z")
open("z/e/w", "w").close()
assert os.stat("e/w", dir_fd=d).st_size == 0
os.setxattr("z/e/w", "user.k", b"v")
assert os.listxattr("z/e/w") == ["user.k"] and os.getxattr("z/e/w", "user.k") == b"v"
os.chdir("/")
print("good")
"#;
