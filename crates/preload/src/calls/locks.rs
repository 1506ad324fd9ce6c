//! File locks. They are the kernel's, taken on a side descriptor of the mount that belongs to the
//! description, so that every process sees them whether it goes through the library or the mount.

use super::{Answer, error};
use crate::ofd::Ofd;
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::entry::outside;
use crate::sys::kernel;
use crate::why::Why;
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn waits(a: &Args) -> bool {
    match a.number() as libc::c_long {
        libc::SYS_flock => a.int(1) & libc::LOCK_NB == 0,
        _ => matches!(a.int(1), libc::F_SETLKW | libc::F_OFD_SETLKW),
    }
}

/// Makes the lock call of `a` on the descriptor `side`.
fn lock(a: &Args, side: i32) -> isize {
    if waits(a) {
        outside(|| a.call_with(0, side))
    } else {
        a.call_with(0, side)
    }
}

pub(super) fn flock(p: &Process, a: &Args) -> Answer {
    let Some(ofd) = p.table.get(a.int(0)) else {
        return Answer::NotOurs;
    };
    match p.side(a.int(0), &ofd) {
        Ok(side) => Answer::Served(lock(a, side)),
        Err(errno) => Answer::FellBackMade(error(errno), Why::CannotOpen),
    }
}

pub(super) fn fcntl(p: &Process, a: &Args, ofd: &Arc<Ofd>) -> Answer {
    let side = match p.side(a.int(0), ofd) {
        Ok(side) => side,
        Err(errno) => return Answer::FellBackMade(error(errno), Why::CannotOpen),
    };
    let relative = a
        .get::<libc::flock>(2)
        .is_ok_and(|lock| i32::from(lock.l_whence) == libc::SEEK_CUR);
    if relative {
        let position = ofd.position();
        if !position.moved {
            kernel::lseek(side, position.at as i64, libc::SEEK_SET);
        }
    }
    let result = lock(a, side);
    if result == 0 && matches!(a.int(1), libc::F_SETLK | libc::F_SETLKW) {
        p.locked.lock().entry(ofd.id()).or_insert_with(|| Arc::clone(ofd));
        p.any_locked.store(true, Ordering::Release);
    }
    Answer::Served(result)
}

/// Releases the process' POSIX locks on a file when a descriptor `ofd` of it is closed: closing any
/// descriptor of the file drops them all.
pub(super) fn closing(p: &Process, ofd: &Ofd) {
    if !p.any_locked.load(Ordering::Acquire) {
        return;
    }
    let mut locked = p.locked.lock();
    let Some(holder) = locked.remove(&ofd.id()) else {
        return;
    };
    if locked.is_empty() {
        p.any_locked.store(false, Ordering::Release);
    }
    drop(locked);
    // Closing any descriptor of the file in the kernel releases the locks, so a duplicate of the side
    // descriptor is closed. For a real descriptor the program's own close releases them.
    if let Some(side) = &*holder.side.lock() {
        let copy = kernel::fcntl(side.0, libc::F_DUPFD_CLOEXEC, 0);
        if copy >= 0 {
            kernel::close(copy as i32);
        }
    }
    drop(holder);
}
