//! Transactions by paths: groups of calls that persist as one, for callers of this view. Owns paths and the
//! numbers of new inodes; the rules are [`Transaction`]'s.

use std::collections::HashMap;
use varve_format::InodeAttr;

use super::path::StripSlashes;
use super::{AT_FDCWD, Fd, Posix};
use crate::errno::{Errno, Result};
use crate::txn::{Made, Transaction, TxDir, TxFile};

/// First number for a transaction's new inodes: numbers from here on are not descriptors of open files.
pub const TX_FD_FIRST: Fd = 1 << 30;

/// A [`Transaction`] whose calls take paths. Paths are walked when a call is added: directories on the way
/// must exist, or be made by the transaction itself under exactly that path.
pub struct PosixTransaction {
    calls: Transaction,
    made: Vec<Made>,
    /// Directories that it makes, by path without slashes at the end.
    dirs: HashMap<Vec<u8>, Made>,
}

impl Posix {
    /// Begins a group of calls that take effect together or not at all.
    #[must_use]
    pub fn transaction(&self) -> PosixTransaction {
        PosixTransaction {
            calls: self.fs.transaction(&self.cred()),
            made: Vec::new(),
            dirs: HashMap::new(),
        }
    }
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(0) => (b"/", &path[1..]),
        Some(at) => (path[..at].strip_suffix_slashes(true), &path[at + 1..]),
        None => (b"", path),
    }
}

impl PosixTransaction {
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

    /// Directory and name of the last component, which is not followed.
    fn place<'p>(&self, posix: &Posix, path: &'p [u8]) -> Result<(TxDir, &'p [u8])> {
        let path = path.strip_suffix_slashes(true);
        let (above, name) = split(path);
        if path.is_empty() {
            return Err(Errno(libc::ENOENT));
        }
        let dir = match self.dirs.get(above) {
            Some(made) => (*made).into(),
            None if above.is_empty() => posix.base(AT_FDCWD, path)?.into(),
            None => posix.find(AT_FDCWD, above, true)?.key.into(),
        };
        Ok((dir, name))
    }

    fn file(&self, posix: &Posix, fd: Fd) -> Result<TxFile> {
        match usize::try_from(fd.wrapping_sub(TX_FD_FIRST)) {
            Ok(index) if fd >= TX_FD_FIRST => self
                .made
                .get(index)
                .map(|made| (*made).into())
                .ok_or(Errno(libc::EBADF)),
            _ => Ok((&posix.table.get(fd)?.file).into()),
        }
    }

    /// Assigns the number of the inode that was made last.
    fn number(&mut self, made: Made) -> Fd {
        self.made.push(made);
        TX_FD_FIRST + (self.made.len() - 1) as Fd
    }

    /// Makes a regular file; the number stands for it in [`write`](Self::write) and other calls of this
    /// transaction.
    ///
    /// # Errors
    /// Errors of the path; as [`Transaction::create`].
    pub fn create(&mut self, posix: &Posix, path: &[u8], mode: u32) -> Result<Fd> {
        let (dir, name) = self.place(posix, path)?;
        let made = self.calls.create(dir, name, posix.masked(mode))?;
        Ok(self.number(made))
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn mkdir(&mut self, posix: &Posix, path: &[u8], mode: u32) -> Result<()> {
        let (dir, name) = self.place(posix, path)?;
        let made = self.calls.mkdir(dir, name, posix.masked(mode) & 0o1777)?;
        self.dirs.insert(path.strip_suffix_slashes(true).to_vec(), made);
        self.number(made);
        Ok(())
    }

    /// Makes a symbolic link to `target`.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn symlink(&mut self, posix: &Posix, target: &[u8], path: &[u8]) -> Result<()> {
        let (dir, name) = self.place(posix, path)?;
        let made = self.calls.symlink(dir, name, target)?;
        self.number(made);
        Ok(())
    }

    /// Writes at `offset`, or at the end if there is none or the file was opened for appending.
    ///
    /// # Errors
    /// `EBADF`; as [`Transaction::write_at`].
    pub fn write(&mut self, posix: &Posix, fd: Fd, offset: Option<u64>, data: &[u8]) -> Result<()> {
        let file = self.file(posix, fd)?;
        let appends = matches!(&file, TxFile::Open(file) if file.flags().append);
        match offset.filter(|_| !appends) {
            Some(offset) => self.calls.write_at(file, offset, data),
            None => self.calls.append(file, data),
        }
    }

    /// Sets the length.
    ///
    /// # Errors
    /// `EBADF`; as [`Transaction::truncate`].
    pub fn ftruncate(&mut self, posix: &Posix, fd: Fd, size: u64) -> Result<()> {
        let file = self.file(posix, fd)?;
        self.calls.truncate(file, size)
    }

    /// Gives an open file, or one that this transaction makes, one more name.
    ///
    /// # Errors
    /// `EBADF`; errors of the path; as [`Transaction::link`].
    pub fn link(&mut self, posix: &Posix, fd: Fd, path: &[u8]) -> Result<()> {
        let file = self.file(posix, fd)?;
        let (dir, name) = self.place(posix, path)?;
        self.calls.link(file, dir, name)
    }

    /// Removes the name of anything but a directory.
    ///
    /// # Errors
    /// Errors of the path; as [`Transaction::unlink`].
    pub fn unlink(&mut self, posix: &Posix, path: &[u8]) -> Result<()> {
        let (dir, name) = self.place(posix, path)?;
        self.calls.unlink(dir, name)
    }

    /// Moves or replaces a name.
    ///
    /// # Errors
    /// Errors of the paths; as [`Transaction::rename`].
    pub fn rename(&mut self, posix: &Posix, from: &[u8], to: &[u8]) -> Result<()> {
        let (dir, name) = self.place(posix, from)?;
        let (new_dir, new_name) = self.place(posix, to)?;
        self.calls.rename(dir, name, new_dir, new_name)
    }

    /// Carries out all calls, at once; see [`Transaction::commit`].
    ///
    /// # Errors
    /// As [`Transaction::commit`].
    pub fn commit(self) -> Result<Vec<InodeAttr>> {
        self.calls.commit()
    }
}
