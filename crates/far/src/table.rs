//! The table of one program: where each page of its memory is.
//!
//! An entry takes 12 bytes, in chunks of 512 pages (2 MiB) that are made when the first page of a chunk
//! leaves. Owns the packing; does not know who counts the users of a place: every method that forgets an
//! entry gives it back.

use crate::page::HASH_MASK;
use crate::place::Place;
use std::collections::BTreeMap;

/// Pages of a chunk.
pub const CHUNK_PAGES: u64 = 512;
/// Bytes of a chunk.
pub const CHUNK_BYTES: u64 = CHUNK_PAGES * crate::page::PAGE_BYTES as u64;

/// A page number: an address divided by 4,096.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageNo(pub u64);

impl PageNo {
    /// The page of an address.
    #[must_use]
    pub fn of(address: u64) -> Self {
        Self(address / crate::page::PAGE_BYTES as u64)
    }
    /// First byte.
    #[must_use]
    pub fn address(self) -> u64 {
        self.0 * crate::page::PAGE_BYTES as u64
    }
}

/// An object and the hash of the page that it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Where it lies.
    pub place: Place,
    /// Hash of the page, cut to [`HASH_MASK`].
    pub hash: u64,
}

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// In the program's mapping, or never touched.
    Local {
        /// Number of times that the hand passes it over, at most 3.
        lives: u8,
        /// The object that it was read from, if that is kept.
        kept: Option<Stored>,
    },
    /// In the set-aside area, at this slot (below 2^36).
    Aside(u64),
    /// In a slab.
    Far(Stored),
    /// One word, repeated.
    Repeated(u64),
    /// Lost: the backing failed.
    Poisoned,
}

impl Entry {
    /// The entry of a page that nothing is known of.
    pub const UNKNOWN: Self = Self::Local { lives: 0, kept: None };

    /// The object that the entry counts as a user of.
    #[must_use]
    pub fn stored(&self) -> Option<Stored> {
        match self {
            Self::Far(stored)
            | Self::Local {
                kept: Some(stored), ..
            } => Some(*stored),
            _ => None,
        }
    }

    /// Whether the bytes are outside of the program's memory.
    #[must_use]
    pub fn is_far(&self) -> bool {
        matches!(self, Self::Far(_) | Self::Repeated(_))
    }

    /// Whether a touch of the page waits until it is brought back.
    #[must_use]
    pub fn is_out(&self) -> bool {
        self.is_far() || matches!(self, Self::Aside(_))
    }
}

// The word: bits 0-2 tag, 3-4 lives, then by tag.
const LOCAL: u64 = 0;
const KEPT: u64 = 1;
const ASIDE: u64 = 2;
const FAR: u64 = 3;
const REPEATED: u64 = 4;
const POISONED: u64 = 5;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Packed {
    word: u64,
    low: u32,
}

/// Bits 5-16 object, 17-40 slab, 41-63 the high bits of the hash; its low 32 bits stand apart.
fn pack_stored(tag: u64, lives: u8, stored: &Stored) -> Packed {
    let hash = stored.hash & HASH_MASK;
    let place = u64::from(stored.place.object) << 5 | u64::from(stored.place.slab) << 17;
    Packed {
        word: tag | u64::from(lives) << 3 | place | (hash >> 32) << 41,
        low: hash as u32,
    }
}

fn unpack_stored(packed: Packed) -> Stored {
    let place = Place {
        object: (packed.word >> 5 & 0xfff) as u16,
        slab: (packed.word >> 17 & 0xff_ffff) as u32,
    };
    Stored {
        place,
        hash: packed.word >> 41 << 32 | u64::from(packed.low),
    }
}

