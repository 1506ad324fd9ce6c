//! Overwrites in place: whole blocks of NVM get new bytes where they are. Owns the queue of one transaction
//! and the order of its writes; the digest decides which entries use it.
//!
//! # Invariants
//! - *Nothing before the commit*: bytes and checksums are queued; blocks are written when the record is ready
//!   and only a device can fail any more, and are durable before the record is written. A transaction that is
//!   dropped has written nothing.
//! - *Only blocks of one owner*, mapped by an extent without flags. One that the same transaction frees is
//!   left alone.
//! - *After a crash* such blocks may be torn under their old checksums: the log's entries hold all their
//!   bytes, and are digested before any read.

use super::TxState;
use crate::pool::in_place::Writing;
use crate::reader::{file_root, is_shared};
use crate::seeded::{Bug, armed};
use crate::space::Span;
use crate::{DataTarget, Payload, Result};
use std::collections::HashMap;
use varve_extent_tree::{ExtentTree, Mapping};
use varve_format::inode::Inode;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, Extent, ExtentFlags, FileBlock, Tier};

/// Maximum bytes that one transaction writes in place; further bytes go to new blocks.
const IN_PLACE_BYTES_MAX: usize = 8 << 20;

/// Blocks of NVM that a transaction writes in place.
#[derive(Default)]
pub(super) struct InPlace {
    /// Buffer, of which the first `used` bytes are taken.
    bytes: Vec<u8>,
    used: usize,
    /// Offset in `bytes` of the content of each block.
    blocks: HashMap<u64, usize>,
}

impl InPlace {
    /// Forgets blocks that the transaction frees.
    pub(super) fn forget(&mut self, span: Span) {
        if self.blocks.is_empty() || span.tier != Tier::Nvm {
            return;
        }
        if span.len < self.blocks.len() as u64 {
            (span.start..span.start + span.len).for_each(|block| {
                self.blocks.remove(&block);
            });
        } else {
            self.blocks
                .retain(|block, _| *block < span.start || *block - span.start >= span.len);
        }
    }

    /// Takes the buffer out, for the next transaction.
    pub(super) fn take_room(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Overlays queued blocks on bytes that were read from NVM from block `start` on.
    pub(super) fn lay_over(&self, start: u64, out: &mut [u8]) {
        if self.blocks.is_empty() {
            return;
        }
        for (block, out) in (start..).zip(out.chunks_mut(BLOCK_SIZE)) {
            if let Some(at) = self.blocks.get(&block) {
                out.copy_from_slice(&self.bytes[*at..*at + out.len()]);
            }
        }
    }
}

/// Pieces that go to new blocks.
pub(super) type Pieces<'p> = Vec<(u64, Payload<'p>)>;

impl<'s> TxState<'s> {
    /// Queues the pieces that may be written in place, with their checksums, and returns the others; `None`
    /// if all of them go to new blocks.
    pub(super) fn queue_in_place<'p>(
        &mut self,
        inode: &Inode,
        pieces: &[(u64, Payload<'p>)],
        target: DataTarget,
    ) -> Result<Option<Pieces<'p>>> {
        let may = self.store.overwrites_in_place() && target.tier == Tier::Nvm;
        if !may || !pieces.iter().any(is_redone) {
            return Ok(None);
        }
        let tree = ExtentTree::of(inode.attr.key.ino);
        let root = file_root(inode)?;
        let mut known: Option<Stretch> = None;
        let mut others = Pieces::new();
        for piece in pieces {
            if !is_redone(piece) {
                others.push(*piece);
                continue;
            }
            let (mut at, mut data) = (piece.0 / BLOCK_BYTES, piece.1);
            while !data.is_empty() {
                let blocks = (data.len() / BLOCK_SIZE) as u64;
                if known.is_none_or(|known| !known.has(at)) {
                    let mut found = tree.lookup(self, &root, FileBlock(at))?;
                    if armed(Bug::SharedInPlace) {
                        let ino = inode.attr.key.ino;
                        let resolved = self.reader().extents(ino, &root, at, at + blocks, 1)?;
                        let first = resolved.first().filter(|first| is_shared(first));
                        found = first.map_or(found, |first| {
                            Mapping::Mapped(Extent {
                                flags: ExtentFlags::empty(),
                                ..*first
                            })
                        });
                    }
                    known = Some(Stretch::at(at, found));
                }
                let (place, count) = known.map_or((None, blocks), |known| {
                    (known.place(at), blocks.min(known.end - at))
                });
                let now = data.part(0, count as usize * BLOCK_SIZE);
                match place.filter(|_| self.in_place.used + now.len() <= IN_PLACE_BYTES_MAX) {
                    Some(block) => self.queue(block, now)?,
                    None => push(&mut others, at * BLOCK_BYTES, now),
                }
                at += count;
                data = data.part(now.len(), data.len() - now.len());
            }
        }
        Ok(Some(others))
    }

