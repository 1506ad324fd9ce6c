//! A device wrapper that calls a function before each transfer: for tests that hold transfers back, slow them
//! down or note them.

use super::{Device, DeviceError};
use std::sync::Arc;

/// A transfer that is about to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A read from this offset, bytes.
    Read(u64),
    /// A write to this offset, bytes.
    Write(u64),
}

type Hook = dyn Fn(Access) + Send + Sync;

/// Wraps another device and calls a function before each of its transfers, on the thread of the transfer.
pub struct HookedDevice {
    inner: Arc<dyn Device>,
    before: Box<Hook>,
}

impl HookedDevice {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Device>, before: impl Fn(Access) + Send + Sync + 'static) -> Self {
        Self {
            inner,
            before: Box::new(before),
        }
    }
}

impl Device for HookedDevice {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        (self.before)(Access::Read(off));
        self.inner.read_at(off, out)
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        (self.before)(Access::Write(off));
        self.inner.write_at(off, data)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.inner.flush()
    }

    fn moves_writes(&self) -> bool {
        self.inner.moves_writes()
    }

    fn aside(&self, len_bytes: u64) -> Result<Option<Arc<dyn Device>>, DeviceError> {
        self.inner.aside(len_bytes)
    }
}
