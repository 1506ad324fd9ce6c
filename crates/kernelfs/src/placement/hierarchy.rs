//! The default policy: new data goes to the fastest tier with room; the least recently used ranges of a full
//! tier move down, and ranges that are read repeatedly move up while there is room. Shared blocks are ranges
//! of their own, which all their owners use. Knows nothing of how data moves.

use super::heat::{Heat, RANGE_BLOCKS, RangeId, Space, Uses};
use super::{At, Catalog, Cause, Job, Move, Placement, ReadCounts, Use};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use varve_format::{BlockNo, FileBlock, Ino, InodeKey, Tier};
use varve_store::{DataTarget, MappedPart, SharedPart, SpaceStats, TierStats};

/// Most ranges remembered of each tier.
const RANGES_MAX: usize = 1 << 16;
/// Most warm ranges that wait for room.
const WARM_MAX: usize = 256;
/// Most runs remembered whose data cannot be read.
const BAD_MAX: usize = 4096;
/// Most pieces checked for one job.
const LOOKS: usize = 4096;
/// Extents asked for at once.
const EXTENTS: usize = 128;
/// Files asked for at once.
const FILES: usize = 256;
/// Most ranges of shared blocks whose uses are noted in one step.
const SHARED_MAX: usize = 1 << 14;

/// Fill levels of tiers, in percent of their space for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// From here on data moves down, and new data goes elsewhere while another tier has room.
    pub high: u64,
    /// Data moves down until this level.
    pub low: u64,
}

impl Marks {
    /// 95 and 90 percent.
    pub const DEFAULT: Self = Self { high: 95, low: 90 };
}

/// Fill level of a tier, for data.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fill {
    usable: u64,
    left: u64,
}

impl Fill {
    /// `freed` counts freed blocks that may not be reused yet as free.
    pub(super) fn of(tier: Tier, stats: &TierStats, freed: bool) -> Self {
        let kept = match tier {
            Tier::Nvm => stats.kept,
            Tier::Ssd | Tier::Hdd => stats.unit_blocks,
        };
        let free = stats.free + if freed { stats.pending } else { 0 };
        Self {
            usable: stats.total.saturating_sub(kept),
            left: free.saturating_sub(kept),
        }
    }

    fn used(self) -> u64 {
        self.usable.saturating_sub(self.left)
    }

    pub(super) fn percent(self) -> u64 {
        (self.used() * 100).checked_div(self.usable).unwrap_or(100)
    }

    /// Returns the number of blocks until the tier is `mark` percent full.
    pub(super) fn below(self, mark: u64) -> u64 {
        (self.usable * mark / 100).saturating_sub(self.used())
    }

    /// Returns the number of blocks above `mark` percent.
    fn above(self, mark: u64) -> u64 {
        self.used().saturating_sub(self.usable * mark / 100)
    }
}

/// Position of the search for ranges without remembered uses.
#[derive(Debug, Clone, Copy)]
struct Hand {
    ino: Ino,
    block: FileBlock,
    found: bool,
    /// A whole pass found none.
    done: bool,
}

const START: Hand = Hand {
    ino: Ino(0),
    block: FileBlock(0),
    found: false,
    done: false,
};

#[derive(Debug)]
struct State {
    heat: Heat,
    hands: [Hand; 3],
    draining: [bool; 3],
    warm: BTreeSet<(Tier, RangeId)>,
    bad: BTreeSet<At>,
    step: u64,
}

/// Moves least recently used data down, and warm data up. See the module.
#[derive(Debug)]
pub struct Hierarchy {
    marks: Marks,
    /// Locked while requests are answered: never held across a wait.
    uses: Mutex<Uses>,
    state: Mutex<State>,
}

impl Default for Hierarchy {
    fn default() -> Self {
        Self::new(Marks::DEFAULT)
    }
}

