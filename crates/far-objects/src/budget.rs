//! The memory limit: one sum of all that the heap keeps in memory.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes in use, and how many may be.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    used: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            limit,
            used: AtomicU64::new(0),
        }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `bytes` if they fit below the limit.
    pub(crate) fn try_take(&self, bytes: u64) -> bool {
        let taken = self
            .used
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|sum| *sum <= self.limit)
            });
        taken.is_ok()
    }

    /// Takes bytes that are in use already; the next that take some make room for them.
    pub(crate) fn force(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes);
    }
}

/// Bytes that were taken; given back when dropped.
#[derive(Debug)]
pub(crate) struct Taken<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl<'a> Taken<'a> {
    pub(crate) fn new(budget: &'a Budget, bytes: u64) -> Self {
        Self { budget, bytes }
    }

    /// The bytes are used, for what gives them back itself.
    pub(crate) fn keep(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}
