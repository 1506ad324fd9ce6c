//! The pool state block: the counters and roots that change with transactions.

use crate::ROOT_SIZE;
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Body of the pool state block (after the block header).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PoolState {
    /// Number of the next session.
    pub next_session: U64,
    /// Number of the next lease.
    pub next_lease: U64,
    /// Blocks of the inode file.
    pub inode_blocks: U64,
    /// Inodes in use or reserved.
    pub inodes_used: U64,
    /// First inode of the orphan list, or 0.
    pub orphan_head: U64,
    /// Inodes in the orphan list.
    pub orphans: U64,
    /// Number plus one of the open unit of each tier; 0: none. NVM has none.
    pub open_unit: [U64; 3],
    /// Zero.
    pub reserved: [u8; 56],
    /// Root of the inode file's extent tree.
    pub inode_root: [u8; ROOT_SIZE],
}

/// Bytes of a [`PoolState`].
pub const POOL_STATE_SIZE: usize = 232;

const _: () = {
    assert!(size_of::<PoolState>() == POOL_STATE_SIZE);
    assert!(offset_of!(PoolState, inode_root) == 128);
};
