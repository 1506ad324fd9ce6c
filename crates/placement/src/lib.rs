//! Placement of data on the devices of a pool.
//!
//! Everything here is pure: the clock is an argument, no call does I/O, and equal calls in equal order give
//! equal answers. The daemon (or the simulator, [`sim`]) measures, asks, and carries out.
//!
//! - [`figures`]: measured figures of each device: response times by size class, service times, queue depth,
//!   throughput.
//! - [`heat`]: read and write counters by unit, in bounded memory, aged.
//! - [`policy`]: the interface of policies, and the policies: [`policy::Hierarchy`], [`policy::Measured`],
//!   [`policy::Wardrop`], and fixed layouts to compare them with.
//! - [`mover`]: the queue of moves and the progress of each, as data that outlives a crash.
//! - [`rules`]: operators' rules about paths, with the reason for each result.
//! - [`patch`]: writes smaller than a block, kept as patches over it until it is fetched, overwritten or
//!   moved.
//!
//! It knows no inode, no extent tree, no device driver and no message.
#![forbid(unsafe_code)]

mod device;
pub mod figures;
pub mod heat;
pub mod mover;
pub mod patch;
pub mod policy;
pub mod rules;
#[cfg(feature = "sim")]
pub mod sim;
mod types;

pub use device::DeviceView;
pub use types::{Access, DeviceId, DeviceState, NewData, Op, UnitId, UnitSize};
pub use varve_format::Tier;
