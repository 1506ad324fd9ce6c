//! A devdax device that holds a pool's NVM, its journal and its sessions' logs: the header and the table of
//! logs at its start. The parts themselves are as in files.
//!
//! Bytes 0..4,096 hold the [`DaxHeader`], bytes 4,096..8,192 a copy. The table begins at
//! [`DAX_ROWS_OFF`]: [`DAX_ROWS_PER_SLOT`] rows of 64 bytes for each slot, of which the valid one with the
//! higher generation counts; the other is written next. Everything else begins at multiples of
//! [`DAX_PART_BYTES`].

use crate::ids::SessionId;
use core::mem::offset_of;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the start of the device that hold header and table; parts begin at multiples of it.
pub const DAX_PART_BYTES: u64 = 2 << 20;
/// First byte of the header's copy.
pub const DAX_COPY_OFF: u64 = 4096;
/// First byte of the table.
pub const DAX_ROWS_OFF: u64 = 64 << 10;
/// Rows of one slot.
pub const DAX_ROWS_PER_SLOT: u64 = 2;
/// Bytes of a row.
pub const DAX_ROW_SIZE: u64 = 64;
/// Most slots.
pub const DAX_SLOTS_MAX: u64 = 4096;

/// Where the parts of a pool lie on its device. Written once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DaxHeader {
    /// [`DaxHeader::MAGIC`].
    pub magic: [u8; 8],
    /// The pool.
    pub pool_uuid: [u8; 16],
    /// Bytes of the device that are used.
    pub total_bytes: U64,
    /// First byte of the journal.
    pub journal_off: U64,
    /// Bytes of the journal.
    pub journal_bytes: U64,
    /// First byte of the NVM.
    pub nvm_off: U64,
    /// Bytes of the NVM.
    pub nvm_bytes: U64,
    /// First byte of the first slot.
    pub slots_off: U64,
    /// Bytes of a slot: one log.
    pub slot_bytes: U64,
    /// Number of slots.
    pub slots: U64,
    /// Format version, 1.
    pub version: U32,
    /// Zero.
    pub reserved: [u8; 32],
    /// CRC-32C of bytes 0..124.
    pub crc32c: U32,
}

/// The session whose log is in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DaxRow {
    /// The session; 0: the slot is free.
    pub session: U64,
    /// Bytes of the log.
    pub len_bytes: U64,
    /// Number of this change of the slot, from 1 on.
    pub generation: U64,
    /// Zero.
    pub reserved: [u8; 36],
    /// CRC-32C of bytes 0..60.
    pub crc32c: U32,
}

const _: () = {
    assert!(size_of::<DaxHeader>() == 128);
    assert!(offset_of!(DaxHeader, crc32c) == 124);
    assert!(size_of::<DaxRow>() == DAX_ROW_SIZE as usize);
    assert!(offset_of!(DaxRow, crc32c) == 60);
    assert!(DAX_ROWS_OFF + DAX_SLOTS_MAX * DAX_ROWS_PER_SLOT * DAX_ROW_SIZE <= DAX_PART_BYTES);
};

impl DaxHeader {
    /// Marks a device of a pool.
    pub const MAGIC: [u8; 8] = *b"VARVEDAX";
    /// Version of this layout.
    pub const VERSION: u32 = 1;

    /// Sets magic, version and checksum.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.magic = Self::MAGIC;
        self.version = U32::new(Self::VERSION);
        self.crc32c = U32::new(crc32c::crc32c(&self.as_bytes()[..124]));
        self
    }

    /// Whether magic and checksum are right, whatever the version.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.magic == Self::MAGIC && self.crc32c.get() == crc32c::crc32c(&self.as_bytes()[..124])
    }

    /// Whether the parts lie one behind the other inside of `total_bytes`, at multiples of
    /// [`DAX_PART_BYTES`].
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let part = |off: U64, bytes: U64, from: u64| {
            let (off, bytes) = (off.get(), bytes.get());
            let fits = off.is_multiple_of(DAX_PART_BYTES) && bytes.is_multiple_of(4096) && off >= from;
            fits.then(|| off.checked_add(bytes)).flatten()
        };
        let end = part(self.journal_off, self.journal_bytes, DAX_PART_BYTES)
            .and_then(|end| part(self.nvm_off, self.nvm_bytes, end))
            .and_then(|end| part(self.slots_off, self.slot_bytes, end));
        let slots = self.slots.get();
        let all = slots.checked_mul(self.slot_bytes.get());
        let all = all.and_then(|bytes| bytes.checked_add(self.slots_off.get()));
        end.is_some()
            && slots <= DAX_SLOTS_MAX
            && self.slot_bytes.get().is_multiple_of(DAX_PART_BYTES)
            && all.is_some_and(|end| end <= self.total_bytes.get())
    }
}

