//! Locks and shared maps as a program of the C library has them. The only unsafe code of this test.

use crate::ways::Lock;
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// What `fcntl` is told for a record lock on the whole file: to take it, waiting, or to give it back.
pub fn whole(lock: Lock, take: bool) -> (i32, libc::flock) {
    let kind = if take { libc::F_WRLCK } else { libc::F_UNLCK };
    let command = match lock {
        Lock::Description => libc::F_OFD_SETLKW,
        Lock::Process | Lock::Flock => libc::F_SETLKW,
    };
    // SAFETY: all zeros is a `flock` structure: numbers only.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind as i16;
    range.l_whence = libc::SEEK_SET as i16;
    (command, range)
}

/// Takes (waiting) or gives back a record lock on the whole file.
pub fn record_lock(file: &File, lock: Lock, take: bool) -> Result<()> {
    let (command, mut range) = whole(lock, take);
    // SAFETY: the descriptor is open and the structure outlives the call, which only reads it.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut range) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// A page of a file, mapped shared until this is dropped.
pub struct Page(*mut libc::c_void);

/// Bytes of a page.
pub const PAGE: usize = 4096;

impl Page {
    /// Maps the first page.
    pub fn map(file: &File) -> Result<Self> {
        Self::mapped(file, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn mapped(file: &File, prot: i32) -> Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                prot,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        Ok(Self(at))
    }

    /// Maps the first page, to read only.
    pub fn view(file: &File) -> Result<Self> {
        Self::mapped(file, libc::PROT_READ)
    }

    /// The first word.
    pub fn load(&self) -> u64 {
        // SAFETY: the page is mapped until `self` is dropped, and aligned; the file has at least a word.
        unsafe { AtomicU64::from_ptr(self.0.cast()) }.load(Ordering::SeqCst)
    }

    /// Adds one to the first word of what [`map`](Self::map) has mapped; what it was.
    pub fn add(&self) -> u64 {
        // SAFETY: the page is mapped for writing until `self` is dropped, and aligned; others change it by
        // the same atomic operation.
        unsafe { AtomicU64::from_ptr(self.0.cast()) }.fetch_add(1, Ordering::SeqCst)
    }

    /// `msync` with `MS_SYNC`.
    pub fn sync(&self) -> Result<()> {
        // SAFETY: the page is mapped until `self` is dropped.
        match unsafe { libc::msync(self.0, PAGE, libc::MS_SYNC) } {
            0 => Ok(()),
            _ => Err(Error::last_os_error()),
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own and whole, and nothing refers to it: stores and `msync` are
        // over when their calls return.
        unsafe { libc::munmap(self.0, PAGE) };
    }
}
