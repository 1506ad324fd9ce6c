//! Prints what a durable write costs against the raw limit of the same memory: a non-temporal copy without a
//! checksum, and one fence. Run with `cargo run --release -p varve-media --example limit`.

use std::hint::black_box;
use std::time::Instant;

use varve_media::pmem::persist::{Kernel, Persist};
use varve_media::{Backing, LiveLog, MappedOptions, MappedRegion, MediaError, Region};

const REGION_BYTES: u64 = 256 << 20;
const ROUNDS: usize = 9;

fn main() -> Result<(), MediaError> {
    let dir = std::path::Path::new("/dev/shm");
    let path = dir.join(format!("varve-limit-{}", std::process::id()));
    let options = MappedOptions {
        backing: Backing::Shm,
        len_bytes: REGION_BYTES,
        max_bytes: REGION_BYTES,
        sparse: false,
    };
    let region = MappedRegion::create(&path, options)?;
    // The mapping keeps the memory; the name is not needed, also if this program is killed.
    let _ = std::fs::remove_file(&path);
    region.populate(0, REGION_BYTES);
    let region: &dyn Region = &region;

    println!("kernel {:?}, {}", Kernel::best(), region.info());
    println!(
        "{:>8} {:>12} {:>12} {:>12} {:>8}",
        "bytes", "limit ns", "write ns", "crc ns", "ratio"
    );
    for len in [64usize, 128, 1024, 4096, 65536] {
        let src = vec![0x5Au8; len];
        let stride = len.next_multiple_of(64) as u64;
        let raw = median(|| run(stride, |off| raw_write(region, off, &src)));
        let plain = median(|| {
            run(stride, |off| {
                region.write(off, &src).and_then(|()| region.fence())
            })
        });
        let crc = median(|| {
            run(stride, |off| {
                black_box(region.write_crc(off, &src, 7)?);
                region.fence()
            })
        });
        println!(
            "{len:>8} {raw:>12.0} {plain:>12.0} {crc:>12.0} {:>7.2}x",
            crc / raw
        );
    }

    println!(
        "{:>8} {:>12} {:>12} {:>8}",
        "bytes", "memcpy ns", "read ns", "ratio"
    );
    for len in [128usize, 1024, 4096, 65536] {
        // One buffer for both, so that its alignment is the same.
        let mut out = vec![0u8; len];
        let raw = median(|| run_scattered(|off| raw_read(region, off, &mut out)));
        let read = median(|| run_scattered(|off| region.read(off, black_box(&mut out))));
        println!("{len:>8} {raw:>12.0} {read:>12.0} {:>7.2}x", read / raw);
    }
    durable_appends(dir)
        .map_err(|e| eprintln!("durable appends: {e}"))
        .ok();
    Ok(())
}

/// A 4 KiB append and sync of a live log whose backing file lies in the current directory, against the
/// device: the same write again and again to one place.
fn durable_appends(live_dir: &std::path::Path) -> Result<(), MediaError> {
    const APPENDS: u64 = 1000;
    let id = std::process::id();
    let (live, backing) = (
        live_dir.join(format!("varve-limit-log-{id}")),
        format!("varve-limit-log-{id}.tmp"),
    );
    let backing = std::path::Path::new(&backing);
    let log = LiveLog::create(&live, backing, 16 << 20, 16 << 20)?;
    // The descriptors keep both files.
    let _ = (std::fs::remove_file(&live), std::fs::remove_file(backing));
    let append = |off: u64| {
        let begin = Instant::now();
        log.write_crc(off, &[1; 4096], 0)?;
        log.fence()?;
        log.sync(off, 4096)?;
        Ok::<f64, MediaError>(begin.elapsed().as_nanos() as f64 / 1000.0)
    };
    let appends = (0..APPENDS)
        .map(|i| append(i * 4096))
        .collect::<Result<Vec<_>, _>>()?;
    let again = (0..APPENDS).map(|_| append(0)).collect::<Result<Vec<_>, _>>()?;
    let (mean, median_us, again) = (
        appends.iter().sum::<f64>() / APPENDS as f64,
        middle(appends),
        middle(again),
    );
    println!(
        "append 4 KiB + sync: median {median_us:.0} us, mean {mean:.0} us; in place {again:.0} us; {}",
        log.info()
    );
    Ok(())
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// ns per call, walking the region.
fn run(stride: u64, mut call: impl FnMut(u64) -> Result<(), MediaError>) -> f64 {
    let calls = ((16u64 << 20) / (stride % (1 << 17)).max(2048)).clamp(500, 20_000);
    let mut off = 0;
    let begin = Instant::now();
    for _ in 0..calls {
        if off + (1 << 17) > REGION_BYTES {
            off %= 1 << 20;
        }
        call(off).expect("ranges lie inside the region");
        off += stride;
    }
    begin.elapsed().as_nanos() as f64 / calls as f64
}

/// ns per call, all over the region, so that reads come from memory.
fn run_scattered(mut call: impl FnMut(u64) -> Result<(), MediaError>) -> f64 {
    const CALLS: u64 = 2000;
    let mut state = 88_172_645_463_325_252u64;
    let begin = Instant::now();
    for _ in 0..CALLS {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        call(state % ((REGION_BYTES - (1 << 17)) / 4096) * 4096).expect("ranges lie inside the region");
    }
    begin.elapsed().as_nanos() as f64 / CALLS as f64
}

fn median(mut measure: impl FnMut() -> f64) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS).map(|_| measure()).collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

/// The limit: the plain copy kernel and a fence, no bounds, no checksum, no virtual call.
fn raw_write(region: &dyn Region, off: u64, src: &[u8]) -> Result<(), MediaError> {
    let base = region.as_ptr().expect("a mapped region");
    let persist = Persist::new(false);
    // SAFETY: `run` keeps `off + 128 KiB` inside the region, which outlives the call and which nobody else
    // uses.
    unsafe { persist.copy_in(base.as_ptr().add(off as usize), src) };
    persist.fence();
    Ok(())
}

/// `memcpy`.
fn raw_read(region: &dyn Region, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
    let base = region.as_ptr().expect("a mapped region");
    // SAFETY: as in `raw_write`.
    unsafe {
        std::ptr::copy_nonoverlapping(
            base.as_ptr().add(off as usize),
            black_box(out.as_mut_ptr()),
            out.len(),
        )
    };
    Ok(())
}
