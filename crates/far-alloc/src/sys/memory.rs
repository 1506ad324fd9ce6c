//! Mappings, and bytes at addresses.

use super::{CHUNK_PAGES, PAGE_BYTES, check};
use std::io;

const CHUNK_BYTES: usize = CHUNK_PAGES as usize * PAGE_BYTES;

/// Private memory of zeros without swap reservation, aligned to 2 MiB. A child of `fork` does not have it, a
/// core dump neither. Dropping it unmaps it.
#[derive(Debug)]
pub(crate) struct Region {
    mapped: usize,
    mapped_bytes: usize,
    start: u64,
    len_bytes: u64,
}

fn map(address: usize, len_bytes: usize, protection: libc::c_int, flags: libc::c_int) -> io::Result<usize> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: new memory at an address of the kernel's choice; with MAP_FIXED the one caller replaces a
    // mapping of its own, and MAP_FIXED_NOREPLACE replaces nothing.
    let got = unsafe { libc::mmap(address as *mut libc::c_void, len_bytes, protection, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(got as usize)
}

impl Region {
    pub(crate) fn new(len_bytes: usize) -> io::Result<Self> {
        let too_large = || io::Error::from_raw_os_error(libc::ENOMEM);
        let mapped_bytes = len_bytes.checked_add(CHUNK_BYTES).ok_or_else(too_large)?;
        let mapped = map(0, mapped_bytes, libc::PROT_READ | libc::PROT_WRITE, 0)?;
        Self {
            mapped,
            mapped_bytes,
            start: mapped.next_multiple_of(CHUNK_BYTES) as u64,
            len_bytes: len_bytes as u64,
        }
        .advised()
    }

    /// The same at an address, a multiple of 2 MiB. `EEXIST` where something is there.
    pub(crate) fn at(start: u64, len_bytes: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = map(start as usize, len_bytes, protection, libc::MAP_FIXED_NOREPLACE)?;
        let region = Self {
            mapped,
            mapped_bytes: len_bytes,
            start,
            len_bytes: len_bytes as u64,
        };
        // A kernel that takes the address for a wish gives another.
        if mapped as u64 != start {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        region.advised()
    }

    fn advised(self) -> io::Result<Self> {
        let (region, mapped, mapped_bytes) = (&self, self.mapped, self.mapped_bytes);
        for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            region.advise(mapped, mapped_bytes, advice)?;
        }
        // EINVAL of a kernel without huge pages: there are none then.
        let _ = region.advise(mapped, mapped_bytes, libc::MADV_NOHUGEPAGE);
        Ok(self)
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn contains(&self, address: u64, len_bytes: usize) -> bool {
        let end = address.checked_add(len_bytes as u64);
        address >= self.start && end.is_some_and(|end| end <= self.start + self.len_bytes)
    }

    fn advise(&self, address: usize, len_bytes: usize, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: callers give ranges of this region. The memory is used by address only, never by a Rust
        // reference, so that it may become zeros.
        check(libc::c_long::from(unsafe {
            libc::madvise(address as *mut libc::c_void, len_bytes, advice)
        }))
        .map(drop)
    }

    /// Drops the contents of whole pages.
    pub(crate) fn empty(&self, address: u64, len_bytes: usize) -> io::Result<()> {
        if !self.contains(address, len_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.advise(address as usize, len_bytes, libc::MADV_DONTNEED)
    }

    /// Copies bytes of a page that is there.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        if !self.contains(address, bytes.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: inside the mapping, by the line above, which does not overlap memory of a Rust reference.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Touches a byte, and so waits for it where the region is registered.
    pub(crate) fn touch(&self, address: u64) {
        if self.contains(address, 1) {
            // SAFETY: inside the mapping, by the line above.
            unsafe { (address as *const u8).read_volatile() };
        }
    }

    /// Takes the contents away for good: touching it is SIGSEGV, and the addresses stay taken until this is
    /// dropped.
    pub(crate) fn close(&self) -> io::Result<()> {
        map(self.mapped, self.mapped_bytes, libc::PROT_NONE, libc::MAP_FIXED).map(drop)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and addresses of it end with their heap.
        unsafe { libc::munmap(self.mapped as *mut libc::c_void, self.mapped_bytes) };
    }
}

/// Says whether this process is the one that made it: a page that a child of `fork` finds empty.
#[derive(Debug)]
pub(crate) struct Marker {
    address: usize,
}

impl Marker {
    pub(crate) fn new() -> io::Result<Self> {
        let address = map(0, PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE, 0)?;
        let marker = Self { address };
        // SAFETY: a page of this one's own.
        check(libc::c_long::from(unsafe {
            libc::madvise(address as *mut libc::c_void, PAGE_BYTES, libc::MADV_WIPEONFORK)
        }))?;
        // SAFETY: as above.
        unsafe { (address as *mut u8).write_volatile(1) };
        Ok(marker)
    }

    pub(crate) fn is_here(&self) -> bool {
        // SAFETY: the page lives as long as this.
        unsafe { (self.address as *const u8).read_volatile() != 0 }
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // SAFETY: the page is this one's.
        unsafe { libc::munmap(self.address as *mut libc::c_void, PAGE_BYTES) };
    }
}

/// Sets bytes of an allocation that nobody else has yet to zero.
pub(crate) fn zero_bytes(address: u64, len_bytes: usize) {
    // SAFETY: the caller just allocated the range and has not given it away; no Rust reference into it
    // exists.
    unsafe { std::ptr::write_bytes(address as *mut u8, 0, len_bytes) };
}

/// Copies from one allocation to another, which nobody else has yet.
pub(crate) fn move_bytes(from: u64, to: u64, len_bytes: usize) {
    // SAFETY: both ranges are allocated by the caller's heap and do not overlap; raw copies only.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len_bytes) };
}

/// Whether a page is in memory.
pub(crate) fn is_present(address: u64) -> bool {
    let mut answer = 0u8;
    // SAFETY: one page, so one byte of answer; the address is only looked up.
    let got = unsafe { libc::mincore(address as *mut libc::c_void, PAGE_BYTES, &raw mut answer) };
    got == 0 && answer & 1 != 0
}

/// What this process has mapped in a range: lines of `/proc/self/maps`.
pub(crate) fn mappings(range: std::ops::Range<u64>) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let is_in = |line: &&str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let at = |text| u64::from_str_radix(text, 16).ok();
        Some(at(start)? < range.end && range.start < at(end)?)
    };
    let lines = maps.lines().filter(|line| is_in(line) == Some(true));
    lines
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect()
}

/// Kilobytes of this process's page tables.
fn page_tables_kb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Whether emptying 2 MiB frees their page table (Linux 6.14 with `CONFIG_PT_RECLAIM`): tried out.
pub(crate) fn frees_page_tables() -> bool {
    const CHUNKS: usize = 128;
    let Ok(region) = Region::new(CHUNKS * CHUNK_BYTES) else {
        return false;
    };
    for chunk in 0..CHUNKS {
        region.touch(region.start() + (chunk * CHUNK_BYTES) as u64);
    }
    let full = page_tables_kb();
    let emptied = region.empty(region.start(), CHUNKS * CHUNK_BYTES);
    match (full, page_tables_kb(), emptied) {
        // 4 KiB each; a half leaves room for what other threads map meanwhile.
        (Some(full), Some(empty), Ok(())) => full.saturating_sub(empty) >= CHUNKS as u64 * 2,
        _ => false,
    }
}
