//! A device that stands for a file of a pool with the file beside it, for tests: both are ranges of one
//! medium, so that a power cut takes both at the same moment.

use super::{Device, DeviceError, check_range};
use std::ops::Range;
use std::sync::Arc;

/// A range of a medium that [moves writes](Device::moves_writes), and the rest of the medium as the device
/// aside.
pub struct MovingDevice {
    medium: Arc<dyn Device>,
    range: Range<u64>,
    is_main: bool,
}

impl MovingDevice {
    /// The bytes of a medium of `medium_bytes` that the main device has: all but a sixteenth.
    pub const fn main_bytes(medium_bytes: u64) -> u64 {
        medium_bytes / 16 * 15 / 4096 * 4096
    }

    /// The main device on a medium.
    pub fn new(medium: Arc<dyn Device>) -> Self {
        let range = 0..Self::main_bytes(medium.len_bytes());
        Self {
            medium,
            range,
            is_main: true,
        }
    }
}

impl Device for MovingDevice {
    fn name(&self) -> String {
        self.medium.name()
    }

    fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        check_range(self, "read", off, out.len())?;
        self.medium.read_at(self.range.start + off, out)
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        check_range(self, "write", off, data.len())?;
        self.medium.write_at(self.range.start + off, data)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.medium.flush()
    }

    fn moves_writes(&self) -> bool {
        self.is_main
    }

    fn aside(&self, len_bytes: u64) -> Result<Option<Arc<dyn Device>>, DeviceError> {
        let aside = Self {
            medium: Arc::clone(&self.medium),
            range: self.range.end..self.medium.len_bytes(),
            is_main: false,
        };
        check_range(&aside, "open", 0, len_bytes as usize)?;
        Ok(self.is_main.then(|| Arc::new(aside) as _))
    }
}
