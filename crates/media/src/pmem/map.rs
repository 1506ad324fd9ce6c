//! A shared mapping of a file, with bounds. Knows address space; its owner makes the file durable.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::guard;
use super::persist::Persist;
use super::poison::{BLOCK_BYTES, Poison};
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
    /// Bad parts, of persistent memory.
    poison: Option<Box<Poison>>,
}

/// A part of persistent memory to map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DaxPart {
    /// First byte in the file or device, a multiple of 2 MiB.
    pub off: u64,
    /// Bytes that a mapping is cut into: 4 KiB for a file, the alignment of a device.
    pub align_bytes: u64,
}

impl DaxPart {
    /// A whole file.
    pub const FILE: Self = Self {
        off: 0,
        align_bytes: BLOCK_BYTES,
    };
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
    /// Ask for MAP_SYNC, which only persistent memory grants.
    pub(crate) dax: Option<DaxPart>,
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
        let mut mapping = Self {
            name: name.clone(),
            base,
            reserved_bytes: reserved,
            len_bytes: AtomicU64::new(options.len_bytes),
            writable: options.writable,
            persist: Persist::new(options.dax.is_some()),
            poison: options.dax.map(|part| Poison::new(part.align_bytes)),
        };
        let protection = if options.writable {
            libc::PROT_READ | libc::PROT_WRITE
        } else {
            libc::PROT_READ
        };
        let sharing = if options.dax.is_some() {
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
                options.dax.map_or(0, |part| part.off.cast_signed()),
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(MediaError::setup(name, "map it", &io::Error::last_os_error()));
        }
        if let Some(poison) = &mut mapping.poison {
            poison.watch(base.as_ptr(), reserved);
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

    /// Notes that a range cannot be read.
    pub(crate) fn note_bad(&self, off: u64, len: u64) {
        if let Some(poison) = &self.poison {
            poison.note(off, len);
        }
    }

    /// `Io` if a range holds memory that was found bad.
    #[inline]
    fn check_good(&self, poison: &Poison, op: &'static str, off: u64, len: usize) -> Result<(), MediaError> {
        match poison.first_in(off, len) {
            None => Ok(()),
            Some(bad) => {
                // The rest of the block that is bad, as far as it was asked for.
                let end = (bad + 1).next_multiple_of(BLOCK_BYTES).min(off + len as u64);
                Err(MediaError::from_errno(&self.name, op, bad, end - bad, libc::EIO))
            }
        }
    }

    fn read_dax(&self, poison: &Poison, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let at = self.check(off, out.len())?;
        self.check_good(poison, "read", off, out.len())?;
        if poison.granule() > BLOCK_BYTES && guard::is_ready() {
            // Ends at the bad line; a page replaced by the handler would cost its whole granule.
            // SAFETY: the range lies in the mapping (checked); the guard is ready.
            let there = unsafe { guard::copy(self.base.as_ptr().add(at), out) };
            if there < out.len() {
                poison.note(off + there as u64, 1);
            }
        } else {
            // SAFETY: the range lies in the mapping (checked), which `out`, a Rust reference, never overlaps.
            unsafe { self.persist.copy_out(self.base.as_ptr().add(at), out) };
        }
        self.check_good(poison, "read", off, out.len())
    }

    #[inline]
    pub(crate) fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        if let Some(poison) = &self.poison {
            return self.read_dax(poison, off, out);
        }
        let off = self.check(off, out.len())?;
        // SAFETY: the range lies in the mapping (checked), which `out`, a Rust reference, never overlaps.
        unsafe { self.persist.copy_out(self.base.as_ptr().add(off), out) };
        Ok(())
    }

    /// [`read`](Self::read) where another process may have shortened the file: missing bytes read as zeros.
    /// `false`: this machine does not support it, and `out` is unchanged.
    pub(crate) fn read_guarded(&self, off: u64, out: &mut [u8]) -> Result<bool, MediaError> {
        if let Some(poison) = &self.poison {
            // What is missing here is bad memory.
            return self.read_dax(poison, off, out).map(|()| true);
        }
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
        let at = self.check_write(off, src.len())?;
        self.check_written(off, src.len())?;
        // SAFETY: the range lies in the writable mapping (both checked), to which no Rust reference is ever
        // made.
        unsafe { self.persist.copy_in(self.base.as_ptr().add(at), src) };
        self.check_written(off, src.len())
    }

