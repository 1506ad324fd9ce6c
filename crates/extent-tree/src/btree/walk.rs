//! The walk of a whole tree for `fsck`. Continues after a fault, without the nodes below it.

use super::{BTree, KEY_END, parse_pointer};
use crate::{CheckVisitor, Fault, MetaRead};
use std::collections::HashSet;
use varve_format::{Block, BlockNo, NodeRef, Top};

/// A node still to be visited.
struct Pending {
    block: BlockNo,
    level: u8,
    lower: u64,
    upper: Option<u64>,
}

impl BTree {
    /// Visits every node once, in the order of keys, and passes the records of sound leaves to `on_record`.
    /// Returns whether the whole tree was read and is sound.
    pub(crate) fn walk<M: MetaRead, V: CheckVisitor<M::Error>>(
        &self,
        io: &M,
        top: &Top,
        visitor: &mut V,
        mut on_record: impl FnMut(&mut V, BlockNo, u64, &[u8]) -> Result<(), Fault>,
    ) -> bool {
        let mut seen = HashSet::new();
        let mut sound = true;
        let mut pending = Vec::new();
        if top.height > 0 {
            pending.push(Pending {
                block: top.block,
                level: top.height - 1,
                lower: 0,
                upper: None,
            });
        }
        while let Some(at) = pending.pop() {
            let bytes = match io.read(at.block, |bytes| *bytes) {
                Ok(bytes) => bytes,
                Err(error) => {
                    visitor.unreadable(at.block, error);
                    sound = false;
                    continue;
                }
            };
            let mut children = Vec::new();
            let result = if seen.insert(at.block) {
                self.walk_node(&bytes, &at, &mut children, visitor, &mut on_record)
            } else {
                Err(Fault::Shared)
            };
            if let Err(fault) = result {
                visitor.fault(self.corrupt(at.block, fault));
                sound = false;
            }
            pending.extend(children.into_iter().rev());
        }
        if sound && seen.len() as u64 != u64::from(top.nodes) {
            visitor.fault(self.bad_root(Fault::Count {
                what: "nodes",
                counted: u64::from(top.nodes),
                found: seen.len() as u64,
            }));
            return false;
        }
        sound
    }

    fn walk_node<E, V: CheckVisitor<E>>(
        &self,
        bytes: &Block,
        at: &Pending,
        children: &mut Vec<Pending>,
        visitor: &mut V,
        on_record: &mut impl FnMut(&mut V, BlockNo, u64, &[u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let node = self.open(bytes, at.block, at.level)?;
        visitor.block(at.block, self.kind(at.level));
        node.check()?;
        check_bounds(&node, at)?;
        for index in 0..node.count() {
            let (key, value) = node.record(index)?;
            if at.level == 0 {
                on_record(visitor, at.block, key, value)?;
                continue;
            }
            let upper = match index + 1 {
                next if next < node.count() => Some(node.key(next)?),
                _ => at.upper,
            };
            children.push(Pending {
                block: parse_pointer(value)?,
                level: at.level - 1,
                lower: key.max(at.lower),
                upper,
            });
        }
        Ok(())
    }
}

/// Checks the first and the last key (`NodeRef::check` has checked the order between).
fn check_bounds(node: &NodeRef<'_>, at: &Pending) -> Result<(), Fault> {
    let (first, last) = (node.key(0)?, node.count() - 1);
    let lowest = if at.level > 0 { 0 } else { at.lower };
    if first < lowest || (at.level > 0 && first != 0) {
        return Err(Fault::Order { index: 0, key: first });
    }
    // The first key of an inner node is always 0, so the second is the first separator to check.
    if at.level > 0 && last > 0 && node.key(1)? <= at.lower {
        return Err(Fault::Order {
            index: 1,
            key: node.key(1)?,
        });
    }
    let key = node.key(last)?;
    if key >= KEY_END || (last > 0 || at.level == 0) && at.upper.is_some_and(|upper| key >= upper) {
        return Err(Fault::Order { index: last, key });
    }
    Ok(())
}
