//! Inodes that were listed and not yet looked up: a directory walk uses them next. A walk lists a directory
//! first, then looks its entries up in the order of the listing or, for long listings (`find`, `rm -r`, `du`:
//! fts), in the order of inode numbers. Knows no leases.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;
use varve_format::InodeKey;

/// Most inodes that are kept: more than the 100,000 that fts lists before it looks at the first one. 3 MiB.
const LISTED_MAX: usize = 1 << 17;
/// Number of inodes that are remembered after their first request: a program changes a file soon after it
/// looked at it.
const LAST_MAX: usize = 16;

/// The listed inodes.
#[derive(Debug, Default)]
pub(super) struct Listed {
    /// As the listings came: a listing alone costs no more than this.
    fresh: Vec<InodeKey>,
    /// Inodes listed before the last request, by number.
    sorted: BTreeSet<InodeKey>,
    /// Inodes asked for last.
    last: VecDeque<InodeKey>,
}

impl Listed {
    /// Adds a page of a listing.
    pub(super) fn add(&mut self, keys: impl Iterator<Item = InodeKey>) {
        self.fresh.extend(keys);
        if self.fresh.len() + self.sorted.len() > LISTED_MAX {
            // Drops the older part: a program that has not looked at it by then is unlikely to.
            self.sorted = BTreeSet::new();
            if self.fresh.len() > LISTED_MAX {
                self.fresh.drain(..LISTED_MAX / 2);
            }
        }
    }

    fn settle(&mut self) {
        if self.fresh.len() > self.sorted.len() / 8 {
            let mut fresh: BTreeSet<_> = std::mem::take(&mut self.fresh).into_iter().collect();
            self.sorted.append(&mut fresh);
        } else {
            self.sorted.extend(self.fresh.drain(..));
        }
    }

    /// Notes a request for `key`.
    pub(super) fn asked(&mut self, key: InodeKey) {
        if !self.fresh.is_empty() {
            self.settle();
        }
        if self.sorted.remove(&key) {
            if self.last.len() == LAST_MAX {
                self.last.pop_front();
            }
            self.last.push_back(key);
        }
    }

    /// Whether `key` was listed and its first request was among the last [`LAST_MAX`].
    pub(super) fn is_recent(&self, key: InodeKey) -> bool {
        self.last.contains(&key)
    }

    /// Returns the listed inodes around `key`, if it [`is_recent`](Self::is_recent); else none. Those with numbers
    /// above it come first, then those below, nearest first: a walk in the order of the listing begins anywhere.
    pub(super) fn around(&self, key: InodeKey) -> impl Iterator<Item = InodeKey> {
        let from = self.is_recent(key).then_some(key);
        from.into_iter()
            .flat_map(|key| {
                let above = self.sorted.range((Bound::Excluded(key), Bound::Unbounded));
                above.chain(self.sorted.range(..key).rev())
            })
            .copied()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{LAST_MAX, LISTED_MAX, Listed};
    use varve_format::InodeKey;

    fn key(ino: u64) -> InodeKey {
        InodeKey::new(ino, 1)
    }

    fn around(listed: &Listed, ino: u64) -> Vec<u64> {
        listed.around(key(ino)).map(|key| key.ino.0).take(3).collect()
    }

    #[test]
    fn what_was_listed_comes_by_number_and_once() {
        let mut listed = Listed::default();
        listed.add([70, 10, 40, 30, 90].into_iter().map(key));
        assert!(around(&listed, 10).is_empty(), "nobody has asked for it");
        listed.asked(key(10));
        assert_eq!(around(&listed, 10), [30, 40, 70]);
        listed.asked(key(30));
        listed.add([35, 80].into_iter().map(key));
        listed.asked(key(40));
        assert_eq!(around(&listed, 30), [35, 70, 80]);
        assert_eq!(around(&listed, 40), [70, 80, 90]);
        listed.asked(key(50));
        assert!(around(&listed, 50).is_empty(), "it was not listed");
        for ino in 100..100 + LAST_MAX as u64 {
            listed.add([key(ino)].into_iter());
            listed.asked(key(ino));
        }
        assert!(around(&listed, 40).is_empty(), "that was long ago");
    }

    #[test]
    fn what_is_listed_and_never_asked_for_is_forgotten() {
        let mut listed = Listed::default();
        for page in 0..4000_u64 {
            listed.add((0..100).map(|at| key(page * 100 + at)));
            assert!(listed.fresh.len() + listed.sorted.len() <= LISTED_MAX);
            if page % 1500 == 0 {
                listed.asked(key(page * 100));
            }
        }
        listed.asked(key(399_000));
        assert_eq!(around(&listed, 399_000), [399_001, 399_002, 399_003]);
    }
}
