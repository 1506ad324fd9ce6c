//! Digested blocks in NVM that reads have met, as words that are loaded without a lock. Noted under the inode's shared lock; a word
//! counts for one version of the file's map, so that forgetting them all is one store. Knows nothing of how the map is learnt.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::FromZeros;

/// Blocks of the first zone; each further one is twice as long as the one before.
const FIRST: u64 = 64;
/// Zones: blocks of the first 16 GiB of a file. What lies beyond is read under the lock.
const ZONES: usize = 16;
const PLACE_BITS: u32 = 40;
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;
const TAG_MASK: u64 = u64::MAX >> PLACE_BITS;

type Zones = [OnceLock<Box<[AtomicU64]>>; ZONES];

/// Words of one file.
pub(crate) struct Places {
    /// Low bits of the version that words count for.
    tag: AtomicU64,
    zones: OnceLock<Box<Zones>>,
}

/// Zone and place in it.
#[inline]
const fn split(block: u64) -> (usize, usize) {
    let from_one = block.saturating_add(FIRST);
    let zone = (from_one / FIRST).ilog2();
    (zone as usize, (from_one - (FIRST << zone)) as usize)
}

impl Places {
    pub(crate) const fn new() -> Self {
        Self {
            tag: AtomicU64::new(0),
            zones: OnceLock::new(),
        }
    }

    /// Where `block` lies in NVM, in blocks.
    #[inline]
    pub(super) fn get(&self, block: u64) -> Option<u64> {
        let (zone, at) = split(block);
        let word = self
            .zones
            .get()?
            .get(zone)?
            .get()?
            .get(at)?
            .load(Ordering::Relaxed);
        let place = word & PLACE_MASK;
        (place != 0 && word >> PLACE_BITS == self.tag.load(Ordering::Relaxed)).then(|| place - 1)
    }

    /// Notes that `blocks` from `block` on lie one after another from `place` on. The inode is locked, shared or exclusively.
    pub(super) fn note(&self, block: u64, place: u64, blocks: u64) {
        if place.saturating_add(blocks) >= PLACE_MASK {
            return;
        }
        let tag = self.tag.load(Ordering::Relaxed) << PLACE_BITS;
        for step in 0..blocks {
            let (zone, at) = split(block + step);
            let zones = self
                .zones
                .get_or_init(|| Box::new([const { OnceLock::new() }; ZONES]));
            let Some(words) = zones.get(zone) else { return };
            let Some(words) = words.get().or_else(|| {
                let fresh = <[AtomicU64]>::new_box_zeroed_with_elems((FIRST << zone) as usize).ok()?;
                Some(words.get_or_init(|| fresh))
            }) else {
                return;
            };
            words[at].store(tag | (place + step + 1), Ordering::Relaxed);
        }
    }

    /// Words noted for another version count no more. Under the inode's exclusive lock.
    #[inline]
    pub(crate) fn count_from(&self, version: u64) {
        let tag = version & TAG_MASK;
        if self.tag.load(Ordering::Relaxed) != tag {
            self.tag.store(tag, Ordering::Relaxed);
            if tag == 0 {
                self.clear();
            }
        }
    }

    /// The tags begin anew: a word of long ago must not count again.
    #[cold]
    fn clear(&self) {
        let zones = self.zones.get().into_iter().flat_map(|zones| zones.iter());
        for word in zones.filter_map(OnceLock::get).flat_map(|zone| zone.iter()) {
            word.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, Places, TAG_MASK, ZONES, split};

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
}
