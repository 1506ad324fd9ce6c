//! The digest: a session's log, read through a region, takes effect in the shared area, one store transaction
//! after another.
//!
//! [`SessionLog`] finds entries, [`digest`] validates, folds and executes them; [`apply_forwarded`] executes
//! one operation for a client. `varve_digest` decides which entries count and in which order; the store
//! changes blocks and trees; the leases know the holders. Exactly once: the record that changes the shared
//! area also advances the log's digested number.

mod ahead;
mod allocation;
mod commit;
mod dedupe;
mod deferred;
mod execute;
mod forwarded;
mod log;
mod permission;
pub(crate) mod pipeline;
pub(crate) mod queue;
mod share;
#[cfg(test)]
mod tests;
mod types;
mod unshared;
mod view;

pub use crate::placement::Placement;
pub(crate) use ahead::FETCH_BLOCKS;
pub use allocation::{Spent, blocks_missing};
pub(crate) use commit::free_tail;
pub use commit::{Digested, Freed, digest, free_orphans};
pub use dedupe::{count_pieces, dedupe};
pub use forwarded::{apply_forwarded, find_named};
pub use log::SessionLog;
pub use share::{SharedCount, count_shared};
pub use types::{Applied, Client, Environment, ForwardError, Leases, Source, rights};
pub use varve_digest::{Batch, BatchLimit, GatherLimits, SealScan};
