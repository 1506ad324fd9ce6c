//! What a store promises while nothing goes wrong, for each policy.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Case, Random, SECRET, body, format, key, open, options, plan};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use varve_cache::device::{Access, CountingDevice, Device, FileDevice, HookedDevice, MemoryDevice};
use varve_cache::store::Admission;
use varve_cache::{
    Cache, KeyHash, MemoryLookup, Options, Policy, PutOptions, PutOutcome, Related, Scope, Secret, StoreError,
};

const LEN: u64 = 8 << 20;

fn memory(policy: Policy) -> Arc<MemoryDevice> {
    let device = Arc::new(MemoryDevice::new(LEN));
    format(&*device, &plan(policy));
    device
}

#[test]
fn objects_of_every_size_are_given_back_whole_and_by_range() {
    for policy in Policy::ALL {
        let cache = open(memory(policy));
        let sizes = [
            0, 1, 500, 3000, 4096, 8192, 60_000, 65_536, 70_000, 131_072, 300_000, 1_500_000,
        ];
        for (n, len) in sizes.into_iter().enumerate() {
            let n = n as u64;
            let meta = vec![n as u8; 100];
            let options = PutOptions {
                meta: &meta,
                ..PutOptions::default()
            };
            let done = cache.put(&key(n), &body(n, 1, len), options).unwrap();
            assert!(
                matches!(done, PutOutcome::Stored { .. }),
                "{policy} {len}: {done:?}"
            );
            let look = || {
                let hit = cache
                    .get(&key(n))
                    .unwrap_or_else(|| panic!("{policy}: {len} bytes are a miss"));
                assert_eq!(hit.body_len(), len as u64);
                assert_eq!(hit.meta().unwrap(), meta);
                let whole = body(n, 1, len);
                assert!(hit.body().unwrap() == whole, "{policy} {len}");
                let (from, to) = (len as u64 / 3, len as u64 - len as u64 / 4);
                assert!(hit.read(from..to).unwrap() == whole[from as usize..to as usize]);
                assert!(matches!(
                    hit.read(0..len as u64 + 1),
                    Err(StoreError::OutOfRange { .. })
                ));
            };
            look();
            cache.flush().unwrap();
            look();
        }
    }
}

#[test]
fn large_objects_come_in_pieces_beside_other_puts() {
    for policy in Policy::ALL {
        let cache = open(memory(policy));
        let whole = body(1, 1, 1_200_000);
        let mut stream = cache
            .put_stream(&key(1), whole.len() as u64, PutOptions::default())
            .unwrap()
            .unwrap();
        for (n, piece) in whole.chunks(50_001).enumerate() {
            stream.write(piece).unwrap();
            cache
                .put(&key(100 + n as u64), b"between", PutOptions::default())
                .unwrap();
            assert!(cache.get(&key(1)).is_none(), "not before it is whole");
        }
        assert!(matches!(stream.finish().unwrap(), PutOutcome::Stored { .. }));
        assert!(cache.get_body(&key(1)).unwrap() == whole, "{policy}");
        let mut short = cache
            .put_stream(&key(2), 900_000, PutOptions::default())
            .unwrap()
            .unwrap();
        short.write(b"too few").unwrap();
        assert!(matches!(
            short.finish(),
            Err(StoreError::Length {
                expected: 900_000,
                got: 7
            })
        ));
        let mut long = cache
            .put_stream(&key(2), 3, PutOptions::default())
            .unwrap()
            .unwrap();
        assert!(long.write(b"too many").is_err());
        assert!(cache.get(&key(2)).is_none());
        let too_large = cache
            .put_stream(&key(3), 6 << 20, PutOptions::default())
            .unwrap()
            .unwrap();
        drop(too_large);
        let done = cache
            .put(&key(3), &vec![0; 6 << 20], PutOptions::default())
            .unwrap();
        assert_eq!(done, PutOutcome::TooLarge);
    }
}

