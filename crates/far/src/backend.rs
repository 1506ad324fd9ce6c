//! Backends: what holds slabs (RapidSwap, table 4.2).
//!
//! A backend gives slots of [`SLAB_BYTES`] and moves bytes in and out of them. It keeps no record of what is
//! in a slot and knows no temperature: [`crate::Space`] does.

mod dram;
mod faulty;
mod file;

pub use dram::Dram;
pub use faulty::{Fault, Faulty};
pub use file::FileSlabs;

/// Bytes of a slab (figure 4.3: the best of the sizes that the seed tried).
pub const SLAB_BYTES: usize = 1 << 20;

/// A slab's place in one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(pub u32);

/// Why a backend did not do it.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// No slot is free, or the device is full.
    #[error("the backend is full")]
    Full,
    /// The device failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// `offset + length` passes the end of the slab, or the slot is not allocated.
    #[error("slot {0} does not have these bytes")]
    OutOfRange(u32),
}

/// A device that holds slabs. Every method may be called by several threads at once, on different slots or on ranges
/// of one slot that share no page.
///
/// Nothing is durable: slabs end with the run. A backend over slabs that a daemon grants from a pool
/// implements this trait too.
pub trait Backend: Send + Sync {
    /// Name for people, such as a path.
    fn name(&self) -> &str;

    /// Most slabs that it may hold.
    fn capacity_slabs(&self) -> u32;

    /// Allocates a slot of zeros. A later write to it does not fail for want of space.
    ///
    /// # Errors
    /// `Full`, `Io`.
    fn alloc(&self) -> Result<Slot, BackendError>;

    /// Frees a slot and gives its space back to the device.
    fn dealloc(&self, slot: Slot);

    /// Fills `bytes` from the slot.
    ///
    /// # Errors
    /// `OutOfRange`, `Io`; a short read is `Io`.
    fn read(&self, slot: Slot, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), BackendError>;

    /// Stores `bytes` into the slot; the next read sees them.
    ///
    /// # Errors
    /// `OutOfRange`, `Io`; the range holds anything then.
    fn write(&self, slot: Slot, offset_bytes: usize, bytes: &[u8]) -> Result<(), BackendError>;

    /// Reads several ranges of one slot.
    ///
    /// # Errors
    /// As [`Self::read`], at the first that fails.
    fn sg_read(&self, slot: Slot, ranges: &mut [(usize, &mut [u8])]) -> Result<(), BackendError> {
        for (offset, bytes) in ranges {
            self.read(slot, *offset, bytes)?;
        }
        Ok(())
    }

    /// Writes several neighbouring ranges of one slot, the first at `offset_bytes`.
    ///
    /// # Errors
    /// As [`Self::write`].
    fn sg_write(&self, slot: Slot, offset_bytes: usize, ranges: &[&[u8]]) -> Result<(), BackendError> {
        let mut offset = offset_bytes;
        for bytes in ranges {
            self.write(slot, offset, bytes)?;
            offset += bytes.len();
        }
        Ok(())
    }
}

/// The range of a slab, if it lies inside.
fn range(slot: Slot, offset: usize, len: usize) -> Result<std::ops::Range<usize>, BackendError> {
    match offset.checked_add(len) {
        Some(end) if end <= SLAB_BYTES => Ok(offset..end),
        _ => Err(BackendError::OutOfRange(slot.0)),
    }
}
