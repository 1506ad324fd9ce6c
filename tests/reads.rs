//! Programs that read the SSD by themselves: beside moves of what they read, when they are killed, with
//! several devices, and without the right or the setting.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, kill, noise, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use varve_libfs::{Cred, Fs, FsOptions, Posix, SocketConnector};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
const TIERS: [&str; 6] = ["--nvm", "64M", "--ssd", "256M", "--hdd", "0"];

/// Bytes that the daemon has read from the SSD.
fn read_by_daemon(pool: &Pool) -> u64 {
    let told = text_of(varve().args(["status", "--json"]).arg(pool.dir()));
    let told: Value = serde_json::from_str(&told).unwrap();
    let tiers = told["tiers"].as_array().unwrap();
    let ssd = tiers.iter().find(|tier| tier["tier"] == "ssd").unwrap();
    ssd["read_bytes"].as_u64().unwrap()
}

/// A program's own session.
fn linked(pool: &Pool) -> Posix {
    let path = pool.dir().join("sock");
    let fs = Fs::mount(Arc::new(SocketConnector { path }), FsOptions::default()).unwrap();
    Posix::new(fs, Cred::root())
}

/// Moves data to a tier, beside whatever keeps the mover waiting.
fn pin(tier: &str, at: &Path) {
    wait_until("a move", || {
        let mut pin = varve();
        pin.args(["pin", "--wait", "--tier", tier]).arg(at);
        pin.output().unwrap().status.success()
    });
}

/// A file on SSD.
fn on_ssd(pool: &Pool, name: &str, seed: u64, bytes: usize) -> Vec<u8> {
    let (path, body) = (pool.mnt().join(name), noise(seed, bytes));
    std::fs::write(&path, &body).unwrap();
    pin("ssd", &path);
    body
}

/// Reads all blocks of a file in an order that is no order.
fn read_all(posix: &Posix, name: &str, body: &[u8], seed: usize) {
    let fd = posix.open(name.as_bytes(), libc::O_RDONLY, 0).unwrap();
    let blocks = body.len() / BLOCK;
    let mut out = [0; BLOCK];
    for step in 0..blocks {
        let at = (step * 997 + seed) % blocks * BLOCK;
        assert_eq!(posix.pread(fd, &mut out, at as u64), Ok(BLOCK));
        assert!(out == body[at..at + BLOCK], "byte {at} of {name}");
    }
    posix.close(fd).unwrap();
}

fn set(pool: &Pool, line: &str) {
    let path = pool.dir().join("varve.toml");
    let toml = std::fs::read_to_string(&path).unwrap();
    let (before, after) = toml.split_once("[daemon]").unwrap();
    std::fs::write(&path, format!("{before}[daemon]\n{line}{after}")).unwrap();
}

#[test]
fn owners_program_reads_the_ssd_without_the_daemon() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let body = on_ssd(&pool, "f", 1, 32 * MIB);
    let before = read_by_daemon(&pool);
    let posix = linked(&pool);
    read_all(&posix, "/f", &body, 5);
    drop(posix);
    // The daemon reads a block of each window of 4 MiB, and the footers with the checksums.
    let read = read_by_daemon(&pool) - before;
    assert!(read < MIB as u64, "{read} bytes were read by the daemon");
    // Large reads, and those of the mount.
    let mount = std::fs::read(pool.mnt().join("f")).unwrap();
    assert!(mount == body);
    let read = read_by_daemon(&pool) - before;
    assert!(read < 2 * MIB as u64, "{read} bytes were read by the daemon");
    pool.down();

    set(&pool, "direct_reads = false\n");
    pool.start();
    let before = read_by_daemon(&pool);
    read_all(&linked(&pool), "/f", &body, 5);
    let read = read_by_daemon(&pool) - before;
    assert!(read >= body.len() as u64, "{read} bytes were read by the daemon");
    pool.down();
    pool.fsck_clean();
}

/// Whether this process has a file of this name open, deleted or not.
fn has_open(name: &str) -> bool {
    let is_it = |to: std::path::PathBuf| to.to_string_lossy().contains(&format!("/{name}"));
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    fds.into_iter()
        .any(|fd| std::fs::read_link(fd.path()).is_ok_and(is_it))
}

