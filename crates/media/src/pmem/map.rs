//! A shared mapping of a file, with bounds. Knows address space; its owner makes the file durable.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::guard;
use super::persist::Persist;
use crate::error::{DeviceName, MediaError, check_range};

/// Mappings begin on a huge page, so that one can back them.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A file mapped shared at a fixed address, with room to grow. Addresses at or past `len_bytes` are never
/// touched.
pub(crate) struct Mapping {
    name: DeviceName,
    base: NonNull<u8>,
    /// Bytes of address space reserved from `base` on.
    reserved_bytes: usize,
    /// Bytes of the file that may be touched. Only grows, after the file did.
    len_bytes: AtomicU64,
    writable: bool,
    persist: Persist,
}

// SAFETY: the mapping lives as long as the value; it is only accessed by raw copies, for which the callers of
// `Region` keep writers apart; the length is atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Parameters of a mapping.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MapOptions {
    pub(crate) len_bytes: u64,
    pub(crate) max_bytes: u64,
    pub(crate) writable: bool,
    /// Ask for MAP_SYNC, which only a DAX file system grants.
    pub(crate) dax: bool,
}

impl Mapping {
    /// Maps `file`, reserving address space for `max_bytes`.
    ///
    /// # Errors
    /// `Setup` if the host refuses, notably EOPNOTSUPP for `dax` on a file system without DAX.
    pub(crate) fn new(name: &DeviceName, file: &File, options: MapOptions) -> Result<Self, MediaError> {
        let max = options.max_bytes.max(options.len_bytes).max(1);
        let too_long = || MediaError::TooLong {
            device: name.clone(),
            wanted_bytes: max,
            max_bytes: 1 << 46,
        };
        let reserved = usize::try_from(max)
            .ok()
            .filter(|max| *max <= 1 << 46)
            .ok_or_else(too_long)?;
        let reserved = reserved.next_multiple_of(HUGE_PAGE_BYTES);
        let base = reserve(reserved).map_err(|e| MediaError::setup(name, "reserve address space", &e))?;
        let mapping = Self {
            name: name.clone(),
            base,
            reserved_bytes: reserved,
            len_bytes: AtomicU64::new(options.len_bytes),
            writable: options.writable,
            persist: Persist::new(options.dax),
        };
        let protection = if options.writable {
            libc::PROT_READ | libc::PROT_WRITE
        } else {
            libc::PROT_READ
        };
        let sharing = if options.dax {
            libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC
        } else {
            libc::MAP_SHARED
        };
        // SAFETY: the range was reserved by this value just before and no other thread knows it; MAP_FIXED
        // replaces the reservation.
        let mapped = unsafe {
            libc::mmap(
                base.as_ptr().cast(),
                reserved,
                protection,
                sharing | libc::MAP_FIXED,
                file.as_raw_fd(),
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(MediaError::setup(name, "map it", &io::Error::last_os_error()));
        }
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTDUMP] {
            // SAFETY: exactly the range of this mapping. Only advice: failure (no huge pages here) changes
            // nothing.
            unsafe { libc::madvise(base.as_ptr().cast(), reserved, advice) };
        }
        Ok(mapping)
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    pub(crate) const fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes as u64
    }

    /// Lets accesses reach `len_bytes`; the file must be that long, with space allocated.
    pub(crate) fn extend_to(&self, len_bytes: u64) {
        assert!(
            len_bytes <= self.reserved_bytes(),
            "a mapping grows only inside its reservation"
        );
        self.len_bytes.fetch_max(len_bytes, Ordering::Release);
    }

    pub(crate) const fn as_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// Faults the pages of a range in for writing, so that the first store to each is as fast as later ones.
    /// Advice only.
    pub(crate) fn populate(&self, off: u64, len: u64) {
        if !self.writable || len == 0 || check_range(&self.name, off, len, self.len_bytes()).is_err() {
            return;
        }
        let begin = off as usize / 4096 * 4096;
        let end = (off + len) as usize;
        // SAFETY: page-aligned start, and the range was checked against the mapping. The call changes no
        // content.
        unsafe {
            libc::madvise(
                self.base.as_ptr().add(begin).cast(),
                end - begin,
                libc::MADV_POPULATE_WRITE,
            );
        }
    }

