//! Threads that write and read objects at a tenth of their bytes in memory, whose checksums are kept
//! outside; forks, direct I/O and failing devices meanwhile. `VARVE_FAR_SECONDS` makes it longer.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Bad, heap_over, in_child, load, try_load, try_store};
use std::os::unix::fs::OpenOptionsExt as _;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use varve_far_alloc::FarAlloc;

const THREADS: usize = 3;
const OBJECTS: usize = 5000;
/// A tenth of the objects' bytes, which are about 40 MB.
const MEMORY: u64 = 4 << 20;
const SIZES: [usize; 8] = [8, 50, 128, 300, 700, 4096, 10_000, 50_000];

/// An object and what is known of it.
struct Known {
    at: NonNull<u8>,
    len: usize,
    /// Of its bytes; `None` after a write that was a signal in the middle.
    crc: Option<u32>,
    is_bytes: bool,
}

fn make(heap: &FarAlloc, random: &mut fastrand::Rng) -> Option<Known> {
    let len = SIZES[random.usize(..SIZES.len())] + random.usize(..8);
    let is_bytes = random.u32(..3) == 0;
    let made = if is_bytes {
        heap.malloc(len)
    } else {
        heap.oalloc(1, len)
    };
    // Where the device fails, there may be no memory for a table.
    let at = made.ok()?;
    Some(Known {
        at,
        len,
        crc: None,
        is_bytes,
    })
}

#[derive(Default)]
struct Counts {
    reads: AtomicU64,
    writes: AtomicU64,
    signals: AtomicU64,
    forks: AtomicU64,
    direct: AtomicU64,
    freed: AtomicU64,
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn step(
    heap: &FarAlloc,
    random: &mut fastrand::Rng,
    all: &mut Vec<Known>,
    bytes: &mut [u8],
    counts: &Counts,
) {
    if all.len() < OBJECTS / THREADS {
        all.extend(make(heap, random));
    }
    let pick = random.usize(..all.len());
    let known = &mut all[pick];
    let bytes = &mut bytes[..known.len];
    match random.u32(..100) {
        0..45 => {
            random.fill(bytes);
            known.crc = None;
            match try_store(known.at, bytes) {
                Ok(()) => known.crc = Some(crc32c::crc32c(bytes)),
                Err(signal) => {
                    assert_eq!(signal, libc::SIGBUS);
                    add(&counts.signals);
                }
            }
            add(&counts.writes);
        }
        45..95 => {
            match try_load(known.at, bytes) {
                Ok(()) => {
                    let is = crc32c::crc32c(bytes);
                    assert!(
                        known.crc.is_none_or(|crc| crc == is),
                        "object of {} bytes",
                        known.len
                    );
                }
                Err(signal) => {
                    assert_eq!(signal, libc::SIGBUS);
                    add(&counts.signals);
                }
            }
            add(&counts.reads);
        }
        95..98 => {
            let known = all.swap_remove(pick);
            heap.free(known.at).unwrap();
            add(&counts.freed);
        }
        _ if known.is_bytes => {
            let len = 1 + random.usize(..60_000);
            let kept = len.min(known.len);
            if let Ok(at) = heap.realloc(known.at, len) {
                let has_all = kept == known.len;
                *known = Known {
                    at,
                    len,
                    // Only of bytes that are all there still can something be said.
                    crc: known.crc.filter(|_| has_all && len == known.len),
                    is_bytes: true,
                };
                if has_all {
                    known.len = kept;
                }
            }
        }
        _ => {}
    }
}

fn user(
    heap: &FarAlloc,
    seed: u64,
    is_over: &AtomicBool,
    counts: &Counts,
) -> Vec<(usize, usize, Option<u32>)> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut all = Vec::new();
    let begun = Instant::now();
    while all.len() < OBJECTS / THREADS {
        all.extend(make(heap, &mut random));
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "{:?}",
            heap.objects().unwrap().stats()
        );
    }
    let mut bytes = vec![0; 70_000];
    while !is_over.load(Ordering::Relaxed) {
        step(heap, &mut random, &mut all, &mut bytes, counts);
    }
    all.into_iter()
        .map(|known| (known.at.addr().get(), known.len, known.crc))
        .collect()
}

