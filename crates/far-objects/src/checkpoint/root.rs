//! Roots: the last thing of a checkpoint that is written.
//!
//! ```text
//! 0    magic, 8 bytes
//! 8    u32  version: 2 where slots have an owner, 1 otherwise
//! 12   u32  CRC-32C of the 4096 bytes, with zeros here; so in every version
//! 16   u64  schema tag of the program
//! 24   u64  generation: one more than the checkpoint before
//! 32   u64  id of the file, chosen when it was made
//! 40   u32  slabs that the store may have
//! 44   u32  slabs that it has
//! 48   u32  sequence number of the last block
//! 52   u32  epoch: cuts that were made
//! 56   u64  number of the next handle
//! 64   u32  segments
//! 68   60 bytes of zeros
//! 128  segments, 32 bytes each: u64 generation, u64 bytes, u32 first place, u32 places, 8 bytes of zeros
//! ```

use super::{CHECKPOINT_VERSION, put, u32_at, u64_at};
use crate::error::Refusal;

/// Bytes of a root.
pub(crate) const ROOT_BYTES: usize = 4096;
/// Roots of a file, one behind the other from its beginning on.
pub(crate) const ROOT_SLOTS: usize = 2;
/// Segments of a checkpoint at most.
pub(crate) const SEGMENTS_MAX: usize = 64;

const MAGIC: [u8; 8] = *b"VarveFOC";
const SEGMENTS_AT: usize = 128;
const SEGMENT_BYTES: usize = 32;
/// The version that has records of slots.
const SLOTS_VERSION: u32 = 2;

const _: () = assert!(SLOTS_VERSION <= CHECKPOINT_VERSION);
const _: () = assert!(SEGMENTS_AT + SEGMENTS_MAX * SEGMENT_BYTES <= ROOT_BYTES);

/// Where a segment begins, and how long it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentRef {
    /// Of the checkpoint that it was written for.
    pub(crate) generation: u64,
    /// Bytes of its records.
    pub(crate) len_bytes: u64,
    /// Place of its first part.
    pub(crate) first: u32,
    /// Places that it has.
    pub(crate) places: u32,
}

/// A root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Root {
    pub(crate) schema_tag: u64,
    pub(crate) generation: u64,
    pub(crate) file_id: u64,
    pub(crate) capacity_slabs: u32,
    pub(crate) given_slabs: u32,
    pub(crate) sequence: u32,
    pub(crate) epoch: u32,
    pub(crate) next_handle: u64,
    /// Whether somebody outside of the heap has slots of it.
    pub(crate) has_slots: bool,
    pub(crate) segments: Vec<SegmentRef>,
}

impl Root {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        debug_assert!(self.segments.len() <= SEGMENTS_MAX);
        let mut bytes = vec![0; ROOT_BYTES];
        put(&mut bytes, 0, &MAGIC);
        let version = if self.has_slots { SLOTS_VERSION } else { 1 };
        put(&mut bytes, 8, &version.to_le_bytes());
        put(&mut bytes, 16, &self.schema_tag.to_le_bytes());
        put(&mut bytes, 24, &self.generation.to_le_bytes());
        put(&mut bytes, 32, &self.file_id.to_le_bytes());
        put(&mut bytes, 40, &self.capacity_slabs.to_le_bytes());
        put(&mut bytes, 44, &self.given_slabs.to_le_bytes());
        put(&mut bytes, 48, &self.sequence.to_le_bytes());
        put(&mut bytes, 52, &self.epoch.to_le_bytes());
        put(&mut bytes, 56, &self.next_handle.to_le_bytes());
        put(&mut bytes, 64, &(self.segments.len() as u32).to_le_bytes());
        for (number, segment) in self.segments.iter().take(SEGMENTS_MAX).enumerate() {
            let at = SEGMENTS_AT + number * SEGMENT_BYTES;
            put(&mut bytes, at, &segment.generation.to_le_bytes());
            put(&mut bytes, at + 8, &segment.len_bytes.to_le_bytes());
            put(&mut bytes, at + 16, &segment.first.to_le_bytes());
            put(&mut bytes, at + 20, &segment.places.to_le_bytes());
        }
        let crc = checksum(&bytes);
        put(&mut bytes, 12, &crc.to_le_bytes());
        bytes
    }

    /// The root that these bytes are.
    ///
    /// # Errors
    /// `Foreign` without the magic, `Incomplete` with a wrong checksum, `Newer`.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        if bytes.get(..MAGIC.len()) != Some(&MAGIC) {
            return Err(Refusal::Foreign);
        }
        if bytes.len() != ROOT_BYTES || u32_at(bytes, 12) != checksum(bytes) {
            return Err(Refusal::Incomplete);
        }
        let version = u32_at(bytes, 8);
        if version > CHECKPOINT_VERSION {
            return Err(Refusal::Newer { version });
        }
        let count = u32_at(bytes, 64) as usize;
        if version == 0 || count > SEGMENTS_MAX {
            return Err(Refusal::Malformed(format!("version {version}, {count} segments")));
        }
        let segment = |number: usize| {
            let at = SEGMENTS_AT + number * SEGMENT_BYTES;
            SegmentRef {
                generation: u64_at(bytes, at),
                len_bytes: u64_at(bytes, at + 8),
                first: u32_at(bytes, at + 16),
                places: u32_at(bytes, at + 20),
            }
        };
        Ok(Self {
            schema_tag: u64_at(bytes, 16),
            generation: u64_at(bytes, 24),
            file_id: u64_at(bytes, 32),
            capacity_slabs: u32_at(bytes, 40),
            given_slabs: u32_at(bytes, 44),
            sequence: u32_at(bytes, 48),
            epoch: u32_at(bytes, 52),
            next_handle: u64_at(bytes, 56),
            has_slots: version >= SLOTS_VERSION,
            segments: (0..count).map(segment).collect(),
        })
    }
}

