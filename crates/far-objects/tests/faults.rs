//! Damaged bytes, lost writes, failing devices, full stores, and bounds.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::Bad;
use std::sync::atomic::Ordering;
use varve_far_objects::{
    Cleaned, Config, Error, Far, FarHeap, FarMap, FarVec, MEMORY_MIN_BYTES, OBJECT_MAX_BYTES, ObjectId,
};

fn config() -> Config {
    Config {
        has_thread: false,
        ..Config::new(MEMORY_MIN_BYTES)
    }
}

/// A value that says which element it is of.
fn value(index: usize) -> [u64; 16] {
    [index as u64; 16]
}

fn filled(bad: &Bad, len: usize) -> (FarHeap, FarVec<[u64; 16]>) {
    let heap = FarHeap::new(bad.clone(), &config()).unwrap();
    let all = FarVec::zeroed(&heap, len).unwrap();
    for index in 0..len {
        all.set(index, value(index)).unwrap();
    }
    heap.evict_all().unwrap();
    (heap, all)
}

#[test]
fn damaged_bytes_are_errors_and_never_other_bytes() {
    for every in [1, 50, 5_000] {
        let bad = Bad::new(8);
        let (heap, all) = filled(&bad, 20_000);
        let mut random = fastrand::Rng::with_seed(every);
        bad.damage(|byte| {
            if random.u64(..every) == 0 {
                random.u8(..)
            } else {
                byte
            }
        });
        let mut damaged = 0;
        for index in 0..all.len() {
            match all.get(index) {
                Ok(read) => assert_eq!(read, value(index)),
                Err(Error::Damaged { .. }) => damaged += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(damaged > 0);
        assert_eq!(heap.stats().log.damaged, damaged);
        // The cleaner keeps away from what it cannot move.
        for index in (0..all.len()).step_by(2) {
            all.set(index, value(index)).unwrap();
        }
        heap.evict_all().unwrap();
        while heap.clean_step(100).unwrap() != Cleaned::Nothing {}
        for index in 0..all.len() {
            match all.get(index) {
                Ok(read) => assert_eq!(read, value(index)),
                Err(error) => assert!(index % 2 == 1 && matches!(error, Error::Damaged { .. })),
            }
        }
        // Writing them anew mends them, and everything can be dropped.
        for index in 0..all.len() {
            all.set(index, value(index)).unwrap();
        }
        heap.evict_all().unwrap();
        assert!(
            all.iter()
                .enumerate()
                .all(|(index, read)| read.unwrap() == value(index))
        );
        drop(all);
        assert_eq!(heap.stats().log.live_bytes, 0);
    }
}

#[test]
fn lost_writes_are_errors_and_never_older_bytes() {
    let bad = Bad::new(4);
    let (heap, all) = filled(&bad, 10_000);
    bad.loses_writes.store(true, Ordering::Relaxed);
    for round in 0..4 {
        for index in 0..all.len() {
            all.set(index, value(index + round)).unwrap();
        }
        heap.evict_all().unwrap();
    }
    let mut lost = 0;
    for index in 0..all.len() {
        match all.get(index) {
            Ok(read) => assert_eq!(read, value(index + 3)),
            Err(Error::Damaged { .. }) => lost += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(lost > 5_000, "{lost}");
}

#[test]
fn failed_places_are_retired_and_nothing_is_lost() {
    let bad = Bad::new(4);
    let heap = FarHeap::new(bad.clone(), &config()).unwrap();
    let all: FarVec<[u64; 16]> = FarVec::zeroed(&heap, 10_000).unwrap();
    for index in 0..all.len() {
        bad.failing_writes
            .store(u64::from(index == 3_000 || index == 7_000), Ordering::Relaxed);
        if index == 3_000 || index == 7_000 {
            heap.evict_all().unwrap();
        }
        all.set(index, value(index)).unwrap();
    }
    heap.evict_all().unwrap();
    let stats = heap.stats().log;
    assert_eq!(stats.io_errors, stats.retired_blocks);
    assert!((1..=2).contains(&stats.retired_blocks), "{stats:?}");
    assert!(
        all.iter()
            .enumerate()
            .all(|(index, read)| read.unwrap() == value(index))
    );
}

#[test]
fn dead_device_fails_what_needs_it_and_loses_nothing() {
    let bad = Bad::new(8);
    let (heap, all) = filled(&bad, 20_000);
    let retired = heap.stats().log.retired_blocks;
    bad.fails_writes.store(true, Ordering::Relaxed);
    let mut stored = vec![false; all.len()];
    let mut failed = 0;
    for (index, stored) in stored.iter_mut().enumerate() {
        match all.set(index, value(index + 1)) {
            Ok(()) => *stored = true,
            Err(Error::Io { .. }) => failed += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(failed > 0 && stored.contains(&true));
    // Reads go on, though no memory is left for what they bring.
    let is_right =
        |(index, stored): (usize, &bool)| all.get(index).unwrap() == value(index + usize::from(*stored));
    assert!(stored.iter().enumerate().all(is_right));
    assert!(heap.stats().memory_used_bytes <= MEMORY_MIN_BYTES);
    bad.fails_writes.store(false, Ordering::Relaxed);
    heap.evict_all().unwrap();
    assert!(stored.iter().enumerate().all(is_right));
    assert_eq!(
        heap.stats().log.retired_blocks,
        retired,
        "the device failed, not its blocks"
    );
}

#[test]
fn failed_reads_are_errors_until_the_device_is_back() {
    let bad = Bad::new(8);
    let (heap, all) = filled(&bad, 1_000);
    bad.fails_reads.store(true, Ordering::Relaxed);
    assert!(matches!(all.get(10), Err(Error::Io { .. })));
    all.set(11, value(5)).unwrap();
    assert_eq!(
        all.get(11).unwrap(),
        value(5),
        "a whole object is written without a read"
    );
    bad.fails_reads.store(false, Ordering::Relaxed);
    assert_eq!(all.get(10).unwrap(), value(10));
    assert_eq!(heap.stats().log.io_errors, 1);
}

#[test]
fn cleaner_of_a_device_that_reads_nothing_gives_no_block_up() {
    let bad = Bad::new(4);
    let (heap, all) = filled(&bad, 10_000);
    for index in (0..all.len()).step_by(2) {
        all.set(index, value(index)).unwrap();
    }
    heap.evict_all().unwrap();
    bad.fails_reads.store(true, Ordering::Relaxed);
    for _ in 0..20 {
        assert!(matches!(heap.clean_step(100), Err(Error::Io { .. })));
    }
    assert_eq!(heap.stats().log.retired_blocks, 0);
    bad.fails_reads.store(false, Ordering::Relaxed);
    while heap.clean_step(100).unwrap() != Cleaned::Nothing && heap.stats().log.cleaned_blocks < 5 {}
    assert_eq!(heap.stats().log.cleaned_blocks, 5);
    assert!(
        all.iter()
            .enumerate()
            .all(|(index, read)| read.unwrap() == value(index))
    );
    // One block that cannot be read, beside others that can.
    bad.failing_reads.store(1, Ordering::Relaxed);
    assert!(matches!(heap.clean_step(100), Err(Error::Io { .. })));
    assert_eq!(heap.stats().log.retired_blocks, 1);
    assert!(
        all.iter()
            .enumerate()
            .all(|(index, read)| read.unwrap() == value(index))
    );
}

#[test]
fn full_store_refuses_allocations_and_nothing_else() {
    let bad = Bad::new(4);
    let heap = FarHeap::new(bad.clone(), &config()).unwrap();
    let mut all: FarVec<[u64; 16]> = FarVec::new(&heap).unwrap();
    let error = loop {
        if let Err(error) = all.push(value(all.len())) {
            break error;
        }
    };
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert!(matches!(heap.alloc(1), Err(Error::Full { .. })));
    assert!(matches!(Far::new(&heap, 1u8), Err(Error::Full { .. })));
    // 90 % of the 24 blocks that are not in reserve.
    assert!(all.len() > 20_000, "{}", all.len());
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..3 * all.len() {
        let index = random.usize(..all.len());
        assert_eq!(all.get(index).unwrap(), value(index));
        all.set(index, value(index)).unwrap();
    }
    assert!(heap.stats().log.cleaned_blocks > 0);
    all.truncate(10);
    assert!(Far::new(&heap, 1u8).is_ok());
}

#[test]
fn backend_that_gives_fewer_slabs_than_it_said_is_full() {
    let bad = Bad::new(64);
    let heap = FarHeap::new(bad.clone(), &config()).unwrap();
    let mut all: FarVec<[u64; 16]> = FarVec::new(&heap).unwrap();
    while all.len() < 40_000 {
        bad.gives_no_slabs.store(all.len() > 30_000, Ordering::Relaxed);
        match all.push(value(all.len())) {
            Ok(()) => {}
            Err(Error::Full { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!((30_000..40_000).contains(&all.len()), "{}", all.len());
    assert!(
        all.iter()
            .enumerate()
            .all(|(index, read)| read.unwrap() == value(index))
    );
    bad.gives_no_slabs.store(false, Ordering::Relaxed);
    drop(all);
    let again: FarVec<[u64; 16]> = FarVec::zeroed(&heap, 10_000).unwrap();
    assert!(again.iter().all(|read| read.unwrap() == [0; 16]));
}

#[test]
fn sizes_are_checked_at_their_bounds() {
    let heap = FarHeap::new(Bad::new(4), &config()).unwrap();
    assert!(matches!(heap.alloc(0), Err(Error::ZeroSize)));
    assert!(matches!(
        heap.alloc(OBJECT_MAX_BYTES + 1),
        Err(Error::TooLarge { .. })
    ));
    assert!(matches!(heap.alloc(usize::MAX), Err(Error::TooLarge { .. })));
    assert!(matches!(Far::new(&heap, ()), Err(Error::ZeroSize)));
    assert!(matches!(FarVec::<[u8; 0]>::new(&heap), Err(Error::ZeroSize)));
    assert!(matches!(
        FarVec::<[u8; OBJECT_MAX_BYTES + 1]>::new(&heap),
        Err(Error::TooLarge { .. })
    ));
    assert!(matches!(FarMap::<(), u64>::new(&heap), Err(Error::ZeroSize)));
    assert!(matches!(
        FarMap::<u64, [u8; OBJECT_MAX_BYTES]>::new(&heap),
        Err(Error::TooLarge { .. })
    ));
    assert!(matches!(
        FarVec::<u64>::zeroed(&heap, usize::MAX),
        Err(Error::TooMany { .. })
    ));
    assert!(matches!(
        FarVec::<u64>::zeroed(&heap, usize::MAX / 8),
        Err(Error::TooMany { .. } | Error::Full { .. })
    ));
    let empty: FarVec<u64> = FarVec::zeroed(&heap, 0).unwrap();
    assert!(empty.is_empty() && matches!(empty.get(0), Err(Error::OutOfRange { index: 0, len: 0 })));
    let largest = Far::new(&heap, [7u8; OBJECT_MAX_BYTES]).unwrap();
    assert!(largest.get().unwrap() == [7; OBJECT_MAX_BYTES]);
    let id = heap.alloc(200).unwrap();
    assert!(matches!(
        heap.read(id, 1, &mut [0; 200]),
        Err(Error::OutOfRange { .. })
    ));
    assert!(matches!(
        heap.write(id, usize::MAX, &[1, 2]),
        Err(Error::OutOfRange { .. })
    ));
    assert_eq!(
        heap.stats().log.promised_bytes,
        (OBJECT_MAX_BYTES + 11 + 200 + 11) as u64
    );
}

#[test]
fn freeing_twice_is_an_error_and_changes_nothing() {
    let heap = FarHeap::new(Bad::new(4), &config()).unwrap();
    for len in [4, 100, 128, 5000] {
        let (kept, freed) = (heap.alloc(len).unwrap(), heap.alloc(len).unwrap());
        heap.write(kept, 0, &vec![9; len]).unwrap();
        heap.free(freed).unwrap();
        let before = heap.stats();
        assert!(matches!(heap.free(freed), Err(Error::NotAllocated(_))));
        assert!(matches!(heap.write(freed, 0, &[1]), Err(Error::NotAllocated(_))));
        assert_eq!(heap.stats(), before);
        let mut read = vec![0; len];
        heap.read(kept, 0, &mut read).unwrap();
        assert_eq!(read, vec![9; len]);
    }
    for number in [0, 1, 0xff, u64::MAX, 1 << 48, 5 << 24] {
        assert!(heap.free(ObjectId::from_u64(number)).is_err());
        assert!(heap.read(ObjectId::from_u64(number), 0, &mut [0]).is_err());
    }
    // Elements of an array are no objects of their own.
    let array: FarVec<[u8; 128]> = FarVec::zeroed(&heap, 600).unwrap();
    for table in 0..64u64 {
        assert!(heap.free(ObjectId::from_u64(table << 24 | 599 << 8)).is_err());
    }
    assert_eq!(array.get(599).unwrap(), [0; 128]);
}

#[test]
fn memory_stays_below_its_limit_with_tables_counted() {
    let heap = FarHeap::new(Bad::new(64), &Config::new(MEMORY_MIN_BYTES)).unwrap();
    let mut arrays = Vec::new();
    let error = loop {
        match FarVec::<u64>::zeroed(&heap, 100_000) {
            Ok(array) => arrays.push(array),
            Err(error) => break error,
        }
        assert!(heap.stats().memory_used_bytes <= MEMORY_MIN_BYTES);
    };
    assert!(
        matches!(error, Error::Full { .. } | Error::MemoryLimit { .. }),
        "{error}"
    );
    let full = heap.stats();
    arrays.clear();
    assert!(heap.stats().memory_used_bytes < full.memory_used_bytes);

    let small = Config {
        memory_limit_bytes: MEMORY_MIN_BYTES - 1,
        ..config()
    };
    assert!(matches!(FarHeap::new(Bad::new(4), &small), Err(Error::Config(_))));
    assert!(matches!(
        FarHeap::new(Bad::new(3), &config()),
        Err(Error::Config(_))
    ));
    let fill = Config {
        fill_max: f64::NAN,
        ..config()
    };
    assert!(matches!(FarHeap::new(Bad::new(4), &fill), Err(Error::Config(_))));
}

#[test]
fn store_beyond_two_terabytes_has_tables_of_five_bytes() {
    let used = |slabs| {
        let heap = FarHeap::new(Bad::new(slabs), &config()).unwrap();
        let empty = heap.stats().memory_used_bytes;
        let all: FarVec<[u64; 16]> = FarVec::zeroed(&heap, 51_200).unwrap();
        let tables = heap.stats().memory_used_bytes - empty;
        for index in 0..all.len() {
            all.set(index, value(index)).unwrap();
        }
        assert!(
            all.iter()
                .enumerate()
                .all(|(index, read)| read.unwrap() == value(index))
        );
        tables
    };
    assert_eq!(used(2_100_000) - used(64), 51_200);
}

#[test]
fn tables_alone_reach_the_limit_as_an_error() {
    let heap = FarHeap::new(Bad::new(4096), &config()).unwrap();
    let mut objects = 0;
    let error = loop {
        match heap.alloc(128) {
            Ok(_) => objects += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::MemoryLimit { .. }), "{error}");
    assert!(objects > 100_000, "{objects}");
    assert!(heap.stats().memory_used_bytes <= MEMORY_MIN_BYTES);
}

#[test]
fn guards_are_stored_when_dropped_even_if_the_device_is_dead() {
    let bad = Bad::new(4);
    let (heap, mut all) = filled(&bad, 100);
    let mut guard = all.write(7).unwrap();
    bad.fails_writes.store(true, Ordering::Relaxed);
    bad.fails_reads.store(true, Ordering::Relaxed);
    guard[3] = 99;
    drop(guard);
    bad.fails_writes.store(false, Ordering::Relaxed);
    bad.fails_reads.store(false, Ordering::Relaxed);
    heap.evict_all().unwrap();
    let mut changed = value(7);
    changed[3] = 99;
    assert_eq!(all.get(7).unwrap(), changed);
}

#[test]
fn page_buffer_is_bounded() {
    let tight = Config {
        page_buffer_bytes: 300,
        ..config()
    };
    let heap = FarHeap::new(Bad::new(4), &tight).unwrap();
    let mut values: Vec<_> = (0..4u64)
        .map(|number| Far::new(&heap, [number; 16]).unwrap())
        .collect();
    let mut guards = Vec::new();
    let mut refused = 0;
    for value in &mut values {
        match value.write() {
            Ok(guard) => guards.push(guard),
            Err(Error::PageBuffer { limit_bytes: 300 }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!((guards.len(), refused), (2, 2));
    drop(guards);
    assert!(values[3].write().is_ok());
}

#[test]
fn cleaning_goes_on_in_small_steps() {
    let bad = Bad::new(4);
    let (heap, all) = filled(&bad, 10_000);
    for index in (0..all.len()).filter(|index| index % 3 != 0) {
        all.set(index, value(index)).unwrap();
    }
    heap.evict_all().unwrap();
    let mut steps = 0;
    while heap.stats().log.cleaned_blocks == 0 {
        assert_ne!(heap.clean_step(10).unwrap(), Cleaned::Nothing);
        steps += 1;
        // Between steps objects of the block are written and read.
        let index = steps * 37 % all.len();
        all.set(index, value(index)).unwrap();
        assert_eq!(all.get(index + 1).unwrap(), value(index + 1));
    }
    assert!(steps > 10, "{steps}");
    assert!(
        all.iter()
            .enumerate()
            .all(|(index, read)| read.unwrap() == value(index))
    );
}
