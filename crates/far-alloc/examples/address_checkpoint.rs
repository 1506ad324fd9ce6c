//! What checkpoints of memory at addresses cost: how long threads are stopped, what is written for what
//! changed, how long a restore takes.
//!
//! `cargo run --release -p varve-far-alloc --example address_checkpoint -- MIB SIZE DIR`: MiB of memory (4096), bytes
//! of each object of one array (128, 4096, ...) or `pages` for one block of `malloc`, where the file lies.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use varve_far_alloc::{Config, Error, FarAlloc};

const ROUNDS: usize = 5;
const TAG: u64 = 1;
const PAGE: usize = 4096;

fn main() {
    let mut args = std::env::args().skip(1);
    let mib: usize = args
        .next()
        .map_or(4096, |mib| mib.parse().expect("a number of MiB"));
    let kind = args.next().unwrap_or_else(|| "pages".into());
    let dir = args.next().unwrap_or_else(|| "/var/tmp".into());
    let path = Path::new(&dir).join(format!("varve-far-checkpoint-{}", std::process::id()));
    let size = match kind.as_str() {
        "pages" => None,
        size => Some(size.parse().expect("bytes of an object, or `pages`")),
    };
    let done = measure(mib, size, &path);
    std::fs::remove_file(&path).unwrap();
    done.unwrap();
}

/// Memory of which each unit is stored as one: objects, or pages.
#[derive(Clone, Copy)]
struct Units {
    start: usize,
    stride: usize,
    len: usize,
    count: usize,
}

impl Units {
    fn new(heap: &FarAlloc, mib: usize, size: Option<usize>) -> Result<Self, Error> {
        let len = size.unwrap_or(PAGE);
        let count = (mib << 20) / len;
        let (start, stride) = match size {
            Some(len) => (heap.oalloc(count, len)?, FarAlloc::stride_bytes(len)),
            None => (heap.malloc((count + 1) * PAGE)?, PAGE),
        };
        let start = start.addr().get();
        let start = if size.is_some() {
            start
        } else {
            start.next_multiple_of(PAGE)
        };
        Ok(Self {
            start,
            stride,
            len,
            count,
        })
    }

    /// Fills a unit with a word.
    fn fill(&self, index: usize, word: u64) {
        for offset in (0..self.len / 8).map(|word| word * 8) {
            self.word(index, offset).store(word, Ordering::Relaxed);
        }
    }

