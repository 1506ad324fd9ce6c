//! A pool's mount that takes the kernel's requests by io_uring.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../crates/fuse-shim/tests/switch/mod.rs"]
mod switch;

use common::{Pool, cannot_mount, kill, text_of, varve, wait_until};
use std::process::{Command, Stdio};
use switch::UringSwitch;

const SMALL: [&str; 6] = ["--nvm", "64M", "--ssd", "128M", "--hdd", "256M"];

/// Switches FUSE over io_uring on in the kernel; `None` where it cannot be.
fn switched_on() -> Option<UringSwitch> {
    UringSwitch::set(true)
        .inspect_err(|error| eprintln!("SKIPPED: FUSE over io_uring cannot be switched on: {error}"))
        .ok()
}

/// Whether the pool's mount has threads that take requests from rings.
fn is_on_rings(pool: &Pool) -> bool {
    let mount = pool.child_pid("mount").unwrap();
    let tasks = std::fs::read_dir(format!("/proc/{mount}/task"))
        .unwrap()
        .flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .any(|name| name.starts_with("varve-ring"))
}

#[test]
fn mount_by_io_uring_outlives_its_server() {
    if cannot_mount() {
        return;
    }
    let Some(_on) = switched_on() else {
        return;
    };
    let said = text_of(varve().args(["doctor", "--json"]));
    assert!(
        said.contains("FUSE over io_uring") && said.contains("on: "),
        "{said}"
    );
    let mut pool = Pool::up(&SMALL);
    assert!(is_on_rings(&pool));
    let body: Vec<u8> = (0..5_000_000_u32).map(|i| (i / 7) as u8).collect();
    std::fs::write(pool.mnt().join("large"), &body).unwrap();
    assert!(std::fs::read(pool.mnt().join("large")).unwrap() == body);

    // Killed, and started again by `up`.
    let killed = pool.child_pid("mount").unwrap();
    kill(killed);
    wait_until("another mount", || {
        pool.child_pid("mount").is_some_and(|pid| pid != killed) && pool.mnt().join("large").exists()
    });
    assert!(is_on_rings(&pool));

    // Stopped, with a request under way that only it can end.
    let stopped = pool.leave_a_hung_mount();
    let mut waiting = Command::new("stat")
        .arg(pool.mnt().join("never looked at"))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    pool.start();
    assert!(!waiting.wait().unwrap().success(), "its request fails");
    wait_until("the end of the stopped mount", || !common::alive(stopped));
    assert!(std::fs::read(pool.mnt().join("large")).unwrap() == body);
    pool.down();
    pool.fsck_clean();
}

#[test]
fn option_nouring_leaves_the_device() {
    if cannot_mount() {
        return;
    }
    let Some(_on) = switched_on() else {
        return;
    };
    let arguments: Vec<&str> = SMALL.into_iter().chain(["-o", "nouring"]).collect();
    let mut pool = Pool::up(&arguments);
    assert!(!is_on_rings(&pool));
    std::fs::write(pool.mnt().join("file"), b"here").unwrap();
    pool.down();
}
