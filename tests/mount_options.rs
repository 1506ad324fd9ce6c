//! Options of mounts: the type, `mount.varve` for mount(8) and fstab(5), remount, and when reads move the
//! time of the last read.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{LiveDirs, Pool, SecondMount, cannot_mount, make_pool, run_ok, text_of, varve, wait_until};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SMALL: [&str; 6] = ["--nvm", "shm:64M", "--ssd", "128M", "--hdd", "0"];

/// Type, source and options of the mount at `at`.
fn shown(at: &Path) -> Option<(String, String, String)> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table
        .lines()
        .rfind(|line| line.split(' ').nth(4) == at.to_str())?;
    let words: Vec<&str> = line.split(' ').collect();
    let dash = words.iter().position(|word| *word == "-")?;
    Some((words[dash + 1].into(), words[dash + 2].into(), words[5].into()))
}

fn options(at: &Path) -> String {
    shown(at).expect("it is mounted").2
}

/// A pool that nobody serves, a directory to mount on, and the helper; unmounted and stopped when it goes.
struct Helper {
    _live: LiveDirs,
    temp: tempfile::TempDir,
}

impl Helper {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let live = LiveDirs::of(&temp.path().join("pool"));
        let this = Self { _live: live, temp };
        make_pool(&this.pool(), "64M", "0", "");
        std::fs::create_dir(this.at()).unwrap();
        std::os::unix::fs::symlink(varve().get_program(), this.temp.path().join("mount.varve")).unwrap();
        this
    }

    fn pool(&self) -> PathBuf {
        self.temp.path().join("pool")
    }

    fn at(&self) -> PathBuf {
        self.temp.path().join("at")
    }

    fn command(&self, options: &str) -> Command {
        let mut command = Command::new(self.temp.path().join("mount.varve"));
        command.arg(self.pool()).arg(self.at()).args(["-o", options]);
        command
    }

    /// Whether a process has the pool.
    fn is_in_use(&self) -> bool {
        ["lock", "up.lock"].into_iter().any(|name| {
            let file = std::fs::File::options().write(true).open(self.pool().join(name));
            let how = rustix::fs::FlockOperation::NonBlockingLockExclusive;
            file.is_ok_and(|file| rustix::fs::flock(&file, how).is_err())
        })
    }

    /// Unmounts, and waits for the end of what was started with the mount.
    fn umount(&self) {
        run_ok(Command::new("umount").arg(self.at()));
        wait_until("the end of the daemon", || !self.is_in_use());
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l"]).arg(self.at()).output();
        let _ = varve().args(["down", "--force"]).arg(self.pool()).output();
    }
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: only root mounts directly");
    }
    root
}

fn refused(output: &Output, code: i32, part: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(part), "{said}");
}

#[test]
fn mount_shows_its_type_and_its_pool() {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&SMALL);
    let (kind, source, options) = shown(&pool.mnt()).unwrap();
    assert_eq!(
        (&*kind, source),
        ("fuse.varve", format!("varve:{}", pool.dir().display()))
    );
    assert!(options.contains("relatime"), "{options}");
}

#[test]
fn mount_helper_starts_a_pool_that_ends_with_the_mount() {
    if cannot_mount() || !is_root() {
        return;
    }
    let helper = Helper::new();
    let said = run_ok(&mut helper.command("rw,noatime,nosuid,_netdev,nofail,x-systemd.automount"));
    // But for a word about memory that other pools of this machine have left.
    let said_more = |line: &&str| !line.contains("of pools that are gone");
    let stderr = String::from_utf8_lossy(&said.stderr);
    let lines = stderr.lines().filter(said_more).count();
    assert_eq!((said.stdout.len(), lines), (0, 0), "{said:?}");
    let (kind, source, options) = shown(&helper.at()).unwrap();
    assert_eq!(
        (&*kind, source),
        ("fuse.varve", format!("varve:{}", helper.pool().display()))
    );
    assert!(
        options.contains("noatime") && options.contains("nosuid"),
        "{options}"
    );
    std::fs::write(helper.at().join("f"), "there").unwrap();
    // A second one, of the same daemon.
    let second = helper.temp.path().join("second");
    std::fs::create_dir(&second).unwrap();
    let mut command = Command::new(helper.temp.path().join("mount.varve"));
    run_ok(command.arg(helper.pool()).arg(&second).args(["-n", "-o", "ro"]));
    assert_eq!(std::fs::read(second.join("f")).unwrap(), b"there");
    let error = std::fs::write(second.join("g"), "no").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    run_ok(Command::new("umount").arg(&second));
    // At once again: what ends is waited for.
    run_ok(Command::new("umount").arg(helper.at()));
    run_ok(&mut helper.command("rw"));
    assert_eq!(std::fs::read(helper.at().join("f")).unwrap(), b"there");
    helper.umount();
    run_ok(varve().arg("fsck").arg(helper.pool()));
}

