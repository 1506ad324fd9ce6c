//! A heap, arrays and maps against models of them, with a device that fails, and with the cleaner at work.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::Bad;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use varve_far_objects::{
    Config, Error, FarHeap, FarMap, FarVec, MEMORY_MIN_BYTES, OBJECT_MAX_BYTES, ObjectId,
};

fn config() -> Config {
    Config {
        has_thread: false,
        ..Config::new(MEMORY_MIN_BYTES)
    }
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(cases)
    }
}

#[derive(Debug, Clone)]
enum Step {
    Alloc {
        len: usize,
        count: usize,
    },
    Free(usize),
    FreeAgain(usize),
    Write {
        object: usize,
        count: usize,
        is_part: bool,
    },
    Read(usize),
    EvictAll,
    Clean(usize),
    FailReads(bool),
    FailWrites(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![
        3 => 1usize..130,
        3 => 130usize..2000,
        1 => 2000..=OBJECT_MAX_BYTES
    ];
    prop_oneof![
        6 => (len, 1usize..60).prop_map(|(len, count)| Step::Alloc { len, count }),
        6 => any::<usize>().prop_map(Step::Free),
        1 => any::<usize>().prop_map(Step::FreeAgain),
        12 => (any::<usize>(), 1usize..200, any::<bool>())
            .prop_map(|(object, count, is_part)| Step::Write { object, count, is_part }),
        8 => any::<usize>().prop_map(Step::Read),
        2 => Just(Step::EvictAll),
        4 => (1usize..2000).prop_map(Step::Clean),
        1 => any::<bool>().prop_map(Step::FailReads),
        1 => any::<bool>().prop_map(Step::FailWrites),
    ]
}

#[derive(Default)]
struct Model {
    objects: Vec<(ObjectId, Vec<u8>)>,
    freed: Vec<ObjectId>,
    fill: u8,
}

/// Errors that a failing or a full device explains.
fn is_explained(error: &Error, is_failing: bool) -> bool {
    match error {
        Error::Full { .. } | Error::MemoryLimit { .. } => true,
        Error::Io { .. } => is_failing,
        _ => false,
    }
}

impl Model {
    fn check(&self, heap: &FarHeap, at: usize, is_failing: bool) {
        let (id, bytes) = &self.objects[at];
        let mut read = vec![0; bytes.len()];
        match heap.read(*id, 0, &mut read) {
            Ok(()) => assert!(read == *bytes, "object {at} has other bytes"),
            Err(error) => assert!(is_failing && is_explained(&error, true), "{error}"),
        }
    }

    fn write(&mut self, heap: &FarHeap, at: usize, is_part: bool, is_failing: bool) {
        self.fill = self.fill.wrapping_add(1);
        let (id, bytes) = &mut self.objects[at];
        let from = if is_part { bytes.len() / 3 } else { 0 };
        let new = vec![self.fill; bytes.len() - from];
        match heap.write(*id, from, &new) {
            Ok(()) => bytes[from..].copy_from_slice(&new),
            Err(error) => assert!(is_explained(&error, is_failing), "{error}"),
        }
    }

