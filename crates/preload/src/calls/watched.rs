//! Calls that raise `inotify` and `fanotify` events while there is a watch: they go through the mount, whose
//! kernel raises the events (ADR 26).

use super::counted::{descriptors, paths};
use super::{Answer, named_descriptor};
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::entry::outside;
use crate::sys::kernel;
use crate::walk::{FileId, Start, bare};
use crate::watches::{ATTRIBUTE, Sets};
use crate::why::Why;
use std::ffi::CString;

/// Answers a call that concerns a watched file. `None` if LibFS may serve it.
pub(super) fn watched(p: &Process, a: &Args) -> Option<Answer> {
    // This check comes first: asking for the watches may take a message whose reply the library's own threads
    // read, and these threads set their name by a call that passes here.
    if !makes_events(a.number() as libc::c_long) {
        return None;
    }
    let set = p.watched()?;
    let ours = |fd: i32| p.table.get(fd).is_some_and(|ofd| set.has_open(&ofd));
    let fds: Vec<i32> = descriptors(a).into_iter().flatten().collect();
    if fds.iter().any(|fd| ours(*fd)) {
        // A file that the kernel can no longer open is served without events.
        let given = fds.iter().all(|fd| p.materialise(*fd).is_ok());
        return given.then_some(Answer::FellBack(Why::Watched));
    }
    let starts: Vec<(i32, usize)> = paths(a).into_iter().flatten().collect();
    if starts.iter().any(|(dirfd, i)| leads_to(p, a, &set, *dirfd, *i)) {
        let real = starts.iter().all(|(dirfd, _)| p.make_real(*dirfd).is_ok());
        return real.then_some(Answer::FellBack(Why::Watched));
    }
    None
}

/// Whether the path in argument `i` leads to something watched, or to a name in a directory that is.
fn leads_to(p: &Process, a: &Args, set: &Sets, dirfd: i32, i: usize) -> bool {
    let path = match a.path(i) {
        Ok(path) if !path.is_empty() => path,
        // An empty path stands for the descriptor; the kernel refuses a bad one.
        _ => return p.table.get(dirfd).is_some_and(|ofd| set.has_open(&ofd)),
    };
    let walk = |follow: bool| {
        let start = p.start(dirfd, path).ok().flatten()?;
        let rest = bare(start.rest);
        p.walk(Start { rest, ..start }, follow).ok()
    };
    let is_watched = |walked: &crate::walk::Walked| {
        let has = |key| {
            set.has(FileId {
                pool: walked.pool,
                key,
            })
        };
        has(walked.dir) || walked.target.as_ref().is_some_and(|target| has(target.key))
    };
    let Some(walked) = walk(false) else {
        return false;
    };
    let is_link = walked
        .target
        .as_ref()
        .is_some_and(|target| target.kind() == varve_format::FileKind::Symlink);
    is_watched(&walked) || (is_link && walk(true).as_ref().is_some_and(is_watched))
}

/// Whether a call can raise an event: every call that opens, reads or changes a file. Mere queries raise
/// none.
fn makes_events(number: libc::c_long) -> bool {
    use libc as c;
    matches!(
        number,
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
            | c::SYS_ftruncate
            | c::SYS_fallocate
            | c::SYS_copy_file_range
            | c::SYS_sendfile
            | c::SYS_getdents64
            | c::SYS_fchmod
            | c::SYS_fchown
            | c::SYS_fsetxattr
            | c::SYS_fremovexattr
            | c::SYS_open
            | c::SYS_creat
            | c::SYS_openat
            | c::SYS_openat2
            | c::SYS_truncate
            | c::SYS_chmod
            | c::SYS_fchmodat
            | c::SYS_fchmodat2
            | c::SYS_chown
            | c::SYS_lchown
            | c::SYS_fchownat
            | c::SYS_utime
            | c::SYS_utimes
            | c::SYS_futimesat
            | c::SYS_utimensat
            | c::SYS_setxattr
            | c::SYS_lsetxattr
            | c::SYS_removexattr
            | c::SYS_lremovexattr
            | c::SYS_mkdir
            | c::SYS_mkdirat
            | c::SYS_mknod
            | c::SYS_mknodat
            | c::SYS_rmdir
            | c::SYS_unlink
            | c::SYS_unlinkat
            | c::SYS_rename
            | c::SYS_renameat
            | c::SYS_renameat2
            | c::SYS_link
            | c::SYS_linkat
            | c::SYS_symlink
            | c::SYS_symlinkat
    )
}

/// Handles `inotify_add_watch`: the kernel sets the mark, and the mount's process is told of it before the
/// program continues.
pub(super) fn inotify_add_watch(p: &Process, a: &Args) -> Answer {
    let Ok(path) = a.path(1).map(<[u8]>::to_vec) else {
        return Answer::NotOurs;
    };
    make_named_real(p, &path);
    let _ = p.make_real(a.int(0));
    let result = outside(|| a.call());
    if result >= 0 {
        let follow = a.uint(2) & libc::IN_DONT_FOLLOW == 0;
        tell(p, libc::AT_FDCWD, path, follow, false);
    }
    Answer::Made(result)
}

/// Handles `fanotify_mark`, as [`inotify_add_watch`].
pub(super) fn fanotify_mark(p: &Process, a: &Args) -> Answer {
    let (flags, dirfd) = (a.uint(1), a.int(3));
    let _ = p.make_real(a.int(0));
    if flags & libc::FAN_MARK_ADD == 0 {
        return Answer::NotOurs;
    }
    let path = match a.word(4) {
        0 => Vec::new(),
        _ => match a.path(4) {
            Ok(path) => path.to_vec(),
            Err(_) => return Answer::NotOurs,
        },
    };
    make_named_real(p, &path);
    let _ = p.make_real(dirfd);
    let result = outside(|| a.call());
    if result >= 0 {
        let whole = flags & (libc::FAN_MARK_MOUNT | libc::FAN_MARK_FILESYSTEM) != 0;
        let follow = flags & libc::FAN_MARK_DONT_FOLLOW == 0;
        tell(p, dirfd, path, follow, whole);
    }
    Answer::Made(result)
}

fn make_named_real(p: &Process, path: &[u8]) {
    if let Some(fd) = named_descriptor(path) {
        let _ = p.make_real(fd);
    }
}

/// Tells the mount's process of a mark on the file at `path`, or on the whole mount if `whole`. Does nothing
/// if the file is on another device.
fn tell(p: &Process, dirfd: i32, path: Vec<u8>, follow: bool, whole: bool) {
    let Some((device, number)) = CString::new(path)
        .ok()
        .and_then(|path| kernel::inode_at(dirfd, &path, follow))
    else {
        return;
    };
    for (_, pool) in p.pools().filter(|(_, pool)| pool.config.device == device) {
        pool.ask_mount(&if whole {
            format!("{ATTRIBUTE}.all")
        } else {
            format!("{ATTRIBUTE}.{number:x}")
        });
    }
}
