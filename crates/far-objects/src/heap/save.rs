//! Checkpoints: a cut through the heap, and what it found, written while the threads go on.
//!
//! The cut stops all threads for as long as a few lists are copied. From then on who changes an object that
//! the checkpoint has not saved yet saves it first: its entry in memory, its bytes in blocks of the
//! checkpoint's own. What was not changed since the checkpoint before is not looked at. The root is written
//! when all else is durable; until the next one is, no place is written that this one needs.

use super::gate::{Gate, Inside};
use super::handles::{Handles, Shapes, Snapshot};
use super::owner::SlotsOwner;
use super::segments::{Segment, SegmentWriter, segment_bytes, wants_all};
use super::{Core, FarHeap, Shard, frames_data_bytes};
use crate::checkpoint::{PoolRow, RECORD_MAX_BYTES, ROOT_BYTES, ROOT_SLOTS, Root, Row, TableRow};
use crate::error::{Error, Refusal};
use crate::file::{CheckpointFile, FileStore, io_error};
use crate::layout::{BLOCK_BYTES, BLOCK_PAYLOAD_BYTES};
use crate::log::{NoRoom, Stream};
use crate::table::{Entry, Key};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_far::BackendError;

/// Buffers beside those of a heap without checkpoints: three blocks, a part of the tables and what comes
/// after it.
pub(super) const FIXED_BYTES: u64 = 6 * BLOCK_BYTES as u64;
/// Slots that are saved at once, with their shard locked.
const STEP_SLOTS: usize = 128;
/// Memory of an entry that is put aside.
const SAVED_BYTES: u64 = size_of::<(Key, Row)>() as u64;
/// Blocks that checkpoints need at most while nothing else can be written: all of memory, and tables.
pub(super) fn reserve_blocks(memory_limit_bytes: u64) -> usize {
    (memory_limit_bytes / BLOCK_PAYLOAD_BYTES as u64) as usize * 9 / 8 + 16
}

/// What is known of the last complete checkpoint.
#[derive(Debug)]
pub(super) struct Progress {
    pub(super) generation: u64,
    /// The slot of its root.
    pub(super) slot: usize,
    pub(super) epoch: u32,
    pub(super) segments: Vec<Segment>,
    /// A sync failed: what was written before may be lost, so that no later checkpoint is complete.
    pub(super) is_failed: bool,
    /// A checkpoint is being made, or one ended by a panic.
    pub(super) is_making: bool,
}

/// What makes checkpoints of a heap.
pub(super) struct Saver {
    pub(super) file: Arc<dyn CheckpointFile>,
    pub(super) schema_tag: u64,
    pub(super) file_id: u64,
    pub(super) capacity_slabs: u32,
    pub(super) gate: Gate,
    pub(super) handles: Mutex<Handles>,
    pub(super) tables: Mutex<Shapes>,
    pub(super) progress: Mutex<Progress>,
    #[cfg(test)]
    pub(super) fault: Mutex<Option<Fault>>,
}

/// A fault that tests of crashes have to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Who changes an object does not save what the running checkpoint needs.
    SavesNothing,
    /// A cut leaves blocks open that are being filled.
    LeavesOpen,
}

/// While this lives no cut is made: all changes of this thread meanwhile are in a checkpoint, or none is.
#[must_use]
pub struct Together<'a> {
    _inside: Option<Inside<'a>>,
}

impl std::fmt::Debug for Together<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Together").finish_non_exhaustive()
    }
}

/// What a checkpoint took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checkpointed {
    /// Of the last one that was made: one more than the checkpoint before, or more where others were needed
    /// to have room again. The sums below are of all of them.
    pub generation: u64,
    /// How long threads that write were stopped at once.
    pub stopped: Duration,
    /// Bytes that it wrote: blocks that were not full before it, tables, root.
    pub written_bytes: u64,
    /// Those of tables, of them.
    pub table_bytes: u64,
    /// Entries of tables that it wrote.
    pub entries: u64,
    /// Whether it wrote the tables of all objects, and not only what changed.
    pub is_whole: bool,
}

