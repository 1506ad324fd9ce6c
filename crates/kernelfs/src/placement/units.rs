//! Files and shared blocks as units of placement: which blocks a unit has on which tier. Reads the catalog;
//! decides nothing.
//!
//! The shared blocks have a space of their own, whose units are those of a file that cannot exist.

use super::{At, Catalog, Move};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use varve_format::{BLOCK_BYTES, BlockNo, FileBlock, Generation, Ino, InodeKey, Tier};
use varve_placement::policy::Found;
use varve_placement::{UnitId, UnitSize};
use varve_store::MappedPart;

/// Bytes of a unit.
pub(super) const UNIT: UnitSize = UnitSize::DEFAULT;
/// Blocks of a unit.
pub(super) const UNIT_BLOCKS: u64 = UNIT.bytes() / BLOCK_BYTES;
/// Extents asked for at once.
const EXTENTS: usize = 128;
/// Files asked for at once.
const FILES: usize = 256;
/// Most files and extents that one search looks at.
const LOOKS: usize = 16_384;

/// The file whose units are those of the shared blocks.
pub(super) const SHARED: InodeKey = InodeKey {
    ino: Ino(0),
    generation: Generation(0),
};

/// The unit of a block.
pub(super) const fn unit_at(at: At) -> UnitId {
    let (key, block) = match at {
        At::File(key, block) => (key, block.0),
        At::Shared(number) => (SHARED, number),
    };
    UnitId {
        key,
        index: (block / UNIT_BLOCKS) as u32,
    }
}

/// Blocks of a unit: of its file, or numbers of shared ones.
const fn blocks_of(unit: UnitId) -> Range<u64> {
    let first = unit.index as u64 * UNIT_BLOCKS;
    first..first + UNIT_BLOCKS
}

/// Blocks in one piece on one tier.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) at: At,
    pub(super) len: u64,
    pub(super) tier: Tier,
    pub(super) block: u64,
}

impl Piece {
    /// The part of an extent within some blocks of its file.
    fn within(key: InodeKey, part: &MappedPart, blocks: &Range<u64>) -> Option<Self> {
        let extent = &part.extent;
        let first = extent.file_block.0.max(blocks.start);
        let end = extent.end().0.min(blocks.end);
        let skipped = first - extent.file_block.0;
        (first < end).then(|| Self {
            at: match part.number {
                Some(number) => At::Shared(number + skipped),
                None => At::File(key, FileBlock(first)),
            },
            len: end - first,
            tier: extent.tier,
            block: extent.block.0 + skipped,
        })
    }

    /// The units of its blocks: one, unless they are shared.
    pub(super) fn units(&self) -> impl Iterator<Item = (UnitId, u64)> + use<> {
        let (at, len) = (self.at, self.len);
        let first = match at {
            At::File(_, block) => block.0,
            At::Shared(number) => number,
        };
        let key = unit_at(at).key;
        (first / UNIT_BLOCKS..(first + len).div_ceil(UNIT_BLOCKS)).map(move |index| {
            let start = first.max(index * UNIT_BLOCKS);
            let end = (first + len).min((index + 1) * UNIT_BLOCKS);
            let index = index as u32;
            (UnitId { key, index }, end - start)
        })
    }

    pub(super) const fn to_move(self) -> Move {
        Move {
            at: self.at,
            len: self.len as u32,
            block: BlockNo(self.block),
        }
    }
}

/// The last extents that were read of a file.
struct Read {
    key: InodeKey,
    /// Blocks of the file that the extents cover, holes included.
    blocks: Range<u64>,
    parts: Vec<MappedPart>,
}

/// Units, read through a catalog. Remembers what it read last: neighbours are mostly asked for together.
pub(super) struct Units<'c> {
    catalog: &'c dyn Catalog,
    last: RefCell<Option<Read>>,
}

impl<'c> Units<'c> {
    pub(super) const fn of(catalog: &'c dyn Catalog) -> Self {
        Self {
            catalog,
            last: RefCell::new(None),
        }
    }

