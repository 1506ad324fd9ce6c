//! Trees in blocks that anybody may have written.

use std::cell::Cell;
use std::ops::ControlFlow;
use varve_extent_tree::{CheckVisitor, Directory, ExtentTree, MetaRead, TreeError, Xattrs};
use varve_format::{
    BLOCK_BODY_SIZE, BLOCK_HEADER_SIZE, Block, BlockKind, BlockNo, DirRoot, FILE_BLOCKS_MAX, FileBlock,
    HashKey, Ino, ROOT_SIZE, TreeRoot, XattrRoot, init_block,
};
use zerocopy::FromBytes;

pub(crate) const OWNER: Ino = Ino(9);
pub(crate) const HASH: HashKey = HashKey([3; 16]);
/// Bytes of the root in front of the blocks.
pub(crate) const ROOT_BYTES: usize = ROOT_SIZE;
/// What an input has of a node whose middle is free: so much of its beginning…
pub(crate) const HEAD_BYTES: usize = 255;
/// …and so much of its end, where the records are.
pub(crate) const TAIL_BYTES: usize = 512;
/// In the first byte of a block: it is an inner node, not a leaf.
pub(crate) const INNER: u8 = 1;
/// In the first byte of a block: it holds the value of an attribute.
pub(crate) const VALUE: u8 = 4;
/// In the first byte of a block: all of it follows, instead of beginning and end.
pub(crate) const WHOLE: u8 = 2;
/// Blocks at most.
const BLOCKS: usize = 12;
/// Reads of one call at most: with so few blocks, more would be for ever.
const READS_MAX: u64 = 20_000;

#[derive(Debug)]
enum Stop {
    Tree,
    NoBlock,
}

impl From<TreeError> for Stop {
    fn from(_: TreeError) -> Self {
        Self::Tree
    }
}

/// Blocks 1, 2, … with right headers (mostly) and the given bodies.
struct Blocks {
    blocks: Vec<Box<Block>>,
    reads: Cell<u64>,
}

impl Blocks {
    fn new(mut data: &[u8], leaf: BlockKind, node: BlockKind) -> Self {
        let mut blocks = Vec::new();
        while let Some((says, rest)) = data.split_first()
            && blocks.len() < BLOCKS
        {
            let mut block: Box<Block> = Box::new([0; 4096]);
            let kind = match says & (INNER | VALUE) {
                0 => leaf,
                INNER => node,
                _ => BlockKind::XattrValue,
            };
            let owner = if says & 0xf0 == 0xf0 { Ino(8) } else { OWNER };
            init_block(&mut block, kind, owner, BlockNo(blocks.len() as u64 + 1));
            let whole = says & WHOLE != 0;
            let len = if whole {
                BLOCK_BODY_SIZE
            } else {
                HEAD_BYTES + TAIL_BYTES
            };
            let (body, rest) = rest.split_at(len.min(rest.len()));
            let (head, tail) = if whole {
                (body, &[][..])
            } else {
                body.split_at(HEAD_BYTES.min(body.len()))
            };
            block[BLOCK_HEADER_SIZE..BLOCK_HEADER_SIZE + head.len()].copy_from_slice(head);
            block[4096 - TAIL_BYTES..4096 - TAIL_BYTES + tail.len()].copy_from_slice(tail);
            blocks.push(block);
            data = rest;
        }
        Self {
            blocks,
            reads: Cell::new(0),
        }
    }
}

impl MetaRead for Blocks {
    type Error = Stop;

    fn read<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R, Stop> {
        self.reads.set(self.reads.get() + 1);
        assert!(self.reads.get() < READS_MAX, "it never ends");
        let at = block.0.checked_sub(1).ok_or(Stop::NoBlock)?;
        let block = self.blocks.get(at as usize).ok_or(Stop::NoBlock)?;
        Ok(f(block))
    }
}

/// Sees faults and does nothing.
struct Nobody;

impl CheckVisitor<Stop> for Nobody {
    fn block(&mut self, _: BlockNo, _: BlockKind) {}
    fn fault(&mut self, _: TreeError) {}
    fn unreadable(&mut self, _: BlockNo, _: Stop) {}
}

/// A file's extents.
pub fn extent_nodes(data: &[u8]) -> bool {
    let Some((root, rest)) = data.split_at_checked(ROOT_BYTES) else {
        return false;
    };
    let Ok(root) = TreeRoot::read_from_bytes(root) else {
        return false;
    };
    let blocks = Blocks::new(rest, BlockKind::ExtentLeaf, BlockKind::ExtentNode);
    let tree = ExtentTree::of(OWNER);
    let all = FileBlock(0)..FileBlock(FILE_BLOCKS_MAX);
    let mut end = 0;
    let walked = tree.for_each(&blocks, &root, all, |extent| {
        assert!(
            extent.file_block.0 >= end && extent.len > 0,
            "extents out of order"
        );
        end = extent.end().0;
        ControlFlow::Continue(())
    });
    let taken = walked.is_ok() && end > 0;
    blocks.reads.set(0);
    for at in [0, 1, 77, end, u64::MAX >> 20] {
        let _ = tree.lookup(&blocks, &root, FileBlock(at));
    }
    let _ = tree.counts(&root);
    blocks.reads.set(0);
    tree.check(&blocks, &root, &mut Nobody, |_| {});
    taken
}

/// A directory's names and an inode's attributes.
pub fn dir_nodes(data: &[u8]) -> bool {
    let Some((root, rest)) = data.split_at_checked(ROOT_BYTES) else {
        return false;
    };
    let mut taken = false;
    if let Ok(root) = DirRoot::read_from_bytes(root) {
        let blocks = Blocks::new(rest, BlockKind::DirLeaf, BlockKind::DirNode);
        let tree = Directory::of(OWNER, HASH);
        let mut last = None;
        let _ = tree.for_each(&blocks, &root, 0, |cookie, entry| {
            assert!(
                last < Some(cookie) && !entry.name.is_empty(),
                "names out of order"
            );
            last = Some(cookie);
            ControlFlow::Continue(())
        });
        taken |= last.is_some();
        blocks.reads.set(0);
        let _ = tree.lookup(&blocks, &root, b"name");
        tree.check(&blocks, &root, &mut Nobody, |_, _| {});
    }
    if let Ok((root, _)) = XattrRoot::read_from_prefix(root) {
        let blocks = Blocks::new(rest, BlockKind::XattrLeaf, BlockKind::XattrNode);
        let tree = Xattrs::of(OWNER, HASH);
        if let Ok(names) = tree.list(&blocks, &root) {
            for (name, _) in names.iter().take(4) {
                taken |= tree.get(&blocks, &root, name).is_ok_and(|value| value.is_some());
            }
        }
        blocks.reads.set(0);
        tree.check(&blocks, &root, &mut Nobody, |_, _| {});
    }
    taken
}