fn pack(entry: &Entry) -> Packed {
    match entry {
        Entry::Local { lives, kept: None } => Packed {
            word: LOCAL | u64::from(lives & 3) << 3,
            low: 0,
        },
        Entry::Local {
            lives,
            kept: Some(stored),
        } => pack_stored(KEPT, lives & 3, stored),
        Entry::Aside(slot) => Packed {
            word: ASIDE | slot << 5,
            low: 0,
        },
        Entry::Far(stored) => pack_stored(FAR, 0, stored),
        Entry::Repeated(word) => Packed {
            word: REPEATED | word >> 32 << 32,
            low: *word as u32,
        },
        Entry::Poisoned => Packed {
            word: POISONED,
            low: 0,
        },
    }
}

fn unpack(packed: Packed) -> Entry {
    let lives = (packed.word >> 3 & 3) as u8;
    match packed.word & 7 {
        KEPT => Entry::Local {
            lives,
            kept: Some(unpack_stored(packed)),
        },
        ASIDE => Entry::Aside(packed.word >> 5),
        FAR => Entry::Far(unpack_stored(packed)),
        REPEATED => Entry::Repeated(packed.word >> 32 << 32 | u64::from(packed.low)),
        POISONED => Entry::Poisoned,
        _ => Entry::Local { lives, kept: None },
    }
}

/// Words and low halves apart, so that no entry is padded: 12 bytes each.
#[derive(Debug, Clone)]
struct Chunk {
    words: [u64; CHUNK_PAGES as usize],
    lows: [u32; CHUNK_PAGES as usize],
    counts: Counts,
    faults: u32,
    /// Faults on pages that were out, halved at each sample of heat.
    touched: u32,
    /// Pages that were out at the samples before, halved as well.
    seen: u32,
    passed_over: bool,
}

/// Pages by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// In the set-aside area.
    pub aside: u64,
    /// In slabs.
    pub stored: u64,
    /// Of one repeated word.
    pub repeated: u64,
    /// Lost.
    pub poisoned: u64,
}

impl Counts {
    fn of(&mut self, entry: &Entry) -> Option<&mut u64> {
        match entry {
            Entry::Local { .. } => None,
            Entry::Aside(_) => Some(&mut self.aside),
            Entry::Far(_) => Some(&mut self.stored),
            Entry::Repeated(_) => Some(&mut self.repeated),
            Entry::Poisoned => Some(&mut self.poisoned),
        }
    }

    fn change(&mut self, old: &Entry, new: &Entry) {
        if let Some(count) = self.of(old) {
            *count -= 1;
        }
        if let Some(count) = self.of(new) {
            *count += 1;
        }
    }

    /// Pages that a touch has to wait for.
    #[must_use]
    pub fn out(&self) -> u64 {
        self.aside + self.stored + self.repeated
    }
}

impl Chunk {
    fn new() -> Box<Self> {
        Box::new(Self {
            words: [0; CHUNK_PAGES as usize],
            lows: [0; CHUNK_PAGES as usize],
            counts: Counts::default(),
            faults: 0,
            touched: 0,
            seen: 0,
            passed_over: false,
        })
    }

    fn get(&self, index: usize) -> Entry {
        unpack(Packed {
            word: self.words[index],
            low: self.lows[index],
        })
    }

    fn set(&mut self, index: usize, entry: &Entry) -> Entry {
        let old = self.get(index);
        self.counts.change(&old, entry);
        let packed = pack(entry);
        self.words[index] = packed.word;
        self.lows[index] = packed.low;
        old
    }
}

/// Recent activity of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activity {
    /// Number of the chunk: an address divided by [`CHUNK_BYTES`].
    pub chunk: u64,
    /// Faults in it, halved at each [`Table::age`].
    pub faults: u32,
}

/// The table of one program.
#[derive(Debug, Clone, Default)]
pub struct Table {
    chunks: BTreeMap<u64, Box<Chunk>>,
    counts: Counts,
}

fn split(page: PageNo) -> (u64, usize) {
    (page.0 / CHUNK_PAGES, (page.0 % CHUNK_PAGES) as usize)
}

