//! What the cleaner writes: bytes to the device for each byte of objects that was written, at stores filled
//! to 70, 80 and 90 %, with random overwrites of all objects alike, and with 90 % of them on a tenth of the
//! objects.
//! `write_amplification [SLABS]` (default 128, of 1 MiB).

use varve_far::Dram;
use varve_far_objects::{Config, FarHeap, FarVec};

const OBJECT: usize = 128;

struct Measured {
    fill: f64,
    amplification: f64,
    live_of_cleaned: f64,
}

/// Overwrites the store's size three times, then measures over twice its size.
fn measure(slabs: u32, fill: f64, hot_share: f64) -> Measured {
    let config = Config {
        fill_max: 0.95,
        has_thread: false,
        // Little is found in memory: what is measured is the store.
        ..Config::new(u64::from(slabs) << 20 >> 3)
    };
    let heap = FarHeap::new(Dram::new(slabs), &config).expect("a heap");
    let capacity = heap.stats().log.capacity_bytes as f64;
    let count = (capacity * fill / (OBJECT + 11) as f64) as usize;
    let all: FarVec<[u8; OBJECT]> = FarVec::zeroed(&heap, count).expect("an array");
    (0..count).for_each(|index| all.set(index, [index as u8; OBJECT]).expect("a write"));
    let mut random = fastrand::Rng::with_seed(7);
    let mut overwrite = |times: usize| {
        for _ in 0..times * count {
            let is_hot = random.f64() < hot_share;
            let index = if is_hot {
                random.usize(..count / 10)
            } else {
                random.usize(..count)
            };
            all.set(index, [index as u8 ^ 1; OBJECT]).expect("a write");
        }
    };
    overwrite(3);
    let before = heap.stats().log;
    overwrite(2);
    let after = heap.stats().log;
    let written = (after.device_write_bytes - before.device_write_bytes) as f64;
    let moved = (after.moved_bytes - before.moved_bytes) as f64;
    let cleaned = (after.cleaned_blocks - before.cleaned_blocks).max(1) as f64;
    Measured {
        fill: after.promised_bytes as f64 / after.capacity_bytes as f64,
        amplification: written / (after.appended_bytes - before.appended_bytes) as f64,
        live_of_cleaned: moved / (cleaned * (128 << 10) as f64),
    }
}

fn main() {
    let slabs = std::env::args()
        .nth(1)
        .and_then(|slabs| slabs.parse().ok())
        .unwrap_or(128);
    println!("{OBJECT}-byte objects, {slabs} MiB of store");
    println!("filled   overwrites   bytes written / bytes of objects   live in cleaned blocks");
    for (hot_share, name) in [(0.0, "all alike"), (0.9, "90 % on 10 %")] {
        for fill in [0.7, 0.8, 0.9] {
            let measured = measure(slabs, fill, hot_share);
            println!(
                "{:>5.1} %  {name:<12} {:>33.2} {:>24.2}",
                measured.fill * 100.0,
                measured.amplification,
                measured.live_of_cleaned
            );
        }
    }
}
