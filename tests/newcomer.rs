//! The first ten minutes on other machines: each thing that a host may lack is told apart, with what to do,
//! and what can work works.
//!
//! Hosts are simulated by mount namespaces (`unshare -m`), other users and small file systems; that needs
//! root, and is skipped loudly without.
#![allow(clippy::unwrap_used)]

mod common;

use common::{LIMIT, LiveDirs, cannot_mount, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use varve_format::superblock::{SUPERBLOCK_SIZE, Superblock};
use zerocopy::{FromBytes, IntoBytes};

const SMALL: [&str; 6] = ["--nvm", "32M", "--ssd", "64M", "--hdd", "0"];
const NOBODY: u32 = 65534;

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Runs a script of `sh` in a mount namespace of its own; `None`, loudly, if there cannot be one.
fn in_namespace(script: &str, arguments: &[&Path]) -> Option<Output> {
    let works = Command::new("unshare")
        .args(["-m", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !works {
        eprintln!("SKIPPED: mount namespaces need root and `unshare` (util-linux)");
        return None;
    }
    let output = Command::new("unshare")
        .args([
            "-m",
            "--propagation",
            "private",
            "sh",
            "-ec",
            script,
            "sh",
            env!("CARGO_BIN_EXE_varve"),
        ])
        .args(arguments)
        .output()
        .unwrap();
    Some(output)
}

/// A directory that an ordinary user may use, with the program in it; `None`, loudly, if this test is not run
/// by root.
fn for_nobody() -> Option<(tempfile::TempDir, PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: becoming another user needs root");
        return None;
    }
    let temp = tempfile::tempdir().unwrap();
    std::fs::set_permissions(temp.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = temp.path().join("varve");
    std::fs::copy(env!("CARGO_BIN_EXE_varve"), &program).unwrap();
    let home = temp.path().join("home");
    std::fs::create_dir(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    Some((temp, program))
}

fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.uid(NOBODY).gid(NOBODY).current_dir("/");
    command
}

#[test]
fn missing_dev_fuse_is_named_with_what_to_do() {
    let temp = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs none /dev; \"$1\" up \"$2\" < /proc/self/mounts";
    let Some(output) = in_namespace(script, &[&temp.path().join("pool")]) else {
        return;
    };
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("/dev/fuse is not there") && text.contains("modprobe fuse"),
        "{text}"
    );
    assert!(!temp.path().join("pool").exists(), "nothing is made before");
}

#[test]
fn missing_fusermount_is_named_when_an_ordinary_user_mounts() {
    let Some((temp, program)) = for_nobody() else {
        return;
    };
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: no /dev/fuse");
        return;
    }
    let output = as_nobody(&program)
        .env("PATH", "/nonexistent")
        .arg("up")
        .arg(temp.path().join("home/pool"))
        .output()
        .unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("fusermount3") && text.contains("apt-get install fuse3"),
        "{text}"
    );
}

#[test]
fn forbidden_allow_other_is_named_when_an_ordinary_user_asks_for_it() {
    let Some((temp, program)) = for_nobody() else {
        return;
    };
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: no /dev/fuse");
        return;
    }
    // A helper that is only looked for, and a fuse.conf without the line.
    let bin = temp.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::write(bin.join("fusermount3"), "#!/bin/sh\nexit 1\n").unwrap();
    let empty = temp.path().join("fuse.conf");
    std::fs::write(&empty, "# user_allow_other\n").unwrap();
    let script = "if [ -e /etc/fuse.conf ]; then mount --bind \"$4\" /etc/fuse.conf; fi\n\
                  exec setpriv --reuid=65534 --regid=65534 --clear-groups env PATH=\"$3\" \"$2\" up \
                  --allow-other \"$5\"";
    let Some(output) = in_namespace(script, &[&program, &bin, &empty, &temp.path().join("home/pool")]) else {
        return;
    };
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("user_allow_other") && text.contains("/etc/fuse.conf"),
        "{text}"
    );
}

