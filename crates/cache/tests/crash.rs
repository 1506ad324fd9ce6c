//! Power cuts, kills and flipped bits at any moment: what is found is a whole version of the right object,
//! and none older than what a flush made durable.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Case, Random, body, format, key, options, plan};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use varve_cache::device::{CrashDevice, Device, MemoryDevice, MovingDevice};
use varve_cache::store::{Area, Opened};
use varve_cache::{Cache, Policy, PutOptions, Related, Scope};

const LEN: u64 = 4 << 20;

/// What was done to a key, in order: a version with its length, or its end.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Done {
    step: u64,
    put: Option<usize>,
}

/// What may be found.
#[derive(Debug, Default, Clone)]
struct History {
    keys: HashMap<u64, Vec<Done>>,
    /// Everything before this step is durable.
    durable: u64,
}

impl History {
    fn note(&mut self, n: u64, step: u64, put: Option<usize>) {
        self.keys.entry(n).or_default().push(Done { step, put });
    }

    fn purge(&mut self, tag: u64, step: u64) {
        for (n, done) in &mut self.keys {
            if n % 4 == tag {
                done.push(Done { step, put: None });
            }
        }
    }

    /// Whether a body may be that of key `n`.
    fn allows(&self, n: u64, found: &[u8]) -> bool {
        let Some(done) = self.keys.get(&n) else {
            return false;
        };
        // The last thing that is durable, and all later ones.
        let first = done
            .iter()
            .rposition(|done| done.step < self.durable)
            .unwrap_or(0);
        done[first..]
            .iter()
            .any(|done| done.put.is_some_and(|len| body(n, done.step, len) == found))
    }

    /// Keys whose last state is durable and is an object.
    fn lasting(&self) -> Vec<u64> {
        let lasts = |done: &Vec<Done>| {
            done.last()
                .is_some_and(|last| last.step < self.durable && last.put.is_some())
        };
        self.keys
            .iter()
            .filter(|(_, done)| lasts(done))
            .map(|(n, _)| *n)
            .collect()
    }

    /// After a restart: what was not found is gone, what was found is all that there is.
    fn settle(&mut self, cache: &Cache, step: u64) {
        for (n, done) in &mut self.keys {
            let found = cache.get_body(&key(*n));
            let version = found.and_then(|found| {
                let is = |done: &&Done| done.put.is_some_and(|len| body(*n, done.step, len) == found);
                done.iter().rev().find(is).copied()
            });
            *done = match version {
                Some(version) => vec![version],
                None => vec![Done { step: 0, put: None }],
            };
        }
        self.durable = step;
    }
}

struct Run {
    policy: Policy,
    random: Random,
    history: History,
    step: u64,
}

impl Run {
    fn new(policy: Policy, seed: u64) -> Self {
        Self {
            policy,
            random: Random(seed),
            history: History::default(),
            step: 1,
        }
    }

    /// Some operations.
    fn work(&mut self, cache: &Cache, operations: u64) {
        for _ in 0..operations {
            self.step += 1;
            let n = self.random.below(300);
            match self.random.below(100) {
                0..55 => self.put(cache, n),
                55..60 => self.put_group(cache, n),
                60..85 => {
                    if let Some(found) = cache.get_body(&key(n)) {
                        let last = self.history.keys.get(&n).and_then(|done| done.last().copied());
                        let right = last.and_then(|last| last.put.map(|len| body(n, last.step, len)));
                        assert!(right == Some(found), "{}: not the newest version", self.policy);
                    }
                }
                85..90 => {
                    cache.remove(&key(n)).unwrap();
                    self.history.note(n, self.step, None);
                }
                90..93 => {
                    cache.flush().unwrap();
                    self.history.durable = self.step + 1;
                }
                93 => {
                    cache.purge(Scope::Tag(&[(n % 4) as u8])).unwrap();
                    self.history.purge(n % 4, self.step);
                    self.history.durable = self.step + 1;
                }
                _ => {}
            }
        }
    }

    fn put(&mut self, cache: &Cache, n: u64) {
        let len = match self.random.below(30) {
            0 => self.random.below(400_000),
            1..6 => self.random.below(30_000),
            _ => self.random.below(3000),
        } as usize;
        let tag = [(n % 4) as u8];
        let options = PutOptions {
            tags: &[&tag],
            ..PutOptions::default()
        };
        cache.put(&key(n), &body(n, self.step, len), options).unwrap();
        self.history.note(n, self.step, Some(len));
    }

