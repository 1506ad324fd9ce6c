//! What a disk with a head has read beside what was asked for. To pass over a neighbour takes such a disk less
//! time than to come back for it, and readers of a file come for its parts in an order that is only nearly
//! that of the disk: several requests are under way at once.
//!
//! A buffer, not a cache: each block is given out once, so who reads a block again, because its checksum
//! differed, gets it from the disk. Knows positions only; it is told of what is written.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::aligned::AlignedBuf;
use crate::lock::Mutex;

/// What is read together, bytes: a run that begins at a multiple of it. At 200 MB/s it passes by in 1.3 ms, where
/// a seek takes 5 ms and more ([`DiskModel::HDD`](crate::emulated::DiskModel::HDD)).
pub(crate) const TRACK: u64 = 256 << 10;
/// Most tracks that are kept: 16 MiB.
const TRACKS_MAX: usize = 64;
/// Most tracks that are known to be bad.
const BAD_MAX: usize = 4096;
/// Blocks are given out in these units, bytes.
const BLOCK: u64 = TRACK / u64::BITS as u64;
/// What a track counts for of which something was asked for later, and one of which nothing was: the time of a
/// seek is that of some four tracks.
const GAIN: i32 = 4;
const LOSS: i32 = -1;
/// Bounds of the sum. Where it is below [`PAYS`], reads are not widened, but for one in [`TRIAL`].
const SUM: (i32, i32) = (-64, 64);
const PAYS: i32 = -32;
const TRIAL: u32 = 8;

/// A run of the disk that was read.
struct Track {
    bytes: AlignedBuf,
    /// Blocks that were not given out, a bit each.
    left: u64,
    /// Something of it was asked for after it was read.
    has_gained: bool,
    /// When it was read.
    read: u64,
}

/// A read that is under way.
struct Filling {
    number: u64,
    /// Its tracks.
    tracks: Range<u64>,
    /// Something in it was written meanwhile.
    is_stale: bool,
}

#[derive(Default)]
struct State {
    /// By number: position over [`TRACK`].
    tracks: BTreeMap<u64, Track>,
    filling: Vec<Filling>,
    /// Reads that have begun.
    begun: u64,
    sum: i32,
    refused: u32,
    /// Tracks that the disk could not read whole, and that were not written since.
    bad: BTreeSet<u64>,
}

impl State {
    /// Counts what a track was good for that goes.
    fn count(&mut self, has_gained: bool) {
        let points = if has_gained { GAIN } else { LOSS };
        self.sum = (self.sum + points).clamp(SUM.0, SUM.1);
    }
}

/// Blocks of a track, a bit each, that a range of the disk touches.
fn blocks(track: u64, range: &Range<u64>) -> u64 {
    let within = |pos: u64| pos.clamp(track * TRACK, (track + 1) * TRACK) - track * TRACK;
    let (from, to) = (within(range.start) / BLOCK, within(range.end).div_ceil(BLOCK));
    let below = |end: u64| u64::MAX.checked_shr(u64::BITS - end as u32).unwrap_or(0);
    below(to) & !below(from)
}

/// The tracks that a range of the disk touches.
pub(crate) fn tracks_of(range: &Range<u64>) -> Range<u64> {
    range.start / TRACK..range.end.div_ceil(TRACK)
}

/// The part of `range` that lies in a track.
pub(crate) fn part_in(track: u64, range: &Range<u64>) -> Range<u64> {
    range.start.max(track * TRACK)..range.end.min((track + 1) * TRACK)
}

/// Tracks of a disk that were read, with the blocks that nobody has asked for yet.
#[derive(Default)]
pub(crate) struct ReadAhead(Mutex<State>);

impl ReadAhead {
    /// Gives `range` out, which lies in one track, if all of it is there.
    pub(crate) fn take_part(&self, range: &Range<u64>, out: &mut [u8]) -> bool {
        let mut state = self.0.lock();
        let number = range.start / TRACK;
        let wanted = blocks(number, range);
        let Some(track) = state.tracks.get_mut(&number) else {
            return false;
        };
        let at = (range.start % TRACK) as usize;
        let Some(bytes) = track.bytes.bytes().get(at..at + out.len()) else {
            return false;
        };
        if track.left & wanted != wanted {
            return false;
        }
        out.copy_from_slice(bytes);
        track.left &= !wanted;
        track.has_gained = true;
        if track.left == 0 {
            state.tracks.remove(&number);
            state.count(true);
        }
        true
    }

