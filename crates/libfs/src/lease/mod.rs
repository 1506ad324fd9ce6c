//! Leases of one session: which inodes it may read and change, who uses them right now, and how they are
//! taken and given back. Knows nothing of names, data and logs.
//!
//! # Who waits for whom
//! Three parties: *requests* (threads of the program or the shim), the session's *worker* (one thread reads
//! upcalls, one carries them out), the *daemon*.
//!
//! - A request **pins** the leases of all its inodes, then takes its log slot, then the inode locks, in inode
//!   order. While it waits for `Acquire` it holds no pin, no slot and no lock. While it holds pins it calls
//!   the daemon only for what never waits for another session's lease: `Lookup`, `ReadDir`, `ReadLink`,
//!   `Xattrs`, `MapExtents`, `ReadData`, `AllocInodes`, `Reserve`, `GrowLog`, `Digest`. So every pin ends
//!   without another session's help.
//! - The **worker** waits for pins to end (an event, not a blocked thread: one slow inode does not hold up
//!   the others) and for the daemon's `Release`, which digests this session's own log and needs nothing of
//!   us: numbers are committed as soon as they are given out. It takes no lock that a request holds while it
//!   talks to the daemon.
//! - The **daemon** waits for the worker, within `lease_ms`.
//!
//! Hence no cycle: request → daemon → other session's worker → other session's pins → daemon (own log only).
//!
//! - **The kernel above a shim** is a fourth party: dropping its pages waits for calls that it has locked
//!   pages for. So that wait is a thread of its own, and meanwhile the lease stays usable: calls that it
//!   suffices for go on (those that touch data are noticed, and the pages are dropped once more after them;
//!   after some rounds all wait). A call that needs *more* than the lease that is being given back waits with
//!   its page locked: the drop goes around that page, which shows nobody anything. See [`above`] and
//!   `docs/adr/0015-*`.
//! - **A fresh grant is used once**: a request pins what it was granted even when the daemon wants it back
//!   already, so that two sessions that take a file from each other both get on. The daemon answers `Forward`
//!   when that happens too often; then the request gives its own leases on the inodes back and lets the
//!   daemon do the operation.
//!
//! A lease is known by its number. Numbers grow, so an answer that is overtaken by a revocation is told by
//! its number.

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

pub(crate) use node::{Node, Use, Xattrs};
pub(crate) use recall::{Event, Recalls, Surroundings};
pub(crate) use table::{AT_ONCE, Leases, Pin, Pins, SlotPin};
