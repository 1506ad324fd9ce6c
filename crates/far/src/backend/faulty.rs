//! A backend that fails on request, for tests.

use super::{Backend, BackendError, Slot};
use parking_lot::Mutex;

/// The faults from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// Reads give EIO.
    ReadError,
    /// Writes give EIO.
    WriteError,
    /// Reads succeed with one bit changed.
    BitFlip,
    /// No slot is free.
    Full,
}

/// Wraps a backend. Clones share the fault.
#[derive(Debug)]
pub struct Faulty<B> {
    inner: std::sync::Arc<B>,
    fault: std::sync::Arc<Mutex<Fault>>,
}

impl<B> Clone for Faulty<B> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            fault: self.fault.clone(),
        }
    }
}

impl<B: Backend> Faulty<B> {
    /// A backend that works until [`Self::set`].
    pub fn new(inner: B) -> Self {
        Self {
            inner: std::sync::Arc::new(inner),
            fault: std::sync::Arc::default(),
        }
    }

    /// Chooses what goes wrong.
    pub fn set(&self, fault: Fault) {
        *self.fault.lock() = fault;
    }

    fn eio() -> BackendError {
        // EIO, which every Linux numbers 5.
        BackendError::Io(std::io::Error::from_raw_os_error(5))
    }
}

impl<B: Backend> Backend for Faulty<B> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capacity_slabs(&self) -> u32 {
        self.inner.capacity_slabs()
    }

    fn alloc(&self) -> Result<Slot, BackendError> {
        match *self.fault.lock() {
            Fault::Full => Err(BackendError::Full),
            _ => self.inner.alloc(),
        }
    }

    fn dealloc(&self, slot: Slot) {
        self.inner.dealloc(slot);
    }

    fn read(&self, slot: Slot, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        let fault = *self.fault.lock();
        if fault == Fault::ReadError {
            return Err(Self::eio());
        }
        self.inner.read(slot, offset_bytes, bytes)?;
        if let (Fault::BitFlip, Some(byte)) = (fault, bytes.get_mut(7)) {
            *byte ^= 4;
        }
        Ok(())
    }

    fn write(&self, slot: Slot, offset_bytes: usize, bytes: &[u8]) -> Result<(), BackendError> {
        match *self.fault.lock() {
            Fault::WriteError => Err(Self::eio()),
            _ => self.inner.write(slot, offset_bytes, bytes),
        }
    }
}
