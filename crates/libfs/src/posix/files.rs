//! Calls that return or take descriptors.

use std::io::{IoSlice, IoSliceMut};
use std::sync::{Arc, OnceLock};
use varve_format::{FILE_SIZE_MAX, FallocateMode, FileKind, InodeAttr, InodeKey};
use varve_ipc::{Cred, DirEntry};
use varve_media::lock::Mutex;

use super::path::StripSlashes;
use super::table::Open;
use super::{AT_FDCWD, Fd, Posix};
use crate::attrs::OpenFlags;
use crate::errno::{Errno, Result};
use crate::file::copy::RangePair;
use crate::file::open::OpenFile;

/// Most times that `open` looks again when the name comes and goes.
const LOOKS_MAX: usize = 100;

/// Base of an offset given to `lseek`, or the kind of position to search for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whence {
    /// The start.
    Set,
    /// The current offset.
    Current,
    /// The end.
    End,
    /// The next data at or after it.
    Data,
    /// The next hole at or after it.
    Hole,
}

/// Equally long ranges of two descriptors, in bytes, as [`RangePair`](crate::RangePair).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FdRanges {
    /// The file that has the blocks.
    pub from: Fd,
    /// First byte in it.
    pub offset: u64,
    /// The file that shares them.
    pub to: Fd,
    /// First byte in it.
    pub to_offset: u64,
    /// Length.
    pub len: u64,
}

fn open_flags(flags: i32) -> Result<OpenFlags> {
    let (read, write) = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => (true, false),
        libc::O_WRONLY => (false, true),
        libc::O_RDWR => (true, true),
        _ => return Err(Errno(libc::EINVAL)),
    };
    Ok(OpenFlags {
        read,
        write,
        append: flags & libc::O_APPEND != 0,
        truncate: flags & libc::O_TRUNC != 0,
        sync: flags & libc::O_SYNC == libc::O_SYNC,
        dsync: flags & libc::O_DSYNC != 0,
        direct: flags & libc::O_DIRECT != 0,
        no_atime: flags & libc::O_NOATIME != 0,
    })
}

impl Posix {
    /// Opens relative to the working directory.
    ///
    /// # Errors
    /// As `open`.
    pub fn open(&self, path: &[u8], flags: i32, mode: u32) -> Result<Fd> {
        self.openat(AT_FDCWD, path, flags, mode)
    }

    /// Opens relative to a directory.
    ///
    /// # Errors
    /// As `openat`; ENXIO for fifos, sockets and devices, which live in the kernel.
    pub fn openat(&self, dirfd: Fd, path: &[u8], flags: i32, mode: u32) -> Result<Fd> {
        let wanted = open_flags(flags)?;
        if flags & libc::O_TMPFILE == libc::O_TMPFILE {
            return self.open_tmpfile(dirfd, path, flags, wanted, mode);
        }
        let create = flags & libc::O_CREAT != 0;
        let exclusive = create && flags & libc::O_EXCL != 0;
        let follow = flags & libc::O_NOFOLLOW == 0 && !exclusive;
        if create && flags & libc::O_DIRECTORY != 0 {
            return Err(Errno(libc::EINVAL));
        }
        if create && path.ends_with(b"/") {
            // Linux checks the slash before it checks the name.
            self.walk(dirfd, path.strip_suffix_slashes(true), false)?;
            return Err(Errno(libc::EISDIR));
        }
        for _ in 0..LOOKS_MAX {
            let walked = self.walk(dirfd, path, follow)?;
            let (attr, cred) = match walked.target {
                Some(_) if exclusive => return Err(Errno(libc::EEXIST)),
                Some(attr) => (attr, self.cred()),
                None if !create => return Err(Errno(libc::ENOENT)),
                None if walked.slash => return Err(Errno(libc::EISDIR)),
                None => {
                    let mode = self.masked(mode);
                    match self
                        .fs
                        .create_open(walked.dir, &walked.name, mode, wanted, &self.cred())
                    {
                        Ok((_, file)) => {
                            return self.insert(file, false, flags, (walked.dir, walked.name));
                        }
                        Err(Errno(libc::EEXIST)) if !exclusive => continue,
                        Err(errno) => return Err(errno),
                    }
                }
            };
            match attr.kind() {
                FileKind::Symlink => return Err(Errno(libc::ELOOP)),
                FileKind::Directory if create || wanted.write || wanted.truncate => {
                    return Err(Errno(libc::EISDIR));
                }
                FileKind::Directory | FileKind::Regular => {}
                _ => return Err(Errno(libc::ENXIO)),
            }
            if flags & libc::O_DIRECTORY != 0 && !attr.is_dir() {
                return Err(Errno(libc::ENOTDIR));
            }
            match self.fs.open(attr.key, wanted, &cred) {
                // Removed since it was found.
                Err(Errno(libc::ENOENT | libc::ESTALE)) => {}
                Err(errno) => return Err(errno),
                Ok(file) => {
                    return self.insert(file, attr.is_dir(), flags, (walked.dir, walked.name));
                }
            }
        }
        Err(Errno(libc::ENOENT))
    }

