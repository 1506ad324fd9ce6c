//! sig
use crate::{CheckVisitor, MetaIo, MetaRead, Progress};
use varve_format::{HashKey, Ino, XattrRoot};

/// The extended attributes of one inode.
#[derive(Debug, Clone, Copy)]
pub struct Xattrs {
    owner: Ino,
    hash: HashKey,
}

#[allow(unused_variables, clippy::todo)]
impl Xattrs {
    /// The attributes of `owner`.
    #[must_use]
    pub const fn of(owner: Ino, hash: HashKey) -> Self {
        Self { owner, hash }
    }
    /// The value of `name`.
    pub fn get<M: MetaRead>(
        &self,
        io: &M,
        root: &XattrRoot,
        name: &[u8],
    ) -> Result<Option<Vec<u8>>, M::Error> {
        todo!()
    }
    /// Creates or replaces `name`; returns whether it was there. CREATE and REPLACE are decided by the caller (`get` first).
    pub fn set<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut XattrRoot,
        name: &[u8],
        value: &[u8],
    ) -> Result<bool, M::Error> {
        todo!()
    }
    /// Removes `name`; returns whether it was there.
    pub fn remove<M: MetaIo>(&self, io: &mut M, root: &mut XattrRoot, name: &[u8]) -> Result<bool, M::Error> {
        todo!()
    }
    /// All names with the lengths of their values.
    pub fn list<M: MetaRead>(&self, io: &M, root: &XattrRoot) -> Result<Vec<(Vec<u8>, usize)>, M::Error> {
        todo!()
    }
    /// Forgets at most `max` attributes and frees the blocks that they leave.
    pub fn free_some<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut XattrRoot,
        max: usize,
    ) -> Result<Progress, M::Error> {
        todo!()
    }
    /// Walks all attributes.
    pub fn check<M: MetaRead>(
        &self,
        io: &M,
        root: &XattrRoot,
        visitor: &mut impl CheckVisitor<M::Error>,
        on_attr: impl FnMut(&[u8], usize),
    ) -> Result<(), M::Error> {
        todo!()
    }
}
