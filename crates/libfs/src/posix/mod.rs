//! POSIX calls over [`Fs`]: descriptors, a working directory, a umask and credentials. Owns paths and
//! offsets; knows no leases and logs.
//!
//! Paths are bytes; flags and modes are those of the C library. Every call fails with the errno that Linux
//! gives, in its order of checks. Descriptors are numbers of this object, not of the kernel.

mod files;
mod locks;
mod path;
mod table;
mod tree;
mod txn;

pub use files::{FdRanges, Whence};
pub use locks::NoLocks;
pub use table::Fd;
pub use txn::{PosixTransaction, TX_FD_FIRST};

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use varve_format::{InodeAttr, InodeKey};
use varve_ipc::Cred;
use varve_media::lock::RwLock;

use crate::errno::{Errno, Result};
use crate::fs::Fs;
use locks::PoolLocks;
use table::Table;

/// Stands for the working directory in place of a directory's descriptor.
pub const AT_FDCWD: Fd = libc::AT_FDCWD;

/// A process's view of a mount. Dropping it closes its descriptors, and drops their locks.
pub struct Posix {
    fs: Fs,
    table: Table,
    cwd: RwLock<InodeKey>,
    umask: AtomicU32,
    cred: RwLock<Cred>,
    /// The process' part in the pool's locks; `None` for a pool without a directory.
    locks: Option<Arc<PoolLocks>>,
}

impl Posix {
    /// A view with its working directory at the root and umask 022.
    #[must_use]
    pub fn new(fs: Fs, cred: Cred) -> Self {
        let cwd = RwLock::new(fs.root());
        let locks = fs.pool_dir().map(PoolLocks::of);
        Self {
            fs,
            table: Table::default(),
            cwd,
            umask: AtomicU32::new(0o022),
            cred: RwLock::new(cred),
            locks,
        }
    }

    /// Closes all descriptors.
    pub fn close_all(&self) {
        for open in self.table.remove_all() {
            self.closed(open);
        }
    }

    /// The mount.
    #[must_use]
    pub fn fs(&self) -> &Fs {
        &self.fs
    }

    /// Credentials of calls.
    #[must_use]
    pub fn cred(&self) -> Cred {
        self.cred.read().clone()
    }

    /// Changes the credentials, for calls that begin afterwards.
    pub fn set_cred(&self, cred: Cred) {
        *self.cred.write() = cred;
    }

    /// Sets the umask; returns the old one.
    pub fn umask(&self, mask: u32) -> u32 {
        self.umask.swap(mask & 0o777, Ordering::Relaxed)
    }

    fn masked(&self, mode: u32) -> u32 {
        mode & 0o7777 & !self.umask.load(Ordering::Relaxed)
    }

    /// Returns the directory where a relative path starts.
    fn base(&self, dirfd: Fd, path: &[u8]) -> Result<InodeKey> {
        if path.starts_with(b"/") {
            return Ok(self.fs.root());
        }
        if dirfd == AT_FDCWD {
            return Ok(*self.cwd.read());
        }
        let open = self.table.get(dirfd)?;
        if open.is_dir {
            Ok(open.file.key())
        } else {
            Err(Errno(libc::ENOTDIR))
        }
    }

    /// Changes the working directory.
    ///
    /// # Errors
    /// As `chdir`.
    pub fn chdir(&self, path: &[u8]) -> Result<()> {
        let attr = self.find(AT_FDCWD, path, true)?;
        self.enter(&attr)
    }

    /// Changes the working directory to an open one.
    ///
    /// # Errors
    /// As `fchdir`.
    pub fn fchdir(&self, fd: Fd) -> Result<()> {
        let attr = self.fstat(fd)?;
        self.enter(&attr)
    }

    fn enter(&self, attr: &InodeAttr) -> Result<()> {
        if !attr.is_dir() {
            return Err(Errno(libc::ENOTDIR));
        }
        crate::attrs::may(attr, &self.cred(), crate::attrs::EXEC)?;
        *self.cwd.write() = attr.key;
        Ok(())
    }
}

impl Drop for Posix {
    fn drop(&mut self) {
        self.close_all();
    }
}
