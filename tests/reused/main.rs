//! Inode numbers that are used again, and what a kernel still hears of those that had them before.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

use common::{Pool, cannot_mount, run_ok};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use varve_format::Ino;
use varve_libfs::{Cred, Fs, FsOptions, Posix, SocketConnector};

const TIERS: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "64M", "--hdd", "0"];

/// Found as one `EIO` in 1.85 million operations (`docs/results/sharing.md`): an answer of the mount that
/// named a deleted file reached the kernel after one that named its number's next file, which the kernel then
/// took for the stale one of the two.
#[test]
fn late_answer_about_a_deleted_file_does_no_harm_to_the_next_one_of_its_number() {
    if cannot_mount() {
        return;
    }
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: cc is not installed");
        return;
    }
    let mut pool = Pool::up(&TIERS);
    let late = pool.outside().join("late");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reused/late.c");
    run_ok(
        Command::new("cc")
            .args(["-O1", "-pthread", "-o"])
            .arg(&late)
            .arg(source),
    );
    std::fs::create_dir(pool.mnt().join("names")).unwrap();
    let linked = || {
        let connector = SocketConnector {
            path: pool.dir().join("sock"),
        };
        let fs = Fs::mount(Arc::new(connector), FsOptions::default()).expect("a session");
        Posix::new(fs, Cred::root())
    };
    // Made by a program whose numbers the mount does not have in store.
    let maker = linked();
    let fd = maker
        .open(b"/names/old", libc::O_CREAT | libc::O_WRONLY, 0o600)
        .unwrap();
    maker.close(fd).unwrap();
    let number = maker.stat(b"/names/old").unwrap().key.number();
    drop(maker);

    let mut child = Command::new(&late)
        .arg(pool.mnt())
        .args(["names", &number.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut answer = || lines.next().expect("an answer").unwrap();
    let said = answer();
    if said.starts_with("skip") {
        eprintln!("SKIPPED: no userfaultfd here: errno {said}");
        assert!(child.wait().unwrap().success());
        return;
    }
    assert_eq!(said, "held 0");
    let remover = linked();
    remover.unlink(b"/names/old").unwrap();
    // With its session all that it has logged is digested.
    drop(remover);
    writeln!(input).unwrap();
    assert_eq!(answer(), "reused 0", "of inode {}", Ino::of_number(number));
    assert!(child.wait().unwrap().success());
    let again = std::fs::read_dir(pool.mnt())
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().ino())
        .find(|other| Ino::of_number(*other) == Ino::of_number(number));
    assert_ne!(again, Some(number), "the number that programs see was used again");
    pool.down();
    pool.fsck_clean();
}
