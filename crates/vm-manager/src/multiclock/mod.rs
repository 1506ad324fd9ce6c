//! MULTI-CLOCK (chapter 6 of the seed): every tier has inactive, active and promote lists; `kpromoted` walks
//! the lower tiers every 100 ms and moves pages up, pressure moves them down.
//!
//! Owns page states and the transitions between them. Refuses to know how references are observed or pages
//! are moved.

mod reclaim;
mod state;
mod table;

pub use state::{Edge, EdgeCounts, PageState};
pub use table::ListKind;

use serde::{Deserialize, Serialize};

use crate::interfaces::{
    Action, Actuator, Outcome, Policy, RegionSurvey, StepReport, SystemView, Touch, Tracker, TrackerError,
};
use crate::types::{HUGE_PAGES, PAGE_BYTES, PageClass, PageKey, ProcId, TierId};
use table::{Slot, Table};

const CLASSES: [PageClass; 2] = [PageClass::Anon, PageClass::File];
/// Amount that one read adds to a page's importance.
const READ_HEAT: u8 = 32;

/// Settings of MULTI-CLOCK; the defaults are the seed's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MultiClockConfig {
    /// Time between two runs of `kpromoted`, ms (10..=60000; seed: 100).
    pub period_ms: u64,
    /// Most pages whose reference bit is read in one run (64..=1048576).
    pub scan_batch_pages: u64,
    /// Most pages promoted in one run (1..=1048576).
    pub promote_batch_pages: u64,
    /// Importance of a write relative to a read (1.0..=4.0); 1.0 is the seed without its future work.
    pub write_weight: f64,
    /// Whether the lowest tier may write pages back to swap or their file.
    pub evict: bool,
    /// Watermarks relative to the kernel's formula (0.1..=100.0).
    pub watermark_scale: f64,
    /// Longest period as a multiple of `period_ms` while nothing changes (1..=64; 1 never slows down).
    pub max_backoff: u64,
}

impl Default for MultiClockConfig {
    fn default() -> Self {
        Self {
            period_ms: 100,
            scan_batch_pages: 16_384,
            promote_batch_pages: 4_096,
            write_weight: 2.0,
            evict: false,
            watermark_scale: 1.0,
            max_backoff: 8,
        }
    }
}

/// Free-page levels of a tier (§6.2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Watermarks {
    /// Below this no page is promoted into the tier.
    pub min: u64,
    /// Below this the tier is under pressure.
    pub low: u64,
    /// Demotion stops here.
    pub high: u64,
}

impl Watermarks {
    /// Computes the levels by the kernel's formula: `min` is the tier's part of 4·√(all KiB) KiB, `low` 5/4
    /// and `high` 3/2 of it.
    pub fn new(tier_pages: u64, all_pages: u64, scale: f64) -> Self {
        let all_kib = (all_pages * PAGE_BYTES / 1024) as f64;
        let whole = (16.0 * all_kib).sqrt() * 1024.0 / PAGE_BYTES as f64 * scale;
        let share = tier_pages as f64 / all_pages.max(1) as f64;
        let min = ((whole * share).ceil() as u64).clamp(1, (tier_pages / 4).max(1));
        Self {
            min,
            low: (min * 5).div_ceil(4),
            high: (min * 3).div_ceil(2),
        }
    }
}

/// The policy.
#[derive(Debug)]
pub struct MultiClock {
    config: MultiClockConfig,
    table: Table,
    capacity: Vec<u64>,
    /// Managed base pages in each tier.
    used: Vec<u64>,
    marks: Vec<Watermarks>,
    edges: EdgeCounts,
    scan_budget: u64,
    budget_left: u64,
    next_ms: u64,
    backoff: u64,
    touches: Vec<Touch>,
    slots: Vec<Slot>,
    keys: Vec<PageKey>,
    outcomes: Vec<Outcome>,
}

impl MultiClock {
    /// Makes a policy over tiers of these capacities in pages, fastest first.
    ///
    /// # Panics
    /// If there is no tier or more than 255.
    pub fn new(config: MultiClockConfig, capacity_pages: &[u64]) -> Self {
        assert!(
            !capacity_pages.is_empty() && capacity_pages.len() < 256,
            "1 to 255 tiers"
        );
        let all = capacity_pages.iter().sum();
        let marks = capacity_pages
            .iter()
            .map(|c| Watermarks::new(*c, all, config.watermark_scale))
            .collect();
        Self {
            table: Table::new(capacity_pages.len()),
            capacity: capacity_pages.to_vec(),
            used: vec![0; capacity_pages.len()],
            marks,
            edges: EdgeCounts::default(),
            scan_budget: config.scan_batch_pages,
            budget_left: 0,
            next_ms: 0,
            backoff: 1,
            touches: Vec::new(),
            slots: Vec::new(),
            keys: Vec::new(),
            outcomes: Vec::new(),
            config,
        }
    }

