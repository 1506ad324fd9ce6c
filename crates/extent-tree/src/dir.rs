//! The index of one directory: names to inodes. Knows nothing of inodes, link counts, "." and "..".

#[cfg(test)]
mod tests;

use crate::btree::{BTree, KEY_END, Recall};
use crate::names::{NameCheck, Search, check_count, search};
use crate::{CheckVisitor, Fault, MetaIo, MetaRead, Progress, TreeError};
use std::ops::ControlFlow;
use varve_format::{BlockKind, DirRoot, Dirent, FileKind, HashKey, Ino, InodeKey, NAME_MAX, NameFault, Top};

/// The inode that a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirEntry {
    /// The inode.
    pub key: InodeKey,
    /// Its kind.
    pub kind: FileKind,
    /// Position from which an iteration continues after this entry: at least
    /// [`COOKIE_MIN`](varve_format::COOKIE_MIN), below 2^63. The entry keeps it as long as it exists.
    pub cookie: u64,
}

/// The index of one directory. Holds only the owner's number and the pool's key: the root, a part of the
/// inode image, is passed in; functions that take it as `&mut` leave it as it must be stored in the same
/// transaction.
#[derive(Debug, Clone, Copy)]
pub struct Directory {
    tree: BTree,
    hash: fn(&HashKey, &[u8]) -> u64,
    key: HashKey,
}

impl Directory {
    /// Returns the index of the directory `owner` in the pool whose secret is `key`.
    #[must_use]
    pub const fn of(owner: Ino, key: HashKey) -> Self {
        Self::with_hash(owner, key, HashKey::name_hash)
    }

    /// Tests choose a hash that collides.
    const fn with_hash(owner: Ino, key: HashKey, hash: fn(&HashKey, &[u8]) -> u64) -> Self {
        Self {
            tree: BTree {
                owner,
                leaf: BlockKind::DirLeaf,
                node: BlockKind::DirNode,
            },
            hash,
            key,
        }
    }

    fn top(&self, root: &DirRoot) -> Result<Top, TreeError> {
        root.top().map_err(|fault| self.tree.bad_root(fault))
    }

