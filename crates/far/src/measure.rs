//! Speed of a backend when it joins (RapidSwap, section 4.1.2): allocation, reads and writes of 4 KiB,
//! freeing.

use crate::backend::{Backend, BackendError, SLAB_BYTES};
use crate::page::{PAGE_BYTES, Page};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Times of single operations; medians.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Speed {
    /// Allocating a slab.
    pub alloc: Duration,
    /// Reading 4 KiB at a random place of a slab.
    pub read: Duration,
    /// Writing 4 KiB there.
    pub write: Duration,
    /// Freeing a slab.
    pub dealloc: Duration,
}

const ROUNDS: usize = 33;

/// Measures with one slab, which is freed again.
///
/// # Errors
/// The backend's error; it should not join then.
pub fn measure(backend: &dyn Backend) -> Result<Speed, BackendError> {
    let begun = Instant::now();
    let slot = backend.alloc()?;
    let alloc = begun.elapsed();
    let times = transfers(backend, slot);
    let begun = Instant::now();
    backend.dealloc(slot);
    let dealloc = begun.elapsed();
    let (read, write) = times?;
    Ok(Speed {
        alloc,
        read,
        write,
        dealloc,
    })
}

fn transfers(backend: &dyn Backend, slot: crate::Slot) -> Result<(Duration, Duration), BackendError> {
    let mut page = Page::zeroed(1);
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        // 97 is odd, so the rounds touch different pages of the slab.
        let offset = round * 97 % (SLAB_BYTES / PAGE_BYTES) * PAGE_BYTES;
        let begun = Instant::now();
        backend.write(slot, offset, page.as_bytes())?;
        writes.push(begun.elapsed());
        let begun = Instant::now();
        backend.read(slot, offset, page.as_mut_bytes())?;
        reads.push(begun.elapsed());
    }
    Ok((median(&mut reads), median(&mut writes)))
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
