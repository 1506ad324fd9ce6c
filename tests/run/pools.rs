//! Several pools at once under one `varve run`: each path and descriptor belongs to one of them, and between
//! two of them everything is as between two file systems of the kernel.

use super::{cannot_run, counters, has, of_c};
use crate::common::{KernelsOwn, Pool, kill, memory_dir, plant, run_ok, same_tree, text_of, varve};
use std::path::Path;
use std::process::{Command, Output};

const SIZES: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "256M", "--hdd", "0"];

/// `varve run --stats` with the mounts of these pools.
fn served(pools: &[&Pool]) -> Command {
    let mut command = varve();
    command.args(["run", "--stats", "--session-after", "0"]);
    for pool in pools {
        command.arg("--mount").arg(pool.mnt());
    }
    command.arg("--");
    command
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn two_pools_are_to_each_other_as_two_file_systems_of_the_kernel() {
    if cannot_run() || !has("cc") {
        return;
    }
    let (mut one, mut other) = (Pool::up(&SIZES), Pool::up(&SIZES));
    let program = of_c::compile(&one, "pools", &[]);
    let (own, memory) = (KernelsOwn::new(one.outside()), memory_dir());
    // A relative path from the first directory to the second, by way of the root.
    let over = |from: &Path, to: &Path| {
        let up = "../".repeat(from.canonicalize().expect("it is there").components().count() - 1);
        let to = to.canonicalize().expect("it is there");
        format!("{up}{}", to.strip_prefix("/").expect("absolute").display())
    };
    let same_device = own.kind() == "tmpfs";
    if same_device {
        eprintln!("SKIPPED: needs two file systems of the kernel to compare with");
        return;
    }
    let args = |from: &Path, to: &Path| [from.into(), to.into(), over(from, to).into()];
    let ask = |mut command: Command, from: &Path, to: &Path| {
        let args: [std::ffi::OsString; 3] = args(from, to);
        run_ok(command.args(args))
    };
    let expected = words(&ask(Command::new(&program), own.dir(), memory.path()));
    assert!(expected.ends_with("good\n"), "{expected}");
    let mut command = served(&[&one, &other]);
    command.arg(&program);
    let output = ask(command, &one.mnt(), &other.mnt());
    assert_eq!(words(&output), expected);
    let counts = counters(&output);
    assert_eq!(counts["sessions"]["opened"], 4, "two by each process: {counts}");
    for call in [
        "rename",
        "link",
        "renameat2",
        "copy_file_range",
        "symlink",
        "truncate",
    ] {
        assert_eq!(
            counts["fell_back"][call],
            serde_json::Value::Null,
            "{call}: {counts}"
        );
        assert!(counts["served"][call].as_u64() > Some(0), "{call}: {counts}");
    }
    for pool in [&mut one, &mut other] {
        pool.down();
        pool.fsck_clean();
    }
}

#[test]
fn programs_copy_move_and_compare_between_two_pools() {
    if cannot_run() {
        return;
    }
    let (mut one, mut other) = (Pool::up(&SIZES), Pool::up(&SIZES));
    plant(&one.mnt());
    let expected = memory_dir();
    plant(expected.path());
    let (a, b) = (one.mnt(), other.mnt());
    let script = format!(
        "cd {a}; cp -a a {b}/copied; mv {b}/copied/b {a}/moved; mv {a}/moved {b}/copied/b; \
         tar cf - a | tar xf - -C {b}; cd {b}; diff -r --no-dereference a copied; \
         diff -r --no-dereference a {a}/a; mv a {a}/back; ls {a}; ls {b}; find {a}/back -type f | wc -l",
        a = a.display(),
        b = b.display()
    );
    let output = run_ok(served(&[&one, &other]).args(["sh", "-euc", &script]));
    assert_eq!(words(&output), "a\nback\ncopied\n203\n");
    same_tree(&a.join("a"), &expected.path().join("a"));
    same_tree(&a.join("back"), &expected.path().join("a"));
    same_tree(&b.join("copied"), &expected.path().join("a"));
    for pool in [&mut one, &mut other] {
        pool.down();
        pool.fsck_clean();
    }
}

#[test]
fn a_run_without_a_mount_serves_every_pool_and_one_with_a_pool_only_that() {
    if cannot_run() {
        return;
    }
    let (one, other) = (Pool::up(&SIZES), Pool::up(&SIZES));
    let script = format!(
        "echo one > {}/f; echo other > {}/f",
        one.mnt().display(),
        other.mnt().display()
    );
    let run = |options: &[&Path]| {
        let mut command = varve();
        command.args(["run", "--stats", "--session-after", "0"]);
        command.args(options).args(["--", "sh", "-euc", &script]);
        counters(&run_ok(&mut command))["sessions"]["opened"].as_u64()
    };
    let (pool, mount) = (Path::new("--pool"), Path::new("--mount"));
    assert_eq!(run(&[]), Some(2));
    assert_eq!(run(&[pool, &one.dir()]), Some(1));
    assert_eq!(run(&[pool, &one.dir(), mount, &other.mnt()]), Some(2));
    assert_eq!(run(&[mount, &one.mnt(), mount, &one.mnt()]), Some(1));
    let text = |pool: &Pool| text_of(Command::new("cat").arg(pool.mnt().join("f")));
    assert_eq!((text(&one).as_str(), text(&other).as_str()), ("one\n", "other\n"));
}

#[test]
fn a_pool_that_hangs_is_an_error_only_where_it_was_asked_for() {
    if cannot_run() {
        return;
    }
    let one = Pool::up(&SIZES);
    let mut other = Pool::up(&SIZES);
    let stopped = other.leave_a_hung_mount();
    let file = one.mnt().join("f");
    let run = |options: &[&Path]| {
        let mut command = varve();
        command.args(["run", "--stats", "--session-after", "0"]);
        command.args(options).args(["--", "touch"]).arg(&file);
        command.output().expect("it starts")
    };
    let output = run(&[]);
    let asked = run(&[Path::new("--pool"), &one.dir(), Path::new("--pool"), &other.dir()]);
    kill(stopped);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("works through the mount"), "{said}");
    assert_eq!(counters(&output)["sessions"]["opened"], 1);
    assert!(!asked.status.success());
    assert!(file.exists());
}
