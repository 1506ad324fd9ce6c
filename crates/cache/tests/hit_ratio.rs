//! Hit ratios of the policies' replacement against LRU, FIFO, S3-FIFO and Belady's MIN of the same capacity,
//! on zipf loads.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
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
    let mut order = BTreeMap::new();
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

/// FIFO: the key that came first goes.
fn fifo(exponent: f64) -> f64 {
    let (mut queue, mut there) = (VecDeque::<u32>::new(), HashSet::new());
    ratio(exponent, |key| {
        let hit = !there.insert(key);
        if !hit {
            queue.push_back(key);
        }
        if queue.len() as u64 > CAPACITY {
            there.remove(&queue.pop_front().expect("the cache is full"));
        }
        hit
    })
}

/// S3-FIFO (Yang and others, SOSP '23): a small queue of a tenth for what is new, a main one, and a list of
/// keys that lately left the small one.
fn s3_fifo(exponent: f64) -> f64 {
    let small_room = CAPACITY as usize / 10;
    let (mut small, mut main) = (VecDeque::<u32>::new(), VecDeque::<u32>::new());
    let mut ghost = VecDeque::<u32>::new();
    // How often a key that is there was hit, at most 3.
    let mut there: HashMap<u32, u8> = HashMap::new();
    let mut ghosts: HashMap<u32, u32> = HashMap::new();
    ratio(exponent, |key| {
        if let Some(hits) = there.get_mut(&key) {
            *hits = (*hits + 1).min(3);
            return true;
        }
        while there.len() as u64 >= CAPACITY {
            if small.len() > small_room {
                let old = small.pop_front().expect("it is not empty");
                if there[&old] > 1 {
                    there.insert(old, 0);
                    main.push_back(old);
                    continue;
                }
                there.remove(&old);
                ghost.push_back(old);
                *ghosts.entry(old).or_default() += 1;
                if ghost.len() > CAPACITY as usize - small_room {
                    let gone = ghost.pop_front().expect("it is not empty");
                    let count = ghosts.get_mut(&gone).expect("it was counted");
                    *count -= 1;
                    if *count == 0 {
                        ghosts.remove(&gone);
                    }
                }
            } else {
                let old = main.pop_front().expect("one of both is full");
                let hits = there.get_mut(&old).expect("it is there");
                if *hits > 0 {
                    *hits -= 1;
                    main.push_back(old);
                } else {
                    there.remove(&old);
                }
            }
        }
        there.insert(key, 0);
        if ghosts.contains_key(&key) {
            main.push_back(key);
        } else {
            small.push_back(key);
        }
        false
    })
}

/// Belady's MIN: the key that is asked for again last, or never, goes. It knows the future.
fn belady(exponent: f64) -> f64 {
    let mut zipf = Zipf::new(exponent);
    let trace: Vec<u32> = (0..WARM + COUNTED).map(|_| zipf.next()).collect();
    let mut next = vec![usize::MAX; trace.len()];
    let mut last: HashMap<u32, usize> = HashMap::new();
    for (at, key) in trace.iter().enumerate().rev() {
        next[at] = last.insert(*key, at).unwrap_or(usize::MAX);
    }
    let mut there: HashMap<u32, usize> = HashMap::new();
    let mut order = BTreeSet::<(usize, u32)>::new();
    let mut now = 0;
    ratio(exponent, |key| {
        let again = next[now];
        now += 1;
        let before = there.insert(key, again);
        match before {
            Some(before) => {
                order.remove(&(before, key));
            }
            // The new one may go itself.
            None if there.len() as u64 > CAPACITY => {
                let last = order.last().copied().expect("the cache is full");
                let (_, gone) = last.max((again, key));
                there.remove(&gone);
                if gone == key {
                    return false;
                }
                order.remove(&last);
            }
            None => {}
        }
        order.insert((again, key));
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
        let (min, queue, s3) = (belady(exponent), fifo(exponent), s3_fifo(exponent));
        println!("zipf {exponent}, hits and share of what LRU hits");
        for (name, hits) in [("Belady", min), ("S3-FIFO", s3), ("LRU", best), ("FIFO", queue)] {
            println!("  {name:<12} {hits:.4} {:.4}", of(hits));
        }
        for (name, share) in [("basic", basic), ("set", set)] {
            println!("  {name:<12} {:.4} {share:.4}", share * best);
        }
        assert!(
            min > s3 && min > best && best > queue,
            "{min} {s3} {best} {queue}"
        );
        for policy in [Policy::SetMem, Policy::SetMemLru, Policy::Log, Policy::LogLru] {
            let share = of(indexed(exponent, Shape::new(policy)));
            println!("  {:<12} {:.4} {share:.4}", policy.name(), share * best);
            assert!(share >= 0.98, "{policy} at zipf {exponent}: {share} of LRU");
        }
        let wide = Shape::with(Policy::SetMem, 16, None).expect("16 ways are allowed");
        let wide = indexed(exponent, wide);
        println!("  {:<12} {wide:.4} {:.4}", "sets of 16", of(wide));
        assert!((0.85..0.96).contains(&basic), "{basic}");
        assert!(set > basic);
    }
}
