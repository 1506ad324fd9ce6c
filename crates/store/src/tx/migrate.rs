//! Moving file data to another tier in a transaction: blocks are copied, their checksums verified on the way,
//! and the map is changed. Which blocks move is not decided here.

use super::TxState;
use crate::reader::checksums::{compare, sums};
use crate::reader::{file_root, is_shared};
use crate::seeded::{Bug, armed};
use crate::space::Span;
use crate::{DataTarget, Result, StoreError, Tx};
use varve_extent_tree::ExtentTree;
use varve_format::inode::Content;
use varve_format::{BLOCK_SIZE, BlockNo, ExtentFlags, FileBlock, Ino, Tier};

/// Blocks moved to another tier in one buffer.
const MOVE_BLOCKS: u64 = 1024;

impl Tx<'_> {
    /// Copies `len` blocks of a file, which lie in one run at `from`, to another tier and remaps them; their
    /// checksums are verified on the way. Returns false, with nothing changed, if they do not lie there any
    /// more.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, `NoSpace`, `DataChecksum`.
    pub fn migrate(
        &mut self,
        ino: Ino,
        at: FileBlock,
        len: u32,
        from: (Tier, BlockNo),
        to: DataTarget,
    ) -> Result<bool> {
        self.guard(|core| core.migrate(ino, at.0, u64::from(len), from, to))
    }
}

impl Tx<'_> {
    /// Copies `len` shared blocks with the numbers from `first` on, which lie in one piece at `from`, to
    /// another tier, for all files that share them. Otherwise as [`migrate`](Self::migrate).
    ///
    /// # Errors
    /// `NoSpace`, `DataChecksum`.
    pub fn migrate_shared(
        &mut self,
        first: u64,
        len: u32,
        from: (Tier, BlockNo),
        to: DataTarget,
    ) -> Result<bool> {
        self.guard(|core| core.migrate_shared(first..first + u64::from(len), from, to))
    }
}

impl TxState<'_> {
    fn migrate(
        &mut self,
        ino: Ino,
        at: u64,
        len: u64,
        from: (Tier, BlockNo),
        to: DataTarget,
    ) -> Result<bool> {
        if self.store.may_be_torn(ino) {
            return Ok(false);
        }
        let mut inode = self.reader().get(ino)?;
        let mut root = file_root(&inode)?;
        let range = FileBlock(at)..FileBlock(at + len);
        let old = self.reader().unresolved(ino, &root, at, at + len, 2)?;
        let [old] = old[..] else {
            return Ok(false);
        };
        if is_shared(&old) && old.file_block == range.start && u64::from(old.len) == len {
            return self.migrate_shared(old.block.0..old.block.0 + len, from, to);
        }
        if len == 0
            || is_shared(&old)
            || u64::from(old.len) != len
            || old.file_block != range.start
            || (old.tier, old.block) != from
        {
            return Ok(false);
        }
        let tree = ExtentTree::of(ino);
        let unwritten = old.flags.contains(ExtentFlags::UNWRITTEN);
        let mut done = 0;
        while done < len {
            let start = from.1.0 + done;
            let span = if unwritten {
                self.alloc_data(to, (len - done).min(MOVE_BLOCKS))?
            } else {
                self.copy_blocks(from.0, start, len - done, to)?
            };
            let part = FileBlock(at + done)..FileBlock(at + done + span.len);
            let moved = tree.remap(
                self,
                &mut root,
                part,
                (from.0, BlockNo(start)),
                (span.tier, BlockNo(span.start)),
            )?;
            if !moved {
                return Err(StoreError::Damaged(format!(
                    "inode {ino}: an extent changed under a migration"
                )));
            }
            done += span.len;
        }
        inode.content = Content::File(root);
        self.put(&inode)?;
        self.free_span(
            Span {
                tier: from.0,
                start: from.1.0,
                len,
            },
            true,
        )?;
        Ok(true)
    }

    /// Copies at most `most` blocks to a new place, their checksums verified on the way; where they are then.
    pub(super) fn copy_blocks(&mut self, tier: Tier, start: u64, most: u64, to: DataTarget) -> Result<Span> {
        let span = self.alloc_data(to, most.min(MOVE_BLOCKS))?;
        let mut buffer = vec![0; span.len as usize * BLOCK_SIZE];
        self.read_verified(tier, start, &mut buffer)?;
        let touched = self.touched;
        self.write_new(span, &buffer)?;
        if armed(Bug::MoveNotFlushed) {
            self.touched = touched;
        }
        Ok(span)
    }

    /// Reads data blocks and verifies them on every tier.
    pub(super) fn read_verified(&self, tier: Tier, start: u64, out: &mut [u8]) -> Result<()> {
        let blocks = (out.len() / BLOCK_SIZE) as u64;
        let sums = sums(&self.reader(), tier, start, blocks)?
            .resolve(|tier, unit, row| self.store.footer(tier, unit, row))?;
        self.store_read(tier, start, out)?;
        if self.ahead.is_some() && compare(tier, start, out, &sums).is_err() {
            // It may be memory that is wrong.
            self.read_from_device(tier, start, out)?;
        }
        compare(tier, start, out, &sums)
    }
}
