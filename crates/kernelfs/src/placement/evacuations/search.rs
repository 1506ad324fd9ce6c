//! The units of a tier or of a device of it, for the planner of a job: of each unit only what lies there.

use super::super::units::{Piece, SHARED, UNIT_BLOCKS, Units, unit_at};
use super::super::{At, Catalog, Move};
use std::collections::BTreeSet;
use std::ops::Range;
use varve_format::{BLOCK_BYTES, BlockNo, FileBlock, Ino, Tier};
use varve_placement::policy::{self, Found, Hold, Place};
use varve_placement::{DeviceId, UnitId};

/// Extents asked for at once.
const EXTENTS: usize = 128;
/// Files asked for at once.
const FILES: usize = 256;
/// Most files and extents that one search looks at.
const LOOKS: usize = 16_384;

/// What lies in some blocks of a tier. First the shared blocks, by number, then what files have alone.
pub(super) struct OnTier<'c> {
    pub(super) units: Units<'c>,
    pub(super) catalog: &'c dyn Catalog,
    pub(super) tier: Tier,
    /// The blocks. No extent and no run has some of them only.
    pub(super) numbers: Range<u64>,
    /// Other blocks of the tier are preferred to other tiers.
    pub(super) stays_on_tier: bool,
    pub(super) device: DeviceId,
    /// Data that cannot be read.
    pub(super) bad: &'c BTreeSet<At>,
}

impl OnTier<'_> {
    fn has(&self, piece: &Piece) -> bool {
        piece.tier == self.tier && self.numbers.contains(&piece.block)
    }

    /// The moves that take a unit away, without what cannot be read.
    pub(super) fn moves(&self, unit: UnitId) -> Vec<Move> {
        let pieces = self.units.pieces(unit).into_iter();
        let there = pieces.filter(|piece| self.has(piece) && !self.bad.contains(&piece.at));
        there.map(|piece| piece.to_move()).collect()
    }
}

impl policy::Catalog for OnTier<'_> {
    fn place(&self, unit: UnitId) -> Option<Place> {
        let (mut bytes, mut good) = (0, false);
        for piece in self.units.pieces(unit) {
            if self.has(&piece) {
                bytes += piece.len * BLOCK_BYTES;
                good |= !self.bad.contains(&piece.at);
            }
        }
        (bytes > 0).then_some(Place {
            device: self.device,
            bytes: bytes as u32,
            second: None,
            hold: match good {
                false => Some(Hold::Damaged),
                true => self.stays_on_tier.then_some(Hold::Pinned),
            },
            since_ms: 0,
            came_from: None,
        })
    }

    fn units_on(&self, device: DeviceId, after: Option<UnitId>, most: usize) -> Found {
        if device != self.device {
            return Found::default();
        }
        let mut search = Search {
            tier: self.tier,
            numbers: &self.numbers,
            most,
            looks: LOOKS,
            units: Vec::new(),
        };
        let next = search.go_on(after, self.catalog);
        Found {
            units: search.units,
            next,
        }
    }
}

struct Search<'n> {
    tier: Tier,
    numbers: &'n Range<u64>,
    most: usize,
    /// Files, extents and runs that it may still look at.
    looks: usize,
    units: Vec<UnitId>,
}

impl Search<'_> {
    fn has(&self, tier: Tier, block: BlockNo) -> bool {
        tier == self.tier && self.numbers.contains(&block.0)
    }

    const fn is_over(&self) -> bool {
        self.looks == 0 || self.units.len() >= self.most
    }

    /// Adds the units of the blocks from `first` on.
    fn add(&mut self, at: At, len: u64) {
        let first = unit_at(at);
        let into = match at {
            At::File(_, block) => block.0,
            At::Shared(number) => number,
        };
        let last = ((into + len - 1) / UNIT_BLOCKS) as u32;
        for index in first.index..=last {
            let unit = UnitId { index, ..first };
            if self.units.last() != Some(&unit) {
                self.units.push(unit);
            }
        }
    }

    /// Searches after a unit. Returns where to go on; `None`: this was the end.
    fn go_on(&mut self, after: Option<UnitId>, catalog: &dyn Catalog) -> Option<UnitId> {
        let after_file = after.filter(|unit| unit.key != SHARED);
        if after_file.is_none() {
            let from = after.map_or(0, |unit| (u64::from(unit.index) + 1) * UNIT_BLOCKS);
            if let Some(number) = self.shared(from, catalog) {
                return Some(unit_at(At::Shared(number.saturating_sub(1))));
            }
        }
        let mut ino = after_file.map_or(Ino(1), |unit| unit.key.ino);
        loop {
            let (keys, next) = catalog.files(ino, FILES);
            for key in keys {
                let from = after_file.filter(|unit| unit.key == key);
                let from = from.map_or(0, |unit| (u64::from(unit.index) + 1) * UNIT_BLOCKS);
                let end = self.file(key, from, catalog);
                if self.is_over() {
                    let last = self.units.last().copied().filter(|unit| unit.key == key);
                    let looked = unit_at(At::File(key, FileBlock(end.saturating_sub(1))));
                    return Some(last.map_or(looked, |last| last.max(looked)));
                }
            }
            ino = next?;
        }
    }

    /// Searches the shared blocks from a number on. Returns the number at which it stopped; `None`: it
    /// looked at all.
    fn shared(&mut self, from: u64, catalog: &dyn Catalog) -> Option<u64> {
        let mut number = from;
        loop {
            let runs = catalog.shared(number..u64::MAX, EXTENTS);
            self.looks = self.looks.saturating_sub(runs.len());
            for run in &runs {
                number = run.number + u64::from(run.len);
                if self.has(run.tier, run.block) {
                    self.add(At::Shared(run.number), run.len.into());
                }
                if self.units.len() >= self.most {
                    return Some(number);
                }
            }
            if runs.len() < EXTENTS {
                return None;
            }
            if self.is_over() {
                return Some(number);
            }
        }
    }

    /// Searches a file from a block on. Returns the block at which it stopped.
    fn file(&mut self, key: varve_format::InodeKey, from: u64, catalog: &dyn Catalog) -> u64 {
        let mut block = from;
        self.looks = self.looks.saturating_sub(1);
        loop {
            let parts = catalog.extents(key, FileBlock(block), EXTENTS);
            self.looks = self.looks.saturating_sub(parts.len());
            for part in &parts {
                let first = part.extent.file_block.0.max(block);
                block = part.extent.end().0;
                if part.number.is_none() && self.has(part.extent.tier, part.extent.block) {
                    self.add(At::File(key, FileBlock(first)), block - first);
                }
                if self.units.len() >= self.most {
                    return block;
                }
            }
            if parts.len() < EXTENTS || self.is_over() {
                return block;
            }
        }
    }
}
