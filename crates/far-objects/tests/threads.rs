//! Threads that read, write, allocate and free, while objects leave memory and blocks are cleaned.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::Bad;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use varve_far::FileSlabs;
use varve_far_objects::{Config, Error, Far, FarHeap, FarMap, FarVec, MEMORY_MIN_BYTES};

const THREADS: usize = 4;

/// A value whose words all follow from the first two: a torn one is seen.
fn record(index: u64, round: u64) -> [u64; 16] {
    std::array::from_fn(|word| match word {
        0 => index,
        1 => round,
        word => (index ^ round << 32).wrapping_mul(word as u64 | 1),
    })
}

fn check(index: usize, value: [u64; 16]) {
    if value != [0; 16] {
        assert_eq!(value, record(index as u64, value[1]));
        assert_eq!(value[0], index as u64);
    }
}

/// Four threads on one array that fills its store to 90 %.
fn storm(heap: &FarHeap, len: usize, rounds: usize) {
    let all: FarVec<[u64; 16]> = FarVec::zeroed(heap, len).unwrap();
    let seen = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (all, seen) = (&all, &seen);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread as u64);
                for round in 0..rounds {
                    let index = random.usize(..all.len());
                    if random.bool() {
                        check(index, all.get(index).unwrap());
                    } else {
                        all.set(index, record(index as u64, round as u64)).unwrap();
                    }
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    for index in 0..all.len() {
        check(index, all.get(index).unwrap());
    }
    let stats = heap.stats();
    assert!(stats.evicted > 0 && stats.log.cleaned_blocks > 0, "{stats:?}");
    assert_eq!((stats.log.damaged, stats.log.io_errors), (0, 0));
    assert!(
        stats.memory_used_bytes <= stats.memory_limit_bytes + 64 * 1024,
        "{stats:?}"
    );
}

#[test]
fn threads_see_whole_objects_while_blocks_are_cleaned() {
    for has_thread in [true, false] {
        let config = Config {
            has_thread,
            ..Config::new(MEMORY_MIN_BYTES)
        };
        let heap = FarHeap::new(Bad::new(4), &config).unwrap();
        storm(&heap, 19_000, 60_000);
    }
}

#[test]
fn threads_see_whole_objects_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = FileSlabs::open(dir.path(), 6).unwrap();
    let heap = FarHeap::new(file, &Config::new(MEMORY_MIN_BYTES)).unwrap();
    storm(&heap, 28_000, 30_000);
}

#[test]
fn threads_go_on_with_a_device_that_comes_and_goes() {
    let bad = Bad::new(4);
    let heap = FarHeap::new(bad.clone(), &Config::new(MEMORY_MIN_BYTES)).unwrap();
    let all: FarVec<[u64; 16]> = FarVec::zeroed(&heap, 19_000).unwrap();
    let failed = AtomicU64::new(0);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS as u64)
            .map(|thread| {
                let (all, failed) = (&all, &failed);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(thread);
                    for round in 0..40_000 {
                        let index = random.usize(..all.len());
                        let result = if random.bool() {
                            all.get(index).map(|value| check(index, value))
                        } else {
                            all.set(index, record(index as u64, round))
                        };
                        match result {
                            Ok(()) => {}
                            Err(Error::Io { .. } | Error::Full { .. }) => {
                                failed.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        let (bad, is_done) = (&bad, &is_done);
        scope.spawn(move || {
            let mut random = fastrand::Rng::with_seed(9);
            while !is_done.load(Ordering::Relaxed) {
                bad.fails_reads.store(random.u8(..4) == 0, Ordering::Relaxed);
                bad.fails_writes.store(random.u8(..4) == 0, Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
    });
    bad.fails_reads.store(false, Ordering::Relaxed);
    bad.fails_writes.store(false, Ordering::Relaxed);
    for index in 0..all.len() {
        check(index, all.get(index).unwrap());
    }
    assert!(failed.load(Ordering::Relaxed) > 0);
    assert_eq!(heap.stats().log.damaged, 0);
}

/// Objects of 128 bytes that fill a block.
const BLOCK_OBJECTS: usize = 939;

/// Writes all elements in order, so that they lie in order in the log.
fn write_in_order(heap: &FarHeap, all: &FarVec<[u64; 16]>, range: std::ops::Range<usize>, round: u64) {
    for index in range {
        all.set(index, record(index as u64, round)).unwrap();
        heap.evict_all().unwrap();
    }
}

#[test]
fn read_sees_that_its_block_was_used_again_for_the_same_object() {
    let bad = Bad::new(4);
    let config = Config {
        has_thread: false,
        ..Config::new(MEMORY_MIN_BYTES)
    };
    let heap = FarHeap::new(bad.clone(), &config).unwrap();
    let all: FarVec<[u64; 16]> = FarVec::zeroed(&heap, BLOCK_OBJECTS).unwrap();
    write_in_order(&heap, &all, 0..BLOCK_OBJECTS, 1);
    // Starts the next block, so that the first is written.
    write_in_order(&heap, &all, 0..1, 2);
    let gate = Arc::new(Barrier::new(2));
    *bad.gate.lock().unwrap() = Some(Arc::clone(&gate));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| all.get(1).unwrap());
        gate.wait();
        // The reader has the bytes of round 1. Now the second block takes all objects, and the next has the first
        // one's number, with the object in the same sector.
        write_in_order(&heap, &all, 1..BLOCK_OBJECTS, 2);
        write_in_order(&heap, &all, 0..BLOCK_OBJECTS, 3);
        gate.wait();
        assert_eq!(reader.join().unwrap(), record(1, 3));
    });
    assert_eq!(heap.stats().log.damaged, 0);
}

#[test]
fn updates_of_threads_are_all_counted() {
    let heap = FarHeap::new(Bad::new(16), &Config::new(MEMORY_MIN_BYTES)).unwrap();
    let counters: FarVec<u64> = FarVec::zeroed(&heap, 200_000).unwrap();
    let single = Far::new(&heap, 0u64).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (counters, single) = (&counters, &single);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread as u64);
                for _ in 0..20_000 {
                    // A few are hot, so that threads meet.
                    let index = if random.bool() {
                        random.usize(..4)
                    } else {
                        random.usize(..counters.len())
                    };
                    counters.update(index, |count| count + 1).unwrap();
                    single.update(|count| count + 1).unwrap();
                }
            });
        }
    });
    let sum: u64 = counters.iter().map(Result::unwrap).sum();
    assert_eq!(sum, 20_000 * THREADS as u64);
    assert_eq!(single.get().unwrap(), sum);
    assert!(heap.stats().evicted > 0);
}

