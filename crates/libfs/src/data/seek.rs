//! Positions of data and holes, by blocks, merged from the log and the map: unchanged by a digest. A block is
//! data from the first write to it, of zeros too, until one operation makes a hole of all of it; see
//! `inode::overlay::pieces`, and `varve_digest` for the same rule.

use super::DataPlane;
use crate::errno::{Errno, OpError, OpResult};
use crate::inode::extents::Below;
use crate::inode::overlay::Block;
use crate::inode::{Inode, InodeBody};
use std::ops::Range;
use varve_format::BLOCK_BYTES;

/// Contents of a position.
enum Kind {
    Data,
    Hole,
    /// Unknown: the map is needed from this block on.
    Unmapped(u64),
}

impl DataPlane {
    /// First byte of data at or after `offset`. Needs a lease.
    ///
    /// # Errors
    /// `ENXIO` at or after the end of the file or when only holes follow; `EIO`; `SessionLost`.
    pub fn seek_data(&self, inode: &Inode, offset: u64) -> OpResult<u64> {
        self.seek(inode, offset, u64::MAX, true)
    }

    /// First byte of a hole at or after `offset`; the end of the file counts as one. Needs a lease.
    ///
    /// # Errors
    /// `ENXIO` at or after the end of the file; `EIO`; `SessionLost`.
    pub fn seek_hole(&self, inode: &Inode, offset: u64) -> OpResult<u64> {
        self.seek(inode, offset, u64::MAX, false)
    }

    /// Whether a range within the file has no holes. Needs a lease.
    ///
    /// # Errors
    /// As for `seek_hole`.
    pub(crate) fn is_dense(&self, inode: &Inode, range: Range<u64>) -> OpResult<bool> {
        let reaches = |hole: u64| hole >= range.end;
        self.seek(inode, range.start, range.end, false)
            .map(reaches)
            .map_err(|error| error.map(reaches))
    }

    /// Looks no further than `limit`, which counts as the end of the file if it is before that.
    fn seek(&self, inode: &Inode, offset: u64, limit: u64, want_data: bool) -> OpResult<u64> {
        let mut pos = offset;
        loop {
            let body = inode.read();
            let size = body.attr.size_bytes.min(limit);
            if offset >= size {
                return Err(OpError::Failed(Errno(libc::ENXIO)));
            }
            let mut missing = None;
            while pos < size && missing.is_none() {
                let (kind, stop) = kind_at(inode, &body, pos, size);
                match kind {
                    Kind::Unmapped(block) => missing = Some(block),
                    Kind::Data if want_data => return Ok(pos),
                    Kind::Hole if !want_data => return Ok(pos),
                    Kind::Data | Kind::Hole => pos = stop,
                }
            }
            drop(body);
            match missing {
                Some(block) => self.load_map(inode, block)?,
                None if want_data => return Err(OpError::Failed(Errno(libc::ENXIO))),
                None => return Ok(size),
            }
        }
    }
}

/// Returns the kind of position `pos`, and the end (at most `end`) of the range for which it holds.
fn kind_at(inode: &Inode, body: &InodeBody, pos: u64, end: u64) -> (Kind, u64) {
    let block = pos / BLOCK_BYTES;
    let bytes = |block: u64| end.min(block.saturating_mul(BLOCK_BYTES));
    // End of the blocks before the next entry in the log.
    let quiet = |last: u64| {
        let last = last.min(end.div_ceil(BLOCK_BYTES));
        let last = body.pieces.next_block(block, last);
        inode.radix.next_used(block + 1, last).unwrap_or(last)
    };
    match body.pieces.block(inode.radix.get(block), block) {
        Block::Data => (Kind::Data, bytes(block + 1)),
        Block::Hole(until) => (Kind::Hole, bytes(quiet(until))),
        Block::Below => match body.extents.find(block) {
            Below::Unknown => (Kind::Unmapped(block), pos),
            Below::Mapped(_, _, blocks) => (Kind::Data, bytes(quiet(block.saturating_add(blocks)))),
            Below::Zeros(blocks) => (Kind::Hole, bytes(quiet(block.saturating_add(blocks)))),
        },
    }
}
