//! Leases of one session: the inodes that it may read and change, their current users, and how leases are
//! taken and given back. Knows nothing of names, data and logs.
//!
//! # Waits between the parties
//! Three parties: *requests* (threads of the program or the shim), the session's *worker* (one thread reads
//! upcalls, one carries them out), the *daemon*.
//!
//! - A request **pins** the leases of all its inodes, then takes its log slot, then the inode locks, in inode
//!   order. While it waits for `Acquire` it holds no pin, no slot and no lock. While it holds pins it sends
//!   the daemon only requests that never wait for another session's lease: `Lookup`, `ReadDir`, `ReadLink`,
//!   `Xattrs`, `MapExtents`, `MapFiles`, `Owners`, `Checksums`, `ReadData`, `AllocInodes`, `Reserve`,
//!   `GrowLog`, `Digest`. So every pin ends without another session's help.
//! - The **worker** waits for pins to end (an event, not a blocked thread: one slow inode does not hold up
//!   the others) and for the daemon's `Release`, which digests this session's own log and needs nothing of
//!   the session: numbers are committed as soon as they are given out. The worker takes no lock that a
//!   request holds across a call to the daemon.
//! - The **daemon** waits for the worker, within `lease_ms`.
//!
//! Hence no cycle: request → daemon → other session's worker → other session's pins → daemon (own log only).
//!
//! - **The kernel above a shim** is a fourth party: when it drops its pages, it waits for calls that hold
//!   page locks. So the wait is on a thread of its own, and meanwhile the lease stays usable: calls for which
//!   it suffices go on (those that touch data are noted, and the pages are dropped once more after them;
//!   after [some rounds](recall) all calls wait). A call that needs *more* than the lease that is being given
//!   back waits with its page locked: the drop skips that page, which no reader can see. See
//!   [`pages`](crate::kernel_cache::pages) and `docs/adr/0015-*`.
//!   `docs/adr/0015-*`.
//! - **A fresh grant is used once**: a request pins its granted leases even if the daemon has already
//!   recalled them, so that two sessions that take a file from each other both make progress. If that happens
//!   too often, the daemon answers `Forward`; then the request gives its own leases on the inodes back and
//!   lets the daemon do the operation.
//!
//! A lease is identified by its number. Numbers grow, so an answer that was overtaken by a recall is
//! recognised by its number.

mod forward;
#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
mod listed;
mod node;
mod prefetch;
mod recall;
mod table;
#[cfg(test)]
mod tests;
mod told;

pub(crate) use node::{Node, Use, Xattrs};
pub(crate) use recall::{Event, Recalls, Surroundings};
pub(crate) use table::{AT_ONCE, Leases, Pin, Pins, SlotPin};
pub(crate) use told::Appetite;
