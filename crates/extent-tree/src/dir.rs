//! sig
use crate::{CheckVisitor, MetaIo, MetaRead, Progress};
use std::ops::ControlFlow;
use varve_format::{DirRoot, Dirent, FileKind, HashKey, Ino, InodeKey};

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirEntry {
    /// The inode.
    pub key: InodeKey,
    /// Its kind.
    pub kind: FileKind,
    /// Where an iteration goes on after this entry: at least `COOKIE_MIN`, below 2^63.
    pub cookie: u64,
}

/// The index of one directory.
#[derive(Debug, Clone, Copy)]
pub struct Directory {
    owner: Ino,
    hash: HashKey,
}

#[allow(unused_variables, clippy::todo)]
impl Directory {
    /// The directory `owner`.
    #[must_use]
    pub const fn of(owner: Ino, hash: HashKey) -> Self {
        Self { owner, hash }
    }
    /// Finds `name`.
    pub fn lookup<M: MetaRead>(
        &self,
        io: &M,
        root: &DirRoot,
        name: &[u8],
    ) -> Result<Option<DirEntry>, M::Error> {
        todo!()
    }
    /// Adds a name; `Exists` if it is there. Returns the entry's cookie.
    pub fn insert<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut DirRoot,
        entry: &Dirent<'_>,
    ) -> Result<u64, M::Error> {
        todo!()
    }
    /// Removes a name and returns what it stood for; `NotFound` if it is not there.
    pub fn remove<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut DirRoot,
        name: &[u8],
    ) -> Result<DirEntry, M::Error> {
        todo!()
    }
    /// Lets the name stand for another inode (same cookie) and returns what it stood for; `NotFound` if it is not there.
    pub fn replace<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut DirRoot,
        entry: &Dirent<'_>,
    ) -> Result<DirEntry, M::Error> {
        todo!()
    }
    /// Calls `visit(cookie, entry)` for each entry after `cookie` (0: from the start), until it breaks.
    pub fn for_each<M: MetaRead>(
        &self,
        io: &M,
        root: &DirRoot,
        after: u64,
        visit: impl FnMut(u64, Dirent<'_>) -> ControlFlow<()>,
    ) -> Result<(), M::Error> {
        todo!()
    }
    /// Forgets at most `max` entries, from the end, and frees the blocks that they leave.
    pub fn free_some<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut DirRoot,
        max: usize,
    ) -> Result<Progress, M::Error> {
        todo!()
    }
    /// Walks the whole index.
    pub fn check<M: MetaRead>(
        &self,
        io: &M,
        root: &DirRoot,
        visitor: &mut impl CheckVisitor<M::Error>,
        on_entry: impl FnMut(u64, Dirent<'_>),
    ) -> Result<(), M::Error> {
        todo!()
    }
}
