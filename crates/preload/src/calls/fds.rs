//! Descriptors: closing, duplicating, their flags.

use super::{Answer, carried, clone, error, locks};
use crate::Errno;
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::{kernel, reentry};
use crate::walk::{Stop, fail};
use crate::why::Why;

const BAD: Answer = Answer::Made(error(Errno(libc::EBADF)));

pub(super) fn close(p: &Process, a: &Args) -> Answer {
    let fd = a.int(0);
    if reentry::is_own(fd) {
        return BAD;
    }
    if !p.table.has(fd) {
        return Answer::NotOurs;
    }
    let gate = p.gate.read();
    let Some(ofd) = p.table.take(fd) else {
        return Answer::NotOurs;
    };
    locks::closing(p, &ofd);
    kernel::close(fd);
    drop(gate);
    drop(ofd);
    Answer::Served(0)
}

pub(super) fn close_range(p: &Process, a: &Args) -> Answer {
    let (first, last) = (a.uint(0), a.uint(1));
    if first > last || a.int(2) & !(libc::CLOSE_RANGE_CLOEXEC | libc::CLOSE_RANGE_UNSHARE) as i32 != 0 {
        return Answer::NotOurs;
    }
    if a.int(2) & libc::CLOSE_RANGE_UNSHARE as i32 != 0 {
        // This thread gets its own descriptor table; the library's table is per process.
        return p.gives_up();
    }
    let gate = p.gate.read();
    if a.int(2) & libc::CLOSE_RANGE_CLOEXEC as i32 == 0 {
        for fd in p.table.between(first, last) {
            if let Some(ofd) = p.table.take(fd) {
                locks::closing(p, &ofd);
            }
        }
    }
    // Skip the library's own descriptors.
    let mut from = first;
    let mut result = 0;
    for fd in reentry::own()
        .into_iter()
        .map(|fd| fd as u32)
        .filter(|fd| (first..=last).contains(fd))
    {
        if fd > from {
            result = a.close_range(from, fd - 1);
        }
        from = fd + 1;
    }
    if from <= last {
        result = a.close_range(from, last);
    }
    drop(gate);
    Answer::Made(result)
}

pub(super) fn dup(p: &Process, a: &Args) -> Answer {
    dup_above(p, a.int(0), 0, false)
}

fn dup_above(p: &Process, fd: i32, from: usize, cloexec: bool) -> Answer {
    if !p.table.has(fd) {
        return Answer::NotOurs;
    }
    let _gate = p.gate.read();
    let Some(ofd) = p.table.get(fd) else {
        return Answer::NotOurs;
    };
    let command = if cloexec {
        libc::F_DUPFD_CLOEXEC
    } else {
        libc::F_DUPFD
    };
    let new = kernel::fcntl(fd, command, from);
    if new >= 0 && !p.table.put(new as i32, ofd) {
        // Beyond the end of the table: fail as if no descriptor were left.
        kernel::close(new as i32);
        return Answer::Served(error(Errno(libc::EMFILE)));
    }
    Answer::Served(new)
}

pub(super) fn dup_to(p: &Process, a: &Args) -> Answer {
    let (fd, to) = (a.int(0), a.int(1));
    if reentry::is_own(to) || reentry::is_own(fd) {
        return BAD;
    }
    if !p.table.has(fd) && !p.table.has(to) {
        return Answer::NotOurs;
    }
    let gate = p.gate.read();
    let result = a.call();
    if result < 0 || fd == to {
        return Answer::Made(result);
    }
    let old = p.table.take(to);
    if let Some(old) = &old {
        locks::closing(p, old);
    }
    let Some(ofd) = p.table.get(fd) else {
        drop(gate);
        drop(old);
        return Answer::Made(result);
    };
    let kept = p.table.put(to, std::sync::Arc::clone(&ofd));
    drop(gate);
    drop(old);
    if !kept {
        // Beyond the end of the table: the description is handed to the kernel.
        if let Err(errno) = p.materialise(fd) {
            return Answer::FellBackMade(error(errno), Why::CannotOpen);
        }
        return Answer::FellBackMade(a.call(), Why::HighNumber);
    }
    Answer::Served(result)
}

const F_GET_RW_HINT: i32 = 1035;
const F_SET_RW_HINT: i32 = 1036;
const F_GET_FILE_RW_HINT: i32 = 1037;
const F_SET_FILE_RW_HINT: i32 = 1038;
/// Largest value of a write-lifetime hint (`RWH_WRITE_LIFE_EXTREME`).
const RW_HINT_MAX: u64 = 5;

const DN_MULTISHOT: u32 = 0x8000_0000;

/// The errno for a lease request: there is no lease to remove, and none is granted.
const fn no_lease(kind: i32) -> i32 {
    if kind == libc::F_UNLCK {
        libc::EAGAIN
    } else {
        libc::EINVAL
    }
}