impl Table {
    /// Where a page is.
    #[must_use]
    pub fn get(&self, page: PageNo) -> Entry {
        let (chunk, index) = split(page);
        self.chunks
            .get(&chunk)
            .map_or(Entry::UNKNOWN, |chunk| chunk.get(index))
    }

    /// Says where a page is and gives back where it was.
    #[must_use = "the old entry may count as the user of an object"]
    pub fn set(&mut self, page: PageNo, entry: Entry) -> Entry {
        let (number, index) = split(page);
        if entry == Entry::UNKNOWN && !self.chunks.contains_key(&number) {
            return Entry::UNKNOWN;
        }
        let chunk = self.chunks.entry(number).or_insert_with(Chunk::new);
        let old = chunk.set(index, &entry);
        self.counts.change(&old, &entry);
        old
    }

    /// Forgets all pages in `first..end` and gives those that were something else than unknown.
    #[must_use = "the old entries may count as users of objects"]
    pub fn take_range(&mut self, first: PageNo, end: PageNo) -> Vec<(PageNo, Entry)> {
        let mut taken = Vec::new();
        let mut empty = Vec::new();
        for (number, chunk) in self
            .chunks
            .range_mut(first.0 / CHUNK_PAGES..end.0.div_ceil(CHUNK_PAGES))
        {
            let base = number * CHUNK_PAGES;
            let from = first.0.saturating_sub(base).min(CHUNK_PAGES) as usize;
            let to = end.0.saturating_sub(base).min(CHUNK_PAGES) as usize;
            for index in from..to {
                let old = chunk.set(index, &Entry::UNKNOWN);
                if old != Entry::UNKNOWN {
                    self.counts.change(&old, &Entry::UNKNOWN);
                    taken.push((PageNo(base + index as u64), old));
                }
            }
            if from == 0 && to == CHUNK_PAGES as usize {
                empty.push(*number);
            }
        }
        for number in empty {
            self.chunks.remove(&number);
        }
        taken
    }

    /// Moves what is known of `count` pages from `from` to `to` (`mremap`), and gives what was known of the
    /// target.
    #[must_use = "the old entries may count as users of objects"]
    pub fn move_range(&mut self, from: PageNo, to: PageNo, count: u64) -> Vec<(PageNo, Entry)> {
        let moving = self.take_range(from, PageNo(from.0 + count));
        let lost = self.take_range(to, PageNo(to.0 + count));
        for (page, entry) in moving {
            let _ = self.set(PageNo(page.0 - from.0 + to.0), entry);
        }
        lost
    }

    /// Calls `each` for every page that is something else than unknown.
    pub fn each(&self, mut each: impl FnMut(PageNo, Entry)) {
        for (number, chunk) in &self.chunks {
            for index in 0..CHUNK_PAGES as usize {
                let entry = chunk.get(index);
                if entry != Entry::UNKNOWN {
                    each(PageNo(number * CHUNK_PAGES + index as u64), entry);
                }
            }
        }
    }

    /// Forgets the objects that are kept for local pages, in at most `most` chunks that have any, and gives
    /// them.
    #[must_use = "the table was a user of these objects"]
    pub fn take_kept(&mut self, most: usize) -> Vec<Stored> {
        let mut taken = Vec::new();
        let mut chunks = 0;
        for chunk in self.chunks.values_mut() {
            let before = taken.len();
            for index in 0..CHUNK_PAGES as usize {
                if let Entry::Local {
                    lives,
                    kept: Some(stored),
                } = chunk.get(index)
                {
                    chunk.set(index, &Entry::Local { lives, kept: None });
                    taken.push(stored);
                }
            }
            chunks += usize::from(taken.len() > before);
            if chunks >= most {
                break;
            }
        }
        taken
    }

