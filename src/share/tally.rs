//! Bytes of a set of files that are theirs alone, that are shared, and what is kept once among them. Pure: asks
//! no daemon.

use std::collections::BTreeMap;
use varve_libfs::OwnedBlocks;

/// Bytes of a block.
pub const BLOCK: u64 = 4096;

/// Numbers that equally many parts of the set name.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    len: u64,
    /// Extents of the whole pool that name them; 2 may stand for more.
    owners: u32,
    /// Parts of the set that name them.
    seen: u32,
}

/// Sums over the parts of files. Takes some 60 bytes for each stretch of shared blocks.
#[derive(Debug, Default)]
pub struct Tally {
    alone_blocks: u64,
    shared_blocks: u64,
    numbers: BTreeMap<u64, Numbers>,
}

/// What a set of files takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sums {
    /// Bytes with one owner.
    pub alone: u64,
    /// Bytes with more owners, counted for each part that names them.
    pub shared: u64,
    /// Bytes of the blocks that are shared, each block once.
    pub set_shared: u64,
    /// Of these, bytes of blocks that no file outside of the set names.
    pub set_only: u64,
    /// Bytes that the set would take more if nothing in it was shared with anything in it.
    pub saved: u64,
    /// Bytes that an undo copies.
    pub to_copy: u64,
}

impl Sums {
    /// Bytes of all mapped blocks, counted for each part that names them.
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
        self.cut(first);
        self.cut(end);
        let mut at = first;
        while at < end {
            match self.numbers.get_mut(&at) {
                Some(numbers) => {
                    numbers.seen += 1;
                    numbers.owners = numbers.owners.max(part.owners);
                    at += numbers.len;
                }
                None => {
                    let next = self.numbers.range(at..end).next().map_or(end, |(next, _)| *next);
                    let numbers = Numbers {
                        len: next - at,
                        owners: part.owners,
                        seen: 1,
                    };
                    self.numbers.insert(at, numbers);
                    at = next;
                }
            }
        }
    }

    /// Lets a stretch begin at `at` if one reaches over it.
    fn cut(&mut self, at: u64) {
        let before = self.numbers.range_mut(..at).next_back();
        if let Some((first, numbers)) = before
            && first + numbers.len > at
        {
            let rest = Numbers {
                len: first + numbers.len - at,
                ..*numbers
            };
            numbers.len = at - first;
            self.numbers.insert(at, rest);
        }
    }

    /// Returns the sums. `exact`: numbers of owners above 2 were told.
    pub fn sums(&self, exact: bool) -> Sums {
        let mut sums = Sums {
            alone: self.alone_blocks * BLOCK,
            shared: self.shared_blocks * BLOCK,
            ..Sums::default()
        };
        for numbers in self.numbers.values() {
            let bytes = numbers.len * BLOCK;
            let seen = u64::from(numbers.seen);
            // The last of all owners keeps the blocks.
            let all = exact && numbers.seen >= numbers.owners;
            sums.set_shared += bytes;
            sums.saved += bytes * (seen - 1);
            if all {
                sums.set_only += bytes;
            }
            sums.to_copy += bytes * (seen - u64::from(all));
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, Sums, Tally};
    use varve_format::{FileBlock, Tier};
    use varve_libfs::OwnedBlocks;

    fn part(number: Option<u64>, blocks: u32, owners: u32) -> OwnedBlocks {
        OwnedBlocks {
            file_block: FileBlock(0),
            blocks,
            number,
            owners,
            tier: Tier::Nvm,
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
        [alone, shared, set_shared, set_only, saved, to_copy].map(|bytes| bytes / BLOCK)
    }

    #[test]
    fn stretches_that_overlap_are_counted_once_each() {
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
        assert_eq!(tally.sums(true).total(), 29 * BLOCK);
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
    fn owner_that_is_not_told_the_number_of_owners_counts_on_no_last_one() {
        let mut tally = Tally::default();
        tally.add(&part(Some(1), 4, 2));
        tally.add(&part(Some(1), 4, 2));
        assert_eq!(blocks(tally.sums(true)), [0, 8, 4, 4, 4, 4]);
        assert_eq!(blocks(tally.sums(false)), [0, 8, 4, 0, 4, 8]);
    }
}
