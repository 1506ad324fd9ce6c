//! `fork` of the C library: everything is made ready for the child before the library takes its own locks.
//!
//! Once it holds those of its allocator, nothing that allocates may run until the child is there, and LibFS allocates. So the work is done by
//! handlers of `pthread_atfork`, and the system call itself goes through. A process that forks by a raw system call is served in
//! [`calls`](crate::calls): the C library locks nothing then.

use super::{entry, thread};
use crate::process;
use parking_lot::RwLockWriteGuard;
use std::cell::Cell;
use std::mem::ManuallyDrop;

thread_local! {
    /// The gate, held from before the fork until after it. Nothing to drop with the thread.
    static GATE: Cell<Option<ManuallyDrop<RwLockWriteGuard<'static, ()>>>> = const { Cell::new(None) };
}

extern "C" fn prepare() {
    if entry::is_inside() {
        return;
    }
    let Some(process) = process::current() else { return };
    entry::inside(|| {
        // Nothing may be opened between sharing all and the child: it could not read what it inherits.
        GATE.set(Some(ManuallyDrop::new(process.gate.write())));
        process.share_all();
    });
    thread::with(|thread| thread.forking.set(true));
}

extern "C" fn in_parent() {
    if thread::with(|thread| thread.forking.replace(false))
        && let Some(gate) = GATE.take()
    {
        drop(ManuallyDrop::into_inner(gate));
    }
}

extern "C" fn in_child() {
    if thread::with(|thread| thread.forking.replace(false))
        && let Some(process) = process::current()
    {
        // The parent's locks are left as they are: nobody looks at them here again.
        GATE.set(None);
        entry::inside(|| process::after_fork(process));
    }
}

/// Sets the handlers. False if the C library has no room for them.
#[must_use]
pub fn watch() -> bool {
    // SAFETY: functions that live as long as the process; the library is never unloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(in_parent), Some(in_child)) == 0 }
}