    /// Returns the tier, list and reference mark of a page.
    pub fn state(&self, key: PageKey) -> Option<PageState> {
        let meta = self.table.meta(self.table.slot(key)?);
        Some(PageState {
            tier: meta.tier(),
            list: meta.list(),
            referenced: meta.referenced(),
        })
    }

    /// Returns how often each edge of Figure 6.4 was taken.
    pub fn edges(&self) -> &EdgeCounts {
        &self.edges
    }

    /// Returns the number of pages on a list, both classes together.
    pub fn list_len(&self, tier: TierId, kind: ListKind) -> u64 {
        CLASSES.iter().map(|c| self.table.list(tier, *c, kind).len).sum()
    }

    /// Returns a tier's watermarks.
    pub fn watermarks(&self, tier: TierId) -> Watermarks {
        self.marks[tier.index()]
    }

    /// Returns the most active pages for each inactive one: √(10·n) for n GiB, at least 1 (§6.2.3).
    pub fn active_ratio(&self, tier: TierId) -> u64 {
        let gib = (self.capacity[tier.index()] * PAGE_BYTES) >> 30;
        ((10 * gib) as f64).sqrt().floor().max(1.0) as u64
    }

    /// Adds a new page: it starts on the inactive list of its tier, or on the unevictable list, not
    /// referenced.
    pub fn allocate(&mut self, key: PageKey, class: PageClass, tier: TierId, unevictable: bool) {
        let kind = if unevictable {
            ListKind::Unevictable
        } else {
            ListKind::Inactive
        };
        if tier.index() < self.capacity.len() && self.table.insert(key, class, tier, kind).is_some() {
            self.used[tier.index()] += 1;
            self.edges
                .count(if unevictable { Edge::Lock } else { Edge::Allocate });
        }
    }

    /// Removes a freed page.
    pub fn free(&mut self, key: PageKey) {
        if let Some(slot) = self.table.slot(key) {
            self.drop_slot(slot);
        }
    }

    /// Locks a page in memory or unlocks it.
    pub fn set_unevictable(&mut self, key: PageKey, locked: bool) {
        let Some(slot) = self.table.slot(key) else { return };
        let meta = *self.table.meta(slot);
        let is = meta.list() == ListKind::Unevictable;
        if locked && !is {
            self.table.meta_mut(slot).set_referenced(false);
            self.table.move_to(slot, meta.tier(), ListKind::Unevictable);
            self.edges.count(Edge::Lock);
        } else if !locked && is {
            self.table.move_to(slot, meta.tier(), ListKind::Inactive);
            self.edges.count(Edge::Unlock);
        }
    }

    /// Records a supervised access (through a system call): the page is promoted in its lists at once,
    /// without a scan.
    pub fn mark_page_accessed(&mut self, key: PageKey, write: bool) {
        if let Some(slot) = self.table.slot(key) {
            self.touched(slot, write);
        }
    }

    /// Checks that every page is on exactly one list, the one its state names.
    ///
    /// # Errors
    /// A message about the violation.
    pub fn check(&self) -> Result<(), String> {
        let promote_on_top = self.list_len(TierId(0), ListKind::Promote);
        if promote_on_top != 0 {
            return Err(format!(
                "{promote_on_top} pages wait for promotion out of the fastest tier"
            ));
        }
        self.table.check()
    }

    /// Returns the number of managed base pages in a tier.
    pub fn used(&self, tier: TierId) -> u64 {
        self.used[tier.index()]
    }

    fn drop_slot(&mut self, slot: Slot) {
        self.used[self.table.meta(slot).tier().index()] -= self.weight(slot);
        self.table.remove(slot);
        self.edges.count(Edge::Free);
    }

    fn write_heat(&self) -> u8 {
        (f64::from(READ_HEAT) * self.config.write_weight).min(127.0) as u8
    }

