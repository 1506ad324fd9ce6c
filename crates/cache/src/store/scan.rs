//! Walks over all objects of a store: to list them, and to check every byte. Changes nothing.

use super::StoreError;
use super::layout::Superblock;
use super::log::records_of;
use super::object::{Record, home_in_table};
use super::shard::Shard;
use crate::hash::KeyHash;
use crate::index::LogPoint;
use std::sync::Arc;

/// An object found by a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its whole key.
    pub key: Vec<u8>,
    /// The number of its write.
    pub version: u64,
    /// Bytes of its body.
    pub body_len: u64,
    /// Bytes of its metadata.
    pub meta_len: u32,
    /// Time of the put, seconds since 1970.
    pub written_s: u64,
    /// Expiry, seconds since 1970; 0: never.
    pub expires_s: u64,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Damage {
    /// Objects that are intact.
    pub objects: u64,
    /// Bytes of their content.
    pub bytes: u64,
    /// Objects in the index whose bytes are damaged.
    pub damaged: u64,
}

impl ObjectInfo {
    fn of(record: &Record) -> Self {
        Self {
            key: record.key.clone(),
            version: record.head.version,
            body_len: record.head.body_len,
            meta_len: record.head.meta_len,
            written_s: record.head.written_s,
            expires_s: record.head.expires_s,
        }
    }
}

impl Shard {
    /// Calls `visit` for each object that a lookup would find. In order of device offset; objects put
    /// meanwhile may be missed.
    ///
    /// # Errors
    /// The device failed.
    pub fn scan(self: &Arc<Self>, mut visit: impl FnMut(ObjectInfo)) -> Result<(), StoreError> {
        self.each_record(|record, current| {
            if current {
                visit(ObjectInfo::of(record));
            }
        })
    }

    /// Reads every object to its last byte. Does not count as hits.
    ///
    /// # Errors
    /// The device failed.
    pub fn check(self: &Arc<Self>) -> Result<Damage, StoreError> {
        let mut found = Damage::default();
        let mut keys = Vec::new();
        self.each_record(|record, current| {
            if current {
                keys.push((record.clone(), ()));
            }
        })?;
        for (record, ()) in keys {
            let whole = self.read_whole(&record)?;
            if whole {
                found.objects += 1;
                found.bytes += record.content_len();
            } else {
                found.damaged += 1;
            }
        }
        Ok(found)
    }

    fn read_whole(&self, record: &Record) -> Result<bool, StoreError> {
        let head = record.head;
        let bytes = if head.home & super::object::IN_TABLE != 0 {
            self.read_bin(head.home & !super::object::IN_TABLE)?
        } else {
            let needed = record.head_bytes() + head.inline_len as usize;
            self.read_log(LogPoint(head.home), needed, &self.stats.lookup_reads)?
        };
        if record.inline(&bytes).is_none() {
            return Ok(false);
        }
        const PIECE: u64 = 4 << 20;
        let mut from = 0;
        while from < record.tail_len() {
            let to = record.tail_len().min(from + PIECE);
            match self.read_tail(record, from..to, &mut Vec::new()) {
                Ok(()) => {}
                Err(StoreError::Gone) => return Ok(false),
                Err(error) => return Err(error),
            }
            from = to;
        }
        Ok(true)
    }

    /// Calls `visit` for each head on the device, with whether a lookup of its key finds this head.
    fn each_record(&self, mut visit: impl FnMut(&Record, bool)) -> Result<(), StoreError> {
        if self.layout.shape().policy().has_table() {
            return self.each_in_table(visit);
        }
        let layout = &self.layout;
        let segments = layout.log.len / u64::from(layout.segment_bytes);
        for n in 0..segments {
            let (lap, open) = {
                let state = self.state.lock();
                (state.lap, state.segment.as_ref().map(|segment| segment.start.0))
            };
            // The only live point of this piece of the device.
            let within = n * layout.segment_units();
            let head_lap = lap.head.0 / lap.units;
            let this = head_lap * lap.units + within;
            let start = if this < lap.head.0 {
                this
            } else {
                this.wrapping_sub(lap.units)
            };
            if this >= lap.head.0 && head_lap == 0 {
                continue;
            }
            let bytes = self.read_log(
                LogPoint(start),
                layout.segment_bytes as usize,
                &self.stats.lookup_reads,
            )?;
            debug_assert!(open.is_none_or(|open| open < lap.head.0));
            for (at, record) in records_of(layout, &bytes) {
                let home = start + at / u64::from(layout.unit_bytes);
                if record.head.home == home {
                    let current = self.is_current_in_log(layout, &record);
                    visit(&record, current);
                }
            }
        }
        Ok(())
    }

    fn is_current_in_log(&self, layout: &Superblock, record: &Record) -> bool {
        let hash = KeyHash::of(&layout.secret(), &record.key);
        let number = hash.set(layout.sets);
        let state = &mut *self.state.lock();
        let home = LogPoint(record.head.home);
        let Some(entry) = state.index.get(number).and_then(|set| set.find(hash.tag())) else {
            return false;
        };
        let place = state.lap.place(home, 0);
        let waiting = state
            .waiting
            .get(number as u32, entry.slot)
            .map(|(position, _)| position);
        let live = state.lap.point(place) == Some(home) && !self.is_outdated(state, record);
        let mut known = entry.place.map(|place| place.position).or(waiting);
        if known.is_none() {
            let read = super::positions::read(&*self.device, layout, number as u32, entry.slot);
            known = read.ok().flatten().map(|(position, _)| position);
        }
        live && entry.generation == place.generation && known == Some(place.position)
    }

    fn each_in_table(&self, mut visit: impl FnMut(&Record, bool)) -> Result<(), StoreError> {
        let layout = &self.layout;
        let ways = layout.shape().ways() as u64;
        for number in 0..layout.sets {
            let bytes = self.load_set(number, false)?;
            for (slot, block) in bytes.chunks_exact(layout.block_bytes as usize).enumerate() {
                let Some(record) = Record::parse(layout.store_id, block) else {
                    continue;
                };
                if record.head.home != home_in_table(number * ways + slot as u64) {
                    continue;
                }
                let state = &mut *self.state.lock();
                let hash = KeyHash::of(&layout.secret(), &record.key);
                let indexed = state
                    .index
                    .get(number)
                    .is_none_or(|set| set.find(hash.tag()).is_some_and(|entry| entry.slot == slot));
                let current = indexed && hash.set(layout.sets) == number && !self.is_outdated(state, &record);
                visit(&record, current);
            }
        }
        Ok(())
    }
}
