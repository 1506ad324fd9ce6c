//! Object tables (section 3.2.3): 4 bytes for each stored object, which say where it is; 5 beyond 2 TB.
//!
//! Owns the encoding of places and the lengths. Knows neither what is in memory nor what is on the device.

use crate::error::Error;
use crate::layout::OBJECT_MAX_BYTES;

/// The first encoded value that names a frame, for 4 and for 5 bytes. Those below are sectors, plus 1.
const FRAMES: [u64; 2] = [0xf000_0000, 0xf0_0000_0000];
const VALUES: [u64; 2] = [1 << 32, 1 << 40];

/// Slots of a table at most: a slot's number has 16 bits.
pub(crate) const SLOTS_MAX: usize = 1 << 16;
/// Slots of a full table of slots that somebody outside has: few enough that neighbours are spread over the
/// shards.
pub(crate) const SLOTS_TABLE_SLOTS: usize = 512;
/// The largest number of a table: 24 bits. They begin at 1, so no object of the log has number 0.
pub(crate) const TABLES_MAX: u32 = (1 << 24) - 1;

const _: () = assert!(OBJECT_MAX_BYTES <= u16::MAX as usize);

/// A stored object: one slot of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) table: u32,
    pub(crate) slot: u32,
}

impl Key {
    /// Its number in the log, from 1 on.
    pub(crate) const fn number(self) -> u64 {
        (self.table as u64) << 16 | self.slot as u64
    }

    /// The object of a number in the log.
    pub(crate) const fn of_number(number: u64) -> Self {
        Self {
            table: (number >> 16) as u32,
            slot: (number & 0xffff) as u32,
        }
    }
}

/// Where an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Nowhere: it was never written, and reads as zeros.
    Empty,
    /// In the log, in this sector.
    At(u64),
    /// In memory, in this frame of the table's shard.
    Frame(u32),
}

/// Whether sectors up to this one need tables of 5 bytes an object.
pub(crate) fn needs_wide(sectors: u64) -> bool {
    sectors >= FRAMES[0]
}

/// Sectors that even 5 bytes cannot name.
pub(crate) const SECTORS_MAX: u64 = FRAMES[1] - 1;

#[derive(Debug)]
struct Entries {
    low: Box<[u32]>,
    /// The fifth bytes, of wide tables.
    high: Option<Box<[u8]>>,
}

impl Entries {
    fn new(slots: usize, is_wide: bool) -> Self {
        Self {
            low: vec![0; slots].into_boxed_slice(),
            high: is_wide.then(|| vec![0; slots].into_boxed_slice()),
        }
    }

    fn get(&self, slot: usize) -> Entry {
        let low = u64::from(self.low[slot]);
        let value = match &self.high {
            Some(high) => low | u64::from(high[slot]) << 32,
            None => low,
        };
        let frames = FRAMES[usize::from(self.high.is_some())];
        match value {
            0 => Entry::Empty,
            frame if frame >= frames => Entry::Frame((frame - frames) as u32),
            sector => Entry::At(sector - 1),
        }
    }

    fn set(&mut self, slot: usize, entry: Entry) {
        let is_wide = usize::from(self.high.is_some());
        let value = match entry {
            Entry::Empty => 0,
            Entry::At(sector) => sector + 1,
            Entry::Frame(frame) => FRAMES[is_wide] + u64::from(frame),
        };
        debug_assert!(value < VALUES[is_wide] && !matches!(entry, Entry::At(s) if s + 1 >= FRAMES[is_wide]));
        self.low[slot] = value as u32;
        if let Some(high) = &mut self.high {
            high[slot] = (value >> 32) as u8;
        }
    }
}

/// Frames that a table's entries can name.
pub(crate) fn frames_max(is_wide: bool) -> u64 {
    let is_wide = usize::from(is_wide);
    (VALUES[is_wide] - FRAMES[is_wide]).min(1 << 32)
}

#[derive(Debug)]
enum Lengths {
    All(u16),
    Each(Box<[u16]>),
}

/// Where a shard is between cuts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Now {
    /// Cuts that were made.
    pub(crate) epoch: u32,
    /// The last of them whose checkpoint is complete.
    pub(crate) committed: u32,
    /// Whether the checkpoint of the last cut is being written.
    pub(crate) is_saving: bool,
    /// Whether it takes all slots, not only those that changed.
    pub(crate) is_whole: bool,
}