#[test]
fn objects_of_threads_come_and_go() {
    let heap = FarHeap::new(Bad::new(8), &Config::new(MEMORY_MIN_BYTES)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let heap = &heap;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread as u64);
                let mut mine = Vec::new();
                for round in 0..30_000u64 {
                    if mine.len() < 4_000 {
                        let small = Far::new(heap, (thread as u64) << 32 | round).unwrap();
                        let large = Far::new(heap, record(round, thread as u64)).unwrap();
                        mine.push((round, small, large));
                    } else {
                        let at = random.usize(..mine.len());
                        let (round, small, large) = mine.swap_remove(at);
                        assert_eq!(small.get().unwrap(), (thread as u64) << 32 | round);
                        assert_eq!(large.get().unwrap(), record(round, thread as u64));
                    }
                }
            });
        }
    });
    let stats = heap.stats();
    assert_eq!(
        (stats.log.promised_bytes, stats.log.live_bytes, stats.cached),
        (0, 0, 0)
    );
}

#[test]
fn map_of_threads_loses_no_entry() {
    const STAYS: u64 = 300;
    let heap = FarHeap::new(Bad::new(16), &Config::new(MEMORY_MIN_BYTES)).unwrap();
    let map: FarMap<u64, [u64; 8]> = FarMap::new(&heap).unwrap();
    for number in 0..STAYS {
        let key = u64::MAX - number;
        assert_eq!(map.insert(key, [key; 8]).unwrap(), None);
    }
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3u64)
            .map(|thread| {
                let map = &map;
                scope.spawn(move || {
                    for number in 0..20_000 {
                        let key = number * 3 + thread;
                        assert_eq!(map.insert(key, [key; 8]).unwrap(), None);
                        if number % 2 == 0 {
                            assert_eq!(map.remove(&key).unwrap(), Some([key; 8]));
                        }
                    }
                })
            })
            .collect();
        let (map, is_done) = (&map, &is_done);
        scope.spawn(move || {
            while !is_done.load(Ordering::Relaxed) {
                let mut seen = std::collections::HashSet::new();
                map.for_each(|key, value| {
                    assert_eq!(value, [key; 8]);
                    assert!(seen.insert(key), "{key} comes twice");
                })
                .unwrap();
                // Those that are there all the time are all there.
                assert!((0..STAYS).all(|number| seen.contains(&(u64::MAX - number))));
            }
        });
        for writer in writers {
            writer.join().unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert_eq!(map.len(), 30_000 + STAYS as usize);
    for key in 0..60_000 {
        let is_there = key / 3 % 2 == 1;
        assert_eq!(map.get(&key).unwrap(), is_there.then_some([key; 8]));
    }
    assert!(heap.stats().evicted > 0);
}
