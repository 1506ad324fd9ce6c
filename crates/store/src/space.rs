//! Free space in DRAM: the blocks that can be given out now. The bitmaps record the blocks in use on media;
//! the two agree whenever no transaction is open, except for blocks that were freed and are not released yet.

use crate::layout::Layout;
use crate::{PendingFrees, Result, SpaceStats, StoreError, TierStats};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use varve_format::{Tier, TxId};

/// A run of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) tier: Tier,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// Blocks freed by a committed transaction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    pub(crate) tx: TxId,
    pub(crate) span: Span,
    /// Data waits for readers, metadata for the journal.
    pub(crate) data: bool,
}

/// One bit for each block; set: the block cannot be given out.
#[derive(Debug, Default)]
struct Bits {
    words: Vec<u64>,
    len: u64,
}

impl Bits {
    fn new(len: u64) -> Self {
        let mut bits = Self {
            words: vec![0; len.div_ceil(64) as usize],
            len,
        };
        if !len.is_multiple_of(64)
            && let Some(last) = bits.words.last_mut()
        {
            *last = !0 << (len % 64);
        }
        bits
    }

    fn get(&self, at: u64) -> bool {
        self.words[(at / 64) as usize] >> (at % 64) & 1 == 1
    }

    fn set(&mut self, at: u64, value: bool) {
        let word = &mut self.words[(at / 64) as usize];
        let mask = 1 << (at % 64);
        if value { *word |= mask } else { *word &= !mask }
    }

    /// Returns the first clear bit in `from..to`.
    fn next_clear(&self, from: u64, to: u64) -> Option<u64> {
        let to = to.min(self.len);
        let mut at = from;
        while at < to {
            let word = !self.words[(at / 64) as usize] & (!0 << (at % 64));
            if word != 0 {
                let found = at / 64 * 64 + u64::from(word.trailing_zeros());
                return (found < to).then_some(found);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    /// Returns the number of clear bits from `from` on, at most up to `to`.
    fn clear_run(&self, from: u64, to: u64) -> u64 {
        let to = to.min(self.len);
        let mut at = from;
        while at < to {
            let word = self.words[(at / 64) as usize] & (!0 << (at % 64));
            if word != 0 {
                return (at / 64 * 64 + u64::from(word.trailing_zeros())).min(to) - from;
            }
            at = (at / 64 + 1) * 64;
        }
        to.saturating_sub(from)
    }
}

/// A run shorter than this (and than wanted) is passed over for space that was never used.
const LONG_RUN: u64 = 64;

/// One tier.
#[derive(Debug)]
struct TierSpace {
    busy: Bits,
    total: u64,
    free: u64,
    pending: u64,
    cursor: u64,
    /// The block after the last one known to have been in use.
    high: u64,
    unit_blocks: u64,
    unit_data: u64,
    /// Busy data blocks of each unit.
    live: Vec<u32>,
    open: Option<u64>,
    empty: BTreeSet<u64>,
}

/// Allocator state to restore when a transaction is given up.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Saved {
    cursor: [u64; 3],
    open: [Option<u64>; 3],
}

/// The unit of a tier to be opened next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextUnit {
    /// An empty unit.
    Empty(u64),
    /// A sealed unit with holes.
    Holes(u64),
}

/// Free space of all tiers.
#[derive(Debug)]
pub(crate) struct Space {
    tiers: [Option<TierSpace>; 3],
    first_free: u64,
    reserved: u64,
    /// Metadata and data, each in the order of transactions.
    pending: [VecDeque<Pending>; 2],
    tail: TxId,
    /// Whether metadata may lie on slower tiers.
    demotes: bool,
    /// Freed metadata blocks of NVM that wait.
    waiting_nvm: u64,
    horizon: TxId,
    readers: BTreeMap<TxId, u32>,
    /// Units that became empty and may be trimmed.
    trims: Vec<Span>,
    /// Tiers that are evacuated: they take new blocks only when no other tier has room.
    avoided: [bool; 3],
}

impl Space {
    /// Returns the space of a pool in which only fixed areas and footers are in use.
    pub(crate) fn new(layout: &Layout) -> Self {
        let tier_space = |tier: Tier| {
            let blocks = layout.blocks(tier);
            if blocks == 0 {
                return None;
            }
            let mut busy = Bits::new(blocks);
            let unit_blocks = layout.unit_blocks(tier);
            let mut space = if tier == Tier::Nvm {
                (0..layout.first_free()).for_each(|block| busy.set(block, true));
                TierSpace {
                    busy,
                    total: blocks - layout.first_free(),
                    free: 0,
                    pending: 0,
                    cursor: layout.first_free(),
                    high: layout.first_free(),
                    unit_blocks: 0,
                    unit_data: 0,
                    live: Vec::new(),
                    open: None,
                    empty: BTreeSet::new(),
                }
            } else {
                let data = layout.unit_data_blocks(tier);
                let units = blocks / unit_blocks;
                for unit in 0..units {
                    (unit * unit_blocks + data..(unit + 1) * unit_blocks)
                        .for_each(|block| busy.set(block, true));
                }
                TierSpace {
                    busy,
                    total: units * data,
                    free: 0,
                    pending: 0,
                    cursor: 0,
                    high: 0,
                    unit_blocks,
                    unit_data: data,
                    live: vec![0; units as usize],
                    open: None,
                    empty: (0..units).collect(),
                }
            };
            space.free = space.total;
            Some(space)
        };
        Self {
            tiers: Tier::ALL.map(tier_space),
            first_free: layout.first_free(),
            reserved: 0,
            pending: [VecDeque::new(), VecDeque::new()],
            tail: TxId(0),
            demotes: layout.demotes(),
            waiting_nvm: 0,
            horizon: TxId(u64::MAX),
            readers: BTreeMap::new(),
            trims: Vec::new(),
            avoided: [false; 3],
        }
    }

