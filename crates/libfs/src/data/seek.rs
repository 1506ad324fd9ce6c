//! Where data and holes are, merged from the log and the map. Blocks whose log content is zero by a write count as data.

use super::DataPlane;
use super::extents::Below;
use crate::errno::{Errno, OpError, OpResult};
use crate::inode::{Inode, InodeBody};
use crate::overlay::Source;
use varve_format::BLOCK_BYTES;

/// What lies at a position.
enum Kind {
    Data,
    Hole,
    /// The map from this block on is needed.
    Unmapped(u64),
}

impl DataPlane {
    /// First byte of data at or after `offset`. Needs a lease.
    ///
    /// # Errors
    /// `ENXIO` at or behind the end of the file or when only holes follow; `EIO`; `SessionLost`.
    pub fn seek_data(&self, inode: &Inode, offset: u64) -> OpResult<u64> {
        self.seek(inode, offset, true)
    }

    /// First byte of a hole at or after `offset`; the end of the file counts as one. Needs a lease.
    ///
    /// # Errors
    /// `ENXIO` at or behind the end of the file; `EIO`; `SessionLost`.
    pub fn seek_hole(&self, inode: &Inode, offset: u64) -> OpResult<u64> {
        self.seek(inode, offset, false)
    }

    fn seek(&self, inode: &Inode, offset: u64, want_data: bool) -> OpResult<u64> {
        let mut pos = offset;
        loop {
            let body = inode.read();
            let size = body.attr.size_bytes;
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

/// What lies at `pos`, and up to where (at most `end`) that holds.
fn kind_at(inode: &Inode, body: &InodeBody, pos: u64, end: u64) -> (Kind, u64) {
    let block = pos / BLOCK_BYTES;
    let (source, stop) = body.pieces.find(inode.radix.get(block), pos, end);
    // How far nothing else in the log begins.
    let quiet = |mut limit: u64| {
        let last = limit.div_ceil(BLOCK_BYTES);
        for found in [
            inode.radix.next_used(block + 1, last),
            body.pieces.next_parts(block + 1, last),
        ] {
            limit = found.map_or(limit, |found| limit.min(found * BLOCK_BYTES));
        }
        body.pieces.next_zero(pos, limit).unwrap_or(limit)
    };
    let block_end = end.min((block + 1) * BLOCK_BYTES);
    match source {
        Source::Log(_) => (Kind::Data, stop),
        Source::Zero if stop < block_end => (Kind::Hole, stop),
        Source::Zero => (
            Kind::Hole,
            quiet(body.pieces.zero_until(pos).unwrap_or(stop).min(end)).max(stop),
        ),
        Source::Below => {
            let limit = if stop < block_end {
                stop
            } else {
                quiet(end).max(stop)
            };
            match body.extents.find(block) {
                Below::Unknown => (Kind::Unmapped(block), pos),
                Below::Mapped(_, _, blocks) => (
                    Kind::Data,
                    limit.min(block.saturating_add(blocks).saturating_mul(BLOCK_BYTES)),
                ),
                Below::Zeros(blocks) => (
                    Kind::Hole,
                    limit.min(block.saturating_add(blocks).saturating_mul(BLOCK_BYTES)),
                ),
            }
        }
    }
}
