//! Stored objects by number, for an allocator that names them itself, and memory that is counted with the
//! heap's.
//!
//! Owns tables of its own and what is promised to their slots. Decides neither who has a slot nor how long.

use crate::checkpoint::{NOTE_MAX_BYTES, SlotsRecord};
use crate::error::Error;
use crate::file::CheckpointFile;
use crate::heap::{Config, FarHeap, SlotsHeap};
use crate::table::{self, Key, SLOTS_TABLE_SLOTS as TABLE_SLOTS};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

/// A fixed number of slots for stored objects, 4 bytes each, and a bit. A slot that was not occupied takes no
/// room in the store. Dropping this drops all objects, without I/O.
pub struct FarSlots {
    heap: FarHeap,
    /// Its name in checkpoints; 0 where there are none.
    handle: u64,
    len_bytes: u32,
    tables: Vec<u32>,
    slots: usize,
    occupied: Box<[AtomicU64]>,
}

impl FarSlots {
    fn new(heap: &FarHeap, slots: usize, len_bytes: usize) -> Result<Self, Error> {
        table::check_len(len_bytes)?;
        let handle = heap.core().name_slots()?;
        let words = slots.div_ceil(64);
        let taken = heap.core().take_memory((words * 8) as u64)?;
        taken.keep();
        let mut all = Self {
            heap: heap.clone(),
            handle,
            len_bytes: len_bytes as u32,
            tables: Vec::with_capacity(slots.div_ceil(TABLE_SLOTS)),
            slots,
            occupied: (0..words).map(|_| AtomicU64::new(0)).collect(),
        };
        // Dropped, with what is there already, where that fails.
        for first in (0..slots).step_by(TABLE_SLOTS) {
            let count = TABLE_SLOTS.min(slots - first);
            let number = heap.core().new_table(count, len_bytes)?;
            all.tables.push(number);
        }
        Ok(all)
    }

    /// Slots of a restored heap.
    pub(crate) fn restored(heap: &FarHeap, record: &SlotsRecord) -> Self {
        let slots = record.slots as usize;
        let all = |word: usize| match slots - word * 64 {
            64.. => u64::MAX,
            left => (1 << left) - 1,
        };
        let word = |word: usize| match &record.occupied {
            Some(words) => words.get(word).copied().unwrap_or_default(),
            None => all(word),
        };
        Self {
            heap: heap.clone(),
            handle: record.handle,
            len_bytes: record.len_bytes,
            tables: record.tables.clone(),
            slots,
            occupied: (0..slots.div_ceil(64))
                .map(|at| AtomicU64::new(word(at)))
                .collect(),
        }
    }

    /// What a checkpoint is to have of these slots, as they are now, and `note` of their owner with it.
    ///
    /// # Errors
    /// `TooLarge` for a long note.
    pub fn record(&self, note: Vec<u8>) -> Result<SlotsRecord, Error> {
        if note.len() > NOTE_MAX_BYTES {
            return Err(Error::TooLarge {
                len_bytes: note.len(),
                max_bytes: NOTE_MAX_BYTES,
            });
        }
        let words: Vec<u64> = self
            .occupied
            .iter()
            .map(|word| word.load(Ordering::Acquire))
            .collect();
        let count: usize = words.iter().map(|word| word.count_ones() as usize).sum();
        Ok(SlotsRecord {
            handle: self.handle,
            len_bytes: self.len_bytes,
            slots: self.slots as u64,
            tables: self.tables.clone(),
            occupied: (count != self.slots).then_some(words),
            note,
        })
    }