impl DaxRow {
    /// A row with its checksum; `None`: the slot is free.
    #[must_use]
    pub fn new(log: Option<(SessionId, u64)>, generation: u64) -> Self {
        let (session, len_bytes) = log.map_or((0, 0), |(session, len)| (session.0, len));
        let mut row = Self {
            session: U64::new(session),
            len_bytes: U64::new(len_bytes),
            generation: U64::new(generation),
            reserved: [0; 36],
            crc32c: U32::new(0),
        };
        row.crc32c = U32::new(crc32c::crc32c(&row.as_bytes()[..60]));
        row
    }

    /// Whether it was written, and as a whole.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.generation.get() > 0 && self.crc32c.get() == crc32c::crc32c(&self.as_bytes()[..60])
    }

    /// The log in the slot, if there is one, and its length in bytes.
    #[must_use]
    pub fn log(&self) -> Option<(SessionId, u64)> {
        let session = SessionId(self.session.get());
        (session.0 != 0).then(|| (session, self.len_bytes.get()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{DAX_PART_BYTES, DaxHeader, DaxRow};
    use crate::ids::SessionId;
    use zerocopy::FromZeros;
    use zerocopy::little_endian::U64;
    use zerocopy::{FromBytes, IntoBytes};

    fn header() -> DaxHeader {
        let part = |n: u64| U64::new(n * DAX_PART_BYTES);
        DaxHeader {
            pool_uuid: *b"0123456789abcdef",
            total_bytes: part(40),
            journal_off: part(1),
            journal_bytes: part(4),
            nvm_off: part(5),
            nvm_bytes: part(15),
            slots_off: part(20),
            slot_bytes: part(2),
            slots: U64::new(10),
            ..DaxHeader::new_zeroed()
        }
        .sealed()
    }

    #[test]
    fn header_is_whole_until_a_bit_of_it_changes() {
        let good = header();
        assert!(good.is_whole() && good.is_sound());
        for bit in 0..128 * 8 {
            let mut bytes: [u8; 128] = good.as_bytes().try_into().unwrap();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(
                !DaxHeader::read_from_bytes(&bytes).unwrap().is_whole(),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn header_whose_parts_overlap_or_pass_the_end_is_not_sound() {
        let part = |n: u64| U64::new(n * DAX_PART_BYTES);
        let wrong: [&dyn Fn(&mut DaxHeader); 8] = [
            &|header| header.journal_off = part(0),
            &|header| header.nvm_off = part(4),
            &|header| header.slots_off = part(19),
            &|header| header.slots = U64::new(11),
            &|header| header.slots = U64::new(u64::MAX),
            &|header| header.nvm_bytes = U64::new(u64::MAX - 4095),
            &|header| header.slot_bytes = U64::new(4096),
            &|header| header.nvm_off = U64::new(5 * DAX_PART_BYTES + 4096),
        ];
        for (number, change) in wrong.iter().enumerate() {
            let mut header = header();
            change(&mut header);
            assert!(!header.sealed().is_sound(), "{number}");
        }
    }

    #[test]
    fn row_is_read_back_and_a_torn_one_is_not_valid() {
        let row = DaxRow::new(Some((SessionId(7), 4 << 20)), 3);
        assert!(row.is_valid());
        assert_eq!(row.log(), Some((SessionId(7), 4 << 20)));
        assert_eq!(DaxRow::new(None, 4).log(), None);
        assert!(!DaxRow::new_zeroed().is_valid());
        let next = DaxRow::new(Some((SessionId(7), 8 << 20)), 5);
        for words in 1..8 {
            let mut torn: [u8; 64] = row.as_bytes().try_into().unwrap();
            torn[..words * 8].copy_from_slice(&next.as_bytes()[..words * 8]);
            assert!(
                !DaxRow::read_from_bytes(&torn).unwrap().is_valid() || torn == row.as_bytes(),
                "{words}"
            );
        }
    }
}
