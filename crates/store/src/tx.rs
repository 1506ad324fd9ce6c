//! The transaction's own interface, and inodes: numbers, images, the orphan list, freeing bit by bit.

use crate::core::Core;
use crate::layout::Place;
use crate::lens::POOL_INO;
use crate::seeded::{Bug, armed};
use crate::{DirItem, OP_ROOM, Progress, Result, StoreError};
use varve_extent_tree::{ExtentTree, MetaIo};
use varve_format::inode::{
    Content, INODE_SIZE, INODES_PER_BLOCK, Inode, InodeSlot, OrphanLinks, SYMLINK_INLINE_MAX,
};
use varve_format::{
    BLOCK_HEADER_SIZE, BlockKind, BlockNo, DIR_SIZE, Extent, ExtentFlags, FileBlock, FileKind, Generation,
    INO_BITS, Ino, InodeAttr, InodeKey, MODE_KIND_MASK, ROOT_INO, SYMLINK_MAX, Tier, TxId,
};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Hinted, and unseen, blocks of the inode file looked at before it grows.
const INODE_LOOKS: usize = 8;
/// Unseen ones in NVM where half of the file or more is free.
const INODE_LOOKS_SPARE: usize = 4096;

/// A transaction: sees its own changes; nobody else sees any before [`commit`](Self::commit). Dropped, it never was.
///
/// After an error other than `NotFound`, `Exists`, `NoInode`, `WrongKind`, `Invalid`, `TableFull`, `NoSession`, `NoGrant` or `Unfinished`
/// it is poisoned (its changes may be half done) and can only be dropped.
pub struct Tx<'s> {
    pub(crate) core: Core<'s>,
}

