//! What checkpoints need of the log: a cut through its blocks, places for their tables, and which blocks
//! there are.

use super::space::{Block, BlockState};
use super::{Log, SLAB_BLOCKS, place_of};
use crate::checkpoint::BlockRow;
use crate::error::Error;
use crate::layout::BLOCK_BYTES;
use std::collections::HashSet;
use std::sync::Arc;
use varve_far::Slot;

/// The blocks of a checkpoint.
pub(crate) struct Restored {
    /// Number, place, sequence number, live bytes.
    pub(crate) blocks: Vec<(BlockRow, u32)>,
    pub(crate) given_slabs: u32,
    /// Places of the checkpoint's tables.
    pub(crate) table_places: HashSet<u32>,
    pub(crate) epoch: u32,
    pub(crate) sequence: u32,
    /// Bytes that are promised to objects, and those of the largest with its header.
    pub(crate) promised_bytes: u64,
    pub(crate) largest_bytes: usize,
}

impl Log {
    /// A cut: blocks that are being filled are full from now on. Memory only.
    pub(crate) fn cut(&self, closes_open: bool) {
        let mut state = self.state.lock();
        let state = &mut *state;
        for open in state
            .open
            .iter_mut()
            .filter_map(|open| open.take_if(|_| closes_open))
        {
            state.blocks.pend(open.block);
            state.pending.push(super::Pending {
                block: open.block,
                buffer: Arc::new(open.buffer),
                is_claimed: false,
            });
        }
        state.blocks.cut();
    }

    /// A fault for tests: what is freed is free at once, whoever needs it.
    #[cfg(test)]
    pub(crate) fn hold_nothing(&self) {
        self.state.lock().blocks.hold_nothing();
    }

    /// Writes all blocks that the last cut needs.
    ///
    /// # Errors
    /// `Io`, `Full`: they stay in memory.
    pub(crate) fn write_cut(&self) -> Result<(), Error> {
        {
            let mut state = self.state.lock();
            let state = &mut *state;
            if let Some(open) = state.open[super::Stream::Checkpoint as usize].take() {
                state.blocks.pend(open.block);
                state.pending.push(super::Pending {
                    block: open.block,
                    buffer: Arc::new(open.buffer),
                    is_claimed: false,
                });
            }
        }
        while self.state.lock().blocks.has_unwritten() && self.write_pending()? {}
        Ok(())
    }

    /// Slabs that the backend gave.
    pub(crate) fn given_slabs(&self) -> u32 {
        self.state.lock().slots.len() as u32
    }

    /// The blocks that the last cut needs, begun at the cut `since` or later, and the last sequence number.
    pub(crate) fn needed_blocks(&self, since: u32) -> (Vec<BlockRow>, u32) {
        let state = self.state.lock();
        let mut rows = Vec::new();
        state.blocks.for_each_needed(since, |number, block| {
            rows.push(BlockRow {
                number,
                place: block.place,
                sequence: block.sequence,
            });
        });
        (rows, state.blocks.sequence())
    }

    /// A place for a part of a checkpoint's tables.
    ///
    /// # Errors
    /// `Full`.
    pub(crate) fn take_place(&self) -> Result<u32, Error> {
        let mut state = self.state.lock();
        self.grow(&mut state, 0);
        if self.available(&state) == 0 {
            return Err(Error::Full {
                device: self.device(),
            });
        }
        state.table_places += 1;
        state.blocks.take_place().ok_or_else(|| Error::Full {
            device: self.device(),
        })
    }

    /// Writes a part of a checkpoint's tables.
    ///
    /// # Errors
    /// `Io`, `Full`.
    pub(crate) fn write_place(&self, place: u32, bytes: &[u8]) -> Result<(), Error> {
        let (slot, offset) = place_of(&self.state.lock().slots, place);
        let written = self.backend.write(slot, offset, bytes);
        let mut state = self.state.lock();
        match written {
            Ok(()) => {
                state.stats.device_write_bytes += bytes.len() as u64;
                Ok(())
            }
            Err(error) => {
                state.stats.io_errors += 1;
                Err(self.io_error(error))
            }
        }
    }

    /// Places of tables that no checkpoint needs from the next one on.
    pub(crate) fn hold_places(&self, places: &[u32]) {
        let mut state = self.state.lock();
        state.table_places = state.table_places.saturating_sub(places.len() as u64);
        for place in places {
            state.blocks.hold_place(*place);
        }
    }

    /// The root of the last cut is about to be written: from now on it may be in the file.
    pub(crate) fn root(&self) {
        self.state.lock().blocks.root();
    }

    /// The checkpoint of the last cut failed; `places` are those that its tables have.
    pub(crate) fn abandon(&self, places: &[u32]) {
        let mut state = self.state.lock();
        state.table_places = state.table_places.saturating_sub(places.len() as u64);
        state.blocks.abandon(places);
    }

    /// The checkpoint of the last cut is complete.
    pub(crate) fn commit(&self) {
        self.state.lock().blocks.commit();
    }

    /// Puts the blocks of a checkpoint in place. The memory of their records was taken.
    pub(crate) fn restore(&self, restored: Restored) {
        let mut state = self.state.lock();
        let blocks = restored.blocks.into_iter().map(|(row, live_bytes)| {
            let block = Block {
                state: BlockState::Sealed,
                sequence: row.sequence,
                live_bytes,
                place: row.place,
                born: 0,
            };
            (row.number, block)
        });
        state.slots = (0..restored.given_slabs).map(Slot).collect();
        let places = restored.given_slabs * SLAB_BLOCKS;
        state.table_places = restored.table_places.len() as u64;
        state.blocks.restore(
            blocks.collect(),
            places,
            &restored.table_places,
            restored.epoch,
            restored.sequence,
        );
        state.stats.promised_bytes = restored.promised_bytes;
        state.largest_bytes = restored.largest_bytes;
    }
}

/// Memory of the records of a place.
pub(crate) const PLACE_MEMORY_BYTES: u64 = super::Blocks::BLOCK_MEMORY_BYTES;

/// Places that so many slabs have.
pub(crate) const fn places(slabs: u32) -> u64 {
    slabs as u64 * SLAB_BLOCKS as u64
}

/// Where a place lies behind the beginning of the slabs.
pub(crate) const fn place_offset(place: u32) -> u64 {
    place as u64 * BLOCK_BYTES as u64
}
