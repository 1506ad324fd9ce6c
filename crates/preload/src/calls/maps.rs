//! Calls for which the kernel must know a file: maps, readiness, passing descriptors, rings.

use super::{Answer, error};
use crate::Errno;
use crate::mmap_copies::{Asked, Maps};
use crate::ofd::Ofd;
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::kernel;
use crate::sys::pages::PAGE;
use crate::why::Why;
use std::ops::Range;
use std::sync::Arc;

/// Flags of maps that are served here: hints that the kernel may ignore.
const SERVED: i32 =
    libc::MAP_TYPE | libc::MAP_NORESERVE | libc::MAP_POPULATE | libc::MAP_NONBLOCK | libc::MAP_DENYWRITE;

/// Returns the pages of arguments `i` (address) and `i + 1` (length) if they touch a served map. The
/// program's allocator makes these calls with its locks held, so nothing is allocated unless a served map is
/// touched.
fn served_range(a: &Args, i: usize) -> Option<Range<usize>> {
    let (at, len) = (a.word(i), a.word(i + 1).max(1));
    if !Maps::touches(at, len) {
        return None;
    }
    Some(at & !(PAGE - 1)..at.checked_add(len)?.checked_next_multiple_of(PAGE)?)
}

pub(super) fn munmap(p: &Process, a: &Args) -> Answer {
    let made = served_range(a, 0).and_then(|range| p.copies.unmap(&range, || a.call()));
    made.map_or(Answer::NotOurs, Answer::Made)
}

/// Hands maps to the mount that are to become more than read-only ones; the kernel makes the call.
fn give(p: &Process, range: &Range<usize>) -> Answer {
    match p.copies.give(p, range) {
        Ok(()) => Answer::NotOurs,
        Err(errno) => Answer::FellBackMade(error(errno), Why::CannotOpen),
    }
}

pub(super) fn mremap(p: &Process, a: &Args) -> Answer {
    let target = (a.int(3) & libc::MREMAP_FIXED != 0)
        .then(|| a.word(4)..a.word(4).saturating_add(a.word(2).next_multiple_of(PAGE)))
        .filter(|target| Maps::touches(target.start, target.len()));
    let answer = served_range(a, 0).map_or(Answer::NotOurs, |range| give(p, &range));
    match target {
        Some(target) if answer == Answer::NotOurs => Answer::Made(p.copies.replace(&target, || a.call())),
        _ => answer,
    }
}

pub(super) fn mprotect(p: &Process, a: &Args) -> Answer {
    let Some(range) = served_range(a, 0) else {
        return Answer::NotOurs;
    };
    if a.int(2) & !libc::PROT_READ != 0 {
        return give(p, &range);
    }
    Answer::Made(p.copies.protect(&range, a.int(2), || a.call()))
}

pub(super) fn madvise(p: &Process, a: &Args) -> Answer {
    match a.int(2) {
        libc::MADV_DOFORK => served_range(a, 0).map_or(Answer::NotOurs, |range| give(p, &range)),
        _ => Answer::NotOurs,
    }
}

/// Serves a map here if it cannot change the file and its address is left to the kernel.
fn serve(p: &Process, a: &Args, ofd: &Arc<Ofd>) -> Option<isize> {
    let (protection, flags) = (a.int(2), a.int(3));
    let shared = match flags & libc::MAP_TYPE {
        libc::MAP_PRIVATE => false,
        libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE => true,
        _ => return None,
    };
    let reads = protection == libc::PROT_READ && ofd.access().0 && !ofd.is_dir;
    if !reads || (shared && ofd.access().1) || flags & !SERVED != 0 {
        return None;
    }
    let asked = Asked {
        hint: a.word(0) & !(PAGE - 1),
        len: a.word(1),
        offset: a.word(5) as u64,
        shared,
    };
    p.copies.serve(p, ofd, asked).map(|at| at as isize)
}

