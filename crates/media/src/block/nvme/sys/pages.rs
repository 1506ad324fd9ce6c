//! Anonymous memory whose address a device has.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys::DeviceMemory;

/// Bytes of a huge page.
pub(super) const HUGE_BYTES: usize = 2 << 20;

/// A mapping of zeros, present in memory, not shared with children.
pub(super) struct Pages(DeviceMemory);

// SAFETY: the mapping lives as long as the value; it is accessed by raw copies and atomic loads only. Two
// threads that copy to one place leave some mixture of both, as with the device itself, which writes it too.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps `len` bytes, whole pages of the kind.
    pub(super) fn new(len: usize, huge: bool) -> io::Result<Self> {
        let huge = if huge { libc::MAP_HUGETLB } else { 0 };
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE | huge,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: the new mapping, which is this value's alone until it is dropped.
        let pages = Self(unsafe { DeviceMemory::new(base, len) });
        // After a fork, copy-on-write must not leave the original page to the child: the device goes on with
        // the page whose address it has. SAFETY: exactly the range of this mapping.
        if unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // Populated, and written: a page of zeros that is only read may be the shared zero page.
        // SAFETY: within the mapping, which is not shared with any other thread yet.
        unsafe { std::ptr::write_bytes(base.as_ptr(), 0, len) };
        Ok(pages)
    }

    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) const fn address(&self) -> *mut u8 {
        self.0.address()
    }

    pub(super) fn read(&self, off: usize, out: &mut [u8]) {
        self.0.read(off, out);
    }

    pub(super) fn write(&self, off: usize, src: &[u8]) {
        self.0.write(off, src);
    }

    /// Loads a word; later reads see all that the device wrote before it.
    pub(super) fn load(&self, off: usize) -> u32 {
        self.0.check(off, 4);
        assert!(off.is_multiple_of(4));
        // SAFETY: within the mapping and aligned, both checked; an atomic may be changed by others while it
        // is referred to.
        let word = unsafe { &*self.address().add(off).cast::<AtomicU32>() };
        u32::from_le(word.load(Ordering::Acquire))
    }

    /// Returns the physical address of each huge page.
    pub(super) fn physical(&self) -> io::Result<Vec<u64>> {
        let pagemap = File::open("/proc/self/pagemap")?;
        let address = |huge: usize| -> io::Result<u64> {
            let page = (self.address() as usize + huge * HUGE_BYTES) / 4096;
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, page as u64 * 8)?;
            let entry = u64::from_ne_bytes(entry);
            let number = entry & ((1 << 55) - 1);
            // Not present, or hidden from a process without the right to see it.
            if entry >> 63 == 0 || number == 0 {
                return Err(io::Error::from_raw_os_error(libc::EPERM));
            }
            Ok(number * 4096)
        };
        (0..self.len() / HUGE_BYTES).map(address).collect()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping of this value. The device lost access to it before (`Bus::stop_dma`).
        unsafe { libc::munmap(self.address().cast(), self.len()) };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::Pages;

    #[test]
    fn pages_hold_what_is_copied_to_them() {
        let pages = Pages::new(8192, false).unwrap();
        pages.write(4094, &[1, 2, 3, 4, 5, 6]);
        let mut back = [9; 8];
        pages.read(4093, &mut back);
        assert_eq!(back, [0, 1, 2, 3, 4, 5, 6, 0]);
        assert_eq!(pages.load(4096), u32::from_le_bytes([3, 4, 5, 6]));
        assert_eq!(pages.len(), 8192);
    }

    #[test]
    #[should_panic(expected = "of 4096")]
    fn pages_refuse_what_passes_their_end() {
        Pages::new(4096, false).unwrap().write(4095, &[1, 2]);
    }
}
