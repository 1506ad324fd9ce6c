//! Stores on a file of a pool: what is left of the index is on a device aside, and a set stays in one place.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Case, Random, SECRET, body, key, options};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;
use varve_cache::device::{Access, Device, HookedDevice, MemoryDevice, MovingDevice};
use varve_cache::store::Superblock;
use varve_cache::{Cache, Policy, PutOptions, StorePlan};

const LEN: u64 = 64 << 20;

/// A store on a pool, with what was read and written of the medium.
struct OnPool {
    medium: Arc<MemoryDevice>,
    accesses: Arc<Mutex<Vec<Access>>>,
    case: Case,
}

impl OnPool {
    fn new(policy: Policy) -> Self {
        let made = Self {
            medium: Arc::new(MemoryDevice::new(LEN)),
            accesses: Arc::default(),
            case: Case {
                policy,
                on_pool: true,
            },
        };
        Cache::format_with(&[&*made.device()], &StorePlan::new(policy), true, SECRET).unwrap();
        made
    }

    fn device(&self) -> Arc<dyn Device> {
        let accesses = Arc::clone(&self.accesses);
        let hooked = HookedDevice::new(self.medium.clone(), move |access| {
            accesses.lock().unwrap().push(access);
        });
        self.case.device(Arc::new(hooked))
    }

    fn open(&self) -> Cache {
        Cache::open(vec![self.device()], &options(), false).unwrap().0
    }

    /// Reads and writes of a range of the medium since the last call.
    fn take(&self, range: Range<u64>) -> (Vec<u64>, Vec<u64>) {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for access in std::mem::take(&mut *self.accesses.lock().unwrap()) {
            match access {
                Access::Read(off) if range.contains(&off) => reads.push(off),
                Access::Write(off) if range.contains(&off) => writes.push(off),
                _ => {}
            }
        }
        (reads, writes)
    }
}

fn layout_of(cache: &Cache) -> Superblock {
    *cache.shards().next().unwrap().layout()
}

fn table(layout: &Superblock) -> Range<u64> {
    layout.table.off..layout.table.off + layout.table.len
}

fn aside(layout: &Superblock) -> Range<u64> {
    // Behind its head.
    let off = MovingDevice::main_bytes(LEN) + 4096;
    off..off + layout.positions_file.len
}

fn put(cache: &Cache, n: u64, version: u64) {
    let stored = cache.put(&key(n), &body(n, version, 3000), PutOptions::default());
    stored.unwrap();
}

#[test]
fn sets_that_left_memory_come_back_without_the_disk_table() {
    let pool = OnPool::new(Policy::SetMemLru);
    let cache = pool.open();
    let layout = layout_of(&cache);
    assert_ne!(layout.aside, 0);
    let room = layout.sets * 8;
    // Every set was read once, and most left memory again.
    for n in 0..room {
        put(&cache, n, 1);
    }
    cache.flush().unwrap();
    assert!(cache.stats().sweeps > 10, "{}", cache.stats().sweeps);
    pool.take(0..LEN);
    let absent = 20_000;
    for n in 0..absent {
        assert!(cache.get(format!("never put {n}").as_bytes()).is_none());
    }
    let all = std::mem::take(&mut *pool.accesses.lock().unwrap());
    let reads = |range: Range<u64>| {
        let of = |access: &&Access| matches!(access, Access::Read(off) if range.contains(off));
        all.iter().filter(of).count()
    };
    let (of_table, of_file) = (reads(table(&layout)), reads(aside(&layout)));
    // Three in a hundred match by their tag.
    assert!(of_table < absent / 20, "{of_table} reads of the Disk Table");
    assert!(of_file > absent / 2, "{of_file} reads of the file of sets");

    // A new version, while its set goes and comes.
    let (mut found, mut old) = (0, 0);
    for n in (0..room).step_by(7) {
        put(&cache, n, 2);
    }
    for n in 0..room {
        let Some(got) = cache.get_body(&key(n)) else {
            continue;
        };
        found += 1;
        let version = if n % 7 == 0 { 2 } else { 1 };
        old += u64::from(got != body(n, version, 3000));
    }
    assert_eq!(old, 0);
    assert!(found > room / 2, "{found} of {room}");
}

/// Removed keys must not come back by an older version that a set of before let lie in the Disk Table.
#[test]
fn file_of_sets_of_before_is_not_believed() {
    for is_resized in [false, true] {
        let pool = OnPool::new(Policy::SetMemLru);
        let mut cache = pool.open();
        let layout = layout_of(&cache);
        let few = 100;
        // The file has most sets, without the keys to come.
        for n in 0..layout.sets * 12 {
            put(&cache, few + n, 1);
        }
        assert!(cache.stats().sweeps > 10);
        let again = |cache: Cache, resident: f64| {
            if is_resized {
                cache.set_resident_share(resident);
                return cache;
            }
            cache.close().unwrap();
            drop(cache);
            pool.open()
        };
        cache = again(cache, 0.9);
        (0..few).for_each(|n| put(&cache, n, 1));
        cache = again(cache, 0.1);
        // Others of their sets are used, so that not the same bins are chosen.
        for n in layout.sets * 8..layout.sets * 12 {
            let _ = cache.get(&key(few + n));
        }
        for n in 0..few {
            put(&cache, n, 2);
            assert!(cache.get_body(&key(n)) == Some(body(n, 2, 3000)));
            cache.remove(&key(n)).unwrap();
        }
        cache.close().unwrap();
        let cache = pool.open();
        let back = (0..few).filter(|n| cache.get(&key(*n)).is_some()).count();
        assert_eq!(back, 0, "of {few} removed keys; resized: {is_resized}");
    }
}