    fn put_group(&mut self, cache: &Cache, n: u64) {
        let members: Vec<_> = (n..n + 4)
            .map(|n| (n, [(n % 4) as u8], body(n, self.step, 1200)))
            .collect();
        let tags: Vec<[&[u8]; 1]> = members.iter().map(|(_, tag, _)| [&tag[..]]).collect();
        let keys: Vec<_> = members.iter().map(|(n, _, _)| key(*n)).collect();
        let related: Vec<_> = members
            .iter()
            .zip(&tags)
            .zip(&keys)
            .map(|(((_, _, body), tags), key)| Related {
                key,
                body,
                options: PutOptions {
                    tags,
                    ..PutOptions::default()
                },
            })
            .collect();
        cache.put_related(&related).unwrap();
        for (n, _, _) in &members {
            self.history.note(*n, self.step, Some(1200));
        }
    }

    /// Everything that is found on an image is allowed. Gives how many of the lasting objects are there.
    fn look(&self, cache: &Cache) -> (usize, usize) {
        for n in 0..310 {
            if let Some(found) = cache.get_body(&key(n)) {
                assert!(
                    self.history.allows(n, &found),
                    "{}: key {n} gives {} bytes that it must not give; {:?}, durable {}",
                    self.policy,
                    found.len(),
                    self.history.keys.get(&n),
                    self.history.durable
                );
            }
        }
        let lasting = self.history.lasting();
        let there = lasting.iter().filter(|n| cache.get(&key(**n)).is_some()).count();
        (there, lasting.len())
    }
}

fn open(case: Case, image: &MemoryDevice) -> (Arc<CrashDevice>, Cache, Opened) {
    let device = Arc::new(CrashDevice::new(image));
    let devices = vec![case.device(device.clone())];
    let (cache, opened) = Cache::open(devices, &options(), false).unwrap();
    (device, cache, opened[0])
}

fn open_copy(case: Case, copy: MemoryDevice) -> (Cache, Opened) {
    let devices = vec![case.device(Arc::new(copy))];
    let (cache, opened) = Cache::open(devices, &options(), false).unwrap();
    (cache, opened[0])
}

fn made(case: Case) -> MemoryDevice {
    let medium = Arc::new(MemoryDevice::new(LEN));
    format(&*case.device(medium.clone()), &plan(case.policy));
    medium.copy()
}

