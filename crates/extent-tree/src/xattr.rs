//! The extended attributes of one inode. Knows nothing of name spaces or permissions.

#[cfg(test)]
mod tests;

use crate::btree::{BTree, KEY_END, Recall};
use crate::names::{NameCheck, Search, check_count, search};
use crate::{CheckVisitor, Fault, MetaIo, MetaRead, Progress, TreeError};
use std::collections::HashSet;
use std::ops::ControlFlow;
use varve_format::{
    BLOCK_BODY_SIZE, BLOCK_HEADER_SIZE, Block, BlockHeader, BlockKind, BlockNo, HashKey, Ino, NAME_MAX,
    NameFault, Top, XATTR_INLINE_MAX, XATTR_VALUE_MAX, XattrRecord, XattrRoot, XattrValue,
};

/// A value, or the blocks that hold it, copied out of its node.
enum Value {
    Inline(Vec<u8>),
    Blocks { len: usize, blocks: Vec<BlockNo> },
}

impl From<XattrValue<'_>> for Value {
    fn from(value: XattrValue<'_>) -> Self {
        match value {
            XattrValue::Inline(bytes) => Self::Inline(bytes.to_vec()),
            XattrValue::Blocks { len, blocks } => Self::Blocks { len, blocks },
        }
    }
}

/// The extended attributes of one inode. Holds only the owner's number and the pool's key: the root, a part
/// of the inode image, is passed in; functions that take it as `&mut` leave it as it must be stored in the
/// same transaction.
#[derive(Debug, Clone, Copy)]
pub struct Xattrs {
    tree: BTree,
    key: HashKey,
}

impl Xattrs {
    /// Returns the attributes of `owner` in the pool whose secret is `key`.
    #[must_use]
    pub const fn of(owner: Ino, key: HashKey) -> Self {
        Self {
            tree: BTree {
                owner,
                leaf: BlockKind::XattrLeaf,
                node: BlockKind::XattrNode,
            },
            key,
        }
    }

    fn top(&self, root: &XattrRoot) -> Result<Top, TreeError> {
        root.top().map_err(|fault| self.tree.bad_root(fault))
    }

