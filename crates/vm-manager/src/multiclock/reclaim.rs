//! Removal of pages from lists: promotion to the tier above, demotion to the tier below, eviction (§6.2.2,
//! §6.2.3).

use super::table::{ListKind, Slot};
use super::{CLASSES, Edge, MultiClock, READ_HEAT};
use crate::interfaces::{Action, Actuator, Outcome, StepReport, Touch, Tracker, TrackerError};
use crate::types::{PageClass, TierId};

/// Pages per batch: bounds its memory and the time between checks of free memory.
const BATCH_PAGES: u64 = 512;

impl MultiClock {
    /// Moves pages of the promote list up. When the tier above has no room, its cold pages are demoted first;
    /// pages that still find no room return to the active list.
    pub(super) fn shrink_promote(
        &mut self,
        tier: TierId,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) -> Result<(), TrackerError> {
        let Some(upper) = tier.upper() else { return Ok(()) };
        let mut batch: Vec<Slot> = Vec::new();
        for class in CLASSES {
            let mut slots = Vec::new();
            let count = self.config.promote_batch_pages.saturating_sub(batch.len() as u64);
            self.table.tail(tier, class, ListKind::Promote, count, &mut slots);
            batch.append(&mut slots);
        }
        if batch.is_empty() {
            return Ok(());
        }
        // The most important first: writes weigh more where the tracker tells them from reads.
        batch.sort_by_key(|s| std::cmp::Reverse(self.table.meta(*s).heat));
        let want: u64 = batch.iter().map(|s| self.weight(*s)).sum();
        let marks = self.marks[upper.index()];
        let mut room = self.free_in(upper, actuator).saturating_sub(marks.min);
        if room < want {
            self.reclaim(
                upper,
                want - room + (marks.high - marks.min),
                tracker,
                actuator,
                report,
            )?;
            room = self.free_in(upper, actuator).saturating_sub(marks.min);
        }
        let mut fitting = Vec::new();
        for slot in batch {
            let weight = self.weight(slot);
            if weight <= room {
                room -= weight;
                fitting.push(slot);
            } else {
                self.promotion_failed(slot, tier, report);
            }
        }
        let actions: Vec<Action> = fitting
            .iter()
            .map(|s| Action::Move {
                page: self.table.key(*s),
                to: upper,
            })
            .collect();
        self.apply(&actions, actuator);
        for (i, slot) in fitting.into_iter().enumerate() {
            match self.outcomes[i] {
                Outcome::Done => {
                    report.promoted += self.weight(slot);
                    self.enter(slot, upper, ListKind::Active);
                    self.edges.count(Edge::PromoteUp);
                }
                Outcome::Gone => self.drop_slot(slot),
                Outcome::Busy | Outcome::NoMemory | Outcome::Unsupported => {
                    self.promotion_failed(slot, tier, report);
                }
            }
        }
        Ok(())
    }

    fn promotion_failed(&mut self, slot: Slot, tier: TierId, report: &mut StepReport) {
        report.failed += 1;
        self.enter(slot, tier, ListKind::Active);
        self.edges.count(Edge::PromoteFail);
    }

    /// Frees pages of a tier that is under pressure, up to its high watermark.
    pub(super) fn relieve(
        &mut self,
        tier: TierId,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) -> Result<(), TrackerError> {
        let marks = self.marks[tier.index()];
        let free = self.free_in(tier, actuator);
        if free >= marks.low {
            return Ok(());
        }
        // A tier under pressure first promotes pages, then demotes.
        if self.list_len(tier, ListKind::Promote) > 0 {
            self.shrink_promote(tier, tracker, actuator, report)?;
        }
        self.reclaim(tier, marks.high.saturating_sub(free), tracker, actuator, report)
            .map(drop)
    }

    /// Demotes (or, in the lowest tier, evicts) until `target` pages are free or the scan budget is spent.
    /// Returns the number of pages that left.
    pub(super) fn reclaim(
        &mut self,
        tier: TierId,
        target: u64,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) -> Result<u64, TrackerError> {
        let lowest = tier.index() + 1 == self.capacity.len();
        if lowest && !self.config.evict {
            return Ok(0);
        }
        let mut freed = 0;
        // Every page is examined at most twice: once to lose its mark, once to leave.
        let lists = self.list_len(tier, ListKind::Inactive) + self.list_len(tier, ListKind::Active);
        let mut allowance = lists * 2;
        while freed < target && allowance > 0 && self.budget_left > 0 {
            let mut looked = 0;
            for class in CLASSES {
                looked += self.shrink_active(tier, class, tracker, report)?;
                let count = BATCH_PAGES.min(allowance);
                let (l, f) =
                    self.shrink_inactive(tier, class, count, target - freed, tracker, actuator, report)?;
                looked += l;
                freed += f;
                if freed >= target {
                    break;
                }
            }
            if looked == 0 {
                break;
            }
            allowance = allowance.saturating_sub(looked);
        }
        Ok(freed)
    }

