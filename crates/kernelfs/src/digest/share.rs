//! Shares of a range of a file with another one, as `FICLONERANGE` and `FIDEDUPERANGE` define them: which
//! ranges may be shared, and the comparison of their bytes; and which ranges of a file such shares are undone
//! in. The store shares the blocks.

use super::commit::free_tail;
use super::forwarded::parse;
use super::types::ForwardError;
use varve_format::{BLOCK_BYTES, EntryFlags, FileBlock, InodeKey, LogOp, Tier, TimeNs, XATTR_CAPABILITY};
use varve_ipc::ForwardedOp;
use varve_store::{ShareRange, Store, StoreError, Tx};

/// Bytes that are compared at once.
const COMPARE_BYTES: u64 = 1 << 20;
/// Most bytes that one operation compares, as in Linux: no other transaction runs meanwhile.
const COMPARE_MAX: u64 = 16 << 20;
/// Most bytes whose shares one operation undoes: they may all be copied.
const UNSHARE_MAX: u64 = 16 << 20;
/// Parts of a file that are looked at together.
const LOOK_PARTS: usize = 256;

/// A range that may be shared, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    /// File that shares the blocks.
    pub(super) key: InodeKey,
    offset: u64,
    pub(super) source: InodeKey,
    source_offset: u64,
    len: u64,
    /// Size of the target before.
    size: u64,
}

impl Range {
    /// Returns its blocks; `None`: it has none.
    pub(super) fn blocks(&self) -> Option<ShareRange> {
        (self.len > 0).then(|| ShareRange {
            from: self.source.ino,
            from_block: FileBlock(self.source_offset / BLOCK_BYTES),
            to: self.key.ino,
            to_block: FileBlock(self.offset / BLOCK_BYTES),
            blocks: self.len.div_ceil(BLOCK_BYTES),
            size_bytes: self.size.max(self.offset + self.len),
        })
    }
}

/// Returns the range of a share, and whether it is to be compared first. Both files are live regular files.
///
/// # Errors
/// `EINVAL` if an end of the range is not aligned to blocks, save for the end of the source where the target
/// ends, too; if the range passes the source's end; if the ranges overlap in one file; if more than
/// [`COMPARE_MAX`] bytes are to be compared.
pub(super) fn range(tx: &Tx<'_>, op: &LogOp<'_>) -> Result<Option<(Range, bool)>, ForwardError> {
    let LogOp::Share {
        key,
        offset,
        source,
        source_offset,
        len,
        compare,
    } = *op
    else {
        return Ok(None);
    };
    let invalid = || ForwardError::Errno(libc::EINVAL);
    let end = tx.get_key(source)?.attr.size_bytes;
    let size = tx.get_key(key)?.attr.size_bytes;
    let len = match len {
        0 if !compare => end.checked_sub(source_offset).ok_or_else(invalid)?,
        len => len,
    };
    let range = Range {
        key,
        offset,
        source,
        source_offset,
        len,
        size,
    };
    if len == 0 {
        return Ok(Some((range, compare)));
    }
    let source_end = source_offset
        .checked_add(len)
        .filter(|at| *at <= end)
        .ok_or_else(invalid)?;
    let target_end = offset.checked_add(len).ok_or_else(invalid)?;
    let aligned = |at: u64| at.is_multiple_of(BLOCK_BYTES);
    // A block that the source ends in may be shared where nothing of the target lies behind it.
    let ends_well = aligned(source_end) || source_end == end && target_end >= size;
    // Bytes of the target that are not there cannot be compared.
    let is_there = !compare || target_end <= size;
    let overlaps = source == key && source_offset.abs_diff(offset) < len;
    let is_too_long = compare && len > COMPARE_MAX;
    if !aligned(offset) || !aligned(source_offset) || !ends_well || !is_there || overlaps || is_too_long {
        return Err(invalid());
    }
    Ok(Some((range, compare)))
}