    /// Whether a tier is evacuated.
    pub(crate) const fn is_avoided(&self, tier: Tier) -> bool {
        self.avoided[tier as usize]
    }

    pub(crate) const fn avoid(&mut self, tiers: [bool; 3]) {
        self.avoided = tiers;
    }

    fn tier(&mut self, tier: Tier) -> Option<&mut TierSpace> {
        self.tiers[tier as usize].as_mut()
    }

    /// Marks blocks as in use (when the bitmaps are read).
    pub(crate) fn mark(&mut self, tier: Tier, block: u64) {
        if let Some(space) = self.tier(tier)
            && !space.busy.get(block)
        {
            space.take(Span {
                tier,
                start: block,
                len: 1,
            });
        }
    }

    /// Sets the open unit, also when the pool is opened: allocation continues at its first free block.
    pub(crate) fn set_open(&mut self, tier: Tier, unit: Option<u64>) {
        if let Some(space) = self.tier(tier) {
            space.open = unit;
            if let Some(unit) = unit {
                space.cursor = unit * space.unit_blocks;
                space.empty.remove(&unit);
            }
        }
    }

    /// Returns the NVM blocks that only metadata may take. Metadata is changed only in NVM, so a pool whose
    /// slower tiers can hold many more files than its NVM keeps more for their inodes and names: a block for
    /// each 192 slower ones, within 1/16 and 3/8 of the NVM.
    fn metadata_share(&self) -> u64 {
        let slower: u64 = self.tiers[1..].iter().flatten().map(|space| space.total).sum();
        self.tiers[0]
            .as_ref()
            .map_or(0, |nvm| (slower / 192).clamp(nvm.total / 16, nvm.total * 3 / 8))
    }

    /// Returns the blocks that only calls with the reserve may take.
    fn reserve_share(&self, tier: Tier) -> u64 {
        match &self.tiers[tier as usize] {
            Some(space) if tier == Tier::Nvm => space.total / 64,
            Some(space) => space.unit_data,
            None => 0,
        }
    }

    /// Allocates up to `want` NVM blocks in one run. Data does not take blocks of the metadata share, and
    /// only calls with `reserve` take blocks of the reserve.
    pub(crate) fn alloc_nvm(
        &mut self,
        want: u64,
        data: bool,
        reserve: bool,
        near: Option<u64>,
    ) -> Option<Span> {
        let mut keep = if data { self.metadata_share() } else { 0 };
        if !reserve {
            keep += self.reserve_share(Tier::Nvm);
        }
        let first = self.first_free;
        let nvm = self.tier(Tier::Nvm)?;
        let want = want.min(nvm.free.saturating_sub(keep));
        if want == 0 {
            return None;
        }
        let end = nvm.busy.len;
        if near.is_none() && nvm.cursor >= nvm.high && nvm.is_sparse(first) {
            nvm.cursor = first;
        }
        let from = near.unwrap_or(nvm.cursor).max(first);
        let mut start = nvm
            .longest_near(from, end, want)
            .or_else(|| nvm.longest_near(first, end, want))?;
        let mut len = nvm.busy.clear_run(start, (start + want).min(end));
        let next = start + len;
        let jump = near.is_none() && len < want.min(LONG_RUN) && start < nvm.high && nvm.high + want <= end;
        if jump {
            (start, len) = (nvm.high, want);
        }
        let span = Span {
            tier: Tier::Nvm,
            start,
            len,
        };
        nvm.take(span);
        if near.is_none() {
            nvm.cursor = next;
        }
        Some(span)
    }

