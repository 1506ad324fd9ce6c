//! Errors of a tree: faults on the medium, and bad requests.

use varve_format::{BlockKind, BlockNo, ExtentFault, HeaderFault, Ino, NameFault, RootFault};

/// An error of a tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// A block contradicts its parent.
    #[error("tree of inode {owner}, block {block}: {fault}")]
    Corrupt {
        /// Inode of the tree.
        owner: Ino,
        /// The block.
        block: BlockNo,
        /// The fault.
        fault: Fault,
    },
    /// The root in the inode image is not valid.
    #[error("root in inode {owner}: {fault}")]
    Root {
        /// Inode of the tree.
        owner: Ino,
        /// The fault.
        fault: Fault,
    },
    /// The name is there already.
    #[error("name exists")]
    Exists,
    /// The name is not there.
    #[error("no such name")]
    NotFound,
    /// More than 32,768 names share one hash.
    #[error("too many names share one hash")]
    HashFull,
    /// A name or a value out of bounds was passed in.
    #[error("bad argument: {0}")]
    BadName(NameFault),
    /// An extent or a range out of bounds was passed in.
    #[error("bad argument: {0}")]
    BadExtent(ExtentFault),
    /// Extents passed in overlap, are out of order, or lie outside the range that they replace.
    #[error("bad argument: extent at file block {0} is out of order or range")]
    BadOrder(u64),
    /// A shared run has as many references as it can have.
    #[error("shared run at {0} has as many references as a run can have")]
    References(u64),
    /// A tree cannot grow any higher.
    #[error("tree of inode {0} is full")]
    TooHigh(Ino),
}

impl TreeError {
    /// Returns whether the medium is damaged, as opposed to a bad request.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::Root { .. })
    }
}

/// A fault of a block or a root.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The header.
    #[error(transparent)]
    Header(#[from] HeaderFault),
    /// The layout of the node.
    #[error(transparent)]
    Node(#[from] varve_format::NodeFault),
    /// An extent.
    #[error(transparent)]
    Extent(#[from] ExtentFault),
    /// A directory entry or an attribute, or the root of such.
    #[error(transparent)]
    Name(#[from] NameFault),
    /// The root of an extent tree.
    #[error(transparent)]
    TreeRoot(#[from] RootFault),
    /// A node at the wrong level.
    #[error("level is {found}, expected {expected}")]
    Level {
        /// In the node.
        found: u8,
        /// By its place under the root.
        expected: u8,
    },
    /// A node without records.
    #[error("node is empty")]
    Empty,
    /// A key outside the bounds in the parent, or not above its neighbour.
    #[error("key {key:#x} of record {index} is out of order or bounds")]
    Order {
        /// Which record.
        index: usize,
        /// Its key.
        key: u64,
    },
    /// Two extents map the same file block.
    #[error("extent at file block {0} overlaps its predecessor")]
    Overlap(u64),
    /// An extent names a number of the shared space that no run has.
    #[error("number {0} of the shared space is in no run")]
    NoRun(u64),
    /// An entry's key does not belong to its name.
    #[error("hash {found:#x} of the entry is not its name's, {expected:#x}")]
    Hash {
        /// In the key.
        found: u64,
        /// Of the name.
        expected: u64,
    },
    /// A name that occurs twice.
    #[error("a name occurs twice under hash {0:#x}")]
    DuplicateName(u64),
    /// A pointer names a tier that does not exist.
    #[error("node pointer {0:#x} names no tier")]
    Pointer(u64),
    /// A block is reached twice.
    #[error("block is reached twice")]
    Shared,
    /// A counter in the root is wrong.
    #[error("root counts {counted} {what}, the tree has {found}")]
    Count {
        /// The unit of the counter.
        what: &'static str,
        /// In the root.
        counted: u64,
        /// In the tree.
        found: u64,
    },
}

/// Receives the results of a tree walk for `fsck`. `E` is the error type of the block I/O.
pub trait CheckVisitor<E> {
    /// Reports that `block` belongs to the tree.
    fn block(&mut self, block: BlockNo, kind: BlockKind);
    /// Reports a fault; the walk continues without the nodes below it.
    fn fault(&mut self, error: TreeError);
    /// Reports a block of the tree that could not be read (bad checksum, device error); the walk continues
    /// without it.
    fn unreadable(&mut self, block: BlockNo, error: E);
}
