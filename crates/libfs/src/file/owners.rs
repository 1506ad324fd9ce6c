//! Owners of a file's blocks: which it shares, which programs use it, the undo of shares, and moving together
//! what is not shared; and their checksums. Finds no duplicates.

use std::ops::ControlFlow;
use varve_format::{BLOCK_BYTES, EntryFlags, FileBlock, LogOp};
use varve_ipc::{Cred, Owned, OwnedBlocks, Request, Response, SUMS_MAX, Summed, SummedBlocks};

use super::open::OpenFile;
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::session::{Asks, Forwarded, Session};

/// Most bytes whose shares the daemon undoes, or that it defragments, in one operation.
const UNSHARE_MAX: u64 = 16 << 20;
/// Parts of a file in one reply.
const PARTS_AT_ONCE: u32 = 512;

impl OpenFile {
    /// Calls `each` with the parts of a range of this file, in order, with the number of extents that name
    /// their blocks; holes are left out. The range is widened to whole blocks; `len` 0: up to the last block.
    /// All that calls which returned before have written counts.
    ///
    /// # Errors
    /// `EPERM` for ordinary users other than the file's owner; `EINVAL` if it is no regular file; as `fstat`.
    pub fn for_each_owned(&self, offset: u64, len: u64, mut each: impl FnMut(&OwnedBlocks)) -> Result<()> {
        let mut from = FileBlock(offset / BLOCK_BYTES);
        let end = match len {
            0 => u64::MAX,
            len => offset.saturating_add(len).div_ceil(BLOCK_BYTES),
        };
        loop {
            let owned = self.mount().look(|session| {
                let pins = session.pin_read(self.key())?;
                let last = pins.node(self.key())?.inode.read().last_seq;
                session.digest(last)?;
                self.request_owners(session, from, PARTS_AT_ONCE)
            })?;
            for part in &owned.parts {
                let left = end.saturating_sub(part.file_block.0);
                if left == 0 {
                    return Ok(());
                }
                each(&OwnedBlocks {
                    blocks: u64::from(part.blocks).min(left) as u32,
                    ..*part
                });
                from = FileBlock(part.file_block.0 + u64::from(part.blocks));
            }
            if owned.complete || owned.parts.is_empty() {
                return Ok(());
            }
        }
    }

    /// Calls `each` with the checksums of this file's blocks, in order; holes are left out. Returns the
    /// number of blocks. All that calls which returned before have written counts, and a file that changes
    /// meanwhile may be told in part as it was. No data is read: a checksum is what the pool expects.
    ///
    /// # Errors
    /// As [`for_each_owned`](Self::for_each_owned); `EIO` if checksums cannot be read; `EINTR` if `each` has
    /// ended it.
    pub fn for_each_checksum(&self, mut each: impl FnMut(&SummedBlocks) -> ControlFlow<()>) -> Result<u64> {
        let (mut from, mut blocks) = (FileBlock(0), 0);
        loop {
            let summed = self.mount().look(|session| {
                let pins = session.pin_read(self.key())?;
                let last = pins.node(self.key())?.inode.read().last_seq;
                session.digest(last)?;
                self.request_checksums(session, from)
            })?;
            for part in &summed.parts {
                blocks += part.sums.len() as u64;
                if each(part).is_break() {
                    return Err(Errno(libc::EINTR));
                }
            }
            match summed.next {
                Some(next) if next > from => from = next,
                Some(_) => return Err(Errno(libc::EIO)),
                None => return Ok(blocks),
            }
        }
    }

    /// As [`for_each_checksum`](Self::for_each_checksum) for a range, of the bytes themselves: the daemon reads
    /// them, so they need not come here. `blocks` is at most 4,096, holes counted.
    ///
    /// # Errors
    /// As for `for_each_checksum`; `EIO` if bytes are not as the pool expects.
    pub fn read_checksums(&self, from: FileBlock, blocks: u32) -> Result<Vec<SummedBlocks>> {
        let (mut from, end, mut parts) = (from, from.0 + u64::from(blocks), Vec::new());
        while from.0 < end {
            let summed = self.mount().look(|session| {
                let pins = session.pin_read(self.key())?;
                let last = pins.node(self.key())?.inode.read().last_seq;
                session.digest(last)?;
                let request = Request::ReadChecksums {
                    key: self.key(),
                    from,
                    blocks: (end - from.0) as u32,
                };
                match session.call(request)? {
                    Response::Summed(summed) => Ok(summed),
                    _ => Err(OpError::Failed(Errno(libc::EIO))),
                }
            })?;
            parts.extend(summed.parts);
            match summed.next {
                Some(next) if next > from => from = next,
                Some(_) => return Err(Errno(libc::EIO)),
                None => break,
            }
        }
        Ok(parts)
    }

