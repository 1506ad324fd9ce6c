//! Insertion and removal with split and merge. Refuses to know where the root is kept: the caller stores the
//! new [`Top`].

use super::demotion::is_cold;
use super::{BTree, KEY_END, Place, Step, parse_pointer, pointer};
use crate::{Fault, MetaIo, MetaRead, TreeError};
use varve_format::{
    BlockNo, NODE_CAPACITY, NodeFault, NodeMut, NodeRef, RECORD_OVERHEAD, TREE_HEIGHT_MAX, Top,
};

/// A record, copied out of its node.
pub(crate) type Record = (u64, Vec<u8>);

/// A node below this tries to join a neighbour.
const UNDERFULL: usize = NODE_CAPACITY / 4;
/// Two neighbours join if they fill no more than this.
const JOINED_MAX: usize = NODE_CAPACITY / 4 * 3;

/// How full a node is after a change.
struct Fill {
    count: usize,
    used_bytes: usize,
}

impl Fill {
    fn of(node: &NodeMut<'_>) -> Result<Self, NodeFault> {
        let view = node.view()?;
        Ok(Self {
            count: view.count(),
            used_bytes: view.used_bytes(),
        })
    }
}

fn records_from(node: &NodeRef<'_>, first: usize) -> Result<Vec<Record>, NodeFault> {
    (first..node.count())
        .map(|index| node.record(index).map(|(key, value)| (key, value.to_vec())))
        .collect()
}

/// Returns the point at which to split a node that has no room for a record of `new_bytes` at `position`: the
/// number of records, the new one included, that stay on the left. Appending keeps the left full, so that
/// ascending keys fill their nodes.
fn split_point(node: &NodeRef<'_>, position: usize, new_bytes: usize) -> Result<usize, NodeFault> {
    let count = node.count();
    if position == count {
        return Ok(count);
    }
    let mut sizes = Vec::with_capacity(count + 1);
    for index in 0..count {
        sizes.push(node.record(index)?.1.len() + RECORD_OVERHEAD);
    }
    sizes.insert(position.min(count), new_bytes);
    let total: usize = sizes.iter().sum();
    let (mut left, mut best) = (0, (usize::MAX, 1));
    for (index, size) in sizes.iter().enumerate().take(count) {
        left += size;
        best = best.min((left.abs_diff(total - left), index + 1));
    }
    Ok(best.1)
}

impl BTree {
    fn path<M: MetaRead>(&self, io: &M, top: &Top, key: u64) -> Result<(Vec<Step>, Place), M::Error> {
        let mut steps = Vec::with_capacity(usize::from(top.height));
        let place = self.descend(io, top, key, |step| steps.push(step))?;
        // Leaf first: the step at level n is `steps[n - 1]`.
        steps.reverse();
        Ok((steps, place))
    }

