//! File data in a transaction: new blocks, holes, allocation, truncation.

use super::TxState;
use super::shared::STEP_RUNS;
use crate::pool::read::{fill, plan};
use crate::reader::{file_root, is_shared};
use crate::seeded::{Bug, armed};
use crate::space::Span;
use crate::{DataTarget, OP_ROOM, Payload, Progress, Result, StoreError, Tx};
use varve_extent_tree::{ExtentTree, Mapping, Run};
use varve_format::inode::{Content, Inode};
use varve_format::{
    BLOCK_BYTES, BLOCK_SIZE, BlockNo, Extent, ExtentFlags, FILE_BLOCKS_MAX, FILE_SIZE_MAX, FileBlock, Ino,
    Tier, TreeRoot,
};

/// Maximum number of extents that one call of truncate, punch or zero changes.
const STEP_EXTENTS: usize = 4096;
/// Maximum number of blocks whose bits one step of freeing changes.
pub(super) const STEP_BLOCKS: u64 = 1 << 16;
/// Bytes fetched at once on their way to NVM, and to a device.
const FETCH_BYTES: usize = 32 << 10;
const FETCH_FAR_BYTES: usize = 1 << 20;
/// Blocks merged in one buffer on their way to NVM, small enough for the nearest caches, and to a device.
const MERGE_BLOCKS: u64 = 8;
const MERGE_FAR_BLOCKS: u64 = 64;