    fn step(&mut self, heap: &FarHeap, bad: &Bad, step: &Step) {
        let is_failing = bad.fails_reads.load(Ordering::Relaxed) || bad.fails_writes.load(Ordering::Relaxed);
        let pick = |at: usize, len: usize| (len != 0).then(|| at % len);
        match *step {
            Step::Alloc { len, count } => {
                for _ in 0..count {
                    match heap.alloc(len) {
                        Ok(id) => {
                            let len = heap.len_bytes(id).unwrap();
                            self.freed.retain(|freed| *freed != id);
                            self.objects.push((id, vec![0; len]));
                        }
                        Err(error) => assert!(is_explained(&error, is_failing), "{error}"),
                    }
                }
            }
            Step::Free(at) => {
                if let Some(at) = pick(at, self.objects.len()) {
                    let (id, _) = self.objects.swap_remove(at);
                    heap.free(id).unwrap();
                    self.freed.push(id);
                }
            }
            Step::FreeAgain(at) => {
                if let Some(at) = pick(at, self.freed.len()) {
                    assert!(matches!(heap.free(self.freed[at]), Err(Error::NotAllocated(_))));
                    assert!(heap.read(self.freed[at], 0, &mut [0]).is_err());
                }
            }
            Step::Write {
                object,
                count,
                is_part,
            } => {
                for number in 0..count {
                    if let Some(at) = pick(object.wrapping_add(number * 7), self.objects.len()) {
                        self.write(heap, at, is_part, is_failing);
                    }
                }
            }
            Step::Read(at) => {
                if let Some(at) = pick(at, self.objects.len()) {
                    self.check(heap, at, is_failing);
                }
            }
            Step::EvictAll => {
                if let Err(error) = heap.evict_all() {
                    assert!(is_explained(&error, is_failing), "{error}");
                }
            }
            Step::Clean(objects) => {
                if let Err(error) = heap.clean_step(objects) {
                    assert!(is_explained(&error, is_failing), "{error}");
                }
            }
            Step::FailReads(fails) => bad.fails_reads.store(fails, Ordering::Relaxed),
            Step::FailWrites(fails) => bad.fails_writes.store(fails, Ordering::Relaxed),
        }
    }
}

proptest! {
    #![proptest_config(cases(96))]
    #[test]
    fn heap_gives_back_what_was_written(steps in proptest::collection::vec(step(), 1..250)) {
        let bad = Bad::new(4);
        let heap = FarHeap::new(bad.clone(), &config()).unwrap();
        let mut model = Model::default();
        for step in &steps {
            model.step(&heap, &bad, step);
            prop_assert!(heap.stats().memory_used_bytes <= MEMORY_MIN_BYTES + 64 * 1024);
        }
        bad.fails_reads.store(false, Ordering::Relaxed);
        bad.fails_writes.store(false, Ordering::Relaxed);
        heap.evict_all().unwrap();
        for at in 0..model.objects.len() {
            model.check(&heap, at, false);
        }
        for (id, _) in model.objects.drain(..) {
            heap.free(id).unwrap();
        }
        let stats = heap.stats();
        prop_assert_eq!(stats.log.live_bytes, 0);
        prop_assert_eq!(stats.log.promised_bytes, 0);
        prop_assert_eq!(stats.cached, 0);
        prop_assert_eq!(stats.log.damaged, 0);
    }
}

#[derive(Debug, Clone)]
enum MapStep {
    Insert { first: u16, count: u16 },
    Remove { first: u16, count: u16 },
    EvictAll,
    Fail(bool),
}

fn map_step() -> impl Strategy<Value = MapStep> {
    prop_oneof![
        6 => (0u16..3000, 1u16..400).prop_map(|(first, count)| MapStep::Insert { first, count }),
        4 => (0u16..3000, 1u16..200).prop_map(|(first, count)| MapStep::Remove { first, count }),
        2 => Just(MapStep::EvictAll),
        1 => any::<bool>().prop_map(MapStep::Fail),
    ]
}

/// Runs the steps on a map of values of `N` bytes.
fn map_is_the_model<const N: usize>(steps: &[MapStep]) {
    let bad = Bad::new(16);
    let heap = FarHeap::new(bad.clone(), &config()).unwrap();
    let map: FarMap<u32, [u8; N]> = FarMap::new(&heap).unwrap();
    let mut model: HashMap<u32, [u8; N]> = HashMap::new();
    let mut fill = 0u8;
    for step in steps {
        match *step {
            MapStep::Insert { first, count } => {
                for key in first..first + count {
                    fill = fill.wrapping_add(1);
                    if let Ok(before) = map.insert(u32::from(key), [fill; N]) {
                        assert_eq!(before, model.insert(u32::from(key), [fill; N]));
                    }
                }
            }
            MapStep::Remove { first, count } => {
                for key in first..first + count {
                    if let Ok(before) = map.remove(&u32::from(key)) {
                        assert_eq!(before, model.remove(&u32::from(key)));
                    }
                }
            }
            MapStep::EvictAll => drop(heap.evict_all()),
            MapStep::Fail(fails) => {
                bad.fails_reads.store(fails, Ordering::Relaxed);
                bad.fails_writes.store(fails, Ordering::Relaxed);
            }
        }
        assert_eq!(map.len(), model.len());
    }
    bad.fails_reads.store(false, Ordering::Relaxed);
    bad.fails_writes.store(false, Ordering::Relaxed);
    for key in 0..3500 {
        assert_eq!(map.get(&key).unwrap(), model.get(&key).copied());
    }
    map.for_each(|key, value| assert_eq!(model.remove(&key), Some(value)))
        .unwrap();
    assert!(model.is_empty());
    drop(map);
    let stats = heap.stats();
    assert_eq!(
        (stats.log.promised_bytes, stats.log.live_bytes, stats.cached),
        (0, 0, 0)
    );
}

proptest! {
    #![proptest_config(cases(40))]
    #[test]
    fn map_of_small_values_is_the_model(steps in proptest::collection::vec(map_step(), 1..40)) {
        map_is_the_model::<12>(&steps);
    }

    #[test]
    fn map_of_large_values_is_the_model(steps in proptest::collection::vec(map_step(), 1..25)) {
        map_is_the_model::<1500>(&steps);
    }

    #[test]
    fn vec_is_the_model(
        lens in proptest::collection::vec((0usize..6000, any::<bool>()), 1..12), is_small in any::<bool>()
    ) {
        if is_small { vec_is::<7>(&lens) } else { vec_is::<200>(&lens) }
    }
}

/// Grows and cuts an array to these lengths.
fn vec_is<const N: usize>(lens: &[(usize, bool)]) {
    let heap = FarHeap::new(Bad::new(8), &config()).unwrap();
    let mut far: FarVec<[u8; N]> = FarVec::new(&heap).unwrap();
    let mut model = Vec::new();
    for (len, evicts) in lens {
        while model.len() < *len {
            let value = [model.len() as u8; N];
            far.push(value).unwrap();
            model.push(value);
        }
        if *evicts {
            heap.evict_all().unwrap();
        }
        far.truncate(*len + 1);
        model.truncate(*len + 1);
        if model.len() > *len {
            assert_eq!(far.pop().unwrap(), model.pop());
        }
        for index in (0..model.len()).step_by(5) {
            far.update(index, |value| value.map(|byte| byte ^ 0x5a)).unwrap();
            model[index] = model[index].map(|byte| byte ^ 0x5a);
        }
        for index in (0..model.len()).step_by(7) {
            far.write(index).unwrap()[N - 1] = 3;
            model[index][N - 1] = 3;
        }
        let all: Vec<_> = far.iter().map(Result::unwrap).collect();
        assert!(all == model);
    }
    drop(far);
    let stats = heap.stats();
    assert_eq!(
        (stats.log.promised_bytes, stats.log.live_bytes, stats.cached),
        (0, 0, 0)
    );
}
