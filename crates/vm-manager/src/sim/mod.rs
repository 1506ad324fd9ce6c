//! A simulated machine: traces of page accesses drive the policy code that also runs over a kernel.
//!
//! Owns the clock, placement and reference bits of the simulation; refuses to know any policy's internals.

pub mod baseline;
pub mod trace;

use std::collections::HashMap;

use serde::Serialize;

use crate::interfaces::{Action, Actuator, Outcome, Policy, Touch, Tracker, TrackerError, TrackerInfo};
use crate::multiclock::{MultiClock, MultiClockConfig};
use crate::types::{PageClass, PageKey, TierId};
use trace::Access;

/// Simulated length of one tick: `kpromoted`'s period.
pub const TICK_MS: u64 = 100;

/// Tracker over simulated reference bits, which work as a processor's.
#[derive(Debug, Default)]
pub struct SimTracker {
    bits: HashMap<PageKey, Touch>,
}

impl SimTracker {
    fn touch(&mut self, access: &Access) {
        let bit = self.bits.entry(access.page).or_insert(Touch::Idle);
        if access.write {
            *bit = Touch::Written;
        } else if *bit == Touch::Idle {
            *bit = Touch::Read;
        }
    }
}

impl Tracker for SimTracker {
    fn info(&self) -> TrackerInfo {
        TrackerInfo {
            name: "simulated",
            resolution_bytes: crate::types::PAGE_BYTES,
            sees_reads: true,
            tells_writes: true,
            note: "reference and dirty bits of the simulator".to_owned(),
        }
    }

    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError> {
        for page in pages {
            out.push(self.bits.insert(*page, Touch::Idle).unwrap_or(Touch::Idle));
        }
        Ok(())
    }
}

/// Simulated memory with finite tiers; moves can be made to fail.
#[derive(Debug)]
pub struct SimMemory {
    capacity: Vec<u64>,
    used: Vec<u64>,
    place: HashMap<PageKey, TierId>,
    /// Pages that cannot be moved, as if locked by another user.
    pub pinned: std::collections::HashSet<PageKey>,
    /// Pages moved so far.
    pub migrations: u64,
}

impl SimMemory {
    /// Makes tiers of these capacities in pages, fastest first.
    pub fn new(capacity_pages: &[u64]) -> Self {
        Self {
            capacity: capacity_pages.to_vec(),
            used: vec![0; capacity_pages.len()],
            place: HashMap::new(),
            pinned: std::collections::HashSet::new(),
            migrations: 0,
        }
    }

    /// Places a new page in the fastest tier with room beyond `reserve` pages, as a kernel's first touch
    /// does.
    pub fn allocate(&mut self, page: PageKey, reserve: &[u64]) -> Option<TierId> {
        let fits = |t: &usize| self.used[*t] + reserve.get(*t).copied().unwrap_or(0) < self.capacity[*t];
        let tier = (0..self.capacity.len()).find(fits)?;
        self.used[tier] += 1;
        self.place.insert(page, TierId(tier as u8));
        Some(TierId(tier as u8))
    }

    /// Frees a page.
    pub fn free(&mut self, page: PageKey) {
        if let Some(tier) = self.place.remove(&page) {
            self.used[tier.index()] -= 1;
        }
    }

    /// Returns the tier that holds a page.
    pub fn tier(&self, page: PageKey) -> Option<TierId> {
        self.place.get(&page).copied()
    }

    /// Returns the number of pages in a tier.
    pub fn used(&self, tier: TierId) -> u64 {
        self.used[tier.index()]
    }

    fn shift(&mut self, page: PageKey, to: TierId) -> Outcome {
        let Some(from) = self.tier(page) else {
            return Outcome::Gone;
        };
        if self.pinned.contains(&page) {
            return Outcome::Busy;
        }
        if self.used[to.index()] >= self.capacity[to.index()] {
            return Outcome::NoMemory;
        }
        self.used[from.index()] -= 1;
        self.used[to.index()] += 1;
        self.place.insert(page, to);
        self.migrations += 1;
        Outcome::Done
    }
}

