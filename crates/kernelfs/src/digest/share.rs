//! Shares of a range of a file with another one, as `FICLONERANGE` and `FIDEDUPERANGE` define them: which
//! ranges may be shared, and the comparison of their bytes; and in which range of a file such shares are
//! undone, or what it has alone moves together. The store shares the blocks.

use super::commit::free_tail;
use super::forwarded::parse;
use super::types::ForwardError;
use std::ops::{ControlFlow, Range};
use varve_format::{
    BLOCK_BYTES, EntryFlags, FileBlock, Ino, InodeKey, LogOp, Tier, TimeNs, XATTR_CAPABILITY,
};
use varve_ipc::ForwardedOp;
use varve_store::{OwnedPart, ShareRange, Store, StoreError, Tx};

/// Bytes that are compared at once.
const COMPARE_BYTES: u64 = 1 << 20;
/// Most bytes that one operation compares, as in Linux: no other transaction runs meanwhile.
pub(super) const COMPARE_MAX: u64 = 16 << 20;
/// Most bytes whose shares one operation undoes, or that it defragments: they may all be copied.
const UNSHARE_MAX: u64 = 16 << 20;
/// Parts of a file that are read from the store at once.
const PARTS_AT_ONCE: usize = 256;

/// A share whose ranges were checked; offsets and lengths in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ShareOp {
    /// File that gets the blocks.
    pub(super) target: InodeKey,
    target_offset: u64,
    pub(super) source: InodeKey,
    source_offset: u64,
    len: u64,
    /// Only if both ranges have the same bytes.
    pub(super) compare: bool,
    /// Size of the target before.
    target_size: u64,
}

impl ShareOp {
    /// Returns its blocks; `None`: it has none.
    pub(super) fn blocks(&self) -> Option<ShareRange> {
        (self.len > 0).then(|| ShareRange {
            from: self.source.ino,
            from_block: FileBlock(self.source_offset / BLOCK_BYTES),
            to: self.target.ino,
            to_block: FileBlock(self.target_offset / BLOCK_BYTES),
            blocks: self.len.div_ceil(BLOCK_BYTES),
            size_bytes: self.target_size.max(self.target_offset + self.len),
        })
    }
}

/// Checks a share; `None`: it is another operation. Both files are live regular files.
///
/// # Errors
/// `EINVAL` if an end of the range is not aligned to blocks, save for the end of the source where the target
/// ends, too; if the range passes the source's end; if the ranges overlap in one file; if more than
/// [`COMPARE_MAX`] bytes are to be compared.
pub(super) fn check_share(tx: &Tx<'_>, op: &LogOp<'_>) -> Result<Option<ShareOp>, ForwardError> {
    let LogOp::Share {
        key: target,
        offset: target_offset,
        source,
        source_offset,
        len,
        compare,
    } = *op
    else {
        return Ok(None);
    };
    let invalid = || ForwardError::Errno(libc::EINVAL);
    let source_size = tx.get_key(source)?.attr.size_bytes;
    let target_size = tx.get_key(target)?.attr.size_bytes;
    let len = match len {
        0 if !compare => source_size.checked_sub(source_offset).ok_or_else(invalid)?,
        len => len,
    };
    let share = ShareOp {
        target,
        target_offset,
        source,
        source_offset,
        len,
        compare,
        target_size,
    };
    if len == 0 {
        return Ok(Some(share));
    }
    let source_end = source_offset
        .checked_add(len)
        .filter(|end| *end <= source_size)
        .ok_or_else(invalid)?;
    let target_end = target_offset.checked_add(len).ok_or_else(invalid)?;
    let aligned = |at: u64| at.is_multiple_of(BLOCK_BYTES);
    // A block that the source ends in may be shared where nothing of the target lies behind it.
    let end_fits = aligned(source_end) || source_end == source_size && target_end >= target_size;
    // Bytes of the target that are not there cannot be compared.
    let is_there = !compare || target_end <= target_size;
    let overlaps = source == target && source_offset.abs_diff(target_offset) < len;
    let is_too_long = compare && len > COMPARE_MAX;
    if !aligned(target_offset) || !aligned(source_offset) || !end_fits || !is_there || overlaps || is_too_long
    {
        return Err(invalid());
    }
    Ok(Some(share))
}

/// Returns the end of a range of a file, at most the file's; `len` 0: up to that.
fn end_of(size: u64, offset: u64, len: u64) -> u64 {
    match len {
        0 => size,
        len => offset.saturating_add(len).min(size),
    }
}

/// Checks an undo of shares, or a defragmentation, and returns its blocks; `None`: it is another operation, or
/// has no bytes. The file is a live regular file.
///
/// # Errors
/// `EINVAL` if more than [`UNSHARE_MAX`] bytes are in the range.
pub(super) fn check_copies(tx: &Tx<'_>, op: &LogOp<'_>) -> Result<Option<Range<FileBlock>>, ForwardError> {
    let (LogOp::Unshare { key, offset, len } | LogOp::Defrag { key, offset, len }) = *op else {
        return Ok(None);
    };
    let end = end_of(tx.get_key(key)?.attr.size_bytes, offset, len);
    if end.saturating_sub(offset) > UNSHARE_MAX {
        return Err(ForwardError::Errno(libc::EINVAL));
    }
    let range = FileBlock(offset / BLOCK_BYTES)..FileBlock(end.div_ceil(BLOCK_BYTES));
    Ok((offset < end).then_some(range))
}

