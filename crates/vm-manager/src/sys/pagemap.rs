//! `/proc/PID/pagemap`: page frame numbers, and the `PAGEMAP_SCAN` ioctl (Linux 6.7) over ranges.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use bitflags::bitflags;

use super::check;
use crate::types::{PAGE_BYTES, Pid, VirtPage};

bitflags! {
    /// Categories of a page, as `PAGEMAP_SCAN` reports them.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct PageCategories: u64 {
        /// In a range registered for asynchronous write protection.
        const WP_ALLOWED = 1;
        /// Written since it was last write-protected.
        const WRITTEN = 1 << 1;
        /// Belongs to a file.
        const FILE = 1 << 2;
        /// In memory.
        const PRESENT = 1 << 3;
        /// In swap.
        const SWAPPED = 1 << 4;
        /// The shared page of zeros.
        const ZERO = 1 << 5;
        /// Mapped by a huge page.
        const HUGE = 1 << 6;
    }
}

/// Neighbouring pages of equal categories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct PageRun {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    categories: u64,
}

impl PageRun {
    /// Returns the number of pages.
    pub const fn pages(&self) -> u64 {
        (self.end - self.start) / PAGE_BYTES
    }
    /// Returns the categories of the pages.
    pub const fn categories(&self) -> PageCategories {
        PageCategories::from_bits_truncate(self.categories)
    }
}

bitflags! {
    /// Flags of a page frame (`/proc/kpageflags`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct FrameFlags: u64 {
        /// Merged with identical pages.
        const KSM = 1 << 21;
        /// Part of a transparent huge page.
        const THP = 1 << 22;
        /// The shared page of zeros.
        const ZERO = 1 << 24;
        const _ = !0;
    }
}

/// Table of page frame flags; without root all flags read as empty.
#[derive(Debug)]
pub struct Frames {
    file: Option<File>,
}

impl Frames {
    /// Opens the kernel's table, if permitted.
    pub fn open() -> Self {
        let file = File::open("/proc/kpageflags").ok();
        Self { file }
    }

    /// Returns the flags of the frame that a page map entry names; empty when it names none or the kernel
    /// hides it.
    pub fn flags(&self, entry: u64) -> FrameFlags {
        let mut bytes = [0u8; 8];
        let frame = entry & ((1 << 55) - 1);
        let here = entry >> 63 == 1 && frame != 0;
        match &self.file {
            Some(file) if here && file.read_exact_at(&mut bytes, frame * 8).is_ok() => {
                FrameFlags::from_bits_retain(u64::from_ne_bytes(bytes))
            }
            _ => FrameFlags::empty(),
        }
    }
}

#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const _: () = assert!(size_of::<ScanArgument>() == 96 && size_of::<PageRun>() == 24);

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const WP_MATCHING: u64 = 1;
const CHECK_WPASYNC: u64 = 2;
/// Most runs returned by one call: 24 KiB of buffer.
const RUNS: usize = 1024;

/// The page map of one process.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

impl Pagemap {
    /// Opens the map of a process.
    ///
    /// # Errors
    /// `EACCES` for processes of other users without root, `ENOENT`/`ESRCH` if it has ended.
    pub fn open(pid: Pid) -> io::Result<Self> {
        Ok(Self {
            file: File::open(format!("/proc/{pid}/pagemap"))?,
        })
    }

    /// Reads the raw entries of `count` pages from `first` on (bits: 63 present, 62 swapped, 61 file, 55
    /// soft-dirty, 0–54 frame). Without CAP_SYS_ADMIN the frame reads as 0. Returns fewer entries at the end
    /// of the address space.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn entries(&self, first: VirtPage, count: usize) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0u8; count * 8];
        let mut got = 0;
        while got < bytes.len() {
            match self.file.read_at(&mut bytes[got..], first.0 * 8 + got as u64)? {
                0 => break,
                n => got += n,
            }
        }
        let word = |c: &[u8]| u64::from_le_bytes(c.try_into().unwrap_or_default());
        Ok(bytes[..got / 8 * 8].chunks_exact(8).map(word).collect())
    }

    /// Calls `each` for the runs of pages in memory that are not the shared zero page, in `start..end`
    /// (bytes, page-aligned).
    ///
    /// # Errors
    /// `ENOTTY` before Linux 6.7; `EINVAL` for a range that is not aligned.
    pub fn present(&self, start: u64, end: u64, each: impl FnMut(PageRun)) -> io::Result<()> {
        let zero = PageCategories::ZERO.bits();
        let argument = ScanArgument {
            category_inverted: zero,
            category_mask: PageCategories::PRESENT.bits() | zero,
            return_mask: (PageCategories::HUGE | PageCategories::FILE).bits(),
            ..Self::argument(start, end)
        };
        self.scan(argument, each)
    }

    /// Calls `each` for the runs of pages written since the last call, and write-protects them again in one
    /// step. Works only in ranges that the process registered for asynchronous write protection.
    ///
    /// # Errors
    /// `EPERM` when a range is not registered, `ENOTTY` before Linux 6.7.
    pub fn take_written(&self, start: u64, end: u64, each: impl FnMut(PageRun)) -> io::Result<()> {
        let written = PageCategories::WRITTEN.bits();
        let argument = ScanArgument {
            flags: WP_MATCHING | CHECK_WPASYNC,
            category_mask: written,
            return_mask: written,
            ..Self::argument(start, end)
        };
        self.scan(argument, each)
    }

    fn argument(start: u64, end: u64) -> ScanArgument {
        ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: 0,
            start,
            end,
            walk_end: 0,
            vec: 0,
            vec_len: 0,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: 0,
            return_mask: 0,
        }
    }

    fn scan(&self, mut argument: ScanArgument, mut each: impl FnMut(PageRun)) -> io::Result<()> {
        let mut runs = vec![
            PageRun {
                start: 0,
                end: 0,
                categories: 0
            };
            RUNS
        ];
        let end = argument.end;
        while argument.start < end {
            argument.vec = runs.as_mut_ptr() as u64;
            argument.vec_len = RUNS as u64;
            argument.walk_end = 0;
            // SAFETY: the argument has the size it announces and lives over the call; `vec` points at `RUNS`
            // entries of a plain `repr(C)` struct that the kernel may fill in any way.
            let found = check(libc::c_long::from(unsafe {
                libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument)
            }))?;
            for run in &runs[..found.min(RUNS)] {
                each(*run);
            }
            if argument.walk_end <= argument.start {
                break;
            }
            argument.start = argument.walk_end;
        }
        Ok(())
    }
}