    /// Slots.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    fn key(&self, slot: usize) -> Result<Key, Error> {
        if slot >= self.slots {
            return Err(Error::OutOfRange {
                index: slot,
                len: self.slots,
            });
        }
        Ok(Key {
            table: self.tables[slot / TABLE_SLOTS],
            slot: (slot % TABLE_SLOTS) as u32,
        })
    }

    /// Whether a slot has an object.
    #[must_use]
    pub fn is_occupied(&self, slot: usize) -> bool {
        slot < self.slots && self.occupied[slot / 64].load(Ordering::Acquire) & 1 << (slot % 64) != 0
    }

    /// Puts an object of `len_bytes` zeros into a slot. False where one is there: it stays as it is. Nobody
    /// else may occupy or vacate the same slot meanwhile.
    ///
    /// # Errors
    /// `ZeroSize`, `TooLarge`, `OutOfRange`, `Full`.
    pub fn occupy(&self, slot: usize, len_bytes: usize) -> Result<bool, Error> {
        table::check_len(len_bytes)?;
        let key = self.key(slot)?;
        if self.is_occupied(slot) {
            return Ok(false);
        }
        self.heap.core().promise(key, len_bytes)?;
        self.occupied[slot / 64].fetch_or(1 << (slot % 64), Ordering::AcqRel);
        Ok(true)
    }

    /// Drops the object of a slot. False where there is none. No I/O.
    pub fn vacate(&self, slot: usize) -> bool {
        let Ok(key) = self.key(slot) else { return false };
        let bit = 1 << (slot % 64);
        if self.occupied[slot / 64].fetch_and(!bit, Ordering::AcqRel) & bit == 0 {
            return false;
        }
        self.heap.core().unpromise(key);
        true
    }

    /// Bytes of an object.
    ///
    /// # Errors
    /// `OutOfRange`, `NotAllocated`.
    pub fn len_bytes(&self, slot: usize) -> Result<usize, Error> {
        let key = self.occupied_key(slot)?;
        self.heap.core().stored_bytes(key)
    }

    fn occupied_key(&self, slot: usize) -> Result<Key, Error> {
        let key = self.key(slot)?;
        if !self.is_occupied(slot) {
            return Err(Error::NotAllocated(key.number()));
        }
        Ok(key)
    }

    /// Fills the beginning of `bytes` from an object, from `offset_bytes` on, and gives how many there are.
    ///
    /// # Errors
    /// `OutOfRange`, `NotAllocated`; `Io`, `Damaged`, with `bytes` as they were.
    pub fn read(&self, slot: usize, offset_bytes: usize, bytes: &mut [u8]) -> Result<usize, Error> {
        let key = self.occupied_key(slot)?;
        self.heap.core().read_with(key, |data| {
            let data = data.get(offset_bytes..).unwrap_or_default();
            let len = data.len().min(bytes.len());
            bytes[..len].copy_from_slice(&data[..len]);
            len
        })
    }

    /// As [`Self::read`] where that needs no device. `None` otherwise, and where there is no object.
    pub fn read_in_memory(&self, slot: usize, offset_bytes: usize, bytes: &mut [u8]) -> Option<usize> {
        let key = self.occupied_key(slot).ok()?;
        self.heap.core().read_in_memory(key, |data| {
            let data = data.get(offset_bytes..).unwrap_or_default();
            let len = data.len().min(bytes.len());
            bytes[..len].copy_from_slice(&data[..len]);
            len
        })
    }

    /// Stores the beginning of `bytes` into an object, from `offset_bytes` on, as much as it has room for.
    ///
    /// # Errors
    /// `OutOfRange`, `NotAllocated`, `MemoryLimit`, `Io`, `Damaged`, `Full`, `Held`: nothing is stored.
    pub fn write(&self, slot: usize, offset_bytes: usize, bytes: &[u8]) -> Result<(), Error> {
        self.write_of(slot, offset_bytes, bytes, u32::MAX)
    }

    /// The same for bytes of an epoch ([`FarHeap::epoch`]): where a cut ended that epoch, its checkpoint has
    /// them, as if they had been stored before. Nothing else may have changed the object since the cut.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_of(&self, slot: usize, offset_bytes: usize, bytes: &[u8], epoch: u32) -> Result<(), Error> {
        let key = self.occupied_key(slot)?;
        self.heap.core().write_of(key, offset_bytes, bytes, epoch)
    }
}

impl SlotsHeap {
    /// So many empty slots; `len_bytes` is the length that most of them will have.
    ///
    /// # Errors
    /// `ZeroSize`, `TooLarge`, `TooMany`, `MemoryLimit`; `Io` where the device does not take what would leave
    /// memory.
    pub fn slots(&self, slots: usize, len_bytes: usize) -> Result<FarSlots, Error> {
        FarSlots::new(self, slots, len_bytes)
    }
}

/// Slots of a restored heap.
#[derive(Debug)]
pub struct RestoredSlots {
    /// The slots, with their objects.
    pub slots: FarSlots,
    /// What their owner said of them.
    pub note: Vec<u8>,
    /// Lengths of their objects, the shortest and the longest; an empty range where there is none.
    pub lens_bytes: RangeInclusive<usize>,
}

/// Heaps whose slots somebody outside has.
impl FarHeap {
    /// As [`Self::restore`], with the slots of the checkpoint.
    ///
    /// # Errors
    /// As [`Self::restore`].
    pub fn restore_for_slots(
        file: impl CheckpointFile + 'static,
        schema_tag: u64,
        newer_objects: usize,
        config: &Config,
    ) -> Result<(SlotsHeap, Vec<u8>, Vec<RestoredSlots>), Error> {
        let (heap, record, slots) = Self::restore_with_slots(file, schema_tag, newer_objects, config)?;
        let slots = slots.into_iter().map(|(record, lens_bytes)| RestoredSlots {
            slots: FarSlots::restored(&heap, &record),
            note: record.note,
            lens_bytes,
        });
        let slots = slots.collect();
        Ok((SlotsHeap::of_owner(heap), record, slots))
    }
}

