//! Lookups: finding an object's place, checking that it is the requested object, and reading its bytes.

use super::StoreError;
use super::hot::{HotObject, PIECE_BYTES, piece_end};
use super::log::{in_units, record_bytes};
use super::object::{FRAME_BYTES, FRAME_CONTENT, INLINE_BYTES, Record, frames_of, home_in_table, read_frame};
use super::positions;
use super::shard::{Shard, State};
use super::stats::Stats;
use crate::hash::KeyHash;
use crate::index::{Entry, LogPoint, Place};
use crate::policy::Policy;
use bytes::Bytes;
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An object that was found. Its head and the bytes beside the head are in memory and checked. The other
/// bytes are read on request and may be overwritten by then: a slow reader pins nothing.
#[derive(Debug, Clone)]
pub struct Hit {
    shard: Arc<Shard>,
    object: Arc<HotObject>,
}

impl Hit {
    /// The whole key.
    pub fn key(&self) -> &[u8] {
        &self.object.record.key
    }

    /// The number of the write that produced it.
    pub fn version(&self) -> u64 {
        self.object.record.head.version
    }

    /// Bytes of the body.
    pub fn body_len(&self) -> u64 {
        self.object.record.head.body_len
    }

    /// Bytes of the metadata.
    pub fn meta_len(&self) -> u64 {
        self.object.record.head.meta_len.into()
    }

    /// Time of the put, seconds since 1970.
    pub fn written_s(&self) -> u64 {
        self.object.record.head.written_s
    }

    /// Expiry, seconds since 1970; 0: never.
    pub fn expires_s(&self) -> u64 {
        self.object.record.head.expires_s
    }

    /// Its metadata.
    ///
    /// # Errors
    /// `Gone`, if a part that is not beside the head was overwritten or damaged.
    pub fn meta(&self) -> Result<Vec<u8>, StoreError> {
        self.content(0..u64::from(self.object.record.head.meta_len))
    }

    /// The metadata as `decode` decodes it, once for as long as the object stays in memory. `None` if
    /// `decode` refuses it, if it is not all in memory ([`meta`](Self::meta) has it then), or if it was
    /// decoded to another type before.
    pub fn decoded<T: Any + Send + Sync>(&self, decode: impl FnOnce(&[u8]) -> Option<T>) -> Option<Arc<T>> {
        self.object.decoded(decode)
    }

    /// Bytes of the body, if they are in memory: they lie beside the head, or in one piece
    /// ([`PIECE_BYTES`]) that was read twice. Never waits for a device.
    pub fn bytes_in_memory(&self, range: Range<u64>) -> Option<Bytes> {
        if range.start > range.end || range.end > self.body_len() {
            return None;
        }
        let meta = u64::from(self.object.record.head.meta_len);
        if range.end + meta <= self.object.content.len() as u64 {
            let content = (range.start + meta) as usize..(range.end + meta) as usize;
            return Some(self.object.content.slice(content));
        }
        if range.end > piece_end(range.start) {
            return None;
        }
        let number = range.start / PIECE_BYTES;
        let start = number * PIECE_BYTES;
        let hash = self.hash();
        let piece = self.shard.state.lock().hot.piece(hash, number, self.version())?;
        // Its length follows from that of the version's body.
        Some(piece.slice((range.start - start) as usize..(range.end - start) as usize))
    }

