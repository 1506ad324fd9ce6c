//! The machine that the driver needs: registers, memory shared with the device, time. Two implementations
//! reach hardware (`vfio`, `uio`); a third is a simulated controller of the tests. Knows nothing of NVMe.

use std::sync::Arc;
use std::time::Duration;

use crate::error::MediaError;

/// Bytes of a page as the device counts them. Bus addresses are contiguous within one.
pub const PAGE_BYTES: usize = 4096;

/// Memory that a device reads and writes by itself, at any time. Nothing here gives a reference to it: bytes
/// are copied.
pub trait DmaMemory: Send + Sync {
    /// Length in bytes, whole pages.
    fn len_bytes(&self) -> usize;

    /// Returns the device's address of the byte at `off`. `off` is less than the length.
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

    /// Loads the little-endian word at `off`, a multiple of 4. Later [`read`](Self::read)s see all that the
    /// device wrote before this word.
    ///
    /// # Panics
    /// If the range passes the end.
    fn load_u32(&self, off: usize) -> u32;
}

/// A device on a bus.
pub trait Bus: Send + Sync {
    /// Bytes of the register space.
    fn registers_bytes(&self) -> usize;

    /// Reads the register at `off`, a multiple of 4 within the register space. All ones if the device is
    /// gone.
    fn read32(&self, off: usize) -> u32;

    /// Writes the register at `off`. The device sees all earlier writes to memory first. Has no effect if the
    /// device is gone.
    fn write32(&self, off: usize, value: u32);

    /// Allocates zeroed memory that both sides see, whole pages.
    ///
    /// # Errors
    /// There is none; the text names the remedy.
    fn allocate(&self, len_bytes: usize) -> Result<Arc<dyn DmaMemory>, MediaError>;

    /// Keeps the device from reading or writing memory until it is opened again: for a device that
    /// misbehaves.
    fn stop_dma(&self);

    /// Whether the host wants the device back, as before an orderly removal.
    fn is_wanted_back(&self) -> bool {
        false
    }

    /// Time since an arbitrary origin.
    fn now(&self) -> Duration;

    /// Called while a caller waits for the device, `waited` being the wait so far.
    fn pause(&self, waited: Duration);

    /// How the device is reached, in a few words.
    fn describe(&self) -> String;
}
