//! The layout of an object on the medium: a head (fixed part, tags, key) with the first bytes of its content,
//! and frames of up to 64 KiB with the rest. Every byte is checked, and every piece identifies its object.
//! Parses hostile bytes.

use crate::hash::KeyHash;
use std::ops::Range;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The first bytes of every head.
const MAGIC: u32 = 0x6F43_7656;
/// Bytes of the longest key.
pub const KEY_MAX: usize = 2048;
/// The most tags of an object.
pub const TAGS_MAX: usize = 16;
/// Bytes of the longest metadata.
pub const META_MAX: usize = 256 << 10;
/// The most bytes of a head in the log with the content beside it.
pub const INLINE_BYTES: usize = 64 << 10;
/// A frame on the medium.
pub const FRAME_BYTES: usize = 64 << 10;
/// Content of a full frame.
pub const FRAME_CONTENT: usize = FRAME_BYTES - size_of::<FrameHead>();
/// Marks `Head::home` as a place in the Disk Table.
pub const IN_TABLE: u64 = 1 << 63;

/// The fixed part of a head. Little-endian (checked at compile time). `head_crc` covers the whole head except
/// itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Head {
    magic: u32,
    head_crc: u32,
    /// The store that wrote it.
    pub store_id: u64,
    /// The number of the write, unique and increasing.
    pub version: u64,
    /// The point of the log that it was written to, or its bin with [`IN_TABLE`].
    pub home: u64,
    /// The point of the log at which the frames begin.
    pub tail: u64,
    /// Bytes of the body.
    pub body_len: u64,
    /// Time of the put, seconds since 1970.
    pub written_s: u64,
    /// Expiry, seconds since 1970; 0: never.
    pub expires_s: u64,
    /// Bytes of metadata; they precede the body in the content.
    pub meta_len: u32,
    /// Bytes of content beside the head.
    pub inline_len: u32,
    /// CRC-32C of these bytes.
    pub inline_crc: u32,
    /// Bytes of the key.
    pub key_len: u16,
    /// Number of tags.
    pub tag_count: u16,
    reserved: [u64; 2],
}

const _: () = {
    assert!(cfg!(target_endian = "little"), "media structs are little-endian");
    assert!(size_of::<Head>() == 96);
    assert!(size_of::<FrameHead>() == 16);
};

/// The first bytes of each frame.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct FrameHead {
    version: u64,
    index: u32,
    crc: u32,
}

/// A head with its key and tags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The fixed part.
    pub head: Head,
    /// Short hashes of tags and host.
    pub tags: Vec<u64>,
    /// The whole key.
    pub key: Vec<u8>,
}

impl Record {
    /// A record without a place.
    pub fn new(store_id: u64, version: u64, key: &[u8], tags: &[u64]) -> Self {
        let mut head = Head::new_zeroed();
        head.magic = MAGIC;
        head.store_id = store_id;
        head.version = version;
        head.key_len = key.len() as u16;
        head.tag_count = tags.len() as u16;
        Self {
            head,
            tags: tags.to_vec(),
            key: key.to_vec(),
        }
    }

    /// Bytes before the content.
    pub fn head_bytes(&self) -> usize {
        head_bytes(self.key.len(), self.tags.len())
    }

    /// Bytes of metadata and body.
    pub const fn content_len(&self) -> u64 {
        self.head.meta_len as u64 + self.head.body_len
    }

    /// Bytes of content in frames.
    pub const fn tail_len(&self) -> u64 {
        self.content_len() - self.head.inline_len as u64
    }

    /// Appends the head and the content beside it to `out`, with their checksums.
    pub fn write(&mut self, inline: &[u8], out: &mut Vec<u8>) {
        self.head.inline_len = inline.len() as u32;
        self.head.inline_crc = crc32c::crc32c(inline);
        self.rewrite_head(out);
        out.extend_from_slice(inline);
    }

    /// Appends the head alone; its lengths and checksum of the content stay.
    pub fn rewrite_head(&mut self, out: &mut Vec<u8>) {
        self.head.head_crc = 0;
        let start = out.len();
        out.extend_from_slice(self.head.as_bytes());
        for tag in &self.tags {
            out.extend_from_slice(&tag.to_le_bytes());
        }
        out.extend_from_slice(&self.key);
        self.head.head_crc = crc32c::crc32c(&out[start..]);
        out[start + 4..start + 8].copy_from_slice(&self.head.head_crc.to_le_bytes());
    }

    /// Reads a head; `None` if the bytes are not a head of this store, or damaged.
    pub fn parse(store_id: u64, bytes: &[u8]) -> Option<Self> {
        let (head, rest) = Head::read_from_prefix(bytes).ok()?;
        let (key_len, tag_count) = (usize::from(head.key_len), usize::from(head.tag_count));
        if head.magic != MAGIC || head.store_id != store_id || key_len > KEY_MAX || tag_count > TAGS_MAX {
            return None;
        }
        let all = bytes.get(..head_bytes(key_len, tag_count))?;
        let crc = crc32c::crc32c(&all[..4]);
        let crc = crc32c::crc32c_append(crc32c::crc32c_append(crc, &[0; 4]), &all[8..]);
        let content = u64::from(head.meta_len).checked_add(head.body_len)?;
        if crc != head.head_crc || u64::from(head.inline_len) > content || head.meta_len as usize > META_MAX {
            return None;
        }
        let (tags, key) = rest[..all.len() - size_of::<Head>()].split_at(8 * tag_count);
        let tags = tags.chunks_exact(8);
        Some(Self {
            head,
            tags: tags
                .map(|tag| u64::from_le_bytes(tag.try_into().expect("eight bytes")))
                .collect(),
            key: key.to_vec(),
        })
    }

