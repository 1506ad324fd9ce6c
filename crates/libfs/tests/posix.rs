//! The POSIX calls against the kernel's own: the same random calls on a directory of the host and on a mount,
//! compared errno by errno.
#![allow(clippy::unwrap_used)]

mod fake;

use fake::Fake;
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags as HostRename};
use rustix::io::Errno as HostErrno;
use std::fs::File;
use varve_ipc::Cred;
use varve_libfs::posix::{AT_FDCWD, Whence};
use varve_libfs::{Fs, FsOptions, Posix, RenameFlags};

const PATHS: &[&str] = &[
    "a",
    "b",
    "c",
    "a/x",
    "a/y",
    "b/x",
    "b/y",
    "a/x/z",
    "a/",
    "c/",
    "a/.",
    "a/..",
    "b/../a",
    ".",
    "..",
    "/",
    "",
    "s",
    "s/",
    "s/x",
    "loop",
    "a/x/",
    "./c",
    "a//x",
    "b/x/../y",
    "dangling",
    "dangling/",
];

fn posix() -> Posix {
    let fake = Fake::new();
    let fs = Fs::mount(fake.connector(), FsOptions::default()).unwrap();
    Posix::new(
        fs,
        Cred {
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            groups: vec![],
        },
    )
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % bound as u64) as usize
    }

    fn path(&mut self) -> &'static str {
        PATHS[self.below(PATHS.len())]
    }
}

/// Both worlds, side by side.
struct Pair {
    posix: Posix,
    host: File,
    _dir: tempfile::TempDir,
}

/// Absolute paths and `..` of the root would leave the host's directory: both sides get what stays inside.
fn inside(path: &str) -> &str {
    match path {
        "/" | ".." => ".",
        other => other,
    }
}

fn both<T, U>(what: &str, ours: Result<T, varve_libfs::Errno>, host: Result<U, HostErrno>) -> Option<(T, U)> {
    match (ours, host) {
        (Ok(ours), Ok(host)) => Some((ours, host)),
        (Err(ours), Err(host)) => {
            assert_eq!(
                ours.0,
                host.raw_os_error(),
                "{what}: ours {ours}, the kernel's {host}"
            );
            None
        }
        (ours, host) => panic!("{what}: ours {:?}, the kernel's {:?}", ours.err(), host.err()),
    }
}

