//! Ingens (chapter 3 of the seed): promotes regions to huge pages by utilisation, outside of the fault path
//! and fairly, and splits them when they are not used.
//!
//! Owns the decision; refuses to know how pages are collapsed, split or observed.

mod config;
mod fairness;
mod promote;
mod region;

pub use config::IngensConfig;
pub use fairness::{Claim, is_fair, objective, promotion_metric};
pub use region::Region;

use std::collections::{BTreeMap, VecDeque};

use crate::interfaces::{
    Action, Actuator, Outcome, Policy, RegionSurvey, StepReport, SystemView, Touch, Tracker, TrackerError,
};
use crate::sim::trace::Rng;
use crate::types::{HUGE_PAGES, HugeIndex, PAGE_BYTES, PageKey, ProcId};

/// One process as Ingens sees it.
#[derive(Debug, Default)]
struct Process {
    share: Option<f64>,
    regions: BTreeMap<HugeIndex, Region>,
    /// Next region of the normal-priority scan.
    cursor: HugeIndexCursor,
    promoted_this_pass: u64,
    excluded_until_ms: u64,
    /// Next region of the access scan.
    access_cursor: HugeIndexCursor,
}

#[derive(Debug, Default, Clone, Copy)]
struct HugeIndexCursor(u64);

impl Process {
    fn claim(&self, config: &IngensConfig) -> Claim {
        let huge = self.regions.values().filter(|r| r.huge);
        let (mut held, mut idle) = (0, 0);
        for region in huge {
            held += 1;
            idle += u64::from(!region.frequently_accessed(config.frequent_at));
        }
        Claim {
            share: self.share.unwrap_or(config.share),
            huge_pages: held,
            idle_huge_pages: idle,
        }
    }
}

/// The policy.
#[derive(Debug)]
pub struct Ingens {
    config: IngensConfig,
    procs: BTreeMap<ProcId, Process>,
    high: VecDeque<(ProcId, HugeIndex)>,
    view: SystemView,
    rng: Rng,
    next_access_ms: u64,
    next_normal_ms: u64,
    next_compact_ms: u64,
    next_ms: u64,
    scan_budget: u64,
    access_backoff: u64,
    tracker_failed: bool,
}

impl Ingens {
    /// Makes a policy without processes.
    pub fn new(config: IngensConfig) -> Self {
        Self {
            scan_budget: config.scan_batch_pages,
            config,
            procs: BTreeMap::new(),
            high: VecDeque::new(),
            view: SystemView::default(),
            rng: Rng::new(0x5eed),
            next_access_ms: 0,
            next_normal_ms: 0,
            next_compact_ms: 0,
            next_ms: 0,
            access_backoff: 1,
            tracker_failed: false,
        }
    }

    /// Sets a process' share priority (seed: 10,000 for everybody).
    pub fn set_share(&mut self, proc: ProcId, share: f64) {
        self.procs.entry(proc).or_default().share = Some(share);
    }

    /// Returns the state of a region.
    pub fn region(&self, proc: ProcId, region: HugeIndex) -> Option<&Region> {
        self.procs.get(&proc)?.regions.get(&region)
    }

    /// Iterates over the regions of a process in address order, for heat maps.
    pub fn regions(&self, proc: ProcId) -> impl Iterator<Item = (HugeIndex, &Region)> {
        self.procs
            .get(&proc)
            .into_iter()
            .flat_map(|p| p.regions.iter().map(|(i, r)| (*i, r)))
    }

    /// Returns a process' present claim.
    pub fn claim(&self, proc: ProcId) -> Option<Claim> {
        self.procs.get(&proc).map(|p| p.claim(&self.config))
    }

    /// Returns the fairness objective O over all processes (equation 3.3).
    pub fn fairness_objective(&self) -> f64 {
        let metrics: Vec<f64> = self
            .procs
            .values()
            .map(|p| promotion_metric(&p.claim(&self.config), self.config.tau))
            .collect();
        objective(&metrics)
    }

    /// Returns the present utilisation threshold of promotion. While memory is unfragmented and the adaptive
    /// mode is on, one used page is enough ("mimics Linux"); otherwise it is the configured share (§3.5.2).
    pub fn threshold(&self) -> f64 {
        let whole = self
            .view
            .fmfi
            .is_some_and(|f| f < self.config.aggressive_below_fmfi);
        if self.config.adaptive && whole && !self.short_of_memory() {
            1.0 / HUGE_PAGES as f64
        } else {
            self.config.utilisation
        }
    }

