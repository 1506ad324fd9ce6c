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

use crate::ffi::{Outcome, as_path, c_path, guard, input, note, output, store, zero};
use crate::heap_file::HeapFile;
use crate::registry::ALLOCS;
use ::varve_far::FileSlabs;
use ::varve_far_alloc::{Config, Error, FarAlloc};
use ::varve_far_objects::{Error as StoreError, Refusal};
use libc::{c_char, c_int, c_void, size_t};
use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use varve_libfs::Errno;

/// A heap of far memory. All threads of the process may use it at once.
#[allow(non_camel_case_types)]
pub struct va_heap {
    _private: (),
}

/// Bytes that a program may put into a checkpoint.
pub const VA_RECORD_MAX: usize = 4064;

const _: () = assert!(VA_RECORD_MAX == ::varve_far_alloc::RECORD_MAX_BYTES);

/// Options of a heap. Zeros are the defaults, and so is NULL in place of the structure.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct va_options {
    /// Memory for pages that are in use, in bytes, of the limit; 0: 25 MiB. A quarter of the limit at most.
    pub page_buffer_bytes: u64,
    /// Addresses, in bytes; 0: 32 times the store. Without effect for va_restore: the file says it.
    pub address_bytes: u64,
    /// Where the addresses begin, a multiple of 2 MiB; 0: where there is room. For va_create alone: 0 for
    /// va_open, without effect for va_restore.
    pub start_address: u64,
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

/// What a checkpoint took.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct va_checkpointed {
    /// Its number in the file: larger than that of the one before.
    pub generation: u64,
    /// How long threads that write were stopped at once, in nanoseconds.
    pub stopped_ns: u64,
    /// Bytes that the call wrote to the file.
    pub written_bytes: u64,
    /// Those of tables, of them.
    pub table_bytes: u64,
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
            | StoreError::Config(_),
        ) => libc::EINVAL,
        Error::Objects(StoreError::Refused { reason, .. }) => match reason {
            Refusal::InUse => libc::EBUSY,
            Refusal::NotEmpty { .. } => libc::EEXIST,
            Refusal::Malformed(_) => libc::EIO,
            Refusal::Foreign
            | Refusal::Incomplete
            | Refusal::Newer { .. }
            | Refusal::Schema { .. }
            | Refusal::Kind { .. }
            | Refusal::Handle { .. } => libc::EINVAL,
        },
        Error::Malformed(_) => libc::EIO,
        Error::AddressesTaken { .. } => libc::EADDRINUSE,
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

/// The error of a file.
fn io_errno(error: &std::io::Error) -> Errno {
    note_if_asked(error);
    Errno(error.raw_os_error().unwrap_or(libc::EIO))
}

fn slabs(store_bytes: u64) -> Outcome<u32> {
    u32::try_from(store_bytes.div_ceil(1 << 20)).map_err(|_| Errno(libc::EINVAL))
}

/// Options that C gave.
///
/// # Safety
/// `options` is NULL, or points to options.
unsafe fn config(memory_bytes: u64, options: *const va_options) -> Outcome<Config> {
    let given = match options.is_null() {
        true => va_options::default(),
        // SAFETY: not NULL; the caller vouches for its target.
        false => unsafe { options.read() },
    };
    if given.flags != 0 {
        return Err(Errno(libc::EINVAL));
    }
    let mut config = Config::new(memory_bytes);
    config.address_bytes = given.address_bytes;
    config.start_address = given.start_address;
    if given.page_buffer_bytes > 0 {
        config.page_buffer_bytes = given.page_buffer_bytes;
    }
    if given.threads > 0 {
        config.threads = given.threads as usize;
    }
    Ok(config)
}

fn add(heap: FarAlloc) -> *mut va_heap {
    std::ptr::without_provenance_mut(ALLOCS.add(heap))
}

