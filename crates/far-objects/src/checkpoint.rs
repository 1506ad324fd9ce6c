//! Bytes of a checkpoint: two roots, and segments of records about tables, blocks, pools, handles and slots.
//!
//! Owns the format, which docs/reference/checkpoint.md describes; parses bytes that may be anything. Knows no
//! file and no heap.

mod records;
mod root;
mod segment;

pub use records::SlotsRecord;
pub(crate) use records::{
    ArrayRecord, BlockRow, Failure, MapRecord, NOTE_MAX_BYTES, Out, PoolRow, Row, Sink, TableRow, decode,
};
pub(crate) use root::{ROOT_BYTES, ROOT_SLOTS, Root, SEGMENTS_MAX, SegmentRef, choose};
pub(crate) use segment::{HEAD_BYTES, Head, NO_PLACE, PAYLOAD_BYTES};

/// The newest version that is read. It is written of heaps whose slots somebody outside has; others are of
/// version 1.
pub const CHECKPOINT_VERSION: u32 = 2;
/// Bytes of the record that a program may put into a checkpoint.
pub const RECORD_MAX_BYTES: usize = 4096;

/// The bytes are not a checkpoint's: what is wrong with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) String);

impl Malformed {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |chunk| u32::from_le_bytes(*chunk))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |chunk| u64::from_le_bytes(*chunk))
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}