    /// `Io` if stores to a range go nowhere.
    #[inline]
    fn check_written(&self, off: u64, len: usize) -> Result<(), MediaError> {
        match &self.poison {
            Some(poison) => self.check_good(poison, "write", off, len),
            None => Ok(()),
        }
    }

    #[inline]
    pub(crate) fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        let at = self.check_write(off, src.len())?;
        self.check_written(off, src.len())?;
        // SAFETY: as in `write`.
        let crc = unsafe { self.persist.copy_in_crc(self.base.as_ptr().add(at), src, seed) };
        self.check_written(off, src.len())?;
        Ok(crc)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{DaxPart, MapOptions, Mapping, Poison};
    use crate::error::MediaError;
    use std::fs::File;

    /// A mapping whose bad pages are found, of a file that is then cut off in the middle: touching the rest
    /// raises SIGBUS, as a bad page does.
    fn cut_off(file: &File, granule: u64) -> Mapping {
        file.set_len(8 << 20).unwrap();
        let options = MapOptions {
            len_bytes: 8 << 20,
            max_bytes: 8 << 20,
            writable: true,
            dax: None,
        };
        let mut map = Mapping::new(&"nvm".into(), file, options).unwrap();
        let mut poison = Poison::new(granule);
        poison.watch(map.base.as_ptr(), map.reserved_bytes);
        map.poison = Some(poison);
        map.write(0, &[7; 8192]).unwrap();
        file.set_len(4 << 20).unwrap();
        map
    }

    fn errno<T>(result: Result<T, MediaError>) -> Option<(u64, i32)> {
        match result {
            Err(MediaError::Io { off, errno, .. }) => Some((off, errno)),
            _ => None,
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn bad_page_is_an_error_for_its_blocks_and_no_crash() {
        const BAD: u64 = 6 << 20;
        for granule in [4096, 2 << 20] {
            let map = cut_off(&tempfile::tempfile().unwrap(), granule);
            let mut out = vec![0; 8192];
            map.read(0, &mut out).unwrap();
            assert!(out == [7; 8192]);
            // Into the bad part, after a good one.
            map.read((4 << 20) - 8192, &mut out).unwrap();
            assert_eq!(
                errno(map.read((4 << 20) - 100, &mut out)),
                Some((4 << 20, libc::EIO))
            );
            assert_eq!(
                errno(map.read(BAD + 5, &mut out[..10])),
                Some((BAD + 5, libc::EIO))
            );
            assert_eq!(
                errno(map.read_guarded(BAD + 5000, &mut out[..10])).unwrap().1,
                libc::EIO
            );
            // A store that finds it, and one that knows.
            for _ in 0..2 {
                assert_eq!(errno(map.write(7 << 20, &[1; 300])), Some((7 << 20, libc::EIO)));
            }
            assert_eq!(errno(map.write_crc((7 << 20) + 9, b"x", 0)).unwrap().1, libc::EIO);
            map.read(4096, &mut out[..4096]).unwrap();
            assert!(out[..4096] == [7; 4096], "the rest is as before");
        }
    }

    #[test]
    fn listed_bad_block_is_never_touched() {
        let map = cut_off(&tempfile::tempfile().unwrap(), 4096);
        map.note_bad(4096, 512);
        let mut out = [0; 4096];
        assert_eq!(errno(map.read(0, &mut [0; 4097])), Some((4096, libc::EIO)));
        map.read(0, &mut out).unwrap();
        assert!(out == [7; 4096]);
    }

    #[test]
    fn file_without_dax_is_not_mapped() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let options = MapOptions {
            len_bytes: 4096,
            max_bytes: 4096,
            writable: true,
            dax: Some(DaxPart::FILE),
        };
        match Mapping::new(&"nvm".into(), &file, options) {
            Err(MediaError::Setup { errno, .. }) => {
                assert!([libc::EOPNOTSUPP, libc::EINVAL].contains(&errno), "{errno}");
            }
            Err(error) => panic!("{error}"),
            Ok(_) => eprintln!("SKIPPED: the directory for temporary files is on persistent memory"),
        }
    }
}
