//! The circular log: placing bytes, writing them to the device, and reading them before they are written.
//!
//! Space is allocated by the segment, so a lap holds whole segments only. Bytes that lie one lap behind the
//! end of the open segment count as overwritten.

use super::StoreError;
use super::layout::{PAGE, Superblock};
use super::object::{Record, frames_bytes};
use super::shard::{Shard, State, Writer};
use super::stats::Stats;
use crate::hash::KeyHash;
use crate::index::LogPoint;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// A segment of the log in memory.
#[derive(Debug)]
pub(super) struct Segment {
    /// The point of its beginning.
    pub start: LogPoint,
    /// Its bytes so far.
    pub bytes: Vec<u8>,
    /// The number of its bytes that are on the device.
    pub written: usize,
}

impl Segment {
    /// Returns the bytes from `point` on, if it is within this segment.
    fn slice(&self, layout: &Superblock, point: LogPoint) -> Option<&[u8]> {
        let units = point.0.checked_sub(self.start.0)?;
        let within = usize::try_from(units * u64::from(layout.unit_bytes)).ok()?;
        (units < layout.segment_units()).then(|| self.bytes.get(within..).unwrap_or(&[]))
    }
}

/// Buffers of a segment, kept for the next one. Freed and taken again from an allocator, with smaller objects
/// in between, they would cost a multiple of their size.
#[derive(Debug, Default)]
pub(super) struct Spares(Mutex<Vec<Vec<u8>>>);

impl Spares {
    /// The open segment, the one that it overwrites, and a copy of what is being written.
    const MOST: usize = 3;

    /// Returns an empty buffer for `capacity` bytes.
    fn take(&self, capacity: usize) -> Vec<u8> {
        let spare = self.0.lock().pop();
        let mut spare = spare.unwrap_or_default();
        spare.reserve_exact(capacity);
        spare
    }

    fn give(&self, mut bytes: Vec<u8>) {
        bytes.clear();
        let mut spares = self.0.lock();
        if spares.len() < Self::MOST {
            spares.push(bytes);
        }
    }
}

/// Rounds up to whole units.
pub(super) const fn in_units(layout: &Superblock, bytes: u64) -> u64 {
    bytes.div_ceil(layout.unit_bytes as u64)
}

impl Shard {
    /// Returns the device offset of a point.
    pub(super) fn device_off(&self, point: LogPoint) -> u64 {
        self.layout.log.off + point.0 % self.layout.lap_units() * u64::from(self.layout.unit_bytes)
    }

    /// Reserves consecutive segments that are contiguous on the device.
    fn reserve(&self, state: &mut State, segments: u64) -> LogPoint {
        let (lap, units) = (self.layout.lap_units(), segments * self.layout.segment_units());
        let mut start = state.lap.head.0;
        if start % lap + units > lap {
            start = (start / lap + 1) * lap;
        }
        state.lap.head = LogPoint(start + units);
        LogPoint(start)
    }

    /// Reserves room for `bytes` in segments of its own. Nothing else is written there for a lap.
    pub(super) fn reserve_large(&self, writer: &mut Writer, bytes: u64) -> Result<LogPoint, StoreError> {
        let segments = bytes.div_ceil(u64::from(self.layout.segment_bytes));
        self.close_segment(writer)?;
        let (start, end) = {
            let mut state = self.state.lock();
            (self.reserve(&mut state, segments), state.lap.head)
        };
        writer.dirty = true;
        self.ensure_promised(writer, end.0)?;
        Ok(start)
    }

    /// Makes room for `bytes`, at most a segment, in the open segment. Returns the point of the room.
    pub(super) fn make_room(&self, writer: &mut Writer, bytes: u64) -> Result<LogPoint, StoreError> {
        let full = u64::from(self.layout.segment_bytes);
        debug_assert!(bytes <= full);
        // Objects with a second chance may fill a segment again.
        for _ in 0..3 {
            let point = self.state.lock().segment.as_ref().and_then(|segment| {
                let used = segment.bytes.len() as u64;
                (used + bytes <= full).then(|| LogPoint(segment.start.0 + in_units(&self.layout, used)))
            });
            if let Some(point) = point {
                return Ok(point);
            }
            self.close_segment(writer)?;
            self.open_segment(writer, bytes)?;
        }
        unreachable!("a fresh segment has room: second chances leave it");
    }

