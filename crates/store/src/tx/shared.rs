//! Shared blocks in a transaction: extents of several files that name one run, and the end of such a run. The
//! counts lie in the tree of the shared runs, and change in the transaction that changes the extents.
//!
//! # Invariants
//! - *Counts and extents change together*: in one journal record, so that after a crash the count of a run is
//!   the number of extents that name it.
//! - *A shared block is never written*: new bytes go to new blocks, and the extent that named the run names
//!   them.
//! - *A block is freed when no extent names its run any more*, as any freed block: reused only after the
//!   commit and when no reader of an older state is left.

use super::TxState;
use super::data::STEP_BLOCKS;
use crate::reader::{file_root, is_shared};
use crate::seeded::{Bug, armed};
use crate::space::Span;
use crate::{DataTarget, OP_ROOM, Result, StoreError, Tx};
use std::ops::{ControlFlow, Range};
use varve_extent_tree::{ExtentTree, Mapping, SharedRuns, TreeError};
use varve_format::features::{Features, Incompat};
use varve_format::inode::Content;
use varve_format::superblock::FEATURES_VERSION;
use varve_format::{
    BlockNo, Extent, ExtentFlags, FILE_BLOCKS_MAX, FILE_SIZE_MAX, FileBlock, Ino, SharedRoot, SharedRun,
    TIER_BLOCKS_MAX, Tier, TreeRoot,
};
use zerocopy::IntoBytes;

/// The tree of the shared runs.
pub(crate) const SHARED: SharedRuns = SharedRuns::new();
/// Shared runs that one step changes at most.
pub(super) const STEP_RUNS: usize = 64;
/// Extents of the target that one step of sharing frees at most, and how many of them may be shared: their
/// runs may lie in as many nodes.
const STEP_EXTENTS: usize = 32;
const STEP_SHARED: usize = 8;

/// A range of a file that another one is to share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareRange {
    /// The file that has the blocks.
    pub from: Ino,
    /// Its first block.
    pub from_block: FileBlock,
    /// The file that shares them; may be the same.
    pub to: Ino,
    /// Its first block.
    pub to_block: FileBlock,
    /// Blocks.
    pub blocks: u64,
    /// Size that the sharing file has at least when all is done, in bytes.
    pub size_bytes: u64,
}

impl Tx<'_> {
    /// Lets a range of a file be the same blocks as a range of another: what was mapped there is freed, and
    /// holes and unwritten extents become holes. `done` blocks were done by transactions before this one.
    /// Returns how many are done after it; if these are not all, commit, and call again in another
    /// transaction before anything else is done to either file. Until all is done the size stays, and the
    /// file is in the orphan list if it has blocks beyond it: after a crash these are freed.
    /// [`Store::share_extents`](crate::Store::share_extents) comes first.
    ///
    /// # Errors
    /// `Invalid` if the ranges overlap in one file or pass the largest file, or if the pool has no shared
    /// extents; `NoInode`, `WrongKind`, `NoSpace`; `Unfinished` if a file must be recovered, or its
    /// truncation finished, first; [`StoreError::Owners`] if a block has as many owners as it can have.
    pub fn share(&mut self, range: &ShareRange, done: u64) -> Result<u64> {
        let ends = [range.from_block, range.to_block].map(|at| at.0.saturating_add(range.blocks));
        let passes = ends.into_iter().any(|end| end > FILE_BLOCKS_MAX) || range.size_bytes > FILE_SIZE_MAX;
        if passes || done >= range.blocks {
            return Err(StoreError::Invalid("range of blocks to share"));
        }
        if range.from == range.to && range.from_block.0.abs_diff(range.to_block.0) < range.blocks {
            return Err(StoreError::Invalid("ranges that overlap are to be shared"));
        }
        self.guard_new(|core| core.share(range, done))
    }
}

