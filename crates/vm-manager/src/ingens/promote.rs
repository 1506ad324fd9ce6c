//! Promotion and demotion: the high priority list first, then the normal list of the process with the largest
//! metric (§3.3.3, §3.3.7, §3.4.1).

use std::collections::BTreeMap;

use super::{HugeIndexCursor, Ingens, is_fair, promotion_metric};
use crate::interfaces::{Action, Actuator, Outcome, StepReport};
use crate::types::{HUGE_BYTES, HUGE_PAGES, HugeIndex, ProcId};

/// A failed promotion is tried again after this long, doubled with each failure.
const RETRY_MS: u64 = 1_000;

impl Ingens {
    /// Splits underused huge pages to give back memory.
    ///
    /// Ordinarily only regions whose utilisation is known to have fallen below the threshold are split, not
    /// at the first freed page. When memory is short, the least used are split first, frequently accessed
    /// ones included.
    pub(super) fn demote(&mut self, actuator: &mut dyn Actuator, report: &mut StepReport) {
        let mut candidates: Vec<(u32, ProcId, HugeIndex)> = Vec::new();
        let floor = if self.config.adaptive && !self.short_of_memory() {
            self.config.demote_below.min(self.threshold())
        } else {
            self.config.demote_below
        };
        for (proc, process) in &self.procs {
            for (index, region) in &process.regions {
                if (region.huge || region.was_huge) && region.util.share() < floor {
                    candidates.push((region.util.weight(), *proc, *index));
                }
            }
        }
        candidates.sort_unstable();
        candidates.truncate(self.config.promote_batch as usize);
        let actions: Vec<Action> = candidates
            .iter()
            .map(|(_, proc, index)| {
                let used = self.procs[proc].regions[index].util;
                Action::Split {
                    proc: *proc,
                    region: *index,
                    used,
                }
            })
            .collect();
        let mut outcomes = Vec::new();
        if !actions.is_empty() {
            actuator.apply(&actions, &mut outcomes);
        }
        for ((_, proc, index), outcome) in candidates.iter().zip(outcomes) {
            let Some(region) = self.procs.get_mut(proc).and_then(|p| p.regions.get_mut(index)) else {
                continue;
            };
            match outcome {
                Outcome::Done => {
                    report.split += 1;
                    region.made = false;
                    region.filled = crate::types::UtilVector::default();
                    region.huge = false;
                    region.was_huge = false;
                }
                Outcome::Gone => region.was_huge = false,
                Outcome::Busy | Outcome::NoMemory | Outcome::Unsupported => {
                    report.failed += 1;
                    region.was_huge = false;
                }
            }
        }
    }

    /// Makes huge pages: first the requests of the high list, then by fairness, at most the step's batch.
    pub(super) fn promote(&mut self, now_ms: u64, actuator: &mut dyn Actuator, report: &mut StepReport) {
        let mut left = self.config.promote_batch.min(self.room());
        // The high list is served fairly too: the next request is from the process with the largest metric.
        while left > 0 && !self.high.is_empty() {
            let Some(position) = self.most_deserving_request() else {
                break;
            };
            let Some((proc, index)) = self.high.remove(position) else {
                break;
            };
            let threshold = self.threshold();
            let Some(region) = self.procs.get_mut(&proc).and_then(|p| p.regions.get_mut(&index)) else {
                continue;
            };
            region.queued = false;
            let wanted = region.eligible && !region.huge && region.util.share() >= threshold;
            if wanted && now_ms >= region.retry_ms {
                left -= u64::from(self.collapse(now_ms, proc, index, actuator, report));
            }
        }
        if now_ms >= self.next_normal_ms {
            self.next_normal_ms = now_ms + self.config.scan_period_ms;
            self.normal_list(now_ms, left, actuator, report);
        }
    }

    /// Returns the number of huge pages that available memory and the budget still allow.
    fn room(&self) -> u64 {
        if self.short_of_memory() {
            return 0;
        }
        let reserve = (self.view.total_bytes as f64 * self.config.low_memory) as u64;
        let by_memory = match self.view.total_bytes {
            0 => u64::MAX,
            _ => self.view.available_bytes.saturating_sub(reserve) / HUGE_BYTES,
        };
        let held: u64 = self
            .procs
            .values()
            .map(|p| p.claim(&self.config).huge_pages)
            .sum();
        let by_budget = match self.config.huge_budget {
            0 => u64::MAX,
            budget => budget.saturating_sub(held),
        };
        by_memory.min(by_budget)
    }

    fn metrics(&self) -> BTreeMap<ProcId, f64> {
        let tau = self.config.tau;
        self.procs
            .iter()
            .map(|(p, process)| (*p, promotion_metric(&process.claim(&self.config), tau)))
            .collect()
    }

    fn most_deserving_request(&self) -> Option<usize> {
        if self.procs.len() < 2 {
            return (!self.high.is_empty()).then_some(0);
        }
        let metrics = self.metrics();
        let of = |p: &ProcId| metrics.get(p).copied().unwrap_or(0.0);
        let best = self.high.iter().map(|(p, _)| of(p)).fold(f64::MIN, f64::max);
        self.high.iter().position(|(p, _)| of(p) >= best)
    }

