//! Memory for transfers, allocated by SPDK so that devices know it.

use std::ptr::NonNull;

use super::api::Api;

/// Alignment in bytes: no device wants more.
const ALIGN_BYTES: usize = 4096;

/// A part of memory that devices can reach. Whoever has it is the only one to touch it; while an operation
/// is under way that is the reactor, which touches it not at all.
pub(in crate::block::spdk) struct DmaBuffer {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the value is the only way to its memory, and has no tie to a thread.
unsafe impl Send for DmaBuffer {}

impl DmaBuffer {
    /// Allocates `len` bytes of zeros; `None`: there is no memory left.
    pub(super) fn new(api: &Api, len: usize) -> Option<Self> {
        // SAFETY: the environment was started, since the caller has its runtime; the third parameter must be
        // null.
        let base = unsafe { (api.dma_malloc)(len, ALIGN_BYTES, std::ptr::null_mut()) };
        Some(Self {
            base: NonNull::new(base.cast())?,
            len,
        })
    }

    /// Frees it.
    pub(super) fn free(self, api: &Api) {
        // SAFETY: allocated by `new`, and never used again, since `self` ends here.
        unsafe { (api.dma_free)(self.base.as_ptr().cast()) };
    }

    pub(super) const fn address(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    fn check(&self, off: usize, len: usize) {
        let end = off.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "bytes {off}..+{len} of {}",
            self.len
        );
    }

    /// Copies bytes out of it.
    pub(in crate::block::spdk) fn read(&self, off: usize, out: &mut [u8]) {
        self.check(off, out.len());
        // SAFETY: the source lies within the allocation, checked above; no reference into it is ever made, so
        // `out` is elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr().add(off), out.as_mut_ptr(), out.len()) };
    }

    /// Copies bytes to its beginning.
    pub(in crate::block::spdk) fn write(&mut self, src: &[u8]) {
        self.check(0, src.len());
        // SAFETY: as for `read`, with the roles exchanged.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), self.base.as_ptr(), src.len()) };
    }
}
