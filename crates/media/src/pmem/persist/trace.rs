//! The steps by which bytes get into persistent memory, noted for a crash test: each store as the instruction
//! that makes it, each write-back of a line, each fence. Knows no device; its reader knows the rules.

use std::cell::RefCell;

/// One step. Addresses are those of the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// An ordinary store inside of one line: it stays in the cache until that line is written back.
    Cached(usize, Box<[u8]>),
    /// Non-temporal stores of a whole line: durable after the next fence.
    Streamed(usize, Box<[u8]>),
    /// The line that holds this address was written back: its stores are durable after the next fence.
    WrittenBack(usize),
    /// A store fence.
    Fenced,
}

thread_local!(static STEPS: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) });

#[cold]
pub(super) fn note(step: Step) {
    STEPS.with(|steps| steps.borrow_mut().push(step));
}

/// Runs `work` and returns its result with the steps of this thread.
pub(crate) fn traced<T>(work: impl FnOnce() -> T) -> (T, Vec<Step>) {
    STEPS.with(|steps| steps.borrow_mut().clear());
    let result = work();
    (result, STEPS.with(RefCell::take))
}
