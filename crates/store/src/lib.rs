//! The shared area of a Varve pool: journal, space, inodes, directories, data.
//!
//! A [`Store`] is one pool, opened by one process. Every change goes through a [`Tx`]: it writes new blocks
//! into free space, and commits by one record in the metadata journal (physical redo: NVM blocks, byte
//! ranges, new bytes). The order is fixed in one place (`tx/commit.rs`): new blocks written and synced;
//! record written and synced; ranges put in place; and, before the record's journal space is reused, the
//! ranges in place synced.
//!
//! Metadata lies in NVM. When room is scarce, metadata that was not used recently moves to slower tiers
//! (`demotion.rs`), where its blocks are read but never changed; they return to NVM to be changed.
//!
//! # Invariants
//! - A block in use is never written, except for metadata, through the journal, and for data that a log
//!   redoes after a crash (`tx/in_place.rs`). Other data is copy-on-write.
//! - A freed block is given out again only when its freeing is durable; metadata: when the journal's tail has
//!   passed it; data: when no reader can hold it ([`Store::set_reader_horizon`]).
//! - A transaction that is dropped leaves media (as far as anything refers to it) and DRAM as they were.
//! - A failed persist latches the pool read-only.
#![forbid(unsafe_code)]

mod cache;
pub mod check;
mod demotion;
mod devices;
mod error;
mod evacuation;
mod free_inodes;
mod journal;
mod layout;
mod mkfs;
mod payload;
mod pool;
mod reader;
pub mod repair;
pub mod seeded;
mod space;
mod tx;
mod types;

pub use demotion::DemotionStats;
pub use error::{Result, StoreError};
pub use evacuation::Recalled;
pub use journal::OP_ROOM;
pub use payload::{Payload, PayloadSource, PayloadUnavailable};
pub use pool::Store;
pub use pool::fetch::{Fetched, Unfetched, Wanted};
pub use tx::devices::{DeviceStatus, DeviceUse};
pub use tx::{Defragmented, ShareRange, Tx, Unshared, moved_blocks, staying_blocks};
pub use types::{
    DataTarget, Devices, DirItem, Emptied, JobRow, MappedPart, MkfsOptions, NumberedBlocks, OpenOptions,
    OpenReport, OwnedPart, Pass, Passes, PendingFrees, PoolMediaStats, SharedPart, SpaceStats, SummedPart,
    TierIo, TierStats,
};
pub use varve_extent_tree::Progress;
pub use varve_format::inode::{Content, Inode, InodeSlot};
pub use varve_format::session::{GrantRow, SessionRow, SessionState};

#[cfg(test)]
mod tests;
