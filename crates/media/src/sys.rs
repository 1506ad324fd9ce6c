//! System calls without a safe wrapper: housekeeping of the C library's allocator (no effect with other
//! libraries), the start of a write-out, large pages, memory policies, and where a file lies on its device. Raw
//! copies from and to memory that a device has.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

/// Has the kernel begin to write its cached pages of a range, without waiting. Makes nothing durable; a sync
/// that follows finds less to do. Only advice: a failure changes nothing, and the sync meets it again.
pub(crate) fn begin_write_out(file: &File, off: u64, len: u64) {
    let (off, len) = (off.cast_signed(), len.cast_signed());
    // SAFETY: takes no pointer; the descriptor is open as long as `file` is borrowed.
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), off, len, libc::SYNC_FILE_RANGE_WRITE);
    }
}

/// Asks for large pages behind the bytes. Only advice: a failure changes nothing.
pub(crate) fn prefer_large_pages(bytes: &mut [u8]) {
    // SAFETY: the kernel changes no content, and refuses a start that is in the middle of a page.
    unsafe { libc::madvise(bytes.as_mut_ptr().cast(), bytes.len(), libc::MADV_HUGEPAGE) };
}

/// The kind of the calling thread's memory policy; `None` where the kernel has none.
pub(crate) fn memory_policy() -> Option<i32> {
    let mut mode: i32 = 0;
    // SAFETY: the kernel writes one number, which lives through the call; no mask is asked for.
    let done = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            std::ptr::null_mut::<u64>(),
            0_u64,
            0_u64,
            0_u64,
        )
    };
    (done == 0).then_some(mode)
}

/// Has the memory that the calling thread allocates come from a node, if nobody has chosen a policy for it.
/// Returns whether that is so now: then [`prefer_near_node`] ends it.
pub(crate) fn prefer_node(node: u32) -> bool {
    const BITS: u32 = u64::BITS;
    let mut mask = [0_u64; 16];
    let Some(word) = mask.get_mut((node / BITS) as usize) else {
        return false;
    };
    *word |= 1 << (node % BITS);
    if memory_policy() != Some(libc::MPOL_DEFAULT) {
        return false;
    }
    // The kernel takes one bit less than it is told.
    let bits = u64::from(BITS) * mask.len() as u64 + 1;
    // SAFETY: the kernel reads the mask, which lives through the call.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, mask.as_ptr(), bits) == 0 }
}

/// Has the memory that the calling thread allocates come from the node that it runs on, as by default.
pub(crate) fn prefer_near_node() {
    // SAFETY: takes no mask.
    unsafe {
        libc::syscall(
            libc::SYS_set_mempolicy,
            libc::MPOL_DEFAULT,
            std::ptr::null::<u64>(),
            0_u64,
        );
    }
}

/// `_IO(0x12, 119)`.
const BLKDISCARD: libc::Ioctl = 0x1277 as libc::Ioctl;

/// Tells a block device that a range is free: what it reads as from then on is the device's to choose.
/// `false`: the device cannot be told.
///
/// # Errors
/// The host's.
pub(crate) fn discard(device: &File, off: u64, len: u64) -> io::Result<bool> {
    let range = [off, len];
    // SAFETY: the kernel reads two numbers, which live through the call; the descriptor is open as long as
    // `device` is borrowed.
    if unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD, range.as_ptr()) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS) => Ok(false),
        _ => Err(error),
    }
}

/// Locks one byte of a file for its open file description: the kernel takes the lock back when the last
/// descriptor of it is closed and the last mapping made with it is gone, in whichever process.
///
/// # Errors
/// The host's, such as a file system without locks.
pub fn hold_byte(file: &File, off: u64) -> io::Result<()> {
    byte_lock(file, off, libc::F_RDLCK, libc::F_OFD_SETLK).map(drop)
}

/// Whether another open file description [holds](hold_byte) that byte.
///
/// # Errors
/// As for [`hold_byte`].
pub fn is_held(file: &File, off: u64) -> io::Result<bool> {
    let found = byte_lock(file, off, libc::F_WRLCK, libc::F_OFD_GETLK)?;
    Ok(i32::from(found) != libc::F_UNLCK)
}

/// Returns the kind of the lock that the kernel answers with.
fn byte_lock(file: &File, off: u64, kind: libc::c_int, command: libc::c_int) -> io::Result<libc::c_short> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: off.cast_signed(),
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the commands take a pointer to such a record, which lives through the call; the descriptor is
    // open as long as `file` is borrowed.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(lock.l_type),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Memory whose address a device has, which may write it at any time: accessed by raw copies only, never by
/// reference.
pub(crate) struct DeviceMemory {
    base: NonNull<u8>,
    len: usize,
}

impl DeviceMemory {
    /// # Safety
    /// `len` bytes from `base` on are readable and writable as long as the value is used, and no reference
    /// into them is made elsewhere.
    pub(crate) const unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn address(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Panics unless the range lies within the memory.
    pub(crate) fn check(&self, off: usize, len: usize) {
        let end = off.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "bytes {off}..+{len} of {}",
            self.len
        );
    }

