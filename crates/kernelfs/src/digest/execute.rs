//! Executes a plan in a store transaction. Decides only the order of the store's calls, and stops when the
//! record is full.

use super::deferred::{DeferredPayloads, Redone};
use super::types::{Applied, Environment};
use super::view::{batch_bit, names};
use crate::placement::{Use, Written};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use varve_digest::{Fate, FilePlan, InodePlan, NameChange, Plan, WriteData};
use varve_format::seeded::{Bug, armed};
use varve_format::session::GrantRow;
use varve_format::{
    BLOCK_BYTES, FileBlock, FileKind, Ino, InodeAttr, InodeKey, LeaseNo, Pin, PinTo, PinnedBy, SessionId,
};
use varve_store::{DataTarget, OP_ROOM, PayloadSource, Progress, SpaceStats, StoreError, Tx};

/// Most extents or names that a digest's own transaction frees at once.
pub(super) const FREE_BUDGET: usize = 256;
/// Bytes of data given to the store in one call.
const PIECES_BYTES: usize = 4 << 20;
/// Bytes of the record budgeted for a stretch of adjoining pieces in a call to the store: each may need a new
/// extent.
const STRETCH_ROOM: u64 = OP_ROOM / 32;

/// Bytes of the record budgeted for a shared run that a write replaces: it may change a node of its own.
const RUN_ROOM: u64 = 4 << 10;

/// A step that does not fit in the batch's journal record and is committed first, in records of its own. It
/// is idempotent, and the log entry stays until the batch commits, so a crash in between is invisible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PreStep {
    /// Truncate the file.
    Truncate(Ino, u64),
    /// Punch a hole.
    Punch(Ino, u64, u64, DataTarget),
    /// Zero the range and keep blocks allocated.
    Zero(Ino, u64, u64, DataTarget),
    /// Allocate blocks.
    Allocate(Ino, u64, u64, DataTarget),
    /// Finish an earlier truncation.
    Finish(Ino),
}

/// Why a plan was not executed; the transaction must be dropped.
#[derive(Debug)]
pub(super) enum CommitFailure {
    /// The record is full: take fewer operations.
    RecordFull,
    /// This step must be committed first.
    PreStep(PreStep),
    /// The store's error.
    Store(StoreError),
}

impl From<StoreError> for CommitFailure {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::RecordFull { .. } => Self::RecordFull,
            StoreError::Unfinished(ino) => Self::PreStep(PreStep::Finish(ino)),
            error => Self::Store(error),
        }
    }
}

/// Executes a plan in one transaction.
pub(super) struct PlanExecutor<'c, 's> {
    pub(super) tx: &'c mut Tx<'s>,
    /// The plan is of one transaction: it cannot take fewer.
    pub(super) alone: bool,
    pub(super) env: &'c Environment<'c>,
    pub(super) space: SpaceStats,
    /// Sessions whose rows may name deleted inodes.
    pub(super) sessions: &'c [SessionId],
    pub(super) applied: Applied,
    /// Source of the bytes that are not in the plan.
    pub(super) left: &'c dyn PayloadSource,
    /// Entries that recovery finds for certain, even if this record is not committed.
    pub(super) redone: &'c Redone,
    /// Changed grant rows in their final state.
    pub(super) rows: BTreeMap<LeaseNo, GrantRow>,
    /// Scratch space for the rows of one inode.
    pub(super) granted: Vec<GrantRow>,
    /// Deleted inodes that still have blocks or names to free.
    pub(super) unfinished: Vec<InodeKey>,
    /// The pin of the last directory that got a name.
    pub(super) dir_pin: Option<(Ino, Pin)>,
}

impl PlanExecutor<'_, '_> {
    /// Executes everything in the plan.
    pub(super) fn carry_out(&mut self, plan: &Plan<'_>) -> Result<(), CommitFailure> {
        for inode in plan.inodes.iter().filter(|inode| inode.fate == Fate::Made) {
            self.make(inode)?;
        }
        for name in &plan.names {
            self.name(plan, name)?;
        }
        for inode in &plan.inodes {
            match inode.fate {
                Fate::Made | Fate::Changed => self.change(inode)?,
                Fate::Deleted => self.delete(inode)?,
            }
            let key = inode.attr.key;
            self.applied
                .unheld
                .extend(inode.left.iter().map(|session| (*session, key)));
        }
        self.tx.release_inodes(&plan.vanished)?;
        for key in &plan.vanished {
            self.gone(*key)?;
        }
        self.write_rows()
    }