#[test]
fn data_on_several_devices_is_read_without_the_daemon_and_after_one_goes() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "64M", "--ssd", "128M", "--ssd", "128M", "--hdd", "0"]);
    let body = on_ssd(&pool, "f", 2, 32 * MIB);
    let posix = linked(&pool);
    let before = read_by_daemon(&pool);
    read_all(&posix, "/f", &body, 3);
    let read = read_by_daemon(&pool) - before;
    assert!(read < MIB as u64, "{read} bytes were read by the daemon");
    assert!(has_open("ssd.img") && has_open("ssd-2.img"));
    // A file that is open since before a restart keeps no device open.
    let kept = posix.open(b"/f", libc::O_RDONLY, 0).unwrap();
    pool.replace_daemon();
    read_all(&posix, "/f", &body, 7);
    // One that is taken out is closed; what comes to a new one is the daemon's.
    run_ok(varve().args(["remove-device"]).arg(pool.dir()).arg("ssd-2.img"));
    wait_until("the end of its use", || !has_open("ssd-2.img"));
    assert!(has_open("ssd.img"));
    posix.close(kept).unwrap();
    let mut add = varve();
    run_ok(
        add.arg("add-device")
            .arg(pool.dir())
            .args(["--tier", "ssd", "128M"]),
    );
    let more = on_ssd(&pool, "g", 3, 32 * MIB);
    for seed in 0..3 {
        read_all(&posix, "/f", &body, seed);
        read_all(&posix, "/g", &more, seed);
    }
    drop(posix);
    pool.down();
    pool.fsck_clean();
}

#[test]
fn blocks_that_move_while_they_are_read_are_the_files_own() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let body = on_ssd(&pool, "f", 4, 16 * MIB);
    let (over, read) = (AtomicBool::new(false), AtomicU64::new(0));
    let path = pool.mnt().join("f");
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (pool, body, over, read) = (&pool, &body, &over, &read);
            scope.spawn(move || {
                let mut seed = reader * 31;
                while !over.load(Ordering::Relaxed) {
                    // The cache ends with the places, and with the session.
                    let posix = linked(pool);
                    for _ in 0..50 {
                        read_all(&posix, "/f", body, seed);
                        seed += 1;
                        // The mover lets programs go first.
                        std::thread::sleep(std::time::Duration::from_millis(5));
                    }
                    read.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // The file goes up and down, and others take its places.
        for round in 0..4 {
            pin("nvm", &path);
            on_ssd(&pool, "other", 100 + round, 24 * MIB);
            pin("ssd", &path);
            std::fs::remove_file(pool.mnt().join("other")).unwrap();
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(read.load(Ordering::Relaxed) > 1, "nothing was read meanwhile");
    pool.down();
    pool.fsck_clean();
}

/// A program under `varve run` that reads a file over and over.
fn reader(pool: &Pool, name: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_varve"))
        .args(["run", "--session-after", "0", "--mount"])
        .arg(pool.mnt())
        .args([
            "--",
            "sh",
            "-c",
            "while :; do cat \"$0\" > /dev/null || exit 3; done",
        ])
        .arg(pool.mnt().join(name))
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn readers_that_are_killed_cost_others_nothing() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let body = on_ssd(&pool, "f", 5, 16 * MIB);
    for round in 0..6_u64 {
        let mut readers: Vec<Child> = (0..2).map(|_| reader(&pool, "f")).collect();
        std::thread::sleep(std::time::Duration::from_millis(120 + 90 * round));
        for reader in &mut readers {
            assert_eq!(reader.try_wait().unwrap(), None, "it reads without an error");
        }
        // While its places are given to others.
        pin("nvm", &pool.mnt().join("f"));
        for reader in &mut readers {
            kill(reader.id());
            reader.wait().unwrap();
        }
        let other = on_ssd(&pool, "other", 50 + round, 24 * MIB);
        pin("ssd", &pool.mnt().join("f"));
        let posix = linked(&pool);
        read_all(&posix, "/f", &body, 3);
        read_all(&posix, "/other", &other, 3);
        std::fs::remove_file(pool.mnt().join("other")).unwrap();
    }
    pool.down();
    pool.fsck_clean();
}