#[test]
fn ordinary_user_has_a_pool_of_their_own() {
    let Some((temp, program)) = for_nobody() else {
        return;
    };
    let helper = ["/usr/bin/fusermount3", "/bin/fusermount3"]
        .iter()
        .find(|path| std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o4000 != 0));
    if helper.is_none() || cannot_mount() {
        eprintln!(
            "SKIPPED: an ordinary user needs /dev/fuse and a set-uid fusermount3 (apt-get install fuse3)"
        );
        return;
    }
    let pool = temp.path().join("home/pool");
    let _live = LiveDirs::of(&pool);
    // A /dev/fuse as distributions have it, open to all.
    let node = temp.path().join("dev");
    std::fs::create_dir(&node).unwrap();
    let script = "mount -t tmpfs none \"$4\"; mknod -m 666 \"$4/fuse\" c 10 229; mount --bind \"$4/fuse\" \
        /dev/fuse\n\
                  u='setpriv --reuid=65534 --regid=65534 --clear-groups'; cd /\n\
                  $u \"$2\" up --detach \"$3\" --nvm 32M --ssd 64M --hdd 0\n\
                  $u sh -ec 'cd \"$1/mnt\"; echo text > a; mkdir d; mv a d/b; cat d/b; ln -s b d/c' \
                  sh \"$3\"\n\
                  $u \"$2\" status \"$3\"\n\
                  $u \"$2\" down --force \"$3\"\n\
                  $u \"$2\" fsck \"$3\"";
    let Some(output) = in_namespace(script, &[&program, &pool, &node]) else {
        return;
    };
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("text\n") && text.contains(" 65534 ") && text.contains("clean"),
        "{text}"
    );
}

#[test]
fn refused_dev_fuse_is_named_when_an_ordinary_user_mounts() {
    let Some((temp, program)) = for_nobody() else {
        return;
    };
    let (node, bin) = (temp.path().join("dev"), temp.path().join("bin"));
    std::fs::create_dir(&node).unwrap();
    std::fs::create_dir(&bin).unwrap();
    std::fs::write(bin.join("fusermount3"), "#!/bin/sh\nexit 1\n").unwrap();
    if !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: no /dev/fuse");
        return;
    }
    let script = "mount -t tmpfs none \"$3\"; mknod -m 600 \"$3/fuse\" c 10 229; mount --bind \"$3/fuse\" \
        /dev/fuse\n\
                  exec setpriv --reuid=65534 --regid=65534 --clear-groups env PATH=\"$4\" \"$2\" up \"$5\"";
    let Some(output) = in_namespace(script, &[&program, &node, &bin, &temp.path().join("home/pool")]) else {
        return;
    };
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("/dev/fuse cannot be opened") && text.contains("chmod 666"),
        "{text}"
    );
}

#[test]
fn small_dev_shm_is_told_and_works() {
    if cannot_mount() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let pool = temp.path().join("pool");
    // A large NVM tier, so that logs would want more than there is.
    let script = "mount -t tmpfs -o size=64m none /dev/shm\n\
                  \"$1\" up --detach \"$2\" --nvm 1G --ssd 0 --hdd 0\n\
                  head -c 50000000 /dev/zero | tr '\\0' x > \"$2/mnt/file\"\n\
                  cp \"$2/mnt/file\" \"$2/mnt/copy\"; cmp \"$2/mnt/file\" \"$2/mnt/copy\"\n\
                  \"$1\" status \"$2\"\n\
                  \"$1\" down --force \"$2\"";
    let Some(output) = in_namespace(script, &[&pool]) else {
        return;
    };
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("/dev/shm has only"), "{text}");
    run_ok(varve().arg("fsck").arg(&pool));
}

#[test]
fn host_without_o_direct_is_told_and_works() {
    let temp = tempfile::tempdir().unwrap();
    // ramfs takes no O_DIRECT.
    let script = "mkdir \"$2/ram\"; mount -t ramfs none \"$2/ram\"; truncate -s 64M \"$2/ram/ssd\"\n\
                  \"$1\" mkfs \"$2/pool\" --nvm 32M --ssd \"$2/ram/ssd\" --hdd 0\n\
                  \"$1\" serve \"$2/pool\" & p=$!\n\
                  for i in $(seq 300); do \"$1\" status \"$2/pool\" 2> /dev/null && break; sleep 0.1; done\n\
                  kill $p; wait $p";
    let _live = LiveDirs::of(&temp.path().join("pool"));
    let Some(output) = in_namespace(script, &[temp.path()]) else {
        return;
    };
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("does not take O_DIRECT"), "{text}");
}

