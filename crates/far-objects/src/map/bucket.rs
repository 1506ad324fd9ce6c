//! Bytes of a bucket. Whatever they are, nothing here goes beyond them.
//!
//! ```text
//! 0  u16  entries
//! 2  u16  0
//! 4  u32  number of the next bucket of the chain, plus 1; 0: none
//! 8  entries: key, value
//! ```

use crate::error::Error;
use crate::layout::OBJECT_MAX_BYTES;
use crate::pools::BATCH_BYTES;

const HEADER_BYTES: usize = 8;
/// Bytes that a bucket has about.
const WANTED_BYTES: usize = 512;
const ENTRIES_MIN: usize = 4;

/// The number of a bucket of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link(pub(super) u32);

/// How entries lie in a bucket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    key_bytes: usize,
    entry_bytes: usize,
    capacity: usize,
}

impl Shape {
    pub(super) fn new(key_bytes: usize, value_bytes: usize) -> Result<Self, Error> {
        let entry_bytes = key_bytes + value_bytes;
        if key_bytes == 0 {
            return Err(Error::ZeroSize);
        }
        let most = (OBJECT_MAX_BYTES - HEADER_BYTES) / entry_bytes;
        if most == 0 {
            return Err(Error::TooLarge {
                len_bytes: entry_bytes,
                max_bytes: OBJECT_MAX_BYTES - HEADER_BYTES,
            });
        }
        let wanted = (WANTED_BYTES - HEADER_BYTES) / entry_bytes;
        Ok(Self {
            key_bytes,
            entry_bytes,
            capacity: wanted.max(ENTRIES_MIN).min(most),
        })
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of a bucket; so many that it is no part of a batch.
    pub(super) fn bucket_bytes(&self) -> usize {
        (HEADER_BYTES + self.capacity * self.entry_bytes).max(BATCH_BYTES)
    }

    fn count(&self, bytes: &[u8]) -> usize {
        let count = bytes
            .first_chunk::<2>()
            .map_or(0, |count| u16::from_le_bytes(*count));
        usize::from(count).min(self.capacity)
    }

    fn set_count(&self, bytes: &mut [u8], count: usize) {
        if let Some(chunk) = bytes.first_chunk_mut::<2>() {
            *chunk = (count as u16).to_le_bytes();
        }
    }

    pub(super) fn next(&self, bytes: &[u8]) -> Option<Link> {
        let number = bytes.get(4..)?.first_chunk::<4>()?;
        u32::from_le_bytes(*number).checked_sub(1).map(Link)
    }

    pub(super) fn set_next(&self, bytes: &mut [u8], next: Option<Link>) {
        if let Some(chunk) = bytes.get_mut(4..).and_then(|rest| rest.first_chunk_mut::<4>()) {
            *chunk = next.map_or(0, |link| link.0 + 1).to_le_bytes();
        }
    }

    fn range(&self, index: usize) -> std::ops::Range<usize> {
        let start = HEADER_BYTES + index * self.entry_bytes;
        start..start + self.entry_bytes
    }

    /// All entries, key and value of each together.
    pub(super) fn entries<'a>(&self, bytes: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let shape = *self;
        (0..self.count(bytes)).filter_map(move |index| bytes.get(shape.range(index)))
    }

    pub(super) fn find(&self, bytes: &[u8], key: &[u8]) -> Option<usize> {
        self.entries(bytes)
            .position(|entry| entry[..self.key_bytes] == *key)
    }

    pub(super) fn value<'a>(&self, bytes: &'a [u8], index: usize) -> Option<&'a [u8]> {
        bytes.get(self.range(index)).map(|entry| &entry[self.key_bytes..])
    }

    pub(super) fn set_value(&self, bytes: &mut [u8], index: usize, value: &[u8]) {
        if let Some(entry) = bytes.get_mut(self.range(index)) {
            entry[self.key_bytes..].copy_from_slice(value);
        }
    }

    pub(super) fn has_room(&self, bytes: &[u8]) -> bool {
        self.count(bytes) < self.capacity
    }

    /// Appends an entry where there is room.
    pub(super) fn push(&self, bytes: &mut [u8], key: &[u8], value: &[u8]) {
        let count = self.count(bytes);
        if count < self.capacity
            && let Some(entry) = bytes.get_mut(self.range(count))
        {
            entry[..self.key_bytes].copy_from_slice(key);
            entry[self.key_bytes..].copy_from_slice(value);
            self.set_count(bytes, count + 1);
        }
    }

    /// Takes an entry out; the last takes its place.
    pub(super) fn remove(&self, bytes: &mut [u8], index: usize) {
        let Some(last) = self.count(bytes).checked_sub(1) else {
            return;
        };
        if bytes.len() >= self.range(last).end && index <= last {
            bytes.copy_within(self.range(last), self.range(index).start);
            self.set_count(bytes, last);
        }
    }

    /// Makes a bucket of no entries.
    pub(super) fn clear(&self, bytes: &mut [u8], next: Option<Link>) {
        bytes.fill(0);
        self.set_next(bytes, next);
    }

    /// Makes a bucket of these entries.
    pub(super) fn fill<'a>(
        &self,
        bytes: &mut [u8],
        next: Option<Link>,
        entries: impl Iterator<Item = &'a Vec<u8>>,
    ) {
        self.clear(bytes, next);
        for entry in entries {
            let (key, value) = entry.split_at(self.key_bytes);
            self.push(bytes, key, value);
        }
    }
}
