//! Checkpoints of memory at addresses: what a restored heap has is memory as it was at one moment, whatever
//! threads did meanwhile, after any crash.
#![allow(clippy::unwrap_used)]

mod common;

#[path = "../../far-objects/tests/common/killed.rs"]
mod killed;

#[path = "../../far-objects/tests/common/recorded.rs"]
mod recorded;

#[path = "checkpoint/world.rs"]
mod world;

#[path = "checkpoint/crashes.rs"]
mod crashes;

#[path = "checkpoint/moments.rs"]
mod moments;

#[path = "checkpoint/kills.rs"]
mod kills;

#[path = "checkpoint/refusals.rs"]
mod refusals;

#[path = "checkpoint/hostile.rs"]
mod hostile;

use std::sync::atomic::{AtomicBool, Ordering};
use varve_far_alloc::{CheckpointFile, Config, Error, FarAlloc};

const TAG: u64 = 0xadd7;

/// Has threads end when this is dropped, also by a panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn config() -> Config {
    let mut config = Config::new(6 << 20);
    config.page_buffer_bytes = 512 << 10;
    config
}

/// [`config`] for a heap whose checkpoints' own thread writes, in the middle of their pages.
fn without_thread() -> Config {
    let mut config = config();
    config.objects.has_thread = false;
    config
}

/// A heap in a file; `None`, said aloud, where the kernel does not let faults be served.
fn create(file: impl CheckpointFile + 'static, slabs: u32) -> Option<FarAlloc> {
    create_with(file, slabs, &config())
}

fn create_with(file: impl CheckpointFile + 'static, slabs: u32, config: &Config) -> Option<FarAlloc> {
    match FarAlloc::create(file, slabs, TAG, config) {
        Ok(heap) => Some(heap),
        Err(error @ Error::Userfault { .. }) => {
            eprintln!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn record_of(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn numbers_of(record: &[u8]) -> Vec<u64> {
    let (numbers, _) = record.as_chunks::<8>();
    numbers.iter().map(|chunk| u64::from_le_bytes(*chunk)).collect()
}