#[test]
fn missing_io_uring_is_told_and_works() {
    let temp = tempfile::tempdir().unwrap();
    let pool = temp.path().join("pool");
    let _live = LiveDirs::of(&pool);
    run_ok(varve().arg("mkfs").arg(&pool).args(SMALL));
    let toml = std::fs::read_to_string(pool.join("varve.toml")).unwrap();
    std::fs::write(pool.join("varve.toml"), with_setting(&toml, "io_uring = false")).unwrap();
    let mut serve = varve()
        .arg("serve")
        .arg(&pool)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the daemon", || {
        varve()
            .arg("status")
            .arg(&pool)
            .output()
            .unwrap()
            .status
            .success()
    });
    let text = text_of(varve().arg("status").arg(&pool));
    let _ = rustix::process::kill_process(
        rustix::process::Pid::from_raw(serve.id() as i32).unwrap(),
        rustix::process::Signal::TERM,
    );
    assert!(serve.wait().unwrap().success());
    assert!(text.contains("io_uring is not available here"), "{text}");
}

fn with_setting(toml: &str, line: &str) -> String {
    if toml.contains("[daemon]") {
        toml.replace("[daemon]", &format!("[daemon]\n{line}"))
    } else {
        format!("{toml}\n[daemon]\n{line}\n")
    }
}

/// A `varve up` in the foreground that is mounted.
fn up(pool: &Path, arguments: &[&str]) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = varve()
        .arg("up")
        .arg(pool)
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("Ctrl-C") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "varve up ended");
    }
    (child, out)
}

#[test]
fn second_up_and_a_shell_in_the_mount_are_told() {
    if cannot_mount() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let pool = temp.path().join("pool");
    let _live = LiveDirs::of(&pool);
    let (mut first, mut out) = up(&pool, &SMALL);
    let second = varve().arg("up").arg(&pool).output().unwrap();
    let text = said(&second);
    assert_eq!(second.status.code(), Some(1), "{text}");
    assert!(
        text.contains("another `varve up` serves") && text.contains("varve down"),
        "{text}"
    );
    // Somebody stands in the mount when Ctrl-C comes.
    let mut shell = Command::new("sleep")
        .arg("1000")
        .current_dir(pool.join("mnt"))
        .spawn()
        .unwrap();
    let pid = rustix::process::Pid::from_raw(first.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let (mut line, started) = (String::new(), std::time::Instant::now());
    while !line.contains("is in use") {
        line.clear();
        assert!(
            out.read_line(&mut line).unwrap() > 0 && started.elapsed() < LIMIT,
            "not told"
        );
    }
    assert!(
        line.contains(&format!("sleep (pid {})", shell.id())) && line.contains("Ctrl-C again"),
        "{line}"
    );
    assert!(first.try_wait().unwrap().is_none(), "it waits");
    shell.kill().unwrap();
    shell.wait().unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(first.wait().unwrap().success(), "{rest}");
    assert!(rest.contains("stopped"), "{rest}");
    run_ok(varve().arg("fsck").arg(&pool));
}

#[test]
fn newer_format_on_the_media_is_refused_and_untouched() {
    let temp = tempfile::tempdir().unwrap();
    let pool = temp.path().join("pool");
    let _live = LiveDirs::of(&pool);
    run_ok(varve().arg("mkfs").arg(&pool).args(SMALL));
    let nvm = std::fs::File::options()
        .read(true)
        .write(true)
        .open(pool.join("nvm.img"))
        .unwrap();
    for block in 0..2 {
        let mut bytes = [0; SUPERBLOCK_SIZE];
        nvm.read_exact_at(&mut bytes, block * 4096).unwrap();
        let mut superblock = Superblock::read_from_bytes(&bytes).unwrap();
        superblock.version = zerocopy::little_endian::U32::new(7);
        nvm.write_all_at(superblock.sealed().as_bytes(), block * 4096)
            .unwrap();
    }
    let before = std::fs::read(pool.join("nvm.img")).unwrap();
    for words in [&["serve"][..], &["fsck"], &["fsck", "--repair"]] {
        let output = varve().args(words).arg(&pool).output().unwrap();
        let text = said(&output);
        assert!(!output.status.success(), "{text}");
        assert!(
            text.contains("format version 7") && text.contains("use a newer varve"),
            "{text}"
        );
    }
    assert!(
        std::fs::read(pool.join("nvm.img")).unwrap() == before,
        "it was changed"
    );
}

/// A small file system in memory that is unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: PathBuf, mib: u64) -> Option<Self> {
        std::fs::create_dir(&at).unwrap();
        let size = format!("size={mib}m");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "none"])
            .arg(&at)
            .output()
            .is_ok_and(|output| output.status.success());
        if !mounted {
            eprintln!("SKIPPED: mounting a small tmpfs needs root");
        }
        mounted.then_some(Self(at))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

