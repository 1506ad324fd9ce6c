//! One pass over the checksums: keys of one range are gathered, sorted, and turned into pairs of positions.

use super::merge::Spill;
use super::{Checksums, FindError, MAX_BLOCKS, Progress};
use crate::hash::mix;
use std::ops::ControlFlow;

/// A key (8 bytes) and a position (5), big-endian so that they sort as bytes; later a pair: a position, the
/// earlier position, and 3 unused bytes.
pub(super) type Entry = [u8; ENTRY_BYTES];
pub(super) const ENTRY_BYTES: usize = 13;
const KEY_BYTES: usize = 8;
pub(super) const POSITION_BYTES: usize = 5;

/// Of a row of equal blocks, the first 16 are kept as originals; the others become runs of as many.
const FILL_BLOCKS: u64 = 16;

/// Blocks between two calls of `progress`.
const PROGRESS_BLOCKS: u64 = 1 << 18;

pub(super) fn position(bytes: &[u8]) -> u64 {
    let number = bytes.iter().take(POSITION_BYTES);
    number.fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn entry(key: u64, at: u64) -> Entry {
    let mut entry = [0; ENTRY_BYTES];
    entry[..KEY_BYTES].copy_from_slice(&key.to_be_bytes());
    entry[KEY_BYTES..].copy_from_slice(&at.to_be_bytes()[8 - POSITION_BYTES..]);
    entry
}

fn pair(at: u64, same_as: u64) -> Entry {
    let mut entry = [0; ENTRY_BYTES];
    entry[..POSITION_BYTES].copy_from_slice(&at.to_be_bytes()[8 - POSITION_BYTES..]);
    entry[POSITION_BYTES..2 * POSITION_BYTES].copy_from_slice(&same_as.to_be_bytes()[8 - POSITION_BYTES..]);
    entry
}

/// What a key is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyOf {
    /// The checksums of two neighbouring blocks.
    Two,
    /// The checksum of one block: of many blocks, some with equal keys are different.
    One,
}

/// All passes: the ranges of keys that are still to be read.
pub(super) struct Search {
    key_of: KeyOf,
    spill: Spill,
    gathered: Vec<Entry>,
    capacity: usize,
    /// First and last key of each range; the next range is the last one.
    ranges: Vec<(u64, u64)>,
    done: u32,
}

impl Search {
    pub(super) fn new(key_of: KeyOf, spill: Spill, memory_bytes: usize, blocks: u64) -> Self {
        // A sixteenth is for buffers and for the source.
        let most = (memory_bytes - memory_bytes / 16) / ENTRY_BYTES;
        let capacity = most.min(usize::try_from(blocks).unwrap_or(most).max(1));
        // Keys spread almost evenly; the margin is for the rest.
        let fill = (most - most / 64) as u64;
        let passes = blocks.div_ceil(fill.max(1)).max(1);
        let step = u64::MAX / passes;
        let range = |n: u64| {
            let last = if n + 1 == passes {
                u64::MAX
            } else {
                step * (n + 1) - 1
            };
            (step * n, last)
        };
        Self {
            key_of,
            spill,
            gathered: Vec::with_capacity(capacity),
            capacity,
            ranges: (0..passes).rev().map(range).collect(),
            done: 0,
        }
    }

    /// Returns the pairs found and the number of passes.
    pub(super) fn into_spill(self) -> (Spill, u32) {
        (self.spill, self.done)
    }

