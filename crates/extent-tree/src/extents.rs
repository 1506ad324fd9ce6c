//! The extent tree of one inode: which blocks on which tier hold a file's blocks. Moves and reads no data.

mod each;
mod splice;
#[cfg(test)]
mod tests;

use crate::btree::{BTree, Recall};
use crate::{CheckVisitor, Fault, MetaIo, MetaRead, Progress, TreeError};
use splice::Splice;
use std::ops::{ControlFlow, Range};
use varve_format::{
    BlockKind, BlockNo, Extent, ExtentFlags, ExtentValue, FILE_BLOCKS_MAX, FileBlock, INLINE_EXTENTS, Ino,
    Tier, Top, TreeCounts, TreeForm, TreeRoot,
};
use zerocopy::IntoBytes;

/// A tree of one leaf with no more extents than this moves back into the inode. The limit is below the
/// inode's capacity, so that a tree does not move to and fro.
const INLINE_AGAIN: u64 = INLINE_EXTENTS as u64 / 2;

/// A run of blocks on a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// The tier.
    pub tier: Tier,
    /// First block.
    pub block: BlockNo,
    /// Blocks; never 0.
    pub len: u32,
    /// Whether `block` is a number of the shared space, and not of the tier.
    pub shared: bool,
}

impl From<&Extent> for Run {
    fn from(extent: &Extent) -> Self {
        Self {
            tier: extent.tier,
            block: extent.block,
            len: extent.len,
            shared: extent.flags.contains(ExtentFlags::SHARED),
        }
    }
}

/// The mapping of a file block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// This extent covers it.
    Mapped(Extent),
    /// A hole up to the file block `until`, where the next extent begins; `None`: up to the end.
    Hole {
        /// Start of the next extent.
        until: Option<FileBlock>,
    },
}

/// The extent tree of one inode. Holds only the owner's number: the root, a part of the inode image, is
/// passed in; functions that take it as `&mut` leave it as it must be stored in the same transaction.
#[derive(Debug, Clone, Copy)]
pub struct ExtentTree {
    tree: BTree,
}

impl ExtentTree {
    /// Returns the tree of `owner`.
    #[must_use]
    pub const fn of(owner: Ino) -> Self {
        Self {
            tree: BTree {
                owner,
                leaf: BlockKind::ExtentLeaf,
                node: BlockKind::ExtentNode,
            },
        }
    }

    fn form(&self, root: &TreeRoot) -> Result<TreeForm, TreeError> {
        root.form().map_err(|fault| self.tree.bad_root(fault))
    }

