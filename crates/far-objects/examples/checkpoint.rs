//! What checkpoints cost: how long threads are stopped, what is written for what changed, how long a restore
//! takes beside reading its tables.
//!
//! `cargo run --release -p varve-far-objects --example checkpoint -- MIB OBJECT DIR`: MiB of objects (4096),
//! bytes of each (128, 512 or 4096), where the file lies.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use varve_far_objects::{Config, Error, FarHeap, FarVec, Plain};

const ROUNDS: usize = 5;
const TAG: u64 = 1;

fn main() {
    let mut args = std::env::args().skip(1);
    let mib: usize = args
        .next()
        .map_or(4096, |mib| mib.parse().expect("a number of MiB"));
    let object = args.next().unwrap_or_else(|| "128".into());
    let dir = args.next().unwrap_or_else(|| "/var/tmp".into());
    let path = Path::new(&dir).join(format!("varve-checkpoint-{}", std::process::id()));
    let done = match object.as_str() {
        "128" => measure::<[u64; 16]>(mib, &path),
        "512" => measure::<[u64; 64]>(mib, &path),
        "4096" => measure::<[u64; 512]>(mib, &path),
        other => panic!("objects of {other} bytes"),
    };
    std::fs::remove_file(&path).unwrap();
    done.unwrap();
}

/// A value whose words are all the same.
fn value<T: Plain>(word: u64) -> T {
    let bytes: Vec<u8> = std::iter::repeat_n(word.to_le_bytes(), size_of::<T>() / 8)
        .flatten()
        .collect();
    T::read_from_bytes(&bytes).expect("of its size")
}

fn measure<T: Plain>(mib: usize, path: &Path) -> Result<(), Error> {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let count = (mib << 20) / size_of::<T>();
    let tables = (count * 5) as u64;
    let config = Config::new((mib as u64 * 52429) + tables + (16 << 20));
    let slabs = mib as u32 * 2 + 256;
    println!("load average {}", load.trim());
    println!(
        "{} objects of {} bytes, {mib} MiB, memory {} MiB, file of {slabs} MiB at most",
        count,
        size_of::<T>(),
        config.memory_limit_bytes >> 20
    );
    let heap = FarHeap::create(File::create_new(path).unwrap(), slabs, TAG, &config)?;
    let all: FarVec<T> = FarVec::zeroed(&heap, count)?;
    for index in 0..count {
        all.set(index, value(index as u64))?;
    }
    let started = Instant::now();
    let first = heap.checkpoint(&all.name()?.to_le_bytes())?;
    println!(
        "  first: {:>7.1} ms, stopped {:>6.2} ms, {} MB of tables",
        ms(started.elapsed()),
        ms(first.stopped),
        first.table_bytes / 1_000_000
    );
    let mut random = fastrand::Rng::with_seed(1);
    for round in 0..ROUNDS {
        // One of a hundred, anywhere.
        let mut changed = std::collections::HashSet::new();
        let before = heap.stats().log.device_write_bytes;
        while changed.len() < count / 100 {
            let index = random.usize(..count);
            if changed.insert(index) {
                all.set(index, value(round as u64))?;
            }
        }
        let dirty = (changed.len() * size_of::<T>()) as u64;
        report(&heap, &all, before, dirty, "alone")?;
    }
    // With a thread that changes objects all the time, and notes its longest wait.
    let is_ending = AtomicBool::new(false);
    let longest = std::thread::scope(|scope| -> Result<Duration, Error> {
        let writer = scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(2);
            let mut longest = Duration::ZERO;
            while !is_ending.load(Ordering::Relaxed) {
                let started = Instant::now();
                // In memory already, so that the wait is not the disk's.
                all.set(
                    random.usize(..count / 1000),
                    value(started.elapsed().as_nanos() as u64),
                )
                .unwrap();
                longest = longest.max(started.elapsed());
            }
            longest
        });
        for _ in 0..ROUNDS {
            std::thread::sleep(Duration::from_millis(200));
            let made = heap.checkpoint(&all.name()?.to_le_bytes())?;
            println!("  beside a writer: stopped {:>6.2} ms", ms(made.stopped));
        }
        is_ending.store(true, Ordering::Relaxed);
        Ok(writer.join().unwrap())
    })?;
    println!("  longest write beside checkpoints {:.2} ms", ms(longest));
    heap.checkpoint(&all.name()?.to_le_bytes())?;
    let last = heap.checkpoint(&all.name()?.to_le_bytes())?;
    println!("  nothing changed: {} bytes written", last.written_bytes);
    let name = all.keep()?;
    drop(heap);
    restore::<T>(path, &config, name, count)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn report<T: Plain>(
    heap: &FarHeap,
    all: &FarVec<T>,
    before: u64,
    dirty: u64,
    who: &str,
) -> Result<(), Error> {
    let started = Instant::now();
    let made = heap.checkpoint(&all.name()?.to_le_bytes())?;
    let took = started.elapsed();
    let written = heap.stats().log.device_write_bytes - before + 4096;
    println!(
        "  {who}: {:>7.1} ms, stopped {:>6.2} ms; changed {:.1} MB, written since the last {:.1} MB, {:.3} x, tables {:.1} MB{}",
        ms(took),
        ms(made.stopped),
        dirty as f64 / 1e6,
        written as f64 / 1e6,
        written as f64 / dirty as f64,
        made.table_bytes as f64 / 1e6,
        if made.is_whole { ", all of them anew" } else { "" }
    );
    Ok(())
}

