//! Three ways into one pool as one set of calls: two mounts and the library.

use rustix::fs::{AtFlags, Mode, OFlags};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use varve_libfs::Posix;
use varve_libfs::posix::Fd;

/// The errno of a call that failed.
pub type Outcome<T> = Result<T, i32>;

/// What a test compares of a file's attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub size: u64,
    pub nlink: u64,
    pub permissions: u32,
    pub is_dir: bool,
    pub ino: u64,
}

/// A way into the pool.
pub enum Way {
    Mount(PathBuf),
    Linked(Box<Posix>),
}

/// A file that one way holds open.
pub enum Open {
    Mount(OwnedFd),
    Linked(Fd),
}

fn sys<T>(result: rustix::io::Result<T>) -> Outcome<T> {
    result.map_err(|error| error.raw_os_error())
}

fn lib<T>(result: varve_libfs::Result<T>) -> Outcome<T> {
    result.map_err(|error| error.0)
}

fn stat_of(attr: &varve_format::InodeAttr) -> Stat {
    let is_dir = attr.is_dir();
    Stat {
        size: if is_dir { 0 } else { attr.size_bytes },
        nlink: u64::from(attr.nlink),
        permissions: attr.mode & 0o7777,
        is_dir,
        ino: attr.key.number(),
    }
}

fn stat_from(stat: &rustix::fs::Stat) -> Stat {
    let is_dir = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
    Stat {
        size: if is_dir { 0 } else { stat.st_size as u64 },
        nlink: stat.st_nlink,
        permissions: stat.st_mode & 0o7777,
        is_dir,
        ino: stat.st_ino,
    }
}

impl Way {
    /// A short name for messages.
    pub fn name(&self) -> String {
        match self {
            Self::Mount(at) => at.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            Self::Linked(_) => "linked".into(),
        }
    }

    pub fn open(&self, path: &str, flags: i32) -> Outcome<Open> {
        match self {
            Self::Mount(at) => {
                let flags = OFlags::from_bits_retain(flags as u32) | OFlags::CLOEXEC;
                sys(rustix::fs::open(at.join(path), flags, Mode::from_raw_mode(0o644))).map(Open::Mount)
            }
            Self::Linked(posix) => lib(posix.open(path.as_bytes(), flags, 0o644)).map(Open::Linked),
        }
    }

    pub fn close(&self, open: Open) -> Outcome<()> {
        match (self, open) {
            (Self::Linked(posix), Open::Linked(fd)) => lib(posix.close(fd)),
            (_, open) => {
                drop(open);
                Ok(())
            }
        }
    }

    /// Writes at an offset; at the end without one (the file is open with `O_APPEND`).
    pub fn write(&self, open: &Open, at: Option<u64>, data: &[u8]) -> Outcome<()> {
        let done = match (self, open) {
            (_, Open::Mount(fd)) => sys(match at {
                Some(at) => rustix::io::pwrite(fd, data, at),
                None => rustix::io::write(fd, data),
            })?,
            (Self::Linked(posix), Open::Linked(fd)) => lib(match at {
                Some(at) => posix.pwrite(*fd, data, at),
                None => posix.write(*fd, data),
            })?,
            (Self::Mount(_), Open::Linked(_)) => return Err(libc::EBADF),
        };
        assert_eq!(done, data.len(), "a short write");
        Ok(())
    }

