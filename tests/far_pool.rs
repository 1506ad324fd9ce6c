//! Far memory in slabs of a pool: a program whose memory lies on NVM, SSD and HDD finds every byte, also when the
//! daemon is killed beside it; what is shown meanwhile, and that nothing is left. Needs root, `/dev/userfaultfd`
//! and `python3`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, noise, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Fills memory with bytes that do not shrink, then changes and compares it in turns.
const PROGRAM: &str = r#"
import hashlib, os, random, sys, time
mib, until = int(sys.argv[1]), time.time() + float(sys.argv[2])
def page(number, turn):
    return hashlib.shake_128(b"%d %d" % (number, turn)).digest(1 << 20)
parts = [bytearray(page(number, 0)) for number in range(mib)]
turns = [0] * mib
dice = random.Random(5)
looks = 0
while time.time() < until or looks < mib:
    number = looks % mib if looks < mib else dice.randrange(mib)
    assert parts[number] == page(number, turns[number]), "part %d is another's" % number
    if dice.randrange(3) == 0:
        turns[number] += 1
        parts[number][:] = page(number, turns[number])
    looks += 1
print("all right", looks)
"#;

/// Fills memory, rests once the file is there until it is gone, and compares all.
const RESTING: &str = r#"
import hashlib, os, sys, time
mib, sign = int(sys.argv[1]), sys.argv[3]
def page(number):
    return hashlib.shake_128(b"%d" % number).digest(1 << 20)
parts = [bytearray(page(number)) for number in range(mib)]
while not os.path.exists(sign):
    assert parts[0] == page(0)
    time.sleep(0.05)
while os.path.exists(sign):
    time.sleep(0.05)
for number in range(mib):
    assert parts[number] == page(number), "part %d is another's" % number
print("all right")
"#;

/// Fills memory and forks: children find it as it was, change theirs, and fork again.
const FORKING: &str = r#"
import hashlib, os, sys
mib = int(sys.argv[1])
def page(number, turn):
    return hashlib.shake_128(b"%d %d" % (number, turn)).digest(1 << 20)
parts = [bytearray(page(number, 0)) for number in range(mib)]
def check(turns):
    for number in range(mib):
        assert parts[number] == page(number, turns[number]), "part %d is another's" % number
def child(turns, depth):
    check(turns)
    for number in range(depth, mib, 7):
        turns[number] += 1 + depth
        parts[number][:] = page(number, turns[number])
    if depth < 2:
        forked(turns, depth + 1)
    check(turns)
def forked(turns, depth):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(list(turns), depth)
            status = 0
        finally:
            os._exit(status)
    for number in range(3, mib, 11):
        turns[number] += 100
        parts[number][:] = page(number, turns[number])
    assert os.waitpid(pid, 0)[1] == 0, "the child found something else"
    check(turns)
turns = [0] * mib
for _ in range(2):
    forked(turns, 0)
print("all right")
"#;

fn cannot() -> bool {
    let python = Command::new("python3").arg("-V").output().is_ok();
    if rustix::process::geteuid().is_root() && Path::new("/dev/userfaultfd").exists() && python {
        return cannot_mount();
    }
    eprintln!("SKIPPED: far memory needs root, /dev/userfaultfd (Linux 6.8) and python3");
    true
}

/// Slabs take 32 MiB of NVM, 64 MiB of SSD, 128 MiB of HDD.
fn pool() -> Pool {
    Pool::up(&["--nvm", "128M", "--ssd", "256M", "--hdd", "512M"])
}

/// Starts the program with 40 MiB of its memory local, and nothing compressed.
fn start(pool: &Pool, far: &[&str], mib: u32, seconds: u32) -> Child {
    start_program(pool, far, PROGRAM, &[&mib.to_string(), &seconds.to_string()], "")
}

