//! Open files: what keeps an inode alive, and reading and writing through it.

use varve_format::{FallocateMode, InodeAttr, InodeKey};
use varve_ipc::Cred;

use crate::errno::{Errno, Result};

/// An open file description. Keeps the inode alive while it exists; clones are the same description; the last drop closes it.
#[derive(Clone)]
pub struct OpenFile(InodeKey);

impl OpenFile {
    /// The inode.
    #[must_use]
    pub fn key(&self) -> InodeKey { self.0 }

    /// Reads; fewer bytes only at the end of the file.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let _ = (offset, out);
        Err(Errno(libc::ENOSYS))
    }

    /// Writes at `offset`, also when opened for appending. Durable against a kill of any process when it returns.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn write_at(&self, offset: u64, data: &[u8], cred: &Cred) -> Result<usize> {
        let _ = (offset, data, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Writes at the end, in one piece with finding it; says where.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn append(&self, data: &[u8], cred: &Cred) -> Result<(u64, usize)> {
        let _ = (data, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Sets the length.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn truncate(&self, size: u64, cred: &Cred) -> Result<()> {
        let _ = (size, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Allocates, punches or zeroes.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn fallocate(&self, mode: FallocateMode, offset: u64, len: u64, cred: &Cred) -> Result<()> {
        let _ = (mode, offset, len, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// First byte of data at or after `offset`; ENXIO if there is none.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn seek_data(&self, offset: u64) -> Result<u64> {
        let _ = (offset,);
        Err(Errno(libc::ENOSYS))
    }

    /// First byte of a hole at or after `offset` (the end of the file is one).
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn seek_hole(&self, offset: u64) -> Result<u64> {
        let _ = (offset,);
        Err(Errno(libc::ENOSYS))
    }

    /// Copies bytes between files; may copy fewer.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn copy_range_to(&self, offset: u64, to: &OpenFile, to_offset: u64, len: u64, cred: &Cred) -> Result<u64> {
        let _ = (offset, to, to_offset, len, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// As [`Fs::fsync`](crate::Fs::fsync).
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn fsync(&self, data_only: bool) -> Result<()> {
        let _ = (data_only,);
        Err(Errno(libc::ENOSYS))
    }

    /// Attributes.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn getattr(&self) -> Result<InodeAttr> {
        let _ = ();
        Err(Errno(libc::ENOSYS))
    }
}