    /// Whether nothing is known of a bad block around `range`.
    pub(crate) fn is_good(&self, range: &Range<u64>) -> bool {
        self.0.lock().bad.range(tracks_of(range)).next().is_none()
    }

    /// Notes that a read of some tracks has failed: a bad block may take a disk seconds each time. What is
    /// around it is read without it from now on.
    pub(crate) fn fail(&self, begun: u64, tracks: &BTreeSet<u64>) {
        let mut state = self.0.lock();
        state.filling.retain(|filling| filling.number != begun);
        if state.bad.len() + tracks.len() > BAD_MAX {
            state.bad.clear();
        }
        state.bad.extend(tracks);
    }

    /// Whether all of `range` is there.
    pub(crate) fn has(&self, range: &Range<u64>) -> bool {
        let state = self.0.lock();
        tracks_of(range).all(|number| {
            let wanted = blocks(number, range);
            let left = state.tracks.get(&number).map_or(0, |track| track.left);
            left & wanted == wanted
        })
    }

    /// Gives `range` out if all of it is there.
    pub(crate) fn take(&self, range: &Range<u64>, out: &mut [u8]) -> bool {
        self.has(range)
            && tracks_of(range).all(|number| {
                let part = part_in(number, range);
                let at = (part.start - range.start) as usize;
                let len = (part.end - part.start) as usize;
                self.take_part(&part, &mut out[at..at + len])
            })
    }

    /// Whether it pays to read whole tracks, as far as can be told from the last ones.
    pub(crate) fn pays(&self) -> bool {
        let mut state = self.0.lock();
        if state.sum > PAYS {
            return true;
        }
        state.refused = (state.refused + 1) % TRIAL;
        state.refused == 0
    }

    /// Notes that some tracks are being read. To be called before the disk is; returns what [`keep`](Self::keep)
    /// is to be given.
    pub(crate) fn begin(&self, tracks: Range<u64>) -> u64 {
        let mut state = self.0.lock();
        state.begun += 1;
        let number = state.begun;
        state.filling.push(Filling {
            number,
            tracks,
            is_stale: false,
        });
        number
    }

    /// Keeps tracks that were read, each with the ranges of the disk that were given out, unless something in
    /// them was written since [`begin`](Self::begin).
    pub(crate) fn keep(&self, begun: u64, read: Vec<(u64, AlignedBuf)>, given: &[Range<u64>]) {
        let mut state = self.0.lock();
        let Some(at) = state.filling.iter().position(|filling| filling.number == begun) else {
            return;
        };
        if state.filling.swap_remove(at).is_stale {
            read.iter().for_each(|_| state.count(false));
            return;
        }
        for (number, bytes) in read {
            let end = number * TRACK + bytes.bytes().len() as u64;
            let all = blocks(number, &(number * TRACK..end));
            let given = given.iter().fold(0, |bits, range| bits | blocks(number, range));
            let track = Track {
                bytes,
                left: all & !given,
                has_gained: false,
                read: begun,
            };
            let before = match track.left {
                0 => state.tracks.remove(&number),
                _ => state.tracks.insert(number, track),
            };
            if let Some(before) = before {
                state.count(before.has_gained);
            }
        }
        while state.tracks.len() > TRACKS_MAX {
            let oldest = state.tracks.iter().min_by_key(|(_, track)| track.read);
            let Some(number) = oldest.map(|(number, _)| *number) else {
                return;
            };
            if let Some(track) = state.tracks.remove(&number) {
                state.count(track.has_gained);
            }
        }
    }

    /// Drops what is kept of a range that is written. To be called before the disk is told to write and after
    /// it has: what is read in between may be old or new.
    pub(crate) fn forget(&self, range: &Range<u64>) {
        let gone = tracks_of(range);
        let mut state = self.0.lock();
        for filling in &mut state.filling {
            filling.is_stale |= filling.tracks.start < gone.end && gone.start < filling.tracks.end;
        }
        while let Some((&number, _)) = state.tracks.range(gone.clone()).next() {
            if let Some(track) = state.tracks.remove(&number) {
                state.count(track.has_gained);
            }
        }
        // A disk puts another block in the place of a bad one when it is written.
        while let Some(&number) = state.bad.range(gone.clone()).next() {
            state.bad.remove(&number);
        }
    }
}