fn rounds(default: u64) -> u64 {
    std::env::var("VARVE_CACHE_ROUNDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(default)
}

#[test]
fn power_cuts_never_bring_other_or_older_bytes() {
    for case in Case::all() {
        let policy = case.policy;
        let (mut there, mut lasting) = (0, 0);
        for seed in 0..rounds(6) {
            let mut run = Run::new(policy, seed * 1000);
            let mut image = made(case);
            // Several lives, one after the other.
            for _ in 0..6 {
                let (device, cache, opened) = open(case, &image);
                assert!(!opened.gave_up, "{case}: a power cut is no damage");
                let before = run.look(&cache);
                there += before.0;
                lasting += before.1;
                run.history.settle(&cache, run.step);
                let operations = run.random.below(400);
                run.work(&cache, operations);
                image = device.cut(|| run.random.next());
            }
        }
        println!("{case}: {there} of {lasting} durable objects are there after a power cut");
        // Objects that their sets or the log had no room for are not there either.
        let least = if policy == Policy::Basic { 0.4 } else { 0.6 };
        assert!(
            there as f64 > least * lasting as f64,
            "{case}: {there} of {lasting}"
        );
    }
}

#[test]
fn kill_loses_only_what_was_in_memory() {
    for case in Case::all() {
        let policy = case.policy;
        for seed in 0..rounds(3) {
            let mut run = Run::new(policy, seed * 77 + 5);
            let mut image = made(case);
            for _ in 0..4 {
                let (device, cache, opened) = open(case, &image);
                assert!(!opened.gave_up);
                run.look(&cache);
                run.history.settle(&cache, run.step);
                run.work(&cache, 300);
                image = device.kill();
            }
        }
    }
}

#[test]
fn flipped_bits_are_misses() {
    for case in Case::all() {
        let policy = case.policy;
        let (mut gave_up, mut all, mut there, mut lasting) = (0, 0, 0, 0);
        for seed in 0..rounds(3) {
            let mut run = Run::new(policy, seed + 99);
            let (device, cache, _) = open(case, &made(case));
            run.work(&cache, 600);
            cache.flush().unwrap();
            run.history.durable = run.step + 1;
            let clean = seed % 2 == 1;
            if clean {
                cache.close().unwrap();
            }
            let image = device.kill();
            let layout = *cache.shards().next().unwrap().layout();
            let log_used = layout.log.off + layout.log.len / 2;
            for _ in 0..60 {
                let damaged = image.copy();
                // Half of the flips hit what is before the objects.
                let end = if run.random.below(2) == 0 {
                    layout.positions_file.off + layout.positions_file.len
                } else {
                    log_used
                };
                damaged.flip(run.random.below(end), run.random.below(8) as u8);
                let (cache, opened) = open_copy(case, damaged);
                all += 1;
                gave_up += u64::from(opened.gave_up);
                let found = run.look(&cache);
                there += found.0;
                lasting += found.1;
            }
        }
        println!("{case}: of {all} flips {gave_up} cost everything; {there} of {lasting} objects were there");
        assert_eq!(
            gave_up, 0,
            "{case}: one flipped bit costs no more than what it hits"
        );
    }
}

/// Every structure of a store, by its name.
fn structures(case: Case, layout: &varve_cache::store::Superblock) -> Vec<(&'static str, Area)> {
    let pages = |area: Area, from: u64, count: u64| Area {
        off: area.off + from * 4096,
        len: count * 4096,
    };
    let superblock = Area { off: 0, len: 8192 };
    let [first, second] = layout.checkpoint;
    let aside = Area {
        off: MovingDevice::main_bytes(LEN),
        len: 4096 + layout.positions_file.len,
    };
    vec![
        ("superblock", pages(superblock, 0, 1)),
        ("superblock, copy", pages(superblock, 1, 1)),
        ("journal", layout.journal[0]),
        ("journal, copy", layout.journal[1]),
        ("checkpoint, head", pages(first, 0, 1)),
        ("checkpoint, head copy", pages(first, 1, 1)),
        ("checkpoint, pages", pages(first, 2, first.pages() - 2)),
        ("other checkpoint, head", pages(second, 0, 1)),
        ("other checkpoint, pages", pages(second, 2, second.pages() - 2)),
        match case.on_pool {
            true => ("file aside", aside),
            false => ("position file", layout.positions_file),
        },
        ("Disk Table", layout.table),
        ("log", layout.log),
    ]
}

#[test]
fn flipped_bit_in_each_structure_costs_what_it_hits() {
    let mut flips: BTreeMap<&'static str, (u64, usize, usize)> = BTreeMap::new();
    for case in Case::all() {
        let policy = case.policy;
        for seed in 0..2 {
            let mut run = Run::new(policy, 4000 + seed);
            let (device, cache, _) = open(case, &made(case));
            run.work(&cache, 600);
            cache.purge(Scope::Tag(&[1])).unwrap();
            run.step += 1;
            run.history.purge(1, run.step);
            run.work(&cache, 100);
            cache.flush().unwrap();
            run.history.durable = run.step + 1;
            if seed == 1 {
                cache.close().unwrap();
            }
            let image = device.kill();
            let layout = *cache.shards().next().unwrap().layout();
            for (name, area) in structures(case, &layout) {
                // Pages that hold something.
                let mut page = vec![0; 4096];
                let used: Vec<u64> = (0..area.pages())
                    .map(|n| area.off + n * 4096)
                    .filter(|off| {
                        image.read_at(*off, &mut page).unwrap();
                        page.iter().any(|&byte| byte != 0)
                    })
                    .collect();
                if used.is_empty() {
                    continue;
                }
                for _ in 0..2 * rounds(3) {
                    let damaged = image.copy();
                    let off = used[run.random.below(used.len() as u64) as usize];
                    // Half of them where a page's own words are.
                    let within = [64, 4096][run.random.below(2) as usize];
                    damaged.flip(off + run.random.below(within), run.random.below(8) as u8);
                    let (cache, opened) = open_copy(case, damaged);
                    assert!(!opened.gave_up, "{case}: a bit of the {name} costs everything");
                    let (there, lasting) = run.look(&cache);
                    let sum = flips.entry(name).or_default();
                    *sum = (sum.0 + 1, sum.1 + there, sum.2 + lasting);
                }
            }
        }
    }
    for (name, (count, there, lasting)) in &flips {
        println!("{name:<24} {count:>5} flips; {there} of {lasting} objects were there");
    }
    assert_eq!(flips.len(), 13, "each structure was in use: {flips:?}");
}

#[test]
fn damaged_journal_gives_up_what_it_cannot_know() {
    let case = Case::alone(Policy::Log);
    let mut run = Run::new(case.policy, 5);
    let (device, cache, _) = open(case, &made(case));
    cache.put(b"k", b"old", PutOptions::default()).unwrap();
    cache.flush().unwrap();
    cache.put(b"k", b"new", PutOptions::default()).unwrap();
    cache.flush().unwrap();
    cache.put(b"l", b"later", PutOptions::default()).unwrap();
    cache.flush().unwrap();
    run.work(&cache, 1);
    let image = device.kill();
    let layout = *cache.shards().next().unwrap().layout();
    // Both copies of a page that is not the last one.
    let pages: Vec<_> = (0..layout.journal[0].pages())
        .filter(|n| {
            let mut page = vec![0; 4096];
            image
                .read_at(layout.journal[0].off + n * 4096, &mut page)
                .unwrap();
            page.iter().any(|&byte| byte != 0)
        })
        .collect();
    let second_last = pages[pages.len() - 2];
    for area in layout.journal {
        image.flip(area.off + second_last * 4096 + 100, 1);
    }
    let (_, cache, opened) = open(case, &image);
    assert!(opened.gave_up);
    assert!(cache.get(b"k").is_none(), "it may be outdated");
}

/// Refuses pages of the journal while blocks of the Disk Table are not yet durable.
struct Ordered {
    inner: MemoryDevice,
    layout: std::sync::OnceLock<varve_cache::store::Superblock>,
    dirty: std::sync::atomic::AtomicBool,
}

impl Device for Ordered {
    fn name(&self) -> String {
        "ordered".to_owned()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), varve_cache::device::DeviceError> {
        self.inner.read_at(off, out)
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), varve_cache::device::DeviceError> {
        use std::sync::atomic::Ordering::Relaxed;
        if let Some(layout) = self.layout.get() {
            let table = layout.table.off..layout.table.off + layout.table.len;
            let journal = layout.journal[0].off..layout.journal[1].off + layout.journal[1].len;
            assert!(
                !(journal.contains(&off) && self.dirty.load(Relaxed)),
                "an entry before its block"
            );
            if table.contains(&off) {
                self.dirty.store(true, Relaxed);
            }
        }
        self.inner.write_at(off, data)
    }

    fn flush(&self) -> Result<(), varve_cache::device::DeviceError> {
        self.dirty.store(false, std::sync::atomic::Ordering::Relaxed);
        self.inner.flush()
    }
}

#[test]
fn index_entry_is_written_after_its_block_is_durable() {
    let device = Arc::new(Ordered {
        inner: made(Case::alone(Policy::SetMem)),
        layout: Default::default(),
        dirty: Default::default(),
    });
    let cache = Cache::open(vec![device.clone() as Arc<dyn Device>], &options(), false)
        .unwrap()
        .0;
    device
        .layout
        .set(*cache.shards().next().unwrap().layout())
        .unwrap();
    let mut run = Run::new(Policy::SetMem, 3);
    run.work(&cache, 2000);
    cache.close().unwrap();
}

#[test]
fn hostile_medium_is_opened_or_refused_without_panic() {
    for case in Case::all() {
        let policy = case.policy;
        let image = made(case);
        let (device, cache, _) = open(case, &image);
        let mut run = Run::new(policy, 1);
        run.work(&cache, 200);
        cache.close().unwrap();
        let image = device.kill();
        for seed in 0..rounds(20) {
            let mut random = Random(seed);
            let damaged = image.copy();
            let layout = *cache.shards().next().unwrap().layout();
            for _ in 0..20 {
                let noise: Vec<u8> = (0..4096).map(|_| random.next() as u8).collect();
                let area = [layout.log.off + layout.log.len, layout.table.off.max(8192)][(seed % 2) as usize];
                let page = (8192 + random.below(area - 8192)) / 4096 * 4096;
                damaged.write_at(page.min(LEN - 4096), &noise).unwrap();
            }
            let (cache, _) = open_copy(case, damaged);
            run.look(&cache);
            cache.scan(|_| {}).unwrap();
            cache.check().unwrap();
        }
    }
}
