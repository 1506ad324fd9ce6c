//! A transaction: the calls that change the pool. No change is visible to others before the commit; a dropped
//! transaction leaves no trace.
//!
//! From the ground up: `state` (dirty blocks), `alloc`, `units`, `relocate`, `in_place`, `commit`, `inode`,
//! `shared`, `data`, `migrate`, `unshare`, `defrag`, `session_rows`.

mod alloc;
mod commit;
mod data;
mod defrag;
pub(crate) mod devices;
mod in_place;
mod inode;
mod migrate;
mod rejoin;
mod relocate;
mod removals;
mod session_rows;
pub(crate) mod shared;
mod state;
mod units;
mod unshare;

pub use defrag::{Defragmented, moved_blocks, staying_blocks};
pub use shared::ShareRange;
pub(crate) use state::TxState;
pub use unshare::Unshared;

use crate::pool::fetch::Fetched;
use crate::seeded::{Bug, armed};
use crate::{DirItem, Progress, Result, StoreError};
use varve_format::inode::{INODES_PER_BLOCK, Inode, InodeSlot};
use varve_format::{FileKind, Ino, InodeAttr, InodeKey, MODE_KIND_MASK, Pin, SYMLINK_MAX, Tier, TxId};

/// A transaction: sees its own changes, which are visible to others only after [`commit`](Self::commit).
/// Dropped, it leaves no trace.
///
/// After an error other than `NotFound`, `Exists`, `NoInode`, `WrongKind`, `Invalid`, `TableFull`,
/// `NoSession`, `NoGrant` or `Unfinished` it is poisoned (its changes may be half done) and can only be
/// dropped.
pub struct Tx<'s> {
    pub(crate) core: TxState<'s>,
}

impl<'s> Tx<'s> {
    /// Returns the pool.
    #[must_use]
    pub const fn store(&self) -> &crate::Store {
        self.core.store
    }

    /// As [`Store::note_damage`](crate::Store::note_damage).
    pub fn note_damage(&self, error: &StoreError) {
        self.core.store.note_damage(error);
    }

    /// Returns the number that the commit will have.
    #[must_use]
    pub fn id(&self) -> TxId {
        self.core.id()
    }

    /// Returns the bytes left in the journal record. One small operation (create, rename, a write that
    /// changes few extents) needs at most [`crate::OP_ROOM`].
    pub fn room(&mut self) -> u64 {
        self.core.room()
    }

    /// Returns a lower bound of the bytes left in the journal record. If it is less than `enough`, it is
    /// exactly the number that [`room`](Self::room) returns, which costs more.
    pub fn room_at_least(&mut self, enough: u64) -> u64 {
        self.core.room_at_least(enough)
    }

    /// Commits the changes: all of them are durable and visible when this returns. If nothing was changed, no
    /// record is written and the newest transaction's number is returned.
    ///
    /// # Errors
    /// `Poisoned`, `Latched`, `RecordFull`: nothing was committed. A device error latches the pool; whether
    /// the transaction is durable is then known only after the next open.
    pub fn commit(self) -> Result<TxId> {
        self.core.commit()
    }

