//! A backend whose bytes can be damaged, whose writes can be lost, and which can fail.

#![allow(dead_code, clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use varve_far::backend::SLAB_BYTES;
use varve_far::{Backend, BackendError, Dram, Slot};

/// Slabs in memory, with switches. Clones share them.
#[derive(Clone)]
pub struct Bad {
    inner: Arc<Dram>,
    pub fails_reads: Arc<AtomicBool>,
    pub fails_writes: Arc<AtomicBool>,
    pub loses_writes: Arc<AtomicBool>,
    /// The next writes and reads that fail.
    pub failing_writes: Arc<AtomicU64>,
    pub failing_reads: Arc<AtomicU64>,
    pub gives_no_slabs: Arc<AtomicBool>,
    /// The next read waits here when it has its bytes, and once more before it returns.
    pub gate: Arc<Mutex<Option<Arc<Barrier>>>>,
    slots: Arc<AtomicU64>,
}

impl Bad {
    pub fn new(slabs: u32) -> Self {
        Self {
            inner: Arc::new(Dram::new(slabs)),
            fails_reads: Arc::default(),
            fails_writes: Arc::default(),
            loses_writes: Arc::default(),
            failing_writes: Arc::default(),
            failing_reads: Arc::default(),
            gives_no_slabs: Arc::default(),
            gate: Arc::default(),
            slots: Arc::default(),
        }
    }

    /// Changes all bytes for which `change` gives others.
    pub fn damage(&self, mut change: impl FnMut(u8) -> u8) {
        let mut bytes = vec![0; SLAB_BYTES];
        for slot in (0..self.slots.load(Ordering::Relaxed)).map(|slot| Slot(slot as u32)) {
            self.inner.read(slot, 0, &mut bytes).unwrap();
            for byte in &mut bytes {
                *byte = change(*byte);
            }
            self.inner.write(slot, 0, &bytes).unwrap();
        }
    }
}

fn counts_down(left: &AtomicU64) -> bool {
    left.try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
        .is_ok()
}

fn eio() -> BackendError {
    BackendError::Io(std::io::Error::from_raw_os_error(5))
}

impl Backend for Bad {
    fn name(&self) -> &str {
        "bad"
    }

    fn capacity_slabs(&self) -> u32 {
        self.inner.capacity_slabs()
    }

    fn alloc(&self) -> Result<Slot, BackendError> {
        if self.gives_no_slabs.load(Ordering::Relaxed) {
            return Err(BackendError::Full);
        }
        let slot = self.inner.alloc()?;
        self.slots.fetch_max(u64::from(slot.0) + 1, Ordering::Relaxed);
        Ok(slot)
    }

    fn dealloc(&self, slot: Slot) {
        self.inner.dealloc(slot);
    }

    fn read(&self, slot: Slot, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        if self.fails_reads.load(Ordering::Relaxed) || counts_down(&self.failing_reads) {
            return Err(eio());
        }
        self.inner.read(slot, offset_bytes, bytes)?;
        let gate = self.gate.lock().unwrap().take();
        if let Some(gate) = gate {
            gate.wait();
            gate.wait();
        }
        Ok(())
    }

    fn write(&self, slot: Slot, offset_bytes: usize, bytes: &[u8]) -> Result<(), BackendError> {
        if self.fails_writes.load(Ordering::Relaxed) || counts_down(&self.failing_writes) {
            return Err(eio());
        }
        if self.loses_writes.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.inner.write(slot, offset_bytes, bytes)
    }
}
