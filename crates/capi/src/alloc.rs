//! The functions of `varve_alloc.h`: far memory at addresses (`varve-far-alloc`) for C. A module with
//! `unsafe` code, by the same rules as [`crate::ffi`]; decides nothing.
//!
//! # Safety
//! As in [`crate::ffi`]: strings are NUL-terminated, structures are there. NULL is refused where a value is
//! needed. Handles and pointers of allocations may have any value.
#![allow(unsafe_code)]
#![allow(
    clippy::missing_safety_doc,
    reason = "what callers owe is the same for all, and said once, above and at the top of varve_alloc.h"
)]

use crate::ffi::{Outcome, as_path, c_path, guard, note, store, zero};
use crate::registry::ALLOCS;
use ::varve_far::FileSlabs;
use ::varve_far_alloc::{Config, Error, FarAlloc};
use ::varve_far_objects::Error as StoreError;
use libc::{c_char, c_int, c_void, size_t};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use varve_libfs::Errno;

/// A heap of far memory. All threads of the process may use it at once.
#[allow(non_camel_case_types)]
pub struct va_heap {
    _private: (),
}

/// Options of a heap. Zeros are the defaults, and so is NULL in place of the structure.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct va_options {
    /// Memory for pages that are in use, in bytes, of the limit; 0: 25 MiB. A quarter of the limit at most.
    pub page_buffer_bytes: u64,
    /// Addresses, in bytes; 0: 32 times the store.
    pub address_bytes: u64,
    /// Threads that bring pages, 1 to 16; 0: 2.
    pub threads: u32,
    /// 0.
    pub flags: u32,
}

/// What a heap has and did.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct va_counters {
    /// Faults that brought a page.
    pub faults: u64,
    /// First writes to pages that were read before.
    pub write_faults: u64,
    /// Pages that left memory.
    pub left: u64,
    /// Touches that were SIGBUS.
    pub poisoned: u64,
    /// Pages in memory now.
    pub pages: u64,
    /// Memory in use, in bytes.
    pub memory_used_bytes: u64,
    /// The limit of it.
    pub memory_limit_bytes: u64,
    /// Bytes read from the device.
    pub device_read_bytes: u64,
    /// Bytes written to the device.
    pub device_write_bytes: u64,
}

/// The one place where an error becomes an errno.
fn errno(error: &Error) -> Errno {
    note_if_asked(error);
    Errno(match error {
        Error::Objects(StoreError::Full { .. } | StoreError::Held { .. }) => libc::ENOSPC,
        Error::Objects(StoreError::MemoryLimit { .. } | StoreError::PageBuffer { .. }) => libc::ENOMEM,
        Error::Objects(StoreError::TooMany { .. } | StoreError::TooLarge { .. }) => libc::ENOMEM,
        Error::Objects(StoreError::Io { .. } | StoreError::Damaged { .. }) => libc::EIO,
        Error::Objects(
            StoreError::ZeroSize
            | StoreError::NotAllocated(_)
            | StoreError::OutOfRange { .. }
            | StoreError::NoCheckpoints { .. }
            | StoreError::Refused { .. }
            | StoreError::Config(_),
        ) => libc::EINVAL,
        Error::Userfault { error, .. } | Error::System { error, .. } => {
            error.raw_os_error().unwrap_or(libc::EIO)
        }
        Error::TooMany { .. } | Error::Addresses { .. } | Error::PageBuffer { .. } => libc::ENOMEM,
        Error::ZeroSize | Error::NotAllocated(_) | Error::FixedSize(_) | Error::Config(_) => libc::EINVAL,
        Error::Forked => libc::EPERM,
    })
}

fn note_if_asked(error: &dyn std::fmt::Display) {
    if std::env::var_os("VARVE_DEBUG").is_some() {
        note(error);
    }
}

fn heap(heap: *const va_heap) -> Outcome<Arc<FarAlloc>> {
    ALLOCS.get(heap.addr()).map_err(Errno)
}

fn pointer(pointer: *mut c_void) -> Outcome<NonNull<u8>> {
    NonNull::new(pointer.cast()).ok_or(Errno(libc::EINVAL))
}

/// As `guard`, for calls on a heap that give memory.
fn give(h: *const va_heap, call: impl FnOnce(&FarAlloc) -> Result<NonNull<u8>, Error>) -> *mut c_void {
    guard(null_mut(), || {
        let given = call(&*heap(h)?).map_err(|error| errno(&error))?;
        Ok(given.as_ptr().cast())
    })
}