    /// Whether memory is so short that bloat must be given back before the machine swaps or a control group
    /// kills.
    pub fn short_of_memory(&self) -> bool {
        let total = self.view.total_bytes;
        total > 0 && (self.view.available_bytes as f64) < total as f64 * self.config.low_memory
    }

    /// Records which base pages of a huge page hold data, as found by reading its contents.
    pub fn inspected(&mut self, proc: ProcId, index: HugeIndex, used: &crate::types::UtilVector) {
        if let Some(region) = self.procs.get_mut(&proc).and_then(|p| p.regions.get_mut(&index)) {
            region.inspected = true;
            region.hollow = region.huge && used.share() < self.config.demote_below;
            if region.hollow {
                region.util = *used;
            }
        }
    }

    /// Starts another round of reading contents.
    pub fn restart_inspection(&mut self, proc: ProcId) {
        if let Some(process) = self.procs.get_mut(&proc) {
            process.regions.values_mut().for_each(|r| r.inspected = false);
        }
    }

    /// Reads access bits; those of frequently used huge pages only with the sampling probability (§3.4.2).
    fn scan_access(
        &mut self,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) -> Result<(), TrackerError> {
        let mut keys = Vec::new();
        let mut asked = Vec::new();
        let mut left = self.scan_budget;
        for (proc, process) in &mut self.procs {
            let from = HugeIndex(process.access_cursor.0);
            let turn = process.regions.range(from..).chain(process.regions.range(..from));
            let mut next = 0;
            for (index, region) in turn {
                if left == 0 {
                    next = index.0;
                    break;
                }
                let frequent = region.frequently_accessed(self.config.frequent_at);
                // Reading the bit of a page found idle clears nothing and costs no TLB entry: the seed's idle
                // flag answers at every query, and only clearing is sampled.
                let costs = region.access & 1 == 1;
                if frequent && costs && self.rng.unit() >= self.config.sampling {
                    continue;
                }
                let Some(first) = region.util.first() else {
                    continue;
                };
                let offset = if region.huge { 0 } else { first };
                keys.push(PageKey::new(*proc, index.page(offset as u64)));
                asked.push((*proc, *index));
                left -= 1;
            }
            process.access_cursor = HugeIndexCursor(next);
        }
        let mut touches = Vec::new();
        let result = tracker.observe(&keys, &mut touches);
        report.scanned += keys.len() as u64;
        let (mut sharing, mut again) = (Vec::new(), Vec::new());
        let mut news = 0;
        for ((proc, index), touch) in asked.into_iter().zip(touches) {
            let Some(region) = self.procs.get_mut(&proc).and_then(|p| p.regions.get_mut(&index)) else {
                continue;
            };
            // An unobserved region keeps its access vector unchanged.
            let touched = match touch {
                Touch::Unknown => {
                    // A region without any observation yet must not slow down the scan.
                    news += u64::from(region.looks == 0);
                    continue;
                }
                Touch::Idle => false,
                Touch::Read | Touch::Written => true,
            };
            let before = region.frequently_accessed(self.config.frequent_at);
            region.looked(touched, self.config.alpha);
            let now = region.frequently_accessed(self.config.frequent_at);
            news += u64::from(before != now || (region.frequency > 0.1 && region.frequency < 6.0));
            // Frequently used again: taken back from merging at once.
            if now && region.merged && !region.huge && !region.queued {
                region.queued = true;
                region.retry_ms = 0;
                again.push((proc, index));
            }
            // Frequently used huge pages are excluded from same-page merging (§3.3.5).
            let deny = now && region.huge;
            if self.config.coordinate_sharing && deny != region.sharing_denied {
                sharing.push((proc, index, deny));
            }
        }
        self.high.extend(again);
        self.apply_sharing(&sharing, actuator, report);
        self.access_backoff = if news == 0 {
            (self.access_backoff * 2).min(self.config.max_backoff)
        } else {
            1
        };
        result
    }

    fn apply_sharing(
        &mut self,
        changes: &[(ProcId, HugeIndex, bool)],
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) {
        let actions: Vec<Action> = changes
            .iter()
            .map(|(proc, region, deny)| Action::Sharing {
                proc: *proc,
                region: *region,
                allow: !deny,
            })
            .collect();
        let mut outcomes = Vec::new();
        if !actions.is_empty() {
            actuator.apply(&actions, &mut outcomes);
        }
        for ((proc, index, deny), outcome) in changes.iter().zip(outcomes) {
            let region = self.procs.get_mut(proc).and_then(|p| p.regions.get_mut(index));
            if outcome == Outcome::Done
                && let Some(region) = region
            {
                region.sharing_denied = *deny;
                report.sharing += 1;
            }
        }
    }

