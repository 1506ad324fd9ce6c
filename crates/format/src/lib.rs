//! The bytes of a Varve pool, version 1: identifiers, attributes, the update log, and every structure of the
//! shared area.
//!
//! No I/O and no policy here: encode, parse, check. Everything is little-endian with explicit padding; sizes
//! are asserted at compile time; `docs/reference/format.md` draws every byte.
#![forbid(unsafe_code)]

mod attr;
pub mod block;
mod charge;
pub mod dax;
pub mod device;
mod dirent;
mod extent;
pub mod features;
mod ids;
pub mod inode;
pub mod journal;
pub mod log;
mod node;
mod pin;
pub mod seeded;
pub mod session;
pub mod space;
pub mod state;
pub mod superblock;

pub use attr::{FileKind, InodeAttr, MODE_KIND_MASK, MODE_PERM_MASK, TimeNs, is_whiteout};
pub use block::{
    BLOCK_BODY_SIZE, BLOCK_HEADER_SIZE, BLOCK_MAGIC, Block, BlockHeader, BlockKind, HeaderFault, init_block,
    move_block, seal_block, sum_of_metadata, verify_block,
};
pub use charge::{charge, charge_write};
pub use dirent::{
    COOKIE_MIN, DirRoot, Dirent, HashKey, MAP_ROOT_SIZE, NameFault, ORDINAL_BITS, ORDINALS, SharedRoot,
    XATTR_BLOCKS_MAX, XATTR_INLINE_MAX, XattrRecord, XattrRoot, XattrValue, file_kind_from_u8,
    file_kind_to_u8, siphash24,
};
pub use extent::{
    EXTENT_VALUE_SIZE, Extent, ExtentFault, ExtentFlags, ExtentValue, FILE_BLOCKS_MAX, INLINE_EXTENTS,
    ROOT_SIZE, RootFault, SHARED_REFS_MAX, SHARED_VALUE_SIZE, SharedRun, SharedValue, TIER_BLOCKS_MAX,
    TREE_HEIGHT_MAX, Top, TreeCounts, TreeForm, TreeRoot,
};
pub use features::Features;
pub use ids::{
    BLOCK_BYTES, BLOCK_SIZE, BlockNo, DIR_SIZE, FILE_SIZE_MAX, FileBlock, Generation, INO_BITS, Ino,
    InodeKey, LINK_MAX, LeaseNo, LogSeq, NAME_MAX, ROOT_INO, SEAL_MISSING_MAX, SYMLINK_MAX, Seal, SeqRange,
    SessionId, Tier, TxId, XATTR_CAPABILITY, XATTR_VALUE_MAX,
};
pub use log::{EntryFlags, EntryHeader, EntryMeta, FallocateMode, LogOp, OpCode, SetAttr, SetAttrMask};
pub use node::{NODE_CAPACITY, NodeFault, NodeMut, NodeRef, RECORD_OVERHEAD};
pub use pin::{Pin, PinTo, PinnedBy};
pub use session::LastForwarded;
