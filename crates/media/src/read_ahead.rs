//! What a disk with a head has read beside what was asked for. To pass over a neighbour takes such a disk less
//! time than to come back for it, and readers of a file come for its parts in an order that is only nearly
//! that of the disk: several requests are under way at once.
//!
//! A buffer, not a cache: each block is given out once, so who reads a block again, because its checksum
//! differed, gets it from the disk. Knows positions only; whose turn it is, is the elevator's matter.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::aligned::AlignedBuf;
use crate::error::MediaError;
use crate::lock::Mutex;
use crate::traits::BlockDevice;

/// What is read together, bytes: a run that begins at a multiple of it. At 200 MB/s it passes by in 1.3 ms, where
/// a seek takes 5 ms and more ([`DiskModel::HDD`](crate::emulated::DiskModel::HDD)).
pub(crate) const TRACK: u64 = 256 << 10;
/// A read of more bytes is not widened.
const WIDENED_MAX: u64 = 1 << 20;
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
fn tracks_of(range: &Range<u64>) -> Range<u64> {
    range.start / TRACK..range.end.div_ceil(TRACK)
}

/// The part of `range` that lies in a track.
fn part_in(track: u64, range: &Range<u64>) -> Range<u64> {
    range.start.max(track * TRACK)..range.end.min((track + 1) * TRACK)
}

/// Tracks of a disk that were read, with the blocks that nobody has asked for yet.
#[derive(Default)]
pub(crate) struct ReadAhead(Mutex<State>);

/// A part of a read: where on the disk, and where to.
pub(crate) type Part<'b> = (u64, &'b mut [u8]);

/// Bytes of the disk.
pub(crate) fn range(off: u64, len: u64) -> Range<u64> {
    off..off.saturating_add(len)
}

/// The bytes of the disk that a part covers.
fn range_of((off, out): &Part<'_>) -> Range<u64> {
    range(*off, out.len() as u64)
}

impl ReadAhead {
    /// Gives `range` out, which lies in one track, if all of it is there.
    fn take_part(&self, range: &Range<u64>, out: &mut [u8]) -> bool {
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
    fn is_good(&self, range: &Range<u64>) -> bool {
        self.0.lock().bad.range(tracks_of(range)).next().is_none()
    }

    /// Notes that a read of some tracks has failed: a bad block may take a disk seconds each time. What is
    /// around it is read without it from now on.
    fn fail(&self, begun: u64, tracks: &BTreeSet<u64>) {
        let mut state = self.0.lock();
        state.filling.retain(|filling| filling.number != begun);
        if state.bad.len() + tracks.len() > BAD_MAX {
            state.bad.clear();
        }
        state.bad.extend(tracks);
    }

    /// Whether all of `range` is there.
    fn has(&self, range: &Range<u64>) -> bool {
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
    fn pays(&self) -> bool {
        let mut state = self.0.lock();
        if state.sum > PAYS {
            return true;
        }
        state.refused = (state.refused + 1) % TRIAL;
        state.refused == 0
    }

    /// Notes that some tracks are being read. To be called before the disk is; returns what [`keep`](Self::keep)
    /// is to be given.
    fn begin(&self, tracks: Range<u64>) -> u64 {
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
    fn keep(&self, begun: u64, read: Vec<(u64, AlignedBuf)>, given: &[Range<u64>]) {
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

    /// Drops what is kept of a range.
    fn forget(&self, range: &Range<u64>) {
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

    /// Whether a part can be read with what lies around it.
    fn can_widen(&self, disk: &dyn BlockDevice, range: &Range<u64>) -> bool {
        range.end - range.start <= WIDENED_MAX && range.end <= disk.len_bytes() && self.is_good(range)
    }

    /// Reads parts, ascending: of those that are not there yet, the tracks in which they lie. One call at a time,
    /// or tracks are read twice.
    pub(crate) fn read(&self, disk: &dyn BlockDevice, parts: &mut [Part<'_>]) -> Result<(), MediaError> {
        // Another call may have brought them while this one waited.
        let mut absent: Vec<&mut Part<'_>> = Vec::new();
        for part in parts.iter_mut() {
            if !self.take(&range_of(part), part.1) {
                absent.push(part);
            }
        }
        if absent.is_empty() {
            return Ok(());
        }
        let can_widen = absent.iter().any(|part| self.can_widen(disk, &range_of(part)));
        if !can_widen || !self.pays() || !self.read_tracks(disk, &mut absent) {
            let mut exact: Vec<Part<'_>> = absent.into_iter().map(|(off, out)| (*off, &mut **out)).collect();
            return disk.read_batch(&mut exact);
        }
        Ok(())
    }

    /// Reads parts with what lies around them. `false` if the disk could not: what nobody has asked for may be
    /// what it cannot read.
    fn read_tracks(&self, disk: &dyn BlockDevice, parts: &mut [&mut Part<'_>]) -> bool {
        let (mut wide, mut exact): (Vec<_>, Vec<_>) = parts
            .iter_mut()
            .partition(|part| self.can_widen(disk, &range_of(part)));
        let ranges: Vec<Range<u64>> = wide.iter().map(|part| range_of(part)).collect();
        let missing: BTreeSet<u64> = ranges
            .iter()
            .flat_map(|range| tracks_of(range).filter(|number| !self.has(&part_in(*number, range))))
            .collect();
        let (Some(first), Some(last)) = (missing.first(), missing.last()) else {
            return false;
        };
        let begun = self.begin(*first..last + 1);
        let len = disk.len_bytes();
        let mut tracks: Vec<(u64, AlignedBuf)> = missing
            .iter()
            .map(|number| (*number, AlignedBuf::new(TRACK.min(len - number * TRACK) as usize)))
            .collect();
        let whole = tracks
            .iter_mut()
            .map(|(number, bytes)| (*number * TRACK, bytes.bytes_mut()));
        let beside = exact.iter_mut().map(|part| (part.0, &mut *part.1));
        let mut batch: Vec<Part<'_>> = whole.chain(beside).collect();
        batch.sort_unstable_by_key(|(off, _)| *off);
        let mut is_whole = disk.read_batch(&mut batch).is_ok();
        let copies = if is_whole { &mut wide[..] } else { &mut [] };
        for (part, range) in copies.iter_mut().zip(&ranges) {
            for number in tracks_of(range) {
                let piece = part_in(number, range);
                let at = (piece.start - range.start) as usize;
                let out = &mut part.1[at..at + (piece.end - piece.start) as usize];
                match tracks.binary_search_by_key(&number, |(number, _)| *number) {
                    Ok(found) => {
                        let from = (piece.start - number * TRACK) as usize;
                        out.copy_from_slice(&tracks[found].1.bytes()[from..from + out.len()]);
                    }
                    // It was there, and was written or taken since.
                    Err(_) if !self.take_part(&piece, out) => {
                        is_whole &= disk.read(piece.start, out).is_ok();
                    }
                    Err(_) => {}
                }
            }
        }
        if is_whole {
            self.keep(begun, tracks, &ranges);
        } else {
            self.fail(begun, &missing);
        }
        is_whole
    }

    /// Changes what lies in some ranges. What is kept of them goes before and after: what is read in between may
    /// be old or new.
    pub(crate) fn change<T>(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>, IntoIter: Clone>,
        change: impl FnOnce() -> T,
    ) -> T {
        let ranges = ranges.into_iter();
        ranges.clone().for_each(|range| self.forget(&range));
        let done = change();
        ranges.for_each(|range| self.forget(&range));
        done
    }
}
