//! The locks that a process holds while it forks, and the start of its child.
//!
//! Once the C library's `fork` holds the locks of its own allocator, no code that calls into it may run until
//! the child exists, and LibFS makes threads. So the work is done by handlers of `pthread_atfork`, and the
//! system call itself passes. For a raw system call, [`calls`](crate::calls) does the work: the C library
//! locks nothing then.

use super::{Process, after_fork, current};
use crate::sys::atfork::at_fork;
use crate::sys::reentry::Limits;
use crate::sys::{entry, heap, thread};
use parking_lot::RwLockWriteGuard;
use std::cell::Cell;
use std::mem::ManuallyDrop;

/// The locks that the forking thread holds from before the fork until after it. The program's signal
/// handlers, which may call into the library, wait until all are released, so `_inside` is dropped last.
#[must_use]
pub struct ForkGuard {
    limits: Limits,
    heap: heap::Hold,
    gate: RwLockWriteGuard<'static, ()>,
    _inside: entry::Inside,
}

impl ForkGuard {
    /// Prepares all state for a child and takes the locks.
    pub fn new(process: &'static Process) -> Self {
        let inside = entry::stay_inside();
        // Nothing may be opened between sharing and the fork: the child could not read it.
        let gate = process.gate.write();
        process.share_all();
        Self {
            limits: Limits::hold(),
            heap: heap::hold(),
            gate,
            _inside: inside,
        }
    }

    /// Releases the locks in the child and sets the library up there.
    pub fn in_child(self, parent: &'static Process) {
        let Self {
            limits,
            heap,
            gate,
            _inside,
        } = self;
        drop(limits);
        // The parent's lock stays as it is, held or not: the child never uses it.
        std::mem::forget(gate);
        drop(heap);
        heap::after_fork();
        after_fork(parent);
    }
}

thread_local! {
    /// `ManuallyDrop`, so that the thread's end drops nothing.
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

/// Registers the handlers. False if the C library has no room for them.
#[must_use]
pub fn watch() -> bool {
    at_fork(prepare, in_parent, in_child)
}