    fn new_node<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        near: Option<BlockNo>,
        level: u8,
        records: &[(u64, &[u8])],
    ) -> Result<BlockNo, M::Error> {
        let block = io.alloc(near, self.kind(level), self.owner)?;
        top.nodes = top.nodes.saturating_add(1);
        let filled = io.update(block, |bytes| {
            let mut node = NodeMut::init(bytes, level);
            (0..)
                .zip(records)
                .try_for_each(|(index, (key, value))| node.insert(index, *key, value))
        })?;
        filled.map_err(|fault| self.corrupt(block, fault))?;
        Ok(block)
    }

    fn free_node<M: MetaIo>(&self, io: &mut M, top: &mut Top, block: BlockNo) -> Result<(), M::Error> {
        top.nodes = top.nodes.saturating_sub(1);
        io.free(block)
    }

    /// Adds a record; `Exists` if its key is there. The value is at most a third of a node.
    pub(crate) fn insert<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        key: u64,
        value: &[u8],
    ) -> Result<(), M::Error> {
        debug_assert!(key < KEY_END && value.len() + RECORD_OVERHEAD <= NODE_CAPACITY / 3);
        if top.height == 0 {
            top.block = self.new_node(io, top, None, 0, &[(key, value)])?;
            top.height = 1;
            return Ok(());
        }
        let (mut steps, mut place) = self.path(io, top, key)?;
        // Checked before the path is promoted, so that a failed insertion moves no block.
        if is_cold(&steps, &place) && self.index_of(io, place.leaf, key)?.is_some() {
            return Err(TreeError::Exists.into());
        }
        self.promote_path(io, top, &mut steps, &mut place)?;
        let (mut block, mut level) = (place.leaf, 0);
        let (mut key, mut value) = (key, value.to_vec());
        while !self.put(io, block, level, key, &value)? {
            let (separator, right) = self.split(io, top, block, level, key, &value)?;
            level += 1;
            if level == top.height {
                return self.grow(io, top, separator, right);
            }
            let Some(step) = steps.get(usize::from(level) - 1) else {
                return Err(self.corrupt(block, Fault::Empty).into());
            };
            (block, key, value) = (step.block, separator, pointer(right).to_vec());
        }
        Ok(())
    }

    /// Puts a record in the node if there is room.
    fn put<M: MetaIo>(
        &self,
        io: &mut M,
        block: BlockNo,
        level: u8,
        key: u64,
        value: &[u8],
    ) -> Result<bool, M::Error> {
        let index = self.view(io, block, level, |node| {
            let index = node.lower_bound(key)?;
            let exists = index < node.count() && node.key(index)? == key;
            let room = node.used_bytes() + value.len() + RECORD_OVERHEAD <= NODE_CAPACITY;
            Ok((!exists).then_some(room.then_some(index)))
        })?;
        match index {
            None if level == 0 => Err(TreeError::Exists.into()),
            None => Err(self.corrupt(block, Fault::Order { index: 0, key }).into()),
            Some(None) => Ok(false),
            Some(Some(index)) => {
                self.edit(io, block, |node| node.insert(index, key, value))?;
                Ok(true)
            }
        }
    }

    /// Cuts a full node in two and puts the record in its half. Returns the right node and its lower bound.
    fn split<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        block: BlockNo,
        level: u8,
        key: u64,
        value: &[u8],
    ) -> Result<(u64, BlockNo), M::Error> {
        let (position, goes_right, stay, mut moved) = self.view(io, block, level, |node| {
            let position = node.lower_bound(key)?;
            let left = split_point(&node, position, value.len() + RECORD_OVERHEAD)?;
            let goes_right = position >= left;
            let stay = if goes_right { left } else { left - 1 };
            Ok((position, goes_right, stay, records_from(&node, stay)?))
        })?;
        if goes_right {
            moved.insert(position - stay, (key, value.to_vec()));
        }
        let Some(separator) = moved.first().map(|(key, _)| *key) else {
            return Err(self.corrupt(block, Fault::Empty).into());
        };
        let mut records: Vec<(u64, &[u8])> = moved
            .iter()
            .map(|(key, value)| (*key, value.as_slice()))
            .collect();
        if let (1.., Some(first)) = (level, records.first_mut()) {
            first.0 = 0;
        }
        let right = self.new_node(io, top, Some(block), level, &records)?;
        self.edit(io, block, |node| {
            node.truncate(stay)?;
            if goes_right {
                Ok(())
            } else {
                node.insert(position, key, value)
            }
        })?;
        Ok((separator, right))
    }

    fn grow<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        separator: u64,
        right: BlockNo,
    ) -> Result<(), M::Error> {
        if top.height >= TREE_HEIGHT_MAX {
            return Err(TreeError::TooHigh(self.owner).into());
        }
        let (low, high) = (pointer(top.block), pointer(right));
        let records = [(0, low.as_slice()), (separator, high.as_slice())];
        let near = Some(top.block);
        top.block = self.new_node(io, top, near, top.height, &records)?;
        top.height += 1;
        Ok(())
    }

    /// Overwrites the value of the record with `key` by one of the same length; `NotFound` if there is none.
    pub(crate) fn set<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        key: u64,
        value: &[u8],
    ) -> Result<(), M::Error> {
        if top.height == 0 {
            return Err(TreeError::NotFound.into());
        }
        let (mut steps, mut place) = self.path(io, top, key)?;
        let index = self.index_of(io, place.leaf, key)?.ok_or(TreeError::NotFound)?;
        self.promote_path(io, top, &mut steps, &mut place)?;
        self.edit(io, place.leaf, |node| node.set_value(index, value))
    }

    /// Returns the index in a leaf of the record with `key`.
    fn index_of<M: MetaRead>(&self, io: &M, leaf: BlockNo, key: u64) -> Result<Option<usize>, M::Error> {
        self.view(io, leaf, 0, |node| Ok(node.find(key)?))
    }

    /// Removes the record with `key`; `NotFound` if there is none.
    pub(crate) fn remove<M: MetaIo>(&self, io: &mut M, top: &mut Top, key: u64) -> Result<(), M::Error> {
        if top.height == 0 {
            return Err(TreeError::NotFound.into());
        }
        let (mut steps, mut place) = self.path(io, top, key)?;
        let index = self.index_of(io, place.leaf, key)?.ok_or(TreeError::NotFound)?;
        self.promote_path(io, top, &mut steps, &mut place)?;
        let leaf = place.leaf;
        let fill = self.edit(io, leaf, |node| {
            node.remove(index)?;
            Fill::of(node)
        })?;
        self.rebalance(io, top, &steps, leaf, fill)
    }

    /// Calls `change` once, with the leaf where `key` belongs and the range of keys that belong there. It may
    /// change any number of records, must leave at least one, and must not insert records that do not fit.
    pub(crate) fn change_leaf<M: MetaIo, R>(
        &self,
        io: &mut M,
        top: &mut Top,
        key: u64,
        change: impl FnOnce(&mut NodeMut<'_>, Place) -> Result<R, Fault>,
    ) -> Result<R, M::Error> {
        let (mut steps, mut place) = self.path(io, top, key)?;
        self.promote_path(io, top, &mut steps, &mut place)?;
        let changed = io.update(place.leaf, |bytes| {
            let before = self.open(bytes, place.leaf, 0)?.count();
            let mut node = NodeMut::open(bytes)?;
            let result = change(&mut node, place)?;
            Ok((result, before, Fill::of(&node)?))
        })?;
        let (result, before, fill) = changed.map_err(|fault: Fault| self.corrupt(place.leaf, fault))?;
        if fill.count < before {
            self.rebalance(io, top, &steps, place.leaf, fill)?;
        }
        Ok(result)
    }

    /// Takes at most `max` records off the end and returns them, last first. Takes them from one leaf, so
    /// there may be fewer; none only if the tree is empty or `max` is 0.
    pub(crate) fn take_last<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        max: usize,
    ) -> Result<Vec<Record>, M::Error> {
        if top.height == 0 || max == 0 {
            return Ok(Vec::new());
        }
        let (mut steps, mut place) = self.path(io, top, KEY_END - 1)?;
        self.promote_path(io, top, &mut steps, &mut place)?;
        let leaf = place.leaf;
        let (keep, mut taken) = self.view(io, leaf, 0, |node| {
            let keep = node.count().saturating_sub(max);
            Ok((keep, records_from(&node, keep)?))
        })?;
        let fill = self.edit(io, leaf, |node| {
            node.truncate(keep)?;
            Fill::of(node)
        })?;
        if fill.count == 0 {
            self.rebalance(io, top, &steps, leaf, fill)?;
        }
        taken.reverse();
        Ok(taken)
    }

    /// Frees an empty node, joins an underfull one to a neighbour, and continues with the parent.
    fn rebalance<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        steps: &[Step],
        leaf: BlockNo,
        fill: Fill,
    ) -> Result<(), M::Error> {
        let (mut block, mut fill) = (leaf, fill);
        for (level, step) in (0_u8..).zip(steps) {
            if fill.count > 0 && fill.used_bytes >= UNDERFULL {
                return Ok(());
            }
            let gone = if fill.count == 0 {
                self.free_node(io, top, block)?;
                step.index
            } else {
                match self.join(io, top, step, block, level, fill.used_bytes)? {
                    Some(index) => index,
                    None => return Ok(()),
                }
            };
            fill = self.edit(io, step.block, |node| {
                node.remove(gone)?;
                if gone == 0 && node.view()?.count() > 0 {
                    node.set_key(0, 0)?;
                }
                Fill::of(node)
            })?;
            block = step.block;
        }
        if fill.count == 0 {
            self.free_node(io, top, block)?;
            *top = Top::default();
            return Ok(());
        }
        self.lower(io, top)
    }

    /// Replaces the root by its child while it has only one.
    fn lower<M: MetaIo>(&self, io: &mut M, top: &mut Top) -> Result<(), M::Error> {
        while top.height > 1 {
            let only = self.view(io, top.block, top.height - 1, |node| {
                let child = parse_pointer(node.record(0)?.1)?;
                Ok((node.count() == 1).then_some(child))
            })?;
            let Some(child) = only else { return Ok(()) };
            self.free_node(io, top, top.block)?;
            top.block = child;
            top.height -= 1;
        }
        Ok(())
    }

    /// Joins the node with a neighbour if there is one in NVM with room. Returns the index of the child that
    /// the parent loses.
    fn join<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        step: &Step,
        block: BlockNo,
        level: u8,
        used_bytes: usize,
    ) -> Result<Option<usize>, M::Error> {
        let (before, after) = self.view(io, step.block, level + 1, |node| {
            let before = match step.index.checked_sub(1) {
                Some(index) => Some((node.key(step.index)?, parse_pointer(node.record(index)?.1)?)),
                None => None,
            };
            let after = match step.index + 1 {
                index if index < node.count() => {
                    let (separator, value) = node.record(index)?;
                    Some((separator, parse_pointer(value)?))
                }
                _ => None,
            };
            Ok((before, after))
        })?;
        let has_room = |io: &M, other: BlockNo| {
            // Promoting a demoted neighbour is not worth the I/O.
            if other.is_cold() {
                return Ok(false);
            }
            self.view(io, other, level, |node| {
                Ok(node.used_bytes() + used_bytes <= JOINED_MAX)
            })
        };
        if let Some((separator, left)) = before
            && has_room(io, left)?
        {
            self.merge(io, top, level, left, separator, block)?;
            return Ok(Some(step.index));
        }
        if let Some((separator, right)) = after
            && has_room(io, right)?
        {
            self.merge(io, top, level, block, separator, right)?;
            return Ok(Some(step.index + 1));
        }
        Ok(None)
    }

    /// Moves all of `right` to the end of `left` and frees it.
    fn merge<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        level: u8,
        left: BlockNo,
        separator: u64,
        right: BlockNo,
    ) -> Result<(), M::Error> {
        let mut moved = self.view(io, right, level, |node| Ok(records_from(&node, 0)?))?;
        if let (1.., Some(first)) = (level, moved.first_mut()) {
            first.0 = separator;
        }
        let lowest = moved.first().map_or(0, |(key, _)| *key);
        let (count, last) = self.view(io, left, level, |node| {
            Ok((node.count(), node.key(node.count() - 1)?))
        })?;
        if last >= lowest || left == right {
            return Err(self
                .corrupt(
                    right,
                    Fault::Order {
                        index: 0,
                        key: lowest,
                    },
                )
                .into());
        }
        self.edit(io, left, |node| {
            (count..)
                .zip(&moved)
                .try_for_each(|(index, (key, value))| node.insert(index, *key, value))
        })?;
        self.free_node(io, top, right)
    }
}