impl Pair {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        Self {
            posix: posix(),
            host: File::open(root).unwrap(),
            _dir: dir,
        }
    }

    fn symlink(&self, target: &str, path: &str) {
        let ours = self.posix.symlink(target.as_bytes(), path.as_bytes());
        both(
            &format!("symlink {target} {path}"),
            ours,
            rustix::fs::symlinkat(target, &self.host, path),
        );
    }

    fn step(&self, random: &mut Random) {
        let (x, y) = (inside(random.path()), inside(random.path()));
        let (ox, oy) = (x.as_bytes(), y.as_bytes());
        let (posix, host) = (&self.posix, &self.host);
        match random.below(12) {
            0 => {
                let host = rustix::fs::mkdirat(host, x, Mode::from_raw_mode(0o777));
                both(&format!("mkdir {x:?}"), posix.mkdir(ox, 0o777), host);
            }
            1 => {
                let host = rustix::fs::unlinkat(host, x, AtFlags::REMOVEDIR);
                if host != Err(HostErrno::BUSY) {
                    both(&format!("rmdir {x:?}"), posix.rmdir(ox), host);
                }
            }
            2 => {
                both(
                    &format!("unlink {x:?}"),
                    posix.unlink(ox),
                    rustix::fs::unlinkat(host, x, AtFlags::empty()),
                );
            }
            3 | 4 => {
                let exclusive = random.below(2) == 0;
                let (flags, oflags) = if exclusive {
                    (
                        libc::O_RDWR | libc::O_CREAT | libc::O_EXCL,
                        OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
                    )
                } else {
                    (libc::O_RDWR | libc::O_CREAT, OFlags::RDWR | OFlags::CREATE)
                };
                let theirs = rustix::fs::openat(host, x, oflags, Mode::from_raw_mode(0o666));
                let what = format!("open {x:?} {flags:#o}");
                if let Some((fd, theirs)) = both(&what, posix.open(ox, flags, 0o666), theirs) {
                    let at = random.below(9000) as u64;
                    assert_eq!(
                        posix.pwrite(fd, ox, at).unwrap(),
                        rustix::io::pwrite(&theirs, ox, at).unwrap()
                    );
                    let end = posix.lseek(fd, 0, Whence::End).unwrap();
                    assert_eq!(
                        end,
                        rustix::fs::seek(&theirs, rustix::fs::SeekFrom::End(0)).unwrap()
                    );
                    posix.close(fd).unwrap();
                }
            }
            5 | 6 => {
                let host = rustix::fs::renameat(host, x, host, y);
                if host != Err(HostErrno::BUSY) {
                    let ours = posix.rename(ox, oy);
                    both(&format!("rename {x:?} {y:?}"), ours, host);
                }
            }
            7 => {
                let exchange = random.below(2) == 0;
                let (ours, theirs) = if exchange {
                    (
                        RenameFlags {
                            exchange,
                            noreplace: false,
                            ..RenameFlags::default()
                        },
                        HostRename::EXCHANGE,
                    )
                } else {
                    (
                        RenameFlags {
                            exchange,
                            noreplace: true,
                            ..RenameFlags::default()
                        },
                        HostRename::NOREPLACE,
                    )
                };
                let host = rustix::fs::renameat_with(host, x, host, y, theirs);
                // Not every host's file system can exchange; then there is nothing to compare.
                if !matches!(host, Err(HostErrno::BUSY | HostErrno::INVAL | HostErrno::NOSYS)) {
                    let ours = posix.renameat2(AT_FDCWD, ox, AT_FDCWD, oy, ours);
                    both(&format!("rename {x:?} {y:?} exchange {exchange}"), ours, host);
                }
            }
            8 => {
                both(
                    &format!("link {x:?} {y:?}"),
                    posix.link(ox, oy),
                    rustix::fs::linkat(host, x, host, y, AtFlags::empty()),
                );
            }
            9 => {
                let ours = posix.symlink(b"a/x", ox);
                both(
                    &format!("symlink {x:?}"),
                    ours,
                    rustix::fs::symlinkat("a/x", host, x),
                );
            }
            10 => {
                let flags = if random.below(2) == 0 {
                    AtFlags::empty()
                } else {
                    AtFlags::SYMLINK_NOFOLLOW
                };
                let ours = posix.fstatat(AT_FDCWD, ox, flags.bits() as i32);
                let theirs = rustix::fs::statat(host, x, flags);
                if let Some((ours, theirs)) = both(&format!("stat {x:?} {flags:?}"), ours, theirs) {
                    assert_eq!(ours.mode & libc::S_IFMT, theirs.st_mode & libc::S_IFMT, "{x:?}");
                    if !ours.is_dir() {
                        assert_eq!(
                            (ours.nlink, ours.size_bytes),
                            (theirs.st_nlink as u32, theirs.st_size as u64),
                            "{x:?}"
                        );
                        assert_eq!(ours.mode, theirs.st_mode, "{x:?}");
                    }
                }
            }
            _ => {
                let theirs = rustix::fs::readlinkat(host, x, Vec::new());
                if let Some((ours, theirs)) = both(&format!("readlink {x:?}"), posix.readlink(ox), theirs) {
                    assert_eq!(ours, theirs.as_bytes());
                }
            }
        }
    }

    fn compare_names(&self) {
        for path in ["."] {
            let fd = self
                .posix
                .open(path.as_bytes(), libc::O_RDONLY | libc::O_DIRECTORY, 0)
                .unwrap();
            let mut ours = Vec::new();
            loop {
                let page = self.posix.readdir(fd, 3).unwrap();
                if page.is_empty() {
                    break;
                }
                ours.extend(page.into_iter().map(|entry| entry.name));
            }
            self.posix.close(fd).unwrap();
            let dir = rustix::fs::Dir::read_from(&self.host).unwrap();
            let mut theirs: Vec<_> = dir
                .map(|entry| entry.unwrap().file_name().to_bytes().to_vec())
                .collect();
            theirs.retain(|name| name != b"." && name != b"..");
            ours.sort();
            theirs.sort();
            assert_eq!(ours, theirs);
        }
    }
}

#[test]
fn random_calls_end_as_the_kernels_do() {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    for seed in 0..30 {
        let pair = Pair::new();
        pair.symlink("a", "s");
        pair.symlink("loop", "loop");
        pair.symlink("nowhere", "dangling");
        let mut random = Random(seed);
        for _ in 0..100 {
            pair.step(&mut random);
        }
        pair.compare_names();
        pair.posix.fs().unmount().unwrap();
    }
}

