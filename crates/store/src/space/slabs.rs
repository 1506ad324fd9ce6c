//! Places for slabs: in NVM a run of free blocks, on SSD and HDD an empty unit. Files come first: what is promised
//! to them, kept for metadata or in reserve is not given.

use super::{Service, Space, Span};
use varve_format::Tier;

impl Space {
    /// Allocates a run of exactly `blocks` blocks of NVM.
    pub(crate) fn alloc_slab(&mut self, blocks: u64) -> Option<Span> {
        let keep = self.metadata_share() + self.reserve_share(Tier::Nvm);
        let (first, available) = (self.first_free, self.available());
        let nvm = self.tier(Tier::Nvm)?;
        if blocks == 0 || blocks > available || nvm.free < keep + blocks {
            return None;
        }
        let (mut at, end) = (first, nvm.busy.len);
        let start = loop {
            let start = nvm.busy.next_clear(at, end)?;
            let len = nvm.busy.clear_run(start, (start + blocks).min(end));
            if len >= blocks {
                break start;
            }
            at = start + len;
        };
        let span = Span {
            tier: Tier::Nvm,
            start,
            len: blocks,
        };
        nvm.take(span);
        Some(span)
    }

    /// Allocates the data blocks of an empty unit of a tier.
    pub(crate) fn alloc_slab_unit(&mut self, tier: Tier) -> Option<Span> {
        let (avoided, available) = (self.is_avoided(tier), self.available());
        let space = self.tier(tier)?;
        // The last empty unit is the reserve's.
        if avoided || space.unit_data > available || space.empty_units() <= 1 {
            return None;
        }
        let mut open = space.lanes.iter().filter(|lane| lane.service == Service::Open);
        let unit = open.find_map(|lane| space.empty.range(lane.first..lane.end).next_back().copied())?;
        let span = Span {
            tier,
            start: unit * space.unit_blocks,
            len: space.unit_data,
        };
        space.take(span);
        Some(span)
    }

    /// Makes the blocks of freed slabs available again.
    pub(crate) fn give_slabs(&mut self, span: Span) {
        if let Some(space) = self.tier(span.tier) {
            space.give(span);
            if let Some(trim) = space.emptied(span) {
                self.trims.push(trim);
            }
        }
    }

    /// Whether a unit of slabs may have more of them: neither its tier nor its device is to be emptied.
    pub(crate) fn takes_slabs(&self, tier: Tier, unit: u64) -> bool {
        !self.is_avoided(tier) && self.is_in_service(tier, unit)
    }

    /// Whether the device of a unit takes new blocks.
    pub(crate) fn is_in_service(&self, tier: Tier, unit: u64) -> bool {
        let lanes = self.tiers[tier as usize].iter().flat_map(|space| &space.lanes);
        let mut own = lanes.filter(|lane| (lane.first..lane.end).contains(&unit));
        own.any(|lane| lane.service == Service::Open)
    }
}
