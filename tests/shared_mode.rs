//! What a mount's kernel caches while others come and go: who comes reads at once, changes nothing before
//! the kernel caches nothing any more, and when all are gone it may cache again.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, run_ok, text_of, varve, wait_until};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use varve_kernelfs::Status;

const TIERS: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "64M", "--hdd", "128M"];
/// A coming that waited for the kernel would take a second.
const AT_ONCE: Duration = Duration::from_millis(500);
const FILES: usize = 2_000;

fn status(pool: &Pool) -> Status {
    let json = text_of(varve().args(["status", "--json"]).arg(pool.dir()));
    serde_json::from_str(&json).expect("a status")
}

/// What the mount's kernel may cache.
fn kernel(pool: &Pool) -> String {
    let mut sessions = status(pool).sessions.into_iter();
    let mount = sessions.find(|session| session.kind == "shim");
    mount.expect("the mount").kernel
}

fn run(pool: &Pool, program: &[&str]) -> Command {
    let mut run = varve();
    run.args(["run", "--session-after", "0", "--mount"])
        .arg(pool.mnt())
        .arg("--")
        .args(program);
    run
}

/// Has the kernel cache a great many names and attributes.
fn look_at_all(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap() {
        entry.unwrap().metadata().unwrap();
    }
}

/// A session that stays: a program that has read a file, and waits.
fn stay(pool: &Pool, file: &Path) -> Child {
    let script = format!("read word < {}; echo $word; read word", file.display());
    let mut child = run(pool, &["sh", "-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 2];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
    assert_eq!(&first, b"x\n");
    child
}

#[test]
fn newcomer_reads_while_the_mounts_kernel_still_caches_what_it_was_told() {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&TIERS);
    let dir = pool.mnt().join("d");
    fs::create_dir(&dir).unwrap();
    for file in 0..FILES {
        fs::write(dir.join(file.to_string()), "x\n").unwrap();
    }
    // The time is looked at where the machine was not busy with something else; the state always.
    let mut shortest = Duration::MAX;
    let mut read_meanwhile = false;
    for _ in 0..5 {
        wait_until("the kernel may cache", || kernel(&pool) == "keeps");
        look_at_all(&dir);
        let began = Instant::now();
        let mut child = stay(&pool, &dir.join("7"));
        shortest = shortest.min(began.elapsed());
        read_meanwhile |= kernel(&pool) == "runs out";
        drop(child.stdin.take());
        child.wait().unwrap();
    }
    println!("the shortest first read took {shortest:?}");
    assert!(read_meanwhile, "it was never read while the kernel cached");
    assert!(shortest < AT_ONCE, "{shortest:?}");
}

/// As long as the kernel may keep what it was told, and some more.
const RUN_OUT: Duration = Duration::from_millis(1300);

#[test]
fn first_change_beside_a_mount_that_nobody_used_does_not_wait() {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&TIERS);
    let mut shortest = Duration::MAX;
    for round in 0..3 {
        wait_until("the kernel may cache", || kernel(&pool) == "keeps");
        std::thread::sleep(RUN_OUT);
        let new = pool.mnt().join(format!("new{round}"));
        let began = Instant::now();
        run_ok(&mut run(&pool, &["touch", new.to_str().unwrap()]));
        shortest = shortest.min(began.elapsed());
        assert!(new.exists());
    }
    println!("the shortest first change took {shortest:?}");
    assert!(
        shortest < AT_ONCE,
        "the library itself asked the mount: {shortest:?}"
    );
}

#[test]
fn what_a_newcomer_changes_first_is_never_seen_as_the_kernel_cached_it() {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&TIERS);
    let dir = pool.mnt().join("d");
    fs::create_dir(&dir).unwrap();
    for round in 0..4 {
        let name = |what: &str| dir.join(format!("{what}{round}"));
        let (new, old, moved, grown) = (name("new"), name("old"), name("moved"), name("grown"));
        fs::write(&old, "x\n").unwrap();
        fs::write(&grown, "x\n").unwrap();
        wait_until("the kernel may cache", || kernel(&pool) == "keeps");
        assert!(!new.exists() && old.exists() && !moved.exists());
        look_at_all(&dir);
        let script = format!(
            "mv {} {} && echo xx >> {} && echo x > {}",
            old.display(),
            moved.display(),
            grown.display(),
            new.display()
        );
        // The second time others come while the first of them waits.
        let second = (round % 2 == 1).then(|| stay(&pool, &grown));
        run_ok(&mut run(&pool, &["sh", "-c", &script]));
        assert!(new.exists() && !old.exists() && moved.exists(), "round {round}");
        assert_eq!(fs::metadata(&grown).unwrap().len(), 5, "round {round}");
        if let Some(mut second) = second {
            drop(second.stdin.take());
            second.wait().unwrap();
        }
    }
}

#[test]
fn mounts_kernel_may_cache_again_as_soon_as_the_last_other_session_is_gone() {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&TIERS);
    let file = pool.mnt().join("file");
    fs::write(&file, "x\n").unwrap();
    assert_eq!(kernel(&pool), "keeps");
    // What it was told has run out before: nobody waits.
    std::thread::sleep(Duration::from_millis(1_200));
    let mut child = stay(&pool, &file);
    wait_until("the kernel caches nothing", || kernel(&pool) == "asks");
    drop(child.stdin.take());
    child.wait().unwrap();
    let gone = Instant::now();
    wait_until("the kernel may cache", || kernel(&pool) == "keeps");
    println!("after {:?}", gone.elapsed());
    assert_eq!(status(&pool).sessions.len(), 1, "its log is digested");
    // A tick, an idle digest and a busy machine; it took half a minute once.
    assert!(gone.elapsed() < Duration::from_secs(5), "{:?}", gone.elapsed());
}
