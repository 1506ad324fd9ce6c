//! Slots of somebody outside of the heap, who keeps newer bytes of their objects: a part in checkpoints.
//!
//! At the cut the owner stops what could change its objects. What it has of them then, and the slots do not,
//! it stores afterwards as what they had *before* the cut: it goes into an object in memory, which the
//! checkpoint has not come to yet, or straight into the checkpoint's blocks. That takes no memory, so that it
//! works where everything is full of what only a checkpoint can let out.

use super::segments::SegmentWriter;
use super::{Checkpointed, Config, Core, FarHeap, Intent, Shard, save};
use crate::checkpoint::SlotsRecord;
use crate::error::Error;
use crate::file::CheckpointFile;
use crate::layout;
use crate::log::Stream;
use crate::table::{Entry, Key};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Who has the slots of a heap, and bytes of their objects that the slots lack.
pub trait SlotsOwner {
    /// Stops all that stores into slots, occupies or vacates them, and all that changes what is newer than
    /// they are. Then calls `cut` once, which gives the number of the epoch that begins, and lets all go on.
    /// `is_whole`: all slots are to be told of in `save`, not only those that changed.
    ///
    /// # Errors
    /// Why that cannot be; `cut` was not called then.
    fn cut(&self, is_whole: bool, cut: &mut dyn FnMut() -> u32) -> Result<(), Error>;

    /// Stores what the slots lacked at the cut ([`write_of`](crate::FarSlots::write_of)), and tells of the
    /// slots as they were then. Until this returns, an object that gets such bytes must not be changed in
    /// another way.
    ///
    /// # Errors
    /// What keeps it from being stored. The checkpoint fails.
    fn save(&self, out: &mut SlotsOut<'_, '_>) -> Result<(), Error>;

    /// The checkpoint of the last cut is complete, or failed: what was told is told again in the next one.
    fn end(&self, is_complete: bool);
}

/// Slots of a checkpoint, and the lengths of their objects, the shortest and the longest.
pub(crate) type LoadedSlots = (SlotsRecord, RangeInclusive<usize>);

/// Where an owner tells of its slots.
pub struct SlotsOut<'a, 'b>(&'a mut SegmentWriter<'b>);

impl std::fmt::Debug for SlotsOut<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlotsOut").finish_non_exhaustive()
    }
}

impl SlotsOut<'_, '_> {
    /// Writes what [`record`](crate::FarSlots::record) gave.
    ///
    /// # Errors
    /// `Io`, `Full`.
    pub fn put(&mut self, record: &SlotsRecord) -> Result<(), Error> {
        self.0.slots(record)
    }
}

/// The right to make slots in a heap, and its checkpoints, for who keeps track of the slots: a checkpoint
/// with slots that nobody told of could not be restored. There is one for each heap with checkpoints; who has
/// the heap alone can make none.
#[derive(Debug)]
pub struct SlotsHeap(FarHeap);

impl SlotsHeap {
    /// Of a heap without checkpoints.
    ///
    /// # Errors
    /// `Config` of one with checkpoints.
    pub fn new(heap: FarHeap) -> Result<Self, Error> {
        if heap.core().has_checkpoints() {
            return Err(Error::Config(
                "slots of a heap with checkpoints are made by who made the heap for them".into(),
            ));
        }
        Ok(Self(heap))
    }

    /// Of a heap that was just made, or restored, for slots.
    pub(crate) fn of_owner(heap: FarHeap) -> Self {
        Self(heap)
    }

    /// As [`FarHeap::checkpoint`]; `owner` has the slots.
    ///
    /// # Errors
    /// As [`FarHeap::checkpoint`]; what the owner says.
    pub fn checkpoint_slots(&self, record: &[u8], owner: &dyn SlotsOwner) -> Result<Checkpointed, Error> {
        self.0.core().checkpoint(record, Some(owner))
    }
}

impl std::ops::Deref for SlotsHeap {
    type Target = FarHeap;

    fn deref(&self) -> &FarHeap {
        &self.0
    }
}

/// What is known of the owner of a heap's slots.
#[derive(Debug, Default)]
pub(super) struct Owned {
    has_owner: AtomicBool,
    /// Bytes in the log that the owner's objects may be newer by.
    newer_bytes: AtomicU64,
}

impl Owned {
    pub(super) fn newer_bytes(&self) -> u64 {
        self.newer_bytes.load(Ordering::Relaxed)
    }
}

impl Core {
    pub(crate) fn has_checkpoints(&self) -> bool {
        self.saver.is_some()
    }

    pub(crate) fn has_owner(&self) -> bool {
        self.owned.has_owner.load(Ordering::Relaxed)
    }

    /// From now on somebody outside has the slots, and at most so many objects of 4 KiB newer than they are.
    pub(super) fn set_owner(&self, newer_objects: usize) {
        let each = layout::footprint_bytes(varve_far::PAGE_BYTES);
        self.owned.has_owner.store(true, Ordering::Relaxed);
        self.owned
            .newer_bytes
            .store((newer_objects * each) as u64, Ordering::Relaxed);
    }

    /// A name for new slots; 0 where there are no checkpoints.
    pub(crate) fn name_slots(&self) -> Result<u64, Error> {
        match &self.saver {
            None => Ok(0),
            Some(saver) if self.has_owner() => Ok(saver.handles.lock().name_slots()),
            Some(_) => Err(Error::Config(
                "slots are in no checkpoint, and this heap has checkpoints".into(),
            )),
        }
    }

    /// They are no more.
    pub(crate) fn end_slots(&self, handle: u64) {
        if let Some(saver) = self.saver.as_ref().filter(|_| handle != 0) {
            saver.handles.lock().end_slots(handle);
        }
    }

