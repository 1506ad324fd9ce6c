//! Finds entries in a log: chunk cursors, their merge in sequence order, and the end of the log. Does not
//! interpret operations.
//!
//! A log is a row of 2 MiB chunks. In each, entries follow one another from its start with growing sequence
//! numbers; the first one with a wrong checksum, or whose number does not grow, ends the chunk. The chunks
//! are merged by number without holding an index: one cursor a chunk. A client may change the bytes at any
//! time, so each header and payload is copied once and only the copy is used. Payloads left in the log are
//! the exception: the code that copies them verifies them (`Entry::left_at`).

mod cursor;
mod merge;
#[cfg(test)]
mod tests;

pub use cursor::{Cursors, newest_entry, pending_bytes};
pub use merge::{
    Batch, BatchLimit, Damage, Entry, GatherLimits, NewestTx, Refused, SealScan, Transaction, gather,
    seal_scan,
};

/// The bytes of a session's log.
pub trait LogBytes {
    /// Error of a failed read.
    type Error;

    /// Copies `out.len()` bytes at `offset`, which lie within the log.
    ///
    /// # Errors
    /// The device's error.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Self::Error>;

    /// Returns [`payload_crc`](varve_format::log::payload_crc). Implementations may override this with a
    /// faster computation of the same checksum.
    fn payload_crc(&self, seed: u32, payload: &[u8]) -> u32 {
        varve_format::log::payload_crc(seed, payload)
    }

    /// Returns the length of the log in bytes; only whole chunks count.
    fn len_bytes(&self) -> u64;
}

/// Why a log cannot be scanned at all.
#[derive(Debug, thiserror::Error)]
pub enum ScanError<E> {
    /// The device failed.
    #[error("reading the log failed: {0}")]
    Device(E),
}