    /// Calls `each` with the blocks of a range of a file, also shared ones.
    pub(super) fn for_each(&self, key: InodeKey, blocks: &Range<u64>, mut each: impl FnMut(Piece)) {
        let mut from = blocks.start;
        while from < blocks.end {
            let mut last = self.last.borrow_mut();
            let known = last
                .as_ref()
                .is_some_and(|read| read.key == key && read.blocks.contains(&from));
            if !known {
                let parts = self.catalog.extents(key, FileBlock(from), EXTENTS);
                let end = parts.last().filter(|_| parts.len() >= EXTENTS);
                let end = end.map_or(u64::MAX, |last| last.extent.end().0);
                *last = Some(Read {
                    key,
                    blocks: from..end.max(from + 1),
                    parts,
                });
            }
            let Some(read) = &*last else { return };
            let now = from..blocks.end.min(read.blocks.end);
            let begin = read
                .parts
                .partition_point(|part| part.extent.end().0 <= now.start);
            let there = read.parts[begin..]
                .iter()
                .take_while(|part| part.extent.file_block.0 < now.end);
            there
                .filter_map(|part| Piece::within(key, part, &now))
                .for_each(&mut each);
            from = now.end;
        }
    }

    /// The blocks that belong to a unit: shared blocks are none of a file's.
    pub(super) fn pieces(&self, unit: UnitId) -> Vec<Piece> {
        let blocks = blocks_of(unit);
        let mut pieces = Vec::new();
        if unit.key == SHARED {
            for run in self.catalog.shared(blocks, UNIT_BLOCKS as usize) {
                pieces.push(Piece {
                    at: At::Shared(run.number),
                    len: run.len.into(),
                    tier: run.tier,
                    block: run.block.0,
                });
            }
            return pieces;
        }
        self.for_each(unit.key, &blocks, |piece| {
            if matches!(piece.at, At::File(..)) {
                pieces.push(piece);
            }
        });
        pieces
    }

    /// The blocks of a file around those of a unit of it, of both kinds.
    pub(super) fn all_pieces(&self, unit: UnitId) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.for_each(unit.key, &blocks_of(unit), |piece| pieces.push(piece));
        pieces
    }

    /// Units with blocks on a tier, about `most`, of the files after `after`. Shared blocks are found by the
    /// first file that has them.
    pub(super) fn on(&self, tier: Tier, after: Option<UnitId>, most: usize) -> Found {
        let mut search = Search {
            tier,
            most,
            looks: LOOKS,
            units: Vec::new(),
            shared: BTreeSet::new(),
        };
        let mut ino = after.map_or(Ino(0), |unit| unit.key.ino);
        loop {
            let (keys, next) = self.catalog.files(ino, FILES);
            for key in keys {
                let from = after.filter(|unit| unit.key == key);
                let from = from.map_or(0, |unit| blocks_of(unit).end);
                let end = search.file(key, from, self.catalog);
                if search.is_over() {
                    let last = At::File(key, FileBlock(end.saturating_sub(1)));
                    return search.ends(Some(unit_at(last)));
                }
            }
            match next {
                Some(next) => ino = next,
                None => return search.ends(None),
            }
        }
    }
}

/// A search for the units of a tier.
struct Search {
    tier: Tier,
    most: usize,
    /// Files and extents that it may still look at.
    looks: usize,
    units: Vec<UnitId>,
    /// Those of the shared blocks among them.
    shared: BTreeSet<UnitId>,
}

impl Search {
    const fn is_over(&self) -> bool {
        self.looks == 0 || self.units.len() >= self.most
    }

    /// Searches a file from a block on. Returns the block at which it stopped.
    fn file(&mut self, key: InodeKey, from: u64, catalog: &dyn Catalog) -> u64 {
        let mut block = from;
        while !self.is_over() {
            let parts = catalog.extents(key, FileBlock(block), EXTENTS);
            self.looks = self.looks.saturating_sub(1 + parts.len());
            for part in &parts {
                if part.extent.tier == self.tier {
                    let piece = Piece::within(key, part, &(block..u64::MAX));
                    let units = piece.iter().flat_map(Piece::units).map(|(unit, _)| unit);
                    let shared = &mut self.shared;
                    self.units
                        .extend(units.filter(|unit| unit.key != SHARED || shared.insert(*unit)));
                }
                block = part.extent.end().0;
            }
            if parts.len() < EXTENTS {
                break;
            }
        }
        self.units.dedup();
        block
    }

    fn ends(self, next: Option<UnitId>) -> Found {
        Found {
            units: self.units,
            next,
        }
    }
}