/// Random puts, gets, removals, purges and restarts; what is found is always the newest version.
fn walk(case: Case, seed: u64, steps: u32, second_chance: f64) -> (u64, u64) {
    let policy = case.policy;
    let device = case.device(Arc::new(MemoryDevice::new(LEN)));
    format(&*device, &plan(policy));
    let open = || {
        let options = Options {
            second_chance,
            ..options()
        };
        Cache::open(vec![device.clone()], &options, false).unwrap().0
    };
    let mut cache = open();
    let mut random = Random(seed);
    let mut newest: HashMap<u64, (u64, usize)> = HashMap::new();
    let (mut hits, mut there) = (0, 0);
    for step in 0..u64::from(steps) {
        // Popular keys are asked for often.
        let n = if random.below(2) == 0 {
            random.below(40)
        } else {
            random.below(3000)
        };
        match random.below(100) {
            0..45 => {
                let len = match random.below(20) {
                    0 => random.below(200_000),
                    1..5 => random.below(20_000),
                    _ => random.below(3000),
                } as usize;
                let tag = [(n % 4) as u8];
                let options = PutOptions {
                    tags: &[&tag],
                    ..PutOptions::default()
                };
                let done = cache.put(&key(n), &body(n, step, len), options).unwrap();
                assert!(matches!(done, PutOutcome::Stored { .. }));
                newest.insert(n, (step, len));
            }
            45..90 => {
                let found = cache.get_body(&key(n));
                match newest.get(&n) {
                    Some(&(version, len)) => {
                        there += 1;
                        if let Some(found) = found {
                            assert!(
                                found == body(n, version, len),
                                "{case}: an old version or another object"
                            );
                            hits += 1;
                        }
                    }
                    None => assert!(found.is_none(), "{case}: {n} was never put or is gone"),
                }
            }
            90..95 => {
                cache.remove(&key(n)).unwrap();
                newest.remove(&n);
            }
            95..97 => cache.flush().unwrap(),
            97 if random.below(20) == 0 => {
                cache.purge(Scope::Tag(&[(n % 4) as u8])).unwrap();
                newest.retain(|&other, _| other % 4 != n % 4);
            }
            98 if random.below(4) == 0 => {
                cache.close().unwrap();
                drop(cache);
                cache = open();
            }
            _ => {}
        }
    }
    let mut seen = HashMap::new();
    cache
        .scan(|info| {
            let n: u64 = String::from_utf8(info.key)
                .unwrap()
                .rsplit('/')
                .next()
                .unwrap()
                .parse()
                .unwrap();
            assert!(newest.contains_key(&n), "{case}: scan shows {n}, which is gone");
            assert_eq!(seen.insert(n, info.version), None, "{case}: {n} is found twice");
        })
        .unwrap();
    let capacity: u64 = cache
        .shards()
        .map(|s| s.layout().sets * s.layout().shape().ways() as u64)
        .sum();
    assert!(seen.len() as u64 <= capacity);
    assert!(seen.len() > 50, "{case}: {} objects", seen.len());
    assert_eq!(cache.check().unwrap().damaged, 0);
    assert_eq!(cache.stats().damaged, 0, "{case}");
    (hits, there)
}

#[test]
fn only_the_newest_version_is_ever_found() {
    for case in Case::all() {
        for seed in 0..3 {
            let (hits, there) = walk(case, seed, 9000, [0.25, 0.0, 1.0][seed as usize]);
            let ratio = hits as f64 / there as f64;
            let least = if case.policy == Policy::Basic { 0.3 } else { 0.5 };
            assert!(ratio > least, "{case}: {hits} of {there} lookups of what was put");
        }
    }
}