fn start_program(pool: &Pool, far: &[&str], program: &str, arguments: &[&str], settings: &str) -> Child {
    let policy = pool.outside().join("policy.toml");
    std::fs::write(&policy, format!("[far]\ncompressed_share = 0\n{settings}")).unwrap();
    let mut command = varve();
    command.args(["vm", "run", "--json", "--local", "40M", "--policy"]);
    command.arg(policy);
    for far in far {
        command.args(["--far", far]);
    }
    command.args(["--", "python3", "-c", program]).args(arguments);
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn end(child: Child) -> Value {
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    assert!(String::from_utf8_lossy(&output.stdout).contains("all right"));
    let told = errors
        .lines()
        .find(|line| line.starts_with('{'))
        .expect("a report");
    serde_json::from_str(told).unwrap()
}

fn slabs(pool: &Pool) -> Vec<u64> {
    let told = run_ok(varve().args(["status", "--json"]).arg(pool.dir())).stdout;
    let told: Value = serde_json::from_slice(&told).unwrap();
    let tiers = told["tiers"].as_array().unwrap();
    tiers.iter().map(|tier| tier["slabs"].as_u64().unwrap()).collect()
}

#[test]
fn program_finds_its_bytes_on_all_tiers_of_a_pool() {
    if cannot() {
        return;
    }
    let mut pool = pool();
    let at = pool.mnt();
    // The mount stands for the pool, and a directory of another file system for itself.
    let child = start(&pool, &[&format!("{}=400M", at.display())], 220, 8);
    wait_until("slabs on all tiers", || {
        slabs(&pool).iter().all(|count| *count > 0)
    });
    let shown = text_of(varve().arg("status").arg(pool.dir()));
    assert!(
        shown.contains("of far memory, which take") && shown.contains("in slabs"),
        "{shown}"
    );
    let report = end(child);
    assert_eq!(report["poisoned"], 0, "{report}");
    let tiers = report["tiers"].as_array().unwrap();
    assert_eq!(tiers.len(), 3, "{report}");
    for tier in tiers {
        assert!(tier["faults"]["count"].as_u64().unwrap() > 0, "{report}");
    }
    wait_until("the end of the slabs", || slabs(&pool) == [0, 0, 0]);
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
    pool.down();
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}

#[test]
fn program_goes_on_when_the_daemon_was_killed() {
    if cannot() {
        return;
    }
    let mut pool = pool();
    let far = format!("{}=400M", pool.dir().display());
    let child = start(&pool, &[&far], 160, 14);
    wait_until("slabs", || slabs(&pool).iter().sum::<u64>() > 60);
    for _ in 0..4 {
        pool.replace_daemon();
        std::thread::sleep(std::time::Duration::from_millis(1500));
        assert!(
            slabs(&pool).iter().sum::<u64>() > 60,
            "its client has taken them up"
        );
    }
    let report = end(child);
    assert_eq!(report["poisoned"], 0, "{report}");
    wait_until("the end of the slabs", || slabs(&pool) == [0, 0, 0]);
    pool.down();
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}

#[test]
fn run_that_is_killed_leaves_no_slab() {
    if cannot() {
        return;
    }
    let pool = pool();
    let far = format!("{}=400M", pool.dir().display());
    let mut child = start(&pool, &[&far], 120, 60);
    wait_until("slabs", || slabs(&pool).iter().sum::<u64>() > 40);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the end of the slabs", || slabs(&pool) == [0, 0, 0]);
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}

#[test]
fn pool_without_a_daemon_or_without_a_share_is_refused_in_a_sentence() {
    if cannot() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "16M", "--ssd", "16M", "--hdd", "0"]);
    let far = format!("{}=10M", pool.dir().display());
    pool.down();
    let refused = |said: &str| {
        let output = start(&pool, &[&far], 1, 1).wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(said), "{errors}");
    };
    refused("no daemon serves the pool");
    let settings = pool.dir().join("varve.toml");
    let text = std::fs::read_to_string(&settings).unwrap();
    let daemon = if text.contains("[daemon]") {
        text.replace("[daemon]", "[daemon]\nfar_percent = 0")
    } else {
        format!("{text}\n[daemon]\nfar_percent = 0\n")
    };
    std::fs::write(&settings, daemon).unwrap();
    pool.start();
    let output = start(&pool, &[&far], 1, 1).wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && errors.contains("far_percent"),
        "{errors}"
    );
}

