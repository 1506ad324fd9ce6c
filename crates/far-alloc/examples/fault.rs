//! What a fault costs, of objects that are packed in memory: against a handler that does nothing, in turns.
//! `fault [ROUNDS [THREADS]]`. Prints medians and the best.
#![allow(unsafe_code)]

use std::time::Instant;
use varve_far::Dram;
use varve_far_alloc::measure::BareFaults;
use varve_far_alloc::{Config, FarAlloc};

const PAGE: usize = 4096;
/// Pages of a round: they fit into the page buffer of 25 MiB.
const PAGES: usize = 4000;

/// Nanoseconds of each of so many touches, a page apart.
fn touch(address: usize, pages: usize, writes: bool) -> f64 {
    let begun = Instant::now();
    for page in 0..pages {
        let at = std::ptr::with_exposed_provenance_mut::<u8>(address + page * PAGE);
        // SAFETY: callers give mapped memory of so many pages, which nobody else uses.
        unsafe {
            match writes {
                true => at.write_volatile(page as u8),
                false => drop(at.read_volatile()),
            }
        }
    }
    begun.elapsed().as_nanos() as f64 / pages as f64
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let number = |at: usize, default: usize| {
        let given = std::env::args().nth(at);
        given.and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let rounds = number(1, 21);
    let mut config = Config::new(256 << 20);
    config.threads = number(2, config.threads);
    let load = std::fs::read_to_string("/proc/loadavg")?;
    println!("load average {}", load.trim());
    let bare = BareFaults::new(PAGES)?;
    let heap = FarAlloc::new(Dram::new(64), &config)?;
    let objects = heap.oalloc(PAGES, 128)?.addr().get();
    let many = 40_000;
    let beyond = heap.oalloc(many, 128)?.addr().get();
    touch(objects, PAGES, true);
    touch(beyond, many, true);
    let names = [
        "does nothing, read",
        "does nothing, write",
        "object, read",
        "object, written after it was read",
        "object, write",
        "object, read, with steady eviction",
        "object, write, with steady eviction",
    ];
    let mut all = vec![Vec::new(); names.len()];
    for _ in 0..rounds {
        for (row, writes) in [false, true].into_iter().enumerate() {
            bare.empty()?;
            all[row].push(touch(bare.address(), PAGES, writes));
        }
        heap.flush()?;
        all[2].push(touch(objects, PAGES, false));
        all[3].push(touch(objects, PAGES, true));
        heap.flush()?;
        all[4].push(touch(objects, PAGES, true));
        heap.flush()?;
        all[5].push(touch(beyond, many, false));
        heap.flush()?;
        all[6].push(touch(beyond, many, true));
        heap.flush()?;
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let medians: Vec<f64> = all.iter_mut().map(median).collect();
    for (row, name) in names.iter().enumerate() {
        let nothing = medians[usize::from(name.contains("writ"))];
        println!(
            "  {name:<38} {:>8.0} ns   {:>+8.0} ns to nothing   best {:>6.0}",
            medians[row],
            medians[row] - nothing,
            all[row].first().copied().unwrap_or_default()
        );
    }
    println!("{:?}", heap.stats()?);
    println!("misses of the packed cache {}", heap.objects()?.stats().misses);
    Ok(())
}
