//! Processes: fork, exec, users.

use super::Answer;
use crate::process::{self, Process};
use crate::sys::args::Args;
use crate::sys::thread;

pub(super) fn fork(p: &'static Process, a: &Args) -> Answer {
    if thread::with(|thread| thread.forking.get()) {
        return Answer::NotOurs;
    }
    // Nothing may be opened between giving all to the kernel and the child: it could not read what it inherits.
    let gate = p.gate.write();
    p.give_all(false);
    let result = a.call();
    if result == 0 {
        // The parent's locks are left as they are, held or not: nobody looks at them here again.
        std::mem::forget(gate);
        process::after_fork(p);
    }
    Answer::Made(result)
}

pub(super) fn vfork(p: &Process) -> Answer {
    p.materialise_all(false);
    p.lend();
    Answer::NotOurs
}

pub(super) fn clone(p: &'static Process, a: &Args, flags: u64, stack: u64) -> Answer {
    let has = |flag: i32| flags & flag as u64 != 0;
    if has(libc::CLONE_THREAD) {
        p.threaded.store(true, std::sync::atomic::Ordering::Relaxed);
        return Answer::NotOurs;
    }
    if !has(libc::CLONE_VM) {
        if stack == 0 {
            return fork(p, a);
        }
        // The child starts on another stack: it goes on without the library.
        p.materialise_all(false);
        p.lend();
        return Answer::NotOurs;
    }
    if has(libc::CLONE_VFORK) {
        return vfork(p);
    }
    // Two processes with one memory and, perhaps, two tables of descriptors.
    p.give_up();
    Answer::NotOurs
}

pub(super) fn clone3(p: &'static Process, a: &Args) -> Answer {
    // Older versions of the structure are shorter, but all have these.
    match a.get::<[u64; 8]>(0) {
        Ok(args) => clone(p, a, args[0], args[5]),
        Err(_) => Answer::NotOurs,
    }
}

pub(super) fn exec(p: &Process, fds: &[i32]) -> Answer {
    p.materialise_all(true);
    p.kernels(fds)
}

pub(super) fn set_ids(p: &Process, a: &Args) -> Answer {
    let result = a.call();
    // `setfsuid` and `setfsgid` answer the old id, whatever they did.
    if result >= 0 {
        p.ids_changed();
    }
    Answer::Made(result)
}
