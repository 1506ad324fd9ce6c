//! Putting and removing objects.

use super::StoreError;
use super::away;
use super::journal::Change;
use super::log::in_units;
use super::object::{
    FRAME_CONTENT, INLINE_BYTES, KEY_MAX, META_MAX, Record, TAGS_MAX, frames_bytes, head_bytes,
    home_in_table, tag_of, write_frame,
};
use super::shard::{PENDING_MAX, Shard, State, Writer};
use super::stats::Stats;
use crate::hash::KeyHash;
use crate::index::{Demoted, Entry, Index, Lap, LogPoint, Place, Set};
use crate::policy::{Policy, Shape};
use lru::LruCache;
use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Metadata, tags, host and expiry of an object.
#[derive(Debug, Clone, Copy, Default)]
pub struct PutOptions<'a> {
    /// Metadata, given back with the object; response headers for instance.
    pub meta: &'a [u8],
    /// Tags by which it can be purged.
    pub tags: &'a [&'a [u8]],
    /// A host by which it can be purged.
    pub host: Option<&'a [u8]>,
    /// Expiry, seconds since 1970; 0: never.
    pub expires_s: u64,
}

/// The outcome of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// It is in the cache; durable after the next flush.
    Stored {
        /// The number of the write.
        version: u64,
    },
    /// The admission policy refused it. An older version is no longer served either.
    NotAdmitted,
    /// It is larger than half the log.
    TooLarge,
    /// The device was given up, or the store was closed.
    Unavailable,
}

/// A slot of a set as `Basic` and `Set` cache it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SlotInfo {
    pub tag: u8,
    pub version: u64,
}

/// Sets that `Basic` and `Set` read most recently: neither the write that follows a miss needs a second read,
/// nor a second lookup before it. Not an index: its size is fixed.
pub(super) struct Recent {
    sets: LruCache<u64, Vec<SlotInfo>>,
    /// The blocks of some of them, on a device that moves writes: all are written where one is, so that the
    /// set stays in one place.
    blocks: Option<LruCache<u64, Vec<Arc<Vec<u8>>>>>,
    /// Counters of changes of sets, so that a read from before a change is not mistaken for the state after
    /// it.
    changes: [u32; 256],
}

const RECENT_SETS: NonZeroUsize = NonZeroUsize::new(256).expect("not zero");
/// Sets whose blocks are kept: 8 MiB with the usual sets of 64 KiB.
const RECENT_BLOCKS: NonZeroUsize = NonZeroUsize::new(128).expect("not zero");

impl Recent {
    /// Nothing yet; `whole_sets`: keeps blocks, so that sets are written as a whole.
    pub fn new(whole_sets: bool) -> Self {
        Self {
            sets: LruCache::new(RECENT_SETS),
            blocks: whole_sets.then(|| LruCache::new(RECENT_BLOCKS)),
            changes: [0; 256],
        }
    }

    /// Whether a bin of the set can be written without reading the set.
    fn knows(&self, set: u64) -> bool {
        let blocks = self.blocks.as_ref();
        self.sets.contains(&set) && blocks.is_none_or(|blocks| blocks.contains(&set))
    }

    /// The blocks of a set, if they are known; the one of `slot` is `block` from now on.
    fn renew(&mut self, set: u64, slot: usize, block: &Arc<Vec<u8>>) -> &[Arc<Vec<u8>>] {
        let known = self.blocks.as_mut().and_then(|blocks| blocks.get_mut(&set));
        known.map_or(&[], |blocks| {
            blocks[slot] = Arc::clone(block);
            blocks
        })
    }

    /// Whether no object of a set has this tag; false if the set was not read recently.
    pub fn lacks(&mut self, set: u64, tag: u8) -> bool {
        let slots = self.sets.get(&set);
        slots.is_some_and(|slots| slots.iter().all(|slot| slot.tag != tag))
    }

    fn change_count(&self, set: u64) -> u32 {
        self.changes[set as usize % 256]
    }

    fn changed(&mut self, set: u64) {
        let count = &mut self.changes[set as usize % 256];
        *count = count.wrapping_add(1);
    }
}

/// Whether an entry's object can still be in the log.
pub(super) fn lives(lap: &Lap, shape: Shape, entry: &Entry) -> bool {
    match entry.place {
        _ if !shape.has_generations() => true,
        Some(place) => lap.point(place).is_some(),
        None => lap.may_live(entry.generation),
    }
}