    /// Pages that a touch has to wait for, from `from` on: at most `most`, in the order of their addresses.
    #[must_use]
    pub fn out_from(&self, from: PageNo, most: usize) -> Vec<(PageNo, Entry)> {
        let mut found = Vec::new();
        for (number, chunk) in self.chunks.range(from.0 / CHUNK_PAGES..) {
            if chunk.counts.out() == 0 {
                continue;
            }
            let base = number * CHUNK_PAGES;
            let first = from.0.saturating_sub(base).min(CHUNK_PAGES) as usize;
            for index in first..CHUNK_PAGES as usize {
                let entry = chunk.get(index);
                if entry.is_out() {
                    found.push((PageNo(base + index as u64), entry));
                    if found.len() >= most {
                        return found;
                    }
                }
            }
        }
        found
    }

    /// Pages whose bytes are outside of the program's memory.
    #[must_use]
    pub fn far_pages(&self) -> u64 {
        self.counts.stored + self.counts.repeated
    }

    /// Pages by state.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes that the table takes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.chunks.len() * (size_of::<Chunk>() + 3 * size_of::<u64>())) as u64
    }

    /// Notes a fault in the chunk of `page`, which was out or was never touched.
    pub fn note_fault(&mut self, page: PageNo, was_out: bool) {
        if let Some(chunk) = self.chunks.get_mut(&split(page).0) {
            chunk.faults = chunk.faults.saturating_add(1);
            chunk.touched = chunk.touched.saturating_add(u32::from(was_out));
        }
    }

    /// Heat of each chunk: the share, 0..=1, of its pages that were out at the samples before which were
    /// touched since; `None` where nothing was out. Later ones count more.
    pub fn sample_heat(&mut self) -> Vec<(u64, Option<f64>)> {
        let mut heat = Vec::with_capacity(self.chunks.len());
        for (number, chunk) in &mut self.chunks {
            let share = f64::from(chunk.touched) / f64::from(chunk.seen);
            heat.push((*number, (chunk.seen > 0).then(|| share.min(1.0))));
            chunk.touched /= 2;
            chunk.seen = chunk.seen / 2 + chunk.counts.out() as u32;
        }
        heat
    }

    /// Whether the hand passes this chunk over: its fault count is above `threshold`, and it was not passed
    /// over the last time.
    pub fn pass_over(&mut self, chunk: u64, threshold: f64) -> bool {
        let Some(chunk) = self.chunks.get_mut(&chunk) else {
            return false;
        };
        chunk.passed_over = !chunk.passed_over && f64::from(chunk.faults) > threshold;
        chunk.passed_over
    }

    /// Fault counts of all chunks.
    pub fn activity(&self) -> impl Iterator<Item = Activity> + '_ {
        self.chunks.iter().map(|(number, chunk)| Activity {
            chunk: *number,
            faults: chunk.faults,
        })
    }

    /// Halves all fault counts.
    pub fn age(&mut self) {
        for chunk in self.chunks.values_mut() {
            chunk.faults /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const _: () = assert!(size_of::<Chunk>() <= 16 * CHUNK_PAGES as usize);

    fn entry() -> impl Strategy<Value = Entry> {
        let stored = (0..1u32 << 24, 0..1u16 << 12, any::<u64>()).prop_map(|(slab, object, hash)| Stored {
            place: Place { slab, object },
            hash: hash & HASH_MASK,
        });
        prop_oneof![
            (0u8..4, proptest::option::of(stored.clone()))
                .prop_map(|(lives, kept)| Entry::Local { lives, kept }),
            (0..1u64 << 36).prop_map(Entry::Aside),
            stored.prop_map(Entry::Far),
            any::<u64>().prop_map(Entry::Repeated),
            Just(Entry::Poisoned),
        ]
    }

    #[derive(Debug, Clone)]
    enum Step {
        Set(u64, Entry),
        Take(u64, u64),
        Move(u64, u64, u64),
        Kept,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..2048u64, entry()).prop_map(|(page, entry)| Step::Set(page, entry)),
            1 => (0..2048u64, 0..1100u64).prop_map(|(first, count)| Step::Take(first, count)),
            1 => (0..1024u64, 0..512u64, 0..512u64).prop_map(|(from, gap, count)| Step::Move(from, from + count + gap, count)),
            1 => Just(Step::Kept),
        ]
    }

    #[test]
    fn heat_is_the_share_of_pages_that_were_out_and_were_touched() {
        let mut table = Table::default();
        for page in 0..4 {
            let _ = table.set(PageNo(page), Entry::Repeated(page));
        }
        let _ = table.set(PageNo(CHUNK_PAGES), Entry::Poisoned);
        assert_eq!(
            table.sample_heat(),
            [(0, None), (1, None)],
            "nothing was seen yet"
        );
        let _ = table.set(PageNo(2), Entry::UNKNOWN);
        table.note_fault(PageNo(2), true);
        table.note_fault(PageNo(9), false);
        assert_eq!(table.sample_heat(), [(0, Some(0.25)), (1, None)]);
        // Half of the first sample, and the three that are out now.
        assert_eq!(table.sample_heat(), [(0, Some(0.0)), (1, None)]);
    }

    proptest! {
        #[test]
        fn entry_comes_back_as_it_was(entry in entry()) {
            prop_assert_eq!(unpack(pack(&entry)), entry);
        }

        #[test]
        fn table_is_as_a_map_of_entries(steps in proptest::collection::vec(step(), 1..60)) {
            let mut table = Table::default();
            let mut model: BTreeMap<u64, Entry> = BTreeMap::new();
            let take = |model: &mut BTreeMap<u64, Entry>, first: u64, count: u64| {
                let keys: Vec<u64> = model.range(first..first + count).map(|(page, _)| *page).collect();
                keys.into_iter().filter_map(|page| Some((PageNo(page), model.remove(&page)?))).collect::<Vec<_>>()
            };
            for step in steps {
                match step {
                    Step::Set(page, entry) => {
                        let old = if entry == Entry::UNKNOWN { model.remove(&page) } else { model.insert(page, entry) };
                        prop_assert_eq!(table.set(PageNo(page), entry), old.unwrap_or(Entry::UNKNOWN));
                    }
                    Step::Take(first, count) => {
                        prop_assert_eq!(table.take_range(PageNo(first), PageNo(first + count)), take(&mut model, first, count));
                    }
                    Step::Kept => {
                        let mut kept = Vec::new();
                        for entry in model.values_mut() {
                            if let Entry::Local { lives, kept: Some(stored) } = *entry {
                                kept.push(stored);
                                *entry = Entry::Local { lives, kept: None };
                            }
                        }
                        model.retain(|_, entry| *entry != Entry::UNKNOWN);
                        prop_assert_eq!(table.take_kept(usize::MAX), kept);
                    }
                    Step::Move(from, to, count) => {
                        let moving = take(&mut model, from, count);
                        let lost = take(&mut model, to, count);
                        for (page, entry) in moving {
                            model.insert(page.0 - from + to, entry);
                        }
                        prop_assert_eq!(table.move_range(PageNo(from), PageNo(to), count), lost);
                    }
                }
                let far = model.values().filter(|entry| entry.is_far()).count() as u64;
                prop_assert_eq!(table.far_pages(), far);
                let out: Vec<(PageNo, Entry)> =
                    model.iter().filter(|(_, entry)| entry.is_out()).map(|(page, entry)| (PageNo(*page), *entry)).collect();
                prop_assert_eq!(table.counts().out(), out.len() as u64);
                let from = out.get(out.len() / 3).map_or(0, |(page, _)| page.0);
                let rest: Vec<_> = out.into_iter().filter(|(page, _)| page.0 >= from).take(40).collect();
                prop_assert_eq!(table.out_from(PageNo(from), 40), rest);
            }
            let mut all = Vec::new();
            table.each(|page, entry| all.push((page.0, entry)));
            prop_assert_eq!(all, model.into_iter().collect::<Vec<_>>());
        }
    }
}