    /// Copies bytes out of it.
    pub(crate) fn read(&self, off: usize, out: &mut [u8]) {
        self.check(off, out.len());
        // SAFETY: the source lies within the memory, checked above; no reference into it is ever made, so
        // `out` is elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(self.address().add(off), out.as_mut_ptr(), out.len()) };
    }

    /// Copies bytes into it.
    pub(crate) fn write(&self, off: usize, src: &[u8]) {
        self.check(off, src.len());
        // SAFETY: as in `read`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), self.address().add(off), src.len()) };
    }
}

/// A piece of a file that is contiguous on its device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileExtent {
    pub(crate) file_off: u64,
    pub(crate) device_off: u64,
    pub(crate) len: u64,
}

/// Extents that one call returns.
const EXTENTS_AT_ONCE: usize = 128;

/// `struct fiemap` with its array (`linux/fiemap.h`).
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; EXTENTS_AT_ONCE],
}

/// `struct fiemap_extent`.
#[derive(Clone, Copy)]
#[repr(C)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// Returns where a file lies on its device.
///
/// # Errors
/// The host's: some file systems do not say.
pub(crate) fn file_extents(file: &File) -> io::Result<Vec<FileExtent>> {
    /// `_IOWR('f', 11, struct fiemap)`, whose size is that without the array.
    const FS_IOC_FIEMAP: libc::c_ulong = 0xC020_660B;
    /// Extents without a place of their own on the device: unknown, delayed, encoded, inline.
    const PLACELESS: u32 = 0x2 | 0x4 | 0x8 | 0x200;
    const LAST: u32 = 1;
    let mut found = Vec::new();
    let mut start = 0;
    loop {
        let empty = FiemapExtent {
            logical: 0,
            physical: 0,
            length: 0,
            reserved64: [0; 2],
            flags: 0,
            reserved: [0; 3],
        };
        let mut map = Box::new(Fiemap {
            start,
            length: u64::MAX - start,
            flags: 0,
            mapped_extents: 0,
            extent_count: EXTENTS_AT_ONCE as u32,
            reserved: 0,
            extents: [empty; EXTENTS_AT_ONCE],
        });
        // SAFETY: `map` has the layout that the request expects, with room for as many extents as it says;
        // the descriptor is open as long as `file` is borrowed.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP as _, &raw mut *map) };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        let extents = &map.extents[..(map.mapped_extents as usize).min(EXTENTS_AT_ONCE)];
        let placed = extents.iter().filter(|extent| extent.flags & PLACELESS == 0);
        found.extend(placed.map(|extent| FileExtent {
            file_off: extent.logical,
            device_off: extent.physical,
            len: extent.length,
        }));
        match extents.last() {
            Some(last) if last.flags & LAST == 0 && last.length > 0 => start = last.logical + last.length,
            _ => return Ok(found),
        }
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

/// Has the allocator keep up to `bytes` of freed memory (in each arena) instead of giving it back to the
/// kernel at once, for a command that allocates a buffer for each of many large messages: else each of its
/// pages is faulted in and cleared again and again. Settings in the environment (`GLIBC_TUNABLES`) take
/// precedence.
pub fn keep_freed(bytes: usize) {
    if std::env::var_os("GLIBC_TUNABLES").is_some() {
        return;
    }
    let bytes = bytes.try_into().unwrap_or(i32::MAX);
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointer; sets numbers that the allocator reads when memory is asked for and freed.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, bytes);
        libc::mallopt(libc::M_TRIM_THRESHOLD, bytes);
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = bytes;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{file_extents, hold_byte, is_held};
    use crate::{Backing, MappedRegion};
    use std::io::Write;

    #[test]
    fn byte_is_held_until_the_last_mapping_of_the_description_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![0; 8192]).unwrap();
        let open = || {
            std::fs::File::options()
                .read(true)
                .write(true)
                .open(&path)
                .unwrap()
        };
        let (own, clients) = (open(), open());
        hold_byte(&clients, 4096).unwrap();
        assert!(is_held(&own, 4096).unwrap() && !is_held(&own, 4095).unwrap());
        let mapped = MappedRegion::from_file(clients, "client".into(), Backing::Shm, 8192, true).unwrap();
        let again = open();
        assert!(is_held(&again, 4096).unwrap());
        drop(mapped);
        assert!(!is_held(&own, 4096).unwrap());
    }

    #[test]
    fn extents_of_a_file_cover_what_was_written() {
        let mut file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.write_all(&[7; 100_000]).unwrap();
        file.sync_all().unwrap();
        let Ok(extents) = file_extents(&file) else {
            eprintln!("SKIPPED: this file system does not say where its files lie");
            return;
        };
        let mut at = 0;
        for extent in &extents {
            assert_eq!(extent.file_off, at);
            at += extent.len;
        }
        assert!(at >= 100_000, "{extents:?}");
    }
}
