//! Which stored object a page of addresses belongs to (the seed's address translation module, section 3.2.3).
//!
//! A range is neighbouring pages with slots for stored objects of their own. A page holds one object, or a
//! page of it; objects of less than 128 bytes have a page each, and lie several in one stored object.

use crate::error::Error;
use crate::sys::PAGE_BYTES;
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::ops::Range as Span;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_far_objects::{FarSlots, SlotsHeap, SlotsRecord};

/// Addresses of a heap at most: page numbers in it have 32 bits.
pub(crate) const ADDRESS_MAX_BYTES: u64 = 8 << 40;
/// Bytes that a stored object has at least.
const BATCH_BYTES: usize = 128;
/// Sizes of batched objects are rounded up to this.
const SMALL_STEP_BYTES: usize = 4;
/// Width of the pools.
const STEP_BYTES: usize = 512;

/// How objects lie in a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Shape {
    /// Batches of objects of so many bytes, a page for each object.
    Small(u32),
    /// Objects of so many steps of 0.5 KiB at most, in pages of their own.
    Large(u32),
    /// Pages.
    Pages,
}

impl Shape {
    /// The shape for objects of a size.
    pub(crate) fn of(size_bytes: usize) -> Self {
        if size_bytes < BATCH_BYTES {
            Self::Small(size_bytes.next_multiple_of(SMALL_STEP_BYTES) as u32)
        } else {
            Self::Large(size_bytes.div_ceil(STEP_BYTES) as u32)
        }
    }

    /// Pages of one object.
    pub(crate) fn stride_pages(self) -> u64 {
        match self {
            Self::Small(_) | Self::Pages => 1,
            Self::Large(steps) => (steps as usize * STEP_BYTES).div_ceil(PAGE_BYTES) as u64,
        }
    }

    /// Objects that one stored object holds.
    pub(crate) fn per_batch(self) -> usize {
        match self {
            Self::Small(len) => BATCH_BYTES.div_ceil(len as usize),
            Self::Large(_) | Self::Pages => 1,
        }
    }

    /// Bytes of the stored objects of one object, one after the other.
    pub(crate) fn stored_bytes(self, size_bytes: usize) -> impl Iterator<Item = usize> {
        let whole = match self {
            Self::Small(len) => len as usize * self.per_batch(),
            Self::Large(_) => size_bytes,
            Self::Pages => PAGE_BYTES,
        };
        (0..whole.div_ceil(PAGE_BYTES)).map(move |page| (whole - page * PAGE_BYTES).min(PAGE_BYTES))
    }

    /// Length that most stored objects have, for the tables.
    fn typical_bytes(self) -> usize {
        match self {
            Self::Small(len) => len as usize * self.per_batch(),
            Self::Large(steps) => (steps as usize * STEP_BYTES).min(PAGE_BYTES),
            Self::Pages => PAGE_BYTES,
        }
    }
}

/// What is at a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) slot: usize,
    pub(crate) offset: usize,
    /// Bytes of the object on this page at most.
    pub(crate) len: usize,
}

/// Neighbouring pages of one shape.
#[derive(Debug)]
pub(crate) struct Range {
    first_page: u64,
    objects: usize,
    shape: Shape,
    slots: FarSlots,
    /// Objects in use, of batches; slots say it otherwise.
    used: Option<Box<[AtomicU64]>>,
}

impl Range {
    /// A range of objects that are not there yet. `len_bytes` is the length of their stored objects, if it
    /// is known.
    pub(crate) fn new(
        heap: &SlotsHeap,
        first_page: u64,
        objects: usize,
        shape: Shape,
        len_bytes: Option<usize>,
    ) -> Result<Self, Error> {
        let slots = Self::slots_of(objects, shape);
        let words = objects.div_ceil(64);
        Ok(Self {
            first_page,
            objects,
            shape,
            slots: heap.slots(slots, len_bytes.unwrap_or(shape.typical_bytes()))?,
            used: (shape.per_batch() > 1).then(|| (0..words).map(|_| AtomicU64::new(0)).collect()),
        })
    }