fn checksum(bytes: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&bytes[..12]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[16..])
}

/// The newest root of a file and its slot.
///
/// # Errors
/// A root of a newer version is one, whatever the other is; otherwise what is wrong with the better one.
pub(crate) fn choose(slots: [&[u8]; ROOT_SLOTS]) -> Result<(usize, Root), Refusal> {
    let mut best: Option<(usize, Root)> = None;
    let mut worst = Refusal::Foreign;
    for (number, bytes) in slots.into_iter().enumerate() {
        match Root::parse(bytes) {
            Ok(root) => {
                if best
                    .as_ref()
                    .is_none_or(|(_, other)| other.generation < root.generation)
                {
                    best = Some((number, root));
                }
            }
            Err(refusal @ (Refusal::Newer { .. } | Refusal::Malformed(_))) => return Err(refusal),
            Err(Refusal::Incomplete) => worst = Refusal::Incomplete,
            Err(_) => {}
        }
    }
    best.ok_or(worst)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn root(generation: u64) -> Root {
        Root {
            schema_tag: 7,
            generation,
            file_id: 8,
            capacity_slabs: 9,
            given_slabs: 4,
            sequence: 10,
            epoch: 11,
            next_handle: 12,
            has_slots: generation.is_multiple_of(2),
            segments: (0..SEGMENTS_MAX as u32)
                .map(|number| SegmentRef {
                    generation,
                    len_bytes: 5,
                    first: number,
                    places: 1,
                })
                .collect(),
        }
    }

    #[test]
    fn root_reads_back_what_was_written() {
        assert_eq!(Root::parse(&root(3).to_bytes()).unwrap(), root(3));
    }

    #[test]
    fn newest_whole_root_is_chosen() {
        let (old, new) = (root(3).to_bytes(), root(4).to_bytes());
        assert_eq!(choose([&old, &new]).unwrap(), (1, root(4)));
        assert_eq!(choose([&new, &old]).unwrap(), (0, root(4)));
        for at in [0, 8, 12, 24, 300, 4095] {
            let mut torn = new.clone();
            torn[at] ^= 1;
            assert_eq!(choose([&torn, &old]).unwrap(), (1, root(3)));
        }
    }

    #[test]
    fn refusals_say_what_it_is() {
        let zeros = vec![0; ROOT_BYTES];
        assert_eq!(choose([&zeros, &zeros]), Err(Refusal::Foreign));
        let mut torn = root(3).to_bytes();
        torn[100] = 1;
        assert_eq!(choose([&zeros, &torn]), Err(Refusal::Incomplete));
        let mut newer = root(3).to_bytes();
        put(&mut newer, 8, &(CHECKPOINT_VERSION + 1).to_le_bytes());
        let crc = checksum(&newer);
        put(&mut newer, 12, &crc.to_le_bytes());
        assert_eq!(
            choose([&newer, &root(9).to_bytes()]),
            Err(Refusal::Newer {
                version: CHECKPOINT_VERSION + 1
            })
        );
    }
}