impl Drop for FarSlots {
    fn drop(&mut self) {
        for word in 0..self.occupied.len() {
            let mut bits = self.occupied[word].load(Ordering::Acquire);
            while bits != 0 {
                self.vacate(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
        for number in self.tables.drain(..) {
            self.heap.core().end_table(number);
        }
        self.heap.core().end_slots(self.handle);
        self.heap.core().uncount_memory((self.occupied.len() * 8) as u64);
    }
}

impl std::fmt::Debug for FarSlots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FarSlots")
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

/// Memory of somebody else that counts against the heap's limit. Given back when dropped.
#[derive(Debug)]
pub struct Reserved {
    heap: FarHeap,
    bytes: u64,
}

impl FarHeap {
    /// Takes memory from the limit, for somebody else.
    ///
    /// # Errors
    /// `MemoryLimit`; `Io`, `Full` where what would leave memory is not taken by the device.
    pub fn reserve(&self, bytes: u64) -> Result<Reserved, Error> {
        self.core().take_memory(bytes)?.keep();
        Ok(Reserved {
            heap: self.clone(),
            bytes,
        })
    }
}

impl Reserved {
    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes more or gives back, so that it is so much.
    ///
    /// # Errors
    /// As [`FarHeap::reserve`]; it is as before then.
    pub fn resize(&mut self, bytes: u64) -> Result<(), Error> {
        if let Some(more) = bytes.checked_sub(self.bytes) {
            self.heap.core().take_memory(more)?.keep();
        }
        self.shrink_or_note(bytes);
        Ok(())
    }

    /// The same for memory that is in use already: what is above the limit leaves the next time.
    pub fn force(&mut self, bytes: u64) {
        if let Some(more) = bytes.checked_sub(self.bytes) {
            self.heap.core().count_memory(more);
        }
        self.shrink_or_note(bytes);
    }

    fn shrink_or_note(&mut self, bytes: u64) {
        if let Some(less) = self.bytes.checked_sub(bytes) {
            self.heap.core().uncount_memory(less);
        }
        self.bytes = bytes;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.heap.core().uncount_memory(self.bytes);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Config;
    use varve_far::Dram;

    fn heap() -> FarHeap {
        FarHeap::new(Dram::new(16), &Config::new(4 << 20)).unwrap()
    }

    #[test]
    fn slots_hold_what_was_written_and_give_everything_back() {
        let heap = heap();
        let before = heap.stats();
        let slots = SlotsHeap::new(heap.clone()).unwrap().slots(1500, 100).unwrap();
        assert!(matches!(
            slots.read(7, 0, &mut [0; 4]),
            Err(Error::NotAllocated(_))
        ));
        for slot in 0..1500 {
            assert!(slots.occupy(slot, 100 + slot % 50).unwrap());
            assert!(!slots.occupy(slot, 100).unwrap());
            slots.write(slot, 0, &vec![slot as u8; 300]).unwrap();
        }
        slots.write(7, 3, &[9, 9]).unwrap();
        assert_eq!(slots.read_in_memory(7, 0, &mut [0; 5]), Some(5));
        heap.evict_all().unwrap();
        assert_eq!(slots.read_in_memory(7, 0, &mut [0; 5]), None);
        let mut bytes = [0; 300];
        for slot in (0..1500).filter(|slot| *slot != 7) {
            assert_eq!(slots.read(slot, 0, &mut bytes).unwrap(), 100 + slot % 50);
            assert!(bytes[..100].iter().all(|byte| *byte == slot as u8));
        }
        assert_eq!(slots.read(7, 2, &mut bytes[..4]).unwrap(), 4);
        assert_eq!(bytes[..4], [7, 9, 9, 7]);
        assert!(slots.vacate(7) && !slots.vacate(7) && !slots.vacate(1500));
        assert!(slots.occupy(7, 60).unwrap());
        assert_eq!(slots.read(7, 0, &mut bytes).unwrap(), 60);
        assert!(bytes[..60].iter().all(|byte| *byte == 0));
        assert!(matches!(slots.occupy(1500, 1), Err(Error::OutOfRange { .. })));
        drop(slots);
        heap.evict_all().unwrap();
        let after = heap.stats();
        assert_eq!(after.log.promised_bytes, before.log.promised_bytes);
        assert_eq!(after.cached, 0);
    }

    #[test]
    fn reserved_memory_counts_until_it_is_given_back() {
        let heap = heap();
        let before = heap.stats().memory_used_bytes;
        let mut held = heap.reserve(1000).unwrap();
        held.resize(3000).unwrap();
        assert_eq!(heap.stats().memory_used_bytes, before + 3000);
        assert!(held.resize(64 << 20).is_err());
        held.force(500);
        assert_eq!(heap.stats().memory_used_bytes, before + held.bytes());
        drop(held);
        assert_eq!(heap.stats().memory_used_bytes, before);
    }
}
