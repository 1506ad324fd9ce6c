//! Copies between open files: shared blocks where whole blocks allow it, else by value.

use varve_format::{BLOCK_BYTES, LogOp};
use varve_ipc::{Cred, DedupeOp, DedupeRange, Deduped};

use super::open::OpenFile;
use crate::data::within_one_file;
use crate::errno::{Errno, Result};

/// Bytes from which a copy shares blocks: the daemon digests both files for that, which takes longer than to
/// copy less.
const SHARE_MIN: u64 = 1 << 20;

/// Most bytes of a clone that are copied: to share them the daemon digests both files, takes their leases and
/// writes a row for each run, which costs more time than the copy and a good part of the space.
const CLONE_COPIED_MAX: u64 = 64 << 10;

/// Most bytes that the daemon compares in one operation.
const DEDUPE_MAX: u64 = 16 << 20;

/// A range of a file and where it goes in another one, in bytes.
#[derive(Debug, Clone, Copy)]
struct CopyRange {
    from: u64,
    to: u64,
    len: u64,
}

/// Equally long ranges of two open files, in bytes.
#[derive(Clone, Copy)]
pub struct RangePair<'f> {
    /// The file that has the blocks.
    pub from: &'f OpenFile,
    /// First byte in it, a multiple of 4,096.
    pub offset: u64,
    /// The file that shares them.
    pub to: &'f OpenFile,
    /// First byte in it, a multiple of 4,096.
    pub to_offset: u64,
    /// Length: a multiple of 4,096, or up to the end of both files.
    pub len: u64,
}

