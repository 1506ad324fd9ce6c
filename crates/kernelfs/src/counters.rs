//! Counters of the daemon while it runs. Counts only; `ops::status` shows them.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one run.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) digests: AtomicU64,
    pub(crate) operations: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) bytes_in: AtomicU64,
    pub(crate) bytes_out: AtomicU64,
    pub(crate) merged: AtomicU64,
    pub(crate) vanished: AtomicU64,
    pub(crate) seals: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) grants: AtomicU64,
    pub(crate) waits: AtomicU64,
    pub(crate) forwarded: AtomicU64,
    /// When a digest last found no space, by the monotonic clock in milliseconds; 0 if none did, or a later
    /// one found space.
    pub(crate) no_space_ms: AtomicU64,
    /// When the last lack of space was logged.
    pub(crate) no_space_told_ms: AtomicU64,
    /// When the log of an ended session last failed to digest for another reason, by the same clock.
    pub(crate) stuck_ms: AtomicU64,
}

impl Counters {
    pub(crate) fn add(&self, counts: &varve_digest::Counts) {
        self.operations.fetch_add(counts.ops, Ordering::Relaxed);
        self.refused.fetch_add(counts.refused, Ordering::Relaxed);
        self.bytes_in.fetch_add(counts.bytes_in, Ordering::Relaxed);
        self.bytes_out.fetch_add(counts.bytes_out, Ordering::Relaxed);
        self.merged.fetch_add(counts.merged, Ordering::Relaxed);
        self.vanished.fetch_add(counts.vanished, Ordering::Relaxed);
    }

    pub(crate) fn bump(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
