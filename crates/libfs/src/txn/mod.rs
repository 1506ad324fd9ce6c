//! Groups of calls that persist as one. Owns the buffer and its bounds; `commit` does the commit.
//!
//! docs/adr/0008 has the rules and the crash states.

mod commit;
mod effects;
mod plan;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_format::log::{CHUNK_BYTES, HEADER_SIZE, PAYLOAD_MAX, TX_ENTRIES_MAX, entry_size};
use varve_format::{FILE_SIZE_MAX, Ino, InodeAttr, InodeKey, SYMLINK_MAX};
use varve_ipc::Cred;

use crate::errno::{Errno, Result};
use crate::file::open::OpenFile;
use crate::session::Mount;
use commit::{Call, Group, check_new_name, commit_together};

/// Most bytes of log that one transaction may take: its data, and for each call at least 64 bytes.
pub const GROUP_BYTES_MAX: usize = CHUNK_BYTES as usize - HEADER_SIZE;
/// Most log entries of one transaction: one for each call, one for each MiB of a write.
pub const GROUP_ENTRIES_MAX: usize = TX_ENTRIES_MAX as usize;

/// A file, directory or symbolic link that a transaction makes, for its later calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    transaction: u64,
    index: usize,
}

impl Made {
    /// Index in the result of [`Transaction::commit`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.index
    }
}

/// A directory that a call of a transaction names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TxDir {
    /// An existing directory.
    There(InodeKey),
    /// One that this transaction makes.
    Made(Made),
}

impl From<InodeKey> for TxDir {
    fn from(key: InodeKey) -> Self {
        Self::There(key)
    }
}

impl From<Made> for TxDir {
    fn from(made: Made) -> Self {
        Self::Made(made)
    }
}

/// A file that a call of a transaction names.
#[derive(Clone)]
pub enum TxFile {
    /// An open one.
    Open(OpenFile),
    /// One that this transaction makes.
    Made(Made),
}

impl From<&OpenFile> for TxFile {
    fn from(file: &OpenFile) -> Self {
        Self::Open(file.clone())
    }
}

impl From<Made> for TxFile {
    fn from(made: Made) -> Self {
        Self::Made(made)
    }
}

/// Calls that take effect together or not at all, whatever fails and whenever a process or the machine dies.
///
/// Nothing happens before [`commit`](Self::commit), and no thread sees any effect, not even the caller;
/// dropping it is the abort. The calls are checked at the commit, in order, each against the state that the
/// calls before it leave. Only errors of a call by itself (a bad name, a file not open for writing, a bound)
/// are returned at once, and leave the transaction as it was. At most [`GROUP_ENTRIES_MAX`] entries,
/// [`GROUP_BYTES_MAX`] bytes, and 64 existing inodes.
pub struct Transaction {
    mount: Arc<Mount>,
    cred: Cred,
    id: u64,
    calls: Vec<Call>,
    /// Open files that calls name: they stay open until the end.
    files: Vec<OpenFile>,
    made: usize,
    entries: usize,
    bytes: usize,
}

/// Returns the key that stands for the `index`th inode that a transaction makes, before it has a number.
pub(crate) const fn made_key(index: usize) -> InodeKey {
    InodeKey {
        ino: Ino(u64::MAX - index as u64),
        ..InodeKey::new(0, 0)
    }
}

