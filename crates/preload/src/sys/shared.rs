//! Counters in a mapped file.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters that several processes add to.
pub struct Counters {
    slots: &'static [AtomicU64],
}

impl Counters {
    /// Maps the `count` counters of `file`; `None` if it is missing or too short. The mapping stays until the
    /// process ends.
    #[must_use]
    pub fn open(file: &Path, count: usize) -> Option<Self> {
        let file = std::fs::File::options().read(true).write(true).open(file).ok()?;
        let len = count * size_of::<AtomicU64>();
        if file.metadata().ok()?.len() < len as u64 {
            return None;
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: mapped for good, page-aligned, of `len` bytes; other processes touch it by atomic additions
        // only.
        let slots = unsafe { std::slice::from_raw_parts(at.cast::<AtomicU64>(), count) };
        Some(Self { slots })
    }

    /// Adds one to a counter.
    pub fn add(&self, slot: usize) {
        self.slots[slot].fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the record behind a pointer to a shared record; `None` for null.
pub fn leaked_in(
    pointer: &std::sync::atomic::AtomicPtr<super::shared_offset::Record>,
) -> Option<&'static super::shared_offset::Record> {
    // SAFETY: only records of `shared_offset` are stored, which are mapped for good.
    unsafe { pointer.load(Ordering::Acquire).as_ref() }
}

/// Returns the value behind a pointer to a value that is never freed; `None` for null.
pub fn leaked<T>(pointer: &'static std::sync::atomic::AtomicPtr<T>) -> Option<&'static T> {
    // SAFETY: only pointers from `Box::into_raw` are stored, and none is ever freed.
    unsafe { pointer.load(Ordering::Acquire).as_ref() }
}