    /// Opens the next segment and moves objects that lie there and had hits into it.
    fn open_segment(&self, writer: &mut Writer, wanted: u64) -> Result<(), StoreError> {
        let (start, end) = {
            let mut state = self.state.lock();
            (self.reserve(&mut state, 1), state.lap.head)
        };
        let old = self.read_second_chances(start);
        self.ensure_promised(writer, end.0)?;
        let bytes = self.spares.take(self.layout.segment_bytes as usize);
        let segment = Segment {
            start,
            bytes,
            written: 0,
        };
        self.state.lock().segment = Some(segment);
        if let Some(old) = old {
            self.rescue(writer, start, &old, wanted);
            self.spares.give(old);
        }
        Ok(())
    }

    /// Appends bytes at the point that [`make_room`](Self::make_room) returned, padded to whole units.
    pub(super) fn fill_segment(&self, state: &mut State, bytes: &[u8]) {
        let segment = state.segment.as_mut().expect("room was made");
        segment.bytes.extend_from_slice(bytes);
        let len = in_units(&self.layout, segment.bytes.len() as u64) * u64::from(self.layout.unit_bytes);
        segment.bytes.resize(len as usize, 0);
    }

    /// Writes the open segment and the index changes of its objects.
    pub(super) fn close_segment(&self, writer: &mut Writer) -> Result<(), StoreError> {
        let segment = {
            let mut state = self.state.lock();
            let Some(mut segment) = state.segment.take() else {
                return Ok(());
            };
            let len = segment.bytes.len().next_multiple_of(PAGE as usize);
            segment.bytes.resize(len, 0);
            let segment = Arc::new(segment);
            state.flushing = Some(Arc::clone(&segment));
            segment
        };
        let rest = &segment.bytes[segment.written..];
        if !rest.is_empty() {
            self.write_log(self.device_off(segment.start) + segment.written as u64, rest)?;
        }
        self.state.lock().flushing = None;
        if let Ok(segment) = Arc::try_unwrap(segment) {
            self.spares.give(segment.bytes);
        }
        if !writer.journal.waiting.is_empty() {
            self.write_journal(writer)?;
        }
        if writer.last_flush.elapsed() >= self.options.flush_interval {
            self.sync(writer)?;
        }
        let due = self.state.lock().waiting.len() >= self.waiting_max();
        if due {
            self.sweep()?;
        }
        Ok(())
    }

    /// Writes the open segment's bytes so far and keeps it open. The next object begins in a new block, so
    /// that no durable block is written again.
    pub(super) fn write_open_segment(&self) -> Result<(), StoreError> {
        let (off, bytes) = {
            let mut state = self.state.lock();
            let Some(segment) = &mut state.segment else {
                return Ok(());
            };
            let len = segment.bytes.len().next_multiple_of(PAGE as usize);
            segment.bytes.resize(len, 0);
            let mut bytes = self.spares.take(self.layout.segment_bytes as usize);
            bytes.extend_from_slice(&segment.bytes[segment.written..]);
            (self.device_off(segment.start) + segment.written as u64, bytes)
        };
        if bytes.is_empty() {
            self.spares.give(bytes);
            return Ok(());
        }
        self.write_log(off, &bytes)?;
        if let Some(segment) = &mut self.state.lock().segment {
            segment.written += bytes.len();
        }
        self.spares.give(bytes);
        Ok(())
    }

    /// Reads `len` bytes of the log from `point` on, extended to a block boundary; fewer at the end of a
    /// segment in memory or of the lap. A read of the device is counted in `counter`.
    pub(super) fn read_log(
        &self,
        point: LogPoint,
        len: usize,
        counter: &AtomicU64,
    ) -> Result<Vec<u8>, StoreError> {
        {
            let state = self.state.lock();
            let in_memory = state.segment.iter().chain(state.flushing.as_deref());
            if let Some(bytes) = in_memory
                .filter_map(|segment| segment.slice(&self.layout, point))
                .next()
            {
                return Ok(bytes[..len.min(bytes.len())].to_vec());
            }
        }
        let off = self.device_off(point);
        let start = off / PAGE * PAGE;
        let log_end = self.layout.log.off + self.layout.log.len;
        let end = (off + len as u64).next_multiple_of(PAGE).min(log_end);
        let mut bytes = vec![0; (end - start) as usize];
        Stats::count(counter, 1);
        self.device.read_at(start, &mut bytes)?;
        bytes.drain(..(off - start) as usize);
        Ok(bytes)
    }

    /// Reads the segment that is about to be overwritten, if objects with hits get a second chance.
    fn read_second_chances(&self, start: LogPoint) -> Option<Vec<u8>> {
        let has_table = self.layout.shape().policy().has_table();
        if has_table || self.options.second_chance <= 0.0 || start.0 < self.layout.lap_units() {
            return None;
        }
        let segment_bytes = self.layout.segment_bytes as usize;
        let mut bytes = self.spares.take(segment_bytes);
        bytes.resize(segment_bytes, 0);
        Stats::count(&self.stats.segment_reads, 1);
        match self.device.read_at(self.device_off(start), &mut bytes) {
            Ok(()) => Some(bytes),
            Err(error) => {
                self.count_read_error(&error.into());
                None
            }
        }
    }

