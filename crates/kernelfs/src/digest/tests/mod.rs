//! Digests on a simulated machine: a pool, a log that is written as LibFS writes it, leases that grant
//! everything.
#![allow(clippy::unwrap_used)]

mod ahead;
mod crash;
mod dedupes;
mod defrags;
mod forwarded;
mod logs;
mod machine;
mod shares;
mod unshares;
