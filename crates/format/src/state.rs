//! The pool state block: the counters and roots that change with transactions.

use crate::features::Incompat;
use crate::{BLOCK_BODY_SIZE, Features, MAP_ROOT_SIZE, ROOT_SIZE};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{I64, U16, U32, U64};
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
    /// A copy of the superblock's features, which reveals a stale superblock; zero before version 3.
    pub features: Features,
    /// Zero.
    pub reserved: [u8; 24],
    /// Root of the inode file's extent tree.
    pub inode_root: [u8; ROOT_SIZE],
    /// First number that no shared run has used.
    pub next_shared: U64,
    /// Root of the shared runs.
    pub shared: [u8; MAP_ROOT_SIZE],
    /// Number of the next snapshot.
    pub next_snapshot: U32,
    /// Zero.
    pub reserved1: U32,
    /// Root of the snapshots.
    pub snapshots: [u8; MAP_ROOT_SIZE],
    /// Root of the projects.
    pub projects: [u8; MAP_ROOT_SIZE],
    /// Number of the last job of an operator; 0: there was none.
    pub last_job: U64,
    /// The job that evacuates each tier, by tier number. A program that does not know it keeps it and does
    /// nothing for it.
    pub evacuations: [EvacuationRow; 3],
}

/// The job of an operator that moves all data off a tier, or off one device of it, and keeps new data away.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct EvacuationRow {
    /// Number of the job; 0: there is none.
    pub job: U64,
    /// Most bytes moved a second; 0: as fast as other moves.
    pub limit_bytes_per_s: U64,
    /// Bytes of data moved for it.
    pub moved_bytes: U64,
    /// When it was started, in nanoseconds since 1970.
    pub started_ns: I64,
    /// 1: an operator has paused it. Others count as 0: it runs.
    pub paused: u8,
    /// Number plus one of the row of the device that is emptied; 0: a whole tier is.
    pub device: U16,
    /// Zero.
    pub reserved: [u8; 5],
}

/// Bytes of an [`EvacuationRow`].
pub const EVACUATION_ROW_SIZE: usize = 40;
/// Rows of jobs that empty one device, after the [`PoolState`] in its block, in any order. Such a row counts
/// while the row of its device says [`DeviceRow::EMPTYING`](crate::device::DeviceRow::EMPTYING). A program that
/// does not know them keeps them.
pub const REMOVAL_ROWS: usize = 64;
/// Bytes of the body of the pool state's block in use: the state, and the rows after it.
pub const STATE_BODY_SIZE: usize = POOL_STATE_SIZE + REMOVAL_ROWS * EVACUATION_ROW_SIZE;

impl EvacuationRow {
    /// Whether there is a job.
    #[must_use]
    pub const fn is_job(&self) -> bool {
        self.job.get() != 0
    }

    /// Whether an operator has paused it.
    #[must_use]
    pub const fn is_paused(&self) -> bool {
        self.paused == 1
    }
}

impl PoolState {
    /// Whether a field is set of a feature that the pool does not have.
    #[must_use]
    pub fn has_stray_fields(&self) -> bool {
        let may_share = self.features.incompat.get() & Incompat::SHARED_EXTENTS.bits() != 0;
        let first = if may_share {
            offset_of!(Self, next_snapshot)
        } else {
            offset_of!(Self, next_shared)
        };
        self.as_bytes()[first..offset_of!(Self, last_job)]
            .iter()
            .any(|byte| *byte != 0)
    }
}

/// Bytes of a [`PoolState`].
pub const POOL_STATE_SIZE: usize = 448;

const _: () = {
    assert!(size_of::<PoolState>() == POOL_STATE_SIZE);
    assert!(offset_of!(PoolState, inode_root) == 128);
    assert!(offset_of!(PoolState, shared) == 240);
    assert!(offset_of!(PoolState, projects) == 296);
    assert!(offset_of!(PoolState, last_job) == 320);
    assert!(offset_of!(PoolState, evacuations) == 328);
    assert!(size_of::<EvacuationRow>() == EVACUATION_ROW_SIZE);
    assert!(offset_of!(EvacuationRow, device) == 33);
    assert!(STATE_BODY_SIZE <= BLOCK_BODY_SIZE);
};