/// Which slots changed, for checkpoints.
#[derive(Debug)]
struct Marks {
    /// Before the last cut, and not saved.
    pending: Box<[u64]>,
    /// Since the last cut.
    changed: Box<[u64]>,
    /// The cut that is last here: a table learns of it when it is used.
    epoch: u32,
    /// The last cut that something was saved for.
    saved: u32,
}

impl Marks {
    fn new(slots: usize, epoch: u32) -> Self {
        let none = || vec![0; slots.div_ceil(64)].into_boxed_slice();
        Self {
            pending: none(),
            changed: none(),
            epoch,
            saved: 0,
        }
    }

    /// Notes cuts that were made meanwhile.
    fn turn(&mut self, slots: usize, now: &Now) {
        if self.epoch == now.epoch {
            return;
        }
        self.epoch = now.epoch;
        // What was saved for a checkpoint that failed has to be saved again; which slots is not known.
        if now.is_whole || self.saved > now.committed {
            for (number, word) in self.pending.iter_mut().enumerate() {
                let left = slots - (number * 64).min(slots);
                *word = if left >= 64 { u64::MAX } else { (1 << left) - 1 };
            }
        } else {
            for (pending, changed) in self.pending.iter_mut().zip(&self.changed) {
                *pending |= changed;
            }
        }
        self.changed.fill(0);
    }

    fn grow(&mut self, slots: usize) {
        let words = slots.div_ceil(64);
        for bits in [&mut self.pending, &mut self.changed] {
            let mut more = std::mem::take(bits).into_vec();
            more.resize(words, 0);
            *bits = more.into_boxed_slice();
        }
    }
}

const fn bit(slot: u32) -> (usize, u64) {
    (slot as usize / 64, 1 << (slot % 64))
}

/// The places of some objects. A table of objects of one length does not keep it for each.
#[derive(Debug)]
pub(crate) struct Table {
    entries: Entries,
    lengths: Lengths,
    /// Length of an object whose own is not noted.
    len_bytes: u16,
    marks: Option<Box<Marks>>,
}

impl Table {
    pub(crate) fn new(slots: usize, len_bytes: usize, is_wide: bool) -> Self {
        debug_assert!(slots <= SLOTS_MAX && len_bytes <= OBJECT_MAX_BYTES);
        Self {
            entries: Entries::new(slots, is_wide),
            lengths: Lengths::All(len_bytes as u16),
            len_bytes: len_bytes as u16,
            marks: None,
        }
    }

    /// From now on it is known which slots change.
    pub(crate) fn with_marks(mut self, epoch: u32) -> Self {
        self.marks = Some(Box::new(Marks::new(self.slots(), epoch)));
        self
    }

    /// Memory that this takes.
    pub(crate) fn marks_bytes(slots: usize) -> u64 {
        const RECORDS: u64 = 96;
        (slots.div_ceil(64) * 16) as u64 + RECORDS
    }

    /// The length of new objects.
    pub(crate) fn len_bytes(&self) -> u16 {
        self.len_bytes
    }

    /// Notes that a slot changes now. True if the running checkpoint needs what was there, which is saved
    /// then.
    pub(crate) fn mark(&mut self, slot: u32, now: &Now) -> bool {
        let slots = self.slots();
        let Some(marks) = &mut self.marks else {
            return false;
        };
        marks.turn(slots, now);
        let (word, bit) = bit(slot);
        if slot as usize >= slots {
            return false;
        }
        marks.changed[word] |= bit;
        let is_needed = now.is_saving && marks.pending[word] & bit != 0;
        if is_needed {
            marks.pending[word] &= !bit;
            marks.saved = now.epoch;
        }
        is_needed
    }

    /// Notes that a slot gets only now what it had at the last cut: the running checkpoint has to save it.
    pub(crate) fn mark_before(&mut self, slot: u32, now: &Now) {
        let slots = self.slots();
        if let Some(marks) = &mut self.marks {
            marks.turn(slots, now);
            let (word, bit) = bit(slot);
            if (slot as usize) < slots {
                marks.pending[word] |= bit;
            }
        }
    }

