//! Checkpoints that fail or are cut short, and what the next one and the next start make of them.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "common/recorded.rs"]
mod recorded;

use recorded::{Event, Recorded, apply};
use varve_far_objects::{Config, Error, FarHeap, FarVec};

const TAG: u64 = 7;
const SLABS: u32 = 24;
/// Roots lie before this.
const ROOTS_END: u64 = 8192;

fn config() -> Config {
    Config {
        has_thread: false,
        ..Config::new(3 << 20)
    }
}

fn set_all(all: &FarVec<[u64; 128]>, value: u64) {
    for index in 0..all.len() {
        all.set(index, [value; 128]).unwrap();
    }
}

fn name_in(record: &[u8]) -> u64 {
    u64::from_le_bytes(record.try_into().unwrap())
}

/// The value that all elements of a file's last checkpoint have.
fn value_in(file: &Recorded) -> u64 {
    let (heap, record) = FarHeap::restore(Recorded::of(file.bytes()), TAG, &config()).unwrap();
    let all: FarVec<[u64; 128]> = FarVec::open(&heap, name_in(&record)).unwrap();
    let first = all.get(0).unwrap()[0];
    assert!(all.iter().all(|value| value.unwrap() == [first; 128]));
    first
}

/// Adds to an image what of the events is durable, and all else but roots.
fn crash(mut image: Vec<u8>, events: &[Event]) -> Vec<u8> {
    let synced = events.iter().rposition(|event| matches!(event, Event::Sync));
    for (number, event) in events.iter().enumerate() {
        if let Event::Write { at, bytes } = event
            && (synced.is_some_and(|synced| number < synced) || *at >= ROOTS_END)
        {
            apply(&mut image, *at, bytes);
        }
    }
    image
}

#[test]
fn second_crash_finds_the_root_that_was_restored() {
    let file = Recorded::default();
    file.record();
    let heap = FarHeap::create(file.clone(), SLABS, TAG, &config()).unwrap();
    let all: FarVec<[u64; 128]> = FarVec::zeroed(&heap, 3000).unwrap();
    let record = all.name().unwrap().to_le_bytes();
    set_all(&all, 1);
    heap.checkpoint(&record).unwrap();
    set_all(&all, 2);
    // The root is written, and its sync fails: it is in memory of the kernel and may never leave it.
    file.fail_syncs_after(Some(1));
    heap.checkpoint(&record).unwrap_err();
    drop((all, heap));
    let durable = crash(Vec::new(), &file.take_events());
    assert_eq!(value_in(&Recorded::of(durable.clone())), 1);
    let second = Recorded::of(file.bytes());
    second.record();
    let (heap, record) = FarHeap::restore(second.clone(), TAG, &config()).unwrap();
    let all: FarVec<[u64; 128]> = FarVec::open(&heap, name_in(&record)).unwrap();
    assert_eq!(all.get(0).unwrap(), [2; 128]);
    set_all(&all, 3);
    heap.evict_all().unwrap();
    let image = crash(durable, &second.take_events());
    assert_eq!(value_in(&Recorded::of(image)), 2);
    // Where it cannot be made durable nothing is used again.
    drop((all, heap));
    let third = Recorded::of(file.bytes());
    third.fail_syncs_after(Some(0));
    let refused = FarHeap::restore(third.clone(), TAG, &config());
    assert!(matches!(refused, Err(Error::Io { .. })));
    assert_eq!(third.bytes(), file.bytes());
}

#[test]
fn checkpoint_that_fails_before_its_root_holds_no_space() {
    let file = Recorded::default();
    let heap = FarHeap::create(file.clone(), SLABS, TAG, &config()).unwrap();
    let all: FarVec<[u64; 128]> = FarVec::zeroed(&heap, 6000).unwrap();
    let record = all.name().unwrap().to_le_bytes();
    set_all(&all, 1);
    heap.checkpoint(&record).unwrap();
    // 48 blocks each time, of which one in use and one held fit three times.
    for round in 2..12 {
        set_all(&all, round);
        file.fail_writes_after(Some(round % 4));
        assert!(matches!(heap.checkpoint(&record), Err(Error::Io { .. })));
        file.fail_writes_after(None);
        assert_eq!(value_in(&file), 1);
    }
    heap.checkpoint(&record).unwrap();
    assert_eq!(value_in(&file), 11);
    for round in 12..16 {
        set_all(&all, round);
        heap.checkpoint(&record).unwrap();
        assert_eq!(value_in(&file), round);
    }
}

/// Objects in random order, many times what fits: each time no room is found a checkpoint makes some.
#[test]
fn random_writes_to_a_full_store_go_on() {
    for (slabs, limit, seed) in [(160, 16 << 20, 1), (200, 20 << 20, 2)] {
        let config = Config {
            has_thread: seed % 2 == 0,
            ..Config::new(limit)
        };
        let file = Recorded::default();
        let heap = FarHeap::create(file.clone(), slabs, TAG, &config).unwrap();
        // All that the store promises.
        let step = slabs as usize * 64;
        let mut len = step;
        while FarVec::<[u64; 16]>::zeroed(&heap, len + step).is_ok() {
            len += step;
        }
        let all: FarVec<[u64; 16]> = FarVec::zeroed(&heap, len).unwrap();
        let record = all.name().unwrap().to_le_bytes();
        let mut model = vec![0u64; len];
        for index in 0..len {
            all.set(index, [0; 16]).unwrap();
        }
        heap.checkpoint(&record).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut held, mut in_row) = (0, 0);
        let writes = slabs as u64 * 8000;
        for number in 1..=writes {
            let index = random.usize(..len);
            while let Err(error) = all.set(index, [number; 16]) {
                assert!(
                    matches!(error, Error::Held { .. }),
                    "{number} of {writes}: {error}"
                );
                held += 1;
                in_row += 1;
                assert!(in_row < 4, "a checkpoint frees nothing, {number} of {writes}");
                heap.checkpoint(&record).unwrap();
            }
            in_row = 0;
            model[index] = number;
        }
        println!("{len} objects, {writes} writes, {held} times held");
        assert!(held > 2);
        heap.checkpoint(&record).unwrap();
        let (copy, _) = FarHeap::restore(Recorded::of(file.bytes()), TAG, &config).unwrap();
        let copied: FarVec<[u64; 16]> = FarVec::open(&copy, name_in(&record)).unwrap();
        for (index, number) in model.iter().enumerate() {
            assert_eq!(copied.get(index).unwrap(), [*number; 16]);
        }
    }
}
