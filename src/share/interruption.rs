//! Reasons for which `apply` and `undo` end before they have done all files.

use std::path::{Path, PathBuf};
use varve_libfs::Errno;

/// Why a command ended early. What it has done by then stays done.
pub enum Interruption {
    /// A signal asked for it.
    Signal,
    /// The pool has no space left, as found at this file.
    NoSpace(PathBuf),
    /// The daemon or the session failed at this file.
    Daemon(PathBuf, Errno),
    /// Any other failure.
    Error(anyhow::Error),
}

impl Interruption {
    /// A failure of the daemon or the session at a file.
    pub fn daemon(path: &Path, errno: Errno) -> Self {
        Self::Daemon(path.to_owned(), errno)
    }
}

impl From<anyhow::Error> for Interruption {
    fn from(error: anyhow::Error) -> Self {
        Self::Error(error)
    }
}
