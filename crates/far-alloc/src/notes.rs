//! What a checkpoint has of the allocator's records: a note for each range of addresses, and where all of
//! them are (docs/reference/checkpoint.md).
//!
//! Owns the bytes, and parses bytes that may be anything. Knows neither slots nor memory.

use crate::error::Error;
use crate::ranges::{ADDRESS_MAX_BYTES, Shape};

const MAGIC: [u8; 8] = *b"VarveFOA";
/// Bytes before the program's own in a checkpoint's record.
pub(crate) const HEAD_BYTES: usize = 32;
/// Addresses that user space has nowhere, and none below the first.
const ADDRESS_END: u64 = 1 << 47;
const ADDRESS_MIN: u64 = 1 << 21;

/// Whose a range is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Single objects of `oalloc`.
    Pool,
    /// One array of `oalloc`.
    Array,
    /// Blocks of `malloc`.
    Bytes,
}

/// A range of addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    /// Pages from the beginning of all addresses.
    pub(crate) first_page: u32,
    pub(crate) kind: Kind,
    pub(crate) shape: Shape,
    pub(crate) objects: u64,
    /// Objects that are allocated, where several lie in one stored object; `None`: slots say it, or all are.
    pub(crate) used: Option<Vec<u64>>,
    /// Blocks of `malloc`: first unit and length, in order.
    pub(crate) blocks: Vec<(u32, u32)>,
}

fn malformed(what: impl Into<String>) -> Error {
    Error::Malformed(what.into())
}

/// Where the heap's addresses are, before what the program's record has.
pub(crate) fn head(start: u64, len_bytes: u64) -> [u8; HEAD_BYTES] {
    let mut bytes = [0; HEAD_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&start.to_le_bytes());
    bytes[16..24].copy_from_slice(&len_bytes.to_le_bytes());
    bytes
}

/// Start and length of the addresses, and the program's own record.
///
/// # Errors
/// `Malformed`.
pub(crate) fn parse_head(record: &[u8]) -> Result<(u64, u64, &[u8]), Error> {
    let Some((head, rest)) = record.split_at_checked(HEAD_BYTES) else {
        return Err(malformed("no addresses"));
    };
    let mut input = In(head);
    let (magic, start, len) = (input.take()?, input.u64()?, input.u64()?);
    let (chunk, most) = (2 << 20, ADDRESS_MAX_BYTES);
    let is_sound = magic == MAGIC
        && start.is_multiple_of(chunk)
        && len.is_multiple_of(chunk)
        && (chunk..=most).contains(&len)
        && (ADDRESS_MIN..ADDRESS_END - len).contains(&start);
    if is_sound {
        Ok((start, len, rest))
    } else {
        Err(malformed(format!("{len} bytes of addresses at {start:#x}")))
    }
}

impl Note {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let words = self.used.as_ref().map_or(0, Vec::len);
        let mut bytes = Vec::with_capacity(32 + words * 8 + self.blocks.len() * 8);
        bytes.push(match self.kind {
            Kind::Pool => 0,
            Kind::Array => 1,
            Kind::Bytes => 2,
        });
        let (shape, size) = match self.shape {
            Shape::Small(len) => (0, len),
            Shape::Large(steps) => (1, steps),
            Shape::Pages => (2, 0),
        };
        bytes.extend_from_slice(&[shape, 0, 0]);
        for number in [size, self.first_page] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&self.objects.to_le_bytes());
        bytes.extend_from_slice(&(words as u32).to_le_bytes());
        for word in self.used.iter().flatten() {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&(self.blocks.len() as u32).to_le_bytes());
        for (start, len) in &self.blocks {
            bytes.extend_from_slice(&start.to_le_bytes());
            bytes.extend_from_slice(&len.to_le_bytes());
        }
        bytes
    }

    /// The note that these bytes are, of addresses of `pages`.
    ///
    /// # Errors
    /// `Malformed`.
    pub(crate) fn parse(bytes: &[u8], pages: u64) -> Result<Self, Error> {
        let mut input = In(bytes);
        let [kind, shape, zero, zeros] = input.take()?;
        let (size, first_page, objects) = (input.u32()?, input.u32()?, input.u64()?);
        let wrong = || malformed(format!("{objects} objects at page {first_page}"));
        let kind = match kind {
            0 => Kind::Pool,
            1 => Kind::Array,
            2 => Kind::Bytes,
            _ => return Err(wrong()),
        };
        let shape = match (shape, size) {
            (0, 4..=128) if size.is_multiple_of(4) => Shape::Small(size),
            (1, 1..) => Shape::Large(size),
            (2, 0) => Shape::Pages,
            _ => return Err(wrong()),
        };
        let end = objects
            .checked_mul(shape.stride_pages())
            .and_then(|len| len.checked_add(u64::from(first_page)));
        let is_sound = (zero, zeros) == (0, 0)
            && objects != 0
            && end.is_some_and(|end| end <= pages)
            && (kind == Kind::Bytes) == (shape == Shape::Pages);
        if !is_sound {
            return Err(wrong());
        }
        let words = u64::from(input.u32()?);
        let used = match words {
            0 => None,
            _ if words == objects.div_ceil(64) => Some(input.all(words as usize, In::u64)?),
            _ => return Err(wrong()),
        };
        let is_beyond = |last: &u64| !objects.is_multiple_of(64) && *last >> (objects % 64) != 0;
        let needs_used = kind == Kind::Pool && shape.per_batch() > 1;
        if used.is_some() != needs_used || used.as_ref().and_then(|used| used.last()).is_some_and(is_beyond) {
            return Err(wrong());
        }
        let blocks = input.u32()? as usize;
        let blocks = input.all(blocks, |input| Ok((input.u32()?, input.u32()?)))?;
        if !input.0.is_empty() || (kind != Kind::Bytes && !blocks.is_empty()) {
            return Err(wrong());
        }
        Ok(Self {
            first_page,
            kind,
            shape,
            objects,
            used,
            blocks,
        })
    }
}

