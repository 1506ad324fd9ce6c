//! Places for blocks of a slower tier that are to lie together: where they would go, before anything is
//! allocated. Decides nothing about what is worth moving.

use super::{Lane, NextUnit, Space, Span, TierSpace};
use varve_format::Tier;

/// Where blocks that are to lie together go on a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Together {
    /// To the open unit of a device, from this block on.
    Here(usize, u64),
    /// To an empty unit of a device, which is opened in place of the open one.
    InNext(usize, u64),
    /// No such place is known.
    Nowhere,
}

impl Space {
    /// Returns in how many runs `blocks` blocks of a slower tier would lie if they were allocated now;
    /// one run if they have a place [together](Self::together). `None`: there is not so much room in the
    /// units that are open or would be opened next. With `reopen` a sealed unit with holes may be opened. A
    /// tier that is evacuated has no room.
    pub(crate) fn runs_ahead(&self, tier: Tier, blocks: u64, long: u64, reopen: bool) -> Option<u64> {
        let space = self.tiers[tier as usize].as_ref()?;
        if self.is_avoided(tier) {
            return None;
        }
        if self.together(tier, blocks, long) != Together::Nowhere {
            return Some(1);
        }
        let lanes = self.lanes(tier, false);
        let each = blocks.div_ceil((lanes.len() as u64).max(1));
        let runs = lanes
            .iter()
            .map(|lane| self.runs_on_lane(space, tier, *lane, each, reopen));
        runs.sum::<Option<u64>>().filter(|runs| *runs > 0)
    }

    /// Returns a place for `blocks` blocks in one run, on a tier with one device: in the open unit, also
    /// before the place where its allocation continues, or in an empty one if the open one has no run of
    /// `long` blocks, nor of as many as are wanted.
    pub(crate) fn together(&self, tier: Tier, blocks: u64, long: u64) -> Together {
        let lanes = self.lanes(tier, false);
        let (Some(space), [lane]) = (&self.tiers[tier as usize], &lanes[..]) else {
            return Together::Nowhere;
        };
        let mut longest = 0;
        if let Some(unit) = space.lanes[*lane].open {
            let mut at = unit * space.unit_blocks;
            let end = at + space.unit_data;
            while let Some(start) = space.busy.next_clear(at, end) {
                let len = space.busy.clear_run(start, end);
                if len >= blocks {
                    return Together::Here(*lane, start);
                }
                (at, longest) = (start + len, len.max(longest));
            }
        }
        match self.next_unit(tier, *lane, false) {
            Some(NextUnit::Empty(unit)) if longest < blocks.min(long) && blocks <= space.unit_data => {
                Together::InNext(*lane, unit)
            }
            _ => Together::Nowhere,
        }
    }

    /// Allocates a run that [`together`](Self::together) has found.
    pub(crate) fn alloc_together(&mut self, tier: Tier, lane: usize, start: u64, len: u64) -> Span {
        let span = Span { tier, start, len };
        if let Some(space) = self.tier(tier) {
            space.take(span);
            space.took(lane, len);
        }
        span
    }

    fn runs_on_lane(
        &self,
        space: &TierSpace,
        tier: Tier,
        lane: usize,
        blocks: u64,
        reopen: bool,
    ) -> Option<u64> {
        let Lane {
            first,
            end,
            open,
            cursor,
            ..
        } = *space.lanes.get(lane)?;
        let (mut runs, mut left) = (0, blocks);
        let mut count = |mut at: u64, unit: u64, left: &mut u64| {
            let end = unit * space.unit_blocks + space.unit_data;
            while let Some(start) = space.busy.next_clear(at, end).filter(|_| *left > 0) {
                let len = space.busy.clear_run(start, end.min(start + *left));
                (at, *left, runs) = (start + len, *left - len, runs + 1);
            }
        };
        if let Some(unit) = open {
            count(cursor, unit, &mut left);
        }
        if left > 0 {
            match self.next_unit(tier, lane, false)? {
                NextUnit::Empty(_) => {
                    let units = left.div_ceil(space.unit_data.max(1));
                    let empty = (space.empty.range(first..end).count() as u64)
                        .min(space.empty_units().saturating_sub(1));
                    left = if units > empty { left } else { 0 };
                    runs += units;
                }
                NextUnit::Holes(unit) if reopen => count(unit * space.unit_blocks, unit, &mut left),
                NextUnit::Holes(_) => {}
            }
        }
        (left == 0).then_some(runs)
    }
}
