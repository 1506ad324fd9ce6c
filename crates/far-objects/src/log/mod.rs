//! The object store: a log of blocks over the slabs of a backend (section 3.2.5).
//!
//! Owns where bytes are, how many of a block are live, and what was written. Knows objects by number only:
//! who
//! holds the tables says what is garbage. One lock guards the records and the blocks in memory; the
//! device is read and written without it.
//!
//! A block lives like this: *open* (filled in memory), *pending* (full, in memory), *sealed* (on the device),
//! *cleaning*, free again. A block stays in memory until the device has taken it, so a write that fails
//! loses nothing. Memory is bounded: [`PENDING_MAX`] blocks wait at most, and then nothing is appended.

mod checkpoints;
mod device;
mod space;

pub(crate) use checkpoints::{PLACE_MEMORY_BYTES, Restored, place_offset, places};

use crate::budget::Budget;
use crate::error::Error;
use crate::layout::{self, BLOCK_BYTES, BLOCK_PAYLOAD_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use parking_lot::{Condvar, Mutex};
use space::{Blocks, RESERVED_BLOCKS};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use varve_far::backend::SLAB_BYTES;
use varve_far::{Backend, BackendError, PAGE_BYTES, Page, Slot};
use zerocopy::IntoBytes;

/// Blocks that wait for the device at most.
pub(crate) const PENDING_MAX: usize = 2;
/// Memory of the blocks that are open, wait, or are spare.
pub(crate) const BUFFER_BYTES: u64 = (2 + PENDING_MAX + SPARES_MAX) as u64 * BLOCK_BYTES as u64;
/// The fewest slabs that a log works in.
pub(crate) const SLABS_MIN: u32 = 4;

const SPARES_MAX: usize = 1;
/// Bytes of a checkpoint's tables for an object: an old and a new one, and changes.
const TABLE_BYTES: usize = 16;
const SLAB_BLOCKS: u32 = (SLAB_BYTES / BLOCK_BYTES) as u32;
/// Places that are tried before a write is given up.
const WRITE_TRIES: usize = 3;
/// Sealed blocks between two tries to get a slab from a backend that was full.
const GROWTH_PAUSE: u64 = 64;

/// A block's bytes, aligned for direct I/O.
pub(crate) type Buffer = Vec<Page>;

/// Whose objects are appended. The cleaner's lie apart: what survives a cleaning is colder than what is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    User,
    Cleaner,
    /// What a checkpoint needs of objects as they were at its cut.
    Checkpoint,
}

/// Why nothing was appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// Too many blocks wait: [`Log::write_pending`] first.
    Pending,
    /// No block is free: clean first.
    Space,
}

/// What the log did and has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Bytes that were written to the device.
    pub device_write_bytes: u64,
    /// Bytes that were read from it, as wanted; direct I/O reads whole pages.
    pub device_read_bytes: u64,
    /// Data of objects that were appended anew.
    pub appended_bytes: u64,
    /// Their number.
    pub appended: u64,
    /// Data of objects that the cleaner moved.
    pub moved_bytes: u64,
    /// Data of objects that checkpoints appended.
    pub saved_bytes: u64,
    /// Blocks that it cleaned.
    pub cleaned_blocks: u64,
    /// Blocks and places that are no longer used, since they could not be read or written.
    pub retired_blocks: u64,
    /// Reads and writes that failed.
    pub io_errors: u64,
    /// Objects that had a wrong checksum.
    pub damaged: u64,
    /// Bytes of blocks that objects could fill, reserve included.
    pub capacity_bytes: u64,
    /// Bytes of them that hold live objects, headers included.
    pub live_bytes: u64,
    /// Bytes that are promised to allocated objects, stored or not.
    pub promised_bytes: u64,
}

struct Open {
    block: u32,
    sequence: u32,
    at: usize,
    buffer: Buffer,
}

