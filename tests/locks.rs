//! Locks of linked programs are those of the mount: what this process locks as a linked program keeps
//! programs on the mount and under `varve run` out, and the other way round, wherever the file is now and
//! whoever the user is. What only C can try (signals, `fork`, deadlocks) is in `crates/capi/tests/locks.c`;
//! histories of many processes are those of `tests/sharing`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{LiveDirs, Pool, cannot_mount, make_pool, memory_dir, varve, wait_until};
use nix::fcntl::{FcntlArg, fcntl};
use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use varve_libfs::posix::{Fd, NoLocks};
use varve_libfs::{Cred, Errno, Fs, FsOptions, Posix, SocketConnector};

const SMALL: [&str; 6] = ["--nvm", "32M", "--ssd", "64M", "--hdd", "0"];
/// How long a thread or process that must wait is given to begin to.
const A_MOMENT: Duration = Duration::from_millis(200);
/// An ordinary user.
const USER: u32 = 65_534;
/// Tells a test process that it is that user's program: the pool's directory.
const ENV: &str = "VARVE_LOCKS_POOL";

/// A linked program of this process' user.
fn linked(pool: &Path) -> Posix {
    let connector = SocketConnector {
        path: pool.join("sock"),
    };
    let fs = Fs::mount(Arc::new(connector), FsOptions::default()).expect("a session");
    let uid = rustix::process::geteuid().as_raw();
    let cred = Cred {
        uid,
        gid: uid,
        groups: Vec::new(),
    };
    Posix::new(fs, cred)
}

fn open(posix: &Posix, path: &str) -> Fd {
    posix.open(path.as_bytes(), libc::O_RDWR, 0).expect(path)
}

/// A plain program's file on the mount.
fn plain(path: impl AsRef<Path>) -> File {
    File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("it opens")
}

/// Whether a plain program could not have it for itself alone by `flock`.
fn is_locked(file: &File) -> bool {
    match file.try_lock() {
        Ok(()) => {
            file.unlock().unwrap();
            false
        }
        Err(TryLockError::WouldBlock) => true,
        Err(error) => panic!("{error}"),
    }
}

fn range(kind: i32, start: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: len,
        l_pid: 0,
    }
}

/// The lock that keeps a plain program from writing to a file, if there is one.
fn in_the_way(file: &File) -> Option<(i64, i64)> {
    let mut asked = range(libc::F_WRLCK, 0, 0);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut asked)).unwrap();
    (i32::from(asked.l_type) != libc::F_UNLCK).then_some((asked.l_start, asked.l_len))
}

const BUSY: Result<(), Errno> = Err(Errno(libc::EWOULDBLOCK));

/// A pool with a file `f`, and that file's path on the mount; `None` where nothing can be mounted.
fn pool_with(text: &[u8]) -> Option<(Pool, PathBuf)> {
    if cannot_mount() {
        return None;
    }
    let pool = Pool::up(&SMALL);
    let path = pool.mnt().join("f");
    std::fs::write(&path, text).unwrap();
    Some((pool, path))
}

#[test]
fn lock_by_one_way_keeps_the_others_out_and_its_holders_writes_are_seen() {
    let Some((pool, path)) = pool_with(b"first") else {
        return;
    };
    let (posix, file) = (linked(&pool.dir()), plain(&path));
    let fd = open(&posix, "/f");
    // The program of util-linux: `flock FILE COMMAND`.
    let run = |words: &[&str]| {
        let mut command = varve();
        command
            .args(["run", "--session-after", "0", "--mount"])
            .arg(pool.mnt());
        command.args(["--", "flock"]).args(words).arg(&path);
        command
    };
    let served_is_kept_out = || {
        let status = run(&["-n", "-E", "7"]).arg("true").status().unwrap();
        assert!(matches!(status.code(), Some(0 | 7)), "{status}");
        status.code() == Some(7)
    };

    posix.flock(fd, libc::LOCK_EX).unwrap();
    assert!(is_locked(&file) && served_is_kept_out());
    posix.flock(fd, libc::LOCK_SH).unwrap();
    assert!(is_locked(&file) && file.try_lock_shared().is_ok());
    file.unlock().unwrap();
    posix.flock(fd, libc::LOCK_UN).unwrap();
    assert!(!is_locked(&file) && !served_is_kept_out());
    file.lock().unwrap();
    assert_eq!(posix.flock(fd, libc::LOCK_EX | libc::LOCK_NB), BUSY);
    file.unlock().unwrap();
    assert_eq!(posix.flock(fd, libc::LOCK_NB), Err(Errno(libc::EINVAL)));

    // Who waits for the lock finds what was written under it.
    let mut script = run(&[]);
    let script = script.args(["sh", "-c", "echo locked; sleep 0.5; printf later > \"$0\""]);
    let mut holder = script.arg(&path).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    let mut lines = BufReader::new(holder.stdout.take().unwrap());
    lines.read_line(&mut said).unwrap();
    assert_eq!(said, "locked\n");
    assert_eq!(posix.flock(fd, libc::LOCK_EX | libc::LOCK_NB), BUSY);
    posix.flock(fd, libc::LOCK_EX).unwrap();
    let mut text = [0; 16];
    assert_eq!(posix.pread(fd, &mut text, 0), Ok(5));
    assert_eq!(&text[..5], b"later");
    posix.pwrite(fd, b"again", 0).unwrap();
    posix.flock(fd, libc::LOCK_UN).unwrap();
    file.lock().unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"again");
    file.unlock().unwrap();
    assert!(holder.wait().unwrap().success());
}

