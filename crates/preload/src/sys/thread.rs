//! What the library remembers of each thread. Cells only: signal handlers look at it too.

use std::cell::Cell;

/// Of one thread.
#[derive(Debug)]
pub struct Thread {
    /// How many calls of ours this thread is in.
    pub inside: Cell<u32>,
    /// A thread of LibFS: its calls are the library's own.
    pub internal: Cell<bool>,
    /// Process id at the last `vfork` of this thread, while the child may still run on its memory.
    pub vfork_of: Cell<i32>,
    /// In `fork` of the C library, between its handlers.
    pub forking: Cell<bool>,
    /// Signals that came while `inside`, and wait in the kernel.
    pub deferred: Cell<u64>,
    /// Signals of faults that the program takes for blocked.
    pub hidden: Cell<u64>,
    /// Which slot of the [heap](super::heap) it uses; 0: none yet.
    pub slot: Cell<u32>,
}

thread_local! {
    static THREAD: Thread = const { Thread {
        inside: Cell::new(0), internal: Cell::new(false), vfork_of: Cell::new(0), forking: Cell::new(false),
        deferred: Cell::new(0),
        hidden: Cell::new(0), slot: Cell::new(0),
    } };
}

/// Looks at this thread's record. There is nothing to drop in it, so it is there from the first call to the
/// last.
pub fn with<T>(look: impl FnOnce(&Thread) -> T) -> T {
    THREAD.with(look)
}