    /// Returns the content beside the head, if it is complete and sound. `bytes` begins with the head.
    pub fn inline<'b>(&self, bytes: &'b [u8]) -> Option<&'b [u8]> {
        let start = self.head_bytes();
        let inline = bytes.get(start..start + self.head.inline_len as usize)?;
        (crc32c::crc32c(inline) == self.head.inline_crc).then_some(inline)
    }

    /// Whether the record belongs to this key.
    pub fn is_of(&self, key: &[u8]) -> bool {
        self.key == key
    }
}

/// Bytes of a head with a key and tags.
pub const fn head_bytes(key_len: usize, tags: usize) -> usize {
    size_of::<Head>() + 8 * tags + key_len
}

/// Bytes that the frames of `content` bytes take.
pub const fn frames_bytes(content: u64) -> u64 {
    content + content.div_ceil(FRAME_CONTENT as u64) * size_of::<FrameHead>() as u64
}

/// Appends a frame to `out`.
pub fn write_frame(version: u64, index: u32, content: &[u8], out: &mut Vec<u8>) {
    debug_assert!(content.len() <= FRAME_CONTENT);
    let crc = frame_crc(version, index, content);
    out.extend_from_slice(FrameHead { version, index, crc }.as_bytes());
    out.extend_from_slice(content);
}

/// Returns the content of a frame of `len` content bytes; `None` if it belongs to another object or is
/// damaged.
pub fn read_frame(version: u64, index: u32, bytes: &[u8], len: usize) -> Option<&[u8]> {
    let (head, rest) = FrameHead::read_from_prefix(bytes).ok()?;
    let content = rest.get(..len)?;
    let sound =
        head.version == version && head.index == index && head.crc == frame_crc(version, index, content);
    sound.then_some(content)
}

fn frame_crc(version: u64, index: u32, content: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&version.to_le_bytes());
    crc32c::crc32c_append(crc32c::crc32c_append(crc, &index.to_le_bytes()), content)
}

/// The indices of the frames that hold a range of the tail.
pub fn frames_of(range: &Range<u64>) -> Range<u64> {
    let frame = FRAME_CONTENT as u64;
    range.start / frame..range.end.div_ceil(frame)
}

/// Encodes a bin of the Disk Table as `Head::home`.
pub const fn home_in_table(bin: u64) -> u64 {
    bin | IN_TABLE
}

/// The tag of a record's key, for a set that is read from disk.
pub fn tag_of(secret: &crate::Secret, record: &Record) -> u8 {
    KeyHash::of(secret, &record.key).tag()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Record, read_frame, write_frame};
    use proptest::prelude::*;

    fn sample(inline: &[u8]) -> Vec<u8> {
        let mut record = Record::new(7, 9, b"key", &[1, 2]);
        record.head.body_len = inline.len() as u64;
        let mut bytes = Vec::new();
        record.write(inline, &mut bytes);
        bytes
    }

    #[test]
    fn record_is_read_as_it_was_written_by_its_store_only() {
        let bytes = sample(b"content");
        let record = Record::parse(7, &bytes).unwrap();
        assert_eq!(record.key, b"key");
        assert_eq!(record.tags, [1, 2]);
        assert_eq!(record.inline(&bytes).unwrap(), b"content");
        assert_eq!(Record::parse(8, &bytes), None);
    }

    proptest! {
        #[test]
        fn record_is_refused_when_any_bit_is_wrong(at in 0usize..122, bit in 0u8..8) {
            let mut bytes = sample(b"content");
            prop_assume!(at < bytes.len());
            bytes[at] ^= 1 << bit;
            let read = Record::parse(7, &bytes);
            prop_assert!(read.is_none_or(|record| record.inline(&bytes).is_none()));
        }

        #[test]
        fn parsers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), len in 0usize..300) {
            if let Some(record) = Record::parse(0, &bytes) {
                let _ = record.inline(&bytes);
            }
            let _ = read_frame(0, 0, &bytes, len);
        }

        #[test]
        fn frame_is_refused_when_it_is_anothers(version in 0u64..3, index in 0u32..3, at in 0usize..20) {
            let mut bytes = Vec::new();
            write_frame(1, 1, b"abcd", &mut bytes);
            let read = read_frame(version, index, &bytes, 4);
            prop_assert_eq!(read.is_some(), version == 1 && index == 1);
            bytes[at] ^= 1;
            prop_assert!(read_frame(1, 1, &bytes, 4).is_none());
        }
    }
}
