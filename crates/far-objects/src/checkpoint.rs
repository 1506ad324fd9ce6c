//! Bytes of a checkpoint: two roots, and segments of records about tables, blocks, pools and handles.
//!
//! Owns the format, which docs/reference/checkpoint.md describes; parses bytes that may be anything. Knows no
//! file and no heap.

mod records;
mod root;
mod segment;

pub(crate) use records::{
    ArrayRecord, BlockRow, Failure, MapRecord, Out, PoolRow, Row, Sink, TableRow, decode,
};
pub(crate) use root::{ROOT_BYTES, ROOT_SLOTS, Root, SEGMENTS_MAX, SegmentRef, choose};
pub(crate) use segment::{HEAD_BYTES, Head, NO_PLACE, PAYLOAD_BYTES};

/// The version that is written, and the newest that is read.
pub const CHECKPOINT_VERSION: u32 = 1;
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