/// Makes the name of a new file durable.
fn sync_name(path: &Path) -> std::io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
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
        // SAFETY: the caller's promise.
        let config = unsafe { config(memory_bytes, options) }?;
        if config.start_address != 0 {
            return Err(Errno(libc::EINVAL));
        }
        let file = FileSlabs::open(directory, slabs(store_bytes)?).map_err(|error| io_errno(&error))?;
        let made = FarAlloc::new(file, &config).map_err(|error| errno(&error))?;
        Ok(add(made))
    })
}

/// Makes a heap with checkpoints, in a file of its own: it is made with mode 0600, or is there and empty. It
/// grows to store_bytes (rounded up to MiB) and 1 MiB at most: twice as large as what it is to hold.
/// schema_tag is a number of the program for the layout of what it stores; va_restore wants the same. An
/// empty checkpoint and the file's name are durable when this returns. While the heap is open its file is
/// locked; a child of fork that was made meanwhile holds the lock, too, until it ends or calls exec.
///
/// NULL and errno on failure, and a file that was made is gone again, unless another heap took it: as
/// va_open; EEXIST if the file has bytes; EBUSY if another heap uses it; EADDRINUSE if something is at
/// start_address; EINVAL if that is no multiple of 2 MiB, or the addresses do not lie between 2 MiB and 2^47;
/// ENOENT, EACCES and others as open(2); EIO.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_create(
    path: *const c_char,
    store_bytes: u64,
    schema_tag: u64,
    memory_bytes: u64,
    options: *const va_options,
) -> *mut va_heap {
    guard(null_mut(), || {
        // SAFETY: the caller's promise.
        let path = as_path(unsafe { c_path(path) }?);
        // SAFETY: the caller's promise.
        let config = unsafe { config(memory_bytes, options) }?;
        let slabs = slabs(store_bytes)?;
        let file = HeapFile::open(path).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => Errno(libc::EBUSY),
            _ => io_errno(&error),
        })?;
        let made = file
            .clone_for_heap()
            .map_err(|error| io_errno(&error))
            .and_then(|own| FarAlloc::create(own, slabs, schema_tag, &config).map_err(|error| errno(&error)))
            .and_then(|heap| sync_name(path).map(|()| heap).map_err(|error| io_errno(&error)));
        if made.is_err() {
            file.undo(path);
        }
        made.map(add)
    })
}

/// Makes a checkpoint: all memory of the heap, and what is allocated, as it is at one moment of this call. It
/// is durable when this returns 0; until then a crash leaves the one before, and what was changed since that
/// one is lost. record_len bytes of record, VA_RECORD_MAX at most, go with it: the pointers that the program
/// begins with. made tells what it took; NULL: nobody asks.
///
/// May be called at any time by any thread; calls at once wait for each other. Other threads stop for the
/// moment itself, and go on while it is written. The moment is one of all threads: each is between two
/// instructions, as if the machine lost its power then. Allocations and frees are in it whole or not at all,
/// but a va_realloc that moves more than 1 MiB may be in it with both blocks, of which the new one has no
/// name. What a device or io_uring writes to a page by itself at that moment (direct I/O, registered buffers)
/// is in it in part.
///
/// On failure the checkpoint before is the last: EINVAL for a heap of va_open and for a long record; EFAULT
/// if record is NULL and record_len is not 0; ENOSPC if the file has no room; EIO if it cannot be written.
/// After a sync that failed all others fail with EIO: va_close and va_restore. EPERM in a child of fork.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_checkpoint(
    h: *mut va_heap,
    record: *const c_void,
    record_len: size_t,
    made: *mut va_checkpointed,
) -> c_int {
    zero(|| {
        let heap = heap(h)?;
        // SAFETY: the caller's promise.
        let record = unsafe { input(record, record_len) }?;
        if record.len() > VA_RECORD_MAX {
            return Err(Errno(libc::EINVAL));
        }
        let all = heap.checkpoint(record).map_err(|error| errno(&error))?;
        if made.is_null() {
            return Ok(());
        }
        let told = va_checkpointed {
            generation: all.generation,
            stopped_ns: u64::try_from(all.stopped.as_nanos()).unwrap_or(u64::MAX),
            written_bytes: all.written_bytes,
            table_bytes: all.table_bytes,
        };
        // SAFETY: the caller's promise.
        unsafe { store(made, told) }
    })
}