impl Checkpointed {
    /// Adds what a checkpoint took that was made in the same call.
    pub(super) fn add(&mut self, more: &Self) {
        self.generation = more.generation;
        self.stopped = self.stopped.max(more.stopped);
        self.written_bytes += more.written_bytes;
        self.table_bytes += more.table_bytes;
        self.entries += more.entries;
        self.is_whole |= more.is_whole;
    }
}

/// Slots of one table that were saved.
#[derive(Default)]
struct SavedRows {
    rows: Vec<Row>,
    /// Length of new objects of the table at the cut. Its number may be another table's by now: one that was
    /// made after the cut, of which no slot is saved.
    len_bytes: u16,
}

/// The heap as it was at the cut, but for entries and objects.
struct Cut {
    epoch: u32,
    is_whole: bool,
    stopped: Duration,
    tables: Vec<TableRow>,
    touched: HashMap<u32, bool>,
    pools: Vec<PoolRow>,
    handles: Snapshot,
}

impl Core {
    pub(super) fn saver(&self) -> Result<&Saver, Error> {
        self.saver.as_ref().ok_or_else(|| Error::NoCheckpoints {
            device: self.log.device(),
        })
    }

    /// Whether the heap has checkpoints.
    pub(crate) fn check_checkpoints(&self) -> Result<(), Error> {
        self.saver().map(|_| ())
    }

    pub(crate) fn refused_handle(&self, handle: u64, what: &'static str) -> Error {
        Error::Refused {
            file: self.log.device(),
            reason: Refusal::Handle { handle, what },
        }
    }