impl Hierarchy {
    /// Makes a policy with these marks.
    #[must_use]
    pub const fn new(marks: Marks) -> Self {
        Self {
            marks,
            uses: Mutex::new(Uses::new()),
            state: Mutex::new(State {
                heat: Heat::new(RANGES_MAX),
                hands: [START; 3],
                draining: [false; 3],
                warm: BTreeSet::new(),
                bad: BTreeSet::new(),
                step: 0,
            }),
        }
    }
}

impl Placement for Hierarchy {
    fn target(&self, _key: InodeKey, bytes: u64, space: &SpaceStats) -> DataTarget {
        let blocks = bytes.div_ceil(varve_format::BLOCK_BYTES);
        let fits = |tier: &Tier| {
            let stats = &space.tiers[*tier as usize];
            stats.total > 0 && Fill::of(*tier, stats, false).below(self.marks.high) > blocks
        };
        let tier = Tier::ALL.into_iter().find(fits).unwrap_or(Tier::Nvm);
        DataTarget::prefer(tier).with_reserve()
    }

    fn used(&self, key: InodeKey, from: FileBlock, blocks: u64, how: Use) {
        self.uses.lock().add(key, from.0, blocks, how);
    }

    fn plan(&self, space: &SpaceStats, catalog: &dyn Catalog, most: u64) -> Vec<Job> {
        let uses = std::mem::take(&mut *self.uses.lock());
        let tiers: Vec<Tier> = Tier::ALL
            .into_iter()
            .filter(|tier| space.tiers[*tier as usize].total > 0)
            .collect();
        if tiers.len() < 2 {
            // Nothing can move, so uses need not be remembered.
            return Vec::new();
        }
        let mut state = self.state.lock();
        state.step += 1;
        state.absorb(uses, catalog);
        let mut left = most;
        let mut jobs = Vec::new();
        // The slowest pair first: it makes room for the others.
        for pair in tiers.windows(2).rev() {
            let job = state.down(pair[0], pair[1], self.marks, space, catalog, left);
            if let Some(job) = job {
                left -= job.blocks();
                jobs.push(job);
            }
        }
        jobs.extend(state.up(&tiers, self.marks, space, catalog, left));
        jobs
    }

    fn reads(&self, at: At, tier: Tier) -> ReadCounts {
        self.state.lock().heat.reads(tier, RangeId::of(at))
    }

    fn moved(&self, job: &Job, moved: &Move) {
        let id = RangeId::of(moved.at);
        let mut state = self.state.lock();
        state.heat.moved(job.from, job.to, id);
    }

    fn failed(&self, failed: &Move) {
        let mut state = self.state.lock();
        if state.bad.len() < BAD_MAX {
            state.bad.insert(failed.at);
        }
        let id = RangeId::of(failed.at);
        state.warm.retain(|(_, warm)| *warm != id);
    }
}

fn blocks(moves: &[Move]) -> u64 {
    moves.iter().map(|moved| u64::from(moved.len)).sum()
}

/// Blocks in one piece on one tier.
#[derive(Debug, Clone, Copy)]
struct Piece {
    at: At,
    len: u64,
    tier: Tier,
    block: u64,
}

impl Piece {
    fn of(key: InodeKey, part: &MappedPart) -> Self {
        Self {
            at: At::of(key, part),
            len: part.extent.len.into(),
            tier: part.extent.tier,
            block: part.extent.block.0,
        }
    }

    /// The part within its first range, at most `most` blocks.
    fn first(&self, most: u64) -> (RangeId, Move) {
        let id = RangeId::of(self.at);
        let start = match self.at {
            At::File(_, block) => block.0,
            At::Shared(number) => number,
        };
        let len = self.len.min(id.end() - start).min(most.max(1));
        let moved = Move {
            at: self.at,
            len: len as u32,
            block: BlockNo(self.block),
        };
        (id, moved)
    }

    /// Leaves out the first `blocks`.
    fn skip(&mut self, blocks: u64) {
        match &mut self.at {
            At::File(_, block) => block.0 += blocks,
            At::Shared(number) => *number += blocks,
        }
        self.block += blocks;
        self.len -= blocks;
    }
}

