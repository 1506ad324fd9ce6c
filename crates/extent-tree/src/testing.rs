//! Metadata blocks in memory for tests: counts reads, refuses double frees, finds leaks, and breaks blocks on
//! purpose.

#![allow(clippy::unwrap_used)]

use crate::{CheckVisitor, MetaIo, MetaRead, TreeError};
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use varve_format::{
    BLOCK_HEADER_SIZE, Block, BlockHeader, BlockKind, BlockNo, Ino, Tier, init_block, verify_block,
};

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MemError {
    Tree(TreeError),
    NoBlock(BlockNo),
    NoSpace,
}

impl From<TreeError> for MemError {
    fn from(error: TreeError) -> Self {
        Self::Tree(error)
    }
}

#[derive(Clone)]
pub(crate) struct MemIo {
    blocks: HashMap<BlockNo, Box<Block>>,
    freed: Vec<BlockNo>,
    next: u64,
    /// Blocks that may still be allocated.
    pub(crate) space: u64,
    /// One of this number of blocks to be demoted stays; 0: none does.
    pub(crate) keep_each: u64,
    asked: u64,
    pub(crate) reads: Cell<u64>,
    /// Reads after which everything fails: nothing may run for ever.
    pub(crate) reads_max: u64,
}

impl MemIo {
    pub(crate) fn new() -> Self {
        Self {
            blocks: HashMap::new(),
            freed: Vec::new(),
            next: 1000,
            space: u64::MAX,
            keep_each: 0,
            asked: 0,
            reads: Cell::new(0),
            reads_max: u64::MAX,
        }
    }

    pub(crate) fn in_use(&self) -> BTreeSet<BlockNo> {
        self.blocks.keys().copied().collect()
    }

    pub(crate) fn block_mut(&mut self, block: BlockNo) -> &mut Block {
        self.blocks.get_mut(&block).unwrap()
    }

    /// Returns a `more` for `demote` that ends after `max` calls; if `max` is even, every third block stays.
    pub(crate) fn some(max: u16) -> impl FnMut(&mut Self) -> bool {
        let mut left = max;
        move |io| {
            io.keep_each = if max.is_multiple_of(2) { 3 } else { 0 };
            left = left.saturating_sub(1);
            left > 0
        }
    }

    /// Blocks on slower tiers.
    pub(crate) fn away(&self) -> usize {
        self.blocks.keys().filter(|block| block.is_cold()).count()
    }

    /// Moves the content of `old` to `new`, which has its header, and frees `old`.
    fn take_body(&mut self, old: BlockNo, new: BlockNo) {
        let body = self.blocks.get(&old).unwrap()[BLOCK_HEADER_SIZE..].to_vec();
        self.block_mut(new)[BLOCK_HEADER_SIZE..].copy_from_slice(&body);
        self.free(old).unwrap();
    }

    pub(crate) fn reads_of<R>(&self, f: impl FnOnce() -> R) -> (R, u64) {
        let before = self.reads.get();
        let result = f();
        (result, self.reads.get() - before)
    }
}

impl MetaRead for MemIo {
    type Error = MemError;

    fn read<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R, MemError> {
        self.reads.set(self.reads.get() + 1);
        assert!(self.reads.get() <= self.reads_max, "endless reading");
        self.blocks
            .get(&block)
            .map(|bytes| f(bytes))
            .ok_or(MemError::NoBlock(block))
    }
}

impl MetaIo for MemIo {
    fn update<R>(&mut self, block: BlockNo, f: impl FnOnce(&mut Block) -> R) -> Result<R, MemError> {
        assert!(!block.is_cold(), "a tree changed {block}");
        let bytes = self.blocks.get_mut(&block).ok_or(MemError::NoBlock(block))?;
        let header: [u8; 32] = bytes[..32].try_into().unwrap();
        let result = f(bytes);
        assert_eq!(bytes[..32], header, "a tree changed a header");
        Ok(result)
    }

    fn alloc(&mut self, _near: Option<BlockNo>, kind: BlockKind, owner: Ino) -> Result<BlockNo, MemError> {
        if self.space == 0 {
            return Err(MemError::NoSpace);
        }
        self.space -= 1;
        let block = self.freed.pop().unwrap_or_else(|| {
            self.next += 1;
            BlockNo(self.next)
        });
        let mut bytes = Box::new([0; varve_format::BLOCK_SIZE]);
        init_block(&mut bytes, kind, owner, block);
        assert_eq!(verify_block(&bytes), Ok(()));
        assert!(self.blocks.insert(block, bytes).is_none());
        Ok(block)
    }

    fn free(&mut self, block: BlockNo) -> Result<(), MemError> {
        self.blocks.remove(&block).ok_or(MemError::NoBlock(block))?;
        if !block.is_cold() {
            self.freed.push(block);
            self.space = self.space.saturating_add(1);
        }
        Ok(())
    }

    fn promote(&mut self, block: BlockNo) -> Result<BlockNo, MemError> {
        assert!(block.is_cold(), "{block} is brought back from nowhere");
        let header = BlockHeader::of(self.blocks.get(&block).ok_or(MemError::NoBlock(block))?);
        let (kind, owner) = (
            BlockKind::from_u16(header.kind.get()).unwrap(),
            Ino(header.owner.get()),
        );
        let new = self.alloc(None, kind, owner)?;
        self.take_body(block, new);
        Ok(new)
    }

    fn demote(&mut self, block: BlockNo) -> Result<Option<BlockNo>, MemError> {
        assert!(!block.is_cold(), "{block} is sent away twice");
        self.asked += 1;
        if self.keep_each > 0 && self.asked.is_multiple_of(self.keep_each) {
            return Ok(None);
        }
        let header = BlockHeader::of(self.blocks.get(&block).ok_or(MemError::NoBlock(block))?);
        let kind = BlockKind::from_u16(header.kind.get()).unwrap();
        self.next += 1;
        let tier = if self.next.is_multiple_of(3) {
            Tier::Hdd
        } else {
            Tier::Ssd
        };
        let new = BlockNo::on(tier, self.next);
        let mut bytes = Box::new([0; varve_format::BLOCK_SIZE]);
        init_block(&mut bytes, kind, Ino(header.owner.get()), new);
        self.blocks.insert(new, bytes);
        self.take_body(block, new);
        Ok(Some(new))
    }
}

/// The results of a check.
#[derive(Default)]
pub(crate) struct Told {
    pub(crate) blocks: BTreeSet<BlockNo>,
    pub(crate) faults: Vec<TreeError>,
    pub(crate) unreadable: Vec<BlockNo>,
}

impl CheckVisitor<MemError> for Told {
    fn block(&mut self, block: BlockNo, _kind: BlockKind) {
        assert!(self.blocks.insert(block), "block {block} told twice");
    }

    fn fault(&mut self, error: TreeError) {
        self.faults.push(error);
    }

    fn unreadable(&mut self, block: BlockNo, _error: MemError) {
        self.unreadable.push(block);
    }
}

impl Told {
    /// Nothing is wrong and every block in use is reached.
    pub(crate) fn assert_clean(&self, io: &MemIo) {
        assert_eq!(self.faults, []);
        assert_eq!(self.unreadable, []);
        assert_eq!(self.blocks, io.in_use(), "leaked or lost blocks");
    }
}

/// Small deterministic numbers (xorshift64*).
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }
}