pub(super) fn fcntl(p: &Process, a: &Args) -> Answer {
    let fd = a.int(0);
    if reentry::is_own(fd) {
        return BAD;
    }
    let Some(ofd) = p.table.get(fd) else {
        return Answer::NotOurs;
    };
    match a.int(1) {
        // Descriptor flags are those of the placeholder.
        libc::F_GETFD | libc::F_SETFD => Answer::Served(a.call()),
        libc::F_GETFL => Answer::Served(ofd.status() as isize),
        libc::F_SETFL => {
            ofd.set_status(a.int(2));
            Answer::Served(if ofd.is_real() { a.call() } else { 0 })
        }
        libc::F_DUPFD => dup_above(p, fd, a.uint(2) as usize, false),
        libc::F_DUPFD_CLOEXEC => dup_above(p, fd, a.uint(2) as usize, true),
        libc::F_GETLK
        | libc::F_SETLK
        | libc::F_SETLKW
        | libc::F_OFD_GETLK
        | libc::F_OFD_SETLK
        | libc::F_OFD_SETLKW => locks::fcntl(p, a, &ofd),
        libc::F_GETPIPE_SZ | libc::F_SETPIPE_SZ => Answer::Served(error(Errno(libc::EBADF))),
        // Expected lifetime of the data: a hint for devices, ignored here.
        F_GET_RW_HINT | F_GET_FILE_RW_HINT => Answer::of(a.put(2, 0_u64).map(|()| 0).map_err(Into::into)),
        F_SET_RW_HINT | F_SET_FILE_RW_HINT => match a.get::<u64>(2) {
            Ok(hint) if hint <= RW_HINT_MAX => Answer::Served(0),
            Ok(_) => Answer::Served(error(Errno(libc::EINVAL))),
            Err(errno) => Answer::Served(error(errno)),
        },
        // There are no leases (`F_SETLEASE`) or change notifications (`F_NOTIFY`) on this file system: opens
        // in other processes would not break a lease, and changes would not be reported.
        libc::F_SETLEASE => Answer::Served(error(Errno(no_lease(a.int(2))))),
        libc::F_GETLEASE => Answer::Served(libc::F_UNLCK as isize),
        libc::F_NOTIFY if !ofd.is_dir => Answer::Served(error(Errno(libc::ENOTDIR))),
        libc::F_NOTIFY if a.uint(2) & !DN_MULTISHOT == 0 => Answer::Served(0),
        libc::F_NOTIFY => Answer::Served(error(Errno(libc::EINVAL))),
        libc::F_ADD_SEALS | libc::F_GET_SEALS => Answer::Served(error(Errno(libc::EINVAL))),
        _ => p.to_kernel(Why::NotServed, &[fd]),
    }
}

/// `ioctl` requests of terminals that the C library tries on any file.
const TERMINAL: [libc::c_ulong; 4] = [libc::TCGETS, libc::TIOCGWINSZ, libc::TIOCGPGRP, libc::TIOCNOTTY];
const FICLONE: libc::c_ulong = 0x4004_9409;
const FICLONERANGE: libc::c_ulong = 0x4020_940d;
const FIDEDUPERANGE: libc::c_ulong = 0xc018_9436;
const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;

pub(super) fn ioctl(p: &Process, a: &Args) -> Answer {
    let fd = a.int(0);
    let request = libc::c_ulong::from(a.uint(1));
    let Some(ofd) = p.table.get(fd) else {
        return carried::ioctl(p, a);
    };
    match request {
        request if TERMINAL.contains(&request) => Answer::Served(error(Errno(libc::ENOTTY))),
        FICLONE => clone::file(p, a, &ofd),
        FICLONERANGE => clone::range(p, a, &ofd),
        FIDEDUPERANGE => clone::dedupe(p, a, &ofd),
        FS_IOC_FIEMAP => Answer::Served(error(Errno(libc::EOPNOTSUPP))),
        libc::FIOCLEX => Answer::Served(kernel::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC as usize)),
        libc::FIONCLEX => Answer::Served(kernel::fcntl(fd, libc::F_SETFD, 0)),
        libc::FIONREAD if !ofd.is_dir => {
            let count = || {
                let file = p.file(&ofd)?;
                let position = ofd.position();
                if position.moved {
                    return Err(Stop::Kernel(Why::KernelsOffset));
                }
                let size = file.getattr()?.size_bytes as i64;
                a.put(2, (size - position.at as i64) as i32)?;
                Ok(0)
            };
            Answer::of(count())
        }
        libc::FIONBIO => match a.get::<i32>(2) {
            Ok(on) => {
                let flag = if on != 0 { libc::O_NONBLOCK } else { 0 };
                ofd.set_status(ofd.status() & !libc::O_NONBLOCK | flag);
                Answer::Served(if ofd.is_real() { a.call() } else { 0 })
            }
            Err(errno) => Answer::of(fail(errno.0)),
        },
        _ => p.to_kernel(Why::NotServed, &[fd]),
    }
}
