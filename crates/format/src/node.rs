//! A node of a tree: records of a 64-bit key and some bytes, in the order of their keys, found through slots.
//!
//! After the block header: level, record count, start of the heap, unused bytes in the heap; then the slots
//! (offset and length of a record, 4 bytes each) upward, and the records downward from the end. An insertion
//! moves slots, not records: a journal of changed bytes stays small. No bytes are trusted here: every access
//! is bounded.

use crate::{BLOCK_HEADER_SIZE, BLOCK_SIZE, Block};

const LEVEL: usize = BLOCK_HEADER_SIZE;
const COUNT: usize = LEVEL + 2;
const HEAP: usize = LEVEL + 4;
const GARBAGE: usize = LEVEL + 6;
const SLOTS: usize = LEVEL + 8;
const SLOT_SIZE: usize = 4;
const KEY_SIZE: usize = 8;

/// Bytes of a node for slots and records.
pub const NODE_CAPACITY: usize = BLOCK_SIZE - SLOTS;
/// Bytes that a record takes besides its value.
pub const RECORD_OVERHEAD: usize = SLOT_SIZE + KEY_SIZE;

/// Fault in the layout of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NodeFault {
    /// Slots and heap overlap, or pass the block.
    #[error("node has {count} slots and a heap from byte {heap} with {garbage} unused bytes")]
    Bounds {
        /// Slots.
        count: usize,
        /// Start of the heap.
        heap: usize,
        /// Unused bytes in it.
        garbage: usize,
    },
    /// A record outside the heap.
    #[error("record {0} lies outside the node's heap")]
    Record(usize),
    /// No such record.
    #[error("node has no record {0}")]
    NoRecord(usize),
    /// A record that does not fit.
    #[error("record of {0} bytes does not fit the node")]
    Full(usize),
    /// Keys out of order.
    #[error("key of record {0} is not above its predecessor's")]
    Order(usize),
    /// Records overlap or bytes are lost.
    #[error("records and unused bytes sum to {found} bytes of a heap of {expected}")]
    Sum {
        /// Counted.
        found: usize,
        /// Size of the heap.
        expected: usize,
    },
}

fn u16_at(block: &Block, at: usize) -> usize {
    usize::from(u16::from_le_bytes([block[at], block[at + 1]]))
}

fn put_u16(block: &mut Block, at: usize, value: usize) {
    // All values are at most BLOCK_SIZE.
    block[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
}

/// A read-only view of a node.
#[derive(Clone, Copy)]
pub struct NodeRef<'a> {
    block: &'a Block,
    count: usize,
    heap: usize,
}

impl<'a> NodeRef<'a> {
    /// Checks the bounds of slots and heap.
    ///
    /// # Errors
    /// [`NodeFault::Bounds`].
    pub fn open(block: &'a Block) -> Result<Self, NodeFault> {
        let (count, heap, garbage) = (u16_at(block, COUNT), u16_at(block, HEAP), u16_at(block, GARBAGE));
        if heap > BLOCK_SIZE || SLOTS + count * SLOT_SIZE > heap || garbage > BLOCK_SIZE - heap {
            return Err(NodeFault::Bounds { count, heap, garbage });
        }
        Ok(Self { block, count, heap })
    }

    /// Number of levels below this one; 0 is a leaf.
    #[must_use]
    pub const fn level(&self) -> u8 {
        self.block[LEVEL]
    }

    /// Number of records.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Returns the bytes that slots and records take, of [`NODE_CAPACITY`].
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        self.count * SLOT_SIZE + (BLOCK_SIZE - self.heap).saturating_sub(u16_at(self.block, GARBAGE))
    }

    /// Returns key and value of record `index`.
    ///
    /// # Errors
    /// [`NodeFault::NoRecord`], or [`NodeFault::Record`] if its slot points out of the heap.
    pub fn record(&self, index: usize) -> Result<(u64, &'a [u8]), NodeFault> {
        if index >= self.count {
            return Err(NodeFault::NoRecord(index));
        }
        let slot = SLOTS + index * SLOT_SIZE;
        let (offset, len) = (u16_at(self.block, slot), u16_at(self.block, slot + 2));
        if offset < self.heap || len < KEY_SIZE || offset + len > BLOCK_SIZE {
            return Err(NodeFault::Record(index));
        }
        let (key, value) = self.block[offset..offset + len].split_at(KEY_SIZE);
        let mut word = [0; KEY_SIZE];
        word.copy_from_slice(key);
        Ok((u64::from_le_bytes(word), value))
    }

    /// Returns the key of record `index`.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn key(&self, index: usize) -> Result<u64, NodeFault> {
        self.record(index).map(|(key, _)| key)
    }

    /// Returns how many of the first records have keys below `key`; the keys of all others are equal or above
    /// if the node is in order.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn lower_bound(&self, key: u64) -> Result<usize, NodeFault> {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = (low + high) / 2;
            if self.key(middle)? < key {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(low)
    }

    /// Returns the index of the record with `key`, if there is one.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn find(&self, key: u64) -> Result<Option<usize>, NodeFault> {
        let index = self.lower_bound(key)?;
        Ok((index < self.count && self.key(index)? == key).then_some(index))
    }

    /// Checks the whole node: records within the heap, none overlapping another, keys ascending.
    ///
    /// # Errors
    /// The first [`NodeFault`].
    pub fn check(&self) -> Result<(), NodeFault> {
        let mut sum = u16_at(self.block, GARBAGE);
        let mut spans = Vec::with_capacity(self.count);
        let mut last = None;
        for index in 0..self.count {
            let (key, value) = self.record(index)?;
            if last.is_some_and(|last| last >= key) {
                return Err(NodeFault::Order(index));
            }
            last = Some(key);
            sum += KEY_SIZE + value.len();
            let offset = u16_at(self.block, SLOTS + index * SLOT_SIZE);
            spans.push((offset, offset + KEY_SIZE + value.len(), index));
        }
        if sum != BLOCK_SIZE - self.heap {
            return Err(NodeFault::Sum {
                found: sum,
                expected: BLOCK_SIZE - self.heap,
            });
        }
        spans.sort_unstable();
        match spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            Some(pair) => Err(NodeFault::Record(pair[1].2)),
            None => Ok(()),
        }
    }
}