/// What the pager of a run says now.
fn told(run: &Child) -> Value {
    let output = run_ok(varve().args(["vm", "far", "--json"]).arg(run.id().to_string()));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn slabs_are_given_back_to_files_and_the_program_is_whole() {
    if cannot() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "256M", "--hdd", "0"]);
    let free = || {
        let stat = rustix::fs::statvfs(pool.mnt()).unwrap();
        (stat.f_bavail * stat.f_frsize) >> 20
    };
    let before = free();
    let sign = pool.outside().join("sign");
    // The pool is its only far tier. Nothing moves for its temperature.
    let far = format!("{}=400M", pool.dir().display());
    let arguments = ["150", "", sign.to_str().unwrap()];
    let child = start_program(&pool, &[&far], RESTING, &arguments, "t_s = 3600\n");
    wait_until("slabs", || slabs(&pool).iter().sum::<u64>() > 40);
    std::fs::write(&sign, "").unwrap();
    // What all slabs together leave is not enough.
    let mib = before.saturating_sub(36);
    for number in 0..mib / 4 {
        let file = std::fs::File::create(pool.mnt().join(format!("file{number}"))).unwrap();
        let body = noise(number, 4 << 20);
        let written = (&file).write_all(&body).and_then(|()| file.sync_all());
        assert!(
            written.is_ok(),
            "{written:?} after {} of {mib} MiB, {:?} slabs",
            number * 4,
            slabs(&pool)
        );
    }
    let left = slabs(&pool).iter().sum::<u64>();
    assert!(left < 40, "{left} slabs are still there");
    let quiet = || {
        let told = told(&child);
        let faults: Vec<_> = told["tiers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|tier| tier["faults"]["count"].clone())
            .collect();
        (told["migrated"].clone(), faults, told["poisoned"].clone())
    };
    wait_until("quiet", || {
        let now = quiet();
        std::thread::sleep(std::time::Duration::from_secs(3));
        now == quiet()
    });
    for number in 0..mib / 4 {
        let body = std::fs::read(pool.mnt().join(format!("file{number}"))).unwrap();
        assert!(body == noise(number, 4 << 20), "file {number}");
    }
    std::fs::remove_file(&sign).unwrap();
    let report = end(child);
    assert_eq!(report["poisoned"], 0, "{report}");
    wait_until("the end of the slabs", || {
        slabs(&pool).iter().all(|count| *count == 0)
    });
    pool.down();
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}

#[test]
fn children_of_a_program_find_its_pages_in_the_pool() {
    if cannot() {
        return;
    }
    let mut pool = pool();
    let far = format!("{}=400M", pool.dir().display());
    let child = start_program(&pool, &[&far], FORKING, &["110"], "");
    wait_until("slabs", || slabs(&pool).iter().sum::<u64>() > 40);
    let report = end(child);
    assert_eq!(report["poisoned"], 0, "{report}");
    assert!(report["forks"].as_u64().unwrap() >= 6, "{report}");
    wait_until("the end of the slabs", || slabs(&pool) == [0, 0, 0]);
    pool.down();
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}

/// Reads one message, with its length before it.
fn message(mut from: &UnixStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    from.read_exact(&mut bytes)?;
    let len = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
    bytes.resize(4 + len, 0);
    from.read_exact(&mut bytes[4..])?;
    Ok(bytes)
}

/// Stands between a program and the pool's daemon. Of each session after the first, the answer to the first
/// request is lost, in every other one. Descriptors do not pass, so all goes over the connection.
fn lossy(pool: &Path, dir: &Path) -> Arc<AtomicUsize> {
    std::fs::create_dir(dir).unwrap();
    std::fs::write(dir.join("varve.toml"), "").unwrap();
    let listener = UnixListener::bind(dir.join("sock")).unwrap();
    let lost = Arc::new(AtomicUsize::new(0));
    let (counted, sock): (_, PathBuf) = (lost.clone(), pool.join("sock"));
    std::thread::spawn(move || {
        let mut sessions = 0;
        for client in listener.incoming() {
            let Ok(client) = client else { return };
            let Ok(daemon) = UnixStream::connect(&sock) else {
                continue;
            };
            let opened = message(&client)
                .and_then(|hello| (&daemon).write_all(&hello))
                .and_then(|()| message(&daemon))
                .and_then(|welcome| (&client).write_all(&welcome));
            if opened.is_err() {
                continue;
            }
            sessions += 1;
            if sessions % 2 == 0 {
                let answered = message(&client)
                    .and_then(|request| (&daemon).write_all(&request))
                    .and_then(|()| message(&daemon));
                counted.fetch_add(usize::from(answered.is_ok()), Ordering::Relaxed);
                continue;
            }
            for (from, to) in [(&client, &daemon), (&daemon, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
            }
        }
    });
    lost
}

#[test]
fn program_finds_its_bytes_when_the_first_answer_of_the_next_daemon_is_lost() {
    if cannot() {
        return;
    }
    let pool = pool();
    let between = pool.outside().join("between");
    let lost = lossy(&pool.dir(), &between);
    let far = format!("{}=400M", between.display());
    let child = start(&pool, &[&far], 160, 12);
    wait_until("slabs", || slabs(&pool).iter().sum::<u64>() > 60);
    for round in 1..4 {
        pool.replace_daemon();
        wait_until("the lost answer", || lost.load(Ordering::Relaxed) >= round);
        std::thread::sleep(std::time::Duration::from_millis(1500));
        assert!(
            slabs(&pool).iter().sum::<u64>() > 60,
            "its client has taken them up"
        );
    }
    let report = end(child);
    assert_eq!(report["poisoned"], 0, "{report}");
    // To the daemon, this process is the client: its slabs stay as long as it lives.
    assert!(text_of(varve().arg("fsck").arg(pool.dir())).contains("clean"));
}