    /// Whether the running checkpoint needs what is in a slot.
    pub(crate) fn is_needed(&mut self, slot: u32, now: &Now) -> bool {
        let slots = self.slots();
        let Some(marks) = &mut self.marks else {
            return false;
        };
        marks.turn(slots, now);
        let (word, bit) = bit(slot);
        now.is_saving && marks.pending.get(word).is_some_and(|pending| pending & bit != 0)
    }

    /// Notes that what is in a slot was saved.
    pub(crate) fn note_saved(&mut self, slot: u32, now: &Now) {
        if let Some(marks) = &mut self.marks {
            let (word, bit) = bit(slot);
            marks.pending[word] &= !bit;
            marks.saved = now.epoch;
        }
    }

    /// The first slot from `from` on that the running checkpoint needs.
    pub(crate) fn next_needed(&mut self, from: usize, now: &Now) -> Option<u32> {
        let slots = self.slots();
        let marks = self.marks.as_mut()?;
        marks.turn(slots, now);
        let first = from / 64;
        for word in first..marks.pending.len() {
            let skipped = if word == first { !0 << (from % 64) } else { !0 };
            let bits = marks.pending[word] & skipped;
            if bits != 0 {
                return Some(word as u32 * 64 + bits.trailing_zeros());
            }
        }
        None
    }

    /// Puts a slot's entry and length in place, from a checkpoint.
    pub(crate) fn restore(&mut self, slot: u32, entry: Entry, len_bytes: Option<usize>) -> bool {
        self.set(slot, entry);
        len_bytes.is_some_and(|len| self.set_len(slot, len))
    }

    /// Puts entries in place from a slot on, as they are encoded here and in checkpoints. False if one is
    /// beyond `sectors`, or they do not fit this table.
    pub(crate) fn restore_values(&mut self, first: usize, values: &[[u8; 4]], sectors: u64) -> bool {
        if self.entries.high.is_some() || self.has_lengths() {
            return false;
        }
        let Some(low) = first
            .checked_add(values.len())
            .and_then(|end| self.entries.low.get_mut(first..end))
        else {
            return false;
        };
        let mut largest = 0;
        for (entry, value) in low.iter_mut().zip(values) {
            *entry = u32::from_le_bytes(*value);
            largest = largest.max(*entry);
        }
        u64::from(largest) <= sectors
    }

    /// Empties these slots.
    pub(crate) fn empty(&mut self, slots: std::ops::Range<usize>) {
        for slot in slots.start..slots.end.min(self.slots()) {
            self.entries.set(slot, Entry::Empty);
        }
    }

    /// Empties the slots from one on.
    pub(crate) fn empty_from(&mut self, first: usize) {
        self.empty(first..self.slots());
    }

    /// Calls `each` with sector and length of what is in the log alone.
    pub(crate) fn for_each_stored(&self, mut each: impl FnMut(u64, usize)) {
        if let (Lengths::All(len), None) = (&self.lengths, &self.entries.high) {
            for low in self
                .entries
                .low
                .iter()
                .filter(|low| (1..FRAMES[0] as u32).contains(*low))
            {
                each(u64::from(*low) - 1, usize::from(*len));
            }
            return;
        }
        for slot in 0..self.slots() as u32 {
            if let Some((Entry::At(sector), len)) = self.get(slot) {
                each(sector, len);
            }
        }
    }

    /// Memory of a table of that many slots, of objects of one length; with what the allocator keeps of it.
    pub(crate) fn memory_bytes(slots: usize, is_wide: bool) -> u64 {
        const RECORDS: usize = 192;
        (slots * if is_wide { 5 } else { 4 } + RECORDS) as u64
    }

    /// Memory of the lengths, once they differ.
    pub(crate) fn lengths_bytes(slots: usize) -> u64 {
        (slots * size_of::<u16>()) as u64
    }

    pub(crate) fn slots(&self) -> usize {
        self.entries.low.len()
    }

    pub(crate) fn has_lengths(&self) -> bool {
        matches!(self.lengths, Lengths::Each(_))
    }

