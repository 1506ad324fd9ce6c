//! The coalescing allocator (section 3.2.4): best fit over numbered units, in near memory. Pure.
//!
//! Used twice: for pages of the heap's addresses, and for 16-byte units of memory pages. Records lie beside
//! the memory, not in headers in it, so that freeing reads no page and wrong pointers are found out.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Units of one range, free or in blocks.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    free: BTreeMap<u32, u32>,
    by_len: BTreeSet<(u32, u32)>,
    used: BTreeMap<u32, u32>,
}

/// What became of a block that was given back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Freed {
    /// Its units.
    pub(crate) block: Range<u32>,
    /// The free units that it is part of now.
    pub(crate) around: Range<u32>,
}

impl Blocks {
    pub(crate) fn new(units: u32) -> Self {
        let mut all = Self::default();
        if units != 0 {
            all.insert_free(0, units);
        }
        all
    }

    /// Units of which these blocks are in use, in order. `None` where they overlap or pass the end.
    pub(crate) fn restored(units: u32, used: impl Iterator<Item = (u32, u32)>) -> Option<Self> {
        let mut all = Self::default();
        let mut end = 0;
        for (start, len) in used {
            if start < end || len == 0 {
                return None;
            }
            if start > end {
                all.insert_free(end, start - end);
            }
            end = start.checked_add(len).filter(|end| *end <= units)?;
            all.used.insert(start, len);
        }
        if end < units {
            all.insert_free(end, units - end);
        }
        Some(all)
    }

    /// The blocks in use: start and length, in order.
    pub(crate) fn used(&self) -> impl Iterator<Item = (u32, u32)> {
        self.used.iter().map(|(start, len)| (*start, *len))
    }

    /// Whether there is a free piece of so many units.
    pub(crate) fn has_room(&self, len: u32) -> bool {
        self.by_len
            .last()
            .is_some_and(|(longest, _)| *longest >= len.max(1))
    }