/// Makes a heap: at most store_bytes (rounded up to MiB, at least 4 MiB) in a file without a name in the
/// directory, and memory_bytes for everything that it keeps in memory, at least 2 MiB. NULL and errno on
/// failure: EPERM, EACCES or ENOSYS if the kernel lets nobody, or not this process, serve faults (root,
/// CAP_SYS_PTRACE, access to /dev/userfaultfd, or vm.unprivileged_userfaultfd=1; Linux 6.8, else EINVAL).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_open(
    directory: *const c_char,
    store_bytes: u64,
    memory_bytes: u64,
    options: *const va_options,
) -> *mut va_heap {
    guard(null_mut(), || {
        // SAFETY: the caller's promise.
        let directory = as_path(unsafe { c_path(directory) }?);
        let given = match options.is_null() {
            true => va_options::default(),
            // SAFETY: not NULL; the caller vouches for its target.
            false => unsafe { options.read() },
        };
        let slabs = u32::try_from(store_bytes.div_ceil(1 << 20)).map_err(|_| Errno(libc::EINVAL))?;
        if given.flags != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let mut config = Config::new(memory_bytes);
        config.address_bytes = given.address_bytes;
        if given.page_buffer_bytes > 0 {
            config.page_buffer_bytes = given.page_buffer_bytes;
        }
        if given.threads > 0 {
            config.threads = given.threads as usize;
        }
        let file = FileSlabs::open(directory, slabs).map_err(|error| {
            note_if_asked(&error);
            Errno(error.raw_os_error().unwrap_or(libc::EIO))
        })?;
        let made = FarAlloc::new(file, &config).map_err(|error| errno(&error))?;
        Ok(std::ptr::without_provenance_mut(ALLOCS.add(made)))
    })
}

/// Ends a heap and all that was allocated. Threads that touch it meanwhile get SIGBUS, and SIGSEGV after
/// that; calls that have begun end first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_close(h: *mut va_heap) -> c_int {
    zero(|| ALLOCS.take(h.addr()).map(drop).map_err(Errno))
}

/// Memory for count objects of size bytes, all zeros. Each begins on a page of its own: the next object of
/// an array is va_stride bytes further. What is stored and read is the object, not the page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_oalloc(h: *mut va_heap, count: size_t, size: size_t) -> *mut c_void {
    give(h, |heap| heap.oalloc(count, size))
}

/// Distance in bytes of the objects of an array of va_oalloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_stride(size: size_t) -> size_t {
    FarAlloc::stride_bytes(size)
}

/// Memory of size bytes in pages that are stored as a whole, aligned to 16. EINVAL for 0 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_malloc(h: *mut va_heap, size: size_t) -> *mut c_void {
    give(h, |heap| heap.malloc(size))
}

/// As va_malloc, for count times size bytes of zeros. ENOMEM if that product overflows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_calloc(h: *mut va_heap, count: size_t, size: size_t) -> *mut c_void {
    give(h, |heap| heap.calloc(count, size))
}

/// Makes memory of va_malloc or va_calloc larger or smaller; NULL is as for va_malloc. On failure it is as
/// before: EINVAL for 0 bytes and for memory of va_oalloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_realloc(h: *mut va_heap, memory: *mut c_void, size: size_t) -> *mut c_void {
    give(h, |heap| match NonNull::new(memory.cast()) {
        Some(memory) => heap.realloc(memory, size),
        None => heap.malloc(size),
    })
}

/// Frees memory of this heap; NULL is nothing to do. EINVAL if nothing begins there, as after it was freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_free(h: *mut va_heap, memory: *mut c_void) -> c_int {
    zero(|| {
        let heap = heap(h)?;
        match NonNull::new(memory.cast()) {
            Some(memory) => heap.free(memory).map_err(|error| errno(&error)),
            None => Ok(()),
        }
    })
}

/// Brings len bytes and keeps their pages in memory until va_unpin. Pins count. ENOMEM beyond a quarter of
/// the page buffer; EIO if a page cannot be read; nothing is pinned then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_pin(h: *mut va_heap, memory: *mut c_void, len: size_t) -> c_int {
    zero(|| heap(h)?.pin(pointer(memory)?, len).map_err(|error| errno(&error)))
}

/// Ends va_pin of the same range. EINVAL if a page of it has no pin.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_unpin(h: *mut va_heap, memory: *mut c_void, len: size_t) -> c_int {
    zero(|| {
        heap(h)?
            .unpin(pointer(memory)?, len)
            .map_err(|error| errno(&error))
    })
}

/// Lets all pages that are not pinned leave memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_flush(h: *mut va_heap) -> c_int {
    zero(|| heap(h)?.flush().map_err(|error| errno(&error)))
}

/// Gives the counters of a heap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_stats(h: *mut va_heap, counters: *mut va_counters) -> c_int {
    zero(|| {
        let heap = heap(h)?;
        let pages = heap.stats().map_err(|error| errno(&error))?;
        let objects = heap.objects().map_err(|error| errno(&error))?.stats();
        let all = va_counters {
            faults: pages.faults,
            write_faults: pages.write_faults,
            left: pages.dropped + pages.stored,
            poisoned: pages.poisoned,
            pages: pages.pages,
            memory_used_bytes: objects.memory_used_bytes,
            memory_limit_bytes: objects.memory_limit_bytes,
            device_read_bytes: objects.log.device_read_bytes,
            device_write_bytes: objects.log.device_write_bytes,
        };
        // SAFETY: the caller's promise.
        unsafe { store(counters, all) }
    })
}