    /// Scans address space of the process with the largest metric, repeatedly, until the bytes allowed for
    /// this round are used up, O stops falling towards 0, or no process can use a huge page.
    fn normal_list(
        &mut self,
        now_ms: u64,
        mut left: u64,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) {
        let mut stretch = (self.config.scan_bytes / HUGE_BYTES).max(1);
        let mut exhausted: Vec<ProcId> = Vec::new();
        while left > 0 && stretch > 0 {
            let metrics = self.metrics();
            let all: Vec<f64> = metrics.values().copied().collect();
            let contended = self.config.huge_budget > 0;
            let fair = is_fair(&all);
            let candidate = metrics
                .iter()
                .filter(|(p, _)| !exhausted.contains(p) && self.procs[p].excluded_until_ms <= now_ms)
                .max_by(|a, b| a.1.total_cmp(b.1));
            let Some((proc, _)) = candidate else { return };
            let proc = *proc;
            let made = self.scan_regions(now_ms, proc, &mut stretch, actuator, report);
            left = left.saturating_sub(made);
            if made == 0 {
                exhausted.push(proc);
            } else if contended && fair && all.len() > 1 && report.collapsed >= all.len() as u64 {
                // A fair state was reached, and every process got an equal part in this round.
                return;
            }
        }
    }

    /// Walks regions from the process' cursor until one is promoted, `stretch` is used up or the pass is
    /// over. Returns the number of promoted regions.
    fn scan_regions(
        &mut self,
        now_ms: u64,
        proc: ProcId,
        stretch: &mut u64,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) -> u64 {
        let threshold = self.threshold();
        while *stretch > 0 {
            let Some(process) = self.procs.get_mut(&proc) else {
                return 0;
            };
            let from = HugeIndex(process.cursor.0);
            let Some((index, region)) = process.regions.range(from..).next() else {
                // End of a pass. A process without a promotion in it is left out for a while.
                if process.promoted_this_pass == 0 {
                    process.excluded_until_ms = now_ms + self.config.exclude_ms;
                }
                process.promoted_this_pass = 0;
                process.cursor = HugeIndexCursor(0);
                return 0;
            };
            let index = *index;
            let wanted = region.eligible && !region.huge && region.util.share() >= threshold;
            let due = wanted && now_ms >= region.retry_ms;
            process.cursor = HugeIndexCursor(index.0 + 1);
            *stretch -= 1;
            if due && self.collapse(now_ms, proc, index, actuator, report) {
                if let Some(process) = self.procs.get_mut(&proc) {
                    process.promoted_this_pass += 1;
                }
                return 1;
            }
        }
        0
    }

    /// Whether a region stays base pages because merging saves memory in it (§3.3.5). A frequently used
    /// region does not, and is taken back as soon as it is found to be frequently used.
    fn leave_to_merging(
        &mut self,
        now_ms: u64,
        proc: ProcId,
        index: HugeIndex,
        actuator: &mut dyn Actuator,
    ) -> bool {
        let Some(region) = self.procs.get_mut(&proc).and_then(|p| p.regions.get_mut(&index)) else {
            return false;
        };
        region.merged = false;
        if region.frequently_accessed(self.config.frequent_at) || actuator.merged_now(proc, index) == 0 {
            return false;
        }
        region.merged = true;
        region.retry_ms = now_ms + self.config.scan_period_ms;
        true
    }

    fn collapse(
        &mut self,
        now_ms: u64,
        proc: ProcId,
        index: HugeIndex,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) -> bool {
        // The request may be stale: if pages were freed since the survey, filling them would be bloat that no
        // page table shows afterwards.
        let threshold = self.threshold();
        if let Some(now) = actuator.used_now(proc, index)
            && let Some(region) = self.procs.get_mut(&proc).and_then(|p| p.regions.get_mut(&index))
        {
            region.util = now.without(&region.filled);
            if region.util.share() < threshold {
                return false;
            }
        }
        if self.config.coordinate_sharing && self.leave_to_merging(now_ms, proc, index, actuator) {
            return false;
        }
        let mut outcomes = Vec::new();
        actuator.apply(&[Action::Collapse { proc, region: index }], &mut outcomes);
        let outcome = outcomes.first().copied().unwrap_or(Outcome::Busy);
        let Some(process) = self.procs.get_mut(&proc) else {
            return false;
        };
        let Some(region) = process.regions.get_mut(&index) else {
            return false;
        };
        match outcome {
            Outcome::Done => {
                region.huge = true;
                region.made = true;
                // The collapse filled unused pages with zeros. Without this record the next survey would
                // count them as used, and pages freed one by one would be filled again and again.
                region.filled = region
                    .filled
                    .with(&crate::types::UtilVector::FULL.without(&region.util));
                region.was_huge = false;
                region.failures = 0;
                report.collapsed += 1;
                let added = HUGE_PAGES - u64::from(region.util.weight());
                self.view.available_bytes = self
                    .view
                    .available_bytes
                    .saturating_sub(super::pages_to_bytes(added));
                true
            }
            Outcome::Gone => {
                process.regions.remove(&index);
                false
            }
            Outcome::Busy | Outcome::NoMemory => {
                report.failed += 1;
                region.failures = region.failures.saturating_add(1);
                region.retry_ms = now_ms + (RETRY_MS << region.failures.min(8));
                false
            }
            Outcome::Unsupported => {
                report.failed += 1;
                region.eligible = false;
                false
            }
        }
    }
}