impl Tx<'_> {
    /// As [`Store::shares_blocks`](crate::Store::shares_blocks), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn shares_blocks(&self, ino: Ino) -> Result<bool> {
        let root = file_root(&self.core.reader().get(ino)?)?;
        Ok(ExtentTree::of(ino).counts(&root)?.shared != 0)
    }

    /// Returns the number of shared runs in which blocks of a file lie, at most `max`.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn shared_runs(&self, ino: Ino, blocks: Range<FileBlock>, max: usize) -> Result<usize> {
        let reader = self.core.reader();
        let root = file_root(&reader.get(ino)?)?;
        let (mut runs, mut at) = (0, blocks.start.0);
        while runs < max {
            let found = reader.extents(ino, &root, at, blocks.end.0, 64)?;
            let Some(last) = found.last() else { break };
            at = last.end().0;
            runs += found.iter().filter(|extent| is_shared(extent)).count();
        }
        Ok(runs.min(max))
    }
}

impl crate::Store {
    /// Lets transactions share blocks, from here on: sets the pool's feature. Durable when this returns.
    ///
    /// # Errors
    /// `Invalid` in pools of format versions without feature words; a device failed, or the store's.
    pub fn share_extents(&self) -> Result<()> {
        let bit = Incompat::SHARED_EXTENTS.bits();
        let _one_at_a_time = self.sharing.lock();
        let has = |features: &Features| features.incompat.get() & bit != 0;
        if has(&self.snapshot().reader().state()?.features) {
            return Ok(());
        }
        if self.layout.sb.version.get() < FEATURES_VERSION {
            return Err(StoreError::Invalid(
                "the pool's format has no shared blocks: varve upgrade",
            ));
        }
        self.write_features(|sb| sb.incompat.set(sb.incompat.get() | bit))?;
        self.layout.note_feature(bit);
        let mut tx = self.begin()?;
        tx.core
            .change_state(|state| state.features.incompat.set(state.features.incompat.get() | bit))?;
        tx.commit().map(drop)
    }
}

