//! Locks: the kernel's, on a descriptor of the pool's mount that stands beside the description (DESIGN §7).
//! So linked programs, programs under `varve run` and all others on the mount share locks. Owns which call
//! goes to the kernel and the effect of closing a descriptor on locks; does not know other holders.

mod beside;
mod pool;
mod why;

pub(super) use beside::Beside;
pub(super) use pool::PoolLocks;
pub use why::NoLocks;

use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::FlockOperation;
use std::path::PathBuf;
use std::sync::Arc;

use super::table::Open;
use super::{Fd, Posix};
use crate::errno::{Errno, Result};

impl Posix {
    /// The mount on which files are locked: the one at `mnt` in the pool's directory, else the pool's only
    /// mount.
    ///
    /// # Errors
    /// The reason why there is none: lock calls fail with `ENOLCK` then.
    pub fn lock_mount(&self) -> std::result::Result<PathBuf, NoLocks> {
        let pool = self.locks.as_ref().ok_or(NoLocks::NoPool)?;
        Ok(pool.mount()?.at)
    }

    /// Locks or unlocks a whole file for its open file description: `LOCK_SH`, `LOCK_EX` or `LOCK_UN`, with
    /// `LOCK_NB` if it must not wait.
    ///
    /// # Errors
    /// As `flock`, and the errors of [`fcntl_lock`](Self::fcntl_lock) that the kernel does not have.
    pub fn flock(&self, fd: Fd, operation: i32) -> Result<()> {
        let waits = operation & libc::LOCK_NB == 0;
        let how = match (operation & !libc::LOCK_NB, waits) {
            (libc::LOCK_SH, true) => FlockOperation::LockShared,
            (libc::LOCK_SH, false) => FlockOperation::NonBlockingLockShared,
            (libc::LOCK_EX, true) => FlockOperation::LockExclusive,
            (libc::LOCK_EX, false) => FlockOperation::NonBlockingLockExclusive,
            (libc::LOCK_UN, true) => FlockOperation::Unlock,
            (libc::LOCK_UN, false) => FlockOperation::NonBlockingUnlock,
            _ => return Err(Errno(libc::EINVAL)),
        };
        let open = self.table.get(fd)?;
        let gives = operation & libc::LOCK_UN != 0;
        let beside = self.beside(&open, gives)?;
        beside.may_hold();
        rustix::fs::flock(beside.fd(), how).map_err(|error| Errno(error.raw_os_error()))
    }

    /// Locks or unlocks a range of a file, or tests it for locks: `fcntl` with `F_SETLK`, `F_SETLKW`,
    /// `F_GETLK` (locks of the process) or their `F_OFD_` forms (locks of the open file description).
    ///
    /// # Errors
    /// As `fcntl`. `ENOLCK` if the pool has no mount, or several of which none is at `mnt` in its directory
    /// ([`lock_mount`](Self::lock_mount) says which), or if the mount on which the file was locked is gone,
    /// and its locks with it. The first lock call on a description opens the file on the mount, with the
    /// rights that the process has then, and fails as that open does; `ENOENT` for a file that has no name
    /// any more.
    pub fn fcntl_lock(&self, fd: Fd, command: i32, lock: &mut libc::flock) -> Result<()> {
        let is_record = matches!(command, libc::F_SETLK | libc::F_SETLKW | libc::F_GETLK);
        let asks = matches!(command, libc::F_GETLK | libc::F_OFD_GETLK);
        let takes = !asks && i32::from(lock.l_type) != libc::F_UNLCK;
        let open = self.table.get(fd)?;
        let mut range = from_start(&open, lock)?;
        let arg = match command {
            libc::F_SETLK => FcntlArg::F_SETLK(&range),
            libc::F_SETLKW => FcntlArg::F_SETLKW(&range),
            libc::F_OFD_SETLK => FcntlArg::F_OFD_SETLK(&range),
            libc::F_OFD_SETLKW => FcntlArg::F_OFD_SETLKW(&range),
            libc::F_GETLK => FcntlArg::F_GETLK(&mut range),
            libc::F_OFD_GETLK => FcntlArg::F_OFD_GETLK(&mut range),
            _ => return Err(Errno(libc::EINVAL)),
        };
        let beside = self.beside(&open, !takes && !asks)?;
        let call = || match fcntl(beside.fd(), arg) {
            Ok(_) => Ok(()),
            Err(error) => Err(Errno(error as i32)),
        };
        if is_record && takes {
            beside.take_record(call)?;
            // As the kernel does: a lock granted after the descriptor was closed is dropped.
            if !self.table.is(fd, &open) {
                beside.closing();
                return Err(Errno(libc::EBADF));
            }
            return Ok(());
        }
        if !is_record {
            beside.may_hold();
        }
        call()?;
        if asks {
            // No lock is in the way: the other fields stay as in the request.
            if i32::from(range.l_type) == libc::F_UNLCK {
                lock.l_type = range.l_type;
            } else {
                *lock = range;
            }
        }
        Ok(())
    }

    /// Returns the kernel's descriptor beside `open`, which is opened at its first lock call. If its mount is
    /// gone, it can only release locks.
    fn beside<'a>(&self, open: &'a Open, gives: bool) -> Result<&'a Beside> {
        let pool = self.locks.as_ref().ok_or(NoLocks::NoPool);
        let pool = pool.map_err(|why| why.errno())?;
        if let Some(beside) = open.beside.get() {
            let is_there = gives || beside.is_on(&pool.mount_or_tell()?);
            return if is_there {
                Ok(beside)
            } else {
                Err(pool.tell(NoLocks::Gone { at: beside.at() }))
            };
        }
        let mount = pool.mount_or_tell()?;
        let beside = Beside::open(&self.fs, open, Arc::clone(pool), mount, &self.cred())?;
        Ok(open.beside.get_or_init(|| Box::new(beside)))
    }

    /// Handles the close of a descriptor of `open`: the close of any descriptor of a file drops all record
    /// locks that the process has on it, and the close of the last one drops the description's locks.
    pub(super) fn closed(&self, open: Arc<Open>) {
        if let Some(pool) = &self.locks {
            pool.closing(open.file.key());
        }
        drop(open);
    }
}

/// Converts a range to one counted from the start of the file: the kernel knows neither the offset nor, until
/// it asks the mount, the size.
fn from_start(open: &Open, lock: &libc::flock) -> Result<libc::flock> {
    let base = match i32::from(lock.l_whence) {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => *open.offset.lock(),
        libc::SEEK_END => open.file.getattr()?.size_bytes,
        _ => return Err(Errno(libc::EINVAL)),
    };
    let start = i64::try_from(base)
        .ok()
        .and_then(|base| base.checked_add(lock.l_start))
        .ok_or(Errno(libc::EOVERFLOW))?;
    Ok(libc::flock {
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        ..*lock
    })
}
