//! Calls that change nothing, in a process that has no session yet. The mount makes the first few: many
//! programs read a file or two and exit, and a session costs more than that. The first change, the first open
//! of a directory and the first open of a large file open a session.

use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::kernel;
use std::ffi::CString;

/// Reading a file of more bytes is worth a session.
const SMALL_BYTES: u64 = 256 << 10;

/// Flags of `open` that go with reading only.
const READING: i32 =
    libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_LARGEFILE | 0o100_000;

/// Whether the call is left to the mount, on a path that starts at `dirfd`.
pub(super) fn is_left_to_mount(p: &Process, a: &Args, dirfd: i32, path: &[u8]) -> bool {
    let opens = match a.number() as libc::c_long {
        libc::SYS_open if a.int(1) & !READING == 0 => Some(a.int(1)),
        libc::SYS_openat if a.int(2) & !READING == 0 => Some(a.int(2)),
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
        | libc::SYS_llistxattr => None,
        _ => return false,
    };
    if !p.is_early(dirfd, path) {
        return false;
    }
    opens.is_none_or(|flags| is_small(dirfd, path, flags & libc::O_NOFOLLOW == 0))
}

/// Whether the path's target is neither a directory nor a large file; true if there is none.
fn is_small(dirfd: i32, path: &[u8], follow: bool) -> bool {
    let Ok(path) = CString::new(path) else {
        return false;
    };
    kernel::mode_and_size(dirfd, &path, follow).is_none_or(|(mode, size)| match mode & libc::S_IFMT {
        libc::S_IFDIR => false,
        libc::S_IFREG => size <= SMALL_BYTES,
        _ => true,
    })
}
