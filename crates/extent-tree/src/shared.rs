//! The tree of the shared runs: where runs of blocks lie that extents of several files name, and how many
//! extents name each. Moves and reads no data, and does not know which files these are.
//!
//! # Invariants
//! - Runs do not overlap. A number of the shared space that an extent names lies in a run.
//! - The count of a run is the number of extents that name each of its blocks: a run is cut where an extent
//!   begins or ends, and joins a neighbour of the same count that follows it on the tier.
//! - A run that no extent names is not in the tree.

#[cfg(test)]
mod tests;

use crate::btree::{BTree, KEY_END};
use crate::{CheckVisitor, Fault, MetaIo, MetaRead, TreeError};
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use varve_format::{BlockKind, BlockNo, Ino, SHARED_REFS_MAX, SharedRoot, SharedRun, SharedValue, Tier, Top};
use zerocopy::IntoBytes;

/// The tree of the shared runs of a pool. The root, a part of the pool state, is passed in; functions that
/// take it as `&mut` leave it as it must be stored in the same transaction.
#[derive(Debug, Clone, Copy)]
pub struct SharedRuns {
    tree: BTree,
}

impl Default for SharedRuns {
    fn default() -> Self {
        Self::new()
    }
}

impl SharedRuns {
    /// The tree of the pool.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            tree: BTree {
                owner: Ino(0),
                leaf: BlockKind::SharedLeaf,
                node: BlockKind::SharedNode,
            },
        }
    }

    fn top(&self, root: &SharedRoot) -> Result<Top, TreeError> {
        root.top().map_err(|fault| self.tree.bad_root(fault))
    }

    /// Calls `visit` with each run that overlaps the range, whole, ascending, until it breaks.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn for_each<M: MetaRead>(
        &self,
        io: &M,
        root: &SharedRoot,
        range: Range<u64>,
        mut visit: impl FnMut(SharedRun) -> ControlFlow<()>,
    ) -> Result<(), M::Error> {
        let top = self.top(root)?;
        if range.is_empty() || top.height == 0 {
            return Ok(());
        }
        let before = self.tree.floor(io, &top, range.start, |key, value| {
            SharedValue::parse(key, value).map_err(Fault::from)
        })?;
        let mut lowest = 0;
        if let Some(run) = before.filter(|run| run.end() > range.start) {
            lowest = run.end();
            if visit(run).is_break() {
                return Ok(());
            }
        }
        let from = lowest.max(range.start);
        self.tree.scan(io, &top, from..range.end, |leaf, key, value| {
            let run = SharedValue::parse(key, value).map_err(|fault| self.tree.corrupt(leaf, fault))?;
            if run.first < lowest {
                return Err(self.tree.corrupt(leaf, Fault::Overlap(key)).into());
            }
            lowest = run.end();
            Ok(visit(run))
        })
    }

    /// The first runs of the range, clipped to it, at most `max`. They must cover all of it up to the end of
    /// the last.
    ///
    /// # Errors
    /// [`Fault::NoRun`] for a number in no run; other corruption, and the errors of `io`.
    pub fn runs<M: MetaRead>(
        &self,
        io: &M,
        root: &SharedRoot,
        range: Range<u64>,
        max: usize,
    ) -> Result<Vec<SharedRun>, M::Error> {
        let mut found: Vec<SharedRun> = Vec::new();
        if max == 0 || range.is_empty() {
            return Ok(found);
        }
        self.for_each(io, root, range.clone(), |run| {
            found.extend(run.clip(range.start, range.end));
            if found.len() < max {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        })?;
        let mut next = range.start;
        for run in &found {
            if run.first != next {
                return Err(self.tree.bad_root(Fault::NoRun(next)).into());
            }
            next = run.end();
        }
        if next < range.end && found.len() < max {
            return Err(self.tree.bad_root(Fault::NoRun(next)).into());
        }
        Ok(found)
    }

    /// Adds a run whose numbers were never given.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn add<M: MetaIo>(&self, io: &mut M, root: &mut SharedRoot, run: &SharedRun) -> Result<(), M::Error> {
        let before = run.first.saturating_sub(1);
        let old = self.around(io, root, before..run.end().saturating_add(1))?;
        let mut new = old.clone();
        new.push(*run);
        self.store(io, root, &old, new)
    }

    /// One more extent names these numbers.
    ///
    /// # Errors
    /// [`TreeError::References`] at the most that a run can have; [`Fault::NoRun`] for a number in no run;
    /// other corruption, and the errors of `io`. Nothing is changed then.
    pub fn reference<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut SharedRoot,
        range: Range<u64>,
    ) -> Result<(), M::Error> {
        self.change(io, root, range, |run| {
            if run.refs == SHARED_REFS_MAX {
                return Err(TreeError::References(run.first));
            }
            Ok(Some(SharedRun {
                refs: run.refs + 1,
                ..run
            }))
        })
        .map(drop)
    }

    /// One extent less names these numbers. Returns the parts that no extent names any more, which are not in
    /// the tree any more.
    ///
    /// # Errors
    /// [`Fault::NoRun`] for a number in no run; other corruption, and the errors of `io`.
    pub fn release<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut SharedRoot,
        range: Range<u64>,
    ) -> Result<Vec<SharedRun>, M::Error> {
        let old = self.change(io, root, range, |run| {
            Ok((run.refs > 1).then(|| SharedRun {
                refs: run.refs - 1,
                ..run
            }))
        })?;
        Ok(old.into_iter().filter(|run| run.refs == 1).collect())
    }

    /// If all of the range lies in one run of blocks that begins at `from`, lets it lie at `to`, and returns
    /// true; else changes nothing and returns false.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn relocate<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut SharedRoot,
        range: Range<u64>,
        from: (Tier, BlockNo),
        to: (Tier, BlockNo),
    ) -> Result<bool, M::Error> {
        let lies = |run: &SharedRun, at: (Tier, BlockNo)| {
            (run.tier, run.block.0) == (at.0, at.1.0.saturating_add(run.first - range.start))
        };
        let covers = |run: &SharedRun| lies(run, from);
        let mut next = range.start;
        let mut all = true;
        self.for_each(io, root, range.clone(), |run| {
            if let Some(run) = run.clip(range.start, range.end) {
                all &= run.first == next && covers(&run);
                next = run.end();
            }
            if all {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        })?;
        if !all || next != range.end || range.is_empty() {
            return Ok(false);
        }
        let start = range.start;
        self.change(io, root, range, |run| {
            Ok(Some(SharedRun {
                tier: to.0,
                block: BlockNo(to.1.0.saturating_add(run.first - start)),
                ..run
            }))
        })?;
        Ok(true)
    }

    /// Walks the whole tree: tells `visitor` of every node and every fault, and `on_run` of every sound run.
    pub fn check<M: MetaRead>(
        &self,
        io: &M,
        root: &SharedRoot,
        visitor: &mut impl CheckVisitor<M::Error>,
        mut on_run: impl FnMut(SharedRun),
    ) {
        let top = match self.top(root) {
            Ok(top) => top,
            Err(error) => return visitor.fault(error),
        };
        if top.height == 0 {
            return;
        }
        let (mut lowest, mut found) = (0, 0);
        let sound = self.tree.walk(io, &top, visitor, |_, _, key, value| {
            let run = SharedValue::parse(key, value)?;
            if run.first < lowest {
                return Err(Fault::Overlap(key));
            }
            lowest = run.end();
            found += 1;
            on_run(run);
            Ok(())
        });
        if sound && found != root.runs() {
            visitor.fault(self.tree.bad_root(Fault::Count {
                what: "shared runs",
                counted: root.runs(),
                found,
            }));
        }
    }

    /// Runs in the range, whole.
    fn around<M: MetaRead>(
        &self,
        io: &M,
        root: &SharedRoot,
        range: Range<u64>,
    ) -> Result<Vec<SharedRun>, M::Error> {
        let mut found = Vec::new();
        self.for_each(io, root, range, |run| {
            found.push(run);
            ControlFlow::Continue(())
        })?;
        Ok(found)
    }

    /// Replaces each part of the range by what `f` makes of it; `None`: it goes. Returns the parts as they
    /// were.
    fn change<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut SharedRoot,
        range: Range<u64>,
        mut f: impl FnMut(SharedRun) -> Result<Option<SharedRun>, TreeError>,
    ) -> Result<Vec<SharedRun>, M::Error> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        // One number more on each side: neighbours may join.
        let wide = range.start.saturating_sub(1)..range.end.saturating_add(1).min(KEY_END);
        let old = self.around(io, root, wide)?;
        let mut new = Vec::with_capacity(old.len() + 2);
        let mut parts = Vec::new();
        let mut next = range.start;
        for run in &old {
            new.extend(run.clip(0, range.start));
            if let Some(part) = run.clip(range.start, range.end) {
                if part.first != next {
                    break;
                }
                next = part.end();
                parts.push(part);
                new.extend(f(part)?);
            }
            new.extend(run.clip(range.end, run.end()));
        }
        if next != range.end {
            return Err(self.tree.bad_root(Fault::NoRun(next)).into());
        }
        self.store(io, root, &old, new)?;
        Ok(parts)
    }

    /// Lets the tree hold `new` where it held `old`, neighbours joined.
    fn store<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut SharedRoot,
        old: &[SharedRun],
        mut new: Vec<SharedRun>,
    ) -> Result<(), M::Error> {
        new.sort_unstable_by_key(|run| run.first);
        new.dedup_by(|next, last| {
            let joins = last.joins(next);
            if joins {
                last.len += next.len;
            }
            joins
        });
        let mut top = self.top(root)?;
        let mut count = root.runs();
        let mut left: BTreeMap<u64, &SharedRun> = old.iter().map(|run| (run.first, run)).collect();
        let mut added = Vec::new();
        for run in &new {
            match left.remove(&run.first) {
                Some(before) if before == run => {}
                Some(_) => {
                    let value = SharedValue::encode(run);
                    self.tree.set(io, &mut top, run.first, value.as_bytes())?;
                }
                None => added.push(run),
            }
        }
        for first in left.into_keys() {
            self.tree.remove(io, &mut top, first)?;
            count = count.saturating_sub(1);
        }
        for run in added {
            let value = SharedValue::encode(run);
            self.tree.insert(io, &mut top, run.first, value.as_bytes())?;
            count = count.saturating_add(1);
        }
        *root = if top.height == 0 {
            SharedRoot::default()
        } else {
            SharedRoot::new(&top, count)
        };
        Ok(())
    }
}
