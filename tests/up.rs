//! `varve up`: from nothing to a mounted pool, through crashes, to a clean stop.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{
    LiveDirs, Pool, SecondMount, alive, cannot_mount, kill, plant, run_ok, same_tree, text_of, varve,
    wait_until,
};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

const SMALL: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "128M", "--hdd", "256M"];
const SMALL_FILE: [&str; 6] = ["--nvm", "64M", "--ssd", "128M", "--hdd", "256M"];

#[test]
fn tree_is_the_same_after_a_copy_a_stop_and_a_new_start() {
    if cannot_mount() {
        return;
    }
    for tiers in [SMALL, SMALL_FILE] {
        let mut pool = Pool::up(&tiers);
        let source = pool.outside().join("source");
        plant(&source);
        run_ok(Command::new("cp").arg("-a").arg(&source).arg(pool.mnt()));
        same_tree(&source, &pool.mnt().join("source"));
        if tiers == SMALL {
            // Memory only: what `shm` holds ends with the pool's files in /dev/shm, not with the daemon.
            pool.down();
            pool.start();
        } else {
            pool.down();
            pool.fsck_clean();
            pool.start();
        }
        same_tree(&source, &pool.mnt().join("source"));
        pool.down();
    }
}

#[test]
fn second_up_is_refused_with_a_message_while_the_first_runs() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL);
    let second = varve().arg("up").arg(pool.dir()).output().unwrap();
    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains("varve down"), "{said}");
    pool.down();
}

#[test]
fn mount_goes_on_when_only_the_daemon_is_killed() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL_FILE);
    let path = pool.mnt().join("f");
    let mut file = std::fs::File::create(&path).unwrap();
    for round in 0..3_u8 {
        file.write_all(&[round; 5000]).unwrap();
        let daemon = pool.child_pid("serve").expect("a daemon");
        kill(daemon);
        // Neither do commands fail: they wait for the next one.
        run_ok(varve().arg("status").arg(pool.dir()));
        file.write_all(&[round + 100; 3000]).unwrap();
        std::fs::write(pool.mnt().join(format!("new{round}")), b"hello").unwrap();
        wait_until("a new daemon", || {
            pool.child_pid("serve").is_some_and(|pid| pid != daemon)
        });
    }
    file.sync_all().unwrap();
    let body = std::fs::read(&path).unwrap();
    assert_eq!(body.len(), 24_000);
    for round in 0..3_u8 {
        let at = usize::from(round) * 8000;
        assert!(body[at..at + 5000].iter().all(|byte| *byte == round));
        assert!(body[at + 5000..at + 8000].iter().all(|byte| *byte == round + 100));
        assert_eq!(
            std::fs::read(pool.mnt().join(format!("new{round}"))).unwrap(),
            b"hello"
        );
    }
    drop(file);
    pool.down();
    pool.fsck_clean();
}

#[test]
fn everything_acknowledged_is_there_after_all_processes_are_killed() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL_FILE);
    for round in 0..3 {
        let source = pool.outside().join(format!("source{round}"));
        plant(&source);
        run_ok(Command::new("cp").arg("-a").arg(&source).arg(pool.mnt()));
        pool.kill_all();
        pool.start();
        for earlier in 0..=round {
            let name = format!("source{earlier}");
            same_tree(&pool.outside().join(&name), &pool.mnt().join(&name));
        }
    }
    pool.down();
    pool.fsck_clean();
}

/// Looking at such a mount waits for ever, and so does what already waits in it, until it is taken away.
#[test]
fn start_takes_a_mount_away_that_does_not_answer() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL_FILE);
    std::fs::write(pool.mnt().join("file"), b"here").unwrap();
    let shim = pool.leave_a_hung_mount();
    let mut waiting = Command::new("stat")
        .arg(pool.mnt().join("never looked at"))
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    pool.start();
    assert_eq!(std::fs::read(pool.mnt().join("file")).unwrap(), b"here");
    assert!(!waiting.wait().unwrap().success(), "its request fails");
    kill(shim);
    wait_until("the end of the hung mount", || !alive(shim));
    pool.down();
    pool.fsck_clean();
}

#[test]
fn fsynced_files_are_there_after_a_power_cut() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL_FILE);
    for i in 0..20_u8 {
        let mut file = std::fs::File::create(pool.mnt().join(format!("f{i}"))).unwrap();
        file.write_all(&vec![i; 1000 + usize::from(i) * 300]).unwrap();
        file.sync_all().unwrap();
    }
    pool.kill_all();
    let live = pool.live_dirs();
    assert!(!live.is_empty(), "the live copies are where they are looked for");
    for dir in live {
        std::fs::remove_dir_all(dir).unwrap();
    }
    pool.start();
    for i in 0..20_u8 {
        let body = std::fs::read(pool.mnt().join(format!("f{i}"))).unwrap();
        assert!(
            body.len() == 1000 + usize::from(i) * 300 && body.iter().all(|byte| *byte == i),
            "f{i}"
        );
    }
    pool.down();
    pool.fsck_clean();
}

