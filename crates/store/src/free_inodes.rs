//! Locations of free inode numbers. Hints only: a transaction that is given up does not restore them, so each
//! is verified when it is used.

use std::collections::{BTreeMap, BTreeSet};
use varve_format::inode::INODES_PER_BLOCK;

/// Blocks of the inode file by how many of their images are free.
#[derive(Debug, Default)]
pub(crate) struct FreeInodes {
    /// Number of free images by block, for blocks known to have some.
    free: BTreeMap<u64, u64>,
    /// Blocks of `free` by their number of free images; index 0 is one image.
    by_free: [BTreeSet<u64>; INODES_PER_BLOCK as usize],
    /// First block that has not been examined.
    scan: u64,
    /// Sum over all known blocks.
    known: u64,
}

impl FreeInodes {
    /// Notes that `block` has `free` free images.
    pub(crate) fn note(&mut self, block: u64, free: u64) {
        let free = free.min(INODES_PER_BLOCK);
        let before = if free > 0 {
            self.free.insert(block, free)
        } else {
            self.free.remove(&block)
        };
        if let Some(before) = before {
            self.by_free[before as usize - 1].remove(&block);
            self.known -= before;
        }
        if free > 0 {
            self.by_free[free as usize - 1].insert(block);
            self.known += free;
        }
    }

    /// Notes that one more image of `block` is free. Does nothing if the block is still to be examined.
    pub(crate) fn note_one_more(&mut self, block: u64) {
        if block < self.scan {
            self.note(block, self.free.get(&block).map_or(1, |free| free + 1));
        }
    }

    /// Returns the block nearest to `home` among those with at least `count` free images.
    pub(crate) fn near(&self, home: u64, count: u64) -> Option<u64> {
        let from = count.clamp(1, INODES_PER_BLOCK) as usize - 1;
        let nearest = |blocks: &BTreeSet<u64>| {
            let (after, before) = (blocks.range(home..).next(), blocks.range(..home).next_back());
            match (before, after) {
                (Some(before), Some(after)) if home - before < after - home => Some(*before),
                (before, after) => after.or(before).copied(),
            }
        };
        self.by_free[from..]
            .iter()
            .filter_map(nearest)
            .min_by_key(|block| block.abs_diff(home))
    }

    /// Returns a block with the most free images.
    pub(crate) fn fullest(&self) -> Option<u64> {
        self.by_free
            .iter()
            .rev()
            .find_map(|blocks| blocks.first().copied())
    }

    /// Returns the next block to examine, of `blocks` in all.
    pub(crate) fn next_unseen(&mut self, blocks: u64) -> Option<u64> {
        let next = self.scan;
        (next < blocks).then(|| {
            self.scan += 1;
            next
        })
    }

    /// Compares the known free images with `free`, their total. Starts a new search if most of them are
    /// unknown: transactions took them and were given up.
    pub(crate) fn compare(&mut self, free: u64, blocks: u64) {
        if self.scan >= blocks && self.known < free / 2 {
            self.scan = 0;
        }
    }

    /// Notes that the inode file has grown by `blocks`, all of them free.
    pub(crate) fn grown(&mut self, blocks: std::ops::Range<u64>) {
        // If earlier blocks are not examined yet, the scan reaches these blocks later.
        if self.scan >= blocks.start {
            self.scan = blocks.end;
        }
        for block in blocks {
            self.note(block, INODES_PER_BLOCK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::FreeInodes;

    #[test]
    fn nearest_block_with_room_is_found_and_full_ones_are_forgotten() {
        let mut numbers = FreeInodes::default();
        numbers.grown(0..4);
        for (block, free) in [(0, 3), (1, 1), (2, 16), (3, 7)] {
            numbers.note(block, free);
        }
        assert_eq!(
            (numbers.near(0, 1), numbers.near(0, 4), numbers.near(0, 8)),
            (Some(0), Some(2), Some(2))
        );
        assert_eq!(
            (numbers.near(9, 4), numbers.fullest(), numbers.known),
            (Some(3), Some(2), 27)
        );
        numbers.note(2, 0);
        numbers.note_one_more(1);
        numbers.note_one_more(2);
        assert_eq!(
            (numbers.near(0, 8), numbers.near(2, 1), numbers.near(2, 2)),
            (None, Some(2), Some(1))
        );
        assert_eq!(numbers.known, 3 + 2 + 1 + 7);
    }

    #[test]
    fn blocks_are_looked_at_once_and_again_when_most_of_what_is_free_is_unknown() {
        let mut numbers = FreeInodes::default();
        // Not looked at yet: counted when it is.
        numbers.note_one_more(1);
        assert_eq!(numbers.near(0, 1), None);
        assert_eq!([0; 3].map(|_| numbers.next_unseen(2)), [Some(0), Some(1), None]);
        numbers.note(1, 10);
        numbers.compare(20, 2);
        assert_eq!(numbers.next_unseen(2), None);
        numbers.compare(22, 2);
        assert_eq!(numbers.next_unseen(2), Some(0));
    }
}