#[test]
fn set_is_written_as_a_whole_where_writes_move() {
    let pool = OnPool::new(Policy::Set);
    let cache = pool.open();
    let layout = layout_of(&cache);
    assert_eq!(layout.aside, 0, "it leaves nothing on disk");
    let set_bytes = layout.set_disk_bytes();
    assert_eq!(layout.table.off % set_bytes, 0);
    for n in 0..2000 {
        // A proxy looks before it stores.
        assert!(cache.get(&key(n)).is_none());
        put(&cache, n, 1);
    }
    cache.flush().unwrap();
    let (_, writes) = pool.take(table(&layout));
    assert!(writes.len() > 200);
    let whole = |off: &&u64| (**off - layout.table.off).is_multiple_of(set_bytes);
    assert_eq!(writes.iter().filter(whole).count(), writes.len());
    // Removing too, and what is there is the same after a restart.
    cache.remove(&key(3)).unwrap();
    cache.close().unwrap();
    let cache = pool.open();
    assert!(cache.get(&key(3)).is_none());
    let there = (0..2000).filter(|n| cache.get_body(&key(*n)) == Some(body(*n, 1, 3000)));
    assert!(there.count() > 1000);
}

#[test]
fn file_of_that_name_is_not_written_to_unless_it_is_this_stores() {
    let pool = OnPool::new(Policy::LogLru);
    drop(pool.open());
    let off = MovingDevice::main_bytes(LEN);
    let refusal = || {
        Cache::open(vec![pool.device()], &options(), false)
            .unwrap_err()
            .to_string()
    };
    let format = || {
        let plan = StorePlan::new(Policy::LogLru);
        Cache::format_with(&[&*pool.device()], &plan, true, SECRET).map(drop)
    };
    // One copy of its head is damaged.
    pool.medium.flip(off + 9, 3);
    drop(pool.open());
    // Somebody's text, with the store there, and before one is made.
    pool.medium.write_at(off, &[b'x'; 4096]).unwrap();
    assert!(refusal().contains("is no file of a cache store"), "{}", refusal());
    assert!(format().unwrap_err().to_string().contains("move it away"));
    let mut page = [0; 4096];
    pool.medium.read_at(off, &mut page).unwrap();
    assert_eq!(page, [b'x'; 4096]);
    // Another store's.
    pool.medium.write_at(off, &[0; 4096]).unwrap();
    format().unwrap();
    drop(pool.open());
    pool.medium.read_at(off, &mut page).unwrap();
    format().unwrap();
    pool.medium.write_at(off, &page).unwrap();
    assert!(refusal().contains("belongs to another"), "{}", refusal());
    format().unwrap();
    drop(pool.open());
}

#[test]
fn positions_are_read_from_the_device_aside_and_missing_ones_are_misses() {
    let pool = OnPool::new(Policy::LogLru);
    let cache = pool.open();
    let layout = layout_of(&cache);
    let objects = layout.sets * 8;
    for n in 0..objects {
        put(&cache, n, 1);
    }
    cache.close().unwrap();
    let cache = pool.open();
    pool.take(0..LEN);
    let found = |cache: &Cache| {
        let right = |n: &u64| match cache.get_body(&key(*n)) {
            Some(got) => {
                assert!(got == body(*n, 1, 3000));
                true
            }
            None => false,
        };
        (0..objects).filter(right).count()
    };
    let there = found(&cache);
    let (reads, writes) = pool.take(aside(&layout));
    assert!(reads.len() > 100 && writes.is_empty());
    let range = layout.positions_file.off..layout.positions_file.off + layout.positions_file.len;
    found(&cache);
    assert_eq!(
        pool.take(range).0,
        [0; 0],
        "the range of the store's own file is not used"
    );
    cache.close().unwrap();
    drop(cache);

    // The file is gone: zeros.
    let off = aside(&layout).start;
    pool.medium
        .write_at(off, &vec![0; layout.positions_file.len as usize])
        .unwrap();
    let cache = pool.open();
    let left = found(&cache);
    assert!(left < there && left > there / 10, "{left} of {there}");
}

#[test]
fn lookups_beside_puts_find_only_the_newest_while_sets_come_and_go() {
    for policy in [Policy::SetMemLru, Policy::Set, Policy::LogLru] {
        let pool = OnPool::new(policy);
        let cache = pool.open();
        cache.set_resident_share(0.05);
        let (threads, rounds) = (4, 6000);
        let found: u64 = std::thread::scope(|scope| {
            let each = |thread: u64| {
                let cache = &cache;
                scope.spawn(move || {
                    let mut random = Random(thread);
                    let (mut newest, mut found) = (HashMap::new(), 0);
                    for round in 1..rounds {
                        let n = random.below(1500) * threads + thread;
                        match random.below(10) {
                            0..4 => {
                                put(cache, n, round);
                                newest.insert(n, round);
                            }
                            4 => {
                                cache.remove(&key(n)).unwrap();
                                newest.remove(&n);
                            }
                            _ => {
                                let Some(got) = cache.get_body(&key(n)) else {
                                    continue;
                                };
                                let version = newest.get(&n).copied();
                                assert!(
                                    version.is_some_and(|version| got == body(n, version, 3000)),
                                    "{n}"
                                );
                                found += 1;
                            }
                        }
                    }
                    found
                })
            };
            let running: Vec<_> = (0..threads).map(each).collect();
            running.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(found > threads * rounds / 10, "{policy}: {found}");
        assert_eq!(cache.check().unwrap().damaged, 0);
    }
}
