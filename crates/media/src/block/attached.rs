//! A device with what it has taken of this machine.

use std::sync::Arc;

use crate::error::{DeviceName, MediaError};
use crate::traits::{BlockDevice, DeviceInfo, DeviceState};

/// A device, and what is given back to the machine when it is closed.
pub(super) struct Attached<K> {
    // In the order in which they are dropped.
    device: Arc<dyn BlockDevice>,
    _kept: K,
}

impl<K> Attached<K> {
    /// `kept` is dropped after the device.
    pub(super) fn new(device: Arc<dyn BlockDevice>, kept: K) -> Self {
        Self { device, _kept: kept }
    }
}

impl<K: Send + Sync> BlockDevice for Attached<K> {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.device.read(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.device.write(off, src)
    }

    fn write_durable(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.device.write_durable(off, src)
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.device.flush()
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.device.trim(off, len)
    }

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        self.device.read_batch(parts)
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        self.device.write_batch(parts)
    }

    fn reader_parts(&self) -> Vec<crate::traits::ReaderPart> {
        self.device.reader_parts()
    }

    fn state(&self) -> DeviceState {
        self.device.state()
    }

    fn name(&self) -> DeviceName {
        self.device.name()
    }

    fn info(&self) -> DeviceInfo {
        self.device.info()
    }
}