    /// Fetches and queues the bytes of consecutive blocks from `block` on, and records their checksums.
    fn queue(&mut self, block: u64, data: Payload<'_>) -> Result<()> {
        let queue = &mut self.in_place;
        if queue.bytes.is_empty() {
            queue.bytes = std::mem::take(&mut self.writer.in_place_room);
            queue.blocks.reserve(IN_PLACE_BYTES_MAX / BLOCK_SIZE);
        }
        let (start, end) = (queue.used, queue.used + data.len());
        if queue.bytes.len() < end {
            queue.bytes.resize(end, 0);
        }
        data.copy_to(&mut queue.bytes[start..end])?;
        queue.used = end;
        let sum = |bytes: &[u8]| varve_media::crc32c_append(0, bytes);
        let sums: Vec<_> = queue.bytes[start..end].chunks(BLOCK_SIZE).map(sum).collect();
        let places = (block..).zip((start..).step_by(BLOCK_SIZE));
        self.in_place.blocks.extend(places.take(sums.len()));
        let span = Span {
            tier: Tier::Nvm,
            start: block,
            len: sums.len() as u64,
        };
        self.note_checksums(span, &sums)?;
        if armed(Bug::InPlaceEarly) {
            let bytes = &self.in_place.bytes[start..end];
            self.store.devices.nvm.write(block * BLOCK_BYTES, bytes)?;
        }
        Ok(())
    }

    /// Writes the queued blocks; durable when this returns. Concurrent readers retry until the returned guard
    /// is dropped, which must be after the commit.
    pub(super) fn write_in_place(&mut self) -> Result<Option<Writing<'s>>> {
        let blocks = std::mem::take(&mut self.in_place.blocks);
        if blocks.is_empty() {
            return Ok(None);
        }
        let store = self.store;
        let writing = store.begin_in_place();
        let nvm = &store.devices.nvm;
        let mut blocks: Vec<_> = blocks.into_iter().collect();
        blocks.sort_unstable();
        for (block, at) in blocks {
            nvm.write(block * BLOCK_BYTES, &self.in_place.bytes[at..at + BLOCK_SIZE])?;
            self.nvm_written += BLOCK_SIZE;
        }
        if !armed(Bug::InPlaceNotFenced) {
            nvm.fence()?;
        }
        Ok(Some(writing))
    }
}

/// A stretch of a file that was looked up.
#[derive(Clone, Copy)]
struct Stretch {
    start: u64,
    end: u64,
    /// NVM block of its first block, if it may be written in place.
    place: Option<u64>,
}

impl Stretch {
    fn at(at: u64, found: Mapping) -> Self {
        match found {
            Mapping::Mapped(extent) => {
                let may = extent.tier == Tier::Nvm && extent.flags.is_empty();
                Self {
                    start: extent.file_block.0,
                    end: extent.end().0,
                    place: may.then_some(extent.block.0),
                }
            }
            Mapping::Hole { until } => Self {
                start: at,
                end: until.map_or(u64::MAX, |until| until.0),
                place: None,
            },
        }
    }

    fn has(&self, block: u64) -> bool {
        (self.start..self.end).contains(&block)
    }

    /// Returns the NVM block of one of its blocks, if it may be written in place.
    fn place(&self, block: u64) -> Option<u64> {
        Some(self.place? + (block - self.start))
    }
}

/// Returns whether a piece consists of whole blocks that are redone after a crash.
fn is_redone((offset, data): &(u64, Payload<'_>)) -> bool {
    data.is_redone() && offset.is_multiple_of(BLOCK_BYTES) && data.len().is_multiple_of(BLOCK_SIZE)
}

/// Appends a piece, joined to the last one if it continues that one's payload.
fn push<'p>(pieces: &mut Pieces<'p>, offset: u64, data: Payload<'p>) {
    if let Some((at, last)) = pieces.last_mut()
        && *at + last.len() as u64 == offset
        && let Some(joined) = last.joined(&data)
    {
        *last = joined;
        return;
    }
    pieces.push((offset, data));
}
