//! Segments of a checkpoint's tables: runs of records that are written and read as parts, each in a place.

use super::Core;
use crate::checkpoint::{
    Failure, HEAD_BYTES, Head, Malformed, NO_PLACE, Out, PAYLOAD_BYTES, Root, SEGMENTS_MAX, SegmentRef,
    SlotsRecord,
};
use crate::error::Error;
use crate::file::{CheckpointFile, SLABS_AT, io_error};
use crate::log;
use std::collections::HashSet;
use std::sync::mpsc::{Receiver, SyncSender};

/// Parts that changes may have before all is written anew, beside half of what that has.
const CHANGES_MIN_BYTES: u64 = 4 * PAYLOAD_BYTES as u64;
/// Tables of a heap that has next to nothing.
const EMPTY_BYTES: u64 = 1 << 10;

/// A segment of the last complete checkpoint.
#[derive(Debug, Clone)]
pub(super) struct Segment {
    pub(super) at: SegmentRef,
    pub(super) places: Vec<u32>,
}

/// Whether the next checkpoint is to write all tables anew: changes have come to half of what that was. And
/// where that was next to nothing, all that there is has changed, and would be written again soon.
pub(super) fn wants_all(segments: &[Segment], capacity_slabs: u32) -> bool {
    let Some((whole, changes)) = segments.split_first() else {
        return false;
    };
    let changed: u64 = changes.iter().map(|segment| segment.at.len_bytes).sum();
    if changes.is_empty() && whole.at.len_bytes <= EMPTY_BYTES {
        return true;
    }
    // Each has a place at least.
    let most = (log::places(capacity_slabs) as usize / 64).clamp(4, SEGMENTS_MAX - 1);
    segments.len() >= most || changed > (whole.at.len_bytes / 2).max(CHANGES_MIN_BYTES)
}

pub(super) fn segment_bytes(segments: &[Segment]) -> u64 {
    segments.last().map_or(0, |segment| {
        segment.at.len_bytes + segment.places.len() as u64 * HEAD_BYTES as u64
    })
}

/// A segment that is being written.
pub(super) struct SegmentWriter<'a> {
    core: &'a Core,
    pub(super) records: Out,
    head: Head,
    part: Vec<u8>,
    pub(super) places: Vec<u32>,
    len_bytes: u64,
}

impl<'a> SegmentWriter<'a> {
    pub(super) fn new(core: &'a Core, file_id: u64, generation: u64) -> Self {
        Self {
            core,
            records: Out::default(),
            head: Head {
                file_id,
                generation,
                index: 0,
                next: NO_PLACE,
            },
            part: Vec::new(),
            places: Vec::new(),
            len_bytes: 0,
        }
    }

    pub(super) fn place(&mut self) -> Result<u32, Error> {
        let place = self.core.log.take_place()?;
        self.places.push(place);
        Ok(place)
    }

    pub(super) fn slots(&mut self, record: &SlotsRecord) -> Result<(), Error> {
        self.records.slots(record);
        self.write_full()
    }

    /// Writes all parts that are full, and are not the last.
    pub(super) fn write_full(&mut self) -> Result<(), Error> {
        while self.records.bytes.len() > PAYLOAD_BYTES {
            self.write_part(PAYLOAD_BYTES, false)?;
        }
        Ok(())
    }

    fn write_part(&mut self, len: usize, is_last: bool) -> Result<(), Error> {
        let place = match self.places.last() {
            Some(place) => *place,
            None => self.place()?,
        };
        self.head.next = if is_last { NO_PLACE } else { self.place()? };
        self.part.clear();
        self.part.resize(HEAD_BYTES, 0);
        self.part.extend_from_slice(&self.records.bytes[..len]);
        self.head.seal(&mut self.part, len);
        self.core.log.write_place(place, &self.part)?;
        self.records.bytes.drain(..len);
        self.head.index += 1;
        self.len_bytes += len as u64;
        Ok(())
    }

