//! LibFS and KernelFS in one process: the same API as over the daemon, without a daemon.
//!
//! [`Embedded`] is a pool's daemon as an object; its [`connector`](Embedded::connector) goes into
//! [`varve_libfs::Fs::mount`]. Any number of sessions may be open at once. Background work runs in threads
//! ([`Embedded::start`]) or, for deterministic tests, when [`tick`](Embedded::tick) is called.
#![forbid(unsafe_code)]

mod embedded;
mod host;
mod sim;

pub use embedded::Embedded;
pub use host::PoolHere;
pub use sim::{SimPool, power_cut_logs};
