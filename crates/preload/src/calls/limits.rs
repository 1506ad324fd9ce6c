//! The longest file that the program may make (`RLIMIT_FSIZE`), as the kernel's file systems look at it. Who
//! sets the limit of another process from outside is heard of by that one's next `setrlimit` or `exec`.

use super::Answer;
use crate::Errno;
use crate::sys::args::Args;
use crate::sys::kernel;
use crate::sys::reentry::Limits;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes; all ones where there is no limit.
static FILE_MAX: AtomicU64 = AtomicU64::new(u64::MAX);

/// Asks the kernel for the limit. Children of `fork` have the same.
pub fn look() {
    FILE_MAX.store(kernel::file_max(), Ordering::Relaxed);
}

fn file_max() -> Option<u64> {
    match FILE_MAX.load(Ordering::Relaxed) {
        u64::MAX => None,
        limit => Some(limit),
    }
}

/// `setrlimit` and `prlimit`, the resource in argument `i`.
pub(super) fn set(a: &Args, i: usize) -> Answer {
    match a.uint(i) {
        libc::RLIMIT_FSIZE => {
            let result = a.call();
            look();
            Answer::Made(result)
        }
        libc::RLIMIT_NOFILE => {
            let _limits = Limits::hold();
            Answer::Made(a.call())
        }
        _ => Answer::NotOurs,
    }
}

/// The signal, and the error.
fn too_long() -> Errno {
    kernel::raise(libc::SIGXFSZ);
    Errno(libc::EFBIG)
}

/// How many of `len` bytes may be written from `at` on, which is only asked if there is a limit.
///
/// # Errors
/// EFBIG, with SIGXFSZ sent, if none.
pub(super) fn room<E: From<Errno>>(at: impl FnOnce() -> Result<u64, E>, len: usize) -> Result<usize, E> {
    let Some(limit) = file_max() else { return Ok(len) };
    let left = limit.saturating_sub(at()?);
    if left == 0 {
        return Err(too_long().into());
    }
    Ok(len.min(usize::try_from(left).unwrap_or(usize::MAX)))
}

/// Whether a file, whose length `now` tells, may have `size` bytes.
///
/// # Errors
/// EFBIG, with SIGXFSZ sent.
pub(super) fn grow<E: From<Errno>>(now: impl FnOnce() -> Result<u64, E>, size: u64) -> Result<(), E> {
    match file_max() {
        Some(limit) if size > limit && size > now()? => Err(too_long().into()),
        _ => Ok(()),
    }
}
