//! Memory for transfers, allocated by SPDK so that devices know it.

use std::ptr::NonNull;

use super::api::Api;
use crate::sys::DeviceMemory;

/// Alignment in bytes: no device wants more.
const ALIGN_BYTES: usize = 4096;

/// A part of memory that devices can reach. Whoever has it is the only one to touch it; while an operation
/// is under way that is the reactor, which touches it not at all.
pub(in crate::block::spdk) struct DmaBuffer(DeviceMemory);

// SAFETY: the value is the only way to its memory, and has no tie to a thread.
unsafe impl Send for DmaBuffer {}

impl DmaBuffer {
    /// Allocates `len` bytes of zeros; `None`: there is no memory left.
    pub(super) fn new(api: &Api, len: usize) -> Option<Self> {
        // SAFETY: the environment was started, since the caller has its runtime; the third parameter must be
        // null.
        let base = unsafe { (api.dma_malloc)(len, ALIGN_BYTES, std::ptr::null_mut()) };
        // SAFETY: new memory of that length, which is this value's alone until `free` ends it.
        Some(Self(unsafe {
            DeviceMemory::new(NonNull::new(base.cast())?, len)
        }))
    }

    /// Frees it.
    pub(super) fn free(self, api: &Api) {
        // SAFETY: allocated by `new`, and never used again, since `self` ends here.
        unsafe { (api.dma_free)(self.address().cast()) };
    }

    pub(super) const fn address(&self) -> *mut u8 {
        self.0.address()
    }

    /// Copies bytes out of it.
    pub(in crate::block::spdk) fn read(&self, off: usize, out: &mut [u8]) {
        self.0.read(off, out);
    }

    /// Copies bytes to its beginning.
    pub(in crate::block::spdk) fn write(&mut self, src: &[u8]) {
        self.0.write(0, src);
    }
}
