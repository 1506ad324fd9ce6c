//! The bytes of a Varve pool, version 1: identifiers, attributes, the update log, and every structure of the shared area.
//!
//! No I/O and no policy here: encode, parse, check. Everything is little-endian with explicit padding; sizes are asserted at
//! compile time; `docs/FORMAT.md` draws every byte.
#![forbid(unsafe_code)]

mod attr;
mod charge;
mod ids;
pub mod log;

pub use attr::{FileKind, InodeAttr, MODE_KIND_MASK, MODE_PERM_MASK, TimeNs};
pub use charge::charge;
pub use ids::{
    BLOCK_BYTES, BLOCK_SIZE, BlockNo, FILE_SIZE_MAX, FileBlock, Generation, Ino, InodeKey, LINK_MAX, LeaseNo,
    LogSeq, NAME_MAX, ROOT_INO, SEAL_MISSING_MAX, SYMLINK_MAX, Seal, SeqRange, SessionId, Tier, TxId,
    XATTR_VALUE_MAX,
};
pub use log::{EntryFlags, EntryHeader, EntryMeta, FallocateMode, LogOp, OpCode, SetAttr, SetAttrMask};
