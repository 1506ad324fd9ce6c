//! Large allocations that the daemon does for a client: they take as many records as needed, and are undone
//! when a record finds no space. Knows nothing of rights and reservations.
//!
//! # Invariants
//! 1. *All or nothing, unless the machine fails.* The holes of the range are noted before the first record; a
//!    failure makes them holes again. The size changes in the last record alone, with the operation itself. A
//!    crash in between leaves blocks allocated that read as zeros.
//! 2. *No record allocates more than [`PIECE_BLOCKS`]*, so digests of other sessions run between records.

use super::commit::run_pre_step;
use super::execute::PreStep;
use super::types::Environment;
use crate::placement::Written;
use std::ops::Range;
use varve_format::{BLOCK_BYTES, FallocateMode, FileBlock, FileKind, Ino, LogOp};
use varve_store::{DataTarget, Store, StoreError};

/// Most blocks of one record: 256 MiB. Tests have small pools.
const PIECE_BLOCKS: u64 = if cfg!(test) { 64 } else { 1 << 16 };
/// Extents looked up at once.
const LOOK_EXTENTS: usize = 256;

/// Callback of [`apply_forwarded`](super::apply_forwarded) for each of its records, with the blocks that it
/// took, when it is durable.
pub type Spent<'a> = &'a dyn Fn(u64);

/// Calls `hole` with each unallocated stretch of blocks in `range` of a file, ascending.
fn for_each_hole(
    store: &Store,
    ino: Ino,
    range: Range<u64>,
    hole: &mut dyn FnMut(Range<u64>),
) -> Result<(), StoreError> {
    let mut at = range.start;
    while at < range.end {
        let extents = store.map(ino, FileBlock(at), LOOK_EXTENTS)?;
        let last = extents.len() < LOOK_EXTENTS;
        for extent in extents {
            let start = extent.file_block.0.min(range.end);
            if at < start {
                hole(at..start);
            }
            at = at.max(extent.end().0);
        }
        if last {
            break;
        }
    }
    if at < range.end {
        hole(at..range.end);
    }
    Ok(())
}

/// Returns the blocks that `op` would allocate for data, as digested: the holes in the range of an
/// `fallocate`. `None`: it is no `fallocate` that allocates, or there is no such file.
///
/// # Errors
/// The store's.
pub fn blocks_missing(store: &Store, op: &LogOp<'_>) -> Result<Option<u64>, StoreError> {
    let LogOp::Fallocate {
        key,
        mode,
        offset,
        len,
    } = *op
    else {
        return Ok(None);
    };
    if mode == FallocateMode::PunchHole {
        return Ok(None);
    }
    match store.get_key(key) {
        Ok(inode) if inode.attr.kind() == FileKind::Regular => {}
        Ok(_) | Err(StoreError::NoInode(_)) => return Ok(None),
        Err(error) => return Err(error),
    }
    let range = offset / BLOCK_BYTES..offset.saturating_add(len).div_ceil(BLOCK_BYTES);
    let mut blocks = 0;
    for_each_hole(store, key.ino, range, &mut |hole| blocks += hole.end - hole.start)?;
    Ok(Some(blocks))
}

/// Returns the allocation to commit before `op`'s own record, if it is too large for that record.
pub(super) fn of_many_records(
    store: &Store,
    op: &LogOp<'_>,
    env: &Environment<'_>,
) -> Result<Option<PreStep>, StoreError> {
    let LogOp::Fallocate { key, offset, len, .. } = *op else {
        return Ok(None);
    };
    let missing = blocks_missing(store, op)?.unwrap_or(0);
    if missing <= PIECE_BLOCKS {
        return Ok(None);
    }
    let pin = store.get(key.ino)?.pin;
    let data = Written {
        key,
        offset_bytes: offset,
        bytes: missing * BLOCK_BYTES,
    };
    let target = env.target(&data, pin, &store.space());
    Ok(Some(PreStep::Allocate(key.ino, offset, len, target)))
}