impl Transaction {
    pub(crate) fn new(mount: Arc<Mount>, cred: Cred) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            mount,
            cred,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            calls: Vec::new(),
            files: Vec::new(),
            made: 0,
            entries: 0,
            bytes: 0,
        }
    }

    /// Calls so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether it has no call yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Bytes of log that the calls so far take.
    #[must_use]
    pub const fn log_bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a call whose entries have these payloads.
    fn add(&mut self, call: Call, payloads: impl Iterator<Item = usize>) -> Result<()> {
        let (mut entries, mut bytes) = (self.entries, self.bytes);
        for payload in payloads {
            entries += 1;
            bytes = bytes.saturating_add(entry_size(payload));
        }
        if entries > GROUP_ENTRIES_MAX || bytes > GROUP_BYTES_MAX {
            return Err(Errno(libc::E2BIG));
        }
        self.calls.push(call);
        (self.entries, self.bytes) = (entries, bytes);
        Ok(())
    }

    fn made(&self, made: Made) -> Result<InodeKey> {
        if made.transaction == self.id && made.index < self.made {
            Ok(made_key(made.index))
        } else {
            Err(Errno(libc::EBADF))
        }
    }

    fn dir(&self, dir: TxDir) -> Result<InodeKey> {
        match dir {
            TxDir::There(key) => Ok(key),
            TxDir::Made(made) => self.made(made),
        }
    }

    /// Calls `add` with the file's key; the file stays open with the transaction if the call is added.
    fn with_file(
        &mut self,
        file: TxFile,
        writes: bool,
        add: impl FnOnce(&mut Self, InodeKey) -> Result<()>,
    ) -> Result<()> {
        match file {
            TxFile::Made(made) => {
                let key = self.made(made)?;
                add(self, key)
            }
            TxFile::Open(file) => {
                if writes && !file.flags().write {
                    return Err(Errno(libc::EBADF));
                }
                let key = file.key();
                add(self, key)?;
                if !self
                    .files
                    .iter()
                    .any(|known| known.key() == key && known.flags() == file.flags())
                {
                    self.files.push(file);
                }
                Ok(())
            }
        }
    }

    fn make(&mut self, dir: TxDir, name: &[u8], mode: u32, target: &[u8]) -> Result<Made> {
        check_new_name(name)?;
        let call = Call::Make {
            dir: self.dir(dir)?,
            name: name.to_vec(),
            index: self.made,
            mode,
            target: target.to_vec(),
        };
        // generation, mode, uid, gid, rdev, two lengths: 24 bytes.
        self.add(call, std::iter::once(24 + name.len() + target.len()))?;
        let made = Made {
            transaction: self.id,
            index: self.made,
        };
        self.made += 1;
        Ok(made)
    }

    /// Makes a regular file; `mode` holds the permissions after the umask. The commit fails with EEXIST if
    /// the name is taken.
    ///
    /// # Errors
    /// `EINVAL`, `ENAMETOOLONG`, `EEXIST` for a bad name; `EBADF` for a directory of another transaction;
    /// `E2BIG`.
    pub fn create(&mut self, dir: impl Into<TxDir>, name: &[u8], mode: u32) -> Result<Made> {
        self.make(dir.into(), name, libc::S_IFREG | (mode & 0o7777), b"")
    }

    /// Makes a directory; as [`create`](Self::create).
    ///
    /// # Errors
    /// As for `create`.
    pub fn mkdir(&mut self, dir: impl Into<TxDir>, name: &[u8], mode: u32) -> Result<Made> {
        self.make(dir.into(), name, libc::S_IFDIR | (mode & 0o7777), b"")
    }

    /// Makes a symbolic link; as [`create`](Self::create).
    ///
    /// # Errors
    /// As for `create`; `ENOENT` for an empty target.
    pub fn symlink(&mut self, dir: impl Into<TxDir>, name: &[u8], target: &[u8]) -> Result<Made> {
        if target.is_empty() {
            return Err(Errno(libc::ENOENT));
        }
        if target.len() > SYMLINK_MAX {
            return Err(Errno(libc::ENAMETOOLONG));
        }
        self.make(dir.into(), name, libc::S_IFLNK | 0o777, target)
    }

    fn put(&mut self, file: TxFile, offset: Option<u64>, data: &[u8]) -> Result<()> {
        if offset.unwrap_or(0).saturating_add(data.len() as u64) > FILE_SIZE_MAX {
            return Err(Errno(libc::EFBIG));
        }
        self.with_file(file, true, |group, key| {
            if data.is_empty() {
                return Ok(());
            }
            if data.len() > GROUP_BYTES_MAX {
                return Err(Errno(libc::E2BIG));
            }
            let payloads = data.chunks(PAYLOAD_MAX).map(<[u8]>::len);
            let call = Call::Write {
                file: key,
                offset,
                data: data.to_vec(),
            };
            group.add(call, payloads)
        })
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// `EBADF` if the file is not open for writing; `EFBIG`; `E2BIG`.
    pub fn write_at(&mut self, file: impl Into<TxFile>, offset: u64, data: &[u8]) -> Result<()> {
        self.put(file.into(), Some(offset), data)
    }

    /// Writes `data` at the end that the file has at the commit, after the calls before.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn append(&mut self, file: impl Into<TxFile>, data: &[u8]) -> Result<()> {
        self.put(file.into(), None, data)
    }

    /// Sets the length.
    ///
    /// # Errors
    /// `EINVAL` if the file is not open for writing; `EFBIG`; `E2BIG`.
    pub fn truncate(&mut self, file: impl Into<TxFile>, size: u64) -> Result<()> {
        if size > FILE_SIZE_MAX {
            return Err(Errno(libc::EFBIG));
        }
        let outcome = self.with_file(file.into(), true, |group, key| {
            group.add(Call::Truncate { file: key, size }, std::iter::once(0))
        });
        outcome.map_err(|errno| {
            if errno.0 == libc::EBADF {
                Errno(libc::EINVAL)
            } else {
                errno
            }
        })
    }

    /// Gives a file one more name (the first, if it was opened by `tmpfile`).
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn link(&mut self, file: impl Into<TxFile>, dir: impl Into<TxDir>, name: &[u8]) -> Result<()> {
        check_new_name(name)?;
        let dir = self.dir(dir.into())?;
        self.with_file(file.into(), false, |group, key| {
            let call = Call::Link {
                file: key,
                dir,
                name: name.to_vec(),
            };
            group.add(call, std::iter::once(4 + name.len()))
        })
    }

    /// Removes the name of anything but a directory.
    ///
    /// # Errors
    /// As [`create`](Self::create); the commit fails with `ENOENT` or `EISDIR`.
    pub fn unlink(&mut self, dir: impl Into<TxDir>, name: &[u8]) -> Result<()> {
        check_new_name(name)?;
        let call = Call::Unlink {
            dir: self.dir(dir.into())?,
            name: name.to_vec(),
        };
        self.add(call, std::iter::once(4 + name.len()))
    }

    /// Moves a name, replacing the target if there is one. The commit fails with `EOPNOTSUPP` for a directory
    /// that would get another parent or be replaced.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn rename(
        &mut self,
        dir: impl Into<TxDir>,
        name: &[u8],
        new_dir: impl Into<TxDir>,
        new_name: &[u8],
    ) -> Result<()> {
        check_new_name(name)?;
        check_new_name(new_name)?;
        let call = Call::Rename {
            dir: self.dir(dir.into())?,
            name: name.to_vec(),
            new_dir: self.dir(new_dir.into())?,
            new_name: new_name.to_vec(),
        };
        // Two directories' and two files' keys, exchange, length.
        self.add(call, std::iter::once(32 + name.len() + new_name.len()))
    }

    /// Carries out all calls, at once. Returns the inodes that were made, in the order of the calls. Durable
    /// as any single call is: against a kill of any process when this returns; against a power cut as
    /// docs/reference/semantics.md says (at once if a file in it was opened with `O_SYNC`).
    ///
    /// # Errors
    /// The errno of the first call that cannot be done; `E2BIG` for more than 64 inodes; `EOPNOTSUPP` (see
    /// the calls, and on a mount); `EAGAIN` when other sessions kept an inode that it needs; `ENOSPC`,
    /// `EROFS`, `EIO`. Nothing has happened then.
    pub fn commit(self) -> Result<Vec<InodeAttr>> {
        if self.mount.options.observer.is_some() {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        if self.calls.is_empty() {
            return Ok(Vec::new());
        }
        let sync = self.files.iter().any(|file| {
            let flags = file.flags();
            flags.sync || flags.dsync
        });
        let group = Group {
            calls: &self.calls,
            bytes: self.bytes,
            sync,
            cred: &self.cred,
        };
        commit_together(&self.mount, &group)
    }
}
