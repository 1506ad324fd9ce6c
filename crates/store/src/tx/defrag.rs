//! Moving together what a file has alone on SSD or HDD: pieces that lie apart get one new place, in the order
//! of the file. Does not know who asks for it, nor how fast a device seeks.
//!
//! # Invariants
//! - *What is shared stays shared*: blocks that several extents name are neither moved nor freed, and no count
//!   of theirs changes. Pieces may have them, holes, and pieces on other tiers between them.
//! - *No state lacks the data*: the record that names the copies is committed after these were written and
//!   flushed; it frees the old blocks, as an overwrite does, so that they are used again only when no reader of
//!   an older state is left.
//! - *Nothing else changes*: bytes, checksums, size, holes, unwritten extents, the tier, times, mode.
//! - *It ends*: a step goes on behind what it has moved, and moves pieces only if they lie in at most half as
//!   many places then. So a second run finds nothing to do, unless free space has become better meanwhile.

use super::TxState;
use super::data::NewBlocks;
use crate::layout::Layout;
use crate::pool::fetch::{Fetched, Wanted};
use crate::reader::{MetaReader, View, file_root};
use crate::seeded::{Bug, armed};
use crate::space::{NextUnit, Span, Together};
use crate::{DataTarget, MappedPart, OP_ROOM, Payload, Result, Store, StoreError, Tx};
use std::collections::HashMap;
use std::ops::Range;
use varve_format::{BLOCK_SIZE, ExtentFlags, FILE_BLOCKS_MAX, FileBlock, Ino, Tier};

/// Free space of as many blocks is as good as any: it is read nearly as fast as a longer run. A disk reads 4 MiB
/// in the time of two or three seeks; flash does not seek, but longer pieces are fewer requests.
const fn long_blocks(tier: Tier) -> u64 {
    match tier {
        Tier::Hdd => 1024,
        Tier::Nvm | Tier::Ssd => 256,
    }
}

/// A piece of as many blocks stays where it is; shorter ones are moved together with others. On a disk that is
/// what one transaction moves, so that a short piece is joined to a longer one beside it; flash is spared that.
#[must_use]
pub const fn staying_blocks(tier: Tier) -> u64 {
    match tier {
        Tier::Hdd => moved_blocks(tier),
        Tier::Nvm | Tier::Ssd => long_blocks(tier),
    }
}

/// Most blocks that one transaction moves: 8 and 4 MiB.
#[must_use]
pub const fn moved_blocks(tier: Tier) -> u64 {
    match tier {
        Tier::Hdd => 2048,
        Tier::Nvm | Tier::Ssd => 1024,
    }
}

/// Bytes of the record for pieces, at most; for each piece; and for one that leaves the tree of shared runs.
const RECORD_BYTES: u64 = 96 << 10;
const PIECE_BYTES: u64 = 256;
const RUN_BYTES: u64 = 4352;
/// Parts of a file that are read at once, and pieces that one transaction looks at.
const PARTS_AT_ONCE: usize = 128;
const PIECES_MAX: usize = 4096;

/// What one transaction has moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Defragmented {
    /// The block to go on from; the end of the range: all is done.
    pub next: FileBlock,
    /// Blocks that have a new place.
    pub moved: u64,
}

impl Tx<'_> {
    /// Moves together pieces of a file that lie apart on SSD or HDD and have no other owner, at most 8 MiB. If
    /// [`Defragmented::next`] is not the range's end, commit, and call again from there in another transaction.
    /// Pieces stay where no free space is better than their places, and on a tier that is being evacuated.
    ///
    /// # Errors
    /// `Invalid` for NVM, or if the range passes the largest file; `NoInode`, `WrongKind`; `NoSpace` for
    /// metadata; `DataChecksum`, and nothing is moved; `Unfinished` if the file must be recovered, or its
    /// truncation finished, first.
    pub fn defrag(&mut self, ino: Ino, range: Range<FileBlock>, tier: Tier) -> Result<Defragmented> {
        if range.end.0 > FILE_BLOCKS_MAX || range.start > range.end || tier == Tier::Nvm {
            return Err(StoreError::Invalid("range of blocks to defragment"));
        }
        self.guard_new(|core| core.defrag(ino, range.start.0..range.end.0, tier))
    }
}

