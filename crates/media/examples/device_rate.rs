//! Measures a device as the daemon reaches it: reads and writes of a size at random places, one at a time by
//! some threads, or in batches. WRITES TO THE DEVICE.
//!
//! `cargo run --release -p varve-media --example device_rate -- DEVICE [SECONDS]`

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use varve_media::block::{BlockOptions, DeviceSpec, open};
use varve_media::{BlockDevice, DEVICE_BLOCK_BYTES};

/// Offsets without an order, the same in each run.
struct Offsets(u64);

impl Offsets {
    fn next(&mut self, device: &dyn BlockDevice, len: usize) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let places = (device.len_bytes() - len as u64) / DEVICE_BLOCK_BYTES;
        self.0 % places * DEVICE_BLOCK_BYTES
    }
}

/// Returns operations a second.
fn rate(
    device: &dyn BlockDevice,
    threads: u64,
    batch: usize,
    len: usize,
    write: bool,
    time: Duration,
) -> f64 {
    let (done, begun) = (AtomicU64::new(0), Instant::now());
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let done = &done;
            scope.spawn(move || {
                let mut offsets = Offsets(0x9e37_79b9_7f4a_7c15 + thread);
                let mut data = vec![vec![7u8; len]; batch];
                while begun.elapsed() < time {
                    let mut parts: Vec<(u64, &mut [u8])> = data
                        .iter_mut()
                        .map(|part| (offsets.next(device, len), part.as_mut_slice()))
                        .collect();
                    if write {
                        let parts: Vec<_> = parts.iter().map(|(off, part)| (*off, &**part)).collect();
                        device.write_batch(&parts).unwrap();
                    } else {
                        device.read_batch(&mut parts).unwrap();
                    }
                    done.fetch_add(batch as u64, Ordering::Relaxed);
                }
            });
        }
    });
    done.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64()
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().expect("the name of a device");
    let seconds = arguments
        .next()
        .map_or(2.0, |text| text.parse().expect("seconds"));
    let spec = DeviceSpec::parse(&name).unwrap().expect("the name of a device");
    let device = open(&spec, BlockOptions::default()).unwrap().device;
    println!("{}", device.info());
    for (threads, batch, len) in [(1, 1, 4096), (2, 1, 4096), (1, 32, 4096), (1, 8, 65536)] {
        for write in [false, true] {
            let time = Duration::from_secs_f64(seconds);
            let each = rate(&*device, threads, batch, len, write, time);
            println!(
                "{} of {len} bytes, {threads} threads, {batch} at once: {each:.0} a second, {:.1} MB/s",
                if write { "writes" } else { "reads" },
                each * len as f64 / 1e6
            );
        }
    }
}