impl State {
    /// Lets the block of a bin wait to be written, and with it the others of its set, if they are known and
    /// the device moves writes.
    fn renew_bin(&mut self, number: u64, bin: u64, slot: usize, block: Vec<u8>) {
        let block = Arc::new(block);
        self.recent.changed(number);
        for (other, block) in (bin - slot as u64..).zip(self.recent.renew(number, slot, &block)) {
            self.pending.entry(other).or_insert_with(|| Arc::clone(block));
        }
        self.pending.insert(bin, block);
    }
}

/// An object to put.
pub struct Item<'a> {
    /// Its whole key.
    pub key: &'a [u8],
    /// The key's hash.
    pub hash: KeyHash,
    /// Its body.
    pub body: &'a [u8],
    /// Its metadata, tags, host and expiry.
    pub options: PutOptions<'a>,
}

impl Shard {
    /// Puts an object; an older version of it is no longer served.
    ///
    /// # Errors
    /// `TooLong`. Errors of the device give it up, and the outcome says so.
    pub fn put(&self, item: &Item<'_>) -> Result<PutOutcome, StoreError> {
        Ok(self.put_related(std::slice::from_ref(item))?[0])
    }

    /// Puts objects that will be requested together. Policies with prefetch write them side by side, as far
    /// as they fit a segment, so that one read returns all of them.
    ///
    /// # Errors
    /// `TooLong`; no object is put then.
    pub fn put_related(&self, items: &[Item<'_>]) -> Result<Vec<PutOutcome>, StoreError> {
        for item in items {
            check_lengths(item.key, &item.options)?;
        }
        items.iter().for_each(|item| self.load_unless_known(item.hash));
        let mut writer = self.writer.lock();
        Stats::count(&self.stats.puts, items.len() as u64);
        if self.is_failed() || writer.closed {
            return Ok(vec![PutOutcome::Unavailable; items.len()]);
        }
        let done = self.guarded(&mut writer, |shard, writer| shard.put_locked(writer, items));
        match done {
            Ok(outcomes) => Ok(outcomes),
            Err(StoreError::Device(_) | StoreError::JournalFull) => {
                Ok(vec![PutOutcome::Unavailable; items.len()])
            }
            Err(other) => Err(other),
        }
    }

    fn put_locked(&self, writer: &mut Writer, items: &[Item<'_>]) -> Result<Vec<PutOutcome>, StoreError> {
        let mut outcomes = Vec::with_capacity(items.len());
        let together = self.group_bytes(items);
        let mut group_end = None;
        for item in items {
            if !writer.door.admits(item.hash) {
                self.remove_locked(writer, item.key, item.hash)?;
                outcomes.push(PutOutcome::NotAdmitted);
                continue;
            }
            let mut record = self.new_record(writer, item.key, &item.options);
            record.head.body_len = item.body.len() as u64;
            let content = [item.options.meta, item.body].concat();
            let outcome = if self.layout.shape().policy().has_table() {
                self.put_in_table(writer, record, &content, item.hash)?
            } else {
                if let (Some(bytes), None) = (together, group_end) {
                    let point = self.make_room(writer, bytes)?;
                    group_end = Some(LogPoint(point.0 + in_units(&self.layout, bytes)));
                }
                self.put_in_log(writer, record, &content, item.hash, group_end)?
            };
            if matches!(outcome, PutOutcome::Stored { .. }) {
                self.count_admitted(item.key.len() + content.len());
            }
            outcomes.push(outcome);
            self.checkpoint_if_due(writer)?;
        }
        self.after_put(writer)?;
        Ok(outcomes)
    }

    /// Does the flushes and checkpoints that are due after a put.
    pub(super) fn after_put(&self, writer: &mut Writer) -> Result<(), StoreError> {
        if self.state.lock().pending.len() >= PENDING_MAX {
            self.write_pending()?;
        }
        if writer.last_flush.elapsed() >= self.options.flush_interval {
            self.flush_locked(writer)?;
        }
        self.checkpoint_if_due(writer)
    }

    pub(super) fn count_admitted(&self, bytes: usize) {
        Stats::count(&self.stats.admitted, 1);
        Stats::count(&self.stats.admitted_bytes, bytes as u64);
    }

    /// Bytes in the log of all items, if there are several and they are to be read together.
    fn group_bytes(&self, items: &[Item<'_>]) -> Option<u64> {
        if items.len() < 2 || !self.layout.shape().policy().prefetches() {
            return None;
        }
        let bytes = items.iter().map(|item| {
            let tags = item.options.tags.len() + usize::from(item.options.host.is_some());
            let content = item.options.meta.len() + item.body.len();
            self.log_bytes(head_bytes(item.key.len(), tags), content as u64)
        });
        Some(bytes.sum()).filter(|&bytes| bytes <= u64::from(self.layout.segment_bytes))
    }

    /// Bytes of a record in the log with its frames.
    fn log_bytes(&self, head: usize, content: u64) -> u64 {
        let unit = u64::from(self.layout.unit_bytes);
        let inline = content.min((INLINE_BYTES - head) as u64);
        (head as u64 + inline).next_multiple_of(unit) + frames_bytes(content - inline).next_multiple_of(unit)
    }

    pub(super) fn new_record(&self, writer: &mut Writer, key: &[u8], options: &PutOptions<'_>) -> Record {
        let mut tags: Vec<_> = options.tags.iter().map(|tag| self.tag_hash(b"t:", tag)).collect();
        tags.extend(options.host.map(|host| self.tag_hash(b"h:", host)));
        let mut record = Record::new(self.layout.store_id, writer.next_version(), key, &tags);
        record.head.meta_len = options.meta.len() as u32;
        record.head.written_s = self.now();
        record.head.expires_s = options.expires_s;
        record
    }

    fn put_in_log(
        &self,
        writer: &mut Writer,
        mut record: Record,
        content: &[u8],
        hash: KeyHash,
        group_end: Option<LogPoint>,
    ) -> Result<PutOutcome, StoreError> {
        let head = record.head_bytes();
        let bytes = self.log_bytes(head, content.len() as u64);
        if bytes > u64::from(self.layout.segment_bytes) {
            return self.put_large(writer, record, content, hash);
        }
        let point = self.make_room(writer, bytes)?;
        let (inline, rest) = content.split_at(content.len().min(INLINE_BYTES - head));
        record.head.home = point.0;
        let after = in_units(&self.layout, (head + inline.len()) as u64);
        record.head.tail = if rest.is_empty() { 0 } else { point.0 + after };
        let mut out = Vec::with_capacity(bytes as usize);
        record.write(inline, &mut out);
        out.resize((after * u64::from(self.layout.unit_bytes)) as usize, 0);
        write_frames(record.head.version, rest, &mut out);
        let own_end = LogPoint(point.0 + in_units(&self.layout, bytes));
        // A checkpoint between two objects of a group may have moved the second.
        let end = group_end.filter(|end| *end >= own_end).unwrap_or(own_end);
        self.fill_segment(&mut self.state.lock(), &out);
        self.index_log(writer, hash, point, self.prefetch_blocks(point, end));
        Ok(PutOutcome::Stored {
            version: record.head.version,
        })
    }

    /// Blocks from one point to another, as an index entry keeps them: 0 if they exceed its eight bits.
    fn prefetch_blocks(&self, from: LogPoint, to: LogPoint) -> u8 {
        let bytes = (to.0 - from.0) * u64::from(self.layout.unit_bytes);
        u8::try_from(bytes.div_ceil(u64::from(self.layout.block_bytes))).unwrap_or(0)
    }

    /// Adds an object in the log to the index.
    pub(super) fn index_log(&self, writer: &mut Writer, hash: KeyHash, point: LogPoint, prefetch: u8) {
        let shape = self.layout.shape();
        let number = hash.set(self.layout.sets);
        let state = &mut *self.state.lock();
        state.mutate(hash);
        let lap = state.lap;
        let prefetch = if shape.policy().prefetches() { prefetch } else { 0 };
        let place = lap.place(point, prefetch);
        let mut set = state.index.get(number).unwrap_or_else(|| Set::empty(shape));
        let slot = set.victim(hash.tag(), |entry| !lives(&lap, shape, entry));
        let inserted = set.insert_at(slot, hash.tag(), place);
        self.note_insert(
            state,
            writer,
            number,
            &set,
            slot,
            hash.tag(),
            place,
            inserted.demoted,
        );
    }

    /// Records the effects of an insertion: the set, the journal entry, and positions that left memory.
    #[expect(
        clippy::too_many_arguments,
        reason = "one insertion, told once, from two places"
    )]
    pub(super) fn note_insert(
        &self,
        state: &mut super::shard::State,
        writer: &mut Writer,
        number: u64,
        set: &Set,
        slot: usize,
        tag: u8,
        place: Place,
        demoted: Option<Demoted>,
    ) {
        if self.layout.shape().policy().has_position_file() {
            state.waiting.forget(number as u32, slot);
            if let Some(demoted) = demoted {
                state.waiting.add(number as u32, demoted.slot, demoted.place);
            }
        }
        state.index.put(number, set);
        writer.dirty = true;
        if self.is_indexed() {
            let (set, slot) = (number as u32, slot as u8);
            writer.journal.waiting.push(Change::Insert {
                set,
                slot,
                tag,
                place,
            });
        }
    }

    fn put_in_table(
        &self,
        writer: &mut Writer,
        mut record: Record,
        content: &[u8],
        hash: KeyHash,
    ) -> Result<PutOutcome, StoreError> {
        let inline = content
            .len()
            .min(self.layout.block_bytes as usize - record.head_bytes());
        let (inline, rest) = content.split_at(inline);
        if frames_bytes(rest.len() as u64) > u64::from(self.layout.segment_bytes) {
            return self.put_large(writer, record, content, hash);
        }
        if !rest.is_empty() {
            let mut frames = Vec::with_capacity(rest.len() + 64);
            write_frames(record.head.version, rest, &mut frames);
            record.head.tail = self.make_room(writer, frames.len() as u64)?.0;
            self.fill_segment(&mut self.state.lock(), &frames);
        }
        self.put_bin(writer, record, inline, hash)
    }

    /// Writes a head with the content beside it into the best bin of its set.
    pub(super) fn put_bin(
        &self,
        writer: &mut Writer,
        mut record: Record,
        inline: &[u8],
        hash: KeyHash,
    ) -> Result<PutOutcome, StoreError> {
        let shape = self.layout.shape();
        let number = hash.set(self.layout.sets);
        let slot = self.choose_slot(number, hash.tag())?;
        let bin = number * shape.ways() as u64 + slot as u64;
        record.head.home = home_in_table(bin);
        let mut block = Vec::with_capacity(self.layout.block_bytes as usize);
        record.write(inline, &mut block);
        block.resize(self.layout.block_bytes as usize, 0);
        let state = &mut *self.state.lock();
        state.mutate(hash);
        state.renew_bin(number, bin, slot, block);
        let version = record.head.version;
        if let Some(slots) = state.recent.sets.get_mut(&number) {
            slots[slot] = SlotInfo {
                tag: hash.tag(),
                version,
            };
        }
        if let Some(mut set) = state.index.get(number) {
            set.insert_at(slot, hash.tag(), Place::default());
            self.note_insert(
                state,
                writer,
                number,
                &set,
                slot,
                hash.tag(),
                Place::default(),
                None,
            );
        }
        writer.dirty = true;
        Ok(PutOutcome::Stored { version })
    }

    /// Reads the set of a hash before the writer's lock is taken, if the set has to be read to choose a bin:
    /// others go on meanwhile.
    fn load_unless_known(&self, hash: KeyHash) {
        let shape = self.layout.shape();
        let number = hash.set(self.layout.sets);
        if shape.policy() != Policy::Set || self.is_failed() || self.state.lock().recent.knows(number) {
            return;
        }
        if let Err(error) = self.load_set(number, true) {
            self.count_read_error(&error);
        }
    }

    /// Chooses the bin of a set for an object: that of its old version, an empty one, or the oldest.
    fn choose_slot(&self, number: u64, tag: u8) -> Result<usize, StoreError> {
        if self.layout.shape().ways() == 1 {
            return Ok(0);
        }
        self.spill()?;
        for _ in 0..2 {
            {
                let mut state = self.state.lock();
                if let Some(set) = state.index.get(number) {
                    return Ok(set.victim(tag, |_| false));
                }
                if let Some(slots) = state.recent.sets.get(&number) {
                    let by_tag = |tag| slots.iter().position(|slot: &SlotInfo| slot.tag == tag);
                    let oldest = || (0..slots.len()).min_by_key(|&slot| slots[slot].version);
                    return Ok(by_tag(tag).or_else(|| by_tag(0)).or_else(oldest).unwrap_or(0));
                }
            }
            if self.load_left(number, true)?.is_none() {
                self.load_set(number, true)?;
            }
        }
        // Not reached: the writer lock is held, so the loaded slots stay.
        Ok(0)
    }

    /// Brings a set that left memory back from the file of sets; `None` if it is not there.
    /// The set stays in memory; for a lookup only if there is room for those that leave for it.
    pub(super) fn load_left(&self, number: u64, for_put: bool) -> Result<Option<Set>, StoreError> {
        if !self.has_file_of_sets() {
            return Ok(None);
        }
        let (before, made) = {
            let mut state = self.state.lock();
            if let Some(set) = state.index.get(number) {
                return Ok(Some(set));
            }
            (state.recent.change_count(number), state.index_made)
        };
        Stats::count(&self.stats.position_reads, 1);
        let Some(set) = away::read(&*self.device, &self.layout, made, number as u32)? else {
            return Ok(None);
        };
        let state = &mut *self.state.lock();
        if let Some(now) = state.index.get(number) {
            return Ok(Some(now));
        }
        // Whoever changed it meanwhile had it in memory, and it may have left again since.
        if state.recent.change_count(number) != before || state.index_made != made {
            return Ok(None);
        }
        if for_put || !self.has_too_many_left(state) {
            state.index.put(number, &set);
        }
        Ok(Some(set))
    }

    /// Reads a set's bins and caches their slots, unless the set changed meanwhile; for a lookup only if
    /// there is room for the sets that leave memory for it.
    pub(super) fn load_set(&self, number: u64, for_put: bool) -> Result<Vec<u8>, StoreError> {
        let shape = self.layout.shape();
        let before = self.state.lock().recent.change_count(number);
        let set_bytes = self.layout.set_disk_bytes();
        let mut bytes = vec![0; set_bytes as usize];
        let pending = self.pending_of(number);
        let counter = match for_put {
            true => &self.stats.set_reads,
            false => &self.stats.lookup_reads,
        };
        Stats::count(counter, 1);
        self.device
            .read_at(self.layout.table.off + number * set_bytes, &mut bytes)?;
        let block_bytes = self.layout.block_bytes as usize;
        for (slot, block) in bytes.chunks_exact_mut(block_bytes).enumerate() {
            if let Some(new) = pending.iter().find(|(bin, _)| *bin == slot) {
                block.copy_from_slice(&new.1);
            }
        }
        let first = number * shape.ways() as u64;
        let secret = self.layout.secret();
        let slots: Vec<_> = bytes
            .chunks_exact(block_bytes)
            .enumerate()
            .map(|(slot, block)| {
                let record = Record::parse(self.layout.store_id, block);
                let mine = record.filter(|record| record.head.home == home_in_table(first + slot as u64));
                mine.map_or(SlotInfo::default(), |record| SlotInfo {
                    tag: tag_of(&secret, &record),
                    version: record.head.version,
                })
            })
            .collect();
        let state = &mut *self.state.lock();
        if state.recent.change_count(number) == before {
            match shape.policy() {
                Policy::Basic | Policy::Set => {
                    state.recent.sets.put(number, slots);
                    if let Some(known) = &mut state.recent.blocks {
                        let blocks = bytes.chunks_exact(block_bytes);
                        known.put(number, blocks.map(|block| Arc::new(block.to_vec())).collect());
                    }
                }
                _ if state.index.get(number).is_none() && (for_put || !self.has_too_many_left(state)) => {
                    state.index.put(number, &set_of(shape, &slots));
                }
                _ => {}
            }
        }
        Ok(bytes)
    }

    /// The device offset of bins side by side, and their bytes.
    fn joined<'b>(&self, run: &'b [(u64, Arc<Vec<u8>>)]) -> (u64, Cow<'b, [u8]>) {
        let off = self.layout.table.off + run[0].0 * u64::from(self.layout.block_bytes);
        let bytes = match run {
            [(_, block)] => Cow::Borrowed(block.as_slice()),
            run => {
                let blocks: Vec<&[u8]> = run.iter().map(|(_, block)| block.as_slice()).collect();
                Cow::Owned(blocks.concat())
            }
        };
        (off, bytes)
    }