/// Returns the blocks within a range; of a file, those that are its own.
fn in_range(catalog: &dyn Catalog, id: RangeId) -> Vec<Piece> {
    match id.space {
        Space::File(key) => {
            let mut parts = catalog.extents(key, id.start(), RANGE_BLOCKS as usize);
            parts.retain(|part| part.number.is_none() && part.extent.file_block.0 < id.end());
            parts.iter().map(|part| Piece::of(key, part)).collect()
        }
        Space::Shared => {
            let runs = catalog.shared(id.blocks(), RANGE_BLOCKS as usize);
            let piece = |run: SharedPart| Piece {
                at: At::Shared(run.number),
                len: run.len.into(),
                tier: run.tier,
                block: run.block.0,
            };
            runs.into_iter().map(piece).collect()
        }
    }
}

impl State {
    /// Adds the uses since the last plan. What was read of a range of a file is spread over its own and its
    /// shared blocks.
    fn absorb(&mut self, uses: Uses, catalog: &dyn Catalog) {
        let mut dropped = uses.dropped;
        let mut shared: BTreeMap<RangeId, u64> = BTreeMap::new();
        for ((key, index), read) in uses.ranges {
            let id = RangeId::of_file(key, index * RANGE_BLOCKS);
            let mut parts = catalog.extents(key, id.start(), RANGE_BLOCKS as usize);
            parts.retain(|part| part.extent.file_block.0 < id.end());
            let within =
                |part: &MappedPart| u64::from(part.extent.len).min(id.end() - part.extent.file_block.0);
            let mapped: u64 = parts.iter().map(within).sum();
            let share = |blocks: u64| (read.saturating_mul(blocks)).div_ceil(mapped.max(1));
            let mut own = [0; 3];
            for part in &parts {
                let Some(number) = part.number else {
                    own[part.extent.tier as usize] += within(part);
                    continue;
                };
                let (mut at, end) = (number, number + within(part));
                while at < end {
                    let id = RangeId::of_shared(at);
                    let stop = id.end().min(end);
                    if shared.len() < SHARED_MAX || shared.contains_key(&id) {
                        *shared.entry(id).or_insert(0) += share(stop - at);
                    } else {
                        dropped = true;
                    }
                    at = stop;
                }
            }
            self.note(id, own, share(own.iter().sum()), read > 0);
        }
        for (id, read) in shared {
            let mut present = [0; 3];
            for piece in in_range(catalog, id) {
                present[piece.tier as usize] += piece.len;
            }
            self.note(id, present, read, read > 0);
        }
        if dropped {
            self.hands = [START; 3];
        }
    }

    /// Notes that a range with `present` blocks on each tier was used, `read` of them through the daemon.
    fn note(&mut self, id: RangeId, present: [u64; 3], read: u64, was_read: bool) {
        for tier in Tier::ALL {
            let present = present[tier as usize];
            if present == 0 {
                self.heat.forget(tier, id);
                continue;
            }
            let read = if was_read { read.max(1) } else { 0 };
            let (warm, forgot) = self.heat.touch(tier, id, present, read, self.step);
            if forgot {
                self.hands[tier as usize].done = false;
            }
            if warm && tier != Tier::Nvm && self.warm.len() < WARM_MAX {
                self.warm.insert((tier, id));
            }
        }
    }

