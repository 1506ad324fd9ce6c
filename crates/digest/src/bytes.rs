//! One file's data as a batch leaves it: what was written, what became a hole, how much of the old content
//! still counts. Knows neither where the old content is nor where the new goes.
//!
//! Which blocks hold data does not depend on where batches end: a block that was written to is a hole again
//! only when one operation makes a hole of all of it, or cuts the file before it. LibFS answers `lseek` by
//! the same rule from its log (`inode::overlay`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use varve_format::seeded::{Bug, armed};
use varve_format::{BLOCK_BYTES, FallocateMode};

/// A run of bytes in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl ByteRange {
    /// Whether all of `other` lies in it.
    #[must_use]
    pub const fn covers(&self, other: &Self) -> bool {
        self.offset <= other.offset
            && other.offset.saturating_add(other.len) <= self.offset.saturating_add(self.len)
    }
}

/// Bytes of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteData<'a> {
    /// Copied out of the log, and what its writer wrote.
    Here(&'a [u8]),
    /// In the log still. What they are is seen when they are written to their place.
    LogResident(LogResident),
}

/// Bytes that were left in a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogResident {
    /// Which one of the batches that are folded together.
    pub source: u32,
    /// Index of the entry in that batch.
    pub entry: u32,
    /// First byte of the entry's payload.
    pub skip: u32,
    /// Bytes.
    pub len: u32,
}

impl<'a> WriteData<'a> {
    /// How many.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a write of nothing is no operation")]
    pub const fn len(&self) -> usize {
        match self {
            Self::Here(data) => data.len(),
            Self::LogResident(left) => left.len as usize,
        }
    }

    /// The first `mid` bytes, and the others. `mid` is at most their length.
    #[must_use]
    pub const fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::Here(data) => {
                let (first, last) = data.split_at(mid);
                (Self::Here(first), Self::Here(last))
            }
            Self::LogResident(left) => {
                let mid = mid as u32;
                let first = LogResident { len: mid, ..left };
                let last = LogResident {
                    skip: left.skip + mid,
                    len: left.len - mid,
                    ..left
                };
                (Self::LogResident(first), Self::LogResident(last))
            }
        }
    }

    /// The bytes, if they are at hand.
    #[must_use]
    pub const fn here(&self) -> Option<&'a [u8]> {
        match self {
            Self::Here(data) => Some(data),
            Self::LogResident(_) => None,
        }
    }
}

/// What to do with one file's data; in the order of the fields, `size` last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FilePlan<'a> {
    /// The file is cut to this length first.
    pub truncate: Option<u64>,
    /// Holes to make; never where `pieces` write.
    pub holes: Vec<ByteRange>,
    /// Bytes to write, ascending, not overlapping. A zero may lie behind `size`, in the block of the end,
    /// which holds data.
    pub pieces: Vec<(u64, WriteData<'a>)>,
    /// Whole blocks to allocate, unwritten, where there is a hole still.
    pub allocate: Vec<ByteRange>,
    /// Blocks of which an operation changed a part, ascending, if `pieces` has any of a log. If the batch is cut elsewhere after a crash,
    /// that operation reads the block: it must not be written in place.
    pub partial: Vec<u64>,
    /// Length in the end.
    pub size: u64,
}

impl FilePlan<'_> {
    /// Whether all operations of the batch leave these blocks alone, or change them whole.
    #[must_use]
    pub fn is_whole(&self, blocks: Range<u64>) -> bool {
        let at = self.partial.partition_point(|block| *block < blocks.start);
        self.partial.get(at).is_none_or(|block| *block >= blocks.end) || armed(Bug::PartialInPlace)
    }

    /// Whether no block changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.truncate.is_none() && self.holes.is_empty() && self.pieces.is_empty() && self.allocate.is_empty()
    }

    /// Bytes that are written.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.pieces.iter().map(|(_, data)| data.len() as u64).sum()
    }
}

/// Stretch of the file's bytes that does not come from the old content: bytes, or (`None`) a hole.
#[derive(Debug, Clone, Copy)]
struct Segment<'a> {
    end: u64,
    data: Option<WriteData<'a>>,
}

