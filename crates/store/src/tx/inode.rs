//! Inodes in a transaction: numbers, images, the orphan list, freeing step by step.

use super::TxState;
use crate::layout::Place;
use crate::reader::POOL_INO;
use crate::seeded::{Bug, armed};
use crate::{OP_ROOM, Progress, Result, StoreError};
use varve_extent_tree::{ExtentTree, MetaIo};
use varve_format::inode::{
    Content, INODE_SIZE, INODES_PER_BLOCK, Inode, InodeSlot, OrphanLinks, SYMLINK_INLINE_MAX,
};
use varve_format::{
    BLOCK_HEADER_SIZE, BlockKind, BlockNo, DIR_SIZE, Extent, ExtentFlags, FileBlock, Generation, INO_BITS,
    Ino, InodeAttr, InodeKey, ROOT_INO, Tier,
};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Blocks of the inode file that are examined before it grows: this number of hinted ones, and of unexamined
/// ones.
const INODE_LOOKS: usize = 8;
/// Unexamined blocks in NVM that are examined if half of the file or more is free.
const INODE_LOOKS_SPARE: usize = 4096;

impl TxState<'_> {
    pub(super) fn with_dir(
        &mut self,
        dir: Ino,
        f: impl FnOnce(&mut Self, &mut varve_format::DirRoot, varve_extent_tree::Directory) -> Result<()>,
    ) -> Result<()> {
        let mut inode = self.reader().get(dir)?;
        let mut root = crate::reader::dir_root(&inode)?;
        let directory = self.reader().directory(dir);
        f(self, &mut root, directory)?;
        inode.attr.size_bytes = DIR_SIZE;
        inode.content = Content::Dir(root);
        self.put(&inode)
    }

    /// Writes an inode's image.
    pub(crate) fn put(&mut self, inode: &Inode) -> Result<()> {
        self.put_slot(inode.attr.key.ino, &InodeSlot::Used(Box::new(inode.clone())))
    }

    pub(super) fn put_slot(&mut self, ino: Ino, slot: &InodeSlot) -> Result<()> {
        let bytes = slot
            .encode(ino)
            .map_err(|fault| StoreError::Inode { ino, fault })?;
        let block = self
            .reader()
            .inode_block(ino.0 / INODES_PER_BLOCK)?
            .ok_or(StoreError::NoInode(InodeKey {
                ino,
                ..InodeKey::default()
            }))?;
        self.put_image(ino, block, &bytes)
    }

    /// Writes an image into its block of the inode file, which is in NVM.
    pub(super) fn put_in_block(&mut self, block: BlockNo, ino: Ino, slot: &InodeSlot) -> Result<()> {
        let bytes = slot
            .encode(ino)
            .map_err(|fault| StoreError::Inode { ino, fault })?;
        let offset = (ino.0 % INODES_PER_BLOCK) as usize * INODE_SIZE;
        self.patch_raw(Place { block, offset }, &bytes)
    }

    /// Writes an image into its block of the inode file, which is promoted first if it is demoted.
    pub(crate) fn put_image(&mut self, ino: Ino, block: BlockNo, bytes: &[u8]) -> Result<()> {
        let block = self.warm_inode_block(ino.0 / INODES_PER_BLOCK, block)?;
        let offset = (ino.0 % INODES_PER_BLOCK) as usize * INODE_SIZE;
        self.patch_raw(Place { block, offset }, bytes)
    }

    pub(super) fn alloc_inodes(&mut self, near: Ino, count: u64) -> Result<Vec<InodeKey>> {
        let state = self.reader().state()?;
        let blocks = state.inode_blocks.get();
        let all = blocks * INODES_PER_BLOCK;
        let free = all.saturating_sub(state.inodes_used.get());
        let home = near.0 / INODES_PER_BLOCK;
        for _ in 0..INODE_LOOKS {
            let Some(block) = self.writer.free_inodes.near(home, count) else {
                break;
            };
            if let Some(keys) = self.take_in_block(block, count, count)? {
                return Ok(keys);
            }
        }
        self.writer.free_inodes.compare(free, blocks);
        let spare = free >= all / 2;
        // Demoted blocks are read from their tier while all other writers wait, so only a few are examined,
        // even if many numbers are free.
        let mut away = 0;
        for _ in 0..if spare { INODE_LOOKS_SPARE } else { INODE_LOOKS } {
            if away == INODE_LOOKS {
                break;
            }
            let Some(block) = self.writer.free_inodes.next_unseen(blocks) else {
                break;
            };
            away += usize::from(self.reader().inode_block(block)?.is_some_and(BlockNo::is_cold));
            if let Some(keys) = self.take_in_block(block, count, count)? {
                return Ok(keys);
            }
        }
        // The file never becomes shorter: while most of it is free, fewer numbers are better than more
        // blocks.
        if spare
            && let Some(block) = self.writer.free_inodes.fullest()
            && let Some(keys) = self.take_in_block(block, 1, count)?
        {
            return Ok(keys);
        }
        let first = self.grow_inode_file()?;
        self.take_in_block(first, count, count)?
            .ok_or_else(|| StoreError::Damaged("a new block of the inode file is not empty".into()))
    }

    /// Reserves `least` to `count` free images of one block; `None` if it has fewer than `least`.
    pub(super) fn take_in_block(
        &mut self,
        index: u64,
        least: u64,
        count: u64,
    ) -> Result<Option<Vec<InodeKey>>> {
        let Some(block) = self.reader().inode_block(index)? else {
            self.writer.free_inodes.note(index, 0);
            return Ok(None);
        };
        let mut found = Vec::new();
        for number in 0..INODES_PER_BLOCK {
            let ino = Ino(index * INODES_PER_BLOCK + number);
            if ino.0 == 0 || (ino == ROOT_INO && index == 0 && self.root_exists()?) {
                continue;
            }
            let slot = self
                .reader()
                .images(block, |bytes| crate::reader::slot_in(bytes, ino))?;
            // A damaged image must not be given out.
            if let Ok(InodeSlot::Free(generation)) = slot
                && generation.0 < u32::MAX
            {
                found.push(InodeKey {
                    ino,
                    generation: Generation(generation.0 + 1),
                });
            }
        }
        let free = found.len() as u64;
        if free < least {
            self.writer.free_inodes.note(index, free);
            return Ok(None);
        }
        found.truncate(count as usize);
        self.writer.free_inodes.note(index, free - found.len() as u64);
        let block = self.warm_inode_block(index, block)?;
        for key in &found {
            self.put_in_block(block, key.ino, &InodeSlot::Reserved(key.generation))?;
        }
        let taken = found.len() as u64;
        self.change_state(|state| state.inodes_used = U64::new(state.inodes_used.get() + taken))?;
        Ok(Some(found))
    }

    pub(super) fn root_exists(&self) -> Result<bool> {
        Ok(!matches!(
            self.reader().slot(ROOT_INO)?,
            InodeSlot::Free(Generation(0))
        ))
    }

    /// Makes the inode file longer; returns its first new block.
    pub(super) fn grow_inode_file(&mut self) -> Result<u64> {
        let want = self.layout().inode_chunk();
        let span = self.alloc_raw(want)?;
        let first = self.reader().state()?.inode_blocks.get();
        if first + span.len > (1 << INO_BITS) / INODES_PER_BLOCK {
            return Err(StoreError::TableFull("inodes"));
        }
        let mut root = self.reader().inode_root()?;
        let extent = Extent {
            file_block: FileBlock(first),
            len: span.len as u32,
            tier: Tier::Nvm,
            block: BlockNo(span.start),
            flags: ExtentFlags::empty(),
        };
        let range = FileBlock(first)..FileBlock(first + span.len);
        ExtentTree::of(POOL_INO).replace(self, &mut root, range, &[extent])?;
        self.change_state(|state| {
            state.inode_root.copy_from_slice(root.as_bytes());
            state.inode_blocks = U64::new(first + span.len);
        })?;
        self.writer.free_inodes.grown(first..first + span.len);
        Ok(first)
    }

    pub(super) fn create(&mut self, attr: &InodeAttr, target: &[u8]) -> Result<()> {
        match self.reader().slot(attr.key.ino)? {
            InodeSlot::Reserved(generation) if generation == attr.key.generation => {}
            _ => return Err(StoreError::NoInode(attr.key)),
        }
        let mut inode = Inode::new(attr.clone());
        inode.attr.size_bytes = if attr.is_dir() {
            DIR_SIZE
        } else {
            target.len() as u64
        };
        if target.len() > SYMLINK_INLINE_MAX {
            let block = self.alloc(None, BlockKind::Symlink, attr.key.ino)?;
            if target.len() > varve_format::BLOCK_BODY_SIZE {
                return Err(StoreError::Invalid("target of a symbolic link"));
            }
            self.patch(
                Place {
                    block,
                    offset: BLOCK_HEADER_SIZE,
                },
                target,
            )?;
            inode.content = Content::SymlinkBlock(block);
        } else if !target.is_empty() {
            inode.content = Content::Symlink(target.to_vec());
        }
        if attr.nlink == 0 {
            self.orphan_add(&mut inode)?;
        }
        self.put(&inode)
    }

    /// Frees a number; its generation is kept.
    pub(super) fn free_number(&mut self, key: InodeKey) -> Result<()> {
        self.free_numbers(&[key])
    }

    /// Frees numbers; their generations are kept.
    pub(super) fn free_numbers(&mut self, keys: &[InodeKey]) -> Result<()> {
        for some in keys.chunk_by(|one, next| one.ino.0 / INODES_PER_BLOCK == next.ino.0 / INODES_PER_BLOCK) {
            let Some(first) = some.first() else { continue };
            let index = first.ino.0 / INODES_PER_BLOCK;
            let block = self
                .reader()
                .inode_block(index)?
                .ok_or(StoreError::NoInode(*first))?;
            let block = self.warm_inode_block(index, block)?;
            for key in some {
                self.put_in_block(block, key.ino, &InodeSlot::Free(key.generation))?;
                self.writer.free_inodes.note_one_more(index);
            }
        }
        self.change_state(|state| {
            let used = state.inodes_used.get().saturating_sub(keys.len() as u64);
            state.inodes_used = U64::new(used);
        })
    }

    // ---- orphans

    /// Puts `inode` at the head of the list; the caller writes it.
    pub(crate) fn orphan_add(&mut self, inode: &mut Inode) -> Result<()> {
        let ino = inode.attr.key.ino;
        let head = Ino(self.reader().state()?.orphan_head.get());
        if head.0 != 0 {
            let mut next = self.reader().get(head)?;
            next.orphan = Some(OrphanLinks {
                prev: ino,
                ..next.orphan.unwrap_or_default()
            });
            self.put(&next)?;
        }
        inode.orphan = Some(OrphanLinks {
            next: head,
            prev: Ino(0),
        });
        // The state is read again: an image may have been promoted from a slower tier meanwhile.
        self.change_state(|state| {
            state.orphan_head = U64::new(ino.0);
            state.orphans = U64::new(state.orphans.get() + 1);
        })
    }

    /// Takes `inode` out of the list, if it is in it; the caller writes it.
    pub(crate) fn orphan_remove(&mut self, inode: &mut Inode) -> Result<()> {
        let Some(links) = inode.orphan.take() else {
            return Ok(());
        };
        if links.prev.0 != 0 {
            let mut prev = self.reader().get(links.prev)?;
            prev.orphan = prev.orphan.map(|old| OrphanLinks {
                next: links.next,
                ..old
            });
            self.put(&prev)?;
        }
        if links.next.0 != 0 {
            let mut next = self.reader().get(links.next)?;
            next.orphan = next.orphan.map(|old| OrphanLinks {
                prev: links.prev,
                ..old
            });
            self.put(&next)?;
        }
        self.change_state(|state| {
            if links.prev.0 == 0 {
                state.orphan_head = U64::new(links.next.0);
            }
            state.orphans = U64::new(state.orphans.get().saturating_sub(1));
        })
    }

    pub(super) fn continue_free(&mut self, ino: Ino, budget: usize) -> Result<Progress> {
        let mut budget = budget.max(1);
        let mut inode = self.reader().get(ino)?;
        if inode.attr.nlink > 0 {
            if inode.orphan.is_none() {
                return Ok(Progress::Done);
            }
            let progress = self.unmap_tail(&mut inode, &mut budget)?;
            if progress == Progress::Done {
                self.orphan_remove(&mut inode)?;
            }
            self.put(&inode)?;
            return Ok(progress);
        }
        let progress = self.empty_inode(&mut inode, &mut budget)?;
        if progress == Progress::Done {
            self.orphan_remove(&mut inode)?;
            self.free_number(inode.attr.key)?;
        } else {
            if armed(Bug::OrphanLeavesEarly) {
                self.orphan_remove(&mut inode)?;
            }
            self.put(&inode)?;
        }
        Ok(progress)
    }

    pub(super) fn empty_inode(&mut self, inode: &mut Inode, budget: &mut usize) -> Result<Progress> {
        let ino = inode.attr.key.ino;
        match inode.content.clone() {
            Content::File(mut root) => {
                let progress = self.unmap(ino, &mut root, 0, varve_format::FILE_BLOCKS_MAX, budget)?;
                inode.content = Content::File(root);
                if progress == Progress::More {
                    return Ok(progress);
                }
            }
            Content::Dir(mut root) => {
                let directory = self.reader().directory(ino);
                while root.entries() > 0 {
                    if *budget == 0 || self.room_at_least(2 * OP_ROOM) < 2 * OP_ROOM || self.must_pause() {
                        inode.content = Content::Dir(root);
                        return Ok(Progress::More);
                    }
                    let step = (*budget).min(64);
                    directory.free_some(self, &mut root, step)?;
                    *budget -= step;
                }
                inode.content = Content::Dir(root);
            }
            Content::SymlinkBlock(block) => {
                self.free(block)?;
                inode.content = Content::Symlink(Vec::new());
                inode.attr.size_bytes = 0;
            }
            Content::Symlink(_) => {}
        }
        let xattrs = self.reader().xattrs(ino);
        while inode.xattrs.entries() > 0 {
            if *budget == 0 || self.room_at_least(2 * OP_ROOM) < 2 * OP_ROOM || self.must_pause() {
                return Ok(Progress::More);
            }
            let step = (*budget).min(16);
            xattrs.free_some(self, &mut inode.xattrs, step)?;
            *budget -= step;
        }
        Ok(Progress::Done)
    }
}