    /// Where an object is and how long, if the table has the slot.
    pub(crate) fn get(&self, slot: u32) -> Option<(Entry, usize)> {
        let slot = slot as usize;
        if slot >= self.slots() {
            return None;
        }
        let len = match &self.lengths {
            Lengths::All(len) => *len,
            Lengths::Each(lengths) => lengths[slot],
        };
        Some((self.entries.get(slot), usize::from(len)))
    }

    pub(crate) fn set(&mut self, slot: u32, entry: Entry) {
        self.entries.set(slot as usize, entry);
    }

    /// Notes an object's length. True if the table keeps lengths from now on.
    pub(crate) fn set_len(&mut self, slot: u32, len_bytes: usize) -> bool {
        let slots = self.slots();
        match &mut self.lengths {
            Lengths::All(all) if usize::from(*all) == len_bytes => false,
            Lengths::All(all) => {
                let mut each = vec![*all; slots].into_boxed_slice();
                each[slot as usize] = len_bytes as u16;
                self.lengths = Lengths::Each(each);
                true
            }
            Lengths::Each(each) => {
                each[slot as usize] = len_bytes as u16;
                false
            }
        }
    }

    /// Gives the table of an array more slots.
    pub(crate) fn grow(&mut self, slots: usize, now: &Now) {
        debug_assert!(slots >= self.slots() && !self.has_lengths());
        let before = self.slots();
        if let Some(marks) = &mut self.marks {
            // No running checkpoint needs the new slots.
            marks.turn(before, now);
            marks.grow(slots);
        }
        let mut entries = Entries::new(slots, self.entries.high.is_some());
        entries.low[..before].copy_from_slice(&self.entries.low);
        if let (Some(new), Some(old)) = (&mut entries.high, &self.entries.high) {
            new[..before].copy_from_slice(old);
        }
        self.entries = entries;
    }
}

/// Checks the length of an object.
pub(crate) fn check_len(len_bytes: usize) -> Result<(), Error> {
    match len_bytes {
        0 => Err(Error::ZeroSize),
        1..=OBJECT_MAX_BYTES => Ok(()),
        _ => Err(Error::TooLarge {
            len_bytes,
            max_bytes: OBJECT_MAX_BYTES,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entries_give_back_what_was_set(
            is_wide in any::<bool>(), values in proptest::collection::vec(any::<(u8, u64)>(), 1..50)
        ) {
            let slots = values.len();
            let mut table = Table::new(slots, 128, is_wide);
            let sectors = if is_wide { SECTORS_MAX } else { FRAMES[0] - 1 };
            let entry = |(kind, value): (u8, u64)| match kind % 3 {
                0 => Entry::Empty,
                1 => Entry::At(value % sectors),
                _ => Entry::Frame((value % frames_max(is_wide)) as u32),
            };
            for (slot, value) in values.iter().enumerate() {
                table.set(slot as u32, entry(*value));
            }
            table.grow(slots * 2, &Now::default());
            for (slot, value) in values.iter().enumerate() {
                prop_assert_eq!(table.get(slot as u32), Some((entry(*value), 128)));
            }
            prop_assert_eq!(table.get(slots as u32), Some((Entry::Empty, 128)));
            prop_assert_eq!(table.get(2 * slots as u32), None);
        }
    }

    #[test]
    fn four_bytes_name_two_terabytes() {
        assert!(!needs_wide(2_000_000_000_000 / 512));
        assert!(needs_wide((2 << 40) / 512));
    }

    #[test]
    fn lengths_are_kept_only_where_they_differ() {
        let mut table = Table::new(8, 100, false);
        assert!(!table.set_len(3, 100));
        assert!(table.set_len(4, 101));
        assert!(!table.set_len(5, 102));
        let lens: Vec<_> = (3..7)
            .filter_map(|slot| table.get(slot))
            .map(|(_, len)| len)
            .collect();
        assert_eq!(lens, [100, 101, 102, 100]);
    }

    #[test]
    fn lengths_are_checked_at_their_bounds() {
        assert!(matches!(check_len(0), Err(Error::ZeroSize)));
        assert!(check_len(1).is_ok() && check_len(OBJECT_MAX_BYTES).is_ok());
        assert!(matches!(
            check_len(OBJECT_MAX_BYTES + 1),
            Err(Error::TooLarge { .. })
        ));
    }
}
