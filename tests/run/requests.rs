//! What programs that walk through trees ask the daemon: their time is the number of requests, so a test counts them.

#![allow(clippy::unwrap_used)]

use super::{cannot_run, has};
use crate::common::{Pool, run_ok, varve};
use std::path::Path;
use std::process::Command;

/// Directories of the tree, and files in each.
const DIRS: u64 = 60;
const FILES: u64 = 8;

/// Makes the tree, with files of 100 bytes to 30 KiB.
fn make_tree(at: &Path) {
    for dir in 0..DIRS {
        let dir = at.join(format!("sub{}/dir{dir}", dir % 7));
        std::fs::create_dir_all(&dir).unwrap();
        for file in 0..FILES {
            let bytes = vec![b'x'; 100 + (file * 4300) as usize];
            std::fs::write(dir.join(format!("file{file}")), bytes).unwrap();
        }
    }
}

fn requests(pool: &Pool) -> u64 {
    let output = run_ok(varve().arg("status").arg(pool.dir()).arg("--json"));
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    status["leases"]["requests"].as_u64().unwrap()
}

#[test]
fn programs_that_walk_trees_ask_for_many_files_at_once() {
    if cannot_run() || !has("cp") || !has("tar") {
        return;
    }
    let mut pool = Pool::up(&["--nvm", "shm:128M", "--ssd", "128M", "--hdd", "0"]);
    let mnt = pool.mnt();
    let run = |words: &str| {
        let before = requests(&pool);
        let mut command = varve();
        command.args(["run", "--session-after", "0", "--mount"]);
        command
            .arg(&mnt)
            .arg("--")
            .args(words.split(' '))
            .current_dir(&mnt);
        let output = run_ok(&mut command);
        // Those of `status` itself are in it.
        (
            requests(&pool) - before,
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let plain = |words: &str, at: &Path| {
        let mut words = words.split(' ');
        let mut command = Command::new(words.next().unwrap());
        let output = run_ok(command.args(words).current_dir(at));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    make_tree(&mnt.join("t"));
    // The mount gives back what it holds.
    run_ok(varve().arg("sync").arg(pool.dir()));
    let entries = DIRS * (FILES + 1);
    let check = |words: &str, most: u64| {
        let (asked, said) = run(words);
        eprintln!("{words}: {asked} requests for {entries} entries");
        assert!(asked <= most, "{words}: {asked} requests for {entries} entries");
        said
    };
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    // Of a tree that the mount has made, it gives its leases back, which are requests as well.
    let found = check("find t -type f", entries);
    assert_eq!(sorted(&found), sorted(&plain("find t -type f", &mnt)));
    let listed = check("ls -lR t", entries);
    assert_eq!(listed, plain("ls -lR t", &mnt));
    check("cp -a t t2", entries);
    // Before the mount looks at it.
    check("cp -a t2 t3", entries);
    check("rm -r t3", entries * 3 / 4);
    assert_eq!(plain("diff -r t t2", &mnt), "");
    let run_made = [
        ("find t2 -type f", 8),
        ("ls -lR t2", 3),
        ("grep -rc x t2", 3),
        ("tar cf - t2", 3),
    ];
    for (words, share) in run_made {
        let said = check(words, entries / share);
        if !words.starts_with("tar") {
            assert_eq!(sorted(&said), sorted(&plain(words, &mnt)));
        }
    }
    assert!(!mnt.join("t3").exists());
    pool.down();
    pool.fsck_clean();
}
