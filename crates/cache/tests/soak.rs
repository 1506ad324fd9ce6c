//! The log comes round 40 times under mixed load: memory stays what it was after 20, and what is found is
//! right. A file of its own, so that the process has nothing else in memory.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, body, format, key, options, plan};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_cache::device::{Device, FileDevice};
use varve_cache::{Cache, Options, Policy, PutOptions, Scope};

const LEN: u64 = 16 << 20;
/// Twenty until caches and allocator have what they need, twenty more.
const LAPS: u64 = 40;
/// Keys go round, as on a cache that runs for long: a map of what is right must not grow.
const KEYS: u64 = 20_000;

fn rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// One piece of load: puts of all sizes, lookups, removals, purges, lives that end.
struct Load {
    cache: Cache,
    random: Random,
    clock: Arc<AtomicU64>,
    step: u64,
    /// The version and length of each key's object.
    newest: HashMap<u64, (u64, usize)>,
    hits: u64,
}

impl Load {
    fn put(&mut self, n: u64) {
        let len = match self.random.below(1000) {
            0 => 300_000 + self.random.below(1 << 20),
            1..20 => self.random.below(60_000),
            _ => self.random.below(4000),
        } as usize;
        let tag = [(n % 16) as u8];
        let options = PutOptions {
            tags: &[&tag],
            host: Some(b"example.org"),
            expires_s: match self.random.below(4) {
                0 => self.clock.load(Ordering::Relaxed) + 1 + self.random.below(20),
                _ => 0,
            },
            ..PutOptions::default()
        };
        let bytes = body(n, self.step, len);
        self.cache.put(&key(n), &bytes, options).unwrap();
        self.newest.insert(n, (self.step, len));
    }

    fn step(&mut self) {
        self.step += 1;
        let n = self.random.below(KEYS);
        // A few are asked for and put often.
        let n = if self.random.below(2) == 0 { n % 500 } else { n };
        match self.random.below(10_000) {
            0..2500 => self.put(n),
            2500..9500 => {
                if let Some(found) = self.cache.get_body(&key(n)) {
                    let &(version, len) = self.newest.get(&n).expect("it was put");
                    assert!(
                        found == body(n, version, len),
                        "not the newest version of key {n}"
                    );
                    self.hits += 1;
                }
            }
            9500..9960 => self.cache.remove(&key(n)).unwrap(),
            9960 => self.cache.purge(Scope::Tag(&[(n % 16) as u8])).unwrap(),
            9961 => self.cache.purge(Scope::Prefix(&key(n / 100))).unwrap(),
            9962..9965 => self.cache.flush().unwrap(),
            _ => {
                self.clock.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// The least bytes of memory in each lap of a policy's log: what is always there. What a large object takes
/// while it is on its way comes and goes.
fn laps(policy: Policy, count: u64) -> Vec<u64> {
    let dir = tempfile::tempdir().unwrap();
    let device = Arc::new(FileDevice::create(&dir.path().join("store"), LEN).unwrap());
    format(&*device, &plan(policy));
    let clock = Arc::new(AtomicU64::new(1_000_000));
    let now = Arc::clone(&clock);
    let options = Options {
        clock: Arc::new(move || now.load(Ordering::Relaxed)),
        hot_bytes: 3 << 20,
        ..options()
    };
    let (cache, _) = Cache::open(vec![device as Arc<dyn Device>], &options, false).unwrap();
    let log = cache.shards().next().unwrap().layout().log.len;
    let mut load = Load {
        cache,
        random: Random(11),
        clock,
        step: 0,
        newest: (0..KEYS).map(|n| (n, (0, 0))).collect(),
        hits: 0,
    };
    let mut rss = Vec::new();
    for lap in 1..=count {
        let mut least = u64::MAX;
        while load.cache.stats().admitted_bytes < lap * log {
            load.step();
            if load.step.is_multiple_of(64) {
                least = least.min(rss_bytes());
            }
        }
        rss.push(least);
        // Four bits of generation come round after 16 laps: what nobody asked for since may then point at
        // bytes of others, which are told from its own, and counted as damage.
        let stats = load.cache.stats();
        assert!(lap > 12 || stats.damaged == 0, "{policy}, lap {lap}: {stats:?}");
        assert!(
            stats.damaged < stats.misses / 100,
            "{policy}, lap {lap}: {stats:?}"
        );
    }
    let stats = load.cache.stats();
    println!(
        "{policy:<17} {} calls, {} hits, {} second chances; MiB in laps 1, 10, 20, 30, 40: {}",
        load.step,
        load.hits,
        stats.second_chances,
        [0, 9, 19, 29, 39]
            .map(|lap: usize| format!("{:.2}", rss[lap] as f64 / 1048576.0))
            .join(", ")
    );
    rss
}

/// Whether memory grows by at most 2 % over the last laps.
fn is_flat(policy: Policy, count: u64) -> bool {
    let rss = laps(policy, count);
    let median = |last: usize| {
        let mut laps = rss[last - 10..last].to_vec();
        laps.sort_unstable();
        laps[laps.len() / 2]
    };
    let (before, after) = (median(rss.len() - 15), median(rss.len()));
    let grown = (after as f64 / before as f64 - 1.0) * 100.0;
    println!(
        "{policy:<17} laps {} to {count}, against those 15 before: {grown:+.2} %",
        count - 9
    );
    grown <= 2.0
}

#[test]
fn memory_stays_flat_while_the_log_comes_round_for_the_twentieth_to_fortieth_time() {
    let all = [
        Policy::Log,
        Policy::LogLru,
        Policy::LogLruPrefetch,
        Policy::LogPrefetch,
    ];
    // One has all that the others have; each takes a while on a busy disk.
    let chosen = match std::env::var_os("VARVE_CACHE_SOAK") {
        Some(_) => &all[..],
        None => &all[2..3],
    };
    for &policy in chosen {
        // What threads of a busy machine need late comes once; what leaks comes in later laps as well.
        assert!(
            [LAPS, 2 * LAPS].into_iter().any(|count| is_flat(policy, count)),
            "{policy}: memory grows"
        );
    }
}
