//! Counters, by system call, of calls served here and calls left to the kernel, in a file that all processes
//! of a run share.

use crate::sys::shared::Counters;
use crate::syscalls::{NUMBERS, OPENED, WHY};
use crate::why::Why;
use std::path::Path;
use std::sync::OnceLock;

static COUNTERS: OnceLock<Option<Counters>> = OnceLock::new();

/// Starts to count into `file`, if there is one.
pub fn begin(file: Option<&Path>) {
    let _ = COUNTERS.set(file.and_then(|file| Counters::open(file, WHY + Why::ALL.len())));
}

/// Whether calls are counted.
#[must_use]
pub fn wanted() -> bool {
    matches!(COUNTERS.get(), Some(Some(_)))
}

fn add(slot: usize) {
    if let Some(Some(counters)) = COUNTERS.get() {
        counters.add(slot);
    }
}

/// Counts a call that was served here.
pub fn served(number: usize) {
    add(number * 2);
}

/// Counts a call on the mount that was left to the kernel, and why.
pub fn fell_back(number: usize, why: Why) {
    add(number * 2 + 1);
    add(WHY + why as usize);
}

/// Counts a served file that was opened on the mount too: for a child, another program, a lock, a map.
pub fn opened_on_mount() {
    add(OPENED);
}

/// Counts an attempt of a process to open a session.
pub fn session(opened: bool) {
    add(NUMBERS * 2 + usize::from(!opened));
}
