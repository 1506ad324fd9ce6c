//! Slots whose owner has newer bytes than they have: what it stores after a cut, as of before it, is in the
//! cut's checkpoint, wherever the object was.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "common/recorded.rs"]
mod recorded;

use recorded::Recorded;
use std::cell::RefCell;
use varve_far_objects::{
    CHECKPOINT_VERSION, Config, Error, FarHeap, FarSlots, FarVec, Refusal, SlotsHeap, SlotsOut, SlotsOwner,
};

const TAG: u64 = 7;
const SLABS: u32 = 24;
/// In two tables.
const SLOTS: usize = 700;
const LEN: usize = 160;

fn config() -> Config {
    Config {
        has_thread: false,
        ..Config::new(3 << 20)
    }
}

/// An owner that does something with the slots after the cut, and its epoch.
struct Owner<'a, F> {
    slots: &'a FarSlots,
    epoch: RefCell<u32>,
    after: F,
}

impl<F: Fn(u32) -> Result<(), Error>> SlotsOwner for Owner<'_, F> {
    fn cut(&self, _: bool, cut: &mut dyn FnMut() -> u32) -> Result<(), Error> {
        *self.epoch.borrow_mut() = cut();
        Ok(())
    }

    fn save(&self, out: &mut SlotsOut<'_, '_>) -> Result<(), Error> {
        let record = self.slots.record(b"note".to_vec())?;
        (self.after)(*self.epoch.borrow() - 1)?;
        out.put(&record)
    }

    fn end(&self, _: bool) {}
}

fn checkpoint(
    heap: &SlotsHeap,
    slots: &FarSlots,
    after: impl Fn(u32) -> Result<(), Error>,
) -> Result<(), Error> {
    let owner = Owner {
        slots,
        epoch: RefCell::new(0),
        after,
    };
    heap.checkpoint_slots(b"record", &owner).map(drop)
}

fn restore(file: &Recorded) -> (SlotsHeap, FarSlots) {
    let copy = Recorded::of(file.bytes());
    let (heap, record, mut slots) = FarHeap::restore_for_slots(copy, TAG, 100, &config()).unwrap();
    assert_eq!((&record[..], slots.len()), (&b"record"[..], 1));
    let restored = slots.remove(0);
    assert_eq!(restored.note, b"note");
    (heap, restored.slots)
}

fn read(slots: &FarSlots, slot: usize) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    assert_eq!(slots.read(slot, 0, &mut bytes).unwrap(), LEN);
    bytes
}

/// Slots that are empty, in the log, in memory, and newer in memory.
fn filled(file: &Recorded) -> (SlotsHeap, FarSlots) {
    let heap = FarHeap::create_for_slots(file.clone(), SLABS, TAG, 100, &config()).unwrap();
    let slots = heap.slots(SLOTS, LEN).unwrap();
    for slot in 0..SLOTS {
        assert!(slots.occupy(slot, LEN).unwrap());
        if slot % 4 != 0 {
            slots.write(slot, 0, &[1; LEN]).unwrap();
        }
    }
    heap.evict_all().unwrap();
    for slot in 0..SLOTS {
        match slot % 4 {
            2 => drop(read(&slots, slot)),
            3 => slots.write(slot, 0, &[2; LEN]).unwrap(),
            _ => {}
        }
    }
    (heap, slots)
}

/// What each slot has after [`filled`].
fn first(slot: usize) -> u8 {
    [0, 1, 1, 2][slot % 4]
}

#[test]
fn bytes_of_before_the_cut_are_in_its_checkpoint_wherever_the_object_was() {
    // What happens before they come: nothing; memory is emptied; and read again.
    for way in 0..3 {
        let file = Recorded::default();
        let (heap, slots) = filled(&file);
        for round in 0..2u8 {
            let now = 10 + 4 * round;
            checkpoint(&heap, &slots, |epoch| {
                if way > 0 {
                    heap.evict_all()?;
                }
                for slot in 0..SLOTS {
                    if way > 1 {
                        read(&slots, slot);
                    }
                    // All of it, or twice a part: two who have an object together.
                    if slot % 3 == 0 {
                        slots.write_of(slot, 0, &[now; LEN], epoch)?;
                    } else {
                        slots.write_of(slot, 8, &[now + 1; 8], epoch)?;
                        slots.write_of(slot, 20, &[now + 2; 8], epoch)?;
                    }
                    // What comes after it is in none.
                    if slot % 5 == 0 {
                        slots.write(slot, 0, &[99; 4])?;
                    }
                }
                Ok(())
            })
            .unwrap();
            let (_copy, restored) = restore(&file);
            for slot in 0..SLOTS {
                let mut wanted = vec![first(slot); LEN];
                if round == 1 && slot % 5 == 0 {
                    wanted[..4].fill(99);
                }
                if slot % 3 == 0 {
                    wanted.fill(now);
                } else {
                    wanted[8..16].fill(now + 1);
                    wanted[20..28].fill(now + 2);
                }
                assert_eq!(
                    read(&restored, slot),
                    wanted,
                    "way {way}, round {round}, slot {slot}"
                );
                if slot % 5 == 0 {
                    wanted[..4].fill(99);
                }
                assert_eq!(read(&slots, slot), wanted);
            }
        }
    }
}

