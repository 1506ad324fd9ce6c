//! Uses of data, per tier and range: of a file, or of the shared blocks, whose uses by all their owners count
//! together. Owns order and bounds of this memory; draws no conclusions.

use super::{At, ReadCounts, Use};
use std::collections::BTreeMap;
use std::ops::Range;
use varve_format::{FileBlock, InodeKey, Tier};

/// Blocks of a range: 2 MiB.
pub(super) const RANGE_BLOCKS: u64 = 512;
/// Most ranges of one call that are noted.
const RANGES_PER_USE: u64 = 1024;
/// Ranges remembered between two plans.
const USES_MAX: usize = 4096;
/// Number of different steps whose reads make a range warm, however few blocks they read.
const WARM_STEPS: u32 = 4;
/// Steps after which earlier reads count half.
const HALF_LIFE_STEPS: u64 = 1200;

/// What the blocks of a range belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Space {
    /// A file alone.
    File(InodeKey),
    /// The space of shared blocks.
    Shared,
}

/// A range of a file, or of numbers of the shared space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RangeId {
    pub(super) space: Space,
    pub(super) index: u64,
}

impl RangeId {
    pub(super) const fn of_file(key: InodeKey, block: u64) -> Self {
        Self {
            space: Space::File(key),
            index: block / RANGE_BLOCKS,
        }
    }

    pub(super) const fn of_shared(number: u64) -> Self {
        Self {
            space: Space::Shared,
            index: number / RANGE_BLOCKS,
        }
    }

    /// The range of a block.
    pub(super) const fn of(at: At) -> Self {
        match at {
            At::File(key, block) => Self::of_file(key, block.0),
            At::Shared(number) => Self::of_shared(number),
        }
    }

    pub(super) const fn start(self) -> FileBlock {
        FileBlock(self.index * RANGE_BLOCKS)
    }

    pub(super) const fn end(self) -> u64 {
        (self.index + 1) * RANGE_BLOCKS
    }

    pub(super) const fn blocks(self) -> Range<u64> {
        self.start().0..self.end()
    }
}

/// Uses since the last plan.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// Blocks read of each range of a file.
    pub(super) ranges: BTreeMap<(InodeKey, u64), u64>,
    /// More ranges were used than remembered.
    pub(super) dropped: bool,
}

impl Uses {
    pub(super) const fn new() -> Self {
        Self {
            ranges: BTreeMap::new(),
            dropped: false,
        }
    }

    pub(super) fn add(&mut self, key: InodeKey, from: u64, blocks: u64, how: Use) {
        let end = from.saturating_add(blocks);
        let mut at = from;
        for _ in 0..RANGES_PER_USE {
            if at >= end {
                return;
            }
            let index = at / RANGE_BLOCKS;
            let stop = ((index + 1) * RANGE_BLOCKS).min(end);
            let read = if how == Use::Read { stop - at } else { 0 };
            if self.ranges.len() < USES_MAX || self.ranges.contains_key(&(key, index)) {
                let sum = self.ranges.entry((key, index)).or_insert(0);
                *sum = sum.saturating_add(read);
            } else {
                self.dropped = true;
                return;
            }
            at = stop;
        }
        self.dropped = true;
    }
}

/// Uses of a range on a tier.
#[derive(Debug, Clone, Copy, Default)]
struct Warmth {
    stamp: u64,
    /// Blocks read.
    read: u64,
    /// Steps with reads of the range.
    steps: u32,
    last_step: u64,
}

/// Ranges on one tier, in the order of their last use.
#[derive(Debug)]
struct TierHeat {
    ranges: BTreeMap<RangeId, Warmth>,
    order: BTreeMap<u64, RangeId>,
}

/// Ranges on all tiers. Any other range is colder.
#[derive(Debug)]
pub(super) struct Heat {
    tiers: [TierHeat; 3],
    clock: u64,
    most: usize,
}

impl Heat {
    /// Remembers at most `most` ranges of each tier.
    pub(super) const fn new(most: usize) -> Self {
        const EMPTY: TierHeat = TierHeat {
            ranges: BTreeMap::new(),
            order: BTreeMap::new(),
        };
        Self {
            tiers: [EMPTY; 3],
            clock: 0,
            most,
        }
    }

    pub(super) fn knows(&self, tier: Tier, id: RangeId) -> bool {
        self.tiers[tier as usize].ranges.contains_key(&id)
    }

    /// Returns the reads of a range on a tier.
    pub(super) fn reads(&self, tier: Tier, id: RangeId) -> ReadCounts {
        let warmth = self.tiers[tier as usize].ranges.get(&id);
        warmth.map_or(ReadCounts::default(), |warmth| ReadCounts {
            blocks: warmth.read,
            steps: warmth.steps,
        })
    }

