//! Why there is nothing to lock on. Owns the words and the errno; decides nothing.

use std::path::PathBuf;

use crate::errno::Errno;

/// Why files cannot be locked. Every lock call fails with `ENOLCK` meanwhile.
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
        /// What reading it failed with.
        error: String,
    },
    /// Nobody has mounted it, or not where this process sees it.
    #[error(
        "files of {pool} cannot be locked: locks are those of the pool's mount, and it is not mounted; \
        `varve up {pool}` or `varve mount {pool} DIR` mounts it"
    )]
    NotMounted {
        /// The pool's directory.
        pool: PathBuf,
    },
    /// It has several mounts, which do not share locks.
    #[error(
        "files of {pool} cannot be locked: it is mounted at {at:?}, mounts do not share locks, and none of \
        them is {pool}/mnt; unmount all but one"
    )]
    Several {
        /// The pool's directory.
        pool: PathBuf,
        /// Where it is mounted.
        at: Vec<PathBuf>,
    },
    /// Another file system lies over it.
    #[error(
        "files cannot be locked: something else is mounted over the mount at {at}; unmount that, or mount \
        the pool elsewhere"
    )]
    Covered {
        /// Where it should be.
        at: PathBuf,
    },
    /// The mount on which the file was locked was unmounted, and its locks are gone.
    #[error(
        "the mount at {at} is gone, and with it the locks of files that were locked on it: open them again"
    )]
    Gone {
        /// Where it was.
        at: PathBuf,
    },
}

impl NoLocks {
    /// What the call fails with.
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
