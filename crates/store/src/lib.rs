//! The shared area of a Varve pool: journal, space, inodes, directories, data.
//!
//! A [`Store`] is one pool, opened by one process. Everything that changes goes through a [`Tx`]: it writes new blocks into free space, and
//! commits by one record in the metadata journal (physical redo: NVM blocks, byte ranges, new bytes). The order is fixed in one place
//! (`core.rs`): new blocks written and synced; record written and synced; ranges put in place; and, before the record's journal space is used
//! again, what was put in place synced.
//!
//! Metadata lies in NVM, but for what was not used for long while there is little room: that lies on slower tiers (`cold.rs`), each block as it
//! was written there, until it is brought back to be changed.
//!
//! # Invariants
//! - A block in use is never written, except for metadata, through the journal. Data is copy-on-write.
//! - A freed block is given out again only when its freeing is durable; metadata: when the journal's tail has passed it; data: when no reader
//!   can hold it ([`Store::set_reader_horizon`]).
//! - A transaction that is dropped leaves media (as far as anything refers to it) and DRAM as they were.
//! - A failed persist latches the pool read-only.
#![forbid(unsafe_code)]

mod bytes;
mod cache;
pub mod check;
mod cold;
mod core;
mod data;
mod error;
mod journal;
mod layout;
mod lens;
mod mkfs;
mod numbers;
mod read;
pub mod repair;
mod rows;
pub mod seeded;
mod space;
mod store;
mod tx;
mod types;

pub use bytes::{Bytes, Fetch, NotFetched};
pub use cold::CoolingStats;
pub use error::{Result, StoreError};
pub use store::Store;
pub use tx::Tx;
pub use types::{
    DataTarget, Devices, DirItem, MkfsOptions, OpenOptions, OpenReport, Pass, Passes, PendingFrees,
    SpaceStats, TierIo, TierStats, Watches,
};
pub use varve_extent_tree::Progress;
pub use varve_format::inode::{Content, Inode, InodeSlot};
pub use varve_format::session::{GrantRow, SessionRow, SessionState};

/// Room in the journal record for one small operation, in bytes: begin none with less [`Tx::room`].
pub const OP_ROOM: u64 = 24 << 10;

#[cfg(test)]
mod tests;