    /// Bytes of the body, from memory or from the device. A whole piece is kept in memory at its second use.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn bytes(&self, range: Range<u64>) -> Result<Bytes, StoreError> {
        if let Some(bytes) = self.bytes_in_memory(range.clone()) {
            return Ok(bytes);
        }
        let bytes = Bytes::from(self.read(range.clone())?);
        let number = range.start / PIECE_BYTES;
        let is_piece = range.start.is_multiple_of(PIECE_BYTES)
            && range.end == piece_end(range.start).min(self.body_len());
        if is_piece {
            let hash = self.hash();
            let mut state = self.shard.state.lock();
            state
                .hot
                .insert_piece(hash, number, self.version(), bytes.clone());
        }
        Ok(bytes)
    }

    fn hash(&self) -> KeyHash {
        KeyHash::of(&self.shard.layout.secret(), self.key())
    }

    /// Bytes of the body.
    ///
    /// # Errors
    /// `OutOfRange`; `Gone`, if the bytes were overwritten or damaged meanwhile; `Device`.
    pub fn read(&self, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        let len = self.body_len();
        if range.start > range.end || range.end > len {
            let Range { start, end } = range;
            return Err(StoreError::OutOfRange { start, end, len });
        }
        let meta = u64::from(self.object.record.head.meta_len);
        self.content(range.start + meta..range.end + meta)
    }

    /// Fills `out` from byte `off` of the body on, as far as the body goes. Returns the number of bytes read.
    ///
    /// # Errors
    /// As [`read`](Self::read), except `OutOfRange`.
    pub fn read_at(&self, off: u64, out: &mut [u8]) -> Result<usize, StoreError> {
        let start = off.min(self.body_len());
        let end = start.saturating_add(out.len() as u64).min(self.body_len());
        let bytes = self.read(start..end)?;
        out[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    /// The whole body.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn body(&self) -> Result<Vec<u8>, StoreError> {
        self.read(0..self.body_len())
    }

    fn content(&self, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        let beside = self.object.content.len() as u64;
        let first = range.start.min(beside) as usize..range.end.min(beside) as usize;
        // No more than is asked for: what is read may be kept.
        let mut out = Vec::with_capacity((range.end - range.start) as usize);
        out.extend_from_slice(&self.object.content[first]);
        if range.end > beside {
            let rest = range.start.max(beside) - beside..range.end - beside;
            self.shard.read_tail(&self.object.record, rest, &mut out)?;
        }
        Ok(out)
    }
}

/// The outcome of a lookup that does not wait for the device.
#[derive(Debug, Clone)]
pub enum MemoryLookup {
    /// The object, from memory.
    Hit(Hit),
    /// There is none.
    Miss,
    /// Memory does not tell; the device has to be read.
    NeedsDevice,
}

/// The bytes that nine of ten lookups in the log need at most, learned from those before. Read at once, they
/// spare the second read that the rest of an object costs: a wait for an SSD, a sweep of an arm.
#[derive(Debug, Default)]
pub(super) struct Usual(AtomicU64);

impl Usual {
    fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed) as usize
    }

    /// Moves the estimate nine steps up for a longer one and one step down for a shorter one, so that it
    /// rests where one of ten is longer. A lost update of another thread does no harm.
    fn learn(&self, needed: usize) {
        let now = self.0.load(Ordering::Relaxed);
        let step = now / 256 + 1;
        let new = match needed as u64 > now {
            true => now + 9 * step,
            false => now - step.min(now),
        };
        self.0.store(new.min(INLINE_BYTES as u64), Ordering::Relaxed);
    }
}

/// A record with the bytes from its head on.
struct Candidate {
    record: Record,
    content: Vec<u8>,
    /// The bytes after the record that came with the same read.
    bytes: Vec<u8>,
}

/// The outcome of reading a record at a place.
enum Found {
    Object(Candidate),
    /// Another key's record, or no record.
    Other,
    /// This store's record, but damaged or partly overwritten.
    Lost,
}

impl Shard {
    /// Looks an object up. `hash` is the hash of `key`.
    pub fn get(self: &Arc<Self>, key: &[u8], hash: KeyHash) -> Option<Hit> {
        let hit = if self.is_failed() {
            None
        } else {
            self.look_up(key, hash)
        };
        let counter = if hit.is_some() {
            &self.stats.hits
        } else {
            &self.stats.misses
        };
        Stats::count(counter, 1);
        hit
    }

    /// Looks an object up without the device. The lock that it takes is never held over I/O.
    pub fn get_in_memory(self: &Arc<Self>, key: &[u8], hash: KeyHash) -> MemoryLookup {
        let found = if self.is_failed() {
            MemoryLookup::Miss
        } else {
            self.look_in_memory(key, hash)
        };
        match &found {
            MemoryLookup::Hit(_) => Stats::count(&self.stats.hits, 1),
            MemoryLookup::Miss => Stats::count(&self.stats.misses, 1),
            MemoryLookup::NeedsDevice => {}
        }
        found
    }

