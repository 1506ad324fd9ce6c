//! The library's state of each thread. Cells only: signal handlers use it too.

use std::cell::Cell;

/// Nested signal handlers whose frames are known.
pub const FRAMES: usize = 8;

/// The state of one thread.
#[derive(Debug)]
pub struct Thread {
    /// Depth of calls into the library.
    pub inside: Cell<u32>,
    /// Whether it is a thread of LibFS, whose calls are the library's own.
    pub internal: Cell<bool>,
    /// Process id at the last `vfork` of this thread, while the child may still run in its memory; else 0.
    pub vfork_of: Cell<i32>,
    /// Whether it is in `fork` of the C library, between the library's handlers.
    pub forking: Cell<bool>,
    /// Signals that arrived while `inside`, and are pending in the kernel.
    pub deferred: Cell<u64>,
    /// Signal handlers of the program that run, or were left by a jump.
    pub handlers: Cell<usize>,
    /// Addresses in their frames, the innermost last; of the first ones only.
    pub frames: [Cell<usize>; FRAMES],
    /// Fault signals that the program has blocked, as far as it knows.
    pub hidden: Cell<u64>,
    /// Number from which its [heap](super::heap) slot follows; 0 before the first use.
    pub slot: Cell<u32>,
}

thread_local! {
    static THREAD: Thread = const { Thread {
        inside: Cell::new(0), internal: Cell::new(false), vfork_of: Cell::new(0), forking: Cell::new(false),
        deferred: Cell::new(0), handlers: Cell::new(0), frames: [const { Cell::new(0) }; FRAMES],
        hidden: Cell::new(0), slot: Cell::new(0),
    } };
}

/// Runs `look` on this thread's record. The record has nothing to drop, so it exists from the first call to
/// the last.
pub fn with<T>(look: impl FnOnce(&Thread) -> T) -> T {
    THREAD.with(look)
}