#[test]
fn record_locks_are_of_the_process_and_go_with_any_descriptor_of_the_file() {
    let Some((pool, path)) = pool_with(b"0123456789") else {
        return;
    };
    let file = plain(&path);
    let (one, two) = (linked(&pool.dir()), linked(&pool.dir()));
    let take = |posix: &Posix, fd, command, start| {
        posix.fcntl_lock(fd, command, &mut range(libc::F_WRLCK, start, 5))
    };
    let fd = open(&one, "/f");
    take(&one, fd, libc::F_SETLK, 10).unwrap();
    assert_eq!(in_the_way(&file), Some((10, 5)));
    // Neither another descriptor's end in the library nor one of another file.
    let other = one.open(b"/g", libc::O_CREAT | libc::O_RDWR, 0o644).unwrap();
    take(&one, other, libc::F_SETLK, 0).unwrap();
    one.close(other).unwrap();
    assert_eq!(in_the_way(&file), Some((10, 5)));
    // Another session's descriptor is one of the same process, whether it was ever locked or not.
    let second = open(&two, "/f");
    take(&two, second, libc::F_SETLK, 10).unwrap();
    two.close(open(&two, "/f")).unwrap();
    assert_eq!(in_the_way(&file), None);

    // A description's own stay until its last descriptor is closed, and keep others of the process out.
    take(&one, fd, libc::F_OFD_SETLK, 20).unwrap();
    assert_eq!(
        take(&two, second, libc::F_OFD_SETLK, 22),
        Err(Errno(libc::EAGAIN))
    );
    one.close(open(&one, "/f")).unwrap();
    let copy = one.dup(fd).unwrap();
    one.close(fd).unwrap();
    assert_eq!(in_the_way(&file), Some((20, 5)));
    one.dup2(other_file(&one), copy).unwrap();
    assert_eq!(in_the_way(&file), None);
    // A session that ends leaves none.
    take(&two, second, libc::F_SETLK, 30).unwrap();
    drop(two);
    assert_eq!(in_the_way(&file), None);
}

fn other_file(posix: &Posix) -> Fd {
    open(posix, "/g")
}

#[test]
fn range_counts_from_the_offset_and_from_the_end_that_the_file_has_now() {
    let Some((pool, path)) = pool_with(b"0123456789") else {
        return;
    };
    let file = plain(&path);
    let posix = linked(&pool.dir());
    let fd = open(&posix, "/f");
    posix.write(fd, &[7; 100]).unwrap();
    let relative = |kind: i32, whence: i32, start| libc::flock {
        l_whence: whence as i16,
        ..range(kind, start, 5)
    };
    let set = |mut lock| posix.fcntl_lock(fd, libc::F_OFD_SETLK, &mut lock);
    for (whence, start, at) in [(libc::SEEK_CUR, -10, 90), (libc::SEEK_END, 20, 120)] {
        set(relative(libc::F_WRLCK, whence, start)).unwrap();
        assert_eq!(in_the_way(&file), Some((at, 5)), "{whence}");
        set(relative(libc::F_UNLCK, whence, start)).unwrap();
        assert_eq!(in_the_way(&file), None, "{whence}");
    }
    let bad = |lock, errno| assert_eq!(set(lock), Err(Errno(errno)));
    bad(relative(libc::F_WRLCK, libc::SEEK_CUR, -101), libc::EINVAL);
    bad(relative(libc::F_WRLCK, libc::SEEK_CUR, i64::MAX), libc::EOVERFLOW);
    bad(relative(libc::F_WRLCK, 9, 0), libc::EINVAL);

    // Who asks is told of the lock as it is, or that there is none and nothing else.
    let mut asked = relative(libc::F_WRLCK, libc::SEEK_CUR, 0);
    posix.fcntl_lock(fd, libc::F_OFD_GETLK, &mut asked).unwrap();
    let free = (asked.l_type, asked.l_whence, asked.l_start);
    assert_eq!(free, (libc::F_UNLCK as i16, libc::SEEK_CUR as i16, 0));
    fcntl(&file, FcntlArg::F_OFD_SETLK(&range(libc::F_RDLCK, 102, 9))).unwrap();
    let mut asked = relative(libc::F_WRLCK, libc::SEEK_CUR, 0);
    posix.fcntl_lock(fd, libc::F_OFD_GETLK, &mut asked).unwrap();
    let found = (
        asked.l_type,
        asked.l_whence,
        asked.l_start,
        asked.l_len,
        asked.l_pid,
    );
    assert_eq!(found, (libc::F_RDLCK as i16, libc::SEEK_SET as i16, 102, 9, -1));
}