    /// A range of a checkpoint; `is_array`: all its objects are allocated. `None` if its slots and objects do
    /// not agree.
    pub(crate) fn restored(
        first_page: u64,
        objects: usize,
        shape: Shape,
        slots: FarSlots,
        used: Option<Vec<u64>>,
        is_array: bool,
    ) -> Option<Self> {
        let per_batch = shape.per_batch();
        if slots.slots() != Self::slots_of(objects, shape) {
            return None;
        }
        let all = |word: usize| match objects - word * 64 {
            64.. => u64::MAX,
            left => (1 << left) - 1,
        };
        let used = (per_batch > 1).then(|| {
            let words = used.unwrap_or_else(|| (0..objects.div_ceil(64)).map(all).collect());
            words.into_iter().map(AtomicU64::new).collect::<Box<[_]>>()
        });
        let range = Self {
            first_page,
            objects,
            shape,
            slots,
            used,
        };
        let is_sound = (0..objects).all(|object| match shape {
            Shape::Small(_) => {
                range.slots.is_occupied(object / per_batch) || !(is_array || range.is_used(object))
            }
            Shape::Large(_) => range.is_whole(object, is_array),
            // Blocks say which of them are used.
            Shape::Pages => true,
        });
        is_sound.then_some(range)
    }

    /// Whether an object with pages of its own has all of its stored objects, with lengths of its shape, or
    /// none of them, unless it is allocated.
    fn is_whole(&self, object: usize, is_allocated: bool) -> bool {
        let stride = self.shape.stride_pages() as usize;
        let mut slots = object * stride..(object + 1) * stride;
        if !slots.clone().any(|slot| self.slots.is_occupied(slot)) {
            return !is_allocated;
        }
        slots.all(|slot| {
            let len = self.slots.len_bytes(slot).unwrap_or_default();
            match slot % stride + 1 < stride {
                true => len == PAGE_BYTES,
                false => Shape::of((stride - 1) * PAGE_BYTES + len) == self.shape,
            }
        })
    }

    /// Stored objects of a range.
    fn slots_of(objects: usize, shape: Shape) -> usize {
        match shape.per_batch() {
            1 => objects * shape.stride_pages() as usize,
            per_batch => objects.div_ceil(per_batch),
        }
    }

    /// What a checkpoint is to have of its stored objects, with a note.
    pub(crate) fn record(&self, note: Vec<u8>) -> Result<SlotsRecord, Error> {
        Ok(self.slots.record(note)?)
    }

    /// Which objects are allocated, where slots do not say it.
    pub(crate) fn used(&self) -> Option<Vec<u64>> {
        let words = self.used.as_ref()?.iter();
        Some(words.map(|word| word.load(Ordering::Acquire)).collect())
    }

    /// Whether a page has its stored object.
    pub(crate) fn is_stored(&self, page: u64) -> bool {
        self.place(page)
            .is_some_and(|place| self.slots.is_occupied(place.slot))
    }

    /// The pages whose objects lie in the same stored objects as those of some pages.
    pub(crate) fn batches_of(&self, pages: Span<u64>) -> Span<u64> {
        let per_batch = self.shape.per_batch() as u64;
        let at = |page: u64| page.saturating_sub(self.first_page);
        let end = (at(pages.end).next_multiple_of(per_batch)).min(self.pages());
        self.first_page + at(pages.start) / per_batch * per_batch..self.first_page + end
    }

    pub(crate) fn first_page(&self) -> u64 {
        self.first_page
    }

