//! Data on NVM with wrong checksums. Clients read NVM without verification, so such data must not stay there:
//! it moves to a slower tier with the checksum that it should have, where every read of it fails.

use super::RepairReport;
use crate::pool::Store;
use crate::reader::file_root;
use crate::{DataTarget, Result, StoreError};
use varve_extent_tree::ExtentTree;
use varve_format::inode::{Content, InodeSlot};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, BlockNo, Extent, ExtentFlags, FileBlock, FileKind, Ino, Tier};

impl Store {
    pub(super) fn condemn_data(&self, report: &mut RepairReport) -> Result<()> {
        for (ino, at, block) in self.bad_nvm_data()? {
            let bytes = Some((at.0 * BLOCK_BYTES, (at.0 + 1) * BLOCK_BYTES));
            if self.condemn(ino, at, block)? {
                report.lost(ino, bytes, "its data is damaged; reads of it fail from now on");
            } else {
                report.lost(
                    ino,
                    bytes,
                    "its data is damaged; a hole is in its place, which reads as zeros",
                );
            }
            report.mended(format!("inode {ino}: damaged data taken out of NVM"));
        }
        Ok(())
    }

    /// Returns data blocks on NVM with wrong checksums: file, position in it, block.
    pub(crate) fn bad_nvm_data(&self) -> Result<Vec<(Ino, FileBlock, BlockNo)>> {
        let mut inos = Vec::new();
        self.for_each_inode(&mut |ino, slot| {
            // Blocks that a log redoes are not damaged.
            if let InodeSlot::Used(inode) = slot
                && inode.attr.kind() == FileKind::Regular
                && !self.may_be_torn(ino)
            {
                inos.push(ino);
            }
            true
        })?;
        let mut bad = Vec::new();
        for ino in inos {
            self.bad_nvm_blocks(ino, &mut |at, block, _| bad.push((ino, at, block)))?;
        }
        Ok(bad)
    }

    /// Passes data blocks of a file on NVM with wrong checksums to `bad`: position in the file, block, error.
    pub(crate) fn bad_nvm_blocks(
        &self,
        ino: Ino,
        bad: &mut dyn FnMut(FileBlock, BlockNo, &StoreError),
    ) -> Result<()> {
        let mut from = FileBlock(0);
        loop {
            let batch = self.map(ino, from, 64)?;
            let Some(last) = batch.last() else {
                return Ok(());
            };
            from = last.end();
            for extent in batch
                .iter()
                .filter(|extent| extent.tier == Tier::Nvm && !extent.flags.contains(ExtentFlags::UNWRITTEN))
            {
                for at in 0..u64::from(extent.len) {
                    let block = BlockNo(extent.block.0 + at);
                    match self.verify_block(Tier::Nvm, block) {
                        Ok(()) => {}
                        Err(error @ StoreError::DataChecksum { .. }) => {
                            bad(FileBlock(extent.file_block.0 + at), block, &error);
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    }

    /// Moves one damaged block out of NVM; returns false if no slower tier has space, so that a hole is left.
    fn condemn(&self, ino: Ino, at: FileBlock, block: BlockNo) -> Result<bool> {
        let mut tx = self.begin()?;
        tx.use_reserve();
        let core = &mut tx.core;
        let sum = core.reader().table_checksums(Tier::Nvm, 0, block.0, 1)?;
        let span = [Tier::Ssd, Tier::Hdd]
            .into_iter()
            .filter(|tier| self.layout.blocks(*tier) > 0)
            .find_map(|tier| core.alloc_data(DataTarget::only(tier).with_reserve(), 1).ok());
        let mut new = Vec::new();
        if let Some(span) = span {
            let mut bytes = vec![0; BLOCK_SIZE];
            core.store.read_blocks(Tier::Nvm, block.0, &mut bytes)?;
            core.put_blocks(span.tier, span.start, &bytes)?;
            core.note_checksums(span, &sum)?;
            new.push(Extent {
                file_block: at,
                len: 1,
                tier: span.tier,
                block: BlockNo(span.start),
                flags: ExtentFlags::empty(),
            });
        }
        let mut inode = core.reader().get(ino)?;
        let mut root = file_root(&inode)?;
        let old = ExtentTree::of(ino).replace(core, &mut root, at..FileBlock(at.0 + 1), &new)?;
        core.free_runs(&old)?;
        inode.content = Content::File(root);
        core.put(&inode)?;
        tx.commit()?;
        Ok(span.is_some())
    }
}