    fn word(&self, index: usize, offset: usize) -> &'static AtomicU64 {
        let at = self.start + index * self.stride + offset;
        let at: *mut u64 = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: an aligned word of the heap, which outlives all that use it, by atomics alone.
        unsafe { AtomicU64::from_ptr(at) }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn measure(mib: usize, size: Option<usize>, path: &Path) -> Result<(), Error> {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load average {}", load.trim());
    let count = (mib << 20) / size.unwrap_or(PAGE);
    // A twentieth, and the tables.
    let config = Config::new(mib as u64 * 52429 + (count * 6) as u64 + (64 << 20));
    let slabs = mib as u32 * 2 + 256;
    let heap = FarAlloc::create(File::create_new(path).unwrap(), slabs, TAG, &config)?;
    let all = Units::new(&heap, mib, size)?;
    println!(
        "{} units of {} bytes, {} apart, memory {} MiB, page buffer {} MiB, file of {slabs} MiB at most",
        all.count,
        all.len,
        all.stride,
        config.objects.memory_limit_bytes >> 20,
        config.page_buffer_bytes >> 20
    );
    let record = (all.start as u64).to_le_bytes();
    let started = Instant::now();
    (0..all.count).for_each(|index| all.fill(index, index as u64));
    println!("  filled in {:.1} s", started.elapsed().as_secs_f64());
    let started = Instant::now();
    let first = heap.checkpoint(&record)?;
    println!(
        "  first: {:>7.1} ms, stopped {:>6.3} ms, {:.1} MB of tables",
        ms(started.elapsed()),
        ms(first.stopped),
        first.table_bytes as f64 / 1e6
    );
    let mut random = fastrand::Rng::with_seed(1);
    for round in 0..ROUNDS {
        change(&heap, &all, round, &mut random, &record)?;
    }
    beside_a_writer(&heap, &all, &record)?;
    heap.checkpoint(&record)?;
    let last = heap.checkpoint(&record)?;
    println!("  nothing changed: {} bytes written", last.written_bytes);
    drop(heap);
    restore(path, &config, &all)
}

fn written(heap: &FarAlloc) -> Result<u64, Error> {
    Ok(heap.objects()?.stats().log.device_write_bytes)
}

/// One unit of a hundred, anywhere, and a checkpoint.
fn change(
    heap: &FarAlloc,
    all: &Units,
    round: usize,
    random: &mut fastrand::Rng,
    record: &[u8],
) -> Result<(), Error> {
    let before = written(heap)?;
    let mut changed = std::collections::HashSet::new();
    while changed.len() < all.count / 100 {
        let index = random.usize(..all.count);
        if changed.insert(index) {
            all.fill(index, round as u64);
        }
    }
    let pages = heap.stats()?.pages;
    let dirty = (changed.len() * all.len) as f64;
    let started = Instant::now();
    let made = heap.checkpoint(record)?;
    let took = started.elapsed();
    let written = (written(heap)? - before + PAGE as u64) as f64;
    println!(
        "  alone: {:>7.1} ms, stopped {:>6.3} ms, {pages} pages in memory; changed {:.1} MB, written since the \
         last {:.1} MB, {:.3} x, tables {:.1} MB{}",
        ms(took),
        ms(made.stopped),
        dirty / 1e6,
        written / 1e6,
        written / dirty,
        made.table_bytes as f64 / 1e6,
        if made.is_whole { ", all of them anew" } else { "" }
    );
    Ok(())
}

/// Beside a thread that writes to memory all the time, which notes its longest wait.
fn beside_a_writer(heap: &FarAlloc, all: &Units, record: &[u8]) -> Result<(), Error> {
    let is_ending = AtomicBool::new(false);
    let (longest, stopped) = std::thread::scope(|scope| -> Result<_, Error> {
        let writer = scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(2);
            let mut longest = Duration::ZERO;
            while !is_ending.load(Ordering::Relaxed) {
                let started = Instant::now();
                // Few enough to be in memory, so that the wait is not the disk's.
                let index = random.usize(..all.count.min(2000));
                all.word(index, 0)
                    .store(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
                longest = longest.max(started.elapsed());
            }
            longest
        });
        let mut stopped = Vec::new();
        for _ in 0..4 * ROUNDS {
            std::thread::sleep(Duration::from_millis(200));
            stopped.push(heap.checkpoint(record)?.stopped);
        }
        is_ending.store(true, Ordering::Relaxed);
        Ok((writer.join().unwrap(), stopped))
    })?;
    let mut stopped: Vec<f64> = stopped.into_iter().map(ms).collect();
    stopped.sort_by(f64::total_cmp);
    println!(
        "  beside a writer, {} times: stopped median {:.3} ms, longest {:.3} ms; longest write {:.2} ms",
        stopped.len(),
        stopped[stopped.len() / 2],
        stopped[stopped.len() - 1],
        ms(longest)
    );
    Ok(())
}

fn restore(path: &Path, config: &Config, all: &Units) -> Result<(), Error> {
    for _ in 0..3 {
        let file = File::options().read(true).write(true).open(path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let started = Instant::now();
        let (heap, record) = FarAlloc::restore(file, TAG, config)?;
        let took = started.elapsed();
        assert_eq!(record, (all.start as u64).to_le_bytes());
        all.word(all.count / 2, 0).load(Ordering::Relaxed);
        println!("  restore {:>7.1} ms", ms(took));
        drop(heap);
    }
    Ok(())
}