impl Tx<'_> {
    /// The pool.
    #[must_use]
    pub const fn store(&self) -> &crate::Store {
        self.core.store
    }

    /// As [`Store::note_damage`](crate::Store::note_damage).
    pub fn note_damage(&self, error: &StoreError) {
        self.core.store.note_damage(error);
    }

    /// Number that the commit will have.
    #[must_use]
    pub fn id(&self) -> TxId {
        self.core.id()
    }

    /// Bytes left in the journal record. One small operation (create, rename, a write that changes few extents) needs at most
    /// [`OP_ROOM`].
    pub fn room(&mut self) -> u64 {
        self.core.room()
    }

    /// Bytes that are left in the journal record at least; exactly as many as [`room`](Self::room) says, which costs more, if that is less than
    /// `enough`.
    pub fn room_at_least(&mut self, enough: u64) -> u64 {
        self.core.room_at_least(enough)
    }

    /// Makes it all durable and visible. Durable when this returns. If nothing was changed, there is no record and the newest
    /// transaction's number is returned.
    ///
    /// # Errors
    /// `Poisoned`, `Latched`, `RecordFull`: nothing was committed. A device error latches the pool; whether the transaction is durable is
    /// then known only after the next open.
    pub fn commit(self) -> Result<TxId> {
        self.core.commit()
    }

    /// Runs a change; an error that leaves it half done poisons the transaction.
    pub(crate) fn guard<R>(&mut self, f: impl FnOnce(&mut Core<'_>) -> Result<R>) -> Result<R> {
        if self.core.poisoned {
            return Err(StoreError::Poisoned);
        }
        f(&mut self.core).inspect_err(|error| {
            let clean = matches!(
                error,
                StoreError::NotFound
                    | StoreError::Exists
                    | StoreError::NoInode(_)
                    | StoreError::WrongKind { .. }
                    | StoreError::Invalid(_)
                    | StoreError::Unfinished(_)
            );
            if !clean {
                self.core.poisoned = true;
                self.core.store.latch_on(error);
            }
        })
    }

    /// As [`guard`](Self::guard), for a change that must leave the reserve to those who free space.
    pub(crate) fn guard_new<R>(&mut self, f: impl FnOnce(&mut Core<'_>) -> Result<R>) -> Result<R> {
        self.core.frugal = !self.core.use_reserve;
        let result = self.guard(f);
        self.core.frugal = false;
        result
    }

    /// Lets the whole transaction allocate from the reserve: the digest of operations whose space was promised, and migration away from a
    /// full tier. Without it only removing, truncating and freeing may.
    pub fn use_reserve(&mut self) {
        self.core.use_reserve = true;
    }

    /// As [`Store::get`](crate::Store::get), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn get(&self, ino: Ino) -> Result<Inode> {
        self.core.lens().get(ino)
    }

    /// As [`Store::get_key`](crate::Store::get_key), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn get_key(&self, key: InodeKey) -> Result<Inode> {
        self.core.lens().get_key(key)
    }

    /// As [`Store::slot`](crate::Store::slot), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode` beyond the inode file; damage.
    pub fn slot(&self, ino: Ino) -> Result<InodeSlot> {
        self.core.lens().slot(ino)
    }

    /// `count` (1 to 16) numbers in one block of the inode file, ascending, near a directory's, reserved, with generations that those numbers
    /// never had. Fewer, but one, where no block has so many and most numbers are free.
    ///
    /// # Errors
    /// `Invalid` for another count; `NoSpace`.
    pub fn alloc_inodes(&mut self, near: Ino, count: u8) -> Result<Vec<InodeKey>> {
        if count == 0 || u64::from(count) > INODES_PER_BLOCK {
            return Err(StoreError::Invalid("1 to 16 inodes are allocated at once"));
        }
        self.guard_new(|core| core.alloc_inodes(near, u64::from(count)))
    }

    /// Gives back a reserved number that was never made.
    ///
    /// # Errors
    /// `NoInode` if it is not reserved with this generation.
    pub fn release_inode(&mut self, key: InodeKey) -> Result<()> {
        self.release_inodes(&[key])
    }

    /// [`release_inode`](Self::release_inode) for many, each named once, which is cheaper for those that follow one another.
    ///
    /// # Errors
    /// `NoInode` for the first that is not reserved with its generation: nothing is changed then.
    pub fn release_inodes(&mut self, keys: &[InodeKey]) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.guard(|core| {
            for key in keys {
                match core.lens().slot(key.ino)? {
                    InodeSlot::Reserved(generation) if generation == key.generation => {}
                    _ => return Err(StoreError::NoInode(*key)),
                }
            }
            core.free_numbers(keys)
        })
    }

    /// Makes the file `attr.key`, whose number was reserved. `target` is a symbolic link's, else empty. The size is the target's length, or
    /// 0. With `attr.nlink == 0` it is in the orphan list.
    ///
    /// # Errors
    /// `NoInode` if the number is not reserved with this generation; `Invalid` for a mode without kind, or a target out of bounds;
    /// `NoSpace`.
    pub fn create(&mut self, attr: &InodeAttr, target: &[u8]) -> Result<()> {
        let kind = FileKind::from_mode(attr.mode).ok_or(StoreError::Invalid("mode without a file kind"))?;
        if (kind == FileKind::Symlink) == target.is_empty() || target.len() > SYMLINK_MAX {
            return Err(StoreError::Invalid("target of a symbolic link"));
        }
        self.guard_new(|core| core.create(attr, target))
    }

    /// Changes attributes. Key, kind, size and sectors stay, whatever `f` does to them. When the link count becomes 0 the inode enters
    /// the orphan list; when it becomes more, it leaves it.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn edit(&mut self, ino: Ino, f: impl FnOnce(&mut InodeAttr)) -> Result<()> {
        self.guard(|core| {
            let mut inode = core.lens().get(ino)?;
            let old = inode.attr.clone();
            f(&mut inode.attr);
            let kind = old.mode & MODE_KIND_MASK;
            inode.attr.key = old.key;
            inode.attr.mode = inode.attr.mode & !MODE_KIND_MASK | kind;
            inode.attr.size_bytes = old.size_bytes;
            if inode.attr.nlink == 0 && inode.orphan.is_none() && !armed(Bug::OrphanNotListed) {
                core.orphan_add(&mut inode)?;
            } else if inode.attr.nlink > 0 && old.nlink == 0 && !core.has_tail(&inode)? {
                core.orphan_remove(&mut inode)?;
            }
            core.put(&inode)
        })
    }

    /// Frees some of an inode in the orphan list, at most `budget` extents, entries and attributes: everything, at last its number (link
    /// count 0), or what is beyond its size (unfinished truncation). `More`: commit, and call again in another transaction.
    ///
    /// # Errors
    /// `NoInode`; damage.
    pub fn continue_free(&mut self, ino: Ino, budget: usize) -> Result<Progress> {
        self.guard(|core| core.continue_free(ino, budget))
    }

    // ---- names and attributes

    /// As [`Store::dir_lookup`](crate::Store::dir_lookup), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn dir_lookup(&self, dir: Ino, name: &[u8]) -> Result<Option<DirItem>> {
        self.core.lens().dir_lookup(dir, name)
    }

    /// Where the names of `dir` are, for many looks with [`dir_find`](Self::dir_find) while nothing is changed.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn dir_root(&self, dir: Ino) -> Result<varve_format::DirRoot> {
        crate::lens::dir_root(&self.core.lens().get(dir)?)
    }

    /// As [`dir_lookup`](Self::dir_lookup), with the answer of [`dir_root`](Self::dir_root).
    ///
    /// # Errors
    /// Damage.
    pub fn dir_find(&self, dir: Ino, root: &varve_format::DirRoot, name: &[u8]) -> Result<Option<InodeKey>> {
        let lens = self.core.lens();
        let found = lens.directory(dir).lookup(lens.view, root, name)?;
        Ok(found.map(|entry| entry.key))
    }

    /// As [`Store::dir_iter`](crate::Store::dir_iter), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn dir_iter(&self, dir: Ino, cookie: u64, max: usize) -> Result<Vec<DirItem>> {
        self.core.lens().dir_iter(dir, cookie, max)
    }

    /// As [`Store::read_link`](crate::Store::read_link), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        self.core.lens().read_link(ino)
    }

    /// Adds a name. Link counts are the caller's.
    ///
    /// # Errors
    /// `Exists`, `NoInode`, `WrongKind`, `NoSpace`.
    pub fn dir_insert(&mut self, dir: Ino, name: &[u8], key: InodeKey, kind: FileKind) -> Result<()> {
        check_name(name)?;
        self.guard_new(|core| {
            if core.lens().dir_lookup(dir, name)?.is_some() {
                return Err(StoreError::Exists);
            }
            core.with_dir(dir, |core, root, directory| {
                directory
                    .insert(core, root, &varve_format::Dirent { key, kind, name })
                    .map(drop)
            })
        })
    }

    /// Removes a name and returns what it stood for. Link counts are the caller's.
    ///
    /// # Errors
    /// `NotFound`, `NoInode`, `WrongKind`.
    pub fn dir_remove(&mut self, dir: Ino, name: &[u8]) -> Result<DirItem> {
        self.guard(|core| {
            let old = core.lens().dir_lookup(dir, name)?.ok_or(StoreError::NotFound)?;
            core.with_dir(dir, |core, root, directory| {
                directory.remove(core, root, name).map(drop)
            })?;
            Ok(old)
        })
    }

    /// Lets a name stand for another inode and returns what it stood for.
    ///
    /// # Errors
    /// `NotFound`, `NoInode`, `WrongKind`.
    pub fn dir_replace(&mut self, dir: Ino, name: &[u8], key: InodeKey, kind: FileKind) -> Result<DirItem> {
        self.guard(|core| {
            let old = core.lens().dir_lookup(dir, name)?.ok_or(StoreError::NotFound)?;
            core.with_dir(dir, |core, root, directory| {
                directory
                    .replace(core, root, &varve_format::Dirent { key, kind, name })
                    .map(drop)
            })?;
            Ok(old)
        })
    }

    /// As [`Store::xattr_get`](crate::Store::xattr_get), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn xattr_get(&self, ino: Ino, name: &[u8]) -> Result<Option<Vec<u8>>> {
        self.core.lens().xattr_get(ino, name)
    }

    /// As [`Store::xattr_list`](crate::Store::xattr_list), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn xattr_list(&self, ino: Ino) -> Result<Vec<(Vec<u8>, usize)>> {
        self.core.lens().xattr_list(ino)
    }

    /// Sets an extended attribute, there before or not.
    ///
    /// # Errors
    /// `NoInode`, `Invalid`, `NoSpace`.
    pub fn xattr_set(&mut self, ino: Ino, name: &[u8], value: &[u8]) -> Result<()> {
        check_name(name)?;
        if value.len() > varve_format::XATTR_VALUE_MAX {
            return Err(StoreError::Invalid("attribute value too long"));
        }
        self.guard_new(|core| {
            let mut inode = core.lens().get(ino)?;
            let xattrs = core.lens().xattrs(ino);
            xattrs.set(core, &mut inode.xattrs, name, value)?;
            core.put(&inode)
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `NotFound`, `NoInode`.
    pub fn xattr_remove(&mut self, ino: Ino, name: &[u8]) -> Result<()> {
        self.guard(|core| {
            let mut inode = core.lens().get(ino)?;
            let xattrs = core.lens().xattrs(ino);
            if !xattrs.remove(core, &mut inode.xattrs, name)? {
                return Err(StoreError::NotFound);
            }
            core.put(&inode)
        })
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > varve_format::NAME_MAX {
        return Err(StoreError::Invalid("length of a name"));
    }
    Ok(())
}

impl Core<'_> {
    fn with_dir(
        &mut self,
        dir: Ino,
        f: impl FnOnce(&mut Self, &mut varve_format::DirRoot, varve_extent_tree::Directory) -> Result<()>,
    ) -> Result<()> {
        let mut inode = self.lens().get(dir)?;
        let mut root = crate::lens::dir_root(&inode)?;
        let directory = self.lens().directory(dir);
        f(self, &mut root, directory)?;
        inode.attr.size_bytes = DIR_SIZE;
        inode.content = Content::Dir(root);
        self.put(&inode)
    }

    /// Writes an inode's image.
    pub(crate) fn put(&mut self, inode: &Inode) -> Result<()> {
        self.put_slot(inode.attr.key.ino, &InodeSlot::Used(Box::new(inode.clone())))
    }

    fn put_slot(&mut self, ino: Ino, slot: &InodeSlot) -> Result<()> {
        let bytes = slot
            .encode(ino)
            .map_err(|fault| StoreError::Inode { ino, fault })?;
        let block = self
            .lens()
            .inode_block(ino.0 / INODES_PER_BLOCK)?
            .ok_or(StoreError::NoInode(InodeKey {
                ino,
                ..InodeKey::default()
            }))?;
        self.put_image(ino, block, &bytes)
    }

    /// Writes an image into its block of the inode file, which is in NVM.
    fn put_in_block(&mut self, block: BlockNo, ino: Ino, slot: &InodeSlot) -> Result<()> {
        let bytes = slot
            .encode(ino)
            .map_err(|fault| StoreError::Inode { ino, fault })?;
        let offset = (ino.0 % INODES_PER_BLOCK) as usize * INODE_SIZE;
        self.patch_raw(Place { block, offset }, &bytes)
    }

    /// Writes an image into its block of the inode file, which comes back for that if it is away.
    pub(crate) fn put_image(&mut self, ino: Ino, block: BlockNo, bytes: &[u8]) -> Result<()> {
        let block = self.warm_inode_block(ino.0 / INODES_PER_BLOCK, block)?;
        let offset = (ino.0 % INODES_PER_BLOCK) as usize * INODE_SIZE;
        self.patch_raw(Place { block, offset }, bytes)
    }

    fn alloc_inodes(&mut self, near: Ino, count: u64) -> Result<Vec<InodeKey>> {
        let state = self.lens().state()?;
        let blocks = state.inode_blocks.get();
        let all = blocks * INODES_PER_BLOCK;
        let free = all.saturating_sub(state.inodes_used.get());
        let home = near.0 / INODES_PER_BLOCK;
        for _ in 0..INODE_LOOKS {
            let Some(block) = self.writer.numbers.near(home, count) else {
                break;
            };
            if let Some(keys) = self.take_in_block(block, count, count)? {
                return Ok(keys);
            }
        }
        self.writer.numbers.compare(free, blocks);
        let spare = free >= all / 2;
        // Blocks that are away are read from where they are, while everybody waits: few, even where there is much to find.
        let mut away = 0;
        for _ in 0..if spare { INODE_LOOKS_SPARE } else { INODE_LOOKS } {
            if away == INODE_LOOKS {
                break;
            }
            let Some(block) = self.writer.numbers.next_unseen(blocks) else {
                break;
            };
            away += usize::from(self.lens().inode_block(block)?.is_some_and(BlockNo::is_cold));
            if let Some(keys) = self.take_in_block(block, count, count)? {
                return Ok(keys);
            }
        }
        // The file never becomes shorter: rather fewer numbers than more blocks while most of it is free.
        if spare
            && let Some(block) = self.writer.numbers.fullest()
            && let Some(keys) = self.take_in_block(block, 1, count)?
        {
            return Ok(keys);
        }
        let first = self.grow_inode_file()?;
        self.take_in_block(first, count, count)?
            .ok_or_else(|| StoreError::Damaged("a new block of the inode file is not empty".into()))
    }

    /// From `least` to `count` free images of one block, if it has so many.
    fn take_in_block(&mut self, index: u64, least: u64, count: u64) -> Result<Option<Vec<InodeKey>>> {
        let Some(block) = self.lens().inode_block(index)? else {
            self.writer.numbers.note(index, 0);
            return Ok(None);
        };
        let mut found = Vec::new();
        for number in 0..INODES_PER_BLOCK {
            let ino = Ino(index * INODES_PER_BLOCK + number);
            if ino.0 == 0 || (ino == ROOT_INO && index == 0 && self.root_exists()?) {
                continue;
            }
            let slot = self
                .lens()
                .images(block, |bytes| crate::lens::slot_in(bytes, ino))?;
            // A damaged image is nobody's to give out.
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
            self.writer.numbers.note(index, free);
            return Ok(None);
        }
        found.truncate(count as usize);
        self.writer.numbers.note(index, free - found.len() as u64);
        let block = self.warm_inode_block(index, block)?;
        for key in &found {
            self.put_in_block(block, key.ino, &InodeSlot::Reserved(key.generation))?;
        }
        let taken = found.len() as u64;
        self.change_state(|state| state.inodes_used = U64::new(state.inodes_used.get() + taken))?;
        Ok(Some(found))
    }

    fn root_exists(&self) -> Result<bool> {
        Ok(!matches!(
            self.lens().slot(ROOT_INO)?,
            InodeSlot::Free(Generation(0))
        ))
    }

    /// Makes the inode file longer; returns its first new block.
    fn grow_inode_file(&mut self) -> Result<u64> {
        let want = self.layout().inode_chunk();
        let span = self.alloc_raw(want)?;
        let first = self.lens().state()?.inode_blocks.get();
        if first + span.len > (1 << INO_BITS) / INODES_PER_BLOCK {
            return Err(StoreError::TableFull("inodes"));
        }
        let mut root = self.lens().inode_root()?;
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
        self.writer.numbers.grown(first..first + span.len);
        Ok(first)
    }

    fn create(&mut self, attr: &InodeAttr, target: &[u8]) -> Result<()> {
        match self.lens().slot(attr.key.ino)? {
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

    /// Gives a number back; its generation is remembered.
    fn free_number(&mut self, key: InodeKey) -> Result<()> {
        self.free_numbers(&[key])
    }

    /// Gives numbers back.
    fn free_numbers(&mut self, keys: &[InodeKey]) -> Result<()> {
        for some in keys.chunk_by(|one, next| one.ino.0 / INODES_PER_BLOCK == next.ino.0 / INODES_PER_BLOCK) {
            let Some(first) = some.first() else { continue };
            let index = first.ino.0 / INODES_PER_BLOCK;
            let block = self
                .lens()
                .inode_block(index)?
                .ok_or(StoreError::NoInode(*first))?;
            let block = self.warm_inode_block(index, block)?;
            for key in some {
                self.put_in_block(block, key.ino, &InodeSlot::Free(key.generation))?;
                self.writer.numbers.note_one_more(index);
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
        let head = Ino(self.lens().state()?.orphan_head.get());
        if head.0 != 0 {
            let mut next = self.lens().get(head)?;
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
        // As it is now: an image may have come back from a slower tier meanwhile.
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
            let mut prev = self.lens().get(links.prev)?;
            prev.orphan = prev.orphan.map(|old| OrphanLinks {
                next: links.next,
                ..old
            });
            self.put(&prev)?;
        }
        if links.next.0 != 0 {
            let mut next = self.lens().get(links.next)?;
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

    fn continue_free(&mut self, ino: Ino, budget: usize) -> Result<Progress> {
        let mut budget = budget.max(1);
        let mut inode = self.lens().get(ino)?;
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

    fn empty_inode(&mut self, inode: &mut Inode, budget: &mut usize) -> Result<Progress> {
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
                let directory = self.lens().directory(ino);
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
        let xattrs = self.lens().xattrs(ino);
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