    fn down(
        &mut self,
        from: Tier,
        to: Tier,
        marks: Marks,
        space: &SpaceStats,
        catalog: &dyn Catalog,
        most: u64,
    ) -> Option<Job> {
        let fill = Fill::of(from, &space.tiers[from as usize], true);
        let draining = &mut self.draining[from as usize];
        // Compared in blocks, as the tier above computes the room here: demoted data fills a tier up to the
        // block at which its percentage is still below the mark.
        if fill.below(marks.high) == 0 {
            *draining = true;
        } else if fill.above(marks.low) == 0 {
            *draining = false;
        }
        if !*draining {
            return None;
        }
        let target = Fill::of(to, &space.tiers[to as usize], false);
        let mut job = Job {
            from,
            to,
            cause: Cause::Full,
            moves: Vec::new(),
            waiting: None,
        };
        let room = target.below(marks.high);
        if room == 0 {
            job.waiting = Some(format!("waiting: {} {} % full", to.name(), target.percent()));
            return Some(job);
        }
        let want = fill.above(marks.low).min(room).min(most);
        let mut looks = LOOKS;
        self.unknown(from, want, &mut looks, catalog, &mut job.moves);
        if self.hands[from as usize].done {
            self.oldest(from, want, &mut looks, catalog, &mut job.moves);
        }
        if job.moves.is_empty() && want > 0 && looks > 0 {
            job.waiting = Some("waiting: nothing but metadata and pinned data is left".into());
        }
        Some(job)
    }

    /// Adds ranges without remembered uses: they were used longer ago than all others, or never.
    fn unknown(
        &mut self,
        tier: Tier,
        want: u64,
        looks: &mut usize,
        catalog: &dyn Catalog,
        moves: &mut Vec<Move>,
    ) {
        let hand = &mut self.hands[tier as usize];
        let mut left = want.saturating_sub(blocks(moves));
        // Shared blocks that another of their owners has led to.
        let mut found = BTreeSet::new();
        while !hand.done {
            let (keys, next) = catalog.files(hand.ino, FILES);
            for key in keys {
                if hand.ino != key.ino {
                    hand.block = FileBlock(0);
                }
                hand.ino = key.ino;
                loop {
                    let extents = catalog.extents(key, hand.block, EXTENTS);
                    if extents.is_empty() {
                        break;
                    }
                    for part in extents {
                        let mut piece = Piece::of(key, &part);
                        while piece.len > 0 {
                            if *looks == 0 || left == 0 {
                                return;
                            }
                            *looks -= 1;
                            let (id, moved) = piece.first(left);
                            let known = self.heat.knows(tier, id) || self.bad.contains(&piece.at);
                            let again = part.number.is_some() && !found.insert(piece.at);
                            if piece.tier == tier && !known && !again {
                                hand.found = true;
                                left -= u64::from(moved.len);
                                moves.push(moved);
                            }
                            piece.skip(moved.len.into());
                            hand.block = FileBlock(part.extent.end().0 - piece.len);
                        }
                    }
                }
                // A file without extents also counts as a check.
                *looks = looks.saturating_sub(1);
                *hand = Hand {
                    ino: Ino(key.ino.0 + 1),
                    block: FileBlock(0),
                    ..*hand
                };
                if *looks == 0 {
                    return;
                }
            }
            *looks = looks.saturating_sub(1);
            match next {
                Some(next) => hand.ino = Ino(next.0.max(hand.ino.0)),
                None => {
                    *hand = Hand {
                        done: !hand.found,
                        ..START
                    };
                    if !hand.done {
                        // The ranges that this pass has found must have moved before the next pass.
                        return;
                    }
                }
            }
            if *looks == 0 {
                return;
            }
        }
    }

    /// Adds remembered ranges, the least recently used first.
    fn oldest(
        &mut self,
        tier: Tier,
        want: u64,
        looks: &mut usize,
        catalog: &dyn Catalog,
        moves: &mut Vec<Move>,
    ) {
        let mut left = want.saturating_sub(blocks(moves));
        let mut after = 0;
        while left > 0 && *looks > 0 {
            let Some((stamp, id)) = self.heat.oldest_after(tier, after) else {
                return;
            };
            after = stamp;
            *looks -= 1;
            let mut found = false;
            for piece in in_range(catalog, id).iter().filter(|piece| piece.tier == tier) {
                if self.bad.contains(&piece.at) {
                    continue;
                }
                found = true;
                if left == 0 {
                    break;
                }
                let (_, moved) = piece.first(left);
                left -= u64::from(moved.len);
                moves.push(moved);
            }
            if !found {
                self.heat.forget(tier, id);
            }
        }
    }