    /// Allocates up to `want` blocks in the open unit of a tier; `None` if it is full, or none is open.
    pub(crate) fn alloc_unit(&mut self, tier: Tier, want: u64) -> Option<Span> {
        let space = self.tier(tier)?;
        let unit = space.open?;
        let end = unit * space.unit_blocks + space.unit_data;
        let start = space.busy.next_clear(space.cursor, end)?;
        let len = space.busy.clear_run(start, end.min(start + want));
        let span = Span { tier, start, len };
        space.take(span);
        space.cursor = start + len;
        Some(span)
    }

    /// Returns the unit to open next: an empty one while more than the reserved one is left, else the one
    /// with most holes.
    pub(crate) fn next_unit(&mut self, tier: Tier, reserve: bool) -> Option<NextUnit> {
        let space = self.tier(tier)?;
        if space.empty.len() > usize::from(!reserve) {
            // After the open one, so that units are used in turn.
            let after = space.cursor / space.unit_blocks;
            let unit = space
                .empty
                .range(after..)
                .next()
                .or_else(|| space.empty.first())
                .copied();
            return unit.map(NextUnit::Empty);
        }
        let open = space.open;
        let (unit, live) = (0..)
            .zip(&space.live)
            .filter(|(unit, _)| Some(*unit) != open && !space.empty.contains(unit))
            .min_by_key(|(_, live)| **live)?;
        (u64::from(*live) < space.unit_data).then_some(NextUnit::Holes(unit))
    }

    /// Makes `unit` the open one.
    pub(crate) fn open_unit(&mut self, tier: Tier, unit: u64) {
        self.set_open(tier, Some(unit));
    }

    pub(crate) fn save(&self) -> Saved {
        let mut saved = Saved::default();
        for (index, tier) in self.tiers.iter().enumerate() {
            if let Some(tier) = tier {
                saved.cursor[index] = tier.cursor;
                saved.open[index] = tier.open;
            }
        }
        saved
    }

    /// Undoes the changes of a transaction; `spans` are its allocations.
    pub(crate) fn restore(&mut self, saved: Saved, spans: &[Span]) {
        for span in spans {
            self.give_back(*span);
        }
        for (index, tier) in self.tiers.iter_mut().enumerate() {
            if let Some(tier) = tier {
                tier.cursor = saved.cursor[index];
                tier.open = saved.open[index];
                let open = tier.open;
                for unit in 0..tier.live.len() as u64 {
                    if tier.live[unit as usize] == 0 && Some(unit) != open {
                        tier.empty.insert(unit);
                    }
                }
            }
        }
    }

    /// Makes blocks available again.
    pub(crate) fn give_back(&mut self, span: Span) {
        if let Some(space) = self.tier(span.tier) {
            space.give(span);
        }
    }

    /// Records blocks freed by a committed transaction.
    pub(crate) fn freed(&mut self, pending: Pending) {
        if let Some(space) = self.tier(pending.span.tier) {
            space.pending += pending.span.len;
        }
        if !pending.data && pending.span.tier == Tier::Nvm {
            self.waiting_nvm += pending.span.len;
        }
        self.pending[usize::from(pending.data)].push_back(pending);
    }

    /// Sets the tail: everything up to `tail` is in place and durable.
    pub(crate) fn set_tail(&mut self, tail: TxId) {
        self.tail = tail;
        self.release();
    }

    pub(crate) fn set_horizon(&mut self, horizon: TxId) {
        self.horizon = horizon;
        self.release();
    }

    /// Releases freed blocks that neither the journal nor a reader needs.
    pub(crate) fn release(&mut self) {
        // A reader that began at transaction n can see blocks freed by n + 1 and later ones.
        let oldest = self.readers.keys().next().copied().unwrap_or(TxId(u64::MAX));
        let horizon = self.horizon.min(oldest);
        let all = crate::seeded::armed(crate::seeded::Bug::ReuseBeforeRelease);
        for (index, limit) in [self.tail, horizon].into_iter().enumerate() {
            while let Some(pending) = self.pending[index].pop_front_if(|pending| all || pending.tx <= limit) {
                if !pending.data && pending.span.tier == Tier::Nvm {
                    self.waiting_nvm -= pending.span.len;
                }
                self.give_pending(pending.span);
            }
        }
    }

