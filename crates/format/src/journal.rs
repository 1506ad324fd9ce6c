//! The metadata journal: two header copies, then a ring of redo records. Encodes and checks; knows nothing of
//! the meaning of the records.
//!
//! A record starts at a multiple of [`RECORD_ALIGN`] and never wraps: one that does not fit before the end of
//! the ring starts at [`RING_START`]. Its payload is a list of [`RangeHeader`]s, each followed by its bytes.

use crate::seeded::{Bug, armed};
use crate::{BLOCK_SIZE, BlockNo, TxId};
use std::mem::size_of;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Byte offset of the two copies of the [`JournalHeader`].
pub const HEADER_OFFSETS: [u64; 2] = [0, 4096];
/// Byte offset of the first record.
pub const RING_START: u64 = 8192;
/// Alignment of records, in bytes: no committed record shares a sector with one being written.
pub const RECORD_ALIGN: u64 = 512;
/// Smallest journal region, in bytes.
pub const JOURNAL_MIN_BYTES: u64 = 256 << 10;
/// Most bytes in one record, whatever the size of the journal.
pub const RECORD_MAX_BYTES: u64 = 4 << 20;

/// Start of replay. Written to two places in turn; the valid copy with the higher `sequence` counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct JournalHeader {
    /// [`JournalHeader::MAGIC`].
    pub magic: [u8; 8],
    /// The pool.
    pub pool_uuid: [u8; 16],
    /// Counts the writes of this header.
    pub sequence: U64,
    /// Byte offset in the region where record `tail_tx + 1` is expected.
    pub tail_offset: U64,
    /// The last transaction up to which all changes are in place and durable.
    pub tail_tx: U64,
    /// Bytes of the journal region.
    pub len_bytes: U64,
    /// Format version, 1.
    pub version: U32,
    /// CRC-32C of bytes 0..60.
    pub crc32c: U32,
}

const _: () = assert!(size_of::<JournalHeader>() == 64);

impl JournalHeader {
    /// Marks a journal.
    pub const MAGIC: [u8; 8] = *b"VARVEJNL";

    /// Returns this header with its checksum.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.crc32c = U32::new(self.sum());
        self
    }

    fn sum(&self) -> u32 {
        let covered = if armed(Bug::HeaderSumShort) { 32 } else { 60 };
        crc32c::crc32c(&self.as_bytes()[..covered])
    }

    /// Whether magic and checksum are right.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.magic == Self::MAGIC && self.crc32c.get() == self.sum()
    }
}

/// First bytes of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RecordHeader {
    /// [`RecordHeader::MAGIC`].
    pub magic: [u8; 8],
    /// The pool.
    pub pool_uuid: [u8; 16],
    /// Transaction.
    pub tx: U64,
    /// Bytes of the payload.
    pub payload_len: U32,
    /// Ranges in the payload.
    pub ranges: U32,
    /// CRC-32C of the payload.
    pub payload_crc32c: U32,
    /// Zero.
    pub reserved: [u8; 16],
    /// CRC-32C of bytes 0..60.
    pub crc32c: U32,
}

/// Checksum of a record's payload.
#[must_use]
pub fn record_crc(payload: &[u8]) -> u32 {
    if armed(Bug::RecordTailUnchecked) {
        let lines = payload.len() / RECORD_HEADER_SIZE * RECORD_HEADER_SIZE;
        return crc32c::crc32c(&payload[..lines.max(payload.len().min(RECORD_HEADER_SIZE))]);
    }
    crc32c::crc32c(payload)
}

/// Bytes of a [`RecordHeader`].
pub const RECORD_HEADER_SIZE: usize = 64;
const _: () = assert!(size_of::<RecordHeader>() == RECORD_HEADER_SIZE);

impl RecordHeader {
    /// Marks a record.
    pub const MAGIC: [u8; 8] = *b"VARVEREC";

