//! Room for the next checkpoint: what it needs stays free, and what one took of the reserve is given back.
//!
//! Two rules. No object becomes newer than the store where the store has no room to save it. And after a
//! checkpoint blocks are cleaned into what the reserve has left, beyond what memory needs now; the places
//! that this frees are held, so another checkpoint is made, until the reserve is whole.

use super::clean::Cleaned;
use super::owner::SlotsOwner;
use super::save::{Checkpointed, Progress, Saver};
use super::{Core, Shard};
use crate::error::Error;
use crate::layout::{self, BLOCK_BYTES, BLOCK_PAYLOAD_BYTES};
use crate::table::Entry;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Blocks that a checkpoint needs beside those of objects and tables: the open ones, and parts of tables.
const MARGIN_BLOCKS: usize = 8;
/// Blocks that are to be free beyond the reserve after a checkpoint.
const REFILL_BLOCKS: usize = 8;
/// Checkpoints that one makes at most, to refill the reserve.
const ROUNDS: usize = 64;

/// What has to be saved.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// Bytes in the log of objects that are newer than it, and of those that are kept for a checkpoint.
    dirty_bytes: AtomicU64,
    /// Blocks that the tables have, about.
    tables_blocks: AtomicUsize,
    /// The last checkpoint found nothing to clean, or gained nothing by it.
    is_used_up: AtomicBool,
}

impl Core {
    /// Notes that an object of `len_bytes` is newer than the log from now on.
    pub(super) fn note_dirty(&self, len_bytes: usize) {
        if self.saver.is_some() {
            let bytes = layout::footprint_bytes(len_bytes) as u64;
            self.room.dirty_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Notes that it is in the log, or gone.
    pub(super) fn note_clean(&self, len_bytes: usize) {
        if self.saver.is_some() {
            let bytes = layout::footprint_bytes(len_bytes) as u64;
            let before = self.room.dirty_bytes.fetch_sub(bytes, Ordering::Relaxed);
            debug_assert!(before >= bytes);
        }
    }

    /// Blocks that a checkpoint needs if it is made now.
    fn needed_blocks(&self) -> usize {
        let dirty = self.room.dirty_bytes.load(Ordering::Relaxed)
            + self.page_buffer.used()
            + self.owned.newer_bytes();
        let objects = (dirty / BLOCK_PAYLOAD_BYTES as u64) as usize * 9 / 8;
        let tables = self.room.tables_blocks.load(Ordering::Relaxed);
        (objects + tables + MARGIN_BLOCKS).min(self.log.reserve())
    }

    /// Whether the next checkpoint can save one more object, which is to become newer than the log.
    pub(super) fn may_become_dirty(&self, shard: &Shard, entry: Entry) -> bool {
        let is_dirty = matches!(entry, Entry::Frame(frame) if shard.frames.get(frame).is_dirty());
        self.saver.is_none() || is_dirty || self.log.room_blocks() >= self.needed_blocks()
    }

    /// Whether a checkpoint would make room, though none is held.
    pub(super) fn may_refill(&self) -> bool {
        self.saver.is_some() && !self.room.is_used_up.load(Ordering::Relaxed)
    }

    pub(super) fn held(&self) -> Error {
        Error::Held {
            device: self.log.device(),
            held_bytes: self.log.held_blocks() as u64 * BLOCK_BYTES as u64,
        }
    }

    /// Makes the reserve whole again after a checkpoint. Errors are for whoever meets them next: the
    /// checkpoint is complete.
    pub(super) fn refill(
        &self,
        saver: &Saver,
        progress: &mut Progress,
        record: &[u8],
        owner: Option<&dyn SlotsOwner>,
        made: &mut Checkpointed,
    ) {
        let wanted = self.log.reserve() + REFILL_BLOCKS;
        for _ in 0..ROUNDS {
            let tables = progress.segments.first().map_or(0, |whole| whole.places.len());
            self.room.tables_blocks.store(tables * 9 / 8, Ordering::Relaxed);
            let before = self.log.room_blocks();
            if before >= wanted {
                self.room.is_used_up.store(false, Ordering::Relaxed);
                return;
            }
            self.clean_into_reserve(wanted);
            if self.log.held_blocks() == 0 {
                break;
            }
            match self.make_checkpoint(saver, progress, record, owner) {
                Ok(more) => made.add(&more),
                Err(_) => return,
            }
            if self.log.room_blocks() <= before {
                break;
            }
        }
        let is_used_up = self.log.room_blocks() <= self.log.reserve() + 2;
        self.room.is_used_up.store(is_used_up, Ordering::Relaxed);
    }

    /// Cleans until so many blocks are free or held, as far as the next checkpoint does not need the room.
    fn clean_into_reserve(&self, wanted: usize) {
        while self.log.room_blocks() + self.log.held_blocks() < wanted + MARGIN_BLOCKS {
            self.log.lend_reserve(Some(self.needed_blocks()));
            let cleaned = self.clean_step(usize::MAX);
            let written = self.log.write_pending();
            if !matches!(cleaned, Ok(Cleaned::Part | Cleaned::Block)) || written.is_err() {
                break;
            }
        }
        self.log.lend_reserve(None);
    }
}
