//! Blocks and objects between memory and the device. Nothing is locked while bytes move.

use super::space::BlockState;
use super::{Buffer, Log, SPARES_MAX, State, WRITE_TRIES, block_of, place_of};
use crate::error::Error;
use crate::layout::{self, BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use parking_lot::MutexGuard;
use std::sync::Arc;
use varve_far::{BackendError, Page, Slot};
use zerocopy::IntoBytes;

/// Where an object may be read.
enum Source {
    Device {
        slot: Slot,
        offset: usize,
        sequence: u32,
    },
    Done {
        sequence: u32,
        is_found: bool,
    },
    Nowhere,
}

impl Log {
    /// Writes one block that waits, or waits for whoever writes it. True if blocks were waiting.
    ///
    /// # Errors
    /// `Io`: the block stays in memory and waits.
    pub(crate) fn write_pending(&self) -> Result<bool, Error> {
        let mut state = self.state.lock();
        if state.pending.is_empty() {
            return Ok(false);
        }
        let Some(pending) = state.pending.iter_mut().find(|pending| !pending.is_claimed) else {
            self.written.wait(&mut state);
            return Ok(true);
        };
        pending.is_claimed = true;
        let (block, buffer) = (pending.block, Arc::clone(&pending.buffer));
        let (mut state, written) = self.write_somewhere(state, &buffer);
        drop(buffer);
        let index = state.pending.iter().position(|pending| pending.block == block);
        if let (Some(index), Ok(place)) = (index, &written) {
            let pending = state.pending.swap_remove(index);
            state.blocks.seal(block, *place);
            state.sealed += 1;
            state.stats.device_write_bytes += BLOCK_BYTES as u64;
            if state.spares.len() < SPARES_MAX
                && let Ok(buffer) = Arc::try_unwrap(pending.buffer)
            {
                state.spares.push(buffer);
            }
        } else if let Some(index) = index {
            state.pending[index].is_claimed = false;
        }
        drop(state);
        self.written.notify_all();
        written.map(|_| true).map_err(|error| self.io_error(error))
    }

    /// Writes a block to the first free place that takes it. Places that failed where another did not are
    /// retired; where none worked it is the device that fails, and they are free as before.
    fn write_somewhere<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        buffer: &Buffer,
    ) -> (MutexGuard<'a, State>, Result<u32, BackendError>) {
        let mut failed = Vec::new();
        let mut result = Err(BackendError::Full);
        while failed.len() < WRITE_TRIES {
            let Some(place) = state.blocks.take_place() else {
                break;
            };
            let (slot, offset) = place_of(&state.slots, place);
            let written =
                MutexGuard::unlocked(&mut state, || self.backend.write(slot, offset, buffer.as_bytes()));
            match written {
                Ok(()) => {
                    result = Ok(place);
                    break;
                }
                Err(error) => {
                    state.stats.io_errors += 1;
                    failed.push(place);
                    result = Err(error);
                }
            }
        }
        for place in failed {
            match result {
                Ok(_) => state.blocks.retire_place(),
                Err(_) => state.blocks.return_place(place),
            }
        }
        (state, result)
    }

    /// Fills `data` with an object that a table says starts in `sector`. Gives the sequence number of
    /// the block, for [`Self::is_current`]: where that has changed, an error means nothing.
    ///
    /// # Errors
    /// `Io`; `Damaged`.
    pub(crate) fn read(&self, number: u64, sector: u64, data: &mut [u8]) -> (u32, Result<(), Error>) {
        let (sequence, is_found) = match self.source(number, sector, data) {
            Source::Done { sequence, is_found } => (sequence, Ok(is_found)),
            Source::Nowhere => (0, Ok(false)),
            Source::Device {
                slot,
                offset,
                sequence,
            } => {
                let first = (sector % BLOCK_SECTORS as u64) as usize;
                let sectors = layout::read_sectors(data.len()).min(BLOCK_SECTORS - first);
                let mut bytes = vec![0; sectors * SECTOR_BYTES];
                let read = self.backend.read(slot, offset + first * SECTOR_BYTES, &mut bytes);
                let found = read.map(|()| layout::find(&bytes, sequence, number, data));
                self.state.lock().stats.device_read_bytes += bytes.len() as u64;
                (sequence, found)
            }
        };
        let result = match is_found {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.damaged(number, sector)),
            Err(error) => Err(self.io_error(error)),
        };
        (sequence, result)
    }

    /// The error of an object whose bytes are wrong.
    pub(crate) fn damaged(&self, number: u64, sector: u64) -> Error {
        Error::Damaged {
            device: self.device(),
            object: number,
            sector,
        }
    }

    /// Counts an error that was found true.
    pub(crate) fn count(&self, error: &Error) {
        let mut state = self.state.lock();
        match error {
            Error::Damaged { .. } => state.stats.damaged += 1,
            Error::Io { .. } => state.stats.io_errors += 1,
            _ => {}
        }
    }

    fn source(&self, number: u64, sector: u64, data: &mut [u8]) -> Source {
        let state = self.state.lock();
        let block_number = block_of(sector);
        let Some(block) = state.blocks.get(block_number) else {
            return Source::Nowhere;
        };
        let sequence = block.sequence;
        let in_memory = match block.state {
            BlockState::Free => return Source::Nowhere,
            BlockState::Open => {
                let mut open = state.open.iter().flatten();
                open.find(|open| open.block == block_number)
                    .map(|open| &open.buffer)
            }
            BlockState::Pending => {
                let mut pending = state.pending.iter();
                let found = pending.find(|pending| pending.block == block_number);
                found.map(|pending| &*pending.buffer)
            }
            BlockState::Sealed | BlockState::Cleaning | BlockState::Retired => {
                let (slot, offset) = place_of(&state.slots, block.place);
                return Source::Device {
                    slot,
                    offset,
                    sequence,
                };
            }
        };
        let first = (sector % BLOCK_SECTORS as u64) as usize * SECTOR_BYTES;
        let is_found =
            in_memory.is_some_and(|buffer| layout::find(&buffer.as_bytes()[first..], sequence, number, data));
        Source::Done { sequence, is_found }
    }

    /// Whether the block of a sector is the one that had this sequence number.
    pub(crate) fn is_current(&self, sector: u64, sequence: u32) -> bool {
        let state = self.state.lock();
        let block = state.blocks.get(block_of(sector));
        block.is_some_and(|block| block.sequence == sequence && block.state != BlockState::Free)
    }

    /// Chooses the block to clean next and reads it. `None` where no cleaning gains space.
    ///
    /// # Errors
    /// `Io`: what is live in the block stays where it is. It is not used again if others can be read.
    pub(crate) fn take_victim(&self, buffer: &mut Buffer) -> Option<Result<(u32, u32), Error>> {
        let (number, block, slot, offset) = {
            let mut state = self.state.lock();
            // What a checkpoint needs gives no room before the next one, but takes some.
            let is_new_only = self.reserve != 0 && self.available(&state) <= self.floor() + 2;
            let (number, block) = state.blocks.take_victim(is_new_only)?;
            let (slot, offset) = place_of(&state.slots, block.place);
            (number, block, slot, offset)
        };
        match self.backend.read(slot, offset, buffer.as_mut_bytes()) {
            Ok(()) => {
                self.state.lock().stats.device_read_bytes += BLOCK_BYTES as u64;
                Some(Ok((number, block.sequence)))
            }
            Err(error) => {
                let is_alone = self.reads_another();
                let mut state = self.state.lock();
                state.stats.io_errors += 1;
                if is_alone {
                    state.blocks.end_cleaning(number);
                } else {
                    state.blocks.resume(number);
                }
                drop(state);
                Some(Err(self.io_error(error)))
            }
        }
    }

    /// Whether another block can be read: then it was one block that failed, and not the device.
    fn reads_another(&self) -> bool {
        let place = {
            let state = self.state.lock();
            state
                .blocks
                .fullest()
                .map(|block| place_of(&state.slots, block.place))
        };
        let mut page = Page::zeroed(1);
        place.is_some_and(|(slot, offset)| self.backend.read(slot, offset, page.as_mut_bytes()).is_ok())
    }

    /// Ends the cleaning of a block whose live objects were moved, but for damaged ones.
    pub(crate) fn end_cleaning(&self, number: u32) {
        let mut state = self.state.lock();
        if state.blocks.end_cleaning(number) {
            state.stats.cleaned_blocks += 1;
        }
    }
}
