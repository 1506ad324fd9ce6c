//! For `varve run --stats`: decides which calls concern the mount, including calls that never reached LibFS.
//! Owns the marks that the counters keep on descriptors; decides nothing about how a call is made.

use super::{Answer, named_descriptor};
use crate::process::Process;
use crate::stats;
use crate::sys::args::Args;
use crate::sys::entry::outside;
use crate::sys::{kernel, reentry};
use crate::why::Why;
use std::ffi::CStr;

const CWD: i32 = libc::AT_FDCWD;

/// Counts a call after [`dispatch`](super::dispatch) has chosen its answer. A call left to the kernel counts
/// as fallen back if it is on a descriptor of the mount that was handed to the kernel, or on a path of the
/// mount after the process has given up serving.
pub(super) fn counted(process: &'static Process, args: &Args, answer: Answer) -> Option<isize> {
    let number = args.number();
    let answer = match answer {
        Answer::NotOurs => concerns(process, args).map_or(Answer::NotOurs, Answer::FellBack),
        other => other,
    };
    match answer {
        Answer::Served(result) => {
            stats::served(number);
            Some(result)
        }
        Answer::FellBackMade(result, why) => {
            stats::fell_back(number, why);
            Some(result)
        }
        Answer::FellBack(why) => {
            stats::fell_back(number, why);
            left_to_kernel(process, args, why)
        }
        Answer::Made(result) => {
            noted(process, args, result);
            Some(result)
        }
        Answer::NotOurs => {
            noted(process, args, 0);
            None
        }
    }
}

/// Makes a call on the mount here, although it is the kernel's, if it creates a descriptor, so that the new
/// descriptor is marked. Returns `None` for the others.
fn left_to_kernel(process: &Process, args: &Args, why: Why) -> Option<isize> {
    let makes = match args.number() as libc::c_long {
        // Opening a fifo may block.
        libc::SYS_open | libc::SYS_creat | libc::SYS_openat | libc::SYS_openat2 => {
            let result = outside(|| args.call());
            process
                .table
                .set_given(result as i32, (result >= 0).then_some(why));
            return Some(result);
        }
        libc::SYS_dup => true,
        libc::SYS_fcntl => matches!(args.int(1), libc::F_DUPFD | libc::F_DUPFD_CLOEXEC),
        _ => false,
    };
    let given = process.table.given(args.int(0)).filter(|_| makes);
    if given.is_some() {
        let result = args.call();
        process
            .table
            .set_given(result as i32, given.filter(|_| result >= 0));
        return Some(result);
    }
    noted(process, args, 0);
    None
}

/// Updates the marks of descriptor numbers for a call that the kernel made with `result`, or is about to
/// make.
fn noted(process: &Process, args: &Args, result: isize) {
    let table = &process.table;
    match args.number() as libc::c_long {
        _ if result < 0 => {}
        libc::SYS_close => table.set_given(args.int(0), None),
        libc::SYS_dup2 | libc::SYS_dup3 if !table.has(args.int(1)) => {
            table.set_given(args.int(1), table.given(args.int(0)));
        }
        libc::SYS_close_range if args.int(2) & libc::CLOSE_RANGE_CLOEXEC as i32 == 0 => {
            table.forget_given(args.word(0) as u32, args.word(1) as u32);
        }
        _ => {}
    }
}

/// Why a call is the kernel's that concerns the mount, as far as is known: its descriptor was handed to the
/// kernel or opened by it for a path of the mount; or its path lies in the mount and the process serves none.
fn concerns(process: &Process, args: &Args) -> Option<Why> {
    let given = |fd: i32| process.table.given(fd);
    let mut fds = descriptors(args).into_iter().flatten();
    fds.find_map(given).or_else(|| {
        paths(args).into_iter().flatten().find_map(|(dirfd, i)| {
            let Ok(path) = args.path(i) else {
                // A null pointer stands for the descriptor.
                return given(dirfd).filter(|_| args.word(i) == 0);
            };
            let of_dir = || given(dirfd).filter(|_| !path.starts_with(b"/"));
            let of_off = || {
                let why = match process.is_off() {
                    true => Why::SwitchedOff,
                    false => Why::NoSession,
                };
                (process.is_off_anywhere() && leads_in(process, dirfd, path)).then_some(why)
            };
            named_descriptor(path)
                .and_then(given)
                .or_else(of_dir)
                .or_else(of_off)
        })
    })
}

/// As [`concerns`], for a child that runs without the library. It asks the kernel, since the child may have
/// changed its descriptors unseen. Allocates nothing: another thread may have held the allocator's locks when
/// the child was created.
pub(super) fn goes_to_mount(process: &Process, args: &Args) -> bool {
    let is_of_mount = |fd: i32| {
        fd >= 0
            && !reentry::is_own(fd)
            && kernel::device_at(fd, c"").is_some_and(|device| process.pool_on(device).is_some())
    };
    descriptors(args).into_iter().flatten().any(is_of_mount)
        || paths(args)
            .into_iter()
            .flatten()
            .any(|(dirfd, i)| match args.path(i) {
                Ok(path) => leads_in(process, dirfd, path),
                Err(_) => args.word(i) == 0 && is_of_mount(dirfd),
            })
}