#[test]
fn remount_changes_what_the_mount_allows_and_when_times_move() {
    if cannot_mount() || !is_root() {
        return;
    }
    let helper = Helper::new();
    run_ok(&mut helper.command("ro"));
    let file = helper.at().join("f");
    let read_only = |error: std::io::Error| error.raw_os_error() == Some(libc::EROFS);
    assert!(std::fs::write(&file, "1").is_err_and(read_only));
    run_ok(&mut helper.command("rw,remount"));
    std::fs::write(&file, "2").unwrap();
    run_ok(&mut helper.command("remount,ro,noatime"));
    assert!(options(&helper.at()).contains("noatime"));
    assert!(std::fs::write(&file, "3").is_err_and(read_only));
    // As mount(8) gives it, by the table's name of the source.
    let mut by_table = Command::new(helper.temp.path().join("mount.varve"));
    by_table
        .arg(format!("varve:{}", helper.pool().display()))
        .arg(helper.at());
    run_ok(by_table.args([
        "-o",
        "rw,remount,strictatime,user_id=0,group_id=0,default_permissions",
    ]));
    let said = options(&helper.at());
    assert!(!said.contains("noatime") && !said.contains("relatime"), "{said}");
    std::fs::write(&file, "4").unwrap();
    helper.umount();
}

#[test]
fn mount_helper_says_what_is_wrong_as_mount_does() {
    if cannot_mount() || !is_root() {
        return;
    }
    let helper = Helper::new();
    refused(&helper.command("nonsense").output().unwrap(), 1, "nonsense");
    refused(&helper.command("remount,ro").output().unwrap(), 32, "not a mount");
    std::fs::rename(helper.pool(), helper.temp.path().join("away")).unwrap();
    refused(&helper.command("rw").output().unwrap(), 32, "pool");
    let unplugged = helper.command("rw,nofail").output().unwrap();
    assert!(unplugged.status.success() && !unplugged.stderr.is_empty());
    std::fs::rename(helper.temp.path().join("away"), helper.pool()).unwrap();
    assert!(shown(&helper.at()).is_none());
}

/// mount(8) itself, with a table of file systems, in a mount namespace where /sbin holds the helper.
#[test]
fn mount_finds_the_helper_for_an_entry_of_fstab() {
    if cannot_mount() || !is_root() {
        return;
    }
    let helper = Helper::new();
    let fstab = helper.temp.path().join("fstab");
    let line = format!(
        "{} {} varve noatime,nofail,_netdev 0 0\n",
        helper.pool().display(),
        helper.at().display()
    );
    std::fs::write(&fstab, line).unwrap();
    let script = r#"set -eu
        mount -t tmpfs none /sbin
        ln -s "$VARVE" /sbin/mount.varve
        ln -s "$VARVE" /sbin/mount.fuse.varve
        PATH=$OLDPATH
        mount -T "$TAB" "$AT"
        grep " $AT .*noatime.* - fuse.varve varve:" /proc/self/mountinfo
        echo x > "$AT/f"
        mount -o remount,ro "$AT"
        ! echo y 2>/dev/null > "$AT/f"
        mount -o remount,rw "$AT"
        echo z > "$AT/f"
        umount "$AT"
        echo good"#;
    let tried = Command::new("unshare")
        .args(["-m", "sh", "-c", "mount -t tmpfs none /sbin"])
        .output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        eprintln!("SKIPPED: no mount namespace of our own (unshare -m, mount)");
        return;
    }
    let output = run_ok(
        Command::new("unshare")
            .args(["-m", "sh", "-c", script])
            .env("VARVE", varve().get_program())
            .env("TAB", &fstab)
            .env("AT", helper.at())
            .env("OLDPATH", std::env::var_os("PATH").unwrap_or_default()),
    );
    assert!(
        String::from_utf8_lossy(&output.stdout).ends_with("good\n"),
        "{output:?}"
    );
    wait_until("the end of the daemon", || !helper.is_in_use());
}