impl OpenFile {
    /// As [`dedupe_range_with`](Self::dedupe_range_with) for many ranges at once, in few messages and
    /// transactions: of each range, what is not shared yet is compared part by part, and what is the same is
    /// shared. What became of each, in order; what failed has an errno of its own, and stops no other range.
    /// All that calls which returned before have written counts. Shared ranges are durable when this returns.
    /// At most [`DEDUPE_RANGES_MAX`](varve_ipc::DEDUPE_RANGES_MAX) ranges of 64 files, 16 MiB together. With
    /// `dry_run` nothing is compared or shared, and what is not shared yet is told as if it was.
    ///
    /// # Errors
    /// `EINVAL` for too much at once or no ranges; `EXDEV` for files of two pools; `EOPNOTSUPP` if the pool's
    /// format has no shared blocks; `ENOSPC`, `EROFS`, `ESTALE` if a file is gone. Nothing was done then.
    pub fn dedupe_ranges(pairs: &[RangePair<'_>], dry_run: bool, cred: &Cred) -> Result<Vec<Deduped>> {
        let first = pairs.first().ok_or(Errno(libc::EINVAL))?;
        let mut keys = Vec::new();
        let mut ranges = Vec::with_capacity(pairs.len());
        for pair in pairs {
            for file in [pair.from, pair.to] {
                first.from.same_pool(file)?;
                keys.push(file.key());
            }
            ranges.push(DedupeRange {
                source: pair.from.key(),
                source_offset: pair.offset,
                target: pair.to.key(),
                target_offset: pair.to_offset,
                len: pair.len,
            });
        }
        keys.sort_unstable();
        keys.dedup();
        let op = DedupeOp {
            ranges,
            dry_run,
            cred: cred.clone(),
        };
        // Whoever asks a second time, after the daemon went away, loses nothing.
        let mount = first.from.mount();
        mount.with_session(|session, _| session.dedupe(&keys, op.clone()))
    }

    /// Lets a range of `to` be the same blocks as a range of this file, as `FICLONERANGE` does; `len` 0: up
    /// to the end of this file. The offsets and the length are multiples of 4,096 bytes, but the range may
    /// end where this file ends if nothing of `to` lies behind it. All that calls which returned before have
    /// written counts. Atomic at a crash if it takes one transaction of the daemon (some hundred extents), or
    /// if the range lies beyond the end of `to`; else what is done of it by then stays. Durable as a write
    /// is: after `fsync`.
    ///
    /// # Errors
    /// As `ioctl_ficlonerange`: `EBADF`, `EINVAL`, `EISDIR`, `EXDEV` (another pool), `ENOSPC`, `EROFS`;
    /// `EOPNOTSUPP` if the pool's format has no shared blocks; `EMLINK` if a block has 2^32 - 1 owners.
    pub fn clone_range_to(
        &self,
        offset: u64,
        to: &OpenFile,
        to_offset: u64,
        len: u64,
        cred: &Cred,
    ) -> Result<()> {
        self.may_copy_to(to)?;
        let range = CopyRange {
            from: offset,
            to: to_offset,
            len,
        };
        self.share(to, range, false, cred)
    }

    /// As [`clone_range_to`](Self::clone_range_to), but up to 64 KiB without holes are copied, in one transaction of
    /// this session: that takes less time than to share them, and little more space.
    ///
    /// # Errors
    /// As for `clone_range_to`.
    pub fn clone_or_copy_range_to(
        &self,
        offset: u64,
        to: &OpenFile,
        to_offset: u64,
        len: u64,
        cred: &Cred,
    ) -> Result<()> {
        self.may_copy_to(to)?;
        let range = CopyRange {
            from: offset,
            to: to_offset,
            len,
        };
        if self.clone_by_copy(to, range, cred)? {
            return Ok(());
        }
        self.clone_range_to(offset, to, to_offset, len, cred)
    }

    /// Clones a small range by copying it; `false`: it is to be shared, since it is large, has holes, cannot be read, or
    /// changed meanwhile.
    fn clone_by_copy(&self, to: &OpenFile, range: CopyRange, cred: &Cred) -> Result<bool> {
        let aligned = |at: u64| at.is_multiple_of(BLOCK_BYTES);
        let before = self.getattr()?;
        let rest = before.size_bytes.saturating_sub(range.from);
        let len = if range.len == 0 { rest } else { range.len };
        let is_small = len > 0 && len <= CLONE_COPIED_MAX.min(rest) && self.key() != to.key();
        if !is_small || !aligned(range.from) || !aligned(range.to) {
            return Ok(false);
        }
        let end = range.to.saturating_add(len);
        let ends_well = aligned(len) || (len == rest && end >= to.getattr()?.size_bytes);
        let mut bytes = vec![0; len as usize];
        // What cannot be read can be shared.
        if !ends_well || !self.read_dense(range.from, &mut bytes).unwrap_or(false) {
            return Ok(false);
        }
        let after = self.getattr()?;
        let same = (before.size_bytes, before.mtime_ns, before.ctime_ns)
            == (after.size_bytes, after.mtime_ns, after.ctime_ns);
        if !same {
            return Ok(false);
        }
        match to.write_at(range.to, &bytes, cred) {
            Ok(written) => Ok(written == bytes.len()),
            // What is shared may need less.
            Err(Errno(libc::ENOSPC)) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// As [`clone_range_to`](Self::clone_range_to), but only if both ranges hold the same bytes, which `to`
    /// must have; returns whether they do. Times and set-id bits of `to` stay. More than 16 MiB are compared
    /// and shared piece by piece: those before the first that differs are shared.
    ///
    /// # Errors
    /// As `ioctl_fideduperange`.
    pub fn dedupe_range_with(
        &self,
        offset: u64,
        to: &OpenFile,
        to_offset: u64,
        len: u64,
        cred: &Cred,
    ) -> Result<bool> {
        if !self.flags().read {
            return Err(Errno(libc::EINVAL));
        }
        self.same_pool(to)?;
        let mut done = 0;
        while done < len {
            let at = |start: u64| start.checked_add(done).ok_or(Errno(libc::EINVAL));
            let range = CopyRange {
                from: at(offset)?,
                to: at(to_offset)?,
                len: (len - done).min(DEDUPE_MAX),
            };
            match self.share(to, range, true, cred) {
                Ok(()) => done += range.len,
                Err(Errno(libc::EILSEQ)) => return Ok(false),
                Err(errno) => return Err(errno),
            }
        }
        Ok(true)
    }

    fn may_copy_to(&self, to: &OpenFile) -> Result<()> {
        if !self.flags().read {
            return Err(Errno(libc::EBADF));
        }
        to.for_writing()?;
        if to.flags().append {
            return Err(Errno(libc::EBADF));
        }
        self.same_pool(to)
    }

    /// Has the daemon share a part of this file with `to`.
    fn share(&self, to: &OpenFile, range: CopyRange, compare: bool, cred: &Cred) -> Result<()> {
        let op = LogOp::Share {
            key: to.key(),
            offset: range.to,
            source: self.key(),
            source_offset: range.from,
            len: range.len,
            compare,
        };
        let mut keys = vec![to.key(), self.key()];
        keys.sort_unstable();
        keys.dedup();
        to.mount()
            .with_session(|session, attempt| to.forward(session, attempt, &keys, &op, cred))
    }

    /// Shares the whole blocks of a large copy; returns the number of bytes. 0: they are to be copied.
    fn clone_blocks_to(&self, to: &OpenFile, range: CopyRange, cred: &Cred) -> Result<u64> {
        let aligned = (range.from | range.to).is_multiple_of(BLOCK_BYTES);
        if range.len < SHARE_MIN || !aligned {
            return Ok(0);
        }
        let size = self.getattr()?.size_bytes;
        let all = range.len.min(size.saturating_sub(range.from));
        let ends_both = range.from + all == size && range.to.saturating_add(all) >= to.getattr()?.size_bytes;
        let len = if ends_both {
            all
        } else {
            all / BLOCK_BYTES * BLOCK_BYTES
        };
        if len < SHARE_MIN {
            return Ok(0);
        }
        // Whatever is in the way of sharing, such as a file that has changed since, may not be in the way of
        // copying.
        Ok(self
            .share(to, CopyRange { len, ..range }, false, cred)
            .map_or(0, |()| len))
    }

    /// Copies bytes between files; may copy fewer.
    ///
    /// # Errors
    /// As `copy_file_range`.
    pub fn copy_range_to(
        &self,
        offset: u64,
        to: &OpenFile,
        to_offset: u64,
        len: u64,
        cred: &Cred,
    ) -> Result<u64> {
        self.may_copy_to(to)?;
        let len = if self.key() == to.key() {
            within_one_file(self.getattr()?.size_bytes, offset, to_offset, len)?
        } else {
            len
        };
        let range = CopyRange {
            from: offset,
            to: to_offset,
            len,
        };
        let mut done = self.clone_blocks_to(to, range, cred)?;
        // By value, in pieces that each hold one lease at a time: neither file is held during the wait for
        // the other.
        let mut buffer = vec![0; (1 << 20).min(len as usize)];
        while done < len {
            let want = buffer.len().min((len - done) as usize);
            let step = self.read_at(offset + done, &mut buffer[..want]).and_then(|got| {
                if got == 0 {
                    Ok(0)
                } else {
                    to.write_at(to_offset + done, &buffer[..got], cred)
                }
            });
            match step {
                Ok(0) => break,
                Ok(copied) => done += copied as u64,
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(done)
    }
}
