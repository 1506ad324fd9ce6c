//! The RAM object cache of one shard (section 3.2.2): objects in memory, packed, without the rest of their
//! pages.
//!
//! Owns the bytes, what is dirty and what was used lately. Which object leaves is decided by a clock with two
//! bits: an approximation of LRU that a hit does not have to lock lists for.

use crate::table::Key;

/// A clock's count of uses at most.
const RECENT_MAX: u8 = 2;

/// One object in memory.
#[derive(Debug)]
pub(crate) struct Frame {
    data: Box<[u8]>,
    /// Sector of the same bytes in the log, plus 1; 0: there is none.
    stored: u64,
    table: u32,
    slot: u16,
    /// Uses that the clock counts, and [`DIRTY`].
    flags: u8,
    pins: u8,
}

/// Flag of a frame: the bytes are newer than the log's.
const DIRTY: u8 = 0x80;

const _: () = assert!(size_of::<Frame>() == 32);

impl Frame {
    pub(crate) fn key(&self) -> Key {
        Key {
            table: self.table,
            slot: u32::from(self.slot),
        }
    }

    pub(crate) fn data(&self) -> &[u8] {
        &self.data
    }

    pub(crate) fn is_dirty(&self) -> bool {
        self.flags & DIRTY != 0
    }

    /// Sector of the same bytes in the log.
    pub(crate) fn stored(&self) -> Option<u64> {
        self.stored.checked_sub(1)
    }

    pub(crate) fn set_stored(&mut self, sector: u64) {
        self.stored = sector + 1;
    }

    /// The same bytes are in the log now.
    pub(crate) fn set_clean(&mut self, sector: u64) {
        self.flags &= !DIRTY;
        self.stored = sector + 1;
    }

    /// Counts a use.
    pub(crate) fn touch(&mut self) {
        self.flags = self.flags & DIRTY | RECENT_MAX;
    }

    /// The bytes, to be changed. Gives the sector that held them, which is garbage now.
    pub(crate) fn dirty(&mut self) -> (&mut [u8], Option<u64>) {
        self.flags |= DIRTY;
        let stored = std::mem::take(&mut self.stored).checked_sub(1);
        (&mut self.data, stored)
    }

    /// Keeps the object in memory. False if too many do so.
    #[must_use]
    pub(crate) fn pin(&mut self) -> bool {
        match self.pins.checked_add(1) {
            Some(pins) => {
                self.pins = pins;
                true
            }
            None => false,
        }
    }

    pub(crate) fn unpin(&mut self) {
        self.pins = self.pins.saturating_sub(1);
    }
}

/// Memory that an object in memory takes: its bytes as the allocator rounds them.
pub(crate) fn data_bytes(len_bytes: usize) -> u64 {
    (len_bytes.next_multiple_of(16) + 16) as u64
}

/// Bytes of a frame beside its data.
pub(crate) const FRAME_BYTES: u64 = size_of::<Frame>() as u64;

/// The objects in memory of one shard.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    all: Vec<Frame>,
    free: Vec<u32>,
    hand: usize,
}

impl Frames {
    /// Frames, in use or not.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn get(&self, index: u32) -> &Frame {
        &self.all[index as usize]
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> &mut Frame {
        &mut self.all[index as usize]
    }

    /// Adds an object. Gives its frame, and how many bytes of memory the frames themselves grew by.
    pub(crate) fn insert(&mut self, key: Key, data: Box<[u8]>, stored: Option<u64>) -> (u32, u64) {
        let frame = Frame {
            data,
            stored: stored.map_or(0, |sector| sector + 1),
            table: key.table,
            slot: key.slot as u16,
            // A first use is no sign of a second one: it goes before those that were used again.
            flags: 0,
            pins: 0,
        };
        if let Some(index) = self.free.pop() {
            self.all[index as usize] = frame;
            return (index, 0);
        }
        let before = self.all.capacity();
        if self.all.len() == before {
            self.all.reserve_exact((before / 8).max(16));
            self.free.reserve_exact(self.all.capacity() - self.free.len());
        }
        self.all.push(frame);
        let grown = (self.all.capacity() - before) as u64 * (FRAME_BYTES + size_of::<u32>() as u64);
        ((self.all.len() - 1) as u32, grown)
    }

    /// Drops an object. Gives the memory of its bytes.
    pub(crate) fn remove(&mut self, index: u32) -> u64 {
        let frame = &mut self.all[index as usize];
        let len = frame.data.len();
        frame.data = Box::default();
        frame.pins = 0;
        self.free.push(index);
        data_bytes(len)
    }

    /// Moves the clock's hand on by one frame, and gives it if its object may leave now.
    pub(crate) fn next_candidate(&mut self) -> Option<u32> {
        self.hand = if self.hand + 1 >= self.all.len() {
            0
        } else {
            self.hand + 1
        };
        let frame = self.all.get_mut(self.hand)?;
        if frame.data.is_empty() || frame.pins != 0 {
            return None;
        }
        if frame.flags & !DIRTY != 0 {
            frame.flags -= 1;
            return None;
        }
        Some(self.hand as u32)
    }
}