/// Segments by their first byte; they do not overlap. All are in one of the two.
#[derive(Debug, Clone, Default)]
struct Segments<'a> {
    /// As long as each comes behind all others, as most do: an append costs no search.
    in_order: Vec<(u64, Segment<'a>)>,
    mixed: BTreeMap<u64, Segment<'a>>,
}

impl<'a> Segments<'a> {
    fn len(&self) -> usize {
        self.in_order.len() + self.mixed.len()
    }

    fn iter(&self) -> impl Iterator<Item = (u64, Segment<'a>)> + '_ {
        let mixed = self.mixed.iter().map(|(&start, &segment)| (start, segment));
        self.in_order.iter().copied().chain(mixed)
    }

    fn last(&self) -> Option<Segment<'a>> {
        let in_order = self.in_order.last().map(|(_, segment)| *segment);
        in_order.or_else(|| self.mixed.last_key_value().map(|(_, segment)| *segment))
    }

    /// All of them as a map.
    fn mixed(&mut self) -> &mut BTreeMap<u64, Segment<'a>> {
        self.mixed.extend(self.in_order.drain(..));
        &mut self.mixed
    }

    /// Puts in a segment that begins where all others have ended, or later.
    fn push(&mut self, start: u64, segment: Segment<'a>) {
        if self.mixed.is_empty() {
            self.in_order.push((start, segment));
        } else {
            self.mixed.insert(start, segment);
        }
    }
}

/// The file's data after the operations folded so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileFold<'a> {
    /// Shortest length that the file was cut to.
    truncate: Option<u64>,
    segments: Segments<'a>,
    /// Block ranges to allocate, end by first block.
    allocate: BTreeMap<u64, u64>,
    writes: u64,
    /// Bytes in `segments`.
    bytes: u64,
    /// Segments that began where none ended, at the time; an estimate.
    stretches: u64,
    /// Blocks that were written to, of which a part was cut or zeroed since.
    kept: BTreeSet<u64>,
    /// Blocks of which a part was written, cut or zeroed; in any order, perhaps more than once.
    partial: Vec<u64>,
}

/// What a block is written with that holds data and has none of its own left.
const ZERO: WriteData<'static> = WriteData::Here(&[0]);

impl<'a> FileFold<'a> {
    pub(crate) fn write(&mut self, offset: u64, data: WriteData<'a>) {
        let end = offset + data.len() as u64;
        self.note_partial(offset, end);
        self.insert(offset, end, Some(data));
        self.writes += 1;
    }

    /// Stretches of bytes and holes, about, and the bytes in all of them.
    pub(crate) fn extent(&self) -> (u64, u64) {
        (self.stretches.min(self.segments.len() as u64), self.bytes)
    }

    /// New length, where the old one was `size`.
    pub(crate) fn truncate(&mut self, size: u64, new_size: u64) {
        if new_size > size {
            return;
        }
        self.note_partial(new_size, new_size);
        self.keep_edges(new_size, u64::MAX);
        self.clear(new_size, u64::MAX);
        let before = self.truncate.filter(|_| !armed(Bug::CutForgotten));
        self.truncate = Some(before.map_or(new_size, |least| least.min(new_size)));
        remove_range(&mut self.allocate, new_size.div_ceil(BLOCK_BYTES), u64::MAX);
    }

    pub(crate) fn fallocate(&mut self, mode: FallocateMode, offset: u64, len: u64) {
        let end = offset + len;
        if !matches!(mode, FallocateMode::Allocate | FallocateMode::AllocateKeepSize) {
            self.note_partial(offset, end);
            self.keep_edges(offset, end);
        }
        match mode {
            FallocateMode::Allocate | FallocateMode::AllocateKeepSize => {}
            FallocateMode::PunchHole => {
                self.insert(offset, end, None);
                remove_range(
                    &mut self.allocate,
                    offset.div_ceil(BLOCK_BYTES),
                    end / BLOCK_BYTES,
                );
                return;
            }
            FallocateMode::ZeroRange | FallocateMode::ZeroRangeKeepSize => self.insert(offset, end, None),
        }
        add_range(
            &mut self.allocate,
            offset / BLOCK_BYTES,
            end.div_ceil(BLOCK_BYTES),
        );
    }