/// Whether a path, or its longest existing prefix, lies in the mount. Asks the kernel, since the process may
/// have changed its root.
fn leads_in(process: &Process, dirfd: i32, path: &[u8]) -> bool {
    let mut text = [0_u8; libc::PATH_MAX as usize];
    let mut len = path.len().min(text.len() - 1);
    text[..len].copy_from_slice(&path[..len]);
    loop {
        text[len] = 0;
        let path = match (&text[..len], dirfd) {
            (b"", CWD) => c".",
            _ => CStr::from_bytes_until_nul(&text).unwrap_or_default(),
        };
        if let Some(device) = kernel::device_at(dirfd, path) {
            return process.pool_on(device).is_some();
        }
        if len == 0 {
            return false;
        }
        // Drops the last component; the root keeps its slash.
        let slash = text[..len - 1].iter().rposition(|byte| *byte == b'/');
        len = slash.map_or(0, |at| at.max(usize::from(len > 1)));
    }
}

/// Returns the descriptors that a call operates on.
pub(super) fn descriptors(args: &Args) -> [Option<i32>; 2] {
    use libc as c;
    let fd = |i: usize| Some(args.int(i));
    match args.number() as c::c_long {
        c::SYS_read
        | c::SYS_write
        | c::SYS_pread64
        | c::SYS_pwrite64
        | c::SYS_readv
        | c::SYS_writev
        | c::SYS_preadv
        | c::SYS_preadv2
        | c::SYS_pwritev
        | c::SYS_pwritev2
        | c::SYS_lseek
        | c::SYS_ftruncate
        | c::SYS_fallocate
        | c::SYS_fsync
        | c::SYS_fdatasync
        | c::SYS_syncfs
        | c::SYS_sync_file_range
        | c::SYS_fadvise64
        | c::SYS_readahead
        | c::SYS_getdents
        | c::SYS_getdents64
        | c::SYS_fstat
        | c::SYS_fstatfs
        | c::SYS_fchdir
        | c::SYS_fchmod
        | c::SYS_fchown
        | c::SYS_fgetxattr
        | c::SYS_fsetxattr
        | c::SYS_flistxattr
        | c::SYS_fremovexattr
        | c::SYS_flock
        | c::SYS_fcntl
        | c::SYS_ioctl
        | c::SYS_vmsplice
        | c::SYS_dup
        | c::SYS_dup2
        | c::SYS_dup3
        | c::SYS_close => [fd(0), None],
        c::SYS_sendfile | c::SYS_tee => [fd(0), fd(1)],
        c::SYS_copy_file_range | c::SYS_splice => [fd(0), fd(2)],
        c::SYS_epoll_ctl => [fd(2), None],
        c::SYS_mmap if args.int(3) & c::MAP_ANONYMOUS == 0 => [fd(4), None],
        _ => [None, None],
    }
}

/// Returns the paths of a call: for each the directory where it starts and the index of its argument.
pub(super) fn paths(args: &Args) -> [Option<(i32, usize)>; 2] {
    use libc as c;
    match args.number() as c::c_long {
        c::SYS_open
        | c::SYS_creat
        | c::SYS_stat
        | c::SYS_lstat
        | c::SYS_access
        | c::SYS_chmod
        | c::SYS_chown
        | c::SYS_lchown
        | c::SYS_truncate
        | c::SYS_utime
        | c::SYS_utimes
        | c::SYS_getxattr
        | c::SYS_lgetxattr
        | c::SYS_setxattr
        | c::SYS_lsetxattr
        | c::SYS_listxattr
        | c::SYS_llistxattr
        | c::SYS_removexattr
        | c::SYS_lremovexattr
        | c::SYS_mkdir
        | c::SYS_mknod
        | c::SYS_rmdir
        | c::SYS_unlink
        | c::SYS_readlink => [Some((CWD, 0)), None],
        c::SYS_symlink => [Some((CWD, 1)), None],
        c::SYS_symlinkat => [Some((args.int(1), 2)), None],
        c::SYS_rename | c::SYS_link => [Some((CWD, 0)), Some((CWD, 1))],
        c::SYS_renameat | c::SYS_renameat2 | c::SYS_linkat => {
            [Some((args.int(0), 1)), Some((args.int(2), 3))]
        }
        c::SYS_openat
        | c::SYS_openat2
        | c::SYS_newfstatat
        | c::SYS_statx
        | c::SYS_faccessat
        | c::SYS_faccessat2
        | c::SYS_fchmodat
        | c::SYS_fchmodat2
        | c::SYS_fchownat
        | c::SYS_futimesat
        | c::SYS_utimensat
        | c::SYS_mkdirat
        | c::SYS_mknodat
        | c::SYS_unlinkat
        | c::SYS_readlinkat
        | c::SYS_name_to_handle_at => [Some((args.int(0), 1)), None],
        _ => [None, None],
    }
}
