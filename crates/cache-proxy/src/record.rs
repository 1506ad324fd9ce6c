//! Metadata in the store: the status, fields and times of a response, the same with a list of its stored
//! parts, or the list of variants of a key. This program writes it, but the medium may corrupt it: every
//! length is checked, and a record that does not fit exactly is ignored.

use crate::parts::{SPANS_MAX, Span, Spans};
use crate::vary::{Selecting, VARIANTS_MAX};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use std::sync::Arc;

/// Version of the encoding; records of other versions are misses.
const VERSION: u8 = 1;
const RESPONSE: u8 = 1;
const VARIANTS: u8 = 2;
const PARTS: u8 = 3;
/// Most fields of a stored response.
const FIELDS_MAX: usize = 512;
/// Most bytes of a stored response's fields; a response with more is not stored.
pub const FIELDS_BYTES_MAX: usize = 128 << 10;

/// Location of the body of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the object of the record.
    Here,
    /// In a separate object.
    Apart {
        /// Number of that object.
        id: u64,
        /// Length of the body in bytes.
        len: u64,
    },
}

/// A stored response without its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The status.
    pub status: StatusCode,
    /// The end-to-end fields.
    pub headers: HeaderMap,
    /// Time of the request to the origin, milliseconds since 1970.
    pub asked_ms: u64,
    /// Time of its arrival, milliseconds since 1970.
    pub came_ms: u64,
    /// Location of the body; of no meaning where the body is stored in parts.
    pub place: Place,
}

/// A response of which parts are stored, each as an object of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    /// Status and fields, as of the whole representation.
    pub stored: Stored,
    /// Length of the whole representation, bytes.
    pub whole_len: u64,
    /// The parts.
    pub spans: Spans,
}

/// One of several responses of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    /// Number of its object.
    pub id: u64,
    /// The request fields that select it.
    pub selecting: Selecting,
}

/// The record of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A response.
    Response(Arc<Stored>),
    /// Parts of a response.
    Parts(Parts),
    /// The variants of the key, newest first.
    Variants(Vec<Variant>),
}

struct Writer(Vec<u8>);

impl Writer {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.0.extend_from_slice(bytes);
    }

    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.take(usize::try_from(len).ok()?)
    }

    fn text(&mut self) -> Option<String> {
        Some(std::str::from_utf8(self.bytes()?).ok()?.to_owned())
    }
}

impl Record {
    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Response(stored) => {
                let mut out = Writer(vec![VERSION, RESPONSE]);
                stored.encode(&mut out);
                out.0
            }
            Self::Parts(parts) => {
                let mut out = Writer(vec![VERSION, PARTS]);
                out.u64(parts.whole_len);
                out.0.push(parts.spans.len().min(SPANS_MAX) as u8);
                for span in parts.spans.iter().take(SPANS_MAX) {
                    out.u64(span.start);
                    out.u64(span.len);
                    out.u64(span.id);
                }
                parts.stored.encode(&mut out);
                out.0
            }
            Self::Variants(variants) => {
                let mut out = Writer(vec![VERSION, VARIANTS, variants.len().min(VARIANTS_MAX) as u8]);
                for variant in variants.iter().take(VARIANTS_MAX) {
                    out.u64(variant.id);
                    out.0
                        .extend_from_slice(&(variant.selecting.len() as u32).to_le_bytes());
                    for (name, value) in &variant.selecting {
                        out.bytes(name.as_bytes());
                        out.0.push(u8::from(value.is_some()));
                        out.bytes(value.as_deref().unwrap_or_default().as_bytes());
                    }
                }
                out.0
            }
        }
    }

    /// Decodes a record; `None` if the bytes differ in any way from the output of `encode`.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if reader.u8()? != VERSION {
            return None;
        }
        let record = match reader.u8()? {
            RESPONSE => Self::Response(Arc::new(Stored::decode(&mut reader)?)),
            PARTS => Self::Parts(decode_parts(&mut reader)?),
            VARIANTS => Self::Variants(decode_variants(&mut reader)?),
            _ => return None,
        };
        reader.0.is_empty().then_some(record)
    }
}

fn decode_parts(reader: &mut Reader<'_>) -> Option<Parts> {
    let whole_len = reader.u64()?;
    let count = usize::from(reader.u8()?);
    if count > SPANS_MAX {
        return None;
    }
    let mut spans = Vec::new();
    for _ in 0..count {
        spans.push(Span {
            start: reader.u64()?,
            len: reader.u64()?,
            id: reader.u64()?,
        });
    }
    Some(Parts {
        stored: Stored::decode(reader)?,
        whole_len,
        spans: Spans::checked(spans, whole_len)?,
    })
}