    /// Fills in which pages of a range are in memory, bit 0 of a byte each; `false`: the host does not say.
    pub(crate) fn residency(&self, off: u64, pages: &mut [u8]) -> bool {
        const PAGE: u64 = 4096;
        let len = pages.len() as u64 * PAGE;
        if !off.is_multiple_of(PAGE) || rustix::param::page_size() as u64 != PAGE {
            return false;
        }
        let Ok(off) = self.check(off, len as usize) else {
            return false;
        };
        // SAFETY: the range lies in the mapping (checked) and begins on a page; the kernel writes a byte for
        // each of its pages, for which `pages` has room.
        let asked = unsafe {
            libc::mincore(
                self.base.as_ptr().add(off).cast(),
                len as usize,
                pages.as_mut_ptr(),
            )
        };
        asked == 0
    }

    /// Replaces the file in the mapping by private memory, zero until it is stored to.
    pub(crate) fn retire(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: replaces exactly the range of this mapping, atomically and by memory with equal rights, to
        // which only raw copies are made, as before. If it fails the file stays mapped.
        unsafe {
            libc::mmap(
                self.base.as_ptr().cast(),
                self.reserved_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
    }

    fn check(&self, off: u64, len: usize) -> Result<usize, MediaError> {
        check_range(&self.name, off, len as u64, self.len_bytes())?;
        Ok(off as usize)
    }

    /// Checks that a range may be written to. Returns its offset in the mapping.
    pub(crate) fn check_write(&self, off: u64, len: usize) -> Result<usize, MediaError> {
        if !self.writable {
            return Err(MediaError::ReadOnly {
                device: self.name.clone(),
            });
        }
        self.check(off, len)
    }

    #[inline]
    pub(crate) fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let off = self.check(off, out.len())?;
        // SAFETY: the range lies in the mapping (checked), which `out`, a Rust reference, never overlaps.
        unsafe { self.persist.copy_out(self.base.as_ptr().add(off), out) };
        Ok(())
    }

    /// [`read`](Self::read) where another process may have shortened the file: missing bytes read as zeros.
    /// `false`: this machine does not support it, and `out` is unchanged.
    pub(crate) fn read_guarded(&self, off: u64, out: &mut [u8]) -> Result<bool, MediaError> {
        let off = self.check(off, out.len())?;
        if !guard::is_ready() {
            return Ok(false);
        }
        // SAFETY: the range lies in the mapping (checked), whose pages may be gone; the guard is ready.
        let there = unsafe { guard::copy(self.base.as_ptr().add(off), out) };
        out[there..].fill(0);
        Ok(true)
    }

    #[inline]
    pub(crate) fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let off = self.check_write(off, src.len())?;
        // SAFETY: the range lies in the writable mapping (both checked), to which no Rust reference is ever
        // made.
        unsafe { self.persist.copy_in(self.base.as_ptr().add(off), src) };
        Ok(())
    }

    #[inline]
    pub(crate) fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        let off = self.check_write(off, src.len())?;
        // SAFETY: as in `write`.
        Ok(unsafe { self.persist.copy_in_crc(self.base.as_ptr().add(off), src, seed) })
    }

    #[inline]
    pub(crate) fn fence(&self) {
        self.persist.fence();
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` reserved; nothing refers to it once the owner is gone.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.reserved_bytes) };
    }
}

/// Reserves address space that begins on a huge page.
fn reserve(len: usize) -> io::Result<NonNull<u8>> {
    let padded = len + HUGE_PAGE_BYTES;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh anonymous mapping that touches nothing that exists.
    let raw = unsafe { libc::mmap(std::ptr::null_mut(), padded, libc::PROT_NONE, flags, -1, 0) };
    if raw == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = raw as usize;
    let aligned = start.next_multiple_of(HUGE_PAGE_BYTES);
    let (before, after) = (aligned - start, padded - len - (aligned - start));
    // SAFETY: both pieces lie inside the mapping made above and outside of the part that is kept.
    unsafe {
        if before > 0 {
            libc::munmap(raw, before);
        }
        if after > 0 {
            libc::munmap(raw.cast::<u8>().add(before + len).cast(), after);
        }
    }
    NonNull::new(raw.cast::<u8>().wrapping_add(before))
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}
