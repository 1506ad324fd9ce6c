//! A file or block device, accessed by system calls that bypass the page cache where the file system allows
//! it.

use super::{DEVICE_BLOCK_BYTES, Device, DeviceError, check_range, pool};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes that a small and a large aligned bounce buffer hold: lookups read a block or two, the log writes
/// segments.
const BOUNCE_BYTES: [usize; 2] = [64 << 10, 1 << 20];
/// Bounce buffers of each size kept for reuse.
const IDLE_MAX: [usize; 2] = [16, 2];

/// An open file; locked against other processes until dropped.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    path: PathBuf,
    name: String,
    len_bytes: u64,
    is_direct: bool,
    is_on_pool: bool,
    /// Small and large ones.
    idle: [Mutex<Vec<Aligned>>; 2],
}

/// Memory with the alignment that direct I/O needs.
#[derive(Debug)]
struct Aligned {
    raw: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        let align = DEVICE_BLOCK_BYTES as usize;
        let raw = vec![0; len + align];
        // Nothing is pushed to `raw`, so its memory does not move.
        let start = raw.as_ptr().align_offset(align);
        Self { raw, start }
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        &mut self.raw[self.start..self.start + len]
    }
}

impl Drop for FileDevice {
    /// Releases the lock at once: a child process that is being started may hold a copy of the descriptor for
    /// a moment.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

impl FileDevice {
    /// Opens a file or block device for this process alone.
    ///
    /// # Errors
    /// It is not there, cannot be written, or another process has it open as a store.
    pub fn open(path: &Path) -> Result<Self, DeviceError> {
        Self::open_with(path, true)
    }

    /// Opens a file or block device for reading only; another process may have it open.
    ///
    /// # Errors
    /// It is not there or cannot be read.
    pub fn open_read_only(path: &Path) -> Result<Self, DeviceError> {
        Self::open_with(path, false)
    }

    /// Makes a sparse file of `len_bytes`, or extends an existing one of at most that length.
    ///
    /// # Errors
    /// It cannot be made or lengthened.
    pub fn create(path: &Path, len_bytes: u64) -> Result<Self, DeviceError> {
        let failed = |source| DeviceError::new(&path.display().to_string(), "open", 0, 0, source);
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let file = file.map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if meta.is_file() && meta.len() < len_bytes {
            file.set_len(len_bytes).map_err(failed)?;
        }
        drop(file);
        Self::open(path)
    }

    fn open_with(path: &Path, write: bool) -> Result<Self, DeviceError> {
        let name = path.display().to_string();
        let failed = |source| DeviceError::new(&name, "open", 0, 0, source);
        let open = |flags: OFlags| {
            let mut options = OpenOptions::new();
            options.read(true).write(write).custom_flags(flags.bits() as i32);
            options.open(path)
        };
        let (mut file, is_direct) = match open(OFlags::DIRECT) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                (open(OFlags::empty()).map_err(failed)?, false)
            }
            Err(error) => return Err(failed(error)),
        };
        if write && rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let busy = io::Error::new(io::ErrorKind::WouldBlock, "another process has this store open");
            return Err(failed(busy));
        }
        let end = file.seek(io::SeekFrom::End(0)).map_err(failed)?;
        let is_on_pool = pool::pin_of(&file).is_on_pool();
        Ok(Self {
            file,
            path: path.to_owned(),
            is_on_pool,
            name,
            len_bytes: end / DEVICE_BLOCK_BYTES * DEVICE_BLOCK_BYTES,
            is_direct,
            idle: Default::default(),
        })
    }

    /// Whether I/O bypasses the page cache.
    pub const fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// The path of the small file beside a store's file that has what the policy leaves of its index on disk
    /// ([`aside`](Device::aside)).
    pub fn index_path(path: &Path) -> PathBuf {
        let mut name = path.as_os_str().to_owned();
        name.push(".index");
        name.into()
    }

    /// Allocates the file's blocks in the file system, so that later writes cannot run out of space.
    ///
    /// # Errors
    /// The file system has too little space, or does not support it.
    pub fn preallocate(&self) -> Result<(), DeviceError> {
        let all = rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, self.len_bytes);
        all.map_err(|error| DeviceError::new(&self.name, "open", 0, 0, error.into()))
    }

    /// Calls `work` with a buffer for transfers of `len` bytes, and the most that it holds at once.
    fn with_bounce<T>(&self, len: usize, work: impl FnOnce(&mut Aligned, usize) -> T) -> T {
        let kind = usize::from(len > BOUNCE_BYTES[0]);
        let idle = self.idle[kind].lock().pop();
        let mut buffer = idle.unwrap_or_else(|| Aligned::new(BOUNCE_BYTES[kind]));
        let result = work(&mut buffer, BOUNCE_BYTES[kind]);
        let mut idle = self.idle[kind].lock();
        if idle.len() < IDLE_MAX[kind] {
            idle.push(buffer);
        }
        result
    }
}