impl Tx<'_> {
    /// Writes whole blocks at `at`, copy-on-write. With `grow` the size is at least their end afterwards.
    ///
    /// # Errors
    /// `Invalid` if `data` is not whole blocks or passes the largest file; `NoInode`, `WrongKind`, `NoSpace`,
    /// `Unfinished`.
    pub fn write_data(
        &mut self,
        ino: Ino,
        at: FileBlock,
        data: &[u8],
        grow: bool,
        target: DataTarget,
    ) -> Result<()> {
        let end = at.0.saturating_mul(BLOCK_BYTES).saturating_add(data.len() as u64);
        if !data.len().is_multiple_of(BLOCK_SIZE) || end > FILE_SIZE_MAX {
            return Err(StoreError::Invalid("write of whole blocks"));
        }
        self.guard_new(|core| {
            let mut inode = core.for_write(ino)?;
            core.write_blocks(&mut inode, at.0, data, target)?;
            if grow {
                inode.attr.size_bytes = inode.attr.size_bytes.max(end);
            }
            core.put(&inode)
        })
    }

    /// Writes bytes at byte offsets, ascending and not overlapping. Blocks that are covered only in part are
    /// merged with their old content, whose checksums are verified. Afterwards the size is at least the end
    /// of the last piece.
    ///
    /// # Errors
    /// `Invalid`, `NoInode`, `WrongKind`, `NoSpace`, `Unfinished`; `DataChecksum` if an old block is damaged.
    pub fn write_bytes(&mut self, ino: Ino, pieces: &[(u64, &[u8])], target: DataTarget) -> Result<()> {
        let pieces: Vec<_> = pieces
            .iter()
            .map(|(offset, data)| (*offset, Payload::Inline(data)))
            .collect();
        self.write_pieces(ino, &pieces, target)
    }

    /// As [`write_bytes`](Self::write_bytes), for bytes that may have to be fetched: once each, in order,
    /// where they cover whole blocks. Whole blocks of pieces that are redone after a crash may overwrite the
    /// old ones in place, at the commit.
    ///
    /// # Errors
    /// As `write_bytes`; `Invalid` if bytes cannot be fetched.
    pub fn write_pieces(
        &mut self,
        ino: Ino,
        pieces: &[(u64, Payload<'_>)],
        target: DataTarget,
    ) -> Result<()> {
        let mut end = 0;
        for (offset, data) in pieces {
            if *offset < end || data.is_empty() || offset.saturating_add(data.len() as u64) > FILE_SIZE_MAX {
                return Err(StoreError::Invalid("pieces of a write"));
            }
            end = offset + data.len() as u64;
        }
        if pieces.is_empty() {
            return Ok(());
        }
        self.guard_new(|core| {
            let mut inode = core.for_write(ino)?;
            let others = core.queue_in_place(&inode, pieces, target)?;
            let pieces = others.as_deref().unwrap_or(pieces);
            let mut new = NewBlocks::new(target, blocks_of(pieces));
            let most = match target.tier {
                Tier::Nvm => MERGE_BLOCKS,
                Tier::Ssd | Tier::Hdd => MERGE_FAR_BLOCKS,
            };
            let mut rest = pieces;
            while !rest.is_empty() {
                // Pieces of whole blocks are written without merging.
                let whole = rest.iter().take_while(|piece| is_whole(piece)).count();
                let (now, later) = rest.split_at(whole);
                for (offset, data) in now {
                    core.put_new(&mut new, offset / BLOCK_BYTES, *data)?;
                }
                let parts = later.iter().position(is_whole).unwrap_or(later.len());
                let (now, later) = later.split_at(parts);
                for (first, last) in segments(now, most) {
                    let mut buffer = std::mem::take(&mut core.merged);
                    let merged = core.merge(&inode, now, first, last, &mut buffer);
                    let put = merged.and_then(|()| core.put_new(&mut new, first, Payload::Inline(&buffer)));
                    core.merged = buffer;
                    put?;
                }
                rest = later;
            }
            core.map_new(&mut inode, new)?;
            inode.attr.size_bytes = inode.attr.size_bytes.max(end);
            core.put(&inode)
        })
    }

    /// As [`Store::read`](crate::Store::read), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, `DataChecksum`, a device's error.
    pub fn read(&self, ino: Ino, offset: u64, out: &mut [u8]) -> Result<usize> {
        let inode = self.core.reader().get(ino)?;
        self.core.read(&inode, offset, out)
    }

    /// As [`Store::map`](crate::Store::map), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn map(&self, ino: Ino, from: FileBlock, max: usize) -> Result<Vec<Extent>> {
        self.core.reader().map(ino, from, max)
    }

    /// Sets the size. `More`: blocks beyond it are left, and the inode is in the orphan list; commit, and
    /// call again (same size) in another transaction before anything else is done to the file.
    ///
    /// # Errors
    /// `Invalid` beyond the largest file; `NoInode`, `WrongKind`, `NoSpace`, `Unfinished`.
    pub fn truncate(&mut self, ino: Ino, size_bytes: u64) -> Result<Progress> {
        if size_bytes > FILE_SIZE_MAX {
            return Err(StoreError::Invalid("size beyond the largest file"));
        }
        self.guard(|core| core.truncate(ino, size_bytes))
    }

    /// Makes a hole; the size stays. `More`: commit, and call again in another transaction.
    ///
    /// # Errors
    /// `Invalid`, `NoInode`, `WrongKind`, `NoSpace`.
    pub fn punch(&mut self, ino: Ino, offset: u64, len: u64, target: DataTarget) -> Result<Progress> {
        let end = checked_end(offset, len)?;
        self.guard(|core| {
            let mut inode = core.for_write(ino)?;
            let (first, last) = core.zero_edges(&mut inode, offset, end, target)?;
            let mut root = file_root(&inode)?;
            let progress = core.unmap(ino, &mut root, first, last, &mut { STEP_EXTENTS })?;
            inode.content = Content::File(root);
            core.put(&inode)?;
            Ok(progress)
        })
    }

    /// Lets a range read as zeros, with blocks allocated. With `grow` the size is at least its end
    /// afterwards. `More`: commit, and call again in another transaction.
    ///
    /// # Errors
    /// `Invalid`, `NoInode`, `WrongKind`, `NoSpace`.
    pub fn zero(
        &mut self,
        ino: Ino,
        offset: u64,
        len: u64,
        grow: bool,
        target: DataTarget,
    ) -> Result<Progress> {
        let range = (offset, len, grow);
        self.fill_after(ino, range, target, |core, inode, end| {
            let (first, last) = core.zero_edges(inode, offset, end, target)?;
            core.mark_unwritten(inode, first, last)
        })
    }

    /// Allocates blocks for the holes of a range; they read as zeros. With `grow` the size is at least its
    /// end afterwards. `More`: commit, and call again in another transaction.
    ///
    /// # Errors
    /// `Invalid`, `NoInode`, `WrongKind`, `NoSpace`.
    pub fn allocate(
        &mut self,
        ino: Ino,
        offset: u64,
        len: u64,
        grow: bool,
        target: DataTarget,
    ) -> Result<Progress> {
        self.fill_after(ino, (offset, len, grow), target, |_, _, _| Ok(Progress::Done))
    }

    /// Calls `before` with the end of a range (offset, length, whether the file grows to its end), and when
    /// that is done allocates blocks for the holes of the range.
    fn fill_after(
        &mut self,
        ino: Ino,
        (offset, len, grow): (u64, u64, bool),
        target: DataTarget,
        before: impl FnOnce(&mut TxState<'_>, &mut Inode, u64) -> Result<Progress>,
    ) -> Result<Progress> {
        let end = checked_end(offset, len)?;
        self.guard_new(|core| {
            let mut inode = core.for_write(ino)?;
            let progress = match before(core, &mut inode, end)? {
                Progress::More => Progress::More,
                Progress::Done => core.fill_holes(&mut inode, offset, end, target)?,
            };
            if grow && progress == Progress::Done {
                inode.attr.size_bytes = inode.attr.size_bytes.max(end);
            }
            core.put(&inode)?;
            Ok(progress)
        })
    }
}

fn checked_end(offset: u64, len: u64) -> Result<u64> {
    match offset.checked_add(len) {
        Some(end) if len > 0 && end <= FILE_SIZE_MAX => Ok(end),
        _ => Err(StoreError::Invalid("range of a file")),
    }
}

/// Returns whether a piece consists of whole blocks.
fn is_whole((offset, data): &(u64, Payload<'_>)) -> bool {
    offset.is_multiple_of(BLOCK_BYTES) && data.len().is_multiple_of(BLOCK_SIZE)
}

/// Returns the number of blocks that ascending pieces touch.
fn blocks_of(pieces: &[(u64, Payload<'_>)]) -> u64 {
    let (mut blocks, mut counted) = (0, 0);
    for (offset, data) in pieces {
        let first = counted.max(offset / BLOCK_BYTES);
        let end = (offset + data.len() as u64).div_ceil(BLOCK_BYTES);
        blocks += end.saturating_sub(first);
        counted = counted.max(end);
    }
    blocks
}

/// Blocks of a file that are written to new places: all in one run if there is one, even if they are not
/// adjacent in the file.
pub(super) struct NewBlocks {
    target: DataTarget,
    /// Number of blocks without an allocated place.
    left: u64,
    /// Places for the next blocks.
    span: Span,
    /// Checksums of the blocks that are in `span` already.
    sums: Vec<u32>,
    /// Extents of the written blocks, ascending.
    extents: Vec<Extent>,
}

impl NewBlocks {
    /// Prepares for `blocks` blocks in all.
    pub(super) const fn new(target: DataTarget, blocks: u64) -> Self {
        Self {
            target,
            left: blocks,
            span: Span {
                tier: Tier::Nvm,
                start: 0,
                len: 0,
            },
            sums: Vec::new(),
            extents: Vec::new(),
        }
    }

    /// Prepares for as many blocks as a place has that was allocated for them.
    pub(super) fn placed(span: Span) -> Self {
        Self {
            span,
            ..Self::new(DataTarget::prefer(span.tier), 0)
        }
    }
}

/// Returns the runs of blocks (first, last) that the pieces touch, each at most `most` long.
fn segments(pieces: &[(u64, Payload<'_>)], most: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (offset, data) in pieces {
        let (first, last) = (
            offset / BLOCK_BYTES,
            (offset + data.len() as u64 - 1) / BLOCK_BYTES,
        );
        match runs.last_mut() {
            Some(run) if first <= run.1 + 1 => run.1 = last,
            _ => runs.push((first, last)),
        }
    }
    runs.into_iter()
        .flat_map(|(first, last)| {
            (first..=last)
                .step_by(most as usize)
                .map(move |start| (start, last.min(start + most - 1)))
        })
        .collect()
}

impl TxState<'_> {
    /// Returns the inode of a regular file, after removing the blocks left by an unfinished truncation.
    pub(super) fn for_write(&mut self, ino: Ino) -> Result<Inode> {
        let mut inode = self.reader().get(ino)?;
        file_root(&inode)?;
        if inode.orphan.is_some() && self.has_tail(&inode)? {
            if self.unmap_tail(&mut inode, &mut { STEP_EXTENTS })? == Progress::More {
                self.put(&inode)?;
                return Err(StoreError::Unfinished(ino));
            }
            if inode.attr.nlink > 0 {
                self.orphan_remove(&mut inode)?;
            }
        }
        Ok(inode)
    }

    pub(crate) fn read(&self, inode: &Inode, offset: u64, out: &mut [u8]) -> Result<usize> {
        let reader = self.reader();
        let plan = plan(&reader, inode, offset, out, !armed(Bug::MergeBelieved))?;
        let read = fill(self.store, &plan, out, |tier, start, bytes| {
            self.store_read(tier, start, bytes)
        });
        match read {
            // It may be memory that is wrong.
            Err(StoreError::DataChecksum { .. }) if self.ahead.is_some() => {
                fill(self.store, &plan, out, |tier, start, bytes| {
                    self.read_from_device(tier, start, bytes)
                })?;
            }
            read => read?,
        }
        Ok(plan.len)
    }

    /// Fills `buffer` with blocks `first..=last` of the file, overlaid with the pieces.
    fn merge(
        &self,
        inode: &Inode,
        pieces: &[(u64, Payload<'_>)],
        first: u64,
        last: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<()> {
        let start = first * BLOCK_BYTES;
        buffer.resize((last - first + 1) as usize * BLOCK_SIZE, 0);
        let end = start + buffer.len() as u64;
        // The pieces are ascending, so those before and behind the range are skipped at once.
        let from = pieces.partition_point(|(offset, data)| offset + data.len() as u64 <= start);
        let inside: Vec<(u64, Payload<'_>)> = pieces[from..]
            .iter()
            .take_while(|(offset, _)| *offset < end)
            .map(|(offset, data)| {
                let skip = start.saturating_sub(*offset);
                let take = (offset + data.len() as u64).min(end) - offset.max(&start);
                (offset + skip, data.part(skip as usize, take as usize))
            })
            .collect();
        // Only blocks that are not covered whole are read.
        let mut covered = vec![0_usize; (last - first + 1) as usize];
        for (offset, data) in &inside {
            let mut at = *offset;
            let stop = offset + data.len() as u64;
            while at < stop {
                let next = (at / BLOCK_BYTES + 1) * BLOCK_BYTES;
                covered[((at - start) / BLOCK_BYTES) as usize] += (next.min(stop) - at) as usize;
                at = next;
            }
        }
        for (index, bytes) in covered.iter().enumerate() {
            if *bytes < BLOCK_SIZE {
                let at = index * BLOCK_SIZE;
                let block = &mut buffer[at..at + BLOCK_SIZE];
                // Bytes behind the file's end are not read.
                block.fill(0);
                self.read(inode, start + at as u64, block)?;
            }
        }
        for (offset, data) in inside {
            let at = (offset - start) as usize;
            data.copy_to(&mut buffer[at..at + data.len()])?;
        }
        Ok(())
    }

    fn write_blocks(&mut self, inode: &mut Inode, at: u64, data: &[u8], target: DataTarget) -> Result<()> {
        let mut new = NewBlocks::new(target, (data.len() / BLOCK_SIZE) as u64);
        self.put_new(&mut new, at, Payload::Inline(data))?;
        self.map_new(inode, new)
    }

    /// Writes whole blocks of a file, from block `at` on, to their new places. All calls together write
    /// ascending blocks, no more than `new` was made for.
    pub(super) fn put_new(&mut self, new: &mut NewBlocks, at: u64, data: Payload<'_>) -> Result<()> {
        let (mut at, mut data) = (at, data);
        while !data.is_empty() {
            if new.sums.len() as u64 == new.span.len {
                // The next allocation may seal the tier's unit, which needs all its checksums.
                self.note_checksums(new.span, &new.sums)?;
                new.sums.clear();
                new.span = self.alloc_data(new.target, new.left.min(STEP_BLOCKS))?;
                new.left -= new.span.len;
            }
            let done = new.sums.len() as u64;
            let room = (new.span.len - done) as usize * BLOCK_SIZE;
            let now = data.part(0, room.min(data.len()));
            let later = data.part(now.len(), data.len() - now.len());
            let part = Span {
                start: new.span.start + done,
                len: (now.len() / BLOCK_SIZE) as u64,
                ..new.span
            };
            self.put_bytes(part, now, &mut new.sums)?;
            push(&mut new.extents, extent(at, part, ExtentFlags::empty()));
            at += part.len;
            data = later;
        }
        Ok(())
    }

    /// Writes whole blocks to a place that was allocated for them; their checksums go to `sums`.
    fn put_bytes(&mut self, place: Span, data: Payload<'_>, sums: &mut Vec<u32>) -> Result<()> {
        if let Payload::Inline(data) = data {
            return self.put_summed(place.tier, place.start, data, sums);
        }
        // Small pieces for NVM stay in the nearest caches on their way; a device is given larger ones.
        let most = if place.tier == Tier::Nvm {
            FETCH_BYTES
        } else {
            FETCH_FAR_BYTES
        };
        let mut buffer = std::mem::take(&mut self.fetched);
        for done in (0..data.len()).step_by(most) {
            let now = data.part(done, most.min(data.len() - done));
            if buffer.len() < now.len() {
                buffer.resize(now.len(), 0);
            }
            now.copy_to(&mut buffer[..now.len()])?;
            let start = place.start + (done / BLOCK_SIZE) as u64;
            self.put_summed(place.tier, start, &buffer[..now.len()], sums)?;
        }
        self.fetched = buffer;
        Ok(())
    }

    /// Maps the written blocks, and frees the blocks that they replace.
    pub(super) fn map_new(&mut self, inode: &mut Inode, new: NewBlocks) -> Result<()> {
        if new.left > 0 || new.sums.len() as u64 != new.span.len {
            // These blocks would be in use without an owner.
            return Err(StoreError::Damaged(
                "blocks allocated for a write are left".into(),
            ));
        }
        self.note_checksums(new.span, &new.sums)?;
        let mut root = file_root(inode)?;
        let old = ExtentTree::of(inode.attr.key.ino).replace_each(self, &mut root, &new.extents)?;
        inode.content = Content::File(root);
        self.free_runs(&old)
    }

    /// Frees runs of data. Runs that are adjacent on their tier are freed together, wherever in the file they
    /// were. Shared blocks are freed if no other extent names them.
    pub(crate) fn free_runs(&mut self, runs: &[Run]) -> Result<()> {
        let mut spans: Vec<Span> = runs.iter().filter(|run| !run.shared).map(span_of).collect();
        for run in runs.iter().filter(|run| run.shared) {
            spans.append(&mut self.release_shared(run.block.0..run.block.0 + u64::from(run.len))?);
        }
        spans.sort_unstable_by_key(|span| (span.tier, span.start));
        let mut rest = spans.into_iter();
        let Some(mut span) = rest.next() else {
            return Ok(());
        };
        for next in rest {
            if next.tier == span.tier && next.start == span.start.saturating_add(span.len) {
                span.len += next.len;
            } else {
                self.free_span(std::mem::replace(&mut span, next), true)?;
            }
        }
        self.free_span(span, true)
    }

    /// Maps `new` in the range and frees the old blocks.
    pub(super) fn replace(&mut self, inode: &mut Inode, from: u64, to: u64, new: &[Extent]) -> Result<()> {
        let ino = inode.attr.key.ino;
        let mut root = file_root(inode)?;
        let old = ExtentTree::of(ino).replace(self, &mut root, FileBlock(from)..FileBlock(to), new)?;
        inode.content = Content::File(root);
        self.free_runs(&old)
    }

    /// Unmaps and frees, at most `budget` extents and as long as the record has room.
    pub(crate) fn unmap(
        &mut self,
        ino: Ino,
        root: &mut TreeRoot,
        from: u64,
        to: u64,
        budget: &mut usize,
    ) -> Result<Progress> {
        let tree = ExtentTree::of(ino);
        let mut at = from;
        loop {
            let next = self.reader().unresolved(ino, root, at, to, 32)?;
            let Some(first) = next.first() else {
                return Ok(Progress::Done);
            };
            if *budget == 0 || self.room_at_least(2 * OP_ROOM) < 2 * OP_ROOM || self.must_pause() {
                return Ok(Progress::More);
            }
            let start = first.file_block.0;
            *budget -= 1;
            // Extents that share go one by one: each may lie in many runs.
            let end = if is_shared(first) {
                let (blocks, runs) = self.first_runs(first, STEP_RUNS)?;
                *budget = budget.saturating_sub(runs.saturating_sub(1));
                start + blocks.min(STEP_BLOCKS)
            } else {
                let mut end = first.end().0.min(start + STEP_BLOCKS);
                let mut blocks = end - start;
                for extent in next[1..].iter().take_while(|extent| !is_shared(extent)) {
                    blocks += u64::from(extent.len);
                    if blocks > STEP_BLOCKS || *budget == 0 || end < first.end().0 {
                        break;
                    }
                    *budget -= 1;
                    end = extent.end().0;
                }
                end
            };
            let gone = tree.remove(self, root, FileBlock(start)..FileBlock(end))?;
            self.free_runs(&gone)?;
            at = end;
        }
    }

    /// Returns the first block beyond the size.
    fn tail(inode: &Inode) -> u64 {
        inode.attr.size_bytes.div_ceil(BLOCK_BYTES)
    }

    /// Returns whether blocks are mapped beyond the size.
    pub(crate) fn has_tail(&self, inode: &Inode) -> Result<bool> {
        match file_root(inode) {
            Ok(root) => Ok(!self
                .reader()
                .extents(inode.attr.key.ino, &root, Self::tail(inode), FILE_BLOCKS_MAX, 1)?
                .is_empty()),
            Err(_) => Ok(false),
        }
    }

    pub(crate) fn unmap_tail(&mut self, inode: &mut Inode, budget: &mut usize) -> Result<Progress> {
        let Ok(mut root) = file_root(inode) else {
            return Ok(Progress::Done);
        };
        let progress = self.unmap(
            inode.attr.key.ino,
            &mut root,
            Self::tail(inode),
            FILE_BLOCKS_MAX,
            budget,
        )?;
        inode.content = Content::File(root);
        Ok(progress)
    }

    fn truncate(&mut self, ino: Ino, size: u64) -> Result<Progress> {
        let old = self.reader().get(ino)?.attr.size_bytes;
        if size > old {
            let mut inode = self.for_write(ino)?;
            inode.attr.size_bytes = size;
            self.put(&inode)?;
            return Ok(Progress::Done);
        }
        let mut inode = self.reader().get(ino)?;
        file_root(&inode)?;
        if size < old {
            let edge = size.next_multiple_of(BLOCK_BYTES);
            if edge > size && !armed(Bug::StaleTail) {
                self.zero_part(
                    &mut inode,
                    size,
                    edge,
                    DataTarget::prefer(Tier::Nvm).with_reserve(),
                )?;
            }
            inode.attr.size_bytes = size;
        }
        let progress = self.unmap_tail(&mut inode, &mut { STEP_EXTENTS })?;
        match progress {
            Progress::More if inode.orphan.is_none() => self.orphan_add(&mut inode)?,
            Progress::Done if inode.attr.nlink > 0 => self.orphan_remove(&mut inode)?,
            _ => {}
        }
        self.put(&inode)?;
        Ok(progress)
    }

    /// Zeros bytes within one block, if the block holds data.
    fn zero_part(&mut self, inode: &mut Inode, from: u64, to: u64, target: DataTarget) -> Result<()> {
        let index = from / BLOCK_BYTES;
        let root = file_root(inode)?;
        let at = FileBlock(index);
        let Mapping::Mapped(found) = ExtentTree::of(inode.attr.key.ino).lookup(self, &root, at)? else {
            return Ok(());
        };
        if found.flags.contains(ExtentFlags::UNWRITTEN) {
            return Ok(());
        }
        let mut block = vec![0; BLOCK_SIZE];
        let start = index * BLOCK_BYTES;
        self.read(inode, start, &mut block)?;
        block[(from - start) as usize..(to - start) as usize].fill(0);
        let found = self
            .reader()
            .extents(inode.attr.key.ino, &root, index, index + 1, 1)?;
        let target = DataTarget {
            tier: found.first().map_or(target.tier, |found| found.tier),
            only: false,
            ..target
        };
        self.write_blocks(inode, index, &block, target)
    }

    /// Zeros the partial blocks at both ends of a range; returns the whole blocks (first, end) between.
    fn zero_edges(
        &mut self,
        inode: &mut Inode,
        offset: u64,
        end: u64,
        target: DataTarget,
    ) -> Result<(u64, u64)> {
        let first = offset.div_ceil(BLOCK_BYTES);
        let last = end / BLOCK_BYTES;
        if !offset.is_multiple_of(BLOCK_BYTES) {
            self.zero_part(inode, offset, end.min(first * BLOCK_BYTES), target)?;
        }
        if !end.is_multiple_of(BLOCK_BYTES) && last >= first {
            self.zero_part(inode, last * BLOCK_BYTES, end, target)?;
        }
        Ok((first, last.max(first)))
    }

    /// Marks the mapped blocks of the range as unwritten.
    fn mark_unwritten(&mut self, inode: &mut Inode, from: u64, to: u64) -> Result<Progress> {
        let ino = inode.attr.key.ino;
        let mut root = file_root(inode)?;
        let mut at = from;
        for _ in 0..STEP_EXTENTS / 32 {
            let next = self.reader().unresolved(ino, &root, at, to, 32)?;
            let Some(last) = next.last() else {
                inode.content = Content::File(root);
                return Ok(Progress::Done);
            };
            if self.room_at_least(2 * OP_ROOM) < 2 * OP_ROOM {
                break;
            }
            if let Some(shared) = next.first().filter(|first| is_shared(first)) {
                at = shared.end().0;
                let unmapped = self.unmap(ino, &mut root, shared.file_block.0, at, &mut { STEP_EXTENTS })?;
                if unmapped == Progress::More {
                    break;
                }
                continue;
            }
            at = next
                .iter()
                .find(|extent| is_shared(extent))
                .map_or(last.end().0, |shared| shared.file_block.0);
            for old in next.into_iter().take_while(|extent| !is_shared(extent)) {
                if old.flags.contains(ExtentFlags::UNWRITTEN) {
                    continue;
                }
                let new = Extent {
                    flags: old.flags | ExtentFlags::UNWRITTEN,
                    ..old
                };
                // The blocks stay in use, so the returned runs are not freed.
                ExtentTree::of(ino).replace(self, &mut root, old.file_block..old.end(), &[new])?;
            }
        }
        inode.content = Content::File(root);
        Ok(Progress::More)
    }

    /// Maps unwritten blocks in the holes of the range.
    fn fill_holes(
        &mut self,
        inode: &mut Inode,
        offset: u64,
        end: u64,
        target: DataTarget,
    ) -> Result<Progress> {
        let ino = inode.attr.key.ino;
        let last = end.div_ceil(BLOCK_BYTES);
        let mut at = offset / BLOCK_BYTES;
        while at < last {
            if self.room_at_least(2 * OP_ROOM) < 2 * OP_ROOM {
                return Ok(Progress::More);
            }
            let root = file_root(inode)?;
            let hole = match ExtentTree::of(ino).lookup(self, &root, FileBlock(at))? {
                Mapping::Mapped(extent) => {
                    at = extent.end().0;
                    continue;
                }
                Mapping::Hole { until } => until.map_or(last, |until| until.0.min(last)) - at,
            };
            let span = self.alloc_data(target, hole.min(STEP_BLOCKS))?;
            self.replace(
                inode,
                at,
                at + span.len,
                &[extent(at, span, ExtentFlags::UNWRITTEN)],
            )?;
            at += span.len;
        }
        Ok(Progress::Done)
    }
}

fn extent(file_block: u64, span: Span, flags: ExtentFlags) -> Extent {
    Extent {
        file_block: FileBlock(file_block),
        len: span.len as u32,
        tier: span.tier,
        block: BlockNo(span.start),
        flags,
    }
}

/// Appends an extent, joined to the last one where they meet.
fn push(extents: &mut Vec<Extent>, next: Extent) {
    match extents.last_mut() {
        Some(last) if last.joins(&next) => last.len += next.len,
        _ => extents.push(next),
    }
}

fn span_of(run: &Run) -> Span {
    Span {
        tier: run.tier,
        start: run.block.0,
        len: u64::from(run.len),
    }
}