/// Steps on a file by the program `sparse`, directly or under `varve run`; what it said.
fn does(pool: &Pool, program: &Path, run: bool, file: &Path, steps: &[&str]) -> String {
    let mut command = Command::new(program);
    if run {
        command = varve();
        command
            .args(["run", "--session-after", "0", "--mount"])
            .arg(pool.mnt())
            .arg("--")
            .arg(program);
    }
    text_of(command.arg(file).args(steps))
}

#[test]
fn reads_move_times_as_the_options_say_by_every_way_in() {
    if cannot_mount() || !is_root() {
        return;
    }
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no C compiler (cc)");
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let program = temp.path().join("sparse");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload/sparse.c");
    run_ok(
        Command::new("cc")
            .args(["-O1", "-w", "-o"])
            .arg(&program)
            .arg(source),
    );
    // The last read was an hour ago and before the last change of the inode, and there is nothing in the page
    // cache.
    let old = ["w:0:100", "i", "d", "x"];
    for (option, once, twice) in [
        ("noatime", "same", "same"),
        ("relatime", "moved", "same"),
        ("strictatime", "moved", "moved"),
    ] {
        let mut arguments = SMALL.to_vec();
        arguments.extend(["-o", option]);
        let mut pool = Pool::up(&arguments);
        for (run, beside) in [(false, false), (true, false), (false, true), (true, true)] {
            let name = format!("{option}, under run: {run}, beside another: {beside}");
            let second = pool.outside().join(format!("second {run}"));
            let _second = beside.then(|| SecondMount::start(&pool, &second));
            let file = pool.mnt().join(format!("f {run} {beside}"));
            let steps: Vec<_> = old.iter().copied().chain(["c", "x", "c", "x"]).collect();
            let said = does(&pool, &program, run, &file, &steps);
            assert_eq!(said, format!("moved\n{once}\n{twice}\n"), "{name}");
        }
        pool.down();
    }
    // The setting of the pool, and a mount of it that has another option; and what is in the page cache
    // counts with `strictatime`.
    let mut pool = Pool::up(&SMALL);
    pool.down();
    let toml = pool.dir().join("varve.toml");
    let settings = std::fs::read_to_string(&toml).unwrap() + "atime = \"strictatime\"\n";
    std::fs::write(toml, settings).unwrap();
    pool.start();
    let said = options(&pool.mnt());
    assert!(!said.contains("noatime") && !said.contains("relatime"), "{said}");
    let file = pool.mnt().join("f");
    let steps = ["w:0:100", "x", "c", "x", "c", "x", "c", "x"];
    assert_eq!(does(&pool, &program, false, &file, &steps), "moved\n".repeat(4));
    run_ok(
        Command::new("mount")
            .args(["-i", "-o", "remount,noatime"])
            .arg(pool.mnt()),
    );
    // The mount's process follows.
    let still = || does(&pool, &program, false, &file, &["x", "c", "x"]) == "moved\nsame\n";
    wait_until("noatime", still);
    assert_eq!(
        does(&pool, &program, true, &file, &["x", "c", "x"]),
        "moved\nsame\n"
    );
    pool.down();
}