    /// Writes the objects in `old` again that had hits: those that are still in the better half of their sets
    /// after a whole lap. `old` holds the segment that the new one overwrites. `wanted` bytes stay free.
    fn rescue(&self, writer: &mut Writer, start: LogPoint, old: &[u8], wanted: u64) {
        let layout = &self.layout;
        let before = start.0 - layout.lap_units();
        let full = u64::from(layout.segment_bytes);
        let budget = (full as f64 * self.options.second_chance.min(1.0)) as u64;
        let budget = budget.min(full - wanted);
        let mut used = 0;
        for (at, mut record) in records_of(layout, old) {
            let Some(len) = record_bytes(layout, &record) else {
                continue;
            };
            let home = LogPoint(before + at / u64::from(layout.unit_bytes));
            let whole = old.get(at as usize..(at + len) as usize);
            let (Some(whole), true) = (whole, record.head.home == home.0) else {
                continue;
            };
            let state = &mut *self.state.lock();
            if used + len > budget || self.is_outdated(state, &record) {
                continue;
            }
            let hash = KeyHash::of(&layout.secret(), &record.key);
            let number = hash.set(layout.sets);
            let Some(mut set) = state.index.get(number) else {
                continue;
            };
            let place = state.lap.place(home, 0);
            let found = set.find(hash.tag()).filter(|entry| {
                let same =
                    |p: crate::index::Place| p.position == place.position && p.generation == place.generation;
                entry.rank < layout.shape().ways() / 2 && entry.place.is_some_and(same)
            });
            let Some(entry) = found else { continue };
            let point = LogPoint(
                start.0 + in_units(layout, state.segment.as_ref().map_or(0, |s| s.bytes.len() as u64)),
            );
            let moved = move_record(&mut record, whole, point);
            self.fill_segment(state, &moved);
            used += len;
            let new = state.lap.place(point, 0);
            let demoted = set.insert_at(entry.slot, hash.tag(), new).demoted;
            self.note_insert(state, writer, number, &set, entry.slot, hash.tag(), new, demoted);
            Stats::count(&self.stats.second_chances, 1);
        }
    }
}

/// Returns the bytes of a record with the frames that follow it; `None` if its frames are elsewhere or exceed
/// a segment.
pub(super) fn record_bytes(layout: &Superblock, record: &Record) -> Option<u64> {
    let unit = u64::from(layout.unit_bytes);
    let first = (record.head_bytes() as u64 + u64::from(record.head.inline_len)).next_multiple_of(unit);
    if record.tail_len() == 0 {
        return Some(first);
    }
    let follows = record.head.tail == record.head.home + first / unit;
    let len = first
        .checked_add(frames_bytes(record.tail_len()))?
        .next_multiple_of(unit);
    (follows && len <= u64::from(layout.segment_bytes)).then_some(len)
}

/// Iterates over the records in a piece of the log that begins with a segment, with their offsets.
pub(super) fn records_of<'b>(
    layout: &Superblock,
    bytes: &'b [u8],
) -> impl Iterator<Item = (u64, Record)> + 'b {
    let layout = *layout;
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < bytes.len() as u64 {
            match Record::parse(layout.store_id, &bytes[at as usize..]) {
                Some(record) => {
                    let here = at;
                    // An object whose frames lie elsewhere occupies the rest of its segments.
                    at += record_bytes(&layout, &record).unwrap_or(bytes.len() as u64);
                    return Some((here, record));
                }
                // The first record after a flush begins at the next block.
                None => at = (at + 1).next_multiple_of(PAGE),
            }
        }
        None
    })
}

/// Returns the bytes of a record moved to another point. Its frames do not contain their location.
fn move_record(record: &mut Record, whole: &[u8], point: LogPoint) -> Vec<u8> {
    let by = point.0.wrapping_sub(record.head.home);
    record.head.home = point.0;
    if record.tail_len() > 0 {
        record.head.tail = record.head.tail.wrapping_add(by);
    }
    let head_bytes = record.head_bytes();
    let mut moved = Vec::with_capacity(whole.len());
    // The checksum of the content is copied, not computed anew: damage stays visible.
    record.rewrite_head(&mut moved);
    moved.extend_from_slice(&whole[head_bytes..]);
    moved
}