    /// Keeps cuts away. May be called again by who has it.
    pub(crate) fn together(&self) -> Together<'_> {
        Together {
            _inside: self.saver.as_ref().map(|saver| saver.gate.enter()),
        }
    }

    #[cfg(test)]
    fn is_broken(&self, fault: Fault) -> bool {
        self.saver
            .as_ref()
            .is_some_and(|saver| *saver.fault.lock() == Some(fault))
    }

    #[cfg(not(test))]
    fn is_broken(&self, _: Fault) -> bool {
        false
    }

    /// To be called before an object's bytes, place or length change, with its shard locked. Memory only.
    pub(super) fn before_change(&self, shard: &mut Shard, key: Key) {
        if self.saver.is_none() {
            return;
        }
        let at = key.table as usize >> self.shard_bits;
        let now = shard.now;
        let Some(Some(table)) = shard.tables.get_mut(at) else {
            return;
        };
        if !table.mark(key.slot, &now) || self.is_broken(Fault::SavesNothing) {
            return;
        }
        let Some((entry, len)) = table.get(key.slot) else {
            return;
        };
        let value = match entry {
            Entry::Empty => 0,
            Entry::At(sector) => sector + 1,
            Entry::Frame(frame) => {
                let frame = shard.frames.get(frame);
                if frame.is_dirty() {
                    self.budget.force(frames_data_bytes(len));
                    self.note_dirty(len);
                    shard.copies.push((key, frame.data().into()));
                    return;
                }
                frame.stored().map_or(0, |sector| sector + 1)
            }
        };
        self.put_aside(shard, key, len, value);
    }

    pub(super) fn put_aside(&self, shard: &mut Shard, key: Key, len: usize, value: u64) {
        self.budget.force(SAVED_BYTES);
        let row = Row {
            slot: key.slot as u16,
            len: len as u16,
            value,
        };
        shard.saved.push((key, row));
    }

    /// Saves an object in memory that the running checkpoint needs, and that is newer than the log: it is
    /// in the log then.
    pub(super) fn save_first(&self, shard: &mut Shard, key: Key, frame: u32) -> Result<(), NoRoom> {
        if !shard.now.is_saving || self.is_broken(Fault::SavesNothing) {
            return Ok(());
        }
        let at = key.table as usize >> self.shard_bits;
        let now = shard.now;
        let Some(Some(table)) = shard.tables.get_mut(at) else {
            return Ok(());
        };
        if !shard.frames.get(frame).is_dirty() || !table.is_needed(key.slot, &now) {
            return Ok(());
        }
        let sector = self.save_frame(shard, key, frame)?;
        if let Some(Some(table)) = shard.tables.get_mut(at) {
            table.note_saved(key.slot, &now);
        }
        let len = shard.frames.get(frame).data().len();
        self.put_aside(shard, key, len, sector + 1);
        Ok(())
    }

    /// Appends an object in memory to the checkpoint's blocks. Gives its sector.
    fn save_frame(&self, shard: &mut Shard, key: Key, frame: u32) -> Result<u64, NoRoom> {
        let frame = shard.frames.get_mut(frame);
        let sector = self
            .log
            .append(Stream::Checkpoint, key.number(), frame.data(), None)?;
        frame.set_clean(sector);
        self.note_clean(frame.data().len());
        Ok(sector)
    }

    /// Puts aside what the running checkpoint needs of a table that ends. Its objects are dropped already.
    pub(super) fn save_table(&self, shard: &mut Shard, number: u32) {
        let now = shard.now;
        if !now.is_saving {
            return;
        }
        let at = number as usize >> self.shard_bits;
        let mut from = 0;
        while let Some(Some(table)) = shard.tables.get_mut(at)
            && let Some(slot) = table.next_needed(from, &now)
        {
            let key = Key { table: number, slot };
            self.before_change(shard, key);
            from = slot as usize + 1;
        }
    }

    /// Stops all threads that change something, and notes what there is.
    fn cut(&self, saver: &Saver, is_whole: bool, owner: Option<&dyn SlotsOwner>) -> Result<Cut, Error> {
        let started = Instant::now();
        let _closed = saver.gate.close();
        let Some(owner) = owner else {
            return Ok(self.cut_objects(saver, is_whole, started));
        };
        let mut made = None;
        owner.cut(is_whole, &mut || {
            made.get_or_insert_with(|| self.cut_objects(saver, is_whole, started))
                .epoch
        })?;
        let mut cut =
            made.ok_or_else(|| Error::Config("the owner of the heap's slots made no cut".into()))?;
        cut.stopped = started.elapsed();
        Ok(cut)
    }

    /// Notes what there is, while the gate is closed.
    fn cut_objects(&self, saver: &Saver, is_whole: bool, started: Instant) -> Cut {
        let mut pools = self.pools.lock();
        let mut shards: Vec<_> = self.shards.iter().map(|shard| shard.lock()).collect();
        let mut epoch = 0;
        for shard in &mut shards {
            shard.now.epoch += 1;
            shard.now.is_saving = true;
            shard.now.is_whole = is_whole;
            epoch = shard.now.epoch;
        }
        self.log.cut(!self.is_broken(Fault::LeavesOpen));
        let pools = pools.snapshot(is_whole);
        let handles = saver.handles.lock().snapshot(is_whole);
        let (tables, touched) = {
            let mut shapes = saver.tables.lock();
            let touched = std::mem::take(&mut shapes.touched);
            let row = |number: u32, is_new| {
                let shape = shapes
                    .all
                    .get(number as usize)
                    .copied()
                    .filter(|shape| shape.0 != 0);
                TableRow {
                    number,
                    shape,
                    is_new,
                }
            };
            let tables = if is_whole {
                let all = (1..shapes.all.len() as u32).map(|number| row(number, true));
                all.filter(|row| row.shape.is_some()).collect()
            } else {
                touched
                    .iter()
                    .map(|(number, is_new)| row(*number, *is_new))
                    .collect()
            };
            (tables, touched)
        };
        Cut {
            epoch,
            is_whole,
            tables,
            touched,
            pools,
            handles,
            stopped: started.elapsed(),
        }
    }

    /// Ends the saving of the last cut, whose checkpoint is complete or failed.
    fn end_saving(&self, committed: Option<u32>) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.now.is_saving = false;
            shard.now.is_whole = false;
            if let Some(epoch) = committed {
                shard.now.committed = epoch;
            }
            let saved = std::mem::take(&mut shard.saved);
            let copies = std::mem::take(&mut shard.copies);
            drop(shard);
            self.budget.give_back(saved.len() as u64 * SAVED_BYTES);
            for (_, data) in copies {
                self.budget.give_back(frames_data_bytes(data.len()));
                self.note_clean(data.len());
            }
        }
    }

    /// Makes a checkpoint, and more of them where that is needed to have room again.
    pub(super) fn checkpoint(
        &self,
        record: &[u8],
        owner: Option<&dyn SlotsOwner>,
    ) -> Result<Checkpointed, Error> {
        let saver = self.saver()?;
        if owner.is_some() != self.has_owner() {
            return Err(Error::Config(
                "checkpoints of this heap are made by who has its slots".into(),
            ));
        }
        if record.len() > RECORD_MAX_BYTES {
            return Err(Error::TooLarge {
                len_bytes: record.len(),
                max_bytes: RECORD_MAX_BYTES,
            });
        }
        if saver.gate.is_inside() {
            return Err(Error::Config(
                "a checkpoint was asked for by a thread that keeps changes together".into(),
            ));
        }
        let mut progress = saver.progress.lock();
        if progress.is_failed {
            return Err(self.file_error(std::io::Error::other(
                "a sync failed before: restore the last checkpoint",
            )));
        }
        if progress.is_making {
            return Err(self.file_error(std::io::Error::other(
                "a checkpoint ended by a panic: restore the last one",
            )));
        }
        let mut made = self.make_checkpoint(saver, &mut progress, record, owner)?;
        self.refill(saver, &mut progress, record, owner, &mut made);
        Ok(made)
    }

    pub(super) fn make_checkpoint(
        &self,
        saver: &Saver,
        progress: &mut Progress,
        record: &[u8],
        owner: Option<&dyn SlotsOwner>,
    ) -> Result<Checkpointed, Error> {
        progress.is_making = true;
        let made = self.make(saver, progress, record, owner);
        progress.is_making = false;
        made
    }

    fn make(
        &self,
        saver: &Saver,
        progress: &mut Progress,
        record: &[u8],
        owner: Option<&dyn SlotsOwner>,
    ) -> Result<Checkpointed, Error> {
        while self.log.has_pending() {
            self.log.write_pending()?;
        }
        let before = self.log.stats().device_write_bytes;
        let is_whole = wants_all(&progress.segments, saver.capacity_slabs);
        let cut = self.cut(saver, is_whole, owner)?;
        let mut out = SegmentWriter::new(self, saver.file_id, progress.generation + 1);
        let done = self.save(saver, progress, &cut, (record, owner), &mut out);
        match done {
            Ok(mut stats) => {
                self.log.commit();
                self.end_saving(Some(cut.epoch));
                if let Some(owner) = owner {
                    owner.end(true);
                }
                stats.written_bytes =
                    self.log.stats().device_write_bytes - before + (ROOT_SLOTS * ROOT_BYTES) as u64;
                Ok(stats)
            }
            Err(error) => {
                self.log.abandon(&out.places);
                self.end_saving(None);
                if let Some(owner) = owner {
                    owner.end(false);
                }
                self.pools.lock().touch_all(cut.pools.iter().map(|row| row.table));
                saver.handles.lock().give_back(cut.handles);
                let mut shapes = saver.tables.lock();
                for (number, is_new) in cut.touched {
                    *shapes.touched.entry(number).or_default() |= is_new;
                }
                Err(error)
            }
        }
    }

    fn file_error(&self, error: std::io::Error) -> Error {
        Error::Io {
            device: self.log.device(),
            error: BackendError::Io(error),
        }
    }

    /// Writes what was cut, makes it durable, then the root.
    fn save(
        &self,
        saver: &Saver,
        progress: &mut Progress,
        cut: &Cut,
        (record, owner): (&[u8], Option<&dyn SlotsOwner>),
        out: &mut SegmentWriter<'_>,
    ) -> Result<Checkpointed, Error> {
        out.records.tables(&cut.tables);
        if let Some(owner) = owner {
            owner.save(&mut out.for_owner())?;
        }
        let mut entries = 0;
        for number in 0..self.shards.len() {
            self.save_shard(number, out, &mut entries)?;
        }
        for row in &cut.pools {
            out.records.pool(row);
            out.write_full()?;
        }
        for array in &cut.handles.arrays {
            out.records.array(array);
            out.write_full()?;
        }
        for map in &cut.handles.maps {
            out.records.map(map);
            out.write_full()?;
        }
        out.records.gone(&cut.handles.gone);
        self.log.write_cut()?;
        let since = if cut.is_whole { 0 } else { progress.epoch };
        let (blocks, sequence) = self.log.needed_blocks(since);
        out.records.blocks(&blocks);
        out.records.record(record);
        out.records.end();
        let segment = out.finish()?;
        let mut segments = if cut.is_whole {
            Vec::new()
        } else {
            progress.segments.clone()
        };
        segments.push(segment);
        let root = Root {
            schema_tag: saver.schema_tag,
            generation: progress.generation + 1,
            file_id: saver.file_id,
            capacity_slabs: saver.capacity_slabs,
            given_slabs: self.log.given_slabs(),
            sequence,
            epoch: cut.epoch,
            next_handle: cut.handles.next,
            has_slots: owner.is_some(),
            segments: segments.iter().map(|segment| segment.at).collect(),
        };
        self.sync(saver, progress)?;
        let slot = (progress.slot + 1) % ROOT_SLOTS;
        let bytes = root.to_bytes();
        self.log.root();
        let written = saver.file.write_at((slot * ROOT_BYTES) as u64, &bytes);
        written.map_err(|error| self.file_error(error))?;
        self.sync(saver, progress)?;
        let old = std::mem::replace(&mut progress.segments, segments);
        if cut.is_whole {
            // The root before this one is whole until it is overwritten.
            for segment in old {
                self.log.hold_places(&segment.places);
            }
        }
        (progress.generation, progress.slot, progress.epoch) = (root.generation, slot, cut.epoch);
        // In place of the root before it, whose places are used again from now on: damage to one of both loses
        // nothing. An error changes nothing: the checkpoint is complete, and the next one begins with this slot.
        let copy = (slot + 1) % ROOT_SLOTS;
        let _ = saver.file.write_at((copy * ROOT_BYTES) as u64, &bytes);
        Ok(Checkpointed {
            generation: root.generation,
            stopped: cut.stopped,
            written_bytes: 0,
            table_bytes: segment_bytes(&progress.segments),
            entries,
            is_whole: cut.is_whole,
        })
    }

    fn sync(&self, saver: &Saver, progress: &mut Progress) -> Result<(), Error> {
        saver.file.sync().map_err(|error| {
            // What the kernel could not write it may have forgotten.
            progress.is_failed = true;
            self.file_error(error)
        })
    }

    /// Saves what the checkpoint needs of one shard.
    fn save_shard(&self, number: usize, out: &mut SegmentWriter<'_>, entries: &mut u64) -> Result<(), Error> {
        let tables = self.shards[number].lock().tables.len();
        let mut saved = SavedRows::default();
        // First what came before the owner of slots had stored all: tables may tell of a later version.
        self.write_aside(number, out, entries)?;
        for at in 0..tables {
            let table = (at << self.shard_bits | number) as u32;
            let mut from = 0;
            while let Some(next) = self.save_slots(table, from, &mut saved)? {
                from = next;
            }
            *entries += saved.rows.len() as u64;
            self.write_rows(out, table, &mut saved)?;
            self.write_aside(number, out, entries)?;
        }
        Ok(())
    }

    fn write_rows(
        &self,
        out: &mut SegmentWriter<'_>,
        table: u32,
        saved: &mut SavedRows,
    ) -> Result<(), Error> {
        let SavedRows { rows, len_bytes } = saved;
        if rows.is_empty() {
            return Ok(());
        }
        let has_lengths = rows.iter().any(|row| row.len != *len_bytes);
        out.records.entries(table, self.is_wide, has_lengths, rows);
        rows.clear();
        out.write_full()
    }

    /// Saves some slots of a table, from `from` on. Gives where to go on; `None` at the end.
    fn save_slots(
        &self,
        number: u32,
        mut from: usize,
        saved: &mut SavedRows,
    ) -> Result<Option<usize>, Error> {
        let no_room = {
            let (shard, at) = self.shard_of(number);
            let mut shard = shard.lock();
            let now = shard.now;
            let mut left = STEP_SLOTS;
            loop {
                let Some(Some(table)) = shard.tables.get_mut(at) else {
                    return Ok(None);
                };
                let Some(slot) = table.next_needed(from, &now) else {
                    return Ok(None);
                };
                if left == 0 {
                    return Ok(Some(from));
                }
                left -= 1;
                let Some((entry, len)) = table.get(slot) else {
                    return Ok(None);
                };
                saved.len_bytes = table.len_bytes();
                let key = Key { table: number, slot };
                let value = match entry {
                    Entry::Empty => 0,
                    Entry::At(sector) => sector + 1,
                    Entry::Frame(frame) if shard.frames.get(frame).is_dirty() => {
                        match self.save_frame(&mut shard, key, frame) {
                            Ok(sector) => sector + 1,
                            Err(no_room) => break no_room,
                        }
                    }
                    Entry::Frame(frame) => shard.frames.get(frame).stored().map_or(0, |sector| sector + 1),
                };
                if let Some(Some(table)) = shard.tables.get_mut(at) {
                    table.note_saved(slot, &now);
                }
                saved.rows.push(Row {
                    slot: slot as u16,
                    len: len as u16,
                    value,
                });
                from = slot as usize + 1;
            }
        };
        self.make_room(no_room)?;
        Ok(Some(from))
    }

    /// Does what the log needs before a checkpoint appends more.
    pub(super) fn make_room(&self, no_room: NoRoom) -> Result<(), Error> {
        match no_room {
            NoRoom::Pending => self.log.write_pending().map(|_| ()),
            NoRoom::Space => Err(Error::Full {
                device: self.log.device(),
            }),
        }
    }

    /// Writes what threads put aside in a shard.
    fn write_aside(
        &self,
        number: usize,
        out: &mut SegmentWriter<'_>,
        entries: &mut u64,
    ) -> Result<(), Error> {
        let (mut saved, copies) = {
            let mut shard = self.shards[number].lock();
            (
                std::mem::take(&mut shard.saved),
                std::mem::take(&mut shard.copies),
            )
        };
        self.budget.give_back(saved.len() as u64 * SAVED_BYTES);
        let mut failed = None;
        for (key, data) in copies {
            self.budget.give_back(frames_data_bytes(data.len()));
            self.note_clean(data.len());
            while failed.is_none() {
                match self.log.append(Stream::Checkpoint, key.number(), &data, None) {
                    Ok(sector) => {
                        // Nobody but the checkpoint needs it.
                        self.log.kill(sector, data.len());
                        let row = Row {
                            slot: key.slot as u16,
                            len: data.len() as u16,
                            value: sector + 1,
                        };
                        saved.push((key, row));
                        break;
                    }
                    Err(no_room) => failed = self.make_room(no_room).err(),
                }
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        // Of one slot the later comes last, and counts.
        saved.sort_by_key(|(key, _)| (key.table, key.slot));
        *entries += saved.len() as u64;
        for group in saved.chunk_by(|(one, _), (other, _)| one.table == other.table) {
            let rows: Vec<Row> = group.iter().map(|(_, row)| *row).collect();
            let table = group.first().map_or(0, |(key, _)| key.table);
            out.records.entries(table, self.is_wide, true, &rows);
            out.write_full()?;
        }
        Ok(())
    }
}

impl FarHeap {
    /// A heap in an empty file, of which it takes at most `capacity_slabs` MiB and one. `schema_tag` is a
    /// number of the program for the layout of its types: [`Self::restore`] wants the same. An empty
    /// checkpoint is durable when this returns.
    ///
    /// # Errors
    /// `Config`; `Refused` where the file is not empty or in use; `Io`.
    pub fn create(
        file: impl CheckpointFile + 'static,
        capacity_slabs: u32,
        schema_tag: u64,
        config: &super::Config,
    ) -> Result<Self, Error> {
        create(Arc::new(file), capacity_slabs, schema_tag, false, config)
    }

    /// A heap without objects for a file with that root.
    pub(super) fn open_core(
        file: Arc<dyn CheckpointFile>,
        root: &Root,
        slot: usize,
        config: &super::Config,
    ) -> Result<Core, Error> {
        let least = super::MEMORY_MIN_BYTES + FIXED_BYTES;
        if config.memory_limit_bytes < least {
            return Err(Error::Config(format!(
                "a memory limit of {} bytes is too small for checkpoints: {least} is the least",
                config.memory_limit_bytes
            )));
        }
        let reserve = reserve_blocks(config.memory_limit_bytes);
        if crate::log::places(root.capacity_slabs) < 2 * reserve as u64 {
            return Err(Error::Config(format!(
                "{} slabs are too few for checkpoints of {} bytes of memory: {} are the least",
                root.capacity_slabs,
                config.memory_limit_bytes,
                2 * reserve as u64 / crate::log::places(1) + 1
            )));
        }
        let store = FileStore::new(Arc::clone(&file), root.capacity_slabs, root.given_slabs);
        let saver = Saver {
            file,
            schema_tag: root.schema_tag,
            file_id: root.file_id,
            capacity_slabs: root.capacity_slabs,
            gate: Gate::new(),
            handles: Mutex::default(),
            tables: Mutex::default(),
            progress: Mutex::new(Progress {
                generation: root.generation,
                slot,
                epoch: root.epoch,
                segments: Vec::new(),
                is_failed: false,
                is_making: false,
            }),
            #[cfg(test)]
            fault: Mutex::default(),
        };
        Core::build(Box::new(store), config, Some(saver))
    }

    /// Makes a checkpoint: the heap as it is at one moment of this call, while other threads go on. Durable
    /// when this returns; until then a crash leaves the one before. `record` is for the program: with the
    /// names of its handles it finds them again.
    ///
    /// # Errors
    /// `NoCheckpoints`, `TooLarge` for a long record, `Full`, `Io`: the one before is the last. After a
    /// failed sync all others fail.
    pub fn checkpoint(&self, record: &[u8]) -> Result<Checkpointed, Error> {
        self.core().checkpoint(record, None)
    }

    /// Keeps changes of this thread together, as long as the result lives: a checkpoint has all or none.
    /// Checkpoints wait meanwhile.
    pub fn together(&self) -> Together<'_> {
        self.core().together()
    }
}

