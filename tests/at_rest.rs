//! Bits that flip in a stopped pool's files never come out as data: through a mount, by `varve run`, and to
//! an ordinary user. What is left whole does.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Pool, cannot_mount, text_of, varve};
use std::fs::{File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const FILES: u64 = 24;
const FLIPS: u32 = 24;
const BLOCK: usize = 4096;
/// Nobody's.
const USER: u32 = 4711;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

fn content(file: u64) -> Vec<u8> {
    let mut rng = Rng(file);
    let len = 100_000 + rng.next() % 200_000;
    (0..len).map(|_| rng.next() as u8 | 1).collect()
}

/// Flips bits of bytes in use, all over the file.
fn flip(image: &Path, rng: &mut Rng) {
    let file = File::options().read(true).write(true).open(image).unwrap();
    let len = file.metadata().unwrap().len();
    let (mut left, mut byte) = (FLIPS, [0]);
    while left > 0 {
        let at = rng.next() % len;
        file.read_exact_at(&mut byte, at).unwrap();
        // Not the tables and bitmaps at the beginning: with those damaged no pool is opened.
        if byte[0] != 0 && at > 64 * BLOCK as u64 {
            file.write_all_at(&[byte[0] ^ 1 << (rng.next() % 8)], at).unwrap();
            left -= 1;
        }
    }
}

#[derive(Debug, Default)]
struct Seen {
    whole: u64,
    refused: u64,
}

/// By read calls at the mount: right blocks, and those that give EIO.
fn by_calls(mnt: &Path) -> Seen {
    let mut seen = Seen::default();
    for number in 0..FILES {
        let file = File::open(mnt.join(format!("f{number}"))).unwrap();
        for (block, expected) in content(number).chunks(BLOCK).enumerate() {
            let mut bytes = vec![0; expected.len()];
            match file.read_exact_at(&mut bytes, (block * BLOCK) as u64) {
                Ok(()) => {
                    assert!(bytes == expected, "f{number}, block {block}: wrong bytes");
                    seen.whole += 1;
                }
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(libc::EIO), "f{number}, block {block}");
                    assert_ne!(error.kind(), ErrorKind::UnexpectedEof);
                    seen.refused += 1;
                }
            }
        }
    }
    seen
}

/// By a program that stops where it is refused something: whole files, and those that were not.
fn by_program(pool: &Pool, program: &Path, uid: u32) -> Seen {
    let mut seen = Seen::default();
    for number in 0..FILES {
        let mut run = Command::new(program);
        run.args(["run", "--session-after", "0", "--mount"])
            .arg(pool.mnt());
        run.args(["--", "cat"]).arg(pool.mnt().join(format!("f{number}")));
        if uid > 0 {
            run.uid(uid).gid(uid);
        }
        let output = run.output().unwrap();
        let expected = content(number);
        assert!(
            expected.starts_with(&output.stdout),
            "f{number}: wrong bytes; {}",
            String::from_utf8_lossy(&output.stderr)
        );
        if output.status.success() {
            assert_eq!(output.stdout.len(), expected.len(), "f{number}");
            seen.whole += 1;
        } else {
            seen.refused += 1;
        }
    }
    seen
}

/// Whether a process that has read of the pool has mapped the bits that all share.
fn shares(pool: &Pool, program: &Path) -> bool {
    let mut run = Command::new(program);
    run.args(["run", "--session-after", "0", "--mount"])
        .arg(pool.mnt());
    run.args(["--", "grep", "-a", "-c", "varve-verified"]);
    run.arg(pool.mnt().join("f0")).arg("/proc/self/maps");
    let output = run.output().unwrap();
    String::from_utf8_lossy(&output.stdout).contains("/proc/self/maps:1")
}

fn nvm_faults(pool: &Pool) -> u64 {
    let text = text_of(varve().args(["status", "--json"]).arg(pool.dir()));
    let status: serde_json::Value = serde_json::from_str(&text).unwrap();
    let media = status["media"].as_array().unwrap();
    let nvm = media.iter().find(|medium| medium["medium"] == "nvm").unwrap();
    nvm["checksum_errors"].as_u64().unwrap()
}

#[test]
fn flipped_bits_of_a_stopped_pool_never_come_out_of_a_mount_or_a_session() {
    if cannot_mount() {
        return;
    }
    let root = rustix::process::geteuid().is_root();
    // The user may not get to where programs are built.
    let outside = tempfile::tempdir().unwrap();
    std::fs::set_permissions(outside.path(), Permissions::from_mode(0o711)).unwrap();
    let program = outside.path().join("varve");
    std::fs::copy(env!("CARGO_BIN_EXE_varve"), &program).unwrap();
    for round in 0..2 {
        let mut pool = Pool::up(&["--allow-other", "--nvm", "8M", "--ssd", "0", "--hdd", "0"]);
        for number in 0..FILES {
            let path = pool.mnt().join(format!("f{number}"));
            std::fs::write(&path, content(number)).unwrap();
            if root {
                chown(&path, Some(USER), Some(USER)).unwrap();
            }
        }
        pool.down();
        flip(&pool.dir().join("nvm.img"), &mut Rng(77 + round));
        if root {
            let toml = pool.dir().join("varve.toml");
            let text = std::fs::read_to_string(&toml).unwrap();
            std::fs::write(&toml, format!("{text}\nusers = \"all\"\n")).unwrap();
            std::fs::set_permissions(pool.outside(), Permissions::from_mode(0o755)).unwrap();
        }
        pool.start();
        // An ordinary user first: its segments are filled by a daemon that has compared nothing yet.
        if root {
            let seen = by_program(&pool, &program, USER);
            let _ = std::fs::remove_dir_all(format!("/tmp/varve-{USER}"));
            println!("files, to an ordinary user: {seen:?}");
            assert!(seen.refused > 2 && seen.whole > 2, "{seen:?}");
        }
        let seen = by_program(&pool, &program, 0);
        println!("files, by a linked library: {seen:?}");
        assert!(shares(&pool, &program) || !cfg!(target_arch = "x86_64"));
        assert!(seen.refused > 2 && seen.whole > 2, "{seen:?}");
        let seen = by_calls(&pool.mnt());
        println!("blocks, by the mount: {seen:?}");
        assert!(seen.refused > 5 && seen.whole > 500, "{seen:?}");
        assert!(nvm_faults(&pool) > 0);
    }
}
