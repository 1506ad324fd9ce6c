//! The effect of a batch on one file's data: the bytes written, the holes made, and the length of old content
//! that remains. Does not know where old or new content is stored.
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
    /// Returns whether all of `other` lies in this range.
    #[must_use]
    pub const fn covers(&self, other: &Self) -> bool {
        self.offset <= other.offset
            && other.offset.saturating_add(other.len) <= self.offset.saturating_add(self.len)
    }
}

/// Bytes of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteData<'a> {
    /// Bytes copied out of the log; the checksum of their entry is right.
    Here(&'a [u8]),
    /// Bytes still in the log. The checksum of their entry is verified when they are copied to their blocks.
    LogResident(LogResident),
}

/// Bytes that were left in a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogResident {
    /// Index of the batch among those that are folded together.
    pub source: u32,
    /// Index of the entry in that batch.
    pub entry: u32,
    /// First byte of the entry's payload.
    pub skip: u32,
    /// Bytes.
    pub len: u32,
}

impl<'a> WriteData<'a> {
    /// Returns the number of bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a write of nothing is no operation")]
    pub const fn len(&self) -> usize {
        match self {
            Self::Here(data) => data.len(),
            Self::LogResident(left) => left.len as usize,
        }
    }

    /// Splits the data into the first `mid` bytes and the rest. `mid` is at most the length.
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

    /// Returns the bytes if they were copied out of the log.
    #[must_use]
    pub const fn here(&self) -> Option<&'a [u8]> {
        match self {
            Self::Here(data) => Some(data),
            Self::LogResident(_) => None,
        }
    }
}

/// The changes to one file's data, to be made in the order of the fields, `size` last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FilePlan<'a> {
    /// The file is cut to this length first.
    pub truncate: Option<u64>,
    /// Holes to make; none overlaps `pieces`.
    pub holes: Vec<ByteRange>,
    /// Bytes to write, ascending, not overlapping. A zero may lie behind `size`, in the block of the end,
    /// which holds data.
    pub pieces: Vec<(u64, WriteData<'a>)>,
    /// Whole blocks to allocate, unwritten, where there is a hole still.
    pub allocate: Vec<ByteRange>,
    /// Blocks that an operation changed in part, ascending; empty unless `pieces` has bytes still in a log.
    /// If the batch is cut elsewhere after a crash, that operation reads the block, so the block must not be
    /// overwritten in place.
    pub partial: Vec<u64>,
    /// Final length of the file.
    pub size: u64,
}

impl FilePlan<'_> {
    /// Returns whether no operation of the batch changes a part of one of these blocks.
    #[must_use]
    pub fn is_whole(&self, blocks: Range<u64>) -> bool {
        let at = self.partial.partition_point(|block| *block < blocks.start);
        self.partial.get(at).is_none_or(|block| *block >= blocks.end) || armed(Bug::PartialInPlace)
    }

    /// Returns whether no block changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.truncate.is_none() && self.holes.is_empty() && self.pieces.is_empty() && self.allocate.is_empty()
    }

    /// Returns the number of bytes to write.
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

/// Segments that do not overlap, by their first byte. Only one of the two containers is in use at a time.
#[derive(Debug, Clone, Default)]
struct Segments<'a> {
    /// In use while each new segment lies behind all others, as most do: an append costs no search.
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

    /// Moves all segments to the map and returns it.
    fn mixed(&mut self) -> &mut BTreeMap<u64, Segment<'a>> {
        self.mixed.extend(self.in_order.drain(..));
        &mut self.mixed
    }

    /// Adds a segment that begins at or behind the end of all others.
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
    /// Estimated number of stretches: segments that did not continue another one when they were added.
    stretches: u64,
    /// Written blocks of which a part was cut or zeroed later.
    kept: BTreeSet<u64>,
    /// Blocks that an operation wrote, cut or zeroed in part; in any order, perhaps more than once.
    partial: Vec<u64>,
}

/// The byte written to a block that counts as data although none of its written bytes is left.
const ZERO: WriteData<'static> = WriteData::Here(&[0]);

impl<'a> FileFold<'a> {
    pub(crate) fn write(&mut self, offset: u64, data: WriteData<'a>) {
        let end = offset + data.len() as u64;
        self.note_partial(offset, end);
        self.insert(offset, end, Some(data));
        self.writes += 1;
    }

    /// Returns the approximate number of stretches (data and holes), and the number of data bytes.
    pub(crate) fn extent(&self) -> (u64, u64) {
        (self.stretches.min(self.segments.len() as u64), self.bytes)
    }

    /// Folds a change of length from `size` to `new_size`. Growing changes no block.
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

    /// Notes the blocks at both ends of `start..end` that a change of this range covers only in part.
    fn note_partial(&mut self, start: u64, end: u64) {
        for at in [start, end] {
            let block = at / BLOCK_BYTES;
            if !at.is_multiple_of(BLOCK_BYTES) && self.partial.last() != Some(&block) {
                self.partial.push(block);
            }
        }
    }

    /// Prepares for zeroing `start..end`: written blocks that lie partly in it still count as data (`kept`),
    /// blocks wholly in it no longer do.
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

    /// Returns whether a byte of the block was written and not zeroed later.
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

    /// Returns the zeros to write to blocks in `kept` that have no written byte left: one byte a block, at a
    /// position that reads as zero, perhaps behind the end of the file.
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
                // The block is in no hole and before all cuts: no byte of it is known to be zero.
                _ => continue,
            };
            zeros.push((zero, ZERO));
        }
        zeros
    }

    /// Removes all segments in `start..end`, and splits those that cross its ends.
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
            // The last segment that begins before `end`. If it ends at `start` or before, there is nothing to
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

    /// Returns the number of writes saved by merging neighbouring stretches of data.
    fn merged(&self) -> u64 {
        let (mut stretches, mut end) = (0, None);
        for (start, segment) in self.segments.iter().filter(|(_, segment)| segment.data.is_some()) {
            stretches += u64::from(end != Some(start));
            end = Some(segment.end);
        }
        self.writes.saturating_sub(stretches)
    }

    /// Returns the plan for a file that had `old` bytes (`None`: it is new) and has `size` bytes in the end,
    /// and the number of writes saved by merging.
    pub(crate) fn plan(&self, old: Option<u64>, size: u64) -> (FilePlan<'a>, u64) {
        let mut plan = FilePlan {
            truncate: old.and_then(|old| self.truncate.map(|to| to.min(old))),
            size,
            ..FilePlan::default()
        };
        for (offset, segment) in self.segments.iter() {
            match segment.data {
                Some(data) => plan.pieces.push((offset, data)),
                // No old content is left here, so there is nothing to punch.
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
        // The list is used only for bytes that lie in a log.
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
