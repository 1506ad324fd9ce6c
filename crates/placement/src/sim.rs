//! A simulator of devices, on which policies are compared. Deterministic: one seed, one result.
//!
//! - [`models`]: named devices of the papers and present-day ones.
//! - [`device`]: a device with channels, a queue, seeks and stalls.
//! - [`load`]: processes that read and write, in phases.
//! - [`World`]: devices, a map of units, a policy, the mover; foreground before background.
//!
//! It knows no file system: no log, no cache (unless configured), no metadata. Its results for a policy hold
//! for the traffic that reaches the devices.

pub mod device;
pub mod load;
pub mod loads;
mod map;
pub mod models;
mod report;
mod world;
mod writes;

pub use load::{Load, Phase, Request, Stream};
pub use map::Map;
pub use report::{Report, Second};
pub use world::{Fault, Jobs, Options, World};
pub use writes::{Writes, WritesReport};
