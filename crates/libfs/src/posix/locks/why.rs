//! Reasons why there is no mount to lock on. Owns the messages and the errno; decides nothing.

use std::path::PathBuf;

use crate::errno::Errno;

/// Reason why files cannot be locked. Every lock call fails with `ENOLCK` meanwhile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoLocks {
    /// The pool is served inside this process, from no directory.
    #[error(
        "files cannot be locked: locks are those of a pool's mount, and this pool has no directory that \
        could be mounted"
    )]
    NoPool,
    /// The table of mounts cannot be read.
    #[error(
        "files of {pool} cannot be locked: the table of mounts (/proc/self/mountinfo) cannot be read: {error}"
    )]
    NoTable {
        /// The pool's directory.
        pool: PathBuf,
        /// Error of the read.
        error: String,
    },
    /// The pool is not mounted, or not in this process' view.
    #[error(
        "files of {pool} cannot be locked: locks are those of the pool's mount, and it is not mounted; \
        `varve up {pool}` or `varve mount {pool} DIR` mounts it"
    )]
    NotMounted {
        /// The pool's directory.
        pool: PathBuf,
    },
    /// The pool has several mounts, which do not share locks.
    #[error(
        "files of {pool} cannot be locked: it is mounted at {at:?}, mounts do not share locks, and none of \
        them is {pool}/mnt; unmount all but one"
    )]
    Several {
        /// The pool's directory.
        pool: PathBuf,
        /// Mount points.
        at: Vec<PathBuf>,
    },
    /// Another file system is mounted over it.
    #[error(
        "files cannot be locked: something else is mounted over the mount at {at}; unmount that, or mount \
        the pool elsewhere"
    )]
    Covered {
        /// Expected mount point.
        at: PathBuf,
    },
    /// The mount on which the file was locked was unmounted, and its locks are gone.
    #[error(
        "the mount at {at} is gone, and with it the locks of files that were locked on it: open them again"
    )]
    Gone {
        /// Former mount point.
        at: PathBuf,
    },
}

impl NoLocks {
    /// Errno of the call.
    #[must_use]
    pub const fn errno(&self) -> Errno {
        match self {
            Self::NoPool
            | Self::NoTable { .. }
            | Self::NotMounted { .. }
            | Self::Several { .. }
            | Self::Covered { .. }
            | Self::Gone { .. } => Errno(libc::ENOLCK),
        }
    }
}