/// Drops what the kernel has of the file, where it may.
fn forget(file: &File) {
    file.sync_all().unwrap();
    let advice = rustix::fs::Advice::DontNeed;
    rustix::fs::fadvise(file, 0, None, advice).unwrap();
}

fn restore<T: Plain>(path: &Path, config: &Config, name: u64, count: usize) -> Result<(), Error> {
    let open = || File::options().read(true).write(true).open(path).unwrap();
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        // The tables' parts, in the order that a restore reads them.
        let file = open();
        let parts = parts(&file);
        forget(&file);
        let started = Instant::now();
        let mut buffer = vec![0; 128 << 10];
        for (at, len) in &parts {
            file.read_exact_at(&mut buffer[..*len], *at).unwrap();
        }
        let reading = started.elapsed();
        forget(&file);
        drop(file);
        let file = open();
        let started = Instant::now();
        let (heap, _) = FarHeap::restore(file, TAG, config)?;
        let restoring = started.elapsed();
        let all: FarVec<T> = FarVec::open(&heap, name)?;
        assert_eq!(all.len(), count);
        all.get(count / 2)?;
        all.keep()?;
        println!(
            "  restore {:>7.1} ms, reading its tables, {:.1} MB, {:>7.1} ms: {:.2} x",
            ms(restoring),
            parts.iter().map(|(_, len)| *len as f64).sum::<f64>() / 1e6,
            ms(reading),
            restoring.as_secs_f64() / reading.as_secs_f64()
        );
        ratios.push(restoring.as_secs_f64() / reading.as_secs_f64());
    }
    ratios.sort_by(f64::total_cmp);
    println!("  median {:.2} x", ratios[ROUNDS / 2]);
    Ok(())
}

/// Where the parts of the last checkpoint's tables lie, and how long they are (docs/reference/checkpoint.md).
fn parts(mut file: &File) -> Vec<(u64, usize)> {
    let number = |bytes: &[u8], at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
    let place = |bytes: &[u8], at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());
    let mut roots = [0; 8192];
    file.read_exact(&mut roots).unwrap();
    let (first, second) = roots.split_at(4096);
    let root = if number(first, 24) > number(second, 24) {
        first
    } else {
        second
    };
    let mut all = Vec::new();
    for segment in 0..place(root, 64) as usize {
        let mut next = place(root, 128 + segment * 32 + 16);
        while next != u32::MAX {
            let at = (1 << 20) + u64::from(next) * (128 << 10);
            let mut head = [0; 32];
            file.read_exact_at(&mut head, at).unwrap();
            all.push((at, 32 + place(&head, 4) as usize));
            next = place(&head, 28);
        }
    }
    all
}