    fn search<M: MetaRead>(&self, io: &M, top: &Top, name: &[u8]) -> Result<Search<Value>, M::Error> {
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(TreeError::BadName(NameFault::NameLen(name.len())).into());
        }
        search(&self.tree, io, top, self.key.name_hash(name), |bytes| {
            let record = XattrRecord::parse(bytes)?;
            Ok((record.name == name).then(|| record.value.into()))
        })
    }

    fn value_block<R>(&self, bytes: &Block, block: BlockNo, f: impl FnOnce(&[u8]) -> R) -> Result<R, Fault> {
        BlockHeader::of(bytes).expect(BlockKind::XattrValue, self.tree.owner, block)?;
        Ok(f(&bytes[BLOCK_HEADER_SIZE..]))
    }

    fn read_value<M: MetaRead>(&self, io: &M, value: Value) -> Result<Vec<u8>, M::Error> {
        let (len, blocks) = match value {
            Value::Inline(bytes) => return Ok(bytes),
            Value::Blocks { len, blocks } => (len, blocks),
        };
        let mut bytes = Vec::with_capacity(len);
        for block in blocks {
            let part = BLOCK_BODY_SIZE.min(len - bytes.len());
            io.read(block, |content| {
                self.value_block(content, block, |body| bytes.extend_from_slice(&body[..part]))
            })?
            .map_err(|fault| self.tree.corrupt(block, fault))?;
        }
        Ok(bytes)
    }

    /// Returns the value of `name`.
    ///
    /// # Errors
    /// [`TreeError::BadName`] if the name is empty or too long; corruption, and the errors of `io`.
    pub fn get<M: MetaRead>(
        &self,
        io: &M,
        root: &XattrRoot,
        name: &[u8],
    ) -> Result<Option<Vec<u8>>, M::Error> {
        match self.search(io, &self.top(root)?, name)?.found {
            Some((_, value)) => self.read_value(io, value).map(Some),
            None => Ok(None),
        }
    }

    /// Creates or replaces `name`. Returns whether it existed. `XATTR_CREATE` and `XATTR_REPLACE` are up to
    /// the caller, which looks the name up first.
    ///
    /// # Errors
    /// [`TreeError::BadName`] if name or value are too long, [`TreeError::HashFull`], both with nothing
    /// changed; corruption, and the errors of `io`.
    pub fn set<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut XattrRoot,
        name: &[u8],
        value: &[u8],
    ) -> Result<bool, M::Error> {
        let mut top = self.top(root)?;
        if value.len() > XATTR_VALUE_MAX {
            return Err(TreeError::BadName(NameFault::ValueLen(value.len())).into());
        }
        let search = self.search(io, &top, name)?;
        let (mut entries, mut value_blocks) = (root.entries(), root.value_blocks());
        let (key, old) = match search.found {
            Some((key, old)) => (key, Some(old)),
            None => (search.free.ok_or(TreeError::HashFull)?, None),
        };
        let stored = self.store_value(io, top.height.gt(&0).then_some(top.block), value)?;
        if let XattrValue::Blocks { blocks, .. } = &stored {
            value_blocks = value_blocks.saturating_add(blocks.len() as u32);
        }
        let record = self.encode(name, stored)?;
        match &old {
            Some(Value::Inline(bytes)) if bytes.len() == value.len() => {
                self.tree.set(io, &mut top, key, &record)?;
                *root = XattrRoot::new(&top, entries, value_blocks);
                return Ok(true);
            }
            Some(old) => {
                value_blocks = value_blocks.saturating_sub(self.free_value(io, old)?);
                self.tree.remove(io, &mut top, key)?;
            }
            None => entries = entries.saturating_add(1),
        }
        self.tree.insert(io, &mut top, key, &record)?;
        *root = XattrRoot::new(&top, entries, value_blocks);
        Ok(old.is_some())
    }

    fn encode(&self, name: &[u8], value: XattrValue<'_>) -> Result<Vec<u8>, TreeError> {
        let mut record = Vec::new();
        let encoded = XattrRecord { name, value }.encode(&mut record);
        encoded.map_err(TreeError::BadName).map(|()| record)
    }

    /// Puts a long value in blocks of its own.
    fn store_value<'v, M: MetaIo>(
        &self,
        io: &mut M,
        near: Option<BlockNo>,
        value: &'v [u8],
    ) -> Result<XattrValue<'v>, M::Error> {
        if value.len() <= XATTR_INLINE_MAX {
            return Ok(XattrValue::Inline(value));
        }
        let mut blocks = Vec::new();
        for part in value.chunks(BLOCK_BODY_SIZE) {
            let block = io.alloc(
                blocks.last().copied().or(near),
                BlockKind::XattrValue,
                self.tree.owner,
            )?;
            io.update(block, |bytes| {
                bytes[BLOCK_HEADER_SIZE..BLOCK_HEADER_SIZE + part.len()].copy_from_slice(part);
            })?;
            blocks.push(block);
        }
        let len = value.len();
        Ok(XattrValue::Blocks { len, blocks })
    }

    /// Frees the blocks of a value. Returns their number.
    fn free_value<M: MetaIo>(&self, io: &mut M, value: &Value) -> Result<u32, M::Error> {
        let Value::Blocks { blocks, .. } = value else {
            return Ok(0);
        };
        for block in blocks {
            // A corrupt list must not free the blocks of another owner.
            io.read(*block, |bytes| self.value_block(bytes, *block, |_| ()))?
                .map_err(|fault| self.tree.corrupt(*block, fault))?;
            io.free(*block)?;
        }
        Ok(blocks.len() as u32)
    }

    /// Removes `name`. Returns whether it existed.
    ///
    /// # Errors
    /// [`TreeError::BadName`] if the name is empty or too long; corruption, and the errors of `io`.
    pub fn remove<M: MetaIo>(&self, io: &mut M, root: &mut XattrRoot, name: &[u8]) -> Result<bool, M::Error> {
        let mut top = self.top(root)?;
        let Some((key, value)) = self.search(io, &top, name)?.found else {
            return Ok(false);
        };
        let freed = self.free_value(io, &value)?;
        self.tree.remove(io, &mut top, key)?;
        *root = self.root_after(&top, root, 1, freed)?;
        Ok(true)
    }

    /// Returns the root after a removal. Fails if its counters have reached zero before the last name: such a
    /// root would be refused later.
    fn root_after(
        &self,
        top: &Top,
        root: &XattrRoot,
        removed: usize,
        freed: u32,
    ) -> Result<XattrRoot, TreeError> {
        let removed = u32::try_from(removed).unwrap_or(u32::MAX);
        let blocks = root.value_blocks().saturating_sub(freed);
        let root = XattrRoot::new(top, root.entries().saturating_sub(removed), blocks);
        self.top(&root).map(|_| root)
    }

    /// Returns all names with the lengths of their values in bytes, in no particular order.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn list<M: MetaRead>(&self, io: &M, root: &XattrRoot) -> Result<Vec<(Vec<u8>, usize)>, M::Error> {
        let mut names = Vec::new();
        self.tree
            .scan(io, &self.top(root)?, 0..KEY_END, |leaf, _, bytes| {
                let record = XattrRecord::parse(bytes).map_err(|fault| self.tree.corrupt(leaf, fault))?;
                names.push((record.name.to_vec(), value_len(&record.value)));
                Ok(ControlFlow::Continue(()))
            })?;
        Ok(names)
    }

    /// Removes at most `max` attributes and frees the blocks that become empty. Continues from the state of
    /// the root; `Done` when none is left.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn free_some<M: MetaIo>(
        &self,
        io: &mut M,
        root: &mut XattrRoot,
        max: usize,
    ) -> Result<Progress, M::Error> {
        let mut top = self.top(root)?;
        let (mut left, mut freed) = (max, 0_u32);
        while left > 0 && top.height > 0 {
            let at = top.block;
            let taken = self.tree.take_last(io, &mut top, left)?;
            left = left.saturating_sub(taken.len());
            for (_, bytes) in taken {
                let record = XattrRecord::parse(&bytes).map_err(|fault| self.tree.corrupt(at, fault))?;
                freed = freed.saturating_add(self.free_value(io, &record.value.into())?);
            }
        }
        if top.height == 0 {
            *root = XattrRoot::default();
            return Ok(Progress::Done);
        }
        *root = self.root_after(&top, root, max - left, freed)?;
        Ok(Progress::More)
    }

    /// Demotes the nodes of the index and the blocks of values to slower tiers, as long as `more` returns
    /// true. Returns the root to be stored.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn demote<M: MetaIo>(
        &self,
        io: &mut M,
        root: &XattrRoot,
        more: &mut dyn FnMut(&mut M) -> bool,
    ) -> Result<XattrRoot, M::Error> {
        let mut top = self.top(root)?;
        // All nodes and values below a demoted node are demoted.
        if top.height > 0 && !top.block.is_cold() {
            // Values are demoted before the leaves that point to them.
            if self.demote_values(io, &mut top, more)? {
                self.tree.demote(io, &mut top, more)?;
            }
        }
        Ok(XattrRoot::new(&top, root.entries(), root.value_blocks()))
    }

    /// Demotes the blocks of values; returns whether all are demoted.
    fn demote_values<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        more: &mut dyn FnMut(&mut M) -> bool,
    ) -> Result<bool, M::Error> {
        let mut warm = Vec::new();
        self.tree.scan(io, top, 0..KEY_END, |leaf, key, bytes| {
            let record = XattrRecord::parse(bytes).map_err(|fault| self.tree.corrupt(leaf, fault))?;
            if let XattrValue::Blocks { len, blocks } = record.value
                && blocks.iter().any(|block| !block.is_cold())
            {
                warm.push((key, record.name.to_vec(), len, blocks));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        let mut all = true;
        for (key, name, len, mut blocks) in warm {
            for block in blocks.iter_mut().filter(|block| !block.is_cold()) {
                let new = if more(io) {
                    io.read(*block, |bytes| self.value_block(bytes, *block, |_| ()))?
                        .map_err(|fault| self.tree.corrupt(*block, fault))?;
                    io.demote(*block)?
                } else {
                    None
                };
                all &= new.is_some();
                *block = new.unwrap_or(*block);
            }
            let record = self.encode(&name, XattrValue::Blocks { len, blocks })?;
            self.tree.set(io, top, key, &record)?;
        }
        Ok(all)
    }

    /// Promotes the nodes of the index and the blocks of values that `recall` wants, and the nodes above
    /// them. Returns the root to be stored.
    ///
    /// # Errors
    /// Corruption, and the errors of `io`.
    pub fn recall<M: MetaIo>(
        &self,
        io: &mut M,
        root: &XattrRoot,
        recall: &mut Recall<'_, M>,
    ) -> Result<XattrRoot, M::Error> {
        let mut top = self.top(root)?;
        if top.height > 0 {
            self.tree.recall(io, &mut top, recall)?;
            self.recall_values(io, &mut top, recall)?;
        }
        Ok(XattrRoot::new(&top, root.entries(), root.value_blocks()))
    }

    fn recall_values<M: MetaIo>(
        &self,
        io: &mut M,
        top: &mut Top,
        recall: &mut Recall<'_, M>,
    ) -> Result<(), M::Error> {
        let mut wanted = Vec::new();
        self.tree.scan(io, top, 0..KEY_END, |leaf, key, bytes| {
            let record = XattrRecord::parse(bytes).map_err(|fault| self.tree.corrupt(leaf, fault))?;
            if let XattrValue::Blocks { len, blocks } = record.value
                && blocks.iter().any(|block| (recall.wants)(*block))
            {
                wanted.push((key, record.name.to_vec(), len, blocks));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        for (key, name, len, mut blocks) in wanted {
            for block in &mut blocks {
                if !(recall.wants)(*block) || !(recall.more)(io) {
                    continue;
                }
                io.read(*block, |bytes| self.value_block(bytes, *block, |_| ()))?
                    .map_err(|fault| self.tree.corrupt(*block, fault))?;
                *block = io.promote(*block)?;
            }
            let record = self.encode(&name, XattrValue::Blocks { len, blocks })?;
            self.tree.set(io, top, key, &record)?;
        }
        Ok(())
    }

    /// Returns whether no node of the index and no block of a value is in NVM.
    ///
    /// # Errors
    /// The root is corrupt.
    pub fn is_away(&self, root: &XattrRoot) -> Result<bool, TreeError> {
        let top = self.top(root)?;
        Ok(top.height == 0 || top.block.is_cold())
    }

    /// Walks all attributes: reports every block and every fault to `visitor`, and every sound name with the
    /// length of its value to `on_attr`. Reads each block once.
    pub fn check<M: MetaRead>(
        &self,
        io: &M,
        root: &XattrRoot,
        visitor: &mut impl CheckVisitor<M::Error>,
        mut on_attr: impl FnMut(&[u8], usize),
    ) {
        let top = match self.top(root) {
            Ok(top) => top,
            Err(error) => return visitor.fault(error),
        };
        let (mut names, mut seen) = (NameCheck::default(), HashSet::new());
        let sound = self.tree.walk(io, &top, visitor, |visitor, _, key, bytes| {
            let record = XattrRecord::parse(bytes)?;
            names.add(key, record.name, self.key.name_hash(record.name))?;
            if let XattrValue::Blocks { blocks, .. } = &record.value {
                for block in blocks {
                    self.check_value_block(io, visitor, &mut seen, *block);
                }
            }
            on_attr(record.name, value_len(&record.value));
            Ok(())
        });
        if !sound {
            return;
        }
        let counts = [
            ("attributes", u64::from(root.entries()), names.count),
            ("value blocks", u64::from(root.value_blocks()), seen.len() as u64),
        ];
        for (what, counted, found) in counts {
            if let Some(error) = check_count(&self.tree, what, counted, found) {
                visitor.fault(error);
            }
        }
    }

    fn check_value_block<M: MetaRead>(
        &self,
        io: &M,
        visitor: &mut impl CheckVisitor<M::Error>,
        seen: &mut HashSet<BlockNo>,
        block: BlockNo,
    ) {
        if !seen.insert(block) {
            return visitor.fault(self.tree.corrupt(block, Fault::Shared));
        }
        match io.read(block, |bytes| self.value_block(bytes, block, |_| ())) {
            Ok(Ok(())) => visitor.block(block, BlockKind::XattrValue),
            Ok(Err(fault)) => visitor.fault(self.tree.corrupt(block, fault)),
            Err(error) => visitor.unreadable(block, error),
        }
    }
}

fn value_len(value: &XattrValue<'_>) -> usize {
    match value {
        XattrValue::Inline(bytes) => bytes.len(),
        XattrValue::Blocks { len, .. } => *len,
    }
}