    /// Runs a change; an error that leaves it half done poisons the transaction.
    pub(crate) fn guard<R>(&mut self, f: impl FnOnce(&mut TxState<'_>) -> Result<R>) -> Result<R> {
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

    /// As [`guard`](Self::guard), for a change that must leave the reserve to operations that free space.
    pub(crate) fn guard_new<R>(&mut self, f: impl FnOnce(&mut TxState<'_>) -> Result<R>) -> Result<R> {
        self.core.frugal = !self.core.use_reserve;
        let result = self.guard(f);
        self.core.frugal = false;
        result
    }

    /// Lets the whole transaction allocate from the reserve: for the digest of operations whose space was
    /// reserved, and for migration away from a full tier. Without it only removing, truncating and freeing
    /// may.
    pub fn use_reserve(&mut self) {
        self.core.use_reserve = true;
    }

    /// Reads blocks that were fetched ahead from there, compared with their checksums as all others.
    pub const fn use_fetched(&mut self, fetched: &'s Fetched<'s>) {
        self.core.ahead = Some(fetched);
    }

    /// As [`Store::get`](crate::Store::get), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn get(&self, ino: Ino) -> Result<Inode> {
        self.core.reader().get(ino)
    }

    /// As [`Store::get_key`](crate::Store::get_key), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn get_key(&self, key: InodeKey) -> Result<Inode> {
        self.core.reader().get_key(key)
    }

    /// As [`Store::slot`](crate::Store::slot), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode` beyond the inode file; damage.
    pub fn slot(&self, ino: Ino) -> Result<InodeSlot> {
        self.core.reader().slot(ino)
    }

    /// Reserves `count` (1 to 16) inode numbers in one block of the inode file, near a directory's. Returns
    /// them ascending, with generations that they never had. Returns fewer, but at least one, if no block has
    /// `count` free numbers and most numbers are free.
    ///
    /// # Errors
    /// `Invalid` for another count; `NoSpace`.
    pub fn alloc_inodes(&mut self, near: Ino, count: u8) -> Result<Vec<InodeKey>> {
        if count == 0 || u64::from(count) > INODES_PER_BLOCK {
            return Err(StoreError::Invalid("1 to 16 inodes are allocated at once"));
        }
        self.guard_new(|core| core.alloc_inodes(near, u64::from(count)))
    }

    /// Frees a reserved number whose inode was never made.
    ///
    /// # Errors
    /// `NoInode` if it is not reserved with this generation.
    pub fn release_inode(&mut self, key: InodeKey) -> Result<()> {
        self.release_inodes(&[key])
    }

    /// As [`release_inode`](Self::release_inode), for many numbers without duplicates; cheaper for
    /// consecutive ones.
    ///
    /// # Errors
    /// `NoInode` for the first that is not reserved with its generation: nothing is changed then.
    pub fn release_inodes(&mut self, keys: &[InodeKey]) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.guard(|core| {
            for key in keys {
                match core.reader().slot(key.ino)? {
                    InodeSlot::Reserved(generation) if generation == key.generation => {}
                    _ => return Err(StoreError::NoInode(*key)),
                }
            }
            core.free_numbers(keys)
        })
    }

    /// Makes the file `attr.key`, whose number was reserved. `target` is the target of a symbolic link, else
    /// empty. The size is the target's length, `DIR_SIZE` for a directory, else 0. With `attr.nlink == 0` the
    /// inode is in the orphan list.
    /// 0. With `attr.nlink == 0` it is in the orphan list.
    ///
    /// # Errors
    /// `NoInode` if the number is not reserved with this generation; `Invalid` for a mode without kind, or a
    /// target out of bounds; `NoSpace`.
    pub fn create(&mut self, attr: &InodeAttr, target: &[u8]) -> Result<()> {
        let kind = FileKind::from_mode(attr.mode).ok_or(StoreError::Invalid("mode without a file kind"))?;
        if (kind == FileKind::Symlink) == target.is_empty() || target.len() > SYMLINK_MAX {
            return Err(StoreError::Invalid("target of a symbolic link"));
        }
        self.guard_new(|core| core.create(attr, target))
    }

    /// Changes attributes. Key, kind, size and sectors stay, whatever `f` does to them. When the link count
    /// becomes 0 the inode enters the orphan list; when it becomes more, it leaves it.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn edit(&mut self, ino: Ino, f: impl FnOnce(&mut InodeAttr)) -> Result<()> {
        self.guard(|core| {
            let mut inode = core.reader().get(ino)?;
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

    /// Returns an inode's pin.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn pin(&self, ino: Ino) -> Result<Pin> {
        Ok(self.core.reader().get(ino)?.pin)
    }

    /// Sets an inode's pin.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn set_pin(&mut self, ino: Ino, pin: Pin) -> Result<()> {
        self.guard(|core| {
            let mut inode = core.reader().get(ino)?;
            inode.pin = pin;
            core.put(&inode)
        })
    }

