//! The longest file that the program may make (`RLIMIT_FSIZE`), enforced as the kernel's file systems do. A
//! limit that another process sets from outside is noticed at this process' next `setrlimit` or `exec`.

use super::Answer;
use crate::Errno;
use crate::sys::args::Args;
use crate::sys::kernel;
use crate::sys::reentry::Limits;
use std::sync::atomic::{AtomicU64, Ordering};

/// The limit in bytes; all ones if there is none.
static FILE_MAX: AtomicU64 = AtomicU64::new(u64::MAX);

/// Reads the limit from the kernel. Children of `fork` inherit it.
pub fn look() {
    FILE_MAX.store(kernel::file_max(), Ordering::Relaxed);
}

fn file_max() -> Option<u64> {
    match FILE_MAX.load(Ordering::Relaxed) {
        u64::MAX => None,
        limit => Some(limit),
    }
}

/// Handles `setrlimit` and `prlimit`; the resource is argument `i`.
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

/// Sends SIGXFSZ and returns EFBIG.
fn too_long() -> Errno {
    kernel::raise(libc::SIGXFSZ);
    Errno(libc::EFBIG)
}

/// Returns how many of `len` bytes may be written from `at` on. `at` is only called if there is a limit.
///
/// # Errors
/// EFBIG, with SIGXFSZ sent, if the limit permits none.
pub(super) fn room<E: From<Errno>>(at: impl FnOnce() -> Result<u64, E>, len: usize) -> Result<usize, E> {
    let Some(limit) = file_max() else { return Ok(len) };
    let left = limit.saturating_sub(at()?);
    if left == 0 {
        return Err(too_long().into());
    }
    Ok(len.min(usize::try_from(left).unwrap_or(usize::MAX)))
}

/// Checks that a file may grow from the length that `now` returns to `size` bytes.
///
/// # Errors
/// EFBIG, with SIGXFSZ sent, if `size` exceeds the limit.
pub(super) fn grow<E: From<Errno>>(now: impl FnOnce() -> Result<u64, E>, size: u64) -> Result<(), E> {
    match file_max() {
        Some(limit) if size > limit && size > now()? => Err(too_long().into()),
        _ => Ok(()),
    }
}
