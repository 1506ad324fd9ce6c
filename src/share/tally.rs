//! Bytes of a set of files that are theirs alone, that are shared, and what is kept once among them. Pure:
//! asks no daemon.

use std::collections::BTreeMap;
use varve_format::BLOCK_BYTES;
use varve_libfs::OwnedBlocks;

/// Shared blocks with successive numbers to which equally many parts of the set refer.
#[derive(Debug, Clone, Copy)]
struct SharedRun {
    blocks: u64,
    /// References of the whole pool; 2 may stand for more.
    owners: u32,
    /// References of the set.
    references: u32,
}

/// Sums over the parts of files. Takes some 60 bytes for each run of shared blocks.
#[derive(Debug, Default)]
pub struct Tally {
    alone_blocks: u64,
    shared_blocks: u64,
    /// By the number of the first block.
    runs: BTreeMap<u64, SharedRun>,
}

/// What a set of files takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sums {
    /// Bytes with one owner.
    pub alone: u64,
    /// Bytes with more owners, counted for each reference.
    pub shared: u64,
    /// Bytes of the blocks that are shared, each block once.
    pub set_shared: u64,
    /// Of these, bytes of blocks that no file outside of the set has.
    pub set_only: u64,
    /// Bytes that the set would take more if nothing in it was shared with anything in it.
    pub saved: u64,
    /// Bytes that an undo copies.
    pub to_copy: u64,
}

impl Sums {
    /// Bytes of all mapped blocks, counted for each reference.
    pub const fn total(&self) -> u64 {
        self.alone + self.shared
    }
}

impl Tally {
    /// Counts a part of a file.
    pub fn add(&mut self, part: &OwnedBlocks) {
        let len = u64::from(part.blocks);
        let Some(first) = part.number.filter(|_| part.owners > 1) else {
            self.alone_blocks += len;
            return;
        };
        self.shared_blocks += len;
        let end = first + len;
        self.split_at(first);
        self.split_at(end);
        let mut at = first;
        while at < end {
            match self.runs.get_mut(&at) {
                Some(run) => {
                    run.references += 1;
                    run.owners = run.owners.max(part.owners);
                    at += run.blocks;
                }
                None => {
                    let next = self.runs.range(at..end).next().map_or(end, |(next, _)| *next);
                    let run = SharedRun {
                        blocks: next - at,
                        owners: part.owners,
                        references: 1,
                    };
                    self.runs.insert(at, run);
                    at = next;
                }
            }
        }
    }

    /// Splits the run that goes on at `at`, if there is one.
    fn split_at(&mut self, at: u64) {
        let before = self.runs.range_mut(..at).next_back();
        if let Some((first, run)) = before
            && first + run.blocks > at
        {
            let rest = SharedRun {
                blocks: first + run.blocks - at,
                ..*run
            };
            run.blocks = at - first;
            self.runs.insert(at, rest);
        }
    }

    /// Returns the sums. `exact`: the numbers of owners are exact, also those above 2.
    pub fn sums(&self, exact: bool) -> Sums {
        let mut sums = Sums {
            alone: self.alone_blocks * BLOCK_BYTES,
            shared: self.shared_blocks * BLOCK_BYTES,
            ..Sums::default()
        };
        for run in self.runs.values() {
            let bytes = run.blocks * BLOCK_BYTES;
            let references = u64::from(run.references);
            // The last of all owners keeps the blocks.
            let has_all = exact && run.references >= run.owners;
            sums.set_shared += bytes;
            sums.saved += bytes * (references - 1);
            if has_all {
                sums.set_only += bytes;
            }
            sums.to_copy += bytes * (references - u64::from(has_all));
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::{Sums, Tally};
    use varve_format::{BLOCK_BYTES, BlockNo, FileBlock, Tier};
    use varve_libfs::OwnedBlocks;

    fn part(number: Option<u64>, blocks: u32, owners: u32) -> OwnedBlocks {
        OwnedBlocks {
            file_block: FileBlock(0),
            blocks,
            number,
            owners,
            tier: Tier::Nvm,
            block: BlockNo(0),
        }
    }

    fn blocks(sums: Sums) -> [u64; 6] {
        let Sums {
            alone,
            shared,
            set_shared,
            set_only,
            saved,
            to_copy,
        } = sums;
        [alone, shared, set_shared, set_only, saved, to_copy].map(|bytes| bytes / BLOCK_BYTES)
    }

    #[test]
    fn runs_that_overlap_are_counted_once_each() {
        let mut tally = Tally::default();
        tally.add(&part(None, 7, 1));
        // A run with one owner left is alone.
        tally.add(&part(Some(900), 3, 1));
        // Numbers 10..20 of one file; 12..15 again in the same one; 5..11 with a file outside of the set.
        tally.add(&part(Some(10), 2, 2));
        tally.add(&part(Some(12), 3, 2));
        tally.add(&part(Some(15), 5, 2));
        tally.add(&part(Some(12), 3, 2));
        tally.add(&part(Some(5), 6, 3));
        assert_eq!(blocks(tally.sums(true)), [10, 19, 15, 3, 4, 16]);
        assert_eq!(tally.sums(true).total(), 29 * BLOCK_BYTES);
    }

    #[test]
    fn sums_do_not_depend_on_the_order_or_on_cuts() {
        let parts = [(0, 30), (10, 5), (12, 30), (0, 1), (41, 2), (3, 9)];
        let mut seen = [0_u32; 50];
        for (first, len) in parts {
            for number in first..first + len {
                seen[number as usize] += 1;
            }
        }
        let many = seen.iter().filter(|count| **count > 0).count() as u64;
        let all: u64 = seen.iter().map(|count| u64::from(*count)).sum();
        for turn in 0..parts.len() {
            let mut tally = Tally::default();
            for (first, len) in parts[turn..].iter().chain(&parts[..turn]) {
                tally.add(&part(Some(*first), *len as u32, 9));
            }
            let [alone, shared, set_shared, only, saved, copy] = blocks(tally.sums(true));
            assert_eq!((alone, shared, set_shared), (0, all, many));
            assert_eq!((only, saved, copy), (0, all - many, all));
        }
    }

    #[test]
    fn without_exact_numbers_of_owners_none_is_the_last() {
        let mut tally = Tally::default();
        tally.add(&part(Some(1), 4, 2));
        tally.add(&part(Some(1), 4, 2));
        assert_eq!(blocks(tally.sums(true)), [0, 8, 4, 4, 4, 4]);
        assert_eq!(blocks(tally.sums(false)), [0, 8, 4, 0, 4, 8]);
    }
}
