//! How many calls were served here and how many fell back, by system call: counters in a file that all
//! processes of a run share.

use crate::sys::shared::Counters;
use crate::syscalls::{self, NUMBERS};
use std::path::Path;
use std::sync::OnceLock;

static COUNTERS: OnceLock<Option<Counters>> = OnceLock::new();

/// Counts from now on into `file`.
pub fn begin(file: Option<&Path>) {
    let _ = COUNTERS.set(file.and_then(|file| Counters::open(file, syscalls::COUNTERS)));
}

/// Whether anything is counted.
#[must_use]
pub fn wanted() -> bool {
    matches!(COUNTERS.get(), Some(Some(_)))
}

fn add(slot: usize) {
    if let Some(Some(counters)) = COUNTERS.get() {
        counters.add(slot);
    }
}

/// One call was served here.
pub fn served(number: usize) {
    add(number * 2);
}

/// One call that concerns the mount was left to the kernel.
pub fn fell_back(number: usize) {
    add(number * 2 + 1);
}

/// A process asked for a session, and got one or not.
pub fn session(opened: bool) {
    add(NUMBERS * 2 + usize::from(!opened));
}