    /// Makes sure that one more small operation fits.
    fn room(&mut self) -> Result<(), CommitFailure> {
        if self.tx.room_at_least(OP_ROOM) < OP_ROOM {
            return Err(CommitFailure::RecordFull);
        }
        Ok(())
    }

    fn target(&self, inode: &InodePlan<'_>) -> Result<DataTarget, StoreError> {
        let allocated: u64 = inode.file.allocate.iter().map(|range| range.len).sum();
        let data = Written {
            key: inode.attr.key,
            offset_bytes: inode.file.pieces.first().map_or(0, |(offset, _)| *offset),
            bytes: inode.file.data_bytes().saturating_add(allocated),
        };
        let pin = self.tx.pin(inode.attr.key.ino)?;
        Ok(self.env.target(&data, pin, &self.space))
    }

    fn make(&mut self, inode: &InodePlan<'_>) -> Result<(), CommitFailure> {
        self.room()?;
        let mut attr = inode.attr.clone();
        if attr.kind() != FileKind::Symlink {
            attr.size_bytes = 0;
        }
        self.tx.create(&attr, inode.target)?;
        Ok(())
    }

    fn name(&mut self, plan: &Plan<'_>, change: &NameChange) -> Result<(), CommitFailure> {
        self.room()?;
        match (change.old, change.new) {
            (Some(_), None) => {
                self.tx.dir_remove(change.dir, &change.name)?;
            }
            (None, Some((key, kind))) => self.tx.dir_insert(change.dir, &change.name, key, kind)?,
            (Some(_), Some((key, kind))) => {
                self.tx.dir_replace(change.dir, &change.name, key, kind)?;
            }
            (None, None) => {}
        }
        if let Some((key, _)) = change.new {
            let made = plan
                .inodes
                .binary_search_by_key(&key.ino, |inode| inode.attr.key.ino);
            let made = made.is_ok_and(|at| plan.inodes[at].fate == Fate::Made);
            self.inherit_pin(change.dir, key.ino, made)?;
        }
        Ok(())
    }

    /// Gives an inode the pin of the directory where it got a name. With several names that of the last one
    /// counts.
    fn inherit_pin(&mut self, dir: Ino, ino: Ino, made: bool) -> Result<(), StoreError> {
        let of_dir = match self.dir_pin {
            Some((known, pin)) if known == dir => pin,
            _ => self.tx.pin(dir)?,
        };
        self.dir_pin = Some((dir, of_dir));
        let pin = self.tx.pin(ino)?;
        let keeps = match pin.by {
            PinnedBy::Command => true,
            // The next pass of the rules looks at its new path.
            PinnedBy::Rule => of_dir.to == PinTo::Policy,
            PinnedBy::Directory => pin == of_dir.inherited(),
        };
        if !keeps {
            self.tx.set_pin(ino, of_dir.inherited())?;
            self.applied.pinned |= !made;
            self.dir_pin = None;
        }
        Ok(())
    }

    fn change(&mut self, inode: &InodePlan<'_>) -> Result<(), CommitFailure> {
        let ino = inode.attr.key.ino;
        let told = !armed(Bug::InPlaceNotTold);
        if !inode.file.is_empty() && inode.fate == Fate::Changed && told {
            self.applied.remapped.push(inode.attr.key);
        }
        if inode.attr.kind() == FileKind::Regular {
            self.data(inode)?;
        }
        for (name, value) in &inode.xattrs {
            self.room()?;
            match value {
                Some(value) => self.tx.xattr_set(ino, name, value)?,
                None => match self.tx.xattr_remove(ino, name) {
                    // The attribute was set and removed within the batch.
                    Ok(()) | Err(StoreError::NotFound) => {}
                    Err(error) => return Err(error.into()),
                },
            }
        }
        self.room()?;
        self.tx.edit(ino, |attr| give(attr, &inode.attr))?;
        if inode.attr.nlink == 0 {
            self.applied.orphans.push(inode.attr.key);
        }
        Ok(())
    }

