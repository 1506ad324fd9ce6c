//! Segments: records over a chain of places of 128 KiB, each with a head.
//!
//! ```text
//! 0   u32  CRC-32C of bytes 4.. to the end of the payload
//! 4   u32  bytes of payload
//! 8   u64  id of the file
//! 16  u64  generation of the segment
//! 24  u32  number of the part in the segment
//! 28  u32  place of the next part; 2^32 - 1: none
//! 32  payload
//! ```

use super::{Malformed, put, u32_at, u64_at};
use crate::layout::BLOCK_BYTES;

/// Bytes before the payload.
pub(crate) const HEAD_BYTES: usize = 32;
/// Bytes of payload of a part.
pub(crate) const PAYLOAD_BYTES: usize = BLOCK_BYTES - HEAD_BYTES;
/// No place.
pub(crate) const NO_PLACE: u32 = u32::MAX;

/// What a part says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) file_id: u64,
    pub(crate) generation: u64,
    pub(crate) index: u32,
    pub(crate) next: u32,
}

impl Head {
    /// Puts the head before `len` bytes of payload, which are in `part` already.
    pub(crate) fn seal(&self, part: &mut [u8], len: usize) {
        put(part, 4, &(len as u32).to_le_bytes());
        put(part, 8, &self.file_id.to_le_bytes());
        put(part, 16, &self.generation.to_le_bytes());
        put(part, 24, &self.index.to_le_bytes());
        put(part, 28, &self.next.to_le_bytes());
        let crc = crc32c::crc32c(&part[4..HEAD_BYTES + len]);
        put(part, 0, &crc.to_le_bytes());
    }

    /// The next place and the payload of the part that is to be there.
    ///
    /// # Errors
    /// It is another one, or damaged.
    pub(crate) fn open<'a>(&self, part: &'a [u8]) -> Result<(u32, &'a [u8]), Malformed> {
        let wrong = || {
            Malformed::new(format!(
                "part {} of the segment of generation {} is not there",
                self.index, self.generation
            ))
        };
        let len = u32_at(part, 4) as usize;
        let end = HEAD_BYTES
            .checked_add(len)
            .filter(|end| *end <= part.len() && len <= PAYLOAD_BYTES);
        let bytes = end.and_then(|end| part.get(..end)).ok_or_else(wrong)?;
        let is_right = crc32c::crc32c(&bytes[4..]) == u32_at(bytes, 0)
            && u64_at(bytes, 8) == self.file_id
            && u64_at(bytes, 16) == self.generation
            && u32_at(bytes, 24) == self.index;
        if !is_right {
            return Err(wrong());
        }
        Ok((u32_at(bytes, 28), &bytes[HEAD_BYTES..]))
    }
}
