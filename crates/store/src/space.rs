//! Free space in DRAM: the blocks that can be given out now. The bitmaps record the blocks in use on media;
//! the two agree whenever no transaction is open, except for blocks that were freed and are not released yet.

mod together;

pub(crate) use together::Together;

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

    /// Adds clear bits at the end, up to `len`.
    fn grow(&mut self, len: u64) {
        for at in self.len..(self.words.len() as u64 * 64).min(len) {
            self.set(at, false);
        }
        let mut grown = Self::new(len);
        let last = grown.words.last().copied();
        grown.words[..self.words.len()].copy_from_slice(&self.words);
        if let (true, Some(last)) = (!len.is_multiple_of(64), last)
            && let Some(word) = grown.words.last_mut()
        {
            *word |= last;
        }
        *self = grown;
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

/// Whether a device takes new blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Service {
    /// It does.
    Open,
    /// Only when nothing else has room: it is being emptied.
    LastResort,
    /// Never: it failed, or is gone.
    Closed,
}

/// One device of a slower tier.
#[derive(Debug, Clone, Copy)]
struct Lane {
    /// Its units, from `first` to before `end`.
    first: u64,
    end: u64,
    /// The open unit; allocation continues at `cursor`.
    open: Option<u64>,
    cursor: u64,
    free: u64,
    service: Service,
    /// It is to be emptied, also if it has failed.
    emptying: bool,
    /// Blocks that it may still give before others have their turn.
    left: u64,
    /// Virtual time of its next turn: the lowest is next. A turn costs the more, the less is free.
    pass: u64,
}

impl Lane {
    const fn new(first: u64, end: u64, unit_blocks: u64, free: u64) -> Self {
        Self {
            first,
            end,
            open: None,
            cursor: first * unit_blocks,
            free,
            service: Service::Open,
            emptying: false,
            left: 0,
            pass: 0,
        }
    }
}

/// Virtual time of a turn on a device with one free block.
const TURN: u64 = 1 << 40;
/// Turns on a device until its unit is full, if all went there.
const TURNS_A_UNIT: u64 = 64;

/// One tier.
#[derive(Debug)]
struct TierSpace {
    busy: Bits,
    total: u64,
    free: u64,
    pending: u64,
    /// NVM: where allocation continues.
    cursor: u64,
    /// The block after the last one known to have been in use.
    high: u64,
    unit_blocks: u64,
    unit_data: u64,
    /// Busy data blocks of each unit.
    live: Vec<u32>,
    /// The devices of a slower tier.
    lanes: Vec<Lane>,
    empty: BTreeSet<u64>,
}