    fn look_in_memory(self: &Arc<Self>, key: &[u8], hash: KeyHash) -> MemoryLookup {
        let number = hash.set(self.layout.sets);
        let mut state = self.state.lock();
        if let Some(object) = state.hot.get(hash).filter(|object| object.record.is_of(key)) {
            if self.is_outdated(&state, &object.record) {
                state.hot.remove(hash);
                Stats::count(&self.stats.outdated, 1);
                return MemoryLookup::Miss;
            }
            self.touch_in_memory(&mut state, number, hash.tag());
            Stats::count(&self.stats.memory_hits, 1);
            return MemoryLookup::Hit(Hit {
                shard: Arc::clone(self),
                object,
            });
        }
        // A set that is not in memory, or has the tag, has to be read.
        let is_absent = match state.index.get(number) {
            Some(set) => set.find(hash.tag()).is_none(),
            None => state.recent.lacks(number, hash.tag()),
        };
        if is_absent {
            MemoryLookup::Miss
        } else {
            MemoryLookup::NeedsDevice
        }
    }

    fn look_up(self: &Arc<Self>, key: &[u8], hash: KeyHash) -> Option<Hit> {
        match self.look_in_memory(key, hash) {
            MemoryLookup::Hit(hit) => return Some(hit),
            MemoryLookup::Miss => return None,
            MemoryLookup::NeedsDevice => {}
        }
        let found = match self.layout.shape().policy() {
            Policy::Basic | Policy::Set => self.find_in_set(key, hash),
            Policy::SetMem | Policy::SetMemLru => self.find_in_table(key, hash),
            _ => self.find_in_log(key, hash),
        };
        if self.has_file_of_sets() {
            self.spill_if_idle();
        }
        match found {
            Ok(object) => object.map(|object| Hit {
                shard: Arc::clone(self),
                object,
            }),
            Err(error) => {
                self.count_read_error(&error);
                None
            }
        }
    }

    /// Whether an object was purged, discarded, partly overwritten, or has expired.
    pub(super) fn is_outdated(&self, state: &State, record: &Record) -> bool {
        let head = &record.head;
        let prefix_hash = |prefix: &[u8]| self.prefix_hash(prefix);
        // The log may have overwritten the tail of an object whose head is in the Disk Table.
        let tail_is_gone =
            record.tail_len() > 0 && state.lap.head.0 > head.tail.saturating_add(state.lap.units);
        tail_is_gone
            || head.version < state.floor
            || head.expires_s != 0 && self.now() >= head.expires_s
            || state
                .purges
                .covers(head.version, &record.tags, &record.key, prefix_hash)
    }

    /// The hash of a prefix of keys as a scope.
    pub fn prefix_hash(&self, prefix: &[u8]) -> u64 {
        KeyHash::of(&self.layout.secret(), &[b"p:", prefix].concat()).short()
    }

    /// The hash of a tag or host as a scope.
    pub fn tag_hash(&self, kind: &[u8; 2], tag: &[u8]) -> u64 {
        KeyHash::of(&self.layout.secret(), &[&kind[..], tag].concat()).short()
    }

    /// Counts a use of an object whose place is in memory.
    fn touch_in_memory(&self, state: &mut State, number: u64, tag: u8) {
        if state.frozen {
            return;
        }
        let Some(mut set) = state.index.get(number) else {
            return;
        };
        let place = |entry: &Entry| match self.layout.shape().positions() {
            0 => Some(Place::default()),
            _ => entry.place,
        };
        if let Some((entry, place)) = set.find(tag).and_then(|entry| Some((entry, place(&entry)?))) {
            set.touch(entry.slot, place);
            state.index.put(number, &set);
        }
    }

    /// Adds a found object to the hot objects, if its key was not changed meanwhile.
    fn keep(&self, state: &mut State, hash: KeyHash, mutation: u32, object: &Arc<HotObject>) {
        if state.mutation(hash) == mutation {
            state.hot.insert(hash, Arc::clone(object));
        }
    }

