//! Slabs in one nameless file: on tmpfs, SSD or HDD.

use super::{Backend, BackendError, SLAB_BYTES, Slot, range};
use crate::page::{PAGE_BYTES, Page};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use zerocopy::IntoBytes;

/// Slabs in a file without a name: its space is free again when the process ends, however it ends.
#[derive(Debug)]
pub struct FileSlabs {
    name: String,
    file: File,
    is_direct: bool,
    capacity: u32,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    used: Vec<bool>,
    free: Vec<u32>,
}

impl FileSlabs {
    /// Opens a nameless file in the directory `dir`, mode 0600, for at most `capacity_slabs` slabs. With
    /// direct I/O where the file system has it, so that far pages take no page cache; tmpfs has none and
    /// needs none.
    ///
    /// # Errors
    /// The error of opening: `ENOENT`, `EACCES`, `EOPNOTSUPP` on file systems without nameless files.
    pub fn open(dir: &Path, capacity_slabs: u32) -> std::io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let memory = rustix::fs::statfs(dir)?.f_type == libc_tmpfs_magic();
        let direct = if memory {
            None
        } else {
            rustix::fs::open(dir, flags | OFlags::DIRECT, mode).ok()
        };
        let is_direct = direct.is_some();
        let file = match direct {
            Some(file) => file,
            None => rustix::fs::open(dir, flags, mode)?,
        };
        Ok(Self {
            name: dir.display().to_string(),
            file: File::from(file),
            is_direct,
            capacity: capacity_slabs,
            slots: Mutex::default(),
        })
    }

    fn check(&self, slot: Slot) -> Result<(), BackendError> {
        let slots = self.slots.lock();
        match slots.used.get(slot.0 as usize) {
            Some(true) => Ok(()),
            _ => Err(BackendError::OutOfRange(slot.0)),
        }
    }

    fn needs_bounce(&self, offset: usize, bytes: &[u8]) -> bool {
        let together = bytes.as_ptr().addr() | offset | bytes.len();
        self.is_direct && !together.is_multiple_of(PAGE_BYTES)
    }
}

/// `TMPFS_MAGIC` of `linux/magic.h`.
const fn libc_tmpfs_magic() -> rustix::fs::FsWord {
    0x0102_1994
}

/// Byte offset of a slot in the file.
fn base(slot: Slot) -> u64 {
    u64::from(slot.0) * SLAB_BYTES as u64
}

/// The whole pages that cover `offset..offset + len`: first byte and number of pages.
fn covering(offset: usize, len: usize) -> (usize, usize) {
    let first = offset / PAGE_BYTES;
    let end = (offset + len).div_ceil(PAGE_BYTES);
    (first * PAGE_BYTES, end - first)
}

impl Backend for FileSlabs {
    fn name(&self) -> &str {
        &self.name
    }

    fn capacity_slabs(&self) -> u32 {
        self.capacity
    }

    fn alloc(&self) -> Result<Slot, BackendError> {
        let mut slots = self.slots.lock();
        let fresh = slots.used.len() as u32;
        let number = match slots.free.last() {
            Some(number) => *number,
            None if fresh < self.capacity => fresh,
            None => return Err(BackendError::Full),
        };
        let space = rustix::fs::fallocate(
            &self.file,
            FallocateFlags::empty(),
            base(Slot(number)),
            SLAB_BYTES as u64,
        );
        match space {
            Ok(()) => {}
            Err(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) => return Err(BackendError::Full),
            Err(error) => return Err(BackendError::Io(error.into())),
        }
        if number == fresh {
            slots.used.push(true);
        } else {
            slots.free.pop();
            slots.used[number as usize] = true;
        }
        Ok(Slot(number))
    }

    fn dealloc(&self, slot: Slot) {
        let mut slots = self.slots.lock();
        let Some(used) = slots.used.get_mut(slot.0 as usize) else {
            return;
        };
        if !std::mem::take(used) {
            return;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let freed = rustix::fs::fallocate(&self.file, flags, base(slot), SLAB_BYTES as u64);
        // A slot that could not be emptied is not used again, so that nobody reads another slab's bytes.
        if freed.is_ok() {
            slots.free.push(slot.0);
        }
    }

    fn read(&self, slot: Slot, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        range(slot, offset_bytes, bytes.len())?;
        self.check(slot)?;
        let at = base(slot);
        if self.needs_bounce(offset_bytes, bytes) {
            let (first, pages) = covering(offset_bytes, bytes.len());
            let mut bounce = Page::zeroed(pages);
            self.file
                .read_exact_at(bounce.as_mut_bytes(), at + first as u64)?;
            let skip = offset_bytes - first;
            bytes.copy_from_slice(&bounce.as_bytes()[skip..skip + bytes.len()]);
            return Ok(());
        }
        Ok(self.file.read_exact_at(bytes, at + offset_bytes as u64)?)
    }

    fn write(&self, slot: Slot, offset_bytes: usize, bytes: &[u8]) -> Result<(), BackendError> {
        range(slot, offset_bytes, bytes.len())?;
        self.check(slot)?;
        let at = base(slot);
        if self.needs_bounce(offset_bytes, bytes) {
            let (first, pages) = covering(offset_bytes, bytes.len());
            let mut bounce = Page::zeroed(pages);
            let whole = first == offset_bytes && bytes.len().is_multiple_of(PAGE_BYTES);
            if !whole {
                self.file
                    .read_exact_at(bounce.as_mut_bytes(), at + first as u64)?;
            }
            let skip = offset_bytes - first;
            bounce.as_mut_bytes()[skip..skip + bytes.len()].copy_from_slice(bytes);
            return Ok(self.file.write_all_at(bounce.as_bytes(), at + first as u64)?);
        }
        Ok(self.file.write_all_at(bytes, at + offset_bytes as u64)?)
    }

    fn sg_write(&self, slot: Slot, offset_bytes: usize, ranges: &[&[u8]]) -> Result<(), BackendError> {
        let total = ranges.iter().map(|bytes| bytes.len()).sum();
        range(slot, offset_bytes, total)?;
        self.check(slot)?;
        if ranges.iter().any(|bytes| self.needs_bounce(0, bytes)) {
            return self.write(slot, offset_bytes, &ranges.concat());
        }
        let parts: Vec<std::io::IoSlice<'_>> =
            ranges.iter().map(|bytes| std::io::IoSlice::new(bytes)).collect();
        let at = base(slot) + offset_bytes as u64;
        let written = rustix::io::pwritev(&self.file, &parts, at).map_err(std::io::Error::from)?;
        if written == total {
            return Ok(());
        }
        // Short: the rest once more, in one piece.
        let rest = &ranges.concat()[written..];
        self.write(slot, offset_bytes + written, rest)
    }
}
