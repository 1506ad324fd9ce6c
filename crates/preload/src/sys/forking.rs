//! `fork` of the C library: everything is made ready for the child before the library takes its own locks.
//!
//! Once it holds those of its allocator, nothing that calls into it may run until the child is there, and LibFS makes threads. So the work is done by
//! handlers of `pthread_atfork`, and the system call itself goes through. A process that forks by a raw system call is served in
//! [`calls`](crate::calls): the C library locks nothing then. The lock of the library's own [heap] is held over the system call in both cases.

use super::{entry, heap, thread};
use crate::process;
use parking_lot::RwLockWriteGuard;
use std::cell::Cell;
use std::mem::ManuallyDrop;

/// What the forking thread holds from before the fork until after it. The program's signal handlers, which may call us, wait until it holds nothing: that goes last.
struct Held {
    heap: heap::Hold,
    gate: RwLockWriteGuard<'static, ()>,
    _inside: entry::Inside,
}

thread_local! {
    /// Nothing to drop with the thread.
    static HELD: Cell<Option<ManuallyDrop<Held>>> = const { Cell::new(None) };
}

extern "C" fn prepare() {
    if entry::is_inside() {
        return;
    }
    let Some(process) = process::current() else { return };
    let inside = entry::stay_inside();
    // Nothing may be opened between sharing all and the child: it could not read what it inherits.
    let gate = process.gate.write();
    process.share_all();
    HELD.set(Some(ManuallyDrop::new(Held {
        heap: heap::hold(),
        gate,
        _inside: inside,
    })));
    thread::with(|thread| thread.forking.set(true));
}

fn take() -> Option<Held> {
    thread::with(|thread| thread.forking.set(false));
    HELD.take().map(ManuallyDrop::into_inner)
}

extern "C" fn in_parent() {
    drop(take());
}

extern "C" fn in_child() {
    let Some(Held { heap, gate, _inside }) = take() else {
        return;
    };
    // The parent's locks are left as they are: nobody looks at them here again.
    std::mem::forget(gate);
    drop(heap);
    heap::after_fork();
    if let Some(process) = process::current() {
        process::after_fork(process);
    }
}

/// Sets the handlers. False if the C library has no room for them.
#[must_use]
pub fn watch() -> bool {
    // SAFETY: functions that live as long as the process; the library is never unloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(in_parent), Some(in_child)) == 0 }
}
