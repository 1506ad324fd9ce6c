//! Devices that stores lie on. This module knows bytes and errors, not their meaning.
//!
//! [`FileDevice`] is a file or block device, read and written past the page cache where that is possible;
//! [`MemoryDevice`] is memory; [`CountingDevice`] counts seeks and fails on demand; [`CrashDevice`] loses
//! power; [`HookedDevice`] calls a function before each transfer; [`OrderedDevice`] spares a slow arm its
//! ways; [`SplitDevice`] has one range of another device; [`MovingDevice`] stands for a file of a pool.
//! [`pool`] knows what a file of a Varve pool can be told.

mod counting;
mod crash;
mod file;
mod hooked;
mod memory;
mod moving;
mod ordered;
pub mod pool;
mod split;

pub use counting::{CountingDevice, Counts};
pub use crash::CrashDevice;
pub use file::FileDevice;
pub use hooked::{Access, HookedDevice};
pub use memory::MemoryDevice;
pub use moving::MovingDevice;
pub use ordered::OrderedDevice;
pub use split::SplitDevice;

use std::io;
use std::sync::Arc;
use thiserror::Error;

/// Stores read and write multiples of this at multiples of it.
pub const DEVICE_BLOCK_BYTES: u64 = 4096;

/// A read, write or flush that failed.
#[derive(Debug, Clone, Error)]
#[error("{device}: {op} of {len} bytes at {off} failed: {source}")]
pub struct DeviceError {
    /// The device's name.
    pub device: String,
    /// "read", "write", "flush" or "open".
    pub op: &'static str,
    /// Offset, in bytes.
    pub off: u64,
    /// Length, in bytes.
    pub len: u64,
    /// The operating system's error.
    pub source: Arc<io::Error>,
}

impl DeviceError {
    pub(crate) fn new(device: &str, op: &'static str, off: u64, len: usize, source: io::Error) -> Self {
        Self {
            device: device.to_owned(),
            op,
            off,
            len: len as u64,
            source: Arc::new(source),
        }
    }
}

/// A block device or file. Offsets and lengths that a store uses are multiples of [`DEVICE_BLOCK_BYTES`].
pub trait Device: Send + Sync {
    /// A name for messages.
    fn name(&self) -> String;

    /// Its length in bytes.
    fn len_bytes(&self) -> u64;

    /// Fills `out` from `off`. Bytes that were never written read as zeros.
    ///
    /// # Errors
    /// Past the end, or the medium failed; `out` is then unspecified.
    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Writes `data` at `off`. Durable after the next [`flush`](Self::flush); at a power cut before it any
    /// sectors of 512 bytes may be old or new.
    ///
    /// # Errors
    /// Past the end, or the medium failed; the range is then unspecified.
    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError>;

    /// Writes pieces that are in order of offset, as [`write_at`](Self::write_at). A device with an arm may
    /// take other transfers in between, where they lie on its way.
    ///
    /// # Errors
    /// As `write_at`; pieces after the one that failed may or may not be written.
    fn write_scattered(&self, pieces: &[(u64, &[u8])]) -> Result<(), DeviceError> {
        pieces
            .iter()
            .try_for_each(|(off, data)| self.write_at(*off, data))
    }

    /// Makes all earlier writes durable.
    ///
    /// # Errors
    /// The medium failed; earlier writes may or may not be durable then.
    fn flush(&self) -> Result<(), DeviceError>;

    /// Whether what is overwritten goes to another place of the medium, as on a pool of Varve: of a range of
    /// which a part was written, the rest is elsewhere then.
    fn moves_writes(&self) -> bool {
        false
    }

    /// The small device beside this one that is to be quick whatever this one is: opened, or made with
    /// `len_bytes` (zeros), or lengthened to it. `None`: it has none.
    ///
    /// # Errors
    /// It cannot be opened or made.
    fn aside(&self, _len_bytes: u64) -> Result<Option<Arc<dyn Device>>, DeviceError> {
        Ok(None)
    }
}

/// Returns an error if the range passes the end of the device.
fn check_range(device: &dyn Device, op: &'static str, off: u64, len: usize) -> Result<(), DeviceError> {
    match off.checked_add(len as u64) {
        Some(end) if end <= device.len_bytes() => Ok(()),
        _ => {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "past the end of the device");
            Err(DeviceError::new(&device.name(), op, off, len, source))
        }
    }
}
