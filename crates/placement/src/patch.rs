//! Writes smaller than a block that fetch nothing: the pure half (paper: Non-blocking Writes to Files).
//!
//! A block that is partly overwritten keeps its old copy (*lower*) in place and gets *patches* over it, byte
//! ranges in NVM. The block is fetched and merged later, or never ([`Fetching`]). [`PatchedBlock`] is the
//! state of one block: each change of it is one transaction of the store, so a crash leaves the state before
//! or after. [`PatchPool`] decides when blocks are fetched, within a limit of memory.
//!
//! Invariants:
//! - patches of a block are disjoint and not adjacent, so they have no order among each other;
//! - patches never cover a whole block: then there is no lower, and nothing to fetch;
//! - a fetch and a move count only if the lower that they read is still the block's lower, by its version;
//! - a merge includes the patches that it read; bytes written since stay as patches over the new lower;
//! - the lower's checksum stays as it is; each patch has its own.
//!
//! It knows no extent tree and no device: `Lower` is the caller's name of a copy.

mod block;
mod pool;

pub use block::{Change, Fetch, Patch, PatchRead, PatchedBlock, Stale};
pub use pool::{Fetching, PatchPool, PatchStats, Why, Wrote};

#[cfg(test)]
mod explore;
