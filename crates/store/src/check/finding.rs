//! The findings of a check.

use varve_format::{BlockNo, FileKind, Ino, InodeKey, Tier};

/// A fault of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// A tree or block is damaged; the walk left out everything below it (whose blocks may show as `Leaked`).
    Tree {
        /// Inode whose tree it is; 0: the inode file.
        owner: Ino,
        /// The block, if it is one that cannot be read.
        block: Option<BlockNo>,
        /// Description of the fault.
        what: String,
    },
    /// An inode image is damaged.
    Image {
        /// Inode.
        ino: Ino,
        /// Description of the fault.
        what: String,
    },
    /// A fixed block or row is damaged or contradicts another.
    Table {
        /// Description of the fault.
        what: String,
    },
    /// A block is in use that lies on no tier, or is a fixed one.
    OutOfBounds {
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// User.
        owner: Ino,
    },
    /// A block in use whose bit is not set.
    NotMarked {
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// User; 0: the inode file.
        owner: Ino,
    },
    /// Blocks whose bits are set but that have no user.
    Leaked {
        /// Tier.
        tier: Tier,
        /// First block.
        block: BlockNo,
        /// Blocks.
        len: u64,
    },
    /// A second user of a block.
    Shared {
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// The second user.
        owner: Ino,
    },
    /// The allocator would give out a block in use, or never gives out a free one.
    Allocator {
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// Whether its bit is set on media.
        used: bool,
    },
    /// A name whose inode is not in use, or has another generation or kind.
    Dangling {
        /// Directory.
        dir: Ino,
        /// Name.
        name: Vec<u8>,
        /// The inode that it names.
        key: InodeKey,
    },
    /// A link count that is not the number of names (for a directory: 2 and its subdirectories).
    LinkCount {
        /// Inode.
        ino: Ino,
        /// In the image.
        stored: u32,
        /// By the names.
        found: u32,
    },
    /// A directory with more than one name.
    DirTwice {
        /// The directory.
        ino: Ino,
        /// Second parent.
        dir: Ino,
    },
    /// A directory whose parent pointer is wrong.
    Parent {
        /// The directory.
        ino: Ino,
        /// In the image.
        stored: Ino,
        /// By its name.
        found: Ino,
    },
    /// An inode that no path from the root leads to, and that is not in the orphan list.
    Lost {
        /// Inode.
        ino: Ino,
        /// Its kind.
        kind: FileKind,
    },
    /// The orphan list is broken.
    Orphans {
        /// Description of the fault.
        what: String,
    },
    /// A counter of the pool is wrong.
    Counter {
        /// The unit of the counter.
        what: &'static str,
        /// On media.
        stored: u64,
        /// Found.
        found: u64,
    },
    /// A size that contradicts the kind or content of the inode.
    Size {
        /// Inode.
        ino: Ino,
        /// In the image, in bytes.
        stored: u64,
    },
    /// A part of a shared run whose count is not the number of extents that name it.
    References {
        /// First number of the shared space.
        first: u64,
        /// Blocks.
        len: u64,
        /// In the tree of the shared runs.
        stored: u32,
        /// Extents that name it.
        found: u32,
    },
    /// An extent names a number of the shared space that no run has.
    NoRun {
        /// File.
        ino: Ino,
        /// The number.
        number: u64,
    },
    /// A data block does not have its checksum.
    Data {
        /// File.
        ino: Ino,
        /// Tier.
        tier: Tier,
        /// Block.
        block: BlockNo,
        /// Description of the fault.
        what: String,
    },
}