#[test]
fn file_is_locked_on_the_mount_wherever_it_is_now() {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&SMALL);
    let (mnt, posix) = (pool.mnt(), linked(&pool.dir()));
    for dir in ["a", "a/b", "c"] {
        std::fs::create_dir(mnt.join(dir)).unwrap();
    }
    let is_found = |fd: Fd, file: &File, what: &str| {
        posix.flock(fd, libc::LOCK_EX).expect(what);
        assert!(is_locked(file), "{what}");
        posix.close(fd).unwrap();
        assert!(!is_locked(file), "{what}");
    };
    let moves: [(&str, &dyn Fn()); 6] = [
        ("not at all", &|| {}),
        ("to another name", &|| rename(&mnt, "a/b/f", "a/b/g")),
        ("to another directory", &|| rename(&mnt, "a/b/f", "c/f")),
        ("with its directory", &|| rename(&mnt, "a", "c/a")),
        ("out of the way of another", &|| {
            rename(&mnt, "a/b/f", "c/f");
            std::fs::write(mnt.join("a/b/f"), b"another").unwrap();
        }),
        ("from a name that is a link now", &|| {
            rename(&mnt, "a/b/f", "a/b/g");
            std::os::unix::fs::symlink("g", mnt.join("a/b/f")).unwrap();
        }),
    ];
    for (what, act) in moves {
        std::fs::write(mnt.join("a/b/f"), b"x").unwrap();
        let (fd, file) = (open(&posix, "/a/b/f"), plain(mnt.join("a/b/f")));
        act();
        is_found(fd, &file, what);
        drop(file);
        for dir in ["a", "c"] {
            let _ = std::fs::remove_dir_all(mnt.join(dir));
        }
        std::fs::create_dir_all(mnt.join("a/b")).unwrap();
        std::fs::create_dir(mnt.join("c")).unwrap();
    }

    // A directory, and the root.
    for path in ["/a/b", "/"] {
        let dir = File::open(format!("{}{path}", mnt.display())).unwrap();
        let fd = posix.open(path.as_bytes(), libc::O_RDONLY | libc::O_DIRECTORY, 0);
        is_found(fd.unwrap(), &dir, path);
    }

    // A file without a name, which has one for a moment; its first name is still its maker's to give.
    let fd = posix.open(b"/a", libc::O_TMPFILE | libc::O_RDWR, 0o644).unwrap();
    posix.flock(fd, libc::LOCK_EX).unwrap();
    let to = (varve_libfs::posix::AT_FDCWD, b"/a/named");
    posix.linkat(fd, b"", to.0, to.1, libc::AT_EMPTY_PATH).unwrap();
    is_found(fd, &plain(mnt.join("a/named")), "without a name");

    // One that has no name any more cannot be found, unless it was locked before.
    std::fs::write(mnt.join("c/f"), b"x").unwrap();
    let (early, late) = (open(&posix, "/c/f"), open(&posix, "/c/f"));
    let file = plain(mnt.join("c/f"));
    posix.flock(early, libc::LOCK_SH).unwrap();
    std::fs::remove_file(mnt.join("c/f")).unwrap();
    assert_eq!(posix.flock(late, libc::LOCK_SH), Err(Errno(libc::ENOENT)));
    is_found(early, &file, "removed");

    let names = ["a", "a/b", "c"].map(|dir| std::fs::read_dir(mnt.join(dir)).unwrap().count());
    assert_eq!(names, [2, 0, 0], "no name is left behind");
}