    /// Returns the mapping of `at`.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn lookup<M: MetaRead>(&self, io: &M, root: &TreeRoot, at: FileBlock) -> Result<Mapping, M::Error> {
        let mut found = Mapping::Hole { until: None };
        self.for_each(io, root, at..FileBlock(FILE_BLOCKS_MAX), |extent| {
            found = if extent.file_block <= at {
                Mapping::Mapped(extent)
            } else {
                Mapping::Hole {
                    until: Some(extent.file_block),
                }
            };
            ControlFlow::Break(())
        })?;
        Ok(found)
    }

    /// Calls `visit` with each extent that overlaps `range`, whole, ascending, until it breaks.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn for_each<M: MetaRead>(
        &self,
        io: &M,
        root: &TreeRoot,
        range: Range<FileBlock>,
        mut visit: impl FnMut(Extent) -> ControlFlow<()>,
    ) -> Result<(), M::Error> {
        if range.is_empty() {
            return Ok(());
        }
        match self.form(root)? {
            TreeForm::Inline(extents) => {
                for extent in extents {
                    if extent.end() > range.start
                        && (extent.file_block >= range.end || visit(extent).is_break())
                    {
                        break;
                    }
                }
                Ok(())
            }
            TreeForm::Nodes(top, _) => self.scan_nodes(io, &top, range, visit),
        }
    }

    fn scan_nodes<M: MetaRead>(
        &self,
        io: &M,
        top: &Top,
        range: Range<FileBlock>,
        mut visit: impl FnMut(Extent) -> ControlFlow<()>,
    ) -> Result<(), M::Error> {
        let before = self.tree.floor(io, top, range.start.0, |key, value| {
            ExtentValue::parse(key, value).map_err(Fault::from)
        })?;
        let mut lowest = FileBlock(0);
        if let Some(extent) = before.filter(|extent| extent.end() > range.start) {
            lowest = extent.end();
            if visit(extent).is_break() {
                return Ok(());
            }
        }
        let from = lowest.max(range.start);
        self.tree.scan(io, top, from.0..range.end.0, |leaf, key, value| {
            let extent = ExtentValue::parse(key, value).map_err(|fault| self.tree.corrupt(leaf, fault))?;
            if extent.file_block < lowest {
                return Err(self.tree.corrupt(leaf, Fault::Overlap(key)).into());
            }
            lowest = extent.end();
            Ok(visit(extent))
        })
    }

    /// Returns the first extents of `range`, clipped to it, at most `max`.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn extents<M: MetaRead>(
        &self,
        io: &M,
        root: &TreeRoot,
        range: Range<FileBlock>,
        max: usize,
    ) -> Result<Vec<Extent>, M::Error> {
        let mut found = Vec::new();
        if max == 0 {
            return Ok(found);
        }
        self.for_each(io, root, range.clone(), |extent| {
            found.extend(extent.clip(range.start, range.end));
            if found.len() < max {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        })?;
        Ok(found)
    }

    /// Unmaps `range` and maps `new`, ascending extents within it, instead. Returns the unmapped runs in the
    /// order of the file, including blocks that `new` maps again. The caller decides which blocks are free to
    /// be used again, and when.
    ///
    /// # Errors
    /// [`TreeError::BadExtent`] and [`TreeError::BadOrder`] with nothing changed; corruption, and the errors
    /// of `io`.
    pub fn replace<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
        new: &[Extent],
    ) -> Result<Vec<Run>, M::Error> {
        check_new(&range, new)?;
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let splice = self.splice(io, root, &range, new)?;
        self.apply(io, root, &splice)?;
        Ok(splice.freed.iter().map(Run::from).collect())
    }

    /// Unmaps `range`. Returns the unmapped runs.
    ///
    /// # Errors
    /// As [`replace`](Self::replace).
    pub fn remove<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
    ) -> Result<Vec<Run>, M::Error> {
        self.replace(io, root, range, &[])
    }

    /// Unmaps at most the first `max` extents of `range`; for ranges of any size, one transaction after the
    /// other.
    ///
    /// # Errors
    /// As [`replace`](Self::replace).
    pub fn remove_some<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
        max: usize,
    ) -> Result<(Vec<Run>, Progress), M::Error> {
        let mut first = self.extents(io, root, range.clone(), max.saturating_add(1))?;
        let progress = if first.len() > max {
            first.truncate(max);
            Progress::More
        } else {
            Progress::Done
        };
        let Some(last) = first.last() else {
            return Ok((Vec::new(), progress));
        };
        let runs = self.remove(io, root, range.start..last.end())?;
        Ok((runs, progress))
    }

    /// Unmaps all from `from` on. For files with many extents use [`remove_some`](Self::remove_some).
    ///
    /// # Errors
    /// As [`replace`](Self::replace).
    pub fn truncate<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        from: FileBlock,
    ) -> Result<Vec<Run>, M::Error> {
        self.remove(io, root, from..FileBlock(FILE_BLOCKS_MAX))
    }

    /// Clears `UNWRITTEN` in `range`; the blocks stay where they are.
    ///
    /// # Errors
    /// As [`replace`](Self::replace).
    pub fn mark_written<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
    ) -> Result<(), M::Error> {
        let mut written = self.extents(io, root, range.clone(), usize::MAX)?;
        for extent in &mut written {
            extent.flags.remove(ExtentFlags::UNWRITTEN);
        }
        self.replace(io, root, range, &written).map(|_| ())
    }

    /// Maps `range` to the run at `to`, flags unchanged, and returns true, if all of it lies in one run that
    /// begins at `from`; else changes nothing and returns false (the mapping changed while the data was being
    /// copied). The caller decides what happens to the old blocks and, if the result is true, to the new
    /// ones.
    ///
    /// # Errors
    /// As [`replace`](Self::replace).
    pub fn remap<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        range: Range<FileBlock>,
        from: (Tier, BlockNo),
        to: (Tier, BlockNo),
    ) -> Result<bool, M::Error> {
        let mut extents = self.extents(io, root, range.clone(), usize::MAX)?;
        let mut next = range.start;
        for extent in &mut extents {
            let distance = extent.file_block.0 - range.start.0;
            let expected = from.1.0.checked_add(distance);
            if extent.file_block != next || extent.tier != from.0 || Some(extent.block.0) != expected {
                return Ok(false);
            }
            next = extent.end();
            extent.tier = to.0;
            extent.block = BlockNo(to.1.0.saturating_add(distance));
        }
        if range.is_empty() || next != range.end {
            return Ok(false);
        }
        self.replace(io, root, range, &extents).map(|_| true)
    }

    /// Demotes the tree's nodes to slower tiers, as long as `more` returns true. Returns the root to be
    /// stored.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn demote<M: MetaIo>(
        &self,
        io: &mut M,
        root: &TreeRoot,
        more: &mut dyn FnMut(&mut M) -> bool,
    ) -> Result<TreeRoot, M::Error> {
        match self.form(root)? {
            TreeForm::Inline(_) => Ok(*root),
            TreeForm::Nodes(mut top, counts) => {
                self.tree.demote(io, &mut top, more)?;
                Ok(TreeRoot::nodes(&top, &counts))
            }
        }
    }

    /// Promotes the tree's nodes that `recall` wants, and those above them. Returns the root to be stored.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn recall<M: MetaIo>(
        &self,
        io: &mut M,
        root: &TreeRoot,
        recall: &mut Recall<'_, M>,
    ) -> Result<TreeRoot, M::Error> {
        match self.form(root)? {
            TreeForm::Inline(_) => Ok(*root),
            TreeForm::Nodes(mut top, counts) => {
                self.tree.recall(io, &mut top, recall)?;
                Ok(TreeRoot::nodes(&top, &counts))
            }
        }
    }

    /// Returns whether no node of the tree is in NVM.
    ///
    /// # Errors
    /// The root is corrupt.
    pub fn is_away(&self, root: &TreeRoot) -> Result<bool, TreeError> {
        Ok(match self.form(root)? {
            TreeForm::Inline(_) => true,
            TreeForm::Nodes(top, _) => top.block.is_cold(),
        })
    }

    /// Returns the number of extents, and of mapped blocks on each tier.
    ///
    /// # Errors
    /// The root is corrupt.
    pub fn counts(&self, root: &TreeRoot) -> Result<TreeCounts, TreeError> {
        Ok(match self.form(root)? {
            TreeForm::Inline(extents) => count(&extents),
            TreeForm::Nodes(_, counts) => counts,
        })
    }

    /// Returns the number of blocks that the tree's nodes occupy.
    ///
    /// # Errors
    /// The root is corrupt.
    pub fn node_blocks(&self, root: &TreeRoot) -> Result<u32, TreeError> {
        Ok(match self.form(root)? {
            TreeForm::Inline(_) => 0,
            TreeForm::Nodes(top, _) => top.nodes,
        })
    }

    /// Unmaps at most `max` extents, from the end of the file, and frees the nodes that they leave. Goes on
    /// from the root as it is; `Done` when the tree is empty. Each call with `max > 0` makes progress and
    /// touches one leaf for each 144 extents.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn free_some<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        max: usize,
    ) -> Result<(Vec<Run>, Progress), M::Error> {
        let (mut top, mut counts) = match self.form(root)? {
            TreeForm::Inline(mut extents) => {
                let taken = extents.split_off(extents.len().saturating_sub(max));
                *root = TreeRoot::inline(&extents).unwrap_or_default();
                return Ok((taken.iter().map(Run::from).collect(), progress(root)));
            }
            TreeForm::Nodes(top, counts) => (top, counts),
        };
        let mut runs = Vec::new();
        while runs.len() < max && top.height > 0 {
            let at = top.block;
            for (key, value) in self.tree.take_last(io, &mut top, max - runs.len())? {
                let extent = ExtentValue::parse(key, &value).map_err(|fault| self.tree.corrupt(at, fault))?;
                counts.sub(&extent);
                runs.push(Run::from(&extent));
            }
        }
        *root = if top.height == 0 {
            TreeRoot::EMPTY
        } else {
            TreeRoot::nodes(&top, &counts)
        };
        Ok((runs, progress(root)))
    }

    /// Walks the whole tree: reports every node and every fault to `visitor`, and every sound extent to
    /// `on_extent`. Reads each node once; memory grows with the number of nodes.
    pub fn check<M: MetaRead>(
        &self,
        io: &M,
        root: &TreeRoot,
        visitor: &mut impl CheckVisitor<M::Error>,
        mut on_extent: impl FnMut(Extent),
    ) {
        let (top, counted) = match self.form(root) {
            Ok(TreeForm::Inline(extents)) => return extents.into_iter().for_each(on_extent),
            Ok(TreeForm::Nodes(top, counts)) => (top, counts),
            Err(error) => return visitor.fault(error),
        };
        let mut found = TreeCounts::default();
        let mut lowest = FileBlock(0);
        let sound = self.tree.walk(io, &top, visitor, |_, _, key, value| {
            let extent = ExtentValue::parse(key, value)?;
            if extent.file_block < lowest {
                return Err(Fault::Overlap(key));
            }
            lowest = extent.end();
            found.add(&extent);
            on_extent(extent);
            Ok(())
        });
        if !sound {
            return;
        }
        let pairs = [
            ("extents", counted.extents, found.extents),
            ("blocks on nvm", counted.mapped[0], found.mapped[0]),
            ("blocks on ssd", counted.mapped[1], found.mapped[1]),
            ("blocks on hdd", counted.mapped[2], found.mapped[2]),
            ("shared blocks", counted.shared, found.shared),
        ];
        for (what, counted, found) in pairs.into_iter().filter(|(_, counted, found)| counted != found) {
            visitor.fault(self.tree.bad_root(Fault::Count { what, counted, found }));
        }
    }

    /// Reads the extents in and next to `range` and computes those after the change.
    fn splice<M: MetaRead>(
        &self,
        io: &M,
        root: &TreeRoot,
        range: &Range<FileBlock>,
        new: &[Extent],
    ) -> Result<Splice, M::Error> {
        // One block more on each side: neighbours may join.
        let start = FileBlock(range.start.0.saturating_sub(1));
        let end = FileBlock(range.end.0.saturating_add(1));
        let mut old = Vec::new();
        self.for_each(io, root, start..end, |extent| {
            old.push(extent);
            ControlFlow::Continue(())
        })?;
        Ok(Splice::new(old, range, new))
    }

    fn apply<M: MetaIo>(&self, io: &mut M, root: &mut TreeRoot, splice: &Splice) -> Result<(), M::Error> {
        let (mut top, mut counts) = match self.form(root)? {
            TreeForm::Inline(mut extents) => {
                splice.apply_to(&mut extents);
                if let Some(inline) = TreeRoot::inline(&extents) {
                    *root = inline;
                    return Ok(());
                }
                return self.spill(io, root, &extents);
            }
            TreeForm::Nodes(top, counts) => (top, counts),
        };
        for extent in &splice.old {
            counts.sub(extent);
        }
        for extent in &splice.new {
            counts.add(extent);
        }
        for extent in splice.removed() {
            self.tree.remove(io, &mut top, extent.file_block.0)?;
        }
        for extent in splice.changed() {
            let value = ExtentValue::encode(extent);
            self.tree
                .set(io, &mut top, extent.file_block.0, value.as_bytes())?;
        }
        for extent in splice.inserted() {
            self.insert(io, &mut top, extent)?;
        }
        *root = self.settle(io, top, &counts)?;
        Ok(())
    }

    fn insert<M: MetaIo>(&self, io: &mut M, top: &mut Top, extent: &Extent) -> Result<(), M::Error> {
        let value = ExtentValue::encode(extent);
        self.tree.insert(io, top, extent.file_block.0, value.as_bytes())
    }

    /// Moves extents that no longer fit in the inode to nodes.
    fn spill<M: MetaIo>(&self, io: &mut M, root: &mut TreeRoot, extents: &[Extent]) -> Result<(), M::Error> {
        let mut top = Top::default();
        for extent in extents {
            self.insert(io, &mut top, extent)?;
        }
        *root = TreeRoot::nodes(&top, &count(extents));
        Ok(())
    }

    /// Returns the root after a change; moves the extents back into the inode when few are left.
    fn settle<M: MetaIo>(&self, io: &mut M, top: Top, counts: &TreeCounts) -> Result<TreeRoot, M::Error> {
        if top.height == 0 {
            return Ok(TreeRoot::EMPTY);
        }
        if top.height > 1 || counts.extents > INLINE_AGAIN {
            return Ok(TreeRoot::nodes(&top, counts));
        }
        let extents = self.tree.view(io, top.block, 0, |node| {
            (0..node.count())
                .map(|index| {
                    let (key, value) = node.record(index)?;
                    Ok(ExtentValue::parse(key, value)?)
                })
                .collect::<Result<Vec<Extent>, Fault>>()
        })?;
        match TreeRoot::inline(&extents) {
            Some(root) => io.free(top.block).map(|()| root),
            None => Ok(TreeRoot::nodes(&top, counts)),
        }
    }
}

fn count(extents: &[Extent]) -> TreeCounts {
    let mut counts = TreeCounts::default();
    extents.iter().for_each(|extent| counts.add(extent));
    counts
}

fn progress(root: &TreeRoot) -> Progress {
    if root.is_empty() {
        Progress::Done
    } else {
        Progress::More
    }
}

/// Checks extents that a caller wants to map in `range`.
fn check_new(range: &Range<FileBlock>, new: &[Extent]) -> Result<(), TreeError> {
    let mut lowest = range.start;
    for extent in new {
        extent.validate().map_err(TreeError::BadExtent)?;
        if extent.file_block < lowest || extent.end() > range.end {
            return Err(TreeError::BadOrder(extent.file_block.0));
        }
        lowest = extent.end();
    }
    Ok(())
}