    fn insert_free(&mut self, start: u32, len: u32) {
        self.free.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove_free(&mut self, start: u32) -> u32 {
        let len = self.free.remove(&start).unwrap_or_default();
        self.by_len.remove(&(len, start));
        len
    }

    /// Takes a block: of the smallest free piece that is long enough.
    pub(crate) fn take(&mut self, len: u32) -> Option<u32> {
        let (_, start) = *self.by_len.range((len.max(1), 0)..).next()?;
        let whole = self.remove_free(start);
        if whole > len {
            self.insert_free(start + len, whole - len);
        }
        self.used.insert(start, len);
        Some(start)
    }

    /// Units of the block that begins there.
    pub(crate) fn len_of(&self, start: u32) -> Option<u32> {
        self.used.get(&start).copied()
    }

    /// Gives a block back. `None` if none begins there.
    pub(crate) fn give_back(&mut self, start: u32) -> Option<Freed> {
        let len = self.used.remove(&start)?;
        Some(self.free_range(start, len))
    }

    fn free_range(&mut self, start: u32, len: u32) -> Freed {
        let block = start..start + len;
        let mut around = block.clone();
        if let Some((&before, &before_len)) = self.free.range(..start).next_back()
            && before + before_len == start
        {
            self.remove_free(before);
            around.start = before;
        }
        if self.free.contains_key(&block.end) {
            around.end += self.remove_free(block.end);
        }
        self.insert_free(around.start, around.end - around.start);
        Freed { block, around }
    }

    /// Makes a block shorter, and gives what became free.
    pub(crate) fn shrink(&mut self, start: u32, len: u32) -> Option<Freed> {
        let before = self.used.get_mut(&start)?;
        let end = start + *before;
        if len == 0 || start + len >= end {
            return None;
        }
        *before = len;
        Some(self.free_range(start + len, end - start - len))
    }

    /// Makes a block longer where it is. False if what follows is not free.
    pub(crate) fn grow(&mut self, start: u32, len: u32) -> bool {
        let Some(before) = self.used.get(&start).copied() else {
            return false;
        };
        let end = start + before;
        let missing = len.saturating_sub(before);
        let Some(after) = self.free.get(&end).copied().filter(|after| *after >= missing) else {
            return false;
        };
        self.remove_free(end);
        if after > missing {
            self.insert_free(end + missing, after - missing);
        }
        self.used.insert(start, before + missing);
        true
    }

    /// Whether no block is in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    /// Memory of the records.
    pub(crate) fn memory_bytes(&self) -> u64 {
        memory_bytes(self.used.len(), self.free.len())
    }

    /// The same of what [`Self::restored`] would make, before it does.
    pub(crate) fn restored_bytes(units: u32, used: impl ExactSizeIterator<Item = (u32, u32)>) -> u64 {
        let (blocks, mut free, mut end) = (used.len(), 0, 0);
        for (start, len) in used {
            free += usize::from(start > end);
            end = start.saturating_add(len);
        }
        memory_bytes(blocks, free + usize::from(end < units))
    }
}

/// Entries of 8 bytes in tree nodes of 11 that are at least half full.
fn memory_bytes(used: usize, free: usize) -> u64 {
    const ENTRY_BYTES: usize = 24;
    ((used + 2 * free) * ENTRY_BYTES) as u64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn blocks_that_overlap_or_pass_the_end_are_not_restored() {
        for used in [
            [(0, 5), (4, 1)],
            [(3, 1), (1, 1)],
            [(0, 1), (5, 6)],
            [(0, 0), (1, 1)],
            [(1, 1), (u32::MAX, 9)],
        ] {
            assert!(Blocks::restored(10, used.into_iter()).is_none());
        }
        assert!(Blocks::restored(10, [(0, 5), (5, 5)].into_iter()).is_some());
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_free_pieces_are_joined(
            steps in proptest::collection::vec((0u8..4, any::<u16>(), 1u32..40), 1..300)
        ) {
            const UNITS: u32 = 500;
            let mut blocks = Blocks::new(UNITS);
            let mut model: BTreeMap<u32, u32> = BTreeMap::new();
            for (kind, pick, len) in steps {
                let chosen = model.keys().nth(usize::from(pick) % model.len().max(1)).copied();
                match (kind, chosen) {
                    (0 | 1, _) => {
                        if let Some(start) = blocks.take(len) {
                            prop_assert!(start + len <= UNITS);
                            model.insert(start, len);
                        }
                    }
                    (2, Some(start)) => {
                        let freed = blocks.give_back(start).unwrap();
                        prop_assert_eq!(freed.block, start..start + model.remove(&start).unwrap());
                        prop_assert!(blocks.give_back(start).is_none());
                    }
                    (_, Some(start)) => {
                        let before = model[&start];
                        if len < before {
                            blocks.shrink(start, len).unwrap();
                            model.insert(start, len);
                        } else if blocks.grow(start, len) {
                            model.insert(start, len);
                        }
                    }
                    _ => {}
                }
                let mut end = 0;
                for (start, len) in &model {
                    prop_assert!(*start >= end, "blocks overlap");
                    prop_assert_eq!(blocks.len_of(*start), Some(*len));
                    end = start + len;
                }
                let used: u32 = model.values().sum();
                let free: u32 = blocks.free.values().sum();
                prop_assert_eq!(used + free, UNITS);
                let pieces: Vec<_> = blocks.free.iter().collect();
                prop_assert!(pieces.windows(2).all(|two| two[0].0 + two[0].1 < *two[1].0));
                prop_assert_eq!(blocks.by_len.len(), blocks.free.len());
                let restored = Blocks::restored(UNITS, blocks.used()).unwrap();
                let used: Vec<_> = blocks.used().collect();
                let bytes = Blocks::restored_bytes(UNITS, used.into_iter());
                prop_assert_eq!(bytes, restored.memory_bytes());
                prop_assert_eq!((&restored.free, &restored.used), (&blocks.free, &blocks.used));
                prop_assert_eq!(&restored.by_len, &blocks.by_len);
                prop_assert_eq!(blocks.has_room(len), blocks.by_len.iter().any(|(free, _)| *free >= len));
            }
            for start in model.into_keys() {
                blocks.give_back(start);
            }
            prop_assert!(blocks.is_empty());
            prop_assert_eq!(blocks.take(UNITS), Some(0));
        }
    }
}