impl Store {
    /// Reads what [`Tx::defrag`] would copy, in the order of the device, before its transaction begins: others
    /// go on meanwhile. Only a matter of speed.
    #[must_use]
    pub fn fetch_fragments(&self, ino: Ino, range: Range<FileBlock>, tier: Tier) -> Fetched<'_> {
        let found = {
            let snapshot = self.snapshot();
            let judge = |blocks| {
                self.space
                    .lock()
                    .runs_ahead(tier, blocks, long_blocks(tier), true)
            };
            choose(
                &snapshot.reader(),
                &self.layout,
                (ino, range.start.0..range.end.0, tier),
                RECORD_BYTES,
                judge,
            )
        };
        let Ok((pieces, _)) = found else {
            return Fetched::default();
        };
        let blocks = pieces.iter().flat_map(|piece| {
            let extent = &piece.extent;
            (extent.file_block.0..extent.end().0).map(FileBlock)
        });
        let wanted = Wanted {
            files: vec![(ino, blocks.collect())],
            ..Wanted::default()
        };
        self.fetch(&wanted, moved_blocks(tier) as usize, false)
            .unwrap_or_default()
    }
}

impl TxState<'_> {
    fn defrag(&mut self, ino: Ino, range: Range<u64>, tier: Tier) -> Result<Defragmented> {
        if self.store.may_be_torn(ino) {
            return Err(StoreError::Unfinished(ino));
        }
        file_root(&self.reader().get(ino)?)?;
        let left = self.room();
        let reopen = left >= self.layout().reopening_bytes(tier) + RECORD_BYTES + 2 * OP_ROOM;
        let room = left.saturating_sub(2 * OP_ROOM).min(RECORD_BYTES);
        let space = &self.store.space;
        let judge = |blocks| space.lock().runs_ahead(tier, blocks, long_blocks(tier), reopen);
        let file = (ino, range, tier);
        let (pieces, next) = choose(&self.reader(), self.layout(), file, room, judge)?;
        let moved = pieces.iter().map(|piece| u64::from(piece.extent.len)).sum();
        if moved > 0 {
            let new = self.place_for(tier, moved)?;
            let touched = self.touched;
            self.copy_together(ino, &pieces, new)?;
            if armed(Bug::DefragNotFlushed) {
                self.touched = touched;
            }
            // Only with a seeded bug are there any.
            for piece in pieces.iter().filter(|piece| piece.owners > 1) {
                let (tier, start, len) = (piece.extent.tier, piece.extent.block.0, piece.extent.len.into());
                self.free_span(Span { tier, start, len }, true)?;
            }
        }
        let next = FileBlock(next);
        Ok(Defragmented { next, moved })
    }

    /// Returns a place for so many blocks, or lets it be allocated piece by piece.
    fn place_for(&mut self, tier: Tier, blocks: u64) -> Result<NewBlocks> {
        let found = self.store.space.lock().together(tier, blocks, long_blocks(tier));
        let (lane, start) = match found {
            Together::Here(lane, start) => (lane, start),
            Together::InNext(lane, unit) => {
                self.seal_open_unit(tier, lane)?;
                self.open_unit(tier, lane, NextUnit::Empty(unit))?;
                (lane, unit * self.layout().unit_blocks(tier))
            }
            Together::Nowhere => return Ok(NewBlocks::new(DataTarget::only(tier), blocks)),
        };
        let span = self.store.space.lock().alloc_together(tier, lane, start, blocks);
        self.spans.push(span);
        self.set_bits(span, true)?;
        Ok(NewBlocks::placed(span))
    }

    /// Copies pieces of a file, ascending and as many blocks as `new` is made for, and lets the file name the
    /// copies. What no extent names any more is freed.
    pub(super) fn copy_together(
        &mut self,
        ino: Ino,
        pieces: &[MappedPart],
        mut new: NewBlocks,
    ) -> Result<()> {
        let bytes_of = |piece: &MappedPart| piece.extent.len as usize * BLOCK_SIZE;
        let mut bytes = vec![0; pieces.iter().map(bytes_of).sum()];
        // All of them before the first write, which would move the arm.
        let mut rest = &mut bytes[..];
        for piece in pieces {
            let (out, later) = rest.split_at_mut(bytes_of(piece));
            self.read_verified(piece.extent.tier, piece.extent.block.0, out)?;
            rest = later;
        }
        let mut rest = &bytes[..];
        for piece in pieces {
            let (now, later) = rest.split_at(bytes_of(piece));
            self.put_new(&mut new, piece.extent.file_block.0, Payload::Inline(now))?;
            rest = later;
        }
        let mut inode = self.reader().get(ino)?;
        self.map_new(&mut inode, new)?;
        self.put(&inode)
    }
}

