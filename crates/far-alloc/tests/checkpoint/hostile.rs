//! Files whose checksums are right, and whose ranges do not agree with their stored objects.

use crate::recorded::Recorded;
use crate::{TAG, config};
use std::sync::atomic::{AtomicU64, Ordering};
use varve_far_alloc::{Error, FarAlloc};
use varve_far_objects::{Error as StoreError, FarHeap, FarSlots, SlotsHeap, SlotsOut, SlotsOwner};

const SLABS: u32 = 40;
/// Where the first heap is; each has its own addresses, as tests run at once.
const START: u64 = 0x2345_0000_0000;
const LEN_BYTES: u64 = 1 << 30;
const PAGE: usize = 4096;
static MADE: AtomicU64 = AtomicU64::new(0);
const POOL: u8 = 0;
const ARRAY: u8 = 1;
const BYTES: u8 = 2;
const SMALL: u8 = 0;
const LARGE: u8 = 1;
const PAGES: u8 = 2;

/// A range as docs/reference/checkpoint.md says, and its stored objects: slot and length.
struct Hostile {
    kind: u8,
    shape: u8,
    size: u32,
    first_page: u32,
    objects: u64,
    blocks: Vec<(u32, u32)>,
    slots: usize,
    stored: Vec<(usize, usize)>,
}

impl Hostile {
    fn note(&self) -> Vec<u8> {
        let mut note = vec![self.kind, self.shape, 0, 0];
        note.extend(self.size.to_le_bytes());
        note.extend(self.first_page.to_le_bytes());
        note.extend(self.objects.to_le_bytes());
        note.extend(0u32.to_le_bytes());
        note.extend((self.blocks.len() as u32).to_le_bytes());
        for (start, len) in &self.blocks {
            note.extend(start.to_le_bytes());
            note.extend(len.to_le_bytes());
        }
        note
    }

    fn slots(&self, heap: &SlotsHeap) -> FarSlots {
        let slots = heap.slots(self.slots, PAGE).unwrap();
        for (slot, len) in &self.stored {
            assert!(slots.occupy(*slot, *len).unwrap());
        }
        slots
    }
}

/// Tells of ranges whatever it is to.
struct Owner(Vec<(FarSlots, Vec<u8>)>);

impl SlotsOwner for Owner {
    fn cut(&self, _: bool, cut: &mut dyn FnMut() -> u32) -> Result<(), StoreError> {
        cut();
        Ok(())
    }

    fn save(&self, out: &mut SlotsOut<'_, '_>) -> Result<(), StoreError> {
        let mut all = self.0.iter();
        all.try_for_each(|(slots, note)| out.put(&slots.record(note.clone())?))
    }

    fn end(&self, _: bool) {}
}

/// A checkpoint of these ranges, restored; `None`, said aloud, where the kernel does not let faults be served.
fn restore(ranges: &[Hostile]) -> Option<Result<(), Error>> {
    let file = Recorded::default();
    let heap = FarHeap::create_for_slots(file.clone(), SLABS, TAG, 128, &config().objects).unwrap();
    let owner = Owner(
        ranges
            .iter()
            .map(|range| (range.slots(&heap), range.note()))
            .collect(),
    );
    let mut head = b"VarveFOA".to_vec();
    let start = START + MADE.fetch_add(1, Ordering::Relaxed) * LEN_BYTES;
    for number in [start, LEN_BYTES, 0] {
        head.extend(number.to_le_bytes());
    }
    heap.checkpoint_slots(&head, &owner).unwrap();
    drop((owner, heap));
    match FarAlloc::restore(file, TAG, &config()) {
        Err(error @ Error::Userfault { .. }) => {
            eprintln!("SKIPPED: {error}");
            None
        }
        restored => Some(restored.map(drop)),
    }
}

/// Objects of one shape, with these stored objects.
fn objects(kind: u8, shape: (u8, u32), pages: usize, stored: &[(usize, usize)]) -> Hostile {
    let (shape, size) = shape;
    let stride = match shape {
        LARGE => (size as usize * 512).div_ceil(PAGE),
        _ => 1,
    };
    Hostile {
        kind,
        shape,
        size,
        first_page: 5,
        objects: (pages / stride) as u64,
        blocks: Vec::new(),
        slots: pages,
        stored: stored.to_vec(),
    }
}

#[test]
fn objects_that_are_there_in_part_are_refused() {
    let (two_pages, one_page, small) = ((LARGE, 10), (LARGE, 1), (SMALL, 128));
    let sound = [
        objects(POOL, two_pages, 4, &[(0, PAGE), (1, 1000)]),
        objects(POOL, two_pages, 4, &[]),
        objects(ARRAY, two_pages, 4, &[(0, PAGE), (1, 513), (2, PAGE), (3, 1024)]),
        objects(ARRAY, one_page, 2, &[(0, 200), (1, 200)]),
        objects(POOL, small, 2, &[(1, 128)]),
        objects(ARRAY, small, 2, &[(0, 128), (1, 128)]),
    ];
    for range in sound {
        let Some(restored) = restore(&[range]) else { return };
        restored.unwrap();
    }
    let hostile = [
        // An object of an array that is not there: SIGBUS for who has it.
        objects(ARRAY, one_page, 2, &[(1, 200)]),
        objects(ARRAY, two_pages, 4, &[(0, PAGE), (1, 1000)]),
        objects(ARRAY, two_pages, 4, &[(0, PAGE), (1, 1000), (2, PAGE)]),
        objects(ARRAY, small, 2, &[(0, 128)]),
        // A page of a free object, which the next one would have, with its bytes and length.
        objects(POOL, two_pages, 4, &[(1, 1)]),
        objects(POOL, two_pages, 4, &[(1, 1000)]),
        // An object without its last page, and lengths of no object of this shape.
        objects(POOL, two_pages, 4, &[(0, PAGE)]),
        objects(POOL, two_pages, 4, &[(0, 100), (1, 1000)]),
        objects(POOL, two_pages, 4, &[(0, PAGE), (1, 512)]),
        objects(POOL, two_pages, 4, &[(0, PAGE), (1, 1025)]),
        objects(POOL, one_page, 2, &[(0, 513)]),
        objects(POOL, one_page, 2, &[(0, 100)]),
    ];
    for (index, range) in hostile.into_iter().enumerate() {
        let Some(restored) = restore(&[range]) else { return };
        assert!(
            matches!(restored, Err(Error::Malformed(_))),
            "{index}: {restored:?}"
        );
    }
}

#[test]
fn memory_of_a_range_is_counted_before_it_is_made() {
    // Records of blocks that pass the limit several times, and a range after them that is wrong.
    const BLOCKS: u32 = 400_000;
    let pages = BLOCKS.div_ceil(256) as usize;
    let many = Hostile {
        kind: BYTES,
        shape: PAGES,
        size: 0,
        first_page: 5000,
        objects: pages as u64,
        blocks: (0..BLOCKS).map(|unit| (unit, 1)).collect(),
        slots: pages,
        stored: (0..pages).map(|slot| (slot, PAGE)).collect(),
    };
    let wrong = objects(ARRAY, (LARGE, 1), 2, &[(1, 200)]);
    let Some(restored) = restore(&[many, wrong]) else {
        return;
    };
    assert!(
        matches!(restored, Err(Error::Objects(StoreError::MemoryLimit { .. }))),
        "{restored:?}"
    );
}
