//! sig
use crate::{CheckVisitor, MetaIo, MetaRead, Progress};
use std::ops::{ControlFlow, Range};
use varve_format::{BlockNo, Extent, FileBlock, Ino, Tier, TreeCounts, TreeRoot};

/// A run of blocks on a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// The tier.
    pub tier: Tier,
    /// First block.
    pub block: BlockNo,
    /// Blocks; never 0.
    pub len: u32,
}

/// What lies at a block of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// This extent covers it.
    Mapped(Extent),
    /// Nothing up to the file block `until`, where the next extent begins; `None`: nothing to the end.
    Hole {
        /// Start of the next extent.
        until: Option<FileBlock>,
    },
}

/// The extent tree of one inode. Holds only the owner's number: the root is passed in and changed.
#[derive(Debug, Clone, Copy)]
pub struct ExtentTree {
    owner: Ino,
}

#[allow(unused_variables, clippy::todo)]
impl ExtentTree {
    /// The tree of `owner`.
    #[must_use]
    pub const fn of(owner: Ino) -> Self {
        Self { owner }
    }
    /// What lies at `at`.
    pub fn lookup<M: MetaRead>(&self, io: &M, root: &TreeRoot, at: FileBlock) -> Result<Mapping, M::Error> {
        todo!()
    }
    /// Calls `visit` with each extent that overlaps `range`, whole, ascending, until it breaks.
    pub fn for_each<M: MetaRead>(
        &self,
        io: &M,
        root: &TreeRoot,
        range: Range<FileBlock>,
        visit: impl FnMut(Extent) -> ControlFlow<()>,
    ) -> Result<(), M::Error> {
        todo!()
    }
    /// At most `max` extents of `range`, clipped to it.
    pub fn extents<M: MetaRead>(
        &self,
        io: &M,
        root: &TreeRoot,
        range: Range<FileBlock>,
        max: usize,
    ) -> Result<Vec<Extent>, M::Error> {
        todo!()
    }
    /// Unmaps `range` and maps `new` in it. Returns what was unmapped.
    pub fn replace<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
        new: &[Extent],
    ) -> Result<Vec<Run>, M::Error> {
        todo!()
    }
    /// Unmaps `range`. Returns what was unmapped.
    pub fn remove<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
    ) -> Result<Vec<Run>, M::Error> {
        todo!()
    }
    /// Unmaps at most the first `max` extents of `range`.
    pub fn remove_some<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
        max: usize,
    ) -> Result<(Vec<Run>, Progress), M::Error> {
        todo!()
    }
    /// Unmaps all from `from` on.
    pub fn truncate<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        from: FileBlock,
    ) -> Result<Vec<Run>, M::Error> {
        todo!()
    }
    /// Clears UNWRITTEN in `range`; the blocks stay where they are.
    pub fn mark_written<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
    ) -> Result<(), M::Error> {
        todo!()
    }
    /// If all of `range` lies at `from` on, in one run, maps it to `to` and returns true; else changes nothing. The old blocks are the caller's to free.
    pub fn remap<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
        from: (Tier, BlockNo),
        to: (Tier, BlockNo),
    ) -> Result<bool, M::Error> {
        todo!()
    }
    /// Extents, and mapped blocks per tier.
    pub fn counts(&self, root: &TreeRoot) -> Result<TreeCounts, crate::TreeError> {
        todo!()
    }
    /// Node blocks of the tree.
    pub fn node_blocks(&self, root: &TreeRoot) -> Result<u32, crate::TreeError> {
        todo!()
    }
    /// Unmaps at most `max` extents, from the end, and frees the nodes that they leave.
    pub fn free_some<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        max: usize,
    ) -> Result<(Vec<Run>, Progress), M::Error> {
        todo!()
    }
    /// Walks the whole tree.
    pub fn check<M: MetaRead>(
        &self,
        io: &M,
        root: &TreeRoot,
        visitor: &mut impl CheckVisitor<M::Error>,
        on_extent: impl FnMut(Extent),
    ) -> Result<(), M::Error> {
        todo!()
    }
}