/// Allocator state to restore when a transaction is given up.
#[derive(Debug, Clone, Default)]
pub(crate) struct Saved {
    cursor: u64,
    lanes: [Vec<Lane>; 2],
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
            let mut space = if tier == Tier::Nvm {
                let mut busy = Bits::new(blocks);
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
                    lanes: Vec::new(),
                    empty: BTreeSet::new(),
                }
            } else {
                let mut space = TierSpace {
                    busy: Bits::default(),
                    total: 0,
                    free: 0,
                    pending: 0,
                    cursor: 0,
                    high: 0,
                    unit_blocks: layout.unit_blocks(tier),
                    unit_data: layout.unit_data_blocks(tier),
                    live: Vec::new(),
                    lanes: Vec::new(),
                    empty: BTreeSet::new(),
                };
                for run in layout.runs(tier) {
                    space.add_lane(run.blocks, run.is_gone());
                }
                space
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

    /// Adds a device of `blocks` blocks at the end of a tier.
    pub(crate) fn add_lane(&mut self, tier: Tier, blocks: u64) {
        if let Some(space) = self.tier(tier) {
            space.add_lane(blocks, false);
        }
    }

    /// Sets whether a device takes new blocks.
    pub(crate) fn set_service(&mut self, tier: Tier, lane: usize, service: Service) {
        if let Some(space) = self.tier(tier)
            && let Some(lane) = space.lanes.get_mut(lane)
        {
            lane.service = service;
        }
    }

    /// Sets whether a device is to be emptied. One that has failed takes nothing in any case.
    pub(crate) fn set_emptying(&mut self, tier: Tier, lane: usize, emptying: bool) {
        if let Some(space) = self.tier(tier)
            && let Some(lane) = space.lanes.get_mut(lane)
        {
            lane.emptying = emptying;
            lane.service = match lane.service {
                Service::Closed => Service::Closed,
                _ if emptying => Service::LastResort,
                _ => Service::Open,
            };
        }
    }

    /// Returns whether a device is to be emptied.
    pub(crate) fn has_emptying(&self) -> bool {
        let lanes = self.tiers.iter().flatten().flat_map(|space| &space.lanes);
        lanes.into_iter().any(|lane| lane.emptying)
    }

    /// Returns whether a device takes new blocks.
    pub(crate) fn service(&self, tier: Tier, lane: usize) -> Service {
        let lanes = self.tiers[tier as usize].as_ref().map(|space| &space.lanes);
        let lane = lanes.and_then(|lanes| lanes.get(lane));
        lane.map_or(Service::Closed, |lane| lane.service)
    }

    /// Returns the blocks of a device: those that can hold data, those that are free, and those that were
    /// freed and are not released yet.
    pub(crate) fn lane_blocks(&self, tier: Tier, lane: usize) -> (u64, u64, u64) {
        let Some(space) = &self.tiers[tier as usize] else {
            return (0, 0, 0);
        };
        let Some(lane) = space.lanes.get(lane) else {
            return (0, 0, 0);
        };
        let own = lane.first * space.unit_blocks..lane.end * space.unit_blocks;
        let pending = self.pending.iter().flatten();
        let pending = pending.filter(|freed| freed.span.tier == tier && own.contains(&freed.span.start));
        let pending = pending.map(|freed| freed.span.len).sum();
        ((lane.end - lane.first) * space.unit_data, lane.free, pending)
    }

    /// Returns whether a device takes blocks only when nothing else has room.
    pub(crate) fn has_last_resort(&self) -> bool {
        let lanes = self.tiers.iter().flatten().flat_map(|space| &space.lanes);
        lanes.into_iter().any(|lane| lane.service == Service::LastResort)
    }

    /// Sets the open unit of a device, also when the pool is opened: allocation continues at its first free
    /// block.
    pub(crate) fn set_open(&mut self, tier: Tier, lane: usize, unit: Option<u64>) {
        if let Some(space) = self.tier(tier)
            && let Some(lane) = space.lanes.get_mut(lane)
        {
            lane.open = unit;
            if let Some(unit) = unit {
                lane.cursor = unit * space.unit_blocks;
                space.empty.remove(&unit);
            }
        }
    }

    /// Returns the devices of a tier in the order in which they are asked for a block. Only those that are
    /// emptied with `last_resort`, only the others without.
    pub(crate) fn lanes(&self, tier: Tier, last_resort: bool) -> Vec<usize> {
        let Some(space) = &self.tiers[tier as usize] else {
            return Vec::new();
        };
        let wanted = match last_resort {
            true => Service::LastResort,
            false => Service::Open,
        };
        let mut order: Vec<usize> = (0..space.lanes.len())
            .filter(|lane| space.lanes[*lane].service == wanted)
            .collect();
        // Who has begun its turn ends it.
        order.sort_by_key(|lane| (space.lanes[*lane].left == 0, space.lanes[*lane].pass));
        order
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

    /// Allocates up to `want` blocks in the open unit of a device; `None` if it is full, or none is open.
    /// Where others share the load, at most up to the end of its turn.
    pub(crate) fn alloc_unit(&mut self, tier: Tier, lane: usize, want: u64) -> Option<Span> {
        let space = self.tier(tier)?;
        let want = want.min(space.turn(lane));
        let Lane { open, cursor, .. } = *space.lanes.get(lane)?;
        let unit = open?;
        let end = unit * space.unit_blocks + space.unit_data;
        let start = space.busy.next_clear(cursor, end)?;
        let len = space.busy.clear_run(start, end.min(start + want));
        let span = Span { tier, start, len };
        space.take(span);
        space.lanes[lane].cursor = start + len;
        space.took(lane, len);
        Some(span)
    }

    /// Returns the unit of a device to open next: an empty one while the tier has more than the reserved one,
    /// else the device's with most holes.
    pub(crate) fn next_unit(&self, tier: Tier, lane: usize, reserve: bool) -> Option<NextUnit> {
        let space = self.tiers[tier as usize].as_ref()?;
        let Lane {
            first, end, cursor, ..
        } = *space.lanes.get(lane)?;
        if space.lanes[lane].service != Service::Open || space.empty_units() > u64::from(!reserve) {
            // After the open one, so that units are used in turn.
            let after = cursor / space.unit_blocks;
            let mut units = space.empty.range(after..end).chain(space.empty.range(first..end));
            if let Some(unit) = units.next() {
                return Some(NextUnit::Empty(*unit));
            }
        }
        let (unit, live) = (first..end)
            .zip(&space.live[first as usize..end as usize])
            .filter(|(unit, _)| !space.is_open(*unit) && !space.empty.contains(unit))
            .min_by_key(|(_, live)| **live)?;
        (u64::from(*live) < space.unit_data).then_some(NextUnit::Holes(unit))
    }

    pub(crate) fn save(&self) -> Saved {
        let lanes = |tier: Tier| {
            let space = self.tiers[tier as usize].as_ref();
            space.map_or_else(Vec::new, |space| space.lanes.clone())
        };
        Saved {
            cursor: self.tiers[0].as_ref().map_or(0, |nvm| nvm.cursor),
            lanes: [lanes(Tier::Ssd), lanes(Tier::Hdd)],
        }
    }

    /// Undoes the changes of a transaction; `spans` are its allocations.
    pub(crate) fn restore(&mut self, saved: Saved, spans: &[Span]) {
        for span in spans {
            self.give_back(*span);
        }
        if let Some(nvm) = self.tier(Tier::Nvm) {
            nvm.cursor = saved.cursor;
        }
        for (tier, lanes) in [Tier::Ssd, Tier::Hdd].into_iter().zip(saved.lanes) {
            let Some(tier) = self.tier(tier) else { continue };
            // Devices that were added meanwhile: what opened a unit there never was.
            for lane in tier.lanes.iter_mut().skip(lanes.len()) {
                (lane.open, lane.cursor, lane.left) = (None, lane.first * tier.unit_blocks, 0);
            }
            for (lane, saved) in tier.lanes.iter_mut().zip(lanes) {
                // What was given back counts, and a device that failed meanwhile stays out of service.
                *lane = Lane {
                    free: lane.free,
                    service: lane.service,
                    emptying: lane.emptying,
                    ..saved
                };
            }
            for unit in 0..tier.live.len() as u64 {
                if tier.live[unit as usize] == 0 && !tier.is_open(unit) {
                    tier.empty.insert(unit);
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

    /// Returns some of the units that became empty, of each only once.
    pub(crate) fn take_trims(&mut self, most: usize) -> Vec<Span> {
        let kept = self.trims.len().saturating_sub(most);
        self.trims.split_off(kept)
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

    /// Returns the free blocks that data can take, reserved or not.
    fn unkept(&self) -> u64 {
        let keep = self.metadata_share()
            + Tier::ALL
                .iter()
                .map(|tier| self.reserve_share(*tier))
                .sum::<u64>();
        let free: u64 = self.tiers.iter().flatten().map(TierSpace::offered).sum();
        free.saturating_sub(keep)
    }

    /// Returns the number of blocks that can be reserved.
    fn available(&self) -> u64 {
        self.unkept().saturating_sub(self.reserved)
    }

    /// Returns whether devices that take new blocks have all that is reserved.
    pub(crate) fn keeps_promises(&self) -> bool {
        self.unkept() >= self.reserved
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
                // Free blocks of devices that take none do not count as room.
                *out = TierStats {
                    total: tier.total - (tier.free - tier.offered()),
                    free: tier.offered(),
                    pending: tier.pending,
                    unit_blocks: tier.unit_blocks,
                    empty_units: tier.empty_units(),
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

    /// Whether any block of SSD or HDD is in use.
    pub(crate) fn uses_far_tiers(&self) -> bool {
        let mut far = self.tiers[1..].iter().flatten();
        far.any(|tier| tier.free + tier.pending < tier.total)
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
        slower.map(|tier| tier.offered() + tier.pending).sum()
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
            .is_some_and(|space| space.empty_units() <= 1)
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
            if let Some(lane) = self.lane_of(unit) {
                lane.free -= span.len;
            }
        }
    }

    fn lane_of(&mut self, unit: u64) -> Option<&mut Lane> {
        self.lanes
            .iter_mut()
            .find(|lane| (lane.first..lane.end).contains(&unit))
    }

    /// Adds a device at the end; `gone`: its numbers are there and nothing else.
    fn add_lane(&mut self, blocks: u64, gone: bool) {
        let first = self.live.len() as u64;
        let units = blocks / self.unit_blocks;
        let end = first + units;
        self.busy.grow(end * self.unit_blocks);
        self.live.resize(end as usize, 0);
        for unit in first..end {
            let data = if gone { 0 } else { self.unit_data };
            (unit * self.unit_blocks + data..(unit + 1) * self.unit_blocks)
                .for_each(|block| self.busy.set(block, true));
        }
        let free = if gone { 0 } else { units * self.unit_data };
        let mut lane = Lane::new(first, end, self.unit_blocks, free);
        // It does not catch up on what others gave before.
        let passes = self.lanes.iter().filter(|lane| lane.service == Service::Open);
        lane.pass = passes.map(|lane| lane.pass).min().unwrap_or(0);
        if gone {
            lane.service = Service::Closed;
        } else {
            self.empty.extend(first..end);
        }
        self.lanes.push(lane);
        self.total += free;
        self.free += free;
    }

    /// Free blocks of devices that take new ones.
    fn offered(&self) -> u64 {
        let kept = self.lanes.iter().filter(|lane| lane.service != Service::Open);
        self.free - kept.map(|lane| lane.free).sum::<u64>()
    }

    /// Empty units of devices that take new blocks.
    fn empty_units(&self) -> u64 {
        let kept = self.lanes.iter().filter(|lane| lane.service != Service::Open);
        let kept: usize = kept
            .map(|lane| self.empty.range(lane.first..lane.end).count())
            .sum();
        (self.empty.len() - kept) as u64
    }

    fn is_open(&self, unit: u64) -> bool {
        self.lanes.iter().any(|lane| lane.open == Some(unit))
    }

    /// Returns the blocks that a device may give now: without limit if no other shares the load.
    fn turn(&self, lane: usize) -> u64 {
        let open = |lane: &&Lane| lane.service == Service::Open;
        match (self.lanes.iter().filter(open).count() > 1, self.lanes[lane].left) {
            (false, _) => u64::MAX,
            (true, 0) => (self.unit_blocks / TURNS_A_UNIT).max(1),
            (true, left) => left,
        }
    }

    /// A device gave `len` blocks of its turn. Turns go to the devices in proportion to what is free on them
    /// (stride scheduling: Waldspurger and Weihl, 1995).
    fn took(&mut self, lane: usize, len: u64) {
        let turn = self.turn(lane);
        let lane = &mut self.lanes[lane];
        if turn == u64::MAX {
            lane.left = 0;
            return;
        }
        if lane.left == 0 {
            lane.pass += TURN / lane.free.max(1);
        }
        lane.left = turn.saturating_sub(len);
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
        let unit = span.start.checked_div(self.unit_blocks);
        if let Some(lane) = unit.and_then(|unit| self.lane_of(unit)) {
            lane.free += span.len;
        }
    }

    /// Returns the unit of `span` if it became empty; it can be opened again from its start.
    fn emptied(&mut self, span: Span) -> Option<Span> {
        if self.unit_blocks == 0 {
            return None;
        }
        let unit = span.start / self.unit_blocks;
        if self.live[unit as usize] > 0 || self.is_open(unit) || !self.empty.insert(unit) {
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
    fn bits_grow_by_clear_ones() {
        let mut bits = Bits::default();
        bits.grow(80);
        bits.set(79, true);
        assert_eq!(bits.next_clear(79, 200), None);
        bits.grow(100);
        assert_eq!(
            (bits.get(79), bits.next_clear(79, 200), bits.clear_run(80, 500)),
            (true, Some(80), 20)
        );
        bits.grow(300);
        assert_eq!((bits.clear_run(80, 500), bits.next_clear(0, 500)), (220, Some(0)));
    }

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