    /// Stores a part of an object as it was in an epoch: before the last cut, if that is an earlier one.
    pub(crate) fn write_of(
        &self,
        key: Key,
        offset_bytes: usize,
        bytes: &[u8],
        epoch: u32,
    ) -> Result<(), Error> {
        let is_whole = offset_bytes == 0 && bytes.len() >= self.stored_bytes(key)?;
        let intent = if is_whole { Intent::Replace } else { Intent::Change };
        loop {
            let put = |data: &mut [u8]| put_part(data, offset_bytes, bytes);
            let is_done = self.write_in(key, intent, epoch, put)?.is_some();
            if is_done || self.write_before(key, offset_bytes, bytes, epoch)? {
                return Ok(());
            }
        }
    }

    /// Stores a part of an object as it was before the last cut. False where no checkpoint needs that.
    fn write_before(&self, key: Key, offset_bytes: usize, bytes: &[u8], epoch: u32) -> Result<bool, Error> {
        let mut read: Option<(u64, u32, Vec<u8>)> = None;
        loop {
            let (mut shard, at) = self.lock(key);
            if !shard.has_ended(epoch) {
                return Ok(false);
            }
            let (entry, len) = shard.get(at, key.slot).ok_or(Error::NotAllocated(key.number()))?;
            let is_whole = offset_bytes == 0 && bytes.len() >= len;
            let stored = match entry {
                Entry::Frame(frame) => {
                    self.change_before(&mut shard, key, frame, offset_bytes, bytes);
                    return Ok(true);
                }
                Entry::Empty => None,
                Entry::At(sector) => Some(sector),
            };
            let mut data = vec![0; len];
            if let Some(sector) = stored.filter(|_| !is_whole) {
                let is_there = |(of, sequence, _): &(u64, u32, _)| {
                    *of == sector && self.log.is_current(sector, *sequence)
                };
                let Some((_, _, there)) = read.take().filter(is_there) else {
                    drop(shard);
                    let (sequence, result) = self.log.read(key.number(), sector, &mut data);
                    if self.log.is_current(sector, sequence) {
                        result.inspect_err(|error| self.log.count(error))?;
                        read = Some((sector, sequence, data));
                    }
                    continue;
                };
                data = there;
            }
            put_part(&mut data, offset_bytes, bytes);
            match self.log.append(Stream::Checkpoint, key.number(), &data, None) {
                Ok(sector) => {
                    self.note_before(&mut shard, at, key, len, sector);
                    shard.set(at, key.slot, Entry::At(sector));
                    if let Some(old) = stored {
                        self.log.kill(old, len);
                    }
                    return Ok(true);
                }
                Err(no_room) => {
                    drop(shard);
                    self.make_room(no_room)?;
                }
            }
        }
    }

    /// Changes an object in memory before the last cut: the checkpoint comes to it later.
    fn change_before(&self, shard: &mut Shard, key: Key, frame: u32, offset_bytes: usize, bytes: &[u8]) {
        let (at, now) = (key.table as usize >> self.shard_bits, shard.now);
        if let Some(Some(table)) = shard.tables.get_mut(at) {
            table.mark_before(key.slot, &now);
        }
        let frame = shard.frames.get_mut(frame);
        frame.touch();
        if !frame.is_dirty() {
            self.note_dirty(frame.data().len());
        }
        let (data, stored) = frame.dirty();
        let len = data.len();
        put_part(data, offset_bytes, bytes);
        if let Some(sector) = stored {
            self.log.kill(sector, len);
        }
    }

    /// Notes that a slot had this sector at the last cut.
    fn note_before(&self, shard: &mut Shard, at: usize, key: Key, len: usize, sector: u64) {
        let now = shard.now;
        if let Some(Some(table)) = shard.tables.get_mut(at) {
            table.mark_before(key.slot, &now);
            table.note_saved(key.slot, &now);
        }
        self.put_aside(shard, key, len, sector + 1);
    }
}

/// As much of a part as there is room for.
fn put_part(data: &mut [u8], offset_bytes: usize, bytes: &[u8]) {
    let data = data.get_mut(offset_bytes..).unwrap_or_default();
    let len = data.len().min(bytes.len());
    data[..len].copy_from_slice(&bytes[..len]);
}

/// Heaps whose slots somebody outside has.
impl FarHeap {
    /// As [`Self::create`], for an owner of slots who has at most `newer_objects` objects of 4 KiB newer than
    /// they are.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_for_slots(
        file: impl CheckpointFile + 'static,
        capacity_slabs: u32,
        schema_tag: u64,
        newer_objects: usize,
        config: &Config,
    ) -> Result<SlotsHeap, Error> {
        let heap = save::create(Arc::new(file), capacity_slabs, schema_tag, true, config)?;
        heap.core().set_owner(newer_objects);
        Ok(SlotsHeap::of_owner(heap))
    }

    /// As [`Self::restore`], with the records of the checkpoint's slots, and the lengths of their objects.
    pub(crate) fn restore_with_slots(
        file: impl CheckpointFile + 'static,
        schema_tag: u64,
        newer_objects: usize,
        config: &Config,
    ) -> Result<(Self, Vec<u8>, Vec<LoadedSlots>), Error> {
        let (heap, loaded) = super::restore::restore(Arc::new(file), schema_tag, true, config)?;
        heap.core().set_owner(newer_objects);
        Ok((heap, loaded.record, loaded.slots))
    }

    /// Cuts that were made.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.core().shards[0].lock().now.epoch
    }
}

impl<'b> SegmentWriter<'b> {
    pub(super) fn for_owner(&mut self) -> SlotsOut<'_, 'b> {
        SlotsOut(self)
    }
}