    /// Notes that a range with `present` blocks on a tier was used in a step, `read` blocks of it through the
    /// daemon. Returns whether it is warm, and whether another range had to be forgotten.
    pub(super) fn touch(
        &mut self,
        tier: Tier,
        id: RangeId,
        present: u64,
        read: u64,
        step: u64,
    ) -> (bool, bool) {
        self.clock += 1;
        let heat = &mut self.tiers[tier as usize];
        let warmth = heat.ranges.entry(id).or_default();
        heat.order.remove(&warmth.stamp);
        warmth.stamp = self.clock;
        heat.order.insert(warmth.stamp, id);
        let halves = step.saturating_sub(warmth.last_step) / HALF_LIFE_STEPS;
        warmth.read = warmth.read.checked_shr(halves.min(64) as u32).unwrap_or(0);
        warmth.steps = warmth.steps.checked_shr(halves.min(32) as u32).unwrap_or(0);
        warmth.last_step = step;
        if read > 0 {
            warmth.read = warmth.read.saturating_add(read);
            warmth.steps = warmth.steps.saturating_add(1);
        }
        // All of it was read twice, or parts of it at different times.
        let warm = read > 0 && (warmth.read >= present.saturating_mul(2) || warmth.steps >= WARM_STEPS);
        let full = heat.ranges.len() > self.most;
        if full && let Some((_, oldest)) = heat.order.pop_first() {
            heat.ranges.remove(&oldest);
        }
        (warm, full)
    }

    /// Returns the least recently used range of a tier, after `after`.
    pub(super) fn oldest_after(&self, tier: Tier, after: u64) -> Option<(u64, RangeId)> {
        let mut later = self.tiers[tier as usize].order.range(after + 1..);
        later.next().map(|(stamp, id)| (*stamp, *id))
    }

    /// Forgets a range that has no blocks left on a tier.
    pub(super) fn forget(&mut self, tier: Tier, id: RangeId) {
        let heat = &mut self.tiers[tier as usize];
        if let Some(warmth) = heat.ranges.remove(&id) {
            heat.order.remove(&warmth.stamp);
        }
    }

    /// Notes that blocks of a range went to another tier: the range is as old there, and needs new reads to
    /// become warm.
    pub(super) fn moved(&mut self, from: Tier, to: Tier, id: RangeId) {
        let Some(warmth) = self.tiers[from as usize].ranges.get(&id).copied() else {
            return;
        };
        let there = &mut self.tiers[to as usize];
        if there.ranges.len() >= self.most || there.ranges.contains_key(&id) {
            return;
        }
        let new = Warmth {
            stamp: warmth.stamp,
            last_step: warmth.last_step,
            ..Warmth::default()
        };
        // The stamp of a use belongs to one range on one tier; two tiers may share it.
        there.ranges.insert(id, new);
        there.order.insert(new.stamp, id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Heat, RANGE_BLOCKS, RangeId, Space, Uses};
    use crate::placement::Use;
    use varve_format::{Generation, Ino, InodeKey, Tier};

    const fn key(ino: u64) -> InodeKey {
        InodeKey {
            ino: Ino(ino),
            generation: Generation(1),
        }
    }

    const fn id(ino: u64) -> RangeId {
        RangeId::of_file(key(ino), 0)
    }

    #[test]
    fn heat_orders_by_last_use_and_forgets_the_oldest_when_full() {
        let mut heat = Heat::new(3);
        for ino in [1, 2, 3, 1] {
            assert_eq!(heat.touch(Tier::Nvm, id(ino), 8, 0, 1), (false, false));
        }
        assert_eq!(heat.oldest_after(Tier::Nvm, 0).unwrap().1, id(2));
        assert!(heat.touch(Tier::Nvm, id(4), 8, 0, 1).1, "2 was forgotten");
        assert!(!heat.knows(Tier::Nvm, id(2)));
        let mut order = Vec::new();
        let mut after = 0;
        while let Some((stamp, id)) = heat.oldest_after(Tier::Nvm, after) {
            after = stamp;
            let Space::File(key) = id.space else { continue };
            order.push(key.ino.0);
        }
        assert_eq!(order, [3, 1, 4]);
        heat.forget(Tier::Nvm, id(1));
        assert!(!heat.knows(Tier::Nvm, id(1)) && heat.oldest_after(Tier::Ssd, 0).is_none());
    }

    #[test]
    fn range_is_warm_when_read_twice_or_in_many_steps_and_cools() {
        let mut heat = Heat::new(10);
        assert!(!heat.touch(Tier::Ssd, id(1), 100, 100, 1).0);
        assert!(heat.touch(Tier::Ssd, id(1), 100, 100, 2).0);
        for step in 1..4 {
            assert!(!heat.touch(Tier::Ssd, id(2), 100, 1, step).0);
        }
        assert!(heat.touch(Tier::Ssd, id(2), 100, 1, 4).0);
        assert!(!heat.touch(Tier::Ssd, id(3), 100, 100, 1).0);
        assert!(
            !heat.touch(Tier::Ssd, id(3), 100, 100, 1_000_000).0,
            "long ago does not count"
        );
        assert!(!heat.touch(Tier::Ssd, id(4), 1, 0, 1).0, "not read");
    }

    #[test]
    fn uses_are_cut_into_ranges_and_bounded() {
        let mut uses = Uses::new();
        uses.add(key(1), RANGE_BLOCKS - 1, 2, Use::Read);
        uses.add(key(1), 0, 5, Use::Mapped);
        assert_eq!(uses.ranges.values().copied().collect::<Vec<_>>(), [1, 1]);
        uses.add(key(2), 0, u64::MAX, Use::Written);
        assert!(uses.dropped && uses.ranges.len() < 2000);
        for ino in 3..10_000 {
            uses.add(key(ino), 0, 1, Use::Read);
        }
        assert_eq!(uses.ranges.len(), super::USES_MAX);
    }
}
