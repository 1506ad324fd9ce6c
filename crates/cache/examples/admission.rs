//! Hit ratio against bytes written, for each admission policy: a zipf load of objects of many sizes on a
//! store in memory that holds a twentieth of them, each missed object put. `admission [REQUESTS]` (default
//! 1,000,000).

use std::sync::Arc;
use varve_cache::device::{Device, MemoryDevice};
use varve_cache::store::Admission;
use varve_cache::{Cache, Options, Policy, PutOptions, StorePlan};

const LEN: u64 = 128 << 20;
const KEYS: usize = 300_000;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// Bytes of a key's object: 500 bytes to 60 KB, half of them below 6 KB.
fn len_of(key: usize) -> usize {
    let unit = (Random(key as u64).next() >> 11) as f64 / (1u64 << 53) as f64;
    (500.0 * 120f64.powf(unit)) as usize
}

fn measure(exponent: f64, admission: Admission, requests: usize) -> (f64, f64, u64) {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(LEN));
    let plan = StorePlan::new(Policy::Log);
    Cache::format_with(&[&*device], &plan, true, [3; 16]).expect("a store");
    let options = Options {
        admission,
        hot_bytes: 0,
        ..Options::default()
    };
    let (cache, _) = Cache::open(vec![device], &options, false).expect("it was made");
    let mut sum = 0.0;
    let cumulated: Vec<f64> = (1..=KEYS)
        .map(|rank| {
            sum += 1.0 / (rank as f64).powf(exponent);
            sum
        })
        .collect();
    let mut random = Random(7);
    let body = vec![7; 64 << 10];
    let (mut hits, mut asked) = (0, 0);
    let (mut hit_bytes, mut bytes) = (0u64, 0u64);
    let mut written = 0;
    for n in 0..requests {
        if n == requests / 2 {
            (hits, asked, hit_bytes, bytes) = (0, 0, 0, 0);
            written = cache.stats().written_bytes;
        }
        let unit = (random.next() >> 11) as f64 / (1u64 << 53) as f64;
        let key = cumulated.partition_point(|&c| c < unit * sum);
        let (name, len) = (format!("http://example.org/{key}"), len_of(key));
        asked += 1;
        bytes += len as u64;
        if cache.get(name.as_bytes()).is_some() {
            hits += 1;
            hit_bytes += len as u64;
        } else {
            cache
                .put(name.as_bytes(), &body[..len], PutOptions::default())
                .expect("it fits");
        }
    }
    (
        f64::from(hits) / f64::from(asked),
        hit_bytes as f64 / bytes as f64,
        cache.stats().written_bytes - written,
    )
}

fn main() {
    let requests = std::env::args()
        .nth(1)
        .map_or(1_000_000, |text| text.parse().expect("a number"));
    println!(
        "{:<10} {:<24} {:>6} {:>10} {:>12} {:>14}",
        "zipf", "admission", "hits", "byte hits", "MiB written", "hits, MiB: all"
    );
    for exponent in [0.8, 1.0] {
        let mut all = None;
        for (name, admission) in [
            ("all", Admission::All),
            (
                "second request, 64 Ki",
                Admission::SecondRequest { window: 64 << 10 },
            ),
            (
                "second request, 1 Mi",
                Admission::SecondRequest { window: 1 << 20 },
            ),
            ("probability 0.5", Admission::Probability(0.5)),
            ("probability 0.1", Admission::Probability(0.1)),
        ] {
            let (hits, byte_hits, written) = measure(exponent, admission, requests);
            let (first_hits, first_written) = *all.get_or_insert((hits, written));
            println!(
                "{exponent:<10} {name:<24} {hits:>6.3} {byte_hits:>10.3} {:>12} {:>6.2}, {:.2}",
                written >> 20,
                hits / first_hits,
                written as f64 / first_written as f64
            );
        }
    }
}
