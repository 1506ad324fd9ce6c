//! The ways in as one set of calls. What serves the mount serves `varve run` too: nothing but the standard
//! library's calls, which are the C library's (`rustix` would make system calls that the preload library does
//! not see).

use crate::broken;
use crate::sys::record_lock;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use varve_libfs::posix::Fd;
use varve_libfs::{Cred, Fs, FsOptions, Posix, SocketConnector};

/// The errno of a call that failed.
pub type Outcome<T> = Result<T, u16>;

/// A way into the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    Mount,
    Run,
    Linked,
    /// Linked, and broken on purpose: see [`broken`](crate::broken).
    Broken,
}

/// Those that keep the rules, as they are dealt.
pub const WAYS: [Way; 3] = [Way::Mount, Way::Run, Way::Linked];
/// All.
pub const ALL: [Way; 4] = [Way::Mount, Way::Run, Way::Linked, Way::Broken];

impl Way {
    /// For tables and the worker's words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mount => "mount",
            Self::Run => "run",
            Self::Linked => "linked",
            Self::Broken => "broken",
        }
    }

    /// Whether its processes call the library, and so have no descriptors that the kernel can map.
    pub fn is_linked(self) -> bool {
        matches!(self, Self::Linked | Self::Broken)
    }
}

/// The calls of one process.
pub enum Calls {
    Files(PathBuf),
    Linked(Fs, Box<Posix>),
}

/// An open file.
pub enum Open {
    File(File),
    Linked(Fd),
}

/// Which of the kernel's locks, on the whole file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// `flock`.
    Flock,
    /// A record lock of the process.
    Process,
    /// A record lock of the open file description.
    Description,
}

fn sys<T>(result: std::io::Result<T>) -> Outcome<T> {
    result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO) as u16)
}

fn lib<T>(result: varve_libfs::Result<T>) -> Outcome<T> {
    result.map_err(|error| error.0 as u16)
}

const WRONG_WAY: u16 = libc::EBADF as u16;

impl Calls {
    /// Of the pool in `dir`.
    pub fn new(way: Way, dir: &Path) -> Self {
        if !way.is_linked() {
            return Self::Files(dir.join("mnt"));
        }
        let socket = SocketConnector {
            path: dir.join("sock"),
        };
        let fs = match way {
            Way::Broken => broken::mount(socket),
            _ => Fs::mount(Arc::new(socket), FsOptions::default()),
        };
        let fs = fs.expect("a session");
        let cred = Cred {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        };
        Self::Linked(fs.clone(), Box::new(Posix::new(fs, cred)))
    }

    pub fn end(self) {
        if let Self::Linked(fs, _) = self {
            fs.unmount().expect("the session ends in order");
        }
    }

    pub fn open(&self, path: &str, flags: i32) -> Outcome<Open> {
        match self {
            Self::Files(at) => {
                let mut options = OpenOptions::new();
                let access = flags & libc::O_ACCMODE;
                options
                    .read(access != libc::O_WRONLY)
                    .write(access != libc::O_RDONLY);
                if flags & libc::O_APPEND != 0 {
                    options.append(true);
                }
                // Those that the standard library takes as its own are given as flags all the same.
                options.create(flags & libc::O_CREAT != 0 && flags & libc::O_EXCL == 0);
                options.create_new(flags & libc::O_EXCL != 0);
                options.truncate(flags & libc::O_TRUNC != 0);
                sys(options.mode(0o644).open(at.join(path))).map(Open::File)
            }
            Self::Linked(_, posix) => lib(posix.open(path.as_bytes(), flags, 0o644)).map(Open::Linked),
        }
    }

    pub fn close(&self, open: Open) -> Outcome<()> {
        match (self, open) {
            (Self::Linked(_, posix), Open::Linked(fd)) => lib(posix.close(fd)),
            (_, open) => {
                drop(open);
                Ok(())
            }
        }
    }

    /// Writes all at an offset, at the end without one, in one call.
    pub fn write(&self, open: &Open, at: Option<u64>, data: &[u8]) -> Outcome<()> {
        use std::io::Write;
        let done = match (self, open) {
            (_, Open::File(file)) => sys(match at {
                Some(at) => file.write_at(data, at),
                None => (&mut &*file).write(data),
            })?,
            (Self::Linked(_, posix), Open::Linked(fd)) => lib(match at {
                Some(at) => posix.pwrite(*fd, data, at),
                None => posix.write(*fd, data),
            })?,
            (Self::Files(_), Open::Linked(_)) => return Err(WRONG_WAY),
        };
        if done == data.len() {
            Ok(())
        } else {
            Err(libc::ENODATA as u16)
        }
    }