    /// Looks an object up for the policies without a Disk Table.
    fn find_in_log(&self, key: &[u8], hash: KeyHash) -> Result<Option<Arc<HotObject>>, StoreError> {
        let number = hash.set(self.layout.sets);
        let (entry, waiting, mutation) = {
            let mut state = self.state.lock();
            let Some(entry) = state.index.get(number).and_then(|set| set.find(hash.tag())) else {
                return Ok(None);
            };
            let waiting = state.waiting.get(number as u32, entry.slot);
            (entry, waiting, state.mutation(hash))
        };
        let Some(place) = self.place_of(number, &entry, waiting)? else {
            return Ok(None);
        };
        let Some(point) = self.state.lock().lap.point(place) else {
            return Ok(None);
        };
        let block = self.layout.block_bytes as usize;
        let group = usize::from(place.prefetch).max(1) * block;
        // Whole blocks: a segment in memory gives as many bytes as are asked for, and the rest of an object
        // is read from a whole unit on.
        let first = group.max(self.usual.bytes().next_multiple_of(block));
        match self.read_record(key, point, first)? {
            Found::Object(candidate) => {
                let Candidate {
                    record,
                    content,
                    bytes,
                } = candidate;
                let object = Arc::new(HotObject::new(record, content.into()));
                let mut state = self.state.lock();
                if self.is_outdated(&state, &object.record) {
                    self.forget(&mut state, number, &entry, hash, mutation);
                    Stats::count(&self.stats.outdated, 1);
                    return Ok(None);
                }
                self.touch_found(&mut state, number, &entry, place, hash, mutation);
                self.keep(&mut state, hash, mutation, &object);
                if place.prefetch > 0 {
                    let group = &bytes[..group.min(bytes.len())];
                    self.keep_related(&mut state, point, &object.record, group);
                }
                Ok(Some(object))
            }
            Found::Other => {
                Stats::count(&self.stats.false_matches, 1);
                Ok(None)
            }
            Found::Lost => {
                Stats::count(&self.stats.damaged, 1);
                self.forget(&mut self.state.lock(), number, &entry, hash, mutation);
                Ok(None)
            }
        }
    }

    /// Returns the place of an object: from the index, from the positions that wait for the position file, or
    /// from that file.
    fn place_of(
        &self,
        number: u64,
        entry: &Entry,
        waiting: Option<(u32, u8)>,
    ) -> Result<Option<Place>, StoreError> {
        if let Some(place) = entry.place {
            return Ok(Some(place));
        }
        let stored = match waiting {
            Some(stored) => Some(stored),
            None => {
                Stats::count(&self.stats.position_reads, 1);
                positions::read(&*self.device, &self.layout, number as u32, entry.slot)?
            }
        };
        Ok(stored.map(|(position, prefetch)| Place {
            position,
            generation: entry.generation,
            prefetch: if self.layout.shape().policy().prefetches() {
                prefetch
            } else {
                0
            },
        }))
    }

    fn read_record(&self, key: &[u8], point: LogPoint, first: usize) -> Result<Found, StoreError> {
        let mut bytes = self.read_log(point, first, &self.stats.lookup_reads)?;
        let Some(record) = Record::parse(self.layout.store_id, &bytes) else {
            return Ok(Found::Lost);
        };
        if record.head.home != point.0 {
            return Ok(Found::Lost);
        }
        if !record.is_of(key) {
            return Ok(Found::Other);
        }
        let needed = record.head_bytes() + record.head.inline_len as usize;
        self.usual.learn(needed);
        if needed > bytes.len() && bytes.len().is_multiple_of(self.layout.unit_bytes as usize) {
            // The first read ended here, so this read costs no seek.
            let next = LogPoint(point.0 + in_units(&self.layout, bytes.len() as u64));
            let rest = needed - bytes.len();
            bytes.extend(self.read_log(next, rest, &self.stats.lookup_reads)?);
        }
        Ok(match record.inline(&bytes) {
            Some(content) => Found::Object(Candidate {
                content: content.to_vec(),
                record,
                bytes,
            }),
            None => Found::Lost,
        })
    }

    fn touch_found(
        &self,
        state: &mut State,
        number: u64,
        entry: &Entry,
        place: Place,
        hash: KeyHash,
        mutation: u32,
    ) {
        if state.frozen || state.mutation(hash) != mutation {
            return;
        }
        let Some(mut set) = state.index.get(number) else {
            return;
        };
        let same = |now: &Entry| now.slot == entry.slot && now.generation == entry.generation;
        if set.find(hash.tag()).filter(same).is_none() {
            return;
        }
        if let Some(demoted) = set.touch(entry.slot, place) {
            state.waiting.add(number as u32, demoted.slot, demoted.place);
        }
        state.index.put(number, &set);
    }

