//! The digest: a session's log, read through a region, takes effect in the shared area, one store transaction
//! after another.
//!
//! [`SessionLog`] finds entries, [`digest`] validates, folds and carries them out; [`apply_forwarded`] does
//! the same for one operation that the daemon does for a client. What counts and in which order is
//! `varve_digest`'s; how blocks and trees change is the store's; who holds what is the leases'. Exactly once:
//! the record that changes the shared area also says how far the log is digested.

mod allocation;
mod commit;
mod deferred;
mod execute;
mod forwarded;
mod log;
pub(crate) mod pipeline;
pub(crate) mod queue;
#[cfg(test)]
mod tests;
mod types;
mod view;

pub use crate::placement::{Hierarchy, Placement};
pub use allocation::{Spent, blocks_missing};
pub use commit::{Digested, Freed, digest, free_orphans};
pub use forwarded::{ForwardError, apply_forwarded, find_named};
pub use log::SessionLog;
pub use types::{Applied, Client, Environment, Leases, Source, rights};
pub use varve_digest::{Batch, BatchLimit, GatherLimits, SealScan};