impl Actuator for SimMemory {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn apply(&mut self, actions: &[Action], out: &mut Vec<Outcome>) {
        for action in actions {
            out.push(match action {
                Action::Move { page, to } => self.shift(*page, *to),
                Action::Evict { page } if self.tier(*page).is_some() => {
                    self.free(*page);
                    Outcome::Done
                }
                Action::Evict { .. } => Outcome::Gone,
                Action::Collapse { .. }
                | Action::Split { .. }
                | Action::Compact { .. }
                | Action::Sharing { .. } => Outcome::Unsupported,
            });
        }
    }

    fn locate(&mut self, pages: &[PageKey], out: &mut Vec<Option<TierId>>) {
        out.extend(pages.iter().map(|p| self.tier(*p)));
    }

    fn free_pages(&mut self, tier: TierId) -> u64 {
        self.capacity[tier.index()] - self.used[tier.index()]
    }
}

/// Result of a run over a trace.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Score {
    /// Accesses in all.
    pub accesses: u64,
    /// Accesses to a page of the fastest tier.
    pub fast_hits: u64,
    /// Pages moved between tiers.
    pub migrations: u64,
    /// Hit ratio of each tick, for convergence.
    pub per_tick: Vec<f32>,
    /// Bytes of metadata per page at the end.
    pub metadata_bytes_per_page: f64,
}

impl Score {
    /// Returns the share of accesses that the fastest tier served.
    pub fn hit_ratio(&self) -> f64 {
        self.fast_hits as f64 / self.accesses.max(1) as f64
    }

    /// Returns the mean hit ratio of ticks `from..to`.
    pub fn window(&self, from: usize, to: usize) -> f64 {
        let part = &self.per_tick[from.min(self.per_tick.len())..to.min(self.per_tick.len())];
        part.iter().map(|r| f64::from(*r)).sum::<f64>() / part.len().max(1) as f64
    }

    /// Returns the ticks after `change` until the hit ratio is back at 95 % of its mean over the last fifth
    /// of the run.
    pub fn convergence_ticks(&self, change: usize) -> Option<usize> {
        let end = self.window(self.per_tick.len() * 4 / 5, self.per_tick.len());
        self.per_tick[change.min(self.per_tick.len())..]
            .iter()
            .position(|r| f64::from(*r) >= 0.95 * end)
    }

    pub(crate) fn tick(&mut self, hits: u64, accesses: u64) {
        self.fast_hits += hits;
        self.accesses += accesses;
        self.per_tick.push(hits as f32 / accesses.max(1) as f32);
    }
}

/// Runs MULTI-CLOCK over a trace; a first touch allocates the page in the fastest tier with free pages above
/// its `min` watermark.
pub fn multi_clock(trace: &[Access], per_tick: usize, capacity: &[u64], config: MultiClockConfig) -> Score {
    let mut memory = SimMemory::new(capacity);
    let mut tracker = SimTracker::default();
    let mut policy = MultiClock::new(config, capacity);
    let reserve: Vec<u64> = (0..capacity.len())
        .map(|t| policy.watermarks(TierId(t as u8)).min)
        .collect();
    let mut score = Score::default();
    for (n, tick) in trace.chunks(per_tick.max(1)).enumerate() {
        let mut hits = 0;
        for access in tick {
            let tier = memory.tier(access.page).or_else(|| {
                let tier = memory.allocate(access.page, &reserve)?;
                policy.allocate(access.page, PageClass::Anon, tier, false);
                Some(tier)
            });
            hits += u64::from(tier == Some(TierId(0)));
            tracker.touch(access);
        }
        score.tick(hits, tick.len() as u64);
        // The simulated tracker cannot fail.
        let _ = policy.step(n as u64 * TICK_MS, &mut tracker, &mut memory);
    }
    score.migrations = memory.migrations;
    let (bytes, pages) = policy.metadata();
    score.metadata_bytes_per_page = bytes as f64 / pages.max(1) as f64;
    score
}

#[cfg(test)]
mod tests;
