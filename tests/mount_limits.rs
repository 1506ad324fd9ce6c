//! What the mount cannot do is refused, or done, as docs/reference/semantics.md ("What the mount cannot do")
//! says.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, run_ok, text_of, varve, wait_until};
use rustix::fs::{
    FallocateFlags, FlockOperation, XattrFlags, fallocate, flock, ioctl_ficlone, ioctl_getflags, setxattr,
};
use rustix::io::Errno;
use std::fs::{File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

const SMALL: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "128M", "--hdd", "256M"];

#[test]
fn calls_that_are_not_there_say_so() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL);
    let mnt = pool.mnt();
    let path = mnt.join("f");
    std::fs::write(&path, vec![7; 20_000]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let other = File::create(mnt.join("g")).unwrap();

    // An ACL as the tools write it: version 2, for the owner, the group and the others.
    let acl: Vec<u8> = [2_u32.to_le_bytes().to_vec()]
        .into_iter()
        .chain([1_u16, 4, 32].map(|tag| {
            let entry = [tag.to_le_bytes(), 6_u16.to_le_bytes()].concat();
            [entry, u32::MAX.to_le_bytes().to_vec()].concat()
        }))
        .flatten()
        .collect();
    for name in ["system.posix_acl_access", "system.other"] {
        let set = setxattr(&path, name, &acl, XattrFlags::empty());
        assert_eq!(set, Err(Errno::OPNOTSUPP), "{name}");
    }
    for mode in [
        FallocateFlags::COLLAPSE_RANGE,
        FallocateFlags::INSERT_RANGE,
        FallocateFlags::UNSHARE_RANGE,
    ] {
        assert_eq!(fallocate(&file, mode, 0, 4096), Err(Errno::OPNOTSUPP), "{mode:?}");
    }
    assert_eq!(ioctl_getflags(&file).err(), Some(Errno::NOTTY));
    assert_eq!(ioctl_ficlone(&other, &file), Err(Errno::OPNOTSUPP));

    // None of it has changed anything.
    assert_eq!(std::fs::read(&path).unwrap(), vec![7; 20_000]);
    assert_eq!(std::fs::read_dir(&mnt).unwrap().count(), 2);
    drop((file, other));
    pool.down();
}

#[test]
fn time_of_birth_is_told_and_stays() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL);
    let path = pool.mnt().join("f");
    let before = SystemTime::now() - Duration::from_secs(1);
    std::fs::write(&path, "x").unwrap();
    let born = |path: &Path| std::fs::metadata(path).unwrap().created().unwrap();
    let at = born(&path);
    assert!(before <= at && at <= SystemTime::now(), "{at:?}");
    std::fs::write(&path, "more").unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    File::open(&path)
        .unwrap()
        .set_modified(SystemTime::UNIX_EPOCH)
        .unwrap();
    let moved = pool.mnt().join("g");
    std::fs::rename(&path, &moved).unwrap();
    assert_eq!(born(&moved), at);
    // The same under `varve run`, and from the mount beside it.
    let told = |command: &mut Command| text_of(command.args(["stat", "-c", "%W %.9W"]).arg(&moved));
    let mut run = varve();
    run.args(["run", "--session-after", "0", "--mount"])
        .arg(pool.mnt())
        .arg("--");
    assert_eq!(told(&mut run), told(&mut Command::new("env")));
    pool.down();
    pool.start();
    assert_eq!(born(&moved), at);
    pool.down();
}

#[test]
fn locks_are_those_of_one_mount() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL);
    let second = pool.outside().join("second");
    std::fs::create_dir(&second).unwrap();
    let mut mount = varve().arg("mount").arg(pool.dir()).arg(&second).spawn().unwrap();
    std::fs::write(pool.mnt().join("f"), "x").unwrap();
    wait_until("the second mount", || second.join("f").exists());
    let open = |dir: &Path| File::open(dir.join("f")).unwrap();
    let (one, same, other) = (open(&pool.mnt()), open(&pool.mnt()), open(&second));
    let alone = FlockOperation::NonBlockingLockExclusive;
    flock(&one, alone).unwrap();
    assert_eq!(flock(&same, alone), Err(Errno::WOULDBLOCK));
    flock(&other, alone).unwrap();
    drop((one, same, other));
    run_ok(varve().arg("umount").arg(&second));
    assert!(mount.wait().unwrap().success());
    pool.down();
}

/// Runs a program as an ordinary user with one supplementary group, or none.
fn as_user(groups: &str, program: &[&str], path: &Path) -> Output {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534"]);
    match groups {
        "" => command.arg("--clear-groups"),
        some => command.arg(format!("--groups={some}")),
    };
    command.args(program).arg(path).output().unwrap()
}

#[test]
fn groups_and_set_id_bits_are_the_kernels_and_those_of_the_caller() {
    if cannot_mount() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: needs root, to become another user");
        return;
    }
    let mut pool = Pool::up(&[&SMALL[..], &["--allow-other"]].concat());
    let mnt = pool.mnt();
    // Up to the mount everybody may pass.
    for dir in [pool.outside(), &pool.dir()] {
        std::fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    }
    std::fs::set_permissions(&mnt, Permissions::from_mode(0o755)).unwrap();
    let shared = mnt.join("shared");
    std::fs::write(&shared, "of a group").unwrap();
    std::os::unix::fs::chown(&shared, Some(0), Some(7_777)).unwrap();
    std::fs::set_permissions(&shared, Permissions::from_mode(0o660)).unwrap();
    assert!(!as_user("", &["cat"], &shared).status.success());
    let read = as_user("7777", &["cat"], &shared);
    assert_eq!(read.stdout, b"of a group", "{read:?}");

    let program = mnt.join("program");
    for (user, mode, left) in [("", 0o4777, 0o0777), ("root", 0o4777, 0o4777)] {
        std::fs::write(&program, "#!").unwrap();
        std::fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
        if user == "root" {
            run_ok(Command::new("truncate").args(["--size=1"]).arg(&program));
        } else {
            let cut = as_user(user, &["truncate", "--size=1"], &program);
            assert!(cut.status.success(), "{cut:?}");
        }
        let meta = std::fs::metadata(&program).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.len()), (left, 1), "cut by {user:?}");
    }
    pool.down();
}

#[test]
fn syncfs_says_yes() {
    if cannot_mount() {
        return;
    }
    let mut pool = Pool::up(&SMALL);
    std::fs::write(pool.mnt().join("f"), "x").unwrap();
    run_ok(Command::new("sync").arg("-f").arg(pool.mnt()));
    pool.down();
}
