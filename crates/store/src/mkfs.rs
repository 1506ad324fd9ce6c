//! Makes a pool: fixed areas, an empty journal, the root directory; the superblock last.

use crate::journal::Journal;
use crate::layout::Layout;
use crate::pool::{journal_id, read_superblock, write_superblocks};
use crate::reader::POOL_INO;
use crate::{Devices, MkfsOptions, OpenOptions, Result, Store, StoreError};
use std::sync::Arc;
use varve_format::superblock::{Area, SUPERBLOCK_BLOCKS};
use varve_format::{
    BLOCK_BYTES, BLOCK_SIZE, Block, BlockKind, BlockNo, InodeAttr, InodeKey, MODE_PERM_MASK, ROOT_INO, Tier,
    init_block,
};

impl Store {
    /// Makes a pool. Durable when this returns; a crash before leaves no pool.
    ///
    /// # Errors
    /// Devices too small; a pool is there already and `force` is not given; a device failed.
    pub fn mkfs(devices: &Devices, options: &MkfsOptions) -> Result<()> {
        let layout = Layout::plan(devices, options)?;
        if !options.force {
            match read_superblock(devices) {
                Ok(_) => {
                    return Err(StoreError::Devices(format!(
                        "{} holds a pool already; use force to overwrite it",
                        devices.nvm.info().name
                    )));
                }
                Err(StoreError::Superblock { fault, .. }) if fault.is_refusal() => {
                    return Err(StoreError::Devices(format!(
                        "{} holds a pool ({fault}); use force to overwrite it",
                        devices.nvm.info().name
                    )));
                }
                Err(_) => {}
            }
        }
        let nvm = &devices.nvm;
        for block in SUPERBLOCK_BLOCKS {
            nvm.write(BlockNo(block).offset_bytes(), &[0; BLOCK_SIZE])?;
        }
        nvm.fence()?;
        nvm.sync(0, 2 * BLOCK_BYTES)?;
        let area = |area: Area, kind: BlockKind| -> Result<()> {
            let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
            for number in area.start.get()..area.end() {
                init_block(&mut block, kind, POOL_INO, BlockNo(number));
                nvm.write(number * BLOCK_BYTES, &block[..])?;
            }
            Ok(())
        };
        area(layout.sb.state, BlockKind::PoolState)?;
        area(layout.sb.sessions, BlockKind::SessionTable)?;
        area(layout.sb.grants, BlockKind::GrantTable)?;
        for tier in Tier::ALL {
            let row = layout.sb.tier(tier);
            area(row.bitmap, BlockKind::Bitmap)?;
            area(row.checksums, BlockKind::ChecksumTable)?;
            area(row.units, BlockKind::UnitTable)?;
        }
        let id = journal_id(&layout.sb);
        let len = layout.sb.journal_bytes.get();
        Journal::format(&devices.journal, id, len)?;
        let (journal, _) = Journal::open(
            Arc::clone(&devices.journal),
            id,
            len,
            layout.blocks(Tier::Nvm),
            &mut |_| Ok(()),
        )?;
        let sb = layout.sb;
        let store = Self::assemble(devices.clone(), layout, journal, &OpenOptions::default());
        store.make_root(options)?;
        store.checkpoint()?;
        write_superblocks(devices, sb, &SUPERBLOCK_BLOCKS)
    }

    fn make_root(&self, options: &MkfsOptions) -> Result<()> {
        let mut tx = self.begin()?;
        let key = tx.alloc_inodes(ROOT_INO, 1)?;
        if key != [InodeKey::ROOT] {
            return Err(StoreError::Damaged(
                "the first inode of a new pool is not the root".into(),
            ));
        }
        tx.create(
            &InodeAttr {
                uid: options.root_uid,
                gid: options.root_gid,
                parent: ROOT_INO,
                ..InodeAttr::new(
                    InodeKey::ROOT,
                    0o040_000 | options.root_mode & MODE_PERM_MASK,
                    options.now_ns,
                )
            },
            &[],
        )?;
        tx.commit().map(drop)
    }
}