    /// Takes the upward edge for one observed reference.
    fn touched(&mut self, slot: Slot, write: bool) {
        let step = if write { self.write_heat() } else { READ_HEAT };
        let meta = self.table.meta_mut(slot);
        meta.heat = meta.heat / 2 + step;
        meta.set_spared(false);
        let (tier, list, referenced) = (meta.tier(), meta.list(), meta.referenced());
        let top = tier.upper().is_none();
        let edge = match (list, referenced) {
            (ListKind::Inactive, false) => Edge::InactiveReference,
            (ListKind::Inactive, true) => Edge::Activate,
            (ListKind::Active, false) => Edge::ActiveReference,
            (ListKind::Active, true) if top => Edge::TopReference,
            (ListKind::Active, true) => Edge::Reactivate,
            (ListKind::Promote, _) => Edge::PromoteReference,
            (ListKind::Unevictable, _) => return,
        };
        self.edges.count(edge);
        match edge {
            Edge::InactiveReference | Edge::ActiveReference => {
                self.table.meta_mut(slot).set_referenced(true);
                self.table.rotate(slot);
            }
            Edge::Activate => self.enter(slot, tier, ListKind::Active),
            Edge::Reactivate => self.enter(slot, tier, ListKind::Promote),
            _ => self.table.rotate(slot),
        }
    }

    /// Ages a page that a scan found untouched: clears its reference mark and skips it, as CLOCK does.
    /// Returns true if it had no mark.
    fn aged(&mut self, slot: Slot) -> bool {
        let meta = self.table.meta_mut(slot);
        meta.heat /= 2;
        if !meta.referenced() {
            return true;
        }
        meta.set_referenced(false);
        let edge = if meta.list() == ListKind::Active {
            Edge::ActiveAge
        } else {
            Edge::InactiveAge
        };
        self.edges.count(edge);
        self.table.rotate(slot);
        false
    }

    /// Puts a page at the head of a list, not referenced.
    fn enter(&mut self, slot: Slot, tier: TierId, kind: ListKind) {
        let weight = self.weight(slot);
        self.used[self.table.meta(slot).tier().index()] -= weight;
        self.used[tier.index()] += weight;
        self.table.meta_mut(slot).set_referenced(false);
        self.table.move_to(slot, tier, kind);
    }

    /// Returns the free pages of a tier, at most the part of the configured capacity that is left.
    fn free_in(&self, tier: TierId, actuator: &mut dyn Actuator) -> u64 {
        let left = self.capacity[tier.index()].saturating_sub(self.used[tier.index()]);
        actuator.free_pages(tier).min(left)
    }

    fn weight(&self, slot: Slot) -> u64 {
        if self.table.meta(slot).huge() {
            HUGE_PAGES
        } else {
            1
        }
    }

    fn set_huge(&mut self, slot: Slot, huge: bool) {
        let (before, tier) = (self.weight(slot), self.table.meta(slot).tier().index());
        self.table.meta_mut(slot).set_huge(huge);
        self.used[tier] = self.used[tier] - before + self.weight(slot);
    }

    /// Queries the tracker about the oldest `count` pages of a list; results are in `self.slots` and
    /// `self.touches`.
    fn look(
        &mut self,
        tier: TierId,
        class: PageClass,
        kind: ListKind,
        count: u64,
        tracker: &mut dyn Tracker,
    ) -> Result<u64, TrackerError> {
        let count = count.min(self.budget_left);
        let mut slots = std::mem::take(&mut self.slots);
        self.table.tail(tier, class, kind, count, &mut slots);
        self.keys.clear();
        self.keys.extend(slots.iter().map(|s| self.table.key(*s)));
        self.slots = slots;
        self.touches.clear();
        tracker.observe(&self.keys, &mut self.touches)?;
        self.touches.resize(self.slots.len(), Touch::Unknown);
        let looked = self.slots.len() as u64;
        self.budget_left -= looked;
        Ok(looked)
    }