/// Pieces that lie behind each other on their device, in the order of the file.
struct Run {
    pieces: Range<usize>,
    blocks: u64,
    /// Bytes of the record if they are moved.
    record: u64,
}

/// Returns the first pieces of a range of a file whose move pays, and where to go on behind them; no pieces
/// and the end of the range if there are none. `judge` tells in how many runs so many new blocks would lie.
fn choose<V: View>(
    reader: &MetaReader<'_, V>,
    layout: &Layout,
    (ino, range, tier): (Ino, Range<u64>, Tier),
    room: u64,
    judge: impl Fn(u64) -> Option<u64>,
) -> Result<(Vec<MappedPart>, u64)> {
    let (pieces, end) = pieces_of(reader, ino, range, tier)?;
    let runs = runs_of(layout, tier, &pieces);
    let is_short = |at: usize| {
        let run: Option<&Run> = runs.get(at);
        run.is_some_and(|run| run.blocks < staying_blocks(tier) && run.record <= room)
    };
    let mut first = 0;
    while first < runs.len() {
        let (mut most, mut blocks, mut record) = (0, 0, 0);
        while is_short(first + most) {
            let run = &runs[first + most];
            (blocks, record) = (blocks + run.blocks, record + run.record);
            if blocks > moved_blocks(tier) || record > room {
                break;
            }
            most += 1;
        }
        // One alone would stay where it is.
        if most > 2 && is_short(first + most) && !is_short(first + most + 1) {
            most -= 1;
        }
        let mut count = most;
        while count > 1 {
            let chosen = &runs[first..first + count];
            let blocks = chosen.iter().map(|run| run.blocks).sum();
            if judge(blocks).is_some_and(|new| 2 * new <= count as u64) {
                let chosen = &pieces[chosen[0].pieces.start..chosen[count - 1].pieces.end];
                let next = chosen.last().map_or(end, |last| last.extent.end().0);
                return Ok((chosen.to_vec(), next));
            }
            count /= 2;
        }
        first += most.max(1);
    }
    Ok((Vec::new(), end))
}

/// Returns the pieces on a tier that a file has alone in a range, and the end of what was looked at.
fn pieces_of<V: View>(
    reader: &MetaReader<'_, V>,
    ino: Ino,
    range: Range<u64>,
    tier: Tier,
) -> Result<(Vec<MappedPart>, u64)> {
    let root = file_root(&reader.get(ino)?)?;
    let is_movable = |part: &MappedPart| {
        part.extent.tier == tier
            && !part.extent.flags.contains(ExtentFlags::UNWRITTEN)
            && (part.owners == 1 || armed(Bug::DefragMovesShared))
    };
    let mut found: Vec<MappedPart> = Vec::new();
    let mut at = range.start;
    while found.len() < PIECES_MAX {
        let parts = reader.parts(ino, &root, at, range.end, PARTS_AT_ONCE)?;
        let Some(last) = parts.last() else {
            return Ok((found, range.end));
        };
        at = last.extent.end().0;
        found.extend(parts.into_iter().filter(is_movable));
    }
    Ok((found, at))
}

fn runs_of(layout: &Layout, tier: Tier, pieces: &[MappedPart]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    // Where the last piece on each device ends: a file is read from several at the same time.
    let mut ends: HashMap<usize, u64> = HashMap::new();
    for (at, piece) in pieces.iter().enumerate() {
        let (start, len) = (piece.extent.block.0, u64::from(piece.extent.len));
        let device = layout.run_of(tier, start).0;
        let follows = ends.insert(device, start + len) == Some(start);
        let record = PIECE_BYTES + if piece.number.is_some() { RUN_BYTES } else { 0 };
        match runs.last_mut() {
            Some(run) if follows => {
                run.pieces.end = at + 1;
                run.blocks += len;
                run.record += record;
            }
            _ => runs.push(Run {
                pieces: at..at + 1,
                blocks: len,
                record,
            }),
        }
    }
    runs
}