impl TxState<'_> {
    fn share(&mut self, range: &ShareRange, done: u64) -> Result<u64> {
        let bit = Incompat::SHARED_EXTENTS.bits();
        if self.reader().state()?.features.incompat.get() & bit == 0 {
            return Err(StoreError::Invalid("the pool has no shared blocks"));
        }
        for ino in [range.from, range.to] {
            if self.store.may_be_torn(ino) {
                return Err(StoreError::Unfinished(ino));
            }
            if done == 0 {
                let inode = self.for_write(ino)?;
                self.put(&inode)?;
            }
        }
        let mut done = done;
        while done < range.blocks && self.room_at_least(2 * OP_ROOM) >= 2 * OP_ROOM && !self.must_pause() {
            done += self.share_step(range, done)?;
        }
        let mut inode = self.reader().get(range.to)?;
        if done == range.blocks {
            inode.attr.size_bytes = inode.attr.size_bytes.max(range.size_bytes);
        }
        let has_tail = self.has_tail(&inode)?;
        if has_tail && inode.orphan.is_none() {
            self.orphan_add(&mut inode)?;
        } else if !has_tail && inode.attr.nlink > 0 {
            self.orphan_remove(&mut inode)?;
        }
        self.put(&inode)?;
        Ok(done)
    }

    /// Shares the next piece, which is one extent, a part of it, or a hole; how many blocks.
    fn share_step(&mut self, range: &ShareRange, done: u64) -> Result<u64> {
        let (at, to) = (range.from_block.0 + done, range.to_block.0 + done);
        let source = match armed(Bug::ShareSeesCommitted) {
            false => file_root(&self.reader().get(range.from)?)?,
            true => file_root(&self.store.snapshot().reader().get(range.from)?)?,
        };
        let left = range.blocks - done;
        let (blocks, part) = match ExtentTree::of(range.from).lookup(self, &source, FileBlock(at))? {
            Mapping::Hole { until } => (until.map_or(left, |until| left.min(until.0 - at)), None),
            Mapping::Mapped(extent) => {
                let blocks = left.min(extent.end().0 - at);
                (blocks, extent.clip(FileBlock(at), FileBlock(at + blocks)))
            }
        };
        let part = part.filter(|part| !part.flags.contains(ExtentFlags::UNWRITTEN));
        let blocks = match part.as_ref().filter(|part| is_shared(part)) {
            Some(part) => self.first_runs(part, STEP_RUNS)?.0,
            None => blocks,
        };
        let target = file_root(&self.reader().get(range.to)?)?;
        let blocks = self.first_mapped(range.to, &target, to, to + blocks)? - to;
        let new = match part.and_then(|part| part.clip(FileBlock(at), FileBlock(at + blocks))) {
            Some(part) => Some(self.one_owner_more(range.from, &part)?),
            None => None,
        };
        // Again: the target may be the same file, and was changed.
        let mut inode = self.reader().get(range.to)?;
        let new: Vec<_> = new
            .map(|first| shared_extent(to, first, blocks))
            .into_iter()
            .collect();
        self.replace(&mut inode, to, to + blocks, &new)?;
        self.put(&inode)?;
        Ok(blocks)
    }

    /// Where the first extents of a range end that one step can free; the range's end if it can free them
    /// all.
    pub(super) fn first_mapped(&self, ino: Ino, root: &TreeRoot, from: u64, to: u64) -> Result<u64> {
        let mapped = self.reader().unresolved(ino, root, from, to, STEP_EXTENTS + 1)?;
        let (mut runs, mut shared, mut blocks) = (STEP_RUNS, STEP_SHARED, STEP_BLOCKS);
        for (index, extent) in mapped.iter().enumerate() {
            if index == STEP_EXTENTS || runs == 0 || shared == 0 || blocks == 0 {
                return Ok(extent.file_block.0);
            }
            if !is_shared(extent) {
                let len = u64::from(extent.len);
                if len > blocks {
                    return Ok(extent.file_block.0 + blocks);
                }
                blocks -= len;
            } else {
                shared -= 1;
                let (blocks, taken) = self.first_runs(extent, runs)?;
                if blocks < u64::from(extent.len) {
                    return Ok(extent.file_block.0 + blocks);
                }
                runs -= taken;
            }
        }
        Ok(to)
    }

    /// Lets one extent more name the blocks of an extent, which becomes a shared one if it is not; the first
    /// number.
    fn one_owner_more(&mut self, ino: Ino, extent: &Extent) -> Result<u64> {
        if is_shared(extent) {
            let first = extent.block.0;
            if !armed(Bug::ShareNotCounted) {
                let numbers = first..first + u64::from(extent.len);
                self.change_shared(|core, root| {
                    SHARED
                        .reference(core, root, numbers)
                        .map_err(|error| match error {
                            StoreError::Tree(TreeError::References(first)) => StoreError::Owners(first),
                            error => error,
                        })
                })?;
            }
            return Ok(first);
        }
        let first = self.new_run(extent)?;
        let mut inode = self.reader().get(ino)?;
        let mut root = file_root(&inode)?;
        let shared = shared_extent(extent.file_block.0, first, u64::from(extent.len));
        // The blocks stay: what comes back is not to be freed.
        ExtentTree::of(ino).replace(self, &mut root, extent.file_block..extent.end(), &[shared])?;
        inode.content = Content::File(root);
        self.put(&inode)?;
        Ok(first)
    }

    /// Makes a run of the blocks of an extent of one owner, for it and another one; its first number.
    fn new_run(&mut self, extent: &Extent) -> Result<u64> {
        let first = self.reader().state()?.next_shared.get();
        let end = first + u64::from(extent.len);
        if end > TIER_BLOCKS_MAX {
            return Err(StoreError::TableFull("numbers of shared blocks"));
        }
        let run = SharedRun {
            first,
            refs: if armed(Bug::ShareNotCounted) { 1 } else { 2 },
            len: extent.len,
            tier: extent.tier,
            block: extent.block,
        };
        self.change_shared(|core, root| SHARED.add(core, root, &run))?;
        self.change_state(|state| state.next_shared.set(end))?;
        Ok(first)
    }

    /// Changes the tree of the shared runs.
    pub(super) fn change_shared<R>(
        &mut self,
        f: impl FnOnce(&mut Self, &mut SharedRoot) -> Result<R>,
    ) -> Result<R> {
        let mut root = self.reader().shared_root()?;
        let result = f(self, &mut root)?;
        self.change_state(|state| state.shared.copy_from_slice(root.as_bytes()))?;
        Ok(result)
    }

    /// An extent less names these numbers. Returns the blocks that are free with that.
    pub(super) fn release_shared(&mut self, numbers: Range<u64>) -> Result<Vec<Span>> {
        if armed(Bug::SharedNotReleased) {
            return Ok(Vec::new());
        }
        let mut gone = self.change_shared(|core, root| SHARED.release(core, root, numbers.clone()))?;
        if armed(Bug::SharedFreedEarly) && gone.is_empty() {
            let left = SHARED.runs(self, &self.reader().shared_root()?, numbers, usize::MAX)?;
            gone = left.into_iter().filter(|run| run.refs == 1).collect();
        }
        Ok(gone
            .iter()
            .map(|run| Span {
                tier: run.tier,
                start: run.block.0,
                len: u64::from(run.len),
            })
            .collect())
    }

    /// How many blocks of a shared extent lie in its first `max` runs, and in how many runs.
    pub(super) fn first_runs(&self, extent: &Extent, max: usize) -> Result<(u64, usize)> {
        let first = extent.block.0;
        let numbers = first..first + u64::from(extent.len);
        let runs = SHARED.runs(self, &self.reader().shared_root()?, numbers, max)?;
        Ok((runs.last().map_or(0, |last| last.end() - first), runs.len()))
    }

    /// Copies blocks of a shared run to another tier, for all files that share it. False: they do not lie
    /// there any more.
    pub(super) fn migrate_shared(
        &mut self,
        numbers: Range<u64>,
        from: (Tier, BlockNo),
        to: DataTarget,
    ) -> Result<bool> {
        // Numbers may have been freed since the move was planned: no run has these then.
        let root = self.reader().shared_root()?;
        let (mut next, mut runs) = (numbers.start, 0);
        SHARED.for_each(self, &root, numbers.clone(), |run| {
            let Some(run) = run.clip(numbers.start, numbers.end) else {
                return ControlFlow::Continue(());
            };
            let at = (from.0, from.1.0 + (run.first - numbers.start));
            runs += 1;
            if runs > STEP_RUNS || run.first != next || (run.tier, run.block.0) != at {
                return ControlFlow::Break(());
            }
            next = run.end();
            ControlFlow::Continue(())
        })?;
        if next != numbers.end {
            return Ok(false);
        }
        let len = numbers.end - numbers.start;
        let mut done = 0;
        while done < len {
            let start = from.1.0 + done;
            let span = self.copy_blocks(from.0, start, len - done, to)?;
            let part = numbers.start + done..numbers.start + done + span.len;
            let moved = self.change_shared(|core, root| {
                let (old, new) = ((from.0, BlockNo(start)), (span.tier, BlockNo(span.start)));
                SHARED.relocate(core, root, part, old, new)
            })?;
            if !moved {
                return Err(StoreError::Damaged(
                    "a shared run changed under a migration".into(),
                ));
            }
            done += span.len;
        }
        let old = Span {
            tier: from.0,
            start: from.1.0,
            len,
        };
        self.free_span(old, true)?;
        Ok(true)
    }
}

/// An extent that names numbers of the shared space.
const fn shared_extent(file_block: u64, first: u64, blocks: u64) -> Extent {
    Extent {
        file_block: FileBlock(file_block),
        len: blocks as u32,
        tier: Tier::Nvm,
        block: BlockNo(first),
        flags: ExtentFlags::SHARED,
    }
}