/// Returns the blocks of a range of a file, as digested; `len` 0: up to the file's end.
pub(super) fn blocks_of(
    store: &Store,
    key: InodeKey,
    (offset, len): (u64, u64),
) -> Result<Range<FileBlock>, StoreError> {
    let end =
        end_of(store.get_key(key)?.attr.size_bytes, offset, len).min(offset.saturating_add(UNSHARE_MAX));
    Ok(FileBlock(offset / BLOCK_BYTES)..FileBlock(end.div_ceil(BLOCK_BYTES)))
}

/// Calls `each` with the parts of a range of a file, in order, until it breaks.
pub(super) fn for_each_part(
    store: &Store,
    ino: Ino,
    blocks: Range<FileBlock>,
    mut each: impl FnMut(&OwnedPart) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let mut next = blocks.start;
    while next < blocks.end {
        let parts = store.owned_parts(ino, next..blocks.end, PARTS_AT_ONCE)?;
        if parts.iter().try_for_each(&mut each).is_break() {
            break;
        }
        match parts.last() {
            Some(last) if parts.len() == PARTS_AT_ONCE => {
                next = FileBlock(last.file_block.0 + u64::from(last.blocks));
            }
            _ => break,
        }
    }
    Ok(())
}

/// What a range of a file has that shares blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SharedCount {
    /// Blocks that have other owners.
    pub shared: u64,
    /// All blocks.
    pub blocks: u64,
    /// Parts in which it lies.
    pub parts: u64,
    /// Blocks on slower tiers that it has alone.
    pub alone: u64,
    /// Places in which these lie.
    pub places: u64,
}

/// Counts the blocks of a range of a file, as digested: an undo of its shares copies at most those that have
/// other owners, one that joins pieces all, and a defragmentation those on slower tiers that it has alone.
/// `len` 0: up to the file's end.
///
/// # Errors
/// The store's.
pub fn count_shared(
    store: &Store,
    key: InodeKey,
    (offset, len): (u64, u64),
) -> Result<SharedCount, StoreError> {
    let range = blocks_of(store, key, (offset, len))?;
    let mut count = SharedCount::default();
    let mut last = None;
    for_each_part(store, key.ino, range, |part| {
        let blocks = u64::from(part.blocks);
        count.parts += 1;
        count.blocks += blocks;
        if part.owners > 1 {
            count.shared += blocks;
        } else if part.tier != Tier::Nvm {
            count.alone += blocks;
            count.places += u64::from(last != Some((part.tier, part.block.0)));
            last = Some((part.tier, part.block.0 + blocks));
        }
        ControlFlow::Continue(())
    })?;
    Ok(count)
}

/// Whether blocks of the source lie in NVM.
pub(super) fn is_in_nvm(store: &Store, range: &ShareRange) -> Result<bool, StoreError> {
    let blocks = range.from_block..FileBlock(range.from_block.0 + range.blocks);
    let mut found = false;
    for_each_part(store, range.from, blocks, |part| {
        found = part.tier == Tier::Nvm;
        match found {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    Ok(found)
}

/// Whether what one of the files shares is wanted on a tier.
pub(super) fn is_placed(tx: &Tx<'_>, files: &[InodeKey]) -> Result<bool, StoreError> {
    for key in files {
        if tx.shared_pin(key.ino)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether both ranges hold the same bytes, which `read` reads as [`Store::read`] does.
pub(super) fn has_equal_bytes(
    read: impl Fn(Ino, u64, &mut [u8]) -> Result<usize, StoreError>,
    range: &ShareRange,
) -> Result<bool, StoreError> {
    let bytes = range.blocks * BLOCK_BYTES;
    let (mut one, mut other) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < bytes {
        let len = COMPARE_BYTES.min(bytes - at) as usize;
        for (buffer, ino, first) in [
            (&mut one, range.from, range.from_block),
            (&mut other, range.to, range.to_block),
        ] {
            buffer.clear();
            buffer.resize(len, 0);
            read(ino, first.0 * BLOCK_BYTES + at, buffer)?;
        }
        if one != other {
            return Ok(false);
        }
        at += len as u64;
    }
    Ok(true)
}

/// Returns the operation that gives the target the times, set-id bits and capabilities that a change of its
/// data leaves; its size is the one that it has by now.
pub(super) fn attr_update<'a>(tx: &Tx<'_>, share: &ShareOp) -> Result<LogOp<'a>, StoreError> {
    if share.compare || share.len == 0 {
        return Ok(LogOp::Noop);
    }
    Ok(LogOp::Truncate {
        key: share.target,
        size: tx.get_key(share.target)?.attr.size_bytes,
    })
}

/// Gives the target of a share that takes more records what a change of its data leaves: `flags` say which
/// set-id bits go. No later record may be made.
pub(super) fn update_attr(
    tx: &mut Tx<'_>,
    share: &ShareOp,
    flags: EntryFlags,
    now_ns: TimeNs,
) -> Result<(), StoreError> {
    tx.edit(share.target.ino, |attr| {
        attr.mtime_ns = now_ns;
        attr.ctime_ns = now_ns;
        for (flag, bit) in [(EntryFlags::CLEAR_SUID, 0o4000), (EntryFlags::CLEAR_SGID, 0o2000)] {
            if flags.contains(flag) {
                attr.mode &= !bit;
            }
        }
    })?;
    match tx.xattr_remove(share.target.ino, XATTR_CAPABILITY) {
        Ok(()) | Err(StoreError::NotFound) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Frees the blocks beyond the target's size that a failed share has left.
pub(super) fn free_failed(store: &Store, op: &ForwardedOp) -> Result<(), ForwardError> {
    if let LogOp::Share { key, .. } = parse(op)?.1
        && store.get_key(key).is_ok_and(|inode| inode.orphan.is_some())
    {
        free_tail(store, key)?;
    }
    Ok(())
}