    /// Walks one list, as `kpromoted`: referenced pages move up, others lose their mark.
    fn walk(
        &mut self,
        tier: TierId,
        kind: ListKind,
        count: u64,
        tracker: &mut dyn Tracker,
        report: &mut StepReport,
    ) -> Result<(), TrackerError> {
        for class in CLASSES {
            report.scanned += self.look(tier, class, kind, count, tracker)?;
            for i in 0..self.slots.len() {
                let slot = self.slots[i];
                let touch = self.touches[i];
                match touch {
                    Touch::Read => self.touched(slot, false),
                    Touch::Written => self.touched(slot, true),
                    Touch::Unknown => self.table.rotate(slot),
                    Touch::Idle => {
                        if self.aged(slot) {
                            self.table.rotate(slot);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn kpromoted(
        &mut self,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) -> Result<(), TrackerError> {
        let lower = self.capacity.len() as u64 - 1;
        // Half of the budget is reserved for pressure; the lists of the lower tiers share the rest by length.
        let walk_budget = if lower == 0 { 0 } else { self.scan_budget / 2 };
        let total: u64 = (1..=lower)
            .map(|t| TierId(t as u8))
            .map(|t| self.list_len(t, ListKind::Inactive) + self.list_len(t, ListKind::Active))
            .sum();
        for tier in (1..=lower).map(|t| TierId(t as u8)) {
            for kind in [ListKind::Active, ListKind::Inactive] {
                let len = self.list_len(tier, kind);
                let part = (walk_budget.saturating_mul(len) / total.max(1) + 1).min(len);
                self.walk(tier, kind, part, tracker, report)?;
            }
        }
        for tier in (1..=lower).map(|t| TierId(t as u8)) {
            self.shrink_promote(tier, tracker, actuator, report)?;
        }
        for tier in (0..=lower).map(|t| TierId(t as u8)) {
            self.relieve(tier, tracker, actuator, report)?;
        }
        Ok(())
    }

    fn apply(&mut self, actions: &[Action], actuator: &mut dyn Actuator) {
        self.outcomes.clear();
        if !actions.is_empty() {
            actuator.apply(actions, &mut self.outcomes);
        }
        self.outcomes.resize(actions.len(), Outcome::Busy);
    }
}

impl Policy for MultiClock {
    fn name(&self) -> &'static str {
        "multi-clock"
    }

    fn survey(&mut self, survey: &RegionSurvey, actuator: &mut dyn Actuator) {
        let mut used = survey.used;
        if survey.huge {
            used = crate::types::UtilVector::default();
            used.set(0, true);
        }
        let base = survey.region.page(0).0;
        let known = used
            .0
            .iter()
            .enumerate()
            .all(|(i, w)| self.table.present(survey.proc, base + i as u64 * 64) == *w);
        let first = used.first().and_then(|o| {
            self.table
                .slot(PageKey::new(survey.proc, survey.region.page(o as u64)))
        });
        let same = first.is_some_and(|s| {
            let meta = self.table.meta(s);
            meta.huge() == survey.huge && (meta.list() == ListKind::Unevictable) == survey.unevictable
        });
        // The ordinary case, which must be cheap: nothing changed.
        if known && (same || used.weight() == 0) {
            return;
        }
        let mut fresh = Vec::new();
        for offset in 0..HUGE_PAGES as usize {
            let key = PageKey::new(survey.proc, survey.region.page(offset as u64));
            match (used.get(offset), self.table.slot(key)) {
                (true, None) => fresh.push(key),
                (false, Some(slot)) => self.drop_slot(slot),
                (true, Some(slot)) => {
                    self.set_huge(slot, survey.huge);
                    self.set_unevictable(key, survey.unevictable);
                }
                (false, None) => {}
            }
        }
        let mut places = Vec::new();
        actuator.locate(&fresh, &mut places);
        for (key, place) in fresh.iter().zip(places) {
            if let Some(tier) = place {
                self.allocate(*key, survey.class, tier, survey.unevictable);
                if let Some(slot) = self.table.slot(*key) {
                    self.set_huge(slot, survey.huge);
                }
            }
        }
    }

    fn system(&mut self, _view: &SystemView) {}

    fn forget(&mut self, proc: ProcId) {
        for slot in self.table.slots_of(proc) {
            self.drop_slot(slot);
        }
    }

    fn undo(&self, proc: ProcId) -> Vec<Action> {
        let slots = self.table.slots_of(proc);
        let moved = slots.into_iter().filter(|s| {
            let meta = self.table.meta(*s);
            meta.origin() != meta.tier()
        });
        moved
            .map(|s| Action::Move {
                page: self.table.key(s),
                to: self.table.meta(s).origin(),
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
        self.budget_left = self.scan_budget;
        let before = self.edges.changes();
        let result = self.kpromoted(tracker, actuator, &mut report);
        let quiet = self.edges.changes() == before;
        self.backoff = if quiet {
            (self.backoff * 2).min(self.config.max_backoff)
        } else {
            1
        };
        self.next_ms = now_ms + self.config.period_ms * self.backoff;
        result.map(|()| report)
    }

    fn next_due_ms(&self) -> u64 {
        self.next_ms
    }

    fn metadata(&self) -> (u64, u64) {
        (self.table.bytes(), self.table.pages())
    }

    fn set_scan_budget(&mut self, pages: u64) {
        self.scan_budget = pages.clamp(64, self.config.scan_batch_pages);
    }
}

#[cfg(test)]
mod tests;