    /// Builds a header for `payload`, with its checksums.
    #[must_use]
    pub fn new(pool_uuid: [u8; 16], tx: TxId, ranges: u32, payload: &[u8]) -> Self {
        let mut header = Self {
            magic: Self::MAGIC,
            pool_uuid,
            tx: U64::new(tx.0),
            payload_len: U32::new(payload.len() as u32),
            ranges: U32::new(ranges),
            payload_crc32c: U32::new(record_crc(payload)),
            reserved: [0; 16],
            crc32c: U32::new(0),
        };
        header.crc32c = U32::new(crc32c::crc32c(&header.as_bytes()[..60]));
        header
    }

    /// Whether magic, pool and the header's checksum are right.
    #[must_use]
    pub fn is_valid(&self, pool_uuid: [u8; 16]) -> bool {
        self.magic == Self::MAGIC
            && self.pool_uuid == pool_uuid
            && self.crc32c.get() == crc32c::crc32c(&self.as_bytes()[..60])
    }

    /// Returns the bytes that a record with `payload_len` bytes takes in the ring.
    #[must_use]
    pub const fn record_bytes(payload_len: u64) -> u64 {
        (RECORD_HEADER_SIZE as u64 + payload_len).next_multiple_of(RECORD_ALIGN)
    }
}

/// One range of one NVM block; `len` bytes follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RangeHeader {
    /// Block on NVM.
    pub block: U64,
    /// First byte in it.
    pub offset: U16,
    /// Bytes.
    pub len: U16,
}

/// Bytes of a [`RangeHeader`].
pub const RANGE_HEADER_SIZE: usize = 12;
const _: () = assert!(size_of::<RangeHeader>() == RANGE_HEADER_SIZE);

/// A range of a record: block, first byte in it, bytes.
pub type Range<'a> = (BlockNo, u16, &'a [u8]);

/// Parses the ranges of a record's payload whose checksum was right.
///
/// # Errors
/// If the payload is not a list of `ranges` ranges within blocks below `blocks`.
pub fn parse_ranges(payload: &[u8], ranges: u32, blocks: u64) -> Result<Vec<Range<'_>>, BadRecord> {
    let mut rest = payload;
    let mut out = Vec::new();
    for _ in 0..ranges {
        let (header, tail) = RangeHeader::read_from_prefix(rest).map_err(|_| BadRecord)?;
        let (offset, len) = (header.offset.get(), usize::from(header.len.get()));
        if usize::from(offset) + len > BLOCK_SIZE || header.block.get() >= blocks || tail.len() < len {
            return Err(BadRecord);
        }
        let (bytes, tail) = tail.split_at(len);
        out.push((BlockNo(header.block.get()), offset, bytes));
        rest = tail;
    }
    if rest.is_empty() { Ok(out) } else { Err(BadRecord) }
}

/// A record with a right checksum and invalid ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the journal record's ranges make no sense")]
pub struct BadRecord;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::{any, prop, proptest};

    #[test]
    fn record_header_is_refused_when_a_bit_flips() {
        let good = RecordHeader::new([3; 16], TxId(9), 0, b"");
        assert!(good.is_valid([3; 16]) && !good.is_valid([4; 16]));
        for byte in 0..RECORD_HEADER_SIZE {
            let mut bytes = [0; RECORD_HEADER_SIZE];
            bytes.copy_from_slice(good.as_bytes());
            bytes[byte] ^= 1;
            assert!(!RecordHeader::read_from_bytes(&bytes).unwrap().is_valid([3; 16]));
        }
    }

    proptest! {
        #[test]
        fn ranges_parse_never_panics_on_any_bytes(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            count in 0_u32..20,
        ) {
            for (block, offset, data) in parse_ranges(&bytes, count, 100).unwrap_or_default() {
                assert!(block.0 < 100 && usize::from(offset) + data.len() <= BLOCK_SIZE);
            }
        }
    }
}