    fn request_checksums<T>(&self, session: &Session, from: FileBlock) -> OpResult<Summed, T> {
        let request = Request::Checksums {
            key: self.key(),
            from,
            max: SUMS_MAX,
        };
        match session.call(request)? {
            Response::Summed(summed) => Ok(summed),
            _ => Err(OpError::Failed(Errno(libc::EIO))),
        }
    }

    /// Returns the processes of other sessions, of linked programs or under `varve run`, that have this file
    /// open or have a lease on it, at most 16; 0 for another user's. Takes no lease away. Users of a mount
    /// are not seen.
    ///
    /// # Errors
    /// As [`for_each_owned`](Self::for_each_owned).
    pub fn users(&self) -> Result<Vec<u32>> {
        let owned = self
            .mount()
            .look(|session| self.request_owners(session, FileBlock(0), 0))?;
        Ok(owned.users)
    }

    fn request_owners<T>(&self, session: &Session, from: FileBlock, max: u32) -> OpResult<Owned, T> {
        let request = Request::Owners {
            key: self.key(),
            from,
            max,
        };
        match session.call(request)? {
            Response::Owned(owned) => Ok(owned),
            _ => Err(OpError::Failed(Errno(libc::EIO))),
        }
    }

    /// Gives this file blocks of its own where it shares them in the range; `len` 0: up to its end. Blocks
    /// that no other extent names are kept, not copied. Bytes, times and set-id bits stay. What is done of it
    /// before an error or a crash stays done; at no moment does the file lack its bytes. Durable as a write
    /// is: after `fsync`.
    ///
    /// # Errors
    /// `EACCES` unless the caller owns the file or may write it; `EINVAL`, `EISDIR`, `ENOSPC`, `EROFS`.
    pub fn unshare_range(&self, offset: u64, len: u64, cred: &Cred) -> Result<()> {
        self.by_steps((offset, len), |offset, len| {
            let key = self.key();
            let op = LogOp::Unshare { key, offset, len };
            self.mount()
                .with_session(|session, attempt| self.forward(session, attempt, &[key], &op, cred))
                .map(drop)
        })
    }

    /// Moves together what this file has alone in the range on SSD or HDD, in the order of the file; `len` 0:
    /// up to its end. What is shared stays where it is. Returns the bytes that have a new place. Bytes, times
    /// and set-id bits stay. What is done of it before an error or a crash stays done; at no moment does the
    /// file lack its bytes. Durable as a write is: after `fsync`.
    ///
    /// # Errors
    /// `EACCES` unless the caller owns the file or may write it; `EINVAL`, `EISDIR`, `ENOSPC`, `EROFS`.
    pub fn defrag_range(&self, offset: u64, len: u64, cred: &Cred) -> Result<u64> {
        let mut moved = 0;
        self.by_steps((offset, len), |offset, len| {
            let key = self.key();
            let op = LogOp::Defrag { key, offset, len };
            moved += self.mount().with_session(|session, attempt| {
                let (flags, asks) = (EntryFlags::empty(), Asks::NOTHING);
                let done = session.forward(attempt, &[key], &op, flags, asks, cred)?;
                self.settle(
                    session,
                    match done {
                        Forwarded::Done(result) => result.offset,
                        Forwarded::DoneBefore(done) => done.offset,
                    },
                )
            })?;
            Ok(())
        })?;
        Ok(moved)
    }

    /// Calls `each` with offset and length of each part of a range that the daemon takes as one operation;
    /// a length of 0: up to the file's end.
    fn by_steps(
        &self,
        (offset, len): (u64, u64),
        mut each: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let size = self.getattr()?.size_bytes;
        let end = match len {
            0 => size,
            len => offset.checked_add(len).ok_or(Errno(libc::EINVAL))?.min(size),
        };
        let mut start = offset;
        while start < end {
            let step = (end - start).min(UNSHARE_MAX);
            each(start, step)?;
            start += step;
        }
        Ok(())
    }
}