    /// Returns the tier on which the shared part of a file is wanted.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn shared_pin(&self, ino: Ino) -> Result<Option<Tier>> {
        Ok(self.core.reader().get(ino)?.shared_pin)
    }

    /// Sets the tier on which the shared part of a file is wanted.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn set_shared_pin(&mut self, ino: Ino, tier: Option<Tier>) -> Result<()> {
        self.guard(|core| {
            let mut inode = core.reader().get(ino)?;
            inode.shared_pin = tier;
            core.put(&inode)
        })
    }

    /// Frees a part of an inode in the orphan list, at most `budget` extents, entries and attributes:
    /// everything, and at last its number (link count 0), or the blocks beyond its size (unfinished
    /// truncation). `More`: commit, and call again in another transaction.
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
        self.core.reader().dir_lookup(dir, name)
    }

    /// Returns the root of the names of `dir`, for many calls of [`dir_find`](Self::dir_find) while nothing
    /// is changed.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn dir_root(&self, dir: Ino) -> Result<varve_format::DirRoot> {
        crate::reader::dir_root(&self.core.reader().get(dir)?)
    }

    /// As [`dir_lookup`](Self::dir_lookup), with the root from [`dir_root`](Self::dir_root).
    ///
    /// # Errors
    /// Damage.
    pub fn dir_find(&self, dir: Ino, root: &varve_format::DirRoot, name: &[u8]) -> Result<Option<InodeKey>> {
        let reader = self.core.reader();
        let found = reader.directory(dir).lookup(reader.view, root, name)?;
        Ok(found.map(|entry| entry.key))
    }

    /// As [`Store::dir_iter`](crate::Store::dir_iter), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn dir_iter(&self, dir: Ino, cookie: u64, max: usize) -> Result<Vec<DirItem>> {
        self.core.reader().dir_iter(dir, cookie, max)
    }

    /// As [`Store::read_link`](crate::Store::read_link), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        self.core.reader().read_link(ino)
    }

    /// Adds a name. The caller updates link counts.
    ///
    /// # Errors
    /// `Exists`, `NoInode`, `WrongKind`, `NoSpace`.
    pub fn dir_insert(&mut self, dir: Ino, name: &[u8], key: InodeKey, kind: FileKind) -> Result<()> {
        check_name(name)?;
        self.guard_new(|core| {
            if core.reader().dir_lookup(dir, name)?.is_some() {
                return Err(StoreError::Exists);
            }
            core.with_dir(dir, |core, root, directory| {
                directory
                    .insert(core, root, &varve_format::Dirent { key, kind, name })
                    .map(drop)
            })
        })
    }

    /// Removes a name and returns its entry. The caller updates link counts.
    ///
    /// # Errors
    /// `NotFound`, `NoInode`, `WrongKind`.
    pub fn dir_remove(&mut self, dir: Ino, name: &[u8]) -> Result<DirItem> {
        self.guard(|core| {
            let old = core.reader().dir_lookup(dir, name)?.ok_or(StoreError::NotFound)?;
            core.with_dir(dir, |core, root, directory| {
                directory.remove(core, root, name).map(drop)
            })?;
            Ok(old)
        })
    }

    /// Lets a name stand for another inode and returns the old entry.
    ///
    /// # Errors
    /// `NotFound`, `NoInode`, `WrongKind`.
    pub fn dir_replace(&mut self, dir: Ino, name: &[u8], key: InodeKey, kind: FileKind) -> Result<DirItem> {
        self.guard(|core| {
            let old = core.reader().dir_lookup(dir, name)?.ok_or(StoreError::NotFound)?;
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
        self.core.reader().xattr_get(ino, name)
    }

    /// As [`Store::xattr_list`](crate::Store::xattr_list), in this transaction's view.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn xattr_list(&self, ino: Ino) -> Result<Vec<(Vec<u8>, usize)>> {
        self.core.reader().xattr_list(ino)
    }

    /// Creates or replaces an extended attribute.
    ///
    /// # Errors
    /// `NoInode`, `Invalid`, `NoSpace`.
    pub fn xattr_set(&mut self, ino: Ino, name: &[u8], value: &[u8]) -> Result<()> {
        check_name(name)?;
        if value.len() > varve_format::XATTR_VALUE_MAX {
            return Err(StoreError::Invalid("attribute value too long"));
        }
        self.guard_new(|core| {
            let mut inode = core.reader().get(ino)?;
            let xattrs = core.reader().xattrs(ino);
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
            let mut inode = core.reader().get(ino)?;
            let xattrs = core.reader().xattrs(ino);
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

impl crate::Store {
    /// Starts a transaction; waits until the present one has ended.
    ///
    /// # Errors
    /// `Latched`.
    pub fn begin(&self) -> Result<Tx<'_>> {
        let writer = self.writer.lock();
        if let Some(reason) = self.latched() {
            return Err(StoreError::Latched(reason));
        }
        Ok(Tx {
            core: TxState::new(self, writer),
        })
    }
}
