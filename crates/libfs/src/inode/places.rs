//! Locations of digested blocks in NVM that reads have looked up, as words that are loaded without a lock.
//! Noted under the inode's shared lock; a word is valid for one version of the file's map, so that one store
//! invalidates all of them. A group of consecutive blocks has one word: random reads of a large file find it
//! in the processor's cache, beside the data that they stream through it. Does not know how the map is
//! loaded.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::FromZeros;

/// Blocks that one word may stand for: 2 MiB.
pub(crate) const GROUP: u64 = 512;
/// Words of the first zone; each further one is twice as long as the one before.
const FIRST: u64 = 64;
/// Number of zones: they hold the blocks of the first 16 GiB of a file, and the groups of the first 8 TiB.
/// Blocks beyond are read under the lock.
const ZONES: usize = 16;
const PLACE_BITS: u32 = 40;
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;
const TAG_MASK: u64 = u64::MAX >> PLACE_BITS;

/// Words of one zone.
type Zone = OnceLock<Box<[AtomicU64]>>;

/// A word for each index, allocated when it is first stored to.
struct Words(OnceLock<Box<[Zone; ZONES]>>);

/// Returns the zone, and the index in it.
#[inline]
const fn split(index: u64) -> (usize, usize) {
    let from_one = index.saturating_add(FIRST);
    let zone = (from_one / FIRST).ilog2();
    (zone as usize, (from_one - (FIRST << zone)) as usize)
}

impl Words {
    const fn new() -> Self {
        Self(OnceLock::new())
    }

    #[inline]
    fn get(&self, index: u64) -> Option<u64> {
        let (zone, at) = split(index);
        let word = self.0.get()?.get(zone)?.get()?.get(at)?;
        Some(word.load(Ordering::Relaxed))
    }

    fn set(&self, index: u64, word: u64) {
        let (zone, at) = split(index);
        let zones = self
            .0
            .get_or_init(|| Box::new([const { OnceLock::new() }; ZONES]));
        let Some(words) = zones.get(zone) else { return };
        let words = words.get().or_else(|| {
            let fresh = <[AtomicU64]>::new_box_zeroed_with_elems((FIRST << zone) as usize).ok()?;
            Some(words.get_or_init(|| fresh))
        });
        if let Some(words) = words {
            words[at].store(word, Ordering::Relaxed);
        }
    }

    fn clear(&self) {
        let zones = self.0.get().into_iter().flat_map(|zones| zones.iter());
        for word in zones.filter_map(OnceLock::get).flat_map(|zone| zone.iter()) {
            word.store(0, Ordering::Relaxed);
        }
    }
}

/// Words of one file.
pub(crate) struct Places {
    /// Low bits of the version for which words are valid.
    tag: AtomicU64,
    groups: Words,
    blocks: Words,
}

impl Places {
    pub(crate) const fn new() -> Self {
        Self {
            tag: AtomicU64::new(0),
            groups: Words::new(),
            blocks: Words::new(),
        }
    }

    /// Returns the location of `block` in NVM, in blocks.
    #[inline]
    pub(crate) fn get(&self, block: u64) -> Option<u64> {
        let tag = self.tag.load(Ordering::Relaxed);
        let place = |word: u64| {
            let place = word & PLACE_MASK;
            (place != 0 && word >> PLACE_BITS == tag).then(|| place - 1)
        };
        match self.groups.get(block / GROUP).and_then(place) {
            Some(group) => Some(group + block % GROUP),
            None => self.blocks.get(block).and_then(place),
        }
    }

    /// Notes that `blocks` blocks from `block` on are consecutive in NVM from `place` on. The inode is
    /// locked, shared or exclusively.
    pub(crate) fn note(&self, block: u64, place: u64, blocks: u64) {
        if place.saturating_add(blocks) >= PLACE_MASK {
            return;
        }
        let tag = self.tag.load(Ordering::Relaxed) << PLACE_BITS;
        let mut step = 0;
        while step < blocks {
            let (at, word) = (block + step, tag | (place + step + 1));
            if at.is_multiple_of(GROUP) && blocks - step >= GROUP {
                self.groups.set(at / GROUP, word);
                step += GROUP;
            } else {
                self.blocks.set(at, word);
                step += 1;
            }
        }
    }

    /// Invalidates words that were noted for another version. Under the inode's exclusive lock.
    #[inline]
    pub(crate) fn count_from(&self, version: u64) {
        let tag = version & TAG_MASK;
        if self.tag.load(Ordering::Relaxed) != tag {
            self.tag.store(tag, Ordering::Relaxed);
            // The tags wrap around: old words must not become valid again.
            if tag == 0 {
                self.groups.clear();
                self.blocks.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, GROUP, Places, TAG_MASK, ZONES, split};

    #[test]
    fn zones_follow_one_another_without_a_gap() {
        let (mut zone, mut at) = (0, 0);
        for block in 0..100_000 {
            assert_eq!(split(block), (zone, at));
            at += 1;
            if at as u64 == FIRST << zone {
                (zone, at) = (zone + 1, 0);
            }
        }
        assert!(split(u64::MAX).0 >= ZONES);
    }

    #[test]
    fn places_count_for_the_version_they_were_noted_in() {
        let places = Places::new();
        places.count_from(7);
        places.note(60, 1000, 10);
        assert_eq!(
            (places.get(60), places.get(69), places.get(70)),
            (Some(1000), Some(1009), None)
        );
        places.count_from(8);
        assert_eq!(places.get(60), None);
        places.note(61, 5, 1);
        assert_eq!((places.get(61), places.get(62)), (Some(5), None));
        // All tags later.
        places.count_from(TAG_MASK);
        places.count_from(TAG_MASK + 1);
        places.count_from(8 + TAG_MASK + 1);
        assert_eq!(places.get(61), None);
    }

    #[test]
    fn places_beyond_the_last_zone_are_not_kept() {
        let places = Places::new();
        places.note(u64::MAX / 4096, 5, 2);
        assert_eq!(places.get(u64::MAX / 4096), None);
    }

    #[test]
    fn group_that_lies_together_is_one_word_and_counts_for_its_version_too() {
        let places = Places::new();
        places.count_from(3);
        places.note(GROUP - 2, 5000, GROUP + 3);
        let noted = |block| places.get(block);
        assert_eq!((noted(GROUP - 3), noted(GROUP - 2)), (None, Some(5000)));
        assert_eq!(
            (noted(GROUP), noted(2 * GROUP - 1)),
            (Some(5002), Some(5001 + GROUP))
        );
        assert_eq!(
            (noted(2 * GROUP), noted(2 * GROUP + 1)),
            (Some(5002 + GROUP), None)
        );
        assert_eq!(places.blocks.get(GROUP), Some(0));
        places.count_from(4);
        assert_eq!((noted(GROUP - 2), noted(GROUP)), (None, None));
        // Blocks that are not consecutive are found one by one.
        places.note(GROUP, 9, 1);
        assert_eq!((noted(GROUP), noted(GROUP + 1)), (Some(9), None));
        places.count_from(TAG_MASK);
        places.count_from(TAG_MASK + 1);
        places.count_from(3 + TAG_MASK + 1);
        assert_eq!(noted(GROUP + 1), None);
    }
}