fn body(number: usize) -> Vec<u8> {
    let mut state = number as u64 + 1;
    (0..FILE / 8)
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_le_bytes()
        })
        .collect()
}

const FILE: usize = 4 << 20;

/// Writes a file; answers the errno if it did not work, and removes it then.
fn write_file(dir: &Path, number: usize) -> Result<(), i32> {
    let path = dir.join(format!("file-{number}"));
    let written = std::fs::write(&path, body(number)).and_then(|()| std::fs::File::open(&path)?.sync_all());
    written.map_err(|error| {
        let _ = std::fs::remove_file(&path);
        error.raw_os_error().unwrap_or(-1)
    })
}

#[test]
fn host_disk_smaller_than_the_tiers_gives_enospc_in_time_and_loses_nothing() {
    if cannot_mount() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(temp.path().join("disk"), 360) else {
        return;
    };
    let pool = disk.0.join("pool");
    let _live = LiveDirs::of(&pool);
    let mnt = pool.join("mnt");
    run_ok(
        varve()
            .args(["up", "--detach"])
            .arg(&pool)
            .args(["--nvm", "64M", "--ssd", "1G", "--hdd", "4G"]),
    );
    let outcome = std::panic::catch_unwind(|| {
        let seen = rustix::fs::statvfs(&mnt).unwrap();
        assert!(
            seen.f_bavail * seen.f_frsize < 400 << 20,
            "df shows what the host has: {}",
            seen.f_bavail
        );
        let status = text_of(varve().arg("status").arg(&pool));
        assert!(status.contains("`df` shows the smaller number"), "{status}");
        let mut whole = Vec::new();
        for number in 0.. {
            assert!(number < 120, "the disk never fills");
            match write_file(&mnt, number) {
                Ok(()) => whole.push(number),
                Err(errno) => {
                    assert_eq!(errno, libc::ENOSPC);
                    break;
                }
            }
        }
        assert!(whole.len() > 12, "{} files fit", whole.len());
        let check = |whole: &[usize]| {
            for number in whole {
                assert!(
                    std::fs::read(mnt.join(format!("file-{number}"))).unwrap() == body(*number),
                    "file {number}"
                );
            }
        };
        run_ok(varve().arg("digest").arg(&pool));
        check(&whole);
        // Somebody else takes what is left of the disk.
        let filler = disk.0.join("filler");
        let mut file = std::fs::File::create(&filler).unwrap();
        let zeros = vec![1; 1 << 20];
        while std::io::Write::write_all(&mut file, &zeros).is_ok() {}
        drop(file);
        for number in whole.drain(..4) {
            std::fs::remove_file(mnt.join(format!("file-{number}"))).unwrap();
        }
        for number in 1000..1006 {
            match write_file(&mnt, number) {
                Ok(()) => whole.push(number),
                Err(errno) => assert_eq!(errno, libc::ENOSPC, "file {number}"),
            }
        }
        check(&whole);
        std::fs::remove_file(&filler).unwrap();
        for number in whole.drain(..6) {
            std::fs::remove_file(mnt.join(format!("file-{number}"))).unwrap();
        }
        run_ok(varve().arg("digest").arg(&pool));
        wait_until("space after deleting", || write_file(&mnt, 2000).is_ok());
        whole.push(2000);
        check(&whole);
        let status: Value =
            serde_json::from_str(&text_of(varve().args(["status", "--json"]).arg(&pool))).unwrap();
        assert_eq!(status["latched"], Value::Null, "{status}");
        whole
    });
    let down = varve().args(["down", "--force"]).arg(&pool).output().unwrap();
    let whole = outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    assert!(down.status.success(), "{}", said(&down));
    run_ok(varve().arg("fsck").arg(&pool));
    assert!(text_of(varve().arg("scrub").arg(&pool)).contains("checksum"));
    assert!(!whole.is_empty());
}
