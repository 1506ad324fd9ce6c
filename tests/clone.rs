//! Files that share blocks: `varve clone`, `cp` under `varve run` and through the mount, and the calls
//! themselves.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, run_ok, text_of, varve};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: usize = 3_000_001;

fn pool() -> Option<Pool> {
    (!cannot_mount()).then(|| Pool::up(&["--nvm", "shm:96M", "--ssd", "256M", "--hdd", "0"]))
}

fn data(seed: usize) -> Vec<u8> {
    (0..SIZE).map(|at| (at / 11 % 249 + seed) as u8).collect()
}

fn used(pool: &Pool) -> u64 {
    run_ok(varve().arg("digest").arg(pool.dir()));
    let status: serde_json::Value =
        serde_json::from_str(&text_of(varve().arg("status").arg(pool.dir()).arg("--json"))).unwrap();
    let tiers = status["tiers"].as_array().unwrap();
    tiers
        .iter()
        .map(|tier| tier["used_bytes"].as_u64().unwrap())
        .sum()
}

fn in_run(pool: &Pool) -> Command {
    let mut run = varve();
    run.args(["run", "--session-after", "0", "--mount"])
        .arg(pool.mnt())
        .arg("--");
    run
}

#[test]
fn clone_is_made_whole_and_under_a_free_name() {
    let Some(pool) = pool() else { return };
    let file = |name: &str| -> PathBuf { pool.mnt().join(name) };
    std::fs::write(file("a"), data(1)).unwrap();
    std::fs::write(file("taken"), "something else").unwrap();
    std::fs::create_dir(file("d")).unwrap();
    let before = used(&pool);
    let clone = |arguments: &[&Path]| varve().arg("clone").args(arguments).output().unwrap();
    let said = clone(&[&file("a"), &file("b")]);
    assert!(said.status.success(), "{said:?}");
    assert!(
        String::from_utf8_lossy(&said.stdout).contains("shares 3000001 bytes"),
        "{said:?}"
    );
    assert!(clone(&[&file("a"), &file("d")]).status.success());
    let refused = clone(&[&file("a"), &file("taken")]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("--force"),
        "{refused:?}"
    );
    assert_eq!(std::fs::read(file("taken")).unwrap(), b"something else");
    assert!(
        clone(&[Path::new("--force"), &file("a"), &file("taken")])
            .status
            .success()
    );
    for name in ["a", "b", "d/a", "taken"] {
        assert!(std::fs::read(file(name)).unwrap() == data(1), "{name}");
    }
    assert!(used(&pool) < before + SIZE as u64 / 2, "{} {before}", used(&pool));
    // Elsewhere, and what is no file.
    let outside = pool.outside().join("x");
    std::fs::write(&outside, "x").unwrap();
    for (source, target, why) in [
        (outside.as_path(), file("c").as_path(), "not in a mount of a pool"),
        (file("a").as_path(), outside.as_path(), "not in a mount of a pool"),
        (file("d").as_path(), file("c").as_path(), "not a regular file"),
        (file("none").as_path(), file("c").as_path(), "No such file"),
    ] {
        let refused = clone(&[source, target]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(why), "{said}");
    }
    let names = std::fs::read_dir(pool.mnt()).unwrap().count();
    assert_eq!(names, 4, "nothing half made is left");
    pool.fsck_clean();
}

#[test]
fn clone_to_itself_is_refused_and_any_name_is_taken() {
    let Some(pool) = pool() else { return };
    let file = |name: &[u8]| -> PathBuf { pool.mnt().join(OsStr::from_bytes(name)) };
    std::fs::write(file(b"a"), data(1)).unwrap();
    std::fs::hard_link(file(b"a"), file(b"hard")).unwrap();
    let clone = |to: &Path| {
        let mut command = varve();
        command
            .args(["clone", "--force", "--json"])
            .arg(file(b"a"))
            .arg(to);
        command.output().unwrap()
    };
    for same in [&b"a"[..], b"hard"] {
        let said = clone(&file(same));
        assert_eq!(said.status.code(), Some(1), "{said:?}");
        assert!(
            String::from_utf8_lossy(&said.stderr).contains("are the same file"),
            "{said:?}"
        );
    }
    assert_eq!(std::fs::metadata(file(b"a")).unwrap().nlink(), 2);
    for name in [&b"b\xff"[..], &[b'n'; 255]] {
        let said = clone(&file(name));
        assert!(said.status.success(), "{said:?}");
        let value: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
        assert_eq!(value["bytes"], SIZE);
        assert_eq!(std::fs::read(file(name)).unwrap(), data(1));
    }
    assert_eq!(std::fs::read_dir(pool.mnt()).unwrap().count(), 4);
}

#[test]
fn cp_shares_blocks_under_run_and_through_the_mount() {
    let Some(pool) = pool() else { return };
    let file = |name: &str| -> PathBuf { pool.mnt().join(name) };
    std::fs::write(file("a"), data(2)).unwrap();
    let before = used(&pool);
    run_ok(
        in_run(&pool)
            .args(["cp", "--reflink=always"])
            .arg(file("a"))
            .arg(file("b")),
    );
    run_ok(Command::new("cp").arg(file("a")).arg(file("c")));
    assert!(used(&pool) < before + SIZE as u64 / 2, "{} {before}", used(&pool));
    // Each is written by another way.
    let changed = |seed: usize, at: usize| {
        let mut bytes = data(2);
        bytes[at..at + 9000].fill(seed as u8);
        bytes
    };
    std::fs::write(pool.outside().join("part"), [7; 9000]).unwrap();
    let dd = |mut command: Command, name: &str, at: usize| {
        let part = pool.outside().join("part");
        run_ok(
            command
                .arg(format!("if={}", part.display()))
                .arg(format!("of={}", file(name).display()))
                .args([
                    "conv=notrunc",
                    "oflag=seek_bytes",
                    &format!("seek={at}"),
                    "status=none",
                ]),
        );
    };
    dd(Command::new("dd"), "b", 5000);
    let mut run = in_run(&pool);
    run.arg("dd");
    dd(run, "c", 1_000_000);
    assert!(std::fs::read(file("a")).unwrap() == data(2));
    assert!(std::fs::read(file("b")).unwrap() == changed(7, 5000));
    assert!(std::fs::read(file("c")).unwrap() == changed(7, 1_000_000));
    std::fs::remove_file(file("a")).unwrap();
    assert!(std::fs::read(file("b")).unwrap() == changed(7, 5000));
    pool.fsck_clean();
}

#[test]
fn calls_on_clones_are_answered_as_on_other_file_systems() {
    let Some(pool) = pool() else { return };
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no C compiler (cc)");
        return;
    }
    let program = pool.outside().join("clones");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload/clones.c");
    run_ok(
        Command::new("cc")
            .args(["-O1", "-w", "-o"])
            .arg(&program)
            .arg(source),
    );
    run_ok(in_run(&pool).arg(&program).current_dir(pool.mnt()));
    pool.fsck_clean();
}