    fn search<M: MetaRead>(
        &self,
        io: &M,
        top: &Top,
        name: &[u8],
    ) -> Result<Search<(InodeKey, FileKind)>, M::Error> {
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(TreeError::BadName(NameFault::NameLen(name.len())).into());
        }
        search(&self.tree, io, top, (self.hash)(&self.key, name), |value| {
            let entry = Dirent::parse(value)?;
            Ok((entry.name == name).then_some((entry.key, entry.kind)))
        })
    }

    fn find<M: MetaRead>(&self, io: &M, top: &Top, name: &[u8]) -> Result<Option<DirEntry>, M::Error> {
        let found = self.search(io, top, name)?.found;
        Ok(found.map(|(cookie, (key, kind))| DirEntry { key, kind, cookie }))
    }

    /// Finds `name`. Among a million names it reads 3 blocks.
    ///
    /// # Errors
    /// [`TreeError::BadName`] if the name is empty or too long; corruption, and the errors of `io`.
    pub fn lookup<M: MetaRead>(
        &self,
        io: &M,
        root: &DirRoot,
        name: &[u8],
    ) -> Result<Option<DirEntry>, M::Error> {
        self.find(io, &self.top(root)?, name)
    }

    /// Adds a name. Returns the entry's cookie.
    ///
    /// # Errors
    /// [`TreeError::Exists`], [`TreeError::BadName`] and [`TreeError::HashFull`] with nothing changed;
    /// corruption, and the errors of `io`.
    pub fn insert<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut DirRoot,
        entry: &Dirent<'_>,
    ) -> Result<u64, M::Error> {
        let mut top = self.top(root)?;
        let mut record = Vec::new();
        entry.encode(&mut record).map_err(TreeError::BadName)?;
        let search = self.search(io, &top, entry.name)?;
        if search.found.is_some() {
            return Err(TreeError::Exists.into());
        }
        let cookie = search.free.ok_or(TreeError::HashFull)?;
        self.tree.insert(io, &mut top, cookie, &record)?;
        *root = DirRoot::new(&top, root.entries().saturating_add(1));
        Ok(cookie)
    }

    /// Removes a name. Returns its entry.
    ///
    /// # Errors
    /// [`TreeError::NotFound`] and [`TreeError::BadName`] with nothing changed; corruption, and the errors of
    /// `io`.
    pub fn remove<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut DirRoot,
        name: &[u8],
    ) -> Result<DirEntry, M::Error> {
        let mut top = self.top(root)?;
        let found = self.find(io, &top, name)?.ok_or(TreeError::NotFound)?;
        self.tree.remove(io, &mut top, found.cookie)?;
        *root = self.root_after(&top, root.entries().saturating_sub(1))?;
        Ok(found)
    }

    /// Returns the root after a removal. Fails if its counter has reached zero before the last name, or the
    /// other way round: such a root would be refused later.
    fn root_after(&self, top: &Top, entries: u64) -> Result<DirRoot, TreeError> {
        let root = DirRoot::new(top, entries);
        self.top(&root).map(|_| root)
    }

    /// Lets the name in `entry` stand for another inode; its cookie stays. Returns the old entry.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub fn replace<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut DirRoot,
        entry: &Dirent<'_>,
    ) -> Result<DirEntry, M::Error> {
        let mut top = self.top(root)?;
        let mut record = Vec::new();
        entry.encode(&mut record).map_err(TreeError::BadName)?;
        let found = self.find(io, &top, entry.name)?.ok_or(TreeError::NotFound)?;
        self.tree.set(io, &mut top, found.cookie, &record)?;
        *root = DirRoot::new(&top, root.entries());
        Ok(found)
    }

    /// Calls `visit(cookie, entry)` for each entry whose cookie is above `after` (0: from the start), until
    /// it breaks. An entry that exists all along is visited exactly once, however often the iteration is
    /// broken off and taken up with the last cookie.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn for_each<M: MetaRead>(
        &self,
        io: &M,
        root: &DirRoot,
        after: u64,
        mut visit: impl FnMut(u64, Dirent<'_>) -> ControlFlow<()>,
    ) -> Result<(), M::Error> {
        let top = self.top(root)?;
        self.tree
            .scan(io, &top, after.saturating_add(1)..KEY_END, |leaf, key, value| {
                let entry = Dirent::parse(value).map_err(|fault| self.tree.corrupt(leaf, fault))?;
                Ok(visit(key, entry))
            })
    }

    /// Removes at most `max` entries, the last cookies first, and frees the blocks that become empty.
    /// Continues from the state of the root; `Done` when the index is empty.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn free_some<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut DirRoot,
        max: usize,
    ) -> Result<Progress, M::Error> {
        let mut top = self.top(root)?;
        let mut left = max;
        while left > 0 && top.height > 0 {
            left = left.saturating_sub(self.tree.take_last(io, &mut top, left)?.len());
        }
        if top.height == 0 {
            *root = DirRoot::default();
            return Ok(Progress::Done);
        }
        *root = self.root_after(&top, root.entries().saturating_sub((max - left) as u64))?;
        Ok(Progress::More)
    }

    /// Demotes the nodes of the index to slower tiers, as long as `more` returns true. Returns the root to be
    /// stored.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn demote<M: MetaIo>(
        &self,
        io: &mut M,
        root: &DirRoot,
        more: &mut dyn FnMut(&mut M) -> bool,
    ) -> Result<DirRoot, M::Error> {
        let mut top = self.top(root)?;
        self.tree.demote(io, &mut top, more)?;
        Ok(DirRoot::new(&top, root.entries()))
    }

    /// Promotes the nodes of the index that `recall` wants, and those above them. Returns the root to be
    /// stored.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn recall<M: MetaIo>(
        &self,
        io: &mut M,
        root: &DirRoot,
        recall: &mut Recall<'_, M>,
    ) -> Result<DirRoot, M::Error> {
        let mut top = self.top(root)?;
        self.tree.recall(io, &mut top, recall)?;
        Ok(DirRoot::new(&top, root.entries()))
    }

    /// Returns whether no node of the index is in NVM.
    ///
    /// # Errors
    /// The root is corrupt.
    pub fn is_away(&self, root: &DirRoot) -> Result<bool, TreeError> {
        let top = self.top(root)?;
        Ok(top.height == 0 || top.block.is_cold())
    }

    /// Walks the whole index: reports every node and every fault to `visitor`, and every sound entry with its
    /// cookie to `on_entry`. Reads each node once; memory grows with the number of nodes.
    pub fn check<M: MetaRead>(
        &self,
        io: &M,
        root: &DirRoot,
        visitor: &mut impl CheckVisitor<M::Error>,
        mut on_entry: impl FnMut(u64, Dirent<'_>),
    ) {
        let top = match self.top(root) {
            Ok(top) => top,
            Err(error) => return visitor.fault(error),
        };
        let mut names = NameCheck::default();
        let sound = self.tree.walk(io, &top, visitor, |_, _, key, value| {
            let entry = Dirent::parse(value).map_err(Fault::from)?;
            names.add(key, entry.name, (self.hash)(&self.key, entry.name))?;
            on_entry(key, entry);
            Ok(())
        });
        if sound && let Some(error) = check_count(&self.tree, "entries", root.entries(), names.count) {
            visitor.fault(error);
        }
    }
}