    /// Removes a damaged or outdated object from the index, unless its entry has changed. Not journaled:
    /// after a restart a lookup would find out again.
    fn forget(&self, state: &mut State, number: u64, entry: &Entry, hash: KeyHash, mutation: u32) {
        if state.mutation(hash) != mutation {
            return;
        }
        let Some(mut set) = state.index.get(number) else {
            return;
        };
        if set.find(hash.tag()).is_some_and(|now| now == *entry) {
            set.remove(entry.slot);
            state.index.put(number, &set);
        }
    }

    /// Adds the objects that follow in the same read to the hot objects: they were put together.
    fn keep_related(&self, state: &mut State, point: LogPoint, first: &Record, bytes: &[u8]) {
        let unit = u64::from(self.layout.unit_bytes);
        let Some(mut at) = record_bytes(&self.layout, first) else {
            return;
        };
        while at < bytes.len() as u64 {
            let rest = &bytes[at as usize..];
            let Some(record) = Record::parse(self.layout.store_id, rest) else {
                return;
            };
            let home = LogPoint(point.0 + at / unit);
            let Some(len) = record_bytes(&self.layout, &record) else {
                return;
            };
            at += len;
            let (Some(content), 0) = (record.inline(rest), record.tail_len()) else {
                continue;
            };
            if record.head.home != home.0 || self.is_outdated(state, &record) {
                continue;
            }
            let hash = KeyHash::of(&self.layout.secret(), &record.key);
            let place = state.lap.place(home, 0);
            let set = state.index.get(hash.set(self.layout.sets));
            let is_here = |entry: &Entry| {
                let known = entry.place.map(|known| known.position);
                entry.generation == place.generation && known.is_none_or(|known| known == place.position)
            };
            // Only objects that the index would find here, so that an older version does not come back.
            let current = set.and_then(|set| set.find(hash.tag())).filter(is_here);
            if current.is_some_and(|entry| entry.place.is_some()) {
                let content = content.to_vec();
                state
                    .hot
                    .insert(hash, Arc::new(HotObject::new(record, content.into())));
                Stats::count(&self.stats.prefetched, 1);
            }
        }
    }

    /// Looks an object up for `SetMem` and `SetMemLru`.
    fn find_in_table(&self, key: &[u8], hash: KeyHash) -> Result<Option<Arc<HotObject>>, StoreError> {
        let number = hash.set(self.layout.sets);
        let (set, mutation) = {
            let mut state = self.state.lock();
            (state.index.get(number), state.mutation(hash))
        };
        let known = match set {
            None => self.load_left(number, false)?,
            set => set,
        };
        let Some(set) = known else {
            return self.find_in_set(key, hash);
        };
        let Some(entry) = set.find(hash.tag()) else {
            return Ok(None);
        };
        let bin = number * self.layout.shape().ways() as u64 + entry.slot as u64;
        let block = self.read_bin(bin)?;
        match self.look_at_bin(key, bin, block) {
            Found::Object(candidate) => {
                let object = Arc::new(HotObject::new(candidate.record, candidate.content.into()));
                let mut state = self.state.lock();
                if self.is_outdated(&state, &object.record) {
                    Stats::count(&self.stats.outdated, 1);
                    return Ok(None);
                }
                self.touch_found(&mut state, number, &entry, Place::default(), hash, mutation);
                self.keep(&mut state, hash, mutation, &object);
                Ok(Some(object))
            }
            Found::Other => {
                Stats::count(&self.stats.false_matches, 1);
                Ok(None)
            }
            Found::Lost => {
                Stats::count(&self.stats.damaged, 1);
                self.forget(&mut self.state.lock(), number, &entry, hash, mutation);
                Ok(None)
            }
        }
    }

    fn look_at_bin(&self, key: &[u8], bin: u64, block: Vec<u8>) -> Found {
        let Some(record) = Record::parse(self.layout.store_id, &block) else {
            return Found::Lost;
        };
        if record.head.home != home_in_table(bin) {
            return Found::Lost;
        }
        if !record.is_of(key) {
            return Found::Other;
        }
        match record.inline(&block) {
            Some(content) => Found::Object(Candidate {
                content: content.to_vec(),
                record,
                bytes: Vec::new(),
            }),
            None => Found::Lost,
        }
    }