pub(super) fn mmap(p: &Process, a: &Args) -> Answer {
    let flags = a.int(3);
    let ofd = (flags & libc::MAP_ANONYMOUS == 0)
        .then(|| p.table.get(a.int(4)))
        .flatten();
    if flags & libc::MAP_FIXED != 0
        && let Some(range) = served_range(a, 0)
    {
        let call = || match &ofd {
            Some(ofd) => by_mount(p, a, ofd),
            None => a.call(),
        };
        return Answer::Made(p.copies.replace(&range, call));
    }
    let Some(ofd) = ofd else {
        return Answer::NotOurs;
    };
    match serve(p, a, &ofd) {
        Some(at) => Answer::Served(at),
        None => {
            let why = match writes(a, &ofd) {
                true => Why::Mapped,
                false => Why::OtherMap,
            };
            Answer::FellBackMade(by_mount(p, a, &ofd), why)
        }
    }
}

/// Whether a map of the file may change it.
fn writes(a: &Args, ofd: &Ofd) -> bool {
    a.int(3) & libc::MAP_TYPE != libc::MAP_PRIVATE && ofd.access().1
}

/// Has the kernel map the mount's file.
fn by_mount(p: &Process, a: &Args, ofd: &Arc<Ofd>) -> isize {
    let fd = a.int(4);
    if writes(a, ofd) {
        // Stores through the map reach the kernel's page cache, so reads of the file in this process must go
        // through it too. A map made without PROT_WRITE may get it later.
        p.give_inode(ofd.id());
        if let Err(errno) = p.materialise(fd) {
            return error(errno);
        }
        kernel::refresh(fd);
        return a.call();
    }
    match p.side(fd, ofd) {
        Ok(side) => {
            // The descriptor may have been opened before the file grew, and access beyond the end that the
            // kernel knows raises SIGBUS.
            kernel::refresh(side);
            a.call_with(4, side)
        }
        Err(errno) => error(errno),
    }
}

pub(super) fn poll(p: &Process, a: &Args) -> Answer {
    let mut ours = Vec::new();
    let count = if p.table.is_unused() {
        0
    } else {
        (a.uint(1) as usize).min(crate::table::LIMIT)
    };
    a.each(0, count, |_, entry: libc::pollfd| {
        if p.table.has(entry.fd) {
            ours.push(entry.fd);
        }
    });
    p.on_real(Why::NotServed, &ours)
}

pub(super) fn select(p: &Process, a: &Args) -> Answer {
    let count = usize::try_from(a.int(0)).unwrap_or(0).min(crate::table::LIMIT);
    let count = if p.table.is_unused() { 0 } else { count };
    let mut ours = Vec::new();
    for set in (1..=3).filter(|set| a.word(*set) != 0) {
        a.each(set, count.div_ceil(64), |nth, word: u64| {
            let mut left = word;
            while left != 0 {
                let fd = nth * 64 + left.trailing_zeros() as usize;
                left &= left - 1;
                if fd < count && p.table.has(fd as i32) {
                    ours.push(fd as i32);
                }
            }
        });
    }
    p.on_real(Why::NotServed, &ours)
}

/// Refuses files and directories, which are always ready, as `epoll` does on other file systems. (It would
/// accept the mount's own descriptors, since a FUSE file can be polled.)
pub(super) fn epoll_ctl(p: &Process, a: &Args) -> Answer {
    if !p.table.has(a.int(2)) {
        return Answer::NotOurs;
    }
    let reads_event = matches!(a.int(1), libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD);
    let errno = if reads_event && a.bytes(3, size_of::<libc::epoll_event>()).is_err() {
        libc::EFAULT
    } else if kernel::fcntl(a.int(0), libc::F_GETFD, 0) < 0 {
        libc::EBADF
    } else {
        libc::EPERM
    };
    Answer::Served(error(Errno(errno)))
}

pub(super) fn sendmsg(p: &Process, a: &Args, count: usize) -> Answer {
    let stride = if a.number() as libc::c_long == libc::SYS_sendmmsg {
        size_of::<libc::mmsghdr>()
    } else {
        0
    };
    let carried: Vec<i32> = (0..count.min(1024))
        .flat_map(|nth| a.carried(1, nth, stride))
        .collect();
    match p.kernels(Why::NotServed, &carried) {
        Answer::NotOurs => p.on_real(Why::NotServed, &[a.int(0)]),
        other => other,
    }
}

/// io_uring and aio take descriptors that this library does not see, so the process gives up serving.
pub(super) fn rings(p: &Process) -> Answer {
    p.gives_up()
}
