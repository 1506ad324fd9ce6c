//! Trees in blocks that anybody may have written.

use std::cell::Cell;
use std::ops::ControlFlow;
use varve_extent_tree::{CheckVisitor, Directory, ExtentTree, MetaRead, TreeError, Xattrs};
use varve_format::{
    BLOCK_HEADER_SIZE, Block, BlockKind, BlockNo, DirRoot, FILE_BLOCKS_MAX, FileBlock, HashKey, Ino,
    TreeRoot, XattrRoot, init_block,
};
use zerocopy::FromBytes;

const OWNER: Ino = Ino(9);
/// Bytes of the root in front of the blocks.
const ROOT_BYTES: usize = 96;
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
    fn new(data: &[u8], leaf: BlockKind, node: BlockKind) -> Self {
        let bodies = data.chunks(BLOCK_BYTES).take(BLOCKS).enumerate();
        let blocks = bodies.map(|(index, body)| {
            let mut block: Box<Block> = Box::new([0; 4096]);
            // The first byte says what the block says to be.
            let says = body.first().copied().unwrap_or(0);
            let kind = if says & 1 == 0 { leaf } else { node };
            let owner = if says & 0xf0 == 0xf0 { Ino(8) } else { OWNER };
            init_block(&mut block, kind, owner, BlockNo(index as u64 + 1));
            let body = &body[1.min(body.len())..];
            block[BLOCK_HEADER_SIZE..BLOCK_HEADER_SIZE + body.len()].copy_from_slice(body);
            block
        });
        Self {
            blocks: blocks.collect(),
            reads: Cell::new(0),
        }
    }
}

/// A small block's worth: most of a node is free space, which would only be zeros in the input.
const BLOCK_BYTES: usize = 512;

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
pub fn extent_nodes(data: &[u8]) {
    let Some((root, rest)) = data.split_at_checked(ROOT_BYTES) else {
        return;
    };
    let Ok((root, _)) = TreeRoot::read_from_prefix(root) else {
        return;
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
    let _ = walked;
    blocks.reads.set(0);
    for at in [0, 1, 77, end, u64::MAX >> 20] {
        let _ = tree.lookup(&blocks, &root, FileBlock(at));
    }
    let _ = tree.counts(&root);
    blocks.reads.set(0);
    tree.check(&blocks, &root, &mut Nobody, |_| {});
}

/// A directory's names and an inode's attributes.
pub fn dir_nodes(data: &[u8]) {
    let Some((root, rest)) = data.split_at_checked(ROOT_BYTES) else {
        return;
    };
    if let Ok((root, _)) = DirRoot::read_from_prefix(root) {
        let blocks = Blocks::new(rest, BlockKind::DirLeaf, BlockKind::DirNode);
        let tree = Directory::of(OWNER, HashKey([3; 16]));
        let mut last = None;
        let _ = tree.for_each(&blocks, &root, 0, |cookie, entry| {
            assert!(
                last < Some(cookie) && !entry.name.is_empty(),
                "names out of order"
            );
            last = Some(cookie);
            ControlFlow::Continue(())
        });
        blocks.reads.set(0);
        let _ = tree.lookup(&blocks, &root, b"name");
        tree.check(&blocks, &root, &mut Nobody, |_, _| {});
    }
    if let Ok((root, _)) = XattrRoot::read_from_prefix(root) {
        let blocks = Blocks::new(rest, BlockKind::XattrLeaf, BlockKind::XattrNode);
        let tree = Xattrs::of(OWNER, HashKey([3; 16]));
        if let Ok(names) = tree.list(&blocks, &root) {
            for (name, _) in names.iter().take(4) {
                let _ = tree.get(&blocks, &root, name);
            }
        }
        blocks.reads.set(0);
        tree.check(&blocks, &root, &mut Nobody, |_, _| {});
    }
}