/// Reads a file into far memory by direct I/O, and compares.
fn direct(heap: &FarAlloc, dir: &std::path::Path, is_over: &AtomicBool, counts: &Counts) {
    const LEN: usize = 256 << 10;
    let path = dir.join("direct");
    let bytes: Vec<u8> = (0..LEN).map(|byte| (byte / 4096 * 7 + byte) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let Ok(file) = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
    else {
        return eprintln!("SKIPPED: no direct I/O in {}", dir.display());
    };
    // An object of many pages is aligned to them.
    let far = loop {
        if let Ok(far) = heap.oalloc(1, LEN) {
            break far;
        }
    };
    let mut got = vec![0; LEN];
    while !is_over.load(Ordering::Relaxed) {
        // EFAULT where a page is poisoned.
        if common::try_read_at(&file, far, LEN, 0) == Ok(LEN) && try_load(far, &mut got).is_ok() {
            assert!(got == bytes, "direct I/O");
            add(&counts.direct);
        }
        if try_store(far, &[0; 4096]).is_ok() {
            std::thread::yield_now();
        }
    }
    heap.free(far).unwrap();
}

fn forker(far: usize, is_over: &AtomicBool, counts: &Counts) {
    while !is_over.load(Ordering::Relaxed) {
        assert_eq!(
            in_child(|| i32::from(load(common::at(far), 0))),
            Err(libc::SIGSEGV)
        );
        add(&counts.forks);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn objects_keep_their_bytes_through_everything() {
    let seconds = std::env::var("VARVE_FAR_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(4u64);
    // A block whose write fails is not used any more.
    let bad = Bad::new(128 + 4 * seconds as u32);
    let Some(heap) = heap_over(bad.clone(), MEMORY) else {
        return;
    };
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let (is_over, counts) = (AtomicBool::new(false), Counts::default());
    let first = heap.oalloc(1, 64).unwrap().addr().get();
    let known: Vec<_> = std::thread::scope(|scope| {
        let (heap, is_over, counts) = (&heap, &is_over, &counts);
        let users: Vec<_> = (0..THREADS)
            .map(|seed| scope.spawn(move || user(heap, seed as u64, is_over, counts)))
            .collect();
        scope.spawn(|| direct(heap, dir.path(), is_over, counts));
        scope.spawn(move || forker(first, is_over, counts));
        let begun = Instant::now();
        let mut round = 0;
        while begun.elapsed() < Duration::from_secs(seconds) && !users.iter().any(|user| user.is_finished()) {
            // Half of the time some calls of the device fail.
            bad.one_of
                .store(if round % 2 == 1 { 30 } else { 0 }, Ordering::Relaxed);
            round += 1;
            std::thread::sleep(Duration::from_millis(300));
        }
        bad.one_of.store(0, Ordering::Relaxed);
        is_over.store(true, Ordering::Relaxed);
        users.into_iter().flat_map(|user| user.join().unwrap()).collect()
    });
    // Pages that could not be read are tried again after a second.
    std::thread::sleep(Duration::from_millis(1300));
    let mut checked = 0;
    let mut bytes = vec![0; 70_000];
    for (address, len, crc) in &known {
        let bytes = &mut bytes[..*len];
        assert_eq!(try_load(common::at(*address), bytes), Ok(()));
        if let Some(crc) = crc {
            assert_eq!(
                crc32c::crc32c(bytes),
                *crc,
                "object of {len} bytes at {address:#x}"
            );
            checked += 1;
        }
    }
    let total: usize = known.iter().map(|(_, len, _)| len).sum();
    let (pages, objects) = (heap.stats().unwrap(), heap.objects().unwrap().stats());
    eprintln!(
        "reads {:?}, writes {:?}, freed {:?}, signals {:?}, forks {:?}, direct reads {:?}; \
         {checked} objects compared, {} KiB in {} KiB of memory\n  {pages:?}\n  {objects:?}",
        counts.reads,
        counts.writes,
        counts.freed,
        counts.signals,
        counts.forks,
        counts.direct,
        total >> 10,
        MEMORY >> 10
    );
    assert!(checked > OBJECTS / 4 && total as u64 > 8 * MEMORY);
    for (address, _, _) in known {
        heap.free(common::at(address)).unwrap();
    }
}