/// Bytes that are read in order.
struct In<'a>(&'a [u8]);

impl In<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let short = || malformed("a note ends in its middle");
        let (first, rest) = self.0.split_first_chunk().ok_or_else(short)?;
        self.0 = rest;
        Ok(*first)
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    /// So many of a kind, as far as there are bytes.
    fn all<T>(
        &mut self,
        count: usize,
        mut one: impl FnMut(&mut Self) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(one(self)?);
        }
        Ok(all)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGES: u64 = 100_000;

    fn notes() -> Vec<Note> {
        let note = |kind, shape, objects, used, blocks| Note {
            first_page: 7,
            kind,
            shape,
            objects,
            used,
            blocks,
        };
        vec![
            note(
                Kind::Pool,
                Shape::Small(52),
                128,
                Some(vec![5, 0x8000_0000_0000_0000]),
                vec![],
            ),
            note(Kind::Pool, Shape::Small(128), 128, None, vec![]),
            note(Kind::Pool, Shape::Large(32), 128, None, vec![]),
            note(Kind::Array, Shape::Small(4), 9, None, vec![]),
            note(Kind::Array, Shape::Large(100), 90, None, vec![]),
            note(
                Kind::Bytes,
                Shape::Pages,
                10_000,
                None,
                vec![(0, 1), (1, 256), (9000, 5)],
            ),
        ]
    }

    #[test]
    fn notes_read_back_what_was_written() {
        for note in notes() {
            let bytes = note.to_bytes();
            assert_eq!(Note::parse(&bytes, PAGES).unwrap(), note);
            for len in 0..bytes.len() {
                assert!(Note::parse(&bytes[..len], PAGES).is_err());
            }
            assert!(Note::parse(&[&bytes[..], &[0]].concat(), PAGES).is_err());
            assert!(Note::parse(&bytes, 7 + note.objects * note.shape.stride_pages() - 1).is_err());
        }
    }

    #[test]
    fn head_says_where_the_addresses_are() {
        let record = [&head(1 << 40, 1 << 30)[..], b"program"].concat();
        assert_eq!(parse_head(&record).unwrap(), (1 << 40, 1 << 30, &b"program"[..]));
        for (start, len) in [
            (0, 1 << 30),
            (1 << 40, 0),
            (1 << 40, 4096),
            (1 << 46, 1 << 46),
            (3, 1 << 30),
        ] {
            assert!(parse_head(&head(start, len)).is_err());
        }
        assert!(parse_head(&record[..31]).is_err() && parse_head(&[0; 32]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_sound_note_or_an_error(
            which in 0..6usize, changes in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..8),
            extra in proptest::collection::vec(any::<u8>(), 0..40)
        ) {
            let mut bytes = notes()[which].to_bytes();
            for (at, byte) in changes {
                let at = usize::from(at) % bytes.len();
                bytes[at] = byte;
            }
            for bytes in [bytes, extra] {
                if let Ok(note) = Note::parse(&bytes, PAGES) {
                    prop_assert!(u64::from(note.first_page) + note.objects * note.shape.stride_pages() <= PAGES);
                    prop_assert_eq!(note.to_bytes(), bytes);
                }
            }
        }
    }
}
