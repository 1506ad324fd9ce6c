//! A B+tree of records with 64-bit keys, changed in place; the basis of the extent trees and the name
//! indexes. Does not interpret the records.
//!
//! The first key of an inner node is always 0 and stands for the node's own lower bound, so the loss of a
//! first child touches only its parent. Leaves have no links to each other: an iteration descends again by
//! the next separator, and so a change never has to touch a neighbour. A node that is less than a quarter
//! full joins a neighbour if both then fill at most three quarters of one; empty nodes are freed at once.

mod change;
mod demotion;
mod recall;
mod walk;

pub use recall::Recall;

use crate::{Fault, MetaIo, MetaRead, TreeError};
use std::ops::{ControlFlow, Range};
use varve_format::{Block, BlockHeader, BlockKind, BlockNo, Ino, NodeFault, NodeMut, NodeRef, Top};

/// Keys stay below this.
pub(crate) const KEY_END: u64 = 1 << 63;

/// A step of a descent through an inner node.
#[derive(Clone, Copy)]
struct Step {
    block: BlockNo,
    index: usize,
}

/// The end of a descent: a leaf, and the range of keys that belong in it.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) leaf: BlockNo,
    pub(crate) lower: u64,
    pub(crate) upper: Option<u64>,
}

/// The owner of a tree, and the kinds of its blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BTree {
    pub(crate) owner: Ino,
    pub(crate) leaf: BlockKind,
    pub(crate) node: BlockKind,
}

const fn pointer(block: BlockNo) -> [u8; 8] {
    block.0.to_le_bytes()
}

fn parse_pointer(value: &[u8]) -> Result<BlockNo, Fault> {
    let word: [u8; 8] = value.try_into().map_err(|_| Fault::Pointer(value.len() as u64))?;
    let block = BlockNo(u64::from_le_bytes(word));
    match block.home() {
        Some(_) => Ok(block),
        None => Err(Fault::Pointer(block.0)),
    }
}

impl BTree {
    pub(crate) fn corrupt(&self, block: BlockNo, fault: impl Into<Fault>) -> TreeError {
        TreeError::Corrupt {
            owner: self.owner,
            block,
            fault: fault.into(),
        }
    }

    pub(crate) fn bad_root(&self, fault: impl Into<Fault>) -> TreeError {
        TreeError::Root {
            owner: self.owner,
            fault: fault.into(),
        }
    }

    const fn kind(&self, level: u8) -> BlockKind {
        if level == 0 { self.leaf } else { self.node }
    }