    /// Reads the next range; returns false if there is none.
    pub(super) fn next_pass(
        &mut self,
        source: &mut dyn Checksums,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<bool, FindError> {
        let Some(range) = self.ranges.pop() else {
            return Ok(false);
        };
        let pass = self.done + 1;
        let begins = Progress {
            pass,
            passes: pass + self.ranges.len() as u32,
            blocks: 0,
        };
        if progress(begins).is_break() {
            return Err(FindError::Stopped);
        }
        self.gathered.clear();
        let mut pass = Pass {
            search: self,
            range,
            end: None,
            last: 0,
            told: 0,
            blocks: 0,
            ended: None,
        };
        let read = source.scan(&mut |first, sums| pass.add(first, sums, progress));
        let ended = pass.ended;
        read.map_err(FindError::Read)?;
        if let Some(error) = ended {
            return Err(error);
        }
        self.pair_up();
        self.spill.write(&self.gathered)?;
        self.gathered.clear();
        self.done += 1;
        Ok(true)
    }

    /// Most blocks of a row of equal ones that are kept as originals.
    const fn originals(&self) -> u64 {
        match self.key_of {
            KeyOf::Two => FILL_BLOCKS,
            KeyOf::One => 1,
        }
    }

    /// Turns the gathered keys into pairs, in place.
    fn pair_up(&mut self) {
        self.gathered.sort_unstable();
        let originals = self.originals();
        let (_, pairs) = split_groups(&mut self.gathered, originals, false);
        self.gathered.truncate(pairs);
        self.gathered.sort_unstable();
    }

    /// Spills the pairs of the gathered keys, and keeps the first of each key. Returns whether that made
    /// enough room.
    fn make_room(&mut self) -> Result<bool, FindError> {
        self.gathered.sort_unstable();
        let originals = self.originals();
        let (firsts, pairs) = split_groups(&mut self.gathered, originals, true);
        let made = pairs - firsts;
        self.gathered[firsts..pairs].sort_unstable();
        self.spill.write(&self.gathered[firsts..pairs])?;
        self.gathered.truncate(firsts);
        Ok(made >= self.capacity / 4)
    }
}

/// Splits sorted entries by key into firsts and pairs. Pairs are left at the front, or, with `keep_firsts`,
/// after the firsts of each key. Returns the end of the firsts and of the pairs.
fn split_groups(entries: &mut [Entry], originals: u64, keep_firsts: bool) -> (usize, usize) {
    let mut from = 0;
    let mut firsts = 0;
    let mut pairs = 0;
    while from < entries.len() {
        let key: [u8; KEY_BYTES] = entries[from][..KEY_BYTES].try_into().expect("eight bytes");
        let members = entries[from..]
            .iter()
            .take_while(|entry| entry[..KEY_BYTES] == key);
        let to = from + members.count();
        let first = position(&entries[from][KEY_BYTES..]);
        let in_a_row = entries[from..to]
            .iter()
            .zip(0u64..originals)
            .take_while(|(entry, n)| position(&entry[KEY_BYTES..]) == first + n)
            .count();
        for n in from..to {
            let at = position(&entries[n][KEY_BYTES..]);
            if n < from + in_a_row {
                if keep_firsts {
                    // Firsts come before pairs: the pair at this index moves to the end of the pairs.
                    let kept = entry(u64::from_be_bytes(key), at);
                    entries[pairs] = entries[firsts];
                    entries[firsts] = kept;
                    firsts += 1;
                    pairs += 1;
                }
                continue;
            }
            let same_as = first + at % in_a_row as u64;
            entries[pairs] = pair(at, same_as);
            pairs += 1;
        }
        from = to;
    }
    (firsts, pairs)
}

/// State of a pass during a scan.
struct Pass<'a> {
    search: &'a mut Search,
    range: (u64, u64),
    /// Position after the last block, if there was one.
    end: Option<u64>,
    last: u32,
    told: u64,
    blocks: u64,
    ended: Option<FindError>,
}

impl Pass<'_> {
    fn add(
        &mut self,
        first: u64,
        sums: &[u32],
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        match self.try_add(first, sums, progress) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.ended = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    fn try_add(
        &mut self,
        first: u64,
        sums: &[u32],
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<(), FindError> {
        if let Some(end) = self.end.filter(|end| first < *end) {
            return Err(FindError::Order {
                at: first,
                before: end - 1,
            });
        }
        let end = first.saturating_add(sums.len() as u64);
        if end > MAX_BLOCKS {
            return Err(FindError::Blocks(end));
        }
        let mut before = self.end.filter(|end| *end == first).map(|_| self.last);
        for (at, sum) in (first..).zip(sums) {
            let keyed = match (self.search.key_of, before) {
                (KeyOf::Two, Some(before)) => Some((mix(u64::from(before) << 32 | u64::from(*sum)), at - 1)),
                (KeyOf::Two, None) => None,
                (KeyOf::One, _) => Some((mix(u64::from(*sum)), at)),
            };
            if let Some((key, at)) = keyed.filter(|(key, _)| (self.range.0..=self.range.1).contains(key)) {
                self.gather(entry(key, at))?;
            }
            before = Some(*sum);
            self.last = *sum;
        }
        self.end = Some(end);
        self.blocks += sums.len() as u64;
        if self.blocks >= self.told + PROGRESS_BLOCKS {
            self.told = self.blocks;
            let pass = self.search.done + 1;
            let now = Progress {
                pass,
                passes: pass + self.search.ranges.len() as u32,
                blocks: self.blocks,
            };
            if progress(now).is_break() {
                return Err(FindError::Stopped);
            }
        }
        Ok(())
    }

    fn gather(&mut self, new: Entry) -> Result<(), FindError> {
        let search = &mut *self.search;
        if search.gathered.len() == search.capacity && !search.make_room()? {
            // Too many keys: the upper half of the range is left to another pass.
            let middle = self.range.0 + (self.range.1 - self.range.0) / 2;
            search.ranges.push((middle + 1, self.range.1));
            self.range.1 = middle;
            let bound = middle.to_be_bytes();
            search.gathered.retain(|entry| entry[..KEY_BYTES] <= bound[..]);
        }
        let key = u64::from_be_bytes(new[..KEY_BYTES].try_into().expect("eight bytes"));
        if key <= self.range.1 {
            search.gathered.push(new);
        }
        Ok(())
    }
}