    fn data(&mut self, inode: &InodePlan<'_>) -> Result<(), CommitFailure> {
        let (ino, file) = (inode.attr.key.ino, &inode.file);
        let target = self.target(inode)?;
        if let Some(size) = file.truncate {
            self.room()?;
            if self.tx.truncate(ino, size)? != Progress::Done {
                return Err(CommitFailure::PreStep(PreStep::Truncate(ino, size)));
            }
        }
        for hole in &file.holes {
            self.room()?;
            // Ranges that are to be allocated keep their blocks.
            if file.allocate.iter().any(|range| range.covers(hole)) {
                if self.tx.zero(ino, hole.offset, hole.len, false, target)? != Progress::Done {
                    return Err(CommitFailure::PreStep(PreStep::Zero(
                        ino,
                        hole.offset,
                        hole.len,
                        target,
                    )));
                }
                continue;
            }
            if self.tx.punch(ino, hole.offset, hole.len, target)? != Progress::Done {
                return Err(CommitFailure::PreStep(PreStep::Punch(
                    ino,
                    hole.offset,
                    hole.len,
                    target,
                )));
            }
        }
        let mut pieces = file.pieces.as_slice();
        while !pieces.is_empty() {
            self.room()?;
            let wished = (pieces.len() as u64).saturating_mul(STRETCH_ROOM);
            let stretches = (self.tx.room_at_least(wished) / STRETCH_ROOM) as usize;
            let (now, later) = pieces.split_at(one_call(pieces, stretches));
            self.few_runs(ino, now, target)?;
            let bytes: Vec<_> = now
                .iter()
                .map(|(offset, data)| (*offset, self.bytes_of(file, *offset, *data)))
                .collect();
            self.tx.write_pieces(ino, &bytes, target)?;
            self.note_written(inode.attr.key, now);
            pieces = later;
        }
        for range in &file.allocate {
            self.room()?;
            if self.tx.allocate(ino, range.offset, range.len, false, target)? != Progress::Done {
                return Err(CommitFailure::PreStep(PreStep::Allocate(
                    ino,
                    range.offset,
                    range.len,
                    target,
                )));
            }
        }
        if self.tx.get(ino)?.attr.size_bytes != file.size {
            self.room()?;
            if self.tx.truncate(ino, file.size)? != Progress::Done {
                return Err(CommitFailure::PreStep(PreStep::Truncate(ino, file.size)));
            }
        }
        Ok(())
    }