    pub(super) fn finish(&mut self) -> Result<Segment, Error> {
        self.write_full()?;
        self.write_part(self.records.bytes.len(), true)?;
        Ok(Segment {
            at: SegmentRef {
                generation: self.head.generation,
                len_bytes: self.len_bytes,
                first: self.places.first().copied().unwrap_or(NO_PLACE),
                places: self.places.len() as u32,
            },
            places: self.places.clone(),
        })
    }
}

/// A part of the tables: its bytes, where the payload ends, whether it is the segment's last.
pub(super) struct Part {
    bytes: Vec<u8>,
    len: usize,
    is_last: bool,
}

/// Reads all parts in order.
pub(super) fn read_ahead(
    file: &dyn CheckpointFile,
    root: &Root,
    sender: &SyncSender<Part>,
) -> Result<Vec<Segment>, Failure> {
    let places = log::places(root.given_slabs);
    let mut seen = HashSet::new();
    let mut all = Vec::new();
    for segment in &root.segments {
        let mut of_segment = Vec::new();
        let mut place = segment.first;
        let mut head = Head {
            file_id: root.file_id,
            generation: segment.generation,
            index: 0,
            next: NO_PLACE,
        };
        let mut left = segment.len_bytes;
        while place != NO_PLACE {
            if u64::from(place) >= places || !seen.insert(place) {
                return Err(Malformed::new(format!("place {place} of a table")).into());
            }
            of_segment.push(place);
            let wanted = HEAD_BYTES + left.min(PAYLOAD_BYTES as u64) as usize;
            let mut bytes = vec![0; wanted];
            file.read_at(SLABS_AT + log::place_offset(place), &mut bytes)
                .map_err(|error| match error.kind() {
                    std::io::ErrorKind::UnexpectedEof => {
                        Failure::from(Malformed::new("the file ends before its tables"))
                    }
                    _ => Failure::Other(io_error(file, error)),
                })?;
            let (next, payload) = head.open(&bytes)?;
            let len = payload.len();
            left = left
                .checked_sub(len as u64)
                .ok_or_else(|| Malformed::new("a segment is too long"))?;
            head.index += 1;
            place = next;
            let part = Part {
                bytes,
                len,
                is_last: next == NO_PLACE,
            };
            if sender.send(part).is_err() {
                // Who takes them found an error.
                return Ok(all);
            }
        }
        if left != 0 || of_segment.len() != segment.places as usize {
            return Err(Malformed::new("a segment is too short").into());
        }
        all.push(Segment {
            at: *segment,
            places: of_segment,
        });
    }
    Ok(all)
}

/// The parts of one segment as one run of bytes.
pub(super) struct SegmentReader<'a> {
    parts: &'a Receiver<Part>,
    part: Option<Part>,
    at: usize,
}

impl<'a> SegmentReader<'a> {
    pub(super) const fn new(parts: &'a Receiver<Part>) -> Self {
        Self {
            parts,
            part: None,
            at: 0,
        }
    }

    pub(super) fn read(&mut self, mut out: &mut [u8]) -> Result<(), Failure> {
        while !out.is_empty() {
            let rest = self.part.as_ref().map(|part| part.len - self.at);
            match (rest, &self.part) {
                (Some(rest), Some(part)) if rest != 0 => {
                    let now = rest.min(out.len());
                    let from = HEAD_BYTES + self.at;
                    let (head, tail) = out.split_at_mut(now);
                    head.copy_from_slice(&part.bytes[from..from + now]);
                    self.at += now;
                    out = tail;
                }
                (_, part) => {
                    let is_end = part.as_ref().is_some_and(|part| part.is_last);
                    let next = if is_end { None } else { self.parts.recv().ok() };
                    self.part = Some(next.ok_or_else(|| Malformed::new("records end in their middle"))?);
                    self.at = 0;
                }
            }
        }
        Ok(())
    }

    pub(super) fn is_at_end(&self) -> bool {
        let part = self.part.as_ref();
        part.is_some_and(|part| part.is_last && self.at == part.len)
    }
}