    pub(crate) fn objects(&self) -> usize {
        self.objects
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn pages(&self) -> u64 {
        self.objects as u64 * self.shape.stride_pages()
    }

    /// Pages of an object.
    pub(crate) fn pages_of(&self, object: usize) -> Span<u64> {
        let stride = self.shape.stride_pages();
        let first = self.first_page + object as u64 * stride;
        first..first + stride
    }

    /// The object whose first byte is at the address.
    pub(crate) fn object_at(&self, address: u64) -> Option<usize> {
        let relative = (address / PAGE_BYTES as u64).checked_sub(self.first_page)?;
        let stride = self.shape.stride_pages();
        let is_start = address.is_multiple_of(PAGE_BYTES as u64) && relative.is_multiple_of(stride);
        let object = (relative / stride) as usize;
        (is_start && object < self.objects).then_some(object)
    }

    /// Stored object of a page.
    fn place(&self, page: u64) -> Option<Place> {
        let relative = usize::try_from(page.checked_sub(self.first_page)?).ok()?;
        if relative as u64 >= self.pages() {
            return None;
        }
        Some(match self.shape {
            Shape::Small(len) => Place {
                slot: relative / self.shape.per_batch(),
                offset: relative % self.shape.per_batch() * len as usize,
                len: len as usize,
            },
            Shape::Large(_) | Shape::Pages => Place {
                slot: relative,
                offset: 0,
                len: PAGE_BYTES,
            },
        })
    }

    /// Whether a page is of an object that is allocated.
    pub(crate) fn has(&self, page: u64) -> bool {
        let Some(place) = self.place(page) else {
            return false;
        };
        match &self.used {
            Some(used) => is_set(used, (page - self.first_page) as usize),
            None => self.slots.is_occupied(place.slot),
        }
    }

    /// Whether an object is allocated.
    pub(crate) fn is_used(&self, object: usize) -> bool {
        object < self.objects && self.has(self.pages_of(object).start)
    }

    /// Puts an object there, of zeros if `true` comes back; it shares its stored object with others
    /// otherwise, or was there already. Nobody else may change which objects of the range are there.
    pub(crate) fn occupy(&self, object: usize, size_bytes: usize) -> Result<bool, Error> {
        if let Some(used) = &self.used {
            let slot = object / self.shape.per_batch();
            let stored = self.shape.stored_bytes(size_bytes).next().unwrap_or_default();
            let is_new = self.slots.occupy(slot, stored)?;
            used[object / 64].fetch_or(1 << (object % 64), Ordering::AcqRel);
            return Ok(is_new);
        }
        let first = object * self.shape.stride_pages() as usize;
        let mut is_new = true;
        for (page, len) in self.shape.stored_bytes(size_bytes).enumerate() {
            match self.slots.occupy(first + page, len) {
                Ok(is_of_page) => is_new &= is_of_page,
                Err(error) => {
                    for slot in first..first + page {
                        self.slots.vacate(slot);
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(is_new)
    }

    /// Takes an object away, whose pages are out of memory.
    pub(crate) fn vacate(&self, object: usize) {
        let Some(used) = &self.used else {
            let stride = self.shape.stride_pages() as usize;
            let first = object * stride;
            for slot in first..first + stride {
                self.slots.vacate(slot);
            }
            return;
        };
        used[object / 64].fetch_and(!(1 << (object % 64)), Ordering::AcqRel);
        let per_batch = self.shape.per_batch();
        let slot = object / per_batch;
        let mut others = slot * per_batch..((slot + 1) * per_batch).min(self.objects);
        if !others.any(|other| is_set(used, other)) {
            self.slots.vacate(slot);
        }
    }

    /// Reads the object of a page to the beginning of `bytes`, and gives its length there.
    pub(crate) fn read(&self, page: u64, bytes: &mut [u8]) -> Result<usize, Error> {
        let place = self.place(page).ok_or_else(|| not_allocated(page))?;
        let len = place.len.min(bytes.len());
        Ok(self.slots.read(place.slot, place.offset, &mut bytes[..len])?)
    }

    /// As [`Self::read`] where that needs no device.
    pub(crate) fn read_in_memory(&self, page: u64, bytes: &mut [u8]) -> Option<usize> {
        let place = self.place(page)?;
        let len = place.len.min(bytes.len());
        self.slots
            .read_in_memory(place.slot, place.offset, &mut bytes[..len])
    }

    /// Bytes of the object on a page.
    pub(crate) fn len_on(&self, page: u64) -> Result<usize, Error> {
        let place = self.place(page).ok_or_else(|| not_allocated(page))?;
        let stored = self.slots.len_bytes(place.slot)?;
        Ok(stored.saturating_sub(place.offset).min(place.len))
    }

    /// Stores the object of a page.
    pub(crate) fn write(&self, page: u64, bytes: &[u8]) -> Result<(), Error> {
        self.write_of(page, bytes, u32::MAX)
    }

    /// The same for bytes of an epoch, that a cut may have ended since.
    pub(crate) fn write_of(&self, page: u64, bytes: &[u8], epoch: u32) -> Result<(), Error> {
        let place = self.place(page).ok_or_else(|| not_allocated(page))?;
        let bytes = &bytes[..bytes.len().min(place.len)];
        Ok(self.slots.write_of(place.slot, place.offset, bytes, epoch)?)
    }

    /// Memory of the records here, beside the slots'; the page tables above the last level, too.
    pub(crate) fn memory_bytes(&self) -> u64 {
        Self::memory_bytes_of(self.objects, self.shape)
    }

    /// The same of a range that is not there yet.
    pub(crate) fn memory_bytes_of(objects: usize, shape: Shape) -> u64 {
        const RECORD_BYTES: u64 = 256;
        /// Addresses of 1 GiB, in pages, have a page of tables.
        const PAGES_OF_GIB: u64 = 1 << 18;
        let used = match shape.per_batch() {
            1 => 0,
            _ => objects.div_ceil(64) as u64 * 8,
        };
        let pages = objects as u64 * shape.stride_pages();
        RECORD_BYTES + used + pages * PAGE_BYTES as u64 / PAGES_OF_GIB
    }
}

fn is_set(bits: &[AtomicU64], at: usize) -> bool {
    bits.get(at / 64)
        .is_some_and(|word| word.load(Ordering::Acquire) & 1 << (at % 64) != 0)
}

fn not_allocated(page: u64) -> Error {
    Error::NotAllocated(page as usize * PAGE_BYTES)
}

/// All ranges, by address.
#[derive(Debug, Default)]
pub(crate) struct Ranges(RwLock<BTreeMap<u64, Arc<Range>>>);

impl Ranges {
    pub(crate) fn add(&self, range: Arc<Range>) {
        self.0.write().insert(range.first_page, range);
    }

    pub(crate) fn remove(&self, range: &Range) {
        self.0.write().remove(&range.first_page);
    }

    /// The range of a page.
    pub(crate) fn get(&self, page: u64) -> Option<Arc<Range>> {
        let all = self.0.read();
        let (_, range) = all.range(..=page).next_back()?;
        (page < range.first_page + range.pages()).then(|| Arc::clone(range))
    }

    /// The range that begins at a page.
    pub(crate) fn get_first(&self, page: u64) -> Option<Arc<Range>> {
        self.0.read().get(&page).cloned()
    }

    /// The range of a page, if that is of an allocated object.
    pub(crate) fn of_object(&self, page: u64) -> Option<Arc<Range>> {
        self.get(page).filter(|range| range.has(page))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use varve_far::Dram;
    use varve_far_objects::{Config, FarHeap};

    fn heap() -> SlotsHeap {
        SlotsHeap::new(FarHeap::new(Dram::new(16), &Config::new(4 << 20)).unwrap()).unwrap()
    }

    #[test]
    fn pages_of_small_objects_share_a_stored_object() {
        let range = Range::new(&heap(), 100, 10, Shape::of(50), None).unwrap();
        assert_eq!(range.shape(), Shape::Small(52));
        assert!(range.occupy(0, 50).unwrap());
        assert!(!range.occupy(1, 50).unwrap());
        assert!(range.occupy(3, 50).unwrap());
        range.write(100, &[1; 52]).unwrap();
        range.write(101, &[2; 4096]).unwrap();
        let mut bytes = [9; 4096];
        assert_eq!(range.read(100, &mut bytes).unwrap(), 52);
        assert_eq!(bytes[..53], [[1; 52].as_slice(), &[9]].concat());
        assert_eq!(range.read(101, &mut bytes).unwrap(), 52);
        assert_eq!(bytes[..52], [2; 52]);
        assert!(range.is_used(0) && !range.is_used(2) && range.is_used(3) && !range.is_used(10));
        range.vacate(0);
        assert_eq!(range.read(101, &mut bytes).unwrap(), 52);
        range.vacate(1);
        assert!(range.read(101, &mut bytes).is_err(), "the last of its batch");
    }

    #[test]
    fn pages_of_one_stored_object_are_found_from_each_of_them() {
        let range = Range::new(&heap(), 100, 10, Shape::of(50), None).unwrap();
        assert_eq!(range.batches_of(101..102), 100..103);
        assert_eq!(range.batches_of(102..104), 100..106);
        assert_eq!(range.batches_of(109..110), 109..110);
        let pages = Range::new(&heap(), 8, 3, Shape::of(9000), None).unwrap();
        assert_eq!(pages.batches_of(11..14), 11..14);
    }

    #[test]
    fn large_object_has_its_bytes_on_pages_one_after_the_other() {
        let range = Range::new(&heap(), 8, 3, Shape::of(9000), None).unwrap();
        assert_eq!((range.shape().stride_pages(), range.pages()), (3, 9));
        assert!(range.occupy(1, 9000).unwrap());
        let lens: Vec<_> = (11..14).map(|page| range.len_on(page).unwrap()).collect();
        assert_eq!(lens, [4096, 4096, 808]);
        assert_eq!(range.object_at(11 * 4096), Some(1));
        assert_eq!(range.object_at(12 * 4096), None);
        assert_eq!(range.object_at(11 * 4096 + 8), None);
        assert!(!range.has(10) && range.has(13) && !range.has(14));
        range.vacate(1);
        assert!(!range.has(11) && !range.has(13));
    }

    #[test]
    fn page_is_found_in_its_range_alone() {
        let ranges = Ranges::default();
        for first in [10, 20] {
            let range = Range::new(&heap(), first, 5, Shape::Pages, None).unwrap();
            ranges.add(Arc::new(range));
        }
        let first = |page| ranges.get(page).map(|range| range.first_page());
        assert_eq!(
            [first(9), first(10), first(14), first(15), first(24)],
            [None, Some(10), Some(10), None, Some(20)]
        );
    }
}