/// Holes of one file that were filled for an operation that is not done yet.
#[derive(Debug)]
pub(super) struct Filled {
    ino: Ino,
    target: DataTarget,
    /// At most one more than the file has extents.
    holes: Vec<Range<u64>>,
}

impl Filled {
    /// Fills the holes of `offset..offset + len`, noting them in `filled` before it begins. `spent` is called
    /// with the blocks of each record.
    pub(super) fn fill(
        store: &Store,
        filled: &mut Option<Self>,
        (ino, offset, len): (Ino, u64, u64),
        target: DataTarget,
        spent: Spent<'_>,
    ) -> Result<(), StoreError> {
        let range = offset / BLOCK_BYTES..offset.saturating_add(len).div_ceil(BLOCK_BYTES);
        let mut holes = Vec::new();
        for_each_hole(store, ino, range, &mut |hole| holes.push(hole))?;
        let all = filled.get_or_insert(Self {
            ino,
            target,
            holes: Vec::new(),
        });
        all.holes.extend(holes.iter().cloned());
        for (piece, blocks) in pieces(&holes) {
            allocate(store, ino, piece, target)?;
            spent(blocks);
        }
        Ok(())
    }

    /// Makes the filled ranges holes again.
    pub(super) fn undo(self, store: &Store) {
        for hole in self.holes {
            let (offset, len) = bytes(&hole);
            if let Err(error) = run_pre_step(store, PreStep::Punch(self.ino, offset, len, self.target)) {
                // The blocks stay allocated and read as zeros, as the holes did.
                tracing::error!(ino = self.ino.0, %error, "blocks of an allocation that failed stay \
                    allocated");
                return;
            }
        }
    }
}

/// Allocates the holes of `range`. A record may lack room for the tables of the units that it would have to
/// open, which is no lack of space: then the range is halved.
fn allocate(store: &Store, ino: Ino, range: Range<u64>, target: DataTarget) -> Result<(), StoreError> {
    let (offset, len) = bytes(&range);
    match run_pre_step(store, PreStep::Allocate(ino, offset, len, target)) {
        Err(StoreError::NoSpace { .. }) if range.end - range.start > 1 => {
            let middle = range.start.midpoint(range.end);
            allocate(store, ino, range.start..middle, target)?;
            allocate(store, ino, middle..range.end, target)
        }
        other => other,
    }
}

/// Returns offset and length of blocks, in bytes.
const fn bytes(blocks: &Range<u64>) -> (u64, u64) {
    (
        blocks.start * BLOCK_BYTES,
        (blocks.end - blocks.start) * BLOCK_BYTES,
    )
}

/// Cuts a file into ranges with at most [`PIECE_BLOCKS`] blocks of `holes` in each; returns each range with
/// its number of such blocks.
fn pieces(holes: &[Range<u64>]) -> Vec<(Range<u64>, u64)> {
    let mut pieces: Vec<(Range<u64>, u64)> = Vec::new();
    for hole in holes {
        let mut at = hole.start;
        while at < hole.end {
            let (piece, has) = match pieces.last_mut() {
                Some((piece, has)) if *has < PIECE_BLOCKS => (piece, has),
                _ => {
                    pieces.push((at..at, 0));
                    continue;
                }
            };
            let blocks = (PIECE_BLOCKS - *has).min(hole.end - at);
            at += blocks;
            piece.end = at;
            *has += blocks;
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::{PIECE_BLOCKS, pieces};

    #[test]
    fn pieces_have_all_holes_and_no_more_of_them_than_a_record_takes() {
        const P: u64 = PIECE_BLOCKS;
        assert!(pieces(&[]).is_empty());
        let holes = [0..1, 5..6, 10..10 + 2 * P, 4 * P..4 * P + 1];
        let cut = pieces(&holes);
        let sizes: Vec<_> = cut.iter().map(|(_, blocks)| *blocks).collect();
        assert_eq!(sizes, [P, P, 3]);
        assert_eq!(cut[0].0, 0..10 + P - 2);
        assert_eq!(cut[1].0, 10 + P - 2..10 + 2 * P - 2);
        assert_eq!(cut[2].0, 10 + 2 * P - 2..4 * P + 1);
    }
}
