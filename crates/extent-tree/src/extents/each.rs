//! Many changes of one tree, leaf by leaf. Changes that a leaf cannot take alone go through
//! [`ExtentTree::replace`].

use super::splice::Splice;
use super::{ExtentTree, Run, check_new};
use crate::btree::Place;
use crate::{Fault, MetaIo};
use std::slice;
use varve_format::{
    EXTENT_VALUE_SIZE, Extent, ExtentValue, FILE_BLOCKS_MAX, FileBlock, NODE_CAPACITY, NodeMut, NodeRef,
    RECORD_OVERHEAD, TreeCounts, TreeForm, TreeRoot,
};
use zerocopy::IntoBytes;

/// Bytes of an extent in a leaf.
const RECORD_BYTES: usize = EXTENT_VALUE_SIZE + RECORD_OVERHEAD;

impl ExtentTree {
    /// Maps each of `new`, ascending extents, in place of the old mapping: like [`replace`](Self::replace)
    /// for each of them, but a leaf is looked up and changed once for all extents that lie in it. Mappings
    /// between them stay. Returns the unmapped runs in the order of the file.
    ///
    /// # Errors
    /// As `replace`.
    pub fn replace_each<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        new: &[Extent],
    ) -> Result<Vec<Run>, M::Error> {
        check_new(&(FileBlock(0)..FileBlock(FILE_BLOCKS_MAX)), new)?;
        let mut freed = Vec::with_capacity(new.len());
        let mut rest = new;
        while let Some((first, others)) = rest.split_first() {
            match self.replace_in_leaf(io, root, rest, &mut freed)? {
                0 => {
                    let range = first.file_block..first.end();
                    freed.append(&mut self.replace(io, root, range, slice::from_ref(first))?);
                    rest = others;
                }
                taken => rest = &rest[taken..],
            }
        }
        Ok(freed)
    }

    /// Replaces the first extents of `new`, as many as concern only the leaf where the first one begins;
    /// returns their number.
    fn replace_in_leaf<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut TreeRoot,
        new: &[Extent],
        freed: &mut Vec<Run>,
    ) -> Result<usize, M::Error> {
        let (TreeForm::Nodes(mut top, mut counts), Some(first)) = (self.form(root)?, new.first()) else {
            return Ok(0);
        };
        let before = counts.extents;
        let taken = self
            .tree
            .change_leaf(io, &mut top, first.file_block.0, |node, place| {
                let lowest = node.view()?.key(0)?;
                let mut taken = 0;
                for extent in new {
                    // Extents that touch it begin in this leaf, and it ends in this leaf or where no other
                    // extent is.
                    let alone = extent.file_block.0 > lowest
                        && place.upper.is_none_or(|upper| extent.end().0 < upper);
                    if !alone || !replace_one(node, place, extent, &mut counts, freed)? {
                        break;
                    }
                    taken += 1;
                }
                Ok(taken)
            })?;
        *root = if counts.extents < before {
            self.settle(io, top, &counts)?
        } else {
            TreeRoot::nodes(&top, &counts)
        };
        Ok(taken)
    }
}

/// Parses the extent at `index`, which must begin within the leaf's keys, at `lowest` or later.
fn parse(node: &NodeRef<'_>, place: Place, index: usize, lowest: u64) -> Result<Extent, Fault> {
    let (key, value) = node.record(index)?;
    if key < place.lower || place.upper.is_some_and(|upper| key >= upper) {
        return Err(Fault::Order { index, key });
    }
    if key < lowest {
        return Err(Fault::Overlap(key));
    }
    Ok(ExtentValue::parse(key, value)?)
}

/// Replaces one extent. Returns false, with nothing changed, if the leaf has no room.
fn replace_one(
    node: &mut NodeMut<'_>,
    place: Place,
    new: &Extent,
    counts: &mut TreeCounts,
    freed: &mut Vec<Run>,
) -> Result<bool, Fault> {
    let view = node.view()?;
    let count = view.count();
    let at = view.lower_bound(new.file_block.0)?;
    let Some(before) = at.checked_sub(1) else {
        return Err(Fault::Order {
            index: 0,
            key: view.key(0)?,
        });
    };
    let mut old = parse(&view, place, before, 0)?;
    // In the common case an extent is overwritten as a whole: only the value changes.
    if at < count && !old.joins(new) {
        let same = parse(&view, place, at, old.end().0)?;
        let range = |extent: &Extent| (extent.file_block, extent.len);
        if range(&same) == range(new) {
            let joins = at + 1 < count && new.joins(&parse(&view, place, at + 1, same.end().0)?);
            if !joins {
                node.set_value(at, ExtentValue::encode(new).as_bytes())?;
                counts.sub(&same);
                counts.add(new);
                freed.push(Run::from(&same));
                return Ok(true);
            }
        }
    }
    let mut touched = vec![old];
    for index in at..count {
        old = parse(&view, place, index, old.end().0)?;
        if old.file_block > new.end() {
            break;
        }
        touched.push(old);
    }
    let splice = Splice::new(touched, &(new.file_block..new.end()), slice::from_ref(new));
    let (gone, come) = (splice.removed().count(), splice.inserted().count());
    if view.used_bytes() + come * RECORD_BYTES > NODE_CAPACITY + gone * RECORD_BYTES {
        return Ok(false);
    }
    for extent in splice.removed() {
        let index = node.view()?.lower_bound(extent.file_block.0)?;
        node.remove(index)?;
    }
    for extent in splice.changed() {
        let index = node.view()?.lower_bound(extent.file_block.0)?;
        node.set_value(index, ExtentValue::encode(extent).as_bytes())?;
    }
    for extent in splice.inserted() {
        let index = node.view()?.lower_bound(extent.file_block.0)?;
        node.insert(index, extent.file_block.0, ExtentValue::encode(extent).as_bytes())?;
    }
    splice.old.iter().for_each(|extent| counts.sub(extent));
    splice.new.iter().for_each(|extent| counts.add(extent));
    freed.extend(splice.freed.iter().map(Run::from));
    Ok(true)
}
