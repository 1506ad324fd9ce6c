//! Calls by path in a process that has no session yet. The mount makes the first few: many programs read a
//! file or two or make one, and exit, and a session costs more than that. The first open of a directory or of
//! a large file opens a session at once.

use super::Answer;
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::entry::outside;
use crate::sys::kernel;
use crate::why::Why;
use std::ffi::CString;

/// Reading or writing a file of more bytes is worth a session.
const SMALL_BYTES: u64 = 256 << 10;

const LARGEFILE: i32 = 0o100_000;
/// Flags of `open` that go with reading only.
const READING: i32 =
    libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_LARGEFILE | LARGEFILE;
/// Flags of an `open` that changes something, or lets the program change it.
const CHANGING: i32 = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC;
/// Flags that go with those.
const ALLOWED: i32 = READING | CHANGING | libc::O_EXCL | libc::O_APPEND | libc::O_SYNC | libc::O_DSYNC;

/// Whether the call is left to the mount, on a path that starts at `dirfd`.
pub(super) fn is_left_to_mount(p: &Process, a: &Args, dirfd: i32, path: &[u8]) -> bool {
    let mut second = libc::AT_FDCWD;
    let opens = match a.number() as libc::c_long {
        libc::SYS_open if only_reads(a.int(1)) => Some(a.int(1)),
        libc::SYS_openat if only_reads(a.int(2)) => Some(a.int(2)),
        libc::SYS_stat
        | libc::SYS_lstat
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_access
        | libc::SYS_faccessat
        | libc::SYS_faccessat2
        | libc::SYS_readlink
        | libc::SYS_readlinkat
        | libc::SYS_getxattr
        | libc::SYS_lgetxattr
        | libc::SYS_listxattr
        | libc::SYS_llistxattr
        | libc::SYS_mkdir
        | libc::SYS_mkdirat
        | libc::SYS_mknod
        | libc::SYS_mknodat
        | libc::SYS_symlink
        | libc::SYS_symlinkat
        | libc::SYS_link
        | libc::SYS_unlink
        | libc::SYS_unlinkat
        | libc::SYS_rmdir
        | libc::SYS_chmod
        | libc::SYS_fchmodat
        | libc::SYS_fchmodat2
        | libc::SYS_chown
        | libc::SYS_lchown
        | libc::SYS_fchownat
        | libc::SYS_utime
        | libc::SYS_utimes
        | libc::SYS_futimesat
        | libc::SYS_utimensat => None,
        libc::SYS_rename => None,
        libc::SYS_linkat | libc::SYS_renameat | libc::SYS_renameat2 => {
            second = a.int(2);
            None
        }
        _ => return false,
    };
    // A served descriptor means something else to the kernel.
    if p.serves(second) || !p.is_early(dirfd, path) {
        return false;
    }
    opens.is_none_or(|flags| is_small(dirfd, path, flags).is_none_or(|is_small| is_small))
}

/// Whether an `open` only reads a file, or looks whether there is a directory, which opens a session.
const fn only_reads(flags: i32) -> bool {
    const LOOKING: i32 = libc::O_PATH | libc::O_DIRECTORY;
    flags & !READING == 0 || flags & libc::O_DIRECTORY != 0 && flags & !(READING | LOOKING) == 0
}

/// Has the mount make a call that may move a directory, in which this process may be.
pub(super) fn on_names(p: &Process, a: &Args) -> Answer {
    let result = outside(|| a.call());
    if result == 0 {
        p.may_have_moved();
    }
    Answer::FellBackMade(result, Why::FirstCalls)
}

/// Opens a file for changing it through the mount, if no session is worth it yet. It is served later, when
/// enough calls were made on it.
pub(super) fn open(p: &Process, a: &Args, dirfd: i32, i: usize, flags: i32) -> Option<Answer> {
    if flags & CHANGING == 0 || flags & !ALLOWED != 0 {
        return None;
    }
    let path = a.path(i).ok()?;
    if !p.is_early(dirfd, path) {
        return None;
    }
    match is_small(dirfd, path, flags) {
        Some(true) => {}
        None if flags & libc::O_CREAT != 0 => {}
        _ => return None,
    }
    let result = outside(|| a.call());
    if let Ok(fd) = i32::try_from(result)
        && fd >= 0
    {
        p.adopt_opened(fd, flags, p.early_route(dirfd, path));
    }
    Some(Answer::FellBackMade(result, Why::FirstCalls))
}

/// Whether the path's target, as `open` with `flags` finds it, is a small regular file, or neither a file nor
/// a directory; `None` if there is none.
fn is_small(dirfd: i32, path: &[u8], flags: i32) -> Option<bool> {
    let path = CString::new(path).ok()?;
    let (mode, size) = kernel::mode_and_size(dirfd, &path, flags & libc::O_NOFOLLOW == 0)?;
    Some(match mode & libc::S_IFMT {
        libc::S_IFDIR => false,
        libc::S_IFREG => size <= SMALL_BYTES,
        _ => flags & CHANGING == 0,
    })
}
