//! Calls by which the kernel must know a file: maps, readiness, passing descriptors, rings.

use super::{Answer, error};
use crate::Errno;
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::kernel;

pub(super) fn mmap(p: &Process, a: &Args) -> Answer {
    let (protection, flags, fd) = (a.int(2), a.int(3), a.int(4));
    if flags & libc::MAP_ANONYMOUS != 0 {
        return Answer::NotOurs;
    }
    let Some(ofd) = p.table.get(fd) else {
        return Answer::NotOurs;
    };
    let shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
    if shared && ofd.access().1 {
        // What is stored through the map is in the kernel's page cache: whoever reads the file here must read it there. A map that is
        // made without PROT_WRITE may get it later.
        let _ = protection;
        p.give_inode(ofd.key());
        let answer = p.to_kernel(&[fd]);
        kernel::refresh(fd);
        return answer;
    }
    match p.side(fd, &ofd) {
        Ok(side) => {
            // The descriptor may be from before the file grew, and what lies beyond the end that the kernel knows is a SIGBUS.
            kernel::refresh(side);
            Answer::FellBackMade(a.call_with(4, side))
        }
        Err(errno) => Answer::FellBackMade(error(errno)),
    }
}

pub(super) fn poll(p: &Process, a: &Args) -> Answer {
    let mut ours = Vec::new();
    for nth in 0..a.word(1).min(crate::table::LIMIT) {
        let Ok(entry) = a.get_nth::<libc::pollfd>(0, nth) else {
            break;
        };
        if p.table.has(entry.fd) {
            ours.push(entry.fd);
        }
    }
    p.on_real(&ours)
}

pub(super) fn select(p: &Process, a: &Args) -> Answer {
    let count = usize::try_from(a.int(0)).unwrap_or(0).min(crate::table::LIMIT);
    let mut ours = Vec::new();
    for set in (1..=3).filter(|set| a.word(*set) != 0) {
        for fd in 0..count {
            let Ok(word) = a.get_nth::<u64>(set, fd / 64) else {
                break;
            };
            if word >> (fd % 64) & 1 != 0 && p.table.has(fd as i32) {
                ours.push(fd as i32);
            }
        }
    }
    p.on_real(&ours)
}

/// Files and directories are always ready, and `epoll` refuses them as everywhere. (Those of the mount it would take, since FUSE can be asked.)
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
    p.kernels(&carried)
}

/// Rings take descriptors that this library does not see: from now on all are the kernel's.
pub(super) fn rings(p: &Process) -> Answer {
    p.gives_up()
}
