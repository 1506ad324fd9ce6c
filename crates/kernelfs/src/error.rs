//! Errors of the daemon, and the one place that maps the store's errors to errno.

use varve_ipc::IpcError;
use varve_media::MediaError;
use varve_store::StoreError;

/// Why a daemon cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The shared area.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A log.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// A file operation on the host failed.
    #[error("{what}: {error}")]
    Io {
        /// The attempted operation, with the path.
        what: String,
        /// The host's error.
        error: std::io::Error,
    },
    /// A setting.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// The pool cannot be used as it is; the text says what to do.
    #[error("{0}")]
    Pool(String),
}

impl KernelError {
    /// Makes an [`Io`](Self::Io) from the attempted operation and its error.
    pub fn io(what: impl Into<String>, error: impl Into<std::io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            error: error.into(),
        }
    }
}

/// Returns the answer to a client for an error of its log's medium: `ENOSPC` or `EIO`.
pub(crate) fn no_log(error: &MediaError) -> IpcError {
    no(match error.is_no_space() {
        true => libc::ENOSPC,
        false => libc::EIO,
    })
}

/// Returns the errno that a client gets for an error of the store.
#[must_use]
pub fn errno(error: &StoreError) -> i32 {
    match error {
        StoreError::NoSpace { .. } => libc::ENOSPC,
        StoreError::TableFull(_) => libc::ENOSPC,
        StoreError::Owners(_) => libc::EMLINK,
        StoreError::Media(error) if error.is_no_space() => libc::ENOSPC,
        // A session that ended while its request was under way counts as the client's fault, too.
        StoreError::NoInode(_) | StoreError::NoSession(_) => libc::ESTALE,
        StoreError::WrongKind { wanted, .. } if *wanted == "directory" => libc::ENOTDIR,
        StoreError::WrongKind { .. } | StoreError::Invalid(_) => libc::EINVAL,
        StoreError::NotFound => libc::ENOENT,
        StoreError::Exists => libc::EEXIST,
        StoreError::Unfinished(_) => libc::EAGAIN,
        StoreError::Latched(_) => libc::EROFS,
        _ => libc::EIO,
    }
}

/// As [`errno`]; also logs errors that are not the client's fault.
pub(crate) fn refuse(error: &StoreError) -> IpcError {
    let errno = errno(error);
    if errno == libc::EIO {
        tracing::error!("a request failed: {error}");
    }
    IpcError::Errno(errno)
}

/// Makes a refusal with this errno.
pub(crate) const fn no(errno: i32) -> IpcError {
    IpcError::Errno(errno)
}

#[cfg(test)]
mod tests {
    use super::errno;
    use varve_format::SessionId;
    use varve_store::StoreError;

    #[test]
    fn session_that_ended_under_its_request_is_the_clients_doing() {
        assert_eq!(errno(&StoreError::NoSession(SessionId(7))), libc::ESTALE);
    }
}
