//! Processes: fork, exec, user and group ids.

use super::{Answer, error};
use crate::config;
use crate::process::Process;
use crate::process::forking::ForkGuard;
use crate::sys::args::Args;
use crate::sys::{kernel, thread};
use crate::walk::FileId;
use crate::why::Why;
use std::sync::atomic::Ordering;

pub(super) fn fork(p: &'static Process, a: &Args) -> Answer {
    if thread::with(|thread| thread.forking.get()) {
        return Answer::NotOurs;
    }
    let held = ForkGuard::new(p);
    let result = a.call();
    if result == 0 {
        held.in_child(p);
    }
    Answer::Made(result)
}

pub(super) fn vfork(p: &Process) -> Answer {
    p.lend();
    Answer::NotOurs
}

pub(super) fn clone(p: &'static Process, a: &Args, flags: u64, stack: u64) -> Answer {
    let has = |flag: i32| flags & flag as u64 != 0;
    let (files, place) = (has(libc::CLONE_FILES), has(libc::CLONE_FS));
    if has(libc::CLONE_THREAD) && files && place {
        p.threaded.store(true, Ordering::Relaxed);
        return Answer::NotOurs;
    }
    if files || place {
        // The child's changes to descriptors or to the working directory apply to this process too, and would
        // not be seen.
        return p.gives_up();
    }
    if !has(libc::CLONE_VM) {
        if has(libc::CLONE_NEWPID) {
            // The lock of a shared offset names its holder by thread number; in another PID namespace the
            // numbers differ.
            p.materialise_all(false);
        }
        if stack == 0 {
            return fork(p, a);
        }
        // The child starts on another stack and runs without the library.
        p.materialise_all(false);
        p.copies.give_all(p);
        p.lend();
        return Answer::NotOurs;
    }
    if has(libc::CLONE_VFORK) {
        return vfork(p);
    }
    // One memory with two tables of descriptors.
    p.gives_up()
}

pub(super) fn clone3(p: &'static Process, a: &Args) -> Answer {
    // Older versions of the structure are shorter, but all have these fields.
    match a.get::<[u64; 8]>(0) {
        Ok(args) => clone(p, a, args[0], args[5]),
        Err(_) => Answer::NotOurs,
    }
}

/// Makes the descriptions real that may write the program to be run, so that the kernel refuses it with
/// ETXTBSY even if the new program does not inherit them.
fn show_writers(p: &Process, a: &Args, dirfd: i32, i: usize) {
    if p.pools().all(|(_, pool)| pool.open().is_none()) {
        return;
    }
    let id = match a.path(i) {
        Ok(b"") => p.table.get(dirfd).map(|ofd| ofd.id()),
        Ok(path) => match p.start(dirfd, path) {
            Ok(Some(start)) => {
                let walked = p.walk(start, true).ok();
                walked.and_then(|walked| {
                    let key = walked.target?.key;
                    let pool = walked.pool;
                    Some(FileId { pool, key })
                })
            }
            _ => None,
        },
        Err(_) => None,
    };
    if let Some(id) = id {
        p.show_writers(id);
    }
}

pub(super) fn exec(p: &Process, a: &Args) -> Answer {
    let (dirfd, i) = match a.number() as libc::c_long {
        libc::SYS_execveat => (a.int(0), 1),
        _ => (libc::AT_FDCWD, 0),
    };
    // A shell tries its program in many directories.
    if i == 0 && a.path(i).is_ok() && !kernel::may_execute(a.word(i)) {
        return Answer::NotOurs;
    }
    show_writers(p, a, dirfd, i);
    let alone = p.alone();
    p.materialise_all(true);
    if dirfd >= 0
        && let Err(errno) = p.make_real(dirfd)
    {
        return Answer::FellBackMade(error(errno), Why::CannotOpen);
    }
    let left = if p.threaded.load(Ordering::Relaxed) {
        Vec::new()
    } else {
        p.leave(false)
    };
    // The code below the call runs only if `exec` failed.
    let result = if alone.is_empty() {
        a.call()
    } else {
        let text = config::alone_text(kernel::getpid(), &alone);
        a.call_with_variable(i + 2, config::ALONE, &text)
    };
    p.stay(left);
    Answer::Made(result)
}

pub(super) fn exit(p: &Process) -> Answer {
    // Other threads may be in the middle of a call.
    if !p.threaded.load(Ordering::Relaxed) {
        std::mem::forget(p.leave(true));
    }
    Answer::NotOurs
}

pub(super) fn set_ids(p: &Process, a: &Args) -> Answer {
    let result = a.call();
    // `setfsuid` and `setfsgid` return the old id whether or not they changed it.
    if result >= 0 && p.ids_changed() {
        return Answer::FellBackMade(result, Why::SwitchedOff);
    }
    Answer::Made(result)
}