struct Pending {
    block: u32,
    buffer: Arc<Buffer>,
    is_claimed: bool,
}

#[derive(Default)]
struct State {
    blocks: Blocks,
    slots: Vec<Slot>,
    /// Blocks sealed when the backend last refused a slab.
    refused_at: Option<u64>,
    open: [Option<Open>; 3],
    /// Places that the tables of checkpoints have.
    table_places: u64,
    pending: Vec<Pending>,
    spares: Vec<Buffer>,
    sealed: u64,
    largest_bytes: usize,
    stats: LogStats,
}

/// The object store.
pub(crate) struct Log {
    backend: Box<dyn Backend>,
    fill_max: f64,
    /// Blocks that only checkpoints take; none where there are no checkpoints.
    reserve: usize,
    /// Blocks that the cleaner leaves: the reserve, but for the time in which it refills that.
    floor: AtomicUsize,
    /// Where the memory of the records is counted.
    budget: Arc<Budget>,
    state: Mutex<State>,
    written: Condvar,
}

impl Log {
    /// A log over a backend, of which at most `fill_max` (0 to 1) is promised to objects.
    ///
    /// # Errors
    /// `Config` where the backend has fewer slabs than [`SLABS_MIN`].
    pub(crate) fn new(
        backend: Box<dyn Backend>,
        fill_max: f64,
        reserve: usize,
        budget: Arc<Budget>,
    ) -> Result<Self, Error> {
        if backend.capacity_slabs() < SLABS_MIN {
            return Err(Error::Config(format!(
                "{}: {} slabs of 1 MiB are too few for an object store, which needs {SLABS_MIN}",
                backend.name(),
                backend.capacity_slabs()
            )));
        }
        Ok(Self {
            backend,
            fill_max,
            reserve,
            floor: AtomicUsize::new(reserve),
            budget,
            state: Mutex::default(),
            written: Condvar::new(),
        })
    }

    pub(crate) fn device(&self) -> String {
        self.backend.name().to_owned()
    }

    fn io_error(&self, error: BackendError) -> Error {
        match error {
            BackendError::Full => Error::Full {
                device: self.device(),
            },
            error => Error::Io {
                device: self.device(),
                error,
            },
        }
    }

    /// Blocks that the backend has or may still give.
    fn capacity_blocks(&self, state: &State) -> u64 {
        let slabs = match state.refused_at {
            Some(_) => state.slots.len() as u64,
            None => u64::from(self.backend.capacity_slabs()),
        };
        (slabs * u64::from(SLAB_BLOCKS)).saturating_sub(state.blocks.retired() + state.table_places)
    }

    /// Free places, given or not, less those that open and pending blocks need.
    fn available(&self, state: &State) -> usize {
        let more = match state.refused_at {
            Some(_) => 0,
            None => (self.backend.capacity_slabs() as usize - state.slots.len()) * SLAB_BLOCKS as usize,
        };
        let needed = state.pending.len() + state.open.iter().flatten().count();
        (state.blocks.free_places() + more).saturating_sub(needed)
    }

    /// Blocks that may still be started before something has to be cleaned.
    pub(crate) fn available_blocks(&self) -> usize {
        self.available(&self.state.lock()).saturating_sub(self.reserve)
    }

    /// Blocks that only checkpoints take.
    pub(crate) fn reserve(&self) -> usize {
        self.reserve
    }

    /// Blocks that may still be started by a checkpoint.
    pub(crate) fn room_blocks(&self) -> usize {
        self.available(&self.state.lock())
    }

    fn floor(&self) -> usize {
        self.floor.load(Ordering::Relaxed)
    }

    /// Lets the cleaner use the reserve but for so many blocks; `None`: no more.
    pub(crate) fn lend_reserve(&self, but_blocks: Option<usize>) {
        let floor = but_blocks.unwrap_or(self.reserve).min(self.reserve);
        self.floor.store(floor, Ordering::Relaxed);
    }