/// Returns the blocks of an undo of shares; `None`: it is another operation, or has no bytes. The file is a
/// live regular file.
///
/// # Errors
/// `EINVAL` if more than [`UNSHARE_MAX`] bytes are in the range.
pub(super) fn undone(
    tx: &Tx<'_>,
    op: &LogOp<'_>,
) -> Result<Option<std::ops::Range<FileBlock>>, ForwardError> {
    let LogOp::Unshare { key, offset, len } = *op else {
        return Ok(None);
    };
    let size = tx.get_key(key)?.attr.size_bytes;
    let end = match len {
        0 => size,
        len => offset.saturating_add(len).min(size),
    };
    if end.saturating_sub(offset) > UNSHARE_MAX {
        return Err(ForwardError::Errno(libc::EINVAL));
    }
    let range = FileBlock(offset / BLOCK_BYTES)..FileBlock(end.div_ceil(BLOCK_BYTES));
    Ok((offset < end).then_some(range))
}

/// Returns how many blocks of a range of a file have other owners, as digested: an undo of its shares copies
/// at most these; and in how many parts the range lies. `len` 0: up to the file's end.
///
/// # Errors
/// The store's.
pub fn blocks_of_others(
    store: &Store,
    key: InodeKey,
    (offset, len): (u64, u64),
) -> Result<(u64, u64), StoreError> {
    let size = store.get_key(key)?.attr.size_bytes;
    let end = match len {
        0 => size,
        len => offset.saturating_add(len).min(size),
    };
    let end = FileBlock(end.min(offset.saturating_add(UNSHARE_MAX)).div_ceil(BLOCK_BYTES));
    let (mut at, mut blocks, mut count) = (FileBlock(offset / BLOCK_BYTES), 0, 0);
    while at < end {
        let parts = store.owned_parts(key.ino, at..end, LOOK_PARTS)?;
        count += parts.len() as u64;
        blocks += parts
            .iter()
            .filter(|part| part.owners > 1)
            .map(|part| u64::from(part.blocks))
            .sum::<u64>();
        match parts.last() {
            Some(last) if parts.len() == LOOK_PARTS => {
                at = FileBlock(last.file_block.0 + u64::from(last.blocks));
            }
            _ => break,
        }
    }
    Ok((blocks, count))
}

/// Whether blocks of a range lie in NVM.
pub(super) fn is_in_nvm(store: &Store, range: &ShareRange) -> Result<bool, StoreError> {
    let end = FileBlock(range.from_block.0 + range.blocks);
    let mut at = range.from_block;
    while at < end {
        let parts = store.owned_parts(range.from, at..end, LOOK_PARTS)?;
        if parts.iter().any(|part| part.tier == Tier::Nvm) {
            return Ok(true);
        }
        match parts.last() {
            Some(last) if parts.len() == LOOK_PARTS => {
                at = FileBlock(last.file_block.0 + u64::from(last.blocks))
            }
            _ => break,
        }
    }
    Ok(false)
}

/// Whether both ranges hold the same bytes.
pub(super) fn is_alike(tx: &Tx<'_>, range: &ShareRange) -> Result<bool, StoreError> {
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
            tx.read(ino, first.0 * BLOCK_BYTES + at, buffer)?;
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
pub(super) fn rest<'a>(tx: &Tx<'_>, range: &Range, compare: bool) -> Result<LogOp<'a>, StoreError> {
    if compare || range.len == 0 {
        return Ok(LogOp::Noop);
    }
    Ok(LogOp::Truncate {
        key: range.key,
        size: tx.get_key(range.key)?.attr.size_bytes,
    })
}

/// Gives the target of a share that takes more records what a change of its data leaves: `flags` say which
/// set-id bits go. No later record may be made.
pub(super) fn note_changed(
    tx: &mut Tx<'_>,
    range: &Range,
    flags: EntryFlags,
    now_ns: TimeNs,
) -> Result<(), StoreError> {
    tx.edit(range.key.ino, |attr| {
        attr.mtime_ns = now_ns;
        attr.ctime_ns = now_ns;
        for (flag, bit) in [(EntryFlags::CLEAR_SUID, 0o4000), (EntryFlags::CLEAR_SGID, 0o2000)] {
            if flags.contains(flag) {
                attr.mode &= !bit;
            }
        }
    })?;
    match tx.xattr_remove(range.key.ino, XATTR_CAPABILITY) {
        Ok(()) | Err(StoreError::NotFound) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Frees the blocks beyond the target's size that a share left which failed.
pub(super) fn give_up(store: &Store, op: &ForwardedOp) -> Result<(), ForwardError> {
    if let LogOp::Share { key, .. } = parse(op)?.1
        && store.get_key(key).is_ok_and(|inode| inode.orphan.is_some())
    {
        free_tail(store, key)?;
    }
    Ok(())
}