#[test]
fn programs_see_posix_through_the_mount() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL);
    let mnt = pool.mnt();
    // Appends of two descriptors never overlap.
    let path = mnt.join("log");
    let append = || {
        std::fs::File::options()
            .append(true)
            .create(true)
            .open(&path)
            .unwrap()
    };
    let (mut one, mut two) = (append(), append());
    for _ in 0..50 {
        one.write_all(b"aaaa").unwrap();
        two.write_all(b"bbbb").unwrap();
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 400);
    // An open file outlives its name.
    let mut open = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(mnt.join("gone"))
        .unwrap();
    open.write_all(b"still here").unwrap();
    std::fs::remove_file(mnt.join("gone")).unwrap();
    open.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "still here");
    // Rename over, modes, links, holes.
    std::fs::write(mnt.join("x"), b"x").unwrap();
    std::fs::write(mnt.join("y"), b"y").unwrap();
    std::fs::rename(mnt.join("x"), mnt.join("y")).unwrap();
    assert_eq!(std::fs::read(mnt.join("y")).unwrap(), b"x");
    std::fs::set_permissions(mnt.join("y"), std::fs::Permissions::from_mode(0o640)).unwrap();
    std::fs::hard_link(mnt.join("y"), mnt.join("z")).unwrap();
    let meta = std::fs::metadata(mnt.join("z")).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.nlink()), (0o640, 2));
    let sparse = std::fs::File::create(mnt.join("sparse")).unwrap();
    sparse.write_all_at(b"end", 10 << 20).unwrap();
    let meta = sparse.metadata().unwrap();
    assert_eq!(meta.len(), (10 << 20) + 3);
    assert!(meta.blocks() * 512 < 1 << 20, "a hole takes no space");
    // Directories.
    std::fs::create_dir(mnt.join("d")).unwrap();
    for i in 0..500 {
        std::fs::write(mnt.join(format!("d/{i}")), b"").unwrap();
    }
    assert_eq!(std::fs::read_dir(mnt.join("d")).unwrap().count(), 500);
    assert!(std::fs::remove_dir(mnt.join("d")).is_err());
    std::fs::remove_dir_all(mnt.join("d")).unwrap();
    assert!(!mnt.join("d").exists());
    drop((one, two, open, sparse));
    pool.down();
}

#[test]
fn second_mount_sees_what_the_first_does() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL);
    let second = pool.outside().join("second");
    std::fs::create_dir(&second).unwrap();
    let mut mount = varve().arg("mount").arg(pool.dir()).arg(&second).spawn().unwrap();
    let device = std::fs::metadata(pool.outside()).unwrap().dev();
    wait_until("the second mount", || {
        std::fs::metadata(&second).is_ok_and(|meta| meta.dev() != device)
    });
    let (a, b) = (pool.mnt(), second.clone());
    for round in 0..30_u32 {
        let (from, to) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let text = format!("round {round}");
        std::fs::write(from.join("shared"), &text).unwrap();
        assert_eq!(std::fs::read_to_string(to.join("shared")).unwrap(), text);
        std::fs::rename(to.join("shared"), to.join("moved")).unwrap();
        assert!(!from.join("shared").exists(), "round {round}");
        assert_eq!(std::fs::read_to_string(from.join("moved")).unwrap(), text);
        std::fs::remove_file(from.join("moved")).unwrap();
        assert!(!to.join("moved").exists(), "round {round}");
    }
    run_ok(varve().arg("umount").arg(&second));
    assert!(mount.wait().unwrap().success());
    pool.down();
}

/// The kernel gives the number of a mount that is gone to the next one.
#[test]
fn mounts_made_while_a_dead_one_is_taken_away_live() {
    if cannot_mount() {
        return;
    }
    let (mut dead, live) = (Pool::up(&SMALL), Pool::up(&SMALL));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let others = [1, 2, 3].map(|number| {
            let (live, done) = (&live, &done);
            scope.spawn(move || {
                let at = live.outside().join(format!("mount {number}"));
                while !done.load(Ordering::Relaxed) {
                    let ended = SecondMount::start(live, &at).end();
                    assert!(ended.success(), "the server of another mount ended with {ended}");
                    std::fs::remove_dir(&at).unwrap();
                }
            })
        });
        for _ in 0..60 {
            dead.kill_all();
            dead.start();
            if others.iter().any(|other| other.is_finished()) {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn status_counts_and_detach_returns() {
    if cannot_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    let _live = LiveDirs::of(&pool);
    run_ok(varve().arg("up").arg("--detach").arg(&pool).args(SMALL));
    let outcome = std::panic::catch_unwind(|| {
        std::fs::write(pool.join("mnt/hello"), b"hello").unwrap();
        let status = text_of(varve().args(["status", "--json"]).arg(&pool));
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        assert!(
            status["sessions"]
                .as_array()
                .is_some_and(|sessions| !sessions.is_empty()),
            "{status}"
        );
        assert!(text_of(varve().arg("status").arg(&pool)).contains("nvm"));
        run_ok(varve().arg("digest").arg(&pool));
    });
    let down = varve().args(["down", "--force"]).arg(&pool).output().unwrap();
    assert!(outcome.is_ok());
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
}
