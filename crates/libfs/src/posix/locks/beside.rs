//! The kernel's descriptor of a file, kept beside one of this view's descriptions. Owns how the file is found
//! on the mount and how long the descriptor lives; does not know the locks.

use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, fstat, open, openat};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use varve_format::InodeKey;
use varve_ipc::Cred;

use super::super::table::Open;
use super::pool::{PoolLocks, everything};
use super::why::NoLocks;
use crate::errno::{Errno, Result};
use crate::fs::Fs;
use crate::mounts::PoolMount;

/// A file of the mount, open for a description of this view for as long as that lives.
pub(in crate::posix) struct Beside {
    fd: Arc<OwnedFd>,
    key: InodeKey,
    mount: PoolMount,
    pool: Arc<PoolLocks>,
    /// The description, not the process, may hold locks.
    described: AtomicBool,
}

impl Beside {
    /// Opens the file of `of` on `mount`, as `of` was opened, with the rights of the process; if a name has
    /// to be made for it, with the rights of `cred`.
    pub(super) fn open(
        fs: &Fs,
        of: &Open,
        pool: Arc<PoolLocks>,
        mount: PoolMount,
        cred: &Cred,
    ) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, &mount.at, flags, Mode::empty()).map_err(errno)?;
        if !is(&root, mount.device, InodeKey::ROOT)? {
            return Err(pool.tell(NoLocks::Covered { at: mount.at }));
        }
        let key = of.file.key();
        let fd = reach(fs, of, cred, |path| {
            // As a path descriptor only: another file found there is not opened.
            let below = path.strip_prefix(b"/").filter(|below| !below.is_empty());
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let place = openat(&root, below.unwrap_or(b"."), flags, Mode::empty()).map_err(errno)?;
            if !is(&place, mount.device, key)? {
                return Err(Errno(libc::ESTALE));
            }
            let access = OFlags::from_bits_retain((of.flags & libc::O_ACCMODE) as u32);
            let link = format!("/proc/self/fd/{}", place.as_raw_fd());
            open(link, access | OFlags::CLOEXEC, Mode::empty()).map_err(errno)
        })?;
        Ok(Self {
            fd: Arc::new(fd),
            key,
            mount,
            pool,
            described: AtomicBool::new(false),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Path of its mount, which may be gone.
    pub(super) fn at(&self) -> PathBuf {
        self.mount.at.clone()
    }

    pub(super) fn is_on(&self, mount: &PoolMount) -> bool {
        self.mount.device == mount.device
    }

    /// Notes that the description may hold locks.
    pub(super) fn may_hold(&self) {
        self.described.store(true, Ordering::Relaxed);
    }

    /// Makes `call`, which may give the process a record lock.
    pub(super) fn take_record(&self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        self.pool.take_record(self.key, &self.fd, call)
    }

    /// Drops the record locks that the process has on the file.
    pub(super) fn closing(&self) {
        self.pool.closing(self.key);
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // A child of `fork` has the descriptor too, and cannot close it: unlocking here keeps it from keeping
        // the locks. If this is the child, they are its parent's.
        if *self.described.get_mut() && self.pool.is_ours() {
            let _ = rustix::fs::flock(&self.fd, FlockOperation::Unlock);
            let _ = fcntl(&*self.fd, FcntlArg::F_OFD_SETLK(&everything()));
        }
        self.pool.let_go(self.key, Arc::clone(&self.fd));
    }
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno(error.raw_os_error())
}

fn is(fd: &OwnedFd, device: u64, key: InodeKey) -> Result<bool> {
    let stat = fstat(fd).map_err(errno)?;
    Ok((stat.st_dev, stat.st_ino) == (device, key.number()))
}

/// Whether a path leads to another file, or nowhere.
fn is_elsewhere<T>(result: &Result<T>) -> bool {
    matches!(
        result,
        Err(Errno(libc::ENOENT | libc::ESTALE | libc::ENOTDIR | libc::ELOOP))
    )
}

/// Tries paths below the root until one leads to the file: the path of its open, its name in that directory
/// at present, and, if it has none there, a temporary name.
fn reach<T>(fs: &Fs, of: &Open, cred: &Cred, attempt: impl Fn(&[u8]) -> Result<T>) -> Result<T> {
    let (dir, name) = (of.place.0, &*of.place.1);
    let gone = || Err(Errno(libc::ENOENT));
    if of.is_dir {
        return fs.path_of(of.file.key()).map_or_else(gone, |path| attempt(&path));
    }
    let in_dir = |name: &[u8]| match fs.path_of(dir) {
        Some(path) => attempt(&[&path, b"/".as_slice(), name].concat()),
        None => gone(),
    };
    let first = if name.is_empty() { gone() } else { in_dir(name) };
    if !is_elsewhere(&first) {
        return first;
    }
    if let Some(path) = fs.path_in(dir, of.file.key()) {
        let second = attempt(&path);
        if !is_elsewhere(&second) {
            return second;
        }
    }
    // The first failure says more than a failure to make a name.
    let lent = fs.while_lent_a_name(of.file.key(), dir, cred, in_dir);
    lent.unwrap_or(first)
}