#[test]
fn related_objects_are_read_with_the_first_one() {
    for policy in [Policy::LogPrefetch, Policy::LogLruPrefetch] {
        let memory = memory(policy);
        let device = Arc::new(CountingDevice::new(memory));
        let cache = open(device.clone());
        let bodies: Vec<_> = (0..12).map(|n| body(n, 1, 3000)).collect();
        let keys: Vec<_> = (0..12).map(key).collect();
        let objects: Vec<_> = keys
            .iter()
            .zip(&bodies)
            .map(|(key, body)| Related::new(key, body))
            .collect();
        cache.put_related(&objects).unwrap();
        cache.close().unwrap();
        let cache = open(device.clone());
        device.take();
        for (key, body) in keys.iter().zip(&bodies) {
            assert!(cache.get_body(key).as_ref() == Some(body));
        }
        assert_eq!(device.take().reads, 1, "{policy}: one read brings all");
        assert_eq!(cache.stats().prefetched, 11);
    }
}

#[test]
fn purges_cover_their_scope_and_outlive_a_restart() {
    for policy in Policy::ALL {
        let device = memory(policy);
        let cache = open(device.clone());
        let put = |cache: &Cache, name: &str, tag: &[u8], host: &[u8]| {
            let options = PutOptions {
                tags: &[tag],
                host: Some(host),
                ..PutOptions::default()
            };
            cache.put(name.as_bytes(), name.as_bytes(), options).unwrap();
        };
        let has = |cache: &Cache, name: &str| cache.get(name.as_bytes()).is_some();
        put(&cache, "a/1", b"t1", b"h1");
        put(&cache, "a/2", b"t2", b"h1");
        put(&cache, "b/1", b"t1", b"h2");
        put(&cache, "b/2", b"t2", b"h3");
        cache.purge(Scope::Tag(b"t1")).unwrap();
        assert!(!has(&cache, "a/1") && !has(&cache, "b/1"), "{policy}");
        assert!(has(&cache, "a/2") && has(&cache, "b/2"), "{policy}");
        put(&cache, "a/1", b"t1", b"h1");
        assert!(has(&cache, "a/1"), "put after the purge");
        cache.purge(Scope::Prefix(b"a/")).unwrap();
        assert!(!has(&cache, "a/1") && !has(&cache, "a/2") && has(&cache, "b/2"));
        cache.purge(Scope::Host(b"h3")).unwrap();
        assert!(!has(&cache, "b/2"));
        put(&cache, "c", b"t", b"h");
        put(&cache, "d", b"t", b"h");
        cache.purge(Scope::Key(b"c")).unwrap();
        let image = device.copy();
        let again = open(Arc::new(image));
        assert!(
            ["a/1", "a/2", "b/1", "b/2", "c"]
                .iter()
                .all(|name| !has(&again, name)),
            "{policy}"
        );
        assert!(has(&again, "d"), "{policy}");
        again.purge(Scope::Everything).unwrap();
        assert!(!has(&again, "d"));
        put(&again, "d", b"t", b"h");
        assert!(has(&again, "d"));
    }
}

#[test]
fn objects_are_not_served_after_they_expire() {
    use std::sync::atomic::{AtomicU64, Ordering};
    let now = Arc::new(AtomicU64::new(100));
    for policy in Policy::ALL {
        now.store(100, Ordering::Relaxed);
        let clock = now.clone();
        let options = Options {
            clock: Arc::new(move || clock.load(Ordering::Relaxed)),
            ..options()
        };
        let cache = Cache::open(vec![memory(policy) as Arc<dyn Device>], &options, false)
            .unwrap()
            .0;
        cache
            .put(
                b"k",
                b"v",
                PutOptions {
                    expires_s: 200,
                    ..PutOptions::default()
                },
            )
            .unwrap();
        assert!(cache.get(b"k").is_some());
        now.store(200, Ordering::Relaxed);
        assert!(cache.get(b"k").is_none(), "{policy}");
    }
}

