//! Demotion of nodes to slower tiers, and their promotion back to NVM to be changed. Distinguishes only NVM
//! from all other tiers.
//!
//! Children are demoted before their parents, and parents are promoted before their children: all nodes below
//! a demoted node are demoted.

use super::{BTree, Place, Step, parse_pointer, pointer};
use crate::MetaIo;
use varve_format::{BlockNo, Top};

/// Returns whether a block on the path to a leaf, or the leaf itself, is demoted.
pub(super) fn is_cold(steps: &[Step], place: &Place) -> bool {
    place.leaf.is_cold() || steps.iter().any(|step| step.block.is_cold())
}

impl BTree {
    /// Promotes the demoted blocks of a path, from the root down; `steps` begin above the leaf.
    pub(super) fn promote_path<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        steps: &mut [Step],
        place: &mut Place,
    ) -> Result<(), M::Error> {
        if !is_cold(steps, place) {
            return Ok(());
        }
        let mut above = None;
        for step in steps.iter_mut().rev() {
            step.block = self.promote(io, top, above, step.block)?;
            above = Some(*step);
        }
        place.leaf = self.promote(io, top, above, place.leaf)?;
        Ok(())
    }

    /// Promotes one block, to which `above` (or the root) points.
    fn promote<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        above: Option<Step>,
        block: BlockNo,
    ) -> Result<BlockNo, M::Error> {
        if !block.is_cold() {
            return Ok(block);
        }
        let new = io.promote(block)?;
        match above {
            Some(step) => self.edit(io, step.block, |node| node.set_value(step.index, &pointer(new)))?,
            None => top.block = new,
        }
        Ok(new)
    }

    /// Demotes the nodes of the tree that are in NVM, as long as `more` returns true, except those that `io`
    /// keeps there.
    pub(crate) fn demote<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        more: &mut dyn FnMut(&mut M) -> bool,
    ) -> Result<(), M::Error> {
        if top.height > 0 && !top.block.is_cold() {
            top.block = self.demote_below(io, top.block, top.height - 1, more)?;
        }
        Ok(())
    }

    /// As [`demote`](Self::demote), for one node and all below it. Returns its new block number, or its old
    /// one if it stays.
    fn demote_below<M: MetaIo>(
        &self,
        io: &mut M,
        block: BlockNo,
        level: u8,
        more: &mut dyn FnMut(&mut M) -> bool,
    ) -> Result<BlockNo, M::Error> {
        let mut stays = false;
        if let Some(below) = level.checked_sub(1) {
            let children = self.view(io, block, level, |node| {
                (0..node.count())
                    .map(|index| parse_pointer(node.record(index)?.1))
                    .collect::<Result<Vec<_>, _>>()
            })?;
            for (index, child) in children.into_iter().enumerate() {
                if child.is_cold() {
                    continue;
                }
                if !more(io) {
                    return Ok(block);
                }
                let new = self.demote_below(io, child, below, more)?;
                if new != child {
                    self.edit(io, block, |node| node.set_value(index, &pointer(new)))?;
                }
                stays |= !new.is_cold();
            }
        } else {
            // Checks that the block is a leaf of this tree before it is demoted.
            self.view(io, block, 0, |_| Ok(()))?;
        }
        if stays || !more(io) {
            return Ok(block);
        }
        Ok(io.demote(block)?.unwrap_or(block))
    }
}