    fn open_tmpfile(&self, dirfd: Fd, path: &[u8], flags: i32, wanted: OpenFlags, mode: u32) -> Result<Fd> {
        if !wanted.write {
            return Err(Errno(libc::EINVAL));
        }
        let dir = self.find(dirfd, path, flags & libc::O_NOFOLLOW == 0)?;
        if !dir.is_dir() {
            return Err(Errno(libc::ENOTDIR));
        }
        let file = self.fs.tmpfile(dir.key, self.masked(mode), &self.cred())?;
        // The description is made with the flags that were asked for.
        let file = if wanted.read && !wanted.append && !wanted.sync && !wanted.dsync {
            file
        } else {
            self.fs.open(file.key(), wanted, &Cred::root())?
        };
        self.insert(file, false, flags, (dir.key, Vec::new()))
    }

    fn insert(&self, file: OpenFile, is_dir: bool, flags: i32, place: (InodeKey, Vec<u8>)) -> Result<Fd> {
        let open = Open {
            file,
            is_dir,
            flags,
            offset: Mutex::new(0),
            place,
            beside: OnceLock::new(),
        };
        self.table.insert(Arc::new(open), 0)
    }

    /// Closes a descriptor.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn close(&self, fd: Fd) -> Result<()> {
        self.closed(self.table.remove(fd)?);
        Ok(())
    }

    /// Returns another descriptor of the description.
    ///
    /// # Errors
    /// As `dup`.
    pub fn dup(&self, fd: Fd) -> Result<Fd> {
        self.table.insert(self.table.get(fd)?, 0)
    }

    /// Makes `to` a descriptor for the description of `fd`.
    ///
    /// # Errors
    /// As `dup2`.
    pub fn dup2(&self, fd: Fd, to: Fd) -> Result<Fd> {
        let open = self.table.get(fd)?;
        if fd != to {
            let old = self.table.replace(to, open)?;
            if let Some(old) = old {
                self.closed(old);
            }
        }
        Ok(to)
    }

    /// Reads at the offset, and moves it.
    ///
    /// # Errors
    /// As `read`.
    pub fn read(&self, fd: Fd, out: &mut [u8]) -> Result<usize> {
        let open = self.table.get(fd)?;
        let mut offset = open.offset.lock();
        let count = read_at(&open, *offset, out)?;
        *offset += count as u64;
        Ok(count)
    }

    /// Reads at an offset.
    ///
    /// # Errors
    /// As `pread`.
    pub fn pread(&self, fd: Fd, out: &mut [u8], offset: u64) -> Result<usize> {
        read_at(&*self.table.get(fd)?, offset, out)
    }

    /// Reads into several buffers.
    ///
    /// # Errors
    /// As `readv`.
    pub fn readv(&self, fd: Fd, out: &mut [IoSliceMut<'_>]) -> Result<usize> {
        let mut all = vec![0; out.iter().map(|part| part.len()).sum()];
        let count = self.read(fd, &mut all)?;
        let mut rest = &all[..count];
        for part in out {
            let (now, later) = rest.split_at(part.len().min(rest.len()));
            part[..now.len()].copy_from_slice(now);
            rest = later;
        }
        Ok(count)
    }

    /// Writes at the offset (or the end, with `O_APPEND`), and moves it.
    ///
    /// # Errors
    /// As `write`.
    pub fn write(&self, fd: Fd, data: &[u8]) -> Result<usize> {
        let open = self.table.get(fd)?;
        let mut offset = open.offset.lock();
        if open.flags & libc::O_APPEND != 0 {
            let (at, count) = open.file.append(data, &self.cred())?;
            *offset = at + count as u64;
            return Ok(count);
        }
        let count = write_at(&open, *offset, data, &self.cred())?;
        *offset += count as u64;
        Ok(count)
    }

    /// Writes at an offset (at the end, with `O_APPEND`, as Linux does).
    ///
    /// # Errors
    /// As `pwrite`.
    pub fn pwrite(&self, fd: Fd, data: &[u8], offset: u64) -> Result<usize> {
        let open = self.table.get(fd)?;
        if open.flags & libc::O_APPEND != 0 {
            return Ok(open.file.append(data, &self.cred())?.1);
        }
        write_at(&open, offset, data, &self.cred())
    }

    /// Writes several buffers, in one piece.
    ///
    /// # Errors
    /// As `writev`.
    pub fn writev(&self, fd: Fd, data: &[IoSlice<'_>]) -> Result<usize> {
        let all: Vec<u8> = data.iter().flat_map(|part| part.iter().copied()).collect();
        self.write(fd, &all)
    }

    /// Moves the offset; returns the new one.
    ///
    /// # Errors
    /// As `lseek`.
    pub fn lseek(&self, fd: Fd, offset: i64, whence: Whence) -> Result<u64> {
        let open = self.table.get(fd)?;
        let mut at = open.offset.lock();
        let look = |find: &dyn Fn(u64) -> Result<u64>| {
            u64::try_from(offset)
                .map_err(|_| Errno(libc::ENXIO))
                .and_then(find)
        };
        let base = match whence {
            Whence::Set => 0,
            Whence::Current => *at,
            Whence::End => open.file.getattr()?.size_bytes,
            Whence::Data => {
                *at = look(&|from| open.file.seek_data(from))?;
                return Ok(*at);
            }
            Whence::Hole => {
                *at = look(&|from| open.file.seek_hole(from))?;
                return Ok(*at);
            }
        };
        let to = base.checked_add_signed(offset).ok_or(Errno(libc::EINVAL))?;
        if to > FILE_SIZE_MAX && !open.is_dir {
            return Err(Errno(libc::EINVAL));
        }
        *at = to;
        Ok(to)
    }

    /// Sets the length.
    ///
    /// # Errors
    /// As `ftruncate`.
    pub fn ftruncate(&self, fd: Fd, size: u64) -> Result<()> {
        self.table.get(fd)?.file.truncate(size, &self.cred())
    }

    /// Allocates, zeroes or punches.
    ///
    /// # Errors
    /// As `fallocate`.
    pub fn fallocate(&self, fd: Fd, mode: FallocateMode, offset: u64, len: u64) -> Result<()> {
        self.table
            .get(fd)?
            .file
            .fallocate(mode, offset, len, &self.cred())
    }

    /// Attributes.
    ///
    /// # Errors
    /// As `fstat`.
    pub fn fstat(&self, fd: Fd) -> Result<InodeAttr> {
        self.table.get(fd)?.file.getattr()
    }

    /// Makes the file durable against a power cut.
    ///
    /// # Errors
    /// As `fsync`.
    pub fn fsync(&self, fd: Fd) -> Result<()> {
        self.table.get(fd)?.file.fsync(false)
    }

    /// Makes the file's data durable against a power cut.
    ///
    /// # Errors
    /// As `fdatasync`.
    pub fn fdatasync(&self, fd: Fd) -> Result<()> {
        self.table.get(fd)?.file.fsync(true)
    }

    /// Up to `max` further entries of a directory, without `.` and `..`; none is the end. `lseek(fd, 0, Set)`
    /// starts again.
    ///
    /// # Errors
    /// As `getdents`.
    pub fn readdir(&self, fd: Fd, max: usize) -> Result<Vec<DirEntry>> {
        let open = self.table.get(fd)?;
        if !open.is_dir {
            return Err(Errno(libc::ENOTDIR));
        }
        let mut cookie = open.offset.lock();
        let entries = self.fs.readdir(open.file.key(), *cookie, max)?;
        if let Some(last) = entries.last() {
            *cookie = last.next_cookie;
        }
        Ok(entries)
    }

    /// Lets a range of a file be the same blocks as a range of another, as
    /// [`OpenFile::clone_range_to`](crate::OpenFile::clone_range_to).
    ///
    /// # Errors
    /// As `ioctl_ficlonerange`.
    pub fn clone_range(&self, from: Fd, offset: u64, to: Fd, to_offset: u64, len: u64) -> Result<()> {
        let (source, target) = self.no_directories(from, to)?;
        let cred = self.cred();
        source
            .file
            .clone_range_to(offset, &target.file, to_offset, len, &cred)
    }

    /// Returns two descriptions, neither of which is a directory.
    fn no_directories(&self, one: Fd, other: Fd) -> Result<(Arc<Open>, Arc<Open>)> {
        let (one, other) = (self.table.get(one)?, self.table.get(other)?);
        if one.is_dir || other.is_dir {
            return Err(Errno(libc::EISDIR));
        }
        Ok((one, other))
    }

    /// As [`clone_range`](Self::clone_range), but only if both ranges hold the same bytes; returns whether
    /// they do.
    ///
    /// # Errors
    /// As `ioctl_fideduperange`.
    pub fn dedupe_range(&self, from: Fd, offset: u64, to: Fd, to_offset: u64, len: u64) -> Result<bool> {
        let (source, target) = self.no_directories(from, to)?;
        let cred = self.cred();
        source
            .file
            .dedupe_range_with(offset, &target.file, to_offset, len, &cred)
    }

    /// As [`OpenFile::dedupe_ranges`](crate::OpenFile::dedupe_ranges).
    ///
    /// # Errors
    /// As that; `EBADF`, `EISDIR`.
    pub fn dedupe_ranges(&self, ranges: &[FdRanges], dry_run: bool) -> Result<Vec<crate::Deduped>> {
        let open = ranges
            .iter()
            .map(|range| self.no_directories(range.from, range.to));
        let open = open.collect::<Result<Vec<_>>>()?;
        let pairs: Vec<_> = ranges
            .iter()
            .zip(&open)
            .map(|(range, (from, to))| RangePair {
                from: &from.file,
                offset: range.offset,
                to: &to.file,
                to_offset: range.to_offset,
                len: range.len,
            })
            .collect();
        crate::OpenFile::dedupe_ranges(&pairs, dry_run, &self.cred())
    }

    /// As [`OpenFile::unshare_range`](crate::OpenFile::unshare_range).
    ///
    /// # Errors
    /// As that; `EBADF`.
    pub fn unshare_range(&self, fd: Fd, offset: u64, len: u64) -> Result<()> {
        let open = self.table.get(fd)?;
        if open.is_dir {
            return Err(Errno(libc::EISDIR));
        }
        open.file.unshare_range(offset, len, &self.cred())
    }

    /// As [`OpenFile::defrag_range`](crate::OpenFile::defrag_range).
    ///
    /// # Errors
    /// As that; `EBADF`.
    pub fn defrag_range(&self, fd: Fd, offset: u64, len: u64) -> Result<u64> {
        let open = self.table.get(fd)?;
        if open.is_dir {
            return Err(Errno(libc::EISDIR));
        }
        open.file.defrag_range(offset, len, &self.cred())
    }

    /// As [`OpenFile::for_each_owned`](crate::OpenFile::for_each_owned).
    ///
    /// # Errors
    /// As that; `EBADF`.
    pub fn for_each_owned(
        &self,
        fd: Fd,
        offset: u64,
        len: u64,
        each: impl FnMut(&crate::OwnedBlocks),
    ) -> Result<()> {
        self.table.get(fd)?.file.for_each_owned(offset, len, each)
    }

    /// As [`OpenFile::for_each_checksum`](crate::OpenFile::for_each_checksum).
    ///
    /// # Errors
    /// As that; `EBADF`.
    pub fn for_each_checksum(
        &self,
        fd: Fd,
        each: impl FnMut(&crate::SummedBlocks) -> std::ops::ControlFlow<()>,
    ) -> Result<u64> {
        self.table.get(fd)?.file.for_each_checksum(each)
    }

    /// As [`OpenFile::read_checksums`](crate::OpenFile::read_checksums).
    ///
    /// # Errors
    /// As that; `EBADF`.
    pub fn read_checksums(
        &self,
        fd: Fd,
        from: varve_format::FileBlock,
        blocks: u32,
    ) -> Result<Vec<crate::SummedBlocks>> {
        self.table.get(fd)?.file.read_checksums(from, blocks)
    }

    /// As [`OpenFile::users`](crate::OpenFile::users).
    ///
    /// # Errors
    /// As that; `EBADF`.
    pub fn users_of(&self, fd: Fd) -> Result<Vec<u32>> {
        self.table.get(fd)?.file.users()
    }

    /// Copies bytes between two files at their offsets, and moves them.
    ///
    /// # Errors
    /// As `copy_file_range`.
    pub fn copy_file_range(&self, from: Fd, to: Fd, len: u64) -> Result<u64> {
        let (source, target) = (self.table.get(from)?, self.table.get(to)?);
        if Arc::ptr_eq(&source, &target) {
            return Err(Errno(libc::EINVAL));
        }
        let read_from = *source.offset.lock();
        let write_to = *target.offset.lock();
        let count = source
            .file
            .copy_range_to(read_from, &target.file, write_to, len, &self.cred())?;
        *source.offset.lock() = read_from + count;
        *target.offset.lock() = write_to + count;
        Ok(count)
    }
}

fn read_at(open: &Open, offset: u64, out: &mut [u8]) -> Result<usize> {
    if open.is_dir {
        return Err(Errno(libc::EISDIR));
    }
    open.file.read_at(offset, out)
}

fn write_at(open: &Open, offset: u64, data: &[u8], cred: &Cred) -> Result<usize> {
    open.file.write_at(offset, data, cred)
}