impl Device for FileDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        check_range(self, "read", off, out.len())?;
        let len = out.len();
        let read = if self.is_direct {
            self.with_bounce(len, |buffer, most| {
                let mut at = off;
                for piece in out.chunks_mut(most) {
                    let bytes = buffer.bytes(piece.len());
                    self.file.read_exact_at(bytes, at)?;
                    piece.copy_from_slice(bytes);
                    at += piece.len() as u64;
                }
                Ok(())
            })
        } else {
            self.file.read_exact_at(out, off)
        };
        read.map_err(|source| DeviceError::new(&self.name, "read", off, len, source))
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        check_range(self, "write", off, data.len())?;
        let written = if self.is_direct {
            self.with_bounce(data.len(), |buffer, most| {
                let mut at = off;
                for piece in data.chunks(most) {
                    let bytes = buffer.bytes(piece.len());
                    bytes.copy_from_slice(piece);
                    self.file.write_all_at(bytes, at)?;
                    at += piece.len() as u64;
                }
                Ok(())
            })
        } else {
            self.file.write_all_at(data, off)
        };
        written.map_err(|source| DeviceError::new(&self.name, "write", off, data.len(), source))
    }

    fn flush(&self) -> Result<(), DeviceError> {
        let synced = self.file.sync_data();
        synced.map_err(|source| DeviceError::new(&self.name, "flush", 0, 0, source))
    }

    fn moves_writes(&self) -> bool {
        self.is_on_pool
    }

    /// A file beside a regular file. On a pool a new one is pinned to the NVM, if the user may, and its
    /// blocks are allocated there.
    fn aside(&self, len_bytes: u64) -> Result<Option<Arc<dyn Device>>, DeviceError> {
        if !self.file.metadata().is_ok_and(|meta| meta.is_file()) {
            return Ok(None);
        }
        let path = Self::index_path(&self.path);
        let before = std::fs::metadata(&path).map(|meta| meta.len());
        if let Ok(bytes) = before
            && !bytes.is_multiple_of(DEVICE_BLOCK_BYTES)
        {
            let why = io::Error::new(io::ErrorKind::InvalidData, "it is no file of a cache store");
            return Err(DeviceError::new(&path.display().to_string(), "open", 0, 0, why));
        }
        let aside = Self::create(&path, len_bytes)?;
        if aside.is_on_pool && before.is_err() {
            pool::pin_to_nvm(&aside.file);
        }
        if aside.is_on_pool && before.unwrap_or(0) < len_bytes {
            // Without it the file works as well, until the pool is full.
            let _ = aside.preallocate();
        }
        Ok(Some(Arc::new(aside)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::FileDevice;
    use crate::device::Device;

    #[test]
    fn closed_device_can_be_opened_while_a_child_that_starts_has_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let device = FileDevice::create(&path, 4 << 20).unwrap();
        assert!(FileDevice::open(&path).is_err(), "it is locked");
        let childs = device.file.try_clone().unwrap();
        drop(device);
        FileDevice::open(&path).unwrap();
        drop(childs);
    }

    #[test]
    fn file_gives_back_what_was_written_and_refuses_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let device = FileDevice::create(&path, 4 << 20).unwrap();
        let data: Vec<u8> = (0..3 << 20).map(|n| (n % 251) as u8).collect();
        device.write_at(8192, &data).unwrap();
        device.flush().unwrap();
        let mut out = vec![0; data.len()];
        device.read_at(8192, &mut out).unwrap();
        assert!(out == data);
        assert!(device.write_at(4 << 20, &data[..4096]).is_err());
        let again = FileDevice::open(&path).unwrap_err();
        assert!(again.to_string().contains("another process"), "{again}");
        assert!(FileDevice::open_read_only(&path).is_ok());
        drop(device);
        assert!(FileDevice::open(&path).is_ok());
    }

    #[test]
    fn file_beside_is_made_lengthened_and_left_alone_if_it_is_no_stores() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let device = FileDevice::create(&path, 4 << 20).unwrap();
        let index = FileDevice::index_path(&path);
        assert_eq!(device.aside(0).unwrap().unwrap().len_bytes(), 0);
        assert_eq!(device.aside(8192).unwrap().unwrap().len_bytes(), 8192);
        assert_eq!(device.aside(0).unwrap().unwrap().len_bytes(), 8192);
        std::fs::write(&index, b"somebody's").unwrap();
        let refused = device.aside(8192).err().unwrap().to_string();
        assert!(refused.contains("no file of a cache store"), "{refused}");
        assert_eq!(std::fs::read(&index).unwrap(), b"somebody's");
    }
}