/// A heap in an empty file; `has_slots`: somebody outside will have slots of it.
pub(super) fn create(
    file: Arc<dyn CheckpointFile>,
    capacity_slabs: u32,
    schema_tag: u64,
    has_slots: bool,
    config: &super::Config,
) -> Result<FarHeap, Error> {
    lock(&*file)?;
    let len_bytes = file.len_bytes().map_err(|error| io_error(&*file, error))?;
    if len_bytes != 0 {
        return Err(Error::Refused {
            file: file.name(),
            reason: Refusal::NotEmpty { len_bytes },
        });
    }
    let root = Root {
        schema_tag,
        generation: 1,
        file_id: RandomState::new().hash_one(0u64),
        capacity_slabs,
        given_slabs: 0,
        sequence: 0,
        epoch: 0,
        next_handle: 1,
        has_slots,
        segments: Vec::new(),
    };
    let core = FarHeap::open_core(Arc::clone(&file), &root, 0, config)?;
    file.write_at(0, &root.to_bytes().repeat(ROOT_SLOTS))
        .and_then(|()| file.sync())
        .map_err(|error| io_error(&*file, error))?;
    core.start(config)
}

pub(super) fn lock(file: &dyn CheckpointFile) -> Result<(), Error> {
    file.lock().map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => Error::Refused {
            file: file.name(),
            reason: Refusal::InUse,
        },
        _ => io_error(file, error),
    })
}
