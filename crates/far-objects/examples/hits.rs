//! What an access to an object in memory costs, beside one to ordinary memory, all sides in one run: `hits
//! [OBJECTS]`
//! (default 16,384 objects of 128 bytes). Times are medians of 21 rounds, sides in turns.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::Instant;
use varve_far::Dram;
use varve_far_objects::{Config, Far, FarHeap, FarMap, FarVec};

const ROUNDS: usize = 21;
const ACCESSES: usize = 200_000;
type Value = [u64; 16];

/// Nanoseconds of one call, over many with random indices.
fn time(count: usize, mut access: impl FnMut(usize)) -> f64 {
    let mut random = fastrand::Rng::with_seed(5);
    let start = Instant::now();
    for _ in 0..ACCESSES {
        access(random.usize(..count));
    }
    start.elapsed().as_secs_f64() * 1e9 / ACCESSES as f64
}

fn main() {
    let count = std::env::args()
        .nth(1)
        .and_then(|count| count.parse().ok())
        .unwrap_or(16_384);
    let memory = (count * 1024) as u64 + (16 << 20);
    let heap = FarHeap::new(Dram::new((count / 2048 + 64) as u32), &Config::new(memory)).expect("a heap");
    let value = |index: usize| -> Value { [index as u64; 16] };

    let mut plain: Vec<Value> = (0..count).map(value).collect();
    let mut far: FarVec<Value> = FarVec::zeroed(&heap, count).expect("an array");
    (0..count).for_each(|index| far.set(index, value(index)).expect("a write"));
    let singles: Vec<Far<Value>> = (0..count)
        .map(|index| Far::new(&heap, value(index)).expect("a value"))
        .collect();
    let words: FarVec<u64> = FarVec::zeroed(&heap, count).expect("an array");
    (0..count).for_each(|index| words.set(index, index as u64).expect("a write"));
    let mut plain_map: HashMap<u64, Value> = (0..count).map(|index| (index as u64, value(index))).collect();
    let map: FarMap<u64, Value> = FarMap::new(&heap).expect("a map");
    (0..count).for_each(|index| {
        assert!(
            map.insert(index as u64, value(index))
                .expect("an entry")
                .is_none()
        )
    });
    let misses = heap.stats().misses;

    let mut times: Vec<(&str, Vec<f64>)> = Vec::new();
    for _ in 0..ROUNDS {
        let mut note = |name, ns| match times.iter_mut().find(|(other, _)| *other == name) {
            Some((_, all)) => all.push(ns),
            None => times.push((name, vec![ns])),
        };
        note("Vec, read", time(count, |at| _ = black_box(plain[at])));
        note("FarVec::get", time(count, |at| _ = black_box(far.get(at))));
        note("Far::get", time(count, |at| _ = black_box(singles[at].get())));
        note(
            "FarVec::get, 8 bytes",
            time(count, |at| _ = black_box(words.get(at))),
        );
        note("Vec, write", time(count, |at| plain[black_box(at)] = value(at)));
        note(
            "FarVec::set",
            time(count, |at| far.set(at, value(at)).expect("a write")),
        );
        note(
            "FarVec::set, 8 bytes",
            time(count, |at| words.set(at, at as u64).expect("a write")),
        );
        note(
            "FarVec::update",
            time(count, |at| {
                _ = black_box(far.update(at, |mut value| {
                    value[0] += 1;
                    value
                }))
            }),
        );
        note(
            "FarVec::write, a guard",
            time(count, |at| far.write(at).expect("a guard")[0] += 1),
        );
        note(
            "HashMap::get",
            time(count, |at| _ = black_box(plain_map.get(&(at as u64)).copied())),
        );
        note(
            "FarMap::get",
            time(count, |at| _ = black_box(map.get(&(at as u64)))),
        );
        note(
            "HashMap::insert",
            time(count, |at| _ = black_box(plain_map.insert(at as u64, value(at)))),
        );
        note(
            "FarMap::insert",
            time(count, |at| _ = black_box(map.insert(at as u64, value(at)))),
        );
    }
    println!(
        "{count} objects of {} bytes; misses meanwhile: {}",
        size_of::<Value>(),
        heap.stats().misses - misses
    );
    for (name, mut all) in times {
        all.sort_by(f64::total_cmp);
        println!("  {name:<24} {:>7.1} ns   (best {:.1})", all[ROUNDS / 2], all[0]);
    }
}
