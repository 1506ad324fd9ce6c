//! Joining the pieces of a file whose shares are undone: where they lie apart, one copy of neighbouring
//! pieces takes their place. Does not decide whether there is room for that.
//!
//! # Invariants
//! - As those of an undo (`unshare`): the copy is durable before the record that names it, and counts fall in
//!   that record. Blocks that no extent names any more are freed in it, as if they had been overwritten.
//! - *Long pieces stay*: only pieces of less than 1 MiB that others share not are moved.

use super::TxState;
use super::data::NewBlocks;
use crate::reader::file_root;
use crate::seeded::{Bug, armed};
use crate::space::Span;
use crate::{DataTarget, MappedPart, Result, StoreError};
use std::ops::Range;
use varve_format::{ExtentFlags, FileBlock, Ino, Tier};

/// Most blocks of one copy.
const COPY_BLOCKS: u64 = 1024;
/// What is shorter is joined with its neighbours.
const SHORT_BLOCKS: u64 = 256;
/// Pieces that are looked at.
const PIECES_MAX: usize = 128;

impl TxState<'_> {
    /// Copies the pieces around the first shared one, which begins at `shared`, to one place. Returns the
    /// block behind the copy; `None`: there is nothing to join, or no room.
    pub(super) fn rejoin(&mut self, ino: Ino, range: Range<u64>, shared: u64) -> Result<Option<u64>> {
        let pieces = self.pieces_around(ino, range, shared)?;
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return Ok(None);
        };
        if pieces.len() == 1 || pieces.windows(2).all(|pair| lie_together(&pair[0], &pair[1])) {
            return Ok(None);
        }
        let from = first.extent.file_block.0;
        let blocks = last.extent.end().0 - from;
        let span = match self.alloc_data(DataTarget::prefer(tier_of_most(&pieces)), blocks) {
            Ok(span) => span,
            Err(StoreError::NoSpace { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        // Free space lies apart, too: what is gained is not worth a copy, and the next attempt is no better.
        if from + span.len <= shared || span.len <= u64::from(first.extent.len) {
            self.free_span(span, true)?;
            return Ok(None);
        }
        let copied = from..from + span.len;
        let clipped = |piece: &MappedPart| {
            let extent = piece
                .extent
                .clip(FileBlock(copied.start), FileBlock(copied.end))?;
            Some(MappedPart { extent, ..*piece })
        };
        let pieces: Vec<_> = pieces.iter().filter_map(clipped).collect();
        self.copy_together(ino, &pieces, NewBlocks::placed(span))?;
        if armed(Bug::RejoinFreesShared) {
            let others = pieces.iter().filter(|piece| piece.owners > 1);
            for piece in others {
                let (tier, start, len) = (piece.extent.tier, piece.extent.block.0, piece.extent.len.into());
                self.free_span(Span { tier, start, len }, true)?;
            }
        }
        Ok(Some(copied.end))
    }

    /// The pieces that may be copied together: those from the shared one on, and short ones before it.
    fn pieces_around(&self, ino: Ino, range: Range<u64>, shared: u64) -> Result<Vec<MappedPart>> {
        let reader = self.reader();
        let root = file_root(&reader.get(ino)?)?;
        let lead = range.start.max(shared.saturating_sub(SHORT_BLOCKS));
        let end = range.end.min(shared + COPY_BLOCKS);
        let all = reader.parts(ino, &root, lead, end, PIECES_MAX)?;
        let Some(at) = all.iter().position(|part| part.extent.file_block.0 == shared) else {
            return Ok(Vec::new());
        };
        let belong = |one: &MappedPart, next: &MappedPart| one.extent.end() == next.extent.file_block;
        let is_short = |part: &MappedPart| {
            let is_written = !part.extent.flags.contains(ExtentFlags::UNWRITTEN);
            is_written && (part.owners > 1 || u64::from(part.extent.len) < SHORT_BLOCKS)
        };
        if !is_short(&all[at]) {
            return Ok(Vec::new());
        }
        // What is cut off where the search began may be the end of a long one.
        let is_whole = |part: &MappedPart| part.extent.file_block.0 > lead || lead == range.start;
        let mut first = at;
        while first > 0
            && belong(&all[first - 1], &all[first])
            && is_short(&all[first - 1])
            && is_whole(&all[first - 1])
        {
            first -= 1;
        }
        let mut last = at;
        while last + 1 < all.len() && belong(&all[last], &all[last + 1]) && is_short(&all[last + 1]) {
            last += 1;
        }
        let most = (all[first].extent.file_block.0 + COPY_BLOCKS).min(all[last].extent.end().0);
        // As many as one step can free.
        let most = self.first_mapped(ino, &root, all[first].extent.file_block.0, most)?;
        let clip = |part: &MappedPart| {
            let extent = part.extent.clip(part.extent.file_block, FileBlock(most))?;
            Some(MappedPart { extent, ..*part })
        };
        Ok(all[first..=last].iter().filter_map(clip).collect())
    }
}

/// The tier that has most blocks of the pieces: of files with blocks on several tiers, some share with each
/// other what lies on this one, some what lies on that.
fn tier_of_most(pieces: &[MappedPart]) -> Tier {
    let mut blocks = Tier::ALL.map(|tier| (0, tier));
    for piece in pieces {
        blocks[piece.extent.tier as usize].0 += u64::from(piece.extent.len);
    }
    blocks.into_iter().max().map_or(Tier::Nvm, |(_, tier)| tier)
}

/// Whether two pieces need no joining: they are the file's alone, and lie behind each other.
fn lie_together(one: &MappedPart, next: &MappedPart) -> bool {
    let both = one.owners == 1 && next.owners == 1 && one.extent.tier == next.extent.tier;
    both && one.extent.block.0 + u64::from(one.extent.len) == next.extent.block.0
}