    /// Reads as many bytes as `out` has, in one call; `ENODATA` if there are fewer.
    pub fn read(&self, open: &Open, at: u64, out: &mut [u8]) -> Outcome<()> {
        let done = match (self, open) {
            (_, Open::File(file)) => sys(file.read_at(out, at))?,
            (Self::Linked(_, posix), Open::Linked(fd)) => lib(posix.pread(*fd, out, at))?,
            (Self::Files(_), Open::Linked(_)) => return Err(WRONG_WAY),
        };
        if done == out.len() {
            Ok(())
        } else {
            Err(libc::ENODATA as u16)
        }
    }

    /// Takes (waiting) or gives back a lock.
    pub fn lock(&self, open: &Open, lock: Lock, take: bool) -> Outcome<()> {
        match (self, open, lock) {
            (_, Open::File(file), Lock::Flock) if take => sys(file.lock()),
            (_, Open::File(file), Lock::Flock) => sys(file.unlock()),
            (_, Open::File(file), _) => sys(record_lock(file, lock, take)),
            (Self::Linked(_, posix), Open::Linked(fd), Lock::Flock) => {
                lib(posix.flock(*fd, if take { libc::LOCK_EX } else { libc::LOCK_UN }))
            }
            (Self::Linked(_, posix), Open::Linked(fd), _) => {
                let (command, mut range) = crate::sys::whole(lock, take);
                lib(posix.fcntl_lock(*fd, command, &mut range))
            }
            (Self::Files(_), Open::Linked(_), _) => Err(WRONG_WAY),
        }
    }

    /// Size and time of change.
    pub fn stat(&self, path: &str) -> Outcome<(u64, u64)> {
        match self {
            Self::Files(at) => {
                let meta = sys(std::fs::symlink_metadata(at.join(path)))?;
                Ok((
                    meta.len(),
                    (meta.mtime() * 1_000_000_000 + meta.mtime_nsec()) as u64,
                ))
            }
            Self::Linked(_, posix) => {
                let attr = lib(posix.lstat(path.as_bytes()))?;
                Ok((attr.size_bytes, attr.mtime_ns as u64))
            }
        }
    }

    pub fn rename(&self, from: &str, to: &str) -> Outcome<()> {
        match self {
            Self::Files(at) => sys(std::fs::rename(at.join(from), at.join(to))),
            Self::Linked(_, posix) => lib(posix.rename(from.as_bytes(), to.as_bytes())),
        }
    }

    pub fn unlink(&self, path: &str) -> Outcome<()> {
        match self {
            Self::Files(at) => sys(std::fs::remove_file(at.join(path))),
            Self::Linked(_, posix) => lib(posix.unlink(path.as_bytes())),
        }
    }

    pub fn mkdir(&self, path: &str) -> Outcome<()> {
        match self {
            Self::Files(at) => sys(std::fs::create_dir(at.join(path))),
            Self::Linked(_, posix) => lib(posix.mkdir(path.as_bytes(), 0o755)),
        }
    }

    pub fn rmdir(&self, path: &str) -> Outcome<()> {
        match self {
            Self::Files(at) => sys(std::fs::remove_dir(at.join(path))),
            Self::Linked(_, posix) => lib(posix.rmdir(path.as_bytes())),
        }
    }

    /// Names in a directory, without `.` and `..`.
    pub fn list(&self, path: &str) -> Outcome<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        match self {
            Self::Files(at) => {
                for entry in sys(std::fs::read_dir(at.join(path)))? {
                    names.push(sys(entry)?.file_name().into_encoded_bytes());
                }
            }
            Self::Linked(_, posix) => {
                let dir = lib(posix.open(path.as_bytes(), libc::O_RDONLY | libc::O_DIRECTORY, 0))?;
                loop {
                    let entries = lib(posix.readdir(dir, 100))?;
                    if entries.is_empty() {
                        break;
                    }
                    names.extend(entries.into_iter().map(|entry| entry.name));
                }
                lib(posix.close(dir))?;
                names.retain(|name| name != b"." && name != b"..");
            }
        }
        Ok(names)
    }
}