    /// Returns the waiting bins of a set, by slot.
    fn pending_of(&self, number: u64) -> Vec<(usize, Arc<Vec<u8>>)> {
        let ways = self.layout.shape().ways() as u64;
        let state = self.state.lock();
        let bins = state.pending.range(number * ways..(number + 1) * ways);
        bins.map(|(bin, block)| ((bin % ways) as usize, Arc::clone(block)))
            .collect()
    }

    /// Writes the waiting bins in order of device offset, those side by side at once. They stay readable
    /// meanwhile.
    pub(super) fn write_pending(&self) -> Result<(), StoreError> {
        let waiting: Vec<_> = {
            let state = self.state.lock();
            state
                .pending
                .iter()
                .map(|(bin, block)| (*bin, Arc::clone(block)))
                .collect()
        };
        let runs = waiting.chunk_by(|(bin, _), (next, _)| bin + 1 == *next);
        let runs: Vec<(u64, Cow<'_, [u8]>)> = runs.map(|run| self.joined(run)).collect();
        let pieces: Vec<(u64, &[u8])> = runs.iter().map(|(off, bytes)| (*off, &**bytes)).collect();
        let bytes: usize = pieces.iter().map(|(_, bytes)| bytes.len()).sum();
        Stats::count(&self.stats.written_bytes, bytes as u64);
        Stats::count(&self.stats.bin_writes, pieces.len() as u64);
        self.device.write_scattered(&pieces)?;
        let mut state = self.state.lock();
        for (bin, block) in waiting {
            // A reader that began before the write finished must not cache its result as current.
            state.recent.changed(bin / self.layout.shape().ways() as u64);
            if state
                .pending
                .get(&bin)
                .is_some_and(|now| Arc::ptr_eq(now, &block))
            {
                state.pending.remove(&bin);
            }
        }
        Ok(())
    }

    /// Removes an object. It is no longer served; durable after the next flush. With an index that keeps no
    /// keys, another object with the same tag may be removed with it.
    ///
    /// # Errors
    /// The device failed; it is given up.
    pub fn remove(&self, key: &[u8], hash: KeyHash) -> Result<(), StoreError> {
        let mut writer = self.writer.lock();
        if self.is_failed() || writer.closed {
            return Ok(());
        }
        Stats::count(&self.stats.removed, 1);
        self.guarded(&mut writer, |shard, writer| {
            shard.remove_locked(writer, key, hash)
        })
    }

    pub(super) fn remove_locked(
        &self,
        writer: &mut Writer,
        _key: &[u8],
        hash: KeyHash,
    ) -> Result<(), StoreError> {
        let number = hash.set(self.layout.sets);
        let has_table = self.layout.shape().policy().has_table();
        let known = {
            let state = &mut *self.state.lock();
            state.mutate(hash);
            !has_table || state.index.get(number).is_some() || state.recent.knows(number)
        };
        if !known && self.load_left(number, true)?.is_none() {
            self.load_set(number, true)?;
        }
        let state = &mut *self.state.lock();
        let slot = match (&state.index, state.recent.sets.peek(&number)) {
            (Index::Absent, Some(slots)) => slots.iter().position(|slot| slot.tag == hash.tag()),
            _ => state
                .index
                .get(number)
                .and_then(|set| set.find(hash.tag()))
                .map(|entry| entry.slot),
        };
        let Some(slot) = slot else { return Ok(()) };
        if let Some(mut set) = state.index.get(number) {
            set.remove(slot);
            state.index.put(number, &set);
        }
        if let Some(slots) = state.recent.sets.get_mut(&number) {
            slots[slot] = SlotInfo::default();
        }
        if has_table {
            // Clears the bin too: reading the set from disk must not find the object.
            let bin = number * self.layout.shape().ways() as u64 + slot as u64;
            state.renew_bin(number, bin, slot, vec![0; self.layout.block_bytes as usize]);
        }
        if self.is_indexed() {
            let (set, slot, tag) = (number as u32, slot as u8, hash.tag());
            writer.journal.waiting.push(Change::Remove { set, slot, tag });
        }
        writer.dirty = true;
        Ok(())
    }
}

/// Builds a set from the slots read from disk: the newest object counts as the most recently used one.
fn set_of(shape: Shape, slots: &[SlotInfo]) -> Set {
    let mut set = Set::empty(shape);
    let mut order: Vec<_> = (0..slots.len()).filter(|&slot| slots[slot].tag != 0).collect();
    order.sort_by_key(|&slot| slots[slot].version);
    for slot in order {
        set.insert_at(slot, slots[slot].tag, Place::default());
    }
    set
}

fn write_frames(version: u64, rest: &[u8], out: &mut Vec<u8>) {
    for (index, content) in rest.chunks(FRAME_CONTENT).enumerate() {
        write_frame(version, index as u32, content, out);
    }
}

/// Checks the lengths of a key, its tags and its metadata.
pub(super) fn check_lengths(key: &[u8], options: &PutOptions<'_>) -> Result<(), StoreError> {
    let tags = options.tags.len() + usize::from(options.host.is_some());
    for (what, len, most) in [
        ("a key", key.len(), KEY_MAX),
        ("tags", tags, TAGS_MAX),
        ("metadata", options.meta.len(), META_MAX),
    ] {
        if len > most {
            return Err(StoreError::TooLong { what, len, most });
        }
    }
    Ok(())
}
