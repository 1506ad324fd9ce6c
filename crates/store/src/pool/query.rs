//! Queries of the committed metadata: inodes, names, maps, rows. Each sees one consistent state.

use super::Store;
use crate::reader::{file_root, is_shared};
use crate::{DirItem, MappedPart, OwnedPart, Result, SharedPart, StoreError};
use std::ops::{ControlFlow, Range};
use varve_extent_tree::{ExtentTree, SharedRuns};
use varve_format::inode::{INODES_PER_BLOCK, Inode, InodeSlot};
use varve_format::session::{GrantRow, SessionRow};
use varve_format::{BlockKind, Extent, FileBlock, Ino, InodeKey, SharedRun, TreeCounts};

impl Store {
    /// Returns the inode with this number.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn get(&self, ino: Ino) -> Result<Inode> {
        self.snapshot().reader().get(ino)
    }

    /// Returns the inode with this number and generation.
    ///
    /// # Errors
    /// `NoInode` (also for another generation), or damage.
    pub fn get_key(&self, key: InodeKey) -> Result<Inode> {
        self.snapshot().reader().get_key(key)
    }

    /// Returns the state of an inode number.
    ///
    /// # Errors
    /// `NoInode` beyond the inode file; damage.
    pub fn slot(&self, ino: Ino) -> Result<InodeSlot> {
        self.snapshot().reader().slot(ino)
    }

    /// Returns the entry of `name` in `dir`.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn dir_lookup(&self, dir: Ino, name: &[u8]) -> Result<Option<DirItem>> {
        self.snapshot().reader().dir_lookup(dir, name)
    }

    /// Returns at most `max` entries after `cookie` (0: from the start), without "." and "..".
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn dir_iter(&self, dir: Ino, cookie: u64, max: usize) -> Result<Vec<DirItem>> {
        self.snapshot().reader().dir_iter(dir, cookie, max)
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        self.snapshot().reader().read_link(ino)
    }

    /// Returns the value of an extended attribute.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn xattr_get(&self, ino: Ino, name: &[u8]) -> Result<Option<Vec<u8>>> {
        self.snapshot().reader().xattr_get(ino, name)
    }

    /// Returns the names of all extended attributes, with the lengths of their values.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn xattr_list(&self, ino: Ino) -> Result<Vec<(Vec<u8>, usize)>> {
        self.snapshot().reader().xattr_list(ino)
    }

    /// Returns at most `max` extents from `from` on, clipped, without holes.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn map(&self, ino: Ino, from: FileBlock, max: usize) -> Result<Vec<Extent>> {
        self.snapshot().reader().map(ino, from, max)
    }

    /// As [`map`](Self::map), with the numbers of shared blocks.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn map_parts(&self, ino: Ino, from: FileBlock, max: usize) -> Result<Vec<MappedPart>> {
        self.snapshot().reader().map_parts(ino, from, max)
    }

    /// Returns the runs of shared blocks with some numbers, clipped to them, at most `max`.
    ///
    /// # Errors
    /// Damage.
    pub fn shared_parts(&self, numbers: Range<u64>, max: usize) -> Result<Vec<SharedPart>> {
        let snapshot = self.snapshot();
        let reader = snapshot.reader();
        let part = |run: SharedRun| SharedPart {
            number: run.first,
            len: run.len,
            tier: run.tier,
            block: run.block,
            owners: run.refs,
        };
        let (mut parts, range) = (Vec::new(), numbers.clone());
        SharedRuns::new().for_each(reader.view, &reader.shared_root()?, range, |run| {
            parts.extend(run.clip(numbers.start, numbers.end).map(part));
            match parts.len() < max {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        })?;
        Ok(parts)
    }

    /// Returns the number of extents of a file; one that lies in several shared runs counts once.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn extents_of(&self, ino: Ino) -> Result<u64> {
        Ok(self.tree_counts(ino)?.extents)
    }

    /// Whether a file has shared blocks.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn shares_blocks(&self, ino: Ino) -> Result<bool> {
        Ok(self.tree_counts(ino)?.shared > 0)
    }

    /// Returns the parts of a range of a file, at most `max`, each with its number of owners; holes are left
    /// out. They are not joined: as many parts as were asked for mean that there may be more.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn owned_parts(&self, ino: Ino, blocks: Range<FileBlock>, max: usize) -> Result<Vec<OwnedPart>> {
        let snapshot = self.snapshot();
        let reader = snapshot.reader();
        let root = file_root(&reader.get(ino)?)?;
        let shared_root = reader.shared_root()?;
        let mut parts = Vec::new();
        for extent in reader.unresolved(ino, &root, blocks.start.0, blocks.end.0, max)? {
            if parts.len() >= max {
                break;
            }
            if !is_shared(&extent) {
                parts.push(OwnedPart {
                    file_block: extent.file_block,
                    blocks: extent.len,
                    number: None,
                    owners: 1,
                    tier: extent.tier,
                    block: extent.block,
                });
                continue;
            }
            let first = extent.block.0;
            let numbers = first..first + u64::from(extent.len);
            let runs = SharedRuns::new().runs(reader.view, &shared_root, numbers, max - parts.len())?;
            for run in runs {
                parts.push(OwnedPart {
                    file_block: FileBlock(extent.file_block.0 + (run.first - first)),
                    blocks: run.len,
                    number: Some(run.first),
                    owners: run.refs,
                    tier: run.tier,
                    block: run.block,
                });
            }
        }
        Ok(parts)
    }

    fn tree_counts(&self, ino: Ino) -> Result<TreeCounts> {
        let root = file_root(&self.snapshot().reader().get(ino)?)?;
        Ok(ExtentTree::of(ino).counts(&root)?)
    }

    /// Returns the first byte of data at or after `offset`, below the size.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn seek_data(&self, ino: Ino, offset: u64) -> Result<Option<u64>> {
        self.snapshot().reader().seek(ino, offset, true)
    }

    /// Returns the first byte of a hole at or after `offset` (the end counts as one); `None` if `offset` is
    /// not below the size.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn seek_hole(&self, ino: Ino, offset: u64) -> Result<Option<u64>> {
        self.snapshot().reader().seek(ino, offset, false)
    }

    /// Returns the inodes in the orphan list: without a name (nlink 0), or with an unfinished truncation.
    ///
    /// # Errors
    /// The list is damaged.
    pub fn orphans(&self) -> Result<Vec<InodeKey>> {
        let snapshot = self.snapshot();
        let reader = snapshot.reader();
        let state = reader.state()?;
        let mut out = Vec::new();
        let mut next = Ino(state.orphan_head.get());
        while next.0 != 0 {
            let inode = reader.get(next)?;
            let links = inode
                .orphan
                .filter(|_| (out.len() as u64) < state.orphans.get())
                .ok_or_else(|| StoreError::Damaged(format!("orphan list at inode {next}")))?;
            out.push(inode.attr.key);
            next = links.next;
        }
        Ok(out)
    }

    /// Calls `f` for every inode number in use or reserved, ascending, until it returns false. The calls do
    /// not show one consistent state.
    ///
    /// # Errors
    /// The first failed read or damage. `f` was called for all other numbers.
    pub fn for_each_inode(&self, f: &mut dyn FnMut(Ino, InodeSlot) -> bool) -> Result<()> {
        self.for_each_inode_from(Ino(0), f)
    }

    /// As [`for_each_inode`](Self::for_each_inode), for numbers from `from` on.
    ///
    /// # Errors
    /// As `for_each_inode`.
    pub fn for_each_inode_from(&self, from: Ino, f: &mut dyn FnMut(Ino, InodeSlot) -> bool) -> Result<()> {
        let blocks = self.snapshot().reader().state()?.inode_blocks.get();
        let mut result = Ok(());
        for index in from.0 / INODES_PER_BLOCK..blocks {
            let (slots, read) = self.slots_at(index);
            result = result.and(read);
            for (ino, slot) in slots {
                if ino >= from && !matches!(slot, InodeSlot::Free(_)) && !f(ino, slot) {
                    return result;
                }
            }
        }
        result
    }

    /// Returns the readable slots of a block of the inode file, and the first error.
    fn slots_at(&self, index: u64) -> (Vec<(Ino, InodeSlot)>, Result<()>) {
        let snapshot = self.snapshot();
        let reader = snapshot.reader();
        let (mut slots, mut result) = (Vec::new(), Ok(()));
        for ino in (index * INODES_PER_BLOCK).max(1)..(index + 1) * INODES_PER_BLOCK {
            match reader.slot(Ino(ino)) {
                Ok(slot) => slots.push((Ino(ino), slot)),
                Err(error) => {
                    let alone = matches!(error, StoreError::Inode { .. });
                    result = result.and(Err(error));
                    if !alone {
                        break;
                    }
                }
            }
        }
        (slots, result)
    }

    /// Returns the most sessions that can have a row.
    #[must_use]
    pub fn sessions_max(&self) -> u64 {
        self.layout.session_slots()
    }

    /// Returns all session rows.
    ///
    /// # Errors
    /// A row is damaged.
    pub fn sessions(&self) -> Result<Vec<SessionRow>> {
        let mut out = Vec::new();
        self.for_rows(|_, row| out.push(row))?;
        Ok(out)
    }

    /// Returns all grant rows.
    ///
    /// # Errors
    /// A row is damaged.
    pub fn grants(&self) -> Result<Vec<GrantRow>> {
        let mut out = Vec::new();
        self.for_grants(|_, row| out.push(row))?;
        Ok(out)
    }

    pub(super) fn for_rows(&self, mut f: impl FnMut(u64, SessionRow)) -> Result<()> {
        let snapshot = self.snapshot();
        for slot in 0..self.layout.session_slots() {
            let place = self.layout.session_row(slot);
            let row = snapshot
                .reader()
                .row(place, BlockKind::SessionTable, SessionRow::decode)?
                .map_err(|_| StoreError::Damaged(format!("session row {slot}")))?;
            if let Some(row) = row {
                f(slot, row);
            }
        }
        Ok(())
    }

    pub(super) fn for_grants(&self, mut f: impl FnMut(u64, GrantRow)) -> Result<()> {
        let snapshot = self.snapshot();
        for slot in 0..self.layout.grant_slots() {
            let place = self.layout.grant_row(slot);
            let row = snapshot
                .reader()
                .row(place, BlockKind::GrantTable, GrantRow::decode)?
                .map_err(|_| StoreError::Damaged(format!("grant row {slot}")))?;
            if let Some(row) = row {
                f(slot, row);
            }
        }
        Ok(())
    }
}