/// The heap of the last complete checkpoint of a file of va_create, at the same addresses: pointers into it
/// are as they were. It goes on in the file, and its checkpoints too. Reads tables, no objects. The
/// checkpoint's record goes to record, which has room for record_size bytes (VA_RECORD_MAX are always
/// enough), and its length to record_len; NULL for either: nobody asks.
///
/// NULL and errno on failure, and the file is as useful as before: EADDRINUSE if this process has something
/// at the heap's addresses (restore it before that is mapped, or in another process); EBUSY if another heap
/// uses the file; EINVAL if the file holds no heap with addresses, has no complete checkpoint, was made by a
/// newer version, or with another schema_tag; EIO if its checkpoint is damaged or cannot be read or written;
/// ENOMEM if the tables do not fit into memory_bytes; ERANGE if the record is longer than record_size,
/// record_len has its length then; ENOENT and others as open(2); as va_open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn va_restore(
    path: *const c_char,
    schema_tag: u64,
    memory_bytes: u64,
    options: *const va_options,
    record: *mut c_void,
    record_size: size_t,
    record_len: *mut size_t,
) -> *mut va_heap {
    guard(null_mut(), || {
        // SAFETY: the caller's promise.
        let path = as_path(unsafe { c_path(path) }?);
        // SAFETY: the caller's promise.
        let config = unsafe { config(memory_bytes, options) }?;
        let room = if record.is_null() { 0 } else { record_size };
        // SAFETY: the caller's promise; of NULL nothing is used.
        let room = unsafe { output(record, room) }?;
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|error| io_errno(&error))?;
        let (heap, bytes) = FarAlloc::restore(file, schema_tag, &config).map_err(|error| errno(&error))?;
        if !record_len.is_null() {
            // SAFETY: the caller's promise.
            unsafe { store(record_len, bytes.len()) }?;
        }
        if !record.is_null() {
            let room = room.get_mut(..bytes.len()).ok_or(Errno(libc::ERANGE))?;
            room.copy_from_slice(&bytes);
        }
        Ok(add(heap))
    })
}

/// Ends a heap and all that was allocated; a heap with checkpoints has its last one in its file, and none is
/// made. Threads that touch it meanwhile get SIGBUS, and SIGSEGV after that; calls that have begun end first.
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt as _;

    fn create(path: &Path, start_address: u64) -> Option<i32> {
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        let options = va_options {
            start_address,
            ..va_options::default()
        };
        // SAFETY: a string and options that are there.
        let heap = unsafe { va_create(name.as_ptr(), 64 << 20, 1, 8 << 20, &raw const options) };
        let error = std::io::Error::last_os_error().raw_os_error();
        match heap.is_null() {
            true => error,
            false => {
                // SAFETY: the heap that was just made.
                assert_eq!(unsafe { va_close(heap) }, 0);
                None
            }
        }
    }

    #[test]
    fn heap_that_cannot_be_made_leaves_files_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("heap");
        // Made here, and gone again.
        for wrong in [4096, 1 << 47] {
            assert_eq!(create(&path, wrong), Some(libc::EINVAL));
            assert!(!path.exists());
        }
        // There before.
        std::fs::write(&path, []).unwrap();
        assert_eq!(create(&path, 4096), Some(libc::EINVAL));
        assert!(path.exists());
        // Another heap's.
        let other = File::open(&path).unwrap();
        other.lock().unwrap();
        assert_eq!(create(&path, 0), Some(libc::EBUSY));
        assert!(path.exists());
        drop(other);
        std::fs::write(&path, b"something").unwrap();
        assert!(matches!(create(&path, 0), Some(libc::EEXIST)));
        assert_eq!(std::fs::read(&path).unwrap(), b"something");
    }
}
