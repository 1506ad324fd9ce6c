//! What the driver needs of a machine: registers, memory that the device sees too, time. Two implementations
//! reach hardware (`vfio`, `uio`); a third is a simulated controller of the tests. Knows nothing of NVMe.

use std::sync::Arc;
use std::time::Duration;

use crate::error::MediaError;

/// Bytes of a page as the device counts them. Bus addresses are contiguous within one.
pub const PAGE_BYTES: usize = 4096;

/// Memory that a device reads and writes by itself, at any time. So nothing here gives a reference to it:
/// bytes are copied.
pub trait DmaMemory: Send + Sync {
    /// Length in bytes, whole pages.
    fn len_bytes(&self) -> usize;

    /// The address by which the device knows the byte at `off`. `off` is less than the length.
    fn bus_address(&self, off: usize) -> u64;

    /// Copies bytes out.
    ///
    /// # Panics
    /// If the range passes the end.
    fn read(&self, off: usize, out: &mut [u8]);

    /// Copies bytes in. The device may see them at once, and sees them after the next [`Bus::write32`].
    ///
    /// # Panics
    /// If the range passes the end.
    fn write(&self, off: usize, src: &[u8]);

    /// Loads the little-endian word at `off`, a multiple of 4. What the device wrote before it is seen by
    /// later [`read`](Self::read)s.
    ///
    /// # Panics
    /// If the range passes the end.
    fn load_u32(&self, off: usize) -> u32;
}

/// A device on a bus.
pub trait Bus: Send + Sync {
    /// Bytes of the register space.
    fn registers_bytes(&self) -> usize;

    /// Reads the register at `off`, a multiple of 4 within the register space. All ones where there is no
    /// device any more.
    fn read32(&self, off: usize) -> u32;

    /// Writes the register at `off`. Everything that was written to memory before is seen by the device
    /// first. Goes nowhere where there is no device any more.
    fn write32(&self, off: usize, value: u32);

    /// Memory of zeros that both sides see, whole pages.
    ///
    /// # Errors
    /// There is none; says what to do.
    fn allocate(&self, len_bytes: usize) -> Result<Arc<dyn DmaMemory>, MediaError>;

    /// Keeps the device from reading or writing memory until it is opened again: for one that does not do as
    /// it is told.
    fn stop_dma(&self);

    /// Whether the host wants the device back, as before an orderly removal.
    fn is_wanted_back(&self) -> bool {
        false
    }

    /// Time since some moment.
    fn now(&self) -> Duration;

    /// Called while a caller waits for the device, which has made it wait for `waited` so far.
    fn pause(&self, waited: Duration);

    /// How the device is reached, in a few words.
    fn describe(&self) -> String;
}
