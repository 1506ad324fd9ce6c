//! Checkpoints that fail or are cut short, and what the next one and the next start make of them.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "common/recorded.rs"]
mod recorded;

use recorded::{Event, Recorded, apply};
use varve_far_objects::{Config, Error, FarHeap, FarMap, FarVec, Refusal};

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

/// A heap in a file with an array of ones, and its checkpoint; the record is the array's name.
fn saved(file: &Recorded, len: usize) -> (FarHeap, FarVec<[u64; 128]>, [u8; 8]) {
    let heap = FarHeap::create(file.clone(), SLABS, TAG, &config()).unwrap();
    let all = FarVec::zeroed(&heap, len).unwrap();
    let record = all.name().unwrap().to_le_bytes();
    set_all(&all, 1);
    heap.checkpoint(&record).unwrap();
    (heap, all, record)
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
    let (heap, all, record) = saved(&file, 3000);
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
    let (heap, all, record) = saved(&file, 6000);
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

/// A table's number that another table gets while the table is saved.
#[test]
fn table_that_ends_while_it_is_saved_keeps_its_lengths() {
    let config = Config {
        has_thread: false,
        ..Config::new(6 << 20)
    };
    let file = Recorded::default();
    let heap = FarHeap::create(file.clone(), SLABS, TAG, &config).unwrap();
    // Tables of 128, 128, 256 and 512 objects come first.
    for _ in 0..1024 {
        heap.alloc(700).unwrap();
    }
    let first = heap.alloc(700).unwrap();
    let ids: Vec<_> = (0..900).map(|_| heap.alloc(600).unwrap()).collect();
    heap.checkpoint(&[]).unwrap();
    for id in &ids {
        heap.write(*id, 0, &[9; 600]).unwrap();
    }
    let (go, when) = std::sync::mpsc::channel::<()>();
    let (did, done) = std::sync::mpsc::channel();
    let (other, freed) = (heap.clone(), ids.clone());
    let ends = std::thread::spawn(move || {
        when.recv().unwrap();
        for id in freed {
            other.free(id).unwrap();
        }
        other.free(first).unwrap();
        let all: FarVec<[u8; 600]> = FarVec::zeroed(&other, 10).unwrap();
        all.keep().unwrap();
        did.send(()).unwrap();
    });
    // Within the first write its table is half saved.
    file.after_writes(Some(Box::new(move || {
        if go.send(()).is_ok() {
            let _ = done.recv_timeout(std::time::Duration::from_secs(60));
        }
    })));
    heap.checkpoint(&[]).unwrap();
    file.after_writes(None);
    ends.join().unwrap();
    let (copy, _) = FarHeap::restore(Recorded::of(file.bytes()), TAG, &config).unwrap();
    for id in ids {
        let mut bytes = [0; 600];
        assert_eq!(copy.len_bytes(id).unwrap(), 600);
        copy.read(id, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [9; 600]);
    }
}

#[test]
fn checkpoint_that_panics_is_the_last() {
    let file = Recorded::default();
    let (heap, all, record) = saved(&file, 100);
    set_all(&all, 2);
    file.after_writes(Some(Box::new(|| panic!("a file that panics"))));
    let panics = std::panic::AssertUnwindSafe(|| heap.checkpoint(&record));
    assert!(std::panic::catch_unwind(panics).is_err());
    assert!(matches!(heap.checkpoint(&record), Err(Error::Io { .. })));
    assert_eq!(value_in(&file), 1);
}

#[test]
fn arrays_of_a_map_are_not_opened_alone() {
    let file = Recorded::default();
    let heap = FarHeap::create(file.clone(), SLABS, TAG, &config()).unwrap();
    let map: FarMap<u64, [u64; 20]> = FarMap::new(&heap).unwrap();
    map.insert(1, [1; 20]).unwrap();
    let name = map.keep().unwrap();
    heap.checkpoint(&[]).unwrap();
    let (copy, _) = FarHeap::restore(Recorded::of(file.bytes()), TAG, &config()).unwrap();
    for heap in [heap, copy] {
        // Whatever the size of its buckets.
        for array in 1..name {
            let opened = FarVec::<u64>::open(&heap, array);
            let Err(Error::Refused { reason, .. }) = opened else {
                panic!("a map's array is opened");
            };
            assert!(reason.to_string().contains("part of a map"), "{reason}");
        }
        let map: FarMap<u64, [u64; 20]> = FarMap::open(&heap, name).unwrap();
        assert_eq!(map.get(&1).unwrap(), Some([1; 20]));
    }
}

#[test]
fn only_regular_files_are_taken() {
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .unwrap();
    let made = FarHeap::create(device, SLABS, TAG, &config());
    assert!(matches!(made, Err(Error::Io { .. })));
}

#[test]
fn roots_with_numbers_near_their_ends_are_refused() {
    let file = Recorded::default();
    drop(FarHeap::create(file.clone(), SLABS, TAG, &config()).unwrap());
    let with = |at: usize, value: &[u8]| {
        let mut root = file.bytes()[..4096].to_vec();
        root[at..at + value.len()].copy_from_slice(value);
        root[12..16].fill(0);
        let crc = crc32c::crc32c(&root);
        root[12..16].copy_from_slice(&crc.to_le_bytes());
        root.resize(8192, 0);
        FarHeap::restore(Recorded::of(root), TAG, &config()).map(|_| ())
    };
    with(24, &5u64.to_le_bytes()).unwrap();
    let refused = [
        with(24, &u64::MAX.to_le_bytes()),
        with(24, &(1u64 << 63).to_le_bytes()),
        with(52, &(u32::MAX - 1).to_le_bytes()),
        with(56, &0u64.to_le_bytes()),
        with(56, &u64::MAX.to_le_bytes()),
    ];
    for result in refused {
        assert!(matches!(
            result,
            Err(Error::Refused {
                reason: Refusal::Malformed(_),
                ..
            })
        ));
    }
    // Slabs that the file does not have: their records are counted before they are made.
    let slabs = (100u32 << 20).to_le_bytes();
    let many = with(40, &[slabs, slabs].concat());
    assert!(matches!(many, Err(Error::MemoryLimit { .. })), "{many:?}");
}

thread_local! {
    static LAST: std::cell::RefCell<Option<FarVec<u64>>> = const { std::cell::RefCell::new(None) };
}

#[test]
fn array_is_dropped_at_the_end_of_a_thread() {
    let heap = FarHeap::create(Recorded::default(), SLABS, TAG, &config()).unwrap();
    let of_thread = heap.clone();
    let thread = std::thread::spawn(move || {
        // Dropped after what is first used later.
        LAST.set(None);
        let all = FarVec::zeroed(&of_thread, 10).unwrap();
        let name = all.name().unwrap();
        LAST.set(Some(all));
        name
    });
    let name = thread.join().unwrap();
    assert!(FarVec::<u64>::open(&heap, name).is_err());
}