    /// Compacts memory when it is fragmented (§3.3.4).
    fn compact(&mut self, now_ms: u64, actuator: &mut dyn Actuator, report: &mut StepReport) {
        let splintered = self.view.fmfi.is_some_and(|f| f > self.config.compact_above_fmfi);
        if !self.config.compaction || !splintered || now_ms < self.next_compact_ms {
            return;
        }
        self.next_compact_ms = now_ms + self.config.compact_period_ms;
        let mut outcomes = Vec::new();
        actuator.apply(
            &[Action::Compact {
                bytes: self.config.compact_bytes,
            }],
            &mut outcomes,
        );
        match outcomes.first() {
            Some(Outcome::Done) => report.compactions += 1,
            // Not allowed or not possible: retry at a longer interval.
            _ => self.next_compact_ms = now_ms + 12 * self.config.compact_period_ms,
        }
    }
}

impl Policy for Ingens {
    fn name(&self) -> &'static str {
        "ingens"
    }

    fn survey(&mut self, survey: &RegionSurvey, _actuator: &mut dyn Actuator) {
        let threshold = self.threshold();
        let process = self.procs.entry(survey.proc).or_default();
        if survey.used.weight() == 0 {
            process.regions.remove(&survey.region);
            return;
        }
        if survey.class == crate::types::PageClass::File {
            return;
        }
        let region = process.regions.entry(survey.region).or_default();
        let before = region.util.share();
        region.was_huge = !survey.huge && (region.was_huge || region.huge);
        if survey.huge {
            region.was_huge = false;
            region.failures = 0;
        }
        region.huge = survey.huge;
        region.eligible = survey.eligible && !survey.unevictable;
        // The page table shows all of a huge page as used: until it is split, keep the finding from its
        // contents.
        region.hollow &= survey.huge;
        if !region.hollow {
            region.util = survey.used.without(&region.filled);
        }
        let share = region.util.share();
        // The seed's fault handler would notice a region that crosses the threshold; here it is found by
        // comparison with the last survey. A full region that lost its huge page, because a page in it was
        // freed or sharing was broken up, is queued too.
        let crossed = share >= threshold && (before < threshold || region.was_huge);
        if crossed && region.eligible && !region.huge && !region.queued {
            region.queued = true;
            self.high.push_back((survey.proc, survey.region));
        }
    }

    fn system(&mut self, view: &SystemView) {
        self.view = *view;
    }

    fn forget(&mut self, proc: ProcId) {
        self.procs.remove(&proc);
        self.high.retain(|(p, _)| *p != proc);
    }

    fn undo(&self, proc: ProcId) -> Vec<Action> {
        let made = self.regions(proc).filter(|(_, r)| r.made && r.huge);
        made.map(|(region, r)| Action::Split {
            proc,
            region,
            used: r.util,
        })
        .collect()
    }

    fn step(
        &mut self,
        now_ms: u64,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
    ) -> Result<StepReport, TrackerError> {
        let mut report = StepReport::default();
        if now_ms < self.next_ms {
            return Ok(report);
        }
        self.next_ms = now_ms + self.config.period_ms;
        self.demote(actuator, &mut report);
        self.promote(now_ms, actuator, &mut report);
        self.compact(now_ms, actuator, &mut report);
        if now_ms >= self.next_access_ms && !self.tracker_failed {
            let result = self.scan_access(tracker, actuator, &mut report);
            self.next_access_ms = now_ms + self.config.access_period_ms * self.access_backoff;
            // Without access bits Ingens still promotes by utilisation; the error is reported once.
            self.tracker_failed = result.is_err();
            result?;
        }
        Ok(report)
    }

    fn next_due_ms(&self) -> u64 {
        self.next_ms
    }

    fn metadata(&self) -> (u64, u64) {
        let regions: usize = self.procs.values().map(|p| p.regions.len()).sum();
        let used: u64 = self
            .procs
            .values()
            .flat_map(|p| p.regions.values())
            .map(|r| u64::from(r.util.weight()))
            .sum();
        let node = size_of::<Region>() + size_of::<HugeIndex>();
        // B-tree nodes are at least half full.
        ((regions * node * 2 + self.high.capacity() * 16) as u64, used)
    }

    fn set_scan_budget(&mut self, pages: u64) {
        self.scan_budget = pages.clamp(64, self.config.scan_batch_pages);
    }
}

/// Converts a number of pages to bytes.
pub(crate) const fn pages_to_bytes(pages: u64) -> u64 {
    pages * PAGE_BYTES
}

#[cfg(test)]
mod tests;
