//! Undoing shares in a transaction: a file's extents that name shared runs get blocks of the file's own. Does
//! not know which files name a run, and does not choose where copies go. Joining the pieces is `rejoin`'s.
//!
//! # Invariants
//! - *No state lacks the data.* Until the record is committed the extent names the run; from then on it names
//!   a copy, which was written and flushed before the record, or the run's own blocks.
//! - *One name less, in the record of the extent*: the run's count falls by the extents that name it no more.
//!   A run that others name keeps its blocks.
//! - *The last owner keeps the blocks*: a run that only this extent names leaves the tree, and its blocks,
//!   which stay in use, become a plain extent's. Nothing is copied, and no space is needed. Where pieces are
//!   joined, short ones are copied all the same, and their blocks freed.
//! - *Nothing else of the file changes*: bytes, size, holes, unwritten extents, times, mode.
//! - *Each step is whole*: what an undo has done before it ends stays done, and any number of undos of one
//!   range do what one does.

use super::TxState;
use super::shared::SHARED;
use crate::reader::{file_root, is_shared};
use crate::seeded::{Bug, armed};
use crate::space::Span;
use crate::{DataTarget, OP_ROOM, Result, StoreError, Tx};
use std::ops::Range;
use varve_extent_tree::ExtentTree;
use varve_format::inode::Content;
use varve_format::{BlockNo, Extent, ExtentFlags, FILE_BLOCKS_MAX, FileBlock, Ino, SharedRun};

/// Extents that are read at once.
const EXTENTS_AT_ONCE: usize = 32;

/// What one transaction of an undo has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unshared {
    /// The block to go on from; the end of the range: all is done.
    pub next: FileBlock,
    /// Blocks that were copied, and take space that was free; those that are free with that count, too.
    pub copied: u64,
    /// Blocks that the file, as their last owner, keeps.
    pub kept: u64,
}

impl Tx<'_> {
    /// Gives a file blocks of its own where it shares them in the range, on the tier where they lie or, if
    /// that is full, on a slower one. If [`Unshared::next`] is not the range's end, commit, and call again
    /// from there in another transaction. Blocks that the file alone names are not copied.
    ///
    /// # Errors
    /// `Invalid` if the range passes the largest file; `NoInode`, `WrongKind`, `NoSpace`, `DataChecksum`;
    /// `Unfinished` if the file must be recovered, or its truncation finished, first.
    pub fn unshare(&mut self, ino: Ino, range: Range<FileBlock>) -> Result<Unshared> {
        self.unshare_with(ino, range, false)
    }

    /// As [`unshare`](Self::unshare), and copies short neighbouring pieces to one place, also those that are
    /// the file's own: what was one extent before parts of it were shared is one again, or a few. Takes space
    /// for all short pieces in the range until their old blocks are free; where that is missing, pieces stay
    /// apart.
    ///
    /// # Errors
    /// As [`unshare`](Self::unshare).
    pub fn unshare_joined(&mut self, ino: Ino, range: Range<FileBlock>) -> Result<Unshared> {
        self.unshare_with(ino, range, true)
    }

    fn unshare_with(&mut self, ino: Ino, range: Range<FileBlock>, join: bool) -> Result<Unshared> {
        if range.end.0 > FILE_BLOCKS_MAX || range.start > range.end {
            return Err(StoreError::Invalid("range of blocks to unshare"));
        }
        self.guard_new(|core| core.unshare(ino, range.start.0, range.end.0, join))
    }
}

impl TxState<'_> {
    fn unshare(&mut self, ino: Ino, from: u64, to: u64, join: bool) -> Result<Unshared> {
        if self.store.may_be_torn(ino) {
            return Err(StoreError::Unfinished(ino));
        }
        let mut done = Unshared {
            next: FileBlock(to),
            copied: 0,
            kept: 0,
        };
        let mut at = from;
        while let Some(shared) = self.next_shared(ino, at, to)? {
            if self.room_at_least(2 * OP_ROOM) < 2 * OP_ROOM || self.must_pause() {
                done.next = shared.file_block;
                return Ok(done);
            }
            let start = shared.file_block.0;
            let joined = match join {
                true => self.rejoin(ino, at..to, start)?,
                false => None,
            };
            at = match joined {
                Some(end) => {
                    done.copied += end - start.min(end);
                    end
                }
                None => self.unshare_step(ino, &shared, &mut done)?,
            };
        }
        Ok(done)
    }

    /// Returns the first shared extent of a range, clipped to it.
    fn next_shared(&self, ino: Ino, from: u64, to: u64) -> Result<Option<Extent>> {
        let reader = self.reader();
        let root = file_root(&reader.get(ino)?)?;
        if ExtentTree::of(ino).counts(&root)?.shared == 0 {
            return Ok(None);
        }
        let mut at = from;
        loop {
            let found = reader.unresolved(ino, &root, at, to, EXTENTS_AT_ONCE)?;
            let Some(last) = found.last() else { return Ok(None) };
            at = last.end().0;
            if let Some(shared) = found.into_iter().find(is_shared) {
                return Ok(Some(shared));
            }
        }
    }

    /// Undoes the first run of a shared extent, or the part of it whose copy is contiguous. Returns the block
    /// after it.
    fn unshare_step(&mut self, ino: Ino, extent: &Extent, done: &mut Unshared) -> Result<u64> {
        let first = extent.block.0;
        let numbers = first..first + u64::from(extent.len);
        let root = self.reader().shared_root()?;
        let runs = SHARED.runs(self, &root, numbers, 1)?;
        let run = runs
            .first()
            .ok_or_else(|| StoreError::Damaged(format!("inode {ino}: a shared extent lies in no run")))?;
        let blocks_of = |run: &SharedRun| Span {
            tier: run.tier,
            start: run.block.0,
            len: u64::from(run.len),
        };
        let span = if run.refs == 1 {
            done.kept += u64::from(run.len);
            blocks_of(run)
        } else {
            let to = DataTarget::prefer(run.tier);
            let span = self.copy_blocks(run.tier, run.block.0, u64::from(run.len), to)?;
            done.copied += span.len;
            span
        };
        // The blocks of a run that has left the tree are not freed: they go on in the plain extent.
        let removed = self.change_shared(|core, root| SHARED.release(core, root, first..first + span.len))?;
        if armed(Bug::UnshareFreesLast) {
            for run in &removed {
                self.free_span(blocks_of(run), true)?;
            }
        }
        if removed.is_empty() != (run.refs > 1) {
            return Err(StoreError::Damaged(format!(
                "inode {ino}: the count of a shared run changed under an undo"
            )));
        }
        let plain = Extent {
            file_block: extent.file_block,
            len: span.len as u32,
            tier: span.tier,
            block: BlockNo(span.start),
            flags: ExtentFlags::empty(),
        };
        let mut inode = self.reader().get(ino)?;
        let mut root = file_root(&inode)?;
        // What comes back are the numbers that were released above.
        ExtentTree::of(ino).replace(self, &mut root, plain.file_block..plain.end(), &[plain])?;
        inode.content = Content::File(root);
        self.put(&inode)?;
        Ok(plain.end().0)
    }
}