    fn open<'a>(&self, bytes: &'a Block, block: BlockNo, level: u8) -> Result<NodeRef<'a>, Fault> {
        BlockHeader::of(bytes).expect(self.kind(level), self.owner, block)?;
        let node = NodeRef::open(bytes)?;
        if node.level() != level {
            return Err(Fault::Level {
                found: node.level(),
                expected: level,
            });
        }
        if node.count() == 0 {
            return Err(Fault::Empty);
        }
        Ok(node)
    }

    /// Reads the node `block`, which must be one of this tree at `level`.
    pub(crate) fn view<M: MetaRead, R>(
        &self,
        io: &M,
        block: BlockNo,
        level: u8,
        f: impl FnOnce(NodeRef<'_>) -> Result<R, Fault>,
    ) -> Result<R, M::Error> {
        let result = io.read(block, |bytes| self.open(bytes, block, level).and_then(f))?;
        result.map_err(|fault| self.corrupt(block, fault).into())
    }

    /// Changes a node that [`view`](Self::view) has accepted.
    fn edit<M: MetaIo, R>(
        &self,
        io: &mut M,
        block: BlockNo,
        f: impl FnOnce(&mut NodeMut<'_>) -> Result<R, NodeFault>,
    ) -> Result<R, M::Error> {
        let result = io.update(block, |bytes| {
            NodeMut::open(bytes).and_then(|mut node| f(&mut node))
        })?;
        result.map_err(|fault| self.corrupt(block, fault).into())
    }

    /// Goes down to the leaf where `key` belongs; `top.height` is at least 1.
    fn descend<M: MetaRead>(
        &self,
        io: &M,
        top: &Top,
        key: u64,
        mut on_step: impl FnMut(Step),
    ) -> Result<Place, M::Error> {
        let mut place = Place {
            leaf: top.block,
            lower: 0,
            upper: None,
        };
        for level in (1..top.height).rev() {
            let block = place.leaf;
            let (index, next) = self.view(io, block, level, |node| step_down(&node, key, place))?;
            on_step(Step { block, index });
            place = next;
        }
        Ok(place)
    }

    /// Finds the leaf where `key` belongs.
    pub(crate) fn seek<M: MetaRead>(&self, io: &M, top: &Top, key: u64) -> Result<Place, M::Error> {
        self.descend(io, top, key, |_| ())
    }

    /// Returns the last record with a key not above `key`, passed through `f`.
    pub(crate) fn floor<M: MetaRead, R>(
        &self,
        io: &M,
        top: &Top,
        key: u64,
        f: impl Fn(u64, &[u8]) -> Result<R, Fault>,
    ) -> Result<Option<R>, M::Error> {
        if top.height == 0 {
            return Ok(None);
        }
        let mut key = key;
        // A leaf may have lost its first records, so the answer can be the last record of the leaf before; no
        // leaf is empty.
        for _ in 0..2 {
            let place = self.seek(io, top, key)?;
            let found = self.view(io, place.leaf, 0, |node| {
                match node.lower_bound(key.saturating_add(1))? {
                    0 => Ok(None),
                    n => node
                        .record(n - 1)
                        .map_err(Fault::from)
                        .and_then(|(key, value)| f(key, value).map(Some)),
                }
            })?;
            match place.lower.checked_sub(1) {
                Some(before) if found.is_none() => key = before,
                _ => return Ok(found),
            }
        }
        let place = self.seek(io, top, key)?;
        Err(self.corrupt(place.leaf, Fault::Empty).into())
    }

    /// Calls `visit` with the records whose keys are in `range`, ascending, until it breaks. The leaf is
    /// being read meanwhile.
    pub(crate) fn scan<M: MetaRead>(
        &self,
        io: &M,
        top: &Top,
        range: Range<u64>,
        mut visit: impl FnMut(BlockNo, u64, &[u8]) -> Result<ControlFlow<()>, M::Error>,
    ) -> Result<(), M::Error> {
        if top.height == 0 {
            return Ok(());
        }
        let mut from = range.start;
        while from < range.end {
            let place = self.seek(io, top, from)?;
            let flow = io.read(place.leaf, |bytes| {
                self.scan_leaf::<M>(bytes, place, from..range.end, &mut visit)
            })??;
            match place.upper {
                Some(upper) if flow.is_continue() => from = upper,
                _ => return Ok(()),
            }
        }
        Ok(())
    }

    /// As [`scan`](Self::scan), for one leaf. Breaks behind the range, too.
    fn scan_leaf<M: MetaRead>(
        &self,
        bytes: &Block,
        place: Place,
        range: Range<u64>,
        visit: &mut impl FnMut(BlockNo, u64, &[u8]) -> Result<ControlFlow<()>, M::Error>,
    ) -> Result<ControlFlow<()>, M::Error> {
        let corrupt = |fault: Fault| self.corrupt(place.leaf, fault);
        let node = self.open(bytes, place.leaf, 0).map_err(corrupt)?;
        let first = node
            .lower_bound(range.start)
            .map_err(|fault| corrupt(fault.into()))?;
        let mut lowest = range.start.max(place.lower);
        for index in first..node.count() {
            let (key, value) = node.record(index).map_err(|fault| corrupt(fault.into()))?;
            if key < lowest || place.upper.is_some_and(|upper| key >= upper) || key >= KEY_END {
                return Err(corrupt(Fault::Order { index, key }).into());
            }
            lowest = key + 1;
            if key >= range.end || visit(place.leaf, key, value)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Descends one level: returns the index of the record of `node` that leads to `key`, and the child with its
/// bounds.
fn step_down(node: &NodeRef<'_>, key: u64, bounds: Place) -> Result<(usize, Place), Fault> {
    let index = node.lower_bound(key.saturating_add(1))?.saturating_sub(1);
    let (separator, value) = node.record(index)?;
    let upper = if index + 1 < node.count() {
        let next = node.key(index + 1)?;
        if next <= bounds.lower || bounds.upper.is_some_and(|upper| next >= upper) {
            return Err(Fault::Order {
                index: index + 1,
                key: next,
            });
        }
        Some(next)
    } else {
        bounds.upper
    };
    let lower = match index {
        0 if separator == 0 => bounds.lower,
        0 => {
            return Err(Fault::Order {
                index,
                key: separator,
            });
        }
        _ if separator <= bounds.lower || upper.is_some_and(|upper| separator >= upper) => {
            return Err(Fault::Order {
                index,
                key: separator,
            });
        }
        _ => separator,
    };
    let place = Place {
        leaf: parse_pointer(value)?,
        lower,
        upper,
    };
    Ok((index, place))
}
