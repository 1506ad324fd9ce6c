//! A device wrapper that counts reads, writes and seeks, and fails on demand.

use super::{Device, DeviceError};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Calls to a device. A seek is a call that does not begin at the end of the call before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Reads.
    pub reads: u64,
    /// Seeks of reads.
    pub read_seeks: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Seeks of writes.
    pub write_seeks: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
}

#[derive(Debug, Default)]
struct Arm {
    at: u64,
    counts: Counts,
}

/// Wraps another device and counts its calls; [`fail_reads`](Self::fail_reads) and
/// [`fail_writes`](Self::fail_writes) make it fail.
pub struct CountingDevice {
    inner: Arc<dyn Device>,
    arm: Mutex<Arm>,
    reads_fail: AtomicBool,
    writes_fail: AtomicBool,
}

impl CountingDevice {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self {
            inner,
            arm: Mutex::default(),
            reads_fail: AtomicBool::new(false),
            writes_fail: AtomicBool::new(false),
        }
    }

    /// Returns the counts since the last call of this function.
    pub fn take(&self) -> Counts {
        std::mem::take(&mut self.arm.lock().counts)
    }

    /// Makes later reads fail with EIO, or stops that.
    pub fn fail_reads(&self, fail: bool) {
        self.reads_fail.store(fail, Ordering::Relaxed);
    }

    /// Makes later writes and flushes fail with EIO, or stops that.
    pub fn fail_writes(&self, fail: bool) {
        self.writes_fail.store(fail, Ordering::Relaxed);
    }

    fn error(&self, op: &'static str, off: u64, len: usize) -> DeviceError {
        DeviceError::new(&self.name(), op, off, len, io::Error::other("told to fail"))
    }
}

impl Device for CountingDevice {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        {
            let mut arm = self.arm.lock();
            let seeks = u64::from(arm.at != off);
            arm.at = off + out.len() as u64;
            arm.counts.reads += 1;
            arm.counts.read_seeks += seeks;
            arm.counts.read_bytes += out.len() as u64;
        }
        if self.reads_fail.load(Ordering::Relaxed) {
            return Err(self.error("read", off, out.len()));
        }
        self.inner.read_at(off, out)
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        {
            let mut arm = self.arm.lock();
            let seeks = u64::from(arm.at != off);
            arm.at = off + data.len() as u64;
            arm.counts.writes += 1;
            arm.counts.write_seeks += seeks;
            arm.counts.written_bytes += data.len() as u64;
        }
        if self.writes_fail.load(Ordering::Relaxed) {
            return Err(self.error("write", off, data.len()));
        }
        self.inner.write_at(off, data)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.arm.lock().counts.flushes += 1;
        if self.writes_fail.load(Ordering::Relaxed) {
            return Err(self.error("flush", 0, 0));
        }
        self.inner.flush()
    }

    fn moves_writes(&self) -> bool {
        self.inner.moves_writes()
    }

    fn aside(&self, len_bytes: u64) -> Result<Option<Arc<dyn Device>>, DeviceError> {
        self.inner.aside(len_bytes)
    }
}
