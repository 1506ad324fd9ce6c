//! What a process holds while it forks, and what its child does first.
//!
//! Once the C library's `fork` holds the locks of its own allocator, nothing that calls into that may run
//! until the child is there, and LibFS makes threads. So there the work is done by handlers of
//! `pthread_atfork`, and the system call itself goes through. For a raw system call, [`calls`](crate::calls)
//! does the same: the C library locks nothing then.

use super::{Process, after_fork, current};
use crate::sys::atfork::at_fork;
use crate::sys::reentry::Limits;
use crate::sys::{entry, heap, thread};
use parking_lot::RwLockWriteGuard;
use std::cell::Cell;
use std::mem::ManuallyDrop;

/// What the forking thread holds from before the fork until after it. The program's signal handlers, which
/// may call us, wait until it holds nothing: that goes last.
#[must_use]
pub struct ForkGuard {
    limits: Limits,
    heap: heap::Hold,
    gate: RwLockWriteGuard<'static, ()>,
    _inside: entry::Inside,
}

impl ForkGuard {
    /// Makes everything ready for a child.
    pub fn new(process: &'static Process) -> Self {
        let inside = entry::stay_inside();
        // Nothing may be opened between sharing all and the child: it could not read what it inherits.
        let gate = process.gate.write();
        process.share_all();
        Self {
            limits: Limits::hold(),
            heap: heap::hold(),
            gate,
            _inside: inside,
        }
    }

    /// In the child.
    pub fn in_child(self, parent: &'static Process) {
        let Self {
            limits,
            heap,
            gate,
            _inside,
        } = self;
        drop(limits);
        // The parent's locks are left as they are, held or not: nobody looks at them here again.
        std::mem::forget(gate);
        drop(heap);
        heap::after_fork();
        after_fork(parent);
    }
}

thread_local! {
    /// Nothing to drop with the thread.
    static HELD: Cell<Option<ManuallyDrop<ForkGuard>>> = const { Cell::new(None) };
}

extern "C" fn prepare() {
    if entry::is_inside() {
        return;
    }
    if let Some(process) = current() {
        HELD.set(Some(ManuallyDrop::new(ForkGuard::new(process))));
        thread::with(|thread| thread.forking.set(true));
    }
}

fn take() -> Option<ForkGuard> {
    thread::with(|thread| thread.forking.set(false));
    HELD.take().map(ManuallyDrop::into_inner)
}

extern "C" fn in_parent() {
    drop(take());
}

extern "C" fn in_child() {
    if let (Some(held), Some(process)) = (take(), current()) {
        held.in_child(process);
    }
}

/// Sets the handlers. False if the C library has no room for them.
#[must_use]
pub fn watch() -> bool {
    at_fork(prepare, in_parent, in_child)
}