#[test]
fn failing_device_is_a_miss_and_nothing_old_comes_back() {
    for policy in Policy::ALL {
        let memory = memory(policy);
        let device = Arc::new(CountingDevice::new(memory.clone()));
        let cache = open(device.clone());
        cache.put(b"k", b"old", PutOptions::default()).unwrap();
        cache.flush().unwrap();
        device.fail_writes(true);
        cache.put(b"k", b"new", PutOptions::default()).unwrap();
        assert!(cache.flush().is_err());
        assert!(cache.get(b"k").is_none(), "{policy}: the device was given up");
        assert_eq!(
            cache.put(b"k", b"newer", PutOptions::default()).unwrap(),
            PutOutcome::Unavailable
        );
        assert!(
            cache
                .shards()
                .next()
                .unwrap()
                .fault()
                .unwrap()
                .contains("told to fail")
        );
        drop(cache);
        // Reads that fail are misses too, and after a while the device is given up.
        device.fail_writes(false);
        let cache = open(device.clone());
        for n in 0..100 {
            cache
                .put(&key(n), &body(n, 1, 2000), PutOptions::default())
                .unwrap();
        }
        cache.close().unwrap();
        drop(cache);
        let options = Options {
            hot_bytes: 0,
            ..options()
        };
        let cache = Cache::open(vec![device.clone() as Arc<dyn Device>], &options, false)
            .unwrap()
            .0;
        device.fail_reads(true);
        assert!((0..100).all(|n| cache.get(&key(n)).is_none()));
        device.fail_reads(false);
        assert!(cache.shards().next().unwrap().is_failed());
    }
}

#[test]
fn device_that_fails_and_works_again_has_lost_its_objects_when_the_mark_could_be_written() {
    let memory = memory(Policy::Log);
    let cache = open(memory.clone());
    cache.put(b"k", b"old", PutOptions::default()).unwrap();
    cache.close().unwrap();
    drop(cache);
    // The mark that a store leaves when writes to the log fail: here as if ENOSPC had spared the superblock.
    let mut mark = varve_cache::store::Superblock::read(&*memory).unwrap().0;
    mark.floor = u64::MAX;
    mark.write(&*memory).unwrap();
    let (cache, opened) = Cache::open(vec![memory as Arc<dyn Device>], &options(), false).unwrap();
    assert!(opened[0].gave_up);
    assert!(cache.get(b"k").is_none());
    cache.put(b"k", b"new", PutOptions::default()).unwrap();
    assert_eq!(cache.get_body(b"k").unwrap(), b"new");
}

#[test]
fn lost_device_costs_its_share_only() {
    let devices: Vec<_> = (1..4).map(|n| Arc::new(MemoryDevice::new(n * LEN))).collect();
    let all = || devices.iter().map(|device| device.clone() as Arc<dyn Device>);
    let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device as &dyn Device).collect();
    Cache::format(&refs, &plan(Policy::Log), false).unwrap();
    assert!(matches!(
        Cache::format(&refs, &plan(Policy::Log), false),
        Err(StoreError::StoreExists { .. })
    ));
    let cache = Cache::open(all().rev().collect(), &options(), false).unwrap().0;
    for n in 0..600 {
        cache
            .put(&key(n), &body(n, 1, 900), PutOptions::default())
            .unwrap();
    }
    let found = |cache: &Cache| {
        (0..600)
            .filter(|&n| cache.get_body(&key(n)).is_some_and(|b| b == body(n, 1, 900)))
            .count()
    };
    assert!(found(&cache) > 590);
    cache.close().unwrap();
    drop(cache);
    let two = || all().skip(1).collect::<Vec<_>>();
    assert!(matches!(
        Cache::open(two(), &options(), false),
        Err(StoreError::Devices(_))
    ));
    let cache = Cache::open(two(), &options(), true).unwrap().0;
    let left = found(&cache);
    assert!((460..540).contains(&left), "the lost device had a sixth: {left}");
    let outcomes = (0..600).map(|n| cache.put(&key(n), b"x", PutOptions::default()).unwrap());
    let refused = outcomes
        .filter(|outcome| *outcome == PutOutcome::Unavailable)
        .count();
    assert!((60..140).contains(&refused), "{refused}");
    let twice = vec![devices[1].clone() as Arc<dyn Device>, devices[1].clone()];
    assert!(matches!(
        Cache::open(twice, &options(), true),
        Err(StoreError::Devices(_))
    ));
}