fn decode_variants(reader: &mut Reader<'_>) -> Option<Vec<Variant>> {
    let count = usize::from(reader.u8()?);
    if count > VARIANTS_MAX {
        return None;
    }
    let mut variants = Vec::new();
    for _ in 0..count {
        let id = reader.u64()?;
        let mut selecting = Vec::new();
        for _ in 0..reader.u32()? {
            let name = reader.text()?;
            let there = reader.u8()?;
            let value = reader.text()?;
            if there > 1 || selecting.len() >= FIELDS_MAX {
                return None;
            }
            selecting.push((name, (there == 1).then_some(value)));
        }
        variants.push(Variant { id, selecting });
    }
    Some(variants)
}

impl Stored {
    fn encode(&self, out: &mut Writer) {
        out.0.extend_from_slice(&self.status.as_u16().to_le_bytes());
        out.u64(self.asked_ms);
        out.u64(self.came_ms);
        let (apart, id, len) = match self.place {
            Place::Here => (0, 0, 0),
            Place::Apart { id, len } => (1, id, len),
        };
        out.0.push(apart);
        out.u64(id);
        out.u64(len);
        // Reserved.
        out.0.extend_from_slice(&[0; 17]);
        out.0
            .extend_from_slice(&(self.headers.len() as u32).to_le_bytes());
        for (name, value) in &self.headers {
            out.bytes(name.as_str().as_bytes());
            out.bytes(value.as_bytes());
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Self> {
        let status = u16::from_le_bytes(reader.take(2)?.try_into().ok()?);
        let (asked_ms, came_ms) = (reader.u64()?, reader.u64()?);
        let place = match (reader.u8()?, reader.u64()?, reader.u64()?) {
            (0, 0, 0) => Place::Here,
            (1, id, len) => Place::Apart { id, len },
            _ => return None,
        };
        if reader.take(17)? != [0; 17] {
            return None;
        }
        let count = usize::try_from(reader.u32()?).ok()?;
        if count > FIELDS_MAX || reader.0.len() > FIELDS_BYTES_MAX {
            return None;
        }
        let mut headers = HeaderMap::new();
        for _ in 0..count {
            let name = HeaderName::from_bytes(reader.bytes()?).ok()?;
            headers
                .try_append(name, HeaderValue::from_bytes(reader.bytes()?).ok()?)
                .ok()?;
        }
        // `encode` never writes a field that changes the framing of the message.
        let framed = ["transfer-encoding", "connection", "upgrade", "trailer"]
            .iter()
            .any(|name| headers.contains_key(*name));
        if framed || asked_ms > came_ms {
            return None;
        }
        Some(Self {
            // A status that is not final would leave the client waiting.
            status: StatusCode::from_u16(status)
                .ok()
                .filter(|status| !status.is_informational())?,
            headers,
            asked_ms,
            came_ms,
            place,
        })
    }

    /// Whether the fields are few and short enough to be stored.
    pub fn fits(&self) -> bool {
        let bytes: usize = self
            .headers
            .iter()
            .map(|(name, value)| name.as_str().len() + value.len() + 8)
            .sum();
        self.headers.len() <= FIELDS_MAX && bytes <= FIELDS_BYTES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stored() -> Stored {
        let mut headers = HeaderMap::new();
        headers.append("x", HeaderValue::from_static("1"));
        headers.append("x", HeaderValue::from_bytes(b"\xff2").expect("a value"));
        Stored {
            status: StatusCode::NOT_FOUND,
            headers,
            asked_ms: 5,
            came_ms: 6,
            place: Place::Apart { id: 7, len: 8 },
        }
    }

    fn parts() -> Parts {
        let mut spans = Spans::default();
        for (start, id) in [(0, 3), (20, 4)] {
            spans.add(Span { start, len: 10, id });
        }
        Parts {
            stored: stored(),
            whole_len: 30,
            spans,
        }
    }

    #[test]
    fn record_is_what_was_encoded() {
        let variants = vec![Variant {
            id: 9,
            selecting: vec![("a".into(), None), ("b".into(), Some("c".into()))],
        }];
        for record in [
            Record::Response(Arc::new(stored())),
            Record::Parts(parts()),
            Record::Variants(variants),
        ] {
            assert_eq!(Record::decode(&record.encode()), Some(record));
        }
    }

    #[test]
    fn record_is_none_when_cut_or_longer() {
        for record in [Record::Response(Arc::new(stored())), Record::Parts(parts())] {
            let bytes = record.encode();
            for cut in 0..bytes.len() {
                assert_eq!(Record::decode(&bytes[..cut]), None);
            }
            assert_eq!(Record::decode(&[bytes, vec![0]].concat()), None);
        }
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), flips in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..8)) {
            Record::decode(&bytes);
            bytes.splice(0..bytes.len().min(2), [VERSION, RESPONSE]);
            Record::decode(&bytes);
            for record in [Record::Response(Arc::new(stored())), Record::Parts(parts())] {
                let mut real = record.encode();
                for (at, bits) in &flips {
                    let len = real.len();
                    real[at % len] ^= bits;
                }
                Record::decode(&real);
            }
        }
    }
}