    /// Blocks that are free but for checkpoints.
    pub(crate) fn held_blocks(&self) -> usize {
        self.state.lock().blocks.held()
    }

    /// Whether blocks wait for the device and nobody writes them.
    pub(crate) fn has_pending(&self) -> bool {
        self.state
            .lock()
            .pending
            .iter()
            .any(|pending| !pending.is_claimed)
    }

    /// What an object is promised: its bytes and, where there are checkpoints, those of its entries in
    /// tables.
    pub(crate) fn promised_each(&self, len_bytes: usize) -> usize {
        layout::footprint_bytes(len_bytes) + if self.reserve == 0 { 0 } else { TABLE_BYTES }
    }

    /// Promises room for `count` objects of `len_bytes`. As long as all that is stored was promised, cleaning
    /// finds room for it.
    ///
    /// # Errors
    /// `Full`; `TooMany` on overflow.
    pub(crate) fn promise(&self, count: usize, len_bytes: usize) -> Result<(), Error> {
        let footprint = self.promised_each(len_bytes);
        let wanted = count
            .checked_mul(footprint)
            .ok_or(Error::TooMany { count, len_bytes })? as u64;
        let mut state = self.state.lock();
        let largest = state.largest_bytes.max(layout::footprint_bytes(len_bytes));
        // At a block's end, room for all but the largest object may be lost.
        let block_bytes = (BLOCK_PAYLOAD_BYTES - (largest - 1)) as f64;
        let reserved = RESERVED_BLOCKS + self.reserve as u64;
        let blocks = self.capacity_blocks(&state).saturating_sub(reserved);
        let limit = (blocks as f64 * self.fill_max * block_bytes) as u64;
        let promised = state.stats.promised_bytes.saturating_add(wanted);
        if promised > limit {
            return Err(Error::Full {
                device: self.device(),
            });
        }
        state.largest_bytes = largest;
        state.stats.promised_bytes = promised;
        Ok(())
    }

    /// Takes a promise back.
    pub(crate) fn release(&self, count: usize, len_bytes: usize) {
        let mut state = self.state.lock();
        let bytes = (count * self.promised_each(len_bytes)) as u64;
        debug_assert!(state.stats.promised_bytes >= bytes);
        state.stats.promised_bytes = state.stats.promised_bytes.saturating_sub(bytes);
    }

    /// Appends an object and makes the place of its older version garbage. Gives its sector. Memory only.
    pub(crate) fn append(
        &self,
        stream: Stream,
        number: u64,
        data: &[u8],
        old: Option<u64>,
    ) -> Result<u64, NoRoom> {
        let footprint = layout::footprint_bytes(data.len());
        let mut state = self.state.lock();
        self.open_for(&mut state, stream, footprint)?;
        let state = &mut *state;
        let Some(open) = &mut state.open[stream as usize] else {
            return Err(NoRoom::Space);
        };
        let sector = layout::append(open.buffer.as_mut_bytes(), open.at, open.sequence, number, data);
        open.at += footprint;
        state.blocks.add_live(open.block, footprint);
        let sector = u64::from(open.block) * BLOCK_SECTORS as u64 + sector as u64;
        if let Some(old) = old {
            state.blocks.kill(block_of(old), footprint);
        }
        match stream {
            Stream::User => {
                state.stats.appended += 1;
                state.stats.appended_bytes += data.len() as u64;
            }
            Stream::Cleaner => state.stats.moved_bytes += data.len() as u64,
            Stream::Checkpoint => state.stats.saved_bytes += data.len() as u64,
        }
        Ok(sector)
    }

