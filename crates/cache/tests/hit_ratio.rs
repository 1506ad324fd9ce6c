//! Hit ratios of the policies' replacement against LRU of the same capacity, on zipf loads.

use std::collections::HashMap;
use varve_cache::index::{Index, Place, Set};
use varve_cache::{KeyHash, Policy, Secret, Shape};

const CAPACITY: u64 = 16_384;
const KEYS: usize = 200_000;
const WARM: usize = 400_000;
const COUNTED: usize = 600_000;

/// Keys by rank of popularity, always the same ones.
struct Zipf {
    cumulated: Vec<f64>,
    state: u64,
}

impl Zipf {
    fn new(exponent: f64) -> Self {
        let mut sum = 0.0;
        let weight = |rank: usize| 1.0 / ((rank + 1) as f64).powf(exponent);
        let cumulated = (0..KEYS)
            .map(|rank| {
                sum += weight(rank);
                sum
            })
            .collect();
        Self { cumulated, state: 42 }
    }

    fn next(&mut self) -> u32 {
        // SplitMix64.
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let unit = ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
        let wanted = unit * self.cumulated[KEYS - 1];
        self.cumulated.partition_point(|&c| c < wanted) as u32
    }
}

/// Share of requests that `hit` (which looks up and, if that fails, inserts) says are hits, once it is warm.
fn ratio(exponent: f64, mut hit: impl FnMut(u32) -> bool) -> f64 {
    let mut zipf = Zipf::new(exponent);
    for _ in 0..WARM {
        hit(zipf.next());
    }
    let hits = (0..COUNTED).filter(|_| hit(zipf.next())).count();
    hits as f64 / COUNTED as f64
}

/// LRU: keys by the time they were used last.
fn lru(exponent: f64) -> f64 {
    let mut used: HashMap<u32, u64> = HashMap::new();
    let mut order = std::collections::BTreeMap::new();
    let mut now = 0u64;
    ratio(exponent, |key| {
        now += 1;
        let before = used.insert(key, now);
        if let Some(before) = before {
            order.remove(&before);
        } else if used.len() as u64 > CAPACITY {
            let (_, oldest) = order.pop_first().expect("the cache is full");
            used.remove(&oldest);
        }
        order.insert(now, key);
        before.is_some()
    })
}

fn hash(key: u32) -> KeyHash {
    KeyHash::of(&Secret([9; 16]), &key.to_le_bytes())
}

/// A policy with an index: what is found by its tag and is another key is a miss.
fn indexed(exponent: f64, shape: Shape) -> f64 {
    let sets = CAPACITY / shape.ways() as u64;
    let mut index = Index::new(shape, sets, sets);
    let mut keys = vec![u32::MAX; CAPACITY as usize];
    ratio(exponent, |key| {
        let hash = hash(key);
        let number = hash.set(sets);
        let first = number as usize * shape.ways();
        let mut set = index.get(number).unwrap_or_else(|| Set::empty(shape));
        let found = set
            .find(hash.tag())
            .filter(|entry| keys[first + entry.slot] == key);
        match found {
            Some(entry) => {
                set.touch(entry.slot, entry.place.unwrap_or_default());
            }
            None => {
                let slot = set.insert(hash.tag(), Place::default(), |_| false).slot;
                keys[first + slot] = key;
            }
        }
        index.put(number, &set);
        found.is_some()
    })
}

/// A policy without an index: `ways` objects a bin, the oldest goes.
fn unindexed(exponent: f64, ways: usize) -> f64 {
    let sets = CAPACITY / ways as u64;
    let mut bins = vec![Vec::new(); sets as usize];
    ratio(exponent, |key| {
        let bin = &mut bins[hash(key).set(sets) as usize];
        let found = bin.contains(&key);
        if !found {
            if bin.len() == ways {
                bin.remove(0);
            }
            bin.push(key);
        }
        found
    })
}

#[test]
fn sets_of_eight_have_nearly_the_hit_ratio_of_lru() {
    for exponent in [0.8, 1.0] {
        let best = lru(exponent);
        let of = |ratio: f64| ratio / best;
        let basic = of(unindexed(exponent, 1));
        let set = of(unindexed(exponent, 8));
        println!("zipf {exponent}: LRU {best:.4}; of it: basic {basic:.3}, set {set:.3}");
        for policy in [Policy::SetMem, Policy::SetMemLru, Policy::Log, Policy::LogLru] {
            let share = of(indexed(exponent, Shape::new(policy)));
            println!("  {policy} {share:.4}");
            assert!(share >= 0.98, "{policy} at zipf {exponent}: {share} of LRU");
        }
        let wide = Shape::with(Policy::SetMem, 16, None).expect("16 ways are allowed");
        println!("  sets of 16: {:.4}", of(indexed(exponent, wide)));
        assert!((0.85..0.96).contains(&basic), "{basic}");
        assert!(set > basic);
    }
}
