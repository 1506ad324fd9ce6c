//! The effect of a change of a range on the extents in and next to it: pure, no nodes.

use std::ops::Range;
use varve_format::{Extent, FileBlock};

/// The extents around a range before and after a change.
pub(super) struct Splice {
    /// Before; whole extents, ascending.
    pub(super) old: Vec<Extent>,
    /// After; those that touch have been joined.
    pub(super) new: Vec<Extent>,
    /// Extents unmapped in the range; clipped to it.
    pub(super) freed: Vec<Extent>,
}

impl Splice {
    /// Replaces `range` in `old`, which holds every extent in it and those that touch it, by `insert`.
    pub(super) fn new(old: Vec<Extent>, range: &Range<FileBlock>, insert: &[Extent]) -> Self {
        let head = old
            .iter()
            .filter_map(|extent| extent.clip(FileBlock(0), range.start));
        let tail = old
            .iter()
            .filter_map(|extent| extent.clip(range.end, extent.end()));
        let mut new: Vec<Extent> = Vec::with_capacity(old.len() + insert.len());
        for extent in head.chain(insert.iter().copied()).chain(tail) {
            match new.last_mut() {
                Some(last) if last.joins(&extent) => last.len += extent.len,
                _ => new.push(extent),
            }
        }
        let freed = old
            .iter()
            .filter_map(|extent| extent.clip(range.start, range.end))
            .collect();
        Self { old, new, freed }
    }

    fn find(extents: &[Extent], at: FileBlock) -> Option<&Extent> {
        let index = extents
            .binary_search_by_key(&at, |extent| extent.file_block)
            .ok()?;
        extents.get(index)
    }

    /// Returns the old extents whose first file block no longer begins an extent.
    pub(super) fn removed(&self) -> impl Iterator<Item = &Extent> {
        self.old
            .iter()
            .filter(|extent| Self::find(&self.new, extent.file_block).is_none())
    }

    /// Returns the new extents that begin where an old one began and differ from it.
    pub(super) fn changed(&self) -> impl Iterator<Item = &Extent> {
        self.new
            .iter()
            .filter(|extent| Self::find(&self.old, extent.file_block).is_some_and(|old| old != *extent))
    }

    /// Returns the new extents that begin where no old one began.
    pub(super) fn inserted(&self) -> impl Iterator<Item = &Extent> {
        self.new
            .iter()
            .filter(|extent| Self::find(&self.old, extent.file_block).is_none())
    }

    /// Makes the change to the extents of a whole file.
    pub(super) fn apply_to(&self, extents: &mut Vec<Extent>) {
        extents.retain(|extent| Self::find(&self.old, extent.file_block).is_none());
        extents.extend(&self.new);
        extents.sort_unstable_by_key(|extent| extent.file_block);
    }
}