    /// Everything in an open file.
    pub fn read(&self, open: &Open) -> Outcome<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut part = vec![0; 1 << 16];
        loop {
            let n = match (self, open) {
                (_, Open::Mount(fd)) => sys(rustix::io::pread(fd, &mut part, bytes.len() as u64))?,
                (Self::Linked(posix), Open::Linked(fd)) => {
                    lib(posix.pread(*fd, &mut part, bytes.len() as u64))?
                }
                (Self::Mount(_), Open::Linked(_)) => return Err(libc::EBADF),
            };
            if n == 0 {
                return Ok(bytes);
            }
            bytes.extend(&part[..n]);
        }
    }

    pub fn fstat(&self, open: &Open) -> Outcome<Stat> {
        match (self, open) {
            (_, Open::Mount(fd)) => sys(rustix::fs::fstat(fd)).map(|stat| stat_from(&stat)),
            (Self::Linked(posix), Open::Linked(fd)) => lib(posix.fstat(*fd)).map(|attr| stat_of(&attr)),
            (Self::Mount(_), Open::Linked(_)) => Err(libc::EBADF),
        }
    }

    pub fn truncate(&self, open: &Open, size: u64) -> Outcome<()> {
        match (self, open) {
            (_, Open::Mount(fd)) => sys(rustix::fs::ftruncate(fd, size)),
            (Self::Linked(posix), Open::Linked(fd)) => lib(posix.ftruncate(*fd, size)),
            (Self::Mount(_), Open::Linked(_)) => Err(libc::EBADF),
        }
    }

    pub fn stat(&self, path: &str) -> Outcome<Stat> {
        match self {
            Self::Mount(at) => {
                let stat = rustix::fs::statat(rustix::fs::CWD, at.join(path), AtFlags::SYMLINK_NOFOLLOW);
                sys(stat).map(|stat| stat_from(&stat))
            }
            Self::Linked(posix) => lib(posix.lstat(path.as_bytes())).map(|attr| stat_of(&attr)),
        }
    }

    pub fn chmod(&self, path: &str, permissions: u32) -> Outcome<()> {
        match self {
            Self::Mount(at) => sys(rustix::fs::chmod(at.join(path), Mode::from_raw_mode(permissions))),
            Self::Linked(posix) => lib(posix.chmod(path.as_bytes(), permissions)),
        }
    }

    pub fn rename(&self, from: &str, to: &str) -> Outcome<()> {
        match self {
            Self::Mount(at) => sys(rustix::fs::rename(at.join(from), at.join(to))),
            Self::Linked(posix) => lib(posix.rename(from.as_bytes(), to.as_bytes())),
        }
    }

    pub fn link(&self, from: &str, to: &str) -> Outcome<()> {
        match self {
            Self::Mount(at) => sys(rustix::fs::link(at.join(from), at.join(to))),
            Self::Linked(posix) => lib(posix.link(from.as_bytes(), to.as_bytes())),
        }
    }

    pub fn unlink(&self, path: &str) -> Outcome<()> {
        match self {
            Self::Mount(at) => sys(rustix::fs::unlink(at.join(path))),
            Self::Linked(posix) => lib(posix.unlink(path.as_bytes())),
        }
    }

    pub fn mkdir(&self, path: &str) -> Outcome<()> {
        match self {
            Self::Mount(at) => sys(rustix::fs::mkdir(at.join(path), Mode::from_raw_mode(0o755))),
            Self::Linked(posix) => lib(posix.mkdir(path.as_bytes(), 0o755)),
        }
    }

    pub fn rmdir(&self, path: &str) -> Outcome<()> {
        match self {
            Self::Mount(at) => sys(rustix::fs::rmdir(at.join(path))),
            Self::Linked(posix) => lib(posix.rmdir(path.as_bytes())),
        }
    }

    /// Names in a directory, sorted.
    pub fn list(&self, path: &str) -> Outcome<Vec<String>> {
        let mut names = Vec::new();
        match self {
            Self::Mount(at) => {
                let entries =
                    std::fs::read_dir(at.join(path)).map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
                for entry in entries {
                    let entry = entry.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))?;
                    names.push(String::from_utf8(entry.file_name().into_vec()).expect("a name"));
                }
            }
            Self::Linked(posix) => {
                let path = if path.is_empty() { "." } else { path };
                let dir = lib(posix.open(path.as_bytes(), libc::O_RDONLY | libc::O_DIRECTORY, 0))?;
                loop {
                    let entries = lib(posix.readdir(dir, 100))?;
                    if entries.is_empty() {
                        break;
                    }
                    names.extend(
                        entries
                            .into_iter()
                            .map(|entry| String::from_utf8(entry.name).expect("a name")),
                    );
                }
                lib(posix.close(dir))?;
                names.retain(|name| name != "." && name != "..");
            }
        }
        names.sort();
        Ok(names)
    }
}
