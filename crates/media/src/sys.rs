//! System calls without a safe wrapper: housekeeping of the C library's allocator (no effect with other
//! libraries), and the start of a write-out.

use std::fs::File;
use std::os::fd::AsRawFd;

/// Has the kernel begin to write its cached pages of a range, without waiting. Makes nothing durable; a sync
/// that follows finds less to do. Only advice: a failure changes nothing, and the sync meets it again.
pub(crate) fn begin_write_out(file: &File, off: u64, len: u64) {
    let (off, len) = (off.cast_signed(), len.cast_signed());
    // SAFETY: takes no pointer; the descriptor is open as long as `file` is borrowed.
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), off, len, libc::SYNC_FILE_RANGE_WRITE);
    }
}

/// Returns free memory of the allocator's arenas to the system. Short-lived threads leave each arena with
/// free memory that it keeps, because memory in use lies behind it or for later use: several MiB each, and
/// there are eight arenas for each processor. Takes the arenas' locks one after the other, a millisecond for
/// some ten MiB.
pub fn give_free_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointer and may be called at any time by any thread; it touches only the allocator's
    // free memory, under its locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Least number of arenas, however few the processors.
const ARENAS_MIN: usize = 4;

/// Limits the allocator to two arenas for each processor instead of eight: no more threads than there are
/// processors allocate at a moment, and each arena keeps as much free memory as was once in use in it. To be
/// called before there are threads, by a program that is only a daemon. Settings of arenas in the environment
/// (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES`) take precedence.
pub fn bound_arenas() {
    let said = ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"];
    if said.iter().any(|name| std::env::var_os(name).is_some()) {
        return;
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let arenas = (2 * processors).max(ARENAS_MIN);
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointer; sets a number that the allocator reads when a thread gets its arena.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, arenas.try_into().unwrap_or(i32::MAX));
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = arenas;
}