    fn give_pending(&mut self, span: Span) {
        if let Some(space) = self.tier(span.tier) {
            space.pending -= span.len;
            space.give(span);
            if let Some(trim) = space.emptied(span) {
                self.trims.push(trim);
            }
        }
    }

    /// Returns whether freed metadata waits for the journal's tail.
    pub(crate) fn waits_for_tail(&self) -> bool {
        !self.pending[0].is_empty()
    }

    /// Returns the units that became empty since the last call.
    pub(crate) fn take_trims(&mut self) -> Vec<Span> {
        std::mem::take(&mut self.trims)
    }

    /// Returns whether a unit is still empty (it may have been opened meanwhile).
    pub(crate) fn is_empty_unit(&self, tier: Tier, start: u64) -> bool {
        self.tiers[tier as usize]
            .as_ref()
            .is_some_and(|space| space.empty.contains(&(start / space.unit_blocks.max(1))))
    }

    /// Registers a reader of the state of `tx`.
    pub(crate) fn enter(&mut self, tx: TxId) {
        *self.readers.entry(tx).or_insert(0) += 1;
    }

    /// Removes a reader.
    pub(crate) fn leave(&mut self, tx: TxId) {
        if let Some(count) = self.readers.get_mut(&tx) {
            *count -= 1;
            if *count == 0 {
                self.readers.remove(&tx);
                self.release();
            }
        }
    }

    /// Returns the number of blocks that can be reserved.
    fn available(&self) -> u64 {
        let keep = self.metadata_share()
            + Tier::ALL
                .iter()
                .map(|tier| self.reserve_share(*tier))
                .sum::<u64>();
        let free: u64 = self.tiers.iter().flatten().map(|tier| tier.free).sum();
        free.saturating_sub(keep).saturating_sub(self.reserved)
    }

    pub(crate) fn reserve(&mut self, blocks: u64) -> Result<()> {
        if blocks > self.available() {
            return Err(StoreError::NoSpace { blocks });
        }
        self.reserved += blocks;
        Ok(())
    }

    pub(crate) fn unreserve(&mut self, blocks: u64) {
        self.reserved = self.reserved.saturating_sub(blocks);
    }

    pub(crate) fn pending_data(&self) -> PendingFrees {
        let mut out = PendingFrees::default();
        for pending in &self.pending[1] {
            out.blocks += pending.span.len;
            out.newest_tx = out.newest_tx.max(pending.tx);
        }
        out
    }

    pub(crate) fn stats(&self, inodes_used: u64) -> SpaceStats {
        let mut stats = SpaceStats {
            reserved: self.reserved,
            available: self.available(),
            inodes_used,
            ..SpaceStats::default()
        };
        let kept = [
            self.metadata_share() + self.reserve_share(Tier::Nvm),
            self.reserve_share(Tier::Ssd),
            self.reserve_share(Tier::Hdd),
        ];
        let marks = kept.into_iter().zip(self.avoided);
        for ((out, tier), (kept, avoided)) in stats.tiers.iter_mut().zip(&self.tiers).zip(marks) {
            if let Some(tier) = tier {
                *out = TierStats {
                    total: tier.total,
                    free: tier.free,
                    pending: tier.pending,
                    unit_blocks: tier.unit_blocks,
                    empty_units: tier.empty.len() as u64,
                    kept,
                    avoided,
                };
            }
        }
        let slower = stats.tiers[1..]
            .iter()
            .map(|tier| tier.free.saturating_sub(tier.kept));
        let slower: u64 = if self.demotes { slower.sum() } else { 0 };
        stats.inodes_free = (stats.tiers[0].free + slower) * varve_format::inode::INODES_PER_BLOCK;
        stats
    }

    /// Returns the NVM blocks that metadata may take, now or when the journal's tail has moved, and their
    /// total.
    pub(crate) fn nvm(&self) -> (u64, u64) {
        self.tiers[0]
            .as_ref()
            .map_or((0, 0), |nvm| (nvm.free + self.waiting_nvm, nvm.total))
    }

