//! Parts of blocks in the log, zeroed ranges, and blocks that entries in the log have made holes. Guarded by
//! the inode's lock; each new piece is newer than all before it, so it cuts the pieces that it overlaps.
//!
//! `lseek` gives the same answer before a digest and after it: a block is data from the first write to it
//! until one operation makes a hole of all of it, or truncates the file before it (`varve_digest` folds by
//! this rule, too).

use super::radix::{Radix, Word};
use std::collections::BTreeMap;
use varve_format::{BLOCK_BYTES, LogSeq};

/// A range of bytes of one block in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    start: u16,
    end: u16,
    addr: u64,
    seq: LogSeq,
}

/// Location of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// In the log, from this address on.
    Log(u64),
    /// Nowhere: they are zeros.
    Zero,
    /// Not in the log: as digested.
    Below,
}

/// Parts and zeros of one file.
#[derive(Default)]
pub(crate) struct Pieces {
    /// The block whose parts changed last, kept out of the map: small appends stay in it for a while.
    hot_block: u64,
    hot: Vec<Part>,
    parts: BTreeMap<u64, Vec<Part>>,
    /// Start of a zeroed range: its end and number. Ranges do not overlap.
    zeros: BTreeMap<u64, (u64, LogSeq)>,
    /// First block of a range that one operation made a hole: the block after it, and its number. Ranges do
    /// not overlap.
    holes: BTreeMap<u64, (u64, LogSeq)>,
    /// Blocks that still count as data though all bytes written to them were zeroed, part by part; with the
    /// number of the write.
    zeroed: BTreeMap<u64, LogSeq>,
}

/// State of a block without its map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Block {
    /// It was written to.
    Data,
    /// A hole, at least up to this block unless the log holds something there.
    Hole(u64),
    /// As digested.
    Below,
}

/// Takes `start..end` out of the parts.
fn cut(parts: &mut Vec<Part>, start: u16, end: u16) {
    let first = parts.partition_point(|part| part.end <= start);
    let last = parts.partition_point(|part| part.start < end);
    if first >= last {
        return;
    }
    let (head, tail) = (parts[first], parts[last - 1]);
    let mut rest = [None, None];
    if head.start < start {
        rest[0] = Some(Part { end: start, ..head });
    }
    if tail.end > end {
        rest[1] = Some(Part {
            start: end,
            addr: tail.addr + u64::from(end - tail.start),
            ..tail
        });
    }
    parts.splice(first..last, rest.into_iter().flatten());
}

/// Takes `start..end` out of ranges.
fn cut_ranges(ranges: &mut BTreeMap<u64, (u64, LogSeq)>, start: u64, end: u64) {
    let before = ranges
        .range(..start)
        .next_back()
        .map(|(&from, &range)| (from, range));
    if let Some((from, (to, seq))) = before
        && to > start
    {
        ranges.insert(from, (start, seq));
        if to > end {
            ranges.insert(end, (to, seq));
        }
    }
    while let Some((from, (to, seq))) = ranges
        .range(start..end)
        .next()
        .map(|(&from, &range)| (from, range))
    {
        ranges.remove(&from);
        if to > end {
            ranges.insert(end, (to, seq));
        }
    }
}

