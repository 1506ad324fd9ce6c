//! The file that a heap and its checkpoints lie in.
//!
//! Owns the offsets of slabs in the file. Knows neither objects nor what a checkpoint is.

use crate::error::Error;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use varve_far::backend::SLAB_BYTES;
use varve_far::{Backend, BackendError, Slot};

/// Where the slabs begin; before them are the roots.
pub(crate) const SLABS_AT: u64 = SLAB_BYTES as u64;

/// A file that holds a heap with checkpoints. Implemented for [`std::fs::File`], so it may lie on any file
/// system; on a Varve mount it is a file of the pool. Methods may be called by several threads at once.
pub trait CheckpointFile: Send + Sync {
    /// Name for people.
    fn name(&self) -> String {
        "checkpoint file".into()
    }

    /// Makes sure that no other heap uses the file, until it is closed.
    ///
    /// # Errors
    /// `WouldBlock` where one does.
    fn lock(&self) -> io::Result<()> {
        Ok(())
    }

    /// Fills `bytes` from the file.
    ///
    /// # Errors
    /// A read beyond the end is one.
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Stores `bytes`; the file becomes longer where they pass its end.
    ///
    /// # Errors
    /// What the file system says; the range holds anything then.
    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> io::Result<()>;

    /// When this returns, all that was written before is durable.
    ///
    /// # Errors
    /// What the file system says: some of it may be lost.
    fn sync(&self) -> io::Result<()>;

    /// Length of the file.
    ///
    /// # Errors
    /// What the file system says.
    fn len_bytes(&self) -> io::Result<u64>;
}

impl CheckpointFile for File {
    fn lock(&self) -> io::Result<()> {
        self.try_lock().map_err(io::Error::from)
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(bytes, offset_bytes)
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        let metadata = self.metadata()?;
        if metadata.is_file() {
            Ok(metadata.len())
        } else {
            // A device has a length that this is not.
            Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
        }
    }
}

/// The slabs of a file, given one after the other and never given back.
pub(crate) struct FileStore {
    file: Arc<dyn CheckpointFile>,
    name: String,
    capacity: u32,
    given: AtomicU32,
}

impl FileStore {
    pub(crate) fn new(file: Arc<dyn CheckpointFile>, capacity: u32, given: u32) -> Self {
        Self {
            name: file.name(),
            file,
            capacity,
            given: AtomicU32::new(given),
        }
    }
}

/// Where a range of a slab lies in the file.
fn offset(slot: Slot, offset: usize, len: usize) -> Result<u64, BackendError> {
    match offset.checked_add(len) {
        Some(end) if end <= SLAB_BYTES => {
            Ok(SLABS_AT + u64::from(slot.0) * SLAB_BYTES as u64 + offset as u64)
        }
        _ => Err(BackendError::OutOfRange(slot.0)),
    }
}

impl Backend for FileStore {
    fn name(&self) -> &str {
        &self.name
    }

    fn capacity_slabs(&self) -> u32 {
        self.capacity
    }

    fn alloc(&self) -> Result<Slot, BackendError> {
        let next = |given: u32| (given < self.capacity).then(|| given + 1);
        let given = self.given.try_update(Ordering::Relaxed, Ordering::Relaxed, next);
        given.map(Slot).map_err(|_| BackendError::Full)
    }

    fn dealloc(&self, _: Slot) {}

    fn read(&self, slot: Slot, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        let at = offset(slot, offset_bytes, bytes.len())?;
        self.file.read_at(at, bytes).map_err(BackendError::Io)
    }

    fn write(&self, slot: Slot, offset_bytes: usize, bytes: &[u8]) -> Result<(), BackendError> {
        let at = offset(slot, offset_bytes, bytes.len())?;
        match self.file.write_at(at, bytes) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => Err(BackendError::Full),
            done => done.map_err(BackendError::Io),
        }
    }
}

/// An error of the operating system on a file.
pub(crate) fn io_error(file: &dyn CheckpointFile, error: io::Error) -> Error {
    Error::Io {
        device: file.name(),
        error: BackendError::Io(error),
    }
}