/// A node to change.
pub struct NodeMut<'a> {
    block: &'a mut Block,
}

impl<'a> NodeMut<'a> {
    /// Makes an empty node of `block`; leaves its header unchanged.
    pub fn init(block: &'a mut Block, level: u8) -> Self {
        block[LEVEL] = level;
        block[LEVEL + 1] = 0;
        put_u16(block, COUNT, 0);
        put_u16(block, HEAP, BLOCK_SIZE);
        put_u16(block, GARBAGE, 0);
        Self { block }
    }

    /// Checks the bounds of slots and heap.
    ///
    /// # Errors
    /// [`NodeFault::Bounds`].
    pub fn open(block: &'a mut Block) -> Result<Self, NodeFault> {
        NodeRef::open(block)?;
        Ok(Self { block })
    }

    /// Returns a read-only view of the node.
    ///
    /// # Errors
    /// [`NodeFault::Bounds`].
    pub fn view(&self) -> Result<NodeRef<'_>, NodeFault> {
        NodeRef::open(self.block)
    }

    /// Inserts a record before record `index`.
    ///
    /// # Errors
    /// [`NodeFault::Full`] if it does not fit: nothing is changed then. Others if the node is corrupt.
    pub fn insert(&mut self, index: usize, key: u64, value: &[u8]) -> Result<(), NodeFault> {
        let len = KEY_SIZE + value.len();
        let view = self.view()?;
        let count = view.count();
        if index > count {
            return Err(NodeFault::NoRecord(index));
        }
        if view.used_bytes() + len + SLOT_SIZE > NODE_CAPACITY {
            return Err(NodeFault::Full(len));
        }
        if view.heap < SLOTS + (count + 1) * SLOT_SIZE + len {
            self.compact()?;
        }
        let heap = u16_at(self.block, HEAP);
        let slots_end = SLOTS + count * SLOT_SIZE;
        if heap < slots_end + SLOT_SIZE + len {
            return Err(NodeFault::Full(len));
        }
        let offset = heap - len;
        self.block[offset..offset + KEY_SIZE].copy_from_slice(&key.to_le_bytes());
        self.block[offset + KEY_SIZE..heap].copy_from_slice(value);
        let slot = SLOTS + index * SLOT_SIZE;
        self.block.copy_within(slot..slots_end, slot + SLOT_SIZE);
        put_u16(self.block, slot, offset);
        put_u16(self.block, slot + 2, len);
        put_u16(self.block, HEAP, offset);
        put_u16(self.block, COUNT, count + 1);
        Ok(())
    }

    /// Removes record `index`.
    ///
    /// # Errors
    /// If the record does not exist, or the node is corrupt.
    pub fn remove(&mut self, index: usize) -> Result<(), NodeFault> {
        let view = self.view()?;
        let (count, heap) = (view.count(), view.heap);
        let len = KEY_SIZE + view.record(index)?.1.len();
        let slot = SLOTS + index * SLOT_SIZE;
        if u16_at(self.block, slot) == heap {
            put_u16(self.block, HEAP, heap + len);
        } else {
            let garbage = u16_at(self.block, GARBAGE) + len;
            if garbage > BLOCK_SIZE - heap {
                return Err(NodeFault::Record(index));
            }
            put_u16(self.block, GARBAGE, garbage);
        }
        self.block
            .copy_within(slot + SLOT_SIZE..SLOTS + count * SLOT_SIZE, slot);
        put_u16(self.block, COUNT, count - 1);
        if count == 1 {
            put_u16(self.block, HEAP, BLOCK_SIZE);
            put_u16(self.block, GARBAGE, 0);
        }
        // A heap whose garbage outgrew it is reported here rather than by the next reader.
        self.view().map(|_| ())
    }

    /// Removes the records from `index` on.
    ///
    /// If the node is corrupt.
    /// The node is corrupt.
    pub fn truncate(&mut self, index: usize) -> Result<(), NodeFault> {
        while self.view()?.count() > index {
            self.remove(self.view()?.count() - 1)?;
        }
        Ok(())
    }

    /// Overwrites the value of record `index` by one of equal length.
    ///
    /// # Errors
    /// [`NodeFault::Full`] if the length differs; others if the record does not exist or the node is corrupt.
    pub fn set_value(&mut self, index: usize, value: &[u8]) -> Result<(), NodeFault> {
        if self.view()?.record(index)?.1.len() != value.len() {
            return Err(NodeFault::Full(KEY_SIZE + value.len()));
        }
        let offset = u16_at(self.block, SLOTS + index * SLOT_SIZE) + KEY_SIZE;
        self.block[offset..offset + value.len()].copy_from_slice(value);
        Ok(())
    }

    /// Overwrites the key of record `index`. The caller keeps the keys in order.
    ///
    /// # Errors
    /// If the record does not exist, or the node is corrupt.
    pub fn set_key(&mut self, index: usize, key: u64) -> Result<(), NodeFault> {
        self.view()?.record(index)?;
        let offset = u16_at(self.block, SLOTS + index * SLOT_SIZE);
        self.block[offset..offset + KEY_SIZE].copy_from_slice(&key.to_le_bytes());
        Ok(())
    }

    /// Closes the gaps in the heap.
    fn compact(&mut self) -> Result<(), NodeFault> {
        let old = *self.block;
        let view = NodeRef::open(&old)?;
        let mut heap = BLOCK_SIZE;
        for index in 0..view.count() {
            let (key, value) = view.record(index)?;
            let len = KEY_SIZE + value.len();
            if heap < SLOTS + view.count() * SLOT_SIZE + len {
                *self.block = old;
                return Err(NodeFault::Record(index));
            }
            heap -= len;
            self.block[heap..heap + KEY_SIZE].copy_from_slice(&key.to_le_bytes());
            self.block[heap + KEY_SIZE..heap + len].copy_from_slice(value);
            put_u16(self.block, SLOTS + index * SLOT_SIZE, heap);
        }
        put_u16(self.block, HEAP, heap);
        put_u16(self.block, GARBAGE, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{NODE_CAPACITY, NodeFault, NodeMut, NodeRef, RECORD_OVERHEAD};
    use crate::BLOCK_SIZE;
    use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn node_equals_a_map_when_records_come_and_go(
            ops in prop::collection::vec((0_u64..60, 0_usize..300, any::<bool>()), 1..200)
        ) {
            let mut block = [0; BLOCK_SIZE];
            NodeMut::init(&mut block, 3);
            let mut model: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
            for (key, len, remove) in ops {
                let found = NodeRef::open(&block).unwrap().find(key).unwrap();
                prop_assert_eq!(found.is_some(), model.contains_key(&key));
                let mut node = NodeMut::open(&mut block).unwrap();
                if let Some(index) = found {
                    if remove {
                        node.remove(index).unwrap();
                        model.remove(&key);
                    } else {
                        let value = vec![9; model[&key].len()];
                        node.set_value(index, &value).unwrap();
                        model.insert(key, value);
                    }
                } else {
                    let used: usize = model.values().map(|value| value.len() + RECORD_OVERHEAD).sum();
                    let index = model.range(..key).count();
                    let value = vec![key as u8; len];
                    match node.insert(index, key, &value) {
                        Ok(()) => { model.insert(key, value); }
                        Err(fault) => {
                            prop_assert!(used + len + RECORD_OVERHEAD > NODE_CAPACITY);
                            prop_assert_eq!(fault, NodeFault::Full(len + 8));
                        }
                    }
                }
                let view = NodeRef::open(&block).unwrap();
                view.check().unwrap();
                prop_assert_eq!(view.level(), 3);
                let all: Vec<_> = (0..view.count()).map(|i| view.record(i).unwrap()).collect();
                let expected: Vec<_> = model.iter().map(|(key, value)| (*key, value.as_slice())).collect();
                prop_assert_eq!(all, expected);
            }
        }

        #[test]
        fn node_of_any_bytes_never_panics(
            seed in prop::collection::vec(any::<u8>(), 64),
            heap in 0_u16..5000,
            key: u64,
        ) {
            let mut block: [u8; BLOCK_SIZE] = std::array::from_fn(|i| seed[i % 64].wrapping_mul(i as u8 | 1));
            block[34..36].copy_from_slice(&(heap / 50).to_le_bytes());
            block[36..38].copy_from_slice(&heap.to_le_bytes());
            block[38..40].copy_from_slice(&(heap / 9).to_le_bytes());
            if let Ok(view) = NodeRef::open(&block) {
                let _ = (view.find(key), view.check(), view.used_bytes());
            }
            if let Ok(mut node) = NodeMut::open(&mut block) {
                let _ = node.insert(0, key, &[1; 20]);
                let _ = node.remove(0);
                let _ = node.truncate(1);
            }
        }
    }
}