impl Pieces {
    pub(crate) const fn new() -> Self {
        Self {
            hot_block: 0,
            hot: Vec::new(),
            parts: BTreeMap::new(),
            zeros: BTreeMap::new(),
            holes: BTreeMap::new(),
            zeroed: BTreeMap::new(),
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.hot.is_empty()
            && self.parts.is_empty()
            && self.zeros.is_empty()
            && self.holes.is_empty()
            && self.zeroed.is_empty()
    }

    /// Adds `start..end` of `block`, in the log at `addr`; newer than all pieces.
    #[inline]
    pub(crate) fn put(&mut self, block: u64, start: u16, end: u16, addr: u64, seq: LogSeq) {
        if self.hot_block != block {
            self.heat(block);
        }
        if self.hot.last().is_some_and(|last| last.end > start) {
            cut(&mut self.hot, start, end);
        }
        let at = match self.hot.last() {
            Some(last) if last.end > start => self.hot.partition_point(|part| part.end <= start),
            _ => self.hot.len(),
        };
        self.hot.insert(
            at,
            Part {
                start,
                end,
                addr,
                seq,
            },
        );
    }

    /// Makes `block` the hot one.
    fn heat(&mut self, block: u64) {
        let parts = self.parts.remove(&block).unwrap_or_default();
        let cold = std::mem::replace(&mut self.hot, parts);
        if !cold.is_empty() {
            self.parts.insert(self.hot_block, cold);
        }
        self.hot_block = block;
    }

    /// Zeroes `start..end` from entry `seq` on; newer than all pieces.
    pub(crate) fn zero(&mut self, start: u64, end: u64, seq: LogSeq) {
        if start >= end {
            return;
        }
        cut_ranges(&mut self.zeros, start, end);
        self.zeros.insert(start, (end, seq));
        self.heat(u64::MAX);
        self.keep_edges(start, end);
        self.make_hole(start.div_ceil(BLOCK_BYTES), end / BLOCK_BYTES, seq);
        let (first, last) = (start / BLOCK_BYTES, (end - 1) / BLOCK_BYTES);
        // Only the two edge blocks keep parts.
        let mut kept = self.parts.split_off(&first);
        let mut above = if last == u64::MAX {
            BTreeMap::new()
        } else {
            kept.split_off(&(last + 1))
        };
        for block in [first, last] {
            if let Some(mut parts) = kept.remove(&block) {
                let base = block * BLOCK_BYTES;
                let from = start.max(base) - base;
                let to = end.min(base.saturating_add(BLOCK_BYTES)) - base;
                cut(&mut parts, from as u16, to as u16);
                if !parts.is_empty() {
                    self.parts.insert(block, parts);
                }
            }
        }
        self.parts.append(&mut above);
    }

    /// Blocks that `start..end` covers in part stay data if they were written to.
    fn keep_edges(&mut self, start: u64, end: u64) {
        let edges = [(start, start / BLOCK_BYTES), (end, end / BLOCK_BYTES)];
        for (at, block) in edges {
            let parts = self.parts.get(&block).map_or(&[][..], Vec::as_slice);
            let newest = parts.iter().map(|part| part.seq).max();
            if let Some(newest) = newest.filter(|_| !at.is_multiple_of(BLOCK_BYTES)) {
                self.zeroed.insert(block, newest);
            }
        }
    }

    /// Makes the blocks from `first` to before `end` a hole.
    fn make_hole(&mut self, first: u64, end: u64, seq: LogSeq) {
        if first >= end {
            return;
        }
        cut_ranges(&mut self.holes, first, end);
        self.holes.insert(first, (end, seq));
        let mut above = self.zeroed.split_off(&first);
        self.zeroed.append(&mut above.split_off(&end));
    }

    /// Drops the parts of a block that was written as a whole.
    #[inline]
    pub(crate) fn forget_block(&mut self, block: u64) {
        if self.hot_block == block {
            self.hot.clear();
        } else if !self.parts.is_empty() {
            self.parts.remove(&block);
        }
    }

    fn block_parts(&self, block: u64) -> &[Part] {
        if block == self.hot_block {
            &self.hot
        } else {
            self.parts.get(&block).map_or(&[], Vec::as_slice)
        }
    }

    /// Returns the location of byte `pos`, given the word of its block, and the end (at most `end`, within
    /// the block) of the range for which the answer holds.
    pub(crate) fn find(&self, word: Option<Word>, pos: u64, end: u64) -> (Source, u64) {
        let block = pos / BLOCK_BYTES;
        let base = block * BLOCK_BYTES;
        let end = end.min(base + BLOCK_BYTES);
        let mut stop = end;
        // Parts are newer than every zeroed range over them; a word may be newer than either.
        let within = (pos - base) as u16;
        let parts = self.block_parts(block);
        let live = |part: &Part| !word.is_some_and(|word| word.is_newer_than(part.seq));
        let at = parts.partition_point(|part| part.end <= within);
        if let Some(part) = parts[at..].iter().find(|part| live(part)) {
            if part.start <= within {
                return (
                    Source::Log(part.addr + u64::from(within - part.start)),
                    end.min(base + u64::from(part.end)),
                );
            }
            stop = stop.min(base + u64::from(part.start));
        }
        let zero_wins = |seq: LogSeq| !word.is_some_and(|word| word.is_newer_than(seq));
        if let Some((_, &(to, seq))) = self.zeros.range(..=pos).next_back()
            && to > pos
        {
            stop = stop.min(to);
            if zero_wins(seq) {
                return (Source::Zero, stop);
            }
        }
        if let Some((&from, _)) = self.zeros.range(pos + 1..stop.max(pos + 1)).next() {
            stop = stop.min(from);
        }
        match word {
            Some(word) => (Source::Log(word.addr() + u64::from(within)), stop),
            None => (Source::Below, stop),
        }
    }

    /// Returns the state of `block` for `lseek`, given its word.
    pub(crate) fn block(&self, word: Option<Word>, block: u64) -> Block {
        let hole = self.holes.range(..=block).next_back();
        let hole = hole.map(|(_, &range)| range).filter(|&(end, _)| end > block);
        let written = word.is_some_and(|word| hole.is_none_or(|(_, seq)| word.is_newer_than(seq)));
        if written || !self.block_parts(block).is_empty() || self.zeroed.contains_key(&block) {
            return Block::Data;
        }
        hole.map_or(Block::Below, |(end, _)| Block::Hole(end))
    }

    /// First block after `block` and below `limit` for which the log may give another answer.
    pub(crate) fn next_block(&self, block: u64, limit: u64) -> u64 {
        if block + 1 >= limit {
            return limit;
        }
        let hole = self.holes.range(block + 1..limit).next().map(|(&first, _)| first);
        let zeroed = self
            .zeroed
            .range(block + 1..limit)
            .next()
            .map(|(&found, _)| found);
        let nearest = [hole, zeroed, self.next_parts(block + 1, limit)];
        nearest.into_iter().flatten().min().unwrap_or(limit)
    }

    /// First block at or after `block` and below `limit` that has parts.
    fn next_parts(&self, block: u64, limit: u64) -> Option<u64> {
        let cold = if block < limit {
            self.parts.range(block..limit).next().map(|(&found, _)| found)
        } else {
            None
        };
        let hot =
            (!self.hot.is_empty() && (block..limit).contains(&self.hot_block)).then_some(self.hot_block);
        match (cold, hot) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Drops digested pieces; returns whether there were any.
    pub(crate) fn prune(&mut self, digested: LogSeq) -> bool {
        let mut gone = false;
        let mut sweep = |parts: &mut Vec<Part>| {
            let before = parts.len();
            parts.retain(|part| part.seq > digested);
            gone |= parts.len() != before;
            !parts.is_empty()
        };
        sweep(&mut self.hot);
        self.parts.retain(|_, parts| sweep(parts));
        let count = |pieces: &Self| pieces.zeros.len() + pieces.holes.len() + pieces.zeroed.len();
        let before = count(self);
        self.zeros.retain(|_, (_, seq)| *seq > digested);
        self.holes.retain(|_, (_, seq)| *seq > digested);
        self.zeroed.retain(|_, seq| *seq > digested);
        gone || count(self) != before
    }
}

/// Whether the log holds nothing of the file.
pub(crate) fn is_clean(radix: &Radix, pieces: &Pieces) -> bool {
    radix.is_empty() && pieces.is_empty()
}