#[test]
fn object_that_is_not_admitted_takes_its_old_version_with_it() {
    for policy in Policy::ALL {
        let device = memory(policy);
        let cache = open(device.clone());
        cache.put(b"k", b"old", PutOptions::default()).unwrap();
        cache.close().unwrap();
        drop(cache);
        let options = Options {
            admission: Admission::Probability(0.0),
            ..options()
        };
        let cache = Cache::open(vec![device as Arc<dyn Device>], &options, false)
            .unwrap()
            .0;
        assert_eq!(cache.get_body(b"k").unwrap(), b"old");
        assert_eq!(
            cache.put(b"k", b"new", PutOptions::default()).unwrap(),
            PutOutcome::NotAdmitted
        );
        assert!(cache.get(b"k").is_none(), "{policy}");
    }
}

#[test]
fn second_chance_keeps_what_is_hit_over_laps_of_the_log() {
    let survive = |second_chance| {
        let options = Options {
            second_chance,
            hot_bytes: 0,
            ..options()
        };
        let cache = Cache::open(vec![memory(Policy::Log) as Arc<dyn Device>], &options, false)
            .unwrap()
            .0;
        for n in 0..12_000 {
            // The popular ones come one by one: a segment has room for a quarter of its objects.
            if n % 40 == 0 && n < 2000 {
                let n = n / 40;
                cache
                    .put(&key(n), &body(n, 1, 1500), PutOptions::default())
                    .unwrap();
            }
            cache
                .put(&key(1000 + n), &body(n, 1, 1500), PutOptions::default())
                .unwrap();
            cache.get(&key(n % 50));
        }
        (0..50)
            .filter(|&n| cache.get_body(&key(n)).is_some_and(|b| b == body(n, 1, 1500)))
            .count()
    };
    let (with, without) = (survive(0.25), survive(0.0));
    assert!(with > 40, "{with}");
    assert_eq!(without, 0);
}

#[test]
fn store_lies_on_a_file_and_survives_a_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    for policy in Policy::ALL {
        let device = FileDevice::create(&path, LEN).unwrap();
        format(&device, &plan(policy));
        drop(device);
        let cache = open(Arc::new(FileDevice::open(&path).unwrap()));
        for n in 0..200 {
            cache
                .put(&key(n), &body(n, 1, 2500), PutOptions::default())
                .unwrap();
        }
        cache.close().unwrap();
        drop(cache);
        let device: Arc<dyn Device> = Arc::new(FileDevice::open(&path).unwrap());
        let (cache, opened) = Cache::open(vec![device], &options(), false).unwrap();
        assert!(opened[0].clean, "{policy}");
        let found = (0..200)
            .filter(|&n| cache.get_body(&key(n)).is_some_and(|b| b == body(n, 1, 2500)))
            .count();
        assert!(found > 150, "{policy}: {found}");
    }
}

#[test]
fn set_that_was_read_answers_for_absent_keys_until_it_changes() {
    for policy in [Policy::Basic, Policy::Set] {
        let device = Arc::new(CountingDevice::new(Arc::new(MemoryDevice::new(LEN))));
        format(&*device, &plan(policy));
        let cache = open(device.clone() as Arc<dyn Device>);
        device.take();
        assert!(cache.get(&key(1)).is_none());
        assert_eq!(device.take().reads, 1);
        assert!(matches!(cache.get_in_memory(&key(1)), MemoryLookup::Miss));
        cache
            .put(&key(1), &body(1, 1, 900), PutOptions::default())
            .unwrap();
        assert_eq!(device.take().reads, 0, "{policy}: the set is known");
        assert_eq!(cache.get_body(&key(1)), Some(body(1, 1, 900)), "{policy}");
        cache.flush().unwrap();
        assert_eq!(cache.get_body(&key(1)), Some(body(1, 1, 900)), "{policy}");
        cache.remove(&key(1)).unwrap();
        assert!(cache.get(&key(1)).is_none());
    }
}

