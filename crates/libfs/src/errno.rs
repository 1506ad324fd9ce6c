//! The one error of this crate's calls: an errno. Owns the mapping from every other error; knows no file
//! system state.

use std::fmt;
use varve_format::SeqRange;
use varve_ipc::IpcError;
use varve_media::MediaError;

/// Error of a file-system call: a positive `errno` of the C library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

/// Result of a file-system call.
pub type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    /// Name as in `errno.h`, if it is one that this crate returns.
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            libc::EPERM => "EPERM",
            libc::ENOENT => "ENOENT",
            libc::EINTR => "EINTR",
            libc::EIO => "EIO",
            libc::ENXIO => "ENXIO",
            libc::E2BIG => "E2BIG",
            libc::EBADF => "EBADF",
            libc::EAGAIN => "EAGAIN",
            libc::ENOMEM => "ENOMEM",
            libc::EACCES => "EACCES",
            libc::EFAULT => "EFAULT",
            libc::EBUSY => "EBUSY",
            libc::EEXIST => "EEXIST",
            libc::EXDEV => "EXDEV",
            libc::ENODEV => "ENODEV",
            libc::ENOTDIR => "ENOTDIR",
            libc::EISDIR => "EISDIR",
            libc::EINVAL => "EINVAL",
            libc::ENFILE => "ENFILE",
            libc::EMFILE => "EMFILE",
            libc::ENOTTY => "ENOTTY",
            libc::ETXTBSY => "ETXTBSY",
            libc::EFBIG => "EFBIG",
            libc::ENOSPC => "ENOSPC",
            libc::ESPIPE => "ESPIPE",
            libc::EROFS => "EROFS",
            libc::EMLINK => "EMLINK",
            libc::EPIPE => "EPIPE",
            libc::ERANGE => "ERANGE",
            libc::EDEADLK => "EDEADLK",
            libc::ENAMETOOLONG => "ENAMETOOLONG",
            libc::ENOSYS => "ENOSYS",
            libc::ENOTEMPTY => "ENOTEMPTY",
            libc::ELOOP => "ELOOP",
            libc::ENODATA => "ENODATA",
            libc::EOVERFLOW => "EOVERFLOW",
            libc::EOPNOTSUPP => "EOPNOTSUPP",
            libc::ETIMEDOUT => "ETIMEDOUT",
            libc::ESTALE => "ESTALE",
            _ => return None,
        })
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl std::error::Error for Errno {}

impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        Self::from_raw_os_error(errno.0)
    }
}

/// A medium's failure, as a program sees it. The enum is open, so a `_` arm maps new variants to EIO.
impl From<&MediaError> for Errno {
    fn from(error: &MediaError) -> Self {
        Self(match error {
            MediaError::NoSpace { .. } | MediaError::TooLong { .. } => libc::ENOSPC,
            MediaError::ReadOnly { .. } | MediaError::Failed { .. } => libc::EROFS,
            _ => libc::EIO,
        })
    }
}

/// Outcome of an operation under a session that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpError<T> {
    /// The operation did not happen (a failed call has no effect).
    Failed(Errno),
    /// The session was sealed, or its daemon is gone: resume, then decide.
    SessionLost {
        /// Entries committed before the loss was seen: if the seal covers all these numbers the result
        /// counts, else the operation did not happen.
        committed: Option<(SeqRange, T)>,
        /// Result if `committed` is not covered (or is none): the parts of a long call that counted before.
        /// `None`: do it again.
        otherwise: Option<T>,
    },
    /// The inode is contended: send it as a forwarded operation.
    Forward,
}

/// Result of an operation under a session. `L` is the type of the result that a lost session may have
/// committed.
pub type OpResult<T, L = T> = std::result::Result<T, OpError<L>>;

impl<T> OpError<T> {
    /// The session is lost and nothing was committed.
    #[must_use]
    pub const fn lost() -> Self {
        Self::SessionLost {
            committed: None,
            otherwise: None,
        }
    }

    /// Maps the results inside the failure.
    #[must_use]
    pub fn map<U>(self, mut change: impl FnMut(T) -> U) -> OpError<U> {
        match self {
            Self::Failed(errno) => OpError::Failed(errno),
            Self::Forward => OpError::Forward,
            Self::SessionLost { committed, otherwise } => OpError::SessionLost {
                committed: committed.map(|(seqs, result)| (seqs, change(result))),
                otherwise: otherwise.map(change),
            },
        }
    }

    /// Converts a failed operation's error to another result type, for errors that carry no result.
    #[must_use]
    pub fn cast<U>(self) -> OpError<U> {
        match self {
            Self::Failed(errno) => OpError::Failed(errno),
            Self::Forward => OpError::Forward,
            Self::SessionLost { .. } => OpError::lost(),
        }
    }
}

impl<T> From<Errno> for OpError<T> {
    fn from(errno: Errno) -> Self {
        Self::Failed(errno)
    }
}

impl<T> From<&MediaError> for OpError<T> {
    fn from(error: &MediaError) -> Self {
        Self::Failed(error.into())
    }
}

impl<T> From<IpcError> for OpError<T> {
    fn from(error: IpcError) -> Self {
        match error {
            IpcError::Errno(errno) => Self::Failed(Errno(errno)),
            IpcError::Sealed | IpcError::Gone(_) => Self::lost(),
            IpcError::Forward => Self::Forward,
            IpcError::Protocol(_) => Self::Failed(Errno(libc::EIO)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Errno, OpError};
    use varve_ipc::IpcError;

    #[test]
    fn errno_prints_its_name() {
        assert_eq!(Errno(libc::ENOSPC).to_string(), "ENOSPC");
        assert_eq!(Errno(9999).to_string(), "errno 9999");
    }

    #[test]
    fn sealed_session_is_lost_not_failed() {
        assert_eq!(OpError::<usize>::from(IpcError::Sealed), OpError::lost());
        assert_eq!(
            OpError::<usize>::from(IpcError::Errno(libc::EACCES)),
            OpError::Failed(Errno(libc::EACCES))
        );
    }
}