    fn up(
        &mut self,
        tiers: &[Tier],
        marks: Marks,
        space: &SpaceStats,
        catalog: &dyn Catalog,
        mut left: u64,
    ) -> Vec<Job> {
        let mut room = [0; 3];
        for tier in tiers {
            if !self.draining[*tier as usize] {
                // One less: promoted data must not make other data move down.
                let fill = Fill::of(*tier, &space.tiers[*tier as usize], false);
                room[*tier as usize] = fill.below(marks.high).saturating_sub(1);
            }
        }
        let mut jobs: Vec<Job> = Vec::new();
        let mut waiting = None;
        for (from, id) in self.warm.iter().copied().collect::<Vec<_>>() {
            if left == 0 {
                break;
            }
            let pieces = in_range(catalog, id);
            let on_tier = pieces.iter().filter(|piece| piece.tier == from);
            let pieces: Vec<Move> = on_tier.map(|piece| piece.first(u64::MAX).1).collect();
            let need = blocks(&pieces);
            if need == 0 {
                self.warm.remove(&(from, id));
                continue;
            }
            let faster = |to: &&Tier| **to < from && room[**to as usize] >= need;
            let Some(to) = tiers.iter().find(faster).copied() else {
                waiting.get_or_insert(from);
                continue;
            };
            if need > left && !jobs.is_empty() {
                break;
            }
            left = left.saturating_sub(need);
            room[to as usize] -= need;
            let same = |job: &&mut Job| (job.from, job.to) == (from, to);
            match jobs.iter_mut().find(same) {
                Some(job) => job.moves.extend(pieces),
                None => jobs.push(Job {
                    from,
                    to,
                    cause: Cause::Warm,
                    moves: pieces,
                    waiting: None,
                }),
            }
        }
        if jobs.is_empty()
            && let Some(from) = waiting
            && let Some(to) = tiers.first().copied()
        {
            let fill = Fill::of(to, &space.tiers[to as usize], false);
            jobs.push(Job {
                from,
                to,
                cause: Cause::Warm,
                moves: Vec::new(),
                waiting: Some(format!("waiting: {} {} % full", to.name(), fill.percent())),
            });
        }
        jobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::ops::Range;
    use varve_format::{Extent, ExtentFlags, Generation};

    const fn part(at: u64, len: u32, tier: Tier, number: Option<u64>) -> MappedPart {
        MappedPart {
            extent: Extent {
                file_block: FileBlock(at),
                len,
                tier,
                block: BlockNo(5000),
                flags: ExtentFlags::empty(),
            },
            number,
            owners: 1,
        }
    }

    const fn key(ino: u64) -> InodeKey {
        InodeKey {
            ino: Ino(ino),
            generation: Generation(1),
        }
    }

    /// One file, with a run of 1,000 blocks on each tier.
    struct OneFile;

    impl Catalog for OneFile {
        fn files(&self, from: Ino, _most: usize) -> (Vec<InodeKey>, Option<Ino>) {
            let keys = if from.0 <= 20 { vec![key(20)] } else { Vec::new() };
            (keys, None)
        }

        fn extents(&self, _key: InodeKey, from: FileBlock, _most: usize) -> Vec<MappedPart> {
            let runs = Tier::ALL.map(|tier| part(tier as u64 * 1000, 1000, tier, None));
            let mut runs = runs.to_vec();
            runs.retain(|run| run.extent.file_block >= from);
            runs
        }

        fn shared(&self, _numbers: Range<u64>, _most: usize) -> Vec<SharedPart> {
            Vec::new()
        }
    }

    /// Data from NVM fills the next tier to the last block below its mark, where its percentage is still
    /// below.
    #[test]
    fn tier_without_room_below_its_mark_makes_some() {
        let tier = |free| TierStats {
            total: 10_017,
            free,
            unit_blocks: 10,
            ..TierStats::default()
        };
        let room = SpaceStats {
            tiers: [tier(10), tier(520), tier(9000)],
            ..SpaceStats::default()
        };
        let full = SpaceStats {
            tiers: [tier(10), tier(511), tier(9000)],
            ..SpaceStats::default()
        };
        for (space, out) in [(room, false), (full, true)] {
            let jobs = Hierarchy::default().plan(&space, &OneFile, 4096);
            let from_ssd = jobs.iter().find(|job| job.from == Tier::Ssd);
            assert_eq!(from_ssd.is_some_and(|job| !job.moves.is_empty()), out, "{jobs:?}");
        }
    }

    /// Files 1 to 10 with 200 blocks each, all the same shared ones, and 100 of their own.
    struct TenClones(Cell<Tier>);

    const FIRST: u64 = 1000;

    impl Catalog for TenClones {
        fn files(&self, from: Ino, _most: usize) -> (Vec<InodeKey>, Option<Ino>) {
            ((from.0.max(1)..=10).map(key).collect(), None)
        }

        fn extents(&self, _key: InodeKey, from: FileBlock, _most: usize) -> Vec<MappedPart> {
            let own = part(200, 100, Tier::Hdd, None);
            let mut parts = vec![part(0, 200, self.0.get(), Some(FIRST)), own];
            parts.retain(|part| part.extent.file_block >= from);
            parts
        }

        fn shared(&self, numbers: Range<u64>, _most: usize) -> Vec<SharedPart> {
            let (first, end) = (numbers.start.max(FIRST), numbers.end.min(FIRST + 200));
            let run = SharedPart {
                number: first,
                len: end.saturating_sub(first) as u32,
                tier: self.0.get(),
                block: BlockNo(5000 + first.saturating_sub(FIRST)),
            };
            if first < end { vec![run] } else { Vec::new() }
        }
    }

    const ROOMY: TierStats = TierStats {
        total: 10_000,
        free: 9_000,
        pending: 0,
        unit_blocks: 10,
        empty_units: 900,
        kept: 0,
    };

    fn roomy() -> SpaceStats {
        SpaceStats {
            tiers: [ROOMY; 3],
            ..SpaceStats::default()
        }
    }

    #[test]
    fn shared_blocks_are_warm_by_the_reads_of_all_owners_and_move_once() {
        let policy = Hierarchy::default();
        let clones = TenClones(Cell::new(Tier::Hdd));
        policy.used(key(1), FileBlock(0), 300, Use::Read);
        assert!(
            policy.plan(&roomy(), &clones, 4096).is_empty(),
            "read once by one"
        );
        for ino in 2..=3 {
            policy.used(key(ino), FileBlock(0), 300, Use::Read);
        }
        let jobs = policy.plan(&roomy(), &clones, 4096);
        let moves: Vec<Move> = jobs.iter().flat_map(|job| job.moves.clone()).collect();
        // In two parts, since numbers are cut into ranges; the own blocks of each file were read once.
        let at = |number, len, block| Move {
            at: At::Shared(number),
            len,
            block: BlockNo(block),
        };
        assert_eq!(moves, [at(1000, 24, 5000), at(1024, 176, 5024)], "{jobs:?}");
        assert_eq!((jobs[0].from, jobs[0].to), (Tier::Hdd, Tier::Nvm));
        clones.0.set(Tier::Nvm);
        for moved in &moves {
            policy.moved(&jobs[0], moved);
        }
        assert!(policy.plan(&roomy(), &clones, 4096).is_empty(), "they are there");
    }

    #[test]
    fn full_tier_moves_shared_blocks_once_for_all_owners() {
        let policy = Hierarchy::default();
        let clones = TenClones(Cell::new(Tier::Ssd));
        let mut space = roomy();
        space.tiers[Tier::Ssd as usize].free = 20;
        let jobs = policy.plan(&space, &clones, 4096);
        let moves: Vec<Move> = jobs.iter().flat_map(|job| job.moves.clone()).collect();
        assert_eq!(moves.iter().map(|moved| moved.len).sum::<u32>(), 200, "{jobs:?}");
        assert!(moves.iter().all(|moved| matches!(moved.at, At::Shared(_))));
    }
}