    /// Makes sure that the record has room for all the shared runs in which pieces lie. If it has not for a
    /// transaction alone, the blocks that they cover whole are unmapped first.
    fn few_runs(
        &mut self,
        ino: Ino,
        pieces: &[(u64, WriteData<'_>)],
        target: DataTarget,
    ) -> Result<(), CommitFailure> {
        // One look at the inode, not one for each piece: few files share blocks.
        if !self.tx.shares_blocks(ino)? {
            return Ok(());
        }
        let mut rest = pieces;
        while let Some((start, _)) = rest.first() {
            let mut end = *start;
            let adjoining = rest.iter().take_while(|(offset, data)| {
                let adjoins = *offset == end;
                end = offset + data.len() as u64;
                adjoins
            });
            let (now, later) = rest.split_at(adjoining.count());
            rest = later;
            let end = now
                .last()
                .map_or(*start, |(offset, data)| offset + data.len() as u64);
            let (first, last) = (
                start.next_multiple_of(BLOCK_BYTES),
                end / BLOCK_BYTES * BLOCK_BYTES,
            );
            if first >= last {
                continue;
            }
            let blocks = FileBlock(first / BLOCK_BYTES)..FileBlock(last / BLOCK_BYTES);
            let needed = self.tx.shared_runs(ino, blocks, usize::MAX)? as u64 * RUN_ROOM;
            if needed == 0 || self.tx.room_at_least(needed) >= needed {
                continue;
            }
            return Err(if self.alone {
                CommitFailure::PreStep(PreStep::Punch(ino, first, last - first, target))
            } else {
                CommitFailure::RecordFull
            });
        }
        Ok(())
    }

    /// Returns bytes of a plan as the store takes them. They may go over the old blocks if recovery repeats
    /// an entry that covers the blocks whole, and no other operation of this record needs the old bytes.
    fn bytes_of<'b>(&self, file: &FilePlan<'_>, offset: u64, data: WriteData<'b>) -> varve_store::Payload<'b>
    where
        Self: 'b,
    {
        match data {
            WriteData::Here(data) => varve_store::Payload::Inline(data),
            WriteData::LogResident(left) => {
                let end = offset + u64::from(left.len);
                varve_store::Payload::Deferred {
                    source: self.left,
                    id: DeferredPayloads::name(left.source, left.entry),
                    skip: left.skip as usize,
                    len: left.len as usize,
                    redone: self.redone.has(left)
                        && file.is_whole(offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)),
                }
            }
        }
    }

    /// Reports the written blocks to placement, each stretch once.
    fn note_written(&self, key: InodeKey, pieces: &[(u64, WriteData<'_>)]) {
        let mut pieces = pieces.iter().map(|(offset, data)| {
            let end = offset + data.len() as u64;
            offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)
        });
        let Some(mut stretch) = pieces.next() else { return };
        let placement = self.env.placement;
        let note = |blocks: &Range<u64>| {
            let count = blocks.end - blocks.start;
            placement.used(key, FileBlock(blocks.start), count, Use::Written);
        };
        for blocks in pieces {
            if blocks.start <= stretch.end {
                stretch.end = stretch.end.max(blocks.end);
            } else {
                note(&stretch);
                stretch = blocks;
            }
        }
        note(&stretch);
    }

    fn delete(&mut self, inode: &InodePlan<'_>) -> Result<(), CommitFailure> {
        let key = inode.attr.key;
        self.room()?;
        self.tx.edit(key.ino, |attr| {
            give(attr, &inode.attr);
            attr.nlink = 0;
        })?;
        // A large inode is freed later by records of its own: it is in the orphan list from here on.
        let small = self.tx.room_at_least(2 * OP_ROOM) >= 2 * OP_ROOM
            && matches!(self.tx.continue_free(key.ino, FREE_BUDGET)?, Progress::Done);
        if !small {
            self.unfinished.push(key);
        }
        self.applied.remapped.push(key);
        self.gone(key)
    }

    /// Removes the rows that grant a freed inode, or clears its bit in batch rows.
    fn gone(&mut self, key: InodeKey) -> Result<(), CommitFailure> {
        self.applied.freed.push(key);
        for session in self.sessions {
            self.granted.clear();
            self.env.leases.grants(*session, key, &mut self.granted);
            for known in self.granted.iter().filter(|row| names(row, key)) {
                let row = match self.rows.entry(known.lease) {
                    Entry::Occupied(row) => row.into_mut(),
                    // The transaction's row counts, since it may have changed.
                    Entry::Vacant(place) => match self.tx.grant(known.lease)? {
                        Some(row) => place.insert(row),
                        None => continue,
                    },
                };
                row.batch &= !batch_bit(row, key.ino).unwrap_or(0);
            }
        }
        Ok(())
    }

    /// Writes the changed rows, each once: one row stands for up to sixteen inodes.
    fn write_rows(&mut self) -> Result<(), CommitFailure> {
        for (lease, row) in std::mem::take(&mut self.rows) {
            let left = (row.batch != 0).then_some(row);
            match &left {
                Some(row) => self.tx.grant_put(row)?,
                None => self.tx.grant_remove(lease)?,
            }
            self.applied.rows.push((lease, left));
        }
        Ok(())
    }
}

/// Returns how many of the pieces go to the store in one call, in at most `most` stretches; at least one.
fn one_call(pieces: &[(u64, WriteData<'_>)], most: usize) -> usize {
    let (mut bytes, mut stretches, mut end) = (0, 0, None);
    let fits = |(offset, data): &&(u64, WriteData<'_>)| {
        bytes += data.len();
        stretches += usize::from(end != Some(*offset));
        end = Some(offset + data.len() as u64);
        bytes <= PIECES_BYTES && stretches <= most
    };
    pieces.iter().take_while(fits).count().max(1)
}

/// Copies the attributes that a plan decides; the store sets the others.
fn give(attr: &mut InodeAttr, new: &InodeAttr) {
    attr.mode = new.mode;
    attr.uid = new.uid;
    attr.gid = new.gid;
    attr.nlink = new.nlink;
    attr.parent = new.parent;
    attr.atime_ns = new.atime_ns;
    attr.mtime_ns = new.mtime_ns;
    attr.ctime_ns = new.ctime_ns;
}

#[cfg(test)]
mod tests {
    use super::{PIECES_BYTES, one_call};
    use varve_digest::WriteData;

    #[test]
    fn one_call_takes_adjoining_pieces_by_their_bytes_and_others_by_their_number() {
        let small = [0_u8; 128];
        let piece = WriteData::Here(&small);
        let adjoining: Vec<_> = (0..100_000).map(|n| (n * 128, piece)).collect();
        assert_eq!(one_call(&adjoining, 32), PIECES_BYTES / 128);
        let apart: Vec<_> = (0..1000).map(|n| (n * 8192, piece)).collect();
        assert_eq!(one_call(&apart, 32), 32);
        let big = vec![0_u8; PIECES_BYTES + 1];
        assert_eq!(
            one_call(&[(0, WriteData::Here(&big)), (big.len() as u64, piece)], 32),
            1
        );
    }
}
