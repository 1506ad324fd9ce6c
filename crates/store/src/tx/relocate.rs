//! Moves single metadata blocks between NVM and slower tiers in a transaction. `demotion` chooses the blocks.

use super::TxState;
use crate::reader::POOL_INO;
use crate::space::Span;
use crate::{Result, StoreError};
use varve_extent_tree::{ExtentTree, MetaIo, MetaRead};
use varve_format::{Block, BlockNo, Extent, ExtentFlags, FileBlock, move_block, sum_of_metadata};
use zerocopy::IntoBytes;

/// Blocks of NVM that a transaction may need at its end after freeing something: for images, and for nodes of
/// the inode file.
const PAUSE_BLOCKS: u64 = 8;

/// Metadata that one transaction moves.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    /// The transaction was begun to demote metadata: its reads do not count as use.
    pub(crate) demoting: bool,
    /// It is done ahead of need: nothing goes to a tier that is evacuated.
    pub(crate) ahead: bool,
    pub(crate) away: u64,
    pub(crate) back: u64,
    /// No slower tier has a free block.
    pub(crate) full: bool,
}

impl TxState<'_> {
    /// Moves a block from a slower tier to NVM.
    pub(crate) fn bring_back(&mut self, block: BlockNo, raw: bool) -> Result<BlockNo> {
        let mut content: Box<Block> = if raw {
            self.reader().images(block, |bytes| Box::new(*bytes))?
        } else {
            MetaRead::read(self, block, |bytes| Box::new(*bytes))?
        };
        let new = BlockNo(self.alloc_meta(1, None)?.start);
        self.free(block)?;
        if !raw {
            move_block(&mut content, new);
        }
        self.insert_fresh(new.0, content.into(), raw);
        self.moves.back += 1;
        Ok(new)
    }

    /// Moves a block of NVM to a slower tier; `None` if there is no space.
    pub(crate) fn send_away(&mut self, block: BlockNo, raw: bool) -> Result<Option<BlockNo>> {
        let mut content: Box<Block> = if raw {
            self.reader().images(block, |bytes| Box::new(*bytes))?
        } else {
            MetaRead::read(self, block, |bytes| Box::new(*bytes))?
        };
        let Some(Span { tier, start, .. }) = self.alloc_cold()? else {
            self.moves.full = true;
            return Ok(None);
        };
        let new = BlockNo::on(tier, start);
        if !raw {
            move_block(&mut content, new);
        }
        let sum = sum_of_metadata(crc32c::crc32c(&content[..]));
        self.note_checksums(Span { tier, start, len: 1 }, &[sum])?;
        self.free(block)?;
        self.insert_fresh(new.0, content.into(), raw);
        self.moves.away += 1;
        Ok(Some(new))
    }

    /// Returns whether a transaction that frees much must leave the rest to another one: the blocks that it
    /// promoted have nearly used up the NVM, and can be freed or demoted again only after its commit.
    pub(crate) fn must_pause(&self) -> bool {
        self.moves.back > 0 && self.store.space.lock().nvm_now() < PAUSE_BLOCKS
    }

    /// Returns a block of the inode file in NVM; promotes it if it is demoted.
    pub(crate) fn warm_inode_block(&mut self, index: u64, block: BlockNo) -> Result<BlockNo> {
        if !block.is_cold() {
            return Ok(block);
        }
        let new = self.bring_back(block, true)?;
        self.map_inode_block(index, new)?;
        Ok(new)
    }

    pub(crate) fn map_inode_block(&mut self, index: u64, block: BlockNo) -> Result<()> {
        let Some((tier, number)) = block.home() else {
            return Err(StoreError::Damaged(format!(
                "inode file block {block} of no tier"
            )));
        };
        let extent = Extent {
            file_block: FileBlock(index),
            len: 1,
            tier,
            block: BlockNo(number),
            flags: ExtentFlags::empty(),
        };
        let mut root = self.reader().inode_root()?;
        let range = FileBlock(index)..FileBlock(index + 1);
        ExtentTree::of(POOL_INO).replace(self, &mut root, range, &[extent])?;
        // Also when the root itself is unchanged.
        self.inode_file_changed = true;
        self.change_state(|state| state.inode_root.copy_from_slice(root.as_bytes()))
    }
}

impl crate::Store {
    pub(crate) fn count_moves(&self, moves: &Moves) {
        if moves.away > 0 || moves.back > 0 {
            let mut demoting = self.demotion.lock();
            demoting.away += moves.away;
            demoting.back += moves.back;
        }
    }
}