    /// Moves unreferenced active pages to the inactive list while the active one is too long.
    fn shrink_active(
        &mut self,
        tier: TierId,
        class: PageClass,
        tracker: &mut dyn Tracker,
        report: &mut StepReport,
    ) -> Result<u64, TrackerError> {
        let ratio = self.active_ratio(tier);
        let inactive = self.table.list(tier, class, ListKind::Inactive).len;
        let active = self.table.list(tier, class, ListKind::Active).len;
        if active <= inactive * ratio {
            return Ok(0);
        }
        let looked = self.look(tier, class, ListKind::Active, BATCH_PAGES, tracker)?;
        report.scanned += looked;
        for i in 0..self.slots.len() {
            let slot = self.slots[i];
            let touch = self.touches[i];
            match touch {
                Touch::Read => self.touched(slot, false),
                Touch::Written => self.touched(slot, true),
                Touch::Unknown => self.table.rotate(slot),
                Touch::Idle => {
                    if self.aged(slot) {
                        self.enter(slot, tier, ListKind::Inactive);
                        self.edges.count(Edge::Deactivate);
                    }
                }
            }
        }
        Ok(looked)
    }

    /// Queries the oldest inactive pages; untouched ones leave the tier.
    #[expect(clippy::too_many_arguments, reason = "one scan: where, how much, with what")]
    fn shrink_inactive(
        &mut self,
        tier: TierId,
        class: PageClass,
        count: u64,
        want: u64,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) -> Result<(u64, u64), TrackerError> {
        let looked = self.look(tier, class, ListKind::Inactive, count, tracker)?;
        report.scanned += looked;
        let mut leaving = Vec::new();
        let mut leaving_weight = 0;
        for i in 0..self.slots.len() {
            let slot = self.slots[i];
            let touch = self.touches[i];
            match touch {
                Touch::Read => self.touched(slot, false),
                Touch::Written => self.touched(slot, true),
                Touch::Unknown => self.table.rotate(slot),
                Touch::Idle if !self.aged(slot) => {}
                Touch::Idle if leaving_weight >= want => {}
                Touch::Idle if self.spare_written(slot) => self.table.rotate(slot),
                Touch::Idle => {
                    leaving_weight += self.weight(slot);
                    leaving.push(slot);
                }
            }
        }
        let freed = self.send_down(leaving, leaving_weight, tier, tracker, actuator, report)?;
        Ok((looked, freed))
    }

    /// Whether a recently written page is spared for one more round: slow tiers are slowest at writing
    /// (§6.5).
    fn spare_written(&mut self, slot: Slot) -> bool {
        let weighted = self.config.write_weight > 1.0;
        let meta = self.table.meta_mut(slot);
        // After the two idle observations that lead here, reads alone leave at most READ_HEAT / 2.
        let spare = weighted && !meta.spared() && meta.heat > READ_HEAT / 2;
        if spare {
            meta.set_spared(true);
        }
        spare
    }

    fn send_down(
        &mut self,
        leaving: Vec<Slot>,
        weight: u64,
        tier: TierId,
        tracker: &mut dyn Tracker,
        actuator: &mut dyn Actuator,
        report: &mut StepReport,
    ) -> Result<u64, TrackerError> {
        let lowest = tier.index() + 1 == self.capacity.len();
        let below = TierId(tier.0 + 1);
        if !lowest && !leaving.is_empty() {
            let marks = self.marks[below.index()];
            let free = self.free_in(below, actuator);
            if free < weight + marks.min {
                self.reclaim(
                    below,
                    weight + marks.high - free.min(weight),
                    tracker,
                    actuator,
                    report,
                )?;
            }
        }
        let action = |page| {
            if lowest {
                Action::Evict { page }
            } else {
                Action::Move { page, to: below }
            }
        };
        let actions: Vec<Action> = leaving.iter().map(|s| action(self.table.key(*s))).collect();
        self.apply(&actions, actuator);
        let mut freed = 0;
        for (i, slot) in leaving.into_iter().enumerate() {
            let weight = self.weight(slot);
            match self.outcomes[i] {
                Outcome::Done if lowest => {
                    report.evicted += weight;
                    freed += weight;
                    self.edges.count(Edge::Evict);
                    self.used[tier.index()] -= weight;
                    self.table.remove(slot);
                }
                Outcome::Done => {
                    report.demoted += weight;
                    freed += weight;
                    self.enter(slot, below, ListKind::Inactive);
                    self.edges.count(Edge::Demote);
                }
                Outcome::Gone => self.drop_slot(slot),
                Outcome::Busy | Outcome::NoMemory | Outcome::Unsupported => {
                    report.failed += 1;
                    self.table.rotate(slot);
                }
            }
        }
        Ok(freed)
    }
}