    /// `start..end` changes: of the blocks at its ends a part only, where it does not end with them.
    fn note_partial(&mut self, start: u64, end: u64) {
        for at in [start, end] {
            let block = at / BLOCK_BYTES;
            if !at.is_multiple_of(BLOCK_BYTES) && self.partial.last() != Some(&block) {
                self.partial.push(block);
            }
        }
    }

    /// `start..end` is about to become zeros: blocks that lie in it in part keep that they were written to,
    /// whole ones do not.
    fn keep_edges(&mut self, start: u64, end: u64) {
        for at in [start, end] {
            let block = at / BLOCK_BYTES;
            if !at.is_multiple_of(BLOCK_BYTES) && self.has_data(block) {
                self.kept.insert(block);
            }
        }
        let (first, end) = (start.div_ceil(BLOCK_BYTES), end / BLOCK_BYTES);
        if first < end && !self.kept.is_empty() {
            self.kept.retain(|block| !(first..end).contains(block));
        }
    }

    /// Whether a byte of the block was written to and is not overwritten with zeros.
    fn has_data(&mut self, block: u64) -> bool {
        let start = block.saturating_mul(BLOCK_BYTES);
        let end = start.saturating_add(BLOCK_BYTES);
        if self.segments.last().is_none_or(|last| last.end <= start) {
            return false;
        }
        let segments = self.segments.mixed();
        let overlaps = |(_, segment): &(&u64, &Segment<'_>)| segment.end > start && segment.data.is_some();
        let before = segments.range(..start).next_back();
        before.is_some_and(|one| overlaps(&one)) || segments.range(start..end).any(|one| overlaps(&one))
    }

    /// Zeros to write where a block was written to and nothing of that is left: a byte of it that is zero by
    /// now, perhaps behind the end.
    fn zeros_kept(&self, pieces: &[(u64, WriteData<'a>)], holes: &[(u64, u64)]) -> Vec<(u64, WriteData<'a>)> {
        let mut zeros = Vec::new();
        for block in &self.kept {
            let (start, end) = (block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES);
            let before = pieces.partition_point(|(at, _)| *at < end);
            let last = before.checked_sub(1).and_then(|last| pieces.get(last));
            if last.is_some_and(|(at, data)| at + data.len() as u64 > start) {
                continue;
            }
            let after = holes.partition_point(|(_, hole_end)| *hole_end <= start);
            let hole = holes.get(after).filter(|(at, _)| *at < end);
            let zero = match (hole, self.truncate) {
                (Some((at, _)), _) => (*at).max(start),
                (None, Some(cut)) if cut < end => cut.max(start),
                // It is in no hole and before all cuts: its data went with an older part of it.
                _ => continue,
            };
            zeros.push((zero, ZERO));
        }
        zeros
    }

    /// Removes what lies in `start..end`.
    fn clear(&mut self, start: u64, end: u64) {
        if self.segments.last().is_none_or(|last| last.end <= start) {
            return;
        }
        let segments = self.segments.mixed();
        split(segments, start);
        split(segments, end);
        while let Some((&at, segment)) = segments.range(start..end).next() {
            self.bytes -= segment.data.map_or(0, |data| data.len() as u64);
            segments.remove(&at);
        }
    }

    fn insert(&mut self, start: u64, end: u64, data: Option<WriteData<'a>>) {
        let last = self.segments.last();
        let joins = |before: Option<&Segment<'_>>| {
            before.is_some_and(|before| before.end == start && before.data.is_some() == data.is_some())
        };
        let segment = Segment { end, data };
        // Most writes go to the end: nothing to clear there.
        let goes_on = if last.is_none_or(|last| last.end <= start) {
            self.segments.push(start, segment);
            joins(last.as_ref())
        } else {
            let before = |segments: &BTreeMap<u64, Segment<'a>>, at| {
                segments.range(..at).next_back().map(|(_, before)| *before)
            };
            // The last that begins before the end: one that ends before the start has nothing behind it to
            // clear.
            let mut last = before(self.segments.mixed(), end);
            if last.is_some_and(|last| last.end > start) {
                self.clear(start, end);
                last = before(self.segments.mixed(), start);
            }
            self.segments.mixed().insert(start, segment);
            joins(last.as_ref())
        };
        self.stretches += u64::from(!goes_on);
        self.bytes += data.map_or(0, |data| data.len() as u64);
    }

    /// Stretches of bytes to write, neighbours counted as one; and how many writes are saved by that.
    fn merged(&self) -> u64 {
        let (mut stretches, mut end) = (0, None);
        for (start, segment) in self.segments.iter().filter(|(_, segment)| segment.data.is_some()) {
            stretches += u64::from(end != Some(start));
            end = Some(segment.end);
        }
        self.writes.saturating_sub(stretches)
    }

    /// What to do with a file that had `old` bytes (`None`: it is new) and has `size` in the end; and the
    /// writes saved by merging.
    pub(crate) fn plan(&self, old: Option<u64>, size: u64) -> (FilePlan<'a>, u64) {
        let mut plan = FilePlan {
            truncate: old.and_then(|old| self.truncate.map(|to| to.min(old))),
            size,
            ..FilePlan::default()
        };
        for (offset, segment) in self.segments.iter() {
            match segment.data {
                Some(data) => plan.pieces.push((offset, data)),
                // Where nothing is left of the old content there is nothing to punch.
                None if old.is_none() || plan.truncate.is_some_and(|to| to <= offset) => {}
                None => plan.holes.push(ByteRange {
                    offset,
                    len: segment.end - offset,
                }),
            }
        }
        if !self.kept.is_empty() {
            let holes = self.segments.iter().filter(|(_, segment)| segment.data.is_none());
            let holes: Vec<_> = holes.map(|(at, segment)| (at, segment.end)).collect();
            let zeros = self.zeros_kept(&plan.pieces, &holes);
            plan.pieces.extend(zeros);
            plan.pieces.sort_by_key(|(at, _)| *at);
        }
        let ranges = self.allocate.iter().map(|(&first, &end)| ByteRange {
            offset: first * BLOCK_BYTES,
            len: (end - first) * BLOCK_BYTES,
        });
        plan.allocate = ranges.collect();
        // Only what lies in a log is asked for.
        if plan.pieces.iter().any(|(_, data)| data.here().is_none()) {
            plan.partial.clone_from(&self.partial);
            plan.partial.sort_unstable();
            plan.partial.dedup();
        }
        (plan, self.merged())
    }
}

/// Splits a segment that has `at` inside it.
fn split(segments: &mut BTreeMap<u64, Segment<'_>>, at: u64) {
    let Some((&start, segment)) = segments.range_mut(..at).next_back() else {
        return;
    };
    if segment.end <= at {
        return;
    }
    let middle = (at - start) as usize;
    let tail = Segment {
        end: segment.end,
        data: segment.data.map(|data| data.split_at(middle).1),
    };
    segment.end = at;
    segment.data = segment.data.map(|data| data.split_at(middle).0);
    segments.insert(at, tail);
}

/// Adds `start..end` to disjoint ranges.
fn add_range(ranges: &mut BTreeMap<u64, u64>, mut start: u64, mut end: u64) {
    while let Some((&first, &last)) = ranges.range(..=end).next_back() {
        if last < start {
            break;
        }
        start = start.min(first);
        end = end.max(last);
        ranges.remove(&first);
    }
    ranges.insert(start, end);
}

/// Takes `start..end` out of disjoint ranges.
fn remove_range(ranges: &mut BTreeMap<u64, u64>, start: u64, end: u64) {
    if start >= end {
        return;
    }
    while let Some((&first, &last)) = ranges.range(..end).next_back() {
        if last <= start {
            break;
        }
        ranges.remove(&first);
        if first < start {
            ranges.insert(first, start);
        }
        if last > end {
            ranges.insert(end, last);
        }
    }
}