#[test]
fn store_that_is_full_of_newer_objects_takes_the_owners_bytes() {
    let file = Recorded::default();
    let heap = FarHeap::create_for_slots(file.clone(), 11, TAG, 100, &config()).unwrap();
    let slots = heap.slots(SLOTS, LEN).unwrap();
    (0..SLOTS).for_each(|slot| assert!(slots.occupy(slot, LEN).unwrap()));
    let others: FarVec<[u64; 128]> = FarVec::zeroed(&heap, 3600).unwrap();
    // All memory is newer than the store, which takes no more: the last checkpoint needs the rest.
    let mut held = 0;
    for round in 0..6 {
        for index in 0..others.len() {
            held += usize::from(others.set(index, [round; 128]).is_err());
        }
        if round == 0 {
            checkpoint(&heap, &slots, |_| Ok(())).unwrap();
        }
    }
    println!("{held} writes were held back");
    assert!(held > 0);
    checkpoint(&heap, &slots, |epoch| {
        (0..SLOTS).try_for_each(|slot| slots.write_of(slot, 0, &[7; LEN], epoch))
    })
    .unwrap();
    let (_copy, restored) = restore(&file);
    (0..SLOTS).for_each(|slot| assert_eq!(read(&restored, slot), [7; LEN]));
}

#[test]
fn bytes_of_before_a_cut_that_failed_are_in_the_next_checkpoint() {
    let file = Recorded::default();
    let (heap, slots) = filled(&file);
    let write = |epoch| (0..SLOTS).try_for_each(|slot| slots.write_of(slot, 0, &[30; LEN], epoch));
    let fails = |epoch| {
        write(epoch)?;
        Err(Error::ZeroSize)
    };
    assert!(matches!(checkpoint(&heap, &slots, fails), Err(Error::ZeroSize)));
    file.fail_writes_after(Some(1));
    assert!(checkpoint(&heap, &slots, write).is_err());
    file.fail_writes_after(None);
    checkpoint(&heap, &slots, |_| Ok(())).unwrap();
    let (_copy, restored) = restore(&file);
    (0..SLOTS).for_each(|slot| assert_eq!(read(&restored, slot), [30; LEN]));
}

#[test]
fn slots_are_restored_as_they_were_and_end_with_their_owner() {
    let file = Recorded::default();
    let (heap, slots) = filled(&file);
    for slot in (0..SLOTS).step_by(7) {
        assert!(slots.vacate(slot));
    }
    assert!(slots.vacate(1));
    assert!(slots.occupy(1, 50).unwrap());
    let vacate = |_| {
        assert!(slots.vacate(2), "after the cut");
        Ok(())
    };
    checkpoint(&heap, &slots, vacate).unwrap();
    let (copy, restored) = restore(&file);
    for slot in 0..SLOTS {
        assert_eq!(restored.is_occupied(slot), slot % 7 != 0, "slot {slot}");
    }
    assert_eq!(restored.len_bytes(1).unwrap(), 50);
    assert_eq!(read(&restored, 2), [1; LEN]);
    drop(restored);
    assert_eq!(copy.stats().log.promised_bytes, 0);
    drop(slots);
    let others = heap.slots(3, LEN).unwrap();
    checkpoint(&heap, &others, |_| Ok(())).unwrap();
    let (_copy, restored) = restore(&file);
    assert_eq!(restored.slots(), 3);
}

#[test]
fn checkpoints_are_made_by_who_has_the_slots() {
    let file = Recorded::default();
    let (heap, slots) = filled(&file);
    assert!(matches!(heap.checkpoint(&[]), Err(Error::Config(_))));
    // Who has the heap alone makes no slots that nobody would tell of.
    assert!(matches!(SlotsHeap::new(heap.clone()), Err(Error::Config(_))));
    checkpoint(&heap, &slots, |_| Ok(())).unwrap();
    assert_eq!(u32::from(file.bytes()[4096 + 8]), CHECKPOINT_VERSION);
    let other = FarHeap::restore(Recorded::of(file.bytes()), TAG, &config());
    assert!(matches!(
        other,
        Err(Error::Refused {
            reason: Refusal::Kind { .. },
            ..
        })
    ));
}

#[test]
fn note_that_is_larger_than_memory_is_not_read() {
    let file = Recorded::default();
    let heap = FarHeap::create_for_slots(file.clone(), 100, TAG, 100, &config()).unwrap();
    let slots = heap.slots(SLOTS, LEN).unwrap();
    let owner = LongNote(&slots, 32 << 20);
    heap.checkpoint_slots(b"record", &owner).unwrap();
    let copy = Recorded::of(file.bytes());
    let restored = FarHeap::restore_for_slots(copy, TAG, 100, &config());
    match restored.map(|_| ()) {
        // What it asks for is the note alone: nothing of it was read.
        Err(Error::MemoryLimit { needed_bytes, .. }) => assert!(needed_bytes > 32 << 20),
        other => panic!("{other:?}"),
    }
    let owner = LongNote(&slots, 64 << 20 | 1);
    assert!(matches!(
        heap.checkpoint_slots(b"record", &owner),
        Err(Error::TooLarge { .. })
    ));
}

/// An owner with a note of so many bytes.
struct LongNote<'a>(&'a FarSlots, usize);

impl SlotsOwner for LongNote<'_> {
    fn cut(&self, _: bool, cut: &mut dyn FnMut() -> u32) -> Result<(), Error> {
        cut();
        Ok(())
    }

    fn save(&self, out: &mut SlotsOut<'_, '_>) -> Result<(), Error> {
        out.put(&self.0.record(vec![1; self.1])?)
    }

    fn end(&self, _: bool) {}
}