    /// Returns the blocks of slower tiers that are free, or will be when the journal's tail has moved and
    /// readers are done.
    pub(crate) fn slower_room(&self) -> u64 {
        let slower = self.tiers[1..].iter().flatten();
        slower.map(|tier| tier.free + tier.pending).sum()
    }

    /// Returns the NVM blocks that can be given out now, the reserve included.
    pub(crate) fn nvm_now(&self) -> u64 {
        self.tiers[0].as_ref().map_or(0, |nvm| nvm.free)
    }

    /// Returns whether at most one empty unit of a tier is left: without the reserve, the next unit is a
    /// sealed one.
    pub(crate) fn is_short_of_units(&self, tier: Tier) -> bool {
        self.tiers[tier as usize]
            .as_ref()
            .is_some_and(|space| space.empty.len() <= 1)
    }

    /// Returns whether a block can be given out.
    pub(crate) fn is_free(&self, tier: Tier, block: u64) -> bool {
        self.tiers[tier as usize]
            .as_ref()
            .is_some_and(|space| !space.busy.get(block))
    }

    /// Returns whether a block was freed and is not released yet.
    pub(crate) fn is_pending(&self, tier: Tier, block: u64) -> bool {
        self.pending.iter().flatten().any(|pending| {
            pending.span.tier == tier
                && pending.span.start <= block
                && block < pending.span.start + pending.span.len
        })
    }
}

impl TierSpace {
    /// Returns whether more than two thirds of the blocks from `first` on that were ever in use are free. If
    /// so, they are reused before untouched blocks: repeated overwriting does not take all memory behind a
    /// pool, and free blocks still lie in long runs.
    fn is_sparse(&self, first: u64) -> bool {
        let used = self.high.saturating_sub(first);
        let untouched = self.busy.len.saturating_sub(self.high);
        self.free.saturating_sub(untouched) * 3 > used * 2
    }

    fn take(&mut self, span: Span) {
        self.high = self.high.max(span.start + span.len);
        for block in span.start..span.start + span.len {
            debug_assert!(!self.busy.get(block), "block {block} is given out twice");
            self.busy.set(block, true);
        }
        self.free -= span.len;
        if let Some(unit) = span.start.checked_div(self.unit_blocks) {
            self.live[unit as usize] += span.len as u32;
            self.empty.remove(&unit);
        }
    }

    fn give(&mut self, span: Span) {
        for block in span.start..span.start + span.len {
            debug_assert!(self.busy.get(block), "block {block} is given back twice");
            self.busy.set(block, false);
            if let Some(unit) = block.checked_div(self.unit_blocks) {
                self.live[unit as usize] -= 1;
            }
        }
        self.free += span.len;
    }

    /// Returns the unit of `span` if it became empty; it can be opened again from its start.
    fn emptied(&mut self, span: Span) -> Option<Span> {
        if self.unit_blocks == 0 {
            return None;
        }
        let unit = span.start / self.unit_blocks;
        if self.live[unit as usize] > 0 || self.open == Some(unit) || !self.empty.insert(unit) {
            return None;
        }
        Some(Span {
            start: unit * self.unit_blocks,
            len: self.unit_blocks,
            ..span
        })
    }

    /// Returns the start of a run of `want` clear bits in `from..to`, or of the longest of the first 64 runs.
    fn longest_near(&self, from: u64, to: u64, want: u64) -> Option<u64> {
        let mut best: Option<(u64, u64)> = None;
        let mut at = from;
        for _ in 0..64 {
            let Some(start) = self.busy.next_clear(at, to) else {
                break;
            };
            let len = self.busy.clear_run(start, (start + want).min(to));
            if len >= want {
                return Some(start);
            }
            if best.is_none_or(|(_, best)| len > best) {
                best = Some((start, len));
            }
            at = start + len;
        }
        best.map(|(start, _)| start)
    }
}

#[cfg(test)]
mod tests {
    use super::Bits;

    #[test]
    fn bits_find_runs_across_words() {
        let mut bits = Bits::new(200);
        for at in 0..70 {
            bits.set(at, true);
        }
        bits.set(150, true);
        assert_eq!(bits.next_clear(0, 200), Some(70));
        assert_eq!(bits.next_clear(0, 70), None);
        assert_eq!(bits.clear_run(70, 200), 80);
        assert_eq!(bits.clear_run(70, 100), 30);
        assert_eq!(bits.next_clear(150, 200), Some(151));
        assert_eq!(bits.clear_run(151, 500), 49);
        assert_eq!(bits.clear_run(150, 200), 0);
    }
}