    /// Makes sure that the stream's open block has room; closes a full one and starts the next.
    fn open_for(&self, state: &mut State, stream: Stream, footprint: usize) -> Result<(), NoRoom> {
        let is_full = match &state.open[stream as usize] {
            Some(open) if open.at + footprint <= BLOCK_PAYLOAD_BYTES => return Ok(()),
            Some(_) => true,
            None => false,
        };
        if is_full && state.pending.len() >= PENDING_MAX {
            return Err(NoRoom::Pending);
        }
        // The last blocks are the cleaner's, which gives back more than it takes.
        let kept = match stream {
            Stream::User => 2 + self.reserve,
            Stream::Cleaner => self.floor(),
            Stream::Checkpoint => 0,
        };
        self.grow(state, kept);
        if self.available(state) <= kept {
            return Err(NoRoom::Space);
        }
        if let Some(open) = state.open[stream as usize].take() {
            state.blocks.pend(open.block);
            state.pending.push(Pending {
                block: open.block,
                buffer: Arc::new(open.buffer),
                is_claimed: false,
            });
        }
        let mut buffer = state.spares.pop().unwrap_or_default();
        if buffer.is_empty() {
            buffer = Page::zeroed(BLOCK_BYTES / PAGE_BYTES);
        } else {
            buffer.as_mut_bytes().fill(0);
        }
        let (block, sequence) = state.blocks.begin(stream == Stream::Checkpoint);
        state.open[stream as usize] = Some(Open {
            block,
            sequence,
            at: 0,
            buffer,
        });
        Ok(())
    }

    /// Gets a slab from the backend where the free places do not suffice.
    fn grow(&self, state: &mut State, kept: usize) {
        let needed = state.pending.len() + state.open.iter().flatten().count() + 1 + kept;
        if state
            .refused_at
            .is_some_and(|at| state.sealed >= at + GROWTH_PAUSE)
        {
            state.refused_at = None;
        }
        while state.blocks.free_places() <= needed
            && state.refused_at.is_none()
            && (state.slots.len() as u64) < u64::from(self.backend.capacity_slabs())
        {
            match self.backend.alloc() {
                Ok(slot) => {
                    let first = state.slots.len() as u32 * SLAB_BLOCKS;
                    state.slots.push(slot);
                    state.blocks.add_places(first..first + SLAB_BLOCKS);
                    self.budget
                        .force(u64::from(SLAB_BLOCKS) * Blocks::BLOCK_MEMORY_BYTES);
                }
                Err(error) => {
                    if !matches!(error, BackendError::Full) {
                        state.stats.io_errors += 1;
                    }
                    state.refused_at = Some(state.sealed);
                }
            }
        }
    }

    /// Makes an object's place garbage.
    pub(crate) fn kill(&self, sector: u64, len_bytes: usize) {
        let footprint = layout::footprint_bytes(len_bytes);
        self.state.lock().blocks.kill(block_of(sector), footprint);
    }

    /// What happened so far.
    pub(crate) fn stats(&self) -> LogStats {
        let state = self.state.lock();
        LogStats {
            retired_blocks: state.blocks.retired(),
            capacity_bytes: self.capacity_blocks(&state) * BLOCK_PAYLOAD_BYTES as u64,
            live_bytes: state.blocks.live_bytes(),
            ..state.stats
        }
    }
}

/// Sectors that a backend of that many slabs has.
pub(crate) fn sectors(slabs: u32) -> u64 {
    u64::from(slabs) * (SLAB_BYTES / SECTOR_BYTES) as u64
}

/// The number of a sector's block.
pub(crate) fn block_of(sector: u64) -> u32 {
    (sector / BLOCK_SECTORS as u64) as u32
}

/// Slot and offset of a place.
fn place_of(slots: &[Slot], place: u32) -> (Slot, usize) {
    let slot = slots[(place / SLAB_BLOCKS) as usize];
    (slot, (place % SLAB_BLOCKS) as usize * BLOCK_BYTES)
}

impl Drop for Log {
    fn drop(&mut self) {
        for slot in self.state.get_mut().slots.drain(..) {
            self.backend.dealloc(slot);
        }
    }
}