fn rename(mnt: &Path, from: &str, to: &str) {
    std::fs::rename(mnt.join(from), mnt.join(to)).unwrap();
}

#[test]
fn descriptor_that_is_closed_while_a_thread_waits_for_its_lock_gets_none() {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&SMALL);
    std::fs::write(pool.mnt().join("f"), b"x").unwrap();
    let (file, posix) = (plain(pool.mnt().join("f")), linked(&pool.dir()));
    let fd = open(&posix, "/f");
    fcntl(&file, FcntlArg::F_OFD_SETLK(&range(libc::F_WRLCK, 0, 0))).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| posix.fcntl_lock(fd, libc::F_SETLKW, &mut range(libc::F_WRLCK, 0, 0)));
        std::thread::sleep(A_MOMENT);
        assert!(!waiter.is_finished());
        posix.close(fd).unwrap();
        fcntl(&file, FcntlArg::F_OFD_SETLK(&range(libc::F_UNLCK, 0, 0))).unwrap();
        assert_eq!(waiter.join().unwrap(), Err(Errno(libc::EBADF)));
    });
    assert_eq!(in_the_way(&file), None);
}

/// A child that is ended when this goes; a mount is taken away then.
struct Serving(Child, Option<PathBuf>);

impl Serving {
    fn daemon(pool: &Path) -> Self {
        let child = varve().arg("serve").arg(pool).stdout(Stdio::null()).spawn();
        wait_until("the daemon", || {
            std::os::unix::net::UnixStream::connect(pool.join("sock")).is_ok()
        });
        Self(child.unwrap(), None)
    }

    fn mount(pool: &Path, at: &Path, options: &[&str]) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let mut command = varve();
        let command = command.arg("mount").args(options).arg(pool).arg(at);
        let child = command.stdout(Stdio::null()).spawn().unwrap();
        let before = std::fs::metadata(at.parent().unwrap()).unwrap().dev();
        wait_until("the mount", || {
            std::fs::metadata(at).is_ok_and(|meta| meta.dev() != before)
        });
        Self(child, Some(at.to_owned()))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if let Some(at) = &self.1 {
            let _ = varve().args(["umount", "--force"]).arg(at).output();
        }
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

#[test]
fn nothing_is_locked_while_it_is_not_clear_on_which_mount() {
    if cannot_mount() {
        return;
    }
    let dir = memory_dir();
    let (pool, at) = (dir.path().join("pool"), |name: &str| dir.path().join(name));
    let _live = LiveDirs::of(&pool);
    make_pool(&pool, "32M", "64M", "");
    let _daemon = Serving::daemon(&pool);
    let posix = linked(&pool);
    let fd = posix.open(b"/f", libc::O_CREAT | libc::O_RDWR, 0o644).unwrap();
    let none = Err(Errno(libc::ENOLCK));
    assert_eq!(posix.flock(fd, libc::LOCK_EX), none);
    assert_eq!(
        posix.lock_mount(),
        Err(NoLocks::NotMounted { pool: pool.clone() })
    );

    // It is found when it comes, and stays the one while it is there.
    let one = Serving::mount(&pool, &at("one"), &[]);
    posix.flock(fd, libc::LOCK_EX).unwrap();
    assert!(is_locked(&plain(at("one").join("f"))));
    let _two = Serving::mount(&pool, &at("two"), &[]);
    let second = open(&posix, "/f");
    assert_eq!(posix.flock(second, libc::LOCK_EX | libc::LOCK_NB), BUSY);
    assert_eq!(posix.lock_mount(), Ok(at("one")));
    assert!(!is_locked(&plain(at("two").join("f"))), "mounts share no locks");
    drop(posix);

    let posix = linked(&pool);
    let fd = open(&posix, "/f");
    assert_eq!(posix.flock(fd, libc::LOCK_EX), none);
    let several = NoLocks::Several {
        pool: pool.clone(),
        at: vec![at("one"), at("two")],
    };
    assert_eq!(posix.lock_mount(), Err(several));
    let _own = Serving::mount(&pool, &pool.join("mnt"), &[]);
    posix.flock(fd, libc::LOCK_EX).unwrap();
    assert!(is_locked(&plain(pool.join("mnt/f"))));
    drop(one);
}

#[test]
fn lock_of_a_mount_that_is_gone_is_lost_and_the_program_is_told() {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&SMALL);
    std::fs::write(pool.mnt().join("f"), b"x").unwrap();
    let posix = linked(&pool.dir());
    let fd = open(&posix, "/f");
    posix.flock(fd, libc::LOCK_EX).unwrap();
    let before = std::fs::metadata(pool.mnt()).unwrap().dev();
    let mount = rustix::process::Pid::from_raw(pool.child_pid("mount").unwrap() as i32);
    rustix::process::kill_process(mount.unwrap(), rustix::process::Signal::KILL).unwrap();
    let outside = std::fs::metadata(pool.outside()).unwrap().dev();
    wait_until("another mount", || {
        std::fs::metadata(pool.mnt()).is_ok_and(|meta| ![before, outside].contains(&meta.dev()))
    });
    assert_eq!(posix.flock(fd, libc::LOCK_EX), Err(Errno(libc::ENOLCK)));
    posix.flock(fd, libc::LOCK_UN).unwrap();
    let again = open(&posix, "/f");
    posix.flock(again, libc::LOCK_EX).unwrap();
    assert!(is_locked(&plain(pool.mnt().join("f"))));
    posix.close(fd).unwrap();
    assert!(is_locked(&plain(pool.mnt().join("f"))));
}