#[test]
fn waiting_bins_side_by_side_are_one_write_and_two_puts_to_one_bin_too() {
    let device = Arc::new(CountingDevice::new(Arc::new(MemoryDevice::new(LEN))));
    format(&*device, &plan(Policy::SetMem));
    let cache = open(device.clone() as Arc<dyn Device>);
    let shard = Arc::clone(cache.shards().next().unwrap());
    let sets = shard.layout().sets;
    let in_set = |number: u64| {
        let secret = Secret(SECRET);
        (0..).filter(move |n| KeyHash::of(&secret, &key(*n)).set(sets) == number)
    };
    // The sets are empty, so that each put takes the next bin of its set.
    let keys: Vec<u64> = in_set(5).take(3).collect();
    for n in &keys {
        cache
            .put(&key(*n), &body(*n, 1, 900), PutOptions::default())
            .unwrap();
        cache
            .put(&key(*n), &body(*n, 2, 900), PutOptions::default())
            .unwrap();
    }
    assert_eq!(cache.stats().bin_writes, 0);
    cache.flush().unwrap();
    assert_eq!(cache.stats().bin_writes, 1);
    for n in &keys {
        assert_eq!(cache.get_body(&key(*n)), Some(body(*n, 2, 900)));
    }
}

/// Reads that are held back until a second one has come.
struct Pairs {
    reads: Mutex<u32>,
    came: Condvar,
    are_alone: AtomicBool,
}

impl Pairs {
    fn hold(&self, access: Access) {
        if matches!(access, Access::Write(_)) {
            return;
        }
        let mut reads = self.reads.lock().unwrap();
        *reads += 1;
        self.came.notify_all();
        let wait = Duration::from_secs(5);
        let waited = self.came.wait_timeout_while(reads, wait, |reads| *reads < 2);
        if waited.unwrap().1.timed_out() {
            self.are_alone.store(true, Ordering::SeqCst);
        }
    }
}

#[test]
fn puts_read_their_sets_side_by_side() {
    let pairs = Arc::new(Pairs {
        reads: Mutex::new(100),
        came: Condvar::new(),
        are_alone: AtomicBool::new(false),
    });
    let held = Arc::clone(&pairs);
    let device = HookedDevice::new(memory(Policy::Set), move |access| held.hold(access));
    let cache = open(Arc::new(device));
    *pairs.reads.lock().unwrap() = 0;
    std::thread::scope(|scope| {
        for n in [1, 2] {
            let cache = &cache;
            scope.spawn(move || {
                cache
                    .put(&key(n), &body(n, 1, 900), PutOptions::default())
                    .unwrap()
            });
        }
    });
    assert!(
        !pairs.are_alone.load(Ordering::SeqCst),
        "one waited for the other"
    );
    *pairs.reads.lock().unwrap() = 100;
    for n in [1, 2] {
        assert_eq!(cache.get_body(&key(n)), Some(body(n, 1, 900)));
    }
}

#[test]
fn objects_of_changing_sizes_are_found_while_the_log_holds_them_in_memory() {
    for policy in [Policy::Log, Policy::LogLru, Policy::LogPrefetch] {
        let mut plan = plan(policy);
        plan.segment_bytes = 1 << 20;
        let device = Arc::new(MemoryDevice::new(64 << 20));
        format(&*device, &plan);
        let options = Options {
            hot_bytes: 0,
            ..options()
        };
        let cache = Cache::open(vec![device as Arc<dyn Device>], &options, false)
            .unwrap()
            .0;
        let mut random = Random(7);
        for n in 0..400 {
            let len = random.below(1 << (6 + n % 10)) as usize;
            cache
                .put(&key(n), &body(n, 1, len), PutOptions::default())
                .unwrap();
            assert_eq!(
                cache.get_body(&key(n)),
                Some(body(n, 1, len)),
                "{policy}: {len} bytes"
            );
        }
        assert_eq!(cache.stats().damaged, 0, "{policy}");
    }
}
