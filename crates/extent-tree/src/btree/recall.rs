//! Promotion of nodes that are to leave their tier.

use super::{BTree, parse_pointer, pointer};
use crate::MetaIo;
use varve_format::{BlockNo, Top};

/// Which demoted nodes come back to NVM, and how many at once.
pub struct Recall<'r, M> {
    /// Whether a block is to come back.
    pub wants: &'r dyn Fn(BlockNo) -> bool,
    /// Called before each block that comes back; returns whether to continue.
    pub more: &'r mut dyn FnMut(&mut M) -> bool,
}

impl BTree {
    /// Promotes the nodes that `recall` wants, and those above them, as long as it may.
    pub(crate) fn recall<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        recall: &mut Recall<'_, M>,
    ) -> Result<(), M::Error> {
        if top.height > 0 {
            top.block = self.recall_below(io, top.block, top.height - 1, recall)?;
        }
        Ok(())
    }

    /// As [`recall`](Self::recall), for one node and all below it. Returns its new block number, or its old
    /// one if it stays.
    fn recall_below<M: MetaIo>(
        &self,
        io: &mut M,
        block: BlockNo,
        level: u8,
        recall: &mut Recall<'_, M>,
    ) -> Result<BlockNo, M::Error> {
        let mut at = block;
        if (recall.wants)(block) {
            if !(recall.more)(io) {
                return Ok(block);
            }
            // Checks that the block is a node of this tree before it is moved.
            self.view(io, block, level, |_| Ok(()))?;
            at = io.promote(block)?;
        }
        let Some(below) = level.checked_sub(1) else {
            return Ok(at);
        };
        let children = self.view(io, at, level, |node| {
            (0..node.count())
                .map(|index| parse_pointer(node.record(index)?.1))
                .collect::<Result<Vec<_>, _>>()
        })?;
        for (index, child) in children.into_iter().enumerate() {
            let new = self.recall_below(io, child, below, recall)?;
            if new == child {
                continue;
            }
            if at.is_cold() {
                at = io.promote(at)?;
            }
            self.edit(io, at, |node| node.set_value(index, &pointer(new)))?;
        }
        Ok(at)
    }
}
