//! The locks that a process holds while it forks, and the start of its child.
//!
//! What a child shares with its parent, and who owns it:
//!
//! - *The description.* Before the fork each served description is opened on the mount, once, and its
//!   descriptors become descriptors of that open file (`real`). So the kernel keeps the file for as long as
//!   any process has a descriptor, whatever becomes of its names, and a program that is executed later finds
//!   it. It must be before the fork: what is opened after it is another description, which programs executed
//!   by parent and child would not share. The inode, with its generation, is compared with the one that was
//!   served: a name that leads to another file now is not used.
//! - *Offset and flags* (`O_APPEND` and the like) are in a record in memory that `fork` shares, under a lock
//!   between the processes, until a program without the library needs them, or there is no free record: from
//!   then on the kernel has the offset, and no process takes it back. A child that writes by the mount, with
//!   its first calls, sets the kernel's offset under that lock and reads it back.
//! - *Locks* (`flock`, and those of open file descriptions) are the kernel's, on that open file. POSIX locks
//!   are the process' own; a child has none.
//! - *Writes* that were acknowledged are in the parent's log. The child reads and writes by the mount or in a
//!   session of its own, which gets the file's lease after the parent's log was digested so far.
//! - *Close-on-exec* is a flag of the descriptor, kept when it is replaced. Such files are opened too: `dup`
//!   or `fcntl` of the child may hand them on.
//! - A *second fork* finds the descriptions real. A *child of `vfork`*, `posix_spawn` too, runs in this
//!   memory, without the library: see [`lent`](crate::calls::lent). *Threads* other than the one that forks
//!   wait at the gate with calls that make or close served descriptors.
//!
//! A description that cannot be opened on the mount is not in the child: a file that *another* process has
//! removed since, or whose directory has gone, and files for which no descriptor is free at that moment.
//!
//! Once the C library's `fork` holds the locks of its own allocator, no code that calls into it may run until
//! the child exists, and LibFS makes threads. So the work is done by handlers of `pthread_atfork`, and the
//! system call itself passes. For a raw system call, [`calls`](crate::calls) does the work: the C library
//! locks nothing then.

use super::{Process, after_fork, current};
use crate::sys::atfork::at_fork;
use crate::sys::reentry::Limits;
use crate::sys::{entry, heap, thread};
use std::cell::Cell;
use std::mem::ManuallyDrop;
use varve_media::lock::RwLockWriteGuard;

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
