//! Counters of a run: faults by where the page was, with their latencies, and what left.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;

/// Where the page of a fault was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// Nowhere: first touch of a range that was evicted from.
    Zero,
    /// In the set-aside area.
    Aside,
    /// One repeated word.
    Repeated,
    /// In the tier with this number.
    Tier(usize),
    /// Lost.
    Poisoned,
}

/// Latencies of one kind of fault, in the pager: from reading the fault to waking the thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Latencies {
    /// Faults.
    pub count: u64,
    /// Median, nanoseconds.
    pub median_ns: u64,
    /// 99th percentile, nanoseconds.
    pub p99_ns: u64,
}

/// Kinds that are counted apart: tiers beyond the last share one.
const KINDS: usize = 12;

/// Counters of a run.
pub(super) struct Counters {
    kinds: [Mutex<Histogram<u64>>; KINDS],
    /// Pages moved aside.
    pub moved_aside: AtomicU64,
    /// Pages that left for a slab, or as one word.
    pub evicted: AtomicU64,
    /// Of these, pages that were not written again, since their object still held them.
    pub unwritten: AtomicU64,
    /// Pages that came back because far space was full.
    pub turned_back: AtomicU64,
    /// Pages that the kernel did not move: pinned, shared.
    pub refused: AtomicU64,
    /// Forks.
    pub forks: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        // Up to 10 s, two digits.
        let fresh = || {
            Mutex::new(Histogram::new_with_bounds(1, 10_000_000_000, 2).unwrap_or_else(|_| unreachable!()))
        };
        Self {
            kinds: std::array::from_fn(|_| fresh()),
            moved_aside: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            unwritten: AtomicU64::new(0),
            turned_back: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            forks: AtomicU64::new(0),
        }
    }
}

fn index(kind: FaultKind) -> usize {
    match kind {
        FaultKind::Zero => 0,
        FaultKind::Aside => 1,
        FaultKind::Repeated => 2,
        FaultKind::Poisoned => 3,
        FaultKind::Tier(tier) => (4 + tier).min(KINDS - 1),
    }
}

impl Counters {
    pub(super) fn fault(&self, kind: FaultKind, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.kinds[index(kind)].lock().saturating_record(ns.max(1));
    }

    pub(super) fn latencies(&self, kind: FaultKind) -> Latencies {
        let all = self.kinds[index(kind)].lock();
        Latencies {
            count: all.len(),
            median_ns: all.value_at_quantile(0.5),
            p99_ns: all.value_at_quantile(0.99),
        }
    }
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