    /// Looks an object up by reading its whole set: for `Basic`, `Set`, and sets that are not in memory.
    fn find_in_set(&self, key: &[u8], hash: KeyHash) -> Result<Option<Arc<HotObject>>, StoreError> {
        let number = hash.set(self.layout.sets);
        let mutation = self.state.lock().mutation(hash);
        let blocks = self.load_set(number, false)?;
        let (block_bytes, ways) = (
            self.layout.block_bytes as usize,
            self.layout.shape().ways() as u64,
        );
        let bins = blocks.chunks_exact(block_bytes).enumerate();
        let newest = bins
            .filter_map(|(slot, block)| {
                match self.look_at_bin(key, number * ways + slot as u64, block.to_vec()) {
                    Found::Object(candidate) => Some(candidate),
                    _ => None,
                }
            })
            .max_by_key(|candidate| candidate.record.head.version);
        let Some(candidate) = newest else { return Ok(None) };
        let object = Arc::new(HotObject::new(candidate.record, candidate.content.into()));
        let mut state = self.state.lock();
        if self.is_outdated(&state, &object.record) {
            Stats::count(&self.stats.outdated, 1);
            return Ok(None);
        }
        self.touch_in_memory(&mut state, number, hash.tag());
        self.keep(&mut state, hash, mutation, &object);
        Ok(Some(object))
    }

    /// Reads a bin's block, including a write that still waits.
    pub(super) fn read_bin(&self, bin: u64) -> Result<Vec<u8>, StoreError> {
        if let Some(block) = self.state.lock().pending.get(&bin) {
            return Ok(block.to_vec());
        }
        let block = u64::from(self.layout.block_bytes);
        let mut bytes = vec![0; block as usize];
        Stats::count(&self.stats.lookup_reads, 1);
        self.device
            .read_at(self.layout.table.off + bin * block, &mut bytes)?;
        Ok(bytes)
    }

    /// Appends the part of `range` that lies in frames to `out`.
    pub(super) fn read_tail(
        &self,
        record: &Record,
        range: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), StoreError> {
        const AT_ONCE: u64 = 16;
        let unit = u64::from(self.layout.unit_bytes);
        let frames = frames_of(&range);
        let mut first = frames.start;
        while first < frames.end {
            let last = frames.end.min(first + AT_ONCE);
            let end = (last * FRAME_CONTENT as u64).min(record.tail_len());
            let physical = (last - first - 1) * FRAME_BYTES as u64
                + (end - (last - 1) * FRAME_CONTENT as u64)
                + (FRAME_BYTES - FRAME_CONTENT) as u64;
            let point = LogPoint(record.head.tail + first * (FRAME_BYTES as u64 / unit));
            if point.0 % self.layout.lap_units() * unit + physical > self.layout.log.len {
                return Err(StoreError::Gone);
            }
            let bytes = self.read_log(point, physical as usize, &self.stats.tail_reads)?;
            for index in first..last {
                let at = ((index - first) * FRAME_BYTES as u64) as usize;
                let start = index * FRAME_CONTENT as u64;
                let len = (record.tail_len() - start).min(FRAME_CONTENT as u64);
                let frame = bytes.get(at..).unwrap_or(&[]);
                let content = read_frame(record.head.version, index as u32, frame, len as usize);
                let Some(content) = content else {
                    Stats::count(&self.stats.damaged, 1);
                    return Err(StoreError::Gone);
                };
                let from = range.start.saturating_sub(start).min(len) as usize;
                let to = (range.end - start).min(len) as usize;
                out.extend_from_slice(&content[from..to]);
            }
            first = last;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Usual;

    #[test]
    fn nine_of_ten_lookups_need_the_usual_bytes_or_less() {
        let usual = Usual::default();
        // Nineteen in twenty are of 3,000 bytes or less: the estimate rests below the large ones.
        for n in 0..20_000 {
            usual.learn(if n % 20 == 7 { 60_000 } else { 2000 + n % 1000 });
        }
        assert!((2800..3300).contains(&usual.bytes()), "{}", usual.bytes());
        for _ in 0..2000 {
            usual.learn(17_000);
        }
        assert!((16_900..17_700).contains(&usual.bytes()), "{}", usual.bytes());
    }
}