/// The program that another user runs; does nothing in an ordinary run of the tests. Each answer is an errno,
/// or 0.
#[test]
fn ordinary_user() {
    let Ok(pool) = std::env::var(ENV) else { return };
    let posix = linked(Path::new(&pool));
    let own = open(&posix, "/own");
    let shown = posix.open(b"/shown", libc::O_RDONLY, 0).unwrap();
    let withdrawn = posix.open(b"/withdrawn", libc::O_RDONLY, 0).unwrap();
    let tell = |result: varve_libfs::Result<()>| {
        println!("\nanswer {}", result.map_or_else(|errno| errno.0, |()| 0))
    };
    let mut lines = std::io::stdin().lock().lines();
    tell(Ok(()));
    for line in lines.by_ref().map_while(Result::ok) {
        let mut all = range(libc::F_WRLCK, 0, 0);
        match line.as_str() {
            "own" => tell(posix.fcntl_lock(own, libc::F_OFD_SETLK, &mut all)),
            "shown" => tell(posix.flock(shown, libc::LOCK_EX)),
            "write" => tell(posix.fcntl_lock(shown, libc::F_OFD_SETLK, &mut all)),
            "withdrawn" => tell(posix.flock(withdrawn, libc::LOCK_EX)),
            _ => break,
        }
    }
}

#[test]
fn ordinary_users_lock_what_they_may_open() {
    if cannot_mount() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: becoming another user needs root");
        return;
    }
    let dir = memory_dir();
    let pool = dir.path().join("pool");
    let _live = LiveDirs::of(&pool);
    make_pool(&pool, "32M", "64M", &format!("users = [{USER}]"));
    let open_to_all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(dir.path(), open_to_all).unwrap();
    let _daemon = Serving::daemon(&pool);
    let _mount = Serving::mount(&pool, &pool.join("mnt"), &["--allow-other"]);
    let at = |name: &str| pool.join("mnt").join(name);
    for (name, mode, owner) in [("own", 0o600, USER), ("shown", 0o644, 0), ("withdrawn", 0o644, 0)] {
        std::fs::write(at(name), b"x").unwrap();
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(at(name), Some(owner), Some(owner)).unwrap();
    }
    // Where that user can read it.
    let program = dir.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut user = Command::new(program)
        .args(["ordinary_user", "--exact", "--nocapture", "--test-threads=1"])
        .env(ENV, &pool)
        .current_dir("/")
        .uid(USER)
        .gid(USER)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(user.stdout.take().unwrap()).lines();
    let mut answer = || {
        let mut lines = said.by_ref().map(Result::unwrap);
        let found = lines.find_map(|line| line.strip_prefix("answer ").map(str::to_owned));
        found.expect("an answer").parse::<i32>().unwrap()
    };
    assert_eq!(answer(), 0);
    let withdrawn = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(at("withdrawn"), withdrawn).unwrap();
    let mut told = user.stdin.take().unwrap();
    let mut ask = |what: &str| {
        writeln!(told, "{what}").unwrap();
        answer()
    };
    assert_eq!(ask("own"), 0);
    assert_eq!(in_the_way(&plain(at("own"))), Some((0, 0)));
    assert_eq!(ask("shown"), 0);
    assert!(is_locked(&plain(at("shown"))));
    assert_eq!(ask("write"), libc::EBADF, "it is open for reading only");
    assert_eq!(
        ask("withdrawn"),
        libc::EACCES,
        "the mount opens it with the rights of now"
    );
    drop(told);
    assert!(user.wait().unwrap().success());
}
