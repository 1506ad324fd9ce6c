//! The functions of `varve.h`: they check arguments and convert them to Rust types, and convert results to
//! the C convention (-1 and `errno`). Has `unsafe` code; decides nothing.
//!
//! # Safety
//! For every function: paths are NUL-terminated strings, buffers are as long as their lengths say, results
//! point to memory of their type, and none of them changes during the call. NULL is allowed everywhere and
//! refused. Handles may have any value.
#![allow(unsafe_code)]
#![allow(
    clippy::missing_safety_doc,
    reason = "what callers owe is the same for all, and said once, above and at the top of varve.h"
)]

mod dirs;
mod files;
mod locks;
mod names;
mod sessions;
mod transactions;

pub use dirs::*;
pub use files::*;
pub use locks::*;
pub use names::*;
pub use sessions::*;
pub use transactions::*;

pub(crate) use sessions::as_path;

use crate::registry::{SESSIONS, Session};
use libc::{c_char, c_int};
use std::ffi::CStr;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use varve_format::InodeAttr;
use varve_libfs::{Errno, Posix};

/// A value, or the errno to set.
pub(crate) type Outcome<T> = Result<T, Errno>;

/// Sets the calling thread's `errno`.
fn set_errno(errno: i32) {
    // SAFETY: the C library's pointer to this thread's `errno` is always valid for writes.
    unsafe { *libc::__errno_location() = errno };
}

/// Prints a line on standard error. `eprintln!` would panic if its reader is gone.
pub(crate) fn note(text: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "libvarve: {text}");
}

/// Runs a call and returns its value, or `failed` with `errno` set. A panic ends here, as EIO.
pub(crate) fn guard<T>(failed: T, call: impl FnOnce() -> Outcome<T>) -> T {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => value,
        Ok(Err(errno)) => {
            set_errno(errno.0);
            failed
        }
        Err(_) => {
            set_errno(libc::EIO);
            failed
        }
    }
}

/// As [`guard`], for calls that return 0.
pub(crate) fn zero(call: impl FnOnce() -> Outcome<()>) -> c_int {
    guard(-1, || call().map(|()| 0))
}

fn session(fs: *const varve_fs) -> Outcome<Arc<Session>> {
    SESSIONS.get(fs.addr()).map_err(Errno)
}

/// As [`zero`], for calls on a connected pool.
fn on(fs: *const varve_fs, call: impl FnOnce(&Posix) -> Outcome<()>) -> c_int {
    zero(|| call(&session(fs)?.posix))
}

/// Returns the bytes of a path.
///
/// # Safety
/// `path` is NULL, or a NUL-terminated string that does not change while the result is used.
pub(crate) unsafe fn c_path<'a>(path: *const c_char) -> Outcome<&'a [u8]> {
    if path.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    Ok(unsafe { CStr::from_ptr(path) }.to_bytes())
}

fn checked_len<T>(buffer: *const T, len: usize) -> Outcome<()> {
    if len > isize::MAX as usize {
        return Err(Errno(libc::EINVAL));
    }
    if buffer.is_null() && len > 0 {
        return Err(Errno(libc::EFAULT));
    }
    Ok(())
}

/// Returns the bytes of a buffer that is read.
///
/// # Safety
/// `buffer` is NULL, or points to `len` bytes that do not change while the result is used.
pub(crate) unsafe fn input<'a>(buffer: *const libc::c_void, len: usize) -> Outcome<&'a [u8]> {
    checked_len(buffer, len)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: not NULL and not longer than a slice may be, as was just checked; the caller vouches for
    // the rest.
    Ok(unsafe { std::slice::from_raw_parts(buffer.cast(), len) })
}

/// Returns a buffer to be filled.
///
/// # Safety
/// `buffer` is NULL, or points to `len` bytes that are not used otherwise while the result is used.
pub(crate) unsafe fn output<'a>(buffer: *mut libc::c_void, len: usize) -> Outcome<&'a mut [u8]> {
    checked_len(buffer, len)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `input`; any bytes are valid, and they are only written.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), len) })
}

/// Stores a result.
///
/// # Safety
/// `to` is NULL, or points to memory for a `T`, aligned for it.
pub(crate) unsafe fn store<T>(to: *mut T, value: T) -> Outcome<()> {
    if to.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: not NULL, and the caller vouches for the rest.
    unsafe { to.write(value) };
    Ok(())
}

fn length(value: libc::off_t) -> Outcome<u64> {
    u64::try_from(value).map_err(|_| Errno(libc::EINVAL))
}

/// Converts attributes to the C library's structure.
fn stat_of(attr: &InodeAttr) -> libc::stat {
    // SAFETY: `stat` is made of integers, for which zeros are valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    let split = |ns: i64| (ns.div_euclid(1_000_000_000), ns.rem_euclid(1_000_000_000));
    stat.st_ino = attr.key.number();
    stat.st_mode = attr.mode;
    stat.st_nlink = attr.nlink as _;
    stat.st_uid = attr.uid;
    stat.st_gid = attr.gid;
    stat.st_rdev = attr.rdev.into();
    stat.st_size = attr.size_bytes as _;
    stat.st_blksize = varve_format::BLOCK_BYTES as _;
    stat.st_blocks = attr.sectors as _;
    (stat.st_atime, stat.st_atime_nsec) = split(attr.atime_ns);
    (stat.st_mtime, stat.st_mtime_nsec) = split(attr.mtime_ns);
    (stat.st_ctime, stat.st_ctime_nsec) = split(attr.ctime_ns);
    stat
}

#[cfg(test)]
mod tests {
    use super::{guard, set_errno};
    use varve_libfs::Errno;

    fn errno() -> i32 {
        std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
    }

    #[test]
    fn panic_ends_at_the_border_as_an_error() {
        let silent = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        set_errno(0);
        let value = guard(-1, || panic!("a fault"));
        std::panic::set_hook(silent);
        assert_eq!((value, errno()), (-1, libc::EIO));
    }

    #[test]
    fn errno_is_set_on_failure_only() {
        set_errno(7);
        assert_eq!(guard(-1, || Ok(3)), 3);
        assert_eq!(errno(), 7);
        assert_eq!(guard(-1, || Err(Errno(libc::ENOSPC))), -1);
        assert_eq!(errno(), libc::ENOSPC);
    }
}