#[test]
fn descriptors_share_their_offset_after_dup_and_not_after_open() {
    let posix = posix();
    let fd = posix.open(b"/f", libc::O_RDWR | libc::O_CREAT, 0o644).unwrap();
    let twin = posix.dup(fd).unwrap();
    assert_eq!(posix.write(fd, b"hello").unwrap(), 5);
    assert_eq!(posix.lseek(twin, 0, Whence::Current).unwrap(), 5);
    let other = posix.open(b"/f", libc::O_RDONLY, 0).unwrap();
    let mut out = [0; 8];
    assert_eq!(posix.read(other, &mut out).unwrap(), 5);
    posix.close(fd).unwrap();
    assert_eq!(posix.lseek(twin, 1, Whence::Set).unwrap(), 1);
    assert_eq!(posix.read(twin, &mut out).unwrap(), 4);
    assert_eq!(posix.read(fd, &mut out), Err(varve_libfs::Errno(libc::EBADF)));
    assert_eq!(posix.write(other, b"x"), Err(varve_libfs::Errno(libc::EBADF)));
    let append = posix.open(b"/f", libc::O_WRONLY | libc::O_APPEND, 0).unwrap();
    assert_eq!(posix.pwrite(append, b"!", 0).unwrap(), 1);
    assert_eq!(posix.stat(b"/f").unwrap().size_bytes, 6);
}

#[test]
fn unnamed_file_gets_a_name_by_link() {
    let posix = posix();
    posix.mkdir(b"/d", 0o755).unwrap();
    let fd = posix.open(b"/d", libc::O_TMPFILE | libc::O_RDWR, 0o600).unwrap();
    posix.write(fd, b"data").unwrap();
    assert_eq!(posix.fstat(fd).unwrap().nlink, 0);
    posix
        .linkat(fd, b"", AT_FDCWD, b"/d/f", libc::AT_EMPTY_PATH)
        .unwrap();
    posix.close(fd).unwrap();
    let attr = posix.stat(b"/d/f").unwrap();
    assert_eq!((attr.nlink, attr.size_bytes), (1, 4));
    let unlinked = posix.open(b"/d/f", libc::O_RDWR, 0).unwrap();
    posix.unlink(b"/d/f").unwrap();
    let back = posix.linkat(unlinked, b"", AT_FDCWD, b"/d/g", libc::AT_EMPTY_PATH);
    assert_eq!(back, Err(varve_libfs::Errno(libc::ENOENT)));
}

#[test]
fn permissions_are_those_of_the_caller() {
    let posix = posix();
    posix.set_cred(Cred::root());
    posix.mkdir(b"/shared", 0o777).unwrap();
    posix.chmod(b"/shared", 0o1777).unwrap();
    posix.mkdir(b"/closed", 0o700).unwrap();
    let user = |uid| Cred {
        uid,
        gid: uid,
        groups: vec![],
    };
    posix.set_cred(user(1));
    let fd = posix
        .open(b"/shared/f", libc::O_RDWR | libc::O_CREAT, 0o6755)
        .unwrap();
    posix.chmod(b"/shared/f", 0o6755).unwrap();
    posix.set_cred(user(2));
    assert_eq!(posix.unlink(b"/shared/f"), Err(varve_libfs::Errno(libc::EPERM)));
    assert_eq!(
        posix.rename(b"/shared/f", b"/shared/g"),
        Err(varve_libfs::Errno(libc::EPERM))
    );
    assert_eq!(
        posix.open(b"/shared/f", libc::O_WRONLY, 0),
        Err(varve_libfs::Errno(libc::EACCES))
    );
    assert_eq!(posix.stat(b"/closed/x"), Err(varve_libfs::Errno(libc::EACCES)));
    assert_eq!(
        posix.mkdir(b"/closed/d", 0o755),
        Err(varve_libfs::Errno(libc::EACCES))
    );
    assert_eq!(
        posix.chmod(b"/shared/f", 0o644),
        Err(varve_libfs::Errno(libc::EPERM))
    );
    posix.write(fd, b"x").unwrap();
    assert_eq!(posix.stat(b"/shared/f").unwrap().mode & 0o7777, 0o755);
}

#[test]
fn symbolic_link_is_as_long_as_its_entry_may_be() {
    let posix = posix();
    let longest = vec![b'x'; 4064];
    posix.symlink(&longest, b"/longest").unwrap();
    assert_eq!(posix.readlink(b"/longest").unwrap(), longest);
    for len in [4065, 4095, 5000] {
        assert_eq!(
            posix.symlink(&vec![b'x'; len], b"/longer"),
            Err(varve_libfs::Errno(libc::ENAMETOOLONG)),
            "{len} bytes"
        );
    }
}
